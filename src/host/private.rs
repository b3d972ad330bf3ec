// SPDX-License-Identifier: GPL-2.0-only
//! Files, folders and sockets below `/run` whose owner and mode do not depend on the umask. Who may read or write them is
//! said by whoever makes them.
//!
//! All of them are made for their owner alone and opened to others afterwards, if at all: a mode that is corrected
//! afterwards would let others in for a moment, and who has a file open keeps it.

use anyhow::{Context, Result, ensure};
use nix::sys::stat::{Mode, umask};
use nix::unistd::{Gid, geteuid};
use std::fs::{self, DirBuilder, File, Metadata, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, lchown};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// Makes something for the owner alone, where the mode cannot be given, as with a socket's address.
pub fn narrowly<T>(make: impl FnOnce() -> T) -> T {
    /// The umask is the process's: two that change it at the same time would restore each other's.
    static TURN: Mutex<()> = Mutex::new(());

    struct Restore(Mode);
    impl Drop for Restore {
        fn drop(&mut self) {
            umask(self.0);
        }
    }

    // Whoever panicked has restored it.
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    // What other threads make meanwhile has fewer permissions, never more.
    let _restore = Restore(umask(Mode::S_IRWXG | Mode::S_IRWXO));
    make()
}

/// A folder of Cohort's own, for its owner alone. One that is there is narrowed.
pub fn own_folder(path: &Path) -> Result<()> {
    make_folder(path)?;
    // By its descriptor, which cannot become another folder in between.
    let folder = File::options()
        .read(true)
        .custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW)
        .open(path)
        .with_context(|| format!("{} is no folder, or a link to one", path.display()))?;
    check_owner(path, &folder.metadata()?)?;
    set_mode(&folder, path, 0o700)
}

/// A folder that others use too, and everybody may look into. Only one that is made here gets a mode.
///
/// # Errors
/// When others may write to it: they could put something else in the place of what is made there.
pub fn shared_folder(path: &Path) -> Result<()> {
    if make_folder(path)? {
        return fs::set_permissions(path, Permissions::from_mode(0o755))
            .with_context(|| format!("{} cannot be opened to others", path.display()));
    }
    let folder = fs::symlink_metadata(path)
        .with_context(|| format!("{} cannot be looked at", path.display()))?;
    ensure!(
        folder.is_dir(),
        "{} is no folder; remove it",
        path.display()
    );
    check_owner(path, &folder)?;
    ensure!(
        folder.mode() & 0o022 == 0,
        "others than its owner may write to {}; correct that: chmod go-w {0}",
        path.display()
    );
    Ok(())
}

/// A file for its owner alone, opened for reading and writing. One that is there keeps what it says, and is narrowed.
///
/// Without permission to open it nobody can lock it either.
pub fn file(path: &Path) -> Result<File> {
    let open = || {
        File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(path)
    };
    let file = narrowly(open).with_context(|| format!("{} cannot be opened", path.display()))?;
    let metadata = file.metadata()?;
    ensure!(
        metadata.is_file(),
        "{} is no file; remove it",
        path.display()
    );
    check_owner(path, &metadata)?;
    set_mode(&file, path, 0o600)?;
    Ok(file)
}

/// Says who may connect to a socket that was made [`narrowly`]: its owner, and the members of `group`.
pub fn open_socket_to(path: &Path, group: Option<Gid>) -> Result<()> {
    let set_mode = |mode| {
        fs::set_permissions(path, Permissions::from_mode(mode))
            .with_context(|| format!("the mode of {} cannot be set", path.display()))
    };
    set_mode(0o600)?;
    if let Some(group) = group {
        // The group first: with the mode first the one that it had could connect.
        lchown(path, None, Some(group.as_raw()))
            .with_context(|| format!("{} cannot be given to group {group}", path.display()))?;
        set_mode(0o660)?;
    }
    Ok(())
}

/// Returns whether it was not there before.
fn make_folder(path: &Path) -> Result<bool> {
    let made = narrowly(|| {
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        DirBuilder::new().mode(0o700).create(path)
    });
    match made {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(error).with_context(|| {
            format!(
                "the folder {} cannot be made; check that /run is writable",
                path.display()
            )
        }),
    }
}

/// Whoever owns a file may change its mode and what it says.
fn check_owner(path: &Path, metadata: &Metadata) -> Result<()> {
    ensure!(
        metadata.uid() == geteuid().as_raw(),
        "{} belongs to user {}, not to the one who runs Cohort; remove it",
        path.display(),
        metadata.uid()
    );
    Ok(())
}

fn set_mode(file: &File, path: &Path, mode: u32) -> Result<()> {
    file.set_permissions(Permissions::from_mode(mode))
        .with_context(|| format!("the mode of {} cannot be set", path.display()))
}

#[cfg(test)]
pub(crate) mod another_user {
    //! What somebody else on this host can do.

    use nix::sched::{CloneFlags, unshare};
    use nix::sys::stat::{Mode, umask};
    use nix::unistd::geteuid;
    use std::thread;

    /// Does `work` as a user that owns nothing and is in this group only. Says so and does nothing unless tests run as
    /// root.
    pub(crate) fn does<T: Send>(group: u32, work: impl FnOnce() -> T + Send) -> Option<T> {
        const NOBODY: u32 = 65534;
        if !geteuid().is_root() {
            eprintln!("skipped: only root can try as another user");
            return None;
        }
        let change = move || {
            // SAFETY: these calls take numbers only. The C library would change all threads; the calls themselves
            // change the one that makes them, which ends after the work.
            let results = unsafe {
                [
                    libc::syscall(libc::SYS_setgroups, 0, 0),
                    libc::syscall(libc::SYS_setresgid, group, group, group),
                    libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY),
                ]
            };
            assert_eq!(results, [0; 3]);
            work()
        };
        Some(thread::scope(|scope| {
            scope.spawn(change).join().expect("no panic")
        }))
    }

    /// Does `work` with this umask, which no other thread has.
    pub(crate) fn with_umask<T: Send>(mask: u32, work: impl FnOnce() -> T + Send) -> T {
        let work = move || {
            unshare(CloneFlags::CLONE_FS).expect("a thread may have a umask of its own");
            umask(Mode::from_bits_truncate(mask));
            work()
        };
        thread::scope(|scope| scope.spawn(work).join().expect("no panic"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use another_user::with_umask;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    fn mode(path: &Path) -> u32 {
        let metadata = fs::symlink_metadata(path).expect("it is there");
        metadata.mode() & 0o7777
    }

    #[test]
    fn modes_are_the_same_whatever_the_umask_is() {
        for mask in [0, 0o022, 0o777] {
            let root = tempfile::tempdir().expect("a temporary folder can be made");
            let path = |name: &str| root.path().join(name);
            with_umask(mask, || {
                own_folder(&path("own")).expect("it can be made");
                shared_folder(&path("shared")).expect("it can be made");
                file(&path("file")).expect("it can be made");
                let _socket = narrowly(|| UnixListener::bind(path("socket")).expect("it binds"));
                assert_eq!(
                    mode(&path("socket")),
                    0o700,
                    "before it is opened to anybody"
                );
                open_socket_to(&path("socket"), None).expect("it is ours");
            });
            let modes = ["own", "shared", "file", "socket"].map(|name| mode(&path(name)));
            assert_eq!(modes, [0o700, 0o755, 0o600, 0o600], "umask {mask:o}");
        }
    }

    #[test]
    fn what_is_there_already_is_narrowed_and_keeps_what_it_says() {
        let root = tempfile::tempdir().expect("a temporary folder can be made");
        let (folder, text) = (root.path().join("own"), root.path().join("own/file"));
        fs::create_dir(&folder).expect("it can be made");
        fs::write(&text, "text").expect("it can be written");
        for path in [&folder, &text] {
            fs::set_permissions(path, Permissions::from_mode(0o777)).expect("it is ours");
        }
        own_folder(&folder).expect("it is ours");
        file(&text).expect("it is ours");
        assert_eq!((mode(&folder), mode(&text)), (0o700, 0o600));
        assert_eq!(fs::read_to_string(&text).expect("it is ours"), "text");
    }

    #[test]
    fn what_others_could_have_put_there_is_refused() {
        let root = tempfile::tempdir().expect("a temporary folder can be made");
        let path = |name: &str| root.path().join(name);
        symlink("elsewhere", path("link")).expect("it can be made");
        assert!(own_folder(&path("link")).is_err());
        assert!(shared_folder(&path("link")).is_err());
        assert!(file(&path("link")).is_err());
        assert!(!path("elsewhere").exists(), "the link was followed");

        fs::create_dir(path("wide")).expect("it can be made");
        fs::set_permissions(path("wide"), Permissions::from_mode(0o775)).expect("it is ours");
        let error = shared_folder(&path("wide")).expect_err("others may write to it");
        assert!(error.to_string().contains("chmod go-w"), "{error}");
        assert!(file(&path("wide")).is_err(), "it is a folder");
    }

    #[test]
    fn what_belongs_to_somebody_else_is_refused() {
        if !geteuid().is_root() {
            eprintln!("skipped: only root can give files away");
            return;
        }
        let root = tempfile::tempdir().expect("a temporary folder can be made");
        let (folder, text) = (root.path().join("folder"), root.path().join("file"));
        fs::create_dir(&folder).expect("it can be made");
        fs::write(&text, "text").expect("it can be written");
        for path in [&folder, &text] {
            lchown(path, Some(65534), None).expect("root may");
        }
        for result in [
            own_folder(&folder),
            shared_folder(&folder),
            file(&text).map(drop),
        ] {
            let error = result.expect_err("it is somebody else's");
            assert!(
                error.to_string().contains("belongs to user 65534"),
                "{error}"
            );
        }
    }
}
