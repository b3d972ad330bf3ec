/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Halt polling. When a guest halts, KVM looks for an interrupt for up to 200 us before
 * the vCPU sleeps, unless another task waits for that CPU. It does not see who waits at
 * another CPU. So such a task is moved here, and KVM lets the vCPU sleep. Not here: at
 * which CPU a task waits (sched.bpf.c).
 */
#ifndef COHORT_POLL_BPF_H
#define COHORT_POLL_BPF_H

enum {
	POLL_NS = 1000, /* that KVM may poll while somebody waits elsewhere */
};

/* The running vCPU halts, and KVM begins to poll. */
SEC("?fentry/kvm_vcpu_halt")
int BPF_PROG(vcpu_halts, struct kvm_vcpu___kvm *vcpu)
{
	s32 cpu = bpf_get_smp_processor_id();
	struct domain *d = domain_with(cpu);
	struct cpu_state *c = cpu_at(cpu);

	if (d->nr_waiting <= 0 || somebody_waits_at(c) ||
	    !is_on(MECH_HALT_POLL) || !kvm_read(vcpu, halt_poll_ns))
		return 0;
	c->polls_pid = (s32)bpf_get_current_pid_tgid();
	set_alarm(cpu, POLL_NS);
	return 0;
}

/* Does KVM poll for the vCPU @p? */
static bool is_polling(struct task_struct *p)
{
	struct kvm_vcpu___kvm *vcpu = vcpu_of(p);

	return vcpu && is_halted(vcpu) && !is_blocking(vcpu);
}

/* @p, which runs on @c, of @cpu, halted a moment ago. If KVM still polls for it, whoever
 * comes next waits here from now on. If an interrupt comes just then, it waits for the
 * end of the vCPU's slice. */
static void end_polling(const struct cpu_state *c, s32 cpu,
			struct task_struct *p)
{
	u32 slot = READ_ONCE(c->slot);
	struct entity *e = entity_in_slot(slot);

	if (somebody_waits_at(c) || !is_polling(p))
		return;
	if ((e && e->nr_waiting > 0 && take_allowed(slot, cpu)) ||
	    take_first_entry(domain_of(cpu), cpu))
		count_effect(MECH_HALT_POLL);
}

#endif /* COHORT_POLL_BPF_H */
