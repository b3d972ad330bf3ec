// SPDX-License-Identifier: GPL-2.0-only
//! Loans to vCPUs that wake: who gets one, and that nobody's share changes.

use cohort_policy::*;
use proptest::prelude::*;

const SLICE: u64 = 2_000_000;
const WINDOW: u64 = 3_000_000_000;

#[test]
fn who_is_half_a_slice_behind_its_siblings_sleeps_more() {
    let sleeps_more = |behind| {
        let task = u64::MAX - 1;
        unsafe { wake_sleeps_more(task, task.wrapping_add(behind), SLICE) }
    };
    assert!(sleeps_more(SLICE));
    assert!(sleeps_more(SLICE / 2));
    assert!(!sleeps_more(SLICE / 2 - 1));
    assert!(!sleeps_more(0));
}

#[test]
fn a_vm_that_is_a_turn_ahead_beyond_its_own_has_no_loan() {
    // Two of its tasks run at once, and a slice costs it what it takes.
    let lends = |ahead| {
        let running = u64::MAX - 1;
        unsafe { wake_lends(running.wrapping_add(ahead), running, SLICE, 2) }
    };
    assert!(lends(0));
    assert!(lends(3 * SLICE));
    assert!(!lends(3 * SLICE + 1));
}

#[test]
fn loans_take_a_quarter_of_a_cpu_and_short_ones_are_few() {
    let loan = unsafe { wake_loan_ns(SLICE) };
    assert_eq!(loan + unsafe { wake_pause_ns(loan, SLICE) }, 4 * loan);
    assert_eq!(unsafe { wake_pause_ns(1_000, SLICE) }, loan);
}

#[test]
fn who_is_stopped_would_have_run_on() {
    let runs_for = |average, ran, sleeps| unsafe { wake_runs_for(average, ran, sleeps) };
    assert_eq!(runs_for(100_000, 20_000, true), 80_000);
    assert_eq!(runs_for(100_000, 20_000, false), 100_000);
    assert_eq!(runs_for(100_000, SLICE, false), SLICE);
    // It is known again after some sleeps that it sleeps soon.
    let average = (0..7).fold(SLICE, |average, _| runs_for(average, 20_000, true));
    assert!(average < unsafe { wake_loan_ns(SLICE) }, "{average}");
}

#[test]
fn who_halts_soon_after_its_ipis_hands_its_cpu_over() {
    let halts_after = |average, after, sleeps| unsafe { wake_halts_after(average, after, sleeps) };
    let hands_over = |average| unsafe { wake_hands_over(average) };
    assert!(hands_over(0)); // nothing is known: it is tried once
    // Whoever goes on, or halts late, does not the next time.
    assert!(!hands_over(halts_after(0, 1_000, false)));
    assert!(!hands_over(halts_after(0, 1_000_000, true)));
    // One that always halts after 5 us does again after a few more times.
    let average = (0..7).fold(4 * HAND_OVER_NS as u64, |average, _| {
        halts_after(average, 5_000, true)
    });
    assert!(hands_over(average), "{average}");
}

/// CPU time of each of `vms` VMs, as wide as the `cpus` that they share by turns, when one vCPU of the first wakes on the CPUs
/// and at the moments of a turn that `wakes` lists, turn after turn, and always uses all that it is lent.
fn cpu_times(vms: usize, cpus: usize, wakes: &[Vec<(usize, u64)>]) -> Vec<u64> {
    let (mut vtimes, mut used) = (vec![0_u64; vms], vec![0_u64; vms]);
    let mut lent_until = vec![0_u64; cpus];
    let cost = unsafe { fair_charge(SLICE, SHARE_ONE as u64 / vms as u64) };
    let loan = unsafe { wake_loan_ns(SLICE) };
    let turns = (WINDOW / SLICE) as usize;
    for turn in 0..turns {
        let start = (turn as u64 + 1) * SLICE;
        let served = (0..vms).min_by_key(|&vm| vtimes[vm]).unwrap();
        let mut lent = 0;
        for &(cpu, at) in &wakes[turn % wakes.len()] {
            let now = start + at;
            let running = vtimes[served] + cost * cpus as u64 * at / SLICE;
            let own = vtimes[0] + cost * lent / SLICE;
            let lends = unsafe { wake_lends(own, running, cost, cpus as u32) };
            if served != 0 && lends && now >= lent_until[cpu % cpus] {
                lent_until[cpu % cpus] = now + loan + unsafe { wake_pause_ns(loan, SLICE) };
                lent += loan;
            }
        }
        let own = SLICE * cpus as u64 - lent;
        for (vm, time) in [(served, own), (0, lent)] {
            used[vm] += time;
            vtimes[vm] += time * vms as u64;
        }
    }
    used
}

proptest! {
    /// Whenever it wakes: over 3 s nobody gets 2 % more or less than its share.
    #[test]
    fn shares_stay(
        vms in 2usize..12,
        cpus in 1usize..8,
        wakes in prop::collection::vec(prop::collection::vec((0usize..8, 0..SLICE * 3 / 4), 0..20), 1..50)
    ) {
        let wakes: Vec<_> = wakes.into_iter().map(|mut turn| { turn.sort_by_key(|wake| wake.1); turn }).collect();
        let used = cpu_times(vms, cpus, &wakes);
        let without = cpu_times(vms, cpus, &[vec![]]);
        let fair = WINDOW as f64 * cpus as f64 / vms as f64;
        for (used, without) in used.iter().zip(without) {
            // A turn more or less at the window's end is no matter of loans.
            let unfair = (*used as f64 - without as f64).abs() - SLICE as f64 * cpus as f64;
            prop_assert!(unfair < 0.02 * fair, "{} instead of {}", used, without);
        }
    }
}
