// SPDX-License-Identifier: GPL-2.0-only
//! How the VMs that run now are set up: found by the files that KVM gives them, without looking into the kernel.

use crate::commands::finding::{Finding, Severity};
use crate::host::affinity::allowed_cpus_of_thread;
use crate::host::cgroups::Competition;
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
    let mut findings = vec![overcommitment(&vms, cpus)];
    let nodes = Nodes::read(&host.sys);
    for vm in &vms {
        let of_vm = [
            exitless(vm, &vms, host),
            stacked_pins(vm),
            windows(vm),
            hpet(vm),
            wide(vm, cpus),
            far(vm, &nodes),
        ];
        findings.extend(of_vm.into_iter().flatten());
    }
    findings.extend(caps(&vms, host));
    findings
}

fn vms(proc: &Path) -> Vec<Vm> {
    let entries = fs::read_dir(proc).into_iter().flatten().flatten();
    let tgids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
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
    Some(Vm {
        tgid,
        name: VmIdentity::of(proc, tgid).name,
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
fn exitless(vm: &Vm, vms: &[Vm], host: &Host) -> Option<Finding> {
    let mut arguments = vm.arguments.iter();
    if !arguments.any(|argument| argument.contains("cpu-pm=on")) {
        return None;
    }
    let seen = format!("{}: runs with -overcommit cpu-pm=on", vm.name);
    let online: BTreeSet<usize> = online_cpus(&host.sys).unwrap_or_default();
    if shares_cpus(vm, vms, &online) {
        return Some(Finding::new(
            "cpu-pm",
            Severity::Warning,
            seen + ", and its vCPUs share CPUs with others",
            "a vCPU holds its CPU while it is halted, and does not say when it spins: it takes CPU time that others want",
            "leave out -overcommit cpu-pm=on, or give each of its vCPUs a CPU of its own (virsh vcpupin), where no other vCPU \
             may run",
        ));
    }
    let seen = seen + ", and each of its vCPUs has a CPU of its own";
    Some(match Mperf::find(&host.sys) {
        Ok(_) => Finding::fine("cpu-pm", seen + "; MPERF tells how long they are halted"),
        Err(missing) => Finding::new(
            "cpu-pm",
            Severity::Note,
            seen,
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

fn stacked_pins(vm: &Vm) -> Option<Finding> {
    let mut pinned: BTreeMap<usize, usize> = BTreeMap::new();
    for cpus in vm.affinities.iter().filter(|cpus| cpus.len() == 1) {
        *pinned.entry(*cpus.first()?).or_default() += 1;
    }
    let (&cpu, &count) = pinned.iter().max_by_key(|(_, count)| **count)?;
    if count > 1 {
        return Some(Finding::new(
            "pinned-vcpus",
            Severity::Warning,
            format!("{}: {count} vCPUs are pinned to CPU {cpu}", vm.name),
            "they can never run at the same time, so one spins for the other",
            format!(
                "virsh vcpupin {} VCPU CPUS, one CPU or many for each",
                vm.name
            ),
        ));
    }
    Some(Finding::new(
        "pinned-vcpus",
        Severity::Note,
        format!(
            "{}: {} vCPUs are pinned to a CPU each",
            vm.name,
            pinned.len()
        ),
        "they wait for that CPU even if others idle",
        format!("virsh vcpupin {} VCPU 0-N, unless it is meant", vm.name),
    ))
}

/// A guest that runs Windows, told by its clock: without Hyper-V's interfaces it wakes up to a thousand times a second and
/// spins on locks.
fn windows(vm: &Vm) -> Option<Finding> {
    let local_time = vm.values("-rtc").any(|rtc| rtc.contains("base=localtime"));
    let enlightened = vm
        .values("-cpu")
        .any(|cpu| cpu.contains("hv-") || cpu.contains("hv_"));
    (local_time && !enlightened).then(|| {
        Finding::new(
            "windows",
            Severity::Warning,
            format!("{}: its clock is local time, as Windows wants it, but it has no Hyper-V enlightenments", vm.name),
            "an idle Windows then wakes up for its timer all the time, and its locks spin instead of yielding",
            "add <hyperv mode='passthrough'/> to the domain, or hv_stimer,hv_synic,hv_vpindex,hv_time,hv_spinlocks to -cpu",
        )
    })
}

/// A guest to which QEMU gives an HPET, as it does to PCs unless told otherwise. Linux leaves that for better timers while
/// it boots, but QEMU 10.0 goes on to wake at each of its ticks.
fn hpet(vm: &Vm) -> Option<Finding> {
    let program = Path::new(vm.arguments.first()?).file_name()?;
    let is_qemu = program.to_string_lossy().starts_with("qemu") || program == "kvm";
    let mut machines = vm.values("-machine").chain(vm.values("-M"));
    let none = machines.any(|machine| machine.contains("hpet=off") || machine.contains("microvm"))
        || vm.arguments.iter().any(|word| word == "-no-hpet");
    (is_qemu && !none).then(|| {
        Finding::new(
            "hpet",
            Severity::Note,
            format!("{}: QEMU emulates an HPET for it", vm.name),
            "QEMU may wake at each of its ticks, hundreds of times a second, though the guest has better timers: each time a vCPU loses its CPU",
            "add <timer name='hpet' present='no'/> to the domain's <clock>, or hpet=off to -machine",
        )
    })
}

fn wide(vm: &Vm, cpus: usize) -> Option<Finding> {
    (cpus > 0 && vm.vcpus > cpus).then(|| {
        Finding::new(
            "wide-vm",
            Severity::Warning,
            format!("{}: {} vCPUs, on a host of {cpus} CPUs", vm.name, vm.vcpus),
            "they can never all run at the same time: its locks and IPIs wait even if the VM is alone",
            "give it no more vCPUs than the host has CPUs",
        )
    })
}

/// One whose vCPUs may run on several NUMA nodes though they fit on one.
fn far(vm: &Vm, nodes: &Nodes) -> Option<Finding> {
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
    Some(Finding::new(
        "numa",
        Severity::Note,
        format!(
            "{}: its {} vCPUs may run on {} NUMA nodes",
            vm.name,
            vm.vcpus,
            allowed.len()
        ),
        why,
        mend,
    ))
}

fn caps(vms: &[Vm], host: &Host) -> Option<Finding> {
    let competition = Competition::read(host, vms.iter().map(|vm| vm.tgid))?;
    let capped: Vec<&str> = vms
        .iter()
        .filter(|vm| {
            let mut place = competition.place_of.get(&vm.tgid).copied();
            while let Some(index) = place {
                let cgroup = competition.cgroups[index];
                if cgroup.cap_cpus.is_some() {
                    return true;
                }
                place = cgroup.parent;
            }
            false
        })
        .map(|vm| vm.name.as_str())
        .collect();
    match capped.as_slice() {
        [] => Some(Finding::fine("caps", "no VM is capped")),
        capped => Some(Finding::new(
            "caps",
            Severity::Note,
            format!("cpu.max limits {}", capped.join(", ")),
            "a vCPU that a cap stops may hold a lock: its siblings spin until the next period. Weights do not have this fault",
            "virsh schedinfo VM --set vcpu_quota=-1, if weights will do",
        )),
    }
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

    #[test]
    fn a_cap_above_a_vm_is_found() {
        let stat = "usage_usec 1\n";
        let fixture = vm_on(host("0-3\n"), &QEMU, ["0-3", "0-3"])
            .with("proc/7/cgroup", "0::/machine/web\n")
            .with("sys/fs/cgroup/cgroup.controllers", "cpu\n")
            .with("sys/fs/cgroup/cpu.stat", stat)
            .with("sys/fs/cgroup/machine/cpu.stat", stat)
            .with("sys/fs/cgroup/machine/cpu.weight", "100\n")
            .with("sys/fs/cgroup/machine/cpu.max", "50000 100000\n")
            .with("sys/fs/cgroup/machine/web/cpu.stat", stat)
            .with("sys/fs/cgroup/machine/web/cpu.weight", "100\n");
        let finding = found(&findings(&fixture.host()), "caps");
        assert_eq!(finding.severity, Severity::Note);
        assert!(finding.seen.contains("web"));
    }
}
