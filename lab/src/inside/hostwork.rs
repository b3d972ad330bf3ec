// SPDX-License-Identifier: GPL-2.0-only
//! Work of the host beside VMs: the guests' workload program, run by L1 itself in a cgroup of its own. Not for what it
//! does (`lab/guest`).
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use cohort::process::wait::wait_for;
use cohort_micro::Histogram;
use tempfile::TempDir;

use super::booted::CounterPage;
use super::cgroup::Cgroup;
use super::info::LabInfo;
use super::process;
use super::windows::Subject;
use crate::cell::Party;
use crate::guest::WORKLOAD_PROGRAM;

/// A tmpfs.
const FOLDER: &str = "/dev/shm";
const PATIENCE: Duration = Duration::from_secs(60);

/// The workload program as a file; it goes when this is dropped.
pub struct Program {
    _folder: TempDir,
    path: PathBuf,
}

impl Program {
    /// Writes it.
    ///
    /// # Errors
    /// When there is no room for it.
    pub fn unpack() -> Result<Self> {
        let what = || format!("The workload program cannot be written to {FOLDER}");
        let folder = TempDir::with_prefix_in("workload-", FOLDER).with_context(what)?;
        let path = folder.path().join("workload");
        fs::write(&path, WORKLOAD_PROGRAM).with_context(what)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).with_context(what)?;
        Ok(Self {
            _folder: folder,
            path,
        })
    }

    /// What makes it compute until it is killed.
    pub fn endless(&self) -> [String; 3] {
        let work = format!("work={}", u64::MAX);
        [self.path.display().to_string(), "once".into(), work]
    }

    /// Iterations of its work per millisecond, on a CPU that does nothing else.
    ///
    /// # Errors
    /// When it fails.
    pub fn iterations_per_ms(&self) -> Result<u64> {
        let output = Command::new(&self.path)
            .arg("calibrate")
            .output()
            .context("The workload program cannot be started")?;
        let text = String::from_utf8_lossy(&output.stdout);
        text.trim()
            .parse()
            .with_context(|| format!("The workload program does not say how fast it is: {text}"))
    }
}

/// Work of the host that runs.
pub struct HostWork {
    process: Child,
    // The process is dead before any field is dropped (see Drop), so its cgroup can go.
    cgroup: Cgroup,
    counters: CounterPage,
    _folder: TempDir,
}

impl HostWork {
    /// Starts it on the lab's CPUs for guests, in a cgroup called `name`, and waits until it counts.
    ///
    /// # Errors
    /// When it does not start or count.
    pub fn start(
        lab: &LabInfo,
        program: &Program,
        name: &str,
        party: &Party,
        iterations_per_ms: u64,
    ) -> Result<Self> {
        let folder = TempDir::with_prefix_in("host-", FOLDER)?;
        let page = folder.path().join("counters");
        let cgroup = Cgroup::create(name)?;
        cgroup.set_weight(party.weight)?;
        let mut command = Command::new(&program.path);
        command
            .arg(party.workload.name())
            .arg(format!("threads={}", party.width))
            .arg(format!(
                "work={}",
                iterations_per_ms * party.operation_us / 1000
            ))
            .arg(format!("counters_file={}", page.display()))
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        let mut process = process::start(command, &lab.guest_cpus, Some(&cgroup))?;
        let counters = first_count(name, &mut process, &page).inspect_err(|_| {
            // It may have ended, which is what is wanted.
            let _ = process.kill();
            let _ = process.wait();
        })?;
        Ok(Self {
            process,
            cgroup,
            counters,
            _folder: folder,
        })
    }
}

fn first_count(name: &str, process: &mut Child, page: &Path) -> Result<CounterPage> {
    wait_for(&format!("Counting in {name}"), PATIENCE, || {
        if let Some(status) = process.try_wait()? {
            bail!("{name} ended ({status})");
        }
        // The file is there before its content.
        let whole = fs::metadata(page).is_ok_and(|file| file.len() > 0);
        let opened = whole.then(|| CounterPage::open(page, 0));
        let counters = opened.transpose()?;
        Ok(counters.filter(|counters| counters.total().is_ok_and(|total| total > 0)))
    })
}

impl Subject for HostWork {
    fn name(&self) -> &str {
        self.cgroup.name()
    }

    fn operations(&self) -> Result<u64> {
        self.counters.total()
    }

    fn latencies(&self) -> Result<Histogram> {
        Ok(self.counters.latencies())
    }

    fn latency_unit_ns(&self) -> f64 {
        1.0
    }

    fn cgroup(&self) -> &Cgroup {
        &self.cgroup
    }

    fn vcpu_tids(&self) -> Vec<u32> {
        Vec::new()
    }

    fn ensure_alive(&mut self) -> Result<()> {
        let status = self.process.try_wait()?;
        ensure!(status.is_none(), "{} ended ({status:?})", self.name());
        Ok(())
    }

    fn situation(&self) -> String {
        let usage_us = self.cgroup.usage_us().unwrap_or_default();
        format!("{}: {usage_us} us of CPU time so far", self.name())
    }
}

impl Drop for HostWork {
    fn drop(&mut self) {
        // It may be dead already, which is what is wanted. The cgroup kills what it had started.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
