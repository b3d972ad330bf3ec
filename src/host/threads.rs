// SPDX-License-Identifier: GPL-2.0-only
//! The threads of a VM's process, as procfs shows them: where they may run, what CPU time they had and waited for.

use super::affinity::allowed_cpus_of_thread;
use super::cgroups::path_in;
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;

/// What a thread is for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Role {
    /// It runs a vCPU.
    Vcpu,
    /// It moves the packets or blocks of a virtio device inside the kernel.
    Vhost,
    /// All else of the VMM: main loop, consoles, I/O.
    Vmm,
}

/// A thread at one moment.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Thread {
    /// Its number.
    pub tid: u32,
    /// Its name.
    pub name: String,
    /// What it is for.
    pub role: Role,
    /// On which CPUs it may run.
    pub cpus: BTreeSet<usize>,
    /// On which it ran last.
    pub last_cpu: Option<usize>,
    /// Its cgroup, as a path that begins with a slash; `None` without cgroups of version 2.
    pub cgroup: Option<String>,
    /// CPU time that it has had, ns.
    pub ran_ns: u64,
    /// For how long it has waited for a CPU, ns.
    pub waited_ns: u64,
}

/// The numbers in procfs, or in a folder `task` there: of processes, or of threads.
pub fn numbers(folder: &Path) -> io::Result<impl Iterator<Item = u32> + use<>> {
    let entries = fs::read_dir(folder)?.flatten();
    Ok(entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()))
}

/// The threads of process `tgid`, and those of the kernel that serve it.
pub fn of_vm(proc: &Path, tgid: u32) -> Vec<Thread> {
    let own = fs::read_dir(proc.join(format!("{tgid}/task")));
    let own = own.into_iter().flatten().flatten();
    let mut threads: Vec<Thread> = own.filter_map(|entry| thread(&entry.path())).collect();
    // Where vhost's workers are kernel threads, they are processes that are named after the VMM's.
    let worker = format!("vhost-{tgid}");
    let processes = fs::read_dir(proc).into_iter().flatten().flatten();
    let serves = |folder: &Path| name_of(folder).is_some_and(|name| name == worker);
    let workers = processes.map(|entry| entry.path()).filter(|it| serves(it));
    threads.extend(workers.filter_map(|folder| thread(&folder)));
    threads.sort_by_key(|thread| thread.tid);
    threads.dedup_by_key(|thread| thread.tid);
    threads
}

/// Whether a thread with this name runs a vCPU: QEMU calls them "CPU 0/KVM", Cloud Hypervisor "vcpu0", Firecracker
/// "fc_vcpu 0".
pub fn is_vcpu(name: &str) -> bool {
    name.ends_with("/KVM") || name.contains("vcpu")
}

/// The name of the thread with the folder `folder` in procfs.
pub fn name_of(folder: &Path) -> Option<String> {
    let name = fs::read_to_string(folder.join("comm")).ok()?;
    Some(name.trim_end().replace(char::is_control, "?"))
}

fn thread(folder: &Path) -> Option<Thread> {
    let tid = folder.file_name()?.to_str()?.parse().ok()?;
    let name = name_of(folder)?;
    let role = if is_vcpu(&name) {
        Role::Vcpu
    } else if name.starts_with("vhost-") {
        Role::Vhost
    } else {
        Role::Vmm
    };
    let schedstat = fs::read_to_string(folder.join("schedstat")).unwrap_or_default();
    let mut times = schedstat.split_whitespace().map(str::parse);
    let mut time = || times.next().and_then(Result::ok).unwrap_or(0);
    let cgroup = fs::read_to_string(folder.join("cgroup")).unwrap_or_default();
    Some(Thread {
        tid,
        name,
        role,
        cpus: allowed_cpus_of_thread(folder)?.into_iter().collect(),
        last_cpu: last_cpu(&fs::read_to_string(folder.join("stat")).unwrap_or_default()),
        cgroup: path_in(&cgroup),
        ran_ns: time(),
        waited_ns: time(),
    })
}

/// The field `processor` of a stat file: the 39th, of which the second is a name in parentheses that may hold anything.
fn last_cpu(stat: &str) -> Option<usize> {
    let (_, behind_name) = stat.rsplit_once(')')?;
    behind_name.split_whitespace().nth(36)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::paths::fixture::Fixture;

    #[test]
    fn the_vmms_threads_and_the_kernels_for_it_are_read() {
        let stat = format!("8 (CPU 0/KVM) S {}3 0 0\n", "0 ".repeat(35));
        let status = "Cpus_allowed_list:\t2-3\n";
        let fixture = Fixture::new()
            .with("proc/7/comm", "qemu\n")
            .with("proc/7/task/7/comm", "qemu\n")
            .with("proc/7/task/7/status", status)
            .with("proc/7/task/7/schedstat", "5 6 7\n")
            .with("proc/7/task/8/comm", "CPU 0/KVM\n")
            .with("proc/7/task/8/status", status)
            .with("proc/7/task/8/stat", stat)
            .with("proc/7/task/8/cgroup", "0::/vm/vcpu0\n")
            .with("proc/9/comm", "vhost-7\n")
            .with("proc/9/status", status)
            .with("proc/10/comm", "vhost-70\n")
            .with("proc/10/status", status);
        let threads = of_vm(&fixture.host().proc, 7);
        let roles: Vec<_> = threads.iter().map(|it| (it.tid, it.role)).collect();
        assert_eq!(roles, [(7, Role::Vmm), (8, Role::Vcpu), (9, Role::Vhost)]);
        assert_eq!((threads[0].ran_ns, threads[0].waited_ns), (5, 6));
        assert_eq!(threads[1].last_cpu, Some(3));
        assert_eq!(threads[1].cgroup.as_deref(), Some("/vm/vcpu0"));
        assert_eq!(threads[2].cpus, BTreeSet::from([2, 3]));
    }
}
