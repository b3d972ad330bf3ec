// SPDX-License-Identifier: GPL-2.0-only
//! What the build makes of `bpf/`: the skeleton of the BPF object, and the types
//! of `intf.h`. Generated code only.

/// The skeleton: the BPF object with its programs, maps and variables.
#[allow(clippy::all, missing_docs, unused)]
pub mod skel {
    include!(concat!(env!("OUT_DIR"), "/bpf_skel.rs"));
}

/// The types that the BPF programs and this program share.
#[allow(
    clippy::all,
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    unused
)]
pub mod intf {
    include!(concat!(env!("OUT_DIR"), "/bpf_intf.rs"));
}
