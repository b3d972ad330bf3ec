// SPDX-License-Identifier: GPL-2.0-only
//! Idle states of the host's CPUs (cpuidle): how long each takes to be left, and how often it was entered.

use super::paths::Host;
use std::collections::BTreeMap;
use std::fs;

/// One idle state, of all CPUs together.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct IdleState {
    /// Until a CPU has left it, us.
    pub exit_latency_us: u64,
    /// How often CPUs entered it since the boot.
    pub entered: u64,
}

/// All of them, by name; none where the CPUs just halt.
pub fn read(host: &Host) -> BTreeMap<String, IdleState> {
    let mut states: BTreeMap<String, IdleState> = BTreeMap::new();
    let folder = host.sys.join("devices/system/cpu");
    let pattern = folder.join("cpu[0-9]*/cpuidle/state*");
    let folders = glob::glob(&pattern.to_string_lossy()).into_iter().flatten();
    for folder in folders.flatten() {
        let text = |file: &str| fs::read_to_string(folder.join(file)).unwrap_or_default();
        let number = |file: &str| text(file).trim().parse().unwrap_or(0);
        let state = states.entry(text("name").trim().to_owned()).or_default();
        state.exit_latency_us = state.exit_latency_us.max(number("latency"));
        state.entered += number("usage");
    }
    states
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::paths::fixture::Fixture;

    #[test]
    fn states_of_all_cpus_are_added_up() {
        let with = |fixture: Fixture, cpu: u32, usage: &str| {
            let folder = format!("sys/devices/system/cpu/cpu{cpu}/cpuidle/state2");
            fixture
                .with(&format!("{folder}/name"), "C6\n")
                .with(&format!("{folder}/latency"), "133\n")
                .with(&format!("{folder}/usage"), usage)
        };
        let fixture = with(with(Fixture::new(), 0, "5\n"), 1, "7\n");
        let expected = IdleState {
            exit_latency_us: 133,
            entered: 12,
        };
        assert_eq!(
            read(&fixture.host()),
            [(String::from("C6"), expected)].into()
        );
    }
}
