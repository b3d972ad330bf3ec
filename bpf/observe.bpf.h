/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What KVM does: spin exits, and interrupts that vCPUs send each other. All hooks
 * are optional: they are attached where this kernel's KVM has the function (Rust
 * decides). Not here: what follows from it. Each object that includes this file
 * defines that itself, in the three functions below.
 *
 * An IPI is recorded if it is a fixed interrupt for exactly one vCPU: only then one
 * vCPU waits for one other.
 */
#ifndef COHORT_OBSERVE_BPF_H
#define COHORT_OBSERVE_BPF_H

/* The running @p sends an IPI of @vector to its sibling @receiver. */
static void on_ipi(struct task_struct *p, struct kvm_vcpu___kvm *receiver,
		   u32 vector);
/* The running @p leaves the guest as it spins. */
static void on_spin(struct task_struct *p);
/* KVM has looked for somebody to run in the place of the spinning @p. */
static void on_spin_end(struct task_struct *p);

/* ---- interrupts between vCPUs ---- */

/* The vCPU @sender of the running @p sends an IPI to @receiver (NULL: to none, or to
 * several), by the lower half of the interrupt command register. */
static void note_ipi(struct task_struct *p, struct kvm_vcpu___kvm *sender,
		     struct kvm_vcpu___kvm *receiver, u32 icr)
{
	/* Others than fixed ones (INIT, NMI) are not waited for. */
	if (receiver && receiver != sender &&
	    (icr & APIC_DELIVERY_MODE) == APIC_FIXED)
		on_ipi(p, receiver, icr & APIC_VECTOR);
}

/* The running vCPU sends an IPI, which KVM delivers next. (From an x2APIC it may just
 * have done so.) */
SEC("?tp_btf/kvm_apic_ipi")
int BPF_PROG(ipi_sent, u32 icr, u32 destination)
{
	struct task_struct *p = bpf_get_current_task_btf();
	struct kvm_vcpu___kvm *sender = vcpu_if_any(p);

	note_ipi(p, sender, receiver_of(sender, icr, destination), icr);
	return 0;
}

SEC("?fentry/kvm_pv_send_ipi")
int BPF_PROG(pv_ipi_sent, struct kvm___kvm *kvm, u64 low, u64 high, u32 first,
	     u64 icr, int op_64_bit)
{
	struct task_struct *p = bpf_get_current_task_btf();

	note_ipi(p, vcpu_if_any(p),
		 receiver_of_pv(kvm, low, high, first, op_64_bit ? 64 : 32),
		 icr);
	return 0;
}

/* ---- spin exits ---- */

SEC("?fentry/kvm_vcpu_on_spin")
int BPF_PROG(spin_exit_begins)
{
	on_spin(bpf_get_current_task_btf());
	return 0;
}

SEC("?fexit/kvm_vcpu_on_spin")
int BPF_PROG(spin_exit_ends)
{
	on_spin_end(bpf_get_current_task_btf());
	return 0;
}

#endif /* COHORT_OBSERVE_BPF_H */
