// SPDX-License-Identifier: GPL-2.0-only
//! What tests/repeats boots several times and compares byte by byte: each case prints what guests did, to the ns. Not for
//! what the figures are; that they are the same from the same seed is all that counts.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use cohort_lab::inside::booted::{GuestSpec, Workload, start_all};
use cohort_lab::inside::random::Random;

use crate::Test;
use crate::host::{
    Guest, PATIENCE, cohort_stats, lab, locked, schedstat_ns, start_cohort, stop_cohort,
};
use crate::time::{ensure_exact, tsc};

pub const TESTS: &[Test] = &[
    (
        "what_micro_guests_do_under_the_stock_scheduler_is_printed_to_the_ns",
        under_stock,
    ),
    ("what_a_booted_guest_does_is_printed_to_the_ns", booted),
    (
        "what_micro_guests_do_under_cohort_is_printed_to_the_ns",
        under_cohort,
    ),
];

/// Guests begin within a slice of the stock scheduler after each other.
const LONGEST_DELAY: Duration = Duration::from_millis(4);
const WINDOW: Duration = Duration::from_millis(200);

/// Two guests that spin for a lock of their own; the seed says when they begin.
fn start_two(random: &mut Random) -> Result<Vec<Guest>> {
    let start = |name| {
        sleep(random.below(LONGEST_DELAY));
        Guest::start(&locked(name, 2))
    };
    ["a", "b"].into_iter().map(start).collect()
}

/// Prints what each vCPU did, and what its thread had.
fn print(guests: &[Guest]) -> Result<()> {
    println!("    TSC {}", tsc());
    for guest in guests {
        for vcpu in guest.micro.state.vcpus() {
            ensure!(vcpu.progress > 0, "a vCPU did nothing");
            let (ran_ns, waited_ns) = schedstat_ns(vcpu.tid as u32)?;
            println!("    ran {ran_ns} ns, waited {waited_ns} ns: {vcpu:?}");
        }
    }
    Ok(())
}

fn under_stock() -> Result<()> {
    ensure_exact()?;
    let guests = start_two(&mut Random::new(lab()?.seed))?;
    sleep(WINDOW);
    print(&guests)
}

/// Its kernel has what a micro guest has not: timers, random numbers, an emulated machine around it.
fn booted() -> Result<()> {
    ensure_exact()?;
    let lab = lab()?;
    let spec = GuestSpec::new("booted", 2, Workload::new("spin"));
    let guests = start_all(&lab, vec![spec], PATIENCE)?;
    sleep(WINDOW);
    println!("    TSC {}", tsc());
    for guest in &guests {
        let (operations, ran_ns) = (guest.progress()?, guest.vcpu_cpu_time_ns()?);
        println!("    {operations} operations; its vCPUs ran {ran_ns:?} ns");
    }
    Ok(())
}

/// What Cohort counted is printed too.
fn under_cohort() -> Result<()> {
    ensure_exact()?;
    let cohort = start_cohort()?;
    let guests = start_two(&mut Random::new(lab()?.seed))?;
    sleep(WINDOW);
    print(&guests)?;
    let stats = cohort_stats()?;
    for guest in &guests {
        let pid = guest.micro.pid() as u32;
        let vm = stats.vms.values().find(|vm| vm.pid == pid);
        let vm = vm.context("Cohort does not know the VM")?;
        ensure!(vm.turns > 0, "it had no turn: {vm:?}");
        println!("    {vm:?}");
    }
    println!("    {:?}", stats.mechanisms);
    stop_cohort(cohort)
}
