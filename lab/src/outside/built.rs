// SPDX-License-Identifier: GPL-2.0-only
//! Kernels that the lab builds itself, of series that Debian ships without sched_ext: from Debian's package of that
//! series' source, with lab/kernel.config. Not for choosing one (kernel.rs).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Instant;

use super::cache::{Cache, CacheLock, short_hash};
use super::mirror::{Mirror, Suite};
use super::tool;
use anyhow::{Context, Result, ensure};

const CONFIG: &str = include_str!("../../kernel.config");
/// Ends the release of a kernel that is built here, after Linux's own numbers.
const MARK: &str = "cohort";
/// Where packages with sources come from; the first that has the series.
const SUITES: [&str; 3] = ["trixie", "trixie-backports", "sid"];

/// A kernel that was built, in a work folder.
#[derive(Debug)]
pub struct Built {
    /// What `uname -r` says on it.
    pub release: String,
    /// Version of the package with its source, and of the configuration.
    pub version: String,
    /// The kernel, an ELF file.
    pub vmlinux: PathBuf,
    /// Its build configuration.
    pub config: PathBuf,
    /// Folder with all its modules, as /lib/modules/RELEASE.
    pub modules: PathBuf,
}

/// Builds the newest kernel of `series`, "6.12" for example, in `work`.
///
/// # Errors
/// When no suite has its source, or it does not build.
pub fn build(cache: &Cache, lock: &CacheLock, series: &str, work: &Path) -> Result<Built> {
    let package = format!("linux-source-{series}");
    let (suite, package_version) = find(cache, lock, &package)?;
    eprintln!("lab: downloading {package} {package_version}");
    let unpacked = work.join("unpacked");
    suite.unpack(std::slice::from_ref(&package), work, &unpacked)?;
    let archive = unpacked.join(format!("usr/src/{package}.tar.xz"));
    let mut unpack = Command::new("tar");
    unpack.arg("-C").arg(work).arg("-xf").arg(&archive);
    tool::run(&mut unpack, &format!("unpack {}", archive.display()))?;
    let source = work.join(&package);
    eprintln!("lab: building Linux {series} (twelve minutes on two free cores, once)");
    let begin = Instant::now();
    configure(&source)?;
    let jobs = thread::available_parallelism().map_or(1, usize::from);
    let parallel = format!("-j{jobs}");
    make(
        &source,
        &[&parallel, "vmlinux", "modules"],
        "build the kernel",
    )?;
    let tree = work.join("tree");
    let into = format!("INSTALL_MOD_PATH={}", tree.display());
    let strip = "INSTALL_MOD_STRIP=1";
    make(
        &source,
        &[&into, strip, "modules_install"],
        "gather the kernel's modules",
    )?;
    let release = make(&source, &["kernelrelease"], "tell the kernel's release")?;
    let release = release.trim().to_owned();
    let vmlinux = work.join("vmlinux");
    // What describes the source to debuggers is not loaded, and is most of the file.
    let mut strip = Command::new("objcopy");
    strip
        .arg("--strip-debug")
        .arg(source.join("vmlinux"))
        .arg(&vmlinux);
    tool::run(&mut strip, "strip the kernel")?;
    eprintln!(
        "lab: Linux {release} is built, in {} s",
        begin.elapsed().as_secs()
    );
    Ok(Built {
        modules: tree.join("lib/modules").join(&release),
        version: format!("{package_version}-{}", config_hash()),
        vmlinux,
        config: source.join(".config"),
        release,
    })
}

/// The suite that has a package, and its version there.
fn find(cache: &Cache, lock: &CacheLock, package: &str) -> Result<(Suite, String)> {
    let mirror = Mirror::of_this_machine()?;
    for name in SUITES {
        let suite = Suite::open(cache, lock, &mirror, name)?;
        suite.update()?;
        match suite.package(package) {
            Ok(found) => return Ok((suite, found.version)),
            Err(error) if tool::is_final(&error) => return Err(error),
            Err(_) => {}
        }
    }
    anyhow::bail!(
        "No suite of the Debian mirror has {package}; asked were {}. `apt-cache search linux-source` shows which \
         series there are.",
        SUITES.join(", ")
    )
}

/// The kernel's own default, and over it what lab/kernel.config says; all of it must have come to be.
fn configure(source: &Path) -> Result<()> {
    make(source, &["defconfig"], "configure the kernel")?;
    let path = source.join(".config");
    let mut config =
        fs::read_to_string(&path).context("The kernel's configuration cannot be read.")?;
    config.push_str(CONFIG);
    config.push_str(&format!(
        "CONFIG_LOCALVERSION=\"-{MARK}\"\n# CONFIG_LOCALVERSION_AUTO is not set\n"
    ));
    fs::write(&path, config).context("The kernel's configuration cannot be written.")?;
    make(source, &["olddefconfig"], "configure the kernel")?;
    let config = fs::read_to_string(&path).context("The kernel's configuration cannot be read.")?;
    let missing: Vec<&str> = CONFIG
        .lines()
        .filter(|line| line.ends_with("=y") || line.ends_with("=m"))
        .filter(|wanted| !config.lines().any(|line| line == *wanted))
        .collect();
    ensure!(
        missing.is_empty(),
        "This kernel cannot be configured as lab/kernel.config says: {} did not come to be.",
        missing.join(", ")
    );
    Ok(())
}

/// Its standard output.
fn make(source: &Path, words: &[&str], purpose: &str) -> Result<String> {
    let mut command = Command::new("make");
    command
        .arg("--silent")
        .args(words)
        .env("KBUILD_BUILD_USER", MARK)
        .env("KBUILD_BUILD_HOST", MARK)
        .current_dir(source);
    let output = tool::run(&mut command, purpose)?;
    Ok(String::from_utf8_lossy(&output).into_owned())
}

/// Changes when lab/kernel.config does.
pub fn config_hash() -> String {
    short_hash(CONFIG)
}
