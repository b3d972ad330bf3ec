/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Halted time of vCPUs whose HLT or MWAIT do not exit (halts_on_cpu): their threads
 * hold their CPUs, which are halted meanwhile. A CPU's MPERF is read when such a thread
 * gets it, when it loses it, and whenever somebody wants to know in between. Never at
 * VM entries and exits, which would slow all guests down.
 *
 * Rust opens the events, and has calibrate_mperf run on each CPU. What is
 * computed of it: policy/halt.h.
 */
#ifndef COHORT_HALT_BPF_H
#define COHORT_HALT_BPF_H

#include "policy/halt.h"

/* Of each CPU that is online an event that counts its MPERF; put in by Rust. */
struct {
	__uint(type, BPF_MAP_TYPE_PERF_EVENT_ARRAY);
	__type(key, u32);
	__type(value, u32);
} mperf_events SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct halt_clock);
} halt_clocks SEC(".maps");

/* Events can be read in each program of this object; set by Rust. */
const volatile bool reads_counters = true;

/* A vCPU has been seen that halts on its CPU; read by Rust. */
u32 halts_seen;

/* What a vCPU that halts on its CPU has halted there. Written where it runs. */
struct halt_count {
	u64 halted_ns;
	u64 unread_ns; /* in which it ran, and nobody knows whether it halted */
	u64 since_ns; /* up to here all is counted; and then */
	u64 counted_ns; /* the event's own clock was here, */
	u64 cycles; /* MPERF here, */
	bool is_read; /* if they could be read */
};

static inline struct halt_clock *this_halt_clock(void)
{
	u32 zero = 0;

	return bpf_map_lookup_elem(&halt_clocks, &zero);
}

/* Reads the event of the CPU that this runs on. */
static inline bool read_mperf(struct bpf_perf_event_value *value)
{
	return !bpf_perf_event_read_value(&mperf_events, BPF_F_CURRENT_CPU,
					  value, sizeof(*value));
}

/* Reads this CPU's MPERF for @count at @now. */
static inline void halt_read(struct halt_count *count, u64 now)
{
	struct bpf_perf_event_value value = {};

	count->since_ns = now;
	count->is_read = reads_counters && read_mperf(&value);
	count->counted_ns = value.running;
	count->cycles = value.counter;
}

/* The vCPU of @count has this CPU from @now on. */
static inline void halt_begins(struct halt_count *count, u64 now)
{
	struct halt_clock *clock = this_halt_clock();

	if (!clock)
		return;
	clock->used = clock->running = true;
	halt_read(count, now);
}

/*
 * The vCPU of @count has had this CPU until @now; does it go @on having it? Returns
 * what it halted since that was counted, ns.
 */
static inline u64 halt_counts(struct halt_count *count, u64 now, bool on)
{
	struct halt_clock *clock = this_halt_clock();
	u64 elapsed_ns = now - count->since_ns, counted_ns, halted_ns;
	struct halt_count before = *count;

	if (!clock)
		return 0;
	clock->running = on;
	halt_read(count, now);
	counted_ns = count->counted_ns - before.counted_ns;
	if (before.is_read && count->is_read && !counted_ns)
		clock->stopped = true;
	if (!before.is_read || !count->is_read || !clock->ns_per_cycle ||
	    !halt_is_counted(elapsed_ns, counted_ns)) {
		count->unread_ns += elapsed_ns;
		return 0;
	}
	halted_ns = halt_halted_ns(counted_ns, count->cycles - before.cycles,
				   clock->ns_per_cycle);
	if (halted_ns > elapsed_ns)
		halted_ns = elapsed_ns;
	count->halted_ns += halted_ns;
	return halted_ns;
}

/* Until when a CPU is kept busy, and what the time was last; ns. */
struct busy_wait {
	u64 until_ns;
	u64 now_ns;
};

static long wait_on(u32 i, struct busy_wait *wait)
{
	wait->now_ns = bpf_ktime_get_ns();
	return wait->now_ns >= wait->until_ns;
}

/*
 * Measures the rate of this CPU's MPERF, once: the CPU is kept busy for a moment, and
 * cannot halt, as Rust has this run there by an interrupt. Returns 0 if it did;
 * otherwise there is no event, or reading it was held up.
 */
SEC("raw_tp")
int calibrate_mperf(void *ctx)
{
	struct bpf_perf_event_value begin, end;
	struct halt_clock *clock = this_halt_clock();
	u64 begin_ns = bpf_ktime_get_ns();
	struct busy_wait wait = { .until_ns = begin_ns + HALT_MEASURE_NS };

	if (!clock || !read_mperf(&begin) ||
	    bpf_ktime_get_ns() - begin_ns > HALT_READ_NS)
		return 1;
	bpf_loop(HALT_MEASURE_NS, wait_on, &wait, 0);
	if (!read_mperf(&end) ||
	    bpf_ktime_get_ns() - wait.now_ns > HALT_READ_NS)
		return 1;
	clock->stopped = end.running == begin.running;
	if (clock->stopped)
		return 1;
	halt_measure(clock, end.running - begin.running,
		     end.counter - begin.counter);
	return 0;
}

#endif /* COHORT_HALT_BPF_H */
