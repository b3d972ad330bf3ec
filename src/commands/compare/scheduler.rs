// SPDX-License-Identifier: GPL-2.0-only
//! Exchanging the host's scheduler: starting Cohort or any other sched_ext scheduler, knowing that it has taken over,
//! and getting the stock one back. Not for what a scheduler does while it runs.
use std::fs::{self, File};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::str::FromStr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result, anyhow, bail, ensure};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use super::notify::Notifications;
use crate::host::paths::Host;
use crate::host::preflight;
use crate::process::wait::wait_for;

/// An emulated host takes more than half a minute to verify Cohort.
const START_TIMEOUT: Duration = Duration::from_secs(90);
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// A scheduler to run windows under.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub enum Scheduler {
    /// The kernel's own.
    Stock,
    /// A program that runs in the foreground, leaves at SIGTERM, and may load a sched_ext scheduler.
    Program {
        /// What tables call it.
        name: String,
        /// The program and its arguments.
        command: Vec<String>,
        /// What the name of its sched_ext operations starts with, any when empty; `None` if it loads none and the
        /// kernel's own scheduler stays.
        ops_prefix: Option<String>,
        /// Whether it reports READY=1 to NOTIFY_SOCKET when it has taken over.
        notifies: bool,
    },
}

impl Scheduler {
    /// `cohort run` with further arguments.
    pub fn cohort(arguments: &[&str]) -> Self {
        let words = |first: &[&str]| -> Vec<String> {
            let words = first.iter().chain(arguments);
            words.map(|word| (*word).to_owned()).collect()
        };
        Self::Program {
            name: words(&["cohort"]).join(" "),
            command: words(&[&own_program(), "run"]),
            ops_prefix: Some("cohort".into()),
            notifies: true,
        }
    }

    /// The kernel's own, with `cohort watch` beside it.
    pub fn watched() -> Self {
        Self::Program {
            name: "watched".into(),
            command: [&own_program(), "watch", "--json"]
                .map(str::to_owned)
                .to_vec(),
            ops_prefix: None,
            notifies: true,
        }
    }

    /// Any other scheduler, from its command line, such as `scx_simple -f`; a shell reads it.
    fn other(command: &str) -> Self {
        Self::Program {
            name: command.to_owned(),
            command: ["sh", "-c", command].map(str::to_owned).to_vec(),
            ops_prefix: Some(String::new()),
            notifies: false,
        }
    }

    /// What tables call it.
    pub fn name(&self) -> &str {
        match self {
            Self::Stock => "stock",
            Self::Program { name, .. } => name,
        }
    }

    /// The words behind `cohort run`, if it is that.
    pub fn options_of_run(&self) -> Option<impl Iterator<Item = &str>> {
        match self {
            Self::Program {
                command,
                ops_prefix: Some(prefix),
                ..
            } if prefix == "cohort" => Some(command.iter().skip(2).map(String::as_str)),
            _ => None,
        }
    }

    /// Lets it take over: returns when it schedules. For the stock scheduler there is nothing to start. What it prints
    /// is kept in a file in the folder `logs`, which is made if need be.
    ///
    /// # Errors
    /// When another scheduler is loaded, or this one does not take over: with what it printed.
    pub fn start(&self, logs: &Path) -> Result<Option<RunningScheduler>> {
        if let Some(loaded) = preflight::loaded_scheduler(&Host::live()) {
            bail!(
                "A scheduler is loaded already ({loaded}); it must be stopped before {} can start",
                self.name()
            );
        }
        match self {
            Self::Stock => Ok(None),
            Self::Program {
                name,
                command,
                ops_prefix,
                notifies,
            } => RunningScheduler::start(name, command, ops_prefix.as_deref(), *notifies, logs)
                .map(Some),
        }
    }
}

impl FromStr for Scheduler {
    type Err = Error;

    /// "stock", "cohort", "cohort OPTIONS…" as of `cohort run`, "watched", or any command line.
    fn from_str(text: &str) -> Result<Self> {
        let words: Vec<&str> = text.split_whitespace().collect();
        match words.split_first() {
            None => bail!("a scheduler needs a command"),
            Some((&"stock", [])) => Ok(Self::Stock),
            Some((&"watched", [])) => Ok(Self::watched()),
            Some((&"cohort", options)) => Ok(Self::cohort(options)),
            Some(_) => Ok(Self::other(text.trim())),
        }
    }
}

/// This program, if it is `cohort`, or the one that the search path has.
fn own_program() -> String {
    let own = std::env::current_exe().ok();
    let own = own.filter(|path| path.file_name().is_some_and(|name| name == "cohort"));
    own.and_then(|path| path.to_str().map(str::to_owned))
        .unwrap_or_else(|| "cohort".to_owned())
}

/// The state of this host's sched_ext: "disabled", "enabling", "enabled" or "disabling".
///
/// # Errors
/// When this kernel has no sched_ext.
pub fn state() -> Result<String> {
    preflight::sched_ext_state(&Host::live()).context("no sched_ext here")
}

/// The name of the loaded scheduler's operations; empty when there is none.
pub fn loaded_ops() -> String {
    preflight::scheduler_name(&Host::live()).unwrap_or_default()
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
    /// What sched_ext's state must be while it runs.
    state: &'static str,
    /// Its end, or that it did not start, is told by an error or was asked for.
    end_is_known: bool,
}

impl RunningScheduler {
    fn start(
        name: &str,
        command: &[String],
        ops_prefix: Option<&str>,
        notifies: bool,
        logs: &Path,
    ) -> Result<Self> {
        let notifications = Notifications::new()?;
        let log = log_path(logs, &command[0])?;
        let output =
            File::create(&log).with_context(|| format!("{} cannot be written", log.display()))?;
        let mut program = Command::new(&command[0]);
        program
            .args(&command[1..])
            .env("NOTIFY_SOCKET", notifications.path())
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            // So that all that a shell starts for it can be told to leave, and Ctrl-C is this program's to handle.
            .process_group(0);
        // SAFETY: the closure runs between fork and exec and makes one system call only.
        unsafe { program.pre_exec(|| Ok(set_pdeathsig(Signal::SIGKILL)?)) };
        let process = program
            .spawn()
            .with_context(|| format!("{} cannot be started", command[0]))?;
        let mut running = Self {
            name: name.into(),
            process,
            log,
            state: match ops_prefix {
                Some(_) => "enabled",
                None => "disabled",
            },
            end_is_known: true,
        };
        let mut ready = !notifies;
        wait_for(
            &format!("Taking over by scheduler {name}"),
            START_TIMEOUT,
            || {
                if let Some(status) = running.process.try_wait()? {
                    bail!("Scheduler {name} ended by itself ({status})");
                }
                ready |= notifications.ready();
                let ops_prefix = ops_prefix.unwrap_or_default();
                let took_over = state()? == running.state && loaded_ops().starts_with(ops_prefix);
                Ok((ready && took_over).then_some(()))
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
        if state != self.state {
            // Its program is about to print why; should it hang, what it printed so far must do.
            let _ = wait_for("Its end", STOP_TIMEOUT, || Ok(self.process.try_wait()?));
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
        // With all that a shell has started for it.
        killpg(Pid::from_raw(self.pid() as i32), signal)
            .with_context(|| format!("{signal} cannot be sent to scheduler {}", self.name))?;
        wait_for_stock()?;
        let back_to_stock_after = start.elapsed();
        let what = format!("The end of scheduler {}", self.name);
        let status = wait_for(&what, STOP_TIMEOUT, || Ok(self.process.try_wait()?))?;
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
        // After stop_with it is gone already, and its number may be somebody else's.
        if matches!(self.process.try_wait(), Ok(None)) {
            let _ = killpg(Pid::from_raw(self.pid() as i32), Signal::SIGKILL);
        }
        let _ = self.process.wait();
        // The kernel takes back asynchronously, and whoever comes next expects the stock scheduler.
        if let Err(error) = wait_for_stock() {
            eprintln!("{error:#}");
        }
    }
}

fn wait_for_stock() -> Result<()> {
    wait_for("The stock scheduler's return", STOP_TIMEOUT, || {
        Ok((state()? == "disabled").then_some(()))
    })
}

fn log_path(logs: &Path, program: &str) -> Result<PathBuf> {
    static STARTED: AtomicU32 = AtomicU32::new(0);
    let number = STARTED.fetch_add(1, Ordering::Relaxed);
    fs::create_dir_all(logs).with_context(|| format!("{} cannot be made", logs.display()))?;
    let program = Path::new(program).file_name().unwrap_or_default();
    let name = format!("{}-{}-{number}.log", program.display(), std::process::id());
    Ok(logs.join(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedulers_come_from_their_command_line_and_are_named_by_it() {
        let name = |text: &str| -> String {
            let scheduler: Scheduler = text.parse().expect("it is a scheduler");
            scheduler.name().to_owned()
        };
        assert_eq!(name("stock"), "stock");
        assert_eq!(name("cohort"), "cohort");
        assert_eq!(name("cohort --off ipi"), "cohort --off ipi");
        assert_eq!(name("/usr/bin/scx_simple -f"), "/usr/bin/scx_simple -f");
        assert!(" ".parse::<Scheduler>().is_err());
    }
}
