// SPDX-License-Identifier: GPL-2.0-only
/*
 * Counts what other programs do: whenever a file in the folder was written and closed, one more unit of
 * their work is done. It does no work itself. A shell or any benchmark can write a file, and the one who
 * counts sleeps meanwhile.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <sys/inotify.h>
#include <unistd.h>

#include "workload.h"

static int inotify;

void files_prepare(void)
{
	inotify = inotify_init1(IN_CLOEXEC);
	/*
	 * The kernel drops an event that equals the one before it, if nobody has read that yet. Between two
	 * closes of a file lies a write, so asking for both kinds keeps each close.
	 */
	if (inotify < 0 || inotify_add_watch(inotify, options.directory,
					     IN_MODIFY | IN_CLOSE_WRITE) < 0)
		die(options.directory);
}

void files_body(unsigned int thread, _Atomic uint64_t *operations)
{
	_Alignas(struct inotify_event) char events[4096];

	(void)thread;
	come_first();
	for (;;) {
		ssize_t length = read(inotify, events, sizeof(events));

		if (length <= 0)
			die("read of the folder's events");
		for (char *next = events; next < events + length;) {
			const struct inotify_event *event = (void *)next;

			if (event->mask & IN_Q_OVERFLOW)
				die("the folder's events overflowed");
			if (event->mask & IN_CLOSE_WRITE)
				count_operations(operations,
						 options.operations);
			next += sizeof(*event) + event->len;
		}
	}
}
