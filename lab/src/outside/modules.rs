// SPDX-License-Identifier: GPL-2.0-only
//! Picks the few kernel modules that L1 needs, with what they depend on, out of the thousands of a Debian kernel. Not
//! for loading them: L1's init and modprobe do.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::cache::short_hash;
use super::tool::{self, io_sentence};
use anyhow::{Context, Result, ensure};

/// What L1's initrd loads to reach its root file system, in this order. Where a kernel has one built in, there is
/// nothing to load.
pub const FOR_ROOT: [&str; 7] = [
    "ata_piix",
    "sd_mod",
    "virtio_pci",
    "virtio_blk",
    "virtio_console",
    "erofs",
    "overlay",
];

/// What programs in L1 may load: KVM for both vendors, the devices of guests, and MSRs.
const FOR_PROGRAMS: [&str; 9] = [
    "kvm",
    "kvm_amd",
    "kvm_intel",
    "vhost_net",
    "vhost_vsock",
    "tun",
    "msr",
    "cpuid",
    "loop",
];

/// Name of the file that lists the modules for the root in loading order.
pub const LOAD_ORDER: &str = "load-order";

/// Changes when the list of modules does, so that the cache is not believed then.
pub fn list_hash() -> String {
    let names = [FOR_ROOT.as_slice(), FOR_PROGRAMS.as_slice()]
        .concat()
        .join(" ");
    short_hash(&names)
}

/// Copies the modules, unpacked, from a full modules folder to `into`, with depmod's files and [`LOAD_ORDER`].
pub fn collect(release: &str, from: &Path, into: &Path) -> Result<()> {
    let all = index(from)?;
    let mut order = Vec::new();
    for name in FOR_ROOT {
        visit(name, &all, &mut order)?;
    }
    let for_root = order.len();
    for name in FOR_PROGRAMS {
        visit(name, &all, &mut order)?;
    }
    ensure!(
        order.iter().any(|name| name == "kvm"),
        "Kernel {release} has no module kvm: the lab cannot load KVM in it."
    );
    // depmod wants the modules below lib/modules/RELEASE.
    let tree = into.with_extension("tree");
    let dir = tree.join("lib/modules").join(release);
    fs::create_dir_all(&dir)
        .map_err(|error| io_sentence(&format!("{} cannot be created", dir.display()), &error))?;
    for name in &order {
        unpack(&all[name], &dir.join(format!("{name}.ko")))?;
    }
    for name in [
        "modules.builtin",
        "modules.builtin.modinfo",
        "modules.order",
    ] {
        if from.join(name).exists() {
            fs::copy(from.join(name), dir.join(name))
                .with_context(|| format!("{name} cannot be copied."))?;
        }
    }
    tool::run(
        Command::new("depmod").arg("-b").arg(&tree).arg(release),
        "list the modules' dependencies",
    )?;
    let load_order: String = order[..for_root]
        .iter()
        .map(|name| format!("{name}.ko\n"))
        .collect();
    fs::write(dir.join(LOAD_ORDER), load_order).context("The loading order cannot be written.")?;
    fs::rename(&dir, into).with_context(|| format!("{} cannot be moved.", dir.display()))
}

/// Modules by name, with '_' for '-' as the kernel has it.
fn index(dir: &Path) -> Result<HashMap<String, PathBuf>> {
    let mut found = HashMap::new();
    let mut open = vec![dir.to_path_buf()];
    while let Some(dir) = open.pop() {
        for entry in
            fs::read_dir(&dir).with_context(|| format!("{} cannot be read.", dir.display()))?
        {
            let entry = entry.with_context(|| format!("{} cannot be read.", dir.display()))?;
            let path = entry.path();
            // Not what a link points to: `build` of a kernel built here is all of its source.
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                open.push(path);
            } else if let Some(name) = module_name(&path) {
                found.insert(name, path);
            }
        }
    }
    Ok(found)
}

/// "kvm-amd.ko.xz" is kvm_amd; None for other files.
fn module_name(path: &Path) -> Option<String> {
    let (name, packed) = path.file_name()?.to_str()?.split_once(".ko")?;
    ["", ".xz", ".zst"]
        .contains(&packed)
        .then(|| name.replace('-', "_"))
}

/// Appends a module to the order, after those it depends on.
fn visit(name: &str, all: &HashMap<String, PathBuf>, order: &mut Vec<String>) -> Result<()> {
    // An algorithm is named without its end, which is that of its plain implementation.
    let plain = format!("{name}_generic");
    let Some(name) = [name, &plain]
        .into_iter()
        .find(|name| all.contains_key(*name))
    else {
        return Ok(()); // built in
    };
    let path = &all[name];
    if order.iter().any(|done| done == name) {
        return Ok(());
    }
    for dependency in modinfo(path, "depends")?.split(',') {
        visit(&dependency.trim().replace('-', "_"), all, order)?;
    }
    // Wanted but not linked to, such as the driver of a checksum: load it if it is a module.
    for dependency in modinfo(path, "softdep")?
        .split_whitespace()
        .filter(|word| !word.ends_with(':'))
    {
        visit(&dependency.replace('-', "_"), all, order)?;
    }
    order.push(name.to_string());
    Ok(())
}

fn modinfo(path: &Path, field: &str) -> Result<String> {
    let mut command = Command::new("modinfo");
    command.arg("-F").arg(field).arg(path);
    let output = tool::run(
        &mut command,
        &format!("read what {} depends on", path.display()),
    )?;
    Ok(String::from_utf8_lossy(&output).trim().to_string())
}

fn unpack(from: &Path, to: &Path) -> Result<()> {
    let purpose = format!("unpack {}", from.display());
    let content = match from.extension().and_then(|extension| extension.to_str()) {
        Some("xz") => tool::run(Command::new("xz").arg("-dc").arg(from), &purpose)?,
        Some("zst") => tool::run(Command::new("zstd").arg("-dc").arg(from), &purpose)?,
        _ => fs::read(from).with_context(|| format!("{} cannot be read.", from.display()))?,
    };
    fs::write(to, content)
        .map_err(|error| io_sentence(&format!("{} cannot be written", to.display()), &error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_the_kernels() {
        assert_eq!(
            module_name(Path::new("/x/kvm-amd.ko.xz")).unwrap(),
            "kvm_amd"
        );
        assert_eq!(module_name(Path::new("/x/tun.ko")).unwrap(), "tun");
        assert_eq!(module_name(Path::new("/x/modules.dep")), None);
        assert_eq!(module_name(Path::new("/x/.kobject.o.cmd")), None);
    }

    #[test]
    fn the_source_beside_the_modules_has_none() {
        let folder = tempfile::tempdir().unwrap();
        let [modules, source] = ["modules", "source"].map(|name| folder.path().join(name));
        for (dir, name) in [(&modules, "kvm.ko"), (&source, "tun.ko")] {
            fs::create_dir(dir).unwrap();
            fs::write(dir.join(name), "").unwrap();
        }
        std::os::unix::fs::symlink(&source, modules.join("build")).unwrap();
        let found: Vec<String> = index(&modules).unwrap().into_keys().collect();
        assert_eq!(found, ["kvm"]);
    }
}
