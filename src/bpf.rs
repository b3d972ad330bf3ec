// SPDX-License-Identifier: GPL-2.0-only
//! What the build makes of `bpf/`: the skeletons of the two BPF objects, and the
//! types of `intf.h`; and how a map's value becomes one of these.

use anyhow::{Result, ensure};
use std::mem::size_of;
use std::ptr;

/// The skeleton of the scheduler: its programs, maps and variables.
#[allow(clippy::all, missing_docs, unused)]
pub mod skel {
    include!(concat!(env!("OUT_DIR"), "/bpf_skel.rs"));
}

/// The skeleton of the observer.
#[allow(clippy::all, missing_docs, unused)]
pub mod observe {
    include!(concat!(env!("OUT_DIR"), "/observe_skel.rs"));
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

/// The `T` of `intf.h` that a map's key or value begins with; there are integers only in `T`.
pub fn from_bytes<T: Copy>(bytes: &[u8]) -> Result<T> {
    ensure!(
        bytes.len() >= size_of::<T>(),
        "{} bytes are fewer than their description has",
        bytes.len()
    );
    // SAFETY: there are enough bytes, and any bytes are a value of a struct of integers, which `intf.h` has only.
    Ok(unsafe { ptr::read_unaligned(bytes.as_ptr().cast::<T>()) })
}
