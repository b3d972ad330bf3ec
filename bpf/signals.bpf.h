/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The IPIs between vCPUs, as the scheduler keeps them with each task: what it has
 * sent, and what it has not answered yet. Not here: how they are seen
 * (observe.bpf.h).
 */
#ifndef COHORT_SIGNALS_BPF_H
#define COHORT_SIGNALS_BPF_H

enum {
	/* Unanswered IPIs of one receiver; a power of two, and so few that a plain
	 * loop over them is cheaper than the kernel's iterator. */
	OPEN_IPIS = 8,
};

/* An IPI that a task's vCPU has not answered yet. Written by the sender, in its
 * thread; ended (sent_ns) by the receiver in its own. */
struct open_ipi {
	s32 from; /* the sender's thread */
	u32 vector;
	u64 sent_ns; /* 0: answered */
};

struct signals {
	/* As a sender. Written in its own thread. */
	s32 ipi_to; /* thread that got its last IPI, 0: none */

	/* As a receiver. */
	struct open_ipi open[OPEN_IPIS]; /* by sender */
	u32 maybe_open; /* 0: none of them is */
};

/* Thread @from now waits for thread @to to end an interrupt of @vector. */
static __always_inline void open_ipi(struct signals *sender, s32 from,
				     struct signals *receiver, s32 to,
				     u32 vector, u64 now)
{
	struct open_ipi *ipi = &receiver->open[from & (OPEN_IPIS - 1)];

	ipi->from = from;
	ipi->vector = vector;
	ipi->sent_ns = now;
	sender->ipi_to = to;
	/* Behind a full barrier: who sees it sees the IPI. */
	__sync_lock_test_and_set(&receiver->maybe_open, 1);
}

/* When the IPI from task @from was sent that @receiver has not answered; 0: it
 * has, or there is none. */
static inline u64 open_ipi_from(struct signals *receiver, s32 from)
{
	struct open_ipi *ipi = &receiver->open[from & (OPEN_IPIS - 1)];

	return ipi->from == from ? ipi->sent_ns : 0;
}

#endif /* COHORT_SIGNALS_BPF_H */
