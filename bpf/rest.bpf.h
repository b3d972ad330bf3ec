/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * vCPUs that halt on their CPUs, as their HLT does not exit, and are bound to them. One
 * that rests leaves its CPU to others, and has it back as soon as it may have to work.
 * Not here: how long it halted (halt.bpf.h), when it rests (policy/rest.h).
 *
 * A guest that halts cannot say that it wakes. Where KVM delivers an interrupt for it,
 * that is seen. Then the vCPU is looked at: it has its CPU for 50 us, and keeps it if
 * it works. Where hardware delivers interrupts, or the guest waits for a write to
 * memory (MWAIT), nothing is seen: so each vCPU that rests is also looked at every 10
 * ms or so.
 */
#ifndef COHORT_REST_BPF_H
#define COHORT_REST_BPF_H

/* The vCPU that rests on @c, of @cpu, does not run there. */
static void unmark_quiet(struct cpu_state *c, struct domain *d, s32 cpu)
{
	c->rests = 0;
	__sync_fetch_and_and(&d->quiet, ~bit_of(cpu));
}

/* It works, or goes. Its CPU is its own for what is left of the turn. */
static void end_rest(struct task_ctx *tc)
{
	u32 on = __sync_lock_test_and_set(&tc->rests_on, 0);
	struct group *g = lookup_group(tc->group);
	struct cpu_state *c;
	struct domain *d;

	if (!on)
		return;
	if (g)
		__sync_fetch_and_sub(&g->nr_resting, 1);
	c = cpu_at(on - 1);
	d = domain_with(on - 1);
	unmark_quiet(c, d, on - 1);
	tc->bound_on = 0;
	c->resting_pid = 0;
	c->slot = SLOT_BOUND;
}

/* Notes whether the vCPU that is bound to @cpu, of @d, is halted often. */
static void note_often(struct domain *d, s32 cpu, bool often)
{
	u64 bit = bit_of(cpu);

	if (!(d->often & bit) == !often)
		return;
	if (often)
		__sync_fetch_and_or(&d->often, bit);
	else
		__sync_fetch_and_and(&d->often, ~bit);
}

/* What is known of the vCPU @tc counts no more. */
static void forget_halts(struct task_struct *p, struct task_ctx *tc)
{
	s32 cpu;

	if (!tc->halts_on_cpu)
		return;
	cpu = scx_bpf_task_cpu(p);
	end_rest(tc);
	tc->halted_average = 0;
	note_often(domain_with(cpu), cpu, false);
}

/* MPERF is that of the CPU on which a program runs, which as a rule is the one whose
 * task it looks at. */
static bool is_here(s32 cpu)
{
	return bpf_get_smp_processor_id() == (u32)cpu;
}

/* The vCPU @tc, which runs on @cpu of @d, halted for @halted_ns of @elapsed_ns. */
static void count_average(struct task_ctx *tc, struct domain *d, s32 cpu,
			  u64 halted_ns, u64 elapsed_ns)
{
	tc->halted_average =
		rest_average(tc->halted_average, halted_ns, elapsed_ns);
	note_often(d, cpu, tc->halted_average >= REST_OFTEN);
}

/* The vCPU @tc has @cpu, of @d, from @now on. If it rests, it halted since it had it
 * last, as far as anybody knows. */
static void begin_count(struct task_ctx *tc, struct domain *d, s32 cpu, u64 now)
{
	struct cpu_state *c = cpu_at(cpu);
	u64 away_ns;

	if (tc->rests_on == cpu + 1) {
		away_ns = ns_since(c->looked_ns, now);
		count_average(tc, d, cpu, away_ns, away_ns);
	}
	tc->halt.since_ns = now;
	tc->halt.is_read = false;
	if (is_here(cpu))
		halt_begins(&tc->halt, now);
}

/* The vCPU @p, which runs, is asked what it did since it was asked last. Returns how long
 * it was halted, ns. */
__noinline u64 count_halted(struct task_struct *p __arg_trusted, u64 now)
{
	struct task_ctx *tc = lookup_task_may_fail(p);
	struct group *g = tc ? lookup_group(tc->group) : NULL;
	s32 cpu = scx_bpf_task_cpu(p);
	struct cpu_state *c = cpu_at(cpu);
	struct domain *d = domain_with(cpu);
	u64 elapsed_ns, halted_ns;
	bool rests;

	if (!g)
		return 0;
	elapsed_ns = now - tc->halt.since_ns;
	rests = tc->rests_on;
	if (elapsed_ns < REST_LEAST_NS || !is_here(cpu))
		return 0;
	if (!is_on(MECH_HALTED)) {
		forget_halts(p, tc);
		return 0;
	}
	halted_ns = halt_counts(&tc->halt, now, true);
	count_average(tc, d, cpu, halted_ns, elapsed_ns);
	if (!rest_goes_on(rests, halted_ns, elapsed_ns)) {
		end_rest(tc);
		return halted_ns;
	}
	/* One for each CPU does. */
	if (!rests && !c->resting_pid) {
		c->resting_pid = p->pid;
		tc->rests_on = cpu + 1;
		__sync_fetch_and_add(&g->nr_resting, 1);
	}
	if (c->resting_pid == p->pid && !c->rests) {
		c->rests = 1;
		__sync_fetch_and_or(&d->quiet, bit_of(cpu));
	}
	return halted_ns;
}

/* A CPU of @d that @e may use and whose vCPU rests there is for @e in this turn; false:
 * there is none. */
static bool take_quiet_cpu(const struct entity *e, u32 id, struct domain *d,
			   u64 here)
{
	u64 quiet = d->quiet & e->cpus & d->cpus, bit;
	s32 cpu;

	if (!quiet)
		return false;
	bit = plan_next(quiet, here, quiet);
	cpu = cpu_with(d, bit);
	/* Another task may take it first. */
	if (!(__sync_fetch_and_and(&d->quiet, ~bit) & bit))
		return false;
	cpu_at(cpu)->slot = id;
	count_effect(MECH_HALTED);
	kick_cpu(cpu, SCX_KICK_PREEMPT);
	return true;
}

/*
 * Is @e, of @g, in @d to have CPUs of vCPUs that rest, as some do as a rule? So it
 * takes less from those that work. It is not for VMs, nor for cgroups of more than the
 * usual weight.
 */
static bool waits_for_rest(const struct entity *e, const struct domain *d,
			   const struct group *g)
{
	return d->often & e->cpus & d->cpus && !is_vm(g) &&
	       g->info.weight <= WEIGHT_DEFAULT;
}

/* A CPU of @d that @e may use and whose vCPU rests, but which others have: @cpu, if it
 * is one; -1: there is none. */
static s32 cpu_of_resting(const struct entity *e, const struct domain *d,
			  s32 cpu)
{
	u64 resting = d->resting & e->cpus & d->cpus;

	/* It takes that from no vCPU. */
	if (!cpu_at(cpu)->bound)
		return cpu;
	return resting ? cpu_with(d, plan_next(resting, bit_of(cpu), resting))
		       : -1;
}

/*
 * Of the CPUs @free of @d, those that @e, of @g, may have, which could use @width. In
 * some turns it has none of those that are claimed by vCPUs that work, unless it runs
 * there: as a rule more vCPUs are known to rest a tick later, or who has the CPUs of
 * those that do woke, and has little to do.
 */
static u64 patient_cpus(struct entity *e, const struct domain *d,
			const struct group *g, u64 free, u32 width)
{
	u64 fit = free & (e->running | ~d->claimed);

	if (cpus_in(fit) >= width || !waits_for_rest(e, d, g))
		return free;
	/* Seldom: it has its part of the working ones' time all the same. */
	if (d->turn - e->patient >= REST_PATIENT_EACH)
		e->patient = d->turn;
	return e->patient == d->turn ? fit : free;
}

/* Does nobody want @c for himself but a vCPU that rests? */
static bool only_rests(const struct cpu_state *c)
{
	return c->resting_pid && c->nr_bound + (s32)c->bound < 2;
}

/* Tasks other than vCPUs that rest wait in @d. */
static bool others_wait(const struct domain *d)
{
	return d->nr_waiting > (s32)cpus_in(d->resting & ~d->quiet);
}

/* The vCPU @tc, which runs on @cpu, was just asked what it did since the last tick. If
 * it rests as a rule and somebody waits, it is asked again in a moment. */
static void sample(const struct task_ctx *tc, const struct domain *d, s32 cpu)
{
	struct cpu_state *c = cpu_at(cpu);

	if (!(d->often & bit_of(cpu)) || c->lent_pid || !others_wait(d))
		return;
	if (tc->rests_on)
		kick_cpu(cpu, SCX_KICK_PREEMPT);
	else
		look_again(c, cpu, REST_LOOK_NS, bpf_ktime_get_ns());
}

/* The vCPU that rests on @c, of @cpu, is to have that for a moment. */
static void look_at_resting(struct cpu_state *c, s32 cpu)
{
	c->looks = 1;
	kick_cpu(cpu, SCX_KICK_PREEMPT);
}

/* It was not looked at for long, and has not the turn. */
static bool has_to_look(const struct cpu_state *c, u64 now)
{
	return c->resting_pid && !c->rests && c->slot != SLOT_BOUND &&
	       ns_since(c->looked_ns, now) > REST_LOOK_EACH_NS;
}

/* An interrupt is there for @vcpu. If that rests and waits for its CPU, that looks at
 * it. */
SEC("?fentry/__kvm_vcpu_kick")
int BPF_PROG(vcpu_kicked, struct kvm_vcpu___kvm *vcpu)
{
	struct task_ctx *tc;
	u32 on;

	if (bpf_core_field_exists(vcpu->ready) && !kvm_read(vcpu, ready))
		return 0;
	tc = lookup_thread_may_fail(thread_of_vcpu(vcpu));
	on = tc ? tc->rests_on : 0;
	if (on && tc->queue == (BOUND_QUEUE | (on - 1)))
		look_at_resting(cpu_at(on - 1), on - 1);
	return 0;
}

#endif /* COHORT_REST_BPF_H */
