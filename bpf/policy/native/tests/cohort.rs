// SPDX-License-Identifier: GPL-2.0-only
//! Turns: they begin at the same time for everybody, and none is too short to be worth a switch.

use cohort_policy::*;
use proptest::prelude::*;

const MS: u64 = 1_000_000;

#[test]
fn a_turn_ends_shortly_before_the_tick_that_notices() {
    let slice = 4 * MS;
    let tick = 1_000 * MS;
    let base = unsafe { turn_base(tick, slice) };
    // Started right after a tick: the next tick finds the turn over.
    let left = unsafe { turn_left(tick + MS / 100, base, slice) };
    assert!(tick + MS / 100 + left < tick + slice);
    // Started too late to be worth it: to the tick after the next.
    let late = tick + 3 * MS;
    let left = unsafe { turn_left(late, base, slice) };
    assert!(late + left > tick + slice && late + left < tick + 2 * slice);
}

proptest! {
    /// Whoever starts between the same two ends, ends with the others or one turn later; no turn is shorter than a
    /// quarter of a slice or longer than one and a quarter.
    #[test]
    fn turns_end_together(base in 0u64..1 << 50, after in 0u64..1 << 40, slice in 1_000u64..100 * MS) {
        let now = base + after;
        let left = unsafe { turn_left(now, base, slice) };
        prop_assert_eq!((now + left - base) % slice, 0);
        prop_assert!(left >= slice / 4 && left <= slice + slice / 4);
    }

    /// A base that lies ahead (another CPU has just set it) is as good.
    #[test]
    fn a_base_in_the_future_does_no_harm(base in 1u64 << 30..1 << 50, before in 0u64..1 << 29, slice in 1_000u64..100 * MS) {
        let left = unsafe { turn_left(base - before, base, slice) };
        prop_assert!(left >= slice / 4 && left <= slice + slice / 4);
    }
}
