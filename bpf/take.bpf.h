/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What a CPU takes to run: a task that a hint names, else one of the entity in its
 * slot, else, if none of that waits, a task of the entity that comes next. Not here:
 * how slots and hints come about (plan.bpf.h, hint.bpf.h).
 */
#ifndef COHORT_TAKE_BPF_H
#define COHORT_TAKE_BPF_H

enum {
	TAKE_TRIES = 8, /* tasks of a queue that are looked at */
	FILL_TRIES =
		8, /* entities taken out of the tree by a CPU with nothing to do;
			   a power of two */
	MAX_SIBLINGS = 256, /* waiting ones looked through for one */
};

/* Does another task than the one that runs on @c, which is of this CPU, wait at it, in
 * whichever queue? KVM looks at this number before it polls. */
static bool somebody_waits_at(const struct cpu_state *c)
{
	const struct rq *rq = bpf_this_cpu_ptr(&runqueues);

	return rq->nr_running > !!c->group;
}

/* Where those wait for whom @cpu, with @slot, is in this turn; 0: it is nobody's. */
static u32 slot_queue(u32 slot, s32 cpu)
{
	return slot == SLOT_BOUND ? BOUND_QUEUE | cpu : slot;
}

/* Has thread @pid left @queue? */
static bool has_left(s32 pid, u32 queue)
{
	struct task_ctx *tc = lookup_thread_may_fail(pid);

	return !tc || tc->queue != queue;
}

/* May @p, which waits, be moved to @cpu? One that was preempted inside a hook may not
 * leave its CPU, though until its switch is over its mask may not say so. */
static bool may_move_to(struct task_struct *p, s32 cpu)
{
	return bpf_cpumask_test_cpu(cpu, p->cpus_ptr) &&
	       (!is_migration_disabled(p) || scx_bpf_task_cpu(p) == cpu);
}

/* Run thread @pid on @cpu, if it still waits in @queue. */
__noinline bool run_waiting(u32 queue, s32 pid, s32 cpu)
{
	struct task_struct *p;
	bool moved = false;
	s32 nr = scx_bpf_dsq_nr_queued(queue);
	u32 seen = unknown_zero;

	/* Nothing long is searched for one that has left. */
	if (nr <= 0 || (nr > TAKE_TRIES && has_left(pid, queue)))
		return false;
	bpf_for_each(scx_dsq, p, queue, 0) {
		if (p->pid != pid) {
			if (++seen >= MAX_SIBLINGS)
				break;
			continue;
		}
		if (may_move_to(p, cpu))
			moved = move_here(BPF_FOR_EACH_ITER, p);
		break;
	}
	return moved;
}

/*
 * Run the task of @queue that is on @cpu already, as it ran there last or was woken to
 * it, and stands no more than @near_ns behind the first one: one that moves leaves
 * behind what the caches hold, and two run queues have to be locked for it.
 */
__noinline bool take_near(u32 queue, s32 cpu, u64 near_ns)
{
	struct task_struct *p;
	bool moved = false;
	u64 first_vtime = 0;
	u32 seen = unknown_zero;

	bpf_for_each(scx_dsq, p, queue, 0) {
		if (++seen > TAKE_TRIES)
			break;
		if (seen == 1)
			first_vtime = p->scx.dsq_vtime;
		else if (vtime_before(first_vtime + near_ns, p->scx.dsq_vtime))
			break;
		if (scx_bpf_task_cpu(p) == cpu) {
			moved = move_here(BPF_FOR_EACH_ITER, p);
			break;
		}
	}
	return moved;
}

/* The same of the entity @queue, @e, if there may be one. */
static bool take_if_near(struct entity *e, u32 queue, s32 cpu, u64 near_ns)
{
	u64 bit = bit_of(cpu);

	if (!(e->near & bit))
		return false;
	/* Another one sets it again. */
	__sync_fetch_and_and(&e->near, ~bit);
	return e->nr_waiting > 0 && take_near(queue, cpu, near_ns);
}

/* Run the first task of @queue that may run on @cpu, if it is one of the first. Outside
 * of a dispatch it runs when this CPU has nothing else to do. */
__noinline bool take_allowed(u32 queue, s32 cpu)
{
	struct task_struct *p;
	bool moved = false;
	u32 seen = unknown_zero;

	/* Linux 7.2 checks what timers call as if it could sleep. */
	bpf_rcu_read_lock();
	bpf_for_each(scx_dsq, p, queue, 0) {
		if (++seen > TAKE_TRIES)
			break;
		moved = may_move_to(p, cpu) && move_here(BPF_FOR_EACH_ITER, p);
		if (moved)
			break;
	}
	bpf_rcu_read_unlock();
	return moved;
}

/* Run a task of the entity @queue, @e, which may have @cpu: best one that is there
 * already, if it stands no more than @near_ns behind the first one. One waits, as a
 * rule: there is nothing to choose then. */
static bool take_of(struct entity *e, u32 queue, s32 cpu, u64 near_ns)
{
	s32 nr = e->nr_waiting;

	if (nr <= 0)
		return false;
	if (e->domain != domain_of(cpu))
		return take_allowed(queue, cpu);
	return (nr > 1 && take_if_near(e, queue, cpu, near_ns)) ||
	       scx_bpf_dsq_move_to_local(queue, 0);
}

static bool take_bound(s32 cpu)
{
	return cpu_at(cpu)->nr_bound > 0 &&
	       scx_bpf_dsq_move_to_local(BOUND_QUEUE | cpu, 0);
}

/* ---- who comes next ---- */

/* Which CPUs of domain @domain_id an entity's have to be among, so that @cpu may look
 * there: itself; those of another domain say nothing of it. */
static u64 taking_cpus(u32 domain_id, s32 cpu)
{
	return domain_of(cpu) == domain_id ? bit_of(cpu) : ~0ULL;
}

/* The entity of entry @i of @d's plan, if CPUs @taking may have it; 0: they may not. */
static u32 entity_in_entry(const struct domain *d, u32 i, u64 taking)
{
	const struct plan_entry *entry = &d->entries[i & (PLAN_ENTRIES - 1)];

	return entry->cpus & taking ? entry->entity : 0;
}

/* In a dispatch: run a task of those that competed for this turn of domain @domain_id, in
 * their order: see take_of(). @near: one that is there already. */
__noinline bool take_entry(u32 domain_id, s32 cpu, bool near)
{
	struct domain *d = domain_at(domain_id);
	u64 taking = taking_cpus(domain_id, cpu), length = turn_length(d);
	u32 i;

	bpf_for(i, 0, d->nr_entries) {
		u32 id = entity_in_entry(d, i, taking);
		struct entity *e = id ? lookup_entity(id) : NULL;

		if (e && (near ? take_if_near(e, id, cpu, length)
			       : take_of(e, id, cpu, length)))
			return true;
	}
	return false;
}

/* Outside of a dispatch: run the first of them that may run on @cpu. */
__noinline bool take_first_entry(u32 domain_id, s32 cpu)
{
	struct domain *d = domain_at(domain_id);
	u64 taking = taking_cpus(domain_id, cpu);
	u32 i;

	bpf_for(i, 0, d->nr_entries) {
		u32 id = entity_in_entry(d, i, taking);
		struct entity *e = id ? lookup_entity(id) : NULL;

		if (e && e->nr_waiting > 0 && take_allowed(id, cpu))
			return true;
	}
	return false;
}

/* Run a task of one of the first entities of domain @domain_id that has one for
 * @cpu. */
__noinline bool take_listed(u32 domain_id, s32 cpu)
{
	u64 taking = taking_cpus(domain_id, cpu), now = bpf_ktime_get_ns();
	u32 taken[FILL_TRIES] = {}, i;
	bool runs = false;

	bpf_for(i, 0, FILL_TRIES) {
		u32 id = take_entity(domain_id);
		struct entity *e = id ? lookup_entity(id) : NULL;

		if (!e)
			break;
		taken[i & (FILL_TRIES - 1)] = id;
		runs = e->cpus & taking && take_of(e, id, cpu, slice_ns);
		if (runs)
			break;
	}
	/* At the end, or the first one would be found again and again. */
	bpf_for(i, 0, FILL_TRIES) {
		u32 id = taken[i & (FILL_TRIES - 1)];
		struct entity *e = id ? lookup_entity(id) : NULL;
		struct group *g = e ? lookup_group(e->group) : NULL;

		if (!g)
			break;
		put_entity(id, e, group_vtime(g, now), now);
	}
	return runs;
}

/* Run a task that is bound to another CPU of @d, but need not be. Other CPUs begin to
 * look elsewhere, so that all are looked at. */
static bool take_unbound(const struct domain *d, s32 cpu)
{
	u64 bit = bit_of(cpu), bound = d->bound;
	u32 i;

	if (!bound)
		return false;
	bpf_for(i, 0, TAKE_TRIES) {
		u32 from;

		if (!bound)
			break;
		bit = next_cpu(bound, bit);
		bound &= ~bit;
		from = cpu_with(d, bit);
		if (from != cpu && take_allowed(BOUND_QUEUE | from, cpu))
			return true;
	}
	return false;
}

/* Run the only task that waits in @d, if it is of the entity in which one began to wait
 * last. */
static bool take_only(const struct domain *d)
{
	struct entity *e = lookup_entity(d->waited_last);

	return e && e->nr_waiting == 1 &&
	       scx_bpf_dsq_move_to_local(d->waited_last, 0);
}

/* Run whoever comes next in domain @domain_id and may run on @cpu. */
__noinline bool take_next(u32 domain_id, s32 cpu)
{
	struct domain *d = domain_at(domain_id);
	struct cpu_state *c = cpu_at(cpu);

	if (d->nr_waiting <= 0)
		return false;
	if (d->nr_waiting == 1 && take_only(d))
		return true;
	/* One that is here already first, whoever comes next: sleeping-barrier-3x8 does
	 * 0.5 % more so. */
	return (domain_of(cpu) == domain_id && somebody_waits_at(c) &&
		take_entry(domain_id, cpu, true)) ||
	       take_entry(domain_id, cpu, false) ||
	       take_listed(domain_id, cpu) || take_unbound(d, cpu);
}

/* Run whoever waits in domain @from, which is another one. */
static bool pull(u32 from, s32 cpu)
{
	if (!take_next(from, cpu))
		return false;
	count(&host_stats.stolen);
	return true;
}

/* This CPU, of @d, has nothing to do: whoever waits in another domain. */
static bool pull_from_any(struct domain *d, s32 cpu)
{
	u32 i, from = d->far;

	if (!nr_crowded)
		return false;
	bpf_for(i, 0, nr_domains) {
		from = next_domain(from);
		if (from != d->id && pull(from, cpu)) {
			d->far = from;
			return true;
		}
	}
	return false;
}

#endif /* COHORT_TAKE_BPF_H */
