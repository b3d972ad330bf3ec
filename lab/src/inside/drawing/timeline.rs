// SPDX-License-Identifier: GPL-2.0-only
//! Who had which CPU when, from context switches. Not for how that is drawn.
use std::collections::BTreeMap;

use super::trace::{Recording, Switch};

/// A VM, and the threads that are its vCPUs.
#[derive(Clone, Debug, PartialEq)]
pub struct Vm {
    /// Its name, for people.
    pub name: String,
    /// Thread ids of its vCPUs.
    pub vcpu_tids: Vec<u32>,
}

/// Who has a CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Who {
    /// A vCPU of the VM with this index.
    Vm(usize),
    /// Any other thread.
    Other,
    /// Nobody.
    Idle,
    /// The CPU did not switch while it was recorded, so who had it all the time is not known.
    Unknown,
}

/// Somebody has a CPU from one moment to another, ns from the timeline's begin.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// From here on.
    pub from_ns: u64,
    /// Until here.
    pub until_ns: u64,
    /// Who has it.
    pub who: Who,
}

/// Who had which CPU in a stretch of lab time.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// What it shows: the scheduler.
    pub title: String,
    /// The stretch's length.
    pub length_ns: u64,
    /// The VMs that [`Who::Vm`] means.
    pub vms: Vec<Vm>,
    /// The CPUs with their spans, which leave no gap.
    pub cpus: Vec<(u32, Vec<Span>)>,
}

impl Timeline {
    /// Who had `cpus` in the stretch that was recorded.
    pub fn new(title: &str, recording: &Recording, cpus: &[u32], vms: Vec<Vm>) -> Self {
        let whose = Whose::new(&vms);
        let spans = |&cpu: &u32| (cpu, spans_of(cpu, recording, &whose));
        Self {
            title: title.to_owned(),
            length_ns: recording.length_ns,
            cpus: cpus.iter().map(spans).collect(),
            vms,
        }
    }

    /// Of the time in which a VM had any CPU, the part in which as many of its vCPUs ran as can at once: all of them or, if
    /// they are more than the CPUs, one on each. Of all VMs together; `None` if none had a CPU.
    pub fn side_by_side(&self) -> Option<f64> {
        let times = (0..self.vms.len()).map(|vm| self.times_of(vm));
        let (any_ns, all_ns) = times.fold((0, 0), |sum, vm| (sum.0 + vm.0, sum.1 + vm.1));
        (any_ns > 0).then(|| all_ns as f64 / any_ns as f64)
    }

    /// For how long any vCPU of the VM ran, and for how long as many as can at once.
    fn times_of(&self, vm: usize) -> (u64, u64) {
        let at_once = self.vms[vm].vcpu_tids.len().min(self.cpus.len());
        // How many more run from a moment on than before.
        let mut changes = BTreeMap::<u64, isize>::new();
        let spans = self.cpus.iter().flat_map(|(_, spans)| spans);
        for span in spans.filter(|span| span.who == Who::Vm(vm)) {
            *changes.entry(span.from_ns).or_default() += 1;
            *changes.entry(span.until_ns).or_default() -= 1;
        }
        let (mut any_ns, mut all_ns) = (0, 0);
        let (mut running, mut since_ns) = (0, 0);
        for (at_ns, change) in changes {
            if running > 0 {
                any_ns += at_ns - since_ns;
            }
            if running > 0 && running as usize >= at_once {
                all_ns += at_ns - since_ns;
            }
            running += change;
            since_ns = at_ns;
        }
        (any_ns, all_ns)
    }

    /// Each CPU's row of `columns` equal parts of the time, and who had the CPU longest in each.
    pub fn rows(&self, columns: usize) -> Vec<(u32, Vec<Who>)> {
        let column = |spans: &[Span], column: usize| {
            let edge = |column| (self.length_ns as u128 * column as u128 / columns as u128) as u64;
            longest(spans, edge(column), edge(column + 1))
        };
        let row = |spans: &[Span]| (0..columns).map(|index| column(spans, index)).collect();
        let rows = self.cpus.iter();
        rows.map(|(cpu, spans)| (*cpu, row(spans))).collect()
    }
}

/// Who has the CPU longest between two moments; of equals the first in order.
fn longest(spans: &[Span], from_ns: u64, until_ns: u64) -> Who {
    let mut times = BTreeMap::<Who, u64>::new();
    let first = spans.partition_point(|span| span.until_ns <= from_ns);
    for span in spans[first..]
        .iter()
        .take_while(|span| span.from_ns < until_ns)
    {
        let time_ns = span.until_ns.min(until_ns) - span.from_ns.max(from_ns);
        *times.entry(span.who).or_default() += time_ns;
    }
    let longest = times.into_iter().rev().max_by_key(|(_, time_ns)| *time_ns);
    longest.map_or(Who::Unknown, |(who, _)| who)
}

/// Whose a thread is.
struct Whose(BTreeMap<u32, usize>);

impl Whose {
    fn new(vms: &[Vm]) -> Self {
        let tids = vms.iter().enumerate();
        Self(
            tids.flat_map(|(index, vm)| vm.vcpu_tids.iter().map(move |tid| (*tid, index)))
                .collect(),
        )
    }

    fn who(&self, tid: u32) -> Who {
        match (tid, self.0.get(&tid)) {
            (0, _) => Who::Idle,
            (_, Some(vm)) => Who::Vm(*vm),
            (_, None) => Who::Other,
        }
    }
}

fn spans_of(cpu: u32, recording: &Recording, whose: &Whose) -> Vec<Span> {
    let switches = recording.switches.iter().filter(|it| it.cpu == cpu);
    let switches: Vec<&Switch> = switches.collect();
    let first = switches.first().map(|first| whose.who(first.from_tid));
    let mut spans = vec![Span {
        from_ns: 0,
        until_ns: recording.length_ns,
        who: first.unwrap_or(Who::Unknown),
    }];
    for switch in switches {
        let at_ns = switch.at_ns.saturating_sub(recording.from_ns);
        if at_ns < recording.length_ns {
            follow(&mut spans, at_ns, whose.who(switch.to_tid));
        }
    }
    spans
}

/// Lets `who` have the rest of the time from `at_ns` on.
fn follow(spans: &mut Vec<Span>, at_ns: u64, who: Who) {
    let Some(last) = spans.last_mut() else {
        return;
    };
    if last.who == who {
        return;
    }
    if last.from_ns == at_ns {
        last.who = who;
        return;
    }
    let until_ns = std::mem::replace(&mut last.until_ns, at_ns);
    spans.push(Span {
        from_ns: at_ns,
        until_ns,
        who,
    });
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// Two VMs of two vCPUs, with threads 11, 12 and 21, 22.
    pub fn vms() -> Vec<Vm> {
        [("vm1", [11, 12]), ("vm2", [21, 22])]
            .map(|(name, tids)| Vm {
                name: name.into(),
                vcpu_tids: tids.into(),
            })
            .into()
    }

    /// 10 ms on CPUs 1 and 2 with these switches: CPU, ms from the begin, from whom, to whom.
    pub fn timeline(switches: &[(u32, i64, u32, u32)]) -> Timeline {
        let from_ns = 1000 * MS;
        let switch = |&(cpu, at_ms, from_tid, to_tid): &(u32, i64, u32, u32)| Switch {
            cpu,
            at_ns: from_ns.saturating_add_signed(at_ms * MS as i64),
            from_tid,
            to_tid,
        };
        let recording = Recording {
            from_ns,
            length_ns: 10 * MS,
            switches: switches.iter().map(switch).collect(),
        };
        Timeline::new("stock scheduler", &recording, &[1, 2], vms())
    }

    fn spans(timeline: &Timeline, index: usize) -> Vec<(u64, u64, Who)> {
        let ms = |span: &Span| (span.from_ns / MS, span.until_ns / MS, span.who);
        timeline.cpus[index].1.iter().map(ms).collect()
    }

    #[test]
    fn spans_have_no_gaps_and_say_who() {
        let timeline = timeline(&[
            (1, 2, 11, 21),
            (3, 3, 11, 21),
            (1, 5, 21, 7),
            (1, 6, 7, 0),
            (1, 12, 0, 11),
        ]);
        assert_eq!(
            spans(&timeline, 0),
            [
                (0, 2, Who::Vm(0)),
                (2, 5, Who::Vm(1)),
                (5, 6, Who::Other),
                (6, 10, Who::Idle)
            ]
        );
    }

    #[test]
    fn switches_before_the_begin_tell_who_runs_then() {
        let before = timeline(&[(1, -5, 0, 11), (1, -2, 11, 22), (1, 4, 22, 11)]);
        assert_eq!(spans(&before, 0), [(0, 4, Who::Vm(1)), (4, 10, Who::Vm(0))]);
        let only_before = timeline(&[(1, -5, 0, 11)]);
        assert_eq!(spans(&only_before, 0), [(0, 10, Who::Vm(0))]);
    }

    #[test]
    fn a_cpu_without_switches_is_unknown() {
        assert_eq!(spans(&timeline(&[]), 1), [(0, 10, Who::Unknown)]);
    }

    #[test]
    fn switches_between_threads_of_one_owner_are_none() {
        let one = timeline(&[(2, 1, 11, 12), (2, 2, 12, 11), (2, 3, 11, 0)]);
        assert_eq!(spans(&one, 1), [(0, 3, Who::Vm(0)), (3, 10, Who::Idle)]);
    }

    #[test]
    fn a_column_is_whose_it_was_longest() {
        let timeline = timeline(&[(1, 1, 11, 21), (1, 4, 21, 0)]);
        // Of the first half vm2 has three parts of five, vm1 and nobody one each.
        let rows = timeline.rows(2);
        assert_eq!(rows[0], (1, vec![Who::Vm(1), Who::Idle]));
        assert_eq!(rows[1], (2, vec![Who::Unknown; 2]));
        let row = &timeline.rows(10)[0].1;
        let first = [Who::Vm(0), Who::Vm(1), Who::Vm(1), Who::Vm(1), Who::Idle];
        assert_eq!(row[..5], first);
    }

    #[test]
    fn side_by_side_is_the_part_of_a_vms_time_in_which_all_its_vcpus_run() {
        let in_step = timeline(&[(1, 5, 11, 21), (2, 5, 12, 22)]);
        assert_eq!(in_step.side_by_side(), Some(1.0));
        let out_of_step = timeline(&[(1, 5, 11, 21), (2, 5, 22, 12)]);
        assert_eq!(out_of_step.side_by_side(), Some(0.0));
        // vm1 runs for 6 ms, for 4 of them on both; vm2 for 6 ms and 4.
        let late = timeline(&[(1, 4, 11, 21), (2, 6, 12, 22)]);
        assert_eq!(late.side_by_side(), Some(8.0 / 12.0));
        assert_eq!(timeline(&[]).side_by_side(), None);
    }

    #[test]
    fn a_vm_wider_than_the_cpus_is_side_by_side_on_all_of_them() {
        let mut wide = timeline(&[(1, 5, 11, 0), (2, 5, 12, 0)]);
        wide.vms[0].vcpu_tids.push(13);
        assert_eq!(wide.side_by_side(), Some(1.0));
    }
}
