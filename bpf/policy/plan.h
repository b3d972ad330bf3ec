/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The plan of a domain: which group's tasks have which of its CPUs in the next
 * turn. Pure functions. Not here: when a plan is made and how CPUs follow it
 * (plan.bpf.h).
 *
 * Groups come in the order of their virtual time. Each gets as many CPUs as it
 * has tasks that want to run, so a VM's vCPUs run side by side. Sets of CPUs are
 * words, with a bit for each CPU of the domain.
 *
 * Example: 8 CPUs; A wants 8 of them, B 4, C 4. If A stands first, it has the turn
 * alone. If B stands first, it has its four. Too few are left for A, so it waits,
 * and C has the others. The next time A stands first.
 */
#ifndef COHORT_POLICY_PLAN_H
#define COHORT_POLICY_PLAN_H

#include "fair.h"

#define FARTHEST_NS \
	(1ULL << 36) /* of virtual time: nobody is farther from the present */

enum plan_consts {
	TURN_HALVINGS = 2, /* a turn is at least a quarter of a slice */
	ROUND_ONE = 256, /* of numbers of turns */
	WIDTH_ONE = 64, /* of means of numbers of CPUs, and the like */
	WIDTH_TURNS =
		8, /* over which the mean is taken; docs/design.md has figures */
	/* Of vCPUs that sleep often, for each CPU that they have. Where three VMs meet
	 * asleep, they do 3 % more so if they work for 100 us in between, 0.7 % at 200 us,
	 * and as much at 400 us. */
	SLEEPS_PER_SLICE = 6,
	SLEEP_SLICES = 4, /* that sleep earns: so it comes before who waited */
	LAG_SLICES =
		8, /* that a group may be behind, and ahead, by what they cost */
	PRESENT_BITS = 8, /* lowest bits that means leave out */
	/* Ticks come at multiples of a millisecond: whom one wakes would have a CPU in
	 * the plan, for a turn. Five VMs then waited for 28 ms at most, 22 else. */
	TURN_AFTER_TICK_NS = 250000,
};

static inline u32 cpus_in(u64 cpus)
{
	return __builtin_popcountll(cpus);
}

static inline u64 lowest_cpu(u64 cpus)
{
	return cpus & -cpus;
}

/* Of @cpus the next one behind @cpu, and behind the highest the lowest. */
static inline u64 next_cpu(u64 cpus, u64 cpu)
{
	u64 above = cpus & ~(cpu | (cpu - 1));

	return lowest_cpu(above ? above : cpus);
}

/* The next one of the CPUs @free that a group gets: of those in @best first, then of
 * those in @good. */
static inline u64 plan_next(u64 free, u64 best, u64 good)
{
	if (free & best)
		return lowest_cpu(free & best);
	return lowest_cpu(free & good ? free & good : free);
}

/* The mean (times WIDTH_ONE) over some WIDTH_TURNS turns of a number, which is @count
 * in this one; 0: not known. */
static inline u32 plan_average(u32 mean, u32 count)
{
	u32 now = count * WIDTH_ONE;

	return mean ? mean + (s32)(now - mean) / WIDTH_TURNS : now;
}

/* Do vCPUs sleep so often that they need not run together? They fell asleep @sleeps
 * times in a turn, a slice that was halved @halvings times, and ran on @running CPUs;
 * both are means. */
static inline bool plan_sleeps_often(u32 sleeps, u32 running, u32 halvings)
{
	return (u64)sleeps << halvings > (u64)running * SLEEPS_PER_SLICE;
}

/* How many CPUs a VM wants as a rule whose @mean this is; at least 1. */
static inline u32 plan_rule(u32 mean)
{
	u32 rule = (mean + WIDTH_ONE / 2) / WIDTH_ONE;

	return rule ? rule : 1;
}

/*
 * How many CPUs a VM is to have that wants @width, and @mean as a rule. Where one vCPU
 * wakes another and halts then, both want a CPU for a moment, and one is enough: they
 * pass it on to each other, and need no second one that is another VM's meanwhile.
 */
static inline u32 plan_width(u32 width, u32 mean)
{
	u32 rule = plan_rule(mean);

	return width < rule ? width : rule;
}

/* Is a group that wants @width CPUs left out for now, as only @left are left that it
 * may use? Whoever stands first (@first) never is. */
static inline bool plan_leaves_out(u32 left, u32 width, bool first)
{
	return !first && left < width;
}

/*
 * May a group at @vtime, which fits, come before one that was left out at @left_vtime?
 * Only if it is ahead of that one by no more than @cost, which a turn costs it: so
 * packing takes no more than a turn from anybody.
 */
static inline bool plan_passes(u64 vtime, u64 cost, u64 left_vtime)
{
	return !vtime_before(left_vtime + cost, vtime);
}

/*
 * Where a group comes that stands at @vtime and has had no turn for @waited_ns: there,
 * or before all others if that is longer than @starved_ns. By weight alone a VM of
 * weight 1 beside one of 10,000 would wait for 20 s after each turn.
 */
static inline u64 plan_order(u64 vtime, u64 present, u64 waited_ns,
			     u64 starved_ns)
{
	return waited_ns < starved_ns ? vtime : present - FARTHEST_NS;
}

/*
 * How many turns of others (times ROUND_ONE) each of @waiting tasks waits for, on @cpus
 * CPUs. On @kept of these CPUs a task went on from the last turn: they are not passed on,
 * so the others come to those that are left. If all were kept, nothing is known.
 */
static inline u64 turn_rounds(u32 waiting, u32 cpus, u32 kept)
{
	u32 passed_on = kept < cpus ? cpus - kept : cpus;

	return passed_on ? (u64)waiting * ROUND_ONE / passed_on : 0;
}

/*
 * How often a slice is to be halved to make a turn, where tasks wait for @rounds (times
 * ROUND_ONE) turns of others. All of these and a half are to take @wait_ns at most: a
 * vCPU that its VM's turn left out comes half a round later, as that turn cost half.
 */
static inline u32 turn_halvings(u64 slice_ns, u64 wait_ns, u64 rounds)
{
	u32 halvings = 0;

	while (halvings < TURN_HALVINGS &&
	       3 * (slice_ns >> halvings) * rounds > 2 * wait_ns * ROUND_ONE)
		halvings++;
	return halvings;
}

/* The same where turns are made by halving a slice @before times: they become
 * longer only for a crowd that is clearly smaller. */
static inline u32 turn_halvings_after(u64 slice_ns, u64 wait_ns, u64 rounds,
				      u32 before)
{
	u32 halvings = turn_halvings(slice_ns, wait_ns, rounds);
	u32 slow = turn_halvings(slice_ns, wait_ns, rounds + rounds / 4);

	if (halvings >= before)
		return halvings;
	return slow < before ? slow : before;
}

/* The time (ns) left at @now of a turn of @turn_ns. Turns begin at multiples of their
 * length and a bit, so those of two domains begin together. */
static inline u64 turn_left(u64 now, u64 turn_ns)
{
	return turn_ns - (now - TURN_AFTER_TICK_NS) % turn_ns;
}

/*
 * The mean of the virtual times of those that take part in a plan, weighted by their
 * shares. @sum adds up what plan_weighted() says of each, @shares what plan_share()
 * does.
 */
static inline u64 plan_mean(u64 present, s64 sum, u64 shares)
{
	if (!shares)
		return present;
	return present + (u64)(sum / (s64)shares) * (1 << PRESENT_BITS);
}

/* The present of a domain after a plan with this @mean. It does not run backwards. */
static inline u64 plan_present(u64 present, u64 mean)
{
	return vtime_before(present, mean) ? mean : present;
}

static inline u64 plan_share(u64 share)
{
	return (share >> 4) + 1;
}

/* What a group at @vtime, with @share, adds to the sum; no group counts as farther away
 * than FARTHEST_NS, so that the sum of hundreds fits. */
static inline s64 plan_weighted(u64 vtime, u64 present, u64 share)
{
	s64 most = FARTHEST_NS, ahead = (s64)(vtime - present);

	if (ahead > most)
		ahead = most;
	if (ahead < -most)
		ahead = -most;
	return (ahead >> PRESENT_BITS) * (s64)plan_share(share);
}

#endif /* COHORT_POLICY_PLAN_H */
