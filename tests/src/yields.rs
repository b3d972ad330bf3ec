// SPDX-License-Identifier: GPL-2.0-only
//! Directed yields. The spinning guests take a ticket lock in guest kernel mode and issue one PAUSE per window, as a
//! spin loop does that hardware sees (docs/lab.md), so each exit is one that a real host would have.

use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cohort::scheduler::metrics::{VmStats, percent};
use cohort_lab::inside::booted::{GuestSpec, Topology, Workload, start_all};
use cohort_micro::Spec;

use crate::Test;
use crate::host::{
    Guest, PATIENCE, assert_ratio, back_to_stock, busy, cohort_stats, lab, locked, set, shares,
    start_cohort, start_cohort_with, stop_cohort, under_cohort, vm_stats, watch_settled,
};

pub const TESTS: &[Test] = &[
    (
        "an_offered_ready_sibling_runs_next",
        offered_sibling_runs_next,
    ),
    (
        "where_all_vcpus_are_bound_to_one_cpu_an_offered_sibling_runs_next",
        bound_sibling_runs_next,
    ),
    (
        "a_spinning_vm_takes_nothing_from_its_neighbour",
        neighbour_keeps_its_share,
    ),
    (
        "no_other_scheduler_has_counted_a_yield_for_it",
        counts_start_at_zero,
    ),
    (
        "mechanisms_can_be_switched_20_times_under_load_and_each_switch_counts",
        switches,
    ),
    (
        "a_halted_vcpu_is_never_shown_to_the_guest_as_preempted",
        halted_is_idle,
    ),
    (
        "a_guests_balancer_uses_its_halted_vcpus_whatever_its_topology",
        halted_vcpus_are_used,
    ),
    (
        "without_sight_of_ipis_it_says_so_and_serves_the_yields_it_still_sees",
        blind,
    ),
];

const WINDOW: Duration = Duration::from_secs(1);
/// Of the yields that have a ready target, how many run it next.
const SERVED: f64 = 0.95;

/// Of the yields for which a sibling was ready: those whose target ran next, if on another CPU that came first, as it was
/// the VM's turn there too. One that comes when the VM's turn is over is owed for its next one, and lost if another VM's
/// takes its place meanwhile: of those there may be one in each turn on each CPU, however many yields there are.
fn part_served(vm: &VmStats) -> Result<f64> {
    let missed = |reason| vm.yields_missed.get(reason).copied().unwrap_or(0);
    let turns_ends = vm.turns * lab()?.guest_cpus.len() as u64;
    let too_late = missed("lost");
    println!("    turns' ends {turns_ends}, lost {too_late}");
    ensure!(
        too_late <= turns_ends,
        "{too_late} yields were lost in {turns_ends} ends of turns"
    );
    Ok((vm.yields_served + missed("elsewhere")) as f64 / (vm.yields_ready - too_late) as f64)
}

/// Three vCPUs that fight for one lock: with two CPUs, one of them often waits while its ticket is up.
fn spinner(name: &str) -> Spec {
    locked(name, 3)
}

fn bound_sibling_runs_next() -> Result<()> {
    let guest = Guest::start_on(&spinner("bound"), &lab()?.guest_cpus[..1])?;
    let cohort = start_cohort()?;
    sleep(WINDOW);
    let vm = vm_stats(guest.micro.pid() as u32)?;
    stop_cohort(cohort)?;
    println!(
        "    {} yields found a sibling ready, {} were served",
        vm.yields_ready, vm.yields_served
    );
    ensure!(
        vm.yields_ready > 100 && vm.yields_served as f64 >= SERVED * vm.yields_ready as f64,
        "too few siblings ran next"
    );
    Ok(())
}

fn offered_sibling_runs_next() -> Result<()> {
    let guests = [
        Guest::start(&spinner("spin0"))?,
        Guest::start(&spinner("spin1"))?,
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
        let served = part_served(&vm)?;
        ensure!(
            served >= SERVED,
            "only for {:.1} % of the yields the target ran next",
            100.0 * served
        );
    }
    stop_cohort(cohort)
}

fn neighbour_keeps_its_share() -> Result<()> {
    let neighbour = Guest::busy("neighbour", 2)?;
    let share_beside = |spec: Spec| -> Result<f64> {
        let guest = Guest::start(&spec)?;
        let (shares, _) = under_cohort(|| shares(&[&neighbour, &guest], WINDOW))?;
        Ok(shares[0])
    };
    let (beside_busy, beside_spinner) = (
        share_beside(busy("calm", 3))?,
        share_beside(spinner("spinner"))?,
    );
    ensure!(
        (beside_spinner - beside_busy).abs() <= 0.01,
        "beside a spinning VM the neighbour has {beside_spinner:.4}, beside a busy one {beside_busy:.4}"
    );
    Ok(())
}

fn counts_start_at_zero() -> Result<()> {
    let guest = Guest::start(&spinner("before"))?;
    // Yields under the stock scheduler first: none of them may be counted.
    back_to_stock()?;
    sleep(WINDOW / 4);
    println!("    {}", lab()?.describe());
    let busy = Guest::busy("lonely", 2)?;
    let cohort = start_cohort()?;
    sleep(WINDOW / 4);
    let vm = vm_stats(busy.micro.pid() as u32)?;
    ensure!(
        vm.yields_offered == 0,
        "{} yields were counted for a VM that never spins",
        vm.yields_offered
    );
    drop(guest);
    stop_cohort(cohort)
}

fn switches() -> Result<()> {
    const GIVERS: [&str; 2] = ["yield", "ipi"];
    let to = |state: &str| GIVERS.map(|name| format!("{name}={state}"));
    let guests = [
        Guest::start(&spinner("spin0"))?,
        Guest::start(&spinner("spin1"))?,
    ];
    let cohort = start_cohort()?;
    let effects = |switches: &[&str]| -> Result<u64> {
        let mechanisms = set(switches)?;
        let of = |name: &&str| {
            let stats = mechanisms.get(*name);
            stats.map(|stats| stats.effects).unwrap_or_default()
        };
        Ok(GIVERS.iter().map(of).sum())
    };
    let switched_to = |state: &str| -> Result<u64> {
        let switches = to(state);
        effects(&switches.each_ref().map(String::as_str))
    };
    for _ in 0..10 {
        switched_to("off")?;
        switched_to("on")?;
    }
    let (shares, _) = shares(&[&guests[0], &guests[1]], WINDOW)?;
    assert_ratio(&shares, &[1.0, 1.0], 0.02)?;
    switched_to("off")?;
    sleep(Duration::from_millis(200)); // what is owed is served or given up
    let at_first = effects(&[])?;
    sleep(WINDOW);
    let off = effects(&[])? - at_first;
    switched_to("on")?;
    sleep(WINDOW);
    let on = effects(&[])? - at_first - off;
    println!("    yields served in a second: off {off}, on {on}");
    ensure!(
        off == 0,
        "{off} yields were served while all that serves them was off"
    );
    ensure!(
        on > 100,
        "only {on} yields were served when they were on again"
    );
    stop_cohort(cohort)
}

/// The guest's scheduler gives work to a vCPU only if it takes it for idle; KVM tells it which vCPUs are preempted. Under
/// competition that must never be one that halts, or nobody in the guest uses it.
fn halted_is_idle() -> Result<()> {
    let spec = Spec::new("halts")
        .vcpu("loop: compute 1ms")
        .vcpu("loop: compute 1ms")
        .vcpu("loop: sleep 1ms; compute 100us")
        .vcpu("loop: sleep 1ms; compute 100us");
    let guest = Guest::start(&spec)?;
    let _other = Guest::busy("busy", 2)?;
    let cohort = start_cohort()?;
    let state = &guest.micro.state;
    let until = Instant::now() + WINDOW;
    let (mut preempted, mut halted, mut wrong) = (0, 0, 0);
    while Instant::now() < until {
        for vcpu in 0..4 {
            let before = state.vcpu(vcpu);
            let sleeps = thread_sleeps(guest.micro.pid(), before.tid)?;
            let after = state.vcpu(vcpu);
            preempted += u32::from(after.preempted);
            // It slept all the time between two looks that saw the same.
            if sleeps && before.interrupts == after.interrupts && before.halts == after.halts {
                halted += 1;
                wrong += u32::from(before.preempted && after.preempted);
            }
        }
        sleep(Duration::from_micros(500));
    }
    stop_cohort(cohort)?;
    println!(
        "    of {halted} looks at a halted vCPU {wrong} saw it preempted; others were, {preempted} times"
    );
    ensure!(
        preempted > 20,
        "no vCPU was ever seen as preempted: nothing is proven"
    );
    ensure!(halted > 200, "halted vCPUs were seen {halted} times only");
    ensure!(
        wrong == 0,
        "of {halted} looks at a halted vCPU {wrong} saw it preempted"
    );
    Ok(())
}

fn thread_sleeps(pid: i32, tid: i32) -> Result<bool> {
    let path = format!("/proc/{pid}/task/{tid}/stat");
    let stat = fs::read_to_string(&path).with_context(|| format!("{path} cannot be read"))?;
    // The name, in parentheses, may hold anything.
    let state = stat
        .rsplit(") ")
        .next()
        .and_then(|rest| rest.chars().next());
    Ok(state == Some('S'))
}

fn blind() -> Result<()> {
    let guest = Guest::start(&spinner("spin0"))?;
    let _other = Guest::busy("busy", 2)?;
    let cohort = start_cohort_with(&["--blind", "ipis"])?;
    sleep(WINDOW);
    let said = cohort.output();
    ensure!(
        said.contains("IPIs between vCPUs are not seen"),
        "it does not say what it does not see: {said}"
    );
    let blind_spots = cohort_stats()?.blind_spots;
    ensure!(
        blind_spots.iter().any(|spot| spot.contains("IPIs")),
        "its statistics do not say what it does not see: {blind_spots:?}"
    );
    let vm = vm_stats(guest.micro.pid() as u32)?;
    println!(
        "    yields: target ready {}, served {}; IPIs {}",
        vm.yields_ready, vm.yields_served, vm.ipis
    );
    ensure!(vm.ipis == 0, "{} IPIs were seen all the same", vm.ipis);
    let served = part_served(&vm)?;
    ensure!(
        vm.yields_ready > 100 && served >= SERVED,
        "of {} yields {:.1} % were served",
        vm.yields_ready,
        100.0 * served
    );
    stop_cohort(cohort)
}

/// Two threads that wake each other all the time, in a guest of four vCPUs with KVM's paravirtual help, beside two busy VMs:
/// the guest's balancer puts them on two vCPUs only if it takes the halted ones for idle.
fn halted_vcpus_are_used() -> Result<()> {
    let lab = lab()?;
    for (name, sockets, cores) in [("sockets", 4, 1), ("cores", 1, 4)] {
        let topology = Topology {
            sockets,
            cores,
            threads: 1,
        };
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
        let view = under_cohort(|| watch_settled(1))?;
        let vm = view.vms.get(&guests[0].pid());
        let vm = vm.context("the observer does not see the guest")?;
        let ran: Vec<f64> = vm.vcpus.values().map(|vcpu| vcpu.run_pct).collect();
        let (most, all) = (ran.iter().copied().fold(0.0, f64::max), ran.iter().sum());
        let on_one = percent(most, all);
        println!(
            "    4 {name}: its vCPUs ran {ran:.1?} % of the time, {on_one:.1} % of that on one; {} wake-ups",
            vm.all.wakeups
        );
        ensure!(
            on_one < 60.0,
            "{on_one:.1} % of its work was done on one vCPU"
        );
    }
    Ok(())
}
