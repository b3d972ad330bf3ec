// SPDX-License-Identifier: GPL-2.0-only
//! Statistics of paired windows: numbers in, numbers out. Not for measuring or printing.
//!
//! Throughput of a window is noisy and drifts within a boot, so schedulers are compared by the ratio of two
//! neighbouring windows. The confidence interval is that of Hodges and Lehmann (Hollander, Wolfe and Chicken,
//! Nonparametric Statistical Methods, 3rd edition, section 3.4): the ordered averages of all pairs of
//! observations, cut at the quantile of Wilcoxon's signed-rank statistic. It assumes no distribution, only
//! symmetry, which is why it works on the logarithms of the ratios.
use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

/// Wanted coverage of a confidence interval.
const CONFIDENCE: f64 = 0.95;

/// What the ratios of an experiment's pairs say.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct RatioSummary {
    /// Number of pairs.
    pub pairs: usize,
    /// The median ratio.
    pub median: f64,
    /// The smallest ratio: the worst pair, if more is better.
    pub worst: f64,
    /// The largest ratio.
    pub best: f64,
    /// Lower end of the confidence interval.
    pub low: f64,
    /// Upper end of the confidence interval.
    pub high: f64,
    /// Coverage of the interval: 0.95 or, as fewer than six pairs cannot give that, what they give.
    pub confidence: f64,
}

/// The middle value, or the mean of the two middle ones; not a number when there are none.
pub fn median(values: &[f64]) -> f64 {
    let sorted = sorted(values);
    match sorted.len() {
        0 => f64::NAN,
        length if length % 2 == 1 => sorted[length / 2],
        length => f64::midpoint(sorted[length / 2 - 1], sorted[length / 2]),
    }
}

/// The least and the most of some numbers; infinite when there are none.
pub fn least_and_most(values: &[f64]) -> (f64, f64) {
    let values = values.iter().copied();
    (
        values.clone().fold(f64::INFINITY, f64::min),
        values.fold(f64::NEG_INFINITY, f64::max),
    )
}

/// The standard deviation of the logarithms of `ratios`; not a number for fewer than two.
pub fn log_deviation(ratios: &[f64]) -> f64 {
    let logarithms: Vec<f64> = ratios.iter().map(|ratio| ratio.ln()).collect();
    let mean = logarithms.iter().sum::<f64>() / ratios.len() as f64;
    let squares = logarithms.iter().map(|value| (value - mean).powi(2));
    (squares.sum::<f64>() / (ratios.len() as f64 - 1.0)).sqrt()
}

/// Summarises the ratios of pairs of windows.
///
/// # Errors
/// When there is none, or one that is not a positive number: a window without progress has no ratio.
pub fn summarize_ratios(ratios: &[f64]) -> Result<RatioSummary> {
    ensure!(
        !ratios.is_empty(),
        "No pair of windows was measured, so there is no ratio"
    );
    for ratio in ratios {
        ensure!(
            ratio.is_finite() && *ratio > 0.0,
            "A pair has the ratio {ratio}: a window was without progress"
        );
    }
    let logarithms: Vec<f64> = ratios.iter().map(|ratio| ratio.ln()).collect();
    let averages = walsh_averages(&logarithms);
    let (cut, confidence) = signed_rank_cut(ratios.len());
    let sorted = sorted(ratios);
    Ok(RatioSummary {
        pairs: ratios.len(),
        median: median(ratios),
        worst: sorted[0],
        best: sorted[sorted.len() - 1],
        low: averages[cut].exp(),
        high: averages[averages.len() - 1 - cut].exp(),
        confidence,
    })
}

fn sorted(values: &[f64]) -> Vec<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

/// Averages of all pairs, each value with itself included, in order: n (n + 1) / 2 of them.
fn walsh_averages(values: &[f64]) -> Vec<f64> {
    let averages: Vec<f64> = values
        .iter()
        .enumerate()
        .flat_map(|(index, first)| {
            values[index..]
                .iter()
                .map(move |second| f64::midpoint(*first, *second))
        })
        .collect();
    sorted(&averages)
}

/// How many averages to cut off at each end, and the coverage of what remains.
///
/// The signed-rank statistic T of n observations is the sum of a random subset of the ranks 1..=n, each subset
/// equally likely. Cutting `cut` averages at each end leaves a coverage of 1 - 2 P(T <= cut).
fn signed_rank_cut(observations: usize) -> (usize, f64) {
    let probability = signed_rank_distribution(observations);
    let mut cut = 0;
    let mut tail = probability[0];
    while tail + probability[cut + 1] <= (1.0 - CONFIDENCE) / 2.0 {
        cut += 1;
        tail += probability[cut];
    }
    (cut, 1.0 - 2.0 * tail)
}

/// P(T = t) for t = 0 ..= n (n + 1) / 2.
fn signed_rank_distribution(observations: usize) -> Vec<f64> {
    let mut probability = vec![0.0; observations * (observations + 1) / 2 + 1];
    probability[0] = 1.0;
    for rank in 1..=observations {
        // From above, so that what is read is still without this rank.
        for sum in (0..probability.len()).rev() {
            let with_rank = if sum >= rank {
                probability[sum - rank]
            } else {
                0.0
            };
            probability[sum] = f64::midpoint(probability[sum], with_rank);
        }
    }
    probability
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(left: f64, right: f64) -> bool {
        (left - right).abs() < 1e-9
    }

    #[test]
    fn the_deviation_is_that_of_logarithms() {
        let e = std::f64::consts::E;
        assert!(close(log_deviation(&[e, 1.0 / e]), 2.0_f64.sqrt()));
        assert!(log_deviation(&[1.0]).is_nan());
    }

    #[test]
    fn medians_of_odd_even_and_no_values() {
        assert!(close(median(&[3.0, 1.0, 2.0]), 2.0));
        assert!(close(median(&[4.0, 1.0, 2.0, 3.0]), 2.5));
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn the_signed_rank_distribution_is_that_of_the_tables() {
        let five = signed_rank_distribution(5);
        assert_eq!(five.len(), 16);
        assert!(close(five.iter().sum(), 1.0));
        assert!(close(five[0], 1.0 / 32.0));
        // 3 = 3 = 1 + 2: two subsets.
        assert!(close(five[3], 2.0 / 32.0));
    }

    #[test]
    fn critical_values_are_those_of_the_tables() {
        // Two-sided 5 %: critical values of T are 0 for n = 6, 2 for 7, 3 for 8, 8 for 10, 52 for 20.
        for (observations, critical) in [(6, 0), (7, 2), (8, 3), (10, 8), (20, 52)] {
            let (cut, confidence) = signed_rank_cut(observations);
            assert_eq!(cut, critical, "{observations} observations");
            assert!(confidence >= 0.95);
        }
    }

    #[test]
    fn few_pairs_say_what_confidence_they_give() {
        let summary = summarize_ratios(&[1.1, 1.2, 1.3, 1.4, 1.5]).expect("ratios are positive");
        assert!(close(summary.confidence, 0.9375));
        assert!(close(summary.low, 1.1) && close(summary.high, 1.5));
        let single = summarize_ratios(&[1.2]).expect("ratios are positive");
        assert!(close(single.confidence, 0.0) && close(single.median, 1.2));
    }

    #[test]
    fn the_interval_lies_inside_the_spread_and_around_the_median() {
        let ratios = [1.5, 1.4, 1.6, 1.45, 1.55, 1.5, 1.48, 0.9];
        let summary = summarize_ratios(&ratios).expect("ratios are positive");
        assert!(close(summary.worst, 0.9) && close(summary.best, 1.6));
        assert!(summary.worst < summary.low && summary.low < summary.median);
        assert!(summary.median < summary.high && summary.high < summary.best);
    }

    #[test]
    fn swapping_the_schedulers_mirrors_the_interval() {
        let ratios = [1.5, 1.2, 0.8, 1.1, 1.05, 1.3, 0.97];
        let inverse: Vec<f64> = ratios.iter().map(|ratio| 1.0 / ratio).collect();
        let (there, back) = (
            summarize_ratios(&ratios).expect("ratios are positive"),
            summarize_ratios(&inverse).expect("ratios are positive"),
        );
        assert!(close(there.low, 1.0 / back.high) && close(there.high, 1.0 / back.low));
    }

    #[test]
    fn windows_without_progress_are_no_result() {
        assert!(summarize_ratios(&[]).is_err());
        assert!(summarize_ratios(&[1.0, 0.0]).is_err());
        assert!(summarize_ratios(&[1.0, f64::INFINITY]).is_err());
        assert!(summarize_ratios(&[f64::NAN]).is_err());
    }
}
