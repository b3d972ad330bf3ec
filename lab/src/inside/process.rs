// SPDX-License-Identifier: GPL-2.0-only
//! Starting processes that cannot outlive the harness and run where they belong. Not for waiting on them.
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

use anyhow::{Context, Result, ensure};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use nix::unistd::Pid;

use super::cgroup::Cgroup;

/// Keeps this thread, and those it starts, on `cpus`.
///
/// # Errors
/// When no CPU of `cpus` exists.
pub fn stay_on(cpus: &[u32]) -> Result<()> {
    sched_setaffinity(Pid::from_raw(0), &cpu_set(cpus)?)
        .with_context(|| format!("The harness cannot be moved to CPUs {cpus:?}"))
}

/// Real-time priority of a thread that keeps a CPU from guests.
pub const HOLDS_CPU: i32 = 1;
/// Real-time priority of the harness, which must run all the same.
pub const HARNESS: i32 = 2;

/// Lets this thread run as soon as it wakes, whatever scheduler runs the others, or a window that is to end now ends a
/// slice later. What it starts has the usual priority.
///
/// # Errors
/// When the kernel refuses.
pub fn come_first(priority: i32) -> Result<()> {
    let parameters = libc::sched_param {
        sched_priority: priority,
    };
    let policy = libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK;
    // SAFETY: plain system call with a pointer to a value that lives longer.
    let result = unsafe { libc::sched_setscheduler(0, policy, &parameters) };
    ensure!(
        result == 0,
        "The harness cannot have real-time priority: {}",
        io::Error::last_os_error()
    );
    Ok(())
}

/// Starts `command` confined as [`confine`] says.
///
/// # Errors
/// When the process cannot be started, with the program's name.
pub fn start(mut command: Command, cpus: &[u32], cgroup: Option<&Cgroup>) -> Result<Child> {
    confine(&mut command, cpus, cgroup)?;
    command.spawn().with_context(|| {
        format!(
            "{} cannot be started",
            command.get_program().to_string_lossy()
        )
    })
}

/// Lets `command`, when it is started, die with the *thread* that starts it (that is what the kernel offers): start
/// long-lived processes from a thread that outlives them. The process may run on `cpus`, or wherever the kernel lets
/// it when there are none, and is a member of `cgroup` before its program starts.
///
/// # Errors
/// When `cpus` do not exist or the cgroup is gone.
pub fn confine(command: &mut Command, cpus: &[u32], cgroup: Option<&Cgroup>) -> Result<()> {
    let affinity = if cpus.is_empty() {
        every_cpu()?
    } else {
        cpu_set(cpus)?
    };
    let members = cgroup.map(Cgroup::open_members).transpose()?;
    let prepare = move || -> io::Result<()> {
        set_pdeathsig(Signal::SIGKILL)?;
        if let Some(members) = &members {
            // "0" is the writer itself.
            nix::unistd::write(members, b"0")?;
        }
        sched_setaffinity(Pid::from_raw(0), &affinity)?;
        Ok(())
    };
    // SAFETY: the closure runs between fork and exec and makes system calls only: no allocation, no lock.
    unsafe { command.pre_exec(prepare) };
    Ok(())
}

fn cpu_set(cpus: &[u32]) -> Result<CpuSet> {
    let mut set = CpuSet::new();
    for &cpu in cpus {
        set.set(cpu as usize)
            .with_context(|| format!("CPU {cpu} is more than a CPU set holds"))?;
    }
    Ok(set)
}

fn every_cpu() -> Result<CpuSet> {
    // CPUs that do not exist are ignored by the kernel.
    cpu_set(&(0..CpuSet::count() as u32).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use std::process::Stdio;

    use super::*;

    #[test]
    fn a_process_dies_with_the_thread_that_started_it() {
        let mut child = std::thread::spawn(|| {
            let mut command = Command::new("sleep");
            command.arg("100").stdout(Stdio::null());
            start(command, &[], None).unwrap()
        })
        .join()
        .unwrap();
        assert!(!child.wait().unwrap().success());
    }

    #[test]
    fn a_missing_program_is_named() {
        let error = start(Command::new("/nonexistent/program"), &[], None).unwrap_err();
        assert!(
            error.to_string().contains("/nonexistent/program"),
            "{error}"
        );
    }

    #[test]
    fn a_process_runs_on_its_cpus() {
        let mut command = Command::new("grep");
        command
            .args(["Cpus_allowed_list", "/proc/self/status"])
            .stdout(Stdio::piped());
        let output = start(command, &[0], None)
            .unwrap()
            .wait_with_output()
            .unwrap();
        assert_eq!(
            String::from_utf8(output.stdout).unwrap(),
            "Cpus_allowed_list:\t0\n"
        );
    }
}
