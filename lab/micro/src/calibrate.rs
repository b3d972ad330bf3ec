// SPDX-License-Identifier: GPL-2.0-only
//! How many iterations of the `compute` loop this machine runs per millisecond.
//!
//! The loop is register-only, so outside and inside a guest it runs at the same speed. Not a benchmark: it only turns
//! `compute 100us` into a number of iterations, once; from then on the program does a fixed amount of work.

use std::time::{Duration, Instant};

const ITERATIONS: u64 = 50_000;
const RUNS: usize = 9;

/// Iterations per millisecond. The shortest of several runs counts: the others were preempted or found a slow clock.
pub fn iterations_per_ms() -> u64 {
    let shortest = (0..RUNS)
        .map(|_| time_of(ITERATIONS))
        .min()
        .unwrap_or_default();
    per_ms(ITERATIONS, shortest)
}

fn per_ms(iterations: u64, time: Duration) -> u64 {
    let ns = time.as_nanos().max(1);
    u64::try_from(u128::from(iterations) * 1_000_000 / ns)
        .unwrap_or(u64::MAX)
        .max(1)
}

/// The same two instructions as the `compute` step.
fn time_of(iterations: u64) -> Duration {
    let start = Instant::now();
    // SAFETY: the loop changes the one register it is given and the flags, and no memory.
    unsafe {
        std::arch::asm!("2:", "dec {0}", "jnz 2b", inout(reg) iterations => _, options(nomem, nostack));
    }
    start.elapsed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_iterations_by_time() {
        assert_eq!(per_ms(50_000, Duration::from_micros(50)), 1_000_000);
        assert_eq!(per_ms(1, Duration::from_secs(1)), 1);
        assert_eq!(per_ms(5, Duration::ZERO), 5_000_000);
    }

    #[test]
    fn any_machine_computes_something() {
        assert!(iterations_per_ms() > 100);
    }
}
