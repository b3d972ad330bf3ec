// SPDX-License-Identifier: GPL-2.0-only
/*
 * What make does: each thread starts one program after the other, which works and ends. One operation is one program.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <spawn.h>
#include <stdio.h>
#include <sys/wait.h>

#include "workload.h"

void fork_body(unsigned int thread, _Atomic uint64_t *operations)
{
	char work_option[32];
	char *arguments[] = { "workload", "once", work_option, NULL };
	char *environment[] = { NULL };

	(void)thread;
	snprintf(work_option, sizeof(work_option), "work=%llu",
		 (unsigned long long)options.work);
	for (;;) {
		pid_t child;

		errno = posix_spawn(&child, "/proc/self/exe", NULL, NULL,
				    arguments, environment);
		if (errno)
			die("posix_spawn");
		if (waitpid(child, NULL, 0) != child)
			die("waitpid");
		count_operation(operations);
	}
}
