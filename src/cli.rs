// SPDX-License-Identifier: GPL-2.0-only
//! The command line: which subcommands there are, and what their help says.

use crate::exit::{Exit, exit_code_help};
use crate::host::paths::Host;
use crate::logging;
use crate::run::run;
use crate::settings::RunOptions;
use crate::stats::{StatsOptions, stats};
use clap::{Parser, Subcommand};

/// Schedules the virtual CPUs of KVM hosts that run more vCPUs than they have CPUs
///
/// Cohort divides CPU time between VMs first and inside a VM second, and lets a
/// vCPU run for which its siblings wait. It loads into a running host, needs no
/// change to the kernel or the guests, and unloads without a trace.
#[derive(Debug, Parser)]
#[command(name = "cohort", version, after_long_help = exit_code_help())]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Take over scheduling until SIGINT or SIGTERM; then give the host back
    ///
    /// Whatever happens to this program, kill -9 included, the kernel takes the
    /// host back by itself and running guests go on. Settings are fixed at the
    /// start; to change one, stop and start again: guests do not notice.
    #[command(after_long_help = exit_code_help())]
    Run(RunOptions),
    /// Show what a running `cohort run` counts, per VM
    ///
    /// The first table covers the time since Cohort took over, each further one
    /// the time since the one before.
    #[command(after_long_help = exit_code_help())]
    Stats(StatsOptions),
}

/// Does what the command line says; failures are said on standard error.
pub fn main() -> Exit {
    let cli = Cli::parse();
    logging::init();
    let host = Host::live();
    let result = match &cli.command {
        Command::Run(options) => run(options, &host),
        Command::Stats(options) => stats(options, &host),
    };
    match result {
        Ok(()) => Exit::Success,
        Err(failure) => {
            // Not a log line: it must be seen whatever RUST_LOG says.
            eprintln!("cohort: {failure}");
            failure.exit()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_value_out_of_range_is_refused() {
        for arguments in [
            ["cohort", "run", "--slice-us", "99"],
            ["cohort", "run", "--slice-us", "4ms"],
            ["cohort", "run", "--timeout-ms", "30001"],
            ["cohort", "run", "--stats", "0"],
        ] {
            assert!(Cli::try_parse_from(arguments).is_err(), "{arguments:?}");
        }
    }

    #[test]
    fn clap_ends_with_the_documented_code() {
        let error = Cli::try_parse_from(["cohort", "walk"]).expect_err("there is no such command");
        assert_eq!(error.exit_code(), i32::from(Exit::Usage.code()));
    }
}
