// SPDX-License-Identifier: GPL-2.0-only
//! What windows say together: per number and scheduler the middle and the range, the ratio to the first scheduler's
//! with an interval, and a verdict; as text and as JSON.

use super::statistics::{RatioSummary, least_and_most, log_deviation, median, summarize_ratios};
use super::verdict::Verdict;
use super::window::{Better, Metric, Window};
use crate::text::table;
use anyhow::Result;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

/// Where and how it was compared.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Setting {
    /// When it began, UTC, RFC 3339.
    pub began: String,
    /// The host's kernel.
    pub kernel: String,
    /// Length of a window, seconds.
    pub window_s: f64,
    /// From a scheduler's start to its window, seconds.
    pub settle_s: f64,
    /// How to read numbers on this host, in sentences.
    #[serde(default)]
    pub remarks: Vec<String>,
}

impl Setting {
    /// Of a comparison that begins now, on a host with this `kernel`.
    pub fn begin(kernel: &str, window: Duration, settle: Duration) -> Self {
        Self {
            began: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
            kernel: kernel.trim().to_owned(),
            window_s: window.as_secs_f64(),
            settle_s: settle.as_secs_f64(),
            remarks: Vec::new(),
        }
    }
}

/// The whole comparison.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Comparison {
    /// Where and how.
    #[serde(flatten)]
    pub setting: Setting,
    /// The schedulers, the one compared against first.
    pub schedulers: Vec<String>,
    /// One per number.
    pub numbers: Vec<Compared>,
    /// Numbers that were not there in all windows, as of VMs that came or went.
    pub left_out: Vec<String>,
    /// All windows, in the order in which they ran.
    pub windows: Vec<Window>,
}

/// One number under all schedulers.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Compared {
    /// Which.
    #[serde(flatten)]
    pub metric: Metric,
    /// One per scheduler.
    pub schedulers: Vec<UnderScheduler>,
}

/// One number under one scheduler.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct UnderScheduler {
    /// Median of its windows.
    pub median: f64,
    /// The smallest of its windows.
    pub least: f64,
    /// The largest of its windows.
    pub most: f64,
    /// Against the first scheduler; none for that itself, and where a window had 0.
    pub ratio: Option<RatioSummary>,
    /// The worst pair's ratio, where there is a worse.
    pub worst: Option<f64>,
    /// What can be said; empty for the first scheduler.
    pub verdict: String,
}

impl Comparison {
    /// Compares `windows` of `schedulers`, the first of which is compared against.
    ///
    /// # Errors
    /// None that are known: numbers that have no ratio are said to have none.
    pub fn of(setting: Setting, windows: Vec<Window>, schedulers: Vec<String>) -> Result<Self> {
        let mut times_seen: BTreeMap<&Metric, usize> = BTreeMap::new();
        for metric in windows.iter().flat_map(|window| window.numbers.keys()) {
            *times_seen.entry(metric).or_default() += 1;
        }
        let pair_minutes = 2.0 * (setting.window_s + setting.settle_s) / 60.0;
        let mut numbers = Vec::new();
        let mut left_out = Vec::new();
        for (metric, times) in times_seen {
            if times < windows.len() {
                left_out.push(label(metric));
                continue;
            }
            let under = |name: &String| under(&windows, metric, &schedulers[0], name, pair_minutes);
            numbers.push(Compared {
                metric: metric.clone(),
                schedulers: schedulers.iter().map(under).collect::<Result<_>>()?,
            });
        }
        Ok(Self {
            setting,
            schedulers,
            numbers,
            left_out,
            windows,
        })
    }

    /// Tables and what to know about them.
    pub fn text(&self) -> String {
        let mut text = format!("{}\n\n", self.headline());
        let headings = [
            "NUMBER",
            "SCHEDULER",
            "MEDIAN",
            "RANGE",
            "RATIO",
            "INTERVAL",
            "WORST",
        ];
        let mut rows = Vec::new();
        let mut verdicts = String::from("\n");
        for number in &self.numbers {
            let label = label(&number.metric);
            let mut name = label.clone();
            for (scheduler, under) in self.schedulers.iter().zip(&number.schedulers) {
                rows.push(row(std::mem::take(&mut name), scheduler, under));
                if !under.verdict.is_empty() {
                    verdicts += &format!("{label} under {scheduler}: {}\n", under.verdict);
                }
            }
        }
        text += &table::columns(&headings, &rows);
        text += &verdicts;
        for number in &self.left_out {
            text += &format!("{number}: not in all windows, so not compared.\n");
        }
        text.push('\n');
        for remark in &self.setting.remarks {
            text += &format!("{remark}\n");
        }
        text + NOTES
    }

    /// What was done, in a sentence.
    pub fn headline(&self) -> String {
        let rounds = self.windows.len() / self.schedulers.len().max(1);
        format!(
            "{}: {rounds} rounds of one window each, {} s long and {} s to settle before; kernel {}, {}",
            self.schedulers.join(" against "),
            self.setting.window_s,
            self.setting.settle_s,
            self.setting.kernel,
            self.setting.began
        )
    }
}

/// What is below each table.
pub const NOTES: &str = "A ratio is that of two neighbouring windows, the first scheduler's 1; shown are their median, the interval that \
holds the\ntrue one with the confidence given (Hodges and Lehmann), and the worst pair. Each number is judged for itself: of \
twenty\nnumbers that did not change, one is expected to look as if it had. What windows of this length do not show \
(a daily\npeak, a rare event) was not compared.\n";

/// What a number is called.
pub fn label(metric: &Metric) -> String {
    format!("{} {}", metric.of, metric.name).trim().to_owned()
}

fn under(
    windows: &[Window],
    metric: &Metric,
    base: &str,
    scheduler: &str,
    pair_minutes: f64,
) -> Result<UnderScheduler> {
    let of = |name: &str| -> BTreeMap<usize, f64> {
        let own = windows.iter().filter(|window| window.scheduler == name);
        own.map(|window| (window.round, window.numbers[metric]))
            .collect()
    };
    let own = of(scheduler);
    let values: Vec<f64> = own.values().copied().collect();
    let (least, most) = least_and_most(&values);
    let mut under = UnderScheduler {
        median: median(&values),
        least,
        most,
        ratio: None,
        worst: None,
        verdict: String::new(),
    };
    if scheduler == base {
        return Ok(under);
    }
    let base = of(base);
    let positive = |values: &BTreeMap<usize, f64>| values.values().all(|&value| value > 0.0);
    if !positive(&own) || !positive(&base) {
        under.verdict = "no ratio: it was 0 in a window".to_owned();
        return Ok(under);
    }
    let pairs = base
        .iter()
        .filter_map(|(round, base)| Some(own.get(round)? / base));
    let ratios: Vec<f64> = pairs.collect();
    let summary = summarize_ratios(&ratios)?;
    let verdict = Verdict::of(&summary, log_deviation(&ratios));
    let judged = match (metric.better, verdict) {
        (Better::More, Verdict::More) | (Better::Less, Verdict::Less) => ", better",
        (Better::More, Verdict::Less) | (Better::Less, Verdict::More) => ", worse",
        _ => "",
    };
    under.worst = match metric.better {
        Better::More => Some(summary.worst),
        Better::Less => Some(summary.best),
        Better::Neither => None,
    };
    under.verdict = verdict.words(&summary, pair_minutes) + judged;
    under.ratio = Some(summary);
    Ok(under)
}

fn row(name: String, scheduler: &str, under: &UnderScheduler) -> Vec<String> {
    let (ratio, interval) = match &under.ratio {
        None => (String::new(), String::new()),
        Some(ratio) => (
            format!("{:.3}", ratio.median),
            format!(
                "{:.3}..{:.3} ({:.0} %)",
                ratio.low,
                ratio.high,
                ratio.confidence * 100.0
            ),
        ),
    };
    vec![
        name,
        scheduler.to_owned(),
        number(under.median),
        format!("{}..{}", number(under.least), number(under.most)),
        ratio,
        interval,
        under
            .worst
            .map(|worst| format!("{worst:.3}"))
            .unwrap_or_default(),
    ]
}

/// Four digits of it, or all before the point.
pub fn number(value: f64) -> String {
    let digits = match value.abs() {
        magnitude if magnitude >= 1000.0 => 0,
        magnitude if magnitude >= 100.0 => 1,
        magnitude if magnitude >= 1.0 => 2,
        _ => 3,
    };
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metric(of: &str, name: &str, better: Better) -> Metric {
        Metric {
            of: of.into(),
            name: name.into(),
            better,
        }
    }

    fn window(round: usize, scheduler: &str, numbers: &[(Metric, f64)]) -> Window {
        Window {
            round,
            scheduler: scheduler.into(),
            seconds: 1.0,
            numbers: numbers.iter().cloned().collect(),
        }
    }

    fn eight_pairs() -> Comparison {
        let (waits, rate) = (
            metric("web", "%RDY", Better::Less),
            metric("", "requests", Better::More),
        );
        let idle = metric("db", "%SPIN", Better::Less);
        let mut windows = Vec::new();
        for round in 0..8 {
            let wobble = 1.0 + (round as f64 - 3.5) / 100.0;
            windows.push(window(
                round,
                "stock",
                &[
                    (waits.clone(), 40.0 * wobble),
                    (rate.clone(), 1000.0),
                    (idle.clone(), 0.0),
                ],
            ));
            windows.push(window(
                round,
                "cohort",
                &[
                    (waits.clone(), 20.0),
                    (rate.clone(), 1100.0 * wobble),
                    (idle.clone(), 0.0),
                ],
            ));
        }
        windows[3]
            .numbers
            .insert(metric("new", "%RUN", Better::Neither), 5.0);
        let names = vec!["stock".to_owned(), "cohort".to_owned()];
        let setting = Setting {
            remarks: vec!["Progress is so and so.".into()],
            ..Setting::default()
        };
        Comparison::of(setting, windows, names).expect("it can be compared")
    }

    #[test]
    fn each_number_has_a_verdict_that_says_which_way_is_good() {
        let comparison = eight_pairs();
        let verdict = |label_wanted: &str| {
            let number = comparison
                .numbers
                .iter()
                .find(|number| label(&number.metric) == label_wanted)
                .expect(label_wanted);
            number.schedulers[1].verdict.clone()
        };
        assert!(
            verdict("web %RDY").starts_with("less: -50"),
            "{}",
            verdict("web %RDY")
        );
        assert!(verdict("web %RDY").ends_with("better"));
        assert!(verdict("requests").starts_with("more: +10"));
        assert_eq!(verdict("db %SPIN"), "no ratio: it was 0 in a window");
        assert_eq!(comparison.left_out, ["new %RUN"]);
    }

    #[test]
    fn the_worst_pair_is_the_one_nearest_to_worse() {
        let comparison = eight_pairs();
        let worst = |name: &str| {
            let of = |number: &&Compared| number.metric.name == name;
            let number = comparison.numbers.iter().find(of).expect(name);
            number.schedulers[1].worst.expect("it has a worse")
        };
        assert!((worst("%RDY") - 20.0 / (40.0 * 0.965)).abs() < 1e-9);
        assert!((worst("requests") - 1.1 * 0.965).abs() < 1e-9);
    }

    #[test]
    fn a_table_has_a_line_per_number_and_scheduler() {
        let text = eight_pairs().text();
        let of = |word: &str| text.lines().filter(|line| line.contains(word)).count();
        // Three numbers, with a verdict each.
        assert_eq!((of("  stock  "), of(" under cohort: ")), (3, 3), "{text}");
        assert!(text.contains("new %RUN: not in all windows"));
        assert!(text.contains("\nProgress is so and so.\n"), "{text}");
    }

    #[test]
    fn numbers_have_four_digits() {
        assert_eq!(number(12345.6), "12346");
        assert_eq!(number(123.456), "123.5");
        assert_eq!(number(1.23456), "1.23");
        assert_eq!(number(0.01234), "0.012");
    }
}
