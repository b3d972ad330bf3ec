// SPDX-License-Identifier: GPL-2.0-only
//! `cohort compare`: what a scheduler changes on this host, for the guests that run now. Schedulers are exchanged live,
//! in alternating windows; what differs is said with its certainty.

pub mod html;
pub mod notify;
pub mod probe;
pub mod progress;
pub mod report;
pub mod rounds;
pub mod scheduler;
pub mod statistics;
pub mod verdict;
pub mod window;

use crate::exit::Failure;
use crate::host::paths::Host;
use crate::host::preflight;
use crate::observer::Observer;
use crate::signals::watch_signals;
use crate::table;
use crate::view::HostView;
use anyhow::{Context, Result, ensure};
use clap::Args;
use report::{Comparison, Setting};
use rounds::{arm_names, run_rounds};
use scheduler::Scheduler;
use std::fs;
use std::io::Write;
use std::mem::MaybeUninit;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;
use window::{Meter, Probes};

/// The options of `cohort compare`.
#[derive(Args, Clone, Debug)]
pub struct CompareOptions {
    /// Compare with this: "cohort", "cohort OPTIONS" (such as "cohort --off ipi"), "stock" (to see what noise does), or
    /// the command line of any sched_ext scheduler, quoted; may be repeated [default: cohort]
    #[arg(long = "scheduler", value_name = "COMMAND")]
    schedulers: Vec<Scheduler>,

    /// What the others are compared against
    #[arg(long, value_name = "COMMAND", default_value = "stock")]
    against: Scheduler,

    /// Rounds of one window per scheduler; fewer than six allow no verdict, more find smaller differences
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1000))]
    rounds: u16,

    /// Length of a window in seconds; longer ones even out what your guests do in bursts
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = |text: &str| seconds(text, 0.5..=3600.0))]
    window_s: f64,

    /// From a scheduler's start to its window in seconds: what is left of the other one is not measured
    #[arg(long, value_name = "SECONDS", default_value = "3", value_parser = |text: &str| seconds(text, 0.0..=600.0))]
    settle_s: f64,

    #[command(flatten)]
    probes: Probes,

    /// Print all that was measured as JSON instead of tables
    #[arg(long)]
    json: bool,

    /// Also write a page with tables and plots, that needs nothing else, to this new file
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

impl CompareOptions {
    fn schedulers(&self) -> Vec<Scheduler> {
        let mut schedulers = vec![self.against.clone()];
        match self.schedulers.as_slice() {
            [] => schedulers.push(Scheduler::cohort(&[])),
            others => schedulers.extend_from_slice(others),
        }
        schedulers
    }
}

/// A length of time on the command line.
fn seconds(text: &str, possible: RangeInclusive<f64>) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if possible.contains(&seconds) => Ok(seconds),
        _ => Err(format!(
            "it must be a number of seconds from {} to {}",
            possible.start(),
            possible.end()
        )),
    }
}

/// Compares, and prints what came out.
pub fn compare(options: &CompareOptions, host: &Host) -> Result<(), Failure> {
    options.probes.check()?;
    preflight::check_host(host)?;
    preflight::check_known_bad(host)?;
    preflight::check_now(host)?;
    // Before hours are spent.
    let html = options.html.as_deref();
    let page = html.map(|path| table::new_file("page", path));
    let page = page.transpose()?;
    let comparison = measure(options, host).inspect_err(|_| {
        if let Some(path) = &options.html {
            // It is empty, and in the way of the next try.
            let _ = fs::remove_file(path);
        }
    })?;
    let printed = match options.json {
        true => table::json_line(&comparison).and_then(|json| table::print(&json)),
        false => table::print(&comparison.text()),
    };
    // Whoever reads standard output or not.
    if let Some(mut page) = page {
        page.write_all(html::page(&comparison)?.as_bytes())
            .context("the page cannot be written")?;
    }
    printed
}

fn measure(options: &CompareOptions, host: &Host) -> Result<Comparison, Failure> {
    let told_to_leave = watch_signals()?;
    let mut object = MaybeUninit::uninit();
    let observer = Observer::load(&mut object, host)?;
    let schedulers = options.schedulers();
    let names = arm_names(&schedulers);
    let meter = Meter {
        observer: &observer,
        probes: &options.probes,
        settle: Duration::from_secs_f64(options.settle_s),
        window: Duration::from_secs_f64(options.window_s),
        told_to_leave: &told_to_leave,
    };
    let rounds = usize::from(options.rounds);
    let windows = rounds * schedulers.len();
    eprintln!(
        "{}: {rounds} rounds, {} s and what exchanging takes. Guests run on; Ctrl-C gives the host back at once.",
        names.join(" against "),
        (windows as f64 * (options.window_s + options.settle_s)).ceil()
    );
    let release = fs::read_to_string(host.proc.join("sys/kernel/osrelease"));
    let now = observer.read()?;
    let setting = Setting {
        remarks: progress::remarks(&HostView::between(&now, &now)),
        ..Setting::begin(&release.unwrap_or_default(), meter.window, meter.settle)
    };
    let logs = tempfile::tempdir().context("there is no room for the schedulers' output")?;
    let windows = run_rounds(&schedulers, rounds, logs.path(), |turn| {
        eprintln!("round {} of {rounds}: {}", turn.round + 1, turn.scheduler);
        let window = meter.measure(turn)?;
        ensure!(
            !window.numbers.is_empty(),
            "no VM ran, so there is nothing to compare. Start the guests that matter first, or name a number of your own \
             (--counter, --probe)"
        );
        Ok(window)
    })
    // A failure keeps its code.
    .map_err(|error| error.downcast::<Failure>().unwrap_or_else(Failure::from))?;
    Ok(Comparison::of(setting, windows, names)?)
}
