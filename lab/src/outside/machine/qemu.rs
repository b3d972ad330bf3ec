// SPDX-License-Identifier: GPL-2.0-only
//! L1 as a QEMU command line, for the machines `fast` (emulation) and `hardware` (KVM). QEMU is the image's.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::{Devices, Kind, Machine, Media, Running, inherited, spawn};

pub(super) const DEVICES: Devices = Devices {
    root: "/dev/vda",
    out: "/dev/vdb",
    guest_image: "/dev/vdc",
    stdout: "/dev/vport*p1",
    control: "/dev/vport*p2",
};

/// Starts QEMU as L1.
///
/// # Errors
/// When it cannot be started.
pub(super) fn start(machine: &Machine<'_>, media: &Media<'_>) -> Result<Running> {
    let [console, stdout, control] = [socket_pair()?, socket_pair()?, socket_pair()?];
    let mut command = machine.image.command("usr/bin/qemu-system-x86_64");
    set_machine(&mut command, machine, media);
    command
        .arg("-chardev")
        .arg(format!("socket,id=console,fd={}", console.1.as_raw_fd()));
    command.args(["-serial", "chardev:console", "-device", "virtio-serial-pci"]);
    // The numbers are those of DEVICES.
    for (number, name, port) in [(1, "stdout", &stdout), (2, "control", &control)] {
        command
            .arg("-chardev")
            .arg(format!("socket,id={name},fd={}", port.1.as_raw_fd()));
        command.arg("-device").arg(format!(
            "virtserialport,nr={number},chardev={name},name=cohort.{name}"
        ));
    }
    let inherits = [&console.1, &stdout.1, &control.1, media.initrd, media.out];
    let process = spawn(command, &inherits, media.log)?;
    Ok(Running {
        process,
        console: console.0,
        stdout: stdout.0,
        control: control.0,
        far_end: None,
    })
}

fn set_machine(command: &mut Command, machine: &Machine<'_>, media: &Media<'_>) {
    let (cpu_model, accelerator) = match machine.kind {
        Kind::Hardware => ("host", "kvm"),
        Kind::Exact | Kind::Fast => ("max", "tcg,thread=multi"),
    };
    let tree = &machine.image.tree;
    command
        .args(["-nodefaults", "-no-user-config", "-no-reboot"])
        .args(["-display", "none", "-nic", "none"]);
    command.arg("-L").arg(tree.join("usr/share/qemu"));
    command.arg("-L").arg(tree.join("usr/share/seabios"));
    command.args(["-machine", "q35", "-cpu", cpu_model, "-accel", accelerator]);
    let topology = machine.topology;
    command
        .arg("-smp")
        .arg(format!("{},{topology}", topology.cpus()));
    command.arg("-m").arg(format!("{}M", machine.memory_mib));
    command.arg("-kernel").arg(&machine.kernel.vmlinux);
    let initrd = inherited(media.initrd.as_raw_fd());
    command.arg("-initrd").arg(initrd);
    command.arg("-append").arg(machine.kernel_parameters());
    // In the order of DEVICES.
    add_disk(command, "root", &machine.image.root, true);
    let out = inherited(media.out.as_raw_fd());
    add_disk(command, "out", Path::new(&out), false);
    if let Some(guest_image) = machine.guest_image {
        add_disk(command, "guest", guest_image, true);
    }
}

fn add_disk(command: &mut Command, id: &str, file: &Path, readonly: bool) {
    let readonly = if readonly { "on" } else { "off" };
    let drive = format!(
        "if=none,id={id},format=raw,readonly={readonly},file={}",
        escape(file)
    );
    command.arg("-drive").arg(drive);
    command
        .arg("-device")
        .arg(format!("virtio-blk-pci,drive={id}"));
}

/// The frequency of this machine's TSC in kHz, which is also that of the TSC that QEMU emulates. Measured for 50 ms, to some
/// 0.01 %.
pub(super) fn tsc_khz() -> u64 {
    let (begin, first) = read_clocks();
    thread::sleep(Duration::from_millis(50));
    let (end, last) = read_clocks();
    let elapsed_ns = (end - begin).as_nanos();
    (u128::from(last - first) * 1_000_000 / elapsed_ns) as u64
}

/// The kernel's clock and the TSC at nearly the same time: of ten readings the one that took the least time, so that this
/// thread was not interrupted between the two.
fn read_clocks() -> (Instant, u64) {
    let read = |_| {
        let begin = Instant::now();
        // SAFETY: each x86-64 CPU has the instruction, and Linux allows it.
        let ticks = unsafe { core::arch::x86_64::_rdtsc() };
        (begin.elapsed(), begin, ticks)
    };
    let (_, begin, ticks) = (0..10).map(read).min().expect("ten readings");
    (begin, ticks)
}

/// QEMU's option parser reads a doubled comma as one that is part of the value.
fn escape(path: &Path) -> String {
    path.to_string_lossy().replace(',', ",,")
}

/// Our end and QEMU's.
fn socket_pair() -> Result<(File, File)> {
    let (ours, its) = UnixStream::pair().context("No socket for QEMU of L1.")?;
    let file = |socket: UnixStream| File::from(OwnedFd::from(socket));
    Ok((file(ours), file(its)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tsc_has_one_frequency() {
        let (first, second) = (tsc_khz(), tsc_khz());
        assert!(
            first.abs_diff(second) < first / 1000,
            "{first} and {second} kHz"
        );
        assert!((500_000..10_000_000).contains(&first), "{first} kHz");
    }
}
