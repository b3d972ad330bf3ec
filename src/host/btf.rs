// SPDX-License-Identifier: GPL-2.0-only
//! Whether a kernel's type information (BTF) is good enough to load a sched_ext scheduler. Not for finding types: that
//! is libbpf's work. Kinds that are unknown here are unknown to libbpf, too, which would refuse to load anything.
//!
//! A kernel function that BPF may call carries the declaration tag `bpf_kfunc` in BTF. Some Debian builds lack it on
//! some functions of sched_ext. The build step that hides a kfunc's implicit last argument goes by that tag, so such a
//! function keeps a prototype that no scheduler declares, and libbpf refuses the whole scheduler with "func_proto
//! incompatible with vmlinux". A kernel none of whose functions carries the tag comes from a build without that step, as
//! those before 7.0 may be: there it says nothing. Seen: 7.2.11 and 7.2.12 of trixie-backports unsound; 7.2.12 of forky, 7.2.13 of sid and
//! 7.3.4 of trixie-backports sound.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::Path;

use libbpf_rs::AsRawLibbpf as _;
use libbpf_rs::btf::Btf;
use libbpf_rs::libbpf_sys;
use serde::{Deserialize, Serialize};

/// Where a running kernel shows its BTF.
pub const RUNNING_KERNEL: &str = "/sys/kernel/btf/vmlinux";

const KFUNC_TAG: &str = "bpf_kfunc";
/// What raw BTF begins with, in the machine's byte order.
const MAGIC: u16 = 0xeb9f;
const OPS: &str = "sched_ext_ops";

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
const OTHER_KFUNCS: &[&str] = &["scx_bpf_task_set_slice", "scx_bpf_now"];

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

/// Why a kernel's BTF cannot be judged.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be read.
    #[error("it cannot be read: {0}")]
    Unreadable(#[from] io::Error),
    /// The file is neither BTF nor an ELF file that holds some.
    #[error("it holds no BTF: {0}")]
    NoBtf(#[from] libbpf_rs::Error),
    /// The BTF ends early, or points to what is not in it.
    #[error("it is cut off or damaged")]
    Damaged,
    /// The kernel is newer than this program, and than the libbpf in it.
    #[error("it has types of kind {0}, which this version of Cohort does not know")]
    UnknownKind(u32),
}

/// Checks the BTF in `path`: a raw BTF file such as [`RUNNING_KERNEL`], or an ELF file with a section `.BTF`.
///
/// # Errors
///
/// If the file cannot be read or holds no BTF. An unsound kernel is a result, not an error.
pub fn check(path: impl AsRef<Path>) -> Result<Soundness, Error> {
    let path = path.as_ref();
    let mut magic = [0; 2];
    File::open(path)?.read_exact(&mut magic)?;
    if magic == MAGIC.to_ne_bytes() {
        return check_raw(&fs::read(path)?);
    }
    let btf = Btf::from_path(path)?;
    let mut length = 0;
    // SAFETY: `btf` is alive, and libbpf writes one u32.
    let data = unsafe { libbpf_sys::btf__raw_data(btf.as_libbpf_object().as_ptr(), &mut length) };
    if data.is_null() {
        return Err(io::Error::last_os_error().into());
    }
    // SAFETY: libbpf says how long the data are, and keeps them as long as `btf`.
    check_raw(unsafe { std::slice::from_raw_parts(data.cast(), length as usize) })
}

/// One pass over the bare data: a kernel has 150,000 types, and libbpf-rs makes an object and a name of each.
fn check_raw(btf: &[u8]) -> Result<Soundness, Error> {
    let needed: HashSet<&[u8]> = NEEDED_KFUNCS
        .iter()
        .flat_map(|names| names.iter())
        .chain(OTHER_KFUNCS)
        .map(|name| name.as_bytes())
        .collect();
    let mut has_sched_ext = false;
    let mut kfuncs: HashSet<u32> = HashSet::new();
    let mut functions: HashMap<&[u8], Vec<u32>> = HashMap::new();
    let mut types = Types::new(btf).ok_or(Error::Damaged)?;
    while let Some(found) = types.next()? {
        match found.kind {
            libbpf_sys::BTF_KIND_STRUCT => has_sched_ext |= found.name == OPS.as_bytes(),
            libbpf_sys::BTF_KIND_FUNC if needed.contains(found.name) => {
                functions.entry(found.name).or_default().push(found.id);
            }
            libbpf_sys::BTF_KIND_DECL_TAG
                if found.marks_whole() && found.name == KFUNC_TAG.as_bytes() =>
            {
                kfuncs.insert(found.size_or_type);
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

/// The types of raw BTF in their order. Layout: Documentation/bpf/btf.rst, "BTF Type and String Encoding".
struct Types<'btf> {
    /// What is left.
    types: &'btf [u8],
    strings: &'btf [u8],
    /// The number of types seen so far, which is the last one's id.
    seen: u32,
}

/// A type as it is in BTF.
struct Type<'btf> {
    id: u32,
    kind: u32,
    name: &'btf [u8],
    size_or_type: u32,
    /// What follows it, as its kind has it.
    tail: &'btf [u8],
}

impl Type<'_> {
    /// Of a declaration tag: it is for a whole function, and not for one of its arguments.
    fn marks_whole(&self) -> bool {
        self.tail == (-1i32).to_ne_bytes()
    }
}

impl<'btf> Types<'btf> {
    /// `None` if the header is damaged.
    fn new(btf: &'btf [u8]) -> Option<Self> {
        let header = size_of::<libbpf_sys::btf_header>();
        let [
            length,
            type_offset,
            type_length,
            string_offset,
            string_length,
        ] = words(btf.get(4..header)?);
        if length < header as u32 {
            return None;
        }
        let sections = btf.get(length as usize..)?;
        Some(Self {
            types: part(sections, type_offset, type_length)?,
            strings: part(sections, string_offset, string_length)?,
            seen: 0,
        })
    }

    fn next(&mut self) -> Result<Option<Type<'btf>>, Error> {
        if self.types.is_empty() {
            return Ok(None);
        }
        let (head, rest) = self
            .types
            .split_at_checked(size_of::<libbpf_sys::btf_type>())
            .ok_or(Error::Damaged)?;
        let [name, info, size_or_type] = words(head);
        let kind = info >> 24 & 0x1f;
        let length = tail_length(kind, info as usize & 0xffff).ok_or(Error::UnknownKind(kind))?;
        let (tail, rest) = rest.split_at_checked(length).ok_or(Error::Damaged)?;
        self.types = rest;
        self.seen += 1;
        Ok(Some(Type {
            id: self.seen,
            kind,
            name: self.string(name).ok_or(Error::Damaged)?,
            size_or_type,
            tail,
        }))
    }

    fn string(&self, offset: u32) -> Option<&'btf [u8]> {
        let from = self.strings.get(offset as usize..)?;
        from.split(|byte| *byte == 0).next()
    }
}

/// Bytes after a type of this kind; `entries` says of what has several how many it has.
fn tail_length(kind: u32, entries: usize) -> Option<usize> {
    use libbpf_sys::*;
    Some(match kind {
        BTF_KIND_PTR | BTF_KIND_FWD | BTF_KIND_TYPEDEF | BTF_KIND_VOLATILE | BTF_KIND_CONST
        | BTF_KIND_RESTRICT | BTF_KIND_FUNC | BTF_KIND_FLOAT | BTF_KIND_TYPE_TAG => 0,
        BTF_KIND_INT => size_of::<u32>(),
        BTF_KIND_ARRAY => size_of::<btf_array>(),
        BTF_KIND_STRUCT | BTF_KIND_UNION => entries * size_of::<btf_member>(),
        BTF_KIND_ENUM => entries * size_of::<btf_enum>(),
        BTF_KIND_ENUM64 => entries * size_of::<btf_enum64>(),
        BTF_KIND_FUNC_PROTO => entries * size_of::<btf_param>(),
        BTF_KIND_VAR => size_of::<btf_var>(),
        BTF_KIND_DATASEC => entries * size_of::<btf_var_secinfo>(),
        BTF_KIND_DECL_TAG => size_of::<btf_decl_tag>(),
        _ => return None,
    })
}

/// The first N words of `bytes`, which are long enough.
fn words<const N: usize>(bytes: &[u8]) -> [u32; N] {
    std::array::from_fn(|i| {
        let word = [
            bytes[4 * i],
            bytes[4 * i + 1],
            bytes[4 * i + 2],
            bytes[4 * i + 3],
        ];
        u32::from_ne_bytes(word)
    })
}

fn part(bytes: &[u8], offset: u32, length: u32) -> Option<&[u8]> {
    bytes.get(offset as usize..)?.get(..length as usize)
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
        writer.add(ops, BTF_KIND_STRUCT, 8, &[]);
        let proto = writer.add("", BTF_KIND_FUNC_PROTO, 0, &[]);
        let needed = NEEDED_KFUNCS.iter().map(|names| &names[0]);
        for name in needed.chain(OTHER_KFUNCS) {
            let function = writer.add(name, BTF_KIND_FUNC, proto, &[]);
            if is_tagged(name) {
                writer.add(
                    KFUNC_TAG,
                    BTF_KIND_DECL_TAG,
                    function,
                    &(-1i32).to_le_bytes(),
                );
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
        let soundness = check_bytes(&kernel_btf("sched_ext_ops", |_| false));
        assert!(soundness.is_sound(), "{soundness}");
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
            "scx_bpf_dsq_insert___v2" | "scx_bpf_kick_cpu" | "scx_bpf_now" => None,
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
        for (name, tag, component) in [
            ("scx_bpf_now", KFUNC_TAG, -1i32),
            ("scx_bpf_now", "other", -1),
            ("scx_bpf_task_cpu", KFUNC_TAG, 0),
            ("scx_bpf_kick_cpu", "other", -1),
        ] {
            let function = writer.add(name, BTF_KIND_FUNC, 0, &[]);
            writer.add(tag, BTF_KIND_DECL_TAG, function, &component.to_ne_bytes());
        }
        let soundness = check_raw(&writer.finish()).unwrap();
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
    fn btf_that_ends_anywhere_is_an_error() {
        let whole = kernel_btf("sched_ext_ops", |_| true);
        for length in 0..whole.len() {
            assert!(check_raw(&whole[..length]).is_err(), "{length} bytes");
        }
    }

    #[test]
    fn a_kind_that_nobody_knows_is_an_error() {
        let mut writer = Writer::default();
        writer.add("new", 31, 0, &[]);
        let error = check_raw(&writer.finish()).unwrap_err();
        assert!(error.to_string().contains("kind 31"), "{error}");
    }

    /// libbpf's view of a real kernel, where there is one, and this one's.
    #[test]
    fn the_running_kernel_has_as_many_types_as_libbpf_finds() {
        let (Ok(raw), Ok(btf)) = (fs::read(RUNNING_KERNEL), Btf::from_path(RUNNING_KERNEL)) else {
            return;
        };
        let mut types = Types::new(&raw).unwrap();
        while types.next().unwrap().is_some() {}
        assert_eq!(types.seen as usize + 1, btf.len());
    }
}
