// SPDX-License-Identifier: GPL-2.0-only
//! Turns of a domain, one after the other, as `plan.bpf.h` makes them: who has how much of its CPUs, and how long anybody waits.

use cohort_policy::*;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use std::ops::RangeInclusive;

const MS: u64 = 1_000_000;
const SLICE: u64 = 2 * MS;
const READY_WAIT: u64 = 24 * MS;

/// What a group is, and in which state its entity. All its tasks always want to run.
#[derive(Clone, Default)]
struct Group {
    width: u32,
    /// That it may use.
    cpus: u64,
    share: u64,
    vtime: u64,
    /// In the tree.
    listed: u64,
    /// In this turn.
    running: u64,
    /// In the last one in which it had any.
    planned: u64,
    used_ns: u64,
    waits_ns: u64,
    longest_wait_ns: u64,
}

/// One of those that take part in a turn.
struct Entry {
    key: u64,
    group: usize,
    width: u32,
}

/// A group that waits has a turn in so much time, however little its weight is.
const STARVED: u64 = 500 * MS;

struct Domain {
    cpus: u64,
    present: u64,
    halvings: u32,
    elapsed_ns: u64,
    groups: Vec<Group>,
    packs: bool,
}

fn before(a: u64, b: u64) -> bool {
    unsafe { vtime_before(a, b) }
}

fn earlier(a: u64, b: u64) -> u64 {
    if before(b, a) { b } else { a }
}

fn charge(used_ns: u64, share: u64) -> u64 {
    unsafe { fair_charge(used_ns, share) }
}

fn count(cpus: u64) -> u32 {
    unsafe { cpus_in(cpus) }
}

impl Domain {
    /// With so many CPUs, and groups of these widths and weights.
    fn new(nr_cpus: u32, groups: &[(u32, u64)], packs: bool) -> Self {
        // Virtual time wraps soon.
        let present = (1u64 << 40).wrapping_neg();
        let sum = groups.iter().map(|(_, weight)| weight).sum();
        let cpus = u64::MAX >> (64 - nr_cpus);
        let group = |&(width, weight): &(u32, u64)| Group {
            width,
            cpus,
            share: unsafe { fair_child_share(SHARE_ONE.into(), weight, sum) },
            vtime: present,
            listed: present,
            ..Group::default()
        };
        Self {
            cpus,
            present,
            halvings: 0,
            elapsed_ns: 0,
            groups: groups.iter().map(group).collect(),
            packs,
        }
    }

    fn nr_cpus(&self) -> u32 {
        count(self.cpus)
    }

    fn turn_ns(&self) -> u64 {
        SLICE >> self.halvings
    }

    fn set_turn_length(&mut self) {
        let waiting: u32 = self.groups.iter().map(|g| g.width - count(g.running)).sum();
        let rounds = unsafe { turn_rounds(waiting, self.nr_cpus(), 0) };
        self.halvings = unsafe { turn_halvings_after(SLICE, READY_WAIT, rounds, self.halvings) };
    }

    /// How far a group may be behind, and ahead.
    fn most_lag(&self, group: &Group) -> u64 {
        charge(SLICE, group.share) * u64::from(LAG_SLICES + group.width.min(self.nr_cpus()))
    }

    /// Those that take part, in the order in which they come; the present follows them.
    fn gather(&mut self) -> Vec<Entry> {
        let mut listed: Vec<usize> = (0..self.groups.len()).collect();
        listed.sort_by_key(|&i| self.groups[i].listed.wrapping_sub(self.present) as i64);
        let last = self.present.wrapping_add(STARVED);
        let mut near = 0;
        listed.retain(|&i| {
            let takes_part = near < 2 * self.nr_cpus();
            near += u32::from(takes_part && !before(last, self.groups[i].vtime));
            takes_part
        });
        let (mut sum, mut shares) = (0i64, 0u64);
        let mut entries: Vec<Entry> = Vec::new();
        for i in listed {
            let group = &self.groups[i];
            sum += unsafe { plan_weighted(group.vtime, self.present, group.share) };
            shares += unsafe { plan_share(group.share) };
            let key = unsafe { plan_order(group.vtime, self.present, group.waits_ns, STARVED) };
            let at = entries
                .iter()
                .rposition(|entry| !before(key, entry.key))
                .map_or(0, |at| at + 1);
            entries.insert(
                at,
                Entry {
                    key,
                    group: i,
                    width: group.width,
                },
            );
        }
        self.present = unsafe { plan_present(self.present, plan_mean(self.present, sum, shares)) };
        entries
    }

    /// The entry has CPUs of these that are free; returns those that are left.
    fn serve(&self, entry: &mut Entry, had: &mut u64, mut free: u64) -> u64 {
        let group = &self.groups[entry.group];
        let mut own = free & group.cpus;
        while entry.width > 0 && own != 0 {
            let bit = unsafe { plan_next(own, group.running, group.planned) };
            own &= !bit;
            free &= !bit;
            *had |= bit;
            entry.width -= 1;
        }
        free
    }

    /// Those are served for whom there are enough CPUs; then all, in their order. Returns the CPUs that are left.
    fn serve_all(&self, entries: &mut [Entry], had: &mut [u64]) -> u64 {
        let mut free = self.cpus;
        // Where the first one stands that was left out.
        let mut left_out: Option<u64> = None;
        for (place, entry) in entries.iter_mut().enumerate() {
            let group = &self.groups[entry.group];
            let cost = charge(self.turn_ns() * u64::from(group.width), group.share);
            if left_out.is_some_and(|key| unsafe { !plan_passes(entry.key, cost, key) }) {
                continue;
            }
            let left = count(free & group.cpus);
            if self.packs && unsafe { plan_leaves_out(left, entry.width, place == 0) } {
                left_out = left_out.or(Some(entry.key));
            } else {
                free = self.serve(entry, &mut had[entry.group], free);
            }
        }
        for entry in entries {
            free = self.serve(entry, &mut had[entry.group], free);
        }
        free
    }

    /// A turn passes. Returns the CPUs that nobody had in it.
    fn turn(&mut self) -> u64 {
        self.set_turn_length();
        let mut entries = self.gather();
        let mut had = vec![0; self.groups.len()];
        let free = self.serve_all(&mut entries, &mut had);
        let latest = self.present.wrapping_add(STARVED);
        for entry in entries {
            let least = self
                .present
                .wrapping_sub(self.most_lag(&self.groups[entry.group]));
            let group = &mut self.groups[entry.group];
            if had[entry.group] != 0 {
                group.planned = had[entry.group];
            }
            // Who has all that it can use is owed no more than a bound.
            let satisfied = entry.width == 0 || had[entry.group] == group.cpus & self.cpus;
            if satisfied && before(group.vtime, least) {
                group.vtime = least;
            }
            group.listed = earlier(entry.key, latest);
        }
        self.pass(&had);
        free
    }

    /// The CPUs follow the plan, and time passes.
    fn pass(&mut self, had: &[u64]) {
        let turn_ns = self.turn_ns();
        self.elapsed_ns += turn_ns;
        for (i, had) in had.iter().copied().enumerate() {
            let group = &mut self.groups[i];
            group.running = had;
            let used_ns = u64::from(count(had)) * turn_ns;
            group.used_ns += used_ns;
            group.vtime = group.vtime.wrapping_add(charge(used_ns, group.share));
            group.waits_ns = if had == 0 {
                group.waits_ns + turn_ns
            } else {
                0
            };
            group.longest_wait_ns = group.longest_wait_ns.max(group.waits_ns);
        }
    }
}

/// A domain after so much time as 2,000 slices take.
fn after_2000_slices(cpus: u32, groups: &[(u32, u64)], packs: bool) -> Domain {
    let mut domain = Domain::new(cpus, groups, packs);
    while domain.elapsed_ns < 2_000 * SLICE {
        domain.turn();
    }
    domain
}

/// What each group is entitled to of `cpus` CPUs: by weight, not more than its width, nor less than `least` of it; of what that
/// leaves, the others have more.
fn entitled(cpus: u32, groups: &[(u32, u64)], least: impl Fn(u32) -> f64) -> Vec<f64> {
    let parts = |level: f64| -> Vec<f64> {
        let part = |&(width, weight): &(u32, u64)| {
            let width = width.min(cpus);
            (level * weight as f64).clamp(least(width), f64::from(width))
        };
        groups.iter().map(part).collect()
    };
    let (mut low, mut high) = (0.0, f64::from(cpus));
    for _ in 0..100 {
        let level = (low + high) / 2.0;
        if parts(level).iter().sum::<f64>() < f64::from(cpus) {
            low = level;
        } else {
            high = level;
        }
    }
    parts(high)
}

/// How much more or less CPU time any group had than it is entitled to, beyond two per cent of that: in ns, less what a group
/// may be behind or ahead, which is LAG_SLICES slices of one CPU and one of each that it uses, and three turns. A turn in each STARVED, which
/// may be one on all the CPUs that a group wants, or on some, may be more than its weight gives it, and is others' loss.
fn unfairness(domain: &Domain, groups: &[(u32, u64)]) -> (f64, String) {
    let cpus = domain.nr_cpus();
    let turns = STARVED as f64 / domain.turn_ns() as f64;
    let by_weight = entitled(cpus, groups, |_| 0.0);
    let with_turns = entitled(cpus, groups, |width| f64::from(width) / turns);
    let mut most = f64::MIN;
    let mut text = format!("{cpus} CPUs");
    for (i, (width, weight)) in groups.iter().enumerate() {
        let ns = |cpus: f64| cpus * domain.elapsed_ns as f64;
        let used = domain.groups[i].used_ns as f64;
        let (one, other) = (ns(by_weight[i]), ns(with_turns[i]));
        let lag = f64::from(LAG_SLICES + 4 * width.min(&cpus)) * SLICE as f64;
        let least = one.min(other) * 0.99;
        most = most.max(least - lag - used);
        // Turns that come by the clock and by weight may come one soon after the other, for those that have few.
        let few = ns(f64::from(*width.min(&cpus)) / turns);
        let by_clock = if one < 2.0 * few { few } else { 0.0 };
        most = most.max(used - one.max(other) * 1.02 - by_clock - lag);
        let used = used / domain.elapsed_ns as f64;
        text += &format!(
            "; {width} wide, weight {weight}: {used:.3} of {:.3}",
            by_weight[i]
        );
    }
    (most, text)
}

/// CPUs that each group had, on average, to within a hundredth.
fn had(cpus: u32, groups: &[(u32, u64)]) -> Vec<f64> {
    let domain = after_2000_slices(cpus, groups, true);
    let part = |group: &Group| group.used_ns as f64 / domain.elapsed_ns as f64;
    domain
        .groups
        .iter()
        .map(|group| (part(group) * 100.0).round() / 100.0)
        .collect()
}

/// So many CPUs, and groups of any widths and weights.
fn crowds(weights: RangeInclusive<u64>) -> impl Strategy<Value = (u32, Vec<(u32, u64)>)> {
    (
        1u32..=32,
        prop::collection::vec((1u32..=16, weights), 1..=12),
    )
}

/// The same with so many tasks in each group that it can use all that it is entitled to.
fn wide_enough((cpus, mut groups): (u32, Vec<(u32, u64)>)) -> (u32, Vec<(u32, u64)>) {
    let sum: u64 = groups.iter().map(|(_, weight)| weight).sum();
    for (width, weight) in &mut groups {
        *width = (*width).max((u64::from(cpus) * *weight).div_ceil(sum) as u32);
    }
    (cpus, groups)
}

/// After STARVED a group comes before all but those that waited too long as well. It is seen when the present has come as far, and may
/// find too few CPUs left once: half as long again is enough.
fn check_waits(cpus: u32, groups: &[(u32, u64)]) -> Result<(), TestCaseError> {
    let domain = after_2000_slices(cpus, groups, true);
    for group in &domain.groups {
        let (waits, most) = (group.longest_wait_ns / MS, STARVED * 3 / 2 / MS);
        prop_assert!(waits <= most, "{waits} of {most} ms");
    }
    Ok(())
}

const MIXED: (u32, [(u32, u64); 3]) = (3, [(3, 100), (2, 100), (1, 100)]);
const UNLIKE: (u32, [(u32, u64); 3]) = (2, [(1, 1000), (2, 100), (1, 1)]);
const INDEBTED: (u32, [(u32, u64); 4]) = (3, [(1, 100), (1, 100), (1, 30), (1, 10)]);
const LIGHT: (u32, [(u32, u64); 3]) = (2, [(1, 1000), (1, 3), (1, 1)]);

/// The VM of weight 1 and three vCPUs fits beside the one that cannot use its part, in every turn; the VM of five does not.
const WORST: (u32, [(u32, u64); 4]) = (5, [(3, 1), (5, 1), (1, 144), (5, 144)]);

/// Three equal VMs, each of which could use its CPU of the three, have one each, though the one of three vCPUs fits only when it stands
/// first; a VM of weight 100 and two vCPUs is passed by one of weight 1 by no more than a turn.
#[test]
fn packing_takes_nothing_from_who_is_passed() {
    assert_eq!(had(MIXED.0, &MIXED.1), [1.0, 1.0, 1.0]);
    assert_eq!(had(UNLIKE.0, &UNLIKE.1), [1.0, 0.99, 0.01]);
    assert!(had(WORST.0, &WORST.1)[3] > 3.8);
}

/// Two VMs of one vCPU have each the CPU that they can use, less than their part. They hold the present back, and the others divide the
/// third CPU by weight all the same.
#[test]
fn who_cannot_use_its_part_changes_nothing_between_others() {
    assert_eq!(had(INDEBTED.0, &INDEBTED.1), [1.0, 1.0, 0.75, 0.25]);
}

/// The present runs at 250 times its usual pace where a heavy VM cannot use its part; that must not bring the others their turns.
#[test]
fn weights_count_beside_a_heavy_vm_that_cannot_use_its_part() {
    assert_eq!(had(LIGHT.0, &LIGHT.1), [1.0, 0.75, 0.25]);
}

#[test]
fn what_narrow_ones_leave_is_divided_by_weight() {
    let parts = |groups: &[(u32, u64)], least: f64| -> Vec<f64> {
        let parts = entitled(4, groups, |_| least);
        parts
            .iter()
            .map(|part| (part * 1000.0).round() / 1000.0)
            .collect()
    };
    assert_eq!(parts(&[(1, 100), (4, 100), (4, 100)], 0.0), [1.0, 1.5, 1.5]);
    assert_eq!(parts(&[(4, 300), (4, 100)], 0.0), [3.0, 1.0]);
    assert_eq!(parts(&[(4, 999), (1, 1)], 0.25), [3.75, 0.25]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, rng_seed: RngSeed::Fixed(1), ..ProptestConfig::default() })]

    /// A plan leaves a CPU to nobody only if each of those that take part in it and may use it has all the CPUs that it wants;
    /// where all may use all CPUs, of all groups, also those for which the plan had no place.
    #[test]
    fn no_cpu_idles_while_somebody_who_may_use_it_is_left_out(
        (cpus, groups) in crowds(1..=1000),
        masks in prop::collection::vec(any::<u32>(), 12),
        masked: bool,
    ) {
        for packs in [false, true] {
            let mut domain = Domain::new(cpus, &groups, packs);
            if masked {
                for (group, mask) in domain.groups.iter_mut().zip(&masks) {
                    group.cpus = u64::from(*mask | 1) & domain.cpus;
                }
            }
            let all_take_part = groups.len() <= 2 * cpus as usize;
            for _ in 0..2_000 {
                let free = domain.turn();
                if masked && !all_take_part {
                    continue;
                }
                for group in &domain.groups {
                    prop_assert!(group.cpus & group.running == group.running);
                    prop_assert!(free & group.cpus == 0 || count(group.running) == group.width);
                }
                let taken = domain.groups.iter().fold(0, |all, group| all + count(group.running));
                prop_assert_eq!(taken + count(free), cpus, "a CPU is one group's");
            }
        }
    }

    /// Without packing, each group that can use its part of the CPUs has it.
    #[test]
    fn without_packing_time_follows_weight_where_all_can_use_their_part((cpus, groups) in crowds(50..=1000).prop_map(wide_enough)) {
        let domain = after_2000_slices(cpus, &groups, false);
        let (unfair, text) = unfairness(&domain, &groups);
        prop_assert!(unfair < 0.0, "{text}");
    }

    /// Each has what it is entitled to, the narrow ones all that they can use, and the others what those leave; where no weight is more than
    /// four times another.
    #[test]
    fn time_is_max_min_fair((cpus, groups) in crowds(50..=200)) {
        let (unfair, text) = unfairness(&after_2000_slices(cpus, &groups, true), &groups);
        prop_assert!(unfair < 0.0, "{text}");
    }

    #[test]
    fn nobody_waits_for_longer_than_its_bound((cpus, groups) in crowds(1..=1000)) {
        check_waits(cpus, &groups)?;
    }
}
