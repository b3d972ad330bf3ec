// SPDX-License-Identifier: GPL-2.0-only
//! The `cohort` program. Everything is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    cohort::cli::main().into()
}
