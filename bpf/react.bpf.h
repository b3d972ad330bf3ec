/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What the scheduler does about what observe.bpf.h sees. It keeps which vCPU waits for
 * which, until that has answered. It finds a sibling to run where KVM finds none. And
 * what happens when a CPU's alarm rings.
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
		.mechanism = MECH_IPI,
		.until_ns = now + slice_ns,
	};
	const struct hint *last;
	struct cpu_state *c;
	struct entity *e;
	struct domain *d;
	u64 others;
	s32 cpu;

	if (!is_on(MECH_IPI) || queue & QUEUE_KINDS)
		return;
	e = lookup_entity(queue);
	if (!e)
		return;
	d = domain_at(e->domain);
	/* Not while CPUs are about to run whoever waits. */
	if (lacking_cpus(e, d))
		return;
	others = e->running;
	if (domain_of(here) == e->domain)
		others &= ~bit_of(here);
	if (!others)
		return;
	cpu = cpu_with(d, lowest_cpu(others));
	c = cpu_at(cpu);
	last = &c->hints[HINTS_SIBLING];
	/* Another receiver may be about to have it. */
	if (last->pid && !last->group && vtime_before(now, last->until_ns))
		return;
	give_hint(c, &receiver);
	kick_cpu(cpu, SCX_KICK_PREEMPT);
}

static void on_ipi(struct task_struct *p, struct kvm_vcpu___kvm *vcpu,
		   u32 vector)
{
	s32 to = thread_of_vcpu(vcpu);
	struct task_ctx *receiver = lookup_thread_may_fail(to);
	struct task_ctx *tc = vcpu_ctx(p);
	u64 now = bpf_ktime_get_ns();
	struct group *g;
	u32 queue;

	if (!tc || !receiver || receiver->group != tc->group)
		return;
	g = lookup_group(tc->group);
	if (!g)
		return;
	open_ipi(&tc->signals, p->pid, &receiver->signals, to, vector, now);
	count(&g->info.stats.ipis);
	queue = receiver->queue;
	/* One that is halted is woken by this, and as a rule nobody spins for it.
	 * pipe-4x4 does 1.59 so, and 1.24 if a sibling has to leave its CPU. */
	if (queue && !is_halted(vcpu))
		run_receiver(queue, to, now);
}

/* The running vCPU has handled an interrupt of @vector, whoever sent it. */
SEC("?tp_btf/kvm_eoi")
int BPF_PROG(ipi_answered, void *apic, int vector)
{
	struct task_ctx *tc = vcpu_ctx(bpf_get_current_task_btf());
	struct group *g;
	u32 i;

	/* Most interrupts are none of these. */
	if (!tc || !tc->signals.maybe_open || vector < 0)
		return 0;
	/* Before they are looked at, by a full barrier: a sender may set it meanwhile. */
	__sync_lock_test_and_set(&tc->signals.maybe_open, 0);
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
		g = lookup_group(tc->group);
		if (g)
			count(&g->info.stats.ipis_answered);
	}
	return 0;
}

/* @tc runs. Where nobody will say what it answers, that counts as an answer. */
static void forget_unseen_ipis(struct task_ctx *tc)
{
	u32 i;

	if (!eois_hidden || !tc->signals.maybe_open)
		return;
	for (i = 0; i < OPEN_IPIS; i++)
		tc->signals.open[i].sent_ns = 0;
	tc->signals.maybe_open = 0;
}

static void on_spin(struct task_struct *p)
{
	struct task_ctx *tc = lookup_task_may_fail(p);

	if (tc)
		tc->yielded = 0;
}

/* KVM went round all siblings. If it found nobody, somebody may be ready all the
 * same: KVM leaves out vCPUs preempted in guest user mode. */
static void on_spin_end(struct task_struct *p)
{
	struct task_ctx *tc = lookup_task_may_fail(p);
	s32 cpu = bpf_get_smp_processor_id();
	struct cpu_state *c = cpu_at(cpu);

	/* It exits again before it has left its CPU: once is enough. */
	if (!tc || tc->yielded || c->yields_pid == p->pid ||
	    !is_on(MECH_RELAXED) || !is_on(MECH_YIELD) || !sibling_waits(tc))
		return;
	/* Not at once: a task that is preempted inside a BPF program may not
	 * leave its CPU, and would keep a sibling from running there. */
	c->yields_pid = p->pid;
	if (!set_alarm(cpu, LEAVE_HOOK_NS))
		c->yields_pid = 0;
}

/* CPU @cpu is to look again what it runs at some time. Is that now? Its alarm, which
 * rings, may have been set for something else. */
static bool is_asked(struct cpu_state *c, s32 cpu, u64 now)
{
	u64 asked_ns = c->asked_ns;

	if (!asked_ns || (vtime_before(now, asked_ns) &&
			  look_again(c, cpu, asked_ns - now, now)))
		return false;
	c->asked_ns = 0;
	return true;
}

/* The alarm of CPU @cpu rings. A task that runs elsewhere since may have set it: then
 * there is nothing to do. If another CPU set it, nothing is known of who runs. */
static int alarm_rings(void *map, u32 *cpu, struct timer *alarm)
{
	struct task_struct *p = bpf_get_current_task_btf();
	struct task_ctx *tc = is_here(*cpu) ? lookup_task_may_fail(p) : NULL;
	struct cpu_state *c = cpu_at(*cpu);
	s32 pid = p->pid;
	u64 now = bpf_ktime_get_ns();
	bool yields, polls, asked;

	yields = tc && c->yields_pid == pid;
	/* Not if another class has the vCPU. */
	polls = tc && tc->run_at_ns && c->polls_pid == pid;
	c->yields_pid = 0;
	c->polls_pid = 0;
	if (polls)
		end_polling(c, *cpu, p);
	if (tc && tc->run_at_ns && obey_cap(p, tc) && !tc->parks)
		set_alarm(*cpu, CAP_LOOK_NS);
	asked = is_asked(c, *cpu, now);
	if ((yields && gives_way(c, *cpu, tc, pid)) || c->leaves_hook ||
	    asked || (tc && tc->parks))
		kick_cpu(*cpu, SCX_KICK_PREEMPT);
	else if (c->lent_pid)
		resched(c, *cpu, now);
	return 0;
}

#endif /* COHORT_REACT_BPF_H */
