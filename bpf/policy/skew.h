/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * How far the vCPUs of one VM may drift apart. Pure functions.
 *
 * A VM that is wider than the CPUs it gets cannot run as a whole: some of its
 * vCPUs advance while others wait. One that is too far ahead of the slowest of
 * those is stopped (ESXi calls it co-stop) until that one has nearly caught up.
 * Progress is CPU time used; who sleeps stays behind by no more than a slice, so
 * halted time counts as progress.
 */
#ifndef COHORT_POLICY_SKEW_H
#define COHORT_POLICY_SKEW_H

#include "fair.h"

/* How far (ns) @vtime is ahead of @slowest; not at all: 0. */
static inline u64 skew_ahead(u64 vtime, u64 slowest)
{
	return vtime_before(slowest, vtime) ? vtime - slowest : 0;
}

/* Must a vCPU stop that is so far ahead? */
static inline bool skew_stops(u64 ahead_ns, u64 limit_ns)
{
	return ahead_ns > limit_ns;
}

/* May one that was stopped go on? */
static inline bool skew_ends(u64 ahead_ns, u64 resume_ns)
{
	return ahead_ns <= resume_ns;
}

#endif /* COHORT_POLICY_SKEW_H */
