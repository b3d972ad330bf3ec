// SPDX-License-Identifier: GPL-2.0-only
//! Runs the machine's own tools (apt-get, mmdebstrap, xz, …) so that none outlives the lab and each failure is one
//! sentence. Not for QEMU, which is watched while it runs (boot.rs).

use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};

/// How often a running tool is looked at; also the longest time until an interrupt is passed on.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// How long a tool may take to end after an interrupt.
const END_LIMIT: Duration = Duration::from_secs(1);

static INTERRUPTED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// The lab was told to stop by SIGINT, SIGTERM or SIGHUP.
#[derive(Debug, thiserror::Error)]
#[error(
    "Interrupted: everything the lab had started was stopped and its temporary files are removed."
)]
pub struct Interrupted;

/// Nothing more can be written.
#[derive(Debug, thiserror::Error)]
#[error(
    "The disk is full: free some space (the lab needs about 3 GB in its cache folder, which XDG_CACHE_HOME can move) \
     and run the same command again."
)]
pub struct DiskFull;

/// Whether it is useless to go on with something else after this error.
pub fn is_final(error: &anyhow::Error) -> bool {
    error.is::<Interrupted>() || error.is::<DiskFull>()
}

/// From now on SIGINT, SIGTERM and SIGHUP stop the lab in order, through [`interrupted`], instead of killing it.
pub fn catch_signals() -> Result<()> {
    let flag = INTERRUPTED.get_or_init(Arc::default);
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(flag))
            .with_context(|| format!("The handler of signal {signal} could not be installed."))?;
    }
    Ok(())
}

/// Whether the lab was told to stop.
pub fn interrupted() -> bool {
    INTERRUPTED
        .get()
        .is_some_and(|flag| flag.load(Ordering::Relaxed))
}

/// Lets the kernel send `signal` to the child when the thread that starts it ends, be it by `kill -9`.
///
/// The signal is bound to the *thread*: start children from one that lives as long as they should.
pub fn die_with_parent(command: &mut Command, signal: libc::c_int) {
    let parent = std::process::id();
    // SAFETY: prctl(), getppid() and raise() are async-signal-safe and touch no memory of the parent.
    unsafe {
        command.pre_exec(move || {
            if libc::prctl(libc::PR_SET_PDEATHSIG, signal as libc::c_ulong) != 0 {
                return Err(io::Error::last_os_error());
            }
            // The parent may have died before prctl(): then nobody would send the signal.
            if libc::getppid() as u32 != parent {
                libc::raise(libc::SIGKILL);
            }
            Ok(())
        });
    }
}

/// Runs a tool to its end and returns its standard output; `purpose` completes "… to {purpose}".
pub fn run(command: &mut Command, purpose: &str) -> Result<Vec<u8>> {
    let name = command.get_program().to_string_lossy().into_owned();
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    die_with_parent(command, libc::SIGKILL);
    let mut child = command
        .spawn()
        .map_err(|error| not_started(&name, purpose, &error))?;
    let stdout = drain(child.stdout.take());
    let stderr = drain(child.stderr.take());
    let status = wait(&mut child).with_context(|| format!("{name} could not be waited for."))?;
    let stdout = stdout.join().unwrap_or_default();
    let stderr = String::from_utf8_lossy(&stderr.join().unwrap_or_default()).into_owned();
    if interrupted() {
        bail!(Interrupted);
    }
    if !status.success() {
        let failed = format!("{name} failed ({status}) to {purpose}");
        return Err(diagnosis(&stderr).context(failed));
    }
    Ok(stdout)
}

/// Reads a pipe to its end in the background, so that a tool never blocks on a full one.
fn drain(pipe: Option<impl Read + Send + 'static>) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            // A pipe that breaks ends the output; the tool's exit status tells what happened.
            let _ = pipe.read_to_end(&mut bytes);
        }
        bytes
    })
}

/// Waits for the tool; after an interrupt it is asked to end, then made to.
fn wait(child: &mut Child) -> io::Result<std::process::ExitStatus> {
    let mut asked_to_end: Option<Instant> = None;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        match asked_to_end {
            None if interrupted() => {
                // SAFETY: plain system call; the child was not waited for yet, so the id is still its own.
                unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGTERM) };
                asked_to_end = Some(Instant::now());
            }
            Some(asked) if asked.elapsed() > END_LIMIT => child.kill()?,
            _ => {}
        }
        thread::sleep(POLL_INTERVAL);
    }
}

fn not_started(name: &str, purpose: &str, error: &io::Error) -> anyhow::Error {
    if error.kind() == io::ErrorKind::NotFound {
        return anyhow!(
            "{name} is not installed and is needed to {purpose}: run lab/setup, which installs it."
        );
    }
    anyhow!("{name} could not be started to {purpose}: {error}.")
}

/// Why a tool failed, from what it printed.
fn diagnosis(stderr: &str) -> anyhow::Error {
    const NO_SPACE: &[&str] = &["No space left on device", "don't have enough free space"];
    const NO_NETWORK: &[&str] = &[
        "Could not resolve",
        "Temporary failure resolving",
        "Could not connect",
        "Unable to connect",
        "Network is unreachable",
        "Connection timed out",
        "Connection failed",
        "Connection refused",
    ];
    let says = |patterns: &[&str]| patterns.iter().any(|pattern| stderr.contains(pattern));
    if says(NO_SPACE) {
        return anyhow!(DiskFull);
    }
    if says(NO_NETWORK) {
        return anyhow!(
            "The Debian mirror of this machine's apt sources cannot be reached: check the network, then run the same \
             command again."
        );
    }
    let lines: Vec<&str> = stderr
        .lines()
        .filter(|line| !line.trim().is_empty())
        .collect();
    match &lines[lines.len().saturating_sub(5)..] {
        [] => anyhow!("It gave no reason."),
        tail => anyhow!("It said: {}", tail.join(" | ")),
    }
}

/// Turns an I/O error into a sentence; a full disk gets its remedy.
pub fn io_sentence(what: &str, error: &io::Error) -> anyhow::Error {
    if error.kind() == io::ErrorKind::StorageFull {
        return anyhow!(DiskFull).context(what.to_string());
    }
    anyhow!("{what}: {error}.")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_tool_names_the_remedy() {
        let error = run(&mut Command::new("cohort-no-such-tool"), "test this")
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("not installed") && error.contains("lab/setup"),
            "{error}"
        );
    }

    #[test]
    fn a_full_disk_and_a_missing_network_are_recognised() {
        let full = diagnosis("tar: x: Cannot write: No space left on device").context("tar failed");
        assert!(is_final(&full) && format!("{full:#}").contains("The disk is full"));
        let offline = diagnosis("Err:1 … Temporary failure resolving 'm'");
        assert!(!is_final(&offline) && offline.to_string().starts_with("The Debian mirror"));
        assert_eq!(
            diagnosis("E: one\n\nE: two\n").to_string(),
            "It said: E: one | E: two"
        );
        assert_eq!(diagnosis("").to_string(), "It gave no reason.");
    }

    #[test]
    fn output_and_exit_status_are_returned() {
        assert_eq!(
            run(Command::new("sh").args(["-c", "echo yes"]), "test").unwrap(),
            b"yes\n"
        );
        let error = run(
            Command::new("sh").args(["-c", "echo why >&2; exit 3"]),
            "test",
        )
        .unwrap_err();
        let error = format!("{error:#}");
        assert!(
            error.contains("exit status: 3") && error.contains("why"),
            "{error}"
        );
    }
}
