// SPDX-License-Identifier: GPL-2.0-only
//! `cohort watch`: shows what the vCPUs of this host do, and changes nothing.

use crate::host::paths::Host;
use crate::observer::recording::RecordOptions;
use crate::observer::view::{HostView, VcpuView, VmView};
use crate::observer::{Observer, Windows};
use crate::process::exit::Failure;
use crate::process::signals::watch_signals;
use crate::process::systemd;
use crate::text::columns::Column;
use crate::text::duration::parse_interval;
use crate::text::table;
use clap::Args;
use std::fmt::Write as _;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Said where a table would be empty.
pub const NO_VM: &str = "No VM has run a vCPU since this was started.";
/// How soon a signal is noticed.
const ATTENTION_PERIOD: Duration = Duration::from_millis(100);

/// The options of `cohort watch`.
#[derive(Args, Clone, Debug)]
pub struct WatchOptions {
    /// Time between two tables; 1s to 1h, a number without a unit is in seconds
    #[arg(long, value_name = "TIME", visible_alias = "interval-s", default_value = "1s", value_parser = parse_interval)]
    interval: Duration,

    /// Stop after this many tables [default: never]
    #[arg(long, value_name = "TABLES", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,

    /// Only this VM: its name, its number or UUID for its manager, or the number of its process
    #[arg(long, value_name = "NAME")]
    vm: Option<String>,

    /// Print a line for each vCPU, too
    #[arg(long)]
    vcpus: bool,

    /// Print each window as one line of JSON instead of a table
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    record: RecordOptions,
}

impl WatchOptions {
    /// Tables of all VMs for ever.
    pub fn tables(interval: Duration, record: RecordOptions) -> Self {
        Self {
            interval,
            count: None,
            vm: None,
            vcpus: false,
            json: false,
            record,
        }
    }
}

/// Prints windows until told to stop.
pub fn watch(options: &WatchOptions, host: &Host) -> Result<(), Failure> {
    let told_to_leave = watch_signals()?;
    let mut object = MaybeUninit::uninit();
    let mut windows = Windows::begin(Observer::load(&mut object, host)?)?;
    let mut recorder = options.record.begin()?;
    systemd::ready("Watching this host");
    let mut next = Instant::now();
    let mut printed = 0;
    loop {
        next += options.interval;
        if !sleep_until(next, &told_to_leave) {
            return Ok(());
        }
        let mut view = windows.advance()?;
        if let Some(recorder) = &mut recorder {
            recorder.add(&view)?;
        }
        if let Some(name) = &options.vm {
            view.vms.retain(|&tgid, vm| vm.is_called(tgid, name));
        }
        table::print(&text(options, &view)?)?;
        printed += 1;
        if options.count == Some(printed) {
            return Ok(());
        }
    }
}

/// Whether it is time; false if a signal came before.
pub(crate) fn sleep_until(time: Instant, told_to_leave: &AtomicBool) -> bool {
    loop {
        if told_to_leave.load(Ordering::Relaxed) {
            return false;
        }
        let left = time.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return true;
        }
        thread::sleep(left.min(ATTENTION_PERIOD));
    }
}

fn text(options: &WatchOptions, view: &HostView) -> Result<String, Failure> {
    if options.json {
        return table::json_line(&view.to_json()?);
    }
    Ok(match (view.vms.is_empty(), &options.vm) {
        (true, Some(name)) => summary(view) + &format!("No VM is called {name}.\n\n"),
        _ => all_vms(view, options.vcpus),
    })
}

/// A window with all its VMs.
pub(crate) fn all_vms(view: &HostView, with_vcpus: bool) -> String {
    match view.vms.is_empty() {
        false => summary(view) + &table_of(view, with_vcpus) + "\n",
        true => summary(view) + NO_VM + "\n\n",
    }
}

/// The host in one window.
fn summary(view: &HostView) -> String {
    let seconds = view.window_ms as f64 / 1000.0;
    let efficiency = view.efficiency();
    let efficiency = efficiency.map(|pct| format!(", efficiency {pct:.1} %"));
    let mut text = format!(
        "window {seconds:.1} s, CPUs {}, scheduler {}, VMs {}, vCPUs per CPU {:.1}{}\n",
        view.cpus,
        view.scheduler,
        view.vms.len(),
        view.overcommitment,
        efficiency.unwrap_or_default(),
    );
    for sentence in &view.blind_spots {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{sentence}");
    }
    text
}

/// The VMs in one window, those that waited most first.
fn table_of(view: &HostView, with_vcpus: bool) -> String {
    let seconds = view.window_ms as f64 / 1000.0;
    let columns = Column::of(view);
    let cells = |name: String, vcpu: &VcpuView| -> Vec<String> {
        let numbers = columns.iter().map(|column| column.text(vcpu, seconds));
        std::iter::once(name).chain(numbers).collect()
    };
    let mut vms: Vec<&VmView> = view.vms.values().collect();
    vms.sort_by(|a, b| b.all.ready_pct.total_cmp(&a.all.ready_pct));
    let mut rows = Vec::new();
    for vm in vms {
        rows.push(cells(vm.name.clone(), &vm.all));
        if with_vcpus {
            let of_vcpu = |(number, vcpu)| cells(format!("  vCPU {number}"), vcpu);
            rows.extend(vm.vcpus.iter().map(of_vcpu));
        }
    }
    let headings: Vec<&str> = std::iter::once("VM")
        .chain(columns.iter().map(|column| column.heading()))
        .collect();
    table::columns(&headings, &rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn vm(name: &str, ready_pct: f64) -> VmView {
        let all = VcpuView {
            vcpus: 1,
            ready_pct,
            ..VcpuView::default()
        };
        VmView {
            name: name.to_owned(),
            vcpus: BTreeMap::from([(0, all.clone())]),
            all,
            ..VmView::default()
        }
    }

    #[test]
    fn the_vm_that_waits_most_comes_first_and_its_vcpus_below_it() {
        let view = HostView {
            window_ms: 2000,
            cpus: 4,
            overcommitment: 0.5,
            unseen: vec!["efficiency_pct".into(), "spin_exits".into()],
            scheduler: "stock".into(),
            vms: BTreeMap::from([(5, vm("calm", 1.0)), (6, vm("waits", 50.0))]),
            ..HostView::default()
        };
        let text = summary(&view) + &table_of(&view, true);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[0],
            "window 2.0 s, CPUs 4, scheduler stock, VMs 2, vCPUs per CPU 0.5"
        );
        // What cannot be had has no column.
        assert!(lines[1].contains("%RDY") && !lines[1].contains("SPIN/s"));
        assert!(lines[2].starts_with("waits") && lines[3].starts_with("  vCPU 0"));
        assert!(lines[4].starts_with("calm"));
        assert!(lines[1..].iter().all(|line| line.len() == lines[1].len()));
    }
}
