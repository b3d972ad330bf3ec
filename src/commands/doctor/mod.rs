// SPDX-License-Identifier: GPL-2.0-only
//! `cohort doctor`: can this host run Cohort, is it safe, is it set up well. It looks and changes nothing.

mod cpus;
mod gain;
mod kvm;
mod readiness;
mod vms;

use crate::commands::finding::{Finding, Severity, text};
use crate::host::paths::Host;
use crate::host::preflight;
use crate::process::exit::{Exit, Failure};
use crate::scheduler::settings::SettingsSource;
use crate::text::table::{json_line, print};
use anyhow::anyhow;
use clap::Args;
use std::path::PathBuf;

/// The options of `cohort doctor`.
#[derive(Args, Clone, Debug)]
pub struct DoctorOptions {
    #[command(flatten)]
    settings: SettingsSource,

    /// Print one line of JSON instead of text
    #[arg(long)]
    json: bool,

    /// Look at recordings of `cohort watch` or `top` instead of this host, one per host and best of a day, and say which of those
    /// hosts gain from Cohort; needs no privileges
    #[arg(long = "recording", value_name = "FILE", num_args = 1.., conflicts_with = "config")]
    recordings: Vec<PathBuf>,

    /// Leave out what is fine
    #[arg(long, short)]
    quiet: bool,
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
/// With [`Exit::NoPrivileges`] if only part of the host was seen, else with [`Exit::Unfit`] or [`Exit::Advice`] for the worst finding, with [`Exit::BadRecording`] for a recording that cannot be read,
/// and when nothing can be printed.
pub fn doctor(options: &DoctorOptions, host: &Host) -> Result<(), Failure> {
    let (mut findings, failures) = match options.recordings.as_slice() {
        [] => (examine(host, &options.settings), Vec::new()),
        recordings => gain::findings(recordings),
    };
    let worst = findings.iter().map(|finding| finding.severity).max();
    if options.quiet {
        findings.retain(|finding| finding.severity > Severity::Fine);
    }
    match options.json {
        true => print(&json_line(&findings)?)?,
        false => print(&text(&findings))?,
    }
    if let Some(failure) = failures.into_iter().next() {
        return Err(failure);
    }
    if options.recordings.is_empty() && preflight::lacks_privileges(host) {
        return Err(Failure::new(
            Exit::NoPrivileges,
            anyhow!("only a part of this host was seen; run `sudo cohort doctor`"),
        ));
    }
    match worst {
        Some(Severity::Refused) => Err(Failure::new(
            Exit::Unfit,
            anyhow!("Cohort does not run on this host as it is"),
        )),
        Some(Severity::Warning) => Err(Failure::new(
            Exit::Advice,
            match options.recordings.is_empty() {
                true => {
                    anyhow!("Cohort runs on this host; heeding the warnings would make it better")
                }
                false => anyhow!("some of these hosts gain from Cohort"),
            },
        )),
        _ => Ok(()),
    }
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
    fn this_machine_can_be_examined_whatever_it_is() {
        let findings = examine(&Host::live(), &SettingsSource::default());
        assert!(findings.len() >= 8, "{findings:?}");
        assert!(findings.is_sorted_by_key(|finding| std::cmp::Reverse(finding.severity)));
    }
}
