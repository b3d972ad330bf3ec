/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What a CPU runs next: the earliest queue of its lanes, and which of that
 * queue's tasks. Not here: when that is asked (sched.bpf.c), how queues are kept
 * (queue.bpf.h), who comes in a waiting vCPU's place (yield.bpf.h).
 */
#ifndef COHORT_FRONT_BPF_H
#define COHORT_FRONT_BPF_H

enum {
	FRONT_TRIES = 8, /* stale keys mended by one look at a lane */
	MOVE_TRIES = 4, /* tasks of a front that it may not take */
};

/* Where a queue of lane @lane with key @key belongs now. */
static u64 queue_place(struct lane *lane, struct queue *q, struct group *g,
		       u64 key, u64 now)
{
	u64 vtime = group_vtime(g, now), credit, latest;

	if (!vtime_before(key, vtime))
		return key;
	credit = fair_charge(slice_ns, group_share(g, now));
	latest = q->served_key + fair_patience(credit, lane->nr_cpus,
					       q->nr_waiting, g->nr_runnable);
	if (vtime_before(vtime, latest))
		return vtime;
	return vtime_before(key, latest) ? latest : key;
}

/*
 * The first queue of lane @lane_id that holds a task and whose group is not
 * capped. A key that lies behind its group's virtual time is mended on the way.
 */
__noinline int lane_front(u32 lane_id, struct front *front)
{
	struct lane *lane = lookup_lane(lane_id);
	u64 now = scx_bpf_now();
	u32 i;

	if (!front || !lane)
		return 0;
	front->queue = 0;
	bpf_for(i, 0, FRONT_TRIES) {
		struct queue_node *node;
		struct bpf_rb_node *rb;
		struct group *g;
		struct queue *q;
		u32 id, capped;
		u64 key, place;

		if (!lane->nr_listed)
			break;
		bpf_spin_lock(&lane->lock);
		rb = bpf_rbtree_first(&lane->tree);
		if (!rb) {
			bpf_spin_unlock(&lane->lock);
			break;
		}
		node = container_of(rb, struct queue_node, rb);
		id = node->queue;
		key = node->key;
		bpf_spin_unlock(&lane->lock);

		q = lookup_queue(id);
		if (!q)
			break;
		g = lookup_group(q->group);
		if (!g)
			break;
		if (q->nr_waiting <= 0) {
			queue_relist(lane_id, id, g->vtime, true);
			continue;
		}
		capped = throttled_by(q->group);
		if (capped) {
			queue_park(lane_id, id, capped);
			continue;
		}
		place = queue_place(lane, q, g, key, now);
		if (place != key) {
			queue_relist(lane_id, id, place, false);
			continue;
		}
		front->queue = id;
		front->group = q->group;
		front->key = key;
		break;
	}
	return 0;
}

/* Virtual time, inside the group, of the first task of queue @id; false if an
 * enqueue is still under way. */
static bool head_vtime(u32 id, u64 *vtime)
{
	struct task_struct *head;
	bool found = false;

	bpf_for_each(scx_dsq, head, id, 0) {
		*vtime = head->scx.dsq_vtime;
		found = true;
		break;
	}
	return found;
}

/* Does @a come before @b? Between lanes of one group its tasks decide: what
 * they may run on must not. */
static bool front_before(const struct front *a, const struct front *b)
{
	u64 head_a, head_b;

	if (!b->queue)
		return true;
	if (a->group != b->group)
		return vtime_before(a->key, b->key);
	if (!head_vtime(a->queue, &head_a))
		return false;
	return !head_vtime(b->queue, &head_b) || vtime_before(head_a, head_b);
}

/* How many lanes @c serves at most: its own, its domain's, and some subsets. */
static u32 nr_lanes(const struct cpu_state *c)
{
	return 2 + c->lane_places;
}

/* The @i-th of the lanes that @cpu serves, if queues are listed in it, or -1. */
static s32 busy_lane(struct cpu_state *c, s32 cpu, u32 i)
{
	struct lane *lane;
	s32 id;

	if (i == 0) {
		id = cpu;
	} else if (i == 1) {
		id = FIRST_DOMAIN_LANE + domain_of(cpu);
	} else {
		id = c->lanes[(i - 2) & (LANES_PER_CPU - 1)];
		if (!id)
			return -1;
	}
	lane = lookup_lane(id);
	return lane && lane->nr_listed ? id : -1;
}

/* @window is the one that lane @id shows in @turn, if none was found so far, or it is of
 * the same VM and its first task stands before. */
static void merge_window(u32 id, u64 turn, struct front *window)
{
	struct front found = {};

	lane_window(id, turn, &found);
	if (!found.in_window)
		return;
	if (!window->in_window || (found.group == window->group &&
				   found.queue && front_before(&found, window)))
		*window = found;
}

/*
 * The queue that @cpu should serve: the earliest of its lanes; or, in turn @turn
 * (0: there are no windows), that of a cohort whose window a lane shows, if one of
 * its vCPUs waits or a task of it (of group @prev_group) ran here.
 */
__noinline int find_front(s32 cpu, u32 prev_group, u64 turn, struct front *best)
{
	struct cpu_state *c = lookup_cpu(cpu);
	struct front window = {};
	u32 i;

	if (!best || !c)
		return 0;
	__builtin_memset(best, 0, sizeof(*best));
	bpf_for(i, 0, nr_lanes(c)) {
		struct front front = {};
		s32 id = busy_lane(c, cpu, i);

		if (id < 0)
			continue;
		lane_front(id, &front);
		if (front.queue && front_before(&front, best))
			*best = front;
		if (turn)
			merge_window(id, turn, &window);
	}
	best->contested = best->queue != 0;
	if (!window.queue && window.group != prev_group)
		return 0;
	if (window.in_window &&
	    !(best->queue && vtime_before(best->key, window.key))) {
		window.contested = best->contested || window.queue;
		*best = window;
	}
	return 0;
}

/* The queue that stands behind the first one, @first, in @lane, which @second then
 * is; NULL: there is none that may be served. */
static struct queue *lane_second(struct lane *lane, u32 first,
				 struct front *second)
{
	struct queue_node *node;
	struct bpf_rb_node *rb;
	struct queue *q;
	u64 key = 0;
	u32 id = 0;

	bpf_spin_lock(&lane->lock);
	rb = bpf_rbtree_first(&lane->tree);
	if (!rb) {
		bpf_spin_unlock(&lane->lock);
		return NULL;
	}
	if (container_of(rb, struct queue_node, rb)->queue != first) {
		bpf_spin_unlock(&lane->lock);
		return NULL;
	}
	/* A tree can only be looked at from its first node. */
	rb = bpf_rbtree_remove(&lane->tree, rb);
	if (!rb) {
		bpf_spin_unlock(&lane->lock);
		return NULL;
	}
	node = container_of(rb, struct queue_node, rb);
	rb = bpf_rbtree_first(&lane->tree);
	if (rb) {
		id = container_of(rb, struct queue_node, rb)->queue;
		key = container_of(rb, struct queue_node, rb)->key;
	}
	bpf_rbtree_add(&lane->tree, &node->rb, node_less);
	bpf_spin_unlock(&lane->lock);

	q = id ? lookup_queue(id) : NULL;
	if (!q || q->nr_waiting <= 0 || throttled_by(q->group))
		return NULL;
	second->queue = id;
	second->group = q->group;
	second->key = key;
	return q;
}

/*
 * The VM of @front, whose turn it is on @c, needs more CPUs than other windows have
 * left in @turn: if the group behind it does not, that one's turn comes first.
 */
__noinline int pack_front(struct cpu_state *c, u64 turn, struct front *front)
{
	u64 now = scx_bpf_now(), next_cost;
	struct queue *q, *next_q;
	struct group *g, *next;
	struct front second = {};
	struct lane *lane;
	u32 left, width, next_width;

	if (!c || !front)
		return 0;
	q = lookup_queue(front->queue);
	lane = q ? lookup_lane(q->lane) : NULL;
	g = lookup_group(front->group);
	if (!lane || !g || lane->nr_listed < 2)
		return 0;
	width = window_width(g, lane);
	left = width > 1 ? cpus_left(c, lane, turn) : 1;
	if (width <= left)
		return 0;
	next_q = lane_second(lane, front->queue, &second);
	next = next_q ? lookup_group(second.group) : NULL;
	if (!next)
		return 0;
	second.key = queue_place(lane, next_q, next, second.key, now);
	next_width = window_width(next, lane);
	next_cost = next_width * fair_charge(slice_ns, group_share(next, now));
	if (!window_packs(left, width, front->key, next_width, second.key,
			  next_cost))
		return 0;
	count_effect(MECH_PACKING);
	second.contested = true;
	*front = second;
	return 0;
}

/* How many turns (times CROWD_ONE) of others the last group that waits for @cpu, on
 * which @tc of @g runs, has before it; those that wait in two lanes count twice. The
 * queue of @g may be listed still, or again, as siblings wait: it is no other. */
static u32 turns_before_last(struct cpu_state *c, s32 cpu,
			     const struct task_ctx *tc, const struct group *g)
{
	struct queue *own = lookup_queue(tc->queue_cached);
	u32 i, turns = 0;

	bpf_for(i, 0, nr_lanes(c)) {
		s32 id = busy_lane(c, cpu, i);
		struct lane *lane = id >= 0 ? lookup_lane(id) : NULL;
		u32 others;

		if (!lane)
			continue;
		others = lane->nr_listed;
		if (others && own && own->lane == id &&
		    own->state == QUEUE_LISTED)
			others--;
		turns += turns_to_last(others, tasks_at_once(g, lane->nr_cpus),
				       lane->nr_cpus);
	}
	return turns;
}

/* Is a queue listed that @cpu serves? */
static bool someone_waits(struct cpu_state *c, s32 cpu)
{
	u32 i;

	bpf_for(i, 0, nr_lanes(c))
		if (busy_lane(c, cpu, i) >= 0)
			return true;
	return false;
}

/* A sibling in queue @id that may run on @cpu, was preempted in guest kernel mode
 * and so may run before the first one; 0: none. */
__noinline s32 early_sibling(u32 id, s32 cpu)
{
	struct task_struct *p;
	u64 first_vtime = 0;
	s32 pid = 0;
	u32 seen = 0;

	bpf_for_each(scx_dsq, p, id, 0) {
		bool early = was_in_guest_kernel(vcpu_of(p)) &&
			     bpf_cpumask_test_cpu(cpu, p->cpus_ptr);

		if (!seen++) {
			if (early)
				break; /* nobody is to be overtaken */
			first_vtime = p->scx.dsq_vtime;
			continue;
		}
		if (seen > MAX_RANKED ||
		    !returns_early(p->scx.dsq_vtime, first_vtime, slice_ns))
			break;
		if (early) {
			pid = p->pid;
			break;
		}
	}
	return pid;
}

/* Move the sibling there that may run before the first one of queue @id. */
static bool take_early(u32 id, s32 cpu, u64 now)
{
	struct queue *q = lookup_queue(id);
	s32 pid = q && q->nr_waiting > 1 ? early_sibling(id, cpu) : 0;

	if (!pid || !run_waiting(id, pid, cpu, turn_ns(now)))
		return false;
	count_effect(MECH_GRACE);
	return true;
}

/* A task of queue @id that ran on @cpu last and stands behind the first one, which
 * did not, by no more than @near_ns; 0: none. A vCPU that moves costs a flush of
 * its TLB. */
__noinline s32 home_task(u32 id, s32 cpu, u64 near_ns)
{
	struct task_struct *p;
	u64 first_vtime = 0;
	u32 seen = 0;
	s32 pid = 0;

	bpf_for_each(scx_dsq, p, id, 0) {
		struct task_ctx *tc = lookup_task_may_fail(p);
		bool home = tc && tc->last_cpu == cpu &&
			    bpf_cpumask_test_cpu(cpu, p->cpus_ptr);

		if (!seen)
			first_vtime = p->scx.dsq_vtime;
		if (home && seen &&
		    !vtime_before(first_vtime + near_ns, p->scx.dsq_vtime))
			pid = p->pid;
		if (home || ++seen >= MOVE_TRIES)
			break;
	}
	return pid;
}

/* How far siblings in @q may be passed by one that is at home. */
static u64 home_ns(const struct queue *q)
{
	struct group *g = lookup_group(q->group);
	u64 near_ns = home_near(turn_length());
	bool bounded = g && bounds_skew(g) && skew_resume_ns < near_ns;

	return bounded ? skew_resume_ns : near_ns;
}

/* Move a task of queue @id that may run on @cpu there, for the turn that it is at @now:
 * the first one, if no other is at home there. */
__noinline int take_from(u32 id, s32 cpu, u64 now)
{
	struct task_struct *p;
	bool moved = false;
	struct queue *q;
	u32 tries = 0;
	s32 pid;

	if (is_on(MECH_GRACE) && take_early(id, cpu, now))
		return true;
	q = lookup_queue(id);
	pid = q && q->nr_waiting > 1 ? home_task(id, cpu, home_ns(q)) : 0;
	if (pid && run_waiting(id, pid, cpu, turn_ns(now)))
		return true;
	bpf_for_each(scx_dsq, p, id, 0) {
		if (bpf_cpumask_test_cpu(cpu, p->cpus_ptr)) {
			moved = move_here(BPF_FOR_EACH_ITER, p, turn_ns(now));
			if (moved)
				break;
		}
		if (++tries >= MOVE_TRIES)
			break;
	}
	return moved;
}

#endif /* COHORT_FRONT_BPF_H */
