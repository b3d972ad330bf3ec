// SPDX-License-Identifier: GPL-2.0-only
//! What the observer saw between two readings of its counters, per VM and vCPU, as people read it. Reading the counters
//! is not done here, nor is printing.

use crate::bpf::halt::HaltSight;
use crate::bpf::{counts, intf};
use crate::host::cgroups::Competition;
use crate::host::pressure::Pressure;
use crate::host::standing;
use crate::host::vm_identity::{VmIdentity, distinct};
use crate::observer::entitlement::{Group, WEIGHT_DEFAULT, bound_by_cpu_sets, entitlements_ns};
use crate::observer::view::{
    HaltedBy, HostView, OffCpuView, PressureView, TakerView, VcpuView, VmView,
};
use crate::scheduler::metrics::percent;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// How often somebody took a CPU from a VM, at one moment.
#[derive(Clone, Copy)]
pub struct TakerReading {
    /// Who, from whom.
    pub key: intf::taker_key,
    /// Since the observer runs.
    pub stats: intf::taker_stats,
}

/// All counters at one moment.
#[derive(Clone, Default)]
pub struct Observation {
    /// When, on the monotonic clock, ns.
    pub at_ns: u64,
    /// The same moment on the wall's clock, ms since 1970 (UTC).
    pub unix_ms: u64,
    /// CPUs online.
    pub cpus: u32,
    /// What schedules the host: the name of a sched_ext scheduler, or "stock".
    pub scheduler: String,
    /// A sentence for each thing that KVM does and that is not seen.
    pub blind_spots: Vec<String>,
    /// The fields of a view that cannot be had because of that.
    pub unseen: Vec<String>,
    /// How halted time is told where HLT does not exit; `None` if there is no such vCPU.
    pub halts: Option<HaltSight>,
    /// All vCPUs, since the observer knows them.
    pub vcpus: Vec<intf::vcpu_counters>,
    /// Whose VMs they are, by process.
    pub identities: HashMap<u32, VmIdentity>,
    /// On which CPUs that are online they may run, by process; without those that may run on all.
    pub cpus_of: HashMap<u32, BTreeSet<usize>>,
    /// Among which cgroups CPU time is divided; none where those are of version 1.
    pub competition: Option<Competition>,
    /// By so much these may have been read after the vCPUs, ns: whoever reads may have waited for a CPU in between.
    pub competition_late_ns: u64,
    /// How long Cohort kept vCPUs from running, by thread; `None` where it does not schedule.
    pub waits: Option<HashMap<i32, intf::vcpu_waits>>,
    /// For how long tasks of the host have stood still; `None` where the kernel does not count it.
    pub pressure: Option<Pressure>,
    /// Who took CPUs from whom.
    pub takers: Vec<TakerReading>,
    /// What cgroups are called that took CPUs.
    pub cgroup_names: HashMap<u64, String>,
}

impl HostView {
    /// What happened between two readings. A vCPU that came in between counts from its beginning; what one did that went
    /// in between is not known.
    pub fn between(before: &Observation, after: &Observation) -> Self {
        let length_ns = after.at_ns.saturating_sub(before.at_ns);
        let earlier: HashMap<i32, Gain> = before
            .vcpus
            .iter()
            .map(|vcpu| (vcpu.tid, Gain::of(vcpu)))
            .collect();
        let mut of_vms: BTreeMap<u32, BTreeMap<u32, Gain>> = BTreeMap::new();
        for vcpu in &after.vcpus {
            let mut gain = Gain::of(vcpu);
            if let Some(earlier) = earlier.get(&vcpu.tid)
                && earlier.kvm == gain.kvm
            {
                gain.less(earlier);
            }
            let waited = |ns: fn(&intf::vcpu_waits) -> u64| waited_ns(vcpu.tid, ns, before, after);
            gain.held_back_ns = waited(|waits| waits.capped_ns);
            gain.resting_ns = waited(|waits| waits.resting_ns);
            gain.halted_by = halted_by(vcpu, after);
            let vm = of_vms.entry(vcpu.tgid).or_default();
            vm.insert(vcpu.vcpu_id, gain);
        }
        let entitled_ns = entitlements(&of_vms, before, after, length_ns);
        for (&(tgid, number), &entitled_ns) in &entitled_ns {
            let vcpu = of_vms.get_mut(&tgid).and_then(|vm| vm.get_mut(&number));
            if let Some(vcpu) = vcpu {
                vcpu.entitled_ns = entitled_ns as u64;
            }
        }
        let names = vm_names(of_vms.keys().copied(), after);
        let tell = Names { vms: &names, after };
        let mut host = Gain::default();
        let mut vms = BTreeMap::new();
        for (tgid, vcpus) in of_vms {
            let mut all = Gain::default();
            vcpus.values().for_each(|vcpu| all.add(vcpu));
            host.add(&all);
            let view = VmView {
                name: names[&tgid].clone(),
                identity: after.identities.get(&tgid).cloned().unwrap_or_default(),
                all: all.view(length_ns, &tell),
                vcpus: vcpus
                    .iter()
                    .map(|(&number, vcpu)| (number, vcpu.view(length_ns, &tell)))
                    .collect(),
                takers: takers(tgid, before, after, &tell),
            };
            vms.insert(tgid, view);
        }
        let (mut blind_spots, mut unseen) = (after.blind_spots.clone(), after.unseen.clone());
        if after.competition.is_none() {
            blind_spots.push(String::from(
                "entitlements are not known: this host's cgroups are of version 1",
            ));
            unseen.push(String::from("entitled_pct"));
        }
        let halts = after.halts.clone().unwrap_or_default();
        let mut halted_error_pct = 0.0;
        if host.halted_by == HaltedBy::Mperf {
            halted_error_pct = halts.error_ppm as f64 / 1e4;
        } else {
            let of_mperf = ["halted_error_pct", "halted_unread_pct"];
            unseen.extend(of_mperf.map(String::from));
        }
        if let (HaltedBy::Unseen, Some(why)) = (host.halted_by, halts.unseen) {
            blind_spots.push(format!(
                "halted time of VMs whose HLT or MWAIT do not exit is not seen, and counts as running: {why}"
            ));
        }
        let host = host.view(length_ns, &tell);
        let overhead_pct = percent(host.poll_pct + host.spin_pct, host.on_cpu_pct);
        if host.on_cpu_pct == 0.0 || unseen.iter().any(|field| field == "spin_pct") {
            unseen.push(String::from("efficiency_pct"));
        }
        let pressure = pressure(before, after);
        if pressure.is_none() {
            unseen.push(String::from("pressure"));
        }
        HostView {
            window_ms: (length_ns + 500_000) / 1_000_000,
            ended_ms: after.unix_ms,
            pressure: pressure.unwrap_or_default(),
            scheduler: after.scheduler.clone(),
            cpus: after.cpus,
            blind_spots,
            unseen,
            overcommitment: f64::from(host.vcpus) / f64::from(after.cpus.max(1)),
            efficiency_pct: 100.0 - overhead_pct,
            halted_error_pct,
            vms,
        }
    }
}

/// How the halted time of `vcpu` is known.
fn halted_by(vcpu: &intf::vcpu_counters, after: &Observation) -> HaltedBy {
    match (vcpu.halts_on_cpu, &after.halts) {
        (0, _) => HaltedBy::Exits,
        (_, Some(HaltSight { unseen: None, .. })) => HaltedBy::Mperf,
        _ => HaltedBy::Unseen,
    }
}

/// How long the scheduler kept thread `tid` from running, for the reason that `ns` reads.
fn waited_ns(
    tid: i32,
    ns: fn(&intf::vcpu_waits) -> u64,
    before: &Observation,
    after: &Observation,
) -> u64 {
    let at = |observation: &Observation| {
        let waits = observation.waits.as_ref().and_then(|waits| waits.get(&tid));
        waits.map_or(0, ns)
    };
    gained(at(after), at(before))
}

/// What a counter gained that begins anew when it was forgotten in between, or another scheduler came.
fn gained(after: u64, before: u64) -> u64 {
    after.checked_sub(before).unwrap_or(after)
}

/// What VMs are called; those with a name in common get their process behind it.
fn vm_names(tgids: impl Iterator<Item = u32>, after: &Observation) -> HashMap<u32, String> {
    let shown = |tgid| {
        let identity = after.identities.get(&tgid);
        (tgid, identity.map(VmIdentity::shown).unwrap_or_default())
    };
    let mut names: HashMap<u32, String> = tgids.map(shown).collect();
    let mut namesakes: HashMap<String, u32> = HashMap::new();
    for name in names.values() {
        *namesakes.entry(name.clone()).or_default() += 1;
    }
    for (&tgid, name) in &mut names {
        if namesakes[name] > 1 {
            *name = distinct(name, tgid);
        }
    }
    names
}

/// The CPU time that each vCPU, by process and number, was entitled to. Of what is no vCPU only the CPU time is known,
/// not what it waited for: it counts as having asked for what it got.
fn entitlements(
    of_vms: &BTreeMap<u32, BTreeMap<u32, Gain>>,
    before: &Observation,
    after: &Observation,
    length_ns: u64,
) -> HashMap<(u32, u32), f64> {
    let Some(competition) = &after.competition else {
        return HashMap::new();
    };
    let earlier: HashMap<u64, u64> = before
        .competition
        .iter()
        .flat_map(|competition| &competition.cgroups)
        .map(|cgroup| (cgroup.id, cgroup.used_us))
        .collect();
    let length_ns = length_ns as f64;
    // What a vCPU used between the two readings is not its VM's other threads'.
    let late_ns = (before.competition_late_ns + after.competition_late_ns) as f64;
    let mut groups: Vec<Group> = Vec::new();
    for cgroup in &competition.cgroups {
        let used_us = match earlier.get(&cgroup.id) {
            Some(&earlier_us) => cgroup.used_us.saturating_sub(earlier_us),
            None => cgroup.used_us,
        };
        let used_ns = used_us as f64 * 1000.0;
        if let Some(parent) = cgroup.parent {
            groups[parent].demand_ns -= used_ns;
        }
        groups.push(Group {
            parent: cgroup.parent,
            weight: cgroup.weight,
            demand_ns: used_ns,
            cap_ns: cgroup.cap_cpus.map(|cpus| cpus * length_ns),
        });
    }
    if groups.is_empty() {
        return HashMap::new();
    }
    let mut cpus_of = vec![None; groups.len()];
    let mut places = HashMap::new();
    for (&tgid, vcpus) in of_vms {
        let place = competition.place_of.get(&tgid).copied().unwrap_or(0);
        let vm = groups.len();
        let group = |parent, demand_ns| Group {
            parent: Some(parent),
            weight: WEIGHT_DEFAULT,
            demand_ns,
            cap_ns: None,
        };
        groups.push(group(place, 0.0));
        for (&number, vcpu) in vcpus {
            let used_ns = vcpu.counts.phase_ns[intf::vcpu_phase_PHASE_RUNS as usize] as f64;
            groups[place].demand_ns -= used_ns + late_ns.min(used_ns);
            places.insert((tgid, number), groups.len());
            groups.push(group(vm, vcpu.demand_ns() as f64));
        }
        cpus_of.resize(groups.len(), after.cpus_of.get(&tgid));
    }
    for group in &mut groups {
        group.demand_ns = group.demand_ns.max(0.0);
    }
    bound_by_cpu_sets(length_ns, &cpus_of, &mut groups);
    let entitled_ns = entitlements_ns(length_ns * f64::from(after.cpus), &groups);
    let of_vcpu = |(vcpu, place): ((u32, u32), usize)| (vcpu, entitled_ns[place]);
    places.into_iter().map(of_vcpu).collect()
}

/// What part of the time between two readings tasks of the host stood still, if the kernel counts it.
fn pressure(before: &Observation, after: &Observation) -> Option<PressureView> {
    let (earlier, later) = (before.pressure?, after.pressure?);
    let length_us = after.at_ns.saturating_sub(before.at_ns) as f64 / 1000.0;
    let part = |later: u64, earlier: u64| percent(later.saturating_sub(earlier) as f64, length_us);
    Some(PressureView {
        cpu_some_pct: part(later.cpu.some_us, earlier.cpu.some_us),
        io_some_pct: part(later.io.some_us, earlier.io.some_us),
        io_full_pct: part(later.io.full_us, earlier.io.full_us),
        memory_some_pct: part(later.memory.some_us, earlier.memory.some_us),
        memory_full_pct: part(later.memory.full_us, earlier.memory.full_us),
    })
}

/// What those are called who take CPUs.
struct Names<'a> {
    vms: &'a HashMap<u32, String>,
    after: &'a Observation,
}

impl Names<'_> {
    /// Kind and name.
    fn of(&self, kind: intf::taker_kind, id: u64) -> (&'static str, String) {
        let (kind, name) = match kind {
            intf::taker_kind_TAKER_VM => ("vm", self.vms.get(&(id as u32)).cloned()),
            intf::taker_kind_TAKER_KERNEL => ("kernel", Some("kernel threads".to_owned())),
            intf::taker_kind_TAKER_NONE => ("none", Some(String::new())),
            _ => ("cgroup", self.after.cgroup_names.get(&id).cloned()),
        };
        (
            kind,
            name.unwrap_or_else(|| format!("{kind} {id}, which is gone")),
        )
    }
}

fn takers(
    tgid: u32,
    before: &Observation,
    after: &Observation,
    names: &Names<'_>,
) -> Vec<TakerView> {
    let identity = |key: &intf::taker_key| (key.tgid, key.kind, key.id);
    let earlier: HashMap<_, _> = before
        .takers
        .iter()
        .map(|taker| (identity(&taker.key), taker.stats))
        .collect();
    let view = |taker: &TakerReading| {
        let earlier = earlier.get(&identity(&taker.key));
        let id = taker.key.id;
        let (kind, name) = names.of(taker.key.kind, id);
        TakerView {
            kind: kind.to_owned(),
            id,
            name,
            times: gained(taker.stats.times, earlier.map_or(0, |stats| stats.times)),
            ready_us: gained(
                taker.stats.ready_ns,
                earlier.map_or(0, |stats| stats.ready_ns),
            ) / 1000,
        }
    };
    let of_vm = after.takers.iter().filter(|taker| taker.key.tgid == tgid);
    let mut takers: Vec<TakerView> = of_vm.map(view).filter(|taker| taker.times > 0).collect();
    takers.sort_by_key(|taker| std::cmp::Reverse(taker.ready_us));
    takers
}

/// What counters have gained, of one vCPU or of several.
#[derive(Clone, Default)]
struct Gain {
    kvm: u64,
    vcpus: u32,
    counts: intf::vcpu_counts,
    halted_by: HaltedBy,
    /// Of the time in which it was ready: the scheduler held it back for a cap.
    held_back_ns: u64,
    /// Of that time too: it was halted, and the scheduler gave its CPU to others.
    resting_ns: u64,
    entitled_ns: u64,
    longest_ready_ns: u64,
    longest_ipi_ns: u64,
    longest_off_cpu: Option<intf::off_cpu>,
}

impl Gain {
    /// Since the observer knows it, up to the reading: the phase that it is in has lasted until then.
    fn of(counters: &intf::vcpu_counters) -> Self {
        let mut counts = counters.counts;
        if let Some(phase) = counts.phase_ns.get_mut(counters.phase as usize) {
            *phase += counters.read_ns.saturating_sub(counters.since_ns);
        }
        Self {
            kvm: counters.kvm,
            vcpus: 1,
            counts,
            halted_by: HaltedBy::Exits,
            held_back_ns: 0,
            resting_ns: 0,
            entitled_ns: 0,
            longest_ready_ns: counters.longest_ready_ns,
            longest_ipi_ns: counters.longest_ipi_ns,
            longest_off_cpu: Some(counters.longest_off_cpu).filter(|off| off.ns > 0),
        }
    }

    /// Takes off what was counted earlier.
    fn less(&mut self, earlier: &Self) {
        self.counts = counts::since(&self.counts, &earlier.counts);
    }

    /// Adds another vCPU's.
    fn add(&mut self, other: &Self) {
        self.counts = counts::sum(&self.counts, &other.counts);
        self.held_back_ns += other.held_back_ns;
        self.resting_ns += other.resting_ns;
        self.vcpus += other.vcpus;
        self.halted_by = self.halted_by.max(other.halted_by);
        self.entitled_ns += other.entitled_ns;
        self.longest_ready_ns = self.longest_ready_ns.max(other.longest_ready_ns);
        self.longest_ipi_ns = self.longest_ipi_ns.max(other.longest_ipi_ns);
        let both = [self.longest_off_cpu, other.longest_off_cpu];
        self.longest_off_cpu = both.into_iter().flatten().max_by_key(|off| off.ns);
    }

    /// The CPU time that it used or waited for.
    fn demand_ns(&self) -> u64 {
        use intf::{vcpu_phase_PHASE_LIMITED, vcpu_phase_PHASE_READY, vcpu_phase_PHASE_RUNS};
        [
            vcpu_phase_PHASE_RUNS,
            vcpu_phase_PHASE_READY,
            vcpu_phase_PHASE_LIMITED,
        ]
        .map(|phase| self.counts.phase_ns[phase as usize])
        .iter()
        .sum::<u64>()
        .saturating_sub(self.resting_ns)
    }

    fn view(&self, length_ns: u64, names: &Names<'_>) -> VcpuView {
        let vcpu_time_ns = length_ns as f64 * f64::from(self.vcpus);
        let counts = &self.counts;
        let phase_ns = |phase: u32| counts.phase_ns[phase as usize];
        let phase_pct = |phase| percent(phase_ns(phase) as f64, vcpu_time_ns);
        // What was counted at the end of a wait may have begun in the window before.
        let ready_ns = phase_ns(intf::vcpu_phase_PHASE_READY);
        let held_back_ns = self.held_back_ns.min(ready_ns);
        let ready_ns = ready_ns - held_back_ns;
        let resting_ns = self.resting_ns.min(ready_ns);
        let ready_ns = ready_ns - resting_ns;
        let limited_ns = phase_ns(intf::vcpu_phase_PHASE_LIMITED) + held_back_ns;
        // What a vCPU halts on its CPU is counted a moment before the reading, of which the phase is.
        let on_cpu_ns = phase_ns(intf::vcpu_phase_PHASE_RUNS);
        let halted_on_cpu_ns = counts.halted_on_cpu_ns.min(on_cpu_ns);
        let halted_ns = phase_ns(intf::vcpu_phase_PHASE_HALTED) + halted_on_cpu_ns + resting_ns;
        VcpuView {
            vcpus: self.vcpus,
            run_pct: percent((on_cpu_ns - halted_on_cpu_ns) as f64, vcpu_time_ns),
            ready_pct: percent(ready_ns as f64, vcpu_time_ns),
            limited_pct: percent(limited_ns as f64, vcpu_time_ns),
            halted_pct: percent(halted_ns as f64, vcpu_time_ns),
            halted_by: self.halted_by.word().to_owned(),
            halted_unread_pct: percent(counts.halted_unread_ns as f64, vcpu_time_ns),
            on_cpu_pct: phase_pct(intf::vcpu_phase_PHASE_RUNS),
            away_pct: phase_pct(intf::vcpu_phase_PHASE_AWAY),
            poll_pct: percent(counts.poll_ns as f64, vcpu_time_ns),
            spin_pct: percent(counts.spin_ns as f64, vcpu_time_ns),
            entitled_pct: percent(self.entitled_ns as f64, vcpu_time_ns),
            spin_exits: counts.spin_exits,
            yields_offered: counts.yields_offered,
            yields_served: counts.yields_served,
            yields_not_ready: counts.yields_not_ready,
            yields_refused: counts.yields_refused,
            ipis: counts.ipis,
            ipi_to_run: counts.ipi_to_run.to_vec(),
            ipi_to_run_us: counts.ipi_to_run_ns / 1000,
            longest_ipi_us: self.longest_ipi_ns / 1000,
            ready_us: counts.ready_us.to_vec(),
            longest_ready_us: self.longest_ready_ns / 1000,
            wakeups: counts.wakeups,
            migrations: counts.migrations,
            migrations_far: counts.migrations_far,
            preempted_user: counts.preempted_user,
            preempted_kernel: counts.preempted_kernel,
            stacked_pct: percent(counts.stacked_ns as f64, ready_ns as f64),
            longest_off_cpu: self
                .longest_off_cpu
                .map(|off| off_cpu(&off, names))
                .unwrap_or_default(),
        }
    }
}

/// How threads sleep, as words.
const SLEEPS: [(intf::sleep_kind, &str); 7] = [
    (intf::sleep_kind_SLEEP_IN_KVM, "in-kvm"),
    (intf::sleep_kind_SLEEP_STOPPED, "stopped"),
    (intf::sleep_kind_SLEEP_FROZEN, "frozen"),
    (intf::sleep_kind_SLEEP_IO, "io"),
    (intf::sleep_kind_SLEEP_MEMORY, "memory"),
    (intf::sleep_kind_SLEEP_UNINTERRUPTIBLE, "uninterruptible"),
    (intf::sleep_kind_SLEEP_PAGE, "page"),
];

fn off_cpu(off: &intf::off_cpu, names: &Names<'_>) -> OffCpuView {
    let after = names.after;
    let since_ms = after.at_ns.saturating_sub(off.end_ns) / 1_000_000;
    let of_sleep = |(bit, word): &(intf::sleep_kind, &str)| {
        (off.sleep & bit != 0).then(|| String::from(*word))
    };
    let comm: Vec<u8> = off.taker.comm.iter().map(|&byte| byte as u8).collect();
    let comm = comm.split(|&byte| byte == 0).next().unwrap_or_default();
    let told = standing::is_told(off.syscall, off.operation).then(|| String::from("told"));
    OffCpuView {
        us: off.ns / 1000,
        ready_us: off.ready_ns / 1000,
        limited_us: off.limited_ns / 1000,
        until_ms: after.unix_ms.saturating_sub(since_ms),
        goes_on: off.goes_on,
        sleep: SLEEPS.iter().filter_map(of_sleep).chain(told).collect(),
        syscall: off.syscall,
        taker: names.of(off.taker.kind, off.taker.id).1,
        taker_thread: String::from_utf8_lossy(comm).replace(char::is_control, "?"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::cgroups::CgroupReading;

    const SECOND_NS: u64 = 1_000_000_000;

    fn vcpu(tid: i32, tgid: u32, vcpu_id: u32) -> intf::vcpu_counters {
        let nothing: intf::vcpu_counters = bytemuck::Zeroable::zeroed();
        intf::vcpu_counters {
            kvm: 1,
            tgid,
            vcpu_id,
            tid,
            ..nothing
        }
    }

    fn at(at_ns: u64, mut vcpus: Vec<intf::vcpu_counters>) -> Observation {
        vcpus.iter_mut().for_each(|vcpu| vcpu.read_ns = at_ns);
        Observation {
            at_ns,
            vcpus,
            ..Observation::default()
        }
    }

    #[test]
    fn a_phase_that_goes_on_counts_up_to_the_reading() {
        let mut before = vcpu(7, 5, 0);
        before.phase = intf::vcpu_phase_PHASE_RUNS;
        before.since_ns = SECOND_NS;
        let after = before;
        let view = HostView::between(
            &at(2 * SECOND_NS, vec![before]),
            &at(4 * SECOND_NS, vec![after]),
        );
        assert_eq!(view.window_ms, 2000);
        assert_eq!(view.vms[&5].all.run_pct, 100.0);
        assert_eq!(view.vms[&5].vcpus[&0].ready_pct, 0.0);
    }

    #[test]
    fn a_vm_is_the_sum_of_its_vcpus_and_times_are_their_mean() {
        let mut runs = vcpu(7, 5, 0);
        runs.counts.phase_ns[intf::vcpu_phase_PHASE_RUNS as usize] = SECOND_NS;
        runs.counts.spin_exits = 3;
        let mut waits = vcpu(8, 5, 1);
        waits.counts.phase_ns[intf::vcpu_phase_PHASE_READY as usize] = SECOND_NS;
        waits.counts.stacked_ns = SECOND_NS / 4;
        waits.counts.spin_exits = 4;
        let view = HostView::between(&at(0, vec![]), &at(SECOND_NS, vec![runs, waits]));
        let all = &view.vms[&5].all;
        assert_eq!((all.vcpus, all.spin_exits), (2, 7));
        assert_eq!((all.run_pct, all.ready_pct), (50.0, 50.0));
        assert_eq!(all.stacked_pct, 25.0);
    }

    #[test]
    fn what_the_scheduler_keeps_a_vcpu_from_its_cpu_for_is_no_ready_time() {
        let mut waits = vcpu(7, 5, 0);
        waits.counts.phase_ns[intf::vcpu_phase_PHASE_READY as usize] = SECOND_NS;
        let mut before = at(0, vec![vcpu(7, 5, 0)]);
        let mut after = at(SECOND_NS, vec![waits]);
        let kept = |capped_ns, resting_ns| {
            let waits = intf::vcpu_waits {
                capped_ns,
                resting_ns,
            };
            Some([(7, waits)].into())
        };
        (before.waits, after.waits) = (kept(SECOND_NS, 0), kept(SECOND_NS * 5 / 4, 0));
        let all = &HostView::between(&before, &after).vms[&5].all;
        assert_eq!((all.ready_pct, all.limited_pct), (75.0, 25.0));
        // Others had its CPU while it was halted.
        (before.waits, after.waits) = (kept(0, 0), kept(0, SECOND_NS / 2));
        let all = &HostView::between(&before, &after).vms[&5].all;
        assert_eq!((all.ready_pct, all.halted_pct), (50.0, 50.0));
    }

    /// Two seconds on a CPU, of which it was halted for the half by MPERF, and another second asleep in KVM's halt; whether
    /// MPERF can be read here.
    fn halts(unseen: Option<&str>) -> HostView {
        let mut halts = vcpu(7, 5, 0);
        halts.halts_on_cpu = 1;
        halts.counts.phase_ns[intf::vcpu_phase_PHASE_RUNS as usize] = 2 * SECOND_NS;
        halts.counts.phase_ns[intf::vcpu_phase_PHASE_HALTED as usize] = SECOND_NS;
        if unseen.is_none() {
            halts.counts.halted_on_cpu_ns = SECOND_NS;
        }
        let mut after = at(4 * SECOND_NS, vec![halts, vcpu(8, 6, 0)]);
        after.halts = Some(HaltSight {
            unseen: unseen.map(str::to_owned),
            error_ppm: 1_500,
        });
        HostView::between(&at(0, vec![]), &after)
    }

    #[test]
    fn what_a_vcpu_halts_on_its_cpu_is_halted_time_and_it_had_the_cpu() {
        let view = halts(None);
        let all = &view.vms[&5].all;
        assert_eq!((all.run_pct, all.halted_pct), (25.0, 50.0));
        assert_eq!((all.on_cpu_pct, all.halted_by.as_str()), (50.0, "mperf"));
        assert_eq!(view.vms[&6].all.halted_by, "exits");
        assert_eq!(view.halted_error_pct, 0.15);
        assert!(view.has("halted_error_pct") && view.has("halted_unread_pct"));
    }

    #[test]
    fn halted_time_that_cannot_be_had_is_said_of_the_vm_that_it_concerns() {
        let view = halts(Some("MPERF stands still"));
        let all = &view.vms[&5].all;
        assert_eq!((all.run_pct, all.halted_by.as_str()), (50.0, "unseen"));
        assert!(!all.has("halted_pct") && view.vms[&6].all.has("halted_pct"));
        assert!(!view.has("halted_error_pct"));
        let said = |spot: &String| spot.starts_with("halted") && spot.ends_with("stands still");
        assert!(view.blind_spots.iter().any(said));
    }

    #[test]
    fn nothing_is_said_of_halts_where_all_exit() {
        let view = HostView::between(&at(0, vec![]), &at(SECOND_NS, vec![vcpu(7, 5, 0)]));
        assert_eq!(view.vms[&5].all.halted_by, "exits");
        assert!(!view.blind_spots.iter().any(|spot| spot.contains("halted")));
        assert!(!view.has("halted_error_pct") && !view.has("halted_unread_pct"));
    }

    #[test]
    fn more_is_never_halted_on_a_cpu_than_the_vcpu_had_one() {
        let mut halts = vcpu(7, 5, 0);
        halts.counts.phase_ns[intf::vcpu_phase_PHASE_RUNS as usize] = SECOND_NS;
        halts.counts.halted_on_cpu_ns = SECOND_NS + 1_000;
        let view = HostView::between(&at(0, vec![]), &at(SECOND_NS, vec![halts]));
        let all = &view.vms[&5].all;
        assert_eq!((all.run_pct, all.halted_pct), (0.0, 100.0));
    }

    #[test]
    fn vms_of_the_same_name_are_told_apart() {
        let mut after = at(SECOND_NS, vec![vcpu(7, 5, 0), vcpu(8, 6, 0), vcpu(9, 4, 0)]);
        let named = |name: &str| VmIdentity {
            name: name.into(),
            ..VmIdentity::default()
        };
        after.identities = [(5, named("web")), (6, named("web")), (4, named("db"))].into();
        let view = HostView::between(&at(0, vec![]), &after);
        let names: Vec<&str> = view.vms.values().map(|vm| vm.name.as_str()).collect();
        assert_eq!(names, ["db", "web (5)", "web (6)"]);
    }

    /// Two VMs of one vCPU that want all of the time, in cgroups of weight 100 and 300.
    fn two_that_want_all(cpus: u32) -> [Observation; 2] {
        let cgroup = |id, parent, weight, used_us| CgroupReading {
            id,
            parent,
            weight,
            cap_cpus: None,
            used_us,
        };
        let at_ns = |at_ns: u64| {
            let half = at_ns / 2;
            let vcpu = |tid, tgid| {
                let mut vcpu = vcpu(tid, tgid, 0);
                vcpu.counts.phase_ns[intf::vcpu_phase_PHASE_RUNS as usize] = half;
                vcpu.counts.phase_ns[intf::vcpu_phase_PHASE_READY as usize] = half;
                vcpu
            };
            let mut observation = at(at_ns, vec![vcpu(7, 5), vcpu(8, 6)]);
            observation.cpus = cpus;
            observation.competition = Some(Competition {
                cgroups: vec![
                    cgroup(1, None, 100, at_ns / 1000),
                    cgroup(2, Some(0), 100, half / 1000),
                    cgroup(3, Some(0), 300, half / 1000),
                ],
                place_of: [(5, 1), (6, 2)].into(),
            });
            observation
        };
        [at_ns(0), at_ns(SECOND_NS)]
    }

    #[test]
    fn vms_are_entitled_to_what_weights_leave_them() {
        let [before, after] = two_that_want_all(1);
        let view = HostView::between(&before, &after);
        let entitled = |tgid: u32| view.vms[&tgid].all.entitled_pct.round();
        assert_eq!((entitled(5), entitled(6)), (25.0, 75.0));
        assert!(view.has("entitled_pct"));
    }

    #[test]
    fn vms_that_share_cpus_are_entitled_to_no_more_than_those() {
        let [before, mut after] = two_that_want_all(4);
        after.cpus_of = [(5, BTreeSet::from([2])), (6, BTreeSet::from([2]))].into();
        let view = HostView::between(&before, &after);
        let entitled = |tgid: u32| view.vms[&tgid].all.entitled_pct.round();
        assert_eq!((entitled(5), entitled(6)), (25.0, 75.0));
    }

    #[test]
    fn without_cgroups_nobody_knows_an_entitlement() {
        let [before, mut after] = two_that_want_all(1);
        after.competition = None;
        assert!(!HostView::between(&before, &after).has("entitled_pct"));
    }

    #[test]
    fn a_thread_number_that_is_used_again_begins_anew() {
        let mut before = vcpu(7, 5, 0);
        before.counts.spin_exits = 100;
        let mut after = vcpu(7, 5, 0);
        after.kvm = 2;
        after.counts.spin_exits = 10;
        let view = HostView::between(&at(0, vec![before]), &at(SECOND_NS, vec![after]));
        assert_eq!(view.vms[&5].all.spin_exits, 10);
    }

    #[test]
    fn takers_are_those_of_the_window_the_most_time_first() {
        let taker = |id, times, ready_ns| TakerReading {
            key: intf::taker_key {
                tgid: 5,
                kind: intf::taker_kind_TAKER_VM,
                id,
            },
            stats: intf::taker_stats { times, ready_ns },
        };
        let mut before = at(0, vec![]);
        before.takers = vec![taker(1, 5, 50_000), taker(2, 5, 50_000)];
        let mut after = at(SECOND_NS, vec![vcpu(7, 5, 0)]);
        after.takers = vec![
            taker(1, 5, 50_000),
            taker(2, 6, 60_000),
            taker(3, 1, 90_000),
        ];
        let view = HostView::between(&before, &after);
        let takers = &view.vms[&5].takers;
        let seen: Vec<(u64, u64, u64)> = takers
            .iter()
            .map(|taker| (taker.id, taker.times, taker.ready_us))
            .collect();
        assert_eq!(seen, [(3, 1, 90), (2, 1, 10)]);
    }
}
