/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * When a vCPU rests that halts on its CPU (its HLT does not exit). While it rests, its
 * CPU may run something else. Pure functions. Not here: how long it halts (halt.h).
 *
 * What it did since it was looked at last, as a rule at the tick before, decides
 * whether it rests. An average over a longer time tells which vCPUs soon rest again,
 * where too few do now.
 *
 * Example. A vCPU works for 10 ms and halts for 10 ms, with a tick each 4 ms. It begins
 * to rest at the first tick that finds it halted for 3 of the last 4 ms. It rests until
 * it works for more than half of 50 us. Its average is about a half.
 */
#ifndef COHORT_POLICY_REST_H
#define COHORT_POLICY_REST_H

enum rest_consts {
	REST_ONE = 1024, /* of averages: halted all the time */
	REST_OFTEN = 256, /* who is halted so much */
	REST_MEMORY_NS = 32000000, /* over which the average is taken */
	REST_LEAST_NS =
		30000, /* less than a tick and what follows tells nothing */
	REST_LOOK_NS =
		50000, /* that a resting vCPU has its CPU, to see what it does */
	REST_PATIENT_EACH =
		4, /* turns, in one of which a group waits for a vCPU to rest */
	REST_LOOK_EACH_NS = 10000000, /* after which it is looked at again */
};

/* The average (of REST_ONE) of who halted for @halted_ns of the last @elapsed_ns. */
static inline u32 rest_average(u32 average, u64 halted_ns, u64 elapsed_ns)
{
	s64 now;

	if (!elapsed_ns)
		return average;
	if (halted_ns > elapsed_ns)
		halted_ns = elapsed_ns;
	now = halted_ns * REST_ONE / elapsed_ns;
	if (elapsed_ns >= REST_MEMORY_NS)
		return now;
	return average +
	       (now - (s64)average) * (s64)elapsed_ns / REST_MEMORY_NS;
}

/* Does a vCPU rest that halted for @halted_ns of the last @elapsed_ns, if it did before
 * (@rests), or did not? */
static inline bool rest_goes_on(bool rests, u64 halted_ns, u64 elapsed_ns)
{
	return halted_ns >= (rests ? elapsed_ns / 2 : elapsed_ns / 4 * 3);
}

#endif /* COHORT_POLICY_REST_H */
