// SPDX-License-Identifier: GPL-2.0-only
//! The guest speaks of soft lockups or RCU stalls: was a vCPU without a CPU that long, when, who had it; or what did its
//! thread sleep in?

use super::facts::Facts;
use super::words::{duration, moment};
use crate::commands::finding::{Finding, Severity};
use crate::host::arch;
use crate::observer::view::OffCpuView;

const CHECK: &str = "stalls";
/// Linux guests speak of a soft lockup after 20 s, of an RCU stall after 21 s, unless they are set up otherwise.
const LOCKUP_US: u64 = 20_000_000;
/// What is longer is worth a warning: what a guest waits for then waits too.
const LONG_US: u64 = 1_000_000;
pub fn finding(facts: &Facts) -> Finding {
    let off = &facts.all().longest_off_cpu;
    let time = facts.time();
    if off.us < LONG_US {
        return Finding::fine(
            CHECK,
            format!(
                "no vCPU was without a CPU for longer than {} in {time}: lockups that the guest reports of this time are its own",
                duration(off.us)
            ),
        );
    }
    let goes_on = off.goes_on != 0;
    let state = if goes_on { "has been" } else { "was" };
    let until = match (goes_on, off.until_ms) {
        (_, 0) => String::new(),
        (false, at) => format!(" until {}", moment(at)),
        (true, at) => format!(", and still is at {}", moment(at)),
    };
    let (cause, mend) = cause(off, facts);
    let pressure = facts.vm.pressure.map_or(String::new(), |then| {
        format!(
            "; the host's pressure then: I/O {:.0} % some and {:.0} % full, memory {:.0} % some and {:.0} % full",
            then.io_some_pct, then.io_full_pct, then.memory_some_pct, then.memory_full_pct
        )
    });
    let seen = format!(
        "vCPU {} {state} without a CPU for {}{until}: {cause}{pressure}",
        facts.vm.stalled_vcpu,
        duration(off.us)
    );
    let why = match off.us >= LOCKUP_US {
        true => {
            "a Linux guest reports a soft lockup after 20 s and an RCU stall after 21 s: this explains them"
        }
        false => {
            "a guest reports a soft lockup after 20 s: this is not that long, but all that waits for this vCPU stood still as long"
        }
    };
    Finding::new(CHECK, Severity::Warning, seen, why, mend)
}

/// What kept a vCPU from running for most of that time, and what to do.
pub fn cause(off: &OffCpuView, facts: &Facts) -> (String, String) {
    if off.ready_us >= off.slept_us().max(off.limited_us) {
        let who = match (off.taker.as_str(), off.taker_thread.as_str()) {
            ("", _) => String::from("who had it is not known"),
            (_, thread) if thread.starts_with("swapper/") => String::from("its CPU was idle"),
            (taker, thread) => format!("{taker} (thread {thread}) had it"),
        };
        let and_cap = match facts.is_capped_by_cohort() {
            true => ", or Cohort held it back for its cap (see throttled)",
            false => "",
        };
        return (
            format!(
                "it waited {} for one, {who}{and_cap}",
                duration(off.ready_us)
            ),
            String::from(
                "take work off this vCPU's CPUs, real-time threads first (chrt -a -p PID; ps -eLo class,rtprio,psr,comm)",
            ),
        );
    }
    if off.limited_us > off.slept_us() {
        return (
            format!("a cap stopped it for {}", duration(off.limited_us)),
            String::from("see throttled"),
        );
    }
    slept(off, facts)
}

/// What a thread slept in that was ready for less than that.
fn slept(off: &OffCpuView, facts: &Facts) -> (String, String) {
    let time = duration(off.slept_us());
    let syscall = match arch::syscall(off.syscall) {
        Some(name) => format!("the system call {name}"),
        None => format!("system call {}", off.syscall),
    };
    let (cause, mend) = if off.slept("stopped") {
        (
            format!("a signal or a debugger had stopped its process for {time}"),
            String::from("kill -CONT PID, and find out who sends SIGSTOP or attaches to it"),
        )
    } else if off.slept("frozen") {
        (
            format!("its cgroup was frozen for {time}"),
            String::from("find out who writes cgroup.freeze there: a suspend or a backup"),
        )
    } else if off.slept("in-kvm") || off.slept("page") {
        let (what, mend) = in_kvm(off, facts);
        (
            format!("the kernel kept it inside KVM for {time}: {what}"),
            mend,
        )
    } else if off.slept("io") {
        (
            format!("QEMU waited {time} for I/O in this vCPU's own thread, in {syscall}"),
            String::from(
                "give its disks an iothread and aio=native or io_uring, and look at the storage (iostat -x 1)",
            ),
        )
    } else if off.slept("told") {
        (
            format!(
                "QEMU kept it waiting {time} until it is told to go on: the VM is paused (by its manager, a snapshot, a \
                 migration, or as its disk had an error)"
            ),
            String::from("virsh domstate VM --reason says why it is paused; virsh resume VM"),
        )
    } else if off.syscall == arch::FUTEX {
        (
            format!(
                "QEMU kept it waiting {time} for another of its threads, in {syscall} (the global mutex is held)"
            ),
            String::from(
                "look what QEMU's main loop does (cat /proc/PID/stack, iostat -x 1); virsh domstate VM, as with a C library \
                 before glibc 2.34 a paused VM looks the same",
            ),
        )
    } else {
        (
            format!("its thread slept in QEMU for {time}, in {syscall}"),
            String::from("strace -fp PID shows what QEMU does there"),
        )
    };
    (format!("{cause}; not the scheduler"), mend)
}

/// What the kernel waited for while it handled a vCPU's exit, and what to do.
fn in_kvm(off: &OffCpuView, facts: &Facts) -> (String, String) {
    let memory = "give the host memory and the VM none that is swapped (vmstat 1; memory.swap.max of its cgroup)";
    if off.slept("memory") {
        let short = "memory was short when it touched a page";
        return match short_level(facts) {
            Some((path, file)) => (
                format!("{short}, as cgroup {path} has all that its {file} allows"),
                format!("echo max > /sys/fs/cgroup{path}/{file}, or give the VM less memory"),
            ),
            None => (String::from(short), String::from(memory)),
        };
    }
    if off.slept("io") {
        return (
            String::from("it touched a page that had to be read first (swap, or a file)"),
            String::from(memory),
        );
    }
    let comes_from_another = facts.live.as_ref().is_some_and(|live| live.userfaultfd);
    if comes_from_another {
        return (
            String::from(
                "it touched a page that has to come from another process (a userfaultfd: it arrives by a post-copy migration)",
            ),
            String::from(
                "look at the migration: does its source still run, is its network slow (virsh domjobinfo VM, on the source)",
            ),
        );
    }
    if off.slept("page") {
        return (
            String::from(
                "it touched a page that had to be brought first (from swap, a file, or by a post-copy migration)",
            ),
            format!("{memory}, and look for a migration"),
        );
    }
    (
        String::from("a page fault, a migration of its memory, or a lock of KVM"),
        format!("{memory}, and look for a migration"),
    )
}

/// The cgroup of the VM that has no more memory, and the file that says so.
fn short_level(facts: &Facts) -> Option<(&str, &'static str)> {
    let levels = &facts.live.as_ref()?.levels;
    let worst = levels.iter().max_by_key(|it| it.over_high + it.at_max)?;
    let file = match (worst.over_high, worst.at_max) {
        (0, 0) => return None,
        (high, max) if high >= max => "memory.high",
        _ => "memory.max",
    };
    Some((&worst.path, file))
}

#[cfg(test)]
mod tests {
    use super::super::facts::fixture::facts;
    use super::*;
    use crate::observer::view::PressureView;

    fn with(off: OffCpuView) -> Finding {
        let mut facts = facts();
        facts.vm.vm.all.longest_off_cpu = off;
        facts.vm.stalled_vcpu = 1;
        facts.vm.pressure = Some(PressureView {
            io_some_pct: 80.0,
            ..PressureView::default()
        });
        finding(&facts)
    }

    fn slept_as(us: u64, sleep: &[&str], syscall: i64) -> OffCpuView {
        OffCpuView {
            us,
            sleep: sleep.iter().map(ToString::to_string).collect(),
            syscall,
            ..OffCpuView::default()
        }
    }

    #[test]
    fn a_short_wait_rules_it_out() {
        let finding = with(OffCpuView {
            us: 12_000,
            ..OffCpuView::default()
        });
        assert_eq!(finding.severity, Severity::Fine);
        assert!(
            finding.seen.contains("longer than 12 ms in 10.0 s"),
            "{finding:?}"
        );
    }

    #[test]
    fn who_had_the_cpu_and_when_is_said_and_whether_it_is_long_enough() {
        let off = |us| OffCpuView {
            us,
            ready_us: us,
            until_ms: 1_800_000_000_000,
            taker: String::from("/hog"),
            taker_thread: String::from("stress"),
            ..OffCpuView::default()
        };
        let long = with(off(22_000_000));
        assert!(
            long.seen
                .contains("vCPU 1 was without a CPU for 22.0 s until 2027-01-15T08:00:00Z")
        );
        assert!(
            long.seen.contains("/hog (thread stress) had it"),
            "{long:?}"
        );
        assert!(long.seen.contains("I/O 80 % some"), "{long:?}");
        assert!(long.why.contains("explains"));
        assert!(with(off(4_000_000)).why.contains("not that long"));
    }

    #[test]
    fn what_its_thread_slept_in_is_told_apart() {
        for (sleep, syscall, words) in [
            (&["stopped"] as &[&str], 16, "stopped its process"),
            (&["frozen"], 16, "frozen"),
            (&["in-kvm", "io"], 16, "had to be read first"),
            (&["in-kvm", "memory", "io"], 16, "memory was short"),
            (&["in-kvm"], 16, "inside KVM"),
            (
                &["io", "uninterruptible"],
                18,
                "for I/O in this vCPU's own thread, in the system call pwrite64",
            ),
            (&["in-kvm", "page"], 16, "had to be brought first"),
            (&["told"], arch::FUTEX, "the VM is paused"),
            (&[], arch::FUTEX, "global mutex"),
            (&[], 999, "in system call 999"),
        ] {
            let finding = with(slept_as(3_000_000, sleep, syscall));
            assert!(finding.seen.contains(words), "{words}: {finding:?}");
            assert!(finding.seen.contains("not the scheduler"), "{finding:?}");
        }
    }
}
