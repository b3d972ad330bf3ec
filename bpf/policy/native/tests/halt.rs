// SPDX-License-Identifier: GPL-2.0-only
//! Halted time by MPERF: what is missing in it, how its rate is measured, and how wrong that can be.

use cohort_policy::*;
use proptest::prelude::*;

const SECOND: u64 = 1_000_000_000;
/// ns for which a rate is measured at a time.
const MEASURE: u64 = HALT_MEASURE_NS as u64;

/// A clock that was measured so many times, at so many cycles in each.
fn measured(measurements: &[u64]) -> halt_clock {
    let mut clock = halt_clock::default();
    for &cycles in measurements {
        unsafe { halt_measure(&mut clock, MEASURE, cycles) };
    }
    clock
}

#[test]
fn what_is_missing_in_mperf_was_spent_halted() {
    let clock = measured(&[50_000]);
    let halted = unsafe { halt_halted_ns(1_000_000, 1_500_000, clock.ns_per_cycle) };
    assert!(halted.abs_diff(400_000) <= 1, "{halted}");
}

#[test]
fn a_counter_that_stands_still_has_no_rate() {
    let clock = measured(&[0, 0]);
    assert_eq!((clock.ns_per_cycle, clock.measurements), (0, 2));
}

#[test]
fn an_event_that_missed_time_or_began_anew_is_noticed() {
    let is_counted = |elapsed, counted| unsafe { halt_is_counted(elapsed, counted) };
    assert!(is_counted(SECOND, SECOND + SECOND / 100));
    assert!(is_counted(SECOND, SECOND - SECOND / 100));
    assert!(!is_counted(SECOND, 0));
    assert!(!is_counted(SECOND, SECOND / 2));
    assert!(!is_counted(SECOND, 1_u64.wrapping_sub(SECOND)));
    assert!(!is_counted(MEASURE, 0));
    assert!(is_counted(MEASURE, MEASURE / 2));
}

#[test]
fn the_error_is_what_measurements_differ_by() {
    let same = measured(&[50_000, 50_000, 50_000]);
    assert_eq!(same.error_ppm, 0);
    let one_percent = measured(&[50_000, 50_000, 50_500]);
    let error = one_percent.error_ppm;
    assert!(error.abs_diff(10_000) < 100, "{error} ppm");
}

#[test]
fn a_rate_that_changes_is_followed() {
    let clock = measured(&[[20_000; 100], [30_000; 100]].concat());
    let rate = (1_u64 << HALT_SHIFT) as f64 / clock.ns_per_cycle as f64;
    assert!((1.4..1.51).contains(&rate), "{rate} cycles per ns");
}

proptest! {
    /// Whatever was read: no less than nothing, and no more than the time that has passed.
    #[test]
    fn halted_time_has_bounds(elapsed: u64, cycles in 0..1_u64 << 56, per_cycle in 0..1_u64 << 32) {
        let halted = unsafe { halt_halted_ns(elapsed, cycles, per_cycle) };
        prop_assert!(halted <= elapsed);
    }

    /// At 0.1 to 6 GHz, from microseconds to a month: right within 1 ns and 1 ppm.
    #[test]
    fn halted_time_is_right(
        per_us in 100_u64..6_000,
        elapsed in 1_000_u64..30 * 86_400 * SECOND,
        busy_ppm in 0_u64..=1_000_000,
    ) {
        let clock = measured(&[MEASURE / 1_000 * per_us; 20]);
        let busy = (u128::from(elapsed) * u128::from(busy_ppm) / 1_000_000) as u64;
        let cycles = (u128::from(busy) * u128::from(per_us) / 1_000) as u64;
        let halted = unsafe { halt_halted_ns(elapsed, cycles, clock.ns_per_cycle) };
        let wrong = halted.abs_diff(elapsed - busy);
        prop_assert!(wrong <= 11 + elapsed / 1_000_000, "{halted} instead of {}", elapsed - busy);
    }

    /// However late the end of a measurement was read: the rate is wrong by no more than the error that is stated and the
    /// least that all were late by, which no measurement can tell.
    #[test]
    fn the_stated_error_is_a_bound(
        per_us in 500_u64..6_000,
        late_ns in prop::collection::vec(0_u64..500, 2..64),
    ) {
        let cycles: Vec<u64> = late_ns.iter().map(|late| (MEASURE + late) * per_us / 1_000).collect();
        let clock = measured(&cycles);
        let busy = unsafe { halt_busy_ns(per_us * 1_000_000, clock.ns_per_cycle) };
        let wrong_ppm = busy.abs_diff(SECOND) / 1_000;
        let least_ppm = *late_ns.iter().min().unwrap() * 1_000_000 / MEASURE;
        let stated_ppm = clock.error_ppm + least_ppm;
        // Two cycles are lost to rounding.
        prop_assert!(wrong_ppm <= stated_ppm + 200, "{wrong_ppm} ppm, {stated_ppm} are stated");
    }
}
