// SPDX-License-Identifier: GPL-2.0-only
//! The programs by which micro guests do a cell's workloads. Not for starting them (`micro`), nor for how programs become
//! machine code (`cohort_micro`).
use anyhow::{Result, bail};
use cohort_micro::Spec;

use crate::cell::{Party, Pause, Workload};

/// A VM of `party` as a micro guest. `iterations_per_ms` is what an idle CPU computes, so that equal guests do equal work.
///
/// # Errors
/// When its workload needs a kernel.
pub fn spec(name: &str, party: &Party, pause: Pause, iterations_per_ms: u64) -> Result<Spec> {
    let spec = Spec::new(name).iterations_per_ms(iterations_per_ms);
    let spec = match pause {
        Pause::Exits => spec,
        Pause::Never => spec.pause_passthrough(),
    };
    (0..party.width).try_fold(spec, |spec, vcpu| Ok(spec.vcpu(program(party, vcpu)?)))
}

/// What vCPU number `vcpu` runs.
fn program(party: &Party, vcpu: u32) -> Result<String> {
    let work_ns = party.operation_us * 1000;
    let locked_ns = work_ns * u64::from(party.locked_percent) / 100;
    let (half_ns, partner) = (work_ns / 2, vcpu ^ 1);
    Ok(match party.workload {
        Workload::Lock => format!(
            "loop: lock; compute {locked_ns}ns; unlock; compute {}ns",
            work_ns - locked_ns
        ),
        Workload::Barrier => format!("loop: compute {work_ns}ns; barrier"),
        Workload::SleepingBarrier => format!("loop: compute {work_ns}ns; sleeping-barrier 0x40"),
        // Each sender has its own vector.
        Workload::Tlb => format!("loop: compute {work_ns}ns; shootdown {:#x}", 0x40 + vcpu),
        Workload::Pipe if vcpu.is_multiple_of(2) => {
            format!("loop: compute {half_ns}ns; ipi {partner} 0x40; halt")
        }
        Workload::Pipe => format!("loop: halt; compute {half_ns}ns; ipi {partner} 0x40"),
        Workload::Busy => format!("loop: compute {work_ns}ns"),
        Workload::Latency => format!("loop: sleep 1ms; compute {work_ns}ns"),
        other => bail!(
            "{} needs a guest with a kernel, which micro guests have not",
            other.name()
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cell::example;

    fn spec_of(workload: Workload, width: u32) -> Result<Spec> {
        let party = Party {
            workload,
            width,
            ..example().vms[0].clone()
        };
        spec("vm1", &party, Pause::Never, 1000)
    }

    #[test]
    fn every_workload_without_a_kernel_has_programs_that_fit_together() {
        for workload in [
            Workload::Lock,
            Workload::Barrier,
            Workload::SleepingBarrier,
            Workload::Tlb,
            Workload::Pipe,
            Workload::Busy,
            Workload::Latency,
        ] {
            let spec = spec_of(workload, 30).unwrap();
            spec.compile().unwrap();
            assert_eq!(spec.vcpus.len(), 30);
            assert!(spec.pause_passthrough);
        }
        assert!(spec_of(Workload::Rcu, 2).is_err());
    }

    #[test]
    fn a_third_of_a_locks_work_is_locked() {
        let spec = spec_of(Workload::Lock, 1).unwrap();
        assert_eq!(
            spec.vcpus,
            ["loop: lock; compute 33000ns; unlock; compute 67000ns"]
        );
    }
}
