// SPDX-License-Identifier: GPL-2.0-only
//! The demonstration: two VMs that fight over a lock, and `cohort compare` as on any host. Not a benchmark: a few short
//! windows show a direction.
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::booted::{GuestSpec, Workload, start_all};
use super::info::LabInfo;

const BOOT_TIMEOUT: Duration = Duration::from_secs(120);
/// Enough to find something although one pair contradicts.
const ROUNDS: &str = "8";
const WINDOW_S: &str = "0.5";
const SETTLE_S: &str = "0.2";

/// Runs the demonstration with `scheduler`, a command line as `cohort compare` takes it, against the stock one.
///
/// # Errors
/// When anything fails; that Cohort is not faster is no failure, it is printed like everything else.
pub fn run(lab: &LabInfo, scheduler: &str) -> Result<()> {
    println!("{}", lab.describe());
    println!(
        "\nTwo VMs of 2 vCPUs boot on CPUs {:?}. In each VM, two threads take turns in a ticket lock: a vCPU that is\n\
         preempted inside the lock makes its sibling spin. The guests know nothing of the host.\n",
        lab.guest_cpus
    );
    let workload = Workload::new("spin");
    let specs = ["vm1", "vm2"].map(|name| GuestSpec::new(name, 2, workload.clone()));
    let guests = start_all(lab, specs.to_vec(), BOOT_TIMEOUT)?;
    println!("Both are up and take their locks. Now the scheduler is exchanged under them:\n");
    let places = guests
        .iter()
        .map(|guest| Ok(guest.counter_place()?.to_string()))
        .collect::<Result<Vec<_>>>()?;
    let counter = format!("operations=lab inside operations {}", places.join(" "));
    let arguments = [
        ["--scheduler", scheduler],
        ["--rounds", ROUNDS],
        ["--window-s", WINDOW_S],
        ["--settle-s", SETTLE_S],
        ["--counter", &counter],
    ];
    println!("cohort compare {}\n", shell_words(arguments.as_flattened()));
    let status = Command::new("cohort")
        .arg("compare")
        .args(arguments.as_flattened())
        .status()
        .context("cohort compare")?;
    ensure!(status.success(), "cohort compare ended with {status}");
    println!("\nThe stock scheduler is back; the guests ran on throughout.\n");
    for caveat in lab.caveats() {
        println!("- {caveat}");
    }
    println!("- A few short windows show a direction; `make bench` measures.");
    Ok(())
}

/// As somebody would type them.
fn shell_words(arguments: &[&str]) -> String {
    let word = |argument: &&str| match argument.contains(' ') {
        true => format!("'{argument}'"),
        false => (*argument).to_owned(),
    };
    arguments.iter().map(word).collect::<Vec<_>>().join(" ")
}
