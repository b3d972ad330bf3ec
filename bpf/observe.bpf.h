/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What KVM does: spin exits, interrupts between vCPUs from send to answer. All
 * hooks are optional: attached where this kernel's KVM has the function (Rust
 * decides), and what is not seen is not waited for. Not here: what follows from
 * it, which is what each object that includes this defines before.
 *
 * An IPI is seen in two steps, both on the sender's CPU: each receiver accepts
 * it, its delivery ends. It is recorded if exactly one vCPU accepted it, as a
 * fixed interrupt: only then somebody waits for somebody.
 */
#ifndef COHORT_OBSERVE_BPF_H
#define COHORT_OBSERVE_BPF_H

enum {
	APIC_FIXED = 0, /* delivery mode (Intel SDM 3A, 13.6.1) */
};

/* The clock of all that is recorded, ns. */
static u64 clock_ns(void);
/* The IPIs of @p; NULL if it is no vCPU. */
static struct signals *signals_of(struct task_struct *p);
/* Thread @from, whose IPIs are @sender, sent one to thread @to. */
static void on_ipi(struct signals *sender, s32 from, s32 to);
/* The running @p, whose IPIs are @receiver, has answered one @took_ns after that
 * was sent. */
static void on_answer(struct task_struct *p, struct signals *receiver,
		      u64 took_ns);
/* The running @p leaves the guest as it spins, @in_kernel mode of the guest. */
static void on_spin(struct task_struct *p, bool in_kernel);
/* KVM has looked for somebody to run in the place of the spinning @p. */
static void on_spin_end(struct task_struct *p);

/* ---- interrupts between vCPUs ---- */

/* Whatever it is: a timer, a device's interrupt that comes in the middle of the
 * running thread's work, or an IPI of that, the end of whose delivery follows. */
SEC("?fentry/__apic_accept_irq")
int BPF_PROG(interrupt_accepted, void *apic, int delivery_mode, int vector)
{
	struct signals *sender = signals_of(bpf_get_current_task_btf());

	if (!sender)
		return 0;
	sender->accepted_vector = vector;
	sender->accepted_mode = delivery_mode;
	sender->accepted_by = (u64)apic;
	return 0;
}

/* The running vCPU has sent an IPI that so many accepted, one after the other. */
static int ipi_sent(int nr_accepted)
{
	struct task_struct *p;
	struct signals *sender;
	s32 to;

	if (nr_accepted != 1)
		return 0;
	p = bpf_get_current_task_btf();
	sender = signals_of(p);
	/* Others than fixed ones (INIT, NMI) are not waited for. */
	if (!sender || !sender->accepted_by ||
	    sender->accepted_mode != APIC_FIXED)
		return 0;
	to = thread_of_vcpu(vcpu_of_apic((void *)sender->accepted_by));
	if (to && to != p->pid)
		on_ipi(sender, p->pid, to);
	return 0;
}

/* Without @src it is a device's interrupt. */
SEC("?fexit/__kvm_irq_delivery_to_apic_fast")
int BPF_PROG(ipi_ends, void *kvm, void *src, void *irq, int *nr_accepted)
{
	return src ? ipi_sent(kvm_read_int(nr_accepted)) : 0;
}

SEC("?fexit/kvm_pv_send_ipi")
int BPF_PROG(pv_ipi_ends, void *kvm, u64 low, u64 high, u32 min, u64 icr,
	     int op_64_bit, int nr_accepted)
{
	return ipi_sent(nr_accepted);
}

/* The running vCPU has handled an interrupt of @vector, whoever sent it. */
SEC("?tp_btf/kvm_eoi")
int BPF_PROG(ipi_answered, void *apic, int vector)
{
	struct task_struct *p = bpf_get_current_task_btf();
	struct signals *receiver = signals_of(p);
	u32 i;

	/* Most interrupts are none of these. */
	if (!receiver || !receiver->maybe_open || vector < 0)
		return 0;
	/* Before they are looked at: a sender may set it meanwhile. */
	receiver->maybe_open = 0;
	for (i = 0; i < OPEN_IPIS; i++) {
		struct open_ipi *ipi = &receiver->open[i];
		u64 sent_ns = ipi->sent_ns;

		if (!sent_ns)
			continue;
		if (ipi->vector != vector) {
			receiver->maybe_open = 1;
			continue;
		}
		ipi->sent_ns = 0;
		on_answer(p, receiver, clock_ns() - sent_ns);
	}
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
