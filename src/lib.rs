// SPDX-License-Identifier: GPL-2.0-only
//! Cohort, a sched_ext scheduler for oversubscribed KVM hosts: all of the
//! program but its `main`. What runs in the kernel is in `bpf/`.
//!
//! A subcommand is a module ([`run`], [`stats`], [`set`], [`watch`], [`top`],
//! [`why`], [`ready`], [`compare`], [`doctor`], [`export`]); [`host`] learns about the host,
//! [`scheduler`] holds the loaded BPF part, [`sight`] says what that sees of KVM, [`metrics`] turns its counters into
//! what people see, and [`entitlement`] says what a VM should have got.

pub mod bpf;
pub mod cli;
pub mod columns;
pub mod compare;
pub mod doctor;
pub mod duration;
pub mod entitlement;
pub mod exceptions;
pub mod exit;
pub mod export;
pub mod features;
pub mod finding;
pub mod halt;
pub mod host;
pub mod limits;
pub mod logging;
pub mod mechanism;
pub mod metrics;
pub mod observation;
pub mod observer;
pub mod printer;
pub mod ready;
pub mod recording;
pub mod run;
pub mod scheduler;
pub mod set;
pub mod settings;
pub mod sight;
pub mod signals;
pub mod span;
pub mod stats;
pub mod stats_server;
pub mod systemd;
pub mod table;
pub mod top;
pub mod view;
pub mod wait;
pub mod watch;
pub mod why;
