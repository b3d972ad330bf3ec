// SPDX-License-Identifier: GPL-2.0-only
//! Waiting for something that another process or the kernel does.

use anyhow::{Result, bail};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// How often it is looked at.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Waits until `done` returns a value; `what` completes the sentence "… did not happen within …".
///
/// # Errors
/// What `done` returns, or a sentence when `timeout` is over.
pub fn wait_for<T>(
    what: &str,
    timeout: Duration,
    mut done: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let start = Instant::now();
    loop {
        if let Some(value) = done()? {
            return Ok(value);
        }
        if start.elapsed() > timeout {
            bail!(
                "{what} did not happen within {:.1} s",
                timeout.as_secs_f64()
            );
        }
        sleep(POLL_INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_ends_with_the_value_the_error_or_the_timeout() {
        assert_eq!(
            wait_for("x", Duration::from_secs(1), || Ok(Some(7))).expect("it is there"),
            7
        );
        let error = wait_for::<()>("x", Duration::from_secs(1), || bail!("broken"))
            .expect_err("it is broken");
        assert_eq!(error.to_string(), "broken");
        let error = wait_for::<()>("The end", Duration::from_millis(10), || Ok(None))
            .expect_err("it never comes");
        assert!(
            error.to_string().starts_with("The end did not happen"),
            "{error}"
        );
    }
}
