// SPDX-License-Identifier: GPL-2.0-only
//! Windows that follow each other, taken together as one: a few seconds of this host, or a day of a recording. Which
//! questions are asked of it is not decided here.

use crate::observer::view::{HostView, PressureView, VcpuView, VmView};
use std::collections::{BTreeMap, BTreeSet};

/// A VM in the windows in which it ran.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VmSpan {
    /// How long those windows were together, ms.
    pub ms: u64,
    /// What it did in them.
    pub vm: VmView,
    /// The vCPU that was without a CPU for the longest single time.
    pub stalled_vcpu: u32,
    /// The host's pressure in the window in which that was seen; `None` where it is not counted.
    pub pressure: Option<PressureView>,
}

/// Windows that follow each other.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Span {
    /// How many.
    pub windows: u64,
    /// How long they were together, ms.
    pub ms: u64,
    /// When the last one ended, ms since 1970 (UTC); 0 if not known.
    pub until_ms: u64,
    /// What scheduled the host.
    pub schedulers: BTreeSet<String>,
    /// CPUs online at its end.
    pub cpus: u32,
    /// vCPUs per CPU, at the mean.
    pub overcommitment: f64,
    /// CPUs that vCPUs had or waited for, at the mean.
    pub wanted_cpus: f64,
    /// What is not seen on this host, in words.
    pub blind_spots: BTreeSet<String>,
    /// Fields that cannot be had because of that in some window.
    pub unseen: BTreeSet<String>,
    /// VMs by process.
    pub vms: BTreeMap<u32, VmSpan>,
}

/// The mean of `a`, of weight `of_a`, and `b`, of weight `of_b`.
fn mean(a: f64, of_a: f64, b: f64, of_b: f64) -> f64 {
    match of_a + of_b {
        0.0 => 0.0,
        both => (a * of_a + b * of_b) / both,
    }
}

impl Span {
    /// Takes the window that comes next.
    pub fn add(&mut self, view: &HostView) {
        self.add_host(view);
        let pressure = view.has("pressure").then_some(view.pressure);
        for (&tgid, vm) in &view.vms {
            let span = self.vms.entry(tgid).or_default();
            span.add(vm, view.window_ms, pressure);
        }
    }

    /// Takes of it what is told of the host, and not of each VM.
    pub fn add_host(&mut self, view: &HostView) {
        let (before, ms) = (self.ms as f64, view.window_ms as f64);
        let of_vm = |vm: &VmView| {
            let all = &vm.all;
            let part = all.on_cpu_pct + all.ready_pct + all.limited_pct;
            part / 100.0 * f64::from(all.vcpus)
        };
        let wanted_cpus: f64 = view.vms.values().map(of_vm).sum();
        self.wanted_cpus = mean(self.wanted_cpus, before, wanted_cpus, ms);
        self.overcommitment = mean(self.overcommitment, before, view.overcommitment, ms);
        self.windows += 1;
        self.ms += view.window_ms;
        self.until_ms = view.ended_ms;
        self.cpus = view.cpus;
        self.schedulers.insert(view.scheduler.clone());
        self.blind_spots.extend(view.blind_spots.iter().cloned());
        self.unseen.extend(view.unseen.iter().cloned());
    }

    /// Whether a field of vCPUs could be had all the time.
    pub fn has(&self, field: &str) -> bool {
        !self.unseen.contains(field)
    }

    /// What scheduled the host, in words.
    pub fn scheduler(&self) -> String {
        let names: Vec<&str> = self.schedulers.iter().map(String::as_str).collect();
        names.join(" and ")
    }

    /// Whether the kernel's own scheduler had the host all the time.
    pub fn is_stock(&self) -> bool {
        self.schedulers.iter().all(|name| name == "stock")
    }
}

impl VmSpan {
    fn add(&mut self, vm: &VmView, ms: u64, pressure: Option<PressureView>) {
        if vm.all.longest_off_cpu.us > self.vm.all.longest_off_cpu.us {
            let longest = vm
                .vcpus
                .iter()
                .max_by_key(|(_, vcpu)| vcpu.longest_off_cpu.us);
            self.stalled_vcpu = longest.map_or(0, |(&number, _)| number);
            self.pressure = pressure;
        }
        self.vm.name.clone_from(&vm.name);
        self.vm.identity.clone_from(&vm.identity);
        add(&mut self.vm.all, self.ms, &vm.all, ms);
        for (&number, vcpu) in &vm.vcpus {
            let own = self.vm.vcpus.entry(number).or_default();
            add(own, self.ms, vcpu, ms);
        }
        for taker in &vm.takers {
            let mut takers = self.vm.takers.iter_mut();
            match takers.find(|own| (&own.kind, own.id) == (&taker.kind, taker.id)) {
                Some(own) => {
                    own.name.clone_from(&taker.name);
                    own.times += taker.times;
                    own.ready_us += taker.ready_us;
                }
                None => self.vm.takers.push(taker.clone()),
            }
        }
        let by_time = |taker: &crate::observer::view::TakerView| std::cmp::Reverse(taker.ready_us);
        self.vm.takers.sort_by_key(by_time);
        self.ms += ms;
    }
}

/// Adds to `all`, which lasted `all_ms`, what was seen in the `ms` after it.
fn add(all: &mut VcpuView, all_ms: u64, next: &VcpuView, ms: u64) {
    let weight = |ms: u64, view: &VcpuView| ms as f64 * f64::from(view.vcpus);
    let (before, after) = (weight(all_ms, all), weight(ms, next));
    let ready = |weight: f64, view: &VcpuView| weight * view.ready_pct;
    all.stacked_pct = mean(
        all.stacked_pct,
        ready(before, all),
        next.stacked_pct,
        ready(after, next),
    );
    for (own, other) in [
        (&mut all.run_pct, next.run_pct),
        (&mut all.ready_pct, next.ready_pct),
        (&mut all.limited_pct, next.limited_pct),
        (&mut all.halted_pct, next.halted_pct),
        (&mut all.halted_unread_pct, next.halted_unread_pct),
        (&mut all.on_cpu_pct, next.on_cpu_pct),
        (&mut all.away_pct, next.away_pct),
        (&mut all.poll_pct, next.poll_pct),
        (&mut all.spin_pct, next.spin_pct),
        (&mut all.entitled_pct, next.entitled_pct),
    ] {
        *own = mean(*own, before, other, after);
    }
    for (own, other) in [
        (&mut all.spin_exits, next.spin_exits),
        (&mut all.yields_offered, next.yields_offered),
        (&mut all.yields_served, next.yields_served),
        (&mut all.yields_not_ready, next.yields_not_ready),
        (&mut all.yields_refused, next.yields_refused),
        (&mut all.ipis, next.ipis),
        (&mut all.ipi_to_run_us, next.ipi_to_run_us),
        (&mut all.wakeups, next.wakeups),
        (&mut all.migrations, next.migrations),
        (&mut all.migrations_far, next.migrations_far),
        (&mut all.preempted_user, next.preempted_user),
        (&mut all.preempted_kernel, next.preempted_kernel),
    ] {
        *own += other;
    }
    for (own, other) in [
        (&mut all.ipi_to_run, &next.ipi_to_run),
        (&mut all.ready_us, &next.ready_us),
    ] {
        own.resize(own.len().max(other.len()), 0);
        own.iter_mut()
            .zip(other)
            .for_each(|(own, other)| *own += other);
    }
    all.longest_ipi_us = all.longest_ipi_us.max(next.longest_ipi_us);
    all.longest_ready_us = all.longest_ready_us.max(next.longest_ready_us);
    if next.longest_off_cpu.us > all.longest_off_cpu.us {
        all.longest_off_cpu.clone_from(&next.longest_off_cpu);
    }
    all.vcpus = next.vcpus;
    all.halted_by.clone_from(&next.halted_by);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observer::view::{OffCpuView, TakerView};

    /// A VM of two vCPUs that waited for `ready_pct`, the second of them once for `off_us`.
    fn window(window_ms: u64, ready_pct: f64, off_us: u64) -> HostView {
        let vcpu = |us| VcpuView {
            vcpus: 1,
            ready_pct,
            ready_us: vec![0, 3],
            wakeups: 5,
            longest_off_cpu: OffCpuView {
                us,
                ..OffCpuView::default()
            },
            ..VcpuView::default()
        };
        let all = VcpuView {
            vcpus: 2,
            ..vcpu(off_us)
        };
        let vm = VmView {
            all,
            vcpus: BTreeMap::from([(0, vcpu(0)), (1, vcpu(off_us))]),
            takers: vec![TakerView {
                times: 2,
                ready_us: 7,
                ..TakerView::default()
            }],
            ..VmView::default()
        };
        HostView {
            window_ms,
            pressure: PressureView {
                io_some_pct: ready_pct,
                ..PressureView::default()
            },
            vms: BTreeMap::from([(7, vm)]),
            ..HostView::default()
        }
    }

    #[test]
    fn parts_of_time_are_weighted_and_counts_are_added() {
        let mut span = Span::default();
        span.add(&window(1000, 10.0, 0));
        span.add(&window(3000, 50.0, 0));
        let vm = &span.vms[&7];
        assert_eq!((span.ms, vm.ms), (4000, 4000));
        assert_eq!(vm.vm.all.ready_pct, 40.0);
        assert_eq!(vm.vm.vcpus[&1].ready_pct, 40.0);
        assert_eq!((vm.vm.all.wakeups, vm.vm.all.ready_us[1]), (10, 6));
        assert_eq!((vm.vm.takers.len(), vm.vm.takers[0].ready_us), (1, 14));
        assert_eq!(span.wanted_cpus, 0.8);
    }

    #[test]
    fn a_vm_is_judged_by_the_windows_in_which_it_ran() {
        let mut span = Span::default();
        span.add(&HostView {
            window_ms: 9000,
            ..HostView::default()
        });
        span.add(&window(1000, 10.0, 0));
        assert_eq!(span.vms[&7].vm.all.ready_pct, 10.0);
        assert_eq!((span.ms, span.vms[&7].ms), (10_000, 1000));
    }

    #[test]
    fn the_longest_stretch_keeps_its_vcpu_and_the_pressure_of_its_window() {
        let mut span = Span::default();
        span.add(&window(1000, 10.0, 300));
        span.add(&window(1000, 20.0, 900));
        span.add(&window(1000, 30.0, 200));
        let vm = &span.vms[&7];
        assert_eq!((vm.stalled_vcpu, vm.vm.all.longest_off_cpu.us), (1, 900));
        assert_eq!(vm.pressure.map(|then| then.io_some_pct), Some(20.0));
    }
}
