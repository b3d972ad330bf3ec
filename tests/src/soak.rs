// SPDX-License-Identifier: GPL-2.0-only
//! The same for a long time (`make soak`): nothing grows, no VM is lost, none that is gone is still shown.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cohort_micro::StillVm;

use crate::Test;
use crate::faults::passing;
use crate::host::{Guest, Watch, cohort_stats, start_cohort, stop_cohort};

pub const TESTS: &[Test] = &[(
    "while_vms_come_and_go_nothing_grows_and_exactly_those_that_are_there_are_seen",
    churn,
)];

/// How long, in minutes of lab time.
const MINUTES: &str = "COHORT_SOAK_MINUTES";
const VMS_PER_ROUND: usize = 10;
/// Allocators keep a little of what they once had.
const GROWTH_KIB: u64 = 1024;

/// Memory of process `pid`, KiB.
fn rss_kib(pid: u32) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .context("a process has memory")?;
    let words = line.split_whitespace().next();
    Ok(words.context("it is a number")?.parse()?)
}

/// A window that lies wholly behind this moment has exactly these VMs.
fn expect_vms(watch: &Watch, guests: &[&Guest]) -> Result<()> {
    let view = watch.later_window()?;
    let seen: Vec<u32> = view.vms.keys().copied().collect();
    let mut there: Vec<u32> = guests
        .iter()
        .map(|guest| guest.micro.pid() as u32)
        .collect();
    there.sort_unstable();
    ensure!(
        seen == there,
        "VMs of the processes {there:?} are there, {seen:?} are seen"
    );
    Ok(())
}

fn churn() -> Result<()> {
    let _still = StillVm::create()?;
    let minutes: u64 = match std::env::var(MINUTES) {
        Ok(minutes) => minutes.parse().context(MINUTES)?,
        Err(_) => 30,
    };
    let stay = [
        Guest::busy("stays0", 1)?,
        Guest::busy("stays1", 2)?,
        Guest::start(&passing("stays2", 2))?,
    ];
    let mut cohort = start_cohort()?;
    let watch = Watch::begin(u32::MAX, 1)?;
    let memory = || -> Result<[u64; 2]> { Ok([rss_kib(cohort.pid())?, rss_kib(watch.pid())?]) };
    let used = || -> Result<[u64; 2]> {
        let stats = cohort_stats()?;
        Ok([stats.groups_used, stats.entities_used])
    };
    let begin = Instant::now();
    let length = Duration::from_secs(60 * minutes);
    let mut settled = None;
    let mut rounds = 0;
    while begin.elapsed() < length {
        let come = (0..VMS_PER_ROUND)
            .map(|number| Guest::start(&passing(&format!("round{rounds}-{number}"), number)))
            .collect::<Result<Vec<_>>>()?;
        let all: Vec<&Guest> = stay.iter().chain(&come).collect();
        expect_vms(&watch, &all)?;
        drop(come);
        expect_vms(&watch, &stay.each_ref())?;
        rounds += 1;
        if settled.is_none() && begin.elapsed() > length / 5 {
            settled = Some((memory()?, used()?));
        }
        if rounds % 10 == 0 {
            println!(
                "    {:>4} s, {} VMs: memory of cohort run and cohort watch {:?} KiB, groups, entities {:?}",
                begin.elapsed().as_secs(),
                rounds * VMS_PER_ROUND,
                memory()?,
                used()?
            );
        }
    }
    let (memory_before, used_before) = settled.context("it was too short to settle")?;
    let (memory_after, used_after) = (memory()?, used()?);
    println!(
        "    {} VMs came and went; memory {memory_before:?}, then {memory_after:?} KiB; in use {used_before:?}, then \
         {used_after:?}",
        rounds * VMS_PER_ROUND
    );
    for (before, after) in memory_before.iter().zip(memory_after) {
        ensure!(
            after <= before + GROWTH_KIB,
            "a program's memory grew from {before} to {after} KiB"
        );
    }
    for (before, after) in used_before.iter().zip(used_after) {
        ensure!(
            after <= before + 4,
            "what is in use grew from {before} to {after}"
        );
    }
    cohort.check()?;
    drop(watch);
    stop_cohort(cohort)
}
