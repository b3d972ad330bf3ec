// SPDX-License-Identifier: GPL-2.0-only
//! Log lines on standard error, for a terminal or for the journal.

use libbpf_rs::PrintLevel;
use nix::poll::{PollFd, PollFlags, poll};
use std::env;
use std::io::{self, IsTerminal, Stderr, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use tracing_subscriber::EnvFilter;

/// A reader that is merely slow has this long for a line.
const PATIENCE_MS: u16 = 100;

/// Starts logging. `RUST_LOG` chooses what is logged, as in other Rust programs.
///
/// The journal stamps each line itself, so lines that go there carry no time.
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
        true => builder.without_time().init(),
        false => builder.init(),
    }
    libbpf_rs::set_print(Some((PrintLevel::Debug, log_libbpf)));
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
