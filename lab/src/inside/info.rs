// SPDX-License-Identifier: GPL-2.0-only
//! What the lab is: the description that goes with every result, and what to remember when reading one.
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

/// Where `lab boot` describes the lab to what runs inside.
pub const LAB_INFO_PATH: &str = "/cohort/lab.json";

/// The lab in which a result was measured. Written by `lab boot`; fields it has beyond these are ignored.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct LabInfo {
    /// What runs L1: "tcg" (emulation) or "kvm".
    pub accelerator: String,
    /// How many seconds of the user's machine one second of L1 takes; 1 on hardware.
    pub dilation: f64,
    /// L1's clock counts instructions, one per ns, instead of time.
    #[serde(default)]
    pub counts_instructions: bool,
    /// Release of L1's kernel.
    pub kernel: String,
    /// Version of the QEMU that runs L1.
    pub qemu: String,
    /// Number of CPUs of L1.
    pub cpus: u32,
    /// Sockets, cores and threads of L1.
    pub topology: String,
    /// CPUs on which no guest may run: under TCG always CPU 0, because QEMU's emulation of a guest there races.
    pub housekeeping_cpus: Vec<u32>,
    /// CPUs for guests.
    pub guest_cpus: Vec<u32>,
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
        ensure!(
            info.dilation > 0.0,
            "{} has a dilation of {}",
            path.display(),
            info.dilation
        );
        Ok(info)
    }

    /// Iterations of the workloads' empty loop that make about 100 us of lab time: what emulation computes in
    /// 0.1 ms of real time, times the dilation.
    pub fn default_work(&self) -> u64 {
        // 600,000 iterations were measured to take 100 us of lab time at a dilation of 20.
        (30_000.0 * self.dilation).round() as u64
    }

    /// One line that says where a figure is from.
    pub fn describe(&self) -> String {
        format!(
            "Lab: accelerator {}, {}, kernel {}, QEMU {}, {} CPUs ({}), guests on CPUs {}",
            self.accelerator,
            if self.counts_instructions {
                "1 ns per instruction".to_owned()
            } else {
                format!("dilation {}", self.dilation)
            },
            self.kernel,
            self.qemu,
            self.cpus,
            self.topology,
            cpu_list(&self.guest_cpus)
        )
    }

    /// What the lab gets wrong: printed under every table.
    pub fn caveats(&self) -> Vec<String> {
        if self.accelerator != "tcg" {
            return vec!["All times are lab time; L1 ran on KVM, so guests here are nested guests: VM exits cost more \
                         than on bare hardware."
                .into()];
        }
        vec![
            // Emulated, plain computing runs at a third of a real CPU's speed and a VM exit takes 0.2-0.5 ms.
            format!(
                "All times are lab time: one second of it took {} s. Emulated CPUs do not match any real one: at this \
                 dilation, plain computing is about {:.1} times as fast as on a real CPU, and a VM exit takes about \
                 {:.0}-{:.0} us instead of 1-2 us.",
                self.dilation,
                self.dilation / 3.0,
                200.0 / self.dilation,
                500.0 / self.dilation
            ),
            "Ratios between schedulers are therefore indicative; costs of an exit or a hook are not, take them from \
             hardware."
                .into(),
            "The workloads' own spin loops issue one PAUSE per window, as hardware exits; spin loops of guest kernels \
             exit at each PAUSE."
                .into(),
            "Spinning is in guest user space: AMD hosts exit there too, Intel hosts only from guest kernel mode.".into(),
        ]
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
        accelerator: "tcg".into(),
        dilation: 20.0,
        counts_instructions: false,
        kernel: "7.2.13+deb14-amd64".into(),
        qemu: "10.0.2".into(),
        cpus: 3,
        topology: "1 socket".into(),
        housekeeping_cpus: vec![0],
        guest_cpus: vec![1, 2],
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

    #[test]
    fn work_grows_with_dilation() {
        assert_eq!(example().default_work(), 600_000);
        assert_eq!(
            LabInfo {
                dilation: 1.0,
                ..example()
            }
            .default_work(),
            30_000
        );
    }
}
