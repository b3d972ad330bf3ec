// SPDX-License-Identifier: GPL-2.0-only
//! Windows: the scheduler is exchanged under running guests, and each guest's operations and CPU time are taken
//! over a window of lab time. Not for starting guests, nor for what the numbers mean (`stats`, `report`).
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use serde::{Deserialize, Serialize};

use cohort::compare::rounds::run_rounds;
use cohort::compare::scheduler::Scheduler;

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

/// How to measure.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub struct Timing {
    /// Length of a window, lab time.
    pub window: Duration,
    /// From a scheduler's start to the window's, lab time.
    pub settle: Duration,
}

/// One guest's share of a window.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct GuestWindow {
    /// The guest's name.
    pub name: String,
    /// Operations in the window.
    pub operations: u64,
    /// CPU time in the window, nanoseconds; exact to one tick per vCPU.
    pub cpu_time_ns: u64,
}

/// What was measured in one window.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Window {
    /// The pair, or round of all schedulers, that it belongs to; from 0.
    pub round: usize,
    /// The scheduler it ran under.
    pub scheduler: String,
    /// Its length, lab time in nanoseconds.
    pub wall_ns: u64,
    /// All running guests.
    pub guests: Vec<GuestWindow>,
}

impl Window {
    /// Operations per second of lab time, of all guests together.
    pub fn operations_per_s(&self) -> f64 {
        self.guests
            .iter()
            .map(|guest| self.rate(guest.operations))
            .sum()
    }

    /// CPU time of each guest as a part of one CPU's.
    pub fn cpu_shares(&self) -> Vec<f64> {
        self.guests
            .iter()
            .map(|guest| guest.cpu_time_ns as f64 / self.wall_ns as f64)
            .collect()
    }

    fn rate(&self, count: u64) -> f64 {
        count as f64 * 1e9 / self.wall_ns as f64
    }
}

/// Runs `rounds` rounds of one window per scheduler. `report` sees each window when it is done.
///
/// # Errors
/// When a guest ends or stops counting, or a scheduler does not start, run or leave as it should.
pub fn run_windows<S: Subject>(
    subjects: &mut [S],
    schedulers: &[Scheduler],
    timing: Timing,
    rounds: usize,
    mut report: impl FnMut(&Window),
) -> Result<Vec<Window>> {
    let windows = run_rounds(schedulers, rounds, Path::new(LOGS), |turn| {
        let mut window = measure(subjects, timing)
            .map_err(|error| describe_failure(&error, turn.scheduler, subjects))?;
        window.round = turn.round;
        window.scheduler = turn.scheduler.into();
        report(&window);
        Ok(window)
    });
    windows.map_err(|error| error.context(who_recovers(subjects, timing)))
}

/// Measures `windows` windows of one subject alone under the stock scheduler, all others frozen.
///
/// # Errors
/// As for `run_rounds`.
pub fn run_alone<S: Subject>(
    subjects: &mut [S],
    alone: usize,
    timing: Timing,
    windows: usize,
) -> Result<Vec<Window>> {
    set_others_frozen(subjects, alone, true)?;
    let measured = run_windows(
        &mut subjects[alone..=alone],
        &[Scheduler::Stock],
        timing,
        windows,
        |_| (),
    );
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

/// One window of all subjects under whatever schedules now; round and scheduler are for the caller to fill in.
fn measure<S: Subject>(subjects: &mut [S], timing: Timing) -> Result<Window> {
    sleep(timing.settle);
    let start = Reading::take(subjects)?;
    sleep(timing.window);
    let end = Reading::take(subjects)?;
    for subject in subjects.iter_mut() {
        subject.ensure_alive()?;
    }
    start.until(&end, subjects)
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

    fn until<S: Subject>(&self, end: &Self, subjects: &[S]) -> Result<Window> {
        let wall_ns = u64::try_from((end.at - self.at).as_nanos())?;
        let mut guests = Vec::new();
        for (index, subject) in subjects.iter().enumerate() {
            let ((operations, cpu_time), (end_operations, end_cpu_time)) =
                (self.counters[index], end.counters[index]);
            ensure!(
                end_operations > operations,
                "Guest {} made no progress within a window of {} ms, in which it had {} ms of CPU time: its counter \
                 stayed at {operations}",
                subject.name(),
                wall_ns / 1_000_000,
                (end_cpu_time - cpu_time) / 1_000_000
            );
            guests.push(GuestWindow {
                name: subject.name().into(),
                operations: end_operations - operations,
                cpu_time_ns: end_cpu_time - cpu_time,
            });
        }
        Ok(Window {
            round: 0,
            scheduler: String::new(),
            wall_ns,
            guests,
        })
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
        let window = measure(&mut fakes, SHORT).unwrap();
        assert_eq!(
            window.guests[0],
            GuestWindow {
                name: "one".into(),
                operations: 10,
                cpu_time_ns: 10_000
            }
        );
        assert_eq!(window.guests[1].operations, 30);
        assert!(window.wall_ns >= 2_000_000);
        let expected = 40.0 * 1e9 / window.wall_ns as f64;
        assert!((window.operations_per_s() - expected).abs() < 1e-6);
        assert!((window.cpu_shares()[0] - 10_000.0 / window.wall_ns as f64).abs() < 1e-9);
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
    fn others_are_frozen_and_thawed() {
        let mut fakes = [Fake::new("one", 1), Fake::new("two", 1)];
        set_others_frozen(&mut fakes, 1, true).unwrap();
        assert!(fakes[0].frozen && !fakes[1].frozen);
        set_others_frozen(&mut fakes, 1, false).unwrap();
        assert!(!fakes[0].frozen);
    }
}
