/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Who has a CPU out of turn: a sibling goes on with what is left of a turn, a turn
 * goes on that was interrupted, a vCPU that wakes has a loan. Each is written down
 * when it comes up, and served by the CPU's next dispatch. Not here: yields, which
 * are owed to a VM (yield.bpf.h), and when a CPU is lent (policy/wake.h).
 */
#ifndef COHORT_REST_BPF_H
#define COHORT_REST_BPF_H

/* Run who has @rest, on @cpu. */
static bool serve_rest(struct rest *rest, s32 cpu, u64 now, u32 mechanism)
{
	u64 left_ns = loan_slice(now, rest->until_ns, slice_ns);
	struct queue *q = lookup_queue(rest->queue);
	s32 pid = rest->pid;

	rest->pid = 0;
	if (!left_ns || !q || throttled_by(q->group) ||
	    !run_waiting(rest->queue, pid, cpu, left_ns))
		return false;
	count_effect(mechanism);
	return true;
}

/* Thread @pid was woken while a sibling runs on @c. */
static void name_heir(struct cpu_state *c, s32 pid, u32 queue_id)
{
	c->heir.pid = pid;
	c->heir.queue = queue_id;
	c->heir.until_ns = c->slice_until_ns;
}

/* @woken waits for @cpu. Did a running sibling wake it there, one that will leave it
 * the CPU soon? What that one does is noted: see note_sleep(). */
static bool is_left_to(struct task_ctx *woken, s32 cpu, u64 now)
{
	struct task_ctx *waker = waker_of(woken);

	if (!waker || !waker->is_vcpu || cpu != bpf_get_smp_processor_id())
		return false;
	if (waker->woke_sibling_ns)
		waker->handovers = handovers(waker->handovers, false);
	waker->woke_sibling_ns = now;
	return is_on(MECH_HEIR) && hands_over(waker->handovers);
}

/* @tc sleeps: did it leave its CPU to a sibling? */
static void note_sleep(struct task_ctx *tc)
{
	u64 after_ns;

	if (!tc->woke_sibling_ns)
		return;
	after_ns = scx_bpf_now() - tc->woke_sibling_ns;
	tc->woke_sibling_ns = 0;
	tc->handovers =
		handovers(tc->handovers, handed_over(after_ns, slice_ns));
}

/* The task that ran on @c, of @cpu, sleeps: does its heir run? */
static bool serve_heir(struct cpu_state *c, s32 cpu, u64 now)
{
	struct queue *q;

	if (!c->heir.pid)
		return false;
	q = lookup_queue(c->heir.queue);
	if (!q || q->group != c->prev_group) {
		c->heir.pid = 0;
		return false;
	}
	return serve_rest(&c->heir, cpu, now, MECH_HEIR);
}

/* Thread @pid of a VM woke in queue @queue_id, and is to have @c for a moment. */
static void name_borrower(struct cpu_state *c, s32 pid, u32 queue_id, u64 now)
{
	c->borrower.pid = pid;
	c->borrower.queue = queue_id;
	c->lent_until_ns =
		now + wake_pause_ns(wake_loan_ns(slice_ns), slice_ns);
}

/* Is @c, of @cpu, lent to a thread that woke? Somebody waits for it meanwhile. */
static bool serve_borrower(struct cpu_state *c, s32 cpu, u64 now)
{
	s32 pid = c->borrower.pid;

	c->borrower.until_ns = now + wake_loan_ns(slice_ns);
	if (!pid || !serve_rest(&c->borrower, cpu, now, MECH_WAKE))
		return false;
	c->lent_pid = pid;
	c->contested = true;
	return true;
}

/* vCPU @pid, which ran on @c, waits again: if it neither gave its turn away nor
 * was interrupted by one that interrupted another, it has the rest. */
static void interrupt_turn(struct cpu_state *c, s32 pid, u32 queue_id, u64 now)
{
	if (c->yield_pid || !vtime_before(now, c->slice_until_ns) ||
	    (c->interrupted.pid && vtime_before(now, c->interrupted.until_ns)))
		return;
	c->interrupted.pid = pid;
	c->interrupted.queue = queue_id;
	c->interrupted.until_ns = c->slice_until_ns;
}

/* The task that ran on @c, of @cpu, sleeps: does a turn go on that it, or one
 * before it, interrupted? If that one's VM has a window in @turn, it fills in for it. */
static bool resume_turn(struct cpu_state *c, s32 cpu, u64 turn, u64 now)
{
	u32 queue_id = c->interrupted.queue;
	struct queue *q;
	struct group *g;

	if (!c->interrupted.pid ||
	    !serve_rest(&c->interrupted, cpu, now, MECH_RESUME))
		return false;
	q = lookup_queue(queue_id);
	g = q ? lookup_group(q->group) : NULL;
	if (turn && g)
		becomes_filler(c, cpu, lane_of_windows(c, q->lane, turn),
			       q->group, g, turn);
	return true;
}

#endif /* COHORT_REST_BPF_H */
