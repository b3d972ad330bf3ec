// SPDX-License-Identifier: GPL-2.0-only
//! Directed yields: which offers are taken, who is preferred, and what a loan is.

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

    /// While one CPU serves all turns of a VM, the other one being late, each sibling passes the first in the queue at
    /// most once, so nobody is left out for longer than twice round its siblings. Turns are a little shorter or longer.
    #[test]
    fn who_was_left_out_of_a_turn_is_not_passed_again(
        at_home in prop::collection::vec(any::<bool>(), 2..6),
        lengths in prop::collection::vec(3_800_000u64..4_200_000, 100),
    ) {
        let near = unsafe { home_near(4_000_000) };
        let mut vtimes = vec![0; at_home.len()];
        let mut left_out = vec![0; at_home.len()];
        for length in lengths {
            let by_vtime = |vcpu: &usize| (vtimes[*vcpu], *vcpu);
            let vcpus = || 0..vtimes.len();
            let first = vcpus().min_by_key(by_vtime).expect("vCPUs");
            let home = vcpus().filter(|vcpu| at_home[*vcpu]).min_by_key(by_vtime);
            let runs = home.filter(|home| vtimes[*home] <= vtimes[first] + near).unwrap_or(first);
            vtimes[runs] += length;
            for turns in &mut left_out {
                *turns += 1;
            }
            left_out[runs] = 0;
            prop_assert!(left_out.iter().all(|turns| *turns <= 2 * at_home.len()), "{left_out:?}");
        }
    }
}
