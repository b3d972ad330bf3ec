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
	LANES_PER_CPU = 8, /* of those, how many one CPU can serve */
	FIRST_DOMAIN_LANE = MAX_CPUS,
	FIRST_SUBSET_LANE = FIRST_DOMAIN_LANE + MAX_DOMAINS,
	MAX_LANES = FIRST_SUBSET_LANE + MAX_SUBSETS,
	MAX_CGROUP_DEPTH = 16, /* levels that weights and caps look up */
	QUEUE_BITS = 13, /* of the index of a queue */
	WINDOW_BITS = 11, /* of a number of CPUs */
	WINDOW_CPUS = 1 << WINDOW_BITS,
	CACHE_LINE = 128, /* two lines: the prefetcher takes pairs */
	ALLOCATION_TRIES = 1 << 20, /* while loading: an interrupt, soon due,
				       brings a program more memory */
};

/* Set by Rust before loading. */
const volatile u64 slice_ns = 4000000;
const volatile u32 nr_cpus = 1;
const volatile u32 nr_domains = 1;
const volatile u16 cpu_domain[MAX_CPUS];
const volatile u8 cpu_node[MAX_CPUS];
const volatile u8 node_distance[MAX_NODES * MAX_NODES]; /* as the kernel's */

struct host_stats host_stats;

/* How far ahead of its slowest waiting sibling a vCPU of a cohort is stopped, when
 * it goes on, and how often that is looked at. */
const volatile u64 skew_limit_ns = 3000000;
const volatile u64 skew_resume_ns = 2000000;
const volatile u64 skew_check_ns = 1000000;

/* How long a VM is to wait for its turn, at most. */
const volatile u64 ready_wait_ns = 24000000;

/* Bits of enum mechanism; written by Rust at any time. */
volatile u32 mechanisms = (1U << NR_MECH) - 1;

/* Turns begin at this time and each slice after it; written by a tick, once a
 * second, as is when that was. */
u64 turns_ns;
u64 turns_set_ns;
/* How late ticks have come since, at least; a tick: none was near. */
s64 turns_late_ns;
/* From tick to tick; with turns_ns, by what the kernel counted since loading. */
u64 tick_ns = TICK_NS;
u64 loaded_ns;
u64 loaded_jiffies;
/* How often a slice is halved to make a turn; written by ticks: more often at
 * any, less often with turns_ns. */
u32 turns_halved;
/* The most crowded CPU's crowd since. */
u32 turns_crowd;

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
	u64 window; /* opened on it last: id of the turn and, in the lowest
		       QUEUE_BITS, the cohort's queue; compare-and-swap */
	u64 filler; /* in a window: the CPU that ran another VM, as for the
		       moment no vCPU waited; id of the turn and, in the
		       lowest WINDOW_BITS, the CPU */
	u64 serving; /* CPUs that serve windows of tasks which waited here, as
			in struct group */
	u32 users; /* subset: tasks assigned to it; atomic, 0: free */
	struct bpf_cpumask __kptr *mask; /* domain and subset lanes */
} __attribute__((aligned(CACHE_LINE)));

/* What is left of a VM's turn on a CPU, and who has it. */
struct rest {
	s32 pid; /* 0: nobody */
	u32 queue; /* in which it waits */
	u64 until_ns; /* the turn's end */
};

/* What one CPU does. Written by that CPU unless said otherwise. */
struct cpu_state {
	u32 group; /* of the running task, 0: idle */
	u32 offline; /* or about to be; by the hotplug ops */
	u32 contested; /* a task waited for it at the last dispatch */
	u64 present; /* virtual time of the group the last contest favoured */
	u64 present_at_ns; /* when that was */
	u32 far_domain; /* the other domain that it looked at last */
	u64 balanced_turn; /* number of the turn in which it did, to balance */
	u64 wanted_afar_ns; /* when it last saw a task there that may run here */
	s32 prev_pid; /* the task that ran last */
	u32 prev_group; /* and its group */
	u64 prev_run_ns; /* how long it ran */

	u64 slice_until_ns; /* end of the running task's slice */
	u64 window_turn; /* the turn in which it serves */
	u32 window_group; /* this VM; 0: none */
	u32 window_lane; /* to which its task belongs */
	bool window_open; /* in a window that was open; else it came early */
	u64 called_turn; /* in which it fills in for a window, and is wanted there */
	u32 gave_way; /* at the last dispatch, for that */
	u32 crowd; /* turns until the last group that waits for it has one, on
		      average, times CROWD_ONE */
	u64 ticks_since_ns; /* turns_set_ns as it was when these were 0: */
	u32 ticks_near; /* ticks that came when turns end */
	u32 ticks_far; /* and others */
	bool ticks_miss; /* most are others: an alarm ends turns */

	/* The running vCPU yields in a moment, though KVM did not ask. */
	s32 relaxed_pid;

	/* Short extensions of a slice. */
	u32 leaves_hook; /* how many the running vCPU had to come to the end of a
			    BPF program */
	s32 grace_pid; /* the running task if it was given one, else 0 */

	/* The sibling that the running vCPU, or a thread of its VM, woke last:
	 * it goes on with the VM's turn if the running one sleeps. */
	struct rest heir;
	/* The vCPU whose turn was interrupted: it goes on when what runs in its
	 * place sleeps. */
	struct rest interrupted;

	/* The thread of a VM to which the CPU is to be lent. */
	struct rest borrower;
	s32 lent_pid; /* the one that runs on a loan, or is just to; else 0 */
	u64 lent_until_ns; /* to nobody else before that */

	/* The accepted yield that is owed to a VM on this CPU. */
	s32 yield_pid; /* its target, 0: none */
	u32 yield_queue; /* in which the target waits */
	u32 yield_group; /* the VM */
	u32 yield_mechanism; /* that chose the target */
	u64 yield_turn_until_ns; /* end of the turn that the yielder hands on */
	u64 yield_until_ns; /* when the offer is stale */

	u32 lanes[LANES_PER_CPU]; /* subset lanes; any CPU, CAS from 0 */
	u32 lane_places; /* in @lanes that were ever taken: the first ones */
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
	u64 running; /* own tasks on a CPU and their charged_at_ns, as
			fair_runs() adds them; atomic */
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

	/* VM: do its vCPUs wait for each other? */
	u64 sync_score; /* of SYNC_ONE */
	u64 sync_events; /* signs counted when the score was last taken */
	u64 sync_run_ns; /* and CPU time used until then; compare-and-swap */

	/* Cohort: its last window. Written by the CPU that opens it, before
	 * lanes show it. */
	u64 window; /* id of the turn and, in the lowest WINDOW_BITS, how
		       many CPUs serve it; compare-and-swap */
	u64 early; /* the same of those that ran it in a turn before */
	u64 window_full; /* id of the last turn in which all did that could */
	u64 window_bound; /* virtual time: groups before it are not held up */
	u64 window_at_ns; /* when it began */
	u64 window_wanted; /* its turn, and CPUs that its vCPUs could use in it */

	u64 parent_checked_ns; /* VM: when its place was last looked up */
	u32 first_queue; /* list by queue.next; compare-and-swap */
} __attribute__((aligned(CACHE_LINE)));

/* What is known of one task. Written in its own ops, under its rq's lock. */
struct task_ctx {
	u32 group; /* that pays for it */
	u32 cgroup_group; /* of its cgroup */
	u32 queue; /* it waits in, 0: none; swapped atomically */
	u32 lane; /* it belongs to, found anew if lane_domain does not match */
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
	u64 stopped_at_ns; /* when it was stopped, being ahead; 0: it is not */
	u64 costop_ns; /* of its present waiting, stopped */
	u64 ready_at_ns; /* when it began to wait, 0: it does not */
	u64 charged_ns; /* of its CPU time, as the kernel counts that */
	u64 charged_at_ns; /* when that was, while it runs */
	u64 run_at_ns; /* when it started running */

	u64 woke_sibling_ns; /* when it woke one, and has not slept since; or 0 */
	u32 handovers; /* how often it sleeps soon after, of HANDOVER_ONE */

	u32 spins_in_kernel; /* its last spin exit was in guest kernel mode */
	u32 yielded; /* a yield was accepted during that spin exit */

	/* Yields: what they change in the order of siblings, once each. */
	u64 penalty_ns; /* it waits behind others by so much more, once */
	u64 credit_ns; /* it comes before others by so much more, once */
	u64 penalised_ns; /* when it was given its last penalty */
	s32 yielded_by; /* the sibling that yielded to it last */
	u64 yielded_at_ns; /* when that was */

	struct signals signals;
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

/* What a CPU is to do between two ticks. Not in its state: functions that the
 * verifier looks at by themselves may not be given what holds a timer. */
struct cpu_alarm {
	struct bpf_timer timer;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_CPUS);
	__type(key, u32);
	__type(value, struct cpu_alarm);
} alarms SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct task_ctx);
} tasks SEC(".maps");

/* How often each mechanism (index: enum mechanism) changed who runs, or for how
 * long; per CPU, so that counting costs nothing. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, NR_MECH);
	__type(key, u32);
	__type(value, u64);
} effects SEC(".maps");

/* By thread; without vCPUs that never waited so. The observer finds it by name. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, s32);
	__type(value, struct vcpu_waits);
} cohort_waits SEC(".maps");

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

/* Exceptions: the enum cohort_rule of a process's VM, if not COHORT_AUTO. Written
 * by Rust. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_GROUPS);
	__type(key, u32);
	__type(value, u32);
} cohort_rules SEC(".maps");

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

/* Numbers of groups, queues and subset lanes that are free. */
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
DEFINE_LOOKUP(alarm, cpu_alarm, alarms)

/* Is lane @id that of one CPU, the lane's number? */
static bool is_own_lane(u32 id)
{
	return id < FIRST_DOMAIN_LANE;
}

/* A number that was free; @used counts those that are not. */
static __always_inline bool take_number(void *free, u64 *used, u32 *id)
{
	if (bpf_map_pop_elem(free, id))
		return false;
	__sync_fetch_and_add(used, 1);
	return true;
}

static __always_inline void give_number(void *free, u64 *used, u32 id)
{
	bpf_map_push_elem(free, &id, BPF_EXIST);
	__sync_fetch_and_sub(used, 1);
}

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

/* Of the running task. */
static struct task_ctx *current_ctx(void)
{
	return lookup_task_may_fail(bpf_get_current_task_btf());
}

/* The running task, which wakes the vCPU @tc, if it is of the same VM; else NULL. */
static struct task_ctx *waker_of(const struct task_ctx *tc)
{
	struct task_ctx *waker = tc->is_vcpu ? current_ctx() : NULL;

	return waker && waker->group == tc->group ? waker : NULL;
}

static __always_inline struct task_ctx *lookup_task(struct task_struct *p)
{
	struct task_ctx *tc = lookup_task_may_fail(p);

	if (!tc)
		scx_bpf_error("task %d (%s) has no state", p->pid, p->comm);
	return tc;
}

static __always_inline u32 domain_of(u32 cpu)
{
	return cpu_domain[cpu & (MAX_CPUS - 1)];
}

/* Between the nodes of two CPUs, 10 within one, as the kernel gives it. */
static __always_inline u32 distance_between(u32 a, u32 b)
{
	u32 from = cpu_node[a & (MAX_CPUS - 1)] & (MAX_NODES - 1);
	u32 to = cpu_node[b & (MAX_CPUS - 1)] & (MAX_NODES - 1);

	return node_distance[from * MAX_NODES + to];
}

static __always_inline bool is_on(u32 mechanism)
{
	return mechanisms & (1U << mechanism);
}

static __always_inline void count(u64 *counter)
{
	__sync_fetch_and_add(counter, 1);
}

/* An interrupt may come between and count as well: one is lost then. */
static __always_inline void count_effect(u32 mechanism)
{
	u64 *nr = bpf_map_lookup_elem(&effects, &mechanism);

	if (nr)
		(*nr)++;
}

#endif /* COHORT_STATE_BPF_H */
