// SPDX-License-Identifier: GPL-2.0-only
//! What a micro guest is: the options of the `micro` program, as a value that tests build and scenario files hold.
//! Also starts guests: [`Spec::spawn`].

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use crate::layout::{MAX_VCPUS, NAME_BYTES};
use crate::machine::{MAX_MEMORY_MIB, MIN_MEMORY_MIB};
use crate::program::Program;
use crate::shared::SharedTable;
use crate::{Quantity, State, Totals};

/// How long a guest may take until it is ready, and until it is gone. Long, for a host in emulation under full load.
const PATIENCE: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// Where [`Spec::spawn`] puts state files that have no path of their own; a tmpfs everywhere.
const STATE_FOLDER: &str = "/dev/shm";

/// A micro guest. As JSON this is a scenario file; all but `vcpus` may be left out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Spec {
    /// Name of the guest, for people.
    pub name: String,
    /// One program per vCPU, in the language of [`crate::program`].
    pub vcpus: Vec<String>,
    /// vCPUs after those, which only halt.
    pub idle_vcpus: usize,
    /// State file; without one the counters are seen in the totals only.
    pub state: Option<PathBuf>,
    /// The guest's RAM in MiB.
    pub memory_mib: u64,
    /// Iterations of a spin loop from one PAUSE to the next, or the time they take.
    pub pause_window: Quantity,
    /// Iterations of `compute` per millisecond, for amounts given as times; measured if left out.
    pub iterations_per_ms: Option<u64>,
    /// HLT does not exit.
    pub hlt_passthrough: bool,
    /// PAUSE does not exit.
    pub pause_passthrough: bool,
    /// Put KVM's statistics of the vCPUs into the totals.
    pub count_exits: bool,
    /// End after this many seconds; without it, on SIGTERM or SIGINT.
    pub seconds: Option<u64>,
}

impl Default for Spec {
    fn default() -> Self {
        Self {
            name: "micro".into(),
            vcpus: Vec::new(),
            idle_vcpus: 0,
            state: None,
            memory_mib: MIN_MEMORY_MIB,
            pause_window: Quantity::Count(1),
            iterations_per_ms: None,
            hlt_passthrough: false,
            pause_passthrough: false,
            count_exits: false,
            seconds: None,
        }
    }
}

impl Spec {
    /// A guest without vCPUs.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.into(),
            ..Self::default()
        }
    }

    /// Adds a vCPU with a program.
    pub fn vcpu(mut self, program: impl Into<String>) -> Self {
        self.vcpus.push(program.into());
        self
    }

    /// Adds vCPUs that only halt.
    pub fn idle_vcpus(mut self, count: usize) -> Self {
        self.idle_vcpus = count;
        self
    }

    /// Sets the path of the state file.
    pub fn state(mut self, path: impl Into<PathBuf>) -> Self {
        self.state = Some(path.into());
        self
    }

    /// Sets how many iterations of a spin loop go by from one PAUSE to the next, or how long they take.
    pub fn pause_window(mut self, window: Quantity) -> Self {
        self.pause_window = window;
        self
    }

    /// Sets the iterations of `compute` per millisecond, so that equal guests do exactly equal work.
    pub fn iterations_per_ms(mut self, iterations: u64) -> Self {
        self.iterations_per_ms = Some(iterations);
        self
    }

    /// Asks for KVM's statistics in the totals.
    pub fn count_exits(mut self) -> Self {
        self.count_exits = true;
        self
    }

    /// Lets HLT run without exit.
    pub fn hlt_passthrough(mut self) -> Self {
        self.hlt_passthrough = true;
        self
    }

    /// Lets PAUSE run without exit.
    pub fn pause_passthrough(mut self) -> Self {
        self.pause_passthrough = true;
        self
    }

    /// Checks the spec; the programs of all vCPUs, and the names they share.
    pub fn compile(&self) -> Result<(Vec<Program>, SharedTable)> {
        ensure!(
            !self.name.is_empty() && self.name.len() < NAME_BYTES && !self.name.contains('\0'),
            "a guest's name has 1 to {} bytes: choose another --name",
            NAME_BYTES - 1
        );
        ensure!(
            (MIN_MEMORY_MIB..=MAX_MEMORY_MIB).contains(&self.memory_mib),
            "--memory-mib is {}: it must be from {MIN_MEMORY_MIB} to {MAX_MEMORY_MIB}",
            self.memory_mib
        );
        ensure!(
            !self.pause_window.is_zero(),
            "--pause-window is zero: at least one iteration is needed"
        );
        ensure!(
            self.iterations_per_ms != Some(0),
            "--iterations-per-ms is zero: nothing would ever be computed"
        );
        let nr_vcpus = self.vcpus.len() + self.idle_vcpus;
        ensure!(
            nr_vcpus > 0,
            "the guest has no vCPU: give it one with --vcpu 'loop: compute 100us'"
        );
        ensure!(
            nr_vcpus <= MAX_VCPUS,
            "the guest has {nr_vcpus} vCPUs: at most {MAX_VCPUS} are possible"
        );
        let mut programs = Vec::with_capacity(nr_vcpus);
        for (index, text) in self.vcpus.iter().enumerate() {
            programs.push(
                text.parse::<Program>()
                    .with_context(|| format!("the program of vCPU {index} is wrong"))?,
            );
        }
        programs.resize(nr_vcpus, Program::idle());
        for (index, program) in programs.iter().enumerate() {
            if let Some(receiver) = program
                .highest_receiver()
                .filter(|receiver| *receiver >= nr_vcpus)
            {
                bail!(
                    "vCPU {index} sends an IPI to vCPU {receiver}, but the guest's last vCPU is {}",
                    nr_vcpus - 1
                );
            }
        }
        let shared = SharedTable::collect(&programs)?;
        Ok((programs, shared))
    }

    /// The command line of `program`, the `micro` program, that runs this guest.
    pub fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.arg("--name").arg(&self.name);
        for text in &self.vcpus {
            command.arg("--vcpu").arg(text);
        }
        let mut option = |name: &str, value: String| {
            command.arg(name).arg(value);
        };
        option("--memory-mib", self.memory_mib.to_string());
        option("--pause-window", self.pause_window.to_string());
        if self.idle_vcpus > 0 {
            option("--idle-vcpus", self.idle_vcpus.to_string());
        }
        if let Some(iterations) = self.iterations_per_ms {
            option("--iterations-per-ms", iterations.to_string());
        }
        if let Some(seconds) = self.seconds {
            option("--seconds", seconds.to_string());
        }
        if let Some(path) = &self.state {
            command.arg("--state").arg(path);
        }
        let switches = [
            (self.hlt_passthrough, "--hlt-passthrough"),
            (self.pause_passthrough, "--pause-passthrough"),
            (self.count_exits, "--count-exits"),
        ];
        command.args(
            switches
                .into_iter()
                .filter(|(on, _)| *on)
                .map(|(_, name)| name),
        );
        command
    }

    /// Starts the guest with the `micro` program beside the running program, else in PATH, and waits until it runs.
    ///
    /// Affinity and cgroup are inherited. The guest ends when the [`Running`] is dropped, and by itself when the
    /// process that started it is gone.
    pub fn spawn(&self) -> Result<Running> {
        self.spawn_by(&micro_program())
    }

    /// As [`Spec::spawn`], with a `micro` program of choice.
    pub fn spawn_by(&self, program: &Path) -> Result<Running> {
        self.spawn_with(program, |_| {})
    }

    /// As [`Spec::spawn_by`], after `prepare` has changed the command, by a `pre_exec` that enters a cgroup for example.
    pub fn spawn_with(
        &self,
        program: &Path,
        prepare: impl FnOnce(&mut Command),
    ) -> Result<Running> {
        let spec = match &self.state {
            Some(_) => self.clone(),
            None => self.clone().state(self.own_state_path()),
        };
        spec.compile()?;
        let path = spec.state.clone().context("a state file was just chosen")?;
        let mut command = spec.command(program);
        command.arg("--parent").arg(std::process::id().to_string());
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        prepare(&mut command);
        let child = command.spawn().with_context(|| {
            format!(
                "{} cannot be started: build it, or put it beside this program or into PATH",
                program.display()
            )
        })?;
        Starting {
            child: Some(child),
            path,
        }
        .wait()
    }

    /// A path that no other guest of this or another process has.
    fn own_state_path(&self) -> PathBuf {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        Path::new(STATE_FOLDER).join(format!("micro-{}-{number}", std::process::id()))
    }
}

fn micro_program() -> PathBuf {
    let beside = std::env::current_exe()
        .ok()
        .and_then(|program| Some(program.parent()?.join("micro")));
    beside
        .filter(|path| path.exists())
        .unwrap_or_else(|| "micro".into())
}

/// A guest that was started but is not ready yet; killed if that does not come to be.
struct Starting {
    child: Option<Child>,
    path: PathBuf,
}

impl Starting {
    fn wait(mut self) -> Result<Running> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let child = self
                .child
                .as_mut()
                .context("the guest was started already")?;
            if let Some(status) = child
                .try_wait()
                .context("the guest's process cannot be waited for")?
            {
                bail!(
                    "the guest ended before it was ready ({status}): {}",
                    errors_of(child)
                );
            }
            // The file of an earlier guest may still be there: the VMM replaces it when it is ready.
            if let Ok(state) = State::open(&self.path)
                && state.pid() == child.id() as i32
            {
                let child = self.child.take().context("the guest was started already")?;
                return Ok(Running {
                    child: Some(child),
                    state,
                });
            }
            ensure!(
                Instant::now() < deadline,
                "the guest was not ready within {PATIENCE:?}: is the host overloaded? It was killed"
            );
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            end(child);
        }
    }
}

/// A guest that runs. Dropping it kills it and removes its state file.
pub struct Running {
    child: Option<Child>,
    /// Its counters and flags.
    pub state: State,
}

impl Running {
    /// Process id of the VMM.
    pub fn pid(&self) -> i32 {
        self.state.pid()
    }

    /// Has a new thread take each vCPU over, and waits until all have; the former threads sleep from then on.
    pub fn hand_over(&self) -> Result<()> {
        let tids = || -> Vec<i32> { self.state.vcpus().map(|vcpu| vcpu.tid).collect() };
        let before = tids();
        kill(Pid::from_raw(self.pid()), Signal::SIGUSR1).context("the guest is gone")?;
        let deadline = Instant::now() + PATIENCE;
        while tids()
            .iter()
            .zip(&before)
            .any(|(now, before)| now == before)
        {
            ensure!(
                Instant::now() < deadline,
                "the guest's vCPUs have had the same threads for {PATIENCE:?}"
            );
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Ends the guest as an operator would (SIGTERM); its totals.
    pub fn stop(mut self) -> Result<Totals> {
        let mut child = self.child.take().context("the guest was stopped already")?;
        // An error means that the process is gone; its exit status below says why.
        let _ = kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM);
        let status = wait_for(&mut child)?;
        ensure!(
            status.success(),
            "the guest {} failed ({status}): {}",
            self.state.name(),
            errors_of(&mut child)
        );
        let mut line = String::new();
        let mut stdout = child
            .stdout
            .take()
            .context("the guest's output was not kept")?;
        stdout
            .read_to_string(&mut line)
            .context("the guest's output cannot be read")?;
        serde_json::from_str(&line)
            .with_context(|| format!("the guest's totals cannot be understood: {line}"))
    }

    /// Fails, with the VMM's message, if the guest has ended by itself.
    pub fn check(&mut self) -> Result<()> {
        let child = self
            .child
            .as_mut()
            .context("the guest was stopped already")?;
        match child
            .try_wait()
            .context("the guest's process cannot be waited for")?
        {
            Some(status) => bail!(
                "the guest {} ended ({status}): {}",
                self.state.name(),
                errors_of(child)
            ),
            None => Ok(()),
        }
    }

    /// Kills the guest without a chance to clean up (SIGKILL), as the tests of the scheduler do.
    pub fn kill(mut self) {
        if let Some(mut child) = self.child.take() {
            end(&mut child);
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            end(child);
        }
        // An error means that somebody else has removed it.
        let _ = std::fs::remove_file(self.state.path());
    }
}

/// Kills a process and waits for it; an error means that it is gone already.
fn end(child: &mut Child) {
    let _ = child.kill();
    let _ = child.wait();
}

fn wait_for(child: &mut Child) -> Result<ExitStatus> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(status) = child
            .try_wait()
            .context("the guest's process cannot be waited for")?
        {
            return Ok(status);
        }
        if Instant::now() >= deadline {
            end(child);
            bail!(
                "the guest did not end within {PATIENCE:?} of SIGTERM: is the host overloaded? It was killed"
            );
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// What a process that has ended wrote to its standard error.
fn errors_of(child: &mut Child) -> String {
    let mut text = String::new();
    if let Some(stderr) = &mut child.stderr
        && let Err(error) = stderr.read_to_string(&mut text)
    {
        return format!("its message cannot be read ({error})");
    }
    if text.trim().is_empty() {
        "it wrote no message".into()
    } else {
        text.trim().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(spec: Spec) -> String {
        format!("{:#}", spec.compile().unwrap_err())
    }

    #[test]
    fn impossible_guests_are_refused_with_a_sentence() {
        assert!(refusal(Spec::new("a")).contains("has no vCPU"));
        assert!(refusal(Spec::new("")).contains("1 to 63 bytes"));
        assert!(
            refusal(Spec::new("a").vcpu("halt").idle_vcpus(256)).contains("257 vCPUs: at most 256")
        );
        assert!(
            refusal(Spec::new("a").vcpu("ipi 2 0x41").idle_vcpus(1))
                .contains("the guest's last vCPU is 1")
        );
        assert!(
            refusal(Spec::new("a").vcpu("halt").vcpu("hlt"))
                .starts_with("the program of vCPU 1 is wrong: `hlt`")
        );
        assert!(
            refusal(Spec {
                memory_mib: 1,
                ..Spec::new("a").vcpu("halt")
            })
            .contains("from 2 to 1024")
        );
        assert!(
            refusal(Spec::new("a").vcpu("halt").pause_window(Quantity::Count(0)))
                .contains("--pause-window is zero")
        );
    }

    #[test]
    fn idle_vcpus_follow_those_with_programs() {
        let (programs, _) = Spec::new("a")
            .vcpu("loop: compute 1")
            .idle_vcpus(255)
            .compile()
            .unwrap();
        assert_eq!(programs.len(), 256);
        assert_eq!(programs[255], Program::idle());
    }

    #[test]
    fn a_scenario_file_says_what_it_changes_only() {
        let spec: Spec =
            serde_json::from_str(r#"{"vcpus": ["loop: halt"], "pause_window": "20us"}"#).unwrap();
        assert_eq!(
            spec,
            Spec::new("micro")
                .vcpu("loop: halt")
                .pause_window(Quantity::Nanoseconds(20_000))
        );
        let error = serde_json::from_str::<Spec>(r#"{"vcpu": []}"#)
            .unwrap_err()
            .to_string();
        assert!(error.contains("unknown field `vcpu`"), "{error}");
    }

    #[test]
    fn a_spec_survives_json() {
        let spec = Spec::new("b")
            .vcpu("halt")
            .state("/run/b")
            .iterations_per_ms(5)
            .count_exits();
        assert_eq!(
            serde_json::from_str::<Spec>(&serde_json::to_string(&spec).unwrap()).unwrap(),
            spec
        );
    }

    #[test]
    fn a_program_that_is_not_there_is_named() {
        let error = Spec::new("a")
            .vcpu("halt")
            .spawn_by(Path::new("/nonexistent/micro"))
            .err()
            .unwrap();
        assert!(
            error
                .to_string()
                .starts_with("/nonexistent/micro cannot be started"),
            "{error}"
        );
    }

    #[test]
    fn a_guest_that_fails_to_start_is_reported() {
        let error = Spec::new("a")
            .vcpu("halt")
            .spawn_by(Path::new("/bin/false"))
            .err()
            .unwrap();
        assert!(
            error
                .to_string()
                .contains("ended before it was ready (exit status: 1)"),
            "{error}"
        );
    }
}
