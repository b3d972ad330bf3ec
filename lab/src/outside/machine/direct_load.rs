// SPDX-License-Identifier: GPL-2.0-only
//! Puts a Linux kernel into the memory of a machine whose firmware has no loader for it: pieces of memory, and an option
//! ROM that jumps into them when the firmware has set up everything else. Saves a boot medium, a boot loader and the time
//! both take. The protocol is Documentation/arch/x86/boot.rst of the kernel.

use anyhow::{Result, ensure};

/// Where the kernel's real-mode part is put. That, its heap and its stack fit below the command line.
const REAL_MODE: u64 = 0x9_0000;
/// Offset in the real-mode segment at which heap and stack end.
const HEAP_END: u16 = 0xe000;
/// Where the command line is put; the firmware starts other CPUs at 0x9f000.
const COMMAND_LINE: u64 = 0x9_e000;
/// Longest command line with its final zero: what the kernel reads.
const COMMAND_LINE_BYTES: usize = 2048;
/// Where the protected-mode part is put, as bootloaders do.
const PROTECTED_MODE: u64 = 0x10_0000;
/// Where the initrd is put: behind what the kernel takes to unpack itself.
const INITRD: u64 = 0x1000_0000;
/// Where the option ROM is put; the firmware looks from 0xc8000 to 0xe0000.
pub const ROM_ADDRESS: u64 = 0xd_0000;

const SECTOR: usize = 512;
// Offsets in the real-mode part ("The Real-Mode Kernel Header").
const SETUP_SECTS: usize = 0x1f1;
const HEADER_MAGIC: usize = 0x202;
const TYPE_OF_LOADER: usize = 0x210;
const LOADFLAGS: usize = 0x211;
const RAMDISK_IMAGE: usize = 0x218;
const RAMDISK_SIZE: usize = 0x21c;
const HEAP_END_PTR: usize = 0x224;
const CMD_LINE_PTR: usize = 0x228;
const INIT_SIZE: usize = 0x260;
const CAN_USE_HEAP: u8 = 0x80;
const UNDEFINED_LOADER: u8 = 0xff;
/// Where the kernel unpacks itself to if it is free to choose (CONFIG_PHYSICAL_START).
const PREFERRED_ADDRESS: u64 = 0x100_0000;

/// Bytes that are to be at an address when the machine is switched on.
#[derive(Debug)]
pub struct Piece {
    /// The physical address.
    pub address: u64,
    /// What is there.
    pub content: Vec<u8>,
}

/// The kernel, ready to be entered; the initrd, of `initrd_bytes`, goes to the address that is returned.
pub fn pieces(vmlinuz: &[u8], command_line: &str, initrd_bytes: u64) -> Result<([Piece; 3], u64)> {
    let magic = vmlinuz.get(HEADER_MAGIC..HEADER_MAGIC + 4);
    ensure!(
        magic == Some(b"HdrS") && vmlinuz.len() > INIT_SIZE + 4,
        "The kernel has no bzImage header."
    );
    ensure!(
        command_line.len() < COMMAND_LINE_BYTES,
        "The kernel's parameters are {} bytes long, and at most {} are read: shorten --append.",
        command_line.len(),
        COMMAND_LINE_BYTES - 1
    );
    let sectors = match vmlinuz[SETUP_SECTS] {
        0 => 4, // what 0 stands for in old kernels
        sectors => usize::from(sectors),
    };
    let setup_bytes = (sectors + 1) * SECTOR;
    ensure!(
        setup_bytes < usize::from(HEAP_END) && setup_bytes < vmlinuz.len(),
        "The kernel's real-mode part of {setup_bytes} bytes does not fit."
    );
    let (setup, kernel) = vmlinuz.split_at(setup_bytes);
    let mut setup = setup.to_vec();
    let init_size = u32::from_le_bytes(setup[INIT_SIZE..INIT_SIZE + 4].try_into()?);
    ensure!(
        PREFERRED_ADDRESS + u64::from(init_size) <= INITRD,
        "The kernel unpacks to {init_size} bytes and would overwrite its initrd."
    );
    let mut put = |offset: usize, bytes: &[u8]| {
        setup[offset..offset + bytes.len()].copy_from_slice(bytes);
    };
    put(TYPE_OF_LOADER, &[UNDEFINED_LOADER]);
    put(RAMDISK_IMAGE, &(INITRD as u32).to_le_bytes());
    put(RAMDISK_SIZE, &u32::try_from(initrd_bytes)?.to_le_bytes());
    // The protocol counts it from the end of the boot sector.
    put(HEAP_END_PTR, &(HEAP_END - 0x200).to_le_bytes());
    put(CMD_LINE_PTR, &(COMMAND_LINE as u32).to_le_bytes());
    setup[LOADFLAGS] |= CAN_USE_HEAP;
    let mut command_line = command_line.as_bytes().to_vec();
    command_line.push(0);
    let piece = |address, content| Piece { address, content };
    let pieces = [
        piece(REAL_MODE, setup),
        piece(COMMAND_LINE, command_line),
        piece(PROTECTED_MODE, kernel.to_vec()),
    ];
    Ok((pieces, INITRD))
}

/// The option ROM. The firmware calls it after it has found memory, CPUs and devices; it does not return.
pub fn option_rom() -> Vec<u8> {
    let [segment_low, segment_high] = ((REAL_MODE >> 4) as u16).to_le_bytes();
    let [entry_low, entry_high] = ((REAL_MODE >> 4) as u16 + 0x20).to_le_bytes();
    let [stack_low, stack_high] = HEAP_END.to_le_bytes();
    #[rustfmt::skip]
    let mut rom = vec![
        0x55, 0xaa, 1,                                // signature, length in sectors; then the entry
        0xfa,                                         // cli
        0xb8, segment_low, segment_high,              // mov ax, segment
        0x8e, 0xd8,                                   // mov ds, ax
        0x8e, 0xc0,                                   // mov es, ax
        0x8e, 0xe0,                                   // mov fs, ax
        0x8e, 0xe8,                                   // mov gs, ax
        0x8e, 0xd0,                                   // mov ss, ax
        0xbc, stack_low, stack_high,                  // mov sp, stack
        0xea, 0, 0, entry_low, entry_high,            // jmp entry:0
    ];
    rom.resize(SECTOR, 0);
    let sum = rom.iter().fold(0u8, |sum, &byte| sum.wrapping_add(byte));
    // All bytes together must be 0.
    rom[SECTOR - 1] = sum.wrapping_neg();
    rom
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vmlinuz() -> Vec<u8> {
        let mut image = vec![0; 3 * SECTOR];
        image[SETUP_SECTS] = 1;
        image[HEADER_MAGIC..HEADER_MAGIC + 4].copy_from_slice(b"HdrS");
        image[INIT_SIZE..INIT_SIZE + 4].copy_from_slice(&0x20_0000u32.to_le_bytes());
        image[2 * SECTOR..].fill(7);
        image
    }

    fn word(bytes: &[u8], offset: usize) -> u32 {
        u32::from_le_bytes(bytes[offset..offset + 4].try_into().unwrap())
    }

    #[test]
    fn the_kernel_is_told_where_everything_is() {
        let ([setup, command_line, kernel], initrd) = pieces(&vmlinuz(), "a=b", 0x1234).unwrap();
        assert_eq!(setup.content.len(), 2 * SECTOR);
        assert_eq!(u64::from(word(&setup.content, RAMDISK_IMAGE)), initrd);
        assert_eq!(word(&setup.content, RAMDISK_SIZE), 0x1234);
        assert_eq!(
            u64::from(word(&setup.content, CMD_LINE_PTR)),
            command_line.address
        );
        assert_eq!(setup.content[LOADFLAGS] & CAN_USE_HEAP, CAN_USE_HEAP);
        assert_eq!(command_line.content, b"a=b\0");
        assert_eq!(kernel.content, [7; SECTOR]);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let error = pieces(&vmlinuz(), &"x".repeat(2048), 1).unwrap_err();
        assert!(error.to_string().contains("--append"), "{error}");
        let mut large = vmlinuz();
        large[INIT_SIZE..INIT_SIZE + 4].copy_from_slice(&0x1000_0000u32.to_le_bytes());
        assert!(pieces(&large, "", 1).is_err());
        assert!(pieces(b"MZ", "", 1).is_err());
    }

    #[test]
    fn firmware_takes_the_rom_for_one() {
        let rom = option_rom();
        assert_eq!((rom.len(), &rom[..3]), (SECTOR, &[0x55, 0xaa, 1][..]));
        assert_eq!(rom.iter().fold(0u8, |sum, &byte| sum.wrapping_add(byte)), 0);
    }
}
