// SPDX-License-Identifier: GPL-2.0-only
//! `cohort export`: what the vCPUs of this host do, for Prometheus. Which metrics there are is in `families`, windows are
//! added up in `totals`, written in `exposition`, and served in `http`.

mod exposition;
mod families;
mod http;
mod totals;

use crate::host::paths::Host;
use crate::host::preflight;
use crate::observer::recording::Recording;
use crate::observer::view::HostView;
use crate::observer::{Observer, Windows};
use crate::process::exit::{Exit, Failure};
use crate::process::limits;
use crate::process::signals::watch_signals;
use crate::process::systemd;
use crate::scheduler::metrics::HostStats;
use crate::scheduler::stats_server::connect;
use anyhow::{Context, Result, anyhow};
use clap::Args;
use exposition::{Exposition, Format};
use http::{Metrics, Page, bound_clients, serve};
use std::mem::MaybeUninit;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Scrapes that follow each other more closely are answered with the same numbers, so that nobody can make the observer
/// busy by asking.
const LEAST_WINDOW: Duration = Duration::from_millis(500);
/// So often the observer is read though nobody asks: what a VM does before it ends is counted up to here.
const TICK_PERIOD: Duration = Duration::from_secs(10);
/// Who scrapes waits no longer than this for what Cohort counts.
const SCHEDULER_PATIENCE: Duration = Duration::from_secs(1);

/// The options of `cohort export`.
#[derive(Args, Clone, Debug)]
pub struct ExportOptions {
    /// Where to listen; if others than this host reach the address, they can read the names of VMs
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:9745", value_parser = address)]
    listen: SocketAddr,

    /// Also export each vCPU on its own: some 60 series per vCPU
    #[arg(long)]
    vcpus: bool,

    /// Export what `cohort watch --record` wrote, one window per scrape, instead of this host; needs no privileges
    #[arg(long, value_name = "FILE")]
    replay: Option<PathBuf>,
}

/// An address, or a name that has one, and a port.
fn address(text: &str) -> Result<SocketAddr, String> {
    let addresses = text.to_socket_addrs();
    let as_in = |error| format!("{error}: write it as in 127.0.0.1:9745");
    let first = addresses.map_err(as_in)?.next();
    first.ok_or_else(|| String::from("it has no address"))
}

/// Serves metrics until told to stop.
pub fn export(options: &ExportOptions, host: &Host) -> Result<(), Failure> {
    let told_to_leave = watch_signals()?;
    if let Err(error) = limits::raise_open_files() {
        tracing::warn!("few clients can be served at the same time: {error}");
    }
    let listener = listen(options.listen)?;
    let windows: Source = match &options.replay {
        Some(path) => {
            let mut windows = Recording::read(path)?.windows.into_iter();
            Box::new(move || Ok(windows.next().map(|window| (window, None))))
        }
        None => {
            // It lives as long as the program: tasks of the server hold on to it.
            let object = Box::leak(Box::new(MaybeUninit::uninit()));
            let mut windows = Windows::begin(Observer::load(object, host)?)?;
            let host = host.clone();
            Box::new(move || {
                let window = windows.advance()?;
                let scheduler = scheduler(&window, &host);
                Ok(Some((window, scheduler)))
            })
        }
    };
    let exporter = Exporter::new(windows, options.vcpus);
    systemd::ready(&format!("Serving http://{}/metrics", options.listen));
    Ok(serve(listener, exporter, TICK_PERIOD, &told_to_leave)?)
}

/// What a Cohort that schedules in `window` has counted since it took over: a new connection's first answer. None if it does
/// not answer, which is no reason to export nothing.
fn scheduler(window: &HostView, host: &Host) -> Option<HostStats> {
    if !preflight::is_cohort(&window.scheduler) {
        return None;
    }
    let stats = connect(host, SCHEDULER_PATIENCE)
        .map_err(|failure| failure.to_string())
        .and_then(|mut client| {
            let stats = client.request("stats", vec![]);
            stats.map_err(|error| format!("{error:#}"))
        });
    stats
        .inspect_err(|error| tracing::debug!("what Cohort counts cannot be had now: {error}"))
        .ok()
}

fn listen(address: SocketAddr) -> Result<TcpListener, Failure> {
    let listener = TcpListener::bind(address).and_then(|listener| {
        listener.set_nonblocking(true)?;
        bound_clients(&listener)?;
        Ok(listener)
    });
    listener.map_err(|error| {
        let sentence = anyhow!(
            "cannot listen at {address}: {error}. If another `cohort export` runs there, one is enough; else choose \
             another port with --listen"
        );
        Failure::new(Exit::CannotListen, sentence)
    })
}

/// Returns the window that ends now, with what Cohort has counted if it schedules; none when there are no more.
type Source = Box<dyn FnMut() -> Result<Option<(HostView, Option<HostStats>)>>>;

/// Adds up windows, and writes what they add up to.
struct Exporter {
    windows: Source,
    exposition: Exposition,
    added_at: Option<Instant>,
    /// What was written since a window was added: to write is most of the work of a scrape.
    pages: Vec<(Format, Page)>,
    pages_written: u64,
}

impl Exporter {
    fn new(windows: Source, with_vcpus: bool) -> Self {
        Self {
            windows,
            exposition: Exposition::new(with_vcpus),
            added_at: None,
            pages: Vec::new(),
            pages_written: 0,
        }
    }

    /// Adds the window that ends now, if it is long enough.
    fn add(&mut self) -> Result<()> {
        if self.added_at.is_some_and(|at| at.elapsed() < LEAST_WINDOW) {
            return Ok(());
        }
        let window = (self.windows)()?;
        self.added_at = Some(Instant::now());
        if let Some((window, scheduler)) = window {
            self.exposition.add(window, scheduler);
            self.pages.clear();
        }
        Ok(())
    }
}

impl Metrics for Exporter {
    fn page(&mut self, format: Format) -> Result<Page> {
        self.add().context("what the vCPUs do cannot be read now")?;
        if let Some((_, page)) = self.pages.iter().find(|(of, _)| *of == format) {
            return Ok(page.clone());
        }
        let text = self.exposition.text(format);
        let text = text.context("the numbers cannot be written")?;
        self.pages_written += 1;
        let page = Page {
            text: text.into(),
            number: self.pages_written,
        };
        self.pages.push((format, page.clone()));
        Ok(page)
    }

    fn tick(&mut self) {
        if let Err(error) = self.add() {
            tracing::error!("what the vCPUs do cannot be read now: {error:#}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_written_once_per_window_and_format() {
        let windows = Box::new(|| Ok(Some((HostView::default(), None))));
        let mut exporter = Exporter::new(windows, false);
        let mut number = |format| exporter.page(format).expect("it can be written").number;
        let (first, other) = (number(Format::Prometheus), number(Format::OpenMetrics));
        assert_ne!(first, other);
        assert_eq!(number(Format::Prometheus), first);
        std::thread::sleep(LEAST_WINDOW);
        assert!(number(Format::Prometheus) > other);
    }
}
