// SPDX-License-Identifier: GPL-2.0-only
//! Exceptions for single VMs, from the TOML file: whose vCPUs do not have their turns together.
//!
//! ```toml
//! [[vm]]
//! name = "build-7"
//! cohort = "auto"
//!
//! [[vm]]
//! name = "build-*"
//! cohort = "never"
//!
//! [[vm]]
//! cgroup = "/machine.slice/*batch*"
//! cohort = "never"
//! ```
//!
//! The first one that fits a VM holds for it.

use crate::bpf::intf;
use crate::host::cgroups::path_of;
use crate::host::paths::Host;
use crate::host::vm_identity::VmIdentity;
use glob::Pattern;
use serde::{Deserialize, Deserializer, de};

/// Whether a VM's vCPUs have their turns together.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq)]
#[serde(rename_all = "kebab-case")]
pub enum CohortRule {
    /// As the mechanism `cohorts` says.
    Auto,
    /// They have them one by one.
    Never,
}

impl CohortRule {
    /// Every rule.
    pub const ALL: [Self; 2] = [Self::Auto, Self::Never];

    /// What the BPF side calls it.
    pub fn number(self) -> u32 {
        match self {
            Self::Auto => intf::cohort_rule_COHORT_AUTO,
            Self::Never => intf::cohort_rule_COHORT_NEVER,
        }
    }

    /// As people write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Never => "never",
        }
    }
}

/// What holds for the VMs of one name, or of one cgroup.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Exception {
    #[serde(default, deserialize_with = "pattern")]
    name: Option<Pattern>,
    #[serde(default, deserialize_with = "pattern")]
    cgroup: Option<Pattern>,
    cohort: CohortRule,
}

fn pattern<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Pattern>, D::Error> {
    let text = String::deserialize(deserializer)?;
    Pattern::new(&text).map(Some).map_err(|error| {
        de::Error::custom(format!(
            "{text:?} is no pattern ({error}); write a name, in which * stands for anything and ? for one character"
        ))
    })
}

impl Exception {
    /// What is wrong with it although its words are right.
    pub fn fault(&self) -> Option<&'static str> {
        match (&self.name, &self.cgroup) {
            (None, None) => Some("say which VMs it is for: name = \"…\" or cgroup = \"…\""),
            (Some(_), Some(_)) => Some("give a name or a cgroup, not both"),
            (Some(name), None) if name.as_str().is_empty() => Some("no VM has an empty name"),
            (None, Some(cgroup)) if !cgroup.as_str().starts_with(['/', '*']) => Some(
                "no cgroup is called so: write it as in /proc/PID/cgroup, beginning with /, or with *",
            ),
            _ => None,
        }
    }

    fn fits(&self, name: &str, cgroup: &str) -> bool {
        let fits = |pattern: &Option<Pattern>, text| {
            pattern
                .as_ref()
                .is_some_and(|pattern| pattern.matches(text))
        };
        fits(&self.name, name) || fits(&self.cgroup, cgroup)
    }
}

/// What `exceptions` say of the VM of process `tgid`.
pub fn rule_for(exceptions: &[Exception], host: &Host, tgid: u32) -> CohortRule {
    let name = VmIdentity::of(&host.proc, tgid).shown();
    let cgroup = path_of(&host.proc, tgid).unwrap_or_default();
    let fitting = exceptions
        .iter()
        .find(|exception| exception.fits(&name, &cgroup));
    fitting.map_or(CohortRule::Auto, |exception| exception.cohort)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::paths::fixture::Fixture;

    #[derive(Deserialize)]
    struct File {
        vm: Vec<Exception>,
    }

    fn exceptions(text: &str) -> Vec<Exception> {
        toml::from_str::<File>(text).expect("the text is valid").vm
    }

    fn rule_of(exceptions: &[Exception], command_line: &str, cgroup: &str) -> CohortRule {
        let fixture = Fixture::new()
            .with("proc/7/cmdline", command_line)
            .with("proc/7/cgroup", cgroup);
        rule_for(exceptions, &fixture.host(), 7)
    }

    #[test]
    fn the_first_exception_that_fits_by_name_or_cgroup_holds() {
        let exceptions = exceptions(
            "[[vm]]\nname = \"db-?\"\ncohort = \"auto\"\n\
             [[vm]]\ncgroup = \"/machine.slice/*gold*\"\ncohort = \"never\"\n\
             [[vm]]\nname = \"db-*\"\ncohort = \"never\"\n",
        );
        let gold = "0::/machine.slice/machine-gold.scope\n";
        let rule =
            |name: &str, cgroup| rule_of(&exceptions, &format!("qemu\0-name\0{name}\0"), cgroup);
        assert_eq!(rule("db-1", gold), CohortRule::Auto);
        assert_eq!(rule("web", gold), CohortRule::Never);
        assert_eq!(rule("db-10", "0::/\n"), CohortRule::Never);
        assert_eq!(rule("web", "0::/\n"), CohortRule::Auto);
    }

    #[test]
    fn a_process_that_is_gone_has_no_exception() {
        let exceptions = exceptions("[[vm]]\nname = \"db*\"\ncohort = \"never\"\n");
        assert_eq!(
            rule_for(&exceptions, &Fixture::new().host(), 7),
            CohortRule::Auto
        );
    }

    #[test]
    fn numbers_are_distinct() {
        assert_eq!(CohortRule::ALL.map(CohortRule::number), [0, 1]);
    }
}
