/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * When a waiting task moves to another domain. Pure functions.
 *
 * Virtual time is common to all domains, so it tells which of two is the more
 * crowded one: groups that wait there fall behind those that run elsewhere. Once
 * per turn a domain looks into another one. It takes the first group that was left
 * out there, if that has fallen behind far enough. So shares hold across domains.
 * Tasks seldom move, as a move costs them what the caches hold. Nothing has to be
 * counted per domain.
 *
 * Example: three VMs of one vCPU, two domains of one CPU. A and B share the first
 * CPU, C has the other one. C gets twice the CPU time of A or B. When its domain
 * looks next, A is behind C, and moves there. Now B has a CPU to itself, until C is
 * behind it.
 */
#ifndef COHORT_POLICY_BALANCE_H
#define COHORT_POLICY_BALANCE_H

#include "fair.h"

enum balance_consts {
	BALANCE_TURNS =
		8, /* between two moves into a domain: one is to have its effect */
	BALANCE_MARGIN = 1, /* slices that a group is behind before it moves */
};

/*
 * How far (virtual time, ns) a group must be behind to move over @distance, as
 * the kernel gives it. Its slices cost @cost each, and it runs ahead, and
 * behind, by one for each of the @at_once tasks that run at the same time. Between
 * nodes memory stays behind.
 */
static inline u64 balance_margin(u64 cost, u32 at_once, u32 distance)
{
	u64 margin = cost * (at_once + BALANCE_MARGIN);

	if (distance > LOCAL_DISTANCE)
		margin += cost * BALANCE_MARGIN * (distance - LOCAL_DISTANCE) /
			  LOCAL_DISTANCE;
	return margin;
}

#endif /* COHORT_POLICY_BALANCE_H */
