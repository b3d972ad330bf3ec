// SPDX-License-Identifier: GPL-2.0-only
//! The loaded scheduler: puts the BPF part into the kernel, reads its counters,
//! and takes it out again. When to do so is decided in `run.rs`.

pub(crate) mod exceptions;
pub mod features;
pub mod mechanism;
pub mod metrics;
pub mod settings;
pub(crate) mod stats_server;

use crate::bpf::halt::{HaltClocks, halt_parts};
use crate::bpf::sight::{Seen, load_hooks};
use crate::bpf::{from_bytes, intf, skel};
use crate::host::affinity::allowed_cpus;
use crate::host::arch::hardware_ends_interrupts;
use crate::host::cgroups::CapWatch;
use crate::host::kvm::{Kvm, KvmWatch};
use crate::host::paths::Host;
use crate::host::topology::{self, Domains, Nodes};
use crate::host::vm_identity::VmIdentity;
use crate::process::exit::{Exit, Failure};
use crate::scheduler::exceptions::{CohortRule, Exception, rule_for};
use crate::scheduler::features::Features;
use crate::scheduler::mechanism::{Mechanisms, Switch};
use crate::scheduler::metrics::{GroupReading, Reading};
use crate::scheduler::settings::Settings;
use crate::text::duration;
use anyhow::{Context, Result, bail, ensure};
use libbpf_rs::{AsRawLibbpf, Link, MapCore, MapFlags, OpenObject, ProgramInput};
use nix::time::ClockId;
use scx_utils::compat::SCX_OPS_ENQ_MIGRATION_DISABLED;
use scx_utils::{ScxExitKind, scx_ops_attach, scx_ops_load, scx_ops_open, uei_exited, uei_read};
use skel::{BpfSkel, BpfSkelBuilder, OpenBpfSkel};
use std::collections::BTreeSet;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

/// A reader of the kernel's message and its dump has this long for them.
const REPORT_PATIENCE: Duration = Duration::from_secs(3);
/// Groups are read in parts of this many, which fit in a few hundred KiB.
const GROUPS_PER_READ: u32 = 512;

/// NUMA nodes that the BPF side knows.
const MAX_NUMA_NODES: usize = intf::cohort_limits_MAX_NUMA_NODES as usize;
/// The kernel's distance within a node.
const LOCAL_DISTANCE: u8 = intf::cohort_limits_LOCAL_DISTANCE as u8;

/// The scheduler while the kernel uses it.
pub struct Scheduler<'object> {
    skel: BpfSkel<'object>,
    link: Link,
    host: Host,
    kvm: KvmWatch,
    /// KVM was there when it was loaded, so what KVM does is seen.
    sees_kvm: bool,
    /// A sentence for each thing that KVM does and that is not seen.
    blind_spots: Vec<String>,
    mechanisms: Mechanisms,
    exceptions: Vec<Exception>,
    /// The VMs that it was seen to which exceptions hold for: process, and when its group was made.
    ruled: BTreeSet<(u32, u64)>,
    /// What tells how long vCPUs halt that do so on their CPUs.
    halt_clocks: HaltClocks,
    /// The BPF part can read how long vCPUs halt.
    reads_counters: bool,
    /// The hook on interrupts for vCPUs can be attached,
    sees_kicks: bool,
    /// and is, as there are such vCPUs, and it is seen how long they halt.
    kicks: Option<Link>,
    /// What the log has told of them last: why that is not seen, if it is not.
    halts_told: Option<Option<String>>,
    /// Where the kernel does not tell of cpu.max.
    caps: Option<CapWatch>,
}

/// How a scheduler's time in the kernel ended.
#[derive(Debug)]
pub enum Ending {
    /// This program took it out.
    Left,
    /// The kernel wants it loaded anew, because CPUs came or went.
    Restart,
    /// The kernel, or somebody else, removed it.
    Removed(Failure),
}

impl<'object> Scheduler<'object> {
    /// Loads the BPF part and hands it the host's scheduling.
    pub fn attach(
        object: &'object mut MaybeUninit<OpenObject>,
        settings: &Settings,
        host: &Host,
    ) -> Result<Self, Failure> {
        let rejected = |error: anyhow::Error| {
            Failure::new(
                Exit::LoadRejected,
                error.context(
                    "the kernel did not accept the scheduler; the lines above say why, please \
                     report them with the kernel's version",
                ),
            )
        };
        let domains = Domains::read(&host.sys)?;
        let mut watch = KvmWatch::new(host);
        let kvm = watch.moved()?.flatten();
        let mut open = open(object).map_err(rejected)?;
        // Attached only where it is needed: KVM kicks a vCPU for each interrupt.
        open.progs.vcpu_kicked.set_autoattach(false);
        let features = Features::of_this_kernel();
        open.progs.tell_cap.set_autoload(!features.tells_caps);
        // Zero before Linux 6.14, where tasks that may not migrate for a moment always wait with the others.
        open.struct_ops.cohort_ops_mut().flags |= *SCX_OPS_ENQ_MIGRATION_DISABLED;
        if let Some(constants) = open.maps.rodata_data.as_mut() {
            constants.reads_counters = features.reads_counters;
        }
        let mut sees_kicks = false;
        let mut blind_spots = features.blind_spots();
        if let Some(kvm) = &kvm {
            let hardware = hardware_ends_interrupts(&host.sys);
            let blind = settings.blind.iter().map(|&sight| (sight, "as asked for"));
            let seen = Seen::of(kvm, hardware, &blind.collect::<Vec<_>>());
            load_hooks!(open, seen);
            open.progs.ipi_answered.set_autoload(seen.ipis);
            open.progs.vcpu_kicked.set_autoload(seen.kicks);
            open.progs.vcpu_halts.set_autoload(seen.halts);
            sees_kicks = seen.kicks;
            if let Some(constants) = open.maps.rodata_data.as_mut() {
                constants.eois_hidden = seen.ends_hidden;
            }
            blind_spots.extend(seen.blind_spots);
        }
        for sentence in &blind_spots {
            tracing::warn!("{sentence}");
        }
        let mut skel = configure_and_load(open, settings, &domains, &Nodes::read(&host.sys))?
            .map_err(rejected)?;
        tell_where_kvm_is(&mut skel, kvm.as_ref());
        turn_on(&mut skel, settings.mechanisms);
        let link = attach(&mut skel).map_err(rejected)?;
        tracing::info!(
            "Cohort schedules this host: {} CPU numbers in {} domains, slice {}, watchdog {}",
            domains.of_cpu.len(),
            domains.count,
            duration::show(settings.slice),
            duration::show(settings.timeout)
        );
        Ok(Self {
            skel,
            link,
            host: host.clone(),
            kvm: watch,
            sees_kvm: kvm.is_some(),
            blind_spots,
            mechanisms: settings.mechanisms,
            exceptions: settings.exceptions.clone(),
            ruled: BTreeSet::new(),
            halt_clocks: HaltClocks::new(&host.sys),
            reads_counters: features.reads_counters,
            sees_kicks,
            kicks: None,
            halts_told: None,
            caps: (!features.tells_caps).then(CapWatch::default),
        })
    }

    /// Whether the kernel has stopped using it.
    pub fn has_exited(&self) -> bool {
        uei_exited!(&self.skel, uei)
    }

    /// Which mechanisms are on.
    pub fn mechanisms(&self) -> Mechanisms {
        self.mechanisms
    }

    /// Switches a mechanism; what it has begun already, such as a yield that is
    /// owed, comes to its end.
    pub fn switch(&mut self, switch: Switch) {
        self.mechanisms = self.mechanisms.switched(switch);
        turn_on(&mut self.skel, self.mechanisms);
    }

    /// Tells the BPF part where KVM is now, if that changed. Returns whether KVM came after Cohort was loaded: what
    /// it does can then be seen only by loading Cohort anew.
    pub fn follow_kvm(&mut self) -> Result<bool> {
        if let Some(kvm) = self.kvm.moved()? {
            tell_where_kvm_is(&mut self.skel, kvm.as_ref());
            return Ok(kvm.is_some() && !self.sees_kvm);
        }
        Ok(false)
    }

    /// Looks after what tells how long vCPUs halt on their CPUs. Does nothing where there are none, or where the BPF part
    /// cannot read it: then no vCPU rests, which `blind_spots` tells.
    pub fn follow_halts(&mut self) -> Result<()> {
        if !self.reads_counters {
            return Ok(());
        }
        let Some(parts) = halt_parts!(self.skel) else {
            return Ok(());
        };
        let online = topology::online_cpus(&self.host.sys)?;
        let (sight, _) = self.halt_clocks.keep(&parts, &online)?;
        if self.halts_told.as_ref() == Some(&sight.unseen) {
            return Ok(());
        }
        let unseen = self.halts_told.insert(sight.unseen);
        if let Some(why) = unseen {
            tracing::warn!(
                "there are VMs whose HLT does not exit; that their vCPUs halt is not seen: {why}"
            );
            return Ok(());
        }
        tracing::info!(
            "there are VMs whose HLT does not exit: CPUs on which their vCPUs halt are others' meanwhile"
        );
        if !self.sees_kicks {
            tracing::warn!(
                "interrupts for their vCPUs are not seen, as this kernel's KVM lacks a function that shows them: one \
                 that wakes may wait for its CPU for 14 ms"
            );
        } else if self.kicks.is_none() {
            let kicks = self.skel.progs.vcpu_kicked.attach();
            let failed = "the hook on KVM's __kvm_vcpu_kick cannot be attached";
            self.kicks = Some(kicks.context(failed)?);
        }
        Ok(())
    }

    /// Tells the BPF part of cpu.max where the kernel does not.
    pub fn follow_caps(&mut self) -> Result<()> {
        let Some(watch) = &mut self.caps else {
            return Ok(());
        };
        for (cgroup_id, cap) in watch.changes(&self.host) {
            let mut told = intf::cgroup_cap {
                cgroup_id,
                period_us: cap.map_or(0, |cap| cap.period_us),
                quota_us: cap.map_or(u64::MAX, |cap| cap.quota_us),
                burst_us: cap.map_or(0, |cap| cap.burst_us),
            };
            let input = ProgramInput {
                context_in: Some(bytemuck::bytes_of_mut(&mut told)),
                ..ProgramInput::default()
            };
            // One that has gone meanwhile has no cap to obey.
            let told = self.skel.progs.tell_cap.test_run(input);
            told.context("the BPF part cannot be told of cpu.max")?;
        }
        Ok(())
    }

    /// Lets `exceptions` hold from the next [`Self::follow_exceptions`] on.
    pub fn set_exceptions(&mut self, exceptions: Vec<Exception>) -> Result<()> {
        // They may hold for VMs that are ruled already.
        for (tgid, _) in std::mem::take(&mut self.ruled) {
            self.set_rule(tgid, CohortRule::Auto)?;
        }
        self.exceptions = exceptions;
        Ok(())
    }

    /// Tells the BPF part which VMs that came are exceptions, and forgets those that went. Does nothing if there are
    /// no exceptions.
    pub fn follow_exceptions(&mut self) -> Result<()> {
        if self.exceptions.is_empty() {
            return Ok(());
        }
        let groups = self.read_groups()?;
        let vms = groups.iter().filter(|group| group.is_vm());
        let vms: BTreeSet<(u32, u64)> = vms
            .map(|group| (group.info.tgid, group.info.created_ns))
            .collect();
        // Those that went first: their process's number may be another one's by now.
        for (tgid, _) in self.ruled.difference(&vms) {
            self.set_rule(*tgid, CohortRule::Auto)?;
        }
        for (tgid, _) in vms.difference(&self.ruled) {
            self.set_rule(*tgid, rule_for(&self.exceptions, &self.host, *tgid))?;
        }
        self.ruled = vms;
        Ok(())
    }

    /// What holds for the VM of process `tgid` from now on.
    fn set_rule(&self, tgid: u32, rule: CohortRule) -> Result<()> {
        let map = &self.skel.maps.cohort_rules;
        let tgid = tgid.to_ne_bytes();
        if rule == CohortRule::Auto {
            // It may have none.
            let _ = map.delete(&tgid);
            return Ok(());
        }
        map.update(&tgid, &rule.number().to_ne_bytes(), MapFlags::ANY)
            .context("an exception for a VM cannot be noted")
    }

    /// Reads all counters. Takes time in proportion to the greatest possible
    /// number of groups, below a few milliseconds.
    pub fn read(&self) -> Result<Reading> {
        let groups = self.read_groups().context("the groups cannot be read")?;
        let online = topology::online_cpus(&self.host.sys)?;
        let mut reading = Reading {
            at_ns: monotonic_ns()?,
            cpus: u32::try_from(online.len()).context("more CPUs than can be counted")?,
            host: self.host_stats(),
            blind_spots: self.blind_spots.clone(),
            mechanisms: self.mechanisms,
            effects: self.effects().context("the effects cannot be read")?,
            ..Reading::at_load(0)
        };
        for group in &groups {
            if !group.is_vm() {
                continue;
            }
            let tgid = group.info.tgid;
            let name = VmIdentity::of(&self.host.proc, tgid).shown();
            reading.vm_names.insert(group.number, name);
            if let Some(allowed) = allowed_cpus(&self.host.proc, tgid)
                && !allowed.is_superset(&online)
            {
                let allowed = allowed.intersection(&online).copied().collect();
                reading.vm_cpus.insert(group.number, allowed);
            }
        }
        reading.groups = groups;
        Ok(reading)
    }

    fn read_groups(&self) -> Result<Vec<GroupReading>> {
        let mut groups = Vec::new();
        let parts =
            self.skel
                .maps
                .groups
                .lookup_batch(GROUPS_PER_READ, MapFlags::ANY, MapFlags::ANY)?;
        for (key, value) in parts {
            let number = u32::from_ne_bytes(key.as_slice().try_into()?);
            // struct group begins with what Rust reads of it.
            let info: intf::cohort_group = from_bytes(&value)?;
            if info.kind != intf::group_kind_GROUP_FREE {
                groups.push(GroupReading { number, info });
            }
        }
        Ok(groups)
    }

    fn host_stats(&self) -> intf::host_stats {
        let Some(bss) = &self.skel.maps.bss_data else {
            return Reading::at_load(0).host;
        };
        let stats = &raw const bss.host_stats;
        // SAFETY: both types are made from `struct host_stats` of intf.h. The
        // memory is shared with the kernel, which changes single u64s.
        unsafe { ptr::read_volatile(stats.cast::<intf::host_stats>()) }
    }

    fn effects(&self) -> Result<[u64; mechanism::COUNT]> {
        let mut effects = [0; mechanism::COUNT];
        for (number, effect) in (0_u32..).zip(&mut effects) {
            let number = number.to_ne_bytes();
            let map = &self.skel.maps.effects;
            let of_cpus = map.lookup_percpu(&number, MapFlags::ANY)?;
            for value in of_cpus.unwrap_or_default() {
                *effect += u64::from_ne_bytes(value.as_slice().try_into()?);
            }
        }
        Ok(effects)
    }

    /// Takes the scheduler out, if it is still in, and says how its time ended.
    ///
    /// The kernel's message and, after an error, its dump go to standard error.
    pub fn leave(self) -> Ending {
        let Self { skel, link, .. } = self;
        // Dropping the link waits until every task is back with the kernel.
        drop(link);
        let kind = uei_read_kind(&skel);
        let info = uei_read!(&skel, uei);
        let should_restart = info.should_restart();
        // It prints to standard error. That panics when nobody can read it and takes forever while nobody does, and what is to
        // be done now depends on neither.
        let (sender, reported) = channel();
        let _ = thread::Builder::new().spawn(move || sender.send(info.report()));
        let report = reported.recv_timeout(REPORT_PATIENCE).unwrap_or(Ok(()));
        match report {
            Ok(()) if should_restart => Ending::Restart,
            report => ending(kind, report),
        }
    }
}

fn uei_read_kind(skel: &BpfSkel<'_>) -> i32 {
    let data = skel.maps.data_data.as_ref();
    // SAFETY: a live, aligned i32 in memory that the kernel writes to.
    data.map_or(0, |data| unsafe {
        ptr::read_volatile(&raw const data.uei.kind)
    })
}

/// What the kernel's kind of exit means; `report` holds its message if it was an error.
fn ending(kind: i32, report: Result<()>) -> Ending {
    const GIVEN_BACK: &str =
        "The host runs on under the kernel's own scheduler, and so do its VMs.";
    let said = match report {
        Ok(()) => String::from("no reason was given"),
        Err(error) => format!("{error:#}"),
    };
    let (exit, sentence) = match kind {
        kind if kind <= ScxExitKind::Unreg as i32 => return Ending::Left,
        kind if kind == ScxExitKind::ErrorStall as i32 => (
            Exit::Watchdog,
            format!(
                "the kernel's watchdog removed Cohort, because a task waited too long for a CPU \
                 ({said}). {GIVEN_BACK} If the host was merely overloaded, or a real-time task had a \
                 CPU to itself, start Cohort with a longer --timeout; else keep the dump above \
                 for a report."
            ),
        ),
        kind if kind >= ScxExitKind::Error as i32 => (
            Exit::SchedulerError,
            format!(
                "the kernel removed Cohort because of an error ({said}). {GIVEN_BACK} Keep the \
                 dump above for a report; this is a fault of Cohort."
            ),
        ),
        _ => (
            Exit::RemovedByOthers,
            format!(
                "somebody removed Cohort, as SysRq-S does ({said}). {GIVEN_BACK} Find out who did \
                 and why before starting it again."
            ),
        ),
    };
    Ending::Removed(Failure::new(exit, anyhow::anyhow!(sentence)))
}

fn open<'object>(object: &'object mut MaybeUninit<OpenObject>) -> Result<OpenBpfSkel<'object>> {
    let builder = BpfSkelBuilder::default();
    let options: Option<libbpf_rs::libbpf_sys::bpf_object_open_opts> = None;
    scx_ops_open!(builder, object, cohort_ops, options)
}

/// The outer error is this program's, the inner one the kernel's.
fn configure_and_load<'object>(
    mut open: OpenBpfSkel<'object>,
    settings: &Settings,
    domains: &Domains,
    nodes: &Nodes,
) -> Result<Result<BpfSkel<'object>>> {
    let Some(constants) = open.maps.rodata_data.as_mut() else {
        bail!("the BPF object has no constants, so it cannot be configured; build it again");
    };
    ensure!(
        domains.of_cpu.len() <= constants.cpu_domain.len()
            && u32::from(domains.count) <= intf::cohort_limits_MAX_DOMAINS,
        "this host has {} CPU numbers in {} domains; Cohort is built for at most {} in {}. \
         Raise MAX_CPUS and MAX_DOMAINS in bpf/intf.h and build it again.",
        domains.of_cpu.len(),
        domains.count,
        constants.cpu_domain.len(),
        intf::cohort_limits_MAX_DOMAINS,
    );
    constants.cpu_domain[..domains.of_cpu.len()].copy_from_slice(&domains.of_cpu);
    // What lies beyond the tables counts as near: how far a group must be behind
    // before its tasks move to another domain is all that depends on it.
    constants.node_distance.fill(LOCAL_DISTANCE);
    for (&cpu, &node) in &nodes.of_cpu {
        if let (Some(place), Ok(node)) = (constants.cpu_node.get_mut(cpu), u8::try_from(node)) {
            *place = node;
        }
    }
    for (&(from, to), &distance) in &nodes.distances {
        if from < MAX_NUMA_NODES && to < MAX_NUMA_NODES {
            constants.node_distance[from * MAX_NUMA_NODES + to] = distance;
        }
    }
    constants.nr_cpus = domains.of_cpu.len() as u32;
    constants.nr_domains = u32::from(domains.count);
    let (groups, entities) = room(domains.of_cpu.len());
    (constants.nr_groups, constants.nr_entities) = (groups, entities);
    constants.slice_ns = nanoseconds(settings.slice);
    // A task that waits for longer than the watchdog allows ends the scheduler.
    let starved_ns = nanoseconds(settings.timeout) / 4;
    constants.parked_most_ns = starved_ns;
    constants.starved_ns = constants.starved_ns.min(starved_ns);
    constants.ready_wait_ns = nanoseconds(settings.ready_wait);
    open.struct_ops.cohort_ops_mut().timeout_ms =
        u32::try_from(settings.timeout.as_millis()).unwrap_or(u32::MAX);
    make_room(&mut open, groups, entities)?;
    // The ops are attached last and by themselves, in attach(); libbpf would
    // warn that the skeleton does not attach them with the rest.
    let ops = open.maps.cohort_ops.as_libbpf_object();
    // SAFETY: the map is alive as long as the open object.
    let err = unsafe { libbpf_rs::libbpf_sys::bpf_map__set_autoattach(ops.as_ptr(), false) };
    ensure!(err == 0, "libbpf cannot leave the ops to this program");
    Ok(scx_ops_load!(open, cohort_ops, uei))
}

/// Settings are of seconds at most.
fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// How many VMs and cgroups, and how many entities, a host of so many CPU numbers has room for. A VM of libvirt with four
/// vCPUs is about eight of the former, so this is for 32 of them per CPU.
fn room(cpus: usize) -> (u32, u32) {
    const GROUPS_PER_CPU: usize = 256;
    let most = intf::cohort_limits_MOST_ENTITIES;
    let groups = u32::try_from(cpus * GROUPS_PER_CPU)
        .unwrap_or(most)
        .clamp(intf::cohort_limits_LEAST_GROUPS, most);
    (groups, (2 * groups).min(most))
}

/// Gives maps their sizes, before they are made.
fn make_room(open: &mut OpenBpfSkel<'_>, groups: u32, entities: u32) -> Result<()> {
    let maps = &mut open.maps;
    maps.groups.set_max_entries(groups)?;
    maps.group_of_cgroup.set_max_entries(groups)?;
    maps.group_of_vm.set_max_entries(groups)?;
    maps.cohort_rules.set_max_entries(groups)?;
    maps.group_of_process.set_max_entries(groups)?;
    maps.free_groups.set_max_entries(groups)?;
    maps.entities.set_max_entries(entities)?;
    maps.entity_of.set_max_entries(entities)?;
    maps.free_entities.set_max_entries(entities)?;
    Ok(())
}

fn attach(skel: &mut BpfSkel<'_>) -> Result<Link> {
    scx_ops_attach!(skel, cohort_ops)
}

fn turn_on(skel: &mut BpfSkel<'_>, mechanisms: Mechanisms) {
    if let Some(data) = skel.maps.data_data.as_mut() {
        // SAFETY: a live, aligned u32 that the BPF programs only read.
        unsafe { ptr::write_volatile(&raw mut data.mechanisms, mechanisms.bits()) };
    }
}

fn tell_where_kvm_is(skel: &mut BpfSkel<'_>, kvm: Option<&Kvm>) {
    match kvm {
        None => tracing::info!("there is no KVM; Cohort waits for it"),
        Some(_) => tracing::info!("KVM is loaded; its vCPUs are recognised from now on"),
    }
    let address = kvm.map_or(0, |kvm| kvm.preempt_ops);
    if let Some(bss) = skel.maps.bss_data.as_mut() {
        // SAFETY: a live, aligned u64 that the BPF programs read while it changes.
        unsafe { ptr::write_volatile(&raw mut bss.kvm_preempt_ops_addr, address) };
    }
}

/// The time since boot without suspension, as the BPF side counts it.
pub fn monotonic_ns() -> Result<u64> {
    let now = ClockId::CLOCK_MONOTONIC.now();
    let now = now.context("the monotonic clock cannot be read")?;
    Ok(now.tv_sec() as u64 * 1_000_000_000 + now.tv_nsec() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exit_of(kind: ScxExitKind) -> Option<Exit> {
        match ending(kind as i32, Err(anyhow::anyhow!("EXIT: reason"))) {
            Ending::Removed(failure) => {
                assert!(failure.to_string().contains("(EXIT: reason)"));
                Some(failure.exit())
            }
            _ => None,
        }
    }

    #[test]
    fn large_hosts_have_room_for_thousands_of_vms() {
        assert_eq!(room(2), (4096, 8192));
        assert_eq!(room(64), (16384, 32768));
        // 4,000 VMs of 4 vCPUs.
        assert_eq!(room(256), (65536, 65536));
        assert_eq!(room(1024), (65536, 65536));
    }

    #[test]
    fn each_way_of_being_removed_has_its_exit_code() {
        assert_eq!(exit_of(ScxExitKind::ErrorStall), Some(Exit::Watchdog));
        assert_eq!(exit_of(ScxExitKind::ErrorBPF), Some(Exit::SchedulerError));
        assert_eq!(exit_of(ScxExitKind::Error), Some(Exit::SchedulerError));
        assert_eq!(exit_of(ScxExitKind::SysRq), Some(Exit::RemovedByOthers));
        assert_eq!(exit_of(ScxExitKind::UnregKern), Some(Exit::RemovedByOthers));
    }

    #[test]
    fn taking_it_out_is_no_failure() {
        assert!(matches!(
            ending(ScxExitKind::Unreg as i32, Ok(())),
            Ending::Left
        ));
    }

    #[test]
    fn the_monotonic_clock_goes_forward() {
        let earlier = monotonic_ns().expect("Linux has this clock");
        assert!(monotonic_ns().expect("Linux has this clock") >= earlier);
    }
}
