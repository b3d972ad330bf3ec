// SPDX-License-Identifier: GPL-2.0-only
//! The lab: an emulated KVM host (L1) that boots anywhere, and its guests (L2). Not for real hosts.
pub mod cell;
pub mod guest;
pub mod inside;
pub mod outside;
