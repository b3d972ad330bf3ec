// SPDX-License-Identifier: GPL-2.0-only
//! Windows: what members of an experiment do in a span of lab time, side by side or alone. Not for starting them, nor for
//! exchanging schedulers, nor for what the numbers mean (`cohort::commands::compare::progress`).
use std::sync::Barrier;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use cohort_micro::Histogram;

use super::cgroup::Cgroup;
use super::process::{HOLDS_CPU, come_first, stay_on};
use super::random::Random;
use crate::cell::Latency;

/// What schedulers print; copied out of L1 at its end.
pub const LOGS: &str = "/out/schedulers";

/// CPUs take up their work within two slices of the stock scheduler after each other: so the first of two VMs may be in its
/// second turn on one when the other CPU begins.
const LONGEST_SHIFT: Duration = Duration::from_millis(8);

/// Whatever can be measured in a window: it is alone in a cgroup and counts its operations.
pub trait Subject {
    /// Its name in results.
    fn name(&self) -> &str;
    /// Operations done so far.
    ///
    /// # Errors
    /// When they cannot be counted.
    fn operations(&self) -> Result<u64>;
    /// How long its timed operations took so far, in [`Subject::latency_unit_ns`]; empty if it times none.
    ///
    /// # Errors
    /// When they cannot be read.
    fn latencies(&self) -> Result<Histogram>;
    /// What latencies are counted in, nanoseconds.
    fn latency_unit_ns(&self) -> f64;
    /// The cgroup that it is alone in.
    fn cgroup(&self) -> &Cgroup;
    /// Thread ids of its vCPUs in their order; none of what is no VM.
    fn vcpu_tids(&self) -> Vec<u32>;
    /// Checks that it still runs.
    ///
    /// # Errors
    /// When it does not, with what is known about its end.
    fn ensure_alive(&mut self) -> Result<()>;
    /// What can be seen of it from outside, for the report of a failure.
    fn situation(&self) -> String;
}

/// How to measure.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Length of a window.
    pub window: Duration,
    /// From the beginning of the last member to the window's.
    pub settle: Duration,
}

/// What one member did in a window.
#[derive(Clone, Debug, PartialEq)]
pub struct Done {
    /// Operations per second.
    pub rate: f64,
    /// Of its timed operations.
    pub latency: Option<Latency>,
}

/// What one member did alone.
#[derive(Clone, Debug, PartialEq)]
pub struct DoneAlone {
    /// In the window.
    pub done: Done,
    /// CPUs that it used on average, from its beginning on.
    pub cpus: f64,
}

/// Measures `subjects` side by side on `cpus`; all are frozen before and after. `seed` says in which order they begin, and
/// when each CPU takes them up. Returns the length of the window in seconds and what each did, in their order.
///
/// # Errors
/// When one of them ends, or does nothing before the window or in it.
pub fn measure(
    subjects: &mut [Box<dyn Subject>],
    cpus: &[u32],
    seed: u64,
    timing: Timing,
) -> Result<(f64, Vec<Done>)> {
    let before = operations(subjects)?;
    begin(subjects, cpus, seed)?;
    let done = window(subjects, &before, timing).map_err(|error| describe(&error, subjects));
    // Frozen even after an error, so that nothing runs that is not meant to.
    let frozen = freeze(subjects);
    let done = done?;
    frozen?;
    Ok(done)
}

/// Measures one subject, which is frozen before and after.
///
/// # Errors
/// As of [`measure`].
pub fn measure_alone(subject: &mut Box<dyn Subject>, timing: Timing) -> Result<DoneAlone> {
    let subject = std::slice::from_mut(subject);
    let used_us = subject[0].cgroup().usage_us()?;
    let start = Instant::now();
    let before = operations(subject)?;
    subject[0].cgroup().thaw()?;
    let done = window(subject, &before, timing).map_err(|error| describe(&error, subject));
    let seconds = start.elapsed().as_secs_f64();
    freeze(subject)?;
    let (_, done) = done?;
    // The kernel counts CPU time at ticks, and when a thread leaves its CPU, as all have now.
    let used_us = subject[0].cgroup().usage_us()? - used_us;
    let done = done.into_iter().next().context("there is one subject")?;
    Ok(DoneAlone {
        done,
        cpus: used_us as f64 / 1e6 / seconds,
    })
}

/// Looks at `subjects` while they run side by side, `settle` after the last of them began; all are frozen before and after.
///
/// # Errors
/// That of `look`, or when they cannot be thawed or frozen.
pub fn look_at<T>(
    subjects: &[Box<dyn Subject>],
    cpus: &[u32],
    seed: u64,
    settle: Duration,
    look: impl FnOnce() -> Result<T>,
) -> Result<T> {
    begin(subjects, cpus, seed)?;
    sleep(settle);
    let seen = look();
    let frozen = freeze(subjects);
    let seen = seen?;
    frozen?;
    Ok(seen)
}

/// Stops all where they are.
///
/// # Errors
/// When the kernel does not.
pub fn freeze(subjects: &[Box<dyn Subject>]) -> Result<()> {
    subjects
        .iter()
        .try_for_each(|subject| subject.cgroup().set_frozen(true))
}

/// Thaws all in any order while their CPUs are held, and gives them one CPU after the other. A VM's vCPUs wake together, so
/// without that they would begin in step wherever there is room, which is the best that can happen to them.
fn begin(subjects: &[Box<dyn Subject>], cpus: &[u32], seed: u64) -> Result<()> {
    let mut random = Random::new(seed);
    let mut order: Vec<usize> = (0..subjects.len()).collect();
    random.shuffle(&mut order);
    let all_held = Barrier::new(cpus.len() + 1);
    let give = AtomicBool::new(false);
    thread::scope(|scope| {
        let holders: Vec<_> = cpus
            .iter()
            .map(|&cpu| (cpu, random.below(LONGEST_SHIFT)))
            .map(|(cpu, shift)| {
                let (all_held, give) = (&all_held, &give);
                scope.spawn(move || hold(cpu, shift, all_held, give))
            })
            .collect();
        all_held.wait();
        let mut order = order.into_iter();
        let thawed = order.try_for_each(|index| subjects[index].cgroup().thaw());
        give.store(true, Release);
        for holder in holders {
            holder
                .join()
                .map_err(|_| anyhow!("a thread that holds a CPU has failed"))??;
        }
        thawed
    })
}

/// Keeps `cpu` until `shift` after `give`, from when all are held.
fn hold(cpu: u32, shift: Duration, all_held: &Barrier, give: &AtomicBool) -> Result<()> {
    let placed = stay_on(&[cpu]).and_then(|()| come_first(HOLDS_CPU));
    // Whatever happened, the others wait for this one.
    all_held.wait();
    placed?;
    while !give.load(Acquire) {}
    let start = Instant::now();
    while start.elapsed() < shift {}
    Ok(())
}

fn operations(subjects: &[Box<dyn Subject>]) -> Result<Vec<u64>> {
    subjects
        .iter()
        .map(|subject| subject.operations())
        .collect()
}

/// A window of subjects that run, and had done `before` when they began.
fn window(
    subjects: &mut [Box<dyn Subject>],
    before: &[u64],
    timing: Timing,
) -> Result<(f64, Vec<Done>)> {
    sleep(timing.settle);
    let start = Reading::of_all(subjects)?;
    for ((subject, reading), before) in subjects.iter().zip(&start).zip(before) {
        ensure!(
            reading.operations > *before,
            "{} did nothing within {:.0} ms before its window",
            subject.name(),
            timing.settle.as_secs_f64() * 1e3
        );
    }
    sleep(timing.window);
    let end = Reading::of_all(subjects)?;
    subjects
        .iter_mut()
        .try_for_each(|subject| subject.ensure_alive())?;
    let each = subjects.iter().zip(start.iter().zip(&end));
    let done = each.map(|(subject, (start, end))| start.until(end, &**subject));
    let done = done.collect::<Result<Vec<Done>>>()?;
    let Some((first, last)) = start.first().zip(end.first()) else {
        bail!("there is nothing to measure");
    };
    Ok(((last.at - first.at).as_secs_f64(), done))
}

/// Adds to an error what the subjects looked like then.
fn describe(error: &anyhow::Error, subjects: &[Box<dyn Subject>]) -> anyhow::Error {
    let situations = subjects.iter().map(|subject| subject.situation());
    let situations: Vec<String> = situations.collect();
    anyhow!("{error:#}. What they were at:\n{}", situations.join("\n"))
}

/// A subject's counters at one moment.
struct Reading {
    at: Instant,
    operations: u64,
    latencies: Histogram,
}

impl Reading {
    fn of_all(subjects: &[Box<dyn Subject>]) -> Result<Vec<Self>> {
        let read = |subject: &dyn Subject| {
            Ok(Self {
                at: Instant::now(),
                operations: subject.operations()?,
                latencies: subject.latencies()?,
            })
        };
        subjects.iter().map(|subject| read(&**subject)).collect()
    }

    fn until(&self, end: &Self, subject: &dyn Subject) -> Result<Done> {
        let seconds = (end.at - self.at).as_secs_f64();
        ensure!(
            end.operations > self.operations,
            "{} did nothing within a window of {:.0} ms: its counter stayed at {}",
            subject.name(),
            seconds * 1e3,
            self.operations
        );
        let latencies = end.latencies.since(&self.latencies);
        Ok(Done {
            rate: (end.operations - self.operations) as f64 / seconds,
            latency: latency(&latencies, subject.latency_unit_ns()),
        })
    }
}

fn latency(latencies: &Histogram, unit_ns: f64) -> Option<Latency> {
    let quantile_us = |quantile| Some(latencies.quantile(quantile)? * unit_ns / 1e3);
    Some(Latency {
        count: latencies.len(),
        p50_us: quantile_us(0.5)?,
        p99_us: quantile_us(0.99)?,
        longest_us: quantile_us(1.0)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(operations: u64, latencies_ns: &[u64], at: Instant) -> Reading {
        let mut latencies = Histogram::default();
        latencies_ns.iter().for_each(|ns| latencies.count(*ns));
        Reading {
            at,
            operations,
            latencies,
        }
    }

    struct Fake;

    impl Subject for Fake {
        fn name(&self) -> &str {
            "vm1"
        }
        fn operations(&self) -> Result<u64> {
            Ok(0)
        }
        fn latencies(&self) -> Result<Histogram> {
            Ok(Histogram::default())
        }
        fn latency_unit_ns(&self) -> f64 {
            1.0
        }
        fn cgroup(&self) -> &Cgroup {
            unreachable!("a reading needs no cgroup")
        }
        fn vcpu_tids(&self) -> Vec<u32> {
            Vec::new()
        }
        fn ensure_alive(&mut self) -> Result<()> {
            Ok(())
        }
        fn situation(&self) -> String {
            "well".into()
        }
    }

    #[test]
    fn a_window_is_the_difference_of_two_readings() {
        let start = Instant::now();
        let end = start + Duration::from_millis(500);
        let done = reading(10, &[1 << 30], start)
            .until(&reading(60, &[1 << 30, 1 << 20, 1 << 20], end), &Fake)
            .unwrap();
        assert_eq!(done.rate, 100.0);
        let latency = done.latency.unwrap();
        assert_eq!(latency.count, 2);
        assert!((1048.0..1311.0).contains(&latency.p99_us), "{latency:?}");
        assert_eq!(latency.longest_us, latency.p99_us);
    }

    #[test]
    fn who_stands_still_is_named() {
        let start = Instant::now();
        let end = start + Duration::from_millis(100);
        let error = reading(7, &[], start)
            .until(&reading(7, &[], end), &Fake)
            .unwrap_err();
        assert_eq!(
            error.to_string(),
            "vm1 did nothing within a window of 100 ms: its counter stayed at 7"
        );
    }

    #[test]
    fn what_times_nothing_has_no_latency() {
        assert_eq!(latency(&Histogram::default(), 1.0), None);
    }
}
