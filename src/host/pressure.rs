// SPDX-License-Identifier: GPL-2.0-only
//! The kernel's pressure stall information: for how long tasks of the host stood still for want of CPUs, I/O or memory.

use super::paths::Host;
use std::fs;

/// For how long tasks have stood still since the boot, us.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Stalls {
    /// At least one task did.
    pub some_us: u64,
    /// All that were not idle did.
    pub full_us: u64,
}

/// The same for each want.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Pressure {
    /// A CPU.
    pub cpu: Stalls,
    /// I/O.
    pub io: Stalls,
    /// Memory.
    pub memory: Stalls,
}

impl Pressure {
    /// Reads it; `None` where the kernel does not count it (`psi=0`, or built without).
    pub fn read(host: &Host) -> Option<Self> {
        let of = |want: &str| {
            let text = fs::read_to_string(host.proc.join("pressure").join(want)).ok()?;
            stalls(&text)
        };
        Some(Self {
            cpu: of("cpu")?,
            io: of("io")?,
            memory: of("memory")?,
        })
    }
}

/// Lines look like `some avg10=0.00 avg60=0.00 avg300=0.00 total=123`.
fn stalls(text: &str) -> Option<Stalls> {
    let total = |kind: &str| {
        let line = text.lines().find(|line| line.starts_with(kind))?;
        line.rsplit_once("total=")?.1.trim().parse().ok()
    };
    Some(Stalls {
        some_us: total("some")?,
        // Of CPUs some kernels do not tell.
        full_us: total("full").unwrap_or(0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::paths::fixture::Fixture;

    #[test]
    fn totals_are_read_and_a_kernel_without_has_none() {
        let both = "some avg10=0.00 avg60=0.00 avg300=0.00 total=7\nfull avg10=1.00 avg60=0.00 avg300=0.00 total=3\n";
        let fixture = Fixture::new()
            .with(
                "proc/pressure/cpu",
                "some avg10=0.00 avg60=0.00 avg300=0.00 total=9\n",
            )
            .with("proc/pressure/io", both)
            .with("proc/pressure/memory", both);
        let got = Pressure::read(&fixture.host()).expect("all is there");
        assert_eq!((got.cpu.some_us, got.cpu.full_us), (9, 0));
        assert_eq!((got.io.some_us, got.memory.full_us), (7, 3));
        assert_eq!(Pressure::read(&Fixture::new().host()), None);
    }
}
