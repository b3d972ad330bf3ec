// SPDX-License-Identifier: GPL-2.0-only
//! On which CPUs a process may run: what its affinities and cpusets leave.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// The CPUs on which at least one thread of process `tgid` may run.
///
/// Nothing if the process is gone.
pub fn allowed_cpus(proc: &Path, tgid: u32) -> Option<BTreeSet<usize>> {
    let threads = fs::read_dir(proc.join(format!("{tgid}/task"))).ok()?;
    let allowed: BTreeSet<usize> = threads
        .flatten()
        .filter_map(|thread| allowed_cpus_of_thread(&thread.path()))
        .flatten()
        .collect();
    (!allowed.is_empty()).then_some(allowed)
}

/// The CPUs on which the thread with the folder `thread` in procfs may run.
pub fn allowed_cpus_of_thread(thread: &Path) -> Option<Vec<usize>> {
    let status = fs::read_to_string(thread.join("status")).ok()?;
    let list = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    scx_utils::read_cpulist(list.trim()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::paths::fixture::Fixture;

    #[test]
    fn the_threads_of_a_process_are_taken_together() {
        let fixture = Fixture::new()
            .with("proc/7/task/7/status", "Name:\tx\nCpus_allowed_list:\t0\n")
            .with("proc/7/task/8/status", "Cpus_allowed_list:\t2-3\n");
        let allowed = allowed_cpus(&fixture.host().proc, 7);
        assert_eq!(allowed, Some(BTreeSet::from([0, 2, 3])));
    }

    #[test]
    fn a_process_that_is_gone_may_run_nowhere_known() {
        assert_eq!(allowed_cpus(&Fixture::new().host().proc, 7), None);
    }
}
