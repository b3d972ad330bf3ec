// SPDX-License-Identifier: GPL-2.0-only
//! Numbers that commands of the user's print: what his guests do for him.

use crate::process::wait::wait_for;
use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use std::fs::File;
use std::io::{Read, Seek};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::str::FromStr;
use std::time::Duration;

/// A command that hangs must not hang the comparison.
const PATIENCE: Duration = Duration::from_secs(5);

/// NAME=COMMAND of the command line.
#[derive(Clone, Debug, PartialEq)]
pub struct Probe {
    /// What tables call the number.
    pub name: String,
    /// For `sh -c`; prints one number.
    pub command: String,
}

impl FromStr for Probe {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        match text.split_once('=') {
            Some((name, command)) if !name.is_empty() && !command.trim().is_empty() => Ok(Self {
                name: name.to_owned(),
                command: command.to_owned(),
            }),
            _ => bail!("it must be NAME=COMMAND, as in requests='redis-cli info stats | …'"),
        }
    }
}

/// NAME=RATE of the command line: what a counter's VM does alone.
#[derive(Clone, Debug, PartialEq)]
pub struct Alone {
    /// The counter's name.
    pub name: String,
    /// How much it grows per second, above 0.
    pub rate: f64,
}

impl FromStr for Alone {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let (name, rate) = text.split_once('=').unwrap_or_default();
        match rate.parse::<f64>() {
            Ok(rate) if !name.is_empty() && rate.is_finite() && rate > 0.0 => Ok(Self {
                name: name.to_owned(),
                rate,
            }),
            _ => bail!(
                "it must be NAME=RATE, a counter's name and a number above 0, as in requests=1500"
            ),
        }
    }
}

impl Probe {
    /// Runs the command and reads the number that it prints.
    ///
    /// # Errors
    /// When it fails, takes longer than five seconds, or prints no number: with what it printed.
    pub fn read(&self) -> Result<f64> {
        self.run()
            .with_context(|| format!("the command of {} ({})", self.name, self.command))
    }

    fn run(&self) -> Result<f64> {
        // Not pipes, which a command that prints too much would fill.
        let (output, errors) = (tempfile::tempfile()?, tempfile::tempfile()?);
        let mut process = Command::new("sh")
            .args(["-c", &self.command])
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(errors.try_clone()?)
            .process_group(0)
            .spawn()?;
        let ended = wait_for("its end", PATIENCE, || Ok(process.try_wait()?));
        let Ok(status) = ended else {
            let _ = killpg(Pid::from_raw(process.id() as i32), Signal::SIGKILL);
            let _ = process.wait();
            bail!("did not end within {} s", PATIENCE.as_secs());
        };
        let (text, said) = (contents(output)?, contents(errors)?);
        ensure!(status.success(), "ended with {status}: {}", said.trim());
        let number: Option<f64> = text.trim().parse().ok();
        number
            .filter(|number| number.is_finite())
            .with_context(|| format!("printed no number but \"{}\"", text.trim()))
    }
}

/// The beginning of what was written to `file`; no number is longer.
fn contents(mut file: File) -> Result<String> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.take(4096).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn probe(text: &str) -> Probe {
        text.parse().expect("it is NAME=COMMAND")
    }

    #[test]
    fn a_probe_is_a_name_and_a_command() {
        assert_eq!(probe("a=b=c").command, "b=c");
        for wrong in ["", "a", "=b", "a=", "a= "] {
            assert!(wrong.parse::<Probe>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_rate_alone_is_a_name_and_a_positive_number() {
        let alone: Alone = "web=1.5e3".parse().expect("it is NAME=RATE");
        assert_eq!((alone.name.as_str(), alone.rate), ("web", 1500.0));
        for wrong in [
            "", "5", "=5", "a=", "a=0", "a=-5", "a=inf", "a=NaN", "a=5/s",
        ] {
            assert!(wrong.parse::<Alone>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_number_that_a_command_prints_is_read() {
        assert_eq!(probe("x=echo 12.5").read().expect("it is a number"), 12.5);
    }

    #[test]
    fn whatever_is_wrong_with_a_command_is_said() {
        for (command, word) in [
            ("echo many", "no number but \"many\""),
            ("echo inf", "no number"),
            ("echo too bad >&2; exit 3", "too bad"),
            ("yes", "did not end"),
        ] {
            let error = probe(&format!("x={command}")).read().expect_err(command);
            assert!(format!("{error:#}").contains(word), "{error:#}");
        }
    }
}
