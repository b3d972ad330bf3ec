/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What the scheduler does about what observe.bpf.h sees: it remembers who waits
 * for whom, and finds somebody to run where KVM finds nobody.
 */
#ifndef COHORT_REACT_BPF_H
#define COHORT_REACT_BPF_H

static u64 clock_ns(void)
{
	return scx_bpf_now();
}

static struct signals *signals_of(struct task_struct *p)
{
	struct task_ctx *tc = lookup_task_may_fail(p);

	return tc && tc->is_vcpu ? &tc->signals : NULL;
}

static void on_ipi(struct signals *sender, s32 from, s32 to)
{
	struct task_ctx *receiver = lookup_thread_may_fail(to);
	struct task_ctx *tc = current_ctx();
	u64 now = scx_bpf_now();
	struct group *g;

	if (!tc || !receiver || receiver->group != tc->group)
		return;
	g = lookup_group(tc->group);
	if (!g)
		return;
	open_ipi(sender, from, &receiver->signals, to, now);
	count(&g->info.stats.ipis);
	if (!receiver->queue)
		return;
	ipi_waits(&receiver->signals, now);
	count(&g->info.stats.ipis_to_ready);
}

static void on_answer(struct task_struct *p, struct signals *receiver,
		      u64 took_ns)
{
	struct task_ctx *tc = lookup_task_may_fail(p);
	struct group *g;

	if (!tc)
		return;
	g = lookup_group(tc->group);
	if (!g)
		return;
	if (is_on(MECH_ADAPTIVE_WINDOW)) {
		g->ipi_window_ns = ipi_window(g->ipi_window_ns, took_ns);
		count_effect(MECH_ADAPTIVE_WINDOW);
	}
	count(&g->info.stats.ipis_answered);
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
