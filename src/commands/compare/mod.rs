// SPDX-License-Identifier: GPL-2.0-only
//! `cohort compare`: what a scheduler changes on this host, for the guests that run now. Schedulers are exchanged live,
//! in alternating windows; what differs is said with its certainty.

pub mod html;
pub mod notify;
pub(crate) mod probe;
pub mod progress;
pub(crate) mod report;
pub(crate) mod rounds;
pub mod scheduler;
pub mod statistics;
pub(crate) mod verdict;
pub(crate) mod window;

use crate::host::paths::Host;
use crate::host::preflight::{self, Refusal};
use crate::observer::Observer;
use crate::observer::view::HostView;
use crate::process::exit::{Exit, Failure};
use crate::process::signals::watch_signals;
use crate::scheduler::settings::{RunOptions, Settings};
use crate::text::duration::{self, SECOND};
use crate::text::table;
use anyhow::{Context, Result, anyhow, ensure};
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

const WINDOWS: RangeInclusive<Duration> = Duration::from_millis(500)..=Duration::from_secs(3600);
const SETTLING: RangeInclusive<Duration> = Duration::ZERO..=Duration::from_secs(600);

/// The options of `cohort compare`.
#[derive(Args, Clone, Debug)]
pub struct CompareOptions {
    /// A scheduler to compare: "cohort", "cohort OPTIONS" (such as "cohort --off ipi"), "stock" (to see what noise does), or
    /// the command line of any sched_ext scheduler, quoted; may be repeated [default: cohort]
    #[arg(long = "scheduler", value_name = "COMMAND")]
    schedulers: Vec<Scheduler>,

    /// The scheduler that the others are compared with
    #[arg(long, value_name = "COMMAND", default_value = "stock")]
    against: Scheduler,

    /// Rounds of one window per scheduler; fewer than six allow no verdict, more find smaller differences
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1000))]
    rounds: u16,

    /// Length of a window; longer ones even out what your guests do in bursts; 500ms to 1h
    #[arg(long, value_name = "TIME", visible_alias = "window-s", default_value = "10s", value_parser = |text: &str| duration::parse(text, SECOND, &WINDOWS))]
    window: Duration,

    /// Time from a scheduler's start to its window, so that the effects of the other one are over; at most 10m
    #[arg(long, value_name = "TIME", visible_alias = "settle-s", default_value = "3s", value_parser = |text: &str| duration::parse(text, SECOND, &SETTLING))]
    settle: Duration,

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

/// Compares, and prints what came out.
pub fn compare(options: &CompareOptions, host: &Host) -> Result<(), Failure> {
    options.probes.check()?;
    let schedulers = options.schedulers();
    let remarks = settings(&schedulers, host)?;
    check(&schedulers, host)?;
    // Before hours are spent.
    let html = options.html.as_deref();
    let page = html.map(|path| table::new_file("page", path));
    let page = page.transpose()?;
    let comparison = measure(options, remarks, host).inspect_err(|_| {
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

/// Checks whether these can be exchanged on this host. The kernel's own against itself needs only what the observer does.
fn check(schedulers: &[Scheduler], host: &Host) -> Result<(), Failure> {
    let only_stock = schedulers.iter().all(|one| *one == Scheduler::Stock);
    if only_stock && preflight::loaded_scheduler(host).is_none() {
        return Ok(preflight::check_observer(host)?);
    }
    if let Err(refusal) = preflight::check_host(host) {
        return Err(match refusal {
            Refusal::NoSchedExt { .. } => Failure::new(
                refusal.exit(),
                anyhow!(
                    "{refusal} There is no second scheduler to compare with the kernel's own here. `cohort compare \
                     --scheduler stock` measures how much windows differ by themselves, and `cohort why VM` says what a VM \
                     waits for."
                ),
            ),
            other => other.into(),
        });
    }
    let accepts = |scheduler: &Scheduler| {
        let mut words = scheduler.options_of_run().into_iter().flatten();
        words.any(|word| word == "--known-bad-kernel")
    };
    if !schedulers.iter().any(accepts) {
        preflight::check_known_bad(host)?;
    }
    Ok(preflight::check_now(host)?)
}

/// Which settings file each Cohort runs with, in sentences.
///
/// # Errors
/// When a file or an option of one is wrong: now, and not in its first window.
fn settings(schedulers: &[Scheduler], host: &Host) -> Result<Vec<String>, Failure> {
    let mut remarks = Vec::new();
    for scheduler in schedulers {
        let Some(words) = scheduler.options_of_run() else {
            continue;
        };
        let name = scheduler.name();
        let options = RunOptions::from_words(words).map_err(|error| {
            Failure::new(Exit::Usage, anyhow!("{name:?} cannot be run: {error}"))
        })?;
        if let Some(file) = Settings::resolve(&options, host)?.file {
            remarks.push(format!("{name}: the settings of {} hold.", file.display()));
        }
    }
    Ok(remarks)
}

fn measure(
    options: &CompareOptions,
    mut remarks: Vec<String>,
    host: &Host,
) -> Result<Comparison, Failure> {
    let told_to_leave = watch_signals()?;
    let mut object = MaybeUninit::uninit();
    let observer = Observer::load(&mut object, host)?;
    let schedulers = options.schedulers();
    let names = arm_names(&schedulers);
    let meter = Meter {
        observer: &observer,
        probes: &options.probes,
        settle: options.settle,
        window: options.window,
        told_to_leave: &told_to_leave,
    };
    let rounds = usize::from(options.rounds);
    let windows = rounds * schedulers.len();
    eprintln!(
        "{}: {rounds} rounds, {} s and what exchanging takes. Guests run on; Ctrl-C gives the host back at once.",
        names.join(" against "),
        (windows as f64 * (options.window + options.settle).as_secs_f64()).ceil()
    );
    let release = fs::read_to_string(host.proc.join("sys/kernel/osrelease"));
    let now = observer.read()?;
    remarks.extend(progress::remarks(&HostView::between(&now, &now)));
    let setting = Setting {
        remarks,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::paths::fixture::Fixture;

    fn parsed(schedulers: &[&str]) -> Vec<Scheduler> {
        let schedulers = schedulers.iter();
        schedulers
            .map(|text| text.parse().expect("it is one"))
            .collect()
    }

    fn of(schedulers: &[&str], host: &Host) -> Result<Vec<String>, Failure> {
        settings(&parsed(schedulers), host)
    }

    #[test]
    fn without_sched_ext_only_the_kernels_own_scheduler_is_compared() {
        let host = Fixture::new()
            .with("proc/self/status", "CapEff:\t000001ffffffffff\n")
            .with("proc/sys/kernel/osrelease", "6.12.117+deb13-amd64\n");
        check(&parsed(&["stock", "stock"]), &host.host()).expect("nothing is exchanged");
        let failure = check(&parsed(&["stock", "cohort"]), &host.host());
        let failure = failure.expect_err("it cannot be loaded");
        assert_eq!(failure.exit(), Exit::NoSchedExt);
        assert!(failure.to_string().contains("--scheduler stock"));
    }

    #[test]
    fn it_is_said_which_settings_hold() {
        let host = Fixture::new().with("etc/cohort.toml", "slice = \"2ms\"\n");
        let remarks = of(
            &["stock", "cohort --off ipi", "scx_simple -f"],
            &host.host(),
        );
        let remarks = remarks.expect("they are sound");
        assert_eq!(remarks.len(), 1, "{remarks:?}");
        assert!(remarks[0].starts_with("cohort --off ipi: ") && remarks[0].contains("cohort.toml"));
        assert!(of(&["stock", "cohort"], &Fixture::new().host()).is_ok_and(|all| all.is_empty()));
    }

    #[test]
    fn what_cohort_would_refuse_is_refused_before_anything_is_measured() {
        let host = Fixture::new().with("etc/cohort.toml", "slices = 2\n");
        let failure = of(&["cohort"], &host.host()).expect_err("the file is wrong");
        assert_eq!(failure.exit(), Exit::Config);
        of(&["stock"], &host.host()).expect("nobody reads the file");
        of(&["cohort --config /dev/null"], &host.host()).expect("another file is read");
        let failure = of(&["cohort --slise 1ms"], &host.host()).expect_err("no such option");
        assert_eq!(failure.exit(), Exit::Usage);
    }
}
