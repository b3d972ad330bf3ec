// SPDX-License-Identifier: GPL-2.0-only
//! Whether any thread uses core scheduling.
//!
//! Core scheduling lets two threads share a core only if their cookies match,
//! as a defence against side channels. A sched_ext scheduler is not bound by
//! cookies unless it implements them, and Cohort does not: it must not run where
//! somebody relies on them.

use crate::host::threads;
use std::io;
use std::path::Path;

// From include/uapi/linux/prctl.h; the libc crate does not have them.
const PR_SCHED_CORE: libc::c_int = 62;
const PR_SCHED_CORE_GET: libc::c_ulong = 0;
const PR_SCHED_CORE_SCOPE_THREAD: libc::c_ulong = 0;

/// A thread that has a core-scheduling cookie.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct CookieHolder {
    /// The thread.
    pub tid: u32,
    /// Its name, for people.
    pub name: String,
}

/// Finds a thread with a core-scheduling cookie.
///
/// `None` says that there is none, or that this kernel has no core scheduling.
/// A thread may end while it is looked at; it is passed over. `cookie_of` asks
/// the kernel for a thread's cookie: [`kernel_cookie`], or a test's own answer.
pub fn find_cookie(
    proc: &Path,
    cookie_of: impl Fn(u32) -> io::Result<u64>,
) -> io::Result<Option<CookieHolder>> {
    // Whoever asks is told this of himself too. Reading /proc costs a host milliseconds.
    if cookie_of(0).is_err_and(|error| has_no_cookies(&error)) {
        return Ok(None);
    }
    for process in threads::numbers(proc)? {
        let Ok(threads) = threads::numbers(&proc.join(format!("{process}/task"))) else {
            continue;
        };
        for tid in threads {
            match cookie_of(tid) {
                Ok(0) => {}
                Ok(_) => return Ok(Some(holder(proc, tid))),
                Err(error) if has_no_cookies(&error) => return Ok(None),
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(None)
}

/// Does this answer for one thread say that no thread has a cookie? EINVAL: the kernel is built without core scheduling.
/// ENODEV: no core has two hardware threads.
fn has_no_cookies(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENODEV))
}

/// The core-scheduling cookie of thread `tid` (0: of the calling one); 0 is none.
pub fn kernel_cookie(tid: u32) -> io::Result<u64> {
    let mut cookie: u64 = 0;
    // SAFETY: PR_SCHED_CORE_GET writes one u64 through the last argument, which
    // points to one that outlives the call, and touches nothing else.
    let result = unsafe {
        libc::prctl(
            PR_SCHED_CORE,
            PR_SCHED_CORE_GET,
            libc::c_ulong::from(tid),
            PR_SCHED_CORE_SCOPE_THREAD,
            &raw mut cookie,
        )
    };
    match result {
        0 => Ok(cookie),
        _ => Err(io::Error::last_os_error()),
    }
}

fn holder(proc: &Path, tid: u32) -> CookieHolder {
    let name = threads::name_of(&proc.join(tid.to_string()));
    CookieHolder {
        tid,
        name: name.unwrap_or_else(|| String::from("unnamed")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::paths::fixture::Fixture;

    fn two_processes() -> Fixture {
        Fixture::new()
            .with("proc/10/task/10/comm", "qemu")
            .with("proc/10/task/11/comm", "CPU 0/KVM")
            .with("proc/11/comm", "CPU 0/KVM\n")
            .with("proc/20/task/20/comm", "sh")
            .with("proc/uptime", "1 1")
    }

    fn find(cookie_of: impl Fn(u32) -> io::Result<u64>) -> io::Result<Option<CookieHolder>> {
        find_cookie(&two_processes().host().proc, cookie_of)
    }

    #[test]
    fn a_cookie_on_any_thread_is_found_and_named() {
        let found = find(|tid| Ok(u64::from(tid == 11))).expect("all threads answer");
        let name = String::from("CPU 0/KVM");
        assert_eq!(found, Some(CookieHolder { tid: 11, name }));
    }

    #[test]
    fn no_cookie_is_no_finding() {
        assert_eq!(find(|_| Ok(0)).expect("all threads answer"), None);
    }

    #[test]
    fn a_kernel_without_core_scheduling_has_no_cookies() {
        for errno in [libc::EINVAL, libc::ENODEV] {
            let found = find(|_| Err(io::Error::from_raw_os_error(errno)));
            assert_eq!(found.expect("this is no error"), None);
        }
    }

    #[test]
    fn a_thread_that_ended_is_passed_over() {
        let found = find(|tid| match tid {
            10 => Err(io::Error::from_raw_os_error(libc::ESRCH)),
            20 => Ok(5),
            _ => Ok(0),
        });
        assert_eq!(found.expect("this is no error").map(|h| h.tid), Some(20));
    }

    #[test]
    fn a_question_that_is_not_permitted_is_an_error() {
        let denied = || io::Error::from_raw_os_error(libc::EPERM);
        assert_eq!(
            find(|_| Err(denied())).expect_err("denied").raw_os_error(),
            Some(libc::EPERM)
        );
    }

    #[test]
    fn the_running_kernel_answers_or_has_no_core_scheduling() {
        match kernel_cookie(std::process::id()) {
            Ok(_) => {}
            Err(error) => assert!(matches!(
                error.raw_os_error(),
                Some(libc::EINVAL | libc::ENODEV)
            )),
        }
    }
}
