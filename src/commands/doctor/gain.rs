// SPDX-License-Identifier: GPL-2.0-only
//! Which hosts gain from Cohort: told from recordings of them, best of a day.

use crate::commands::finding::{Finding, Severity};
use crate::commands::why::words::duration;
use crate::observer::recording::{Reader, newest_part};
use crate::observer::span::Span;
use crate::process::exit::Failure;
use std::path::{Path, PathBuf};

const CHECK: &str = "gain";
/// Of the time in which vCPUs wanted a CPU they waited: guests notice it from here on, percent.
const WAITS_PCT: f64 = 5.0;
/// Exits per second of a vCPU's running because it spins, from which on vCPUs count as waiting for each other.
const SPINS_PER_S: f64 = 100.0;
/// The same of KVM's search for whom to run instead, percent of the running time.
const SEARCH_PCT: f64 = 1.0;
/// The same of IPIs: a vCPU waited for so long on average until its receiver ran, us.
const IPI_US: f64 = 1000.0;

/// Of less, what a host gains is not said for sure, ms.
const SHORTEST_MS: u64 = 60_000;

/// A finding for each recording, those that gain most first; and what was wrong with those that cannot be read.
pub fn findings(recordings: &[PathBuf]) -> (Vec<Finding>, Vec<Failure>) {
    let mut days: Vec<(&Path, Day)> = Vec::new();
    let mut failures = Vec::new();
    // An older part is read with its recording, if that is given, too.
    let is_read_with = |path: &Path| newest_part(path).is_some_and(|it| recordings.contains(&it));
    for path in recordings.iter().filter(|path| !is_read_with(path)) {
        match Day::read(path) {
            Ok(day) => days.push((path, day)),
            Err(failure) => failures.push(failure),
        }
    }
    days.sort_by(|(_, a), (_, b)| b.waits_pct().total_cmp(&a.waits_pct()));
    let mut findings: Vec<Finding> = days.iter().map(|(path, day)| day.finding(path)).collect();
    findings.extend(failures.iter().map(|failure| {
        Finding::new(
            CHECK,
            Severity::Refused,
            failure.to_string(),
            "nothing can be told of that host",
            "cohort watch --record FILE, on that host, makes a recording",
        )
    }));
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    (findings, failures)
}

/// What vCPUs of a host did, all of them together.
#[derive(Default)]
struct Day {
    span: Span,
    /// vCPU time, ms: running, and waiting for a CPU.
    ran_ms: f64,
    waited_ms: f64,
    searched_ms: f64,
    spin_exits: u64,
    ipi_waits: u64,
    ipi_waits_us: u64,
    /// Time in which some VM waited noticeably, ms.
    crowded_ms: u64,
}

impl Day {
    fn read(path: &Path) -> Result<Self, Failure> {
        let mut reader = Reader::open(path)?;
        let mut day = Self::default();
        while let Some(view) = reader.window()? {
            let mut crowded = false;
            for vm in view.vms.values() {
                let all = &vm.all;
                let vcpu_ms = f64::from(all.vcpus) * view.window_ms as f64 / 100.0;
                day.ran_ms += all.on_cpu_pct * vcpu_ms;
                day.waited_ms += all.ready_pct * vcpu_ms;
                day.searched_ms += all.spin_pct * vcpu_ms;
                day.spin_exits += all.spin_exits;
                day.ipi_waits += all.ipi_to_run.iter().sum::<u64>();
                day.ipi_waits_us += all.ipi_to_run_us;
                crowded |= all.ready_pct >= WAITS_PCT;
            }
            if crowded {
                day.crowded_ms += view.window_ms;
            }
            // VMs of a day come and go; what they did is added up above.
            day.span.add_host(&view);
        }
        Ok(day)
    }

    fn waits_pct(&self) -> f64 {
        100.0 * self.waited_ms / (self.ran_ms + self.waited_ms).max(1.0)
    }

    /// How vCPUs wait for each other, in words, if they do.
    fn wait_for_each_other(&self) -> Vec<String> {
        let spins = self.spin_exits as f64 / (self.ran_ms / 1000.0).max(1.0);
        let search_pct = 100.0 * self.searched_ms / self.ran_ms.max(1.0);
        let ipi_us = self.ipi_waits_us as f64 / self.ipi_waits.max(1) as f64;
        let mut ways = Vec::new();
        if spins >= SPINS_PER_S {
            ways.push(format!(
                "they spun ({spins:.0} exits per second of running)"
            ));
        }
        if search_pct >= SEARCH_PCT {
            ways.push(format!(
                "KVM looked {search_pct:.1} % of their time whom to run instead"
            ));
        }
        if ipi_us >= IPI_US {
            let mean = duration(ipi_us as u64);
            ways.push(format!(
                "{} IPIs waited {mean} on average for their receiver",
                self.ipi_waits
            ));
        }
        ways
    }

    fn finding(&self, path: &Path) -> Finding {
        let span = &self.span;
        let seen = format!(
            "{}: {}, {:.1} vCPUs per CPU, {:.1} of {} CPUs wanted, scheduler {}; vCPUs waited {:.1} % of the time in which they \
             wanted a CPU, and some VM noticeably in {:.0} % of the windows",
            path.display(),
            duration(span.ms * 1000),
            span.overcommitment,
            span.wanted_cpus,
            span.cpus,
            span.scheduler(),
            self.waits_pct(),
            100.0 * self.crowded_ms as f64 / span.ms.max(1) as f64
        );
        let as_far = match span.ms < SHORTEST_MS {
            true => ", as far as so short a time tells: record a day",
            false => "",
        };
        if self.waits_pct() < WAITS_PCT && self.crowded_ms == 0 {
            return Finding::fine(
                CHECK,
                format!("{seen}: nothing to gain, vCPUs had CPUs when they wanted them{as_far}"),
            );
        }
        let ways = self.wait_for_each_other();
        if ways.is_empty() {
            let hidden = match span.has("spin_exits") {
                true => "",
                false => " (spin exits are not seen there)",
            };
            return Finding::new(
                CHECK,
                Severity::Note,
                format!("{seen}: little to gain{as_far}"),
                format!(
                    "its vCPUs wait for CPUs, but were not seen to wait for each other{hidden}: Cohort divides the CPU time by VM, and makes none"
                ),
                "cohort compare, on that host, tells for sure; fewer vCPUs help more",
            );
        }
        Finding::new(
            CHECK,
            Severity::Warning,
            format!("{seen}: it gains{as_far}"),
            format!(
                "its vCPUs wait for CPUs and for each other: {}",
                ways.join(", ")
            ),
            "cohort compare, on that host, tells how much",
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observer::recording::{Kept, Recorder};
    use crate::observer::view::{HostView, VcpuView, VmView};

    /// Of two windows.
    fn recording(
        folder: &Path,
        name: &str,
        window_ms: u64,
        ready_pct: f64,
        spin_exits: u64,
    ) -> PathBuf {
        let path = folder.join(name);
        let all = VcpuView {
            vcpus: 2,
            on_cpu_pct: 50.0,
            ready_pct,
            spin_exits,
            ..VcpuView::default()
        };
        let vm = VmView {
            all,
            ..VmView::default()
        };
        let view = HostView {
            window_ms,
            cpus: 2,
            scheduler: String::from("stock"),
            vms: [(7, vm)].into(),
            ..HostView::default()
        };
        let mut recorder = Recorder::create(&path, Kept::default()).expect("it is new");
        recorder.add(&view).expect("there is room");
        recorder.add(&view).expect("there is room");
        path
    }

    #[test]
    fn the_host_whose_vcpus_wait_for_each_other_comes_first() {
        let folder = tempfile::tempdir().expect("a folder can be made");
        let host =
            |name, ready_pct, spins| recording(folder.path(), name, 60_000, ready_pct, spins);
        let files = [
            host("idle", 0.1, 0),
            host("full", 40.0, 3),
            host("spins", 30.0, 240_000),
        ];
        let (found, failures) = findings(&files);
        assert!(failures.is_empty(), "{failures:?}");
        let told: Vec<(Severity, bool)> = ["spins", "full", "idle"]
            .iter()
            .zip(&found)
            .map(|(name, finding)| (finding.severity, finding.seen.contains(name)))
            .collect();
        let expected = [Severity::Warning, Severity::Note, Severity::Fine].map(|it| (it, true));
        assert_eq!(told, expected, "{found:?}");
        // Of 50 % running and 30 % waiting.
        assert!(found[0].seen.contains("waited 37.5 %"), "{found:?}");
        assert!(found[0].why.contains("4000 exits per second"), "{found:?}");
    }

    #[test]
    fn what_cannot_be_read_hides_no_other_one_and_seconds_are_said_to_be_short() {
        let folder = tempfile::tempdir().expect("a folder can be made");
        let good = recording(folder.path(), "good", 1000, 30.0, 4000);
        let missing = folder.path().join("missing");
        let (found, failures) = findings(&[missing, good]);
        assert_eq!(failures.len(), 1);
        assert_eq!(found[0].severity, Severity::Refused);
        assert!(found[0].seen.contains("missing"), "{found:?}");
        assert!(found[1].seen.contains("so short a time"), "{found:?}");
    }

    #[test]
    fn an_older_part_is_no_host_of_its_own() {
        let folder = tempfile::tempdir().expect("a folder can be made");
        let newest = recording(folder.path(), "host", 60_000, 30.0, 0);
        let other = recording(folder.path(), "host.a", 60_000, 30.0, 0);
        let older = folder.path().join("host.1");
        std::fs::copy(&newest, &older).expect("there is room");
        let of = |files: &[PathBuf]| findings(files).0.len();
        assert_eq!(of(&[newest.clone(), older.clone(), other]), 2);
        assert_eq!(of(&[older]), 1);
    }
}
