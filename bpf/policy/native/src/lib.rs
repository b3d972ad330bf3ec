// SPDX-License-Identifier: GPL-2.0-only
//! The decisions of `bpf/policy/*.h`, the very functions that run in the kernel, callable from Rust. Here to test them
//! (`tests/`) and to simulate with them; the `cohort` program does not use this crate.
#![allow(
    missing_docs,
    non_upper_case_globals,
    non_camel_case_types,
    non_snake_case
)]

mod generated {
    #![allow(dead_code, unused_imports, clippy::all)]
    include!(concat!(env!("OUT_DIR"), "/policy.rs"));
}
pub use generated::*;
