// SPDX-License-Identifier: GPL-2.0-only
//! What a thread sleeps in, as procfs shows it at one moment. What a thread slept in before is known to who watches it only.

use super::arch;
use std::fs;
use std::path::Path;

/// The operation of the system call futex that waits for a word of another thread: FUTEX_WAIT_BITSET. C libraries use it for
/// condition variables, and FUTEX_WAIT for locks; glibc since 2.34.
const FUTEX_WAIT_BITSET: u64 = 9;
/// Of an operation: which one it is, without its flags.
const FUTEX_COMMAND: u64 = 0x7f;

/// By which functions of the kernel a sleep is told, and how.
const SLEEPS: [(&str, &str); 8] = [
    ("kvm_vcpu_ioctl", "in-kvm"),
    ("kvm_vcpu_block", "halted"),
    ("handle_userfault", "page"),
    ("do_signal_stop", "stopped"),
    ("ptrace_stop", "stopped"),
    ("do_freezer_trap", "frozen"),
    ("io_schedule", "io"),
    ("mem_cgroup_handle_over_high", "memory"),
];

/// A thread that sleeps.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Standing {
    /// How it sleeps, in the words of the observer's views; or "halted", if its vCPU is.
    pub sleep: Vec<String>,
    /// The system call in which it sleeps; -1: none.
    pub syscall: i64,
}

impl Standing {
    /// Of the thread whose folder in procfs is `folder`; `None` if it is gone, or does not sleep.
    pub fn read(folder: &Path) -> Option<Self> {
        let text = |name: &str| fs::read_to_string(folder.join(name)).ok();
        let stat = text("stat")?;
        let (_, state) = stat.rsplit_once(") ")?;
        if state.starts_with(['R', 'Z', 'X']) {
            return None;
        }
        // "202 0x7f… 0x189 …" in a system call, "-1 …" outside, "running" if it just woke up.
        let call = text("syscall").unwrap_or_default();
        let mut words = call.split_whitespace();
        let syscall = words.next().and_then(|it| it.parse().ok()).unwrap_or(-1);
        let hex = |word: &str| u64::from_str_radix(word.trim_start_matches("0x"), 16).ok();
        let operation = words.nth(1).and_then(hex).unwrap_or(0);
        let stack = text("stack").unwrap_or_default();
        let mut sleep: Vec<&str> = Vec::new();
        for (function, word) in SLEEPS {
            if is_in(&stack, function) && !sleep.contains(&word) {
                sleep.push(word);
            }
        }
        if state.starts_with(['T', 't']) && !sleep.contains(&"stopped") {
            sleep.push("stopped");
        }
        if state.starts_with('D') {
            sleep.push("uninterruptible");
        }
        if is_told(syscall, operation) {
            sleep.push("told");
        }
        Some(Self {
            sleep: sleep.into_iter().map(String::from).collect(),
            syscall,
        })
    }

    /// Whether its vCPU is halted: its guest has nothing to do.
    pub fn is_halted(&self) -> bool {
        self.sleep.iter().any(|word| word == "halted")
    }
}

/// Whether a thread that sleeps in `syscall`, whose second argument is `operation`, waits until another thread tells it to go
/// on; and not for a lock.
pub fn is_told(syscall: i64, operation: u64) -> bool {
    syscall == arch::FUTEX && operation & FUTEX_COMMAND == FUTEX_WAIT_BITSET
}

/// Whether a file `stack` of procfs has `function`. Compilers split functions, and name the parts `function.part.0`.
fn is_in(stack: &str, function: &str) -> bool {
    let functions = stack.lines().filter_map(|line| line.split_once("] "));
    let name = |rest: &str| rest.split(['+', '.']).next() == Some(function);
    functions.map(|(_, rest)| rest).any(name)
}

/// Whether process `tgid` has pages of its memory brought by another one: a userfaultfd, as QEMU opens it where a guest
/// arrives whose memory comes later.
pub fn has_userfaultfd(proc: &Path, tgid: u32) -> bool {
    let files = fs::read_dir(proc.join(format!("{tgid}/fd")));
    let mut files = files.into_iter().flatten().flatten();
    files.any(|file| {
        fs::read_link(file.path())
            .is_ok_and(|target| target.to_string_lossy() == "anon_inode:[userfaultfd]")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::paths::fixture::Fixture;

    fn standing(state: &str, syscall: &str, stack: &str) -> Option<Standing> {
        let fixture = Fixture::new()
            .with("proc/8/stat", format!("8 (CPU 0/KVM) {state} 1 8 8 0"))
            .with("proc/8/syscall", syscall)
            .with("proc/8/stack", stack);
        Standing::read(&fixture.host().proc.join("8"))
    }

    #[test]
    fn what_a_thread_sleeps_in_is_told_by_its_stack_and_its_system_call() {
        let paused = format!("{} 0x55d0 0x189 0x0 0x0 0x0 0x0 0x7f 0x7f\n", arch::FUTEX);
        let paused = standing("S", &paused, "[<0>] futex_do_wait+0x38/0x70\n");
        let paused = paused.expect("it sleeps");
        assert_eq!(
            (paused.sleep, paused.syscall),
            (vec!["told".into()], arch::FUTEX)
        );
        let locked = format!("{} 0x55d0 0x80 0x2 0x0 0x0 0x0 0x7f 0x7f\n", arch::FUTEX);
        let locked = standing("S", &locked, "").expect("it sleeps");
        assert!(locked.sleep.is_empty());
        let page = "[<0>] handle_userfault+0x4a5/0x8b0\n[<0>] hva_to_pfn+0x300/0x450 [kvm]\n\
                    [<0>] kvm_vcpu_ioctl+0x56b/0x9e0 [kvm]\n";
        let page = standing("D", "16 0xc 0xae80", page).expect("it sleeps");
        assert_eq!(page.sleep, ["in-kvm", "page", "uninterruptible"]);
        let halted = "[<0>] kvm_vcpu_block.part.0+0x5e/0xe0 [kvm]\n";
        assert!(
            standing("S", "16 0xc 0xae80", halted)
                .expect("it sleeps")
                .is_halted()
        );
        let stopped = standing("T", "running", "").expect("it sleeps");
        assert_eq!(
            (stopped.sleep, stopped.syscall),
            (vec!["stopped".into()], -1)
        );
        assert_eq!(standing("R", "running", ""), None);
    }
}
