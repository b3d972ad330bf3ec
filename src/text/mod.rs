// SPDX-License-Identifier: GPL-2.0-only
//! How numbers are written and read: columns, tables, durations. Not for what the numbers mean.

pub(crate) mod columns;
pub(crate) mod duration;
pub(crate) mod printer;
pub mod table;
