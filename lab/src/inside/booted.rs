// SPDX-License-Identifier: GPL-2.0-only
//! Booted guests: QEMU under L1's KVM with a Debian kernel and a workload, our own or a real one, whose operations are
//! counted exactly and without the guest's help. Not for micro guests, nor for what is inside a guest (`lab/guest`).
//!
//! The guest's memory is a file in L1's memory. The workload counts in one page of it and prints that page's
//! physical address once; from then on the counters are read out of the file whenever someone likes.
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use cohort::process::wait::wait_for;
use cohort_micro::Histogram;
use memmap2::{MmapOptions, MmapRaw};
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use super::cgroup::{Cgroup, CpuMax};
use super::info::LabInfo;
use super::process;
use super::windows::Subject;
use crate::guest::{
    COUNTER_MAGIC, COUNTER_PAGE_BYTES, COUNTER_SLOT_BYTES, COUNTER_SLOTS, LATENCIES_OFFSET,
    LATENCY_BUCKETS, REAL_WORKLOADS,
};
use crate::outside::machine::{Kind, SHORT_BOOT};

const QEMU: &str = "/usr/bin/qemu-system-x86_64";
/// The guests' kernel.
pub const KERNEL: &str = "/cohort/guest/vmlinux";
/// The guests' initrd, which runs the workload that the kernel's command line names.
pub const INITRD: &str = "/cohort/guest/initrd";
/// A tmpfs: guest memory on anything else would be written to a disk.
const MEMORY_DIRECTORY: &str = "/dev/shm";
/// Names in a guest's own directory there: its memory, and the socket of its QEMU's monitor.
const MEMORY: &str = "ram";
const MONITOR: &str = "monitor";
/// What QEMU's monitor prints when it waits for a command.
const PROMPT: &str = "(qemu) ";
const MONITOR_TIMEOUT: Duration = Duration::from_secs(30);
const LOG_DIRECTORY: &str = "/out/guests";
const OWN_MEMORY_MIB: u32 = 256;
/// The files of real workloads are in memory. Four such guests fit into what [`MEMORY_DIRECTORY`] holds on the exact
/// machine.
const REAL_MEMORY_MIB: u32 = 400;
/// Up to here q35 keeps all memory below 4 GiB, where a physical address is an offset in the memory file.
const MAX_MEMORY_MIB: u32 = 2048;
/// Quiet, because each console character is several VM exits; the timer check assumes CPUs of at most 4 GHz,
/// and emulated ones may look faster. What [`SHORT_BOOT`] leaves out would go on for seconds after the boot, in windows too.
const KERNEL_PARAMETERS: &str = "console=ttyS0 quiet panic=-1 no_timer_check rdinit=/init";
/// Iterations of the empty loop, two instructions each, that take the exact machine 100 us.
const DEFAULT_WORK: u64 = 50_000;
const COUNTING_PREFIX: &str = "counting at 0x";

/// What a guest is to do.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Workload {
    /// One of our own or of the real workloads (`crate::guest`). All else is for our own only.
    pub name: String,
    /// Iterations of an empty loop per operation.
    pub work: u64,
    /// Spin only: part of an operation's work that is done inside the lock, in percent.
    pub locked_percent: u32,
    /// Number of threads; one per vCPU when not given.
    pub threads: Option<u32>,
    /// Barrier only: wait asleep instead of spinning.
    pub sleeping: bool,
}

impl Workload {
    /// The workload `name` with about 100 us of work per operation on the exact machine.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.into(),
            work: DEFAULT_WORK,
            locked_percent: 33,
            threads: None,
            sleeping: false,
        }
    }

    /// Whether it is programs of the guests' image.
    pub fn is_real(&self) -> bool {
        REAL_WORKLOADS.contains(&self.name.as_str())
    }

    /// The command line of a guest's kernel.
    pub fn kernel_parameters(&self) -> String {
        format!("{KERNEL_PARAMETERS} {SHORT_BOOT} -- {}", self.arguments())
    }

    fn arguments(&self) -> String {
        if self.is_real() {
            return self.name.clone();
        }
        let mut arguments = format!(
            "{} work={} locked_percent={}",
            self.name, self.work, self.locked_percent
        );
        if let Some(threads) = self.threads {
            arguments += &format!(" threads={threads}");
        }
        if self.sleeping {
            arguments += " policy=sleep";
        }
        arguments
    }
}

/// A guest's virtual CPUs as it sees them.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub struct Topology {
    /// Number of sockets.
    pub sockets: u32,
    /// Cores per socket.
    pub cores: u32,
    /// Threads per core.
    pub threads: u32,
}

impl Topology {
    /// One socket with `vcpus` cores.
    pub fn flat(vcpus: u32) -> Self {
        Self {
            sockets: 1,
            cores: vcpus,
            threads: 1,
        }
    }

    /// Number of vCPUs.
    pub fn vcpus(self) -> u32 {
        self.sockets * self.cores * self.threads
    }
}

/// A guest to start.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct GuestSpec {
    /// Its name, also that of its cgroup `/sys/fs/cgroup/lab/<name>`.
    pub name: String,
    /// Its vCPUs.
    pub topology: Topology,
    /// Memory in MiB, at most 2048.
    pub memory_mib: u32,
    /// cpu.weight of its cgroup.
    pub weight: u32,
    /// cpu.max of its cgroup: CPU time in us per period of 100 ms; no limit when not given.
    pub quota_us_per_100ms: Option<u64>,
    /// CPUs of L1 it may use; the lab's guest CPUs when empty.
    pub cpus: Vec<u32>,
    /// Whether its kernel is offered KVM's paravirtual spin locks, TLB flushes, IPIs and yields.
    pub paravirtual: bool,
    /// HLT, MWAIT and PAUSE run in the guest without an exit (QEMU's `cpu-pm`), as dedicated hosts do. PAUSE alone
    /// is no property of a guest: L1's kernel decides it for all.
    pub exitless_idle: bool,
    /// What it does.
    pub workload: Workload,
    /// Further arguments for its QEMU; of those that are given once, these count.
    #[serde(default)]
    pub qemu: Vec<String>,
}

impl GuestSpec {
    /// A guest of `vcpus` vCPUs without paravirtual help, with weight 100 and no limit.
    pub fn new(name: &str, vcpus: u32, workload: Workload) -> Self {
        Self {
            name: name.into(),
            topology: Topology::flat(vcpus),
            memory_mib: if workload.is_real() {
                REAL_MEMORY_MIB
            } else {
                OWN_MEMORY_MIB
            },
            weight: 100,
            quota_us_per_100ms: None,
            cpus: Vec::new(),
            paravirtual: false,
            exitless_idle: false,
            workload,
            qemu: Vec::new(),
        }
    }

    fn cpu_model(&self) -> &'static str {
        if self.paravirtual {
            "host"
        } else {
            "host,-kvm-pv-unhalt,-kvm-pv-tlb-flush,-kvm-pv-ipi,-kvm-pv-sched-yield"
        }
    }

    fn command(&self, directory: &Path, serial: &Path, image: Option<&Path>) -> Command {
        let Topology {
            sockets,
            cores,
            threads,
        } = self.topology;
        let mut command = Command::new(QEMU);
        command
            .args(["-name", &format!("{},debug-threads=on", self.name)])
            .args(["-accel", "kvm", "-cpu", self.cpu_model()])
            // Guests leave QEMU's HPET once they have better timers, but QEMU goes on to wake at each of its ticks.
            // virt-install and OpenStack give their guests none either.
            .args(["-machine", "q35,hpet=off,memory-backend=ram"])
            .args(["-m", &format!("{}M", self.memory_mib)])
            .arg("-object")
            .arg(format!(
                "memory-backend-file,id=ram,size={}M,share=on,mem-path={}",
                self.memory_mib,
                directory.join(MEMORY).display()
            ))
            .arg("-smp")
            .arg(format!(
                "{},sockets={sockets},cores={cores},threads={threads}",
                self.topology.vcpus()
            ))
            .args(["-kernel", KERNEL, "-initrd", INITRD])
            .args(["-append", &self.workload.kernel_parameters()])
            .args([
                "-nodefaults",
                "-no-user-config",
                "-no-reboot",
                "-display",
                "none",
            ])
            .args(["-serial", &format!("file:{}", serial.display())])
            .arg("-monitor")
            .arg(format!(
                "unix:{},server=on,wait=off",
                directory.join(MONITOR).display()
            ));
        if let Some(image) = image {
            command
                .arg("-drive")
                .arg(format!(
                    "if=none,id=image,format=raw,readonly=on,file={}",
                    image.display()
                ))
                .args(["-device", "virtio-blk-pci,drive=image"]);
        }
        if self.exitless_idle {
            command.args(["-overcommit", "cpu-pm=on"]);
        }
        command.args(&self.qemu).stdin(Stdio::null());
        command
    }
}

/// A running guest. Dropping it kills it and removes its cgroup and its memory; its serial log stays in
/// `/out/guests`.
pub struct BootedGuest {
    spec: GuestSpec,
    process: Child,
    // The process is dead before any field is dropped (see Drop), so its cgroup and its memory can go.
    cgroup: Cgroup,
    memory_directory: TempDir,
    log: PathBuf,
    serial: PathBuf,
    counters: Option<CounterPage>,
    vcpu_tids: Vec<u32>,
}

impl BootedGuest {
    /// Starts a guest; it is booting when this returns. Call from a thread that outlives it, because QEMU is
    /// killed when that thread ends.
    ///
    /// # Errors
    /// When QEMU or the cgroup cannot be set up.
    pub fn start(lab: &LabInfo, spec: GuestSpec) -> Result<Self> {
        ensure!(
            (1..=MAX_MEMORY_MIB).contains(&spec.memory_mib),
            "Guest {} is to have {} MiB of memory; possible are 1 to {MAX_MEMORY_MIB}",
            spec.name,
            spec.memory_mib
        );
        let image = lab
            .guest_image
            .as_deref()
            .filter(|_| spec.workload.is_real());
        ensure!(
            !spec.workload.is_real() || image.is_some(),
            "Guest {} is to run {}, which is in the guests' image, and that is not attached: boot with --guest-image",
            spec.name,
            spec.workload.name
        );
        let memory_directory = tempfile::Builder::new()
            .prefix(&format!("guest-{}-", spec.name))
            .tempdir_in(MEMORY_DIRECTORY)
            .with_context(|| {
                format!(
                    "Memory of guest {} cannot be placed in {MEMORY_DIRECTORY}",
                    spec.name
                )
            })?;
        let (serial, log) = log_paths(&spec.name)?;
        let cgroup = Cgroup::create(&spec.name)?;
        let cpus = if spec.cpus.is_empty() {
            &lab.guest_cpus
        } else {
            &spec.cpus
        };
        cgroup.set_cpus(cpus)?;
        cgroup.set_weight(spec.weight)?;
        if let Some(quota_us) = spec.quota_us_per_100ms {
            cgroup.set_max(CpuMax::Quota {
                quota_us,
                period_us: 100_000,
            })?;
        }
        let output =
            File::create(&log).with_context(|| format!("{} cannot be written", log.display()))?;
        let mut command = spec.command(memory_directory.path(), &serial, image);
        command.stdout(output.try_clone()?).stderr(output);
        let process = process::start(command, cpus, Some(&cgroup))?;
        Ok(Self {
            spec,
            process,
            cgroup,
            memory_directory,
            log,
            serial,
            counters: None,
            vcpu_tids: Vec::new(),
        })
    }

    /// What it was started as.
    pub fn spec(&self) -> &GuestSpec {
        &self.spec
    }

    /// Its cgroup, to change its weight, its limit or its CPUs while it runs, or to freeze it.
    pub fn cgroup(&self) -> &Cgroup {
        &self.cgroup
    }

    /// Process id of its QEMU.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Waits until its workload runs and its counter moves.
    ///
    /// # Errors
    /// When the guest ends or `timeout` (lab time) is over before that, with the end of its console.
    pub fn wait_until_counting(&mut self, timeout: Duration) -> Result<()> {
        let address = self.wait_alive(timeout, |guest| {
            Ok(counter_address(
                &fs::read_to_string(&guest.serial).unwrap_or_default(),
            ))
        })?;
        let memory = self.memory_directory.path().join(MEMORY);
        self.counters = Some(CounterPage::open(&memory, address)?);
        self.vcpu_tids = vcpu_tids(self.pid())?;
        ensure!(
            self.vcpu_tids.len() == self.spec.topology.vcpus() as usize,
            "QEMU of guest {} has {} vCPU threads instead of {}",
            self.spec.name,
            self.vcpu_tids.len(),
            self.spec.topology.vcpus()
        );
        let start = self.progress()?;
        self.wait_alive(timeout, |guest| {
            Ok((guest.progress()? > start).then_some(()))
        })
    }

    fn wait_alive<T>(
        &mut self,
        timeout: Duration,
        done: impl Fn(&Self) -> Result<Option<T>>,
    ) -> Result<T> {
        let what = format!("Counting in guest {}", self.spec.name);
        wait_for(&what, timeout, || match self.exit_status()? {
            None => done(self),
            Some(status) => bail!("QEMU of guest {} ended ({status})", self.spec.name),
        })
        .map_err(|error| anyhow!("{error:#}. {}", self.situation()))
    }

    /// Operations done so far, by all of its threads, at this very moment.
    ///
    /// # Errors
    /// Before `wait_until_counting`, or when the guest's counter page is not there any more.
    pub fn progress(&self) -> Result<u64> {
        self.counter_page()?
            .total()
            .with_context(|| format!("Guest {} cannot be counted", self.spec.name))
    }

    fn counter_page(&self) -> Result<&CounterPage> {
        self.counters.as_ref().with_context(|| {
            format!(
                "Guest {} was not waited for until it counted",
                self.spec.name
            )
        })
    }

    /// Whether its QEMU still runs.
    ///
    /// # Errors
    /// When the kernel does not say.
    pub fn alive(&mut self) -> Result<bool> {
        Ok(self.exit_status()?.is_none())
    }

    /// CPU time of each vCPU's thread so far, nanoseconds; that of a running one counts from its last tick.
    ///
    /// # Errors
    /// When a thread is gone.
    pub fn vcpu_cpu_time_ns(&self) -> Result<Vec<u64>> {
        self.vcpu_tids
            .iter()
            .map(|tid| thread_cpu_time_ns(self.pid(), *tid))
            .collect()
    }

    /// Kills its QEMU as `kill -9` does, and waits for its end. Its cgroup stays until the guest is dropped.
    ///
    /// # Errors
    /// When it cannot be killed.
    pub fn kill(&mut self) -> Result<()> {
        self.process
            .kill()
            .with_context(|| format!("QEMU of guest {} cannot be killed", self.spec.name))?;
        self.process.wait()?;
        Ok(())
    }

    fn exit_status(&mut self) -> Result<Option<ExitStatus>> {
        self.process
            .try_wait()
            .with_context(|| format!("The state of guest {} is not known", self.spec.name))
    }

    /// A connection to its QEMU's monitor, which takes one at a time.
    ///
    /// # Errors
    /// When QEMU does not listen, yet or any more.
    pub fn monitor(&self) -> Result<UnixStream> {
        let path = self.memory_directory.path().join(MONITOR);
        UnixStream::connect(&path)
            .with_context(|| format!("QEMU does not answer at {}", path.display()))
    }

    /// What its QEMU's monitor answers to `command`; as a person would see it, with the command itself.
    ///
    /// # Errors
    /// When QEMU does not answer.
    pub fn ask(&self, command: &str) -> Result<String> {
        let mut monitor = self.monitor()?;
        monitor.set_read_timeout(Some(MONITOR_TIMEOUT))?;
        read_until_prompt(&mut monitor)?;
        monitor.write_all(format!("{command}\n").as_bytes())?;
        read_until_prompt(&mut monitor)
            .with_context(|| format!("QEMU of guest {} was told {command}", self.spec.name))
    }

    /// What its vCPUs were at, as QEMU's monitor prints it.
    fn registers(&self) -> Result<String> {
        Ok(self
            .ask("info registers -a")?
            .lines()
            .filter(|line| line.starts_with("CPU#") || line.contains("RIP") || line.contains("RSP"))
            .collect::<Vec<_>>()
            .join("\n"))
    }

    fn last_words(&self) -> String {
        let tail = |path: &Path| {
            let text = fs::read(path).unwrap_or_default();
            String::from_utf8_lossy(&text[text.len().saturating_sub(2000)..]).into_owned()
        };
        format!(
            "Its console ended with:\n{}\nIts QEMU said:\n{}",
            tail(&self.serial),
            tail(&self.log)
        )
    }
}

impl Subject for BootedGuest {
    fn name(&self) -> &str {
        &self.spec.name
    }

    fn operations(&self) -> Result<u64> {
        self.progress()
    }

    fn latencies(&self) -> Result<Histogram> {
        Ok(self.counter_page()?.latencies())
    }

    fn latency_unit_ns(&self) -> f64 {
        1.0
    }

    fn cgroup(&self) -> &Cgroup {
        &self.cgroup
    }

    /// None before `wait_until_counting`.
    fn vcpu_tids(&self) -> Vec<u32> {
        self.vcpu_tids.clone()
    }

    fn ensure_alive(&mut self) -> Result<()> {
        match self.exit_status()? {
            None => Ok(()),
            Some(status) => bail!(
                "QEMU of guest {} ended ({status}). {}",
                self.spec.name,
                self.last_words()
            ),
        }
    }

    fn situation(&self) -> String {
        // Not those of `vcpu_tids`, which are known only once it has counted.
        let vcpus: Vec<String> = vcpu_tids(self.pid())
            .unwrap_or_default()
            .into_iter()
            .enumerate()
            .map(|(vcpu, tid)| format!("vCPU {vcpu}: {}", thread_situation(self.pid(), tid)))
            .collect();
        format!(
            "Guest {}: {}.\nIts registers:\n{}\n{}",
            self.spec.name,
            vcpus.join("; "),
            self.registers()
                .unwrap_or_else(|error| format!("{error:#}")),
            self.last_words()
        )
    }
}

impl Drop for BootedGuest {
    fn drop(&mut self) {
        // It may be dead already, which is what is wanted.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// All that comes until QEMU waits for a command.
fn read_until_prompt(monitor: &mut impl Read) -> Result<String> {
    let mut text = Vec::new();
    let mut part = [0; 4096];
    while !text.ends_with(PROMPT.as_bytes()) {
        let length = monitor
            .read(&mut part)
            .context("QEMU's monitor is silent")?;
        ensure!(length > 0, "QEMU's monitor was closed");
        text.extend_from_slice(&part[..length]);
    }
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Starts all `specs` at once and waits until each of them counts. On an emulated host, which loses a guest in its boot
/// now and then (docs/lab.md), one of them may be started again; what it was at is printed.
///
/// # Errors
/// When one of them cannot be started or does not count in time.
pub fn start_all(
    lab: &LabInfo,
    specs: Vec<GuestSpec>,
    timeout: Duration,
) -> Result<Vec<BootedGuest>> {
    let mut guests = specs
        .into_iter()
        .map(|spec| BootedGuest::start(lab, spec))
        .collect::<Result<Vec<BootedGuest>>>()?;
    let mut chances = if lab.machine == Kind::Fast { 1 } else { 0 };
    for number in 0..guests.len() {
        let Err(error) = guests[number].wait_until_counting(timeout) else {
            continue;
        };
        if chances == 0 {
            return Err(error);
        }
        chances -= 1;
        eprintln!("lab: {error:#}\nlab: it is started again, once");
        let spec = guests[number].spec.clone();
        // First the old one goes: the new one has its name and its cgroup.
        drop(guests.remove(number));
        guests.insert(number, BootedGuest::start(lab, spec)?);
        guests[number].wait_until_counting(timeout)?;
    }
    Ok(guests)
}

fn log_paths(name: &str) -> Result<(PathBuf, PathBuf)> {
    static STARTED: AtomicU32 = AtomicU32::new(0);
    let number = STARTED.fetch_add(1, Ordering::Relaxed);
    let directory = Path::new(LOG_DIRECTORY);
    fs::create_dir_all(directory).with_context(|| format!("{LOG_DIRECTORY} cannot be made"))?;
    let stem = format!("{}-{}-{number}", name.replace('/', "-"), std::process::id());
    Ok((
        directory.join(format!("{stem}.console")),
        directory.join(format!("{stem}.qemu")),
    ))
}

/// The counter page's address in a guest's console output, once its line is complete.
fn counter_address(console: &str) -> Option<u64> {
    let rest = console.split(COUNTING_PREFIX).nth(1)?;
    let (digits, _) = rest.split_once(['\r', '\n'])?;
    u64::from_str_radix(digits, 16).ok()
}

fn vcpu_tids(pid: u32) -> Result<Vec<u32>> {
    let directory = format!("/proc/{pid}/task");
    let mut vcpus = Vec::new();
    for entry in fs::read_dir(&directory).with_context(|| format!("{directory} cannot be read"))? {
        let path = entry?.path();
        // A helper thread of QEMU may end between the two calls.
        let Ok(comm) = fs::read_to_string(path.join("comm")) else {
            continue;
        };
        if let (Some(index), Some(tid)) = (
            vcpu_index(&comm),
            path.file_name().and_then(|tid| tid.to_str()),
        ) {
            vcpus.push((index, tid.parse()?));
        }
    }
    vcpus.sort_unstable();
    Ok(vcpus.into_iter().map(|(_, tid)| tid).collect())
}

/// 3 for "CPU 3/KVM".
fn vcpu_index(comm: &str) -> Option<u32> {
    comm.trim_end()
        .strip_prefix("CPU ")?
        .strip_suffix("/KVM")?
        .parse()
        .ok()
}

/// CPU time of a thread, nanoseconds: the first number of its schedstat.
fn thread_cpu_time_ns(pid: u32, tid: u32) -> Result<u64> {
    let path = format!("/proc/{pid}/task/{tid}/schedstat");
    let text = fs::read_to_string(&path).with_context(|| format!("{path} cannot be read"))?;
    text.split_whitespace()
        .next()
        .and_then(|number| number.parse().ok())
        .ok_or_else(|| anyhow!("{path} does not start with a number"))
}

/// State, CPU and CPU time of a thread, for people.
fn thread_situation(pid: u32, tid: u32) -> String {
    let stat = fs::read_to_string(format!("/proc/{pid}/task/{tid}/stat")).unwrap_or_default();
    // The second field may hold anything but ends with the last parenthesis; the state is the third.
    let fields: Vec<&str> = stat
        .rsplit_once(')')
        .map_or("", |(_, rest)| rest)
        .split_whitespace()
        .collect();
    let field = |number: usize| fields.get(number - 3).copied().unwrap_or("?");
    let cpu_time_ms =
        thread_cpu_time_ns(pid, tid).map_or_else(|_| "?".into(), |ns| (ns / 1_000_000).to_string());
    format!(
        "state {}, CPU {}, {cpu_time_ms} ms of CPU time so far",
        field(3),
        field(39)
    )
}

/// The page in which a workload counts, seen from L1.
pub(super) struct CounterPage {
    mapping: MmapRaw,
}

impl CounterPage {
    /// The page at `address` of the file that is a guest's memory.
    pub(super) fn open(memory: &Path, address: u64) -> Result<Self> {
        let what = || {
            let memory = memory.display();
            format!("The counter page at {address:#x} of {memory} cannot be mapped")
        };
        let file = File::options()
            .read(true)
            .write(true)
            .open(memory)
            .with_context(what)?;
        let mapping = MmapOptions::new()
            .offset(address)
            .len(COUNTER_PAGE_BYTES)
            .map_raw(&file)
            .with_context(what)?;
        Ok(Self { mapping })
    }

    /// Sum of all threads' operations.
    pub(super) fn total(&self) -> Result<u64> {
        ensure!(
            self.word(0) == COUNTER_MAGIC,
            "the page at the address that it printed holds no counters"
        );
        Ok((1..=COUNTER_SLOTS)
            .map(|slot| self.word(slot * COUNTER_SLOT_BYTES))
            .sum())
    }

    /// How long its timed operations took so far, ns.
    pub(super) fn latencies(&self) -> Histogram {
        histogram(|offset| self.word(offset))
    }

    fn word(&self, offset: usize) -> u64 {
        assert!(offset + 8 <= COUNTER_PAGE_BYTES && offset.is_multiple_of(8));
        // SAFETY: inside the mapping and aligned; the guest writes the same words with single stores, so a volatile
        // read of 8 bytes is whole.
        unsafe {
            let word = self.mapping.as_ptr().add(offset).cast::<u64>();
            word.read_volatile()
        }
    }
}

/// The histogram of a counter page whose words `word` reads by their offsets.
fn histogram(word: impl Fn(usize) -> u64) -> Histogram {
    let mut latencies = Histogram::default();
    latencies.add_counts((0..LATENCY_BUCKETS).map(|bucket| word(LATENCIES_OFFSET + bucket * 8)));
    latencies
}

/// That of a page that was read from a file.
#[cfg(test)]
pub(crate) fn latencies_in(page: &[u8]) -> Histogram {
    histogram(|offset| {
        let bytes = page[offset..offset + 8].try_into();
        u64::from_le_bytes(bytes.expect("these are eight"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(spec: &GuestSpec) -> String {
        let image = spec.workload.is_real().then_some(Path::new("/dev/vdc"));
        let command = spec.command(Path::new("/dev/shm/x"), Path::new("/out/serial"), image);
        command
            .get_args()
            .map(|argument| argument.to_string_lossy())
            .collect::<Vec<_>>()
            .join(" ")
    }

    #[test]
    fn the_address_counts_only_when_its_line_is_complete() {
        assert_eq!(
            counter_address("boot\r\ncounting at 0x1f000\r\n"),
            Some(0x1f000)
        );
        assert_eq!(counter_address("counting at 0x1f"), None);
        assert_eq!(counter_address("workload failed: mmap\r\n"), None);
    }

    #[test]
    fn only_vcpu_threads_are_vcpus() {
        assert_eq!(vcpu_index("CPU 11/KVM\n"), Some(11));
        assert_eq!(vcpu_index("qemu-system-x86\n"), None);
        assert_eq!(vcpu_index("CPU 0/TCG\n"), None);
    }

    #[test]
    fn a_guest_gets_the_features_topology_and_workload_of_its_spec() {
        let mut spec = GuestSpec::new("one", 4, Workload::new("spin"));
        let text = arguments(&spec);
        assert!(
            text.contains("-smp 4,sockets=1,cores=4,threads=1"),
            "{text}"
        );
        assert!(text.contains("-kvm-pv-unhalt"), "{text}");
        assert!(
            text.contains(&format!("-- spin work={DEFAULT_WORK} locked_percent=33")),
            "{text}"
        );
        assert!(!text.contains("cpu-pm"), "{text}");

        spec.topology = Topology {
            sockets: 2,
            cores: 2,
            threads: 1,
        };
        spec.paravirtual = true;
        spec.exitless_idle = true;
        spec.workload.threads = Some(1);
        spec.workload.sleeping = true;
        let text = arguments(&spec);
        assert!(
            text.contains("-smp 4,sockets=2,cores=2,threads=1"),
            "{text}"
        );
        assert!(text.contains("-cpu host "), "{text}");
        assert!(text.contains("threads=1 policy=sleep"), "{text}");
        assert!(text.contains("-overcommit cpu-pm=on"), "{text}");
    }

    #[test]
    fn a_real_workload_gets_the_image_and_no_options() {
        let own = arguments(&GuestSpec::new("one", 2, Workload::new("busy")));
        assert!(!own.contains("/dev/vdc"), "{own}");
        let real = arguments(&GuestSpec::new("one", 2, Workload::new("redis")));
        assert!(real.contains("readonly=on,file=/dev/vdc"), "{real}");
        assert!(real.contains("-- redis -nodefaults"), "{real}");
    }

    #[test]
    fn counters_are_summed_and_a_page_without_magic_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let memory = directory.path().join("ram");
        let mut content = vec![0u8; 3 * COUNTER_PAGE_BYTES];
        let page = 2 * COUNTER_PAGE_BYTES;
        content[page..page + 8].copy_from_slice(&COUNTER_MAGIC.to_le_bytes());
        for (slot, count) in [(1, 5u64), (2, 7), (COUNTER_SLOTS, 100)] {
            let offset = page + slot * COUNTER_SLOT_BYTES;
            content[offset..offset + 8].copy_from_slice(&count.to_le_bytes());
        }
        content[page + LATENCIES_OFFSET + 8 * 40] = 9;
        fs::write(&memory, content).unwrap();
        let counters = |address: usize| CounterPage::open(&memory, address as u64).unwrap();
        assert_eq!(counters(page).total().unwrap(), 112);
        assert_eq!(counters(page).latencies().len(), 9);
        assert!(counters(0).total().is_err());
    }

    #[test]
    fn a_threads_situation_is_its_state_and_cpu() {
        let pid = std::process::id();
        let own = thread_situation(pid, pid);
        assert!(
            own.starts_with("state S, CPU ") || own.starts_with("state R, CPU "),
            "{own}"
        );
        assert!(thread_situation(pid, u32::MAX).starts_with("state ?"));
    }

    #[test]
    fn cpu_time_of_a_thread_is_read_from_its_schedstat() {
        let pid = std::process::id();
        assert!(thread_cpu_time_ns(pid, pid).is_ok());
        assert!(thread_cpu_time_ns(pid, u32::MAX).is_err());
    }
}
