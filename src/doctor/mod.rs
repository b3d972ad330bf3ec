// SPDX-License-Identifier: GPL-2.0-only
//! `cohort doctor`: can this host run Cohort, is it safe, is it set up well. It looks and changes nothing.

mod cpus;
mod kvm;
mod readiness;
mod vms;

use crate::exit::{Exit, Failure};
use crate::host::paths::Host;
use crate::settings::SettingsSource;
use crate::table::{json_line, print};
use anyhow::anyhow;
use clap::Args;
use serde::Serialize;

/// The options of `cohort doctor`.
#[derive(Args, Clone, Debug)]
pub struct DoctorOptions {
    #[command(flatten)]
    settings: SettingsSource,

    /// Print one line of JSON instead of text
    #[arg(long)]
    json: bool,

    /// Leave out what is fine
    #[arg(long, short)]
    quiet: bool,
}

/// How much a finding matters.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// It was looked at, and is as it should be.
    Fine,
    /// Good to know.
    Note,
    /// VMs are slower, or numbers less true, than they need be.
    Warning,
    /// Cohort does not run here.
    Refused,
}

impl Severity {
    fn word(self) -> &'static str {
        match self {
            Severity::Fine => "fine",
            Severity::Note => "note",
            Severity::Warning => "WARNING",
            Severity::Refused => "REFUSED",
        }
    }
}

/// One thing that was looked at.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct Finding {
    /// What was looked at: one word, which stays the same between versions.
    pub check: &'static str,
    /// How much it matters.
    pub severity: Severity,
    /// What was seen.
    pub seen: String,
    /// Why that matters; empty if it is fine.
    pub why: String,
    /// The command that mends it, or what to do; empty if there is nothing to mend.
    pub mend: String,
}

impl Finding {
    fn fine(check: &'static str, seen: impl Into<String>) -> Self {
        Self {
            check,
            severity: Severity::Fine,
            seen: seen.into(),
            why: String::new(),
            mend: String::new(),
        }
    }

    fn new(
        check: &'static str,
        severity: Severity,
        seen: impl Into<String>,
        why: impl Into<String>,
        mend: impl Into<String>,
    ) -> Self {
        Self {
            check,
            severity,
            seen: seen.into(),
            why: why.into(),
            mend: mend.into(),
        }
    }
}

/// Looks at everything, the worst first.
pub fn examine(host: &Host, settings: &SettingsSource) -> Vec<Finding> {
    let mut findings = readiness::findings(host);
    findings.push(readiness::settings(host, settings));
    findings.extend(cpus::findings(host));
    findings.extend(kvm::findings(host));
    findings.extend(vms::findings(host));
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    findings
}

/// Prints what was found.
///
/// # Errors
/// With [`Exit::Unfit`] or [`Exit::Advice`] for the worst finding, and when nothing can be printed.
pub fn doctor(options: &DoctorOptions, host: &Host) -> Result<(), Failure> {
    let mut findings = examine(host, &options.settings);
    let worst = findings.iter().map(|finding| finding.severity).max();
    if options.quiet {
        findings.retain(|finding| finding.severity > Severity::Fine);
    }
    match options.json {
        true => print(&json_line(&findings)?)?,
        false => print(&text(&findings))?,
    }
    match worst {
        Some(Severity::Refused) => Err(Failure::new(
            Exit::Unfit,
            anyhow!("Cohort does not run on this host as it is"),
        )),
        Some(Severity::Warning) => Err(Failure::new(
            Exit::Advice,
            anyhow!("Cohort runs on this host; heeding the warnings would make it better"),
        )),
        _ => Ok(()),
    }
}

fn text(findings: &[Finding]) -> String {
    let mut text = String::new();
    for finding in findings {
        text += &format!(
            "{:<8} {:<15} {}\n",
            finding.severity.word(),
            finding.check,
            finding.seen
        );
        for (word, words) in [("why:", &finding.why), ("do:", &finding.mend)] {
            if !words.is_empty() {
                text += &format!("{:24} {word:<4} {words}\n", "");
            }
        }
    }
    text
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The one finding of a check, whose text can be used and which can be mended or is fine.
    pub fn found(findings: &[Finding], check: &str) -> Finding {
        let of_check: Vec<&Finding> = findings
            .iter()
            .filter(|finding| finding.check == check)
            .collect();
        let [finding] = of_check.as_slice() else {
            panic!("one finding of {check}, not {of_check:?}")
        };
        assert!(!finding.seen.is_empty());
        let is_fine = finding.severity == Severity::Fine;
        assert_eq!(finding.why.is_empty(), is_fine, "{finding:?}");
        assert!(!is_fine || finding.mend.is_empty(), "{finding:?}");
        (*finding).clone()
    }

    /// How much a check's one finding matters.
    pub fn severity(findings: &[Finding], check: &str) -> Severity {
        found(findings, check).severity
    }

    #[test]
    fn a_finding_says_why_and_what_to_do() {
        let findings = [
            Finding::new(
                "polling",
                Severity::Warning,
                "it polls",
                "it waits",
                "stop it",
            ),
            Finding::fine("kernel", "7.3"),
        ];
        let lines: Vec<String> = text(&findings).lines().map(str::to_owned).collect();
        assert_eq!(lines[0], "WARNING  polling         it polls");
        assert_eq!(lines[1].trim(), "why: it waits");
        assert_eq!(lines[2].trim(), "do:  stop it");
        assert_eq!(lines[3], "fine     kernel          7.3");
        assert_eq!(lines.len(), 4);
    }

    #[test]
    fn this_machine_can_be_examined_whatever_it_is() {
        let findings = examine(&Host::live(), &SettingsSource::default());
        assert!(findings.len() >= 8, "{findings:?}");
        assert!(findings.is_sorted_by_key(|finding| std::cmp::Reverse(finding.severity)));
    }
}
