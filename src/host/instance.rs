// SPDX-License-Identifier: GPL-2.0-only
//! The mark of a running `cohort run`, and what is left of one that was killed.
//!
//! The mark is a locked file. The kernel lets go of the lock when the process
//! ends, however it ends, so a lock that is held proves a running instance, and
//! text in an unlocked file proves one that had no chance to leave. Only its
//! owner can open the file: any user who can may lock it, and nobody could start
//! Cohort until he lets go.

use crate::host::paths::Host;
use crate::host::private;
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use std::fs::{File, TryLockError};
use std::io::{Read, Seek, Write};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// What a running instance writes down about itself.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Run {
    /// Its process.
    pub pid: u32,
    /// When it began, in seconds since 1970 UTC.
    pub began_unix_s: u64,
}

impl Run {
    fn this() -> Self {
        // A clock before 1970 is wrong in any case; 1970 says so.
        let began = SystemTime::now().duration_since(UNIX_EPOCH);
        Self {
            pid: std::process::id(),
            began_unix_s: began.map_or(0, |since| since.as_secs()),
        }
    }

    /// When it began, as people write it, in UTC.
    pub fn began(&self) -> String {
        let began = UNIX_EPOCH + Duration::from_secs(self.began_unix_s);
        humantime::format_rfc3339_seconds(began).to_string()
    }
}

/// Proof that this process is the only running instance. Dropping it is a clean end.
#[derive(Debug)]
pub struct Instance {
    file: File,
    killed: Option<Run>,
}

/// What came of the attempt to become the running instance.
#[derive(Debug)]
pub enum Claimed {
    /// This process is it now.
    Here(Instance),
    /// Another process is it already; it wrote this, unless it has only just begun.
    Elsewhere(Option<Run>),
}

impl Instance {
    /// Becomes the running instance, if no other process is.
    pub fn claim(host: &Host) -> Result<Claimed> {
        let path = host.state_folder().join("run.json");
        private::own_folder(&host.state_folder()).context("Cohort's state has no place")?;
        let mut file = private::file(&path).context("Cohort's state file cannot be had")?;
        let lock = file.try_lock();
        let mut text = String::new();
        file.read_to_string(&mut text)
            .with_context(|| format!("Cohort's state file {} cannot be read", path.display()))?;
        let run = serde_json::from_str(&text).ok();
        match lock {
            Ok(()) => {
                let mut instance = Instance { file, killed: run };
                instance.write(&serde_json::to_string(&Run::this())?)?;
                Ok(Claimed::Here(instance))
            }
            Err(TryLockError::WouldBlock) => Ok(Claimed::Elsewhere(run)),
            Err(TryLockError::Error(error)) => bail!(
                "Cohort's state file {} cannot be locked ({error}), so nobody can tell whether \
                 another instance runs",
                path.display()
            ),
        }
    }

    /// The run before this one, if it was killed before it could leave.
    pub fn killed_before(&self) -> Option<&Run> {
        self.killed.as_ref()
    }

    fn write(&mut self, text: &str) -> Result<()> {
        let write = |file: &mut File| {
            file.set_len(0)?;
            file.rewind()?;
            file.write_all(text.as_bytes())
        };
        write(&mut self.file).context("Cohort's state file cannot be written")
    }
}

impl Drop for Instance {
    /// Empties the file rather than removing it: whoever locks a file that is
    /// being removed would hold a lock that nobody else can see.
    fn drop(&mut self) {
        if let Err(error) = self.write("") {
            tracing::warn!("{error:#}; the next start will wrongly say that this run was killed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::paths::fixture::Fixture;
    use crate::host::private::another_user;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    fn claim(host: &Host) -> Instance {
        match Instance::claim(host).expect("the fixture is writable") {
            Claimed::Here(instance) => instance,
            Claimed::Elsewhere(run) => panic!("claimed by {run:?}"),
        }
    }

    #[test]
    fn the_second_instance_learns_of_the_first() {
        let fixture = Fixture::new();
        let first = claim(&fixture.host());
        match Instance::claim(&fixture.host()).expect("the fixture is writable") {
            Claimed::Elsewhere(Some(run)) => assert_eq!(run.pid, std::process::id()),
            other => panic!("{other:?}"),
        }
        drop(first);
    }

    #[test]
    fn a_clean_end_leaves_nothing_to_tell() {
        let fixture = Fixture::new();
        drop(claim(&fixture.host()));
        assert_eq!(claim(&fixture.host()).killed_before(), None);
    }

    #[test]
    fn a_killed_run_is_told_by_the_next() {
        let killed = Run {
            pid: 4711,
            began_unix_s: 1_795_273_200,
        };
        let text = serde_json::to_string(&killed).expect("a run is plain data");
        let fixture = Fixture::new().with("run/cohort/run.json", text);
        let instance = claim(&fixture.host());
        assert_eq!(instance.killed_before(), Some(&killed));
        assert_eq!(killed.began(), "2026-11-21T15:00:00Z");
    }

    #[test]
    fn another_user_cannot_lock_it_so_that_cohort_does_not_start() {
        let fixture = Fixture::new().with("run/cohort/run.json", "");
        let host = fixture.host();
        let path = host.state_folder().join("run.json");
        // Nothing but the modes that Cohort sets keeps him out, of the file and of the folder.
        for folder in [host.run.parent().expect("it has one"), &host.run] {
            let wide = fs::Permissions::from_mode(0o755);
            fs::set_permissions(folder, wide).expect("it is ours");
        }
        drop(claim(&host));
        let opened = || another_user::does(65534, || File::open(&path).is_ok());
        assert!(opened().is_none_or(|opened| !opened));
        let wide = fs::Permissions::from_mode(0o755);
        fs::set_permissions(host.state_folder(), wide).expect("it is ours");
        assert!(opened().is_none_or(|opened| !opened), "the file alone");
        let wide = fs::Permissions::from_mode(0o644);
        fs::set_permissions(&path, wide).expect("it is ours");
        assert!(opened().is_none_or(|opened| opened), "the test sees it");
    }

    #[test]
    fn a_half_written_file_is_no_run() {
        let fixture = Fixture::new().with("run/cohort/run.json", "{\"pid\":");
        assert_eq!(claim(&fixture.host()).killed_before(), None);
    }
}
