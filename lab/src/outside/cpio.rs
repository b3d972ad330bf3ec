// SPDX-License-Identifier: GPL-2.0-only
//! Writes initrds: archives of folders and files, all owned by root. Not a general cpio; the format is the
//! crate's work.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write};
use std::path::Path;

use anyhow::{Context, Result};
use cpio::newc::{Builder, trailer};

const FOLDER: u32 = 0o040_755;
const FILE: u32 = 0o100_000;

/// An archive that is being written; [`Archive::finish`] completes it.
#[derive(Debug)]
pub struct Archive<W: Write> {
    out: W,
    folders: BTreeSet<String>,
    next_inode: u32,
}

impl<W: Write> Archive<W> {
    /// An empty archive.
    pub fn new(out: W) -> Self {
        Self {
            out,
            folders: BTreeSet::new(),
            next_inode: 1,
        }
    }

    /// Adds a folder and those above it; what is there already is not added again.
    pub fn folder(&mut self, name: &str) -> io::Result<()> {
        let name = name.trim_matches('/');
        if name.is_empty() || self.folders.contains(name) {
            return Ok(());
        }
        if let Some((parent, _)) = name.rsplit_once('/') {
            self.folder(parent)?;
        }
        self.folders.insert(name.to_string());
        self.entry(name, FOLDER, &[])
    }

    /// Adds a file with the permissions `mode`, and the folders above it.
    pub fn file(&mut self, name: &str, mode: u32, content: &[u8]) -> io::Result<()> {
        self.parent(name)?;
        self.entry(
            name.trim_start_matches('/'),
            FILE | (mode & 0o7777),
            content,
        )
    }

    /// Adds a file of this machine.
    pub fn copy(&mut self, name: &str, mode: u32, from: &Path) -> Result<()> {
        let content =
            fs::read(from).with_context(|| format!("{} cannot be read.", from.display()))?;
        self.file(name, mode, &content)
            .with_context(|| format!("{} cannot be packed.", from.display()))
    }

    /// Ends the archive.
    pub fn finish(self) -> io::Result<W> {
        let mut out = trailer(self.out)?;
        out.flush()?;
        Ok(out)
    }

    fn parent(&mut self, name: &str) -> io::Result<()> {
        name.trim_start_matches('/')
            .rsplit_once('/')
            .map_or(Ok(()), |(parent, _)| self.folder(parent))
    }

    fn entry(&mut self, name: &str, mode: u32, content: &[u8]) -> io::Result<()> {
        let length = u32::try_from(content.len())
            .map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
        let header = Builder::new(name).ino(self.next_inode).mode(mode).nlink(1);
        self.next_inode += 1;
        let mut writer = header.write(&mut self.out, length);
        writer.write_all(content)?;
        writer.finish().map(drop)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use cpio::newc::Reader;

    use super::*;

    /// Name, mode and content of each entry.
    fn entries(bytes: &[u8]) -> Vec<(String, u32, String)> {
        let mut rest = bytes;
        let mut found = Vec::new();
        loop {
            let mut reader = Reader::new(rest).unwrap();
            let entry = reader.entry();
            if entry.is_trailer() {
                return found;
            }
            let (name, mode) = (entry.name().to_string(), entry.mode());
            let mut content = String::new();
            reader.read_to_string(&mut content).unwrap();
            found.push((name, mode, content));
            rest = reader.finish().unwrap();
        }
    }

    #[test]
    fn folders_come_once_and_before_what_is_in_them() {
        let mut archive = Archive::new(Vec::new());
        archive.file("/deep/er/file", 0o755, b"hello").unwrap();
        archive.file("deep/empty", 0o600, b"").unwrap();
        let expected = [
            ("deep", FOLDER, ""),
            ("deep/er", FOLDER, ""),
            ("deep/er/file", 0o100_755, "hello"),
            ("deep/empty", 0o100_600, ""),
        ];
        let expected = expected.map(|(name, mode, content)| (name.into(), mode, content.into()));
        assert_eq!(entries(&archive.finish().unwrap()), expected);
    }
}
