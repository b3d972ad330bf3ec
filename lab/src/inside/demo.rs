// SPDX-License-Identifier: GPL-2.0-only
//! The demonstration: VMs as wide as the host whose vCPUs need one lock each, drawn and measured under the stock scheduler,
//! then under Cohort. Not a benchmark (`cell`), though it measures as one does.
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use cohort::commands::compare::scheduler::Scheduler;
use cohort::text::table;

use super::cell::Bench;
use super::drawing::{self, COLUMNS};
use super::info::LabInfo;
use super::windows::LOGS;
use crate::cell::{Cell, Guests, Party, Pause, Run, STOCK, Workload};
use crate::outside::machine::Vendor;

/// What the schedulers are called in drawings and tables.
const NAMES: [&str; 2] = [STOCK, "Cohort"];
const VMS: u32 = 3;

/// What to show.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Lab time to draw, ms
    #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u64).range(1..=1_000))]
    ms: u64,
    /// Write both drawings as a picture to this file, too; below /out it is there after the run
    #[arg(long)]
    svg: Option<PathBuf>,
    /// Colour the letters
    #[arg(long)]
    color: bool,
}

/// Runs the demonstration.
///
/// # Errors
/// When anything fails; that Cohort is not better is no failure, it is printed like everything else.
pub fn run(lab: &LabInfo, options: &Options) -> Result<()> {
    let cell = cell(lab.guest_cpus.len() as u32);
    println!("{}\n", lab.describe());
    println!(
        "{VMS} VMs of {cpus} vCPUs share {cpus} CPUs. The vCPUs of each need the VM's one lock for a tenth of their work. One\n\
         that is preempted inside the lock makes its siblings spin. Nobody in a VM knows of the host.\n",
        cpus = cell.cpus
    );
    let mut bench = Bench::start(lab, &cell)?;
    let alone = bench.measure_each_kind()?;
    let mut runs = Vec::new();
    let mut timelines = Vec::new();
    let mut show = |bench: &mut Bench<'_>, name: &str| -> Result<()> {
        runs.extend(bench.measure_all(name, &alone)?);
        let title = format!("{name} scheduler").replace("Cohort scheduler", "Cohort");
        let timeline = bench.draw(&title, Duration::from_millis(options.ms))?;
        println!("\n{}", drawing::text(&timeline, COLUMNS, options.color));
        timelines.push(timeline);
        Ok(())
    };
    show(&mut bench, NAMES[0])?;
    println!("Now Cohort takes over, while the VMs are there.");
    let cohort = Scheduler::cohort(&[]).start(Path::new(LOGS))?;
    let mut cohort = cohort.context("Cohort is a program, so there is one to stop")?;
    show(&mut bench, NAMES[1])?;
    cohort.check()?;
    cohort.stop()?;
    println!("{}", figures(&runs));
    println!("The stock scheduler is back, and the VMs are still there.\n");
    for caveat in lab.caveats() {
        println!("- {caveat}");
    }
    if let Some(path) = &options.svg {
        fs::write(path, drawing::svg(&timelines))
            .with_context(|| format!("{} cannot be written", path.display()))?;
    }
    Ok(())
}

fn cell(cpus: u32) -> Cell {
    Cell {
        name: "demo".into(),
        cpus,
        sockets: 1,
        vendor: Vendor::Amd,
        guests: Guests::Micro,
        paravirtual: false,
        pause: Pause::Exits,
        seeds: 2,
        window_ms: 200,
        settle_ms: 100,
        vms: vec![Party {
            count: VMS,
            width: cpus,
            sockets: 1,
            weight: 100,
            workload: Workload::Lock,
            operation_us: 100,
            locked_percent: 10,
        }],
        host: Vec::new(),
        published: None,
    }
}

/// The table, and what its words mean.
fn figures(runs: &[Run]) -> String {
    let pct = |part: f64| format!("{:.1}", 100.0 * part);
    let row = |run: &Run| {
        let progress = &run.progress;
        let mut row = vec![run.scheduler.clone(), run.seed.to_string()];
        row.extend(progress.of_each.iter().map(|&each| pct(each)));
        row.extend([
            pct(progress.harmonic_mean),
            pct(progress.least),
            format!("{:.3}", progress.sum),
        ]);
        row
    };
    let vms: Vec<String> = (1..=VMS).map(|vm| format!("vm{vm} %")).collect();
    let mut headings = vec!["SCHEDULER", "SEED"];
    headings.extend(vms.iter().map(String::as_str));
    headings.extend(["HARMONIC MEAN %", "LEAST %", "SUM"]);
    let rows: Vec<Vec<String>> = runs.iter().map(row).collect();
    format!(
        "{}\nPer VM: what it did, of its fair part of what one VM alone does on these CPUs. Their harmonic mean is low when\n\
         one of them gets little. The sum is how many VMs' work was done. A seed is one way in which vCPUs lie to each\n\
         other at the start.\n",
        table::columns(&headings, &rows)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use cohort::commands::compare::progress::{Progress, VmRate};

    #[test]
    fn what_is_shown_can_be_run() {
        cell(4).check().unwrap();
    }

    #[test]
    fn a_row_is_a_window() {
        let vm = |rate| VmRate {
            rate,
            alone: 300.0,
            share: 1.0 / 3.0,
        };
        let run = Run {
            scheduler: STOCK.into(),
            seed: 2,
            seconds: 0.2,
            rates: vec![50.0, 100.0, 100.0],
            latencies: vec![None; 3],
            progress: Progress::of(&[vm(50.0), vm(100.0), vm(100.0)]).unwrap(),
        };
        let text = figures(&[run]);
        let row: Vec<&str> = text.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(
            row,
            [
                "stock", "2", "50.0", "100.0", "100.0", "75.0", "50.0", "0.833"
            ]
        );
    }
}
