// SPDX-License-Identifier: GPL-2.0-only
//! The name a person knows a VM by.
//!
//! QEMU is told the name on its command line, by hand or by libvirt. Any other
//! VMM is shown by the name and number of its process.

use std::fs;
use std::path::Path;

/// The name of the VM that process `tgid` runs.
///
/// A process that is gone has no name left, only its number. Characters that
/// could steer a terminal are replaced: the name is the VM owner's choice.
pub fn vm_name(proc: &Path, tgid: u32) -> String {
    raw_vm_name(proc, tgid).replace(char::is_control, "?")
}

fn raw_vm_name(proc: &Path, tgid: u32) -> String {
    let folder = proc.join(tgid.to_string());
    let command_line = fs::read(folder.join("cmdline")).unwrap_or_default();
    if let Some(name) = qemu_name(&command_line) {
        return name;
    }
    match fs::read_to_string(folder.join("comm")) {
        Ok(comm) => format!("{}-{tgid}", comm.trim_end()),
        Err(_) => format!("pid-{tgid}"),
    }
}

/// The argument of QEMU's `-name`: `NAME`, or `guest=NAME`, with options after
/// a comma. QEMU writes a comma inside a name as two.
fn qemu_name(command_line: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(command_line);
    let mut arguments = text.split('\0');
    arguments.find(|argument| matches!(*argument, "-name" | "--name"))?;
    let argument = arguments.next()?.replace(",,", "\0");
    let parts = || argument.split(',');
    let name = parts()
        .find_map(|part| part.strip_prefix("guest="))
        .or_else(|| parts().next().filter(|part| !part.contains('=')))?;
    (!name.is_empty()).then(|| name.replace('\0', ","))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::paths::fixture::Fixture;

    fn name_in(arguments: &[&str]) -> Option<String> {
        qemu_name(arguments.join("\0").as_bytes())
    }

    #[test]
    fn libvirt_names_the_guest() {
        let arguments = ["qemu", "-name", "guest=web-1,debug-threads=on", "-S"];
        assert_eq!(name_in(&arguments).as_deref(), Some("web-1"));
    }

    #[test]
    fn a_person_writes_the_bare_name() {
        assert_eq!(name_in(&["qemu", "-name", "db"]).as_deref(), Some("db"));
        assert_eq!(
            name_in(&["qemu", "-name", "db,process=x"]).as_deref(),
            Some("db")
        );
    }

    #[test]
    fn a_comma_in_a_name_is_written_twice() {
        assert_eq!(
            name_in(&["qemu", "-name", "guest=a,,b,debug-threads=on"]).as_deref(),
            Some("a,b")
        );
    }

    #[test]
    fn options_alone_are_no_name() {
        assert_eq!(name_in(&["qemu", "-name", "debug-threads=on"]), None);
        assert_eq!(name_in(&["qemu", "-name"]), None);
        assert_eq!(name_in(&["qemu", "-m", "1G"]), None);
    }

    #[test]
    fn another_vmm_is_known_by_its_process() {
        let fixture = Fixture::new()
            .with("proc/7/cmdline", "firecracker\0--api-sock\0x\0")
            .with("proc/7/comm", "firecracker\n");
        assert_eq!(vm_name(&fixture.host().proc, 7), "firecracker-7");
    }

    #[test]
    fn a_name_cannot_steer_the_terminal() {
        let fixture = Fixture::new().with("proc/9/cmdline", "qemu\0-name\0a\x1b[2Jb\0");
        assert_eq!(vm_name(&fixture.host().proc, 9), "a?[2Jb");
    }

    #[test]
    fn a_process_that_is_gone_is_known_by_its_number() {
        assert_eq!(vm_name(&Fixture::new().host().proc, 8), "pid-8");
    }
}
