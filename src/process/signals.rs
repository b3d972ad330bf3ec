// SPDX-License-Identifier: GPL-2.0-only
//! Being told to stop, and to read the settings anew.

use anyhow::{Context, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A flag that SIGINT and SIGTERM raise.
pub fn watch_signals() -> Result<Arc<AtomicBool>> {
    let told_to_leave = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&told_to_leave))
            .context("signals cannot be watched, so Cohort could not be stopped cleanly")?;
    }
    Ok(told_to_leave)
}

/// SIGHUP, which means two things: that the settings are to be read anew, or that the terminal is gone.
pub struct HangUp {
    came: Arc<AtomicBool>,
    had_terminal: bool,
}

/// What SIGHUP meant.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum HungUp {
    /// Somebody sent it, so that the settings are read anew.
    Reload,
    /// The terminal that this program was started from is gone.
    TerminalGone,
}

impl HangUp {
    /// Watches from now on.
    pub fn watch() -> Result<Self> {
        let came = Arc::new(AtomicBool::new(false));
        signal_hook::flag::register(SIGHUP, Arc::clone(&came))
            .context("SIGHUP cannot be watched, so settings could not be read anew")?;
        Ok(Self {
            came,
            had_terminal: has_terminal(),
        })
    }

    /// What the last one meant, if one came since the last call.
    pub fn take(&self) -> Option<HungUp> {
        let came = self.came.swap(false, Ordering::Relaxed);
        came.then(|| meaning(self.had_terminal, has_terminal()))
    }
}

fn meaning(had_terminal: bool, has_terminal: bool) -> HungUp {
    match had_terminal && !has_terminal {
        true => HungUp::TerminalGone,
        false => HungUp::Reload,
    }
}

/// Whether this process has a controlling terminal. The kernel takes it away before it sends SIGHUP for that.
fn has_terminal() -> bool {
    File::open("/dev/tty").is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_terminal_that_was_there_can_be_gone() {
        assert_eq!(meaning(true, false), HungUp::TerminalGone);
        for (had, has) in [(true, true), (false, false), (false, true)] {
            assert_eq!(meaning(had, has), HungUp::Reload);
        }
    }

    #[test]
    fn a_signal_counts_once() {
        let hang_up = HangUp::watch().expect("signals can be watched");
        assert_eq!(hang_up.take(), None);
        signal_hook::low_level::raise(SIGHUP).expect("it is this process's own");
        assert!(hang_up.take().is_some());
        assert_eq!(hang_up.take(), None);
    }
}
