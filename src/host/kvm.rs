// SPDX-License-Identifier: GPL-2.0-only
//! Where KVM keeps the mark by which its vCPU threads are known, and what else of
//! it can be seen.
//!
//! KVM hangs a preempt notifier with the operations `kvm_preempt_ops` on each
//! thread that is inside KVM_RUN. The BPF side compares pointers, so it must be
//! told the address. KVM is a module on most hosts: it may come after Cohort, and
//! go and come again elsewhere in memory. Its functions can be hooked where the
//! compiler has kept them.

use anyhow::{Context, Result, bail};
use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

const SYMBOL: &str = "kvm_preempt_ops";
const EXT_SCHED_CLASS: &str = "ext_sched_class";

/// Functions and tracepoints of KVM that tell what its vCPUs do.
pub const HOOKABLE: [&str; 5] = [
    "__kvm_vcpu_kick",
    "__tracepoint_kvm_apic_ipi",
    "__tracepoint_kvm_eoi",
    "kvm_pv_send_ipi",
    "kvm_vcpu_on_spin",
];

/// What is known of a KVM.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Kvm {
    /// Address of `kvm_preempt_ops`.
    pub preempt_ops: u64,
    /// Address of the scheduling class of tasks that a sched_ext scheduler has, in the kernel beside it; 0 without sched_ext.
    pub ext_sched_class: u64,
    /// Those of [`HOOKABLE`] that it has.
    pub has: HashSet<&'static str>,
}

/// Follows where `kvm_preempt_ops` is while KVM comes and goes.
#[derive(Debug)]
pub struct KvmWatch {
    module: PathBuf,
    kallsyms: PathBuf,
    /// Tells one loading of the module from the next; sysfs gives each a new
    /// folder. `None` while there is no KVM.
    loading: Option<u64>,
}

impl KvmWatch {
    /// Begins to watch; the first call of [`KvmWatch::moved`] says where it is.
    pub fn new(proc: &Path, sys: &Path) -> Self {
        Self {
            module: sys.join("module/kvm"),
            kallsyms: proc.join("kallsyms"),
            loading: None,
        }
    }

    /// What KVM is, if that has changed since the last call; `Some(None)` if it has gone.
    ///
    /// Cheap while nothing changes: the long list of symbols is read only after
    /// the module came.
    pub fn moved(&mut self) -> Result<Option<Option<Kvm>>> {
        let loading = fs::metadata(&self.module).ok().map(|folder| folder.ino());
        if loading == self.loading {
            return Ok(None);
        }
        if loading.is_some() && !self.is_live() {
            return Ok(None);
        }
        let kvm = match loading {
            Some(_) => Some(find(&self.kallsyms)?),
            None => None,
        };
        self.loading = loading;
        Ok(Some(kvm))
    }

    /// A module's folder is there before its symbols are, and after. KVM that
    /// is built into the kernel has a folder without a state.
    fn is_live(&self) -> bool {
        match fs::read_to_string(self.module.join("initstate")) {
            Ok(state) => state.trim_end() == "live",
            Err(_) => self.module.exists(),
        }
    }
}

/// Lines look like `ffffffffc0a01234 b kvm_preempt_ops\t[kvm]`.
fn find(kallsyms: &Path) -> Result<Kvm> {
    let unreadable = || {
        format!(
            "the kernel's symbols in {} cannot be read",
            kallsyms.display()
        )
    };
    let symbols = File::open(kallsyms).with_context(unreadable)?;
    let mut symbols = BufReader::with_capacity(1 << 16, symbols);
    // Bytes and one buffer: there are some 200,000 lines, and modules come last.
    let mut line = Vec::new();
    let mut kvm = Kvm::default();
    let mut is_named = false;
    while symbols
        .read_until(b'\n', &mut line)
        .with_context(unreadable)?
        > 0
    {
        let mut words = line.split(u8::is_ascii_whitespace);
        let (address, name) = (words.next(), words.nth(1).unwrap_or_default());
        let address = || {
            address
                .and_then(|hex| std::str::from_utf8(hex).ok())
                .and_then(|hex| u64::from_str_radix(hex, 16).ok())
                .unwrap_or_default()
        };
        if name == SYMBOL.as_bytes() {
            is_named = true;
            kvm.preempt_ops = address();
        } else if name == EXT_SCHED_CLASS.as_bytes() {
            kvm.ext_sched_class = address();
        } else {
            kvm.has
                .extend(HOOKABLE.iter().filter(|hook| hook.as_bytes() == name));
        }
        line.clear();
    }
    if kvm.preempt_ops != 0 {
        return Ok(kvm);
    }
    if is_named {
        bail!(
            "{} hides the address of {SYMBOL}, without which no vCPU can be recognised; run \
             Cohort with CAP_SYSLOG, or set the sysctl kernel.kptr_restrict below 2",
            kallsyms.display()
        );
    }
    bail!(
        "KVM is loaded, but {} does not name {SYMBOL}, without which no vCPU can be recognised; \
         boot a kernel built with CONFIG_KALLSYMS_ALL=y",
        kallsyms.display()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::paths::fixture::Fixture;

    const WITH_KVM: &str = "ffffffff81000000 T _stext\n\
                            ffffffff829c12c0 D ext_sched_class\n\
                            ffffffffc0a00000 t kvm_preempt_ops_not\t[kvm]\n\
                            ffffffffc0a01230 b kvm_preempt_ops\t[kvm]\n\
                            ffffffffc0a02000 t kvm_vcpu_on_spin\t[kvm]\n\
                            ffffffffc0a03000 t kvm_vcpu_on_spinner\t[kvm]\n";

    fn watch(fixture: &Fixture) -> KvmWatch {
        let host = fixture.host();
        KvmWatch::new(&host.proc, &host.sys)
    }

    #[test]
    fn the_address_is_told_once() {
        let fixture = Fixture::new()
            .with("proc/kallsyms", WITH_KVM)
            .with("sys/module/kvm/refcnt", "0");
        let mut watch = watch(&fixture);
        let kvm = watch.moved().expect("readable").flatten().expect("loaded");
        assert_eq!(kvm.preempt_ops, 0xffff_ffff_c0a0_1230);
        assert_eq!(kvm.ext_sched_class, 0xffff_ffff_829c_12c0);
        assert_eq!(kvm.has, HashSet::from(["kvm_vcpu_on_spin"]));
        assert_eq!(watch.moved().expect("readable"), None);
    }

    #[test]
    fn kvm_may_come_later_and_go() {
        let fixture = Fixture::new().with("proc/kallsyms", WITH_KVM);
        let mut watch = watch(&fixture);
        assert_eq!(watch.moved().expect("readable"), None);

        let fixture = fixture.with("sys/module/kvm/refcnt", "0");
        assert!(watch.moved().expect("readable").is_some());

        let module = fixture.host().sys.join("module/kvm");
        fs::remove_dir_all(module).expect("the fixture is writable");
        assert_eq!(watch.moved().expect("readable"), Some(None));
    }

    #[test]
    fn a_module_that_is_still_loading_is_looked_at_again() {
        let fixture = Fixture::new()
            .with("proc/kallsyms", WITH_KVM)
            .with("sys/module/kvm/initstate", "coming\n");
        let mut watch = watch(&fixture);
        assert_eq!(watch.moved().expect("readable"), None);
        let _fixture = fixture.with("sys/module/kvm/initstate", "live\n");
        assert!(watch.moved().expect("readable").is_some());
    }

    #[test]
    fn a_kernel_that_does_not_name_the_symbol_is_an_error() {
        let fixture = Fixture::new()
            .with("proc/kallsyms", "ffffffff81000000 T _stext\n")
            .with("sys/module/kvm/refcnt", "0");
        let error = watch(&fixture).moved().expect_err("no such symbol");
        assert!(error.to_string().contains("CONFIG_KALLSYMS_ALL=y"));
    }

    #[test]
    fn a_hidden_address_is_an_error() {
        let hidden = WITH_KVM.replace("ffffffffc0a01230", "0000000000000000");
        let fixture = Fixture::new()
            .with("proc/kallsyms", hidden)
            .with("sys/module/kvm/refcnt", "0");
        let error = watch(&fixture)
            .moved()
            .expect_err("nothing to compare with");
        assert!(error.to_string().contains("CAP_SYSLOG"));
    }
}
