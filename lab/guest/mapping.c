// SPDX-License-Identifier: GPL-2.0-only
/*
 * Maps memory, fills it with records, searches in them and unmaps it, in every thread, as the benchmark ebizzy
 * does with its option -M. Page faults and unmapping take the address space's lock, and each unmapping sends TLB shootdowns
 * to the siblings.
 */
#define _GNU_SOURCE
#include <stddef.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "workload.h"

enum {
	RECORDS = 32 * 1024,
	RECORD_BYTES = sizeof(uint64_t),
	SEARCHES = 64,
};

static int compare(const void *left, const void *right)
{
	uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;

	return a < b ? -1 : a > b;
}

void mapping_body(unsigned int thread, _Atomic uint64_t *operations)
{
	uint64_t key = thread;

	for (;;) {
		uint64_t *records = mmap(NULL, RECORDS * RECORD_BYTES,
					 PROT_READ | PROT_WRITE,
					 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		if (records == MAP_FAILED)
			die("mmap");
		for (uint64_t record = 0; record < RECORDS; record++)
			records[record] = record;
		for (int search = 0; search < SEARCHES; search++) {
			key = (key * 5 + 1) % RECORDS;
			if (!bsearch(&key, records, RECORDS, RECORD_BYTES,
				     compare))
				die("a record is missing");
		}
		if (munmap(records, RECORDS * RECORD_BYTES))
			die("munmap");
		count_operation(operations);
	}
}
