// SPDX-License-Identifier: GPL-2.0-only
//! Virtual time, shares, caps: single values, then what must hold for every value.

use cohort_policy::*;
use proptest::prelude::*;

const ONE: u64 = SHARE_ONE as u64;
const MS: u64 = 1_000_000;

fn child(share: u64, weight: u64, sum: u64) -> u64 {
    unsafe { fair_child_share(share, weight, sum) }
}
fn cost_of(used_ns: u64, share: u64) -> u64 {
    unsafe { fair_charge(used_ns, share) }
}
fn before(a: u64, b: u64) -> bool {
    unsafe { vtime_before(a, b) }
}
/// With a period of 100 of the unit that budgets are in here: a debt of ten million quotas is kept.
fn refill(budget: i64, quota: u64, burst: u64) -> i64 {
    unsafe { cap_refill(budget, quota, burst, 100) }
}
fn one_process_of(tgids: &[u64]) -> bool {
    let sum = tgids.iter().copied().fold(0u64, u64::wrapping_add);
    let squares = tgids
        .iter()
        .fold(0u64, |acc, t| acc.wrapping_add(t.wrapping_mul(*t)));
    unsafe { one_process(tgids.len() as u64, sum, squares) }
}

#[test]
fn the_worked_example_of_the_header_holds() {
    let a_vm = child(child(ONE, 100, 400), 100, 100);
    let b_vm = child(child(ONE, 300, 400), 100, 200);
    assert_eq!((a_vm, b_vm), (ONE / 4, ONE * 3 / 8));
    assert_eq!(
        (cost_of(3 * MS, a_vm), cost_of(3 * MS, b_vm)),
        (12 * MS, 8 * MS)
    );
}

#[test]
fn virtual_time_orders_across_a_wrap() {
    assert!(before(u64::MAX - 5, 3));
    assert!(!before(3, u64::MAX - 5));
    assert!(!before(7, 7));
}

#[test]
fn what_lies_ahead_of_a_clock_has_lasted_for_no_time() {
    let since = |then, now| unsafe { ns_since(then, now) };
    assert_eq!(since(2 * MS, 5 * MS), 3 * MS);
    assert_eq!(since(5 * MS, 5 * MS), 0);
    // Another CPU read its clock a moment later.
    assert_eq!(since(5 * MS, 5 * MS - 1), 0);
}

#[test]
fn a_group_that_is_not_counted_yet_reads_its_sum_as_if_it_were() {
    assert_eq!(child(ONE, 100, 0), ONE);
    assert_eq!(child(ONE, 200, 100), ONE);
}

fn average_of(average: u64, sum: u64, elapsed_ns: u64) -> u64 {
    unsafe { fair_average(average, sum, elapsed_ns) }
}

#[test]
fn a_short_task_hardly_moves_the_average_and_a_long_one_does() {
    let two = 200 * WEIGHT_SCALE as u64;
    let after_1_ms = average_of(two, 300, MS);
    assert!(after_1_ms > two && after_1_ms < 204 * WEIGHT_SCALE as u64);
    assert_eq!(
        average_of(two, 300, WEIGHT_TIME_NS as u64),
        300 * WEIGHT_SCALE as u64
    );
}

#[test]
fn a_cap_keeps_what_was_overdrawn_and_drops_what_was_not_used() {
    assert_eq!(refill(-3, 50, 0), 47);
    assert_eq!(refill(40, 50, 0), 50);
    assert_eq!(refill(40, 50, 20), 70);
}

#[test]
fn a_cap_never_makes_a_task_wait_longer_than_a_second_or_a_period() {
    let wait_ns = |quota: u64, period: u64| {
        let mut budget = i64::MIN / 2;
        let mut periods = 0;
        while budget <= 0 {
            budget = unsafe { cap_refill(budget, quota, 0, period) };
            periods += 1;
        }
        periods * period
    };
    assert!(wait_ns(MS, 100 * MS) <= 1_100 * MS);
    assert!(wait_ns(MS, 1_000 * MS) <= 2_000 * MS);
    assert!(wait_ns(MS, MS) <= 1_001 * MS);
}

#[test]
fn a_task_over_its_cap_stops_outside_the_kernel_or_where_its_cap_is_overdrawn_too_far() {
    let grace_ns = CAP_GRACE_NS as u64;
    let stops = |in_kernel, overdrawn_ns| unsafe { cap_stops(in_kernel, overdrawn_ns) };
    assert!(stops(false, 0));
    assert!(!stops(true, 0) && !stops(true, grace_ns - 1));
    assert!(stops(true, grace_ns));
}

#[test]
fn a_cgroup_of_one_process_is_told_from_one_of_two() {
    assert!(!one_process_of(&[]));
    assert!(one_process_of(&[4_194_303; 300]));
    assert!(!one_process_of(&[4_194_303, 4_194_302]));
}

/// Serves the group with the least virtual time for one slice, again and again, as dispatch does on one CPU.
fn serve(weights: &[u64], slices: usize) -> Vec<u64> {
    let sum = weights.iter().sum();
    let mut vtime = vec![0u64; weights.len()];
    let mut used = vec![0u64; weights.len()];
    for _ in 0..slices {
        let mut next = 0;
        for i in 1..vtime.len() {
            if before(vtime[i], vtime[next]) {
                next = i;
            }
        }
        used[next] += 4 * MS;
        vtime[next] += cost_of(4 * MS, child(ONE, weights[next], sum));
    }
    used
}

#[test]
fn a_part_of_a_share_is_never_none() {
    assert_eq!(unsafe { fair_part(3, 1, 4) }, 1);
    assert_eq!(unsafe { fair_part(ONE, 0, 0) }, ONE);
    assert_eq!(unsafe { fair_part(ONE, 1, 4) }, ONE / 4);
    assert_eq!(unsafe { fair_part(ONE, 3, 4) }, ONE / 4 * 3);
}

proptest! {
    /// What siblings used since they were charged; a little less, and never a slice for nothing, if another CPU charged one
    /// after this one had read its clock.
    #[test]
    fn what_is_not_charged_yet_is_what_was_used(now in 1u64 << 30..1 << 63, used in prop::collection::vec(-50_000i64..4_000_000, 0..1024)) {
        let running = used.iter().fold(0u64, |running, used| running.wrapping_add(unsafe { fair_runs(now.wrapping_add_signed(-used)) }));
        prop_assert_eq!(unsafe { fair_nr_running(running) }, used.len() as u32);
        let uncharged = unsafe { fair_uncharged(running, now, 4 * MS) };
        prop_assert_eq!(uncharged as i64, used.iter().sum::<i64>().max(0));
    }

    /// Tasks that start, are charged and stop leave nothing behind, whatever the order.
    #[test]
    fn who_stops_leaves_nothing(times in prop::collection::vec((any::<u64>(), any::<u64>()), 0..100)) {
        let mut running = 0u64;
        for (started, _) in &times {
            running = running.wrapping_add(unsafe { fair_runs(*started) });
        }
        for (started, charged) in times.iter().rev() {
            running = running.wrapping_add(unsafe { fair_runs(*charged).wrapping_sub(fair_runs(*started)) });
            prop_assert_eq!(unsafe { fair_nr_running(running) }, times.len() as u32);
        }
        for (_, charged) in &times {
            running = running.wrapping_sub(unsafe { fair_runs(*charged) });
        }
        prop_assert_eq!(running, 0);
    }

    #[test]
    fn an_average_moves_towards_the_sum_and_not_beyond(
        average in 0u64..1 << 34, sum in 0u64..1 << 24, elapsed_ns in 0u64..100 * MS
    ) {
        let target = sum * WEIGHT_SCALE as u64;
        let moved = average_of(average, sum, elapsed_ns);
        prop_assert!((average.min(target)..=average.max(target)).contains(&moved));
        prop_assert!(moved.abs_diff(target) <= average.abs_diff(target));
        if elapsed_ns >= WEIGHT_TIME_NS as u64 {
            prop_assert_eq!(moved, target);
        }
    }

    /// Always-ready groups get CPU time in the ratio of their weights, to within a slice each.
    #[test]
    fn time_follows_weight(weights in prop::collection::vec(1u64..=10_000, 2..8)) {
        let slices = 4_000;
        let used = serve(&weights, slices);
        let sum: u64 = weights.iter().sum();
        for (w, u) in weights.iter().zip(&used) {
            let fair = slices as f64 * 4e6 * *w as f64 / sum as f64;
            // One slice of its own, and as much again for what the others are late by.
            prop_assert!((*u as f64 - fair).abs() <= 4e6 * (1.0 + weights.len() as f64), "{used:?} for {weights:?}");
        }
    }

    /// The shares of all children of a parent add up to no more than the parent's, and miss it by rounding only.
    #[test]
    fn children_divide_their_parent(weights in prop::collection::vec(1u64..=10_000, 1..50), share in 1u64 << 12..=ONE) {
        let sum: u64 = weights.iter().sum();
        let total: u64 = weights.iter().map(|w| child(share, *w, sum)).sum();
        // A share is never 0, so tiny ones may round up by one each.
        prop_assert!(total <= share + weights.len() as u64);
        prop_assert!(total + weights.len() as u64 >= share);
    }

    /// Without a bound of its debt, virtual time is never lowered, and no more than the credit is left.
    #[test]
    fn sleep_earns_at_most_the_credit(vtime in 1u64 << 40..1 << 41, now in 1u64 << 40..1 << 41, credit in 0u64..1 << 30) {
        let settled = unsafe { fair_settle(vtime, now, credit, 1 << 41) };
        prop_assert!(!before(settled, vtime));
        prop_assert!(!before(settled, now - credit));
        prop_assert!(settled == vtime || settled == now - credit);
    }

    /// After a recent contest a group stands between credit and debt of the present.
    #[test]
    fn lag_is_bounded_both_ways(vtime: u64, now in 1u64 << 40..1 << 41, credit in 0u64..1 << 30, debt in 0u64..1 << 30) {
        let vtime = now.wrapping_add(vtime % (1 << 40)).wrapping_sub(1 << 39);
        let settled = unsafe { fair_settle(vtime, now, credit, debt) };
        prop_assert!(!before(settled, now - credit) && !before(now + debt, settled));
    }

    /// Tasks that wait for one CPU each have, together with the others of their group, its share: no less but for rounding,
    /// no more but for the least that a part is.
    #[test]
    fn the_parts_of_a_groups_tasks_are_its_share(share in 1u64..=ONE, apart in 0u32..10_000, together in 0u32..10_000) {
        let runnable = apart + together;
        let one = unsafe { fair_part(share, 1, runnable) };
        let others = unsafe { fair_part(share, together, runnable) };
        prop_assert!(one >= 1 && others >= 1 && one <= share && others <= share);
        let all = u64::from(apart) * one + if together > 0 { others } else { 0 };
        prop_assert!(all <= share + u64::from(runnable) + 1);
        prop_assert!(runnable == 0 || all + u64::from(runnable) >= share);
    }

    /// Uncontested time never carries a group beyond the present; contested time costs all of it.
    #[test]
    fn time_nobody_misses_is_free(vtime in 0u64..1 << 40, now in 0u64..1 << 40, cost in 0u64..1 << 30) {
        let free = unsafe { fair_cost(vtime, now, cost, false) };
        prop_assert!(free <= cost);
        prop_assert!(free == 0 || vtime + free <= now);
        prop_assert_eq!(unsafe { fair_cost(vtime, now, cost, true) }, cost);
    }

    /// Two groups never preempt each other for the same pair of virtual times.
    #[test]
    fn preemption_is_not_mutual(a in 0u64..1 << 60, b in 0u64..1 << 60, margin in 0u64..1 << 30) {
        let both = unsafe { fair_preempts(a, b, margin) && fair_preempts(b, a, margin) };
        prop_assert!(!both);
    }

    /// Over many periods a cap's group gets its quota a period, however much a tick overdraws each time.
    #[test]
    fn a_cap_holds_on_average(quota in 1_000u64..100_000, overdraws in prop::collection::vec(0u64..4_000, 100..200)) {
        let mut budget = quota as i64;
        let mut used = 0i64;
        for overdraw in &overdraws {
            if budget > 0 {
                used += budget + *overdraw as i64;
                budget = -(*overdraw as i64);
            }
            budget = refill(budget, quota, 0);
        }
        let allowed = (quota as usize * overdraws.len()) as i64;
        prop_assert!(used <= allowed + 4_000 && used >= allowed - quota as i64 - 4_000);
    }

    /// Threads of one process in any number are one process; a thread of another one is noticed.
    #[test]
    fn processes_are_told_apart(tgid in 1u64..1 << 22, other in 1u64..1 << 22, n in 1usize..500, at in 0usize..500) {
        let mut tgids = vec![tgid; n + 1];
        prop_assert!(one_process_of(&tgids));
        let at = at % tgids.len();
        tgids[at] = other;
        prop_assert_eq!(one_process_of(&tgids), other == tgid);
    }
}
