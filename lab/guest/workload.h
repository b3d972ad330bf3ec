/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What the workloads of booted guests share: their options, the page in which they count, work of a known
 * length and a spin loop that a KVM host sees as it sees one on hardware.
 *
 * Not here: how the host reads the counters (lab/src/inside/booted.rs) and what the figures mean.
 */
#ifndef COHORT_WORKLOAD_H
#define COHORT_WORKLOAD_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

/* "COHORTOP" in memory order; lab/src/guest.rs has the same layout. */
#define COUNTER_MAGIC	0x504f54524f484f43ULL
#define COUNTER_SLOTS	31
#define LATENCY_BUCKETS 256

/* One cache line per thread, so that counting is no communication between vCPUs. */
struct counter_slot {
	_Atomic uint64_t operations;
	uint8_t padding[56];
};

/* Exactly one page: the host finds it by its guest-physical address. */
struct counter_page {
	uint64_t magic;
	uint64_t threads;
	uint8_t padding[48];
	struct counter_slot slots[COUNTER_SLOTS];
	/* All threads' latencies in ns of this machine's clock; lab/micro/src/histogram.rs has the same buckets. */
	_Atomic uint64_t latencies[LATENCY_BUCKETS];
};

struct options {
	/* Number of threads; one per vCPU unless told otherwise. */
	unsigned int threads;
	/* Iterations of an empty loop per operation. */
	uint64_t work;
	/* Spin only: part of the work that is done inside the lock. */
	uint64_t locked_percent;
	/* Barrier only: wait in the kernel (futex) instead of spinning. */
	bool sleeping;
	/* Files only: the folder to watch. */
	const char *directory;
	/* Said: the FIFO, and the byte that counts there. Asks: the server's socket, and what it is. */
	const char *file;
	char byte;
	const char *protocol;
	/* Files and said: what one file, or one byte, stands for. */
	uint64_t operations;
};

extern struct options options;
extern struct counter_page *counters;

/* A thread's endless body; @thread counts from 0, @operations is its slot. */
typedef void workload_body(unsigned int thread, _Atomic uint64_t *operations);

workload_body tlb_body, spin_body, pipe_body, barrier_body, busy_body, rcu_body,
	latency_body, fork_body, mapping_body, files_body, said_body, asks_body,
	stolen_body;

/* Opens the pipes of all pairs; called before any thread runs. */
void pipe_prepare(void);

/* The calling thread comes before all others, for one that only counts. */
void come_first(void);

/* Starts to watch the folder. */
void files_prepare(void);

/* Opens the FIFO. */
void said_prepare(void);

/* Knows how the server is asked. */
void asks_prepare(void);

/* Ends the guest (and with it the test) with a sentence on the console. */
void die(const char *what) __attribute__((noreturn));

/* Only its own thread writes a slot, so counting needs no locked instruction. */
static inline void count_operations(_Atomic uint64_t *operations, uint64_t done)
{
	uint64_t count = atomic_load_explicit(operations, memory_order_relaxed);

	atomic_store_explicit(operations, count + done, memory_order_relaxed);
}

static inline void count_operation(_Atomic uint64_t *operations)
{
	count_operations(operations, 1);
}

/* Four buckets per power of two. */
static inline void count_latency(uint64_t ns)
{
	uint64_t number = ns < 4 ? 4 : ns;
	unsigned int shift = 61 - __builtin_clzll(number);

	atomic_fetch_add_explicit(
		&counters->latencies[(number >> shift) + 4 * shift], 1,
		memory_order_relaxed);
}

static inline uint64_t monotonic_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000ULL + now.tv_nsec;
}

/* Registers only, so it takes as long in a guest. The exact machine takes such a loop at once (lab/bochs/0022*). */
static inline void work(uint64_t iterations)
{
	if (iterations)
		asm volatile("1: dec %0; jnz 1b" : "+r"(iterations) : : "cc");
}

#endif
