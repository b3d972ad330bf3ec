/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Who runs in a vCPU's place when that waits before its turn is over: choosing
 * the sibling, remembering it on the CPU, running it at the next dispatch. A turn
 * is its VM's: handing it on costs nobody else anything. Not here: how the reasons
 * are ranked (policy/target.h), how interrupts are seen (observe.bpf.h), who goes
 * on when one sleeps (rest.bpf.h).
 */
#ifndef COHORT_YIELD_BPF_H
#define COHORT_YIELD_BPF_H

enum {
	MAX_SIBLINGS = 256, /* waiting ones looked through for a target */
	MAX_RANKED = 16, /* of which so many are compared */
	YIELD_SLICES = 8, /* how long a yield is owed */
};

/* The best sibling found so far. */
struct choice {
	s32 pid; /* 0: none */
	u32 queue; /* in which it waits */
	u32 rank; /* enum target_rank */
};

static void count_miss(struct group *g, u32 reason)
{
	if (reason < NR_YIELD_MISS)
		count(&g->info.stats.yields_missed[reason]);
}

/* ---- choosing ---- */

/* The ready vCPU at the end of the chain of unanswered IPIs that starts at task
 * @pid; @cpu must be one that it may use. */
__noinline int follow_chain(s32 pid, s32 cpu, struct choice *choice)
{
	const struct target_facts facts = { .receiver = true };
	struct task_ctx *tc = lookup_thread_may_fail(pid);
	u64 now = scx_bpf_now();
	u32 i;

	if (!choice)
		return 0;
	bpf_rcu_read_lock();
	bpf_for(i, 0, IPI_CHAIN) {
		struct task_ctx *next_tc;
		struct task_struct *next;
		enum ipi_next step;
		struct group *g;
		bool allowed;
		s32 to;

		if (!tc)
			break;
		to = tc->signals.ipi_to;
		g = lookup_group(tc->group);
		next = to && g ? bpf_task_from_pid(to) : NULL;
		if (!next)
			break;
		next_tc = lookup_task_may_fail(next);
		allowed = bpf_cpumask_test_cpu(cpu, next->cpus_ptr);
		bpf_task_release(next);
		if (!next_tc || next_tc->group != tc->group ||
		    !ipi_is_open(open_ipi_from(&next_tc->signals, pid), now,
				 g->ipi_window_ns))
			break;
		step = ipi_step(next_tc->queue != 0, next_tc->run_at_ns != 0);
		if (step == IPI_TAKE && allowed) {
			choice->pid = to;
			choice->queue = next_tc->queue;
			choice->rank = target_rank(&facts);
		}
		if (step != IPI_FOLLOW)
			break;
		tc = next_tc;
		pid = to;
	}
	bpf_rcu_read_unlock();
	return 0;
}

/* Why the ready @tc, of struct kvm_vcpu @vcpu (0: none), should run. */
__noinline int rank_of_ready(struct task_ctx *tc, u64 vcpu, u64 window_ns,
			     bool from_kernel, bool offered)
{
	struct target_facts facts = { .offered = offered };

	if (!tc)
		return TARGET_NONE;
	facts.interrupt =
		has_open_ipi(&tc->signals, scx_bpf_now(), window_ns) ||
		has_pending_interrupt((void *)vcpu);
	facts.kernel = from_kernel && was_in_guest_kernel((void *)vcpu);
	return target_rank(&facts);
}

/* The best of the siblings that wait in queue @queue_id. */
__noinline int rank_siblings(u32 queue_id, s32 cpu, s32 offered_pid,
			     bool from_kernel, struct choice *choice)
{
	struct queue *q = lookup_queue(queue_id);
	struct task_struct *p;
	struct group *g;
	u64 window_ns;
	u32 seen = 0;

	if (!choice || !q)
		return 0;
	g = lookup_group(q->group);
	if (!g)
		return 0;
	window_ns = g->ipi_window_ns;
	bpf_rcu_read_lock();
	bpf_for_each(scx_dsq, p, queue_id, 0) {
		struct task_ctx *tc = lookup_task_may_fail(p);
		bool offered = p->pid == offered_pid;
		u32 rank;

		if (++seen > MAX_RANKED)
			break;
		if (!tc || !tc->is_vcpu ||
		    !bpf_cpumask_test_cpu(cpu, p->cpus_ptr))
			continue;
		rank = rank_of_ready(tc, (u64)vcpu_of(p), window_ns,
				     from_kernel, offered);
		if (target_replaces(rank, offered, choice->rank)) {
			choice->pid = p->pid;
			choice->queue = queue_id;
			choice->rank = rank;
		}
	}
	bpf_rcu_read_unlock();
	return 0;
}

/* Who should run in the place of @giver, thread @pid, on @cpu: @choice holds
 * KVM's candidate, or nobody, and is changed if somebody has a better reason.
 * Siblings are compared only if @ranked. */
static void choose_sibling(struct task_ctx *giver, s32 pid, s32 cpu,
			   bool ranked, struct choice *choice)
{
	s32 offered_pid = choice->pid;

	if (is_on(MECH_IPI))
		follow_chain(pid, cpu, choice);
	if (ranked && choice->rank != TARGET_RECEIVER)
		rank_siblings(giver->queue_cached, cpu, offered_pid,
			      giver->spins_in_kernel, choice);
}

/* Is there a sibling, which @choice is then, for the spinning @tc, thread @pid on
 * @cpu, though KVM found none? */
static bool finds_sibling(struct task_ctx *tc, s32 pid, s32 cpu,
			  struct choice *choice)
{
	struct group *g = lookup_group(tc->group);

	if (!g || !is_vm(g) || throttled_by(tc->group))
		return false;
	choose_sibling(tc, pid, cpu, true, choice);
	return choice->pid != 0;
}

/* ---- owing and serving ---- */

/* Has the task left the queue in which it was offered? */
static bool runs_elsewhere(s32 pid, u32 queue_id)
{
	struct task_ctx *tc = lookup_thread_may_fail(pid);

	return !tc || tc->queue != queue_id;
}

/* The yield that @c owed has come to an end: count it. */
__noinline int end_yield(struct cpu_state *c, bool served)
{
	struct group *g;
	s32 pid;

	if (!c)
		return 0;
	g = lookup_group(c->yield_group);
	pid = c->yield_pid;
	c->yield_pid = 0;
	if (!g)
		return 0;
	if (served) {
		count(&g->info.stats.yields_served);
		count_effect(c->yield_mechanism);
	} else if (runs_elsewhere(pid, c->yield_queue)) {
		count_miss(g, YIELD_MISS_ELSEWHERE);
	} else {
		count_miss(g, YIELD_MISS_LOST);
	}
	return 0;
}

/* What the yield of @giver to thread @taker_pid does to the order of siblings,
 * beyond the turn that it hands on. */
__noinline int reorder(struct task_ctx *giver, s32 giver_pid, s32 taker_pid)
{
	u64 now = scx_bpf_now(), since_reverse_ns = ~0ULL, penalty_ns;
	struct task_ctx *taker = lookup_thread_may_fail(taker_pid);
	struct group *g;

	if (!giver || !taker)
		return 0;
	g = lookup_group(giver->group);
	if (!g)
		return 0;
	if (giver->yielded_by == taker_pid)
		since_reverse_ns = now - giver->yielded_at_ns;
	taker->yielded_by = giver_pid;
	taker->yielded_at_ns = now;
	if (is_on(MECH_CREDIT) && !taker->credit_ns) {
		taker->credit_ns = deboost_credit(slice_ns);
		count_effect(MECH_CREDIT);
	}
	if (!is_on(MECH_PENALTY))
		return 0;
	penalty_ns = deboost_penalty(
		slice_ns, g->nr_runnable, now - giver->penalised_ns,
		since_reverse_ns,
		distance_between(giver->last_cpu, taker->last_cpu));
	if (!penalty_ns)
		return 0;
	giver->penalty_ns = penalty_ns;
	giver->penalised_ns = now;
	count_effect(MECH_PENALTY);
	return 0;
}

/* @c owes @choice, which @mechanism made, to the VM of @giver, thread @pid, which
 * runs there. */
static void owe_yield(struct cpu_state *c, struct task_ctx *giver, s32 pid,
		      const struct choice *choice, u32 mechanism)
{
	struct group *g = lookup_group(giver->group);
	u64 now = scx_bpf_now();

	if (!g)
		return;
	count(&g->info.stats.yields_ready);
	/* One is owed at a time. */
	if (c->yield_pid)
		end_yield(c, false);
	c->yield_turn_until_ns = c->slice_until_ns;
	c->yield_queue = choice->queue;
	c->yield_group = giver->group;
	c->yield_mechanism = mechanism;
	c->yield_until_ns = now + YIELD_SLICES * slice_ns;
	/* Last: a dispatch may come between, if the hook of an exit gives it. */
	barrier();
	c->yield_pid = choice->pid;
	if (is_on(MECH_PENALTY) || is_on(MECH_CREDIT))
		reorder(giver, pid, choice->pid);
}

/* Is a yield to be served when group @id has a turn on @c? */
static bool owes_yield(struct cpu_state *c, u32 id, u64 now)
{
	if (!c->yield_pid || c->yield_group != id)
		return false;
	if (vtime_before(now, c->yield_until_ns))
		return true;
	end_yield(c, false);
	return false;
}

/* Run thread @pid on @cpu for @slice, if it still waits in queue @queue_id. */
__noinline int run_waiting(u32 queue_id, s32 pid, s32 cpu, u64 slice)
{
	struct task_struct *p;
	bool moved = false;
	u32 seen = 0;

	/* Nothing is searched for one that has left. */
	if (runs_elsewhere(pid, queue_id))
		return false;
	bpf_for_each(scx_dsq, p, queue_id, 0) {
		if (p->pid != pid) {
			if (++seen >= MAX_SIBLINGS)
				break;
			continue;
		}
		if (bpf_cpumask_test_cpu(cpu, p->cpus_ptr))
			moved = move_here(BPF_FOR_EACH_ITER, p, slice);
		break;
	}
	return moved;
}

/* Run the target of the yield that @c, of @cpu, owes, for @slice. */
static bool serve_yield(struct cpu_state *c, s32 cpu, u64 slice)
{
	bool served = run_waiting(c->yield_queue, c->yield_pid, cpu, slice);

	end_yield(c, served);
	return served;
}

/* Does the target of the yield that @c, of @cpu, owes to group @id take over the turn of
 * the yielder? What is left of that is known at a dispatch only: in ops.yield(),
 * scx_bpf_now() may be milliseconds old, as the kernel keeps the clock that another
 * CPU read when it took a task from this one (only rq_unpin_lock() drops it). */
static bool hands_turn_on(struct cpu_state *c, s32 cpu, u32 id, u64 now)
{
	u64 left_ns;

	if (!owes_yield(c, id, now))
		return false;
	left_ns = loan_slice(now, c->yield_turn_until_ns, slice_ns);
	return left_ns && serve_yield(c, cpu, left_ns);
}

#endif /* COHORT_YIELD_BPF_H */
