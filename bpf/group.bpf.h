/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Groups: VMs and cgroups, how they come and go, what share of the host each
 * has now, and what its CPU time costs it. Not here: where tasks wait
 * (entity.bpf.h), caps (cap.bpf.h).
 */
#ifndef COHORT_GROUP_BPF_H
#define COHORT_GROUP_BPF_H

enum {
	SHARE_FRESH_NS = 1000000, /* a share is looked up again after 1 ms */
	PARENT_FRESH_NS = 1000000000, /* a VM's place after 1 s */
};

/* ---- activity and shares ---- */

/*
 * Under @g's lock: is it counted in its @parent as its activity demands? Returns
 * what the active_weight of that has to change by.
 *
 * Both the first to add to active_weight and the last to take from it come
 * here, and each reads the sum under the lock: whoever comes last is right.
 */
static s64 settle_activity(struct group *g, u32 *parent)
{
	s64 weight, delta;

	bpf_spin_lock(&g->lock);
	weight = g->active_weight > 0 ? g->info.weight : 0;
	delta = weight - g->contributed;
	g->contributed = weight;
	*parent = g->info.parent;
	bpf_spin_unlock(&g->lock);
	return delta;
}

/* The average of @g's active weight until @now. CPUs that take it at the same
 * time may count an interval twice, which is short then. */
static u64 average_weight(struct group *g, u64 now)
{
	s64 sum = g->active_weight, elapsed_ns = now - g->averaged_at_ns;

	if (elapsed_ns > 0) {
		g->averaged_at_ns = now;
		g->average_weight = fair_average(g->average_weight,
						 sum > 0 ? sum : 0, elapsed_ns);
	}
	return g->average_weight / WEIGHT_SCALE;
}

/* Add @delta to the active weight of group @id, and tell those above. */
__noinline int add_active_weight(u32 id, s64 delta)
{
	u64 now_ns = bpf_ktime_get_ns();
	u32 level;

	bpf_for(level, 0, MAX_CGROUP_DEPTH) {
		struct group *g;
		s64 now;

		if (!id || !delta)
			break;
		g = lookup_group(id);
		if (!g)
			break;
		average_weight(g, now_ns);
		now = __sync_fetch_and_add(&g->active_weight, delta) + delta;
		if (now > 0 && now != delta)
			break; /* it was active and stays so */
		delta = settle_activity(g, &id);
	}
	return 0;
}

/* The parent of @g learns what @g counts there now. */
static void tell_parent(struct group *g)
{
	u32 parent;
	s64 delta = settle_activity(g, &parent);

	add_active_weight(parent, delta);
}

/* @tc @counts among the tasks of @g that are apart, or does not. Who unparks a task may
 * come between it and its own ops: whatever comes last, it counts once. */
static void count_apart(struct task_ctx *tc, struct group *g, u32 counts)
{
	u32 counted;

	if (tc->counts_apart == counts)
		return;
	counted = __sync_lock_test_and_set(&tc->counts_apart, counts);
	__sync_fetch_and_add(&g->nr_apart, counts - counted);
}

/* A task of @g became runnable (+1) or stopped being so (-1). */
static void change_runnable(struct group *g, s32 change)
{
	u32 before = __sync_fetch_and_add(&g->nr_runnable, change);

	if (before == 0 && change > 0)
		add_active_weight(g->id, WEIGHT_DEFAULT);
	else if (before == 1 && change < 0)
		add_active_weight(g->id, -WEIGHT_DEFAULT);
}

/* @tc wants to run, for its group. */
static void group_runnable(struct task_ctx *tc)
{
	struct group *g = lookup_group(tc->group);

	tc->is_runnable = 1;
	if (!g)
		return;
	count_apart(tc, g, tc->apart);
	change_runnable(g, 1);
}

/* It does not any more. */
static void group_quiescent(struct task_ctx *tc)
{
	struct group *g = lookup_group(tc->group);

	tc->is_runnable = 0;
	if (!g)
		return;
	count_apart(tc, g, 0);
	change_runnable(g, -1);
}

/* The part of the host that group @id has while those who are active now are. */
__noinline u64 find_share(u32 id, u64 now)
{
	u32 level, weight = WEIGHT_DEFAULT; /* of its own tasks, in it */
	u64 share = SHARE_ONE;

	bpf_for(level, 0, MAX_CGROUP_DEPTH + 1) {
		struct group *g = climb(&id);

		if (!g)
			break;
		share = fair_child_share(share, weight, average_weight(g, now));
		weight = g->info.weight;
	}
	return share;
}

/* The same for @g, not older than a millisecond. */
static u64 group_share(struct group *g, u64 now)
{
	if (ns_since(g->share_at_ns, now) >= SHARE_FRESH_NS) {
		g->share = find_share(g->id, now);
		g->share_at_ns = now;
	}
	return g->share;
}

/* The tasks of @g that want to run and are not apart. */
static u32 nr_together(const struct group *g)
{
	u32 apart = g->nr_apart, runnable = g->nr_runnable;

	return runnable > apart ? runnable - apart : 0;
}

/* The tasks of @g that want to run, without vCPUs that rest. */
static u32 nr_working(const struct group *g)
{
	u32 resting = g->nr_resting, runnable = g->nr_runnable;

	return runnable > resting ? runnable - resting : 0;
}

/* Of its share, the part of those tasks, by which they are charged. */
static u64 share_together(struct group *g, u64 now)
{
	return fair_part(group_share(g, now), nr_together(g), nr_working(g));
}

/* The part of each task that is apart. */
static u64 share_apart(struct group *g, u64 now)
{
	return fair_part(group_share(g, now), 1, nr_working(g));
}

/* The runnable @tc, of @g, is @apart from now on, or not. */
static void set_apart(struct task_ctx *tc, struct group *g, bool apart)
{
	tc->apart = apart;
	if (tc->is_runnable)
		count_apart(tc, g, apart);
}

/* ---- what running costs ---- */

static bool is_per_cpu_kthread(const struct task_struct *p)
{
	return (p->flags & PF_KTHREAD) && p->nr_cpus_allowed == 1;
}

/* @tc, of @g, which is not apart, used @used_ns of CPU time in @d. */
static void charge_together(const struct task_ctx *tc, struct group *g,
			    const struct domain *d, u64 used_ns, u64 now)
{
	u64 cost = fair_charge(used_ns, share_together(g, now));

	cost = fair_cost(g->vtime, d->present, cost, nr_crowded != 0);
	/* Next to each other: CPUs that choose now count it once, or twice. */
	__sync_fetch_and_add(&g->vtime, cost);
	__sync_fetch_and_add(&g->running,
			     fair_runs(now) - fair_runs(tc->charged_at_ns));
}

/*
 * @p, of which all is known in @tc, ran on a CPU of @d. What it used is what the kernel
 * counts, and shows in cpu.stat: switches take time too, which clock readings of
 * this program's own leave to nobody, and interrupts are not the task's.
 */
static void charge(struct task_struct *p, struct task_ctx *tc,
		   const struct domain *d, u64 now)
{
	struct group *g = lookup_group(tc->group);
	u64 used_ns = p->se.sum_exec_runtime - tc->charged_ns;
	u64 halted_ns = 0, task_cost;

	if (!g || (s64)used_ns <= 0)
		return;
	tc->charged_ns += used_ns;
	if (tc->halts_on_cpu && p->nr_cpus_allowed == 1)
		halted_ns = count_halted(p, now);
	task_cost = fair_task_charge(
		used_ns > halted_ns ? used_ns - halted_ns : 0, p->scx.weight);
	tc->vtime += task_cost;
	/* What a CPU's kernel thread does is for all tasks. */
	tc->bound_cost += fair_charge(task_cost, is_per_cpu_kthread(p)
							 ? group_share(g, now)
							 : share_apart(g, now));
	if (!tc->apart)
		charge_together(tc, g, d, used_ns, now);
	tc->charged_at_ns = now;
	__sync_fetch_and_add(&g->info.stats.run_ns, used_ns);
	if (tc->is_vcpu)
		__sync_fetch_and_add(&g->info.stats.vcpu_run_ns, used_ns);
	if (nr_capped)
		spend_caps(tc->cgroup_group, used_ns);
}

/*
 * Where @g, without those that are apart, will stand when its running tasks have been
 * charged for what they have used by @now. At the end of a turn the CPUs come one after
 * the other, and what the others have not charged yet is as much as a turn.
 */
static u64 group_vtime(struct group *g, u64 now)
{
	u64 uncharged_ns = fair_uncharged(g->running, now, slice_ns);

	if (!uncharged_ns)
		return g->vtime;
	return g->vtime + fair_charge(uncharged_ns, share_together(g, now));
}

/* Where the bound task that runs on @c stands now, by the clock of those. What it ran
 * beyond a bound would count for nothing: see place_bound(). */
static u64 bound_vtime(const struct cpu_state *c, u64 now)
{
	u64 ran_ns = ns_since(c->run_at_ns, now);

	return c->bound_present +
	       fair_charge(ran_ns < starved_ns ? ran_ns : starved_ns,
			   c->bound_share);
}

/* Where the running task of @c, which is of @g, stands among others. */
static u64 running_vtime(const struct cpu_state *c, struct group *g, u64 now)
{
	return c->bound ? bound_vtime(c, now) + c->bound_offset
			: group_vtime(g, now);
}

/* What a slice costs @g, virtual time. */
static u64 slice_cost(struct group *g, u64 now)
{
	return fair_charge(slice_ns, share_together(g, now));
}

/* How many of @g's tasks that are not apart run at the same time, at most. */
static u32 tasks_at_once(const struct group *g)
{
	u32 together = nr_together(g);

	return together < nr_cpus ? together : nr_cpus;
}

/* How far (virtual time) @g may be behind the present, and ahead: tasks that run at the
 * same time put it ahead without it having taken more than its share. */
static u64 most_lag(const struct group *g, u64 cost)
{
	return cost * (LAG_SLICES + tasks_at_once(g));
}

/*
 * The only task of @g that wants to run, of those that are not apart, woke in @d. Sleep
 * earns a group some slices at most, and what it owes is forgiven beyond a bound. Other
 * groups keep what they owe and are owed.
 */
static void settle_vtime(struct group *g, const struct domain *d, u64 now)
{
	u64 cost = slice_cost(g, now), vtime = g->vtime;
	u64 settled = fair_settle(vtime, d->present, SLEEP_SLICES * cost,
				  most_lag(g, cost));

	/* A charge that comes between is kept, and this waits for next time. */
	if (settled != vtime)
		__sync_val_compare_and_swap(&g->vtime, vtime, settled);
}

/* The place of @tc among the tasks of @g. A vCPU waits for its VM's other threads. */
static u64 task_key(struct task_ctx *tc, struct group *g)
{
	u64 head_start = is_vm(g) && !tc->is_vcpu ? 2 * slice_ns : 0;

	/* One that was bound may have had a CPU to itself. */
	tc->vtime = fair_settle(tc->vtime, g->task_vtime_now, slice_ns,
				LAG_SLICES * slice_ns);
	return tc->vtime - head_start;
}

/* ---- coming and going ---- */

/* VM @g, whose home was @from (domain + 1; 0: none), has it in domain @to - 1 from now
 * on, unless another CPU comes first. */
static void set_home(struct group *g, u32 from, u32 to)
{
	if (__sync_val_compare_and_swap(&g->home, from, to) != from)
		return;
	if (from)
		__sync_fetch_and_sub(&domain_at(from - 1)->nr_homes, 1);
	if (to)
		__sync_fetch_and_add(&domain_at(to - 1)->nr_homes, 1);
}

static u32 make_group(u32 kind, u32 parent, u32 weight)
{
	struct group *g;
	u32 id;

	if (!take_number(&free_groups, &host_stats.groups_used, &id))
		return 0;
	g = lookup_group(id);
	if (!g)
		return 0;
	/* clang writes no more than that without a call. */
	_Static_assert(offsetof(struct group, lock) <= 1024, "in two steps");
	__builtin_memset(g, 0, offsetof(struct group, lock));
	g->info.parent = parent;
	g->info.weight = weight;
	g->info.created_ns = bpf_ktime_get_ns();
	g->id = id;
	g->vtime = host_present;
	g->averaged_at_ns = g->info.created_ns;
	g->info.kind = kind;
	return id;
}

static void free_group(u32 id)
{
	struct group *g = lookup_group(id);

	if (!g)
		return;
	set_cap(id, 0, ~0ULL, 0);
	set_home(g, g->home, 0);
	g->info.kind = GROUP_FREE;
	__sync_lock_test_and_set(&g->orphan, 1);
	free_entities_of(id);
	give_group_back(g);
}

/* Count @p (+1) into, or (-1) out of, its cgroup's group and all above. */
__noinline int count_process(u32 id, u32 tgid, s32 change)
{
	u32 level;

	bpf_for(level, 0, MAX_CGROUP_DEPTH) {
		struct group *g;

		/* The root holds everything: never one process's. */
		if (id == root_group)
			break;
		g = climb(&id);
		if (!g)
			break;
		__sync_fetch_and_add(&g->info.nr_tasks, change);
		__sync_fetch_and_add(&g->tgid_sum, (s64)change * tgid);
		__sync_fetch_and_add(&g->tgid_sum_sq,
				     (s64)change * tgid * tgid);
	}
	return 0;
}

/*
 * Where a VM belongs whose vCPU is in cgroup group @id: the highest cgroup that
 * holds nothing but its process, or @id itself. libvirt's cgroup per vCPU thus
 * does not split the VM, and the weight of its scope is the VM's.
 */
static u32 place_of_vm(u32 id)
{
	u32 level, place = id;

	bpf_for(level, 0, MAX_CGROUP_DEPTH) {
		u32 here = id;
		struct group *g;

		if (here == root_group)
			break;
		g = climb(&id);
		if (!g ||
		    !one_process(g->info.nr_tasks, g->tgid_sum, g->tgid_sum_sq))
			break;
		place = here;
	}
	return place;
}

/* Move VM @g below cgroup group @place. */
static void set_parent(struct group *g, u32 place)
{
	u32 old;
	s64 contributed;

	if (g->info.parent == place)
		return;
	bpf_spin_lock(&g->lock);
	old = g->info.parent;
	contributed = g->contributed;
	g->contributed = 0;
	g->info.parent = place;
	bpf_spin_unlock(&g->lock);
	add_active_weight(old, -contributed);
	tell_parent(g);
	g->share_at_ns = 0;
}

/* Count a member of VM @g. Not if its last one is just leaving, or another CPU counts:
 * it is looked at again soon. */
static bool vm_get(struct group *g)
{
	u32 nr = g->info.nr_tasks;

	return nr &&
	       __sync_val_compare_and_swap(&g->info.nr_tasks, nr, nr + 1) == nr;
}

/* The group of VM @key, made on first sight, with the caller counted in; 0: it
 * is just going, or no group is free. */
static u32 get_vm(const struct vm_key *key, u32 cgroup_group)
{
	struct group *g;
	u32 id, *known;

	known = bpf_map_lookup_elem(&group_of_vm, key);
	if (known) {
		g = lookup_group(*known);
		return g && vm_get(g) ? *known : 0;
	}
	id = make_group(GROUP_VM, place_of_vm(cgroup_group), WEIGHT_DEFAULT);
	g = lookup_group(id);
	if (!id || !g) {
		count(&host_stats.exhausted);
		return 0;
	}
	g->info.tgid = key->tgid;
	g->info.kvm = key->kvm;
	g->info.nr_tasks = 1;
	if (bpf_map_update_elem(&group_of_vm, key, &id, BPF_NOEXIST)) {
		/* A sibling on another CPU made it first: next time. */
		free_group(id);
		return 0;
	}
	bpf_map_update_elem(&group_of_process, &key->tgid, &id, BPF_NOEXIST);
	return id;
}

/* Task @tc leaves group @id, or the host: the last one takes the VM with it. */
static void leave_group(u32 id, const struct task_ctx *tc)
{
	struct group *g = lookup_group(id);
	struct vm_key key = {};
	u32 *of_process;

	if (!g || g->info.kind != GROUP_VM)
		return;
	if (tc->is_vcpu)
		__sync_fetch_and_sub(&g->info.nr_vcpus, 1);
	if (__sync_fetch_and_sub(&g->info.nr_tasks, 1) != 1)
		return;
	key.kvm = g->info.kvm;
	key.tgid = g->info.tgid;
	bpf_map_delete_elem(&group_of_vm, &key);
	of_process = bpf_map_lookup_elem(&group_of_process, &key.tgid);
	if (of_process && *of_process == id)
		bpf_map_delete_elem(&group_of_process, &key.tgid);
	free_group(id);
}

/* Group @id pays for the task from now on; a VM has counted it in already. The
 * task waits in no queue. */
static void join_group(struct task_ctx *tc, u32 id)
{
	struct group *g = lookup_group(id);
	u32 left = tc->group, runnable = tc->is_runnable;

	if (!g)
		return;
	if (runnable)
		group_quiescent(tc);
	tc->group = id;
	tc->vtime = g->task_vtime_now;
	if (runnable)
		group_runnable(tc);
	leave_group(left, tc);
}

#endif /* COHORT_GROUP_BPF_H */
