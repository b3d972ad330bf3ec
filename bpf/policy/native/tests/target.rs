// SPDX-License-Identifier: GPL-2.0-only
//! Directed yields: which offers are taken, and who is preferred.

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

fn rank(receiver: bool, interrupt: bool, kernel: bool, offered: bool) -> u32 {
    unsafe {
        target_rank(&target_facts {
            receiver,
            interrupt,
            kernel,
            offered,
        })
    }
}

/// The order of the requirements: whose answer is waited for, pending interrupt, kernel mode, KVM's own, anybody.
#[test]
fn the_better_reason_decides_whatever_else_holds() {
    for bits in 0..8u32 {
        let (a, b, c) = (bits & 1 != 0, bits & 2 != 0, bits & 4 != 0);
        assert_eq!(rank(true, a, b, c), TARGET_RECEIVER);
        assert_eq!(rank(false, true, a, b), TARGET_INTERRUPT);
        assert_eq!(rank(false, false, true, a), TARGET_KERNEL);
    }
    assert_eq!(rank(false, false, false, true), TARGET_OFFERED);
    assert_eq!(rank(false, false, false, false), TARGET_READY);
}

#[test]
fn among_equals_kvms_candidate_stays() {
    let replaces = |rank, offered, best| unsafe { target_replaces(rank, offered, best) };
    let (ready, kernel) = (TARGET_READY, TARGET_KERNEL);
    assert!(replaces(kernel, false, ready));
    assert!(!replaces(ready, true, kernel), "the better one stays");
    assert!(replaces(kernel, true, kernel), "KVM's own among equals");
    assert!(!replaces(kernel, false, kernel), "the first among equals");
}
