// SPDX-License-Identifier: GPL-2.0-only
//! What runs as root inside L1: guests, cgroups, windows under one scheduler after the other. Used
//! by the tests, the bench and the demo. Not for the user's machine (`outside`); all durations here are lab
//! time, which is L1's own clock.
pub mod booted;
pub mod cell;
pub mod cgroup;
pub mod cli;
pub mod compare;
pub mod demo;
pub mod drawing;
pub mod hooks;
pub mod hostwork;
pub mod info;
pub mod micro;
pub mod ops;
pub mod process;
pub mod programs;
pub mod random;
pub mod spins;
pub mod windows;
