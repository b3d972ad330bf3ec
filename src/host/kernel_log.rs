// SPDX-License-Identifier: GPL-2.0-only
//! The kernel's log, as far back as it is kept in memory.

use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// The messages in `device` (/dev/kmsg), the oldest first; `None` if it cannot be read.
pub fn messages(device: &Path) -> Option<Vec<String>> {
    let mut log = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(device)
        .ok()?;
    let mut record = [0; 8192];
    let mut messages = Vec::new();
    loop {
        match log.read(&mut record) {
            Ok(0) => break,
            Ok(length) => messages.extend(message(&record[..length])),
            // Those that were overwritten meanwhile are skipped.
            Err(error) if error.raw_os_error() == Some(libc::EPIPE) => {}
            Err(_) => break,
        }
    }
    Some(messages)
}

/// Threads that the kernel caught with split or bus locks; it names each once.
pub fn split_lock_threads(messages: &[String]) -> Vec<u32> {
    let caught = ["split_lock", "bus_lock"].map(|what| format!(" took a {what} trap"));
    let thread = |message: &String| {
        let (before, _) = caught
            .iter()
            .find_map(|it| message.split_once(it.as_str()))?;
        before.rsplit_once('/')?.1.parse().ok()
    };
    messages.iter().filter_map(thread).collect()
}

/// Records look like `4,1234,567890,-;text`, with lines of other facts behind.
fn message(record: &[u8]) -> Option<String> {
    let record = String::from_utf8_lossy(record);
    let (_, text) = record.split_once(';')?;
    Some(text.lines().next().unwrap_or_default().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_was_caught_is_read_from_the_kernels_sentence() {
        let record = b"4,812,99,-;x86/split lock detection: #AC: CPU 0/KVM/4711 took a split_lock trap at address: 0x7f\n SUBSYSTEM=x\n";
        let messages: Vec<String> = message(record).into_iter().collect();
        assert_eq!(split_lock_threads(&messages), [4711]);
        let others = [String::from(
            "x86/split lock detection: warning on user-space split_locks",
        )];
        assert!(split_lock_threads(&others).is_empty());
    }
}
