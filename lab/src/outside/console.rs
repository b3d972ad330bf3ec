// SPDX-License-Identifier: GPL-2.0-only
//! Reads L1's kernel console for complaints that fail a run. Not for our programs' output, which has its own port.

/// What a kernel prints when something is wrong with it, and only then. Warnings are not among them: emulated hardware
/// draws some that mean nothing; they are in dmesg.
const COMPLAINTS: [&str; 11] = [
    "Kernel panic - not syncing",
    " BUG: ",
    "kernel BUG at ",
    "Oops: ",
    "general protection fault",
    "soft lockup - CPU",
    "hard LOCKUP",
    "rcu: INFO: rcu",
    "self-detected stall on CPU",
    "blocked for more than",
    "Attempted to kill init",
];

/// The complaint in a line of the console, if it holds one.
pub fn complaint(line: &str) -> Option<&str> {
    let text = line.trim_end();
    // "<level>" and "[  12.345678] " come before the message.
    let message = text
        .split_once("] ")
        .filter(|(head, _)| head.contains('['))
        .map_or(text, |(_, message)| message);
    COMPLAINTS
        .iter()
        .any(|pattern| text.contains(pattern))
        .then(|| message.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complaints_are_recognised_and_shown_without_the_time() {
        let line = "[   12.345678] watchdog: BUG: soft lockup - CPU#1 stuck for 26s! [micro:123]\r";
        assert_eq!(
            complaint(line),
            Some("watchdog: BUG: soft lockup - CPU#1 stuck for 26s! [micro:123]")
        );
        assert_eq!(
            complaint("Kernel panic - not syncing: sysrq"),
            Some("Kernel panic - not syncing: sysrq")
        );
        assert!(
            complaint("[    1.0] rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:").is_some()
        );
        assert!(
            complaint("[    1.0] INFO: task sh:12 blocked for more than 120 seconds.").is_some()
        );
    }

    #[test]
    fn ordinary_lines_are_not() {
        assert_eq!(
            complaint("[    0.1] sched_ext: BPF scheduler \"cohort\" enabled"),
            None
        );
        assert_eq!(complaint("[    0.1] x86/cpu: DEBUG: all is well"), None);
    }
}
