// SPDX-License-Identifier: GPL-2.0-only
//! The command line: which subcommands there are, and what their help says.

use crate::commands::compare::{CompareOptions, compare};
use crate::commands::doctor::{DoctorOptions, doctor};
use crate::commands::export::{ExportOptions, export};
use crate::commands::ready::{ReadyOptions, ready};
use crate::commands::run::run;
use crate::commands::set::{SetOptions, set};
use crate::commands::stats::{StatsOptions, stats};
use crate::commands::top::{TopOptions, top};
use crate::commands::watch::{WatchOptions, watch};
use crate::commands::why::{WhyOptions, why};
use crate::host::paths::Host;
use crate::process::exit::{Exit, exit_code_help};
use crate::process::logging;
use crate::scheduler::settings::RunOptions;
use clap::{CommandFactory, Parser, Subcommand};

/// Schedules the virtual CPUs of KVM hosts that run more vCPUs than they have CPUs
///
/// Cohort divides CPU time between VMs first and inside a VM second. It gives the
/// time of a vCPU that waits to the sibling that it waits for. It loads into a
/// running host, needs no change to the kernel or the guests, and unloads without
/// a trace.
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
    /// host back by itself and running guests go on. Mechanisms can be switched
    /// while it runs (`cohort set`). SIGHUP (`systemctl reload cohort`) reads the
    /// settings anew; the log says which ones need a restart. Guests do not notice
    /// a restart.
    #[command(after_long_help = exit_code_help())]
    Run(RunOptions),
    /// Show what a running `cohort run` counts, per VM
    ///
    /// The first table covers the time since Cohort took over, each further one
    /// the time since the one before. For root, and for members of the group
    /// `cohort`, if there was one when `cohort run` started.
    #[command(after_long_help = exit_code_help())]
    Stats(StatsOptions),
    /// Switch mechanisms of a running `cohort run` on and off, and show their effects
    ///
    /// Without arguments it lists all mechanisms: whether each is on, how often it
    /// changed who runs (or for how long) since Cohort took over, and what it does.
    /// A switch counts at once, for all VMs, until `cohort run` ends. For root
    /// only.
    #[command(after_long_help = exit_code_help())]
    Set(SetOptions),
    /// Show what the vCPUs of this host do, under whatever scheduler it has
    ///
    /// It changes nothing, and leaves nothing behind when it ends. `cohort run` may
    /// run beside it, but need not.
    #[command(after_long_help = exit_code_help())]
    Watch(WatchOptions),
    /// Show what `cohort watch` shows on the whole screen: sorted, filtered, down to vCPUs, with histograms
    ///
    /// Columns and keys are those that users of top and esxtop know; h shows
    /// them. It changes nothing. A recording can be looked at on another host.
    #[command(after_long_help = exit_code_help())]
    Top(TopOptions),
    /// Say why one VM is slow: answers to the questions that operators come with
    ///
    /// Looks at this host for a few seconds, or at a recording. It says for each
    /// question what was seen, what that means and what to do: ready time, the
    /// VMM's own threads, caps, stalls, the ratio of vCPUs to CPUs, split locks,
    /// clocks, pinning. Where the scheduler or a cap is not to blame, it says so.
    /// It changes nothing. /usr/share/doc/cohort/why.md has examples.
    #[command(after_long_help = exit_code_help())]
    Why(WhyOptions),
    /// Print the ready time of one VM in one line, in VMware's units
    ///
    /// As in vCenter and esxtop, ready time includes the time in which a cap stops a
    /// vCPU (`mlmtd_pct`). `ready_ms` is cpu.ready.summation of vCenter,
    /// `readiness_pct` its cpu.readiness.average; `rdy_pct` and `mlmtd_pct` are
    /// %RDY and %MLMTD of esxtop.
    #[command(after_long_help = exit_code_help())]
    Ready(ReadyOptions),
    /// Measure on this host, with the guests that run now, what a scheduler changes
    ///
    /// Exchanges schedulers while guests run, in windows that alternate (A B B A
    /// …). It says for each number and VM by how much it differs and how sure that
    /// is, or that nothing was found. The host is back on its own scheduler at the
    /// end, after Ctrl-C or an error, and within two seconds when a guest stands
    /// still.
    #[command(after_long_help = exit_code_help())]
    Compare(CompareOptions),
    /// Say whether this host can run Cohort, whether that is safe, and what would make it better
    ///
    /// Looks at the kernel, KVM, CPUs, cgroups and the VMs that run now; changes
    /// nothing. Each finding says what was seen, why it matters, and the command
    /// that mends it. The exit code tells the worst finding.
    #[command(after_long_help = exit_code_help())]
    Doctor(DoctorOptions),
    /// Serve what `cohort watch` shows to Prometheus, over HTTP
    ///
    /// Metrics are at /metrics, in the format OpenMetrics for clients that ask for
    /// it. There is neither TLS nor a password: to serve others than this host, put
    /// a reverse proxy in front (/usr/share/doc/cohort/export.md).
    #[command(after_long_help = exit_code_help())]
    Export(ExportOptions),
}

/// The command line's description, of which man pages and completions are made.
pub fn command() -> clap::Command {
    Cli::command()
}

/// Does what the command line says; failures are said on standard error.
pub fn main() -> Exit {
    let cli = Cli::parse();
    logging::init();
    let host = Host::live();
    let result = match &cli.command {
        Command::Run(options) => run(options, &host),
        Command::Stats(options) => stats(options, &host),
        Command::Set(options) => set(options, &host),
        Command::Watch(options) => watch(options, &host),
        Command::Top(options) => top(options, &host),
        Command::Why(options) => why(options, &host),
        Command::Ready(options) => ready(options, &host),
        Command::Compare(options) => compare(options, &host),
        Command::Doctor(options) => doctor(options, &host),
        Command::Export(options) => export(options, &host),
    };
    match result {
        Ok(()) => Exit::Success,
        Err(failure) => {
            logging::say_failure(&failure);
            failure.exit()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        command().debug_assert();
    }

    #[test]
    fn a_value_out_of_range_is_refused() {
        for arguments in [
            ["cohort", "run", "--slice-us", "99"],
            ["cohort", "run", "--slice", "4 lightyears"],
            ["cohort", "run", "--timeout-ms", "30001"],
            ["cohort", "run", "--stats", "0"],
        ] {
            assert!(Cli::try_parse_from(arguments).is_err(), "{arguments:?}");
        }
        assert!(Cli::try_parse_from(["cohort", "set", "ipi=maybe"]).is_err());
    }

    #[test]
    fn clap_ends_with_the_documented_code() {
        let error = Cli::try_parse_from(["cohort", "walk"]).expect_err("there is no such command");
        assert_eq!(error.exit_code(), i32::from(Exit::Usage.code()));
    }
}
