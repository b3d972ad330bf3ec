// SPDX-License-Identifier: GPL-2.0-only
//! A game stutters: is the VM slowed for split locks, are the host's timers coarse, do its CPUs sleep deeply?

use super::facts::{Facts, Live};
use super::not_recorded;
use super::words::duration;
use crate::commands::finding::{Finding, Severity};

const CHECK: &str = "stutter";
/// A CPU that takes longer than this to wake makes a frame late now and then, us.
const DEEP_US: u64 = 100;

pub fn finding(facts: &Facts) -> Finding {
    let Some(live) = &facts.live else {
        return not_recorded(
            CHECK,
            "holds neither the kernel's log nor idle states",
            "a split lock costs a vCPU 10 ms",
        );
    };
    split_locks(facts, live)
        .or_else(|| coarse_timers(live))
        .or_else(|| deep_sleep(live))
        .unwrap_or_else(|| {
            let log = match live.split_lock_threads {
                Some(_) => "the kernel's log names no thread of it for split locks",
                None => "the kernel's log cannot be read",
            };
            let timers = match live.timers_are_fine {
                Some(_) => "timers are of high resolution",
                None => "the resolution of timers is not known",
            };
            Finding::fine(
                CHECK,
                format!("{log}; {timers}; no CPU entered an idle state that takes {DEEP_US} us or more to leave"),
            )
        })
}

fn split_locks(facts: &Facts, live: &Live) -> Option<Finding> {
    let own = |tid: &&u32| live.threads.iter().any(|thread| thread.tid == **tid);
    let caught = live.split_lock_threads.iter().flatten().filter(own).count();
    let off = &facts.all().longest_off_cpu;
    let is_else = off.slept("uninterruptible") || off.slept("page");
    let slept = match off.slept("in-kvm") && !is_else {
        true => format!(
            "; in {} a vCPU slept inside KVM for up to {}",
            facts.time(),
            duration(off.slept_us())
        ),
        false => String::new(),
    };
    let mitigated = match live.split_lock_mitigate {
        true => "each of them then costs the vCPU 10 ms and more (kernel.split_lock_mitigate is 1)",
        false => {
            "they are reported only (kernel.split_lock_mitigate is 0); on the hardware each still stops all CPUs' memory"
        }
    };
    (caught > 0).then(|| {
        Finding::new(
            CHECK,
            Severity::Warning,
            format!("the kernel caught {caught} of its threads with split locks since the boot; it names each once{slept}"),
            mitigated,
            "sysctl kernel.split_lock_mitigate=0, if its tenant is trusted; the program in the guest that does it is at fault",
        )
    })
}

fn coarse_timers(live: &Live) -> Option<Finding> {
    (live.timers_are_fine == Some(false)).then(|| {
        Finding::new(
            CHECK,
            Severity::Warning,
            "the host's timers are as coarse as its ticks",
            "what a guest wants to happen in 1 ms happens at the next tick, up to 4 ms later",
            "remove highres=off and nohz=off from the kernel's command line; journalctl -k -g clocksource",
        )
    })
}

fn deep_sleep(live: &Live) -> Option<Finding> {
    let deep = live
        .idle_states
        .iter()
        .filter(|(_, state)| state.exit_latency_us >= DEEP_US && state.entered > 0);
    let deep: Vec<String> = deep
        .map(|(name, state)| {
            format!(
                "{} times into {name}, which takes {} us to leave",
                state.entered, state.exit_latency_us
            )
        })
        .collect();
    (!deep.is_empty()).then(|| {
        Finding::new(
            CHECK,
            Severity::Note,
            format!("the host's CPUs went {}", deep.join(", ")),
            "a vCPU that wakes on such a CPU is late by as much",
            format!("cpupower idle-set -D {DEEP_US}, for as long as it matters; it costs power"),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::super::facts::fixture::{facts, live};
    use super::*;
    use crate::host::idle_states::IdleState;

    #[test]
    fn split_locks_of_this_vm_are_counted_and_those_of_others_are_not() {
        let mut facts = facts();
        live(&mut facts).split_lock_threads = Some(vec![8, 99]);
        live(&mut facts).split_lock_mitigate = true;
        let found = finding(&facts);
        assert_eq!(found.severity, Severity::Warning);
        assert!(found.seen.contains("caught 1 of its threads"), "{found:?}");
        assert!(found.why.contains("10 ms"), "{found:?}");
        live(&mut facts).split_lock_threads = Some(vec![99]);
        assert_eq!(finding(&facts).severity, Severity::Fine);
    }

    #[test]
    fn coarse_timers_and_deep_sleep_are_told() {
        let mut facts = facts();
        let deep = IdleState {
            exit_latency_us: 133,
            entered: 70,
        };
        live(&mut facts)
            .idle_states
            .insert(String::from("C6"), deep);
        let found = finding(&facts);
        assert_eq!(found.severity, Severity::Note);
        assert!(found.seen.contains("70 times into C6"), "{found:?}");
        live(&mut facts).timers_are_fine = Some(false);
        assert_eq!(finding(&facts).severity, Severity::Warning);
    }
}
