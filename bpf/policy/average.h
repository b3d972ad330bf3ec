/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Averages that forget: what was counts less with each value that comes. A pure
 * function.
 */
#ifndef COHORT_POLICY_AVERAGE_H
#define COHORT_POLICY_AVERAGE_H

enum average_consts {
	AVERAGE_PARTS = 8, /* of an average: one value's part of it */
};

/* The @average after one more @value, both below 2^31. */
static inline u32 moving_average(u32 average, u32 value)
{
	s32 change = (s32)value - (s32)average;

	return (u32)((s32)average + change / AVERAGE_PARTS);
}

#endif /* COHORT_POLICY_AVERAGE_H */
