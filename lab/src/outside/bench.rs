// SPDX-License-Identifier: GPL-2.0-only
//! `lab bench`: runs cells of the matrix, each in an L1 of its own, some at a time, and keeps their results. What is kept
//! and still true is not measured again. Not for what happens in a cell (`inside::cell`) or for tables (`report`).
use std::collections::VecDeque;
use std::fs::{self, File};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::machine::Kind;
use super::tool::{self, Interrupted, io_sentence};
use crate::cell::{Cell, CellResult, Matrix};

/// Where the matrix is in a checkout.
pub const MATRIX: &str = "lab/matrix.toml";
/// Where the cells are of which something is published.
pub const PUBLISHED: &str = "lab/published.toml";
/// Where results are kept.
pub const RESULTS: &str = "out/bench";
/// What `lab inside cell` leaves in the run's folder.
const RESULT: &str = "result.json";
/// Programs whose change makes results void.
const PROGRAMS: [&str; 3] = ["cohort", "lab", "micro"];
/// Seconds of our time for one cell; twice what any may take.
const TIMEOUT_S: u32 = 1800;
/// How often children and signals are looked at.
const TICK: Duration = Duration::from_millis(100);
/// How long a child that was told to stop may take.
const STOP_LIMIT: Duration = Duration::from_secs(30);
/// Lines of a failed cell's log that are shown.
const LAST_LINES: usize = 5;

/// Options of `lab bench`.
#[derive(Debug, Args)]
pub struct Options {
    /// Cells to run, by their names in the file of cells [default: all]
    names: Vec<String>,
    /// The file of cells; lab/published.toml has those of which something is published
    #[arg(long, value_name = "FILE", default_value = MATRIX)]
    cells: PathBuf,
    /// Cells that run at a time, each on about one of our cores [default: 2; 1 on the hardware machine, where each would disturb
    /// the others]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=64))]
    jobs: Option<u32>,
    /// Measure again what was measured already
    #[arg(long)]
    fresh: bool,
    /// Measure Cohort without each mechanism as well
    #[arg(long)]
    each_mechanism: bool,
    /// L1's kernel, one that `lab kernels` lists [default: the newest that is sound]; results are kept apart
    #[arg(long, value_name = "RELEASE")]
    kernel: Option<String>,
}

/// A result as it is kept.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Kept {
    /// What it was made from: the cell and the programs.
    pub made_from: String,
    /// Seconds of our time that it took.
    pub took_s: u64,
    /// What was measured.
    pub result: CellResult,
}

impl Kept {
    /// Reads it.
    ///
    /// # Errors
    /// When the file cannot be read or is no result.
    pub fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path)
            .with_context(|| format!("{} cannot be read", path.display()))?;
        serde_json::from_str(&text)
            .with_context(|| format!("{} is no result of a cell", path.display()))
    }

    fn write(&self, path: &Path) -> Result<()> {
        let json = serde_json::to_string_pretty(self)? + "\n";
        // Complete or not at all.
        let unfinished = path.with_extension("partial");
        fs::write(&unfinished, json)
            .and_then(|()| fs::rename(&unfinished, path))
            .map_err(|error| io_sentence(&format!("{} cannot be written", path.display()), &error))
    }
}

/// Runs the cells that were asked for; the exit code is 1 if one of them failed.
///
/// # Errors
/// When nothing can be run at all, or the lab was told to stop.
pub fn bench(options: &Options) -> Result<u8> {
    tool::catch_signals()?;
    let matrix = Matrix::read(&options.cells)?;
    let cells = chosen(&matrix, &options.names)
        .with_context(|| format!("Not all of these can be run of {}", options.cells.display()))?;
    fs::create_dir_all(RESULTS)
        .map_err(|error| io_sentence(&format!("{RESULTS} cannot be made"), &error))?;
    let programs = digest_of_programs()?;
    let jobs = cells.into_iter().map(|cell| Job {
        cell,
        each_mechanism: options.each_mechanism,
        kernel: options.kernel.as_deref(),
        made_from: digest_of(&programs, cell, options.each_mechanism),
    });
    let (done, to_do): (Vec<Job>, VecDeque<Job>) = split(jobs, options.fresh);
    for job in &done {
        println!(
            "{}: is measured already ({})",
            job.title(),
            job.kept().display()
        );
    }
    let failed = run_all(to_do, options.jobs.unwrap_or_else(default_jobs));
    if tool::interrupted() {
        bail!(Interrupted);
    }
    if !failed.is_empty() {
        println!("failed: {}", failed.join(", "));
    }
    Ok(u8::from(!failed.is_empty()))
}

fn default_jobs() -> u32 {
    match Kind::default_here(false) {
        Kind::Hardware => 1,
        Kind::Exact | Kind::Fast => 2,
    }
}

pub(super) fn chosen<'a>(matrix: &'a Matrix, names: &[String]) -> Result<Vec<&'a Cell>> {
    for name in names {
        ensure!(
            matrix.cells.iter().any(|cell| cell.name == *name),
            "there is no cell \"{name}\"; there are {}",
            matrix
                .cells
                .iter()
                .map(|cell| cell.name.as_str())
                .collect::<Vec<_>>()
                .join(", ")
        );
    }
    let is_chosen = |cell: &&Cell| names.is_empty() || names.contains(&cell.name);
    Ok(matrix.cells.iter().filter(is_chosen).collect())
}

/// Those whose results are kept and still true, and those that are to run.
fn split<'a>(
    jobs: impl Iterator<Item = Job<'a>>,
    fresh: bool,
) -> (Vec<Job<'a>>, VecDeque<Job<'a>>) {
    let (mut done, mut to_do) = (Vec::new(), VecDeque::new());
    for job in jobs {
        let kept = Kept::read(&job.kept());
        if !fresh && kept.is_ok_and(|kept| kept.made_from == job.made_from) {
            done.push(job);
        } else {
            to_do.push_back(job);
        }
    }
    (done, to_do)
}

/// Runs them, so many at a time; the names of those that failed.
fn run_all(jobs: VecDeque<Job<'_>>, at_a_time: u32) -> Vec<String> {
    let queue = Mutex::new(jobs);
    let failed = Mutex::new(Vec::new());
    let lock = |queue| Mutex::lock(queue).unwrap_or_else(PoisonError::into_inner);
    let work = || {
        while !tool::interrupted() {
            let Some(job) = lock(&queue).pop_front() else {
                return;
            };
            if let Err(error) = job.run()
                && !error.is::<Interrupted>()
            {
                println!("{}: failed: {error:#}", job.title());
                let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
                failed.push(job.title());
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..at_a_time {
            scope.spawn(work);
        }
    });
    failed.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// A cell to run.
struct Job<'a> {
    cell: &'a Cell,
    each_mechanism: bool,
    kernel: Option<&'a str>,
    made_from: String,
}

impl Job<'_> {
    fn title(&self) -> String {
        let mut title = self.cell.name.clone();
        if self.each_mechanism {
            title.push_str(".each");
        }
        if let Some(kernel) = self.kernel {
            title.push('@');
            title.push_str(kernel);
        }
        title
    }

    /// Where the run leaves its files.
    fn folder(&self) -> PathBuf {
        Path::new(RESULTS).join(self.title())
    }

    /// Where its result is kept.
    fn kept(&self) -> PathBuf {
        self.beside_folder("json")
    }

    /// What the run prints.
    fn log(&self) -> PathBuf {
        self.beside_folder("log")
    }

    fn beside_folder(&self, ending: &str) -> PathBuf {
        Path::new(RESULTS).join(format!("{}.{ending}", self.title()))
    }

    fn run(&self) -> Result<()> {
        println!("{}: begins: {}", self.title(), self.cell);
        let start = Instant::now();
        self.forget()?;
        let status = self.boot()?;
        let took_s = start.elapsed().as_secs();
        ensure!(
            status.success(),
            "{status} after {took_s} s; {} ends with:\n{}",
            self.log().display(),
            self.last_lines()
        );
        let kept = Kept {
            made_from: self.made_from.clone(),
            took_s,
            result: self.result()?,
        };
        kept.write(&self.kept())?;
        println!("{}: done in {took_s} s", self.title());
        Ok(())
    }

    /// Nothing of an earlier run may pass for this one's.
    fn forget(&self) -> Result<()> {
        let missing_is_fine = |result: io::Result<()>| match result {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        };
        missing_is_fine(fs::remove_dir_all(self.folder()))
            .and_then(|()| missing_is_fine(fs::remove_file(self.kept())))
            .map_err(|error| io_sentence("An earlier result cannot be removed", &error))
    }

    fn boot(&self) -> Result<ExitStatus> {
        let log = File::create(self.log()).map_err(|error| {
            io_sentence(&format!("{} cannot be made", self.log().display()), &error)
        })?;
        let mut command = self.command()?;
        command
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            // Ctrl-C is for this program to pass on: what the child runs must not end before the child is told.
            .process_group(0);
        // This thread waits for it.
        tool::die_with_parent(&mut command, libc::SIGKILL);
        let child = command.spawn().context("The lab cannot start itself")?;
        wait(child)
    }

    fn command(&self) -> Result<Command> {
        let mut command = boot_for(self.cell, &self.folder(), TIMEOUT_S)?;
        if let Some(kernel) = self.kernel {
            command.args(["--kernel", kernel]);
        }
        command
            .args(["--", "lab", "inside", "cell"])
            .arg(serde_json::to_string(self.cell)?);
        if self.each_mechanism {
            command.arg("--each-mechanism");
        }
        Ok(command)
    }

    fn result(&self) -> Result<CellResult> {
        let path = self.folder().join(RESULT);
        let text = fs::read_to_string(&path)
            .with_context(|| format!("it left no result in {}", path.display()))?;
        serde_json::from_str(&text)
            .with_context(|| format!("{} is no result of a cell", path.display()))
    }

    fn last_lines(&self) -> String {
        // Without it less is known, and said.
        let text = fs::read(self.log()).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(LAST_LINES)..].join("\n")
    }
}

/// `lab boot` with what L1 needs for `cell`, whose files are to be in `folder`, and which has `timeout_s` seconds of our time.
/// The command inside is left to the caller.
pub(super) fn boot_for(cell: &Cell, folder: &Path, timeout_s: u32) -> Result<Command> {
    let lab = std::env::current_exe().context("The lab cannot find its own program file.")?;
    let mut command = Command::new(lab);
    command
        .arg("boot")
        .args(["--cpus", &cell.cpus.to_string()])
        .args(["--sockets", &cell.sockets.to_string()])
        .args(["--vendor", cell.vendor.name()])
        .args(["--timeout-s", &timeout_s.to_string()])
        .arg("--out")
        .arg(folder);
    if cell.needs_guest_image() {
        command.arg("--guest-image");
    }
    Ok(command)
}

/// Waits for a child; it is told to stop when the lab is.
fn wait(mut child: Child) -> Result<ExitStatus> {
    let mut told = None;
    loop {
        if let Some(status) = child.try_wait().context("The lab cannot wait for itself")? {
            if tool::interrupted() {
                bail!(Interrupted);
            }
            return Ok(status);
        }
        if tool::interrupted() {
            let since = *told.get_or_insert_with(|| {
                tell_to_stop(&child);
                Instant::now()
            });
            if since.elapsed() > STOP_LIMIT {
                // It may have ended just now.
                let _ = child.kill();
            }
        }
        thread::sleep(TICK);
    }
}

fn tell_to_stop(child: &Child) {
    // SAFETY: plain system call; the child is not waited for yet, so its number is its own.
    unsafe {
        libc::kill(child.id() as libc::pid_t, libc::SIGTERM);
    }
}

/// Names the programs that L1 gets, by their content.
fn digest_of_programs() -> Result<Vec<u8>> {
    let lab = std::env::current_exe().context("The lab cannot find its own program file.")?;
    let mut digest = Sha256::new();
    for name in PROGRAMS {
        let path = lab.with_file_name(name);
        let program = fs::read(&path)
            .with_context(|| format!("{} cannot be read: build it first", path.display()))?;
        digest.update(Sha256::digest(program));
    }
    Ok(digest.finalize().to_vec())
}

fn digest_of(programs: &[u8], cell: &Cell, each_mechanism: bool) -> String {
    let mut digest = Sha256::new();
    digest.update(programs);
    digest.update([u8::from(each_mechanism)]);
    digest.update(format!("{cell:?}"));
    let bytes = digest.finalize();
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cell::example;

    #[test]
    fn a_result_is_void_when_the_cell_or_a_program_changes() {
        let cell = example();
        let longer = Cell {
            window_ms: 500,
            ..cell.clone()
        };
        let made_from = digest_of(b"programs", &cell, false);
        assert_eq!(made_from, digest_of(b"programs", &cell.clone(), false));
        for other in [
            digest_of(b"others", &cell, false),
            digest_of(b"programs", &longer, false),
            digest_of(b"programs", &cell, true),
        ] {
            assert_ne!(made_from, other);
        }
    }

    #[test]
    fn cells_are_chosen_by_name_and_a_wrong_name_is_told_with_the_right_ones() {
        let matrix = Matrix {
            cells: vec![example()],
            ..Matrix::default()
        };
        assert_eq!(chosen(&matrix, &[]).unwrap().len(), 1);
        assert_eq!(chosen(&matrix, &["lock-2x2".into()]).unwrap().len(), 1);
        let error = chosen(&matrix, &["lock".into()]).unwrap_err();
        assert!(error.to_string().ends_with("there are lock-2x2"), "{error}");
    }

    #[test]
    fn a_cell_is_booted_with_its_cpus_and_measured_inside() {
        let cell = example();
        let job = Job {
            cell: &cell,
            each_mechanism: true,
            kernel: Some("6.12.1"),
            made_from: String::new(),
        };
        let command = job.command().unwrap();
        let words: Vec<String> = command
            .get_args()
            .map(|word| word.to_string_lossy().into_owned())
            .collect();
        let text = words.join(" ");
        assert!(
            text.contains("--out out/bench/lock-2x2.each@6.12.1 --kernel 6.12.1 --"),
            "{text}"
        );
        assert!(text.contains(" lab inside cell {"), "{text}");
        assert!(text.ends_with("--each-mechanism"), "{text}");
        let passed: Cell = serde_json::from_str(&words[words.len() - 2]).unwrap();
        assert_eq!(passed, cell);
    }
}
