// SPDX-License-Identifier: GPL-2.0-only
//! The guest's memory and the state in which its vCPUs begin.
//!
//! Guest-physical memory, identity-mapped by 2 MiB pages that user mode may use as well:
//!
//! | from | what |
//! |---|---|
//! | 0x1000 | page tables: PML4, PDPT, one directory per GiB |
//! | 0x5000 | interrupt descriptor table |
//! | 0x6000 | segment descriptor table |
//! | 0x8000 + 0x1000 n | vCPU n: task state segment below, kernel stack from the top |
//! | 0x108000 | code: handlers, then programs |
//! | 1 GiB | the state file |
//!
//! Every vCPU begins in 64-bit mode at CPL 0, with x2APIC on: there is no start-up code, and an IPI that arrives before
//! its receiver runs for the first time is kept by KVM. Not here: threads and exits, which are in [`crate::vmm`].

use std::collections::HashMap;
use std::mem::{ManuallyDrop, offset_of};

use anyhow::{Context, Result, bail, ensure};
use kvm_bindings::{
    CpuId, KVM_APIC_REG_SIZE, KVM_MAX_CPUID_ENTRIES, KVM_MP_STATE_RUNNABLE, Msrs, kvm_dtable,
    kvm_enable_cap, kvm_lapic_state, kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_segment,
    kvm_userspace_memory_region,
};
use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};
use memmap2::{MmapMut, MmapRaw};

use crate::Spec;
use crate::code::{
    self, KERNEL_CODE, KERNEL_DATA, Rates, SPURIOUS_VECTOR, TIMER_VECTOR, USER_CODE, USER_DATA,
};
use crate::layout::{Vcpu, vcpu_offset};
use crate::program::Program;
use crate::shared::SharedTable;

const PML4: usize = 0x1000;
const PDPT: usize = 0x2000;
const DIRECTORIES: usize = 0x3000;
const IDT: usize = 0x5000;
const GDT: usize = 0x6000;
const VCPUS: usize = 0x8000;
const VCPU_STRIDE: usize = 0x1000;
const CODE: usize = VCPUS + crate::layout::MAX_VCPUS * VCPU_STRIDE;
/// Where the guest sees the state file.
const STATE: usize = 1 << 30;
const GIB_MAPPED: usize = 2;
const MIB: usize = 1 << 20;
/// Largest `--memory-mib`: up to the state file.
pub const MAX_MEMORY_MIB: u64 = (STATE / MIB) as u64;
/// Smallest `--memory-mib`: the tables, 256 vCPUs and close to 1 MiB of code.
pub const MIN_MEMORY_MIB: u64 = 2;

const PRESENT_WRITABLE_USER: u64 = 0b111;
const LARGE_PAGE: u64 = 1 << 7;
const TSS_BYTES: u32 = 104;
const TSS_RSP0: usize = 4;
const CR0: u64 = 1 | 1 << 1 | 1 << 4 | 1 << 5 | 1 << 16 | 1 << 31; // PE MP ET NE WP PG
const CR4_PAE: u64 = 1 << 5;
const EFER: u64 = 1 << 8 | 1 << 10; // LME LMA
const RFLAGS: u64 = 1 << 1 | 1 << 9; // reserved, IF
const APIC_BASE: u64 = 0xfee0_0000 | 1 << 11 | 1 << 10; // enabled, x2APIC
const APIC_BASE_BSP: u64 = 1 << 8;
/// Where KVM is to write steal time, and that it is to (bit 0).
const MSR_KVM_STEAL_TIME: u32 = 0x4b56_4d03;
const APIC_SPURIOUS: usize = 0xf0;
const APIC_SOFTWARE_ENABLE: u32 = 1 << 8;
const APIC_LVT_TIMER: usize = 0x320;
const APIC_TSC_DEADLINE: u32 = 2 << 17;
/// Intel hosts want three pages for real mode, outside of the guest's memory, even if it is never used.
const INTEL_TSS: usize = 0xfffb_d000;
/// First CPUID leaf of hypervisors, and their last: KVM's paravirtual features, which no program uses.
const HYPERVISOR_LEAVES: std::ops::Range<u32> = 0x4000_0000..0x4001_0000;
const X2APIC_API_FLAGS: u64 = (kvm_bindings::KVM_X2APIC_API_USE_32BIT_IDS
    | kvm_bindings::KVM_X2APIC_API_DISABLE_BROADCAST_QUIRK) as u64;

/// A VM whose vCPUs are ready to run.
pub struct Machine {
    /// The vCPUs, by index.
    pub vcpus: Vec<VcpuFd>,
    /// TSC ticks per millisecond.
    pub tsc_khz: u64,
}

/// What a machine is made from; program n is that of vCPU n.
pub struct Plan<'a> {
    /// Memory size, passed-through exits and window.
    pub spec: &'a Spec,
    /// One program per vCPU.
    pub programs: &'a [Program],
    /// Their shared names.
    pub shared: &'a SharedTable,
    /// Iterations of `compute` per millisecond.
    pub iterations_per_ms: u64,
}

impl Machine {
    /// Creates the VM and its vCPUs, with `state` mapped into the guest.
    pub fn create(kvm: &Kvm, plan: &Plan, state: &'static MmapRaw) -> Result<Self> {
        let vm = create_vm(kvm, plan.spec)?;
        let vcpus = create_vcpus(&vm, plan.programs.len())?;
        let tsc_khz = u64::from(
            vcpus[0]
                .get_tsc_khz()
                .context("KVM does not tell the rate of the guest's TSC")?,
        );
        let rates = Rates {
            iterations_per_ms: plan.iterations_per_ms,
            tsc_khz,
            pause_window: plan
                .spec
                .pause_window
                .to_count(plan.iterations_per_ms)
                .max(1),
        };
        // KVM uses the memory as long as any vCPU runs, and vCPUs run until the process ends: never unmapped.
        let mut ram = MmapMut::map_anon(plan.spec.memory_mib as usize * MIB)
            .map(ManuallyDrop::new)
            .context("there is not enough memory for the guest's RAM; lower --memory-mib")?;
        write_tables(&mut ram, vcpus.len());
        let entries = write_code(&mut ram, plan, rates)?;
        map_memory(&vm, &ram, state)?;
        let cpuid = supported_cpuid(kvm)?;
        for (index, (vcpu, entry)) in vcpus.iter().zip(entries).enumerate() {
            set_up_vcpu(vcpu, index, entry, &cpuid)
                .with_context(|| format!("KVM refuses to set up vCPU {index}"))?;
        }
        Ok(Self { vcpus, tsc_khz })
    }
}

/// A VM with a vCPU that never runs, until it is dropped.
///
/// KVM rewrites branches of its own code when the first vCPU comes whose APIC is not enabled yet, and when the last such
/// one has gone or enabled it: with each VM that starts. While there is one of these it does not, which spares emulated
/// hosts a fault of QEMU (see the lab's `console.rs`).
pub struct StillVm {
    _vcpu: VcpuFd,
    _vm: VmFd,
}

impl StillVm {
    /// Creates it.
    ///
    /// # Errors
    /// When KVM is not there or refuses.
    pub fn create() -> Result<Self> {
        let kvm = Kvm::new().context("/dev/kvm cannot be opened")?;
        let vm = kvm.create_vm().context("KVM creates no VM")?;
        vm.create_irq_chip()
            .context("KVM creates no in-kernel APIC")?;
        let vcpu = vm.create_vcpu(0).context("KVM creates no vCPU")?;
        Ok(Self {
            _vcpu: vcpu,
            _vm: vm,
        })
    }
}

fn create_vm(kvm: &Kvm, spec: &Spec) -> Result<VmFd> {
    let vm = kvm
        .create_vm()
        .context("KVM creates no VM; is another hypervisor using the CPU?")?;
    ensure!(
        vm.check_extension(Cap::TscDeadlineTimer),
        "this KVM has no TSC deadline timer, which micro guests need: use a host with KVM of Linux 4 or later"
    );
    vm.set_tss_address(INTEL_TSS)
        .context("KVM refuses the address of the task state segment")?;
    enable(
        &vm,
        kvm_bindings::KVM_CAP_X2APIC_API,
        X2APIC_API_FLAGS,
        "32-bit x2APIC ids",
    )?;
    let mut passed_through = 0;
    if spec.hlt_passthrough {
        passed_through |= kvm_bindings::KVM_X86_DISABLE_EXITS_HLT;
    }
    if spec.pause_passthrough {
        passed_through |= kvm_bindings::KVM_X86_DISABLE_EXITS_PAUSE;
    }
    if passed_through != 0 {
        let cap = kvm_bindings::KVM_CAP_X86_DISABLE_EXITS;
        let offered = u32::try_from(vm.check_extension_raw(cap.into())).unwrap_or(0);
        ensure!(
            offered & passed_through == passed_through,
            "this host's KVM cannot pass HLT or PAUSE through (it offers {offered:#x}, {passed_through:#x} is asked \
             for): leave out --hlt-passthrough or --pause-passthrough"
        );
        enable(&vm, cap, passed_through.into(), "HLT or PAUSE without exit")?;
    }
    vm.create_irq_chip()
        .context("KVM creates no in-kernel APIC")?;
    Ok(vm)
}

fn enable(vm: &VmFd, cap: u32, flags: u64, what: &str) -> Result<()> {
    let cap = kvm_enable_cap {
        cap,
        args: [flags, 0, 0, 0],
        ..Default::default()
    };
    vm.enable_cap(&cap)
        .with_context(|| format!("KVM refuses {what}"))
}

fn create_vcpus(vm: &VmFd, count: usize) -> Result<Vec<VcpuFd>> {
    let create = |index| {
        let most = vm.check_extension_int(Cap::MaxVcpus);
        vm.create_vcpu(index as u64).with_context(|| {
            format!("KVM creates no vCPU {index} of {count} (it allows {most} in a VM)")
        })
    };
    (0..count).map(create).collect()
}

fn map_memory(vm: &VmFd, ram: &ManuallyDrop<MmapMut>, state: &'static MmapRaw) -> Result<()> {
    let regions = [
        (0, ram.as_ptr(), ram.len()),
        (STATE, state.as_mut_ptr().cast_const(), state.len()),
    ];
    for (slot, (address, memory, size)) in regions.into_iter().enumerate() {
        let region = kvm_userspace_memory_region {
            slot: slot as u32,
            flags: 0,
            guest_phys_addr: address as u64,
            memory_size: size as u64,
            userspace_addr: memory as u64,
        };
        // SAFETY: the memory is mapped with this size until the process ends. The guest changes it at any time; this
        // module looks at it before the start only, and all others through atomics.
        unsafe { vm.set_user_memory_region(region) }.context("KVM refuses the guest's memory")?;
    }
    Ok(())
}

/// CPUID as the host's KVM supports it, less paravirtual features.
fn supported_cpuid(kvm: &Kvm) -> Result<CpuId> {
    let mut cpuid = kvm
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .context("KVM does not tell the CPU features it supports")?;
    cpuid.retain(|entry| !HYPERVISOR_LEAVES.contains(&entry.function));
    Ok(cpuid)
}

fn set_up_vcpu(vcpu: &VcpuFd, index: usize, entry: u64, cpuid: &CpuId) -> Result<()> {
    vcpu.set_cpuid2(&own_cpuid(cpuid, index as u32))
        .context("its CPUID")?;
    let mut sregs = vcpu.get_sregs().context("its special registers")?;
    sregs.cs = segment(KERNEL_CODE, 0xb, true);
    sregs.ss = segment(KERNEL_DATA, 0x3, false);
    (sregs.ds, sregs.es, sregs.fs, sregs.gs) = (sregs.ss, sregs.ss, sregs.ss, sregs.ss);
    sregs.tr = task_state(index);
    sregs.ldt = kvm_segment {
        unusable: 1,
        type_: 2,
        ..Default::default()
    };
    sregs.gdt = kvm_dtable {
        base: GDT as u64,
        limit: (GDT_ENTRIES.len() * 8 - 1) as u16,
        ..Default::default()
    };
    sregs.idt = kvm_dtable {
        base: IDT as u64,
        limit: 0xfff,
        ..Default::default()
    };
    (sregs.cr0, sregs.cr3, sregs.cr4, sregs.efer) = (CR0, PML4 as u64, CR4_PAE, EFER);
    sregs.apic_base = APIC_BASE | if index == 0 { APIC_BASE_BSP } else { 0 };
    vcpu.set_sregs(&sregs).context("its special registers")?;
    let regs = kvm_regs {
        rip: entry,
        rsp: stack_top(index),
        rflags: RFLAGS,
        r14: STATE as u64,
        r15: (STATE + vcpu_offset(index)) as u64,
        ..Default::default()
    };
    vcpu.set_regs(&regs).context("its registers")?;
    let mut apic = vcpu.get_lapic().context("its APIC")?;
    set_apic(
        &mut apic,
        APIC_SPURIOUS,
        APIC_SOFTWARE_ENABLE | u32::from(SPURIOUS_VECTOR),
    );
    set_apic(
        &mut apic,
        APIC_LVT_TIMER,
        APIC_TSC_DEADLINE | u32::from(TIMER_VECTOR),
    );
    vcpu.set_lapic(&apic).context("its APIC")?;
    let steal_time = STATE + vcpu_offset(index) + offset_of!(Vcpu, steal_time);
    let msr = kvm_msr_entry {
        index: MSR_KVM_STEAL_TIME,
        data: steal_time as u64 | 1,
        ..Default::default()
    };
    let msrs = Msrs::from_entries(&[msr]).context("the list of its MSRs")?;
    let set = vcpu.set_msrs(&msrs).context("its MSRs")?;
    ensure!(set == 1, "this KVM does not count steal time");
    // With the in-kernel APIC all vCPUs but the first wait for a start-up IPI, which programs cannot send.
    vcpu.set_mp_state(kvm_mp_state {
        mp_state: KVM_MP_STATE_RUNNABLE,
    })
    .context("its run state")
}

/// CPUID with the vCPU's own APIC id, x2APIC and the deadline timer (which KVM emulates but does not always list).
fn own_cpuid(cpuid: &CpuId, id: u32) -> CpuId {
    let mut cpuid = cpuid.clone();
    for entry in cpuid.as_mut_slice() {
        match entry.function {
            0x1 => {
                entry.ebx = entry.ebx & 0x00ff_ffff | id << 24;
                entry.ecx |= 1 << 21 | 1 << 24;
            }
            0xb | 0x1f => entry.edx = id,
            _ => {}
        }
    }
    cpuid
}

fn set_apic(apic: &mut kvm_lapic_state, register: usize, value: u32) {
    const _: () = assert!(APIC_LVT_TIMER + 4 <= KVM_APIC_REG_SIZE as usize);
    for (byte, value) in apic.regs[register..].iter_mut().zip(value.to_le_bytes()) {
        *byte = value as _;
    }
}

fn segment(selector: u16, type_: u8, code: bool) -> kvm_segment {
    kvm_segment {
        base: 0,
        limit: u32::MAX,
        selector,
        type_,
        present: 1,
        dpl: 0,
        db: u8::from(!code),
        s: 1,
        l: u8::from(code),
        g: 1,
        ..Default::default()
    }
}

fn task_state(index: usize) -> kvm_segment {
    kvm_segment {
        base: vcpu_base(index) as u64,
        limit: TSS_BYTES - 1,
        selector: 0x28,
        type_: 0xb, // busy 64-bit TSS
        present: 1,
        ..Default::default()
    }
}

fn vcpu_base(index: usize) -> usize {
    VCPUS + index * VCPU_STRIDE
}

fn stack_top(index: usize) -> u64 {
    (vcpu_base(index) + VCPU_STRIDE) as u64
}

/// Null, kernel code and data, user data and code: the order of the selectors in [`crate::code`].
const GDT_ENTRIES: [u64; 5] = [
    0,
    0x00af_9b00_0000_ffff,
    0x00cf_9300_0000_ffff,
    0x00cf_f300_0000_ffff,
    0x00af_fb00_0000_ffff,
];
const _: () =
    assert!(KERNEL_CODE == 8 && KERNEL_DATA == 16 && USER_DATA == 24 | 3 && USER_CODE == 32 | 3);

fn write_tables(ram: &mut [u8], nr_vcpus: usize) {
    put(ram, PML4, PDPT as u64 | PRESENT_WRITABLE_USER);
    for gib in 0..GIB_MAPPED {
        let directory = DIRECTORIES + gib * 0x1000;
        put(
            ram,
            PDPT + 8 * gib,
            directory as u64 | PRESENT_WRITABLE_USER,
        );
        for page in 0..512 {
            let address = (gib << 30 | page << 21) as u64;
            put(
                ram,
                directory + 8 * page,
                address | PRESENT_WRITABLE_USER | LARGE_PAGE,
            );
        }
    }
    for (index, entry) in GDT_ENTRIES.into_iter().enumerate() {
        put(ram, GDT + 8 * index, entry);
    }
    for index in 0..nr_vcpus {
        put(ram, vcpu_base(index) + TSS_RSP0, stack_top(index));
    }
}

const _: () = assert!(DIRECTORIES + GIB_MAPPED * 0x1000 <= IDT);
const _: () = assert!(CODE < MIN_MEMORY_MIB as usize * MIB);
const _: () =
    assert!(STATE + crate::layout::state_size(crate::layout::MAX_VCPUS) <= GIB_MAPPED << 30);

fn put(ram: &mut [u8], address: usize, value: u64) {
    ram[address..address + 8].copy_from_slice(&value.to_le_bytes());
}

/// Writes handlers and programs; the entry of each vCPU's program.
fn write_code(ram: &mut [u8], plan: &Plan, rates: Rates) -> Result<Vec<u64>> {
    let handlers =
        code::handlers(CODE as u64).context("the interrupt handlers cannot be assembled")?;
    for (vector, entry) in handlers.entries.into_iter().enumerate() {
        let gate = interrupt_gate(entry, vector == usize::from(code::KERNEL_GATE));
        ram[IDT + 16 * vector..][..16].copy_from_slice(&gate);
    }
    let mut next = place(ram, CODE, &handlers.code)?;
    let mut placed: HashMap<String, u64> = HashMap::new();
    let mut entries = Vec::with_capacity(plan.programs.len());
    for (index, program) in plan.programs.iter().enumerate() {
        let key = format!("{program:?}");
        let entry = match placed.get(&key) {
            Some(entry) => *entry,
            None => {
                let code = code::program(program, plan.shared, rates, next as u64)
                    .with_context(|| format!("the program of vCPU {index} cannot be assembled"))?;
                let entry = next as u64;
                next = place(ram, next, &code)?;
                placed.insert(key, entry);
                entry
            }
        };
        entries.push(entry);
    }
    Ok(entries)
}

/// Copies code to `address`; where the next piece goes, at the beginning of a cache line.
fn place(ram: &mut [u8], address: usize, code: &[u8]) -> Result<usize> {
    let end = address + code.len();
    if end > ram.len() {
        bail!(
            "the programs do not fit into {} MiB of memory: raise --memory-mib",
            ram.len() / MIB
        );
    }
    ram[address..end].copy_from_slice(code);
    Ok(end.next_multiple_of(64))
}

/// A 64-bit interrupt gate; user mode may only use it by `int` if `from_user`.
fn interrupt_gate(entry: u64, from_user: bool) -> [u8; 16] {
    let attributes: u64 = if from_user { 0xee00 } else { 0x8e00 };
    let low = entry & 0xffff
        | u64::from(KERNEL_CODE) << 16
        | attributes << 32
        | (entry >> 16 & 0xffff) << 48;
    let mut gate = [0; 16];
    gate[..8].copy_from_slice(&low.to_le_bytes());
    gate[8..].copy_from_slice(&(entry >> 32).to_le_bytes());
    gate
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gate_holds_its_entry_and_privilege() {
        let gate = interrupt_gate(0x1_2345_6789, true);
        assert_eq!(
            gate,
            [
                0x89, 0x67, 0x08, 0, 0, 0xee, 0x45, 0x23, 1, 0, 0, 0, 0, 0, 0, 0
            ]
        );
        assert_eq!(interrupt_gate(0, false)[5], 0x8e);
    }

    #[test]
    fn memory_is_identity_mapped() {
        let mut ram = vec![0; 2 * MIB];
        write_tables(&mut ram, 256);
        let entry =
            |address: usize| u64::from_le_bytes(ram[address..address + 8].try_into().unwrap());
        assert_eq!(entry(PML4) & !0xfff, PDPT as u64);
        assert_eq!(entry(PDPT + 8) & !0xfff, DIRECTORIES as u64 + 0x1000);
        assert_eq!(
            entry(DIRECTORIES + 0x1000 + 8) & !0xfff,
            STATE as u64 + (2 << 20)
        );
        assert_eq!(entry(vcpu_base(255) + TSS_RSP0), CODE as u64);
    }

    #[test]
    fn equal_programs_share_their_code() {
        let programs: Vec<Program> = ["loop: lock; unlock", "loop: lock; unlock", "loop: halt"]
            .iter()
            .map(|text| text.parse().unwrap())
            .collect();
        let shared = SharedTable::collect(&programs).unwrap();
        let spec = Spec::new("a");
        let plan = Plan {
            spec: &spec,
            programs: &programs,
            shared: &shared,
            iterations_per_ms: 1,
        };
        let rates = Rates {
            iterations_per_ms: 1,
            tsc_khz: 1,
            pause_window: 1,
        };
        let entries = write_code(&mut vec![0; 2 * MIB], &plan, rates).unwrap();
        assert_eq!(entries[0], entries[1]);
        assert!(entries[2] > entries[1]);
    }

    #[test]
    fn too_much_code_is_refused() {
        let error = place(&mut vec![0; MIB], MIB - 8, &[0; 9])
            .unwrap_err()
            .to_string();
        assert_eq!(
            error,
            "the programs do not fit into 1 MiB of memory: raise --memory-mib"
        );
    }
}
