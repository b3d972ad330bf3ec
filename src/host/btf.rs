// SPDX-License-Identifier: GPL-2.0-only
//! Whether a kernel's type information (BTF) is good enough to load a sched_ext scheduler. Not for finding types: that
//! is libbpf's work.
//!
//! A kernel function that BPF may call carries the declaration tag `bpf_kfunc` in BTF. Some Debian builds lack it on
//! some functions of sched_ext. The build step that hides a kfunc's implicit last argument goes by that tag, so such a
//! function keeps a prototype that no scheduler declares, and libbpf refuses the whole scheduler with "func_proto
//! incompatible with vmlinux". Seen: 7.2.11 and 7.2.12 of trixie-backports unsound; 7.2.12 of forky, 7.2.13 of sid and
//! 7.3.4 of trixie-backports sound.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use libbpf_rs::btf::types::{DeclTag, Func, Struct};
use libbpf_rs::btf::{Btf, ReferencesType as _, TypeId};
use serde::{Deserialize, Serialize};

/// Where a running kernel shows its BTF.
pub const RUNNING_KERNEL: &str = "/sys/kernel/btf/vmlinux";

const KFUNC_TAG: &str = "bpf_kfunc";

/// The kernel functions a sched_ext scheduler calls. In each row, the first that the kernel has is the one that
/// scx's compat.bpf.h calls; the others are its names on older kernels.
const NEEDED_KFUNCS: &[&[&str]] = &[
    &["scx_bpf_create_dsq"],
    &["scx_bpf_destroy_dsq"],
    &["scx_bpf_dsq_nr_queued"],
    &["scx_bpf_dsq_insert___v2", "scx_bpf_dsq_insert"],
    &["__scx_bpf_dsq_insert_vtime", "scx_bpf_dsq_insert_vtime"],
    &[
        "scx_bpf_dsq_move_to_local___v2",
        "scx_bpf_dsq_move_to_local",
    ],
    &["scx_bpf_dsq_move"],
    &["scx_bpf_dsq_move_vtime"],
    &["scx_bpf_dsq_move_set_slice"],
    &["scx_bpf_dsq_move_set_vtime"],
    &["bpf_iter_scx_dsq_new"],
    &["bpf_iter_scx_dsq_next"],
    &["bpf_iter_scx_dsq_destroy"],
    &["scx_bpf_task_set_slice"],
    &["scx_bpf_task_set_dsq_vtime"],
    &["scx_bpf_task_cgroup"],
    &["scx_bpf_task_cpu"],
    &["scx_bpf_task_running"],
    &["__scx_bpf_select_cpu_and", "scx_bpf_select_cpu_and"],
    &["scx_bpf_select_cpu_dfl"],
    &["scx_bpf_test_and_clear_cpu_idle"],
    &["scx_bpf_pick_idle_cpu"],
    &["scx_bpf_kick_cpu"],
    &["scx_bpf_cpu_curr"],
    &["scx_bpf_now"],
    &["scx_bpf_error_bstr"],
    &["scx_bpf_exit_bstr"],
];

/// What was found in a kernel's BTF.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Soundness {
    /// The kernel has sched_ext at all: `struct sched_ext_ops` exists.
    pub has_sched_ext: bool,
    /// Needed kernel functions that do not exist, by their newest name.
    pub missing_kfuncs: Vec<String>,
    /// Needed kernel functions that exist and carry no kfunc tag.
    pub untagged_kfuncs: Vec<String>,
}

impl Soundness {
    /// A scheduler can be loaded on this kernel.
    pub fn is_sound(&self) -> bool {
        self.has_sched_ext && self.missing_kfuncs.is_empty() && self.untagged_kfuncs.is_empty()
    }
}

impl std::fmt::Display for Soundness {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if !self.has_sched_ext {
            return write!(
                f,
                "this kernel has no sched_ext (no struct sched_ext_ops in its BTF)"
            );
        }
        if self.is_sound() {
            return write!(f, "sound");
        }
        let part = |what: &str, names: &[String]| {
            (!names.is_empty()).then(|| {
                format!(
                    "{} sched_ext functions {what} ({})",
                    names.len(),
                    names.join(", ")
                )
            })
        };
        let parts = [
            part("are missing", &self.missing_kfuncs),
            part("carry no kfunc tag", &self.untagged_kfuncs),
        ];
        write!(
            f,
            "{}",
            parts.into_iter().flatten().collect::<Vec<_>>().join("; ")
        )
    }
}

/// Checks the BTF in `path`: a raw BTF file such as [`RUNNING_KERNEL`], or an ELF file with a section `.BTF`.
///
/// # Errors
///
/// If the file cannot be read or holds no BTF. An unsound kernel is a result, not an error.
pub fn check(path: impl AsRef<Path>) -> Result<Soundness, libbpf_rs::Error> {
    let btf = Btf::from_path(path)?;
    let kfuncs: HashSet<TypeId> = btf
        .type_by_kind::<DeclTag<'_>>()
        .filter_map(|tag| tagged_kfunc(&tag))
        .collect();
    let mut functions: HashMap<&str, bool> = HashMap::new();
    for function in btf.type_by_kind::<Func<'_>>() {
        if let Some(name) = function.name().and_then(|name| name.to_str()) {
            // A name may be there twice (two static functions); the tagged one is the kfunc.
            *functions.entry(name).or_default() |= kfuncs.contains(&function.type_id());
        }
    }
    let has_sched_ext = btf.type_by_name::<Struct<'_>>("sched_ext_ops").is_some();
    Ok(judge(has_sched_ext, |name| functions.get(name).copied()))
}

/// The function that a declaration tag marks as a kfunc.
fn tagged_kfunc(tag: &DeclTag<'_>) -> Option<TypeId> {
    let marks_function = tag.component_index().is_none();
    let is_kfunc = tag.name().is_some_and(|name| name == KFUNC_TAG);
    (marks_function && is_kfunc).then(|| tag.referenced_type().type_id())
}

/// `tagged` tells of a function's name whether it carries the kfunc tag, None if there is no such function.
fn judge(has_sched_ext: bool, tagged: impl Fn(&str) -> Option<bool>) -> Soundness {
    let mut soundness = Soundness {
        has_sched_ext,
        ..Soundness::default()
    };
    for names in NEEDED_KFUNCS {
        match names.iter().find_map(|name| Some((name, tagged(name)?))) {
            Some((_, true)) => {}
            Some((name, false)) => soundness.untagged_kfuncs.push(name.to_string()),
            None => soundness.missing_kfuncs.push(names[0].to_string()),
        }
    }
    soundness
}

#[cfg(test)]
mod tests {
    use super::*;

    // Kinds and layout: Documentation/bpf/btf.rst, "BTF Type and String Encoding".
    const KIND_STRUCT: u32 = 4;
    const KIND_FUNC: u32 = 12;
    const KIND_FUNC_PROTO: u32 = 13;
    const KIND_DECL_TAG: u32 = 17;

    /// Writes a small BTF of a kernel: sched_ext_ops and functions with or without the kfunc tag.
    #[derive(Default)]
    struct Writer {
        types: Vec<u8>,
        strings: Vec<u8>,
        count: u32,
    }

    impl Writer {
        fn add(&mut self, name: &str, kind: u32, size_or_type: u32, tail: &[u8]) -> u32 {
            let offset = if name.is_empty() {
                0
            } else {
                self.strings.len() as u32 + 1
            };
            if !name.is_empty() {
                self.strings.extend_from_slice(name.as_bytes());
                self.strings.push(0);
            }
            for word in [offset, kind << 24, size_or_type] {
                self.types.extend_from_slice(&word.to_le_bytes());
            }
            self.types.extend_from_slice(tail);
            self.count += 1;
            self.count
        }

        fn finish(self) -> Vec<u8> {
            const HEADER_BYTES: u32 = 24;
            let strings_length = self.strings.len() as u32 + 1;
            let types_length = self.types.len() as u32;
            let mut bytes = vec![0x9f, 0xeb, 1, 0];
            for word in [HEADER_BYTES, 0, types_length, types_length, strings_length] {
                bytes.extend_from_slice(&word.to_le_bytes());
            }
            bytes.extend_from_slice(&self.types);
            bytes.push(0);
            bytes.extend_from_slice(&self.strings);
            bytes
        }
    }

    /// A kernel with the newest name of each function; `is_tagged` says which carry the tag.
    fn kernel_btf(ops: &str, is_tagged: impl Fn(&str) -> bool) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.add(ops, KIND_STRUCT, 8, &[]);
        let proto = writer.add("", KIND_FUNC_PROTO, 0, &[]);
        for names in NEEDED_KFUNCS {
            let function = writer.add(names[0], KIND_FUNC, proto, &[]);
            if is_tagged(names[0]) {
                writer.add(KFUNC_TAG, KIND_DECL_TAG, function, &(-1i32).to_le_bytes());
            }
        }
        writer.finish()
    }

    fn check_bytes(bytes: &[u8]) -> Soundness {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("btf");
        std::fs::write(&path, bytes).unwrap();
        check(&path).unwrap()
    }

    #[test]
    fn a_kernel_whose_kfuncs_are_tagged_is_sound() {
        let soundness = check_bytes(&kernel_btf("sched_ext_ops", |_| true));
        assert!(soundness.is_sound(), "{soundness}");
        assert_eq!(soundness.to_string(), "sound");
    }

    #[test]
    fn the_same_kernel_without_some_tags_is_unsound_and_they_are_named() {
        let untagged = ["scx_bpf_kick_cpu", "scx_bpf_task_set_slice"];
        let soundness = check_bytes(&kernel_btf("sched_ext_ops", |name| {
            !untagged.contains(&name)
        }));
        assert!(!soundness.is_sound());
        assert!(soundness.missing_kfuncs.is_empty());
        assert_eq!(
            soundness.untagged_kfuncs,
            ["scx_bpf_task_set_slice", "scx_bpf_kick_cpu"]
        );
        assert!(
            soundness
                .to_string()
                .contains("2 sched_ext functions carry no kfunc tag"),
            "{soundness}"
        );
    }

    #[test]
    fn a_kernel_without_sched_ext_says_so() {
        let soundness = check_bytes(&kernel_btf("other_ops", |_| true));
        assert!(!soundness.is_sound());
        assert!(
            soundness.to_string().contains("no sched_ext"),
            "{soundness}"
        );
    }

    #[test]
    fn an_older_name_will_do_and_a_missing_function_is_named() {
        let soundness = judge(true, |name| match name {
            "scx_bpf_dsq_insert___v2" | "scx_bpf_dsq_move" => None,
            _ => Some(true),
        });
        assert_eq!(soundness.missing_kfuncs, ["scx_bpf_dsq_move"]);
        assert!(soundness.untagged_kfuncs.is_empty());
    }

    #[test]
    fn a_file_without_btf_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("nothing");
        std::fs::write(&path, "no BTF").unwrap();
        assert!(check(&path).is_err());
    }
}
