// SPDX-License-Identifier: GPL-2.0-only
//! The settings of `cohort run`: from the command line, from a TOML file, or
//! built in, in this order of precedence. What is wrong in the file is said with
//! its line.

use crate::exceptions::Exception;
use crate::mechanism::{Mechanism, Mechanisms};
use crate::sight::Sight;
use anyhow::{Context, Result};
use clap::Args;
use serde::Deserialize;
use std::fmt::Display;
use std::fs;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use toml::Spanned;

const SLICE_US: RangeInclusive<u64> = 100..=100_000;
const SLICE_US_DEFAULT: u64 = 4_000;

/// The kernel's watchdog accepts no more than 30 s.
const TIMEOUT_MS: RangeInclusive<u32> = 100..=30_000;
const TIMEOUT_MS_DEFAULT: u32 = 5_000;

const STATS_SECONDS: RangeInclusive<u64> = 1..=3600;

const READY_WAIT_MS: RangeInclusive<u64> = 1..=1000;
/// How long a vCPU waits for its VM's turn at most, unless told otherwise, ms.
pub const READY_WAIT_MS_DEFAULT: u64 = 24;

/// The options of `cohort run`.
#[derive(Args, Clone, Debug, Default)]
pub struct RunOptions {
    /// Read settings from this TOML file; options on the command line win
    ///
    /// The file has the same settings as the command line, as keys: slice_us,
    /// timeout_ms, ready_wait_ms, stats_seconds,
    /// off, blind; and exceptions for single VMs (vm). A key that does not exist, a
    /// wrong type and a value out of range are errors that name the line.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Longest time a task runs before another of equal claim gets the CPU, in microseconds [default: 4000]
    ///
    /// Shorter slices let a waiting vCPU run sooner, which helps guests that
    /// answer requests or hold locks; each switch costs a VM exit and warm
    /// caches, so longer slices give more throughput to guests that only
    /// compute. While tasks wait, a timer ends turns at each multiple of it, or of
    /// a part of it (--ready-wait-ms). 100 to 100000.
    #[arg(long, value_name = "MICROSECONDS", value_parser = parse_slice_us)]
    slice_us: Option<u64>,

    /// The kernel takes the host back if a task waits longer than this, in milliseconds [default: 5000]
    ///
    /// This is the safety net: if Cohort ever forgets a task, the kernel's
    /// watchdog removes it and the host runs on under its own scheduler. A
    /// shorter time limits the harm; a time too short may take a heavily loaded
    /// host, or a VM with a tight cpu.max, for a fault. 100 to 30000.
    #[arg(long, value_name = "MILLISECONDS", value_parser = parse_timeout_ms)]
    timeout_ms: Option<u32>,

    /// How long a VM waits for its turn at most, in milliseconds, where many VMs want the same CPUs [default: 24]
    ///
    /// When so many groups wait that one slice for each of them takes longer, turns
    /// become shorter than a slice: a half, a quarter, at least an eighth. A small
    /// value makes crowded hosts answer sooner; the switches cost throughput. VMs of
    /// little weight wait longer, as they are entitled to less. 1 to 1000.
    #[arg(long, value_name = "MILLISECONDS", value_parser = parse_ready_wait_ms)]
    ready_wait_ms: Option<u64>,

    /// Print a table of all VMs to standard output each SECONDS [default: no table]
    ///
    /// The same numbers are there for `cohort stats` at any time, without this
    /// option. A table that cannot be written is left out. 1 to 3600.
    #[arg(long = "stats", value_name = "SECONDS", value_parser = parse_stats_seconds)]
    stats_seconds: Option<u64>,

    /// Do without this mechanism; may be given several times [default: all are on]
    ///
    /// Each one can be left out, to see what it is worth on this host (`cohort
    /// compare` takes such command lines), or because it harms. What is given
    /// here replaces the list in the file; `cohort set` switches mechanisms later.
    #[arg(long, value_name = "MECHANISM")]
    off: Vec<Mechanism>,

    /// Do without looking at this; may be given several times [default: all is seen that this host shows]
    ///
    /// What shows it are hooks in KVM, which cost a little each time. Without
    /// them, what they would have told is not known: mechanisms that rest on it
    /// fall back to what KVM itself offers. What is given here replaces the list
    /// in the file.
    #[arg(long, value_name = "WHAT")]
    blind: Vec<Sight>,

    /// Run on a kernel with which hosts were seen to hang under sched_ext
    ///
    /// Cohort refuses such kernels, and says why. Not a key of the file.
    #[arg(long)]
    pub known_bad_kernel: bool,
}

fn parse_slice_us(text: &str) -> Result<u64, String> {
    parse_amount(text, "microseconds", &SLICE_US)
}

fn parse_timeout_ms(text: &str) -> Result<u32, String> {
    parse_amount(text, "milliseconds", &TIMEOUT_MS)
}

fn parse_ready_wait_ms(text: &str) -> Result<u64, String> {
    parse_amount(text, "milliseconds", &READY_WAIT_MS)
}

fn parse_stats_seconds(text: &str) -> Result<u64, String> {
    parse_amount(text, "seconds", &STATS_SECONDS)
}

/// An amount on the command line, or a sentence on what it should have been.
fn parse_amount<T: Copy + Display + FromStr + PartialOrd>(
    text: &str,
    unit: &str,
    range: &RangeInclusive<T>,
) -> Result<T, String> {
    match text.parse() {
        Ok(value) if range.contains(&value) => Ok(value),
        _ => Err(format!(
            "write a whole number of {unit} from {} to {}, without a unit",
            range.start(),
            range.end()
        )),
    }
}

/// What a TOML file may say. `Spanned` keeps the place for the error message.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct SettingsFile {
    slice_us: Option<Spanned<u64>>,
    timeout_ms: Option<Spanned<u32>>,
    ready_wait_ms: Option<Spanned<u64>>,
    stats_seconds: Option<Spanned<u64>>,
    #[serde(default)]
    off: Vec<Mechanism>,
    #[serde(default)]
    blind: Vec<Sight>,
    #[serde(default)]
    vm: Vec<Spanned<Exception>>,
}

/// The settings that `cohort run` works with.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Settings {
    /// Time slice of a task, in microseconds.
    pub slice_us: u64,
    /// Time after which the kernel's watchdog removes the scheduler, in milliseconds.
    pub timeout_ms: u32,
    /// How long a VM is to wait for its turn at most, in milliseconds.
    pub ready_wait_ms: u64,
    /// Time between two tables on standard output, in seconds; no table if absent.
    pub stats_seconds: Option<u64>,
    /// Which mechanisms are on at the start.
    pub mechanisms: Mechanisms,
    /// What is not looked at.
    pub blind: Vec<Sight>,
    /// Exceptions for single VMs; the first one that fits holds.
    pub exceptions: Vec<Exception>,
}

impl Settings {
    /// The settings for these options, and for the file they name.
    pub fn resolve(options: &RunOptions) -> Result<Self> {
        let file = match &options.config {
            Some(path) => SettingsFile::read(path)?,
            None => SettingsFile::default(),
        };
        Ok(Self {
            slice_us: first(options.slice_us, file.slice_us).unwrap_or(SLICE_US_DEFAULT),
            timeout_ms: first(options.timeout_ms, file.timeout_ms).unwrap_or(TIMEOUT_MS_DEFAULT),
            ready_wait_ms: first(options.ready_wait_ms, file.ready_wait_ms)
                .unwrap_or(READY_WAIT_MS_DEFAULT),
            stats_seconds: first(options.stats_seconds, file.stats_seconds),
            mechanisms: Mechanisms::all_but(match options.off.is_empty() {
                true => &file.off,
                false => &options.off,
            }),
            blind: match options.blind.is_empty() {
                true => file.blind,
                false => options.blind.clone(),
            },
            exceptions: file.vm.into_iter().map(Spanned::into_inner).collect(),
        })
    }
}

/// What the command line says, or else the file.
fn first<T>(option: Option<T>, key: Option<Spanned<T>>) -> Option<T> {
    option.or(key.map(Spanned::into_inner))
}

impl SettingsFile {
    fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).with_context(|| {
            format!(
                "the configuration file {} cannot be read; correct --config, or leave it out to \
                 use the built-in settings",
                path.display()
            )
        })?;
        Self::parse(&text).map_err(|error| {
            anyhow::anyhow!("{}:{}: {}", path.display(), error.line, error.sentence)
        })
    }

    fn parse(text: &str) -> Result<Self, FileError> {
        let file: Self = toml::from_str(text).map_err(|error| {
            let at = error.span().map_or(0, |span| span.start);
            let wrong_type = error.message().starts_with("invalid type");
            let advice = match wrong_type {
                true => "; write a whole number, its unit is in the name of the key",
                false => "",
            };
            FileError::new(text, at, format!("{}{advice}", error.message().trim_end()))
        })?;
        check_range(text, "slice_us", file.slice_us.as_ref(), &SLICE_US)?;
        check_range(text, "timeout_ms", file.timeout_ms.as_ref(), &TIMEOUT_MS)?;
        for (key, value, range) in [
            ("ready_wait_ms", &file.ready_wait_ms, &READY_WAIT_MS),
            ("stats_seconds", &file.stats_seconds, &STATS_SECONDS),
        ] {
            check_range(text, key, value.as_ref(), range)?;
        }
        for exception in &file.vm {
            if let Some(fault) = exception.get_ref().fault() {
                return Err(FileError::new(text, exception.span().start, fault));
            }
        }
        Ok(file)
    }
}

/// What is wrong in a file, and where.
#[derive(Debug, Eq, PartialEq)]
struct FileError {
    /// Counted from 1, as editors do.
    line: usize,
    sentence: String,
}

impl FileError {
    fn new(text: &str, at_byte: usize, sentence: impl Display) -> Self {
        let before = &text.as_bytes()[..at_byte.min(text.len())];
        Self {
            line: 1 + before.iter().filter(|&&byte| byte == b'\n').count(),
            sentence: sentence.to_string(),
        }
    }
}

fn check_range<T: Display + PartialOrd>(
    text: &str,
    key: &str,
    value: Option<&Spanned<T>>,
    range: &RangeInclusive<T>,
) -> Result<(), FileError> {
    match value {
        Some(value) if !range.contains(value.get_ref()) => Err(FileError::new(
            text,
            value.span().start,
            format!(
                "{key} is {}, but must be from {} to {}",
                value.get_ref(),
                range.start(),
                range.end()
            ),
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use tempfile::NamedTempFile;

    fn error_of(text: &str) -> (usize, String) {
        let error = SettingsFile::parse(text).expect_err("the text is wrong");
        (error.line, error.sentence)
    }

    fn file(text: &str) -> NamedTempFile {
        let mut file = NamedTempFile::new().expect("a temporary file can be made");
        file.write_all(text.as_bytes()).expect("it can be written");
        file
    }

    /// The file, and nothing on the command line.
    fn options_of(file: &NamedTempFile) -> RunOptions {
        RunOptions {
            config: Some(file.path().to_owned()),
            ..RunOptions::default()
        }
    }

    fn defaults() -> Settings {
        Settings::resolve(&RunOptions::default()).expect("the defaults are valid")
    }

    #[test]
    fn without_options_the_built_in_settings_hold() {
        let expected = Settings {
            slice_us: 4000,
            timeout_ms: 5_000,
            ready_wait_ms: 24,
            stats_seconds: None,
            mechanisms: Mechanisms::all_but(&[]),
            blind: Vec::new(),
            exceptions: Vec::new(),
        };
        assert_eq!(defaults(), expected);
    }

    #[test]
    fn the_command_line_wins_over_the_file() {
        let file = file("slice_us = 2000\ntimeout_ms = 2000\n");
        let options = RunOptions {
            slice_us: Some(3000),
            ..options_of(&file)
        };
        let settings = Settings::resolve(&options).expect("both are valid");
        assert_eq!((settings.slice_us, settings.timeout_ms), (3000, 2000));
    }

    #[test]
    fn the_file_that_is_shipped_says_what_is_built_in() {
        let shipped = include_str!("../deploy/cohort.toml");
        let keys = shipped.lines().filter(|line| line.starts_with('#'));
        let uncommented: Vec<&str> = keys
            .filter_map(|line| line.strip_prefix('#'))
            .filter(|line| !line.starts_with(' ') && line.contains(" = "))
            .collect();
        assert_eq!(uncommented.len(), 6, "each key is there once");

        let file = file(&uncommented.join("\n"));
        let options = options_of(&file);
        let settings = Settings::resolve(&options).expect("the shipped file is valid");
        let expected = Settings {
            // The only one that is off unless asked for.
            stats_seconds: settings.stats_seconds,
            ..defaults()
        };
        assert_eq!(settings, expected);

        SettingsFile::parse(shipped).expect("as shipped it is valid, too");
    }

    #[test]
    fn an_amount_with_a_unit_is_refused_with_what_to_write() {
        let sentence = parse_slice_us("4ms").expect_err("there is a unit");
        let expected = "write a whole number of microseconds from 100 to 100000, without a unit";
        assert_eq!(sentence, expected);
        assert_eq!(parse_slice_us("99"), Err(sentence));
        assert_eq!(parse_timeout_ms("2000"), Ok(2000));
    }

    #[test]
    fn an_unknown_key_is_an_error_with_its_line() {
        let (line, sentence) = error_of("slice_us = 2000\n\nslice_ms = 2\n");
        assert_eq!(line, 3);
        assert!(sentence.contains("unknown field `slice_ms`"), "{sentence}");
        assert!(sentence.contains("`slice_us`"), "{sentence}");
    }

    #[test]
    fn a_unit_in_the_value_is_an_error_with_its_line() {
        let (line, sentence) = error_of("# comment\nslice_us = \"4ms\"\n");
        assert_eq!(line, 2);
        assert!(sentence.contains("string \"4ms\""), "{sentence}");
        assert!(sentence.contains("write a whole number"), "{sentence}");
    }

    #[test]
    fn a_value_out_of_range_is_an_error_with_its_line() {
        let out_of_range = error_of("slice_us = 4000\ntimeout_ms = 60000\n");
        let sentence = "timeout_ms is 60000, but must be from 100 to 30000";
        assert_eq!(out_of_range, (2, sentence.to_owned()));
    }

    #[test]
    fn mechanisms_are_left_out_by_name_and_the_command_line_replaces_the_file() {
        let file = file("off = [\"ipi\", \"packing\"]\n");
        let mut options = options_of(&file);
        let on = |options: &RunOptions| Settings::resolve(options).expect("valid").mechanisms;
        let of_file = [Mechanism::Ipi, Mechanism::Packing];
        assert_eq!(on(&options), Mechanisms::all_but(&of_file));
        options.off = vec![Mechanism::Cohorts];
        assert_eq!(on(&options), Mechanisms::all_but(&[Mechanism::Cohorts]));

        let (line, sentence) = error_of("slice_us = 1000\noff = [\"ipis\"]\n");
        assert_eq!(line, 2);
        assert!(
            sentence.contains("unknown variant `ipis`") && sentence.contains("`packing`"),
            "{sentence}"
        );
    }

    #[test]
    fn an_exception_must_say_for_which_vms_it_is() {
        let (line, sentence) = error_of("slice_us = 1000\n\n[[vm]]\ncohort = \"never\"\n");
        assert_eq!(line, 3);
        assert!(sentence.contains("name ="), "{sentence}");
        let both = "[[vm]]\nname = \"a\"\ncgroup = \"b\"\ncohort = \"never\"\n";
        assert!(error_of(both).1.contains("not both"));

        let (line, sentence) = error_of("[[vm]]\nname = \"a\"\ncohort = \"sometimes\"\n");
        assert_eq!(line, 3);
        assert!(sentence.contains("`auto` or `never`"), "{sentence}");
        let (line, sentence) = error_of("[[vm]]\nname = \"[a\"\ncohort = \"never\"\n");
        assert_eq!(line, 2);
        assert!(sentence.contains("no pattern"), "{sentence}");
    }

    #[test]
    fn text_that_is_no_toml_is_an_error_with_its_line() {
        assert_eq!(error_of("slice_us = 1000\nslice_us 2000\n").0, 2);
    }

    #[test]
    fn a_missing_file_is_named() {
        let options = RunOptions {
            config: Some(PathBuf::from("/nowhere/cohort.toml")),
            ..RunOptions::default()
        };
        let error = Settings::resolve(&options).expect_err("there is no such file");
        assert!(error.to_string().contains("/nowhere/cohort.toml"));
    }

    #[test]
    fn an_error_in_a_file_names_file_and_line() {
        let file = file("slice_us = 1\n");
        let options = options_of(&file);
        let error = Settings::resolve(&options).expect_err("the value is out of range");
        let place = format!("{}:1: ", file.path().display());
        assert!(error.to_string().starts_with(&place), "{error}");
    }
}
