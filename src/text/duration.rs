// SPDX-License-Identifier: GPL-2.0-only
//! Durations as people write them: `4ms`, `30s`, `1m 30s`; or a bare number, whose unit the option or key tells.

use std::ops::RangeInclusive;
use std::time::Duration;

/// The unit of bare numbers.
pub const SECOND: Duration = Duration::from_secs(1);
/// The unit of bare numbers.
pub const MILLISECOND: Duration = Duration::from_millis(1);
/// The unit of bare numbers.
pub const MICROSECOND: Duration = Duration::from_micros(1);

/// The time between two windows that are shown.
pub const INTERVALS: RangeInclusive<Duration> = SECOND..=Duration::from_secs(3600);

/// The duration that `text` says, or a sentence on what it should have been.
pub fn parse(
    text: &str,
    unit: Duration,
    possible: &RangeInclusive<Duration>,
) -> Result<Duration, String> {
    let duration = match text.trim().parse::<f64>() {
        Ok(number) => Duration::try_from_secs_f64(number * unit.as_secs_f64()).ok(),
        Err(_) => humantime::parse_duration(text).ok(),
    };
    duration
        .filter(|duration| possible.contains(duration))
        .ok_or_else(|| {
            format!(
                "write a duration from {} to {}, with its unit; a number without one is in units of {}",
                show(*possible.start()),
                show(*possible.end()),
                show(unit)
            )
        })
}

/// Reads the interval of `watch`, `top` and `stats` from the command line.
pub fn parse_interval(text: &str) -> Result<Duration, String> {
    parse(text, SECOND, &INTERVALS)
}

/// As people write it.
pub fn show(duration: Duration) -> String {
    humantime::format_duration(duration).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    const POSSIBLE: RangeInclusive<Duration> = MICROSECOND..=Duration::from_secs(60);

    #[test]
    fn a_unit_or_the_usual_one_without() {
        for (text, expected) in [
            ("4000", Duration::from_millis(4)),
            ("4ms", Duration::from_millis(4)),
            ("4 ms", Duration::from_millis(4)),
            ("500us", Duration::from_micros(500)),
            ("1s 500ms", Duration::from_millis(1500)),
            ("1.5", Duration::from_nanos(1500)),
            ("1min", Duration::from_secs(60)),
        ] {
            assert_eq!(parse(text, MICROSECOND, &POSSIBLE), Ok(expected), "{text}");
        }
    }

    #[test]
    fn what_is_no_duration_or_out_of_range_is_refused_with_what_to_write() {
        for text in [
            "",
            "ms",
            "4 lightyears",
            "-1",
            "NaN",
            "inf",
            "0",
            "61s",
            "1e30",
        ] {
            let sentence = parse(text, MICROSECOND, &POSSIBLE).expect_err(text);
            let expected = "write a duration from 1us to 1m, with its unit; a number without one is in units of 1us";
            assert_eq!(sentence, expected, "{text}");
        }
    }

    #[test]
    fn what_is_shown_can_be_written() {
        let shown = show(Duration::from_micros(4_200));
        assert_eq!(shown, "4ms 200us");
        assert_eq!(
            parse(&shown, SECOND, &POSSIBLE),
            Ok(Duration::from_micros(4_200))
        );
    }
}
