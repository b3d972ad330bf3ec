// SPDX-License-Identifier: GPL-2.0-only
//! The receiving end of systemd's notification protocol: whether a program has said that it is ready.
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;

use anyhow::{Context, Result};
use tempfile::TempDir;

/// The receiving end.
#[derive(Debug)]
pub struct Notifications {
    directory: TempDir,
    socket: UnixDatagram,
}

impl Notifications {
    /// Makes the socket.
    ///
    /// # Errors
    /// When there is no room for it.
    pub fn new() -> Result<Self> {
        let directory = tempfile::tempdir().context("No directory for the notification socket")?;
        let socket = UnixDatagram::bind(directory.path().join("notify"))
            .context("No notification socket")?;
        socket.set_nonblocking(true)?;
        Ok(Self { directory, socket })
    }

    /// What NOTIFY_SOCKET must say.
    pub fn path(&self) -> PathBuf {
        self.directory.path().join("notify")
    }

    /// Whether READY=1 is among the messages that arrived since the last call.
    pub fn ready(&self) -> bool {
        let mut message = [0; 4096];
        let mut ready = false;
        while let Ok(length) = self.socket.recv(&mut message) {
            ready |= message[..length]
                .split(|byte| *byte == b'\n')
                .any(|line| line == b"READY=1");
        }
        ready
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_is_seen_among_other_messages() {
        let notifications = Notifications::new().expect("there is room");
        let sender = UnixDatagram::unbound().expect("there are sockets");
        assert!(!notifications.ready());
        sender
            .send_to(b"STATUS=loading\nX=READY=1", notifications.path())
            .expect("it arrives");
        assert!(!notifications.ready());
        sender
            .send_to(b"STATUS=running\nREADY=1\n", notifications.path())
            .expect("it arrives");
        assert!(notifications.ready());
    }
}
