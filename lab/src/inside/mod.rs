// SPDX-License-Identifier: GPL-2.0-only
//! What runs as root inside L1: guests, cgroups, windows under schedulers in turn. Used
//! by the tests, the benchmark and the demo. Not for the user's machine (`outside`); all durations here are lab
//! time, which is L1's own clock.
pub mod bench;
pub mod booted;
pub mod calibrate;
pub mod cgroup;
pub mod cli;
pub mod demo;
pub mod drawing;
pub mod hooks;
pub mod info;
pub mod micro;
pub mod process;
pub mod report;
pub mod windows;
