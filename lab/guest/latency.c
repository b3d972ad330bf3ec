// SPDX-License-Identifier: GPL-2.0-only
/*
 * A service that is asked now and then: each thread sleeps for a millisecond, then works. How late it goes on is what
 * its client waits for. One operation is one answer.
 */
#define _GNU_SOURCE
#include <sys/prctl.h>

#include "workload.h"

#define SLEEP_NS 1000000

static struct timespec timespec_of(uint64_t ns)
{
	return (struct timespec){ .tv_sec = ns / 1000000000,
				  .tv_nsec = ns % 1000000000 };
}

void latency_body(unsigned int thread, _Atomic uint64_t *operations)
{
	(void)thread;
	/* Or the kernel adds 50 us to each sleep. */
	if (prctl(PR_SET_TIMERSLACK, 1))
		die("prctl");
	for (;;) {
		uint64_t until_ns = monotonic_ns() + SLEEP_NS;
		struct timespec until = timespec_of(until_ns);

		clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
		count_latency(monotonic_ns() - until_ns);
		work(options.work);
		count_operation(operations);
	}
}
