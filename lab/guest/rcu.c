// SPDX-License-Identifier: GPL-2.0-only
/*
 * RCU grace periods. The last thread waits for one after the other; as many threads as there are vCPUs look up
 * a path all the time, and most of that is inside of RCU read-side critical sections. A vCPU that is preempted in
 * one keeps the guest's grace period open until it runs again. One operation is one grace period, and is timed.
 */
#define _GNU_SOURCE
#include <linux/membarrier.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "workload.h"

static void read_forever(void)
{
	struct stat ignored;

	for (;;)
		stat("/proc/self/task/../../self/exe", &ignored);
}

void rcu_body(unsigned int thread, _Atomic uint64_t *operations)
{
	if (thread + 1 < options.threads)
		read_forever();
	for (;;) {
		uint64_t start_ns = monotonic_ns();

		if (syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL, 0, 0))
			die("membarrier");
		count_latency(monotonic_ns() - start_ns);
		count_operation(operations);
	}
}
