// SPDX-License-Identifier: GPL-2.0-only
//! Keeps the BPF part able to tell how long vCPUs halt on their CPUs (bpf/halt.bpf.h): opens an event for each CPU that is
//! online, and has the rate of its MPERF measured.

use crate::bpf::{from_bytes, intf};
use crate::host::mperf::{Mperf, NoMperf};
use anyhow::{Context, Result};
use libbpf_rs::{MapCore, MapFlags, MapMut, ProgramInput, ProgramMut};
use nix::errno::Errno;
use std::collections::{BTreeSet, HashMap};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

/// include/uapi/linux/bpf.h: it is run on the CPU that is named, and nowhere else.
const BPF_F_TEST_RUN_ON_CPU: u32 = 1;
/// So often a rate is measured at first, at once; each time takes a CPU for 20 us.
const MEASUREMENTS_AT_FIRST: u32 = 4;
/// So often it is measured at one reading after the other, where vCPUs halt on their CPU;
const MEASUREMENTS_SOON: u32 = 16;
/// and then so often.
const MEASURE_PERIOD: Duration = Duration::from_secs(60);

/// The maps and the program of bpf/halt.bpf.h.
pub struct HaltParts<'skel, 'object> {
    /// `mperf_events`
    pub events: &'skel MapMut<'object>,
    /// `halt_clocks`
    pub clocks: &'skel MapMut<'object>,
    /// `calibrate_mperf`
    pub calibrate: &'skel ProgramMut<'object>,
}

/// The [`HaltParts`] of a loaded skeleton, once a vCPU was seen that halts on its CPU; both BPF objects have them by the same
/// names.
macro_rules! halt_parts {
    ($skel:expr) => {{
        let data = $skel.maps.bss_data.as_ref();
        // SAFETY: a live, aligned u32 that the BPF programs write.
        let seen = data.is_some_and(
            |data| unsafe { std::ptr::read_volatile(&raw const data.halts_seen) } != 0,
        );
        seen.then_some($crate::bpf::halt::HaltParts {
            events: &$skel.maps.mperf_events,
            clocks: &$skel.maps.halt_clocks,
            calibrate: &$skel.progs.calibrate_mperf,
        })
    }};
}
pub(crate) use halt_parts;

impl HaltParts<'_, '_> {
    /// By number of the CPU.
    fn read_clocks(&self) -> Result<Vec<intf::halt_clock>> {
        let first = 0_u32.to_ne_bytes();
        let values = self.clocks.lookup_percpu(&first, MapFlags::ANY)?;
        let values = values.context("the map of clocks is empty")?;
        values.iter().map(|bytes| from_bytes(bytes)).collect()
    }
}

/// How halted time can be told where HLT does not exit.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct HaltSight {
    /// Why it cannot be, as a part of a sentence.
    pub unseen: Option<String>,
    /// Of the time in which a vCPU was not halted: so much may be wrong, in parts per million.
    pub error_ppm: u64,
}

/// What is known of the CPUs.
pub struct HaltClocks {
    mperf: Result<Mperf, NoMperf>,
    opened: BTreeSet<usize>,
    measured: HashMap<usize, Instant>,
}

impl HaltClocks {
    /// Of no CPU yet.
    pub fn new(sys: &Path) -> Self {
        Self {
            mperf: Mperf::find(sys),
            opened: BTreeSet::new(),
            measured: HashMap::new(),
        }
    }

    /// Brings everything up to date for the CPUs that are `online`. Also returns those where a vCPU that halts on its CPU
    /// runs now.
    pub fn keep(
        &mut self,
        parts: &HaltParts<'_, '_>,
        online: &BTreeSet<usize>,
    ) -> Result<(HaltSight, Vec<usize>)> {
        let unseen = |why: String| {
            let sight = HaltSight {
                unseen: Some(why),
                error_ppm: 0,
            };
            Ok((sight, Vec::new()))
        };
        let mperf = match self.mperf {
            Ok(mperf) => mperf,
            Err(missing) => return unseen(missing.to_string()),
        };
        let clocks = parts.read_clocks()?;
        let counts = |&cpu: &usize| clocks.get(cpu).is_some_and(|clock| clock.stopped == 0);
        self.opened
            .retain(|cpu| online.contains(cpu) && counts(cpu));
        for &cpu in online {
            if self.opened.contains(&cpu) {
                continue;
            }
            match open(mperf, cpu, parts) {
                Ok(()) => self.opened.insert(cpu),
                Err(error) if is_offline(&error) => continue,
                Err(error) => {
                    return unseen(format!(
                        "the kernel does not count MPERF on CPU {cpu} ({error})"
                    ));
                }
            };
        }
        for &cpu in &self.opened {
            if let Some(clock) = clocks.get(cpu) {
                for _ in 0..due(clock, self.measured.get(&cpu)) {
                    run_on(parts.calibrate, cpu);
                    self.measured.insert(cpu, Instant::now());
                }
            }
        }
        let clocks = parts.read_clocks()?;
        let runs = |&cpu: &usize| clocks.get(cpu).is_some_and(|clock| clock.running != 0);
        let running = online.iter().copied().filter(runs).collect();
        Ok((sight(&clocks), running))
    }
}

/// How well `clocks` tell the time.
fn sight(clocks: &[intf::halt_clock]) -> HaltSight {
    let told = clocks.iter().filter(|clock| clock.ns_per_cycle > 0);
    let unseen = match (
        told.clone().next(),
        clocks.iter().any(|c| c.measurements > 0),
    ) {
        (Some(_), _) => None,
        (None, true) => Some("MPERF stands still, though the CPUs announce it"),
        (None, false) => Some("MPERF could not be read on any CPU"),
    };
    let used = told.filter(|clock| clock.used != 0);
    HaltSight {
        unseen: unseen.map(str::to_owned),
        error_ppm: used.map(|clock| clock.error_ppm).max().unwrap_or(0),
    }
}

/// How often a rate is to be measured now.
fn due(clock: &intf::halt_clock, measured: Option<&Instant>) -> u32 {
    if clock.measurements < MEASUREMENTS_AT_FIRST {
        return MEASUREMENTS_AT_FIRST - clock.measurements;
    }
    let soon = clock.measurements < MEASUREMENTS_SOON;
    let old = measured.is_none_or(|at| at.elapsed() >= MEASURE_PERIOD);
    // Also one that was opened anew: the BPF side says that it counts when it is measured.
    let wanted = clock.stopped != 0 || (clock.used != 0 && (soon || old));
    u32::from(wanted)
}

/// Puts an event for CPU `cpu` into the map, which keeps it.
fn open(mperf: Mperf, cpu: usize, parts: &HaltParts<'_, '_>) -> io::Result<()> {
    let event = mperf.count_on(cpu)?;
    let (key, value) = (cpu as u32, event.as_raw_fd());
    parts
        .events
        .update(&key.to_ne_bytes(), &value.to_ne_bytes(), MapFlags::ANY)
        .map_err(io::Error::other)
}

fn is_offline(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::ENODEV as i32)
}

/// Runs `program` on CPU `cpu`, by an interrupt.
pub fn run_on(program: &ProgramMut<'_>, cpu: usize) {
    let input = ProgramInput {
        cpu: cpu as u32,
        flags: BPF_F_TEST_RUN_ON_CPU,
        ..ProgramInput::default()
    };
    // A CPU that has just gone offline has nothing to look at. Whatever else keeps it from running, the time for which
    // it is missing counts as unread.
    let _ = program.test_run(input);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clock(measurements: u32, ns_per_cycle: u64) -> intf::halt_clock {
        intf::halt_clock {
            measurements,
            ns_per_cycle,
            ..bytemuck::Zeroable::zeroed()
        }
    }

    #[test]
    fn a_counter_that_stands_still_is_said_and_so_is_one_that_cannot_be_read() {
        let why = |clocks: &[intf::halt_clock]| sight(clocks).unseen.unwrap_or_default();
        assert!(why(&[clock(4, 0), clock(0, 0)]).contains("stands still"));
        assert!(why(&[clock(0, 0)]).contains("could not be read"));
        assert_eq!(why(&[clock(4, 1 << 28), clock(4, 0)]), "");
    }

    #[test]
    fn the_error_is_the_worst_of_cpus_that_are_used() {
        let with = |used, error_ppm| intf::halt_clock {
            used,
            error_ppm,
            ..clock(4, 1 << 28)
        };
        let sight = sight(&[with(1, 30), with(1, 70), with(0, 900)]);
        assert_eq!((sight.unseen, sight.error_ppm), (None, 70));
    }

    #[test]
    fn rates_are_measured_often_at_first_and_then_where_they_are_used() {
        let used = |measurements| intf::halt_clock {
            used: 1,
            ..clock(measurements, 1)
        };
        let now = Some(Instant::now());
        assert_eq!(due(&clock(0, 0), None), 4);
        assert_eq!(due(&clock(3, 1), now.as_ref()), 1);
        assert_eq!(due(&clock(4, 1), now.as_ref()), 0);
        assert_eq!(due(&used(4), now.as_ref()), 1);
        assert_eq!(due(&used(16), now.as_ref()), 0);
        let long_ago = Instant::now().checked_sub(MEASURE_PERIOD);
        assert_eq!(due(&used(16), long_ago.as_ref()), 1);
        let stopped = intf::halt_clock {
            stopped: 1,
            ..clock(16, 1)
        };
        assert_eq!(due(&stopped, now.as_ref()), 1);
    }
}
