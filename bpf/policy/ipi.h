/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Interrupts between vCPUs: how long one counts as unanswered, and which vCPU has to
 * run so that it is answered. And the buckets of histograms. Pure functions. Not
 * here: how interrupts are seen (observe.bpf.h).
 *
 * Example. vCPU 0 sends an IPI and spins until it is answered. vCPU 1, which
 * got it, runs a handler that waits for vCPU 2 in the same way. vCPU 2 is
 * ready and no CPU runs it. So vCPU 0 waits for vCPU 2: the chain is followed from
 * the vCPU that waits to the first one that a CPU could run.
 */
#ifndef COHORT_POLICY_IPI_H
#define COHORT_POLICY_IPI_H

#include "clock.h"

enum ipi_consts {
	IPI_CHAIN = 4, /* links followed; a cycle ends here too */
	IPI_WINDOW_NS = 50000000, /* in which an IPI is waited for */
};

/* What following a link of a chain comes to. */
enum ipi_next {
	IPI_STOP, /* nobody who could be run: it is answered, or under way */
	IPI_TAKE, /* this one is ready: it is what all before wait for */
	IPI_FOLLOW, /* it runs, and waits for somebody itself */
};

/*
 * Is an IPI sent at @sent_ns (0: none, or answered) still waited for at @now? An
 * answer that was not seen is not waited for longer than @window_ns.
 */
static inline bool ipi_is_open(u64 sent_ns, u64 now, u64 window_ns)
{
	return sent_ns && ns_since(sent_ns, now) < window_ns;
}

/*
 * The receiver of an open IPI is @ready (it waits for a CPU), or @runs. One that
 * does neither is halted: the IPI wakes it, and it is no candidate before.
 */
static inline enum ipi_next ipi_step(bool ready, bool runs)
{
	if (ready)
		return IPI_TAKE;
	return runs ? IPI_FOLLOW : IPI_STOP;
}

/*
 * The bucket of a histogram with a bucket per power of two. With all bits below the
 * highest one set, 32 bits have 32 values; times a de Bruijn sequence, the highest
 * five bits tell them apart. That is fewer instructions than a search.
 */
static inline u32 log2_bucket(u64 value)
{
	static const u8 bucket[32] = { 1,  10, 2,  11, 14, 22, 3,  30,
				       12, 15, 17, 19, 23, 26, 4,  31,
				       9,  13, 21, 29, 16, 18, 25, 8,
				       20, 28, 24, 7,  27, 6,  5,  32 };
	u32 bits =
		value < 1U << (NR_BUCKETS - 2) ? value : 1U << (NR_BUCKETS - 2);

	if (!bits)
		return 0;
	bits |= bits >> 1;
	bits |= bits >> 2;
	bits |= bits >> 4;
	bits |= bits >> 8;
	bits |= bits >> 16;
	return bucket[bits * 0x07c4acddU >> 27];
}

#endif /* COHORT_POLICY_IPI_H */
