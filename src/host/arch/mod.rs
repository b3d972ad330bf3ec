// SPDX-License-Identifier: GPL-2.0-only
//! What differs between the architectures that Cohort knows: a file each, with the same names in both. What one of them
//! only lacks is not here: what looks for it does not find it.

#[cfg(any(target_arch = "aarch64", test))]
#[cfg_attr(
    not(target_arch = "aarch64"),
    expect(dead_code, reason = "it is the other's")
)]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
use aarch64 as this;
#[cfg(target_arch = "x86_64")]
use x86_64 as this;

use nix::libc;

pub use this::{
    CLOCKSOURCE, LOAD_KVM, SCHEDULER_LACKS, SPIN_PARAMETERS, hardware_ends_interrupts, is_vm,
};

/// A parameter of KVM that keeps vCPUs which spin from leaving the guest when it is 0.
#[derive(Clone, Copy, Debug)]
pub struct SpinParameter {
    /// KVM's module.
    pub module: &'static str,
    /// What it calls the parameter.
    pub name: &'static str,
    /// What to do.
    pub mend: &'static str,
}

/// The system call in which a thread waits for another one.
pub const FUTEX: i64 = libc::SYS_futex;

/// System calls in which a vCPU's thread may sleep, on each architecture.
const SYSCALLS: [(i64, &str); 15] = [
    (libc::SYS_clock_nanosleep, "clock_nanosleep"),
    (libc::SYS_fdatasync, "fdatasync"),
    (libc::SYS_fsync, "fsync"),
    (FUTEX, "futex"),
    (libc::SYS_ioctl, "ioctl"),
    (libc::SYS_nanosleep, "nanosleep"),
    (libc::SYS_ppoll, "ppoll"),
    (libc::SYS_pread64, "pread64"),
    (libc::SYS_preadv, "preadv"),
    (libc::SYS_pwrite64, "pwrite64"),
    (libc::SYS_pwritev, "pwritev"),
    (libc::SYS_read, "read"),
    (libc::SYS_readv, "readv"),
    (libc::SYS_write, "write"),
    (libc::SYS_writev, "writev"),
];

/// The name of system call `number`, if it is one in which a vCPU's thread may sleep.
pub fn syscall(number: i64) -> Option<&'static str> {
    let mut all = SYSCALLS.iter().chain(this::SYSCALLS);
    all.find(|(it, _)| *it == number).map(|(_, name)| *name)
}
