// SPDX-License-Identifier: GPL-2.0-only
//! `cohort top`: the terminal, the clock and the source of windows around the model. What is shown is decided in `model`,
//! how it looks in `draw`; what is remembered is in `choice`.

mod choice;
mod draw;
mod model;

use crate::commands::watch::{WatchOptions, all_vms, watch};
use crate::host::paths::Host;
use crate::observer::recording::{Reader, RecordOptions, Recorder, Recording};
use crate::observer::view::HostView;
use crate::observer::{Observer, Windows};
use crate::process::exit::Failure;
use crate::process::signals::watch_signals;
use crate::text::duration::{self, parse_interval};
use crate::text::table::print;
use anyhow::{Context, anyhow};
use clap::Args;
use model::{Action, Model};
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, KeyCode, KeyEventKind, KeyModifiers};
use std::io::{IsTerminal, stdin, stdout};
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tracing::warn;

/// How soon a signal is noticed.
const ATTENTION_PERIOD: Duration = Duration::from_millis(100);

/// The options of `cohort top`.
#[derive(Args, Clone, Debug)]
pub struct TopOptions {
    /// Length of a window; 1s to 1h, a number without a unit is in seconds
    #[arg(long, value_name = "TIME", visible_alias = "interval-s", default_value = "1s", value_parser = parse_interval)]
    interval: Duration,

    /// Print tables instead of filling the screen, as `cohort watch` does, which has more options; of a recording all at once
    #[arg(long)]
    batch: bool,

    #[command(flatten)]
    record: RecordOptions,

    /// Show what --record wrote, on this host or another, instead of this host; needs no privileges
    #[arg(long, value_name = "FILE", conflicts_with = "record")]
    replay: Option<PathBuf>,
}

/// Shows windows until the user leaves.
pub fn top(options: &TopOptions, host: &Host) -> Result<(), Failure> {
    match (&options.replay, options.batch) {
        (Some(path), true) => return print_recording(path),
        (None, true) => {
            let options = WatchOptions::tables(options.interval, options.record.clone());
            return watch(&options, host);
        }
        (_, false) => {}
    }
    let told_to_leave = watch_signals()?;
    if let Some(path) = &options.replay {
        let recording = Recording::read(path)?;
        let source = Source::Recording(Replay {
            recording,
            position: 0,
        });
        return on_screen(source, options.interval, &told_to_leave);
    }
    let mut object = MaybeUninit::uninit();
    let windows = Windows::begin(Observer::load(&mut object, host)?)?;
    let recorder = options.record.begin()?;
    let source = Source::Host {
        windows: Box::new(windows),
        recorder,
    };
    on_screen(source, options.interval, &told_to_leave)
}

fn print_recording(path: &Path) -> Result<(), Failure> {
    let mut reader = Reader::open(path)?;
    while let Some(view) = reader.window()? {
        print(&all_vms(&view, false))?;
    }
    Ok(())
}

/// Where windows come from.
enum Source<'object> {
    Host {
        windows: Box<Windows<'object>>,
        recorder: Option<Recorder>,
    },
    Recording(Replay),
}

impl Source<'_> {
    /// What can be shown at once: of a host, which VMs it has.
    fn first(&self) -> HostView {
        match self {
            Source::Host { windows, .. } => windows.vms(),
            Source::Recording(replay) => replay.recording.windows[0].clone(),
        }
    }

    /// The window that has just ended; that of a recording only if it is not `paused`.
    fn next(&mut self, paused: bool) -> Result<Option<HostView>, Failure> {
        match self {
            Source::Host { windows, recorder } => {
                let view = windows.advance()?;
                if let Some(recorder) = recorder {
                    recorder.add(&view)?;
                }
                Ok((!paused).then_some(view))
            }
            Source::Recording(_) if paused => Ok(None),
            Source::Recording(replay) => Ok(replay.step(1)),
        }
    }

    /// The window of a recording that lies `steps` further.
    fn step(&mut self, steps: isize) -> Option<HostView> {
        match self {
            Source::Host { .. } => None,
            Source::Recording(replay) => replay.step(steps),
        }
    }

    /// Where in a recording the screen is.
    fn place(&self) -> Option<String> {
        match self {
            Source::Host { .. } => None,
            Source::Recording(replay) => Some(replay.place()),
        }
    }
}

/// A recording, and where in it the screen is.
struct Replay {
    recording: Recording,
    position: usize,
}

impl Replay {
    /// The window that lies `steps` further.
    fn step(&mut self, steps: isize) -> Option<HostView> {
        let next = self.position.checked_add_signed(steps)?;
        let view = self.recording.windows.get(next)?.clone();
        self.position = next;
        Some(view)
    }

    /// The position, in words.
    fn place(&self) -> String {
        let all = self.recording.windows.len();
        let end = match (self.position + 1 == all, self.recording.breaks_off) {
            (false, _) => "",
            (true, false) => ", the end",
            (true, true) => ", after which it breaks off",
        };
        format!("window {} of {all}{end}", self.position + 1)
    }
}

fn on_screen(
    source: Source<'_>,
    interval: Duration,
    told_to_leave: &AtomicBool,
) -> Result<(), Failure> {
    if !stdin().is_terminal() || !stdout().is_terminal() {
        return Err(Failure::from(anyhow!(
            "standard input and output are no terminal: use --batch"
        )));
    }
    let file = choice::file();
    let chosen = file.as_deref().map(choice::read).transpose();
    let chosen = chosen.unwrap_or_else(|error| {
        // It is there to be read when the screen is given back.
        warn!("{error:#}");
        None
    });
    let chosen = chosen.unwrap_or_default();
    let mut model = Model::new(source.first(), chosen.clone());
    // Also gives the terminal back when something panics.
    let mut terminal = ratatui::try_init().context("the terminal cannot be used")?;
    let result = show(&mut terminal, &mut model, source, interval, told_to_leave);
    ratatui::restore();
    if let Some(path) = file.filter(|_| model.choice != chosen)
        && let Err(error) = choice::write(&path, &model.choice)
    {
        warn!("{error:#}");
    }
    result
}

fn show(
    terminal: &mut DefaultTerminal,
    model: &mut Model,
    mut source: Source<'_>,
    interval: Duration,
    told_to_leave: &AtomicBool,
) -> Result<(), Failure> {
    let mut next = Instant::now() + interval;
    model.notice = source
        .place()
        .unwrap_or_else(|| format!("the first window takes {}", duration::show(interval)));
    let mut changed = true;
    while !told_to_leave.load(Ordering::Relaxed) {
        if changed {
            let mut right = 0;
            terminal
                .draw(|frame| right = draw::draw(frame, model))
                .context("the terminal cannot be written to")?;
            model.right = right;
        }
        let event = wait_for_event(next)?;
        changed = event.is_some();
        match event {
            None | Some(Event::Resized) => {}
            Some(Event::Interrupted) => return Ok(()),
            Some(Event::Key(key)) => match model.press(key) {
                Action::Draw => {}
                Action::Quit => return Ok(()),
                Action::Step(steps) => {
                    model.paused = true;
                    if let Some(view) = source.step(steps) {
                        model.show(view);
                    }
                    let no_recording =
                        || String::from("[ and ] step through a recording (--replay)");
                    model.notice = source.place().unwrap_or_else(no_recording);
                }
            },
        }
        if Instant::now() >= next {
            next += interval;
            if let Some(view) = source.next(model.paused)? {
                model.show(view);
                model.notice = source.place().unwrap_or_default();
                changed = true;
            }
        }
    }
    Ok(())
}

/// What the terminal tells.
enum Event {
    Key(KeyCode),
    /// Ctrl-C.
    Interrupted,
    Resized,
}

/// What the terminal tells, if it does so before `time` and soon.
fn wait_for_event(time: Instant) -> Result<Option<Event>, Failure> {
    let patience = time
        .saturating_duration_since(Instant::now())
        .min(ATTENTION_PERIOD);
    let what = "the keyboard cannot be read";
    if !event::poll(patience).context(what)? {
        return Ok(None);
    }
    Ok(match event::read().context(what)? {
        event::Event::Key(key) if key.kind == KeyEventKind::Release => None,
        event::Event::Key(key)
            if key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL) =>
        {
            Some(Event::Interrupted)
        }
        event::Event::Key(key) => Some(Event::Key(key.code)),
        event::Event::Resize(..) => Some(Event::Resized),
        _ => None,
    })
}
