// SPDX-License-Identifier: GPL-2.0-only
//! Behaviour of Cohort on a real KVM host: `cohort-tests SUITE,...` runs suites, inside the lab, as root; `tests/run` runs
//! them all. Each test is a sentence about behaviour.

mod against;
mod cohorts;
mod compare;
mod export;
mod faults;
mod halted;
mod host;
mod housekeeping;
mod ipis;
mod libvirt;
mod load;
mod many;
mod observe;
mod pod;
mod repeats;
mod service;
mod shares;
mod soak;
mod time;
mod why;
mod yields;

use clap::{ArgAction, Parser, ValueEnum};
use cohort::commands::compare::scheduler;
use cohort_lab::inside::random::Random;
use libtest_mimic::{Arguments, Failed, Trial};
use std::process::exit;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Runs suites of tests, "shares,yields" as an example; further arguments as of `cargo test`.
#[derive(Parser)]
struct Cli {
    #[arg(value_delimiter = ',', required = true, num_args = 1, action = ArgAction::Set)]
    suites: Vec<Suite>,
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    harness: Vec<String>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Suite {
    /// Cohort loads on this kernel, recognises a VM and leaves; needs no time
    Load,
    /// It starts on a host that is full, or refuses to; needs no time
    Start,
    /// What works on a kernel without sched_ext; needs no time
    WithoutSchedExt,
    /// Who gets how much CPU time
    Shares,
    /// The same on a host with two last-level caches: `lab boot --cpus 4 --sockets 2 --housekeeping 1`
    Domains,
    /// Directed yields reach their target
    Yields,
    /// A vCPU that must answer an IPI runs soon
    Ipis,
    /// VMs whose vCPUs wait for each other run together
    Cohorts,
    /// The same with four CPUs for guests: `lab boot --cpus 4`
    FourCpus,
    /// 200 VMs on 14 CPUs: `lab boot --cpus 16 --sockets 2 --housekeeping 2`
    Many,
    /// No vCPU waits for too long, or gets too far ahead
    Waits,
    /// What the observer shows is true
    Observe,
    /// What `cohort watch` and `top` say to wrong input; needs no time
    WrongInput,
    /// Work of the host beside guests whose HLT does not exit: `lab boot --cpus 4`
    Housekeeping,
    /// Halted time, where HLT exits and where not: `lab boot --cpus 7 --housekeeping 1 --append nohz_full=1-6`
    Halted,
    /// VMs as libvirt makes them; needs no time
    Libvirt,
    /// Better than the stock scheduler, side by side
    Against,
    /// `cohort compare` on guests that run; needs no time
    Compare,
    /// When `cohort compare` gives the host back
    HostBack,
    /// `cohort export`, scraped by Prometheus; needs no time
    Export,
    /// As a service of a host with other users; needs no time
    Service,
    /// `cohort why` and `cohort ready`: each question's cause is staged and found; needs no time
    Why,
    /// The exact machine's model of time: `lab boot --machine exact --cpus 9`
    Time,
    /// Prints what guests did to the ns: the same from the same seed; tests/repeats compares
    Repeats,
    /// VMs come and go, for as long as COHORT_SOAK_MINUTES say, 30 without; needs no time
    Soak,
    /// Cohort takes over and leaves, again and again; needs no time
    Entering,
    /// Nothing that happens to the host or its guests stops it; needs no time
    Faults,
}

/// A test: what it proves, and the code that fails if it does not hold.
type Test = (&'static str, fn() -> anyhow::Result<()>);

impl Suite {
    fn tests(self) -> &'static [Test] {
        match self {
            Self::Load => load::TESTS,
            Self::Start => load::START,
            Self::WithoutSchedExt => load::WITHOUT_SCHED_EXT,
            Self::Shares => shares::TESTS,
            Self::Domains => shares::ACROSS_DOMAINS,
            Self::Yields => yields::TESTS,
            Self::Ipis => ipis::TESTS,
            Self::Cohorts => cohorts::TESTS,
            Self::Many => many::TESTS,
            Self::Waits => cohorts::WAITS,
            Self::FourCpus => cohorts::ON_FOUR_CPUS,
            Self::Observe => observe::TESTS,
            Self::WrongInput => observe::WRONG_INPUT,
            Self::Housekeeping => housekeeping::TESTS,
            Self::Halted => halted::TESTS,
            Self::Libvirt => libvirt::TESTS,
            Self::Against => against::TESTS,
            Self::Compare => compare::TESTS,
            Self::HostBack => compare::HOST_BACK,
            Self::Export => export::TESTS,
            Self::Service => service::TESTS,
            Self::Why => why::TESTS,
            Self::Time => time::TESTS,
            Self::Repeats => repeats::TESTS,
            Self::Soak => soak::TESTS,
            Self::Entering => faults::ENTERING,
            Self::Faults => faults::TESTS,
        }
    }
}

fn main() {
    let cli = Cli::parse();
    let mut arguments =
        Arguments::from_iter(std::iter::once("cohort-tests".to_owned()).chain(cli.harness));
    // The host has one scheduler, so there is one test at a time.
    arguments.test_threads = Some(1);
    let trials = cli
        .suites
        .iter()
        .flat_map(|suite| suite.tests())
        .map(|(name, test)| Trial::test(*name, move || run(*test)))
        .collect();
    let conclusion = libtest_mimic::run(&arguments, trials);
    if let Err(error) = host::back_to_stock() {
        eprintln!("Cohort did not leave in order: {error:#}");
        exit(1);
    }
    conclusion.exit();
}

/// Another seed than 0 lets the test begin elsewhere in the turns and timers of the host: `lab boot --seed`.
const LONGEST_DELAY: Duration = Duration::from_millis(50);

fn delay_by_seed() -> anyhow::Result<()> {
    let seed = host::lab()?.seed;
    if seed != 0 {
        sleep(Random::new(seed).below(LONGEST_DELAY));
    }
    Ok(())
}

/// Runs a test. A scheduler that ended by itself fails it, and is a part of the failure if something else did.
fn run(test: fn() -> anyhow::Result<()>) -> Result<(), Failed> {
    let begin = Instant::now();
    let mut failures: Vec<String> = delay_by_seed()
        .and_then(|()| test())
        .err()
        .map(|error| format!("{error:#}"))
        .into_iter()
        .collect();
    // The test's schedulers are dropped by now.
    failures.extend(scheduler::untold_ends());
    println!("    {:.1} s of lab time", begin.elapsed().as_secs_f64());
    if failures.is_empty() {
        return Ok(());
    }
    Err(failures.join("\n").into())
}
