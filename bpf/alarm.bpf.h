/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What a CPU does between two ticks, as slices end at ticks only: the end of a
 * shorter turn, of an extension or a loan, a look at skew, a yield for which KVM
 * did not ask. One timer per CPU, set when a task begins to run that needs it.
 * Linux 7.2 checks what it calls as if it could sleep, like cohort_init, which sets
 * it up: such functions take the RCU lock that all other callers have anyway.
 */
#ifndef COHORT_ALARM_BPF_H
#define COHORT_ALARM_BPF_H

enum {
	LEAVE_HOOK_NS = 2000, /* in which a program's end is reached */
	LEAVE_TRIES = 4, /* then it is preempted there */
};

static bool set_alarm(s32 cpu, u64 after_ns)
{
	struct cpu_alarm *alarm = lookup_alarm(cpu);

	return alarm &&
	       !bpf_timer_start(&alarm->timer, after_ns, BPF_F_TIMER_CPU_PIN);
}

/* When the slice of whoever runs on @c is to end, if no tick will do it; else 0. */
static u64 ends_between_ticks(const struct cpu_state *c)
{
	if (c->lent_pid || !ticks_meet_turns(turn_length(), tick_ns))
		return c->slice_until_ns;
	/* When the ticks of other CPUs come. */
	return c->ticks_miss ? c->slice_until_ns + tick_ns / TICK_LEAD_PARTS
			     : 0;
}

/* The running @tc, of @g, has a slice on @c, of @cpu, from @now on: whatever must
 * happen before the next tick will. */
static void watch_slice(s32 cpu, struct cpu_state *c, struct group *g,
			struct task_ctx *tc, u64 now)
{
	u64 at_ns = ends_between_ticks(c);

	c->relaxed_pid = 0; /* its alarm is, or may be, set anew */
	if (watches_skew(g, tc) &&
	    (!at_ns || vtime_before(now + skew_check_ns, at_ns)))
		at_ns = now + skew_check_ns;
	if (at_ns && vtime_before(now, at_ns))
		set_alarm(cpu, at_ns - now);
}

/*
 * Somebody else is to run on @c, of @cpu: does @p, with @tc, go on for a moment, as it
 * is in the middle of a hook? There it may not leave its CPU, and would wait behind its
 * sibling while another CPU goes to another VM.
 */
static bool leaves_hook(struct cpu_state *c, s32 cpu, struct task_struct *p,
			const struct task_ctx *tc)
{
	if (!tc || !tc->is_vcpu || !is_migration_disabled(p) ||
	    c->leaves_hook >= LEAVE_TRIES || !set_alarm(cpu, LEAVE_HOOK_NS)) {
		c->leaves_hook = 0;
		return false;
	}
	c->leaves_hook++;
	scx_bpf_task_set_slice(p, LEAVE_HOOK_NS);
	return true;
}

/* Does the running @tc yield on @c, of @cpu, although KVM did not ask for it? Whom
 * to is found out now: a moment ago somebody was ready. */
static bool yields_relaxed(struct cpu_state *c, s32 cpu, struct task_ctx *tc)
{
	s32 pid = c->relaxed_pid;
	struct choice choice = {};
	struct group *g;

	c->relaxed_pid = 0;
	if (!pid || !tc || pid != (s32)bpf_get_current_pid_tgid() ||
	    !finds_sibling(tc, pid, cpu, &choice))
		return false;
	g = lookup_group(tc->group);
	if (g)
		count(&g->info.stats.yields_relaxed);
	owe_yield(c, tc, pid, &choice,
		  choice.rank == TARGET_RECEIVER ? MECH_IPI : MECH_RELAXED);
	return true;
}

/* Is the slice of the running @tc on @c, of @cpu, to end now? */
static bool ends_slice(struct cpu_state *c, s32 cpu, struct task_ctx *tc,
		       u64 now)
{
	if (yields_relaxed(c, cpu, tc) || c->leaves_hook)
		return true;
	if (vtime_before(now, c->slice_until_ns))
		return tc && tc->run_at_ns && stops_for_sibling(tc, now);
	if (turns_halved)
		count_effect(MECH_SHORT_TURNS);
	return true;
}

/* A task that runs elsewhere since may have set it: then there is nothing to do. */
static int alarm_rings(void *map, u32 *cpu, struct cpu_alarm *alarm)
{
	struct cpu_state *c = lookup_cpu(*cpu);
	struct task_ctx *tc = current_ctx();
	u64 now = scx_bpf_now();
	struct group *g;

	if (!c || !c->group)
		return 0;
	if (ends_slice(c, *cpu, tc, now)) {
		scx_bpf_kick_cpu(*cpu, SCX_KICK_PREEMPT);
		return 0;
	}
	g = tc && tc->run_at_ns ? lookup_group(tc->group) : NULL;
	if (g)
		watch_slice(*cpu, c, g, tc, now);
	return 0;
}

#endif /* COHORT_ALARM_BPF_H */
