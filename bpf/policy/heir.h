/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * A vCPU that wakes a sibling and sleeps soon after, as the ends of a pipe do, leaves
 * its own CPU to it: to run the sibling on another one, from which somebody has to
 * go first, costs more than that moment. One that goes on, as who spins for an
 * answer, needs the sibling beside itself. Which it will do is not known when it
 * wakes the sibling; what it mostly did before is. Pure functions.
 */
#ifndef COHORT_POLICY_HEIR_H
#define COHORT_POLICY_HEIR_H

#include "average.h"

enum heir_consts {
	HANDOVER_ONE = 256, /* it always did */
	HANDOVER_MOSTLY = 192, /* of HANDOVER_ONE: it will */
	HANDOVER_SOON_PART = 16, /* of a slice: it sleeps soon */
};

/* Did a vCPU that slept @after_ns after it had woken a sibling leave it its CPU? KVM
 * may have polled for work in between, up to 200 us unless set otherwise. */
static inline bool handed_over(u64 after_ns, u64 slice_ns)
{
	return after_ns < slice_ns / HANDOVER_SOON_PART;
}

/* How often a vCPU leaves its CPU to whom it wakes (of HANDOVER_ONE), on average,
 * after one more time at which it @did. */
static inline u32 handovers(u32 average, bool did)
{
	return moving_average(average, did ? HANDOVER_ONE : 0);
}

/* Will it, then? */
static inline bool hands_over(u32 average)
{
	return average >= HANDOVER_MOSTLY;
}

#endif /* COHORT_POLICY_HEIR_H */
