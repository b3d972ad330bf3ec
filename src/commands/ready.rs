// SPDX-License-Identifier: GPL-2.0-only
//! `cohort ready VM`: ready time of one VM in one line, as VMware shows it, for scripts.

use crate::commands::why::{Asked, gather};
use crate::host::paths::Host;
use crate::observer::view::VcpuView;
use crate::process::exit::Failure;
use crate::text::duration::parse_interval;
use crate::text::table::{json_line, print};
use clap::Args;
use serde::Serialize;
use std::time::Duration;

/// The options of `cohort ready`.
#[derive(Args, Clone, Debug)]
pub struct ReadyOptions {
    #[command(flatten)]
    asked: Asked,

    /// For how long to look; 1s to 1h, a number without a unit is in seconds. vCenter's charts in real time have samples of 20 s
    #[arg(long = "for", value_name = "TIME", visible_alias = "seconds", default_value = "20s", value_parser = parse_interval, conflicts_with = "recording")]
    length: Duration,

    /// Print one line of JSON instead
    #[arg(long)]
    json: bool,
}

/// Ready time in VMware's units, in which the time that a cap takes is a part of it.
#[derive(Debug, PartialEq, Serialize)]
struct Ready<'a> {
    vm: &'a str,
    vcpus: u32,
    /// The sample's length, ms.
    sample_ms: u64,
    /// Of all vCPUs, ms: vCenter's `cpu.ready.summation`.
    ready_ms: u64,
    /// Per vCPU, in percent of the time: vCenter's `cpu.readiness.average`.
    readiness_pct: f64,
    /// The sum over the vCPUs, in percent of the time: %RDY of a VM in esxtop.
    rdy_pct: f64,
    /// The part of it that a cap takes: %MLMTD in esxtop.
    mlmtd_pct: f64,
}

impl<'a> Ready<'a> {
    fn of(vm: &'a str, sample_ms: u64, all: &VcpuView) -> Self {
        let vcpus = f64::from(all.vcpus);
        let readiness_pct = all.ready_pct + all.limited_pct;
        Self {
            vm,
            vcpus: all.vcpus,
            sample_ms,
            ready_ms: (readiness_pct / 100.0 * vcpus * sample_ms as f64).round() as u64,
            readiness_pct,
            rdy_pct: readiness_pct * vcpus,
            mlmtd_pct: all.limited_pct * vcpus,
        }
    }

    fn line(&self) -> String {
        // So that a script finds its end.
        let vm = match self.vm.contains([' ', '=', '"', '\\']) {
            true => format!("{:?}", self.vm),
            false => self.vm.to_owned(),
        };
        format!(
            "vm={vm} vcpus={} sample_ms={} ready_ms={} readiness_pct={:.2} rdy_pct={:.2} mlmtd_pct={:.2}\n",
            self.vcpus,
            self.sample_ms,
            self.ready_ms,
            self.readiness_pct,
            self.rdy_pct,
            self.mlmtd_pct
        )
    }
}

/// Looks, and prints the line.
///
/// # Errors
/// With [`crate::process::exit::Exit::NoSuchVm`] when it is not clear which VM is meant, and as the observer or the recording has them.
pub fn ready(options: &ReadyOptions, host: &Host) -> Result<(), Failure> {
    let Some(facts) = gather(&options.asked, options.length, host)? else {
        return Ok(());
    };
    let ready = Ready::of(facts.name(), facts.vm.ms, facts.all());
    match options.json {
        true => print(&json_line(&ready)?),
        false => print(&ready.line()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_units_are_vmwares() {
        let all = VcpuView {
            vcpus: 4,
            ready_pct: 4.0,
            limited_pct: 1.0,
            ..VcpuView::default()
        };
        // 5 % of 20 s on each of four vCPUs: 1,000 ms each.
        assert_eq!(
            Ready::of("web", 20_000, &all).line(),
            "vm=web vcpus=4 sample_ms=20000 ready_ms=4000 readiness_pct=5.00 rdy_pct=20.00 mlmtd_pct=4.00\n"
        );
        let line = Ready::of("my web vcpus=9", 20_000, &all).line();
        assert!(line.starts_with("vm=\"my web vcpus=9\" vcpus=4 "), "{line}");
    }
}
