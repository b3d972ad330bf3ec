// SPDX-License-Identifier: GPL-2.0-only
//! x86-64, with KVM on Intel's VMX or AMD's SVM.

use super::SpinParameter;
use nix::libc;
use std::fs;
use std::path::Path;

/// System calls that the other has not.
pub const SYSCALLS: &[(i64, &str)] = &[(libc::SYS_poll, "poll")];

/// What the scheduler needs and cannot have here, as a part of a sentence; the observer does without.
pub const SCHEDULER_LACKS: Option<&str> = None;

/// What a kernel calls its own clock, and people.
pub const CLOCKSOURCE: (&str, &str) = ("tsc", "TSC");

/// How KVM is had.
pub const LOAD_KVM: &str = "modprobe kvm_intel, or kvm_amd";

/// What decides whether vCPUs that spin leave the guest.
pub const SPIN_PARAMETERS: &[SpinParameter] = &[
    SpinParameter {
        module: "kvm_intel",
        name: "ple_gap",
        mend: INTEL_MEND,
    },
    SpinParameter {
        module: "kvm_intel",
        name: "ple_window",
        mend: INTEL_MEND,
    },
    SpinParameter {
        module: "kvm_amd",
        name: "pause_filter_count",
        mend: "modprobe -r kvm_amd && modprobe kvm_amd pause_filter_count=3000 (no VM may run)",
    },
];

const INTEL_MEND: &str =
    "modprobe -r kvm_intel && modprobe kvm_intel ple_gap=128 ple_window=4096 (no VM may run)";

/// What hardware does about interrupts without KVM seeing it.
///
/// Intel's APICv and AMD's AVIC deliver and end interrupts by themselves; both are parameters of KVM's modules.
pub fn hardware_ends_interrupts(sys: &Path) -> Option<&'static str> {
    let is_on = |file: &str| {
        let value = fs::read_to_string(sys.join("module").join(file)).unwrap_or_default();
        matches!(value.trim_end(), "Y" | "1")
    };
    if is_on("kvm_intel/parameters/enable_apicv") {
        return Some("APICv");
    }
    is_on("kvm_amd/parameters/avic").then_some("AVIC")
}

/// Whether this host is a VM itself: CPUID says so.
pub fn is_vm(proc: &Path) -> bool {
    let cpuinfo = fs::read_to_string(proc.join("cpuinfo")).unwrap_or_default();
    let flags = cpuinfo.lines().find(|line| line.starts_with("flags"));
    flags.is_some_and(|flags| flags.split_whitespace().any(|flag| flag == "hypervisor"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::paths::fixture::Fixture;

    #[test]
    fn hardware_that_ends_interrupts_is_told_by_kvms_modules() {
        let hidden = |file: &str, value: &str| {
            let fixture = Fixture::new().with(file, value);
            hardware_ends_interrupts(&fixture.host().sys)
        };
        let (apicv, avic) = (
            "sys/module/kvm_intel/parameters/enable_apicv",
            "sys/module/kvm_amd/parameters/avic",
        );
        assert_eq!(hidden(apicv, "Y\n"), Some("APICv"));
        assert_eq!(hidden(avic, "1\n"), Some("AVIC"));
        assert_eq!(hidden(avic, "N\n"), None);
        assert_eq!(hidden("sys/module/kvm/refcnt", "0"), None);
    }
}
