// SPDX-License-Identifier: GPL-2.0-only
//! Measures one cell of the matrix: all members side by side under the stock scheduler and under Cohort, from several
//! starts, and each kind of member alone. Not for what a cell is (`crate::cell`) or for tables (`outside::report`).
//!
//! All members are started once, and frozen by their cgroups whenever nothing is measured: Cohort loads on an idle host, which
//! is far quicker to emulate, and is loaded once; its variants are the same program with mechanisms switched.
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use cohort::commands::compare::progress::{Progress, VmRate};
use cohort::commands::compare::scheduler::{RunningScheduler, Scheduler};
use cohort::observer::entitlement::{Group, entitlements_ns};
use cohort::scheduler::mechanism::Switch;
use cohort::scheduler::metrics::MechanismStats;
use cohort_micro::calibrate;

use super::booted::{GuestSpec, Topology, Workload as BootedWorkload, start_all};
use super::drawing::{self, Timeline, Vm};
use super::hostwork::{HostWork, Program};
use super::info::LabInfo;
use super::micro::MicroGuest;
use super::windows::{DoneAlone, LOGS, Subject, Timing, look_at, measure, measure_alone};
use super::{ops, process, programs, spins};
use crate::cell::{
    Alone, Cell, CellResult, Guests, Member, OpCost, Party, Run, STOCK, SpinExits, Variant,
    Workload,
};

/// Where the result is left; copied out of L1 at its end.
pub const RESULT_PATH: &str = "/out/result.json";
/// For one guest to boot, lab time.
const BOOT_TIMEOUT: Duration = Duration::from_secs(120);

/// Measures `cell` and leaves the result in [`RESULT_PATH`].
///
/// # Errors
/// When a member does not start or stands still, or Cohort does not do what it should.
pub fn run(lab: &LabInfo, cell: &Cell, each_mechanism: bool) -> Result<()> {
    cell.check()?;
    ensure!(
        lab.guest_cpus.len() == cell.cpus as usize,
        "The cell is for {} CPUs, but guests may use {} here",
        cell.cpus,
        lab.guest_cpus.len()
    );
    process::come_first(process::HARNESS)?;
    let result = Bench::start(lab, cell)?.run(each_mechanism)?;
    let json = serde_json::to_string_pretty(&result)? + "\n";
    fs::write(RESULT_PATH, json).with_context(|| format!("{RESULT_PATH} cannot be written"))
}

/// A cell whose members are started.
pub(super) struct Bench<'a> {
    lab: &'a LabInfo,
    cell: &'a Cell,
    members: Vec<Member>,
    subjects: Vec<Box<dyn Subject>>,
    // What the host's work runs.
    _program: Program,
}

impl<'a> Bench<'a> {
    /// Starts all members, one after the other, and freezes each when it counts.
    pub(super) fn start(lab: &'a LabInfo, cell: &'a Cell) -> Result<Self> {
        let program = Program::unpack()?;
        let starter = Starter {
            lab,
            cell,
            iterations_per_ms: program.iterations_per_ms()?,
            micro_iterations_per_ms: calibrate::iterations_per_ms(),
            program: &program,
        };
        let members = cell.members();
        let start = |member: &Member| {
            let subject = starter.start(member)?;
            subject.cgroup().set_frozen(true)?;
            println!("{} is ready", member.name);
            Ok(subject)
        };
        let subjects = members.iter().map(start).collect::<Result<_>>()?;
        Ok(Self {
            lab,
            cell,
            members,
            subjects,
            _program: program,
        })
    }

    fn run(mut self, each_mechanism: bool) -> Result<CellResult> {
        // Of published cases the gain is wanted, and their windows take long.
        let counts = self.cell.published.is_none();
        let (mut ops, mut spins) = (Vec::new(), Vec::new());
        let alone = self.measure_each_kind()?;
        let mut runs = self.measure_all(STOCK, &alone)?;
        if counts {
            spins = self.count_spins_alone()?;
            spins.push(self.count_spins(STOCK)?);
        }
        let mut cohort = Scheduler::cohort(&[])
            .start(Path::new(LOGS))?
            .context("Cohort is a program, so there is one to stop")?;
        for variant in Variant::all(self.cell, each_mechanism) {
            set(&variant.switches())?;
            let measured = self.measure_all(&variant.name, &alone);
            runs.extend(still_there(&mut cohort, measured)?);
        }
        if counts {
            set(&Variant::usual().switches())?;
            let counted = self.count_ops();
            ops = still_there(&mut cohort, counted)?;
            let counted = self.count_spins(&Variant::usual().name);
            spins.push(still_there(&mut cohort, counted)?);
        }
        cohort.stop()?;
        Ok(CellResult {
            cell: self.cell.clone(),
            lab: self.lab.clone(),
            alone,
            runs,
            ops,
            spins,
        })
    }

    /// What the scheduler that is loaded executes from the first seed on, until the window's end.
    fn count_ops(&mut self) -> Result<Vec<OpCost>> {
        let timing = self.timing();
        let counting = ops::Counting::start()?;
        measure(&mut self.subjects, &self.lab.guest_cpus, 1, timing)
            .context("The window in which ops are counted failed")?;
        Ok(counting.finish())
    }

    /// Pause-loop exits from the first seed on, until the window's end, under whatever schedules now.
    fn count_spins(&mut self, scheduler: &str) -> Result<SpinExits> {
        let timing = self.timing();
        let counting = spins::Counting::start()?;
        measure(&mut self.subjects, &self.lab.guest_cpus, 1, timing).with_context(|| {
            format!("The window under {scheduler} in which spins are counted failed")
        })?;
        Ok(SpinExits {
            who: scheduler.into(),
            per_s: counting.finish()?,
        })
    }

    /// The same of the first VM of each kind, alone.
    fn count_spins_alone(&mut self) -> Result<Vec<SpinExits>> {
        let timing = self.timing();
        let mut spins = Vec::new();
        for index in self.first_of_each_kind() {
            let member = &self.members[index];
            if member.is_host {
                continue;
            }
            let counting = spins::Counting::start()?;
            measure_alone(&mut self.subjects[index], timing).with_context(|| {
                format!("{} alone, whose spins are counted, failed", member.name)
            })?;
            spins.push(SpinExits {
                who: member.name.clone(),
                per_s: counting.finish()?,
            });
        }
        Ok(spins)
    }

    /// What the first of each kind does alone.
    pub(super) fn measure_each_kind(&mut self) -> Result<Vec<Alone>> {
        let timing = self.timing();
        let mut measured = Vec::new();
        for index in self.first_of_each_kind() {
            let name = &self.members[index].name;
            let DoneAlone { done, cpus } = measure_alone(&mut self.subjects[index], timing)
                .with_context(|| format!("{name} alone could not be measured"))?;
            println!(
                "alone, {name}: {:.1} operations/s on {cpus:.2} CPUs",
                done.rate
            );
            measured.push(Alone {
                name: name.clone(),
                rate: done.rate,
                cpus,
                latency: done.latency,
            });
        }
        Ok(measured)
    }

    fn first_of_each_kind(&self) -> Vec<usize> {
        let is_first = |&index: &usize| self.first_of_its_kind(index) == index;
        (0..self.members.len()).filter(is_first).collect()
    }

    fn first_of_its_kind(&self, index: usize) -> usize {
        let alike = |member: &Member| member.is_like(&self.members[index]);
        self.members.iter().position(alike).unwrap_or(index)
    }

    /// A window from each seed, under whatever schedules now.
    pub(super) fn measure_all(&mut self, scheduler: &str, alone: &[Alone]) -> Result<Vec<Run>> {
        let alone = self.alone_of_each(alone)?;
        (1..=self.cell.seeds)
            .map(|seed| {
                let run = self
                    .measure_seed(scheduler, seed, &alone)
                    .with_context(|| {
                        format!("The window under {scheduler} with seed {seed} failed")
                    })?;
                println!("{}", line(&run));
                Ok(run)
            })
            .collect()
    }

    fn measure_seed(&mut self, scheduler: &str, seed: u64, alone: &[Alone]) -> Result<Run> {
        let timing = self.timing();
        let (seconds, done) = measure(&mut self.subjects, &self.lab.guest_cpus, seed, timing)?;
        let rates: Vec<f64> = done.iter().map(|done| done.rate).collect();
        let shares = shares(self.cell.cpus, &self.members, alone);
        let vm = |((rate, alone), share): ((&f64, &Alone), f64)| VmRate {
            rate: *rate,
            alone: alone.rate,
            share,
        };
        let vms: Vec<VmRate> = rates.iter().zip(alone).zip(shares).map(vm).collect();
        Ok(Run {
            scheduler: scheduler.into(),
            seed,
            seconds,
            progress: Progress::of(&vms)?,
            latencies: done.into_iter().map(|done| done.latency).collect(),
            rates,
        })
    }

    /// Who runs where for `length`, from the first seed, under whatever schedules now.
    pub(super) fn draw(&self, title: &str, length: Duration) -> Result<Timeline> {
        let vms = || {
            self.subjects.iter().map(|subject| Vm {
                name: subject.name().to_owned(),
                vcpu_tids: subject.vcpu_tids(),
            })
        };
        let cpus = &self.lab.guest_cpus;
        self.look(|_| drawing::record(title, cpus, vms().collect(), length))
    }

    /// Looks at all members while they run, from the first seed, under whatever schedules.
    pub(super) fn look<T>(&self, look: impl FnOnce(&[Box<dyn Subject>]) -> Result<T>) -> Result<T> {
        let look = || look(&self.subjects);
        let settle = self.timing().settle;
        look_at(&self.subjects, &self.lab.guest_cpus, 1, settle, look)
    }

    /// What the members are called.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.members.iter().map(|member| member.name.as_str())
    }

    /// What each member does alone, by that of the first of its kind.
    pub(super) fn alone_of_each(&self, alone: &[Alone]) -> Result<Vec<Alone>> {
        let of_member = |index: usize| {
            let first = &self.members[self.first_of_its_kind(index)].name;
            let found = alone.iter().find(|alone| alone.name == *first).cloned();
            found.with_context(|| format!("{first} was not measured alone"))
        };
        (0..self.members.len()).map(of_member).collect()
    }

    fn timing(&self) -> Timing {
        Timing {
            window: Duration::from_millis(self.cell.window_ms),
            settle: Duration::from_millis(self.cell.settle_ms),
        }
    }
}

/// The fair part of each member: of what it uses alone, what it is entitled to beside the others.
fn shares(cpus: u32, members: &[Member], alone: &[Alone]) -> Vec<f64> {
    let group = |(member, alone): (&Member, &Alone)| Group {
        parent: None,
        weight: member.party.weight,
        demand_ns: alone.cpus * 1e9,
        cap_ns: None,
    };
    let groups: Vec<Group> = members.iter().zip(alone).map(group).collect();
    let given = entitlements_ns(f64::from(cpus) * 1e9, &groups);
    let parts = given.iter().zip(&groups);
    parts
        .map(|(given, group)| given / group.demand_ns)
        .collect()
}

/// For whoever watches.
fn line(run: &Run) -> String {
    let each = run.progress.of_each.iter();
    let each: Vec<String> = each.map(|progress| format!("{progress:.3}")).collect();
    format!(
        "{}, seed {}: harmonic mean {:.3}, least {:.3}, sum {:.3} ({})",
        run.scheduler,
        run.seed,
        run.progress.harmonic_mean,
        run.progress.least,
        run.progress.sum,
        each.join(" ")
    )
}

/// A failure under a scheduler that is gone is that scheduler's.
fn still_there<T>(cohort: &mut RunningScheduler, measured: Result<T>) -> Result<T> {
    match cohort.check() {
        Ok(()) => measured,
        Err(end) => Err(match measured {
            Ok(_) => end,
            Err(error) => end.context(format!("{error:#}")),
        }),
    }
}

/// Switches the running Cohort's mechanisms and demands that they are so then.
fn set(switches: &[Switch]) -> Result<()> {
    let output = Command::new("cohort")
        .args(["set", "--json"])
        .args(switches.iter().map(|switch| {
            let name = switch.mechanism.name();
            format!("{name}={}", switch.state())
        }))
        .output()
        .context("cohort set cannot be started")?;
    ensure!(
        output.status.success(),
        "cohort set ended with {}: {}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    let stats: std::collections::BTreeMap<String, MechanismStats> =
        serde_json::from_slice(&output.stdout).context("cohort set says nothing of use")?;
    for switch in switches {
        let name = switch.mechanism.name();
        let on = stats.get(&name).map(|stats| stats.on == 1);
        ensure!(
            on == Some(switch.on),
            "{name} should be {} now, but cohort set says otherwise",
            switch.state()
        );
    }
    Ok(())
}

/// Starts members.
struct Starter<'a> {
    lab: &'a LabInfo,
    cell: &'a Cell,
    program: &'a Program,
    iterations_per_ms: u64,
    micro_iterations_per_ms: u64,
}

impl Starter<'_> {
    fn start(&self, member: &Member) -> Result<Box<dyn Subject>> {
        let Member {
            name,
            is_host,
            party,
        } = member;
        let lab = self.lab;
        let started = match (is_host, self.cell.guests) {
            (true, _) => HostWork::start(lab, self.program, name, party, self.iterations_per_ms)
                .map(|work| Box::new(work) as Box<dyn Subject>),
            (false, Guests::Micro) => self.micro(name, party),
            (false, Guests::Booted) => self.booted(name, party),
        };
        started.with_context(|| format!("{name} does not start"))
    }

    fn micro(&self, name: &str, party: &Party) -> Result<Box<dyn Subject>> {
        let spec = programs::spec(name, party, self.cell.pause, self.micro_iterations_per_ms)?;
        let guest = MicroGuest::start_on(&spec, &self.lab.guest_cpus)?;
        guest.cgroup().set_weight(party.weight)?;
        Ok(Box::new(guest))
    }

    fn booted(&self, name: &str, party: &Party) -> Result<Box<dyn Subject>> {
        let spec = GuestSpec {
            topology: Topology {
                sockets: party.sockets,
                cores: party.width / party.sockets,
                threads: 1,
            },
            weight: party.weight,
            paravirtual: self.cell.paravirtual,
            ..GuestSpec::new(name, party.width, self.booted_workload(party))
        };
        let mut guests = start_all(self.lab, vec![spec], BOOT_TIMEOUT)?;
        Ok(Box::new(guests.remove(0)))
    }

    fn booted_workload(&self, party: &Party) -> BootedWorkload {
        let name = match party.workload {
            Workload::Lock => "spin",
            Workload::SleepingBarrier => "barrier",
            other => other.name(),
        };
        BootedWorkload {
            work: self.iterations_per_ms * party.operation_us / 1000,
            locked_percent: party.locked_percent,
            sleeping: party.workload == Workload::SleepingBarrier,
            ..BootedWorkload::new(name)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cell::example;

    fn alone(cpus: f64) -> Alone {
        Alone {
            name: "vm1".into(),
            rate: 100.0,
            cpus,
            latency: None,
        }
    }

    #[test]
    fn shares_are_by_weight_of_what_each_uses_alone() {
        let mut cell = example();
        let light = Party {
            count: 1,
            ..cell.vms[0].clone()
        };
        let heavy = Party {
            weight: 300,
            ..light.clone()
        };
        cell.vms = vec![light.clone(), heavy, light];
        let members = cell.members();
        let shares = shares(2, &members, &[alone(2.0), alone(2.0), alone(0.4)]);
        // The last asks for its equal part of 0.4; the others divide 1.6 by weight.
        for (share, expected) in shares.iter().zip([0.2, 0.6, 1.0]) {
            assert!((share - expected).abs() < 1e-9, "{shares:?}");
        }
    }
}
