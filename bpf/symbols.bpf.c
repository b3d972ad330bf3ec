// SPDX-License-Identifier: GPL-2.0-only
/*
 * Where the kernel has a symbol, by name. Rust asks before it loads the scheduler or the
 * observer: to read /proc/kallsyms, which prints all there are, is a third of loading.
 */
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>
#include "intf.h"

char _license[] SEC("license") = "GPL";

/* Returns what is wrong: ENOENT, there is none; EPERM, addresses are hidden. */
SEC("syscall")
int look_up(struct symbol *symbol)
{
	char name[SYMBOL_NAME_LEN];
	u64 address = 0;
	int err;

	__builtin_memcpy(name, symbol->name, sizeof(name));
	err = bpf_kallsyms_lookup_name(name, sizeof(name), 0, &address);
	symbol->address = address;
	return -err;
}
