// SPDX-License-Identifier: GPL-2.0-only
//! Where vCPUs are pinned: do the VMM's or vhost's threads run on their CPUs, and do unpinned ones share an isolated CPU
//! because nobody balances load there? Both lose packets.

use super::facts::{Facts, Live};
use super::not_recorded;
use super::words::duration;
use crate::commands::finding::{Finding, Severity};
use crate::host::threads::{Role, Thread};
use std::collections::{BTreeMap, BTreeSet};

const CHECK: &str = "pinning";
/// A thread that ran less than this part of the time takes nothing from a vCPU.
const NOTICED: f64 = 0.001;

pub fn finding(facts: &Facts) -> Finding {
    let Some(live) = &facts.live else {
        return not_recorded(
            CHECK,
            "does not hold where threads may run",
            "threads of the VMM on the CPUs of pinned vCPUs lose packets",
        );
    };
    if let Some(finding) = stacked(live) {
        return finding;
    }
    let pinned: BTreeSet<usize> = live
        .vcpus()
        .filter(|vcpu| vcpu.cpus.len() == 1)
        .flat_map(|vcpu| vcpu.cpus.iter().copied())
        .collect();
    if pinned.is_empty() {
        return Finding::fine(
            CHECK,
            "no vCPU is pinned to a CPU, so nothing has to be kept off one",
        );
    }
    let window_ns = facts.vm.ms as f64 * 1e6;
    let ran = |thread: &Thread| thread.ran_ns as f64 > NOTICED * window_ns;
    let intrudes = |thread: &&Thread| {
        let there = thread.last_cpu.is_some_and(|cpu| pinned.contains(&cpu));
        // A worker that has no other CPU is there whenever there are packets.
        let waits = thread.role == Role::Vhost && thread.cpus.is_subset(&pinned);
        waits || (ran(thread) && there)
    };
    let intruders: Vec<&Thread> = live.others().filter(intrudes).collect();
    if intruders.is_empty() {
        return Finding::fine(
            CHECK,
            format!(
                "none of its {} other threads ran on CPUs {}, to which vCPUs are pinned",
                live.others().count(),
                list(&pinned)
            ),
        );
    }
    let seen: Vec<String> = intruders
        .iter()
        .map(|thread| {
            format!(
                "{} (thread {}) may run on CPUs {}, was last on CPU {}, ran {} and waited {}",
                thread.name,
                thread.tid,
                list(&thread.cpus),
                thread
                    .last_cpu
                    .map_or(String::from("?"), |cpu| cpu.to_string()),
                duration(thread.ran_ns / 1000),
                duration(thread.waited_ns / 1000)
            )
        })
        .collect();
    let severity = match intruders.iter().any(|thread| ran(thread)) {
        true => Severity::Warning,
        // It slept all the time, this time.
        false => Severity::Note,
    };
    Finding::new(
        CHECK,
        severity,
        format!(
            "vCPUs are pinned to CPUs {}, and there runs {}",
            list(&pinned),
            seen.join("; ")
        ),
        "whenever such a thread moves packets the vCPU has no CPU, and the other way round: the queues between them overflow",
        format!(
            "bind them to CPUs without pinned vCPUs: virsh emulatorpin {} CPUS, virsh iothreadpin; vhost: taskset -pc CPUS {}",
            facts.name(),
            intruders[0].tid
        ),
    )
}

/// vCPUs that may run on several isolated CPUs and are on the same: they stay where they were started.
fn stacked(live: &Live) -> Option<Finding> {
    let mut on: BTreeMap<usize, Vec<&Thread>> = BTreeMap::new();
    let unbalanced = |vcpu: &&Thread| vcpu.cpus.len() > 1 && vcpu.cpus.is_subset(&live.isolated);
    for vcpu in live.vcpus().filter(unbalanced) {
        on.entry(vcpu.last_cpu?).or_default().push(vcpu);
    }
    let (cpu, vcpus) = on.iter().max_by_key(|(_, vcpus)| vcpus.len())?;
    let first = vcpus.first()?;
    if vcpus.len() < 2 {
        return None;
    }
    let names: Vec<&str> = vcpus.iter().map(|vcpu| vcpu.name.as_str()).collect();
    let waited: u64 = vcpus.iter().map(|vcpu| vcpu.waited_ns / 1000).sum();
    Some(Finding::new(
        CHECK,
        Severity::Warning,
        format!(
            "{} are all on CPU {cpu} and waited {} for it, though they may run on CPUs {}; those are isolated",
            names.join(", "),
            duration(waited),
            list(&first.cpus)
        ),
        "between isolated CPUs (isolcpus, isolated cpusets) the kernel balances no load: a thread stays where it began",
        "pin each vCPU to a CPU of its own (virsh vcpupin VM VCPU CPU), or take these CPUs out of isolcpus",
    ))
}

/// CPU numbers as the kernel writes them: "0-3,7".
fn list(cpus: &BTreeSet<usize>) -> String {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for &cpu in cpus {
        match ranges.last_mut() {
            Some((_, end)) if *end + 1 == cpu => *end = cpu,
            _ => ranges.push((cpu, cpu)),
        }
    }
    let text = |&(begin, end): &(usize, usize)| match begin == end {
        true => begin.to_string(),
        false => format!("{begin}-{end}"),
    };
    let ranges: Vec<String> = ranges.iter().map(text).collect();
    ranges.join(",")
}

#[cfg(test)]
mod tests {
    use super::super::facts::fixture::{facts, live, thread};
    use super::*;

    /// Both vCPUs pinned, to CPUs 2 and 3.
    fn pinned() -> Facts {
        let mut facts = facts();
        for (thread, cpu) in live(&mut facts).threads[1..].iter_mut().zip(2..) {
            thread.cpus = BTreeSet::from([cpu]);
            thread.last_cpu = Some(cpu);
        }
        facts
    }

    #[test]
    fn without_pins_there_is_nothing_to_keep_apart() {
        assert!(finding(&facts()).seen.starts_with("no vCPU is pinned"));
    }

    #[test]
    fn a_main_loop_elsewhere_is_fine_and_one_on_a_vcpus_cpu_is_not() {
        let mut facts = pinned();
        live(&mut facts).threads[0].ran_ns = 900_000_000;
        let fine = finding(&facts);
        assert_eq!(fine.severity, Severity::Fine, "{fine:?}");
        live(&mut facts).threads[0].last_cpu = Some(3);
        let found = finding(&facts);
        assert_eq!(found.severity, Severity::Warning);
        assert!(found.seen.contains("pinned to CPUs 2-3, and there runs qemu (thread 7) may run on CPUs 0-3, was last on CPU 3"));
    }

    #[test]
    fn a_vhost_worker_that_has_no_other_cpu_is_found_though_it_slept() {
        let mut facts = pinned();
        let mut vhost = thread(11, "vhost-7", Role::Vhost);
        vhost.cpus = BTreeSet::from([2]);
        live(&mut facts).threads.push(vhost);
        let found = finding(&facts);
        assert_eq!(found.severity, Severity::Note);
        assert!(found.seen.contains("vhost-7 (thread 11)"), "{found:?}");
    }

    #[test]
    fn vcpus_that_share_an_isolated_cpu_are_found() {
        let mut facts = facts();
        live(&mut facts).isolated = (0..4).collect();
        let found = finding(&facts);
        assert!(
            found.seen.contains("CPU 0/KVM, CPU 1/KVM are all on CPU 0"),
            "{found:?}"
        );
        live(&mut facts).threads[2].last_cpu = Some(1);
        assert_eq!(finding(&facts).severity, Severity::Fine);
        live(&mut facts).isolated.clear();
        live(&mut facts).threads[2].last_cpu = Some(0);
        assert_eq!(finding(&facts).severity, Severity::Fine);
    }
}
