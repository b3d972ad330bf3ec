// SPDX-License-Identifier: GPL-2.0-only
//! Directed yields. The spinning guests take a ticket lock in guest kernel mode and issue one PAUSE per window, as a
//! spin loop does that hardware sees (docs/lab.md), so each exit is one that a real host would have.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Result, ensure};
use cohort_lab::inside::scheduler::Scheduler;
use cohort_micro::{Quantity, Spec};

use crate::Test;
use crate::host::{
    Guest, busy, lab, shares, start_cohort, start_cohort_with, stop_cohort, vm_stats,
};

pub const TESTS: &[Test] = &[
    (
        "an_offered_ready_sibling_runs_next",
        offered_sibling_runs_next,
    ),
    (
        "a_spinning_vm_takes_nothing_from_its_neighbour",
        neighbour_keeps_its_share,
    ),
    (
        "who_waits_for_an_ipi_gives_way_to_who_must_answer_it",
        receiver_runs_soon,
    ),
    (
        "the_turn_of_a_vcpu_that_sleeps_goes_to_the_sibling_it_woke",
        heir_goes_on,
    ),
    (
        "no_other_scheduler_has_counted_a_yield_for_it",
        counts_start_at_zero,
    ),
];

const WINDOW: Duration = Duration::from_secs(3);
/// Of the yields that have a ready target, how many run it next.
const SERVED: f64 = 0.95;

/// Three vCPUs that fight for one lock: with two CPUs, one of them often waits while its ticket is up.
fn spinner(name: &str) -> Result<Spec> {
    let window: Quantity = "20us".parse()?;
    let program = "loop: lock; compute 50us; unlock; compute 20us";
    Ok((0..3)
        .fold(Spec::new(name), |spec, _| spec.vcpu(program))
        .pause_window(window))
}

fn offered_sibling_runs_next() -> Result<()> {
    let guests = [
        Guest::start(&spinner("spin0")?)?,
        Guest::start(&spinner("spin1")?)?,
    ];
    let cohort = start_cohort()?;
    sleep(WINDOW);
    for guest in &guests {
        let vm = vm_stats(guest.micro.pid() as u32)?;
        println!(
            "    offered {}, target ready {}, served {}, missed {:?}",
            vm.yields_offered, vm.yields_ready, vm.yields_served, vm.yields_missed
        );
        ensure!(
            vm.yields_ready > 100,
            "only {} yields had a ready target: nothing is proven",
            vm.yields_ready
        );
        let served = vm.yields_served as f64 / vm.yields_ready as f64;
        ensure!(
            served >= SERVED,
            "only {:.1} % of the yields ran their target next",
            100.0 * served
        );
    }
    stop_cohort(cohort)
}

fn neighbour_keeps_its_share() -> Result<()> {
    let neighbour = Guest::busy("neighbour", 2)?;
    let share_beside = |spec: Spec| -> Result<f64> {
        let guest = Guest::start(&spec)?;
        let cohort = start_cohort()?;
        let (shares, _) = shares(&[&neighbour, &guest], WINDOW)?;
        stop_cohort(cohort)?;
        Ok(shares[0])
    };
    let (beside_busy, beside_spinner) = (
        share_beside(busy("calm", 3))?,
        share_beside(spinner("spinner")?)?,
    );
    ensure!(
        (beside_spinner - beside_busy).abs() <= 0.01,
        "beside a spinning VM the neighbour has {beside_spinner:.4}, beside a busy one {beside_busy:.4}"
    );
    Ok(())
}

/// vCPU 0 sends IPIs to vCPU 1, which is in guest user mode, and spins until each is answered; with vCPU 2 the VM is
/// wider than its CPUs, and two VMs compete. KVM's own search skips a receiver that was preempted in user mode, which
/// then waits for its turn: several slices of 4 ms.
fn receiver_runs_soon() -> Result<()> {
    let spec = Spec::new("ipi")
        .vcpu("loop: compute 20us; ipi 1 0x41; wait-answer")
        .vcpu("user; loop: compute 100us")
        .vcpu("user; loop: compute 100us")
        .pause_window("20us".parse()?);
    let guest = Guest::start(&spec)?;
    let _others = [Guest::busy("busy0", 2)?, Guest::busy("busy1", 2)?];
    let cohort = start_cohort()?;
    sleep(WINDOW);
    let vm = vm_stats(guest.micro.pid() as u32)?;
    stop_cohort(cohort)?;
    let within_a_slice: u64 = vm.ipi_to_run[..=12].iter().sum();
    let all: u64 = vm.ipi_to_run.iter().sum();
    println!(
        "    IPIs {}, to a waiting vCPU {}, answered {}; until it ran, by powers of two of us {:?}; spin exits {}, yields {} \
         of which better {} and relaxed {}",
        vm.ipis,
        vm.ipis_to_ready,
        vm.ipis_answered,
        vm.ipi_to_run,
        vm.spin_exits,
        vm.yields_served,
        vm.yields_better,
        vm.yields_relaxed
    );
    ensure!(
        vm.ipis_to_ready > 100,
        "only {} IPIs found their receiver waiting: nothing is proven",
        vm.ipis_to_ready
    );
    ensure!(
        vm.ipis_answered as f64 > 0.95 * vm.ipis as f64,
        "of {} IPIs only {} were seen to be answered",
        vm.ipis,
        vm.ipis_answered
    );
    ensure!(
        within_a_slice as f64 > 0.9 * all as f64,
        "of {all} IPIs to a waiting vCPU only {within_a_slice} made it run within 4 ms"
    );
    Ok(())
}

/// Two vCPUs wake each other and sleep; two VMs compete. Whoever is woken is to run as soon as its waker sleeps, and not
/// when the VM's next turn comes; and the VM gets its share all the same, and no more.
fn heir_goes_on() -> Result<()> {
    let spec = Spec::new("pair")
        .vcpu("loop: compute 200us; ipi 1 0x41; halt")
        .vcpu("loop: halt; compute 200us; ipi 0 0x41");
    let pair = Guest::start(&spec)?;
    let others = [Guest::busy("busy0", 2)?, Guest::busy("busy1", 2)?];
    let run = |arguments: &[&str]| -> Result<f64> {
        let cohort = start_cohort_with(arguments)?;
        let (shares, _) = shares(&[&pair, &others[0], &others[1]], WINDOW)?;
        let vm = vm_stats(pair.micro.pid() as u32)?;
        stop_cohort(cohort)?;
        let at_once: u64 = vm.ipi_to_run[..=9].iter().sum();
        let all: u64 = vm.ipi_to_run.iter().sum();
        println!(
            "    {arguments:?}: of {all} that were woken {at_once} ran within 512 us; by powers of two of us {:?}",
            vm.ipi_to_run
        );
        ensure!(
            all > 100,
            "only {all} IPIs woke somebody: nothing is proven"
        );
        ensure!(
            (shares[0] - 1.0 / 3.0).abs() <= 0.01,
            "a third of the VMs has {:.4} of the CPU time",
            shares[0]
        );
        Ok(at_once as f64 / all as f64)
    };
    let (with, without) = (run(&[])?, run(&["--off", "heir"])?);
    ensure!(
        with > 0.95 && without < with,
        "of those that were woken {with:.3} ran within 512 us, without the mechanism {without:.3}"
    );
    Ok(())
}

fn counts_start_at_zero() -> Result<()> {
    let guest = Guest::start(&spinner("before")?)?;
    // Yields under the stock scheduler first: none of them may be counted.
    ensure!(
        Scheduler::Stock.start()?.is_none(),
        "the stock scheduler is nothing to start"
    );
    sleep(Duration::from_secs(1));
    println!("    {}", lab()?.describe());
    let busy = Guest::busy("lonely", 2)?;
    let cohort = start_cohort()?;
    sleep(Duration::from_secs(1));
    let vm = vm_stats(busy.micro.pid() as u32)?;
    ensure!(
        vm.yields_offered == 0,
        "{} yields were counted for a VM that never spins",
        vm.yields_offered
    );
    drop(guest);
    stop_cohort(cohort)
}
