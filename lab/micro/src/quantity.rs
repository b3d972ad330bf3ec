// SPDX-License-Identifier: GPL-2.0-only
//! Amounts that are either a plain count (loop iterations, TSC ticks) or a time with a unit.
//!
//! A time becomes a count only when the rate of the machine is known, which a [`Quantity`] leaves to its user.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

const NS_PER_MS: u128 = 1_000_000;

/// A count, or a time that a rate turns into a count. Written `5000`, `250ns`, `100us`, `4ms` or `2s`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Quantity {
    /// Loop iterations or TSC ticks, whichever the place means.
    Count(u64),
    /// A time in nanoseconds.
    Nanoseconds(u64),
}

/// Why a text is not a [`Quantity`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuantityError {
    /// The text does not begin with a number.
    #[error(
        "`{0}` is not an amount: write a number (5000, 0x1000), or a time with a unit (250ns, 100us, 4ms, 2s)"
    )]
    NoNumber(String),
    /// What follows the number is not a unit of time.
    #[error("`{0}` has the unknown unit `{1}`: use ns, us, ms or s, or no unit for a plain count")]
    UnknownUnit(String, String),
    /// The amount does not fit into 64 bits.
    #[error("`{0}` is too large: at most 2^63 in nanoseconds or in counts")]
    TooLarge(String),
}

impl Quantity {
    /// The amount as a count, at `per_ms` counts per millisecond. A time is never rounded down to zero.
    pub fn to_count(self, per_ms: u64) -> u64 {
        match self {
            Self::Count(count) => count,
            Self::Nanoseconds(ns) => {
                let count = u128::from(ns) * u128::from(per_ms) / NS_PER_MS;
                u64::try_from(count).unwrap_or(u64::MAX).max(1)
            }
        }
    }

    /// Whether the amount is a time, so that a rate is needed.
    pub fn is_time(self) -> bool {
        matches!(self, Self::Nanoseconds(_))
    }

    /// Whether the amount is zero.
    pub fn is_zero(self) -> bool {
        matches!(self, Self::Count(0) | Self::Nanoseconds(0))
    }
}

impl FromStr for Quantity {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, QuantityError> {
        if let Some(digits) = text.strip_prefix("0x") {
            let count = u64::from_str_radix(digits, 16)
                .map_err(|_| QuantityError::NoNumber(text.into()))?;
            return within_range(text, Self::Count(count));
        }
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = text.split_at(digits);
        if number.is_empty() {
            return Err(QuantityError::NoNumber(text.into()));
        }
        let number: u64 = number
            .parse()
            .map_err(|_| QuantityError::TooLarge(text.into()))?;
        let ns_per_unit = match unit {
            "" => return within_range(text, Self::Count(number)),
            "ns" => 1,
            "us" => 1_000,
            "ms" => 1_000_000,
            "s" => 1_000_000_000,
            _ => return Err(QuantityError::UnknownUnit(text.into(), unit.into())),
        };
        let ns = number
            .checked_mul(ns_per_unit)
            .ok_or_else(|| QuantityError::TooLarge(text.into()))?;
        within_range(text, Self::Nanoseconds(ns))
    }
}

fn within_range(text: &str, quantity: Quantity) -> Result<Quantity, QuantityError> {
    match quantity {
        Quantity::Count(n) | Quantity::Nanoseconds(n) if n > 1 << 63 => {
            Err(QuantityError::TooLarge(text.into()))
        }
        _ => Ok(quantity),
    }
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Count(count) => write!(f, "{count}"),
            Self::Nanoseconds(ns) => write!(f, "{ns}ns"),
        }
    }
}

impl TryFrom<String> for Quantity {
    type Error = QuantityError;

    fn try_from(text: String) -> Result<Self, QuantityError> {
        text.parse()
    }
}

impl From<Quantity> for String {
    fn from(quantity: Quantity) -> Self {
        quantity.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_units_are_read() {
        assert_eq!("5000".parse(), Ok(Quantity::Count(5000)));
        assert_eq!("0x10".parse(), Ok(Quantity::Count(16)));
        assert_eq!("250ns".parse(), Ok(Quantity::Nanoseconds(250)));
        assert_eq!("100us".parse(), Ok(Quantity::Nanoseconds(100_000)));
        assert_eq!("4ms".parse(), Ok(Quantity::Nanoseconds(4_000_000)));
        assert_eq!("2s".parse(), Ok(Quantity::Nanoseconds(2_000_000_000)));
    }

    #[test]
    fn what_is_wrong_is_said() {
        assert!(matches!(
            "us".parse::<Quantity>(),
            Err(QuantityError::NoNumber(_))
        ));
        assert!(matches!(
            "-1".parse::<Quantity>(),
            Err(QuantityError::NoNumber(_))
        ));
        assert!(matches!(
            "0xzz".parse::<Quantity>(),
            Err(QuantityError::NoNumber(_))
        ));
        assert!(matches!(
            "7min".parse::<Quantity>(),
            Err(QuantityError::UnknownUnit(..))
        ));
        assert!(matches!(
            "99999999999999999999".parse::<Quantity>(),
            Err(QuantityError::TooLarge(_))
        ));
        assert!(matches!(
            "0xffffffffffffffff".parse::<Quantity>(),
            Err(QuantityError::TooLarge(_))
        ));
        assert!(matches!(
            "9999999999999s".parse::<Quantity>(),
            Err(QuantityError::TooLarge(_))
        ));
    }

    #[test]
    fn a_time_becomes_a_count_by_the_rate_and_never_zero() {
        assert_eq!(Quantity::Nanoseconds(100_000).to_count(3_000_000), 300_000);
        assert_eq!(Quantity::Nanoseconds(1).to_count(1), 1);
        assert_eq!(Quantity::Count(7).to_count(3_000_000), 7);
    }

    #[test]
    fn what_is_displayed_is_read_back() {
        for text in ["0", "17", "250ns"] {
            assert_eq!(text.parse::<Quantity>().unwrap().to_string(), text);
        }
    }
}
