// SPDX-License-Identifier: GPL-2.0-only
/*
 * Pairs of threads pass one byte back and forth through two pipes; each does half of an operation's work
 * before it answers. One of a pair always sleeps: the load is halts, wake-ups and the IPIs between them, and
 * a second CPU brings no gain by construction. The two are pinned to different vCPUs: a guest's scheduler
 * sometimes keeps both on one for seconds, and then there is no such load. A single or odd last thread passes
 * the byte to itself.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <unistd.h>

#include "workload.h"

/* inbox[n] is read by thread n. */
static int inbox[COUNTER_SLOTS][2];

void pipe_prepare(void)
{
	for (unsigned int i = 0; i < options.threads; i++)
		if (pipe2(inbox[i], O_CLOEXEC))
			die("pipe2");
}

static void send_byte(unsigned int thread)
{
	if (write(inbox[thread][1], "", 1) != 1)
		die("write to a pipe");
}

static void await_byte(unsigned int thread)
{
	char byte;

	if (read(inbox[thread][0], &byte, 1) != 1)
		die("read from a pipe");
}

void pipe_body(unsigned int thread, _Atomic uint64_t *operations)
{
	unsigned int partner =
		(thread ^ 1) < options.threads ? thread ^ 1 : thread;

	if (thread % 2 == 0)
		send_byte(partner);
	for (;;) {
		await_byte(thread);
		work(options.work / 2);
		send_byte(partner);
		count_operation(operations);
	}
}
