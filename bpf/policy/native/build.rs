// SPDX-License-Identifier: GPL-2.0-only
//! Compiles the policy headers for this machine: bindgen declares their inline functions to Rust and writes the C
//! wrappers that give them symbols.

use std::{env, path::PathBuf};

fn main() {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let wrappers = out.join("wrappers.c");
    bindgen::Builder::default()
        .header("policy.h")
        .clang_arg("-I../..")
        .allowlist_file(r"\.\./\.\./(intf|policy/\w+)\.h")
        .default_enum_style(bindgen::EnumVariation::Consts)
        .prepend_enum_name(false)
        .derive_default(true)
        .wrap_static_fns(true)
        .wrap_static_fns_path(&wrappers)
        .generate()
        .expect("bindgen reads the policy headers")
        .write_to_file(out.join("policy.rs"))
        .expect("OUT_DIR is writable");
    cc::Build::new()
        .file(&wrappers)
        .include(".")
        .include("../..")
        .flag("-Wno-unused")
        .compile("cohort_policy");
    println!("cargo:rerun-if-changed=policy.h");
    println!("cargo:rerun-if-changed=..");
    println!("cargo:rerun-if-changed=../../intf.h");
}
