// SPDX-License-Identifier: GPL-2.0-only
//! Context switches as the kernel's tracepoint `sched_switch` tells them, through an instance of tracefs of our own, so
//! that nobody else's tracing is touched. Not for what they mean.
use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::time::{ClockId, clock_gettime};

const INSTANCES: &str = "/sys/kernel/tracing/instances";
/// Of each CPU; a switch takes less than 100 bytes.
const BUFFER_KIB: &str = "4096";
/// From the start of tracing, which interrupts all CPUs for a moment, to that of the stretch. Who runs on a CPU is known
/// from its first switch on.
const LEAD_IN: Duration = Duration::from_millis(20);

/// A CPU goes from one thread to another; thread 0 is idleness.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Switch {
    /// Where.
    pub cpu: u32,
    /// When, by the kernel's monotonic clock.
    pub at_ns: u64,
    /// Who ran until then.
    pub from_tid: u32,
    /// Who runs from then on.
    pub to_tid: u32,
}

/// A stretch of time, and the switches in it and shortly before.
#[derive(Clone, Debug, PartialEq)]
pub struct Recording {
    /// Where it begins, by the kernel's monotonic clock.
    pub from_ns: u64,
    /// Its length.
    pub length_ns: u64,
    /// In the order of time.
    pub switches: Vec<Switch>,
}

/// Records the switches of all CPUs for `length` of lab time.
///
/// # Errors
/// When tracefs is not there or refuses, or the kernel lost switches.
pub fn record(length: Duration) -> Result<Recording> {
    let instance = Instance::create(&format!("lab-{}", std::process::id()))?;
    instance.write("trace_clock", "mono")?;
    instance.write("buffer_size_kb", BUFFER_KIB)?;
    instance.write("events/sched/sched_switch/enable", "1")?;
    instance.write("tracing_on", "1")?;
    sleep(LEAD_IN);
    let from_ns = now_ns()?;
    sleep(length);
    instance.write("tracing_on", "0")?;
    let switches = parse(&instance.read("trace")?)?;
    instance.remove()?;
    Ok(Recording {
        from_ns,
        length_ns: length.as_nanos() as u64,
        switches,
    })
}

/// The clock that the trace is told to use.
fn now_ns() -> Result<u64> {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).context("the monotonic clock")?;
    Ok(Duration::from(now).as_nanos() as u64)
}

/// An instance of tracefs: buffers and switches of its own. It is removed when it is dropped.
struct Instance {
    path: PathBuf,
    removed: bool,
}

impl Instance {
    fn create(name: &str) -> Result<Self> {
        let path = Path::new(INSTANCES).join(name);
        fs::create_dir(&path).with_context(|| {
            format!(
                "{} cannot be made, so context switches cannot be recorded; is tracefs mounted?",
                path.display()
            )
        })?;
        let instance = Self {
            path,
            removed: false,
        };
        // A new instance traces at once.
        instance.write("tracing_on", "0")?;
        Ok(instance)
    }

    fn write(&self, file: &str, value: &str) -> Result<()> {
        let path = self.path.join(file);
        fs::write(&path, value)
            .with_context(|| format!("\"{value}\" cannot be written to {}", path.display()))
    }

    fn read(&self, file: &str) -> Result<String> {
        let path = self.path.join(file);
        let bytes =
            fs::read(&path).with_context(|| format!("{} cannot be read", path.display()))?;
        // The names of threads are any bytes.
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// What dropping does, with errors reported.
    fn remove(mut self) -> Result<()> {
        self.removed = true;
        self.remove_directory()
    }

    fn remove_directory(&self) -> Result<()> {
        fs::remove_dir(&self.path)
            .with_context(|| format!("{} cannot be removed", self.path.display()))
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        if self.removed {
            return;
        }
        if let Err(error) = self.remove_directory() {
            eprintln!("{error:#}");
        }
    }
}

/// The switches in the text of a `trace` file that holds nothing else.
///
/// # Errors
/// When the kernel lost some, or a line is not understood: a drawing without a switch would lie.
fn parse(trace: &str) -> Result<Vec<Switch>> {
    let mut switches = Vec::new();
    for line in trace.lines().filter(|line| !line.trim().is_empty()) {
        ensure_complete(line)?;
        if !line.starts_with('#') {
            let switch = parse_switch(line);
            switches.push(switch.with_context(|| format!("No context switch is told by: {line}"))?);
        }
    }
    Ok(switches)
}

/// Refuses a line that tells of lost events: in the header or where they are missing.
fn ensure_complete(line: &str) -> Result<()> {
    let entries = line.strip_prefix("# entries-in-buffer/entries-written:");
    if let Some((kept, written)) = entries.and_then(|entries| entries.trim().split_once('/')) {
        let written = written.split_whitespace().next().unwrap_or_default();
        ensure!(
            kept == written,
            "The kernel kept {kept} of {written} context switches: record for a shorter time"
        );
    }
    if line.starts_with("CPU:") && line.contains("LOST") {
        bail!("The kernel lost context switches ({line}): record for a shorter time");
    }
    Ok(())
}

/// One event. Names of threads may hold anything, in up to 15 bytes, so numbers are looked for where no name can be:
/// around what is longer than a name, and from the right.
fn parse_switch(line: &str) -> Option<Switch> {
    let (place, event) = line.split_once(": sched_switch: prev_comm=")?;
    let mut words = place.rsplit(' ').filter(|word| !word.is_empty());
    let (at, _flags, cpu) = (words.next()?, words.next()?, words.next()?);
    let (from, to) = event.rsplit_once(" ==> next_comm=")?;
    Some(Switch {
        cpu: cpu.strip_prefix('[')?.strip_suffix(']')?.parse().ok()?,
        at_ns: nanoseconds(at)?,
        from_tid: number_after(from, " prev_pid=")?,
        to_tid: number_after(to, " next_pid=")?,
    })
}

fn number_after(text: &str, key: &str) -> Option<u32> {
    let (_, value) = text.rsplit_once(key)?;
    value.split(' ').next()?.parse().ok()
}

/// "12.345678" in seconds.
fn nanoseconds(seconds: &str) -> Option<u64> {
    let (whole, fraction) = seconds.split_once('.')?;
    let whole: u64 = whole.parse().ok()?;
    let fraction: u64 = format!("{fraction:0<9}").get(..9)?.parse().ok()?;
    whole.checked_mul(1_000_000_000)?.checked_add(fraction)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "\
# tracer: nop
#
# entries-in-buffer/entries-written: 3/3   #P:5
#
#                                _-----=> irqs-off/BH-disabled
#           TASK-PID     CPU#  |||||  TIMESTAMP  FUNCTION
#              | |         |   |||||     |         |
          <idle>-0       [001] d..2.    62.000001: sched_switch: prev_comm=swapper/1 prev_pid=0 prev_prio=120 prev_state=R ==> next_comm=vCPU 0 next_pid=301 next_prio=120
##### CPU 4 buffer started ####
          vCPU 0-301     [001] dN.3.    62.004000: sched_switch: prev_comm=vCPU 0 prev_pid=301 prev_prio=120 prev_state=R+ ==> next_comm=kworker/1:1 next_pid=40 next_prio=120

     kworker/1:1-40      [014] d..2.  1062.5: sched_switch: prev_comm=kworker/1:1 prev_pid=40 prev_prio=120 prev_state=I ==> next_comm=swapper/1 next_pid=0 next_prio=120
";

    fn switch(cpu: u32, at_us: u64, from_tid: u32, to_tid: u32) -> Switch {
        Switch {
            cpu,
            at_ns: at_us * 1000,
            from_tid,
            to_tid,
        }
    }

    #[test]
    fn a_trace_is_a_list_of_switches() {
        assert_eq!(
            parse(TRACE).unwrap(),
            [
                switch(1, 62_000_001, 0, 301),
                switch(1, 62_004_000, 301, 40),
                switch(14, 1_062_500_000, 40, 0)
            ]
        );
        assert_eq!(parse("# tracer: nop\n").unwrap(), []);
    }

    #[test]
    fn names_may_hold_what_looks_like_numbers() {
        let line = " ] [7] prev_pid=-8 [002] d..2. 1.000000: sched_switch: prev_comm= ] [7] prev_pid= prev_pid=8 \
                    prev_prio=120 prev_state=S ==> next_comm=x next_pid=9 y next_pid=10 next_prio=98";
        assert_eq!(parse(line).unwrap(), [switch(2, 1_000_000, 8, 10)]);
    }

    #[test]
    fn lost_switches_are_an_error() {
        let error = |text: &str| parse(text).unwrap_err().to_string();
        let overrun = TRACE.replace("3/3", "3/70");
        assert!(error(&overrun).contains("kept 3 of 70"));
        let lost = format!("{TRACE}CPU:2 [LOST 12 EVENTS]\n");
        assert!(error(&lost).contains("LOST 12 EVENTS"));
    }

    #[test]
    fn a_line_that_is_not_understood_is_an_error_that_shows_it() {
        let error = |text: &str| parse(text).unwrap_err().to_string();
        assert!(error("nonsense").ends_with("nonsense"));
        let cut = TRACE.trim_end().rsplit_once(" next_pid").unwrap().0;
        assert!(error(cut).contains("[014]"));
    }
}
