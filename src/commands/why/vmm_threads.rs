// SPDX-License-Identifier: GPL-2.0-only
//! Do the VMM's own threads (main loop, consoles, I/O) and vhost's wait for a CPU? Consoles freeze then, though vCPUs run.

use super::facts::Facts;
use super::not_recorded;
use super::words::duration;
use crate::commands::finding::{Finding, Severity};
use crate::host::threads::Thread;

const CHECK: &str = "vmm-threads";
/// One waits noticeably if it does for this part of the time,
const NOTICED: f64 = 0.01;
/// and for this part of the time in which it wanted a CPU.
const OF_WANTED: f64 = 0.5;

pub fn finding(facts: &Facts) -> Finding {
    let Some(live) = &facts.live else {
        return not_recorded(
            CHECK,
            "does not hold the VMM's own threads",
            "if those wait for a CPU, consoles freeze though vCPUs run",
        );
    };
    let window_ns = facts.vm.ms as f64 * 1e6;
    let waits = |thread: &&Thread| {
        let (ran, waited) = (thread.ran_ns as f64, thread.waited_ns as f64);
        waited > NOTICED * window_ns && waited > OF_WANTED * (ran + waited)
    };
    let mut waiting: Vec<&Thread> = live.others().filter(waits).collect();
    if waiting.is_empty() {
        let sum = |ns: fn(&Thread) -> u64| live.others().map(ns).sum::<u64>() / 1000;
        return Finding::fine(
            CHECK,
            format!(
                "they do not wait: its {} threads that are no vCPUs ran {} and waited {} for a CPU",
                live.others().count(),
                duration(sum(|thread| thread.ran_ns)),
                duration(sum(|thread| thread.waited_ns)),
            ),
        );
    }
    waiting.sort_by_key(|thread| std::cmp::Reverse(thread.waited_ns));
    let seen: Vec<String> = waiting
        .iter()
        .map(|thread| {
            let (ran, waited) = (thread.ran_ns / 1000, thread.waited_ns / 1000);
            let which = if thread.tid == facts.tgid {
                ", its main loop,"
            } else {
                ""
            };
            format!(
                "{} (thread {}){which} ran {} and waited {} for a CPU",
                thread.name,
                thread.tid,
                duration(ran),
                duration(waited)
            )
        })
        .collect();
    Finding::new(
        CHECK,
        Severity::Warning,
        seen.join("; "),
        "consoles, VNC, disks and network wait for these threads, however much the vCPUs run",
        format!(
            "let them run on more CPUs (virsh emulatorpin {} CPUS, taskset -pc CPUS {}), or keep others off theirs",
            facts.name(),
            waiting[0].tid
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::super::facts::fixture::{facts, live};
    use super::*;

    #[test]
    fn a_main_loop_that_waits_is_found_and_a_vcpu_is_none() {
        let mut facts = facts();
        live(&mut facts).threads[1].waited_ns = 9_000_000_000;
        let fine = finding(&facts);
        assert_eq!(fine.severity, Severity::Fine, "{fine:?}");
        assert!(fine.seen.contains("its 1 threads"), "{fine:?}");
        let main_loop = &mut live(&mut facts).threads[0];
        (main_loop.ran_ns, main_loop.waited_ns) = (60_000_000, 400_000_000);
        let found = finding(&facts);
        assert_eq!(found.severity, Severity::Warning);
        assert_eq!(
            found.seen,
            "qemu (thread 7), its main loop, ran 60 ms and waited 400 ms for a CPU"
        );
    }

    #[test]
    fn a_thread_that_works_much_may_wait_a_little() {
        let mut facts = facts();
        let main_loop = &mut live(&mut facts).threads[0];
        (main_loop.ran_ns, main_loop.waited_ns) = (6_000_000_000, 400_000_000);
        assert_eq!(finding(&facts).severity, Severity::Fine);
    }

    #[test]
    fn a_recording_does_not_know() {
        let mut facts = facts();
        facts.live = None;
        assert!(finding(&facts).seen.starts_with("not known"));
    }
}
