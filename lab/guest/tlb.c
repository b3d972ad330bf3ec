// SPDX-License-Identifier: GPL-2.0-only
/*
 * Maps 16 KiB, touches them and unmaps them in every thread: each unmapping sends TLB shootdowns to the
 * siblings and waits for their answers, so a sibling that does not run holds all others up.
 */
#define _GNU_SOURCE
#include <stddef.h>
#include <sys/mman.h>

#include "workload.h"

#define REGION_BYTES (16 * 1024)
#define PAGE_BYTES   4096

void tlb_body(unsigned int thread, _Atomic uint64_t *operations)
{
	(void)thread;
	for (;;) {
		char *region = mmap(NULL, REGION_BYTES, PROT_READ | PROT_WRITE,
				    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		if (region == MAP_FAILED)
			die("mmap");
		for (int offset = 0; offset < REGION_BYTES;
		     offset += PAGE_BYTES)
			*(volatile char *)(region + offset) = 1;
		if (munmap(region, REGION_BYTES))
			die("munmap");
		work(options.work);
		count_operation(operations);
	}
}
