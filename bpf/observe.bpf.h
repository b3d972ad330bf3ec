/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What KVM does: spin exits, and interrupts that vCPUs send each other. All hooks
 * are optional: they are attached where this kernel's KVM has the function (Rust
 * decides). Not here: what follows from it. Each object that includes this file
 * defines that itself, in the three functions below.
 *
 * An IPI is recorded if it is a fixed interrupt, once for each of its receivers.
 */
#ifndef COHORT_OBSERVE_BPF_H
#define COHORT_OBSERVE_BPF_H

/* The running vCPU sends an IPI of @vector to its sibling @receiver, a struct kvm_vcpu,
 * and maybe to @others. */
__noinline int on_ipi(u64 receiver, u32 vector, bool others);
/* The running @p leaves the guest as it spins, @in_kernel mode of the guest. */
static void on_spin(struct task_struct *p, bool in_kernel);
/* KVM has looked for somebody to run in the place of the spinning @p. */
static void on_spin_end(struct task_struct *p);

/* ---- interrupts between vCPUs ---- */

/* An IPI that is under way. */
struct sent_ipi {
	struct kvm_vcpu___kvm *sender;
	struct kvm_apic_map___kvm *map;
	struct apics to;
	u32 vector;
	bool several; /* receivers */
};

/* The next receiver of @ipi is noted; 1: there is none. */
static long note_receiver(u32 number, struct sent_ipi *ipi)
{
	struct kvm_vcpu___kvm *receiver = NULL;

	if (!next_vcpu(ipi->map, &ipi->to, &receiver))
		return 1;
	if (receiver && receiver != ipi->sender)
		on_ipi((u64)receiver, ipi->vector, ipi->several);
	return 0;
}

/* The running vCPU sends @ipi, by the lower half of the interrupt command register. */
static void note_ipi(struct sent_ipi *ipi, u32 icr)
{
	/* Others than fixed ones (INIT, NMI) are not waited for. */
	if ((icr & APIC_DELIVERY_MODE) != APIC_FIXED)
		return;
	ipi->vector = icr & APIC_VECTOR;
	ipi->several = ipi->to.high || ipi->to.low & (ipi->to.low - 1);
	bpf_loop(APICS_MOST, note_receiver, ipi, 0);
}

/* KVM delivers it next. (From an x2APIC it may just have done so.) */
SEC("?tp_btf/kvm_apic_ipi")
int BPF_PROG(ipi_sent, u32 icr, u32 destination)
{
	struct sent_ipi ipi = {};
	struct kvm___kvm *kvm;

	ipi.sender = vcpu_if_any(bpf_get_current_task_btf());
	if (!ipi.sender)
		return 0;
	kvm = kvm_read(ipi.sender, kvm);
	ipi.map = kvm_read(kvm, arch.apic_map);
	if (!ipi.map)
		return 0;
	find_receivers((u64)ipi.map, icr, destination, &ipi.to);
	note_ipi(&ipi, icr);
	return 0;
}

/* A paravirtual IPI in @kvm: its receivers are bits of @low and @high, the first of which
 * stands for the APIC with the id @first. */
SEC("?fentry/kvm_pv_send_ipi")
int BPF_PROG(pv_ipi_sent, struct kvm___kvm *kvm, u64 low, u64 high, u32 first,
	     u64 icr, int op_64_bit)
{
	struct sent_ipi ipi = {
		.to = { .low = low, .high = high, .first = first }
	};

	ipi.sender = vcpu_if_any(bpf_get_current_task_btf());
	ipi.map = kvm_read(kvm, arch.apic_map);
	if (!ipi.sender || !ipi.map)
		return 0;
	if (!op_64_bit) {
		ipi.to.low |= high << 32;
		ipi.to.high = 0;
	}
	note_ipi(&ipi, icr);
	return 0;
}

/* ---- spin exits ---- */

SEC("?fentry/kvm_vcpu_on_spin")
int BPF_PROG(spin_exit_begins, void *vcpu, bool in_kernel)
{
	on_spin(bpf_get_current_task_btf(), in_kernel);
	return 0;
}

SEC("?fexit/kvm_vcpu_on_spin")
int BPF_PROG(spin_exit_ends)
{
	on_spin_end(bpf_get_current_task_btf());
	return 0;
}

#endif /* COHORT_OBSERVE_BPF_H */
