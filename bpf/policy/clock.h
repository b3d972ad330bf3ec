/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Which of two times is earlier, and how long something has lasted. Pure functions.
 */
#ifndef COHORT_POLICY_CLOCK_H
#define COHORT_POLICY_CLOCK_H

/* True if (virtual) time @a lies before @b; right across a wrap. */
static inline bool vtime_before(u64 a, u64 b)
{
	return (s64)(a - b) < 0;
}

/* How long @now is after @then, ns. Who reads a clock may see what another CPU noted
 * afterwards: that has lasted for no time. */
static inline u64 ns_since(u64 then, u64 now)
{
	return vtime_before(then, now) ? now - then : 0;
}

#endif /* COHORT_POLICY_CLOCK_H */
