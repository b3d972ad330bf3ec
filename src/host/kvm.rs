// SPDX-License-Identifier: GPL-2.0-only
//! Where KVM keeps the mark by which its vCPU threads are known, and what else of
//! it can be seen.
//!
//! KVM hangs a preempt notifier with the operations `kvm_preempt_ops` on each
//! thread that is inside KVM_RUN. The BPF side compares pointers, so it must be
//! told the address. KVM is a module on most hosts: it may come after Cohort, and
//! go and come again elsewhere in memory. Its functions can be hooked where the
//! compiler has kept them.

use crate::host::paths::Host;
use crate::host::symbols::Symbols;
use anyhow::{Context, Result};
use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

/// What KVM marks its vCPU threads with.
pub const PREEMPT_OPS: &str = "kvm_preempt_ops";
const EXT_SCHED_CLASS: &str = "ext_sched_class";

/// Functions and tracepoints of KVM that tell what its vCPUs do.
pub const HOOKABLE: [&str; 6] = [
    "__kvm_vcpu_kick",
    "__tracepoint_kvm_apic_ipi",
    "__tracepoint_kvm_eoi",
    "kvm_pv_send_ipi",
    "kvm_vcpu_halt",
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
    symbols: Symbols,
    /// Tells one loading of the module from the next; sysfs gives each a new
    /// folder. `None` while there is no KVM.
    loading: Option<u64>,
}

impl KvmWatch {
    /// Begins to watch; the first call of [`KvmWatch::moved`] says where it is.
    pub fn new(host: &Host) -> Self {
        Self {
            module: host.sys.join("module/kvm"),
            symbols: host.symbols.clone(),
            loading: None,
        }
    }

    /// What KVM is, if that has changed since the last call; `Some(None)` if it has gone.
    ///
    /// Cheap while nothing changes: the kernel is asked only after the module came.
    pub fn moved(&mut self) -> Result<Option<Option<Kvm>>> {
        let loading = fs::metadata(&self.module).ok().map(|folder| folder.ino());
        if loading == self.loading {
            return Ok(None);
        }
        if loading.is_some() && !self.is_live() {
            return Ok(None);
        }
        let kvm = match loading {
            Some(_) => Some(find(&self.symbols)?),
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

fn find(symbols: &Symbols) -> Result<Kvm> {
    let found = symbols.find(&[&[PREEMPT_OPS, EXT_SCHED_CLASS], &HOOKABLE[..]].concat());
    let found = found.context("without the place of KVM's symbols no vCPU can be recognised")?;
    let preempt_ops = found.get(PREEMPT_OPS).with_context(|| {
        format!(
            "KVM is loaded, but this kernel does not name {PREEMPT_OPS}, without which no vCPU can be recognised; boot a \
             kernel built with CONFIG_KALLSYMS_ALL=y"
        )
    })?;
    Ok(Kvm {
        preempt_ops: *preempt_ops,
        ext_sched_class: found.get(EXT_SCHED_CLASS).copied().unwrap_or_default(),
        has: HOOKABLE
            .into_iter()
            .filter(|hook| found.contains_key(hook))
            .collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::paths::fixture::Fixture;
    use crate::host::symbols::HIDDEN;

    fn with_kvm() -> Fixture {
        let fixture = Fixture::new().with_symbol("ext_sched_class", 0x1000);
        let fixture = fixture.with_symbol("kvm_preempt_ops", 0x1230);
        fixture.with_symbol("kvm_vcpu_on_spin", 0x2000)
    }

    fn watch(fixture: &Fixture) -> KvmWatch {
        KvmWatch::new(&fixture.host())
    }

    #[test]
    fn the_address_is_told_once() {
        let fixture = with_kvm().with("sys/module/kvm/refcnt", "0");
        let mut watch = watch(&fixture);
        let kvm = watch.moved().expect("readable").flatten().expect("loaded");
        assert_eq!(kvm.preempt_ops, 0x1230);
        assert_eq!(kvm.ext_sched_class, 0x1000);
        assert_eq!(kvm.has, HashSet::from(["kvm_vcpu_on_spin"]));
        assert_eq!(watch.moved().expect("readable"), None);
    }

    #[test]
    fn kvm_may_come_later_and_go() {
        let fixture = with_kvm();
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
        let fixture = with_kvm().with("sys/module/kvm/initstate", "coming\n");
        let mut watch = watch(&fixture);
        assert_eq!(watch.moved().expect("readable"), None);
        let _fixture = fixture.with("sys/module/kvm/initstate", "live\n");
        assert!(watch.moved().expect("readable").is_some());
    }

    #[test]
    fn a_kernel_that_does_not_name_the_symbol_is_an_error() {
        let fixture = Fixture::new().with("sys/module/kvm/refcnt", "0");
        let error = watch(&fixture).moved().expect_err("no such symbol");
        assert!(error.to_string().contains("CONFIG_KALLSYMS_ALL=y"));
    }

    #[test]
    fn a_hidden_address_is_an_error() {
        let fixture = with_kvm().with_symbol("kvm_preempt_ops", HIDDEN);
        let fixture = fixture.with("sys/module/kvm/refcnt", "0");
        let error = watch(&fixture)
            .moved()
            .expect_err("nothing to compare with");
        assert!(format!("{error:#}").contains("CAP_SYSLOG"));
    }
}
