/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Counting in histograms of times, as intf.h has them. Not here: which bucket a
 * number belongs to (policy/ipi.h).
 */
#ifndef COHORT_HISTOGRAM_BPF_H
#define COHORT_HISTOGRAM_BPF_H

/* Count @ns in @histogram, of NR_BUCKETS, to which any CPU may add. */
static inline void count_time(u64 *histogram, u64 ns)
{
	u32 i = log2_bucket(ns / 1000);

	/* Always so, but the verifier wants to see it; clang must not know. */
	barrier_var(i);
	if (i < NR_BUCKETS)
		__sync_fetch_and_add(&histogram[i], 1);
}

#endif /* COHORT_HISTOGRAM_BPF_H */
