// SPDX-License-Identifier: GPL-2.0-only
//! The columns of numbers that `cohort watch` and `cohort top` show of a VM or a vCPU: heading, meaning, value.

use crate::observer::view::{HostView, VcpuView, quantile_us};
use crate::scheduler::metrics::percent;

/// One column.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Column {
    /// vCPUs counted.
    Vcpus,
    /// Running.
    Run,
    /// Runnable, waiting for a CPU.
    Ready,
    /// Runnable, stopped by a cap.
    Limited,
    /// Nothing to do in the guest.
    Halted,
    /// What it was entitled to run.
    Entitled,
    /// Asleep outside of the guest.
    Away,
    /// Pause-loop exits.
    Spins,
    /// Time in which KVM handles them.
    SpinTime,
    /// Directed yields offered.
    Yields,
    /// Of these: served.
    Served,
    /// Of these: declined by the scheduler.
    Refused,
    /// IPIs to waiting vCPUs until those ran, median.
    IpiMedian,
    /// The same, 99th percentile.
    IpiTail,
    /// Waits for a CPU, 99th percentile.
    ReadyTail,
    /// The longest wait.
    ReadyLongest,
    /// Starts on another CPU.
    Migrations,
    /// Of these: with another cache.
    MigrationsFar,
    /// Waiting behind siblings.
    Stacked,
    /// Polling for work after a halt.
    Poll,
    /// Wake-ups.
    Wakeups,
    /// Preemptions in guest kernel mode.
    PreemptedKernel,
    /// Preemptions elsewhere.
    PreemptedUser,
}

/// Where a column's number is found, and so how it is shown.
enum Value {
    /// A part, in percent.
    Percent(fn(&VcpuView) -> f64),
    /// Of the yields that were offered, in percent.
    OfYields(fn(&VcpuView) -> u64),
    /// A count, per second.
    Rate(fn(&VcpuView) -> u64),
    /// Of a histogram by powers of two of us: what this part of all is below.
    Quantile(fn(&VcpuView) -> &[u64], f64),
    /// Any other number.
    Plain(fn(&VcpuView) -> f64),
}

/// What people are told about a column.
pub struct About {
    value: Value,
    /// What stands above it.
    pub heading: &'static str,
    /// The field of JSON that it is made of.
    pub field: &'static str,
    /// What it says, in one line.
    pub meaning: &'static str,
    /// How it is measured.
    #[cfg_attr(not(test), expect(dead_code, reason = "docs/metrics.md has it"))]
    pub how: &'static str,
    /// From where on somebody should look; "-" where that depends on the guest.
    #[cfg_attr(not(test), expect(dead_code, reason = "docs/metrics.md has it"))]
    pub worrying: &'static str,
}

impl Column {
    /// All, the most asked for first.
    pub const ALL: [Column; 23] = [
        Column::Vcpus,
        Column::Run,
        Column::Ready,
        Column::Limited,
        Column::Halted,
        Column::Entitled,
        Column::Spins,
        Column::SpinTime,
        Column::Yields,
        Column::Served,
        Column::Refused,
        Column::IpiMedian,
        Column::IpiTail,
        Column::ReadyTail,
        Column::ReadyLongest,
        Column::Migrations,
        Column::MigrationsFar,
        Column::Stacked,
        Column::Poll,
        Column::Away,
        Column::Wakeups,
        Column::PreemptedKernel,
        Column::PreemptedUser,
    ];

    /// Those that can be had on the host of `view`.
    pub fn of(view: &HostView) -> Vec<Column> {
        let can_be_had = |column: &Column| view.has(column.about().field);
        Self::ALL.into_iter().filter(can_be_had).collect()
    }

    /// What stands above it.
    pub fn heading(self) -> &'static str {
        self.about().heading
    }

    /// What it says, in one line.
    pub fn meaning(self) -> &'static str {
        self.about().meaning
    }

    /// All that people are told about it.
    pub fn about(self) -> About {
        let about = |value, heading, field, meaning, how, worrying| About {
            value,
            heading,
            field,
            meaning,
            how,
            worrying,
        };
        match self {
            Column::Vcpus => about(
                Value::Plain(|vcpu| f64::from(vcpu.vcpus)),
                "VCPUS",
                "vcpus",
                "vCPUs",
                "threads that were inside KVM_RUN since the command was started",
                "-",
            ),
            Column::Run => about(
                Value::Percent(|vcpu| vcpu.run_pct),
                "%RUN",
                "run_pct",
                "running, in % of a CPU per vCPU",
                "on a CPU, from sched_switch to sched_switch, without the time in which that CPU was halted; halt polling is a part \
                 of it",
                "-",
            ),
            Column::Ready => about(
                Value::Percent(|vcpu| vcpu.ready_pct),
                "%RDY",
                "ready_pct",
                "runnable and waiting for a CPU, in % of the time",
                "from sched_wakeup or preemption until the thread runs",
                "above 5: guests notice; above 10: they complain",
            ),
            Column::Limited => about(
                Value::Percent(|vcpu| vcpu.limited_pct),
                "%MLMTD",
                "limited_pct",
                "runnable and stopped by a cap (cpu.max), in % of the time",
                "waiting while the kernel throttles its cgroup, or while Cohort holds it back for its cap",
                "above 0: its owner has bought too little, or the cap is wrong",
            ),
            Column::Halted => about(
                Value::Percent(|vcpu| vcpu.halted_pct),
                "%HALT",
                "halted_pct",
                "halted: the guest had nothing to do, in % of the time",
                "asleep in KVM's halt; where HLT or MWAIT do not exit, also on a CPU while that CPU's counter MPERF stood still \
                 (docs/halted.md)",
                "-",
            ),
            Column::Entitled => about(
                Value::Percent(|vcpu| vcpu.entitled_pct),
                "%ENT",
                "entitled_pct",
                "what it was entitled to run, in % of a CPU per vCPU",
                "max-min fair share by cpu.weight, cpu.max and affinity, given what all asked for; tasks that are no vCPUs count \
                 as having asked for what they got, as their waiting is not known",
                "on_cpu_pct below it by more than 5: others have its part",
            ),
            Column::Away => about(
                Value::Percent(|vcpu| vcpu.away_pct),
                "%AWAY",
                "away_pct",
                "its thread slept outside of the guest, in % of the time",
                "asleep elsewhere: in the VMM, on I/O that it does in the vCPU's thread, on a lock of the VMM",
                "above 5: the VMM is in the way",
            ),
            Column::Spins => about(
                Value::Rate(|vcpu| vcpu.spin_exits),
                "SPIN/s",
                "spin_exits",
                "exits to KVM because the vCPU spins (pause-loop exits), per second",
                "entries of kvm_vcpu_on_spin()",
                "above 1,000 per vCPU: locks or IPIs wait for vCPUs that do not run",
            ),
            Column::SpinTime => about(
                Value::Percent(|vcpu| vcpu.spin_pct),
                "%SPIN",
                "spin_pct",
                "KVM looked for a vCPU to run in its place, in % of the time; a part of %RUN",
                "on a CPU inside kvm_vcpu_on_spin(); one of eight of these exits is timed, and counts eight times; what the guest \
                 spins before it is stopped is not seen",
                "above 2",
            ),
            Column::Yields => about(
                Value::Rate(|vcpu| vcpu.yields_offered),
                "YIELD/s",
                "yields_offered",
                "directed yields: KVM offered to run a sibling in its place, per second",
                "calls of yield_to() for a vCPU",
                "-",
            ),
            Column::Served => about(
                Value::OfYields(|vcpu| vcpu.yields_served),
                "SERVED%",
                "yields_served",
                "of the yields offered: the sibling ran next, in %",
                "the next thread that the yielder's CPU ran was the target",
                "below 50, with many yields: spinning goes on",
            ),
            Column::Refused => about(
                Value::OfYields(|vcpu| vcpu.yields_refused),
                "REFUSD%",
                "yields_refused",
                "of the yields offered: the scheduler declined though the sibling waited, in %",
                "yield_to() returned that nothing was done; of yields neither served nor refused, the sibling ran or slept \
                 (yields_not_ready), or another thread ran next",
                "above 20, with many yields",
            ),
            Column::IpiMedian => about(
                Value::Quantile(|vcpu| &vcpu.ipi_to_run, 0.5),
                "IPIp50us",
                "ipi_to_run",
                "from an IPI to a waiting vCPU until it runs, median: less than so many us",
                "how long the receiver of a fixed IPI to one vCPU waits for a CPU; it begins when the IPI is sent, if the receiver \
                 waits already; or when that loses its CPU before it has answered; or when the IPI wakes it; it ends when the \
                 receiver runs; by powers of two",
                "above 1,000",
            ),
            Column::IpiTail => about(
                Value::Quantile(|vcpu| &vcpu.ipi_to_run, 0.99),
                "IPIp99us",
                "ipi_to_run",
                "the same, 99th percentile",
                "as IPIp50us",
                "above 10,000",
            ),
            Column::ReadyTail => about(
                Value::Quantile(|vcpu| &vcpu.ready_us, 0.99),
                "RDYp99us",
                "ready_us",
                "waits for a CPU, 99th percentile: less than so many us",
                "lengths of the single waits that %RDY sums up; by powers of two",
                "above 20,000",
            ),
            Column::ReadyLongest => about(
                Value::Plain(|vcpu| vcpu.longest_ready_us as f64),
                "RDYmaxus",
                "longest_ready_us",
                "longest wait for a CPU since the command was started, in us",
                "the longest of these waits",
                "above 50,000",
            ),
            Column::MigrationsFar => about(
                Value::Rate(|vcpu| vcpu.migrations_far),
                "FARMG/s",
                "migrations_far",
                "of the migrations (MIGR/s): to a CPU with another last-level cache, per second",
                "the two CPUs share no last-level cache",
                "above 10 per vCPU",
            ),
            Column::Migrations => about(
                Value::Rate(|vcpu| vcpu.migrations),
                "MIGR/s",
                "migrations",
                "starts on another CPU than before, per second",
                "at sched_switch to the thread",
                "above 1,000 per vCPU",
            ),
            Column::Stacked => about(
                Value::Percent(|vcpu| vcpu.stacked_pct),
                "STACKED%",
                "stacked_pct",
                "of the ready time: behind a sibling while another CPU ran none of the VM, in %",
                "when it gets a CPU on which a sibling ran just before: how long that ran and this one waited, if fewer siblings run \
                 than it may use CPUs",
                "above 5",
            ),
            Column::Poll => about(
                Value::Percent(|vcpu| vcpu.poll_pct),
                "%POLL",
                "poll_pct",
                "KVM polled for work after a halt, in % of the time; a part of %RUN",
                "KVM's own counters halt_poll_success_ns and halt_poll_fail_ns",
                "above 10, with others waiting: lower halt_poll_ns",
            ),
            Column::Wakeups => about(
                Value::Rate(|vcpu| vcpu.wakeups),
                "WAKE/s",
                "wakeups",
                "wake-ups per second",
                "from halted or away to ready",
                "-",
            ),
            Column::PreemptedKernel => about(
                Value::Rate(|vcpu| vcpu.preempted_kernel),
                "PRKRN/s",
                "preempted_kernel",
                "preemptions in guest kernel mode, per second",
                "sched_switch away from a thread that could go on; KVM tells the guest's mode",
                "above 100 per vCPU: lock holders are among them",
            ),
            Column::PreemptedUser => about(
                Value::Rate(|vcpu| vcpu.preempted_user),
                "PRUSR/s",
                "preempted_user",
                "preemptions in guest user mode or outside of the guest, per second",
                "as PRKRN/s",
                "-",
            ),
        }
    }

    /// Its value in a window of `seconds`; what has not happened has no time and no part.
    pub fn value(self, vcpu: &VcpuView, seconds: f64) -> Option<f64> {
        let about = self.about();
        match about.value {
            Value::Percent(of) => vcpu.has(about.field).then(|| of(vcpu)),
            Value::OfYields(of) => {
                let offered = vcpu.yields_offered;
                (offered > 0).then(|| percent(of(vcpu) as f64, offered as f64))
            }
            Value::Rate(of) => Some(of(vcpu) as f64 / seconds.max(1e-3)),
            Value::Quantile(of, part) => quantile_us(of(vcpu), part).map(|us| us as f64),
            Value::Plain(of) => Some(of(vcpu)),
        }
    }

    /// The value as it is shown; "-" for none.
    pub fn text(self, vcpu: &VcpuView, seconds: f64) -> String {
        let Some(value) = self.value(vcpu, seconds) else {
            return String::from("-");
        };
        match self.about().value {
            Value::Percent(_) | Value::OfYields(_) => format!("{value:.1}"),
            Value::Quantile(..) => format!("<{value:.0}"),
            Value::Rate(_) | Value::Plain(_) => format!("{value:.0}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observer::view::{OffCpuView, PressureView, TakerView, VmView};
    use scx_stats::Meta;
    use std::fmt::Write as _;

    const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/metrics.md");

    const NOT_THERE: &str = "\
## What is not there

- What a guest spins before it is stopped. A pause-loop exit comes only after the time that the host has set (`ple_window`), and
  never where PAUSE does not exit. %SPIN is only what the host does after the exit.
- Time that a cap takes under another sched_ext scheduler than Cohort. It counts as %RDY.

## How true it is

Two suites of tests compare these numbers with others that do not come from the observer, the part of Cohort that counts them.

| number | compared with | difference | suite |
|---|---|---|---|
| halted time | guests that work and halt by a script, in cycles of 100 us to 1 s where HLT does not exit, of 10 ms to 1 s where it does | at most 1 % of the time | `halted` |
| running and halted time | a guest's own clock | at most 2 % | `observe` |
| running time | /proc/PID/schedstat | at most 2 % | `observe` |
| running time | cpu.stat | at most 1 % | `observe` |
| ready and limited time together | the kernel's run_delay | at most 2 % | `observe` |
| the time from an IPI until its receiver runs | the guests' stamps | at most 2 % | `observe` |
| who took CPUs | a tracepoint | none | `observe` |
| spin exits | a tracepoint | none, but for exits for which the kernel skipped the counting program, as a thread was preempted inside it: at most one in a thousand, and the kernel counts these | `observe` |
";

    /// The page of docs/ about all columns.
    fn page() -> String {
        let mut page = String::from(
            "# What `cohort watch` and `cohort top` show\n\n\
             Written from `src/text/columns.rs`; do not edit it (`COHORT_WRITE_DOCS=1 cargo test` writes it anew).\n\n\
             Counts and rates of a VM are sums over its vCPUs, percentages are means. JSON (`cohort watch --json`) holds counts\n\
             where tables hold rates. It holds histograms where tables hold quantiles: entry i counts what took less than 2^i us\n\
             and is in no entry before. What cannot be seen on a host has neither column nor field there; `unseen` lists these\n\
             fields, and the reason stands above the table (`blind_spots`). \"-\" means that nothing of the kind happened, or that\n\
             the number cannot be had of this VM. Worrying values are rules of thumb for a host whose VMs are meant to be\n\
             responsive. A sibling is a vCPU of the same VM; to wait is to be runnable without a CPU.\n\n\
             | column | JSON field | meaning | how it is measured | worrying |\n|---|---|---|---|---|\n",
        );
        for column in Column::ALL {
            let about = column.about();
            let _ = writeln!(
                page,
                "| {} | `{}` | {} | {} | {} |",
                about.heading, about.field, about.meaning, about.how, about.worrying
            );
        }
        page += "\n## Fields of JSON without a column\n\n\
                 A VM also has `vcpus`, each of its vCPUs by its number in the VM. `longest_off_cpu` and `takers` also have\n\
                 `ready_us`: how long was waited for a CPU, in microseconds (a number, not the histogram of the table above).\n\n";
        let has_column = |name: &str| {
            Column::ALL
                .iter()
                .any(|column| column.about().field == name)
        };
        for (what, meta) in [
            ("of a vCPU, or of all of a VM (`all`)", VcpuView::meta()),
            ("of a VM", VmView::meta()),
            (
                "of the longest stretch without a CPU (`longest_off_cpu`)",
                OffCpuView::meta(),
            ),
            ("of whom took CPUs from it (`takers`)", TakerView::meta()),
            ("of the host", HostView::meta()),
            ("of the host's pressure (`pressure`)", PressureView::meta()),
        ] {
            let _ = writeln!(page, "| {what} | |\n|---|---|");
            for (name, field) in meta.fields {
                if !has_column(&name) {
                    let _ = writeln!(
                        page,
                        "| `{name}` | {} |",
                        field.attrs.desc.unwrap_or_default()
                    );
                }
            }
            page += "\n";
        }
        page + NOT_THERE
    }

    #[test]
    fn the_page_in_docs_says_what_the_code_says() {
        if std::env::var_os("COHORT_WRITE_DOCS").is_some() {
            std::fs::write(PAGE, page()).expect("docs/ can be written");
        }
        let written = std::fs::read_to_string(PAGE).expect("docs/metrics.md is there");
        assert_eq!(
            written,
            page(),
            "write it anew: COHORT_WRITE_DOCS=1 cargo test"
        );
    }

    #[test]
    fn json_has_each_field() {
        let json = serde_json::to_value(VcpuView::default()).expect("it is plain data");
        for column in Column::ALL {
            let field = column.about().field;
            assert!(json.get(field).is_some(), "{field}");
        }
    }

    #[test]
    fn what_did_not_happen_has_no_time_and_no_part() {
        let nothing = VcpuView::default();
        for column in [Column::Served, Column::IpiMedian, Column::ReadyTail] {
            assert_eq!(column.text(&nothing, 1.0), "-");
        }
        assert_eq!(Column::Spins.text(&nothing, 1.0), "0");
    }

    #[test]
    fn counts_are_per_second_and_parts_in_percent() {
        let vcpu = VcpuView {
            spin_exits: 30,
            yields_offered: 8,
            yields_served: 6,
            run_pct: 33.33,
            ..VcpuView::default()
        };
        assert_eq!(Column::Spins.text(&vcpu, 2.0), "15");
        assert_eq!(Column::Served.text(&vcpu, 2.0), "75.0");
        assert_eq!(Column::Run.text(&vcpu, 2.0), "33.3");
    }

    #[test]
    fn no_two_columns_have_the_same_heading() {
        let mut headings = Column::ALL.map(Column::heading).to_vec();
        headings.sort_unstable();
        headings.dedup();
        assert_eq!(headings.len(), Column::ALL.len());
    }
}
