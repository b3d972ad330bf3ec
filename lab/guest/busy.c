// SPDX-License-Identifier: GPL-2.0-only
/* Pure computing without any communication: the control, for which no scheduler may make anything worse. */
#include "workload.h"

void busy_body(unsigned int thread, _Atomic uint64_t *operations)
{
	(void)thread;
	for (;;) {
		work(options.work);
		count_operation(operations);
	}
}
