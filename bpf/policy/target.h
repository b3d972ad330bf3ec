/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Directed yields: which sibling runs in a waiting vCPU's place, may it, and for
 * how long. Pure functions. Not here: whom an unanswered interrupt waits for
 * (ipi.h).
 */
#ifndef COHORT_POLICY_TARGET_H
#define COHORT_POLICY_TARGET_H

/* Why a ready sibling should run, the better reason the higher. */
enum target_rank {
	TARGET_NONE = 0,
	TARGET_READY, /* it waits for a CPU: the relaxed round */
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

/*
 * May a sibling that was preempted in guest kernel mode, where it may hold a lock
 * or an RCU read side, run before the first of its VM's queue? Both virtual times
 * (ns) are inside the VM: it is a slice ahead of the first at most, so that is how
 * long the first waits for it, and it is charged as always.
 */
static inline bool returns_early(u64 vtime, u64 first_vtime, u64 slice_ns)
{
	return (s64)(vtime - first_vtime) <= (s64)slice_ns;
}

/*
 * How far behind the first of its VM's queue, in virtual time inside the VM (ns), a
 * sibling may stand that runs in its place as it ran on this CPU last. One that a
 * turn of @turn_ns has left out is behind the others by that much: it is not passed
 * again, or it would wait for many rounds while another CPU is late.
 */
static inline u64 home_near(u64 turn_ns)
{
	return turn_ns / 2;
}

/*
 * How much longer (ns) a vCPU may run that is in guest kernel mode when its slice
 * ends: an RCU read side or a short lock is over by then. Once per slice.
 */
static inline u64 grace_ns(u64 slice_ns)
{
	return slice_ns / 8;
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
