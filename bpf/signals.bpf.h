/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The IPIs between vCPUs, as they are kept with each task: what it has sent, and
 * what it has not answered yet. Not here: how they are seen (observe.bpf.h).
 */
#ifndef COHORT_SIGNALS_BPF_H
#define COHORT_SIGNALS_BPF_H

enum {
	/* Unanswered IPIs of one receiver; a power of two, and so few that a plain
	 * loop over them is cheaper than the kernel's iterator. */
	OPEN_IPIS = 8,
};

/* Set by Rust: the hardware ends interrupts, and KVM does not see it. */
const volatile bool eois_hidden;

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
	/* The last interrupt that it delivered, whatever that was: */
	u32 accepted_vector;
	u32 accepted_mode; /* delivery mode */
	u64 accepted_by; /* the local APIC that accepted it */

	/* As a receiver. */
	struct open_ipi open[OPEN_IPIS]; /* by sender */
	u32 maybe_open; /* 0: none of them is */
	u64 ipi_waits_ns; /* since when one waits for it to run, 0: none */
};

/* Thread @from now waits for thread @to. Whether that waits for a CPU itself is
 * looked at afterwards, and the receiver looks when it loses its CPU: both miss
 * it only in the few ns in which that CPU's own note is on its way. */
static inline void open_ipi(struct signals *sender, s32 from,
			    struct signals *receiver, s32 to, u64 now)
{
	struct open_ipi *ipi = &receiver->open[from & (OPEN_IPIS - 1)];

	ipi->from = from;
	ipi->vector = sender->accepted_vector;
	ipi->sent_ns = now;
	sender->ipi_to = to;
	/* A full barrier before that look. */
	__sync_lock_test_and_set(&receiver->maybe_open, 1);
}

/* An IPI waits since @now for @receiver to run. The first of several is what
 * that runs late for. */
static inline void ipi_waits(struct signals *receiver, u64 now)
{
	if (!receiver->ipi_waits_ns)
		receiver->ipi_waits_ns = now;
}

/* When the IPI from task @from was sent that @receiver has not answered; 0: it
 * has, or there is none. */
static inline u64 open_ipi_from(struct signals *receiver, s32 from)
{
	struct open_ipi *ipi = &receiver->open[from & (OPEN_IPIS - 1)];

	return ipi->from == from ? ipi->sent_ns : 0;
}

static inline bool has_open_ipi(struct signals *receiver, u64 now,
				u64 window_ns)
{
	u32 i;

	if (!receiver->maybe_open)
		return false;
	for (i = 0; i < OPEN_IPIS; i++)
		if (ipi_is_open(receiver->open[i].sent_ns, now, window_ns))
			return true;
	return false;
}

/* The receiver runs at @now: how long the first IPI waited for that, which is
 * counted in @histogram (intf.h); 0: none waited. */
static inline u64 answer_begins(struct signals *receiver, u64 *histogram,
				u64 now)
{
	u64 waits_ns = receiver->ipi_waits_ns, waited_ns = 0;
	u32 i;

	if (waits_ns) {
		receiver->ipi_waits_ns = 0;
		/* A sender that saw it waiting may come after @now. */
		waited_ns = waits_ns < now ? now - waits_ns : 0;
		count_time(histogram, waited_ns);
	}
	if (!eois_hidden)
		return waited_ns;
	/* Nobody will say when it is answered. */
	for (i = 0; i < OPEN_IPIS; i++)
		receiver->open[i].sent_ns = 0;
	receiver->maybe_open = 0;
	return waited_ns;
}

#endif /* COHORT_SIGNALS_BPF_H */
