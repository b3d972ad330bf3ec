/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * When a VM's vCPUs run together. Pure functions.
 *
 * Turns begin at the same time on all CPUs. A group's virtual time is common to
 * all CPUs too, so CPUs that choose at the same time choose the same group, and
 * its vCPUs run side by side without anybody telling anyone: a lock holder runs
 * when its waiters spin. Slices that each begin when the last one happened to
 * end would scatter a VM's vCPUs over the turns of its neighbours.
 */
#ifndef COHORT_POLICY_COHORT_H
#define COHORT_POLICY_COHORT_H

/*
 * What a task that starts at @now may run (ns): until the next turn begins, at
 * @base plus a multiple of @slice_ns; if that is too near to be worth a switch,
 * until the one after it.
 */
static inline u64 turn_left(u64 now, u64 base, u64 slice_ns)
{
	u64 left_ns = slice_ns - (now - base) % slice_ns;

	return left_ns < slice_ns / 4 ? left_ns + slice_ns : left_ns;
}

/*
 * Where turns have to end so that a tick, which comes at @tick and ends a slice
 * only if that is over, ends all of them on all CPUs.
 */
static inline u64 turn_base(u64 tick, u64 slice_ns)
{
	return tick - slice_ns / 8;
}

#endif /* COHORT_POLICY_COHORT_H */
