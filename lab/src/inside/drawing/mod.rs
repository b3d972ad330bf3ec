// SPDX-License-Identifier: GPL-2.0-only
//! Who runs where: the context switches of a stretch of lab time, recorded by the kernel and drawn, time across and CPUs
//! down, in the terminal or as a picture. Not for how much anyone does meanwhile (`windows`).
//!
//! `trace` records and parses, `timeline` is what is known then, `text` and `svg` draw that.
mod palette;
mod svg;
mod text;
mod timeline;
mod trace;

pub use svg::svg;
pub use text::{COLUMNS, text};
pub use timeline::{Span, Timeline, Vm, Who};

use std::time::Duration;

use anyhow::Result;

/// Records who runs on `cpus` for `length` of lab time from now on, under whatever schedules. `title` says what that is.
///
/// # Errors
/// When the kernel does not record context switches, or lost some.
pub fn record(title: &str, cpus: &[u32], vms: Vec<Vm>, length: Duration) -> Result<Timeline> {
    let recording = trace::record(length)?;
    Ok(Timeline::new(title, &recording, cpus, vms))
}
