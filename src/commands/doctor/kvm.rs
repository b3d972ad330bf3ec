// SPDX-License-Identifier: GPL-2.0-only
//! How KVM is set up, and what of it can be seen.

use crate::bpf::sight::Seen;
use crate::commands::finding::{Finding, Severity};
use crate::host::arch::{self, SpinParameter};
use crate::host::kvm::KvmWatch;
use crate::host::paths::Host;
use crate::host::preflight;
use std::fs;

pub fn findings(host: &Host) -> Vec<Finding> {
    if !host.sys.join("module/kvm").exists() {
        return vec![Finding::new(
            "kvm",
            Severity::Note,
            "KVM is not loaded",
            "there are no VMs; Cohort sees KVM when it comes",
            arch::LOAD_KVM,
        )];
    }
    let mut findings = vec![nested(host), polling(host)];
    findings.extend(spin_exits(host));
    // Without privileges the kernel does not tell, which is a finding already (readiness.rs).
    if !preflight::lacks_privileges(host) {
        findings.push(sight(host));
    }
    findings
}

fn parameter(host: &Host, module: &str, name: &str) -> Option<String> {
    let path = host.sys.join(format!("module/{module}/parameters/{name}"));
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

fn nested(host: &Host) -> Finding {
    match arch::is_vm(&host.proc) {
        false => Finding::fine("nested", "this host is no VM itself"),
        true => Finding::new(
            "nested",
            Severity::Note,
            "this host is a VM itself",
            "its CPUs may be taken away without its knowing, and exits of its VMs are expensive",
            "",
        ),
    }
}

/// What it costs depends on the guests, which %POLL tells: no value is wrong in itself.
fn polling(host: &Host) -> Finding {
    let seen = match parameter(host, "kvm", "halt_poll_ns").as_deref() {
        None | Some("0") => String::from("KVM does not poll for work after a halt"),
        Some(ns) => format!(
            "KVM polls for up to {ns} ns after a halt; %POLL of cohort watch tells what that costs"
        ),
    };
    Finding::fine("halt-polling", seen)
}

/// Exits of vCPUs that spin, without which nobody learns that they do.
fn spin_exits(host: &Host) -> Option<Finding> {
    let is = |it: &&SpinParameter, value: &str| {
        parameter(host, it.module, it.name).is_some_and(|is| is == value)
    };
    if let Some(off) = arch::SPIN_PARAMETERS.iter().find(|it| is(it, "0")) {
        return Some(Finding::new(
            "spin-exits",
            Severity::Warning,
            format!(
                "{} of {} is 0: vCPUs that spin do not leave the guest",
                off.name, off.module
            ),
            "directed yields are how a waiting vCPU gives way; without these exits there are none",
            off.mend,
        ));
    }
    let mut modules = arch::SPIN_PARAMETERS.iter().map(|it| it.module);
    let known = modules.find(|module| host.sys.join("module").join(module).exists())?;
    Some(Finding::fine(
        "spin-exits",
        format!("{known} stops vCPUs that spin"),
    ))
}

fn sight(host: &Host) -> Finding {
    let hardware = arch::hardware_ends_interrupts(&host.sys);
    let kvm = match KvmWatch::new(host).moved() {
        Ok(Some(Some(kvm))) => kvm,
        Ok(_) => return Finding::fine("sight", "KVM is being loaded"),
        Err(error) => {
            return Finding::new(
                "sight",
                Severity::Refused,
                format!("KVM cannot be looked into: {error:#}"),
                "vCPUs cannot be told from other threads, so of this host only `cohort doctor` can tell",
                "boot a kernel that shows its symbols: see \"What to do about each refusal\" in /usr/share/doc/cohort/running.md",
            );
        }
    };
    let blind_spots = Seen::of(&kvm, hardware, &[]).blind_spots;
    match blind_spots.is_empty() {
        true => Finding::fine("sight", "IPIs and spin exits are seen"),
        false => Finding::new(
            "sight",
            Severity::Note,
            blind_spots.join("; "),
            "Cohort acts on what it sees",
            "",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{found, severity};
    use super::*;
    use crate::host::kvm::{HOOKABLE, PREEMPT_OPS};
    use crate::host::paths::fixture::Fixture;
    use crate::host::symbols::HIDDEN;

    fn good() -> Fixture {
        let fixture = Fixture::new()
            .with("sys/module/kvm/parameters/halt_poll_ns", "0\n")
            .with("sys/module/kvm_intel/parameters/ple_gap", "128\n")
            .with("sys/module/kvm_intel/parameters/ple_window", "4096\n")
            .with("proc/cpuinfo", "processor : 0\nflags : fpu vmx\n");
        let known = [PREEMPT_OPS].into_iter().chain(HOOKABLE);
        known.fold(fixture, |fixture, name| fixture.with_symbol(name, 0x1000))
    }

    #[test]
    fn a_good_host_is_fine() {
        let findings = findings(&good().host());
        let all_fine = findings
            .iter()
            .all(|finding| finding.severity == Severity::Fine);
        assert!(all_fine && findings.len() == 4, "{findings:?}");
    }

    #[test]
    fn each_fault_is_found() {
        for (path, content, check, expected) in [
            (
                "sys/module/kvm/parameters/halt_poll_ns",
                "200000\n",
                "halt-polling",
                Severity::Fine,
            ),
            (
                "sys/module/kvm_intel/parameters/ple_window",
                "0\n",
                "spin-exits",
                Severity::Warning,
            ),
            (
                "sys/module/kvm_amd/parameters/pause_filter_count",
                "0\n",
                "spin-exits",
                Severity::Warning,
            ),
            (
                "sys/module/kvm_intel/parameters/enable_apicv",
                "Y\n",
                "sight",
                Severity::Note,
            ),
            (
                "proc/cpuinfo",
                "flags : fpu hypervisor\n",
                "nested",
                Severity::Note,
            ),
        ] {
            let fixture = good().with(path, content);
            let finding = found(&findings(&fixture.host()), check);
            assert_eq!(finding.severity, expected, "{path}: {finding:?}");
        }
    }

    #[test]
    fn what_cannot_be_seen_is_told() {
        let sight = |fixture: Fixture| {
            let fixture = fixture.with("sys/module/kvm/refcnt", "0");
            severity(&findings(&fixture.host()), "sight")
        };
        let without_functions = Fixture::new().with_symbol(PREEMPT_OPS, 0x1000);
        assert_eq!(sight(without_functions), Severity::Note);
        assert_eq!(
            sight(good().with_symbol(PREEMPT_OPS, HIDDEN)),
            Severity::Refused
        );
        assert_eq!(sight(Fixture::new()), Severity::Refused);
    }

    #[test]
    fn a_host_without_kvm_is_told_so() {
        assert_eq!(
            severity(&findings(&Fixture::new().host()), "kvm"),
            Severity::Note
        );
    }
}
