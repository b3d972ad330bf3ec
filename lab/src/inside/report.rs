// SPDX-License-Identifier: GPL-2.0-only
//! Results of a benchmark case: what is stored, one JSON line per case, and the table that people read. Not for
//! measuring, and not for judging what a figure means beyond its floor.
use std::fmt::Write as _;
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use cohort::compare::report::{Comparison, number};
use cohort::compare::statistics::median;
use serde::{Deserialize, Serialize};

use super::booted::GuestSpec;
use super::info::LabInfo;
use super::windows::operations;

/// What was measured for one case, with all that is needed to judge it.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct CaseResult {
    /// The case's name, such as "spin2".
    pub case: String,
    /// Where it was measured.
    pub lab: LabInfo,
    /// The guests.
    pub guests: Vec<GuestSpec>,
    /// Operations per second of the first guest alone under the stock scheduler, by round.
    pub alone: Vec<f64>,
    /// Its longest operation (ms) in each of them, of a workload that times them.
    #[serde(default)]
    pub alone_longest_ms: Vec<f64>,
    /// All other windows, and what they say.
    pub comparison: Comparison,
    /// The median ratio that Cohort must reach, where there is one.
    pub floor: Option<f64>,
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
        let compared = &self.comparison.numbers;
        let compared = compared.iter().find(|number| number.metric == operations());
        let compared = compared.context("operations were not in all windows")?;
        for (name, under) in self.comparison.schedulers.iter().zip(&compared.schedulers) {
            let floor = match name.as_str() {
                "cohort" => self.floor,
                "watched" => Some(WATCHED_FLOOR),
                _ => None,
            };
            let Some(floor) = floor else { continue };
            let ratio = under.ratio.as_ref();
            let ratio = ratio.with_context(|| format!("{name} was compared with nothing"))?;
            ensure!(
                ratio.median >= floor,
                "{}: under \"{name}\" the median throughput is {:.3} of the stock scheduler's; it must be at least {floor}",
                self.case,
                ratio.median
            );
        }
        Ok(())
    }

    /// The table of `cohort compare`, with where it is from and what to remember.
    pub fn text(&self) -> String {
        let mut text = format!("{}\n", self.headline());
        if !self.alone.is_empty() {
            text += &format!(
                "one VM alone: {} operations/s (a reference, not a limit)\n",
                number(median(&self.alone))
            );
        }
        for scheduler in &self.comparison.schedulers {
            let parts = self.parts_of_alone(scheduler);
            if let Some(worst) = parts.iter().copied().reduce(f64::min) {
                text += &format!(
                    "all of them under {scheduler}: {:.2} of that in the same round, {worst:.2} at worst\n",
                    median(&parts)
                );
            }
        }
        if !self.alone_longest_ms.is_empty() {
            text += &format!(
                "its longest operation: {} ms\n",
                number(median(&self.alone_longest_ms))
            );
        }
        text += &self.comparison.text();
        text += &self.notes();
        text
    }

    /// How much of what one VM does alone all do together under `scheduler`, by round: the machine's speed drifts. Nothing
    /// if that was not measured in each round.
    pub fn parts_of_alone(&self, scheduler: &str) -> Vec<f64> {
        let windows = self.comparison.windows.iter();
        let parts = windows
            .filter(|window| window.scheduler == scheduler)
            .map(|window| {
                let alone = self.alone.get(window.round)?;
                Some(window.numbers.get(&operations())? / alone)
            });
        parts.collect::<Option<_>>().unwrap_or_default()
    }

    fn headline(&self) -> String {
        let spec = &self.guests[0];
        let work = if spec.workload.is_real() {
            String::new()
        } else {
            format!(
                "{} work iterations per operation ({} % of them locked, if spin), ",
                spec.workload.work, spec.workload.locked_percent
            )
        };
        format!(
            "{}: {} VMs of {} vCPUs on {} CPUs, {work}{} paravirtual help",
            self.case,
            self.guests.len(),
            spec.topology.vcpus(),
            self.lab.guest_cpus.len(),
            if spec.paravirtual { "with" } else { "without" },
        )
    }

    fn notes(&self) -> String {
        let mut text = format!("{}\n", self.lab.describe());
        for caveat in self.lab.caveats() {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "- {caveat}");
        }
        text
    }
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
    use cohort::compare::report::Setting;
    use cohort::compare::window::Window;

    use super::*;
    use crate::inside::booted::Workload;
    use crate::inside::info::example;

    fn window(round: usize, scheduler: &str, rate: f64) -> Window {
        Window {
            round,
            scheduler: scheduler.into(),
            seconds: 1.0,
            numbers: [(operations(), rate)].into(),
        }
    }

    fn result(floor: Option<f64>) -> CaseResult {
        let windows = vec![
            window(0, "stock", 200.0),
            window(0, "cohort", 300.0),
            window(1, "cohort", 180.0),
            window(1, "stock", 180.0),
            window(2, "stock", 200.0),
            window(2, "cohort", 240.0),
        ];
        let names = vec!["stock".into(), "cohort".into()];
        let workload = Workload::new("spin");
        CaseResult {
            case: "spin2".into(),
            lab: example(),
            guests: vec![
                GuestSpec::new("one", 2, workload.clone()),
                GuestSpec::new("two", 2, workload),
            ],
            alone: vec![170.0, 200.0, 160.0],
            alone_longest_ms: Vec::new(),
            comparison: Comparison::of(Setting::default(), windows, names).unwrap(),
            floor,
        }
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
        let text = result(None).text();
        for part in [
            "one VM alone: 170.0",
            "under stock: 1.18 of that in the same round, 0.90 at worst",
            "under cohort: 1.50 of that in the same round, 0.90 at worst",
            "stock",
            "cohort",
            "1.200",
            "machine exact",
            "not modelled",
            "7.2.13",
        ] {
            assert!(text.contains(part), "no {part} in\n{text}");
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
}
