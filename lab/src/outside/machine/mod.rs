// SPDX-License-Identifier: GPL-2.0-only
//! The three machines that L1 can run on, and what they have in common: CPUs, memory, disks, ports, kernel parameters.
//! How each is started is in `bochs.rs` (exact) and `qemu.rs` (fast, hardware). Not for watching one run (boot.rs).

pub mod bochs;
mod direct_load;
pub mod qemu;

use std::fmt;
use std::fs::{self, File};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::image::Image;
use super::kernel::Kernel;
use super::tool;
use bochs::Bochs;

/// What executes L1's code.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Bochs, one instruction per tick: figures repeat, at a hundredth of a real CPU's speed
    Exact,
    /// QEMU's emulation: several times quicker, no figure means anything
    Fast,
    /// QEMU on KVM with nested virtualisation, where this machine has it
    Hardware,
}

impl Kind {
    /// The machine to take where none is asked for: hardware where it can be had, else the exact one, or the fast one
    /// for what needs no time.
    pub fn default_here(needs_no_time: bool) -> Self {
        if can_nest(Path::new("/")) {
            Self::Hardware
        } else if needs_no_time {
            Self::Fast
        } else {
            Self::Exact
        }
    }

    /// Refuses what this machine cannot run.
    pub fn check(self) -> Result<()> {
        ensure!(
            self != Self::Hardware || can_nest(Path::new("/")),
            "--machine hardware needs a CPU with SVM or VMX, KVM with `nested` on, and a /dev/kvm that this user may \
             open: leave the option out."
        );
        Ok(())
    }

    /// CPUs where nobody says how many; the fast machine keeps one for itself.
    pub fn default_cpus(self) -> u32 {
        match self {
            Self::Fast => 3,
            Self::Exact | Self::Hardware => 2,
        }
    }

    /// Memory where nobody says how much, MiB.
    pub fn default_memory_mib(self) -> u32 {
        match self {
            Self::Exact => bochs::MOST_IN_MEMORY_MIB,
            Self::Fast | Self::Hardware => 4096,
        }
    }

    /// How many CPUs are not for guests where nobody says so. QEMU's emulation loses virtualisation state of CPU 0 when other CPUs switch tasks
    /// (cpu_clear_ignne() in its target/i386/tcg/system/fpu_helper.c changes CPU 0's flags without a lock).
    pub fn default_housekeeping(self) -> u32 {
        match self {
            Self::Fast => 1,
            Self::Exact | Self::Hardware => 0,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Exact => "exact",
            Self::Fast => "fast",
            Self::Hardware => "hardware",
        })
    }
}

/// Whether the machine whose /proc, /sys and /dev are below `root` can run guests of guests.
fn can_nest(root: &Path) -> bool {
    let read = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
    let flags = read("proc/cpuinfo");
    let has_flag = |flag: &str| {
        flags
            .lines()
            .filter(|line| line.starts_with("flags"))
            .any(|line| line.split_whitespace().any(|word| word == flag))
    };
    let nested = |module: &str| {
        let value = read(&format!("sys/module/{module}/parameters/nested"));
        matches!(value.trim(), "1" | "Y" | "y")
    };
    // A /dev/kvm alone is not enough: there are ones (kvm_pvm) whose guests see neither VMX nor SVM.
    let virtualises =
        (has_flag("vmx") && nested("kvm_intel")) || (has_flag("svm") && nested("kvm_amd"));
    let may_use = || {
        let device = root.join("dev/kvm");
        fs::OpenOptions::new().read(true).write(true).open(device)
    };
    virtualises && may_use().is_ok()
}

/// Parameters of a kernel that neither tests its ciphers nor checks the signatures of its certificates, which is half of what
/// an emulated boot executes.
pub const SHORT_BOOT: &str = "cryptomgr.notests initcall_blacklist=load_system_certificate_list";

/// Whose CPUs the exact machine has, and so which of KVM's modules L1 loads.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Vendor {
    #[default]
    /// SVM: PAUSE leaves the guest wherever it spins
    Amd,
    /// VMX: PAUSE leaves the guest only where its kernel spins; interrupts are posted
    Intel,
}

impl Vendor {
    /// Its name on the command line and in cells.
    pub fn name(self) -> &'static str {
        match self {
            Self::Amd => "amd",
            Self::Intel => "intel",
        }
    }

    /// Refuses to choose where the CPUs are what they are.
    pub fn check(self, kind: Kind) -> Result<()> {
        ensure!(
            self == Self::Amd || kind == Kind::Exact,
            "--vendor is for the exact machine: the others have the CPUs they have."
        );
        Ok(())
    }
}

impl fmt::Display for Vendor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Amd => "AMD",
            Self::Intel => "Intel",
        })
    }
}

/// How L1's CPUs are arranged; each level counts what is in one of the level above.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Topology {
    /// Sockets of the machine; the CPUs of a socket share the last-level cache.
    pub sockets: u32,
    /// Cores of a socket.
    pub cores: u32,
    /// Threads of a core.
    pub threads: u32,
}

impl Topology {
    /// Completes what was asked for: cores are what remains of the CPUs, one is the default of the rest.
    pub fn new(
        cpus: Option<u32>,
        default_cpus: u32,
        [sockets, cores, threads]: [Option<u32>; 3],
    ) -> Result<Self> {
        let (sockets, threads) = (sockets.unwrap_or(1), threads.unwrap_or(1));
        let other = sockets * threads;
        let cores = match (cores, cpus) {
            (Some(cores), _) => cores,
            (None, Some(cpus)) => cpus / other.max(1),
            (None, None) => default_cpus.div_ceil(other.max(1)),
        };
        let topology = Self {
            sockets,
            cores,
            threads,
        };
        ensure!(
            topology.cpus() > 0,
            "L1 needs at least one CPU: none of the counts can be 0."
        );
        ensure!(
            cpus.is_none_or(|cpus| cpus == topology.cpus()),
            "--cpus {} does not fit {topology}, which is {} CPUs: leave --cpus out, or change one count.",
            cpus.unwrap_or_default(),
            topology.cpus()
        );
        Ok(topology)
    }

    /// Refuses what the machine would not have as it is asked for.
    pub fn check(self, kind: Kind) -> Result<()> {
        match kind {
            Kind::Exact => bochs::check_topology(self),
            // QEMU leaves gaps between APIC ids, so that any counts are right.
            Kind::Fast | Kind::Hardware => Ok(()),
        }
    }

    /// How many CPUs that is.
    pub fn cpus(&self) -> u32 {
        self.sockets * self.cores * self.threads
    }
}

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            sockets,
            cores,
            threads,
        } = self;
        write!(f, "sockets={sockets},cores={cores},threads={threads}")
    }
}

/// The machine L1.
#[derive(Debug)]
pub struct Machine<'a> {
    /// What executes it.
    pub kind: Kind,
    /// Bochs, for the exact one.
    pub bochs: Option<Bochs>,
    /// The image it boots, from whose tree QEMU and firmware come.
    pub image: &'a Image,
    /// Its kernel.
    pub kernel: &'a Kernel,
    /// Its CPUs.
    pub topology: Topology,
    /// Whose they are; the other machines take no notice.
    pub vendor: Vendor,
    /// Its memory in MiB.
    pub memory_mib: u32,
    /// The guests' image, if it is to be attached.
    pub guest_image: Option<&'a Path>,
    /// Kernel parameters beside those it needs.
    pub append: &'a str,
}

/// What a run gives to its machine.
#[derive(Debug)]
pub struct Media<'a> {
    /// The initrd.
    pub initrd: &'a File,
    /// The disk that L1 writes /out to, as a tar file.
    pub out: &'a File,
    /// What the emulator itself prints.
    pub log: &'a File,
}

/// A machine that runs, and our ends of its ports.
pub struct Running {
    /// The emulator.
    pub process: Child,
    /// What L1's kernel prints.
    pub console: File,
    /// What the command prints.
    pub stdout: File,
    /// "ready", "exit CODE" and, to L1, "stop".
    pub control: File,
    /// Kept open, so that `control` is not cut off before the emulator has opened it.
    pub far_end: Option<File>,
}

/// Where L1 has the guests' image, if it is attached: a link that its init makes.
pub const GUEST_IMAGE: &str = "/dev/lab-guest-image";

/// Names of L1's devices, by which its init finds them.
struct Devices {
    root: &'static str,
    out: &'static str,
    guest_image: &'static str,
    stdout: &'static str,
    control: &'static str,
}

impl Machine<'_> {
    /// Starts it.
    ///
    /// # Errors
    /// When its emulator cannot be started.
    pub fn start(&self, media: &Media<'_>) -> Result<Running> {
        match &self.bochs {
            Some(bochs) => bochs.start(self, media),
            None => qemu::start(self, media),
        }
    }

    /// What executes it, with its version.
    pub fn emulator(&self) -> String {
        match &self.bochs {
            Some(bochs) => format!("Bochs {}, CPUs of {}", bochs.version, self.vendor),
            None => format!("QEMU {}", self.image.qemu_version),
        }
    }

    fn devices(&self) -> Devices {
        match self.kind {
            Kind::Exact => bochs::DEVICES,
            Kind::Fast | Kind::Hardware => qemu::DEVICES,
        }
    }

    fn kernel_parameters(&self) -> String {
        // Warnings and worse reach the console, where console.rs reads them; all else is in dmesg, which a panic repeats
        // on the console. A CPU that is stuck is a panic.
        let mut parameters = String::from(
            "console=ttyS0,115200 loglevel=5 panic_console_replay=1 softlockup_panic=1 nokaslr",
        );
        parameters += &format!(" {SHORT_BOOT}");
        parameters += match self.kind {
            // Bochs would boot again; the lab ends it.
            Kind::Exact => " panic=0",
            // QEMU ends (-no-reboot).
            Kind::Fast | Kind::Hardware => " panic=-1",
        };
        if self.kind == Kind::Fast {
            // QEMU does not have what KVM asks for by CPUID before it intercepts PAUSE. Linux 6.12 cannot be told so.
            parameters += " setcpuid=pausefilter,pfthreshold";
            // Its CPUs stand still whenever this machine is busy elsewhere: what the kernel takes for stuck has been so for a
            // minute, not for 20 s.
            parameters += " rcupdate.rcu_cpu_stall_timeout=60 watchdog_thresh=30";
        }
        let tsc_khz = match self.kind {
            // What the kernel measures is up to 0.3 % less.
            Kind::Exact => Some(u64::from(bochs::TICKS_PER_S / 1000)),
            // If QEMU stands still while the kernel measures, the kernel's time runs several times too fast, and the watchdog of
            // sched_ext with it.
            Kind::Fast => Some(qemu::tsc_khz()),
            Kind::Hardware => None,
        };
        if let Some(khz) = tsc_khz {
            // Else a watchdog compares the TSC with another clock first, and the IO-APIC's timer with the TSC. Emulated, one
            // takes too long and the other fails now and then; timers are then as coarse as ticks.
            parameters += &format!(" tsc_early_khz={khz} tsc=reliable no_timer_check");
        }
        // Init finds these in its environment.
        let devices = self.devices();
        parameters += &format!(
            " lab_root={} lab_out={} lab_stdout={} lab_control={}",
            devices.root, devices.out, devices.stdout, devices.control
        );
        if self.guest_image.is_some() {
            parameters += &format!(" lab_guest_image={}", devices.guest_image);
        }
        if !self.append.is_empty() {
            parameters.push(' ');
            parameters.push_str(self.append);
        }
        parameters
    }
}

/// A file by which a process that inherits `fd` can open it.
fn inherited(fd: RawFd) -> String {
    format!("/proc/self/fd/{fd}")
}

/// Starts an emulator that inherits `files` and dies with the lab.
fn spawn(mut command: Command, files: &[&File], log: &File) -> Result<Child> {
    let log = || log.try_clone().context("The log cannot be shared.");
    command.stdin(Stdio::null()).stdout(log()?).stderr(log()?);
    let fds: Vec<RawFd> = files.iter().map(|file| file.as_raw_fd()).collect();
    // SAFETY: fcntl() is async-signal-safe and touches no memory.
    unsafe {
        command.pre_exec(move || {
            for &fd in &fds {
                if libc::fcntl(fd, libc::F_SETFD, 0) != 0 {
                    return Err(std::io::Error::last_os_error());
                }
            }
            Ok(())
        });
    }
    tool::die_with_parent(&mut command, libc::SIGKILL);
    command
        .spawn()
        .context("The emulator of L1 could not be started.")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(flags: &str, nested: Option<(&str, &str)>, dev_kvm: bool) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("proc")).unwrap();
        fs::write(
            root.path().join("proc/cpuinfo"),
            format!("processor : 0\nflags\t\t: fpu {flags} sse\n"),
        )
        .unwrap();
        if let Some((module, value)) = nested {
            let dir = root.path().join(format!("sys/module/{module}/parameters"));
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join("nested"), format!("{value}\n")).unwrap();
        }
        fs::create_dir_all(root.path().join("dev")).unwrap();
        if dev_kvm {
            fs::write(root.path().join("dev/kvm"), "").unwrap();
        }
        root
    }

    fn nests(flags: &str, nested: Option<(&str, &str)>, dev_kvm: bool) -> bool {
        can_nest(machine(flags, nested, dev_kvm).path())
    }

    #[test]
    fn hardware_is_a_machine_that_can_nest_and_may_be_used() {
        assert!(nests("svm", Some(("kvm_amd", "1")), true));
        assert!(nests("vmx", Some(("kvm_intel", "Y")), true));
    }

    #[test]
    fn everything_else_is_emulated() {
        assert!(!nests("", None, true), "a /dev/kvm without vmx or svm");
        assert!(!nests("vmx", Some(("kvm_intel", "N")), true), "no nesting");
        assert!(!nests("vmx", Some(("kvm_intel", "Y")), false), "no KVM");
        assert!(
            !nests("vmx", Some(("kvm_amd", "Y")), true),
            "the other vendor's module"
        );
    }

    #[test]
    fn cores_are_what_remains_of_the_cpus() {
        let topology = Topology::new(Some(8), 3, [Some(2), None, Some(2)]).unwrap();
        assert_eq!(
            topology,
            Topology {
                sockets: 2,
                cores: 2,
                threads: 2
            }
        );
        assert_eq!(Topology::new(None, 3, [None; 3]).unwrap().cpus(), 3);
        assert_eq!(
            Topology::new(None, 3, [Some(2), None, None])
                .unwrap()
                .cpus(),
            4
        );
        assert_eq!(
            Topology::new(None, 3, [Some(2), Some(3), None])
                .unwrap()
                .cpus(),
            6
        );
    }

    #[test]
    fn the_vendor_is_chosen_on_the_exact_machine_only() {
        assert!(Vendor::Intel.check(Kind::Exact).is_ok());
        assert!(Vendor::Intel.check(Kind::Fast).is_err());
        assert!(Vendor::Amd.check(Kind::Fast).is_ok());
    }

    #[test]
    fn the_fast_machine_has_any_counts_and_the_exact_one_not() {
        let topology = Topology::new(Some(6), 2, [Some(2), None, None]).unwrap();
        assert!(topology.check(Kind::Fast).is_ok());
        assert!(topology.check(Kind::Exact).is_err());
    }

    #[test]
    fn counts_that_contradict_each_other_are_refused() {
        let error = Topology::new(Some(5), 3, [Some(2), None, None])
            .unwrap_err()
            .to_string();
        assert!(error.contains("--cpus 5 does not fit"), "{error}");
        assert!(Topology::new(Some(0), 3, [None; 3]).is_err());
    }
}
