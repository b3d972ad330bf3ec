// SPDX-License-Identifier: GPL-2.0-only
//! Micro guests: virtual machines without a kernel, for testing a host scheduler.
//!
//! A vCPU of a micro guest runs a short program of steps such as `compute 100us`, `lock`, `ipi 1 0x41`
//! (see [`program`]), translated to machine code and run under KVM with the in-kernel APIC. So hundreds of VMs start in
//! seconds, and which vCPU waits for which one is exact. What the vCPUs did is read from shared memory ([`State`])
//! without a VM exit.
//!
//! * [`Spec`] describes a guest, builds the command line of the `micro` program and starts it;
//! * [`State`] reads the counters of a running guest, and sets its flags;
//! * [`vmm`] is the virtual machine monitor that the `micro` program runs.
//!
//! This crate is not a general VMM: it has no devices, no firmware, no disk and no way to boot a kernel. It runs on
//! x86-64 only.

pub mod calibrate;
mod code;
mod histogram;
pub mod layout;
mod machine;
pub mod program;
mod quantity;
pub mod shared;
mod spec;
mod state;
mod stats;
pub mod vmm;

pub use histogram::Histogram;
pub use machine::StillVm;
pub use quantity::{Quantity, QuantityError};
pub use spec::{Running, Spec};
pub use state::{LatencyCounters, RunState, State, VcpuCounters};
pub use vmm::Totals;
