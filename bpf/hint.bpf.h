/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Hints: which task a CPU is to run next, why, and until when that is worth anything. Of
 * several the last one counts. Who wakes and has had less than what runs gets one here. Not
 * here: directed yields (yield.bpf.h).
 */
#ifndef COHORT_HINT_BPF_H
#define COHORT_HINT_BPF_H

enum {
	LOAN_RESUMES = 2, /* of one loan; it would never end where many wake */
};

static void count_miss(struct group *g, u32 reason)
{
	if (reason < NR_YIELD_MISS)
		count(&g->info.stats.yields_missed[reason]);
}

/* The hint of @c has come to an end, a yield's is counted. */
__noinline int end_hint(struct cpu_state *c, bool served)
{
	struct task_ctx *tc;
	struct group *g;
	s32 pid;

	if (!c || !c->hint.pid)
		return 0;
	pid = c->hint.pid;
	c->hint.pid = 0;
	if (served)
		count_effect(c->hint.mechanism);
	if (c->hint.reason != HINT_YIELD)
		return 0;
	tc = lookup_thread_may_fail(pid);
	g = tc ? lookup_group(tc->group) : NULL;
	if (!g)
		return 0;
	if (served)
		count(&g->info.stats.yields_served);
	else
		count_miss(g, tc->queue == c->hint.queue
				      ? YIELD_MISS_LOST
				      : YIELD_MISS_ELSEWHERE);
	return 0;
}

static void give_hint(struct cpu_state *c, s32 pid, u32 queue, u32 reason,
		      u32 mechanism, u64 until_ns)
{
	end_hint(c, false);
	c->hint.queue = queue;
	c->hint.reason = reason;
	c->hint.mechanism = mechanism;
	c->hint.until_ns = until_ns;
	/* Last: a dispatch may come between. */
	barrier();
	c->hint.pid = pid;
}

/* The CPU of @c is lent to thread @pid, for a moment from @now on. */
static void lend(struct cpu_state *c, s32 pid, u64 now)
{
	c->lent_pid = pid;
	c->lent_until_ns = now + wake_loan_ns(slice_ns);
}

/* Serve the hint of @c, of @cpu, unless it is stale; its turn's entity, if one of its tasks
 * waits (@slot_waits), comes before a sibling in a turn of another. */
static bool follow_hint(struct cpu_state *c, s32 cpu, bool slot_waits, u64 now)
{
	s32 pid = c->hint.pid;
	u32 reason = c->hint.reason;
	bool inside = reason == HINT_YIELD || reason == HINT_IPI, served;

	if (!pid)
		return false;
	if (!vtime_before(now, c->hint.until_ns)) {
		end_hint(c, false);
		return false;
	}
	if (inside && slot_waits && c->hint.queue != c->slot)
		return false; /* it comes when its VM has the CPU again */
	served = run_waiting(c->hint.queue, pid, cpu);
	if (served && !inside)
		lend(c, pid, now);
	if (served && reason == HINT_LOAN)
		set_alarm(cpu, wake_loan_ns(slice_ns));
	end_hint(c, served);
	return served;
}

/* ---- who wakes ---- */

/* Has the woken @tc had less than the sibling, or the task of its cgroup, that runs on @c? In
 * a VM only its own threads come before vCPUs. */
static bool comes_before_own(const struct task_ctx *tc, const struct group *g,
			     const struct cpu_state *c, u64 now)
{
	u64 ran_ns = now - c->run_at_ns;

	if (is_vm(g) && tc->is_vcpu)
		return false;
	return vtime_before(tc->vtime + (is_vm(g) ? 0 : WAKE_MARGIN_NS),
			    c->vtime + ran_ns);
}

/* Has the group of the woken @tc had less than @running? A vCPU waits for the VM's other
 * threads: no margin for them. */
static bool comes_before(const struct task_ctx *tc, struct group *g, u64 vtime,
			 struct group *running, u64 now)
{
	u64 margin = is_vm(g) && !tc->is_vcpu
			     ? 0
			     : fair_charge(slice_ns / 8, running->share);

	return fair_preempts(vtime, group_vtime(running, now), margin);
}

/* May @c be lent to somebody for a moment? */
static bool may_be_lent(const struct cpu_state *c, u64 now)
{
	return is_on(MECH_WAKE) && !c->lent_pid &&
	       !vtime_before(now, c->lent_until_ns);
}

/*
 * Is the woken @tc, of @g at @vtime, to have a CPU for a moment, out of turn? The one that has
 * it stands at @running, the domain's present at @present.
 */
static bool may_borrow(const struct task_ctx *tc, struct group *g, u64 vtime,
		       u64 running, u64 present)
{
	/* All of it slept, and it has had less than most. */
	if (g->nr_runnable < 2 && vtime_before(vtime, present))
		return true;
	return is_vm(g) && wake_lends(tc->vtime, g->task_vtime_now, g->vtime,
				      running, slice_cost(g, scx_bpf_now()),
				      tasks_at_once(g, nr_cpus), slice_ns);
}

/*
 * @tc, thread @pid of @g, woke and begins to run on @c. If it could have borrowed a CPU, it
 * keeps this one for as long, though its turn may end meanwhile: it would wait for
 * all others' turns in the middle of little work.
 */
static void lend_on_waking(const struct task_ctx *tc, s32 pid, struct group *g,
			   struct cpu_state *c, u64 present)
{
	if (may_be_lent(c, tc->run_at_ns) &&
	    may_borrow(tc, g, g->vtime, g->vtime, present))
		lend(c, pid, tc->run_at_ns);
}

/* Thread @pid, with @tc, which waits in @queue, was stopped on @cpu: if it had that on loan, it comes
 * next, as whoever stopped it, a kernel thread or one more that woke, has little to do. */
static void resume_loan(struct task_ctx *tc, s32 pid, u32 queue, s32 cpu,
			u64 now)
{
	struct cpu_state *c = lookup_cpu(cpu);

	if (!c || !tc->interrupted || tc->resumes >= LOAN_RESUMES ||
	    c->hint.pid)
		return;
	tc->resumes++;
	give_hint(c, pid, queue, HINT_LOAN, MECH_WAKE,
		  now + wake_loan_ns(slice_ns));
}

/* Why the woken @tc, of @g, which stands at @vtime among groups, is to have @c, which runs a
 * task: enum hint_reason. The @present is that of @c's domain. */
static u32 reason_to_preempt(const struct task_ctx *tc, struct group *g,
			     u64 vtime, const struct cpu_state *c, u64 present,
			     u64 now)
{
	struct group *running;

	if (c->group == tc->group)
		return comes_before_own(tc, g, c, now) ? HINT_WAKE : HINT_NONE;
	running = c->group ? lookup_group(c->group) : NULL;
	if (!running)
		return HINT_NONE;
	if (comes_before(tc, g, vtime, running, now))
		return HINT_WAKE;
	return may_be_lent(c, now) &&
			       may_borrow(tc, g, vtime, running->vtime, present)
		       ? HINT_LOAN
		       : HINT_NONE;
}

/* Thread @pid, of @g, which stands at @vtime, woke and waits in @queue. If it is to have CPU
 * @cpu, that is told. */
static __always_inline void preempt_for(const struct task_ctx *tc, s32 pid,
					u32 queue, struct group *g, s32 cpu,
					u64 vtime, u64 present, u64 now)
{
	struct cpu_state *c = lookup_cpu(cpu);
	u32 reason;

	if (!c)
		return;
	reason = reason_to_preempt(tc, g, vtime, c, present, now);
	if (!reason)
		return;
	give_hint(c, pid, queue, reason, MECH_WAKE, now + slice_ns);
	scx_bpf_kick_cpu(cpu, SCX_KICK_PREEMPT);
}

#endif /* COHORT_HINT_BPF_H */
