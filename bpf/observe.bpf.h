/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What KVM does: spin exits, interrupts between vCPUs from send to answer. All
 * hooks are optional: attached where this kernel's KVM has the function (Rust
 * decides), and what is not seen is not waited for. Not here: what follows from
 * it (yield.bpf.h).
 *
 * An IPI is seen in three steps, all on the sender's CPU: its delivery begins,
 * each receiver accepts it, its delivery ends. It is recorded if exactly one
 * vCPU accepted it, as a fixed interrupt: only then somebody waits for somebody.
 */
#ifndef COHORT_OBSERVE_BPF_H
#define COHORT_OBSERVE_BPF_H

enum {
	APIC_FIXED = 0, /* delivery mode (Intel SDM 3A, 13.6.1) */
};

static struct task_ctx *current_ctx(void)
{
	return lookup_task_may_fail(bpf_get_current_task_btf());
}

/* ---- interrupts between vCPUs ---- */

static int delivery_begins(void)
{
	struct task_ctx *tc = current_ctx();

	if (tc) {
		tc->nr_accepted = 0;
		tc->delivers = 1;
	}
	return 0;
}

/* The sender now waits for @to. */
static void record_ipi(struct task_ctx *sender, s32 from, s32 to, u32 vector)
{
	struct task_ctx *receiver = lookup_thread_may_fail(to);
	struct group *g = lookup_group(sender->group);
	u64 now = scx_bpf_now();
	struct open_ipi *ipi;

	if (!receiver || !g || receiver->group != sender->group)
		return;
	ipi = &receiver->open[from & (OPEN_IPIS - 1)];
	ipi->from = from;
	ipi->vector = vector;
	ipi->sent_ns = now;
	sender->ipi_to = to;
	count(&g->info.stats.ipis);
	if (receiver->queue) {
		/* The first of several is what it runs late for. */
		if (!receiver->ipi_waits_ns)
			receiver->ipi_waits_ns = now;
		count(&g->info.stats.ipis_to_ready);
	}
}

static int delivery_ends(void)
{
	struct task_struct *p = bpf_get_current_task_btf();
	struct task_ctx *tc = lookup_task_may_fail(p);

	if (!tc || !tc->delivers)
		return 0;
	tc->delivers = 0;
	if (tc->nr_accepted == 1 && tc->accepted_by &&
	    tc->accepted_by != p->pid)
		record_ipi(tc, p->pid, tc->accepted_by, tc->accepted_vector);
	return 0;
}

SEC("?fentry/__kvm_irq_delivery_to_apic_fast")
int BPF_PROG(ipi_begins, void *kvm, void *src)
{
	return src ? delivery_begins() : 0;
}

SEC("?fexit/__kvm_irq_delivery_to_apic_fast")
int BPF_PROG(ipi_ends, void *kvm, void *src)
{
	return src ? delivery_ends() : 0;
}

SEC("?fentry/kvm_pv_send_ipi")
int BPF_PROG(pv_ipi_begins)
{
	return delivery_begins();
}

SEC("?fexit/kvm_pv_send_ipi")
int BPF_PROG(pv_ipi_ends)
{
	return delivery_ends();
}

SEC("?fentry/__apic_accept_irq")
int BPF_PROG(ipi_accepted, void *apic, int delivery_mode, int vector)
{
	struct task_ctx *tc = current_ctx();

	if (!tc || !tc->delivers)
		return 0;
	/* Others than fixed ones (INIT, NMI) are not waited for. */
	tc->nr_accepted += delivery_mode == APIC_FIXED ? 1 : 2;
	tc->accepted_vector = vector;
	tc->accepted_by = thread_of_vcpu(vcpu_of_apic(apic));
	return 0;
}

/* The running vCPU has handled an interrupt of @vector, whoever sent it. */
SEC("?tp_btf/kvm_eoi")
int BPF_PROG(ipi_answered, void *apic, int vector)
{
	struct task_ctx *tc = current_ctx();
	u64 now = scx_bpf_now();
	struct group *g;
	u32 i;

	if (!tc || !tc->is_vcpu || vector < 0)
		return 0;
	g = lookup_group(tc->group);
	if (!g)
		return 0;
	bpf_for(i, 0, OPEN_IPIS) {
		struct open_ipi *ipi = &tc->open[i & (OPEN_IPIS - 1)];
		u64 sent_ns = ipi->sent_ns;

		if (!sent_ns || ipi->vector != vector)
			continue;
		ipi->sent_ns = 0;
		if (is_on(MECH_ADAPTIVE_WINDOW))
			g->ipi_window_ns =
				ipi_window(g->ipi_window_ns, now - sent_ns);
		count(&g->info.stats.ipis_answered);
	}
	return 0;
}

/* @tc, for which an IPI may have waited, runs. */
static void answer_begins(struct task_ctx *tc, struct group *g, u64 now)
{
	u64 waits_ns = tc->ipi_waits_ns;
	u32 i;

	if (waits_ns) {
		tc->ipi_waits_ns = 0;
		count(&g->info.stats.ipi_to_run[log2_bucket((now - waits_ns) /
							    1000)]);
	}
	if (!eois_hidden)
		return;
	/* Nobody will say when it is answered. */
	bpf_for(i, 0, OPEN_IPIS)
		tc->open[i & (OPEN_IPIS - 1)].sent_ns = 0;
}

/* ---- spin exits ---- */

SEC("?fentry/kvm_vcpu_on_spin")
int BPF_PROG(spin_exit_begins, void *vcpu, bool in_kernel)
{
	struct task_ctx *tc = current_ctx();
	struct group *g;

	if (!tc)
		return 0;
	tc->yielded = 0;
	tc->spins_in_kernel = in_kernel;
	g = lookup_group(tc->group);
	if (g)
		count(&g->info.stats.spin_exits);
	return 0;
}

/* KVM went round all siblings. If it found nobody, somebody may be ready all the
 * same: KVM leaves out vCPUs preempted in guest user mode. */
SEC("?fexit/kvm_vcpu_on_spin")
int BPF_PROG(spin_exit_ends, void *vcpu, bool in_kernel)
{
	struct task_struct *p = bpf_get_current_task_btf();
	struct task_ctx *tc = lookup_task_may_fail(p);
	s32 cpu = bpf_get_smp_processor_id();
	struct cpu_state *c = lookup_cpu(cpu);
	struct choice choice = {};
	struct group *g;

	if (!tc || !c || tc->yielded || !is_on(MECH_RELAXED))
		return 0;
	g = lookup_group(tc->group);
	if (!g || !is_vm(g) || throttled_by(tc->group))
		return 0;
	choose_sibling(tc, p->pid, cpu, true, &choice);
	if (!choice.pid)
		return 0;
	count(&g->info.stats.yields_ready);
	count(&g->info.stats.yields_relaxed);
	owe_yield(c, cpu, tc, &choice);
	scx_bpf_kick_cpu(cpu, SCX_KICK_PREEMPT);
	return 0;
}

#endif /* COHORT_OBSERVE_BPF_H */
