// SPDX-License-Identifier: GPL-2.0-only
//! `cohort run`: takes over scheduling, watches over it, and gives it back.

use crate::exit::{Exit, Failure};
use crate::host::instance::{Claimed, Instance};
use crate::host::paths::Host;
use crate::host::preflight;
use crate::mechanism::Switch;
use crate::metrics::{HostStats, Reading};
use crate::printer::Printer;
use crate::scheduler::{Ending, Scheduler, monotonic_ns};
use crate::settings::{RunOptions, Settings};
use crate::signals::watch_signals;
use crate::stats_server::StatsServer;
use crate::{systemd, table};
use anyhow::Result;
use std::io;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How soon a signal, or the end of the scheduler, is noticed.
const ATTENTION_PERIOD: Duration = Duration::from_millis(100);
/// How soon core-scheduling cookies are noticed.
const COOKIE_PERIOD: Duration = Duration::from_secs(5);
/// How soon it is noticed that a VM came which is an exception.
const EXCEPTIONS_PERIOD: Duration = Duration::from_secs(1);
/// How soon it is noticed that a VM came whose HLT does not exit.
const HALTS_PERIOD: Duration = Duration::from_secs(1);
/// Where the kernel does not tell of cpu.max.
const CAPS_PERIOD: Duration = Duration::from_secs(1);
/// How soon KVM is noticed when it is loaded after Cohort.
const KVM_PERIOD: Duration = Duration::from_millis(500);

/// Schedules the host until a signal, an error, or somebody else ends it.
pub fn run(options: &RunOptions, host: &Host) -> Result<(), Failure> {
    let mut settings =
        Settings::resolve(options).map_err(|error| Failure::new(Exit::Config, error))?;
    preflight::check_host(host)?;
    if !options.known_bad_kernel {
        preflight::check_known_bad(host)?;
    }
    let _instance = claim_instance(host)?;
    preflight::check_now(host)?;

    let told_to_leave = watch_signals()?;
    let mut server = None;
    loop {
        let mut object = MaybeUninit::uninit();
        let scheduler = Scheduler::attach(&mut object, &settings, host)?;
        // It stays when the scheduler is loaded anew, and its clients with it.
        let server = match &mut server {
            Some(server) => server,
            none => none.insert(StatsServer::open(host, &Reading::at_load(monotonic_ns()?))),
        };
        let mut watch = Watch::new(scheduler, server, &told_to_leave, &settings, host)?;
        systemd::ready("Scheduling this host");
        let reason = watch.until_end();
        // What was switched stays so when the scheduler is loaded anew.
        settings.mechanisms = watch.scheduler.mechanisms();
        systemd::stopping();
        match (watch.scheduler.leave(), reason) {
            (Ending::Removed(failure), _) => return Err(failure),
            (_, Err(failure)) => return Err(failure),
            (Ending::Restart, Ok(End::Removed)) => {
                tracing::info!("CPUs came or went; the kernel asks to load Cohort anew");
            }
            (Ending::Left, Ok(End::KvmCame)) => {
                tracing::info!("KVM was loaded; Cohort is loaded anew, to see what it does");
            }
            (Ending::Left | Ending::Restart, Ok(_)) => {
                tracing::info!("Cohort has left; the kernel's own scheduler runs this host");
                return Ok(());
            }
        }
    }
}

fn claim_instance(host: &Host) -> Result<Instance, Failure> {
    match Instance::claim(host)? {
        Claimed::Here(instance) => {
            if let Some(run) = instance.killed_before() {
                tracing::warn!(
                    "the previous run (process {}, begun {}) was killed before it could leave; \
                     the kernel took the host back when it died",
                    run.pid,
                    run.began()
                );
            }
            Ok(instance)
        }
        Claimed::Elsewhere(run) => {
            let who = run.map_or_else(String::new, |run| {
                format!(" (process {}, begun {})", run.pid, run.began())
            });
            let sentence = anyhow::anyhow!(
                "another `cohort run`{who} is running on this host, and one is enough. Stop it \
                 first (for example: systemctl stop cohort), or leave it alone and use `cohort \
                 stats`."
            );
            Err(Failure::new(Exit::AlreadyRunning, sentence))
        }
    }
}

/// Why watching ended without a failure.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum End {
    /// A signal asked for it.
    Signal,
    /// The kernel no longer uses the scheduler.
    Removed,
    /// KVM came, and can be looked into only by loading Cohort anew.
    KvmCame,
}

/// Watches over a loaded scheduler.
struct Watch<'a, 'object> {
    scheduler: Scheduler<'object>,
    server: &'a mut StatsServer,
    told_to_leave: &'a AtomicBool,
    host: &'a Host,
    cookies: Every,
    kvm: Every,
    exceptions: Every,
    halts: Every,
    caps: Every,
    table: Option<Every>,
    printer: Option<Printer>,
    last_table: Reading,
}

impl<'a, 'object> Watch<'a, 'object> {
    fn new(
        scheduler: Scheduler<'object>,
        server: &'a mut StatsServer,
        told_to_leave: &'a AtomicBool,
        settings: &Settings,
        host: &'a Host,
    ) -> Result<Self> {
        Ok(Self {
            scheduler,
            server,
            told_to_leave,
            host,
            cookies: Every::new(COOKIE_PERIOD),
            kvm: Every::new(KVM_PERIOD),
            exceptions: Every::new(EXCEPTIONS_PERIOD),
            halts: Every::new(HALTS_PERIOD),
            caps: Every::new(CAPS_PERIOD),
            table: settings
                .stats_seconds
                .map(|seconds| Every::new(Duration::from_secs(seconds))),
            printer: settings.stats_seconds.and_then(|_| printer()),
            last_table: Reading::at_load(monotonic_ns()?),
        })
    }

    /// Returns when the scheduler is to be taken out, or is out already.
    fn until_end(&mut self) -> Result<End, Failure> {
        loop {
            if self.told_to_leave.load(Ordering::Relaxed) {
                return Ok(End::Signal);
            }
            if self.scheduler.has_exited() {
                return Ok(End::Removed);
            }
            if self.kvm.is_due() && self.scheduler.follow_kvm()? {
                return Ok(End::KvmCame);
            }
            // Without it VMs that come are no exceptions; scheduling goes on.
            if self.exceptions.is_due()
                && let Err(error) = self.scheduler.follow_exceptions()
            {
                tracing::warn!("exceptions for VMs are not seen to this time: {error:#}");
            }
            // Without it what has a new cap has the old one; scheduling goes on.
            if self.caps.is_due()
                && let Err(error) = self.scheduler.follow_caps()
            {
                tracing::warn!("changes of cpu.max are not seen to this time: {error:#}");
            }
            // Without it CPUs whose vCPUs halt are not used; scheduling goes on.
            if self.halts.is_due()
                && let Err(error) = self.scheduler.follow_halts()
            {
                tracing::warn!(
                    "vCPUs that halt on their CPUs are not seen to this time: {error:#}"
                );
            }
            if self.cookies.is_due() {
                preflight::check_no_cookies(self.host)?;
            }
            if self.table.as_mut().is_some_and(Every::is_due) {
                self.print_table();
            }
            let scheduler = &mut self.scheduler;
            self.server.answer(ATTENTION_PERIOD, |switches| {
                switches.iter().for_each(|&switch| make(switch, scheduler));
                scheduler.read()
            });
        }
    }

    fn print_table(&mut self) {
        let now = match self.scheduler.read() {
            Ok(now) => now,
            // Scheduling goes on without being looked at.
            Err(error) => {
                tracing::warn!("no table this time: {error:#}");
                return;
            }
        };
        let stats = HostStats::between(&self.last_table, &now);
        self.last_table = now;
        systemd::status(&format!(
            "Scheduling {} VMs, {:.0} % of this host",
            stats.vms.len(),
            stats.vms_share_pct
        ));
        if let Some(printer) = &mut self.printer {
            printer.print(table::render(&stats) + "\n");
        }
    }
}

fn printer() -> Option<Printer> {
    let printer = Printer::new(io::stdout());
    printer
        .inspect_err(|error| tracing::warn!("there are no tables: {error:#}; scheduling goes on"))
        .ok()
}

fn make(switch: Switch, scheduler: &mut Scheduler<'_>) {
    tracing::info!("{} is {} now", switch.mechanism.name(), switch.state());
    scheduler.switch(switch);
}

/// Something that is to be done once in each period.
#[derive(Debug)]
struct Every {
    period: Duration,
    next: Instant,
}

impl Every {
    /// Due for the first time after one period.
    fn new(period: Duration) -> Self {
        Self {
            period,
            next: Instant::now() + period,
        }
    }

    /// Whether it is due now. Periods that were missed are not made up for.
    fn is_due(&mut self) -> bool {
        let now = Instant::now();
        let due = now >= self.next;
        if due {
            self.next = (self.next + self.period).max(now);
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::paths::fixture::Fixture;

    #[test]
    fn a_second_instance_is_refused_with_what_to_do() {
        let fixture = Fixture::new();
        let _first = claim_instance(&fixture.host()).expect("nobody else is there");
        let failure = claim_instance(&fixture.host()).expect_err("one is there");
        assert_eq!(failure.exit(), Exit::AlreadyRunning);
        assert!(
            failure
                .to_string()
                .contains(&format!("(process {}, begun ", std::process::id()))
        );
    }

    #[test]
    fn what_is_done_each_period_is_not_due_at_once() {
        assert!(!Every::new(Duration::from_secs(60)).is_due());
    }

    #[test]
    fn missed_periods_are_not_made_up_for() {
        let mut every = Every::new(Duration::from_millis(1));
        std::thread::sleep(Duration::from_millis(20));
        assert!(every.is_due());
        every.period = Duration::from_secs(60);
        std::thread::sleep(Duration::from_millis(2));
        assert!(every.is_due(), "due again, one period after the last");
        assert!(!every.is_due());
    }
}
