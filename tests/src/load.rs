// SPDX-License-Identifier: GPL-2.0-only
//! Loading, on each kernel: the verifier accepts every program, a VM is recognised, and all is left as it was.

use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Result, ensure};
use cohort::exit::Exit;
use cohort_lab::inside::scheduler;

use crate::Test;
use crate::host::{Guest, lab, start_cohort, stop_cohort, vm_stats};

pub const TESTS: &[Test] = &[
    (
        "it_loads_on_this_kernel_and_leaves_cleanly",
        loads_and_leaves,
    ),
    ("a_vm_started_before_it_is_recognised", older_vm),
    (
        "a_vm_started_after_it_is_recognised_and_forgotten",
        newer_vm,
    ),
    (
        "a_second_instance_is_refused_with_its_own_exit_code",
        second_instance,
    ),
    (
        "without_privileges_it_is_refused_with_its_own_exit_code",
        no_privileges,
    ),
];

fn loads_and_leaves() -> Result<()> {
    println!("    {}", lab()?.describe());
    let cohort = start_cohort()?;
    sleep(Duration::from_secs(1));
    stop_cohort(cohort)?;
    ensure!(
        scheduler::loaded_ops().is_empty(),
        "a scheduler is still loaded"
    );
    Ok(())
}

fn older_vm() -> Result<()> {
    let guest = Guest::busy("older", 2)?;
    let cohort = start_cohort()?;
    sleep(Duration::from_millis(1_500));
    let vm = vm_stats(guest.micro.pid() as u32)?;
    ensure!(vm.vcpus == 2, "{} vCPUs were recognised, not 2", vm.vcpus);
    stop_cohort(cohort)
}

fn newer_vm() -> Result<()> {
    let cohort = start_cohort()?;
    let guest = Guest::busy("newer", 2)?;
    sleep(Duration::from_millis(1_500));
    let pid = guest.micro.pid() as u32;
    let vm = vm_stats(pid)?;
    ensure!(vm.vcpus == 2, "{} vCPUs were recognised, not 2", vm.vcpus);
    drop(guest);
    sleep(Duration::from_millis(500));
    ensure!(
        vm_stats(pid).is_err(),
        "the VM is gone, but not its statistics"
    );
    stop_cohort(cohort)
}

fn run_refused(command: &mut Command, exit: Exit, word: &str) -> Result<()> {
    let output = command.output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(
        output.status.code() == Some(exit.code().into()),
        "it ended with {}: {said}",
        output.status
    );
    ensure!(
        said.contains(word),
        "its sentence does not say \"{word}\": {said}"
    );
    Ok(())
}

fn second_instance() -> Result<()> {
    let cohort = start_cohort()?;
    run_refused(
        Command::new("cohort").arg("run"),
        Exit::AlreadyRunning,
        "running",
    )?;
    stop_cohort(cohort)
}

fn no_privileges() -> Result<()> {
    let mut command = Command::new("setpriv");
    command.args([
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
        "cohort",
        "run",
    ]);
    run_refused(&mut command, Exit::NoPrivileges, "root")
}
