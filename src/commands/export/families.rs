// SPDX-License-Identifier: GPL-2.0-only
//! Which metrics `cohort export` has: names, units, labels, and from what field of a window each grows. What is said here
//! of a VM (`cohort_vm_…`) is true of a vCPU too (`cohort_vcpu_…`, with `--vcpus`).

use crate::observer::view::VcpuView;

/// Before every name.
pub const PREFIX: &str = "cohort";

/// A number that only grows.
pub struct Counter {
    /// What stands between `cohort_vm_` and the unit or `_total`.
    pub name: &'static str,
    /// One line for people.
    pub help: &'static str,
    /// Whether it counts seconds, which its name then says, and not events.
    pub in_seconds: bool,
    /// The label that tells its samples apart; empty if it has only one.
    pub label: &'static str,
    /// One, or one for each value of the label.
    pub samples: &'static [Sample],
}

/// One number of a [`Counter`].
pub struct Sample {
    /// Its value of the counter's label; empty if that has none.
    pub label_value: &'static str,
    /// The field of a window without which it cannot be had.
    pub field: &'static str,
    /// By how much it grew in a window: of what vCPUs did, and the sum of their time, s.
    pub gain: fn(&VcpuView, f64) -> f64,
}

/// How long something took, by powers of two.
pub struct Histogram {
    /// As of a counter.
    pub name: &'static str,
    /// As of a counter.
    pub help: &'static str,
    /// The field of a window: entry i counts what took less than 2^i us.
    pub field: &'static str,
    /// That field.
    pub buckets: fn(&VcpuView) -> &[u64],
    /// By how much the sum grew in a window, s; from the same as [`Sample::gain`].
    pub sum_s: fn(&VcpuView, f64) -> f64,
}

/// Upper ends of the buckets that are exported, as powers of two of us: 16 us to 1 s.
pub const EXPONENTS: [usize; 9] = [4, 6, 8, 10, 12, 14, 16, 18, 20];

const fn only(field: &'static str, gain: fn(&VcpuView, f64) -> f64) -> Sample {
    labelled("", field, gain)
}

const fn labelled(
    label_value: &'static str,
    field: &'static str,
    gain: fn(&VcpuView, f64) -> f64,
) -> Sample {
    Sample {
        label_value,
        field,
        gain,
    }
}

const fn events(
    label: &'static str,
    name: &'static str,
    help: &'static str,
    samples: &'static [Sample],
) -> Counter {
    Counter {
        name,
        help,
        in_seconds: false,
        label,
        samples,
    }
}

const fn seconds(
    label: &'static str,
    name: &'static str,
    help: &'static str,
    samples: &'static [Sample],
) -> Counter {
    Counter {
        in_seconds: true,
        ..events(label, name, help, samples)
    }
}

fn part_s(percent: f64, of_s: f64) -> f64 {
    percent / 100.0 * of_s
}

/// All counters that vCPUs have.
pub static COUNTERS: [Counter; 14] = [
    seconds(
        "state",
        "time",
        "Time of vCPUs by what they did: run (and not halted), ready (runnable without a CPU), limited (by a cap), halted, away",
        &[
            labelled("run", "run_pct", |v, s| part_s(v.run_pct, s)),
            labelled("ready", "ready_pct", |v, s| part_s(v.ready_pct, s)),
            labelled("limited", "limited_pct", |v, s| part_s(v.limited_pct, s)),
            labelled("halted", "halted_pct", |v, s| part_s(v.halted_pct, s)),
            labelled("away", "away_pct", |v, s| part_s(v.away_pct, s)),
        ],
    ),
    seconds(
        "",
        "cpu_usage",
        "CPU time of vCPUs in which they were not halted, also where HLT does not exit: what the guest uses",
        &[only("halted_pct", |v, s| part_s(v.run_pct, s))],
    ),
    seconds(
        "",
        "cpu_time",
        "CPU time that vCPUs had, with what they were halted on their CPUs where HLT does not exit",
        &[only("on_cpu_pct", |v, s| part_s(v.on_cpu_pct, s))],
    ),
    seconds(
        "",
        "halted_unread",
        "CPU time of which nobody knows whether it was halted, a part of run; where HLT does not exit",
        &[only("halted_unread_pct", |v, s| {
            part_s(v.halted_unread_pct, s)
        })],
    ),
    seconds(
        "",
        "entitled",
        "CPU time to which weights, caps and what all asked for entitled it",
        &[only("entitled_pct", |v, s| part_s(v.entitled_pct, s))],
    ),
    seconds(
        "",
        "halt_poll",
        "CPU time in which KVM polled for work after a halt, a part of run",
        &[only("poll_pct", |v, s| part_s(v.poll_pct, s))],
    ),
    seconds(
        "",
        "spin",
        "CPU time in which KVM looked whom to run in the place of a spinning vCPU, a part of run",
        &[only("spin_pct", |v, s| part_s(v.spin_pct, s))],
    ),
    seconds(
        "",
        "stacked",
        "Ready time behind a sibling while another CPU that it may use ran none of the VM",
        &[only("stacked_pct", |v, s| {
            part_s(v.stacked_pct, part_s(v.ready_pct, s))
        })],
    ),
    events(
        "",
        "spin_exits",
        "Times that a vCPU left the guest because it spins",
        &[only("spin_exits", |v, _| v.spin_exits as f64)],
    ),
    events(
        "outcome",
        "yields",
        "Directed yields that KVM offered: served, not_ready (the sibling ran or slept), refused (by the scheduler), \
             overtaken (another task ran next)",
        &[
            labelled("served", "yields_served", |v, _| v.yields_served as f64),
            labelled("not_ready", "yields_not_ready", |v, _| {
                v.yields_not_ready as f64
            }),
            labelled("refused", "yields_refused", |v, _| v.yields_refused as f64),
            labelled("overtaken", "yields_offered", |v, _| {
                let known = v.yields_served + v.yields_not_ready + v.yields_refused;
                v.yields_offered.saturating_sub(known) as f64
            }),
        ],
    ),
    events(
        "",
        "ipis",
        "Fixed IPIs that vCPUs sent to one sibling",
        &[only("ipis", |v, _| v.ipis as f64)],
    ),
    events(
        "",
        "wakeups",
        "Times that a vCPU woke up",
        &[only("wakeups", |v, _| v.wakeups as f64)],
    ),
    events(
        "cache",
        "migrations",
        "Times that a vCPU started on another CPU than it last ran on, with the same last-level cache or another",
        &[
            labelled("same", "migrations", |v, _| {
                v.migrations.saturating_sub(v.migrations_far) as f64
            }),
            labelled("other", "migrations_far", |v, _| v.migrations_far as f64),
        ],
    ),
    events(
        "mode",
        "preemptions",
        "Times that a vCPU was preempted, in guest kernel mode or elsewhere (user)",
        &[
            labelled("kernel", "preempted_kernel", |v, _| {
                v.preempted_kernel as f64
            }),
            labelled("user", "preempted_user", |v, _| v.preempted_user as f64),
        ],
    ),
];

/// All histograms that vCPUs have.
pub static HISTOGRAMS: [Histogram; 2] = [
    Histogram {
        name: "ready_wait",
        help: "Waits of vCPUs for a CPU",
        field: "ready_us",
        buckets: |v| &v.ready_us,
        sum_s: |v, s| part_s(v.ready_pct, s),
    },
    Histogram {
        name: "ipi_to_run",
        help: "From an IPI to a vCPU that waits for a CPU until it runs",
        field: "ipi_to_run",
        buckets: |v| &v.ipi_to_run,
        sum_s: |v, _| v.ipi_to_run_us as f64 / 1e6,
    },
];
