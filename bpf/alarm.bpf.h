/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * A timer for each CPU, which ends what that CPU does for a short time: a loan, letting
 * a vCPU out of a hook, a look at a vCPU that rests, halt polling. It rings on the CPU
 * that set it. Not here: what happens then (react.bpf.h).
 */
#ifndef COHORT_ALARM_BPF_H
#define COHORT_ALARM_BPF_H

enum {
	LEAVE_HOOK_NS = 2000, /* in which a program's end is reached */
	LEAVE_TRIES = 4, /* then it is preempted there */
};

/* CPU @cpu's alarm rings in @after_ns or, if it is set already, earlier: who needs it
 * later sets it again then. */
__noinline bool set_alarm(s32 cpu, u64 after_ns)
{
	struct cpu_state *c = cpu_at(cpu);
	u64 now = bpf_ktime_get_ns(), set_ns = c->alarm_ns;

	if (vtime_before(now, set_ns) && vtime_before(set_ns, now + after_ns))
		return true;
	if (!start_timer(lookup_alarm(cpu), after_ns, BPF_F_TIMER_CPU_PIN))
		return false;
	c->alarm_ns = now + after_ns;
	return true;
}

/* @c, of @cpu, is to look again what it runs @after_ns from @now on, unless no alarm can be
 * set. */
static bool look_again(struct cpu_state *c, s32 cpu, u64 after_ns, u64 now)
{
	if (!set_alarm(cpu, after_ns))
		return false;
	c->asked_ns = now + after_ns;
	return true;
}

/* @c, of @cpu, is to look again what it runs: at once, or when who just woke there has
 * had its moment. */
static void resched(struct cpu_state *c, s32 cpu, u64 now)
{
	if (!c->lent_pid || !vtime_before(now, c->lent_until_ns) ||
	    !set_alarm(cpu, c->lent_until_ns - now))
		kick_cpu(cpu, SCX_KICK_PREEMPT);
}

/*
 * Somebody else is to run on @c, of @cpu: does the vCPU @p go on for a moment, as it is in
 * the middle of a hook? There it may not leave its CPU, and would wait for this one while
 * its siblings are elsewhere.
 */
static bool leaves_hook(struct cpu_state *c, s32 cpu, struct task_struct *p)
{
	if (!p || !is_migration_disabled(p) || !vcpu_if_any(p) ||
	    c->leaves_hook >= LEAVE_TRIES || !set_alarm(cpu, LEAVE_HOOK_NS)) {
		c->leaves_hook = 0;
		return false;
	}
	c->leaves_hook++;
	scx_bpf_task_set_slice(p, slice_ns);
	return true;
}

#endif /* COHORT_ALARM_BPF_H */
