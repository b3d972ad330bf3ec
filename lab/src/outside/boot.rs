// SPDX-License-Identifier: GPL-2.0-only
//! Boots L1, runs one command in it and brings back its output, its exit code and what it left in /out. Whatever ends
//! the lab ends the emulator: the run's own files are in memory or in its folder. Not for what happens inside L1, nor for
//! what the machine is (machine/).

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use super::cache::Cache;
use super::console;
use super::image::{self, Image};
use super::initrd::Payload;
use super::kernel::Kernels;
use super::machine::bochs::{Bochs, CYLINDER_BYTES};
use super::machine::{GUEST_IMAGE, Kind, Machine, Media, Running, Topology, Vendor};
use super::memory_file;
use super::others::{OtherLoad, Watch};
use super::tool::{self, Interrupted, io_sentence};
use crate::inside::info::LabInfo;

/// Exit code of `lab` when L1 failed: a panic, a complaint of its kernel, an early end.
pub const EXIT_L1_FAILED: u8 = 123;
/// Exit code of `lab` when the time was up, as timeout(1) has it.
pub const EXIT_TIMEOUT: u8 = 124;
/// Exit code of `lab` when the run could not start.
pub const EXIT_NOT_STARTED: u8 = 125;
/// Exit code of `lab` after SIGINT, SIGTERM or SIGHUP.
pub const EXIT_INTERRUPTED: u8 = 130;

/// How long L1 may take to start the command: several times what it needs where other programs take most of this machine.
const BOOT_LIMIT: Duration = Duration::from_secs(300);
const BOOT_LIMIT_PER_CPU: Duration = Duration::from_secs(20);

/// How long L1 has to hand over /out after it was told to stop. Guests that still run slow an emulated one down.
const STOP_LIMIT: Duration = Duration::from_secs(60);

/// The same after a panic, when nothing comes but the rest of what its kernel prints.
const PANIC_LIMIT: Duration = Duration::from_secs(3);

/// Room for /out. It takes memory only as far as it is used.
const OUT_BYTES: u64 = 2048 * CYLINDER_BYTES;

/// What each run leaves in its folder.
const LOGS: [&str; 4] = [CONSOLE, EMULATOR_LOG, "dmesg", MACHINE];

/// What other programs took of the machine, in the run's folder.
const MACHINE: &str = "machine.json";

/// What L1's kernel prints.
const CONSOLE: &str = "console.log";

/// What the emulator itself prints.
const EMULATOR_LOG: &str = "emulator.log";

/// How often a run on the fast machine is tried that its emulator spoils.
const ATTEMPTS: u32 = 3;

/// How often signals and deadlines are looked at.
const TICK: Duration = Duration::from_millis(50);

/// Options of `lab boot`.
#[derive(Debug, Args)]
pub struct Options {
    /// Kernel to boot, as `lab kernels` lists them [default: the newest sound one]
    #[arg(long, value_name = "RELEASE")]
    kernel: Option<String>,
    /// What executes L1 [default: hardware where this machine has nested virtualisation, else exact, or fast with --quick]
    #[arg(long, value_name = "KIND")]
    machine: Option<Kind>,
    /// The command does not depend on time: take the fast machine where there is no hardware
    #[arg(long, conflicts_with = "machine")]
    quick: bool,
    /// Shifts when guests and their timers begin, against each other and against the host's timers; the same seed gives the
    /// same run on the exact machine
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Whose CPUs L1 has, on the exact machine
    #[arg(long, value_name = "NAME", default_value = "amd")]
    vendor: Vendor,
    /// CPUs of L1 [default: 2; 3 on the fast machine, where the first is not for guests]
    #[arg(long)]
    cpus: Option<u32>,
    /// CPUs of L1, the first ones, on which no guest runs [default: 0; 1 on the fast machine, which needs it]
    #[arg(long, value_name = "N")]
    housekeeping: Option<u32>,
    /// Memory of L1 in MiB [default: 4096; 2048 on the exact machine, which has no more of it in ours]
    #[arg(long)]
    memory_mib: Option<u32>,
    /// Sockets of L1, each with its own last-level cache
    #[arg(long)]
    sockets: Option<u32>,
    /// Cores per socket
    #[arg(long)]
    cores: Option<u32>,
    /// Threads per core
    #[arg(long)]
    threads: Option<u32>,
    /// Seconds of our time that the run may take
    #[arg(long, default_value_t = 900)]
    timeout_s: u64,
    /// Attach the image that guests with real workloads (redis, dbench, vips, restic) need; it is made if it is not in
    /// the cache
    #[arg(long)]
    guest_image: bool,
    /// More kernel parameters for L1
    #[arg(long, default_value = "", allow_hyphen_values = true)]
    append: String,
    /// Folder for what the run leaves [default: out/TIME-PID]
    #[arg(long)]
    out: Option<PathBuf>,
    /// Command to run in L1, with its arguments
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

/// How a run ended.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    /// The command ended with this code.
    Exit(u8),
    /// L1's kernel complained.
    Complaint(String),
    /// The emulator ended before the command did.
    Died,
    /// The command was not started in time.
    NotBooted,
    /// The time was up.
    TimedOut,
    /// The lab was told to stop.
    Interrupted,
}

/// What the threads that read from L1 report.
enum Event {
    Control(String),
    Complaint(String),
    /// The console is closed: the emulator has ended.
    Ended,
}

/// Boots L1 as the options say and returns the exit code for `lab`.
pub fn boot(options: &Options) -> Result<u8> {
    tool::catch_signals()?;
    let kind = options.machine;
    let kind = kind.unwrap_or_else(|| Kind::default_here(options.quick));
    kind.check()?;
    let levels = [options.sockets, options.cores, options.threads];
    let topology = Topology::new(options.cpus, kind.default_cpus(), levels)?;
    options.vendor.check(kind)?;
    topology.check(kind)?;
    let cache = Cache::open()?;
    let kernels = Kernels::load(&cache, false)?;
    let kernel = match &options.kernel {
        Some(release) => kernels.of_release(release)?,
        None => kernels.newest_sound()?,
    };
    let image = Image::ready(&cache)?;
    let bochs = (kind == Kind::Exact).then(|| Bochs::ready(&cache));
    let guest_image = options.guest_image.then(|| image::guest_image(&cache));
    let guest_image = guest_image.transpose()?;
    let machine = Machine {
        kind,
        bochs: bochs.transpose()?,
        image: &image,
        kernel: &kernel,
        topology,
        vendor: options.vendor,
        memory_mib: options.memory_mib.unwrap_or(kind.default_memory_mib()),
        guest_image: guest_image.as_deref(),
        append: &options.append,
    };
    let description = describe(&machine, options)?;
    let mut attempt = 1;
    loop {
        let folder = RunFolder::create(options.out.as_deref())?;
        let outcome = run_once(&machine, options, &description, &folder.path)?;
        let code = folder.conclude(&outcome, options.timeout_s)?;
        let fault = folder.emulators_fault(&outcome, kind);
        let Some(fault) = fault.filter(|_| attempt < ATTEMPTS) else {
            return Ok(code);
        };
        attempt += 1;
        eprintln!(
            "lab: {fault}. What this run printed is void; it is repeated (attempt {attempt} of {ATTEMPTS})."
        );
    }
}

fn run_once(
    machine: &Machine<'_>,
    options: &Options,
    description: &str,
    folder: &Path,
) -> Result<Outcome> {
    let payload = Payload {
        kernel: machine.kernel,
        image: machine.image,
        command: &options.command,
        description,
        with_guest_image: options.guest_image,
        run_folder: folder,
    };
    let initrd = payload.pack()?;
    let out = memory_file()?;
    out.set_len(OUT_BYTES).context("No memory for /out.")?;
    let run = Run::start(machine, &initrd, &out, folder)?;
    drop(initrd);
    let others = Watch::begin(run.emulator.id());
    let boot_limit = BOOT_LIMIT + machine.topology.cpus() * BOOT_LIMIT_PER_CPU;
    let outcome = run.supervise(boot_limit, Duration::from_secs(options.timeout_s));
    let others = others.end();
    run.end()?;
    unpack(out, folder)?;
    record_others(&others?, machine, folder)?;
    Ok(outcome)
}

/// Says it if figures of this run are worth nothing. The exact machine does not mind others.
fn record_others(load: &OtherLoad, machine: &Machine<'_>, folder: &Path) -> Result<()> {
    let json = serde_json::to_string_pretty(load).context("The machine cannot be described.")?;
    let path = folder.join(MACHINE);
    fs::write(&path, json + "\n")
        .map_err(|error| io_sentence(&format!("{} cannot be written", path.display()), &error))?;
    if machine.kind == Kind::Hardware && load.voids_figures(machine.topology.cpus()) {
        eprintln!(
            "lab: other programs used {:.2} of a CPU while this ran, {:.2} in the busiest 10 s; figures from it are \
             void",
            load.other_load, load.other_load_busiest_10s
        );
    }
    Ok(())
}

fn describe(machine: &Machine<'_>, options: &Options) -> Result<String> {
    let cpus = machine.topology.cpus();
    let housekeeping = options.housekeeping;
    let housekeeping = housekeeping.unwrap_or(machine.kind.default_housekeeping());
    ensure!(
        housekeeping < cpus,
        "--housekeeping {housekeeping} leaves none of {cpus} CPUs for guests."
    );
    let description = LabInfo {
        machine: machine.kind,
        emulator: machine.emulator(),
        kernel: machine.kernel.judged.candidate.release.clone(),
        qemu: machine.image.qemu_version.clone(),
        cpus,
        topology: machine.topology.to_string(),
        guest_cpus: (housekeeping..cpus).collect(),
        housekeeping_cpus: (0..housekeeping).collect(),
        guest_image: machine.guest_image.map(|_| GUEST_IMAGE.into()),
        seed: options.seed,
    };
    serde_json::to_string_pretty(&description).context("The lab cannot be described.")
}

/// The folder with all that a run leaves.
struct RunFolder {
    path: PathBuf,
    was_asked_for: bool,
}

impl RunFolder {
    fn create(asked: Option<&Path>) -> Result<Self> {
        let name = || {
            format!(
                "{}-{}",
                chrono::Utc::now().format("%Y%m%dT%H%M%S"),
                std::process::id()
            )
        };
        let path = asked.map_or_else(|| Path::new("out").join(name()), Path::to_path_buf);
        fs::create_dir_all(&path).map_err(|error| {
            io_sentence(
                &format!("The folder {} cannot be created", path.display()),
                &error,
            )
        })?;
        Ok(Self {
            path,
            was_asked_for: asked.is_some(),
        })
    }

    /// Says what happened and returns the exit code for `lab`.
    fn conclude(&self, outcome: &Outcome, timeout_s: u64) -> Result<u8> {
        let left = format!(
            "Its console, dmesg and /out are in {}.",
            self.path.display()
        );
        let code = match outcome {
            Outcome::Exit(code) => {
                if *code == 0 {
                    self.remove_if_uneventful();
                }
                return Ok(*code);
            }
            Outcome::Complaint(line) => {
                let place = console::place(&self.console());
                let place = if place.is_empty() {
                    place
                } else {
                    format!(" at {place}")
                };
                eprintln!("lab: L1's kernel complained: \"{line}\"{place}. {left}");
                EXIT_L1_FAILED
            }
            Outcome::Died => {
                eprintln!(
                    "lab: The emulator of L1 ended before the command did; {EMULATOR_LOG} may say why. {left}"
                );
                EXIT_L1_FAILED
            }
            Outcome::NotBooted => {
                eprintln!("lab: L1 did not boot in time. {left}");
                EXIT_L1_FAILED
            }
            Outcome::TimedOut => {
                eprintln!(
                    "lab: the command did not end within {timeout_s} s (--timeout-s). {left}"
                );
                EXIT_TIMEOUT
            }
            Outcome::Interrupted => bail!(Interrupted),
        };
        Ok(code)
    }

    /// What L1's kernel printed.
    fn console(&self) -> String {
        // Without it less is known, and said.
        let bytes = fs::read(self.path.join(CONSOLE)).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// What the emulator did wrong, if it was that which failed, so that the run says nothing.
    fn emulators_fault(&self, outcome: &Outcome, kind: Kind) -> Option<&'static str> {
        if kind != Kind::Fast {
            return None;
        }
        match outcome {
            Outcome::Complaint(_) if console::is_stale_translation(&self.console()) => Some(
                "QEMU executed an instruction that L1's memory does not hold: the fault is the emulator's, not the \
                 kernel's",
            ),
            // Seen once in some hundred boots, with its CPUs just started; nothing had begun that could be at fault.
            Outcome::NotBooted => Some("An emulated CPU may have stood still"),
            _ => None,
        }
    }

    /// A folder that nobody asked for and that holds nothing but the logs of a run that went well would only pile up.
    fn remove_if_uneventful(&self) {
        let is_log = |name: &std::ffi::OsStr| LOGS.iter().any(|log| name == *log);
        let only_logs = fs::read_dir(&self.path)
            .is_ok_and(|entries| entries.flatten().all(|entry| is_log(&entry.file_name())));
        if !self.was_asked_for && only_logs {
            // What cannot be removed does no harm.
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

/// A running L1 and the threads that read from it.
struct Run {
    emulator: Child,
    events: Receiver<Event>,
    to_control: File,
    control_far_end: Option<File>,
    readers: Vec<JoinHandle<()>>,
}

impl Run {
    fn start(machine: &Machine<'_>, initrd: &File, out: &File, folder: &Path) -> Result<Self> {
        let console_log = create(&folder.join(CONSOLE))?;
        let log = &create(&folder.join(EMULATOR_LOG))?;
        let Running {
            process,
            console,
            stdout,
            control,
            far_end,
        } = machine.start(&Media { initrd, out, log })?;
        let (sender, events) = mpsc::channel();
        let to_control = control.try_clone();
        let mut readers = forward_output(stdout);
        readers.push(read_console(console, console_log, sender.clone()));
        readers.push(read_control(control, sender));
        Ok(Self {
            emulator: process,
            events,
            to_control: to_control.context("The control port cannot be shared.")?,
            control_far_end: far_end,
            readers,
        })
    }

    /// Watches the run until it is decided how it ended.
    fn supervise(&self, boot_limit: Duration, limit: Duration) -> Outcome {
        let start = Instant::now();
        let mut is_ready = false;
        // Once set, L1 was told to stop: the reason is the outcome, what is awaited is /out.
        let mut stopping: Option<(Outcome, Instant)> = None;
        loop {
            let reason = match self.events.recv_timeout(TICK) {
                Ok(Event::Control(line)) if line == "ready" => {
                    is_ready = true;
                    None
                }
                Ok(Event::Control(line)) => {
                    let exit = line
                        .strip_prefix("exit ")
                        .and_then(|code| code.parse().ok());
                    return decided(stopping, exit.map_or(Outcome::Died, Outcome::Exit));
                }
                Ok(Event::Ended) | Err(RecvTimeoutError::Disconnected) => {
                    return decided(stopping, Outcome::Died);
                }
                Ok(Event::Complaint(line)) => Some(Outcome::Complaint(line)),
                Err(RecvTimeoutError::Timeout) => None,
            };
            if tool::interrupted() {
                return Outcome::Interrupted;
            }
            let now = Instant::now();
            let overdue = if now > start + limit {
                Some(Outcome::TimedOut)
            } else {
                (!is_ready && now > start + boot_limit).then_some(Outcome::NotBooted)
            };
            match &stopping {
                Some((_, until)) if now > *until => return decided(stopping, Outcome::Died),
                Some(_) => {}
                None => {
                    if let Some(reason) = reason.or(overdue) {
                        self.tell_to_stop();
                        let until = now + stop_limit(&reason);
                        stopping = Some((reason, until));
                    }
                }
            }
        }
    }

    fn tell_to_stop(&self) {
        // If L1 does not listen any more, the time to stop runs out.
        let _ = (&self.to_control).write_all(b"stop\n");
    }

    /// Ends the emulator and waits until all that it had handed over is written.
    fn end(mut self) -> Result<()> {
        // An error means that it ended before.
        let _ = self.emulator.kill();
        self.emulator
            .wait()
            .context("The emulator of L1 could not be waited for.")?;
        drop(self.control_far_end);
        for reader in self.readers {
            // A reader that panicked has printed why.
            let _ = reader.join();
        }
        Ok(())
    }
}

/// How long L1 has to hand over what it has.
fn stop_limit(reason: &Outcome) -> Duration {
    match reason {
        Outcome::Complaint(line) if line.contains("Kernel panic") => PANIC_LIMIT,
        _ => STOP_LIMIT,
    }
}

fn decided(stopping: Option<(Outcome, Instant)>, otherwise: Outcome) -> Outcome {
    stopping.map_or(otherwise, |(reason, _)| reason)
}

fn create(path: &Path) -> Result<File> {
    File::create(path)
        .map_err(|error| io_sentence(&format!("{} cannot be created", path.display()), &error))
}

/// Unpacks what L1 had in /out. Of a run that failed it may be missing; the run's sentence is enough then.
fn unpack(mut out: File, folder: &Path) -> Result<()> {
    out.rewind().context("/out cannot be read.")?;
    let mut command = Command::new("tar");
    command
        .args(["--no-same-owner", "-xf", "-", "-C"])
        .arg(folder);
    command
        .stdin(out)
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    tool::die_with_parent(&mut command, libc::SIGKILL);
    command.status().context("tar could not be started.")?;
    Ok(())
}

/// Copies the command's output to ours, as it comes. Two threads, because L1 spins with interrupts off while its emulator
/// waits for us: a slow reader of our output must not stop L1.
fn forward_output(mut from: File) -> Vec<JoinHandle<()>> {
    let (sender, chunks) = mpsc::channel::<Vec<u8>>();
    let reader = thread::spawn(move || {
        let mut buffer = [0; 65536];
        while let Ok(length @ 1..) = from.read(&mut buffer) {
            // The writer is gone if nobody reads our output; L1 goes on.
            let _ = sender.send(buffer[..length].to_vec());
        }
    });
    let writer = thread::spawn(move || {
        let mut stdout = std::io::stdout().lock();
        for chunk in chunks {
            if stdout
                .write_all(&chunk)
                .and_then(|()| stdout.flush())
                .is_err()
            {
                return;
            }
        }
    });
    vec![reader, writer]
}

/// Writes the console to its file and reports the kernel's complaints.
fn read_console(from: File, mut log: File, sender: Sender<Event>) -> JoinHandle<()> {
    thread::spawn(move || {
        let mut lines = BufReader::new(from);
        let mut line = Vec::new();
        while let Ok(1..) = lines.read_until(b'\n', &mut line) {
            if let Err(error) = log.write_all(&line) {
                eprintln!(
                    "lab: {}",
                    io_sentence("The console cannot be recorded", &error)
                );
            }
            if let Some(complaint) = console::complaint(&String::from_utf8_lossy(&line)) {
                // Nobody listens any more once the outcome is decided.
                let _ = sender.send(Event::Complaint(complaint.to_string()));
            }
            line.clear();
        }
        let _ = sender.send(Event::Ended);
    })
}

fn read_control(from: File, sender: Sender<Event>) -> JoinHandle<()> {
    thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            // A serial port's driver may send a byte when it tries the port out.
            let line = line.trim_matches(|c: char| !c.is_ascii_graphic());
            let _ = sender.send(Event::Control(line.to_string()));
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_complaint_outlives_the_exit_code_that_follows_it() {
        let stopping = Some((Outcome::Complaint("BUG".into()), Instant::now()));
        assert_eq!(
            decided(stopping, Outcome::Exit(0)),
            Outcome::Complaint("BUG".into())
        );
        assert_eq!(decided(None, Outcome::Exit(3)), Outcome::Exit(3));
    }

    #[test]
    fn only_folders_with_something_in_them_are_kept_after_success() {
        let parent = tempfile::tempdir().unwrap();
        let folder = |name: &str, was_asked_for| {
            let path = parent.path().join(name);
            fs::create_dir(&path).unwrap();
            fs::write(path.join(CONSOLE), "").unwrap();
            RunFolder {
                path,
                was_asked_for,
            }
        };
        let (uneventful, asked, eventful) =
            (folder("a", false), folder("b", true), folder("c", false));
        fs::write(eventful.path.join("result.json"), "").unwrap();
        for folder in [&uneventful, &asked, &eventful] {
            assert_eq!(folder.conclude(&Outcome::Exit(0), 1).unwrap(), 0);
        }
        assert!(!uneventful.path.exists() && asked.path.exists() && eventful.path.exists());
    }

    #[test]
    fn each_failure_has_its_exit_code() {
        let folder = RunFolder {
            path: PathBuf::from("out/x"),
            was_asked_for: false,
        };
        assert_eq!(folder.conclude(&Outcome::Exit(7), 1).unwrap(), 7);
        assert_eq!(folder.conclude(&Outcome::Died, 1).unwrap(), EXIT_L1_FAILED);
        assert_eq!(
            folder.conclude(&Outcome::TimedOut, 1).unwrap(),
            EXIT_TIMEOUT
        );
        assert!(
            folder
                .conclude(&Outcome::Interrupted, 1)
                .unwrap_err()
                .is::<Interrupted>()
        );
    }
}
