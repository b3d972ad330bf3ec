// SPDX-License-Identifier: GPL-2.0-only
//! Turns: they begin at the same time for everybody, and none is too short to be worth a switch.

use cohort_policy::*;
use proptest::prelude::*;

const MS: u64 = 1_000_000;

/// Where turns begin after a time with these ticks.
fn after_ticks(base: u64, ticks: &[u64], slice: u64) -> u64 {
    let lateness = |tick: u64| unsafe { tick_lateness(tick, base, slice) };
    let least = ticks.iter().fold(slice as i64, |least, tick| unsafe {
        least_lateness(least, lateness(*tick), slice as i64)
    });
    let last = lateness(*ticks.last().expect("a tick"));
    let is_near = |tick: &&u64| unsafe { tick_is_near(lateness(**tick), slice as i64) };
    let near = ticks.iter().filter(is_near).count() as u32;
    let far = ticks.len() as u32 - near;
    unsafe {
        turn_base(
            base,
            least,
            last,
            slice as i64,
            ticks_miss_turns(near, far, false),
        )
    }
}

fn base_for(tick: u64, slice: u64) -> u64 {
    after_ticks(0, &[tick], slice)
}

#[test]
fn a_turn_ends_shortly_before_the_tick_that_notices() {
    let slice = 4 * MS;
    let tick = 1_000 * MS;
    let base = base_for(tick, slice);
    // Started right after a tick: the next tick finds the turn over.
    let left = unsafe { turn_left(tick + MS / 100, base, slice) };
    assert!(tick + MS / 100 + left < tick + slice);
    // Started too late to be worth it: to the tick after the next.
    let late =
        tick + slice - slice / u64::from(TICK_LEAD_PARTS) - slice / u64::from(TURN_PARTS) + 1;
    let left = unsafe { turn_left(late, base, slice) };
    assert!(late + left > tick + slice && late + left < tick + 2 * slice);
}

#[test]
fn before_enough_was_counted_ticks_are_those_of_most_kernels() {
    let known = |elapsed, ticks| unsafe { tick_period(elapsed, ticks) };
    assert_eq!(known(0, 0), u64::from(TICK_NS));
    assert_eq!(known(10 * MS, TICKS_ENOUGH.into()), MS / 5);
    assert_eq!(
        known(10 * MS, u64::from(TICKS_ENOUGH) - 1),
        u64::from(TICK_NS)
    );
}

#[test]
fn running_together_does_not_end_at_once_what_it_cures() {
    let on = u64::from(SYNC_ON * SYNC_ONE);
    assert!(unsafe { is_cohort(COHORT_AUTO, false, on) });
    assert!(unsafe {
        !is_cohort(COHORT_AUTO, false, on - 1) && is_cohort(COHORT_AUTO, true, on - 1)
    });
    // Without any more signs it lasts for more than a second of the VM's CPU time.
    let mut used_ms = 0;
    let mut score = on;
    while unsafe { is_cohort(COHORT_AUTO, true, score) } {
        score = unsafe { sync_score(score, 0, 4 * MS) };
        used_ms += 4;
    }
    assert!((1000..4000).contains(&used_ms), "{used_ms}");
    // 30 ms of signs at twice the rate are enough to begin.
    let signs = 2 * u64::from(SYNC_ON) * 30 / 1000;
    assert!(unsafe { is_cohort(COHORT_AUTO, false, sync_score(0, signs, 30 * MS)) });
}

#[test]
fn an_exception_holds_whatever_the_score() {
    let on = u64::from(SYNC_ON * SYNC_ONE);
    for was in [false, true] {
        assert!(unsafe { is_cohort(COHORT_ALWAYS, was, 0) });
        assert!(unsafe { !is_cohort(COHORT_NEVER, was, on) });
    }
}

proptest! {
    /// Whoever starts between the same two ends, ends with the others or one turn later; no turn is shorter
    /// than is worth a switch, or longer than a slice by more than that.
    #[test]
    fn turns_end_together(base in 0u64..1 << 50, after in 0u64..1 << 40, slice in 1_000u64..100 * MS) {
        let now = base + after;
        let left = unsafe { turn_left(now, base, slice) };
        prop_assert_eq!((now + left - base) % slice, 0);
        let least = slice / u64::from(TURN_PARTS);
        prop_assert!(left >= least && left <= slice + least);
    }

    /// A turn's number is that of its end, whenever one starts to run to it.
    #[test]
    fn who_ends_together_is_in_the_same_turn(base in 0u64..1 << 50, after in 0u64..1 << 40, slice in 1_000u64..100 * MS) {
        let now = base + after;
        let end = now + unsafe { turn_left(now, base, slice) };
        prop_assert_eq!(unsafe { turn_number(now, base, slice) } + 1, (end - base) / slice);
    }

    /// Whoever runs to the same end has the same turn, and no two turns of whatever lengths have the same id unless
    /// they begin together; no id is 0, which says that there is none.
    #[test]
    fn an_id_is_a_turns_own(base in 0u64..1 << 50, after in 0u64..1 << 40, step in 0u64..100 * MS, halvings in prop::array::uniform2(0u32..4), slice in (100u64..100_000).prop_map(|us| us * 1000)) {
        let (now, later) = (base + after, base + after + step);
        let id = |now, halvings| unsafe { turn_id(now, base, slice, halvings) };
        let end = |now: u64, halvings: u32| now + unsafe { turn_left(now, base, slice >> halvings) };
        let begin = |now, halvings: u32| end(now, halvings) - (slice >> halvings);
        prop_assert!(id(now, halvings[0]) > 0);
        let same = begin(now, halvings[0]) == begin(later, halvings[1]);
        prop_assert_eq!(id(now, halvings[0]) == id(later, halvings[1]), same);
    }

    /// Groups as wide as the lane have their turns one after the other; narrower ones several at once, so that twice the CPUs
    /// for twice the groups change nothing.
    #[test]
    fn a_crowd_is_counted_in_turns(waiting in 0u32..4096, width in 1u32..64, at_once in 1u32..16) {
        let turns = |waiting, cpus| unsafe { turns_to_last(waiting, width, cpus) };
        prop_assert_eq!(turns(waiting, width), waiting * CROWD_ONE);
        prop_assert_eq!(turns(waiting * at_once, width * at_once), turns(waiting, width));
        prop_assert_eq!(turns(waiting, width * at_once), waiting * CROWD_ONE / at_once);
    }

    /// With as many groups waiting as ever, a round and a half take no longer than they should, or turns are as short as
    /// they get; and they are not shorter than that asks for. Once short they stay so, until there are clearly fewer.
    #[test]
    fn turns_are_as_short_as_the_crowd_asks_for(slice_us in 100u64..100_000, wait_ms in 1u64..1000, waiting in 0u32..8192) {
        let (slice, wait) = (slice_us * 1000, wait_ms * MS);
        let average = (0..200).fold(0, |average, _| unsafe { crowd(average, waiting * CROWD_ONE) });
        let groups = u64::from(average) / u64::from(CROWD_ONE);
        prop_assert!(groups <= u64::from(waiting) && groups + 1 >= u64::from(waiting));
        let halvings = unsafe { turn_halvings(slice, wait, average) };
        let waits = |halvings: u32, groups: u64| 3 * (slice >> halvings) * groups / 2;
        prop_assert!(halvings == TURN_HALVINGS || waits(halvings, groups) <= wait);
        prop_assert!(halvings == 0 || waits(halvings - 1, groups + 1) >= wait);
        let after = |before| unsafe { turn_halvings_after(slice, wait, average, before) };
        prop_assert_eq!(after(0), halvings);
        for before in halvings..=TURN_HALVINGS {
            let after = after(before);
            prop_assert!(halvings <= after && after <= before);
            prop_assert!(after == halvings || waits(after - 1, groups + groups / 4 + 2) >= wait);
        }
    }

    /// Ticks that drift against the clock move the ends of turns and leave their numbers.
    #[test]
    fn a_new_base_leaves_the_turns_their_numbers(first in 1u64 << 30..1 << 50, turns in 0u64..1000, drift in -10_000i64..10_000, slice in MS..100 * MS) {
        let base = base_for(first, slice);
        let tick = (first + turns * slice).wrapping_add_signed(drift);
        let moved = after_ticks(base, &[tick], slice);
        prop_assert_eq!(moved.wrapping_sub(base) as i64, drift);
        prop_assert_eq!(unsafe { turn_number(tick, base, slice) }, unsafe { turn_number(tick, moved, slice) });
        // The turn is over when the tick comes.
        prop_assert_eq!(unsafe { turn_left(tick, moved, slice) }, slice - slice / u64::from(TICK_LEAD_PARTS));
    }

    /// Ticks may be late: turns are soon made for those in time, by whichever tick they were made before.
    #[test]
    fn late_ticks_do_not_move_the_turns(
        start in 1u64 << 30..1 << 50, first_late in 0..2 * MS, late in prop::collection::vec(0..MS / 2, 1..300), in_time in any::<prop::sample::Index>(),
    ) {
        let slice = 4 * MS;
        let mut ticks: Vec<_> = (1..).zip(&late).map(|(i, late)| start + i * slice + late).collect();
        let index = in_time.index(ticks.len());
        ticks[index] -= late[index];
        let base = (0..4).fold(base_for(start + first_late, slice), |base, _| after_ticks(base, &ticks, slice));
        prop_assert_eq!(unsafe { tick_lateness(ticks[index], base, slice) }, 0);
    }

    /// Nor do turns stay where a late tick put them because others that are late as well, though few, come near those.
    #[test]
    fn turns_are_made_for_most_ticks(start in 1u64 << 30..1 << 50, first_late in 0..2 * MS, late in prop::collection::vec(0..MS / 2, 24..60)) {
        let slice = 4 * MS;
        let mut base = base_for(start + first_late, slice);
        for second in 0..4 {
            // One of eight is as late as the first one was; the last one is not.
            let tick = |i: u64| start + (second * 250 + i) * slice + if i.is_multiple_of(8) { first_late + late[i as usize] } else { 0 };
            let ticks: Vec<u64> = (0..late.len() as u64 / 8 * 8).map(tick).collect();
            base = after_ticks(base, &ticks, slice);
        }
        prop_assert_eq!(unsafe { tick_lateness(start, base, slice) }, 0);
    }

    /// A tick that comes before its turn is over shows that turns were made for a late one; none does so that comes as
    /// late, or later.
    #[test]
    fn a_tick_in_time_shows_that_another_was_late(start in 1u64 << 30..1 << 50, late in 0..MS / 2, later in 0..MS / 2) {
        let slice = 4 * MS;
        let base = base_for(start + late, slice);
        let early = |tick| unsafe { tick_is_early(tick_lateness(tick, base, slice), slice as i64) };
        let over = unsafe { turn_left(start + slice / 2, base, slice) } <= slice / 2;
        prop_assert_eq!(early(start + slice), !over);
        prop_assert!(!early(start + slice + late + later));
    }

    /// Of a kernel that ticks at a usual rate the period is known after a second, though a tick more or less was counted.
    #[test]
    fn the_time_between_ticks_is_known_soon(rate in prop::sample::select(vec![100u64, 250, 300, 1000]), ms in 1000u64..1_000_000, off in -1i64..=1) {
        let ticks = (rate * ms / 1000).wrapping_add_signed(off);
        prop_assert_eq!(unsafe { tick_period(ms * MS, ticks) }, 1000 * MS / rate);
    }

    /// Some ticks that come at another time than turns end, as one interrupt may, are not yet those of a CPU that ticks at other
    /// times; and such a one is not taken for another because a few of its come near.
    #[test]
    fn a_few_ticks_do_not_tell(mostly in 0u32..1000, few in 0u32..TICKS_DOUBT) {
        let miss = |near, far, before| unsafe { ticks_miss_turns(near, far, before) };
        prop_assert!(!miss(mostly, mostly.min(few), false));
        prop_assert!(miss(mostly.min(few), mostly, true));
        let clearly = few + mostly + TICKS_DOUBT + 1;
        prop_assert!(miss(few, clearly, false));
        prop_assert!(!miss(clearly, few, true));
    }

    /// A VM that gives signs at an even rate has that rate for its score before long, rising or falling.
    #[test]
    fn a_score_comes_to_the_rate_of_the_signs(from in 0u64..1 << 32, per_ms in 0u64..1000) {
        let score = (0..20_000).fold(from, |score, _| unsafe { sync_score(score, 4 * per_ms, 4 * MS) });
        let rate = per_ms * 1000 * u64::from(SYNC_ONE);
        // It stops where a step is less than the least there is.
        prop_assert!(score + 600 >= rate && score <= rate + 600, "{score} instead of {rate}");
    }

    /// It stays between the old score and the new rate, whatever comes.
    #[test]
    fn a_score_never_overshoots(from in 0u64..1 << 32, events in 0u64..1 << 40, used in 0u64..1 << 40) {
        let score = unsafe { sync_score(from, events, used) };
        prop_assert!(score <= 1 << 32);
        if events == 0 {
            prop_assert!(score <= from);
        }
    }

    /// A base that lies ahead (another CPU has just set it) is as good.
    #[test]
    fn a_base_in_the_future_does_no_harm(base in 1u64 << 30..1 << 50, before in 0u64..1 << 29, slice in 1_000u64..100 * MS) {
        let left = unsafe { turn_left(base - before, base, slice) };
        let least = slice / u64::from(TURN_PARTS);
        prop_assert!(left >= least && left <= slice + least);
    }
}

/// Turns of a domain in which VMs of any width want all the CPU time they can get; virtual time is CPU time.
struct Packed {
    cpus: u32,
    width: Vec<u32>,
    vtime: Vec<u64>,
    /// Turns in which the VM ran, and those of them in which not all of its vCPUs did.
    turns: Vec<u32>,
    narrow: Vec<u32>,
    packing: bool,
}

impl Packed {
    fn new(cpus: u32, width: &[u32], packing: bool) -> Self {
        let vms = width.len();
        Self {
            cpus,
            width: width.iter().map(|width| (*width).min(cpus)).collect(),
            vtime: vec![0; vms],
            turns: vec![0; vms],
            narrow: vec![0; vms],
            packing,
        }
    }

    /// VMs that can use an equal part of the CPUs, and of what others leave of theirs.
    fn wider_than_their_part(&self) -> Vec<usize> {
        let mut by_width: Vec<usize> = (0..self.width.len()).collect();
        by_width.sort_by_key(|vm| self.width[*vm]);
        let (mut cpus, mut vms) = (self.cpus, by_width.len() as u32);
        let uses_less = |vm: &usize| {
            let less = self.width[*vm] * vms <= cpus;
            if less {
                cpus -= self.width[*vm];
                vms -= 1;
            }
            less
        };
        by_width.into_iter().skip_while(uses_less).collect()
    }

    fn window_ns(&self, vm: usize) -> u64 {
        4 * MS * u64::from(self.width[vm])
    }

    /// A turn; returns how many CPUs had nobody to run, and how many vCPUs waited.
    fn turn(&mut self) -> (u32, u32) {
        let mut waiting: Vec<usize> = (0..self.width.len()).collect();
        // The earliest first; as in a tree, of two that are equal the one that came first.
        waiting.sort_by_key(|vm| self.vtime[*vm]);
        let mut served = 0;
        while served < self.cpus && !waiting.is_empty() {
            let left = unsafe { window_left(self.cpus, served, 0) };
            let second = waiting.get(1).filter(|_| self.packing);
            let first = waiting[0];
            let packs = second.is_some_and(|&next| unsafe {
                let next_cost = self.window_ns(next);
                let (key, next_key) = (self.vtime[first], self.vtime[next]);
                let [width, next_width] = [first, next].map(|vm| self.width[vm]);
                window_packs(left, width, key, next_width, next_key, next_cost)
            });
            let vm = waiting.remove(usize::from(packs));
            let gets = self.width[vm].min(left);
            self.turns[vm] += 1;
            self.narrow[vm] += u32::from(gets < self.width[vm]);
            self.vtime[vm] += 4 * MS * u64::from(gets);
            served += gets;
        }
        let waits = waiting.iter().map(|vm| self.width[*vm]).sum();
        (self.cpus - served, waits)
    }
}

#[test]
fn who_may_have_to_give_a_cpu_back_fills_in() {
    let fills = |missing, left, width| unsafe { window_fills(missing, left, width) };
    // Two CPUs; a vCPU of the window's sleeps.
    assert!(fills(1, 1, 1) && fills(1, 1, 2));
    // Four, of which its VM wanted three: one is left for others for good.
    assert!(!fills(1, 2, 1) && !fills(1, 2, 2) && fills(1, 2, 3));
    // Two of its three sleep.
    assert!(!fills(2, 3, 1) && !fills(2, 3, 3) && fills(2, 2, 2));
    // It has all that it wanted.
    assert!(!fills(0, 1, 1) && !fills(0, 1, 2));
}

#[test]
fn two_vms_of_two_share_a_turn_of_four_cpus_though_one_of_three_comes_before_the_second() {
    let windows = |packing: bool| {
        let mut domain = Packed::new(4, &[3, 3, 2, 2], packing);
        (0..400).for_each(|_| {
            domain.turn();
        });
        let narrow: u32 = domain.narrow.iter().sum();
        (
            f64::from(narrow),
            f64::from(domain.turns.iter().sum::<u32>()),
        )
    };
    let ((narrow, all), (narrow_before, all_before)) = (windows(true), windows(false));
    assert!(
        narrow / all < 0.6 * narrow_before / all_before,
        "{narrow} of {all} windows were narrow; without packing {narrow_before} of {all_before}"
    );
}

proptest! {
    /// Whatever the widths: no CPU is idle while a vCPU waits, and of the VMs that can use an equal part of the CPUs none
    /// is further behind another than without packing, by more than the widest one's window.
    #[test]
    fn packing_leaves_no_cpu_idle_and_nobody_behind(
        cpus in 2u32..=128,
        most in 2u32..=128,
        widths in prop::collection::vec(0.0..1.0, 2..24),
        turns in 50usize..300,
    ) {
        let width: Vec<u32> = widths.iter().map(|part| 1 + (part * f64::from(most)) as u32).collect();
        let furthest_behind = |packing: bool| {
            let mut domain = Packed::new(cpus, &width, packing);
            let equals = domain.wider_than_their_part();
            let mut furthest = 0;
            for _ in 0..turns {
                let (idle, waiting) = domain.turn();
                prop_assert!(idle == 0 || waiting == 0, "{idle} CPUs idle, {waiting} vCPUs waiting");
                let vtimes = || equals.iter().map(|vm| domain.vtime[*vm]);
                furthest = furthest.max(vtimes().max().unwrap_or(0) - vtimes().min().unwrap_or(0));
            }
            Ok(furthest)
        };
        let (before, now) = (furthest_behind(false)?, furthest_behind(true)?);
        let widest = u64::from(cpus.min(*width.iter().max().expect("two VMs at least")));
        prop_assert!(now <= before + 4 * MS * widest, "{now} behind, without packing {before}");
    }
}
