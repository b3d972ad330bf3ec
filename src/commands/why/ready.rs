// SPDX-License-Identifier: GPL-2.0-only
//! Do its vCPUs wait for CPUs, and who has those meanwhile?

use super::facts::Facts;
use super::words::duration;
use crate::commands::finding::{Finding, Severity};
use crate::observer::view::{TakerView, VcpuView};

const CHECK: &str = "ready-time";
/// Guests notice it from here on, in percent of the time.
const NOTICED_PCT: f64 = 5.0;
/// A single wait of this length is noticed too.
const NOTICED_US: u64 = 50_000;
/// A VM that gets less than it is entitled to by more than this is robbed, in percent of a CPU per vCPU.
const ROBBED_PCT: f64 = 5.0;
/// So many are named.
const MOST: usize = 4;

pub fn finding(facts: &Facts) -> Finding {
    let (all, vm) = (facts.all(), &facts.vm.vm);
    let most = vm.vcpus.values().map(|vcpu| vcpu.ready_pct);
    let most = most.fold(all.ready_pct, f64::max);
    let longest_us = all.longest_off_cpu.ready_us;
    let time = format!(
        "of the time its vCPUs ran {:.1} %, were halted {:.1} %, slept in the VMM {:.1} %",
        all.run_pct, all.halted_pct, all.away_pct
    );
    let waited = format!(
        "waited {:.1} % of the time for a CPU ({}; at most {} at once)",
        all.ready_pct,
        of_vcpus(vm.vcpus.iter()),
        duration(longest_us)
    );
    if most < NOTICED_PCT && longest_us < NOTICED_US {
        return Finding::fine(CHECK, format!("not the scheduler: they {waited}; {time}"));
    }
    let takers = match takers(&vm.takers) {
        text if text.is_empty() => String::from("nobody took a CPU that it had"),
        text => format!("their CPUs were taken by {text}"),
    };
    let robbed = facts.span.has("entitled_pct") && all.on_cpu_pct + ROBBED_PCT < all.entitled_pct;
    let (why, mend) = match robbed {
        true => (
            format!(
                "it got {:.1} % of a CPU per vCPU and is entitled to {:.1} %: others have its part",
                all.on_cpu_pct, all.entitled_pct
            ),
            "move work off this host, or have it divided by weight: `cohort compare` shows what Cohort would change",
        ),
        false => (
            format!(
                "it got what it is entitled to ({:.1} % of a CPU per vCPU) and wants more; {:.1} CPUs were wanted on this host of \
                 {}",
                all.entitled_pct, facts.span.wanted_cpus, facts.span.cpus
            ),
            "raise its cpu.weight if others may have less, give it fewer vCPUs, or move VMs off this host",
        ),
    };
    Finding::new(
        CHECK,
        Severity::Warning,
        format!("its vCPUs {waited}; {takers}"),
        why,
        mend,
    )
}

/// "vCPU 1 46.0 %, vCPU 0 44.2 %": those that waited most.
fn of_vcpus<'a>(vcpus: impl Iterator<Item = (&'a u32, &'a VcpuView)>) -> String {
    let mut vcpus: Vec<_> = vcpus.collect();
    vcpus.sort_by(|a, b| b.1.ready_pct.total_cmp(&a.1.ready_pct));
    let named = vcpus.iter().take(MOST);
    let named: Vec<String> = named
        .map(|(number, vcpu)| format!("vCPU {number} {:.1} %", vcpu.ready_pct))
        .collect();
    let rest = match vcpus.len().saturating_sub(MOST) {
        0 => "",
        _ => ", others less",
    };
    named.join(", ") + rest
}

fn takers(takers: &[TakerView]) -> String {
    let named = takers.iter().take(MOST);
    let named: Vec<String> = named
        .map(|taker| {
            let what = match taker.kind.as_str() {
                "vm" => format!("VM {}", taker.name),
                "cgroup" => format!("cgroup {}", taker.name),
                _ => taker.name.clone(),
            };
            let waited = duration(taker.ready_us);
            format!("{what} ({} times, {waited} of waiting)", taker.times)
        })
        .collect();
    named.join(", ")
}

#[cfg(test)]
mod tests {
    use super::super::facts::fixture::facts;
    use super::*;

    fn taken() -> Facts {
        let mut facts = facts();
        let vm = &mut facts.vm.vm;
        vm.all.ready_pct = 40.0;
        vm.all.longest_off_cpu.ready_us = 12_000;
        for (number, vcpu) in &mut vm.vcpus {
            vcpu.ready_pct = 35.0 + 10.0 * f64::from(*number);
        }
        vm.takers = vec![TakerView {
            kind: String::from("vm"),
            name: String::from("db"),
            times: 30,
            ready_us: 3_000_000,
            ..TakerView::default()
        }];
        facts
    }

    #[test]
    fn a_vm_that_does_not_wait_has_another_problem() {
        let finding = finding(&facts());
        assert_eq!(finding.severity, Severity::Fine);
        assert!(finding.seen.starts_with("not the scheduler"), "{finding:?}");
        assert!(finding.seen.contains("halted 75.0 %"), "{finding:?}");
    }

    #[test]
    fn who_took_the_cpus_is_named_and_the_vcpu_that_waits_most_comes_first() {
        let finding = finding(&taken());
        assert_eq!(finding.severity, Severity::Warning);
        assert!(
            finding.seen.contains("vCPU 1 45.0 %, vCPU 0 35.0 %"),
            "{finding:?}"
        );
        assert!(
            finding.seen.contains("VM db (30 times, 3.0 s of waiting)"),
            "{finding:?}"
        );
        assert!(finding.why.contains("wants more"), "{finding:?}");
    }

    #[test]
    fn a_robbed_vm_is_told_from_one_that_wants_more() {
        let mut facts = taken();
        facts.vm.vm.all.entitled_pct = 65.0;
        assert!(finding(&facts).why.contains("others have its part"));
    }

    #[test]
    fn one_vcpu_that_waits_is_found_and_so_is_one_long_wait() {
        let mut one = facts();
        one.vm.vm.vcpus.entry(1).or_default().ready_pct = 6.0;
        assert_eq!(finding(&one).severity, Severity::Warning);
        let mut long = facts();
        long.vm.vm.all.longest_off_cpu.ready_us = 80_000;
        assert_eq!(finding(&long).severity, Severity::Warning);
    }
}
