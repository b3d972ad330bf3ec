// SPDX-License-Identifier: GPL-2.0-only
//! Cgroups of the lab: each guest or host task of an experiment lives in one below `/sys/fs/cgroup/lab`, which
//! vanishes with its last member's owner. Not for cgroups that anyone else made.
use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use cohort::process::wait::wait_for;

use super::info::cpu_list;

const ROOT: &str = "/sys/fs/cgroup/lab";
const CONTROLLERS: &str = "+cpu +cpuset";
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(5);

/// A cgroup; its members are killed and it is removed when it is dropped.
#[derive(Debug)]
pub struct Cgroup {
    path: PathBuf,
    removed: bool,
}

/// What `cpu.max` allows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum CpuMax {
    /// No limit.
    Unlimited,
    /// At most `quota_us` microseconds of CPU time in each `period_us` microseconds.
    Quota {
        /// CPU time per period, microseconds.
        quota_us: u64,
        /// Length of a period, microseconds.
        period_us: u64,
    },
}

impl Cgroup {
    /// Makes `/sys/fs/cgroup/lab/<name>`; `name` may name a cgroup below another ("outer/inner"), whose own
    /// `Cgroup` must be dropped later.
    ///
    /// # Errors
    /// When it exists already, or cgroups cannot be made here.
    pub fn create(name: &str) -> Result<Self> {
        Self::create_below(Path::new(ROOT), name)
    }

    fn create_below(root: &Path, name: &str) -> Result<Self> {
        fs::create_dir_all(root)
            .with_context(|| format!("The cgroup {} cannot be made", root.display()))?;
        let path = root.join(name);
        let parent = path
            .parent()
            .ok_or_else(|| anyhow!("A cgroup needs a name"))?;
        let mut ancestors: Vec<&Path> = parent
            .ancestors()
            .take_while(|path| path.starts_with(root))
            .collect();
        ancestors.reverse();
        for ancestor in ancestors {
            write(ancestor, "cgroup.subtree_control", CONTROLLERS)?;
        }
        fs::create_dir(&path).with_context(|| {
            format!(
                "The cgroup {} cannot be made; two guests of one name at a time are not possible",
                path.display()
            )
        })?;
        Ok(Self {
            path,
            removed: false,
        })
    }

    /// Where it is in the file system.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it is called in the folder above it.
    pub fn name(&self) -> &str {
        // It was made from a string.
        let name = self.path.file_name().and_then(|name| name.to_str());
        name.unwrap_or_default()
    }

    /// Sets its share of CPU time, 1 to 10000; 100 is what new cgroups have.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn set_weight(&self, weight: u32) -> Result<()> {
        write(&self.path, "cpu.weight", &weight.to_string())
    }

    /// Limits its CPU time.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn set_max(&self, max: CpuMax) -> Result<()> {
        let text = match max {
            CpuMax::Unlimited => "max".into(),
            CpuMax::Quota {
                quota_us,
                period_us,
            } => format!("{quota_us} {period_us}"),
        };
        write(&self.path, "cpu.max", &text)
    }

    /// Sets `file` of `controller`, which a cgroup of the lab's has only from then on.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn limit(&self, controller: &str, file: &str, value: &str) -> Result<()> {
        let above = self.path.ancestors().skip(1);
        let mut above: Vec<&Path> = above.take_while(|it| it.starts_with(ROOT)).collect();
        above.reverse();
        for cgroup in above {
            write(cgroup, "cgroup.subtree_control", &format!("+{controller}"))?;
        }
        write(&self.path, file, value)
    }

    /// Confines its members to `cpus`.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn set_cpus(&self, cpus: &[u32]) -> Result<()> {
        write(&self.path, "cpuset.cpus", &cpu_list(cpus))
    }

    /// Moves the process `pid`, with all of its threads, into it.
    ///
    /// # Errors
    /// When the process is gone or the kernel refuses.
    pub fn add(&self, pid: u32) -> Result<()> {
        write(&self.path, "cgroup.procs", &pid.to_string())
    }

    /// Stops all members where they are, or lets them go on; returns when it has happened.
    ///
    /// # Errors
    /// When the kernel refuses or takes longer than five seconds.
    pub fn set_frozen(&self, frozen: bool) -> Result<()> {
        write(&self.path, "cgroup.freeze", if frozen { "1" } else { "0" })?;
        let wanted = u64::from(frozen);
        wait_for(
            &format!("Freezing ({wanted}) of {}", self.path.display()),
            REMOVAL_TIMEOUT,
            || Ok((value(&self.path, "cgroup.events", "frozen")? == wanted).then_some(())),
        )
    }

    /// Lets its members go on, and does not wait until they do.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn thaw(&self) -> Result<()> {
        write(&self.path, "cgroup.freeze", "0")
    }

    /// What [`usage_us`] says of it.
    ///
    /// # Errors
    /// When cpu.stat cannot be read.
    pub fn usage_us(&self) -> Result<u64> {
        usage_us(&self.path)
    }

    /// Its file of members, open for writing: writing "0" moves the writer.
    pub(super) fn open_members(&self) -> Result<File> {
        let path = self.path.join("cgroup.procs");
        OpenOptions::new()
            .write(true)
            .open(&path)
            .with_context(|| format!("{} cannot be opened", path.display()))
    }

    /// Kills its members, waits until they are gone and removes it: what dropping does, with errors reported.
    ///
    /// # Errors
    /// When members do not die within five seconds or the kernel refuses.
    pub fn remove(mut self) -> Result<()> {
        self.removed = true;
        self.kill_and_remove()
    }

    fn kill_and_remove(&self) -> Result<()> {
        write(&self.path, "cgroup.kill", "1")?;
        wait_for(
            &format!("The end of all members of {}", self.path.display()),
            REMOVAL_TIMEOUT,
            || Ok((value(&self.path, "cgroup.events", "populated")? == 0).then_some(())),
        )?;
        fs::remove_dir(&self.path)
            .with_context(|| format!("{} cannot be removed", self.path.display()))
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        if self.removed {
            return;
        }
        if let Err(error) = self.kill_and_remove() {
            eprintln!("{error:#}");
        }
    }
}

/// Does `action` while the members of `cgroups` are stopped; they go on afterwards, whatever came of it.
///
/// # Errors
/// That of `action`, or when they cannot be stopped or let go on.
pub fn while_frozen<T>(cgroups: &[&Cgroup], action: impl FnOnce() -> Result<T>) -> Result<T> {
    let set_frozen = |frozen| {
        cgroups
            .iter()
            .try_for_each(|cgroup| cgroup.set_frozen(frozen))
    };
    let result = set_frozen(true).and_then(|()| action());
    let thawed = set_frozen(false);
    let value = result?;
    thawed?;
    Ok(value)
}

/// The same for all guests and host tasks of the lab.
///
/// # Errors
/// As for [`while_frozen`].
pub fn while_all_frozen<T>(action: impl FnOnce() -> Result<T>) -> Result<T> {
    let root = Cgroup {
        path: ROOT.into(),
        // It is nobody's.
        removed: true,
    };
    match root.path.exists() {
        true => while_frozen(&[&root], action),
        false => action(),
    }
}

/// CPU time of the members of `cgroup` and of those below it so far, microseconds. Time of a running member counts from
/// its last tick.
///
/// # Errors
/// When cpu.stat cannot be read.
pub fn usage_us(cgroup: &Path) -> Result<u64> {
    value(cgroup, "cpu.stat", "usage_usec")
}

fn value(cgroup: &Path, file: &str, key: &str) -> Result<u64> {
    let path = cgroup.join(file);
    let text =
        fs::read_to_string(&path).with_context(|| format!("{} cannot be read", path.display()))?;
    parse_value(&text, key).ok_or_else(|| anyhow!("{} has no number called {key}", path.display()))
}

fn write(cgroup: &Path, file: &str, value: &str) -> Result<()> {
    let path = cgroup.join(file);
    fs::write(&path, value)
        .with_context(|| format!("\"{value}\" cannot be written to {}", path.display()))
}

fn parse_value(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        line.strip_prefix(key)?
            .strip_prefix(' ')?
            .trim()
            .parse()
            .ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keyed_values_are_found_by_their_whole_name() {
        let text = "usage_usec 12\nuser_usec 7\nnr_periods 0\n";
        assert_eq!(parse_value(text, "usage_usec"), Some(12));
        assert_eq!(parse_value(text, "user_usec"), Some(7));
        assert_eq!(parse_value(text, "nr"), None);
        assert_eq!(parse_value(text, "absent"), None);
    }

    #[test]
    fn a_name_that_exists_is_refused_with_its_path() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("taken")).unwrap();
        let error = Cgroup::create_below(root.path(), "taken").unwrap_err();
        assert!(error.to_string().contains("taken"), "{error}");
    }
}
