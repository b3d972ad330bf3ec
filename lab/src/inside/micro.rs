// SPDX-License-Identifier: GPL-2.0-only
//! Micro guests in cgroups of their own, and the programs that several experiments give them. Not for what a micro guest
//! is (`lab/micro`), nor for guests with a kernel (`booted`).
use std::path::Path;

use anyhow::Result;
use cohort_micro::{Histogram, Quantity, Running, Spec};

use super::cgroup::Cgroup;
use super::info::LabInfo;
use super::process::confine;
use super::windows::Subject;
use crate::outside::machine::Kind;

const MICRO: &str = "/cohort/bin/micro";
const NS_PER_MS: f64 = 1e6;

/// A micro guest in a cgroup of its own. Dropping it kills it and removes its cgroup.
pub struct MicroGuest {
    // Before the cgroup: the guest must be gone when that is removed.
    /// The guest itself.
    pub micro: Running,
    cgroup: Cgroup,
}

impl MicroGuest {
    /// Starts `spec` on `cpus`.
    ///
    /// # Errors
    /// When the cgroup cannot be made, or the guest does not start.
    pub fn start_on(spec: &Spec, cpus: &[u32]) -> Result<Self> {
        let mut spec = spec.clone();
        if LabInfo::read()?.machine == Kind::Fast {
            // Its guests exit at each PAUSE, not after a window of them. A count, as a time would have to be calibrated.
            spec = spec.pause_window(Quantity::Count(10_000));
        }
        let cgroup = Cgroup::create(&spec.name)?;
        let mut confined = Ok(());
        let micro = spec.spawn_with(Path::new(MICRO), |command| {
            confined = confine(command, cpus, Some(&cgroup));
        })?;
        confined?;
        Ok(Self { micro, cgroup })
    }

    /// Starts `spec` on the lab's CPUs for guests.
    ///
    /// # Errors
    /// As [`Self::start_on`]; or when this is not the inside of a lab.
    pub fn start(spec: &Spec) -> Result<Self> {
        Self::start_on(spec, &LabInfo::read()?.guest_cpus)
    }

    /// Starts a guest whose `vcpus` compute all the time.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn busy(name: &str, vcpus: usize) -> Result<Self> {
        Self::start(&busy(name, vcpus))
    }

    /// The cgroup that it is alone in.
    pub fn cgroup(&self) -> &Cgroup {
        &self.cgroup
    }
}

impl Subject for MicroGuest {
    fn name(&self) -> &str {
        self.cgroup.name()
    }

    fn operations(&self) -> Result<u64> {
        Ok(self.micro.state.progress())
    }

    fn latencies(&self) -> Result<Histogram> {
        Ok(self.micro.state.wakeups())
    }

    fn latency_unit_ns(&self) -> f64 {
        NS_PER_MS / self.micro.state.tsc_khz() as f64
    }

    fn cgroup(&self) -> &Cgroup {
        &self.cgroup
    }

    fn vcpu_tids(&self) -> Vec<u32> {
        let vcpus = self.micro.state.vcpus();
        vcpus.map(|vcpu| vcpu.tid as u32).collect()
    }

    fn ensure_alive(&mut self) -> Result<()> {
        self.micro.check()
    }

    fn situation(&self) -> String {
        let vcpus = self.micro.state.vcpus();
        let vcpus: Vec<String> = vcpus
            .map(|vcpu| format!("{} operations, in step {}", vcpu.progress, vcpu.step))
            .collect();
        format!("{}: {}", self.name(), vcpus.join("; "))
    }
}

/// A guest whose `vcpus` compute all the time.
pub fn busy(name: &str, vcpus: usize) -> Spec {
    (0..vcpus).fold(Spec::new(name), |spec, _| {
        spec.vcpu("loop: compute 1000000")
    })
}

/// A guest whose `vcpus` need the same lock most of the time, in guest kernel mode.
pub fn locked(name: &str, vcpus: usize) -> Spec {
    let program = "loop: lock; compute 50us; unlock; compute 20us";
    (0..vcpus).fold(Spec::new(name), |spec, _| spec.vcpu(program))
}
