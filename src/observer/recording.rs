// SPDX-License-Identifier: GPL-2.0-only
//! Windows kept in a file, so that somebody else can look at them afterwards: a line of JSON that says what it is, and
//! one per window, as `cohort watch --json` prints them.

use crate::observer::view::HostView;
use crate::process::exit::{Exit, Failure};
use crate::text::table::{json_line, new_file};
use anyhow::{Context, anyhow};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{BufRead, BufReader, Lines, Write};
use std::path::{Path, PathBuf};

/// Raised whenever a window's fields change so that older programs cannot read them.
const FORMAT: u32 = 3;

#[derive(Deserialize, Serialize)]
struct Header {
    cohort_recording: u32,
    /// Of the program that wrote it.
    version: String,
}

/// Writes windows to a file.
pub struct Recorder {
    file: File,
    path: PathBuf,
}

impl Recorder {
    /// Begins a recording in the new file `path`.
    ///
    /// # Errors
    /// When the file exists (nothing is overwritten) or cannot be written.
    pub fn create(path: &Path) -> Result<Self, Failure> {
        let file = new_file("recording", path)?;
        let mut recorder = Self {
            file,
            path: path.to_owned(),
        };
        recorder.write(&Header {
            cohort_recording: FORMAT,
            version: env!("CARGO_PKG_VERSION").to_owned(),
        })?;
        Ok(recorder)
    }

    /// Adds a window.
    ///
    /// # Errors
    /// When the file cannot be written, on a full disk for example.
    pub fn add(&mut self, view: &HostView) -> Result<(), Failure> {
        self.write(&view.to_json()?)
    }

    fn write(&mut self, value: &impl Serialize) -> Result<(), Failure> {
        let line = json_line(value)?;
        // In one call, so that whoever reads it meanwhile sees whole lines.
        self.file.write_all(line.as_bytes()).with_context(|| {
            format!(
                "the recording {} cannot be written; what it holds up to here can be replayed",
                self.path.display()
            )
        })?;
        Ok(())
    }
}

/// Reads a recording window by window; a day of them need not fit into memory.
pub struct Reader {
    path: PathBuf,
    lines: Lines<BufReader<File>>,
    windows: usize,
    breaks_off: bool,
}

impl Reader {
    /// Opens the recording `path`.
    ///
    /// # Errors
    /// With [`Exit::BadRecording`] when it is none, of another format, or cannot be read.
    pub fn open(path: &Path) -> Result<Self, Failure> {
        let mut reader = Self {
            path: path.to_owned(),
            lines: BufReader::new(
                File::open(path).map_err(|error| fail(path, format!("cannot be read: {error}")))?,
            )
            .lines(),
            windows: 0,
            breaks_off: false,
        };
        let header: Header = reader
            .line()?
            .and_then(|line| serde_json::from_str(&line).ok())
            .ok_or_else(|| {
                fail(
                    path,
                    "is no recording of cohort: its first line does not say so (`cohort top --record FILE` makes one)"
                        .into(),
                )
            })?;
        if header.cohort_recording != FORMAT {
            return Err(fail(
                path,
                format!(
                    "was written by cohort {} in format {}; this is cohort {}, which reads format {FORMAT}",
                    header.version,
                    header.cohort_recording,
                    env!("CARGO_PKG_VERSION"),
                ),
            ));
        }
        Ok(reader)
    }

    /// Whether it broke off within a window, which was left out; known at its end.
    pub fn breaks_off(&self) -> bool {
        self.breaks_off
    }

    fn line(&mut self) -> Result<Option<String>, Failure> {
        let line = self.lines.next().transpose();
        line.map_err(|error| fail(&self.path, format!("cannot be read: {error}")))
    }

    /// The window that comes next; `None` at the end.
    ///
    /// # Errors
    /// With [`Exit::BadRecording`] when it is damaged, holds no whole window, or cannot be read.
    pub fn window(&mut self) -> Result<Option<HostView>, Failure> {
        let Some(line) = self.line()? else {
            if self.windows == 0 {
                let what = "holds no window: it was stopped too early";
                return Err(fail(&self.path, what.into()));
            }
            return Ok(None);
        };
        let Ok(view) = serde_json::from_str(&line) else {
            if self.line()?.is_some() || self.windows == 0 {
                let number = self.windows + 1;
                let what = format!("is damaged: its window {number} cannot be understood");
                return Err(fail(&self.path, what));
            }
            self.breaks_off = true;
            return Ok(None);
        };
        self.windows += 1;
        Ok(Some(view))
    }
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
    use std::fs;

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
        let mut recorder = Recorder::create(&path).expect("it is new");
        recorder.add(&window(3)).expect("there is room");
        recorder.add(&window(4)).expect("there is room");
        let recording = Recording::read(&path).expect("it is whole");
        assert_eq!(recording.windows, [window(3), window(4)]);
        assert!(!recording.breaks_off);
        assert!(Recorder::create(&path).is_err(), "it was overwritten");

        // The machine it was made on went down.
        let whole = fs::read_to_string(&path).expect("it is there");
        fs::write(&path, &whole[..whole.len() - 10]).expect("it can be written");
        let recording = Recording::read(&path).expect("one window is whole");
        assert_eq!(recording.windows, [window(3)]);
        assert!(recording.breaks_off);
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
