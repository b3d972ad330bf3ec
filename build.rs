// SPDX-License-Identifier: GPL-2.0-only
//! Builds the BPF object and its Rust skeleton. Which clang does it is said in .cargo/config.toml.

fn main() {
    scx_cargo::BpfBuilder::new()
        .expect("clang 19 is needed to build the BPF programs: run lab/setup")
        .enable_intf("bpf/intf.h", "bpf_intf.rs")
        .enable_skel("bpf/sched.bpf.c", "bpf")
        .build()
        .expect("the BPF programs do not build");
    println!("cargo:rerun-if-changed=bpf");
}
