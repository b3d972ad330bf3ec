/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Entities: where a group's tasks wait in a domain, and the domain's tree, which holds
 * them in the order in which they come. Not here: what a group owes (group.bpf.h), what
 * is run when (plan.bpf.h, take.bpf.h).
 *
 * Whoever takes an entity out of the tree has it alone, and puts it back. A key in the
 * tree may be out of date, as groups pay meanwhile: whoever takes an entity out reads
 * the group's virtual time anew.
 *
 * An entity is in the tree (listed) from when a task of it first waits or runs, until
 * it is taken out and has no task.
 */
#ifndef COHORT_ENTITY_BPF_H
#define COHORT_ENTITY_BPF_H

static bool node_before(struct bpf_rb_node *a, const struct bpf_rb_node *b)
{
	struct entity_node *x = container_of(a, struct entity_node, rb);
	struct entity_node *y = container_of(b, struct entity_node, rb);

	return vtime_before(x->key, y->key);
}

/* Nobody stands farther behind in the tree of @d, so who has waited too long is seen in
 * time: virtual time is no slower than the clock where groups compete. */
static u64 last_place(const struct domain *d)
{
	return d->present + starved_ns;
}

/* Put entity @id, which the caller has, into its domain's tree at @key. */
__noinline int list_entity(u32 id, u64 key)
{
	struct entity *e = lookup_entity(id);
	struct tree *tree = e ? lookup_tree(e->domain) : NULL;
	struct entity_node *node;
	struct domain *d;

	if (!tree)
		return 0;
	d = domain_at(e->domain);
	node = bpf_kptr_xchg(&e->node, NULL);
	if (!node) {
		scx_bpf_error("entity %u was listed twice", id);
		return 0;
	}
	node->key = vtime_before(last_place(d), key) ? last_place(d) : key;
	node->entity = id;
	bpf_spin_lock(&tree->lock);
	bpf_rbtree_add(&tree->root, &node->rb, node_before);
	d->nr_listed++;
	bpf_spin_unlock(&tree->lock);
	return 0;
}

/* Take the first entity out of the tree of domain @domain_id; 0: there is none. */
__noinline u32 take_entity(u32 domain_id)
{
	struct domain *d = domain_at(domain_id);
	struct tree *tree = lookup_tree(domain_id);
	struct entity_node *node;
	struct bpf_rb_node *rb;
	struct entity *e;
	u32 id;

	if (!tree || !d->nr_listed)
		return 0;
	bpf_spin_lock(&tree->lock);
	rb = bpf_rbtree_first(&tree->root);
	if (!rb) {
		bpf_spin_unlock(&tree->lock);
		return 0;
	}
	rb = bpf_rbtree_remove(&tree->root, rb);
	d->nr_listed--;
	bpf_spin_unlock(&tree->lock);
	if (!rb)
		return 0;
	node = container_of(rb, struct entity_node, rb);
	id = node->entity;
	e = bpf_map_lookup_elem(&entities, &id);
	if (!e) {
		bpf_obj_drop(node);
		return 0;
	}
	node = bpf_kptr_xchg(&e->node, node);
	if (node)
		bpf_obj_drop(node);
	return id;
}

static bool has_tasks(const struct entity *e)
{
	return e->nr_waiting > 0 || e->running;
}

/* The number of @g, which is gone, may be used again. */
static void give_group_back(struct group *g)
{
	if (!g->nr_entities &&
	    __sync_val_compare_and_swap(&g->orphan, 1, 2) == 1)
		give_number(&free_groups, &host_stats.groups_used, g->id);
}

/* Entity @id, @e, has a task now: it is in the tree. */
static void wake_entity(u32 id, struct entity *e, u64 key, u64 now)
{
	if (e->state != ENTITY_IDLE ||
	    __sync_val_compare_and_swap(&e->state, ENTITY_IDLE, ENTITY_BUSY) !=
		    ENTITY_IDLE)
		return;
	e->served_ns = now;
	list_entity(id, key);
}

/* Give @e, entity @id, which is idle, back if nobody wants it. */
static void free_entity(u32 id, struct entity *e)
{
	struct entity_key key = { .group = e->group, .domain = e->domain };
	struct group *g = lookup_group(e->group);

	if (!g || __sync_val_compare_and_swap(&e->state, ENTITY_IDLE,
					      ENTITY_FREE) != ENTITY_IDLE)
		return;
	/* Who comes to wait counts first, and looks at the state then; and wakes the
	 * entity, unless that was free just then. */
	if (has_tasks(e)) {
		__sync_val_compare_and_swap(&e->state, ENTITY_FREE,
					    ENTITY_IDLE);
		wake_entity(id, e, g->vtime, bpf_ktime_get_ns());
		return;
	}
	bpf_map_delete_elem(&entity_of, &key);
	e->group = 0;
	give_number(&free_entities, &host_stats.entities_used, id);
	if (__sync_fetch_and_sub(&g->nr_entities, 1) == 1 && g->orphan)
		give_group_back(g);
}

/* The number of the entity of group @group_id in domain @domain_id; 0: it has none. */
static u32 known_entity(u32 group_id, u32 domain_id)
{
	struct entity_key key = { .group = group_id, .domain = domain_id };
	u32 *id = bpf_map_lookup_elem(&entity_of, &key);

	return id ? *id : 0;
}

/* Group @group_id is gone. A listed entity goes when it is taken. */
static void free_entities_of(u32 group_id)
{
	u32 i;

	bpf_for(i, 0, nr_domains) {
		u32 id = known_entity(group_id, i);
		struct entity *e = id ? lookup_entity(id) : NULL;

		if (e)
			free_entity(id, e);
	}
}

/* Put @e, entity @id, which the caller has taken, back: into the tree at @key, or to
 * rest if it has no task. */
static void put_entity(u32 id, struct entity *e, u64 key, u64 now)
{
	struct group *g;

	if (has_tasks(e)) {
		list_entity(id, key);
		return;
	}
	/* Idle before the last look: an enqueue counts before it looks at the state. */
	__sync_lock_test_and_set(&e->state, ENTITY_IDLE);
	if (has_tasks(e)) {
		wake_entity(id, e, key, now);
		return;
	}
	g = lookup_group(e->group);
	if ((g && g->orphan) || host_stats.entities_used > nr_entities / 2)
		free_entity(id, e);
}

/* Entity @id, with all that it will ever need: an enqueue can allocate nothing. */
static int init_entity(u32 id)
{
	struct entity *e = lookup_entity(id);
	struct entity_node *node = NULL;
	s32 err;
	u32 i;

	if (!e)
		return -EINVAL;
	err = scx_bpf_create_dsq(id, -1);
	if (err)
		return err;
	bpf_for(i, 0, ALLOCATION_TRIES) {
		node = bpf_obj_new(typeof(*node));
		if (node)
			break;
	}
	if (!node)
		return -ENOMEM;
	node = bpf_kptr_xchg(&e->node, node);
	if (node)
		bpf_obj_drop(node);
	return bpf_map_push_elem(&free_entities, &id, 0);
}

/* The entity of group @group_id in @domain_id, made on first use; 0: none is free. */
__noinline u32 find_entity(u32 group_id, u32 domain_id)
{
	struct entity_key key = { .group = group_id, .domain = domain_id };
	u32 id = known_entity(group_id, domain_id);
	struct entity *e;
	struct group *g;

	if (id)
		return id;
	g = lookup_group(group_id);
	if (!g || !take_number(&free_entities, &host_stats.entities_used, &id))
		return 0;
	e = lookup_entity(id);
	if (!e)
		return 0;
	e->group = group_id;
	e->domain = domain_id;
	/* What counts tasks is 0: it may count one that comes too late, for a moment. */
	e->cpus = 0;
	e->turn = 0;
	e->planned = 0;
	e->patient = 0;
	e->nr_sleeps = 0;
	e->part_turn = 0;
	e->mean_sleeps = 0;
	e->mean_running = 0;
	__sync_fetch_and_add(&g->nr_entities, 1);
	__sync_lock_test_and_set(&e->state, ENTITY_IDLE);
	if (!bpf_map_update_elem(&entity_of, &key, &id, BPF_NOEXIST))
		return id;
	/* Another CPU made it first, or the map is full. */
	e->state = ENTITY_FREE;
	e->group = 0;
	__sync_fetch_and_sub(&g->nr_entities, 1);
	give_number(&free_entities, &host_stats.entities_used, id);
	return known_entity(group_id, domain_id);
}

/* The entity that @tc belonged to last; NULL: none yet. */
static struct entity *last_entity(const struct task_ctx *tc)
{
	return tc->entity ? lookup_entity(tc->entity) : NULL;
}

/* The entity whose turn it is where @slot says so; NULL: it is nobody's, or that of tasks
 * that are bound. */
static struct entity *entity_in_slot(u32 slot)
{
	return slot && slot != SLOT_BOUND ? lookup_entity(slot) : NULL;
}

/* The entity of @tc's group in @domain_id, which is @tc's from now on; where there is no
 * room for it, that of the root. NULL: not even that. */
static struct entity *entity_for(struct task_ctx *tc, u32 domain_id)
{
	struct entity *e = last_entity(tc);

	if (e && e->group == tc->group && e->domain == domain_id)
		return e;
	tc->entity = find_entity(tc->group, domain_id);
	if (!tc->entity) {
		count(&host_stats.exhausted);
		tc->entity = find_entity(root_group, domain_id);
	}
	return last_entity(tc);
}

/* ---- which CPUs a task may have ---- */

/* The CPUs of domain @domain_id that @p may run on by its affinity; inside a hook it
 * may run on one. */
__noinline u64 cpus_of(struct task_struct *p __arg_trusted, u32 domain_id)
{
	struct domain *d = domain_at(domain_id);
	u64 cpus = 0;
	u32 i;

	bpf_for(i, 0, d->nr_cpus) {
		u32 cpu = d->cpu[i & (DOMAIN_CPUS - 1)];

		if (bpf_cpumask_test_cpu(cpu, &p->cpus_mask))
			cpus |= 1ULL << i;
	}
	return cpus;
}

/*
 * @e is for tasks that may run on @cpus, if it has none. Meanwhile it is for nobody: a
 * task counts first, and compares then, so that one that is counted here has compared
 * with what stays.
 */
static void adopt_cpus(struct entity *e, u64 cpus)
{
	u64 before;

	if (__sync_val_compare_and_swap(&e->adopting, 0, 1))
		return;
	before = __sync_lock_test_and_set(&e->cpus, 0);
	__sync_lock_test_and_set(&e->cpus, has_tasks(e) ? before : cpus);
	__sync_lock_test_and_set(&e->adopting, 0);
}

/* Finds where @p, which is about to count in @e, may run in the domain of that. If @e has
 * no task it is for these CPUs then. */
static void find_cpus(struct task_struct *p, struct task_ctx *tc,
		      const struct group *g, struct entity *e)
{
	if (tc->cpus_domain != e->domain + 1) {
		tc->cpus = cpus_of(p, e->domain);
		tc->cpus_domain = e->domain + 1;
	}
	if (e->cpus == tc->cpus || has_tasks(e) || p->nr_cpus_allowed == 1)
		return;
	if (e->cpus && is_vm(g) && !tc->is_vcpu)
		return;
	adopt_cpus(e, tc->cpus);
}

/*
 * May @p, which counts in @e, run elsewhere than the others of its group in that
 * domain? Such tasks, which are few, wait for one CPU each.
 */
static bool is_apart(const struct task_struct *p, const struct task_ctx *tc,
		     const struct entity *e)
{
	return p->nr_cpus_allowed == 1 || e->cpus != tc->cpus;
}

/* ---- waiting ---- */

/* The queue in which @tc waits for a CPU; 0: it does not, or until its cap is refilled. */
static u32 queue_for_cpu(const struct task_ctx *tc)
{
	u32 queue = READ_ONCE(tc->queue);

	return queue & PARKED_QUEUE ? 0 : queue;
}

/* One more is bound to @c, of @cpu in @d, and waits. */
static void count_bound(struct cpu_state *c, struct domain *d, s32 cpu)
{
	if (!__sync_fetch_and_add(&c->nr_bound, 1))
		__sync_fetch_and_or(&d->bound, bit_of(cpu));
}

/* One less. */
static void uncount_bound(struct cpu_state *c, struct domain *d, s32 cpu)
{
	if (__sync_fetch_and_sub(&c->nr_bound, 1) != 1)
		return;
	__sync_fetch_and_and(&d->bound, ~bit_of(cpu));
	if (c->nr_bound > 0)
		__sync_fetch_and_or(&d->bound, bit_of(cpu));
}

/* @tc waits in @queue, which is one, no more. */
static void leave_queue(struct task_ctx *tc, u32 queue)
{
	u32 number = queue & ~QUEUE_KINDS;
	struct domain *d;
	struct entity *e;

	if (queue & PARKED_QUEUE) {
		__sync_fetch_and_sub(&domain_at(number)->nr_parked, 1);
		tc->throttled_ns +=
			ns_since(tc->parked_at_ns, bpf_ktime_get_ns());
		return;
	}
	if (queue & BOUND_QUEUE) {
		d = domain_with(number);
		uncount_bound(cpu_at(number), d, number);
	} else {
		e = lookup_entity(queue);
		if (!e)
			return;
		__sync_fetch_and_sub(&e->nr_waiting, 1);
		d = domain_at(e->domain);
	}
	__sync_fetch_and_sub(&d->nr_waiting, 1);
}

/* The task waits no more: it runs, sleeps, or moves to another queue. */
static void stop_waiting(struct task_ctx *tc)
{
	if (tc->queue)
		leave_queue(tc, __sync_lock_test_and_set(&tc->queue, 0));
}

/* @p, at which @it stands in its queue, to this CPU's local DSQ; false if another CPU
 * took it first. It counts as one that waits until it runs. */
static bool move_here(struct bpf_iter_scx_dsq *it, struct task_struct *p)
{
	scx_bpf_dsq_move_set_slice(it, slice_ns);
	return scx_bpf_dsq_move(it, p, SCX_DSQ_LOCAL, 0);
}

#endif /* COHORT_ENTITY_BPF_H */
