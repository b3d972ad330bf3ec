// SPDX-License-Identifier: GPL-2.0-only
//! What the kernel lets this process have of something.

use std::io;

/// Lets this process have as many files open as it may: what shells and systemd give by default, 1,024, is for programs
/// that use select(). Clients that keep connections open then use up no file that something else needs.
pub fn raise_open_files() -> io::Result<()> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: getrlimit writes one rlimit through a valid pointer.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } != 0 {
        return Err(io::Error::last_os_error());
    }
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: setrlimit reads one rlimit through a valid pointer.
    match unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
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
