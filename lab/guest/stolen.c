// SPDX-License-Identifier: GPL-2.0-only
/*
 * Computes on each vCPU, while one more thread reads how much of their time the guest's kernel takes for stolen. It counts
 * readings, and above 32 bits the stolen time of all vCPUs, in hundredths of a second.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include "workload.h"

/* As /proc/stat has it; the kernel's ticks of user space are hundredths of a second. */
static uint64_t stolen(int file)
{
	unsigned long long steal;
	char text[256];
	ssize_t length = pread(file, text, sizeof(text) - 1, 0);

	if (length <= 0)
		die("read of /proc/stat");
	text[length] = '\0';
	/* User, nice, system, idle, iowait, irq and softirq come before. */
	if (sscanf(text, "cpu %*u %*u %*u %*u %*u %*u %*u %llu", &steal) != 1)
		die("/proc/stat");
	return steal;
}

void stolen_body(unsigned int thread, _Atomic uint64_t *operations)
{
	const struct timespec pause = { .tv_nsec = 5000000 };
	int file;

	while (thread)
		work(options.work);
	come_first();
	file = open("/proc/stat", O_RDONLY | O_CLOEXEC);
	for (uint64_t readings = 1;; readings++) {
		atomic_store_explicit(operations, stolen(file) << 32 | readings,
				      memory_order_relaxed);
		nanosleep(&pause, NULL);
	}
}
