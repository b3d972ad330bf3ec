// SPDX-License-Identifier: GPL-2.0-only
//! What systemd is told about a running `cohort`. Without systemd nothing is said.

use sd_notify::NotifyState;

/// It does now what it was started for.
pub fn ready(status: &str) {
    notify(&[NotifyState::Ready, NotifyState::Status(status)]);
}

/// Something changed that `systemctl status` should show.
pub fn status(status: &str) {
    notify(&[NotifyState::Status(status)]);
}

/// Whether anybody listens.
pub fn listens() -> bool {
    std::env::var_os("NOTIFY_SOCKET").is_some()
}

/// Cohort is giving the host back.
pub fn stopping() {
    notify(&[NotifyState::Stopping]);
}

fn notify(states: &[NotifyState]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!("systemd cannot be notified: {error}");
    }
}
