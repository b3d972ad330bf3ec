/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Kicks, by which CPUs are told to look again what they run, and timers: what a CPU that
 * goes offline must not start any more.
 */
#ifndef COHORT_KICK_BPF_H
#define COHORT_KICK_BPF_H

/*
 * Does this CPU not go offline? Whom such a one wakes at its very end, as the one that
 * waits for that end, is told of by an interrupt of this CPU to itself, which does not
 * come any more. It would stay pending: no kick from this CPU, and no start of a timer,
 * would work again, and the kernel, when it takes this scheduler out, would wait for
 * ever. Who waits is found when the turn ends.
 */
static bool is_online_here(void)
{
	u32 here = bpf_get_smp_processor_id();

	return domain_with(here)->cpus & bit_of(here);
}

/* Tells CPU @cpu. */
__noinline int kick_cpu(s32 cpu, u64 flags)
{
	if (is_online_here())
		scx_bpf_kick_cpu(cpu, flags);
	return 0;
}

/* @timer ends after @after_ns. False: it cannot be started from here, as the kernel has
 * no memory or this CPU goes offline. */
static bool start_timer(struct timer *timer, u64 after_ns, u64 flags)
{
	return timer && is_online_here() &&
	       !bpf_timer_start(&timer->timer, after_ns, flags);
}

#endif /* COHORT_KICK_BPF_H */
