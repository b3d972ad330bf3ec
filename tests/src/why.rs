// SPDX-License-Identifier: GPL-2.0-only
//! Each question that operators come with: its cause is staged here, and `cohort why` or `cohort ready` must find it, or say
//! that it is ruled out.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::thread::{sleep, spawn};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use cohort::commands::compare::notify::Notifications;
use cohort::host::threads::{self, Role};
use cohort::process::exit::Exit;
use cohort::process::wait::wait_for;
use cohort_lab::inside::booted::{BootedGuest, GuestSpec, Workload, start_all};
use cohort_lab::inside::cgroup::{Cgroup, CpuMax};
use cohort_lab::inside::info::cpu_list;
use cohort_lab::inside::process::start;
use cohort_micro::Spec;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::Deserialize;

use crate::Test;
use crate::host::{
    Guest, HostLoad, PATIENCE, Service, Setting, back_to_stock, busy, lab, locked, pin, pin_vcpus,
    refused, sleepy, start_cohort_patiently, start_until_ready, stop_cohort,
};

pub const TESTS: &[Test] = &[
    (
        "a_vm_whose_cpus_are_taken_is_told_by_whom_and_one_alone_that_it_is_not_the_scheduler",
        taken,
    ),
    (
        "a_main_loop_that_waits_for_a_cpu_is_found_though_its_vcpu_runs",
        main_loop_waits,
    ),
    (
        "the_cgroup_that_throttles_is_named_at_whatever_level_and_a_cap_that_is_not_used_up_is_not",
        throttled,
    ),
    ("the_same_cap_is_named_under_cohort", throttled_by_cohort),
    (
        "a_vcpu_kept_from_its_cpu_by_a_real_time_task_is_told_by_whom",
        kept_from_its_cpu,
    ),
    (
        "a_vmm_that_was_stopped_or_frozen_or_waits_in_the_kernel_is_not_the_schedulers_fault",
        not_the_scheduler,
    ),
    (
        "a_vcpu_whose_vmm_waits_for_a_slow_disk_is_told_so",
        slow_disk,
    ),
    (
        "a_vcpu_that_touches_memory_which_its_cgroup_is_short_of_is_told_so",
        short_memory,
    ),
    ("a_vm_that_its_vmm_paused_is_told_so", paused),
    ("a_vm_that_migrates_is_told_so_here_and_there", migrated),
    (
        "who_loses_by_a_weight_that_is_the_same_for_all_is_named_with_what_to_set",
        ratio,
    ),
    (
        "a_main_loop_on_the_cpu_of_a_pinned_vcpu_is_found_and_so_are_vcpus_on_one_isolated_cpu",
        pinned,
    ),
    (
        "a_vcpu_that_the_kernels_log_names_for_split_locks_is_counted",
        split_locks,
    ),
    ("ready_time_is_one_line_in_vmwares_units", ready_line),
    ("a_recording_answers_for_a_time_span", recorded),
    (
        "of_two_recordings_that_of_the_host_whose_vcpus_wait_for_each_other_gains",
        gains,
    ),
];

/// What was found of one question.
#[derive(Debug, Deserialize)]
struct Found {
    check: String,
    severity: String,
    seen: String,
    why: String,
    mend: String,
}

#[derive(Debug, Deserialize)]
struct Answer {
    findings: Vec<Found>,
}

impl Found {
    /// Demands what was found.
    fn is(&self, severity: &str, words: &[&str]) -> Result<()> {
        ensure!(
            self.severity == severity && words.iter().all(|word| self.seen.contains(word)),
            "{severity} with {words:?} was to be found, and not {self:?}"
        );
        Ok(())
    }
}

/// `cohort why` while it looks at this host.
struct Look {
    process: Service,
    _notifications: Notifications,
}

impl Look {
    /// Returns when it has begun to look.
    fn begin(arguments: &[&str]) -> Result<Self> {
        let mut command = why_command(arguments);
        command.stdout(Stdio::piped());
        let (process, notifications) = start_until_ready(command, &[], "cohort why")?;
        Ok(Self {
            process,
            _notifications: notifications,
        })
    }

    /// What it has found.
    fn end(mut self) -> Result<BTreeMap<String, Found>> {
        let mut said = String::new();
        let output = self.process.0.stdout.as_mut();
        output
            .context("its output is piped")?
            .read_to_string(&mut said)?;
        found(&said, self.process.0.wait()?)
    }
}

fn why_command(arguments: &[&str]) -> Command {
    let mut command = Command::new("cohort");
    command.arg("why").args(arguments).arg("--json");
    command
}

/// What `cohort why` finds with these arguments, by question.
fn why(arguments: &[&str]) -> Result<BTreeMap<String, Found>> {
    let output = why_command(arguments).output()?;
    let failed = String::from_utf8_lossy(&output.stderr).into_owned();
    let found = found(&String::from_utf8_lossy(&output.stdout), output.status);
    found.with_context(|| format!("cohort why {arguments:?} says {failed}"))
}

/// Whether something was found is its exit code too.
fn found(said: &str, status: ExitStatus) -> Result<BTreeMap<String, Found>> {
    let answer: Answer = serde_json::from_str(said)
        .with_context(|| format!("cohort why ended with {status} and printed {said:?}"))?;
    show(&answer.findings);
    let any = answer.findings.iter().any(|it| it.severity == "warning");
    let code = if any { Exit::Advice } else { Exit::Success };
    ensure!(
        status.code() == Some(code.code().into()),
        "it ended with {status}"
    );
    let by_check = |found: Found| (found.check.clone(), found);
    Ok(answer.findings.into_iter().map(by_check).collect())
}

/// Prints them as people see them, for docs/why.md.
fn show(findings: &[Found]) {
    for found in findings {
        let severity = match found.severity.as_str() {
            "warning" => "WARNING",
            other => other,
        };
        println!("    {severity:<8} {:<15} {}", found.check, found.seen);
        for (word, words) in [("why:", &found.why), ("do:", &found.mend)] {
            if !words.is_empty() {
                println!("{:28} {word:<4} {words}", "");
            }
        }
    }
}

/// Looks at `vm` until what is found satisfies `check`; five times at most, as the CPUs of this host stand still now and
/// then, which are true waits.
fn soon(vm: &str, check: impl Fn(&BTreeMap<String, Found>) -> Result<()>) -> Result<()> {
    let mut result = Ok(());
    for _ in 0..5 {
        result = check(&why(&[vm, "--for", "1s"])?);
        if result.is_ok() {
            break;
        }
    }
    result
}

fn vcpu(guest: &Guest, number: usize) -> Result<i32> {
    let mut vcpus = guest.micro.state.vcpus();
    Ok(vcpus.nth(number).context("it has that vCPU")?.tid)
}

fn taken() -> Result<()> {
    let cpu = lab()?.guest_cpus[0];
    let program = "loop: compute 1ms; sleep 9ms";
    let alone = Guest::start_on(&Spec::new("alone").vcpu(program), &[cpu])?;
    soon("alone", |found| {
        found["ready-time"].is("fine", &["not the scheduler"])?;
        found["throttled"].is("fine", &["not throttled", "has a cap"])?;
        found["ratio"].is("fine", &["not the ratio"])?;
        found["stalls"].is("fine", &["no vCPU was without a CPU"])?;
        found["clock"].is("fine", &["ruled out", "trusts its TSC"])?;
        found["vmm-threads"].is("fine", &["they do not wait"])
    })?;
    drop(alone);

    let _victim = Guest::start_on(&busy("victim", 1), &[cpu])?;
    let _hog = HostLoad::start("hog", &[0], &[cpu])?;
    let found = why(&["victim", "--for", "3s"])?;
    found["ready-time"].is("warning", &["vCPU 0", "cgroup /lab/hog"])
}

/// QEMU, whose main loop shares a CPU with others while its vCPU has one to itself. Somebody asks its monitor all the time.
fn main_loop_waits() -> Result<()> {
    let lab = lab()?;
    let (own, shared) = (lab.guest_cpus[0], lab.guest_cpus[1]);
    let guest = BootedGuest::start(&lab, GuestSpec::new("console", 1, Workload::new("busy")))?;
    // Its main loop must have set everything up.
    wait_for("QEMU's vCPU at work", PATIENCE, || {
        Ok((vcpu_ran_ns(&guest) > 500_000_000).then_some(()))
    })?;
    for thread in threads::of_vm(Path::new("/proc"), guest.pid()) {
        let cpu = if thread.role == Role::Vcpu {
            own
        } else {
            shared
        };
        // One that only sets something up may have ended.
        let _ = pin(thread.tid as i32, &[cpu]);
    }
    let mut monitor = guest.monitor()?;
    let mut answers = monitor.try_clone()?;
    spawn(move || io::copy(&mut answers, &mut io::sink()));
    spawn(move || {
        while monitor.write_all(b"info status\n").is_ok() {
            sleep(Duration::from_millis(5));
        }
    });
    let _hogs = HostLoad::start("hogs", &[-10, -10, -10], &[shared])?;
    let found = why(&["console", "--for", "5s"])?;
    found["vmm-threads"].is("warning", &["its main loop", "waited"])?;
    pin(guest.pid() as i32, &[own])?;
    let found = why(&["console", "--for", "2s"])?;
    found["pinning"].is("warning", &["there runs qemu-system-x86"])
}

/// A quota far above the vCPU, as of a pod; another that is never used up; and one of a thread only.
fn throttled() -> Result<()> {
    let pod = Cgroup::create("pod")?;
    let roomy = Cgroup::create("pod/container")?;
    let guest = Guest::busy("guaranteed", 1)?;
    roomy.add(guest.micro.pid() as u32)?;
    roomy.set_max(CpuMax::Quota {
        quota_us: 400_000,
        period_us: 100_000,
    })?;
    let found = why(&["guaranteed", "--for", "2s"])?;
    found["throttled"].is("fine", &["not throttled", "/lab/pod/container used most"])?;
    pod.set_max(CpuMax::Quota {
        quota_us: 20_000,
        period_us: 100_000,
    })?;
    let found = why(&["guaranteed", "--for", "3s"])?;
    let words = [
        "by cgroup /lab/pod (cpu.max \"20000 100000\"",
        "periods",
        "of its vCPUs",
    ];
    found["throttled"].is("warning", &["throttled", words[0], words[1]])?;
    ensure!(
        !found["throttled"].seen.contains("/lab/pod/container"),
        "the one that is not used up is blamed too: {:?}",
        found["throttled"]
    );
    ensure!(
        found["throttled"]
            .mend
            .contains("/sys/fs/cgroup/lab/pod/cpu.max"),
        "{:?}",
        found["throttled"]
    );
    drop(guest);
    drop(roomy);
    drop(pod);
    Ok(())
}

fn throttled_by_cohort() -> Result<()> {
    let guest = Guest::busy("capped", 1)?;
    guest.cgroup().set_max(CpuMax::Quota {
        quota_us: 20_000,
        period_us: 100_000,
    })?;
    let cohort = start_cohort_patiently()?;
    let found = why(&["capped", "--for", "3s"]);
    stop_cohort(cohort)?;
    back_to_stock()?;
    found?["throttled"].is("warning", &["by cgroup /lab/capped", "of what that allows"])
}

/// Linux lets ordinary tasks have a twentieth of each CPU beside real-time ones, unless that is turned off.
fn kept_from_its_cpu() -> Result<()> {
    let cpu = lab()?.guest_cpus[0];
    let _guest = Guest::start_on(&busy("starved", 1), &[cpu])?;
    let server = format!("/sys/kernel/debug/sched/fair_server/cpu{cpu}/runtime");
    let _server = Setting::set(&server, "0")?;
    let look = Look::begin(&["starved", "--for", "4s"])?;
    let mut hog = Command::new("chrt");
    let program = "while :; do :; done";
    hog.args(["-f", "50", "sh", "-c", program]);
    let hog = Service(start(hog, &[cpu], None)?);
    sleep(Duration::from_secs(2));
    drop(hog);
    let found = look.end()?;
    // As it had another name for a moment before it began to compute, only its cgroup is sure.
    let words = ["vCPU 0", "without a CPU for", "for one, / (thread"];
    found["stalls"].is("warning", &words)?;
    found["clock"].is("warning", &["without a CPU is"])
}

fn not_the_scheduler() -> Result<()> {
    let guest = Guest::start(&sleepy("still"))?;
    let pid = Pid::from_raw(guest.micro.pid());
    let look = Look::begin(&["still", "--for", "5s"])?;
    // It is found although it goes on.
    kill(pid, Signal::SIGSTOP)?;
    let found = look.end();
    kill(pid, Signal::SIGCONT)?;
    let found = found?;
    let words = [
        "has been without a CPU for",
        "signal",
        "not the scheduler",
        "pressure then",
    ];
    found["stalls"].is("warning", &words)?;
    let look = Look::begin(&["still", "--for", "3s"])?;
    guest.cgroup().set_frozen(true)?;
    let found = look.end();
    guest.cgroup().set_frozen(false)?;
    found?["stalls"].is("warning", &["its cgroup was frozen", "not the scheduler"])
}

/// A booted guest of one vCPU, once it does what it is to do.
fn booted(name: &str, workload: &str) -> Result<BootedGuest> {
    let spec = GuestSpec::new(name, 1, Workload::new(workload));
    let mut guests = start_all(&lab()?, vec![spec], PATIENCE)?;
    guests.pop().context("it was started")
}

/// A disk in memory.
struct Disk {
    device: String,
    _file: tempfile::NamedTempFile,
}

impl Disk {
    fn new() -> Result<Self> {
        let file = tempfile::NamedTempFile::new_in("/dev/shm")?;
        file.as_file().set_len(1 << 20)?;
        let status = Command::new("modprobe").arg("loop").status()?;
        ensure!(status.success(), "modprobe loop: {status}");
        let output = Command::new("losetup")
            .args(["--find", "--show"])
            .arg(file.path())
            .output()?;
        ensure!(output.status.success(), "losetup: {output:?}");
        Ok(Self {
            device: String::from_utf8(output.stdout)?.trim().to_owned(),
            _file: file,
        })
    }

    /// Its number for the kernel.
    fn number(&self) -> Result<String> {
        let name = self.device.trim_start_matches("/dev/");
        Ok(fs::read_to_string(format!("/sys/block/{name}/dev"))?
            .trim()
            .to_owned())
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // The lab ends anyway.
        let _ = Command::new("losetup")
            .args(["--detach", &self.device])
            .status();
    }
}

/// A guest whose QEMU notes in a file why the guest exits, for people. To write there the first time it has to read a block of
/// a disk, at 1 KiB/s, in the thread of the vCPU that exits.
fn slow_disk() -> Result<()> {
    let disk = Disk::new()?;
    let guest = booted("logging", "busy")?;
    let limit = format!("{} rbps=1024", disk.number()?);
    guest.cgroup().limit("io", "io.max", &limit)?;
    let look = Look::begin(&["logging", "--for", "8s"])?;
    guest.ask(&format!("logfile {}", disk.device))?;
    guest.ask("trace-event kvm_run_exit on")?;
    // The guest's kernel prints that it knows of no reason.
    guest.ask("nmi")?;
    let found = look.end()?;
    let words = [
        "QEMU waited",
        "for I/O in this vCPU's own thread, in the system call write",
        "not the scheduler",
    ];
    found["stalls"].is("warning", &words)
}

/// A guest that boots, and so touches memory for the first time, in a cgroup that has more than it may already.
fn short_memory() -> Result<()> {
    let guest = BootedGuest::start(&lab()?, GuestSpec::new("short", 1, Workload::new("busy")))?;
    wait_for("QEMU's vCPU at work", PATIENCE, || {
        Ok((vcpu_ran_ns(&guest) > 500_000_000).then_some(()))
    })?;
    let look = Look::begin(&["short", "--for", "8s"])?;
    guest.cgroup().limit("memory", "memory.high", "1M")?;
    let found = look.end()?;
    let words = [
        "memory was short when it touched a page, as cgroup /lab/short has all that its memory.high allows",
        "not the scheduler",
    ];
    found["stalls"].is("warning", &words)
}

/// A guest that QEMU stops, as it does for a snapshot or a migration, while somebody looks; and before somebody does.
fn paused() -> Result<()> {
    let guest = booted("paused", "busy")?;
    let look = Look::begin(&["paused", "--for", "4s"])?;
    guest.ask("stop")?;
    let found = look.end()?;
    found["stalls"].is(
        "warning",
        &[
            "has been without a CPU for",
            "the VM is paused",
            "not the scheduler",
        ],
    )?;
    let found = why(&["paused", "--for", "2s"])?;
    found["stalls"].is("warning", &["the VM is paused", "not the scheduler"])
}

/// A migration in which the guest goes before its memory does. Then its source stands still, and with that the memory.
fn migrated() -> Result<()> {
    let source = booted("leaving", "fork")?;
    let mut spec = GuestSpec::new("arriving", 1, Workload::new("fork"));
    spec.qemu = ["-incoming", "defer"].map(String::from).to_vec();
    let destination = BootedGuest::start(&lab()?, spec)?;
    let folder = tempfile::tempdir()?;
    let address = format!("unix:{}", folder.path().join("migration").display());
    wait_for("QEMU's monitor", PATIENCE, || {
        Ok(destination.monitor().is_ok().then_some(()))
    })?;
    for guest in [&source, &destination] {
        guest.ask("migrate_set_capability postcopy-ram on")?;
    }
    destination.ask(&format!("migrate_incoming {address}"))?;
    // Or all of its memory is there before it goes, or soon after.
    for limit in ["max-bandwidth", "max-postcopy-bandwidth"] {
        source.ask(&format!("migrate_set_parameter {limit} 1M"))?;
    }
    let look = Look::begin(&["arriving", "--for", "10s"])?;
    source.ask(&format!("migrate -d {address}"))?;
    source.ask("migrate_start_postcopy")?;
    wait_for("the guest's arrival", PATIENCE, || {
        Ok((vcpu_ran_ns(&destination) > 100_000_000).then_some(()))
    })?;
    let pid = Pid::from_raw(source.pid() as i32);
    kill(pid, Signal::SIGSTOP)?;
    let found = look.end();
    let ran_ns = vcpu_ran_ns(&destination);
    // Nor has the observer seen it run now.
    let again = why(&["arriving", "--for", "3s"]);
    kill(pid, Signal::SIGCONT)?;
    let words = [
        "a page that has to come from another process",
        "a post-copy migration",
        "not the scheduler",
    ];
    found?["stalls"].is("warning", &words)?;
    again?["stalls"].is("warning", &words)?;
    wait_for("that it goes on with its memory", PATIENCE, || {
        Ok((vcpu_ran_ns(&destination) > ran_ns).then_some(()))
    })?;
    let found = why(&["leaving", "--for", "2s"])?;
    found["stalls"].is("warning", &["the VM is paused", "not the scheduler"])
}

/// The CPU time that the vCPUs of `guest` have had.
fn vcpu_ran_ns(guest: &BootedGuest) -> u64 {
    let threads = threads::of_vm(Path::new("/proc"), guest.pid());
    let vcpus = threads.iter().filter(|it| it.role == Role::Vcpu);
    vcpus.map(|it| it.ran_ns).sum()
}

fn ratio() -> Result<()> {
    let _wide = Guest::busy("wide", 16)?;
    let _narrow = Guest::busy("narrow", 1)?;
    let found = why(&["wide", "--for", "3s"])?;
    found["ratio"].is(
        "warning",
        &[
            "2 VMs had 5.7 vCPUs for each of 3 CPUs",
            "wide has weight 100 for 16 vCPUs, 6.2 each",
            "wide loses by it",
        ],
    )?;
    ensure!(
        found["ratio"]
            .mend
            .contains("echo 1600 > /sys/fs/cgroup/lab/wide/cpu.weight"),
        "{:?}",
        found["ratio"]
    );
    Ok(())
}

/// A cgroup between whose CPUs the kernel balances no load. It stands below the topmost one, where that is simple.
struct Isolated(PathBuf);

impl Isolated {
    fn cpus(cpus: &[u32]) -> Result<Self> {
        let isolated = Self(PathBuf::from("/sys/fs/cgroup/isolated"));
        fs::create_dir(&isolated.0)?;
        fs::write(isolated.0.join("cpuset.cpus"), cpu_list(cpus))?;
        fs::write(isolated.0.join("cpuset.cpus.partition"), "isolated")?;
        let got = fs::read_to_string(isolated.0.join("cpuset.cpus.partition"))?;
        ensure!(
            got.trim() == "isolated",
            "the kernel isolates nothing: {got}"
        );
        Ok(isolated)
    }
}

impl Drop for Isolated {
    fn drop(&mut self) {
        // Its members are gone a moment after they were killed.
        let _ = wait_for("the isolated cgroup's end", PATIENCE, || {
            Ok(fs::remove_dir(&self.0).is_ok().then_some(()))
        });
    }
}

fn pinned() -> Result<()> {
    let cpus = lab()?.guest_cpus;
    let guest = Guest::busy("packets", 2)?;
    pin_vcpus(&guest, &cpus)?;
    let found = why(&["packets", "--for", "1s"])?;
    // Its main thread may run there too, and has nothing to do.
    found["pinning"].is("fine", &["none of its"])?;
    drop(guest);

    // Without load balancing both vCPUs stay where they are put.
    let guest = Guest::busy("unbalanced", 2)?;
    let isolated = Isolated::cpus(&cpus)?;
    fs::write(
        isolated.0.join("cgroup.procs"),
        guest.micro.pid().to_string(),
    )?;
    for number in 0..2 {
        pin(vcpu(&guest, number)?, &cpus[..1])?;
    }
    sleep(Duration::from_millis(200));
    for number in 0..2 {
        let tid = vcpu(&guest, number)?.to_string();
        let status = Command::new("taskset")
            .args(["-cp", &cpu_list(&cpus), &tid])
            .status()?;
        ensure!(status.success(), "taskset: {status}");
    }
    let found = why(&["unbalanced", "--for", "1s"])?;
    drop(guest);
    drop(isolated);
    found["pinning"].is(
        "warning",
        &["CPU 0/KVM, CPU 1/KVM are all on CPU", "isolated"],
    )
}

/// No CPU of the lab catches split locks: what the kernel would write of one is written in its place.
fn split_locks() -> Result<()> {
    let guest = Guest::start(&sleepy("game"))?;
    let other = Guest::start(&sleepy("other"))?;
    for thread in [vcpu(&guest, 0)?, vcpu(&other, 0)?] {
        let name = "x86/split lock detection: #AC: CPU 0/KVM";
        let line = format!("{name}/{thread} took a split_lock trap at address: 0x401000\n");
        fs::write("/dev/kmsg", line)?;
    }
    let found = why(&["game", "--for", "1s"])?;
    found["stutter"].is("warning", &["caught 1 of its threads with split locks"])
}

fn ready_line() -> Result<()> {
    let cpu = lab()?.guest_cpus[0];
    let _guest = Guest::start_on(&busy("waits", 1), &[cpu])?;
    let _hog = HostLoad::start("hog", &[0], &[cpu])?;
    let output = Command::new("cohort")
        .args(["ready", "waits", "--for", "3s"])
        .output()?;
    ensure!(output.status.success(), "it ended with {}", output.status);
    let line = String::from_utf8(output.stdout)?;
    print!("    {line}");
    ensure!(line.lines().count() == 1, "more than a line");
    let values: BTreeMap<&str, &str> = line
        .trim()
        .split(' ')
        .filter_map(|pair| pair.split_once('='))
        .collect();
    let number =
        |key: &str| -> Result<f64> { Ok(values.get(key).context("it is not there")?.parse()?) };
    // Two tasks of the same weight on one CPU.
    let readiness = number("readiness_pct")?;
    ensure!((35.0..65.0).contains(&readiness), "it is {readiness} %");
    let by_sum = number("ready_ms")? / number("sample_ms")? * 100.0;
    ensure!(
        (by_sum - readiness).abs() < 0.1,
        "{by_sum} and {readiness} are not the same"
    );
    refused(
        Command::new("cohort").args(["ready", "nobody", "--for", "1s"]),
        Exit::NoSuchVm,
        "waits",
    )
}

/// A VM that is stopped for two seconds while it is recorded; then the recording is asked, as somebody without privileges.
fn recorded() -> Result<()> {
    let guest = Guest::start(&sleepy("recorded"))?;
    let folder = tempfile::tempdir_in("/tmp")?;
    let file = folder.path().join("day");
    let path = file.to_string_lossy().into_owned();
    let mut watch = Command::new("cohort");
    watch
        .args(["watch", "--json", "--record", &path])
        .stdout(std::process::Stdio::null());
    let (watch, _notifications) = start_until_ready(watch, &[], "cohort watch")?;
    let now = || -> Result<String> {
        let output = Command::new("date")
            .args(["-u", "+%Y-%m-%d %H:%M:%S"])
            .output()?;
        Ok(String::from_utf8(output.stdout)?.trim().to_owned())
    };
    sleep(Duration::from_millis(2500));
    let before = now()?;
    let pid = Pid::from_raw(guest.micro.pid());
    kill(pid, Signal::SIGSTOP)?;
    sleep(Duration::from_millis(2500));
    kill(pid, Signal::SIGCONT)?;
    sleep(Duration::from_millis(2500));
    drop(watch);
    let found = why(&["recorded", "--recording", &path])?;
    found["stalls"].is("warning", &["without a CPU for 2.", "signal"])?;
    found["throttled"].is("fine", &["not throttled"])?;
    let found = why(&["recorded", "--recording", &path, "--to", &before])?;
    found["stalls"].is("fine", &["no vCPU"])
}

fn record(path: &Path) -> Result<()> {
    let status = Command::new("cohort")
        .args(["watch", "--json", "--count", "4", "--record"])
        .arg(path)
        .stdout(Stdio::null())
        .status()?;
    ensure!(status.success(), "cohort watch: {status}");
    Ok(())
}

fn doctor(arguments: &[&str]) -> Result<(Vec<Found>, ExitStatus)> {
    let output = Command::new("cohort")
        .args(["doctor", "--json"])
        .args(arguments)
        .output()?;
    let findings: Vec<Found> = serde_json::from_slice(&output.stdout)?;
    show(&findings);
    Ok((findings, output.status))
}

fn gains() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let [quiet, crowded] = ["quiet", "crowded"].map(|name| folder.path().join(name));
    {
        let _guest = Guest::busy("alone", 1)?;
        record(&quiet)?;
    }
    {
        let guests = ["first", "second", "third"].map(|name| Guest::start(&locked(name, 2)));
        let _guests = guests.into_iter().collect::<Result<Vec<_>>>()?;
        record(&crowded)?;
    }
    let paths = [&quiet, &crowded].map(|path| path.to_string_lossy().into_owned());
    let (findings, status) = doctor(&["--recording", &paths[0], &paths[1]])?;
    ensure!(
        status.code() == Some(Exit::Advice.code().into()),
        "{status}"
    );
    ensure!(findings.len() == 2, "{findings:?}");
    findings[0].is("warning", &["crowded", "it gains"])?;
    // Whether its one vCPU waits noticeably is up to the emulator.
    let little = ["fine", "note"].contains(&findings[1].severity.as_str());
    ensure!(
        little && findings[1].seen.contains("to gain"),
        "{findings:?}"
    );
    // What it says of this host, and changes nothing.
    doctor(&[])?;
    Ok(())
}
