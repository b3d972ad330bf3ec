// SPDX-License-Identifier: GPL-2.0-only
//! What the lab is: the description that goes with every result, and what to remember when reading one.
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use crate::outside::machine::Kind;

/// Where `lab boot` describes the lab to what runs inside.
pub const LAB_INFO_PATH: &str = "/cohort/lab.json";

/// The lab in which a result was measured. Written by `lab boot`; fields it has beyond these are ignored.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct LabInfo {
    /// What executes L1.
    pub machine: Kind,
    /// Its emulator's name and version.
    pub emulator: String,
    /// Release of L1's kernel.
    pub kernel: String,
    /// Version of the QEMU that runs booted guests.
    pub qemu: String,
    /// Number of CPUs of L1.
    pub cpus: u32,
    /// Sockets, cores and threads of L1.
    pub topology: String,
    /// CPUs on which no guest may run: CPU 0 of the fast machine, because QEMU's emulation of a guest there races.
    pub housekeeping_cpus: Vec<u32>,
    /// CPUs for guests.
    pub guest_cpus: Vec<u32>,
    /// The disk with the guests' image, if it is attached.
    pub guest_image: Option<PathBuf>,
    /// Shifts when guests and their timers begin.
    pub seed: u64,
}

impl LabInfo {
    /// Reads the description of the lab that this program runs in.
    ///
    /// # Errors
    /// When this is not the inside of a lab, or its description is not usable.
    pub fn read() -> Result<Self> {
        Self::read_from(Path::new(LAB_INFO_PATH))
    }

    fn read_from(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).with_context(|| {
            format!(
                "{} cannot be read, so this is not the inside of a lab; run this command through `lab boot -- …`",
                path.display()
            )
        })?;
        let info: Self = serde_json::from_str(&text)
            .with_context(|| format!("{} does not describe a lab", path.display()))?;
        ensure!(
            !info.guest_cpus.is_empty(),
            "{} names no CPU for guests",
            path.display()
        );
        Ok(info)
    }

    /// What a figure is from, whatever the size of the machine.
    pub fn origin(&self) -> String {
        format!(
            "machine {} ({}), kernel {}, QEMU {} for guests",
            self.machine, self.emulator, self.kernel, self.qemu
        )
    }

    /// One line that says where a figure is from.
    pub fn describe(&self) -> String {
        format!(
            "Lab: machine {}, {}, kernel {}, QEMU {} for guests, {} CPUs ({}), guests on CPUs {}, seed {}",
            self.machine,
            self.emulator,
            self.kernel,
            self.qemu,
            self.cpus,
            self.topology,
            cpu_list(&self.guest_cpus),
            self.seed
        )
    }

    /// What the machine gets wrong: printed under every table.
    pub fn caveats(&self) -> Vec<String> {
        let caveats: &[&str] = match self.machine {
            Kind::Exact => &[
                "All times are lab time. Each CPU executes one instruction per ns, a PAUSE takes 40 ns, entering a guest \
                 and leaving it 500 ns each.",
                "Caches, memory bandwidth, branch prediction, SMT siblings that slow each other and NUMA latency are not \
                 modelled.",
            ],
            Kind::Fast => {
                &["The fast machine is for what needs no time: no figure from it means anything."]
            }
            Kind::Hardware => {
                &["Guests here are nested guests: VM exits cost more than on bare hardware."]
            }
        };
        caveats.iter().map(ToString::to_string).collect()
    }
}

/// CPUs in the kernel's list format.
pub fn cpu_list(cpus: &[u32]) -> String {
    cpus.iter()
        .map(u32::to_string)
        .collect::<Vec<_>>()
        .join(",")
}

#[cfg(test)]
pub(crate) fn example() -> LabInfo {
    LabInfo {
        machine: Kind::Exact,
        emulator: "Bochs 3.0".into(),
        kernel: "7.2.13+deb14-amd64".into(),
        qemu: "10.0.2".into(),
        cpus: 2,
        topology: "1 socket".into(),
        housekeeping_cpus: vec![],
        guest_cpus: vec![0, 1],
        guest_image: None,
        seed: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_lab_boot_writes_and_ignores_additions() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lab.json");
        let mut value = serde_json::to_value(example()).unwrap();
        value["added_later"] = 1.into();
        fs::write(&path, value.to_string()).unwrap();
        assert_eq!(LabInfo::read_from(&path).unwrap(), example());
    }

    #[test]
    fn outside_of_a_lab_the_error_says_what_to_do() {
        let error = LabInfo::read_from(Path::new("/nonexistent/lab.json")).unwrap_err();
        assert!(error.to_string().contains("lab boot"), "{error}");
    }

    #[test]
    fn a_lab_without_guest_cpus_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lab.json");
        let info = LabInfo {
            guest_cpus: vec![],
            ..example()
        };
        fs::write(&path, serde_json::to_string(&info).unwrap()).unwrap();
        assert!(LabInfo::read_from(&path).is_err());
    }
}
