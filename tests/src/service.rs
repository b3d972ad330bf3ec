// SPDX-License-Identifier: GPL-2.0-only
//! Cohort as a service of a host with other users: what they do, and what becomes of its output, ends nothing; and its units
//! take nothing from it that it needs.

use std::fs::{self, File};
use std::io::{Write, pipe};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::{sleep, spawn};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use cohort::compare::notify::Notifications;
use cohort::compare::scheduler;
use cohort::exit::Exit;
use cohort::wait::wait_for;
use cohort_lab::inside::process::start;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::Test;
use crate::host::{
    Guest, PATIENCE, Service, Setting, back_to_stock, cohort_stats, refused, set,
    start_until_ready, vm_stats, wait_for_sched_ext,
};

pub const TESTS: &[Test] = &[
    ("a_full_disk_or_nobody_who_reads_ends_nothing", nobody_reads),
    (
        "clients_that_keep_all_files_open_take_none_from_scheduling",
        many_clients,
    ),
    // The last one: systemd gives the cgroups another order.
    ("under_systemd_the_units_have_what_they_need", units),
];

const STATS: &str = "/run/scx/root/stats";
const CONTROL: &str = "/run/cohort/control";
const STATE: &str = "/run/cohort/run.json";
/// Anything but root's.
const GROUP: &str = "4711";

/// `cohort run`, not looked after by the harness.
struct Run {
    process: Service,
    /// Told until the end.
    _notifications: Notifications,
}

impl Run {
    /// Starts `command`, which becomes `cohort run`, and waits until that schedules.
    fn start(command: Command) -> Result<Self> {
        back_to_stock()?;
        let (process, notifications) = start_until_ready(command, &[], "cohort run")?;
        Ok(Self {
            process,
            _notifications: notifications,
        })
    }

    /// It must schedule still, and leave when it is told to.
    fn stop(mut self, meanwhile: &str) -> Result<()> {
        let process = &mut self.process.0;
        ensure!(process.try_wait()?.is_none(), "{meanwhile} ended it");
        kill(Pid::from_raw(process.id() as i32), Signal::SIGTERM)?;
        let status = wait_for("cohort run to leave", PATIENCE, || Ok(process.try_wait()?))?;
        ensure!(status.success(), "with {meanwhile} it ended with {status}");
        Ok(())
    }
}

/// Tables are to be printed each second, and cannot be.
fn nobody_reads() -> Result<()> {
    let full = || File::options().write(true).open("/dev/full");
    let (reader, closed) = pipe()?;
    drop(reader);
    let (_reader, not_read) = pipe()?;
    // As much as it takes: the next write waits for a reader.
    (&not_read).write_all(&[b'x'; 64 << 10])?;
    let outputs = [
        ("a full disk", full()?.into(), full()?.into()),
        ("a closed pipe", closed.try_clone()?.into(), closed.into()),
        (
            "a pipe that is full",
            not_read.try_clone()?.into(),
            not_read.into(),
        ),
    ];
    for (what, stdout, stderr) in outputs {
        let (stdout, stderr): (Stdio, Stdio) = (stdout, stderr);
        let mut command = Command::new("cohort");
        command.args(["run", "--stats", "1"]);
        command.stdout(stdout).stderr(stderr);
        let run = Run::start(command)?;
        sleep(Duration::from_secs(3));
        cohort_stats()?;
        run.stop(what)?;
    }
    Ok(())
}

/// Clients of the statistics use up the files of those who serve them, and the queue of those who wait: cookies are looked for,
/// and mechanisms switched, all the same, and Cohort leaves when it is told to.
fn many_clients() -> Result<()> {
    const COOKIE_PERIOD: Duration = Duration::from_secs(5);
    let _queue = Setting::set("/proc/sys/net/core/somaxconn", "32")?;
    let mut command = Command::new("prlimit");
    command.args(["--nofile=512:512", "cohort", "run"]);
    let run = Run::start(command)?;
    // The last one waits until the socket is gone.
    let clients = spawn(|| {
        let clients = (0..).map_while(|_| UnixStream::connect(STATS).ok());
        clients.collect::<Vec<_>>().len()
    });
    sleep(2 * COOKIE_PERIOD);
    set(&["ipi=off"])?;
    run.stop("many clients")?;
    let clients = clients.join().ok().context("the clients failed")?;
    ensure!(clients > 256, "{clients} clients do not use up 512 files");
    Ok(())
}

/// systemd, which is the first process for itself and what it starts.
struct Systemd(Service);

impl Systemd {
    fn start() -> Result<Self> {
        const UNITS: &str = "/etc/systemd/system";
        fs::create_dir_all(format!("{UNITS}/service.d"))?;
        for (name, text) in [
            (
                "cohort.service",
                include_str!("../../deploy/cohort.service"),
            ),
            (
                "cohort-export.service",
                include_str!("../../deploy/cohort-export.service"),
            ),
            ("lab.target", "[Unit]\nDefaultDependencies=no\n"),
            // Of a host's usual services none runs here.
            (
                "service.d/lab.conf",
                "[Unit]\nDefaultDependencies=no\n\
                 [Service]\nStandardOutput=append:/out/units.log\nStandardError=inherit\n",
            ),
        ] {
            fs::write(Path::new(UNITS).join(name), text)?;
        }
        let mut command = Command::new("unshare");
        command
            .args(["--pid", "--fork", "--mount-proc", "--kill-child"])
            .args(["/usr/lib/systemd/systemd", "--system", "--unit=lab.target"])
            .args(["--log-target=kmsg", "--show-status=no"])
            .env("container", "lab");
        let systemd = Self(Service(start(command, &[], None)?));
        // Not by asking it: whoever enters its namespace before it does would be the first process there.
        wait_for("systemd", PATIENCE, || {
            Ok(Path::new("/run/systemd/private").exists().then_some(()))
        })?;
        Ok(systemd)
    }

    /// What `systemctl` says, if it succeeds. It must see the processes that systemd sees, or that does not answer.
    fn ctl(&self, arguments: &[&str]) -> Result<String> {
        let pid = self.0.0.id();
        let output = Command::new("nsenter")
            .arg(format!("--mount=/proc/{pid}/ns/mnt"))
            .arg(format!("--pid=/proc/{pid}/ns/pid_for_children"))
            .args(["timeout", "60", "systemctl"])
            .args(arguments)
            .output()?;
        ensure!(
            output.status.success(),
            "systemctl {arguments:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8(output.stdout)?)
    }
}

/// A program as a user who owns nothing, and is in `group` only.
fn as_another_user(group: &str, program: &[&str]) -> Command {
    let mut command = Command::new("setpriv");
    command
        .args(["--reuid=65534", "--regid", group, "--clear-groups"])
        .args(program);
    command
}

fn mode(path: &str) -> Result<u32> {
    let metadata = fs::metadata(path).with_context(|| String::from(path))?;
    Ok(metadata.permissions().mode() & 0o7777)
}

fn units() -> Result<()> {
    back_to_stock()?;
    fs::create_dir_all("/usr/sbin")?;
    fs::copy("/cohort/bin/cohort", "/usr/sbin/cohort")?;
    fs::write("/etc/cohort.toml", include_str!("../../deploy/cohort.toml"))?;
    let mut groups = File::options().append(true).open("/etc/group")?;
    writeln!(groups, "cohort:x:{GROUP}:")?;
    let guest = Guest::busy("unit", 2)?;
    let systemd = Systemd::start()?;
    systemd.ctl(&["start", "cohort", "cohort-export"])?;

    // Longer than it takes until cookies are looked for.
    sleep(Duration::from_secs(7));
    let vm = vm_stats(guest.micro.pid() as u32)?;
    ensure!(vm.vcpus == 2, "{} vCPUs were recognised, not 2", vm.vcpus);
    let page = ureq::get("http://127.0.0.1:9745/metrics").call()?;
    let page = page.into_body().read_to_string()?;
    ensure!(page.contains("cohort_"), "no metrics: {page}");
    set(&["ipi=off"])?;

    ensure!(
        (
            mode("/run/cohort")?,
            mode(CONTROL)?,
            mode(STATE)?,
            mode(STATS)?
        ) == (0o700, 0o600, 0o600, 0o660)
    );
    for (group, may_look) in [(GROUP, true), ("65534", false)] {
        refused(
            &mut as_another_user(group, &["cohort", "set"]),
            Exit::NoPrivileges,
            "root",
        )?;
        let mut lock = as_another_user(group, &["flock", "--nonblock", STATE, "true"]);
        ensure!(!lock.status()?.success(), "another user locks its state");
        let mut look = as_another_user(group, &["cohort", "stats", "--count", "1"]);
        match may_look {
            true => ensure!(look.status()?.success(), "a member of the group may look"),
            false => refused(&mut look, Exit::NoPrivileges, "group `cohort`")?,
        }
    }

    for unit in ["cohort", "cohort-export"] {
        let shown = systemd.ctl(&["show", "-p", "ActiveState,NRestarts", unit])?;
        ensure!(
            shown.contains("ActiveState=active") && shown.contains("NRestarts=0"),
            "{unit}: {shown}"
        );
    }
    systemd.ctl(&["stop", "cohort", "cohort-export"])?;
    wait_for_sched_ext("disabled", PATIENCE)?;
    ensure!(scheduler::loaded_ops().is_empty(), "it is loaded still");
    let result = systemd.ctl(&["show", "-p", "Result", "cohort"])?;
    ensure!(result.contains("Result=success"), "{result}");
    for path in [STATS, CONTROL] {
        ensure!(!Path::new(path).exists(), "{path} is left");
    }
    Ok(())
}
