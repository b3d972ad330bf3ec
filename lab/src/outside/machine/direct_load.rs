// SPDX-License-Identifier: GPL-2.0-only
//! Puts an unpacked Linux kernel into the memory of a machine whose firmware has no loader for it: pieces of memory, and an
//! option ROM that enters the kernel when the firmware has set up everything else. Saves a boot medium, a boot loader, and
//! unpacking, which takes an emulator 20 s. The protocol is PVH: include/xen/interface/hvm/start_info.h of the kernel.

use anyhow::{Context, Result, ensure};
use object::Endianness;
use object::elf::{FileHeader64, PT_LOAD};
use object::read::elf::{FileHeader as _, ProgramHeader as _};

/// Where the option ROM is put; the firmware looks from 0xc8000 to 0xe0000.
pub const ROM_ADDRESS: u32 = 0xd_0000;
/// Where the kernel is told what there is; below what the firmware uses to start other CPUs.
const START_INFO: u32 = 0x9_0000;
/// Where the initrd is put: behind the kernel.
pub const INITRD: u32 = 0x1000_0000;
/// The firmware leaves tables of this size at the end of memory.
const ACPI_BYTES: u64 = 0x1_0000;
/// What is above belongs to devices, however much memory there is.
const MEMORY_ENDS: u64 = 3 << 30;

/// Longest command line with its final zero: what the kernel reads.
const COMMAND_LINE_BYTES: usize = 2048;

// struct hvm_start_info, version 1: eight words of 4 or 8 bytes; then our list of one module, our map, the command line.
const START_INFO_MAGIC: u32 = 0x336e_c578;
const MODULE_OFFSET: u32 = 56;
const MAP_OFFSET: u32 = MODULE_OFFSET + 32;
const MAP_ENTRY_BYTES: u32 = 24;
/// Note of a kernel with the physical address at which PVH enters it, in 32-bit mode (xen/interface/elfnote.h).
const NOTE_PHYS32_ENTRY: u32 = 18;

// Types of memory, as the firmware's map has them.
const USABLE: u32 = 1;
const RESERVED: u32 = 2;
const ACPI: u32 = 3;

/// Bytes that are to be at an address when the machine is switched on.
#[derive(Debug)]
pub struct Piece {
    /// The physical address.
    pub address: u32,
    /// What is there.
    pub content: Vec<u8>,
}

/// What makes a kernel start.
#[derive(Debug)]
pub struct Load {
    /// The kernel, and what it is told.
    pub pieces: [Piece; 2],
    /// The option ROM, for [`ROM_ADDRESS`]. The firmware calls it after it has found memory, CPUs and devices; it does not
    /// return.
    pub rom: Vec<u8>,
}

impl Load {
    /// Prepares `vmlinux`, an ELF file, for a machine of `memory_bytes`, with an initrd of `initrd_bytes` at [`INITRD`].
    ///
    /// # Errors
    /// When something does not fit, or the kernel cannot be entered so.
    pub fn new(
        vmlinux: &[u8],
        command_line: &str,
        initrd_bytes: u64,
        memory_bytes: u64,
    ) -> Result<Self> {
        ensure!(
            command_line.len() < COMMAND_LINE_BYTES,
            "The kernel's parameters are {} bytes long, and at most {} are read: shorten --append.",
            command_line.len(),
            COMMAND_LINE_BYTES - 1
        );
        let memory_ends = memory_bytes.min(MEMORY_ENDS);
        ensure!(
            u64::from(INITRD) + initrd_bytes + ACPI_BYTES < memory_ends,
            "Memory is too little for the initrd: raise --memory-mib."
        );
        let (kernel, entry) = flatten(vmlinux).context("The kernel cannot be loaded.")?;
        ensure!(
            u64::from(kernel.address) + kernel.content.len() as u64 <= u64::from(INITRD),
            "The kernel is so large that it would overwrite its initrd."
        );
        let start_info = Piece {
            address: START_INFO,
            content: start_info(command_line, initrd_bytes, memory_ends),
        };
        Ok(Self {
            pieces: [kernel, start_info],
            rom: option_rom(entry),
        })
    }
}

/// The kernel as it lies in memory, and the address at which PVH enters it.
fn flatten(vmlinux: &[u8]) -> Result<(Piece, u32)> {
    let header = FileHeader64::<Endianness>::parse(vmlinux)?;
    let endian = header.endian()?;
    let segments = header.program_headers(endian, vmlinux)?;
    let loaded = || {
        segments
            .iter()
            .filter(|segment| segment.p_type(endian) == PT_LOAD)
    };
    let begin = loaded().map(|segment| segment.p_paddr(endian)).min();
    let begin = begin.context("It has nothing to load.")?;
    let end = loaded()
        .map(|segment| segment.p_paddr(endian) + segment.p_memsz(endian))
        .max()
        .unwrap_or(begin);
    ensure!(end <= u64::from(INITRD), "It ends at {end:#x}.");
    let mut content = vec![0; (end - begin) as usize];
    for segment in loaded() {
        let data = segment.data(endian, vmlinux);
        let data = data.map_err(|()| anyhow::anyhow!("It is cut off."))?;
        let offset = (segment.p_paddr(endian) - begin) as usize;
        content[offset..offset + data.len()].copy_from_slice(data);
    }
    let address = u32::try_from(begin)?;
    let mut entry = None;
    for segment in segments {
        let Some(mut notes) = segment.notes(endian, vmlinux)? else {
            continue;
        };
        while let Some(note) = notes.next()? {
            if note.name() == b"Xen" && note.n_type(endian) == NOTE_PHYS32_ENTRY {
                let bytes = note.desc().get(..4).context("A note is cut off.")?;
                entry = Some(u32::from_le_bytes(bytes.try_into()?));
            }
        }
    }
    let entry = entry.context("It was built without CONFIG_PVH.")?;
    Ok((Piece { address, content }, entry))
}

/// What the kernel reads at [`START_INFO`].
fn start_info(command_line: &str, initrd_bytes: u64, memory_ends: u64) -> Vec<u8> {
    // As Bochs' firmware has it.
    let map = [
        (0, 0x9_f000, USABLE),
        (0x9_f000, 0xa_0000, RESERVED),
        (0xe_8000, 0x10_0000, RESERVED),
        (0x10_0000, memory_ends - ACPI_BYTES, USABLE),
        (memory_ends - ACPI_BYTES, memory_ends, ACPI),
        (0xfffc_0000, 1 << 32, RESERVED),
    ];
    let map_address = START_INFO + MAP_OFFSET;
    let command_line_address = map_address + map.len() as u32 * MAP_ENTRY_BYTES;
    let mut bytes = Vec::new();
    let mut put = |words: &[u64], size: usize| {
        for word in words {
            bytes.extend_from_slice(&word.to_le_bytes()[..size]);
        }
    };
    // Version 1, no flags, one module.
    put(&[START_INFO_MAGIC.into(), 1, 0, 1], 4);
    let module = START_INFO + MODULE_OFFSET;
    // No address of ACPI's tables: the kernel looks where firmware leaves them.
    put(
        &[
            module.into(),
            command_line_address.into(),
            0,
            map_address.into(),
        ],
        8,
    );
    put(&[map.len() as u64, 0], 4);
    put(&[INITRD.into(), initrd_bytes, 0, 0], 8);
    for (begin, end, kind) in map {
        put(&[begin, end - begin], 8);
        put(&[kind.into(), 0], 4);
    }
    bytes.extend_from_slice(command_line.as_bytes());
    bytes.push(0);
    bytes
}

/// Enters the kernel at `entry` in flat 32-bit mode, with the address of what it is told in EBX.
fn option_rom(entry: u32) -> Vec<u8> {
    const SECTOR: usize = 512;
    const GDT: u16 = 0x40;
    const GDT_POINTER: u16 = 0x58;
    const CODE_32: u16 = 0x20;
    let word = |offset: u16| (ROM_ADDRESS + u32::from(offset)).to_le_bytes();
    let [pointer_low, pointer_high] = GDT_POINTER.to_le_bytes();
    let mut rom = vec![0; SECTOR];
    let mut put = |at: u16, bytes: &[u8]| {
        rom[usize::from(at)..usize::from(at) + bytes.len()].copy_from_slice(bytes);
    };
    // Signature, length in sectors; then the entry, in 16-bit mode.
    put(0, &[0x55, 0xaa, 1]);
    #[rustfmt::skip]
    put(3, &[
        0xfa,                                                       // cli
        0x2e, 0x66, 0x0f, 0x01, 0x16, pointer_low, pointer_high,    // lgdtl cs:pointer
        0x0f, 0x20, 0xc0,                                           // mov eax, cr0
        0x0c, 0x01,                                                 // or al, 1
        0x0f, 0x22, 0xc0,                                           // mov cr0, eax
        0x66, 0xea,                                                 // jmp 8:code
    ]);
    put(21, &word(CODE_32));
    put(25, &[8, 0]);
    #[rustfmt::skip]
    put(CODE_32, &[
        0xb8, 16, 0, 0, 0,                                          // mov eax, 16
        0x8e, 0xd8, 0x8e, 0xc0, 0x8e, 0xd0,                         // mov ds, es, ss, eax
        0xbb,                                                       // mov ebx, start_info
    ]);
    put(CODE_32 + 12, &START_INFO.to_le_bytes());
    put(CODE_32 + 16, &[0xb9]); // mov ecx, entry
    put(CODE_32 + 17, &entry.to_le_bytes());
    put(CODE_32 + 21, &[0xff, 0xe1]); // jmp ecx
    // Nothing, code and data of 4 GiB. They are marked as accessed: a ROM cannot be.
    put(GDT + 8, &0x00cf_9b00_0000_ffff_u64.to_le_bytes());
    put(GDT + 16, &0x00cf_9300_0000_ffff_u64.to_le_bytes());
    put(GDT_POINTER, &23u16.to_le_bytes());
    put(GDT_POINTER + 2, &word(GDT));
    // All bytes together must be 0.
    let sum = rom.iter().fold(0u8, |sum, &byte| sum.wrapping_add(byte));
    rom[SECTOR - 1] = sum.wrapping_neg();
    rom
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// An ELF file of one segment at 16 MiB, longer in memory than in the file, and a note.
    fn vmlinux(with_note: bool) -> Vec<u8> {
        let mut file = Vec::new();
        file.extend([0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        let mut put = |words: &[u64], size: usize| {
            for word in words {
                file.extend_from_slice(&word.to_le_bytes()[..size]);
            }
        };
        put(&[2, 62], 2);
        put(&[1], 4);
        put(&[0, 64, 0], 8);
        put(&[0], 4);
        put(&[64, 56, 2, 0, 0, 0], 2);
        // PT_LOAD: 4 bytes at offset 176, 8 in memory.
        put(&[1, 5], 4);
        put(&[176, 0xffff_ffff_8100_0000, 0x100_0000, 4, 8, 16], 8);
        // PT_NOTE: 20 bytes at offset 180.
        put(&[4, 4], 4);
        put(&[180, 0, 0, 20, 20, 4], 8);
        file.extend([1, 2, 3, 4]);
        let kind = if with_note { NOTE_PHYS32_ENTRY } else { 1 };
        for word in [4, 4, kind, u32::from_le_bytes(*b"Xen\0"), 0x100_0010] {
            file.extend_from_slice(&word.to_le_bytes());
        }
        file
    }

    fn load(command_line: &str, memory_bytes: u64) -> Result<Load> {
        Load::new(&vmlinux(true), command_line, 0x1234, memory_bytes)
    }

    fn word(bytes: &[u8], offset: usize) -> u64 {
        u64::from_le_bytes(bytes[offset..offset + 8].try_into().unwrap())
    }

    #[test]
    fn the_kernel_lies_in_memory_as_its_segments_say() {
        let [kernel, _] = load("", GIB).unwrap().pieces;
        assert_eq!(kernel.address, 0x100_0000);
        assert_eq!(kernel.content, [1, 2, 3, 4, 0, 0, 0, 0]);
    }

    #[test]
    fn the_kernel_is_told_where_everything_is() {
        let [_, info] = load("a=b", 2 * GIB).unwrap().pieces;
        let place = |address: u64| (address - u64::from(info.address)) as usize;
        let module = place(word(&info.content, 16));
        assert_eq!(word(&info.content, module), u64::from(INITRD));
        assert_eq!(word(&info.content, module + 8), 0x1234);
        let command_line = place(word(&info.content, 24));
        assert_eq!(&info.content[command_line..], b"a=b\0");
        let map = place(word(&info.content, 40));
        let usable = map + 3 * MAP_ENTRY_BYTES as usize;
        let end = word(&info.content, usable) + word(&info.content, usable + 8);
        assert_eq!(end, 2 * GIB - ACPI_BYTES);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let error = load(&"x".repeat(2048), GIB).unwrap_err();
        assert!(error.to_string().contains("--append"), "{error}");
        let error = load("", GIB / 4).unwrap_err();
        assert!(error.to_string().contains("--memory-mib"), "{error}");
        let error = Load::new(&vmlinux(false), "", 1, GIB).unwrap_err();
        assert!(format!("{error:#}").contains("CONFIG_PVH"), "{error:#}");
        assert!(Load::new(b"MZ", "", 1, GIB).is_err());
    }

    #[test]
    fn firmware_takes_the_rom_for_one() {
        let rom = load("", GIB).unwrap().rom;
        assert_eq!((rom.len(), &rom[..3]), (512, &[0x55, 0xaa, 1][..]));
        assert_eq!(rom.iter().fold(0u8, |sum, &byte| sum.wrapping_add(byte)), 0);
    }
}
