// SPDX-License-Identifier: GPL-2.0-only
//! Halted time is right, whether HLT exits or not: held against what guests that work and halt by a script stamp, and on
//! nohz_full CPUs against how long the kernel says that they were in guest mode. None of that is read by the observer.

use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cohort::observer::view::{HaltedBy, HostView, VcpuView};
use cohort_lab::inside::hooks::{COUNTING, costs_within, print};
use cohort_micro::Spec;

use crate::Test;
use crate::host::{
    Guest, HALT_POLL_NS, HOST_CPU, Setting, begin_window, end_window, gained, lab, pin, pin_vcpus,
    schedstat_ns, set_online, vcpu_of, watch_while,
};

pub const TESTS: &[Test] = &[
    ("halted_time_is_true_where_hlt_does_not_exit", on_their_cpus),
    ("halted_time_is_true_where_hlt_exits", by_exits),
    (
        "halted_time_is_true_where_hlt_exits_after_microseconds",
        by_short_exits,
    ),
    ("vcpus_that_share_a_cpu_have_each_their_own", share_a_cpu),
    ("a_vcpu_that_moves_between_cpus_loses_nothing", moves),
    ("a_vcpu_that_another_thread_runs_goes_on_there", handed_over),
    ("a_cpu_that_was_offline_is_read_again", offline_and_online),
    ("what_it_costs_is_accounted_for", accounted_for),
];

const WINDOW_S: u32 = 2;
const A_SECOND: Duration = Duration::from_secs(1);
/// By so much of the time halted time may be wrong, in percent.
const TOLERANCE_PCT: f64 = 1.0;
/// Parts of seconds in which /proc counts.
const CLOCK_TICKS: f64 = 100.0;

/// A guest works so many percent of so long.
#[derive(Clone, Copy)]
struct Duty {
    percent: u64,
    cycle_us: u64,
}

const fn duty(percent: u64, cycle_us: u64) -> Duty {
    Duty { percent, cycle_us }
}

impl Duty {
    fn name(self) -> String {
        format!("{} % of {} us", self.percent, self.cycle_us)
    }

    fn program(self) -> String {
        let work_us = self.cycle_us * self.percent / 100;
        let sleep_us = self.cycle_us - work_us;
        format!("loop: stamp 0; compute {work_us}us; stamp 1; sleep {sleep_us}us")
    }
}

/// A guest with a vCPU per duty, on a CPU each of `cpus` as far as those go.
fn start(name: &str, passed_through: bool, duties: &[Duty], cpus: &[u32]) -> Result<Guest> {
    let mut spec = duties
        .iter()
        .fold(Spec::new(name), |spec, duty| spec.vcpu(duty.program()));
    spec.hlt_passthrough = passed_through;
    begin_window()?;
    let guest = Guest::start_on(&spec, cpus)?;
    // The observer, which is there before it, sees a vCPU from its first switch on: so each is moved.
    pin_vcpus(&guest, &[HOST_CPU])?;
    sleep(A_SECOND / 10);
    pin_vcpus(&guest, cpus)?;
    // The cycle that they are in then is longer than others, and the longest take a second.
    sleep(A_SECOND * 3 / 2);
    Ok(guest)
}

/// What a vCPU did since it began, without the observer's help.
#[derive(Clone, Copy, Default)]
struct Count {
    /// In guest mode by the kernel's account, which has interrupts of the host in it, s.
    in_guest: f64,
    /// Had a CPU or waited for one, s.
    awake: f64,
    cycles: u64,
    /// When the last of them began, in ticks of the guest's TSC.
    began: u64,
    switches: u64,
}

impl Count {
    fn of(guest: &Guest, vcpu: usize) -> Result<Self> {
        let counters = guest.micro.state.vcpu(vcpu);
        let folder = format!("/proc/{}/task/{}", guest.micro.pid(), counters.tid);
        let stat = fs::read_to_string(format!("{folder}/stat"))?;
        // After the name, which may hold blanks, the first is field 3; guest_time is field 43.
        let rest = stat.rsplit(')').next().context("stat has a name")?;
        let guest_time = rest.split_whitespace().nth(43 - 3);
        let guest_time: f64 = guest_time.context("stat has a guest_time")?.parse()?;
        let status = fs::read_to_string(format!("{folder}/status"))?;
        let switches = status.lines().filter(|line| line.contains("ctxt_switches"));
        let switches =
            switches.filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
        let (ran_ns, waited_ns) = schedstat_ns(counters.tid as u32)?;
        Ok(Self {
            in_guest: guest_time / CLOCK_TICKS,
            awake: (ran_ns + waited_ns) as f64 / 1e9,
            cycles: counters.progress,
            began: counters.stamps[0],
            switches: switches.sum(),
        })
    }
}

/// What a vCPU did in a window.
struct Truth {
    elapsed_s: f64,
    in_guest_s: f64,
    awake_s: f64,
    /// As many as there were between the begins of two, one about when the window began and one about when it ended. A
    /// window has parts of cycles at its ends; counting them as whole ones would be wrong by up to a long cycle's work.
    cycles: f64,
    /// In which it worked by its own clock, if nothing came between.
    worked_s: f64,
    switches: u64,
}

impl Truth {
    /// In guest mode and not at work, %.
    fn idle_in_guest_pct(&self) -> f64 {
        100.0 * (self.in_guest_s - self.worked_s) / self.elapsed_s
    }

    /// Asleep in the host by the kernel's account, %. Right for a vCPU that is switched often: what one does until it is
    /// switched is not in that account yet.
    fn asleep_pct(&self) -> f64 {
        100.0 * (1.0 - self.awake_s / self.elapsed_s)
    }

    /// Not at work, but for `host_s` of the host's work in each cycle, %.
    fn idle_pct(&self, host_s: f64) -> f64 {
        100.0 * (1.0 - (self.worked_s + self.cycles * host_s) / self.elapsed_s)
    }
}

/// Watches `guest` in a window; `meanwhile` is done about each millisecond.
fn watch(guest: &Guest, mut meanwhile: impl FnMut()) -> Result<(HostView, Vec<Truth>)> {
    let state = &guest.micro.state;
    let vcpus = 0..state.nr_vcpus();
    let counts = || {
        vcpus
            .clone()
            .map(|vcpu| Count::of(guest, vcpu))
            .collect::<Result<Vec<_>>>()
    };
    let (begin, before) = (Instant::now(), counts()?);
    // The work of one cycle, if nothing came between.
    let mut work_ticks = vec![u64::MAX; state.nr_vcpus()];
    let view = watch_while(WINDOW_S, || {
        for (vcpu, work_ticks) in work_ticks.iter_mut().enumerate() {
            let [begin, end, ..] = state.vcpu(vcpu).stamps;
            if end > begin {
                *work_ticks = (*work_ticks).min(end - begin);
            }
        }
        meanwhile();
    })?;
    let (elapsed_s, after) = (begin.elapsed().as_secs_f64(), counts()?);
    ensure!(!work_ticks.contains(&u64::MAX), "a vCPU has done no work");
    let seconds = |ticks: u64| ticks as f64 / state.tsc_khz() as f64 / 1e3;
    let truth = vcpus.clone().map(|vcpu| {
        let (before, after) = (before[vcpu], after[vcpu]);
        let each_s = seconds(after.began - before.began) / (after.cycles - before.cycles) as f64;
        let cycles = elapsed_s / each_s;
        let work_s = seconds(work_ticks[vcpu]);
        Truth {
            elapsed_s,
            in_guest_s: after.in_guest - before.in_guest,
            awake_s: after.awake - before.awake,
            cycles,
            worked_s: cycles * work_s,
            switches: after.switches - before.switches,
        }
    });
    Ok((view, truth.collect()))
}

/// What the host does for a guest that sleeps until its timer fires, s: it arms that, and leaves the guest when it fires. By
/// how much longer the same work takes with a timer that fires in the middle of it.
fn host_part_s(cpus: &[u32]) -> Result<f64> {
    let mut spec = Spec::new("timer")
        .vcpu("loop: compute 200us")
        .vcpu("loop: timer 100us; compute 200us");
    spec.hlt_passthrough = true;
    let guest = Guest::start_on(&spec, cpus)?;
    pin_vcpus(&guest, cpus)?;
    let passes = || {
        Ok(guest
            .micro
            .state
            .vcpus()
            .map(|vcpu| vcpu.progress)
            .collect())
    };
    sleep(Duration::from_millis(50));
    let (passes, elapsed) = gained(Duration::from_millis(500), passes)?;
    let each_s = |vcpu: usize| elapsed.as_secs_f64() / passes[vcpu] as f64;
    let part_s = each_s(1) - each_s(0);
    println!(
        "    a timer of the guest takes the host {:.2} us",
        part_s * 1e6
    );
    ensure!(part_s > 0.0, "a timer takes no time");
    Ok(part_s)
}

fn assert_true(what: &str, seen_pct: f64, truth_pct: f64) -> Result<()> {
    println!(
        "    {what}: halted {seen_pct:.2} % seen, {truth_pct:.2} % in truth ({:+.2})",
        seen_pct - truth_pct
    );
    ensure!(
        (seen_pct - truth_pct).abs() <= TOLERANCE_PCT,
        "{what}: {seen_pct:.2} % are seen, {truth_pct:.2} % are true"
    );
    Ok(())
}

/// All phases of a vCPU together, %.
fn known_pct(seen: &VcpuView) -> f64 {
    seen.run_pct + seen.ready_pct + seen.limited_pct + seen.halted_pct + seen.away_pct
}

/// Where HLT does not exit: against `truth_pct`, a part of the time by vCPU.
fn assert_halted(view: &HostView, guest: &Guest, duties: &[Duty], truth_pct: &[f64]) -> Result<()> {
    ensure!(
        view.halted_error_pct < TOLERANCE_PCT,
        "halted time is stated to be wrong by {} %",
        view.halted_error_pct
    );
    for (vcpu, duty) in duties.iter().enumerate() {
        let seen = vcpu_of(view, guest, vcpu as u32)?;
        let known_pct = known_pct(seen);
        ensure!(
            (known_pct - 100.0).abs() < 0.1,
            "phases add up to {known_pct} %"
        );
        ensure!(seen.halted_by == HaltedBy::Mperf.word());
        ensure!(
            seen.halted_unread_pct == 0.0,
            "{} % are not read",
            seen.halted_unread_pct
        );
        let what = duty.name();
        assert_true(&what, seen.halted_pct, truth_pct[vcpu])?;
    }
    Ok(())
}

/// The CPUs without ticks that guests have.
fn tickless() -> Result<Vec<u32>> {
    let tickless = fs::read_to_string("/sys/devices/system/cpu/nohz_full")?;
    let cpus = lab()?.guest_cpus;
    ensure!(
        cpus.len() == 6 && tickless.trim() == "1-6",
        "this suite wants six CPUs for guests, all of them without ticks: see tests/run"
    );
    Ok(cpus)
}

fn on_their_cpus() -> Result<()> {
    let rounds = [
        [
            duty(1, 100),
            duty(10, 1_000),
            duty(50, 10_000),
            duty(90, 100_000),
            duty(99, 1_000_000),
            duty(50, 1_000_000),
        ],
        [
            duty(1, 1_000_000),
            duty(10, 100_000),
            duty(50, 100),
            duty(90, 1_000),
            duty(99, 10_000),
            duty(10, 100),
        ],
    ];
    let cpus = tickless()?;
    let host_s = host_part_s(&cpus)?;
    let mut switches = Vec::new();
    for duties in rounds {
        let guest = start("passed-through", true, &duties, &cpus)?;
        let (view, truth) = watch(&guest, || ())?;
        println!("    stated error {:.3} %", view.halted_error_pct);
        let truth_pct: Vec<f64> = truth.iter().map(|vcpu| vcpu.idle_pct(host_s)).collect();
        assert_halted(&view, &guest, &duties, &truth_pct)?;
        switches.extend(truth.iter().map(|vcpu| vcpu.switches));
    }
    println!("    context switches in the windows: {switches:?}");
    // A window has two ends: at one of them at least it had not just been switched.
    ensure!(
        switches.iter().any(|&switches| switches < 2),
        "each vCPU was switched twice or more, so it was not proved that those are read that are not"
    );
    Ok(())
}

/// The guest does not tell what it is halted from what KVM polls for work; cycles are so long that the host's part is little.
fn by_exits() -> Result<()> {
    let duties = [
        duty(1, 1_000_000),
        duty(10, 100_000),
        duty(50, 10_000),
        duty(90, 100_000),
        duty(99, 1_000_000),
    ];
    let guest = start("exits", false, &duties, &tickless()?)?;
    let (view, truth) = watch(&guest, || ())?;
    for (vcpu, duty) in duties.iter().enumerate() {
        let seen = vcpu_of(&view, &guest, vcpu as u32)?;
        ensure!(seen.halted_by == HaltedBy::Exits.word());
        let what = duty.name();
        let seen_pct = seen.halted_pct + seen.poll_pct + seen.ready_pct;
        assert_true(&what, seen_pct, truth[vcpu].idle_pct(0.0))?;
    }
    ensure!(
        !view.has("halted_error_pct"),
        "there is nothing to be wrong"
    );
    Ok(())
}

/// Cycles so short that the host's part of them is large; so against the kernel's account of when the threads slept.
fn by_short_exits() -> Result<()> {
    let _polling = Setting::set(HALT_POLL_NS, "0")?;
    let duties = [
        duty(50, 100),
        duty(10, 100),
        duty(1, 1_000),
        duty(50, 1_000),
        duty(90, 1_000),
        duty(99, 10_000),
    ];
    let guest = start("exits", false, &duties, &tickless()?)?;
    let (view, truth) = watch(&guest, || ())?;
    for (vcpu, duty) in duties.iter().enumerate() {
        let seen = vcpu_of(&view, &guest, vcpu as u32)?;
        let what = duty.name();
        assert_true(&what, seen.halted_pct, truth[vcpu].asleep_pct())?;
    }
    Ok(())
}

/// Against time in guest mode, as each of them has the CPU for parts of the time only. The kernel counts its interrupts
/// there; cycles are so long that they are few.
fn share_a_cpu() -> Result<()> {
    let duties = [duty(50, 4_000), duty(10, 4_000), duty(90, 2_000)];
    let guest = start("shared", true, &duties, &tickless()?[..1])?;
    let (view, truth) = watch(&guest, || ())?;
    for (vcpu, truth) in truth.iter().enumerate() {
        let switches = truth.switches;
        ensure!(switches > 100, "vCPU {vcpu} was switched {switches} times");
    }
    let truth_pct: Vec<f64> = truth.iter().map(Truth::idle_in_guest_pct).collect();
    assert_halted(&view, &guest, &duties, &truth_pct)
}

fn moves() -> Result<()> {
    let duties = [duty(50, 10_000)];
    let cpus = tickless()?;
    let guest = start("moves", true, &duties, &cpus[..1])?;
    let tid = guest.micro.state.vcpu(0).tid;
    let (mut next, mut at) = (Instant::now(), 0);
    let mut failed = Ok(());
    let (view, truth) = watch(&guest, || {
        if next <= Instant::now() {
            next += Duration::from_millis(50);
            at += 1;
            failed = pin(tid, &[cpus[at % cpus.len()]]).and(std::mem::replace(&mut failed, Ok(())));
        }
    })?;
    failed?;
    let migrations = vcpu_of(&view, &guest, 0)?.migrations;
    ensure!(migrations > 20, "it has moved {migrations} times");
    assert_halted(&view, &guest, &duties, &[truth[0].idle_in_guest_pct()])
}

/// As when a vCPU is unplugged and plugged again. In the window in which that happens the new thread counts from its
/// beginning; the former one, which is still there, counts no more.
fn handed_over() -> Result<()> {
    let duties = [duty(50, 10_000); 2];
    let cpus = tickless()?;
    for passed_through in [true, false] {
        let guest = start("handed-over", passed_through, &duties, &cpus)?;
        begin_window()?;
        guest.micro.hand_over()?;
        pin_vcpus(&guest, &cpus)?;
        sleep(A_SECOND);
        let meanwhile = end_window()?;
        sleep(A_SECOND);
        let after = end_window()?;
        for (what, view, least_known_pct, tolerance_pct) in [
            ("meanwhile", &meanwhile, 90.0, 5.0),
            ("after", &after, 99.9, TOLERANCE_PCT),
        ] {
            for vcpu in 0..2 {
                let seen = vcpu_of(view, &guest, vcpu)?;
                let (known_pct, halted_pct) = (known_pct(seen), seen.halted_pct + seen.poll_pct);
                println!(
                    "    {what}: vCPU {vcpu} is halted for {halted_pct:.2} % of {known_pct:.2} %"
                );
                ensure!(
                    (least_known_pct..100.1).contains(&known_pct)
                        && (halted_pct - 50.0).abs() < tolerance_pct
                );
            }
        }
    }
    Ok(())
}

fn offline_and_online() -> Result<()> {
    let cpu = tickless()?[0];
    let guest = start("offline", true, &[duty(50, 10_000)], &[cpu])?;
    let tid = guest.micro.state.vcpu(0).tid;
    begin_window()?;
    for online in [false, true] {
        set_online(cpu, online)?;
        sleep(Duration::from_millis(200));
    }
    pin(tid, &[cpu])?;
    sleep(A_SECOND / 2);
    let meanwhile = end_window()?;
    // The first reading after it came back has opened its event anew.
    begin_window()?;
    sleep(A_SECOND);
    let after = end_window()?;
    let [meanwhile, after] = [&meanwhile, &after].map(|view| vcpu_of(view, &guest, 0));
    let (meanwhile, after) = (meanwhile?, after?);
    for (what, seen) in [("meanwhile", meanwhile), ("after", after)] {
        println!(
            "    {what}: halted {:.2} %, run {:.2} %, of that unread {:.2} %",
            seen.halted_pct, seen.run_pct, seen.halted_unread_pct
        );
    }
    ensure!(
        meanwhile.halted_unread_pct > 0.0,
        "its event was never gone, so nothing was proved"
    );
    ensure!(after.halted_unread_pct == 0.0, "it is not read again");
    assert_true("after", after.halted_pct, 50.0)
}

/// What a context switch costs the observer, where two vCPUs share a CPU: of those that halt on it, and of others.
fn accounted_for() -> Result<()> {
    const MOST_MORE_NS: f64 = 2_000.0;
    let _counted = Setting::set(COUNTING, "1")?;
    let mut each_ns = Vec::new();
    for passed_through in [false, true] {
        let duties = [duty(50, 10_000); 2];
        let name = if passed_through {
            "passed-through"
        } else {
            "exits"
        };
        let _guest = start(name, passed_through, &duties, &tickless()?[..1])?;
        let (costs, seconds) = costs_within(std::process::id(), A_SECOND)?;
        println!("    HLT {name}:");
        print(&costs, seconds);
        let switches = costs.iter().find(|cost| cost.name == "switches");
        let switches = switches.context("context switches are not seen")?;
        each_ns.push(switches.each_ns());
    }
    println!("    a context switch: {each_ns:.0?} ns, of lab time, at the mean of all on the host");
    ensure!(
        each_ns[1] - each_ns[0] < MOST_MORE_NS,
        "it takes {} ns more",
        each_ns[1] - each_ns[0]
    );
    Ok(())
}
