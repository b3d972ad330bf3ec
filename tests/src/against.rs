// SPDX-License-Identifier: GPL-2.0-only
//! Cohort against the stock scheduler, seen by the observer under both, in one boot and with the same guests running.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use cohort::observer::view::{HostView, VcpuView, quantile_us};
use cohort::scheduler::metrics::percent;
use cohort_lab::inside::booted::{GuestSpec, Topology, Workload, start_all};
use cohort_lab::inside::windows::Subject;
use cohort_micro::Spec;

use crate::Test;
use crate::host::{
    Guest, HostLoad, PATIENCE, assert_ratio, back_to_stock, gained, lab, locked, shares_in,
    start_cohort_with, stop_cohort, under_both, unload_observer, vcpu_of, vcpus_of, watch,
};

pub const TESTS: &[Test] = &[
    (
        "a_preempted_receiver_of_an_ipi_runs_thirty_times_sooner",
        receiver_in_user_mode,
    ),
    (
        "in_a_chain_of_three_receivers_run_thirty_times_sooner",
        || chain(3),
    ),
    (
        "in_a_chain_of_four_receivers_run_thirty_times_sooner",
        || chain(4),
    ),
    ("in_a_ring_of_three_receivers_run_thirty_times_sooner", ring),
    (
        "a_vm_that_wakes_often_is_served_at_once_beside_cohorts",
        wakes_often,
    ),
    (
        "a_vcpu_that_wakes_is_served_at_once_beside_a_sibling_that_never_sleeps",
        wakes_beside_a_busy_sibling,
    ),
    ("two_vcpus_that_wake_each_other_do_no_less", wake_each_other),
    (
        "two_pairs_that_wake_each_other_do_no_less",
        wake_each_other_in_pairs,
    ),
    ("four_vms_in_a_lock_spin_less", spin_less),
    (
        "a_guests_balancer_uses_its_halted_vcpus_whatever_its_topology",
        halted_vcpus_are_used,
    ),
];

const WINDOW_S: u32 = 1;
const SETTLE: Duration = Duration::from_millis(300);
const WAKES_OFTEN: &str = "loop: sleep 2ms; compute 100us";
/// How many times sooner a preempted receiver runs, at the median: its upper bound is a power of two. Seen: 256, in chains 128.
/// While it waits until its sender's spinning is noticed: 16, in chains 8.
const SOONER: u64 = 32;
/// A receiver that has not answered when the turn of its VM ends waits for the next one, or for the one after that, as these VMs
/// have more vCPUs than the host has CPUs. Three VMs' turns take 6 ms. Seen: 4096 and 8192, under the stock scheduler 4096 to
/// 16384.
const TWO_ROUNDS_US: u64 = 16384;
/// Seen: 100 %. The published "up to" of directed yields and IPI-aware boosts is 87.6 %.
const FEWER_SPINS_PCT: f64 = 95.0;

/// What the observer sees under the stock scheduler and under Cohort.
fn compare() -> Result<[HostView; 2]> {
    under_both(watch_settled)
}

/// What the observer sees when the scheduler, and who has just started, have settled.
fn watch_settled() -> Result<HostView> {
    sleep(SETTLE);
    watch(WINDOW_S)
}

/// What the observer sees under Cohort with these options.
fn watch_cohort(options: &[&str]) -> Result<HostView> {
    let cohort = start_cohort_with(options)?;
    let view = watch_settled()?;
    stop_cohort(cohort)?;
    Ok(view)
}

/// The IPIs of a guest with which two busy VMs compete.
struct Ipis {
    sent: u64,
    /// To a receiver that was preempted.
    waited: u64,
    /// Half of those ran within so many us, an upper bound.
    median_us: u64,
    /// All but a hundredth of those did.
    late_us: u64,
}

/// Under the stock scheduler and under Cohort.
fn ipis(spec: Spec) -> Result<[Ipis; 2]> {
    let guest = Guest::start(&spec)?;
    let _others = [Guest::busy("busy0", 2)?, Guest::busy("busy1", 2)?];
    let of = |view: HostView| -> Result<Ipis> {
        let all = vcpus_of(&view, &guest)?;
        let waited: u64 = all.ipi_to_run.iter().sum();
        let quantile = |quantile| quantile_us(&all.ipi_to_run, quantile).unwrap_or(0);
        println!(
            "    {}: IPIs {}, to a preempted vCPU {waited}; it ran within {} us (p50), {} us (p99), {} us (max); \
             spin exits {}",
            view.scheduler,
            all.ipis,
            quantile(0.5),
            quantile(0.99),
            quantile(1.0),
            all.spin_exits
        );
        Ok(Ipis {
            sent: all.ipis,
            waited,
            median_us: quantile(0.5),
            late_us: quantile(0.99),
        })
    };
    let [stock, cohort] = compare()?;
    Ok([of(stock)?, of(cohort)?])
}

impl Ipis {
    /// How many of all found their receiver preempted.
    fn waited_part(&self) -> f64 {
        self.waited as f64 / self.sent as f64
    }
}

/// Half of the preempted receivers run at least [`SOONER`] times as soon as under the stock scheduler, and all but a hundredth
/// within two rounds.
fn run_sooner(spec: Spec) -> Result<()> {
    let [stock, cohort] = ipis(spec)?;
    for ipis in [&stock, &cohort] {
        ensure!(
            ipis.waited >= 50,
            "only {} IPIs found their receiver preempted: nothing is proven",
            ipis.waited
        );
    }
    ensure!(
        stock.median_us >= SOONER * cohort.median_us,
        "{:.1} % found their receiver preempted, half of those ran within {} us; under the stock scheduler {:.1} %, {} us",
        100.0 * cohort.waited_part(),
        cohort.median_us,
        100.0 * stock.waited_part(),
        stock.median_us
    );
    ensure!(
        cohort.late_us <= TWO_ROUNDS_US,
        "a hundredth of the preempted receivers ran after {} us or more",
        cohort.late_us
    );
    Ok(())
}

/// The receiver is in guest user mode, where KVM finds no candidate.
fn receiver_in_user_mode() -> Result<()> {
    let spec = Spec::new("ipi")
        .vcpu("loop: compute 20us; ipi 1 0x41; wait-answer")
        .vcpu("user; loop: compute 100us")
        .vcpu("user; loop: compute 100us");
    run_sooner(spec)
}

/// Each but the last waits for the next with interrupts masked, so it answers only when it was answered.
fn chain(links: usize) -> Result<()> {
    let first = Spec::new("chain").vcpu("loop: compute 20us; ipi 1 0x41; wait-answer");
    let spec = (1..links - 1).fold(first, |spec, vcpu| {
        let (next, vector) = (vcpu + 1, 0x41 + vcpu);
        spec.vcpu(format!(
            "loop: mask; ipi {next} {vector:#x}; wait-answer; unmask; compute 20us"
        ))
    });
    run_sooner(spec.vcpu("user; loop: compute 100us"))
}

/// Each waits for the next, the last for the first.
fn ring() -> Result<()> {
    run_sooner((0..3).fold(Spec::new("ring"), |spec, vcpu| {
        let (next, vector) = ((vcpu + 1) % 3, 0x41 + vcpu);
        spec.vcpu(format!(
            "loop: compute 20us; ipi {next} {vector:#x}; wait-answer"
        ))
    }))
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
    let without = watch_cohort(&["--off", "wake"])?;
    // Not 0.99: about one wake-up in a hundred waits for a turn. It comes just after its CPU was lent, as this program, which
    // watches, takes loans too; or its VM is as far ahead as loans may bring it.
    let waits = |scheduler, view| waits_us(scheduler, vcpu_of(view, &guests[0], 0)?, 0.95);
    let without = waits("without loans", &without)?;
    let stock = waits("stock", &stock)?;
    let cohort = waits("cohort", &cohort)?;
    // Seen from four seeds: 16 us; without loans 4096 and 8192, under the stock scheduler 2048 and 4096.
    ensure!(
        64 * cohort <= without && 64 * cohort <= stock,
        "it waits too long: of twenty wake-ups one waits for {cohort} us, without loans {without}, under the stock scheduler {stock}"
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
        let (done, elapsed) = gained(Duration::from_secs(u64::from(WINDOW_S)), read)?;
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

/// Two threads that wake each other all the time, in a guest of four vCPUs with KVM's paravirtual help, beside two busy VMs:
/// the guest's balancer puts them on two vCPUs only if it takes the halted ones for idle.
fn halted_vcpus_are_used() -> Result<()> {
    let lab = lab()?;
    for (name, topology) in [
        (
            "sockets",
            Topology {
                sockets: 4,
                cores: 1,
                threads: 1,
            },
        ),
        (
            "cores",
            Topology {
                sockets: 1,
                cores: 4,
                threads: 1,
            },
        ),
    ] {
        let workload = Workload {
            threads: Some(2),
            sleeping: true,
            ..Workload::new("barrier")
        };
        let spec = GuestSpec {
            paravirtual: true,
            topology,
            ..GuestSpec::new(name, 4, workload)
        };
        let guests = start_all(&lab, vec![spec], PATIENCE)?;
        let _others = [Guest::busy("busy0", 2)?, Guest::busy("busy1", 2)?];
        let pid = guests[0].pid();
        let on_one_pct = |view: &HostView| -> Result<f64> {
            let vm = view
                .vms
                .get(&pid)
                .context("the observer does not see the guest")?;
            let ran: Vec<f64> = vm.vcpus.values().map(|vcpu| vcpu.run_pct).collect();
            let (most, all) = (ran.iter().copied().fold(0.0, f64::max), ran.iter().sum());
            println!(
                "    4 {name}, {}: its vCPUs ran {ran:.1?} % of the time, {:.1} % of that on one; {} wake-ups",
                view.scheduler,
                percent(most, all),
                vm.all.wakeups
            );
            Ok(percent(most, all))
        };
        let [stock, cohort] = compare()?;
        on_one_pct(&stock)?;
        let on_one = on_one_pct(&cohort)?;
        ensure!(
            on_one < 60.0,
            "{on_one:.1} % of its work was done on one vCPU"
        );
    }
    Ok(())
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
    let alone = rate(&watch_settled()?, &guests)?;
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
