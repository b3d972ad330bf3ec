/* SPDX-License-Identifier: GPL-2.0-only */
/* Every policy header, for the native build. */
#include "intf.h"
#include "policy/balance.h"
#include "policy/plan.h"
#include "policy/rest.h"
#include "policy/fair.h"
#include "policy/halt.h"
#include "policy/ipi.h"
#include "policy/wake.h"
#include "policy/yield.h"
