// SPDX-License-Identifier: GPL-2.0-only
//! Finds L1's kernel: which stock Debian kernels the mirror has and which the lab has built, whether their BTF is sound for
//! sched_ext, and which one to take. Not for building one (built.rs), nor for booting it (boot.rs).
//!
//! The newest kernel of each suite is a candidate, and so is each that was built. Since 7.2 Debian splits what linux-image held: linux-base-R has the
//! configuration, linux-binary-R vmlinuz, linux-modules-R the modules. Only vmlinuz is needed to judge a kernel;
//! modules (over 100 MB) are downloaded for kernels that are booted.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use cohort::host::btf::{self, Soundness};
use serde::{Deserialize, Serialize};

use super::built::{self, Built};
use super::bzimage::extract_vmlinux;
use super::cache::{Cache, CacheLock, WorkDir};
use super::mirror::{Mirror, Suite};
use super::modules;
use super::tool::{self, io_sentence};

/// Where kernels come from: with sched_ext from development, Debian 13's backports and the next release; without it from
/// Debian 13 and 12.
const SUITES: [&str; 5] = ["sid", "trixie-backports", "forky", "trixie", "bookworm"];

/// What stands for a suite with kernels that the lab has built.
const BUILT: &str = "built here";

/// The package that always depends on a suite's newest kernel.
const META_PACKAGE: &str = "linux-image-amd64";

/// How long a list of candidates is believed: long enough that most runs ask no mirror.
const CATALOGUE_VALID_S: u64 = 7 * 24 * 3600;

/// What a kernel in the cache is.
const RECORD: &str = "kernel.json";

/// A kernel that a suite offers, or that was built.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Candidate {
    /// The suite it comes from.
    pub suite: String,
    /// What `uname -r` says on it.
    pub release: String,
    /// Version of its Debian packages.
    pub version: String,
    /// Packages with vmlinuz and the configuration.
    binary_packages: Vec<String>,
    /// Packages with the modules.
    module_packages: Vec<String>,
}

/// A candidate whose BTF was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Judged {
    /// The kernel.
    pub candidate: Candidate,
    /// What its BTF is like.
    pub soundness: Soundness,
}

/// The candidates, as they were when the mirror was asked.
#[derive(Debug, Serialize, Deserialize)]
struct Catalogue {
    checked_unix_s: u64,
    candidates: Vec<Candidate>,
}

/// A kernel that is ready to boot.
#[derive(Debug)]
pub struct Kernel {
    /// What it is and what its BTF is like.
    pub judged: Judged,
    /// The kernel, unpacked: an ELF file.
    pub vmlinux: PathBuf,
    /// Its build configuration.
    pub config: PathBuf,
    /// Folder with L1's modules, as /lib/modules/RELEASE.
    pub modules: PathBuf,
}

/// The kernels that the lab can use.
#[derive(Debug)]
pub struct Kernels<'a> {
    cache: &'a Cache,
    candidates: Vec<Candidate>,
}

impl<'a> Kernels<'a> {
    /// Loads the list of candidates; asks the mirror if the list is old or `refresh` is set. If the mirror cannot be
    /// reached, an old list will do.
    pub fn load(cache: &'a Cache, refresh: bool) -> Result<Self> {
        let path = cache.path("kernels.json");
        let known = read_json::<Catalogue>(&path);
        let is_fresh = known
            .as_ref()
            .is_some_and(|known| unix_s() < known.checked_unix_s + CATALOGUE_VALID_S);
        if let Some(known) = known.as_ref().filter(|_| is_fresh && !refresh) {
            return Ok(Self::with_built(cache, known.candidates.clone()));
        }
        let candidates = match (find_candidates(cache, &path), known) {
            (Ok(candidates), _) => candidates,
            (Err(error), Some(known)) if !tool::is_final(&error) => {
                eprintln!(
                    "lab: the list of kernels is not renewed, the one in the cache is used: {error:#}"
                );
                known.candidates
            }
            (Err(error), _) => return Err(error),
        };
        Ok(Self::with_built(cache, candidates))
    }

    /// The `candidates` of the mirror, and the kernels that were built.
    fn with_built(cache: &'a Cache, mut candidates: Vec<Candidate>) -> Self {
        let entries = fs::read_dir(cache.path("kernels"));
        let entries = entries.into_iter().flatten().flatten();
        let known = entries.filter_map(|entry| read_json::<Judged>(&entry.path().join(RECORD)));
        candidates.extend(
            known
                .map(|judged| judged.candidate)
                .filter(|candidate| candidate.suite == BUILT),
        );
        newest_first(&mut candidates);
        Self { cache, candidates }
    }

    /// Builds the newest kernel of `series`, "6.12" for example, unless it was built already.
    ///
    /// # Errors
    /// When there is no source of that series, or it does not build.
    pub fn build(&self, series: &str) -> Result<Judged> {
        let numbers = release_numbers(series);
        let is_of_series = |candidate: &&Candidate| {
            candidate.suite == BUILT
                && candidate.version.ends_with(&built::config_hash())
                && release_numbers(&candidate.release).starts_with(&numbers)
        };
        if let Some(candidate) = self.candidates.iter().find(is_of_series) {
            return self.judge(candidate);
        }
        let lock = self.cache.lock()?;
        let work = lock.work_dir("build")?;
        let built = built::build(self.cache, &lock, series, work.path())?;
        let modules = work.path().join("modules");
        modules::collect(&built.release, &built.modules, &modules)?;
        let judged = judge_built(&built, &work)?;
        work.publish("modules", &self.modules_of(&judged.candidate))?;
        work.publish("entry", &self.dir(&built.release))?;
        Ok(judged)
    }

    /// Judges every candidate, newest first. One that cannot be had is left out with a note.
    pub fn judge_all(&self) -> Result<Vec<Judged>> {
        let mut all = Vec::new();
        for candidate in &self.candidates {
            match self.judge(candidate) {
                Ok(judged) => all.push(judged),
                Err(error) if tool::is_final(&error) => return Err(error),
                Err(error) => eprintln!("lab: kernel {} is left out: {error:#}", candidate.release),
            }
        }
        Ok(all)
    }

    /// The kernel of a given release, sound or not.
    pub fn of_release(&self, release: &str) -> Result<Kernel> {
        let candidate = self
            .candidates
            .iter()
            .find(|candidate| candidate.release == release)
            .with_context(|| {
                let known: Vec<&str> = self
                    .candidates
                    .iter()
                    .map(|candidate| candidate.release.as_str())
                    .collect();
                format!(
                    "The mirror offers no kernel {release}; there are: {}.",
                    known.join(", ")
                )
            })?;
        self.ready(self.judge(candidate)?)
    }

    /// The newest sound kernel.
    pub fn newest_sound(&self) -> Result<Kernel> {
        let mut reasons = Vec::new();
        for candidate in &self.candidates {
            match self.judge(candidate) {
                Ok(judged) if judged.soundness.is_sound() => return self.ready(judged),
                Ok(judged) => reasons.push(format!("{}: {}", candidate.release, judged.soundness)),
                Err(error) if tool::is_final(&error) => return Err(error),
                Err(error) => {
                    eprintln!("lab: kernel {} is left out: {error:#}", candidate.release);
                    reasons.push(format!("{}: {error:#}", candidate.release));
                }
            }
        }
        bail!("No kernel of the mirror can be used. {}", reasons.join(" "))
    }

    fn dir(&self, release: &str) -> PathBuf {
        self.cache.path("kernels").join(release)
    }

    fn modules_of(&self, candidate: &Candidate) -> PathBuf {
        let (version, list) = (&candidate.version, modules::list_hash());
        self.cache.path("modules").join(format!("{version}-{list}"))
    }

    fn judge(&self, candidate: &Candidate) -> Result<Judged> {
        let record = self.dir(&candidate.release).join(RECORD);
        let known = || {
            read_json::<Judged>(&record)
                .filter(|judged| judged.candidate.version == candidate.version)
        };
        if let Some(judged) = known() {
            return Ok(judged);
        }
        let lock = self.cache.lock()?;
        if let Some(judged) = known() {
            return Ok(judged); // another run was quicker
        }
        eprintln!(
            "lab: downloading kernel {} of {} to look at its BTF",
            candidate.release, candidate.suite
        );
        let work = lock.work_dir("kernel")?;
        let unpacked = work.path().join("unpacked");
        let suite = Suite::open(
            self.cache,
            &lock,
            &Mirror::of_this_machine()?,
            &candidate.suite,
        )?;
        suite.unpack(&candidate.binary_packages, work.path(), &unpacked)?;
        let judged = build_binary_entry(candidate, &work, &unpacked)?;
        work.publish("entry", &self.dir(&candidate.release))?;
        Ok(judged)
    }

    /// Fetches the modules if they are missing.
    fn ready(&self, judged: Judged) -> Result<Kernel> {
        let dir = self.dir(&judged.candidate.release);
        let kernel = Kernel {
            vmlinux: dir.join("vmlinux"),
            config: dir.join("config"),
            modules: self.modules_of(&judged.candidate),
            judged,
        };
        if !kernel.vmlinux.exists() {
            let lock = self.cache.lock()?;
            if !kernel.vmlinux.exists() {
                let work = lock.work_dir("vmlinux")?;
                extract_vmlinux(
                    &dir.join("vmlinuz"),
                    work.path(),
                    &work.path().join("vmlinux"),
                )?;
                work.publish("vmlinux", &kernel.vmlinux)?;
            }
        }
        if !kernel.modules.exists() {
            let lock = self.cache.lock()?;
            if !kernel.modules.exists() {
                self.fetch_modules(&kernel, &lock)?;
            }
        }
        Ok(kernel)
    }

    fn fetch_modules(&self, kernel: &Kernel, lock: &CacheLock) -> Result<()> {
        let candidate = &kernel.judged.candidate;
        eprintln!(
            "lab: downloading the modules of kernel {}",
            candidate.release
        );
        let work = lock.work_dir("modules")?;
        let unpacked = work.path().join("unpacked");
        let suite = Suite::open(
            self.cache,
            lock,
            &Mirror::of_this_machine()?,
            &candidate.suite,
        )?;
        let mut packages = candidate.module_packages.clone();
        // modules.builtin, which depmod and modprobe read, is in linux-base.
        packages.extend(candidate.binary_packages.iter().cloned());
        packages.sort();
        packages.dedup();
        suite.unpack(&packages, work.path(), &unpacked)?;
        let from = modules_dir(&unpacked, &candidate.release)?;
        modules::collect(&candidate.release, &from, &work.path().join("entry"))?;
        work.publish("entry", &kernel.modules)
    }
}

fn unix_s() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

fn read_json<T: for<'de> Deserialize<'de>>(path: &Path) -> Option<T> {
    // What an older version of the lab wrote, and cannot be read, is as good as missing: it is made again.
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    fs::write(path, serde_json::to_vec_pretty(value)?)
        .map_err(|error| io_sentence(&format!("{} cannot be written", path.display()), &error))
}

/// Asks the mirror for each suite's kernel and records the answer.
fn find_candidates(cache: &Cache, path: &Path) -> Result<Vec<Candidate>> {
    let mirror = Mirror::of_this_machine()?;
    let lock = cache.lock()?;
    eprintln!("lab: asking the Debian mirror for kernels");
    let mut candidates = Vec::new();
    let mut errors = Vec::new();
    for name in SUITES {
        match Suite::open(cache, &lock, &mirror, name).and_then(|suite| candidate_of(&suite, name))
        {
            Ok(candidate) => candidates.push(candidate),
            Err(error) if tool::is_final(&error) => return Err(error),
            Err(error) => errors.push(error),
        }
    }
    match errors.pop() {
        Some(error) if candidates.is_empty() => return Err(error),
        Some(error) => eprintln!("lab: a suite of the mirror is left out: {error:#}"),
        None => {}
    }
    newest_first(&mut candidates);
    let work = lock.work_dir("catalogue")?;
    let catalogue = Catalogue {
        checked_unix_s: unix_s(),
        candidates,
    };
    write_json(&work.path().join("entry"), &catalogue)?;
    work.publish("entry", path)?;
    Ok(catalogue.candidates)
}

fn candidate_of(suite: &Suite, name: &str) -> Result<Candidate> {
    suite.update()?;
    let meta = suite.package(META_PACKAGE)?;
    let is_image = |name: &&String| name.starts_with("linux-image-");
    let image = meta
        .depends
        .iter()
        .find(is_image)
        .context("The meta package of the kernel names no kernel.")?;
    let release = image.trim_start_matches("linux-image-").to_string();
    let depends = suite.package(image)?.depends;
    let part = |kind: &str| format!("linux-{kind}-{release}");
    let is_split = depends.contains(&part("binary"));
    let (binary_packages, module_packages) = if is_split {
        (vec![part("base"), part("binary")], vec![part("modules")])
    } else {
        (vec![image.clone()], vec![image.clone()])
    };
    Ok(Candidate {
        suite: name.to_string(),
        version: meta.version,
        release,
        binary_packages,
        module_packages,
    })
}

/// Sorts by release, newest first; a kernel that two suites share is kept once.
fn newest_first(candidates: &mut Vec<Candidate>) {
    candidates.sort_by_key(|candidate| std::cmp::Reverse(release_numbers(&candidate.release)));
    candidates.dedup_by(|a, b| a.release == b.release);
}

/// "7.2.13+deb14-amd64" is [7, 2, 13].
fn release_numbers(release: &str) -> Vec<u32> {
    let end = release
        .find(|char: char| !char.is_ascii_digit() && char != '.')
        .unwrap_or(release.len());
    release[..end]
        .split('.')
        .filter_map(|number| number.parse().ok())
        .collect()
}

/// Where the packages put the modules: Debian 12 in /lib, later ones in /usr/lib.
fn modules_dir(unpacked: &Path, release: &str) -> Result<PathBuf> {
    let places = ["usr/lib/modules", "lib/modules"];
    let found = places
        .iter()
        .map(|place| unpacked.join(place).join(release))
        .find(|path| path.is_dir());
    found.with_context(|| {
        format!("The packages of kernel {release} hold no folder lib/modules/{release}.")
    })
}

/// Judges the kernel and gathers its cache entry: vmlinuz, config and kernel.json.
fn build_binary_entry(candidate: &Candidate, work: &WorkDir, unpacked: &Path) -> Result<Judged> {
    let release = &candidate.release;
    let entry = work.path().join("entry");
    fs::create_dir(&entry)
        .map_err(|error| io_sentence(&format!("{} cannot be created", entry.display()), &error))?;
    for name in ["vmlinuz", "config"] {
        let places = [
            unpacked.join("usr/lib/modules").join(release).join(name),
            unpacked.join("boot").join(format!("{name}-{release}")),
        ];
        let found = places.iter().find(|path| path.is_file());
        let found =
            found.with_context(|| format!("The packages of kernel {release} hold no {name}."))?;
        fs::rename(found, entry.join(name))
            .with_context(|| format!("{} cannot be moved.", found.display()))?;
    }
    let vmlinux = work.path().join("vmlinux");
    extract_vmlinux(&entry.join("vmlinuz"), work.path(), &vmlinux)?;
    judge_vmlinux(candidate.clone(), &vmlinux, &entry)
}

/// The same of a kernel that was built: vmlinux, config and kernel.json.
fn judge_built(built: &Built, work: &WorkDir) -> Result<Judged> {
    let entry = work.path().join("entry");
    let gather = || {
        fs::create_dir(&entry)?;
        fs::copy(&built.config, entry.join("config"))?;
        fs::rename(&built.vmlinux, entry.join("vmlinux"))
    };
    gather().map_err(|error| io_sentence("The kernel cannot be put into the cache", &error))?;
    let candidate = Candidate {
        suite: BUILT.to_owned(),
        release: built.release.clone(),
        version: built.version.clone(),
        binary_packages: Vec::new(),
        module_packages: Vec::new(),
    };
    judge_vmlinux(candidate, &entry.join("vmlinux"), &entry)
}

/// Judges the kernel `vmlinux`, and records that in its `entry`.
fn judge_vmlinux(candidate: Candidate, vmlinux: &Path, entry: &Path) -> Result<Judged> {
    let soundness = btf::check(vmlinux)
        .with_context(|| format!("The BTF of kernel {} cannot be read.", candidate.release))?;
    let judged = Judged {
        candidate,
        soundness,
    };
    write_json(&entry.join(RECORD), &judged)?;
    Ok(judged)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(release: &str, suite: &str) -> Candidate {
        Candidate {
            suite: suite.into(),
            release: release.into(),
            version: "1".into(),
            binary_packages: vec![],
            module_packages: vec![],
        }
    }

    #[test]
    fn candidates_are_ordered_by_number_and_kept_once() {
        let mut candidates = vec![
            candidate("7.2.9+deb14-amd64", "forky"),
            candidate("7.2.13+deb14-amd64", "sid"),
            candidate("7.3.4+deb13-amd64", "trixie-backports"),
            candidate("7.2.13+deb14-amd64", "other"),
        ];
        newest_first(&mut candidates);
        let releases: Vec<&str> = candidates
            .iter()
            .map(|candidate| candidate.release.as_str())
            .collect();
        assert_eq!(
            releases,
            [
                "7.3.4+deb13-amd64",
                "7.2.13+deb14-amd64",
                "7.2.9+deb14-amd64"
            ]
        );
    }

    #[test]
    fn numbers_end_at_the_first_other_character() {
        assert_eq!(release_numbers("7.2.13+deb14-amd64"), [7, 2, 13]);
        assert_eq!(release_numbers("7.4-rc1-amd64"), [7, 4]);
        assert_eq!(release_numbers("x"), Vec::<u32>::new());
    }
}
