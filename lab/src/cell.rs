// SPDX-License-Identifier: GPL-2.0-only
//! A cell of the bench matrix: which VMs and which work of the host run side by side, where, and for how long; and what
//! was measured of it. Shared by `outside`, which boots an L1 per cell, and `inside`, which measures it there.
use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::ops::RangeInclusive;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use cohort::commands::compare::progress::Progress;
use cohort::scheduler::mechanism::{Mechanism, Switch};
use serde::{Deserialize, Serialize};

use crate::guest::{COUNTER_SLOTS, REAL_WORKLOADS};
use crate::inside::info::LabInfo;
use crate::outside::machine::Vendor;

/// The stock scheduler's name in results.
pub const STOCK: &str = "stock";

/// All cells, in the order of the file.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Matrix {
    /// The cells; no two have one name.
    #[serde(rename = "cell")]
    pub cells: Vec<Cell>,
    /// Why goals are missed.
    #[serde(default, rename = "miss")]
    pub misses: Vec<Miss>,
}

/// Why Cohort does not reach the goals of some cells.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Miss {
    /// Their names.
    pub cells: Vec<String>,
    /// What was found, in sentences.
    pub why: String,
}

/// One cell. All times are lab time.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Cell {
    /// What it is called on command lines and in tables.
    pub name: String,
    /// CPUs of L1.
    pub cpus: u32,
    /// Sockets of L1, each a domain of Cohort.
    #[serde(default = "one")]
    pub sockets: u32,
    /// Whose CPUs L1 has.
    #[serde(default)]
    pub vendor: Vendor,
    /// What the VMs are.
    pub guests: Guests,
    /// Booted guests: whether their kernels are offered KVM's paravirtual spin locks, TLB flushes, IPIs and yields.
    #[serde(default)]
    pub paravirtual: bool,
    /// Whether PAUSE leaves the guest.
    #[serde(default)]
    pub pause: Pause,
    /// How many ways to start: each shifts vCPUs against each other in another way.
    pub seeds: u64,
    /// Length of a window, ms.
    pub window_ms: u64,
    /// From the start of the VMs to the window, ms.
    #[serde(default = "hundred")]
    pub settle_ms: u64,
    /// The VMs.
    pub vms: Vec<Party>,
    /// What the host itself does beside them; `width` is a number of threads.
    #[serde(default)]
    pub host: Vec<Party>,
    /// What is published of such a case. Such a cell compares the stock scheduler and Cohort, and nothing else.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub published: Option<Published>,
}

/// What one of the documents that Cohort answers publishes, and what Cohort is to reach.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Published {
    /// The published figure.
    pub figure: String,
    /// By how much Cohort is to be above the stock scheduler, percent: the VMs together, and the one that does least.
    pub goal_percent: f64,
}

/// Some equal VMs, or the same work of the host several times.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Party {
    /// How many.
    #[serde(default = "one")]
    pub count: u32,
    /// vCPUs of each VM; of the host's work, threads.
    #[serde(alias = "vcpus", alias = "threads")]
    pub width: u32,
    /// Booted guests: sockets that its vCPUs are divided into, as it sees them.
    #[serde(default = "one")]
    pub sockets: u32,
    /// cpu.weight of each one's cgroup.
    #[serde(default = "hundred_weight")]
    pub weight: u32,
    /// What each does.
    pub workload: Workload,
    /// Length of an operation's work on an idle CPU, us.
    #[serde(default = "hundred")]
    pub operation_us: u64,
    /// Lock only: part of that which is done inside the lock, in percent.
    #[serde(default = "third")]
    pub locked_percent: u32,
}

fn one() -> u32 {
    1
}

fn hundred() -> u64 {
    100
}

fn hundred_weight() -> u32 {
    100
}

fn third() -> u32 {
    33
}

/// What VMs are.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Guests {
    /// Micro guests: programs without a kernel, in guest kernel mode.
    Micro,
    /// Booted guests: QEMU, a Debian kernel, a program.
    Booted,
}

/// Whether PAUSE leaves the guest.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pause {
    /// After some of them, as on AMD, and on Intel in guest kernel mode.
    #[default]
    Exits,
    /// Never, as on Intel in guest user mode.
    Never,
}

/// What a VM or the host does, operation by operation.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Workload {
    /// Works, a part of it inside a fair ticket lock that all vCPUs share.
    Lock,
    /// Works, then waits spinning until all vCPUs have.
    Barrier,
    /// Works, then waits asleep until all vCPUs have.
    SleepingBarrier,
    /// Works, then has all other vCPUs flush their TLBs and waits for that.
    Tlb,
    /// Pairs of vCPUs work in turn, and wake each other.
    Pipe,
    /// Works, and communicates with nobody.
    Busy,
    /// Sleeps for a millisecond, then works; how late it wakes is measured.
    Latency,
    /// Starts a program that works and ends, as make does.
    Fork,
    /// Waits for a grace period of the guest's RCU while other threads read.
    Rcu,
    /// A GET of one of 8 clients of redis.
    Redis,
    /// A transaction of one of 8 clients of postgres.
    Postgres,
    /// The life of a file in dbench.
    Dbench,
    /// Sharpens a picture with vips.
    Vips,
    /// A backup by restic.
    Restic,
    /// A block that pbzip2 compresses.
    Pbzip2,
    /// An event of sysbench's threads.
    Sysbench,
    /// A C file that make has compiled.
    Make,
    /// Maps memory, fills it, searches in it and unmaps it, as ebizzy does.
    Mapping,
}

impl Workload {
    /// Its name in the matrix.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lock => "lock",
            Self::Barrier => "barrier",
            Self::SleepingBarrier => "sleeping-barrier",
            Self::Tlb => "tlb",
            Self::Pipe => "pipe",
            Self::Busy => "busy",
            Self::Latency => "latency",
            Self::Fork => "fork",
            Self::Rcu => "rcu",
            Self::Redis => "redis",
            Self::Postgres => "postgres",
            Self::Dbench => "dbench",
            Self::Vips => "vips",
            Self::Restic => "restic",
            Self::Pbzip2 => "pbzip2",
            Self::Sysbench => "sysbench",
            Self::Make => "make",
            Self::Mapping => "mapping",
        }
    }

    /// Whether it needs the guests' image.
    pub fn is_real(self) -> bool {
        REAL_WORKLOADS.contains(&self.name())
    }

    fn needs_a_kernel(self) -> bool {
        self.is_real() || matches!(self, Self::Fork | Self::Rcu | Self::Mapping)
    }

    fn is_for_the_host(self) -> bool {
        matches!(self, Self::Pipe | Self::Busy | Self::Latency | Self::Fork)
    }
}

/// One VM, or one piece of the host's work.
#[derive(Clone, Debug, PartialEq)]
pub struct Member {
    /// Its name in tables: "vm1", "host1".
    pub name: String,
    /// Whether it is the host's.
    pub is_host: bool,
    /// What it is; `count` means nothing here.
    pub party: Party,
}

impl Member {
    /// Whether it does the same as `other` when it is alone.
    pub fn is_like(&self, other: &Self) -> bool {
        let but_for_the_weight = |member: &Self| {
            let party = Party {
                count: 1,
                weight: 1,
                ..member.party.clone()
            };
            (member.is_host, party)
        };
        but_for_the_weight(self) == but_for_the_weight(other)
    }
}

impl Matrix {
    /// Reads the matrix and checks it.
    ///
    /// # Errors
    /// When the file cannot be read or something in it makes no sense: what, and in which cell.
    pub fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path)
            .with_context(|| format!("{} cannot be read", path.display()))?;
        Self::parse(&text).with_context(|| format!("{} is no matrix of cells", path.display()))
    }

    fn parse(text: &str) -> Result<Self> {
        let matrix: Self = toml::from_str(text)?;
        let mut names = BTreeSet::new();
        for cell in &matrix.cells {
            cell.check()?;
            ensure!(
                names.insert(&cell.name),
                "Two cells are called {}: rename one",
                cell.name
            );
        }
        for name in matrix.misses.iter().flat_map(|miss| &miss.cells) {
            ensure!(
                names.contains(name),
                "A [[miss]] is of {name}, which is no cell: name one"
            );
        }
        Ok(matrix)
    }
}

impl Cell {
    /// Checks that it can be run.
    ///
    /// # Errors
    /// A sentence that says what is wrong.
    pub fn check(&self) -> Result<()> {
        self.check_itself()
            .with_context(|| format!("The cell \"{}\" cannot be run", self.name))
    }

    fn check_itself(&self) -> Result<()> {
        let is_plain =
            |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        ensure!(
            !self.name.is_empty() && self.name.bytes().all(is_plain),
            "its name must be of small letters, digits and \"-\""
        );
        within("cpus", self.cpus.into(), 1..=64)?;
        check_sockets(self.sockets, self.cpus, "CPUs")?;
        within("seeds", self.seeds, 1..=20)?;
        within("window_ms", self.window_ms, 50..=10_000)?;
        within("settle_ms", self.settle_ms, 10..=5_000)?;
        ensure!(!self.vms.is_empty(), "it has no VM");
        ensure!(
            self.guests == Guests::Booted || !self.paravirtual,
            "micro guests use no paravirtual help: leave `paravirtual` out"
        );
        ensure!(
            self.guests == Guests::Micro || self.pause == Pause::Exits,
            "whether PAUSE leaves booted guests is L1's decision: `pause` is for micro guests"
        );
        if let Some(published) = &self.published {
            ensure!(
                (0.0..=1000.0).contains(&published.goal_percent),
                "`goal_percent` is {}; it must be from 0 to 1000",
                published.goal_percent
            );
        }
        self.vms.iter().try_for_each(|vms| self.check_vms(vms))?;
        self.host.iter().try_for_each(check_host_work)
    }

    fn check_vms(&self, vms: &Party) -> Result<()> {
        check_party(vms)?;
        ensure!(
            vms.sockets == 1 || self.guests == Guests::Booted,
            "micro guests see no sockets: leave `sockets` of the VMs out"
        );
        ensure!(
            self.guests == Guests::Booted || !vms.workload.needs_a_kernel(),
            "{} needs a guest with a kernel: set `guests = \"booted\"`",
            vms.workload.name()
        );
        Ok(())
    }

    /// All VMs, then all work of the host.
    pub fn members(&self) -> Vec<Member> {
        let named = |stem: &str, is_host: bool, parties: &[Party]| -> Vec<Member> {
            let each = parties
                .iter()
                .flat_map(|party| (0..party.count).map(move |_| party));
            each.enumerate()
                .map(|(index, party)| Member {
                    name: format!("{stem}{}", index + 1),
                    is_host,
                    party: party.clone(),
                })
                .collect()
        };
        [
            named("vm", false, &self.vms),
            named("host", true, &self.host),
        ]
        .concat()
    }

    /// Whether L1 must have the guests' image.
    pub fn needs_guest_image(&self) -> bool {
        self.vms.iter().any(|vms| vms.workload.is_real())
    }
}

fn check_host_work(work: &Party) -> Result<()> {
    check_party(work)?;
    ensure!(
        work.workload.is_for_the_host(),
        "{} is no work of the host: pipe, busy, latency and fork are",
        work.workload.name()
    );
    ensure!(
        work.sockets == 1,
        "work of the host has the host's sockets: leave its `sockets` out"
    );
    Ok(())
}

fn check_party(party: &Party) -> Result<()> {
    within("count", party.count.into(), 1..=64)?;
    // RCU has one thread more than vCPUs.
    within("vcpus", party.width.into(), 1..=COUNTER_SLOTS as u64 - 1)?;
    check_sockets(party.sockets, party.width, "vCPUs")?;
    within("weight", party.weight.into(), 1..=10_000)?;
    within("operation_us", party.operation_us, 1..=100_000)?;
    within("locked_percent", party.locked_percent.into(), 1..=99)?;
    ensure!(
        party.workload != Workload::Pipe || party.width.is_multiple_of(2),
        "a pipe has two ends: {} vCPUs cannot be paired",
        party.width
    );
    Ok(())
}

/// Whether so many processors can be divided into so many sockets; `noun` is what they are called.
fn check_sockets(sockets: u32, processors: u32, noun: &str) -> Result<()> {
    within("sockets", sockets.into(), 1..=processors.into())?;
    ensure!(
        processors.is_multiple_of(sockets),
        "{processors} {noun} cannot be divided into {sockets} sockets"
    );
    Ok(())
}

fn within(what: &str, value: u64, range: RangeInclusive<u64>) -> Result<()> {
    ensure!(
        range.contains(&value),
        "`{what}` is {value}; it must be from {} to {}",
        range.start(),
        range.end()
    );
    Ok(())
}

impl fmt::Display for Cell {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let vms: Vec<String> = self
            .vms
            .iter()
            .map(|vms| describe(vms, "VM", "vCPU"))
            .collect();
        write!(formatter, "{}", vms.join(", "))?;
        if !self.host.is_empty() {
            let host = self.host.iter();
            let host: Vec<String> = host
                .map(|work| describe(work, "cgroup of the host", "thread"))
                .collect();
            write!(formatter, "; beside them {}", host.join(", "))?;
        }
        let guests = match (self.guests, self.paravirtual, self.pause) {
            (Guests::Booted, true, _) => "booted guests with paravirtual help",
            (Guests::Booted, false, _) => "booted guests without paravirtual help",
            (Guests::Micro, _, Pause::Exits) => "micro guests",
            (Guests::Micro, _, Pause::Never) => "micro guests, PAUSE never exits",
        };
        write!(formatter, "; {guests}")?;
        match self.vendor {
            Vendor::Amd => Ok(()),
            Vendor::Intel => write!(formatter, "; CPUs of {}", self.vendor),
        }
    }
}

fn describe(party: &Party, noun: &str, part: &str) -> String {
    let plural = |count: u32| if count == 1 { "" } else { "s" };
    let noun = match noun.split_once(' ') {
        Some((first, rest)) => format!("{first}{} {rest}", plural(party.count)),
        None => format!("{noun}{}", plural(party.count)),
    };
    let locked = match party.workload {
        Workload::Lock => format!(" ({} % locked)", party.locked_percent),
        _ => String::new(),
    };
    let sockets = match party.sockets {
        1 => String::new(),
        sockets => format!(" in {sockets} sockets"),
    };
    let weight = match party.weight {
        100 => String::new(),
        weight => format!(", weight {weight}"),
    };
    format!(
        "{} {noun} of {} {part}{}{sockets}{weight}: {}{locked}",
        party.count,
        party.width,
        plural(party.width),
        party.workload.name()
    )
}

/// Cohort with some mechanisms switched.
#[derive(Clone, Debug, PartialEq)]
pub struct Variant {
    /// What tables call it.
    pub name: String,
    /// What is other than by default.
    pub switched: Vec<Switch>,
}

impl Variant {
    /// Cohort as it is by default.
    pub fn usual() -> Self {
        Self {
            name: "Cohort".into(),
            switched: Vec::new(),
        }
    }

    fn without(what: &str, mechanisms: &[Mechanism]) -> Self {
        let off = |&mechanism: &Mechanism| Switch {
            mechanism,
            on: false,
        };
        Self {
            name: format!("Cohort without {what}"),
            switched: mechanisms.iter().map(off).collect(),
        }
    }

    /// Without one.
    fn of_one(mechanism: Mechanism) -> Self {
        Self {
            name: format!("Cohort without {}", mechanism.name()),
            switched: vec![Switch {
                mechanism,
                on: false,
            }],
        }
    }

    /// Every mechanism, as this has it.
    pub fn switches(&self) -> Vec<Switch> {
        let all = Mechanism::value_variants().iter();
        all.map(|&mechanism| {
            let other = self
                .switched
                .iter()
                .find(|switch| switch.mechanism == mechanism);
            other.copied().unwrap_or(Switch {
                mechanism,
                on: true,
            })
        })
        .collect()
    }

    /// Those that `cell` is measured under, and if asked for one per mechanism.
    pub fn all(cell: &Cell, each_mechanism: bool) -> Vec<Self> {
        let mut variants = vec![Self::usual()];
        if cell.published.is_none() {
            variants.push(Self::without("co-scheduling", &[Mechanism::Cohorts]));
            variants.push(Self::without(
                "yields",
                &[Mechanism::Yield, Mechanism::Ipi, Mechanism::Relaxed],
            ));
        }
        if each_mechanism {
            let each = Mechanism::value_variants().iter();
            variants.extend(each.map(|&mechanism| Self::of_one(mechanism)));
        }
        variants
    }
}

/// What was measured of a cell.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct CellResult {
    /// The cell.
    pub cell: Cell,
    /// Where it was measured.
    pub lab: LabInfo,
    /// What each kind of member does alone under the stock scheduler; the first of each kind, in their order.
    pub alone: Vec<Alone>,
    /// All other windows, by scheduler, then by seed.
    pub runs: Vec<Run>,
    /// What the scheduler's programs executed in one more window under Cohort, from the first seed; empty if something is
    /// published of the cell.
    pub ops: Vec<OpCost>,
    /// Pause-loop exits: of each kind of VM alone, then under the stock scheduler, then under Cohort, from the first seed; empty if something is
    /// published of the cell, and in results that are older.
    #[serde(default)]
    pub spins: Vec<SpinExits>,
}

/// How often vCPUs left their guests because they spun, from the VMs' start to the window's end.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct SpinExits {
    /// The scheduler, or the member that was alone.
    pub who: String,
    /// Of all VMs that ran, per second.
    pub per_s: f64,
}

/// What one of the scheduler's programs executed in a window.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct OpCost {
    /// The op or hook.
    pub name: String,
    /// How often it ran.
    pub runs: u64,
    /// How long in all; on the exact machine a ns is an instruction.
    pub ns: u64,
}

/// A member alone.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Alone {
    /// Its name.
    pub name: String,
    /// Operations per second.
    pub rate: f64,
    /// CPUs that it used on average.
    pub cpus: f64,
    /// Of its timed operations.
    pub latency: Option<Latency>,
}

/// A window.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Run {
    /// The scheduler's name.
    pub scheduler: String,
    /// How the members were shifted against each other.
    pub seed: u64,
    /// Length of the window, seconds.
    pub seconds: f64,
    /// Operations per second of each member, in their order.
    pub rates: Vec<f64>,
    /// Of each member's timed operations.
    pub latencies: Vec<Option<Latency>>,
    /// What the rates mean.
    pub progress: Progress,
}

/// How long timed operations took: how late a sleeper woke, or a grace period.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub struct Latency {
    /// How many there were.
    pub count: u64,
    /// Half of them took less than this, us.
    pub p50_us: f64,
    /// All but a hundredth of them took less than this, us.
    pub p99_us: f64,
    /// The longest took about this, us.
    pub longest_us: f64,
}

#[cfg(test)]
pub(crate) fn example() -> Cell {
    let text = r#"
        [[cell]]
        name = "lock-2x2"
        cpus = 2
        guests = "micro"
        seeds = 2
        window_ms = 400
        vms = [{ count = 2, vcpus = 2, workload = "lock" }]
    "#;
    Matrix::parse(text).unwrap().cells.remove(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is wrong with the example after `change`.
    fn refusal(change: impl FnOnce(&mut Cell)) -> String {
        let mut cell = example();
        change(&mut cell);
        format!("{:#}", cell.check().expect_err("it is wrong"))
    }

    #[test]
    fn the_matrices_of_this_project_are_sound_and_share_no_name() {
        let matrix = Matrix::parse(include_str!("../matrix.toml")).unwrap();
        let published = Matrix::parse(include_str!("../published.toml")).unwrap();
        assert!(matrix.cells.iter().all(|cell| cell.published.is_none()));
        assert!(published.cells.iter().all(|cell| cell.published.is_some()));
        // Their results are kept side by side.
        let names = |matrix: &Matrix| -> BTreeSet<String> {
            matrix.cells.iter().map(|cell| cell.name.clone()).collect()
        };
        assert!(names(&matrix).is_disjoint(&names(&published)));
    }

    #[test]
    fn what_is_left_out_has_a_default() {
        let cell = example();
        assert_eq!((cell.sockets, cell.settle_ms), (1, 100));
        assert_eq!((cell.pause, cell.paravirtual), (Pause::Exits, false));
        let vms = &cell.vms[0];
        assert_eq!(
            (vms.weight, vms.operation_us, vms.locked_percent),
            (100, 100, 33)
        );
        assert_eq!(
            cell.to_string(),
            "2 VMs of 2 vCPUs: lock (33 % locked); micro guests"
        );
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_the_cells_name() {
        let text = refusal(|cell| cell.seeds = 0);
        assert_eq!(
            text,
            "The cell \"lock-2x2\" cannot be run: `seeds` is 0; it must be from 1 to 20"
        );
        assert!(refusal(|cell| cell.name = "A b".into()).contains("small letters"));
        assert!(refusal(|cell| cell.sockets = 3).contains("`sockets`"));
        assert!(refusal(|cell| (cell.cpus, cell.sockets) = (3, 2)).contains("cannot be divided"));
        assert!(refusal(|cell| cell.vms.clear()).contains("no VM"));
        assert!(refusal(|cell| cell.vms[0].sockets = 2).contains("no sockets"));
        assert!(refusal(|cell| cell.paravirtual = true).contains("paravirtual"));
        assert!(refusal(|cell| cell.vms[0].workload = Workload::Rcu).contains("rcu needs a guest"));
        assert!(refusal(|cell| cell.vms[0].width = 31).contains("`vcpus`"));
        assert!(refusal(|cell| cell.host = cell.vms.clone()).contains("no work of the host"));
        let split_work = |cell: &mut Cell| {
            cell.host = cell.vms.clone();
            cell.host[0].workload = Workload::Busy;
            cell.host[0].sockets = 2;
        };
        assert!(refusal(split_work).contains("leave its `sockets` out"));
        let odd_pipe = |cell: &mut Cell| {
            cell.vms[0].workload = Workload::Pipe;
            cell.vms[0].width = 3;
        };
        assert!(refusal(odd_pipe).contains("cannot be paired"));
    }

    #[test]
    fn unknown_keys_and_two_cells_of_one_name_are_refused() {
        let cell = toml::to_string(&example()).unwrap();
        // Tables of a cell come after its other keys.
        let cell = cell.replace("[[vms]]", "[[cell.vms]]");
        let one = format!("[[cell]]\n{cell}");
        Matrix::parse(&one).unwrap();
        let error = Matrix::parse(&format!("{one}\n{one}")).unwrap_err();
        assert!(error.to_string().contains("Two cells"), "{error}");
        let error = Matrix::parse(&one.replace("cpus = 2", "cpus = 2\nrepeats = 3")).unwrap_err();
        assert!(error.to_string().contains("repeats"), "{error}");
    }

    #[test]
    fn members_are_named_and_those_that_differ_in_weight_only_are_alike() {
        let mut cell = example();
        let mut heavy = cell.vms[0].clone();
        (heavy.count, heavy.weight) = (1, 300);
        cell.vms.push(heavy);
        cell.host.push(Party {
            workload: Workload::Fork,
            count: 1,
            ..cell.vms[0].clone()
        });
        let members = cell.members();
        let names: Vec<&str> = members.iter().map(|member| &*member.name).collect();
        assert_eq!(names, ["vm1", "vm2", "vm3", "host1"]);
        assert!(members[0].is_like(&members[2]));
        assert!(!members[0].is_like(&members[3]));
    }

    #[test]
    fn variants_switch_what_their_names_say() {
        let on = |variant: &Variant, mechanism: Mechanism| {
            let switches = variant.switches();
            let switch = switches.iter().find(|switch| switch.mechanism == mechanism);
            switch.unwrap().on
        };
        let mut cell = example();
        let usual = Variant::all(&cell, false);
        assert_eq!(usual.len(), 3);
        assert!(on(&usual[0], Mechanism::Cohorts) && on(&usual[0], Mechanism::Relaxed));
        assert!(!on(&usual[1], Mechanism::Cohorts) && on(&usual[1], Mechanism::Yield));
        assert!(!on(&usual[2], Mechanism::Relaxed) && on(&usual[2], Mechanism::Cohorts));
        let all = Variant::all(&cell, true);
        assert_eq!(all.len(), 3 + Mechanism::value_variants().len());
        let named = |name: &str| all.iter().find(|variant| variant.name == name).unwrap();
        assert!(!on(named("Cohort without wake"), Mechanism::Wake));
        assert!(on(named("Cohort without wake"), Mechanism::Packing));
        cell.published = Some(Published {
            figure: "+14 %".into(),
            goal_percent: 14.0,
        });
        assert_eq!(Variant::all(&cell, false), [Variant::usual()]);
    }
}
