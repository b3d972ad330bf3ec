// SPDX-License-Identifier: GPL-2.0-only
//! Where the kernel and its modules have what they name: functions and variables.

use crate::bpf::intf::{cohort_limits_SYMBOL_NAME_LEN, symbol};
use crate::bpf::symbols::SymbolsSkelBuilder;
use anyhow::{Context, Result, bail, ensure};
use libbpf_rs::ProgramInput;
use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use std::collections::HashMap;
use std::ffi::c_char;
use std::mem::MaybeUninit;

/// Who tells where they are.
#[derive(Clone, Debug)]
pub enum Symbols {
    /// The kernel that runs.
    Kernel,
    /// A list, in which address [`HIDDEN`] is one that the kernel hides.
    #[cfg(test)]
    Listed(HashMap<&'static str, u64>),
}

#[cfg(test)]
pub(crate) const HIDDEN: u64 = 0;

impl Symbols {
    /// The addresses of those of `names` that there are.
    ///
    /// # Errors
    /// Without privileges, and where the kernel hides addresses.
    pub fn find(&self, names: &[&'static str]) -> Result<HashMap<&'static str, u64>> {
        match self {
            Self::Kernel => ask_kernel(names),
            #[cfg(test)]
            Self::Listed(listed) => {
                let known = |name: &&'static str| Some((*name, *listed.get(name)?));
                let found: HashMap<_, _> = names.iter().filter_map(known).collect();
                ensure_shown(found.values().all(|&address| address != HIDDEN))?;
                Ok(found)
            }
        }
    }
}

fn ensure_shown(shown: bool) -> Result<()> {
    ensure!(
        shown,
        "this kernel hides the addresses of its symbols: run Cohort with CAP_SYSLOG, or set the sysctl \
         kernel.kptr_restrict below 2"
    );
    Ok(())
}

fn ask_kernel(names: &[&'static str]) -> Result<HashMap<&'static str, u64>> {
    let mut object = MaybeUninit::uninit();
    let open = SymbolsSkelBuilder::default().open(&mut object)?;
    let skel = open
        .load()
        .context("the kernel does not accept the program that looks its symbols up")?;
    let mut found = HashMap::new();
    for &name in names {
        let mut asked = symbol {
            name: padded(name)?,
            address: 0,
        };
        let input = ProgramInput {
            context_in: Some(bytemuck::bytes_of_mut(&mut asked)),
            ..ProgramInput::default()
        };
        let answer = skel.progs.look_up.test_run(input);
        let answer = answer.with_context(|| format!("{name} cannot be looked up"))?;
        match answer.return_value as i32 {
            0 => _ = found.insert(name, asked.address),
            libc::ENOENT => (),
            libc::EPERM => ensure_shown(false)?,
            errno => bail!("the kernel does not look {name} up (error {errno})"),
        }
    }
    Ok(found)
}

/// The name with zeros behind it, one at least.
fn padded(name: &str) -> Result<[c_char; cohort_limits_SYMBOL_NAME_LEN as usize]> {
    let mut padded = [0; _];
    ensure!(name.len() < padded.len(), "{name} is too long a name");
    for (place, byte) in padded.iter_mut().zip(name.bytes()) {
        *place = byte as c_char;
    }
    Ok(padded)
}
