// SPDX-License-Identifier: GPL-2.0-only
//! The subcommands of `lab` that prepare or list something, and how errors are told. `lab boot` is boot.rs.

use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Args;

use super::boot::{EXIT_INTERRUPTED, EXIT_NOT_STARTED};
use super::cache::Cache;
use super::image::{Image, guest_image};
use super::kernel::{Judged, Kernels};
use super::tool::{self, Interrupted};

/// Options of `lab kernels`.
#[derive(Debug, Args)]
pub struct KernelsOptions {
    /// Print only the releases of the sound kernels, one per line, newest first
    #[arg(long, group = "only")]
    sound: bool,
    /// Print only the releases of the kernels whose sched_ext is unsound
    #[arg(long, group = "only")]
    unsound: bool,
    /// Print only the releases of the kernels without sched_ext
    #[arg(long, group = "only")]
    without_sched_ext: bool,
    /// Ask the mirror even if it was asked lately
    #[arg(long)]
    refresh: bool,
    /// Build the kernel of a series that Debian ships without sched_ext, 6.12 for example, unless it was built already;
    /// print its release
    #[arg(long, value_name = "SERIES", conflicts_with_all = ["only", "refresh"])]
    build: Option<String>,
}

/// Lists the candidates, what their BTF is like, and which one is booted.
pub fn kernels(options: &KernelsOptions) -> Result<u8> {
    tool::catch_signals()?;
    let cache = Cache::open()?;
    let kernels = Kernels::load(&cache, options.refresh)?;
    if let Some(series) = &options.build {
        println!("{}", kernels.build(series)?.candidate.release);
        return Ok(0);
    }
    let all = kernels.judge_all()?;
    if all.is_empty() {
        bail!("No kernel is in the cache and none could be downloaded: the reasons are above.");
    }
    if options.sound || options.unsound || options.without_sched_ext {
        let is_wanted = |judged: &&Judged| match &judged.soundness {
            soundness if !soundness.has_sched_ext => options.without_sched_ext,
            soundness if soundness.is_sound() => options.sound,
            _ => options.unsound,
        };
        for judged in all.iter().filter(is_wanted) {
            println!("{}", judged.candidate.release);
        }
        return Ok(0);
    }
    let Some(chosen) = all.iter().position(|judged| judged.soundness.is_sound()) else {
        all.iter()
            .for_each(|judged| println!("{}", row(judged, false)));
        bail!(
            "No kernel of the Debian mirror can load a sched_ext scheduler: wait for its next kernel."
        );
    };
    for (index, judged) in all.iter().enumerate() {
        println!("{}", row(judged, index == chosen));
    }
    Ok(0)
}

fn row(judged: &Judged, is_chosen: bool) -> String {
    let Judged {
        candidate,
        soundness,
    } = judged;
    let mark = if is_chosen { "booted by default" } else { "" };
    let text = format!(
        "{:<24} {:<17} {soundness}  {mark}",
        candidate.release, candidate.suite
    );
    text.trim_end().to_string()
}

/// Options of `lab image`.
#[derive(Debug, Args)]
pub struct ImageOptions {
    /// Make the image of guests with real workloads instead of L1's
    #[arg(long)]
    guest: bool,
}

/// Makes an image if it is not in the cache and says where it is.
pub fn image(options: &ImageOptions) -> Result<u8> {
    tool::catch_signals()?;
    let cache = Cache::open()?;
    if options.guest {
        println!("{}", guest_image(&cache)?.display());
    } else {
        let image = Image::ready(&cache)?;
        println!("{} (QEMU {})", image.root.display(), image.qemu_version);
    }
    Ok(0)
}

/// Prints an error as one sentence and returns the exit code for it.
pub fn report(error: &anyhow::Error) -> ExitCode {
    eprintln!("lab: {error:#}");
    ExitCode::from(if error.is::<Interrupted>() {
        EXIT_INTERRUPTED
    } else {
        EXIT_NOT_STARTED
    })
}
