/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Fairness: how much virtual time a group pays for CPU time, where it stands
 * when it returns from sleep, when a waking group may preempt, and how a cap is
 * spent. Pure functions: no map, no kfunc, no clock. Not here: who owns which
 * weight, which is state.
 *
 * A share is the part of the host that a group is to have, as long as the groups
 * that are active now stay so. It is a product, from the root down: at each level,
 * the weight over the sum of the active weights (scx_flatcg calls this hweight).
 * Virtual time is CPU time divided by share, so groups whose virtual times advance
 * together get CPU time in the ratio of their shares.
 *
 * Example: cgroup A (weight 100) holds one VM, cgroup B (weight 300) holds two.
 * Shares are 1/4, 3/8 and 3/8; 3 ms of CPU time cost A's VM 12 ms of virtual
 * time, one of B's 8 ms.
 */
#ifndef COHORT_POLICY_FAIR_H
#define COHORT_POLICY_FAIR_H

#include "clock.h"

enum fair_consts {
	SHARE_ONE = 1 << 24, /* the whole host; 1,000 equal VMs err 0.006 % */
	CAP_DEBT_NS = 1000000000, /* the longest a cap makes up for */
	CAP_GRACE_NS = 20000000, /* by which tasks in the kernel overdraw a cap;
				     a write of 16 MiB takes 5 ms */
	WEIGHT_DEFAULT = 100, /* of a cgroup, and of a VM or the tasks in one */
	TASK_WEIGHT_LEAST = 10, /* that counts, of tasks in a group: nice 10 */
	TASK_WEIGHT_MOST = 1000, /* nice -10 */
	WEIGHT_SCALE = 1024, /* of averages of weights */
	WEIGHT_TIME_NS = 32000000, /* over which they are taken */
	RUNNING_BITS = 16, /* of a number of running tasks */
};

/*
 * The average (times WEIGHT_SCALE) of a sum of active weights that has been @sum
 * for the last @elapsed_ns. Shares follow averages: by the sum of the moment,
 * whoever is charged while a task of another group runs for a millisecond would
 * pay for all it used since it was charged last as if that had run all the time.
 */
static inline u64 fair_average(u64 average, u64 sum, u64 elapsed_ns)
{
	u64 target = sum * WEIGHT_SCALE;

	if (elapsed_ns >= WEIGHT_TIME_NS)
		return target;
	if (target > average)
		return average +
		       (target - average) * elapsed_ns / WEIGHT_TIME_NS;
	return average - (average - target) * elapsed_ns / WEIGHT_TIME_NS;
}

/*
 * One level down: the share of a child of weight @weight under a parent of
 * share @share whose active children's weights add up to @weight_sum. A sum
 * that does not hold @weight yet (the child is just becoming active) is read
 * as if it did. Never 0.
 */
static inline u64 fair_child_share(u64 share, u64 weight, u64 weight_sum)
{
	u64 child;

	if (weight_sum < weight)
		weight_sum = weight;
	if (!weight_sum)
		return share ? share : 1;
	child = share * weight / weight_sum;
	return child ? child : 1;
}

/* Virtual time (ns) that @used_ns of CPU time cost a group of share @share. */
static inline u64 fair_charge(u64 used_ns, u64 share)
{
	return used_ns * SHARE_ONE / (share ? share : 1);
}

/* The same inside a group, by a task's weight (nice 0: 100). Within bounds, as a task
 * must not wait for seconds because its group has others of much more weight. */
static inline u64 fair_task_charge(u64 used_ns, u64 weight)
{
	if (weight < TASK_WEIGHT_LEAST)
		weight = TASK_WEIGHT_LEAST;
	if (weight > TASK_WEIGHT_MOST)
		weight = TASK_WEIGHT_MOST;
	return used_ns * WEIGHT_DEFAULT / weight;
}

/*
 * The tasks of a group that run, in one word, so that CPUs change and see it
 * whole: in the lowest RUNNING_BITS how many there are, above them the sum of the
 * times (ns) at which each was charged last, as far as it fits. This is what one
 * adds that was charged at @charged_at.
 */
static inline u64 fair_runs(u64 charged_at)
{
	return charged_at << RUNNING_BITS | 1;
}

static inline u32 fair_nr_running(u64 running)
{
	return running & ((1 << RUNNING_BITS) - 1);
}

/*
 * What those tasks have used by @now (ns) since each was charged last. Another CPU
 * may have charged one after this one read its clock: none has used less than
 * nothing, or more than a slice.
 */
static inline u64 fair_uncharged(u64 running, u64 now, u64 slice_ns)
{
	u64 nr = fair_nr_running(running), most_ns = nr * slice_ns;
	/* Were all charged now, less what they are. */
	s64 uncharged_ns = (s64)(nr * fair_runs(now) - running) >> RUNNING_BITS;

	if (uncharged_ns < 0)
		return 0;
	return (u64)uncharged_ns < most_ns ? (u64)uncharged_ns : most_ns;
}

/*
 * Where @vtime stands when its group begins to wait in a domain whose present is
 * @now: sleep, or running where nobody else wanted to, earns no more than @credit. And
 * a group owes no more than @debt. Elsewhere virtual time may run at another pace, and a
 * group that has a CPU to itself there would starve here without a bound.
 */
static inline u64 fair_settle(u64 vtime, u64 now, u64 credit, u64 debt)
{
	if (vtime_before(now + debt, vtime))
		return now + debt;
	return vtime_before(vtime, now - credit) ? now - credit : vtime;
}

/*
 * The share by which @nr of the @runnable tasks are charged that want to run in a group
 * of @share: each of them has as much. Tasks that wait for one CPU only have a clock of
 * their own; without this, what they use would leave the others of their group with
 * nothing.
 */
static inline u64 fair_part(u64 share, u32 nr, u32 runnable)
{
	u64 part;

	if (!nr)
		nr = 1;
	if (nr >= runnable)
		return share ? share : 1;
	part = share * nr / runnable;
	return part ? part : 1;
}

/*
 * What of the @cost a group at @vtime really pays in a domain with present @now,
 * virtual time. While nobody else waits (not @contested), nobody misses the time that
 * the group takes: it is free beyond the present.
 */
static inline u64 fair_cost(u64 vtime, u64 now, u64 cost, bool contested)
{
	u64 room;

	if (contested)
		return cost;
	room = vtime_before(vtime, now) ? now - vtime : 0;
	return cost < room ? cost : room;
}

/*
 * May a group that wakes at virtual time @woken take the CPU from one at
 * @running? Only if it is behind by more than @margin, so that two groups in
 * step do not cut each other's slices to pieces.
 */
static inline bool fair_preempts(u64 woken, u64 running, u64 margin)
{
	return vtime_before(woken + margin, running);
}

/*
 * A cap's budget (ns) at the start of a period of @period_ns: @quota_ns is
 * added, at most @quota_ns + @burst_ns is kept. What was overdrawn (the last
 * tick of the last period, on each CPU) stays owed, so the average holds
 * although slices end at ticks. But no more is owed than CAP_DEBT_NS of waiting
 * or one period pays back: below that tiny quotas are exceeded, above it the
 * kernel's watchdog would take a capped task for a lost one.
 */
static inline s64 cap_refill(s64 budget_ns, u64 quota_ns, u64 burst_ns,
			     u64 period_ns)
{
	u64 periods = period_ns ? CAP_DEBT_NS / period_ns : 1;
	s64 most = (s64)(quota_ns + burst_ns);
	s64 least = -(s64)(quota_ns * (periods ? periods : 1));

	if (budget_ns < least)
		budget_ns = least;
	budget_ns += (s64)quota_ns;
	return budget_ns > most ? most : budget_ns;
}

/*
 * Does a task stop running here whose cap is overdrawn by @overdrawn_ns? Not in the
 * kernel, where it may hold locks that others wait for. But some tasks hardly ever
 * leave the kernel, or sleep before each tick, and are to obey as well.
 */
static inline bool cap_stops(bool in_kernel, u64 overdrawn_ns)
{
	return !in_kernel || overdrawn_ns >= CAP_GRACE_NS;
}

/*
 * Are @nr tasks all of one process? @sum is the sum of their process ids, and
 * @sum_sq that of the squares. By Cauchy and Schwarz nr * sum_sq >= sum^2, with
 * equality exactly if all are equal; three counters that any CPU may add to in
 * any order decide it. (Modulo 2^64: a false "yes" needs a multiple of 2^64.)
 */
static inline bool one_process(u64 nr, u64 sum, u64 sum_sq)
{
	return nr && nr * sum_sq == sum * sum;
}

#endif /* COHORT_POLICY_FAIR_H */
