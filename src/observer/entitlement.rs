// SPDX-License-Identifier: GPL-2.0-only
//! What each group is entitled to: its max-min fair share by weight, given
//! what it asked for and the caps above it.
//!
//! This is the yardstick the statistics hold a group's CPU time against. It
//! decides nothing: the scheduler has its own arithmetic in `bpf/policy/`, and
//! that the two agree is what the lab's tests are for.
//!
//! The share is found by water filling. Think of each group as a vessel as wide
//! as its weight and as high as its limit allows, and pour the capacity over
//! all of them at once: the level rises equally, full vessels drop out, and
//! what they do not take raises the level of the others. An example: capacity
//! 2000 ms, three groups of equal weight that ask for 100, 1500 and 2000 ms. An
//! equal part is 667 ms; the first is full at 100, so the other two divide
//! 1900 and get 950 each.
//!
//! Groups lie in one another as cgroups do, and each level divides what the one
//! above was given. A group's own tasks stand beside its child groups with the
//! weight of a cgroup that nobody configured.
//!
//! All amounts are nanoseconds of CPU time in one window, as `f64`: exact to
//! well below a nanosecond for windows of days.

use std::collections::BTreeSet;

/// The weight of a cgroup that nobody configured, and of a group's own tasks.
pub const WEIGHT_DEFAULT: u32 = 100;

/// What somebody asks for among equals.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Claim {
    /// Share against the others; only ratios matter. Zero asks for nothing.
    weight: u32,
    /// The most it can take.
    limit_ns: f64,
}

/// Divides `capacity_ns` between the claims; the result has their order.
///
/// Nobody gets more than its limit, and nothing is left over while somebody
/// could take it. Takes O(n log n).
fn divide(capacity_ns: f64, claims: &[Claim]) -> Vec<f64> {
    // The level at which a vessel is full. Those that fill first come first, so
    // that one pass suffices.
    let full_at = |i: usize| claims[i].limit_ns / f64::from(claims[i].weight);
    let mut order: Vec<usize> = (0..claims.len())
        .filter(|&i| claims[i].weight > 0 && claims[i].limit_ns > 0.0)
        .collect();
    order.sort_by(|&a, &b| full_at(a).total_cmp(&full_at(b)));

    let mut given = vec![0.0; claims.len()];
    let mut capacity_left = capacity_ns;
    let mut weight_left: f64 = order.iter().map(|&i| f64::from(claims[i].weight)).sum();
    for i in order {
        let weight = f64::from(claims[i].weight);
        let fair_part = capacity_left * weight / weight_left;
        given[i] = fair_part.min(claims[i].limit_ns).max(0.0);
        capacity_left -= given[i];
        weight_left -= weight;
    }
    given
}

/// One group of the hierarchy.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Group {
    /// The group above it, as an index into the same slice.
    pub parent: Option<usize>,
    /// Share against those beside it.
    pub weight: u32,
    /// CPU time its own tasks used or waited for.
    pub demand_ns: f64,
    /// CPU time its cap (cpu.max) allows it and all below it, if it has one.
    pub cap_ns: Option<f64>,
}

/// What the own tasks of each group are entitled to; the result has their order.
///
/// A group that is its own ancestor, which a torn reading of groups that come
/// and go can show, gets nothing.
pub fn entitlements_ns(capacity_ns: f64, groups: &[Group]) -> Vec<f64> {
    let tree = Tree::new(groups);
    let mut own = vec![0.0; groups.len()];
    let claims: Vec<Claim> = tree.roots.iter().map(|&root| tree.claim(root)).collect();
    let given = divide(capacity_ns, &claims);
    let mut to_divide: Vec<(usize, f64)> = tree.roots.iter().copied().zip(given).collect();

    while let Some((group, given_ns)) = to_divide.pop() {
        let mut claims = vec![Claim {
            weight: WEIGHT_DEFAULT,
            limit_ns: groups[group].demand_ns,
        }];
        claims.extend(tree.children[group].iter().map(|&child| tree.claim(child)));
        let parts = divide(given_ns, &claims);
        own[group] = parts[0];
        to_divide.extend(
            tree.children[group]
                .iter()
                .copied()
                .zip(parts[1..].to_vec()),
        );
    }
    own
}

/// Lowers the demands of groups that may not run on all CPUs: those that share a
/// set of CPUs (`cpus_of`, by group) cannot ask for more than the set has in
/// `length_ns`.
///
/// Smaller sets come first, so that what they leave is divided in the larger
/// ones around them. Exact where sets are equal, nested or apart, as cpusets
/// are, and those outside have other CPUs to run on; where sets overlap in
/// part, a bound from above.
pub fn bound_by_cpu_sets(
    length_ns: f64,
    cpus_of: &[Option<&BTreeSet<usize>>],
    groups: &mut [Group],
) {
    let mut sets: Vec<&BTreeSet<usize>> = cpus_of.iter().copied().flatten().collect();
    sets.sort_by_key(|set| (set.len(), *set));
    sets.dedup();
    for set in sets {
        let is_inside =
            |cpus: &Option<&BTreeSet<usize>>| cpus.is_some_and(|cpus| cpus.is_subset(set));
        let inside: Vec<bool> = cpus_of.iter().map(is_inside).collect();
        let mut alone = groups.to_vec();
        for (group, &inside) in alone.iter_mut().zip(&inside) {
            if !inside {
                group.demand_ns = 0.0;
            }
        }
        let bounds = entitlements_ns(length_ns * set.len() as f64, &alone);
        for ((group, inside), bound_ns) in groups.iter_mut().zip(inside).zip(bounds) {
            if inside {
                group.demand_ns = bound_ns;
            }
        }
    }
}

/// The hierarchy, with what each group and all below it can take.
struct Tree<'a> {
    groups: &'a [Group],
    roots: Vec<usize>,
    children: Vec<Vec<usize>>,
    limit_ns: Vec<f64>,
}

impl<'a> Tree<'a> {
    fn new(groups: &'a [Group]) -> Self {
        let mut tree = Self {
            groups,
            roots: Vec::new(),
            children: vec![Vec::new(); groups.len()],
            limit_ns: vec![0.0; groups.len()],
        };
        for (i, group) in groups.iter().enumerate() {
            match group.parent {
                Some(parent) => tree.children[parent].push(i),
                None => tree.roots.push(i),
            }
        }
        // Parents first; then limits are added up from the end.
        let mut order = tree.roots.clone();
        let mut next = 0;
        while next < order.len() {
            order.extend_from_slice(&tree.children[order[next]]);
            next += 1;
        }
        for &i in order.iter().rev() {
            let below: f64 = tree.children[i].iter().map(|&c| tree.limit_ns[c]).sum();
            let wanted_ns = groups[i].demand_ns + below;
            tree.limit_ns[i] = groups[i].cap_ns.map_or(wanted_ns, |cap| cap.min(wanted_ns));
        }
        tree
    }

    fn claim(&self, group: usize) -> Claim {
        Claim {
            weight: self.groups[group].weight,
            limit_ns: self.limit_ns[group],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MS: f64 = 1e6;
    /// A day on a host of a thousand CPUs.
    const MUCH_NS: f64 = 86_400e9 * 1000.0;

    fn group(parent: Option<usize>, weight: u32, demand_ns: f64) -> Group {
        Group {
            parent,
            weight,
            demand_ns,
            cap_ns: None,
        }
    }

    /// Equal but for the rounding of sums: a part in 10^12, or a nanosecond.
    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() <= 1.0 + a.abs().max(b.abs()) * 1e-12
    }

    #[test]
    fn nobody_asks_and_nobody_gets() {
        assert!(entitlements_ns(1000.0, &[]).is_empty());
    }

    #[test]
    fn the_example_of_the_module_text() {
        let groups = [100.0, 1500.0, 2000.0].map(|ms| group(None, 100, ms * MS));
        let got = entitlements_ns(2000.0 * MS, &groups);
        assert_eq!(got, [100.0 * MS, 950.0 * MS, 950.0 * MS]);
    }

    #[test]
    fn weights_divide_what_everybody_wants() {
        let groups = [100, 200, 400].map(|weight| group(None, weight, 2000.0 * MS));
        let got = entitlements_ns(700.0 * MS, &groups);
        assert_eq!(got, [100.0 * MS, 200.0 * MS, 400.0 * MS]);
    }

    #[test]
    fn what_a_cap_withholds_goes_to_the_others() {
        let capped = Group {
            cap_ns: Some(500.0 * MS),
            ..group(None, 100, 2000.0 * MS)
        };
        let got = entitlements_ns(2000.0 * MS, &[capped, group(None, 100, 2000.0 * MS)]);
        assert_eq!(got, [500.0 * MS, 1500.0 * MS]);
    }

    #[test]
    fn a_group_without_weight_gets_nothing() {
        let got = entitlements_ns(100.0, &[group(None, 0, 100.0), group(None, 1, 100.0)]);
        assert_eq!(got, [0.0, 100.0]);
    }

    #[test]
    fn vms_in_one_cgroup_share_its_weight() {
        // A root with a machine slice of weight 200, in which two VMs are, and
        // a system slice of weight 100.
        let groups = [
            group(None, 100, 0.0),
            group(Some(0), 200, 0.0),
            group(Some(0), 100, 2000.0 * MS),
            group(Some(1), 100, 2000.0 * MS),
            group(Some(1), 100, 2000.0 * MS),
        ];
        let got = entitlements_ns(600.0 * MS, &groups);
        assert_eq!(got, [0.0, 0.0, 200.0 * MS, 200.0 * MS, 200.0 * MS]);
    }

    #[test]
    fn a_cap_binds_all_below_it() {
        let groups = [
            group(None, 100, 0.0),
            Group {
                cap_ns: Some(300.0 * MS),
                ..group(Some(0), 100, 0.0)
            },
            group(Some(1), 100, 2000.0 * MS),
            group(Some(1), 200, 2000.0 * MS),
            group(Some(0), 100, 2000.0 * MS),
        ];
        let got = entitlements_ns(2000.0 * MS, &groups);
        let expected = [0.0, 0.0, 100.0 * MS, 200.0 * MS, 1700.0 * MS];
        assert!(
            got.iter().zip(expected).all(|(&a, b)| close(a, b)),
            "{got:?}"
        );
    }

    #[test]
    fn own_tasks_stand_beside_child_groups() {
        let groups = [group(None, 100, 2000.0), group(Some(0), 300, 2000.0)];
        assert_eq!(entitlements_ns(400.0, &groups), [100.0, 300.0]);
    }

    #[test]
    fn groups_that_are_their_own_ancestors_get_nothing() {
        let groups = [
            group(Some(1), 100, 100.0),
            group(Some(0), 100, 100.0),
            group(None, 100, 100.0),
        ];
        assert_eq!(entitlements_ns(400.0, &groups), [0.0, 0.0, 100.0]);
    }

    /// Groups of which each lies in one before it, or in none.
    fn hierarchy() -> impl Strategy<Value = Vec<Group>> {
        let any = (
            any::<prop::sample::Index>(),
            1u32..10_000,
            0.0..MUCH_NS,
            prop::option::of(0.0..MUCH_NS),
        );
        prop::collection::vec(any, 1..40).prop_map(|drawn| {
            let place = |(i, (above, weight, demand_ns, cap_ns)): (
                usize,
                (prop::sample::Index, u32, f64, Option<f64>),
            )| Group {
                parent: above.index(i + 1).checked_sub(1),
                weight,
                demand_ns,
                cap_ns,
            };
            drawn.into_iter().enumerate().map(place).collect()
        })
    }

    fn side_by_side() -> impl Strategy<Value = Vec<Group>> {
        hierarchy().prop_map(|mut groups| {
            groups.iter_mut().for_each(|group| group.parent = None);
            groups
        })
    }

    fn limit_ns(group: &Group) -> f64 {
        group.cap_ns.unwrap_or(f64::INFINITY).min(group.demand_ns)
    }

    proptest! {
        #[test]
        fn the_sum_is_the_capacity_or_all_that_can_be_taken(
            capacity_ns in 0.0..MUCH_NS,
            groups in hierarchy(),
        ) {
            let sum: f64 = entitlements_ns(capacity_ns, &groups).iter().sum();
            let tree = Tree::new(&groups);
            let takeable: f64 = tree.roots.iter().map(|&root| tree.limit_ns[root]).sum();
            prop_assert!(close(sum, capacity_ns.min(takeable)));
        }

        #[test]
        fn nobody_gets_more_than_it_demands(
            capacity_ns in 0.0..MUCH_NS,
            groups in hierarchy(),
        ) {
            for (&got, group) in entitlements_ns(capacity_ns, &groups).iter().zip(&groups) {
                let limit = limit_ns(group);
                prop_assert!(got >= 0.0 && (got <= limit || close(got, limit)));
            }
        }

        #[test]
        fn no_subtree_gets_more_than_its_cap(
            capacity_ns in 0.0..MUCH_NS,
            groups in hierarchy(),
        ) {
            let mut with_all_below = entitlements_ns(capacity_ns, &groups);
            // Each lies in one before it, so the last comes first here.
            for i in (0..groups.len()).rev() {
                if let Some(parent) = groups[i].parent {
                    with_all_below[parent] += with_all_below[i];
                }
                let cap_ns = groups[i].cap_ns.unwrap_or(f64::INFINITY);
                prop_assert!(with_all_below[i] <= cap_ns || close(with_all_below[i], cap_ns));
            }
        }

        #[test]
        fn equals_that_want_more_have_the_same_part_per_weight(
            capacity_ns in 0.0..MUCH_NS,
            groups in side_by_side(),
        ) {
            let got = entitlements_ns(capacity_ns, &groups);
            let per_weight = |i: usize| got[i] / f64::from(groups[i].weight);
            let highest = (0..groups.len()).map(per_weight).fold(0.0, f64::max);
            for i in 0..groups.len() {
                let content = close(got[i], limit_ns(&groups[i]));
                prop_assert!(content || close(per_weight(i), highest));
            }
        }

        #[test]
        fn a_higher_weight_never_gives_less(
            capacity_ns in 0.0..MUCH_NS,
            groups in side_by_side(),
            more in 1u32..10_000,
        ) {
            let before = entitlements_ns(capacity_ns, &groups);
            let mut heavier = groups.clone();
            heavier[0].weight += more;
            let after = entitlements_ns(capacity_ns, &heavier);
            prop_assert!(after[0] >= before[0] || close(after[0], before[0]));
            for i in 1..groups.len() {
                prop_assert!(after[i] <= before[i] || close(after[i], before[i]));
            }
        }
    }
}
