/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What KVM's own structures tell of a task that is inside KVM_RUN, or of a vCPU.
 * Reads only; all fields by CO-RE, as kernels differ. Not here: what follows from
 * it, and what has to be seen when it happens (observe.bpf.h).
 */
#ifndef COHORT_KVM_BPF_H
#define COHORT_KVM_BPF_H

/*
 * Address of KVM's preempt_ops; written by Rust, at load or when kvm.ko comes
 * later. A task whose first preempt notifier carries it is inside KVM_RUN.
 */
volatile u64 kvm_preempt_ops_addr;

enum {
	PF_VCPU = 0x00000001, /* include/linux/sched.h: in guest context */
	/* include/uapi/linux/kvm.h: bits of disabled_exits */
	EXITS_MWAIT = 1,
	EXITS_HLT = 2,
	MP_STATE_HALTED = 3, /* there too: KVM_MP_STATE_HALTED */
};

/* A VM's identity. KVM may reuse the address after the VM is gone, while its
 * process lives: both together do not repeat while either is known. */
struct vm_key {
	u64 kvm;
	u32 tgid;
	u32 pad;
};

/* The fields that are read; the vmlinux.h that this is built with has no KVM. */
struct preempt_notifier___kvm {
	struct hlist_node link;
	void *ops;
} __attribute__((preserve_access_index));

struct task_struct___kvm {
	struct hlist_head preempt_notifiers;
} __attribute__((preserve_access_index));

struct kvm_vcpu_arch___kvm {
	struct kvm_lapic___kvm *apic;
	s32 mp_state;
	bool preempted_in_kernel;
} __attribute__((preserve_access_index));

struct kvm_vcpu_stat_generic___kvm {
	u64 halt_poll_success_ns;
	u64 halt_poll_fail_ns;
	u64 blocking;
} __attribute__((preserve_access_index));

struct kvm_vcpu_stat___kvm {
	struct kvm_vcpu_stat_generic___kvm generic;
} __attribute__((preserve_access_index));

struct kvm_arch___kvm {
	struct kvm_apic_map___kvm *apic_map;
	u64 disabled_exits; /* Linux 7.2 has this, 6.12 these: */
	bool hlt_in_guest;
	bool mwait_in_guest;
} __attribute__((preserve_access_index));

struct kvm___kvm {
	struct kvm_arch___kvm arch;
} __attribute__((preserve_access_index));

struct kvm_vcpu___kvm {
	struct kvm___kvm *kvm;
	int vcpu_id;
	struct preempt_notifier___kvm preempt_notifier;
	struct pid *pid;
	bool wants_to_run;
	bool ready; /* it waits for a CPU */
	u32 halt_poll_ns; /* for which it is polled when it halts */
	struct kvm_vcpu_arch___kvm arch;
	struct kvm_vcpu_stat___kvm stat;
} __attribute__((preserve_access_index));

/*
 * What is at @ptr, an address of KVM's at which anything may be; 0 where there is
 * nothing. It is a load, where bpf_probe_read_kernel() would be a call of some 60
 * instructions; that is needless from Linux 6.2 on. The verifier knows no structure of
 * a module, and takes any of the kernel's own for it whose first field is as wide as
 * the widest that is read.
 */
#define kvm_at(ptr)                                                            \
	({                                                                     \
		typeof(*(ptr)) at = 0;                                         \
                                                                               \
		if (bpf_ksym_exists(bpf_rdonly_cast))                          \
			at = *(typeof(*(ptr)) *)bpf_core_cast((void *)(ptr),   \
							      struct rb_node); \
		else                                                           \
			bpf_probe_read_kernel(&at, sizeof(at), (ptr));         \
		at;                                                            \
	})

/* @field of the structure at @ptr. */
#define kvm_read(ptr, field)                            \
	kvm_at((typeof((ptr)->field) *)((void *)(ptr) + \
					bpf_core_field_offset((ptr)->field)))

/* The vCPU whose preempt notifier begins with @link. */
static inline struct kvm_vcpu___kvm *vcpu_around(struct hlist_node *link)
{
	return (void *)((u64)link -
			bpf_core_field_offset(struct preempt_notifier___kvm,
					      link) -
			bpf_core_field_offset(struct kvm_vcpu___kvm,
					      preempt_notifier));
}

/*
 * The vCPU for which @p is inside KVM, if its first preempt notifier is KVM's;
 * NULL: it has none at all. Costs one load.
 */
static inline struct kvm_vcpu___kvm *vcpu_if_any(struct task_struct *p)
{
	struct task_struct___kvm *task = (void *)p;
	struct hlist_node *first;

	if (!bpf_core_field_exists(task->preempt_notifiers) ||
	    !bpf_core_type_exists(struct kvm_vcpu___kvm))
		return NULL;
	first = task->preempt_notifiers.first;
	return first ? vcpu_around(first) : NULL;
}

/* The vCPU that @p runs inside KVM_RUN; NULL: none. */
static inline struct kvm_vcpu___kvm *vcpu_of(struct task_struct *p)
{
	struct task_struct___kvm *task = (void *)p;
	struct kvm_vcpu___kvm *vcpu;

	if (!kvm_preempt_ops_addr || !vcpu_if_any(p))
		return NULL;
	/* Not the one just seen, which the verifier takes for a pointer. */
	vcpu = vcpu_around(kvm_read(task, preempt_notifiers.first));
	if ((u64)kvm_read(vcpu, preempt_notifier.ops) != kvm_preempt_ops_addr)
		return NULL;
	/* Other calls, that set a vCPU up or look at it, may come from any
	 * thread of the VMM. */
	if (bpf_core_field_exists(vcpu->wants_to_run) &&
	    !kvm_read(vcpu, wants_to_run))
		return NULL;
	return vcpu;
}

/* Does @vcpu (NULL: none) sleep in KVM, as it is halted or waits for a page, or has it
 * just woken from that? */
static inline bool is_blocking(struct kvm_vcpu___kvm *vcpu)
{
	return vcpu && kvm_read(vcpu, stat.generic.blocking);
}

/* Has the guest halted on @vcpu? Its thread sleeps, or polls for a while whether an
 * interrupt comes. */
static inline bool is_halted(struct kvm_vcpu___kvm *vcpu)
{
	return kvm_read(vcpu, arch.mp_state) == MP_STATE_HALTED;
}

/* The struct kvm whose vCPU @p runs right now, or 0. */
static inline u64 running_kvm(struct task_struct *p)
{
	struct kvm_vcpu___kvm *vcpu = vcpu_of(p);

	return vcpu ? (u64)kvm_read(vcpu, kvm) : 0;
}

/* Does @vcpu halt on its CPU, as its VM's HLT or MWAIT do not exit? That is set
 * before a VM has vCPUs. */
static inline bool halts_on_cpu(struct kvm_vcpu___kvm *vcpu)
{
	struct kvm___kvm *kvm = kvm_read(vcpu, kvm);

	if (!kvm)
		return false;
	if (bpf_core_field_exists(kvm->arch.disabled_exits))
		return kvm_read(kvm, arch.disabled_exits) &
		       (EXITS_MWAIT | EXITS_HLT);
	return (bpf_core_field_exists(kvm->arch.hlt_in_guest) &&
		kvm_read(kvm, arch.hlt_in_guest)) ||
	       (bpf_core_field_exists(kvm->arch.mwait_in_guest) &&
		kvm_read(kvm, arch.mwait_in_guest));
}

/* The thread that last ran @vcpu, 0: none. */
static inline s32 thread_of_vcpu(struct kvm_vcpu___kvm *vcpu)
{
	struct pid *pid = kvm_read(vcpu, pid);

	return pid ? bpf_core_cast(pid, struct pid)->numbers[0].nr : 0;
}

/* Was @vcpu, which is not running, in guest kernel mode? arm64's KVM does not note
 * it. */
static inline bool was_in_guest_kernel(struct kvm_vcpu___kvm *vcpu)
{
	return vcpu && bpf_core_field_exists(vcpu->arch.preempted_in_kernel) &&
	       kvm_read(vcpu, arch.preempted_in_kernel);
}

#endif /* COHORT_KVM_BPF_H */
