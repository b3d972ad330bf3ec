// SPDX-License-Identifier: GPL-2.0-only
//! The demonstration: two VMs that fight over a lock, Cohort taking over and giving back while they run. Not a
//! benchmark: a few short windows show a direction.
use std::time::Duration;

use anyhow::Result;
use cohort::compare::rounds::arm_names;
use cohort::compare::scheduler::Scheduler;

use super::bench::print_window;
use super::booted::{GuestSpec, Workload, start_all};
use super::info::LabInfo;
use super::report::summarize;
use super::windows::{Timing, run_windows};

const BOOT_TIMEOUT: Duration = Duration::from_secs(120);
const TIMING: Timing = Timing {
    window: Duration::from_millis(500),
    settle: Duration::from_millis(150),
};
const PAIRS: usize = 3;

/// Runs the demonstration with `scheduler` against the stock one.
///
/// # Errors
/// When anything fails; that Cohort is not faster is no failure, it is printed like everything else.
pub fn run(lab: &LabInfo, scheduler: Scheduler) -> Result<()> {
    println!("{}", lab.describe());
    println!(
        "\nTwo VMs of 2 vCPUs boot on CPUs {:?}. In each VM, two threads take turns in a ticket lock: a vCPU that is\n\
         preempted inside the lock makes its sibling spin. The guests know nothing of the host.\n",
        lab.guest_cpus
    );
    let workload = Workload::new("spin", lab);
    let specs = ["vm1", "vm2"].map(|name| GuestSpec::new(name, 2, workload.clone()));
    let mut guests = start_all(lab, specs.to_vec(), BOOT_TIMEOUT)?;
    println!("Both are up and take their locks. Now the scheduler is exchanged under them:\n");
    let schedulers = [Scheduler::Stock, scheduler];
    let windows = run_windows(&mut guests, &schedulers, TIMING, PAIRS, print_window)?;
    let names = arm_names(&schedulers);
    let summary = summarize(&windows, &names)?;
    let change = summary[1]
        .ratio
        .as_ref()
        .map_or(f64::NAN, |ratio| ratio.median);
    println!(
        "\nMedian of {PAIRS} windows of {:.1} s each: {} {:.0}, {} {:.0} locked operations per second ({change:.2} times).",
        TIMING.window.as_secs_f64(),
        names[0],
        summary[0].operations_per_s,
        names[1],
        summary[1].operations_per_s,
    );
    println!("The stock scheduler is back; the guests ran on throughout.\n");
    for caveat in lab.caveats() {
        println!("- {caveat}");
    }
    println!("- A few short windows show a direction; `make bench` measures.");
    Ok(())
}
