// SPDX-License-Identifier: GPL-2.0-only
//! Whether a kernel's type information (BTF) is good enough to load a sched_ext scheduler. Reading it is libbpf's work.
//!
//! A kernel function that BPF may call carries the declaration tag `bpf_kfunc` in BTF. Some Debian builds lack it on
//! some functions of sched_ext. The build step that hides a kfunc's implicit last argument goes by that tag, so such a
//! function keeps a prototype that no scheduler declares, and libbpf refuses the whole scheduler with "func_proto
//! incompatible with vmlinux". A kernel none of whose functions carries the tag comes from a build without that step, as
//! those before 7.0 may be: there it says nothing. Seen: 7.2.11 and 7.2.12 of trixie-backports unsound; 7.2.12 of forky, 7.2.13 of sid and
//! 7.3.4 of trixie-backports sound.

use std::collections::{HashMap, HashSet};
use std::ffi::CStr;
use std::path::Path;

use anyhow::{Context, Result};
use libbpf_rs::AsRawLibbpf as _;
use libbpf_rs::btf::Btf;
use libbpf_rs::libbpf_sys;
use serde::{Deserialize, Serialize};

/// Where a running kernel shows its BTF.
pub const RUNNING_KERNEL: &str = "/sys/kernel/btf/vmlinux";

const KFUNC_TAG: &CStr = c"bpf_kfunc";
const OPS: &CStr = c"sched_ext_ops";

/// The kernel functions that the scheduler cannot do without. In each row, the first that the kernel has is the one that
/// scx's compat.bpf.h calls; the others are its names on older kernels, down to Linux 6.12.
const NEEDED_KFUNCS: &[&[&str]] = &[
    &["scx_bpf_create_dsq"],
    &[
        "scx_bpf_dsq_insert___v2",
        "scx_bpf_dsq_insert",
        "scx_bpf_dispatch",
    ],
    &[
        "__scx_bpf_dsq_insert_vtime",
        "scx_bpf_dsq_insert_vtime",
        "scx_bpf_dispatch_vtime",
    ],
    &["scx_bpf_dsq_move", "scx_bpf_dispatch_from_dsq"],
    &["scx_bpf_dsq_move_vtime", "scx_bpf_dispatch_vtime_from_dsq"],
    &[
        "scx_bpf_dsq_move_set_slice",
        "scx_bpf_dispatch_from_dsq_set_slice",
    ],
    &[
        "scx_bpf_dsq_move_set_vtime",
        "scx_bpf_dispatch_from_dsq_set_vtime",
    ],
    &["bpf_iter_scx_dsq_new"],
    &["bpf_iter_scx_dsq_next"],
    &["bpf_iter_scx_dsq_destroy"],
    &["scx_bpf_task_cpu"],
    &[
        "__scx_bpf_select_cpu_and",
        "scx_bpf_select_cpu_and",
        "scx_bpf_select_cpu_dfl",
    ],
    &["scx_bpf_pick_idle_cpu"],
    &["scx_bpf_kick_cpu"],
    &["scx_bpf_get_online_cpumask"],
    &["scx_bpf_put_cpumask"],
    &["scx_bpf_error_bstr"],
    &["scx_bpf_exit_bstr"],
];

/// Those that it calls where the kernel has them.
const OTHER_KFUNCS: &[&str] = &["scx_bpf_task_set_slice"];

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
/// If the file cannot be read, or libbpf finds no BTF in it. An unsound kernel is a result, not an error.
pub fn check(path: impl AsRef<Path>) -> Result<Soundness> {
    let btf = Btf::from_path(path).context("it holds no BTF that libbpf knows")?;
    let needed: HashSet<&[u8]> = NEEDED_KFUNCS
        .iter()
        .flat_map(|names| names.iter())
        .chain(OTHER_KFUNCS)
        .map(|name| name.as_bytes())
        .collect();
    let mut has_sched_ext = false;
    let mut kfuncs: HashSet<u32> = HashSet::new();
    let mut functions: HashMap<&[u8], Vec<u32>> = HashMap::new();
    for found in types(&btf) {
        match found.kind {
            libbpf_sys::BTF_KIND_STRUCT => has_sched_ext |= found.name == OPS,
            libbpf_sys::BTF_KIND_FUNC if needed.contains(found.name.to_bytes()) => {
                let ids = functions.entry(found.name.to_bytes()).or_default();
                ids.push(found.id);
            }
            libbpf_sys::BTF_KIND_DECL_TAG if found.name == KFUNC_TAG => {
                kfuncs.extend(found.tagged_whole);
            }
            _ => {}
        }
    }
    Ok(judge(has_sched_ext, |name| {
        // A name may be there twice (two static functions); the tagged one is the kfunc.
        let ids = functions.get(name.as_bytes())?;
        Some(kfuncs.is_empty() || ids.iter().any(|id| kfuncs.contains(id)))
    }))
}

/// What is needed of a type in BTF.
struct Type<'btf> {
    id: u32,
    kind: u32,
    name: &'btf CStr,
    /// Of a declaration tag: the type that it marks as a whole, and not an argument or a field of it.
    tagged_whole: Option<u32>,
}

/// All types. A kernel has 150,000, and libbpf-rs would make an object of each.
fn types<'btf>(btf: &'btf Btf<'_>) -> impl Iterator<Item = Type<'btf>> {
    let raw = btf.as_libbpf_object().as_ptr();
    // The type 0 is `void`, which has neither name nor tag.
    (1..btf.len() as u32).map(move |id| {
        // SAFETY: `btf` lives as long as what is made of it, and libbpf has checked when it read it that each of its types is
        // whole, a tag's own part included, and that each name lies among its strings, which end with zeros.
        unsafe {
            let head = libbpf_sys::btf__type_by_id(raw, id);
            let kind = (*head).info >> 24 & 0x1f;
            let tag = head.add(1).cast::<libbpf_sys::btf_decl_tag>();
            let is_whole = kind == libbpf_sys::BTF_KIND_DECL_TAG && (*tag).component_idx == -1;
            Type {
                id,
                kind,
                name: CStr::from_ptr(libbpf_sys::btf__name_by_offset(raw, (*head).name_off)),
                tagged_whole: is_whole.then(|| (*head).__bindgen_anon_1.type_),
            }
        }
    })
}

/// `tagged` tells of a function's name whether it carries the kfunc tag, if that says anything; None if there is no such
/// function.
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
    let others = OTHER_KFUNCS.iter();
    let untagged = others.filter(|name| tagged(name) == Some(false));
    soundness
        .untagged_kfuncs
        .extend(untagged.map(|name| name.to_string()));
    soundness
}

#[cfg(test)]
mod tests {
    use super::*;

    use libbpf_rs::libbpf_sys::{
        BTF_KIND_DECL_TAG, BTF_KIND_FUNC, BTF_KIND_FUNC_PROTO, BTF_KIND_STRUCT,
    };

    /// Writes a small BTF of a kernel: sched_ext_ops and functions with or without the kfunc tag.
    #[derive(Default)]
    struct Writer {
        types: Vec<u8>,
        strings: Vec<u8>,
        count: u32,
    }

    impl Writer {
        fn add(&mut self, name: &str, kind: u32, size_or_type: u32, tail: &[u8]) -> u32 {
            self.add_several(name, kind, 0, size_or_type, tail)
        }

        /// One that has several arguments or fields, which are its tail.
        fn add_several(
            &mut self,
            name: &str,
            kind: u32,
            count: u32,
            size_or_type: u32,
            tail: &[u8],
        ) -> u32 {
            let offset = if name.is_empty() {
                0
            } else {
                self.strings.len() as u32 + 1
            };
            if !name.is_empty() {
                self.strings.extend_from_slice(name.as_bytes());
                self.strings.push(0);
            }
            for word in [offset, kind << 24 | count, size_or_type] {
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
        writer.add(ops, BTF_KIND_STRUCT, 8, &[]);
        let proto = writer.add("", BTF_KIND_FUNC_PROTO, 0, &[]);
        let needed = NEEDED_KFUNCS.iter().map(|names| &names[0]);
        for name in needed.chain(OTHER_KFUNCS) {
            let function = writer.add(name, BTF_KIND_FUNC, proto, &[]);
            if is_tagged(name) {
                writer.add(
                    "bpf_kfunc",
                    BTF_KIND_DECL_TAG,
                    function,
                    &(-1i32).to_le_bytes(),
                );
            }
        }
        writer.finish()
    }

    fn check_bytes(bytes: &[u8]) -> Result<Soundness> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("btf");
        std::fs::write(&path, bytes).unwrap();
        check(&path)
    }

    #[test]
    fn a_kernel_whose_kfuncs_are_tagged_is_sound() {
        let soundness = check_bytes(&kernel_btf("sched_ext_ops", |_| true)).unwrap();
        assert!(soundness.is_sound(), "{soundness}");
        assert_eq!(soundness.to_string(), "sound");
    }

    #[test]
    fn the_same_kernel_without_some_tags_is_unsound_and_they_are_named() {
        let untagged = ["scx_bpf_kick_cpu", "scx_bpf_task_set_slice"];
        let soundness = check_bytes(&kernel_btf("sched_ext_ops", |name| {
            !untagged.contains(&name)
        }))
        .unwrap();
        assert!(!soundness.is_sound());
        assert!(soundness.missing_kfuncs.is_empty());
        assert_eq!(
            soundness.untagged_kfuncs,
            ["scx_bpf_kick_cpu", "scx_bpf_task_set_slice"]
        );
        assert!(
            soundness
                .to_string()
                .contains("2 sched_ext functions carry no kfunc tag"),
            "{soundness}"
        );
    }

    #[test]
    fn tags_say_nothing_where_there_are_none() {
        let soundness = check_bytes(&kernel_btf("sched_ext_ops", |_| false)).unwrap();
        assert!(soundness.is_sound(), "{soundness}");
    }

    #[test]
    fn a_kernel_without_sched_ext_says_so() {
        let soundness = check_bytes(&kernel_btf("other_ops", |_| true)).unwrap();
        assert!(!soundness.is_sound());
        assert!(
            soundness.to_string().contains("no sched_ext"),
            "{soundness}"
        );
    }

    #[test]
    fn an_older_name_will_do_and_a_missing_function_is_named() {
        let soundness = judge(true, |name| match name {
            "scx_bpf_dsq_insert___v2" | "scx_bpf_kick_cpu" | "scx_bpf_task_set_slice" => None,
            _ => Some(true),
        });
        assert_eq!(soundness.missing_kfuncs, ["scx_bpf_kick_cpu"]);
        assert!(soundness.untagged_kfuncs.is_empty());
    }

    #[test]
    fn a_file_without_btf_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("nothing");
        std::fs::write(&path, "no BTF").unwrap();
        assert!(check(&path).is_err());
    }

    /// A tag on an argument, one of another name, and a namesake without a tag decide nothing.
    #[test]
    fn only_a_tag_of_the_whole_function_makes_a_kfunc() {
        let mut writer = Writer::default();
        writer.add("sched_ext_ops", BTF_KIND_STRUCT, 8, &[]);
        // With one argument, which a tag can be on.
        let argument = [0; size_of::<libbpf_sys::btf_param>()];
        let proto = writer.add_several("", BTF_KIND_FUNC_PROTO, 1, 0, &argument);
        for (name, tag, component) in [
            ("scx_bpf_task_set_slice", "bpf_kfunc", -1i32),
            ("scx_bpf_task_set_slice", "other", -1),
            ("scx_bpf_task_cpu", "bpf_kfunc", 0),
            ("scx_bpf_kick_cpu", "other", -1),
        ] {
            let function = writer.add(name, BTF_KIND_FUNC, proto, &[]);
            writer.add(tag, BTF_KIND_DECL_TAG, function, &component.to_ne_bytes());
        }
        let soundness = check_bytes(&writer.finish()).unwrap();
        assert_eq!(
            soundness.untagged_kfuncs,
            ["scx_bpf_task_cpu", "scx_bpf_kick_cpu"]
        );
        assert!(
            !soundness
                .missing_kfuncs
                .contains(&"scx_bpf_kick_cpu".to_string())
        );
    }

    #[test]
    fn btf_that_ends_early_is_an_error() {
        let whole = kernel_btf("sched_ext_ops", |_| true);
        for length in [0, 10, 24, 40, whole.len() - 1] {
            assert!(check_bytes(&whole[..length]).is_err(), "{length} bytes");
        }
    }

    #[test]
    fn a_kind_that_libbpf_does_not_know_is_an_error() {
        let mut writer = Writer::default();
        writer.add("new", 31, 0, &[]);
        assert!(check_bytes(&writer.finish()).is_err());
    }

    #[test]
    fn the_running_kernel_can_be_judged() {
        if Path::new(RUNNING_KERNEL).exists() {
            check(RUNNING_KERNEL).unwrap();
        }
    }
}
