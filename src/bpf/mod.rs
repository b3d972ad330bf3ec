// SPDX-License-Identifier: GPL-2.0-only
//! What the build makes of `bpf/`: the skeletons of the three BPF objects, and the
//! types of `intf.h`; and how a map's value becomes one of these. Its modules are what the scheduler and the observer have
//! in common: what is seen of KVM ([`sight`]), clocks of halted time ([`halt`]), and what counters gained ([`counts`]).

pub(crate) mod counts;
pub(crate) mod halt;
pub(crate) mod sight;

use anyhow::{Context, Result};
use bytemuck::{AnyBitPattern, pod_read_unaligned};

/// The skeleton of the scheduler: its programs, maps and variables.
#[allow(clippy::all, missing_docs, unused)]
pub(crate) mod skel {
    include!(concat!(env!("OUT_DIR"), "/bpf_skel.rs"));
}

/// The skeleton of the observer.
#[allow(clippy::all, missing_docs, unused)]
pub(crate) mod observe {
    include!(concat!(env!("OUT_DIR"), "/observe_skel.rs"));
}

/// The skeleton of what looks symbols up.
#[allow(clippy::all, missing_docs, unused)]
pub(crate) mod symbols {
    include!(concat!(env!("OUT_DIR"), "/symbols_skel.rs"));
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

/// The `T` that a map's key or value begins with. Which types of `intf.h` can be one is said in `build.rs`.
///
/// There is none of a type of which not all bytes are a value:
///
/// ```compile_fail
/// let _ = cohort::bpf::from_bytes::<bool>(&[2]);
/// ```
pub fn from_bytes<T: AnyBitPattern>(bytes: &[u8]) -> Result<T> {
    let of_type = bytes
        .get(..size_of::<T>())
        .with_context(|| format!("{} bytes are fewer than their description has", bytes.len()))?;
    Ok(pod_read_unaligned(of_type))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_what_its_bytes_begin_with_wherever_they_are() {
        let mut bytes = vec![0];
        bytes.extend(7_u64.to_ne_bytes());
        bytes.extend(9_u64.to_ne_bytes());
        bytes.push(0);
        let stats: intf::taker_stats = from_bytes(&bytes[1..]).expect("there is more than enough");
        assert_eq!((stats.times, stats.ready_ns), (7, 9));
    }

    #[test]
    fn too_few_bytes_are_an_error() {
        let bytes = [0; size_of::<intf::vcpu_counters>()];
        assert!(from_bytes::<intf::vcpu_counters>(&bytes).is_ok());
        let error = from_bytes::<intf::vcpu_counters>(&bytes[1..]).expect_err("one is missing");
        assert!(error.to_string().contains("fewer"), "{error}");
    }
}
