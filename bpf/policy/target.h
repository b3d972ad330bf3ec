/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Directed yields: which sibling runs in the place of a vCPU that spins, and whether it
 * may. Pure functions. Not here: which vCPU has to answer an interrupt (ipi.h).
 */
#ifndef COHORT_POLICY_TARGET_H
#define COHORT_POLICY_TARGET_H

/* Why a ready sibling should run, the better reason the higher. */
enum target_rank {
	TARGET_NONE = 0,
	TARGET_READY, /* it waits for a CPU */
	TARGET_OFFERED, /* KVM thinks so */
	TARGET_KERNEL, /* it was preempted in guest kernel mode */
	TARGET_INTERRUPT, /* an interrupt waits for it */
	TARGET_RECEIVER, /* the yielder waits for its answer, or for one it waits for */
};

/* What is known of a ready sibling. */
struct target_facts {
	bool receiver; /* it ends the chain of IPIs that starts at the yielder */
	bool interrupt; /* it has an interrupt pending */
	bool kernel; /* it was in guest kernel mode when it was preempted */
	bool offered; /* KVM offers it */
};

/*
 * Guest user mode is no reason against a sibling: one that got an interrupt
 * there answers it as soon as it runs. KVM's own candidate has passed KVM's
 * tests for one that may hold what the yielder waits for, so it comes before
 * those of which nothing is known.
 */
static inline enum target_rank target_rank(const struct target_facts *facts)
{
	if (facts->receiver)
		return TARGET_RECEIVER;
	if (facts->interrupt)
		return TARGET_INTERRUPT;
	if (facts->kernel)
		return TARGET_KERNEL;
	return facts->offered ? TARGET_OFFERED : TARGET_READY;
}

/* Does a candidate replace the best one so far? Among equals KVM's own stays, as
 * it goes round all siblings; else the first in the VM's order. */
static inline bool target_replaces(enum target_rank rank, bool offered,
				   enum target_rank best)
{
	return rank > best || (rank == best && offered);
}

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

#endif /* COHORT_POLICY_TARGET_H */
