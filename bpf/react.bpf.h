/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What the scheduler does about what observe.bpf.h sees. It keeps which vCPU waits for
 * which, until that has answered. It finds a sibling to run where KVM finds none. And
 * what happens when a CPU's alarm rings.
 */
#ifndef COHORT_REACT_BPF_H
#define COHORT_REACT_BPF_H

enum {
	RECEIVER_TRIES = 4, /* siblings' CPUs that are looked at for one */
};

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

/* The first of the CPUs @own of domain @domain_id that is for no receiver of an IPI yet;
 * -1: there is none. */
__noinline s32 cpu_for_receiver(u32 domain_id, u64 own, u64 now)
{
	struct domain *d = lookup_domain(domain_id);
	u32 i;

	if (!d)
		return -1;
	for (i = 0; i < RECEIVER_TRIES && own; i++) {
		s32 cpu = cpu_with(d, lowest_cpu(own));
		struct cpu_state *c = lookup_cpu(cpu);
		const struct hint *hint;

		if (!c)
			break;
		hint = &c->hints[HINTS_SIBLING];
		if (!hint->pid || hint->reason != HINT_IPI ||
		    !vtime_before(now, hint->until_ns))
			return cpu;
		own &= own - 1;
	}
	return -1;
}

/*
 * The IPI is for thread @pid, which waits in @queue while siblings have CPUs: it has
 * one of these, but not the sender's. By itself KVM offers nothing until the sender has
 * spun for long enough to leave the guest.
 */
static void run_receiver(u32 queue, s32 pid, u64 now)
{
	u32 here = bpf_get_smp_processor_id();
	const struct hint receiver = {
		.pid = pid,
		.queue = queue,
		.reason = HINT_IPI,
		.mechanism = MECH_IPI,
		.until_ns = now + slice_ns,
	};
	struct cpu_state *c;
	struct entity *e;
	struct domain *d;
	u64 others;
	s32 cpu;

	if (!is_on(MECH_IPI) || queue & QUEUE_KINDS)
		return;
	e = lookup_entity(queue);
	d = e ? lookup_domain(e->domain) : NULL;
	/* Not while CPUs are about to run whoever waits. */
	if (!d || lacking_cpus(e, d))
		return;
	others = e->running;
	if (domain_of(here) == e->domain)
		others &= ~bit_of(here);
	cpu = cpu_for_receiver(e->domain, others, now);
	if (cpu < 0)
		return;
	c = lookup_cpu(cpu);
	if (!c)
		return;
	give_hint(c, &receiver);
	kick_cpu(cpu, SCX_KICK_PREEMPT);
}

__noinline int on_ipi(u64 to_vcpu, u32 vector, bool others)
{
	struct task_struct *p = bpf_get_current_task_btf();
	struct kvm_vcpu___kvm *vcpu = (void *)to_vcpu;
	s32 to = thread_of_vcpu(vcpu);
	struct task_ctx *receiver = lookup_thread_may_fail(to);
	struct task_ctx *tc = vcpu_ctx(p);
	u64 now = scx_bpf_now();
	struct group *g;
	u32 queue;

	if (!tc || !receiver || receiver->group != tc->group)
		return 0;
	g = lookup_group(tc->group);
	if (!g)
		return 0;
	open_ipi(&tc->signals, p->pid, &receiver->signals, to, vector, now);
	count(&g->info.stats.ipis);
	queue = receiver->queue;
	if (!queue)
		return 0;
	ipi_waits_for_cpu(receiver, g, now);
	/* One that is halted is woken by this, and as a rule nobody spins for it.
	 * pipe-4x4 does 1.59 so, and 1.24 if a sibling has to leave its CPU. One of
	 * several that was in the guest's kernel is offered by KVM soon. tlb-4x4 does
	 * 0.98 so, and 0.87 if siblings have to leave their CPUs. */
	if (!is_halted(vcpu) && !(others && was_in_guest_kernel(vcpu)))
		run_receiver(queue, to, now);
	return 0;
}

/* @tc woke at @now and waits for a CPU: if an IPI woke it, that was seen before it was
 * delivered. */
static void note_woken_by_ipi(struct task_ctx *tc, u64 now)
{
	struct group *g;

	if (!tc->is_vcpu || !has_open_ipi(&tc->signals, now, IPI_WINDOW_NS))
		return;
	g = lookup_group(tc->group);
	if (g)
		ipi_waits_for_cpu(tc, g, now);
}

/* The running vCPU @tc has answered the IPI of thread @from. If it has its CPU for that,
 * a sibling that got the same IPI is to have it next. Not at once, as it is in a hook. */
static void note_answered(const struct task_ctx *tc, s32 from)
{
	struct task_struct *p = bpf_get_current_task_btf();
	s32 cpu = bpf_get_smp_processor_id();
	struct cpu_state *c = lookup_cpu(cpu);

	if (c && c->receiver_pid == p->pid && sibling_waits(tc) &&
	    set_alarm(cpu, LEAVE_HOOK_NS))
		c->answered_pid = from;
}

/* One of those that wait in @queue, may run on @cpu, and have not answered the IPI of
 * thread @from; 0: there is none. */
__noinline s32 waiting_receiver(u32 queue, s32 cpu, s32 from)
{
	u32 seen = unknown_zero;
	u64 now = scx_bpf_now();
	struct task_struct *p;
	s32 pid = 0;

	bpf_for_each(scx_dsq, p, queue, 0) {
		struct task_ctx *tc = lookup_task_may_fail(p);

		if (++seen > MAX_RANKED)
			break;
		if (!tc || !tc->is_vcpu ||
		    !ipi_is_open(open_ipi_from(&tc->signals, from), now,
				 IPI_WINDOW_NS) ||
		    !bpf_cpumask_test_cpu(cpu, p->cpus_ptr))
			continue;
		pid = p->pid;
		break;
	}
	return pid;
}

/* The running @tc has answered the IPI of thread @from, for which it has @c, of @cpu: does
 * a sibling wait for a CPU that got it as well? That comes next. */
static bool hands_on(struct cpu_state *c, s32 cpu, const struct task_ctx *tc,
		     s32 from)
{
	struct hint next = {
		.queue = tc->entity,
		.reason = HINT_IPI,
		.mechanism = MECH_IPI,
		.until_ns = scx_bpf_now() + slice_ns,
	};

	next.pid = waiting_receiver(next.queue, cpu, from);
	if (!next.pid)
		return false;
	give_hint(c, &next);
	return true;
}

/* The running vCPU has handled an interrupt of @vector, whoever sent it. */
SEC("?tp_btf/kvm_eoi")
int BPF_PROG(ipi_answered, void *apic, int vector)
{
	struct task_ctx *tc = vcpu_ctx(bpf_get_current_task_btf());
	struct group *g;
	s32 from = 0;
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
		from = ipi->from;
		g = lookup_group(tc->group);
		if (g)
			count(&g->info.stats.ipis_answered);
	}
	if (from)
		note_answered(tc, from);
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

	/* It exits again before it has left its CPU: once is enough. */
	if (!tc || !c || tc->yielded || c->yields_pid == p->pid ||
	    !is_on(MECH_RELAXED) || !is_on(MECH_YIELD) || !sibling_waits(tc))
		return;
	/* Not at once: a task that is preempted inside a BPF program may not
	 * leave its CPU, and would keep a sibling from running there. */
	c->yields_pid = p->pid;
	if (!set_alarm(cpu, LEAVE_HOOK_NS))
		c->yields_pid = 0;
}

/* The alarm of CPU @cpu rings. A task that runs elsewhere since may have set it: then
 * there is nothing to do. */
static int alarm_rings(void *map, u32 *cpu, struct timer *alarm)
{
	struct task_struct *p = bpf_get_current_task_btf();
	struct task_ctx *tc = lookup_task_may_fail(p);
	struct cpu_state *c = lookup_cpu(*cpu);
	s32 pid = p->pid;
	s32 answered = 0;
	bool yields;

	if (!c)
		return 0;
	yields = tc && c->yields_pid == pid;
	if (tc && c->receiver_pid == pid)
		answered = c->answered_pid;
	c->yields_pid = 0;
	c->answered_pid = 0;
	if (tc && tc->run_at_ns && obey_cap(p, tc) && !tc->parks)
		set_alarm(*cpu, CAP_LOOK_NS);
	if ((yields && gives_way(c, *cpu, tc, pid)) ||
	    (answered && hands_on(c, *cpu, tc, answered)) || c->leaves_hook ||
	    c->lent_pid || c->samples || (tc && tc->parks))
		kick_cpu(*cpu, SCX_KICK_PREEMPT);
	return 0;
}

#endif /* COHORT_REACT_BPF_H */
