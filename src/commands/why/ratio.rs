// SPDX-License-Identifier: GPL-2.0-only
//! How many vCPUs there are for each CPU, how much each VM's weight is worth per vCPU, and who loses by that.

use super::facts::{Facts, Live};
use crate::commands::finding::{Finding, Severity};
use crate::host::cgroups::Level;
use crate::observer::span::VmSpan;
use std::path::Path;

const CHECK: &str = "ratio";
/// More vCPUs want CPUs than there are, if the CPUs are busy to this part.
const BUSY: f64 = 0.95;
/// A VM of which a vCPU is worth less than this part of the mean loses by it.
const LOSES: f64 = 0.75;
/// So many are named.
const MOST: usize = 4;
const WEIGHT_DEFAULT: u32 = 100;
const WEIGHT_MOST: u32 = 10_000;

pub fn finding(facts: &Facts) -> Finding {
    let span = &facts.span;
    let vms = span.vms.len();
    let ratio = format!(
        "{vms} VMs had {:.1} vCPUs for each of {} CPUs, and wanted {:.1} CPUs at the mean",
        span.overcommitment, span.cpus, span.wanted_cpus
    );
    if span.wanted_cpus < BUSY * f64::from(span.cpus) {
        return Finding::fine(CHECK, format!("not the ratio: {ratio}"));
    }
    let all = facts.all();
    let why = format!(
        "CPU time is divided by cgroup, not by vCPU: {} was entitled to {:.1} % of a CPU per vCPU and got {:.1} %",
        facts.name(),
        all.entitled_pct,
        all.on_cpu_pct
    );
    let weights = facts.live.as_ref().map(|live| weights(facts, live));
    let Some(weights) = weights.filter(|weights| !weights.is_empty()) else {
        return Finding::new(
            CHECK,
            Severity::Warning,
            ratio,
            why,
            "move VMs off this host; cohort why VM, on the host, shows the weights",
        );
    };
    let worth: Vec<String> = weights.iter().take(MOST).map(Weight::text).collect();
    let seen = format!("{ratio}; {}", worth.join(", "));
    let vcpus: u32 = weights.iter().map(|weight| weight.vcpus).sum();
    let sum: u32 = weights.iter().map(|weight| weight.weight).sum();
    let mean = f64::from(sum) / f64::from(vcpus.max(1));
    let loses = |weight: &&Weight<'_>| weight.per_vcpu() < LOSES * mean;
    let losers: Vec<&str> = weights.iter().filter(loses).map(|it| it.name).collect();
    match losers.as_slice() {
        [] => Finding::new(
            CHECK,
            Severity::Warning,
            seen,
            why,
            "the weights fit the numbers of vCPUs; move VMs off this host, or give them fewer vCPUs",
        ),
        losers => Finding::new(
            CHECK,
            Severity::Warning,
            format!("{seen}; {} loses by it", losers.join(", ")),
            why,
            settings(&weights),
        ),
    }
}

/// What one VM's cgroup counts among those beside it.
struct Weight<'a> {
    name: &'a str,
    vcpus: u32,
    weight: u32,
    path: &'a str,
}

impl Weight<'_> {
    fn per_vcpu(&self) -> f64 {
        f64::from(self.weight) / f64::from(self.vcpus.max(1))
    }

    fn text(&self) -> String {
        format!(
            "{} has weight {} for {} vCPUs, {:.1} each",
            self.name,
            self.weight,
            self.vcpus,
            self.per_vcpu()
        )
    }
}

/// Of the VMs whose cgroups stand beside that of the VM asked for, the least weight per vCPU first. With others it competes
/// by the weights of cgroups further up.
fn weights<'a>(facts: &'a Facts, live: &'a Live) -> Vec<Weight<'a>> {
    let parent = |level: &Level| Path::new(&level.path).parent().map(Path::to_owned);
    let Some(own) = live.place_of.get(&facts.tgid) else {
        return Vec::new();
    };
    let weight = |(tgid, vm): (&u32, &'a VmSpan)| {
        let place = live.place_of.get(tgid)?;
        (parent(place) == parent(own)).then(|| Weight {
            name: &vm.vm.name,
            vcpus: vm.vm.all.vcpus,
            weight: place.weight.unwrap_or(WEIGHT_DEFAULT),
            path: &place.path,
        })
    };
    let mut weights: Vec<Weight<'a>> = facts.span.vms.iter().filter_map(weight).collect();
    weights.sort_by(|a, b| a.per_vcpu().total_cmp(&b.per_vcpu()));
    weights
}

/// The commands by which each vCPU counts the same.
fn settings(weights: &[Weight<'_>]) -> String {
    let set = |weight: &Weight<'_>| {
        let fair = (WEIGHT_DEFAULT * weight.vcpus).min(WEIGHT_MOST);
        (fair != weight.weight)
            .then(|| format!("echo {fair} > /sys/fs/cgroup{}/cpu.weight", weight.path))
    };
    let commands: Vec<String> = weights.iter().filter_map(set).take(MOST).collect();
    format!(
        "a weight of {WEIGHT_DEFAULT} per vCPU: {} (to keep it: virsh schedinfo VM --config cpu_shares=…, systemctl set-property \
         UNIT CPUWeight=…)",
        commands.join("; ")
    )
}

#[cfg(test)]
mod tests {
    use super::super::facts::fixture::{facts, live};
    use super::*;

    /// `web` beside `db` of sixteen vCPUs, both of weight 100, on four CPUs.
    fn crowded() -> Facts {
        let mut facts = facts();
        let mut db = facts.vm.clone();
        db.vm.name = String::from("db");
        db.vm.all.vcpus = 16;
        facts.span.vms.insert(9, db);
        (facts.span.overcommitment, facts.span.wanted_cpus) = (4.5, 17.0);
        for (tgid, path) in [(7, "/machine/web"), (9, "/machine/db")] {
            let level = Level {
                path: path.to_owned(),
                weight: Some(100),
                ..Level::default()
            };
            live(&mut facts).place_of.insert(tgid, level);
        }
        facts
    }

    #[test]
    fn a_host_with_cpus_to_spare_has_no_such_problem() {
        let finding = finding(&facts());
        assert_eq!(finding.severity, Severity::Fine);
        assert!(finding.seen.starts_with("not the ratio"), "{finding:?}");
    }

    #[test]
    fn who_loses_by_the_weights_is_named_with_what_to_set() {
        let finding = finding(&crowded());
        assert_eq!(finding.severity, Severity::Warning);
        assert!(
            finding.seen.contains("4.5 vCPUs for each of 4 CPUs"),
            "{finding:?}"
        );
        assert!(
            finding
                .seen
                .contains("db has weight 100 for 16 vCPUs, 6.2 each"),
            "{finding:?}"
        );
        assert!(finding.seen.ends_with("db loses by it"), "{finding:?}");
        assert!(
            finding
                .mend
                .contains("echo 1600 > /sys/fs/cgroup/machine/db/cpu.weight")
        );
        assert!(
            finding
                .mend
                .contains("echo 200 > /sys/fs/cgroup/machine/web/cpu.weight")
        );
    }

    #[test]
    fn weights_that_fit_are_left_alone() {
        let mut facts = crowded();
        live(&mut facts)
            .place_of
            .get_mut(&9)
            .expect("it is there")
            .weight = Some(800);
        let finding = finding(&facts);
        assert!(
            finding.mend.contains("fit") && !finding.seen.contains("loses"),
            "{finding:?}"
        );
    }

    #[test]
    fn a_recording_has_the_ratio_and_no_weights() {
        let mut facts = crowded();
        facts.live = None;
        let finding = finding(&facts);
        assert!(finding.seen.contains("4.5 vCPUs") && finding.mend.contains("on the host"));
    }
}
