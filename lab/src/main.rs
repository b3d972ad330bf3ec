// SPDX-License-Identifier: GPL-2.0-only
//! The `lab` command line. What each subcommand does is in the library.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use cohort_lab::{inside, outside};

/// An emulated KVM host (L1) that boots anywhere, to test Cohort on.
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Boot L1, run a command in it, and end with its exit code
    Boot(outside::boot::Options),
    /// Measure cells of the matrix (lab/matrix.toml), each in an L1 of its own
    Bench(outside::bench::Options),
    /// Have `cohort compare` compare the schedulers beside the VMs of a cell, as an operator would; its page and a picture are
    /// left in out/compare
    Compare(outside::compare::Options),
    /// Write docs/results.md from what the bench measured
    Report(outside::report::Options),
    /// List the kernels of the Debian mirror and which can load a sched_ext scheduler
    Kernels(outside::cli::KernelsOptions),
    /// Make an image if it is not in the cache: L1's, or that of guests with real workloads
    Image(outside::cli::ImageOptions),
    /// What runs inside L1: measure, show
    #[command(subcommand)]
    Inside(inside::cli::Command),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Boot(options) => outside::boot::boot(&options),
        Command::Bench(options) => outside::bench::bench(&options),
        Command::Compare(options) => outside::compare::compare(&options),
        Command::Report(options) => outside::report::report(&options),
        Command::Kernels(options) => outside::cli::kernels(&options),
        Command::Image(options) => outside::cli::image(&options),
        Command::Inside(command) => return inside::cli::run_and_report(&command),
    };
    result.map_or_else(|error| outside::cli::report(&error), ExitCode::from)
}
