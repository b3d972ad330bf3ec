// SPDX-License-Identifier: GPL-2.0-only
//! The event that counts a CPU's MPERF: cycles while that is not halted. What is told from it is in `halt`.

use libbpf_rs::libbpf_sys::perf_event_attr;
use nix::libc;
use std::fs;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::Path;

/// The kernel's event source for counters that a CPU has as model-specific registers.
const MSR: &str = "bus/event_source/devices/msr";

/// include/uapi/linux/perf_event.h
const PERF_FLAG_FD_CLOEXEC: libc::c_ulong = 1 << 3;

/// How the kernel names the event.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Mperf {
    source: u32,
    config: u64,
}

/// Why there is none; each is a part of a sentence.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum NoMperf {
    /// The kernel does not count such registers.
    #[error("this kernel has no event source msr (/sys/{MSR})")]
    Source,
    /// The CPUs, or who emulates them, do not have it.
    #[error("the CPUs have no MPERF, or the hypervisor that this host runs on shows it none")]
    Register,
}

impl NoMperf {
    /// What to do about it.
    pub fn mend(self) -> &'static str {
        match self {
            NoMperf::Source => "boot a kernel with CONFIG_PERF_EVENTS, as those of Debian have it",
            NoMperf::Register => {
                "where this host is a VM, have its hypervisor show APERF and MPERF (the flag aperfmperf of /proc/cpuinfo)"
            }
        }
    }
}

impl Mperf {
    /// Looks for it below `sys`.
    ///
    /// # Errors
    /// Where it cannot be counted.
    pub fn find(sys: &Path) -> Result<Self, NoMperf> {
        let folder = sys.join(MSR);
        let source = fs::read_to_string(folder.join("type")).ok();
        let source = source.and_then(|text| text.trim().parse().ok());
        let source = source.ok_or(NoMperf::Source)?;
        // As in "event=0x02".
        let config = fs::read_to_string(folder.join("events/mperf")).ok();
        let config = config.and_then(|text| {
            let hex = text.trim().strip_prefix("event=0x")?;
            u64::from_str_radix(hex, 16).ok()
        });
        let config = config.ok_or(NoMperf::Register)?;
        Ok(Self { source, config })
    }

    /// Counts it on CPU `cpu` from now on, until the file is closed and no map holds it.
    ///
    /// # Errors
    /// The kernel's own: `ENODEV` if that CPU is offline.
    pub fn count_on(self, cpu: usize) -> io::Result<OwnedFd> {
        let attributes = perf_event_attr {
            type_: self.source,
            size: size_of::<perf_event_attr>() as u32,
            config: self.config,
            ..perf_event_attr::default()
        };
        let (any_process, no_group): (libc::pid_t, libc::c_int) = (-1, -1);
        // SAFETY: the kernel reads the attributes, whose size they say, and keeps no pointer.
        let fd = unsafe {
            libc::syscall(
                libc::SYS_perf_event_open,
                &raw const attributes,
                any_process,
                cpu as libc::c_int,
                no_group,
                PERF_FLAG_FD_CLOEXEC,
            )
        };
        match i32::try_from(fd) {
            // SAFETY: the call has just made it, so nobody else has it.
            Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::host::paths::fixture::Fixture;

    /// A host that counts MPERF.
    pub(crate) fn with_mperf(fixture: Fixture) -> Fixture {
        fixture
            .with(&format!("sys/{MSR}/type"), "11\n")
            .with(&format!("sys/{MSR}/events/mperf"), "event=0x02\n")
    }

    #[test]
    fn the_event_is_named_as_the_kernel_says() {
        let found = Mperf::find(&with_mperf(Fixture::new()).host().sys);
        assert_eq!(
            found,
            Ok(Mperf {
                source: 11,
                config: 2
            })
        );
    }

    #[test]
    fn what_is_missing_is_told_apart() {
        let none = Fixture::new();
        assert_eq!(Mperf::find(&none.host().sys), Err(NoMperf::Source));
        let only_tsc = none
            .with(&format!("sys/{MSR}/type"), "11\n")
            .with(&format!("sys/{MSR}/events/tsc"), "event=0x00\n");
        assert_eq!(Mperf::find(&only_tsc.host().sys), Err(NoMperf::Register));
    }

    #[test]
    fn a_kernel_that_refuses_is_an_error() {
        let nonsense = Mperf {
            source: u32::MAX,
            config: 0,
        };
        assert!(nonsense.count_on(0).is_err());
    }
}
