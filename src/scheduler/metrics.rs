// SPDX-License-Identifier: GPL-2.0-only
//! The statistics people see: what two readings of the scheduler's counters say
//! about the time between them. Reading the counters is not done here, nor is
//! printing.

use crate::bpf::{counts, intf};
use crate::observer::entitlement::{self, bound_by_cpu_sets, entitlements_ns};
use crate::scheduler::exceptions::CohortRule;
use crate::scheduler::mechanism::{self, Mechanism, Mechanisms};
use clap::ValueEnum;
use scx_stats_derive::{Stats, stat_doc};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Why a directed yield was not served, in the order of `enum yield_miss`.
const YIELD_MISS_NAMES: [&str; intf::yield_miss_NR_YIELD_MISS as usize] = [
    "not_sibling",
    "not_ready",
    "limited",
    "affinity",
    "lost",
    "elsewhere",
];

/// What is known of one VM or cgroup at one moment.
#[derive(Clone, Copy)]
pub struct GroupReading {
    /// Its number, from 1. A number is used again after the group is gone.
    pub number: u32,
    /// Its description and counters.
    pub info: intf::cohort_group,
}

impl GroupReading {
    /// It is a VM, not a cgroup.
    pub fn is_vm(&self) -> bool {
        self.info.kind == intf::group_kind_GROUP_VM
    }
}

/// The counters of the whole scheduler at one moment.
#[derive(Clone)]
pub struct Reading {
    /// When, on the monotonic clock.
    pub at_ns: u64,
    /// CPUs online.
    pub cpus: u32,
    /// All groups in use.
    pub groups: Vec<GroupReading>,
    /// The names of the VMs, by group number.
    pub vm_names: HashMap<u32, String>,
    /// The online CPUs of those VMs that may not run on all of them, by group number.
    pub vm_cpus: HashMap<u32, BTreeSet<usize>>,
    /// What is in use, and events that must stay rare.
    pub host: intf::host_stats,
    /// A sentence for each thing that KVM does and that is not seen.
    pub blind_spots: Vec<String>,
    /// Which mechanisms are on.
    pub mechanisms: Mechanisms,
    /// How often each mechanism, by number, changed who runs, or for how long.
    pub effects: [u64; mechanism::COUNT],
}

impl Reading {
    /// The reading of a scheduler that has just been loaded: nothing counted yet.
    pub fn at_load(at_ns: u64) -> Self {
        Self {
            at_ns,
            cpus: 0,
            groups: Vec::new(),
            vm_names: HashMap::new(),
            vm_cpus: HashMap::new(),
            host: intf::host_stats::default(),
            blind_spots: Vec::new(),
            mechanisms: Mechanisms::all_but(&[]),
            effects: [0; mechanism::COUNT],
        }
    }

    /// The mechanisms now, with their effects since `before`.
    fn mechanisms_since(&self, before: &Reading) -> BTreeMap<String, MechanismStats> {
        let stats = |mechanism: &Mechanism| {
            let effects = |reading: &Reading| reading.effects[mechanism.number()];
            let stats = MechanismStats {
                on: u64::from(self.mechanisms.contains(*mechanism)),
                effects: effects(self).saturating_sub(effects(before)),
            };
            (mechanism.name(), stats)
        };
        Mechanism::value_variants().iter().map(stats).collect()
    }
}

/// One mechanism in one window of time.
#[stat_doc]
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize, Stats)]
#[stat(
    desc = "one mechanism in the window",
    _om_prefix = "mechanism_",
    _om_label = "mechanism"
)]
pub struct MechanismStats {
    #[stat(desc = "1 if it is on at the window's end, else 0")]
    pub on: u64,
    #[stat(desc = "times it changed who runs, or for how long")]
    pub effects: u64,
}

/// One VM in one window of time.
#[stat_doc]
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize, Stats)]
#[stat(desc = "one VM in the window", _om_prefix = "vm_", _om_label = "vm")]
pub struct VmStats {
    #[stat(desc = "name given to QEMU, or process and its number")]
    pub name: String,
    #[stat(desc = "process that runs the VM")]
    pub pid: u32,
    #[stat(desc = "vCPU threads")]
    pub vcpus: u32,
    #[stat(desc = "share of the host's CPU time that the VM used, in percent")]
    pub share_pct: f64,
    #[stat(desc = "share it was entitled to, given what it asked for, in percent")]
    pub entitled_share_pct: f64,
    #[stat(desc = "part of its vCPUs' time in which they waited for a CPU, in percent")]
    pub ready_pct: f64,
    #[stat(desc = "part of its vCPUs' time in which a cap stopped them, in percent")]
    pub limited_pct: f64,
    #[stat(desc = "directed yields that KVM offered")]
    pub yields_offered: u64,
    #[stat(
        desc = "yields for which a sibling was ready: KVM's candidate, or one that must answer an IPI"
    )]
    pub yields_ready: u64,
    #[stat(desc = "of these: the target ran next")]
    pub yields_served: u64,
    #[stat(desc = "yields whose target did not run next, by reason")]
    pub yields_missed: BTreeMap<String, u64>,
    #[stat(desc = "of those for which one was ready: another sibling than KVM's candidate")]
    pub yields_better: u64,
    #[stat(desc = "IPIs from one vCPU to one sibling")]
    pub ipis: u64,
    #[stat(desc = "of the IPIs: their end was seen")]
    pub ipis_answered: u64,
    #[stat(desc = "whether its vCPUs have their turns together: auto, or never by an exception")]
    pub cohort_rule: String,
    #[stat(desc = "turns in which it wanted several CPUs")]
    pub turns: u64,
    #[stat(desc = "of these: not all CPUs that the plan gave it ran it")]
    pub turns_partial: u64,
    #[stat(desc = "of the others: from the turn's begin until all did: less than 2^i us")]
    pub turn_skew: Vec<u64>,
}

impl VmStats {
    /// Offered directed yields that were not served, for whatever reason.
    pub fn yields_missed_total(&self) -> u64 {
        self.yields_missed.values().sum()
    }
}

/// The host in one window of time.
#[stat_doc]
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize, Stats)]
#[stat(desc = "the host in the window", top)]
pub struct HostStats {
    #[stat(desc = "length of the window, in milliseconds")]
    pub window_ms: u64,
    #[stat(desc = "CPUs online at its end")]
    pub cpus: u32,
    #[stat(desc = "share of the host's CPU time used by VMs, in percent")]
    pub vms_share_pct: f64,
    #[stat(desc = "share of the host's CPU time used by everything else, in percent")]
    pub others_share_pct: f64,
    #[stat(desc = "VMs and cgroups known")]
    pub groups_used: u64,
    #[stat(desc = "VMs and cgroups that can be known")]
    pub groups_most: u64,
    #[stat(desc = "entities, one per VM or cgroup and domain in which it has tasks")]
    pub entities_used: u64,
    #[stat(desc = "entities that there can be")]
    pub entities_most: u64,
    #[stat(desc = "tasks that a CPU took from another domain, and VMs that moved to another")]
    pub stolen: u64,
    #[stat(desc = "times no group or entity was free; should be 0")]
    pub exhausted: u64,
    #[stat(desc = "what KVM does and Cohort does not see here, in words")]
    pub blind_spots: Vec<String>,
    #[stat(desc = "mechanisms by name")]
    pub mechanisms: BTreeMap<String, MechanismStats>,
    #[stat(desc = "VMs by group number")]
    pub vms: BTreeMap<u32, VmStats>,
}

impl HostStats {
    /// What happened between two readings. A group made in between counts from
    /// its beginning; what a group did that went in between is not known.
    pub fn between(before: &Reading, after: &Reading) -> Self {
        let window = Window::new(before, after);
        let mut host = HostStats {
            window_ms: window.length_ns / 1_000_000,
            cpus: after.cpus,
            groups_used: after.host.groups_used,
            groups_most: after.host.groups_most,
            entities_used: after.host.entities_used,
            entities_most: after.host.entities_most,
            stolen: after.host.stolen.saturating_sub(before.host.stolen),
            exhausted: after.host.exhausted.saturating_sub(before.host.exhausted),
            blind_spots: after.blind_spots.clone(),
            mechanisms: after.mechanisms_since(before),
            ..HostStats::default()
        };
        for (group, entitled_ns) in window.groups.iter().zip(window.entitlements_ns()) {
            let share_pct = window.percent_of_host(group.used.run_ns as f64);
            if !group.is_vm() {
                host.others_share_pct += share_pct;
                continue;
            }
            host.vms_share_pct += share_pct;
            let name = after.vm_names.get(&group.number);
            let vm = VmStats {
                name: name.cloned().unwrap_or_default(),
                share_pct,
                entitled_share_pct: window.percent_of_host(entitled_ns),
                ..group.vm_stats(&window)
            };
            host.vms.insert(group.number, vm);
        }
        host
    }
}

/// The groups at the end of a window, with what they did in it.
struct Window<'a> {
    length_ns: u64,
    cpus: u32,
    vm_cpus: &'a HashMap<u32, BTreeSet<usize>>,
    groups: Vec<GroupInWindow>,
}

impl<'a> Window<'a> {
    fn new(before: &Reading, after: &'a Reading) -> Self {
        let earlier: HashMap<u32, &intf::cohort_group> = before
            .groups
            .iter()
            .map(|group| (group.number, &group.info))
            .collect();
        let in_window = |group: &GroupReading| GroupInWindow {
            number: group.number,
            info: group.info,
            used: match earlier.get(&group.number) {
                Some(earlier) if earlier.created_ns == group.info.created_ns => {
                    counts::since(&group.info.stats, &earlier.stats)
                }
                _ => group.info.stats,
            },
        };
        Self {
            length_ns: after.at_ns.saturating_sub(before.at_ns),
            cpus: after.cpus,
            vm_cpus: &after.vm_cpus,
            groups: after.groups.iter().map(in_window).collect(),
        }
    }

    fn capacity_ns(&self) -> f64 {
        self.length_ns as f64 * f64::from(self.cpus)
    }

    fn percent_of_host(&self, cpu_time_ns: f64) -> f64 {
        percent(cpu_time_ns, self.capacity_ns())
    }

    fn entitlements_ns(&'a self) -> Vec<f64> {
        let place: HashMap<u32, usize> = self
            .groups
            .iter()
            .enumerate()
            .map(|(place, group)| (group.number, place))
            .collect();
        let mut claims: Vec<entitlement::Group> = self
            .groups
            .iter()
            .map(|group| entitlement::Group {
                parent: place.get(&group.info.parent).copied(),
                weight: group.info.weight,
                demand_ns: group.demand_ns(self.length_ns),
                cap_ns: group.cap_ns(self.length_ns),
            })
            .collect();
        let cpus_of = |group: &'a GroupInWindow| self.vm_cpus.get(&group.number);
        let cpus_of: Vec<_> = self.groups.iter().map(cpus_of).collect();
        bound_by_cpu_sets(self.length_ns as f64, &cpus_of, &mut claims);
        entitlements_ns(self.capacity_ns(), &claims)
    }
}

struct GroupInWindow {
    number: u32,
    info: intf::cohort_group,
    /// What its counters gained in the window.
    used: intf::group_stats,
}

impl GroupInWindow {
    fn is_vm(&self) -> bool {
        self.info.kind == intf::group_kind_GROUP_VM
    }

    /// The time of all its vCPUs.
    fn vcpu_time_ns(&self, length_ns: u64) -> f64 {
        length_ns as f64 * f64::from(self.info.nr_vcpus)
    }

    /// The CPU time that its tasks used or waited for.
    ///
    /// A vCPU cannot ask for more than all of the time. Other tasks have no such
    /// bound here, as their number may have changed in the window.
    fn demand_ns(&self, length_ns: u64) -> f64 {
        let vcpus_waited_ns = self.used.ready_ns + self.used.throttled_ns;
        let vcpus_ns = (self.used.vcpu_run_ns + vcpus_waited_ns) as f64;
        let all_ns = (self.used.run_ns + self.used.waited_ns) as f64;
        let others_ns = (all_ns - vcpus_ns).max(0.0);
        match self.is_vm() {
            true => others_ns + vcpus_ns.min(self.vcpu_time_ns(length_ns)),
            false => others_ns + vcpus_ns,
        }
    }

    fn cap_ns(&self, length_ns: u64) -> Option<f64> {
        let capped = self.info.quota_us > 0 && self.info.period_us > 0;
        capped.then(|| length_ns as f64 * self.info.quota_us as f64 / self.info.period_us as f64)
    }

    fn vm_stats(&self, window: &Window<'_>) -> VmStats {
        let vcpu_time_ns = self.vcpu_time_ns(window.length_ns);
        let of_vcpu_time = |time_ns: u64| percent(time_ns as f64, vcpu_time_ns);
        let missed = YIELD_MISS_NAMES.iter().zip(self.used.yields_missed);
        VmStats {
            pid: self.info.tgid,
            vcpus: self.info.nr_vcpus,
            ready_pct: of_vcpu_time(self.used.ready_ns),
            limited_pct: of_vcpu_time(self.used.throttled_ns),
            yields_offered: self.used.yields_offered,
            yields_ready: self.used.yields_ready,
            yields_served: self.used.yields_served,
            yields_missed: missed
                .map(|(&name, count)| (name.to_owned(), count))
                .collect(),
            yields_better: self.used.yields_better,
            ipis: self.used.ipis,
            ipis_answered: self.used.ipis_answered,
            cohort_rule: CohortRule::ALL
                .into_iter()
                .find(|rule| rule.number() == self.info.cohort_rule)
                .map(|rule| rule.name().to_owned())
                .unwrap_or_default(),
            turns: self.used.turns,
            turns_partial: self.used.turns_partial,
            turn_skew: self.used.turn_skew.to_vec(),
            ..VmStats::default()
        }
    }
}

/// Nothing of nothing is 0 %.
pub fn percent(part: f64, whole: f64) -> f64 {
    match whole > 0.0 {
        true => 100.0 * part / whole,
        false => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND_NS: u64 = 1_000_000_000;

    fn nothing() -> intf::cohort_group {
        bytemuck::Zeroable::zeroed()
    }

    fn group(number: u32, kind: intf::group_kind, parent: u32) -> GroupReading {
        GroupReading {
            number,
            info: intf::cohort_group {
                kind,
                parent,
                weight: 100,
                created_ns: u64::from(number),
                ..nothing()
            },
        }
    }

    fn root() -> GroupReading {
        group(1, intf::group_kind_GROUP_CGROUP, 0)
    }

    /// A VM of two vCPUs that ran and waited this long.
    fn vm(number: u32, run_ms: u64, ready_ms: u64) -> GroupReading {
        let mut vm = group(number, intf::group_kind_GROUP_VM, 1);
        vm.info.nr_vcpus = 2;
        vm.info.stats.run_ns = run_ms * 1_000_000;
        vm.info.stats.vcpu_run_ns = run_ms * 1_000_000;
        vm.info.stats.ready_ns = ready_ms * 1_000_000;
        vm.info.stats.waited_ns = ready_ms * 1_000_000;
        vm
    }

    fn after_one_second(groups: Vec<GroupReading>) -> Reading {
        Reading {
            at_ns: SECOND_NS,
            cpus: 2,
            groups,
            ..Reading::at_load(0)
        }
    }

    fn since_load(groups: Vec<GroupReading>) -> HostStats {
        HostStats::between(&Reading::at_load(0), &after_one_second(groups))
    }

    /// A busy cgroup that got too little is owed the same as the VM beside it: what its tasks waited for counts.
    #[test]
    fn what_host_processes_waited_for_is_demand() {
        let mut load = group(3, intf::group_kind_GROUP_CGROUP, 1);
        load.info.stats.run_ns = 400_000_000;
        load.info.stats.waited_ns = 1_600_000_000;
        let host = since_load(vec![root(), vm(2, 1600, 400), load]);
        assert!((host.vms.values().next().unwrap().entitled_share_pct - 50.0).abs() < 0.1);
    }

    #[test]
    fn two_busy_vms_are_each_entitled_to_half_the_host() {
        let host = since_load(vec![root(), vm(2, 900, 1100), vm(3, 1100, 900)]);
        let shares: Vec<f64> = host.vms.values().map(|vm| vm.share_pct).collect();
        let entitlements: Vec<f64> = host.vms.values().map(|vm| vm.entitled_share_pct).collect();
        assert_eq!(shares, [45.0, 55.0]);
        assert_eq!(entitlements, [50.0, 50.0]);
        assert_eq!(host.vms[&2].ready_pct, 55.0);
        assert_eq!((host.vms_share_pct, host.others_share_pct), (100.0, 0.0));
    }

    #[test]
    fn what_an_idle_vm_leaves_is_the_entitlement_of_the_other() {
        let host = since_load(vec![root(), vm(2, 100, 0), vm(3, 1800, 200)]);
        assert_eq!(host.vms[&2].entitled_share_pct, 5.0);
        assert_eq!(host.vms[&3].entitled_share_pct, 95.0);
    }

    #[test]
    fn a_cap_of_the_cgroup_above_bounds_the_entitlement() {
        let mut scope = group(4, intf::group_kind_GROUP_CGROUP, 1);
        (scope.info.quota_us, scope.info.period_us) = (50_000, 100_000);
        let mut capped = vm(2, 500, 1500);
        capped.info.parent = 4;
        let host = since_load(vec![root(), scope, capped, vm(3, 1500, 500)]);
        assert_eq!(host.vms[&2].entitled_share_pct, 25.0);
        assert_eq!(host.vms[&3].entitled_share_pct, 75.0);
    }

    #[test]
    fn vms_on_few_cpus_share_those() {
        let mut after = after_one_second(vec![root(), vm(2, 900, 1100), vm(3, 1100, 900)]);
        after.cpus = 3;
        after.vm_cpus = HashMap::from([2, 3].map(|number| (number, BTreeSet::from([1, 2]))));
        let host = HostStats::between(&Reading::at_load(0), &after);
        for vm in host.vms.values() {
            assert!((vm.entitled_share_pct - 100.0 / 3.0).abs() < 1e-9);
        }
    }

    #[test]
    fn what_a_vm_on_one_cpu_cannot_take_is_for_its_neighbour() {
        let mut after = after_one_second(vec![root(), vm(2, 500, 1500), vm(3, 1500, 500)]);
        after.vm_cpus = HashMap::from([(2, BTreeSet::from([0]))]);
        after.groups[1].info.weight = 900;
        let host = HostStats::between(&Reading::at_load(0), &after);
        assert_eq!(host.vms[&2].entitled_share_pct, 50.0);
        assert_eq!(host.vms[&3].entitled_share_pct, 50.0);
    }

    #[test]
    fn a_window_counts_what_was_gained_in_it() {
        let before = after_one_second(vec![root(), vm(2, 500, 300)]);
        let mut after = after_one_second(vec![root(), vm(2, 700, 400)]);
        after.at_ns = 2 * SECOND_NS;
        let host = HostStats::between(&before, &after);
        assert_eq!(host.window_ms, 1000);
        assert_eq!(host.vms[&2].share_pct, 10.0);
        assert_eq!(host.vms[&2].ready_pct, 5.0);
    }

    #[test]
    fn a_number_that_is_used_again_counts_from_its_beginning() {
        let before = after_one_second(vec![root(), vm(2, 500, 300)]);
        let mut another = vm(2, 100, 0);
        another.info.created_ns = SECOND_NS + 1;
        let mut after = after_one_second(vec![root(), another]);
        after.at_ns = 2 * SECOND_NS;
        assert_eq!(HostStats::between(&before, &after).vms[&2].share_pct, 5.0);
    }

    #[test]
    fn a_host_cgroup_counts_among_the_others() {
        let mut cgroup = root();
        cgroup.info.stats.run_ns = SECOND_NS / 2;
        let host = since_load(vec![cgroup]);
        assert!(host.vms.is_empty());
        assert_eq!(host.others_share_pct, 25.0);
    }

    #[test]
    fn missed_yields_are_told_by_reason() {
        let mut spinning = vm(2, 100, 0);
        spinning.info.stats.yields_offered = 10;
        spinning.info.stats.yields_missed[intf::yield_miss_YIELD_MISS_AFFINITY as usize] = 3;
        let host = since_load(vec![root(), spinning]);
        assert_eq!(host.vms[&2].yields_missed["affinity"], 3);
        assert_eq!(host.vms[&2].yields_missed_total(), 3);
    }

    #[test]
    fn turns_are_told_with_how_many_were_not_whole() {
        let mut wide = vm(2, 100, 0);
        wide.info.cohort_rule = CohortRule::Never.number();
        (wide.info.stats.turns, wide.info.stats.turns_partial) = (10, 3);
        wide.info.stats.turn_skew[5] = 7;
        let vm = &since_load(vec![root(), wide]).vms[&2];
        assert_eq!((vm.turns, vm.turns_partial), (10, 3));
        assert_eq!((vm.turn_skew[5], vm.cohort_rule.as_str()), (7, "never"));
    }

    #[test]
    fn what_is_full_is_told() {
        let mut after = after_one_second(vec![root()]);
        (after.host.entities_used, after.host.exhausted) = (8191, 3);
        let host = HostStats::between(&Reading::at_load(0), &after);
        assert_eq!((host.entities_used, host.exhausted), (8191, 3));
    }

    #[test]
    fn no_time_is_no_percentage() {
        let reading = after_one_second(vec![root(), vm(2, 1, 1)]);
        let host = HostStats::between(&reading, &reading);
        assert_eq!(host.vms[&2].share_pct, 0.0);
        assert_eq!(host.window_ms, 0);
    }
}
