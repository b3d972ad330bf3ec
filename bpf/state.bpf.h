/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Every map and struct of the BPF side, each field with its unit and its
 * writer. No logic but the look-ups and the counting.
 *
 * Index 0 of groups and queues means "none".
 */
#ifndef COHORT_STATE_BPF_H
#define COHORT_STATE_BPF_H

enum {
	MAX_QUEUES = 8192, /* (group, lane) pairs that held tasks */
	MAX_SUBSETS = 512, /* lanes made for cpusets and affinities */
	LANES_PER_CPU = 8, /* of those, how many one CPU can serve */
	LANES_SERVED = 2 + LANES_PER_CPU, /* its own and its domain's too */
	FIRST_DOMAIN_LANE = MAX_CPUS,
	FIRST_SUBSET_LANE = FIRST_DOMAIN_LANE + MAX_DOMAINS,
	MAX_LANES = FIRST_SUBSET_LANE + MAX_SUBSETS,
	MAX_CGROUP_DEPTH = 16, /* levels that weights and caps look up */
	OPEN_IPIS = 8, /* unanswered IPIs of one receiver; a power of two */
	CACHE_LINE = 128, /* two lines: the prefetcher takes pairs */
};

/* Set by Rust before loading. */
const volatile u64 slice_ns = 4000000;
const volatile u32 nr_cpus = 1;
const volatile u32 nr_domains = 1;
const volatile u16 cpu_domain[MAX_CPUS];

/*
 * Address of KVM's preempt_ops; written by Rust, at load or when kvm.ko comes
 * later. A task whose first preempt notifier carries it is inside KVM_RUN.
 */
volatile u64 kvm_preempt_ops_addr;

struct host_stats host_stats;

/* Bits of enum mechanism; written by Rust at any time. */
volatile u32 mechanisms = (1U << NR_MECH) - 1;

/* Set by Rust: the hardware ends interrupts, and KVM does not see it. */
const volatile bool eois_hidden;

/* Turns begin at this time and each slice after it; written by a tick, once a
 * second, as the clock of ticks may drift against this one. */
u64 turns_ns;
u64 turns_set_ns;

/* A queue's place among the queues of its lane, or among a cap's parked ones. */
struct queue_node {
	struct bpf_rb_node rb;
	u64 key; /* virtual time of its group when it was listed, ns */
	u32 queue; /* index of the queue it stands for */
};

enum queue_state {
	QUEUE_FREE = 0,
	QUEUE_IDLE, /* holds no task; the node is stashed in the queue */
	QUEUE_LISTED, /* the node is in its lane's tree */
	QUEUE_PARKED, /* the node waits at the group whose cap is used up */
};

/* The waiting tasks of one group that may run on one lane: a DSQ with its index
 * as id, ordered by the tasks' virtual time inside the group. */
struct queue {
	u32 state; /* enum queue_state; changed by compare-and-swap */
	u32 group; /* set when made */
	u32 lane; /* set when made */
	u32 next; /* next queue of the same group; set when made */
	s32 nr_waiting; /* tasks that wait; atomic. Ahead of the DSQ's own
			   count, which an enqueue raises after its op */
	u32 orphan; /* its group is gone: free it when it is unlisted */
	u64 parked_ns; /* when it was parked */
	u64 parked_sum_ns; /* how long it was, in all */
	u64 served_key; /* its key when it was listed or served, ns */
	struct queue_node __kptr *node;
} __attribute__((aligned(CACHE_LINE)));

/* A set of CPUs whose waiting tasks may run on every one of them: one CPU, a
 * domain, or the part of a domain that a cpuset or an affinity leaves. */
struct lane {
	struct bpf_spin_lock lock; /* of tree */
	struct bpf_rb_root tree __contains(queue_node, rb);
	u32 nr_listed; /* queues in tree; under lock, read without */
	u32 nr_cpus; /* in it */
	u32 users; /* subset: tasks assigned to it; atomic, 0: free */
	struct bpf_cpumask __kptr *mask; /* domain and subset lanes */
} __attribute__((aligned(CACHE_LINE)));

/* What one CPU does. Written by that CPU unless said otherwise. */
struct cpu_state {
	u32 group; /* of the running task, 0: idle */
	u32 offline; /* or about to be; by the hotplug ops */
	u32 contested; /* a task waited for it at the last dispatch */
	u64 present; /* virtual time of the group the last contest favoured */
	u64 present_at_ns; /* when that was */
	u64 nr_dispatches;
	s32 prev_pid; /* the task that ran last */
	u32 prev_group; /* and its group */
	u64 prev_run_ns; /* how long it ran */

	u64 slice_until_ns; /* end of the running task's slice */

	/* The sibling that the running vCPU, or a thread of its VM, woke last:
	 * it goes on with the VM's turn if the running one sleeps. */
	s32 heir_pid; /* 0: none */
	u32 heir_queue; /* in which it waits */

	/* The accepted yield that is owed to a VM on this CPU. */
	s32 yield_pid; /* its target, 0: none */
	u32 yield_queue; /* in which the target waits */
	u32 yield_group; /* the VM */
	u64 yield_slice_ns; /* what the yielder had left of its turn */
	u64 yield_until_ns; /* when the offer is stale */

	u32 lanes[LANES_PER_CPU]; /* subset lanes; any CPU, CAS from 0 */
} __attribute__((aligned(CACHE_LINE)));

/* A VM, or a cgroup with the tasks in it that belong to no VM. */
struct group {
	struct cohort_group info; /* first: Rust reads it */

	struct bpf_spin_lock lock; /* active, contributed, parked */
	struct bpf_rb_root parked __contains(queue_node, rb);
	struct bpf_timer cap_timer; /* refills budget_ns each period */

	u64 vtime; /* ns of virtual time used; atomic */
	u64 task_vtime_now; /* ns: the latest of a task picked inside it */

	/* Activity, from which shares follow. */
	u32 nr_runnable; /* own tasks, running ones included; atomic */
	u32 nr_running; /* own tasks on a CPU; atomic */
	s64 active_weight; /* active children, and own tasks if any; atomic */
	u64 average_weight; /* of active_weight, times WEIGHT_SCALE */
	u64 averaged_at_ns; /* up to when */
	u32 active; /* counted in the parent; under lock */
	u32 contributed; /* with this weight; under lock */
	u64 share; /* of SHARE_ONE, as of share_at_ns */
	u64 share_at_ns;

	/* cpu.max */
	u64 quota_ns; /* 0: none */
	u64 period_ns;
	u64 burst_ns;
	s64 budget_ns; /* left in this period; atomic */
	u32 throttled; /* it is used up */
	u32 timer_ready; /* cap_timer is initialised */

	/* Is everything below it one process? Sums over tasks; atomic. */
	u64 tgid_sum;
	u64 tgid_sum_sq;

	u64 ipi_window_ns; /* VM: an IPI is waited for at most so long */
	u64 parent_checked_ns; /* VM: when its place was last looked up */
	u32 first_queue; /* list by queue.next; compare-and-swap */
} __attribute__((aligned(CACHE_LINE)));

/* An IPI that this task's vCPU has not answered yet. Written by the sender, in
 * its thread; ended (sent_ns) by the receiver in its own. */
struct open_ipi {
	s32 from; /* the sender's thread */
	u32 vector;
	u64 sent_ns; /* 0: answered */
};

/* What is known of one task. Written in its own ops, under its rq's lock. */
struct task_ctx {
	u32 group; /* that pays for it */
	u32 cgroup_group; /* of its cgroup */
	u32 queue; /* it waits in, 0: none; swapped atomically */
	u32 lane; /* it waits in; valid if lane_domain matches */
	u32 lane_domain; /* domain + 1 for which lane was found, 0: none */
	u32 subset_lane; /* whose users counts it, 0: none */
	u32 queue_cached; /* queue of (cached_group, cached_lane) */
	u32 cached_group;
	u32 cached_lane;
	u32 is_vcpu; /* it was seen inside KVM_RUN */
	u32 is_runnable; /* counted in its group's nr_runnable */
	s32 last_cpu; /* it ran on, -1: none */
	u64 kvm; /* of the vCPU it runs */
	u64 vtime; /* ns of virtual time inside its group */
	u64 parked_mark_ns; /* its queue's parked_sum_ns when it joined that */
	u64 throttled_ns; /* of its present waiting, in parked queues */
	u64 ready_at_ns; /* when it began to wait, 0: it does not */
	u64 charged_ns; /* of its CPU time, as the kernel counts that */
	u64 run_at_ns; /* when it started running */

	/* As a sender. Written in its own thread. */
	s32 ipi_to; /* thread that got its last IPI, 0: none */
	s32 accepted_by; /* thread that accepts what is being delivered */
	u32 accepted_vector;
	u32 nr_accepted; /* how many did, 2 also for what is not fixed */
	u32 delivers; /* an IPI is under way */
	u32 spins_in_kernel; /* its last spin exit was in guest kernel mode */
	u32 yielded; /* a yield was accepted during that spin exit */

	/* As a receiver. */
	struct open_ipi open[OPEN_IPIS]; /* by sender */
	u64 ipi_waits_ns; /* since when one waits for it to run, 0: none */
};

/* A VM's identity. KVM may reuse the address after the VM is gone, while its
 * process lives: both together do not repeat while either is known. */
struct vm_key {
	u64 kvm;
	u32 tgid;
	u32 pad;
};

struct queue_key {
	u32 group;
	u32 lane;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_GROUPS);
	__type(key, u32);
	__type(value, struct group);
} groups SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_QUEUES);
	__type(key, u32);
	__type(value, struct queue);
} queues SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_LANES);
	__type(key, u32);
	__type(value, struct lane);
} lanes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_CPUS);
	__type(key, u32);
	__type(value, struct cpu_state);
} cpus SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct task_ctx);
} tasks SEC(".maps");

/* By cgroup id, not in cgroup storage: an untrusted pointer is enough. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_GROUPS);
	__type(key, u64);
	__type(value, u32);
} group_of_cgroup SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_GROUPS);
	__type(key, struct vm_key);
	__type(value, u32);
} group_of_vm SEC(".maps");

/* The VM that a process's other threads belong to. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_GROUPS);
	__type(key, u32);
	__type(value, u32);
} group_of_process SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_QUEUES);
	__type(key, struct queue_key);
	__type(value, u32);
} queue_of SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_QUEUE);
	__uint(max_entries, MAX_GROUPS);
	__type(value, u32);
} free_groups SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_QUEUE);
	__uint(max_entries, MAX_QUEUES);
	__type(value, u32);
} free_queues SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_QUEUE);
	__uint(max_entries, MAX_SUBSETS);
	__type(value, u32);
} free_lanes SEC(".maps");

/*
 * Look-ups. State of a group, queue, lane or CPU always exists; that an
 * index is out of range is a bug and ends the scheduler by name.
 */
#define DEFINE_LOOKUP(name, type, map)                                 \
	static __always_inline struct type *lookup_##name(u32 id)      \
	{                                                              \
		struct type *value = bpf_map_lookup_elem(&map, &id);   \
		if (!value)                                            \
			scx_bpf_error(#name " %u does not exist", id); \
		return value;                                          \
	}

DEFINE_LOOKUP(group, group, groups)
DEFINE_LOOKUP(queue, queue, queues)
DEFINE_LOOKUP(lane, lane, lanes)
DEFINE_LOOKUP(cpu, cpu_state, cpus)

/* NULL for a task the scheduler was never told of (not yet, or no more). */
static __always_inline struct task_ctx *
lookup_task_may_fail(struct task_struct *p)
{
	return bpf_task_storage_get(&tasks, p, 0, 0);
}

/* The same by the thread's id; NULL also if there is no such thread. */
static struct task_ctx *lookup_thread_may_fail(s32 pid)
{
	struct task_struct *p = bpf_task_from_pid(pid);
	struct task_ctx *tc;

	if (!p)
		return NULL;
	tc = lookup_task_may_fail(p);
	bpf_task_release(p);
	return tc;
}

static __always_inline struct task_ctx *lookup_task(struct task_struct *p)
{
	struct task_ctx *tc = lookup_task_may_fail(p);

	if (!tc)
		scx_bpf_error("task %d (%s) has no state", p->pid, p->comm);
	return tc;
}

static __always_inline bool is_on(u32 mechanism)
{
	return mechanisms & (1U << mechanism);
}

static __always_inline void count(u64 *counter)
{
	__sync_fetch_and_add(counter, 1);
}

#endif /* COHORT_STATE_BPF_H */
