/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Where a task waits: with its group, for one CPU, or until its cap is refilled. Not
 * here: the queues themselves (entity.bpf.h), who is told that it waits (sched.bpf.c).
 */
#ifndef COHORT_WAIT_BPF_H
#define COHORT_WAIT_BPF_H

enum {
	BOUND_STALE_NS =
		100000000, /* the clock of those bound to a CPU counts so long */
	UNPARK_TRIES = 64, /* parked tasks looked at */
};

/* Where a task waits. */
struct place {
	u32 queue;
	struct domain *d;
	struct entity *e; /* NULL: it is bound to its CPU */
	u64 key; /* virtual time, by which the queue is ordered */
};

/* May @p run on all CPUs, or on one at least of domain @domain_id? */
static bool may_run_in(struct task_struct *p, u32 domain_id)
{
	return p->nr_cpus_allowed >= nr_cpus || cpus_of(p, domain_id);
}

/* The first home of a VM of which a task is on a CPU of domain @here: there, unless
 * another domain has fewer homes. Where these are even from the begin, few VMs have to
 * move. */
__noinline u32 first_home(u32 here)
{
	struct domain *d = domain_at(here);
	u32 i, best = here;
	s32 least;

	least = d->nr_homes;
	bpf_for(i, 0, nr_domains) {
		d = domain_at(i);
		if (d->cpus && d->nr_homes < least) {
			least = d->nr_homes;
			best = i;
		}
	}
	return best;
}

/* The domain in which @p, of @g, waits, which is on a CPU of domain @domain_id: a VM
 * that fits into one has a home. */
static u32 waiting_domain(struct task_struct *p, struct group *g, u32 domain_id)
{
	struct domain *d;
	u32 home;

	if (nr_domains < 2 || !is_vm(g))
		return domain_id;
	d = domain_at(domain_id);
	if (g->info.nr_vcpus > cpus_in(d->cpus))
		return domain_id;
	if (!g->home) {
		home = first_home(domain_id);
		set_home(g, 0, (may_run_in(p, home) ? home : domain_id) + 1);
	}
	home = g->home ? g->home - 1 : domain_id;
	return home == domain_id || may_run_in(p, home) ? home : domain_id;
}

/* One more of @e waits at @cpu, where it ran last or was woken to. */
static void note_near(struct entity *e, s32 cpu)
{
	u64 bit = bit_of(cpu);

	if (e->domain == domain_of(cpu) && !(e->near & bit))
		__sync_fetch_and_or(&e->near, bit);
}

/* The task waits with the others of its group, if it may run where they may. */
static bool wait_together(struct task_struct *p, struct task_ctx *tc,
			  struct group *g, s32 cpu, struct place *to)
{
	u32 id, of_group;
	struct entity *e;

	/* One in the middle of a hook cannot move. */
	if (is_migration_disabled(p))
		return false;
	e = entity_for(tc, to->d->id);
	if (!e)
		return false;
	id = tc->entity;
	of_group = e->group;
	find_cpus(p, tc, g, e);
	__sync_fetch_and_add(&e->nr_waiting, 1);
	/* It may just have been given back. */
	if (e->state == ENTITY_FREE || e->group != of_group ||
	    is_apart(p, tc, e)) {
		__sync_fetch_and_sub(&e->nr_waiting, 1);
		set_apart(tc, g, true);
		return false;
	}
	set_apart(tc, g, false);
	note_near(e, cpu);
	tc->bound_cost = 0;
	to->d->waited_last = id;
	__sync_fetch_and_add(&to->d->nr_waiting, 1);
	to->e = e;
	to->queue = id;
	to->key = task_key(tc, g);
	return true;
}

/* By what (virtual time) @tc comes behind those that are bound to a CPU: what it used
 * since it waited last and, if it has not run since, by what it came behind then. */
static u64 bound_debt(const struct task_ctx *tc)
{
	struct cpu_state *last = tc->bound_on ? cpu_at(tc->bound_on - 1) : NULL;
	u64 debt = tc->bound_cost;

	if (last && vtime_before(last->bound_present, tc->bound_vtime))
		debt += tc->bound_vtime - last->bound_present;
	return debt < starved_ns ? debt : starved_ns;
}

/*
 * The task waits for CPU @cpu, and no other one: by the clock of those that are bound
 * to it. Virtual time may run at another pace elsewhere, so nothing older counts.
 */
static void wait_bound(struct task_ctx *tc, s32 cpu, struct place *to)
{
	struct cpu_state *c = cpu_at(cpu);

	/* Their clock stood still while there were none. */
	if (c->nr_bound <= 0 &&
	    ns_since(c->bound_served_ns, bpf_ktime_get_ns()) > BOUND_STALE_NS) {
		c->bound_offset = to->d->present - c->bound_present;
		c->bound_served_ns = bpf_ktime_get_ns();
	}
	tc->bound_vtime =
		c->bound_present + (tc->rests_on ? starved_ns : bound_debt(tc));
	tc->bound_on = cpu + 1;
	tc->bound_cost = 0;
	to->e = NULL;
	to->queue = BOUND_QUEUE | cpu;
	to->key = tc->bound_vtime;
	__sync_fetch_and_add(&to->d->nr_waiting, 1);
	count_bound(c, to->d, cpu);
}

/* Where @p, of @g, which is on @cpu, is to wait: it counts there. */
static void choose_place(struct task_struct *p, struct task_ctx *tc,
			 struct group *g, s32 cpu, struct place *to)
{
	to->d = domain_at(waiting_domain(p, g, domain_of(cpu)));
	if (wait_together(p, tc, g, cpu, to))
		return;
	to->d = domain_with(cpu);
	wait_bound(tc, cpu, to);
}

/* A task of @g is in the queue that was chosen. */
static void note_waiting(const struct place *at, struct group *g, u64 now)
{
	if (at->e)
		wake_entity(at->queue, at->e, g->vtime, now);
	begin_turns(at->d, now);
}

/* ---- caps ---- */

/* Tasks of @d are parked, and were not all looked at since a budget was refilled. */
static bool has_to_unpark(const struct domain *d)
{
	return d->nr_parked > 0 &&
	       (d->to_unpark > 0 || d->refills != nr_refills);
}

/* @p waits until its cap is refilled. */
static void park(struct task_struct *p, struct task_ctx *tc, struct domain *d,
		 u64 enq_flags, u64 now)
{
	__sync_fetch_and_add(&d->nr_parked, 1);
	tc->parked_at_ns = now;
	tc->queue = PARKED_QUEUE | d->id;
	scx_bpf_dsq_insert(p, tc->queue, slice_ns, enq_flags);
	/* The refill may have come between. */
	if (!is_throttled(tc->cgroup_group))
		wake_parked();
}

/* CPUs of @d that are idle, as far as the kernel told, and that the task of @tc may
 * have. */
static u64 idle_cpus(const struct task_ctx *tc, const struct domain *d)
{
	u64 may_have = tc->cpus_domain == d->id + 1 ? tc->cpus : ~0ULL;

	return d->idle & d->cpus & may_have;
}

/* No other CPU is idle, as a rule: tasks wait in each domain. */
static bool all_crowded(void)
{
	return nr_crowded >= nr_domains;
}

/* A CPU that went idle before it could see that @p waits in @d looks again: see
 * cohort_update_idle(). */
static bool wake_idle_cpu(struct task_struct *p, const struct task_ctx *tc,
			  const struct domain *d)
{
	u64 idle = idle_cpus(tc, d);
	s32 cpu;

	if (!idle && all_crowded())
		return false;
	cpu = scx_bpf_pick_idle_cpu(p->cpus_ptr, 0);
	if (cpu >= 0) {
		kick_cpu(cpu, SCX_KICK_IDLE);
		return true;
	}
	/* Where it was kicked a moment ago, and finds nobody, it is not told of once
	 * more. Linux 6.12 tells before it marks. */
	if (idle)
		kick_cpu(cpu_with(d, lowest_cpu(idle)), SCX_KICK_IDLE);
	return false;
}

/*
 * The parked @p, at which @it stands in @queue, waits for a CPU again. Another CPU may
 * take it out of either queue at any time. It is moved first, then it is where @tc says,
 * unless it is somewhere else by then.
 */
static void unpark_task(struct bpf_iter_scx_dsq *it, struct task_struct *p,
			struct task_ctx *tc, u32 queue, u64 now)
{
	struct group *g = lookup_group(tc->group);
	s32 cpu = scx_bpf_task_cpu(p);
	struct place to = {};

	if (!g)
		return;
	choose_place(p, tc, g, cpu, &to);
	scx_bpf_dsq_move_set_slice(it, slice_ns);
	scx_bpf_dsq_move_set_vtime(it, to.key);
	if (!scx_bpf_dsq_move_vtime(it, p, to.queue, 0) ||
	    __sync_val_compare_and_swap(&tc->queue, queue, to.queue) != queue) {
		leave_queue(tc, to.queue);
		return;
	}
	leave_queue(tc, queue);
	note_waiting(&to, g, now);
	if (to.queue & BOUND_QUEUE)
		kick_cpu(cpu, SCX_KICK_IDLE);
	else
		wake_idle_cpu(p, tc, to.d);
}

/*
 * A budget was refilled: the parked tasks of domain @domain_id that need not be any
 * more, or were for too long, wait for a CPU again. The others go to the end, so that
 * all are looked at, some at a time.
 */
__noinline int unpark(u32 domain_id)
{
	struct domain *d = domain_at(domain_id);
	u32 queue = PARKED_QUEUE | domain_id, looked = unknown_zero;
	u64 now = bpf_ktime_get_ns();
	struct task_struct *p;

	if (__sync_val_compare_and_swap(&d->unparking, 0, 1))
		return 0;
	if (d->refills != nr_refills) {
		d->refills = nr_refills;
		d->to_unpark = d->nr_parked;
	}
	bpf_for_each(scx_dsq, p, queue, 0) {
		struct task_ctx *tc = lookup_task_may_fail(p);

		if (looked >= UNPARK_TRIES)
			break;
		looked++;
		if (tc && (!is_throttled(tc->cgroup_group) ||
			   ns_since(tc->parked_at_ns, now) > parked_most_ns))
			unpark_task(BPF_FOR_EACH_ITER, p, tc, queue, now);
		else
			scx_bpf_dsq_move(BPF_FOR_EACH_ITER, p, queue, 0);
	}
	d->to_unpark -= looked;
	/* One that is counted, but not there yet, is looked at the next time. */
	if (looked < UNPARK_TRIES &&
	    d->nr_parked <= scx_bpf_dsq_nr_queued(queue))
		d->to_unpark = 0;
	__sync_lock_test_and_set(&d->unparking, 0);
	if (looked && has_to_unpark(d))
		kick_cpu(bpf_get_smp_processor_id(), SCX_KICK_PREEMPT);
	return 0;
}

#endif /* COHORT_WAIT_BPF_H */
