// SPDX-License-Identifier: GPL-2.0-only
//! Runs one guest in this process: a thread per vCPU, named as QEMU names them, until a signal, a time or a failure.
//!
//! At SIGUSR1 a new thread takes each vCPU over, and those that had them sleep from then on.
//!
//! vCPU threads are never joined. Their loop has nothing to clean up, and the end of the process takes each of them out
//! of KVM whatever it does; so the guest ends the same way after SIGTERM as after SIGKILL.
//!
//! Needs KVM with SVM or VMX. The software virtualisation of some cloud machines (kvm_pvm) runs most programs too, but
//! emulates kernel mode instruction by instruction, and cannot emulate the return from user mode to it.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::{Arc, Barrier, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use serde::{Deserialize, Serialize};

use crate::code::FAULT_PORT;
use crate::machine::{Machine, Plan};
use crate::program::Program;
use crate::stats::VcpuStats;
use crate::{LatencyCounters, RunState, Spec, State, calibrate};

/// Sums over all vCPUs of a guest that ends; one line of JSON on the standard output of `micro`.
///
/// They are read one after the other while the vCPUs still run. So where two counters belong together (IPIs sent and
/// interrupts handled), they differ by what happened in between, unless the programs had finished.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Totals {
    /// The guest's name.
    pub name: String,
    /// Number of vCPUs.
    pub nr_vcpus: usize,
    /// Seconds from the start of the vCPUs to the end.
    pub seconds: f64,
    /// TSC ticks per millisecond.
    pub tsc_khz: u64,
    /// Iterations of `compute` per millisecond; 0 if no program needed it.
    pub iterations_per_ms: u64,
    /// Passes through programs.
    pub progress: u64,
    /// Steps completed.
    pub steps: u64,
    /// Iterations of completed `compute` steps.
    pub work: u64,
    /// PAUSE instructions executed.
    pub pauses: u64,
    /// HLT instructions executed.
    pub halts: u64,
    /// Interrupts handled.
    pub interrupts: u64,
    /// IPIs sent.
    pub ipis_sent: u64,
    /// IPIs whose answer was waited for and seen.
    pub ipis_answered: u64,
    /// TSC ticks from sending an IPI to its handler.
    pub delivery: LatencyCounters,
    /// TSC ticks from sending an IPI until the answer was seen.
    pub round_trip: LatencyCounters,
    /// KVM's statistics, by the names of the host's kernel; empty unless asked for.
    pub kvm: BTreeMap<String, u64>,
}

/// Runs the guest until SIGTERM, SIGINT, the spec's time or the end of the process `parent`; its totals.
///
/// To be called from the only thread of a process, which must end soon after the return: the vCPUs run until it does.
pub fn run(spec: &Spec, parent: Option<i32>) -> Result<Totals> {
    let (programs, shared) = spec.compile()?;
    // Before any thread is made, so that all of them leave these signals to this one.
    let stop = StopSignals::block(parent)?;
    let kvm = Kvm::new()
        .context("/dev/kvm cannot be opened: is the kvm module loaded, and are you root?")?;
    let iterations_per_ms = iterations_per_ms(spec, &programs);
    let file = StateFile::create(spec.state.as_deref())?;
    let state = State::format(
        &file.lock,
        file.path.clone(),
        &spec.name,
        programs.len(),
        &shared,
    )?;
    let state: &'static State = Box::leak(Box::new(state));
    let plan = Plan {
        spec,
        programs: &programs,
        shared: &shared,
        iterations_per_ms,
    };
    let machine = Machine::create(&kvm, &plan, state.memory())?;
    state.header().tsc_khz.store(machine.tsc_khz, Relaxed);
    state
        .header()
        .iterations_per_ms
        .store(iterations_per_ms, Relaxed);
    state
        .header()
        .pause_window
        .store(spec.pause_window.to_count(iterations_per_ms), Relaxed);
    let stats = match spec.count_exits {
        true => machine
            .vcpus
            .iter()
            .map(VcpuStats::open)
            .collect::<Result<Vec<_>>>()?,
        false => Vec::new(),
    };
    let failure = Arc::new(Failure::new()?);
    let vcpus = Vcpus::start(machine.vcpus, state, &failure)?;
    let start = Instant::now();
    file.publish()?;
    let deadline = spec
        .seconds
        .map(|seconds| start + Duration::from_secs(seconds));
    let end = loop {
        match stop.wait(deadline, &failure)? {
            Event::HandOver => vcpus.hand_over()?,
            Event::End(end) => break end,
        }
    };
    if let (End::ParentGone, Some(path)) = (end, &spec.state) {
        // The parent would have removed it, had it not been killed. An error means that somebody else did.
        let _ = std::fs::remove_file(path);
    }
    let mut totals = Totals::of(state, start.elapsed());
    for stats in stats {
        stats.add_to(&mut totals.kvm)?;
    }
    Ok(totals)
}

/// The given rate, or the measured one if a program or the window needs one, or 0.
fn iterations_per_ms(spec: &Spec, programs: &[Program]) -> u64 {
    let needed = spec.pause_window.is_time() || programs.iter().any(Program::needs_calibration);
    match spec.iterations_per_ms {
        Some(iterations) => iterations,
        None if needed => calibrate::iterations_per_ms(),
        None => 0,
    }
}

impl Totals {
    fn of(state: &State, time: Duration) -> Self {
        let mut totals = Self {
            name: state.name(),
            nr_vcpus: state.nr_vcpus(),
            seconds: time.as_secs_f64(),
            tsc_khz: state.tsc_khz(),
            iterations_per_ms: state.iterations_per_ms(),
            progress: 0,
            steps: 0,
            work: 0,
            pauses: 0,
            halts: 0,
            interrupts: 0,
            ipis_sent: 0,
            ipis_answered: 0,
            delivery: LatencyCounters::none(),
            round_trip: LatencyCounters::none(),
            kvm: BTreeMap::new(),
        };
        for vcpu in state.vcpus() {
            totals.progress += vcpu.progress;
            totals.steps += vcpu.steps;
            totals.work += vcpu.work;
            totals.pauses += vcpu.pauses;
            totals.halts += vcpu.halts;
            totals.interrupts += vcpu.interrupts;
            totals.ipis_sent += vcpu.ipis_sent;
            totals.ipis_answered += vcpu.ipis_answered;
            totals.delivery.add(&vcpu.delivery);
            totals.round_trip.add(&vcpu.round_trip);
        }
        totals
    }
}

/// A state file in the making. It appears under its name when the guest runs, complete, in place of an old one; and is
/// locked as long as the guest runs, so that two guests never share one.
struct StateFile {
    lock: Flock<File>,
    /// Where it is while it is made.
    path: PathBuf,
    /// Where it goes.
    target: Option<PathBuf>,
}

impl StateFile {
    fn create(target: Option<&Path>) -> Result<Self> {
        let Some(target) = target else {
            let memory: OwnedFd = memfd_create("micro-state", MFdFlags::MFD_CLOEXEC)
                .context("no memory for the state")?;
            return Ok(Self {
                lock: lock(memory.into())?,
                path: PathBuf::new(),
                target: None,
            });
        };
        refuse_file_in_use(target)?;
        let mut path = target.as_os_str().to_owned();
        path.push(format!(".{}", std::process::id()));
        let path = PathBuf::from(path);
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).with_context(|| {
            format!("the state file {} cannot be created: does its folder exist, and may you write there?", path.display())
        })?;
        Ok(Self {
            lock: lock(file)?,
            path,
            target: Some(target.into()),
        })
    }

    /// Gives it its name, and keeps it locked until the process ends.
    fn publish(mut self) -> Result<()> {
        if let Some(target) = self.target.take() {
            std::fs::rename(&self.path, &target).with_context(|| {
                format!("the state file {} cannot be created", target.display())
            })?;
            self.path = PathBuf::new();
        }
        std::mem::forget(self);
        Ok(())
    }
}

impl Drop for StateFile {
    fn drop(&mut self) {
        if self.target.is_some() {
            // The guest did not start; the error that is reported is why.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn lock(file: File) -> Result<Flock<File>> {
    Flock::lock(file, FlockArg::LockExclusiveNonblock)
        .map_err(|(_, errno)| anyhow!(errno))
        .context("the state file cannot be locked")
}

fn refuse_file_in_use(target: &Path) -> Result<()> {
    let file = match File::open(target) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => {
            return Err(error)
                .with_context(|| format!("the state file {} is in the way", target.display()));
        }
    };
    match Flock::lock(file, FlockArg::LockSharedNonblock) {
        Ok(_) => State::open(target)
            .map(drop)
            .context("micro replaces its own state files only: choose another --state"),
        Err((_, Errno::EWOULDBLOCK)) => {
            bail!(
                "the state file {} belongs to a guest that runs: choose another --state",
                target.display()
            )
        }
        Err((_, errno)) => {
            Err(errno).with_context(|| format!("{} cannot be locked", target.display()))
        }
    }
}

/// The first failure of a vCPU, and the way it wakes the main thread.
struct Failure {
    event: EventFd,
    message: Mutex<Option<String>>,
}

impl Failure {
    fn new() -> Result<Self> {
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC)
            .context("no event descriptor can be made")?;
        Ok(Self {
            event,
            message: Mutex::new(None),
        })
    }

    fn report(&self, message: String) {
        self.message
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get_or_insert(message);
        // Writing 1 fails only when the counter is full, and then the main thread wakes all the same.
        let _ = self.event.write(1);
    }

    fn take(&self) -> Option<String> {
        self.message
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }
}

/// Why a guest ends well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// A signal came, or the time is over.
    Asked,
    /// The process that `--parent` names has ended.
    ParentGone,
}

/// What a guest's main thread waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    End(End),
    /// Other threads are to take the vCPUs over.
    HandOver,
}

/// What a guest is told from outside.
struct StopSignals {
    signals: SignalFd,
    parent: Option<OwnedFd>,
}

impl StopSignals {
    fn block(parent: Option<i32>) -> Result<Self> {
        let mask = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT, Signal::SIGUSR1]);
        mask.thread_block().context("signals cannot be blocked")?;
        let signals = SignalFd::with_flags(&mask, SfdFlags::SFD_CLOEXEC)
            .context("no signal descriptor can be made")?;
        let parent = parent.map(watch_process).transpose()?;
        Ok(Self { signals, parent })
    }

    /// Returns what has come, `deadline` among it; an error if a vCPU has failed.
    fn wait(&self, deadline: Option<Instant>, failure: &Failure) -> Result<Event> {
        loop {
            let mut descriptors = vec![
                PollFd::new(failure.event.as_fd(), PollFlags::POLLIN),
                PollFd::new(self.signals.as_fd(), PollFlags::POLLIN),
            ];
            descriptors.extend(
                self.parent
                    .as_ref()
                    .map(|parent| PollFd::new(parent.as_fd(), PollFlags::POLLIN)),
            );
            poll(&mut descriptors, timeout(deadline))
                .context("waiting for the end of the guest failed")?;
            if let Some(message) = failure.take() {
                bail!(message);
            }
            let has_come =
                |descriptor: Option<&PollFd>| descriptor.and_then(PollFd::any) == Some(true);
            if has_come(descriptors.get(1)) {
                let signal = self
                    .signals
                    .read_signal()
                    .context("a signal cannot be read")?;
                let number = signal.map(|signal| signal.ssi_signo as i32);
                return Ok(match number {
                    Some(libc::SIGUSR1) => Event::HandOver,
                    _ => Event::End(End::Asked),
                });
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(Event::End(End::Asked));
            }
            if has_come(descriptors.get(2)) {
                return Ok(Event::End(End::ParentGone));
            }
        }
    }
}

/// Time left for poll, rounded up to its milliseconds; it may be shorter than what is left.
fn timeout(deadline: Option<Instant>) -> PollTimeout {
    let Some(deadline) = deadline else {
        return PollTimeout::NONE;
    };
    let left = deadline.saturating_duration_since(Instant::now());
    PollTimeout::try_from(left.as_millis() + 1).unwrap_or(PollTimeout::MAX)
}

/// A descriptor that becomes readable when the process ends.
fn watch_process(pid: i32) -> Result<OwnedFd> {
    // SAFETY: this call takes two integers and returns a new file descriptor or an error.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return Err(std::io::Error::last_os_error()).with_context(|| {
            format!("the process {pid} that --parent names cannot be watched; has it ended?")
        });
    }
    // SAFETY: the descriptor was just made and belongs to nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Ends a KVM_RUN, and does nothing else.
const KICK: Signal = Signal::SIGUSR2;
const KICK_PERIOD: Duration = Duration::from_millis(1);

/// One vCPU, and who runs it.
struct Vcpu {
    /// Locked by the thread that runs it.
    fd: Mutex<VcpuFd>,
    /// That thread is to leave it.
    leave: AtomicBool,
}

/// The vCPUs of a guest, each with a thread that runs it.
struct Vcpus {
    each: Vec<Arc<Vcpu>>,
    state: &'static State,
    failure: Arc<Failure>,
}

impl Vcpus {
    /// Starts all vCPUs at the same time, after each thread has told its id.
    fn start(fds: Vec<VcpuFd>, state: &'static State, failure: &Arc<Failure>) -> Result<Self> {
        make_kicks_harmless()?;
        let of = |fd| Vcpu {
            fd: Mutex::new(fd),
            leave: AtomicBool::new(false),
        };
        let vcpus = Self {
            each: fds.into_iter().map(|fd| Arc::new(of(fd))).collect(),
            state,
            failure: Arc::clone(failure),
        };
        let start = Arc::new(Barrier::new(vcpus.each.len() + 1));
        for index in 0..vcpus.each.len() {
            let start = Arc::clone(&start);
            vcpus.start_thread(index, move || {
                start.wait();
            })?;
        }
        start.wait();
        Ok(vcpus)
    }

    /// Starts a thread that runs vCPU `index` once no other one does, after it has told its id and done `begin`.
    fn start_thread(&self, index: usize, begin: impl FnOnce() + Send + 'static) -> Result<()> {
        let vcpu = Arc::clone(&self.each[index]);
        let (state, failure) = (self.state, Arc::clone(&self.failure));
        let body = move || {
            let mut fd = vcpu.fd.lock().unwrap_or_else(PoisonError::into_inner);
            vcpu.leave.store(false, Relaxed);
            let tid = nix::unistd::gettid().as_raw() as u64;
            state.vcpu_ref(index).tid.store(tid, Release);
            begin();
            if let Some(message) = run_vcpu(&mut fd, &vcpu.leave, index, state) {
                let run_state = &state.vcpu_ref(index).run_state;
                run_state.store(RunState::Failed.to_word(), Relaxed);
                failure.report(message);
            }
            drop(fd);
            loop {
                std::thread::park();
            }
        };
        std::thread::Builder::new()
            .name(format!("CPU {index}/KVM"))
            .stack_size(64 << 10)
            .spawn(body)
            .with_context(|| format!("no thread can be made for vCPU {index}"))?;
        Ok(())
    }

    /// Has a new thread take each vCPU over.
    fn hand_over(&self) -> Result<()> {
        for (index, vcpu) in self.each.iter().enumerate() {
            let tid = || self.state.vcpu(index).tid;
            let former = tid();
            self.start_thread(index, || ())?;
            vcpu.leave.store(true, Relaxed);
            // A kick that comes just before its KVM_RUN has no effect.
            while tid() == former {
                kick(former);
                std::thread::sleep(KICK_PERIOD);
            }
        }
        Ok(())
    }
}

fn make_kicks_harmless() -> Result<()> {
    extern "C" fn nothing(_: i32) {}
    let action = SigAction::new(
        SigHandler::Handler(nothing),
        SaFlags::empty(),
        SigSet::empty(),
    );
    // SAFETY: the handler does nothing.
    unsafe { sigaction(KICK, &action) }.context("a signal's handler cannot be set")?;
    Ok(())
}

/// Ends the KVM_RUN of thread `tid` of this process, if it is inside one.
fn kick(tid: i32) {
    // SAFETY: this call takes three integers. The thread is there, as none of them ends.
    unsafe { libc::syscall(libc::SYS_tgkill, std::process::id(), tid, KICK as i32) };
}

/// Runs a vCPU until it is to `leave`, or until it cannot go on; why.
fn run_vcpu(vcpu: &mut VcpuFd, leave: &AtomicBool, index: usize, state: &State) -> Option<String> {
    while !leave.load(Relaxed) {
        let exit = match vcpu.run() {
            // A kick, a debugger or SIGSTOP interrupted KVM; the guest did nothing.
            Err(error) if error.errno() == libc::EINTR => continue,
            Ok(VcpuExit::Intr) => continue,
            Ok(VcpuExit::IoOut(FAULT_PORT, _)) => exception(state, index),
            Ok(VcpuExit::Shutdown) => "triple fault".into(),
            Ok(VcpuExit::FailEntry(reason, cpu)) => {
                format!("KVM cannot enter the guest (reason {reason:#x}, CPU {cpu})")
            }
            Ok(VcpuExit::InternalError) => "KVM internal error".into(),
            Ok(exit) => format!("unexpected exit {exit:?}"),
            Err(error) => format!("KVM_RUN failed: {error}"),
        };
        state.vcpu_ref(index).user_exits.fetch_add(1, Relaxed);
        let rip = vcpu
            .get_regs()
            .map_or("unknown rip".into(), |regs| format!("rip {:#x}", regs.rip));
        let step = state.vcpu_ref(index).step.load(Relaxed);
        return Some(format!(
            "vCPU {index} cannot go on in step {step} of its program: {exit}, at {rip}"
        ));
    }
    None
}

fn exception(state: &State, index: usize) -> String {
    let fault = &state.vcpu_ref(index).fault;
    format!(
        "exception {} with error code {:#x} at {:#x}, CR2 {:#x}: a fault of micro, or of this host's KVM",
        fault.vector.load(Relaxed),
        fault.error.load(Relaxed),
        fault.rip.load(Relaxed),
        fault.address.load(Relaxed)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_file_appears_when_it_is_published_only() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("a");
        let file = StateFile::create(Some(&target)).unwrap();
        assert!(!target.exists());
        drop(file);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        StateFile::create(Some(&target)).unwrap().publish().unwrap();
        assert!(target.exists());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_state_file_in_use_and_a_foreign_file_are_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("a");
        StateFile::create(Some(&target)).unwrap().publish().unwrap();
        let refusal = StateFile::create(Some(&target)).err().unwrap().to_string();
        assert!(
            refusal.contains("belongs to a guest that runs"),
            "{refusal}"
        );
        let foreign = folder.path().join("b");
        std::fs::write(&foreign, "precious").unwrap();
        let refusal = StateFile::create(Some(&foreign)).err().unwrap().to_string();
        assert!(
            refusal.contains("replaces its own state files only"),
            "{refusal}"
        );
        assert_eq!(std::fs::read_to_string(&foreign).unwrap(), "precious");
    }

    #[test]
    fn waiting_ends_with_the_time_and_with_a_failure() {
        let failure = Failure::new().unwrap();
        let stop = StopSignals::block(Some(std::process::id() as i32)).unwrap();
        assert_eq!(
            stop.wait(Some(Instant::now() + Duration::from_millis(5)), &failure)
                .unwrap(),
            Event::End(End::Asked)
        );
        failure.report("first".into());
        failure.report("second".into());
        assert_eq!(stop.wait(None, &failure).unwrap_err().to_string(), "first");
    }

    #[test]
    fn waiting_ends_with_the_parent() {
        let mut parent = std::process::Command::new("/bin/sleep")
            .arg("100")
            .spawn()
            .unwrap();
        let stop = StopSignals::block(Some(parent.id() as i32)).unwrap();
        parent.kill().unwrap();
        assert_eq!(
            stop.wait(None, &Failure::new().unwrap()).unwrap(),
            Event::End(End::ParentGone)
        );
        parent.wait().unwrap();
    }

    #[test]
    fn a_parent_that_is_gone_is_an_error() {
        let mut child = std::process::Command::new("/bin/true").spawn().unwrap();
        let pid = child.id() as i32;
        child.wait().unwrap();
        assert!(
            watch_process(pid)
                .unwrap_err()
                .to_string()
                .contains("has it ended")
        );
    }

    #[test]
    fn the_rate_is_measured_only_where_it_is_needed() {
        let programs = |text: &str| vec![text.parse().unwrap()];
        assert_eq!(
            iterations_per_ms(&Spec::new("a"), &programs("compute 5")),
            0
        );
        assert!(iterations_per_ms(&Spec::new("a"), &programs("compute 5us")) > 0);
        assert_eq!(
            iterations_per_ms(
                &Spec::new("a").iterations_per_ms(7),
                &programs("compute 5us")
            ),
            7
        );
    }
}
