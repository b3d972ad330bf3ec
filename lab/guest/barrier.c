// SPDX-License-Identifier: GPL-2.0-only
/*
 * All threads work and then meet. They wait spinning or asleep: OpenMP's two policies. One operation is one
 * thread's arrival, so figures of 1 and of N threads compare.
 */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "workload.h"

static _Atomic uint32_t arrived __attribute__((aligned(64)));
static _Atomic uint32_t generation __attribute__((aligned(64)));

static void wait_spinning(uint32_t before)
{
	while (atomic_load_explicit(&generation, memory_order_acquire) ==
	       before)
		__builtin_ia32_pause();
}

static void wait_asleep(uint32_t before)
{
	while (atomic_load_explicit(&generation, memory_order_acquire) ==
	       before)
		syscall(SYS_futex, &generation, FUTEX_WAIT_PRIVATE, before,
			NULL, NULL, 0);
}

static void open_barrier(void)
{
	/* The count is reset before the generation moves: nobody can arrive for the next round in between. */
	atomic_store_explicit(&arrived, 0, memory_order_relaxed);
	atomic_fetch_add_explicit(&generation, 1, memory_order_release);
	if (options.sleeping)
		syscall(SYS_futex, &generation, FUTEX_WAKE_PRIVATE,
			COUNTER_SLOTS, NULL, NULL, 0);
}

static void meet(void)
{
	uint32_t before =
		atomic_load_explicit(&generation, memory_order_acquire);

	if (atomic_fetch_add_explicit(&arrived, 1, memory_order_acq_rel) + 1 ==
	    options.threads)
		open_barrier();
	else if (options.sleeping)
		wait_asleep(before);
	else
		wait_spinning(before);
}

void barrier_body(unsigned int thread, _Atomic uint64_t *operations)
{
	(void)thread;
	for (;;) {
		work(options.work);
		meet();
		count_operation(operations);
	}
}
