// SPDX-License-Identifier: GPL-2.0-only
//! L1 as a QEMU command line: accelerator, CPUs, devices, kernel parameters, the speed of its time. Not for starting
//! and watching it (boot.rs).

use std::fmt;
use std::fs;
use std::os::fd::RawFd;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};

use super::image::Image;

/// What executes L1's code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accelerator {
    /// The machine's own CPUs, with nested virtualisation.
    Kvm,
    /// Emulation.
    Tcg,
}

impl Accelerator {
    /// KVM if this machine can virtualise guests of guests and the user may use it, else emulation.
    pub fn of_this_machine() -> Self {
        Self::of(Path::new("/"))
    }

    /// The same for a machine whose /proc, /sys and /dev are below `root`.
    fn of(root: &Path) -> Self {
        let read = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
        let flags = read("proc/cpuinfo");
        let has_flag = |flag: &str| {
            flags
                .lines()
                .any(|line| line.starts_with("flags") && has_word(line, flag))
        };
        let nested = |module: &str| {
            let value = read(&format!("sys/module/{module}/parameters/nested"));
            matches!(value.trim(), "1" | "Y" | "y")
        };
        // A /dev/kvm alone is not enough: there are ones (kvm_pvm) whose guests see neither VMX nor SVM.
        let can_nest =
            (has_flag("vmx") && nested("kvm_intel")) || (has_flag("svm") && nested("kvm_amd"));
        let may_use = fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(root.join("dev/kvm"))
            .is_ok();
        if can_nest && may_use {
            Self::Kvm
        } else {
            Self::Tcg
        }
    }
}

impl fmt::Display for Accelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        })
    }
}

fn has_word(line: &str, word: &str) -> bool {
    line.split_whitespace().any(|other| other == word)
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
    pub accelerator: Accelerator,
    /// Its CPUs.
    pub topology: Topology,
    /// Its memory in MiB.
    pub memory_mib: u32,
    /// The guests' image, if it is to be attached.
    pub guest_image: Option<&'a Path>,
    /// How many times slower than ours its time runs.
    pub dilation: f64,
    /// Its clock counts instructions, one per ns, instead of time; emulated only.
    pub counts_instructions: bool,
    /// Kernel parameters beside those it needs.
    pub append: &'a str,
}

/// Descriptors that QEMU inherits: our end of each is in boot.rs.
#[derive(Debug)]
pub struct Descriptors {
    /// Serial port with the kernel's console.
    pub console: RawFd,
    /// Port of the command's output.
    pub stdout: RawFd,
    /// Port of "ready", "exit CODE" and, to L1, "stop".
    pub control: RawFd,
    /// Port of /out as a tar file.
    pub out: RawFd,
    /// File with the initrd.
    pub initrd: RawFd,
}

impl Machine<'_> {
    /// The QEMU command that boots `vmlinuz` on `image`.
    pub fn command(&self, image: &Image, vmlinuz: &Path, descriptors: &Descriptors) -> Command {
        let is_dilated = self.dilation > 1.0;
        let preload = is_dilated.then_some("usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1");
        let mut command = image.command("usr/bin/qemu-system-x86_64", preload);
        if is_dilated {
            command.env("FAKETIME", format!("+0x{}", 1.0 / self.dilation));
            // Else it leaves a semaphore and shared memory in /dev/shm when QEMU is killed.
            command.env("FAKETIME_DISABLE_SHM", "1");
        }
        command.args([
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-no-reboot",
            "-nic",
            "none",
        ]);
        command.arg("-L").arg(image.tree.join("usr/share/qemu"));
        command.arg("-L").arg(image.tree.join("usr/share/seabios"));
        command
            .args(["-machine", "q35", "-cpu"])
            .arg(self.cpu_model());
        command.arg("-accel").arg(match self.accelerator {
            Accelerator::Kvm => "kvm",
            Accelerator::Tcg if self.counts_instructions => "tcg,thread=single",
            Accelerator::Tcg => "tcg,thread=multi",
        });
        if self.counts_instructions {
            command.args(["-icount", "shift=0,sleep=off"]);
        }
        command
            .arg("-smp")
            .arg(format!("{},{}", self.topology.cpus(), self.topology));
        command.arg("-m").arg(format!("{}M", self.memory_mib));
        command.arg("-kernel").arg(vmlinuz);
        command
            .arg("-initrd")
            .arg(format!("/proc/self/fd/{}", descriptors.initrd));
        command.arg("-append").arg(self.kernel_parameters());
        add_disk(&mut command, "root", &image.root);
        if let Some(guest_image) = self.guest_image {
            // The second disk is /dev/vdb in L1; booted.rs looks for it there.
            add_disk(&mut command, "guest", guest_image);
        }
        command
            .arg("-chardev")
            .arg(format!("socket,id=console,fd={}", descriptors.console));
        command.args(["-serial", "chardev:console", "-device", "virtio-serial-pci"]);
        let ports = [
            ("stdout", descriptors.stdout),
            ("control", descriptors.control),
            ("out", descriptors.out),
        ];
        for (number, (name, fd)) in (1..).zip(ports) {
            command
                .arg("-chardev")
                .arg(format!("socket,id={name},fd={fd}"));
            command.arg("-device").arg(format!(
                "virtserialport,nr={number},chardev={name},name=cohort.{name}"
            ));
        }
        command
    }

    fn cpu_model(&self) -> &'static str {
        match self.accelerator {
            Accelerator::Kvm => "host",
            Accelerator::Tcg => "max",
        }
    }

    fn kernel_parameters(&self) -> String {
        // Panics end QEMU (-no-reboot); a CPU that is stuck is one. Warnings and worse reach the console, where
        // console.rs reads them; all else is in dmesg, which a panic repeats on the console.
        let mut parameters = String::from(
            "console=ttyS0 loglevel=5 panic=-1 panic_console_replay=1 softlockup_panic=1 nokaslr",
        );
        if self.accelerator == Accelerator::Tcg {
            // TCG's SVM has no pause filter and KVM asks for it by CPUID: with it, KVM intercepts PAUSE.
            parameters.push_str(" setcpuid=pausefilter,pfthreshold");
            // Else a watchdog compares the TSC with another clock first; where that takes too long, as it does in half of all
            // boots, timers are as coarse as ticks and these come at different times on each CPU.
            parameters.push_str(" tsc=reliable");
        }
        if self.dilation > 1.0 {
            // The check of the IO-APIC timer assumes at most 4 GHz; a dilated TSC looks like 52 GHz.
            parameters.push_str(" no_timer_check");
        }
        if !self.append.is_empty() {
            parameters.push(' ');
            parameters.push_str(self.append);
        }
        parameters
    }
}

fn add_disk(command: &mut Command, id: &str, file: &Path) {
    let drive = format!(
        "if=none,id={id},format=raw,readonly=on,file={}",
        escape(file)
    );
    command.arg("-drive").arg(drive);
    command
        .arg("-device")
        .arg(format!("virtio-blk-pci,drive={id}"));
}

/// QEMU's option parser reads a doubled comma as one that is part of the value.
fn escape(path: &Path) -> String {
    path.to_string_lossy().replace(',', ",,")
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

    fn accelerator(flags: &str, nested: Option<(&str, &str)>, dev_kvm: bool) -> Accelerator {
        Accelerator::of(machine(flags, nested, dev_kvm).path())
    }

    #[test]
    fn kvm_is_used_where_it_can_nest_and_may_be_used() {
        assert_eq!(
            accelerator("svm", Some(("kvm_amd", "1")), true),
            Accelerator::Kvm
        );
        assert_eq!(
            accelerator("vmx", Some(("kvm_intel", "Y")), true),
            Accelerator::Kvm
        );
    }

    #[test]
    fn everything_else_is_emulated() {
        assert_eq!(
            accelerator("", None, true),
            Accelerator::Tcg,
            "a /dev/kvm without vmx or svm"
        );
        assert_eq!(
            accelerator("vmx", Some(("kvm_intel", "N")), true),
            Accelerator::Tcg,
            "no nesting"
        );
        assert_eq!(
            accelerator("vmx", Some(("kvm_intel", "Y")), false),
            Accelerator::Tcg,
            "no /dev/kvm"
        );
        assert_eq!(
            accelerator("vmx", Some(("kvm_amd", "Y")), true),
            Accelerator::Tcg,
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
    fn counts_that_contradict_each_other_are_refused() {
        let error = Topology::new(Some(5), 3, [Some(2), None, None])
            .unwrap_err()
            .to_string();
        assert!(error.contains("--cpus 5 does not fit"), "{error}");
        assert!(Topology::new(Some(0), 3, [None; 3]).is_err());
    }
}
