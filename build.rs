// SPDX-License-Identifier: GPL-2.0-only
//! Builds the BPF object and its Rust skeleton, and the policy headers once more for the native unit tests.

fn main() {
    // Debian 12 has clang 19 beside an older default; the user's own choice wins.
    if std::env::var_os("BPF_CLANG").is_none() {
        // SAFETY: a build script's main thread, before any other thread exists.
        unsafe { std::env::set_var("BPF_CLANG", "clang-19") };
    }
    scx_cargo::BpfBuilder::new()
        .expect("clang 19 is needed to build the BPF programs: run lab/setup")
        .enable_intf("bpf/intf.h", "bpf_intf.rs")
        .enable_skel("bpf/sched.bpf.c", "bpf")
        .build()
        .expect("the BPF programs do not build");
    println!("cargo:rerun-if-changed=bpf");
}
