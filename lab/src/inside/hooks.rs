// SPDX-License-Identifier: GPL-2.0-only
//! What BPF programs cost while guests work: how often each runs, and how long one run takes by the kernel's own count.
//! Not for throughput (`cell`).
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use libbpf_rs::query::{ProgInfoIter, ProgInfoQueryOptions, ProgramInfo};

/// Lets the kernel count programs' runs and their time, which costs each run a little.
pub const COUNTING: &str = "/proc/sys/kernel/bpf_stats_enabled";

/// What one program did between two readings.
#[derive(Clone, Debug, PartialEq)]
pub struct Cost {
    /// Its name, of which the kernel keeps 15 letters.
    pub name: String,
    /// How often it ran.
    pub runs: u64,
    /// For how long in all, of the kernel's functions that it calls too.
    pub took_ns: u64,
    /// Instructions it consists of, without those functions.
    pub instructions: usize,
    /// How often it did not run when it should have: a run of it for another thread had been preempted on that CPU.
    pub missed: u64,
}

impl Cost {
    /// How long one run took on average.
    pub fn each_ns(&self) -> f64 {
        self.took_ns as f64 / self.runs.max(1) as f64
    }
}

/// The BPF programs of a process, as they are at one moment.
pub struct Programs {
    at: Instant,
    by_id: BTreeMap<u32, ProgramInfo>,
}

impl Programs {
    /// Those that process `pid` holds.
    ///
    /// # Errors
    /// When it is gone, or holds none.
    pub fn of(pid: u32) -> Result<Self> {
        let mut held = BTreeSet::new();
        let folder = format!("/proc/{pid}/fdinfo");
        let entries = fs::read_dir(&folder).with_context(|| format!("{folder} cannot be read"))?;
        for entry in entries {
            // A descriptor may have been closed meanwhile.
            let text = fs::read_to_string(entry?.path()).unwrap_or_default();
            let id = text.lines().find_map(|line| line.strip_prefix("prog_id:"));
            held.extend(id.and_then(|id| id.trim().parse::<u32>().ok()));
        }
        ensure!(!held.is_empty(), "process {pid} holds no BPF program");
        let options = ProgInfoQueryOptions::default().include_xlated_prog_insns(true);
        let all = ProgInfoIter::with_query_opts(options);
        let held = all.filter(|program| held.contains(&program.id));
        Ok(Self {
            at: Instant::now(),
            by_id: held.map(|program| (program.id, program)).collect(),
        })
    }

    /// How many instructions the verifier looked at for each, the most first.
    pub fn verified(&self) -> Vec<(String, u32)> {
        let of = |program: &ProgramInfo| {
            let name = program.name.to_string_lossy().into_owned();
            (name, program.verified_insns)
        };
        let mut verified: Vec<(String, u32)> = self.by_id.values().map(of).collect();
        verified.sort_by_key(|(_, instructions)| Reverse(*instructions));
        verified
    }

    /// What they did until `end`, by name, and how many seconds that was.
    pub fn until(&self, end: &Self) -> (Vec<Cost>, f64) {
        let cost = |(id, after): (&u32, &ProgramInfo)| {
            let before = self.by_id.get(id)?;
            Some(Cost {
                name: after.name.to_string_lossy().into_owned(),
                runs: after.run_cnt - before.run_cnt,
                took_ns: after.run_time_ns - before.run_time_ns,
                // Eight bytes each.
                instructions: after.xlated_prog_insns.len() / 8,
                missed: after.recursion_misses - before.recursion_misses,
            })
        };
        let mut costs: Vec<Cost> = end.by_id.iter().filter_map(cost).collect();
        costs.sort_by(|a, b| a.name.cmp(&b.name));
        (costs, (end.at - self.at).as_secs_f64())
    }
}

/// What the programs of process `pid` do within `window`, and how many seconds that really was.
///
/// # Errors
/// When it is gone, or holds none.
pub fn costs_within(pid: u32, window: Duration) -> Result<(Vec<Cost>, f64)> {
    let before = Programs::of(pid)?;
    sleep(window);
    Ok(before.until(&Programs::of(pid)?))
}

/// Prints a table of the programs that ran within so many seconds.
pub fn print(costs: &[Cost], seconds: f64) {
    println!(
        "{:<16} {:>9} {:>12} {:>8} {:>8}",
        "program", "runs/s", "instructions", "ns each", "ms/s"
    );
    let sum = |number: fn(&Cost) -> u64| costs.iter().map(number).sum();
    let all = Cost {
        name: "all".into(),
        runs: sum(|cost| cost.runs),
        took_ns: sum(|cost| cost.took_ns),
        instructions: costs.iter().map(|cost| cost.instructions).sum(),
        missed: sum(|cost| cost.missed),
    };
    let ran = costs.iter().filter(|cost| cost.runs > 0);
    for cost in ran.chain([&all]) {
        println!(
            "{:<16} {:>9.0} {:>12} {:>8.0} {:>8.2}",
            cost.name,
            cost.runs as f64 / seconds,
            cost.instructions,
            cost.each_ns(),
            cost.took_ns as f64 / 1e6 / seconds
        );
    }
}
