/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Which group a task belongs to. vCPUs are recognised by KVM's own structures:
 * a task inside KVM_RUN has a preempt notifier with KVM's operations, which is
 * embedded in its kvm_vcpu. That needs no hook, works for a VM older than the
 * scheduler, and when kvm.ko is loaded later. The other threads of such a
 * process belong to its VM too; everything else to its cgroup.
 */
#ifndef COHORT_VCPU_BPF_H
#define COHORT_VCPU_BPF_H

/* The fields that are read; the vmlinux.h that this is built with has no KVM. */
struct preempt_notifier___kvm {
	struct hlist_node link;
	void *ops;
} __attribute__((preserve_access_index));

struct task_struct___kvm {
	struct hlist_head preempt_notifiers;
} __attribute__((preserve_access_index));

struct kvm_lapic___kvm {
	struct kvm_vcpu___kvm *vcpu;
	bool apicv_active;
	bool irr_pending;
} __attribute__((preserve_access_index));

struct kvm_vcpu_arch___kvm {
	struct kvm_lapic___kvm *apic;
	bool preempted_in_kernel;
} __attribute__((preserve_access_index));

struct kvm_vcpu___kvm {
	void *kvm;
	struct preempt_notifier___kvm preempt_notifier;
	struct pid *pid;
	struct kvm_vcpu_arch___kvm arch;
} __attribute__((preserve_access_index));

/* The vCPU that @p, inside KVM_RUN, runs; NULL: none. */
static struct kvm_vcpu___kvm *vcpu_of(struct task_struct *p)
{
	struct task_struct___kvm *task = (void *)p;
	struct preempt_notifier___kvm *notifier;
	struct hlist_node *first;

	if (!kvm_preempt_ops_addr ||
	    !bpf_core_field_exists(task->preempt_notifiers) ||
	    !bpf_core_type_exists(struct kvm_vcpu___kvm))
		return NULL;
	first = BPF_CORE_READ(task, preempt_notifiers.first);
	if (!first)
		return NULL;
	notifier = (void *)first -
		   bpf_core_field_offset(struct preempt_notifier___kvm, link);
	if ((u64)BPF_CORE_READ(notifier, ops) != kvm_preempt_ops_addr)
		return NULL;
	return (void *)notifier -
	       bpf_core_field_offset(struct kvm_vcpu___kvm, preempt_notifier);
}

/* The struct kvm whose vCPU @p runs right now, or 0. */
static u64 running_kvm(struct task_struct *p)
{
	struct kvm_vcpu___kvm *vcpu = vcpu_of(p);

	return vcpu ? (u64)BPF_CORE_READ(vcpu, kvm) : 0;
}

/* The thread that last ran @vcpu, 0: none. */
static s32 thread_of_vcpu(struct kvm_vcpu___kvm *vcpu)
{
	struct pid *pid = BPF_CORE_READ(vcpu, pid);

	return pid ? BPF_CORE_READ(pid, numbers[0].nr) : 0;
}

static struct kvm_vcpu___kvm *vcpu_of_apic(void *apic)
{
	struct kvm_lapic___kvm *lapic = apic;

	return bpf_core_field_exists(lapic->vcpu) ? BPF_CORE_READ(lapic, vcpu)
						  : NULL;
}

/* Does an interrupt wait for @vcpu, which is not running? Where the hardware
 * delivers interrupts, nobody can tell. */
static bool has_pending_interrupt(struct kvm_vcpu___kvm *vcpu)
{
	struct kvm_lapic___kvm *apic = NULL;

	if (!vcpu || !bpf_core_field_exists(apic->irr_pending))
		return false;
	apic = BPF_CORE_READ(vcpu, arch.apic);
	return apic && !BPF_CORE_READ(apic, apicv_active) &&
	       BPF_CORE_READ(apic, irr_pending);
}

/* Was @vcpu, which is not running, in guest kernel mode? */
static bool was_in_guest_kernel(struct kvm_vcpu___kvm *vcpu)
{
	return vcpu && BPF_CORE_READ(vcpu, arch.preempted_in_kernel);
}

/* @p is seen to run a vCPU of @kvm, for the first time or a new one. */
static void become_vcpu(struct task_struct *p, struct task_ctx *tc, u64 kvm)
{
	struct vm_key key = { .kvm = kvm, .tgid = p->tgid };
	struct group *g;
	u32 id = get_vm(&key, tc->cgroup_group);

	if (!id)
		return;
	if (id == tc->group) {
		/* It was a member already, as a thread of the process. */
		g = lookup_group(id);
		if (!g)
			return;
		__sync_fetch_and_sub(&g->info.nr_tasks, 1);
		if (!tc->is_vcpu)
			__sync_fetch_and_add(&g->info.nr_vcpus, 1);
	} else {
		join_group(tc, id);
		g = lookup_group(id);
		if (g)
			__sync_fetch_and_add(&g->info.nr_vcpus, 1);
	}
	tc->is_vcpu = 1;
	tc->kvm = kvm;
}

/* Bring @p, which waits in no queue, to the group that pays for it. */
static void find_group(struct task_struct *p, struct task_ctx *tc)
{
	u64 kvm = running_kvm(p);
	struct group *g;
	u32 tgid = p->tgid;
	u32 *vm;

	if (kvm) {
		if (kvm != tc->kvm)
			become_vcpu(p, tc, kvm);
		return;
	}
	if (tc->is_vcpu)
		return; /* it is in user space between two KVM_RUNs */
	vm = bpf_map_lookup_elem(&group_of_process, &tgid);
	if (vm) {
		if (*vm == tc->group)
			return;
		g = lookup_group(*vm);
		if (g && vm_get(g))
			join_group(tc, *vm);
	} else if (tc->group != tc->cgroup_group) {
		join_group(tc, tc->cgroup_group);
	}
}

#endif /* COHORT_VCPU_BPF_H */
