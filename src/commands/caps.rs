// SPDX-License-Identifier: GPL-2.0-only
//! What `cohort doctor` and `cohort why` say of caps (cpu.max): why they hurt, and how whoever manages a cgroup lifts its own.

use crate::host::cgroups::is_below_vm;

/// Why a cap hurts.
pub const STOPS_HOLDERS: &str = "a vCPU that a cap stops may hold a lock its siblings spin for; they cannot go on before the next period either";

/// The command that lifts the cap of the cgroup `path`, in or above which VM `name` runs, whose manager calls it `id`.
pub fn lift(path: &str, name: &str, id: &str) -> String {
    let last = path.rsplit('/').next().unwrap_or_default();
    for (thread, option) in [
        ("vcpu", "vcpu_quota"),
        ("emulator", "emulator_quota"),
        ("iothread", "iothread_quota"),
    ] {
        if is_below_vm(path) && last.starts_with(thread) {
            return format!("virsh schedinfo {name} --live {option}=-1");
        }
    }
    if path.contains("kubepods") {
        return format!("raise limits.cpu of the pod, or leave it out: it owns {path}");
    }
    if path.starts_with("/qemu.slice/") && !id.is_empty() {
        return format!("qm set {id} --cpulimit 0");
    }
    if last.starts_with("machine-qemu") {
        return format!("virsh schedinfo {name} --live global_quota=-1");
    }
    if [".scope", ".slice", ".service"]
        .iter()
        .any(|kind| last.ends_with(kind))
    {
        return format!("systemctl set-property {last} CPUQuota=");
    }
    format!("echo max > /sys/fs/cgroup{path}/cpu.max")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_remedy_is_the_managers_own() {
        for (path, command) in [
            (
                "/machine.slice/machine-qemu.scope/libvirt/vcpu0",
                "virsh schedinfo web --live vcpu_quota=-1",
            ),
            (
                "/machine.slice/machine-qemu.scope/libvirt/emulator",
                "virsh schedinfo web --live emulator_quota=-1",
            ),
            (
                "/machine.slice/machine-qemu\\x2d1.scope",
                "virsh schedinfo web --live global_quota=-1",
            ),
            (
                "/machine/q.libvirt-qemu/vcpu1",
                "virsh schedinfo web --live vcpu_quota=-1",
            ),
            ("/qemu.slice/101.scope", "qm set 101 --cpulimit 0"),
            (
                "/user.slice/vms.slice",
                "systemctl set-property vms.slice CPUQuota=",
            ),
            (
                "/kata/sandbox",
                "echo max > /sys/fs/cgroup/kata/sandbox/cpu.max",
            ),
        ] {
            assert_eq!(lift(path, "web", "101"), command, "{path}");
        }
    }
}
