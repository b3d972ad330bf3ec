// SPDX-License-Identifier: GPL-2.0-only
//! One window of a comparison: what the observer and the user's commands say of it, while a guard looks after the
//! guests. Not here: which windows there are (`rounds`), nor what their numbers mean together (`report`).

use super::probe::{Alone, Probe};
use super::progress::{Progress, VmRate};
use super::rounds::Turn;
use crate::observer::Observer;
use crate::observer::observation::Observation;
use crate::observer::view::{HostView, VmView};
use crate::process::exit::{Exit, Failure};
use anyhow::{Result, anyhow};
use clap::Args;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How often guests, the scheduler and signals are looked at.
const LOOK: Duration = Duration::from_millis(250);
/// A guest that stands still for longer ends the comparison. With looking and leaving the host is back within two seconds.
const STALL: Duration = Duration::from_millis(750);
/// A VM of which no vCPU ran and which waited for a CPU more than this part of the time is starved, percent.
const STARVED_READY_PCT: f64 = 50.0;

/// Which number of a window.
#[derive(Clone, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
pub struct Metric {
    /// A VM's name, "host", "counters" for all of the user's together, or "" for a number of his.
    pub of: String,
    /// What it is, with its unit.
    pub name: String,
    /// Whether more of it is better.
    pub better: Better,
}

impl Metric {
    fn new(of: &str, name: &str, better: Better) -> Self {
        let (of, name) = (of.to_owned(), name.to_owned());
        Self { of, name, better }
    }
}

/// Which direction is good.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Better {
    /// As operations per second.
    More,
    /// As time spent waiting.
    Less,
    /// It says what happened, not how well.
    Neither,
}

/// What was measured in one window.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Window {
    /// The round that it belongs to, from 0.
    pub round: usize,
    /// The scheduler it ran under.
    pub scheduler: String,
    /// Its length, seconds.
    pub seconds: f64,
    /// What was counted or read.
    #[serde(serialize_with = "as_list", deserialize_with = "from_list")]
    pub numbers: BTreeMap<Metric, f64>,
}

/// JSON has strings only as keys.
fn as_list<S: serde::Serializer>(
    numbers: &BTreeMap<Metric, f64>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(numbers)
}

fn from_list<'de, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<BTreeMap<Metric, f64>, D::Error> {
    Ok(Vec::deserialize(deserializer)?.into_iter().collect())
}

/// The commands of the user.
#[derive(Args, Clone, Debug, Default)]
pub struct Probes {
    /// A number of yours of which more is better, as NAME=COMMAND: what the shell command prints at a window's end; may
    /// be repeated
    #[arg(long = "probe", value_name = "NAME=COMMAND")]
    pub gains: Vec<Probe>,

    /// The same for a number of which less is better, such as a latency
    #[arg(long = "cost", value_name = "NAME=COMMAND")]
    pub costs: Vec<Probe>,

    /// The same for a number that always grows, such as requests served: its growth per second is compared. It is read
    /// four times per second, and if it stands still for about a second the host is given back
    #[arg(long = "counter", value_name = "NAME=COMMAND")]
    pub counters: Vec<Probe>,

    /// How much a counter grows per second when its VM has the CPUs to itself, as NAME=RATE, where you know it; may be
    /// repeated, once per VM. Then the progress of these counters is reported: each rate, in percent of an equal part of
    /// the counter's rate alone
    #[arg(long, value_name = "NAME=RATE")]
    pub alone: Vec<Alone>,
}

impl Probes {
    /// Whether they go together.
    ///
    /// # Errors
    /// When a rate alone is that of no counter, or the second of one ([`Exit::Usage`]).
    pub fn check(&self) -> Result<(), Failure> {
        for (at, Alone { name, .. }) in self.alone.iter().enumerate() {
            let sentence = if !self.counters.iter().any(|counter| counter.name == *name) {
                anyhow!(
                    "--alone {name} is of no counter. Name one that is there: --counter {name}=COMMAND"
                )
            } else if self.alone[..at].iter().any(|other| other.name == *name) {
                anyhow!("--alone {name} is there twice. Leave one of them out")
            } else {
                continue;
            };
            return Err(Failure::new(Exit::Usage, sentence));
        }
        Ok(())
    }

    /// What counters say that gained so much, in their order, in so many seconds. All rates alone are of counters
    /// ([`Self::check`]).
    fn of_counters(&self, gained: &[f64], seconds: f64) -> BTreeMap<Metric, f64> {
        let rates: BTreeMap<&str, f64> = self
            .counters
            .iter()
            .zip(gained)
            .map(|(counter, gained)| (counter.name.as_str(), gained / seconds))
            .collect();
        let number = |(name, rate): (&&str, &f64)| (Metric::new("", name, Better::More), *rate);
        let mut numbers: BTreeMap<Metric, f64> = rates.iter().map(number).collect();
        // Nothing tells how the CPUs are meant to be divided between them.
        let share = 1.0 / self.alone.len() as f64;
        let rate_of = |alone: &Alone| VmRate {
            rate: rates[alone.name.as_str()],
            alone: alone.rate,
            share,
        };
        let vms: Vec<VmRate> = self.alone.iter().map(rate_of).collect();
        // A counter that began anew has none, so this window has none.
        if let Ok(progress) = Progress::of(&vms) {
            numbers.extend(of_all("counters", &progress));
        }
        numbers
    }
}

/// Measures windows.
pub struct Meter<'a, 'object> {
    /// What the guests' vCPUs do.
    pub observer: &'a Observer<'object>,
    /// What the user wants to know besides.
    pub probes: &'a Probes,
    /// From a scheduler's start to its window.
    pub settle: Duration,
    /// Length of a window.
    pub window: Duration,
    /// Set by a signal.
    pub told_to_leave: &'a AtomicBool,
}

impl Meter<'_, '_> {
    /// Measures one window.
    ///
    /// # Errors
    /// When a guest stands still ([`Exit::Stalled`]), a signal came ([`Exit::Interrupted`]), the scheduler ended or a
    /// command failed.
    pub fn measure(&self, mut turn: Turn<'_>) -> Result<Window> {
        let mut guard = Guard::new(self)?;
        guard.wait(self.settle, &mut turn)?;
        let begin = guard.last.clone();
        guard.wait(self.window, &mut turn)?;
        let end = guard.last;
        let seconds = (end.at - begin.at).as_secs_f64();
        let mut numbers = of_host(&HostView::between(&begin.observation, &end.observation));
        let gained = begin.counters.iter().zip(&end.counters);
        let gained: Vec<f64> = gained.map(|(before, after)| after - before).collect();
        numbers.extend(self.probes.of_counters(&gained, seconds));
        for (probes, better) in [
            (&self.probes.gains, Better::More),
            (&self.probes.costs, Better::Less),
        ] {
            for probe in probes {
                numbers.insert(Metric::new("", &probe.name, better), probe.read()?);
            }
        }
        Ok(Window {
            round: turn.round,
            scheduler: turn.scheduler.to_owned(),
            seconds,
            numbers,
        })
    }

    fn read(&self) -> Result<Reading> {
        let counters = self.probes.counters.iter().map(Probe::read);
        Ok(Reading {
            at: Instant::now(),
            observation: self.observer.read()?,
            counters: counters.collect::<Result<_>>()?,
        })
    }
}

/// The numbers of the host and its VMs.
fn of_host(view: &HostView) -> BTreeMap<Metric, f64> {
    let mut numbers = progress_seen(view);
    let mut add = |of: &str, name: &str, better, value| {
        numbers.insert(Metric::new(of, name, better), value);
    };
    for vm in view.vms.values() {
        add(&vm.name, "%RUN", Better::Neither, vm.all.run_pct);
        add(&vm.name, "%RDY", Better::Less, vm.all.ready_pct);
        if view.has("spin_pct") {
            add(&vm.name, "%SPIN", Better::Less, vm.all.spin_pct);
        }
    }
    if let Some(pct) = view.efficiency() {
        add("host", "efficiency %", Better::More, pct);
    }
    numbers
}

/// How far each VM got that is not idle, and all of them.
fn progress_seen(view: &HostView) -> BTreeMap<Metric, f64> {
    let seen = |vm: &VmView| Some((vm.name.clone(), VmRate::seen(view, &vm.all)?));
    let (names, rates): (Vec<String>, Vec<VmRate>) = view.vms.values().filter_map(seen).unzip();
    // Where all are idle there is none.
    let Ok(progress) = Progress::of(&rates) else {
        return BTreeMap::new();
    };
    let of_each = names.iter().zip(&progress.of_each);
    of_each
        .map(|(name, of_one)| {
            let metric = Metric::new(name, "progress %", Better::More);
            (metric, 100.0 * of_one)
        })
        .chain(of_all("host", &progress))
        .collect()
}

/// What is said of the progress of several together.
fn of_all(of: &str, progress: &Progress) -> [(Metric, f64); 3] {
    [
        ("progress mean %", 100.0 * progress.harmonic_mean),
        ("progress least %", 100.0 * progress.least),
        ("progress sum", progress.sum),
    ]
    .map(|(name, value)| (Metric::new(of, name, Better::More), value))
}

/// All that grows, at one moment.
#[derive(Clone)]
struct Reading {
    at: Instant,
    observation: Observation,
    counters: Vec<f64>,
}

/// Looks after the guests while time goes by.
struct Guard<'a> {
    meter: &'a Meter<'a, 'a>,
    last: Reading,
    /// Since when, by what stands still.
    stands_still: BTreeMap<String, Instant>,
}

impl<'a> Guard<'a> {
    fn new(meter: &'a Meter<'a, 'a>) -> Result<Self> {
        Ok(Self {
            meter,
            last: meter.read()?,
            stands_still: BTreeMap::new(),
        })
    }

    /// Lets `length` go by.
    fn wait(&mut self, length: Duration, turn: &mut Turn<'_>) -> Result<()> {
        let end = Instant::now() + length;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            thread::sleep(left.min(LOOK));
            if self.meter.told_to_leave.load(Ordering::Relaxed) {
                let sentence = anyhow!("it was interrupted; nothing was concluded");
                return Err(Failure::new(Exit::Interrupted, sentence).into());
            }
            if let Some(running) = turn.running.as_mut() {
                running.check()?;
            }
            self.look(turn.scheduler)?;
            if left <= LOOK {
                return Ok(());
            }
        }
    }

    fn look(&mut self, scheduler: &str) -> Result<()> {
        let next = self.meter.read()?;
        let last = std::mem::replace(&mut self.last, next);
        let now = &self.last;
        let view = HostView::between(&last.observation, &now.observation);
        let starved = view
            .vms
            .values()
            .filter(|vm| vm.all.run_pct == 0.0 && vm.all.ready_pct > STARVED_READY_PCT)
            .map(|vm| format!("no vCPU of VM {} got a CPU", vm.name));
        let counters = self.meter.probes.counters.iter();
        let stayed = counters
            .zip(last.counters.iter().zip(&now.counters))
            .filter(|(_, (before, after))| before == after)
            .map(|(probe, (_, value))| format!("{} stayed at {value}", probe.name));
        let stand_still: Vec<String> = starved.chain(stayed).collect();
        self.stands_still
            .retain(|what, _| stand_still.contains(what));
        for what in stand_still {
            let since = *self.stands_still.entry(what.clone()).or_insert(now.at);
            if now.at - since > STALL {
                let sentence = anyhow!(
                    "under {scheduler}, {what} for {:.1} s; the comparison has ended and the host is back on its own \
                     scheduler",
                    (now.at - since + LOOK).as_secs_f64()
                );
                return Err(Failure::new(Exit::Stalled, sentence).into());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::label;
    use super::*;
    use crate::observer::view::VcpuView;

    fn by_label(numbers: &BTreeMap<Metric, f64>) -> BTreeMap<String, f64> {
        let labelled = |(metric, value): (&Metric, &f64)| (label(metric), value.round());
        numbers.iter().map(labelled).collect()
    }

    /// A host of one CPU, and VMs of one vCPU that ran, waited and were entitled to so much.
    fn host(vms: &[(&str, f64, f64, f64)]) -> HostView {
        let view = |&(name, run_pct, ready_pct, entitled_pct): &(&str, f64, f64, f64)| VmView {
            name: name.into(),
            all: VcpuView {
                vcpus: 1,
                run_pct,
                ready_pct,
                entitled_pct,
                ..VcpuView::default()
            },
            ..VmView::default()
        };
        HostView {
            cpus: 1,
            vms: (1..).zip(vms.iter().map(view)).collect(),
            ..HostView::default()
        }
    }

    #[test]
    fn progress_is_told_of_each_vm_that_is_not_idle_and_of_all() {
        let numbers = by_label(&of_host(&host(&[
            ("fed", 75.0, 25.0, 50.0),
            ("idle", 0.1, 0.0, 0.1),
            ("starved", 25.0, 75.0, 50.0),
        ])));
        assert_eq!(numbers["fed progress %"], 150.0);
        assert_eq!(numbers["starved progress %"], 50.0);
        assert_eq!(numbers["host progress mean %"], 75.0);
        assert_eq!(numbers["host progress least %"], 50.0);
        assert_eq!(numbers["host progress sum"], 1.0);
        assert!(numbers.contains_key("idle %RUN"));
        assert!(!numbers.contains_key("idle progress %"));
    }

    #[test]
    fn without_a_vm_that_asks_there_is_no_progress() {
        let numbers = by_label(&of_host(&host(&[("idle", 0.1, 0.0, 0.1)])));
        assert!(numbers.keys().all(|name| !name.contains("progress")));
    }

    fn probes(counters: &[&str], alone: &[&str]) -> Probes {
        let counter = |name: &&str| format!("{name}=true").parse().expect("it is a counter");
        Probes {
            counters: counters.iter().map(counter).collect(),
            alone: alone
                .iter()
                .map(|rate| rate.parse().expect("it is a rate"))
                .collect(),
            ..Probes::default()
        }
    }

    #[test]
    fn counters_with_a_rate_alone_have_a_progress_together() {
        let probes = probes(&["b", "other", "a"], &["a=100", "b=1000"]);
        let numbers = by_label(&probes.of_counters(&[1500.0, 8.0, 50.0], 2.0));
        // 150 % and 50 % of a half of each.
        assert_eq!((numbers["a"], numbers["b"]), (25.0, 750.0));
        assert_eq!(numbers["counters progress mean %"], 75.0);
        assert_eq!(numbers["counters progress least %"], 50.0);
        assert_eq!(numbers["counters progress sum"], 1.0);
    }

    #[test]
    fn counters_without_a_rate_or_that_begin_anew_have_no_progress() {
        for alone in [&[] as &[&str], &["a=100"]] {
            let numbers = by_label(&probes(&["a"], alone).of_counters(&[-5.0], 1.0));
            assert_eq!(numbers, [("a".to_owned(), -5.0)].into());
        }
    }

    #[test]
    fn a_rate_alone_needs_its_counter_once() {
        assert!(probes(&["a", "b"], &["a=1"]).check().is_ok());
        for (alone, word) in [(["a=1", "c=1"], "of no counter"), (["a=1", "a=2"], "twice")] {
            let failure = probes(&["a", "b"], &alone).check().expect_err(word);
            assert_eq!(failure.exit(), Exit::Usage);
            assert!(failure.to_string().contains(word), "{failure}");
        }
    }
}
