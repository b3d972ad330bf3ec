// SPDX-License-Identifier: GPL-2.0-only
//! What BPF programs cost while guests work: how often each runs, and how long one run takes by the kernel's own count.
//! Not for throughput (`bench`).
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cohort::compare::scheduler::Scheduler;
use libbpf_rs::query::{ProgInfoIter, ProgInfoQueryOptions, ProgramInfo};

use super::bench::{BOOT_TIMEOUT, Case, Options};
use super::booted::start_all;
use super::info::LabInfo;
use super::windows::LOGS;

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
}

impl Cost {
    /// Of one run, ns; 0 if there was none.
    pub fn ns_each(&self) -> f64 {
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
            })
        };
        let mut costs: Vec<Cost> = end.by_id.iter().filter_map(cost).collect();
        costs.sort_by(|a, b| a.name.cmp(&b.name));
        (costs, (end.at - self.at).as_secs_f64())
    }
}

/// Prints for each case what the observer's programs do beside the stock scheduler, and what Cohort's do.
///
/// # Errors
/// When anything fails while measuring.
pub fn run(lab: &LabInfo, cases: &[Case], options: &Options) -> Result<()> {
    fs::write(COUNTING, "1").with_context(|| format!("{COUNTING} cannot be written"))?;
    println!("{}", lab.describe());
    for case in cases {
        let mut guests = start_all(lab, options.guests(case, lab), BOOT_TIMEOUT)?;
        for scheduler in [Scheduler::watched(), Scheduler::cohort(&[])] {
            let running = scheduler.start(Path::new(LOGS))?;
            let running = running.context("both are programs")?;
            sleep(Duration::from_millis(options.settle_ms));
            let before = Programs::of(running.pid())?;
            sleep(Duration::from_millis(options.window_ms));
            let (costs, seconds) = before.until(&Programs::of(running.pid())?);
            running.stop()?;
            for guest in &mut guests {
                super::windows::Subject::ensure_alive(guest)?;
            }
            println!("\n{case}, {}:", scheduler.name());
            print(&costs, seconds);
        }
    }
    Ok(())
}

fn print(costs: &[Cost], seconds: f64) {
    println!(
        "{:<16} {:>9} {:>8} {:>8}",
        "program", "runs/s", "ns each", "ms/s"
    );
    let line = |name: &str, runs: u64, took: u64| {
        println!(
            "{name:<16} {:>9.0} {:>8.0} {:>8.2}",
            runs as f64 / seconds,
            took as f64 / runs.max(1) as f64,
            took as f64 / 1e6 / seconds
        );
    };
    for cost in costs.iter().filter(|cost| cost.runs > 0) {
        line(&cost.name, cost.runs, cost.took_ns);
    }
    let sum = |number: fn(&Cost) -> u64| costs.iter().map(number).sum();
    line("all", sum(|cost| cost.runs), sum(|cost| cost.took_ns));
}
