// SPDX-License-Identifier: GPL-2.0-only
//! What is seen of KVM on this host, by which hooks, and in words what is not.

use crate::host::kvm::{HOOKABLE, Kvm};
use clap::ValueEnum;
use serde::Deserialize;

/// Something that hooks in KVM show, and that one can do without.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Sight {
    /// IPIs from one vCPU to a sibling, from send to answer
    Ipis,
    /// Times that a vCPU leaves the guest because it spins
    Spins,
}

/// What is seen.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Seen {
    /// IPIs between vCPUs.
    pub ipis: bool,
    /// Those that guests send by a call to KVM, too.
    pub paravirtual_ipis: bool,
    /// The ends of interrupts are not, as the hardware does them.
    pub ends_hidden: bool,
    /// Spin exits.
    pub spins: bool,
    /// Interrupts for vCPUs, as KVM delivers them.
    pub kicks: bool,
    /// vCPUs that halt.
    pub halts: bool,
    /// A sentence for each thing that is not seen.
    pub blind_spots: Vec<String>,
}

/// Fields of a vCPU's view that are made of spin exits and of the yields that follow them.
const OF_SPINS: [&str; 6] = [
    "spin_exits",
    "spin_pct",
    "yields_offered",
    "yields_served",
    "yields_not_ready",
    "yields_refused",
];
/// Fields that are made of IPIs.
const OF_IPIS: [&str; 4] = ["ipis", "ipi_to_run", "ipi_to_run_us", "longest_ipi_us"];

impl Seen {
    /// The fields of `cohort watch --json` that cannot be had.
    pub fn unseen_fields(&self) -> Vec<String> {
        let mut fields: Vec<&str> = Vec::new();
        if !self.spins {
            fields.extend(OF_SPINS);
        }
        if !self.ipis {
            fields.extend(OF_IPIS);
        }
        fields.into_iter().map(str::to_owned).collect()
    }

    /// What `kvm` shows, but for `blind`, each with why; `hardware` is what ends interrupts without KVM.
    pub fn of(kvm: &Kvm, hardware: Option<&str>, blind: &[(Sight, &str)]) -> Self {
        let [kick, ipi, eoi, pv_ipi, halt, on_spin] = HOOKABLE.map(|hook| kvm.has.contains(hook));
        let mut seen = Self {
            ipis: ipi && eoi,
            spins: on_spin,
            ends_hidden: hardware.is_some(),
            kicks: kick,
            halts: halt,
            ..Self::default()
        };
        let spots = &mut seen.blind_spots;
        let mut look = |shown: &mut bool, sight: Sight, what: &str| {
            let blind = blind.iter().find(|(blind, _)| *blind == sight);
            let why = match (blind, *shown) {
                (Some((_, why)), _) => why,
                (None, false) => "this kernel's KVM lacks a function that shows them",
                (None, true) => return,
            };
            *shown = false;
            spots.push(format!("{what} are not seen: {why}"));
        };
        look(&mut seen.ipis, Sight::Ipis, "IPIs between vCPUs");
        look(&mut seen.spins, Sight::Spins, "spin exits");
        seen.paravirtual_ipis = seen.ipis && pv_ipi;
        if let (Some(hardware), true) = (hardware, seen.ipis) {
            seen.blind_spots.push(format!(
                "{hardware} is on: the ends of interrupts, and IPIs to vCPUs that run, are not seen; an IPI counts as \
                 answered when its receiver runs"
            ));
        }
        seen
    }
}

/// Has the hooks of an open skeleton loaded for what is [`Seen`]; both BPF objects have them by the same names.
macro_rules! load_hooks {
    ($open:expr, $seen:expr) => {{
        $open.progs.ipi_sent.set_autoload($seen.ipis);
        $open.progs.pv_ipi_sent.set_autoload($seen.paravirtual_ipis);
        $open.progs.spin_exit_begins.set_autoload($seen.spins);
        $open.progs.spin_exit_ends.set_autoload($seen.spins);
    }};
}
pub(crate) use load_hooks;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observer::view::VcpuView;

    fn kvm(has: &[&'static str]) -> Kvm {
        Kvm {
            has: has.iter().copied().collect(),
            ..Kvm::default()
        }
    }

    #[test]
    fn a_kvm_with_all_functions_leaves_no_blind_spot() {
        let seen = Seen::of(&kvm(&HOOKABLE), None, &[]);
        assert!(seen.ipis && seen.paravirtual_ipis && seen.spins && !seen.ends_hidden);
        assert!(seen.blind_spots.is_empty() && seen.unseen_fields().is_empty());
    }

    #[test]
    fn what_is_not_shown_or_not_wanted_is_said() {
        let seen = Seen::of(
            &kvm(&["kvm_vcpu_on_spin"]),
            None,
            &[(Sight::Spins, "as asked for")],
        );
        assert!(!seen.ipis && !seen.paravirtual_ipis && !seen.spins);
        let unseen = seen.unseen_fields();
        assert_eq!(unseen.len(), OF_SPINS.len() + OF_IPIS.len());
        let [ipis, spins] = seen.blind_spots.as_slice() else {
            panic!("two blind spots, not {:?}", seen.blind_spots)
        };
        assert!(ipis.starts_with("IPIs") && ipis.contains("lacks"), "{ipis}");
        assert!(
            spins.starts_with("spin exits") && spins.contains("asked"),
            "{spins}"
        );
    }

    #[test]
    fn fields_that_cannot_be_had_are_fields_of_a_vcpu() {
        let view = serde_json::to_value(VcpuView::default()).expect("it is plain data");
        for field in OF_SPINS.iter().chain(&OF_IPIS) {
            assert!(view.get(field).is_some(), "{field}");
        }
    }

    #[test]
    fn hardware_that_ends_interrupts_is_named() {
        let seen = Seen::of(&kvm(&HOOKABLE), Some("AVIC"), &[]);
        assert!(seen.ipis && seen.ends_hidden);
        assert!(seen.blind_spots[0].starts_with("AVIC is on"));
    }
}
