// SPDX-License-Identifier: GPL-2.0-only
//! What Cohort learns about the host it runs on. Not for anything that changes the host.

pub(crate) mod affinity;
pub(crate) mod arch;
pub mod btf;
pub mod cgroups;
pub(crate) mod cookies;
pub(crate) mod idle_states;
pub(crate) mod instance;
pub(crate) mod kernel_log;
pub(crate) mod kvm;
pub(crate) mod mperf;
pub mod paths;
pub(crate) mod preflight;
pub(crate) mod pressure;
pub(crate) mod private;
pub(crate) mod standing;
pub(crate) mod symbols;
pub mod threads;
pub mod topology;
pub(crate) mod vm_identity;
