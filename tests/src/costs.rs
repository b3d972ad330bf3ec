// SPDX-License-Identifier: GPL-2.0-only
//! What the BPF programs of the observer and of Cohort cost per run, by the kernel's own count. In a lab that counts
//! instructions (`lab boot --count-instructions`) a nanosecond is one. Not a part of `make test`: it prints.

use std::fs;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use cohort_lab::inside::hooks::{COUNTING, costs_within, print};
use cohort_micro::{Spec, StillVm};

use crate::Test;
use crate::host::{Guest, Setting, Watch, gained, locked, start_cohort, stop_cohort};

pub const TESTS: &[Test] = &[
    ("what_runs_cost_while_guests_spin", spinning),
    (
        "what_runs_cost_while_guests_sleep_and_wake_each_other",
        waking,
    ),
    (
        "what_runs_cost_while_guests_interrupt_each_other",
        interrupting,
    ),
    (
        "what_observing_a_spin_exit_costs_with_all_around_the_programs",
        in_all,
    ),
];

const WINDOW: Duration = Duration::from_secs(1);

/// Two vCPUs that sleep and wake each other.
pub fn sleepy(name: &str) -> Spec {
    Spec::new(name)
        .vcpu("loop: compute 20us; ipi 1 0x41; wait-answer; sleep 200us")
        .vcpu("loop: halt; compute 10us")
}

fn costs_beside(guests: &[Spec]) -> Result<()> {
    let _counted = Setting::set(COUNTING, "1")?;
    let _guests = guests
        .iter()
        .map(Guest::start)
        .collect::<Result<Vec<_>>>()?;
    let watch = Watch::begin(1, 2)?;
    let (observer, seconds) = costs_within(watch.pid(), WINDOW)?;
    watch.window()?;
    println!("    the observer:");
    print(&observer, seconds);
    let cohort = start_cohort()?;
    let (scheduler, seconds) = costs_within(cohort.pid(), WINDOW)?;
    stop_cohort(cohort)?;
    println!("    cohort:");
    print(&scheduler, seconds);
    for costs in [observer, scheduler] {
        ensure!(costs.iter().any(|cost| cost.runs > 0), "nothing ran");
    }
    Ok(())
}

fn spinning() -> Result<()> {
    costs_beside(&[locked("spin0", 2), locked("spin1", 2)])
}

fn waking() -> Result<()> {
    costs_beside(&[sleepy("sleepy0"), sleepy("sleepy1")])
}

fn interrupting() -> Result<()> {
    let guest = |name: &str| {
        Spec::new(name)
            .vcpu("loop: compute 20us; ipi 1 0x41; wait-answer")
            .vcpu("loop: compute 100us")
    };
    costs_beside(&[guest("ipi0"), guest("ipi1")])
}

/// How often `guest` leaves for KVM per second, by KVM's own count.
fn exits_per_second(guest: &Guest) -> Result<f64> {
    let of_guest = format!("{}-", guest.micro.pid());
    let mut folders = fs::read_dir("/sys/kernel/debug/kvm")?.flatten();
    let folder = folders
        .find(|entry| entry.file_name().to_string_lossy().starts_with(&of_guest))
        .context("KVM has no statistics of the guest")?;
    let (exits, elapsed) = gained(WINDOW, || {
        let count = fs::read_to_string(folder.path().join("exits"))?;
        Ok(vec![count.trim().parse()?])
    })?;
    Ok(exits[0] as f64 / elapsed.as_secs_f64())
}

/// The kernel's own count leaves out what leads to a program, and has its own clock in it. A vCPU that leaves the guest
/// all the time, since it executes PAUSE, shows what both programs cost it: it does so less often.
fn in_all() -> Result<()> {
    let guest = Guest::start(&Spec::new("spins").vcpu("spin never"))?;
    let _still = StillVm::create()?;
    sleep(WINDOW);
    let alone = exits_per_second(&guest)?;
    let _watch = Watch::begin(100, 1)?;
    // It is known from its first switch on.
    let _other = Guest::start(&Spec::new("other").vcpu("loop: compute 10us; sleep 10ms"))?;
    sleep(WINDOW);
    let observed = exits_per_second(&guest)?;
    let counted = {
        let _counted = Setting::set(COUNTING, "1")?;
        exits_per_second(&guest)?
    };
    for (what, rate) in [
        ("alone", alone),
        ("observed", observed),
        ("counted", counted),
    ] {
        println!("    {what}: {rate:.0} exits/s, {:.0} ns each", 1e9 / rate);
    }
    ensure!(
        counted < observed && observed < alone,
        "the guest's exits are not observed, or its clock is no count of instructions"
    );
    Ok(())
}
