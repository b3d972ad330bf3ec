// SPDX-License-Identifier: GPL-2.0-only
//! Totals as text, in OpenMetrics or in the older format of Prometheus.

use super::families::{COUNTERS, EXPONENTS, HISTOGRAMS, PREFIX};
use super::totals::{HistogramTotals, Totals, VcpuTotals, VmTotals};
use crate::observer::view::HostView;
use crate::scheduler::metrics::{HostStats, MechanismStats};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// In which words numbers are written.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Format {
    /// OpenMetrics 1.0.
    OpenMetrics,
    /// The text format of Prometheus, version 0.0.4, for all that do not ask for the other.
    Prometheus,
}

impl Format {
    /// The one for a client that accepts `accept` (the HTTP header, if it sent one).
    pub fn accepted_by(accept: Option<&str>) -> Self {
        match accept {
            Some(accept) if accept.contains("application/openmetrics-text") => Format::OpenMetrics,
            _ => Format::Prometheus,
        }
    }

    /// As the HTTP header says it.
    pub fn content_type(self) -> &'static str {
        match self {
            Format::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Format::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// Totals, and how they are written.
pub struct Exposition {
    totals: Arc<Mutex<Totals>>,
    registry: Registry,
}

impl Exposition {
    /// Of no window yet, with series for each vCPU if asked for.
    pub fn new(with_vcpus: bool) -> Self {
        let totals = Arc::<Mutex<Totals>>::default();
        let shared = Shared {
            totals: Arc::clone(&totals),
            with_vcpus,
        };
        let mut registry = Registry::with_prefix(PREFIX);
        registry.register_collector(Box::new(shared));
        Self { totals, registry }
    }

    /// Adds a window, at whose end Cohort had counted `scheduler`.
    pub fn add(&self, window: HostView, scheduler: Option<HostStats>) {
        lock(&self.totals).add(window, scheduler);
    }

    /// All of it now.
    ///
    /// # Errors
    /// None that are known: it is written to memory.
    pub fn text(&self, format: Format) -> Result<String, fmt::Error> {
        let mut page = String::new();
        text::encode(&mut page, &self.registry)?;
        Ok(match format {
            Format::OpenMetrics => page,
            Format::Prometheus => without_openmetrics(&page),
        })
    }
}

fn lock(totals: &Mutex<Totals>) -> MutexGuard<'_, Totals> {
    // Whoever panicked has left numbers, if old ones.
    totals.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the library's interface asks for.
#[derive(Debug)]
struct Shared {
    totals: Arc<Mutex<Totals>>,
    with_vcpus: bool,
}

impl Collector for Shared {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let totals = lock(&self.totals);
        encode_host(&totals, &mut encoder)?;
        encode_vms(&totals, &mut encoder)?;
        encode_scheduler(&totals, &mut encoder)?;
        let vms = totals.vms.values().map(|vm| (vm.labels(), &vm.all));
        encode_vcpus(&totals, "vm", &vms.collect::<Vec<_>>(), &mut encoder)?;
        if !self.with_vcpus {
            return Ok(());
        }
        let vcpus = totals.vms.values().flat_map(|vm| {
            vm.vcpus.iter().map(|(number, vcpu)| {
                let vcpu_label = ("vcpu", number.to_string());
                (vm.labels_and(vcpu_label), vcpu)
            })
        });
        encode_vcpus(&totals, "vcpu", &vcpus.collect::<Vec<_>>(), &mut encoder)
    }
}

type Label = (&'static str, String);
type Labels = Vec<Label>;

impl VmTotals {
    /// The same in its whole life.
    fn labels(&self) -> Labels {
        vec![
            ("vm", self.label.clone()),
            ("name", self.identity.name.clone()),
        ]
    }

    fn labels_and(&self, another: Label) -> Labels {
        let mut labels = self.labels();
        labels.push(another);
        labels
    }
}

fn encode_host(totals: &Totals, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let host = &totals.host;
    let mut info = |name, help, labels: &[Labels]| {
        let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Info)?;
        labels
            .iter()
            .try_for_each(|labels| metric.encode_info(labels))
    };
    let version = String::from(env!("CARGO_PKG_VERSION"));
    info(
        "build",
        "The program that exports this",
        &[vec![("version", version)]],
    )?;
    info(
        "host_scheduler",
        "What schedules the host: a sched_ext scheduler, or stock",
        &[vec![("scheduler", host.scheduler.clone())]],
    )?;
    let blind_spots: Vec<Labels> = host
        .blind_spots
        .iter()
        .map(|sentence| vec![("reason", sentence.clone())])
        .collect();
    info(
        "host_blind_spot",
        "What KVM does and is not seen here, so that metrics of it are absent",
        &blind_spots,
    )?;
    let cpus = ConstGauge::new(i64::from(host.cpus));
    let help = "CPUs online";
    cpus.encode(encoder.encode_descriptor("host_cpus", help, None, MetricType::Gauge)?)?;
    let help = "Times that the observer was read; without that for long, the numbers are old";
    let readings = ConstCounter::new(totals.windows);
    readings.encode(encoder.encode_descriptor("readings", help, None, MetricType::Counter)?)
}

/// What VMs have and vCPUs have not.
fn encode_vms(totals: &Totals, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let help = "Whose VM it is: what names it as long as it lives, its name, process, manager, number or UUID, and owner";
    let mut metric = encoder.encode_descriptor("vm", help, None, MetricType::Info)?;
    for (tgid, vm) in &totals.vms {
        let identity = &vm.identity;
        let mut labels = vm.labels_and(("pid", tgid.to_string()));
        labels.extend([
            ("manager", identity.manager.clone()),
            ("id", identity.id.clone()),
            ("owner", identity.owner.clone()),
        ]);
        metric.encode_info(&labels)?;
    }
    let help = "vCPUs that were seen to run";
    let mut metric = encoder.encode_descriptor("vm_vcpus", help, None, MetricType::Gauge)?;
    for vm in totals.vms.values() {
        let labels = vm.labels();
        metric.encode_family(&labels)?.encode_gauge(&vm.nr_vcpus)?;
    }
    let taken = || {
        totals.vms.values().flat_map(|vm| {
            let labels = |by: &str| vm.labels_and(("by", by.to_owned()));
            vm.taken.iter().map(move |(by, taken)| (labels(by), taken))
        })
    };
    let help = "Times that a CPU was taken from a VM by a vm, a cgroup or the kernel";
    let mut metric = encoder.encode_descriptor("vm_taken", help, None, MetricType::Counter)?;
    for (labels, taken) in taken() {
        encode_counter(&mut metric.encode_family(&labels)?, taken.times as f64)?;
    }
    let help = "How long vCPUs waited for their CPU then";
    let seconds = Some(&Unit::Seconds);
    let mut metric =
        encoder.encode_descriptor("vm_taken_wait", help, seconds, MetricType::Counter)?;
    for (labels, taken) in taken() {
        encode_counter(&mut metric.encode_family(&labels)?, taken.ready_s)?;
    }
    Ok(())
}

/// What Cohort has counted since it took over.
fn encode_scheduler(totals: &Totals, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let Some(host) = &totals.scheduler else {
        return Ok(());
    };
    let mut family = |name, help, kind, rows: Vec<(Labels, u64)>| {
        let mut metric = encoder.encode_descriptor(name, help, None, kind)?;
        let encode = |mut metric: MetricEncoder<'_>, value: &u64| match kind {
            MetricType::Gauge => metric.encode_gauge(value),
            _ => encode_counter(&mut metric, *value as f64),
        };
        for (labels, value) in &rows {
            match labels.is_empty() {
                true => return encode(metric, value),
                false => encode(metric.encode_family(labels)?, value)?,
            }
        }
        Ok(())
    };
    let alone = |value| vec![(Labels::new(), value)];
    for (name, help, value) in [
        (
            "scheduler_groups_used",
            "VMs and cgroups that Cohort knows",
            host.groups_used,
        ),
        (
            "scheduler_groups_most",
            "VMs and cgroups that it can know",
            host.groups_most,
        ),
        (
            "scheduler_entities_used",
            "VMs and cgroups, counted in each cache domain in which they have tasks",
            host.entities_used,
        ),
        (
            "scheduler_entities_most",
            "How many of these there can be",
            host.entities_most,
        ),
    ] {
        family(name, help, MetricType::Gauge, alone(value))?;
    }
    for (name, help, value) in [
        (
            "scheduler_exhausted",
            "Times that one of these was missing, so that a task was not scheduled with its VM or cgroup; should be 0",
            host.exhausted,
        ),
        (
            "scheduler_stolen",
            "Tasks that a CPU took from another cache domain, and VMs that moved to another",
            host.stolen,
        ),
    ] {
        family(name, help, MetricType::Counter, alone(value))?;
    }
    let mechanisms = |value: fn(&MechanismStats) -> u64| {
        let row = |(name, stats): (&String, &MechanismStats)| {
            (vec![("mechanism", name.clone())], value(stats))
        };
        host.mechanisms.iter().map(row).collect()
    };
    let help = "Whether a mechanism is on (1) or off (0)";
    family(
        "scheduler_mechanism_on",
        help,
        MetricType::Gauge,
        mechanisms(|stats| stats.on),
    )?;
    let help = "Times that a mechanism changed who runs, or for how long";
    family(
        "scheduler_mechanism_effects",
        help,
        MetricType::Counter,
        mechanisms(|stats| stats.effects),
    )?;
    let missed = totals.scheduled().flat_map(|(vm, stats)| {
        let row =
            |(reason, &times): (&String, &u64)| (vm.labels_and(("reason", reason.clone())), times);
        stats.yields_missed.iter().map(row)
    });
    let help = "Directed yields that Cohort was offered and whose target did not run next, by reason; not_sibling should be 0";
    family(
        "vm_yields_missed",
        help,
        MetricType::Counter,
        missed.collect(),
    )?;
    let turns = totals.scheduled().flat_map(|(vm, stats)| {
        let partial = stats.turns_partial;
        [
            ("whole", stats.turns.saturating_sub(partial)),
            ("partial", partial),
        ]
        .map(|(outcome, times)| (vm.labels_and(("outcome", outcome.to_owned())), times))
    });
    let help = "Turns in which a VM wanted several CPUs: all that the plan gave it ran it (whole), or not (partial)";
    family("vm_turns", help, MetricType::Counter, turns.collect())
}

/// All counters and histograms of some vCPUs; `level` is what one row of `rows` is: a vm or a vcpu.
fn encode_vcpus(
    totals: &Totals,
    level: &str,
    rows: &[(Labels, &VcpuTotals)],
    encoder: &mut DescriptorEncoder<'_>,
) -> fmt::Result {
    for (index, counter) in COUNTERS.iter().enumerate() {
        let samples = counter.samples.iter().enumerate();
        let seen: Vec<_> = samples
            .filter(|(_, sample)| totals.host.has(sample.field))
            .collect();
        if seen.is_empty() {
            continue;
        }
        let name = format!("{level}_{}", counter.name);
        let unit = counter.in_seconds.then_some(&Unit::Seconds);
        let mut metric =
            encoder.encode_descriptor(&name, counter.help, unit, MetricType::Counter)?;
        for (labels, row) in rows {
            for &(place, sample) in &seen {
                if !row.has(sample.field) {
                    continue;
                }
                let mut labels = labels.clone();
                if !counter.label.is_empty() {
                    labels.push((counter.label, sample.label_value.to_owned()));
                }
                encode_counter(
                    &mut metric.encode_family(&labels)?,
                    row.counter(index)[place],
                )?;
            }
        }
    }
    for (index, histogram) in HISTOGRAMS.iter().enumerate() {
        if !totals.host.has(histogram.field) {
            continue;
        }
        let name = format!("{level}_{}", histogram.name);
        let seconds = Some(&Unit::Seconds);
        let mut metric =
            encoder.encode_descriptor(&name, histogram.help, seconds, MetricType::Histogram)?;
        for (labels, row) in rows {
            encode_histogram(&mut metric.encode_family(labels)?, row.histogram(index))?;
        }
    }
    Ok(())
}

fn encode_counter(metric: &mut MetricEncoder<'_>, value: f64) -> fmt::Result {
    metric.encode_counter::<Labels, f64, f64>(&value, None)
}

fn encode_histogram(metric: &mut MetricEncoder<'_>, totals: &HistogramTotals) -> fmt::Result {
    let ends_s = EXPONENTS.map(|exponent| (1_u64 << exponent) as f64 / 1e6);
    let buckets: Vec<(f64, u64)> = ends_s
        .into_iter()
        .chain([f64::INFINITY])
        .zip(totals.buckets)
        .collect();
    let count = totals.buckets.iter().sum();
    metric.encode_histogram::<Labels>(totals.sum_s, count, &buckets, None)
}

/// The same in the format of Prometheus: there counters and infos are named in full in their descriptions, infos are gauges,
/// and neither units nor an end are marked.
fn without_openmetrics(openmetrics: &str) -> String {
    let mut page = String::with_capacity(openmetrics.len());
    let mut help = "";
    for line in openmetrics.lines() {
        let words: Vec<&str> = line.splitn(4, ' ').collect();
        match words[..] {
            ["#", "HELP", _, text] => help = text,
            ["#", "TYPE", name, kind] => {
                let (suffix, kind) = match kind {
                    "counter" => ("_total", "counter"),
                    "info" => ("_info", "gauge"),
                    kind => ("", kind),
                };
                page += &format!("# HELP {name}{suffix} {help}\n# TYPE {name}{suffix} {kind}\n");
            }
            ["#", ..] => {}
            _ => {
                page += line;
                page.push('\n');
            }
        }
    }
    page
}

#[cfg(test)]
mod tests {
    use super::super::totals::fixture::{scheduler, window};
    use super::*;
    use crate::observer::view::HaltedBy;
    use std::collections::BTreeSet;

    const RULES: &str = include_str!("../../../deploy/prometheus/cohort.rules.yml");
    const DASHBOARD: &str = include_str!("../../../deploy/grafana/cohort.json");
    const MANUAL: &str = include_str!("../../../docs/export.md");

    fn page(format: Format, with_vcpus: bool) -> String {
        page_of(window(), format, with_vcpus)
    }

    fn page_of(window: HostView, format: Format, with_vcpus: bool) -> String {
        let exposition = Exposition::new(with_vcpus);
        exposition.add(window, Some(scheduler()));
        exposition.text(format).expect("it is written to memory")
    }

    fn has_line(page: &str, line: &str) {
        assert!(page.lines().any(|other| other == line), "{line}\n{page}");
    }

    #[test]
    fn names_have_units_and_label_values_are_escaped() {
        let page = page(Format::OpenMetrics, false);
        has_line(&page, "# TYPE cohort_vm_time_seconds counter");
        has_line(&page, "# UNIT cohort_vm_time_seconds seconds");
        has_line(
            &page,
            r#"cohort_vm_time_seconds_total{vm="u-7",name="db \"1\"",state="run"} 2.0"#,
        );
        has_line(
            &page,
            r#"cohort_vm_taken_wait_seconds_total{vm="u-7",name="db \"1\"",by="vm"} 1.5"#,
        );
        has_line(&page, r#"cohort_host_scheduler_info{scheduler="stock"} 1"#);
        assert!(page.ends_with("# EOF\n"));
    }

    #[test]
    fn what_cannot_be_had_is_absent_and_the_reason_is_there() {
        let page = page(Format::OpenMetrics, true);
        assert!(!page.contains("spin_exits_total") && !page.contains("spin_seconds"));
        has_line(
            &page,
            r#"cohort_host_blind_spot_info{reason="spin exits are not seen: as asked for"} 1"#,
        );
    }

    #[test]
    fn halted_time_is_absent_of_vms_of_which_it_cannot_be_had() {
        let halted = r#"cohort_vm_time_seconds_total{vm="u-7",name="db \"1\"",state="halted"} 0.0"#;
        let usage = r#"cohort_vm_cpu_usage_seconds_total{vm="u-7",name="db \"1\""} 2.0"#;
        let seen = whole_page();
        has_line(&seen, halted);
        has_line(&seen, usage);
        let mut window = window();
        let vm = window.vms.get_mut(&7).expect("it is there");
        vm.all.halted_by = HaltedBy::Unseen.word().to_owned();
        let page = page_of(window, Format::Prometheus, false);
        assert!(!page.contains(r#"state="halted""#) && !page.contains("cpu_usage_seconds_total{"));
        has_line(
            &page,
            r#"cohort_vm_time_seconds_total{vm="u-7",name="db \"1\"",state="run"} 2.0"#,
        );
    }

    #[test]
    fn vcpus_have_series_only_when_asked_for() {
        let line = r#"cohort_vcpu_time_seconds_total{vm="u-7",name="db \"1\"",vcpu="1",state="ready"} 0.5"#;
        has_line(&page(Format::OpenMetrics, true), line);
        assert!(!page(Format::OpenMetrics, false).contains("cohort_vcpu_"));
    }

    #[test]
    fn buckets_are_cumulative_and_end_with_all() {
        let page = page(Format::Prometheus, false);
        let bucket = |end: &str, count: u64| {
            let name = "cohort_vm_ready_wait_seconds_bucket";
            has_line(
                &page,
                &format!("{name}{{le=\"{end}\",vm=\"u-7\",name=\"db \\\"1\\\"\"}} {count}"),
            );
        };
        bucket("0.000016", 3);
        bucket("0.000064", 7);
        bucket("+Inf", 15);
    }

    #[test]
    fn what_cohort_counts_is_there_while_it_schedules() {
        let counted = page(Format::Prometheus, false);
        has_line(&counted, "cohort_scheduler_exhausted_total 2.0");
        has_line(&counted, "cohort_scheduler_groups_most 4096");
        has_line(
            &counted,
            r#"cohort_scheduler_mechanism_on{mechanism="ipi"} 1"#,
        );
        has_line(
            &counted,
            r#"cohort_scheduler_mechanism_effects_total{mechanism="ipi"} 5.0"#,
        );
        let vm = r#"vm="u-7",name="db \"1\"""#;
        has_line(
            &counted,
            &format!("cohort_vm_yields_missed_total{{{vm},reason=\"lost\"}} 3.0"),
        );
        has_line(
            &counted,
            &format!("cohort_vm_turns_total{{{vm},outcome=\"whole\"}} 6.0"),
        );
        has_line(
            &counted,
            &format!("cohort_vm_turns_total{{{vm},outcome=\"partial\"}} 4.0"),
        );
        let exposition = Exposition::new(false);
        exposition.add(window(), None);
        let stock = exposition
            .text(Format::Prometheus)
            .expect("it is written to memory");
        assert!(!stock.contains("cohort_scheduler_") && !stock.contains("vm_turns"));
    }

    #[test]
    fn without_openmetrics_counters_are_named_in_full() {
        let page = page(Format::Prometheus, false);
        has_line(&page, "# TYPE cohort_vm_time_seconds_total counter");
        has_line(&page, "# TYPE cohort_vm_info gauge");
        has_line(&page, "# TYPE cohort_host_cpus gauge");
        assert!(!page.contains("# UNIT") && !page.contains("# EOF"));
    }

    /// Of a host where everything is seen.
    fn whole_page() -> String {
        let mut window = window();
        window.unseen.clear();
        page_of(window, Format::Prometheus, true)
    }

    #[test]
    fn rules_and_dashboard_use_only_metrics_that_there_are() {
        let page = whole_page();
        let exported = page
            .lines()
            .filter_map(|line| line.split(['{', ' ']).next());
        let recorded = RULES
            .lines()
            .filter_map(|line| line.trim().strip_prefix("- record: "));
        let there: BTreeSet<&str> = exported.chain(recorded).collect();
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
        for text in [RULES, DASHBOARD] {
            let words = text.split(|c| !is_name(c));
            let metrics =
                words.filter(|word| word.starts_with("cohort_") || word.starts_with("cohort:"));
            let unknown: Vec<&str> = metrics.filter(|name| !there.contains(name)).collect();
            assert!(unknown.is_empty(), "{unknown:?}");
        }
    }

    #[test]
    fn the_manual_has_a_line_for_each_metric_of_a_vm_and_of_the_host() {
        for line in whole_page().lines() {
            let words: Vec<&str> = line.splitn(4, ' ').collect();
            if let ["#", "HELP", name, help] = words[..]
                && !name.starts_with("cohort_vcpu_")
            {
                let row = format!("| `{name}` | {help} |");
                assert!(MANUAL.lines().any(|line| line == row), "not there: {row}");
            }
        }
    }

    #[test]
    fn only_who_asks_for_openmetrics_gets_it() {
        let asked = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.3";
        assert_eq!(Format::accepted_by(Some(asked)), Format::OpenMetrics);
        assert_eq!(Format::accepted_by(Some("*/*")), Format::Prometheus);
        assert_eq!(Format::accepted_by(None), Format::Prometheus);
    }
}
