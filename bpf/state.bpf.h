/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Maps and structs of the scheduler, each field with its unit and its writer. No
 * logic but look-ups and counting. Not here: what belongs to one part only and
 * stands with it (caps, KVM, signals, halted time).
 *
 * Index 0 of groups and entities means "none".
 *
 * Times are those of bpf_ktime_get_ns(). scx_bpf_now() would be less to execute, but is
 * right in ops only: who moves a task from the run queue of another CPU leaves the time
 * of that move there as the present, until that CPU's next switch or tick.
 */
#ifndef COHORT_STATE_BPF_H
#define COHORT_STATE_BPF_H

enum {
	MAX_CGROUP_DEPTH = 16, /* levels that weights and caps look up */
	PLAN_ENTRIES = 128, /* that compete for a turn of a domain */
	CACHE_LINE = 128, /* two lines: the prefetcher takes pairs */
	ALLOCATION_TRIES = 1 << 20, /* while loading: an interrupt, soon due,
				       brings a program more memory */
};

/* Dispatch queues: an entity's has its number; of a CPU, of a domain: */
#define BOUND_QUEUE  ((u32)MOST_ENTITIES) /* tasks bound to this CPU */
#define PARKED_QUEUE 0x20000U /* tasks whose cap is used up */
#define QUEUE_KINDS  0xf0000U

/* Set by Rust before loading. */
const volatile u64 slice_ns = 2000000;
const volatile u32 nr_cpus = 1;
const volatile u32 nr_domains = 1;
const volatile u32 nr_groups = LEAST_GROUPS; /* number 0 means none */
const volatile u32 nr_entities = LEAST_ENTITIES; /* likewise */
const volatile u16 cpu_domain[MAX_CPUS];
const volatile u8 cpu_node[MAX_CPUS];
const volatile u8
	node_distance[MAX_NUMA_NODES * MAX_NUMA_NODES]; /* as the kernel's */

struct host_stats host_stats;

/*
 * 0, but the verifier does not know. Where the counter of a loop over tasks begins with
 * this, each round is like the one before to it; it would look at all of them one by
 * one else.
 */
u32 unknown_zero;

/* How long a VM is to wait for its turn, at most. */
const volatile u64 ready_wait_ns = 24000000;

/* In this time every group that waits has a turn, however little its weight is. */
const volatile u64 starved_ns = 500000000;

/* Nobody is parked for longer (ns): a quarter of the watchdog's time. */
const volatile u64 parked_most_ns = 1250000000;

/* Bits of enum mechanism; written by Rust at any time. */
volatile u32 mechanisms = (1U << NR_MECH) - 1;

/* The group of the root cgroup; set at the start. */
static u32 root_group;

/* Domains in which tasks wait; atomic, changed when the first one does. */
u32 nr_crowded;

/* Virtual time, ns: the present of the domain whose is the latest. Written once in a
 * turn. */
u64 host_present;

/* Domains of whose turn an entity was left out; atomic, changed when the first one
 * is. */
u32 nr_short;

/* An entity's place in the tree of its domain. */
struct entity_node {
	struct bpf_rb_node rb;
	u64 key; /* its virtual time when it was listed, ns */
	u32 entity; /* index of the entity it stands for */
};

enum entity_state {
	ENTITY_FREE = 0,
	ENTITY_IDLE, /* has no task; its node is stashed in it */
	ENTITY_BUSY, /* its node is in its domain's tree, or somebody has taken it
			out, to put it back */
};

/* A group in a domain: those of its tasks there that may run on the same CPUs. The
 * waiting ones are in the DSQ with its index, by their virtual time in the group. */
struct entity {
	u32 state; /* enum entity_state; changed by compare-and-swap */
	u32 group; /* set when made */
	u32 domain; /* set when made */
	s32 nr_waiting; /* tasks in its DSQ; atomic. Ahead of the DSQ's own
			   count, which an enqueue raises after its op */
	u64 cpus; /* of its domain, that its tasks may run on */
	u32 adopting; /* these are about to be others' */
	u64 running; /* CPUs that run one; atomic */
	u64 planned; /* CPUs that it has in turn @turn; by the plan */
	u64 turn; /* number of the last plan that gave it CPUs */
	u64 patient; /* the last turn in which it had no CPU of a vCPU that works */
	u64 near; /* CPUs at which one may wait: see note_near(); atomic */
	u64 called; /* of @planned, CPUs told that a task waits for them; atomic */
	u64 missed; /* of @planned, CPUs that have not run a task of it yet; atomic */
	u64 served_ns; /* when it had its last turn, or began to want one */
	u32 nr_sleeps; /* of its vCPUs since it took part in a plan; atomic */
	u64 part_turn; /* which was this turn's; by plans, as are */
	u32 mean_sleeps; /* the means over turns of that number */
	u32 mean_running; /* and of the CPUs that run one: see plan_average() */
	struct entity_node __kptr *node;
} __attribute__((aligned(CACHE_LINE)));

/* Who competes for a turn. */
struct plan_entry {
	u64 key; /* virtual time */
	u64 cost; /* virtual time that a turn costs it */
	u64 cpus; /* that it may have */
	u32 entity; /* 0: tasks bound to the one CPU in cpus */
	u32 width; /* CPUs that it wants */
};

/* CPUs with one last-level cache, DOMAIN_CPUS at most. Written by its plan unless said
 * otherwise, in the callback of its timer: one CPU at a time. */
struct domain {
	u32 id; /* its index; set at the start */
	u32 nr_listed; /* in its tree; under the lock of that, read without */
	s32 nr_waiting; /* tasks that wait for one of its CPUs; atomic */
	u32 waited_last; /* the entity in which one began to wait last; any CPU */
	s32 nr_parked; /* tasks that wait for their cap; atomic */
	s32 nr_homes; /* VMs that have their home here; atomic */
	u32 crowded; /* its turns are timed; compare-and-swap */
	u64 cpus; /* that are online; atomic */
	u64 bound; /* CPUs for which bound tasks wait; atomic */
	u64 idle; /* CPUs that are, as far as the kernel told; atomic */
	u64 quiet; /* CPUs that run a vCPU that rests; atomic */
	u64 often; /* CPUs whose vCPU is halted often; atomic */
	u32 refills; /* of caps, when parked tasks were looked through last */
	s32 to_unpark; /* of those parked then, that were not looked at yet */
	u32 unparking; /* a CPU looks at them; compare-and-swap */

	u64 turn __attribute__((aligned(CACHE_LINE))); /* number of the plan */
	u64 planned_ns; /* when it was made */
	u64 present; /* virtual time, ns: see plan_present() */
	u64 mean; /* virtual time of those that took part in it: see plan_mean() */
	u64 out_vtime; /* of the first one that found too few CPUs left, or far ahead */
	s64 lag_sum; /* see plan_mean(); while one is made */
	u64 share_sum;
	u64 resting; /* CPUs to which a vCPU is bound that rests, */
	u64 claimed; /* and those to which one is that does not; both by the plan */
	u64 spare; /* CPUs whose bound tasks have had more than others' */
	s64 bound_sum; /* of their places; while a plan is made */
	u32 nr_bound; /* of those; likewise */
	u32 nr_far; /* that take part, but have had so much that others come first */
	u32 is_short; /* an entity was left out of the turn: the first one */
	u32 left_group; /* is of this group */
	u64 left_vtime; /* and there */
	u64 served_vtime; /* of the last entity that has CPUs in it */
	u64 served_cpu; /* one of them, a bit */
	u32 nr_entries; /* in entries */
	u32 halvings; /* of a slice, that make a turn */
	u32 nr_kept; /* CPUs whose task goes on in it, as no other has its turn there */
	u32 far; /* the domain that was looked at last */
	u64 moved_turn; /* in which a VM was told to move here last */
	u32 timed_on; /* the CPU whose timer ends its turns */
	u32 nr_cpus;
	u16 cpu[DOMAIN_CPUS]; /* number of each; set at the start */
	struct plan_entry entries[PLAN_ENTRIES];
} __attribute__((aligned(CACHE_LINE)));

/* Why a task is to run next on a CPU. */
enum hint_reason {
	HINT_NONE = 0, /* none; or of a yield or an IPI, by its mechanism */
	HINT_WAKE, /* it woke, and what runs has had more */
	HINT_LOAN, /* it woke, and has the CPU for a moment */
};

/* A CPU's hints, in the order in which it follows them. */
enum hint_place {
	HINTS_WOKE, /* who woke last */
	HINTS_WOKE_BEFORE, /* and before that one */
	HINTS_SIBLING, /* the last yield or IPI */
	NR_HINTS,
};

/* Run this task next, for this reason, until then. */
struct hint {
	s32 pid; /* 0: none */
	u32 queue; /* in which it waits */
	u32 group; /* of it; only a yield's is set */
	u32 reason; /* enum hint_reason */
	u32 mechanism; /* that is counted */
	u64 until_ns;
};

/* What one CPU does. Written by that CPU unless said otherwise. */
struct cpu_state {
	u32 group; /* of the running task, 0: idle */
	u32 entity; /* of the running task, 0: idle, or bound to this CPU */
	u64 vtime; /* of the running task in its group, when it started */
	u64 run_at_ns; /* when it did */
	u32 bound; /* it is apart, and then: */
	u32 bound_share; /* what it is charged by, of SHARE_ONE */
	u64 bound_present; /* virtual time of the last such task when it started: a
			      clock of its own */
	u64 bound_offset; /* among groups they stand so far behind that; by plans */
	u64 bound_served_ns; /* when a plan saw one of them run last, or they began
				to want the CPU */
	s32 polls_pid; /* for whom KVM polled when the alarm was set; 0: nobody */
	s32 lent_pid; /* who has it for a moment, 0: nobody */
	u32 lent_reason; /* HINT_WAKE, or out of turn: HINT_LOAN */
	u64 lent_until_ns; /* when that ends */
	u64 next_loan_ns; /* nobody borrows it before */
	s32 yields_pid; /* a vCPU that gives way in a moment, though KVM did not ask */
	u32 rests; /* the running task rests */
	s32 resting_pid; /* the vCPU bound to it that rests, 0: none */
	u32 looks; /* it is to have the CPU for a moment; any CPU */
	u64 looked_ns; /* when it had it last */
	u32 leaves_hook; /* how often the running vCPU was let out of a hook */
	u32 looked_again; /* idle, as a task waited that it may not run */
	u32 sleeps_soon; /* the running vCPU does, as a rule */
	u64 alarm_ns; /* when its alarm rings; any CPU */
	u64 asked_ns; /* it looks again what it runs then, 0: when its slice ends;
			 any CPU */
	s32 nr_bound; /* tasks that wait for this CPU only; any CPU, atomic */
	struct hint hints[NR_HINTS]; /* any CPU */

	u32 slot; /* who has it in this turn: an entity, SLOT_BOUND, 0: nobody;
		     by its domain's plan */
	u32 pull_from; /* domain + 1 that it is to take a task from; likewise */
} __attribute__((aligned(CACHE_LINE)));

#define SLOT_BOUND ~0U /* tasks bound to it */

/* A VM, or a cgroup with the tasks in it that belong to no VM. */
struct group {
	struct cohort_group info; /* first: Rust reads it */

	u32 id; /* its own index */
	u64 vtime; /* ns of virtual time used by its tasks that are not apart;
		      atomic */
	u64 task_vtime_now; /* ns: the latest of a task picked inside it */
	u32 orphan; /* it is gone */
	u32 home; /* VM: domain + 1 in which its tasks wait; 0: where they are */
	s32 nr_entities; /* it has; atomic */

	/* Activity, from which shares follow. */
	u32 nr_runnable; /* own tasks, running ones included; atomic */
	u32 nr_apart; /* of which are apart; atomic */
	u32 nr_resting; /* own vCPUs that rest; atomic */
	u32 mean_width; /* VM: tasks that want a CPU together, at the mean of
			   turns, times WIDTH_ONE; by plans */
	u64 running; /* own tasks on a CPU that are not apart, and their
			charged_at_ns, as fair_runs() adds them; atomic */
	s64 active_weight; /* active children, and own tasks if any; atomic */
	u64 average_weight; /* of active_weight, times WEIGHT_SCALE */
	u64 averaged_at_ns; /* up to when */
	u32 contributed; /* its weight as it counts in the parent; under lock */
	u64 share; /* of SHARE_ONE, as of share_at_ns */
	u64 share_at_ns;

	/* cpu.max, beside what is in info */
	u64 burst_ns;
	s64 budget_ns; /* left in this period; atomic */

	/* Is everything below it one process? Sums over tasks; atomic. */
	u64 tgid_sum;
	u64 tgid_sum_sq;

	u64 parent_checked_ns; /* VM: when its place was last looked up */

	/* All above is 0 when it is made. */
	struct bpf_spin_lock lock; /* contributed, and its parent */
	struct bpf_timer cap_timer; /* refills budget_ns each period */
} __attribute__((aligned(CACHE_LINE)));

/* What is known of one task. Written in its own ops, under its rq's lock; where it waits,
 * also by who unparks it. */
struct task_ctx {
	u32 group; /* that pays for it */
	u32 cgroup_group; /* of its cgroup */
	u32 queue; /* it waits in, 0: none; swapped atomically */
	u32 entity; /* it belongs to, if that is one of its group and domain */
	u32 is_vcpu; /* it was seen inside KVM_RUN */
	u32 halts_on_cpu; /* its HLT or MWAIT do not exit */
	u32 halted_average; /* of that vCPU: see rest_average() */
	u32 rests_on; /* CPU + 1 on which it rests, 0: it does not */
	u32 is_runnable; /* counted in its group's nr_runnable */
	u32 apart; /* it may run elsewhere than the others of its group, as it
		      waited or ran last */
	u32 counts_apart; /* in its group's nr_apart; swapped atomically */
	u32 woke; /* and has not run since */
	u32 resumes; /* how often that went on then, since it woke */
	u64 lent_until_ns; /* when a moment ends for which it had a CPU */
	u64 cpus; /* of domain cpus_domain, that it may run on */
	u32 cpus_domain; /* + 1; 0: to be found */
	u64 kvm; /* of the vCPU it runs */
	u64 vtime; /* ns of virtual time inside its group */
	u64 bound_vtime; /* like a group's, by which it waits for one CPU, */
	u32 bound_on; /* this one + 1; 0: it has run since */
	u64 bound_cost; /* virtual time that it used since it waited */
	u32 parks; /* a tick stopped it for its cap */
	u64 parked_at_ns; /* when it was parked last */
	u64 throttled_ns; /* of its present waiting, parked */
	u64 ready_at_ns; /* when it began to wait, 0: it does not */
	u64 charged_ns; /* of its CPU time, as the kernel counts that */
	u64 charged_at_ns; /* when that was, while it runs */
	u64 run_at_ns; /* when it started running */
	u64 handed_at_ns; /* when it woke a sibling by an IPI, since it runs; 0: it did not */
	u64 halts_after_ns; /* how long after that it halts, as a rule: see
			       wake_halts_after() */
	u64 runs_for_ns; /* until it sleeps, as a rule: see wake_runs_for() */
	u32 yielded; /* a yield was accepted during that spin exit */

	struct signals signals;
	struct halt_count halt; /* if halts_on_cpu */
};

struct entity_key {
	u32 group;
	u32 domain;
};

/* Maps of LEAST_GROUPS and LEAST_ENTITIES have nr_groups and nr_entities where Rust
 * makes them larger. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, LEAST_GROUPS);
	__type(key, u32);
	__type(value, struct group);
} groups SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, LEAST_ENTITIES);
	__type(key, u32);
	__type(value, struct entity);
} entities SEC(".maps");

static struct domain domains[MAX_DOMAINS];
static struct cpu_state cpus[MAX_CPUS];

/* A CPU's bit in its domain's words; set at the start. */
u64 cpu_bit[MAX_CPUS];

/* What the kernel keeps an eye on has to be in maps: each domain's tree of entities, */
struct tree {
	struct bpf_spin_lock lock;
	struct bpf_rb_root root __contains(entity_node, rb);
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_DOMAINS);
	__type(key, u32);
	__type(value, struct tree);
} trees SEC(".maps");

/* and timers. */
struct timer {
	struct bpf_timer timer;
};

/* Ends the turns of each domain. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_DOMAINS);
	__type(key, u32);
	__type(value, struct timer);
} turns SEC(".maps");

/* Ends what a CPU does for a moment. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_CPUS);
	__type(key, u32);
	__type(value, struct timer);
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
	__uint(max_entries, LEAST_GROUPS);
	__type(key, u64);
	__type(value, u32);
} group_of_cgroup SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, LEAST_GROUPS);
	__type(key, struct vm_key);
	__type(value, u32);
} group_of_vm SEC(".maps");

/* Exceptions: the enum cohort_rule of a process's VM, if not COHORT_AUTO. Written
 * by Rust. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, LEAST_GROUPS);
	__type(key, u32);
	__type(value, u32);
} cohort_rules SEC(".maps");

/* The VM that a process's other threads belong to. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, LEAST_GROUPS);
	__type(key, u32);
	__type(value, u32);
} group_of_process SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, LEAST_ENTITIES);
	__type(key, struct entity_key);
	__type(value, u32);
} entity_of SEC(".maps");

/* Numbers of groups and entities that are free. */
struct {
	__uint(type, BPF_MAP_TYPE_QUEUE);
	__uint(max_entries, LEAST_GROUPS);
	__type(value, u32);
} free_groups SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_QUEUE);
	__uint(max_entries, LEAST_ENTITIES);
	__type(value, u32);
} free_entities SEC(".maps");

/*
 * Look-ups. State of a group or entity always exists; that an index is out of range is
 * a bug and ends the scheduler by name.
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
DEFINE_LOOKUP(entity, entity, entities)
DEFINE_LOOKUP(tree, tree, trees)
DEFINE_LOOKUP(turn_timer, timer, turns)
DEFINE_LOOKUP(alarm, timer, alarms)

/* The group at *@id, which then is the one above it; NULL: there is none. */
static __always_inline struct group *climb(u32 *id)
{
	struct group *g = *id ? lookup_group(*id) : NULL;

	if (g)
		*id = g->info.parent;
	return g;
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

static __always_inline struct cpu_state *cpu_at(u32 cpu)
{
	return &cpus[cpu & (MAX_CPUS - 1)];
}

static __always_inline struct domain *domain_at(u32 id)
{
	return &domains[id & (MAX_DOMAINS - 1)];
}

/* The domain of @cpu. */
static __always_inline struct domain *domain_with(u32 cpu)
{
	return domain_at(domain_of(cpu));
}

static __always_inline u64 bit_of(u32 cpu)
{
	return cpu_bit[cpu & (MAX_CPUS - 1)];
}

static __always_inline bool is_vm(const struct group *g)
{
	return g->info.kind == GROUP_VM;
}

/* The domain behind @id, round all of them. */
static __always_inline u32 next_domain(u32 id)
{
	return id + 1 < nr_domains ? id + 1 : 0;
}

/* The CPU with @bit, of @d. */
static __always_inline u32 cpu_with(const struct domain *d, u64 bit)
{
	return d->cpu[__builtin_ctzll(bit) & (DOMAIN_CPUS - 1)];
}

/* Between the nodes of two CPUs, 10 within one, as the kernel gives it. */
static __always_inline u32 distance_between(u32 a, u32 b)
{
	u32 from = cpu_node[a & (MAX_CPUS - 1)] & (MAX_NUMA_NODES - 1);
	u32 to = cpu_node[b & (MAX_CPUS - 1)] & (MAX_NUMA_NODES - 1);

	return node_distance[from * MAX_NUMA_NODES + to];
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
