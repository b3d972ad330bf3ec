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

/* @p is seen to run a vCPU of @kvm, for the first time or a new one. */
static void become_vcpu(struct task_struct *p, struct task_ctx *tc, u64 kvm)
{
	struct vm_key key = { .kvm = kvm, .tgid = p->tgid };
	bool is_member;
	struct group *g;
	u32 id = get_vm(&key, tc->cgroup_group);

	if (!id)
		return;
	forget_halts(p, tc);
	/* A thread of the process is one already. */
	is_member = id == tc->group;
	if (!is_member)
		join_group(tc, id);
	g = lookup_group(id);
	if (!g)
		return;
	if (is_member)
		__sync_fetch_and_sub(&g->info.nr_tasks, 1);
	if (!is_member || !tc->is_vcpu)
		__sync_fetch_and_add(&g->info.nr_vcpus, 1);
	/* What fewer of them wanted says nothing. */
	g->mean_width = 0;
	tc->is_vcpu = 1;
	tc->kvm = kvm;
	tc->halts_on_cpu = halts_on_cpu(vcpu_if_any(p));
	if (tc->halts_on_cpu)
		halts_seen = true;
}

/* Does @p run a vCPU, and is not known as one yet? That is found out when a task begins
 * to wait, and one that is entitled to its CPU may run for long. Its cgroup pays for it
 * until then, and its siblings' turns lack it. */
static bool is_new_vcpu(struct task_struct *p, const struct task_ctx *tc)
{
	return !tc->is_vcpu && running_kvm(p);
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
