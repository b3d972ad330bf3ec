// SPDX-License-Identifier: GPL-2.0-only
//! `lab inside …`: the commands that run in L1. Not for the user's machine.
use std::path::PathBuf;
use std::process::ExitCode;

use super::bench::{self, Case, Options};
use super::booted::CounterPlace;
use super::info::LabInfo;
use super::{calibrate, demo, drawing, hooks, process, report};
use anyhow::{Result, ensure};
use clap::Subcommand;

/// Commands inside the lab.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Check that one VM alone gains at least 1.5 times from its second CPU
    Calibrate {
        /// tlb, spin, pipe, barrier, busy
        #[arg(required = true)]
        workloads: Vec<String>,
        /// How to measure
        #[command(flatten)]
        options: Options,
    },
    /// Measure cases such as "spin2" (ticket lock, two VMs) and append them to /out/results.jsonl
    Bench {
        /// A workload and the number of VMs: tlb2, spin3, pipe2, barrier2, busy3, …; with the guests' image
        /// (`lab boot --guest-image`) redis2, dbench2, vips2, restic2, …
        #[arg(required = true)]
        cases: Vec<Case>,
        /// How to measure
        #[command(flatten)]
        options: Options,
    },
    /// Show how often the BPF programs of the observer and of Cohort run in such cases, and how long they take
    Hooks {
        /// A workload and the number of VMs
        #[arg(required = true)]
        cases: Vec<Case>,
        /// How to measure
        #[command(flatten)]
        options: Options,
    },
    /// Show two VMs in a ticket lock under the stock scheduler and under Cohort, in turn
    Demo {
        /// Compare the stock scheduler with itself instead of Cohort, to see what noise does
        #[arg(long)]
        stock_only: bool,
    },
    /// Draw which VM runs on which CPU when: three micro guests in locks, under the scheduler that runs and under Cohort
    Draw(drawing::command::Options),
    /// Print how many operations booted guests have done together so far
    Operations {
        /// Where each of them counts: ADDRESS@FILE, an address in the file that is its memory
        #[arg(required = true)]
        places: Vec<CounterPlace>,
    },
    /// Print the tables of a file of results (works anywhere)
    Report {
        /// A results.jsonl
        results: PathBuf,
    },
}

/// Runs a command; an error is printed and ends in exit code 1.
pub fn run_and_report(command: &Command) -> ExitCode {
    match run(command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lab inside: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs a command.
///
/// # Errors
/// What the command returns, with a sentence for the user.
pub fn run(command: &Command) -> Result<()> {
    match command {
        Command::Calibrate { workloads, options } => {
            calibrate::run(&enter_lab()?, workloads, options)
        }
        Command::Bench { cases, options } => {
            let lab = enter_lab()?;
            // Each is measured, whatever became of those before it.
            let measure = |case| bench::run(&lab, case, options).err();
            let failures: Vec<String> = cases
                .iter()
                .filter_map(measure)
                .map(|error| format!("{error:#}"))
                .collect();
            ensure!(failures.is_empty(), "{}", failures.join("\n"));
            Ok(())
        }
        Command::Hooks { cases, options } => hooks::run(&enter_lab()?, cases, options),
        Command::Demo { stock_only } => {
            demo::run(&enter_lab()?, if *stock_only { "stock" } else { "cohort" })
        }
        Command::Draw(options) => drawing::command::run(&enter_lab()?, options),
        Command::Operations { places } => {
            let operations = places.iter().map(CounterPlace::operations);
            println!("{}", operations.sum::<Result<u64>>()?);
            Ok(())
        }
        Command::Report { results } => {
            for result in report::read_results(results)? {
                println!("{}", result.text());
            }
            Ok(())
        }
    }
}

/// Reads what the lab is and keeps this process off the guests' CPUs.
fn enter_lab() -> Result<LabInfo> {
    let lab = LabInfo::read()?;
    if !lab.housekeeping_cpus.is_empty() {
        process::stay_on(&lab.housekeeping_cpus)?;
    }
    Ok(lab)
}
