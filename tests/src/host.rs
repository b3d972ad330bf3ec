// SPDX-License-Identifier: GPL-2.0-only
//! What the tests share: Cohort running under the harness's eyes, guests in cgroups of their own, and the CPU time that
//! each of them got.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{sleep, spawn};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cohort::commands::compare::notify::Notifications;
use cohort::commands::compare::scheduler::{self, RunningScheduler, Scheduler};
use cohort::host::paths::Host;
use cohort::observer::view::{HostView, VcpuView, VmView};
use cohort::observer::{Observer, Windows};
use cohort::process::exit::Exit;
use cohort::process::wait::wait_for;
use cohort::scheduler::metrics::{HostStats, MechanismStats, VmStats};
use cohort_lab::inside::cgroup::{Cgroup, while_all_frozen};
use cohort_lab::inside::hostwork::Program;
use cohort_lab::inside::info::LabInfo;
pub use cohort_lab::inside::micro::{MicroGuest as Guest, busy, locked};
use cohort_lab::inside::process::start;
use cohort_lab::inside::windows::LOGS;
use cohort_lab::outside::machine::Kind;
use cohort_micro::Spec;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use serde::de::DeserializeOwned;

/// A stall of 2 s ends the scheduler in every test, well below the default.
const BITES_EARLY: [&str; 2] = ["--timeout-ms", "2000"];
const COHORT: &str = "/cohort/bin/cohort";
/// What a guest may need to get going on a busy emulated host.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// After this long nobody moves any more who has just started, or whose scheduler has.
pub const SETTLE: Duration = Duration::from_millis(300);
/// What is no guest's work runs here.
pub const HOST_CPU: u32 = 0;

/// A running `cohort run`, and how it was started.
pub struct Cohort {
    running: RunningScheduler,
    options: Vec<String>,
}

impl Deref for Cohort {
    type Target = RunningScheduler;

    fn deref(&self) -> &RunningScheduler {
        &self.running
    }
}

impl DerefMut for Cohort {
    fn deref_mut(&mut self) -> &mut RunningScheduler {
        &mut self.running
    }
}

impl Cohort {
    /// Ends it by `signal`, whatever its exit status.
    pub fn stop_with(self, signal: Signal) -> Result<scheduler::Exit> {
        self.running.stop_with(signal)
    }
}

/// `cohort run`, with a watchdog that bites early.
pub fn start_cohort() -> Result<Cohort> {
    start_cohort_with(&[])
}

/// The same with further options.
pub fn start_cohort_with(options: &[&str]) -> Result<Cohort> {
    load_cohort(&[&BITES_EARLY, options].concat())
}

/// `cohort run` as operators have it, with their watchdog.
pub fn start_cohort_patiently() -> Result<Cohort> {
    load_cohort(&[])
}

/// On the exact machine loading costs as much as a whole test. So a Cohort that a test is done with stays for the next one
/// that wants the same options.
static KEPT: Mutex<Option<Cohort>> = Mutex::new(None);

fn kept() -> MutexGuard<'static, Option<Cohort>> {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}

fn load_cohort(options: &[&str]) -> Result<Cohort> {
    if let Some(cohort) = kept().take_if(|cohort| cohort.options == options) {
        return Ok(cohort);
    }
    back_to_stock()?;
    let load = || {
        let cohort = Scheduler::cohort(options).start(Path::new(LOGS))?;
        cohort.context("cohort is a program, so there is one to stop")
    };
    let running = match lab()?.machine {
        // Guests that run meanwhile execute as much as the CPU that loads it.
        Kind::Exact => while_all_frozen(load)?,
        Kind::Fast | Kind::Hardware => load()?,
    };
    let options = options.iter().map(ToString::to_string).collect();
    Ok(Cohort { running, options })
}

/// Ends it, or keeps it, and demands that nothing was wrong until then.
pub fn stop_cohort(mut cohort: Cohort) -> Result<()> {
    cohort.check()?;
    if lab()?.machine == Kind::Exact {
        *kept() = Some(cohort);
        return Ok(());
    }
    leave(cohort)
}

/// What `measure` finds under the stock scheduler and under Cohort. The one that is there comes first, as exchanging them costs
/// the exact machine more than measuring does.
pub fn under_both<T>(measure: impl Fn() -> Result<T>) -> Result<[T; 2]> {
    let under_stock = || -> Result<T> {
        back_to_stock()?;
        measure()
    };
    let is_usual = |cohort: &Cohort| cohort.options == BITES_EARLY;
    if kept().as_ref().is_some_and(is_usual) {
        let cohort = under_cohort(&measure)?;
        return Ok([under_stock()?, cohort]);
    }
    Ok([under_stock()?, under_cohort(&measure)?])
}

/// What `measure` finds under Cohort.
pub fn under_cohort<T>(measure: impl FnOnce() -> Result<T>) -> Result<T> {
    let cohort = start_cohort()?;
    let found = measure()?;
    stop_cohort(cohort)?;
    Ok(found)
}

/// The guest's progress moves on within [`PATIENCE`].
pub fn assert_progress(guest: &Guest) -> Result<()> {
    let before = guest.micro.state.progress();
    wait_for("progress of a guest", PATIENCE, || {
        Ok((guest.micro.state.progress() > before).then_some(()))
    })
}

/// Takes `cpu` offline, or brings it online.
pub fn set_online(cpu: u32, online: bool) -> Result<()> {
    let path = format!("/sys/devices/system/cpu/cpu{cpu}/online");
    fs::write(&path, if online { "1" } else { "0" })
        .with_context(|| format!("{path} cannot be written"))
}

/// What `measure` finds under Cohort without `mechanism`.
pub fn without<T>(mechanism: &str, measure: impl FnOnce() -> Result<T>) -> Result<T> {
    under_cohort(|| {
        set(&[&format!("{mechanism}=off")])?;
        let found = measure()?;
        // The next test may have the same Cohort.
        set(&[&format!("{mechanism}=on")])?;
        Ok(found)
    })
}

/// The host is on its own scheduler from here on: one that was kept leaves.
pub fn back_to_stock() -> Result<()> {
    match kept().take() {
        Some(cohort) => leave(cohort),
        None => Ok(()),
    }
}

fn leave(cohort: Cohort) -> Result<()> {
    let exit = cohort.running.stop()?;
    ensure!(
        exit.status.success(),
        "cohort ended with {}: {}",
        exit.status,
        exit.output
    );
    ensure_back_to_stock(&exit)
}

/// The host was back on its own scheduler within a second.
pub fn ensure_back_to_stock(exit: &scheduler::Exit) -> Result<()> {
    ensure!(
        exit.back_to_stock_after < promised(Duration::from_secs(1))?,
        "the host was back on its own scheduler only after {:?}",
        exit.back_to_stock_after
    );
    Ok(())
}

/// How long something may take that is to take no longer than `time`. On a machine whose seconds mean nothing it only has to
/// happen.
pub fn promised(time: Duration) -> Result<Duration> {
    Ok(match lab()?.machine {
        Kind::Exact | Kind::Hardware => time,
        Kind::Fast => PATIENCE,
    })
}

/// The lab this runs in.
pub fn lab() -> Result<LabInfo> {
    LabInfo::read()
}

/// Something that uses CPU time in a cgroup of its own, confined to the guests' CPUs.
pub trait Subject {
    /// All the CPU time that it has used, us.
    fn usage_us(&self) -> Result<u64>;
}

impl Subject for Guest {
    fn usage_us(&self) -> Result<u64> {
        self.cgroup().usage_us()
    }
}

/// Binds thread `tid` to `cpus`.
pub fn pin(tid: i32, cpus: &[u32]) -> Result<()> {
    let mut only = CpuSet::new();
    for &cpu in cpus {
        only.set(cpu as usize)?;
    }
    Ok(sched_setaffinity(Pid::from_raw(tid), &only)?)
}

/// Binds each vCPU of `guest` to one of `cpus`, in their order, from the first again where there are more vCPUs.
pub fn pin_vcpus(guest: &Guest, cpus: &[u32]) -> Result<()> {
    let vcpus = guest.micro.state.vcpus();
    let mut places = vcpus.zip(cpus.iter().cycle());
    places.try_for_each(|(vcpu, &cpu)| pin(vcpu.tid, &[cpu]))
}

/// A guest whose `vcpus` show that they live, and leave the rest of their CPUs to others.
pub fn dozing(name: &str, vcpus: usize) -> Result<Guest> {
    Guest::start(&(0..vcpus).fold(Spec::new(name), |spec, _| {
        spec.vcpu("loop: compute 1ms; sleep 20ms")
    }))
}

/// Two vCPUs that sleep and wake each other.
pub fn sleepy(name: &str) -> Spec {
    Spec::new(name)
        .vcpu("loop: compute 20us; ipi 1 0x41; wait-answer; sleep 200us")
        .vcpu("loop: halt; compute 10us")
}

/// A process that is killed with this.
pub struct Service(pub Child);

impl Drop for Service {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Ordinary processes that compute all the time, in a cgroup of their own.
pub struct HostLoad {
    // Before the cgroup: they must be gone when that is removed.
    children: Vec<Service>,
    cgroup: Cgroup,
    /// What they execute, if it is a file of the lab's.
    _program: Option<Program>,
}

impl HostLoad {
    /// Starts one process per niceness of `nice`, on `cpus`.
    pub fn start(name: &str, nice: &[i32], cpus: &[u32]) -> Result<Self> {
        let program = Program::unpack()?;
        let busy = |nice: &i32| {
            let mut command = Command::new("nice");
            command
                .args(["-n", &nice.to_string()])
                .args(program.endless());
            command
        };
        let load = Self::run(name, nice.iter().map(busy), cpus)?;
        Ok(Self {
            _program: Some(program),
            ..load
        })
    }

    /// Starts a process that wants `percent` of a CPU, a few milliseconds at a time.
    pub fn start_partly(name: &str, percent: u32, cpus: &[u32]) -> Result<Self> {
        let mut command = Command::new("stress-ng");
        let percent = percent.to_string();
        command.args([
            "--quiet",
            "--cpu",
            "1",
            "--cpu-method",
            "loop",
            "--cpu-load-slice",
            "4",
            "--cpu-load",
            &percent,
        ]);
        Self::run(name, [command], cpus)
    }

    /// Starts `commands` on `cpus`.
    pub fn run(
        name: &str,
        commands: impl IntoIterator<Item = Command>,
        cpus: &[u32],
    ) -> Result<Self> {
        let cgroup = Cgroup::create(name)?;
        let children = commands
            .into_iter()
            .map(|command| Ok(Service(start(command, cpus, Some(&cgroup))?)))
            .collect::<Result<_>>()?;
        Ok(Self {
            children,
            cgroup,
            _program: None,
        })
    }

    /// The processes.
    pub fn pids(&self) -> Vec<u32> {
        self.children.iter().map(|child| child.0.id()).collect()
    }

    /// Binds process number `index` to `cpus`.
    pub fn bind(&self, index: usize, cpus: &[u32]) -> Result<()> {
        pin(self.children[index].0.id() as i32, cpus)
    }

    /// The cgroup that they are alone in.
    pub fn cgroup(&self) -> &Cgroup {
        &self.cgroup
    }

    /// CPU time that each process gets in `window`, ns.
    pub fn cpu_times_ns(&self, window: Duration) -> Result<Vec<u64>> {
        let cpu_time_ns = |pid| Ok(schedstat_ns(pid)?.0);
        let read = || self.pids().into_iter().map(cpu_time_ns).collect();
        Ok(gained(window, read)?.0)
    }
}

impl Subject for HostLoad {
    fn usage_us(&self) -> Result<u64> {
        self.cgroup.usage_us()
    }
}

/// For how long at most KVM polls for work before a vCPU sleeps, ns; for a [`Setting`].
pub const HALT_POLL_NS: &str = "/sys/module/kvm/parameters/halt_poll_ns";

/// A file of the kernel that has another content until this is dropped.
pub struct Setting {
    path: String,
    before: String,
}

impl Setting {
    /// Writes `content` there.
    pub fn set(path: &str, content: &str) -> Result<Self> {
        let before = fs::read_to_string(path).with_context(|| format!("{path} cannot be read"))?;
        fs::write(path, content).with_context(|| format!("{path} cannot be written"))?;
        Ok(Self {
            path: path.to_owned(),
            before,
        })
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        // The lab ends anyway.
        let _ = fs::write(&self.path, &self.before);
    }
}

/// CPU time of thread `tid`, and how long it waited for a CPU, as the kernel counts them, ns.
pub fn schedstat_ns(tid: u32) -> Result<(u64, u64)> {
    let path = format!("/proc/{tid}/schedstat");
    let text = fs::read_to_string(&path).with_context(|| format!("{path} cannot be read"))?;
    let mut words = text.split(' ').map(str::parse);
    let mut next = || words.next().context("schedstat has three numbers");
    Ok((next()??, next()??))
}

/// What each of the counters that `read` reads gains in `window`, and how long that really was.
pub fn gained(
    window: Duration,
    read: impl Fn() -> Result<Vec<u64>>,
) -> Result<(Vec<u64>, Duration)> {
    let (before, start) = (read()?, Instant::now());
    sleep(window);
    let (after, elapsed) = (read()?, start.elapsed());
    let gains = before
        .iter()
        .zip(&after)
        .map(|(before, after)| after - before);
    Ok((gains.collect(), elapsed))
}

/// What fraction of their common CPU time each subject gets in `window`, after a moment to settle, and how many CPUs
/// they used together.
pub fn shares(subjects: &[&dyn Subject], window: Duration) -> Result<(Vec<f64>, f64)> {
    sleep(SETTLE);
    let read = || {
        subjects
            .iter()
            .map(|subject| subject.usage_us())
            .collect::<Result<Vec<_>>>()
    };
    let (used, elapsed) = gained(window, read)?;
    let used: Vec<f64> = used.into_iter().map(|used| used as f64).collect();
    let total: f64 = used.iter().sum();
    ensure!(total > 0.0, "nobody used any CPU time");
    println!(
        "    shares {:?} of {:.2} CPUs",
        used.iter()
            .map(|used| round(used / total))
            .collect::<Vec<_>>(),
        total / elapsed.as_micros() as f64
    );
    Ok((
        used.iter().map(|used| used / total).collect(),
        total / elapsed.as_micros() as f64,
    ))
}

fn round(share: f64) -> f64 {
    (share * 1e4).round() / 1e4
}

/// Demands that each share is within `tolerance` (a fraction of what it should be) of `weights`' ratio.
pub fn assert_ratio(shares: &[f64], weights: &[f64], tolerance: f64) -> Result<()> {
    let sum: f64 = weights.iter().sum();
    for (share, weight) in shares.iter().zip(weights) {
        let fair = weight / sum;
        ensure!(
            (share / fair - 1.0).abs() <= tolerance,
            "shares {shares:.4?} are not within {tolerance} of {weights:?}"
        );
    }
    Ok(())
}

/// What Cohort counted since it was loaded.
pub fn cohort_stats() -> Result<HostStats> {
    cohort_json(&["stats", "--count", "1"])
}

thread_local! {
    /// Loading the observer costs the exact machine as much as many windows. So it stays.
    static WINDOWS: RefCell<Option<Windows<'static>>> = const { RefCell::new(None) };
}

/// Begins a window. The observer is this program's own, and stays until the suite ends or [`unload_observer`]. So KVM's
/// modules cannot be removed, and the longest times that it shows are those since its start. Where that matters there is
/// [`watch_anew`].
pub fn begin_window() -> Result<()> {
    end_window().map(drop)
}

/// What the observer has seen since [`begin_window`], or the last call of this.
pub fn end_window() -> Result<HostView> {
    WINDOWS.with_borrow_mut(|windows| {
        let windows = match windows {
            Some(windows) => windows,
            None => {
                let object = Box::leak(Box::new(MaybeUninit::uninit()));
                windows.insert(Windows::begin(Observer::load(object, &Host::live())?)?)
            }
        };
        windows.advance()
    })
}

/// What the observer sees in a window of `seconds`.
pub fn watch(seconds: u32) -> Result<HostView> {
    begin_window()?;
    sleep(Duration::from_secs(seconds.into()));
    end_window()
}

/// What it sees in a window of `seconds` when the scheduler, and who has just started, have settled.
pub fn watch_settled(seconds: u32) -> Result<HostView> {
    sleep(SETTLE);
    watch(seconds)
}

/// What it sees in a window of `seconds` in which something is done about each millisecond.
pub fn watch_while(seconds: u32, mut what: impl FnMut()) -> Result<HostView> {
    begin_window()?;
    let (begin, window) = (Instant::now(), Duration::from_secs(seconds.into()));
    while begin.elapsed() < window {
        what();
        sleep(Duration::from_millis(1));
    }
    end_window()
}

/// The observer of [`watch`] is no longer there.
pub fn unload_observer() {
    WINDOWS.take();
}

/// What `cohort watch` sees in a window of `seconds`, which is its only one.
pub fn watch_anew(seconds: u32) -> Result<HostView> {
    Watch::begin(1, seconds)?.window()
}

/// Makes these switches; the mechanisms after that, since load.
pub fn set(switches: &[&str]) -> Result<BTreeMap<String, MechanismStats>> {
    cohort_json(&[&["set"], switches].concat())
}

/// All vCPUs of `guest` in `view`.
pub fn vcpus_of<'a>(view: &'a HostView, guest: &Guest) -> Result<&'a VcpuView> {
    Ok(&vm_of(view, guest)?.all)
}

/// vCPU `number` of `guest` in `view`.
pub fn vcpu_of<'a>(view: &'a HostView, guest: &Guest, number: u32) -> Result<&'a VcpuView> {
    let vcpu = vm_of(view, guest)?.vcpus.get(&number);
    vcpu.context("the observer does not see the vCPU")
}

/// What part of the guests' CPU time each of them had in the window.
pub fn shares_in(view: &HostView, guests: &[Guest]) -> Result<Vec<f64>> {
    let used = |guest| -> Result<f64> {
        let all = vcpus_of(view, guest)?;
        Ok(all.run_pct * f64::from(all.vcpus))
    };
    let used = guests.iter().map(used).collect::<Result<Vec<_>>>()?;
    let sum: f64 = used.iter().sum();
    Ok(used.iter().map(|used| used / sum).collect())
}

fn vm_of<'a>(view: &'a HostView, guest: &Guest) -> Result<&'a VmView> {
    let vm = view.vms.get(&(guest.micro.pid() as u32));
    vm.context("the observer does not see the VM")
}

/// Runs `command`, which must end as `exit` says, with `word` in its sentence.
pub fn refused(command: &mut Command, exit: Exit, word: &str) -> Result<()> {
    let output = command.stdin(Stdio::null()).output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    println!("    {}: {}", output.status, said.trim());
    ensure!(
        output.status.code() == Some(exit.code().into()) && said.contains(word),
        "{command:?} ended with {}, and \"{word}\" is wanted in: {said}",
        output.status
    );
    Ok(())
}

/// `cohort SUBCOMMAND` without root must be refused.
pub fn refused_without_root(subcommand: &str) -> Result<()> {
    let mut command = Command::new("setpriv");
    command.args([
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
        "cohort",
        subcommand,
    ]);
    refused(&mut command, Exit::NoPrivileges, "root")
}

/// Waits until sched_ext is "enabled" or "disabled", for `patience` at most.
pub fn wait_for_sched_ext(state: &str, patience: Duration) -> Result<()> {
    wait_for(&format!("sched_ext being {state}"), patience, || {
        Ok((scheduler::state()? == state).then_some(()))
    })
}

/// Waits until the program `what` has said that it is ready.
pub fn wait_until_ready(what: &str, notifications: &Notifications) -> Result<()> {
    wait_for(what, PATIENCE, || Ok(notifications.ready().then_some(())))
}

/// Starts `command`, which becomes the program `what`, on `cpus` (none: on all), and waits until that is ready. It may
/// tell more as long as there is somebody to tell.
pub fn start_until_ready(
    mut command: Command,
    cpus: &[u32],
    what: &str,
) -> Result<(Service, Notifications)> {
    let notifications = Notifications::new()?;
    command.env("NOTIFY_SOCKET", notifications.path());
    let service = Service(start(command, cpus, None)?);
    wait_until_ready(what, &notifications)?;
    Ok((service, notifications))
}

const WATCH_ENDED: &str = "cohort watch has ended";

/// `cohort watch` for some windows, in which the test does something.
pub struct Watch {
    process: Service,
    lines: Receiver<std::io::Result<String>>,
}

impl Watch {
    /// Returns when the first of `windows` of `seconds` has begun.
    pub fn begin(windows: u32, seconds: u32) -> Result<Self> {
        let notifications = Notifications::new()?;
        let process = Command::new(COHORT)
            .args(["watch", "--json", "--count"])
            .args([&windows.to_string(), "--interval-s", &seconds.to_string()])
            .env("NOTIFY_SOCKET", notifications.path())
            .stdout(Stdio::piped())
            .spawn()
            .context("cohort watch")?;
        let mut process = Service(process);
        let stdout = process.0.stdout.take().context("its output is piped")?;
        let (sender, lines) = channel();
        spawn(move || {
            let lines = BufReader::new(stdout).lines();
            // Whoever does not want more has gone.
            lines.for_each(|line| sender.send(line).unwrap_or(()));
        });
        wait_until_ready("cohort watch", &notifications)?;
        Ok(Self { process, lines })
    }

    /// Process id of the observer.
    pub fn pid(&self) -> u32 {
        self.process.0.id()
    }

    /// Waits for the end of the next window; what was seen in it.
    pub fn window(&self) -> Result<HostView> {
        let line = self.lines.recv().context(WATCH_ENDED)?;
        parse_view(&line?)
    }

    /// Waits for the end of the first window that has not begun yet.
    pub fn later_window(&self) -> Result<HostView> {
        while self.lines.try_recv().is_ok() {}
        self.window()?;
        self.window()
    }
}

fn parse_view(line: &str) -> Result<HostView> {
    serde_json::from_str(line)
        .with_context(|| format!("cohort watch prints what this test does not know: {line}"))
}

/// What `cohort` prints with these arguments and `--json`.
pub fn cohort_json<T: DeserializeOwned>(arguments: &[&str]) -> Result<T> {
    let output = Command::new(COHORT)
        .args(arguments)
        .arg("--json")
        .output()
        .with_context(|| format!("cohort {arguments:?}"))?;
    ensure!(
        output.status.success(),
        "cohort {arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    serde_json::from_slice(&output.stdout)
        .with_context(|| format!("cohort {arguments:?} prints JSON that this test does not know"))
}

/// What Cohort counted for the VM of process `pid` since it was loaded.
pub fn vm_stats(pid: u32) -> Result<VmStats> {
    let stats = cohort_stats()?;
    let vm = stats.vms.values().find(|vm| vm.pid == pid).cloned();
    vm.with_context(|| {
        format!(
            "cohort does not know the VM of process {pid}, only {:?}",
            stats.vms
        )
    })
}
