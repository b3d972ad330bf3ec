// SPDX-License-Identifier: GPL-2.0-only
//! Who leaves its CPU to the sibling that it wakes: by habit, which is soon learnt and soon forgotten.

use cohort_policy::*;
use proptest::prelude::*;

const SLICE: u64 = 4_000_000;

fn after(times: &[bool]) -> u32 {
    times
        .iter()
        .fold(0, |average, &did| unsafe { handovers(average, did) })
}

fn hands_over(average: u32) -> bool {
    unsafe { cohort_policy::hands_over(average) }
}

#[test]
fn who_sleeps_within_a_part_of_a_slice_left_its_cpu() {
    let soon = SLICE / u64::from(HANDOVER_SOON_PART);
    assert!(unsafe { handed_over(soon - 1, SLICE) });
    assert!(!unsafe { handed_over(soon, SLICE) });
    assert!(!unsafe { handed_over(u64::MAX, SLICE) });
}

#[test]
fn a_habit_is_one_after_a_dozen_times_and_none_after_three_others() {
    assert!(!hands_over(after(&[true; 8])));
    let mut times = vec![true; 12];
    assert!(hands_over(after(&times)));
    times.resize(15, false);
    assert!(!hands_over(after(&times)));
    // However long it lasted.
    let mut times = vec![true; 1000];
    times.resize(1003, false);
    assert!(!hands_over(after(&times)));
}

#[test]
fn who_does_so_every_other_time_has_no_such_habit() {
    let mut average = 0;
    for time in 0..1000 {
        average = unsafe { handovers(average, time % 2 == 0) };
        assert!(!hands_over(average));
    }
}

proptest! {
    /// Averages stay in their range, and whatever was before, always is always and never is never.
    #[test]
    fn an_average_forgets(before in 0..=HANDOVER_ONE, times in prop::collection::vec(any::<bool>(), 0..100), last in any::<bool>()) {
        let mut average = before;
        for did in times {
            average = unsafe { handovers(average, did) };
            prop_assert!(average <= HANDOVER_ONE);
        }
        for _ in 0..40 {
            average = unsafe { handovers(average, last) };
        }
        prop_assert_eq!(hands_over(average), last);
    }
}
