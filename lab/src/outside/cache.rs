// SPDX-License-Identifier: GPL-2.0-only
//! The user's cache folder: kernels, the image and apt lists that all clones share. Not for a run's own files, which
//! have no name in any file system (boot.rs).
//!
//! What is under its final name is complete: it is built in a work folder and renamed. All building happens under one
//! lock, so a work folder that is found when the lock was just taken belongs to a run that was killed, and goes.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

use super::tool::{Interrupted, interrupted, io_sentence};

/// How often a lock that another run holds is tried.
const LOCK_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// `${XDG_CACHE_HOME:-~/.cache}/cohort`.
#[derive(Debug, Clone)]
pub struct Cache {
    root: PathBuf,
}

impl Cache {
    /// Opens the cache, which is created if it does not exist.
    pub fn open() -> Result<Self> {
        let base = std::env::var_os("XDG_CACHE_HOME")
            .filter(|path| !path.is_empty())
            .map(PathBuf::from);
        let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
        let base = base.or_else(home).context(
            "There is no cache folder: neither XDG_CACHE_HOME nor HOME is set; set one of them to a folder with 3 GB \
             of free space.",
        )?;
        Self::at(base.join("cohort"))
    }

    /// Opens a cache in a given folder.
    pub fn at(root: PathBuf) -> Result<Self> {
        fs::create_dir_all(&root).map_err(|error| {
            io_sentence(
                &format!("The cache folder {} cannot be created", root.display()),
                &error,
            )
        })?;
        Ok(Self { root })
    }

    /// Where a finished entry is, or will be.
    pub fn path(&self, entry: impl AsRef<Path>) -> PathBuf {
        self.root.join(entry)
    }

    /// Waits for the right to build; the only way to get a work folder.
    pub fn lock(&self) -> Result<CacheLock> {
        let path = self.path("lock");
        let file = File::create(&path).map_err(|error| {
            io_sentence(
                &format!("The lock {} cannot be created", path.display()),
                &error,
            )
        })?;
        let mut told = false;
        while !try_lock(&file)? {
            if !told {
                eprintln!(
                    "lab: waiting for another run that fills the cache {}",
                    self.root.display()
                );
                told = true;
            }
            if interrupted() {
                bail!(Interrupted);
            }
            std::thread::sleep(LOCK_POLL_INTERVAL);
        }
        let lock = CacheLock {
            work_root: self.path("work"),
            _file: file,
        };
        lock.remove_leftovers()?;
        Ok(lock)
    }
}

fn try_lock(file: &File) -> Result<bool> {
    // SAFETY: plain system call on a descriptor that lives.
    if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(false),
        _ => Err(error).context("The lock of the cache folder cannot be taken."),
    }
}

/// Changes when `text`, of which a cache entry was made, does.
pub fn short_hash(text: &str) -> String {
    format!("{:x}", Sha256::digest(text))[..8].to_string()
}

/// What was recorded as `name` when the cache entry `entry` was built.
///
/// # Errors
/// When it cannot be read, with what to remove.
pub fn recorded(entry: &Path, name: &str) -> Result<String> {
    let file = entry.join(name);
    fs::read_to_string(&file).with_context(|| {
        format!(
            "{} cannot be read: remove {}.",
            file.display(),
            entry.display()
        )
    })
}

/// The right to build into the cache; given back when dropped, or by the kernel when the process dies.
#[derive(Debug)]
pub struct CacheLock {
    work_root: PathBuf,
    _file: File,
}

impl CacheLock {
    /// A new empty folder in the cache's file system.
    pub fn work_dir(&self, name: &str) -> Result<WorkDir> {
        let path = self.work_root.join(name);
        fs::create_dir_all(&path).map_err(|error| {
            io_sentence(
                &format!("The folder {} cannot be created", path.display()),
                &error,
            )
        })?;
        Ok(WorkDir { path })
    }

    fn remove_leftovers(&self) -> Result<()> {
        match fs::remove_dir_all(&self.work_root) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(error).with_context(|| {
                    format!(
                        "{} of a killed run cannot be removed.",
                        self.work_root.display()
                    )
                })
            }
            _ => Ok(()),
        }
    }
}

/// A folder that is removed when dropped unless it was published.
#[derive(Debug)]
pub struct WorkDir {
    path: PathBuf,
}

impl WorkDir {
    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Gives a file or folder of the work folder its final name, in the place of what had it.
    pub fn publish(&self, name: &str, destination: &Path) -> Result<()> {
        let parent = destination
            .parent()
            .context("A cache entry lies in a folder.")?;
        let result = fs::create_dir_all(parent)
            .and_then(|()| {
                if destination.is_dir() {
                    fs::remove_dir_all(destination)
                } else {
                    Ok(())
                }
            })
            .and_then(|()| fs::rename(self.path.join(name), destination));
        result.map_err(|error| {
            io_sentence(
                &format!("{} cannot be created", destination.display()),
                &error,
            )
        })
    }
}

impl Drop for WorkDir {
    fn drop(&mut self) {
        // What cannot be removed now is removed by the next run that takes the lock.
        let _ = fs::remove_dir_all(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_killed_run_left_goes_when_the_lock_is_taken() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path().join("cohort")).unwrap();
        fs::create_dir_all(cache.path("work/old/deep")).unwrap();
        let lock = cache.lock().unwrap();
        assert!(!cache.path("work").exists());
        let work = lock.work_dir("new").unwrap();
        fs::write(work.path().join("entry"), "content").unwrap();
        work.publish("entry", &cache.path("entries/one")).unwrap();
        drop(work);
        assert_eq!(
            fs::read_to_string(cache.path("entries/one")).unwrap(),
            "content"
        );
        assert!(!cache.path("work/new").exists());
    }

    #[test]
    fn the_lock_excludes_a_second_holder_until_it_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path().to_path_buf()).unwrap();
        let held = cache.lock().unwrap();
        assert!(!try_lock(&File::create(cache.path("lock")).unwrap()).unwrap());
        drop(held);
        assert!(try_lock(&File::create(cache.path("lock")).unwrap()).unwrap());
    }
}
