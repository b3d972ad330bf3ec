// SPDX-License-Identifier: GPL-2.0-only
//! What the ratios of pairs of windows let one say, in words that claim no more than that.

use super::statistics::RatioSummary;

/// The difference that a comparison should be able to show.
pub const WORTH_SHOWING: f64 = 0.02;
/// Pairs below which no interval covers 95 %.
const FEWEST_PAIRS: usize = 6;
/// Quantile of the normal distribution for 5 % of false alarms on two sides, and for missing one difference in five.
const ALARM_QUANTILE: f64 = 1.960;
const POWER_QUANTILE: f64 = 0.842;

/// What can be said about a number under one scheduler against that under another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Verdict {
    /// Fewer pairs than any verdict needs.
    TooFewPairs,
    /// It is more: the interval lies above 1.
    More,
    /// It is less: the interval lies below 1.
    Less,
    /// It differs by less than [`WORTH_SHOWING`].
    Same,
    /// The interval is too wide; so many pairs more would narrow it enough.
    NotFound {
        /// An estimate from the spread so far.
        more_pairs: usize,
    },
}

impl Verdict {
    /// Of the ratios in `summary`, whose logarithms have the standard deviation `log_deviation`.
    pub fn of(summary: &RatioSummary, log_deviation: f64) -> Self {
        if summary.pairs < FEWEST_PAIRS {
            return Self::TooFewPairs;
        }
        if summary.low > 1.0 {
            return Self::More;
        }
        if summary.high < 1.0 {
            return Self::Less;
        }
        if summary.low > 1.0 - WORTH_SHOWING && summary.high < 1.0 + WORTH_SHOWING {
            return Self::Same;
        }
        // The usual formula for the size of a paired sample; ratios near 1 have the logarithm of their distance to it.
        let needed = ((ALARM_QUANTILE + POWER_QUANTILE) * log_deviation / WORTH_SHOWING).powi(2);
        Self::NotFound {
            more_pairs: (needed.ceil() as usize)
                .saturating_sub(summary.pairs)
                .max(1),
        }
    }

    /// In words; `pair_minutes` is how long a pair of windows takes.
    pub fn words(self, summary: &RatioSummary, pair_minutes: f64) -> String {
        let percent = |ratio: f64| format!("{:+.1} %", (ratio - 1.0) * 100.0);
        let change = || {
            format!(
                "{} (between {} and {})",
                percent(summary.median),
                percent(summary.low),
                percent(summary.high)
            )
        };
        match self {
            Self::TooFewPairs => format!(
                "no verdict: {} pairs are too few, {FEWEST_PAIRS} the least",
                summary.pairs
            ),
            Self::More => format!("more: {}", change()),
            Self::Less => format!("less: {}", change()),
            Self::Same => format!("no difference of {:.0} % or more", WORTH_SHOWING * 100.0),
            Self::NotFound { more_pairs } => format!(
                "no difference found at this length; about {:.0} more minutes would show {:.0} %",
                (more_pairs as f64 * pair_minutes).ceil(),
                WORTH_SHOWING * 100.0
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::statistics::{log_deviation, summarize_ratios};
    use super::*;
    use std::collections::BTreeMap;

    fn verdict(ratios: &[f64]) -> Verdict {
        let summary = summarize_ratios(ratios).expect("ratios are positive");
        Verdict::of(&summary, log_deviation(ratios))
    }

    #[test]
    fn a_clear_difference_is_found_and_five_pairs_are_too_few() {
        let better = [1.2, 1.25, 1.18, 1.22, 1.3, 1.21];
        assert_eq!(verdict(&better), Verdict::More);
        assert_eq!(verdict(&better.map(|ratio| 1.0 / ratio)), Verdict::Less);
        assert_eq!(verdict(&better[..5]), Verdict::TooFewPairs);
    }

    #[test]
    fn nothing_found_says_how_much_longer_it_would_take() {
        let noisy = [1.2, 0.8, 1.1, 0.9, 1.15, 0.85];
        let Verdict::NotFound { more_pairs } = verdict(&noisy) else {
            panic!("nothing can be found in {noisy:?}")
        };
        assert!((100..2000).contains(&more_pairs), "{more_pairs}");
        let summary = summarize_ratios(&noisy).expect("ratios are positive");
        let words = verdict(&noisy).words(&summary, 0.5);
        assert!(words.contains("more minutes would show 2 %"), "{words}");
    }

    #[test]
    fn the_same_is_said_only_where_a_difference_would_have_shown() {
        let steady = [1.001, 0.999, 1.002, 0.998, 1.0, 1.001, 0.999];
        assert_eq!(verdict(&steady), Verdict::Same);
    }

    /// Windows of the stock scheduler, in the order in which they ran in an emulated lab (two busy VMs of two vCPUs and
    /// two in a lock, on two CPUs): numbers that nothing changed but noise.
    const STOCK_WINDOWS: &str = include_str!("stock_windows.json");

    #[test]
    fn of_200_comparisons_of_the_stock_scheduler_with_itself_at_most_20_find_something() {
        const COMPARISONS: usize = 200;
        const PAIRS: usize = 8;
        let numbers: BTreeMap<String, Vec<f64>> =
            serde_json::from_str(STOCK_WINDOWS).expect("it is JSON");
        // xorshift64: the same each time.
        let mut state = 0x2545_F491_4F6C_DD1D_u64;
        let mut random = |below: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state % below as u64) as usize
        };
        for (name, windows) in &numbers {
            let mut alarms = 0;
            for _ in 0..COMPARISONS {
                let mut pairs: Vec<&[f64]> = windows.chunks_exact(2).collect();
                let ratios: Vec<f64> = (0..PAIRS)
                    .map(|_| {
                        let pair = pairs.swap_remove(random(pairs.len()));
                        // Which of both is called the other scheduler's.
                        let first = random(2);
                        pair[first] / pair[1 - first]
                    })
                    .collect();
                alarms += usize::from(matches!(verdict(&ratios), Verdict::More | Verdict::Less));
            }
            println!("{name}: {alarms} of {COMPARISONS} find something");
            assert!(alarms <= 20, "{name}: {alarms} false alarms");
        }
    }
}
