/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Windows: turns in which the vCPUs of a VM run together. Which VM is a cohort,
 * how a window is opened on all lanes that its vCPUs wait in, how other CPUs
 * see that. Not here: the arithmetic of turns and scores (policy/cohort.h).
 *
 * Nobody is told anything, and nobody waits: all CPUs come to the end of a turn
 * by themselves, at the same tick. The first one writes down what it found, per
 * lane in one word, and the others read that instead of choosing by themselves.
 * When all waiting vCPUs of a VM have a CPU, another VM's window may be opened on
 * the lane's other CPUs in the same turn.
 */
#ifndef COHORT_WINDOW_BPF_H
#define COHORT_WINDOW_BPF_H

enum {
	MAX_COHORT_QUEUES = 64, /* of a VM, in which a window is opened */
	TURNS_FRESH_NS = 1000000000, /* turns follow ticks each second */
};

/* The id of the turn to whose end a task that starts now runs; 0: there are no
 * windows. */
static u64 turn_for_windows(u64 now)
{
	if (!is_on(MECH_COHORTS) || !is_on(MECH_TURNS))
		return 0;
	return turn_id(now, turns_ns, slice_ns, turns_halved);
}

/* How long a task that starts now may run. */
static u64 turn_ns(void)
{
	if (!is_on(MECH_TURNS))
		return slice_ns;
	count_effect(MECH_TURNS);
	return turn_left(scx_bpf_now(), turns_ns, slice_ns >> turns_halved);
}

/* A tick came, at which @waiting groups wait for @c: turns are shorter where many
 * do. At once, but longer again only each second, for the busiest CPU. */
static void follow_crowd(struct cpu_state *c, u32 waiting)
{
	u32 halvings;

	c->crowd = crowd(c->crowd, waiting);
	if (turns_crowd < c->crowd)
		turns_crowd = c->crowd;
	if (!is_on(MECH_SHORT_TURNS))
		return;
	halvings = turn_halvings(slice_ns, ready_wait_ns, c->crowd);
	if (halvings > turns_halved)
		turns_halved = halvings;
}

/* A tick came: turns follow the ticks. */
static void follow_ticks(u64 now)
{
	s64 lateness = tick_lateness(now, turns_ns, slice_ns);
	s64 least = least_lateness(turns_late_ns, lateness, slice_ns);

	/* All CPUs are here at once: they rarely have to write. */
	if (least != turns_late_ns)
		turns_late_ns = least;
	if (now - turns_set_ns <= TURNS_FRESH_NS)
		return;
	turns_set_ns = now;
	turns_ns = turn_base(turns_ns, least, lateness, slice_ns);
	turns_late_ns = slice_ns;
	turns_halved = is_on(MECH_SHORT_TURNS)
			       ? turn_halvings_after(slice_ns, ready_wait_ns,
						     turns_crowd, turns_halved)
			       : 0;
	turns_crowd = 0;
}

/* @g, a VM, used CPU time: do its vCPUs wait for each other? */
static void update_score(struct group *g)
{
	const struct group_stats *stats = &g->info.stats;
	u64 run_ns = stats->vcpu_run_ns, before_ns = g->sync_run_ns, events;
	u32 *rule;

	if (run_ns - before_ns < slice_ns ||
	    __sync_val_compare_and_swap(&g->sync_run_ns, before_ns, run_ns) !=
		    before_ns)
		return;
	events = stats->spin_exits + stats->ipis_to_ready + stats->yields_ready;
	g->sync_score = sync_score(g->sync_score, events - g->sync_events,
				   run_ns - before_ns);
	g->sync_events = events;
	g->info.sync_rate = g->sync_score / SYNC_ONE;
	rule = bpf_map_lookup_elem(&cohort_rules, &g->info.tgid);
	g->info.cohort_rule = rule ? *rule : COHORT_AUTO;
	g->info.is_cohort = is_cohort(g->info.cohort_rule, g->info.is_cohort,
				      g->sync_score);
}

/* The queue of the VM whose window, in turn @turn, @lane shows; 0: none. */
static u32 window_queue(struct lane *lane, u64 turn)
{
	u64 window = lane->window;

	return window >> QUEUE_BITS == turn ? window & (MAX_QUEUES - 1) : 0;
}

/* Show the window of queue @id, of a VM, on its lane. False if the lane shows
 * one of another VM of which vCPUs still wait. */
static bool show_window(u32 id, struct queue *q, u64 turn)
{
	struct lane *lane = lookup_lane(q->lane);
	struct queue *shown;
	u64 window;

	if (!lane)
		return false;
	window = lane->window;
	shown = lookup_queue(window_queue(lane, turn));
	if (shown && shown->group != q->group && shown->nr_waiting > 0)
		return false;
	return __sync_val_compare_and_swap(&lane->window, window,
					   turn << QUEUE_BITS | id) == window;
}

/* A vCPU of @g has been given a CPU in the window. */
static void join_window(struct group *g, struct task_ctx *tc, u64 now)
{
	u32 started, i;

	if (!g->window_turn || tc->window_turn == g->window_turn ||
	    !tc->is_vcpu || g->window_turn != turn_for_windows(now))
		return;
	tc->window_turn = g->window_turn;
	started = __sync_fetch_and_add(&g->window_started, 1) + 1;
	if (started != g->window_wanted)
		return;
	i = log2_bucket((now - g->window_at_ns) / 1000);
	if (i < NR_BUCKETS)
		__sync_fetch_and_add(&g->info.stats.window_skew[i], 1);
}

/*
 * It is the turn of group @id, at @vtime, on this CPU, by a vCPU of queue
 * @queue_id: if it is a VM, its other vCPUs follow. False if another CPU has just
 * opened a window for another VM, which is to be followed.
 */
__noinline int open_window(u32 id, u32 queue_id, u64 vtime, u64 turn)
{
	struct group *g = lookup_group(id);
	struct queue *q = lookup_queue(queue_id);
	u64 now = scx_bpf_now(), before;
	u32 i, opened, cpus = 0;
	bool partial;

	if (!g || !q || !is_vm(g) || g->nr_runnable < 2 || q->group != id ||
	    g->info.cohort_rule == COHORT_NEVER)
		return true;
	before = g->window_turn;
	if (before == turn)
		return true;
	g->window_bound =
		window_bound(vtime, fair_charge(slice_ns, group_share(g, now)));
	if (!show_window(queue_id, q, turn))
		return false;
	partial = before && g->window_started < g->window_wanted;
	g->window_at_ns = now;
	g->window_started = 0;
	if (__sync_val_compare_and_swap(&g->window_turn, before, turn) !=
	    before)
		return true;
	count_effect(MECH_COHORTS);
	count(&g->info.stats.windows);
	if (partial)
		count(&g->info.stats.windows_partial);
	opened = queue_id;
	queue_id = g->first_queue;
	bpf_for(i, 0, MAX_COHORT_QUEUES) {
		struct lane *lane;

		q = queue_id ? lookup_queue(queue_id) : NULL;
		lane = q ? lookup_lane(q->lane) : NULL;
		if (!lane)
			break;
		if (q->nr_waiting > 0 && queue_id != opened)
			show_window(queue_id, q, turn);
		if (q->nr_waiting > 0 || queue_id == opened)
			cpus += lane->nr_cpus;
		queue_id = q->next;
	}
	g->window_wanted = tasks_at_once(g, cpus);
	return true;
}

/* The VM whose window lane @lane_id shows: its queue only if somebody waits
 * there. */
static void lane_window(u32 lane_id, u64 turn, struct front *front)
{
	struct lane *lane = lookup_lane(lane_id);
	struct group *g;
	struct queue *q;
	u32 id;

	id = lane ? window_queue(lane, turn) : 0;
	q = id ? lookup_queue(id) : NULL;
	g = q ? lookup_group(q->group) : NULL;
	if (!g || throttled_by(q->group))
		return;
	front->queue = q->nr_waiting > 0 ? id : 0;
	front->group = q->group;
	front->key = g->window_bound;
	front->in_window = true;
}

#endif /* COHORT_WINDOW_BPF_H */
