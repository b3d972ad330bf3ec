// SPDX-License-Identifier: GPL-2.0-only
/*
 * The sched_ext ops: when a task waits, which one a CPU runs next and how long.
 * Each op is a short list of reasons; the arithmetic is in policy/, the queues
 * in queue.bpf.h, the groups in group.bpf.h.
 *
 * The idea. CPU time is divided between groups first: VMs, and the cgroups of
 * everything else. The group with the least virtual time that may run on a CPU
 * runs there, and inside it the task with the least of its own. What a vCPU
 * gives up in a directed yield therefore can only go to a sibling: the yield
 * hands over the rest of a slice that the VM has already been granted.
 *
 * Example. VMs A and B, two vCPUs each, on two CPUs; A0 runs and spins on a
 * lock that A1, waiting, holds. KVM sees A0's pause-loop exit and offers A1 to
 * ops.yield(), which ends A0's slice and notes A1. The CPU dispatches at once:
 * A1 runs for what A0 had left, releases the lock, and A's virtual time is
 * where it would have been had A0 spun on. B notices nothing.
 */
#include <scx/common.bpf.h>
#include <scx/compat.bpf.h>
#include "intf.h"
#include "policy/average.h"
#include "policy/balance.h"
#include "policy/cohort.h"
#include "policy/deboost.h"
#include "policy/fair.h"
#include "policy/heir.h"
#include "policy/ipi.h"
#include "policy/skew.h"
#include "policy/target.h"
#include "policy/wake.h"
#include "kvm.bpf.h"
#include "apic.bpf.h"
#include "histogram.bpf.h"
#include "signals.bpf.h"
#include "state.bpf.h"
#include "queue.bpf.h"
#include "lane.bpf.h"
#include "group.bpf.h"
#include "window.bpf.h"
#include "vcpu.bpf.h"
#include "yield.bpf.h"
#include "rest.bpf.h"
#include "skew.bpf.h"
#include "front.bpf.h"
#include "balance.bpf.h"
#include "alarm.bpf.h"
#include "react.bpf.h"
#include "observe.bpf.h"

char _license[] SEC("license") = "GPL";

UEI_DEFINE(uei);

enum {
	DISPATCH_TRIES = 4, /* fronts that a dispatch loses to other CPUs */
};

/* ---- predicates ---- */

static bool is_per_cpu_kthread(const struct task_struct *p)
{
	return (p->flags & PF_KTHREAD) && p->nr_cpus_allowed == 1;
}

static bool runnable_here(const struct task_struct *p)
{
	return p->scx.flags & SCX_TASK_QUEUED;
}

/* ---- waking and waiting ---- */

/*
 * Where @p, for which no CPU is idle, is to wait. All CPUs of its lane may take
 * it, but only on this one KVM sees that somebody waits, and does not poll when
 * the guest halts. A sibling that wakes another often halts next.
 */
static s32 waiting_place(struct task_struct *p, struct task_ctx *tc,
			 s32 prev_cpu)
{
	s32 cpu = bpf_get_smp_processor_id();

	if (!tc || !waker_of(tc) || domain_of(cpu) != domain_of(prev_cpu) ||
	    !bpf_cpumask_test_cpu(cpu, p->cpus_ptr))
		return prev_cpu;
	return cpu;
}

s32 BPF_STRUCT_OPS(cohort_select_cpu, struct task_struct *p, s32 prev_cpu,
		   u64 wake_flags)
{
	struct task_ctx *tc = lookup_task_may_fail(p);
	s32 cpu;

	/* A vCPU stays near its memory: its waker's CPU says nothing. */
	if (tc && tc->is_vcpu)
		wake_flags &= ~(u64)SCX_WAKE_SYNC;
	cpu = scx_bpf_select_cpu_and(p, prev_cpu, wake_flags, p->cpus_ptr, 0);
	if (cpu < 0)
		return waiting_place(p, tc, prev_cpu);
	if (tc && !throttled_by(tc->group))
		scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, turn_ns(scx_bpf_now()), 0);
	return cpu;
}

/* Does a VM @running on a CPU give way to a vCPU of cohort @g that woke in its
 * window? */
static bool interrupts_for_window(struct group *g, struct group *running)
{
	u64 turn = turn_for_windows(scx_bpf_now());

	return turn && window_turn(g) == turn && g->info.is_cohort &&
	       is_vm(running) && window_turn(running) != turn &&
	       !vtime_before(running->vtime, g->window_bound);
}

/* May the woken @tc, of @g at @vtime, take @c from the group that runs there? */
static bool preempts(struct task_ctx *tc, struct group *g, u64 vtime,
		     struct cpu_state *c)
{
	struct group *running;
	u64 margin;

	if (!c->group || c->group == tc->group)
		return false;
	running = lookup_group(c->group);
	if (!running)
		return false;
	if (interrupts_for_window(g, running))
		return true;
	/* A vCPU waits for the VM's service threads: no margin for them. */
	margin = is_vm(g) && !tc->is_vcpu
			 ? 0
			 : fair_charge(slice_ns / 8, running->share);
	return fair_preempts(vtime, running->vtime, margin);
}

/* May the woken @tc have @c for a moment, as a loan to its VM @g? That has had its
 * share, stands at @vtime, and runs on the CPUs of lane @lane_id. */
static bool lends(struct cpu_state *c, struct task_ctx *tc, struct group *g,
		  u64 vtime, u32 lane_id)
{
	u64 now = scx_bpf_now();
	struct group *running;
	struct lane *lane;

	if (!is_vm(g) || !is_on(MECH_WAKE) ||
	    vtime_before(now, c->lent_until_ns))
		return false;
	running = lookup_group(c->group);
	lane = lookup_lane(lane_id);
	return running && lane &&
	       wake_lends(tc->vtime, g->task_vtime_now, vtime, running->vtime,
			  fair_charge(slice_ns, group_share(g, now)),
			  tasks_at_once(g, lane->nr_cpus), slice_ns);
}

/* @p's place among the tasks of its group. */
static u64 task_key(struct task_ctx *tc, struct group *g)
{
	u64 head_start = is_vm(g) && !tc->is_vcpu ? 2 * slice_ns : 0;

	tc->vtime = fair_floor(tc->vtime, g->task_vtime_now, slice_ns);
	head_start += tc->credit_ns - tc->penalty_ns;
	tc->credit_ns = 0;
	tc->penalty_ns = 0;
	return tc->vtime - head_start;
}

/* An idle CPU that may run @p gets it at once, in whichever domain: its queues
 * need not be among those that CPU serves. */
static bool give_to_idle(struct task_struct *p, struct task_ctx *tc,
			 u64 enq_flags)
{
	s32 idle;

	/* Its affinity does not say yet that it must stay where it is. */
	if (is_migration_disabled(p) || throttled_by(tc->group))
		return false;
	idle = scx_bpf_pick_idle_cpu(p->cpus_ptr, 0);
	if (idle < 0)
		return false;
	scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL_ON | idle, turn_ns(scx_bpf_now()),
			   enq_flags);
	scx_bpf_kick_cpu(idle, SCX_KICK_IDLE);
	return true;
}

void BPF_STRUCT_OPS(cohort_enqueue, struct task_struct *p, u64 enq_flags)
{
	s32 cpu = scx_bpf_task_cpu(p);
	struct task_ctx *tc = lookup_task(p);
	struct cpu_state *c = lookup_cpu(cpu);
	u64 now = scx_bpf_now(), vtime;
	u32 lane_id, queue_id;
	struct queue *q;
	struct group *g;
	bool left, called;

	if (!tc || !c)
		return;
	stop_waiting(tc);
	if (is_per_cpu_kthread(p)) {
		scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, slice_ns,
				   enq_flags | SCX_ENQ_PREEMPT);
		return;
	}
	/* Of a woken one, ops.runnable() has just done it. */
	if (!(enq_flags & SCX_ENQ_WAKEUP))
		find_group(p, tc);
	if (!tc->ready_at_ns)
		tc->ready_at_ns = now;
	if (give_to_idle(p, tc, enq_flags))
		return;
	lane_id = lane_for(p, tc, cpu);
	queue_id = find_queue(tc, tc->group, lane_id);
	g = lookup_group(tc->group);
	q = lookup_queue(queue_id);
	if (!queue_id || !q || !g) {
		count(&host_stats.queue_exhausted);
		scx_bpf_dsq_insert(p, SCX_DSQ_GLOBAL, slice_ns, enq_flags);
		return;
	}
	if (enq_flags & SCX_ENQ_WAKEUP)
		note_woken_by_ipi(tc, g, now);
	vtime = settle_vtime(g, c, enq_flags & SCX_ENQ_WAKEUP, now);
	scx_bpf_dsq_insert_vtime(p, queue_id, slice_ns, task_key(tc, g),
				 enq_flags);
	tc->queue = queue_id;
	tc->parked_mark_ns = q->parked_sum_ns;
	queue_add_waiter(queue_id, q, vtime);
	/* A CPU may have gone idle since: see cohort_update_idle(). */
	lane_kick_idle(lane_id);
	left = (enq_flags & SCX_ENQ_WAKEUP) && is_left_to(tc, cpu, now);
	called = tc->is_vcpu && !left && call_filler(g, lane_id, now);

	if (!(enq_flags & SCX_ENQ_WAKEUP)) {
		if (tc->is_vcpu && tc->last_cpu == cpu && !tc->stopped_at_ns &&
		    !c->gave_way && is_on(MECH_RESUME))
			interrupt_turn(c, p->pid, queue_id, now);
		return;
	}
	if (is_vm(g) && c->group == tc->group && is_on(MECH_HEIR))
		name_heir(c, p->pid, queue_id);
	if (called)
		return;
	if (lends(c, tc, g, vtime, lane_id))
		name_borrower(c, p->pid, queue_id, now);
	else if (!preempts(tc, g, vtime, c))
		return;
	scx_bpf_kick_cpu(cpu, SCX_KICK_PREEMPT);
}

void BPF_STRUCT_OPS(cohort_dequeue, struct task_struct *p, u64 deq_flags)
{
	leave_queue(p);
}

/* ---- what runs next ---- */

/* Should @prev, whose slice is over, go on in turn @turn rather than @front come? */
static bool goes_on(struct task_ctx *tc, const struct front *front, u64 turn,
		    u64 now)
{
	struct group *g;
	u64 head;

	if (throttled_by(tc->group))
		return false;
	if (!front->queue)
		return true;
	g = lookup_group(tc->group);
	if (!g)
		return false;
	if (front->group != tc->group) {
		if (front->in_window && window_turn(g) == turn)
			return true; /* two cohorts, side by side */
		return vtime_before(group_vtime(g, now), front->key);
	}
	return !head_vtime(front->queue, &head) ||
	       vtime_before(tc->vtime, head);
}

/* @p, which runs on @c, gets another slice. */
static void extend(struct cpu_state *c, struct task_struct *p,
		   struct task_ctx *tc, u64 now)
{
	struct group *g = lookup_group(tc->group);
	u64 slice = turn_ns(now);

	tc->stopped_at_ns = 0; /* nobody has taken its place */
	c->lent_pid = 0;
	scx_bpf_task_set_slice(p, slice);
	c->slice_until_ns = now + slice;
	if (!g)
		return;
	serve_window(c, tc, g, now);
	watch_slice(scx_bpf_task_cpu(p), c, g, tc, now);
}

/* The contest on @c, if there was one, went to group @id, which the key of @front
 * (its own queue's, or the loser's if that waits here) may have put before its
 * time. */
static void favour(struct cpu_state *c, u32 id, const struct front *front,
		   u64 now)
{
	struct group *g;
	u64 vtime;

	if (!c->contested)
		return;
	g = lookup_group(id);
	if (!g)
		return;
	vtime = g->vtime;
	if ((front->queue || front->in_window) &&
	    vtime_before(front->key, vtime))
		vtime = front->key;
	/* A woken task has credit: served, it does not turn the clock back. */
	if (now - c->present_at_ns > PRESENT_FRESH_NS ||
	    vtime_before(c->present, vtime))
		c->present = vtime;
	c->present_at_ns = now;
}

/*
 * This CPU is to dispatch once more. Not if it goes offline: it becomes idle for
 * the last time after its last interrupt, a kick would stay pending, and whoever
 * waits for that to end (the kernel, when it takes this scheduler out) would
 * wait for ever.
 */
static void look_again(struct cpu_state *c, s32 cpu)
{
	if (!c->offline)
		scx_bpf_kick_cpu(cpu, 0);
}

void BPF_STRUCT_OPS(cohort_dispatch, s32 cpu, struct task_struct *prev)
{
	struct task_ctx *tc = NULL;
	struct cpu_state *c = lookup_cpu(cpu);
	u64 now = scx_bpf_now(), turn = turn_for_windows(now);
	struct front front = {};
	struct queue *q;
	bool called, lost = false;
	u32 i;

	if (!c)
		return;
	if (prev && runnable_here(prev)) {
		tc = lookup_task_may_fail(prev);
		if (tc)
			charge(prev, tc, c, now);
	}
	if (leaves_hook(c, cpu, prev, tc))
		return;
	called = gives_way(c, turn);
	if (serve_borrower(c, cpu, now))
		return;
	if (!called) {
		if (!tc &&
		    (serve_heir(c, cpu, now) || resume_turn(c, cpu, turn, now)))
			return;
		if (tc && hands_turn_on(c, cpu, tc->group, now))
			return;
	}
	if (balance(c, cpu, tc ? lookup_group(tc->group) : NULL, now))
		return;

	bpf_for(i, 0, DISPATCH_TRIES) {
		find_front(cpu, tc ? tc->group : 0, turn, &front);
		if (turn && front.queue && !front.in_window &&
		    is_on(MECH_PACKING))
			pack_front(c, turn, &front);
		q = lookup_queue(front.queue);
		c->contested = front.contested || wanted_afar(c, now);
		if (tc && goes_on(tc, &front, turn, now)) {
			if (turn && front.contested && !front.in_window &&
			    !open_window(tc->group, tc->queue_cached, front.key,
					 turn))
				continue;
			favour(c, tc->group, &front, now);
			if (owes_yield(c, tc->group, now) &&
			    serve_yield(c, cpu, turn_ns(now)))
				return;
			extend(c, prev, tc, now);
			return;
		}
		if (!front.queue || !q)
			break;
		if (turn && !front.in_window &&
		    !open_window(front.group, front.queue, front.key, turn))
			continue;
		favour(c, front.group, &front, now);
		q->served_key = front.key;
		if (owes_yield(c, front.group, now) &&
		    serve_yield(c, cpu, turn_ns(now)))
			return;
		if (take_from(front.queue, cpu, now))
			return;
		/* Another CPU took it; or an enqueue is under way, or an
		 * affinity is just changing: whoever stands behind must not
		 * wait for that, in a window neither. */
		queue_relist(q->lane, front.queue, front.key + slice_ns / 8,
			     false);
		if (lost)
			turn = 0;
		lost = true;
	}
	if (steal(c, cpu, now))
		return;
	/* Fronts were lost to other CPUs: better @prev than an idle CPU, and
	 * better another look than an idle CPU with tasks waiting for it. */
	if (tc && !throttled_by(tc->group))
		extend(c, prev, tc, now);
	else if (front.queue)
		look_again(c, cpu);
}

/*
 * A task that began to wait after this CPU's last look, and before the CPU was
 * marked as idle, would wait for nobody. An enqueue counts the task, then looks
 * for an idle CPU; this, after the mark, looks for counted tasks: one sees the
 * other.
 */
void BPF_STRUCT_OPS(cohort_update_idle, s32 cpu, bool idle)
{
	struct cpu_state *c = lookup_cpu(cpu);

	if (idle && c && someone_waits(c, cpu))
		look_again(c, cpu);
}

/*
 * KVM offers @to in the place of the spinning @from; or, without @to, a task
 * called sched_yield(). Nothing can be moved here: the dispatch that follows on
 * this CPU does it. KVM's candidate is a hint: whom @from waits for comes first.
 */
bool BPF_STRUCT_OPS(cohort_yield, struct task_struct *from,
		    struct task_struct *to)
{
	s32 cpu = scx_bpf_task_cpu(from), verdict, offered_pid = 0;
	struct task_ctx *giver = lookup_task_may_fail(from), *taker;
	struct cpu_state *c = lookup_cpu(cpu);
	struct yield_offer offer = {};
	struct choice choice = {};
	u32 mechanism = MECH_YIELD;
	struct group *g;

	if (!to) {
		scx_bpf_task_set_slice(from, 0);
		return false;
	}
	taker = lookup_task_may_fail(to);
	if (!giver || !taker || !c || !is_on(MECH_YIELD))
		return false;
	g = lookup_group(giver->group);
	if (!g)
		return false;
	offer.sibling = giver->group == taker->group && is_vm(g);
	offer.ready = taker->queue != 0;
	offer.allowed = bpf_cpumask_test_cpu(cpu, to->cpus_ptr);
	offer.throttled = throttled_by(giver->group) != 0;

	count(&g->info.stats.yields_offered);
	verdict = yield_verdict(&offer);
	if (verdict == YIELD_ACCEPT) {
		offered_pid = to->pid;
		choice.pid = to->pid;
		choice.queue = taker->queue;
		choice.rank = TARGET_OFFERED;
	}
	if (is_vm(g) && !offer.throttled)
		choose_sibling(giver, from->pid, cpu, is_on(MECH_RANK),
			       &choice);
	if (!choice.pid) {
		count_miss(g, verdict);
		return false;
	}
	if (choice.pid != offered_pid) {
		count(&g->info.stats.yields_better);
		mechanism =
			choice.rank == TARGET_RECEIVER ? MECH_IPI : MECH_RANK;
	}
	owe_yield(c, giver, from->pid, &choice, mechanism);
	giver->yielded = 1;
	scx_bpf_task_set_slice(from, 0);
	return true;
}

/* ---- running ---- */

void BPF_STRUCT_OPS(cohort_runnable, struct task_struct *p, u64 enq_flags)
{
	struct task_ctx *tc = lookup_task_may_fail(p);
	struct group *g;

	if (!tc)
		return;
	find_group(p, tc);
	tc->ready_at_ns = scx_bpf_now();
	if (!tc->is_runnable) {
		tc->is_runnable = 1;
		group_runnable(tc->group, 1);
	}
	g = lookup_group(tc->group);
	if (g && tc->is_vcpu && (enq_flags & SCX_ENQ_WAKEUP))
		count(&g->info.stats.wakeups);
}

/* vCPU @tid of @g, which has a CPU again, was kept from running so long. */
static void note_waits(s32 tid, struct group *g, u64 costop_ns, u64 capped_ns)
{
	struct vcpu_waits *waits, first = {
		.costop_ns = costop_ns,
		.capped_ns = capped_ns,
	};

	if (!costop_ns && !capped_ns)
		return;
	__sync_fetch_and_add(&g->info.stats.costop_ns, costop_ns);
	__sync_fetch_and_add(&g->info.stats.throttled_ns, capped_ns);
	waits = bpf_map_lookup_elem(&cohort_waits, &tid);
	if (!waits) {
		bpf_map_update_elem(&cohort_waits, &tid, &first, BPF_NOEXIST);
		return;
	}
	waits->costop_ns += costop_ns;
	waits->capped_ns += capped_ns;
}

/* A task got a CPU: how long it waited, and a vCPU behind whom. */
static void account_wait(struct task_struct *p, struct task_ctx *tc,
			 struct group *g, struct cpu_state *c, s32 cpu, u64 now)
{
	u64 waited_ns = tc->ready_at_ns ? now - tc->ready_at_ns : 0;
	u64 throttled_ns = tc->throttled_ns, costop_ns;
	struct lane *lane;

	end_stop(tc, now);
	costop_ns = tc->costop_ns;
	tc->costop_ns = 0;
	tc->ready_at_ns = 0;
	tc->throttled_ns = 0;
	__sync_fetch_and_add(&g->info.stats.waited_ns, waited_ns);
	if (!tc->is_vcpu)
		return;
	/* It may have joined a queue that was parked already. */
	if (throttled_ns > waited_ns)
		throttled_ns = waited_ns;
	if (costop_ns > waited_ns - throttled_ns)
		costop_ns = waited_ns - throttled_ns;
	note_waits(p->pid, g, costop_ns, throttled_ns);
	__sync_fetch_and_add(&g->info.stats.ready_ns,
			     waited_ns - throttled_ns - costop_ns);
	if (tc->last_cpu >= 0 && tc->last_cpu != cpu)
		count(&g->info.stats.migrations);
	if (c->prev_group != tc->group || c->prev_pid == p->pid)
		return;
	lane = lookup_lane(lane_for(p, tc, cpu));
	if (lane && lane->nr_cpus > fair_nr_running(g->running)) {
		u64 behind_ns = c->prev_run_ns;

		if (behind_ns > waited_ns)
			behind_ns = waited_ns;
		__sync_fetch_and_add(&g->info.stats.stacked_ns, behind_ns);
	}
}

void BPF_STRUCT_OPS(cohort_running, struct task_struct *p)
{
	s32 cpu = scx_bpf_task_cpu(p);
	struct task_ctx *tc = lookup_task_may_fail(p);
	struct cpu_state *c = lookup_cpu(cpu);
	u64 now = scx_bpf_now();
	struct group *g;

	if (!tc || !c)
		return;
	stop_waiting(tc);
	g = lookup_group(tc->group);
	if (!g)
		return;
	account_wait(p, tc, g, c, cpu, now);
	wait_ends(&tc->signals.ipi_waits_ns, g->info.stats.ipi_to_run, now);
	forget_unseen_ipis(tc);
	tc->run_at_ns = now;
	tc->charged_ns = p->se.sum_exec_runtime;
	tc->charged_at_ns = now;
	serve_window(c, tc, g, now);
	c->slice_until_ns = now + p->scx.slice;
	if (c->lent_pid != p->pid)
		c->lent_pid = 0;
	tc->last_cpu = cpu;
	if (vtime_before(g->task_vtime_now, tc->vtime))
		g->task_vtime_now = tc->vtime;
	__sync_fetch_and_add(&g->running, fair_runs(now));
	c->group = tc->group;
	watch_slice(cpu, c, g, tc, now);
}

void BPF_STRUCT_OPS(cohort_stopping, struct task_struct *p, bool runnable)
{
	s32 cpu = scx_bpf_task_cpu(p);
	struct task_ctx *tc = lookup_task_may_fail(p);
	struct cpu_state *c = lookup_cpu(cpu);
	u64 now = scx_bpf_now();
	struct group *g;

	if (!tc || !c || !tc->run_at_ns)
		return;
	charge(p, tc, c, now);
	g = lookup_group(tc->group);
	if (g)
		__sync_fetch_and_sub(&g->running, fair_runs(tc->charged_at_ns));
	c->prev_pid = p->pid;
	c->prev_group = tc->group;
	c->prev_run_ns = now - tc->run_at_ns;
	if (c->lent_pid == p->pid)
		c->lent_until_ns =
			now + wake_pause_ns(c->prev_run_ns, slice_ns);
	c->group = 0;
	c->grace_pid = 0;
	c->relaxed_pid = 0;
	tc->run_at_ns = 0;
	tc->ready_at_ns = runnable ? now : 0;
}

void BPF_STRUCT_OPS(cohort_quiescent, struct task_struct *p, u64 deq_flags)
{
	struct task_ctx *tc = lookup_task_may_fail(p);

	if (!tc)
		return;
	stop_waiting(tc);
	note_sleep(tc);
	tc->ready_at_ns = 0;
	tc->throttled_ns = 0;
	tc->stopped_at_ns = 0;
	tc->costop_ns = 0;
	if (tc->is_runnable) {
		tc->is_runnable = 0;
		group_runnable(tc->group, -1);
	}
}

/* The slice of @p is over: a vCPU that somebody may be waiting for, as it is in
 * guest kernel mode, runs on for a moment. */
static void give_grace(struct task_struct *p, struct cpu_state *c, u64 now)
{
	u64 longer_ns = grace_ns(slice_ns);

	if (c->grace_pid || !c->contested || !is_on(MECH_GRACE) ||
	    !is_in_guest_kernel(p))
		return;
	/* To the next tick if need be: the alarm ends it before. */
	if (!set_alarm(scx_bpf_task_cpu(p), longer_ns))
		return;
	c->grace_pid = p->pid;
	scx_bpf_task_set_slice(p, slice_ns);
	c->slice_until_ns = now + longer_ns;
	count_effect(MECH_GRACE);
}

void BPF_STRUCT_OPS(cohort_tick, struct task_struct *p)
{
	struct task_ctx *tc = lookup_task_may_fail(p);
	s32 cpu = scx_bpf_task_cpu(p);
	struct cpu_state *c = lookup_cpu(cpu);
	u64 now = scx_bpf_now();
	struct group *g;
	bool over, stops;

	if (!tc || !c || !tc->run_at_ns)
		return;
	g = lookup_group(tc->group);
	if (g)
		follow_crowd(c, turns_before_last(c, cpu, tc, g));
	follow_ticks(c, now);
	charge(p, tc, c, now);
	/* Turns end by the clock; a slice lasts longer by what interrupts took. */
	over = !p->scx.slice || !vtime_before(now, c->slice_until_ns);
	stops = throttled_by(tc->group) || stops_for_sibling(tc, now);
	if (over || stops)
		scx_bpf_task_set_slice(p, 0);
	if (over && !stops)
		give_grace(p, c, now);
	if (!tc->is_vcpu || !g || !is_vm(g))
		return;
	update_score(g);
	if (now - g->parent_checked_ns > PARENT_FRESH_NS) {
		g->parent_checked_ns = now;
		set_parent(tc->group, place_of_vm(tc->cgroup_group));
	}
}

/* ---- tasks and cgroups come, change and go ---- */

static u32 group_of(struct cgroup *cgrp)
{
	u64 cgroup_id = cgrp->kn->id;
	u32 *id = bpf_map_lookup_elem(&group_of_cgroup, &cgroup_id);

	return id ? *id : root_group;
}

s32 BPF_STRUCT_OPS_SLEEPABLE(cohort_init_task, struct task_struct *p,
			     struct scx_init_task_args *args)
{
	struct task_ctx *tc;

	tc = bpf_task_storage_get(&tasks, p, 0, BPF_LOCAL_STORAGE_GET_F_CREATE);
	if (!tc)
		return -ENOMEM;
	tc->cgroup_group = group_of(args->cgroup);
	tc->group = tc->cgroup_group;
	tc->last_cpu = -1;
	count_process(tc->cgroup_group, p->tgid, 1);
	return 0;
}

void BPF_STRUCT_OPS(cohort_exit_task, struct task_struct *p,
		    struct scx_exit_task_args *args)
{
	struct task_ctx *tc = lookup_task_may_fail(p);
	s32 tid = p->pid;

	if (!tc || args->cancelled)
		return;
	stop_waiting(tc);
	if (tc->is_runnable) {
		tc->is_runnable = 0;
		group_runnable(tc->group, -1);
	}
	if (tc->is_vcpu)
		bpf_map_delete_elem(&cohort_waits, &tid);
	leave_group(tc);
	tc->group = 0;
	forget_lane(tc);
	count_process(tc->cgroup_group, p->tgid, -1);
}

void BPF_STRUCT_OPS(cohort_set_cpumask, struct task_struct *p,
		    const struct cpumask *cpumask)
{
	struct task_ctx *tc = lookup_task_may_fail(p);

	if (tc)
		forget_lane(tc);
}

s32 BPF_STRUCT_OPS_SLEEPABLE(cohort_cgroup_init, struct cgroup *cgrp,
			     struct scx_cgroup_init_args *args)
{
	u64 cgroup_id = cgrp->kn->id;
	struct cgroup *above;
	u32 id, parent = 0;
	struct group *g;

	if (cgrp->level > 0) {
		above = bpf_cgroup_ancestor(cgrp, cgrp->level - 1);
		if (!above)
			return -ENOENT;
		parent = group_of(above);
		bpf_cgroup_release(above);
	}
	id = make_group(GROUP_CGROUP, parent, args->weight);
	g = lookup_group(id);
	if (!id || !g ||
	    bpf_map_update_elem(&group_of_cgroup, &cgroup_id, &id, BPF_ANY)) {
		/* Its tasks run as the root's: less fair, not less safe. */
		count(&host_stats.group_exhausted);
		return 0;
	}
	g->info.cgroup_id = cgroup_id;
	if (cgrp->level == 0)
		root_group = id;
	set_cap(id, args->bw_period_us, args->bw_quota_us, args->bw_burst_us);
	return 0;
}

void BPF_STRUCT_OPS(cohort_cgroup_exit, struct cgroup *cgrp)
{
	u64 cgroup_id = cgrp->kn->id;
	u32 id = group_of(cgrp);

	if (id == root_group)
		return;
	bpf_map_delete_elem(&group_of_cgroup, &cgroup_id);
	free_group(id);
}

void BPF_STRUCT_OPS(cohort_cgroup_move, struct task_struct *p,
		    struct cgroup *from, struct cgroup *to)
{
	struct task_ctx *tc = lookup_task_may_fail(p);

	if (!tc)
		return;
	count_process(tc->cgroup_group, p->tgid, -1);
	tc->cgroup_group = group_of(to);
	count_process(tc->cgroup_group, p->tgid, 1);
	find_group(p, tc);
}

void BPF_STRUCT_OPS(cohort_cgroup_set_weight, struct cgroup *cgrp, u32 weight)
{
	u32 id = group_of(cgrp);
	struct group *g = lookup_group(id);

	if (!g)
		return;
	g->info.weight = weight;
	if (g->active_weight > 0)
		add_active_weight(g->info.parent, settle_activity(g));
}

void BPF_STRUCT_OPS(cohort_cgroup_set_bandwidth, struct cgroup *cgrp,
		    u64 period_us, u64 quota_us, u64 burst_us)
{
	u32 id = group_of(cgrp);

	if (id)
		set_cap(id, period_us, quota_us, burst_us);
}

/* With these two the scheduler stays when CPUs come and go. The lanes keep an
 * offline CPU: the kernel runs nothing on it. */
void BPF_STRUCT_OPS(cohort_cpu_online, s32 cpu)
{
	struct cpu_state *c = lookup_cpu(cpu);

	if (c)
		c->offline = 0;
}

void BPF_STRUCT_OPS(cohort_cpu_offline, s32 cpu)
{
	struct cpu_state *c = lookup_cpu(cpu);

	if (c)
		c->offline = 1;
}

/* ---- the scheduler itself ---- */

static int init_domain_lane(u32 domain_id)
{
	u32 id = FIRST_DOMAIN_LANE + domain_id;
	struct lane *lane = lookup_lane(id);
	s32 err = init_lane(id);

	if (!err && lane)
		fill_lane(lane, domain_id, NULL);
	return err;
}

s32 BPF_STRUCT_OPS_SLEEPABLE(cohort_init)
{
	u32 i, id;
	s32 err;

	loaded_ns = scx_bpf_now();
	loaded_jiffies = bpf_jiffies64();
	turns_late_ns = tick_ns;
	bpf_for(i, 1, MAX_GROUPS) {
		id = i;
		bpf_map_push_elem(&free_groups, &id, 0);
	}
	bpf_for(i, 0, MAX_SUBSETS) {
		id = FIRST_SUBSET_LANE + i;
		err = init_lane(id);
		if (err)
			return err;
		bpf_map_push_elem(&free_lanes, &id, 0);
	}
	bpf_for(i, 0, nr_cpus) {
		struct lane *lane = lookup_lane(i);
		struct cpu_alarm *alarm = lookup_alarm(i);

		if (!lane || !alarm)
			return -EINVAL;
		lane->nr_cpus = 1;
		err = bpf_timer_init(&alarm->timer, &alarms, CLOCK_MONOTONIC);
		if (err)
			return err;
		bpf_timer_set_callback(&alarm->timer, alarm_rings);
	}
	bpf_for(i, 0, nr_domains) {
		err = init_domain_lane(i);
		if (err)
			return err;
	}
	bpf_for(i, 1, MAX_QUEUES) {
		err = init_queue(i);
		if (err)
			return err;
	}
	return 0;
}

void BPF_STRUCT_OPS(cohort_exit, struct scx_exit_info *ei)
{
	UEI_RECORD(uei, ei);
}

/*
 * Tasks with migration disabled go through enqueue like others: a vCPU that is
 * preempted inside one of this program's own hooks is one, and the kernel would
 * run it next, whosever turn it is.
 */
SCX_OPS_DEFINE(
	cohort_ops, .select_cpu = (void *)cohort_select_cpu,
	.enqueue = (void *)cohort_enqueue, .dequeue = (void *)cohort_dequeue,
	.dispatch = (void *)cohort_dispatch,
	.update_idle = (void *)cohort_update_idle,
	.yield = (void *)cohort_yield, .runnable = (void *)cohort_runnable,
	.running = (void *)cohort_running, .stopping = (void *)cohort_stopping,
	.quiescent = (void *)cohort_quiescent, .tick = (void *)cohort_tick,
	.init_task = (void *)cohort_init_task,
	.exit_task = (void *)cohort_exit_task,
	.set_cpumask = (void *)cohort_set_cpumask,
	.cgroup_init = (void *)cohort_cgroup_init,
	.cgroup_exit = (void *)cohort_cgroup_exit,
	.cgroup_move = (void *)cohort_cgroup_move,
	.cgroup_set_weight = (void *)cohort_cgroup_set_weight,
	.cgroup_set_bandwidth = (void *)cohort_cgroup_set_bandwidth,
	.cpu_online = (void *)cohort_cpu_online,
	.cpu_offline = (void *)cohort_cpu_offline, .init = (void *)cohort_init,
	.exit = (void *)cohort_exit,
	.flags = SCX_OPS_ENQ_LAST | SCX_OPS_KEEP_BUILTIN_IDLE |
		 SCX_OPS_ENQ_MIGRATION_DISABLED,
	.timeout_ms = 5000, .name = "cohort");
