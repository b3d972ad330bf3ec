// SPDX-License-Identifier: GPL-2.0-only
//! What the kernel lets this process have of something.

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::io;

/// Lets this process have as many files open as it may: what shells and systemd give by default, 1,024, is for programs
/// that use select().
pub fn raise_open_files() -> io::Result<()> {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    Ok(setrlimit(Resource::RLIMIT_NOFILE, most, most)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_files_as_allowed_can_be_open() {
        raise_open_files().expect("everybody may up to the hard limit");
        let limits = std::fs::read_to_string("/proc/self/limits").expect("Linux has it");
        let line = limits
            .lines()
            .find(|line| line.starts_with("Max open files"));
        let mut numbers = line.expect("it has it").split_whitespace().skip(3);
        assert_eq!(numbers.next(), numbers.next());
    }
}
