/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What a directed yield does to the order of siblings beyond the one turn it
 * hands on. Pure functions. Both are loans: they move a task's place in its VM's
 * queue once, never its virtual time, so what one sibling is ahead or behind is
 * made good as soon as the order has had its effect.
 *
 * penalty: the yielder waits behind its siblings for longer (the debooster).
 * credit: the target comes earlier when it waits the next time (what version 3
 * of the same work does instead).
 */
#ifndef COHORT_POLICY_DEBOOST_H
#define COHORT_POLICY_DEBOOST_H

enum deboost_consts {
	DEBOOST_EACH_NS = 6000000, /* one penalty per vCPU in this time */
	DEBOOST_REVERSE_NS = 600000, /* A to B, then B to A within this */
	DEBOOST_FEW = 2, /* runnable siblings of the greatest penalty */
	DEBOOST_MANY = 13, /* and of the least */
	DEBOOST_MOST_X16 = 96, /* 6.0 slices */
	DEBOOST_LEAST_X16 = 16, /* 1.0 slice */
};

/* Sixteenths of a slice: 6.0 slices for two siblings, falling to 1.0 above 12. */
static inline u32 deboost_x16(u32 nr_runnable)
{
	if (nr_runnable <= DEBOOST_FEW)
		return DEBOOST_MOST_X16;
	if (nr_runnable >= DEBOOST_MANY)
		return DEBOOST_LEAST_X16;
	return DEBOOST_MOST_X16 - (DEBOOST_MOST_X16 - DEBOOST_LEAST_X16) *
					  (nr_runnable - DEBOOST_FEW) /
					  (DEBOOST_MANY - DEBOOST_FEW);
}

/*
 * How far (ns of virtual time inside the VM) a yielder steps back.
 *
 * @nr_runnable siblings, itself included; @since_last_ns since its last
 * penalty; @since_reverse_ns since its target yielded to it; @distance, as the
 * kernel gives it, between the two's nodes: the farther, the less, as the target
 * then gains less from the place it is given. Each slice of it lets all others
 * run one, so never more than makes it wait for a round of all siblings beyond
 * the one that it waits in a fair order.
 */
static inline u64 deboost_penalty(u64 slice_ns, u32 nr_runnable,
				  u64 since_last_ns, u64 since_reverse_ns,
				  u32 distance)
{
	u32 others = nr_runnable > 1 ? nr_runnable - 1 : 1;
	u64 penalty, most = slice_ns + slice_ns / others;

	if (since_last_ns < DEBOOST_EACH_NS)
		return 0;
	penalty = slice_ns * deboost_x16(nr_runnable) / 16;
	if (penalty > most)
		penalty = most;
	if (since_reverse_ns < DEBOOST_REVERSE_NS)
		penalty /= 4;
	if (distance > LOCAL_DISTANCE)
		penalty = penalty * LOCAL_DISTANCE / distance;
	return penalty;
}

/* How far (ns of virtual time inside the VM) a target steps forward. */
static inline u64 deboost_credit(u64 slice_ns)
{
	return slice_ns;
}

#endif /* COHORT_POLICY_DEBOOST_H */
