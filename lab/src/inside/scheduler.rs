// SPDX-License-Identifier: GPL-2.0-only
//! Exchanging L1's scheduler: starting Cohort or any other sched_ext scheduler, knowing that it has taken over,
//! and getting the stock one back. Not for what a scheduler does while it runs.
use std::fs::{self, File};
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use super::process;

const SYSFS: &str = "/sys/kernel/sched_ext";
const LOG_DIRECTORY: &str = "/out/schedulers";
const START_TIMEOUT: Duration = Duration::from_secs(30);
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// A scheduler to run windows under.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub enum Scheduler {
    /// The kernel's own.
    Stock,
    /// A program that loads a sched_ext scheduler, runs in the foreground and leaves at SIGTERM.
    Program {
        /// What tables call it.
        name: String,
        /// The program and its arguments.
        command: Vec<String>,
        /// What the name of its sched_ext operations starts with; any when empty.
        ops_prefix: String,
        /// Whether it reports READY=1 to NOTIFY_SOCKET when it has taken over.
        notifies: bool,
    },
}

impl Scheduler {
    /// `cohort run` with further arguments.
    pub fn cohort(arguments: &[&str]) -> Self {
        let command = ["cohort", "run"]
            .iter()
            .chain(arguments)
            .map(|word| (*word).to_owned())
            .collect();
        Self::Program {
            name: "cohort".into(),
            command,
            ops_prefix: "cohort".into(),
            notifies: true,
        }
    }

    /// Any other scheduler, from its command line, such as `scx_simple -f`.
    pub fn other(command: &[String]) -> Result<Self> {
        ensure!(!command.is_empty(), "A scheduler needs a command");
        let name = Path::new(&command[0])
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        Ok(Self::Program {
            name,
            command: command.to_vec(),
            ops_prefix: String::new(),
            notifies: false,
        })
    }

    /// What tables call it.
    pub fn name(&self) -> &str {
        match self {
            Self::Stock => "stock",
            Self::Program { name, .. } => name,
        }
    }

    /// Lets it take over: returns when it schedules. For the stock scheduler there is nothing to start.
    ///
    /// # Errors
    /// When another scheduler is loaded, or this one does not take over: with what it printed.
    pub fn start(&self) -> Result<Option<RunningScheduler>> {
        let state = state()?;
        ensure!(
            state == "disabled",
            "A scheduler is loaded already ({}, {state}); it must be stopped before {} can start",
            loaded_ops(),
            self.name()
        );
        match self {
            Self::Stock => Ok(None),
            Self::Program {
                name,
                command,
                ops_prefix,
                notifies,
            } => RunningScheduler::start(name, command, ops_prefix, *notifies).map(Some),
        }
    }
}

/// The state of sched_ext: "disabled", "enabling", "enabled" or "disabling".
///
/// # Errors
/// When this kernel has no sched_ext.
pub fn state() -> Result<String> {
    let path = format!("{SYSFS}/state");
    let text = fs::read_to_string(&path)
        .with_context(|| format!("{path} cannot be read: no sched_ext here"))?;
    Ok(text.trim().to_owned())
}

/// The name of the loaded scheduler's operations; empty when there is none.
pub fn loaded_ops() -> String {
    // The file exists only while a scheduler is loaded.
    fs::read_to_string(format!("{SYSFS}/root/ops"))
        .unwrap_or_default()
        .trim()
        .to_owned()
}

/// A scheduler's end.
#[derive(Debug)]
pub struct Exit {
    /// How its process ended.
    pub status: ExitStatus,
    /// From the signal until the kernel's own scheduler was back, lab time.
    pub back_to_stock_after: Duration,
    /// All it printed.
    pub output: String,
}

/// What is known of schedulers that had ended by themselves when they were dropped, and that nobody was told yet.
static UNTOLD_ENDS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Takes the sentences, with all that the schedulers printed, about those that ended by themselves and were dropped
/// without anybody checking them: what fails first is usually something that relied on them.
pub fn untold_ends() -> Vec<String> {
    std::mem::take(&mut UNTOLD_ENDS.lock().unwrap_or_else(PoisonError::into_inner))
}

/// A scheduler that has taken over. Dropped, it is killed, and the kernel takes its scheduling back; if it had ended
/// by itself, [`untold_ends`] says so.
#[derive(Debug)]
pub struct RunningScheduler {
    name: String,
    process: Child,
    log: PathBuf,
    /// Its end, or that it did not start, is told by an error or was asked for.
    end_is_known: bool,
}

impl RunningScheduler {
    fn start(name: &str, command: &[String], ops_prefix: &str, notifies: bool) -> Result<Self> {
        let notifications = Notifications::new()?;
        let log = log_path(name)?;
        let output =
            File::create(&log).with_context(|| format!("{} cannot be written", log.display()))?;
        let mut program = Command::new(&command[0]);
        program
            .args(&command[1..])
            .env("NOTIFY_SOCKET", notifications.path())
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output);
        // As on a real host it may run anywhere, not only where the harness keeps itself.
        let process = process::start(program, &[], None)?;
        let mut running = Self {
            name: name.into(),
            process,
            log,
            end_is_known: true,
        };
        let mut ready = !notifies;
        process::wait_for(
            &format!("Taking over by scheduler {name}"),
            START_TIMEOUT,
            || {
                if let Some(status) = running.process.try_wait()? {
                    bail!("Scheduler {name} ended by itself ({status})");
                }
                ready |= notifications.ready();
                Ok(
                    (ready && state()? == "enabled" && loaded_ops().starts_with(ops_prefix))
                        .then_some(()),
                )
            },
        )
        .map_err(|error| {
            let state = state().unwrap_or_default();
            anyhow!(
                "{error:#}. sched_ext is {state}. It printed:\n{}",
                running.output()
            )
        })?;
        running.end_is_known = false;
        Ok(running)
    }

    /// Process id of its program.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// What it printed so far, standard output and error together.
    pub fn output(&self) -> String {
        // Read anew each time: it is a log that grows. An unreadable one is as good as empty.
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// Checks that it still schedules.
    ///
    /// # Errors
    /// When its program ended or the kernel ejected it, with what it printed.
    pub fn check(&mut self) -> Result<()> {
        let result = self.still_schedules();
        self.end_is_known |= result.is_err();
        result
    }

    fn still_schedules(&mut self) -> Result<()> {
        if let Some(status) = self.process.try_wait()? {
            bail!(
                "Scheduler {} ended by itself ({status}). It printed:\n{}",
                self.name,
                self.output()
            );
        }
        let state = state()?;
        if state != "enabled" {
            // Its program is about to print why; should it hang, what it printed so far must do.
            let _ = process::wait_for("Its end", STOP_TIMEOUT, || Ok(self.process.try_wait()?));
            bail!(
                "The kernel has ejected scheduler {} (sched_ext is {state}). It printed:\n{}",
                self.name,
                self.output()
            );
        }
        Ok(())
    }

    /// Ends it by SIGTERM and waits for the stock scheduler.
    ///
    /// # Errors
    /// When it had died by itself, ends with an error, or the stock scheduler is not back within ten seconds.
    pub fn stop(self) -> Result<Exit> {
        let name = self.name.clone();
        let exit = self.stop_with(Signal::SIGTERM)?;
        ensure!(
            exit.status.success() || exit.status.signal() == Some(Signal::SIGTERM as i32),
            "Scheduler {name} did not leave cleanly ({}). It printed:\n{}",
            exit.status,
            exit.output
        );
        Ok(exit)
    }

    /// Sends it `signal` and waits for its end and the stock scheduler's return, whatever its exit status.
    ///
    /// # Errors
    /// When it had died by itself, or the stock scheduler is not back within ten seconds.
    pub fn stop_with(mut self, signal: Signal) -> Result<Exit> {
        self.check()?;
        self.end_is_known = true;
        let start = Instant::now();
        kill(Pid::from_raw(self.pid() as i32), signal)
            .with_context(|| format!("{signal} cannot be sent to scheduler {}", self.name))?;
        wait_for_stock()?;
        let back_to_stock_after = start.elapsed();
        let what = format!("The end of scheduler {}", self.name);
        let status = process::wait_for(&what, STOP_TIMEOUT, || Ok(self.process.try_wait()?))?;
        Ok(Exit {
            status,
            back_to_stock_after,
            output: self.output(),
        })
    }
}

impl Drop for RunningScheduler {
    fn drop(&mut self) {
        // Before it is killed: one that the kernel has ejected is given the time to print why, and the dump.
        if !self.end_is_known
            && let Err(error) = self.check()
        {
            UNTOLD_ENDS
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(format!("{error:#}"));
        }
        // After stop_with it is gone already, which is what is wanted.
        let _ = self.process.kill();
        let _ = self.process.wait();
        // The kernel takes back asynchronously, and whoever comes next expects the stock scheduler.
        if let Err(error) = wait_for_stock() {
            eprintln!("{error:#}");
        }
    }
}

fn wait_for_stock() -> Result<()> {
    process::wait_for("The stock scheduler's return", STOP_TIMEOUT, || {
        Ok((state()? == "disabled").then_some(()))
    })
}

fn log_path(name: &str) -> Result<PathBuf> {
    static STARTED: AtomicU32 = AtomicU32::new(0);
    let number = STARTED.fetch_add(1, Ordering::Relaxed);
    fs::create_dir_all(LOG_DIRECTORY).with_context(|| format!("{LOG_DIRECTORY} cannot be made"))?;
    Ok(PathBuf::from(LOG_DIRECTORY).join(format!("{name}-{}-{number}.log", std::process::id())))
}

/// The receiving end of systemd's notification protocol.
struct Notifications {
    directory: TempDir,
    socket: UnixDatagram,
}

impl Notifications {
    fn new() -> Result<Self> {
        let directory = tempfile::tempdir().context("No directory for the notification socket")?;
        let socket = UnixDatagram::bind(directory.path().join("notify"))
            .context("No notification socket")?;
        socket.set_nonblocking(true)?;
        Ok(Self { directory, socket })
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("notify")
    }

    /// Whether READY=1 is among the messages that arrived since the last call.
    fn ready(&self) -> bool {
        let mut message = [0; 4096];
        let mut ready = false;
        while let Ok(length) = self.socket.recv(&mut message) {
            ready |= message[..length]
                .split(|byte| *byte == b'\n')
                .any(|line| line == b"READY=1");
        }
        ready
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_is_seen_among_other_messages() {
        let notifications = Notifications::new().unwrap();
        let sender = UnixDatagram::unbound().unwrap();
        assert!(!notifications.ready());
        sender
            .send_to(b"STATUS=loading\nX=READY=1", notifications.path())
            .unwrap();
        assert!(!notifications.ready());
        sender
            .send_to(b"STATUS=running\nREADY=1\n", notifications.path())
            .unwrap();
        assert!(notifications.ready());
    }

    #[test]
    fn schedulers_are_named_after_their_program() {
        assert_eq!(Scheduler::Stock.name(), "stock");
        assert_eq!(Scheduler::cohort(&["--stats", "1"]).name(), "cohort");
        assert_eq!(
            Scheduler::other(&["/usr/bin/scx_simple".into()])
                .unwrap()
                .name(),
            "scx_simple"
        );
        assert!(Scheduler::other(&[]).is_err());
    }
}
