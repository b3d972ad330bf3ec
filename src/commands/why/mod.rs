// SPDX-License-Identifier: GPL-2.0-only
//! `cohort why VM`: why is this VM slow? What the observer, the kernel and the VM's cgroups know of it is put together
//! (`facts`), and each question that operators come with is answered by a finding in a file of its own.

mod clock;
mod facts;
mod pinning;
mod ratio;
mod ready;
mod stalls;
mod still;
mod stutter;
mod throttled;
mod vmm_threads;
pub(crate) mod words;

use crate::commands::finding::{Finding, Severity, text};
use crate::commands::watch::sleep_until;
use crate::host::paths::Host;
use crate::observer::recording::Reader;
use crate::observer::span::Span;
use crate::observer::{Observer, Windows, unix_ms};
use crate::process::exit::{Exit, Failure};
use crate::process::signals::watch_signals;
use crate::process::systemd;
use crate::text::duration::parse_interval;
use crate::text::table::{json_line, print};
use anyhow::{Result, anyhow};
use clap::Args;
use facts::{Before, Facts};
use serde::Serialize;
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

/// Which VM, and in which time.
#[derive(Args, Clone, Debug)]
pub struct Asked {
    /// The VM: its name, its number or UUID for its manager, or the number of its process
    #[arg(value_name = "VM")]
    vm: String,

    /// Look at a time span of this recording of `cohort watch` or `top`, instead of this host; needs no privileges
    #[arg(long, value_name = "FILE")]
    recording: Option<PathBuf>,

    /// The recording from here on, in UTC: "2026-01-31 14:05:00" [default: its beginning]
    #[arg(long, value_name = "TIME", value_parser = time, requires = "recording")]
    from: Option<SystemTime>,

    /// The recording up to here [default: its end]
    #[arg(long, value_name = "TIME", value_parser = time, requires = "recording")]
    to: Option<SystemTime>,
}

/// The options of `cohort why`.
#[derive(Args, Clone, Debug)]
pub struct WhyOptions {
    #[command(flatten)]
    asked: Asked,

    /// For how long to look at this host; 1s to 1h, a number without a unit is in seconds
    #[arg(long = "for", value_name = "TIME", visible_alias = "seconds", default_value = "5s", value_parser = parse_interval, conflicts_with = "recording")]
    length: Duration,

    /// Print one line of JSON instead of text
    #[arg(long)]
    json: bool,
}

fn time(text: &str) -> Result<SystemTime, &'static str> {
    humantime::parse_rfc3339_weak(text)
        .map_err(|_| "write date and time in UTC, such as \"2026-01-31 14:05:00\"")
}

/// Looks, and prints the findings.
///
/// # Errors
/// With [`Exit::NoSuchVm`] when it is not clear which VM is meant, with [`Exit::Advice`] when something was found, and as the
/// observer or the recording has them.
pub fn why(options: &WhyOptions, host: &Host) -> Result<(), Failure> {
    let Some(facts) = gather(&options.asked, options.length, host)? else {
        return Ok(());
    };
    let findings = findings(&facts);
    match options.json {
        true => print(&json_line(&Answer::of(&facts, &findings))?)?,
        false => print(&(heading(&facts) + &text(&findings)))?,
    }
    match findings.iter().any(|it| it.severity >= Severity::Warning) {
        true => Err(Failure::new(
            Exit::Advice,
            anyhow!("something was found that slows {} down", facts.name()),
        )),
        false => Ok(()),
    }
}

/// What is known of the VM that was asked for; `None` if a signal came before.
pub(crate) fn gather(
    asked: &Asked,
    length: Duration,
    host: &Host,
) -> Result<Option<Facts>, Failure> {
    if let Some(path) = &asked.recording {
        return Ok(Some(Facts::pick(recorded(path, asked)?, &asked.vm)?));
    }
    let told_to_leave = watch_signals()?;
    let mut object = MaybeUninit::uninit();
    let mut windows = Windows::begin(Observer::load(&mut object, host)?)?;
    let is_called =
        |(tgid, vm): &(&u32, &crate::observer::view::VmView)| vm.is_called(**tgid, &asked.vm);
    let begin = windows.vms();
    let called = begin.vms.iter().filter(is_called).map(|(&tgid, _)| tgid);
    let mut called: Vec<u32> = called.collect();
    if called.is_empty() {
        called.extend(still::called(host, &asked.vm).map(|(tgid, _)| tgid));
    }
    let before = Before::read(host, called);
    systemd::ready("Looking at this host");
    if !sleep_until(Instant::now() + length, &told_to_leave) {
        return Ok(None);
    }
    let mut span = Span::default();
    span.add(&windows.advance()?);
    still::add(&mut span, host, &asked.vm);
    let mut facts = Facts::pick(span, &asked.vm)?;
    facts.live = Some(before.until_now(host, &facts));
    Ok(Some(facts))
}

/// The time span of a recording that was asked for.
fn recorded(path: &Path, asked: &Asked) -> Result<Span, Failure> {
    let mut reader = Reader::open(path)?;
    let bad = |sentence| Failure::new(Exit::BadRecording, sentence);
    let mut span = Span::default();
    let (mut first_ms, mut last_ms) = (u64::MAX, 0);
    while let Some(view) = reader.window()? {
        if (asked.from.is_some() || asked.to.is_some()) && view.ended_ms == 0 {
            return Err(bad(anyhow!(
                "{} was made by a cohort that did not record times; leave out --from and --to",
                path.display()
            )));
        }
        let begin_ms = view.ended_ms.saturating_sub(view.window_ms);
        first_ms = first_ms.min(begin_ms);
        last_ms = last_ms.max(view.ended_ms);
        if asked.from.is_none_or(|from| view.ended_ms > unix_ms(from))
            && asked.to.is_none_or(|to| begin_ms < unix_ms(to))
        {
            span.add(&view);
        }
    }
    match span.windows {
        0 => Err(bad(anyhow!(
            "{} holds no window between --from and --to; it lasts from {} to {}",
            path.display(),
            words::moment(first_ms),
            words::moment(last_ms)
        ))),
        _ => Ok(span),
    }
}

/// The answers to all questions, the worst first.
fn findings(facts: &Facts) -> Vec<Finding> {
    let mut findings = vec![
        ready::finding(facts),
        vmm_threads::finding(facts),
        throttled::finding(facts),
        stalls::finding(facts),
        ratio::finding(facts),
        clock::finding(facts),
        stutter::finding(facts),
        pinning::finding(facts),
    ];
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    findings
}

/// What only the host itself tells is missing: a recording `lacks` it, in words.
fn not_recorded(check: &'static str, lacks: &str, why: &str) -> Finding {
    Finding::new(
        check,
        Severity::Note,
        format!("not known: a recording {lacks}"),
        why,
        "cohort why VM, on the host",
    )
}

/// Which VM, in which time.
fn heading(facts: &Facts) -> String {
    let manager = match facts.vm.vm.identity.manager.as_str() {
        "" => String::new(),
        manager => format!(" of {manager}"),
    };
    let until = match facts.span.until_ms {
        0 => String::new(),
        at => format!(" until {}", words::moment(at)),
    };
    let mut text = format!(
        "{}{manager}, process {}: {} vCPUs; {}{until}, scheduler {}\n",
        facts.name(),
        facts.tgid,
        facts.all().vcpus,
        facts.time(),
        facts.span.scheduler()
    );
    for sentence in &facts.span.blind_spots {
        text += &format!("{sentence}\n");
    }
    text + "\n"
}

/// The same for programs.
#[derive(Serialize)]
struct Answer<'a> {
    vm: &'a str,
    pid: u32,
    vcpus: u32,
    ms: u64,
    ended_ms: u64,
    scheduler: String,
    findings: &'a [Finding],
}

impl<'a> Answer<'a> {
    fn of(facts: &'a Facts, findings: &'a [Finding]) -> Self {
        Self {
            vm: facts.name(),
            pid: facts.tgid,
            vcpus: facts.all().vcpus,
            ms: facts.vm.ms,
            ended_ms: facts.span.until_ms,
            scheduler: facts.span.scheduler(),
            findings,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::facts::fixture::facts;
    use super::*;
    use crate::observer::recording::{Kept, Recorder};
    use crate::observer::view::HostView;

    #[test]
    fn a_vm_without_a_fault_is_told_so_of_each_question() {
        let findings = findings(&facts());
        assert_eq!(findings.len(), 8);
        let known = findings.iter().filter(|it| it.check != "throttled");
        for finding in known {
            assert_eq!(finding.severity, Severity::Fine, "{finding:?}");
        }
        assert!(heading(&facts()).starts_with("web, process 7: 2 vCPUs; 10.0 s until 2027-01-15"));
    }

    #[test]
    fn the_span_of_a_recording_is_what_its_times_say() {
        let folder = tempfile::tempdir().expect("a folder can be made");
        let path = folder.path().join("r");
        let mut recorder = Recorder::create(&path, Kept::default()).expect("it is new");
        for second in 1..=10 {
            let view = HostView {
                window_ms: 1000,
                ended_ms: 1_800_000_000_000 + 1000 * second,
                vms: facts()
                    .span
                    .vms
                    .into_iter()
                    .map(|(tgid, it)| (tgid, it.vm))
                    .collect(),
                ..HostView::default()
            };
            recorder.add(&view).expect("there is room");
        }
        let span = |from: Option<&str>, to: Option<&str>| {
            let asked = Asked {
                vm: String::from("web"),
                recording: Some(path.clone()),
                from: from.map(|text| time(text).expect("it is one")),
                to: to.map(|text| time(text).expect("it is one")),
            };
            recorded(&path, &asked)
        };
        assert_eq!(span(None, None).expect("all of it").ms, 10_000);
        let part = span(Some("2027-01-15 08:00:03"), Some("2027-01-15T08:00:05Z"));
        assert_eq!(part.expect("a part of it").ms, 2000);
        let none = span(Some("2027-01-16 08:00:00"), None).expect_err("it ended before");
        assert_eq!(none.exit(), Exit::BadRecording);
    }
}
