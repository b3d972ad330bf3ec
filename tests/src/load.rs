// SPDX-License-Identifier: GPL-2.0-only
//! Loading, on the newest kernel of each series: the verifier accepts every program, a VM is recognised, and all is left as it
//! was. Starting, on one kernel: hosts that are full, and what is refused.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use cohort::commands::compare::scheduler;
use cohort::process::exit::Exit;
use cohort::process::wait::wait_for;
use cohort::scheduler::features::Features;
use cohort_lab::inside::cgroup::CpuMax;
use cohort_lab::inside::hooks::Programs;
use cohort_micro::Spec;
use serde_json::Value;

use crate::host::{
    Guest, HALT_POLL_NS, HostLoad, PATIENCE, Setting, busy, cohort_stats, dozing, lab, refused,
    refused_without_root, start_cohort, start_cohort_patiently, stop_cohort, vcpus_of, vm_stats,
    watch_anew,
};
use crate::{Test, compare, export};

/// What differs between kernels.
pub const TESTS: &[Test] = &[
    (
        "it_loads_on_this_kernel_and_leaves_cleanly",
        loads_and_leaves,
    ),
    (
        "a_vm_started_after_it_is_recognised_and_forgotten",
        newer_vm,
    ),
    (
        "kvm_loaded_after_it_is_noticed_and_seen_into",
        kvm_comes_later,
    ),
    ("the_observer_sees_a_vm_under_any_scheduler", watched),
];

/// What does not.
pub const START: &[Test] = &[
    ("a_vm_started_before_it_is_recognised", older_vm),
    (
        "a_start_under_load_has_a_queue_for_each_cgroup",
        crowded_start,
    ),
    ("a_vm_of_256_vcpus_most_of_them_idle_runs", wide_vm),
    (
        "the_doctor_finds_this_host_fit_and_what_is_wrong_with_it",
        examined,
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

/// On a kernel without sched_ext.
pub const WITHOUT_SCHED_EXT: &[Test] = &[
    ("the_observer_sees_a_vm", watched_without_sched_ext),
    ("vms_are_exported", export::shows_a_vm),
    (
        "a_scheduler_is_refused_with_its_own_exit_code",
        refused_without_sched_ext,
    ),
    (
        "the_kernels_own_scheduler_is_compared_with_itself",
        compare::stock_with_itself,
    ),
];

/// What the verifier may look at, so that Cohort loads soon.
const MOST_VERIFIED: u32 = 60_000;
/// The same of verifiers that see later that two paths are one.
const MOST_VERIFIED_ONCE: u32 = 97_000;

/// The kernel lacks something that Cohort can do without.
fn kernel_lacks() -> bool {
    !Features::of_this_kernel().blind_spots().is_empty()
}

/// KVM has vCPUs that spin leave the guest. On CPUs that cannot count PAUSE, as the fast machine's, older kernels do not.
fn stops_spinners() -> bool {
    let count = fs::read_to_string("/sys/module/kvm_amd/parameters/pause_filter_count");
    count.map_or(true, |count| count.trim() != "0")
}

fn loads_and_leaves() -> Result<()> {
    println!("    {}", lab()?.describe());
    let cohort = start_cohort()?;
    sleep(Duration::from_secs(1));
    let verified = Programs::of(cohort.pid())?.verified();
    let sum: u32 = verified.iter().map(|(_, instructions)| instructions).sum();
    println!("    the verifier looked at {sum} instructions, most of them of:");
    for (name, instructions) in verified.iter().take(8) {
        println!("    {name:<16} {instructions:>8}");
    }
    let most = if kernel_lacks() {
        MOST_VERIFIED_ONCE
    } else {
        MOST_VERIFIED
    };
    ensure!(sum <= most, "{sum} are more than {most}");
    stop_cohort(cohort)?;
    ensure!(
        scheduler::loaded_ops().is_empty(),
        "a scheduler is still loaded"
    );
    Ok(())
}

fn older_vm() -> Result<()> {
    let guest = dozing("older", 2)?;
    let cohort = start_cohort()?;
    sleep(Duration::from_millis(1_500));
    let vm = vm_stats(guest.micro.pid() as u32)?;
    ensure!(vm.vcpus == 2, "{} vCPUs were recognised, not 2", vm.vcpus);
    stop_cohort(cohort)
}

fn newer_vm() -> Result<()> {
    let cohort = start_cohort()?;
    let guest = dozing("newer", 2)?;
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

/// All tasks of the host come at once: nobody may be left to the root's.
fn crowded_start() -> Result<()> {
    const CGROUPS: usize = 20;
    let cpus = lab()?.guest_cpus;
    let _loads = (0..CGROUPS)
        .map(|number| HostLoad::start(&format!("crowd{number}"), &[0], &cpus))
        .collect::<Result<Vec<_>>>()?;
    let cohort = start_cohort()?;
    let stats = cohort_stats()?;
    ensure!(
        stats.entities_used >= CGROUPS as u64,
        "{} entities for {CGROUPS} cgroups that compute",
        stats.entities_used
    );
    ensure!(
        stats.exhausted == 0,
        "{} times no group or entity was free",
        stats.exhausted
    );
    stop_cohort(cohort)
}

fn modprobe(arguments: &[&str]) -> Result<()> {
    let status = Command::new("modprobe").args(arguments).status()?;
    ensure!(status.success(), "modprobe {arguments:?}: {status}");
    Ok(())
}

/// Without KVM there is nothing to look into; when it comes, Cohort is loaded anew, and sees IPIs too.
fn kvm_comes_later() -> Result<()> {
    let of_vendor = ["kvm_amd", "kvm_intel"]
        .into_iter()
        .find(|module| Path::new("/sys/module").join(module).exists())
        .context("KVM is not loaded")?;
    modprobe(&["--remove", of_vendor, "kvm"])?;
    let cohort = start_cohort()?;
    modprobe(&[of_vendor])?;
    wait_for("cohort noticing KVM", PATIENCE, || {
        Ok(cohort.output().contains("loaded anew").then_some(()))
    })?;
    let spec = Spec::new("later")
        .vcpu("loop: compute 20us; ipi 1 0x41; wait-answer")
        .vcpu("loop: compute 100us");
    let guest = Guest::start(&spec)?;
    let pid = guest.micro.pid() as u32;
    wait_for("IPIs of a VM", PATIENCE, || {
        // Until it is loaded again nothing is known of the VM.
        let vm = vm_stats(pid).ok();
        Ok(vm.filter(|vm| vm.vcpus == 2 && vm.ipis > 0))
    })?;
    drop(guest);
    stop_cohort(cohort)
}

/// Two of its vCPUs work, the others sleep and look around now and then, as idle guests do.
fn wide_vm() -> Result<()> {
    // 128 vCPUs per CPU begin at the same time, with some milliseconds of work each: in fair turns one waits for seconds.
    let cohort = start_cohort_patiently()?;
    let wide = (0..254).fold(busy("wide", 2), |spec, _| spec.vcpu("loop: sleep 2s"));
    let guest = Guest::start(&wide)?;
    let pid = guest.micro.pid() as u32;
    wait_for("all vCPUs of the wide VM", PATIENCE, || {
        Ok((vm_stats(pid)?.vcpus == 256).then_some(()))
    })?;
    let before = guest.micro.state.progress();
    wait_for("progress of the wide VM", PATIENCE, || {
        Ok((guest.micro.state.progress() > before).then_some(()))
    })?;
    let exhausted = cohort_stats()?.exhausted;
    ensure!(exhausted == 0, "{exhausted} tasks found no queue");
    drop(guest);
    stop_cohort(cohort)
}

fn watched() -> Result<()> {
    let guest = Guest::busy("watched", 3)?;
    sees(&guest, "stock")?;
    let cohort = start_cohort()?;
    sees(&guest, "cohort")?;
    stop_cohort(cohort)
}

/// The observer sees three busy vCPUs on two CPUs under a scheduler whose name begins with `scheduler`.
fn sees(guest: &Guest, scheduler: &str) -> Result<()> {
    let view = watch_anew(1)?;
    let all = vcpus_of(&view, guest)?;
    println!(
        "    {}: {} vCPUs run {:.1} %, ready {:.1} %",
        view.scheduler, all.vcpus, all.run_pct, all.ready_pct
    );
    ensure!(
        view.scheduler.starts_with(scheduler),
        "it takes {} for the scheduler",
        view.scheduler
    );
    ensure!(all.vcpus == 3, "{} vCPUs are seen, not 3", all.vcpus);
    ensure!(
        all.run_pct > 10.0 && all.ready_pct > 10.0 && all.run_pct + all.ready_pct > 95.0,
        "three busy vCPUs on two CPUs run {:.1} % and wait {:.1} % of the time",
        all.run_pct,
        all.ready_pct
    );
    Ok(())
}

fn watched_without_sched_ext() -> Result<()> {
    println!("    {}", lab()?.describe());
    sees(&Guest::busy("watched", 3)?, "stock")
}

fn refused_without_sched_ext() -> Result<()> {
    refused(
        Command::new("cohort").arg("run"),
        Exit::NoSchedExt,
        "CONFIG_SCHED_CLASS_EXT",
    )?;
    refused(
        Command::new("cohort").arg("compare"),
        Exit::NoSchedExt,
        "cohort compare --scheduler stock",
    )?;
    let findings = findings(Exit::Unfit)?;
    ensure!(findings["kernel"].0 == "refused");
    Ok(())
}

/// What the doctor finds: severity and what was seen, by check. It ends with `exit`.
fn findings(exit: Exit) -> Result<BTreeMap<String, (String, String)>> {
    let output = Command::new("cohort").args(["doctor", "--json"]).output()?;
    ensure!(
        output.status.code() == Some(exit.code().into()),
        "it ended with {}: {}",
        output.status,
        String::from_utf8_lossy(&output.stdout)
    );
    let findings: Vec<Value> = serde_json::from_slice(&output.stdout)?;
    let word = |finding: &Value, key: &str| finding[key].as_str().unwrap_or_default().to_owned();
    Ok(findings
        .iter()
        .map(|finding| {
            let about = (word(finding, "severity"), word(finding, "seen"));
            (word(finding, "check"), about)
        })
        .collect())
}

/// A host that polls after halts, as KVM does by default, and has a VM with a cap, then the same without.
fn examined() -> Result<()> {
    let polling = Setting::set(HALT_POLL_NS, "200000")?;
    let guest = Guest::busy("capped", 4)?;
    guest.cgroup().set_max(CpuMax::Quota {
        quota_us: 20_000,
        period_us: 100_000,
    })?;
    let found = findings(Exit::Advice)?;
    println!("    {found:?}");
    let severity = |check: &str| found.get(check).map_or("none", |(severity, _)| severity);
    let kernel = if kernel_lacks() { "note" } else { "fine" };
    let spin_exits = if stops_spinners() { "fine" } else { "warning" };
    for (check, expected) in [
        ("kernel", kernel),
        ("core-scheduling", "fine"),
        ("cgroups", "fine"),
        ("spin-exits", spin_exits),
        ("sight", "fine"),
        ("overcommitment", "fine"),
        ("halt-polling", "fine"),
        ("caps", "note"),
    ] {
        ensure!(
            severity(check) == expected,
            "{check} is {} and not {expected}",
            severity(check)
        );
    }
    ensure!(
        found["overcommitment"].1.contains("4 vCPUs"),
        "it counts otherwise: {:?}",
        found["overcommitment"]
    );
    drop(polling);
    drop(guest);
    let _none = Setting::set(HALT_POLL_NS, "0")?;
    let cohort = start_cohort()?;
    let found = findings(if stops_spinners() {
        Exit::Success
    } else {
        Exit::Advice
    })?;
    ensure!(found["scheduler"].1 == "Cohort runs", "{found:?}");
    stop_cohort(cohort)
}

fn second_instance() -> Result<()> {
    let cohort = start_cohort()?;
    refused(
        Command::new("cohort").arg("run"),
        Exit::AlreadyRunning,
        "running",
    )?;
    stop_cohort(cohort)
}

fn no_privileges() -> Result<()> {
    refused_without_root("run")
}
