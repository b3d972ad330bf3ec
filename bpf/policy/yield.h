/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Directed yields: may the sibling that KVM offers run in the place of a vCPU that spins?
 * Pure functions. Not here: which vCPU has to answer an interrupt (ipi.h).
 */
#ifndef COHORT_POLICY_YIELD_H
#define COHORT_POLICY_YIELD_H

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

#endif /* COHORT_POLICY_YIELD_H */
