// SPDX-License-Identifier: GPL-2.0-only
//! Whose VM a process runs, and by what name people know it: from its command line and its cgroup, without asking any
//! daemon.
//!
//! | manager | told by | name | id | owner |
//! |---|---|---|---|---|
//! | kubevirt | cgroup below `kubepods`, `-name guest=NAMESPACE_NAME` | NAME | UUID | NAMESPACE |
//! | openstack | SMBIOS `manufacturer=OpenStack Foundation` | libvirt's (`instance-0000002a`) | UUID | |
//! | proxmox | cgroup `/qemu.slice/VMID.scope` | `-name` | VMID | |
//! | libvirt | cgroup `machine-qemu…`, or `guest=` and `-uuid` | `-name guest=` | UUID | |
//! | firecracker | the program | `--id` | `--id` | |
//! | cloud-hypervisor | the program | file name of its API socket | | |
//! | none of these | | `-name`, or the process's name and number | UUID, if it has one | |

use scx_stats_derive::{Stats, stat_doc};
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::Path;

/// What is known of a VM besides what it does. What is not known is empty.
#[stat_doc]
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize, Stats)]
#[stat(desc = "whose VM it is")]
pub struct VmIdentity {
    #[stat(desc = "name, or process and its number")]
    pub name: String,
    #[stat(
        desc = "what manages it: libvirt, proxmox, openstack, kubevirt, firecracker, cloud-hypervisor"
    )]
    pub manager: String,
    #[stat(desc = "its number or UUID for that")]
    pub id: String,
    #[stat(desc = "whom it belongs to: the namespace (kubevirt)")]
    pub owner: String,
}

impl VmIdentity {
    /// Of the VM that process `tgid` runs; of one that is gone, only its number is left.
    ///
    /// Characters that could steer a terminal are replaced: names are the choice of the VM's owner.
    pub fn of(proc: &Path, tgid: u32) -> Self {
        let folder = proc.join(tgid.to_string());
        let read = |file: &str| {
            let content = fs::read(folder.join(file)).unwrap_or_default();
            String::from_utf8_lossy(&content).into_owned()
        };
        let command_line = read("cmdline");
        let arguments = Arguments(command_line.split('\0').collect());
        let found = identity(&arguments, &read("cgroup"));
        let name = match (found.name.is_empty(), read("comm").trim_end()) {
            (false, _) => found.name,
            (true, "") => format!("pid-{tgid}"),
            (true, comm) => format!("{comm}-{tgid}"),
        };
        Self { name, ..found }.made_harmless()
    }

    /// The same without characters that could steer a terminal.
    pub(crate) fn made_harmless(self) -> Self {
        Self {
            name: harmless(&self.name),
            manager: harmless(&self.manager),
            id: harmless(&self.id),
            owner: harmless(&self.owner),
        }
    }

    /// What tables call it: VMs of several owners may have the same name.
    pub fn shown(&self) -> String {
        match self.owner.as_str() {
            "" => self.name.clone(),
            owner => format!("{owner}/{}", self.name),
        }
    }

    /// What names this VM and no other for as long as it lives, on each host to which it moves: owner and name, or what its
    /// manager has for it. One that has neither does not move, and has its process beside its name.
    pub fn lasting(&self, tgid: u32) -> String {
        match (self.owner.as_str(), self.id.as_str()) {
            ("", "") => distinct(&self.name, tgid),
            ("", id) => id.to_owned(),
            _ => self.shown(),
        }
    }
}

/// `text` without characters that could steer a terminal.
pub(crate) fn harmless(text: &str) -> String {
    text.replace(char::is_control, "?")
}

/// `name`, which several VMs have, with the process beside it.
pub fn distinct(name: &str, tgid: u32) -> String {
    format!("{name} ({tgid})")
}

fn identity(arguments: &Arguments<'_>, cgroup: &str) -> VmIdentity {
    let identity = |manager: &str, name: String, id: String| VmIdentity {
        name,
        manager: manager.to_owned(),
        id,
        owner: String::new(),
    };
    let value = |option| arguments.value(option).unwrap_or_default().to_owned();
    match arguments.program() {
        "firecracker" => return identity("firecracker", value("id"), value("id")),
        "cloud-hypervisor" => {
            let socket = value("api-socket");
            // Newer ones may write path=…, or hand over a file descriptor.
            let socket = socket.strip_prefix("path=").unwrap_or(&socket);
            let stem = Path::new(socket).file_stem().unwrap_or_default();
            let name = stem.to_string_lossy().into_owned();
            return identity("cloud-hypervisor", name, String::new());
        }
        _ => {}
    }

    let name = value("name");
    let guest = property(&name, "guest");
    let bare = || {
        properties(&name)
            .into_iter()
            .next()
            .filter(|name| !name.contains('='))
    };
    let name = guest.clone().or_else(bare).unwrap_or_default();
    let smbios = arguments
        .all("smbios")
        .find(|value| value.starts_with("type=1,"));
    let uuid = match arguments.value("uuid") {
        Some(uuid) => uuid.to_owned(),
        None => smbios
            .and_then(|smbios| property(smbios, "uuid"))
            .unwrap_or_default(),
    };
    let made_by = smbios.and_then(|smbios| property(smbios, "manufacturer"));
    if cgroup.contains("kubepods")
        && let Some((namespace, name)) = name.split_once('_')
    {
        return VmIdentity {
            owner: namespace.to_owned(),
            ..identity("kubevirt", name.to_owned(), uuid)
        };
    }
    if made_by.as_deref() == Some("OpenStack Foundation") {
        return identity("openstack", name, uuid);
    }
    if let Some(vmid) = proxmox_id(cgroup) {
        return identity("proxmox", name, vmid);
    }
    if cgroup.contains("machine-qemu") || (guest.is_some() && arguments.value("uuid").is_some()) {
        return identity("libvirt", name, uuid);
    }
    identity("", name, uuid)
}

/// `100` of `0::/qemu.slice/100.scope`.
fn proxmox_id(cgroup: &str) -> Option<String> {
    let (_, rest) = cgroup.split_once("/qemu.slice/")?;
    let (id, _) = rest.split_once(".scope")?;
    id.chars()
        .all(|digit| digit.is_ascii_digit())
        .then(|| id.to_owned())
}

/// The command line of a process.
struct Arguments<'a>(Vec<&'a str>);

impl Arguments<'_> {
    /// The file name of the program.
    fn program(&self) -> &str {
        let path = self.0.first().copied().unwrap_or_default();
        path.rsplit('/').next().unwrap_or_default()
    }

    /// All values of the option `-NAME`, `--NAME` or `--NAME=`.
    fn all(&self, option: &str) -> impl Iterator<Item = &str> {
        self.0
            .iter()
            .enumerate()
            .skip(1)
            .filter_map(move |(place, argument)| {
                let name = argument
                    .strip_prefix("--")
                    .or_else(|| argument.strip_prefix('-'))?;
                match name.split_once('=') {
                    Some((name, value)) if name == option => Some(value),
                    _ if name == option => self.0.get(place + 1).copied(),
                    _ => None,
                }
            })
    }

    /// The first value of an option.
    fn value(&self, option: &str) -> Option<&str> {
        self.all(option).next()
    }
}

/// The parts of one of QEMU's values, `A,KEY=B,…`: in it a comma is written as two.
fn properties(value: &str) -> Vec<String> {
    let value = value.replace(",,", "\0");
    let parts = value.split(',').map(|part| part.replace('\0', ","));
    parts.filter(|part| !part.is_empty()).collect()
}

fn property(value: &str, key: &str) -> Option<String> {
    properties(value).into_iter().find_map(|part| {
        let (name, value) = part.split_once('=')?;
        (name == key && !value.is_empty()).then(|| value.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::paths::fixture::Fixture;

    fn of(arguments: &[&str], cgroup: &str) -> VmIdentity {
        let fixture = Fixture::new()
            .with("proc/7/cmdline", arguments.join("\0") + "\0")
            .with("proc/7/cgroup", cgroup)
            .with("proc/7/comm", "vmm\n");
        VmIdentity::of(&fixture.host().proc, 7)
    }

    fn is(identity: &VmIdentity) -> [&str; 4] {
        [
            &identity.manager,
            &identity.name,
            &identity.id,
            &identity.owner,
        ]
    }

    const UUID: &str = "11111111-2222-3333-4444-555555555555";

    #[test]
    fn libvirt_names_the_guest() {
        let identity = of(
            &[
                "/usr/bin/qemu-system-x86_64",
                "-name",
                "guest=web-1,debug-threads=on",
                "-S",
                "-uuid",
                UUID,
            ],
            "0::/machine.slice/machine-qemu\\x2d3\\x2dweb\\x2d1.scope/libvirt/emulator\n",
        );
        assert_eq!(is(&identity), ["libvirt", "web-1", UUID, ""]);
    }

    #[test]
    fn proxmox_numbers_it() {
        let identity = of(
            &[
                "/usr/bin/kvm",
                "-id",
                "100",
                "-name",
                "mail,debug-threads=on",
                "-smbios",
                &format!("type=1,uuid={UUID}"),
            ],
            "0::/qemu.slice/100.scope\n",
        );
        assert_eq!(is(&identity), ["proxmox", "mail", "100", ""]);
    }

    #[test]
    fn openstack_says_who_it_is_in_smbios() {
        let identity = of(
            &[
                "/usr/bin/qemu-system-x86_64",
                "-name",
                "guest=instance-0000002a,debug-threads=on",
                "-uuid",
                UUID,
                "-smbios",
                "type=1,manufacturer=OpenStack Foundation,product=OpenStack Nova,version=29.0.1",
            ],
            "0::/machine.slice/machine-qemu\\x2d1\\x2dinstance\\x2d0000002a.scope\n",
        );
        assert_eq!(is(&identity), ["openstack", "instance-0000002a", UUID, ""]);
    }

    #[test]
    fn kubevirt_puts_the_namespace_in_front() {
        let identity = of(
            &[
                "/usr/libexec/qemu-kvm",
                "-name",
                "guest=shop_db-0,debug-threads=on",
                "-uuid",
                UUID,
            ],
            "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice/cri-containerd-2.scope\n",
        );
        assert_eq!(is(&identity), ["kubevirt", "db-0", UUID, "shop"]);
    }

    #[test]
    fn small_vmms_have_an_id_or_a_socket() {
        let identity = of(
            &[
                "/usr/bin/firecracker",
                "--id",
                "fn-7",
                "--api-sock",
                "/run/x",
            ],
            "",
        );
        assert_eq!(is(&identity), ["firecracker", "fn-7", "fn-7", ""]);
        let identity = of(&["cloud-hypervisor", "--api-socket=/run/ch/blue.sock"], "");
        assert_eq!(is(&identity), ["cloud-hypervisor", "blue", "", ""]);
        let identity = of(
            &["cloud-hypervisor", "--api-socket", "path=/run/ch/red.sock"],
            "",
        );
        assert_eq!(identity.name, "red");
        // Nothing was given: the process, then.
        assert_eq!(of(&["firecracker"], "").name, "vmm-7");
    }

    #[test]
    fn a_person_writes_the_bare_name() {
        assert_eq!(is(&of(&["qemu", "-name", "db"], "")), ["", "db", "", ""]);
        assert_eq!(of(&["qemu", "--name", "db,process=x"], "").name, "db");
        assert_eq!(
            of(&["qemu", "-name", "guest=a,,b,debug-threads=on"], "").name,
            "a,b"
        );
    }

    #[test]
    fn options_alone_are_no_name() {
        assert_eq!(of(&["qemu", "-name", "debug-threads=on"], "").name, "vmm-7");
        assert_eq!(of(&["qemu", "-name"], "").name, "vmm-7");
        assert_eq!(of(&["qemu", "-m", "1G"], "").name, "vmm-7");
    }

    #[test]
    fn what_lasts_is_the_managers_own_or_bound_to_the_process() {
        let identity = |name: &str, id: &str, owner: &str| VmIdentity {
            name: name.to_owned(),
            id: id.to_owned(),
            owner: owner.to_owned(),
            ..VmIdentity::default()
        };
        let lasting = |name, id, owner| identity(name, id, owner).lasting(7);
        assert_eq!(lasting("db-0", UUID, "shop"), "shop/db-0");
        assert_eq!(lasting("web-1", UUID, ""), UUID);
        assert_eq!(lasting("mail", "100", ""), "100");
        assert_eq!(lasting("db", "", ""), "db (7)");
        assert_eq!(identity("db-0", UUID, "shop").shown(), "shop/db-0");
        assert_eq!(identity("web-1", UUID, "").shown(), "web-1");
    }

    #[test]
    fn a_name_cannot_steer_the_terminal() {
        assert_eq!(of(&["qemu", "-name", "a\x1b[2Jb"], "").name, "a?[2Jb");
    }

    #[test]
    fn a_process_that_is_gone_is_known_by_its_number() {
        let identity = VmIdentity::of(&Fixture::new().host().proc, 8);
        assert_eq!(is(&identity), ["", "pid-8", "", ""]);
    }
}
