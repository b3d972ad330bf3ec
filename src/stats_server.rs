// SPDX-License-Identifier: GPL-2.0-only
//! The socket at which other programs ask a running `cohort run` for statistics,
//! and tell it to switch mechanisms, with the protocol of scx_stats, which
//! describes its own fields. `cohort stats` and `cohort set` are two such
//! programs, the scripts of scx_stats are others.

use crate::exit::{Exit, Failure};
use crate::host::paths::Host;
use crate::mechanism::Switch;
use crate::metrics::{HostStats, MechanismStats, Reading, VmStats};
use anyhow::{Context, Result};
use scx_stats::prelude::*;
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

/// The target of a request for the mechanisms since load. Its other arguments
/// are switches to make before: a name, and `on` or `off`.
pub const MECHANISMS: &str = "mechanisms";

/// A busy host may take a moment; longer means that nobody is there.
const ANSWER_TIMEOUT_MS: u64 = 5_000;

/// What is to be switched before the counters are read.
type Request = Vec<Switch>;

/// What a request is answered with: the counters, or why they cannot be read.
type Answer = Result<Reading, String>;

type Server = scx_stats::StatsServer<Request, Answer>;

/// Where the socket is; programs made for scx_stats look there.
pub fn socket_path(host: &Host) -> PathBuf {
    host.run.join("scx/root/stats")
}

/// Connects to the `cohort run` of this host.
///
/// # Errors
/// With [`Exit::NotRunning`] when there is none.
pub fn connect(host: &Host) -> Result<StatsClient, Failure> {
    let path = socket_path(host);
    StatsClient::new()
        .set_path(&path)
        .connect(Some(ANSWER_TIMEOUT_MS))
        .map_err(|error| {
            let sentence = format!(
                "nobody answers at {}, so no `cohort run` is running here. Start it first, and \
                 run this as root",
                path.display()
            );
            Failure::new(Exit::NotRunning, error.context(sentence))
        })
}

/// Serves statistics until it is dropped.
pub struct StatsServer {
    server: Option<Server>,
    path: PathBuf,
}

impl StatsServer {
    /// Opens the socket. `at_load` is when the scheduler was loaded.
    pub fn open(host: &Host, at_load: Reading) -> Result<Self> {
        let path = socket_path(host);
        let data = StatsServerData::new()
            .add_meta(HostStats::meta())
            .add_meta(VmStats::meta())
            .add_meta(MechanismStats::meta())
            .add_ops("top", windows(at_load.clone()))
            .add_ops(MECHANISMS, mechanisms(at_load));
        let server = Server::new(data)
            .set_path(&path)
            .launch()
            .with_context(|| {
                format!(
                    "the socket for statistics, {}, cannot be opened; check that its folder is \
                     writable",
                    path.display()
                )
            })?;
        Ok(Self {
            server: Some(server),
            path,
        })
    }

    /// Waits at most `timeout` for a request, and answers it with what `serve`
    /// reads after it made the switches.
    ///
    /// A failed reading is told to whoever asked; scheduling goes on without
    /// being looked at.
    pub fn answer(
        &self,
        timeout: Duration,
        serve: impl FnOnce(&[Switch]) -> Result<Reading>,
    ) -> Result<()> {
        const GONE: &str = "the thread that serves statistics has ended; this is a fault of Cohort";
        let Some(server) = &self.server else {
            return Ok(());
        };
        let (answers, requests) = server.channels();
        match requests.recv_timeout(timeout) {
            Ok(switches) => {
                let answer = serve(&switches).map_err(|error| format!("{error:#}"));
                answers.send(answer).context(GONE)
            }
            Err(error) if error.is_timeout() => Ok(()),
            Err(error) => Err(error).context(GONE),
        }
    }
}

impl Drop for StatsServer {
    /// Removes the socket, so that the host is left as it was found.
    fn drop(&mut self) {
        // The server's own end connects to the socket once, so it goes first.
        drop(self.server.take());
        if let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!("{} cannot be removed: {error}", self.path.display());
        }
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
    use crate::mechanism::{Mechanism, Mechanisms};
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::thread;

    const SECOND_NS: u64 = 1_000_000_000;

    #[test]
    fn the_first_window_is_since_load_and_the_next_since_the_first() {
        let fixture = Fixture::new();
        let host = fixture.host();
        let server = StatsServer::open(&host, Reading::at_load(0)).expect("the folder is ours");
        let path = socket_path(&host);
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
            server
                .answer(Duration::from_secs(5), read)
                .expect("the reading is made up");
        }
        assert_eq!(client.join().expect("no panic"), [2000, 1000]);
    }

    #[test]
    fn a_failed_reading_is_told_to_whoever_asked() {
        let fixture = Fixture::new();
        let host = fixture.host();
        let server = StatsServer::open(&host, Reading::at_load(0)).expect("the folder is ours");
        let path = socket_path(&host);
        let client = thread::spawn(move || {
            StatsClient::new()
                .set_path(path)
                .connect(Some(5000))
                .expect("the server listens")
                .request::<HostStats>("stats", vec![])
        });
        server
            .answer(Duration::from_secs(5), |_| anyhow::bail!("no memory"))
            .expect("serving goes on");
        let error = client.join().expect("no panic").expect_err("no reading");
        assert!(format!("{error:#}").contains("no memory"));
    }

    #[test]
    fn a_switch_is_made_before_the_mechanisms_are_shown() {
        let fixture = Fixture::new();
        let host = fixture.host();
        let server = StatsServer::open(&host, Reading::at_load(0)).expect("the folder is ours");
        let ask = |name: &str, state: &str| {
            let arguments = [("target", MECHANISMS), (name, state)];
            let arguments = arguments.map(|(name, value)| (name.to_owned(), value.to_owned()));
            let host = host.clone();
            thread::spawn(move || {
                connect(&host)
                    .expect("the server listens")
                    .request::<BTreeMap<String, MechanismStats>>("stats", arguments.to_vec())
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
        server
            .answer(Duration::from_secs(5), switch_ipi)
            .expect("the reading is made up");
        let shown = client.join().expect("no panic").expect("it is answered");
        assert_eq!((shown["ipi"].on, shown["wake"].on), (0, 1));

        let error = ask("ipis", "off").join().expect("no panic");
        let sentence = format!("{:#}", error.expect_err("there is no such mechanism"));
        assert!(sentence.contains("ipis"), "{sentence}");
    }

    #[test]
    fn the_socket_goes_with_the_server() {
        let fixture = Fixture::new();
        let host = fixture.host();
        let server = StatsServer::open(&host, Reading::at_load(0)).expect("the folder is ours");
        assert!(socket_path(&host).exists());
        drop(server);
        assert!(!socket_path(&host).exists());
    }
}
