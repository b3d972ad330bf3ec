// SPDX-License-Identifier: GPL-2.0-only
//! `cohort run`: takes over scheduling, watches over it, and gives it back.

use crate::host::instance::{Claimed, Instance};
use crate::host::paths::Host;
use crate::host::preflight;
use crate::process::exit::{Exit, Failure};
use crate::process::signals::{HangUp, HungUp, watch_signals};
use crate::process::systemd;
use crate::scheduler::mechanism::{Mechanism, Mechanisms, Switch};
use crate::scheduler::metrics::{HostStats, Reading};
use crate::scheduler::settings::{RunOptions, Settings};
use crate::scheduler::stats_server::StatsServer;
use crate::scheduler::{Ending, Scheduler, monotonic_ns};
use crate::text::printer::Printer;
use crate::text::{duration, table};
use anyhow::Result;
use clap::ValueEnum;
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
/// How old `systemctl status` may be.
const STATUS_PERIOD: Duration = Duration::from_secs(10);
/// How soon KVM is noticed when it is loaded after Cohort.
const KVM_PERIOD: Duration = Duration::from_millis(500);

/// Schedules the host until a signal, an error, or somebody else ends it.
pub fn run(options: &RunOptions, host: &Host) -> Result<(), Failure> {
    let mut settings = Settings::resolve(options, host)?;
    let mut mechanisms = settings.mechanisms;
    preflight::check_host(host)?;
    if !options.known_bad_kernel {
        preflight::check_known_bad(host)?;
    }
    let _instance = claim_instance(host)?;
    preflight::check_now(host)?;

    let told_to_leave = watch_signals()?;
    let hang_up = HangUp::watch()?;
    tracing::info!("{}", settings.origin());
    let mut server = None;
    loop {
        let mut object = MaybeUninit::uninit();
        let with = Settings {
            mechanisms,
            ..settings.clone()
        };
        let scheduler = Scheduler::attach(&mut object, &with, host)?;
        // It stays when the scheduler is loaded anew, and its clients with it.
        let server = match &mut server {
            Some(server) => server,
            none => none.insert(StatsServer::open(host, &Reading::at_load(monotonic_ns()?))),
        };
        let told = Told {
            to_leave: &told_to_leave,
            to_reload: &hang_up,
        };
        let mut watch = Watch::new(scheduler, server, told, &mut settings, host)?;
        systemd::ready("Scheduling this host");
        let reason = watch.until_end(options);
        let scheduler = watch.scheduler;
        // What was switched stays so when the scheduler is loaded anew.
        mechanisms = scheduler.mechanisms();
        systemd::stopping();
        match (scheduler.leave(), reason) {
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

/// What signals ask for.
#[derive(Clone, Copy)]
struct Told<'a> {
    to_leave: &'a AtomicBool,
    to_reload: &'a HangUp,
}

/// Watches over a loaded scheduler.
struct Watch<'a, 'object> {
    scheduler: Scheduler<'object>,
    server: &'a mut StatsServer,
    told: Told<'a>,
    /// What the command line and the file say; `cohort set` may have switched mechanisms since.
    settings: &'a mut Settings,
    host: &'a Host,
    cookies: Every,
    kvm: Every,
    exceptions: Every,
    halts: Every,
    caps: Every,
    table: Option<Every>,
    printer: Option<Printer>,
    last_table: Reading,
    status: Option<Every>,
    last_status: Reading,
}

impl<'a, 'object> Watch<'a, 'object> {
    fn new(
        scheduler: Scheduler<'object>,
        server: &'a mut StatsServer,
        told: Told<'a>,
        settings: &'a mut Settings,
        host: &'a Host,
    ) -> Result<Self> {
        let at_load = Reading::at_load(monotonic_ns()?);
        Ok(Self {
            scheduler,
            server,
            told,
            host,
            cookies: Every::new(COOKIE_PERIOD),
            kvm: Every::new(KVM_PERIOD),
            exceptions: Every::at_once(EXCEPTIONS_PERIOD),
            halts: Every::new(HALTS_PERIOD),
            caps: Every::at_once(CAPS_PERIOD),
            table: settings.stats.map(Every::new),
            printer: settings.stats.and_then(|_| printer()),
            last_table: at_load.clone(),
            status: systemd::listens().then(|| Every::new(STATUS_PERIOD)),
            last_status: at_load,
            settings,
        })
    }

    /// Returns when the scheduler is to be taken out, or is out already.
    fn until_end(&mut self, options: &RunOptions) -> Result<End, Failure> {
        loop {
            if self.told.to_leave.load(Ordering::Relaxed) {
                return Ok(End::Signal);
            }
            match self.told.to_reload.take() {
                Some(HungUp::TerminalGone) => return Ok(End::Signal),
                Some(HungUp::Reload) => self.reload(options),
                None => {}
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
            if self.status.as_mut().is_some_and(Every::is_due) {
                self.tell_status();
            }
            let scheduler = &mut self.scheduler;
            self.server.answer(ATTENTION_PERIOD, |switches| {
                switches.iter().for_each(|&switch| make(switch, scheduler));
                scheduler.read()
            });
        }
    }

    /// Reads the settings anew. What is wrong with them is said, and changes nothing.
    fn reload(&mut self, options: &RunOptions) {
        let new = match Settings::resolve(options, self.host) {
            Ok(new) => new,
            Err(failure) => {
                tracing::error!("the settings stay as they are: {failure}");
                return;
            }
        };
        tracing::info!("the settings were read anew: {}", new.origin());
        let change = self.settings.change_to(new);
        if change.is_empty() {
            tracing::info!("nothing has changed");
        }
        for switch in change.switches {
            make(switch, &mut self.scheduler);
        }
        if let Some(exceptions) = change.exceptions {
            tracing::info!("vm: {} exceptions hold now", exceptions.len());
            if let Err(error) = self.scheduler.set_exceptions(exceptions) {
                tracing::warn!("vm: an exception that no longer holds stays: {error:#}");
            }
        }
        if let Some(stats) = change.stats {
            let often = stats.map_or(String::from("no more"), |period| {
                format!("each {}", duration::show(period))
            });
            tracing::info!("stats: tables are printed {often}");
            self.table = stats.map(Every::new);
            self.printer = stats.and_then(|_| self.printer.take().or_else(printer));
        }
        for sentence in change.needs_restart {
            tracing::warn!("{sentence}");
        }
    }

    /// What happened since `last`, which becomes now; `None` if that cannot be told. Scheduling goes on without being
    /// looked at.
    fn since(scheduler: &Scheduler<'_>, last: &mut Reading) -> Option<HostStats> {
        let now = scheduler.read();
        let now = now.inspect_err(|error| tracing::warn!("no statistics this time: {error:#}"));
        let now = now.ok()?;
        let stats = HostStats::between(last, &now);
        *last = now;
        Some(stats)
    }

    fn print_table(&mut self) {
        if let Some(stats) = Self::since(&self.scheduler, &mut self.last_table)
            && let Some(printer) = &mut self.printer
        {
            printer.print(table::render(&stats) + "\n");
        }
    }

    fn tell_status(&mut self) {
        if let Some(stats) = Self::since(&self.scheduler, &mut self.last_status) {
            systemd::status(&status(&stats, self.scheduler.mechanisms()));
        }
    }
}

/// What is scheduled, for `systemctl status`.
fn status(stats: &HostStats, mechanisms: Mechanisms) -> String {
    let vcpus: u32 = stats.vms.values().map(|vm| vm.vcpus).sum();
    let some = |number: usize, what: &str| match number {
        1 => format!("1 {what}"),
        number => format!("{number} {what}s"),
    };
    let mut line = format!(
        "Scheduling {} with {} on {}; VMs have {:.0} % of the CPU time",
        some(stats.vms.len(), "VM"),
        some(vcpus as usize, "vCPU"),
        some(stats.cpus as usize, "CPU"),
        stats.vms_share_pct
    );
    let off = Mechanism::value_variants().iter();
    let off = off.filter(|mechanism| !mechanisms.contains(**mechanism));
    let off: Vec<String> = off.map(|mechanism| mechanism.name()).collect();
    if !off.is_empty() {
        line += &format!("; off: {}", off.join(", "));
    }
    line
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
            next: Instant::now() + period,
            ..Self::at_once(period)
        }
    }

    /// Due for the first time now.
    fn at_once(period: Duration) -> Self {
        Self {
            period,
            next: Instant::now(),
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
    use crate::scheduler::metrics::VmStats;

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
    fn systemd_is_told_what_is_scheduled_and_what_is_off() {
        let vm = |vcpus| VmStats {
            vcpus,
            ..VmStats::default()
        };
        let stats = HostStats {
            cpus: 4,
            vms_share_pct: 82.6,
            vms: [(1, vm(2)), (2, vm(8))].into(),
            ..HostStats::default()
        };
        let all = "Scheduling 2 VMs with 10 vCPUs on 4 CPUs; VMs have 83 % of the CPU time";
        assert_eq!(status(&stats, Mechanisms::all_but(&[])), all);
        let some = Mechanisms::all_but(&[Mechanism::Ipi, Mechanism::Wake]);
        assert_eq!(status(&stats, some), format!("{all}; off: ipi, wake"));
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
