// SPDX-License-Identifier: GPL-2.0-only
//! Debian packages from the machine's own mirror, of suites that the machine itself does not use, without touching the
//! machine's apt: each suite gets private sources, lists and archives in the cache. Not for what the machine needs
//! installed (lab/setup).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::cache::{Cache, CacheLock};
use super::tool::{self, io_sentence};

/// Signs every Debian suite; the file names of Debian 12 and of Debian 13 and later.
const KEYRINGS: [&str; 2] = [
    "/usr/share/keyrings/debian-archive-keyring.gpg",
    "/usr/share/keyrings/debian-archive-keyring.pgp",
];

/// Suite names that only a Debian archive has together with `main`; other vendors' repositories use others.
const DEBIAN_SUITES: [&str; 8] = [
    "bookworm", "trixie", "forky", "duke", "sid", "stable", "testing", "unstable",
];

/// A Debian mirror that the machine's apt uses.
#[derive(Debug, Clone)]
pub struct Mirror {
    /// Base URI, the folder that holds `dists/` and `pool/`.
    pub uri: String,
    /// File with the keys that sign the suites.
    pub keyring: PathBuf,
}

impl Mirror {
    /// Finds the first Debian mirror in the machine's apt sources.
    pub fn of_this_machine() -> Result<Self> {
        let keyring = KEYRINGS.iter().map(PathBuf::from).find(|path| path.exists()).context(
            "The keys of the Debian archive are missing: install the package debian-archive-keyring (lab/setup does).",
        )?;
        let uri = source_files()?
            .iter()
            .find_map(|(path, text)| debian_uris(path, text).into_iter().next())
            .context(
                "No Debian mirror is in this machine's apt sources (/etc/apt/sources.list, /etc/apt/sources.list.d): \
                 the lab takes its kernels and its image from there, so it needs Debian 12 or later with one entry \
                 such as its installer writes.",
            )?;
        Ok(Self { uri, keyring })
    }

    /// The line of a suite: of its binary packages (`deb`) or its source packages (`deb-src`).
    pub fn source_line(&self, kind: &str, suite: &str) -> String {
        format!(
            "{kind} [signed-by={}] {} {suite} main",
            self.keyring.display(),
            self.uri
        )
    }
}

/// The machine's apt sources in apt's own order: path and text.
fn source_files() -> Result<Vec<(PathBuf, String)>> {
    let mut paths = Vec::new();
    if let Ok(entries) = fs::read_dir("/etc/apt/sources.list.d") {
        paths.extend(entries.flatten().map(|entry| entry.path()));
        paths.sort();
    }
    paths.insert(0, PathBuf::from("/etc/apt/sources.list"));
    paths.retain(|path| {
        path.is_file()
            && path
                .extension()
                .is_some_and(|name| name == "list" || name == "sources")
    });
    let read = |path: PathBuf| {
        let text = fs::read_to_string(&path)
            .with_context(|| format!("{} cannot be read.", path.display()))?;
        Ok((path, text))
    };
    paths.into_iter().map(read).collect()
}

/// URIs of the Debian archives that a source file of either format names.
fn debian_uris(path: &Path, text: &str) -> Vec<String> {
    let entries = if path.extension().is_some_and(|name| name == "sources") {
        deb822_entries(text)
    } else {
        one_line_entries(text)
    };
    let is_debian = |(uri, suites): &(String, Vec<String>)| {
        let over_network = uri.starts_with("http://") || uri.starts_with("https://");
        over_network
            && suites
                .iter()
                .any(|suite| DEBIAN_SUITES.contains(&suite.as_str()))
    };
    entries
        .into_iter()
        .filter(is_debian)
        .map(|(uri, _)| uri.trim_end_matches('/').to_string())
        .collect()
}

/// `deb [options] URI SUITE COMPONENT…` lines as (URI, suites).
fn one_line_entries(text: &str) -> Vec<(String, Vec<String>)> {
    let parse = |line: &str| {
        let line = line.split('#').next()?.trim();
        let rest = line.strip_prefix("deb ")?.trim_start();
        let rest = if rest.starts_with('[') {
            rest.split_once(']')?.1
        } else {
            rest
        };
        let mut words = rest.split_whitespace();
        Some((words.next()?.to_string(), vec![words.next()?.to_string()]))
    };
    text.lines().filter_map(parse).collect()
}

/// Enabled stanzas of type `deb` in deb822 format as (URI, suites), one per URI.
fn deb822_entries(text: &str) -> Vec<(String, Vec<String>)> {
    let without_comments: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    let mut entries = Vec::new();
    for stanza in stanzas(&without_comments.join("\n")) {
        let words = |key: &str| -> Vec<String> {
            field(&stanza, key)
                .unwrap_or_default()
                .split_whitespace()
                .map(str::to_string)
                .collect()
        };
        let enabled =
            !field(&stanza, "Enabled").is_some_and(|value| value.trim().eq_ignore_ascii_case("no"));
        if enabled && words("Types").iter().any(|kind| kind == "deb") {
            entries.extend(words("URIs").into_iter().map(|uri| (uri, words("Suites"))));
        }
    }
    entries
}

/// A paragraph of a control file: fields in order.
type Stanza = Vec<(String, String)>;

/// Splits deb822 text into paragraphs of fields; continued lines are joined with a blank.
fn stanzas(text: &str) -> Vec<Stanza> {
    let mut all = vec![Stanza::new()];
    for line in text.lines() {
        let current = all.last_mut().expect("one stanza is always there");
        if line.trim().is_empty() {
            all.push(Stanza::new());
        } else if line.starts_with([' ', '\t']) {
            if let Some((_, value)) = current.last_mut() {
                value.push(' ');
                value.push_str(line.trim());
            }
        } else if let Some((key, value)) = line.split_once(':') {
            current.push((key.trim().to_string(), value.trim().to_string()));
        }
    }
    all.retain(|stanza| !stanza.is_empty());
    all
}

fn field<'a>(stanza: &'a Stanza, key: &str) -> Option<&'a str> {
    stanza
        .iter()
        .find(|(name, _)| name.eq_ignore_ascii_case(key))
        .map(|(_, value)| value.as_str())
}

/// What the archive says about one binary package.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Package {
    /// Its version.
    pub version: String,
    /// Names of the packages it depends on, first alternatives only.
    pub depends: Vec<String>,
}

/// One suite of the mirror, seen through a private apt.
#[derive(Debug)]
pub struct Suite {
    name: String,
    dir: PathBuf,
}

impl Suite {
    /// Sets up the private apt of a suite; nothing is downloaded.
    pub fn open(cache: &Cache, _lock: &CacheLock, mirror: &Mirror, name: &str) -> Result<Self> {
        Self::set_up(&cache.path("apt").join(name), mirror, "deb", name)
    }

    /// The same for its source packages.
    pub fn open_sources(
        cache: &Cache,
        _lock: &CacheLock,
        mirror: &Mirror,
        name: &str,
    ) -> Result<Self> {
        let dir = cache.path("apt").join(format!("{name}-source"));
        Self::set_up(&dir, mirror, "deb-src", name)
    }

    fn set_up(dir: &Path, mirror: &Mirror, kind: &str, name: &str) -> Result<Self> {
        let prepare = || {
            fs::create_dir_all(dir.join("lists/partial"))?;
            fs::create_dir_all(dir.join("archives/partial"))?;
            fs::write(dir.join("status"), "")?;
            fs::write(
                dir.join("sources.list"),
                mirror.source_line(kind, name) + "\n",
            )?;
            fs::write(dir.join("apt.conf"), apt_conf(dir))
        };
        prepare()
            .map_err(|error| io_sentence(&format!("{} cannot be filled", dir.display()), &error))?;
        Ok(Self {
            name: name.to_string(),
            dir: dir.to_path_buf(),
        })
    }

    /// Downloads the suite's lists if the mirror has newer ones.
    pub fn update(&self) -> Result<()> {
        let mut command = self.apt("apt-get");
        // Without this apt reports success and goes on with old lists, or with none.
        command.args(["-q", "-o", "APT::Update::Error-Mode=any", "update"]);
        tool::run(
            &mut command,
            &format!("update the package lists of {}", self.name),
        )
        .map(drop)
    }

    /// The package's newest version in this suite.
    pub fn package(&self, name: &str) -> Result<Package> {
        let mut command = self.apt("apt-cache");
        command.args(["--no-all-versions", "show", name]);
        let text = tool::run(&mut command, &format!("look up {name} in {}", self.name))?;
        parse_package(&String::from_utf8_lossy(&text))
            .with_context(|| format!("apt-cache shows {name} of {} without a version.", self.name))
    }

    /// Downloads packages, checks them against the signed lists and unpacks them into a folder.
    pub fn unpack(&self, names: &[String], work: &Path, into: &Path) -> Result<()> {
        let debs = work.join("debs");
        fs::create_dir_all(&debs).map_err(|error| {
            io_sentence(&format!("{} cannot be created", debs.display()), &error)
        })?;
        let mut download = self.apt("apt-get");
        download
            .args(["-q", "download"])
            .args(names)
            .current_dir(&debs);
        tool::run(
            &mut download,
            &format!("download {} from {}", names.join(", "), self.name),
        )?;
        let entries =
            fs::read_dir(&debs).with_context(|| format!("{} cannot be read.", debs.display()))?;
        let mut unpacked = 0;
        for entry in entries.flatten() {
            let mut unpack = Command::new("dpkg-deb");
            unpack.arg("-x").arg(entry.path()).arg(into);
            tool::run(&mut unpack, &format!("unpack {}", entry.path().display()))?;
            unpacked += 1;
        }
        fs::remove_dir_all(&debs)
            .with_context(|| format!("{} cannot be removed.", debs.display()))?;
        if unpacked != names.len() {
            bail!(
                "apt-get downloaded {unpacked} packages instead of {}: {}.",
                names.len(),
                names.join(", ")
            );
        }
        Ok(())
    }

    /// Downloads the upstream part of a source package, checks it against the signed lists and unpacks it into a new
    /// folder; its version.
    pub fn unpack_source(&self, name: &str, into: &Path) -> Result<String> {
        self.update()?;
        let mut show = self.apt("apt-cache");
        show.args(["--only-source", "showsrc", name]);
        let text = tool::run(&mut show, &format!("look up {name} in {}", self.name))?;
        let package = parse_package(&String::from_utf8_lossy(&text))
            .with_context(|| format!("{} has no source package {name}.", self.name))?;
        fs::create_dir_all(into).map_err(|error| {
            io_sentence(&format!("{} cannot be created", into.display()), &error)
        })?;
        let mut download = self.apt("apt-get");
        download
            .args(["-q", "source", "--download-only", "--tar-only", name])
            .current_dir(into);
        tool::run(
            &mut download,
            &format!("download the source of {name} from {}", self.name),
        )?;
        let archive = fs::read_dir(into)
            .with_context(|| format!("{} cannot be read.", into.display()))?
            .flatten()
            .map(|entry| entry.path())
            .find(|path| path.to_string_lossy().contains(".orig.tar."))
            .with_context(|| format!("The source package {name} has no upstream archive."))?;
        let mut unpack = Command::new("tar");
        unpack.args(["--no-same-owner", "-xf"]).arg(&archive);
        unpack.arg("-C").arg(into);
        tool::run(&mut unpack, &format!("unpack the source of {name}"))?;
        Ok(package.version)
    }

    fn apt(&self, tool: &str) -> Command {
        let mut command = Command::new(tool);
        command
            .arg("-c")
            .arg(self.dir.join("apt.conf"))
            .env("LC_ALL", "C.UTF-8");
        command
    }
}

/// The private configuration; read after the machine's own, whose proxies and the like stay in force.
fn apt_conf(dir: &Path) -> String {
    let dir = dir.display();
    // The hooks are cleared because a machine's may act on its own cache (container images do so).
    format!(
        r##"#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
Dir::Etc::sourcelist "{dir}/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
Dir::State "{dir}";
Dir::State::lists "{dir}/lists";
Dir::State::status "{dir}/status";
Dir::Cache "{dir}";
Dir::Cache::archives "{dir}/archives";
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
APT::Architecture "amd64";
APT::Architectures "amd64";
APT::Sandbox::User "";
Acquire::GzipIndexes "true";
Acquire::Languages "none";
Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";
Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled "false";
"##
    )
}

/// Reads the first paragraph of `apt-cache show`.
fn parse_package(text: &str) -> Option<Package> {
    let stanza = stanzas(text).into_iter().next()?;
    let depends = field(&stanza, "Depends").unwrap_or_default();
    let name_of = |relation: &str| {
        relation
            .split(['|', '(', ':'])
            .next()
            .unwrap_or_default()
            .trim()
            .to_string()
    };
    Some(Package {
        version: field(&stanza, "Version")?.to_string(),
        depends: depends
            .split(',')
            .map(name_of)
            .filter(|name| !name.is_empty())
            .collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_sources_of_debian_are_found_and_others_not() {
        let text = "# deb http://a.example/debian trixie main\n\
                    deb cdrom:[Debian]/ bookworm main\n\
                    deb https://vendor.example/apt cloud-bookworm main\n\
                    deb-src http://b.example/debian bookworm main\n\
                    deb http://c.example/debian-security bookworm-security main\n\
                    deb [arch=amd64 signed-by=/k.gpg] http://m.example/debian/ bookworm main contrib # why\n";
        assert_eq!(
            debian_uris(Path::new("sources.list"), text),
            ["http://m.example/debian"]
        );
    }

    #[test]
    fn deb822_sources_of_debian_are_found_and_others_not() {
        let text = "Types: deb\n# a comment inside\nURIs: http://m.example/debian\nSuites: bookworm bookworm-updates\n\
                    Components: main\n\nTypes: deb\nURIs: https://v.example/node_20.x\nSuites: nodistro\n\n\
                    Enabled: no\nTypes: deb\nURIs: http://off.example/debian\nSuites: sid\n\n\
                    Types: deb-src\nURIs: http://src.example/debian\nSuites: sid\n\n\
                    Types: deb deb-src\nURIs:\n http://n.example/debian/\nSuites:\n trixie\n trixie-updates\n";
        let found = debian_uris(Path::new("debian.sources"), text);
        assert_eq!(
            found,
            ["http://m.example/debian", "http://n.example/debian"]
        );
    }

    #[test]
    fn dependencies_are_read_without_versions_and_alternatives() {
        let text = "Package: linux-image-7.2.13-amd64\nVersion: 7.2.13-1\n\
                    Depends: dracut | initramfs-tools (>= 0.120), linux-base-7.2.13-amd64 (= 7.2.13-1)\n\n\
                    Package: other\nVersion: 1\n";
        let package = parse_package(text).unwrap();
        assert_eq!(package.version, "7.2.13-1");
        assert_eq!(package.depends, ["dracut", "linux-base-7.2.13-amd64"]);
        assert_eq!(parse_package(""), None);
    }
}
