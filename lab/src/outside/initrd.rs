// SPDX-License-Identifier: GPL-2.0-only
//! Packs what one run of L1 needs besides the image, in memory: init, the modules, our programs, the guests' kernel and
//! initrd, the command. Not for anything that outlives the run.

use std::fs::{self, File};
use std::io::{BufWriter, Seek};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::cpio::Archive;
use super::image::Image;
use super::kernel::Kernel;
use super::memory_file;

const INIT: &str = include_str!("l1/init.sh");
const STAGE2: &str = include_str!("l1/stage2.sh");

/// Programs of the workspace that L1 has in its PATH if they are built.
const PROGRAMS: [&str; 4] = ["cohort", "lab", "micro", "cohort-tests"];

/// What goes into L1 for one run.
#[derive(Debug)]
pub struct Payload<'a> {
    /// The kernel that boots, which booted guests use too.
    pub kernel: &'a Kernel,
    /// The image, for its static busybox.
    pub image: &'a Image,
    /// The command and its arguments.
    pub command: &'a [String],
    /// The description of the lab, as JSON.
    pub description: &'a str,
    /// Whether guests are to reach the guests' image.
    pub with_guest_image: bool,
    /// The run's folder.
    pub run_folder: &'a Path,
}

impl Payload<'_> {
    /// Writes the initrd to a file without a name, so that no end of the lab, however sudden, leaves it behind.
    pub fn pack(&self) -> Result<File> {
        let mut archive = Archive::new(BufWriter::new(memory_file()?));
        self.pack_fixed_part(&mut archive)
            .context("The initrd of L1 cannot be packed.")?;
        archive.copy("bin/busybox", 0o755, &self.busybox())?;
        self.pack_modules(&mut archive)?;
        self.pack_programs(&mut archive)?;
        self.pack_package(&mut archive)?;
        self.pack_guest(&mut archive)?;
        let written = archive
            .finish()
            .context("The initrd of L1 cannot be packed.")?;
        let mut file = written
            .into_inner()
            .map_err(|error| error.into_error())
            .context("The initrd is cut off.")?;
        file.rewind().context("The initrd cannot be read again.")?;
        Ok(file)
    }
}

impl Payload<'_> {
    fn release(&self) -> &str {
        &self.kernel.judged.candidate.release
    }

    /// The static busybox of the image.
    fn busybox(&self) -> PathBuf {
        self.image.tree.join("usr/bin/busybox")
    }

    fn pack_fixed_part(&self, archive: &mut Initrd) -> std::io::Result<()> {
        archive.file("init", 0o755, INIT.as_bytes())?;
        archive.file("layer/cohort/stage2", 0o755, STAGE2.as_bytes())?;
        archive.file(
            "layer/cohort/command",
            0o644,
            shell_line(self.command).as_bytes(),
        )?;
        archive.file("layer/cohort/lab.json", 0o644, self.description.as_bytes())
    }

    fn pack_modules(&self, archive: &mut Initrd) -> Result<()> {
        let release = self.release();
        // libbpf reads the configuration there for the `__kconfig` variables of BPF programs.
        archive.copy(
            &format!("layer/boot/config-{release}"),
            0o644,
            &self.kernel.config,
        )?;
        let dir = &self.kernel.modules;
        for entry in
            fs::read_dir(dir).with_context(|| format!("{} cannot be read.", dir.display()))?
        {
            let path = entry
                .with_context(|| format!("{} cannot be read.", dir.display()))?
                .path();
            let name = path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            archive.copy(
                &format!("layer/usr/lib/modules/{release}/{name}"),
                0o644,
                &path,
            )?;
        }
        Ok(())
    }

    fn pack_programs(&self, archive: &mut Initrd) -> Result<()> {
        let dir = programs_dir()?;
        for name in PROGRAMS {
            let path = dir.join(name);
            if path.is_file() {
                archive.copy(&format!("layer/cohort/bin/{name}"), 0o755, &path)?;
            }
        }
        Ok(())
    }

    /// The Debian package that `make deb` has made of the program, if it is not older than that.
    fn pack_package(&self, archive: &mut Initrd) -> Result<()> {
        let programs = programs_dir()?;
        let made = |path: &Path| path.metadata().and_then(|file| file.modified()).ok();
        let program = made(&programs.join("cohort"));
        for entry in programs.join("../debian").read_dir().into_iter().flatten() {
            let path = entry.context("target/debian cannot be read.")?.path();
            let is_package = path.extension().is_some_and(|extension| extension == "deb");
            if is_package && made(&path) > program {
                archive.copy("layer/cohort/cohort.deb", 0o644, &path)?;
            }
        }
        Ok(())
    }

    fn pack_guest(&self, archive: &mut Initrd) -> Result<()> {
        archive.copy("layer/cohort/guest/vmlinux", 0o644, &self.kernel.vmlinux)?;
        let initrd = self.run_folder.join("guest-initrd");
        let modules = self.with_guest_image.then_some(&*self.kernel.modules);
        crate::guest::build_initrd(&self.busybox(), modules, &initrd)?;
        archive.copy("layer/cohort/guest/initrd", 0o644, &initrd)?;
        fs::remove_file(&initrd).with_context(|| format!("{} cannot be removed.", initrd.display()))
    }
}

type Initrd = Archive<BufWriter<File>>;

/// Where the workspace's programs are built: beside the lab itself.
fn programs_dir() -> Result<PathBuf> {
    let lab = std::env::current_exe().context("The lab cannot find its own program file.")?;
    Ok(lab.parent().map(Path::to_path_buf).unwrap_or_default())
}

/// The command as one line that a shell takes apart into the same words.
fn shell_line(command: &[String]) -> String {
    let quoted: Vec<String> = command
        .iter()
        .map(|word| format!("'{}'", word.replace('\'', r"'\''")))
        .collect();
    format!("exec {}\n", quoted.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_gets_the_words_that_were_given() {
        let words = ["printf", "%s|", "it's", "$HOME", "a b", "\\", ""].map(String::from);
        let output = std::process::Command::new("sh")
            .arg("-c")
            .arg(shell_line(&words))
            .output()
            .unwrap();
        assert_eq!(
            String::from_utf8(output.stdout).unwrap(),
            "it's|$HOME|a b|\\||"
        );
    }
}
