/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Where the two architectures keep the same thing in other places. What only one
 * of them has (APICs, CPUID) is read by CO-RE where it is there. Not here: KVM.
 */
#ifndef COHORT_ARCH_BPF_H
#define COHORT_ARCH_BPF_H

/* The number of the system call that @regs entered the kernel by; -1: none. */
static inline s64 syscall_number(struct pt_regs *regs)
{
#if defined(__TARGET_ARCH_x86)
	return regs->orig_ax;
#elif defined(__TARGET_ARCH_arm64)
	return regs->syscallno;
#else
#error "Cohort does not know this architecture"
#endif
}

/* Its second argument. */
static inline u64 second_argument(struct pt_regs *regs)
{
#if defined(__TARGET_ARCH_x86)
	return regs->si;
#elif defined(__TARGET_ARCH_arm64)
	return regs->regs[1];
#endif
}

/* Did what entered the kernel with @regs come from user mode? */
static inline bool is_from_user(struct pt_regs *regs)
{
#if defined(__TARGET_ARCH_x86)
	return BPF_CORE_READ(regs, cs) & 3;
#elif defined(__TARGET_ARCH_arm64)
	return !(BPF_CORE_READ(regs, pstate) & 0xf);
#endif
}

#endif /* COHORT_ARCH_BPF_H */
