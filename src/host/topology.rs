// SPDX-License-Identifier: GPL-2.0-only
//! Which CPUs share a last-level cache: the domains of the scheduler. And how far
//! the nodes of two CPUs are from each other.
//!
//! scx_utils has a topology of its own, but it knows online CPUs only, and it
//! reads the running host and nothing else. A domain is needed for each CPU that
//! can ever come online, because queues are made when the scheduler loads.

use crate::bpf::intf;
use anyhow::{Context, Result, bail};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// A domain's CPUs are bits of a word.
const MOST_CPUS: usize = intf::cohort_limits_DOMAIN_CPUS as usize;

/// The domain of each CPU.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Domains {
    /// CPU number to domain number; one entry per CPU number up to the highest possible.
    pub of_cpu: Vec<u16>,
    /// How many domains there are; they are numbered from 0.
    pub count: u16,
}

impl Domains {
    /// Reads the caches of all possible CPUs from `sys`.
    ///
    /// CPUs with the same last-level cache have the same domain; if they are too many for
    /// one, they have several of about the same size. sysfs hides the
    /// caches of an offline CPU; such a CPU, and a number that no CPU has, gets
    /// the domain of the nearest CPU below it, and keeps it if it comes online
    /// later: a poor guess costs cache misses until the next start, no more.
    pub fn read(sys: &Path) -> Result<Self> {
        let cpus = sys.join("devices/system/cpu");
        let possible = read_cpu_list(&cpus.join("possible"))?;
        let Some(&highest) = possible.last() else {
            bail!(
                "{} names no CPU, so there is nothing to schedule on. Check that /sys is mounted.",
                cpus.join("possible").display()
            );
        };

        let mut numbers: BTreeMap<CacheKey, u16> = BTreeMap::new();
        let mut of_cpu = Vec::with_capacity(highest + 1);
        for cpu in 0..=highest {
            let domain = match last_level_cache(&cpus.join(format!("cpu{cpu}"))) {
                Some(key) => {
                    let next = u16::try_from(numbers.len())
                        .context("this host has more last-level caches than Cohort can number")?;
                    *numbers.entry(key).or_insert(next)
                }
                None => of_cpu.last().copied().unwrap_or(0),
            };
            of_cpu.push(domain);
        }
        let count = u16::try_from(numbers.len().max(1))
            .context("this host has more last-level caches than Cohort can number")?;
        let mut domains = Self { of_cpu, count };
        for domain in 0..count {
            domains.split(domain, &cpus);
        }
        Ok(domains)
    }

    /// Makes several domains of one that has too many CPUs. The threads of a core stay together.
    fn split(&mut self, domain: u16, cpus: &Path) {
        let members = (0..self.of_cpu.len()).filter(|&cpu| self.of_cpu[cpu] == domain);
        let mut cores: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for cpu in members {
            let threads = cpus.join(format!("cpu{cpu}/topology/thread_siblings_list"));
            let threads = read_cpu_list(&threads).unwrap_or_default();
            let core = threads.first().copied().unwrap_or(cpu);
            cores.entry(core).or_default().push(cpu);
        }
        let total: usize = cores.values().map(Vec::len).sum();
        let most = total.div_ceil(total.div_ceil(MOST_CPUS).max(1));
        let (mut number, mut taken) = (domain, 0);
        for threads in cores.into_values() {
            if taken + threads.len() > most.max(threads.len()) {
                (number, taken) = (self.count, 0);
                self.count += 1;
            }
            taken += threads.len();
            for cpu in threads {
                self.of_cpu[cpu] = number;
            }
        }
    }
}

/// Tells last-level caches apart.
#[derive(Debug, Eq, Ord, PartialEq, PartialOrd)]
enum CacheKey {
    /// The CPUs that share it.
    SharedBy(String),
    /// The kernel's number for the cache, which is unique per level.
    Id { level: u32, id: u32 },
    /// No cache is described at all: the package.
    Package(u32),
}

fn last_level_cache(cpu: &Path) -> Option<CacheKey> {
    largest_cache_key(&cpu.join("cache"))
        .or_else(|| read_number(&cpu.join("topology/physical_package_id")).map(CacheKey::Package))
}

fn largest_cache_key(caches: &Path) -> Option<CacheKey> {
    let (level, index) = fs::read_dir(caches)
        .ok()?
        .flatten()
        .map(|entry| entry.path())
        .filter_map(|index| Some((read_number(&index.join("level"))?, index)))
        .max()?;
    // Before the number: virtual machines are seen to number one shared cache differently on each CPU.
    if let Ok(shared_by) = fs::read_to_string(index.join("shared_cpu_list")) {
        return Some(CacheKey::SharedBy(shared_by.trim().to_owned()));
    }
    let id = read_number(&index.join("id"))?;
    Some(CacheKey::Id { level, id })
}

fn read_number(path: &Path) -> Option<u32> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Reads a list such as `0-3,8`, in ascending order as the kernel writes it.
fn read_cpu_list(path: &Path) -> Result<Vec<usize>> {
    let text = fs::read_to_string(path)
        .with_context(|| format!("the list of CPUs in {} cannot be read", path.display()))?;
    scx_utils::read_cpulist(text.trim()).with_context(|| {
        format!(
            "{} holds {text:?}, which is not a list of CPUs",
            path.display()
        )
    })
}

/// The NUMA node of each CPU, and how far they are from each other.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Nodes {
    /// CPU number to node number; a CPU that no node names has node 0.
    pub of_cpu: BTreeMap<usize, usize>,
    /// By pairs of node numbers, as the kernel gives it: 10 is within a node.
    pub distances: BTreeMap<(usize, usize), u8>,
}

impl Nodes {
    /// Reads the nodes from `sys`; none on a kernel that knows no NUMA.
    pub fn read(sys: &Path) -> Self {
        let folder = sys.join("devices/system/node");
        let mut nodes = Self {
            of_cpu: BTreeMap::new(),
            distances: BTreeMap::new(),
        };
        let Ok(numbers) = read_cpu_list(&folder.join("online")) else {
            return nodes;
        };
        for &node in &numbers {
            let node_folder = folder.join(format!("node{node}"));
            let cpus = read_cpu_list(&node_folder.join("cpulist")).unwrap_or_default();
            nodes.of_cpu.extend(cpus.into_iter().map(|cpu| (cpu, node)));
            let text = fs::read_to_string(node_folder.join("distance")).unwrap_or_default();
            let distances = text.split_whitespace().map(str::parse);
            for (&other, distance) in numbers.iter().zip(distances) {
                nodes
                    .distances
                    .insert((node, other), distance.unwrap_or(u8::MAX));
            }
        }
        nodes
    }
}

/// The CPUs that are online now.
pub fn online_cpus(sys: &Path) -> Result<BTreeSet<usize>> {
    let online = read_cpu_list(&sys.join("devices/system/cpu/online"))?;
    Ok(online.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::paths::fixture::Fixture;

    const CPUS: &str = "sys/devices/system/cpu";

    fn with_cache(fixture: Fixture, cpu: usize, index: usize, level: u32, id: u32) -> Fixture {
        let cache = format!("{CPUS}/cpu{cpu}/cache/index{index}");
        fixture
            .with(&format!("{cache}/level"), format!("{level}\n"))
            .with(&format!("{cache}/id"), format!("{id}\n"))
    }

    fn possible(cpus: &str) -> Fixture {
        Fixture::new().with(&format!("{CPUS}/possible"), cpus)
    }

    fn domains(fixture: &Fixture) -> Domains {
        Domains::read(&fixture.host().sys).expect("the fixture is sound")
    }

    #[test]
    fn cpus_with_one_last_level_cache_are_one_domain() {
        let mut fixture = possible("0-3\n");
        for cpu in 0..4 {
            // Each has a cache of its own at level 1; pairs share one at level 3.
            fixture = with_cache(fixture, cpu, 0, 1, cpu as u32);
            fixture = with_cache(fixture, cpu, 3, 3, cpu as u32 / 2);
        }
        assert_eq!(domains(&fixture).of_cpu, [0, 0, 1, 1]);
        assert_eq!(domains(&fixture).count, 2);
    }

    #[test]
    fn a_cache_of_too_many_cpus_makes_several_domains_of_whole_cores() {
        // 112 CPUs, two threads per core, numbered as hosts number them.
        let mut fixture = possible("0-111\n");
        for cpu in 0..112 {
            fixture = with_cache(fixture, cpu, 3, 3, 0);
            let siblings = format!("{},{}\n", cpu % 56, cpu % 56 + 56);
            let list = format!("{CPUS}/cpu{cpu}/topology/thread_siblings_list");
            fixture = fixture.with(&list, siblings);
        }
        let domains = domains(&fixture);
        assert_eq!(domains.count, 2);
        for cpu in 0..56 {
            assert_eq!(domains.of_cpu[cpu], domains.of_cpu[cpu + 56], "{cpu}");
            assert_eq!(domains.of_cpu[cpu], u16::from(cpu >= 28), "{cpu}");
        }
    }

    #[test]
    fn an_offline_cpu_gets_the_domain_below_it() {
        let fixture = with_cache(possible("0-2\n"), 0, 3, 3, 0);
        let fixture = with_cache(fixture, 1, 3, 3, 7);
        assert_eq!(domains(&fixture).of_cpu, [0, 1, 1]);
    }

    #[test]
    fn caches_without_a_number_are_told_apart_by_their_cpus() {
        let mut fixture = possible("0-2\n");
        for (cpu, shared_by) in [(0, "0,2"), (1, "1"), (2, "0,2")] {
            let cache = format!("{CPUS}/cpu{cpu}/cache/index2");
            fixture = fixture
                .with(&format!("{cache}/level"), "2")
                .with(&format!("{cache}/shared_cpu_list"), shared_by);
        }
        assert_eq!(domains(&fixture).of_cpu, [0, 1, 0]);
    }

    #[test]
    fn without_caches_a_package_is_a_domain() {
        let mut fixture = possible("0-1\n");
        for cpu in 0..2 {
            let path = format!("{CPUS}/cpu{cpu}/topology/physical_package_id");
            fixture = fixture.with(&path, format!("{cpu}\n"));
        }
        assert_eq!(domains(&fixture).of_cpu, [0, 1]);
    }

    #[test]
    fn a_host_that_describes_nothing_is_one_domain() {
        let got = domains(&possible("0-1\n"));
        assert_eq!((got.of_cpu, got.count), (vec![0, 0], 1));
    }

    #[test]
    fn no_list_of_cpus_is_an_error_that_names_the_file() {
        let error = Domains::read(&Fixture::new().host().sys).expect_err("nothing to read");
        assert!(error.to_string().contains("devices/system/cpu/possible"));
    }

    #[test]
    fn nodes_have_their_cpus_and_distances() {
        let node = |fixture: Fixture, node: usize, cpus: &str, distance: &str| {
            let folder = format!("sys/devices/system/node/node{node}");
            fixture
                .with(&format!("{folder}/cpulist"), cpus)
                .with(&format!("{folder}/distance"), distance)
        };
        let fixture = Fixture::new().with("sys/devices/system/node/online", "0,2\n");
        let fixture = node(fixture, 0, "0-1\n", "10 21\n");
        let fixture = node(fixture, 2, "2,5\n", "21 10\n");
        let nodes = Nodes::read(&fixture.host().sys);
        assert_eq!(
            nodes.of_cpu,
            BTreeMap::from([(0, 0), (1, 0), (2, 2), (5, 2)])
        );
        assert_eq!(
            (nodes.distances[&(0, 2)], nodes.distances[&(2, 2)]),
            (21, 10)
        );
    }

    #[test]
    fn a_kernel_without_numa_has_no_nodes() {
        assert!(Nodes::read(&Fixture::new().host().sys).of_cpu.is_empty());
    }
}
