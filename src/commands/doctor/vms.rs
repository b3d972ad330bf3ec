// SPDX-License-Identifier: GPL-2.0-only
//! How the VMs that run now are set up: found by the files that KVM gives them, without looking into the kernel.

use crate::commands::caps::{STOPS_HOLDERS, lift};
use crate::commands::finding::{Finding, Severity};
use crate::host::affinity::allowed_cpus_of_thread;
use crate::host::cgroups::{self, Level, is_below_vm};
use crate::host::mperf::Mperf;
use crate::host::paths::Host;
use crate::host::threads;
use crate::host::topology::{Nodes, online_cpus};
use crate::host::vm_identity::VmIdentity;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// A VM that runs.
struct Vm {
    tgid: u32,
    name: String,
    /// Its number or UUID for its manager.
    id: String,
    vcpus: usize,
    /// The VMM's command line.
    arguments: Vec<String>,
    /// On which CPUs each vCPU may run, where the VMM names their threads.
    affinities: Vec<BTreeSet<usize>>,
}

impl Vm {
    /// What its command line gives for `option`, each time.
    fn values<'a>(&'a self, option: &'a str) -> impl Iterator<Item = &'a str> {
        self.arguments
            .windows(2)
            .filter(move |pair| pair[0] == option)
            .map(|pair| pair[1].as_str())
    }
}

/// Something that is so of a VM, and may be of others: it is told once of all of them.
struct Trait {
    check: &'static str,
    severity: Severity,
    /// What is so.
    what: String,
    /// What of that is this VM's own; empty if nothing.
    detail: String,
    why: String,
    /// As of a finding; VMs are called VM.
    mend: String,
}

/// So many VMs are named of a kind,
const NAMED: usize = 10;
/// and so many ways to mend it.
const MENDS: usize = 3;

/// VMs of which the same is so.
struct Kind {
    finding: Finding,
    who: Vec<String>,
    mends: Vec<String>,
}

/// A finding for each kind of trait, with the VMs that have it.
fn told_once<'a>(traits: impl IntoIterator<Item = (&'a Vm, Trait)>) -> Vec<Finding> {
    let mut kinds: Vec<Kind> = Vec::new();
    for (vm, it) in traits {
        let who = match it.detail.as_str() {
            "" => vm.name.clone(),
            detail => format!("{} ({detail})", vm.name),
        };
        let finding = Finding::new(it.check, it.severity, it.what, it.why, "");
        let place = kinds.iter().position(|kind| kind.finding == finding);
        let place = place.unwrap_or_else(|| {
            kinds.push(Kind {
                finding,
                who: Vec::new(),
                mends: Vec::new(),
            });
            kinds.len() - 1
        });
        kinds[place].who.push(who);
        if !kinds[place].mends.contains(&it.mend) {
            kinds[place].mends.push(it.mend);
        }
    }
    let told = |kind: Kind| Finding {
        seen: format!("{}: {}", kind.finding.seen, some(&kind.who, NAMED, ", ")),
        mend: some(&kind.mends, MENDS, "; "),
        ..kind.finding
    };
    kinds.into_iter().map(told).collect()
}

/// The first `most` of `texts`, and how many more there are.
fn some(texts: &[String], most: usize, between: &str) -> String {
    let shown = texts[..texts.len().min(most)].join(between);
    match texts.len().saturating_sub(most) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

pub fn findings(host: &Host) -> Vec<Finding> {
    let vms = vms(&host.proc);
    let cpus = online_cpus(&host.sys).map_or(0, |cpus| cpus.len());
    if vms.is_empty() {
        return vec![Finding::new(
            "vms",
            Severity::Note,
            "no VM runs",
            "how VMs are set up cannot be looked at",
            "start VMs, and ask again",
        )];
    }
    let nodes = Nodes::read(&host.sys);
    let traits = vms.iter().flat_map(|vm| {
        let of_vm = [
            exitless(vm, &vms, host),
            stacked_pins(vm),
            windows(vm),
            hpet(vm),
            wide(vm, cpus),
            far(vm, &nodes),
        ];
        let of_vm = of_vm.into_iter().flatten().chain(caps(vm, host));
        of_vm.map(move |it| (vm, it))
    });
    let mut findings = vec![overcommitment(&vms, cpus)];
    findings.extend(told_once(traits));
    let is_capped = findings.iter().any(|finding| finding.check == "caps");
    if !is_capped && cgroups::mount(host).is_some() {
        findings.push(Finding::fine("caps", "no VM is capped"));
    }
    findings
}

fn vms(proc: &Path) -> Vec<Vm> {
    let tgids = threads::numbers(proc).into_iter().flatten();
    let mut vms: Vec<Vm> = tgids.filter_map(|tgid| vm(proc, tgid)).collect();
    vms.sort_by(|a, b| a.name.cmp(&b.name));
    vms
}

/// The VM of process `tgid`, which holds a file per vCPU.
fn vm(proc: &Path, tgid: u32) -> Option<Vm> {
    let folder = proc.join(tgid.to_string());
    let files = fs::read_dir(folder.join("fd")).ok()?.flatten();
    let vcpus: BTreeSet<String> = files
        .filter_map(|file| fs::read_link(file.path()).ok())
        .map(|target| target.to_string_lossy().into_owned())
        .filter(|target| target.starts_with("anon_inode:kvm-vcpu:"))
        .collect();
    if vcpus.is_empty() {
        return None;
    }
    let command_line = fs::read(folder.join("cmdline")).unwrap_or_default();
    let command_line = String::from_utf8_lossy(&command_line);
    let threads = fs::read_dir(folder.join("task")).ok()?.flatten();
    let identity = VmIdentity::of(proc, tgid);
    Some(Vm {
        tgid,
        name: identity.shown(),
        id: identity.id,
        vcpus: vcpus.len(),
        arguments: command_line.split('\0').map(str::to_owned).collect(),
        affinities: threads
            .filter_map(|thread| affinity_of_vcpu(&thread.path()))
            .collect(),
    })
}

fn affinity_of_vcpu(thread: &Path) -> Option<BTreeSet<usize>> {
    let name = threads::name_of(thread)?;
    let cpus = allowed_cpus_of_thread(thread)?;
    threads::is_vcpu(&name).then(|| cpus.into_iter().collect())
}

fn overcommitment(vms: &[Vm], cpus: usize) -> Finding {
    let vcpus: usize = vms.iter().map(|vm| vm.vcpus).sum();
    let seen = format!("{} VMs with {vcpus} vCPUs on {cpus} CPUs", vms.len());
    match vcpus > cpus {
        true => Finding::fine("overcommitment", seen),
        false => Finding::new(
            "overcommitment",
            Severity::Note,
            seen,
            "every vCPU can have a CPU: there is little that a scheduler can gain",
            "",
        ),
    }
}

/// Guests whose HLT, MWAIT and PAUSE do not exit: what they halt they halt on their CPUs, which nobody else can use
/// meanwhile.
fn exitless(vm: &Vm, vms: &[Vm], host: &Host) -> Option<Trait> {
    let mut arguments = vm.arguments.iter();
    if !arguments.any(|argument| argument.contains("cpu-pm=on")) {
        return None;
    }
    let it = |severity, what: &str, why: String, mend: &str| Trait {
        check: "cpu-pm",
        severity,
        what: format!("-overcommit cpu-pm=on, and {what}"),
        detail: String::new(),
        why,
        mend: mend.to_owned(),
    };
    let online: BTreeSet<usize> = online_cpus(&host.sys).unwrap_or_default();
    if shares_cpus(vm, vms, &online) {
        return Some(it(
            Severity::Warning,
            "vCPUs share CPUs with others",
            String::from(
                "a vCPU holds its CPU while it is halted, and does not say when it spins: it takes CPU time that others want",
            ),
            "leave out -overcommit cpu-pm=on, or give each of its vCPUs a CPU of its own (virsh vcpupin), where no other vCPU \
             may run",
        ));
    }
    Some(match Mperf::find(&host.sys) {
        Ok(_) => it(
            Severity::Fine,
            "a CPU of its own for each vCPU; MPERF tells how long they are halted",
            String::new(),
            "",
        ),
        Err(missing) => it(
            Severity::Note,
            "a CPU of its own for each vCPU",
            format!("nobody can tell how long they are halted: {missing}"),
            missing.mend(),
        ),
    })
}

/// Whether more vCPUs, of any VM, may want the CPUs of `vm` than those are.
fn shares_cpus(vm: &Vm, vms: &[Vm], online: &BTreeSet<usize>) -> bool {
    // Where the VMM does not name the threads, they may run anywhere.
    let of_vcpus = |vm: &Vm| match vm.affinities.is_empty() {
        true => vec![online.clone(); vm.vcpus],
        false => vm.affinities.clone(),
    };
    let own: BTreeSet<usize> = of_vcpus(vm).into_iter().flatten().collect();
    let mut pinned = BTreeSet::new();
    let mut rivals = 0;
    let mut cpus = own.clone();
    for affinity in vms.iter().flat_map(of_vcpus) {
        if affinity.is_disjoint(&own) {
            continue;
        }
        if affinity.len() == 1 && !affinity.iter().all(|&cpu| pinned.insert(cpu)) {
            return true;
        }
        rivals += 1;
        cpus.extend(affinity);
    }
    rivals > cpus.intersection(online).count()
}

fn stacked_pins(vm: &Vm) -> Option<Trait> {
    let mut pinned: BTreeMap<usize, usize> = BTreeMap::new();
    for cpus in vm.affinities.iter().filter(|cpus| cpus.len() == 1) {
        *pinned.entry(*cpus.first()?).or_default() += 1;
    }
    let (&cpu, &count) = pinned.iter().max_by_key(|(_, count)| **count)?;
    let it = |severity, what: &str, detail, why: &str, mend: &str| {
        Some(Trait {
            check: "pinned-vcpus",
            severity,
            what: what.to_owned(),
            detail,
            why: why.to_owned(),
            mend: mend.to_owned(),
        })
    };
    if count > 1 {
        return it(
            Severity::Warning,
            "several vCPUs of a VM are pinned to one CPU",
            format!("{count} to CPU {cpu}"),
            "they can never run at the same time, so one spins for the other",
            "virsh vcpupin VM VCPU CPUS, one CPU or many for each",
        );
    }
    it(
        Severity::Note,
        "vCPUs are pinned to a CPU each",
        format!("{} vCPUs", pinned.len()),
        "they wait for that CPU even if others idle",
        "virsh vcpupin VM VCPU 0-N, unless it is meant",
    )
}

/// A guest that runs Windows, told by its clock: without Hyper-V's interfaces it wakes up to a thousand times a second and
/// spins on locks.
fn windows(vm: &Vm) -> Option<Trait> {
    let local_time = vm.values("-rtc").any(|rtc| rtc.contains("base=localtime"));
    let enlightened = vm
        .values("-cpu")
        .any(|cpu| cpu.contains("hv-") || cpu.contains("hv_"));
    (local_time && !enlightened).then(|| Trait {
        check: "windows",
        severity: Severity::Warning,
        what: String::from("a clock in local time, as Windows wants it, but no Hyper-V enlightenments"),
        detail: String::new(),
        why: String::from(
            "an idle Windows then wakes up for its timer all the time, and its locks spin instead of yielding",
        ),
        mend: String::from(
            "add <hyperv mode='passthrough'/> to the domain, or hv_stimer,hv_synic,hv_vpindex,hv_time,hv_spinlocks to -cpu",
        ),
    })
}

/// A guest to which QEMU gives an HPET, as it does to PCs unless told otherwise. Linux leaves that for better timers while
/// it boots, but QEMU 10.0 goes on to wake at each of its ticks.
fn hpet(vm: &Vm) -> Option<Trait> {
    let program = Path::new(vm.arguments.first()?).file_name()?;
    let is_qemu = program.to_string_lossy().starts_with("qemu") || program == "kvm";
    let mut machines = vm.values("-machine").chain(vm.values("-M"));
    let none = machines.any(|machine| machine.contains("hpet=off") || machine.contains("microvm"))
        || vm.arguments.iter().any(|word| word == "-no-hpet");
    (is_qemu && !none).then(|| Trait {
        check: "hpet",
        severity: Severity::Note,
        what: String::from("QEMU emulates an HPET"),
        detail: String::new(),
        why: String::from(
            "QEMU may wake at each of its ticks, hundreds of times a second, though the guest has better timers: each time a vCPU loses its CPU",
        ),
        mend: String::from(
            "add <timer name='hpet' present='no'/> to the domain's <clock>, or hpet=off to -machine",
        ),
    })
}

fn wide(vm: &Vm, cpus: usize) -> Option<Trait> {
    (cpus > 0 && vm.vcpus > cpus).then(|| Trait {
        check: "wide-vm",
        severity: Severity::Warning,
        what: format!("more vCPUs than the {cpus} CPUs of this host"),
        detail: format!("{} vCPUs", vm.vcpus),
        why: String::from(
            "they can never all run at the same time: its locks and IPIs wait even if the VM is alone",
        ),
        mend: String::from("give it no more vCPUs than the host has CPUs"),
    })
}

/// One whose vCPUs may run on several NUMA nodes though they fit on one.
fn far(vm: &Vm, nodes: &Nodes) -> Option<Trait> {
    let node_of = |cpu: &usize| nodes.of_cpu.get(cpu).copied().unwrap_or(0);
    let allowed: BTreeSet<usize> = vm.affinities.iter().flatten().map(node_of).collect();
    if allowed.len() < 2 {
        return None;
    }
    let smallest = allowed
        .iter()
        .map(|node| nodes.of_cpu.values().filter(|of| *of == node).count())
        .min()?;
    let (why, mend) = match vm.vcpus > smallest {
        true => (
            "it is wider than a node, and the guest does not know which of its vCPUs are near each other",
            "give it a virtual NUMA topology, and bind each part to a node (<numatune>, <vcpupin>)",
        ),
        false => (
            "it would fit on one node, where memory and siblings are near",
            "bind it to a node (<numatune>, <vcpu cpuset=…>)",
        ),
    };
    Some(Trait {
        check: "numa",
        severity: Severity::Note,
        what: String::from("vCPUs may run on several NUMA nodes"),
        detail: format!("{} vCPUs on {} nodes", vm.vcpus, allowed.len()),
        why: why.to_owned(),
        mend: mend.to_owned(),
    })
}

/// The caps of the cgroups of its threads and of all above them, a trait for each way to lift them.
fn caps(vm: &Vm, host: &Host) -> Vec<Trait> {
    let paths = cgroups::paths_of_threads(&host.proc, vm.tgid);
    let mut by_mend: BTreeMap<String, Vec<Level>> = BTreeMap::new();
    for level in cgroups::levels(host, paths.iter().map(String::as_str)) {
        if level.cap_us.is_some() {
            let id = if vm.id.is_empty() { "" } else { "VMID" };
            let mend = lift(&level.path, "VM", id);
            by_mend.entry(mend).or_default().push(level);
        }
    }
    let it = |(mend, levels): (String, Vec<Level>)| {
        let first = &levels[0];
        let last = first.path.rsplit('/').next().unwrap_or_default();
        let mut detail = format!("{last}: {:.2} CPUs", first.cap_cpus().unwrap_or_default());
        if levels.len() > 1 {
            detail += &format!(", and {} cgroups like it", levels.len() - 1);
        }
        let what = match is_below_vm(&first.path) {
            true => "cpu.max limits cgroups of libvirt below a VM's own",
            false => "cpu.max limits VMs",
        };
        Trait {
            check: "caps",
            severity: Severity::Note,
            what: what.to_owned(),
            detail,
            why: format!("{STOPS_HOLDERS}. Weights do not have this fault"),
            mend,
        }
    };
    by_mend.into_iter().map(it).collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests::{found, severity};
    use super::*;
    use crate::host::mperf::tests::with_mperf;
    use crate::host::paths::fixture::Fixture;

    const CPUS: &str = "sys/devices/system/cpu/online";

    /// A VM of two vCPUs, with these arguments, whose vCPUs may run on these CPUs.
    fn vm_on(fixture: Fixture, arguments: &[&str], cpus: [&str; 2]) -> Fixture {
        let mut fixture = fixture
            .with("proc/7/cmdline", arguments.join("\0"))
            .with("proc/7/comm", "qemu\n")
            .with("proc/7/task/7/comm", "qemu\n")
            .with("proc/7/task/7/status", "Cpus_allowed_list:\t0-3\n");
        for (vcpu, cpus) in cpus.into_iter().enumerate() {
            let thread = format!("proc/7/task/{}", 8 + vcpu);
            fixture = fixture
                .with(&format!("{thread}/comm"), format!("CPU {vcpu}/KVM\n"))
                .with(
                    &format!("{thread}/status"),
                    format!("Cpus_allowed_list:\t{cpus}\n"),
                )
                .with_link(
                    &format!("proc/7/fd/{}", 20 + vcpu),
                    &format!("anon_inode:kvm-vcpu:{vcpu}"),
                );
        }
        fixture
    }

    const QEMU: [&str; 5] = ["qemu", "-name", "web", "-machine", "q35,hpet=off"];

    fn host(cpus: &str) -> Fixture {
        Fixture::new().with(CPUS, cpus)
    }

    #[test]
    fn a_process_without_vcpus_is_no_vm() {
        let fixture = host("0-3\n")
            .with("proc/7/cmdline", "bash")
            .with("proc/7/fd/1", "");
        assert_eq!(severity(&findings(&fixture.host()), "vms"), Severity::Note);
    }

    #[test]
    fn a_plain_vm_is_counted_and_nothing_is_wrong_with_it() {
        let fixture = vm_on(host("0\n"), &QEMU, ["0-3", "0-3"]);
        let findings = findings(&fixture.host());
        let counted = found(&findings, "overcommitment");
        assert_eq!(counted.severity, Severity::Fine);
        assert_eq!(counted.seen, "1 VMs with 2 vCPUs on 1 CPUs");
        // It is wider than the one CPU.
        assert_eq!(severity(&findings, "wide-vm"), Severity::Warning);
        assert_eq!(findings.len(), 2);

        let fixture = vm_on(host("0-3\n"), &QEMU, ["0-3", "0-3"]);
        let findings = super::findings(&fixture.host());
        assert_eq!(severity(&findings, "overcommitment"), Severity::Note);
        assert_eq!(findings.len(), 1);
    }

    #[test]
    fn each_fault_is_found() {
        let with = |more: &[&str], cpus| {
            let arguments = [QEMU.as_slice(), more].concat();
            findings(&vm_on(host("0-3\n"), &arguments, cpus).host())
        };
        let anywhere = ["0-3", "0-3"];
        let found_in = with(&["-rtc", "base=localtime", "-cpu", "host"], anywhere);
        assert_eq!(severity(&found_in, "windows"), Severity::Warning);
        let found_in = with(
            &["-rtc", "base=localtime", "-cpu", "host,hv-time=on"],
            anywhere,
        );
        assert_eq!(found_in.len(), 1);
        assert_eq!(
            severity(&with(&[], ["1", "1"]), "pinned-vcpus"),
            Severity::Warning
        );
        assert_eq!(
            severity(&with(&[], ["1", "2"]), "pinned-vcpus"),
            Severity::Note
        );
    }

    /// What is found of a VM whose HLT does not exit, on these CPUs, beside one of two vCPUs that may run on `others`.
    fn exitless_beside(fixture: Fixture, cpus: [&str; 2], others: &str) -> Finding {
        let arguments = [QEMU.as_slice(), &["-overcommit", "cpu-pm=on"]].concat();
        let fixture = vm_on(fixture, &arguments, cpus)
            .with("proc/50/cmdline", "qemu\0-name\0beside")
            .with("proc/50/comm", "qemu\n");
        let fixture = (0..2).fold(fixture, |fixture, vcpu| {
            let thread = format!("proc/50/task/{}", 51 + vcpu);
            let allowed = format!("Cpus_allowed_list:\t{others}\n");
            fixture
                .with(&format!("{thread}/comm"), format!("CPU {vcpu}/KVM\n"))
                .with(&format!("{thread}/status"), allowed)
                .with_link(
                    &format!("proc/50/fd/{}", 20 + vcpu),
                    &format!("anon_inode:kvm-vcpu:{vcpu}"),
                )
        });
        found(&findings(&fixture.host()), "cpu-pm")
    }

    #[test]
    fn vcpus_that_halt_on_a_cpu_of_their_own_are_no_fault() {
        let finding = exitless_beside(with_mperf(host("0-3\n")), ["0", "1"], "2-3");
        assert_eq!(finding.severity, Severity::Fine, "{finding:?}");
        assert!(finding.seen.contains("MPERF"));
        // Four vCPUs for four CPUs.
        let finding = exitless_beside(with_mperf(host("0-3\n")), ["0", "1"], "0-3");
        assert_eq!(finding.severity, Severity::Fine, "{finding:?}");
    }

    #[test]
    fn where_their_halted_time_cannot_be_had_the_missing_setting_is_named() {
        let finding = exitless_beside(host("0-3\n"), ["0", "1"], "2-3");
        assert_eq!(finding.severity, Severity::Note, "{finding:?}");
        assert!(finding.why.contains("msr") && finding.mend.contains("CONFIG_PERF_EVENTS"));
    }

    #[test]
    fn vcpus_that_halt_on_cpus_that_others_want_are_a_fault() {
        let fault = |cpus, own, others| {
            let finding = exitless_beside(with_mperf(host(cpus)), own, others);
            assert_eq!(finding.severity, Severity::Warning, "{finding:?}");
        };
        fault("0-2\n", ["0-2", "0-2"], "0-2");
        fault("0-3\n", ["0", "1"], "0-1");
        fault("0-3\n", ["1", "1"], "2-3");
        fault("0-3\n", ["0", "1"], "0");
    }

    #[test]
    fn an_hpet_is_found_where_qemu_emulates_one() {
        let has_hpet = |arguments: &[&str]| {
            let vm = vm_on(host("0-3\n"), arguments, ["0-3", "0-3"]);
            findings(&vm.host())
                .iter()
                .any(|finding| finding.check == "hpet" && finding.severity == Severity::Note)
        };
        assert!(has_hpet(&["/usr/bin/qemu-system-x86_64", "-name", "web"]));
        assert!(has_hpet(&["/usr/bin/kvm", "-machine", "type=q35"]));
        assert!(!has_hpet(&[
            "qemu", "-machine", "q35", "-machine", "hpet=off"
        ]));
        assert!(!has_hpet(&["qemu", "-M", "microvm"]));
        assert!(!has_hpet(&["qemu", "-no-hpet"]));
        assert!(!has_hpet(&["cloud-hypervisor"]));
    }

    #[test]
    fn a_vm_on_two_nodes_that_fits_on_one_is_found() {
        let node = |fixture: Fixture, node: usize, cpus: &str| {
            let folder = format!("sys/devices/system/node/node{node}");
            fixture
                .with(&format!("{folder}/cpulist"), cpus)
                .with(&format!("{folder}/distance"), "10 20\n")
        };
        let fixture = host("0-3\n").with("sys/devices/system/node/online", "0-1\n");
        let fixture = node(node(fixture, 0, "0-1\n"), 1, "2-3\n");
        let fixture = vm_on(fixture, &QEMU, ["0-3", "0-3"]);
        let finding = found(&findings(&fixture.host()), "numa");
        assert!(finding.why.contains("fit on one node"), "{finding:?}");
    }

    /// A VM in this cgroup, whose vCPUs' threads libvirt has put below it, with these caps.
    fn capped(place: &str, caps: &[(&str, &str)]) -> Vec<Finding> {
        let root = "sys/fs/cgroup";
        let mut fixture = vm_on(host("0-3\n"), &QEMU, ["0-3", "0-3"])
            .with(&format!("{root}/cgroup.controllers"), "cpu\n")
            .with(
                "proc/7/task/7/cgroup",
                format!("0::{place}/libvirt/emulator\n"),
            );
        for vcpu in 0..2 {
            fixture = fixture.with(
                &format!("proc/7/task/{}/cgroup", 8 + vcpu),
                format!("0::{place}/libvirt/vcpu{vcpu}\n"),
            );
        }
        for (path, max) in caps {
            fixture = fixture
                .with(&format!("{root}{path}/cpu.stat"), "usage_usec 1\n")
                .with(&format!("{root}{path}/cpu.max"), *max);
        }
        findings(&fixture.host())
    }

    #[test]
    fn a_cap_above_a_vm_is_found_with_its_managers_remedy() {
        let scope = "/machine.slice/machine-qemu\\x2d1\\x2dweb.scope";
        let half = "50000 100000\n";
        let finding = found(&capped(scope, &[(scope, half)]), "caps");
        assert_eq!(finding.severity, Severity::Note);
        assert!(
            finding.seen.starts_with("cpu.max limits VMs: web ("),
            "{finding:?}"
        );
        assert!(finding.seen.ends_with("0.50 CPUs)"), "{finding:?}");
        assert!(finding.mend.contains("global_quota=-1"), "{finding:?}");
        let finding = found(&capped("/qemu.slice/a", &[("/qemu.slice", half)]), "caps");
        assert!(
            finding.mend.contains("set-property qemu.slice"),
            "{finding:?}"
        );
        let none = found(&capped(scope, &[(scope, "max 100000\n")]), "caps");
        assert_eq!(none.severity, Severity::Fine);
    }

    #[test]
    fn caps_below_libvirts_cgroup_are_found_and_told_apart() {
        let scope = "/machine.slice/machine-qemu\\x2d1\\x2dweb.scope";
        let vcpus = [0, 1].map(|vcpu| format!("{scope}/libvirt/vcpu{vcpu}"));
        let caps = vcpus
            .each_ref()
            .map(|path| (path.as_str(), "20000 100000\n"));
        let finding = found(&capped(scope, &caps), "caps");
        assert!(
            finding
                .seen
                .contains("vcpu0: 0.20 CPUs, and 1 cgroups like it"),
            "{finding:?}"
        );
        assert!(finding.mend.contains("vcpu_quota=-1"), "{finding:?}");
    }

    #[test]
    fn what_is_so_of_many_vms_is_told_once() {
        let mut fixture = host("0-3\n");
        for tgid in 100..112 {
            fixture = fixture
                .with(
                    &format!("proc/{tgid}/cmdline"),
                    format!("qemu\0-name\0vm{tgid}"),
                )
                .with(&format!("proc/{tgid}/task/{tgid}/comm"), "qemu\n")
                .with_link(&format!("proc/{tgid}/fd/20"), "anon_inode:kvm-vcpu:0");
        }
        let finding = found(&findings(&fixture.host()), "hpet");
        assert!(
            finding
                .seen
                .starts_with("QEMU emulates an HPET: vm100, vm101, "),
            "{finding:?}"
        );
        assert!(finding.seen.ends_with(" vm109 and 2 more"), "{finding:?}");
    }
}
