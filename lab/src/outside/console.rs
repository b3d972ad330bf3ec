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

/// How much of what follows a complaint belongs to it, and how many callers are worth a line.
const SHOWN_LINES: usize = 60;
const SHOWN_CALLERS: usize = 6;

/// The complaint in a line of the console, if it holds one.
pub fn complaint(line: &str) -> Option<&str> {
    COMPLAINTS
        .iter()
        .any(|pattern| line.contains(pattern))
        .then(|| message(line))
}

/// A line without "<level>" and "[  12.345678] ", which come before its message.
fn message(line: &str) -> &str {
    line.split_once("] ")
        .filter(|(head, _)| head.contains('['))
        .map_or(line, |(_, message)| message)
        .trim()
}

/// Where the kernel failed, from its console: the instruction, and who called whom, the innermost first; empty if
/// the console does not say.
pub fn place(console: &str) -> String {
    let lines = after_complaint(console);
    let symbol = |line: &str| {
        line.split_whitespace()
            .next()
            .unwrap_or_default()
            .to_string()
    };
    let at = lines
        .iter()
        .find_map(|line| line.strip_prefix("RIP: "))
        .map(|rip| rip.trim_start_matches("0010:").to_string());
    let callers = lines
        .iter()
        .skip_while(|line| !line.starts_with("Call Trace:"))
        .skip(1)
        // "?" marks what merely lay on the stack; tags like <TASK> are no functions.
        .map(|line| line.trim())
        .filter(|line| !line.starts_with(['?', '<']))
        .take_while(|line| line.contains("+0x"))
        .take(SHOWN_CALLERS)
        .map(symbol);
    at.into_iter()
        .chain(callers)
        .collect::<Vec<_>>()
        .join(" < ")
}

/// Did the emulator execute an instruction that is no longer there? A kernel that patches itself writes INT3 first and
/// the rest later. QEMU (up to 10.0 at least) gives up a page's lock between invalidating what it translated from the
/// page and writing to it (accel/tcg/cputlb.c, notdirty_write()): another CPU that translates in between keeps the old
/// bytes for good, and meets an INT3 of which the kernel's own dump of that memory shows nothing.
pub fn is_stale_translation(console: &str) -> bool {
    let lines = after_complaint(console);
    let code = lines.iter().find_map(|line| line.strip_prefix("Code: "));
    let before_rip = code.and_then(|code| {
        let bytes: Vec<&str> = code.split_whitespace().collect();
        let rip = bytes.iter().position(|byte| byte.starts_with('<'))?;
        bytes.get(rip.checked_sub(1)?).copied()
    });
    lines
        .first()
        .is_some_and(|line| line.contains("Oops: int3"))
        && before_rip.is_some_and(|byte| byte != "cc")
}

/// The lines from the first complaint on, without level and time.
fn after_complaint(console: &str) -> Vec<&str> {
    console
        .lines()
        .skip_while(|line| complaint(line).is_none())
        .take(SHOWN_LINES)
        .map(message)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const OOPS: &str = "[    3.0] Switched to clocksource\n\
        [    3.1] Oops: int3: 0000 [#1] SMP NOPTI\r\n\
        [    3.1] CPU: 3 UID: 0 PID: 1 Comm: swapper/0 Not tainted 7.3.4\r\n\
        [    3.1] RIP: 0010:__mod_timer+0x1c3/0x370\r\n\
        [    3.1] Code: 41 8b 4f 20 66 <90> f7 c1 00\r\n\
        [    3.1] RAX: 0000000000000000 RBX: 0000000000000000\r\n\
        [    3.1] Call Trace:\r\n\
        [    3.1]  <TASK>\r\n\
        [    3.1]  ? __die+0x23/0x70\r\n\
        [    3.1]  add_timer+0x20/0x40\r\n\
        [    3.1]  inet_init+0x11/0x20\r\n\
        [    3.1]  </TASK>\r\n";

    #[test]
    fn a_failure_has_a_place() {
        assert_eq!(
            place(OOPS),
            "__mod_timer+0x1c3/0x370 < add_timer+0x20/0x40 < inet_init+0x11/0x20"
        );
        assert_eq!(place("[ 1.0] Kernel panic - not syncing: sysrq\n"), "");
    }

    #[test]
    fn an_int3_that_memory_does_not_hold_is_the_emulators() {
        assert!(is_stale_translation(OOPS));
        // One that is really there is the kernel's: freed code is filled with it.
        assert!(!is_stale_translation(&OOPS.replace("66 <90>", "cc <90>")));
        assert!(!is_stale_translation(
            &OOPS.replace("Oops: int3", "Oops: general protection fault")
        ));
        assert!(!is_stale_translation(&OOPS.replace("Code: ", "")));
        assert!(!is_stale_translation(""));
    }

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
