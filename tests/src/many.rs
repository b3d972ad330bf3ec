// SPDX-License-Identifier: GPL-2.0-only
//! A host with 28 times as many vCPUs as CPUs for guests, on which VMs and cgroups come and go meanwhile: `lab boot --cpus 16 --sockets 2
//! --housekeeping 2`.

use std::panic::resume_unwind;
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use cohort_lab::inside::cgroup::Cgroup;
use cohort_micro::Spec;

use crate::Test;
use crate::faults::ten_come_and_go;
use crate::host::{
    Guest, HostLoad, Watch, assert_ratio, cohort_stats, lab, shares_in, start_cohort, stop_cohort,
};

pub const TESTS: &[Test] = &[(
    "each_of_200_vms_has_its_share_and_waits_no_longer_than_the_bound",
    two_hundred,
)];

const VMS: usize = 200;
/// A vCPU sleeps until all have started, as starting them beside each other would take hours.
const BEGIN: Duration = Duration::from_millis(3_000);
/// docs/design.md, "Nobody starves": 500 ms, and the turns of others who waited as long.
const LONGEST_WAIT: Duration = Duration::from_millis(600);

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
    let cohort = start_cohort()?;
    let begin = Instant::now();
    let guests = (0..VMS)
        .map(|number| {
            let left = BEGIN.saturating_sub(begin.elapsed()).as_micros();
            let program = format!("sleep {left}us; loop: compute 1ms");
            Guest::start(
                &Spec::new(&format!("vm{number}"))
                    .vcpu(&program)
                    .vcpu(&program),
            )
        })
        .collect::<Result<Vec<_>>>()?;
    println!("    {VMS} VMs have started after {:?}", begin.elapsed());
    ensure!(
        begin.elapsed() < BEGIN,
        "the first ones are at work already"
    );
    sleep(BEGIN.saturating_sub(begin.elapsed()));
    let watch = Watch::begin(1, 1)?;
    let (view, shares) = scope(|scope| -> Result<_> {
        let cgroups = scope.spawn(cgroups_come_and_go);
        let vms = scope.spawn(|| ten_come_and_go(0));
        let view = watch.window()?;
        let shares = shares_in(&view, &guests)?;
        // All at once, or each would wait for a CPU beside the others. What has begun ends sooner without them.
        for guest in guests {
            scope.spawn(|| drop(guest));
        }
        for thread in [cgroups, vms] {
            thread.join().unwrap_or_else(|panic| resume_unwind(panic))?;
        }
        Ok((view, shares))
    })?;
    let waits_us = view.vms.values().map(|vm| vm.all.longest_ready_us);
    let longest = Duration::from_micros(waits_us.max().unwrap_or_default());
    let (least, most) = shares
        .iter()
        .fold((f64::MAX, 0.0_f64), |(least, most), &share| {
            (least.min(share), most.max(share))
        });
    let stats = cohort_stats()?;
    println!(
        "    the longest wait took {longest:?}; shares are {:.3} to {:.3} of what is fair",
        least * VMS as f64,
        most * VMS as f64
    );
    ensure!(longest <= LONGEST_WAIT, "a vCPU waited for {longest:?}");
    ensure!(
        stats.exhausted == 0,
        "{} tasks found no group",
        stats.exhausted
    );
    assert_ratio(&shares, &[1.0; VMS], 0.25)?;
    stop_cohort(cohort)
}
