// SPDX-License-Identifier: GPL-2.0-only
//! Windows added up: what each VM that there is has done since it is observed; and what Cohort has counted since it took
//! over. Names and labels are in `families`.

use super::families::{COUNTERS, EXPONENTS, HISTOGRAMS, Sample};
use crate::host::vm_identity::{VmIdentity, distinct};
use crate::observer::view::{HaltedBy, HostView, VcpuView, VmView};
use crate::scheduler::metrics::{HostStats, VmStats};
use std::collections::BTreeMap;

/// What vCPUs did, since they are observed.
#[derive(Clone, Debug)]
pub struct VcpuTotals {
    /// By counter and sample, in the order of [`COUNTERS`].
    counters: Vec<Vec<f64>>,
    /// In the order of [`HISTOGRAMS`].
    histograms: Vec<HistogramTotals>,
    /// How its halted time was known in the last window.
    halted_by: String,
}

/// A histogram, since its vCPUs are observed.
#[derive(Clone, Debug, Default)]
pub struct HistogramTotals {
    /// Of all that was counted, s.
    pub sum_s: f64,
    /// By [`EXPONENTS`], not cumulative; the last one is all above.
    pub buckets: [u64; EXPONENTS.len() + 1],
}

/// Whom a VM's CPUs were taken by, since it is observed.
#[derive(Clone, Copy, Debug, Default)]
pub struct TakenTotals {
    /// How often.
    pub times: u64,
    /// How long the VM's vCPUs waited then, s.
    pub ready_s: f64,
}

/// A VM, since it is observed.
#[derive(Clone, Debug)]
pub struct VmTotals {
    /// What names it as long as it lives; no two VMs have the same.
    pub label: String,
    /// As in its first window.
    pub identity: VmIdentity,
    /// vCPUs in the last window.
    pub nr_vcpus: u32,
    /// All of them together, those that are gone as well.
    pub all: VcpuTotals,
    /// Each, by its number.
    pub vcpus: BTreeMap<u32, VcpuTotals>,
    /// By kind of taker.
    pub taken: BTreeMap<String, TakenTotals>,
}

/// All VMs that there were in the last window, and that window.
#[derive(Debug, Default)]
pub struct Totals {
    /// By process.
    pub vms: BTreeMap<u32, VmTotals>,
    /// The last window, without its VMs.
    pub host: HostView,
    /// Windows that were added.
    pub windows: u64,
    /// What Cohort has counted since it took over, at the end of the last window; `None` if it does not schedule.
    pub scheduler: Option<HostStats>,
}

impl VcpuTotals {
    fn new() -> Self {
        let zeros = |samples: &[Sample]| vec![0.0; samples.len()];
        Self {
            counters: COUNTERS
                .iter()
                .map(|counter| zeros(counter.samples))
                .collect(),
            histograms: vec![HistogramTotals::default(); HISTOGRAMS.len()],
            halted_by: String::new(),
        }
    }

    /// Whether what is made of a field that its host has can be had of it.
    pub fn has(&self, field: &str) -> bool {
        HaltedBy::shows(&self.halted_by, field)
    }

    /// The samples of the counter at this place in [`COUNTERS`].
    pub fn counter(&self, index: usize) -> &[f64] {
        &self.counters[index]
    }

    /// The histogram at this place in [`HISTOGRAMS`].
    pub fn histogram(&self, index: usize) -> &HistogramTotals {
        &self.histograms[index]
    }

    fn add(&mut self, view: &VcpuView, window_s: f64) {
        let vcpu_time_s = window_s * f64::from(view.vcpus);
        self.halted_by.clone_from(&view.halted_by);
        for (totals, counter) in self.counters.iter_mut().zip(&COUNTERS) {
            for (total, sample) in totals.iter_mut().zip(counter.samples) {
                *total += (sample.gain)(view, vcpu_time_s);
            }
        }
        for (totals, histogram) in self.histograms.iter_mut().zip(&HISTOGRAMS) {
            totals.sum_s += (histogram.sum_s)(view, vcpu_time_s);
            for (exponent, count) in (histogram.buckets)(view).iter().enumerate() {
                let bucket = EXPONENTS.partition_point(|&end| end < exponent);
                totals.buckets[bucket] += count;
            }
        }
    }
}

impl VmTotals {
    fn new(label: String, identity: VmIdentity) -> Self {
        Self {
            label,
            identity,
            nr_vcpus: 0,
            all: VcpuTotals::new(),
            vcpus: BTreeMap::new(),
            taken: BTreeMap::new(),
        }
    }

    fn add(&mut self, view: &VmView, window_s: f64) {
        self.nr_vcpus = view.all.vcpus;
        self.all.add(&view.all, window_s);
        self.vcpus
            .retain(|number, _| view.vcpus.contains_key(number));
        for (&number, vcpu) in &view.vcpus {
            let totals = self.vcpus.entry(number).or_insert_with(VcpuTotals::new);
            totals.add(vcpu, window_s);
        }
        for taker in &view.takers {
            let taken = self.taken.entry(taker.kind.clone()).or_default();
            taken.times += taker.times;
            taken.ready_s += taker.ready_us as f64 / 1e6;
        }
    }
}

impl Totals {
    /// Adds a window, at whose end Cohort had counted `scheduler`. VMs that are not in it are gone, with all that they did.
    pub fn add(&mut self, mut view: HostView, scheduler: Option<HostStats>) {
        let window_s = view.window_ms as f64 / 1000.0;
        // Another VM may have the process's number by now.
        self.vms.retain(|tgid, totals| {
            let vm = view.vms.get(tgid);
            vm.is_some_and(|vm| vm.identity.id == totals.identity.id)
        });
        for (&tgid, vm) in &view.vms {
            if !self.vms.contains_key(&tgid) {
                let totals = VmTotals::new(self.free_label(tgid, vm), vm.identity.clone());
                self.vms.insert(tgid, totals);
            }
            if let Some(totals) = self.vms.get_mut(&tgid) {
                totals.add(vm, window_s);
            }
        }
        view.vms.clear();
        self.host = view;
        self.scheduler = scheduler;
        self.windows += 1;
    }

    /// What Cohort has counted of each VM that there is.
    pub fn scheduled(&self) -> impl Iterator<Item = (&VmTotals, &VmStats)> {
        let stats = self.scheduler.iter().flat_map(|host| host.vms.values());
        stats.filter_map(|stats| Some((self.vms.get(&stats.pid)?, stats)))
    }

    /// What is to name the VM of process `tgid`. Somebody may have started another one with the same UUID.
    fn free_label(&self, tgid: u32, vm: &VmView) -> String {
        let label = vm.identity.lasting(tgid);
        match self.vms.values().any(|other| other.label == label) {
            true => distinct(&label, tgid),
            false => label,
        }
    }
}

#[cfg(test)]
pub mod fixture {
    use super::*;
    use crate::observer::view::TakerView;
    use crate::scheduler::metrics::MechanismStats;

    /// What Cohort has counted until then.
    pub fn scheduler() -> HostStats {
        let of_vm = |pid| VmStats {
            pid,
            yields_missed: BTreeMap::from([(String::from("lost"), 3)]),
            turns: 10,
            turns_partial: 4,
            ..VmStats::default()
        };
        let ipi = MechanismStats { on: 1, effects: 5 };
        HostStats {
            exhausted: 2,
            groups_used: 3,
            groups_most: 4096,
            mechanisms: BTreeMap::from([(String::from("ipi"), ipi)]),
            // The other one has come since.
            vms: BTreeMap::from([(1, of_vm(7)), (2, of_vm(8))]),
            ..HostStats::default()
        }
    }

    /// Two seconds of a VM of two vCPUs of which each ran half of the time.
    pub fn window() -> HostView {
        let vcpu = VcpuView {
            vcpus: 1,
            run_pct: 50.0,
            ready_pct: 25.0,
            stacked_pct: 40.0,
            yields_offered: 10,
            yields_served: 6,
            yields_not_ready: 3,
            migrations: 5,
            migrations_far: 2,
            ready_us: vec![0, 1, 0, 0, 2, 4, 0, 8],
            ..VcpuView::default()
        };
        let all = VcpuView {
            vcpus: 2,
            yields_offered: 20,
            yields_served: 12,
            yields_not_ready: 6,
            ..vcpu.clone()
        };
        let vm = VmView {
            name: String::from("db \"1\""),
            identity: VmIdentity {
                name: String::from("db \"1\""),
                id: String::from("u-7"),
                ..VmIdentity::default()
            },
            all,
            vcpus: BTreeMap::from([(0, vcpu.clone()), (1, vcpu)]),
            takers: vec![TakerView {
                kind: String::from("vm"),
                times: 3,
                ready_us: 1_500_000,
                ..TakerView::default()
            }],
        };
        HostView {
            window_ms: 2000,
            cpus: 4,
            scheduler: String::from("stock"),
            blind_spots: vec![String::from("spin exits are not seen: as asked for")],
            unseen: vec![String::from("spin_exits"), String::from("spin_pct")],
            vms: BTreeMap::from([(7, vm)]),
            ..HostView::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::fixture::window;
    use super::*;

    fn sample(totals: &VcpuTotals, name: &str, label_value: &str) -> f64 {
        let index = COUNTERS
            .iter()
            .position(|counter| counter.name == name)
            .expect("there is such a counter");
        let samples = COUNTERS[index].samples;
        let of_label = samples
            .iter()
            .position(|sample| sample.label_value == label_value);
        totals.counter(index)[of_label.expect("there is such a sample")]
    }

    #[test]
    fn parts_become_seconds_of_all_vcpus_and_windows_add_up() {
        let mut totals = Totals::default();
        totals.add(window(), None);
        totals.add(window(), None);
        let vm = &totals.vms[&7];
        assert_eq!(sample(&vm.all, "time", "run"), 4.0);
        assert_eq!(sample(&vm.all, "time", "ready"), 2.0);
        assert_eq!(sample(&vm.all, "stacked", ""), 0.8);
        assert_eq!(sample(&vm.all, "yields", "served"), 24.0);
        assert_eq!(sample(&vm.all, "yields", "overtaken"), 4.0);
        assert_eq!(sample(&vm.all, "migrations", "same"), 6.0);
        assert_eq!(sample(&vm.vcpus[&1], "time", "run"), 2.0);
        assert_eq!((vm.taken["vm"].times, vm.taken["vm"].ready_s), (6, 3.0));
        assert_eq!(vm.nr_vcpus, 2);
    }

    #[test]
    fn a_bucket_holds_what_is_below_its_end_and_the_last_all_else() {
        let mut view = window();
        let mut ready_us = vec![0; 24];
        (ready_us[4], ready_us[5], ready_us[20], ready_us[21]) = (1, 2, 4, 8);
        view.vms.get_mut(&7).expect("it is there").all.ready_us = ready_us;
        let mut totals = Totals::default();
        totals.add(view, None);
        let histogram = totals.vms[&7].all.histogram(0);
        assert_eq!(histogram.buckets, [1, 2, 0, 0, 0, 0, 0, 0, 4, 8]);
        assert_eq!(histogram.sum_s, 1.0);
    }

    #[test]
    fn a_vm_that_is_gone_is_forgotten_and_one_with_its_number_begins_anew() {
        let mut totals = Totals::default();
        totals.add(window(), None);
        totals.add(HostView::default(), None);
        assert!(totals.vms.is_empty());
        totals.add(window(), None);
        assert_eq!(sample(&totals.vms[&7].all, "time", "run"), 2.0);
    }

    fn labels(totals: &Totals) -> Vec<&str> {
        totals.vms.values().map(|vm| vm.label.as_str()).collect()
    }

    #[test]
    fn what_names_a_vm_stays_when_it_is_renamed_or_a_namesake_comes() {
        let mut totals = Totals::default();
        totals.add(window(), None);
        assert_eq!(labels(&totals), ["u-7"]);
        let mut both = window();
        let mut namesake = both.vms[&7].clone();
        namesake.identity.id = String::from("u-3");
        both.vms.insert(3, namesake);
        let renamed = both.vms.get_mut(&7).expect("it is there");
        renamed.name = String::from("other (7)");
        renamed.identity.name = String::from("other");
        totals.add(both, None);
        assert_eq!(labels(&totals), ["u-3", "u-7"]);
        assert_eq!(totals.vms[&7].identity.name, "db \"1\"");
    }

    #[test]
    fn one_that_has_anothers_uuid_keeps_what_tells_them_apart() {
        let mut totals = Totals::default();
        totals.add(window(), None);
        let mut both = window();
        both.vms.insert(3, both.vms[&7].clone());
        totals.add(both.clone(), None);
        assert_eq!(labels(&totals), ["u-7 (3)", "u-7"]);
        both.vms.remove(&7);
        totals.add(both, None);
        assert_eq!(labels(&totals), ["u-7 (3)"]);
    }

    #[test]
    fn another_vm_in_a_process_of_the_same_number_begins_anew() {
        let mut totals = Totals::default();
        totals.add(window(), None);
        let mut other = window();
        let vm = other.vms.get_mut(&7).expect("it is there");
        vm.identity.id = String::from("u-9");
        totals.add(other, None);
        assert_eq!(labels(&totals), ["u-9"]);
        assert_eq!(sample(&totals.vms[&7].all, "time", "run"), 2.0);
    }
}
