// SPDX-License-Identifier: GPL-2.0-only
/*
 * Clients of a redis server: each thread is one, sends a request, waits for the answer and sends the next one. One operation
 * is one answer, and how long that took is counted.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "workload.h"

static const char request[] = "GET key\r\n";
/* Redis knows no such key. */
static const char answer[] = "$-1\r\n";

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

static void ask(int connection)
{
	const ssize_t length = sizeof(answer) - 1;
	char said[sizeof(answer) - 1];

	if (write(connection, request, sizeof(request) - 1) !=
	    sizeof(request) - 1)
		die("write of a request");
	errno = EPROTO;
	if (recv(connection, said, length, MSG_WAITALL) != length ||
	    memcmp(said, answer, length))
		die("an answer of redis");
}

void asks_body(unsigned int thread, _Atomic uint64_t *operations)
{
	int connection = connect_to(options.file);

	(void)thread;
	for (;;) {
		uint64_t start_ns = monotonic_ns();

		ask(connection);
		count_latency(monotonic_ns() - start_ns);
		count_operation(operations);
	}
}
