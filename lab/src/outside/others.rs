// SPDX-License-Identifier: GPL-2.0-only
//! What other programs took of the machine's CPUs while L1 ran: on the hardware machine figures mean something only if
//! L1's CPUs get theirs. Not for what happens inside L1.

use std::fs;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use nix::sched::{CpuSet, sched_getaffinity};
use nix::unistd::Pid;
use serde::Serialize;

/// A disturbance is judged over this long; a build or a test beside the run takes longer.
const INTERVAL: Duration = Duration::from_secs(10);

/// CPUs that others may take in any interval before figures are void: a tenth of a machine of two CPUs, more than the
/// differences that `bench` looks for. A machine that does nothing else stays well below, counting errors included:
/// /proc/stat counts most machines' time by ticks, 0.02 CPUs or so beside the truth.
const VOID_FROM: f64 = 0.2;

/// What others took, in CPUs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct OtherLoad {
    /// Over the whole run.
    pub other_load: f64,
    /// In the interval of ten seconds in which it was most.
    pub other_load_busiest_10s: f64,
    /// CPUs of the machine that the lab may use.
    pub machine_cpus: usize,
}

impl OtherLoad {
    /// Whether an L1 of `l1_cpus` got less than it may have wanted. On a machine with CPUs to spare nobody is in
    /// its way.
    pub fn voids_figures(&self, l1_cpus: u32) -> bool {
        let beyond = self.other_load_busiest_10s + f64::from(l1_cpus) - self.machine_cpus as f64;
        beyond.min(self.other_load_busiest_10s) >= VOID_FROM
    }
}

/// Watches in a thread of its own until it is asked for the result.
pub struct Watch {
    stop: Sender<()>,
    thread: JoinHandle<Result<OtherLoad>>,
}

impl Watch {
    /// Begins. `emulator` is L1, whose time is not that of others; nor is that of this process.
    pub fn begin(emulator: u32) -> Self {
        let (stop, stopped) = mpsc::channel();
        let thread = thread::spawn(move || {
            let machine = Machine::new(emulator)?;
            let mut samples = vec![machine.sample()?];
            while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(INTERVAL) {
                samples.push(machine.sample()?);
            }
            samples.push(machine.sample()?);
            Ok(summary(&samples, machine.cpus.len()))
        });
        Self { stop, thread }
    }

    /// Ends; the emulator must not have been waited for yet.
    pub fn end(self) -> Result<OtherLoad> {
        drop(self.stop);
        self.thread
            .join()
            .map_err(|_| anyhow!("The thread that watches the machine has panicked."))?
            .context("What other programs used of the machine cannot be found out.")
    }
}

/// Where CPU time is read.
struct Machine {
    cpus: Vec<usize>,
    /// Ticks per second in /proc.
    hz: f64,
    own: [String; 2],
}

/// CPU time in seconds since the boot, at a time.
#[derive(Clone, Copy)]
struct Sample {
    at: Instant,
    machine: f64,
    own: f64,
}

impl Machine {
    fn new(emulator: u32) -> Result<Self> {
        let allowed = sched_getaffinity(Pid::from_raw(0))?;
        Ok(Self {
            cpus: (0..CpuSet::count())
                .filter(|cpu| allowed.is_set(*cpu).unwrap_or(false))
                .collect(),
            // SAFETY: a plain question; glibc knows the answer on every Linux.
            hz: unsafe { libc::sysconf(libc::_SC_CLK_TCK) } as f64,
            own: ["/proc/self/stat".into(), format!("/proc/{emulator}/stat")],
        })
    }

    fn sample(&self) -> Result<Sample> {
        let mut own = 0;
        for path in &self.own {
            own += process_ticks(&read(path)?).with_context(|| format!("{path} is no stat"))?;
        }
        Ok(Sample {
            at: Instant::now(),
            machine: busy_ticks(&read("/proc/stat")?, &self.cpus) as f64 / self.hz,
            own: own as f64 / self.hz,
        })
    }
}

fn read(path: &str) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("{path} cannot be read"))
}

/// Ticks that `cpus` have not idled. What a hypervisor has stolen is not theirs, but it is not ours either.
fn busy_ticks(stat: &str, cpus: &[usize]) -> u64 {
    let is_counted = |name: &str| {
        let number = name.strip_prefix("cpu").and_then(|cpu| cpu.parse().ok());
        number.is_some_and(|number| cpus.contains(&number))
    };
    stat.lines()
        .map(|line| line.split_ascii_whitespace())
        .filter_map(|mut words| is_counted(words.next()?).then_some(words))
        // user, nice, system, idle, iowait, irq, softirq, steal; guests' time, which follows, is a part of user.
        .flat_map(|words| words.take(8).enumerate())
        .filter(|(column, _)| !matches!(column, 3 | 4))
        .filter_map(|(_, ticks)| ticks.parse::<u64>().ok())
        .sum()
}

/// User and system time of all threads of the process whose /proc/PID/stat this is.
fn process_ticks(stat: &str) -> Option<u64> {
    // The name, in parentheses, may hold anything.
    let mut words = stat.rsplit_once(')')?.1.split_ascii_whitespace().skip(11);
    let (user, system) = (words.next()?, words.next()?);
    Some(user.parse::<u64>().ok()? + system.parse::<u64>().ok()?)
}

/// CPUs that others used between two samples. Both counters are rounded, so it may come out a little below nothing.
fn others(before: &Sample, after: &Sample) -> f64 {
    let elapsed = (after.at - before.at).as_secs_f64();
    let used = (after.machine - before.machine) - (after.own - before.own);
    (used / elapsed.max(f64::MIN_POSITIVE)).max(0.0)
}

fn summary(samples: &[Sample], machine_cpus: usize) -> OtherLoad {
    let other_load = match samples {
        [first, .., last] => others(first, last),
        _ => 0.0,
    };
    // The last interval may be as short as a tick, in which rounding is all there is.
    let busiest = samples
        .windows(2)
        .filter(|pair| pair[1].at - pair[0].at >= INTERVAL)
        .map(|pair| others(&pair[0], &pair[1]))
        .fold(other_load, f64::max);
    OtherLoad {
        other_load,
        other_load_busiest_10s: busiest,
        machine_cpus,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAT: &str = "cpu  999 999 999 999 999 999 999 999 999 999\n\
                        cpu0 100 20 30 5000 400 3 2 1 50 0\n\
                        cpu1 10 2 3 6000 40 0 0 0 0 0\n\
                        cpu11 7 0 0 0 0 0 0 0 0 0\n\
                        intr 5 6\n";

    #[test]
    fn idle_cpus_and_those_of_others_do_not_count() {
        assert_eq!(busy_ticks(STAT, &[0]), 156);
        assert_eq!(busy_ticks(STAT, &[0, 1]), 171);
    }

    #[test]
    fn a_process_may_be_called_anything() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 1 2 3 4 30 12 900 900 20 0 4 0 100";
        assert_eq!(process_ticks(stat), Some(42));
        assert!(process_ticks(&fs::read_to_string("/proc/self/stat").unwrap()).is_some());
    }

    fn samples(of: &[(u64, f64, f64)]) -> Vec<Sample> {
        let start = Instant::now();
        of.iter()
            .map(|&(seconds, machine, own)| Sample {
                at: start + Duration::from_secs(seconds),
                machine,
                own,
            })
            .collect()
    }

    #[test]
    fn what_we_did_not_use_others_did() {
        // Nothing for 10 s, a whole CPU for 10 s, and a last second that is too short to be judged.
        let seen = [
            (0, 100.0, 50.0),
            (10, 120.0, 70.0),
            (20, 140.0, 80.0),
            (21, 142.0, 80.0),
        ];
        let load = summary(&samples(&seen), 2);
        assert!((load.other_load - 12.0 / 21.0).abs() < 1e-9);
        assert!((load.other_load_busiest_10s - 1.0).abs() < 1e-9);
    }

    #[test]
    fn a_short_run_is_judged_as_a_whole_and_rounding_is_no_load() {
        let load = summary(&samples(&[(0, 1.0, 1.0), (4, 3.0, 1.0)]), 2);
        assert!((load.other_load_busiest_10s - 0.5).abs() < 1e-9);
        let load = summary(&samples(&[(0, 1.0, 1.0), (4, 2.0, 2.1)]), 2);
        assert_eq!(load.other_load, 0.0);
    }

    #[test]
    fn others_do_no_harm_where_there_are_cpus_for_all() {
        let load = |busiest, machine_cpus| OtherLoad {
            other_load: 0.0,
            other_load_busiest_10s: busiest,
            machine_cpus,
        };
        assert!(!load(0.1, 2).voids_figures(3));
        assert!(load(0.3, 2).voids_figures(3));
        assert!(!load(0.9, 4).voids_figures(3));
        assert!(load(1.3, 4).voids_figures(3));
        assert!(!load(9.0, 64).voids_figures(3));
    }
}
