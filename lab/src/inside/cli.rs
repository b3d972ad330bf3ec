// SPDX-License-Identifier: GPL-2.0-only
//! `lab inside …`: the commands that run in L1. Not for the user's machine.
use std::process::ExitCode;

use super::info::LabInfo;
use super::{compare, demo, process};
use crate::cell::Cell;
use anyhow::{Context, Result};
use clap::Subcommand;

/// Commands inside the lab.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Measure a cell of the matrix and leave the result in /out/result.json
    Cell {
        /// The cell as JSON; `lab bench` has it from lab/matrix.toml
        cell: String,
        /// Measure Cohort without each mechanism as well
        #[arg(long)]
        each_mechanism: bool,
    },
    /// Have `cohort compare` compare the schedulers beside the VMs of a cell
    Compare(compare::Options),
    /// Draw and measure three VMs in locks under the stock scheduler, then under Cohort
    Demo(demo::Options),
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
        Command::Cell {
            cell,
            each_mechanism,
        } => {
            let cell: Cell = serde_json::from_str(cell).context("That is no cell")?;
            super::cell::run(&enter_lab()?, &cell, *each_mechanism)
        }
        Command::Compare(options) => compare::run(&enter_lab()?, options),
        Command::Demo(options) => demo::run(&enter_lab()?, options),
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
