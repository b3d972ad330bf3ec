// SPDX-License-Identifier: GPL-2.0-only
//! Moves between domains: single values, then whole hosts on which CPUs look into each other's domains.

use cohort_policy::*;
use proptest::prelude::*;

const SLICE: u64 = 2_000_000;

fn margin(at_once: u32, distance: u32) -> u64 {
    unsafe { balance_margin(SLICE, at_once, distance) }
}

#[test]
fn who_has_a_cpu_at_a_time_moves_when_it_is_two_slices_behind() {
    assert_eq!(margin(1, 10), 2 * SLICE);
}

#[test]
fn the_farther_the_memory_the_more_a_group_must_be_behind() {
    assert_eq!(margin(1, 20), 3 * SLICE);
    assert!(margin(1, 32) > margin(1, 21));
    assert_eq!(margin(1, 0), margin(1, 10), "no table: one node");
}

proptest! {
    /// By as much as it may be for no other reason than that more of its tasks run at the same time.
    #[test]
    fn a_wider_vm_must_be_further_behind(at_once in 1u32..1024, distance in 10u32..255) {
        prop_assert_eq!(margin(at_once + 1, distance), margin(at_once, distance) + SLICE);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Equal VMs of one vCPU that begin wherever they happen to be: each gets the same, whatever the number of domains,
    /// of their CPUs and of VMs; and of the turns of a CPU few are somebody's from elsewhere.
    #[test]
    fn equal_vms_get_equal_time_across_domains(
        domains in 2usize..5,
        cpus in 1usize..9,
        over in 1usize..200,
        seed in prop::collection::vec(0usize..1000, 24),
    ) {
        let all = domains * cpus;
        let vms = all + (all * over).div_ceil(100);
        let mut host = Simulated::new(domains, cpus, (0..vms).map(|vm| seed[vm % 24]));
        let turns = 1_500;
        (0..turns).for_each(|_| host.turn());
        let fair = turns as f64 * all as f64 / vms as f64;
        for used in &host.used {
            prop_assert!((*used as f64 / fair - 1.0).abs() < 0.03, "{used} of {fair}: {:?}", host.used);
        }
        prop_assert!(host.moves * 6 < turns * all, "{} moves of {all} CPUs in {turns} turns", host.moves);
    }
}

/// A host whose domains have `cpus` each, in turns of one slice, and VMs of one vCPU.
struct Simulated {
    domains: usize,
    cpus: usize,
    /// Of each VM: where it waits or runs, for how many turns it ran, whether it does now.
    domain_of: Vec<usize>,
    used: Vec<u64>,
    runs: Vec<bool>,
    /// Of each domain: which other one it looked into last.
    far: Vec<usize>,
    moves: usize,
}

impl Simulated {
    fn new(domains: usize, cpus: usize, seeds: impl Iterator<Item = usize>) -> Self {
        let domain_of: Vec<usize> = seeds.map(|seed| seed % domains).collect();
        let vms = domain_of.len();
        Self {
            domains,
            cpus,
            domain_of,
            used: vec![0; vms],
            runs: vec![false; vms],
            far: vec![0; domains],
            moves: 0,
        }
    }

    /// Those of `domain` that run, or do not, in the order in which they come.
    fn of(&self, domain: usize, runs: bool) -> Vec<usize> {
        let is_one = |vm: &usize| self.domain_of[*vm] == domain && self.runs[*vm] == runs;
        let mut vms: Vec<usize> = (0..self.used.len()).filter(is_one).collect();
        vms.sort_by_key(|vm| self.used[*vm]);
        vms
    }

    /// All domains make their plans, and then look into one other each.
    fn turn(&mut self) {
        self.runs.fill(false);
        for domain in 0..self.domains {
            let first = self.of(domain, false).into_iter().take(self.cpus);
            first.for_each(|vm| self.runs[vm] = true);
        }
        (0..self.domains).for_each(|domain| self.look_far(domain));
        for vm in 0..self.used.len() {
            self.used[vm] += u64::from(self.runs[vm]);
        }
    }

    fn look_far(&mut self, domain: usize) {
        self.far[domain] = (self.far[domain] + 1) % self.domains;
        if self.far[domain] == domain {
            self.far[domain] = (domain + 1) % self.domains;
        }
        let Some(left) = self.of(self.far[domain], false).first().copied() else {
            return;
        };
        let served = self.of(domain, true);
        if served.len() == self.cpus {
            let last = served[self.cpus - 1];
            if self.used[left] * SLICE + margin(1, 10) >= self.used[last] * SLICE {
                return;
            }
            self.runs[last] = false;
        }
        self.domain_of[left] = domain;
        self.runs[left] = true;
        self.moves += 1;
    }
}
