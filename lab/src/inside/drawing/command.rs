// SPDX-License-Identifier: GPL-2.0-only
//! `lab inside draw`: the same guests drawn under the scheduler that runs, and under Cohort. Not for figures (`bench`).
use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use cohort::compare::scheduler::{Scheduler, loaded_ops};

use super::{COLUMNS, Timeline, Vm, record, svg, text};
use crate::inside::cgroup::{Cgroup, while_frozen};
use crate::inside::info::LabInfo;
use crate::inside::micro::{MicroGuest, locked};
use crate::inside::windows::LOGS;

const NAMES: [&str; 3] = ["vm1", "vm2", "vm3"];
/// From the guests' start, or a scheduler's, to the recording.
const SETTLE: Duration = Duration::from_secs(1);

/// What to draw, and where.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Lab time to draw, ms
    #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    ms: u64,
    /// Write a picture of both drawings to this file, too; below /out it is there after the run
    #[arg(long)]
    svg: Option<PathBuf>,
    /// Colour the letters
    #[arg(long)]
    color: bool,
}

/// Draws three micro guests as wide as the lab's guest CPUs, the vCPUs of each in one lock, under the scheduler that runs
/// and under Cohort.
///
/// # Errors
/// When a guest or Cohort does not start, or nothing can be recorded.
pub fn run(lab: &LabInfo, options: &Options) -> Result<()> {
    let vcpus = lab.guest_cpus.len();
    let start = |name| MicroGuest::start(&locked(name, vcpus));
    let guests = NAMES.into_iter().map(start).collect::<Result<Vec<_>>>()?;
    let before = draw(&scheduler_name(), lab, &guests, options)?;
    let cgroups: Vec<&Cgroup> = guests.iter().map(MicroGuest::cgroup).collect();
    // Loading takes longer the more of the host's CPUs are busy.
    let mut cohort = while_frozen(&cgroups, || {
        let cohort = Scheduler::cohort(&[]).start(Path::new(LOGS))?;
        cohort.context("cohort is a program, so there is one to stop")
    })?;
    let under_cohort = draw("Cohort", lab, &guests, options)?;
    cohort.check()?;
    cohort.stop()?;
    if let Some(path) = &options.svg {
        fs::write(path, svg(&[before, under_cohort]))
            .with_context(|| format!("{} cannot be written", path.display()))?;
    }
    Ok(())
}

/// Lets the guests settle, records and prints.
fn draw(title: &str, lab: &LabInfo, guests: &[MicroGuest], options: &Options) -> Result<Timeline> {
    sleep(SETTLE);
    let vms = guests.iter().map(|guest| Vm {
        name: guest.micro.state.name(),
        vcpu_tids: guest.vcpu_tids(),
    });
    let length = Duration::from_millis(options.ms);
    let timeline = record(title, &lab.guest_cpus, vms.collect(), length)?;
    println!("{}", text(&timeline, COLUMNS, options.color));
    Ok(timeline)
}

/// What schedules now, for a title.
fn scheduler_name() -> String {
    match loaded_ops() {
        name if name.is_empty() => "stock scheduler".into(),
        name => name,
    }
}
