// SPDX-License-Identifier: GPL-2.0-only
//! Is a workload worth measuring here? One VM alone must gain from its second CPU, or its figures say more about
//! the emulation than about a scheduler. Not for comparing schedulers.
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::bench::Options;
use super::booted::{GuestSpec, Workload, start_all};
use super::info::LabInfo;
use super::windows::{Subject, measure_alone, operations};
use crate::guest::OWN_WORKLOADS;
use cohort::compare::statistics::median;

const BOOT_TIMEOUT: Duration = Duration::from_secs(120);
const REQUIRED_GAIN: f64 = 1.5;

/// Measures each of `workloads` with one thread and with one per vCPU, prints the gains and judges them.
///
/// # Errors
/// When a workload is not our own, or one that must gain gains less than 1.5 times.
pub fn run(lab: &LabInfo, workloads: &[String], options: &Options) -> Result<()> {
    for workload in workloads {
        ensure!(
            OWN_WORKLOADS.contains(&workload.as_str()),
            "\"{workload}\" cannot be calibrated, only our own workloads can: {}",
            OWN_WORKLOADS.join(", ")
        );
    }
    println!(
        "{:<10} {:>14} {:>14} {:>6}",
        "workload", "1 thread op/s", "2 threads op/s", "gain"
    );
    let mut too_little = Vec::new();
    for workload in workloads {
        let [one, two] = rates(lab, workload, options)?;
        let gain = two / one;
        println!("{workload:<10} {one:>14.0} {two:>14.0} {gain:>6.2}");
        if must_gain(workload) && gain < REQUIRED_GAIN {
            too_little.push(workload.as_str());
        }
    }
    println!("{}", lab.describe());
    ensure!(
        too_little.is_empty(),
        "Too little gain from a second CPU (less than {REQUIRED_GAIN}) for {}: raise the work per operation (--work) \
         or the dilation",
        too_little.join(", ")
    );
    Ok(())
}

/// The two ends of a pipe take turns, and grace periods take their time, so a second CPU cannot help.
fn must_gain(workload: &str) -> bool {
    !["pipe", "rcu"].contains(&workload)
}

/// Operations per second with one thread and with two, each VM alone while the other is frozen.
fn rates(lab: &LabInfo, workload: &str, options: &Options) -> Result<[f64; 2]> {
    let specs = [1, 2].map(|threads| {
        let workload = Workload {
            threads: Some(threads),
            ..options.workload(workload)
        };
        GuestSpec {
            paravirtual: options.paravirtual,
            ..GuestSpec::new(&format!("{}-{threads}", workload.name), 2, workload)
        }
    });
    let mut guests = start_all(lab, specs.to_vec(), BOOT_TIMEOUT)?;
    let mut rates = [0.0; 2];
    for (index, rate) in rates.iter_mut().enumerate() {
        let rates = (0..options.pairs).map(|_| {
            let measured = measure_alone(&mut guests, index, options.timing());
            let (_, numbers) = measured.with_context(|| guests[index].situation())?;
            Ok(numbers[&operations()])
        });
        *rate = median(&rates.collect::<Result<Vec<_>>>()?);
    }
    Ok(rates)
}
