/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Turns. While tasks wait for CPUs of a domain, a timer makes a plan at the begin of
 * each turn: who has which CPU. It tells the CPUs that run somebody else, and each of
 * them takes its task in its next dispatch, from where its slot points. Not here: the
 * arithmetic (policy/plan.h), what a CPU takes when (take.bpf.h).
 *
 * Nobody waits for a plan: until it is made, CPUs go on with what they run. A plan
 * looks at each CPU of its domain, and at about twice as many entities as there are
 * CPUs.
 */
#ifndef COHORT_PLAN_BPF_H
#define COHORT_PLAN_BPF_H

static u64 turn_length(const struct domain *d)
{
	return slice_ns >> (d->halvings & 7);
}

/* The CPUs that @e has in this turn of @d. */
static u64 planned_cpus(const struct entity *e, const struct domain *d)
{
	return e->turn == d->turn ? e->planned : 0;
}

/* Of these, the CPUs that do not run a task of @e. */
static u64 lacking_cpus(const struct entity *e, const struct domain *d)
{
	return planned_cpus(e, d) & ~e->running;
}

/* ---- who takes part ---- */

/* One more takes part, if there is room among the @n in their order; returns how
 * many do then. */
__noinline u32 add_entry(u32 domain_id, u32 n, const struct plan_entry *entry)
{
	struct domain *d = domain_at(domain_id);
	u32 i, at = n;

	if (!entry || n >= PLAN_ENTRIES)
		return n;
	bpf_for(i, 0, n) {
		struct plan_entry *before =
			&d->entries[(at - 1) & (PLAN_ENTRIES - 1)];

		if (!at || !vtime_before(entry->key, before->key))
			break;
		d->entries[at & (PLAN_ENTRIES - 1)] = *before;
		at--;
	}
	d->entries[at & (PLAN_ENTRIES - 1)] = *entry;
	return n + 1;
}

/* Who competes at @vtime with @share has its part in the present of @d. */
static void weigh(struct domain *d, u64 vtime, u64 share)
{
	d->lag_sum += plan_weighted(vtime, d->present, share);
	d->share_sum += plan_share(share);
}

/* The share of the waiting @p, which is bound to one CPU. */
static u64 bound_share_of(struct task_struct *p, u64 now)
{
	struct task_ctx *tc = lookup_task_may_fail(p);
	struct group *g = tc ? lookup_group(tc->group) : NULL;

	return g ? share_apart(g, now) : 0;
}

/* Where those bound to @c, of @share in all, stand among groups, if by their own clock
 * they stand at @vtime. That clock may run at another pace, as it is this CPU's only:
 * they owe no more than a group, and once they have the CPU they are owed no more. */
static u64 place_bound(const struct domain *d, struct cpu_state *c, u64 vtime,
		       u64 share)
{
	u64 lag = LAG_SLICES * fair_charge(slice_ns, share);
	u64 place = fair_settle(vtime + c->bound_offset, d->present,
				c->bound ? lag : FARTHEST_NS, lag);

	c->bound_offset = place - vtime;
	return place;
}

/* Tasks that are bound to CPU @cpu take part, if there are any: by the virtual time of
 * the first one. */
__noinline u32 add_bound(u32 domain_id, u32 n, u32 cpu, u64 now)
{
	struct plan_entry entry = { .cpus = bit_of(cpu), .width = 1 };
	struct domain *d = domain_at(domain_id);
	struct cpu_state *c = cpu_at(cpu);
	u64 vtime = 0, share = 0;
	struct task_struct *p;

	if (!c->bound && c->nr_bound <= 0)
		return n;
	/* A vCPU that rests needs its CPU if nobody else does. */
	if (only_rests(c)) {
		d->resting |= entry.cpus;
		entry.key = d->present + FARTHEST_NS;
		return add_entry(domain_id, n, &entry);
	}
	if (c->bound) {
		c->bound_served_ns = now;
		share = c->bound_share;
		vtime = bound_vtime(c, now);
	}
	/* Linux 7.2 checks what timers call as if it could sleep. */
	bpf_rcu_read_lock();
	bpf_for_each(scx_dsq, p, BOUND_QUEUE | cpu, 0) {
		u64 first = p->scx.dsq_vtime;

		if (!share || vtime_before(first, vtime))
			vtime = first;
		share += bound_share_of(p, now) * (u32)c->nr_bound;
		break;
	}
	bpf_rcu_read_unlock();
	if (!share)
		return n;
	vtime = place_bound(d, c, vtime, share);
	weigh(d, vtime, share);
	d->bound_sum += (s64)(vtime - d->present) >> PRESENT_BITS;
	d->nr_bound++;
	d->claimed |= entry.cpus;
	entry.key = plan_order(vtime, d->present,
			       ns_since(c->bound_served_ns, now), starved_ns);
	return add_entry(domain_id, n, &entry);
}

/* @e takes part in a plan of @d: how often did its vCPUs sleep in the turn that ends? If
 * it had no part in that, nothing is known of it. */
static void average_sleeps(struct entity *e, const struct domain *d)
{
	u32 sleeps = __sync_lock_test_and_set(&e->nr_sleeps, 0);

	if (e->part_turn + 1 == d->turn) {
		e->mean_sleeps = plan_average(e->mean_sleeps, sleeps);
		e->mean_running =
			plan_average(e->mean_running, cpus_in(e->running));
	}
	e->part_turn = d->turn;
}

/* Entity @id, which the caller has taken, takes part as number @n, if it has a task; it
 * is at rest else. Returns how many take part then. */
__noinline u32 add_entity(u32 domain_id, u32 n, u32 id, u64 now)
{
	struct domain *d = domain_at(domain_id);
	struct plan_entry entry = { .entity = id };
	struct entity *e = lookup_entity(id);
	struct group *g;
	u64 share, vtime;

	if (!e)
		return n;
	g = lookup_group(e->group);
	if (!g)
		return n;
	entry.width =
		cpus_in(e->running) + (e->nr_waiting > 0 ? e->nr_waiting : 0);
	if (!entry.width) {
		put_entity(id, e, g->vtime, now);
		return n;
	}
	if (is_vm(g)) {
		average_sleeps(e, d);
		/* The whole VM's, as its tasks come to a domain one by one. */
		g->mean_width = plan_average(g->mean_width, nr_together(g));
		entry.width = plan_width(entry.width, g->mean_width);
	}
	vtime = group_vtime(g, now);
	share = share_together(g, now);
	weigh(d, vtime, share);
	entry.key = plan_order(vtime, d->present, ns_since(e->served_ns, now),
			       starved_ns);
	entry.cost = fair_charge(turn_length(d), share) * entry.width;
	if (vtime_before(last_place(d), entry.key))
		d->nr_far++;
	entry.cpus = e->cpus;
	return add_entry(domain_id, n, &entry);
}

/* ---- who has which CPU ---- */

/* Of the CPUs @free of @d those that whoever may run elsewhere takes first: where a
 * vCPU rests, or is halted often, or where those that are bound have had more. */
static u64 preferred(const struct domain *d, u64 free)
{
	if (free & d->resting)
		return free & d->resting;
	if (free & d->often)
		return free & d->often;
	return free & d->spare ? free & d->spare : free;
}

/* @e, entity @id of @d, has @wanted of the CPUs @free; returns which. */
static u64 give_cpus(struct domain *d, struct entity *e, u32 id, u64 free,
		     u32 wanted)
{
	u64 had = planned_cpus(e, d), last = e->planned, given = 0;
	u32 i;

	bpf_for(i, 0, DOMAIN_CPUS) {
		u64 bit;
		struct cpu_state *c;

		if (!wanted || !free)
			break;
		bit = plan_next(preferred(d, free), e->running, last);
		c = cpu_at(cpu_with(d, bit));
		if (bit & d->resting)
			count_effect(MECH_HALTED);
		c->slot = id;
		given |= bit;
		free &= ~bit;
		wanted--;
	}
	if (!had)
		e->missed = 0;
	__sync_fetch_and_or(&e->missed, given & ~e->running);
	e->called = 0;
	e->planned = had | given;
	e->turn = d->turn;
	e->served_ns = d->planned_ns;
	return given;
}

/* Do vCPUs of @e sleep so often that they need not run together? */
static bool sleeps_often(const struct entity *e, const struct domain *d)
{
	return plan_sleeps_often(e->mean_sleeps, e->mean_running,
				 d->halvings & 7);
}

/*
 * Somebody else is to run on @c, of @cpu in @d: at once. But a vCPU of @e (NULL: it is
 * none), if its VM's sleep often, waits for one that sleeps soon as a rule, until that
 * does or has had a moment. Where all interrupt each other, each switch is paid for
 * twice.
 */
static void pass_on(struct cpu_state *c, s32 cpu, const struct entity *e,
		    const struct domain *d, u64 now)
{
	u64 ran_ns = ns_since(c->run_at_ns, now);
	u64 moment_ns = wake_loan_ns(slice_ns);

	if (e && c->sleeps_soon && !c->lent_pid && ran_ns < moment_ns &&
	    sleeps_often(e, d) && look_again(c, cpu, moment_ns - ran_ns, now))
		return;
	resched(c, cpu, now);
}

/* Do tasks of @e, of @g, have their turns in @d together? If not, they get CPUs one by
 * one. */
static bool is_cohort(const struct entity *e, const struct group *g,
		      const struct domain *d)
{
	return is_on(MECH_COHORTS) && g->info.cohort_rule != COHORT_NEVER &&
	       !sleeps_often(e, d);
}

/* @e, of @g, is about to have CPUs in a new turn of @d: how was its last one? */
static void count_turn(const struct entity *e, struct group *g, u32 width)
{
	if (width < 2 || !is_vm(g))
		return;
	count(&g->info.stats.turns);
	if (e->missed)
		count(&g->info.stats.turns_partial);
}

/* Entry @i of the plan has CPUs of @free; returns those that are left. In the
 * @first_pass those are left out for whom there are too few. */
__noinline u64 serve_entry(u32 domain_id, u32 i, u64 free, bool first_pass)
{
	struct domain *d = domain_at(domain_id);
	struct plan_entry *entry;
	struct entity *e;
	struct group *g;
	u64 own, given;
	bool together;
	u32 wanted;

	entry = &d->entries[i & (PLAN_ENTRIES - 1)];
	own = free & entry->cpus;
	if (!entry->width || !own ||
	    (first_pass && !plan_passes(entry->key, entry->cost, d->out_vtime)))
		return free;
	if (!entry->entity) {
		cpu_at(cpu_with(d, own))->slot = SLOT_BOUND;
		entry->width = 0;
		/* Another domain's tasks may have it. */
		return own & d->resting ? free : free & ~own;
	}
	e = lookup_entity(entry->entity);
	g = e ? lookup_group(e->group) : NULL;
	if (!g)
		return free;
	own = patient_cpus(e, d, g, own, entry->width);
	if (!own)
		return free;
	together = is_cohort(e, g, d);
	wanted = together ? entry->width : 1;
	if (first_pass && is_on(MECH_PACKING) && e->patient != d->turn &&
	    plan_leaves_out(cpus_in(own), wanted, i == 0)) {
		count_effect(MECH_PACKING);
		/* In their order: of several the first one counts. */
		if (vtime_before(entry->key, d->out_vtime))
			d->out_vtime = entry->key;
		return free;
	}
	if (together && e->turn != d->turn)
		count_turn(e, g, entry->width);
	given = give_cpus(d, e, entry->entity, own, wanted);
	entry->width -= cpus_in(given);
	d->served_vtime = entry->key;
	d->served_cpu = lowest_cpu(given);
	return free & ~given;
}

/* The first @n entries have the CPUs of domain @domain_id, in their order. */
__noinline u64 serve_entries(u32 domain_id, u32 n, u64 free)
{
	u32 pass, i;

	bpf_for(pass, 0, 2 + DOMAIN_CPUS) {
		u64 before = free;

		bpf_for(i, 0, n) {
			if (!free)
				break;
			free = serve_entry(domain_id, i, free, pass == 0);
		}
		/* Without cohorts each pass gives everybody one CPU more. */
		if (!free || (pass && free == before))
			break;
	}
	return free;
}

/* ---- before and after ---- */

/* Of the @n entries of bound tasks, those that have had more than the mean: their CPUs
 * are given to others first. So of tasks that are bound to a CPU each, none loses more
 * than another. */
static void find_spare(struct domain *d, u32 n)
{
	u64 mean;
	u32 i;

	d->spare = 0;
	if (!d->nr_bound)
		return;
	mean = d->present +
	       (d->bound_sum / (s64)d->nr_bound) * (1 << PRESENT_BITS);
	bpf_for(i, 0, n) {
		struct plan_entry *entry = &d->entries[i & (PLAN_ENTRIES - 1)];

		if (!vtime_before(entry->key, mean))
			d->spare |= entry->cpus;
	}
	d->spare |= d->cpus & ~d->claimed;
}

/* CPU @cpu is offline, and takes nothing from queues any more: the kernel brings those
 * that are bound to it elsewhere, once they are in its own queue. */
__noinline int release_bound(u32 cpu)
{
	struct task_struct *p;

	/* Linux 7.2 checks what timers call as if it could sleep. */
	bpf_rcu_read_lock();
	bpf_for_each(scx_dsq, p, BOUND_QUEUE | cpu, 0)
		scx_bpf_dsq_move(BPF_FOR_EACH_ITER, p, SCX_DSQ_LOCAL_ON | cpu,
				 0);
	bpf_rcu_read_unlock();
	return 0;
}

/* What each CPU of domain @domain_id had to do is over; returns how many entries those
 * bound to them make. */
__noinline u32 begin_plan(u32 domain_id, u64 now)
{
	struct domain *d = domain_at(domain_id);
	u32 i, n = 0;

	d->lag_sum = 0;
	d->share_sum = 0;
	d->nr_far = 0;
	d->resting = 0;
	d->claimed = 0;
	d->bound_sum = 0;
	d->nr_bound = 0;
	d->out_vtime = d->present + (1ULL << 62);
	bpf_for(i, 0, d->nr_cpus) {
		u32 cpu = d->cpu[i & (DOMAIN_CPUS - 1)];
		struct cpu_state *c = cpu_at(cpu);

		c->slot = 0;
		c->pull_from = 0;
		if (c->nr_bound > 0 && !(d->cpus & bit_of(cpu)))
			release_bound(cpu);
		n = add_bound(domain_id, n, cpu, now);
	}
	find_spare(d, n);
	return n;
}

/* Do tasks wait for whom @c is by @slot, whose entity is @e? */
static bool slot_waits(const struct cpu_state *c, u32 slot,
		       const struct entity *e)
{
	return (e ? e->nr_waiting : slot ? c->nr_bound : 0) > 0;
}

/* And does one of them run there? */
static bool slot_runs(const struct cpu_state *c, u32 slot,
		      const struct entity *e)
{
	return e ? c->entity == slot : slot && c->bound;
}

/* The plan of domain @domain_id is made: its CPUs follow it. */
__noinline int follow_plan(u32 domain_id, u64 now)
{
	struct domain *d = domain_at(domain_id);
	u32 i;

	d->nr_kept = 0;
	bpf_for(i, 0, d->nr_cpus) {
		u32 cpu = d->cpu[i & (DOMAIN_CPUS - 1)];
		struct cpu_state *c = cpu_at(cpu);
		struct entity *e = entity_in_slot(c->slot);

		if (has_to_look(c, now))
			look_at_resting(c, cpu);
		else if (c->pull_from)
			resched(c, cpu, now);
		else if (c->slot && (!slot_runs(c, c->slot, e) ||
				     slot_waits(c, c->slot, e)))
			pass_on(c, cpu, e, d, now);
		else if (c->slot)
			d->nr_kept++;
	}
	return 0;
}

/* Group @id has all the CPUs of @d that it can use: it is owed no more than a bound.
 * Who has not keeps all that it is owed. The present does not count here: if all that
 * take part come from other domains, they may be far behind it. */
static void bound_credit(const struct domain *d, u32 id, u64 now)
{
	struct group *g = lookup_group(id);
	u64 vtime, least;

	if (!g)
		return;
	vtime = group_vtime(g, now);
	least = d->mean - most_lag(g, slice_cost(g, now));
	if (vtime_before(vtime, least))
		__sync_fetch_and_add(&g->vtime, least - vtime);
}

/* Back into the tree with those that took part, and notes who was left out. */
__noinline int end_plan(u32 domain_id, u32 n, u64 now)
{
	struct domain *d = domain_at(domain_id);
	bool left = false;
	u32 i;

	bpf_for(i, 0, n) {
		struct plan_entry *entry = &d->entries[i & (PLAN_ENTRIES - 1)];
		struct entity *e;

		if (!entry->entity)
			continue;
		e = lookup_entity(entry->entity);
		if (!e)
			break;
		if (entry->width && !left) {
			left = true;
			d->left_vtime = entry->key;
			d->left_group = e->group;
		}
		if (!entry->width || planned_cpus(e, d) == (e->cpus & d->cpus))
			bound_credit(d, e->group, now);
		put_entity(entry->entity, e, entry->key, now);
	}
	if (d->is_short != left) {
		d->is_short = left;
		__sync_fetch_and_add(&nr_short, left ? 1 : -1);
	}
	return 0;
}

/* How long turns of @d are: shorter where many wait. */
static void set_turn_length(struct domain *d)
{
	u64 rounds = turn_rounds(d->nr_waiting > 0 ? d->nr_waiting : 0,
				 cpus_in(d->cpus), d->nr_kept);
	u32 before = d->halvings;

	d->halvings = is_on(MECH_SHORT_TURNS)
			      ? turn_halvings_after(slice_ns, ready_wait_ns,
						    rounds, before)
			      : 0;
	if (d->halvings)
		count_effect(MECH_SHORT_TURNS);
}

/* Entities that could have a CPU take part in the turn; returns how many do now. */
__noinline u32 gather_entities(u32 domain_id, u32 n, u64 now)
{
	struct domain *d = domain_at(domain_id);
	u32 i, id, wanted;

	wanted = 2 * cpus_in(d->cpus) + n;
	bpf_for(i, 0, 2 * PLAN_ENTRIES) {
		if (n >= wanted + d->nr_far || n >= PLAN_ENTRIES)
			break;
		id = take_entity(domain_id);
		if (!id)
			break;
		n = add_entity(domain_id, n, id, now);
	}
	d->mean = plan_mean(d->present, d->lag_sum, d->share_sum);
	d->present = plan_present(d->present, d->mean);
	if (vtime_before(host_present, d->present))
		host_present = d->present;
	return n;
}

/* ---- when ---- */

/* The turn of @d, which goes on at @now, is timed, unless no timer can be started. */
static bool time_turn(const struct domain *d, u64 now)
{
	return start_timer(lookup_turn_timer(d->id),
			   turn_left(now, turn_length(d)), 0);
}

/* The turns of @d are not timed any more. Once, as plan_here() may start a timer too. */
static void stop_turns(struct domain *d)
{
	if (__sync_lock_test_and_set(&d->crowded, 0))
		__sync_fetch_and_sub(&nr_crowded, 1);
}

/*
 * A task runs on @c, of @cpu in @d, instead of a vCPU that rests. Plans are made there
 * from now on, not where a vCPU works: the timer is its who starts it.
 */
static void plan_here(struct domain *d, const struct cpu_state *c, s32 cpu,
		      u64 now)
{
	if (!d->crowded || !c->resting_pid || c->rests ||
	    (domain_of(d->timed_on) == domain_of(cpu) &&
	     d->resting & bit_of(d->timed_on)))
		return;
	d->timed_on = cpu;
	time_turn(d, now);
}

/* Tasks wait in @d: its turns are timed, or who waits next tries again. */
static void begin_turns(struct domain *d, u64 now)
{
	if (d->crowded || __sync_val_compare_and_swap(&d->crowded, 0, 1))
		return;
	__sync_fetch_and_add(&nr_crowded, 1);
	/* It stood still while nobody waited here. */
	if (vtime_before(d->present, host_present))
		d->present = host_present;
	if (!time_turn(d, now))
		stop_turns(d);
}

/* ---- other domains ---- */

/*
 * Is the group that domain @from left out to have CPUs of @d instead? Virtual time is
 * common to all domains, so it tells which of two is the more crowded one.
 */
static bool is_worth_moving(const struct domain *d, const struct domain *from,
			    struct group *g, u64 now)
{
	u64 margin = balance_margin(slice_cost(g, now), tasks_at_once(g),
				    distance_between(d->cpu[0], from->cpu[0]));
	return vtime_before(from->left_vtime + margin, d->served_vtime);
}

/* The group @g that domain @from left out comes to @d: a VM as a whole, when its tasks
 * begin to wait the next time; of another group one task now. */
static void move_here_from(struct domain *d, u32 from, struct group *g,
			   u64 free)
{
	s32 cpu;

	d->moved_turn = d->turn;
	if (g->home) {
		set_home(g, g->home, d->id + 1);
		count(&host_stats.stolen);
		return;
	}
	cpu = cpu_with(d, free ? lowest_cpu(free) : d->served_cpu);
	cpu_at(cpu)->pull_from = from + 1;
}

/* CPUs of domain @domain_id that tasks of group @group_id may use, as far as that is
 * known. */
static u64 usable_cpus(u32 group_id, u32 domain_id)
{
	u32 id = known_entity(group_id, domain_id);
	struct entity *e = id ? lookup_entity(id) : NULL;

	return e && e->cpus ? e->cpus : ~0ULL;
}

/* The turn of domain @domain_id leaves the CPUs @free to nobody. Once per turn it looks
 * into another one: is somebody to come from there? Or is that to look here? A VM moves
 * as a whole, so what is free has to be enough for all of it. */
__noinline int look_far(u32 domain_id, u64 free, u64 now)
{
	struct domain *d = domain_at(domain_id), *from;
	struct group *g;
	bool idle;

	if (nr_domains < 2 || !nr_short)
		return 0;
	d->far = next_domain(d->far);
	if (d->far == domain_id)
		d->far = next_domain(d->far);
	from = domain_at(d->far);
	if (d->is_short)
		begin_turns(from, now);
	if (!from->is_short || d->turn - d->moved_turn < BALANCE_TURNS)
		return 0;
	g = lookup_group(from->left_group);
	/* One whose home is here already waits there, as it may not run here. */
	if (!g || g->home == domain_id + 1)
		return 0;
	free &= usable_cpus(from->left_group, domain_id);
	idle = cpus_in(free) >= (g->home ? plan_rule(g->mean_width) : 1);
	if (idle || is_worth_moving(d, from, g, now))
		move_here_from(d, d->far, g, free);
	return 0;
}

/* Make the plan of @d for the turn that begins at @now. */
static void make_plan(struct domain *d, u64 now)
{
	u32 id = d->id, n;
	u64 free;

	set_turn_length(d);
	d->turn++;
	d->planned_ns = now;
	n = begin_plan(id, now);
	n = gather_entities(id, n, now);
	free = serve_entries(id, n, d->cpus);
	d->nr_entries = n;
	end_plan(id, n, now);
	look_far(id, free, now);
	follow_plan(id, now);
}

/* Nobody competes for the CPUs of @d any more: they are nobody's. */
static void drop_plan(struct domain *d, u64 now)
{
	d->turn++;
	d->nr_entries = 0;
	d->halvings = 0;
	d->nr_kept = 0;
	begin_plan(d->id, now);
}

static int turn_ends(void *map, u32 *key, struct timer *timer)
{
	struct domain *d = domain_at(*key);
	u64 now = bpf_ktime_get_ns();

	d->timed_on = bpf_get_smp_processor_id();
	/* Somebody waits here, or is left out in another domain and may come. */
	if (d->nr_waiting > 0 || nr_short) {
		make_plan(d, now);
		if (time_turn(d, now))
			return 0;
	} else {
		drop_plan(d, now);
	}
	stop_turns(d);
	/* Who comes to wait counts first, and looks at this then. */
	if (d->nr_waiting > 0)
		begin_turns(d, now);
	return 0;
}

#endif /* COHORT_PLAN_BPF_H */
