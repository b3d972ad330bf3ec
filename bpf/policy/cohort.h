/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * When a VM's vCPUs run together. Pure functions.
 *
 * Turns begin at the same time on all CPUs. Slices that each begin when the last
 * one happened to end would scatter a VM's vCPUs over the turns of its
 * neighbours.
 *
 * The CPU that first finds, in a turn, that it is a VM's time opens a window for
 * it, and the other CPUs that its vCPUs wait for follow. So a lock holder runs
 * when its waiters spin. A window lasts to the end of the turn. It is relaxed:
 * it waits for nobody, leaves no CPU idle, and does not hold up whoever was owed
 * more CPU time than the VM when it began.
 *
 * A VM whose vCPUs wait for each other much, by its score, is a cohort: those of
 * its vCPUs that wake in its window interrupt vCPUs of others.
 */
#ifndef COHORT_POLICY_COHORT_H
#define COHORT_POLICY_COHORT_H

#include "average.h"
#include "fair.h"

enum cohort_consts {
	TICK_NS = 4000000, /* at 250 Hz, until it is known */
	TICKS_ENOUGH = 50, /* to know it */
	TICK_RATES = 50, /* Hz: kernels tick at multiples of it */
	TICK_LEAD_PARTS = 32, /* of a tick: from a turn's end to a tick */
	TICK_PARTS = 8, /* of a tick: ticks that differ by more are others' */
	TICKS_DOUBT = 8, /* that may be far from turns' ends, or near again */
	TURN_PARTS = 32, /* of a turn: less than one is not worth a switch */
	TURN_HALVINGS = 3, /* a turn is at least an eighth of a slice */
	CROWD_ONE = 256, /* of averages of competitors */
	SYNC_ONE = 1024, /* of scores */
	SYNC_ON = 200, /* signs per second of CPU time that make a cohort */
	SYNC_OFF = 50, /* and below which it is none any more */
	SYNC_RISE_NS = 20000000, /* of CPU time over which a score rises */
	SYNC_FALL_NS = 2000000000, /* and falls */
	SYNC_EVENTS_MOST = 1 << 20, /* that are counted at once */
};

#define NS_PER_S  1000000000ULL
#define SYNC_MOST (1ULL << 32) /* the highest score: 4 million a second */

/*
 * What a task that starts at @now may run (ns): until the next turn begins, at
 * @base plus a multiple of @slice_ns; if that is too near to be worth a switch,
 * until the one after it.
 */
static inline u64 turn_left(u64 now, u64 base, u64 slice_ns)
{
	u64 left_ns = slice_ns - (now - base) % slice_ns;

	return left_ns < slice_ns / TURN_PARTS ? left_ns + slice_ns : left_ns;
}

/* The number of the turn at whose end such a task has run that long. */
static inline u64 turn_number(u64 now, u64 base, u64 slice_ns)
{
	return (now - base + slice_ns / TURN_PARTS - 1) / slice_ns;
}

/*
 * The same in the shortest turns there are: unlike their numbers these do not
 * meet when the length of turns, a slice halved @halvings times, changes. Never
 * 0.
 */
static inline u64 turn_id(u64 now, u64 base, u64 slice_ns, u32 halvings)
{
	u64 turn = turn_number(now, base, slice_ns >> halvings);

	return (turn << (TURN_HALVINGS - halvings)) + 1;
}

/*
 * How many turns (times CROWD_ONE) it takes until the last of @waiting groups has
 * had one on a lane of @cpus, of which each fills @width: as wide as the one that
 * runs. On many CPUs several have their turn at once.
 */
static inline u32 turns_to_last(u32 waiting, u32 width, u32 cpus)
{
	return cpus ? (u64)waiting * CROWD_ONE * width / cpus : 0;
}

/*
 * The average (times CROWD_ONE) of how many turns of others a group waits for, after
 * one more tick at which it were @turns (times CROWD_ONE).
 */
static inline u32 crowd(u32 average, u32 turns)
{
	return moving_average(average, turns);
}

/*
 * How often a slice is to be halved to make a turn: the last of those that wait gets
 * one after @average turns (times CROWD_ONE) of others; a vCPU that its VM's turn
 * leaves out gets the next one, which comes when half a round is over, as that turn
 * cost half. That is to take @wait_ns at most.
 */
static inline u32 turn_halvings(u64 slice_ns, u64 wait_ns, u32 average)
{
	u32 halvings = 0;

	while (halvings < TURN_HALVINGS &&
	       3 * (slice_ns >> halvings) * average > 2 * wait_ns * CROWD_ONE)
		halvings++;
	return halvings;
}

/* The same where turns are made by halving a slice @before times: they become
 * longer only for a crowd that is clearly smaller. */
static inline u32 turn_halvings_after(u64 slice_ns, u64 wait_ns, u32 average,
				      u32 before)
{
	u32 halvings = turn_halvings(slice_ns, wait_ns, average);
	u32 slow = turn_halvings(slice_ns, wait_ns, average + average / 4);

	if (halvings >= before)
		return halvings;
	return slow < before ? slow : before;
}

/* The time (ns) from tick to tick where the kernel counted @ticks in @elapsed_ns. */
static inline u64 tick_period(u64 elapsed_ns, u64 ticks)
{
	u64 rate;

	if (ticks < TICKS_ENOUGH || !elapsed_ns)
		return TICK_NS;
	rate = (ticks * NS_PER_S + elapsed_ns / 2) / elapsed_ns;
	rate = (rate + TICK_RATES / 2) / TICK_RATES * TICK_RATES;
	return rate ? NS_PER_S / rate : TICK_NS;
}

/* Can ticks, @tick_ns apart, come at the ends of all turns of @turn_ns? */
static inline bool ticks_meet_turns(u64 turn_ns, u64 tick_ns)
{
	return !(turn_ns % tick_ns);
}

/*
 * How much later (ns; before: negative) @tick comes than the ticks, @tick_ns apart,
 * for which the turns from @base on are made: a tick ends a slice only if that is
 * over, so turns end shortly before ticks do come, at once on all CPUs. Very shortly:
 * a vCPU that halts in between hands its CPU to the next turn, while its siblings' go
 * on with this one.
 */
static inline s64 tick_lateness(u64 tick, u64 base, u64 tick_ns)
{
	u64 ahead_ns = (tick - tick_ns / TICK_LEAD_PARTS - base) % tick_ns;

	return ahead_ns > tick_ns / 2 ? (s64)(ahead_ns - tick_ns)
				      : (s64)ahead_ns;
}

/* Were turns made for such a tick? */
static inline bool tick_is_near(s64 lateness, s64 tick_ns)
{
	return lateness <= tick_ns / TICK_PARTS &&
	       lateness >= -tick_ns / TICK_PARTS;
}

/* Does such a tick come before the turn is over that was made for it? Then turns were
 * made for a late one. */
static inline bool tick_is_early(s64 lateness, s64 tick_ns)
{
	return tick_is_near(lateness, tick_ns) &&
	       lateness < -tick_ns / TICK_LEAD_PARTS;
}

/*
 * The least of @least and the @lateness of one more tick, of those that are near
 * (@tick_ns: none was). Interrupts can be late, not early: one late tick must not
 * move all turns, or those that are in time find them not over.
 */
static inline s64 least_lateness(s64 least, s64 lateness, s64 tick_ns)
{
	return tick_is_near(lateness, tick_ns) && lateness < least ? lateness
								   : least;
}

/*
 * Do a CPU's ticks, @near and @far from turns' ends, come at other times than these,
 * as those of some CPUs do all the time (skew_tick=1)? Where that is not clear it
 * is as @before.
 */
static inline bool ticks_miss_turns(u32 near, u32 far, bool before)
{
	return before ? near <= far + TICKS_DOUBT : far > near + TICKS_DOUBT;
}

/*
 * Where turns are to begin after a time in which @least was the least lateness of
 * ticks, the last one being @lateness: @base, moved so that turns keep their numbers.
 * The clock of ticks may drift against this one. If the ticks of this CPU
 * @miss turns, those of no other met them.
 */
static inline u64 turn_base(u64 base, s64 least, s64 lateness, s64 tick_ns,
			    bool miss)
{
	return base + (!miss && least < tick_ns ? least : lateness);
}

/*
 * A VM's score after @events signs that its vCPUs wait for each other (spin
 * exits, yields, IPIs to vCPUs that were preempted) within @used_ns of its CPU
 * time: their number per second of CPU time, times SYNC_ONE, averaged. It rises
 * quickly and falls slowly, as running together makes the signs disappear.
 */
static inline u64 sync_score(u64 score, u64 events, u64 used_ns)
{
	u64 rate, over_ns;

	if (!used_ns)
		return score;
	if (events > SYNC_EVENTS_MOST)
		events = SYNC_EVENTS_MOST;
	rate = events * SYNC_ONE * NS_PER_S / used_ns;
	if (rate > SYNC_MOST)
		rate = SYNC_MOST;
	over_ns = rate > score ? SYNC_RISE_NS : SYNC_FALL_NS;
	if (used_ns >= over_ns)
		return rate;
	if (rate > score)
		return score + (rate - score) * used_ns / over_ns;
	return score - (score - rate) * used_ns / over_ns;
}

/* Is a VM with this score, which @was one or not, a cohort now? @rule may say so
 * whatever its score. */
static inline bool is_cohort(u32 rule, bool was, u64 score)
{
	if (rule != COHORT_AUTO)
		return rule == COHORT_ALWAYS;
	return score >= (was ? SYNC_OFF : SYNC_ON) * SYNC_ONE;
}

/*
 * Whoever stands before this virtual time is not held up by the window of a VM
 * that stood at @vtime when it began, and whose slices cost @slice_cost each.
 * CPUs that choose at the same time see slightly different virtual times: what
 * differs by less than a part of a slice must not part them.
 */
static inline u64 window_bound(u64 vtime, u64 slice_cost)
{
	return vtime - slice_cost / 4;
}

/*
 * CPUs of a lane of @cpus that are left for another window in a turn, of which
 * @served serve one now and @awaited are to; the one that asks is always.
 */
static inline u32 window_left(u32 cpus, u32 served, u32 awaited)
{
	return served + awaited < cpus ? cpus - served - awaited : 1;
}

/*
 * A window lacks @missing of the CPUs that its VM could use when it began, since some
 * of its vCPUs sleep. Does another VM, which wants @width of the @left CPUs, only fill
 * in for these, and give way when one of them wakes? If it cannot have all that it
 * wants, or nothing would be left for them: an IPI, and who spins for its answer, must
 * not wait for a neighbour's turn to end.
 */
static inline bool window_fills(u32 missing, u32 left, u32 width)
{
	return missing && (left < width || left <= missing);
}

/*
 * Packing: there are CPUs for @left vCPUs, which are too few for the @width of the
 * VM that stands first, at @key. Is the group behind it served before it, which
 * needs @next_width, stands at @next_key, and whose window costs @next_cost? Not
 * if it is ahead by more than one window, and whoever stands first when a turn
 * begins has all CPUs: so nobody falls behind by more than a window because
 * others are packed.
 */
static inline bool window_packs(u32 left, u32 width, u64 key, u32 next_width,
				u64 next_key, u64 next_cost)
{
	return width > left && next_width <= left &&
	       vtime_before(next_key, key + next_cost);
}

#endif /* COHORT_POLICY_COHORT_H */
