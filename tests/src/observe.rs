// SPDX-License-Identifier: GPL-2.0-only
//! What `cohort watch` says is true: held against what the kernel, KVM and the guests count for themselves, none of which
//! the observer reads.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cohort::process::exit::Exit;
use cohort::process::wait::wait_for;
use cohort_lab::inside::booted::{BootedGuest, GuestSpec, Workload, start_all};
use cohort_lab::inside::cgroup::CpuMax;
use cohort_lab::inside::hooks::{COUNTING, Programs, costs_within, print};
use cohort_lab::inside::windows::Subject;
use cohort_micro::Spec;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::Test;
use crate::host::{
    Guest, HostLoad, PATIENCE, Setting, begin_window, busy, end_window, lab, locked, pin_vcpus,
    refused, refused_without_root, schedstat_ns, sleepy, start_cohort, stop_cohort,
    unload_observer, vcpus_of, watch, watch_anew, watch_while,
};

pub const TESTS: &[Test] = &[
    (
        "a_guest_that_works_and_sleeps_is_seen_to_do_as_its_own_clock_says",
        works_and_sleeps,
    ),
    (
        "ready_and_limited_time_are_the_kernels_run_delay_and_run_time_is_that_of_cpu_stat",
        || run_delay(false),
    ),
    (
        "spin_exits_and_preemptions_are_those_that_tracepoints_count",
        tracepoints,
    ),
    (
        "the_time_from_an_ipi_until_its_receiver_runs_is_what_the_guest_waits_for",
        ipi_to_run,
    ),
    ("what_it_costs_is_accounted_for", accounted_for),
    ("vms_that_go_or_come_meanwhile_are_seen", vms_change),
    // From here on Cohort stays.
    (
        "ready_and_limited_time_are_the_kernels_under_cohort_too",
        || run_delay(true),
    ),
    (
        "guests_take_for_stolen_what_their_vcpus_wait_for_cpus",
        stolen,
    ),
    (
        "each_vm_is_entitled_to_what_weights_and_a_cap_leave",
        entitlements,
    ),
];

pub const WRONG_INPUT: &[Test] = &[("whatever_is_wrong_is_said_in_a_sentence", refusals)];

const WINDOW_S: u32 = 2;
/// The part by which a truth may be missed; most of it is that two clocks are not read in the same moment.
const TOLERANCE: f64 = 0.02;
const TRACING: &str = "/sys/kernel/tracing/events";
/// Exit code of SVM when PAUSE is intercepted (AMD64 Architecture Programmer's Manual 2, appendix C).
const SVM_EXIT_PAUSE: u32 = 0x77;

fn assert_close(what: &str, seen: f64, truth: f64, tolerance: f64) -> Result<()> {
    println!(
        "    {what}: seen {seen:.4}, in truth {truth:.4} ({:+.2} %)",
        100.0 * (seen / truth - 1.0)
    );
    ensure!(
        (seen / truth - 1.0).abs() <= tolerance,
        "{what}: {seen:.4} is seen, {truth:.4} is true"
    );
    Ok(())
}

/// The guest stamps the TSC before and after its work. What KVM does between them (exits, polling for work after a halt) is
/// CPU time that the guest does not see: little, if it seldom wakes up.
fn works_and_sleeps() -> Result<()> {
    let program = "loop: stamp 0; compute 30ms; stamp 1; sleep 30ms";
    let cpu = lab()?.guest_cpus[0];
    let guest = Guest::start_on(&Spec::new("script").vcpu(program), &[cpu])?;
    let look = || guest.micro.state.vcpu(0);
    let (first, mut works, mut nr_works, mut seen_stamp) = (look(), 0, 0, 0);
    let view = watch_while(2 * WINDOW_S, || {
        let [begin, end, ..] = look().stamps;
        if end > begin && end != seen_stamp {
            seen_stamp = end;
            works += end - begin;
            nr_works += 1;
        }
    })?;
    let last = look();
    let loops = last.progress - first.progress;
    let elapsed = (last.stamps[0] - first.stamps[0]) as f64;
    let worked = works as f64 / nr_works as f64 * loops as f64 / elapsed;
    let all = vcpus_of(&view, &guest)?;
    println!(
        "    {loops} loops, {nr_works} of them measured; run {:.2} %, halted {:.2} %, polling {:.2} %, ready {:.2} %",
        all.run_pct, all.halted_pct, all.poll_pct, all.ready_pct
    );
    assert_close(
        "work",
        (all.run_pct - all.poll_pct) / 100.0,
        worked,
        TOLERANCE,
    )?;
    assert_close(
        "sleep",
        (all.halted_pct + all.ready_pct + all.poll_pct) / 100.0,
        1.0 - worked,
        TOLERANCE,
    )
}

/// What the kernel counts of a VM, in seconds.
#[derive(Clone, Copy, Default)]
struct Truth {
    /// CPU time of its vCPUs, and what they waited for CPUs: /proc/PID/task/TID/schedstat.
    run: f64,
    delay: f64,
    /// CPU time of all that is in its cgroup: cpu.stat.
    used: f64,
}

impl Truth {
    fn of(guest: &Guest) -> Result<Self> {
        let mut truth = Self {
            used: guest.cgroup().usage_us()? as f64 / 1e6,
            ..Self::default()
        };
        for vcpu in guest.micro.state.vcpus() {
            let (run_ns, delay_ns) = schedstat_ns(vcpu.tid as u32)?;
            truth.run += run_ns as f64 / 1e9;
            truth.delay += delay_ns as f64 / 1e9;
        }
        Ok(truth)
    }
}

/// KVM tells a guest by shared memory how long its vCPUs waited; the guest's kernel adds that up in /proc/stat.
fn stolen() -> Result<()> {
    let spec = |name: &str| GuestSpec {
        paravirtual: true,
        ..GuestSpec::new(name, 2, Workload::new("stolen"))
    };
    let specs = vec![spec("first"), spec("second")];
    let guests = start_all(&lab()?, specs, Duration::from_secs(120))?;
    let cohort = start_cohort()?;
    let waited_s = |guest: &BootedGuest| -> Result<f64> {
        let tids = guest.vcpu_tids();
        let waits = tids.iter().map(|&tid| Ok(schedstat_ns(tid)?.1 as f64));
        Ok(waits.sum::<Result<f64>>()? / 1e9)
    };
    let stolen_s = |guest: &BootedGuest| Ok((guest.progress()? >> 32) as f64 / 100.0);
    let read = |of: &dyn Fn(&BootedGuest) -> Result<f64>| -> Result<Vec<f64>> {
        guests.iter().map(of).collect()
    };
    sleep(Duration::from_secs(1));
    let (waited, seen) = (read(&waited_s)?, read(&stolen_s)?);
    sleep(Duration::from_secs(2));
    let (waited_then, seen_then) = (read(&waited_s)?, read(&stolen_s)?);
    stop_cohort(cohort)?;
    for (at, guest) in guests.iter().enumerate() {
        let (waited, seen) = (waited_then[at] - waited[at], seen_then[at] - seen[at]);
        // Two VMs share two CPUs.
        ensure!(
            waited > 1.5,
            "{} waited for {waited:.2} s only",
            guest.name()
        );
        // The guest adds up at its ticks, which wait as well.
        assert_close(&format!("{}: stolen, s", guest.name()), seen, waited, 0.04)?;
    }
    Ok(())
}

fn run_delay(under_cohort: bool) -> Result<()> {
    let guests = [Guest::busy("capped", 2)?, Guest::busy("free", 2)?];
    // A short period: the kernel counts a wait when it ends, so one that lasts beyond the window is missing.
    guests[0].cgroup().set_max(CpuMax::Quota {
        quota_us: 8_000,
        period_us: 20_000,
    })?;
    let cohort = under_cohort.then(start_cohort).transpose()?;
    let truths = || guests.iter().map(Truth::of).collect::<Result<Vec<_>>>();
    begin_window()?;
    let (before, begin) = (truths()?, Instant::now());
    sleep(Duration::from_secs(WINDOW_S.into()));
    let view = end_window()?;
    let (after, elapsed) = (truths()?, begin.elapsed().as_secs_f64());
    if let Some(cohort) = cohort {
        stop_cohort(cohort)?;
    }
    for ((guest, before), after) in guests.iter().zip(before).zip(after) {
        let all = vcpus_of(&view, guest)?;
        let name = guest.micro.state.name();
        // The two windows are not of the same length, but what happens in them is.
        let pct = |gained: f64| 100.0 * gained / elapsed / f64::from(all.vcpus);
        assert_close(
            &format!("{name}: run time by schedstat, %"),
            all.run_pct,
            pct(after.run - before.run),
            TOLERANCE,
        )?;
        assert_close(
            &format!("{name}: run time by cpu.stat, %"),
            all.run_pct,
            pct(after.used - before.used),
            // What a capped guest may use in a period, it uses at once: that may lie between the ends of the two windows.
            if name == "capped" { TOLERANCE } else { 0.01 },
        )?;
        println!("    {name}: limited {:.2} %", all.limited_pct);
        ensure!(
            (all.limited_pct > 10.0) == (name == "capped"),
            "{name} is limited {:.2} %",
            all.limited_pct
        );
        assert_close(
            &format!("{name}: run_delay, %"),
            all.ready_pct + all.limited_pct,
            pct(after.delay - before.delay),
            TOLERANCE,
        )?;
    }
    Ok(())
}

/// A count per combination of keys, kept by the kernel (histogram triggers).
pub struct Trigger {
    event: PathBuf,
    what: String,
}

impl Trigger {
    /// Counts `event`, a folder of tracefs, as `what` says.
    pub fn set(event: &str, what: &str) -> Result<Self> {
        let event = Path::new(TRACING).join(event);
        let file = event.join("trigger");
        fs::write(&file, what).with_context(|| format!("{} <- {what}", file.display()))?;
        Ok(Self {
            event,
            what: what.to_owned(),
        })
    }

    /// By the values of the keys, in their order.
    pub fn counts(&self) -> Result<BTreeMap<Vec<i64>, u64>> {
        let text = fs::read_to_string(self.event.join("hist"))?;
        let mut counts = BTreeMap::new();
        // { prev_pid:        7, next_pid:        9 } hitcount:          3
        for line in text.lines() {
            let Some((keys, count)) = line.split_once("} hitcount:") else {
                continue;
            };
            let values = keys.trim_start_matches("{").split(',');
            let values = values.filter_map(|key| key.split(':').nth(1)?.trim().parse().ok());
            counts.insert(values.collect(), count.trim().parse()?);
        }
        Ok(counts)
    }
}

impl Drop for Trigger {
    fn drop(&mut self) {
        // The lab ends anyway.
        let _ = fs::write(self.event.join("trigger"), format!("!{}", self.what));
    }
}

/// In the first window the vCPUs become known. They are stopped before the second begins, and before it ends: so all that
/// is traced lies within. Where the kernel preempts a thread inside a program at a spin exit, it skips that program for all
/// others on this CPU until the thread goes on, and counts how often.
fn tracepoints() -> Result<()> {
    let cpus = lab()?.guest_cpus;
    let guests = [
        Guest::start(&locked("locked", 2))?,
        Guest::start(&busy("busy", 2))?,
    ];
    let load = HostLoad::start("load", &[0], &cpus)?;
    let mut processes: Vec<i32> = guests.iter().map(|guest| guest.micro.pid()).collect();
    processes.extend(load.pids().iter().map(|&pid| pid as i32));
    let signal = |signal: Signal| -> Result<()> {
        for &pid in &processes {
            kill(Pid::from_raw(pid), signal)?;
        }
        sleep(Duration::from_millis(500));
        Ok(())
    };
    begin_window()?;
    sleep(Duration::from_secs(1));
    signal(Signal::SIGSTOP)?;
    begin_window()?;
    // Runnable when it left: 0, or 256 if it was preempted.
    let preempted = "hist:keys=prev_pid,next_pid:size=4096 if prev_state==0||prev_state==256";
    let switches = Trigger::set("sched/sched_switch", preempted)?;
    let spins = format!("hist:keys=common_pid if exit_reason=={SVM_EXIT_PAUSE}");
    let spins = Trigger::set("kvm/kvm_exit", &spins)?;
    let programs = Programs::of(std::process::id())?;
    signal(Signal::SIGCONT)?;
    sleep(Duration::from_secs(1));
    signal(Signal::SIGSTOP)?;
    let (switches, spins) = (switches.counts()?, spins.counts()?);
    let (costs, _) = programs.until(&Programs::of(std::process::id())?);
    let counts_spins = costs.iter().find(|cost| cost.name == "spin_exit_begin");
    let skipped = counts_spins.context("spin exits are not counted")?.missed;
    let view = end_window()?;
    let vcpu_of = |pid: i64| {
        guests.iter().find_map(|guest| {
            let mut vcpus = guest.micro.state.vcpus();
            vcpus
                .any(|vcpu| i64::from(vcpu.tid) == pid)
                .then(|| guest.micro.state.name())
        })
    };
    let mut unseen = 0;
    for guest in &guests {
        let name = guest.micro.state.name();
        let spun: u64 = spins
            .iter()
            .filter(|(keys, _)| vcpu_of(keys[0]).as_ref() == Some(&name))
            .map(|(_, count)| count)
            .sum();
        let mut takers: BTreeMap<String, u64> = BTreeMap::new();
        for (keys, count) in &switches {
            if vcpu_of(keys[0]).as_ref() == Some(&name) {
                *takers
                    .entry(taker_name(keys[1], vcpu_of(keys[1]))?)
                    .or_default() += count;
            }
        }
        let vm = &view.vms[&(guest.micro.pid() as u32)];
        let seen: BTreeMap<String, u64> = vm
            .takers
            .iter()
            .map(|taker| (taker.name.clone(), taker.times))
            .collect();
        println!(
            "    {name}: spin exits {} seen, {spun} traced; takers seen {seen:?}, traced {takers:?}",
            vm.all.spin_exits
        );
        unseen += spun as i64 - vm.all.spin_exits as i64;
        ensure!(seen == takers, "takers are seen that were not, or not seen");
        let preemptions = vm.all.preempted_kernel + vm.all.preempted_user;
        ensure!(
            preemptions == takers.values().sum::<u64>(),
            "{preemptions} preemptions do not add up"
        );
    }
    let traced: u64 = spins.values().sum();
    ensure!(
        unseen == skipped as i64 && skipped * 1000 <= traced,
        "of {traced} spin exits {unseen} are not seen, and {skipped} were skipped"
    );
    Ok(())
}

/// What the observer calls task `pid`, which is a vCPU of VM `vm` or none.
fn taker_name(pid: i64, vm: Option<String>) -> Result<String> {
    const PF_KTHREAD: u64 = 0x0020_0000;
    if let Some(vm) = vm {
        return Ok(vm);
    }
    // The idle task has no folder.
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else {
        return Ok(String::from("kernel threads"));
    };
    // After the name, which may hold blanks: state ppid pgrp session tty tpgid flags
    let flags = stat
        .rsplit(')')
        .next()
        .and_then(|rest| rest.split_whitespace().nth(6));
    let flags: u64 = flags.context("stat has flags")?.parse()?;
    if flags & PF_KTHREAD != 0 {
        return Ok(String::from("kernel threads"));
    }
    let cgroup = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
    let path = cgroup.lines().find_map(|line| line.strip_prefix("0::"));
    Ok(path.context("it has a cgroup")?.to_owned())
}

/// The guest stamps the TSC when it sends an IPI, and when the receiver's handler begins. What an IPI takes without anybody
/// else on the receiver's CPU is not waiting; that it takes longer to enter a guest which has waited is the part by which the
/// truth is missed, so turns are long. All IPIs are sent, and answered, within the window. The pause before the next one ends
/// while the receiver waits for its next turn, as a rule.
fn ipi_to_run() -> Result<()> {
    let _long_turns = Setting::set("/sys/kernel/debug/sched/base_slice_ns", "8000000")?;
    let spec = Spec::new("ipi")
        .vcpu("loop: spin go; stamp 0; compute 25ms; ipi 1 0x41; wait-answer")
        .vcpu("user; loop: compute 100us");
    let cpus = lab()?.guest_cpus;
    let guest = Guest::start(&spec)?;
    let state = &guest.micro.state;
    pin_vcpus(&guest, &cpus)?;
    // Lets it send for so many seconds: time from sending to the handler, TSC ticks in sum; IPIs; ticks per ms.
    let send = |seconds: u64| -> Result<(f64, f64, f64)> {
        let before = state.vcpu(0);
        state.set_flag("go", 1)?;
        sleep(Duration::from_millis(200));
        let (begin, first_stamp) = (Instant::now(), state.vcpu(0).last_stamp);
        sleep(Duration::from_secs(seconds));
        let ticks_per_ms = (state.vcpu(0).last_stamp - first_stamp) as f64
            / begin.elapsed().as_secs_f64()
            / 1000.0;
        state.set_flag("go", 0)?;
        sleep(Duration::from_millis(200));
        let after = state.vcpu(0);
        Ok((
            (after.delivery.sum - before.delivery.sum) as f64,
            (after.delivery.count - before.delivery.count) as f64,
            ticks_per_ms,
        ))
    };
    let (ticks, count, _) = send(1)?;
    let alone = ticks / count;

    let beside = Guest::start_on(&busy("beside", 1), &cpus[1..])?;
    beside.cgroup().set_weight(400)?;
    begin_window()?;
    let (ticks, count, ticks_per_ms) = send(3)?;
    let view = end_window()?;
    let all = vcpus_of(&view, &guest)?;
    let waited: u64 = all.ipi_to_run.iter().sum();
    println!(
        "    IPIs {}, to a waiting vCPU {waited}, longest {} us; {:.1} us without waiting",
        all.ipis,
        all.longest_ipi_us,
        alone / ticks_per_ms * 1000.0,
    );
    ensure!(waited >= 40, "only {waited} IPIs met a waiting vCPU");
    assert_close(
        "from IPI to run, ms in sum",
        all.ipi_to_run_us as f64 / 1000.0,
        (ticks - count * alone) / ticks_per_ms,
        TOLERANCE,
    )
}

/// Weights of 1 to 3; a cap on a third VM whose rest the others divide; a process of the host is no VM but competes.
fn entitlements() -> Result<()> {
    let guests = [
        Guest::busy("light", 2)?,
        Guest::busy("heavy", 2)?,
        Guest::busy("capped", 2)?,
    ];
    guests[1].cgroup().set_weight(300)?;
    // A short period: it has its CPU time at the begin of each, and a window may have one more begin than periods.
    guests[2].cgroup().set_max(CpuMax::Quota {
        quota_us: 4_000,
        period_us: 20_000,
    })?;
    let cohort = start_cohort()?;
    let view = watch(WINDOW_S)?;
    stop_cohort(cohort)?;
    // Of two CPUs 0.2 are the capped VM's; 1.8 are divided by 1 to 3. In percent of a CPU per vCPU.
    for (guest, expected) in guests.iter().zip([22.5, 67.5, 10.0]) {
        let all = vcpus_of(&view, guest)?;
        let name = guest.micro.state.name();
        assert_close(
            &format!("{name} is entitled to, %"),
            all.entitled_pct,
            expected,
            0.03,
        )?;
        assert_close(
            &format!("{name} got, %"),
            all.run_pct,
            all.entitled_pct,
            0.05,
        )?;
    }
    Ok(())
}

/// While VMs do what makes the observer work hardest: how often each of its programs runs, of how many instructions it is
/// (it has hardly a loop, so no run executes more, but for the kernel's functions that it calls), and how long the kernel
/// says that it takes: on the exact machine 1 ns per instruction.
fn accounted_for() -> Result<()> {
    const MOST_PCT: f64 = 5.0;
    let _counted = Setting::set(COUNTING, "1")?;
    let _guests = [
        Guest::start(&locked("locked", 2))?,
        Guest::start(&sleepy("sleepy"))?,
        Guest::busy("busy", 2)?,
    ];
    begin_window()?;
    let (costs, seconds) = costs_within(std::process::id(), Duration::from_secs(1))?;
    print(&costs, seconds);
    let spent_ns: u64 = costs.iter().map(|cost| cost.took_ns).sum();
    let cpus = lab()?.guest_cpus.len() as f64;
    let pct = 100.0 * spent_ns as f64 / 1e9 / seconds / cpus;
    println!("    all: {pct:.2} % of the guests' CPUs, of lab time");
    ensure!(spent_ns > 0 && pct < MOST_PCT, "it takes {pct:.2} %");
    Ok(())
}

fn cohort(arguments: &[&str]) -> Command {
    let mut command = Command::new("cohort");
    command.args(arguments);
    command
}

fn refusals() -> Result<()> {
    refused(
        &mut cohort(&["watch", "--interval-s", "0"]),
        Exit::Usage,
        "interval",
    )?;
    refused_without_root("watch")?;
    refused(&mut cohort(&["top"]), Exit::Failure, "--batch")?;
    refused(
        &mut cohort(&["top", "--replay", "/proc/version"]),
        Exit::BadRecording,
        "no recording",
    )?;

    // A disk without room.
    let folder = tempfile::tempdir()?;
    let mount = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=4k", "full"])
        .arg(folder.path())
        .status()?;
    ensure!(mount.success(), "a small file system cannot be mounted");
    let file = folder.path().join("recording");
    let record = ["watch", "--count", "60", "--json", "--record"];
    let _guest = Guest::busy("seen", 2)?;
    refused(
        cohort(&record).arg(&file),
        Exit::Failure,
        "cannot be written",
    )?;
    Command::new("umount").arg(folder.path()).status()?;

    // Whoever reads its output goes away; and a second one beside it disturbs nobody.
    let mut first = cohort(&["watch", "--json"])
        .stdout(Stdio::piped())
        .spawn()?;
    ensure!(
        watch_anew(1)?.vms.len() == 1,
        "two observers disturb each other"
    );
    let mut output = first.stdout.take().context("its output is piped")?;
    output.read_exact(&mut [0; 10])?;
    drop(output);
    let status = wait_for("the observer's end", PATIENCE, || Ok(first.try_wait()?))?;
    ensure!(
        status.code() == Some(Exit::OutputClosed.code().into()),
        "without a reader it ended with {status}"
    );

    drop(_guest);
    unload_observer();
    let modprobe = |arguments: &[&str]| -> Result<()> {
        let status = Command::new("modprobe").args(arguments).status()?;
        ensure!(status.success(), "modprobe {arguments:?}: {status}");
        Ok(())
    };
    modprobe(&["-r", "kvm_amd", "kvm"])?;
    let result = refused(&mut cohort(&["watch"]), Exit::Failure, "KVM is not loaded");
    modprobe(&["kvm_amd"])?;
    result
}

fn vms_change() -> Result<()> {
    let stays = Guest::busy("stays", 1)?;
    let goes = Guest::busy("goes", 1)?;
    begin_window()?;
    drop(goes);
    let comes = Guest::busy("comes", 1)?;
    sleep(Duration::from_secs(1));
    let view = end_window()?;
    let names: Vec<&str> = view.vms.values().map(|vm| vm.name.as_str()).collect();
    ensure!(
        view.vms.len() == 2
            && view.vms.contains_key(&(stays.micro.pid() as u32))
            && view.vms.contains_key(&(comes.micro.pid() as u32)),
        "{names:?} are seen"
    );
    Ok(())
}
