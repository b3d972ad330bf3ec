/* SPDX-License-Identifier: GPL-2.0-only */
/* Every policy header, for the native build. */
#include "intf.h"
#include "policy/average.h"
#include "policy/balance.h"
#include "policy/cohort.h"
#include "policy/deboost.h"
#include "policy/fair.h"
#include "policy/heir.h"
#include "policy/ipi.h"
#include "policy/skew.h"
#include "policy/target.h"
#include "policy/wake.h"
