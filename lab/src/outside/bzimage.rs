// SPDX-License-Identifier: GPL-2.0-only
//! Takes vmlinux out of a bzImage as Debian ships it: to look at its BTF, and to boot it without unpacking, which takes an
//! emulator 20 s. Not a loader.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use super::tool::{self, io_sentence};

// Offsets in the boot sector and setup header; Documentation/arch/x86/boot.rst, "The Real-Mode Kernel Header".
const SETUP_SECTS: usize = 0x1f1;
const HEADER_MAGIC: usize = 0x202;
const PAYLOAD_OFFSET: usize = 0x248;
const PAYLOAD_LENGTH: usize = 0x24c;
const SECTOR_BYTES: usize = 512;

/// The kernel's build appends the unpacked size to the packed payload (scripts/Makefile.lib, `size_append`).
const SIZE_SUFFIX_BYTES: usize = 4;

/// Writes the ELF file vmlinux that `vmlinuz` holds to `vmlinux`; `work` is a folder for a temporary file.
pub fn extract_vmlinux(vmlinuz: &Path, work: &Path, vmlinux: &Path) -> Result<()> {
    let image =
        fs::read(vmlinuz).with_context(|| format!("{} cannot be read.", vmlinuz.display()))?;
    let payload =
        payload(&image).with_context(|| format!("{} holds no kernel.", vmlinuz.display()))?;
    let packed = work.join("payload");
    fs::write(&packed, payload)
        .map_err(|error| io_sentence(&format!("{} cannot be written", packed.display()), &error))?;
    let unpacked = tool::run(
        Command::new(unpacker(payload)?).arg("-dc").arg(&packed),
        &format!("unpack the kernel in {}", vmlinuz.display()),
    )?;
    fs::write(vmlinux, unpacked)
        .map_err(|error| io_sentence(&format!("{} cannot be written", vmlinux.display()), &error))
}

/// The packed ELF file inside the image, without the size that follows it.
fn payload(image: &[u8]) -> Result<&[u8]> {
    let magic = image.get(HEADER_MAGIC..HEADER_MAGIC + 4);
    ensure!(magic == Some(b"HdrS"), "It has no bzImage header.");
    let word = |offset: usize| -> Result<usize> {
        let bytes = image
            .get(offset..offset + 4)
            .context("Its header is cut off.")?;
        Ok(u32::from_le_bytes(bytes.try_into()?) as usize)
    };
    let sectors = match image[SETUP_SECTS] {
        0 => 4, // "for backwards compatibility, if the setup_sects field contains 0, the real value is 4"
        sectors => usize::from(sectors),
    };
    let start = (sectors + 1) * SECTOR_BYTES + word(PAYLOAD_OFFSET)?;
    let length = word(PAYLOAD_LENGTH)?
        .checked_sub(SIZE_SUFFIX_BYTES)
        .context("Its payload is empty.")?;
    image
        .get(start..start + length)
        .context("Its payload is cut off.")
}

/// The tool that unpacks a payload, by its first bytes.
fn unpacker(payload: &[u8]) -> Result<&'static str> {
    const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];
    const XZ: &[u8] = &[0xfd, b'7', b'z', b'X', b'Z', 0];
    if payload.starts_with(ZSTD) {
        Ok("zstd")
    } else if payload.starts_with(XZ) {
        Ok("xz")
    } else {
        bail!(
            "The kernel is packed in a way that the lab does not know; zstd and xz are what Debian uses."
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(payload: &[u8]) -> Vec<u8> {
        let mut image = vec![0; 3 * SECTOR_BYTES];
        image[SETUP_SECTS] = 1;
        image[HEADER_MAGIC..HEADER_MAGIC + 4].copy_from_slice(b"HdrS");
        image[PAYLOAD_OFFSET..PAYLOAD_OFFSET + 4].copy_from_slice(&16u32.to_le_bytes());
        image[PAYLOAD_LENGTH..PAYLOAD_LENGTH + 4]
            .copy_from_slice(&(payload.len() as u32 + 4).to_le_bytes());
        let start = 2 * SECTOR_BYTES + 16;
        image[start..start + payload.len()].copy_from_slice(payload);
        image
    }

    #[test]
    fn the_payload_is_found_behind_the_setup_sectors_without_its_size() {
        assert_eq!(
            payload(&image(b"\x28\xb5\x2f\xfdrest")).unwrap(),
            b"\x28\xb5\x2f\xfdrest"
        );
        assert_eq!(unpacker(b"\x28\xb5\x2f\xfdrest").unwrap(), "zstd");
    }

    #[test]
    fn what_is_no_kernel_is_refused() {
        assert!(payload(b"MZ").is_err());
        let mut cut_off = image(b"payload");
        cut_off.truncate(2 * SECTOR_BYTES + 18);
        assert!(payload(&cut_off).is_err());
        assert!(unpacker(b"\x1f\x8b").is_err());
    }
}
