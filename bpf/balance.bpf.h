/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Between domains: what waits in another one, and taking it from there. Not
 * here: who is worth a move (policy/balance.h).
 */
#ifndef COHORT_BALANCE_BPF_H
#define COHORT_BALANCE_BPF_H

/* A CPU of the domain that @cpu is to look at next; -1: there is none. */
static s32 far_cpu(struct cpu_state *c, s32 cpu)
{
	u32 domain_id = c->far_domain + 1;
	struct bpf_cpumask *mask;
	struct lane *lane;
	s32 far = -1;

	if (domain_id >= nr_domains)
		domain_id = 0;
	if (domain_id == domain_of(cpu) && ++domain_id >= nr_domains)
		domain_id = 0;
	c->far_domain = domain_id;
	lane = lookup_lane(FIRST_DOMAIN_LANE + domain_id);
	if (!lane)
		return -1;
	bpf_rcu_read_lock();
	mask = lane->mask;
	if (mask)
		far = bpf_cpumask_any_distribute(cast_mask(mask));
	bpf_rcu_read_unlock();
	return far < nr_cpus ? far : -1;
}

/* May one of the first tasks of queue @id run on @cpu? */
__noinline bool has_task_for(u32 id, s32 cpu)
{
	struct task_struct *p;
	bool found = false;
	u32 tries = 0;

	bpf_for_each(scx_dsq, p, id, 0) {
		found = bpf_cpumask_test_cpu(cpu, p->cpus_ptr);
		if (found || ++tries >= MOVE_TRIES)
			break;
	}
	return found;
}

/* What CPU @far_cpu of another domain would run next and @cpu may: but for what
 * is bound to one CPU. */
__noinline int find_far_front(s32 far_cpu, s32 cpu, struct front *best)
{
	struct cpu_state *c = lookup_cpu(far_cpu);
	u32 i;

	if (!best || !c)
		return 0;
	__builtin_memset(best, 0, sizeof(*best));
	bpf_for(i, 1, nr_lanes(c)) {
		struct front front = {};
		s32 id = busy_lane(c, far_cpu, i);

		if (id < 0)
			continue;
		lane_front(id, &front);
		if (front.queue && front_before(&front, best) &&
		    has_task_for(front.queue, cpu))
			*best = front;
	}
	return 0;
}

/* Look into the next domain: what waits there and @cpu may run. Returns the CPU
 * through whose eyes it was seen, -1: nobody waits. */
static s32 look_far(struct cpu_state *c, s32 cpu, struct front *far)
{
	s32 from = far_cpu(c, cpu);

	if (from < 0)
		return -1;
	find_far_front(from, cpu, far);
	return far->queue ? from : -1;
}

/* Run the task here for which @far was found. */
static bool take_far(const struct front *far, s32 cpu, u64 now)
{
	struct queue *q = lookup_queue(far->queue);

	if (!q || !take_from(far->queue, cpu, now))
		return false;
	q->served_key = far->key;
	count(&host_stats.stolen);
	return true;
}

/* Does somebody wait in another domain who might run on @c? A look that finds
 * nobody has seen one domain of several, and of that what one CPU serves. */
static bool wanted_afar(struct cpu_state *c, u64 now)
{
	return c->wanted_afar_ns &&
	       now - c->wanted_afar_ns < BALANCE_MEMORY_SLICES * slice_ns;
}

/* This CPU has nothing to run: whatever waits in another domain. */
static bool steal(struct cpu_state *c, s32 cpu, u64 now)
{
	struct front far = {};

	return nr_domains > 1 && look_far(c, cpu, &far) >= 0 &&
	       take_far(&far, cpu, now);
}

/* Where the group stands that is to run on @cpu next, @prev being the one that
 * did or NULL; false: there is none. */
static bool next_vtime(s32 cpu, struct group *prev, u64 now, bool *contested,
		       u64 *vtime)
{
	struct front own = {};

	find_front(cpu, 0, 0, &own);
	*contested = own.queue != 0;
	if (!own.queue && !prev)
		return false;
	*vtime = prev ? group_vtime(prev, now) : own.key;
	if (own.queue && vtime_before(own.key, *vtime))
		*vtime = own.key;
	return true;
}

/* It is time to look: run who waits in another domain, and has fallen behind
 * those of this one, of which @prev's ran last (NULL: none goes on). */
static bool balance(struct cpu_state *c, s32 cpu, struct group *prev, u64 now)
{
	u64 turn = turn_number(now, turns_ns, slice_ns), here, credit, margin;
	struct front far = {};
	struct group *g;
	bool contested;
	s32 from;

	if (nr_domains < 2 || c->balanced_turn == turn ||
	    !balance_looks(turn, cpu))
		return false;
	c->balanced_turn = turn;
	from = look_far(c, cpu, &far);
	if (from < 0)
		return false;
	c->wanted_afar_ns = now;
	g = lookup_group(far.group);
	if (!g || !next_vtime(cpu, prev, now, &contested, &here))
		return false;
	credit = fair_charge(slice_ns, group_share(g, now));
	margin = balance_margin(credit, tasks_at_once(g, nr_cpus), contested,
				distance_between(from, cpu));
	return vtime_before(far.key + margin, here) && take_far(&far, cpu, now);
}

#endif /* COHORT_BALANCE_BPF_H */
