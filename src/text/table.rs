// SPDX-License-Identifier: GPL-2.0-only
//! What goes to standard output or a new file: how columns are set, lines of JSON, and the one of VMs that
//! `cohort run --stats` and `cohort stats` print.

use crate::process::exit::{Exit, Failure};
use crate::scheduler::metrics::{HostStats, VmStats};
use anyhow::{Context, anyhow};
use serde::Serialize;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::path::Path;

const HEADINGS: [&str; 9] = [
    "VM", "VCPUS", "SHARE%", "ENTSHR%", "%RDY", "%MLMTD", "YIELDS", "SERVED", "MISSED",
];

/// The table of one window, VMs with the greatest share first.
pub fn render(host: &HostStats) -> String {
    let mut text = format!(
        "window {:.1} s, CPUs {}, VMs {} use {:.1} % of the host, all else {:.1} %",
        host.window_ms as f64 / 1000.0,
        host.cpus,
        host.vms.len(),
        host.vms_share_pct,
        host.others_share_pct,
    );
    if host.exhausted > 0 {
        // Writing to a String cannot fail; nor can it below.
        let _ = write!(text, ", table full {} times", host.exhausted);
    }
    text.push('\n');
    for sentence in &host.blind_spots {
        let _ = writeln!(text, "{sentence}");
    }

    let mut vms: Vec<&VmStats> = host.vms.values().collect();
    vms.sort_by(|a, b| b.share_pct.total_cmp(&a.share_pct));
    let rows: Vec<Vec<String>> = vms.iter().map(|vm| cells(vm)).collect();
    text + &columns(&HEADINGS, &rows)
}

/// A line of headings and one per row, each column as wide as it must be.
pub fn columns(headings: &[&str], rows: &[Vec<String>]) -> String {
    let widths: Vec<usize> = headings
        .iter()
        .enumerate()
        .map(|(column, heading)| {
            let cells = rows.iter().map(|row| row[column].chars().count());
            cells.max().unwrap_or(0).max(heading.len())
        })
        .collect();
    let mut text = String::new();
    push_row(&mut text, &widths, headings);
    for row in rows {
        push_row(&mut text, &widths, row);
    }
    text
}

fn cells(vm: &VmStats) -> Vec<String> {
    let percent = |value: f64| format!("{value:.1}");
    vec![
        vm.name.clone(),
        vm.vcpus.to_string(),
        percent(vm.share_pct),
        percent(vm.entitled_share_pct),
        percent(vm.ready_pct),
        percent(vm.limited_pct),
        vm.yields_offered.to_string(),
        vm.yields_served.to_string(),
        vm.yields_missed_total().to_string(),
    ]
}

/// Names are aligned to the left, numbers to the right.
fn push_row(text: &mut String, widths: &[usize], cells: &[impl AsRef<str>]) {
    for (column, (cell, &width)) in cells.iter().zip(widths).enumerate() {
        let cell = cell.as_ref();
        let _ = match column {
            0 => write!(text, "{cell:<width$}"),
            _ => write!(text, "  {cell:>width$}"),
        };
    }
    text.push('\n');
}

/// `value` as one line of JSON.
pub fn json_line(value: &impl Serialize) -> Result<String, Failure> {
    let json = serde_json::to_string(value).context("the numbers cannot be written as JSON")?;
    Ok(json + "\n")
}

/// Begins the file `path`, which is to be `what`.
///
/// # Errors
/// When it exists (nothing is overwritten) or cannot be made.
pub fn new_file(what: &str, path: &Path) -> anyhow::Result<File> {
    File::create_new(path).map_err(|error| {
        let path = path.display();
        match error.kind() {
            ErrorKind::AlreadyExists => {
                anyhow!("there is a file {path}, which is not overwritten: name a new one")
            }
            _ => anyhow!("the {what} {path} cannot be begun: {error}"),
        }
    })
}

/// Writes `text` to standard output at once.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    let written = stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush());
    written.map_err(|error| match error.kind() {
        ErrorKind::BrokenPipe => Failure::new(
            Exit::OutputClosed,
            anyhow!("standard output was closed by its reader, so nobody reads the table"),
        ),
        _ => Failure::from(
            anyhow::Error::new(error).context("the table cannot be written to standard output"),
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn vm(name: &str, share_pct: f64) -> VmStats {
        VmStats {
            name: name.to_owned(),
            share_pct,
            ..VmStats::default()
        }
    }

    #[test]
    fn columns_are_aligned_and_the_greatest_share_comes_first() {
        let host = HostStats {
            window_ms: 1000,
            cpus: 2,
            vms_share_pct: 95.0,
            others_share_pct: 1.25,
            vms: BTreeMap::from([(2, vm("a", 35.0)), (3, vm("longer-name", 60.0))]),
            ..HostStats::default()
        };
        let text = render(&host);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[0],
            "window 1.0 s, CPUs 2, VMs 2 use 95.0 % of the host, all else 1.2 %"
        );
        assert!(lines[1].starts_with("VM           VCPUS  SHARE%  ENTSHR%"));
        assert!(lines[2].starts_with("longer-name      0    60.0"));
        assert!(lines[3].starts_with("a                0    35.0"));
        assert!(lines[1..].iter().all(|line| line.len() == lines[1].len()));
    }

    #[test]
    fn a_full_table_is_said() {
        let host = HostStats {
            exhausted: 3,
            ..HostStats::default()
        };
        assert!(render(&host).contains("table full 3 times"));
    }
}
