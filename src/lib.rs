// SPDX-License-Identifier: GPL-2.0-only
//! Cohort, a sched_ext scheduler for oversubscribed KVM hosts: all of the
//! program but its `main`. What runs in the kernel is in `bpf/`.
//!
//! - [`cli`] is the command line, and [`commands`] has a module per subcommand.
//! - [`scheduler`] loads the scheduler and reads what it counts.
//! - [`observer`] loads the observer, and tells from its counters what vCPUs do.
//! - [`bpf`] is what both have of `bpf/`.
//! - [`host`] learns about the host.
//! - [`text`] is how numbers are written and read.
//! - [`process`] is what every program needs: exit codes, log lines, signals.
//!
//! The library is for the program, and for the lab and the tests of this repository. What they do not need is not public.

pub mod bpf;
pub mod cli;
pub mod commands;
pub mod host;
pub mod observer;
pub mod process;
pub mod scheduler;
pub mod text;
