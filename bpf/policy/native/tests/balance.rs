// SPDX-License-Identifier: GPL-2.0-only
//! Moves between domains: single values, then whole hosts on which CPUs look into each other's domains.

use cohort_policy::*;
use proptest::prelude::*;

const SLICE: u64 = 4_000_000;

fn margin(at_once: u32, contested: bool, distance: u32) -> u64 {
    unsafe { balance_margin(SLICE, at_once, contested, distance) }
}

#[test]
fn who_shares_a_cpu_with_nobody_is_joined_sooner() {
    assert_eq!(margin(1, false, 10), SLICE);
    assert_eq!(margin(1, true, 10), 3 * SLICE);
}

#[test]
fn the_farther_the_memory_the_more_a_group_must_be_behind() {
    assert_eq!(margin(1, false, 20), 3 * SLICE);
    assert!(margin(1, true, 32) > margin(1, true, 21));
    assert_eq!(
        margin(1, true, 0),
        margin(1, true, 10),
        "no table: one node"
    );
}

proptest! {
    #[test]
    fn a_wider_vm_must_be_further_behind(at_once in 1u32..1024, contested: bool, distance in 10u32..255) {
        prop_assert!(margin(at_once + 1, contested, distance) > margin(at_once, contested, distance));
    }

    #[test]
    fn a_cpu_looks_once_in_four_turns(turn in 0u64..1 << 40, cpu in 0u32..1024) {
        let looks = (turn..turn + 4).filter(|turn| unsafe { balance_looks(*turn, cpu) });
        prop_assert_eq!(looks.count(), 1);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Equal VMs of one vCPU that begin wherever they happen to be: each gets the same, whatever the number of domains,
    /// of their CPUs and of VMs; and each CPU takes one from elsewhere every 56 ms at most.
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
        (0..turns).for_each(|now| host.turn(now));
        let fair = turns as f64 * all as f64 / vms as f64;
        for used in &host.used {
            prop_assert!((*used as f64 / fair - 1.0).abs() < 0.03, "{used} of {fair}: {:?}", host.used);
        }
        prop_assert!(host.moves * 14 < turns * all, "{} moves of {all} CPUs in {turns} turns", host.moves);
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
    /// Of each CPU: the VM that it ran last.
    ran: Vec<Option<usize>>,
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
            ran: vec![None; domains * cpus],
            moves: 0,
        }
    }

    /// Those that wait in `domain`.
    fn waiting(&self, domain: usize) -> impl Iterator<Item = usize> {
        (0..self.used.len()).filter(move |vm| self.domain_of[*vm] == domain && !self.runs[*vm])
    }

    /// Of these, who is furthest behind.
    fn first(&self, domain: usize) -> Option<usize> {
        self.waiting(domain).min_by_key(|vm| self.used[*vm])
    }

    fn turn(&mut self, now: usize) {
        for domain in 0..self.domains {
            for cpu in domain * self.cpus..(domain + 1) * self.cpus {
                // Until its CPU comes to choose, a VM runs on: nobody can take it.
                if let Some(vm) = self.ran[cpu] {
                    self.runs[vm] = false;
                }
                self.ran[cpu] = self.choose(domain, cpu, now);
                if let Some(vm) = self.ran[cpu] {
                    self.moves += usize::from(self.domain_of[vm] != domain);
                    self.domain_of[vm] = domain;
                    self.runs[vm] = true;
                }
            }
        }
        for vm in 0..self.used.len() {
            self.used[vm] += u64::from(self.runs[vm]);
        }
    }

    /// Whom `cpu` of `domain` runs next: one of its domain, or one of the other domain that it looks into.
    fn choose(&self, domain: usize, cpu: usize, now: usize) -> Option<usize> {
        let here = self.first(domain);
        let looks = unsafe { balance_looks(now as u64, cpu as u32) };
        if here.is_some() && !looks {
            return here;
        }
        let step = now / BALANCE_TURNS as usize % (self.domains - 1);
        let far = self.first((domain + 1 + step) % self.domains);
        let (Some(here), Some(far)) = (here, far) else {
            return here.or(far);
        };
        let contested = self.waiting(domain).count() > 1;
        let comes = self.used[far] * SLICE + margin(1, contested, 10) < self.used[here] * SLICE;
        Some(if comes { far } else { here })
    }
}
