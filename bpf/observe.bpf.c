// SPDX-License-Identifier: GPL-2.0-only
/*
 * The observer: what each vCPU of this host does, under any scheduler. It changes
 * nothing. A vCPU is in one phase at a time (enum vcpu_phase); each switch, wake-up
 * and hook adds to its counters, which Rust reads.
 *
 * Not here: Cohort's own decisions, which the scheduler counts itself.
 */
#include <scx/common.bpf.h>
#include "intf.h"
#include "arch.bpf.h"
#include "policy/ipi.h"
#include "kvm.bpf.h"
#include "apic.bpf.h"
#include "halt.bpf.h"
#include "histogram.bpf.h"

char _license[] SEC("license") = "GPL";

/* Set by Rust: which CPUs share a last-level cache. */
const volatile u16 cpu_domain[MAX_CPUS];

enum {
	MAX_TAKERS = 16384, /* the least recent ones are forgotten */
	VM_SLOTS = 65536, /* a power of two; used again after so many VMs */
	SPIN_SAMPLE = 8, /* spin exits of which the time of one is taken */
	INTERRUPT_NS = 2000000, /* most are handled in less */
};

/* Of kernels that stop tasks one by one when their cap is used up. */
struct task_struct___cap {
	bool throttled;
} __attribute__((preserve_access_index));

/* What of a task tells why it sleeps, where the kernel is built to note it. */
struct task_struct___sleep {
	unsigned int in_iowait : 1;
	unsigned int in_memstall : 1;
	unsigned int frozen : 1;
} __attribute__((preserve_access_index));

/* Of kernels whose KVM has pages brought while the vCPU that touched them is
 * halted: by KVM, or by its guest, which KVM has told. */
struct kvm_vcpu___page {
	struct {
		u32 queued;
	} async_pf;
} __attribute__((preserve_access_index));

/* States of tasks that the kernel has as macros (include/linux/sched.h). */
enum {
	STATE_UNINTERRUPTIBLE = 0x2,
	STATE_STOPPED = 0x4,
	STATE_TRACED = 0x8,
};

/* Set by Rust: the class of tasks that a sched_ext scheduler has, 0: the kernel has
 * none. */
const volatile u64 ext_sched_class_addr;

/* What is kept with a vCPU's thread, and goes when that does. Written in the
 * thread itself or under its rq's lock, but for ipi_waits_ns. */
struct observed {
	struct vcpu_counters counters; /* kvm 0: it has run no vCPU yet */
	struct halt_count halt; /* if counters.halts_on_cpu */
	u64 ipi_waits_ns; /* since when an IPI waits for it to run, 0: none; by
			     senders too */
	u32 vm; /* its process's slot */
	u64 vcpu; /* address of the vCPU it was last seen to run, never read
		     without asking whether it still does */
	s32 successor; /* thread that its CPU ran after it; 0 when KVM begins to
			  look whom to run in its place */
	bool preempted; /* by off.taker, and not run since */
	u32 task_state; /* with which it left its CPU last */
	u64 off_since_ns; /* it has no CPU, and was not halted then; 0: neither */
	struct off_cpu off; /* what is known of that so far */
	u64 page_since_ns; /* it stands still for pages, but for interrupts;
			      0: it does not */
	u64 taker; /* address of off.taker's task, never read without asking
		      whether it is still that; 0: none */
	bool spin_timed; /* KVM looks, in an exit whose time is taken, */
	u64 spins_since_ns; /* and it has had its CPU since then */
};

/* What ran last on a CPU. */
struct cpu_state {
	u64 since_ns; /* when the task that has it got it */
	/* The vCPU that had it before. */
	u64 kvm; /* 0: that task was no vCPU */
	s32 pid;
	u32 tgid;
	u64 ran_ns;
};

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct observed);
} tasks SEC(".maps");

/* The slot of a process that owns VMs, kept with its first thread; 0: none yet. */
struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, u32);
} slots SEC(".maps");

u32 last_slot; /* given to a process; atomic */

/* What is known of the VMs of a process. Atomic, as all its vCPUs write. */
struct vm {
	s32 nr_running; /* of its vCPUs are on a CPU */
	u32 ipi_vectors[APIC_WORDS]; /* that they send each other, a bit each */
};

struct vm vms[VM_SLOTS]; /* by slot */

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, MAX_TAKERS);
	__type(key, struct taker_key);
	__type(value, struct taker_stats);
} takers SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct cpu_state);
} cpus SEC(".maps");

/* ---- look-ups ---- */

/* What is kept with @p, if it has run a vCPU. */
static struct observed *lookup(struct task_struct *p)
{
	return bpf_task_storage_get(&tasks, p, 0, 0);
}

/* Linux 6.1 lacks them; Rust does not load there what calls them. */
struct task_struct *bpf_task_from_pid___weak(s32 pid) __ksym __weak;
void bpf_task_release___weak(struct task_struct *p) __ksym __weak;

/* The same, of thread @pid. */
static struct observed *lookup_thread(s32 pid)
{
	struct task_struct *p;
	struct observed *o;

	if (!bpf_ksym_exists(bpf_task_from_pid___weak) ||
	    !bpf_ksym_exists(bpf_task_release___weak))
		return NULL;
	p = bpf_task_from_pid___weak(pid);
	if (!p)
		return NULL;
	o = lookup(p);
	bpf_task_release___weak(p);
	return o;
}

static u32 slot_of(struct task_struct *p)
{
	struct task_struct *leader = p->group_leader;
	u32 *slot;

	slot = leader ? bpf_task_storage_get(&slots, leader, 0,
					     BPF_LOCAL_STORAGE_GET_F_CREATE)
		      : NULL;
	if (!slot)
		return 0;
	/* A sibling may come first. */
	if (!*slot)
		__sync_val_compare_and_swap(
			slot, 0, __sync_add_and_fetch(&last_slot, 1));
	return *slot;
}

static struct vm *vm_of(struct observed *o)
{
	return &vms[o->vm & (VM_SLOTS - 1)];
}

static struct cpu_state *this_cpu(void)
{
	u32 zero = 0;

	return bpf_map_lookup_elem(&cpus, &zero);
}

/* ---- what observe.bpf.h leaves open ---- */

/* An IPI waits since @now for @o's vCPU to run. Of several the first one counts. */
static void begin_ipi_wait(struct observed *o, u64 now)
{
	if (!o->ipi_waits_ns)
		o->ipi_waits_ns = now;
}

static void on_ipi(struct task_struct *p, struct kvm_vcpu___kvm *vcpu,
		   u32 vector)
{
	struct observed *sender = lookup(p), *receiver;
	u32 *word, bit = 1U << vector % 32;

	if (!sender)
		return;
	sender->counters.counts.ipis++;
	word = &vm_of(sender)->ipi_vectors[vector / 32 % APIC_WORDS];
	if (!(*word & bit))
		__sync_fetch_and_or(word, bit);
	/* Most receivers run, or halt: the IPI wakes them. */
	if (bpf_core_field_exists(vcpu->ready) && !kvm_read(vcpu, ready))
		return;
	receiver = lookup_thread(thread_of_vcpu(vcpu));
	if (receiver && receiver->counters.phase == PHASE_READY)
		begin_ipi_wait(receiver, bpf_ktime_get_ns());
}

/* Time on a CPU in a search that is interrupted or ends, if it is taken. */
static void add_spin_time(struct observed *o, u64 now)
{
	if (o->spin_timed)
		o->counters.counts.spin_ns +=
			SPIN_SAMPLE * (now - o->spins_since_ns);
}

static void on_spin(struct task_struct *p)
{
	struct observed *o = lookup(p);

	if (!o)
		return;
	o->successor = 0;
	/* There are many, and most of what one costs would be two clocks. */
	if (o->counters.counts.spin_exits++ % SPIN_SAMPLE)
		return;
	o->spin_timed = true;
	o->spins_since_ns = bpf_ktime_get_ns();
}

static void on_spin_end(struct task_struct *p)
{
	struct observed *o = lookup(p);

	if (!o || !o->spin_timed)
		return;
	add_spin_time(o, bpf_ktime_get_ns());
	o->spin_timed = false;
}

#include "observe.bpf.h"

/* ---- phases ---- */

/* The vCPU with which @p, with @o, is inside KVM now; NULL: it is not. */
static struct kvm_vcpu___kvm *vcpu_now(struct task_struct *p,
				       struct observed *o)
{
	struct kvm_vcpu___kvm *vcpu = vcpu_if_any(p);

	return (u64)vcpu == o->vcpu ? vcpu : NULL;
}

static u16 domain_of(s32 cpu)
{
	return cpu >= 0 && cpu < MAX_CPUS ? cpu_domain[cpu] : 0;
}

static void end_phase(struct vcpu_counters *v, u64 now)
{
	u32 phase = v->phase;

	if (phase < NR_PHASES)
		v->counts.phase_ns[phase] += now - v->since_ns;
	v->since_ns = now;
}

/* Who is @p, whose observed is @observed, that has a CPU? Its name is for
 * name_taker(). */
static void note_taker(struct taker *taker, struct task_struct *p,
		       struct observed *observed)
{
	if (observed) {
		taker->kind = TAKER_VM;
		taker->id = observed->counters.tgid;
	} else if (p->flags & PF_KTHREAD) {
		taker->kind = TAKER_KERNEL;
		taker->id = 0;
	} else {
		taker->kind = TAKER_CGROUP;
		taker->id = p->cgroups->dfl_cgrp->kn->id;
	}
	taker->pid = p->pid;
}

/* The name of @taker's thread, whose task was at @address: that may be gone, or
 * another's by now. */
static void name_taker(struct taker *taker, u64 address)
{
	struct task_struct *p = (void *)address;

	if (p && BPF_CORE_READ(p, pid) == taker->pid)
		bpf_core_read(taker->comm, sizeof(taker->comm), &p->comm);
}

/* A wait for a CPU is over, for which @o says who was to blame. */
static void count_taker(struct observed *o, u64 waited_ns)
{
	struct taker_key key = {
		.tgid = o->counters.tgid,
		.kind = o->off.taker.kind,
		.id = o->off.taker.id,
	};
	struct taker_stats none = {}, *stats;

	stats = bpf_map_lookup_elem(&takers, &key);
	if (!stats) {
		bpf_map_update_elem(&takers, &key, &none, BPF_NOEXIST);
		stats = bpf_map_lookup_elem(&takers, &key);
		if (!stats)
			return;
	}
	__sync_fetch_and_add(&stats->times, 1);
	__sync_fetch_and_add(&stats->ready_ns, waited_ns);
}

/* ---- off the CPU ---- */

/* From @since on @o's vCPU is without a CPU, though not halted. */
static void off_begins(struct observed *o, u64 since)
{
	__builtin_memset(&o->off, 0, sizeof(o->off));
	o->off.syscall = -1;
	o->off.taker.kind = TAKER_NONE;
	o->taker = 0;
	o->off_since_ns = since;
}

/* Does @vcpu, that KVM says is halted, stand still for pages that another task
 * brings? */
static bool waits_for_page(struct kvm_vcpu___kvm *vcpu)
{
	struct kvm_vcpu___page *of_page = (void *)vcpu;

	return bpf_core_field_exists(of_page->async_pf.queued) &&
	       kvm_read(of_page, async_pf.queued);
}

/* How @p, with @o, sleeps outside of the guest, or slept until just now. */
static void note_sleep(struct task_struct *p, struct observed *o)
{
	struct task_struct___sleep *task = (void *)p;
	struct kvm_vcpu___kvm *vcpu = vcpu_now(p, o);
	struct off_cpu *off = &o->off;
	struct pt_regs *regs;

	off->sleep = vcpu ? SLEEP_IN_KVM : 0;
	if (is_blocking(vcpu))
		off->sleep |= SLEEP_PAGE; /* or it would be halted */
	if (o->task_state & (STATE_STOPPED | STATE_TRACED))
		off->sleep |= SLEEP_STOPPED;
	else if (o->task_state & STATE_UNINTERRUPTIBLE)
		off->sleep |= SLEEP_UNINTERRUPTIBLE;
	if (bpf_core_field_exists(task->frozen) &&
	    BPF_CORE_READ_BITFIELD(task, frozen))
		off->sleep |= SLEEP_FROZEN;
	if (bpf_core_field_exists(task->in_iowait) &&
	    BPF_CORE_READ_BITFIELD(task, in_iowait))
		off->sleep |= SLEEP_IO;
	if (bpf_core_field_exists(task->in_memstall) &&
	    BPF_CORE_READ_BITFIELD(task, in_memstall))
		off->sleep |= SLEEP_MEMORY;
	regs = (struct pt_regs *)bpf_task_pt_regs(p);
	off->syscall = syscall_number(regs);
	off->operation = second_argument(regs);
}

/* The time for which @o's vCPU has had no CPU, up to @now, is kept if it is the longest
 * since it was read; @prev, whose observed is @before, had the CPU that it gets for
 * @had_ns, NULL: it gets none yet. */
static void keep_longest(struct observed *o, struct task_struct *prev,
			 struct observed *before, u64 had_ns, u64 now)
{
	struct vcpu_counters *v = &o->counters;
	struct off_cpu *longest = &v->longest_off_cpu;
	u64 ns = ns_since(o->off_since_ns, now), taker = o->taker;

	if (!o->off_since_ns || ns <= longest->ns)
		return;
	*longest = o->off;
	longest->ns = ns;
	longest->end_ns = now;
	longest->goes_on = !prev;
	if (v->phase == PHASE_READY)
		longest->ready_ns = ns_since(v->since_ns, now);
	if (v->phase == PHASE_LIMITED)
		longest->limited_ns = ns_since(v->since_ns, now);
	/* Who took the vCPU's CPU may have had it for a moment only. */
	if (prev && (longest->taker.kind == TAKER_NONE || had_ns > ns / 2)) {
		note_taker(&longest->taker, prev, before);
		taker = (u64)prev;
	}
	name_taker(&longest->taker, taker);
}

/* What is said of @o's vCPU while it has this CPU ends. */
static void leaves_cpu(struct observed *o, u64 now)
{
	__sync_fetch_and_sub(&vm_of(o)->nr_running, 1);
	if (o->counters.halts_on_cpu)
		halt_counts(&o->halt, now, false);
}

/* Thread @p, with @o, is seen to run @vcpu, for the first time or a new one. */
static void begin(struct task_struct *p, struct observed *o,
		  struct kvm_vcpu___kvm *vcpu, u64 now)
{
	struct vcpu_counters *v = &o->counters;

	if (v->phase == PHASE_RUNS)
		leaves_cpu(o, now);
	__builtin_memset(v, 0, sizeof(*v));
	v->kvm = (u64)kvm_read(vcpu, kvm);
	v->tgid = p->tgid;
	v->vcpu_id = kvm_read(vcpu, vcpu_id);
	v->tid = p->pid;
	v->last_cpu = -1;
	v->halts_on_cpu = halts_on_cpu(vcpu);
	if (v->halts_on_cpu)
		halts_seen = true;
	__builtin_memset(&o->halt, 0, sizeof(o->halt));
	o->off_since_ns = 0;
	o->page_since_ns = 0;
	v->since_ns = now;
	o->vcpu = (u64)vcpu;
	o->vm = slot_of(p);
}

/* Has the kernel's own scheduler stopped @p because of a cap? What it noted
 * before another one took over does not count. */
static bool is_throttled(struct task_struct *p)
{
	struct task_struct___cap *cap = (void *)p;

	return (u64)p->sched_class != ext_sched_class_addr &&
	       bpf_core_field_exists(cap->throttled) && cap->throttled;
}

/* What is kept with @p if it runs a vCPU now, or ran one. */
static struct observed *recognise(struct task_struct *p, u64 now)
{
	struct kvm_vcpu___kvm *vcpu;
	struct observed *o;

	if (p->flags & PF_KTHREAD)
		return NULL;
	o = lookup(p);
	vcpu = vcpu_if_any(p);
	/* It was asked before whether that is KVM's. */
	if (!vcpu || (o && o->vcpu == (u64)vcpu))
		return o;
	vcpu = vcpu_of(p);
	if (!vcpu)
		return o;
	if (!o)
		o = bpf_task_storage_get(&tasks, p, 0,
					 BPF_LOCAL_STORAGE_GET_F_CREATE);
	if (o)
		begin(p, o, vcpu, now);
	return o;
}

/* @p, with @o, waits for a CPU from @now on: so does, now or again, an IPI that its
 * vCPU got and has not ended. Whether an interrupt is one, its vector tells. */
static void note_unanswered_ipi(struct task_struct *p, struct observed *o,
				u64 now)
{
	if (has_interrupt(vcpu_now(p, o), vm_of(o)->ipi_vectors))
		begin_ipi_wait(o, now);
}

/* @p leaves its CPU to @next, whose observed is @taker, if any; @task_state is 0
 * if it did not want to. */
static void stops(struct task_struct *p, struct observed *o,
		  struct task_struct *next, struct observed *taker,
		  u32 task_state, struct cpu_state *c, u64 now)
{
	struct vcpu_counters *v = &o->counters;
	struct kvm_vcpu___kvm *vcpu;
	bool blocks, for_page;

	c->kvm = v->kvm;
	c->pid = p->pid;
	c->tgid = v->tgid;
	c->ran_ns = v->phase == PHASE_RUNS ? now - v->since_ns : 0;
	if (v->phase == PHASE_RUNS)
		leaves_cpu(o, now);
	end_phase(v, now);
	add_spin_time(o, now);
	o->successor = next->pid;
	o->task_state = task_state;
	if (task_state) {
		vcpu = vcpu_now(p, o);
		blocks = is_blocking(vcpu);
		for_page = blocks && waits_for_page(vcpu);
		if (!for_page)
			o->page_since_ns = 0;
		else if (!o->page_since_ns || c->ran_ns > INTERRUPT_NS)
			o->page_since_ns = now;
		v->phase = blocks && !for_page ? PHASE_HALTED : PHASE_AWAY;
		if (v->phase == PHASE_AWAY)
			off_begins(o, for_page ? o->page_since_ns : now);
		return;
	}
	off_begins(o, now);
	v->phase = is_throttled(p) ? PHASE_LIMITED : PHASE_READY;
	o->preempted = v->phase == PHASE_READY;
	if (o->preempted)
		note_unanswered_ipi(p, o, now);
	note_taker(&o->off.taker, next, taker);
	o->taker = (u64)next;
}

/* @o's vCPU runs: an IPI waits for it no more. */
static void end_ipi_wait(struct observed *o, u64 now)
{
	struct vcpu_counters *v = &o->counters;
	u64 waited_ns = ns_since(o->ipi_waits_ns, now);

	if (!o->ipi_waits_ns)
		return;
	o->ipi_waits_ns = 0;
	count_time(v->counts.ipi_to_run, waited_ns);
	v->counts.ipi_to_run_ns += waited_ns;
	if (waited_ns > v->longest_ipi_ns)
		v->longest_ipi_ns = waited_ns;
}

/* @p gets this CPU. */
static void runs(struct task_struct *p, struct observed *o, struct cpu_state *c,
		 u64 now)
{
	struct vcpu_counters *v = &o->counters;
	s32 cpu = bpf_get_smp_processor_id();
	u64 waited_ns = ns_since(v->since_ns, now);
	bool waited = v->phase == PHASE_READY;

	o->off_since_ns = 0;
	end_phase(v, now);
	v->phase = PHASE_RUNS;
	o->spins_since_ns = now;
	end_ipi_wait(o, now);
	if (v->last_cpu >= 0 && v->last_cpu != cpu) {
		v->counts.migrations++;
		if (domain_of(v->last_cpu) != domain_of(cpu))
			v->counts.migrations_far++;
	}
	v->last_cpu = cpu;
	if (waited) {
		count_time(v->counts.ready_us, waited_ns);
		if (waited_ns > v->longest_ready_ns)
			v->longest_ready_ns = waited_ns;
	}
	/* Not when it was: KVM notes the guest's mode a moment later. */
	if (waited && o->preempted) {
		count_taker(o, waited_ns);
		if (was_in_guest_kernel(vcpu_now(p, o)))
			v->counts.preempted_kernel++;
		else
			v->counts.preempted_user++;
	}
	o->preempted = false;
	if (v->halts_on_cpu)
		halt_begins(&o->halt, now);
	if (waited && c->kvm == v->kvm && c->tgid == v->tgid &&
	    c->pid != p->pid && vm_of(o)->nr_running < p->nr_cpus_allowed)
		v->counts.stacked_ns +=
			c->ran_ns < waited_ns ? c->ran_ns : waited_ns;
	__sync_fetch_and_add(&vm_of(o)->nr_running, 1);
}

SEC("tp_btf/sched_switch")
int BPF_PROG(switches, bool preempt, struct task_struct *prev,
	     struct task_struct *next, u32 prev_state)
{
	struct cpu_state *c = this_cpu();
	struct observed *stopped, *started;
	u64 now = bpf_ktime_get_ns(), had_ns;

	if (!c)
		return 0;
	had_ns = ns_since(c->since_ns, now);
	c->since_ns = now;
	stopped = recognise(prev, now);
	started = recognise(next, now);
	c->kvm = 0;
	if (stopped)
		stops(prev, stopped, next, started, preempt ? 0 : prev_state, c,
		      now);
	if (started) {
		keep_longest(started, prev, stopped, had_ns, now);
		runs(next, started, c, now);
	}
	return 0;
}

SEC("tp_btf/sched_wakeup")
int BPF_PROG(wakes, struct task_struct *p)
{
	struct observed *o = lookup(p);
	struct vcpu_counters *v;
	u64 now;

	if (!o)
		return 0;
	v = &o->counters;
	if (v->phase != PHASE_HALTED && v->phase != PHASE_AWAY)
		return 0;
	now = bpf_ktime_get_ns();
	if (v->phase == PHASE_AWAY)
		note_sleep(p, o);
	else
		off_begins(o, now);
	end_phase(v, now);
	v->phase = PHASE_READY;
	v->counts.wakeups++;
	note_unanswered_ipi(p, o, now);
	return 0;
}

/* ---- directed yields ---- */

/* KVM has offered @p the running one's CPU: that ran next, or did not want it, or
 * the scheduler declined; otherwise somebody else came first. */
SEC("?fexit/yield_to")
int BPF_PROG(yield_ends, struct task_struct *p, bool preempt, int yielded)
{
	struct observed *o = lookup(bpf_get_current_task_btf()), *target;
	struct vcpu_counters *v;

	if (!o)
		return 0;
	v = &o->counters;
	v->counts.yields_offered++;
	if (yielded > 0) {
		if (o->successor == p->pid)
			v->counts.yields_served++;
	} else {
		target = lookup(p);
		if (target && target->counters.phase == PHASE_READY)
			v->counts.yields_refused++;
		else
			v->counts.yields_not_ready++;
	}
	o->successor = 0;
	return 0;
}

/* ---- reading ---- */

/* Looks at what has this CPU now: a vCPU may run for hours without a switch. Rust has
 * this run there by an interrupt. */
SEC("raw_tp")
int look_at_running(void *ctx)
{
	struct task_struct *p = bpf_get_current_task_btf();
	u64 now = bpf_ktime_get_ns();
	struct observed *o = recognise(p, now);
	struct cpu_state *c = this_cpu();

	if (!o || !c)
		return 0;
	if (o->counters.phase != PHASE_RUNS)
		runs(p, o, c, now);
	else if (o->counters.halts_on_cpu)
		halt_counts(&o->halt, now, true);
	return 0;
}

/* Does @p still run the vCPU that @o tells of? A VMM may have another thread do that,
 * or have closed the VM: then this reads what is there instead. */
static bool is_its_thread(struct task_struct *p, struct observed *o)
{
	struct kvm_vcpu___kvm *vcpu = (void *)o->vcpu;

	return kvm_read(vcpu, pid) == p->thread_pid;
}

/* Writes the counters of each vCPU there is, one after the other. */
SEC("iter/task")
int read_vcpus(struct bpf_iter__task *ctx)
{
	struct task_struct *p = ctx->task;
	struct kvm_vcpu___kvm *vcpu;
	struct vcpu_counters *v;
	struct observed *o;

	if (!p || p->exit_state)
		return 0;
	o = lookup(p);
	if (!o || !o->counters.kvm || !is_its_thread(p, o))
		return 0;
	v = &o->counters;
	vcpu = vcpu_now(p, o);
	if (vcpu)
		v->counts.poll_ns =
			kvm_read(vcpu, stat.generic.halt_poll_success_ns) +
			kvm_read(vcpu, stat.generic.halt_poll_fail_ns);
	v->counts.halted_on_cpu_ns = o->halt.halted_ns;
	v->counts.halted_unread_ns = o->halt.unread_ns;
	v->read_ns = bpf_ktime_get_ns();
	if (v->phase == PHASE_AWAY)
		note_sleep(p, o);
	keep_longest(o, NULL, NULL, 0, v->read_ns);
	bpf_seq_write(ctx->meta->seq, v, sizeof(*v));
	/* What ends in this moment may be missing, if it was longer than all else. */
	v->longest_off_cpu.ns = 0;
	return 0;
}
