//! One factor that makes the evaluation fit a machine that is too slow for it.

use std::fmt;

use rtvirtio_spec::specification::Load;
use rtvirtio_units::{BytesPerSecond, Iops, Nanos};

/// How many times slower than written the evaluation runs, 1 to 100.
///
/// It divides rates, the device's capacity and the hand setting's cap, and multiplies service
/// times and targets: utilisation and the ratio of tail to target stay as they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scale(u32);

impl Scale {
    /// As written.
    pub const ONE: Self = Self(1);

    /// `slower` is brought into 1 to 100.
    #[must_use]
    pub const fn new(slower: u32) -> Self {
        match slower {
            0 => Self(1),
            1..=100 => Self(slower),
            _ => Self(100),
        }
    }

    /// The factor.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// A target or service time.
    #[must_use]
    pub fn time(self, time: Nanos) -> Nanos {
        time.scale(f64::from(self.0))
    }

    /// A throughput.
    #[must_use]
    pub const fn throughput(self, throughput: BytesPerSecond) -> BytesPerSecond {
        BytesPerSecond::new(throughput.get() / self.0 as u64)
    }

    /// A load with its rate, if it has one; the least rate there is gets no slower.
    #[must_use]
    pub fn load(self, load: Load) -> Load {
        let slower = |iops: Iops| Iops::new(iops.get() / f64::from(self.0)).unwrap_or(iops);
        Load { iops: load.iops.map(slower), ..load }
    }
}

impl fmt::Display for Scale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
