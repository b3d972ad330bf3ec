// SPDX-License-Identifier: GPL-2.0-only
//! The state file: memory that a guest, its VMM and any observer share.
//!
//! The file is part of the guest's RAM, so its counters are read without a VM exit. Every multi-byte field is in the
//! byte order of the machine. The file is, in this order:
//!
//! | offset | size | what |
//! |---|---|---|
//! | 0 | 4096 | [`Header`] |
//! | 4096 | 4096 | [`SHARED_OBJECTS`] times [`Shared`]: flags, locks and barriers |
//! | 8192 + 8192 n | 4096 | [`Vcpu`] n: its counters |
//! | 12288 + 8192 n | 4096 | 256 times [`Vector`]: interrupts that vCPU n received, by vector |
//!
//! Each field has one writer: the VMM, or the program of the vCPU it belongs to, unless it says otherwise. Fields are
//! atomics because several processes and vCPUs see them; each is consistent in itself, two of them together are not.
//!
//! Not here: how to read it conveniently, which is [`crate::State`].

use std::mem::{offset_of, size_of};
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64};

/// First eight bytes of a state file.
pub const MAGIC: u64 = u64::from_le_bytes(*b"CohortMG");
/// Changes whenever the layout does.
pub const VERSION: u32 = 3;
/// Flags, locks and barriers that one guest can have.
pub const SHARED_OBJECTS: usize = 64;
/// Bytes of a shared object's name, a terminating zero included.
pub const SHARED_NAME_BYTES: usize = 32;
/// Bytes of the guest's name, a terminating zero included.
pub const NAME_BYTES: usize = 64;
/// Slots of the `stamp` step.
pub const STAMPS: usize = 16;
/// Buckets of a latency histogram: bucket b counts latencies of 2^b to 2^(b+1)-1 TSC ticks; bucket 0 has 0 as well.
pub const LATENCY_BUCKETS: usize = 64;
/// Buckets of a [`Wakeups`] histogram, see [`crate::Histogram`].
pub const WAKEUP_BUCKETS: usize = crate::histogram::BUCKETS;
/// Interrupt vectors of x86.
pub const VECTORS: usize = 256;
/// vCPUs that one guest can have.
pub const MAX_VCPUS: usize = 256;
/// Where the shared objects begin.
pub const SHARED_OFFSET: usize = 4096;
/// Where vCPU 0 begins.
pub const VCPUS_OFFSET: usize = 8192;
/// From one vCPU to the next.
pub const VCPU_STRIDE: usize = 8192;
/// Where a vCPU's vectors begin, from where the vCPU begins.
pub const VECTORS_OFFSET: usize = 4096;

/// The guest as a whole. Written by the VMM.
#[repr(C)]
pub struct Header {
    /// [`MAGIC`].
    pub magic: AtomicU64,
    /// [`VERSION`].
    pub version: AtomicU32,
    /// Number of vCPUs, those without a program included.
    pub nr_vcpus: AtomicU32,
    /// Process id of the VMM.
    pub pid: AtomicU32,
    /// Number of shared objects in use.
    pub nr_shared: AtomicU32,
    /// TSC ticks of the guest per millisecond.
    pub tsc_khz: AtomicU64,
    /// Iterations of `compute` per millisecond; 0 if no program needed it.
    pub iterations_per_ms: AtomicU64,
    /// Iterations of a spin loop from one PAUSE to the next.
    pub pause_window: AtomicU64,
    /// The guest's name in UTF-8, zero-terminated.
    pub name: [u8; NAME_BYTES],
}

/// A flag, a lock or a barrier; one cache line. Name, kind and participants are written by the VMM, the rest by any
/// vCPU whose program uses it; a flag's value by observers too.
#[repr(C, align(64))]
pub struct Shared {
    /// Name in UTF-8, zero-terminated.
    pub name: [u8; SHARED_NAME_BYTES],
    /// 1 flag, 2 lock, 3 barrier (see [`crate::shared::Kind`]).
    pub kind: AtomicU32,
    /// vCPUs whose program uses it.
    pub participants: AtomicU32,
    /// Flag: its value. Lock: the ticket that is being served. Barrier: how often it was passed.
    pub value: AtomicU64,
    /// Lock: the next ticket. Barrier: vCPUs that have arrived.
    pub aux: AtomicU64,
}

/// A latency in TSC ticks: moments and histogram.
#[repr(C)]
pub struct Latency {
    /// Number of samples.
    pub count: AtomicU64,
    /// Sum of all samples.
    pub sum: AtomicU64,
    /// The smallest sample; `u64::MAX` before the first.
    pub min: AtomicU64,
    /// The largest sample.
    pub max: AtomicU64,
    /// Samples by power of two, see [`LATENCY_BUCKETS`].
    pub histogram: [AtomicU64; LATENCY_BUCKETS],
}

/// How late the steps `sleep` went on after their time, in TSC ticks.
#[repr(C)]
pub struct Wakeups {
    /// Wake-ups by their delay, in the buckets of [`crate::Histogram`].
    pub histogram: [AtomicU64; WAKEUP_BUCKETS],
}

/// An exception that the program raised, which only happens when the translation to machine code is wrong.
#[repr(C)]
pub struct Fault {
    /// Exception vector.
    pub vector: AtomicU64,
    /// Error code, 0 if the exception has none.
    pub error: AtomicU64,
    /// Instruction pointer.
    pub rip: AtomicU64,
    /// CR2, the address of a page fault.
    pub address: AtomicU64,
}

/// What KVM tells a guest about the time its vCPU did not get (`struct kvm_steal_time` of Linux). Written by KVM.
#[repr(C, align(64))]
pub struct StealTime {
    /// Nanoseconds.
    pub steal: AtomicU64,
    /// Odd while KVM changes it.
    pub version: AtomicU32,
    /// Zero.
    pub flags: AtomicU32,
    /// Not 0: the vCPU was preempted, so the guest's scheduler takes it for busy even if it is idle.
    pub preempted: AtomicU8,
}

/// One vCPU. Written by its program, unless a field says otherwise.
#[repr(C)]
pub struct Vcpu {
    /// Passes through the program (of a `loop:`, passes through the loop).
    pub progress: AtomicU64,
    /// Steps completed.
    pub steps: AtomicU64,
    /// Index of the step that runs or waits, counted from 0 in the program's text.
    pub step: AtomicU64,
    /// Iterations of completed `compute` steps.
    pub work: AtomicU64,
    /// PAUSE instructions executed.
    pub pauses: AtomicU64,
    /// Times that the vCPU executed HLT.
    pub halts: AtomicU64,
    /// Interrupts handled, all vectors.
    pub interrupts: AtomicU64,
    /// IPIs sent.
    pub ipis_sent: AtomicU64,
    /// IPIs whose answer was waited for and seen.
    pub ipis_answered: AtomicU64,
    /// TSC of the last `stamp`.
    pub last_stamp: AtomicU64,
    /// TSC by slot of `stamp`.
    pub stamps: [AtomicU64; STAMPS],
    /// 0 starting, 1 running, 2 finished (halted for good); written by the program. 3 failed, written by the VMM.
    pub run_state: AtomicU64,
    /// Thread id of the vCPU's thread. Written by the VMM.
    pub tid: AtomicU64,
    /// Exits to the VMM, which handles none but the last. Written by the VMM.
    pub user_exits: AtomicU64,
    /// Valid when `run_state` is 3 and the program raised an exception.
    pub fault: Fault,
    /// From just before an IPI is sent to the entry of the receiver's handler.
    pub delivery: Latency,
    /// From just before an IPI is sent until its sender saw the answer.
    pub round_trip: Latency,
    /// Written by KVM.
    pub steal_time: StealTime,
    /// From the time that a `sleep` ends at until the program goes on.
    pub wakeups: Wakeups,
}

/// Interrupts of one vector that a vCPU received. Written by the vCPU's interrupt handler: first the stamp, then the
/// count, so who sees the count sees a stamp at least as new.
#[repr(C)]
pub struct Vector {
    /// Interrupts handled.
    pub count: AtomicU64,
    /// TSC at the entry of the last handler.
    pub last_tsc: AtomicU64,
}

/// Size of the state file of a guest with `nr_vcpus` vCPUs.
pub const fn state_size(nr_vcpus: usize) -> usize {
    VCPUS_OFFSET + nr_vcpus * VCPU_STRIDE
}

/// Where vCPU `vcpu` begins.
pub const fn vcpu_offset(vcpu: usize) -> usize {
    VCPUS_OFFSET + vcpu * VCPU_STRIDE
}

/// Where shared object `index` begins.
pub const fn shared_offset(index: usize) -> usize {
    SHARED_OFFSET + index * size_of::<Shared>()
}

/// Where the entry of `vector` begins, from where its vCPU begins.
pub const fn vector_offset(vector: u8) -> usize {
    VECTORS_OFFSET + vector as usize * size_of::<Vector>()
}

const _: () = assert!(size_of::<Header>() <= SHARED_OFFSET);
const _: () = assert!(size_of::<Shared>() == 64);
const _: () = assert!(SHARED_OFFSET + SHARED_OBJECTS * size_of::<Shared>() == VCPUS_OFFSET);
const _: () = assert!(size_of::<Latency>() == 32 + 8 * LATENCY_BUCKETS);
const _: () = assert!(size_of::<StealTime>() == 64);
const _: () = assert!(size_of::<Vcpu>() <= VECTORS_OFFSET);
const _: () = assert!(size_of::<Vector>() == 16);
const _: () = assert!(VECTORS_OFFSET + VECTORS * size_of::<Vector>() == VCPU_STRIDE);
const _: () = assert!(offset_of!(Header, name) == 48);
const _: () = assert!(offset_of!(Vcpu, run_state) == 208);
const _: () = assert!(offset_of!(Vcpu, delivery) == 264);
