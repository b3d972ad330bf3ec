// SPDX-License-Identifier: GPL-2.0-only
//! Does a cap (cpu.max) stop it: which cgroup of those above its threads, how often, for how long?

use super::facts::{Facts, Live};
use super::words::duration;
use crate::commands::caps::{STOPS_HOLDERS, lift};
use crate::commands::finding::{Finding, Severity};
use crate::host::cgroups::Level;
use std::path::Path;

const CHECK: &str = "throttled";
/// Less is a rounding error, percent of the time.
const LEAST_PCT: f64 = 0.05;
/// A cap counts as used up where the scheduler does not tell, from this part on.
const USED_UP: f64 = 0.9;

pub fn finding(facts: &Facts) -> Finding {
    let limited_pct = facts.all().limited_pct;
    let stood = format!("its vCPUs stood still for it {limited_pct:.1} % of the time");
    let Some(live) = &facts.live else {
        return match limited_pct >= LEAST_PCT {
            true => Finding::new(
                CHECK,
                Severity::Warning,
                format!("throttled: {stood}"),
                STOPS_HOLDERS,
                "cohort why VM, on the host, names the cgroup",
            ),
            false => Finding::fine(
                CHECK,
                format!("not throttled: no cap stopped a vCPU in {}", facts.time()),
            ),
        };
    };
    // Of what the kernel throttles it keeps account; of what Cohort holds back there is the CPU time.
    let is_guilty = |level: &&Level| match facts.span.is_stock() {
        true => level.throttled > 0,
        false => limited_pct >= LEAST_PCT && used_part(level, facts) >= USED_UP,
    };
    let guilty: Vec<&Level> = live.levels.iter().filter(is_guilty).collect();
    if let Some(first) = guilty.first() {
        let seen: Vec<String> = guilty.iter().map(|it| account(it, live, facts)).collect();
        return Finding::new(
            CHECK,
            Severity::Warning,
            format!("throttled: {}; {stood}", seen.join("; ")),
            STOPS_HOLDERS,
            lift(&first.path, facts.name(), &facts.vm.vm.identity.id),
        );
    }
    if limited_pct >= LEAST_PCT {
        return Finding::new(
            CHECK,
            Severity::Warning,
            format!("throttled: {stood}, but none of the caps above it was used up"),
            STOPS_HOLDERS,
            "look at cpu.max of the cgroups in /proc/PID/cgroup and above",
        );
    }
    if live.levels.is_empty() {
        return Finding::new(
            CHECK,
            Severity::Note,
            "not known: this host's cgroups are of version 1, or its process has gone",
            "caps of version 1 are not looked at",
            "cat /sys/fs/cgroup/cpu/…/cpu.stat, which counts nr_throttled there",
        );
    }
    Finding::fine(CHECK, format!("not throttled: {}", innocent(live, facts)))
}

/// Why no cap can have stopped it.
fn innocent(live: &Live, facts: &Facts) -> String {
    let all = live.levels.len();
    let capped: Vec<&Level> = live
        .levels
        .iter()
        .filter(|it| it.cap_us.is_some())
        .collect();
    let by_use = |a: &&&Level, b: &&&Level| used_part(a, facts).total_cmp(&used_part(b, facts));
    match capped.iter().max_by(by_use) {
        None => format!(
            "none of the {all} cgroups that its threads are in or below has a cap (cpu.max)"
        ),
        Some(nearest) => format!(
            "of the {all} cgroups that its threads are in or below {} have a cap (cpu.max), and none was used up in {}; {} used \
             most of its own: {:.0} %",
            capped.len(),
            facts.time(),
            nearest.path,
            100.0 * used_part(nearest, facts)
        ),
    }
}

/// What part of its cap was used.
fn used_part(level: &Level, facts: &Facts) -> f64 {
    let allowed_us = level.cap_cpus().unwrap_or(f64::INFINITY) * facts.vm.ms as f64 * 1000.0;
    level.used_us as f64 / allowed_us
}

/// What `level` did, and to whom.
fn account(level: &Level, live: &Live, facts: &Facts) -> String {
    let cap = match level.cap_us.zip(level.cap_cpus()) {
        Some(((quota, period), cpus)) => {
            format!("cpu.max \"{quota} {period}\", {cpus:.2} CPUs")
        }
        None => String::from("its cpu.max was lifted meanwhile"),
    };
    let below =
        |path: Option<&str>| path.is_some_and(|path| Path::new(path).starts_with(&level.path));
    let count = |vcpus: usize, others: usize| match (vcpus, others) {
        (vcpus, 0) => format!("{vcpus} of its vCPUs are below it"),
        (0, others) => format!("{others} of its threads are below it, no vCPU"),
        (vcpus, others) => format!("{vcpus} vCPUs and {others} other threads of it are below it"),
    };
    let who = count(
        live.vcpus()
            .filter(|it| below(it.cgroup.as_deref()))
            .count(),
        live.others()
            .filter(|it| below(it.cgroup.as_deref()))
            .count(),
    );
    let how = match facts.span.is_stock() {
        true => format!(
            "in {} of {} periods, {} in sum over the CPUs",
            level.throttled,
            level.periods,
            duration(level.throttled_us)
        ),
        false => format!(
            "it used {:.0} % of what that allows",
            100.0 * used_part(level, facts)
        ),
    };
    format!("by cgroup {} ({cap}) {how}; {who}", level.path)
}

#[cfg(test)]
mod tests {
    use super::super::facts::fixture::{facts, live};
    use super::*;

    fn level(path: &str, cap_us: Option<(u64, u64)>, used_us: u64) -> Level {
        Level {
            path: path.to_owned(),
            cap_us,
            used_us,
            ..Level::default()
        }
    }

    const POD: &str = "/kubepods.slice/kubepods-pod1.slice";

    /// A pod whose inner cgroup has a cap of half a CPU.
    fn pod() -> Facts {
        let mut facts = facts();
        let inner = format!("{POD}/cri-1.scope");
        let live = live(&mut facts);
        for thread in &mut live.threads {
            thread.cgroup = Some(inner.clone());
        }
        live.levels = vec![
            level("/kubepods.slice", None, 1_000_000),
            level(POD, None, 1_000_000),
            level(&inner, Some((50_000, 100_000)), 1_000_000),
        ];
        facts
    }

    #[test]
    fn who_has_no_cap_is_firmly_not_throttled() {
        let mut facts = pod();
        live(&mut facts).levels.pop();
        let finding = finding(&facts);
        assert_eq!(finding.severity, Severity::Fine);
        assert!(
            finding.seen.contains("none of the 2 cgroups"),
            "{finding:?}"
        );
    }

    #[test]
    fn a_cap_that_is_not_used_up_did_nothing() {
        let finding = finding(&pod());
        assert_eq!(finding.severity, Severity::Fine);
        assert!(
            finding.seen.starts_with("not throttled: of the 3"),
            "{finding:?}"
        );
        assert!(finding.seen.ends_with("20 %"), "{finding:?}");
    }

    #[test]
    fn the_cgroup_that_throttles_is_named_with_how_often_and_for_how_long() {
        let mut facts = pod();
        facts.vm.vm.all.limited_pct = 31.0;
        let inner = &mut live(&mut facts).levels[2];
        (inner.periods, inner.throttled, inner.throttled_us) = (100, 93, 6_200_000);
        let finding = finding(&facts);
        assert_eq!(finding.severity, Severity::Warning);
        for words in [
            "by cgroup /kubepods.slice/kubepods-pod1.slice/cri-1.scope",
            "\"50000 100000\", 0.50 CPUs",
            "in 93 of 100 periods, 6.2 s",
            "2 vCPUs and 1 other threads",
            "31.0 % of the time",
        ] {
            assert!(finding.seen.contains(words), "{words}: {finding:?}");
        }
        assert!(finding.mend.contains("limits.cpu"), "{finding:?}");
    }

    #[test]
    fn under_cohort_the_cap_that_is_used_up_is_the_one() {
        let mut facts = pod();
        facts.span.schedulers = [String::from("cohort_0.1.0")].into();
        facts.vm.vm.all.limited_pct = 31.0;
        assert!(finding(&facts).seen.contains("none of the caps"));
        live(&mut facts).levels[2].used_us = 4_900_000;
        let finding = finding(&facts);
        assert!(finding.seen.contains("used 98 %"), "{finding:?}");
    }

    #[test]
    fn a_recording_tells_whether_but_not_by_whom() {
        let mut facts = facts();
        facts.live = None;
        assert_eq!(finding(&facts).severity, Severity::Fine);
        facts.vm.vm.all.limited_pct = 31.0;
        let finding = finding(&facts);
        assert!(finding.seen.contains("31.0 %") && finding.mend.contains("on the host"));
    }
}
