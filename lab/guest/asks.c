// SPDX-License-Identifier: GPL-2.0-only
/*
 * Clients of a server, redis or postgres: each thread is one, sends a request, waits for the answer and sends the next one.
 * One operation is one answer, and how long that took is counted.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "workload.h"

/* A request and an answer are shorter. */
#define MESSAGE_BYTES 1024
/* What pgbench calls a scale of 1. */
#define ACCOUNTS 100000

struct protocol {
	const char *name;
	/* What comes before the first request; NULL: nothing. Both write to @message and return how many bytes. */
	size_t (*greet)(char *message);
	size_t (*request)(char *message);
	/* Is the answer of which @length bytes are there complete? Any but a good one ends the guest. */
	bool (*is_answered)(const char *answer, size_t length);
};

/* Of this client's choices. */
static _Thread_local unsigned int seed;

static void refused(void)
{
	errno = EPROTO;
	die("an answer of the server");
}

static size_t redis_request(char *message)
{
	return stpcpy(message, "GET key\r\n") - message;
}

static bool redis_answered(const char *answer, size_t length)
{
	static const char no_such_key[] = "$-1\r\n";
	const size_t whole = sizeof(no_such_key) - 1;

	if (length > whole || memcmp(answer, no_such_key, length))
		refused();
	return length == whole;
}

/* A message of postgres: a letter, the length of what follows with these four bytes, and that. */
static size_t put_length(char *at, size_t length)
{
	uint32_t big_endian = htonl(length);

	memcpy(at, &big_endian, sizeof(big_endian));
	return length;
}

/* The first one has no letter: the version of the protocol, and who comes where. */
static size_t postgres_greeting(char *message)
{
	static const char says[] = "\0\3\0\0user\0nobody\0database\0postgres\0";

	memcpy(message + 4, says, sizeof(says));
	return put_length(message, 4 + sizeof(says));
}

/* What `pgbench --builtin=simple-update` does: three statements, which are one transaction. */
static size_t postgres_request(char *message)
{
	unsigned int account = 1 + rand_r(&seed) % ACCOUNTS;
	int delta = rand_r(&seed) % 10000 - 5000;
	int length = snprintf(
		message + 5, MESSAGE_BYTES - 5,
		"UPDATE pgbench_accounts SET abalance = abalance + %d WHERE "
		"aid = %u; "
		"SELECT abalance FROM pgbench_accounts WHERE aid = %u; "
		"INSERT INTO pgbench_history (tid, bid, aid, delta, mtime) "
		"VALUES (1, 1, %u, %d, CURRENT_TIMESTAMP)",
		delta, account, account, account, delta);

	message[0] = 'Q';
	return 1 + put_length(message + 1, 4 + length + 1);
}

static bool postgres_answered(const char *answer, size_t length)
{
	while (length >= 5) {
		uint32_t big_endian;
		size_t whole;

		memcpy(&big_endian, answer + 1, sizeof(big_endian));
		whole = 1 + ntohl(big_endian);
		if (*answer == 'E')
			refused();
		if (whole > length)
			return false;
		if (*answer == 'Z')
			return true;
		answer += whole;
		length -= whole;
	}
	return false;
}

static const struct protocol protocols[] = {
	{ .name = "redis",
	  .request = redis_request,
	  .is_answered = redis_answered },
	{ .name = "postgres",
	  .greet = postgres_greeting,
	  .request = postgres_request,
	  .is_answered = postgres_answered },
};

static const struct protocol *spoken;

void asks_prepare(void)
{
	for (size_t i = 0; i < sizeof(protocols) / sizeof(protocols[0]); i++)
		if (!strcmp(protocols[i].name, options.protocol))
			spoken = &protocols[i];
	errno = EINVAL;
	if (!spoken)
		die(options.protocol);
}

static int connect_to(const char *path)
{
	struct sockaddr_un server = { .sun_family = AF_UNIX };
	int connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	strncpy(server.sun_path, path, sizeof(server.sun_path) - 1);
	if (connection < 0 ||
	    connect(connection, (struct sockaddr *)&server, sizeof(server)))
		die(path);
	return connection;
}

static void ask(int connection, size_t (*question)(char *message))
{
	char message[MESSAGE_BYTES];
	ssize_t length = question(message);
	size_t there = 0;

	if (write(connection, message, length) != length)
		die("write of a request");
	while (!there || !spoken->is_answered(message, there)) {
		length = read(connection, message + there,
			      sizeof(message) - there);
		if (length <= 0)
			refused();
		there += length;
	}
}

void asks_body(unsigned int thread, _Atomic uint64_t *operations)
{
	int connection = connect_to(options.file);

	seed = thread;
	if (spoken->greet)
		ask(connection, spoken->greet);
	for (;;) {
		uint64_t start_ns = monotonic_ns();

		ask(connection, spoken->request);
		count_latency(monotonic_ns() - start_ns);
		count_operation(operations);
	}
}
