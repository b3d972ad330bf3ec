// SPDX-License-Identifier: GPL-2.0-only
//! The part of the lab that runs on the user's machine: finds a kernel, makes an image, boots L1. Not for what runs
//! inside L1.

pub mod boot;
pub mod bzimage;
pub mod cache;
pub mod cli;
pub mod console;
pub mod cpio;
pub mod image;
pub mod initrd;
pub mod kernel;
pub mod mirror;
pub mod modules;
pub mod others;
pub mod qemu;
pub mod tool;
