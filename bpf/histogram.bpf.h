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

/* Somebody waits since @now, as @since_ns (0: nobody does) then says. Of several the
 * first one counts. */
static inline void wait_begins(u64 *since_ns, u64 now)
{
	if (!*since_ns)
		*since_ns = now;
}

/* That wait, if there is one, is over at @now: count it in @histogram. Returns its
 * length, ns. */
static inline u64 wait_ends(u64 *since_ns, u64 *histogram, u64 now)
{
	u64 began_ns = *since_ns, waited_ns;

	if (!began_ns)
		return 0;
	*since_ns = 0;
	waited_ns = ns_since(began_ns, now);
	count_time(histogram, waited_ns);
	return waited_ns;
}

#endif /* COHORT_HISTOGRAM_BPF_H */
