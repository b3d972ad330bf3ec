// SPDX-License-Identifier: GPL-2.0-only
//! What every program needs: exit codes, log lines, signals, systemd, limits, waiting. Not for what only Cohort does.

pub mod exit;
pub mod limits;
pub(crate) mod logging;
pub(crate) mod signals;
pub(crate) mod systemd;
pub mod wait;
