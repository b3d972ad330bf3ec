// SPDX-License-Identifier: GPL-2.0-only
//! Being told to stop.

use anyhow::{Context, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// A flag that SIGINT and SIGTERM raise.
pub fn watch_signals() -> Result<Arc<AtomicBool>> {
    let told_to_leave = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&told_to_leave))
            .context("signals cannot be watched, so Cohort could not be stopped cleanly")?;
    }
    Ok(told_to_leave)
}
