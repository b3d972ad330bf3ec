/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Directed yields: may the vCPU that KVM offers run in the yielder's place, and
 * for how long. Pure functions. Not here: the ranking of other siblings by what
 * they wait for, which needs the observer.
 */
#ifndef COHORT_POLICY_TARGET_H
#define COHORT_POLICY_TARGET_H

/* What is known of an offer when KVM makes it. */
struct yield_offer {
	bool sibling; /* both are threads of one VM */
	bool ready; /* the target waits in a queue */
	bool allowed; /* its affinity allows the yielder's CPU */
	bool throttled; /* the VM has used up its cap */
};

enum { YIELD_ACCEPT = -1 };

/* YIELD_ACCEPT, or the first reason (enum yield_miss) against it. */
static inline s32 yield_verdict(const struct yield_offer *offer)
{
	if (!offer->sibling)
		return YIELD_MISS_NOT_SIBLING;
	if (!offer->ready)
		return YIELD_MISS_NOT_READY;
	if (offer->throttled)
		return YIELD_MISS_THROTTLED;
	if (!offer->allowed)
		return YIELD_MISS_AFFINITY;
	return YIELD_ACCEPT;
}

/*
 * The slice (ns) that a yield at @now lends to its target: what is left of the
 * turn that lasts until @until, so that the VM as a whole runs no longer than
 * it would have and no neighbour pays, however often its vCPUs hand the CPU to
 * each other. 0: the turn is over, and the target is the first that the VM runs
 * in its next one.
 */
static inline u64 loan_slice(u64 now, u64 until, u64 slice_ns)
{
	u64 left_ns = until - now;

	if ((s64)left_ns <= 0)
		return 0;
	return left_ns < slice_ns ? left_ns : slice_ns;
}

#endif /* COHORT_POLICY_TARGET_H */
