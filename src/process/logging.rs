// SPDX-License-Identifier: GPL-2.0-only
//! Log lines on standard error, for a terminal or for the journal.

use libbpf_rs::PrintLevel;
use nix::poll::{PollFd, PollFlags, poll};
use std::env;
use std::fmt;
use std::io::{self, IsTerminal, Stderr, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// A reader that is merely slow has this long for a line.
const PATIENCE_MS: u16 = 100;

/// Starts logging. `RUST_LOG` chooses what is logged, as in other Rust programs.
///
/// The journal stamps each line itself, and has a field for how much it matters, so lines that go there carry neither time
/// nor level, but a priority as in sd-daemon(3).
pub fn init() {
    // scx_utils tells at each start which features it found in the kernel, and
    // scx_stats warns of each client that goes away, as all of them do.
    let filter = EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| EnvFilter::new("info,scx_utils=warn,scx_stats=error"));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_target(false)
        .with_ansi(io::stderr().is_terminal())
        .with_writer(stderr)
        // It would tell of a line that cannot be written on standard error too, and panic as that fails as well.
        .log_internal_errors(false);
    match stderr_is_journal() {
        true => builder.event_format(ForJournal).init(),
        false => builder.init(),
    }
    libbpf_rs::set_print(Some((PrintLevel::Debug, log_libbpf)));
}

/// How the journal shows lines: `<3>` and so on in front of each.
struct ForJournal;

impl<S, N> FormatEvent<S, N> for ForJournal
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut to: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut text = String::new();
        context.format_fields(Writer::new(&mut text), event)?;
        to.write_str(&with_priority(*event.metadata().level(), &text))
    }
}

/// For the journal a line is a message, so each one has it.
fn with_priority(level: Level, text: &str) -> String {
    let priority = match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        Level::DEBUG | Level::TRACE => 7,
    };
    let lines = text.lines();
    lines.map(|line| format!("<{priority}>{line}\n")).collect()
}

/// Says why this program ends. It is no log line: it must be seen whatever `RUST_LOG` says. If nobody can see it, the exit
/// code still says why.
pub fn say_failure(failure: &impl fmt::Display) {
    let sentence = format!("cohort: {failure}\n");
    let sentence = match stderr_is_journal() {
        true => with_priority(Level::ERROR, &sentence),
        false => sentence,
    };
    let _ = stderr().write_all(sentence.as_bytes());
}

/// Standard error, which takes lines also while nobody reads it.
pub fn stderr() -> Impatient<Stderr> {
    Impatient(io::stderr())
}

/// Leaves out what cannot be written soon: who logs has other things to do than to wait for a reader of a full pipe.
pub struct Impatient<To>(To);

impl<To: Write + AsFd> Write for Impatient<To> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut to = [PollFd::new(self.0.as_fd(), PollFlags::POLLOUT)];
        match poll(&mut to, PATIENCE_MS) {
            Ok(0) => Ok(bytes.len()),
            // A pipe that takes anything takes so much, and a write of more would wait until all of it is read.
            Ok(_) => self.0.write(&bytes[..bytes.len().min(libc::PIPE_BUF)]),
            Err(errno) => Err(errno.into()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// What libbpf says. Its warnings explain why the kernel rejected a program; what
/// it calls information is for those who debug.
fn log_libbpf(level: PrintLevel, message: String) {
    let message = message.trim_end();
    match level {
        PrintLevel::Warn => tracing::warn!("{message}"),
        PrintLevel::Info | PrintLevel::Debug => tracing::debug!("{message}"),
    }
}

/// systemd names the device and inode of the journal's stream in JOURNAL_STREAM,
/// and asks programs to compare, as the variable is inherited by those whose
/// standard error goes elsewhere.
fn stderr_is_journal() -> bool {
    let Ok(stream) = env::var("JOURNAL_STREAM") else {
        return false;
    };
    std::fs::metadata("/proc/self/fd/2")
        .is_ok_and(|stderr| stream == format!("{}:{}", stderr.dev(), stderr.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, pipe};
    use std::time::{Duration, Instant};

    #[test]
    fn each_line_for_the_journal_has_its_priority() {
        let lines = |level| with_priority(level, "one\ntwo");
        assert_eq!(lines(Level::ERROR), "<3>one\n<3>two\n");
        assert_eq!(lines(Level::WARN), "<4>one\n<4>two\n");
        assert_eq!(lines(Level::INFO), "<6>one\n<6>two\n");
        assert_eq!(lines(Level::DEBUG), "<7>one\n<7>two\n");
    }

    #[test]
    fn a_line_is_left_out_while_nobody_reads_and_comes_once_somebody_does() {
        let (mut reader, writer) = pipe().expect("a pipe can be made");
        let mut log = Impatient(writer);
        let begin = Instant::now();
        // Twice of what a pipe takes.
        for _ in 0..32 {
            log.write_all(&[b'x'; 4096])
                .expect("it is written or left out");
        }
        assert!(begin.elapsed() < Duration::from_secs(20));
        let mut taken = vec![0; 16 * 4096];
        reader.read_exact(&mut taken).expect("so much was written");
        log.write_all(b"a line").expect("there is room");
        drop(log);
        let mut rest = String::new();
        reader.read_to_string(&mut rest).expect("it is ours");
        assert_eq!(rest, "a line");
    }

    #[test]
    fn a_reader_that_went_away_is_an_error_at_once() {
        let (reader, writer) = pipe().expect("a pipe can be made");
        drop(reader);
        let begin = Instant::now();
        Impatient(writer)
            .write_all(b"a line")
            .expect_err("nobody can read it");
        assert!(begin.elapsed() < Duration::from_millis(PATIENCE_MS.into()));
    }
}
