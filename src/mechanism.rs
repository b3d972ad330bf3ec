// SPDX-License-Identifier: GPL-2.0-only
//! What Cohort does for waiting vCPUs can be switched off, each mechanism by itself: to see what it is worth on a host,
//! or to do without one that harms. Their names are the same on the command line and in the TOML file.

use clap::ValueEnum;
use serde::Deserialize;

use crate::bpf::intf;

/// One mechanism.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Mechanism {
    /// Turns begin at the same time on all CPUs, so that a VM's vCPUs run side by side
    Turns,
    /// Directed yields are honoured; without, KVM's offers come to nothing
    Yield,
    /// A vCPU that spins for the answer to its IPI gives way to who must answer
    Ipi,
    /// KVM's candidate gives way to a sibling with an interrupt pending, or preempted in guest kernel mode
    Rank,
    /// A sibling is found where KVM finds none
    Relaxed,
    /// How long an IPI is waited for follows the VM's own answers; without, 50 ms
    AdaptiveWindow,
    /// The turn of a vCPU that sleeps goes to the sibling that it woke
    Heir,
}

impl Mechanism {
    fn bit(self) -> u32 {
        let number = match self {
            Self::Turns => intf::mechanism_MECH_TURNS,
            Self::Yield => intf::mechanism_MECH_YIELD,
            Self::Ipi => intf::mechanism_MECH_IPI,
            Self::Rank => intf::mechanism_MECH_RANK,
            Self::Relaxed => intf::mechanism_MECH_RELAXED,
            Self::AdaptiveWindow => intf::mechanism_MECH_ADAPTIVE_WINDOW,
            Self::Heir => intf::mechanism_MECH_HEIR,
        };
        1 << number
    }
}

/// The mask of mechanisms for the BPF side: all but those in `off`.
pub fn all_but(off: &[Mechanism]) -> u32 {
    let all = Mechanism::value_variants().iter();
    all.filter(|mechanism| !off.contains(mechanism))
        .fold(0, |mask, mechanism| mask | mechanism.bit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mechanism_of_the_bpf_side_has_a_name() {
        assert_eq!(all_but(&[]), (1 << intf::mechanism_NR_MECH) - 1);
        assert_eq!(all_but(Mechanism::value_variants()), 0);
    }

    #[test]
    fn one_that_is_off_leaves_the_others_on() {
        let mask = all_but(&[Mechanism::Ipi]);
        assert_eq!(mask & Mechanism::Ipi.bit(), 0);
        assert_eq!(mask | Mechanism::Ipi.bit(), all_but(&[]));
    }
}
