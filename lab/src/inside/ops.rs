// SPDX-License-Identifier: GPL-2.0-only
//! How much the scheduler's BPF programs execute while VMs run. The kernel counts it (`kernel.bpf_stats_enabled`), in ns; on
//! the exact machine a ns is an instruction.
use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result};
use libbpf_rs::query::ProgInfoIter;

use crate::cell::OpCost;

const SWITCH: &str = "/proc/sys/kernel/bpf_stats_enabled";
/// What the names of the scheduler's ops begin with.
const PREFIX: &str = "cohort_";
/// The kernel keeps so much of a program's name.
const NAME_LENGTH: usize = 15;
/// Ops whose names are cut off.
const LONG_NAMES: [&str; 3] = ["select_cpu", "update_idle", "quiescent"];

/// The kernel counts while this lives, which makes all programs somewhat slower.
pub struct Counting {
    before: BTreeMap<String, OpCost>,
}

impl Counting {
    /// Begins to count.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn start() -> Result<Self> {
        fs::write(SWITCH, "1").with_context(|| format!("{SWITCH} cannot be set"))?;
        Ok(Self { before: read() })
    }

    /// What ran since, by name.
    pub fn finish(self) -> Vec<OpCost> {
        let since = |mut cost: OpCost| {
            if let Some(before) = self.before.get(&cost.name) {
                cost.runs -= before.runs;
                cost.ns -= before.ns;
            }
            cost
        };
        read()
            .into_values()
            .map(since)
            .filter(|cost| cost.runs > 0)
            .collect()
    }
}

impl Drop for Counting {
    fn drop(&mut self) {
        // It would only be slower.
        let _ = fs::write(SWITCH, "0");
    }
}

/// All programs that have run, by name.
fn read() -> BTreeMap<String, OpCost> {
    let mut costs: BTreeMap<String, OpCost> = BTreeMap::new();
    for program in ProgInfoIter::default().filter(|program| program.run_cnt > 0) {
        let name = full_name(&program.name.to_string_lossy());
        let cost = costs.entry(name.clone()).or_insert(OpCost {
            name,
            runs: 0,
            ns: 0,
        });
        cost.runs += program.run_cnt;
        cost.ns += program.run_time_ns;
    }
    costs
}

/// An op is called what the kernel calls it; any other program keeps its name.
fn full_name(name: &str) -> String {
    let cut = |op: &&&str| {
        format!("{PREFIX}{op}")
            .chars()
            .take(NAME_LENGTH)
            .eq(name.chars())
    };
    match LONG_NAMES.iter().find(cut) {
        Some(op) => (*op).into(),
        None => name.strip_prefix(PREFIX).unwrap_or(name).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ops_have_the_kernels_names() {
        assert_eq!(full_name("cohort_dispatch"), "dispatch");
        assert_eq!(full_name("cohort_select_c"), "select_cpu");
        assert_eq!(full_name("vcpu_kicked"), "vcpu_kicked");
    }
}
