// SPDX-License-Identifier: GPL-2.0-only
//! `cohort compare` on guests that run: it finds what is there, and gives the host back whatever happens.

use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cohort::compare::scheduler;
use cohort::exit::Exit;
use cohort::wait::wait_for;
use cohort_lab::inside::cgroup::Cgroup;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::Test;
use crate::host::{
    Guest, PATIENCE, lab, refused, refused_without_root, start_cohort, stop_cohort,
    wait_for_sched_ext,
};

pub const TESTS: &[Test] = &[
    (
        "a_scheduler_that_is_worse_is_found_to_be_so",
        worse_is_found,
    ),
    (
        "a_guest_that_stands_still_has_the_host_back_in_two_seconds",
        stall,
    ),
    ("ctrl_c_and_kill_give_the_host_back", interrupted),
    ("whatever_is_wrong_is_said_in_a_sentence", wrong_input),
];

/// Two busy VMs, and the command that counts what they do together: how VMs share the host differs between schedulers.
fn guests() -> Result<([Guest; 2], String)> {
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

/// A scheduler beside which something else takes two thirds of the guests' CPUs.
fn worse(cgroup: &Cgroup) -> Result<String> {
    let members = cgroup.path().join("cgroup.procs");
    let cpus = lab()?.guest_cpus;
    let hog = |cpu: &u32| {
        format!(
            "(echo 0 > {}; exec taskset -c {cpu} sh -c 'while :; do :; done') &",
            members.display()
        )
    };
    let hogs: Vec<String> = cpus.iter().map(hog).collect();
    Ok(hogs.join(" ") + " exec cohort run")
}

/// Twice, as one time is luck.
fn worse_is_found() -> Result<()> {
    let (_guests, counter) = guests()?;
    let cgroup = Cgroup::create("worse")?;
    cgroup.set_weight(400)?;
    let worse = worse(&cgroup)?;
    for time in 0..2 {
        let arguments = [
            "--scheduler",
            &worse,
            "--counter",
            &counter,
            "--rounds",
            "6",
            "--window-s",
            "1",
            "--settle-s",
            "0",
            "--json",
        ];
        let output = compare(&arguments).stderr(Stdio::null()).output()?;
        ensure!(output.status.success(), "it ended with {}", output.status);
        let comparison: Value = serde_json::from_slice(&output.stdout)?;
        let numbers = comparison["numbers"].as_array().context("no numbers")?;
        let passes = numbers.iter().find(|number| number["name"] == "passes");
        let verdict = &passes.context("the counter is missing")?["schedulers"][1]["verdict"];
        println!("    time {}: {verdict}", time + 1);
        let verdict = verdict.as_str().unwrap_or_default();
        ensure!(
            verdict.starts_with("less") && verdict.ends_with("worse"),
            "it was not found: {verdict}"
        );
    }
    ensure_stock()
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
        back < Duration::from_secs(2),
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
        wait_for_sched_ext("disabled", Duration::from_secs(2))?;
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
    refused(&mut with(&[]), Exit::Failure, "no VM ran")?;
    let _guests = guests()?;
    let missing = "/nonexistent/scheduler";
    let no_number = ["--probe", "x=echo none", "--scheduler", "stock"];
    let wrong: [(&[&str], Exit, &str); 5] = [
        (&["--probe", "nothing"], Exit::Usage, "NAME=COMMAND"),
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
    refused(&mut with(&[]), Exit::OtherScheduler, "cohort")?;
    stop_cohort(cohort)?;
    refused_without_root("compare")?;
    ensure_stock()
}
