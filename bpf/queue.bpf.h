/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Queues and lanes: where a ready task waits. Not here: what a group owes
 * (group.bpf.h), which queue a CPU serves next (front.bpf.h).
 *
 * A lane is a set of CPUs; all tasks that wait in it may run on each of them,
 * so the first queue of a lane is always servable and nothing is searched. A
 * CPU serves its own lane, its domain's, and at most LANES_PER_CPU made for
 * cpusets. The cost of a decision grows with the logarithm of the groups that
 * wait in those, never with CPUs or VMs.
 *
 * A listed queue stands in its lane's tree by its group's virtual time as of
 * when it was listed. Groups pay meanwhile, so a key may lie behind the truth; a
 * CPU that finds the first one behind puts it where it belongs and looks again,
 * but not beyond what fair_patience() allows: no queue starves. Ahead it can
 * only be by a debt that was forgiven elsewhere since.
 */
#ifndef COHORT_QUEUE_BPF_H
#define COHORT_QUEUE_BPF_H

/* The queue that a CPU would serve next. */
struct front {
	u32 queue; /* 0: none */
	u32 group; /* its group */
	u64 key; /* its key in its lane */
	bool in_window; /* it is a cohort's, in its window */
	bool contested; /* somebody waits, if not in this queue */
};

static bool node_less(struct bpf_rb_node *a, const struct bpf_rb_node *b)
{
	struct queue_node *x = container_of(a, struct queue_node, rb);
	struct queue_node *y = container_of(b, struct queue_node, rb);

	return vtime_before(x->key, y->key);
}

/* Put the node of queue @id, which the caller has claimed, into its tree. */
__noinline int queue_list(u32 id, u64 key)
{
	struct queue *q = lookup_queue(id);
	struct queue_node *node;
	struct lane *lane;

	if (!q)
		return 0;
	lane = lookup_lane(q->lane);
	if (!lane)
		return 0;
	node = bpf_kptr_xchg(&q->node, NULL);
	if (!node) {
		scx_bpf_error("queue %u was listed twice", id);
		return 0;
	}
	q->served_key = key;
	node->key = key;
	node->queue = id;
	bpf_spin_lock(&lane->lock);
	bpf_rbtree_add(&lane->tree, &node->rb, node_less);
	lane->nr_listed++;
	bpf_spin_unlock(&lane->lock);
	return 0;
}

static void queue_free(u32 id, struct queue *q)
{
	if (__sync_val_compare_and_swap(&q->state, QUEUE_IDLE, QUEUE_FREE) ==
	    QUEUE_IDLE)
		give_number(&free_queues, &host_stats.queues_used, id);
}

/*
 * A task is about to wait in queue @id: count it, and list the queue if it was
 * idle. The DSQ itself gets the task only after the enqueue op has returned,
 * so a CPU that looks meanwhile finds a listed queue with an empty DSQ: it goes
 * by nr_waiting and leaves the queue listed.
 */
static void queue_add_waiter(u32 id, struct queue *q, u64 key)
{
	__sync_fetch_and_add(&q->nr_waiting, 1);
	if (__sync_val_compare_and_swap(&q->state, QUEUE_IDLE, QUEUE_LISTED) ==
	    QUEUE_IDLE)
		queue_list(id, key);
}

/* The task waits no more: it runs, sleeps, or moves to another queue. */
static void stop_waiting(struct task_ctx *tc)
{
	u32 id = __sync_lock_test_and_set(&tc->queue, 0);
	struct queue *q;

	if (!id)
		return;
	q = lookup_queue(id);
	if (!q)
		return;
	__sync_fetch_and_sub(&q->nr_waiting, 1);
	tc->throttled_ns += q->parked_sum_ns - tc->parked_mark_ns;
}

/* @p leaves its queue. For a CPU's local DSQ it does so here, not only when it
 * runs, so that other CPUs do not look for it where it was. */
static void leave_queue(struct task_struct *p)
{
	struct task_ctx *tc = lookup_task_may_fail(p);

	if (tc)
		stop_waiting(tc);
}

/* @p, at which @it stands in its queue, to this CPU's local DSQ for @slice; false
 * if another CPU took it first. */
static bool move_here(struct bpf_iter_scx_dsq *it, struct task_struct *p,
		      u64 slice)
{
	scx_bpf_dsq_move_set_slice(it, slice);
	if (!scx_bpf_dsq_move(it, p, SCX_DSQ_LOCAL, 0))
		return false;
	leave_queue(p);
	return true;
}

/*
 * Take queue @id out of the front of @lane, if it is still there: at @new_key
 * back into the tree, or idle if @idle.
 */
__noinline int queue_relist(u32 lane_id, u32 id, u64 new_key, bool idle)
{
	struct lane *lane = lookup_lane(lane_id);
	struct queue *q = lookup_queue(id);
	struct queue_node *node;
	struct bpf_rb_node *rb;

	if (!lane || !q)
		return 0;

	bpf_spin_lock(&lane->lock);
	rb = bpf_rbtree_first(&lane->tree);
	if (!rb) {
		bpf_spin_unlock(&lane->lock);
		return 0;
	}
	if (container_of(rb, struct queue_node, rb)->queue != id) {
		bpf_spin_unlock(&lane->lock);
		return 0;
	}
	rb = bpf_rbtree_remove(&lane->tree, rb);
	if (!rb) {
		bpf_spin_unlock(&lane->lock);
		return 0;
	}
	node = container_of(rb, struct queue_node, rb);
	if (!idle) {
		node->key = new_key;
		bpf_rbtree_add(&lane->tree, &node->rb, node_less);
		bpf_spin_unlock(&lane->lock);
		return 0;
	}
	lane->nr_listed--;
	bpf_spin_unlock(&lane->lock);

	node = bpf_kptr_xchg(&q->node, node);
	if (node)
		bpf_obj_drop(node);
	/*
	 * Idle before the last look at nr_waiting, as an enqueue counts before
	 * it looks at the state: one of the two sees the other.
	 */
	__sync_lock_test_and_set(&q->state, QUEUE_IDLE);
	if (q->nr_waiting > 0) {
		if (__sync_val_compare_and_swap(&q->state, QUEUE_IDLE,
						QUEUE_LISTED) == QUEUE_IDLE)
			queue_list(id, new_key);
	} else if (q->orphan) {
		queue_free(id, q);
	}
	return 0;
}

/* Move queue @id from the front of its lane to the group @capped_id. */
__noinline int queue_park(u32 lane_id, u32 id, u32 capped_id)
{
	struct lane *lane = lookup_lane(lane_id);
	struct group *capped = lookup_group(capped_id);
	struct queue *q = lookup_queue(id);
	struct bpf_rb_node *rb;

	if (!lane || !q || !capped)
		return 0;

	bpf_spin_lock(&lane->lock);
	rb = bpf_rbtree_first(&lane->tree);
	if (!rb) {
		bpf_spin_unlock(&lane->lock);
		return 0;
	}
	if (container_of(rb, struct queue_node, rb)->queue != id) {
		bpf_spin_unlock(&lane->lock);
		return 0;
	}
	rb = bpf_rbtree_remove(&lane->tree, rb);
	if (!rb) {
		bpf_spin_unlock(&lane->lock);
		return 0;
	}
	lane->nr_listed--;
	bpf_spin_unlock(&lane->lock);

	q->parked_ns = scx_bpf_now();
	__sync_lock_test_and_set(&q->state, QUEUE_PARKED);
	bpf_spin_lock(&capped->lock);
	bpf_rbtree_add(&capped->parked, rb, node_less);
	bpf_spin_unlock(&capped->lock);
	return 0;
}

/* Queue @id, with all that it will ever need: an enqueue can allocate nothing. */
static int init_queue(u32 id)
{
	struct queue *q = lookup_queue(id);
	struct queue_node *node = NULL;
	s32 err;
	u32 i;

	if (!q)
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
	node = bpf_kptr_xchg(&q->node, node);
	if (node)
		bpf_obj_drop(node);
	return bpf_map_push_elem(&free_queues, &id, 0);
}

/* The queue of group @group_id on lane @lane_id; 0: there is none. */
static u32 known_queue(u32 group_id, u32 lane_id)
{
	struct queue_key key = { .group = group_id, .lane = lane_id };
	u32 *known = bpf_map_lookup_elem(&queue_of, &key);

	return known ? *known : 0;
}

static u32 make_queue(u32 group_id, u32 lane_id)
{
	struct queue_key key = { .group = group_id, .lane = lane_id };
	struct group *g;
	struct queue *q;
	u32 id, i;

	if (!take_number(&free_queues, &host_stats.queues_used, &id))
		return 0;
	g = lookup_group(group_id);
	q = lookup_queue(id);
	if (!g || !q)
		return 0;
	q->group = group_id;
	q->lane = lane_id;
	q->nr_waiting = 0;
	q->parked_sum_ns = 0;
	q->orphan = 0;
	q->state = QUEUE_IDLE;
	if (bpf_map_update_elem(&queue_of, &key, &id, BPF_NOEXIST)) {
		/* Another CPU made it first, or the map is full. */
		queue_free(id, q);
		return known_queue(group_id, lane_id);
	}
	bpf_for(i, 0, 16) {
		u32 head = g->first_queue;

		q->next = head;
		if (__sync_val_compare_and_swap(&g->first_queue, head, id) ==
		    head)
			break;
	}
	return id;
}

/* The queue of group @group_id on lane @lane_id, made on first use; 0: none
 * is free. That of the lane that @tc belongs to, where its siblings wait, is kept. */
static u32 find_queue(struct task_ctx *tc, u32 group_id, u32 lane_id)
{
	u32 id;

	if (tc->cached_group == group_id && tc->cached_lane == lane_id &&
	    tc->queue_cached)
		return tc->queue_cached;
	id = known_queue(group_id, lane_id);
	if (!id)
		id = make_queue(group_id, lane_id);
	if (lane_id != tc->lane)
		return id;
	tc->queue_cached = id;
	tc->cached_group = group_id;
	tc->cached_lane = lane_id;
	return id;
}

/* The group is gone and holds no task: give back its queues. */
static void free_queues_of(struct group *g)
{
	u32 id = __sync_lock_test_and_set(&g->first_queue, 0);
	u32 i;

	bpf_for(i, 0, MAX_QUEUES) {
		struct queue_key key;
		struct queue *q;
		u32 next;

		if (!id)
			break;
		q = lookup_queue(id);
		if (!q)
			break;
		next = q->next;
		key.group = q->group;
		key.lane = q->lane;
		bpf_map_delete_elem(&queue_of, &key);
		/* A listed one is freed by the CPU that unlists it. */
		q->orphan = 1;
		queue_free(id, q);
		id = next;
	}
}

/* Wake an idle CPU of the lane, if there is one. */
static void lane_kick_idle(u32 lane_id)
{
	struct lane *lane;
	struct bpf_cpumask *mask;
	s32 cpu;

	if (is_own_lane(lane_id)) {
		scx_bpf_kick_cpu(lane_id, SCX_KICK_IDLE);
		return;
	}
	lane = lookup_lane(lane_id);
	if (!lane)
		return;
	bpf_rcu_read_lock();
	mask = lane->mask;
	if (mask) {
		cpu = scx_bpf_pick_idle_cpu(cast_mask(mask), 0);
		if (cpu >= 0)
			scx_bpf_kick_cpu(cpu, SCX_KICK_IDLE);
	}
	bpf_rcu_read_unlock();
}

#endif /* COHORT_QUEUE_BPF_H */
