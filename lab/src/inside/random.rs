// SPDX-License-Identifier: GPL-2.0-only
//! Numbers that look like chance and are the same for the same seed. Not for secrets.
use std::time::Duration;

/// SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
pub struct Random(u64);

impl Random {
    /// Begins a sequence.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A time below `limit`, which is not zero.
    pub fn below(&mut self, limit: Duration) -> Duration {
        Duration::from_nanos(self.next() % limit.as_nanos() as u64)
    }

    /// Puts `items` into any order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            let chosen = self.next() % (last as u64 + 1);
            items.swap(last, chosen as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_order_and_times() {
        let draw = |seed| {
            let mut random = Random::new(seed);
            let mut order = [0, 1, 2, 3, 4, 5];
            random.shuffle(&mut order);
            (order, random.below(Duration::from_millis(4)))
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
        assert!(draw(3).1 < Duration::from_millis(4));
        let mut sorted = draw(1).0;
        sorted.sort_unstable();
        assert_eq!(sorted, [0, 1, 2, 3, 4, 5]);
    }
}
