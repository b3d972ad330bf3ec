// SPDX-License-Identifier: GPL-2.0-only
//! What is known of one VM and its host: gathered here and nowhere else, from this host or from a recording. What it
//! means is said by the findings.

use crate::host::cgroups::{self, Level};
use crate::host::idle_states::{self, IdleState};
use crate::host::kernel_log;
use crate::host::paths::Host;
use crate::host::standing;
use crate::host::threads::{self, Role, Thread};
use crate::observer::span::{Span, VmSpan};
use crate::process::exit::{Exit, Failure};
use anyhow::anyhow;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// All that findings are made of.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// The VM's process.
    pub tgid: u32,
    /// The VM in the time that was looked at.
    pub vm: VmSpan,
    /// The host in that time, with the VM.
    pub span: Span,
    /// What only the host itself tells; `None` of a recording.
    pub live: Option<Live>,
}

/// What this host tells besides the observer. Counters are what they gained in the time that was looked at.
#[derive(Clone, Debug, Default)]
pub struct Live {
    /// The VM's threads, vhost's among them.
    pub threads: Vec<Thread>,
    /// The cgroups of those threads and all above them.
    pub levels: Vec<Level>,
    /// By VM: the cgroup in which its process stands.
    pub place_of: BTreeMap<u32, Level>,
    /// CPUs between which the kernel balances no load (isolcpus, isolated partitions of cpusets).
    pub isolated: BTreeSet<usize>,
    /// What the host's kernel takes the time from.
    pub clocksource: String,
    /// Threads that the kernel caught with split locks since the boot; `None` if its log cannot be read.
    pub split_lock_threads: Option<Vec<u32>>,
    /// Whether it slows them down for that.
    pub split_lock_mitigate: bool,
    /// Whether timers are finer than ticks, if that can be told.
    pub timers_are_fine: Option<bool>,
    /// How often CPUs entered each idle state.
    pub idle_states: BTreeMap<String, IdleState>,
    /// Whether pages of the VM's memory are brought by another process.
    pub userfaultfd: bool,
}

impl Facts {
    /// Picks the VM that people call `name` out of `span`.
    ///
    /// # Errors
    /// With [`Exit::NoSuchVm`] when there is none of that name, or several.
    pub fn pick(span: Span, name: &str) -> Result<Self, Failure> {
        let called: Vec<u32> = span
            .vms
            .iter()
            .filter(|(tgid, vm)| vm.vm.is_called(**tgid, name))
            .map(|(&tgid, _)| tgid)
            .collect();
        let fail = |sentence| Err(Failure::new(Exit::NoSuchVm, sentence));
        match called.as_slice() {
            [tgid] => Ok(Self {
                tgid: *tgid,
                vm: span.vms[tgid].clone(),
                span,
                live: None,
            }),
            [] if span.vms.is_empty() => fail(anyhow!(
                "no VM ran a vCPU in this time, so there is none called {name}"
            )),
            [] => {
                let names: Vec<&str> = span.vms.values().map(|it| it.vm.name.as_str()).collect();
                fail(anyhow!(
                    "no VM is called {name}; those that ran are {}",
                    names.join(", ")
                ))
            }
            several => fail(anyhow!(
                "several VMs are called {name}: name one by its process, of {several:?}"
            )),
        }
    }

    /// All vCPUs together.
    pub fn all(&self) -> &crate::observer::view::VcpuView {
        &self.vm.vm.all
    }

    /// What people call the VM.
    pub fn name(&self) -> &str {
        &self.vm.vm.identity.name
    }

    /// Whether waits for a CPU may be waits for a refill of its cap: Cohort tells their sum only.
    pub fn is_capped_by_cohort(&self) -> bool {
        !self.span.is_stock() && self.all().limited_pct > 0.0
    }

    /// The time that was looked at, in words.
    pub fn time(&self) -> String {
        super::words::duration(self.vm.ms * 1000)
    }
}

/// Counters of this host at the beginning of the time.
pub struct Before {
    threads: BTreeMap<u32, Vec<Thread>>,
    levels: BTreeMap<String, Level>,
    idle_states: BTreeMap<String, IdleState>,
}

impl Before {
    /// Reads them of the VMs of the processes `tgids`.
    pub fn read(host: &Host, tgids: impl IntoIterator<Item = u32>) -> Self {
        let of_vm = |tgid| (tgid, threads::of_vm(&host.proc, tgid));
        let threads: BTreeMap<u32, Vec<Thread>> = tgids.into_iter().map(of_vm).collect();
        let levels = levels(host, threads.values().flatten());
        let levels = levels.into_iter().map(|level| (level.path.clone(), level));
        Self {
            threads,
            levels: levels.collect(),
            idle_states: idle_states::read(host),
        }
    }

    /// What they have gained, of the VM of `facts`; and what else is to be told now.
    pub fn until_now(&self, host: &Host, facts: &Facts) -> Live {
        let none = Vec::new();
        let earlier = self.threads.get(&facts.tgid).unwrap_or(&none);
        let mut threads = threads::of_vm(&host.proc, facts.tgid);
        for thread in &mut threads {
            if let Some(earlier) = earlier.iter().find(|it| it.tid == thread.tid) {
                thread.ran_ns = thread.ran_ns.saturating_sub(earlier.ran_ns);
                thread.waited_ns = thread.waited_ns.saturating_sub(earlier.waited_ns);
            }
        }
        let since = |level: Level| match self.levels.get(&level.path) {
            Some(earlier) => level.since(earlier),
            None => level,
        };
        let place = |&tgid: &u32| Some((tgid, cgroups::place_of(host, tgid)?));
        Live {
            levels: levels(host, &threads).into_iter().map(since).collect(),
            threads,
            place_of: facts.span.vms.keys().filter_map(place).collect(),
            isolated: isolated(host),
            clocksource: clocksource(host),
            split_lock_threads: kernel_log::messages(Path::new("/dev/kmsg"))
                .map(|messages| kernel_log::split_lock_threads(&messages)),
            split_lock_mitigate: fs::read_to_string(
                host.proc.join("sys/kernel/split_lock_mitigate"),
            )
            .is_ok_and(|value| value.trim() == "1"),
            timers_are_fine: timers_are_fine(host),
            idle_states: self.entered_since(host),
            userfaultfd: standing::has_userfaultfd(&host.proc, facts.tgid),
        }
    }
}

impl Before {
    /// How often each idle state was entered since then.
    fn entered_since(&self, host: &Host) -> BTreeMap<String, IdleState> {
        let mut states = idle_states::read(host);
        for (name, state) in &mut states {
            let earlier = self.idle_states.get(name).copied().unwrap_or_default();
            state.entered = state.entered.saturating_sub(earlier.entered);
        }
        states
    }
}

impl Live {
    /// Threads of the VM that run vCPUs.
    pub fn vcpus(&self) -> impl Iterator<Item = &Thread> {
        let is_vcpu = |thread: &&Thread| thread.role == Role::Vcpu;
        self.threads.iter().filter(is_vcpu)
    }

    /// All others.
    pub fn others(&self) -> impl Iterator<Item = &Thread> {
        let is_other = |thread: &&Thread| thread.role != Role::Vcpu;
        self.threads.iter().filter(is_other)
    }
}

fn levels<'a>(host: &Host, threads: impl IntoIterator<Item = &'a Thread>) -> Vec<Level> {
    let paths = threads.into_iter().filter_map(|it| it.cgroup.as_deref());
    cgroups::levels(host, paths)
}

fn isolated(host: &Host) -> BTreeSet<usize> {
    let files = [
        "devices/system/cpu/isolated",
        "fs/cgroup/cpuset.cpus.isolated",
    ];
    let list = |file: &str| {
        let text = fs::read_to_string(host.sys.join(file)).unwrap_or_default();
        scx_utils::read_cpulist(text.trim()).unwrap_or_default()
    };
    files.into_iter().flat_map(list).collect()
}

fn clocksource(host: &Host) -> String {
    let file = "devices/system/clocksource/clocksource0/current_clocksource";
    let text = fs::read_to_string(host.sys.join(file)).unwrap_or_default();
    text.trim().to_owned()
}

/// The kernel says of each CPU whether its timers are finer than ticks.
fn timers_are_fine(host: &Host) -> Option<bool> {
    let text = fs::read_to_string(host.proc.join("timer_list")).ok()?;
    let mut states = text
        .lines()
        .filter(|line| line.contains(".hres_active"))
        .peekable();
    states.peek()?;
    Some(states.all(|line| line.trim_end().ends_with('1')))
}

#[cfg(test)]
pub mod fixture {
    use super::*;
    use crate::host::arch;
    use crate::observer::view::{VcpuView, VmView};

    /// Ten seconds under the stock scheduler of a host of four CPUs, and in it the VM `web` of two vCPUs, of process 7,
    /// each of which ran a quarter of the time and was halted else.
    pub fn facts() -> Facts {
        let vcpu = VcpuView {
            vcpus: 1,
            run_pct: 25.0,
            on_cpu_pct: 25.0,
            halted_pct: 75.0,
            entitled_pct: 25.0,
            ..VcpuView::default()
        };
        let all = VcpuView {
            vcpus: 2,
            ..vcpu.clone()
        };
        let mut vm = VmView {
            name: String::from("web"),
            all,
            vcpus: BTreeMap::from([(0, vcpu.clone()), (1, vcpu)]),
            ..VmView::default()
        };
        vm.identity.name = String::from("web");
        let vm = VmSpan {
            ms: 10_000,
            vm,
            ..VmSpan::default()
        };
        Facts {
            tgid: 7,
            span: Span {
                windows: 1,
                ms: 10_000,
                until_ms: 1_800_000_000_000,
                schedulers: BTreeSet::from([String::from("stock")]),
                cpus: 4,
                overcommitment: 0.5,
                wanted_cpus: 0.5,
                vms: BTreeMap::from([(7, vm.clone())]),
                ..Span::default()
            },
            vm,
            live: Some(Live {
                threads: vec![
                    thread(7, "qemu", Role::Vmm),
                    thread(8, "CPU 0/KVM", Role::Vcpu),
                    thread(9, "CPU 1/KVM", Role::Vcpu),
                ],
                clocksource: String::from(arch::CLOCKSOURCE.0),
                split_lock_threads: Some(Vec::new()),
                timers_are_fine: Some(true),
                ..Live::default()
            }),
        }
    }

    /// A thread that may run on four CPUs and did nothing.
    pub fn thread(tid: u32, name: &str, role: Role) -> Thread {
        Thread {
            tid,
            name: name.to_owned(),
            role,
            cpus: (0..4).collect(),
            last_cpu: Some(0),
            cgroup: Some(String::from("/machine/web")),
            ran_ns: 0,
            waited_ns: 0,
        }
    }

    /// What the host itself tells, to be changed.
    pub fn live(facts: &mut Facts) -> &mut Live {
        facts.live.as_mut().expect("it is of a host")
    }
}

#[cfg(test)]
mod tests {
    use super::fixture::facts;
    use super::*;
    use crate::host::paths::fixture::Fixture;

    #[test]
    fn a_vm_is_picked_by_name_or_process_and_what_is_not_clear_is_refused() {
        let span = facts().span;
        assert_eq!(
            Facts::pick(span.clone(), "web").expect("it is there").tgid,
            7
        );
        assert_eq!(Facts::pick(span.clone(), "7").expect("it is there").tgid, 7);
        let refusal = |span: &Span, name: &str| {
            let failure = Facts::pick(span.clone(), name).expect_err("it is not clear");
            assert_eq!(failure.exit(), Exit::NoSuchVm);
            failure.to_string()
        };
        assert!(refusal(&span, "db").contains("those that ran are web"));
        assert!(refusal(&Span::default(), "db").contains("no VM ran"));
        let mut two = span;
        two.vms.insert(9, two.vms[&7].clone());
        assert!(refusal(&two, "web").contains("[7, 9]"));
    }

    #[test]
    fn counters_are_what_they_gained() {
        let with = |ran: &str, used: &str| {
            Fixture::new()
                .with("sys/fs/cgroup/cgroup.controllers", "cpu\n")
                .with("sys/fs/cgroup/vm/cpu.stat", format!("usage_usec {used}\n"))
                .with("sys/fs/cgroup/vm/cpu.weight", "100\n")
                .with("sys/devices/system/cpu/isolated", "2-3\n")
                .with("proc/7/cgroup", "0::/vm\n")
                .with("proc/7/task/7/cgroup", "0::/vm\n")
                .with("proc/7/task/7/comm", "qemu\n")
                .with("proc/7/task/7/status", "Cpus_allowed_list:\t0\n")
                .with("proc/7/task/7/schedstat", ran)
        };
        let before = with("100 10 1", "5");
        let before = Before::read(&before.host(), [7]);
        let live = before.until_now(&with("150 40 2", "9").host(), &facts());
        assert_eq!(
            (live.threads[0].ran_ns, live.threads[0].waited_ns),
            (50, 30)
        );
        assert_eq!(live.levels[0].used_us, 4);
        assert_eq!(live.isolated, BTreeSet::from([2, 3]));
        assert_eq!(live.place_of[&7].path, "/vm");
    }
}
