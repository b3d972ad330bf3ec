// SPDX-License-Identifier: GPL-2.0-only
//! `cohort set`: switches mechanisms of a running `cohort run`, and shows what they do.

use crate::host::paths::Host;
use crate::process::exit::{Exit, Failure};
use crate::scheduler::mechanism::{Mechanism, Switch};
use crate::scheduler::metrics::MechanismStats;
use crate::scheduler::stats_server::{MECHANISMS, connect_to_control};
use crate::text::table;
use clap::{Args, ValueEnum};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// The options of `cohort set`.
#[derive(Args, Clone, Debug)]
pub struct SetOptions {
    /// Mechanisms to switch; none: only show them
    #[arg(value_name = "NAME=on|off")]
    switches: Vec<Switch>,

    /// Print the mechanisms as one line of JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// Switches what is to be switched, then prints all mechanisms.
pub fn set(options: &SetOptions, host: &Host) -> Result<(), Failure> {
    let mut arguments = vec![("target".to_owned(), MECHANISMS.to_owned())];
    for switch in &options.switches {
        let state = switch.state().to_owned();
        arguments.push((switch.mechanism.name(), state));
    }
    let mechanisms: BTreeMap<String, MechanismStats> = connect_to_control(host)?
        .request("stats", arguments)
        .map_err(|error| {
            let sentence = "`cohort run` did not do it; its own last lines may say why";
            Failure::new(Exit::NotRunning, error.context(sentence))
        })?;
    let text = match options.json {
        true => table::json_line(&mechanisms)?,
        false => render(&mechanisms),
    };
    table::print(&text)
}

/// One line per mechanism, in the order of the help text.
fn render(mechanisms: &BTreeMap<String, MechanismStats>) -> String {
    let mut text = format!(
        "{:<16} {:<5} {:>12}  {}\n",
        "MECHANISM", "STATE", "EFFECTS", "WHAT IT DOES"
    );
    for mechanism in Mechanism::value_variants() {
        let name = mechanism.name();
        let Some(stats) = mechanisms.get(&name) else {
            continue; // of an older `cohort run`
        };
        let state = if stats.on == 1 { "on" } else { "off" };
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "{name:<16} {state:<5} {:>12}  {}",
            stats.effects,
            mechanism.help()
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::paths::fixture::Fixture;

    #[test]
    fn without_a_running_cohort_it_says_so() {
        let options = SetOptions {
            switches: vec![],
            json: false,
        };
        let failure = set(&options, &Fixture::new().host()).expect_err("nobody is there");
        assert_eq!(failure.exit(), Exit::NotRunning);
    }

    #[test]
    fn each_mechanism_has_a_line_with_its_state_and_effects() {
        let stats = |on, effects| MechanismStats { on, effects };
        let text = render(&BTreeMap::from([
            ("wake".to_owned(), stats(1, 42)),
            ("ipi".to_owned(), stats(0, 7)),
        ]));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3, "a heading and what was told");
        assert!(lines[1].starts_with("ipi              off              7  A vCPU"));
        assert!(lines[2].starts_with("wake             on              42  A vCPU"));
    }
}
