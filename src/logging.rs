// SPDX-License-Identifier: GPL-2.0-only
//! Log lines on standard error, for a terminal or for the journal.

use libbpf_rs::PrintLevel;
use std::env;
use std::io::{self, IsTerminal};
use std::os::unix::fs::MetadataExt;
use tracing_subscriber::EnvFilter;

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
        .with_writer(io::stderr)
        // It would tell of a line that cannot be written on standard error too, and panic as that fails as well.
        .log_internal_errors(false);
    match stderr_is_journal() {
        true => builder.without_time().init(),
        false => builder.init(),
    }
    libbpf_rs::set_print(Some((PrintLevel::Debug, log_libbpf)));
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
