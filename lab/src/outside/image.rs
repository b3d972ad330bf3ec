// SPDX-License-Identifier: GPL-2.0-only
//! Root file systems: trees of Debian packages made with mmdebstrap, and read-only images of them. One is L1's; QEMU of
//! both levels comes from its tree, so it is one version on any machine. The other is for guests that run programs of
//! Debian, and is made only when asked for. Not for what a run adds (initrd.rs).

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

use super::cache::{Cache, CacheLock, recorded};
use super::machine::bochs::CYLINDER_BYTES;
use super::mirror::Mirror;
use super::tool::{self, io_sentence};

/// What is made of one list of packages.
struct Recipe {
    /// What it is in sentences.
    name: &'static str,
    /// The packages; '#' starts a comment.
    list: &'static str,
    /// Turns the folder of the cache entry, with `tree` and `root.erofs`, into what the cache is to keep.
    finish: fn(&Path) -> Result<()>,
}

const HOST: Recipe = Recipe {
    name: "L1's image",
    list: include_str!("../../image-packages.txt"),
    finish: record_qemu_version,
};

const GUEST: Recipe = Recipe {
    name: "the guests' image",
    list: include_str!("../../guest-packages.txt"),
    finish: remove_tree,
};

/// The suite of the images on machines that are not newer than it.
const SUITE: &str = "trixie";

/// Raised when what is done to the tree changes, so that older cache entries are not used.
const LAYOUT_VERSION: u32 = 3;

/// Parts of packages that nothing here uses and that would make L1's tree four times as large: documentation,
/// the 3D stack behind QEMU's displays, firmware and variants of QEMU for other machines.
const LEFT_OUT: [&str; 16] = [
    "./dev",
    "./usr/share/doc",
    "./usr/share/man",
    "./usr/share/locale",
    "./usr/share/X11",
    "./usr/lib/x86_64-linux-gnu/gconv",
    "./usr/lib/x86_64-linux-gnu/libLLVM*",
    "./usr/lib/x86_64-linux-gnu/libgallium*",
    "./usr/lib/x86_64-linux-gnu/libz3.so*",
    "./usr/bin/qemu-system-i386",
    "./usr/bin/qemu-system-x86_64-microvm",
    "./usr/bin/qemu-system-amd64",
    "./usr/share/qemu/skiboot.lid",
    "./usr/share/qemu/openbios-*",
    "./usr/share/qemu/hppa-*",
    "./usr/share/qemu/u-boot*",
];

/// Lets dpkg know of the packages that were unpacked, so that it can install others. The shell gets the tree as $1.
const TELL_DPKG: &str = r#"--extract-hook=for deb in "$1"/var/cache/apt/archives/*.deb; do
	{ dpkg-deb --field "$deb" && echo 'Status: install ok installed' && echo; } >>"$1/var/lib/dpkg/status" || exit
done"#;

/// L1's finished image.
#[derive(Debug)]
pub struct Image {
    /// The unpacked tree, which QEMU of L1 runs from.
    pub tree: PathBuf,
    /// The same as a read-only file system.
    pub root: PathBuf,
    /// QEMU's version in it.
    pub qemu_version: String,
}

impl Image {
    /// Finds the image in the cache, or makes it.
    pub fn ready(cache: &Cache) -> Result<Self> {
        let dir = HOST.ready(cache)?;
        let qemu_version = recorded(&dir, "qemu-version")?;
        Ok(Self {
            tree: dir.join("tree"),
            root: dir.join("root.erofs"),
            qemu_version,
        })
    }

    /// A command that runs a program of the tree with the tree's own libraries.
    pub fn command(&self, program: &str) -> Command {
        command_in(&self.tree, program)
    }
}

/// Finds the guests' image in the cache, or makes it: a read-only file system.
pub fn guest_image(cache: &Cache) -> Result<PathBuf> {
    Ok(GUEST.ready(cache)?.join("root.erofs"))
}

impl Recipe {
    /// The cache entry, which is made if it is missing.
    fn ready(&self, cache: &Cache) -> Result<PathBuf> {
        let machine =
            fs::read_to_string("/etc/os-release").context("/etc/os-release cannot be read.")?;
        let suite = suite_for(&machine);
        let packages = packages(self.list);
        let dir = cache.path("images").join(entry_name(suite, &packages));
        if !dir.exists() {
            let lock = cache.lock()?;
            if !dir.exists() {
                self.build(&lock, suite, &packages, &dir)?;
            }
        }
        Ok(dir)
    }

    fn build(
        &self,
        lock: &CacheLock,
        suite: &str,
        packages: &[&str],
        destination: &Path,
    ) -> Result<()> {
        let name = self.name;
        eprintln!("lab: making {name} from {suite} (about a minute, once)");
        let work = lock.work_dir("image")?;
        let tar = work.path().join("tree.tar");
        let entry = work.path().join("entry");
        let tree = entry.join("tree");
        fs::create_dir_all(&tree).map_err(|error| {
            io_sentence(&format!("{} cannot be created", tree.display()), &error)
        })?;
        bootstrap(
            suite,
            packages,
            work.path(),
            &tar,
            &format!("make {name} from {suite}"),
        )?;
        unpack(&tar, &tree, &format!("unpack {name}"))?;
        complete(&tree)
            .map_err(|error| io_sentence(&format!("{name} cannot be completed"), &error))?;
        let mut make = Command::new("mkfs.erofs");
        // Not packed: unpacking costs more under emulation than reading.
        make.args(["--quiet", "-x-1", "--all-root", "-T0"])
            .arg(entry.join("root.erofs"))
            .arg(&tree);
        tool::run(&mut make, &format!("make the file system of {name}"))?;
        fill_cylinder(&entry.join("root.erofs"))
            .map_err(|error| io_sentence(&format!("{name} cannot be completed"), &error))?;
        (self.finish)(&entry)?;
        work.publish("entry", destination)
    }
}

/// Bochs' disks end with a whole cylinder: what is beyond is not there.
fn fill_cylinder(disk: &Path) -> io::Result<()> {
    let disk = fs::File::options().write(true).open(disk)?;
    let bytes = disk.metadata()?.len();
    disk.set_len(bytes.next_multiple_of(CYLINDER_BYTES))
}

/// Asks QEMU of the tree, because results name its version.
fn record_qemu_version(entry: &Path) -> Result<()> {
    let mut qemu = command_in(&entry.join("tree"), "usr/bin/qemu-system-x86_64");
    let version = tool::run(qemu.arg("--version"), "ask QEMU for its version")?;
    let version = String::from_utf8_lossy(&version);
    let version = version
        .lines()
        .next()
        .unwrap_or_default()
        .trim_start_matches("QEMU emulator version ");
    fs::write(entry.join("qemu-version"), version).context("QEMU's version cannot be recorded.")
}

/// Nothing outside runs programs of the guests' image.
fn remove_tree(entry: &Path) -> Result<()> {
    fs::remove_dir_all(entry.join("tree")).context("The tree of the image cannot be removed.")
}

/// The program is started by the tree's own dynamic loader, so that nothing of the machine's libraries is used.
fn command_in(tree: &Path, program: &str) -> Command {
    let libraries = tree.join("usr/lib/x86_64-linux-gnu");
    let mut command = Command::new(libraries.join("ld-linux-x86-64.so.2"));
    command
        .arg("--library-path")
        .arg(&libraries)
        .arg("--inhibit-cache");
    command.arg(tree.join(program));
    command.env("QEMU_MODULE_DIR", libraries.join("qemu"));
    command
}

/// The programs in L1 are those built on this machine, so its libraries must not be older than the machine's.
fn suite_for(os_release: &str) -> &str {
    let codename = os_release
        .lines()
        .find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    match codename.map(|name| name.trim_matches('"')) {
        Some("bookworm" | "trixie") | None => SUITE,
        Some(newer) => newer,
    }
}

/// The package names in the list; '#' starts a comment.
fn packages(list: &str) -> Vec<&str> {
    let names = list
        .lines()
        .map(|line| line.split('#').next().unwrap_or_default().trim());
    names.filter(|name| !name.is_empty()).collect()
}

fn entry_name(suite: &str, packages: &[&str]) -> String {
    let mut sorted = packages.to_vec();
    sorted.sort_unstable();
    let text = format!(
        "{LAYOUT_VERSION}\n{suite}\n{}\n{}",
        sorted.join("\n"),
        LEFT_OUT.join("\n")
    );
    format!("{suite}-{}", &format!("{:x}", Sha256::digest(text))[..12])
}

/// Downloads and unpacks packages into a tar file. None of their scripts run: files are all that is needed.
fn bootstrap(suite: &str, packages: &[&str], work: &Path, tar: &Path, purpose: &str) -> Result<()> {
    let mirror = Mirror::of_this_machine()?;
    // SAFETY: plain system call without arguments.
    let is_root = unsafe { libc::geteuid() } == 0;
    let mut command = if is_root {
        contained("mmdebstrap")
    } else {
        // It makes such namespaces itself then.
        Command::new("mmdebstrap")
    };
    let mode = if is_root { "root" } else { "unshare" };
    command
        .args([
            "--variant=extract",
            "--architectures=amd64",
            "--format=tar",
            "--skip=output/dev",
            TELL_DPKG,
        ])
        .arg(format!("--mode={mode}"))
        .arg(format!("--include={}", packages.join(",")))
        .arg("--aptopt=Acquire::Languages \"none\"")
        .arg("--aptopt=APT::Install-Recommends \"false\"")
        .arg(suite)
        .arg(tar)
        .arg(mirror.source_line("deb", suite))
        .env("TMPDIR", work)
        .env("LC_ALL", "C.UTF-8");
    for option in machine_acquire_options()? {
        command.arg(format!("--aptopt={option}"));
    }
    tool::run(&mut command, purpose).map(drop)
}

/// Runs a program as root in namespaces of its own: all its processes end when the lab does, though mmdebstrap puts off
/// the signals that it gets, and so do its mounts.
fn contained(program: &str) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--mount", "--pid", "--mount-proc", "--fork"]);
    command.args(["--kill-child=KILL", program]);
    command
}

/// How the machine's apt fetches (proxies, dates): mmdebstrap's apt would not see it otherwise.
fn machine_acquire_options() -> Result<Vec<String>> {
    let dump = tool::run(
        Command::new("apt-config").arg("dump"),
        "read how this machine's apt downloads",
    )?;
    let wanted = [
        "Acquire::http::",
        "Acquire::https::",
        "Acquire::Check-",
        "Acquire::Retries",
        "Acquire::ForceIPv",
    ];
    let dump = String::from_utf8_lossy(&dump).into_owned();
    let keep = |line: &&str| {
        wanted.iter().any(|prefix| line.starts_with(prefix)) && !line.ends_with(" \"\";")
    };
    Ok(dump.lines().filter(keep).map(str::to_string).collect())
}

fn unpack(tar: &Path, tree: &Path, purpose: &str) -> Result<()> {
    let mut command = Command::new("tar");
    command.args(["--no-same-owner", "--wildcards", "--anchored"]);
    command.args(LEFT_OUT.iter().map(|path| format!("--exclude={path}")));
    command.arg("-C").arg(tree).arg("-xf").arg(tar);
    tool::run(&mut command, purpose).map(drop)
}

/// Adds what packages' scripts would have: the links of the merged /usr, users, and mount points.
fn complete(tree: &Path) -> io::Result<()> {
    const FILES: [(&str, &str); 5] = [
        (
            "etc/passwd",
            "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\n",
        ),
        ("etc/group", "root:x:0:\nkvm:x:104:\nnogroup:x:65534:\n"),
        ("etc/hostname", "lab\n"),
        ("etc/hosts", "127.0.0.1 localhost lab\n"),
        (
            "etc/nsswitch.conf",
            "passwd: files\ngroup: files\nhosts: files\n",
        ),
    ];
    const FOLDERS: [&str; 12] = [
        "boot",
        "cohort",
        "dev",
        "home",
        "mnt",
        "out",
        "proc",
        "root",
        "run",
        "sys",
        "tmp",
        "usr/lib/modules",
    ];
    for folder in FOLDERS {
        fs::create_dir_all(tree.join(folder))?;
    }
    for name in ["bin", "sbin", "lib", "lib64"] {
        if !tree.join(name).exists() {
            symlink(format!("usr/{name}"), tree.join(name))?;
        }
    }
    FILES
        .iter()
        .try_for_each(|(path, text)| fs::write(tree.join(path), text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_read_without_comments() {
        assert_eq!(
            packages("# head\nqemu # why\n\n  strace\n"),
            ["qemu", "strace"]
        );
        assert!(packages(HOST.list).contains(&"qemu-system-x86"));
        assert!(packages(GUEST.list).contains(&"redis-server"));
    }

    #[test]
    fn the_entry_changes_with_the_list_and_the_suite_but_not_with_the_order() {
        assert_eq!(
            entry_name("trixie", &["a", "b"]),
            entry_name("trixie", &["b", "a"])
        );
        assert_ne!(
            entry_name("trixie", &["a", "b"]),
            entry_name("trixie", &["a"])
        );
        assert_ne!(entry_name("trixie", &["a"]), entry_name("forky", &["a"]));
    }

    #[test]
    fn the_image_is_never_older_than_the_machine() {
        assert_eq!(
            suite_for("ID=debian\nVERSION_CODENAME=bookworm\n"),
            "trixie"
        );
        assert_eq!(suite_for("VERSION_CODENAME=forky\n"), "forky");
        assert_eq!(suite_for("ID=debian\n"), "trixie");
    }
}
