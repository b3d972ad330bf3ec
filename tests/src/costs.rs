// SPDX-License-Identifier: GPL-2.0-only
//! What the BPF programs of the observer and of Cohort cost per run, by the kernel's own count. In a lab that counts
//! instructions (`lab boot --count-instructions`) a nanosecond is one. Not a part of `make test`: it prints.

use std::time::Duration;

use anyhow::{Result, ensure};
use cohort_lab::inside::hooks::{COUNTING, costs_within, print};
use cohort_micro::Spec;

use crate::Test;
use crate::host::{Guest, Setting, Watch, locked, start_cohort, stop_cohort};

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
    costs_beside(&[locked("spin0", 2)?, locked("spin1", 2)?])
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
