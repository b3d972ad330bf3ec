// SPDX-License-Identifier: GPL-2.0-only
//! arm64, with KVM at EL2. Written from the kernel's sources: nobody has run it.

use super::SpinParameter;
use std::fs;
use std::path::Path;

/// System calls that the other has not.
pub const SYSCALLS: &[(i64, &str)] = &[];

/// What the scheduler needs and cannot have here, as a part of a sentence; the observer does without.
pub const SCHEDULER_LACKS: Option<&str> = Some(
    "it acts on interrupts that vCPUs send each other, and on whether a vCPU was in its guest's kernel, and how KVM's GIC and \
     arm64's exits tell that is not written yet",
);

/// What a kernel calls its own clock, and people.
pub const CLOCKSOURCE: (&str, &str) = ("arch_sys_counter", "generic timer");

/// How KVM is had.
pub const LOAD_KVM: &str = "boot the kernel at EL2, and one with CONFIG_KVM";

/// What decides whether vCPUs that spin leave the guest: their WFE always does.
pub const SPIN_PARAMETERS: &[SpinParameter] = &[];

/// What hardware does about interrupts without KVM seeing it: a virtual GIC ends each by itself.
pub fn hardware_ends_interrupts(_sys: &Path) -> Option<&'static str> {
    Some("the GIC")
}

/// Whether this host is a VM itself: the device tree says so. Hosts with ACPI do not tell.
pub fn is_vm(proc: &Path) -> bool {
    fs::exists(proc.join("device-tree/hypervisor")).unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::paths::fixture::Fixture;

    #[test]
    fn a_vm_is_told_by_its_device_tree() {
        let host = Fixture::new().with("proc/cpuinfo", "Features : fp asimd\n");
        assert!(!is_vm(&host.host().proc));
        let vm = host.with("proc/device-tree/hypervisor/compatible", "linux,kvm\0");
        assert!(is_vm(&vm.host().proc));
    }
}
