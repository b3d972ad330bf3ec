// SPDX-License-Identifier: GPL-2.0-only
//! How the host's CPUs and cgroups are set up.

use crate::commands::finding::{Finding, Severity};
use crate::host::cgroups;
use crate::host::paths::Host;
use std::fs;

pub fn findings(host: &Host) -> Vec<Finding> {
    let read = |path: &str| fs::read_to_string(host.sys.join(path)).unwrap_or_default();
    let cpu = |file: &str| {
        let text = read(&format!("devices/system/cpu/{file}"));
        // Some kernels write "(null)" for none.
        let text = text.trim();
        (!text.is_empty() && text != "(null)").then(|| text.to_owned())
    };
    let mut findings = vec![match cpu("smt/active").as_deref() {
        Some("1") => Finding::new(
            "smt",
            Severity::Note,
            "two hardware threads share a core",
            "vCPUs of different VMs run on one core at once; Cohort does not keep those apart that must not trust each other",
            "echo off > /sys/devices/system/cpu/smt/control, if tenants are strangers",
        ),
        _ => Finding::fine("smt", "no two hardware threads share a core"),
    }];
    findings.push(match cpu("isolated") {
        None => Finding::fine("isolated-cpus", "none"),
        Some(cpus) => Finding::new(
            "isolated-cpus",
            Severity::Note,
            format!("CPUs {cpus} are isolated"),
            "only what is pinned there runs there; Cohort fills the others",
            "remove isolcpus= from the kernel's command line, unless you pin VMs there",
        ),
    });
    findings.push(match cpu("nohz_full") {
        None => Finding::fine("tick", "all CPUs tick"),
        Some(cpus) => Finding::new(
            "tick",
            Severity::Note,
            format!("CPUs {cpus} may run without a tick (nohz_full)"),
            "not under Cohort: there a CPU has its tick while it is busy",
            "keep off these CPUs what must not be interrupted, or leave this host to the kernel's scheduler",
        ),
    });
    findings.push(cgroup_version(host));
    let schedstats = fs::read_to_string(host.proc.join("sys/kernel/sched_schedstats"));
    if schedstats.is_ok_and(|value| value.trim() == "1") {
        findings.push(Finding::new(
            "schedstats",
            Severity::Note,
            "schedstats are on",
            "they cost a little at each context switch, and Cohort does not need them",
            "sysctl kernel.sched_schedstats=0",
        ));
    }
    findings
}

fn cgroup_version(host: &Host) -> Finding {
    let Some(folder) = cgroups::mount(host) else {
        return Finding::new(
            "cgroups",
            Severity::Warning,
            "cgroups are of version 1, or not mounted",
            "weights and caps of VMs are not seen: all VMs get the same",
            "boot with systemd.unified_cgroup_hierarchy=1",
        );
    };
    let on = fs::read_to_string(folder.join("cgroup.subtree_control")).unwrap_or_default();
    match on.split_whitespace().any(|controller| controller == "cpu") {
        true => Finding::fine("cgroups", "version 2, with the cpu controller"),
        false => Finding::new(
            "cgroups",
            Severity::Warning,
            "the cpu controller is off",
            "weights and caps of VMs do not exist: all VMs get the same",
            "echo +cpu > /sys/fs/cgroup/cgroup.subtree_control",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::severity;
    use super::*;
    use crate::host::paths::fixture::Fixture;

    fn good() -> Fixture {
        Fixture::new()
            .with("sys/devices/system/cpu/smt/active", "0\n")
            .with("sys/devices/system/cpu/isolated", "\n")
            .with("sys/devices/system/cpu/nohz_full", "(null)\n")
            .with("sys/fs/cgroup/cgroup.controllers", "cpuset cpu io\n")
            .with("sys/fs/cgroup/cgroup.subtree_control", "cpu io\n")
    }

    #[test]
    fn a_good_host_is_fine() {
        let all_fine = |findings: Vec<Finding>| {
            findings
                .iter()
                .all(|finding| finding.severity == Severity::Fine)
        };
        assert!(all_fine(findings(&good().host())));
    }

    #[test]
    fn each_fault_is_found() {
        for (path, content, check, expected) in [
            (
                "sys/devices/system/cpu/smt/active",
                "1\n",
                "smt",
                Severity::Note,
            ),
            (
                "sys/devices/system/cpu/isolated",
                "2-3\n",
                "isolated-cpus",
                Severity::Note,
            ),
            (
                "sys/devices/system/cpu/nohz_full",
                "2-3\n",
                "tick",
                Severity::Note,
            ),
            (
                "sys/fs/cgroup/cgroup.subtree_control",
                "io\n",
                "cgroups",
                Severity::Warning,
            ),
            (
                "proc/sys/kernel/sched_schedstats",
                "1\n",
                "schedstats",
                Severity::Note,
            ),
        ] {
            let fixture = good().with(path, content);
            assert_eq!(
                severity(&findings(&fixture.host()), check),
                expected,
                "{path}"
            );
        }
    }

    #[test]
    fn cgroups_of_version_1_are_found() {
        assert_eq!(
            severity(&findings(&Fixture::new().host()), "cgroups"),
            Severity::Warning
        );
    }
}
