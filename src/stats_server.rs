// SPDX-License-Identifier: GPL-2.0-only
//! The socket at which other programs ask a running `cohort run` for statistics,
//! with the protocol of scx_stats, which describes its own fields. `cohort stats`
//! is one such program, the scripts of scx_stats are others.

use crate::host::paths::Host;
use crate::metrics::{HostStats, Reading, VmStats};
use anyhow::{Context, Result};
use scx_stats::prelude::*;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

/// What a request is answered with: the counters, or why they cannot be read.
type Answer = Result<Reading, String>;

/// A request comes without arguments.
type Server = scx_stats::StatsServer<(), Answer>;

/// Where the socket is; programs made for scx_stats look there.
pub fn socket_path(host: &Host) -> PathBuf {
    host.run.join("scx/root/stats")
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
            .add_ops("top", connection(at_load));
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

    /// Waits at most `timeout` for a request, and answers it with `read`.
    ///
    /// A failed reading is told to whoever asked; scheduling goes on without
    /// being looked at.
    pub fn answer(&self, timeout: Duration, read: impl FnOnce() -> Result<Reading>) -> Result<()> {
        const GONE: &str = "the thread that serves statistics has ended; this is a fault of Cohort";
        let Some(server) = &self.server else {
            return Ok(());
        };
        let (answers, requests) = server.channels();
        match requests.recv_timeout(timeout) {
            Ok(()) => {
                let answer = read().map_err(|error| format!("{error:#}"));
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
fn connection(at_load: Reading) -> StatsOps<(), Answer> {
    StatsOps {
        open: Box::new(move |_| {
            let mut before = at_load.clone();
            Ok(Box::new(move |_arguments, (requests, answers)| {
                requests.send(())?;
                let now = answers.recv()?.map_err(anyhow::Error::msg)?;
                let stats = HostStats::between(&before, &now);
                before = now;
                stats.to_json()
            }))
        }),
        close: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::paths::fixture::Fixture;
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
            let read = || {
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
            .answer(Duration::from_secs(5), || anyhow::bail!("no memory"))
            .expect("serving goes on");
        let error = client.join().expect("no panic").expect_err("no reading");
        assert!(format!("{error:#}").contains("no memory"));
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
