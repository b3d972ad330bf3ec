// SPDX-License-Identifier: GPL-2.0-only
//! Builds the BPF objects and their Rust skeletons, and the Rust types of intf.h. Which clang does it is said in
//! .cargo/config.toml.

use bindgen::callbacks::{DeriveInfo, ParseCallbacks};
use std::env;
use std::path::Path;

/// Structs of intf.h that are read from bytes which the kernel gives.
const READ_FROM_BYTES: [&str; 10] = [
    "cohort_group",
    "group_stats",
    "halt_clock",
    "off_cpu",
    "taker",
    "taker_key",
    "taker_stats",
    "vcpu_counters",
    "vcpu_counts",
    "vcpu_waits",
];

/// Those that are given to it as bytes, or taken as words.
const GIVEN_AS_BYTES: [&str; 4] = ["cgroup_cap", "group_stats", "symbol", "vcpu_counts"];

/// Derives for them that any bytes are a value, and that all their bytes are. bytemuck refuses that for a struct of which it
/// is not true.
#[derive(Debug)]
struct Bytes;

impl ParseCallbacks for Bytes {
    fn add_derives(&self, of: &DeriveInfo<'_>) -> Vec<String> {
        let mut derives = Vec::new();
        let given = GIVEN_AS_BYTES.contains(&of.name);
        if given || READ_FROM_BYTES.contains(&of.name) {
            derives.push(String::from("bytemuck::AnyBitPattern"));
        }
        if given {
            derives.push(String::from("bytemuck::NoUninit"));
        }
        derives
    }
}

fn main() {
    for (source, name) in [
        ("bpf/sched.bpf.c", "bpf"),
        ("bpf/observe.bpf.c", "observe"),
        ("bpf/symbols.bpf.c", "symbols"),
    ] {
        scx_cargo::BpfBuilder::new()
            .expect("clang 19 is needed to build the BPF programs: run lab/setup")
            .enable_skel(source, name)
            .build()
            .unwrap_or_else(|error| panic!("{source} does not build: {error:#}"));
    }
    let folder = env::var_os("OUT_DIR").expect("cargo says where results go");
    bindgen::Builder::default()
        .header("bpf/intf.h")
        .clang_args(["-target", "bpf"])
        .derive_default(true)
        .parse_callbacks(Box::new(Bytes))
        .generate()
        .expect("the types of bpf/intf.h cannot be told from it")
        .write_to_file(Path::new(&folder).join("bpf_intf.rs"))
        .expect("cargo's own folder is writable");
    println!("cargo:rerun-if-changed=bpf");
}
