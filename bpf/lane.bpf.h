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

static void free_lane(u32 id)
{
	lane_detach(id);
	give_number(&free_lanes, &host_stats.lanes_used, id);
}

static void lane_put(u32 id)
{
	struct lane *lane = lookup_lane(id);

	if (lane && !__sync_sub_and_fetch(&lane->users, 1))
		free_lane(id);
}

/* May @p run on every CPU of @lane? */
static bool covers_lane(struct lane *lane, const struct task_struct *p)
{
	struct bpf_cpumask *mask;
	bool covers = false;

	bpf_rcu_read_lock();
	mask = lane->mask;
	if (mask)
		covers = bpf_cpumask_subset(cast_mask(mask), p->cpus_ptr);
	bpf_rcu_read_unlock();
	return covers;
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

/* Lane @id, with all that it will ever need: an enqueue can allocate nothing. */
static int init_lane(u32 id)
{
	struct lane *lane = lookup_lane(id);
	struct bpf_cpumask *mask = NULL;
	u32 i;

	if (!lane)
		return -EINVAL;
	bpf_for(i, 0, ALLOCATION_TRIES) {
		mask = bpf_cpumask_create();
		if (mask)
			break;
	}
	if (!mask)
		return -ENOMEM;
	mask = bpf_kptr_xchg(&lane->mask, mask);
	if (mask)
		bpf_cpumask_release(mask);
	return 0;
}

/* Is @cpu in @domain_id, and may @p run on it, if one is given? */
static bool is_in_subset(u32 cpu, u32 domain_id, const struct task_struct *p)
{
	return domain_of(cpu) == domain_id &&
	       (!p || bpf_cpumask_test_cpu(cpu, p->cpus_ptr));
}

/* Into @lane, of which nobody knows: the CPUs of @domain_id that @p may run on, or,
 * without one, all of it. */
static void fill_lane(struct lane *lane, u32 domain_id,
		      const struct task_struct *p)
{
	struct bpf_cpumask *mask;
	u32 cpu, nr = 0;

	bpf_rcu_read_lock();
	mask = lane->mask;
	if (mask) {
		bpf_cpumask_clear(mask);
		bpf_for(cpu, 0, nr_cpus) {
			if (!is_in_subset(cpu, domain_id, p))
				continue;
			bpf_cpumask_set_cpu(cpu, mask);
			nr++;
		}
	}
	bpf_rcu_read_unlock();
	lane->nr_cpus = nr;
}

/* A lane for the CPUs of @domain_id that @p may run on, with one user; 0: no lane, or
 * no place in the list of one of the CPUs, was free. */
static u32 make_lane(const struct task_struct *p, u32 domain_id)
{
	struct lane *lane;
	bool complete = true;
	u32 id, cpu;

	if (!take_number(&free_lanes, &host_stats.lanes_used, &id))
		return 0;
	lane = lookup_lane(id);
	if (!lane)
		return 0;
	fill_lane(lane, domain_id, p);
	bpf_for(cpu, 0, nr_cpus)
		if (is_in_subset(cpu, domain_id, p) && !lane_attach(id, cpu))
			complete = false;
	if (!complete) {
		free_lane(id);
		return 0;
	}
	/* From now on others find it. */
	__sync_lock_test_and_set(&lane->users, 1);
	return id;
}

/* One of the CPUs of @domain_id that @p may run on; NULL: there is none. */
static struct cpu_state *any_in_subset(const struct task_struct *p,
				       u32 domain_id)
{
	struct lane *whole = lookup_lane(FIRST_DOMAIN_LANE + domain_id);
	struct bpf_cpumask *mask;
	u32 cpu = nr_cpus;

	if (!whole)
		return NULL;
	bpf_rcu_read_lock();
	mask = whole->mask;
	if (mask)
		cpu = bpf_cpumask_any_and_distribute(cast_mask(mask),
						     p->cpus_ptr);
	bpf_rcu_read_unlock();
	return cpu < nr_cpus ? lookup_cpu(cpu) : NULL;
}

/* The lane that holds the part of @p's affinity in @domain_id, found or made. */
static u32 subset_lane(const struct task_struct *p, u32 domain_id)
{
	struct cpu_state *any = any_in_subset(p, domain_id);
	u32 slot, cpu, nr = 0;

	if (!any)
		return 0;
	bpf_for(cpu, 0, nr_cpus)
		nr += is_in_subset(cpu, domain_id, p);
	/* Every CPU of a lane lists it: one list is enough. */
	bpf_for(slot, 0, LANES_PER_CPU) {
		u32 id = any->lanes[slot & (LANES_PER_CPU - 1)];
		struct lane *lane;

		if (!id)
			continue;
		lane = lookup_lane(id);
		if (lane && lane->nr_cpus == nr && covers_lane(lane, p) &&
		    lane_get(lane))
			return id;
	}
	return make_lane(p, domain_id);
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
	struct lane *domain;

	/* Inside a hook, for a moment: where it belongs stays known. */
	if (is_migration_disabled(p))
		return cpu;
	if (tc->lane_domain == domain_id + 1)
		return tc->lane;

	forget_lane(tc);
	tc->lane = cpu;
	if (p->nr_cpus_allowed == 1)
		return cpu;
	domain = lookup_lane(FIRST_DOMAIN_LANE + domain_id);
	if (domain && covers_lane(domain, p)) {
		tc->lane = FIRST_DOMAIN_LANE + domain_id;
	} else {
		tc->subset_lane = subset_lane(p, domain_id);
		if (!tc->subset_lane) {
			count(&host_stats.lane_exhausted);
			return cpu;
		}
		tc->lane = tc->subset_lane;
	}
	tc->lane_domain = domain_id + 1;
	return tc->lane;
}

#endif /* COHORT_LANE_BPF_H */
