// SPDX-License-Identifier: GPL-2.0-only
//! Cohort, a sched_ext scheduler for oversubscribed KVM hosts: all of the
//! program but its `main`. What runs in the kernel is in `bpf/`.
//!
//! A subcommand is a module ([`run`], [`stats`]); [`host`] learns about the host,
//! [`scheduler`] holds the loaded BPF part, [`metrics`] turns its counters into
//! what people see, and [`entitlement`] says what a VM should have got.

pub mod bpf;
pub mod cli;
pub mod entitlement;
pub mod exit;
pub mod host;
pub mod logging;
pub mod mechanism;
pub mod metrics;
pub mod run;
pub mod scheduler;
pub mod settings;
pub mod stats;
pub mod stats_server;
pub mod systemd;
pub mod table;
