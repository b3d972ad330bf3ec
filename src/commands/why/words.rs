// SPDX-License-Identifier: GPL-2.0-only
//! Times as the findings say them.

use std::time::{Duration, SystemTime};

/// So many microseconds in words: "250 us", "12 ms", "4.2 s".
pub fn duration(us: u64) -> String {
    match us {
        0..1000 => format!("{us} us"),
        1000..1_000_000 => format!("{} ms", us / 1000),
        _ => format!("{:.1} s", us as f64 / 1e6),
    }
}

/// A moment in words, of milliseconds since 1970 (UTC).
pub fn moment(unix_ms: u64) -> String {
    let time = SystemTime::UNIX_EPOCH + Duration::from_millis(unix_ms);
    humantime::format_rfc3339_seconds(time).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_short() {
        assert_eq!(
            [250, 12_345, 4_230_000].map(duration),
            ["250 us", "12 ms", "4.2 s"]
        );
        assert_eq!(moment(1_800_000_000_000), "2027-01-15T08:00:00Z");
    }
}
