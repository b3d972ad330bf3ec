/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Loans: CPU time for a vCPU that wakes in a VM that has had its share. Pure functions.
 * Not here: what a CPU does with a loan (hint.bpf.h).
 *
 * By shares alone the vCPU waits for the VM's next turn, however little it needs
 * itself. In a VM with one vCPU that never sleeps, each request that another one serves
 * would be answered only after a turn of all other VMs. So a vCPU that wakes may have a
 * CPU at once for a moment, as a loan: the VM pays for it, and its next turn comes
 * later.
 */
#ifndef COHORT_POLICY_WAKE_H
#define COHORT_POLICY_WAKE_H

#include "fair.h"

enum wake_consts {
	WAKE_MARGIN_NS =
		500000, /* by which a task of the same cgroup has had more */
	WAKE_LOAN_PART = 4, /* of a slice is lent */
	WAKE_CPU_PART = 4, /* of a CPU's time is, at most */
	WAKE_BEHIND_PART = 2, /* of a slice that it stands behind a sibling */
	WAKE_LEAD_TURNS = 1, /* that its VM may be ahead, beyond its own one */
	HAND_OVER_NS =
		20000, /* who halts so soon after an IPI leaves its CPU to the receiver */
};

/*
 * How long (ns) after an IPI that wakes a sibling a vCPU halts, as a rule: @average so
 * far, @after_ns this time; or it did not halt (@sleeps), but was stopped. One that
 * goes on counts as late, so that it hands nothing over the next time.
 */
static inline u64 wake_halts_after(u64 average, u64 after_ns, bool sleeps)
{
	u64 most = 4 * HAND_OVER_NS;

	if (!sleeps || after_ns > most)
		after_ns = most;
	return (3 * average + after_ns) / 4;
}

static inline bool wake_hands_over(u64 average)
{
	return average < HAND_OVER_NS;
}

/*
 * How long (ns) a vCPU runs until it sleeps, as a rule: @average so far, @ran_ns this
 * time; or it did not sleep (@sleeps), but was stopped: it would have run on.
 */
static inline u64 wake_runs_for(u64 average, u64 ran_ns, bool sleeps)
{
	if (sleeps)
		return (3 * average + ran_ns) / 4;
	return average > ran_ns ? average : ran_ns;
}

/* How long (ns) a loan lasts. */
static inline u64 wake_loan_ns(u64 slice_ns)
{
	return slice_ns / WAKE_LOAN_PART;
}

/*
 * For how long (ns) a CPU is lent to nobody after a loan that took @used_ns of it:
 * loans take their part of its time at most, and short ones do not interrupt others
 * all the time.
 */
static inline u64 wake_pause_ns(u64 used_ns, u64 slice_ns)
{
	u64 pause_ns = used_ns * (WAKE_CPU_PART - 1);
	u64 least_ns = wake_loan_ns(slice_ns);

	return pause_ns > least_ns ? pause_ns : least_ns;
}

/* Does a vCPU that wakes sleep more than its siblings? It stands at @task of virtual time
 * inside its VM, and the furthest of those at @furthest. */
static inline bool wake_sleeps_more(u64 task, u64 furthest, u64 slice_ns)
{
	return !vtime_before(furthest, task + slice_ns / WAKE_BEHIND_PART);
}

/*
 * May such a one have a CPU out of turn? Its VM stands at @vtime, whoever has the CPU at
 * @running; one slice costs the VM @cost, and it takes @at_once.
 */
static inline bool wake_lends(u64 vtime, u64 running, u64 cost, u32 at_once)
{
	return !vtime_before(running + cost * (at_once + WAKE_LEAD_TURNS),
			     vtime);
}

#endif /* COHORT_POLICY_WAKE_H */
