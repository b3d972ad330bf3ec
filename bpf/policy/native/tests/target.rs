// SPDX-License-Identifier: GPL-2.0-only
//! Directed yields: which offers are taken, and what a loan is.

use cohort_policy::*;
use proptest::prelude::*;

fn verdict(sibling: bool, ready: bool, allowed: bool, throttled: bool) -> i32 {
    unsafe {
        yield_verdict(&yield_offer {
            sibling,
            ready,
            allowed,
            throttled,
        })
    }
}

#[test]
fn only_a_ready_allowed_sibling_of_an_uncapped_vm_is_taken() {
    for bits in 0..16 {
        let (sibling, ready, allowed, throttled) =
            (bits & 1 != 0, bits & 2 != 0, bits & 4 != 0, bits & 8 != 0);
        let taken = verdict(sibling, ready, allowed, throttled) == YIELD_ACCEPT;
        assert_eq!(taken, sibling && ready && allowed && !throttled);
    }
}

#[test]
fn a_refusal_names_its_first_reason() {
    assert_eq!(
        verdict(false, false, false, true),
        YIELD_MISS_NOT_SIBLING as i32
    );
    assert_eq!(
        verdict(true, false, false, true),
        YIELD_MISS_NOT_READY as i32
    );
    assert_eq!(
        verdict(true, true, false, true),
        YIELD_MISS_THROTTLED as i32
    );
    assert_eq!(
        verdict(true, true, false, false),
        YIELD_MISS_AFFINITY as i32
    );
}

proptest! {
    /// A loan is what is left of the turn, never more than a slice, and nothing when the turn is over.
    #[test]
    fn a_loan_is_what_is_left(now in 0u64..1 << 60, left in -(1i64 << 40)..1 << 40, slice in 1u64..1 << 40) {
        let now = now + (1 << 41);
        let loan = unsafe { loan_slice(now, now.wrapping_add_signed(left), slice) };
        prop_assert_eq!(loan, (left.max(0) as u64).min(slice));
    }

    /// However often vCPUs hand a turn on, together they run no longer than the turn.
    #[test]
    fn handing_on_does_not_prolong_a_turn(hops in prop::collection::vec(1u64..2_000_000, 1..200)) {
        let slice = 4_000_000;
        let (mut now, mut until) = (1u64 << 40, (1u64 << 40) + slice);
        let end = until;
        for hop in hops {
            now += hop.min(until - now);
            let loan = unsafe { loan_slice(now, until, slice) };
            if loan == 0 {
                break;
            }
            until = now + loan;
        }
        prop_assert!(now <= end && until <= end);
    }
}
