// SPDX-License-Identifier: GPL-2.0-only
/*
 * The sched_ext ops: when a task waits, which one a CPU runs next and how long. Each op
 * is a short list of reasons; the arithmetic is in policy/.
 *
 * The idea. CPU time is divided between groups first: VMs, and the cgroups of
 * everything else. While tasks wait, each domain (CPUs with one cache) has turns: at
 * the begin of each, a plan gives its CPUs to groups, in the order of what they had,
 * and to each as many as it has tasks that want to run (plan.bpf.h). So a VM's vCPUs
 * run at the same time. What a vCPU gives up, in a directed yield or by sleeping, goes
 * to a sibling first: the CPU is its VM's until the turn ends.
 *
 * Example. VMs A and B, two vCPUs each, on two CPUs. In A's turn A0 spins on a lock
 * that A1 holds: it runs, as both CPUs are A's, and the lock is free in a moment. Were
 * there one CPU, KVM would see A0's pause-loop exit and offer A1 to ops.yield(), which
 * gives the CPU a hint and ends A0's slice: A1 runs for what is left of the turn,
 * releases the lock, and A's virtual time is where it would have been had A0 spun on. B
 * notices nothing.
 */
#include <scx/common.bpf.h>
#include <scx/compat.bpf.h>
#include "intf.h"
#include "arch.bpf.h"
#include "policy/balance.h"
#include "policy/fair.h"
#include "policy/ipi.h"
#include "policy/plan.h"
#include "policy/rest.h"
#include "policy/wake.h"
#include "policy/yield.h"
#include "kvm.bpf.h"
#include "apic.bpf.h"
#include "halt.bpf.h"
#include "histogram.bpf.h"
#include "signals.bpf.h"
#include "state.bpf.h"
#include "kick.bpf.h"
#include "cap.bpf.h"
#include "entity.bpf.h"
#include "alarm.bpf.h"
#include "rest.bpf.h"
#include "group.bpf.h"
#include "plan.bpf.h"
#include "wait.bpf.h"
#include "take.bpf.h"
#include "poll.bpf.h"
#include "hint.bpf.h"
#include "yield.bpf.h"
#include "vcpu.bpf.h"
#include "react.bpf.h"
#include "observe.bpf.h"

char _license[] SEC("license") = "GPL";

UEI_DEFINE(uei);

enum {
	KTHREAD_SLICES =
		16, /* virtual time that a CPU's kernel thread uses at once */
};

/* ---- waking and waiting ---- */

/*
 * The vCPU @p, with @tc, is woken on @c, of this CPU, which runs a sibling: its waker.
 * If that is by an IPI, and the sibling halts at once after its IPIs, as a rule, @p is
 * to run here as soon as it does: so it is with who answers a request and waits for the
 * next one. It takes no CPU from anybody, and nothing has to be looked for. False: it is
 * to wait as others do.
 */
static bool hand_over(struct task_struct *p, const struct task_ctx *tc,
		      const struct cpu_state *c)
{
	struct task_ctx *waker =
		lookup_task_may_fail(bpf_get_current_task_btf());

	if (!waker || waker->group != tc->group ||
	    waker->signals.ipi_to != p->pid || is_throttled(tc->cgroup_group))
		return false;
	waker->handed_at_ns = bpf_ktime_get_ns();
	if (!wake_hands_over(waker->halts_after_ns) || c->lent_pid ||
	    (c->slot && c->slot != c->entity) ||
	    scx_bpf_dsq_nr_queued(SCX_DSQ_LOCAL))
		return false;
	scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, slice_ns, 0);
	return true;
}

/* A CPU that the VM of the vCPU @p, with @tc, has in this turn, and on which none of it
 * runs: best @prev_cpu; -1: there is none. */
static s32 lacking_cpu_for(struct task_struct *p, const struct task_ctx *tc,
			   s32 prev_cpu)
{
	struct domain *d = domain_with(prev_cpu);
	struct entity *e = last_entity(tc);
	u64 lacks;
	s32 cpu;

	if (!e || e->group != tc->group || e->domain != domain_of(prev_cpu))
		return -1;
	lacks = lacking_cpus(e, d);
	if (!lacks)
		return -1;
	cpu = cpu_with(d, plan_next(lacks, bit_of(prev_cpu), lacks));
	return bpf_cpumask_test_cpu(cpu, p->cpus_ptr) ? cpu : -1;
}

/* @cpu; or, if that is one of @avoided, the next CPU of @d that is not, of @cpus. */
static s32 cpu_outside(const struct domain *d, s32 cpu, u64 avoided, u64 cpus)
{
	u64 own = bit_of(cpu), others = cpus & d->cpus & ~avoided;

	if (!(avoided & own) || !others)
		return cpu;
	return cpu_with(d, next_cpu(others, own));
}

/*
 * Where the vCPU @p, for which no CPU is idle, is to wait. All CPUs of its domain may
 * take it, but one that takes it from another one has more to do: so where it is called
 * to, else where the sibling that wakes it hands its CPU over, else where it was last.
 */
static s32 waiting_place(struct task_struct *p, struct task_ctx *tc,
			 s32 prev_cpu)
{
	s32 here = bpf_get_smp_processor_id();
	s32 cpu = lacking_cpu_for(p, tc, prev_cpu);
	struct cpu_state *c;

	if (cpu >= 0)
		return cpu;
	c = cpu_at(here);
	if (c->group == tc->group && domain_of(here) == domain_of(prev_cpu) &&
	    bpf_cpumask_test_cpu(here, p->cpus_ptr) && hand_over(p, tc, c))
		return here;
	return prev_cpu;
}

/* The idle CPU that suits @p, which wakes; negative: there is none. */
static s32 idle_cpu_for(struct task_struct *p, const struct task_ctx *tc,
			s32 prev_cpu, u64 wake_flags)
{
	bool is_idle = false;
	s32 cpu;

	if (tc && all_crowded() && !idle_cpus(tc, domain_with(prev_cpu)))
		return -EBUSY;
	cpu = scx_bpf_select_cpu_dfl(p, prev_cpu, wake_flags, &is_idle);
	return is_idle ? cpu : -EBUSY;
}

s32 BPF_STRUCT_OPS(cohort_select_cpu, struct task_struct *p, s32 prev_cpu,
		   u64 wake_flags)
{
	struct task_ctx *tc = lookup_task_may_fail(p);
	s32 cpu;

	/* A vCPU stays near its memory: its waker's CPU says nothing. */
	if (tc && tc->is_vcpu)
		wake_flags &= ~(u64)SCX_WAKE_SYNC;
	cpu = idle_cpu_for(p, tc, prev_cpu, wake_flags);
	if (cpu < 0)
		return tc && tc->is_vcpu ? waiting_place(p, tc, prev_cpu)
					 : prev_cpu;
	if (tc && !has_to_park(p, tc, true))
		scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, slice_ns, 0);
	return cpu;
}

/*
 * A task of @e waits, at the CPU @here of @d. If @e has a CPU in this turn that runs
 * somebody else meanwhile, that CPU is told. If it did not wake, @here looks by itself.
 */
static bool call_cpu(struct entity *e, const struct task_ctx *tc, u64 here,
		     bool woke, u64 now)
{
	struct domain *d = domain_at(e->domain);
	u64 lacks = lacking_cpus(e, d) & ~e->called, bit;
	s32 cpu;

	if (!woke)
		lacks &= ~here;
	if (!lacks)
		return false;
	bit = plan_next(lacks, here, lacks);
	cpu = cpu_with(d, bit);
	__sync_fetch_and_or(&e->called, bit);
	pass_on(cpu_at(cpu), cpu, woke && tc->is_vcpu ? e : NULL, d, now);
	return true;
}

/* @p waits for a CPU; it is on @cpu. */
static void wait_for_cpu(struct task_struct *p, struct task_ctx *tc, s32 cpu,
			 u64 enq_flags, u64 now)
{
	bool woke = enq_flags & SCX_ENQ_WAKEUP;
	struct group *g = lookup_group(tc->group);
	struct place to = {};
	struct entity *e;
	struct domain *d;
	u64 vtime;

	if (!g)
		return;
	/* Before sleep is settled: who wakes preempts by what it had. */
	vtime = g->vtime;
	choose_place(p, tc, g, cpu, &to);
	d = to.d;
	e = to.e;
	if (e && woke && nr_together(g) < 2)
		settle_vtime(g, d, now);
	tc->queue = to.queue;
	scx_bpf_dsq_insert_vtime(p, to.queue, slice_ns, to.key, enq_flags);
	note_waiting(&to, g, now);
	if (!e) {
		vtime = to.key + cpu_at(cpu)->bound_offset;
		if (p->nr_cpus_allowed == 1 || !wake_idle_cpu(p, tc, d))
			kick_cpu(cpu, SCX_KICK_IDLE);
	} else if (wake_idle_cpu(p, tc, d) ||
		   take_quiet_cpu(e, to.queue, d, bit_of(cpu)) ||
		   call_cpu(e, tc, d == domain_with(cpu) ? bit_of(cpu) : 0,
			    woke, now)) {
		return;
	}
	if (d != domain_with(cpu))
		return;
	if (!woke) {
		resume_loan(tc, p->pid, to.queue, cpu, now);
		return;
	}
	/* A vCPU that wakes takes no CPU from a sibling, which may hold a lock. */
	if (e && tc->is_vcpu)
		cpu = cpu_outside(d, cpu, e->running, e->cpus);
	else if (e && waits_for_rest(e, d, g))
		cpu = cpu_of_resting(e, d, cpu);
	if (cpu < 0)
		return;
	preempt_for(tc, p->pid, to.queue, g, cpu, vtime, d->present, now);
}

void BPF_STRUCT_OPS(cohort_enqueue, struct task_struct *p, u64 enq_flags)
{
	struct task_ctx *tc = lookup_task(p);
	s32 cpu = scx_bpf_task_cpu(p);
	u64 now;

	if (!tc)
		return;
	/* It began to wait just now, unless it waited elsewhere. */
	now = tc->ready_at_ns && !tc->queue ? tc->ready_at_ns
					    : bpf_ktime_get_ns();
	stop_waiting(tc);
	/* What it is for cannot wait, unless it never ends. */
	if (is_per_cpu_kthread(p) &&
	    tc->bound_cost < KTHREAD_SLICES * slice_ns) {
		scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, slice_ns,
				   enq_flags | SCX_ENQ_PREEMPT);
		return;
	}
	/* Of one that woke, ops.runnable() did it. */
	if (!(enq_flags & SCX_ENQ_WAKEUP) && !tc->is_vcpu)
		find_group(p, tc);
	if (!tc->ready_at_ns)
		tc->ready_at_ns = now;
	if (has_to_park(p, tc, enq_flags & SCX_ENQ_WAKEUP))
		park(p, tc, domain_with(cpu), enq_flags, now);
	else
		wait_for_cpu(p, tc, cpu, enq_flags, now);
}

/* ---- what runs next ---- */

/* The @prev that ran here may go on, as far as it is up to it: it is charged, and its
 * state returned. NULL: its cap stops it, or it is a new vCPU, which waits for a moment,
 * and is its VM's then. */
static struct task_ctx *may_go_on(struct task_struct *prev,
				  const struct domain *d)
{
	struct task_ctx *tc = lookup_task_may_fail(prev);

	if (!tc)
		return NULL;
	charge(prev, tc, d, bpf_ktime_get_ns());
	return has_to_park(prev, tc, false) || is_new_vcpu(prev, tc) ? NULL
								     : tc;
}

/* Does @tc, which ran on @c, of @cpu, and whose turn it is there, stand before the first
 * one that waits with it? */
static bool stands_first(const struct cpu_state *c, u32 slot, s32 cpu,
			 const struct task_ctx *tc)
{
	struct task_struct *head;

	if (tc->rests_on)
		return false;
	/* NULL: it has left, or is not there yet. */
	head = __COMPAT_scx_bpf_dsq_peek(slot_queue(slot, cpu));
	return !head ||
	       vtime_before(c->bound ? c->bound_present + tc->bound_cost
				     : tc->vtime,
			    head->scx.dsq_vtime);
}

/* Run one of those that wait for whom @cpu, with @slot, is in this turn. */
__noinline bool serve_slot(u32 slot, s32 cpu)
{
	struct entity *e = entity_in_slot(slot);

	return e ? take_of(e, slot, cpu, turn_length(domain_with(cpu)))
		 : take_bound(cpu);
}

/* @c, of @cpu in @d, takes a task from elsewhere than its slot. */
static bool fill_in(const struct cpu_state *c, s32 cpu, struct domain *d)
{
	return (!only_rests(c) && take_bound(cpu)) || take_next(d->id, cpu) ||
	       take_bound(cpu) || pull_from_any(d, cpu);
}

/* CPU @cpu is to take a task from another domain, once. */
static bool pulls(struct cpu_state *c, s32 cpu)
{
	u32 from = c->pull_from;

	if (!from)
		return false;
	c->pull_from = 0;
	return pull(from - 1, cpu);
}

void BPF_STRUCT_OPS(cohort_dispatch, s32 cpu, struct task_struct *prev)
{
	struct cpu_state *c = cpu_at(cpu);
	struct domain *d = domain_with(cpu);
	struct task_ctx *tc = NULL;
	struct entity *e;
	bool waits, own;
	u32 slot;

	if (prev && !(prev->scx.flags & SCX_TASK_QUEUED))
		prev = NULL; /* it sleeps */
	if (leaves_hook(c, cpu, prev))
		return;
	if (has_to_unpark(d))
		unpark(d->id);
	/* Once: a plan may change it meanwhile. */
	slot = READ_ONCE(c->slot);
	e = entity_in_slot(slot);
	waits = slot_waits(c, slot, e);
	if (looks(c, cpu) || follow_hints(c, cpu, waits) || pulls(c, cpu))
		return;
	own = prev && slot_runs(c, slot, e);
	/* In another's turn nothing is asked of who ran: it is charged as it stops. */
	if (waits && !own && serve_slot(slot, cpu))
		return;
	if (prev)
		tc = may_go_on(prev, d);
	if (waits && own && !(tc && stands_first(c, slot, cpu, tc)) &&
	    serve_slot(slot, cpu))
		return;
	if (tc && tc->rests_on && take_next(d->id, cpu)) {
		count_effect(MECH_HALTED);
		return;
	}
	if (!tc) {
		fill_in(c, cpu, d);
		return;
	}
	c->lent_pid = 0;
	scx_bpf_task_set_slice(prev, slice_ns);
}

/*
 * A task that began to wait after this CPU's last look, and before the CPU was
 * marked as idle, would wait for nobody. An enqueue counts the task, then looks
 * for an idle CPU; this, after the mark, looks for counted tasks: one sees the
 * other. Once, as it may not be able to run here.
 */
void BPF_STRUCT_OPS(cohort_update_idle, s32 cpu, bool idle)
{
	struct domain *d = domain_with(cpu);
	struct cpu_state *c = cpu_at(cpu);

	if (!idle) {
		__sync_fetch_and_and(&d->idle, ~bit_of(cpu));
		return;
	}
	__sync_fetch_and_or(&d->idle, bit_of(cpu));
	if (d->nr_waiting <= 0 || c->looked_again)
		return;
	c->looked_again = 1;
	kick_cpu(cpu, 0);
}

/* @p, with @tc, which runs on @c, calls sched_yield(): it comes behind whoever ran last
 * in its group. Others of the group have the CPU then; if none waits, nothing is to be
 * done. */
static void yield_in_group(struct task_struct *p, struct task_ctx *tc,
			   const struct cpu_state *c)
{
	struct entity *e = c->entity ? lookup_entity(c->entity) : NULL;
	struct group *g = lookup_group(tc->group);

	if (!g || (e ? e->nr_waiting : c->nr_bound) <= 0)
		return;
	if (vtime_before(tc->vtime, g->task_vtime_now))
		tc->vtime = g->task_vtime_now;
	scx_bpf_task_set_slice(p, 0);
}

/*
 * KVM offers @to in the place of the spinning @from; or, without @to, a task
 * called sched_yield(). Nothing can be moved here: the dispatch that follows on
 * this CPU does it.
 */
bool BPF_STRUCT_OPS(cohort_yield, struct task_struct *from,
		    struct task_struct *to)
{
	s32 cpu = scx_bpf_task_cpu(from), verdict;
	struct task_ctx *giver = lookup_task_may_fail(from), *taker;
	struct cpu_state *c = cpu_at(cpu);
	struct hint choice = {};
	struct group *g;

	if (!giver)
		return false;
	choice.group = giver->group;
	if (!to) {
		yield_in_group(from, giver, c);
		return false;
	}
	taker = lookup_task_may_fail(to);
	if (!taker || !is_on(MECH_YIELD))
		return false;
	g = lookup_group(giver->group);
	if (!g)
		return false;
	count(&g->info.stats.yields_offered);
	verdict = answer_offer(from, giver, to, taker, g, cpu, &choice);
	if (verdict != YIELD_ACCEPT) {
		count_miss(g, verdict);
		return false;
	}
	if (choice.pid != to->pid)
		count(&g->info.stats.yields_better);
	hand_turn_on(c, g, &choice);
	giver->yielded = 1;
	scx_bpf_task_set_slice(from, 0);
	return true;
}

/* ---- running ---- */

void BPF_STRUCT_OPS(cohort_runnable, struct task_struct *p, u64 enq_flags)
{
	struct task_ctx *tc = lookup_task_may_fail(p);

	if (!tc)
		return;
	find_group(p, tc);
	tc->ready_at_ns = bpf_ktime_get_ns();
	tc->woke = !!(enq_flags & SCX_ENQ_WAKEUP);
	tc->resumes = 0;
	if (!tc->is_runnable)
		group_runnable(tc);
}

/* vCPU @tid, which has a CPU again, was kept from running as @by says. */
static void note_waits(s32 tid, const struct vcpu_waits *by)
{
	struct vcpu_waits *waits;

	if (!by->capped_ns && !by->resting_ns)
		return;
	waits = bpf_map_lookup_elem(&cohort_waits, &tid);
	if (!waits) {
		bpf_map_update_elem(&cohort_waits, &tid, by, BPF_NOEXIST);
		return;
	}
	waits->capped_ns += by->capped_ns;
	waits->resting_ns += by->resting_ns;
}

/* The task @tc of @g, thread @pid, got a CPU: how long it waited, and for what. */
static void account_wait(s32 pid, struct task_ctx *tc, struct group *g, u64 now)
{
	u64 waited_ns = tc->ready_at_ns ? ns_since(tc->ready_at_ns, now) : 0;
	struct vcpu_waits by = { .capped_ns = tc->throttled_ns };

	tc->ready_at_ns = 0;
	tc->throttled_ns = 0;
	__sync_fetch_and_add(&g->info.stats.waited_ns, waited_ns);
	if (!tc->is_vcpu)
		return;
	if (by.capped_ns > waited_ns)
		by.capped_ns = waited_ns;
	waited_ns -= by.capped_ns;
	/* Nobody else saw that it woke meanwhile. */
	if (tc->rests_on) {
		by.resting_ns = waited_ns;
		waited_ns = 0;
	}
	note_waits(pid, &by);
	if (by.capped_ns)
		__sync_fetch_and_add(&g->info.stats.throttled_ns, by.capped_ns);
	__sync_fetch_and_add(&g->info.stats.ready_ns, waited_ns);
}

/* @tc, of @g, runs on @c, of @cpu, as one that is bound to it. */
static void enter_bound(struct task_ctx *tc, struct group *g,
			struct cpu_state *c, s32 cpu, u64 now)
{
	c->entity = 0;
	/* Of another CPU's clock, or a time long ago, nothing counts. */
	if (tc->bound_on == cpu + 1 &&
	    vtime_before(c->bound_present, tc->bound_vtime))
		c->bound_present = tc->bound_vtime;
	c->bound_share = share_apart(g, now);
}

/* The task @p, of @g, runs on @c: for its entity, or as one that is bound. */
static void enter_cpu(struct task_struct *p, struct task_ctx *tc,
		      struct group *g, struct cpu_state *c, s32 cpu, u64 now)
{
	struct domain *d = domain_with(cpu);
	struct entity *e = entity_for(tc, domain_of(cpu));

	c->group = tc->group;
	c->vtime = tc->vtime;
	c->run_at_ns = now;
	c->looked_again = 0;
	c->sleeps_soon =
		tc->is_vcpu && tc->runs_for_ns < wake_loan_ns(slice_ns);
	if (e) {
		find_cpus(p, tc, g, e);
		__sync_fetch_and_or(&e->running, bit_of(cpu));
	}
	c->bound = !e || is_apart(p, tc, e);
	set_apart(tc, g, c->bound);
	if (!e || c->bound) {
		if (e)
			__sync_fetch_and_and(&e->running, ~bit_of(cpu));
		enter_bound(tc, g, c, cpu, now);
		return;
	}
	c->entity = tc->entity;
	__sync_fetch_and_add(&g->running, fair_runs(now));
	if (vtime_before(g->task_vtime_now, tc->vtime))
		g->task_vtime_now = tc->vtime;
	if (e->called & bit_of(cpu))
		__sync_fetch_and_and(&e->called, ~bit_of(cpu));
	if (e->missed & bit_of(cpu) && planned_cpus(e, d) &&
	    __sync_and_and_fetch(&e->missed, ~bit_of(cpu)) == 0)
		count_time(g->info.stats.turn_skew,
			   ns_since(d->planned_ns, now));
	wake_entity(tc->entity, e, g->vtime, now);
}

/* Once a second, of each VM: where does it stand, and is it an exception? */
static void look_up_place(struct task_ctx *tc, struct group *g, u64 now)
{
	u32 *rule = bpf_map_lookup_elem(&cohort_rules, &g->info.tgid);
	u64 before = g->parent_checked_ns;

	/* One CPU does it. */
	if (__sync_val_compare_and_swap(&g->parent_checked_ns, before, now) !=
	    before)
		return;
	g->info.cohort_rule = rule ? *rule : COHORT_AUTO;
	set_parent(g, place_of_vm(tc->cgroup_group));
}

void BPF_STRUCT_OPS(cohort_running, struct task_struct *p)
{
	s32 cpu = scx_bpf_task_cpu(p);
	struct domain *d = domain_with(cpu);
	struct task_ctx *tc = lookup_task_may_fail(p);
	struct cpu_state *c = cpu_at(cpu);
	u64 now = bpf_ktime_get_ns();
	struct group *g;

	if (!tc)
		return;
	stop_waiting(tc);
	g = lookup_group(tc->group);
	if (!g)
		return;
	account_wait(p->pid, tc, g, now);
	forget_unseen_ipis(tc);
	tc->run_at_ns = now;
	tc->charged_ns = p->se.sum_exec_runtime;
	tc->charged_at_ns = now;
	tc->parks = 0;
	if (c->lent_pid != p->pid)
		c->lent_pid = 0;
	if (tc->woke && !c->lent_pid)
		lend_on_waking(p, tc, g, c, d->present);
	tc->lent_until_ns = c->lent_pid ? c->lent_until_ns : 0;
	if (tc->halts_on_cpu)
		begin_count(tc, d, cpu, now);
	enter_cpu(p, tc, g, c, cpu, now);
	tc->bound_on = 0;
	plan_here(d, c, cpu, now);
	/* Turns and ticks may go in step, so that it meets no tick. */
	if (is_throttled(tc->cgroup_group))
		set_alarm(cpu, CAP_LOOK_NS);
	if (tc->is_vcpu &&
	    vtime_before(g->parent_checked_ns + PARENT_FRESH_NS, now))
		look_up_place(tc, g, now);
}

/* The task that ran on @c, of @cpu, with @tc, leaves it. */
static void leave_cpu(struct task_struct *p, struct task_ctx *tc,
		      struct cpu_state *c, struct domain *d, s32 cpu,
		      bool runnable, u64 now)
{
	struct entity *e = c->entity ? lookup_entity(c->entity) : NULL;
	u64 ran_ns = now - tc->run_at_ns;

	if (e) {
		__sync_fetch_and_and(&e->running, ~bit_of(cpu));
		if (!runnable && tc->is_vcpu)
			__sync_fetch_and_add(&e->nr_sleeps, 1);
	}
	if (tc->is_vcpu)
		tc->runs_for_ns =
			wake_runs_for(tc->runs_for_ns, ran_ns, !runnable);
	if (tc->rests_on) {
		unmark_quiet(c, d, cpu);
		c->looked_ns = now;
	}
	/* The next one may have the CPU for a moment already: its dispatch came
	 * before. */
	if (c->lent_pid == p->pid) {
		c->lent_pid = 0;
		if (c->lent_reason == HINT_LOAN)
			c->next_loan_ns = now + wake_pause_ns(ran_ns, slice_ns);
	}
	c->group = 0;
	c->entity = 0;
	c->bound = 0;
	c->sleeps_soon = 0;
	c->asked_ns = 0;
}

/* @tc stops, as it sleeps or although it is @runnable: how long after it woke a sibling
 * is that? */
static void note_hand_over(struct task_ctx *tc, bool runnable, u64 now)
{
	if (!tc->handed_at_ns)
		return;
	tc->halts_after_ns = wake_halts_after(
		tc->halts_after_ns, now - tc->handed_at_ns, !runnable);
	tc->handed_at_ns = 0;
}

void BPF_STRUCT_OPS(cohort_stopping, struct task_struct *p, bool runnable)
{
	s32 cpu = scx_bpf_task_cpu(p);
	struct task_ctx *tc = lookup_task_may_fail(p);
	struct domain *d = domain_with(cpu);
	struct cpu_state *c = cpu_at(cpu);
	u64 now = bpf_ktime_get_ns();
	struct group *g;

	if (!tc || !tc->run_at_ns)
		return;
	charge(p, tc, d, now);
	g = lookup_group(tc->group);
	if (g && !tc->apart)
		__sync_fetch_and_sub(&g->running, fair_runs(tc->charged_at_ns));
	leave_cpu(p, tc, c, d, cpu, runnable, now);
	note_hand_over(tc, runnable, now);
	tc->run_at_ns = 0;
	tc->woke = 0;
	tc->ready_at_ns = runnable ? now : 0;
}

void BPF_STRUCT_OPS(cohort_quiescent, struct task_struct *p, u64 deq_flags)
{
	struct task_ctx *tc = lookup_task_may_fail(p);

	if (!tc)
		return;
	stop_waiting(tc);
	forget_halts(p, tc);
	tc->ready_at_ns = 0;
	tc->throttled_ns = 0;
	if (tc->is_runnable)
		group_quiescent(tc);
}

void BPF_STRUCT_OPS(cohort_tick, struct task_struct *p)
{
	s32 cpu = scx_bpf_task_cpu(p);
	struct domain *d = domain_with(cpu);
	struct task_ctx *tc;

	/* Their timer could not be started. */
	if (!d->crowded && d->nr_waiting > 0)
		begin_turns(d, bpf_ktime_get_ns());
	/* All others are charged when their slices end. */
	if (!nr_capped && !halts_seen)
		return;
	tc = lookup_task_may_fail(p);
	if (!tc || !tc->run_at_ns)
		return;
	charge(p, tc, d, bpf_ktime_get_ns());
	if (tc->halts_on_cpu)
		sample(tc, d, cpu);
	obey_cap(p, tc);
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
	count_process(tc->cgroup_group, p->tgid, 1);
	return 0;
}

void BPF_STRUCT_OPS(cohort_exit_task, struct task_struct *p,
		    struct scx_exit_task_args *args)
{
	struct task_ctx *tc = lookup_task_may_fail(p);
	s32 tid = p->pid;

	if (!tc)
		return;
	if (tc->is_vcpu)
		bpf_map_delete_elem(&cohort_waits, &tid);
	leave_group(tc->group, tc);
	tc->group = 0;
	count_process(tc->cgroup_group, p->tgid, -1);
}

void BPF_STRUCT_OPS(cohort_set_cpumask, struct task_struct *p,
		    const struct cpumask *cpumask)
{
	struct task_ctx *tc = lookup_task_may_fail(p);

	if (!tc)
		return;
	tc->cpus_domain = 0;
	forget_halts(p, tc);
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
		count(&host_stats.exhausted);
		return 0;
	}
	g->info.cgroup_id = cgroup_id;
	if (cgrp->level == 0)
		root_group = id;
	if (bpf_core_field_exists(args->bw_period_us))
		set_cap(id, args->bw_period_us, args->bw_quota_us,
			args->bw_burst_us);
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

	/* The root's is that of a cgroup for which there is no group. */
	if (!g || id == root_group)
		return;
	g->info.weight = weight;
	if (g->active_weight > 0)
		tell_parent(g);
}

void BPF_STRUCT_OPS(cohort_cgroup_set_bandwidth, struct cgroup *cgrp,
		    u64 period_us, u64 quota_us, u64 burst_us)
{
	u32 id = group_of(cgrp);

	if (id != root_group)
		set_cap(id, period_us, quota_us, burst_us);
}

/* What the op above does, of a kernel that lacks it; Rust has this run. Needless from
 * Linux 6.17 on. */
SEC("?syscall")
int tell_cap(struct cgroup_cap *cap)
{
	u64 cgroup_id = cap->cgroup_id;
	u32 *id = bpf_map_lookup_elem(&group_of_cgroup, &cgroup_id);

	if (!id)
		return -ENOENT;
	set_cap(*id, cap->period_us, cap->quota_us, cap->burst_us);
	return 0;
}

/* With these two the scheduler stays when CPUs come and go. */
void BPF_STRUCT_OPS(cohort_cpu_online, s32 cpu)
{
	__sync_fetch_and_or(&domain_with(cpu)->cpus, bit_of(cpu));
}

void BPF_STRUCT_OPS(cohort_cpu_offline, s32 cpu)
{
	__sync_fetch_and_and(&domain_with(cpu)->cpus, ~bit_of(cpu));
}

/* ---- the scheduler itself ---- */

static s32 init_cpu(u32 cpu)
{
	struct domain *d = domain_with(cpu);
	struct timer *alarm = lookup_alarm(cpu);
	const struct cpumask *online;
	s32 err;
	u32 i;

	if (!alarm)
		return -EINVAL;
	i = d->nr_cpus++;
	if (i >= DOMAIN_CPUS)
		return -E2BIG;
	d->cpu[i] = cpu;
	cpu_bit[cpu & (MAX_CPUS - 1)] = 1ULL << i;
	online = scx_bpf_get_online_cpumask();
	if (bpf_cpumask_test_cpu(cpu, online)) {
		d->cpus |= 1ULL << i;
		d->idle |= 1ULL << i;
	}
	scx_bpf_put_cpumask(online);
	err = bpf_timer_init(&alarm->timer, &alarms, CLOCK_MONOTONIC);
	if (err)
		return err;
	bpf_timer_set_callback(&alarm->timer, alarm_rings);
	return scx_bpf_create_dsq(BOUND_QUEUE | cpu, -1);
}

static s32 init_domain(u32 id)
{
	struct timer *timer = lookup_turn_timer(id);
	s32 err;

	if (!timer)
		return -EINVAL;
	domain_at(id)->id = id;
	err = bpf_timer_init(&timer->timer, &turns, CLOCK_MONOTONIC);
	if (err)
		return err;
	bpf_timer_set_callback(&timer->timer, turn_ends);
	return scx_bpf_create_dsq(PARKED_QUEUE | id, -1);
}

s32 BPF_STRUCT_OPS_SLEEPABLE(cohort_init)
{
	u32 i, id;
	s32 err;

	host_stats.groups_most = nr_groups - 1;
	host_stats.entities_most = nr_entities - 1;
	bpf_for(i, 1, nr_groups) {
		id = i;
		bpf_map_push_elem(&free_groups, &id, 0);
	}
	bpf_for(i, 0, nr_domains) {
		err = init_domain(i);
		if (err)
			return err;
	}
	bpf_for(i, 0, nr_cpus) {
		err = init_cpu(i);
		if (err)
			return err;
	}
	bpf_for(i, 1, nr_entities) {
		err = init_entity(i);
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
 * run it next, whosever turn it is. So do tasks that end: to free the memory of a VM
 * takes long.
 */
SCX_OPS_DEFINE(
	cohort_ops, .select_cpu = (void *)cohort_select_cpu,
	.enqueue = (void *)cohort_enqueue, .dispatch = (void *)cohort_dispatch,
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
	.flags = SCX_OPS_ENQ_LAST | SCX_OPS_ENQ_EXITING |
		 SCX_OPS_KEEP_BUILTIN_IDLE,
	.timeout_ms = 5000, .name = "cohort");
