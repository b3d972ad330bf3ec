// SPDX-License-Identifier: GPL-2.0-only
//! Structs of `intf.h` that are counters and nothing else, words that only grow: what they gained, and several together.

use crate::bpf::intf;
use bytemuck::{AnyBitPattern, NoUninit, cast_slice, cast_slice_mut};
use std::slice;

/// A struct all of whose fields are u64s, or arrays of them.
pub trait Counts: AnyBitPattern + NoUninit {}

impl Counts for intf::group_stats {}
impl Counts for intf::vcpu_counts {}

/// What was gained since `earlier`. What counts less than then counts as nothing.
pub fn since<T: Counts>(now: &T, earlier: &T) -> T {
    combined(now, earlier, u64::saturating_sub)
}

/// Both together.
pub fn sum<T: Counts>(one: &T, other: &T) -> T {
    combined(one, other, u64::saturating_add)
}

fn combined<T: Counts>(one: &T, other: &T, combine: fn(u64, u64) -> u64) -> T {
    let mut both = *one;
    let words = cast_slice_mut::<T, u64>(slice::from_mut(&mut both));
    for (word, other) in words.iter_mut().zip(cast_slice(slice::from_ref(other))) {
        *word = combine(*word, *other);
    }
    both
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytemuck::Zeroable;

    #[test]
    fn each_counter_is_taken_by_itself() {
        let stats = |run_ns, ipis, third| {
            let mut stats = intf::group_stats {
                run_ns,
                ipis,
                ..Zeroable::zeroed()
            };
            stats.turn_skew[2] = third;
            stats
        };
        let (earlier, now) = (stats(1, 5, 7), stats(4, 2, 9));
        let gained = since(&now, &earlier);
        assert_eq!((gained.run_ns, gained.ipis, gained.turn_skew[2]), (3, 0, 2));
        let both = sum(&now, &earlier);
        assert_eq!((both.run_ns, both.ipis, both.turn_skew[2]), (5, 7, 16));
    }
}
