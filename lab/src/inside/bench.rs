// SPDX-License-Identifier: GPL-2.0-only
//! One benchmark case: some VMs with the same workload, windows under the stock scheduler and others in turn, one
//! VM alone as the reference. Not for single windows (`windows`) or their printing (`report`).
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use clap::ValueEnum;

use super::booted::{GuestSpec, Workload, start_all};
use super::info::LabInfo;
use super::report::CaseResult;
use super::windows::{ALONE, Subject, Timing, longest_operation, operations, run_windows, values};
use cohort::compare::report::{Comparison, Setting, label};
use cohort::compare::rounds::arm_names;
use cohort::compare::scheduler::Scheduler;
use cohort::compare::window::Window;
use cohort::mechanism::{Mechanism, OFF_BY_DEFAULT};

use crate::guest::{OWN_WORKLOADS, REAL_WORKLOADS};

/// Where results accumulate; copied out of L1 at its end.
pub const RESULTS_PATH: &str = "/out/results.jsonl";
/// A guest is up after 1.4 s of lab time at a dilation of 20; at 1, three at a time need most of a minute.
pub(super) const BOOT_TIMEOUT: Duration = Duration::from_secs(120);
const NEIGHBOUR_VCPUS: u32 = 2;

/// A case: a workload and a number of VMs.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// One of our own or of the real workloads (`crate::guest`).
    pub workload: String,
    /// Number of VMs.
    pub vms: u32,
}

impl Case {
    /// The least median ratio to the stock scheduler that Cohort must reach; barrier and the real workloads are
    /// reported only.
    pub fn floor(&self) -> Option<f64> {
        match self.workload.as_str() {
            "busy" => Some(0.99),
            "pipe" => Some(0.97),
            "spin" | "tlb" => Some(1.0),
            _ => None,
        }
    }
}

impl FromStr for Case {
    type Err = anyhow::Error;

    fn from_str(name: &str) -> Result<Self> {
        let digits = name.trim_start_matches(|letter: char| letter.is_ascii_lowercase());
        let workload = &name[..name.len() - digits.len()];
        ensure!(
            OWN_WORKLOADS.contains(&workload) || REAL_WORKLOADS.contains(&workload),
            "\"{name}\" is no case: it must start with one of {}, {}, as in \"spin2\"",
            OWN_WORKLOADS.join(", "),
            REAL_WORKLOADS.join(", ")
        );
        let vms = digits.parse().map_err(|_| {
            anyhow!("\"{name}\" is no case: after {workload} comes a number of VMs")
        })?;
        ensure!(
            (1..=8).contains(&vms),
            "\"{name}\" asks for {vms} VMs; possible are 1 to 8"
        );
        Ok(Self {
            workload: workload.into(),
            vms,
        })
    }
}

impl std::fmt::Display for Case {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}{}", self.workload, self.vms)
    }
}

/// How to run a case.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// Pairs of windows; fewer than six give less than 95 % confidence
    #[arg(long, default_value_t = 8)]
    pub pairs: usize,
    /// Length of a window in ms of lab time
    #[arg(long, default_value_t = 1000)]
    pub window_ms: u64,
    /// From a scheduler's start to its window, in ms of lab time
    #[arg(long, default_value_t = 200)]
    pub settle_ms: u64,
    /// vCPUs of each VM
    #[arg(long, default_value_t = 2)]
    pub vcpus: u32,
    /// Iterations of an empty loop per operation; about 100 us of lab time when not given
    #[arg(long)]
    pub work: Option<u64>,
    /// Part of spin's work that is done inside the lock, in percent
    #[arg(long, default_value_t = 33, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub locked_percent: u32,
    /// Let threads wait asleep at the barrier
    #[arg(long)]
    pub sleeping: bool,
    /// Offer guests KVM's paravirtual spin locks, TLB flushes, IPIs and yields
    #[arg(long)]
    pub paravirtual: bool,
    /// Let the guests of this case, of two vCPUs each, run beside; only the others' operations count
    #[arg(long, value_name = "CASE")]
    pub beside: Option<Case>,
    /// Compare stock with this: "cohort", "cohort OPTIONS…", "stock" (to see the noise), "watched" (stock, with
    /// `cohort watch` beside it) or any command line; may be repeated
    #[arg(long = "scheduler", value_name = "COMMAND", default_value = "cohort")]
    pub schedulers: Vec<String>,
    /// Compare stock also with Cohort without each mechanism that is on by default, and with each one that is off
    #[arg(long)]
    pub each_mechanism: bool,
}

impl Options {
    /// Lengths of windows.
    pub fn timing(&self) -> Timing {
        Timing {
            window: Duration::from_millis(self.window_ms),
            settle: Duration::from_millis(self.settle_ms),
        }
    }

    /// The stock scheduler and those that are compared with it.
    ///
    /// # Errors
    /// When a command is empty.
    pub fn schedulers(&self) -> Result<Vec<Scheduler>> {
        let mut schedulers = vec![Scheduler::Stock];
        for command in &self.schedulers {
            schedulers.push(command.parse()?);
        }
        if self.each_mechanism {
            for mechanism in Mechanism::value_variants() {
                let switch = match OFF_BY_DEFAULT.contains(mechanism) {
                    true => "--on",
                    false => "--off",
                };
                schedulers.push(Scheduler::cohort(&[switch, &mechanism.name()]));
            }
        }
        Ok(schedulers)
    }

    /// The workload `name` as these options say.
    pub fn workload(&self, name: &str) -> Workload {
        let defaults = Workload::new(name);
        Workload {
            work: self.work.unwrap_or(defaults.work),
            locked_percent: self.locked_percent,
            sleeping: self.sleeping,
            ..defaults
        }
    }

    /// The guests of `case`.
    pub fn guests(&self, case: &Case) -> Vec<GuestSpec> {
        self.named_guests("vm", case, self.vcpus)
    }

    /// Those that run beside.
    fn neighbours(&self) -> Vec<GuestSpec> {
        let beside = self.beside.iter();
        beside
            .flat_map(|case| self.named_guests("beside", case, NEIGHBOUR_VCPUS))
            .collect()
    }

    fn named_guests(&self, name: &str, case: &Case, vcpus: u32) -> Vec<GuestSpec> {
        let workload = self.workload(&case.workload);
        (1..=case.vms)
            .map(|number| GuestSpec {
                paravirtual: self.paravirtual,
                ..GuestSpec::new(&format!("{name}{number}"), vcpus, workload.clone())
            })
            .collect()
    }
}

/// Runs one case, prints each window as it is done and the table, and appends the result to [`RESULTS_PATH`].
///
/// # Errors
/// When anything failed while measuring, or Cohort is below the case's floor.
pub fn run(lab: &LabInfo, case: &Case, options: &Options) -> Result<()> {
    let schedulers = options.schedulers()?;
    let specs = options.guests(case);
    let beside = options.neighbours();
    let name = match &options.beside {
        Some(neighbours) => format!("{case} beside {neighbours}"),
        None => case.to_string(),
    };
    println!("{name}: {} guests are booting", specs.len() + beside.len());
    let mut all = start_all(lab, [specs.clone(), beside].concat(), BOOT_TIMEOUT)?;
    let Timing { window, settle } = options.timing();
    let setting = Setting::begin(&lab.kernel, window, settle);
    let windows = run_windows(
        &mut all,
        specs.len(),
        &schedulers,
        options.timing(),
        options.pairs,
        print_window,
    )
    .with_context(|| format!("Case {name} failed"))?;
    all[specs.len()..]
        .iter_mut()
        .try_for_each(Subject::ensure_alive)?;
    let (alone, windows): (Vec<Window>, Vec<Window>) = windows
        .into_iter()
        .partition(|window| window.scheduler == ALONE);
    let result = CaseResult {
        case: name,
        lab: lab.clone(),
        guests: specs,
        alone: values(&alone, &operations()),
        alone_longest_ms: values(&alone, &longest_operation()),
        comparison: Comparison::of(setting, windows, arm_names(&schedulers))?,
        floor: case.floor(),
    };
    result.append_to(Path::new(RESULTS_PATH))?;
    println!("\n{}", result.text());
    result.check_floor()
}

/// Prints a window on one line.
fn print_window(window: &Window) {
    let others = window
        .numbers
        .iter()
        .filter(|(metric, _)| **metric != operations());
    let others: Vec<String> = others
        .map(|(metric, value)| format!("{} {value:.1}", label(metric)))
        .collect();
    println!(
        "pair {:<2} {:<12} {:>8.0} operations/s; {}",
        window.round + 1,
        window.scheduler,
        window.numbers[&operations()],
        others.join(", ")
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_are_a_workload_and_a_number() {
        let case: Case = "barrier3".parse().unwrap();
        assert_eq!(
            case,
            Case {
                workload: "barrier".into(),
                vms: 3
            }
        );
        assert_eq!(case.to_string(), "barrier3");
        for workload in REAL_WORKLOADS {
            let case: Case = format!("{workload}2").parse().unwrap();
            assert_eq!((case.workload.as_str(), case.vms), (workload, 2));
        }
        for wrong in [
            "spin", "spin0", "spin9", "spinx", "2", "", "fork2", "spin2x",
        ] {
            assert!(wrong.parse::<Case>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn floors_are_those_that_were_promised() {
        let floor = |name: &str| name.parse::<Case>().unwrap().floor();
        assert_eq!(floor("busy2"), Some(0.99));
        assert_eq!(floor("pipe3"), Some(0.97));
        assert_eq!(floor("spin2"), Some(1.0));
        assert_eq!(floor("tlb3"), Some(1.0));
        assert_eq!(floor("barrier2"), None);
        assert_eq!(floor("redis2"), None);
    }
}
