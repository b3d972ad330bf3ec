/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Types that the BPF programs and the Rust program share. Rust gets them by
 * bindgen (module bpf_intf), so plain C only: no kernel type, no BPF macro.
 */
#ifndef COHORT_INTF_H
#define COHORT_INTF_H

#ifndef __VMLINUX_H__
typedef unsigned char u8;
typedef unsigned int u32;
typedef int s32;
typedef unsigned long long u64;
typedef long long s64;
#endif

enum cohort_limits {
	MAX_CPUS = 1024,
	MAX_DOMAINS = 256,
	MAX_GROUPS = 4096, /* VMs and cgroups together */
};

/* What a group is: it owns CPU time, and its members divide it. */
enum group_kind {
	GROUP_FREE = 0,
	GROUP_CGROUP = 1,
	GROUP_VM = 2,
};

/* Why an offered directed yield did not run its target next. */
enum yield_miss {
	YIELD_MISS_NOT_SIBLING, /* the target is of another VM */
	YIELD_MISS_NOT_READY, /* it ran already, or went to sleep */
	YIELD_MISS_THROTTLED, /* the VM's cap is used up */
	YIELD_MISS_AFFINITY, /* it may not run on the yielder's CPU */
	YIELD_MISS_LOST, /* it was taken between offer and dispatch */
	NR_YIELD_MISS,
};

/* Counters of one group since it was created; written by BPF, read by Rust. */
struct group_stats {
	u64 run_ns; /* CPU time used by its tasks */
	u64 vcpu_run_ns; /* of which by vCPU threads */
	u64 ready_ns; /* time vCPUs were runnable and waited for a CPU */
	u64 throttled_ns; /* time its cap stopped it */
	u64 yields_offered; /* directed yields KVM offered */
	u64 yields_ready; /* of which the target was a ready sibling */
	u64 yields_served; /* of which the target ran next */
	u64 yields_missed[NR_YIELD_MISS];
	u64 wakeups; /* vCPU wake-ups */
	u64 migrations; /* a vCPU started on another CPU than before */
	u64 stacked_ns; /* ready time in which the CPU it then ran on ran a sibling while another allowed CPU ran none */
};

#endif /* COHORT_INTF_H */
