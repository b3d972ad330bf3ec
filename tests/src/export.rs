// SPDX-License-Identifier: GPL-2.0-only
//! `cohort export`, scraped by a real Prometheus while VMs come and go, with the rules and the dashboard of deploy/.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use cohort::process::exit::Exit;
use cohort::process::wait::wait_for;
use cohort_lab::inside::process::start;
use cohort_micro::Spec;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tempfile::TempDir;

use crate::Test;
use crate::host::{
    Guest, HOST_CPU, HostLoad, PATIENCE, Service, busy, dozing, lab, refused, refused_without_root,
    start_cohort, start_until_ready, stop_cohort, vm_stats,
};

pub const TESTS: &[Test] = &[
    (
        "both_formats_are_what_promtool_and_prometheus_expect",
        formats,
    ),
    (
        "what_cohort_counts_is_exported_while_it_schedules",
        scheduler,
    ),
    (
        "halted_time_that_cannot_be_had_is_absent_and_the_reason_is_there",
        halted,
    ),
    ("the_rules_say_what_their_tests_demand", rules),
    (
        "prometheus_sees_vms_come_and_go_and_tells_of_one_that_starves_until_it_does_not",
        scraped,
    ),
    ("whatever_is_wrong_is_said_in_a_sentence", wrong_input),
];

const ADDRESS: &str = "127.0.0.1:9745";
const PROMETHEUS: &str = "127.0.0.1:9090";
const RULES: &str = include_str!("../../deploy/prometheus/cohort.rules.yml");
const RULES_TEST: &str = include_str!("../../deploy/prometheus/cohort.rules.test.yml");
const DASHBOARD: &str = include_str!("../../deploy/grafana/cohort.json");

/// `cohort export`, once it serves.
fn export(options: &[&str]) -> Result<Service> {
    let mut command = Command::new("cohort");
    command.arg("export").args(options);
    Ok(start_until_ready(command, &[HOST_CPU], "cohort export")?.0)
}

/// What `url` answers with `query`.
fn get(url: &str, query: &[(&str, &str)], accept: &str) -> Result<String> {
    let request = ureq::get(url).header("Accept", accept);
    let request = query
        .iter()
        .fold(request, |request, (name, value)| request.query(name, value));
    let mut answer = request.call().with_context(|| format!("GET {url}"))?;
    Ok(answer.body_mut().read_to_string()?)
}

fn scrape(accept: &str) -> Result<String> {
    get(&format!("http://{ADDRESS}/metrics"), &[], accept)
}

/// A VM that runs is in the page.
pub fn shows_a_vm() -> Result<()> {
    let _export = export(&[])?;
    let guest = dozing("shown", 2)?;
    wait_for("the VM in the page", PATIENCE, || {
        Ok(label_of(&scrape("text/plain")?, guest.micro.pid()))
    })?;
    Ok(())
}

/// The value of the series that begins with `name` and has all of `labels`, in the older format.
fn value_of(page: &str, name: &str, labels: &[&str]) -> Result<f64> {
    let is_it = |line: &&str| {
        line.starts_with(&format!("{name}{{")) && labels.iter().all(|label| line.contains(label))
    };
    let line = page.lines().find(is_it);
    let line = line.with_context(|| format!("there is no {name} with {labels:?}"))?;
    Ok(line.rsplit(' ').next().context("it has a value")?.parse()?)
}

/// What names the VM of process `pid`: its label `vm`.
fn label_of(page: &str, pid: i32) -> Option<String> {
    let line = page
        .lines()
        .filter(|line| line.starts_with("cohort_vm_info{"))
        .find(|line| line.contains(&format!("pid=\"{pid}\"")))?;
    let label = line.split("vm=\"").nth(1)?.split('"').next()?;
    Some(label.to_owned())
}

fn promtool(arguments: &[&str], input: &str) -> Result<String> {
    let mut promtool = Command::new("promtool")
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("promtool")?;
    let mut stdin = promtool.stdin.take().context("its input is piped")?;
    stdin.write_all(input.as_bytes())?;
    drop(stdin);
    let output = promtool.wait_with_output()?;
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    ensure!(output.status.success(), "promtool {arguments:?}: {said}");
    Ok(said)
}

/// The files of deploy/prometheus, in a folder.
fn rule_files() -> Result<TempDir> {
    let folder = tempfile::tempdir()?;
    fs::write(folder.path().join("cohort.rules.yml"), RULES)?;
    fs::write(folder.path().join("cohort.rules.test.yml"), RULES_TEST)?;
    Ok(folder)
}

/// Of a VM whose HLT does not exit, beside one whose HLT does. The fast machine has no MPERF.
fn halted() -> Result<()> {
    let spec = |name| Spec::new(name).vcpu("loop: compute 1ms; sleep 20ms");
    let guests = [
        Guest::start(&spec("passed-through").hlt_passthrough())?,
        Guest::start(&spec("exits"))?,
    ];
    let _export = export(&[])?;
    let page = wait_for("both VMs", PATIENCE, || {
        let page = scrape("text/plain")?;
        let seen = |guest: &Guest| label_of(&page, guest.micro.pid()).is_some();
        Ok(guests.iter().all(seen).then_some(page))
    })?;
    let has = |guest: &Guest, name: &str, labels: &[&str]| -> Result<bool> {
        let label = label_of(&page, guest.micro.pid()).context("it was seen")?;
        let vm = format!("vm=\"{label}\"");
        Ok(value_of(&page, name, &[&[vm.as_str()], labels].concat()).is_ok())
    };
    let can_be_had = Path::new("/sys/bus/event_source/devices/msr/events/mperf").exists();
    println!("    MPERF can be had: {can_be_had}");
    for (guest, expected) in guests.iter().zip([can_be_had, true]) {
        let time = "cohort_vm_time_seconds_total";
        ensure!(has(guest, time, &["state=\"halted\""])? == expected);
        ensure!(has(guest, "cohort_vm_cpu_usage_seconds_total", &[])? == expected);
        ensure!(has(guest, time, &["state=\"run\""])?);
        ensure!(has(guest, "cohort_vm_cpu_time_seconds_total", &[])?);
    }
    let mut spots = page
        .lines()
        .filter(|line| line.contains("blind_spot_info{"));
    let spot = spots.find(|line| line.contains("halted time") && line.contains("MPERF"));
    println!("    {}", spot.unwrap_or("nothing is said"));
    ensure!(spot.is_none() == can_be_had, "the reason is not there");
    Ok(())
}

/// Of a VM that runs, with series for vCPUs. CPU time is what its cgroup counts.
fn formats() -> Result<()> {
    const WINDOW: Duration = Duration::from_secs(5);
    let guest = Guest::busy("busy", 2)?;
    let pid = guest.micro.pid();
    let _export = export(&["--vcpus"])?;
    let page = || scrape("text/plain");
    let name = wait_for("the VM with both vCPUs", PATIENCE, || {
        let page = page()?;
        let whole = page.contains("vcpu=\"1\"");
        Ok(label_of(&page, pid).filter(|_| whole))
    })?;
    let vm = format!("vm=\"{name}\"");
    let read = || -> Result<(f64, f64, f64)> {
        let page = page()?;
        let name = "cohort_vm_time_seconds_total";
        let run_s = value_of(&page, name, &[&vm, "state=\"run\""])?;
        let name = "cohort_vcpu_time_seconds_total";
        let of_vcpu_s = value_of(&page, name, &[&vm, "vcpu=\"1\"", "state=\"run\""])?;
        Ok((run_s, of_vcpu_s, guest.cgroup().usage_us()? as f64 / 1e6))
    };
    // Who asks again at once gets old numbers.
    sleep(Duration::from_secs(1));
    let before = read()?;
    sleep(WINDOW);
    let after = read()?;
    let (seen_s, truth_s) = (after.0 - before.0, after.2 - before.2);
    println!("    the VM ran {seen_s:.3} s, its cgroup counts {truth_s:.3} s");
    ensure!((seen_s / truth_s - 1.0).abs() < 0.02, "they differ");
    let part = (after.1 - before.1) / seen_s;
    ensure!(
        (part - 0.5).abs() < 0.02,
        "one of its two vCPUs has {part} of that"
    );

    let text = page()?;
    println!(
        "    promtool: {:?}",
        promtool(&["check", "metrics"], &text)?
    );
    let openmetrics = scrape("application/openmetrics-text; version=1.0.0")?;
    ensure!(openmetrics.ends_with("# EOF\n"), "it has no end");
    ensure!(
        openmetrics.contains("# UNIT cohort_vm_time_seconds seconds"),
        "it has no units"
    );
    Ok(())
}

/// The page has what `cohort stats` has, and nothing of it before and after.
fn scheduler() -> Result<()> {
    let spins = Spec::new("spins")
        .vcpu("loop: lock; compute 50us; unlock")
        .vcpu("loop: lock; compute 50us; unlock");
    let guests = [Guest::start(&spins)?, Guest::busy("busy", 2)?];
    let pid = guests[0].micro.pid();
    let _export = export(&[])?;
    let page = || scrape("text/plain");
    let is_there =
        |page: &str| page.contains("cohort_scheduler_") || page.contains("cohort_vm_turns");
    let label = wait_for("the VM", PATIENCE, || Ok(label_of(&page()?, pid)))?;
    ensure!(!is_there(&page()?), "Cohort does not schedule yet");
    let cohort = start_cohort()?;
    let vm = format!("vm=\"{label}\"");
    let counted = wait_for("turns of the VM", PATIENCE, || {
        let page = page()?;
        let whole = value_of(&page, "cohort_vm_turns_total", &[&vm, "outcome=\"whole\""]);
        Ok(whole.is_ok_and(|whole| whole > 10.0).then_some(page))
    })?;
    for line in counted.lines() {
        if line.contains("cohort_scheduler_") && !line.starts_with('#')
            || line.contains("yields_missed_total{")
        {
            println!("    {line}");
        }
    }
    let stats = vm_stats(pid as u32)?;
    let turns = |outcome: &str| value_of(&counted, "cohort_vm_turns_total", &[&vm, outcome]);
    let exported = turns("outcome=\"whole\"")? + turns("outcome=\"partial\"")?;
    println!(
        "    {exported} turns are exported, a moment later there were {}",
        stats.turns
    );
    ensure!(exported <= stats.turns as f64 && exported > 0.0);
    ensure!(
        counted
            .lines()
            .any(|line| line == "cohort_scheduler_exhausted_total 0.0"),
        "its tables are full"
    );
    let mechanism = value_of(
        &counted,
        "cohort_scheduler_mechanism_on",
        &["mechanism=\"cohorts\""],
    )?;
    ensure!(mechanism == 1.0, "it is on");
    stop_cohort(cohort)?;
    wait_for("a page without what Cohort counted", PATIENCE, || {
        Ok((!is_there(&page()?)).then_some(()))
    })
}

fn rules() -> Result<()> {
    let folder = rule_files()?;
    let path = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
    for arguments in [
        ["check", "rules", &path("cohort.rules.yml")],
        ["test", "rules", &path("cohort.rules.test.yml")],
    ] {
        println!(
            "    {}",
            promtool(&arguments, "")?.trim().replace('\n', " ")
        );
    }
    Ok(())
}

/// A Prometheus that scrapes `cohort export` every other second and evaluates the rules of deploy/, with shorter times.
struct Prometheus {
    _process: Service,
    _folder: TempDir,
}

impl Prometheus {
    fn start() -> Result<Self> {
        let folder = rule_files()?;
        let rules = folder.path().join("cohort.rules.yml");
        let quick = RULES
            .replace("[5m]", "[10s]")
            .replace("[1h]", "[1m]")
            .replace("for: 10m", "for: 3s");
        fs::write(&rules, quick)?;
        let configuration = folder.path().join("prometheus.yml");
        let text = format!(
            "global: {{scrape_interval: 2s, scrape_timeout: 2s, evaluation_interval: 1s}}\n\
             rule_files: [{}]\n\
             scrape_configs: [{{job_name: cohort, static_configs: [{{targets: [\"{ADDRESS}\"]}}]}}]\n",
            rules.display()
        );
        fs::write(&configuration, text)?;
        let option = |name: &str, path: PathBuf| format!("--{name}={}", path.display());
        let mut command = Command::new("prometheus");
        command
            .arg(option("config.file", configuration))
            .arg(option("storage.tsdb.path", folder.path().join("data")))
            .arg(format!("--web.listen-address={PROMETHEUS}"))
            .arg("--log.level=warn");
        let process = Service(start(command, &[HOST_CPU], None)?);
        let prometheus = Self {
            _process: process,
            _folder: folder,
        };
        wait_for("a scrape by Prometheus", 2 * PATIENCE, || {
            let up = prometheus.number("up{job=\"cohort\"}");
            Ok((up.ok().flatten() == Some(1.0)).then_some(()))
        })?;
        Ok(prometheus)
    }

    /// What a query gives now: values by labels.
    fn query(&self, query: &str) -> Result<Vec<(BTreeMap<String, String>, f64)>> {
        let url = format!("http://{PROMETHEUS}/api/v1/query");
        let answer: Value = serde_json::from_str(&get(&url, &[("query", query)], "*/*")?)?;
        let rows = answer["data"]["result"].as_array();
        let rows = rows.with_context(|| format!("{query}: {answer}"))?;
        rows.iter()
            .map(|row| {
                let labels = serde_json::from_value(row["metric"].clone())?;
                let value = row["value"][1].as_str().context("it has a value")?;
                Ok((labels, value.parse()?))
            })
            .collect()
    }

    /// The only value of a query, if it has any.
    fn number(&self, query: &str) -> Result<Option<f64>> {
        let rows = self.query(query)?;
        ensure!(rows.len() <= 1, "{query} has {} values", rows.len());
        Ok(rows.first().map(|(_, value)| *value))
    }

    /// Waits until a query has this value; none: no value.
    fn wait_until(&self, query: &str, wanted: Option<f64>) -> Result<()> {
        let begin = Instant::now();
        loop {
            let value = self.number(query)?;
            if value == wanted {
                println!(
                    "    {query} is {wanted:?} after {:.1} s",
                    begin.elapsed().as_secs_f64()
                );
                return Ok(());
            }
            if begin.elapsed() > PATIENCE {
                bail!("{query} is {value:?} and not {wanted:?}");
            }
            sleep(Duration::from_millis(500));
        }
    }
}

/// Each query of the dashboard, with its variables replaced as Grafana does.
fn dashboard_queries() -> Result<Vec<String>> {
    let dashboard: Value = serde_json::from_str(DASHBOARD)?;
    let panels = dashboard["panels"].as_array().context("it has panels")?;
    let queries: Vec<String> = panels
        .iter()
        .filter_map(|panel| panel["targets"].as_array())
        .flatten()
        .filter_map(|target| target["expr"].as_str())
        .map(|query| {
            query
                .replace("$__rate_interval", "10s")
                .replace("$instance", ".*")
                .replace("$vm", ".*")
        })
        .collect();
    ensure!(queries.len() > 10, "the dashboard has hardly any query");
    Ok(queries)
}

fn scraped() -> Result<()> {
    const VMS: &str = "count(cohort_vm_vcpus)";
    let _export = export(&[])?;
    let prometheus = Prometheus::start()?;
    ensure!(prometheus.number(VMS)?.is_none(), "there are VMs already");

    let spinner = "loop: lock; compute 50us; unlock; ipi 1 0x41; wait-answer";
    let talks = cohort_micro::Spec::new("talks")
        .vcpu(spinner)
        .vcpu("loop: lock; compute 50us; unlock; compute 20us");
    let cpus = lab()?.guest_cpus;
    let (cpu, others_cpus) = cpus.split_at(1);
    let others = [
        Guest::start_on(&talks, others_cpus)?,
        Guest::start_on(&busy("busy", 2), others_cpus)?,
    ];
    prometheus.wait_until(VMS, Some(2.0))?;

    // Real-time tasks take what no weight gives them.
    let starved = Guest::start_on(&busy("starved", 1), cpu)?;
    prometheus.wait_until(VMS, Some(3.0))?;
    let firing = format!(
        "count(ALERTS{{alertname=\"CohortVmBelowEntitlement\",alertstate=\"firing\"}} * on (vm) \
         cohort_vm_info{{pid=\"{}\"}})",
        starved.micro.pid()
    );
    ensure!(prometheus.number(&firing)?.is_none(), "it fires already");
    let taker = HostLoad::start("taker", &[0], cpu)?;
    make_real_time(taker.pids()[0])?;
    prometheus.wait_until(&firing, Some(1.0))?;
    drop(taker);
    prometheus.wait_until(&firing, None)?;

    let mut empty = Vec::new();
    for query in dashboard_queries()? {
        if prometheus.query(&query)?.is_empty() {
            empty.push(query);
        }
    }
    println!("    queries of the dashboard without an answer: {empty:?}");
    // Nobody has a cap, and Cohort does not schedule.
    let of_others = [
        "vm_limited",
        "scheduler_mechanism",
        "vm_turns",
        "yields_missed",
    ];
    let may_be_empty = |query: &String| of_others.iter().any(|name| query.contains(name));
    ensure!(
        empty.iter().all(may_be_empty),
        "nothing is shown for {empty:?}"
    );

    drop(starved);
    prometheus.wait_until(VMS, Some(2.0))?;
    drop(others);
    prometheus.wait_until(VMS, None)?;
    prometheus.wait_until("min_over_time(up{job=\"cohort\"}[5m])", Some(1.0))
}

fn make_real_time(pid: u32) -> Result<()> {
    let status = Command::new("chrt")
        .args(["--fifo", "--pid", "1", &pid.to_string()])
        .status()
        .context("chrt")?;
    ensure!(status.success(), "chrt: {status}");
    Ok(())
}

fn wrong_input() -> Result<()> {
    let command = |options: &[&str]| {
        let mut command = Command::new("cohort");
        command.arg("export").args(options);
        command
    };
    refused_without_root("export")?;
    refused(&mut command(&["--listen", "here"]), Exit::Usage, "--listen")?;
    let none = ["--replay", "/none"];
    refused(&mut command(&none), Exit::BadRecording, "/none")?;
    let elsewhere = ["--listen", "192.0.2.1:80"];
    refused(&mut command(&elsewhere), Exit::CannotListen, "192.0.2.1")?;

    let mut service = export(&[])?;
    refused(&mut command(&[]), Exit::CannotListen, "--listen")?;
    // Somebody who never says what he wants holds up neither others nor the end.
    let mut silent = TcpStream::connect(ADDRESS)?;
    silent.write_all(b"GET /metr")?;
    ensure!(scrape("*/*")?.contains("cohort_host_cpus"), "it serves");
    let begin = Instant::now();
    kill(Pid::from_raw(service.0.id() as i32), Signal::SIGTERM)?;
    let status = service.0.wait()?;
    println!(
        "    {status} {:.1} s after SIGTERM",
        begin.elapsed().as_secs_f64()
    );
    ensure!(
        status.success() && begin.elapsed() < Duration::from_secs(5),
        "it ended with {status} after {:?}",
        begin.elapsed()
    );
    let mut rest = Vec::new();
    // The kernel may have reset the connection.
    let _ = silent.read_to_end(&mut rest);
    ensure!(rest.is_empty(), "it answered what nobody asked");
    Ok(())
}
