// SPDX-License-Identifier: GPL-2.0-only
//! Nothing that happens to the host or to its guests stops Cohort, and nothing that happens to Cohort stops them. The
//! watchdog's limit is 2 s in all of these: a task that waits longer ends the scheduler, and the test.

use std::fs;
use std::panic::resume_unwind;
use std::path::Path;
use std::process::Command;
use std::sync::Barrier;
use std::thread::{scope, sleep, spawn};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cohort::commands::compare::scheduler;
use cohort::process::exit::Exit;
use cohort::process::wait::wait_for;
use cohort::scheduler::metrics::HostStats;
use cohort_lab::inside::booted::{BootedGuest, GuestSpec, Workload, start_all};
use cohort_lab::inside::process::start;
use cohort_micro::{Spec, StillVm};
use nix::sys::signal::Signal;

use crate::Test;
use crate::host::{
    Guest, HostLoad, PATIENCE, Service, Setting, assert_progress, busy, cohort_stats, dozing,
    ensure_back_to_stock, lab, set_online, sleepy, start_cohort, stop_cohort, wait_for_sched_ext,
};

/// Alone, as it takes long.
pub const ENTERING: &[Test] = &[(
    "entering_and_leaving_five_times_never_stops_a_guest",
    enter_and_leave,
)];

pub const TESTS: &[Test] = &[
    (
        "affinities_that_change_all_the_time_are_obeyed",
        affinity_churn,
    ),
    ("cpus_going_offline_and_online_lose_no_task", cpu_hotplug),
    ("a_hundred_vms_come_and_go", vm_churn),
    ("cgroups_with_tasks_come_move_and_go", cgroup_churn),
    (
        "of_two_booted_guests_one_lives_on_when_the_other_is_killed",
        one_booted_guest_is_killed,
    ),
    (
        "kill_9_gives_the_host_back_and_the_next_start_says_so",
        killed,
    ),
    (
        "the_kernel_removing_it_is_told_by_its_exit_code",
        removed_by_sysrq,
    ),
    (
        "the_watchdog_removing_it_is_told_by_its_exit_code",
        removed_by_watchdog,
    ),
];

fn enter_and_leave() -> Result<()> {
    let guests = [Guest::busy("first", 2)?, Guest::start(&sleepy("second"))?];
    for _ in 0..5 {
        let cohort = start_cohort()?;
        guests.iter().try_for_each(assert_progress)?;
        stop_cohort(cohort)?;
        guests.iter().try_for_each(assert_progress)?;
    }
    Ok(())
}

/// A guest that will not be there for long: busy, or with IPIs that nobody has answered when it dies.
pub fn passing(name: &str, number: usize) -> Spec {
    match number % 3 {
        2 => Spec::new(name)
            .vcpu("loop: ipi 1 0x41; compute 20us")
            .vcpu("loop: compute 1ms"),
        vcpus => busy(name, 1 + vcpus),
    }
}

fn affinity_churn() -> Result<()> {
    let guest = Guest::busy("beside", 2)?;
    let cohort = start_cohort()?;
    let mut command = Command::new("stress-ng");
    command.args([
        "--quiet",
        // Sixteen processes. Of many more each waits for long on an emulated host.
        "--affinity",
        "1",
        "--affinity-rand",
        "--timeout",
        "5",
    ]);
    let mut churn = start(command, &[], None)?;
    let load = HostLoad::start("moved", &[0, 0, 0], &[])?;
    let until = Instant::now() + Duration::from_secs(5);
    let all = lab()?.cpus;
    let mut mask = 1u32;
    while Instant::now() < until {
        // Every set of CPUs in turn: 0, 1, 0 and 1, 2, …
        let cpus: Vec<u32> = (0..all).filter(|cpu| mask >> cpu & 1 == 1).collect();
        for index in 0..load.pids().len() {
            load.bind(index, &cpus)?;
        }
        mask = mask % ((1 << all) - 1) + 1;
        sleep(Duration::from_millis(1));
    }
    ensure!(
        churn.wait()?.success(),
        "stress-ng --affinity found a fault"
    );
    assert_progress(&guest)?;
    let stats = cohort_stats()?;
    ensure!(
        stats.exhausted == 0,
        "{} tasks found no group or entity",
        stats.exhausted
    );
    stop_cohort(cohort)
}

fn cpu_hotplug() -> Result<()> {
    let cpus = lab()?.guest_cpus;
    let (guest, load) = (
        Guest::busy("beside", 3)?,
        HostLoad::start("load", &[0, 0], &cpus)?,
    );
    let cohort = start_cohort()?;
    for _ in 0..10 {
        // The kernel brings those elsewhere that are bound to the CPU, also those that wait as it goes.
        let _bound = HostLoad::start("bound", &[0; 4], &cpus[1..2])?;
        for online in [false, true] {
            set_online(cpus[1], online)?;
            assert_progress(&guest)?;
            sleep(Duration::from_millis(100));
        }
    }
    drop(load);
    stop_cohort(cohort)
}

/// Ten VMs come, and go when all are there. At once: what takes long is KVM's waiting, each time one comes or goes.
pub fn ten_come_and_go(round: usize) -> Result<()> {
    let all_started = Barrier::new(10);
    let comes_and_goes = |number| -> Result<()> {
        let guest = Guest::start(&passing(&format!("churn{round}-{number}"), number));
        all_started.wait();
        guest.map(drop)
    };
    scope(|scope| {
        let threads: Vec<_> = (0..10)
            .map(|number| scope.spawn(move || comes_and_goes(number)))
            .collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
    })
}

fn vm_churn() -> Result<()> {
    let _still = StillVm::create()?;
    let beside = dozing("beside", 2)?;
    let cohort = start_cohort()?;
    let stats = leave_nothing(10, ten_come_and_go)?;
    assert_progress(&beside)?;
    ensure!(
        stats.vms.len() == 1,
        "VMs that are gone are still known: {:?}",
        stats.vms
    );
    stop_cohort(cohort)
}

/// What comes and goes in so many rounds leaves nothing behind; what Cohort counts afterwards.
fn leave_nothing(rounds: usize, come_and_go: impl Fn(usize) -> Result<()>) -> Result<HostStats> {
    // What the first ones need may stay: entities of the cgroups they started in.
    come_and_go(0)?;
    let before = cohort_stats()?;
    (1..rounds).try_for_each(come_and_go)?;
    let after = cohort_stats()?;
    let used = |stats: &HostStats| (stats.groups_used, stats.entities_used);
    let (used_before, used_after) = (used(&before), used(&after));
    println!("    groups, entities in use: {used_before:?}, then {used_after:?}");
    ensure!(
        used_after.0 <= used_before.0 && used_after.1 <= used_before.1 + 4,
        "groups and entities of those that are gone were not given back: {used_before:?}, then {used_after:?}"
    );
    ensure!(
        after.exhausted == 0,
        "{} tasks found no group or entity",
        after.exhausted
    );
    Ok(after)
}

fn cgroup_churn() -> Result<()> {
    let guest = Guest::busy("beside", 2)?;
    let cohort = start_cohort()?;
    leave_nothing(25, |round| {
        let first = HostLoad::start(&format!("from{round}"), &[0, 5], &[])?;
        let second = cohort_lab::inside::cgroup::Cgroup::create(&format!("to{round}"))?;
        second.set_weight(1 + round as u32 * 400)?;
        let mut pids = first.pids().into_iter();
        pids.try_for_each(|pid| second.add(pid))
    })?;
    assert_progress(&guest)?;
    stop_cohort(cohort)
}

fn one_booted_guest_is_killed() -> Result<()> {
    let _still = StillVm::create()?;
    let lab = lab()?;
    let cohort = start_cohort()?;
    let specs = (0..2)
        .map(|i| GuestSpec::new(&format!("booted{i}"), 2, Workload::new("busy")))
        .collect();
    let mut guests: Vec<BootedGuest> = start_all(&lab, specs, Duration::from_secs(180))?;
    // kill -9, in the middle of its work.
    guests[0].kill()?;
    ensure!(
        guests[1].alive()?,
        "a guest died when another one was killed"
    );
    drop(guests);
    stop_cohort(cohort)
}

fn killed() -> Result<()> {
    let guest = dozing("survivor", 2)?;
    let cohort = start_cohort()?;
    let exit = cohort.stop_with(Signal::SIGKILL)?;
    ensure_back_to_stock(&exit)?;
    assert_progress(&guest)?;
    let cohort = start_cohort()?;
    let said = cohort.output();
    ensure!(
        said.contains("killed"),
        "the next start does not say that the last run was killed: {said}"
    );
    stop_cohort(cohort)
}

/// SysRq-S is the operator's emergency exit from any sched_ext scheduler.
fn removed_by_sysrq() -> Result<()> {
    removed(Exit::RemovedByOthers, || {
        fs::write("/proc/sysrq-trigger", "S").context("SysRq cannot be used")
    })
}

/// A real-time task has a CPU for itself, so that whoever is bound to that waits for longer than the watchdog allows.
fn removed_by_watchdog() -> Result<()> {
    let cpu = lab()?.guest_cpus[0];
    // Since Linux 6.19 the kernel would let tasks of sched_ext have a twentieth of the CPU all the same.
    let server = format!("/sys/kernel/debug/sched/ext_server/cpu{cpu}/runtime");
    let server = Path::new(&server).exists().then_some(server);
    let server = server.map(|path| Setting::set(&path, "0")).transpose()?;
    let mut hog = None;
    removed(Exit::Watchdog, || {
        let mut command = Command::new("chrt");
        command.args(["-f", "50", "sh", "-c", "while :; do :; done"]);
        hog = Some(Service(start(command, &[cpu], None)?));
        // Before the load, whose start waits until its process runs there.
        let lets_go = spawn(move || {
            sleep(UNTIL_THE_WATCHDOG_ACTS);
            // The kernel's way back waits for readers of RCU, of which the real-time task may have preempted one.
            drop(server);
        });
        let _stalled = HostLoad::start("stalled", &[0], &[cpu])?;
        let left = wait_for_sched_ext("disabled", PATIENCE);
        lets_go.join().expect("it does not panic");
        left
    })
}

/// When somebody else has taken Cohort out, as `by` does, it ends with this code, and guests run on.
fn removed(exit: Exit, by: impl FnOnce() -> Result<()>) -> Result<()> {
    let guest = dozing("survivor", 2)?;
    let mut process = Service(start(cohort_command(), &[], None)?);
    wait_for_sched_ext("enabled", PATIENCE)?;
    by()?;
    let status = wait_for("the end of cohort", PATIENCE, || {
        Ok(process.0.try_wait()?)
    })?;
    ensure!(
        status.code() == Some(exit.code().into()),
        "it ended with {status}"
    );
    ensure!(
        scheduler::state()? == "disabled",
        "sched_ext is not disabled"
    );
    assert_progress(&guest)
}

/// Three times as long as `cohort_command` lets a task wait: the kernel looks once a second, and this machine may be busy.
const UNTIL_THE_WATCHDOG_ACTS: Duration = Duration::from_secs(6);

fn cohort_command() -> Command {
    let mut command = Command::new("cohort");
    command.args(["run", "--timeout-ms", "2000"]);
    command
}
