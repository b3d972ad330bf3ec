// SPDX-License-Identifier: GPL-2.0-only
//! The settings of `cohort run`: from the command line, from a TOML file, or
//! built in, in this order of precedence. What is wrong in the file is said with
//! its line.

use crate::bpf::sight::Sight;
use crate::host::paths::Host;
use crate::process::exit::{Exit, Failure};
use crate::scheduler::exceptions::Exception;
use crate::scheduler::mechanism::{Mechanism, Mechanisms, Switch};
use crate::text::duration::{self, MICROSECOND, MILLISECOND, SECOND};
use anyhow::{Result, anyhow, bail};
use clap::{Args, Parser, ValueEnum};
use serde::Deserialize;
use std::fmt::Display;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;
use toml::Spanned;

/// A setting that is a duration.
struct Limits {
    /// Of a number without a unit.
    unit: Duration,
    possible: RangeInclusive<Duration>,
}

const SLICE: Limits = Limits {
    unit: MICROSECOND,
    possible: Duration::from_micros(100)..=Duration::from_millis(100),
};
/// Exact machine: three VMs whose guests wait for RCU grace periods (cell rcu-3x2-paravirtual) make 1.1 times their fair part with
/// slices of 4 ms, 2.1 times with 2 ms; two VMs that compute (busy-2x2) 0.996 and 0.992.
const SLICE_DEFAULT: Duration = Duration::from_millis(2);

/// The kernel's watchdog accepts no more than 30 s.
const TIMEOUT: Limits = Limits {
    unit: MILLISECOND,
    possible: Duration::from_millis(100)..=Duration::from_secs(30),
};
const TIMEOUT_DEFAULT: Duration = Duration::from_secs(5);

const READY_WAIT: Limits = Limits {
    unit: MILLISECOND,
    possible: MILLISECOND..=Duration::from_secs(1),
};
/// How long a vCPU waits for its VM's turn at most, unless told otherwise.
pub const READY_WAIT_DEFAULT: Duration = Duration::from_millis(24);

/// So many slices, and so many of the longest waits, are the least in a timeout.
const SLICES_IN_TIMEOUT: u32 = 10;
const READY_WAITS_IN_TIMEOUT: u32 = 4;

const STATS: Limits = Limits {
    unit: SECOND,
    possible: duration::INTERVALS,
};

/// Where settings are, for all commands that need them.
#[derive(Args, Clone, Debug, Default)]
pub struct SettingsSource {
    /// Read settings from this TOML file [default: /etc/cohort.toml, if it exists]
    ///
    /// The file has the same settings as the command line of `cohort run`, as keys:
    /// slice, timeout, ready_wait, stats, off, blind; and exceptions for single VMs
    /// (vm). A key that does not exist, a wrong type and a value out of range are
    /// errors that name the line. With /dev/null the built-in settings hold.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

impl SettingsSource {
    /// What the file says, and where it is; nothing if there need not be one and is none.
    fn read(&self, host: &Host) -> Result<(SettingsFile, Option<PathBuf>)> {
        let path = match &self.config {
            Some(path) => path.clone(),
            None => host.settings_file(),
        };
        match read_settings(&path) {
            Ok(text) => Ok((SettingsFile::read(&path, &text)?, Some(path))),
            Err(error) if self.config.is_none() && error.kind() == ErrorKind::NotFound => {
                Ok((SettingsFile::default(), None))
            }
            Err(error) => bail!(
                "the settings in {} cannot be read ({error}); --config names another file, and --config /dev/null does without",
                path.display()
            ),
        }
    }
}

/// The options of `cohort run`.
#[derive(Args, Clone, Debug, Default)]
pub struct RunOptions {
    #[command(flatten)]
    source: SettingsSource,

    /// Longest time a task runs before another of equal claim gets the CPU [default: 2ms]
    ///
    /// Shorter slices let a waiting vCPU run sooner, which helps guests that
    /// answer requests or hold locks; each switch costs a VM exit and warm
    /// caches, so longer slices give more throughput to guests that only
    /// compute. While tasks wait, a timer ends turns: one lasts a slice, or a part of
    /// it (--ready-wait). 100us to 100ms; a number without a unit is in microseconds.
    #[arg(long, value_name = "TIME", visible_alias = "slice-us", value_parser = |text: &str| SLICE.parse(text))]
    slice: Option<Duration>,

    /// The kernel takes the host back if a task waits longer than this [default: 5s]
    ///
    /// This is the safety net: if Cohort ever forgets a task, the kernel's
    /// watchdog removes it and the host runs on under its own scheduler. A
    /// shorter time limits the harm; a time too short may take a heavily loaded
    /// host, or a VM with a tight cpu.max, for a fault. 100ms to 30s; a number
    /// without a unit is in milliseconds.
    #[arg(long, value_name = "TIME", visible_alias = "timeout-ms", value_parser = |text: &str| TIMEOUT.parse(text))]
    timeout: Option<Duration>,

    /// How long a VM waits for its turn at most, where many VMs want the same CPUs [default: 24ms]
    ///
    /// A round is the time in which everybody who waits has one turn. When a round and a
    /// half takes longer, turns become shorter than a slice: a half, at least a quarter. A
    /// small value makes crowded hosts answer sooner; the switches cost throughput. VMs
    /// of little weight wait longer, as they are entitled to less. 1ms to 1s; a number
    /// without a unit is in milliseconds.
    #[arg(long, value_name = "TIME", visible_alias = "ready-wait-ms", value_parser = |text: &str| READY_WAIT.parse(text))]
    ready_wait: Option<Duration>,

    /// Print a table of all VMs to standard output each TIME [default: no table]
    ///
    /// The same numbers are there for `cohort stats` at any time, without this
    /// option. A table that cannot be written is left out. 1s to 1h; a number
    /// without a unit is in seconds.
    #[arg(long, value_name = "TIME", value_parser = |text: &str| STATS.parse(text))]
    stats: Option<Duration>,

    /// Do without this mechanism; may be given several times [default: all are on]
    ///
    /// This shows what the mechanism is worth on this host (`cohort compare` takes such
    /// command lines), and helps where the mechanism harms. What is given here
    /// replaces the list in the file; `cohort set` switches mechanisms later. Whom each
    /// helps and hurts: /usr/share/doc/cohort/mechanisms.
    #[arg(long, value_name = "MECHANISM")]
    off: Vec<Mechanism>,

    /// Do without looking at this; may be given several times [default: all is seen that this host shows]
    ///
    /// Hooks in KVM show it, and cost a little each time. Without them it is not
    /// known: mechanisms that need it fall back to what KVM itself offers. What is
    /// given here replaces the list in the file.
    #[arg(long, value_name = "WHAT")]
    blind: Vec<Sight>,

    /// Run on a kernel with which hosts were seen to hang under sched_ext
    ///
    /// Cohort refuses such kernels, and says why. Not a key of the file.
    #[arg(long)]
    pub known_bad_kernel: bool,
}

impl RunOptions {
    /// From the words behind `cohort run`.
    ///
    /// # Errors
    /// What clap says of them.
    pub fn from_words<'a>(words: impl IntoIterator<Item = &'a str>) -> Result<Self, clap::Error> {
        #[derive(Parser)]
        #[command(name = "cohort run", no_binary_name = true)]
        struct Words {
            #[command(flatten)]
            options: RunOptions,
        }
        Ok(Words::try_parse_from(words)?.options)
    }
}

impl Limits {
    /// A duration on the command line, or a sentence on what it should have been.
    fn parse(&self, text: &str) -> Result<Duration, String> {
        duration::parse(text, self.unit, &self.possible)
    }
}

/// A duration in a TOML file.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "a duration such as \"4ms\" is wanted here")]
enum Written {
    Number(f64),
    Text(String),
}

/// What a TOML file may say. `Spanned` keeps the place for the error message.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct SettingsToml {
    #[serde(alias = "slice_us")]
    slice: Option<Spanned<Written>>,
    #[serde(alias = "timeout_ms")]
    timeout: Option<Spanned<Written>>,
    #[serde(alias = "ready_wait_ms")]
    ready_wait: Option<Spanned<Written>>,
    #[serde(alias = "stats_seconds")]
    stats: Option<Spanned<Written>>,
    #[serde(default)]
    off: Vec<Mechanism>,
    #[serde(default)]
    blind: Vec<Sight>,
    #[serde(default)]
    vm: Vec<Spanned<Exception>>,
}

/// A longer file is none of settings.
const LONGEST_FILE: u64 = 1 << 20;

/// What the file `path` says, which is to hold settings.
fn read_settings(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    let length = File::open(path)?
        .take(LONGEST_FILE)
        .read_to_string(&mut text)?;
    match length as u64 == LONGEST_FILE {
        true => Err(io::Error::new(
            ErrorKind::FileTooLarge,
            "it is longer than 1 MiB",
        )),
        false => Ok(text),
    }
}

/// What a file says, which is sound.
#[derive(Debug, Default)]
struct SettingsFile {
    slice: Option<Duration>,
    timeout: Option<Duration>,
    ready_wait: Option<Duration>,
    stats: Option<Duration>,
    off: Vec<Mechanism>,
    blind: Vec<Sight>,
    exceptions: Vec<Exception>,
}

/// The settings that `cohort run` works with.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Settings {
    /// The file that some are from, if there is one.
    pub file: Option<PathBuf>,
    /// Time slice of a task.
    pub slice: Duration,
    /// Time after which the kernel's watchdog removes the scheduler.
    pub timeout: Duration,
    /// How long a VM is to wait for its turn at most.
    pub ready_wait: Duration,
    /// Time between two tables on standard output; no table if absent.
    pub stats: Option<Duration>,
    /// Which mechanisms are on at the start.
    pub mechanisms: Mechanisms,
    /// What is not looked at.
    pub blind: Vec<Sight>,
    /// Exceptions for single VMs; the first one that fits holds.
    pub exceptions: Vec<Exception>,
}

impl Settings {
    /// The settings for these options, and for the file they name, or that this host has.
    ///
    /// # Errors
    /// With [`Exit::Config`] when the file cannot be read or is wrong.
    pub fn resolve(options: &RunOptions, host: &Host) -> Result<Self, Failure> {
        let read = options.source.read(host);
        let (file, path) = read.map_err(|error| Failure::new(Exit::Config, error))?;
        let settings = Self {
            file: path,
            slice: options.slice.or(file.slice).unwrap_or(SLICE_DEFAULT),
            timeout: options.timeout.or(file.timeout).unwrap_or(TIMEOUT_DEFAULT),
            ready_wait: options
                .ready_wait
                .or(file.ready_wait)
                .unwrap_or(READY_WAIT_DEFAULT),
            stats: options.stats.or(file.stats),
            mechanisms: Mechanisms::all_but(match options.off.is_empty() {
                true => &file.off,
                false => &options.off,
            }),
            blind: match options.blind.is_empty() {
                true => file.blind,
                false => options.blind.clone(),
            },
            exceptions: file.exceptions,
        };
        settings.check()?;
        Ok(settings)
    }

    /// Whether tasks that wait as long as they may are safe from the watchdog.
    fn check(&self) -> Result<(), Failure> {
        let waits = [
            ("slice", self.slice, SLICES_IN_TIMEOUT),
            ("ready_wait", self.ready_wait, READY_WAITS_IN_TIMEOUT),
        ];
        for (name, wait, least) in waits {
            if wait * least > self.timeout {
                return Err(Failure::new(
                    Exit::Config,
                    anyhow!(
                        "{name} is {}, and timeout {}: the kernel would remove Cohort because of tasks that wait as long as they \
                         may; make timeout at least {least} times as long as {name}",
                        duration::show(wait),
                        duration::show(self.timeout)
                    ),
                ));
            }
        }
        Ok(())
    }

    /// The settings that the file alone gives, for those who only look.
    ///
    /// # Errors
    /// As [`Self::resolve`].
    pub fn of_source(source: &SettingsSource, host: &Host) -> Result<Self, Failure> {
        let options = RunOptions {
            source: source.clone(),
            ..RunOptions::default()
        };
        Self::resolve(&options, host)
    }

    /// Takes from `new` what can change while Cohort runs, and says what does.
    ///
    /// What `new` does not change stays as `cohort set` left it.
    pub fn change_to(&mut self, new: Settings) -> Change {
        let duration = |key, before: Duration, after: Duration| {
            let sentence = format!(
                "{key} stays {}; {} holds from the next start on (systemctl restart cohort; guests run on)",
                duration::show(before),
                duration::show(after)
            );
            (before != after).then_some(sentence)
        };
        let blind = (self.blind != new.blind).then(|| {
            String::from(
                "blind stays as it is; the new list holds from the next start on (systemctl restart cohort; guests run on)",
            )
        });
        let needs_restart = [
            duration("slice", self.slice, new.slice),
            duration("timeout", self.timeout, new.timeout),
            duration("ready_wait", self.ready_wait, new.ready_wait),
            blind,
        ];
        let mechanisms = Mechanism::value_variants().iter();
        let changed = mechanisms.filter(|&&mechanism| {
            self.mechanisms.contains(mechanism) != new.mechanisms.contains(mechanism)
        });
        let change = Change {
            switches: changed
                .map(|&mechanism| Switch {
                    mechanism,
                    on: new.mechanisms.contains(mechanism),
                })
                .collect(),
            exceptions: (self.exceptions != new.exceptions).then(|| new.exceptions.clone()),
            stats: (self.stats != new.stats).then_some(new.stats),
            needs_restart: needs_restart.into_iter().flatten().collect(),
        };
        self.file = new.file;
        self.mechanisms = new.mechanisms;
        self.exceptions = new.exceptions;
        self.stats = new.stats;
        change
    }

    /// Where they are from, in words.
    pub fn origin(&self) -> String {
        match &self.file {
            Some(path) => format!("the settings are those of {}", path.display()),
            None => String::from("there is no settings file, so the built-in settings hold"),
        }
    }
}

/// What other settings change in a Cohort that runs.
#[derive(Debug, Default, Eq, PartialEq)]
pub struct Change {
    /// Mechanisms that are to be switched.
    pub switches: Vec<Switch>,
    /// The exceptions, if others hold now.
    pub exceptions: Option<Vec<Exception>>,
    /// The time between two tables, if that is another one now.
    pub stats: Option<Option<Duration>>,
    /// A sentence for each setting that cannot change.
    pub needs_restart: Vec<String>,
}

impl Change {
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl SettingsFile {
    fn read(path: &Path, text: &str) -> Result<Self> {
        Self::parse(text)
            .map_err(|error| anyhow!("{}:{}: {}", path.display(), error.line, error.sentence))
    }

    fn parse(text: &str) -> Result<Self, FileError> {
        let toml: SettingsToml =
            toml::from_str(text).map_err(|error| FileError::of_toml(text, &error))?;
        let duration = |key: &str, value: Option<Spanned<Written>>, limits: &Limits| {
            let Some(value) = value else { return Ok(None) };
            let at = value.span().start;
            let written = match value.into_inner() {
                Written::Number(number) => number.to_string(),
                Written::Text(text) => text,
            };
            let parsed = limits.parse(&written).map(Some);
            parsed.map_err(|advice| {
                FileError::new(text, at, format!("{key} cannot be {written:?}; {advice}"))
            })
        };
        let file = Self {
            slice: duration("slice", toml.slice, &SLICE)?,
            timeout: duration("timeout", toml.timeout, &TIMEOUT)?,
            ready_wait: duration("ready_wait", toml.ready_wait, &READY_WAIT)?,
            stats: duration("stats", toml.stats, &STATS)?,
            off: toml.off,
            blind: toml.blind,
            exceptions: Vec::new(),
        };
        let sound = |exception: Spanned<Exception>| match exception.get_ref().fault() {
            Some(fault) => Err(FileError::new(text, exception.span().start, fault)),
            None => Ok(exception.into_inner()),
        };
        let exceptions: Result<Vec<_>, _> = toml.vm.into_iter().map(sound).collect();
        Ok(Self {
            exceptions: exceptions?,
            ..file
        })
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

    /// With the line itself: the message alone does not name the key.
    fn of_toml(text: &str, error: &toml::de::Error) -> Self {
        let at = error.span().map_or(0, |span| span.start);
        let mut it = Self::new(text, at, error.message().trim_end());
        if let Some(line) = text.lines().nth(it.line - 1) {
            it.sentence += &format!(" (in the line `{}`)", line.trim());
        }
        it
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::paths::fixture::Fixture;
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
            source: SettingsSource {
                config: Some(file.path().to_owned()),
            },
            ..RunOptions::default()
        }
    }

    fn of(options: &RunOptions) -> Settings {
        Settings::resolve(options, &Fixture::new().host()).expect("they are valid")
    }

    #[test]
    fn without_options_and_file_the_built_in_settings_hold() {
        let expected = Settings {
            file: None,
            slice: Duration::from_millis(2),
            timeout: Duration::from_secs(5),
            ready_wait: Duration::from_millis(24),
            stats: None,
            mechanisms: Mechanisms::all_but(&[]),
            blind: Vec::new(),
            exceptions: Vec::new(),
        };
        assert_eq!(of(&RunOptions::default()), expected);
        assert!(expected.origin().contains("built-in"));
    }

    #[test]
    fn the_file_of_the_host_holds_unless_another_one_is_named() {
        let fixture = Fixture::new().with("etc/cohort.toml", "slice = \"3ms\"\n");
        let host = fixture.host();
        let settings = Settings::resolve(&RunOptions::default(), &host).expect("it is valid");
        assert_eq!(settings.slice, Duration::from_millis(3));
        assert!(settings.origin().contains("etc/cohort.toml"));
        let empty = file("");
        let settings = Settings::resolve(&options_of(&empty), &host).expect("it is valid");
        assert_eq!(settings.slice, SLICE_DEFAULT);
    }

    #[test]
    fn a_file_of_the_host_that_is_wrong_or_cannot_be_read_is_an_error() {
        let of = |fixture: Fixture| {
            let failure = Settings::resolve(&RunOptions::default(), &fixture.host());
            failure.expect_err("it is no settings file")
        };
        let failure = of(Fixture::new().with("etc/cohort.toml", "slices = 1\n"));
        assert_eq!(failure.exit(), Exit::Config);
        assert!(failure.to_string().contains("cohort.toml:1: "), "{failure}");
        // A folder in its place.
        let failure = of(Fixture::new().with("etc/cohort.toml/file", ""));
        assert_eq!(failure.exit(), Exit::Config);
        assert!(failure.to_string().contains("cannot be read"), "{failure}");
    }

    #[test]
    fn the_command_line_wins_over_the_file() {
        let file = file("slice_us = 2000\ntimeout = \"2s\"\n");
        let options = RunOptions {
            slice: Some(Duration::from_millis(3)),
            ..options_of(&file)
        };
        let settings = of(&options);
        let expected = (Duration::from_millis(3), Duration::from_secs(2));
        assert_eq!((settings.slice, settings.timeout), expected);
    }

    #[test]
    fn settings_that_are_read_anew_change_what_can_change_and_name_what_cannot() {
        let of_text = |text: &str| of(&options_of(&file(text)));
        let mut settings = of_text("off = [\"ipi\"]\n");
        let same = settings.clone();
        assert!(settings.change_to(same).is_empty());

        let new = of_text(
            "slice = \"3ms\"\ntimeout = \"2s\"\nready_wait = \"9ms\"\nblind = [\"spins\"]\nstats = 1\n\
             off = [\"packing\"]\n[[vm]]\nname = \"a\"\ncohort = \"never\"\n",
        );
        let change = settings.change_to(new.clone());
        let switched = [(Mechanism::Ipi, true), (Mechanism::Packing, false)];
        let switched = switched.map(|(mechanism, on)| Switch { mechanism, on });
        assert_eq!(change.switches.len(), 2);
        assert!(
            switched
                .iter()
                .all(|switch| change.switches.contains(switch))
        );
        assert_eq!(change.exceptions.map(|all| all.len()), Some(1));
        assert_eq!(change.stats, Some(Some(SECOND)));
        let keys = ["slice", "timeout", "ready_wait", "blind"];
        assert_eq!(change.needs_restart.len(), keys.len());
        for (sentence, key) in change.needs_restart.iter().zip(keys) {
            assert!(sentence.starts_with(&format!("{key} stays ")), "{sentence}");
            assert!(sentence.contains("systemctl restart"), "{sentence}");
        }
        // It is said again as long as it is so, and what was taken is not.
        let again = settings.change_to(new);
        assert_eq!(again.needs_restart, change.needs_restart);
        assert!(again.switches.is_empty() && again.exceptions.is_none() && again.stats.is_none());
    }

    #[test]
    fn durations_are_said_with_a_unit_or_as_numbers_of_the_keys_unit() {
        let by_numbers =
            "slice_us = 2000\ntimeout_ms = 500\nready_wait_ms = 12\nstats_seconds = 60\n";
        let by_units =
            "slice = \"2ms\"\ntimeout = \"500ms\"\nready_wait = \"12ms\"\nstats = \"1m\"\n";
        let of_text = |text| Settings {
            file: None,
            ..of(&options_of(&file(text)))
        };
        assert_eq!(of_text(by_numbers), of_text(by_units));

        let of_words = |words: &[&str]| {
            let options = RunOptions::from_words(words.iter().copied());
            of(&options.expect("they are options"))
        };
        let by_numbers = [
            "--slice-us",
            "2000",
            "--timeout-ms=500",
            "--ready-wait-ms=12",
            "--stats=60",
        ];
        let by_units = [
            "--slice",
            "2ms",
            "--timeout=500ms",
            "--ready-wait=12ms",
            "--stats=1m",
        ];
        assert_eq!(of_words(&by_numbers), of_words(&by_units));
        assert_eq!(
            of_words(&by_units),
            of_text(
                "slice = \"2ms\"\ntimeout = \"500ms\"\nready_wait = \"12ms\"\nstats = \"1m\"\n"
            )
        );
    }

    #[test]
    fn words_that_are_no_options_of_run_are_refused() {
        for words in [
            ["--slice", "99us"],
            ["--slice", "4"],
            ["--timeout", "31s"],
            ["--json", ""],
        ] {
            assert!(RunOptions::from_words(words).is_err(), "{words:?}");
        }
    }

    #[test]
    fn the_file_that_is_shipped_says_what_is_built_in() {
        let shipped = include_str!("../../deploy/cohort.toml");
        let keys = shipped.lines().filter(|line| line.starts_with('#'));
        let uncommented: Vec<&str> = keys
            .filter_map(|line| line.strip_prefix('#'))
            .filter(|line| !line.starts_with(' ') && line.contains(" = "))
            .collect();
        assert_eq!(uncommented.len(), 6, "each key is there once");

        let file = file(&uncommented.join("\n"));
        let settings = of(&options_of(&file));
        let expected = Settings {
            // The only one that is off unless asked for.
            stats: settings.stats,
            file: settings.file.clone(),
            ..of(&RunOptions::default())
        };
        assert_eq!(settings, expected);

        SettingsFile::parse(shipped).expect("as shipped it is valid, too");
    }

    #[test]
    fn an_unknown_key_is_an_error_with_its_line() {
        let (line, sentence) = error_of("slice_us = 2000\n\nslice_ms = 2\n");
        assert_eq!(line, 3);
        assert!(sentence.contains("unknown field `slice_ms`"), "{sentence}");
        assert!(sentence.contains("`slice_us`"), "{sentence}");
    }

    #[test]
    fn what_is_no_duration_is_an_error_with_its_line() {
        let (line, sentence) = error_of("# comment\nslice_us = \"soon\"\n");
        assert_eq!(line, 2);
        assert!(sentence.contains("slice cannot be \"soon\""), "{sentence}");
        assert!(sentence.contains("from 100us to 100ms"), "{sentence}");
        let (line, sentence) = error_of("# comment\nslice = true\n");
        assert_eq!(line, 2);
        assert!(sentence.contains("\"4ms\" is wanted"), "{sentence}");
    }

    #[test]
    fn a_value_out_of_range_is_an_error_with_its_line() {
        let (line, sentence) = error_of("slice_us = 4000\ntimeout_ms = 60000\n");
        assert_eq!(line, 2);
        assert!(
            sentence.contains("timeout cannot be \"60000\"; write a duration from 100ms to 30s"),
            "{sentence}"
        );
    }

    #[test]
    fn mechanisms_are_left_out_by_name_and_the_command_line_replaces_the_file() {
        let file = file("off = [\"ipi\", \"packing\"]\n");
        let mut options = options_of(&file);
        let on = |options: &RunOptions| of(options).mechanisms;
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
            source: SettingsSource {
                config: Some(PathBuf::from("/nowhere/cohort.toml")),
            },
            ..RunOptions::default()
        };
        let failure = Settings::resolve(&options, &Fixture::new().host());
        let failure = failure.expect_err("there is no such file");
        assert_eq!(failure.exit(), Exit::Config);
        assert!(failure.to_string().contains("/nowhere/cohort.toml"));
    }
}
