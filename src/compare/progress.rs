// SPDX-License-Identifier: GPL-2.0-only
//! How far each VM gets, relative to what it is entitled to: numbers in, numbers out. Not for measuring or printing.
//!
//! A sum of operations flatters a scheduler that starves one VM to please the others. A VM's *progress* is its rate,
//! divided by its fair part of what it does alone on the same CPUs: 1 is exactly its own, whatever its size, weight and
//! work. The harmonic mean over the VMs is low when one of them gets little, so it shows efficiency and fairness in one
//! number (Luo, Gummaraju and Franklin, "Balancing throughput and fairness in SMT processors", ISPASS 2001; Eyerman and
//! Eeckhout, "System-level performance metrics for multiprogram workloads", IEEE Micro 2008, where its inverse is the
//! average normalised turnaround time).
use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

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

    #[test]
    fn what_cannot_be_told_is_an_error() {
        assert!(Progress::of(&[]).is_err());
        assert!(Progress::of(&[vm(1.0, 0.0, 0.5)]).is_err());
        assert!(Progress::of(&[vm(1.0, 1.0, 0.0)]).is_err());
        assert!(Progress::of(&[vm(f64::NAN, 1.0, 1.0)]).is_err());
    }
}
