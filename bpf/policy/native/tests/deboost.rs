// SPDX-License-Identifier: GPL-2.0-only
//! What a yield does to the order of siblings: the figures of the requirements, and bounds.

use cohort_policy::*;
use proptest::prelude::*;

const SLICE_NS: u64 = 4_000_000;
const LONG_AGO: u64 = u64::MAX;

fn penalty(runnable: u32, since_last: u64, since_reverse: u64, distance: u32) -> u64 {
    unsafe { deboost_penalty(SLICE_NS, runnable, since_last, since_reverse, distance) }
}

#[test]
fn six_slices_for_two_siblings_fall_to_one_above_twelve() {
    let slices = |runnable| f64::from(unsafe { deboost_x16(runnable) }) / 16.0;
    assert_eq!(slices(2), 6.0);
    assert_eq!(slices(13), 1.0);
    assert_eq!(slices(200), 1.0);
    assert!((2..13).all(|runnable| slices(runnable) > slices(runnable + 1)));
}

#[test]
fn one_penalty_in_6_ms() {
    assert_eq!(penalty(8, 5_999_999, LONG_AGO, 10), 0);
    assert!(penalty(8, 6_000_000, LONG_AGO, 10) > 0);
}

#[test]
fn the_reverse_of_a_yield_within_600_us_is_scaled_down() {
    let full = penalty(8, LONG_AGO, 600_000, 10);
    assert_eq!(penalty(8, LONG_AGO, 599_999, 10), full / 4);
}

#[test]
fn the_farther_the_smaller() {
    let near = penalty(8, LONG_AGO, LONG_AGO, 10);
    assert_eq!(penalty(8, LONG_AGO, LONG_AGO, 20), near / 2);
    assert_eq!(penalty(8, LONG_AGO, LONG_AGO, 0), near);
}

/// Siblings of equal claim that yield to each other at random, each charged what it runs: who has the least key runs.
/// Returns what each got, in slices, and the longest that one waited.
fn simulate(siblings: usize, yields: &[(u8, bool)], with: (bool, bool)) -> (Vec<u64>, u64) {
    let mut vtime = vec![0_u64; siblings];
    let mut key = vec![0_i64; siblings];
    let mut got = vec![0_u64; siblings];
    let (mut waits, mut longest) = (vec![0_u64; siblings], 0);
    let mut last_penalty = vec![None; siblings];
    for (round, &(target, does_yield)) in yields.iter().enumerate() {
        let now = round as u64 * SLICE_NS;
        let runs = (0..siblings)
            .min_by_key(|&i| key[i])
            .expect("there are some");
        vtime[runs] += SLICE_NS;
        got[runs] += 1;
        key[runs] = vtime[runs] as i64;
        for (i, wait) in waits.iter_mut().enumerate() {
            *wait = if i == runs { 0 } else { *wait + 1 };
            longest = longest.max(*wait);
        }
        let target = usize::from(target) % siblings;
        if !does_yield || target == runs {
            continue;
        }
        if with.0 {
            let since = last_penalty[runs].map_or(LONG_AGO, |last| now - last);
            let penalty = penalty(siblings as u32, since, LONG_AGO, 10);
            if penalty > 0 {
                last_penalty[runs] = Some(now);
                key[runs] += penalty as i64;
            }
        }
        if with.1 {
            // Its place is moved once, when it waits the next time.
            key[target] = key[target].min(vtime[target] as i64 - SLICE_NS as i64);
        }
    }
    (got, longest)
}

proptest! {
    /// 3 s are 750 slices: nobody is short of its share by more than 2 % of these, or waits for longer than six rounds.
    #[test]
    fn loans_are_repaid_and_nobody_waits_long(
        siblings in 2_usize..9,
        yields in prop::collection::vec((any::<u8>(), any::<bool>()), 750),
        with in (any::<bool>(), any::<bool>()),
    ) {
        let (got, longest) = simulate(siblings, &yields, with);
        let fair = 750.0 / siblings as f64;
        for slices in &got {
            prop_assert!(*slices as f64 >= fair - 15.0, "{got:?}");
        }
        prop_assert!(longest <= 6 * siblings as u64, "one waited {longest} slices");
    }

    #[test]
    fn a_penalty_makes_nobody_wait_for_more_than_a_round_of_all(
        runnable in 1_u32..300, since_last: u64, since_reverse: u64, distance in 0_u32..256,
    ) {
        let (all, others) = (u64::from(runnable.max(2)), u64::from(runnable.max(2) - 1));
        prop_assert!(penalty(runnable, since_last, since_reverse, distance) * others <= all * SLICE_NS);
    }
}
