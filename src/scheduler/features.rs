// SPDX-License-Identifier: GPL-2.0-only
//! What a kernel offers to a scheduler, found out when Cohort is loaded, and in words what it lacks. By what there is, never by
//! version numbers: distributions take features over. Not for what KVM shows (`sight.rs`), nor for what is only called
//! something else on older kernels (scx's compat.bpf.h).

use libbpf_rs::libbpf_sys::{self, BPF_FUNC_perf_event_read_value, BPF_PROG_TYPE_XDP};
use scx_utils::compat::struct_has_field;

/// What can be done without.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Features {
    /// The CPU's counters can be read where tasks are switched: since Linux 7.2.
    pub reads_counters: bool,
    /// The kernel tells of cpu.max: since Linux 6.17.
    pub tells_caps: bool,
}

impl Features {
    /// Of the kernel that runs.
    pub fn of_this_kernel() -> Self {
        Self {
            reads_counters: base_programs_read_counters(),
            tells_caps: struct_has_field("sched_ext_ops", "cgroup_set_bandwidth").unwrap_or(false),
        }
    }

    /// A sentence for each thing that is missing or only approximate.
    pub fn blind_spots(self) -> Vec<String> {
        let mut spots = Vec::new();
        if !self.reads_counters {
            spots.push(String::from(
                "the mechanism halted has no effect: this kernel does not let schedulers read the CPU's counters (Linux \
                 7.2 and later do)",
            ));
        }
        if !self.tells_caps {
            spots.push(String::from(
                "changes of cpu.max are seen once a second: this kernel does not tell schedulers of them (Linux 6.17 and \
                 later do)",
            ));
        }
        spots
    }
}

/// sched_ext's programs may call what programs of all types may. XDP's have nothing else that reads counters.
fn base_programs_read_counters() -> bool {
    // SAFETY: plain numbers, and no options.
    let answer = unsafe {
        libbpf_sys::libbpf_probe_bpf_helper(
            BPF_PROG_TYPE_XDP,
            BPF_FUNC_perf_event_read_value,
            std::ptr::null(),
        )
    };
    answer == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_said() {
        let all = Features {
            reads_counters: true,
            tells_caps: true,
        };
        assert!(all.blind_spots().is_empty());
        let old = Features {
            reads_counters: false,
            tells_caps: false,
        };
        let spots = old.blind_spots();
        assert!(spots[0].contains("halted") && spots[1].contains("cpu.max"));
    }
}
