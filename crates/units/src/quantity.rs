//! Quantities with a unit.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Why a number is not a quantity of its type.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum QuantityError {
    /// The number is outside the type's range.
    #[error("{value} is outside {low}..={high} for {what}")]
    OutOfRange {
        /// The quantity's name.
        what: &'static str,
        /// What was given.
        value: f64,
        /// Smallest allowed.
        low: f64,
        /// Largest allowed.
        high: f64,
    },
}

fn ranged(what: &'static str, value: f64, low: f64, high: f64) -> Result<f64, QuantityError> {
    // NaN fails the comparison, as it must.
    if value >= low && value <= high {
        Ok(value)
    } else {
        Err(QuantityError::OutOfRange { what, value, low, high })
    }
}

/// A length of time in nanoseconds (0 to about 584 years).
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(inline))]
#[serde(transparent)]
pub struct Nanos(u64);

impl Nanos {
    /// Zero.
    pub const ZERO: Self = Self(0);

    /// From nanoseconds.
    #[must_use]
    pub const fn new(ns: u64) -> Self {
        Self(ns)
    }

    /// From whole microseconds; saturates.
    #[must_use]
    pub const fn from_micros(us: u64) -> Self {
        Self(us.saturating_mul(1_000))
    }

    /// From whole milliseconds; saturates.
    #[must_use]
    pub const fn from_millis(ms: u64) -> Self {
        Self(ms.saturating_mul(1_000_000))
    }

    /// From seconds; negative and NaN become zero, large values saturate.
    #[must_use]
    pub fn from_secs_f64(seconds: f64) -> Self {
        Self((seconds * 1e9).round() as u64)
    }

    /// Nanoseconds.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Milliseconds, for display and models.
    #[must_use]
    pub fn as_millis_f64(self) -> f64 {
        self.0 as f64 / 1e6
    }

    /// Seconds, for models.
    #[must_use]
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e9
    }

    /// Sum; saturates.
    #[must_use]
    pub const fn saturating_add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }

    /// Difference; zero if `other` is larger.
    #[must_use]
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// Product with a factor; negative and NaN become zero, large values saturate.
    #[must_use]
    pub fn scale(self, factor: f64) -> Self {
        Self((self.0 as f64 * factor).round() as u64)
    }
}

impl From<Duration> for Nanos {
    fn from(d: Duration) -> Self {
        Self(u64::try_from(d.as_nanos()).unwrap_or(u64::MAX))
    }
}

impl From<Nanos> for Duration {
    fn from(n: Nanos) -> Self {
        Self::from_nanos(n.0)
    }
}

impl fmt::Display for Nanos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self.0 {
            ns if ns >= 10_000_000_000 => format!("{:.1} s", ns as f64 / 1e9),
            ns if ns >= 100_000 => format!("{:.2} ms", ns as f64 / 1e6),
            ns => format!("{:.1} µs", ns as f64 / 1e3),
        };
        f.pad(&text)
    }
}

/// A number of bytes.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(inline))]
#[serde(transparent)]
pub struct Bytes(u64);

impl Bytes {
    /// From bytes.
    #[must_use]
    pub const fn new(bytes: u64) -> Self {
        Self(bytes)
    }

    /// From KiB; saturates.
    #[must_use]
    pub const fn from_kib(kib: u64) -> Self {
        Self(kib.saturating_mul(1024))
    }

    /// Bytes.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const KIB: u64 = 1 << 10;
        const MIB: u64 = 1 << 20;
        const GIB: u64 = 1 << 30;
        let text = match self.0 {
            b if b >= GIB && b.is_multiple_of(GIB) => format!("{} GiB", b / GIB),
            b if b >= MIB && b.is_multiple_of(MIB) => format!("{} MiB", b / MIB),
            b if b >= KIB && b.is_multiple_of(KIB) => format!("{} KiB", b / KIB),
            b => format!("{b} B"),
        };
        f.pad(&text)
    }
}

/// A transfer rate in bytes per second; 1 MB/s is 10^6 bytes per second.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(inline))]
#[serde(transparent)]
pub struct BytesPerSecond(u64);

impl BytesPerSecond {
    /// From bytes per second.
    #[must_use]
    pub const fn new(bytes_per_second: u64) -> Self {
        Self(bytes_per_second)
    }

    /// From MB/s (10^6 bytes per second); saturates.
    #[must_use]
    pub const fn from_megabytes(mb: u64) -> Self {
        Self(mb.saturating_mul(1_000_000))
    }

    /// Bytes per second.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// MB/s (10^6 bytes per second).
    #[must_use]
    pub fn as_megabytes_f64(self) -> f64 {
        self.0 as f64 / 1e6
    }
}

impl fmt::Display for BytesPerSecond {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{:.1} MB/s", self.as_megabytes_f64()))
    }
}

macro_rules! checked_f64 {
    ($(#[$doc:meta])* $type:ident, $what:literal, $low:expr, $high:expr) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Serialize, Deserialize)]
        #[serde(try_from = "f64", into = "f64")]
        pub struct $type(f64);

        impl $type {
            /// The largest.
            pub const MAX: Self = Self($high);

            /// Checks the range that the type documents; NaN is refused.
            ///
            /// # Errors
            /// [`QuantityError::OutOfRange`].
            pub fn new(value: f64) -> Result<Self, QuantityError> {
                ranged($what, value, $low, $high).map(Self)
            }

            /// The number.
            #[must_use]
            pub const fn get(self) -> f64 {
                self.0
            }
        }

        impl TryFrom<f64> for $type {
            type Error = QuantityError;
            fn try_from(value: f64) -> Result<Self, QuantityError> {
                Self::new(value)
            }
        }

        impl From<$type> for f64 {
            fn from(value: $type) -> f64 {
                value.0
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&format!("{}", self.0))
            }
        }
    };
}

checked_f64! {
    /// Requests per second, 0.001 to 10^8.
    Iops, "iops", 0.001, 1e8
}
checked_f64! {
    /// A percentile of a latency distribution, 50 to 99.9999.
    Percentile, "percentile", 50.0, 99.9999
}
checked_f64! {
    /// The probability with which a bound is meant to hold, 0.5 to 0.999.
    Confidence, "confidence", 0.5, 0.999
}

impl Percentile {
    /// The fraction of samples below the percentile, 0.5 to 0.999999.
    #[must_use]
    pub fn fraction(self) -> f64 {
        self.0 / 100.0
    }
}

/// A cgroup weight for bfq, 1 to 1000, default 100 (kernel `block/bfq-iosched.h`,
/// `BFQ_MIN_WEIGHT`, `BFQ_MAX_WEIGHT`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct Weight(u16);

impl Weight {
    /// Of a VM without a target in a plan: a hundredth of the most urgent one's.
    pub const BACKGROUND: Self = Self(10);
    /// What a new cgroup has: 100.
    pub const DEFAULT: Self = Self(100);
    /// The largest: 1000.
    pub const MAX: Self = Self(1000);

    /// Checks 1 to 1000.
    ///
    /// # Errors
    /// [`QuantityError::OutOfRange`].
    pub fn new(value: u32) -> Result<Self, QuantityError> {
        ranged("weight", f64::from(value), 1.0, 1000.0).map(|_| Self(value as u16))
    }

    /// The number.
    #[must_use]
    pub const fn get(self) -> u16 {
        self.0
    }
}

impl Default for Weight {
    fn default() -> Self {
        Self::DEFAULT
    }
}

impl TryFrom<u32> for Weight {
    type Error = QuantityError;
    fn try_from(value: u32) -> Result<Self, QuantityError> {
        Self::new(value)
    }
}

impl From<Weight> for u32 {
    fn from(w: Weight) -> u32 {
        u32::from(w.0)
    }
}

impl fmt::Display for Weight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantity_nan_is_refused() {
        assert!(Iops::new(f64::NAN).is_err());
        assert!(Percentile::new(f64::NAN).is_err());
    }

    #[test]
    fn weight_outside_kernel_range_is_refused() {
        assert!(Weight::new(0).is_err());
        assert!(Weight::new(1001).is_err());
        assert_eq!(Weight::new(1000).unwrap(), Weight::MAX);
    }

    #[test]
    fn nanos_display_picks_a_readable_unit() {
        assert_eq!(Nanos::from_millis(20).to_string(), "20.00 ms");
        assert_eq!(Nanos::from_micros(8).to_string(), "8.0 µs");
    }

    #[test]
    fn nanos_from_negative_seconds_is_zero() {
        assert_eq!(Nanos::from_secs_f64(-1.0), Nanos::ZERO);
    }

    #[test]
    fn bytes_display_uses_binary_units_when_exact() {
        assert_eq!(Bytes::from_kib(128).to_string(), "128 KiB");
        assert_eq!(Bytes::new(1000).to_string(), "1000 B");
    }
}
