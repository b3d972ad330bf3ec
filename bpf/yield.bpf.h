/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Which sibling runs in the place of a vCPU that spins. A turn is the VM's: handing it
 * on to a sibling costs nobody else anything. Not here: which offers of KVM are taken
 * (policy/yield.h), how interrupts are seen (observe.bpf.h), what a CPU does with the
 * choice (hint.bpf.h).
 */
#ifndef COHORT_YIELD_BPF_H
#define COHORT_YIELD_BPF_H

enum {
	MAX_SEEN = 16, /* waiting siblings that are looked at */
	YIELD_SLICES = 8, /* how long a yield is owed */
};

/* ---- choosing ---- */

/* The ready vCPU at the end of the chain of unanswered IPIs that starts with one from
 * thread @pid, of @choice's group, to thread @to; @cpu must be one that it may use. */
__noinline int find_answerer(s32 pid, s32 to, s32 cpu, struct hint *choice)
{
	u64 now = bpf_ktime_get_ns();
	u32 i;

	if (!choice)
		return 0;
	bpf_rcu_read_lock();
	bpf_for(i, 0, IPI_CHAIN) {
		struct task_struct *next = to ? bpf_task_from_pid(to) : NULL;
		struct task_ctx *tc;
		enum ipi_next step;
		bool allowed;
		u32 queue;

		if (!next)
			break;
		tc = lookup_task_may_fail(next);
		allowed = bpf_cpumask_test_cpu(cpu, next->cpus_ptr);
		bpf_task_release(next);
		if (!tc || tc->group != choice->group ||
		    !ipi_is_open(open_ipi_from(&tc->signals, pid), now,
				 IPI_WINDOW_NS))
			break;
		queue = queue_for_cpu(tc);
		step = ipi_step(queue, tc->run_at_ns != 0);
		if (step == IPI_TAKE && allowed) {
			choice->pid = to;
			choice->queue = queue;
			choice->mechanism = MECH_IPI;
		}
		if (step != IPI_FOLLOW)
			break;
		pid = to;
		to = tc->signals.ipi_to;
	}
	bpf_rcu_read_unlock();
	return 0;
}

/* The same, if the running @tc, thread @pid, waits for an answer and IPIs count. */
static void follow_chain(const struct task_ctx *tc, s32 pid, s32 cpu,
			 struct hint *choice)
{
	if (tc->signals.ipi_to && is_on(MECH_IPI))
		find_answerer(pid, tc->signals.ipi_to, cpu, choice);
}

/* The first of the siblings that wait in queue @queue and may use @cpu. */
__noinline int find_waiting(u32 queue, s32 cpu, struct hint *choice)
{
	struct task_struct *p;
	u32 seen = unknown_zero;

	if (!choice || !queue)
		return 0;
	bpf_rcu_read_lock();
	bpf_for_each(scx_dsq, p, queue, 0) {
		struct task_ctx *tc = lookup_task_may_fail(p);

		if (++seen > MAX_SEEN)
			break;
		if (!tc || !tc->is_vcpu ||
		    !bpf_cpumask_test_cpu(cpu, p->cpus_ptr))
			continue;
		choice->pid = p->pid;
		choice->queue = queue;
		choice->mechanism = MECH_RELAXED;
		break;
	}
	bpf_rcu_read_unlock();
	return 0;
}

/* Are CPUs about to run those siblings of the running @tc that wait, as a turn of
 * their VM has just begun? Who runs one of them here has it run where another one's
 * place is. */
static bool turn_begins(const struct task_ctx *tc, u64 now)
{
	struct entity *e = last_entity(tc);
	struct domain *d;

	if (!e)
		return false;
	d = domain_at(e->domain);
	return lacking_cpus(e, d) &&
	       ns_since(d->planned_ns, now) < wake_loan_ns(slice_ns);
}

/*
 * KVM offers @to, with @taker, in the place of the running @from, with @giver, on @cpu:
 * KVM's candidate is a hint, whom @from waits for comes first. Returns why nobody is
 * run, or YIELD_ACCEPT with @choice.
 */
static s32 answer_offer(struct task_struct *from, struct task_ctx *giver,
			struct task_struct *to, struct task_ctx *taker,
			struct group *g, s32 cpu, struct hint *choice)
{
	bool begins = turn_begins(giver, bpf_ktime_get_ns());
	u32 queue = queue_for_cpu(taker);
	struct yield_offer offer = {
		.sibling = giver->group == taker->group && is_vm(g),
		.ready = queue && !begins,
		.allowed = bpf_cpumask_test_cpu(cpu, to->cpus_ptr),
		.throttled = is_throttled(taker->cgroup_group),
	};
	s32 verdict = yield_verdict(&offer);

	if (verdict == YIELD_ACCEPT) {
		choice->pid = to->pid;
		choice->queue = queue;
		choice->mechanism = MECH_YIELD;
	}
	if (is_vm(g) && !offer.throttled && !begins)
		follow_chain(giver, from->pid, cpu, choice);
	return choice->pid ? YIELD_ACCEPT : verdict;
}

/* The vCPU that was chosen comes in the place of one of @g on @c. */
static void hand_turn_on(struct cpu_state *c, struct group *g,
			 struct hint *choice)
{
	choice->until_ns = bpf_ktime_get_ns() + YIELD_SLICES * slice_ns;
	count(&g->info.stats.yields_ready);
	give_hint(c, choice);
}

/* Does a sibling of the spinning @tc wait for a CPU? */
static bool sibling_waits(const struct task_ctx *tc)
{
	struct entity *e = last_entity(tc);

	return tc->is_vcpu && e && e->nr_waiting > 0;
}

/* The running @tc, thread @pid, gives way on @c, of @cpu, though KVM offers nobody.
 * Whom to is found out now: a moment ago somebody was ready. */
static bool gives_way(struct cpu_state *c, s32 cpu, struct task_ctx *tc,
		      s32 pid)
{
	struct hint choice = { .group = tc->group };
	struct group *g = lookup_group(tc->group);

	if (!g || turn_begins(tc, bpf_ktime_get_ns()))
		return false;
	follow_chain(tc, pid, cpu, &choice);
	if (!choice.pid)
		find_waiting(tc->entity, cpu, &choice);
	if (!choice.pid)
		return false;
	hand_turn_on(c, g, &choice);
	return true;
}

#endif /* COHORT_YIELD_BPF_H */
