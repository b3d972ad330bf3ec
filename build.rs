// SPDX-License-Identifier: GPL-2.0-only
//! Builds the BPF objects and their Rust skeletons. Which clang does it is said in .cargo/config.toml.

fn main() {
    for (source, name) in [("bpf/sched.bpf.c", "bpf"), ("bpf/observe.bpf.c", "observe")] {
        scx_cargo::BpfBuilder::new()
            .expect("clang 19 is needed to build the BPF programs: run lab/setup")
            .enable_intf("bpf/intf.h", "bpf_intf.rs")
            .enable_skel(source, name)
            .build()
            .unwrap_or_else(|error| panic!("{source} does not build: {error:#}"));
    }
    println!("cargo:rerun-if-changed=bpf");
}
