// SPDX-License-Identifier: GPL-2.0-only
//! `cohort compare` on guests that run: it finds what is there, and gives the host back whatever happens.

use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cohort::commands::compare::scheduler;
use cohort::process::exit::Exit;
use cohort::process::wait::wait_for;
use cohort_lab::inside::cgroup::Cgroup;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::Test;
use crate::host::{
    Guest, PATIENCE, back_to_stock, busy, dozing, lab, promised, refused, refused_without_root,
    start_cohort, stop_cohort, wait_for_sched_ext,
};

pub const TESTS: &[Test] = &[
    (
        "a_scheduler_that_is_worse_is_found_to_be_so",
        worse_is_found,
    ),
    (
        "starving_one_vm_lowers_the_mean_progress_more_than_the_sum",
        starving_is_found,
    ),
    ("whatever_is_wrong_is_said_in_a_sentence", wrong_input),
];

/// Those that promise times, which only the exact machine can hold them to.
pub const HOST_BACK: &[Test] = &[
    (
        "a_guest_that_stands_still_has_the_host_back_in_two_seconds",
        stall,
    ),
    ("ctrl_c_and_kill_give_the_host_back", interrupted),
];

/// Two busy VMs, and the command that counts what they do together: how VMs share the host differs between schedulers.
fn guests() -> Result<([Guest; 2], String)> {
    back_to_stock()?;
    let guests = [Guest::busy("one", 2)?, Guest::busy("two", 2)?];
    let of_vcpu = |guest: &Guest, vcpu: usize| {
        // Where the layout of the state file has a vCPU's passes through its program.
        let offset = cohort_micro::layout::vcpu_offset(vcpu);
        let state = guest.micro.state.path().display();
        format!("$(od -An -t u8 -j {offset} -N 8 {state})")
    };
    let passes: Vec<String> = guests
        .iter()
        .flat_map(|guest| [of_vcpu(guest, 0), of_vcpu(guest, 1)])
        .collect();
    let counter = format!("passes=echo $(({}))", passes.join("+"));
    Ok((guests, counter))
}

fn compare(arguments: &[&str]) -> Command {
    let mut command = Command::new("cohort");
    command.arg("compare").args(arguments);
    command
}

/// A scheduler beside which something else takes most of these CPUs.
fn worse(cgroup: &Cgroup, cpus: &[u32]) -> String {
    let members = cgroup.path().join("cgroup.procs");
    let hog = |cpu: &u32| {
        format!(
            "(echo 0 > {}; exec taskset -c {cpu} sh -c 'while :; do :; done') &",
            members.display()
        )
    };
    let hogs: Vec<String> = cpus.iter().map(hog).collect();
    hogs.join(" ") + " exec cohort run"
}

/// What is said of a number under the second scheduler.
fn said_of<'a>(comparison: &'a Value, of: &str, name: &str) -> Result<&'a Value> {
    let numbers = comparison["numbers"].as_array().context("no numbers")?;
    let number = numbers
        .iter()
        .find(|number| number["of"] == of && number["name"] == name);
    let number = number.with_context(|| format!("{of} {name} is missing"))?;
    let [base, other] = [0, 1].map(|at| &number["schedulers"][at]);
    println!(
        "    {of} {name}: {}, then {}: {}",
        base["median"], other["median"], other["verdict"]
    );
    Ok(other)
}

fn number(of: &Value, pointer: &str) -> Result<f64> {
    let number = of.pointer(pointer).and_then(Value::as_f64);
    number.with_context(|| format!("no {pointer} in {of}"))
}

fn ensure_worse(said: &Value) -> Result<()> {
    let verdict = said["verdict"].as_str().unwrap_or_default();
    ensure!(
        verdict.starts_with("less") && verdict.ends_with("worse"),
        "it was not found: {verdict}"
    );
    Ok(())
}

/// So many short rounds as JSON; fewer than six allow no verdict.
fn compared(rounds: u8, more: &[&str]) -> Result<Value> {
    let short = [
        "--rounds",
        &rounds.to_string(),
        "--window-s",
        "1",
        "--settle-s",
        "0",
        "--json",
    ];
    let output = compare(&[&short[..], more].concat()).output()?;
    ensure!(
        output.status.success(),
        "it ended with {}: {}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Twice, as one time is luck.
fn worse_is_found() -> Result<()> {
    let (_guests, counter) = guests()?;
    let cgroup = Cgroup::create("worse")?;
    cgroup.set_weight(400)?;
    let worse = worse(&cgroup, &lab()?.guest_cpus);
    let comparison = compared(
        6,
        &[
            "--scheduler",
            &worse,
            "--counter",
            &counter,
            "--alone",
            "passes=1000",
        ],
    )?;
    let passes = said_of(&comparison, "", "passes")?;
    ensure_worse(passes)?;
    let of_counters = said_of(&comparison, "counters", "progress mean %")?;
    let per_pass = number(of_counters, "/median")? / number(passes, "/median")?;
    ensure!(
        (per_pass * 10.0 - 1.0).abs() < 1e-6,
        "the progress of the one counter is not its rate against that alone"
    );
    ensure_worse(said_of(&comparison, "host", "progress mean %")?)?;
    said_of(&comparison, "one", "progress %")?;
    ensure_stock()
}

/// Two VMs with a CPU each, of which one loses most of its own to something else.
fn starving_is_found() -> Result<()> {
    let cpus = lab()?.guest_cpus;
    let (starved, fed) = (&cpus[..1], &cpus[1..2]);
    let _guests = [
        Guest::start_on(&busy("starved", 1), starved)?,
        Guest::start_on(&busy("fed", 1), fed)?,
    ];
    let cgroup = Cgroup::create("worse")?;
    cgroup.set_weight(400)?;
    let comparison = compared(6, &["--scheduler", &worse(&cgroup, starved)])?;
    let of_host = |name: &str| said_of(&comparison, "host", name);
    let [mean, least, sum] = ["progress mean %", "progress least %", "progress sum"].map(of_host);
    let (mean, least, sum) = (mean?, least?, sum?);
    ensure_worse(mean)?;
    ensure_worse(least)?;
    let [mean, least, sum] = [mean, least, sum].map(|said| number(said, "/ratio/median"));
    let (mean, least, sum) = (mean?, least?, sum?);
    ensure!(
        least < mean && mean < sum - 0.1,
        "the least fell to {least}, the mean to {mean}, the sum to {sum}"
    );
    ensure_stock()
}

/// Needs no sched_ext. What windows differ by on the fast machine is not judged, so two rounds are enough.
pub fn stock_with_itself() -> Result<()> {
    let (_guests, counter) = guests()?;
    let comparison = compared(2, &["--scheduler", "stock", "--counter", &counter])?;
    ensure!(
        comparison["schedulers"] == json!(["stock", "stock 2"]),
        "it compares {}",
        comparison["schedulers"]
    );
    for (of, name) in [("", "passes"), ("one", "progress %"), ("two", "%RUN")] {
        number(said_of(&comparison, of, name)?, "/ratio/median")?;
    }
    Ok(())
}

fn ensure_stock() -> Result<()> {
    ensure!(scheduler::state()? == "disabled", "the host is not back");
    Ok(())
}

/// The guests are stopped, as if they had a deadlock, while Cohort runs.
fn stall() -> Result<()> {
    let (guests, counter) = guests()?;
    let arguments = [
        "--counter",
        &counter,
        "--rounds",
        "6",
        "--window-s",
        "20",
        "--settle-s",
        "0",
        "--against",
        "cohort",
        "--scheduler",
        "stock",
    ];
    let child = start_taken_over(&arguments)?;
    sleep(Duration::from_secs(1));
    let send = |signal| -> Result<()> {
        for guest in &guests {
            kill(Pid::from_raw(guest.micro.pid()), signal)?;
        }
        Ok(())
    };
    let begin = Instant::now();
    send(Signal::SIGSTOP)?;
    let back = wait_for("The host's own scheduler", PATIENCE, || {
        Ok((scheduler::state()? == "disabled").then(|| begin.elapsed()))
    });
    send(Signal::SIGCONT)?;
    let back = back?;
    let output = child.wait_with_output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    println!(
        "    after {back:?}: {}",
        said.lines().last().unwrap_or_default()
    );
    ensure!(
        output.status.code() == Some(Exit::Stalled.code().into())
            && said.contains("passes stayed at"),
        "it ended with {}: {said}",
        output.status
    );
    ensure!(
        back < promised(Duration::from_secs(2))?,
        "the host was back only after {back:?}"
    );
    Ok(())
}

/// A comparison that has Cohort loaded.
fn start_taken_over(arguments: &[&str]) -> Result<Child> {
    let child = compare(arguments)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    wait_for_sched_ext("enabled", PATIENCE)?;
    Ok(child)
}

fn interrupted() -> Result<()> {
    let _guests = guests()?;
    let arguments = [
        "--against",
        "cohort",
        "--scheduler",
        "stock",
        "--window-s",
        "20",
        "--settle-s",
        "0",
    ];
    for signal in [Signal::SIGINT, Signal::SIGKILL] {
        let child = start_taken_over(&arguments)?;
        sleep(Duration::from_millis(500));
        let begin = Instant::now();
        kill(Pid::from_raw(child.id() as i32), signal)?;
        wait_for_sched_ext("disabled", promised(Duration::from_secs(2))?)?;
        println!("    {signal}: back after {:?}", begin.elapsed());
        let output = child.wait_with_output()?;
        if signal == Signal::SIGINT {
            let code = Some(Exit::Interrupted.code().into());
            ensure!(
                output.status.code() == code,
                "it ended with {}",
                output.status
            );
        }
    }
    Ok(())
}

fn wrong_input() -> Result<()> {
    let short = ["--rounds", "1", "--window-s", "1", "--settle-s", "0"];
    let with = |more: &[&str]| compare(&[&short[..], more].concat());
    back_to_stock()?;
    refused(&mut with(&[]), Exit::Failure, "no VM ran")?;
    let _guest = dozing("one", 2)?;
    let missing = "/nonexistent/scheduler";
    let no_number = ["--probe", "x=echo none", "--scheduler", "stock"];
    let wrong: [(&[&str], Exit, &str); 7] = [
        (&["--probe", "nothing"], Exit::Usage, "NAME=COMMAND"),
        (&["--alone", "passes=0"], Exit::Usage, "above 0"),
        (&["--alone", "passes=5"], Exit::Usage, "of no counter"),
        (&["--scheduler", " "], Exit::Usage, "needs a command"),
        (
            &["--html", "/proc/version"],
            Exit::Failure,
            "not overwritten",
        ),
        (&["--scheduler", missing], Exit::Failure, "not found"),
        (&no_number, Exit::Failure, "printed no number"),
    ];
    for (arguments, exit, word) in wrong {
        refused(&mut with(arguments), exit, word)?;
    }
    let cohort = start_cohort()?;
    refused(
        &mut with(&[]),
        Exit::AlreadyRunning,
        "systemctl stop cohort",
    )?;
    stop_cohort(cohort)?;
    refused_without_root("compare")?;
    ensure_stock()
}
