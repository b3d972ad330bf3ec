// SPDX-License-Identifier: GPL-2.0-only
/*
 * Counts what a program does that says how far it is, to a FIFO: each time one byte appears there, such as a
 * "%" or the end of a line, one more part of its work is done. It does no work itself.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <unistd.h>

#include "workload.h"

static int fifo;

void said_prepare(void)
{
	fifo = open(options.file, O_RDONLY | O_CLOEXEC);
	if (fifo < 0)
		die(options.file);
}

void said_body(unsigned int thread, _Atomic uint64_t *operations)
{
	char said[4096];

	(void)thread;
	come_first();
	for (;;) {
		ssize_t length = read(fifo, said, sizeof(said));
		uint64_t parts = 0;

		if (length <= 0)
			die("read of what is said");
		for (ssize_t at = 0; at < length; at++)
			parts += said[at] == options.byte;
		count_operations(operations, parts * options.operations);
	}
}
