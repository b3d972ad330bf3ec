// SPDX-License-Identifier: GPL-2.0-only
/*
 * The workload of a booted guest, or of the host beside guests: `workload NAME [OPTION=VALUE]...` runs one thread per vCPU forever, each
 * counting its operations in its own cache line of one page.
 *
 *   threads=N            default: the number of CPUs of this process; rcu, stolen: one more
 *   work=N               iterations of an empty loop per operation
 *   locked_percent=N     spin: part of the work that is done inside the lock
 *   policy=spin|sleep    how the barrier waits
 *   directory=PATH       files: counts when a file in this folder was written and closed,
 *   file=PATH, byte=N    said: counts when this byte appears in this FIFO,
 *   operations=N         and this many operations each time
 *   file=PATH            asks: the socket of the server that is asked,
 *   protocol=NAME        redis or postgres
 *   counters_file=PATH   count in this file instead of an anonymous page (to try a workload without a guest)
 *
 * `workload calibrate` prints how many iterations of work take a millisecond here, and ends. `workload once work=N`
 * does that much and ends: what `fork` starts.
 *
 * The host reads the page straight out of the guest's memory, at the moment it likes and without any help
 * of the guest: a guest that prints its progress would disturb what is measured, and could only say how far
 * it was when it last got to run. Threads are not pinned, real programs leave that to their kernel; but for
 * those of pipe (see there).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "workload.h"

#define PAGE_BYTES	   4096
#define PAGEMAP_PRESENT	   (1ULL << 63)
#define PAGEMAP_FRAME_MASK ((1ULL << 55) - 1)

_Static_assert(sizeof(struct counter_page) == PAGE_BYTES,
	       "the counters fill exactly one page");

struct options options = { .work = 1500000,
			   .locked_percent = 33,
			   .directory = ".",
			   .file = "said",
			   .byte = '\n',
			   .protocol = "redis",
			   .operations = 1 };

static const struct workload {
	const char *name;
	workload_body *body;
	void (*prepare)(void);
	bool pinned; /* each thread to a vCPU of its own */
	unsigned int more_threads; /* than vCPUs, unless told otherwise */
} workloads[] = {
	{ .name = "tlb", .body = tlb_body },
	{ .name = "spin", .body = spin_body },
	{ .name = "pipe",
	  .body = pipe_body,
	  .prepare = pipe_prepare,
	  .pinned = true },
	{ .name = "barrier", .body = barrier_body },
	{ .name = "busy", .body = busy_body },
	{ .name = "latency", .body = latency_body },
	{ .name = "fork", .body = fork_body },
	{ .name = "mapping", .body = mapping_body },
	{ .name = "rcu", .body = rcu_body, .more_threads = 1 },
	{ .name = "stolen", .body = stolen_body, .more_threads = 1 },
	{ .name = "files", .body = files_body, .prepare = files_prepare },
	{ .name = "said", .body = said_body, .prepare = said_prepare },
	{ .name = "asks", .body = asks_body, .prepare = asks_prepare },
};

static const struct workload *chosen;
struct counter_page *counters;
static const char *counters_file;

void die(const char *what)
{
	fprintf(stderr, "workload failed: %s: %s\n", what, strerror(errno));
	exit(1);
}

static void usage(const char *problem, const char *word)
{
	fprintf(stderr, "workload failed: %s: %s\n", problem, word);
	exit(2);
}

static unsigned int cpus_of_this_process(void)
{
	cpu_set_t set;

	if (sched_getaffinity(0, sizeof(set), &set))
		die("sched_getaffinity");
	return CPU_COUNT(&set);
}

static uint64_t number(const char *option, const char *value)
{
	char *end;
	uint64_t parsed = strtoull(value, &end, 10);

	if (!*value || *end)
		usage("this option needs a whole number", option);
	return parsed;
}

static void parse_option(char *option)
{
	char *value = strchr(option, '=');

	if (!value)
		usage("options have the form name=value", option);
	*value++ = '\0';
	if (!strcmp(option, "threads"))
		options.threads = number(option, value);
	else if (!strcmp(option, "work"))
		options.work = number(option, value);
	else if (!strcmp(option, "locked_percent"))
		options.locked_percent = number(option, value);
	else if (!strcmp(option, "counters_file"))
		counters_file = value;
	else if (!strcmp(option, "directory"))
		options.directory = value;
	else if (!strcmp(option, "file"))
		options.file = value;
	else if (!strcmp(option, "protocol"))
		options.protocol = value;
	else if (!strcmp(option, "byte"))
		options.byte = number(option, value);
	else if (!strcmp(option, "operations"))
		options.operations = number(option, value);
	else if (!strcmp(option, "policy") && !strcmp(value, "spin"))
		options.sleeping = false;
	else if (!strcmp(option, "policy") && !strcmp(value, "sleep"))
		options.sleeping = true;
	else
		usage("unknown option or value", option);
}

static const struct workload *workload_named(const char *name)
{
	for (size_t i = 0; i < sizeof(workloads) / sizeof(workloads[0]); i++)
		if (!strcmp(workloads[i].name, name))
			return &workloads[i];
	usage("unknown workload", name);
	return NULL;
}

/* The fastest of several runs: the others were preempted. */
static uint64_t iterations_per_ms(void)
{
	const uint64_t iterations = 50000;
	uint64_t fastest_ns = UINT64_MAX;

	for (int run = 0; run < 9; run++) {
		uint64_t start_ns = monotonic_ns();

		work(iterations);

		uint64_t took_ns = monotonic_ns() - start_ns;

		if (took_ns < fastest_ns)
			fastest_ns = took_ns;
	}
	return iterations * 1000000 / (fastest_ns ? fastest_ns : 1);
}

static void map_counters(void)
{
	int file = -1, flags = MAP_PRIVATE | MAP_ANONYMOUS;

	if (counters_file) {
		file = open(counters_file, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
		if (file < 0 || ftruncate(file, PAGE_BYTES))
			die(counters_file);
		flags = MAP_SHARED;
	}
	counters =
		mmap(NULL, PAGE_BYTES, PROT_READ | PROT_WRITE, flags, file, 0);
	if (counters == MAP_FAILED)
		die("mmap of the counter page");
	/* The host holds on to the physical address: the page must stay where it is. */
	if (!counters_file && (madvise(counters, PAGE_BYTES, MADV_NOHUGEPAGE) ||
			       mlock(counters, PAGE_BYTES)))
		die("pinning the counter page");
	counters->threads = options.threads;
	counters->magic = COUNTER_MAGIC;
}

static uint64_t physical_address(const void *address)
{
	uint64_t entry, index = (uintptr_t)address / PAGE_BYTES;
	int pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);

	if (pagemap < 0 || pread(pagemap, &entry, sizeof(entry),
				 index * sizeof(entry)) != sizeof(entry))
		die("/proc/self/pagemap");
	close(pagemap);
	if (!(entry & PAGEMAP_PRESENT) || !(entry & PAGEMAP_FRAME_MASK))
		usage("the counter page has no physical address",
		      "run as root");
	return (entry & PAGEMAP_FRAME_MASK) * PAGE_BYTES;
}

static void pin(unsigned int thread)
{
	cpu_set_t one;

	CPU_ZERO(&one);
	CPU_SET(thread % cpus_of_this_process(), &one);
	if (sched_setaffinity(0, sizeof(one), &one))
		die("sched_setaffinity");
}

/*
 * A guest that was frozen takes that time for CPU time of whatever ran, and lets that wait for as long. One
 * that counts would come too late then. Who tries a workload without a guest may lack the right to that.
 */
void come_first(void)
{
	const struct sched_param first = { .sched_priority = 1 };

	if (sched_setscheduler(0, SCHED_FIFO, &first) && errno != EPERM)
		die("sched_setscheduler");
}

static void *thread_main(void *argument)
{
	uintptr_t thread = (uintptr_t)argument;

	if (chosen->pinned)
		pin(thread);
	chosen->body(thread, &counters->slots[thread].operations);
	return NULL;
}

static void run_threads(void)
{
	pthread_t threads[COUNTER_SLOTS];

	for (uintptr_t i = 0; i < options.threads; i++) {
		errno = pthread_create(&threads[i], NULL, thread_main,
				       (void *)i);
		if (errno)
			die("pthread_create");
	}
	for (unsigned int i = 0; i < options.threads; i++)
		pthread_join(threads[i], NULL);
}

int main(int argc, char **argv)
{
	if (argc < 2)
		usage("usage", "workload NAME [OPTION=VALUE]...");
	if (!strcmp(argv[1], "calibrate")) {
		printf("%llu\n", (unsigned long long)iterations_per_ms());
		return 0;
	}
	if (!strcmp(argv[1], "once")) {
		for (int i = 2; i < argc; i++)
			parse_option(argv[i]);
		work(options.work);
		return 0;
	}
	chosen = workload_named(argv[1]);
	options.threads = cpus_of_this_process() + chosen->more_threads;
	for (int i = 2; i < argc; i++)
		parse_option(argv[i]);
	if (options.threads < 1 || options.threads > COUNTER_SLOTS)
		usage("threads must be 1 to 31", argv[1]);
	map_counters();
	if (chosen->prepare)
		chosen->prepare();
	/* The one line the host waits for; lab/src/inside/booted.rs parses it. */
	printf("counting at %#llx\n",
	       counters_file ? 0ULL
			     : (unsigned long long)physical_address(counters));
	fflush(stdout);
	run_threads();
	return 0;
}
