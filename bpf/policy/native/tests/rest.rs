// SPDX-License-Identifier: GPL-2.0-only
//! When a vCPU that halts on its CPU rests: slow to begin, quick to end.

use cohort_policy::*;
use proptest::prelude::*;

const ONE: u32 = REST_ONE;
const LOOK: u64 = REST_LOOK_NS as u64;
const TICK: u64 = 4_000_000;

/// The average after so many ticks, in each of which it halted for that part of a hundred.
fn after(mut average: u32, ticks: u32, halted_percent: u64) -> u32 {
    for _ in 0..ticks {
        average = unsafe { rest_average(average, TICK * halted_percent / 100, TICK) };
    }
    average
}

#[test]
fn who_is_halted_for_most_of_a_tick_rests() {
    assert!(unsafe { rest_goes_on(false, TICK / 4 * 3, TICK) });
    assert!(!unsafe { rest_goes_on(false, TICK / 4 * 3 - 1, TICK) });
}

#[test]
fn who_works_for_most_of_a_look_rests_no_more() {
    assert!(unsafe { rest_goes_on(true, LOOK / 2, LOOK) });
    assert!(!unsafe { rest_goes_on(true, LOOK / 2 - 1, LOOK) });
}

#[test]
fn who_works_and_halts_by_turns_is_halted_often() {
    // Two ticks each.
    let average = (0..100).fold(0, |average, _| after(after(average, 2, 100), 2, 0));
    assert!(average >= REST_OFTEN);
    assert!(after(0, 100, 10) < REST_OFTEN);
}

#[test]
fn a_long_time_is_all_that_counts() {
    assert_eq!(unsafe { rest_average(0, 10 * TICK, 10 * TICK) }, ONE);
    assert_eq!(unsafe { rest_average(ONE, 0, 10 * TICK) }, 0);
    assert_eq!(unsafe { rest_average(77, 0, 0) }, 77);
}

proptest! {
    /// It is a part of one, moves towards what was seen, and not beyond.
    #[test]
    fn the_average_moves_towards_what_is_seen(average in 0..=ONE, halted_ns in 0u64..1 << 40, elapsed_ns in 1u64..1 << 40) {
        let seen = (halted_ns.min(elapsed_ns) * u64::from(ONE) / elapsed_ns) as u32;
        let moved = unsafe { rest_average(average, halted_ns, elapsed_ns) };
        prop_assert!(moved >= average.min(seen) && moved <= average.max(seen));
    }
}
