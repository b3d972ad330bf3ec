/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Types that the BPF programs and the Rust program share. Rust gets them by
 * bindgen (module bpf::intf), the native unit tests by including this file: so
 * plain C only, no kernel type, no BPF macro.
 */
#ifndef COHORT_INTF_H
#define COHORT_INTF_H

#ifndef __VMLINUX_H__
#include <stdbool.h>
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef int s32;
typedef unsigned long long u64;
typedef long long s64;
#endif

enum cohort_limits {
	MAX_CPUS = 1024,
	MAX_DOMAINS = 256,
	MAX_NUMA_NODES = 64, /* MAX_NODES is taken on arm64 */
	LOCAL_DISTANCE = 10, /* of a node to itself, as the kernel gives it */
	NR_BUCKETS = 24, /* of a histogram; the last one has no upper end */
	LEAST_GROUPS = 4096, /* VMs and cgroups; more on hosts of many CPUs */
	LEAST_ENTITIES = 8192, /* groups in domains in which they have tasks */
	MOST_ENTITIES = 65536, /* their queues' numbers lie below */
	DOMAIN_CPUS = 64, /* that a domain can have */
	SYMBOL_NAME_LEN = 48, /* of a name that Rust asks for, with the 0 */
};

/* What can be switched while running: bits of a mask, on or off. */
enum mechanism {
	MECH_COHORTS = 0, /* a VM's vCPUs have their turns together */
	MECH_YIELD = 1, /* directed yields are honoured */
	MECH_IPI = 2, /* who must answer an IPI runs before who waits for it */
	MECH_RELAXED = 3, /* a sibling is found where KVM finds none */
	MECH_SHORT_TURNS = 4, /* turns are shorter where many wait */
	MECH_PACKING = 5, /* a narrow VM before a wide one that has no room */
	MECH_WAKE = 6, /* a CPU is lent to who wakes in a VM */
	MECH_HALTED = 7, /* CPUs whose vCPUs halt on them are others' */
	MECH_HALT_POLL = 8, /* nobody is polled for while others wait */
	NR_MECH = 9,
};

/* Whether a VM's vCPUs have their turns together; written by Rust for the VM's
 * process. */
enum cohort_rule {
	COHORT_AUTO = 0, /* as MECH_COHORTS says */
	COHORT_NEVER = 1, /* its vCPUs have their turns one by one */
};

enum group_kind {
	GROUP_FREE = 0,
	GROUP_CGROUP = 1,
	GROUP_VM = 2,
};

/* Why a directed yield that KVM offered did not run its target next. */
enum yield_miss {
	YIELD_MISS_NOT_SIBLING = 0, /* the target is no vCPU of the same VM */
	YIELD_MISS_NOT_READY = 1, /* it runs already, or it sleeps */
	YIELD_MISS_THROTTLED = 2, /* the VM's cap is used up */
	YIELD_MISS_AFFINITY = 3, /* it may not run on the yielder's CPU */
	YIELD_MISS_LOST = 4, /* accepted, but no turn came for it in time */
	YIELD_MISS_ELSEWHERE = 5, /* accepted; another CPU ran it first */
	NR_YIELD_MISS = 6,
};

/*
 * Counters of one group since it was created. Written by BPF with atomic adds,
 * read by Rust. What any scheduler does to a vCPU is not here: the observer counts it.
 */
struct group_stats {
	u64 run_ns; /* CPU time used by all its tasks */
	u64 vcpu_run_ns; /* of which by vCPUs */
	u64 waited_ns; /* its tasks were runnable and did not run */
	u64 ready_ns; /* of which vCPUs waited for a CPU */
	u64 throttled_ns; /* of which vCPUs waited for a cap's next period */
	u64 yields_offered; /* directed yields KVM offered */
	u64 yields_ready; /* accepted, or given without an offer: somebody was
			     ready */
	u64 yields_served; /* of those the target ran next */
	u64 yields_missed[NR_YIELD_MISS];
	u64 yields_better; /* of those ready: another sibling than KVM's */
	u64 ipis; /* fixed IPIs from one vCPU to one sibling */
	u64 ipis_answered; /* of which the end was seen */
	u64 turns; /* turns in which it wanted several CPUs */
	u64 turns_partial; /* of which not all CPUs that the plan gave it
			      ran it */
	u64 turn_skew[NR_BUCKETS]; /* of the others, from the turn's begin
				      until all did: bucket i holds less than
				      2^i us and, but for 0, at least 2^(i-1) us */
};

/* What Rust reads of a group: the head of the BPF side's struct group. */
struct cohort_group {
	u32 kind; /* enum group_kind */
	u32 tgid; /* VM: the process that owns it */
	u32 weight; /* cpu.weight among its siblings, 1..10000 */
	u32 parent; /* index of the group above it, 0: none */
	u64 cgroup_id; /* CGROUP: its own; VM: 0 */
	u64 kvm; /* VM: address of its struct kvm, an opaque identity */
	u64 quota_us; /* cpu.max, 0: no cap */
	u64 period_us;
	u32 nr_tasks; /* CGROUP: tasks below it; VM: its threads */
	u32 nr_vcpus; /* VM: threads seen running a vCPU */
	u32 cohort_rule; /* VM: enum cohort_rule */
	u32 pad;
	u64 created_ns; /* clock of bpf_ktime_get_ns() */
	struct group_stats stats;
};

/* Of the whole scheduler; written by BPF. */
struct host_stats {
	/* In use now, and how many there can be. */
	u64 groups_used;
	u64 groups_most;
	u64 entities_used;
	u64 entities_most;
	/* Events that must stay rare. */
	u64 exhausted; /* no group or entity was free: the root's was used */
	u64 stolen; /* tasks taken from another domain, VMs told to move */
};

/* ---- the observer ---- */

/* What a vCPU does, as its host sees it. */
enum vcpu_phase {
	PHASE_UNKNOWN = 0, /* it has not been seen to run yet */
	PHASE_RUNS = 1,
	PHASE_READY = 2, /* runnable, and waits for a CPU */
	PHASE_LIMITED = 3, /* runnable, and a cap stops it */
	PHASE_HALTED = 4, /* the guest has nothing to do on it */
	PHASE_AWAY = 5, /* its thread sleeps outside of the guest: in the VMM */
	NR_PHASES = 6,
};

enum taker_kind {
	TAKER_CGROUP = 0, /* a task of this cgroup */
	TAKER_VM = 1, /* a vCPU of the VM of this process */
	TAKER_KERNEL = 2, /* a kernel thread, or the CPU was idle */
	TAKER_NONE = 3, /* not known */
};

/* Who has a CPU in the place of a vCPU. */
struct taker {
	u32 kind; /* enum taker_kind */
	s32 pid; /* its thread */
	u64 id; /* cgroup id, process, 0 */
	char comm[16]; /* of the thread; empty if that went first */
};

/* How a thread slept outside of the guest, as bits. */
enum sleep_kind {
	SLEEP_IN_KVM = 1, /* inside KVM_RUN */
	SLEEP_STOPPED = 2, /* by a signal or a debugger */
	SLEEP_FROZEN = 4, /* by its cgroup's freezer */
	SLEEP_IO = 8, /* until I/O is done */
	SLEEP_MEMORY = 16, /* until there is memory */
	SLEEP_UNINTERRUPTIBLE = 32,
	SLEEP_PAGE = 64, /* until a page of its VM's memory has come */
};

/* A stretch of time in which a vCPU, which was not halted, had no CPU. */
struct off_cpu {
	u64 ns; /* 0: none */
	u64 end_ns; /* CLOCK_MONOTONIC */
	u64 ready_ns; /* of it: waited for a CPU */
	u64 limited_ns; /* of it: a cap stopped it; the rest it slept */
	u32 goes_on; /* it had not ended when this was read */
	u32 sleep; /* bits of enum sleep_kind */
	s64 syscall; /* in which it slept; -1: none */
	u64 operation; /* the second argument of that */
	struct taker taker; /* who had its CPU first; or last, if that was most
			       of the time, or if it woke up */
};

/* What one vCPU did since the observer knows it: counters only. Written by BPF. */
struct vcpu_counts {
	u64 phase_ns[NR_PHASES]; /* in each, up to since_ns */
	u64 halted_on_cpu_ns; /* of its running: the CPU was halted */
	u64 halted_unread_ns; /* of its running: nobody knows whether it was */
	u64 poll_ns; /* of its running: KVM polled for work after a halt */
	u64 preempted_user; /* times, in guest user mode or outside */
	u64 preempted_kernel; /* times, in guest kernel mode */
	u64 wakeups; /* from halted or away to ready */
	u64 migrations; /* started on another CPU than it last ran on */
	u64 migrations_far; /* of which with another last-level cache */
	u64 stacked_ns; /* ready behind a sibling on one CPU although fewer
			   siblings ran than it may use CPUs */
	u64 ready_us[NR_BUCKETS]; /* waits for a CPU: bucket i holds less than
				     2^i us and, but for 0, at least 2^(i-1) us */
	u64 spin_exits; /* it left the guest because it executes PAUSE */
	u64 spin_ns; /* of its running: KVM looked whom to run instead */
	u64 yields_offered; /* KVM offered a sibling in its place */
	u64 yields_served; /* of which the sibling ran next */
	u64 yields_not_ready; /* of the others: the sibling ran or slept */
	u64 yields_refused; /* of the others: the scheduler declined */
	u64 ipis; /* fixed IPIs from it to one sibling */
	u64 ipi_to_run[NR_BUCKETS]; /* IPIs to it while it was ready, those that
				       woke it, and those that it had not
				       answered when it lost its CPU, until it
				       ran; buckets as above */
	u64 ipi_to_run_ns; /* the sum of these times */
};

/* One vCPU. Written by BPF. */
struct vcpu_counters {
	u64 kvm; /* address of its struct kvm, an opaque identity */
	u32 tgid; /* the process that owns the VM */
	u32 vcpu_id; /* its number in the VM */
	s32 tid; /* its thread */
	u32 phase; /* enum vcpu_phase */
	s32 last_cpu; /* it ran on, -1: none */
	u32 halts_on_cpu; /* its HLT or MWAIT do not exit */
	u64 read_ns; /* when these counters were read, CLOCK_MONOTONIC */
	u64 since_ns; /* when the phase began, CLOCK_MONOTONIC */
	struct vcpu_counts counts;
	u64 longest_ready_ns; /* the longest single wait */
	u64 longest_ipi_ns; /* the longest time from an IPI until it ran */
	struct off_cpu longest_off_cpu; /* that ended, or went on, since the
					   reading before */
};

/* How long a vCPU was kept from running by the scheduler itself, since that knows
 * it. Cohort counts it, by thread, in a map that the observer looks for. */
struct vcpu_waits {
	u64 capped_ns; /* its VM's cap was used up */
	u64 resting_ns; /* it was halted, and others had its CPU */
};

/* cpu.max of a cgroup, as Rust tells it where the kernel does not. */
struct cgroup_cap {
	u64 cgroup_id;
	u64 period_us;
	u64 quota_us; /* ~0: none */
	u64 burst_us;
};

/* A question to symbols.bpf.c, and its answer. */
struct symbol {
	char name[SYMBOL_NAME_LEN]; /* ends with a 0 */
	u64 address;
};

/* What is known of a CPU's MPERF, which counts cycles while that is not halted.
 * Written on that CPU. */
struct halt_clock {
	u64 ns_per_cycle; /* fixed point of HALT_SHIFT bits; 0: not known */
	u64 least_per_cycle; /* of one measurement of it, */
	u64 most_per_cycle;
	u64 measured_ns; /* and all in sum */
	u64 measured_cycles;
	u64 error_ppm; /* of the time not halted: how wrong that may be */
	u32 measurements;
	u32 used; /* a vCPU that halts on its CPU has had this one, */
	u32 running; /* and has it now */
	u32 stopped; /* the event has ended: it has to be opened anew */
};

/* Who ran in the place of whom. */
struct taker_key {
	u32 tgid; /* of the VM that lost the CPU */
	u32 kind; /* enum taker_kind */
	u64 id; /* cgroup id, process, 0 */
};

struct taker_stats {
	u64 times; /* a vCPU was preempted by it */
	u64 ready_ns; /* how long those vCPUs waited then */
};

#endif /* COHORT_INTF_H */
