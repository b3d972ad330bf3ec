// SPDX-License-Identifier: GPL-2.0-only
//! Cohort as a service of a host with other users: what they do, and what becomes of its output, ends nothing; and its units
//! take nothing from it that it needs.

use std::fs::{self, File};
use std::io::{Read, Write, pipe};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::{sleep, spawn};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use cohort::commands::compare::notify::Notifications;
use cohort::commands::compare::scheduler;
use cohort::process::exit::Exit;
use cohort::process::wait::wait_for;
use cohort_lab::inside::process::start;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::Test;
use crate::host::{
    Guest, PATIENCE, Service, Setting, back_to_stock, cohort_stats, dozing, refused, set,
    start_until_ready, vm_stats, wait_for_sched_ext,
};
use crate::pod::Pod;

pub const TESTS: &[Test] = &[
    ("a_full_disk_or_nobody_who_reads_ends_nothing", nobody_reads),
    (
        "clients_that_keep_all_files_open_take_none_from_scheduling",
        many_clients,
    ),
    ("the_journal_gets_priorities", priorities),
    ("the_pod_of_the_manifest_schedules_its_node", pod),
    // The last one: systemd gives the cgroups another order.
    (
        "the_package_is_installed_upgraded_rolled_back_and_purged_beside_vms",
        package,
    ),
];

const STATS: &str = "/run/scx/root/stats";
const CONTROL: &str = "/run/cohort/control";
const STATE: &str = "/run/cohort/run.json";
const SETTINGS: &str = "/etc/cohort.toml";
const PROGRAM: &str = "/usr/sbin/cohort";
const PACKAGE: &str = "/cohort/cohort.deb";

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

/// Those who read the journal by priority find failures there.
fn priorities() -> Result<()> {
    let (mut reader, writer) = pipe()?;
    // As systemd does it: the variable names the file that standard error is.
    let journal = File::from(OwnedFd::from(writer.try_clone()?)).metadata()?;
    let mut command = Command::new("cohort");
    command
        .args(["run", "--config", "/nowhere/cohort.toml"])
        .env(
            "JOURNAL_STREAM",
            format!("{}:{}", journal.dev(), journal.ino()),
        )
        .stderr(writer);
    let status = command.status()?;
    ensure!(
        status.code() == Some(Exit::Config.code().into()),
        "{status}"
    );
    drop(command);
    let mut said = String::new();
    reader.read_to_string(&mut said)?;
    ensure!(
        said.starts_with("<3>cohort: the settings in /nowhere"),
        "{said}"
    );
    Ok(())
}

/// systemd, which is the first process for itself and what it starts. The package's files are its units.
struct Systemd(Service);

impl Systemd {
    fn start() -> Result<Self> {
        const UNITS: &str = "/etc/systemd/system";
        fs::create_dir_all(format!("{UNITS}/service.d"))?;
        for (name, text) in [
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

    /// What a command prints that sees the processes that systemd sees, if it succeeds: else that does not answer.
    fn run(&self, command: &[&str]) -> Result<String> {
        let pid = self.0.0.id();
        let output = Command::new("nsenter")
            .arg(format!("--mount=/proc/{pid}/ns/mnt"))
            .arg(format!("--pid=/proc/{pid}/ns/pid_for_children"))
            .args(["timeout", "300"])
            .args(command)
            .output()?;
        ensure!(
            output.status.success(),
            "{command:?}: {}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8(output.stdout)?)
    }

    fn ctl(&self, arguments: &[&str]) -> Result<String> {
        self.run(&[&["systemctl"], arguments].concat())
    }

    /// A property of the unit `cohort`.
    fn show(&self, property: &str) -> Result<String> {
        let value = self.ctl(&["show", "--value", "--property", property, "cohort"])?;
        Ok(String::from(value.trim()))
    }

    /// Waits until a property of the unit `cohort` is as it should be.
    fn wait_for(&self, property: &str, is_so: impl Fn(&str) -> bool) -> Result<String> {
        let mut last = String::new();
        let what = format!("{property} of the unit as expected");
        wait_for(&what, PATIENCE, || {
            last = self.show(property)?;
            Ok(is_so(&last).then(|| last.clone()))
        })
        .with_context(|| format!("{property} is {last:?}"))
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

/// The pod's containers, one after the other as on a node: the first one looks whether the node is fit, the second one
/// schedules it, answers programs outside, leaves when it is told to, and stays away once a person has removed it.
fn pod() -> Result<()> {
    back_to_stock()?;
    let guest = dozing("pod", 2)?;
    let pod = Pod::of_manifest()?;
    let status = pod.start("doctor")?.0.wait()?;
    ensure!(status.success(), "the node is not fit: {status}");

    for removed in [false, true] {
        let mut container = pod.start("cohort")?;
        // It answers a moment after it schedules.
        wait_for("Cohort's answer", PATIENCE, || Ok(cohort_stats().ok()))?;
        let vm = vm_stats(guest.micro.pid() as u32)?;
        ensure!(vm.vcpus == 2, "{} vCPUs were recognised, not 2", vm.vcpus);
        set(&["ipi=off"])?;
        if removed {
            fs::write("/proc/sysrq-trigger", "S")?;
            wait_for_sched_ext("disabled", PATIENCE)?;
            let said = || Ok(pod.said()?.contains("(code 23, see above)").then_some(()));
            wait_for("the container to say why it waits", PATIENCE, said)?;
            ensure!(
                container.0.try_wait()?.is_none(),
                "it would be started again"
            );
        }
        pod.terminate()?;
        let status = wait_for("the container's end", PATIENCE, || {
            Ok(container.0.try_wait()?)
        })?;
        ensure!(removed || status.success(), "{status}: {}", pod.said()?);
        wait_for_sched_ext("disabled", PATIENCE)?;
        for path in [STATS, CONTROL] {
            ensure!(!Path::new(path).exists(), "{path} is left");
        }
    }
    Ok(())
}

/// What operators do with the package and the units, from its installation to its removal, beside a VM that runs throughout.
fn package() -> Result<()> {
    back_to_stock()?;
    ensure!(
        Path::new(PACKAGE).exists(),
        "there is no Debian package that is as new as the program: run `make deb` before"
    );
    // A pod that failed may be about to leave.
    wait_for_sched_ext("disabled", PATIENCE)?;
    let guest = dozing("unit", 2)?;
    let systemd = Systemd::start()?;
    let install = |package: &str| systemd.run(&["dpkg", "--install", package]);

    install(PACKAGE)?;
    ensure!(systemd.show("ActiveState")? == "inactive");
    ensure!(
        scheduler::loaded_ops().is_empty(),
        "nobody told it to take over"
    );
    ensure!(
        Path::new("/usr/share/man/man8/cohort-run.8.gz").exists()
            && Path::new("/usr/share/bash-completion/completions/cohort").exists()
    );
    systemd.ctl(&["start", "cohort", "cohort-export"])?;
    rights(&guest)?;
    reload(&systemd)?;
    restarts(&systemd)?;
    upgrades(&systemd, &guest, &install)?;
    removal(&systemd)
}

/// The units take nothing from the services that these need, and give others no more than they should have.
fn rights(guest: &Guest) -> Result<()> {
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
    let groups = fs::read_to_string("/etc/group")?;
    let readers = groups.lines().find_map(|line| line.strip_prefix("cohort:"));
    let readers = readers.and_then(|line| line.split(':').nth(1));
    let readers = readers.context("the package makes a group")?;
    for (group, may_look) in [(readers, true), ("65534", false)] {
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
    Ok(())
}

/// What can change changes, the log says what cannot, and a file that is wrong changes nothing.
fn reload(systemd: &Systemd) -> Result<()> {
    systemd.wait_for("StatusText", |text| {
        text.contains("1 VM with 2 vCPUs") && text.ends_with("; off: ipi")
    })?;
    let mut settings = File::options().append(true).open(SETTINGS)?;
    let said = || fs::read_to_string("/out/units.log").map_err(anyhow::Error::from);
    let wait_until_said = |sentence: &str| {
        let said = || Ok(said()?.contains(sentence).then_some(()));
        wait_for(&format!("{sentence:?} in the log"), PATIENCE, said)
    };

    writeln!(settings, "off = [\"packing\"]\nslice = \"3ms\"")?;
    systemd.ctl(&["reload", "cohort"])?;
    wait_until_said("packing is off now")?;
    wait_until_said("slice stays 2ms; 3ms holds from the next start on")?;
    let mechanisms = set(&[])?;
    let is_on = |name: &str| mechanisms.get(name).is_some_and(|stats| stats.on == 1);
    ensure!(!is_on("packing") && is_on("yield"));
    ensure!(!is_on("ipi"), "what `cohort set` switched stays so");

    writeln!(settings, "slices = 1")?;
    systemd.ctl(&["reload", "cohort"])?;
    wait_until_said("unknown field `slices`")?;
    ensure!(systemd.show("ActiveState")? == "active");
    let text = fs::read_to_string(SETTINGS)?;
    fs::write(SETTINGS, text.replace("slices = 1\n", ""))?;
    Ok(())
}

/// It comes back when it was killed, and does not when a person removed it.
fn restarts(systemd: &Systemd) -> Result<()> {
    systemd.ctl(&["kill", "--signal=KILL", "cohort"])?;
    systemd.wait_for("NRestarts", |times| times == "1")?;
    systemd.wait_for("ActiveState", |state| state == "active")?;
    wait_for_sched_ext("enabled", PATIENCE)?;

    fs::write("/proc/sysrq-trigger", "S")?;
    systemd.wait_for("ActiveState", |state| state == "failed")?;
    let status = systemd.show("ExecMainStatus")?;
    ensure!(
        status == Exit::RemovedByOthers.code().to_string(),
        "{status}"
    );
    // Longer than systemd waits before a restart.
    sleep(Duration::from_secs(7));
    ensure!(systemd.show("ActiveState")? == "failed");
    ensure!(scheduler::loaded_ops().is_empty(), "it came back by itself");
    systemd.ctl(&["reset-failed", "cohort"])?;
    systemd.ctl(&["start", "cohort"]).map(drop)
}

/// To a later version and back: each one schedules then, with the settings that the operator made.
fn upgrades(
    systemd: &Systemd,
    guest: &Guest,
    install: &dyn Fn(&str) -> Result<String>,
) -> Result<()> {
    const LATER: &str = "/tmp/later.deb";
    let settings = fs::read_to_string(SETTINGS)?;
    let later = format!(
        "dpkg-deb --raw-extract {PACKAGE} /tmp/later &&
         sed -i 's/^Version: .*/&+later/' /tmp/later/DEBIAN/control &&
         dpkg-deb --root-owner-group -Znone --build /tmp/later {LATER}"
    );
    systemd.run(&["sh", "-c", &later])?;
    for (package, is_later) in [(LATER, true), (PACKAGE, false)] {
        let before = systemd.show("MainPID")?;
        let worked = guest.micro.state.progress();
        install(package)?;
        let version = systemd.run(&[
            "dpkg-query",
            "--show",
            "--showformat",
            "${Version}",
            "cohort",
        ])?;
        ensure!(version.ends_with("+later") == is_later, "{version}");
        ensure!(systemd.show("ActiveState")? == "active");
        let after = systemd.show("MainPID")?;
        ensure!(before != after, "the old program runs still");
        ensure!(scheduler::loaded_ops().starts_with("cohort"));
        ensure!(
            fs::read_to_string(SETTINGS)? == settings,
            "the operator's settings are kept"
        );
        ensure!(guest.micro.state.progress() > worked, "the VM stood still");
    }
    Ok(())
}

/// The host is as it was.
fn removal(systemd: &Systemd) -> Result<()> {
    systemd.run(&["dpkg", "--remove", "cohort"])?;
    wait_for_sched_ext("disabled", PATIENCE)?;
    ensure!(scheduler::loaded_ops().is_empty(), "it is loaded still");
    for path in [STATS, CONTROL, PROGRAM] {
        ensure!(!Path::new(path).exists(), "{path} is left");
    }
    ensure!(
        Path::new(SETTINGS).exists(),
        "settings stay until they are purged"
    );
    systemd.run(&["dpkg", "--purge", "cohort"])?;
    ensure!(!Path::new(SETTINGS).exists(), "settings are left");
    Ok(())
}
