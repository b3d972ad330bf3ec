// SPDX-License-Identifier: GPL-2.0-only
//! The guest marked its clock as unstable: was a vCPU away for long enough, or is the host's own clock at fault?

use super::facts::Facts;
use super::stalls::cause;
use super::words::duration;
use crate::commands::finding::{Finding, Severity};
use crate::host::arch;

const CHECK: &str = "clock";
/// By so much two clocks may differ before Linux distrusts one (`WATCHDOG_THRESHOLD` of kernel/time/clocksource.c, a
/// sixteenth of a second; later kernels allow less, but read again when they were interrupted).
const DISTRUST_US: u64 = 62_500;

pub fn finding(facts: &Facts) -> Finding {
    let off = &facts.all().longest_off_cpu;
    let host = facts.live.as_ref().map(|live| live.clocksource.as_str());
    let (own, called) = arch::CLOCKSOURCE;
    if let Some(clocksource) = host
        && clocksource != own
    {
        return Finding::new(
            CHECK,
            Severity::Warning,
            format!("the host itself takes its time from {clocksource:?}, not from the {called}"),
            format!(
                "the host's kernel does not trust its {called}; then KVM's clock is not stable for any guest"
            ),
            "journalctl -k -g clocksource, on the host, says why",
        );
    }
    let longest = format!(
        "the longest time that a vCPU was without a CPU is {} in {}",
        duration(off.us),
        facts.time()
    );
    if off.us < DISTRUST_US {
        let host = host.map_or(String::new(), |_| {
            format!(", and the host trusts its {called}")
        });
        return Finding::fine(CHECK, format!("ruled out for this time: {longest}{host}"));
    }
    let (cause, mend) = cause(off, facts);
    Finding::new(
        CHECK,
        Severity::Warning,
        format!("{longest} (vCPU {}): {cause}", facts.vm.stalled_vcpu),
        "a guest compares two clocks twice a second; a vCPU that is away for 62.5 ms or more between the two readings makes one look \
         wrong",
        mend,
    )
}

#[cfg(test)]
mod tests {
    use super::super::facts::fixture::{facts, live};
    use super::*;

    #[test]
    fn it_is_ruled_out_or_the_longest_absence_is_told() {
        let mut facts = facts();
        facts.vm.vm.all.longest_off_cpu.us = 12_000;
        let fine = finding(&facts);
        assert_eq!(fine.severity, Severity::Fine);
        assert!(fine.seen.starts_with("ruled out") && fine.seen.contains("12 ms"));
        let off = &mut facts.vm.vm.all.longest_off_cpu;
        (off.us, off.ready_us) = (90_000, 90_000);
        let found = finding(&facts);
        assert_eq!(found.severity, Severity::Warning);
        assert!(found.seen.contains("90 ms") && found.seen.contains("waited"));
    }

    #[test]
    fn a_host_that_does_not_trust_its_tsc_is_the_reason() {
        let mut facts = facts();
        live(&mut facts).clocksource = String::from("hpet");
        assert!(finding(&facts).seen.contains("hpet"));
    }
}
