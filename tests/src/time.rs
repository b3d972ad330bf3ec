// SPDX-License-Identifier: GPL-2.0-only
//! The exact machine's model of time, which docs/lab.md describes: `lab boot --machine exact --cpus 9 -- cohort-tests time`.
//! Interrupts are the only reason to differ from it, so of several short measurements the least counts.

use std::arch::asm;
use std::arch::x86_64::_rdtsc;
use std::fs::{self, File};
use std::ops::RangeInclusive;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, ScopedJoinHandle, sleep};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, anyhow, ensure};
use cohort_lab::inside::process::stay_on;
use cohort_lab::outside::machine::Kind;
use cohort_lab::outside::machine::bochs::{START_UNIX_S, TICKS_PER_S};
use cohort_micro::Spec;
use nix::libc;

use crate::Test;
use crate::host::{Guest, lab, vcpus_of, watch};

pub const TESTS: &[Test] = &[
    (
        "an_instruction_takes_a_tick_whatever_other_cpus_do",
        instructions,
    ),
    ("a_second_is_one_by_every_clock", seconds),
    ("mperf_counts_what_a_cpu_was_not_halted", unhalted),
    ("a_pause_takes_40_ticks", pauses),
    ("pauses_that_are_far_apart_are_no_spinning", spins),
    (
        "into_a_guest_and_out_of_it_takes_1000_ticks_and_kvms_instructions",
        world_switches,
    ),
];

/// Instructions of one loop: a quarter of the time between two ticks of the host.
const LOOP: u64 = 1_000_000;
/// Loops of which the least counts.
const LOOPS: usize = 5;

/// Refuses any other machine.
pub fn ensure_exact() -> Result<()> {
    let machine = lab()?.machine;
    ensure!(
        machine == Kind::Exact,
        "the machine is {machine}: only the exact one has this model of time"
    );
    Ok(())
}

/// This CPU's TSC.
pub fn tsc() -> u64 {
    // SAFETY: every amd64 CPU has RDTSC, and L1's kernel lets programs use it.
    unsafe { _rdtsc() }
}

/// Executes as many instructions, none of which touches memory.
fn execute(instructions: u64) {
    // SAFETY: changes nothing but its own register and flags.
    unsafe {
        asm!("2:", "dec {n}", "jnz 2b", n = inout(reg) instructions / 2 => _, options(nomem, nostack));
    }
}

/// What the least of several loops took, in ticks of the TSC and ns of CLOCK_MONOTONIC.
fn least_of_loops() -> [u64; 2] {
    let loops = (0..LOOPS).map(|_| {
        let (begin, ticks) = (Instant::now(), tsc());
        execute(LOOP);
        [tsc() - ticks, begin.elapsed().as_nanos() as u64]
    });
    loops.fold([u64::MAX; 2], |least, took| {
        [least[0].min(took[0]), least[1].min(took[1])]
    })
}

/// The same on each of `cpus`, all of which are busy until the last has measured.
fn least_on(cpus: RangeInclusive<u32>) -> Result<Vec<[u64; 2]>> {
    let missing = &AtomicUsize::new(cpus.clone().count());
    let unfinished = &AtomicUsize::new(cpus.clone().count());
    let meet = |left: &AtomicUsize| {
        left.fetch_sub(1, Ordering::Relaxed);
        while left.load(Ordering::Relaxed) > 0 {}
    };
    let measure = |cpu| {
        let here = stay_on(&[cpu]);
        meet(missing);
        let least = least_of_loops();
        meet(unfinished);
        here.map(|()| least)
    };
    thread::scope(|scope| {
        let threads: Vec<_> = cpus.map(|cpu| scope.spawn(move || measure(cpu))).collect();
        threads.into_iter().map(joined).collect()
    })
}

/// What a thread returned.
fn joined<T>(thread: ScopedJoinHandle<'_, Result<T>>) -> Result<T> {
    thread
        .join()
        .map_err(|_| anyhow!("a thread has panicked"))?
}

/// Demands that `value` is within a fraction of what is expected.
fn ensure_near(what: &str, value: u64, expected: u64, tolerance: f64) -> Result<()> {
    let away = value as f64 / expected as f64 - 1.0;
    println!("    {what}: {value}, expected {expected}, {away:+.6}");
    ensure!(
        away.abs() <= tolerance,
        "{what}: {value} is not within {tolerance} of {expected}"
    );
    Ok(())
}

fn instructions() -> Result<()> {
    ensure_exact()?;
    let cpus = lab()?.cpus;
    ensure!(
        cpus >= 9,
        "this host has {cpus} CPUs: boot the lab with --cpus 9"
    );
    // CPU 0 has the harness, which sleeps meanwhile.
    for busy in [1, 3, 8] {
        let loops = least_on(1..=busy)?;
        for (index, clock) in ["the TSC", "CLOCK_MONOTONIC"].into_iter().enumerate() {
            let took = loops.iter().map(|took| took[index]);
            let furthest = took
                .max_by_key(|took| took.abs_diff(LOOP))
                .unwrap_or_default();
            let what = format!("a loop beside {} busy CPUs, by {clock}", busy - 1);
            ensure_near(&what, furthest, LOOP, 0.001)?;
        }
    }
    Ok(())
}

/// Hundredths of a second by the kernel's jiffies, from which times(2) calculates what it returns.
fn jiffies_hundredths() -> u64 {
    // SAFETY: it writes nothing if there is nowhere to write to.
    unsafe { libc::times(std::ptr::null_mut()) as u64 }
}

fn seconds() -> Result<()> {
    ensure_exact()?;
    let unix = SystemTime::now();
    let since_start = unix.duration_since(UNIX_EPOCH)?.as_secs() - u64::from(START_UNIX_S);
    ensure!(
        since_start < 3600,
        "L1's clock is {since_start} s after the start of every run: it has another time from elsewhere"
    );
    let (monotonic, ticks, jiffies) = (Instant::now(), tsc(), jiffies_hundredths());
    sleep(Duration::from_secs(1));
    let clocks = [
        ("CLOCK_MONOTONIC, ns", monotonic.elapsed().as_nanos() as u64),
        ("CLOCK_REALTIME, ns", unix.elapsed()?.as_nanos() as u64),
        ("the TSC", tsc() - ticks),
    ];
    for (clock, gained) in clocks {
        ensure_near(clock, gained, TICKS_PER_S.into(), 0.001)?;
    }
    ensure_near(
        "jiffies, hundredths",
        jiffies_hundredths() - jiffies,
        100,
        0.01,
    )
}

/// MPERF of a CPU.
fn mperf(msrs: &File) -> Result<u64> {
    let mut value = [0; 8];
    msrs.read_exact_at(&mut value, 0xe7)
        .context("MPERF cannot be read")?;
    Ok(u64::from_ne_bytes(value))
}

fn unhalted() -> Result<()> {
    ensure_exact()?;
    const CPU: u32 = 1;
    let busy = Duration::from_millis(100);
    let busy_ticks = busy.as_nanos() as u64;
    ensure!(
        Command::new("modprobe").arg("msr").status()?.success(),
        "L1 has no module msr"
    );
    let msrs = File::open(format!("/dev/cpu/{CPU}/msr"))?;
    let gain = || -> Result<[u64; 2]> {
        stay_on(&[CPU])?;
        let (start, before) = (tsc(), mperf(&msrs)?);
        while tsc() - start < busy_ticks {}
        let between = mperf(&msrs)?;
        sleep(busy);
        Ok([between - before, mperf(&msrs)? - between])
    };
    let [while_busy, while_idle] = thread::scope(|scope| joined(scope.spawn(gain)))?;
    println!("    MPERF gained {while_busy} in {busy:?} of work, {while_idle} in as much sleep");
    ensure_near("MPERF", while_busy + while_idle, busy_ticks, 0.01)
}

fn pauses() -> Result<()> {
    ensure_exact()?;
    const PAUSES: u64 = 10_000;
    let took = (0..LOOPS).map(|_| {
        let begin = tsc();
        // SAFETY: changes nothing but its own register and flags.
        unsafe {
            asm!("2:", "pause", "dec {n}", "jnz 2b", n = inout(reg) PAUSES => _, options(nomem, nostack));
        }
        tsc() - begin
    });
    let least = took.min().unwrap_or_default();
    ensure_near(
        "PAUSE, DEC and JNZ, 10,000 times",
        least,
        PAUSES * 42,
        0.002,
    )
}

/// KVM has a guest leave after 3,000 PAUSEs or more, of which each comes at most 128 ticks after the one before.
fn spins() -> Result<()> {
    ensure_exact()?;
    let guests = [
        Guest::start_on(&Spec::new("close").vcpu("loop: pause 1"), &[1])?,
        Guest::start_on(&Spec::new("far").vcpu("loop: compute 150ns; pause 1"), &[2])?,
    ];
    let view = watch(1)?;
    let [close, far] = [&guests[0], &guests[1]].map(|guest| vcpus_of(&view, guest));
    let (close, far) = (close?.spin_exits, far?.spin_exits);
    println!("    spin exits in a second: {close} of PAUSEs close to each other, {far} of others");
    ensure!(close > 20, "close to each other they are no spinning");
    ensure!(far == 0, "far apart they are taken for spinning");
    Ok(())
}

/// Ticks from KVM's event kvm_entry, shortly before VMRUN, to kvm_exit, shortly after the #VMEXIT: the median of all
/// that a CPU did within `window`.
fn ticks_in_guest(cpu: u32, window: Duration) -> Result<u64> {
    let tracing = Path::new("/sys/kernel/tracing");
    let write = |file: &str, text: &str| {
        let path = tracing.join(file);
        fs::write(&path, text).with_context(|| format!("{} cannot be written", path.display()))
    };
    write("trace_clock", "x86-tsc")?;
    write("events/kvm/kvm_entry/enable", "1")?;
    write("events/kvm/kvm_exit/enable", "1")?;
    sleep(window);
    write("tracing_on", "0")?;
    let trace = fs::read_to_string(tracing.join(format!("per_cpu/cpu{cpu}/trace")))?;
    let events: Vec<(u64, bool)> = trace.lines().filter_map(event).collect();
    let mut ticks: Vec<u64> = events
        .windows(2)
        .filter(|pair| pair[0].1 && !pair[1].1)
        .map(|pair| pair[1].0 - pair[0].0)
        .collect();
    ticks.sort_unstable();
    ensure!(ticks.len() > 100, "the guest left {} times", ticks.len());
    Ok(ticks[ticks.len() / 2])
}

/// When an event of the trace was, and whether it is an entry.
fn event(line: &str) -> Option<(u64, bool)> {
    let mut words = line
        .split_whitespace()
        .map(|word| word.trim_end_matches(':'));
    let mut before = words.next()?;
    for word in words {
        if word == "kvm_entry" || word == "kvm_exit" {
            return Some((before.parse().ok()?, word == "kvm_entry"));
        }
        before = word;
    }
    None
}

/// The kernel cannot count its own instructions here. Of what it executes between the two events there are some 1,350 in
/// Linux 7.3, so that with either of the two costs missing the sum is below this range.
const BETWEEN_ENTRY_AND_EXIT: RangeInclusive<u64> = 2000..=3000;

fn world_switches() -> Result<()> {
    ensure_exact()?;
    const CPU: u32 = 1;
    // Each arming of its timer leaves the guest.
    let _guest = Guest::start_on(&Spec::new("leaves").vcpu("loop: timer 1s"), &[CPU])?;
    let ticks = ticks_in_guest(CPU, Duration::from_millis(5))?;
    println!("    {ticks} ticks from kvm_entry to kvm_exit");
    ensure!(
        BETWEEN_ENTRY_AND_EXIT.contains(&ticks),
        "entering a guest and leaving it takes {ticks} ticks, not {BETWEEN_ENTRY_AND_EXIT:?}: 500 each and some 1,350 \
         instructions of KVM"
    );
    Ok(())
}
