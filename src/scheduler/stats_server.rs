// SPDX-License-Identifier: GPL-2.0-only
//! The sockets at which other programs ask a running `cohort run` for statistics,
//! and tell it to switch mechanisms, with the protocol of scx_stats, which
//! describes its own fields. `cohort stats` and `cohort set` are two such
//! programs, the scripts of scx_stats are others.
//!
//! Who may only look must not be able to switch, so there are two sockets, and
//! the kernel decides at each who may connect. One socket would need a look at
//! who is at its other end before each request, which scx_stats does not offer.

use crate::host::paths::Host;
use crate::host::private;
use crate::process::exit::{Exit, Failure};
use crate::scheduler::mechanism::Switch;
use crate::scheduler::metrics::{HostStats, MechanismStats, Reading, VmStats};
use anyhow::{Context, Result, anyhow, bail};
use crossbeam_channel::{Receiver, Select, Sender};
use nix::unistd::{Gid, Group};
use scx_stats::prelude::*;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::mem;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

/// The group whose members may read statistics, if this host has it.
pub const GROUP: &str = "cohort";

/// The target of a request for the mechanisms since load. Its other arguments
/// are switches to make before: a name, and `on` or `off`.
pub const MECHANISMS: &str = "mechanisms";

/// A busy host may take a moment; longer means that nobody is there.
pub const PATIENCE: Duration = Duration::from_secs(5);

/// What is to be switched before the counters are read.
type Request = Vec<Switch>;

/// What a request is answered with: the counters, or why they cannot be read.
type Answer = Result<Reading, String>;

type Server = scx_stats::StatsServer<Request, Answer>;

/// Where statistics are; programs made for scx_stats look there.
pub fn stats_path(host: &Host) -> PathBuf {
    host.run.join("scx/root/stats")
}

/// Where mechanisms are switched.
pub fn control_path(host: &Host) -> PathBuf {
    host.state_folder().join("control")
}

/// Connects to the `cohort run` of this host, to read statistics; each answer has to come within `patience`.
///
/// # Errors
/// With [`Exit::NotRunning`] when there is none, and [`Exit::NoPrivileges`] when the caller may not.
pub fn connect(host: &Host, patience: Duration) -> Result<StatsClient, Failure> {
    let who = format!(
        "root and members of the group `{GROUP}`, which `cohort run` looks up when it starts,"
    );
    connect_at(&stats_path(host), &who, patience)
}

/// Connects to the `cohort run` of this host, to switch mechanisms.
///
/// # Errors
/// As [`connect`].
pub fn connect_to_control(host: &Host) -> Result<StatsClient, Failure> {
    connect_at(&control_path(host), "root", PATIENCE)
}

fn connect_at(path: &Path, who: &str, patience: Duration) -> Result<StatsClient, Failure> {
    let client = StatsClient::new().set_path(path);
    let timeout_ms = u64::try_from(patience.as_millis()).ok();
    client.connect(timeout_ms).map_err(|error| {
        let path = path.display();
        let kind = error.downcast_ref().map(io::Error::kind);
        let (exit, sentence) = match kind {
            Some(io::ErrorKind::PermissionDenied) => (
                Exit::NoPrivileges,
                format!("only {who} may connect to {path} ({error:#})"),
            ),
            _ => (
                Exit::NotRunning,
                format!(
                    "nobody answers at {path} ({error:#}), so no `cohort run` is running here. Start it first"
                ),
            ),
        };
        Failure::new(exit, anyhow!(sentence))
    })
}

/// Serves statistics and control until it is dropped. Nothing that happens to it ends scheduling.
pub struct StatsServer {
    sockets: Vec<Socket>,
}

impl StatsServer {
    /// Opens the sockets; the log says which cannot be opened. `at_load` is when the scheduler was loaded.
    pub fn open(host: &Host, at_load: &Reading) -> Self {
        let group = Group::from_name(GROUP).unwrap_or_else(|error| {
            tracing::warn!("whether there is a group {GROUP:?} cannot be found out: {error}");
            None
        });
        Self::open_to(host, at_load, group.map(|group| group.gid))
    }

    /// As [`Self::open`], with the group whose members may read statistics.
    fn open_to(host: &Host, at_load: &Reading, group: Option<Gid>) -> Self {
        let mut sockets = Vec::new();
        for (what, socket) in [
            ("statistics", open_stats(host, at_load.clone(), group)),
            (
                "switches of mechanisms",
                open_control(host, at_load.clone()),
            ),
        ] {
            match socket {
                Ok(socket) => sockets.push(socket),
                Err(error) => {
                    tracing::error!(
                        "there are no {what} in this run: {error:#}; scheduling goes on"
                    );
                }
            }
        }
        Self { sockets }
    }

    /// Waits at most `timeout` for a request, and answers it with what `serve`
    /// reads after it made the switches.
    ///
    /// A failed reading is told to whoever asked; scheduling goes on without
    /// being looked at.
    pub fn answer(&mut self, timeout: Duration, serve: impl FnOnce(&[Switch]) -> Result<Reading>) {
        let mut select = Select::new();
        for socket in &self.sockets {
            select.recv(&socket.requests);
        }
        let Ok(request) = select.select_timeout(timeout) else {
            return;
        };
        let number = request.index();
        let socket = &self.sockets[number];
        let answered = request.recv(&socket.requests).is_ok_and(|switches| {
            let answer = serve(&switches).map_err(|error| format!("{error:#}"));
            socket.answers.send(answer).is_ok()
        });
        if !answered {
            // A channel that is gone would be ready at once each time.
            let socket = self.sockets.remove(number);
            tracing::error!(
                "the thread that serves {} has ended, so nobody is answered there; this is a fault of Cohort, and \
                 scheduling goes on",
                socket.path.display()
            );
        }
    }
}

fn open_stats(host: &Host, at_load: Reading, group: Option<Gid>) -> Result<Socket> {
    // Both folders are those of all sched_ext schedulers.
    private::shared_folder(&host.run.join("scx"))?;
    private::shared_folder(&host.run.join("scx/root"))?;
    let data = StatsServerData::new()
        .add_meta(HostStats::meta())
        .add_meta(VmStats::meta())
        .add_meta(MechanismStats::meta())
        .add_ops("top", windows(at_load));
    let socket = Socket::open(data, stats_path(host))?;
    if let Err(error) = private::open_socket_to(&socket.path, group) {
        tracing::warn!("statistics are for root only: {error:#}");
    }
    Ok(socket)
}

fn open_control(host: &Host, at_load: Reading) -> Result<Socket> {
    private::own_folder(&host.state_folder())?;
    let data = StatsServerData::new().add_ops(MECHANISMS, mechanisms(at_load));
    let socket = Socket::open(data, control_path(host))?;
    private::open_socket_to(&socket.path, None)?;
    Ok(socket)
}

/// A socket and who serves it.
struct Socket {
    requests: Receiver<Request>,
    answers: Sender<Answer>,
    path: PathBuf,
}

impl Socket {
    /// Opens it for this user alone. What another run left there is replaced.
    fn open(data: StatsServerData<Request, Answer>, path: PathBuf) -> Result<Self> {
        let server = Server::new(data).set_path(&path);
        // The threads that serve have the files of the one that starts them.
        let launch = thread::Builder::new().spawn(|| {
            own_files()?;
            private::narrowly(|| server.launch())
        });
        let server = launch
            .map_err(anyhow::Error::new)
            .and_then(|launch| {
                launch
                    .join()
                    .unwrap_or_else(|_| bail!("no thread serves it"))
            })
            .with_context(|| {
                format!(
                    "the socket {} cannot be opened; check that its folder is writable",
                    path.display()
                )
            })?;
        let (answers, requests) = server.channels();
        // It lives as long as the process. To end it takes a connection to the socket, which waits while clients fill its queue.
        mem::forget(server);
        Ok(Self {
            requests,
            answers,
            path,
        })
    }
}

impl Drop for Socket {
    /// Removes the socket, so that the host is left as it was found.
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!("{} cannot be removed: {error}", self.path.display());
        }
    }
}

/// Gives this thread, and those that it starts, a table of files of their own, without the files that are open now. So
/// connections of clients, however many there are, use up no file that something else needs: without any, Cohort could not
/// see whether core-scheduling cookies came, and would have to leave.
fn own_files() -> io::Result<()> {
    const FIRST_AFTER_STANDARD_ONES: libc::c_uint = 3;
    let flags = libc::CLOSE_RANGE_UNSHARE as libc::c_int;
    // SAFETY: it takes numbers only. What it closes stays open for whoever uses it, in the table of all other threads.
    match unsafe { libc::close_range(FIRST_AFTER_STANDARD_ONES, libc::c_uint::MAX, flags) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Each connection sees windows of its own: the first since the scheduler was
/// loaded, each further one since its previous request.
fn windows(at_load: Reading) -> StatsOps<Request, Answer> {
    StatsOps {
        open: Box::new(move |_| {
            let mut before = at_load.clone();
            Ok(Box::new(move |_arguments, (requests, answers)| {
                requests.send(Request::new())?;
                let now = answers.recv()?.map_err(anyhow::Error::msg)?;
                let stats = HostStats::between(&before, &now);
                before = now;
                stats.to_json()
            }))
        }),
        close: None,
    }
}

/// The mechanisms since load, after those named in a request were switched.
fn mechanisms(at_load: Reading) -> StatsOps<Request, Answer> {
    StatsOps {
        open: Box::new(move |_| {
            let at_load = at_load.clone();
            Ok(Box::new(move |arguments, (requests, answers)| {
                requests.send(switches(arguments)?)?;
                let now = answers.recv()?.map_err(anyhow::Error::msg)?;
                let mechanisms = HostStats::between(&at_load, &now).mechanisms;
                Ok(serde_json::to_value(mechanisms)?)
            }))
        }),
        close: None,
    }
}

fn switches(arguments: &BTreeMap<String, String>) -> Result<Request> {
    arguments
        .iter()
        .filter(|(name, _)| *name != "target")
        .map(|(name, state)| Switch::parse(name, state).map_err(anyhow::Error::msg))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::paths::fixture::Fixture;
    use crate::host::private::another_user;
    use crate::scheduler::mechanism::{Mechanism, Mechanisms};
    use crate::text::printer::log;
    use crossbeam_channel::unbounded;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::thread;
    use std::time::Instant;

    const SECOND_NS: u64 = 1_000_000_000;

    /// What a client says to have a mechanism switched.
    fn to_switch(name: &str, state: &str) -> Vec<(String, String)> {
        [("target", MECHANISMS), (name, state)]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .to_vec()
    }

    #[test]
    fn the_first_window_is_since_load_and_the_next_since_the_first() {
        let fixture = Fixture::new();
        let host = fixture.host();
        let mut server = StatsServer::open(&host, &Reading::at_load(0));
        let path = stats_path(&host);
        let client = thread::spawn(move || {
            let mut client = StatsClient::new()
                .set_path(path)
                .connect(Some(5000))
                .expect("the server listens");
            [(); 2].map(|()| {
                client
                    .request::<HostStats>("stats", vec![])
                    .expect("it answers")
                    .window_ms
            })
        });
        let clock_ns = AtomicU64::new(2 * SECOND_NS);
        for _ in 0..2 {
            let read = |_: &[Switch]| {
                Ok(Reading::at_load(
                    clock_ns.fetch_add(SECOND_NS, Ordering::Relaxed),
                ))
            };
            server.answer(Duration::from_secs(5), read);
        }
        assert_eq!(client.join().expect("no panic"), [2000, 1000]);
    }

    #[test]
    fn a_failed_reading_is_told_to_whoever_asked() {
        let fixture = Fixture::new();
        let host = fixture.host();
        let mut server = StatsServer::open(&host, &Reading::at_load(0));
        let path = stats_path(&host);
        let client = thread::spawn(move || {
            StatsClient::new()
                .set_path(path)
                .connect(Some(5000))
                .expect("the server listens")
                .request::<HostStats>("stats", vec![])
        });
        server.answer(Duration::from_secs(5), |_| anyhow::bail!("no memory"));
        let error = client.join().expect("no panic").expect_err("no reading");
        assert!(format!("{error:#}").contains("no memory"));
    }

    #[test]
    fn a_switch_is_made_before_the_mechanisms_are_shown() {
        let fixture = Fixture::new();
        let host = fixture.host();
        let mut server = StatsServer::open(&host, &Reading::at_load(0));
        let ask = |name: &str, state: &str| {
            let arguments = to_switch(name, state);
            let host = host.clone();
            thread::spawn(move || {
                connect_to_control(&host)
                    .expect("the server listens")
                    .request::<BTreeMap<String, MechanismStats>>("stats", arguments)
            })
        };
        let client = ask("ipi", "off");
        let switch_ipi = |switches: &[Switch]| {
            assert_eq!(switches, ["ipi=off".parse().expect("it is well-formed")]);
            Ok(Reading {
                mechanisms: Mechanisms::all_but(&[Mechanism::Ipi]),
                ..Reading::at_load(SECOND_NS)
            })
        };
        server.answer(Duration::from_secs(5), switch_ipi);
        let shown = client.join().expect("no panic").expect("it is answered");
        assert_eq!((shown["ipi"].on, shown["wake"].on), (0, 1));

        let error = ask("ipis", "off").join().expect("no panic");
        let sentence = format!("{:#}", error.expect_err("there is no such mechanism"));
        assert!(sentence.contains("ipis"), "{sentence}");
    }

    #[test]
    fn the_sockets_go_with_the_server() {
        let fixture = Fixture::new();
        let host = fixture.host();
        let server = StatsServer::open(&host, &Reading::at_load(0));
        let are_there = || [stats_path(&host), control_path(&host)].map(|path| path.exists());
        assert_eq!(are_there(), [true; 2]);
        drop(server);
        assert_eq!(are_there(), [false; 2]);
    }

    #[test]
    fn who_may_read_statistics_cannot_switch() {
        let fixture = Fixture::new();
        let host = fixture.host();
        let mut server = StatsServer::open(&host, &Reading::at_load(0));
        let path = stats_path(&host);
        let client = thread::spawn(move || {
            let arguments = to_switch("ipi", "off");
            let client = StatsClient::new().set_path(path).connect(Some(5000));
            let mut client = client.expect("the server listens");
            let switched = client.request::<serde_json::Value>("stats", arguments);
            let of_top = vec![("ipi".to_owned(), "off".to_owned())];
            (
                switched.is_err(),
                client.request::<HostStats>("stats", of_top),
            )
        });
        let only_read = |switches: &[Switch]| {
            assert!(switches.is_empty());
            Ok(Reading::at_load(SECOND_NS))
        };
        server.answer(Duration::from_secs(5), only_read);
        let (refused, stats) = client.join().expect("no panic");
        assert!(refused, "there are no mechanisms at this socket");
        stats.expect("what does not belong to a request is ignored");
    }

    #[test]
    fn other_users_may_connect_only_to_statistics_and_only_from_the_group() {
        const MEMBERS: u32 = 4711;
        let fixture = Fixture::new();
        let host = fixture.host();
        // Nothing but what the server sets keeps others out.
        std::fs::create_dir(&host.run).expect("it can be made");
        for folder in [host.run.parent().expect("it has one"), &host.run] {
            let wide = fs::Permissions::from_mode(0o755);
            fs::set_permissions(folder, wide).expect("it is ours");
        }
        let may = |group| {
            let exit =
                |result: Result<StatsClient, Failure>| result.err().map(|error| error.exit());
            another_user::does(group, || {
                [
                    exit(connect(&host, PATIENCE)),
                    exit(connect_to_control(&host)),
                ]
            })
        };
        let open = |group| {
            another_user::with_umask(0, || {
                StatsServer::open_to(&host, &Reading::at_load(0), group)
            })
        };
        let refused = Some(Exit::NoPrivileges);
        let server = open(None);
        assert!(may(MEMBERS).is_none_or(|may| may == [refused, refused]));
        drop(server);
        // Who is not root can only say his own group.
        let group = if nix::unistd::geteuid().is_root() {
            Gid::from_raw(MEMBERS)
        } else {
            nix::unistd::getegid()
        };
        let _server = open(Some(group));
        assert!(may(MEMBERS).is_none_or(|may| may == [None, refused]));
        assert!(may(65534).is_none_or(|may| may == [refused, refused]));
        let mode = |path: &Path| fs::metadata(path).expect("it is there").mode() & 0o7777;
        assert_eq!(mode(&stats_path(&host)), 0o660);
        assert_eq!(mode(&control_path(&host)), 0o600);
        assert_eq!(mode(&host.state_folder()), 0o700);
    }

    #[test]
    fn sockets_that_cannot_be_opened_are_said_and_end_nothing() {
        let fixture = Fixture::new()
            .with("run/scx", "no folder")
            .with("run/cohort", "nor this");
        let host = fixture.host();
        let begin = Instant::now();
        let said = log::of(|| {
            let mut server = StatsServer::open(&host, &Reading::at_load(0));
            server.answer(Duration::from_millis(100), |_| panic!("nobody can ask"));
        });
        assert_eq!(said.len(), 2, "{said:?}");
        assert!(
            said.iter().all(|line| line.contains("scheduling goes on")),
            "{said:?}"
        );
        // Whoever calls it counts on that, so as not to do so all the time.
        assert!(begin.elapsed() >= Duration::from_millis(100));
    }

    #[test]
    fn a_server_that_has_ended_is_said_once_and_the_other_answers() {
        let fixture = Fixture::new();
        let host = fixture.host();
        let mut server = StatsServer::open(&host, &Reading::at_load(0));
        // As if its threads had ended: nobody has the other ends.
        let of_stats = &mut server.sockets[0];
        let path = of_stats.path.clone();
        (of_stats.answers, of_stats.requests) = (unbounded().0, unbounded().1);
        let patience = Duration::from_millis(50);
        let said = log::of(|| {
            for _ in 0..3 {
                server.answer(patience, |_| panic!("nobody asks"));
            }
        });
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0].contains(&path.display().to_string()), "{said:?}");
        assert!(!path.exists(), "nobody is to wait there");
        let client = thread::spawn(move || {
            let arguments = vec![("target".to_owned(), MECHANISMS.to_owned())];
            let mut client = connect_to_control(&host).expect("it is open");
            client.request::<serde_json::Value>("stats", arguments)
        });
        server.answer(Duration::from_secs(5), |_| Ok(Reading::at_load(SECOND_NS)));
        client.join().expect("no panic").expect("it is answered");
    }
}
