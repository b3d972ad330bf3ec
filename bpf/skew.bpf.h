/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Skew: a vCPU of a cohort that is too far ahead of its siblings makes room for
 * them. Not here: how far is too far (policy/skew.h), when that is looked at
 * (alarm.bpf.h).
 *
 * Who is stopped waits like any other: its siblings stand before it, as they have
 * used less. So its VM's turn goes on with the slowest of them, and no CPU is left
 * idle for it. A sibling that spins for it still may hand over to it.
 */
#ifndef COHORT_SKEW_BPF_H
#define COHORT_SKEW_BPF_H

/* Are @g's vCPUs kept together? */
static bool bounds_skew(const struct group *g)
{
	return is_on(MECH_SKEW) && g->info.is_cohort;
}

/* Is it to be watched how far @tc, a task of @g that runs, is ahead? */
static bool watches_skew(const struct group *g, const struct task_ctx *tc)
{
	return bounds_skew(g) && tc->is_vcpu &&
	       g->nr_runnable > fair_nr_running(g->running);
}

/* @tc, which was stopped, is it no more. */
static void end_stop(struct task_ctx *tc, u64 now)
{
	if (!tc->stopped_at_ns)
		return;
	tc->costop_ns += now - tc->stopped_at_ns;
	tc->stopped_at_ns = 0;
}

/*
 * Where the slowest vCPU stands that waits in queue @id; false if none does. Those
 * that it has nearly caught up with are ready from now on.
 */
__noinline int slowest_waiting(u32 id, u64 *slowest)
{
	u64 now = scx_bpf_now();
	struct task_struct *p;
	bool found = false;
	u32 seen = 0;

	if (!slowest)
		return false;
	bpf_rcu_read_lock();
	bpf_for_each(scx_dsq, p, id, 0) {
		struct task_ctx *tc = lookup_task_may_fail(p);

		if (++seen > MAX_RANKED)
			break;
		if (!tc || !tc->is_vcpu)
			continue;
		if (!found)
			*slowest = tc->vtime;
		found = true;
		if (skew_ends(skew_ahead(tc->vtime, *slowest), skew_resume_ns))
			end_stop(tc, now);
	}
	bpf_rcu_read_unlock();
	return found;
}

/* Must the running @tc stop for a sibling? Then it is counted as stopped. */
static bool stops_for_sibling(struct task_ctx *tc, u64 now)
{
	struct group *g = lookup_group(tc->group);
	u64 slowest = 0, ahead_ns;

	if (!g || !watches_skew(g, tc) ||
	    !slowest_waiting(tc->queue_cached, &slowest))
		return false;
	ahead_ns = skew_ahead(tc->vtime + (now - tc->charged_at_ns), slowest);
	if (!skew_stops(ahead_ns, skew_limit_ns))
		return false;
	tc->stopped_at_ns = now;
	count_effect(MECH_SKEW);
	count_time(g->info.stats.costops, ahead_ns);
	return true;
}

#endif /* COHORT_SKEW_BPF_H */
