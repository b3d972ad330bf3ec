/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Hints: which task a CPU is to run next, why, and until when the hint counts. A task
 * that wakes and has had less than what runs gets a hint here. Not here: directed
 * yields (yield.bpf.h).
 */
#ifndef COHORT_HINT_BPF_H
#define COHORT_HINT_BPF_H

enum {
	LOAN_RESUMES = 2, /* since a task woke; without end where many wake */
};

static void count_miss(struct group *g, u32 reason)
{
	if (reason < NR_YIELD_MISS)
		count(&g->info.stats.yields_missed[reason]);
}

/* @hint has come to an end, as it was @served, or came too late. A yield's is counted. */
static void end_hint(struct hint *hint, bool served)
{
	s32 pid = hint->pid;
	struct group *g;

	hint->pid = 0;
	if (served)
		count_effect(hint->mechanism);
	g = hint->group ? lookup_group(hint->group) : NULL;
	if (!g)
		return;
	if (served)
		count(&g->info.stats.yields_served);
	else
		count_miss(g, has_left(pid, hint->queue) ? YIELD_MISS_ELSEWHERE
							 : YIELD_MISS_LOST);
}

static void give_hint(struct cpu_state *c, const struct hint *given)
{
	u32 place = given->mechanism == MECH_WAKE ? HINTS_WOKE : HINTS_SIBLING;
	struct hint *hint = &c->hints[place];

	if (place == HINTS_WOKE && hint->pid)
		c->hints[HINTS_WOKE_BEFORE] = *hint;
	if (hint->pid)
		end_hint(hint, false);
	hint->queue = given->queue;
	hint->group = given->group;
	hint->reason = given->reason;
	hint->mechanism = given->mechanism;
	hint->until_ns = given->until_ns;
	/* Last: a dispatch may come between. */
	barrier();
	hint->pid = given->pid;
}

/* The CPU of @c is for thread @pid until @until_ns, by @reason. */
static void lend(struct cpu_state *c, s32 pid, u32 reason, u64 until_ns)
{
	c->lent_pid = pid;
	c->lent_reason = reason;
	c->lent_until_ns = until_ns;
}

/* Serve the hint of @c, of @cpu, at @place, unless it is stale; its turn's entity, if
 * one of its tasks waits (@slot_waits), comes before a sibling in a turn of another. */
__noinline bool follow_hint(struct cpu_state *c, u32 place, s32 cpu,
			    bool slot_waits)
{
	u64 now = bpf_ktime_get_ns();
	struct hint *hint;
	bool served;
	u32 reason;
	s32 pid;

	if (!c || place >= NR_HINTS)
		return false;
	hint = &c->hints[place];
	reason = hint->reason;
	pid = hint->pid;
	if (!pid)
		return false;
	if (!vtime_before(now, hint->until_ns)) {
		end_hint(hint, false);
		return false;
	}
	if (place == HINTS_SIBLING && slot_waits &&
	    hint->queue != slot_queue(c->slot, cpu))
		return false; /* it comes when its VM has the CPU again */
	served = run_waiting(hint->queue, pid, cpu);
	if (served && place != HINTS_SIBLING)
		lend(c, pid, reason, now + wake_loan_ns(slice_ns));
	if (served && reason == HINT_LOAN)
		set_alarm(cpu, wake_loan_ns(slice_ns));
	end_hint(hint, served);
	return served;
}

/* @c, of @cpu, looks at the vCPU that rests there, if that was asked for. */
static bool looks(struct cpu_state *c, s32 cpu)
{
	s32 pid = c->resting_pid;

	if (!c->looks)
		return false;
	c->looks = 0;
	if (!pid || !run_waiting(BOUND_QUEUE | cpu, pid, cpu))
		return false;
	lend(c, pid, HINT_WAKE, bpf_ktime_get_ns() + REST_LOOK_NS);
	set_alarm(cpu, REST_LOOK_NS);
	return true;
}

static bool follow_hints(struct cpu_state *c, s32 cpu, bool slot_waits)
{
	u32 place;

	for (place = 0; place < NR_HINTS; place++) {
		if (c->hints[place].pid &&
		    follow_hint(c, place, cpu, slot_waits))
			return true;
	}
	return false;
}

/* ---- who wakes ---- */

/* Has the woken @tc had less than the sibling, or the task of its cgroup, that runs on
 * @c? In a VM only its own threads come before vCPUs. */
static bool comes_before_own(const struct task_ctx *tc, const struct group *g,
			     const struct cpu_state *c, u64 now)
{
	u64 ran_ns = ns_since(c->run_at_ns, now);

	if (tc->is_vcpu)
		return false;
	return vtime_before(tc->vtime + (is_vm(g) ? 0 : WAKE_MARGIN_NS),
			    c->vtime + ran_ns);
}

/* By how much the group of the woken @tc, @g, has to be behind the one of @share that
 * has the CPU, to preempt that. A vCPU waits for the VM's other threads: no margin for
 * them. One whose siblings want to run as well waits with them for their VM's turn, and
 * ends no other's, unless their VM is behind by more than a turn. */
static u64 preempting_margin(const struct task_ctx *tc, struct group *g,
			     u64 share, u64 now)
{
	u32 together = nr_together(g);

	if (is_vm(g) && !tc->is_vcpu)
		return 0;
	if (tc->is_vcpu && together > 1)
		return slice_cost(g, now) * together;
	return fair_charge(wake_loan_ns(slice_ns), share);
}

/* May somebody borrow @c? */
static bool may_be_lent(const struct cpu_state *c, u64 now)
{
	return is_on(MECH_WAKE) && !vtime_before(now, c->next_loan_ns);
}

/* Where the one stands from whom @c, which runs a task of @running, would be borrowed:
 * that task, or who goes on there after a moment. */
static u64 lender_vtime(const struct cpu_state *c, const struct group *running)
{
	struct entity *e = c->lent_pid ? entity_in_slot(c->slot) : NULL;
	struct group *g = e ? lookup_group(e->group) : NULL;

	if (g)
		return g->vtime;
	return c->bound ? c->bound_present + c->bound_offset : running->vtime;
}

/* Of @g, which stands at @vtime, all slept but a task that woke, and it has had less than
 * most. */
static bool slept(const struct group *g, u64 vtime, u64 present)
{
	return nr_together(g) < 2 && vtime_before(vtime, present);
}

/* The woken @tc sleeps more than others of the VM @g. */
static bool sleeps_more(const struct task_ctx *tc, const struct group *g)
{
	return is_vm(g) &&
	       wake_sleeps_more(tc->vtime, g->task_vtime_now, slice_ns);
}

/* Is its VM @g not too far ahead of whoever @c, which runs a task of @running, would be
 * borrowed from? */
static bool may_borrow(struct group *g, const struct cpu_state *c,
		       const struct group *running, u64 now)
{
	return wake_lends(g->vtime, lender_vtime(c, running),
			  slice_cost(g, now), tasks_at_once(g));
}

/*
 * @p, with @tc, of @g, woke and begins to run on @c, without a hint. A CPU's kernel
 * thread has it for a moment. So has who could have borrowed a CPU, though its turn may
 * end meanwhile: it would wait for all others' turns in the middle of little work.
 */
static void lend_on_waking(const struct task_struct *p,
			   const struct task_ctx *tc, struct group *g,
			   struct cpu_state *c, u64 present)
{
	u32 reason = HINT_NONE;

	if (is_per_cpu_kthread(p))
		reason = HINT_WAKE;
	else if (may_be_lent(c, tc->run_at_ns) &&
		 (slept(g, g->vtime, present) || sleeps_more(tc, g)))
		reason = HINT_LOAN;
	if (reason)
		lend(c, p->pid, reason, tc->run_at_ns + wake_loan_ns(slice_ns));
}

/* Thread @pid, with @tc, which waits in @queue, was stopped on @cpu: if it had that for
 * a moment, it comes next, as whoever stopped it, a kernel thread or one more that
 * woke, has little to do. */
static void resume_loan(struct task_ctx *tc, s32 pid, u32 queue, s32 cpu,
			u64 now)
{
	struct hint hint = {
		.pid = pid,
		.queue = queue,
		.reason = HINT_LOAN,
		.mechanism = MECH_WAKE,
	};

	if (!vtime_before(now, tc->lent_until_ns) ||
	    tc->resumes >= LOAN_RESUMES)
		return;
	tc->resumes++;
	hint.until_ns = now + wake_loan_ns(slice_ns);
	give_hint(cpu_at(cpu), &hint);
}

/* Why the woken @tc, of @g, which stands at @vtime among groups, is to have @c, which
 * runs a task: enum hint_reason. The @present is that of @c's domain. */
static __always_inline u32 reason_to_preempt(const struct task_ctx *tc,
					     struct group *g, u64 vtime,
					     const struct cpu_state *c,
					     u64 present, u64 now)
{
	struct group *running;
	u64 at;

	if (c->group == tc->group)
		return comes_before_own(tc, g, c, now) ? HINT_WAKE : HINT_NONE;
	running = c->group ? lookup_group(c->group) : NULL;
	if (!running)
		return HINT_NONE;
	if (c->rests)
		return HINT_WAKE;
	at = running_vtime(c, running, now);
	/* The margin may take long to find out. */
	if (vtime_before(vtime, at) &&
	    fair_preempts(vtime, at,
			  preempting_margin(tc, g, running->share, now)))
		return HINT_WAKE;
	if (may_be_lent(c, now) &&
	    (slept(g, vtime, present) ||
	     (sleeps_more(tc, g) && may_borrow(g, c, running, now))))
		return HINT_LOAN;
	return HINT_NONE;
}

/* Thread @pid, of @g, which stands at @vtime, woke and waits in @queue. If it is to
 * have CPU @cpu, that is told. */
static __always_inline void preempt_for(const struct task_ctx *tc, s32 pid,
					u32 queue, struct group *g, s32 cpu,
					u64 vtime, u64 present, u64 now)
{
	struct hint hint = {
		.pid = pid,
		.queue = queue,
		.mechanism = MECH_WAKE,
		.until_ns = now + slice_ns,
	};
	struct cpu_state *c = cpu_at(cpu);

	hint.reason = reason_to_preempt(tc, g, vtime, c, present, now);
	if (!hint.reason)
		return;
	give_hint(c, &hint);
	if (hint.reason == HINT_LOAN)
		resched(c, cpu, now);
	else
		kick_cpu(cpu, SCX_KICK_PREEMPT);
}

#endif /* COHORT_HINT_BPF_H */
