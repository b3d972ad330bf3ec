// SPDX-License-Identifier: GPL-2.0-only
//! The loaded scheduler: puts the BPF part into the kernel, reads its counters,
//! and takes it out again. When to do so is decided in `run.rs`.

use crate::bpf::{intf, skel};
use crate::exit::{Exit, Failure};
use crate::host::affinity::allowed_cpus;
use crate::host::kvm::{HOOKABLE, Kvm, KvmWatch, hardware_ends_interrupts};
use crate::host::paths::Host;
use crate::host::topology::{self, Domains};
use crate::host::vm_name::vm_name;
use crate::mechanism::all_but;
use crate::metrics::{GroupReading, Reading};
use crate::settings::Settings;
use anyhow::{Context, Result, bail, ensure};
use libbpf_rs::{AsRawLibbpf, Link, MapCore, MapFlags, OpenObject};
use scx_utils::{ScxExitKind, scx_ops_attach, scx_ops_load, scx_ops_open, uei_exited, uei_report};
use skel::{BpfSkel, BpfSkelBuilder, OpenBpfSkel};
use std::mem::{MaybeUninit, size_of};
use std::ptr;

/// Groups are read in parts of this many, which fit in a few hundred KiB.
const GROUPS_PER_READ: u32 = 512;

/// The scheduler while the kernel uses it.
pub struct Scheduler<'object> {
    skel: BpfSkel<'object>,
    link: Link,
    host: Host,
    kvm: KvmWatch,
    /// KVM was there when it was loaded, so what KVM does is seen.
    sees_kvm: bool,
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
        let mut watch = KvmWatch::new(&host.proc, &host.sys);
        let kvm = watch.moved()?.flatten();
        let mut open = open(object).map_err(rejected)?;
        if let Some(kvm) = &kvm {
            hook(&mut open, kvm, host);
        }
        let mut skel = configure_and_load(open, settings, &domains)?.map_err(rejected)?;
        tell_where_kvm_is(&mut skel, kvm.as_ref());
        if let Some(data) = skel.maps.data_data.as_mut() {
            // SAFETY: a live, aligned u32 that the BPF programs only read.
            unsafe { ptr::write_volatile(&raw mut data.mechanisms, all_but(&settings.off)) };
        }
        let link = attach(&mut skel).map_err(rejected)?;
        tracing::info!(
            "Cohort schedules this host: {} CPU numbers in {} domains, slice {} us, watchdog {} ms",
            domains.of_cpu.len(),
            domains.count,
            settings.slice_us,
            settings.timeout_ms
        );
        Ok(Self {
            skel,
            link,
            host: host.clone(),
            kvm: watch,
            sees_kvm: kvm.is_some(),
        })
    }

    /// Whether the kernel has stopped using it.
    pub fn has_exited(&self) -> bool {
        uei_exited!(&self.skel, uei)
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

    /// Reads all counters. Takes time in proportion to the greatest possible
    /// number of groups, below a few milliseconds.
    pub fn read(&self) -> Result<Reading> {
        let groups = self.read_groups().context("the groups cannot be read")?;
        let online = topology::online_cpus(&self.host.sys)?;
        let mut reading = Reading {
            at_ns: monotonic_ns()?,
            cpus: u32::try_from(online.len()).context("more CPUs than can be counted")?,
            events: self.events(),
            ..Reading::at_load(0)
        };
        for group in &groups {
            if group.info.kind != intf::group_kind_GROUP_VM {
                continue;
            }
            let tgid = group.info.tgid;
            let name = vm_name(&self.host.proc, tgid);
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
            ensure!(
                value.len() >= size_of::<intf::cohort_group>(),
                "a group has {} bytes, fewer than its description",
                value.len()
            );
            // SAFETY: the value is long enough, begins with this struct by the
            // contract of intf.h, and all its fields are integers.
            let info = unsafe { ptr::read_unaligned(value.as_ptr().cast::<intf::cohort_group>()) };
            if info.kind != intf::group_kind_GROUP_FREE {
                groups.push(GroupReading { number, info });
            }
        }
        Ok(groups)
    }

    fn events(&self) -> intf::host_stats {
        let Some(bss) = &self.skel.maps.bss_data else {
            return Reading::at_load(0).events;
        };
        let events = &raw const bss.host_stats;
        // SAFETY: both types are made from `struct host_stats` of intf.h. The
        // memory is shared with the kernel, which changes single u64s.
        unsafe { ptr::read_volatile(events.cast::<intf::host_stats>()) }
    }

    /// Takes the scheduler out, if it is still in, and says how its time ended.
    ///
    /// The kernel's message and, after an error, its dump go to standard error.
    pub fn leave(self) -> Ending {
        let Self { skel, link, .. } = self;
        // Dropping the link waits until every task is back with the kernel.
        drop(link);
        let kind = uei_read_kind(&skel);
        match uei_report!(&skel, uei) {
            Ok(info) if info.should_restart() => Ending::Restart,
            report => ending(kind, report.map(drop)),
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
                 ({said}). {GIVEN_BACK} Keep the dump above for a report. If the host was merely \
                 overloaded, start Cohort with a longer --timeout-ms."
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
    constants.nr_cpus = domains.of_cpu.len() as u32;
    constants.nr_domains = u32::from(domains.count);
    constants.slice_ns = settings.slice_us * 1000;
    open.struct_ops.cohort_ops_mut().timeout_ms = settings.timeout_ms;
    // The ops are attached last and by themselves, in attach(); libbpf would
    // warn that the skeleton does not attach them with the rest.
    let ops = open.maps.cohort_ops.as_libbpf_object();
    // SAFETY: the map is alive as long as the open object.
    let err = unsafe { libbpf_rs::libbpf_sys::bpf_map__set_autoattach(ops.as_ptr(), false) };
    ensure!(err == 0, "libbpf cannot leave the ops to this program");
    Ok(scx_ops_load!(open, cohort_ops, uei))
}

fn attach(skel: &mut BpfSkel<'_>) -> Result<Link> {
    scx_ops_attach!(skel, cohort_ops)
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

/// Has the hooks loaded for what this KVM shows, and says what it does not.
fn hook(open: &mut OpenBpfSkel<'_>, kvm: &Kvm, host: &Host) {
    let [deliver, accept, eoi, pv_ipi, on_spin] = HOOKABLE.map(|hook| kvm.has.contains(hook));
    if deliver && accept && eoi {
        open.progs.ipi_begins.set_autoload(true);
        open.progs.ipi_ends.set_autoload(true);
        open.progs.ipi_accepted.set_autoload(true);
        open.progs.ipi_answered.set_autoload(true);
        open.progs.pv_ipi_begins.set_autoload(pv_ipi);
        open.progs.pv_ipi_ends.set_autoload(pv_ipi);
    } else {
        tracing::warn!(
            "IPIs between vCPUs are not seen: this kernel's KVM lacks a function that shows them. \
             Yields go to KVM's own candidates"
        );
    }
    if on_spin {
        open.progs.spin_exit_begins.set_autoload(true);
        open.progs.spin_exit_ends.set_autoload(true);
    } else {
        tracing::warn!(
            "spin exits are not seen: this kernel's KVM has no kvm_vcpu_on_spin to attach to"
        );
    }
    if let Some(hardware) = hardware_ends_interrupts(&host.sys) {
        tracing::warn!(
            "{hardware} is on: the ends of interrupts, and IPIs to vCPUs that run, are not seen. \
             An IPI counts as answered when its receiver runs"
        );
        if let Some(constants) = open.maps.rodata_data.as_mut() {
            constants.eois_hidden = true;
        }
    }
}

/// The time since boot without suspension, as the BPF side counts it.
pub fn monotonic_ns() -> Result<u64> {
    let mut now = MaybeUninit::<libc::timespec>::uninit();
    // SAFETY: clock_gettime writes one timespec through a valid pointer.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, now.as_mut_ptr()) };
    ensure!(result == 0, "the monotonic clock cannot be read");
    // SAFETY: it succeeded, so it has written the value.
    let now = unsafe { now.assume_init() };
    Ok(now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64)
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
