/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Which lane a task waits in. Affinities that cover a domain share the domain's
 * lane, one CPU has its own, and each other set of CPUs inside a domain gets a
 * lane made for it, which lives while tasks use it. All of this runs when an
 * affinity or a task's domain changes; an enqueue reads the cached answer.
 */
#ifndef COHORT_LANE_BPF_H
#define COHORT_LANE_BPF_H

/* Count a user of lane @id, unless it has none left and is being taken down. */
static bool lane_get(struct lane *lane)
{
	u32 i;

	bpf_for(i, 0, 16) {
		u32 users = lane->users;

		if (!users)
			return false;
		if (__sync_val_compare_and_swap(&lane->users, users,
						users + 1) == users)
			return true;
	}
	return false;
}

/* Take lane @id from the lists of all CPUs. */
__noinline int lane_detach(u32 id)
{
	u32 cpu, slot;

	bpf_for(cpu, 0, nr_cpus) {
		struct cpu_state *c = lookup_cpu(cpu);

		if (!c)
			break;
		bpf_for(slot, 0, LANES_PER_CPU) {
			u32 *entry = &c->lanes[slot & (LANES_PER_CPU - 1)];

			__sync_val_compare_and_swap(entry, id, 0);
		}
	}
	return 0;
}

static void lane_put(u32 id)
{
	struct lane *lane = lookup_lane(id);

	if (!lane || __sync_sub_and_fetch(&lane->users, 1))
		return;
	lane_detach(id);
	give_number(&free_lanes, &host_stats.lanes_used, id);
}

/* Does lane @id hold exactly the CPUs of @cpus? */
static bool lane_is(struct lane *lane, const struct cpumask *cpus)
{
	struct bpf_cpumask *mask;
	bool same = false;

	bpf_rcu_read_lock();
	mask = lane->mask;
	if (mask)
		same = bpf_cpumask_equal(cast_mask(mask), cpus);
	bpf_rcu_read_unlock();
	return same;
}

/* From now on @c looks at no less than its first @places lanes. */
static void look_at_lanes(struct cpu_state *c, u32 places)
{
	u32 i;

	bpf_for(i, 0, LANES_PER_CPU) {
		u32 before = c->lane_places;

		if (before >= places ||
		    __sync_val_compare_and_swap(&c->lane_places, before,
						places) == before)
			return;
	}
}

/* Enter lane @id into a free place of @cpu's list. */
static bool lane_attach(u32 id, u32 cpu)
{
	struct cpu_state *c = lookup_cpu(cpu);
	u32 slot;

	if (!c)
		return false;
	bpf_for(slot, 0, LANES_PER_CPU) {
		u32 *entry = &c->lanes[slot & (LANES_PER_CPU - 1)];

		if (*entry || __sync_val_compare_and_swap(entry, 0, id))
			continue;
		look_at_lanes(c, slot + 1);
		return true;
	}
	return false;
}

/* A lane for the CPUs of @cpus, with one user; 0: no lane, or no place in the
 * list of one of the CPUs, was free. Consumes @cpus. */
static u32 make_lane(struct bpf_cpumask *cpus)
{
	struct bpf_cpumask *old;
	struct lane *lane;
	bool complete = true;
	u32 id, cpu;

	if (!take_number(&free_lanes, &host_stats.lanes_used, &id)) {
		bpf_cpumask_release(cpus);
		return 0;
	}
	lane = lookup_lane(id);
	if (!lane) {
		bpf_cpumask_release(cpus);
		return 0;
	}
	lane->nr_cpus = bpf_cpumask_weight(cast_mask(cpus));
	lane->users = 1;
	bpf_for(cpu, 0, nr_cpus)
		if (bpf_cpumask_test_cpu(cpu, cast_mask(cpus)) &&
		    !lane_attach(id, cpu))
			complete = false;
	old = bpf_kptr_xchg(&lane->mask, cpus);
	if (old)
		bpf_cpumask_release(old);
	if (complete)
		return id;
	lane_put(id);
	return 0;
}

/* The lane that holds the part of @p's affinity in @domain_id, found or made. */
static u32 subset_lane(struct task_struct *p, u32 domain_id)
{
	struct lane *whole = lookup_lane(FIRST_DOMAIN_LANE + domain_id);
	struct bpf_cpumask *mine, *mask;
	struct cpu_state *first;
	u32 slot, cpu;

	if (!whole)
		return 0;
	mine = bpf_cpumask_create();
	if (!mine)
		return 0;
	bpf_rcu_read_lock();
	mask = whole->mask;
	if (mask)
		bpf_cpumask_and(mine, cast_mask(mask), p->cpus_ptr);
	bpf_rcu_read_unlock();

	/* Every CPU of a lane lists it: the first one's list is enough. */
	cpu = bpf_cpumask_first(cast_mask(mine));
	first = cpu < nr_cpus ? lookup_cpu(cpu) : NULL;
	if (!first) {
		bpf_cpumask_release(mine);
		return 0;
	}
	bpf_for(slot, 0, LANES_PER_CPU) {
		u32 id = first->lanes[slot & (LANES_PER_CPU - 1)];
		struct lane *lane;

		if (!id)
			continue;
		lane = lookup_lane(id);
		if (lane && lane_is(lane, cast_mask(mine)) && lane_get(lane)) {
			bpf_cpumask_release(mine);
			return id;
		}
	}
	return make_lane(mine);
}

/* May @p run on every CPU of the domain? */
static bool covers_domain(struct task_struct *p, u32 domain_id)
{
	struct lane *lane = lookup_lane(FIRST_DOMAIN_LANE + domain_id);
	struct bpf_cpumask *mask;
	bool covers = false;

	if (!lane)
		return false;
	bpf_rcu_read_lock();
	mask = lane->mask;
	if (mask)
		covers = bpf_cpumask_subset(cast_mask(mask), p->cpus_ptr);
	bpf_rcu_read_unlock();
	return covers;
}

/* The affinity changed, or the task is gone: what was found is void. */
static void forget_lane(struct task_ctx *tc)
{
	u32 id = tc->subset_lane;

	tc->lane_domain = 0;
	tc->subset_lane = 0;
	if (id)
		lane_put(id);
}

/* The lane in which @p, whose CPU is @cpu, waits. */
static u32 lane_for(struct task_struct *p, struct task_ctx *tc, s32 cpu)
{
	u32 domain_id = domain_of(cpu);

	if (p->nr_cpus_allowed == 1 || is_migration_disabled(p))
		return cpu;
	if (tc->lane_domain == domain_id + 1)
		return tc->lane;

	forget_lane(tc);
	if (covers_domain(p, domain_id)) {
		tc->lane = FIRST_DOMAIN_LANE + domain_id;
	} else {
		tc->lane = tc->subset_lane = subset_lane(p, domain_id);
		if (!tc->lane) {
			count(&host_stats.lane_exhausted);
			return cpu;
		}
	}
	tc->lane_domain = domain_id + 1;
	return tc->lane;
}

#endif /* COHORT_LANE_BPF_H */
