/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What KVM's local APICs tell: which vCPUs an IPI is for, and whether an interrupt
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
	APIC_TO_SELF = 0x40000,
	APIC_TO_ALL = 0x80000, /* with APIC_TO_SELF: to all but the sender */
	/* 13.8: registers of 256 bits, 32 in each 16 bytes */
	APIC_IN_SERVICE = 0x100,
	APIC_REQUESTED = 0x200,
	APIC_WORDS = 8,
	APIC_STRIDE = 16,
};

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
	bool apicv_active;
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

/* A set of local APICs: their numbers are @first and more, a bit each. */
struct apics {
	u64 low;
	u64 high; /* of the next 64 */
	u32 first;
	bool logical; /* an xAPIC's logical numbers, not ids */
};

enum { APICS_MOST = 128 };

/* Takes the first one out of @apics, which are in @map, and finds its @vcpu; NULL: it has
 * none. False: there are no more. */
static inline bool next_vcpu(struct kvm_apic_map___kvm *map,
			     struct apics *apics, struct kvm_vcpu___kvm **vcpu)
{
	void *table;
	u32 number;

	if (!apics->low) {
		apics->low = apics->high;
		apics->high = 0;
		apics->first += 64;
	}
	if (!apics->low)
		return false;
	number = apics->first + __builtin_ctzll(apics->low);
	apics->low &= apics->low - 1;
	if (!apics->logical && number > kvm_read(map, max_apic_id))
		return false;
	table = (void *)map +
		(apics->logical ? bpf_core_field_offset(map->xapic_flat_map)
				: bpf_core_field_offset(map->phys_map));
	*vcpu = vcpu_of_entry(table + number * sizeof(void *));
	return true;
}

/* Those that the logical destination @id stands for. */
static inline void find_logical(struct kvm_apic_map___kvm *map, u32 id,
				struct apics *apics)
{
	u32 mode = kvm_read(map, logical_mode);

	if (mode == APIC_MODE(X2APIC)) {
		apics->low = id & 0xffff;
		apics->first = (id >> 16) * 16;
	} else if (mode == APIC_MODE(XAPIC_FLAT)) {
		apics->low = id & 0xff;
		apics->logical = true;
	} else if (mode == APIC_MODE(XAPIC_CLUSTER)) {
		apics->low = id & 0xf;
		apics->first = (id >> 4 & 0xf) * 4;
		apics->logical = true;
	}
}

/* Those that an IPI is for, by the two halves of the interrupt command register. They
 * are in the struct kvm_apic_map @map. Of an IPI to all the sender may be one of them, and
 * only the first APICS_MOST are. */
__noinline int find_receivers(u64 map, u32 icr, u32 destination,
			      struct apics *apics)
{
	if (!apics)
		return 0;
	if (icr & APIC_TO_ALL) {
		apics->low = ~0ULL;
		apics->high = ~0ULL;
	} else if (icr & APIC_LOGICAL) {
		find_logical((void *)map, destination, apics);
	} else if (!(icr & APIC_TO_SELF)) {
		apics->low = 1;
		apics->first = destination;
	}
	return 0;
}

/* Does an interrupt wait for @vcpu, which is not running? Where the hardware
 * delivers interrupts, nobody can tell. */
static inline bool has_pending_interrupt(struct kvm_vcpu___kvm *vcpu)
{
	struct kvm_lapic___kvm *apic = NULL;

	if (!vcpu || !bpf_core_field_exists(apic->irr_pending))
		return false;
	apic = kvm_read(vcpu, arch.apic);
	return apic && !kvm_read(apic, apicv_active) &&
	       kvm_read(apic, irr_pending);
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
