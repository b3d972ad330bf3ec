/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Caps: cpu.max of cgroups, those of single vCPUs included. A cgroup with a cap has a
 * budget, which a timer refills; what runs below it pays. A task below a cgroup whose
 * budget is used up is parked, once it is out of the kernel. Not here: the arithmetic
 * (policy/fair.h).
 */
#ifndef COHORT_CAP_BPF_H
#define COHORT_CAP_BPF_H

/* What the interrupt that is handled on a CPU interrupted; NULL: none is handled. */
extern struct pt_regs *__irq_regs __ksym __weak;

enum {
	CAP_LOOK_NS =
		100000, /* until a task is stopped that begins to run overdrawn */
};

/* Groups with a cap of their own; 0 saves every charge the walk upwards. */
u32 nr_capped;

/* How often parked tasks were to be looked at, as a budget was refilled or the like;
 * atomic. */
u32 nr_refills;

/* By how much (ns) the cap at or above group @id that is overdrawn most is, at least 1;
 * 0: none is used up. */
__noinline u64 find_overdraft(u32 id)
{
	s64 most = 0;
	u32 level;

	bpf_for(level, 0, MAX_CGROUP_DEPTH) {
		struct group *g = climb(&id);
		s64 over_ns;

		if (!g)
			break;
		over_ns = 1 - g->budget_ns;
		if (g->info.quota_us && over_ns > most)
			most = over_ns;
	}
	return most;
}

/* The same; as a rule there is no cap at all. */
static u64 overdraft(u32 id)
{
	return nr_capped ? find_overdraft(id) : 0;
}

/* Is a cap at or above group @id used up? */
static bool is_throttled(u32 id)
{
	return overdraft(id) > 0;
}

/* Did the interrupt that is handled find @p in the kernel? Not a guest's. */
static bool interrupted_in_kernel(struct task_struct *p)
{
	struct pt_regs **regs;

	if (p->flags & PF_VCPU)
		return false;
	if (!bpf_ksym_exists(&__irq_regs))
		return true;
	regs = bpf_this_cpu_ptr(&__irq_regs);
	/* None: the kernel ticks for a CPU without ticks. */
	return !*regs || !is_from_user(*regs);
}

/* An interrupt of the running @p, with @tc, is handled: it stops if a cap says so. Is a
 * cap of its used up? */
static bool obey_cap(struct task_struct *p, struct task_ctx *tc)
{
	u64 overdrawn_ns = overdraft(tc->cgroup_group);

	tc->parks = overdrawn_ns &&
		    cap_stops(interrupted_in_kernel(p), overdrawn_ns);
	if (tc->parks)
		scx_bpf_task_set_slice(p, 0);
	return overdrawn_ns;
}

/* Is @p, with @tc, parked rather than run? Who @woke is in the kernel, but holds no
 * lock there if it is a vCPU that was halted. Who ends gives back what others want. */
static bool has_to_park(struct task_struct *p, struct task_ctx *tc, bool woke)
{
	u64 overdrawn_ns = overdraft(tc->cgroup_group);

	return overdrawn_ns && !(p->flags & PF_EXITING) &&
	       (tc->parks ||
		cap_stops(!woke || !is_blocking(vcpu_of(p)), overdrawn_ns));
}

/* Pay @used_ns from the budgets of @id and all above it. */
__noinline int spend_caps(u32 id, u64 used_ns)
{
	u32 level;

	bpf_for(level, 0, MAX_CGROUP_DEPTH) {
		struct group *g = climb(&id);

		if (!g)
			break;
		if (g->info.quota_us)
			__sync_fetch_and_sub(&g->budget_ns, used_ns);
	}
	return 0;
}

/* In each domain where tasks are parked, a CPU looks whether they still must be: another
 * one each time, as one may have a real-time task. */
static void wake_parked(void)
{
	u32 refill = __sync_fetch_and_add(&nr_refills, 1), i;

	bpf_for(i, 0, nr_domains) {
		struct domain *d = domain_at(i);
		u64 before;

		if (d->nr_parked <= 0 || !d->cpus)
			continue;
		before = 1ULL << refill % d->nr_cpus;
		kick_cpu(cpu_with(d, next_cpu(d->cpus, before)),
			 SCX_KICK_PREEMPT);
	}
}

static int refill_cap(void *map, u32 *key, struct group *g)
{
	u64 quota_ns = g->info.quota_us * 1000;
	u64 period_ns = g->info.period_us * 1000;
	s64 budget = g->budget_ns;

	if (!quota_ns)
		return 0; /* it has no cap any more */
	__sync_fetch_and_add(
		&g->budget_ns,
		cap_refill(budget, quota_ns, g->burst_ns, period_ns) - budget);
	/* Also where it is used up still: who is parked for too long is let go. */
	if (budget <= 0)
		wake_parked();
	bpf_timer_start(&g->cap_timer, period_ns, 0);
	return 0;
}

/* cpu.max of group @id is now @quota_us each @period_us; ~0: none. */
static void set_cap(u32 id, u64 period_us, u64 quota_us, u64 burst_us)
{
	struct group *g = lookup_group(id);
	bool was_capped, capped = quota_us != ~0ULL && period_us;

	if (!g)
		return;
	was_capped = g->info.quota_us != 0;
	g->info.quota_us = capped ? quota_us : 0;
	g->info.period_us = capped ? period_us : 0;
	g->burst_ns = capped ? burst_us * 1000 : 0;
	if (capped == was_capped)
		return;
	if (!capped) {
		__sync_fetch_and_sub(&nr_capped, 1);
		wake_parked();
		return;
	}
	g->budget_ns = quota_us * 1000;
	__sync_fetch_and_add(&nr_capped, 1);
	/* Refused if an earlier group with this number had one: it stays. */
	bpf_timer_init(&g->cap_timer, &groups, CLOCK_MONOTONIC);
	bpf_timer_set_callback(&g->cap_timer, refill_cap);
	bpf_timer_start(&g->cap_timer, period_us * 1000, 0);
}

#endif /* COHORT_CAP_BPF_H */
