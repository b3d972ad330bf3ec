// SPDX-License-Identifier: GPL-2.0-only
//! The part of the lab that runs on the user's machine: finds a kernel, makes an image, boots L1. Not for what runs
//! inside L1.

pub mod bench;
pub mod boot;
pub mod built;
pub mod bzimage;
pub mod cache;
pub mod cli;
pub mod compare;
pub mod console;
pub mod cpio;
pub mod image;
pub mod initrd;
pub mod kernel;
pub mod machine;
pub mod mirror;
pub mod modules;
pub mod others;
pub mod report;
pub mod tool;

use std::fs::File;
use std::os::fd::FromRawFd;

use anyhow::{Context, Result};

/// A file in memory; it goes with its last descriptor, so that no end of the lab, however sudden, leaves it behind.
fn memory_file() -> Result<File> {
    // SAFETY: plain system call with a constant string; the descriptor it returns is ours alone.
    unsafe {
        let fd = libc::memfd_create(c"cohort-lab".as_ptr(), libc::MFD_CLOEXEC);
        if fd < 0 {
            return Err(std::io::Error::last_os_error()).context("No memory for a file of L1.");
        }
        Ok(File::from_raw_fd(fd))
    }
}
