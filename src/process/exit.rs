// SPDX-License-Identifier: GPL-2.0-only
//! The exit codes of `cohort`, and the error that carries one.
//!
//! A code is a promise to service files and scripts, so all of them are in one
//! enum, and the help text is written from it. Sentences about what went wrong
//! are not here: they are made where the cause is known.

use std::fmt::{self, Write as _};
use std::process::ExitCode;

/// How `cohort` ended. The numbers never change their meaning.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u8)]
pub enum Exit {
    /// It did what was asked.
    Success = 0,
    /// A failure with no code of its own.
    Failure = 1,
    /// The command line is wrong. clap uses the same number.
    Usage = 2,
    /// The configuration file is missing or wrong.
    Config = 3,
    /// Whoever read standard output closed it.
    OutputClosed = 4,
    /// A recording cannot be replayed.
    BadRecording = 5,
    /// The caller may not load a scheduler.
    NoPrivileges = 10,
    /// The kernel has no sched_ext.
    NoSchedExt = 11,
    /// The kernel's BTF does not describe sched_ext soundly.
    UnsoundBtf = 12,
    /// Another sched_ext scheduler is loaded.
    OtherScheduler = 13,
    /// Core scheduling is in use, which sched_ext does not obey.
    CoreScheduling = 14,
    /// The processor architecture is not supported.
    Architecture = 15,
    /// Cohort runs already.
    AlreadyRunning = 16,
    /// Hosts were seen to hang under this kernel.
    KnownBadKernel = 17,
    /// The kernel rejected the scheduler.
    LoadRejected = 20,
    /// The kernel removed the scheduler because of an error.
    SchedulerError = 21,
    /// The kernel's watchdog removed the scheduler because a task waited too long.
    Watchdog = 22,
    /// Somebody else removed the scheduler, as SysRq-S does.
    RemovedByOthers = 23,
    /// No running `cohort run` answers.
    NotRunning = 30,
    /// `export` cannot listen at its address.
    CannotListen = 31,
    /// A guest stood still, so `compare` ended.
    Stalled = 32,
    /// A signal ended `compare` before its last window.
    Interrupted = 33,
    /// No VM, or more than one, is called so.
    NoSuchVm = 34,
    /// `doctor` or `why` has warnings.
    Advice = 40,
    /// `doctor` says that Cohort does not run on this host.
    Unfit = 41,
}

impl Exit {
    /// Every code, in ascending order.
    pub const ALL: [Exit; 25] = [
        Exit::Success,
        Exit::Failure,
        Exit::Usage,
        Exit::Config,
        Exit::OutputClosed,
        Exit::BadRecording,
        Exit::NoPrivileges,
        Exit::NoSchedExt,
        Exit::UnsoundBtf,
        Exit::OtherScheduler,
        Exit::CoreScheduling,
        Exit::Architecture,
        Exit::AlreadyRunning,
        Exit::KnownBadKernel,
        Exit::LoadRejected,
        Exit::SchedulerError,
        Exit::Watchdog,
        Exit::RemovedByOthers,
        Exit::NotRunning,
        Exit::CannotListen,
        Exit::Stalled,
        Exit::Interrupted,
        Exit::NoSuchVm,
        Exit::Advice,
        Exit::Unfit,
    ];

    /// The number the shell sees.
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// What the code means, for the help text.
    pub const fn meaning(self) -> &'static str {
        match self {
            Exit::Success => {
                "success; for `run`: stopped by SIGINT or SIGTERM, the host is back on its own scheduler"
            }
            Exit::Failure => "a failure described on standard error",
            Exit::Usage => "wrong command line",
            Exit::Config => "settings that are missing, wrong, or do not fit together",
            Exit::OutputClosed => "standard output was closed by its reader",
            Exit::BadRecording => {
                "a recording is missing, damaged or of another format, or holds nothing of the time that was asked for"
            }
            Exit::NoPrivileges => {
                "not root, or capabilities missing; for `stats`, `set`: the caller may not connect"
            }
            Exit::NoSchedExt => "kernel without sched_ext",
            Exit::UnsoundBtf => "kernel whose BTF does not describe sched_ext soundly",
            Exit::OtherScheduler => "another sched_ext scheduler is loaded",
            Exit::CoreScheduling => {
                "core scheduling is in use (at the start, or later: then Cohort has left)"
            }
            Exit::Architecture => "unsupported processor architecture",
            Exit::AlreadyRunning => "Cohort runs already",
            Exit::KnownBadKernel => "kernel that is known to hang hosts with sched_ext",
            Exit::LoadRejected => {
                "the kernel rejected the scheduler, or the observer of `watch`, `top` and others"
            }
            Exit::SchedulerError => "the kernel removed the scheduler because of an error",
            Exit::Watchdog => "the kernel's watchdog removed the scheduler: a task waited too long",
            Exit::RemovedByOthers => "somebody else removed the scheduler, for example by SysRq-S",
            Exit::NotRunning => "no running `cohort run` answers (for `stats`, `set`)",
            Exit::CannotListen => {
                "`export` cannot listen at its address; its port is taken, for example"
            }
            Exit::Stalled => {
                "a guest stood still, so `compare` ended and gave the host back to its own scheduler"
            }
            Exit::Interrupted => {
                "a signal ended `compare` before its last window; the host is back on its own scheduler"
            }
            Exit::NoSuchVm => "`why` or `ready` was told a name that no VM has, or more than one",
            Exit::Advice => {
                "`doctor` has warnings, and Cohort runs on this host; or `why` has warnings"
            }
            Exit::Unfit => "`doctor` found that Cohort does not run on this host",
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        ExitCode::from(exit.code())
    }
}

/// The table of exit codes, one a line, for the help text.
pub fn exit_code_help() -> String {
    let mut text = String::from("Exit codes:\n");
    for exit in Exit::ALL {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "  {:>3}  {}", exit.code(), exit.meaning());
    }
    text
}

/// An error together with the exit code it leads to.
#[derive(Debug)]
pub struct Failure {
    exit: Exit,
    error: anyhow::Error,
}

impl Failure {
    /// A failure that ends the program with `exit` and says `error`.
    pub fn new(exit: Exit, error: impl Into<anyhow::Error>) -> Self {
        Self {
            exit,
            error: error.into(),
        }
    }

    /// The code the program ends with.
    pub fn exit(&self) -> Exit {
        self.exit
    }
}

impl fmt::Display for Failure {
    /// The whole chain of causes in one line, outermost first.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#}", self.error)
    }
}

/// So that a code survives where errors are collected by others.
impl std::error::Error for Failure {}

/// An error that nobody gave a code is a plain failure.
impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        Failure::new(Exit::Failure, error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_distinct_and_ascending() {
        assert!(
            Exit::ALL
                .windows(2)
                .all(|pair| pair[0].code() < pair[1].code())
        );
    }

    #[test]
    fn the_help_text_names_each_code() {
        let help = exit_code_help();
        for exit in Exit::ALL {
            assert!(help.contains(&format!("{:>3}  {}", exit.code(), exit.meaning())));
        }
    }

    #[test]
    fn a_failure_shows_its_causes_outermost_first() {
        let failure = Failure::from(anyhow::anyhow!("inner").context("outer"));
        assert_eq!(failure.to_string(), "outer: inner");
        assert_eq!(failure.exit(), Exit::Failure);
    }
}
