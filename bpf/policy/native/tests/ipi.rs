// SPDX-License-Identifier: GPL-2.0-only
//! Interrupts between vCPUs: how long one is waited for, and who has to run.

use cohort_policy::*;
use proptest::prelude::*;

const MS: u64 = 1_000_000;

#[test]
fn an_ipi_is_open_until_it_is_answered_or_its_window_has_passed() {
    let open = |sent, now| unsafe { ipi_is_open(sent, now, 50 * MS) };
    assert!(open(MS, MS) && open(MS, 50 * MS));
    assert!(!open(MS, 51 * MS), "its window has passed");
    assert!(!open(0, MS), "answered");
    assert!(open(MS + 1, MS), "the sender's clock is a little ahead");
}

#[test]
fn a_chain_goes_on_at_whoever_runs_and_ends_at_whoever_is_ready_or_halted() {
    let step = |ready, runs| unsafe { ipi_step(ready, runs) };
    assert_eq!(step(true, false), IPI_TAKE);
    assert_eq!(step(false, true), IPI_FOLLOW);
    assert_eq!(step(false, false), IPI_STOP, "halted");
}

#[test]
fn buckets_are_powers_of_two() {
    let bucket = |value| unsafe { log2_bucket(value) };
    assert_eq!(
        [0, 1, 2, 3, 4, 1023, 1024].map(bucket),
        [0, 1, 2, 2, 3, 10, 11]
    );
    assert_eq!(bucket(u64::MAX), NR_BUCKETS - 1);
}

proptest! {
    /// A bucket holds values below its power of two, and none that an earlier one holds.
    #[test]
    fn a_value_is_in_the_one_bucket_that_bounds_it(value in 1u64..1 << (NR_BUCKETS - 1)) {
        let bucket = unsafe { log2_bucket(value) };
        prop_assert!(value < 1 << bucket && value >= 1 << (bucket - 1));
    }
}
