// SPDX-License-Identifier: GPL-2.0-only
//! `lab compare`: has `cohort compare` compare the schedulers beside the VMs of a cell, in an L1 of its own. Not for what
//! happens there (`inside::compare`).
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;

use super::bench::{PUBLISHED, boot_for, chosen};
use crate::cell::Matrix;

/// Where the page and the picture are left.
const FOLDER: &str = "out/compare";

/// Seconds of our time; each exchange of schedulers takes a minute or two.
const TIMEOUT_S: u32 = 7200;

/// Options of `lab compare`.
#[derive(Debug, Args)]
pub struct Options {
    /// The cell, by its name in the file of cells
    name: String,
    /// The file of cells
    #[arg(long, value_name = "FILE", default_value = PUBLISHED)]
    cells: PathBuf,
}

/// Compares; becomes `lab boot`, and ends as that does.
///
/// # Errors
/// When there is no such cell, or the lab cannot start itself.
pub fn compare(options: &Options) -> Result<u8> {
    let matrix = Matrix::read(&options.cells)?;
    let cells = chosen(&matrix, std::slice::from_ref(&options.name))?;
    let cell = cells.first().context("A cell was chosen")?;
    let mut command = boot_for(cell, Path::new(FOLDER), TIMEOUT_S)?;
    command
        .args(["--", "lab", "inside", "compare"])
        .args(["--html", "/out/compare.html", "--svg", "/out/compare.svg"])
        .arg(serde_json::to_string(cell)?);
    Err(command.exec()).context("The lab cannot start itself")
}
