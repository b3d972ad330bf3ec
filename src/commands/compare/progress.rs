// SPDX-License-Identifier: GPL-2.0-only
//! How far each VM gets, relative to what it is entitled to: numbers in, numbers out. Not for measuring or printing.
//!
//! A sum of operations flatters a scheduler that starves one VM to please the others. A VM's *progress* is its rate,
//! divided by its fair part of what it does alone on the same CPUs: 1 is exactly its own, whatever its size, weight and
//! work. The harmonic mean over the VMs is low when one of them gets little, so it shows efficiency and fairness in one
//! number (Luo, Gummaraju and Franklin, "Balancing throughput and fairness in SMT processors", ISPASS 2001; Eyerman and
//! Eeckhout, "System-level performance metrics for multiprogram workloads", IEEE Micro 2008, where its inverse is the
//! average normalised turnaround time).
use crate::observer::view::{HostView, VcpuView};
use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

/// A VM that asked for less is idle: a single wait would be most of its progress. Percent of a CPU.
const IDLE_PCT: f64 = 1.0;

/// What one VM did in a window, and what it is measured by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct VmRate {
    /// Operations per second beside the others.
    pub rate: f64,
    /// Operations per second alone on the same CPUs.
    pub alone: f64,
    /// The part of what it uses alone that it is entitled to beside the others, above 0, at most 1.
    pub share: f64,
}

impl VmRate {
    /// What the observer saw of `vm`, all vCPUs of a VM of `host`, in percent of a CPU: CPU time without spinning, against
    /// what it was entitled to. None of a VM that is idle, or whose entitlement is not known.
    ///
    /// What it would use alone is estimated: what it ran and waited for, at most all CPUs. A cap would stop it alone, too.
    pub fn seen(host: &HostView, vm: &VcpuView) -> Option<Self> {
        let of_vm = |pct: f64| pct * f64::from(vm.vcpus);
        let wanted = of_vm(vm.run_pct + vm.ready_pct);
        let asked = wanted + of_vm(vm.limited_pct);
        let entitled = of_vm(vm.entitled_pct);
        if asked < IDLE_PCT || entitled <= 0.0 {
            return None;
        }
        let all_cpus = 100.0 * f64::from(host.cpus);
        // An entitlement is of what a cap leaves of the whole window, so it may be more.
        let alone = wanted.min(all_cpus).max(entitled);
        Some(Self {
            // Where spinning is not seen it is 0. It is measured in samples, so it may seem to be more than all.
            rate: of_vm(vm.run_pct - vm.spin_pct).max(0.0),
            alone,
            share: entitled / alone,
        })
    }
}

/// How to read the progress of VMs that are seen on this `host`, in sentences.
pub fn remarks(host: &HostView) -> Vec<String> {
    if !host.has("entitled_pct") {
        let sentence = "Progress of VMs is not known: what they are entitled to is not (cgroups of version 1).";
        return vec![sentence.into()];
    }
    let useful = match host.has("spin_pct") {
        true => "CPU time without spinning (%RUN less %SPIN)",
        false => "CPU time (%RUN), spinning included as it is not seen here",
    };
    vec![
        format!("Progress is {useful}, in percent of what a VM was entitled to; idle VMs have none."),
        "Its mean over VMs is harmonic, low when one gets little; its sum is in VMs: 1 is all that one would do alone."
            .into(),
    ]
}

/// The progress of VMs that ran side by side in one window.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Progress {
    /// Of each VM, in their order: 1 is its fair part of what it does alone.
    pub of_each: Vec<f64>,
    /// The harmonic mean of them; 0 when one stood still.
    pub harmonic_mean: f64,
    /// The least of them.
    pub least: f64,
    /// All rates, each as a part of what that VM does alone: how many VMs' work was done.
    pub sum: f64,
}

impl Progress {
    /// Computes it from one or more VMs.
    ///
    /// # Errors
    /// When there is no VM, or one that did nothing alone or is entitled to nothing.
    pub fn of(vms: &[VmRate]) -> Result<Self> {
        ensure!(
            !vms.is_empty(),
            "There is no VM whose progress could be told"
        );
        for vm in vms {
            ensure!(
                vm.alone > 0.0 && vm.share > 0.0 && vm.rate >= 0.0,
                "Progress cannot be told from {} operations/s, {} alone and a share of {}",
                vm.rate,
                vm.alone,
                vm.share
            );
        }
        let of_each: Vec<f64> = vms
            .iter()
            .map(|vm| vm.rate / (vm.alone * vm.share))
            .collect();
        // 1/0 is infinite, and the mean 0 then.
        let inverses: f64 = of_each.iter().map(|progress| progress.recip()).sum();
        Ok(Self {
            harmonic_mean: of_each.len() as f64 / inverses,
            least: of_each.iter().copied().fold(f64::INFINITY, f64::min),
            sum: vms.iter().map(|vm| vm.rate / vm.alone).sum(),
            of_each,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vm(rate: f64, alone: f64, share: f64) -> VmRate {
        VmRate { rate, alone, share }
    }

    #[test]
    fn each_vm_with_its_own_is_one_whatever_its_size() {
        let progress = Progress::of(&[vm(50.0, 100.0, 0.5), vm(750.0, 1000.0, 0.75)]).unwrap();
        assert_eq!(progress.of_each, [1.0, 1.0]);
        assert_eq!((progress.harmonic_mean, progress.least), (1.0, 1.0));
        assert_eq!(progress.sum, 1.25);
    }

    #[test]
    fn starving_one_vm_lowers_the_mean_though_the_sum_stays() {
        let fair = Progress::of(&[vm(50.0, 100.0, 0.5), vm(50.0, 100.0, 0.5)]).unwrap();
        let unfair = Progress::of(&[vm(75.0, 100.0, 0.5), vm(25.0, 100.0, 0.5)]).unwrap();
        assert_eq!(fair.sum, unfair.sum);
        assert_eq!(unfair.of_each, [1.5, 0.5]);
        assert!((unfair.harmonic_mean - 0.75).abs() < 1e-12);
        assert_eq!(unfair.least, 0.5);
        let starved = Progress::of(&[vm(100.0, 100.0, 0.5), vm(0.0, 100.0, 0.5)]).unwrap();
        assert_eq!((starved.harmonic_mean, starved.sum), (0.0, 1.0));
    }

    fn host() -> HostView {
        HostView {
            cpus: 2,
            ..HostView::default()
        }
    }

    /// Two vCPUs that ran, waited and were entitled to so much.
    fn two_vcpus(run_pct: f64, ready_pct: f64, entitled_pct: f64) -> VcpuView {
        VcpuView {
            vcpus: 2,
            run_pct,
            ready_pct,
            entitled_pct,
            ..VcpuView::default()
        }
    }

    fn progress_seen(vm: &VcpuView) -> Progress {
        let seen = VmRate::seen(&host(), vm).expect("it is not idle");
        Progress::of(&[seen]).expect("it is entitled to something")
    }

    #[test]
    fn what_is_seen_is_cpu_time_against_the_entitlement() {
        // Two like this one want two CPUs.
        let progress = progress_seen(&two_vcpus(25.0, 75.0, 50.0));
        assert_eq!((progress.least, progress.sum), (0.5, 0.25));
    }

    #[test]
    fn spinning_is_no_progress() {
        let spins = VcpuView {
            spin_pct: 20.0,
            ..two_vcpus(50.0, 50.0, 50.0)
        };
        assert!((progress_seen(&spins).least - 0.6).abs() < 1e-12);
        // What is sampled may be too much.
        let only = VcpuView {
            spin_pct: 51.0,
            ..spins
        };
        assert_eq!(progress_seen(&only).least, 0.0);
    }

    #[test]
    fn a_vm_that_gets_the_little_that_it_asks_for_is_where_it_should_be() {
        let progress = progress_seen(&two_vcpus(3.0, 0.0, 3.0));
        assert_eq!((progress.least, progress.sum), (1.0, 1.0));
    }

    #[test]
    fn alone_a_vm_has_no_more_than_all_cpus_and_its_cap() {
        let wide = VcpuView {
            vcpus: 4,
            ..two_vcpus(25.0, 75.0, 25.0)
        };
        assert_eq!(progress_seen(&wide).sum, 0.5);
        let capped = VcpuView {
            limited_pct: 75.0,
            ..two_vcpus(25.0, 0.0, 25.0)
        };
        let progress = progress_seen(&capped);
        assert_eq!((progress.least, progress.sum), (1.0, 1.0));
    }

    #[test]
    fn idle_vms_are_left_out_and_starved_ones_are_not() {
        assert!(VmRate::seen(&host(), &two_vcpus(0.2, 0.2, 0.4)).is_none());
        assert!(VmRate::seen(&host(), &VcpuView::default()).is_none());
        assert_eq!(progress_seen(&two_vcpus(0.0, 100.0, 50.0)).least, 0.0);
        // Where entitlements are not known, they are 0.
        assert!(VmRate::seen(&host(), &two_vcpus(50.0, 50.0, 0.0)).is_none());
    }

    #[test]
    fn what_cannot_be_seen_is_said() {
        let without = |field: &str| HostView {
            unseen: vec![field.into()],
            ..host()
        };
        let said = |host: &HostView| remarks(host).join(" ");
        assert!(said(&host()).contains("less %SPIN"));
        assert!(said(&without("spin_pct")).contains("spinning included"));
        assert!(said(&without("entitled_pct")).contains("not known"));
    }

    #[test]
    fn what_cannot_be_told_is_an_error() {
        assert!(Progress::of(&[]).is_err());
        assert!(Progress::of(&[vm(1.0, 0.0, 0.5)]).is_err());
        assert!(Progress::of(&[vm(1.0, 1.0, 0.0)]).is_err());
        assert!(Progress::of(&[vm(f64::NAN, 1.0, 1.0)]).is_err());
    }
}
