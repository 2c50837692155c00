//! What the models are asked about: one device, its VMs, their streams.

use rtvirtio_spec::settings::{Scheduler, VmSettings};
use rtvirtio_spec::specification::Load;
use rtvirtio_units::{Bytes, BytesPerSecond};

/// What one task (or an undeclared background) issues.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Stream {
    /// Requests per second; `None`: as many as it can.
    pub iops: Option<f64>,
    /// Request size.
    pub block_size: Bytes,
    /// Fraction of reads, 0 to 1.
    pub read_fraction: f64,
    /// Requests in flight.
    pub depth: u32,
}

impl Stream {
    /// Request size that undeclared load is taken for; a cap on requests goes with it.
    pub const UNDECLARED_BLOCK: Bytes = Bytes::from_kib(128);

    /// What a VM that declares nothing is taken for: deep reads and deep writes.
    pub const UNDECLARED: [Self; 2] = [Self::deep(1.0), Self::deep(0.0)];

    const fn deep(read_fraction: f64) -> Self {
        Self { iops: None, block_size: Self::UNDECLARED_BLOCK, read_fraction, depth: 64 }
    }
}

impl From<Load> for Stream {
    fn from(load: Load) -> Self {
        Self {
            iops: load.iops.map(rtvirtio_units::Iops::get),
            block_size: load.block_size,
            read_fraction: load.read_fraction,
            depth: load.queue_depth,
        }
    }
}

/// One VM on the device.
#[derive(Debug, Clone, PartialEq)]
pub struct VmLoad {
    /// What it issues.
    pub streams: Vec<Stream>,
    /// How it is set.
    pub settings: VmSettings,
}

impl VmLoad {
    /// Bytes per second that it asks for; infinite if a stream has no rate.
    #[must_use]
    pub fn demand(&self) -> f64 {
        let bytes = |s: &Stream| s.iops.unwrap_or(f64::INFINITY) * s.block_size.get() as f64;
        self.streams.iter().map(bytes).sum()
    }

    /// The most that its limits let through, bytes per second, by its mix of
    /// reads and writes; `None` without a limit.
    #[must_use]
    pub fn cap(&self) -> Option<f64> {
        let limits = self.settings.limits;
        let block = self.streams.iter().map(|s| s.block_size.get()).max().unwrap_or(4096) as f64;
        let reads = self.streams.iter().map(|s| s.read_fraction).fold(0.0, f64::max);
        let writes = self.streams.iter().map(|s| 1.0 - s.read_fraction).fold(0.0, f64::max);
        let bps = |limit: Option<BytesPerSecond>| limit.map(|l| l.get() as f64);
        let iops = |limit: Option<u64>| limit.map(|l| l as f64 * block);
        let tightest = |a: Option<f64>, b: Option<f64>| match (a, b) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        let read = tightest(bps(limits.read_bps), iops(limits.read_iops));
        let write = tightest(bps(limits.write_bps), iops(limits.write_iops));
        let mixes = self.streams.iter().any(|s| s.read_fraction > 0.0 && s.read_fraction < 1.0);
        match (reads > 0.0, writes > 0.0) {
            (true, false) => read,
            (false, _) => write,
            // A stream that mixes stands still when either direction does; one of another mix then has what is left of
            // the other direction. Together they come to the mix, of all between theirs, that limits allow most of.
            (true, true) if mixes => {
                let fewest = self.streams.iter().map(|s| s.read_fraction).fold(1.0, f64::min);
                let most = match (read, write) {
                    (Some(read), Some(write)) => (read / (read + write)).max(0.0),
                    (Some(_), None) => 0.0,
                    (None, _) => 1.0,
                };
                let mix = most.clamp(fewest, reads);
                tightest(read.map(|r| r / mix), write.map(|w| w / (1.0 - mix)))
                    .filter(|cap| cap.is_finite())
            }
            // Readers and writers side by side each get their own.
            (true, true) => Some(read? + write?),
        }
    }
}

/// One device.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceLoad {
    /// Its scheduler.
    pub scheduler: Scheduler,
    /// The VMs that use it.
    pub vms: Vec<VmLoad>,
}

#[cfg(test)]
mod tests {
    use rtvirtio_spec::settings::Limits;

    use super::*;

    /// MB/s that limits let through of tasks that read such parts.
    fn cap(read_fractions: &[f64], limits: Limits) -> Option<f64> {
        let stream = |&read_fraction: &f64| Stream { read_fraction, ..Stream::UNDECLARED[0] };
        let streams = read_fractions.iter().map(stream).collect();
        let vm = VmLoad { streams, settings: VmSettings { limits, ..VmSettings::default() } };
        vm.cap().map(|bytes| (bytes / 1e6).round())
    }

    #[test]
    fn tasks_of_different_mixes_use_up_both_directions() {
        let both = Limits::bps(BytesPerSecond::from_megabytes(100));
        assert_eq!(cap(&[1.0], both), Some(100.0));
        assert_eq!(cap(&[1.0, 0.0], both), Some(200.0));
        // Reads end a mix of 70 % alone, at 100 / 0.7.
        assert_eq!(cap(&[0.7], both), Some(143.0));
        assert_eq!(cap(&[0.7, 0.7], both), Some(143.0));
        // A writer beside it has the writes that it leaves.
        assert_eq!(cap(&[0.7, 0.0], both), Some(200.0));
        // 60 % are the fewest reads that these come to: 100 / 0.6.
        assert_eq!(cap(&[0.7, 0.6], both), Some(167.0));
        // Nothing holds a writer back beside a limit of reads.
        let reads = Limits { write_bps: None, ..both };
        assert_eq!(cap(&[0.7, 0.0], reads), None);
        assert_eq!(cap(&[0.7, 0.5], reads), Some(200.0));
    }
}
