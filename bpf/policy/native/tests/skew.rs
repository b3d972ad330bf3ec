// SPDX-License-Identifier: GPL-2.0-only
//! Skew: no vCPU gets farther ahead of a waiting sibling than it should, whoever runs when.

use cohort_policy::*;
use proptest::prelude::*;

const MS: u64 = 1_000_000;
const CHECK: u64 = MS;
const LIMIT: u64 = 3 * MS;
const RESUME: u64 = 2 * MS;

/// A VM on a host that gives it `cpus` CPUs for turns of these lengths: in each of them its slowest vCPUs run first,
/// and it is looked each [`CHECK`] whether one must make room. Returns how far any was ahead of the slowest one that
/// waited, at most.
fn greatest_lead(vcpus: usize, cpus: usize, turns: &[u64]) -> u64 {
    let mut vtimes = vec![0_u64; vcpus];
    let mut greatest = 0;
    for &turn in turns {
        let mut order: Vec<usize> = (0..vcpus).collect();
        order.sort_by_key(|&vcpu| vtimes[vcpu]);
        let mut running = order[..cpus.min(vcpus)].to_vec();
        let mut left = turn;
        while left > 0 {
            let step = left.min(CHECK);
            left -= step;
            running.iter().for_each(|&vcpu| vtimes[vcpu] += step);
            for i in 0..running.len() {
                let waits = |vcpu: &usize| !running.contains(vcpu);
                let slowest = (0..vcpus).filter(waits).min_by_key(|&vcpu| vtimes[vcpu]);
                let Some(slowest) = slowest else { break };
                let ahead = unsafe { skew_ahead(vtimes[running[i]], vtimes[slowest]) };
                greatest = greatest.max(ahead);
                if unsafe { skew_stops(ahead, LIMIT) } {
                    running[i] = slowest;
                }
            }
        }
    }
    greatest
}

#[test]
fn who_is_behind_is_not_ahead() {
    assert_eq!(unsafe { skew_ahead(5, 7) }, 0);
    assert_eq!(unsafe { skew_ahead(7, 5) }, 2);
    // Across a wrap.
    assert_eq!(unsafe { skew_ahead(1, u64::MAX) }, 2);
}

#[test]
fn who_is_stopped_does_not_go_on_at_once() {
    assert!(unsafe { skew_stops(LIMIT + 1, LIMIT) && !skew_stops(LIMIT, LIMIT) });
    assert!(unsafe { skew_ends(RESUME, RESUME) && !skew_ends(LIMIT, RESUME) });
}

proptest! {
    /// However wide the VM is, and however long its turns are: beyond the limit only by what passes between two looks.
    #[test]
    fn nobody_gets_far_ahead(vcpus in 2usize..64, cpus in 1usize..16, turns in prop::collection::vec(1..20 * MS, 1..200)) {
        let lead = greatest_lead(vcpus, cpus, &turns);
        prop_assert!(lead <= LIMIT + CHECK, "{} us", lead / 1000);
    }
}
