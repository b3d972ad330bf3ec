// SPDX-License-Identifier: GPL-2.0-only
//! A VM none of whose vCPUs ran in the whole time, and which the observer has not seen therefore: what its threads sleep in
//! is told by procfs.

use crate::host::paths::Host;
use crate::host::standing::Standing;
use crate::host::threads::{self, Role};
use crate::host::vm_identity::VmIdentity;
use crate::observer::span::{Span, VmSpan};
use crate::observer::view::{OffCpuView, VcpuView, VmView};

/// Adds those VMs that people call `name`, if none of them ran.
pub fn add(span: &mut Span, host: &Host, name: &str) {
    let ran = |(&tgid, vm): (&u32, &VmSpan)| vm.vm.is_called(tgid, name);
    if span.vms.iter().any(ran) {
        return;
    }
    for (tgid, vm) in called(host, name) {
        if let Some(vm) = standing(host, tgid, vm, span) {
            span.vms.insert(tgid, vm);
        }
    }
}

/// The processes that people call `name`, if they are VMs.
pub fn called(host: &Host, name: &str) -> impl Iterator<Item = (u32, VmView)> {
    let processes = threads::numbers(&host.proc).into_iter().flatten();
    processes.filter_map(move |tgid| {
        let identity = VmIdentity::of(&host.proc, tgid);
        let vm = VmView {
            name: identity.name.clone(),
            identity,
            ..VmView::default()
        };
        vm.is_called(tgid, name).then_some((tgid, vm))
    })
}

/// `vm`, of process `tgid`, in that time; `None` if it has no vCPU.
fn standing(host: &Host, tgid: u32, mut vm: VmView, span: &Span) -> Option<VmSpan> {
    let us = span.ms * 1000;
    let mut stalled_vcpu = 0;
    let vcpus = threads::of_vm(&host.proc, tgid);
    let vcpus = vcpus.iter().filter(|thread| thread.role == Role::Vcpu);
    for (number, thread) in (0..).zip(vcpus) {
        let folder = host.proc.join(format!("{tgid}/task/{}", thread.tid));
        let Some(standing) = Standing::read(&folder) else {
            continue;
        };
        let mut vcpu = VcpuView {
            vcpus: 1,
            ..VcpuView::default()
        };
        if standing.is_halted() {
            vcpu.halted_pct = 100.0;
        } else {
            vcpu.away_pct = 100.0;
            vcpu.longest_off_cpu = OffCpuView {
                us,
                until_ms: span.until_ms,
                goes_on: 1,
                sleep: standing.sleep,
                syscall: standing.syscall,
                ..OffCpuView::default()
            };
            if vm.all.longest_off_cpu.us == 0 {
                stalled_vcpu = number;
                vm.all.longest_off_cpu.clone_from(&vcpu.longest_off_cpu);
            }
        }
        vm.vcpus.insert(number, vcpu);
    }
    let vcpus = vm.vcpus.len();
    let part = |of: fn(&VcpuView) -> f64| vm.vcpus.values().map(of).sum::<f64>() / vcpus as f64;
    (vm.all.halted_pct, vm.all.away_pct) = (part(|it| it.halted_pct), part(|it| it.away_pct));
    vm.all.vcpus = u32::try_from(vcpus).unwrap_or(u32::MAX);
    (vcpus > 0).then(|| VmSpan {
        ms: span.ms,
        vm,
        stalled_vcpu,
        ..VmSpan::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::arch;
    use crate::host::paths::fixture::Fixture;

    #[test]
    fn a_vm_that_was_paused_before_is_found_by_its_threads() {
        let status = "Cpus_allowed_list:\t0\n";
        let paused = format!("{} 0x55d0 0x189 0x0\n", arch::FUTEX);
        let fixture = Fixture::new()
            .with("proc/7/cmdline", "qemu\0-name\0guest=web")
            .with("proc/7/comm", "qemu\n")
            .with("proc/7/task/7/comm", "qemu\n")
            .with("proc/7/task/7/status", status)
            .with("proc/7/task/8/comm", "CPU 0/KVM\n")
            .with("proc/7/task/8/status", status)
            .with("proc/7/task/8/stat", "8 (CPU 0/KVM) S 1 8 8 0")
            .with("proc/7/task/8/syscall", paused)
            .with("proc/9/comm", "sh\n");
        let mut span = Span {
            ms: 5000,
            ..Span::default()
        };
        add(&mut span, &fixture.host(), "sh-9");
        assert!(span.vms.is_empty(), "it has no vCPU");
        add(&mut span, &fixture.host(), "web");
        let all = &span.vms[&7].vm.all;
        assert_eq!((all.vcpus, all.away_pct), (1, 100.0));
        assert_eq!(all.longest_off_cpu.us, 5_000_000);
        assert!(all.longest_off_cpu.slept("told"));
    }
}
