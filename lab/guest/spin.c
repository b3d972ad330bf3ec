// SPDX-License-Identifier: GPL-2.0-only
/*
 * A fair ticket lock in user space: a part of an operation's work is done inside the lock, the rest outside.
 * The lock goes to its waiters in their order, so both a preempted holder and a preempted next-in-line make
 * everyone else spin. The part is a third unless told otherwise: of two threads one waits now and then. At a tenth
 * they hardly meet, and even a scheduler that knows nothing of locks loses next to nothing.
 */
#include "workload.h"

static struct {
	_Atomic uint64_t next_ticket __attribute__((aligned(64)));
	_Atomic uint64_t now_serving __attribute__((aligned(64)));
} lock;

static void take_lock(void)
{
	uint64_t ticket = atomic_fetch_add_explicit(&lock.next_ticket, 1,
						    memory_order_relaxed);

	while (atomic_load_explicit(&lock.now_serving, memory_order_acquire) !=
	       ticket)
		__builtin_ia32_pause();
}

static void release_lock(void)
{
	atomic_fetch_add_explicit(&lock.now_serving, 1, memory_order_release);
}

void spin_body(unsigned int thread, _Atomic uint64_t *operations)
{
	uint64_t inside = options.work * options.locked_percent / 100;

	(void)thread;
	for (;;) {
		take_lock();
		work(inside);
		release_lock();
		work(options.work - inside);
		count_operation(operations);
	}
}
