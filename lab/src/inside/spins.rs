// SPDX-License-Identifier: GPL-2.0-only
//! How often vCPUs leave their guests because they spin (pause-loop exits). The kernel counts VM exits by their reason, by a
//! histogram of its tracepoint `kvm_exit`.
use std::fs;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};

const TRIGGER: &str = "/sys/kernel/tracing/events/kvm/kvm_exit/trigger";
const HISTOGRAM: &str = "/sys/kernel/tracing/events/kvm/kvm_exit/hist";
/// KVM's part for Intel's CPUs, if it is loaded.
const KVM_OF_INTEL: &str = "/sys/module/kvm_intel";
const BY_REASON: &str = "hist:keys=exit_reason";
/// SVM's `SVM_EXIT_PAUSE`, VMX's `EXIT_REASON_PAUSE_INSTRUCTION` (arch/x86/include/uapi/asm/svm.h, vmx.h).
const REASON_SVM: u64 = 0x77;
const REASON_VMX: u64 = 40;

/// The kernel counts while this lives, which makes each VM exit somewhat longer.
pub struct Counting {
    reason: u64,
    since: Instant,
}

impl Counting {
    /// Begins to count.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn start() -> Result<Self> {
        fs::write(TRIGGER, BY_REASON).with_context(|| format!("{TRIGGER} cannot be set"))?;
        Ok(Self {
            // What the cell says of the vendor counts on the exact machine only.
            reason: if Path::new(KVM_OF_INTEL).exists() {
                REASON_VMX
            } else {
                REASON_SVM
            },
            since: Instant::now(),
        })
    }

    /// Pause-loop exits per second since, of all VMs.
    ///
    /// # Errors
    /// When the kernel's histogram cannot be read.
    pub fn finish(self) -> Result<f64> {
        let seconds = self.since.elapsed().as_secs_f64();
        let text =
            fs::read_to_string(HISTOGRAM).with_context(|| format!("{HISTOGRAM} cannot be read"))?;
        Ok(hits(&text, self.reason)? as f64 / seconds)
    }
}

impl Drop for Counting {
    fn drop(&mut self) {
        // It would only be slower.
        let _ = fs::write(TRIGGER, format!("!{BY_REASON}"));
    }
}

/// How often `reason` stands in the kernel's histogram. A reason that did not occur has no line.
fn hits(histogram: &str, reason: u64) -> Result<u64> {
    let number = |text: &str| text.trim().parse::<u64>().ok();
    for line in histogram.lines() {
        // { exit_reason:        119 } hitcount:       1234
        let Some((key, count)) = line.split_once("} hitcount:") else {
            continue;
        };
        let key = key.trim_start().strip_prefix("{ exit_reason:");
        if key.and_then(number) == Some(reason) {
            return number(count).with_context(|| format!("This line has no count: {line}"));
        }
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exits_are_counted_by_their_reason() {
        let histogram = "# event histogram\n#\n# trigger info: hist:keys=exit_reason:vals=hitcount:sort=hitcount:size=2048 [active]\n#\n\n\
                         { exit_reason:        119 } hitcount:         12\n{ exit_reason:         40 } hitcount:          7\n\n\
                         Totals:\n    Hits: 19\n    Entries: 2\n    Dropped: 0\n";
        assert_eq!(hits(histogram, REASON_SVM).unwrap(), 12);
        assert_eq!(hits(histogram, REASON_VMX).unwrap(), 7);
        assert_eq!(hits("# event histogram\n", REASON_VMX).unwrap(), 0);
        assert!(hits("{ exit_reason: 119 } hitcount: many", REASON_SVM).is_err());
    }
}
