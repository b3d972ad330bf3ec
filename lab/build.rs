// SPDX-License-Identifier: GPL-2.0-only
//! Compiles the guests' workloads (guest/*.c) into one static program that the `lab` binary carries along, so
//! that guests' initrds can be made wherever `lab` runs. Not for anything of L1, which comes from Debian.
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

fn c_sources(directory: &Path) -> Vec<PathBuf> {
    let mut sources: Vec<PathBuf> = fs::read_dir(directory)
        .expect("lab/guest holds the workloads' sources")
        .map(|entry| entry.expect("lab/guest is readable").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "c"))
        .collect();
    sources.sort();
    sources
}

fn main() {
    println!("cargo:rerun-if-changed=guest");
    let output =
        PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("workload");
    let status = Command::new("gcc")
        .args([
            "-std=gnu17",
            "-O2",
            "-static",
            "-pthread",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-s",
            "-o",
        ])
        .arg(&output)
        .args(c_sources(Path::new("guest")))
        .status()
        .expect("gcc could not be started: install the packages of packages.txt");
    assert!(
        status.success(),
        "gcc failed to build the guests' workloads: {status}"
    );
}
