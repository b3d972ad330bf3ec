// SPDX-License-Identifier: GPL-2.0-only
//! Where the host's own files are, and its kernel's symbols.
//!
//! Whatever reads the host takes these, so that a test can show it a tree of
//! files instead.

use crate::host::symbols::Symbols;
use std::path::{Path, PathBuf};

/// The roots of the file systems that describe a host.
#[derive(Clone, Debug)]
pub struct Host {
    /// Settings of this host, `/etc`.
    pub etc: PathBuf,
    /// procfs, `/proc`.
    pub proc: PathBuf,
    /// sysfs, `/sys`.
    pub sys: PathBuf,
    /// Files that live until the next boot, `/run`.
    pub run: PathBuf,
    /// Who tells where the kernel has what it names.
    pub symbols: Symbols,
}

impl Host {
    /// The host that this program runs on.
    pub fn live() -> Self {
        Self::below(Path::new("/"))
    }

    /// A host whose `etc`, `proc`, `sys` and `run` are below `root`.
    pub fn below(root: &Path) -> Self {
        Self {
            etc: root.join("etc"),
            proc: root.join("proc"),
            sys: root.join("sys"),
            run: root.join("run"),
            symbols: Symbols::Kernel,
        }
    }

    /// Where the settings are unless an option says otherwise.
    pub fn settings_file(&self) -> PathBuf {
        self.etc.join("cohort.toml")
    }

    /// The folder for the files of a running `cohort`.
    pub fn state_folder(&self) -> PathBuf {
        self.run.join("cohort")
    }
}

#[cfg(test)]
pub(crate) mod fixture {
    //! Trees of files that stand for a host.

    use super::{Host, Symbols};
    use std::collections::HashMap;
    use std::fs;
    use tempfile::TempDir;

    /// A host made of files; it vanishes when dropped.
    pub(crate) struct Fixture {
        folder: TempDir,
        symbols: HashMap<&'static str, u64>,
    }

    impl Fixture {
        pub(crate) fn new() -> Self {
            let folder = tempfile::tempdir().expect("a temporary folder can be made");
            Self {
                folder,
                symbols: HashMap::new(),
            }
        }

        pub(crate) fn host(&self) -> Host {
            Host {
                symbols: Symbols::Listed(self.symbols.clone()),
                ..Host::below(self.folder.path())
            }
        }

        /// Its kernel has symbol `name` at `address`.
        pub(crate) fn with_symbol(mut self, name: &'static str, address: u64) -> Self {
            self.symbols.insert(name, address);
            self
        }

        /// Writes `text` to `path`, which is relative to the root.
        pub(crate) fn with(self, path: &str, text: impl AsRef<[u8]>) -> Self {
            let path = self.folder.path().join(path);
            let parent = path.parent().expect("the path has a folder");
            fs::create_dir_all(parent).expect("the folder can be made");
            fs::write(path, text).expect("the file can be written");
            self
        }

        /// Makes `path`, which is relative to the root, a link to `target`, which need not be there.
        pub(crate) fn with_link(self, path: &str, target: &str) -> Self {
            let path = self.folder.path().join(path);
            let parent = path.parent().expect("the path has a folder");
            fs::create_dir_all(parent).expect("the folder can be made");
            std::os::unix::fs::symlink(target, path).expect("the link can be made");
            self
        }
    }
}
