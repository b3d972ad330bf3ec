// SPDX-License-Identifier: GPL-2.0-only
//! Cohort against the stock scheduler, seen by the observer under both, in one boot and with the same guests running.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Result, ensure};
use cohort::observer::view::{HostView, VcpuView, quantile_us};
use cohort_lab::inside::windows::Subject;
use cohort_micro::Spec;

use crate::Test;
use crate::host::{
    Guest, HostLoad, SETTLE, assert_ratio, back_to_stock, gained, lab, locked, shares_in,
    under_both, unload_observer, vcpu_of, vcpus_of, watch_settled, without,
};

pub const TESTS: &[Test] = &[
    (
        "a_vm_that_wakes_often_is_served_at_once_beside_cohorts",
        wakes_often,
    ),
    (
        "a_vcpu_that_wakes_is_served_at_once_beside_a_sibling_that_never_sleeps",
        wakes_beside_a_busy_sibling,
    ),
    ("four_vms_in_a_lock_spin_less", spin_less),
    // The last ones: these unload the observer.
    ("two_vcpus_that_wake_each_other_do_no_less", wake_each_other),
    (
        "two_pairs_that_wake_each_other_do_no_less",
        wake_each_other_in_pairs,
    ),
];

const WINDOW_S: u32 = 1;
/// Some 15,000 operations; each costs the exact machine much.
const WAKES_WINDOW: Duration = Duration::from_millis(500);
const WAKES_OFTEN: &str = "loop: sleep 2ms; compute 100us";
/// Seen: 100 %. The published "up to" of directed yields and IPI-aware boosts is 87.6 %.
const FEWER_SPINS_PCT: f64 = 95.0;

/// What the observer sees under the stock scheduler and under Cohort.
fn compare() -> Result<[HostView; 2]> {
    under_both(|| watch_settled(WINDOW_S))
}

/// A vCPU that wakes each 2 ms for 100 us, beside a VM in a lock, a busy one and two processes of the host. What wakes
/// from sleep must not wait for others' windows.
fn wakes_often() -> Result<()> {
    // Two, which are awake together now and then: a VM that sleeps so much waits for no turn of its own.
    let latency = Guest::start(&Spec::new("latency").vcpu(WAKES_OFTEN).vcpu(WAKES_OFTEN))?;
    let _others = [Guest::start(&locked("lock", 2))?, Guest::busy("busy", 2)?];
    let _build = HostLoad::start("build", &[0, 0], &lab()?.guest_cpus)?;
    let [stock, cohort] = compare()?;
    let stock = waits_us("stock", vcpus_of(&stock, &latency)?, 0.99)?;
    let cohort = waits_us("cohort", vcpus_of(&cohort, &latency)?, 0.99)?;
    // Seen: 16 us, under the stock scheduler 4096; 4096 too if a turn's end may stop it in the middle of its work.
    ensure!(
        16 * cohort <= stock,
        "its longest hundredth of waits reaches {cohort} us, under the stock scheduler {stock} us"
    );
    Ok(())
}

/// The same in a VM that always has had its share, as another vCPU of it never sleeps, beside two busy VMs.
fn wakes_beside_a_busy_sibling() -> Result<()> {
    let spec = Spec::new("serving")
        .vcpu(WAKES_OFTEN)
        .vcpu("loop: compute 1000000");
    let guests = [
        Guest::start(&spec)?,
        Guest::busy("busy0", 2)?,
        Guest::busy("busy1", 2)?,
    ];
    let [stock, cohort] = compare()?;
    let shares = shares_in(&cohort, &guests)?;
    println!("    shares under cohort: {shares:.3?}");
    assert_ratio(&shares, &[1.0; 3], 0.02)?;
    let without_loans = without("wake", || watch_settled(WINDOW_S))?;
    // Not 0.99: about one wake-up in a hundred waits for a turn. It comes just after its CPU was lent, as this program, which
    // watches, takes loans too; or its VM is as far ahead as loans may bring it.
    let waits = |scheduler, view| waits_us(scheduler, vcpu_of(view, &guests[0], 0)?, 0.95);
    let without_loans = waits("without loans", &without_loans)?;
    let stock = waits("stock", &stock)?;
    let cohort = waits("cohort", &cohort)?;
    // Seen from four seeds: 16 us; without loans 4096 and 8192, under the stock scheduler 2048 and 4096.
    ensure!(
        64 * cohort <= without_loans && 64 * cohort <= stock,
        "it waits too long: of twenty wake-ups one waits for {cohort} us, without loans {without_loans}, under the stock scheduler {stock}"
    );
    Ok(())
}

/// Two VMs whose two vCPUs do nothing but wake each other. A choice for each of these wake-ups would be more to do than the
/// stock scheduler has; so a CPU is handed over. Seen: 0.98. Without handing over: 0.91.
fn wake_each_other() -> Result<()> {
    wake_each_other_in(1, 0.95)
}

/// The same with two pairs in each VM. A vCPU whose CPU went to another one while it waited halted for its partner is
/// woken without taking a sibling's CPU. Seen: 0.96. If it takes one: 0.78.
fn wake_each_other_in_pairs() -> Result<()> {
    wake_each_other_in(2, 0.9)
}

/// Two VMs with so many `pairs` do at least a part `least` of what they do under the stock scheduler.
fn wake_each_other_in(pairs: usize, least: f64) -> Result<()> {
    let start = |number: usize| {
        let spec = (0..pairs).fold(Spec::new(&format!("pipe{number}")), |spec, pair| {
            let (first, second) = (2 * pair, 2 * pair + 1);
            spec.vcpu(format!("loop: compute 50us; ipi {second} 0x40; halt"))
                .vcpu(format!("loop: halt; compute 50us; ipi {first} 0x40"))
        });
        Guest::start(&spec)
    };
    let guests = [start(0)?, start(1)?];
    // It would have a part in each of their many switches.
    unload_observer();
    let [stock, under_cohort] = under_both(|| {
        sleep(SETTLE);
        let read = || guests.iter().map(Subject::operations).collect();
        let (done, elapsed) = gained(WAKES_WINDOW, read)?;
        Ok(done.iter().sum::<u64>() as f64 / elapsed.as_secs_f64())
    })?;
    println!("    operations/s: stock {stock:.0}, cohort {under_cohort:.0}");
    ensure!(
        under_cohort >= least * stock,
        "they do {:.3} of what they do under the stock scheduler",
        under_cohort / stock
    );
    Ok(())
}

/// What this part of a vCPU's waits for a CPU stays below, us: a power of two.
fn waits_us(scheduler: &str, vcpu: &VcpuView, part: f64) -> Result<u64> {
    let quantile = |quantile| quantile_us(&vcpu.ready_us, quantile).unwrap_or(0);
    println!(
        "    {scheduler}: wake-ups {}; it waited for less than {} us (p50), {} us (p95), {} us (p99), {} us (max)",
        vcpu.wakeups,
        quantile(0.5),
        quantile(0.95),
        quantile(0.99),
        quantile(1.0)
    );
    ensure!(
        vcpu.wakeups > 100,
        "it woke only {} times: nothing is proven",
        vcpu.wakeups
    );
    Ok(quantile(part))
}

/// Four VMs of 2 vCPUs, each of which needs the same lock as its sibling half of the time, in guest kernel mode. What counts
/// are the spin exits that one VM alone does not have: those because a sibling did not run. (Two such VMs sometimes fall
/// into step under the stock scheduler too.)
fn spin_less() -> Result<()> {
    let start = |number: usize| {
        let program = "loop: lock; compute 50us; unlock; compute 50us";
        let spec = Spec::new(&format!("lock{number}"))
            .vcpu(program)
            .vcpu(program);
        Guest::start(&spec)
    };
    // Per second of the VMs' CPU time.
    let rate = |view: &HostView, guests: &[Guest]| -> Result<f64> {
        let (mut exits, mut seconds) = (0, 0.0);
        for guest in guests {
            let all = vcpus_of(view, guest)?;
            exits += all.spin_exits;
            seconds += all.run_pct / 100.0 * f64::from(all.vcpus) * f64::from(WINDOW_S);
        }
        Ok(exits as f64 / seconds)
    };
    back_to_stock()?;
    let mut guests = vec![start(0)?];
    let alone = rate(&watch_settled(WINDOW_S)?, &guests)?;
    for number in 1..4 {
        guests.push(start(number)?);
    }
    let [stock, cohort] = compare()?;
    let in_excess = |view| -> Result<f64> { Ok((rate(view, &guests)? - alone).max(0.0)) };
    let (stock, cohort) = (in_excess(&stock)?, in_excess(&cohort)?);
    let fewer = 100.0 * (1.0 - cohort / stock);
    println!(
        "    spin exits per second of CPU time: one VM alone {alone:.0}; four VMs, beyond that: stock {stock:.0}, Cohort \
         {cohort:.0}: {fewer:.1} % fewer"
    );
    ensure!(
        stock > 100.0,
        "under the stock scheduler there are only {stock:.0} in excess: nothing is proven"
    );
    ensure!(
        fewer >= FEWER_SPINS_PCT,
        "only {fewer:.1} % fewer spin exits"
    );
    Ok(())
}
