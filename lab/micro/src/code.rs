// SPDX-License-Identifier: GPL-2.0-only
//! Translates programs to machine code of 64-bit mode, and makes the interrupt handlers.
//!
//! Register convention. Fixed while a program runs: r15 is the vCPU's own part of the state file, r14 the beginning of
//! the state file. Kept between steps: r13 the number of interrupts at the end of the last halt, r12 the receiver's
//! count before the last IPI, rbx the TSC before the last IPI, rbp the receiver's vector entry. All others are scratch
//! for a step. Handlers save what they use, and address memory by r15 too: interrupts arrive only while a program runs.
//!
//! Programs hold no absolute address, so equal programs share their code, and the tests run it natively.
//! Not here: where code lies in the guest's memory and how a vCPU gets there, which is [`crate::machine`].

use std::mem::offset_of;

use iced_x86::code_asm::*;
use iced_x86::{BlockEncoderOptions, IcedError};

use crate::layout::{
    Fault, Header, Latency, Shared, VCPU_STRIDE, Vcpu, Vector, Wakeups, shared_offset, vcpu_offset,
    vector_offset,
};
use crate::program::{Program, Step, Until};
use crate::shared::SharedTable;

/// Software interrupt by which a program returns from user mode to kernel mode.
pub const KERNEL_GATE: u8 = 0x20;
/// Vector of the local APIC's timer.
pub const TIMER_VECTOR: u8 = 0xec;
/// Vector of the local APIC's spurious interrupt.
pub const SPURIOUS_VECTOR: u8 = 0xff;
/// I/O port that tells the VMM of an exception.
pub const FAULT_PORT: u16 = 0xf4;
/// Selectors of the descriptor table that [`crate::machine`] builds.
pub const KERNEL_CODE: u16 = 0x08;
/// Stack and data segment at CPL 0.
pub const KERNEL_DATA: u16 = 0x10;
/// Stack and data segment at CPL 3.
pub const USER_DATA: u16 = 0x18 | 3;
/// Code segment at CPL 3.
pub const USER_CODE: u16 = 0x20 | 3;

const MSR_X2APIC_EOI: u32 = 0x80b;
const MSR_X2APIC_ICR: u32 = 0x830;
/// In the ICR: to all but the sender, whatever the destination says.
const ALL_BUT_SELF: u32 = 0b11 << 18;
const MSR_TSC_DEADLINE: u32 = 0x6e0;
const RUN_STATE_RUNNING: i32 = 1;
const RUN_STATE_FINISHED: i32 = 2;
/// Bytes that an interrupt from user mode pushes besides the instruction pointer: CS, RFLAGS, RSP and SS.
const FRAME_BYTES_AFTER_RIP: i32 = 32;
/// Exceptions that push an error code, one bit each: #DF, #TS, #NP, #SS, #GP, #PF, #AC, #CP, #VC and #SX.
const HAS_ERROR_CODE: u32 = 1 << 8 | 0x1f << 10 | 1 << 17 | 1 << 21 | 1 << 29 | 1 << 30;
const EXCEPTIONS: u8 = 32;

/// What turns times into counts.
#[derive(Clone, Copy, Debug)]
pub struct Rates {
    /// Iterations of `compute` per millisecond.
    pub iterations_per_ms: u64,
    /// TSC ticks per millisecond.
    pub tsc_khz: u64,
    /// Iterations of a spin loop from one PAUSE to the next, at least 1.
    pub pause_window: u64,
}

/// The interrupt handlers.
pub struct Handlers {
    /// Their machine code.
    pub code: Vec<u8>,
    /// Address of the handler of each vector.
    pub entries: [u64; 256],
}

/// Offset of a field of the vCPU's counters, as the assembler wants it.
macro_rules! vcpu {
    ($($field:tt)+) => { r15 + offset_of!(Vcpu, $($field)+) as i32 };
}

/// Machine code of `program`, to be placed at `address`; it is entered at its beginning, at CPL 0.
pub fn program(
    program: &Program,
    shared: &SharedTable,
    rates: Rates,
    address: u64,
) -> Result<Vec<u8>, IcedError> {
    let mut emitter = Emitter::new(shared, rates)?;
    emitter
        .asm
        .mov(qword_ptr(vcpu!(run_state)), RUN_STATE_RUNNING)?;
    emitter.passes(program)?;
    if program.loop_start().is_none() {
        emitter.halt_for_good()?;
    }
    emitter.asm.assemble(address)
}

/// All interrupt handlers, to be placed at `address`.
pub fn handlers(address: u64) -> Result<Handlers, IcedError> {
    let mut asm = CodeAssembler::new(64)?;
    let mut labels = Vec::new();
    let mut exception = asm.create_label();
    let mut interrupt = asm.create_label();
    for vector in 0..=255u8 {
        let mut entry = asm.create_label();
        asm.set_label(&mut entry)?;
        labels.push(entry);
        match vector {
            0..EXCEPTIONS => exception_entry(&mut asm, vector, exception)?,
            KERNEL_GATE => return_to_kernel(&mut asm)?,
            SPURIOUS_VECTOR => asm.iretq()?,
            _ => {
                asm.push(i32::from(vector))?;
                asm.jmp(interrupt)?;
            }
        }
    }
    asm.set_label(&mut exception)?;
    report_exception(&mut asm)?;
    asm.set_label(&mut interrupt)?;
    answer_interrupt(&mut asm)?;
    let result =
        asm.assemble_options(address, BlockEncoderOptions::RETURN_NEW_INSTRUCTION_OFFSETS)?;
    let mut entries = [0; 256];
    for (entry, label) in entries.iter_mut().zip(&labels) {
        *entry = result.label_ip(label)?;
    }
    Ok(Handlers {
        code: result.inner.code_buffer,
        entries,
    })
}

/// Leaves the vector above an error code on the stack, for every exception alike.
fn exception_entry(
    asm: &mut CodeAssembler,
    vector: u8,
    common: CodeLabel,
) -> Result<(), IcedError> {
    if HAS_ERROR_CODE & 1 << vector == 0 {
        asm.push(0i32)?;
    }
    asm.push(i32::from(vector))?;
    asm.jmp(common)
}

/// Writes the exception down for the VMM and tells it.
fn report_exception(asm: &mut CodeAssembler) -> Result<(), IcedError> {
    let fault = offset_of!(Vcpu, fault) as i32;
    asm.pop(qword_ptr(r15 + fault + offset_of!(Fault, vector) as i32))?;
    asm.pop(qword_ptr(r15 + fault + offset_of!(Fault, error) as i32))?;
    asm.pop(qword_ptr(r15 + fault + offset_of!(Fault, rip) as i32))?;
    asm.mov(rax, cr2)?;
    asm.mov(
        qword_ptr(r15 + fault + offset_of!(Fault, address) as i32),
        rax,
    )?;
    asm.mov(edx, u32::from(FAULT_PORT))?;
    asm.out(dx, al)?;
    // The VMM does not enter the guest again.
    asm.ud2()
}

/// Stamps, ends and counts an interrupt; the vector is on the stack. The count comes last: it is the answer that the
/// sender of an IPI waits for.
fn answer_interrupt(asm: &mut CodeAssembler) -> Result<(), IcedError> {
    asm.push(rax)?;
    asm.push(rcx)?;
    asm.push(rdx)?;
    asm.push(rsi)?;
    read_tsc(asm)?;
    asm.mov(rsi, qword_ptr(rsp + 32))?;
    asm.shl(rsi, 4u32)?;
    const _: () = assert!(size_of::<Vector>() == 1 << 4);
    let vectors = vector_offset(0) as i32;
    asm.mov(
        qword_ptr(r15 + rsi + vectors + offset_of!(Vector, last_tsc) as i32),
        rax,
    )?;
    asm.mov(ecx, MSR_X2APIC_EOI)?;
    asm.xor(eax, eax)?;
    asm.xor(edx, edx)?;
    asm.wrmsr()?;
    asm.inc(qword_ptr(vcpu!(interrupts)))?;
    asm.inc(qword_ptr(
        r15 + rsi + vectors + offset_of!(Vector, count) as i32,
    ))?;
    asm.pop(rsi)?;
    asm.pop(rdx)?;
    asm.pop(rcx)?;
    asm.pop(rax)?;
    asm.add(rsp, 8)?;
    asm.iretq()
}

/// Continues after the `int` at CPL 0, with the kernel stack empty again.
fn return_to_kernel(asm: &mut CodeAssembler) -> Result<(), IcedError> {
    asm.pop(rax)?;
    asm.add(rsp, FRAME_BYTES_AFTER_RIP)?;
    asm.sti()?;
    asm.jmp(rax)
}

/// The TSC into rax; destroys rdx.
fn read_tsc(asm: &mut CodeAssembler) -> Result<(), IcedError> {
    asm.rdtsc()?;
    asm.shl(rdx, 32u32)?;
    asm.or(rax, rdx)
}

/// Emits one program.
struct Emitter<'a> {
    asm: CodeAssembler,
    shared: &'a SharedTable,
    rates: Rates,
    user: bool,
}

impl<'a> Emitter<'a> {
    fn new(shared: &'a SharedTable, rates: Rates) -> Result<Self, IcedError> {
        Ok(Self {
            asm: CodeAssembler::new(64)?,
            shared,
            rates,
            user: false,
        })
    }

    /// All steps, and the way back to the beginning of the loop. Falls through to what follows if there is no loop.
    fn passes(&mut self, program: &Program) -> Result<(), IcedError> {
        let mut again = self.asm.create_label();
        for (index, step) in program.steps().iter().enumerate() {
            if program.loop_start() == Some(index) {
                self.asm.set_label(&mut again)?;
            }
            self.asm.mov(qword_ptr(vcpu!(step)), index as i32)?;
            self.step(step)?;
            self.asm.inc(qword_ptr(vcpu!(steps)))?;
        }
        self.asm.inc(qword_ptr(vcpu!(progress)))?;
        if program.loop_start().is_some() {
            self.asm.jmp(again)?;
        }
        Ok(())
    }

    fn step(&mut self, step: &Step) -> Result<(), IcedError> {
        match step {
            Step::Compute(amount) => self.compute(amount.to_count(self.rates.iterations_per_ms)),
            Step::Spin { flag, until } => self.spin_flag(flag, *until),
            Step::Pause(count) => self.pause(*count),
            Step::Set(flag) => {
                let value = self.value_of(flag);
                self.asm.mov(qword_ptr(value), 1)
            }
            Step::Clear(flag) => {
                let value = self.value_of(flag);
                self.asm.mov(qword_ptr(value), 0)
            }
            Step::Add(flag) => {
                let value = self.value_of(flag);
                self.asm.lock().inc(qword_ptr(value))
            }
            Step::Lock(name) => self.lock(name),
            // Only the holder writes the ticket that is served, so no bus lock is needed.
            Step::Unlock(name) => {
                let value = self.value_of(name);
                self.asm.inc(qword_ptr(value))
            }
            Step::Barrier(name) => self.barrier(name),
            Step::SleepingBarrier { vector, name } => self.sleeping_barrier(*vector, name),
            Step::Ipi { vcpu, vector } => self.ipi(*vcpu, *vector),
            Step::WaitAnswer => self.wait_answer(),
            Step::Shootdown(vector) => self.shootdown(*vector),
            Step::Halt => self.halt(),
            Step::Timer(amount) => self.timer(amount.to_count(self.rates.tsc_khz)),
            Step::Sleep(amount) => self.sleep(amount.to_count(self.rates.tsc_khz)),
            Step::User => self.enter_user(),
            Step::Kernel => self.enter_kernel(),
            Step::Mask => self.asm.cli(),
            Step::Unmask => self.asm.sti(),
            Step::Stamp(slot) => self.stamp(*slot),
        }
    }

    fn value_of(&self, name: &str) -> AsmMemoryOperand {
        r14 + (self.object(name) + offset_of!(Shared, value)) as i32
    }

    fn aux_of(&self, name: &str) -> AsmMemoryOperand {
        r14 + (self.object(name) + offset_of!(Shared, aux)) as i32
    }

    fn object(&self, name: &str) -> usize {
        let (index, _) = self
            .shared
            .get(name)
            .expect("the table was collected from the programs it is used for");
        shared_offset(index)
    }

    fn compute(&mut self, iterations: u64) -> Result<(), IcedError> {
        self.asm.mov(rcx, iterations)?;
        let mut again = self.asm.create_label();
        self.asm.set_label(&mut again)?;
        self.asm.dec(rcx)?;
        self.asm.jnz(again)?;
        self.asm.mov(rcx, iterations)?;
        self.asm.add(qword_ptr(vcpu!(work)), rcx)
    }

    fn pause(&mut self, count: u64) -> Result<(), IcedError> {
        self.asm.mov(rcx, count)?;
        let mut again = self.asm.create_label();
        self.asm.set_label(&mut again)?;
        self.asm.pause()?;
        self.asm.inc(qword_ptr(vcpu!(pauses)))?;
        self.asm.dec(rcx)?;
        self.asm.jnz(again)
    }

    /// Spins until `done` jumps to the label it is given. `done` may not change r8, nor rely on its flags or on rax.
    fn spin(
        &mut self,
        mut done: impl FnMut(&mut CodeAssembler, CodeLabel) -> Result<(), IcedError>,
    ) -> Result<(), IcedError> {
        let mut window = self.asm.create_label();
        let mut again = self.asm.create_label();
        let mut end = self.asm.create_label();
        self.asm.set_label(&mut window)?;
        self.asm.mov(r8, self.rates.pause_window)?;
        self.asm.set_label(&mut again)?;
        done(&mut self.asm, end)?;
        self.asm.dec(r8)?;
        self.asm.jnz(again)?;
        self.asm.pause()?;
        self.asm.inc(qword_ptr(vcpu!(pauses)))?;
        self.asm.jmp(window)?;
        self.asm.set_label(&mut end)?;
        // A label belongs to an instruction, and the next one may have a label of its own.
        self.asm.nop()
    }

    fn spin_flag(&mut self, flag: &str, until: Until) -> Result<(), IcedError> {
        let value = self.value_of(flag);
        match until {
            Until::NonZero => self.asm.mov(edx, 1u32)?,
            Until::Round => {
                self.asm.mov(rdx, qword_ptr(vcpu!(progress)))?;
                self.asm.inc(rdx)?;
            }
        }
        self.spin(|asm, end| {
            asm.cmp(qword_ptr(value), rdx)?;
            asm.jae(end)
        })
    }

    fn lock(&mut self, name: &str) -> Result<(), IcedError> {
        let (value, aux) = (self.value_of(name), self.aux_of(name));
        self.asm.mov(edx, 1u32)?;
        self.asm.lock().xadd(qword_ptr(aux), rdx)?;
        self.spin(|asm, end| {
            asm.cmp(qword_ptr(value), rdx)?;
            asm.je(end)
        })
    }

    /// Waits spinning.
    fn barrier(&mut self, name: &str) -> Result<(), IcedError> {
        let value = self.value_of(name);
        self.meet(
            name,
            |_| Ok(()),
            |emitter| {
                emitter.spin(|asm, end| {
                    asm.cmp(qword_ptr(value), rdx)?;
                    asm.jne(end)
                })
            },
        )
    }

    /// Waits halted. Who finds the barrier open before it halts gets the wake-up all the same, as an interrupt like others.
    fn sleeping_barrier(&mut self, vector: u8, name: &str) -> Result<(), IcedError> {
        let value = self.value_of(name);
        self.meet(
            name,
            |emitter| emitter.ipi_to_others(vector),
            |emitter| {
                emitter.halt_until(|asm, end| {
                    asm.cmp(qword_ptr(value), rdx)?;
                    asm.jne(end)
                })
            },
        )
    }

    /// The last to arrive resets the count, opens the barrier and does `opened`; the others do `wait_until_open`, until its value is
    /// not rdx any more.
    fn meet(
        &mut self,
        name: &str,
        opened: impl FnOnce(&mut Self) -> Result<(), IcedError>,
        wait_until_open: impl FnOnce(&mut Self) -> Result<(), IcedError>,
    ) -> Result<(), IcedError> {
        let (value, aux) = (self.value_of(name), self.aux_of(name));
        let participants = self
            .shared
            .get(name)
            .map_or(1, |(_, object)| object.participants);
        let mut wait = self.asm.create_label();
        let mut done = self.asm.create_label();
        self.asm.mov(rdx, qword_ptr(value))?;
        self.asm.mov(eax, 1u32)?;
        self.asm.lock().xadd(qword_ptr(aux), rax)?;
        self.asm.inc(rax)?;
        self.asm.cmp(rax, participants as i32)?;
        self.asm.jne(wait)?;
        self.asm.mov(qword_ptr(aux), 0)?;
        self.asm.inc(qword_ptr(value))?;
        opened(self)?;
        self.asm.jmp(done)?;
        self.asm.set_label(&mut wait)?;
        self.asm.nop()?;
        wait_until_open(self)?;
        self.asm.set_label(&mut done)?;
        self.asm.nop()
    }

    fn ipi(&mut self, vcpu: usize, vector: u8) -> Result<(), IcedError> {
        self.asm.lea(
            rbp,
            qword_ptr(r14 + (vcpu_offset(vcpu) + vector_offset(vector)) as i32),
        )?;
        self.asm
            .mov(r12, qword_ptr(rbp + offset_of!(Vector, count) as i32))?;
        self.asm.inc(qword_ptr(vcpu!(ipis_sent)))?;
        read_tsc(&mut self.asm)?;
        self.asm.mov(rbx, rax)?;
        self.asm.mov(ecx, MSR_X2APIC_ICR)?;
        self.asm.mov(edx, vcpu as u32)?;
        self.asm.mov(eax, u32::from(vector))?;
        self.asm.wrmsr()
    }

    /// Sends an IPI to all other vCPUs of the guest.
    fn ipi_to_others(&mut self, vector: u8) -> Result<(), IcedError> {
        let nr_vcpus = dword_ptr(r14 + offset_of!(Header, nr_vcpus) as i32);
        self.asm.mov(eax, nr_vcpus)?;
        self.asm.dec(rax)?;
        self.asm.add(qword_ptr(vcpu!(ipis_sent)), rax)?;
        self.asm.mov(ecx, MSR_X2APIC_ICR)?;
        self.asm.xor(edx, edx)?;
        self.asm.mov(eax, ALL_BUT_SELF | u32::from(vector))?;
        self.asm.wrmsr()
    }

    /// Nobody sends this vector to this vCPU, so its own count of it is free to count what it has sent: what the counts
    /// of all others are to become.
    fn shootdown(&mut self, vector: u8) -> Result<(), IcedError> {
        let count = (vector_offset(vector) + offset_of!(Vector, count)) as i32;
        self.asm.inc(qword_ptr(r15 + count))?;
        self.asm.mov(r9, qword_ptr(r15 + count))?;
        read_tsc(&mut self.asm)?;
        self.asm.mov(r10, rax)?;
        self.ipi_to_others(vector)?;
        let mut next = self.asm.create_label();
        self.asm.lea(r11, qword_ptr(r14 + vcpu_offset(0) as i32))?;
        self.asm
            .mov(edi, dword_ptr(r14 + offset_of!(Header, nr_vcpus) as i32))?;
        self.asm.set_label(&mut next)?;
        self.asm.nop()?;
        self.spin(|asm, end| {
            asm.cmp(qword_ptr(r11 + count), r9)?;
            asm.jae(end)
        })?;
        self.asm.add(r11, VCPU_STRIDE as i32)?;
        self.asm.dec(edi)?;
        self.asm.jnz(next)?;
        // All that were sent are answered.
        self.asm.mov(rax, qword_ptr(vcpu!(ipis_sent)))?;
        self.asm.mov(qword_ptr(vcpu!(ipis_answered)), rax)?;
        read_tsc(&mut self.asm)?;
        self.asm.sub(rax, r10)?;
        self.record(offset_of!(Vcpu, round_trip) as i32)
    }

    fn wait_answer(&mut self) -> Result<(), IcedError> {
        self.spin(|asm, end| {
            asm.cmp(qword_ptr(rbp + offset_of!(Vector, count) as i32), r12)?;
            asm.jne(end)
        })?;
        self.asm.inc(qword_ptr(vcpu!(ipis_answered)))?;
        read_tsc(&mut self.asm)?;
        self.asm.sub(rax, rbx)?;
        self.record(offset_of!(Vcpu, round_trip) as i32)?;
        // Another vCPU's IPI of the same vector may have been handled between the count and the send: zero, then.
        self.asm.xor(edx, edx)?;
        self.asm
            .mov(rax, qword_ptr(rbp + offset_of!(Vector, last_tsc) as i32))?;
        self.asm.sub(rax, rbx)?;
        self.asm.cmovb(rax, rdx)?;
        self.record(offset_of!(Vcpu, delivery) as i32)
    }

    /// Counts rax into the latency at offset `latency` of the vCPU.
    fn record(&mut self, latency: i32) -> Result<(), IcedError> {
        let at = |field: usize| qword_ptr(r15 + latency + field as i32);
        let asm = &mut self.asm;
        let mut not_min = asm.create_label();
        let mut not_max = asm.create_label();
        asm.add(at(offset_of!(Latency, sum)), rax)?;
        asm.inc(at(offset_of!(Latency, count)))?;
        asm.cmp(rax, at(offset_of!(Latency, min)))?;
        asm.jae(not_min)?;
        asm.mov(at(offset_of!(Latency, min)), rax)?;
        asm.set_label(&mut not_min)?;
        asm.cmp(rax, at(offset_of!(Latency, max)))?;
        asm.jbe(not_max)?;
        asm.mov(at(offset_of!(Latency, max)), rax)?;
        asm.set_label(&mut not_max)?;
        // BSR of zero is undefined; zero belongs to bucket 0 as one does.
        asm.or(rax, 1)?;
        asm.bsr(rdx, rax)?;
        asm.inc(qword_ptr(
            r15 + rdx * 8 + (latency + offset_of!(Latency, histogram) as i32),
        ))
    }

    /// Executes HLT until `woken` jumps to the label it is given. `woken` runs with interrupts disabled, and STI
    /// delays them by one instruction: an interrupt that comes after the check wakes the HLT.
    fn halt_until(
        &mut self,
        woken: impl FnOnce(&mut CodeAssembler, CodeLabel) -> Result<(), IcedError>,
    ) -> Result<(), IcedError> {
        let mut again = self.asm.create_label();
        let mut end = self.asm.create_label();
        self.asm.set_label(&mut again)?;
        self.asm.cli()?;
        woken(&mut self.asm, end)?;
        self.asm.inc(qword_ptr(vcpu!(halts)))?;
        self.asm.sti()?;
        self.asm.hlt()?;
        self.asm.jmp(again)?;
        self.asm.set_label(&mut end)?;
        // Still without interrupts: one that comes from here on counts for the next halt.
        self.asm.mov(r13, qword_ptr(vcpu!(interrupts)))?;
        self.asm.sti()
    }

    fn halt(&mut self) -> Result<(), IcedError> {
        self.halt_until(|asm, end| {
            asm.cmp(r13, qword_ptr(vcpu!(interrupts)))?;
            asm.jne(end)
        })
    }

    /// Leaves the deadline in r9.
    fn timer(&mut self, ticks: u64) -> Result<(), IcedError> {
        read_tsc(&mut self.asm)?;
        self.asm.mov(rdx, ticks)?;
        self.asm.add(rax, rdx)?;
        self.asm.mov(r9, rax)?;
        self.asm.mov(rdx, rax)?;
        self.asm.shr(rdx, 32u32)?;
        self.asm.mov(ecx, MSR_TSC_DEADLINE)?;
        self.asm.wrmsr()
    }

    fn sleep(&mut self, ticks: u64) -> Result<(), IcedError> {
        let fired = qword_ptr(r15 + vector_offset(TIMER_VECTOR) as i32);
        self.asm.mov(rsi, fired)?;
        self.timer(ticks)?;
        self.halt_until(|asm, end| {
            asm.cmp(rsi, fired)?;
            asm.jne(end)
        })?;
        read_tsc(&mut self.asm)?;
        // KVM may fire it a moment early: not late, then.
        self.asm.xor(edx, edx)?;
        self.asm.sub(rax, r9)?;
        self.asm.cmovb(rax, rdx)?;
        self.record_wakeup()
    }

    /// Counts rax into the histogram of wake-ups: four buckets per power of two.
    fn record_wakeup(&mut self) -> Result<(), IcedError> {
        let histogram = (offset_of!(Vcpu, wakeups) + offset_of!(Wakeups, histogram)) as i32;
        let asm = &mut self.asm;
        asm.mov(edx, 4u32)?;
        asm.cmp(rax, rdx)?;
        asm.cmovb(rax, rdx)?;
        asm.bsr(rcx, rax)?;
        asm.sub(rcx, 2)?;
        asm.shr(rax, cl)?;
        asm.lea(rax, qword_ptr(rax + rcx * 4))?;
        asm.inc(qword_ptr(r15 + rax * 8 + histogram))
    }

    fn enter_user(&mut self) -> Result<(), IcedError> {
        self.user = true;
        let mut continued = self.asm.create_label();
        self.asm.lea(rax, qword_ptr(continued))?;
        self.asm.mov(rdx, rsp)?;
        self.asm.push(i32::from(USER_DATA))?;
        self.asm.push(rdx)?;
        self.asm.pushfq()?;
        self.asm.push(i32::from(USER_CODE))?;
        self.asm.push(rax)?;
        self.asm.iretq()?;
        self.asm.set_label(&mut continued)?;
        self.asm.nop()
    }

    fn enter_kernel(&mut self) -> Result<(), IcedError> {
        self.user = false;
        self.asm.int(i32::from(KERNEL_GATE))
    }

    fn stamp(&mut self, slot: usize) -> Result<(), IcedError> {
        read_tsc(&mut self.asm)?;
        self.asm.mov(
            qword_ptr(r15 + (offset_of!(Vcpu, stamps) + 8 * slot) as i32),
            rax,
        )?;
        self.asm.mov(qword_ptr(vcpu!(last_stamp)), rax)
    }

    /// The end of a program that has no loop: IPIs are still answered.
    fn halt_for_good(&mut self) -> Result<(), IcedError> {
        if self.user {
            self.enter_kernel()?;
        }
        self.asm
            .mov(qword_ptr(vcpu!(run_state)), RUN_STATE_FINISHED)?;
        let mut again = self.asm.create_label();
        self.asm.set_label(&mut again)?;
        self.asm.inc(qword_ptr(vcpu!(halts)))?;
        self.asm.sti()?;
        self.asm.hlt()?;
        self.asm.jmp(again)
    }
}

#[cfg(test)]
mod tests {
    use std::arch::asm;
    use std::collections::BTreeSet;
    use std::fs::File;
    use std::path::PathBuf;

    use iced_x86::{Decoder, DecoderOptions, Instruction, Mnemonic, OpKind};
    use memmap2::{Mmap, MmapMut};

    use super::*;
    use crate::State;

    const BASE: u64 = 0x10_8000;
    const RATES: Rates = Rates {
        iterations_per_ms: 1000,
        tsc_khz: 1000,
        pause_window: 100,
    };
    const ALL_STEPS: &str = "compute 10us; spin go; spin go round; pause 3; set a; clear a; add a; lock; unlock; \
         barrier; ipi 255 0x41; wait-answer; halt; timer 5us; sleep 9; user; compute 3; lock; stamp 15; unlock; \
         barrier; kernel; halt; shootdown 0x42; sleeping-barrier 0x43 meet";

    fn compile(texts: &[&str]) -> (Vec<Program>, SharedTable) {
        let programs: Vec<Program> = texts.iter().map(|text| text.parse().unwrap()).collect();
        let shared = SharedTable::collect(&programs).unwrap();
        (programs, shared)
    }

    fn decode(code: &[u8]) -> Vec<Instruction> {
        let instructions: Vec<_> = Decoder::with_ip(64, code, BASE, DecoderOptions::NONE)
            .into_iter()
            .collect();
        assert!(
            instructions
                .iter()
                .all(|instruction| !instruction.is_invalid())
        );
        instructions
    }

    /// Every jump, call and address taken leads to the beginning of an instruction of the same code.
    fn assert_targets_exist(instructions: &[Instruction]) {
        let starts: BTreeSet<u64> = instructions.iter().map(Instruction::ip).collect();
        for instruction in instructions {
            if instruction.op0_kind() == OpKind::NearBranch64 {
                assert!(
                    starts.contains(&instruction.near_branch64()),
                    "{instruction:?}"
                );
            }
            if instruction.is_ip_rel_memory_operand() {
                assert!(
                    starts.contains(&instruction.ip_rel_memory_address()),
                    "{instruction:?}"
                );
            }
        }
    }

    #[test]
    fn every_jump_of_a_program_has_a_target() {
        for text in [
            ALL_STEPS.to_string(),
            format!("loop: {ALL_STEPS}"),
            format!("set b; loop: {ALL_STEPS}"),
        ] {
            let (programs, shared) = compile(&[&text]);
            let code = program(&programs[0], &shared, RATES, BASE).unwrap();
            let instructions = decode(&code);
            assert_targets_exist(&instructions);
            assert_eq!(
                instructions.last().unwrap().mnemonic(),
                Mnemonic::Jmp,
                "nothing may run past the end"
            );
        }
    }

    #[test]
    fn user_mode_has_no_privileged_instruction() {
        let (programs, shared) = compile(&[ALL_STEPS]);
        let code = program(&programs[0], &shared, RATES, BASE).unwrap();
        let mut user = false;
        let mut seen = 0;
        for instruction in decode(&code) {
            match instruction.mnemonic() {
                Mnemonic::Iretq => user = true,
                Mnemonic::Int => user = false,
                Mnemonic::Wrmsr | Mnemonic::Hlt | Mnemonic::Cli | Mnemonic::Sti | Mnemonic::Out => {
                    assert!(!user)
                }
                _ => seen += usize::from(user),
            }
        }
        assert!(seen > 20);
    }

    #[test]
    fn an_interrupt_can_not_slip_in_between_sti_and_hlt() {
        let (programs, shared) = compile(&[ALL_STEPS]);
        let instructions = decode(&program(&programs[0], &shared, RATES, BASE).unwrap());
        let halts = instructions
            .windows(2)
            .filter(|pair| pair[1].mnemonic() == Mnemonic::Hlt);
        assert!(halts.clone().count() >= 4);
        assert!(
            halts
                .into_iter()
                .all(|pair| pair[0].mnemonic() == Mnemonic::Sti)
        );
    }

    #[test]
    fn programs_do_not_depend_on_their_address() {
        let (programs, shared) = compile(&[ALL_STEPS]);
        let code = |address| program(&programs[0], &shared, RATES, address).unwrap();
        assert_eq!(code(BASE), code(BASE + 0x1_2340));
    }

    #[test]
    fn each_vector_has_its_own_handler() {
        let handlers = handlers(BASE).unwrap();
        let instructions = decode(&handlers.code);
        assert_targets_exist(&instructions);
        let entry = |vector: usize| {
            instructions
                .iter()
                .find(|i| i.ip() == handlers.entries[vector])
                .unwrap()
        };
        assert_eq!(handlers.entries.iter().collect::<BTreeSet<_>>().len(), 256);
        for vector in 0x30..0xff {
            assert_eq!(
                (entry(vector).mnemonic(), entry(vector).immediate(0)),
                (Mnemonic::Push, vector as u64)
            );
        }
        // #GP pushes an error code of its own, #UD does not: then the handler pushes a zero.
        assert_eq!(entry(13).immediate(0), 13);
        assert_eq!(entry(6).immediate(0), 0);
        assert_eq!(entry(SPURIOUS_VECTOR.into()).mnemonic(), Mnemonic::Iretq);
    }

    /// Runs programs as threads of this process: they hold no absolute address, and what is not privileged does the
    /// same at CPL 3 natively. Returns when all have run once.
    fn run_natively(texts: &[&str]) -> State {
        let (programs, shared) = compile(texts);
        let file = tempfile::tempfile().unwrap();
        let state = state_of(&file, &programs, &shared);
        std::thread::scope(|scope| {
            for (index, program) in programs.iter().enumerate() {
                let (state, shared) = (&state, &shared);
                scope.spawn(move || call(&native_code(program, shared), state, index));
            }
        });
        state
    }

    fn state_of(file: &File, programs: &[Program], shared: &SharedTable) -> State {
        State::format(file, PathBuf::new(), "native", programs.len(), shared).unwrap()
    }

    /// The program, with a return in place of the halt for good.
    fn native_code(program: &Program, shared: &SharedTable) -> Mmap {
        let mut emitter = Emitter::new(shared, RATES).unwrap();
        emitter.passes(program).unwrap();
        emitter.asm.ret().unwrap();
        let code = emitter.asm.assemble(BASE).unwrap();
        let mut map = MmapMut::map_anon(code.len()).unwrap();
        map.copy_from_slice(&code);
        map.make_exec().unwrap()
    }

    fn call(code: &Mmap, state: &State, vcpu: usize) {
        let memory = state.memory().as_mut_ptr() as u64;
        let own = memory + vcpu_offset(vcpu) as u64;
        // SAFETY: the code is a program that ends with a return. It changes the registers named here, rbx and rbp,
        // which are saved around it, and memory of the state file.
        unsafe {
            asm!(
                "push rbx", "push rbp", "call {code}", "pop rbp", "pop rbx",
                code = in(reg) code.as_ptr(),
                inout("r14") memory => _, inout("r15") own => _, inout("r13") 0u64 => _, out("r12") _,
                clobber_abi("C"),
            );
        }
    }

    #[test]
    fn computing_counts_iterations_steps_and_passes() {
        let state = run_natively(&["compute 5000; compute 2us; pause 3; stamp 4"]);
        let counters = state.vcpu(0);
        assert_eq!(
            (
                counters.work,
                counters.steps,
                counters.progress,
                counters.pauses
            ),
            (5002, 4, 1, 3)
        );
        assert_eq!(counters.step, 3);
        assert!(counters.stamps[4] != 0 && counters.stamps[4] == counters.last_stamp);
    }

    #[test]
    fn flags_are_set_cleared_added_to_and_waited_for() {
        let state = run_natively(&[
            "set a; add a; set c; clear c; spin done",
            "spin a; add b; spin b round; set done",
        ]);
        assert_eq!(
            (state.value("a"), state.value("b"), state.value("c")),
            (Some(2), Some(1), Some(0))
        );
        assert_eq!(state.progress(), 2);
    }

    #[test]
    fn a_lock_excludes() {
        // Without the lock, `clear` of one thread would come between `set` and `spin` of the other and hang it.
        let text = vec!["lock l; set x; compute 50; spin x; clear x; unlock l"; 500].join("; ");
        let state = run_natively(&[&text, &text, &text]);
        assert_eq!(state.value("l"), Some(1500));
        assert_eq!(state.vcpu(2).steps, 3000);
    }

    #[test]
    fn a_barrier_holds_all_until_the_last_has_come() {
        let text = vec!["add x; barrier"; 300].join("; ");
        let state = run_natively(&[&text, &text]);
        assert_eq!(
            (state.value("x"), state.value("barrier")),
            (Some(600), Some(300))
        );
    }

    #[test]
    fn a_wakeup_falls_into_the_bucket_that_the_histogram_has_for_it() {
        for sample in [0u64, 3, 4, 7, 8, 15, 1000, 1_000_003, u64::MAX] {
            let (programs, shared) = compile(&["halt"]);
            let state = state_of(&tempfile::tempfile().unwrap(), &programs, &shared);
            let mut emitter = Emitter::new(&shared, RATES).unwrap();
            emitter.asm.mov(rax, sample).unwrap();
            emitter.record_wakeup().unwrap();
            emitter.asm.ret().unwrap();
            let code = emitter.asm.assemble(BASE).unwrap();
            let mut map = MmapMut::map_anon(code.len()).unwrap();
            map.copy_from_slice(&code);
            call(&map.make_exec().unwrap(), &state, 0);
            let mut expected = crate::Histogram::default();
            expected.count(sample);
            assert_eq!(state.wakeups(), expected, "{sample}");
        }
    }

    #[test]
    fn a_latency_falls_into_the_bucket_of_its_power_of_two() {
        for (sample, bucket) in [
            (0u64, 0usize),
            (1, 0),
            (2, 1),
            (1000, 9),
            (1024, 10),
            (1 << 63, 63),
        ] {
            let (programs, shared) = compile(&["halt"]);
            let state = state_of(&tempfile::tempfile().unwrap(), &programs, &shared);
            let mut emitter = Emitter::new(&shared, RATES).unwrap();
            emitter.asm.mov(rax, sample).unwrap();
            emitter.record(offset_of!(Vcpu, delivery) as i32).unwrap();
            emitter.asm.ret().unwrap();
            let code = emitter.asm.assemble(BASE).unwrap();
            let mut map = MmapMut::map_anon(code.len()).unwrap();
            map.copy_from_slice(&code);
            call(&map.make_exec().unwrap(), &state, 0);
            let latency = state.vcpu(0).delivery;
            assert_eq!(
                (latency.count, latency.sum, latency.min, latency.max),
                (1, sample, sample, sample)
            );
            assert_eq!(
                (latency.histogram.len(), latency.histogram[bucket]),
                (bucket + 1, 1)
            );
        }
    }
}
