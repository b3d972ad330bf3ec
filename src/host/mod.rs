// SPDX-License-Identifier: GPL-2.0-only
//! What Cohort learns about the host it runs on. Not for anything that changes the host.

pub mod affinity;
pub mod btf;
pub mod cgroups;
pub mod cookies;
pub mod idle_states;
pub mod instance;
pub mod kernel_log;
pub mod kvm;
pub mod mperf;
pub mod paths;
pub mod preflight;
pub mod pressure;
pub mod private;
pub mod threads;
pub mod topology;
pub mod vm_identity;
