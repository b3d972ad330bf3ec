// SPDX-License-Identifier: GPL-2.0-only
//! The order of windows: rounds in which each scheduler has one, and the exchange of schedulers between them. What
//! is measured in a window is the caller's.

use super::scheduler::{RunningScheduler, Scheduler};
use anyhow::Result;
use std::path::Path;

/// A window that is about to be measured.
pub struct Turn<'a> {
    /// The round, from 0; with two schedulers a pair.
    pub round: usize,
    /// What the scheduler is called in results, see [`arm_names`].
    pub scheduler: &'a str,
    /// The scheduler itself; none is the kernel's own.
    pub running: Option<&'a mut RunningScheduler>,
}

/// Has one window per scheduler measured in each of `rounds` rounds. Every other round runs in reverse (A B B A A B …),
/// so that drift cannot favour one; a scheduler that comes twice in a row goes on running. At the end, and after an
/// error, the kernel's own scheduler is back. What schedulers print is kept in the folder `logs`.
///
/// # Errors
/// What `measure` returns, and when a scheduler does not start, run or leave as it should.
pub fn run_rounds<T>(
    schedulers: &[Scheduler],
    rounds: usize,
    logs: &Path,
    mut measure: impl FnMut(Turn<'_>) -> Result<T>,
) -> Result<Vec<T>> {
    let names = arm_names(schedulers);
    let mut measured = Vec::new();
    let mut current: Option<(usize, Option<RunningScheduler>)> = None;
    for (round, index) in order(schedulers.len(), rounds) {
        let (_, running) = match &mut current {
            Some(same) if same.0 == index => same,
            other => {
                leave(other.take())?;
                other.insert((index, schedulers[index].start(logs)?))
            }
        };
        let turn = Turn {
            round,
            scheduler: &names[index],
            running: running.as_mut(),
        };
        match measure(turn) {
            Ok(window) => measured.push(window),
            Err(error) => {
                return Err(match leave(current) {
                    Ok(()) => error,
                    Err(second) => error.context(format!(
                        "{} did not leave well either: {second:#}",
                        names[index]
                    )),
                });
            }
        }
        if let Some(running) = running {
            running.check()?;
        }
    }
    leave(current)?;
    Ok(measured)
}

fn leave(current: Option<(usize, Option<RunningScheduler>)>) -> Result<()> {
    if let Some((_, Some(running))) = current {
        running.stop()?;
    }
    Ok(())
}

/// Names of schedulers in results. One may be compared with itself, to see what noise alone does: its second
/// appearance is "name 2".
pub fn arm_names(schedulers: &[Scheduler]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for scheduler in schedulers {
        let earlier = schedulers[..names.len()]
            .iter()
            .filter(|other| other.name() == scheduler.name())
            .count();
        names.push(match earlier {
            0 => scheduler.name().into(),
            earlier => format!("{} {}", scheduler.name(), earlier + 1),
        });
    }
    names
}

/// Pairs of round and index of the scheduler, in the order to run them.
fn order(schedulers: usize, rounds: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..rounds).flat_map(move |round| {
        (0..schedulers).map(move |position| {
            (
                round,
                if round % 2 == 0 {
                    position
                } else {
                    schedulers - 1 - position
                },
            )
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_alternate_their_direction() {
        let two: Vec<usize> = order(2, 3).map(|(_, index)| index).collect();
        assert_eq!(two, [0, 1, 1, 0, 0, 1]);
        let three: Vec<(usize, usize)> = order(3, 2).collect();
        assert_eq!(three, [(0, 0), (0, 1), (0, 2), (1, 2), (1, 1), (1, 0)]);
    }

    #[test]
    fn a_scheduler_compared_with_itself_has_two_names() {
        let names = arm_names(&[Scheduler::Stock, Scheduler::cohort(&[]), Scheduler::Stock]);
        assert_eq!(names, ["stock", "cohort", "stock 2"]);
    }
}
