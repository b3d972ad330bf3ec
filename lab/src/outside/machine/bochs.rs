// SPDX-License-Identifier: GPL-2.0-only
//! The machine `exact`: Bochs, in which each CPU executes one instruction per tick of 1 ns, and the same run gives the same
//! bytes. docs/lab.md says what the model of time is. Bochs is built from Debian's source package with our patches
//! (`lab/bochs/`), each of which says why it is there.

use std::fs::{self, File};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use anyhow::{Context, Result, bail, ensure};
use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl};
use nix::pty::openpty;
use nix::unistd::ttyname;
use sha2::{Digest, Sha256};

use super::direct_load::{INITRD, Load, ROM_ADDRESS};
use super::{Devices, Machine, Media, Running, Topology, Vendor, inherited, spawn};
use crate::outside::cache::{Cache, CacheLock, WorkDir, recorded};
use crate::outside::mirror::{Mirror, Suite};
use crate::outside::tool::{self, io_sentence};

pub(super) const DEVICES: Devices = Devices {
    // Disks of this kind have names by chance, but places.
    root: "scsi:0:0:0:0",
    out: "scsi:0:0:1:0",
    guest_image: "scsi:1:0:0:0",
    stdout: "/dev/ttyS1",
    control: "/dev/ttyS2",
};

/// The suite whose source package is built.
const SUITE: &str = "trixie";
const SOURCE_PACKAGE: &str = "bochs";

macro_rules! patch {
    ($name:literal) => {
        ($name, include_str!(concat!("../../../bochs/", $name)))
    };
}

/// What is changed in Bochs: file name and content, in the order in which they are applied.
const PATCHES: [(&str, &str); 24] = [
    patch!("0001-exact-time.patch"),
    patch!("0002-rip-after-exceptions.patch"),
    patch!("0003-costs.patch"),
    patch!("0004-cr2-at-vmrun.patch"),
    patch!("0005-long-mode-with-16-bit-tss.patch"),
    patch!("0006-mperf.patch"),
    patch!("0007-limits.patch"),
    patch!("0008-ram-images.patch"),
    patch!("0009-serial-output.patch"),
    patch!("0010-topology.patch"),
    patch!("0011-random.patch"),
    patch!("0012-no-real-time.patch"),
    patch!("0013-posted-interrupts.patch"),
    patch!("0014-interrupts-at-vm-entry.patch"),
    patch!("0015-masked-virtual-interrupts.patch"),
    patch!("0016-nothing-posted.patch"),
    patch!("0017-vectoring-of-virtual-interrupts.patch"),
    patch!("0018-intel-topology.patch"),
    patch!("0019-intel-frequency.patch"),
    patch!("0020-interrupts-of-masked-guests.patch"),
    patch!("0021-linked-traces.patch"),
    patch!("0022-loops-that-count-down.patch"),
    patch!("0023-pause-filter-threshold.patch"),
    patch!("0024-more-traces.patch"),
];

/// Several CPUs, SVM, VMX, and all that makes it quick; no window, no debugger.
const CONFIGURE: [&str; 18] = [
    "--with-nogui",
    "--enable-smp",
    "--enable-x86-64",
    "--enable-cpu-level=6",
    "--enable-svm",
    "--enable-vmx=2",
    "--enable-avx",
    "--enable-evex",
    "--enable-handlers-chaining",
    "--enable-repeat-speedups",
    "--enable-fast-function-calls",
    "--enable-all-optimizations",
    "--enable-pci",
    "--enable-memtype",
    "--enable-protection-keys",
    "--disable-docbook",
    "--disable-debugger",
    "--disable-plugins",
];

/// Ticks that a CPU runs before the next one's turn: how far apart the clocks of two CPUs can be.
const QUANTUM_TICKS: u32 = 32;
/// Ticks per second of L1's time.
pub const TICKS_PER_S: u32 = 1_000_000_000;
/// L1's clock at the start of every run, Unix time; a constant, as runs differ else.
pub const START_UNIX_S: u32 = 1_767_225_600;
/// Bochs keeps no more of L1's memory in ours; what is touched beyond goes to a temporary file and back.
pub const MOST_IN_MEMORY_MIB: u32 = 2048;
/// What Bochs can count; of cores since 0007-limits.patch.
const MOST_CORES_PER_SOCKET: u32 = 64;
const MOST_THREADS_PER_CORE: u32 = 4;
const MOST_CPUS: u32 = 254;
/// Bochs' disks are whole cylinders of 16 heads and 63 sectors of 512 bytes.
pub const CYLINDER_BYTES: u64 = 16 * 63 * 512;

/// Bochs, ready to run.
#[derive(Debug)]
pub struct Bochs {
    program: PathBuf,
    /// Debian's version of the source, and which patches.
    pub version: String,
}

impl Bochs {
    /// Finds Bochs in the cache, or builds it.
    ///
    /// # Errors
    /// When it cannot be downloaded or built; one sentence says why.
    pub fn ready(cache: &Cache) -> Result<Self> {
        let patches = patches_hash();
        let dir = cache.path("bochs").join(&patches);
        if !dir.exists() {
            let lock = cache.lock()?;
            if !dir.exists() {
                build(cache, &lock, &dir)?;
            }
        }
        let version = recorded(&dir, "version")?;
        Ok(Self {
            program: dir.join("bochs"),
            version: format!("{version}, patches {patches}"),
        })
    }

    /// Starts it as L1.
    ///
    /// # Errors
    /// When the kernel does not fit or Bochs cannot be started.
    pub(super) fn start(&self, machine: &Machine<'_>, media: &Media<'_>) -> Result<Running> {
        let vmlinux = &machine.kernel.vmlinux;
        let vmlinux =
            fs::read(vmlinux).with_context(|| format!("{} cannot be read.", vmlinux.display()))?;
        let initrd_bytes = media.initrd.metadata();
        let initrd_bytes = initrd_bytes.context("The initrd is gone.")?.len();
        let parameters = machine.kernel_parameters();
        let memory_bytes = u64::from(machine.memory_mib) << 20;
        let load = Load::new(&vmlinux, &parameters, initrd_bytes, memory_bytes)?;
        let rom = memory_file(&load.rom)?;
        let ram: Vec<(u32, File)> = load
            .pieces
            .iter()
            .map(|piece| Ok((piece.address, memory_file(&piece.content)?)))
            .collect::<Result<_>>()?;
        let [console, stdout] = [pipe()?, pipe()?];
        let (control, far_end, control_path) = terminal()?;
        let mut settings = hardware(machine);
        let file = |file: &File| inherited(file.as_raw_fd());
        settings.push(format!(
            "optromimage1: file={}, address={ROM_ADDRESS:#x}",
            file(&rom)
        ));
        let images = ram.iter().map(|(address, image)| (*address, image));
        let images = images.chain([(INITRD, media.initrd)]);
        for (number, (address, image)) in (1..).zip(images) {
            let image = file(image);
            settings.push(format!(
                "optramimage{number}: file={image}, address={address:#x}"
            ));
        }
        // By descriptor: beside a name Bochs puts a lock, which stays when it is killed.
        let root = open(&machine.image.root)?;
        let guest_image = machine.guest_image.map(open).transpose()?;
        settings.push(disk("ata0-master", &file(&root)));
        settings.push(disk("ata0-slave", &file(media.out)));
        settings.extend(
            guest_image
                .iter()
                .map(|image| disk("ata1-master", &file(image))),
        );
        for (port, end) in [("com1", &console.1), ("com2", &stdout.1)] {
            settings.push(format!("{port}: enabled=1, mode=file, dev={}", file(end)));
        }
        settings.push(format!("com3: enabled=1, mode=term, dev={control_path}"));
        let configuration = memory_file((settings.join("\n") + "\n").as_bytes())?;
        let mut command = Command::new(&self.program);
        command.args(["-q", "-f"]).arg(file(&configuration));
        let mut inherits = vec![&configuration, &rom, &console.1, &stdout.1];
        inherits.extend([media.initrd, media.out, &root]);
        inherits.extend(&guest_image);
        inherits.extend(ram.iter().map(|(_, image)| image));
        let process = spawn(command, &inherits, media.log)?;
        Ok(Running {
            process,
            console: console.0,
            stdout: stdout.0,
            control,
            far_end: Some(far_end),
        })
    }
}

/// Refuses what Bochs cannot be, or what Linux would take for something else. Its CPUs have the APIC ids from 0 on,
/// without gaps. Linux has whole bits of them for the thread and for the core: a second core, or a second socket, begins
/// where it looks for it only if a power of two comes before.
pub(super) fn check_topology(topology: Topology) -> Result<()> {
    let Topology {
        sockets,
        cores,
        threads,
    } = topology;
    let remedy = "Change a count, or boot the fast machine (--quick) if the command needs no time.";
    ensure!(
        cores <= MOST_CORES_PER_SOCKET
            && threads <= MOST_THREADS_PER_CORE
            && topology.cpus() <= MOST_CPUS,
        "The exact machine has at most {MOST_CORES_PER_SOCKET} cores per socket, {MOST_THREADS_PER_CORE} threads per \
         core and {MOST_CPUS} CPUs, not {topology}. {remedy}"
    );
    ensure!(
        threads.is_power_of_two() || sockets * cores == 1,
        "On the exact machine the threads of a core are 1, 2 or 4 where there are several cores: with {topology} L1 \
         would have cores of other sizes. {remedy}"
    );
    let of_a_socket = cores * threads;
    ensure!(
        of_a_socket.is_power_of_two() || sockets == 1,
        "On the exact machine the CPUs of a socket are a power of two where there are several sockets: with {topology}, \
         {of_a_socket} in each, L1 would have sockets of other sizes. {remedy}"
    );
    Ok(())
}

/// What every run has: CPUs, memory, clock, firmware.
fn hardware(machine: &Machine<'_>) -> Vec<String> {
    let topology = machine.topology;
    let memory = machine.memory_mib;
    let firmware = |path: &str| machine.image.tree.join(path).display().to_string();
    let model = match machine.vendor {
        Vendor::Amd => "ryzen",
        Vendor::Intel => "sapphire_rapids",
    };
    vec![
        "display_library: nogui".into(),
        "log: -".into(),
        "info: action=ignore".into(),
        "error: action=ignore".into(),
        "panic: action=fatal".into(),
        // By default a block is so small that Bochs takes 15 s to make a list of them.
        format!(
            "memory: guest={memory}, host={}, block_size=8192",
            memory.min(MOST_IN_MEMORY_MIB)
        ),
        format!(
            "romimage: file={}, options=fastboot",
            firmware("usr/share/bochs/BIOS-bochs-latest")
        ),
        format!(
            "vgaromimage: file={}",
            firmware("usr/share/vgabios/vgabios.bin")
        ),
        format!(
            "cpu: model={model}, count={}:{}:{}, quantum={QUANTUM_TICKS}, ips={TICKS_PER_S}, reset_on_triple_fault=0",
            topology.sockets, topology.cores, topology.threads
        ),
        format!("clock: sync=none, time0={START_UNIX_S}"),
        "pci: enabled=1, chipset=i440fx".into(),
        // Its firmware looks long for disks that are not there.
        format!(
            "ata1: enabled={}, ioaddr1=0x170, ioaddr2=0x370, irq=15",
            u8::from(machine.guest_image.is_some())
        ),
    ]
}

fn disk(place: &str, path: &str) -> String {
    format!("{place}: type=disk, mode=flat, path={path}")
}

fn open(image: &Path) -> Result<File> {
    File::open(image).with_context(|| format!("{} cannot be opened.", image.display()))
}

fn patches_hash() -> String {
    let mut hash = Sha256::new();
    for text in PATCHES.iter().map(|(_, text)| *text).chain(CONFIGURE) {
        hash.update(text);
    }
    format!("{:x}", hash.finalize())[..12].to_string()
}

fn build(cache: &Cache, lock: &CacheLock, destination: &Path) -> Result<()> {
    eprintln!("lab: building Bochs from Debian's source package (two minutes, once)");
    let work = lock.work_dir("bochs")?;
    let suite = Suite::open_sources(cache, lock, &Mirror::of_this_machine()?, SUITE)?;
    let version = suite.unpack_source(SOURCE_PACKAGE, &work.path().join("source"))?;
    let source = only_folder(&work.path().join("source"))?;
    for (name, text) in PATCHES {
        apply(name, text, &work, &source)?;
    }
    let mut configure = Command::new("./configure");
    configure
        .args(CONFIGURE)
        .envs([("CFLAGS", "-O3"), ("CXXFLAGS", "-O3")])
        .current_dir(&source);
    tool::run(&mut configure, "configure Bochs")?;
    let jobs = thread::available_parallelism().map_or(1, usize::from);
    let mut make = Command::new("make");
    make.arg(format!("-j{jobs}"))
        .arg("bochs")
        .current_dir(&source);
    tool::run(&mut make, "build Bochs")?;
    let entry = work.path().join("entry");
    let gather = || {
        fs::create_dir(&entry)?;
        fs::rename(source.join("bochs"), entry.join("bochs"))?;
        fs::write(entry.join("version"), version)
    };
    gather().map_err(|error| io_sentence("Bochs cannot be put into the cache", &error))?;
    work.publish("entry", destination)
}

fn apply(name: &str, text: &str, work: &WorkDir, source: &Path) -> Result<()> {
    let file = work.path().join(name);
    fs::write(&file, text)
        .map_err(|error| io_sentence(&format!("{} cannot be written", file.display()), &error))?;
    let mut patch = Command::new("patch");
    patch
        .args(["--strip=1", "--batch", "--fuzz=0", "--input"])
        .arg(&file)
        .current_dir(source);
    // patch explains on its standard output what does not fit.
    tool::run(&mut patch, &format!("apply {name} to Bochs"))
        .with_context(|| {
            format!("{SUITE} may have another version of Bochs now: adapt lab/bochs/{name} to it")
        })
        .map(drop)
}

/// The folder that a source archive unpacks to.
fn only_folder(of: &Path) -> Result<PathBuf> {
    let entries = fs::read_dir(of).with_context(|| format!("{} cannot be read.", of.display()))?;
    let folders: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.is_dir())
        .collect();
    match <[PathBuf; 1]>::try_from(folders) {
        Ok([folder]) => Ok(folder),
        Err(folders) => bail!(
            "The source of Bochs has {} folders, not one.",
            folders.len()
        ),
    }
}

/// A file in memory with this content; it goes with its last descriptor.
fn memory_file(content: &[u8]) -> Result<File> {
    let mut file = crate::outside::memory_file()?;
    file.write_all(content)
        .context("No memory for what L1 boots.")?;
    Ok(file)
}

/// Our end and Bochs'.
fn pipe() -> Result<(File, File)> {
    let (ours, its) = nix::unistd::pipe2(OFlag::O_CLOEXEC).context("No pipe for Bochs.")?;
    Ok((File::from(ours), File::from(its)))
}

/// A pseudo-terminal: our end, the other, and its path.
fn terminal() -> Result<(File, File, String)> {
    let ends = openpty(None, None).context("No pseudo-terminal for Bochs.")?;
    // Else a child that another thread starts just then would keep it open.
    for end in [&ends.master, &ends.slave] {
        fcntl(end, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)).context("No pseudo-terminal.")?;
    }
    let path = ttyname(&ends.slave).context("The pseudo-terminal has no name.")?;
    let path = path.display().to_string();
    Ok((File::from(ends.master), File::from(ends.slave), path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_patch_begins_with_why() {
        for (name, text) in PATCHES {
            let why = text.lines().next().unwrap_or_default();
            assert!(why.len() > 30 && !why.starts_with("---"), "{name}: {why}");
            assert!(text.contains("\n--- a/"), "{name} changes nothing");
        }
    }

    fn topology([sockets, cores, threads]: [u32; 3]) -> Topology {
        Topology {
            sockets,
            cores,
            threads,
        }
    }

    #[test]
    fn counts_that_linux_reads_as_they_are_meant_are_booted() {
        for counts in [
            [1, 9, 1],
            [1, 3, 2],
            [1, 1, 3],
            [3, 1, 1],
            [3, 2, 1],
            [2, 2, 2],
        ] {
            check_topology(topology(counts)).unwrap();
        }
    }

    #[test]
    fn counts_that_linux_would_read_otherwise_are_refused_with_a_remedy() {
        for (counts, word) in [
            ([2, 3, 1], "3 in each"),
            ([2, 3, 2], "6 in each"),
            ([1, 2, 3], "threads of a core"),
            ([2, 1, 3], "threads of a core"),
            ([1, 1, 8], "at most"),
            ([1, 65, 1], "at most"),
            ([8, 32, 1], "at most"),
        ] {
            let error = check_topology(topology(counts)).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
            assert!(error.contains("--quick"), "{error}");
        }
    }

    #[test]
    fn a_terminal_is_a_way_there_and_back() {
        let (mut ours, far_end, path) = terminal().unwrap();
        assert!(path.starts_with("/dev/pts/"), "{path}");
        ours.write_all(b"stop\n").unwrap();
        drop(far_end);
    }
}
