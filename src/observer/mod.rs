// SPDX-License-Identifier: GPL-2.0-only
//! The loaded observer: puts its BPF part into the kernel and reads what it counts. It changes nothing, works under any
//! scheduler, and is gone when it is dropped.

pub mod entitlement;
pub(crate) mod observation;
pub mod recording;
pub(crate) mod span;
pub mod view;

use crate::bpf::halt::{HaltClocks, HaltSight, halt_parts, run_on};
use crate::bpf::sight::{Seen, Sight, load_hooks};
use crate::bpf::{from_bytes, intf, observe};
use crate::host::arch::hardware_ends_interrupts;
use crate::host::cgroups::{CgroupNames, Competition};
use crate::host::kvm::{Kvm, KvmWatch};
use crate::host::paths::Host;
use crate::host::preflight;
use crate::host::pressure::Pressure;
use crate::host::topology::{self, Domains};
use crate::host::vm_identity::VmIdentity;
use crate::observer::observation::{Observation, TakerReading};
use crate::observer::view::HostView;
use crate::process::exit::{Exit, Failure};
use crate::scheduler::monotonic_ns;
use anyhow::{Context, Result, anyhow};
use libbpf_rs::query::MapInfoIter;
use libbpf_rs::skel::{OpenSkel, Skel, SkelBuilder};
use libbpf_rs::{Iter, MapCore, MapFlags, MapHandle, OpenObject};
use nix::sched::{CpuSet, sched_getaffinity};
use nix::unistd::Pid;
use observe::{ObserveSkel, ObserveSkelBuilder};
use scx_utils::compat::ksym_exists;
use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::io::Read;
use std::mem::MaybeUninit;
use std::ptr;
use std::time::SystemTime;

/// Entries of maps are read in parts of this many.
const PER_READ: u32 = 512;
/// Where Cohort counts how long it kept vCPUs from running.
const WAITS_MAP: &str = "cohort_waits";

/// The observer while it observes.
pub struct Observer<'object> {
    skel: ObserveSkel<'object>,
    host: Host,
    seen: Seen,
    cgroup_names: RefCell<CgroupNames>,
    halt_clocks: RefCell<HaltClocks>,
}

impl<'object> Observer<'object> {
    /// Loads the BPF part and attaches it.
    ///
    /// # Errors
    /// Without KVM or privileges, and when the kernel refuses it: with [`Exit::LoadRejected`].
    pub fn load(
        object: &'object mut MaybeUninit<OpenObject>,
        host: &Host,
    ) -> Result<Self, Failure> {
        preflight::check_observer(host)?;
        let kvm = KvmWatch::new(host).moved()?.flatten();
        let kvm = kvm.context(
            "KVM is not loaded on this host, so there is nothing to watch. Load it first (modprobe \
             kvm_intel or kvm_amd)",
        )?;
        let mut blind = Vec::new();
        if !ksym_exists("bpf_task_from_pid").unwrap_or(false) {
            let why = "this kernel does not let BPF programs find threads (Linux 6.2 and later do)";
            blind.push((Sight::Ipis, why));
        }
        let seen = Seen::of(&kvm, hardware_ends_interrupts(&host.sys), &blind);
        let domains = Domains::read(&host.sys)?;
        let skel = load(object, &kvm, &seen, &domains).map_err(|error| {
            let sentence = "the kernel did not accept the observer; has this kernel BTF (/sys/kernel/btf/vmlinux)?";
            Failure::new(Exit::LoadRejected, error.context(sentence))
        })?;
        let observer = Self {
            skel,
            host: host.clone(),
            seen,
            cgroup_names: RefCell::default(),
            halt_clocks: RefCell::new(HaltClocks::new(&host.sys)),
        };
        // vCPUs that run already may go on for hours without a switch.
        observer.look_at(topology::online_cpus(&host.sys)?);
        Ok(observer)
    }

    /// Reads all counters.
    pub fn read(&self) -> Result<Observation> {
        let online = topology::online_cpus(&self.host.sys)?;
        let halts = self
            .count_halts(&online)
            .context("what vCPUs halt on their CPUs cannot be counted")?;
        let vcpus = self
            .read_vcpus()
            .context("the vCPUs' counters cannot be read")?;
        let at_ns = monotonic_ns()?;
        let tgids: BTreeSet<u32> = vcpus.iter().map(|vcpu| vcpu.tgid).collect();
        let identity = |&tgid: &u32| (tgid, VmIdentity::of(&self.host.proc, tgid));
        let competition = Competition::read(&self.host, tgids.iter().copied());
        let competition_late_ns = monotonic_ns()? - at_ns;
        let takers = self.read_takers().context("who took CPUs cannot be read")?;
        let of_cgroups = |taker: &&TakerReading| taker.key.kind == intf::taker_kind_TAKER_CGROUP;
        let cgroups = takers.iter().filter(of_cgroups).map(|taker| taker.key.id);
        let longest = vcpus.iter().map(|vcpu| vcpu.longest_off_cpu);
        let longest =
            longest.filter(|off| off.ns > 0 && off.taker.kind == intf::taker_kind_TAKER_CGROUP);
        let cgroups = cgroups.chain(longest.map(|off| off.taker.id));
        let mut cgroup_names = self.cgroup_names.borrow_mut();
        let scheduler = preflight::scheduler_name(&self.host);
        let scheduler = scheduler.unwrap_or_else(|| String::from("stock"));
        Ok(Observation {
            at_ns,
            unix_ms: unix_ms(SystemTime::now()),
            pressure: Pressure::read(&self.host),
            cpus: u32::try_from(online.len()).context("more CPUs than can be counted")?,
            waits: preflight::is_cohort(&scheduler).then(read_waits).flatten(),
            scheduler,
            blind_spots: self.seen.blind_spots.clone(),
            unseen: self.seen.unseen_fields(),
            halts,
            identities: tgids.iter().map(identity).collect(),
            cpus_of: cpus_of(&vcpus, &online),
            competition,
            competition_late_ns,
            cgroup_names: cgroup_names.names(&self.host, &cgroups.collect()),
            takers,
            vcpus,
        })
    }

    /// Has what vCPUs halt on their CPUs counted up to now; `None` if there is no such vCPU.
    fn count_halts(&self, online: &BTreeSet<usize>) -> Result<Option<HaltSight>> {
        let Some(parts) = halt_parts!(self.skel) else {
            return Ok(None);
        };
        let (sight, running) = self.halt_clocks.borrow_mut().keep(&parts, online)?;
        self.look_at(running);
        Ok(Some(sight))
    }

    /// Looks at what runs on `cpus` now.
    fn look_at(&self, cpus: impl IntoIterator<Item = usize>) {
        for cpu in cpus {
            run_on(&self.skel.progs.look_at_running, cpu);
        }
    }

    fn read_vcpus(&self) -> Result<Vec<intf::vcpu_counters>> {
        let link = self.skel.links.read_vcpus.as_ref();
        let link = link.context("the program that reads them is not attached")?;
        let mut bytes = Vec::new();
        Iter::new(link)?.read_to_end(&mut bytes)?;
        bytes
            .chunks_exact(size_of::<intf::vcpu_counters>())
            .map(from_bytes)
            .collect()
    }

    fn read_takers(&self) -> Result<Vec<TakerReading>> {
        let map = &self.skel.maps.takers;
        map.lookup_batch(PER_READ, MapFlags::ANY, MapFlags::ANY)?
            .map(|(key, value)| {
                Ok(TakerReading {
                    key: from_bytes(&key)?,
                    stats: from_bytes(&value)?,
                })
            })
            .collect()
    }
}

/// A time on the wall's clock, ms since 1970 (UTC); 0 before that.
pub fn unix_ms(time: SystemTime) -> u64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| since.as_millis() as u64)
}

/// How long Cohort kept vCPUs from running, by thread; `None` if it has just gone.
fn read_waits() -> Option<HashMap<i32, intf::vcpu_waits>> {
    let map = MapInfoIter::default()
        .filter(|map| map.name == WAITS_MAP)
        .filter(|map| map.value_size as usize == size_of::<intf::vcpu_waits>())
        .last()?;
    let map = MapHandle::from_map_id(map.id).ok()?;
    let mut waits = HashMap::new();
    // What changes meanwhile is read the next time.
    for (tid, of_vcpu) in map
        .lookup_batch(PER_READ, MapFlags::ANY, MapFlags::ANY)
        .ok()?
    {
        waits.insert(from_bytes(&tid).ok()?, from_bytes(&of_vcpu).ok()?);
    }
    Some(waits)
}

/// What happened between each two readings.
pub struct Windows<'object> {
    observer: Observer<'object>,
    before: Observation,
}

impl<'object> Windows<'object> {
    /// The first window begins now.
    pub fn begin(observer: Observer<'object>) -> Result<Self> {
        let before = observer.read()?;
        Ok(Self { observer, before })
    }

    /// The window that ends now; the next one begins.
    pub fn advance(&mut self) -> Result<HostView> {
        let now = self.observer.read()?;
        let view = HostView::between(&self.before, &now);
        self.before = now;
        Ok(view)
    }

    /// Which VMs there were when the window that runs began: a view without numbers.
    pub fn vms(&self) -> HostView {
        HostView::between(&self.before, &self.before)
    }
}

fn load<'object>(
    object: &'object mut MaybeUninit<OpenObject>,
    kvm: &Kvm,
    seen: &Seen,
    domains: &Domains,
) -> Result<ObserveSkel<'object>> {
    let mut open = ObserveSkelBuilder::default().open(object)?;
    if let Some(constants) = open.maps.rodata_data.as_mut() {
        // CPU numbers beyond what this was built for count as one domain.
        for (constant, &domain) in constants.cpu_domain.iter_mut().zip(&domains.of_cpu) {
            *constant = domain;
        }
        constants.ext_sched_class_addr = kvm.ext_sched_class;
    }
    load_hooks!(open, seen);
    // What scx's headers bring for schedulers is not needed, and not there without sched_ext.
    open.progs.scx_lib_init_probe.set_autoload(false);
    open.progs.yield_ends.set_autoload(seen.spins);
    let mut skel = open.load()?;
    let data = skel.maps.bss_data.as_mut();
    let data = data.ok_or_else(|| anyhow!("the BPF object has no variables; build it again"))?;
    // SAFETY: a live, aligned u64 that the BPF programs only read.
    unsafe { ptr::write_volatile(&raw mut data.kvm_preempt_ops_addr, kvm.preempt_ops) };
    skel.attach()?;
    Ok(skel)
}

/// The CPUs of those that are `online` on which a VM's vCPUs may run, by process; of those that may not run on all.
fn cpus_of(
    vcpus: &[intf::vcpu_counters],
    online: &BTreeSet<usize>,
) -> HashMap<u32, BTreeSet<usize>> {
    let mut cpus_of: HashMap<u32, BTreeSet<usize>> = HashMap::new();
    for vcpu in vcpus {
        // One that is gone, or more CPUs than the library knows: as if nothing bound it.
        let Ok(allowed) = sched_getaffinity(Pid::from_raw(vcpu.tid)) else {
            continue;
        };
        let is_allowed = |&cpu: &usize| cpu >= CpuSet::count() || allowed.is_set(cpu) == Ok(true);
        let cpus = online.iter().copied().filter(is_allowed);
        cpus_of.entry(vcpu.tgid).or_default().extend(cpus);
    }
    cpus_of.retain(|_, cpus| cpus.len() < online.len());
    cpus_of
}
