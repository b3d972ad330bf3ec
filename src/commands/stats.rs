// SPDX-License-Identifier: GPL-2.0-only
//! `cohort stats`: shows what a running `cohort run` counts.

use crate::host::paths::Host;
use crate::process::exit::{Exit, Failure};
use crate::scheduler::metrics::HostStats;
use crate::scheduler::stats_server::{PATIENCE, connect};
use crate::text::duration::parse_interval;
use crate::text::table;
use clap::Args;
use std::thread;
use std::time::Duration;

/// The options of `cohort stats`.
#[derive(Args, Clone, Debug)]
pub struct StatsOptions {
    /// Time between two tables; 1s to 1h, a number without a unit is in seconds
    #[arg(long, value_name = "TIME", visible_alias = "interval-s", default_value = "1s", value_parser = parse_interval)]
    interval: Duration,

    /// Stop after this many tables [default: never]
    #[arg(long, value_name = "TABLES", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,

    /// Print each window as one line of JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// Prints windows until told to stop, or until `cohort run` ends.
pub fn stats(options: &StatsOptions, host: &Host) -> Result<(), Failure> {
    let mut client = connect(host, PATIENCE)?;
    let mut printed = 0;
    loop {
        let host_stats: HostStats = client.request("stats", vec![]).map_err(|error| {
            let sentence = "`cohort run` no longer answers; its own last lines say why";
            Failure::new(Exit::NotRunning, error.context(sentence))
        })?;
        table::print(&text(options, &host_stats)?)?;
        printed += 1;
        if options.count == Some(printed) {
            return Ok(());
        }
        thread::sleep(options.interval);
    }
}

fn text(options: &StatsOptions, host_stats: &HostStats) -> Result<String, Failure> {
    if options.json {
        return table::json_line(host_stats);
    }
    Ok(table::render(host_stats) + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::paths::fixture::Fixture;
    use crate::text::duration::SECOND;

    const ONE_AS_JSON: StatsOptions = StatsOptions {
        interval: SECOND,
        count: Some(1),
        json: true,
    };

    #[test]
    fn without_a_running_cohort_it_says_so() {
        let failure = stats(&ONE_AS_JSON, &Fixture::new().host()).expect_err("nobody is there");
        assert_eq!(failure.exit(), Exit::NotRunning);
        assert!(failure.to_string().contains("no `cohort run` is running"));
    }

    #[test]
    fn json_is_one_line_that_can_be_read_back() {
        let text = text(&ONE_AS_JSON, &HostStats::default()).expect("it is plain data");
        assert_eq!(text.lines().count(), 1);
        let read: HostStats = serde_json::from_str(&text).expect("it was written so");
        assert_eq!(read, HostStats::default());
    }
}
