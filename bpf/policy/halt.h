/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * How long a CPU was halted, by its MPERF. Pure functions. Not here: reading it
 * (halt.bpf.h).
 *
 * MPERF counts at a fixed rate, near that of the TSC, while its CPU executes
 * instructions, of the guest or of the host, and stands still while it is halted. So
 * what is missing in it was spent halted.
 *
 * Example. A CPU's MPERF counts 2.5 cycles per ns. In 1,000,000 ns it counted
 * 1,500,000 cycles: that is 600,000 ns, and the CPU was halted for 400,000 ns.
 */
#ifndef COHORT_POLICY_HALT_H
#define COHORT_POLICY_HALT_H

enum halt_consts {
	HALT_SHIFT = 28, /* bits of ns per cycle behind the point */
	HALT_MEASURE_NS = 20000, /* that the rate is measured for at a time */
	HALT_READ_NS = 5000, /* that a reading for that may take */
	HALT_MEASUREMENTS = 64, /* before the old ones lose weight */
	HALT_SLACK_PART = 64, /* of a time by which two clocks may differ, */
	HALT_SLACK_NS = 100000, /* and this long from one to the other */
};

/*
 * How long (ns) MPERF took for so many @cycles. In two parts, as a product of all would
 * be too large after some seconds.
 */
static inline u64 halt_busy_ns(u64 cycles, u64 ns_per_cycle)
{
	u64 low = cycles & ((1ULL << HALT_SHIFT) - 1);

	return (cycles >> HALT_SHIFT) * ns_per_cycle +
	       (low * ns_per_cycle >> HALT_SHIFT);
}

/* How long (ns) of @elapsed_ns a CPU was halted that counted so many @cycles. */
static inline u64 halt_halted_ns(u64 elapsed_ns, u64 cycles, u64 ns_per_cycle)
{
	u64 busy_ns = halt_busy_ns(cycles, ns_per_cycle);

	return busy_ns < elapsed_ns ? elapsed_ns - busy_ns : 0;
}

/*
 * Has an event counted all of the @elapsed_ns, if its own clock says @counted_ns?
 * Not if its CPU was offline meanwhile, or if another event has taken its place. The
 * two are not read in the same moment.
 */
static inline bool halt_is_counted(u64 elapsed_ns, u64 counted_ns)
{
	u64 slack_ns = elapsed_ns / HALT_SLACK_PART + HALT_SLACK_NS;

	return counted_ns && counted_ns <= elapsed_ns + slack_ns &&
	       elapsed_ns <= counted_ns + slack_ns;
}

/* So many ns in so many cycles, of which there are some. */
static inline u64 halt_per_cycle(u64 elapsed_ns, u64 cycles)
{
	return (elapsed_ns << HALT_SHIFT) / cycles;
}

/*
 * One more measurement of @clock's rate: so many @cycles in @elapsed_ns, in which the
 * CPU was not halted. A counter that stands still has no rate. The rate is the mean;
 * it is wrong by no more than the measurements differ.
 */
static inline void halt_measure(struct halt_clock *clock, u64 elapsed_ns,
				u64 cycles)
{
	u64 per_cycle;

	clock->measurements++;
	if (!cycles)
		return;
	/* Older ones, and outliers, lose weight. */
	if (clock->measurements > HALT_MEASUREMENTS) {
		clock->measurements /= 2;
		clock->measured_ns /= 2;
		clock->measured_cycles /= 2;
		clock->least_per_cycle +=
			(clock->ns_per_cycle - clock->least_per_cycle) / 2;
		clock->most_per_cycle -=
			(clock->most_per_cycle - clock->ns_per_cycle) / 2;
	}
	per_cycle = halt_per_cycle(elapsed_ns, cycles);
	if (per_cycle > clock->most_per_cycle)
		clock->most_per_cycle = per_cycle;
	if (per_cycle < clock->least_per_cycle || !clock->least_per_cycle)
		clock->least_per_cycle = per_cycle;
	clock->measured_ns += elapsed_ns;
	clock->measured_cycles += cycles;
	clock->ns_per_cycle =
		halt_per_cycle(clock->measured_ns, clock->measured_cycles);
	clock->error_ppm = (clock->most_per_cycle - clock->least_per_cycle) *
			   1000000 / clock->ns_per_cycle;
}

#endif /* COHORT_POLICY_HALT_H */
