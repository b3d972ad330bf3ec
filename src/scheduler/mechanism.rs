// SPDX-License-Identifier: GPL-2.0-only
//! What Cohort does for waiting vCPUs can be switched off and on, each mechanism by itself: to see what it is worth on a
//! host, or to do without one that harms. Their names are the same on the command lines and in the TOML file.

use clap::ValueEnum;
use serde::Deserialize;
use std::str::FromStr;

use crate::bpf::intf;

/// How many there are.
pub const COUNT: usize = intf::mechanism_NR_MECH as usize;

/// One mechanism.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Mechanism {
    /// A VM's vCPUs have their turns together, side by side
    Cohorts,
    /// A sibling that KVM offers runs in the place of a vCPU that spins (a directed yield)
    Yield,
    /// A vCPU that must answer an IPI runs before the one that waits for the answer
    Ipi,
    /// A sibling is found where KVM finds none
    Relaxed,
    /// Turns are shorter than a slice where many wait
    ShortTurns,
    /// Where too few CPUs are left in a turn for the VM that comes next, one behind it that needs fewer comes first
    Packing,
    /// A vCPU that wakes in a VM that has had its share runs at once for a moment, on loan
    Wake,
    /// CPUs whose vCPUs halt on them (HLT does not exit) are given to others meanwhile
    Halted,
    /// KVM does not poll for a vCPU that halts while another task waits
    HaltPoll,
}

impl Mechanism {
    /// Its number on the BPF side, below [`COUNT`].
    pub fn number(self) -> usize {
        let number = match self {
            Self::Cohorts => intf::mechanism_MECH_COHORTS,
            Self::Yield => intf::mechanism_MECH_YIELD,
            Self::Ipi => intf::mechanism_MECH_IPI,
            Self::Relaxed => intf::mechanism_MECH_RELAXED,
            Self::ShortTurns => intf::mechanism_MECH_SHORT_TURNS,
            Self::Packing => intf::mechanism_MECH_PACKING,
            Self::Wake => intf::mechanism_MECH_WAKE,
            Self::Halted => intf::mechanism_MECH_HALTED,
            Self::HaltPoll => intf::mechanism_MECH_HALT_POLL,
        };
        number as usize
    }

    /// Its name for people.
    pub fn name(self) -> String {
        self.value().get_name().to_owned()
    }

    /// What it is for, in one line.
    pub fn help(self) -> String {
        self.value()
            .get_help()
            .map(ToString::to_string)
            .unwrap_or_default()
    }

    fn value(self) -> clap::builder::PossibleValue {
        self.to_possible_value()
            .expect("no mechanism is hidden from the command line")
    }
}

/// Which mechanisms are on: a mask with a bit per number.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Mechanisms(u32);

impl Mechanisms {
    /// All but those in `off`.
    pub fn all_but(off: &[Mechanism]) -> Self {
        let all = Mechanism::value_variants().iter();
        all.fold(Self(0), |mask, &mechanism| {
            let on = !off.contains(&mechanism);
            mask.switched(Switch { mechanism, on })
        })
    }

    /// The same after one was switched.
    pub fn switched(self, switch: Switch) -> Self {
        let bit = 1 << switch.mechanism.number();
        Self(match switch.on {
            true => self.0 | bit,
            false => self.0 & !bit,
        })
    }

    /// Is it on?
    pub fn contains(self, mechanism: Mechanism) -> bool {
        self.0 & (1 << mechanism.number()) != 0
    }

    /// The mask for the BPF side.
    pub fn bits(self) -> u32 {
        self.0
    }
}

/// A mechanism that is to be switched: NAME=on or NAME=off.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Switch {
    /// Which one.
    pub mechanism: Mechanism,
    /// Whether it is to be on.
    pub on: bool,
}

impl Switch {
    /// What is in front of and behind the `=`.
    pub fn parse(name: &str, state: &str) -> Result<Self, String> {
        let mechanism = Mechanism::from_str(name, false).map_err(|_| {
            let all = Mechanism::value_variants().iter();
            let names: Vec<String> = all.map(|mechanism| mechanism.name()).collect();
            format!(
                "there is no mechanism \"{name}\"; there are {}",
                names.join(", ")
            )
        })?;
        let on = match state {
            "on" => true,
            "off" => false,
            _ => return Err(format!("{name} can be on or off, not \"{state}\"")),
        };
        Ok(Self { mechanism, on })
    }

    /// What is behind the `=`.
    pub fn state(self) -> &'static str {
        match self.on {
            true => "on",
            false => "off",
        }
    }
}

impl FromStr for Switch {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, state) = text
            .split_once('=')
            .ok_or("write NAME=on or NAME=off; `cohort set` alone shows the names")?;
        Self::parse(name, state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mechanism_of_the_bpf_side_has_a_name_and_a_line_of_help() {
        assert_eq!(Mechanisms::all_but(&[]).bits(), (1 << COUNT) - 1);
        assert_eq!(Mechanisms::all_but(Mechanism::value_variants()).bits(), 0);
        for mechanism in Mechanism::value_variants() {
            assert!(!mechanism.help().is_empty(), "{mechanism:?}");
        }
    }

    #[test]
    fn every_mechanism_is_named_in_the_sample_configuration_and_has_a_page() {
        let (sample, list) = (
            include_str!("../../deploy/cohort.toml"),
            include_str!("../../docs/mechanisms/README.md"),
        );
        for mechanism in Mechanism::value_variants() {
            let name = mechanism.name();
            let page = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/mechanisms/");
            assert!(sample.contains(&format!(" {name}")), "{name}");
            assert!(list.contains(&format!("[{name}]({name}.md)")), "{name}");
            assert!(
                std::path::Path::new(&format!("{page}{name}.md")).exists(),
                "{name}"
            );
        }
    }

    #[test]
    fn there_is_no_page_for_what_is_no_mechanism() {
        let pages = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/mechanisms");
        for page in std::fs::read_dir(pages).expect("docs/mechanisms is there") {
            let name = page.expect("it can be read").file_name();
            let name = name.to_str().and_then(|name| name.strip_suffix(".md"));
            let name = name.expect("it is a page");
            assert!(
                name == "README" || Mechanism::from_str(name, false).is_ok(),
                "{name}"
            );
        }
    }

    #[test]
    fn one_that_is_switched_leaves_the_others_as_they_are() {
        let switch = |text: &str| text.parse::<Switch>().expect("it is well-formed");
        let without = Mechanisms::all_but(&[Mechanism::Ipi]);
        assert!(!without.contains(Mechanism::Ipi) && without.contains(Mechanism::Relaxed));
        let all = Mechanisms::all_but(&[]);
        assert_eq!(all.switched(switch("ipi=off")), without);
        assert_eq!(without.switched(switch("ipi=off")), without);
        assert_eq!(without.switched(switch("ipi=on")), all);
    }

    #[test]
    fn what_is_no_switch_is_refused_with_what_to_write() {
        let refusal = |text: &str| text.parse::<Switch>().expect_err("it is wrong");
        assert!(refusal("ipi").contains("NAME=on"));
        assert!(refusal("ipis=on").contains("cohorts, yield, ipi"));
        assert!(refusal("ipi=yes").contains("on or off, not \"yes\""));
        assert!(refusal("=on").contains("no mechanism \"\""));
    }
}
