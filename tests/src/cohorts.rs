// SPDX-License-Identifier: GPL-2.0-only
//! Cohorts: the vCPUs of VMs whose vCPUs wait for each other run in the same turns, and nobody pays for that.

use std::io::Write;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Result, ensure};
use cohort::metrics::VmStats;
use cohort::wait::wait_for;
use tempfile::NamedTempFile;

use crate::Test;
use crate::host::{
    Guest, PATIENCE, assert_ratio, best_of_three, locked, shares, start_cohort, start_cohort_with,
    stop_cohort, vm_stats,
};

pub const TESTS: &[Test] = &[
    (
        "vcpus_run_side_by_side_and_vms_whose_vcpus_wait_for_each_other_are_told_from_others",
        windows_open,
    ),
    (
        "windows_of_two_cohorts_and_a_busy_vm_leave_everybody_a_third",
        windows_are_fair,
    ),
    (
        "a_wide_cohort_and_a_narrow_one_share_equally",
        wide_and_narrow,
    ),
    ("exceptions_make_a_vm_a_cohort_always_or_never", exceptions),
    (
        "siblings_wait_behind_each_other_less_than_without_windows",
        not_stacked,
    ),
];

const WINDOW: Duration = Duration::from_secs(3);

fn print(name: &str, vm: &VmStats) {
    println!(
        "    {name}: cohort {}, signs {}/s, windows {}, partial {}, until the last vCPU ran, by powers of two of us {:?}",
        vm.cohort, vm.sync_rate, vm.windows, vm.windows_partial, vm.window_skew
    );
}

fn windows_open() -> Result<()> {
    let guests = [
        Guest::start(&locked("pair0", 2)?)?,
        Guest::start(&locked("pair1", 2)?)?,
        Guest::busy("calm", 2)?,
    ];
    best_of_three(|| open_for_all(&guests))
}

fn open_for_all(guests: &[Guest]) -> Result<()> {
    let cohort = start_cohort()?;
    sleep(WINDOW);
    let vms = guests
        .iter()
        .map(|guest| vm_stats(guest.micro.pid() as u32))
        .collect::<Result<Vec<_>>>()?;
    stop_cohort(cohort)?;
    for (vm, waits) in vms.iter().zip([true, true, false]) {
        print(&vm.name, vm);
        ensure!(
            (vm.cohort == 1) == waits,
            "a VM whose vCPUs give {} signs per second that they wait for each other is taken for {} cohort",
            vm.sync_rate,
            if waits { "no" } else { "a" }
        );
        // A third of 3 s in turns of 4 ms would be 250.
        ensure!(vm.windows > 100, "it had only {} windows", vm.windows);
        ensure!(
            !waits || vm.windows_partial * 10 < vm.windows,
            "in {} of {} windows not all vCPUs ran",
            vm.windows_partial,
            vm.windows
        );
        let complete: u64 = vm.window_skew.iter().sum();
        let soon: u64 = vm.window_skew[..=10].iter().sum();
        ensure!(
            soon as f64 >= 0.8 * complete as f64,
            "of {complete} windows only {soon} had all vCPUs within 1 ms"
        );
    }
    Ok(())
}

fn windows_are_fair() -> Result<()> {
    let guests = [
        Guest::start(&locked("pair0", 2)?)?,
        Guest::start(&locked("pair1", 2)?)?,
        Guest::busy("calm", 2)?,
    ];
    let cohort = start_cohort()?;
    sleep(Duration::from_secs(1));
    let (shares, _) = shares(&[&guests[0], &guests[1], &guests[2]], WINDOW)?;
    stop_cohort(cohort)?;
    println!("    shares {shares:.4?}");
    assert_ratio(&shares, &[1.0, 1.0, 1.0], 0.02)
}

/// Four vCPUs on two CPUs against two: the classic fault of gangs is that one of the two starves.
fn wide_and_narrow() -> Result<()> {
    let guests = [
        Guest::start(&locked("wide", 4)?)?,
        Guest::start(&locked("narrow", 2)?)?,
    ];
    let cohort = start_cohort()?;
    sleep(Duration::from_secs(1));
    let (shares, _) = shares(&[&guests[0], &guests[1]], WINDOW)?;
    for guest in &guests {
        print("VM", &vm_stats(guest.micro.pid() as u32)?);
    }
    stop_cohort(cohort)?;
    println!("    shares {shares:.4?}");
    assert_ratio(&shares, &[1.0, 1.0], 0.02)
}

/// A VM that computes is made a cohort, one in a lock is not to be one: it has no windows then.
fn exceptions() -> Result<()> {
    let guests = [Guest::busy("calm", 2)?, Guest::start(&locked("pair", 2)?)?];
    let mut settings = NamedTempFile::new()?;
    for (cgroup, rule) in [("*calm", "always"), ("*pair", "never")] {
        writeln!(
            settings,
            "[[vm]]\ncgroup = \"{cgroup}\"\ncohort = \"{rule}\""
        )?;
    }
    let path = settings.path().to_string_lossy();
    let cohort = start_cohort_with(&["--config", &path])?;
    let [calm, pair] = guests.each_ref().map(|guest| guest.micro.pid() as u32);
    wait_for("the exceptions", PATIENCE, || {
        let rules = (vm_stats(calm)?.cohort_rule, vm_stats(pair)?.cohort_rule);
        Ok((rules == ("always".to_owned(), "never".to_owned())).then_some(()))
    })?;
    let windows = vm_stats(pair)?.windows;
    sleep(WINDOW);
    let (calm, pair) = (vm_stats(calm)?, vm_stats(pair)?);
    stop_cohort(cohort)?;
    print("always", &calm);
    print("never", &pair);
    ensure!(
        calm.cohort == 1 && calm.sync_rate < 50 && calm.windows > 100,
        "a VM that is to be a cohort always is none"
    );
    ensure!(
        pair.cohort == 0 && pair.sync_rate > 200 && pair.windows == windows,
        "a VM that is to be no cohort is one, or has windows"
    );
    Ok(())
}

/// Two vCPUs on two CPUs need not wait behind each other, whoever else is there.
fn not_stacked() -> Result<()> {
    let guests = [Guest::start(&locked("pair", 2)?)?, Guest::busy("calm", 2)?];
    let stacked = |options: &[&str]| -> Result<f64> {
        let cohort = start_cohort_with(options)?;
        sleep(WINDOW);
        let mut percents = Vec::new();
        for guest in &guests {
            percents.push(vm_stats(guest.micro.pid() as u32)?.stacked_pct);
        }
        stop_cohort(cohort)?;
        println!("    {options:?}: stacked {percents:.2?} %");
        Ok(percents.iter().sum::<f64>() / 2.0)
    };
    best_of_three(|| {
        let (without, with) = (stacked(&["--off", "cohorts"])?, stacked(&[])?);
        ensure!(
            with < without && with < 2.0,
            "vCPUs waited for {with:.2} % of their time behind a sibling, without windows for {without:.2} %"
        );
        Ok(())
    })
}
