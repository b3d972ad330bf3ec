// SPDX-License-Identifier: GPL-2.0-only
//! Windows kept in files, so that somebody else can look at them afterwards: a line of JSON that says what it is, and one
//! per window, as `cohort watch --json` prints them.
//!
//! A file is compressed as gzip does it, so that `zcat` shows it. When it is large enough, another one begins: FILE is the
//! newest part, FILE.1 the one before, and the oldest is removed. Readers take all parts that there are, compressed or not.

use crate::host::vm_identity::harmless;
use crate::observer::view::HostView;
use crate::process::exit::{Exit, Failure};
use crate::text::table::{json_line, new_file};
use anyhow::{Context, Result, anyhow};
use clap::Args;
use flate2::Compression;
use flate2::bufread::MultiGzDecoder;
use flate2::write::GzEncoder;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

/// Raised whenever a window's fields change so that older programs cannot read them.
const FORMAT: u32 = 3;
/// How much of a recording is kept unless told otherwise: at most 1 GiB.
const MIB_DEFAULT: u64 = 64;
const PARTS_DEFAULT: u32 = 16;
/// What a gzip file begins with.
const GZIP: [u8; 2] = [0x1f, 0x8b];
const MIB: u64 = 1 << 20;
/// A longer first line is none of a recording.
const LONGEST_HEADER: u64 = 4096;
/// A longer line is no window: one of 16,000 vCPUs has some 30 MiB.
const LONGEST_WINDOW: u64 = 256 * MIB;

/// How much of a recording is kept.
#[derive(Args, Clone, Copy, Debug)]
pub struct Kept {
    /// Begin another part of the recording when one has so many MiB
    #[arg(long, value_name = "MIB", default_value_t = MIB_DEFAULT, value_parser = clap::value_parser!(u64).range(1..=1 << 20), requires = "record")]
    record_mib: u64,

    /// Keep so many parts: FILE, then FILE.1, which is older, and so on; the oldest is removed
    #[arg(long, value_name = "PARTS", default_value_t = PARTS_DEFAULT, value_parser = clap::value_parser!(u32).range(2..=1000), requires = "record")]
    record_parts: u32,
}

/// As without options.
impl Default for Kept {
    fn default() -> Self {
        Self {
            record_mib: MIB_DEFAULT,
            record_parts: PARTS_DEFAULT,
        }
    }
}

/// The options of commands that record.
#[derive(Args, Clone, Debug)]
pub(crate) struct RecordOptions {
    /// Also write each window, of all VMs, to this new file, compressed, which `top` and `export` (--replay), `why`, `ready` and `doctor` (--recording) read
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,

    #[command(flatten)]
    kept: Kept,
}

impl RecordOptions {
    /// Begins the recording, if one is wanted.
    pub(crate) fn begin(&self) -> Result<Option<Recorder>, Failure> {
        let path = self.record.as_deref();
        path.map(|path| Recorder::create(path, self.kept))
            .transpose()
    }
}

#[derive(Deserialize, Serialize)]
struct Header {
    cohort_recording: u32,
    /// Of the program that wrote it.
    version: String,
}

/// Where a part lies; 0 is the newest.
fn part(path: &Path, number: u32) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    if number > 0 {
        name.push(format!(".{number}"));
    }
    name.into()
}

/// The recording of which `path` is an older part, if it is called like one.
pub(crate) fn newest_part(path: &Path) -> Option<PathBuf> {
    let number = path.extension()?.to_str()?;
    number.parse::<u32>().ok().map(|_| path.with_extension(""))
}

/// Writes windows to a file.
pub struct Recorder {
    file: GzEncoder<File>,
    path: PathBuf,
    /// A part that has more bytes is the last but one.
    most_bytes: u64,
    parts: u32,
}

impl Recorder {
    /// Begins a recording in the new file `path`.
    ///
    /// # Errors
    /// When the file, or an older part of such a recording, exists (nothing is overwritten), or cannot be written.
    pub fn create(path: &Path, kept: Kept) -> Result<Self, Failure> {
        let older = part(path, 1);
        if older.exists() {
            return Err(Failure::from(anyhow!(
                "the recording {} cannot be begun: there is {}, which would be taken for a part of it",
                path.display(),
                older.display()
            )));
        }
        let mut recorder = Self {
            file: begin(path)?,
            path: path.to_owned(),
            most_bytes: kept.record_mib * MIB,
            parts: kept.record_parts,
        };
        recorder.write(&Header::default())?;
        Ok(recorder)
    }

    /// Adds a window.
    ///
    /// # Errors
    /// When the file cannot be written, on a full disk for example.
    pub fn add(&mut self, view: &HostView) -> Result<(), Failure> {
        if self.bytes()? > self.most_bytes {
            self.begin_part()?;
        }
        self.write(&view.to_json()?)
    }

    fn bytes(&self) -> Result<u64> {
        let metadata = self.file.get_ref().metadata();
        let metadata = metadata.with_context(|| self.trouble())?;
        Ok(metadata.len())
    }

    fn begin_part(&mut self) -> Result<(), Failure> {
        self.file.try_finish().with_context(|| self.trouble())?;
        // The oldest part is replaced by the one that follows it.
        for number in (1..self.parts).rev() {
            match fs::rename(part(&self.path, number - 1), part(&self.path, number)) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    Err(error).with_context(|| self.trouble())?;
                }
                _ => {}
            }
        }
        self.file = begin(&self.path)?;
        self.write(&Header::default())
    }

    fn write(&mut self, value: &impl Serialize) -> Result<(), Failure> {
        let line = json_line(value)?;
        // Whoever reads it meanwhile, or after a crash, finds all lines up to this one.
        let written = self.file.write_all(line.as_bytes());
        let written = written.and_then(|()| self.file.flush());
        Ok(written.with_context(|| self.trouble())?)
    }

    fn trouble(&self) -> String {
        format!(
            "the recording {} cannot be written; what it holds up to here can be replayed",
            self.path.display()
        )
    }
}

fn begin(path: &Path) -> Result<GzEncoder<File>> {
    let file = new_file("recording", path)?;
    Ok(GzEncoder::new(file, Compression::fast()))
}

impl Default for Header {
    fn default() -> Self {
        Self {
            cohort_recording: FORMAT,
            version: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }
}

/// Reads a recording window by window; a day of them need not fit into memory.
pub struct Reader {
    /// Of the part that is read.
    path: PathBuf,
    content: Box<dyn BufRead>,
    /// Those that follow, the newest first.
    parts: Vec<(PathBuf, File)>,
    windows: usize,
    breaks_off: bool,
}

impl Reader {
    /// Opens the recording `path`, with its older parts.
    ///
    /// # Errors
    /// With [`Exit::BadRecording`] when it is none, of another format, or cannot be read.
    pub fn open(path: &Path) -> Result<Self, Failure> {
        let mut parts = Vec::new();
        // All at once: their names change when another part begins.
        for number in 0.. {
            let path = part(path, number);
            match File::open(&path) {
                Ok(file) => parts.push((path, file)),
                Err(error) if number > 0 && error.kind() == ErrorKind::NotFound => break,
                Err(error) => return Err(unreadable(&path, &error)),
            }
        }
        let mut reader = Self {
            path: path.to_owned(),
            content: Box::new(io::empty()),
            parts,
            windows: 0,
            breaks_off: false,
        };
        match reader.begin_part()? {
            true => Ok(reader),
            false => Err(no_recording(path)),
        }
    }

    /// Whether it breaks off, in a window that was left out or for want of an end; known at its end.
    pub fn breaks_off(&self) -> bool {
        self.breaks_off
    }

    /// Goes on to the next part that holds anything; false if there is none.
    fn begin_part(&mut self) -> Result<bool, Failure> {
        while let Some((path, file)) = self.parts.pop() {
            self.path = path;
            let content = content_of(file);
            self.content = content.map_err(|error| unreadable(&self.path, &error))?;
            match self.line(LONGEST_HEADER) {
                Ok(Some(line)) => return check(&self.path, &line).map(|()| true),
                Ok(None) => {}
                Err(error) if error.kind() == ErrorKind::InvalidData => {
                    return Err(no_recording(&self.path));
                }
                Err(error) => return Err(unreadable(&self.path, &error)),
            }
            // The disk was full, for example.
            self.breaks_off = true;
        }
        Ok(false)
    }

    /// The next line of at most so many bytes, if there is one. What is longer, or no text, is invalid data.
    fn line(&mut self, longest: u64) -> io::Result<Option<String>> {
        let mut line = String::new();
        match self.content.by_ref().take(longest).read_line(&mut line) {
            Ok(0) => Ok(None),
            Ok(length) if length as u64 == longest => Err(io::Error::new(
                ErrorKind::InvalidData,
                format!("a line is longer than {longest} bytes"),
            )),
            Ok(_) => Ok(Some(line)),
            // Its program was killed, or still writes.
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                self.breaks_off = true;
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    fn window_line(&mut self) -> Result<Option<String>, Failure> {
        self.line(LONGEST_WINDOW)
            .map_err(|error| unreadable(&self.path, &error))
    }

    /// The window that comes next; `None` at the end.
    ///
    /// # Errors
    /// With [`Exit::BadRecording`] when it is damaged, holds no whole window, or cannot be read.
    pub fn window(&mut self) -> Result<Option<HostView>, Failure> {
        loop {
            if let Some(line) = self.window_line()? {
                let error = match serde_json::from_str::<HostView>(&line) {
                    Ok(mut view) => {
                        self.windows += 1;
                        for vm in view.vms.values_mut() {
                            vm.name = harmless(&vm.name);
                            vm.identity = std::mem::take(&mut vm.identity).made_harmless();
                        }
                        return Ok(Some(view));
                    }
                    Err(error) => error,
                };
                if self.window_line()?.is_some() || self.windows == 0 {
                    let number = self.windows + 1;
                    let what = format!("is damaged: window {number} cannot be understood: {error}");
                    return Err(fail(&self.path, what));
                }
                self.breaks_off = true;
            }
            if !self.begin_part()? {
                break;
            }
        }
        match self.windows {
            0 => Err(fail(
                &self.path,
                "holds no window: it was stopped too early".into(),
            )),
            _ => Ok(None),
        }
    }
}

/// Of a file that is compressed or not.
fn content_of(file: File) -> io::Result<Box<dyn BufRead>> {
    let mut file = BufReader::new(file);
    Ok(match file.fill_buf()?.starts_with(&GZIP) {
        true => Box::new(BufReader::new(MultiGzDecoder::new(file))),
        false => Box::new(file),
    })
}

/// Whether a part's first line says that this program can read it.
fn check(path: &Path, line: &str) -> Result<(), Failure> {
    let header: Header = serde_json::from_str(line).map_err(|_| no_recording(path))?;
    if header.cohort_recording == FORMAT {
        return Ok(());
    }
    let what = format!(
        "was written by cohort {} in format {}; this is cohort {}, which reads format {FORMAT}",
        header.version,
        header.cohort_recording,
        env!("CARGO_PKG_VERSION"),
    );
    Err(fail(path, what))
}

fn no_recording(path: &Path) -> Failure {
    let what = "is no recording of cohort: its first line does not say so (`cohort top --record FILE` makes one)";
    fail(path, what.into())
}

fn unreadable(path: &Path, error: &io::Error) -> Failure {
    fail(path, format!("cannot be read: {error}"))
}

fn fail(path: &Path, what: String) -> Failure {
    Failure::new(Exit::BadRecording, anyhow!("{} {what}", path.display()))
}

/// What a recording holds.
#[derive(Debug)]
pub struct Recording {
    /// Its windows in their order, at least one.
    pub windows: Vec<HostView>,
    /// Whether it breaks off within a window, which is left out.
    pub breaks_off: bool,
}

impl Recording {
    /// Reads the whole recording `path`.
    ///
    /// # Errors
    /// As [`Reader`]'s.
    pub fn read(path: &Path) -> Result<Self, Failure> {
        let mut reader = Reader::open(path)?;
        let mut windows = Vec::new();
        while let Some(view) = reader.window()? {
            windows.push(view);
        }
        Ok(Self {
            windows,
            breaks_off: reader.breaks_off(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::columns::Column;
    use std::io::Read;

    fn window(cpus: u32) -> HostView {
        HostView {
            cpus,
            ..HostView::default()
        }
    }

    fn refusal(content: &str) -> String {
        let directory = tempfile::tempdir().expect("a folder can be made");
        let path = directory.path().join("r");
        fs::write(&path, content).expect("it can be written");
        let failure = Recording::read(&path).expect_err("it is wrong");
        assert_eq!(failure.exit(), Exit::BadRecording);
        failure.to_string()
    }

    #[test]
    fn what_was_recorded_is_read_again() {
        let directory = tempfile::tempdir().expect("a folder can be made");
        let path = directory.path().join("r");
        let mut recorder = Recorder::create(&path, Kept::default()).expect("it is new");
        recorder.add(&window(3)).expect("there is room");
        recorder.add(&window(4)).expect("there is room");
        let recording = Recording::read(&path).expect("it is whole");
        assert_eq!(recording.windows, [window(3), window(4)]);

        // It still goes on, or the machine it was made on went down.
        let recording = Recording::read(&path).expect("two windows are whole");
        assert_eq!(recording.windows.len(), 2);
        assert!(recording.breaks_off);
        drop(recorder);
        let whole = fs::read(&path).expect("it is there");
        fs::write(&path, &whole[..whole.len() - 20]).expect("it can be written");
        let recording = Recording::read(&path).expect("one window is whole");
        assert_eq!(recording.windows, [window(3)]);
        assert!(recording.breaks_off);
        assert!(
            Recorder::create(&path, Kept::default()).is_err(),
            "it was overwritten"
        );
    }

    #[test]
    fn what_is_not_compressed_is_read_and_may_break_off() {
        let directory = tempfile::tempdir().expect("a folder can be made");
        let path = directory.path().join("r");
        let mut recorder = Recorder::create(&path, Kept::default()).expect("it is new");
        recorder.add(&window(3)).expect("there is room");
        recorder.add(&window(4)).expect("there is room");
        drop(recorder);
        let compressed = fs::read(&path).expect("it is there");
        assert!(compressed.starts_with(&GZIP));
        let mut plain = String::new();
        MultiGzDecoder::new(compressed.as_slice())
            .read_to_string(&mut plain)
            .expect("it is gzip's format");
        assert_eq!(plain.lines().count(), 3);
        fs::write(&path, &plain).expect("it can be written");
        let recording = Recording::read(&path).expect("it is whole");
        assert_eq!(recording.windows, [window(3), window(4)]);
        assert!(!recording.breaks_off);
        fs::write(&path, &plain[..plain.len() - 10]).expect("it can be written");
        let recording = Recording::read(&path).expect("one window is whole");
        assert_eq!(recording.windows, [window(3)]);
        assert!(recording.breaks_off);
    }

    #[test]
    fn parts_are_read_as_one_and_the_oldest_is_removed() {
        let directory = tempfile::tempdir().expect("a folder can be made");
        let path = directory.path().join("r");
        let kept = Kept {
            record_parts: 3,
            ..Kept::default()
        };
        let mut recorder = Recorder::create(&path, kept).expect("it is new");
        recorder.most_bytes = 0;
        for cpus in 1..=5 {
            recorder.add(&window(cpus)).expect("there is room");
        }
        drop(recorder);
        let cpus = |path: &Path| -> Vec<u32> {
            let recording = Recording::read(path).expect("it is whole");
            assert!(!recording.breaks_off);
            recording.windows.iter().map(|view| view.cpus).collect()
        };
        assert_eq!(cpus(&path), [3, 4, 5]);
        assert_eq!(cpus(&part(&path, 1)), [4], "a part is a recording, too");
        assert!(!part(&path, 3).exists());

        // The disk was full when the newest one began.
        fs::write(&path, "").expect("it can be written");
        let recording = Recording::read(&path).expect("older parts are whole");
        assert_eq!(recording.windows.len(), 2);
        assert!(recording.breaks_off);

        // Its parts would be taken for those of another one.
        fs::remove_file(&path).expect("it is there");
        let refused = Recorder::create(&path, kept).err().expect("there is r.1");
        assert!(refused.to_string().contains("r.1"), "{refused}");
    }

    /// Before it was known how halted time is known.
    #[test]
    fn an_older_recording_is_read_and_its_halted_time_shown() {
        let directory = tempfile::tempdir().expect("a folder can be made");
        let path = directory.path().join("r");
        let header = r#"{"cohort_recording":3,"version":"0.1.0"}"#;
        let window = r#"{"window_ms":1000,"vms":{"5":{"all":{"vcpus":1,"halted_pct":20.0}}}}"#;
        fs::write(&path, format!("{header}\n{window}\n")).expect("it can be written");
        let recording = Recording::read(&path).expect("it is whole");
        let all = &recording.windows[0].vms[&5].all;
        assert_eq!(Column::Halted.text(all, 1.0), "20.0");
    }

    #[test]
    fn what_cannot_be_replayed_is_refused_with_the_reason() {
        assert!(refusal("").contains("is no recording"));
        assert!(refusal("root:x:0:0\n").contains("is no recording"));
        let header = |format| format!("{{\"cohort_recording\":{format},\"version\":\"9.9\"}}\n");
        assert!(refusal(&header(7)).contains("cohort 9.9 in format 7"));
        assert!(refusal(&header(FORMAT)).contains("holds no window"));
        assert!(refusal(&(header(FORMAT) + "{\"window_ms\":")).contains("window 1"));
        assert!(refusal(&(header(FORMAT) + "x\ny\n")).contains("damaged"));
    }
}
