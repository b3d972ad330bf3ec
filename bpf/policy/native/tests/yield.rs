// SPDX-License-Identifier: GPL-2.0-only
//! Directed yields: which offers are taken.

use cohort_policy::*;

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
