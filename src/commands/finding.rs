// SPDX-License-Identifier: GPL-2.0-only
//! What `cohort doctor` and `cohort why` say: one thing that was looked at, how much it matters, and what to do.

use serde::Serialize;

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
    /// It was looked at, and is as it should be.
    pub fn fine(check: &'static str, seen: impl Into<String>) -> Self {
        Self {
            check,
            severity: Severity::Fine,
            seen: seen.into(),
            why: String::new(),
            mend: String::new(),
        }
    }

    /// Something to know or to mend.
    pub fn new(
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

/// As people read them.
pub fn text(findings: &[Finding]) -> String {
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
mod tests {
    use super::*;

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
}
