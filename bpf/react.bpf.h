/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What the scheduler does about what observe.bpf.h sees: it remembers who waits
 * for whom, until that is answered, and finds somebody to run where KVM finds
 * nobody.
 */
#ifndef COHORT_REACT_BPF_H
#define COHORT_REACT_BPF_H

/* Set by Rust: the hardware ends interrupts, and KVM does not see it. */
const volatile bool eois_hidden;

static struct task_ctx *vcpu_ctx(struct task_struct *p)
{
	struct task_ctx *tc = lookup_task_may_fail(p);

	return tc && tc->is_vcpu ? tc : NULL;
}

/* An IPI waits since @now for the vCPU @tc of @g, as that waits for a CPU. */
static void ipi_waits_for_cpu(struct task_ctx *tc, struct group *g, u64 now)
{
	wait_begins(&tc->signals.ipi_waits_ns, now);
	count(&g->info.stats.ipis_to_ready);
}

static void on_ipi(struct task_struct *p, struct kvm_vcpu___kvm *vcpu,
		   u32 vector)
{
	s32 to = thread_of_vcpu(vcpu);
	struct task_ctx *receiver = lookup_thread_may_fail(to);
	struct task_ctx *tc = vcpu_ctx(p);
	u64 now = scx_bpf_now();
	struct group *g;

	if (!tc || !receiver || receiver->group != tc->group)
		return;
	g = lookup_group(tc->group);
	if (!g)
		return;
	open_ipi(&tc->signals, p->pid, &receiver->signals, to, vector, now);
	count(&g->info.stats.ipis);
	if (receiver->queue)
		ipi_waits_for_cpu(receiver, g, now);
}

/* The vCPU @tc of @g woke at @now and waits for a CPU: if an IPI woke it, that was
 * seen before it was delivered. */
static void note_woken_by_ipi(struct task_ctx *tc, struct group *g, u64 now)
{
	if (has_open_ipi(&tc->signals, now, g->ipi_window_ns))
		ipi_waits_for_cpu(tc, g, now);
}

/* The running @tc has answered an IPI @took_ns after that was sent. */
static void note_answer(struct task_ctx *tc, u64 took_ns)
{
	struct group *g = lookup_group(tc->group);

	if (!g)
		return;
	if (is_on(MECH_ADAPTIVE_WINDOW)) {
		g->ipi_window_ns = ipi_window(g->ipi_window_ns, took_ns);
		count_effect(MECH_ADAPTIVE_WINDOW);
	}
	count(&g->info.stats.ipis_answered);
}

/* The running vCPU has handled an interrupt of @vector, whoever sent it. */
SEC("?tp_btf/kvm_eoi")
int BPF_PROG(ipi_answered, void *apic, int vector)
{
	struct task_ctx *tc = vcpu_ctx(bpf_get_current_task_btf());
	u32 i;

	/* Most interrupts are none of these. */
	if (!tc || !tc->signals.maybe_open || vector < 0)
		return 0;
	/* Before they are looked at: a sender may set it meanwhile. */
	tc->signals.maybe_open = 0;
	for (i = 0; i < OPEN_IPIS; i++) {
		struct open_ipi *ipi = &tc->signals.open[i];
		u64 sent_ns = ipi->sent_ns;

		if (!sent_ns)
			continue;
		if (ipi->vector != vector) {
			tc->signals.maybe_open = 1;
			continue;
		}
		ipi->sent_ns = 0;
		note_answer(tc, scx_bpf_now() - sent_ns);
	}
	return 0;
}

/* @tc runs. Where nobody will say what it answers, that counts as an answer. */
static void forget_unseen_ipis(struct task_ctx *tc)
{
	u32 i;

	if (!eois_hidden)
		return;
	for (i = 0; i < OPEN_IPIS; i++)
		tc->signals.open[i].sent_ns = 0;
	tc->signals.maybe_open = 0;
}

static void on_spin(struct task_struct *p, bool in_kernel)
{
	struct task_ctx *tc = lookup_task_may_fail(p);
	struct group *g;

	if (!tc)
		return;
	tc->yielded = 0;
	tc->spins_in_kernel = in_kernel;
	g = lookup_group(tc->group);
	if (g)
		count(&g->info.stats.spin_exits);
}

/* KVM went round all siblings. If it found nobody, somebody may be ready all the
 * same: KVM leaves out vCPUs preempted in guest user mode. */
static void on_spin_end(struct task_struct *p)
{
	struct task_ctx *tc = lookup_task_may_fail(p);
	s32 cpu = bpf_get_smp_processor_id();
	struct cpu_state *c = lookup_cpu(cpu);
	struct choice choice = {};

	/* It exits again before it has left its CPU: once is enough. */
	if (!tc || !c || tc->yielded || c->relaxed_pid == p->pid ||
	    !is_on(MECH_RELAXED) || !finds_sibling(tc, p->pid, cpu, &choice))
		return;
	/* Not at once: a task that is preempted inside a BPF program may not
	 * leave its CPU, and would keep a sibling from running there. */
	c->relaxed_pid = p->pid;
	if (!set_alarm(cpu, LEAVE_HOOK_NS))
		c->relaxed_pid = 0;
}

#endif /* COHORT_REACT_BPF_H */
