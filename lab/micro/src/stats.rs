// SPDX-License-Identifier: GPL-2.0-only
//! KVM's own statistics of a vCPU, through the file descriptor of KVM_GET_STATS_FD.
//!
//! Names are those of the host's kernel (`exits`, `halt_exits`, `irq_exits` …). Histograms are left out.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result, ensure};
use kvm_bindings::{
    KVM_STATS_TYPE_CUMULATIVE, KVM_STATS_TYPE_INSTANT, KVM_STATS_TYPE_MASK, KVM_STATS_TYPE_PEAK,
    kvm_stats_header,
};
use kvm_ioctls::VcpuFd;

/// `_IO(KVMIO, 0xce)` of linux/kvm.h.
const KVM_GET_STATS_FD: libc::Ioctl = 0xaece;
/// Bytes of `struct kvm_stats_desc` of linux/kvm.h before the name.
const DESCRIPTOR_BYTES: usize = 16;
const VALUE_BYTES: usize = 8;

/// The statistics of one vCPU, readable at any time.
pub struct VcpuStats {
    file: File,
}

impl VcpuStats {
    /// Opens the statistics of a vCPU.
    pub fn open(vcpu: &VcpuFd) -> Result<Self> {
        // SAFETY: this ioctl takes no argument and returns a new file descriptor or an error.
        let fd = unsafe { libc::ioctl(vcpu.as_raw_fd(), KVM_GET_STATS_FD) };
        if fd < 0 {
            return Err(std::io::Error::last_os_error())
                .context("this KVM has no binary statistics (Linux 5.14 and later do): leave out --count-exits");
        }
        // SAFETY: the descriptor was just made and belongs to nobody else.
        Ok(Self {
            file: unsafe { File::from_raw_fd(fd) },
        })
    }

    /// Adds the scalar statistics to `sums`, by name.
    pub fn add_to(&self, sums: &mut BTreeMap<String, u64>) -> Result<()> {
        let header = Header::read(&self.file).context("KVM's statistics cannot be read")?;
        for index in 0..header.descriptors {
            let (name, value) = header
                .statistic(&self.file, index)
                .context("KVM's statistics cannot be read")?;
            if let Some(value) = value {
                *sums.entry(name).or_default() += value;
            }
        }
        Ok(())
    }
}

/// What of `struct kvm_stats_header` is needed.
struct Header {
    name_bytes: usize,
    descriptors: usize,
    descriptors_offset: u64,
    data_offset: u64,
}

impl Header {
    fn read(file: &File) -> Result<Self> {
        let mut bytes = [0; size_of::<kvm_stats_header>()];
        file.read_exact_at(&mut bytes, 0)?;
        let field = |index: usize| u32_at(&bytes, 4 * index);
        Ok(Self {
            name_bytes: field(1) as usize,
            descriptors: field(2) as usize,
            descriptors_offset: field(4).into(),
            data_offset: field(5).into(),
        })
    }

    /// Name and value of one statistic; no value if it is a histogram.
    fn statistic(&self, file: &File, index: usize) -> Result<(String, Option<u64>)> {
        let mut bytes = vec![0; DESCRIPTOR_BYTES + self.name_bytes];
        let offset = self.descriptors_offset + (index * bytes.len()) as u64;
        file.read_exact_at(&mut bytes, offset)?;
        let name = bytes[DESCRIPTOR_BYTES..]
            .split(|byte| *byte == 0)
            .next()
            .unwrap_or_default();
        let name = String::from_utf8_lossy(name).into_owned();
        ensure!(!name.is_empty(), "statistic {index} has no name");
        let kind = u32_at(&bytes, 0) & KVM_STATS_TYPE_MASK;
        if ![
            KVM_STATS_TYPE_CUMULATIVE,
            KVM_STATS_TYPE_INSTANT,
            KVM_STATS_TYPE_PEAK,
        ]
        .contains(&kind)
        {
            return Ok((name, None));
        }
        let mut value = [0; VALUE_BYTES];
        file.read_exact_at(&mut value, self.data_offset + u64::from(u32_at(&bytes, 8)))?;
        Ok((name, Some(u64::from_ne_bytes(value))))
    }
}

fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[offset..offset + 4]);
    u32::from_ne_bytes(word)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn scalars_are_summed_by_name_and_histograms_are_left_out() {
        let mut file = tempfile::tempfile().unwrap();
        let name_bytes = 8u32;
        let header = [0, name_bytes, 2, 24, 24, 24 + 2 * 24];
        let descriptor = |kind: u32, offset: u32, name: &[u8; 8]| {
            let mut bytes = [kind, 1 << 16, offset, 0].map(u32::to_ne_bytes).concat();
            bytes.extend_from_slice(name);
            bytes
        };
        file.write_all(&header.map(u32::to_ne_bytes).concat())
            .unwrap();
        file.write_all(&descriptor(KVM_STATS_TYPE_CUMULATIVE, 0, b"exits\0\0\0"))
            .unwrap();
        file.write_all(&descriptor(
            kvm_bindings::KVM_STATS_TYPE_LOG_HIST,
            8,
            b"hist\0\0\0\0",
        ))
        .unwrap();
        file.write_all(&[41u64, 9].map(u64::to_ne_bytes).concat())
            .unwrap();
        let mut sums = BTreeMap::from([("exits".to_string(), 1)]);
        VcpuStats { file }.add_to(&mut sums).unwrap();
        assert_eq!(sums, BTreeMap::from([("exits".to_string(), 42)]));
    }
}
