// SPDX-License-Identifier: GPL-2.0-only
//! A histogram of delays with four buckets per power of two, so that a quantile is right to an eighth. Guests count into
//! its buckets themselves: programs of micro guests (`crate::code`) and the workloads of booted ones.

use serde::{Deserialize, Serialize};

/// Buckets, for any 64-bit number.
pub const BUCKETS: usize = 256;

/// Counts of numbers. Bucket b, from 4 on, is for those from (4 + b mod 4) * 2^(b/4 - 1) to the next bucket's; what is below
/// 4 is in bucket 4.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Histogram {
    counts: Vec<u64>,
}

impl Default for Histogram {
    fn default() -> Self {
        Self {
            counts: vec![0; BUCKETS],
        }
    }
}

/// The least number of a bucket.
fn floor(bucket: usize) -> f64 {
    (4 + bucket % 4) as f64 * 2f64.powi(bucket as i32 / 4 - 1)
}

impl Histogram {
    /// Counts a number.
    pub fn count(&mut self, number: u64) {
        let number = number.max(4);
        let shift = number.ilog2() - 2;
        self.counts[(number >> shift) as usize + 4 * shift as usize] += 1;
    }

    /// Adds what somebody else has counted, bucket by bucket.
    pub fn add_counts(&mut self, counts: impl IntoIterator<Item = u64>) {
        for (sum, count) in self.counts.iter_mut().zip(counts) {
            *sum += count;
        }
    }

    /// What was counted since it was `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        let pairs = self.counts.iter().zip(&earlier.counts);
        Self {
            counts: pairs.map(|(now, then)| now.saturating_sub(*then)).collect(),
        }
    }

    /// How many numbers were counted.
    pub fn len(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Whether none was.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number that a part `quantile` of all are below: the middle of its bucket. None without numbers.
    pub fn quantile(&self, quantile: f64) -> Option<f64> {
        let rank = ((self.len() as f64 * quantile).ceil() as u64).max(1);
        let mut below = 0;
        let bucket = self.counts.iter().position(|count| {
            below += count;
            below >= rank
        })?;
        Some(f64::midpoint(floor(bucket), floor(bucket + 1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_right_to_an_eighth() {
        let mut histogram = Histogram::default();
        (1..=1000).for_each(|number| histogram.count(number * 1000));
        for (quantile, exact) in [(0.5, 500_000.0), (0.99, 990_000.0)] {
            let found = histogram.quantile(quantile).unwrap();
            assert!((found / exact - 1.0).abs() <= 0.125, "{found} for {exact}");
        }
        assert_eq!(Histogram::default().quantile(0.5), None);
    }

    #[test]
    fn any_number_has_a_bucket_that_holds_it() {
        for number in [4, 5, 7, 8, 9, 1000, 1 << 40, u64::MAX] {
            let mut histogram = Histogram::default();
            histogram.count(number);
            let bucket = histogram.counts.iter().position(|count| *count == 1);
            let bucket = bucket.unwrap();
            let number = number as f64;
            assert!(floor(bucket) <= number && number <= floor(bucket + 1));
        }
    }

    #[test]
    fn a_window_is_what_came_since() {
        let mut histogram = Histogram::default();
        histogram.count(5);
        let earlier = histogram.clone();
        histogram.count(1 << 20);
        let window = histogram.since(&earlier);
        assert_eq!(window.len(), 1);
        assert!(window.quantile(0.5).unwrap() >= 1048576.0);
    }
}
