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

    /// Equal VMs of one vCPU that begin wherever they happen to be: each gets the same, whatever the number of domains
    /// and of VMs, and though no domain may hold as many as it has CPUs.
    #[test]
    fn equal_vms_get_equal_time_across_domains(
        domains in 2usize..5,
        cpus in 1usize..4,
        more in 1usize..8,
        seed in prop::collection::vec(0usize..1000, 24),
    ) {
        let vms = domains * cpus + more;
        let mut host = Simulated::new(domains, cpus, (0..vms).map(|vm| seed[vm % 24]));
        let slices = 3_000;
        (0..slices).for_each(|now| host.turn(now));
        let fair = slices as f64 * (domains * cpus) as f64 / vms as f64;
        for used in &host.used {
            prop_assert!((*used as f64 / fair - 1.0).abs() < 0.02, "{used} of {fair}: {:?}", host.used);
        }
        prop_assert!(host.moves < slices * domains * cpus / 2, "{} moves", host.moves);
    }
}

/// A host whose domains have `cpus` each, in turns of one slice. VMs of one vCPU stand where `used` slices put them.
struct Simulated {
    domains: usize,
    cpus: usize,
    domain_of: Vec<usize>,
    used: Vec<u64>,
    moves: usize,
}

impl Simulated {
    fn new(domains: usize, cpus: usize, seeds: impl Iterator<Item = usize>) -> Self {
        let domain_of: Vec<usize> = seeds.map(|seed| seed % domains).collect();
        let used = vec![0; domain_of.len()];
        Self {
            domains,
            cpus,
            domain_of,
            used,
            moves: 0,
        }
    }

    /// Of those in `domain` that do not run yet, who is furthest behind.
    fn first(&self, domain: usize, running: &[usize]) -> Option<usize> {
        (0..self.used.len())
            .filter(|vm| self.domain_of[*vm] == domain && !running.contains(vm))
            .min_by_key(|vm| self.used[*vm])
    }

    fn turn(&mut self, now: usize) {
        let mut running: Vec<usize> = Vec::new();
        for domain in 0..self.domains {
            for cpu in 0..self.cpus {
                let here = self.first(domain, &running);
                let number = domain * self.cpus + cpu;
                // CPUs do not all look at the same time.
                let looks = (now + number).is_multiple_of(BALANCE_SLICES as usize);
                let other =
                    (domain + 1 + (now + number) / BALANCE_SLICES as usize % (self.domains - 1))
                        % self.domains;
                let far = (looks || here.is_none())
                    .then(|| self.first(other, &running))
                    .flatten();
                let chosen = match (here, far) {
                    (Some(here), Some(far)) if !self.comes(far, here, domain, &running) => {
                        Some(here)
                    }
                    (here, None) => here,
                    (_, far) => far,
                };
                if let Some(vm) = chosen {
                    self.moves += usize::from(self.domain_of[vm] != domain);
                    self.domain_of[vm] = domain;
                    running.push(vm);
                }
            }
        }
        running.iter().for_each(|vm| self.used[*vm] += 1);
    }

    /// Does `far` come in the place of `here`?
    fn comes(&self, far: usize, here: usize, domain: usize, running: &[usize]) -> bool {
        let waiting = (0..self.used.len())
            .filter(|vm| self.domain_of[*vm] == domain && !running.contains(vm))
            .count();
        self.used[far] * SLICE + margin(1, waiting > 1, 10) < self.used[here] * SLICE
    }
}
