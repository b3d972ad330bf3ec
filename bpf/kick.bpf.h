/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * CPUs are told to look again what they run.
 */
#ifndef COHORT_KICK_BPF_H
#define COHORT_KICK_BPF_H

/*
 * Tells CPU @cpu. Not from a CPU that goes offline: whom that wakes at its very end, as
 * the one that waits for that end, is told of by an interrupt of this CPU to itself,
 * which does not come any more. It would stay pending: no kick from this CPU would work
 * again, and the kernel, when it takes this scheduler out, would wait for ever. Who
 * waits is found when the turn ends.
 */
__noinline int kick_cpu(s32 cpu, u64 flags)
{
	u32 here = bpf_get_smp_processor_id();
	struct domain *d = domain_with(here);

	if (d->cpus & bit_of(here))
		scx_bpf_kick_cpu(cpu, flags);
	return 0;
}

#endif /* COHORT_KICK_BPF_H */
