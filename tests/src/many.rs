// SPDX-License-Identifier: GPL-2.0-only
//! A host with 28 times as many vCPUs as CPUs for guests, on which VMs and cgroups come and go meanwhile: `lab boot --cpus 16
//! --sockets 2 --housekeeping 2`.

use std::panic::resume_unwind;
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cohort::commands::compare::statistics::least_and_most;
use cohort_lab::inside::cgroup::Cgroup;
use cohort_lab::inside::hooks::{COUNTING, Cost, Programs, costs_within};
use cohort_micro::Spec;

use crate::Test;
use crate::faults::ten_come_and_go;
use crate::host::{
    Guest, HostLoad, Setting, Watch, assert_ratio, cohort_stats, lab, shares_in, start_cohort,
    stop_cohort,
};

pub const TESTS: &[Test] = &[(
    "each_of_200_vms_has_its_share_and_waits_no_longer_than_the_bound_and_ops_cost_little_more_than_with_ten",
    two_hundred,
)];

const VMS: usize = 200;
/// With so many, 14 CPUs have all they can do as well.
const FEW: usize = 10;
const HOT_OPS: [&str; 5] = [
    "cohort_dispatch",
    "cohort_enqueue",
    "cohort_running",
    "cohort_stopping",
    "cohort_tick",
];
/// Seen: 2.7 for dispatch, as the two CPUs without guests look in vain for a task each time they go idle.
const MOST_GROWTH: f64 = 3.0;
/// A vCPU sleeps until all have started, as starting them beside each other would take hours.
const BEGIN: Duration = Duration::from_millis(3_000);
/// docs/design.md, "Nobody starves": 500 ms, and the turns of others who waited as long.
const LONGEST_WAIT: Duration = Duration::from_millis(600);

/// So many VMs of two vCPUs, all of which begin to work then.
fn start(count: usize, begin: Instant) -> Result<Vec<Guest>> {
    (0..count)
        .map(|number| {
            let left_us = begin.saturating_duration_since(Instant::now()).as_micros();
            let program = format!("sleep {left_us}us; loop: compute 1ms");
            let spec = Spec::new(&format!("vm{number}"));
            Guest::start(&spec.vcpu(&program).vcpu(&program))
        })
        .collect()
}

/// How long one run of program `op` took, ns.
fn each_ns(costs: &[Cost], op: &str) -> Result<f64> {
    let cost = costs.iter().find(|cost| cost.name == op && cost.runs > 0);
    let cost = cost.with_context(|| format!("{op} has not run"))?;
    Ok(cost.each_ns())
}

/// A hundred of them, ten of which have a task.
fn cgroups_come_and_go() -> Result<()> {
    for round in 0..10 {
        let empty = (0..9)
            .map(|number| Cgroup::create(&format!("empty{round}-{number}")))
            .collect::<Result<Vec<_>>>()?;
        let load = HostLoad::start(&format!("load{round}"), &[0], &[])?;
        drop((load, empty));
    }
    Ok(())
}

fn two_hundred() -> Result<()> {
    ensure!(
        lab()?.guest_cpus.len() == 14,
        "this suite wants 14 CPUs for guests: see docs/lab.md"
    );
    let _counted = Setting::set(COUNTING, "1")?;
    let cohort = start_cohort()?;
    let few = start(FEW, Instant::now() + Duration::from_millis(300))?;
    sleep(Duration::from_millis(300));
    let (with_few, _) = costs_within(cohort.pid(), Duration::from_millis(300))?;
    drop(few);
    let begin = Instant::now() + BEGIN;
    let guests = start(VMS, begin)?;
    let left = begin.saturating_duration_since(Instant::now());
    println!("    {VMS} VMs have started {left:?} too early");
    ensure!(!left.is_zero(), "the first ones are at work already");
    sleep(left);
    let before = Programs::of(cohort.pid())?;
    let watch = Watch::begin(1, 1)?;
    let (view, shares, with_many) = scope(|scope| -> Result<_> {
        let cgroups = scope.spawn(cgroups_come_and_go);
        let vms = scope.spawn(|| ten_come_and_go(0));
        let view = watch.window()?;
        let (costs, _) = before.until(&Programs::of(cohort.pid())?);
        let shares = shares_in(&view, &guests)?;
        // All at once, or each would wait for a CPU beside the others. What has begun ends sooner without them.
        for guest in guests {
            scope.spawn(|| drop(guest));
        }
        for thread in [cgroups, vms] {
            thread.join().unwrap_or_else(|panic| resume_unwind(panic))?;
        }
        Ok((view, shares, costs))
    })?;
    let waits_us = view.vms.values().map(|vm| vm.all.longest_ready_us);
    let longest = Duration::from_micros(waits_us.max().unwrap_or_default());
    let (least, most) = least_and_most(&shares);
    let stats = cohort_stats()?;
    println!(
        "    the longest wait took {longest:?}; shares are {:.3} to {:.3} of what is fair",
        least * VMS as f64,
        most * VMS as f64
    );
    for op in HOT_OPS {
        let [few_ns, many_ns] = [&with_few, &with_many].map(|costs| each_ns(costs, op));
        let (few_ns, many_ns) = (few_ns?, many_ns?);
        println!("    {op}: {few_ns:.0} ns with {FEW} VMs, {many_ns:.0} ns with {VMS}");
        ensure!(
            many_ns < MOST_GROWTH * few_ns,
            "{op} takes {many_ns:.0} ns with {VMS} VMs, and {few_ns:.0} ns with {FEW}"
        );
    }
    ensure!(longest <= LONGEST_WAIT, "a vCPU waited for {longest:?}");
    ensure!(
        stats.exhausted == 0,
        "{} tasks found no group",
        stats.exhausted
    );
    assert_ratio(&shares, &[1.0; VMS], 0.3)?;
    stop_cohort(cohort)
}
