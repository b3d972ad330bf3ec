/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Windows: turns in which the vCPUs of a VM run together. Which VM is a cohort,
 * how a window is opened on all lanes that its vCPUs wait in, how other CPUs
 * see that. Not here: the arithmetic of turns and scores (policy/cohort.h).
 *
 * Nobody waits: all CPUs come to the end of a turn by themselves, at the same
 * tick. The first one writes down what it found, per lane in one word, and the
 * others read that instead of choosing by themselves. Only who fills in for a
 * moment is told when a vCPU of the window's wants its CPU.
 * When all waiting vCPUs of a VM have a CPU, another VM's window may be opened on
 * the lane's other CPUs in the same turn.
 */
#ifndef COHORT_WINDOW_BPF_H
#define COHORT_WINDOW_BPF_H

enum {
	MAX_COHORT_QUEUES = 64, /* of a VM, in which a window is opened */
	WINDOW_TRIES = 8, /* to count a CPU in while others do */
	TURNS_FRESH_NS = 1000000000, /* turns follow ticks each second */
	TURNS_STALE_NS = 2000000000, /* if nobody's meet them, anybody's */
};

/* The id of the turn to whose end a task that starts now runs; 0: there are no
 * windows. */
static u64 turn_for_windows(u64 now)
{
	if (!is_on(MECH_COHORTS) || !is_on(MECH_TURNS))
		return 0;
	return turn_id(now, turns_ns, slice_ns, turns_halved);
}

/* How long a turn is at present, ns. */
static u64 turn_length(void)
{
	return is_on(MECH_TURNS) ? slice_ns >> turns_halved : slice_ns;
}

/* How long a task that starts at @now may run. Whoever decides for a turn asks with the
 * @now by which it is that turn: a moment later it may be the next one's. */
static u64 turn_ns(u64 now)
{
	if (!is_on(MECH_TURNS))
		return slice_ns;
	count_effect(MECH_TURNS);
	return turn_left(now, turns_ns, turn_length());
}

/* A tick came, at which the last group that waits for @c has @turns (times CROWD_ONE)
 * of others before it: turns are shorter where these are many. At once, but longer
 * again only each second, for the most crowded CPU. */
static void follow_crowd(struct cpu_state *c, u32 turns)
{
	u32 halvings;

	c->crowd = crowd(c->crowd, turns);
	if (turns_crowd < c->crowd)
		turns_crowd = c->crowd;
	if (!is_on(MECH_SHORT_TURNS))
		return;
	halvings = turn_halvings(slice_ns, ready_wait_ns, c->crowd);
	if (halvings > turns_halved)
		turns_halved = halvings;
}

/* A tick came with @lateness: do those of @c end turns? Counted anew with each move
 * of turns. */
static void judge_ticks(struct cpu_state *c, s64 lateness)
{
	if (c->ticks_since_ns != turns_set_ns) {
		c->ticks_since_ns = turns_set_ns;
		c->ticks_near = 0;
		c->ticks_far = 0;
	}
	if (tick_is_near(lateness, tick_ns))
		c->ticks_near++;
	else
		c->ticks_far++;
	c->ticks_miss =
		ticks_miss_turns(c->ticks_near, c->ticks_far, c->ticks_miss);
}

/* A tick came: turns follow the ticks of most CPUs. On the others, and on all where
 * ticks and turns are not of a length, an alarm ends turns (watch_slice()). */
static void follow_ticks(struct cpu_state *c, u64 now)
{
	bool meet = ticks_meet_turns(slice_ns, tick_ns);
	s64 lateness = tick_lateness(now, turns_ns, tick_ns);
	s64 least = least_lateness(turns_late_ns, lateness, tick_ns);
	u64 set_ns = turns_set_ns;
	/* Set at this very tick, by a CPU that read its clock later. */
	u64 age_ns = vtime_before(now, set_ns) ? 0 : now - set_ns;
	bool early =
		meet && age_ns > slice_ns && tick_is_early(lateness, tick_ns);

	judge_ticks(c, lateness);
	if (!early && age_ns <= (meet && c->ticks_miss ? TURNS_STALE_NS
						       : TURNS_FRESH_NS)) {
		/* All CPUs are here at once: they rarely have to write. */
		if (least != turns_late_ns)
			turns_late_ns = least;
		return;
	}
	/* Nor must more than one move them: moved twice, turns would be as far off
	 * as before, and the crowd would be gone. */
	if (__sync_val_compare_and_swap(&turns_set_ns, set_ns, now) != set_ns)
		return;
	if (meet)
		turns_ns = turn_base(turns_ns, least, lateness, tick_ns,
				     c->ticks_miss);
	tick_ns =
		tick_period(now - loaded_ns, bpf_jiffies64() - loaded_jiffies);
	turns_late_ns = tick_ns;
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

/* The id of the turn in which @g had its last window. */
static u64 window_turn(const struct group *g)
{
	return g->window >> WINDOW_BITS;
}

/* How many CPUs @counted holds, if it is of @turn. */
static u32 cpus_in(u64 counted, u64 turn)
{
	return counted >> WINDOW_BITS == turn ? counted & (WINDOW_CPUS - 1) : 0;
}

/* How many CPUs serve @g in that window, those that ran a vCPU before it opened
 * included. */
static u32 window_cpus(const struct group *g)
{
	u64 turn = window_turn(g);

	return cpus_in(g->window, turn) + cpus_in(g->early, turn);
}

/* How many CPUs the vCPUs of @g could use when that window began; until whoever opened it
 * has counted them, more than there are. */
static u32 window_wanted(const struct group *g)
{
	u64 wanted = g->window_wanted;

	return wanted >> WINDOW_BITS == window_turn(g)
		       ? wanted & (WINDOW_CPUS - 1)
		       : WINDOW_CPUS;
}

/* Has @g a window in @turn, and not all CPUs yet that its vCPUs could use? */
static bool window_wants(const struct group *g, u64 turn)
{
	u32 cpus = window_cpus(g);

	return window_turn(g) == turn && cpus < window_wanted(g) &&
	       cpus < g->nr_runnable;
}

/* One CPU more, or (@change -1) less, serves in @turn, if @counted is of that. */
static void window_count(u64 *counted, u64 turn, s32 change)
{
	u32 i;

	bpf_for(i, 0, WINDOW_TRIES) {
		u64 before = *counted;

		if (before >> WINDOW_BITS != turn ||
		    __sync_val_compare_and_swap(counted, before,
						before + change) == before)
			return;
	}
}

/* One CPU more serves in @turn, if it is the first one @counted is of another. */
static void window_count_in(u64 *counted, u64 turn)
{
	u64 before = *counted, first = turn << WINDOW_BITS | 1;

	if (before >> WINDOW_BITS == turn ||
	    __sync_val_compare_and_swap(counted, before, first) != before)
		window_count(counted, turn, 1);
}

/* How many vCPUs of @g, or tasks of it, want to run at once on @lane. */
static u32 window_width(const struct group *g, const struct lane *lane)
{
	return is_vm(g) && g->info.cohort_rule != COHORT_NEVER
		       ? tasks_at_once(g, lane->nr_cpus)
		       : 1;
}

/* How many CPUs @c, which is to choose, finds left for one more window of @turn on
 * @lane, itself included. */
static u32 cpus_left(const struct cpu_state *c, struct lane *lane, u64 turn)
{
	struct queue *shown = lookup_queue(window_queue(lane, turn));
	struct group *g = shown ? lookup_group(shown->group) : NULL;
	u32 served = cpus_in(lane->serving, turn);
	u32 awaited = 0;

	if (g && window_wants(g, turn))
		awaited = tasks_at_once(g, window_wanted(g)) - window_cpus(g);
	if (g)
		served += cpus_in(g->early, turn);
	if (served && c->window_turn == turn &&
	    (c->window_open || (g && c->window_group == shown->group)))
		served--;
	return window_left(lane->nr_cpus, served, awaited);
}

/* @c serves no window any more. */
static void leave_window(struct cpu_state *c)
{
	struct group *g =
		c->window_group ? lookup_group(c->window_group) : NULL;
	struct lane *lane;

	c->window_group = 0;
	if (!g)
		return;
	if (!c->window_open) {
		window_count(&g->early, c->window_turn, -1);
		return;
	}
	window_count(&g->window, c->window_turn, -1);
	lane = lookup_lane(c->window_lane);
	if (lane)
		window_count(&lane->serving, c->window_turn, -1);
}

/* @c runs @tc, a task of @g, from @now on: it serves that one's window, or if it is
 * a VM that has none in this turn yet, is early for it; and no other. */
static void serve_window(struct cpu_state *c, struct task_ctx *tc,
			 struct group *g, u64 now)
{
	u64 turn = turn_for_windows(now);
	bool open = window_turn(g) == turn;
	u32 id = turn && is_vm(g) ? tc->group : 0;
	struct lane *lane;

	if (c->window_group == id && c->window_turn == turn &&
	    c->window_open == open)
		return;
	leave_window(c);
	c->window_group = id;
	c->window_turn = turn;
	c->window_open = open;
	/* Not that of this CPU alone, in which it waits if it may not leave. */
	c->window_lane = tc->lane;
	if (!id)
		return;
	if (!open) {
		window_count_in(&g->early, turn);
		return;
	}
	lane = lookup_lane(c->window_lane);
	if (lane)
		window_count_in(&lane->serving, turn);
	window_count(&g->window, turn, 1);
	if (window_cpus(g) < window_wanted(g) || g->window_full == turn)
		return;
	g->window_full = turn;
	/* Who opened it may have read its clock later. */
	count_time(g->info.stats.window_skew, vtime_before(now, g->window_at_ns)
						      ? 0
						      : now - g->window_at_ns);
}

/* How many CPUs the window of @g, group @id, misses in @turn of those that its vCPUs
 * could use when it began, @c, which is to choose, being none of it. Some of them may
 * sleep since. */
static u32 window_misses(const struct group *g, u32 id,
			 const struct cpu_state *c, u64 turn)
{
	u32 cpus = window_cpus(g), wanted = window_wanted(g);

	if (window_turn(g) != turn)
		return 0;
	if (cpus && c->window_group == id && c->window_turn == turn)
		cpus--;
	return cpus < wanted ? wanted - cpus : 0;
}

/* The queue of the VM whose window, in @turn, @lane shows, if that is another one than
 * group @id; else NULL. */
static struct queue *others_window(struct lane *lane, u32 id, u64 turn)
{
	struct queue *shown = lookup_queue(window_queue(lane, turn));

	return shown && shown->group != id ? shown : NULL;
}

/*
 * Does @c only fill in for the VM whose window @lane shows, if @g, group @id, comes?
 * That one's vCPUs are on their way, or sleep and may wake before the turn ends.
 */
static __always_inline bool fills_in(const struct cpu_state *c,
				     struct lane *lane, u32 id,
				     const struct group *g, u64 turn)
{
	struct queue *shown = others_window(lane, id, turn);
	struct group *other;

	if (!shown || shown->nr_waiting > 0)
		return false;
	other = lookup_group(shown->group);
	return other &&
	       (window_wants(other, turn) ||
		window_fills(window_misses(other, shown->group, c, turn),
			     cpus_left(c, lane, turn), window_width(g, lane)));
}

/* The lane that shows the windows which concern @c, when it is to choose a task that waits
 * in lane @lane_id: of the one that it served in @turn. A vCPU that was preempted inside
 * a hook waits in a lane of its CPU's own, which shows no window that others have: then
 * that to which the last task here belonged. */
static u32 lane_of_windows(const struct cpu_state *c, u32 lane_id, u64 turn)
{
	bool serves = c->window_group && c->window_turn == turn;

	return serves || is_own_lane(lane_id) ? c->window_lane : lane_id;
}

/* Group @id, @g, comes on @c, of @cpu: if it only fills in there for the VM whose window
 * lane @lane_id shows, it can be called away. */
static __always_inline bool becomes_filler(const struct cpu_state *c, s32 cpu,
					   u32 lane_id, u32 id,
					   const struct group *g, u64 turn)
{
	struct lane *lane = lookup_lane(lane_id);

	if (!lane || !fills_in(c, lane, id, g, turn))
		return false;
	lane->filler = turn << WINDOW_BITS | cpu;
	return true;
}

/* Show the window of queue @id, of a VM, on its lane; false if that shows another VM's
 * already, of which vCPUs wait or are about to. */
static bool show_window(u32 id, struct queue *q, u64 turn)
{
	struct lane *lane = lookup_lane(q->lane);
	struct queue *shown;
	struct group *other;
	u64 window;

	if (!lane)
		return false;
	window = lane->window;
	shown = others_window(lane, q->group, turn);
	if (shown) {
		other = lookup_group(shown->group);
		if (shown->nr_waiting > 0 ||
		    (other && window_wants(other, turn)))
			return false;
	}
	return __sync_val_compare_and_swap(&lane->window, window,
					   turn << QUEUE_BITS | id) == window;
}

/* A vCPU of @g begins to wait in lane @lane_id: the CPU that fills in for it, in the
 * VM's window, is its. Is there one? */
static bool call_filler(struct group *g, u32 lane_id, u64 now)
{
	struct lane *lane = lookup_lane(lane_id);
	u64 filler = lane ? lane->filler : 0, turn = filler >> WINDOW_BITS;
	s32 cpu = filler & (WINDOW_CPUS - 1);
	struct cpu_state *c;

	if (!filler || !window_wants(g, turn) ||
	    turn != turn_for_windows(now) ||
	    __sync_val_compare_and_swap(&lane->filler, filler, 0) != filler)
		return false;
	c = lookup_cpu(cpu);
	if (c)
		c->called_turn = turn;
	scx_bpf_kick_cpu(cpu, SCX_KICK_PREEMPT);
	return true;
}

/* Was @c, which is to choose, called into another VM's window in @turn? Then nobody of
 * the VM that filled in goes on there without a look at who waits, now or later. */
static bool gives_way(struct cpu_state *c, u64 turn)
{
	c->gave_way = turn && c->called_turn == turn;
	c->called_turn = 0;
	return c->gave_way;
}

/*
 * It is the turn of group @id, at @vtime, on this CPU, by a vCPU of queue
 * @queue_id: if it is a VM, its other vCPUs follow. False if another CPU has just
 * opened a window for another VM, which is to be followed.
 */
__noinline int open_window(u32 id, u32 queue_id, u64 vtime, u64 turn)
{
	s32 cpu = bpf_get_smp_processor_id();
	struct cpu_state *c = lookup_cpu(cpu);
	struct group *g = lookup_group(id);
	struct queue *q = lookup_queue(queue_id);
	u64 now = scx_bpf_now(), before;
	u32 i, lane_id, home, opened, left, cpus = 0;
	bool partial, narrow, own;
	struct lane *lane;

	if (!c || !g || !q || !is_vm(g) || q->group != id)
		return true;
	before = g->window;
	if (before >> WINDOW_BITS == turn)
		return true;
	lane_id = lane_of_windows(c, q->lane, turn);
	if (becomes_filler(c, cpu, lane_id, id, g, turn))
		return true;
	if (g->nr_runnable < 2 || g->info.cohort_rule == COHORT_NEVER)
		return true;
	/* Its siblings come from the lane that they belong to. */
	home = known_queue(id, lane_id);
	queue_id = home ? home : queue_id;
	q = lookup_queue(queue_id);
	lane = q ? lookup_lane(q->lane) : NULL;
	if (!lane)
		return true;
	own = is_own_lane(q->lane);
	left = cpus_left(c, lane, turn);
	narrow = left < window_width(g, lane);
	g->window_bound =
		window_bound(vtime, fair_charge(slice_ns, group_share(g, now)));
	if (!show_window(queue_id, q, turn))
		return false;
	partial = before && g->window_full != before >> WINDOW_BITS;
	g->window_at_ns = now;
	if (__sync_val_compare_and_swap(&g->window, before,
					turn << WINDOW_BITS) != before)
		return true;
	count_effect(MECH_COHORTS);
	count(&g->info.stats.windows);
	if (partial)
		count(&g->info.stats.windows_partial);
	if (narrow)
		count(&g->info.stats.windows_narrow);
	opened = queue_id;
	queue_id = g->first_queue;
	bpf_for(i, 0, MAX_COHORT_QUEUES) {
		q = queue_id ? lookup_queue(queue_id) : NULL;
		lane = q ? lookup_lane(q->lane) : NULL;
		if (!lane)
			break;
		if (queue_id == opened) {
			cpus += left;
		} else if (q->nr_waiting > 0) {
			show_window(queue_id, q, turn);
			if (is_own_lane(q->lane) == own)
				cpus += lane->nr_cpus; /* else inside a hook */
		}
		queue_id = q->next;
	}
	cpus = tasks_at_once(g, cpus);
	g->window_wanted = turn << WINDOW_BITS | (cpus & (WINDOW_CPUS - 1));
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
