// SPDX-License-Identifier: GPL-2.0-only
//! The cgroups (version 2) among which a host's CPU time is divided: weight, cap and CPU time of each that competes with
//! VMs; and what a cgroup is called.

use crate::host::paths::Host;
use crate::observer::entitlement::WEIGHT_DEFAULT;
use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::iter;
use std::os::unix::fs::DirEntryExt;
use std::path::{Path, PathBuf};

/// libvirt puts a VM's threads into cgroups below this one; on hosts without systemd below the VM's, whose name ends so.
const LIBVIRT: &str = "libvirt";
const LIBVIRT_ALONE: &str = ".libvirt-qemu";

/// One cgroup at one moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CgroupReading {
    /// The kernel's number for it: the inode number of its folder.
    pub id: u64,
    /// The one above it, as an index.
    pub parent: Option<usize>,
    /// cpu.weight.
    pub weight: u32,
    /// cpu.max, in CPUs.
    pub cap_cpus: Option<f64>,
    /// CPU time used in it and below it, microseconds.
    pub used_us: u64,
}

/// Who competes with some processes for CPU time, at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Competition {
    /// Each comes after the one above it. Cgroups below those that stand beside a process are not taken apart.
    pub cgroups: Vec<CgroupReading>,
    /// Where each process stands, as an index.
    pub place_of: HashMap<u32, usize>,
}

impl Competition {
    /// Reads the cgroups above and beside the processes `tgids`; `None` on a host without cgroups of version 2.
    pub fn read(host: &Host, tgids: impl IntoIterator<Item = u32>) -> Option<Self> {
        let root = mount(host)?;
        let places: Vec<(u32, PathBuf)> = tgids
            .into_iter()
            .filter_map(|tgid| Some((tgid, place(&host.proc, &root, tgid)?)))
            .collect();
        let above: BTreeSet<&Path> = places
            .iter()
            .flat_map(|(_, place)| place.ancestors().skip(1))
            .collect();
        let mut competition = Self::default();
        let mut index_of = HashMap::new();
        let mut to_read = vec![(PathBuf::new(), 1, None)];
        while let Some((path, id, parent)) = to_read.pop() {
            let folder = root.join(&path);
            // It may have gone meanwhile.
            let Some(reading) = read(&folder, id, parent) else {
                continue;
            };
            let index = competition.cgroups.len();
            competition.cgroups.push(reading);
            if above.contains(path.as_path()) {
                let competes = |path: &PathBuf| root.join(path).join("cpu.weight").exists();
                let below = children(&folder).map(|(name, id)| (path.join(name), id));
                let below = below.filter(|(path, _)| competes(path));
                to_read.extend(below.map(|(path, id)| (path, id, Some(index))));
            }
            index_of.insert(path, index);
        }
        for (tgid, place) in &places {
            if let Some(&index) = index_of.get(place) {
                competition.place_of.insert(*tgid, index);
            }
        }
        Some(competition)
    }
}

/// Where cgroups of version 2 are.
pub fn mount(host: &Host) -> Option<PathBuf> {
    let root = host.sys.join("fs/cgroup");
    root.join("cgroup.controllers").exists().then_some(root)
}

/// The cgroup of process `tgid`, as a path that begins with a slash; `None` if it is gone, or without cgroups of version 2.
pub fn path_of(proc: &Path, tgid: u32) -> Option<String> {
    path_in(&fs::read_to_string(proc.join(format!("{tgid}/cgroup"))).ok()?)
}

/// The path in a file `cgroup` of procfs; `None` without cgroups of version 2.
pub fn path_in(text: &str) -> Option<String> {
    let path = text.lines().find_map(|line| line.strip_prefix("0::"));
    path.map(str::to_owned)
}

/// Whether libvirt made the cgroup `path` for some of a VM's threads, below the VM's own: what Cohort takes for one VM.
pub fn is_below_vm(path: &str) -> bool {
    let above = Path::new(path).ancestors().skip(1);
    let mut names = above.filter_map(|path| path.file_name()?.to_str());
    names.any(|name| name == LIBVIRT || name.ends_with(LIBVIRT_ALONE))
}

/// The cgroups of the threads of process `tgid`, each once.
pub fn paths_of_threads(proc: &Path, tgid: u32) -> BTreeSet<String> {
    let threads = fs::read_dir(proc.join(format!("{tgid}/task")));
    let threads = threads.into_iter().flatten().flatten();
    let text = |thread: fs::DirEntry| fs::read_to_string(thread.path().join("cgroup")).ok();
    threads
        .filter_map(|thread| path_in(&text(thread)?))
        .collect()
}

/// What one cgroup above a thread allows that, and how often it stopped it.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Level {
    /// From the topmost cgroup on, with a slash in front.
    pub path: String,
    /// cpu.max: quota and period, us.
    pub cap_us: Option<(u64, u64)>,
    /// cpu.weight.
    pub weight: Option<u32>,
    /// Periods of the quota in which something ran, those in which it was used up, and for how long CPUs were kept from it
    /// then, us.
    pub periods: u64,
    /// See `periods`.
    pub throttled: u64,
    /// See `periods`.
    pub throttled_us: u64,
    /// CPU time used in it and below it, us.
    pub used_us: u64,
    /// How often tasks of it were held back as it had more memory than memory.high, or had to wait as it had memory.max.
    pub over_high: u64,
    /// See `over_high`.
    pub at_max: u64,
}

impl Level {
    /// What its counters have gained since it was read as `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            periods: self.periods.saturating_sub(earlier.periods),
            throttled: self.throttled.saturating_sub(earlier.throttled),
            throttled_us: self.throttled_us.saturating_sub(earlier.throttled_us),
            used_us: self.used_us.saturating_sub(earlier.used_us),
            over_high: self.over_high.saturating_sub(earlier.over_high),
            at_max: self.at_max.saturating_sub(earlier.at_max),
            ..self.clone()
        }
    }

    /// What the cap allows, in CPUs.
    pub fn cap_cpus(&self) -> Option<f64> {
        self.cap_us.map(in_cpus)
    }
}

/// The cgroups `paths` and all above them but the topmost, by path; those of them that there are.
pub fn levels<'a>(host: &Host, paths: impl IntoIterator<Item = &'a str>) -> Vec<Level> {
    let Some(root) = mount(host) else {
        return Vec::new();
    };
    let all: BTreeSet<&Path> = paths
        .into_iter()
        .flat_map(|path| Path::new(path).ancestors())
        .filter(|path| path.parent().is_some())
        .collect();
    let level = |path: &Path| {
        let folder = root.join(path.strip_prefix("/").ok()?);
        let text = |name: &str| fs::read_to_string(folder.join(name)).ok();
        let stat = text("cpu.stat")?;
        let memory = text("memory.events.local").unwrap_or_default();
        let event = |key: &str| counter(&memory, key).unwrap_or(0);
        let (over_high, at_max) = (event("high"), event("max"));
        let counter = |key: &str| counter(&stat, key).unwrap_or(0);
        Some(Level {
            path: path.to_string_lossy().into_owned(),
            cap_us: text("cpu.max").and_then(|max| cap_us(&max)),
            weight: text("cpu.weight").and_then(|weight| weight.trim().parse().ok()),
            periods: counter("nr_periods"),
            throttled: counter("nr_throttled"),
            throttled_us: counter("throttled_usec"),
            used_us: counter("usage_usec"),
            over_high,
            at_max,
        })
    };
    all.into_iter().filter_map(level).collect()
}

/// The cgroup by which process `tgid` competes.
pub fn place_of(host: &Host, tgid: u32) -> Option<Level> {
    let place = place(&host.proc, &mount(host)?, tgid)?;
    let path = Path::new("/").join(place);
    let path = path.to_string_lossy();
    levels(host, [path.as_ref()])
        .into_iter()
        .find(|level| level.path == path)
}

/// The cgroup by which process `tgid` competes: its own, or the nearest above with the cpu controller.
fn place(proc: &Path, root: &Path, tgid: u32) -> Option<PathBuf> {
    let path = path_of(proc, tgid)?;
    let mut place = PathBuf::new();
    for name in path.strip_prefix('/')?.split('/') {
        if name == LIBVIRT || place.to_string_lossy().ends_with(LIBVIRT_ALONE) {
            break;
        }
        place.push(name);
    }
    while !place.as_os_str().is_empty() && !root.join(&place).join("cpu.weight").exists() {
        place.pop();
    }
    Some(place)
}

fn read(folder: &Path, id: u64, parent: Option<usize>) -> Option<CgroupReading> {
    let text = |name: &str| fs::read_to_string(folder.join(name));
    let used_us = counter(&text("cpu.stat").ok()?, "usage_usec")?;
    // The topmost one has neither weight nor cap.
    let weight = text("cpu.weight").ok();
    let weight = weight.and_then(|weight| weight.trim().parse().ok());
    Some(CgroupReading {
        id,
        parent,
        weight: weight.unwrap_or(WEIGHT_DEFAULT),
        cap_cpus: text("cpu.max")
            .ok()
            .and_then(|max| cap_us(&max))
            .map(in_cpus),
        used_us,
    })
}

/// What the counter `key` of a file such as cpu.stat says.
fn counter(stat: &str, key: &str) -> Option<u64> {
    let mut pairs = stat.lines().filter_map(|line| line.split_once(' '));
    pairs.find(|(name, _)| *name == key)?.1.parse().ok()
}

/// What `cpu.max` says, quota and period in us: "50000 100000" is half a CPU, "max 100000" no cap.
fn cap_us(max: &str) -> Option<(u64, u64)> {
    let mut words = max.split_whitespace().map(str::parse::<u64>);
    let (quota, period) = (words.next()?.ok()?, words.next()?.ok()?);
    (period > 0).then_some((quota, period))
}

/// A quota in each period, in CPUs.
fn in_cpus((quota_us, period_us): (u64, u64)) -> f64 {
    quota_us as f64 / period_us as f64
}

/// All cgroups below the folder `root`, and that one: folders, and the kernel's numbers.
fn all(root: PathBuf) -> impl Iterator<Item = (PathBuf, u64)> {
    let mut to_read = vec![(root, 1)];
    iter::from_fn(move || {
        let (folder, id) = to_read.pop()?;
        to_read.extend(children(&folder).map(|(name, id)| (folder.join(name), id)));
        Some((folder, id))
    })
}

/// Names and inode numbers of the folders in a folder.
fn children(folder: &Path) -> impl Iterator<Item = (PathBuf, u64)> {
    let is_folder = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_dir());
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter(is_folder)
        .map(|entry| (entry.file_name().into(), entry.ino()))
}

/// cpu.max of a cgroup, and cpu.max.burst; microseconds.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Cap {
    /// CPU time in a period.
    pub quota_us: u64,
    /// How long that is.
    pub period_us: u64,
    /// So much of what was not used before comes to it.
    pub burst_us: u64,
}

/// Sees changes of cpu.max, for kernels that do not tell of them.
#[derive(Debug, Default)]
pub struct CapWatch {
    known: HashMap<u64, Cap>,
}

impl CapWatch {
    /// The caps that came, changed or went (`None`) since the last call, by the kernel's numbers for cgroups. Reads a file of
    /// each cgroup.
    pub fn changes(&mut self, host: &Host) -> Vec<(u64, Option<Cap>)> {
        let now = caps(host);
        let gone = self.known.keys().filter(|id| !now.contains_key(id));
        let mut changes: Vec<(u64, Option<Cap>)> = gone.map(|&id| (id, None)).collect();
        let changed = now
            .iter()
            .filter(|(id, cap)| self.known.get(id) != Some(cap));
        changes.extend(changed.map(|(&id, &cap)| (id, Some(cap))));
        self.known = now;
        changes
    }
}

/// All caps of this host.
fn caps(host: &Host) -> HashMap<u64, Cap> {
    let all = mount(host).into_iter().flat_map(all);
    all.filter_map(|(folder, id)| Some((id, cap(&folder)?)))
        .collect()
}

fn cap(folder: &Path) -> Option<Cap> {
    let (quota_us, period_us) = cap_us(&fs::read_to_string(folder.join("cpu.max")).ok()?)?;
    let burst = fs::read_to_string(folder.join("cpu.max.burst"));
    Some(Cap {
        quota_us,
        period_us,
        burst_us: burst
            .ok()
            .and_then(|burst| burst.trim().parse().ok())
            .unwrap_or(0),
    })
}

/// What cgroups are called, by the kernel's numbers for them.
#[derive(Debug, Default)]
pub struct CgroupNames {
    known: HashMap<u64, String>,
}

impl CgroupNames {
    /// The paths of the cgroups `ids` below the topmost one. All cgroups are looked through if one of them is new.
    pub fn names(&mut self, host: &Host, ids: &BTreeSet<u64>) -> HashMap<u64, String> {
        if ids.iter().any(|id| !self.known.contains_key(id)) {
            self.look_through(host);
        }
        let name = |id: &u64| {
            let gone = || format!("cgroup {id}, which is gone");
            (*id, self.known.entry(*id).or_insert_with(gone).clone())
        };
        ids.iter().map(name).collect()
    }

    fn look_through(&mut self, host: &Host) {
        let Some(root) = mount(host) else {
            return;
        };
        for (folder, id) in all(root.clone()) {
            let path = Path::new("/").join(folder.strip_prefix(&root).unwrap_or(&folder));
            self.known.insert(id, path.to_string_lossy().into_owned());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::paths::fixture::Fixture;
    use std::os::unix::fs::MetadataExt;

    fn with_cgroup(fixture: Fixture, path: &str, weight: &str, max: &str, used_us: u64) -> Fixture {
        let folder = format!("sys/fs/cgroup/{path}");
        fixture
            .with(&format!("{folder}/cpu.weight"), weight)
            .with(&format!("{folder}/cpu.max"), max)
            .with(
                &format!("{folder}/cpu.stat"),
                format!("usage_usec {used_us}\nuser_usec 1\n"),
            )
    }

    #[test]
    fn caps_that_come_change_and_go_are_seen_once() {
        let fixture = with_cgroup(host_with_vm(), "tenant", "100", "max 100000\n", 1);
        let max = |fixture: Fixture, max: &str| fixture.with("sys/fs/cgroup/tenant/cpu.max", max);
        let mut watch = CapWatch::default();
        let before = watch.changes(&fixture.host()).len();
        assert_eq!(watch.changes(&fixture.host()), []);
        let fixture = max(fixture, "50000 100000\n");
        let cap = |quota_us| {
            Some(Cap {
                quota_us,
                period_us: 100_000,
                burst_us: 0,
            })
        };
        let seen = |watch: &mut CapWatch, fixture: &Fixture| {
            let changes = watch.changes(&fixture.host());
            changes.into_iter().map(|(_, cap)| cap).collect::<Vec<_>>()
        };
        assert_eq!(seen(&mut watch, &fixture), [cap(50_000)]);
        let fixture = max(fixture, "20000 100000\n");
        assert_eq!(seen(&mut watch, &fixture), [cap(20_000)]);
        let fixture = max(fixture, "max 100000\n");
        assert_eq!(seen(&mut watch, &fixture), [None]);
        assert_eq!((seen(&mut watch, &fixture), before), (vec![], 1));
    }

    /// A slice with a VM of libvirt, and a service.
    fn host_with_vm() -> Fixture {
        let fixture = Fixture::new()
            .with("sys/fs/cgroup/cgroup.controllers", "cpuset cpu\n")
            .with("sys/fs/cgroup/cpu.stat", "usage_usec 1000\n")
            .with(
                "proc/7/cgroup",
                "0::/machine.slice/vm.scope/libvirt/vcpu0\n",
            );
        let fixture = with_cgroup(fixture, "machine.slice", "200", "max 100000", 700);
        let fixture = with_cgroup(
            fixture,
            "machine.slice/vm.scope",
            "100",
            "50000 100000",
            600,
        );
        let fixture = with_cgroup(fixture, "machine.slice/vm.scope/libvirt", "100", "max", 600);
        let fixture = with_cgroup(fixture, "system.slice", "100", "max 100000", 300);
        with_cgroup(fixture, "system.slice/a.service", "100", "max 100000", 300)
    }

    #[test]
    fn those_above_and_beside_a_vm_compete_with_it() {
        let fixture = host_with_vm();
        let got = Competition::read(&fixture.host(), [7, 8]).expect("there are cgroups");
        let vm = got.cgroups[got.place_of[&7]];
        assert_eq!((vm.weight, vm.cap_cpus, vm.used_us), (100, Some(0.5), 600));
        let slice = got.cgroups[vm.parent.expect("it is in a slice")];
        assert_eq!(
            (slice.weight, slice.cap_cpus, slice.used_us),
            (200, None, 700)
        );
        assert_eq!(slice.parent, Some(0));
        // The service's own folder competes with nobody here, nor does libvirt's; process 8 is gone.
        assert_eq!(got.cgroups.len(), 4);
        assert_eq!(got.place_of.len(), 1);
    }

    #[test]
    fn a_vm_of_libvirt_without_systemd_is_its_cgroup_not_that_of_a_thread() {
        let vm = "machine.slice/qemu-1-a.libvirt-qemu";
        let fixture = host_with_vm().with("proc/8/cgroup", format!("0::/{vm}/emulator\n"));
        let fixture = with_cgroup(fixture, vm, "300", "max 100000", 5);
        let fixture = with_cgroup(fixture, &format!("{vm}/emulator"), "100", "max 100000", 5);
        let got = Competition::read(&fixture.host(), [8]).expect("there are cgroups");
        assert_eq!(got.cgroups[got.place_of[&8]].weight, 300);
    }

    #[test]
    fn without_the_controller_the_cgroup_above_counts() {
        let fixture = host_with_vm().with("proc/8/cgroup", "0::/user.slice/session\n");
        let got = Competition::read(&fixture.host(), [8]).expect("there are cgroups");
        assert_eq!(got.place_of[&8], 0);
        assert_eq!(got.cgroups[0].parent, None);
    }

    #[test]
    fn a_host_with_version_1_has_no_such_cgroups() {
        let fixture = Fixture::new().with("sys/fs/cgroup/cpu/cpu.shares", "1024\n");
        assert_eq!(Competition::read(&fixture.host(), [7]), None);
    }

    #[test]
    fn every_level_above_a_thread_is_read_and_counters_gain() {
        let fixture = host_with_vm().with(
            "sys/fs/cgroup/machine.slice/vm.scope/cpu.stat",
            "usage_usec 600\nnr_periods 10\nnr_throttled 4\nthrottled_usec 900\n",
        );
        let path = "/machine.slice/vm.scope/libvirt/vcpu0";
        let got = levels(&fixture.host(), [path, "/machine.slice"]);
        let paths: Vec<&str> = got.iter().map(|level| level.path.as_str()).collect();
        // The last one has gone.
        assert_eq!(
            paths,
            [
                "/machine.slice",
                "/machine.slice/vm.scope",
                "/machine.slice/vm.scope/libvirt"
            ]
        );
        let vm = &got[1];
        assert_eq!(
            (vm.cap_us, vm.cap_cpus()),
            (Some((50_000, 100_000)), Some(0.5))
        );
        let earlier = Level {
            periods: 7,
            throttled: 4,
            ..vm.clone()
        };
        let gained = vm.since(&earlier);
        assert_eq!(
            (gained.periods, gained.throttled, gained.used_us),
            (3, 0, 0)
        );
    }

    #[test]
    fn a_cgroup_is_called_by_its_path() {
        let fixture = host_with_vm();
        let host = fixture.host();
        let folder = host.sys.join("fs/cgroup/system.slice/a.service");
        let id = fs::metadata(folder).expect("it was made").ino();
        let mut names = CgroupNames::default();
        let got = names.names(&host, &BTreeSet::from([id, u64::MAX]));
        assert_eq!(got[&id], "/system.slice/a.service");
        assert!(got[&u64::MAX].ends_with("gone"));
    }
}
