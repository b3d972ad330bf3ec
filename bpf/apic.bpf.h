/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What KVM's local APICs tell: which vCPU an IPI is for, and whether an interrupt
 * is pending for a vCPU. Reads only. Not here: when that is asked (observe.bpf.h).
 */
#ifndef COHORT_APIC_BPF_H
#define COHORT_APIC_BPF_H

enum {
	/* Intel SDM 3A, 13.6: the interrupt command register */
	APIC_VECTOR = 0xff,
	APIC_DELIVERY_MODE = 0x700,
	APIC_FIXED = 0,
	APIC_LOGICAL = 0x800,
	APIC_SHORTHAND = 0xc0000,
	/* 13.8: registers of 256 bits, 32 in each 16 bytes */
	APIC_IN_SERVICE = 0x100,
	APIC_REQUESTED = 0x200,
	APIC_WORDS = 8,
	APIC_STRIDE = 16,
};

static inline bool is_one_bit(u64 bits)
{
	return bits && !(bits & (bits - 1));
}

/* What a bit of a logical destination stands for. */
enum kvm_apic_logical_mode___kvm {
	KVM_APIC_MODE_XAPIC_CLUSTER___kvm = 1,
	KVM_APIC_MODE_XAPIC_FLAT___kvm,
	KVM_APIC_MODE_X2APIC___kvm,
};

#define APIC_MODE(name)                                       \
	bpf_core_enum_value(enum kvm_apic_logical_mode___kvm, \
			    KVM_APIC_MODE_##name##___kvm)

struct kvm_lapic___kvm {
	struct kvm_vcpu___kvm *vcpu;
	bool irr_pending; /* always set where the hardware delivers, */
	s16 isr_count; /* and never 0 */
	void *regs;
} __attribute__((preserve_access_index));

struct kvm_apic_map___kvm {
	enum kvm_apic_logical_mode___kvm logical_mode;
	u32 max_apic_id;
	/* A union with xapic_cluster_map[16][4], an array of arrays, which
	 * not every kernel's BTF tells in the same way. */
	struct kvm_lapic___kvm *xapic_flat_map[8];
	struct kvm_lapic___kvm *phys_map[];
} __attribute__((preserve_access_index));

/* The vCPU of the local APIC to which @entry, of KVM's map of them, points. */
static inline struct kvm_vcpu___kvm *vcpu_of_entry(void *entry)
{
	struct kvm_lapic___kvm *apic = kvm_at((struct kvm_lapic___kvm **)entry);

	return apic ? kvm_read(apic, vcpu) : NULL;
}

/* The vCPU whose local APIC has @id; NULL: none. */
static inline struct kvm_vcpu___kvm *
vcpu_with_apic_id(struct kvm_apic_map___kvm *map, u32 id)
{
	if (id > kvm_read(map, max_apic_id))
		return NULL;
	return vcpu_of_entry((void *)map +
			     bpf_core_field_offset(map->phys_map) +
			     id * sizeof(void *));
}

/* The vCPU that the logical destination @id stands for; NULL: none, or several. */
static inline struct kvm_vcpu___kvm *
vcpu_with_logical_id(struct kvm_apic_map___kvm *map, u32 id)
{
	u32 mode = kvm_read(map, logical_mode);
	u32 bits, first = 0;

	if (mode == APIC_MODE(X2APIC)) {
		bits = id & 0xffff;
		first = (id >> 16) * 16;
	} else if (mode == APIC_MODE(XAPIC_FLAT)) {
		bits = id & 0xff;
	} else if (mode == APIC_MODE(XAPIC_CLUSTER)) {
		bits = id & 0xf;
		first = (id >> 4 & 0xf) * 4;
	} else {
		return NULL;
	}
	if (!is_one_bit(bits))
		return NULL;
	first += __builtin_ctz(bits);
	if (mode == APIC_MODE(X2APIC))
		return vcpu_with_apic_id(map, first);
	return vcpu_of_entry((void *)map +
			     bpf_core_field_offset(map->xapic_flat_map) +
			     first * sizeof(void *));
}

/* The only vCPU that an IPI of @sender is for, by the two halves of the interrupt
 * command register; NULL: there are several, or it is a shorthand. */
static inline struct kvm_vcpu___kvm *receiver_of(struct kvm_vcpu___kvm *sender,
						 u32 icr, u32 destination)
{
	struct kvm_apic_map___kvm *map;
	struct kvm___kvm *kvm;

	if (!sender || icr & APIC_SHORTHAND)
		return NULL;
	kvm = kvm_read(sender, kvm);
	map = kvm_read(kvm, arch.apic_map);
	if (!map)
		return NULL;
	return icr & APIC_LOGICAL ? vcpu_with_logical_id(map, destination)
				  : vcpu_with_apic_id(map, destination);
}

/* The same of a paravirtual IPI in @kvm: its receivers are bits of two words of
 * @bits, @low and @high, the first of which stands for the APIC with the id
 * @first. */
static inline struct kvm_vcpu___kvm *
receiver_of_pv(struct kvm___kvm *kvm, u64 low, u64 high, u32 first, u32 bits)
{
	struct kvm_apic_map___kvm *map = kvm_read(kvm, arch.apic_map);

	if (!map || (low && high) || !is_one_bit(low | high))
		return NULL;
	return vcpu_with_apic_id(map,
				 first + (low ? __builtin_ctzll(low)
					      : bits + __builtin_ctzll(high)));
}

/* Has @vcpu, which is not running, not ended an interrupt of one of @vectors, a bit
 * each in APIC_WORDS? One that the hardware is about to deliver is not seen. */
static inline bool has_interrupt(struct kvm_vcpu___kvm *vcpu,
				 const u32 *vectors)
{
	struct kvm_lapic___kvm *apic = NULL;
	void *regs;
	u32 i;

	if (!vcpu || !bpf_core_field_exists(apic->regs))
		return false;
	apic = kvm_read(vcpu, arch.apic);
	if (!apic)
		return false;
	/* Most have none at all. */
	if (bpf_core_field_exists(apic->isr_count) &&
	    !kvm_read(apic, irr_pending) && !kvm_read(apic, isr_count))
		return false;
	regs = kvm_read(apic, regs);
	for (i = 0; i < APIC_WORDS; i++, regs += APIC_STRIDE) {
		u32 word = vectors[i];

		if (word && word & (kvm_at((u32 *)(regs + APIC_REQUESTED)) |
				    kvm_at((u32 *)(regs + APIC_IN_SERVICE))))
			return true;
	}
	return false;
}

#endif /* COHORT_APIC_BPF_H */
