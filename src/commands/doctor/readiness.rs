// SPDX-License-Identifier: GPL-2.0-only
//! Whether Cohort can run on this host at all: what `cohort run` refuses, and who else wants to schedule.

use crate::commands::finding::{Finding, Severity};
use crate::host::cookies::kernel_cookie;
use crate::host::paths::Host;
use crate::host::preflight::{self, Refusal};
use crate::scheduler::features::Features;
use crate::scheduler::settings::{Settings, SettingsSource};
use std::fs;

/// Programs that load schedulers, or change what Cohort reckons with, by themselves.
const MEDDLERS: [(&str, &str); 3] = [
    ("scx_loader", "it loads another scheduler when it sees fit"),
    ("ananicy-cpp", "it changes niceness, which Cohort obeys"),
    (
        "tuned",
        "some of its profiles change CPU frequencies and KVM's polling",
    ),
];

pub fn findings(host: &Host) -> Vec<Finding> {
    let machine = preflight::check_machine(host).and_then(|()| preflight::check_known_bad(host));
    let release = fs::read_to_string(host.proc.join("sys/kernel/osrelease")).unwrap_or_default();
    let lacks = match machine {
        Ok(()) => Features::of_this_kernel().blind_spots(),
        Err(_) => Vec::new(),
    };
    let mut findings = vec![match machine {
        Ok(()) if !lacks.is_empty() => Finding::new(
            "kernel",
            Severity::Note,
            format!("{}, with sched_ext; {}", release.trim(), lacks.join("; ")),
            "Cohort runs, and does without",
            "/usr/share/doc/cohort/kernels.md says which kernels have it, if it matters here",
        ),
        Ok(()) => Finding::fine(
            "kernel",
            format!(
                "{}, with sched_ext and sound type information",
                release.trim()
            ),
        ),
        Err(refusal) => refused("kernel", &refusal),
    }];
    findings.extend(
        preflight::check_privileges(host)
            .err()
            .map(|refusal| refused("privileges", &refusal)),
    );
    findings.push(match preflight::loaded_scheduler(host).as_deref() {
        None => Finding::fine("scheduler", "no other sched_ext scheduler is loaded"),
        Some(name) if preflight::is_cohort(name) => Finding::fine("scheduler", "Cohort runs"),
        Some(name) => Finding::new(
            "scheduler",
            Severity::Refused,
            format!("the sched_ext scheduler {name} is loaded"),
            "the kernel runs one at a time",
            "systemctl disable --now scx",
        ),
    });
    findings.push(match preflight::check_no_cookies(host) {
        Ok(()) => core_scheduling(kernel_cookie(std::process::id()).is_ok()),
        Err(refusal) => refused("core-scheduling", &refusal),
    });
    findings.extend(meddlers(host));
    findings
}

/// Whether `cohort run` would take its settings.
pub fn settings(host: &Host, source: &SettingsSource) -> Finding {
    match Settings::of_source(source, host) {
        Ok(settings) => Finding::fine("settings", settings.origin()),
        Err(failure) => Finding::new(
            "settings",
            Severity::Refused,
            failure.to_string(),
            "`cohort run` would not start",
            "correct that; `cohort run --help` tells what may stand there",
        ),
    }
}

/// No thread has a cookie now. Whether one can get one while a scheduler is loaded is asked of this thread.
fn core_scheduling(possible: bool) -> Finding {
    match possible {
        false => Finding::fine("core-scheduling", "no thread can have a cookie"),
        true => Finding::new(
            "core-scheduling",
            Severity::Warning,
            "no thread has a cookie, but this kernel has core scheduling (CONFIG_SCHED_CORE), and cores have two hardware threads",
            // https://github.com/sched-ext/scx/issues/3715
            "under any sched_ext scheduler the whole host may hang as soon as a thread gets one, before Cohort can leave (seen with \
             Linux 7.1.3). Cloud Hypervisor gives its vCPUs cookies unless told otherwise",
            "start cloud-hypervisor with --cpus …,core_scheduling=off, or boot a kernel without CONFIG_SCHED_CORE (Debian's)",
        ),
    }
}

fn refused(check: &'static str, refusal: &Refusal) -> Finding {
    let (why, mend) = match refusal {
        Refusal::NoPrivileges { .. } => (
            "what belongs to others is not seen: VMs, for example, so nothing below is sure",
            "sudo cohort doctor",
        ),
        Refusal::KnownBad { .. } => (
            "hosts were seen to hang",
            "boot another kernel: /usr/share/doc/cohort/kernels.md lists which are known to work",
        ),
        Refusal::CoreScheduling(_) => (
            "Cohort does not obey cookies: it would break the protection, and such hosts were seen to hang",
            "turn core scheduling off for this workload, or keep the kernel's scheduler",
        ),
        Refusal::Unreadable { .. } | Refusal::CoreSchedulingUnknown(_) => {
            ("it cannot be checked", "mount /proc and /sys, and be root")
        }
        _ => (
            "Cohort is a sched_ext scheduler for x86-64, and needs a kernel that has that and describes it soundly",
            "boot another kernel: /usr/share/doc/cohort/kernels.md lists which are known to work",
        ),
    };
    Finding::new(check, Severity::Refused, refusal.to_string(), why, mend)
}

fn meddlers(host: &Host) -> Option<Finding> {
    let processes = fs::read_dir(&host.proc).ok()?.flatten();
    let names = processes.filter_map(|entry| fs::read_to_string(entry.path().join("comm")).ok());
    let running: Vec<String> = names.map(|name| name.trim().to_owned()).collect();
    let (name, what) = MEDDLERS
        .into_iter()
        .find(|(name, _)| running.iter().any(|running| running == name))?;
    Some(Finding::new(
        "daemons",
        Severity::Note,
        format!("{name} runs"),
        what,
        format!("systemctl stop {name}, if it gets in the way"),
    ))
}

#[cfg(test)]
mod tests {
    use super::super::tests::{found, severity};
    use super::*;
    use crate::host::paths::fixture::Fixture;

    #[test]
    fn a_kernel_without_sched_ext_is_refused() {
        let fixture = Fixture::new().with("proc/sys/kernel/osrelease", "6.12.1\n");
        let finding = found(&findings(&fixture.host()), "kernel");
        assert_eq!(finding.severity, Severity::Refused);
        assert!(finding.seen.contains("6.12.1"), "{finding:?}");
    }

    #[test]
    fn missing_privileges_are_a_finding_beside_that_of_the_kernel() {
        let fixture = Fixture::new()
            .with("proc/sys/kernel/osrelease", "6.12.1\n")
            .with("proc/self/status", "CapEff:\t0000000000000000\n");
        let findings = findings(&fixture.host());
        assert_eq!(severity(&findings, "kernel"), Severity::Refused);
        let finding = found(&findings, "privileges");
        assert_eq!(finding.mend, "sudo cohort doctor");
    }

    #[test]
    fn another_scheduler_is_refused_and_cohort_itself_is_not() {
        let with = |name: &str| {
            Fixture::new()
                .with("sys/kernel/sched_ext/state", "enabled\n")
                .with("sys/kernel/sched_ext/root/ops", name)
        };
        let of = |name: &str| severity(&findings(&with(name).host()), "scheduler");
        assert_eq!(of("scx_lavd_1.0\n"), Severity::Refused);
        assert_eq!(of("cohort_0.1.0\n"), Severity::Fine);
        assert_eq!(
            severity(&findings(&Fixture::new().host()), "scheduler"),
            Severity::Fine
        );
    }

    #[test]
    fn settings_that_run_would_refuse_are_refused_with_their_line() {
        let of = |fixture: Fixture| settings(&fixture.host(), &SettingsSource::default());
        assert_eq!(of(Fixture::new()).severity, Severity::Fine);
        let sound = of(Fixture::new().with("etc/cohort.toml", "slice = \"2ms\"\n"));
        assert_eq!(sound.severity, Severity::Fine);
        assert!(sound.seen.contains("cohort.toml"), "{sound:?}");
        let wrong = of(Fixture::new().with("etc/cohort.toml", "\nslice = \"2h\"\n"));
        assert_eq!(wrong.severity, Severity::Refused);
        assert!(
            wrong.seen.contains("cohort.toml:2: slice cannot be"),
            "{wrong:?}"
        );
    }

    #[test]
    fn that_a_cookie_may_hang_the_host_is_said_before_there_is_one() {
        assert_eq!(core_scheduling(false).severity, Severity::Fine);
        let finding = core_scheduling(true);
        assert_eq!(finding.severity, Severity::Warning);
        assert!(finding.mend.contains("core_scheduling=off"), "{finding:?}");
    }

    #[test]
    fn who_loads_schedulers_by_himself_is_named() {
        let fixture = Fixture::new()
            .with("proc/7/comm", "bash\n")
            .with("proc/8/comm", "scx_loader\n");
        let finding = found(&findings(&fixture.host()), "daemons");
        assert!(finding.seen.contains("scx_loader"));
    }
}
