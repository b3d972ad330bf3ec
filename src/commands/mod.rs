// SPDX-License-Identifier: GPL-2.0-only
//! A module per subcommand; which ones there are says `cli`. Not for what several of them need.

pub(crate) mod caps;
pub mod compare;
pub(crate) mod doctor;
pub(crate) mod export;
pub(crate) mod finding;
pub(crate) mod ready;
pub(crate) mod run;
pub(crate) mod set;
pub(crate) mod stats;
pub(crate) mod top;
pub(crate) mod watch;
pub(crate) mod why;
