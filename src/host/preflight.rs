// SPDX-License-Identifier: GPL-2.0-only
//! What is checked before Cohort touches a host, and what is said if it must not.
//!
//! Reasons that no user can change in a minute (architecture, kernel) come
//! before those he can (privileges, another scheduler). Whether another
//! instance runs is found out by `instance.rs`, which must keep its file anyway.

use crate::host::arch;
use crate::host::btf;
use crate::host::cookies::{CookieHolder, find_cookie, kernel_cookie};
use crate::host::paths::Host;
use crate::process::exit::{Exit, Failure};
use std::env::consts::ARCH;
use std::fs;
use std::io;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// Kernels under which hosts were seen to hang: first and last of each stretch of releases of Linux itself, and why.
const KNOWN_BAD: [([u32; 3], [u32; 3], &str); 1] = [(
    [7, 1, 0],
    [7, 1, 3],
    "a host hung as a VM booted under a sched_ext scheduler (github.com/sched-ext/scx, issue 3687, seen with 7.1.3)",
)];

/// A scheduler that leaves has this long until it counts as loaded.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(5);
const LEAVE_POLL: Duration = Duration::from_millis(50);

/// Why Cohort does not start, or does not stay, on this host.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// The scheduler does not run on this architecture.
    #[error(
        "Cohort's scheduler does not run on {architecture}: {lacks}. Run it on an x86_64 host. \
         `cohort watch`, `top`, `export`, `why` and `doctor` are built for this one, too."
    )]
    Architecture {
        /// What this program was built for.
        architecture: &'static str,
        /// What is missing.
        lacks: &'static str,
    },
    /// A kernel that is not to be used with sched_ext.
    #[error(
        "Linux {release} is known to be bad: {why}. Boot another kernel: Cohort is tested with 7.2.13 and 7.3.4. Or accept \
         the risk: `cohort run --known-bad-kernel`, `cohort compare --scheduler \"cohort --known-bad-kernel\"`."
    )]
    KnownBad {
        /// The running kernel.
        release: String,
        /// What was seen.
        why: &'static str,
    },
    /// A kernel that is too old, or built without sched_ext.
    #[error(
        "Linux {release} has no sched_ext (there is no /sys/kernel/sched_ext), so no scheduler \
         can be loaded. Boot Linux 6.12 or later, built with CONFIG_SCHED_CLASS_EXT=y. Only `cohort run` and \
         `compare` need it: `doctor` says whether this kernel has what the other commands need."
    )]
    NoSchedExt {
        /// The running kernel.
        release: String,
    },
    /// The kernel's type information would make the kernel reject Cohort.
    #[error(
        "Linux {release} describes sched_ext wrongly in its type information (BTF): {finding}. \
         It would reject every scheduler. Boot another build of the kernel: of Debian's, 7.2.13 \
         and 7.3.4 are known to be good, 7.2.11 and 7.2.12 to be bad."
    )]
    UnsoundBtf {
        /// The running kernel.
        release: String,
        /// What is wrong.
        finding: String,
    },
    /// The caller lacks capabilities.
    #[error(
        "Cohort lacks {missing}, without which it cannot look at all threads and into the kernel. Run it \
         as root, or give the service these capabilities."
    )]
    NoPrivileges {
        /// The names of the missing capabilities.
        missing: String,
    },
    /// Somebody else's scheduler is there.
    #[error(
        "another sched_ext scheduler, {name:?}, is loaded ({state}), and the kernel runs only \
         one at a time. Stop it (for example: systemctl stop scx), then start Cohort again."
    )]
    OtherScheduler {
        /// As in /sys/kernel/sched_ext/root/ops.
        name: String,
        /// As in /sys/kernel/sched_ext/state.
        state: String,
    },
    /// Cohort is there already.
    #[error(
        "Cohort schedules this host already ({name:?} is loaded, {state}), and the kernel runs only one scheduler at a \
         time. Stop it first (systemctl stop cohort, or end `cohort run`), and start it again afterwards."
    )]
    CohortRuns {
        /// As in /sys/kernel/sched_ext/root/ops.
        name: String,
        /// As in /sys/kernel/sched_ext/state.
        state: String,
    },
    /// Somebody relies on core scheduling.
    #[error(
        "thread {} ({:?}) uses core scheduling, which keeps it from sharing a core with \
         strangers; Cohort does not obey that, and running would break the protection. Turn \
         core scheduling off for this workload, or leave this host to the kernel's scheduler.",
        .0.tid, .0.name
    )]
    CoreScheduling(CookieHolder),
    /// Nobody can say whether core scheduling is used.
    #[error("whether core scheduling is in use cannot be found out: {0}. Run Cohort as root.")]
    CoreSchedulingUnknown(io::Error),
    /// A file that describes the host cannot be read.
    #[error("{path} cannot be read: {error}. Check that /proc and /sys are mounted.")]
    Unreadable {
        /// The file.
        path: String,
        /// Why not.
        error: io::Error,
    },
}

impl Refusal {
    /// The exit code for this reason.
    pub fn exit(&self) -> Exit {
        match self {
            Refusal::Architecture { .. } => Exit::Architecture,
            Refusal::KnownBad { .. } => Exit::KnownBadKernel,
            Refusal::NoSchedExt { .. } => Exit::NoSchedExt,
            Refusal::UnsoundBtf { .. } => Exit::UnsoundBtf,
            Refusal::NoPrivileges { .. } => Exit::NoPrivileges,
            Refusal::OtherScheduler { .. } => Exit::OtherScheduler,
            Refusal::CohortRuns { .. } => Exit::AlreadyRunning,
            Refusal::CoreScheduling(_) | Refusal::CoreSchedulingUnknown(_) => Exit::CoreScheduling,
            Refusal::Unreadable { .. } => Exit::Failure,
        }
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        Failure::new(refusal.exit(), refusal)
    }
}

/// Checks what stays as it is: the machine, the kernel and the caller.
pub fn check_host(host: &Host) -> Result<(), Refusal> {
    check_machine(host)?;
    check_privileges(host)
}

/// The same without the caller.
pub fn check_machine(host: &Host) -> Result<(), Refusal> {
    check_architecture(arch::SCHEDULER_LACKS)?;
    check_kernel(host)?;
    check_btf(host)
}

/// Checks what the observer needs of the caller.
pub fn check_observer(host: &Host) -> Result<(), Refusal> {
    check_privileges(host)
}

/// Checks what others may change at any time. Comes last, and after it is known
/// that the other scheduler is not another `cohort run`.
pub fn check_now(host: &Host) -> Result<(), Refusal> {
    check_no_other_scheduler(host)?;
    check_no_cookies(host)
}

/// `lacks` is what the scheduler cannot have here.
fn check_architecture(lacks: Option<&'static str>) -> Result<(), Refusal> {
    match lacks {
        None => Ok(()),
        Some(lacks) => Err(Refusal::Architecture {
            architecture: ARCH,
            lacks,
        }),
    }
}

fn check_kernel(host: &Host) -> Result<(), Refusal> {
    if host.sys.join("kernel/sched_ext").is_dir() {
        return Ok(());
    }
    Err(Refusal::NoSchedExt {
        release: release(host)?,
    })
}

/// Checks that this kernel is none under which hosts were seen to hang.
pub fn check_known_bad(host: &Host) -> Result<(), Refusal> {
    let release = release(host)?;
    // One that is no version is a private build, of which nothing is known.
    let Some(version) = parse_release(&release) else {
        return Ok(());
    };
    let of = |(first, last, _): &&([u32; 3], [u32; 3], _)| (*first..=*last).contains(&version);
    match KNOWN_BAD.iter().find(of) {
        Some((_, _, why)) => Err(Refusal::KnownBad { release, why }),
        None => Ok(()),
    }
}

fn release(host: &Host) -> Result<String, Refusal> {
    read(&host.proc.join("sys/kernel/osrelease"))
}

/// The numbers of a kernel release such as `7.2.13+deb14-amd64`; those that are missing are 0.
fn parse_release(release: &str) -> Option<[u32; 3]> {
    let mut numbers = release.split('.').map_while(|part| {
        let digits = part.find(|c: char| !c.is_ascii_digit());
        part[..digits.unwrap_or(part.len())].parse().ok()
    });
    let [major, minor] = [numbers.next()?, numbers.next()?];
    Some([major, minor, numbers.next().unwrap_or(0)])
}

fn check_btf(host: &Host) -> Result<(), Refusal> {
    let finding = match btf::check(host.sys.join("kernel/btf/vmlinux")) {
        Ok(soundness) if soundness.is_sound() => return Ok(()),
        Ok(soundness) => soundness.to_string(),
        Err(error) => format!("{error:#}"),
    };
    Err(Refusal::UnsoundBtf {
        release: release(host)?,
        finding,
    })
}

/// Capability numbers of include/uapi/linux/capability.h, and what each is for.
const NEEDED_CAPABILITIES: [(u32, &str); 5] = [
    (19, "CAP_SYS_PTRACE"), // to ask for other threads' core-scheduling cookies
    (21, "CAP_SYS_ADMIN"),  // to read the type information of kernel modules
    (34, "CAP_SYSLOG"),     // to see where KVM's symbols are
    (38, "CAP_PERFMON"),    // to load programs that look into the kernel
    (39, "CAP_BPF"),        // to load BPF programs
];

/// Refuses without the capabilities that Cohort needs.
pub fn check_privileges(host: &Host) -> Result<(), Refusal> {
    let path = host.proc.join("self/status");
    let status = read(&path)?;
    let effective = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .ok_or_else(|| Refusal::Unreadable {
            path: path.display().to_string(),
            error: io::Error::new(io::ErrorKind::InvalidData, "it has no line CapEff"),
        })?;
    let missing: Vec<&str> = NEEDED_CAPABILITIES
        .iter()
        .filter(|(number, _)| effective & (1 << number) == 0)
        .map(|(_, name)| *name)
        .collect();
    match missing.is_empty() {
        true => Ok(()),
        false => Err(Refusal::NoPrivileges {
            missing: missing.join(", "),
        }),
    }
}

/// Whether the caller lacks some of them, as far as that can be told.
pub fn lacks_privileges(host: &Host) -> bool {
    matches!(check_privileges(host), Err(Refusal::NoPrivileges { .. }))
}

/// Waits while a scheduler leaves, because its process may be gone already and
/// nobody else can be asked to wait.
fn check_no_other_scheduler(host: &Host) -> Result<(), Refusal> {
    let give_up = Instant::now() + LEAVE_TIMEOUT;
    let mut said = false;
    loop {
        let state = sched_ext_state(host)?;
        match state.as_str() {
            "disabled" => return Ok(()),
            "disabling" if Instant::now() < give_up => {
                if !said {
                    tracing::info!("another scheduler is just leaving; waiting for it");
                    said = true;
                }
                thread::sleep(LEAVE_POLL);
            }
            _ => {
                // It may leave between the two reads: then it has no name.
                let name = scheduler_name(host).unwrap_or_default();
                return Err(match is_cohort(&name) {
                    true => Refusal::CohortRuns { name, state },
                    false => Refusal::OtherScheduler { name, state },
                });
            }
        }
    }
}

/// The state of sched_ext: "disabled", "enabling", "enabled" or "disabling".
///
/// # Errors
/// When this kernel has no sched_ext.
pub fn sched_ext_state(host: &Host) -> Result<String, Refusal> {
    read(&host.sys.join("kernel/sched_ext/state"))
}

/// The sched_ext scheduler that is loaded, or leaving, by the name of its operations.
pub fn loaded_scheduler(host: &Host) -> Option<String> {
    let state = sched_ext_state(host).ok()?;
    (state != "disabled").then(|| scheduler_name(host).unwrap_or(state))
}

/// The name of the sched_ext operations that are loaded now.
pub fn scheduler_name(host: &Host) -> Option<String> {
    let name = read(&host.sys.join("kernel/sched_ext/root/ops")).ok()?;
    (!name.is_empty()).then_some(name)
}

/// Whether sched_ext operations of this name are Cohort's, of whatever version.
pub fn is_cohort(name: &str) -> bool {
    name.starts_with("cohort")
}

/// Checks that no thread uses core scheduling. Also called while Cohort runs.
pub fn check_no_cookies(host: &Host) -> Result<(), Refusal> {
    match find_cookie(&host.proc, kernel_cookie) {
        Ok(None) => Ok(()),
        Ok(Some(holder)) => Err(Refusal::CoreScheduling(holder)),
        Err(error) => Err(Refusal::CoreSchedulingUnknown(error)),
    }
}

fn read(path: &Path) -> Result<String, Refusal> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(text.trim().to_owned()),
        Err(error) => Err(Refusal::Unreadable {
            path: path.display().to_string(),
            error,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::paths::fixture::Fixture;

    const ALL_CAPABILITIES: &str = "Name:\tcohort\nCapEff:\t000001ffffffffff\n";

    fn kernel(release: &str) -> Fixture {
        Fixture::new().with("proc/sys/kernel/osrelease", format!("{release}\n"))
    }

    fn with_sched_ext(fixture: Fixture, state: &str) -> Fixture {
        fixture.with("sys/kernel/sched_ext/state", format!("{state}\n"))
    }

    #[test]
    fn what_an_architecture_lacks_is_said() {
        assert!(check_architecture(None).is_ok());
        let refusal = check_architecture(Some("it sees no IPIs")).expect_err("not supported");
        assert_eq!(refusal.exit(), Exit::Architecture);
        let said = refusal.to_string();
        assert!(said.contains(ARCH) && said.contains("it sees no IPIs"));
    }

    #[test]
    fn a_kernel_without_sched_ext_is_refused_whatever_its_version() {
        for release in ["6.1.0-50-amd64", "7.3.4"] {
            let refusal = check_kernel(&kernel(release).host()).expect_err("no sched_ext");
            assert_eq!(refusal.exit(), Exit::NoSchedExt);
            let sentence = refusal.to_string();
            assert!(sentence.contains("CONFIG_SCHED_CLASS_EXT=y") && sentence.contains(release));
        }
    }

    #[test]
    fn a_kernel_with_sched_ext_is_accepted_whatever_its_version() {
        for release in ["6.12.1", "7.2.13+deb14-amd64", "10.0", "next-20260101"] {
            let fixture = with_sched_ext(kernel(release), "disabled");
            assert!(check_kernel(&fixture.host()).is_ok(), "{release}");
        }
    }

    #[test]
    fn a_kernel_that_is_known_to_be_bad_is_refused_and_its_neighbours_are_not() {
        for release in ["7.1.0-amd64", "7.1-rc2", "7.1.3+deb14-amd64"] {
            let refusal = check_known_bad(&kernel(release).host()).expect_err(release);
            assert_eq!(refusal.exit(), Exit::KnownBadKernel);
        }
        for release in ["7.0.12", "7.1.4", "7.1.10", "7.2.0", "6.12.117", "mine"] {
            assert!(
                check_known_bad(&kernel(release).host()).is_ok(),
                "{release}"
            );
        }
    }

    #[test]
    fn a_missing_proc_is_named() {
        let refusal = check_kernel(&Fixture::new().host()).expect_err("nothing there");
        assert!(refusal.to_string().contains("sys/kernel/osrelease"));
    }

    #[test]
    fn unsound_type_information_is_refused_with_what_to_boot() {
        let fixture = kernel("7.2.12").with("sys/kernel/btf/vmlinux", "no BTF");
        let refusal = check_btf(&fixture.host()).expect_err("nothing to load against");
        assert_eq!(refusal.exit(), Exit::UnsoundBtf);
        assert!(refusal.to_string().contains("7.2.13"));
    }

    #[test]
    fn root_has_the_capabilities() {
        let fixture = Fixture::new().with("proc/self/status", ALL_CAPABILITIES);
        assert!(check_privileges(&fixture.host()).is_ok());
    }

    #[test]
    fn missing_capabilities_are_named() {
        // All but CAP_BPF, bit 39.
        let fixture = Fixture::new().with("proc/self/status", "CapEff:\t0000017fffffffff\n");
        let refusal = check_privileges(&fixture.host()).expect_err("one is missing");
        assert_eq!(refusal.exit(), Exit::NoPrivileges);
        assert!(refusal.to_string().starts_with("Cohort lacks CAP_BPF,"));
    }

    #[test]
    fn another_scheduler_is_named() {
        let fixture = with_sched_ext(Fixture::new(), "enabled")
            .with("sys/kernel/sched_ext/root/ops", "lavd_1.0\n");
        let refusal = check_no_other_scheduler(&fixture.host()).expect_err("one is loaded");
        assert_eq!(refusal.exit(), Exit::OtherScheduler);
        assert!(refusal.to_string().contains("\"lavd_1.0\""));
    }

    #[test]
    fn who_finds_cohort_itself_is_told_to_stop_that() {
        let fixture = with_sched_ext(Fixture::new(), "enabled")
            .with("sys/kernel/sched_ext/root/ops", "cohort_0.1.0\n");
        let refusal = check_no_other_scheduler(&fixture.host()).expect_err("it is loaded");
        assert_eq!(refusal.exit(), Exit::AlreadyRunning);
        assert!(refusal.to_string().contains("systemctl stop cohort"));
    }

    #[test]
    fn no_other_scheduler_is_fine() {
        let fixture = with_sched_ext(Fixture::new(), "disabled");
        assert!(check_no_other_scheduler(&fixture.host()).is_ok());
    }

    #[test]
    fn a_scheduler_that_is_leaving_is_waited_for() {
        let fixture = with_sched_ext(Fixture::new(), "disabling");
        let host = fixture.host();
        let waiting = thread::spawn(move || check_no_other_scheduler(&host));
        thread::sleep(2 * LEAVE_POLL);
        let fixture = with_sched_ext(fixture, "disabled");
        assert!(waiting.join().expect("the check does not panic").is_ok());
        drop(fixture);
    }
}
