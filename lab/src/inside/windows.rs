// SPDX-License-Identifier: GPL-2.0-only
//! Windows: the scheduler is exchanged under running guests, and each guest's operations and CPU time are taken
//! over a window of lab time. Not for starting guests, nor for what the numbers mean (`cohort::compare`).
use std::collections::BTreeMap;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use cohort::compare::rounds::{arm_names, run_rounds};
use cohort::compare::scheduler::Scheduler;
use cohort::compare::window::{Better, Metric, Window};

/// What schedulers print; copied out of L1 at its end.
pub const LOGS: &str = "/out/schedulers";

/// Whatever can be measured in a window.
pub trait Subject {
    /// Its name in results.
    fn name(&self) -> &str;
    /// Operations done so far.
    ///
    /// # Errors
    /// When they cannot be counted.
    fn operations(&self) -> Result<u64>;
    /// The longest operation since this was asked last, nanoseconds; `None` if they are not timed.
    ///
    /// # Errors
    /// When it cannot be read.
    fn take_longest_ns(&self) -> Result<Option<u64>>;
    /// CPU time consumed so far, nanoseconds.
    ///
    /// # Errors
    /// When it cannot be read.
    fn cpu_time_ns(&self) -> Result<u64>;
    /// Checks that it still runs.
    ///
    /// # Errors
    /// When it does not, with what is known about its end.
    fn ensure_alive(&mut self) -> Result<()>;
    /// What can be seen of it from outside, for the report of a failure.
    fn situation(&self) -> String;
    /// Stops it where it is, or lets it go on.
    ///
    /// # Errors
    /// When that does not work.
    fn set_frozen(&mut self, frozen: bool) -> Result<()>;
}

/// One number of each of these windows, of those that have it.
pub fn values(windows: &[Window], metric: &Metric) -> Vec<f64> {
    let numbers = windows.iter().map(|window| window.numbers.get(metric));
    numbers.flatten().copied().collect()
}

/// How to measure.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Length of a window, lab time.
    pub window: Duration,
    /// From a scheduler's start to the window's, lab time.
    pub settle: Duration,
}

/// What all guests do together in a window, per second of lab time.
pub fn operations() -> Metric {
    Metric {
        of: String::new(),
        name: "operations/s".into(),
        better: Better::More,
    }
}

/// The longest operation of any guest, of a workload that times them; ms of the guest's clock.
pub fn longest_operation() -> Metric {
    Metric {
        of: String::new(),
        name: "longest operation, ms".into(),
        better: Better::Less,
    }
}

/// A guest's CPU time in a window, in percent of one CPU; exact to one tick per vCPU.
pub fn cpu_time_of(guest: &str) -> Metric {
    Metric {
        of: guest.into(),
        name: "%CPU".into(),
        better: Better::Neither,
    }
}

/// What windows of the first subject alone are called.
pub const ALONE: &str = "one VM alone";

/// Runs `rounds` rounds of one window per scheduler and one of the first subject alone under the stock scheduler. Of the
/// `subjects` the first `counted` are measured, the others run beside. `report` sees each window when it is done.
///
/// # Errors
/// When a guest ends or stops counting, or a scheduler does not start, run or leave as it should.
pub fn run_windows<S: Subject>(
    subjects: &mut [S],
    counted: usize,
    schedulers: &[Scheduler],
    timing: Timing,
    rounds: usize,
    mut report: impl FnMut(&Window),
) -> Result<Vec<Window>> {
    let arms = [schedulers, &[Scheduler::Stock]].concat();
    let names = arm_names(&arms);
    let windows = run_rounds(&arms, rounds, Path::new(LOGS), |turn| {
        let alone = names.last().is_some_and(|last| last == turn.scheduler);
        let (name, measured) = match alone {
            true => (ALONE, measure_alone(subjects, 0, timing)),
            false => (turn.scheduler, measure(&mut subjects[..counted], timing)),
        };
        let (seconds, numbers) =
            measured.map_err(|error| describe_failure(&error, name, subjects))?;
        let window = Window {
            round: turn.round,
            scheduler: name.into(),
            seconds,
            numbers,
        };
        report(&window);
        Ok(window)
    });
    windows.map_err(|error| error.context(who_recovers(subjects, timing)))
}

/// One window of one subject, all others frozen, under whatever schedules now: as `measure`.
///
/// # Errors
/// When it ends or stops counting.
pub fn measure_alone<S: Subject>(
    subjects: &mut [S],
    alone: usize,
    timing: Timing,
) -> Result<(f64, BTreeMap<Metric, f64>)> {
    set_others_frozen(subjects, alone, true)?;
    let measured = measure(&mut subjects[alone..=alone], timing);
    // Thawed even after an error: its report must not suffer from a second one.
    set_others_frozen(subjects, alone, false)?;
    measured
}

fn set_others_frozen<S: Subject>(subjects: &mut [S], alone: usize, frozen: bool) -> Result<()> {
    subjects
        .iter_mut()
        .enumerate()
        .filter(|(index, _)| *index != alone)
        .try_for_each(|(_, subject)| subject.set_frozen(frozen))
}

/// Adds to the error of a window what the guests looked like then.
fn describe_failure<S: Subject>(
    error: &anyhow::Error,
    scheduler: &str,
    subjects: &[S],
) -> anyhow::Error {
    let situations: Vec<String> = subjects.iter().map(Subject::situation).collect();
    anyhow!(
        "{error:#}\nThat was under {scheduler}. The guests then:\n{}",
        situations.join("\n")
    )
}

/// Which guests count now, under the stock scheduler: it tells a starved guest from a broken one.
fn who_recovers<S: Subject>(subjects: &[S], timing: Timing) -> String {
    let count = |subject: &S| subject.operations().ok();
    let before: Vec<Option<u64>> = subjects.iter().map(count).collect();
    sleep(timing.window);
    let recovered: Vec<String> = subjects
        .iter()
        .zip(before)
        .map(|(subject, before)| {
            let counts = subject.operations().is_ok_and(|after| Some(after) > before);
            format!(
                "{} {}",
                subject.name(),
                if counts { "counts" } else { "does not count" }
            )
        })
        .collect();
    format!(
        "A window after the failure, under the stock scheduler: {}",
        recovered.join(", ")
    )
}

/// One window of all subjects under whatever schedules now: its length in seconds, and what was counted.
fn measure<S: Subject>(subjects: &mut [S], timing: Timing) -> Result<(f64, BTreeMap<Metric, f64>)> {
    sleep(timing.settle);
    take_longest(subjects)?;
    let start = Reading::take(subjects)?;
    sleep(timing.window);
    let end = Reading::take(subjects)?;
    let longest_ns = take_longest(subjects)?;
    for subject in subjects.iter_mut() {
        subject.ensure_alive()?;
    }
    let (seconds, mut numbers) = start.until(&end, subjects)?;
    if let Some(longest_ns) = longest_ns {
        numbers.insert(longest_operation(), longest_ns as f64 / 1e6);
    }
    Ok((seconds, numbers))
}

/// The longest operation of all subjects since this was asked last, ns.
fn take_longest<S: Subject>(subjects: &[S]) -> Result<Option<u64>> {
    let each = subjects.iter().map(Subject::take_longest_ns);
    Ok(each
        .collect::<Result<Vec<_>>>()?
        .into_iter()
        .max()
        .flatten())
}

/// All counters at one moment.
struct Reading {
    at: Instant,
    counters: Vec<(u64, u64)>,
}

impl Reading {
    fn take<S: Subject>(subjects: &[S]) -> Result<Self> {
        // Operations first: they are exact, CPU times only to a tick.
        let at = Instant::now();
        let operations = subjects
            .iter()
            .map(Subject::operations)
            .collect::<Result<Vec<_>>>()?;
        let cpu_times = subjects
            .iter()
            .map(Subject::cpu_time_ns)
            .collect::<Result<Vec<_>>>()?;
        Ok(Self {
            at,
            counters: operations.into_iter().zip(cpu_times).collect(),
        })
    }

    fn until<S: Subject>(
        &self,
        end: &Self,
        subjects: &[S],
    ) -> Result<(f64, BTreeMap<Metric, f64>)> {
        let seconds = (end.at - self.at).as_secs_f64();
        let mut all_operations = 0;
        let mut numbers = BTreeMap::new();
        for (index, subject) in subjects.iter().enumerate() {
            let ((operations, cpu_time), (end_operations, end_cpu_time)) =
                (self.counters[index], end.counters[index]);
            let cpu_time_ns = end_cpu_time - cpu_time;
            ensure!(
                end_operations > operations,
                "Guest {} made no progress within a window of {:.0} ms, in which it had {} ms of CPU time: its counter \
                 stayed at {operations}",
                subject.name(),
                seconds * 1000.0,
                cpu_time_ns / 1_000_000
            );
            all_operations += end_operations - operations;
            let cpu_pct = 100.0 * cpu_time_ns as f64 / 1e9 / seconds;
            numbers.insert(cpu_time_of(subject.name()), cpu_pct);
        }
        numbers.insert(operations(), all_operations as f64 / seconds);
        Ok((seconds, numbers))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use anyhow::bail;

    use super::*;

    /// Does `speed` operations per reading.
    struct Fake {
        name: &'static str,
        speed: u64,
        done: Cell<u64>,
        alive: bool,
        frozen: bool,
    }

    impl Fake {
        fn new(name: &'static str, speed: u64) -> Self {
            Self {
                name,
                speed,
                done: Cell::new(0),
                alive: true,
                frozen: false,
            }
        }
    }

    impl Subject for Fake {
        fn name(&self) -> &str {
            self.name
        }
        fn operations(&self) -> Result<u64> {
            if !self.frozen {
                self.done.set(self.done.get() + self.speed);
            }
            Ok(self.done.get())
        }
        fn take_longest_ns(&self) -> Result<Option<u64>> {
            Ok((self.name == "timed").then_some(7_000_000))
        }
        fn cpu_time_ns(&self) -> Result<u64> {
            Ok(self.done.get() * 1000)
        }
        fn ensure_alive(&mut self) -> Result<()> {
            if self.alive {
                Ok(())
            } else {
                bail!("{} is dead", self.name)
            }
        }
        fn situation(&self) -> String {
            format!("{} is well", self.name)
        }
        fn set_frozen(&mut self, frozen: bool) -> Result<()> {
            self.frozen = frozen;
            Ok(())
        }
    }

    const SHORT: Timing = Timing {
        window: Duration::from_millis(2),
        settle: Duration::ZERO,
    };

    #[test]
    fn a_window_is_the_difference_of_two_readings() {
        let mut fakes = [Fake::new("one", 10), Fake::new("two", 30)];
        let (seconds, numbers) = measure(&mut fakes, SHORT).unwrap();
        assert!(seconds >= 0.002);
        let close = |metric: &Metric, expected: f64| (numbers[metric] - expected).abs() < 1e-6;
        assert!(close(&operations(), 40.0 / seconds));
        assert!(close(&cpu_time_of("one"), 100.0 * 10_000.0 / 1e9 / seconds));
        assert_eq!(numbers.len(), 3);
    }

    #[test]
    fn the_longest_operation_is_there_if_one_times_them() {
        let mut fakes = [Fake::new("one", 10), Fake::new("timed", 1)];
        let (_, numbers) = measure(&mut fakes, SHORT).unwrap();
        assert_eq!(numbers[&longest_operation()], 7.0);
    }

    #[test]
    fn a_guest_that_stands_still_or_died_fails_the_window() {
        let error = measure(&mut [Fake::new("still", 0)], SHORT).unwrap_err();
        assert!(error.to_string().contains("no progress"), "{error}");
        let mut dead = Fake::new("gone", 5);
        dead.alive = false;
        assert_eq!(
            measure(&mut [dead], SHORT).unwrap_err().to_string(),
            "gone is dead"
        );
    }

    #[test]
    fn a_failure_tells_what_guests_looked_like_and_whether_they_recover() {
        let fakes = [Fake::new("starved", 5), Fake::new("broken", 0)];
        let error = describe_failure(&anyhow!("No progress"), "cohort", &fakes);
        let text = format!("{error}\n{}", who_recovers(&fakes, SHORT));
        for part in [
            "No progress",
            "under cohort",
            "starved is well",
            "starved counts",
            "broken does not count",
        ] {
            assert!(text.contains(part), "no \"{part}\" in {text}");
        }
    }

    #[test]
    fn a_window_of_one_alone_counts_only_that_and_thaws_the_others_whatever_happens() {
        let mut fakes = [Fake::new("still", 0), Fake::new("one", 10)];
        let (_, numbers) = measure_alone(&mut fakes, 1, SHORT).unwrap();
        assert!(numbers.contains_key(&cpu_time_of("one")));
        assert_eq!(numbers.len(), 2);
        assert!(!fakes[0].frozen);
        assert!(measure_alone(&mut fakes, 0, SHORT).is_err());
        assert!(!fakes[1].frozen);
    }

    #[test]
    fn others_are_frozen_and_thawed() {
        let mut fakes = [Fake::new("one", 1), Fake::new("two", 1)];
        set_others_frozen(&mut fakes, 1, true).unwrap();
        assert!(fakes[0].frozen && !fakes[1].frozen);
        set_others_frozen(&mut fakes, 1, false).unwrap();
        assert!(!fakes[0].frozen);
    }
}
