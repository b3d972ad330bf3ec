// SPDX-License-Identifier: GPL-2.0-only
//! Printing beside scheduling: the tables of `cohort run --stats`. A full disk, a reader that went away or one that
//! does not read keep nothing else from being done. Not for programs whose purpose is to print: these end.

use anyhow::{Context, Result};
use std::fmt::Display;
use std::io::Write;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;

/// So many texts wait while a write takes its time.
const MOST_WAITING: usize = 4;

/// Prints from a thread of its own: a write to a pipe that nobody reads does not return.
pub struct Printer {
    to_print: SyncSender<String>,
    not_taken: Outage,
}

impl Printer {
    /// Prints to `to`.
    pub fn new(mut to: impl Write + Send + 'static) -> Result<Self> {
        let (to_print, texts) = sync_channel::<String>(MOST_WAITING);
        let work = move || {
            let mut outage = Outage::default();
            for text in texts {
                write(&mut to, &text, &mut outage);
            }
        };
        thread::Builder::new()
            .name(String::from("printer"))
            .spawn(work)
            .context("there is no thread that could print")?;
        Ok(Self {
            to_print,
            not_taken: Outage::default(),
        })
    }

    /// Prints `text` soon, or not at all while earlier ones wait to be read.
    pub fn print(&mut self, text: String) {
        let taken = self.to_print.try_send(text);
        self.not_taken.note(
            "nobody reads standard output, so tables are left out",
            taken,
        );
    }
}

fn write(to: &mut impl Write, text: &str, outage: &mut Outage) {
    let written = to.write_all(text.as_bytes()).and_then(|()| to.flush());
    outage.note("tables cannot be written to standard output", written);
}

/// Something that may fail each time it is done: the log says so when that begins, and not again until it went well.
#[derive(Debug, Default)]
pub struct Outage {
    lasts: bool,
}

impl Outage {
    /// Notes how it went; `what` says what it means if it failed.
    pub fn note(&mut self, what: &str, result: Result<(), impl Display>) {
        match result {
            Ok(()) => self.lasts = false,
            Err(error) => {
                if !self.lasts {
                    tracing::warn!("{what} ({error}); scheduling goes on");
                }
                self.lasts = true;
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod log {
    //! What the log says.

    use std::io::{self, Write};
    use std::sync::{Arc, Mutex, PoisonError};

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            lines.extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// The lines that this thread logs while it does `work`.
    pub(crate) fn of(work: impl FnOnce()) -> Vec<String> {
        let lines = Lines::default();
        let writer = lines.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_writer(move || writer.clone())
            .finish();
        tracing::subscriber::with_default(subscriber, work);
        let bytes = lines.0.lock().unwrap_or_else(PoisonError::into_inner);
        let text = String::from_utf8_lossy(&bytes);
        text.lines().map(String::from).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Read, pipe};
    use std::time::{Duration, Instant};

    /// What is logged while three tables are written there.
    fn said_of(mut to: impl Write) -> Vec<String> {
        log::of(|| {
            let mut outage = Outage::default();
            for _ in 0..3 {
                write(&mut to, "a table\n", &mut outage);
            }
        })
    }

    #[test]
    fn a_full_disk_is_said_once() {
        let full = File::options().write(true).open("/dev/full");
        let said = said_of(full.expect("Linux has it"));
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0].contains("No space left"), "{said:?}");
        assert!(said[0].contains("scheduling goes on"), "{said:?}");
    }

    #[test]
    fn a_closed_pipe_is_said_once() {
        let (reader, writer) = pipe().expect("a pipe can be made");
        drop(reader);
        let said = said_of(writer);
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0].contains("Broken pipe"), "{said:?}");
    }

    #[test]
    fn what_failed_went_well_and_fails_again_is_said_again() {
        let said = log::of(|| {
            let mut outage = Outage::default();
            for result in [Ok(()), Err("one"), Err("two"), Ok(()), Err("three")] {
                outage.note("what", result);
            }
        });
        assert_eq!(said.len(), 2, "{said:?}");
        assert!(
            said[0].contains("one") && said[1].contains("three"),
            "{said:?}"
        );
    }

    #[test]
    fn tables_arrive_in_their_order() {
        let (mut reader, writer) = pipe().expect("a pipe can be made");
        let mut printer = Printer::new(writer).expect("it can begin");
        printer.print(String::from("one\n"));
        printer.print(String::from("two\n"));
        drop(printer);
        let mut text = String::new();
        reader.read_to_string(&mut text).expect("it is ours");
        assert_eq!(text, "one\ntwo\n");
    }

    #[test]
    fn a_reader_that_does_not_read_holds_up_nothing() {
        // More than a pipe takes.
        let text = "x".repeat(1 << 20);
        let (mut reader, writer) = pipe().expect("a pipe can be made");
        let mut printer = Printer::new(writer).expect("it can begin");
        printer.print(text.clone());
        // From here on its thread is inside a write.
        reader.read_exact(&mut [0]).expect("something is written");
        let begin = Instant::now();
        let said = log::of(|| (0..100).for_each(|_| printer.print(text.clone())));
        assert!(begin.elapsed() < Duration::from_secs(10));
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0].contains("nobody reads"), "{said:?}");
    }
}
