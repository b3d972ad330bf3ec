// SPDX-License-Identifier: GPL-2.0-only
//! A VM as libvirt makes it: with a name and an id of its own, and a cgroup per vCPU below the VM's.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use cohort::host::cgroups;
use cohort::host::paths::Host;
use cohort::process::wait::wait_for;
use cohort_lab::inside::booted::{INITRD, KERNEL, Workload};
use cohort_lab::inside::cgroup::usage_us;
use cohort_lab::inside::process::start;
use tempfile::TempDir;

use crate::Test;
use crate::host::{
    Guest, PATIENCE, Service, Subject, assert_ratio, lab, shares, start_cohort, stop_cohort,
    vm_stats, watch,
};

pub const TESTS: &[Test] = &[(
    "a_domain_of_libvirt_has_its_name_and_is_one_vm",
    named_and_whole,
)];

const NAME: &str = "web-1";
const UUID: &str = "6a4e3a0e-2f43-4b0a-9d63-6f0a3f2f7b11";
const CONFIGURATION: &str = "user = \"root\"\ngroup = \"root\"\nsecurity_driver = \"none\"\nnamespaces = []\n\
                             remember_owner = 0\nseccomp_sandbox = 0\nstdio_handler = \"file\"\n";
/// It asks QEMU what it can do before it starts the first domain.
const START_TIMEOUT: Duration = Duration::from_secs(180);

/// libvirt's daemon for QEMU, and a domain of it. Both end with this.
struct Domain {
    _daemon: Service,
    folder: TempDir,
}

impl Domain {
    fn start(vcpus: u32) -> Result<Self> {
        // The lab's image is made without what packages do when they are installed.
        append(
            "/etc/passwd",
            "libvirt-qemu:x:64055:64055::/nonexistent:/bin/false\n",
        )?;
        append("/etc/group", "libvirt-qemu:x:64055:\n")?;
        fs::create_dir_all("/etc/libvirt")?;
        fs::write("/etc/libvirt/qemu.conf", CONFIGURATION)?;
        let daemon = Service(start(Command::new("libvirtd"), &[], None)?);
        let domain = Self {
            _daemon: daemon,
            folder: tempfile::tempdir()?,
        };
        wait_for("libvirt", PATIENCE, || {
            Ok(virsh(&["version"]).is_ok().then_some(()))
        })?;
        let lab = lab()?;
        let cpus: Vec<String> = lab.guest_cpus.iter().map(u32::to_string).collect();
        let xml = format!(
            "<domain type='kvm'><name>{NAME}</name><uuid>{UUID}</uuid><memory unit='MiB'>256</memory>\
             <vcpu cpuset='{}'>{vcpus}</vcpu><os><type arch='x86_64' machine='q35'>hvm</type><kernel>{KERNEL}</kernel>\
             <initrd>{INITRD}</initrd><cmdline>{}</cmdline></os><features><acpi/><apic/></features>\
             <cpu mode='host-passthrough'/><on_reboot>destroy</on_reboot><devices>\
             <emulator>/usr/bin/qemu-system-x86_64</emulator><serial type='file'><source path='{}'/></serial>\
             <controller type='usb' model='none'/><memballoon model='none'/></devices></domain>",
            cpus.join(","),
            Workload::new("busy").kernel_parameters(),
            domain.folder.path().join("serial").display(),
        );
        let file = domain.folder.path().join("domain.xml");
        fs::write(&file, xml)?;
        virsh(&["create", &file.to_string_lossy()])?;
        Ok(domain)
    }

    /// The process of its QEMU.
    fn pid(&self) -> Result<u32> {
        let path = format!("/run/libvirt/qemu/{NAME}.pid");
        let text = fs::read_to_string(&path).with_context(|| format!("{path} cannot be read"))?;
        Ok(text.trim().parse()?)
    }

    /// The cgroup below which libvirt has made one per vCPU, and one for its QEMU's other threads.
    fn cgroup(&self) -> Result<PathBuf> {
        let host = Host::live();
        let root = cgroups::mount(&host).context("there are no cgroups of version 2")?;
        let path = cgroups::path_of(&host.proc, self.pid()?).context("its QEMU has no cgroup")?;
        let (domain, _) = path.rsplit_once('/').context("a path has a slash")?;
        Ok(root.join(domain.trim_start_matches('/')))
    }
}

impl Subject for Domain {
    fn usage_us(&self) -> Result<u64> {
        usage_us(&self.cgroup()?)
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // What has ended already is as good. The daemon goes after it.
        let _ = virsh(&["destroy", NAME]);
    }
}

fn append(path: &str, line: &str) -> Result<()> {
    let text = fs::read_to_string(path)?;
    fs::write(path, text + line).with_context(|| format!("{path} cannot be written"))
}

fn virsh(arguments: &[&str]) -> Result<String> {
    let output = Command::new("virsh")
        .args(["-c", "qemu:///system"])
        .args(arguments)
        .output()
        .context("virsh")?;
    ensure!(
        output.status.success(),
        "virsh {arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// `cohort doctor` finds a cap of the domain, and says `words`.
fn doctor_names(words: &[&str]) -> Result<()> {
    let output = Command::new("cohort")
        .args(["doctor", "--quiet"])
        .output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    let of_caps = said.lines().skip_while(|line| !line.contains("caps "));
    let of_caps: String = of_caps
        .take(3)
        .map(|line| format!("    {line}\n"))
        .collect();
    print!("{of_caps}");
    ensure!(
        words.iter().all(|word| of_caps.contains(word)),
        "the doctor does not say {words:?}:\n{said}"
    );
    Ok(())
}

/// libvirt caps each vCPU in its own cgroup; half of the CPU time that each had without is far above that.
fn quota_of_each_vcpu(domain: &Domain) -> Result<()> {
    const QUOTA_US: u64 = 15_000;
    const SECONDS: u64 = 3;
    let quota = format!("vcpu_quota={QUOTA_US}");
    virsh(&["schedinfo", NAME, "--live", "vcpu_period=100000", &quota])?;
    doctor_names(&[
        "vcpu0: 0.15 CPUs",
        "virsh schedinfo VM --live vcpu_quota=-1",
    ])?;
    for vcpu in 0..2 {
        let cgroup = domain.cgroup()?.join(format!("vcpu{vcpu}"));
        let before = usage_us(&cgroup)?;
        sleep(Duration::from_secs(SECONDS));
        let used = usage_us(&cgroup)? - before;
        println!(
            "    vCPU {vcpu} had {used} us in {SECONDS} s, its quota is {QUOTA_US} us in 0.1 s"
        );
        let quota = QUOTA_US * 10 * SECONDS;
        ensure!(
            (quota / 2..quota * 6 / 5).contains(&used),
            "vCPU {vcpu} had {used} us, but its quota is {quota} us"
        );
    }
    Ok(())
}

/// The observer calls it by libvirt's name and id; to Cohort the threads in libvirt's cgroups are one VM.
fn named_and_whole() -> Result<()> {
    let domain = Domain::start(2)?;
    let pid = domain.pid()?;
    println!("    it is in {}", domain.cgroup()?.display());
    // Both are at work, so that it has left the firmware and wants all it can get.
    let vm =
        wait_for("the domain's vCPUs", START_TIMEOUT, || {
            let vm = watch(1)?.vms.remove(&pid);
            Ok(vm.filter(|vm| {
                vm.vcpus.len() == 2 && vm.vcpus.values().all(|vcpu| vcpu.run_pct > 50.0)
            }))
        })?;
    println!("    {:?}, {:?}", vm.name, vm.identity);
    ensure!(
        vm.name == NAME && vm.identity.id == UUID && vm.identity.manager == "libvirt",
        "it is taken for {:?}",
        vm.identity
    );
    let cohort = start_cohort()?;
    let stats = vm_stats(pid)?;
    let rival = Guest::busy("rival", 2)?;
    // Both stand in cgroups of weight 100 below the topmost one.
    let (used, _) = shares(&[&domain, &rival], Duration::from_secs(3))?;
    let view = watch(1)?;
    let quota = quota_of_each_vcpu(&domain);
    stop_cohort(cohort)?;
    quota?;
    ensure!(
        stats.vcpus == 2 && stats.name == NAME,
        "Cohort takes it for {} with {} vCPUs",
        stats.name,
        stats.vcpus
    );
    // What its QEMU does besides running vCPUs is its own too. A VM per vCPU would have two thirds.
    assert_ratio(&used, &[1.0, 1.0], 0.15)?;
    let pids = [pid, rival.micro.pid() as u32];
    let entitled = pids.map(|pid| view.vms.get(&pid).map_or(0.0, |vm| vm.all.entitled_pct));
    println!("    entitled to {entitled:.1?} %");
    let sum: f64 = entitled.iter().sum();
    assert_ratio(&entitled.map(|pct| pct / sum), &[1.0, 1.0], 0.05)
}
