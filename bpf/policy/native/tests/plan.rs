// SPDX-License-Identifier: GPL-2.0-only
//! The plan's arithmetic: which CPUs a group gets, how long turns are, and where the present is.

use cohort_policy::*;
use proptest::prelude::*;

const MS: u64 = 1_000_000;
const ONE: u64 = SHARE_ONE as u64;
const ROUND: u64 = ROUND_ONE as u64;
/// That can take part in a plan: PLAN_ENTRIES of state.bpf.h.
const MEMBERS: usize = 128;
/// No group counts as farther away.
const FARTHEST: u64 = 1 << 36;

fn next(free: u64, best: u64, good: u64) -> u64 {
    unsafe { plan_next(free, best, good) }
}

fn leaves_out(left: u32, width: u32, first: bool) -> bool {
    unsafe { plan_leaves_out(left, width, first) }
}

fn left_of_turn(now: u64, turn_ns: u64) -> u64 {
    unsafe { turn_left(now, turn_ns) }
}

fn weighted(vtime: u64, present: u64, share: u64) -> i64 {
    unsafe { plan_weighted(vtime, present, share) }
}

/// Where the present is after a plan in which these take part: how far each is ahead, and its share.
fn present_after(present: u64, members: &[(i64, u64)]) -> u64 {
    let sum = members
        .iter()
        .map(|(ahead, share)| weighted(present.wrapping_add_signed(*ahead), present, *share))
        .sum();
    let shares = members
        .iter()
        .map(|(_, share)| unsafe { plan_share(*share) });
    unsafe { plan_present(present, plan_mean(present, sum, shares.sum())) }
}

#[test]
fn cpus_are_those_that_it_has_then_those_that_it_had_then_any() {
    assert_eq!(next(0b1111, 0b1000, 0b0100), 0b1000);
    assert_eq!(next(0b0111, 0b1000, 0b0100), 0b0100);
    assert_eq!(next(0b0011, 0b1000, 0b0100), 0b0001);
    assert_eq!(next(0, 0b1000, 0b0100), 0);
}

#[test]
fn the_example_of_the_header_holds() {
    // A wants 8 CPUs of 8, B and C 4 each: A alone; or B, then C, and A not.
    assert!(!leaves_out(8, 8, true) && leaves_out(0, 4, false));
    assert!(!leaves_out(8, 4, true) && leaves_out(4, 8, false) && !leaves_out(4, 4, false));
}

#[test]
fn who_wants_more_cpus_than_there_are_has_a_turn_when_it_stands_first() {
    assert!(!leaves_out(8, 9, true));
    assert!(leaves_out(8, 9, false));
}

/// How many CPUs a VM has at each turn that wants so many.
fn planned(wanted: impl IntoIterator<Item = u32>) -> Vec<u32> {
    let mut mean = 0;
    let plan = |width| unsafe {
        mean = plan_average(mean, width);
        plan_width(width, mean)
    };
    wanted.into_iter().map(plan).collect()
}

#[test]
fn who_wants_a_second_cpu_for_a_moment_now_and_then_has_one() {
    let wanted = [1, 1, 1, 2, 1, 1, 1, 1, 2, 1, 1, 1].repeat(20);
    assert!(planned(wanted).iter().all(|&width| width == 1));
}

#[test]
fn who_wants_more_from_now_on_has_it_soon() {
    let wanted = [[1; 20], [2; 20]].concat();
    let planned = planned(wanted);
    assert_eq!(
        planned[20 + WIDTH_TURNS as usize..],
        [2; 20 - WIDTH_TURNS as usize]
    );
}

fn sleeps_often(sleeps: u32, running: u32, halvings: u32) -> bool {
    let mean = |count| unsafe { plan_average(0, count) };
    unsafe { plan_sleeps_often(mean(sleeps), mean(running), halvings) }
}

#[test]
fn vcpus_that_sleep_often_need_not_run_together() {
    // Two vCPUs work for 100 us and meet asleep: the last one does not sleep. 20 times per slice of 2 ms.
    assert!(sleeps_often(20, 2, 0) && sleeps_often(10, 2, 1));
    // They do so each millisecond.
    assert!(!sleeps_often(2, 2, 0) && !sleeps_often(1, 2, 1));
    // They never sleep, or nothing is known of them.
    assert!(!sleeps_often(0, 2, 0) && !sleeps_often(0, 0, 0));
}

proptest! {
    #[test]
    fn a_plan_is_for_no_more_than_is_wanted_and_for_one_at_least(
        wanted in prop::collection::vec(1_u32..64, 1..100)
    ) {
        let planned = planned(wanted.iter().copied());
        prop_assert!(planned.iter().zip(&wanted).all(|(planned, wanted)| (1..=*wanted).contains(planned)));
    }

    #[test]
    fn who_wants_the_same_all_the_time_has_it(before in 1_u32..64, wanted in 1_u32..64) {
        let planned = planned([before].into_iter().chain([wanted; 60]));
        prop_assert_eq!(*planned.last().expect("61 turns"), wanted);
    }
}

#[test]
fn turns_are_halved_for_a_crowd_and_not_more_than_twice() {
    let halvings = |rounds| unsafe { turn_halvings(2 * MS, 24 * MS, rounds) };
    // Eight rounds of 2 ms and a half of these are 24 ms.
    assert_eq!(halvings(8 * ROUND), 0);
    assert_eq!(halvings(8 * ROUND + 1), 1);
    assert_eq!(halvings(1000 * ROUND), TURN_HALVINGS);
}

#[test]
fn a_round_is_over_the_cpus_that_are_passed_on() {
    let rounds = |kept| unsafe { turn_rounds(12, 4, kept) };
    assert_eq!(
        [0, 1, 2, 3].map(rounds),
        [3, 4, 6, 12].map(|turns| turns * ROUND)
    );
    // Nothing is known where all are kept, and where a CPU has gone.
    assert_eq!([4, 5].map(rounds), [3 * ROUND; 2]);
    assert_eq!(unsafe { turn_rounds(12, 0, 0) }, 0);
}

#[test]
fn the_present_is_the_mean_by_shares() {
    // Three quarters of the host are 4 ms ahead, a quarter stands at the present.
    let present = present_after(MS, &[(4 << 20, ONE * 3 / 4), (0, ONE / 4)]);
    assert!((3 << 20) - present.abs_diff(MS) <= 2 << PRESENT_BITS);
    // Nobody takes part, or all are behind.
    assert_eq!(present_after(MS, &[]), MS);
    assert_eq!(present_after(MS, &[(-5, ONE)]), MS);
    assert_eq!(unsafe { plan_mean(MS, 1, 0) }, MS);
    // The mean itself lies behind then.
    let sum = weighted(5 * MS, 9 * MS, ONE);
    let mean = unsafe { plan_mean(9 * MS, sum, plan_share(ONE)) };
    assert!(mean.abs_diff(5 * MS) <= 2 << PRESENT_BITS);
}

/// The farthest, with the greatest shares: the sum is what it would be without a bound on its bits.
#[test]
fn the_sum_of_all_that_can_take_part_fits() {
    for vtime in [1u64 << 62, (1u64 << 62).wrapping_neg()] {
        let one = weighted(vtime, 0, ONE);
        let exact = i128::from(one) * MEMBERS as i128;
        let sum = (0..MEMBERS).fold(0i64, |sum, _| sum.wrapping_add(one));
        assert_eq!(i128::from(sum), exact);
        assert!(one.unsigned_abs() >= (FARTHEST >> PRESENT_BITS) * (ONE >> 4));
    }
}

#[test]
fn the_smallest_share_counts() {
    assert!((0..16).all(|share| unsafe { plan_share(share) } == 1));
}

proptest! {
    #[test]
    fn cpus_are_counted_and_the_lowest_is_found(cpus: u64) {
        prop_assert_eq!(unsafe { cpus_in(cpus) }, cpus.count_ones());
        let lowest = unsafe { lowest_cpu(cpus) };
        prop_assert_eq!(lowest, if cpus == 0 { 0 } else { 1 << cpus.trailing_zeros() });
    }

    /// One CPU, which is free; one of the best if one of these is, else one of the good ones if one of these is.
    #[test]
    fn a_group_gets_one_free_cpu_the_best_there_is(free: u64, best: u64, good: u64, few in any::<u64>()) {
        // With all bits random there is always one in common: also with few.
        for (best, good) in [(best, good), (best & few & good, good & !few & free.rotate_left(7)), (best & !free, good), (best & !free, good & !free)] {
            let cpu = next(free, best, good);
            prop_assert_eq!(cpu.count_ones(), u32::from(free != 0));
            prop_assert_eq!(cpu & !free, 0);
            if free & best != 0 {
                prop_assert!(cpu & best != 0);
            } else if free & good != 0 {
                prop_assert!(cpu & good != 0);
            }
        }
    }

    /// Whoever takes as many as it wants, one after the other, has that many different ones, and all that it had before
    /// anybody else's.
    #[test]
    fn a_group_keeps_the_cpus_that_it_has(free: u64, best: u64, good: u64, width in 0u32..65) {
        let mut given = 0;
        for _ in 0..width {
            given |= next(free & !given, best, good);
        }
        prop_assert_eq!(given.count_ones(), width.min(free.count_ones()));
        prop_assert_eq!((given & best).count_ones(), width.min((free & best).count_ones()));
        let rest = width.saturating_sub((free & best).count_ones());
        prop_assert_eq!((given & good & !best).count_ones(), rest.min((free & good & !best).count_ones()));
    }

    /// Whoever stands first is not left out, nor is anybody for whom there are enough; all others are.
    #[test]
    fn left_out_is_for_whom_there_are_too_few(left in 0u32..=64, width in 1u32..128) {
        prop_assert!(!leaves_out(left, width, true));
        prop_assert_eq!(leaves_out(left, width, false), left < width);
    }

    /// Each of these CPUs comes once, from wherever one begins, and the one begun at comes last.
    #[test]
    fn the_next_cpu_goes_round_all(cpus in any::<u64>(), begin in 0u32..64) {
        let begin = 1u64 << begin;
        let (mut seen, mut cpu) = (0u64, begin);
        for _ in 0..cpus.count_ones() {
            cpu = unsafe { next_cpu(cpus, cpu) };
            prop_assert_eq!((cpu.count_ones(), cpu & !cpus, cpu & seen), (1, 0, 0));
            seen |= cpu;
            prop_assert!(cpu != begin || seen == cpus);
        }
        prop_assert_eq!(seen, cpus);
    }

    /// A turn has at least a moment left, at most its length, and ends at a multiple of that and a bit.
    #[test]
    fn turns_end_a_bit_after_multiples_of_their_length(now in MS..1 << 62, turn_ns in 1u64..100 * MS) {
        let left = left_of_turn(now, turn_ns);
        prop_assert!((1..=turn_ns).contains(&left));
        prop_assert_eq!((now + left - u64::from(TURN_AFTER_TICK_NS)) % turn_ns, 0);
    }

    /// Where turns are shorter, some end with each longer one of another domain, and none runs across its end.
    #[test]
    fn short_turns_end_with_long_ones(now in MS..1 << 62, short_ns in 1u64..10 * MS, halvings in 0u32..=TURN_HALVINGS) {
        let long_ns = short_ns << halvings;
        let end = now + left_of_turn(now, long_ns);
        prop_assert!(now + left_of_turn(now, short_ns) <= end);
        prop_assert_eq!(left_of_turn(end - 1, short_ns), 1);
    }

    /// A round and a half of those that wait takes no longer than it should, or turns are as short as they get; and they are
    /// not shorter than that asks for. Once short they stay so, until there are clearly fewer.
    #[test]
    fn turns_are_as_short_as_the_crowd_asks_for(slice_us in 100u64..100_000, wait_ms in 1u64..1000, rounds in 0u64..8192 * ROUND) {
        let (slice, wait) = (slice_us * 1000, wait_ms * MS);
        let halvings = unsafe { turn_halvings(slice, wait, rounds) };
        // Times ROUND_ONE, as rounds are.
        let waits = |halvings: u32, rounds: u64| 3 * (slice >> halvings) * rounds;
        let most = 2 * wait * ROUND;
        prop_assert!(halvings <= TURN_HALVINGS);
        prop_assert!(halvings == TURN_HALVINGS || waits(halvings, rounds) <= most);
        prop_assert!(halvings == 0 || waits(halvings - 1, rounds) > most);
        let after = |before| unsafe { turn_halvings_after(slice, wait, rounds, before) };
        for before in 0..=TURN_HALVINGS {
            let after = after(before);
            prop_assert!(after >= halvings && after <= before.max(halvings));
            // Longer than before: they would be long enough for a quarter more. Not as long as they could be: not so.
            prop_assert!(after >= before || after == TURN_HALVINGS || waits(after, rounds + rounds / 4) <= most);
            prop_assert!(after == halvings || waits(after - 1, rounds + rounds / 4) > most);
        }
    }

    /// A small change of the crowd, up and down, does not change the length of turns each time.
    #[test]
    fn turns_do_not_change_to_and_fro(slice_us in 100u64..100_000, wait_ms in 1u64..1000, rounds in ROUND..8192 * ROUND, fewer in 0u64..ROUND) {
        let (slice, wait) = (slice_us * 1000, wait_ms * MS);
        let less = rounds - fewer * rounds / (6 * ROUND);
        let crowd = unsafe { turn_halvings_after(slice, wait, rounds, 0) };
        prop_assert_eq!(unsafe { turn_halvings_after(slice, wait, less, crowd) }, crowd);
    }

    /// Every member has a part in the mean, in the ratio of the shares except for what is cut off.
    #[test]
    fn members_count_by_their_shares(share in 0u64..=ONE) {
        let part = unsafe { plan_share(share) };
        prop_assert!(part >= 1 && part.abs_diff(share / 16) <= 1);
        let less = unsafe { plan_share(share.saturating_sub(16)) };
        prop_assert!(part > less || share < 16);
    }

    /// A member adds how far it is ahead (or behind) times its share; beyond a bound no more; in whatever direction and
    /// across a wrap.
    #[test]
    fn a_member_adds_how_far_it_is_ahead(present: u64, ahead in -(1i64 << 62)..1 << 62, share in 1u64..=ONE) {
        let added = weighted(present.wrapping_add_signed(ahead), present, share);
        let most = FARTHEST as i64;
        let part = i128::from(unsafe { plan_share(share) });
        let exact = i128::from(ahead.clamp(-most, most)) * part;
        let added = i128::from(added) << PRESENT_BITS;
        prop_assert!(added <= exact && exact - added < part << PRESENT_BITS);
    }

    /// The present never runs backwards, nor beyond the one of those that take part that is furthest ahead.
    #[test]
    fn the_present_stays_between_itself_and_the_furthest(
        present: u64,
        members in prop::collection::vec((-(1i64 << 40)..1 << 40, 1u64..=ONE), 1..MEMBERS),
        reach in 1u32..41,
    ) {
        let members: Vec<_> = members.iter().map(|(ahead, share)| (ahead >> (40 - reach), *share)).collect();
        let furthest = members.iter().map(|(ahead, _)| *ahead).max().expect("members");
        let moved = present_after(present, &members).wrapping_sub(present) as i64;
        prop_assert!(moved >= 0 && moved <= furthest.max(0), "{moved} of {furthest}");
        // Nor is it behind what is the mean, but for what is cut off.
        let most = FARTHEST as i64;
        let part = |share: u64| i128::from(unsafe { plan_share(share) });
        let parts: i128 = members.iter().map(|(_, share)| part(*share)).sum();
        let sum: i128 = members.iter().map(|(ahead, share)| i128::from((*ahead).clamp(-most, most)) * part(*share)).sum();
        prop_assert!(i128::from(moved) <= (sum / parts).max(0));
        prop_assert!(i128::from(moved) > sum / parts - (2 << PRESENT_BITS));
    }

    /// One that is alone is the present, but for the bits that are left out; in one plan unless it is very far.
    #[test]
    fn one_alone_is_the_present(present: u64, ahead in 0u64..1 << 40, share in 1u64..=ONE) {
        let vtime = present.wrapping_add(ahead);
        let mut now = present;
        for _ in 0..1 + ahead / FARTHEST {
            now = present_after(now, &[(vtime.wrapping_sub(now) as i64, share)]);
        }
        prop_assert!(vtime.wrapping_sub(now) < 1 << PRESENT_BITS, "{} ns away", vtime.wrapping_sub(now) as i64);
    }
}
