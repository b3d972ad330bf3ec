// SPDX-License-Identifier: GPL-2.0-only
//! Results of a benchmark case: what is stored, one JSON line per case, and the table that people read. Not for
//! measuring, and not for judging what a figure means beyond its floor.
use std::fmt::Write as _;
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::Path;

use anyhow::{Context, Result, anyhow, ensure};
use cohort::compare::statistics::{RatioSummary, median, summarize_ratios};
use serde::{Deserialize, Serialize};

use super::booted::GuestSpec;
use super::info::LabInfo;
use super::windows::{Timing, Window};

/// What was measured for one case, with all that is needed to judge it.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct CaseResult {
    /// The case's name, such as "spin2".
    pub case: String,
    /// Where it was measured.
    pub lab: LabInfo,
    /// The guests.
    pub guests: Vec<GuestSpec>,
    /// Lengths of windows.
    pub timing: Timing,
    /// Windows of the first guest alone under the stock scheduler.
    pub alone: Vec<Window>,
    /// All other windows, in the order in which they ran.
    pub windows: Vec<Window>,
    /// One summary per scheduler, the one compared against first.
    pub schedulers: Vec<SchedulerSummary>,
    /// The median ratio that Cohort must reach, where there is one.
    pub floor: Option<f64>,
}

/// What all windows of one scheduler say.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct SchedulerSummary {
    /// Its name.
    pub scheduler: String,
    /// Median of all guests' operations per second of lab time.
    pub operations_per_s: f64,
    /// The slowest window's.
    pub slowest_operations_per_s: f64,
    /// The fastest window's.
    pub fastest_operations_per_s: f64,
    /// Median CPU time of each guest, as a part of one CPU.
    pub cpu_shares: Vec<f64>,
    /// Throughput against the first scheduler's, window by window; none for the first itself.
    pub ratio: Option<RatioSummary>,
}

/// Summarises `windows` for each of `names`; ratios are to the first of them, within each round.
///
/// # Errors
/// When a scheduler has no window, or a window made no progress.
pub fn summarize(windows: &[Window], names: &[String]) -> Result<Vec<SchedulerSummary>> {
    names
        .iter()
        .enumerate()
        .map(|(index, name)| {
            let ratio = (index > 0)
                .then(|| summarize_ratios(&ratios(windows, &names[0], name)))
                .transpose()?;
            summarize_one(windows, name, ratio)
        })
        .collect()
}

fn summarize_one(
    windows: &[Window],
    name: &str,
    ratio: Option<RatioSummary>,
) -> Result<SchedulerSummary> {
    let own: Vec<&Window> = windows
        .iter()
        .filter(|window| window.scheduler == name)
        .collect();
    let guests = own.first().map_or(0, |window| window.guests.len());
    ensure!(guests > 0, "No window was measured under {name}");
    let rates: Vec<f64> = own.iter().map(|window| window.operations_per_s()).collect();
    let shares: Vec<Vec<f64>> = own.iter().map(|window| window.cpu_shares()).collect();
    Ok(SchedulerSummary {
        scheduler: name.into(),
        operations_per_s: median(&rates),
        slowest_operations_per_s: rates.iter().copied().fold(f64::INFINITY, f64::min),
        fastest_operations_per_s: rates.iter().copied().fold(0.0, f64::max),
        cpu_shares: (0..guests)
            .map(|guest| {
                median(
                    &shares
                        .iter()
                        .map(|shares| shares[guest])
                        .collect::<Vec<_>>(),
                )
            })
            .collect(),
        ratio,
    })
}

/// Throughput under `name` against that under `base`, for each round that has both.
fn ratios(windows: &[Window], base: &str, name: &str) -> Vec<f64> {
    let rate = |round: usize, scheduler: &str| {
        windows
            .iter()
            .find(|window| window.round == round && window.scheduler == scheduler)
            .map(Window::operations_per_s)
    };
    let rounds = windows
        .iter()
        .map(|window| window.round + 1)
        .max()
        .unwrap_or(0);
    (0..rounds)
        .filter_map(|round| Some(rate(round, name)? / rate(round, base)?))
        .collect()
}

/// The least that is left of the stock scheduler's throughput with the observer beside it.
const WATCHED_FLOOR: f64 = 0.99;

impl CaseResult {
    /// Appends it to `path` as one line of JSON.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn append_to(&self, path: &Path) -> Result<()> {
        let line = serde_json::to_string(self)? + "\n";
        OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .and_then(|mut file| file.write_all(line.as_bytes()))
            .with_context(|| format!("The result cannot be appended to {}", path.display()))
    }

    /// Checks Cohort's median ratio against the floor, and that of the observer against its own.
    ///
    /// # Errors
    /// When it is lower.
    pub fn check_floor(&self) -> Result<()> {
        for summary in &self.schedulers {
            let floor = match summary.scheduler.as_str() {
                "cohort" => self.floor,
                "watched" => Some(WATCHED_FLOOR),
                _ => None,
            };
            let Some(floor) = floor else { continue };
            let ratio = summary
                .ratio
                .as_ref()
                .ok_or_else(|| anyhow!("{} was compared with nothing", summary.scheduler))?;
            ensure!(
                ratio.median >= floor,
                "{}: under \"{}\" the median throughput is {:.3} of the stock scheduler's; it must be at least {floor}",
                self.case,
                summary.scheduler,
                ratio.median
            );
        }
        Ok(())
    }

    /// The table, with where it is from and what to remember.
    pub fn table(&self) -> String {
        let mut text = format!("{}\n", self.headline());
        text += &format!(
            "{:<12} {:>13} {:>17} {:>7} {:>23} {:>7}  {}\n",
            "",
            "operations/s",
            "slowest..fastest",
            "ratio",
            "confidence interval",
            "worst",
            "CPU of each VM"
        );
        if !self.alone.is_empty() {
            let rates: Vec<f64> = self.alone.iter().map(Window::operations_per_s).collect();
            text += &format!(
                "{:<12} {:>13.0}  (a reference, not a limit)\n",
                "one VM alone",
                median(&rates)
            );
        }
        for summary in &self.schedulers {
            text += &row(summary);
        }
        text += &self.notes();
        text
    }

    fn headline(&self) -> String {
        let spec = &self.guests[0];
        let work = if spec.workload.is_real() {
            String::new()
        } else {
            format!(
                "{} work iterations per operation ({} % of them locked, if spin), spin window {} us, ",
                spec.workload.work, spec.workload.locked_percent, spec.workload.pause_window_us
            )
        };
        format!(
            "{}: {} VMs of {} vCPUs on {} CPUs, {work}{} paravirtual help; {} windows of {:.1} s per scheduler, \
             alternating within one boot",
            self.case,
            self.guests.len(),
            spec.topology.vcpus(),
            self.lab.guest_cpus.len(),
            if spec.paravirtual { "with" } else { "without" },
            self.windows.len() / self.schedulers.len().max(1),
            self.timing.window.as_secs_f64()
        )
    }

    fn notes(&self) -> String {
        let mut text = String::from(
            "Ratios are those of neighbouring windows; the ratio shown is their median.\n",
        );
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{}", self.lab.describe());
        for caveat in self.lab.caveats() {
            let _ = writeln!(text, "- {caveat}");
        }
        text
    }
}

fn row(summary: &SchedulerSummary) -> String {
    let spread = format!(
        "{:.0}..{:.0}",
        summary.slowest_operations_per_s, summary.fastest_operations_per_s
    );
    let shares: Vec<String> = summary
        .cpu_shares
        .iter()
        .map(|share| format!("{:.1} %", share * 100.0))
        .collect();
    let (ratio, interval, worst) = match &summary.ratio {
        None => (String::new(), String::new(), String::new()),
        Some(ratio) => (
            format!("{:.3}", ratio.median),
            format!(
                "{:.3}..{:.3} ({:.1} %)",
                ratio.low,
                ratio.high,
                ratio.confidence * 100.0
            ),
            format!("{:.3}", ratio.worst),
        ),
    };
    format!(
        "{:<12} {:>13.0} {spread:>17} {ratio:>7} {interval:>23} {worst:>7}  {}\n",
        summary.scheduler,
        summary.operations_per_s,
        shares.join(" ")
    )
}

/// Reads results that `append_to` wrote.
///
/// # Errors
/// When the file cannot be read or a line is no result, with its number.
pub fn read_results(path: &Path) -> Result<Vec<CaseResult>> {
    let text =
        fs::read_to_string(path).with_context(|| format!("{} cannot be read", path.display()))?;
    text.lines()
        .enumerate()
        .map(|(index, line)| {
            serde_json::from_str(line)
                .with_context(|| format!("Line {} of {} is no result", index + 1, path.display()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::inside::booted::Workload;
    use crate::inside::info::example;
    use crate::inside::windows::GuestWindow;

    fn window(round: usize, scheduler: &str, operations: [u64; 2]) -> Window {
        let guest = |name: &str, operations| GuestWindow {
            name: name.into(),
            operations,
            cpu_time_ns: 500_000_000,
        };
        Window {
            round,
            scheduler: scheduler.into(),
            wall_ns: 1_000_000_000,
            guests: vec![guest("one", operations[0]), guest("two", operations[1])],
        }
    }

    fn result(floor: Option<f64>) -> CaseResult {
        let windows = vec![
            window(0, "stock", [100, 100]),
            window(0, "cohort", [150, 150]),
            window(1, "cohort", [90, 90]),
            window(1, "stock", [100, 80]),
            window(2, "stock", [100, 100]),
            window(2, "cohort", [120, 120]),
        ];
        let schedulers = summarize(&windows, &["stock".into(), "cohort".into()]).unwrap();
        let workload = Workload::new("spin", &example());
        CaseResult {
            case: "spin2".into(),
            lab: example(),
            guests: vec![
                GuestSpec::new("one", 2, workload.clone()),
                GuestSpec::new("two", 2, workload),
            ],
            timing: Timing {
                window: Duration::from_secs(1),
                settle: Duration::from_millis(200),
            },
            alone: vec![window(0, "stock", [170, 0])],
            windows,
            schedulers,
            floor,
        }
    }

    #[test]
    fn ratios_pair_the_windows_of_a_round_whatever_their_order() {
        let ratios = ratios(&result(None).windows, "stock", "cohort");
        assert_eq!(ratios, [1.5, 1.0, 1.2]);
    }

    #[test]
    fn a_summary_has_median_spread_shares_and_ratio() {
        let result = result(None);
        let [stock, cohort] = &result.schedulers[..] else {
            panic!("two schedulers")
        };
        assert_eq!(
            (stock.operations_per_s, stock.slowest_operations_per_s),
            (200.0, 180.0)
        );
        assert_eq!(
            (cohort.operations_per_s, cohort.fastest_operations_per_s),
            (240.0, 300.0)
        );
        assert_eq!(cohort.cpu_shares, [0.5, 0.5]);
        assert!(stock.ratio.is_none());
        let ratio = cohort.ratio.as_ref().unwrap();
        assert_eq!((ratio.median, ratio.worst, ratio.pairs), (1.2, 1.0, 3));
    }

    #[test]
    fn the_floor_is_for_the_median_ratio() {
        assert!(result(Some(1.2)).check_floor().is_ok());
        let error = result(Some(1.21)).check_floor().unwrap_err();
        assert!(
            error.to_string().contains("spin2") && error.to_string().contains("1.21"),
            "{error}"
        );
        assert!(result(None).check_floor().is_ok());
    }

    #[test]
    fn a_table_says_where_it_is_from_and_what_is_wrong_with_it() {
        let table = result(None).table();
        for part in [
            "one VM alone",
            "stock",
            "cohort",
            "1.200",
            "dilation 20",
            "indicative",
            "7.2.13",
        ] {
            assert!(table.contains(part), "no {part} in\n{table}");
        }
    }

    #[test]
    fn results_survive_their_file_and_accumulate() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("results.jsonl");
        result(None).append_to(&path).unwrap();
        result(Some(1.0)).append_to(&path).unwrap();
        assert_eq!(
            read_results(&path).unwrap(),
            [result(None), result(Some(1.0))]
        );
        fs::write(&path, "{}\n").unwrap();
        assert!(
            read_results(&path)
                .unwrap_err()
                .to_string()
                .starts_with("Line 1 of")
        );
    }

    #[test]
    fn a_scheduler_without_windows_is_an_error() {
        assert!(summarize(&[], &["stock".into()]).is_err());
    }
}
