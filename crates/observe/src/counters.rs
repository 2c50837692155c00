//! A disk's rates and latencies where QEMU serves the guest's requests.
//!
//! QEMU has one latency histogram for each device, which whoever sets it first has: one that
//! somebody else has set is read and left alone. Ours is told by its boundaries: one that another
//! rtvirtio has set, or a killed one has left, is counted from where it is, and set again should it
//! vanish. Where a libvirt domain's XML asks for a histogram, libvirt tells what it counted, and
//! QEMU's monitor is not asked.

use std::collections::BTreeSet;
use std::time::Instant;

use rtvirtio_host::qemu::{BlockStatistics, LatencyHistograms, Monitor, QemuError, libvirt};
use rtvirtio_spec::latency::Histogram;
use rtvirtio_units::Nanos;

use crate::vms::{ANSWER, Disk, LibvirtDisk, is_late};

/// Boundaries of the bins that we set: from 10 µs to 100 s, each 10 % above the last.
const FIRST_BOUNDARY: f64 = 1e-5;
const GROWTH: f64 = 1.1;
const BOUNDARIES: u32 = 170;

/// Boundaries of the bins, `others` among them, so that what is above one of these is counted
/// exactly.
#[must_use]
pub fn boundaries(others: impl IntoIterator<Item = Nanos>) -> Vec<Nanos> {
    let bins =
        (0..BOUNDARIES).map(|i| Nanos::from_secs_f64(FIRST_BOUNDARY * GROWTH.powi(i as i32)));
    let all: BTreeSet<Nanos> = bins.chain(others).collect();
    all.into_iter().collect()
}

/// What a disk did between two looks.
#[derive(Debug, Clone, Default)]
pub struct Interval {
    /// Seconds.
    pub seconds: f64,
    /// Reads completed.
    pub reads: u64,
    /// Writes completed.
    pub writes: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub write_bytes: u64,
    /// Time that reads and writes took together.
    pub busy: Nanos,
    /// Latencies of reads and writes, each at the upper end of QEMU's bin.
    pub histogram: Histogram,
    /// The same latencies, each at the lower end of its bin.
    pub starts: Histogram,
}

impl Interval {
    /// Requests completed.
    #[must_use]
    pub const fn requests(&self) -> u64 {
        // Counts are those that another program tells.
        self.reads.saturating_add(self.writes)
    }

    /// Bytes read and written.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.read_bytes.saturating_add(self.write_bytes)
    }

    /// Requests whose whole bin is above `latency`.
    #[must_use]
    pub fn above(&self, latency: Nanos) -> u64 {
        let above = self.starts.bins().filter(|(start, _)| *start >= latency);
        above.fold(0_u64, |sum, (_, count)| sum.saturating_add(count))
    }

    /// Adds a later interval.
    pub fn merge(&mut self, later: &Self) {
        self.seconds += later.seconds;
        self.reads = self.reads.saturating_add(later.reads);
        self.writes = self.writes.saturating_add(later.writes);
        self.read_bytes = self.read_bytes.saturating_add(later.read_bytes);
        self.write_bytes = self.write_bytes.saturating_add(later.write_bytes);
        self.busy = Nanos::new(self.busy.get().saturating_add(later.busy.get()));
        self.histogram.merge(&later.histogram);
    }
}

/// A disk that QEMU counts.
#[derive(Debug)]
pub struct DiskCounter {
    qom_path: String,
    /// Set if libvirt tells what was counted.
    libvirt: Option<LibvirtDisk>,
    /// Whether the histogram is ours, to be removed.
    is_ours: bool,
    boundaries: Vec<Nanos>,
    seen: BlockStatistics,
    at: Instant,
}

impl DiskCounter {
    /// Has QEMU count the latencies of `disk` unless it does already. `targets` are to be among
    /// the boundaries of a histogram that is set here. `None`: the guest has no such device.
    ///
    /// # Errors
    /// The monitor does not answer, or QEMU refuses.
    pub fn start(
        monitor: &mut Monitor,
        disk: &Disk,
        targets: &BTreeSet<Nanos>,
    ) -> Result<Option<Self>, QemuError> {
        let Some(qom_path) = disk.qom_path.clone() else { return Ok(None) };
        let at = Instant::now();
        let boundaries = boundaries(targets.iter().copied());
        if let Some(own) = &disk.libvirt
            // A libvirt that does not tell leaves it to QEMU.
            && let Ok(Some(seen)) = libvirt::block_statistics(&own.domain, &own.target, ANSWER)
            && !has(&seen.latencies, &self::boundaries([]))
        {
            let libvirt = disk.libvirt.clone();
            return Ok(Some(Self { qom_path, libvirt, is_ours: false, boundaries, seen, at }));
        }
        let there = monitor.block_statistics(&qom_path, ANSWER)?;
        let is_none = there.latencies.read.is_none() && there.latencies.write.is_none();
        let is_ours = is_none || has(&there.latencies, &self::boundaries([]));
        let is_enough = !is_ours || has(&there.latencies, &boundaries);
        let mut counter = Self { qom_path, libvirt: None, is_ours, boundaries, seen: there, at };
        if !is_enough {
            counter.set(monitor)?;
        }
        Ok(Some(counter))
    }

    /// What is counted now.
    fn read(&self, monitor: &mut Monitor) -> Result<BlockStatistics, QemuError> {
        let told = match &self.libvirt {
            Some(own) => libvirt::block_statistics(&own.domain, &own.target, ANSWER)?,
            None => None,
        };
        // The domain's XML may have been changed meanwhile.
        told.map_or_else(|| monitor.block_statistics(&self.qom_path, ANSWER), Ok)
    }

    /// Sets the histogram; counts begin at zero.
    fn set(&mut self, monitor: &mut Monitor) -> Result<(), QemuError> {
        monitor.set_latency_histogram(&self.qom_path, &self.boundaries, ANSWER)?;
        self.seen.latencies = LatencyHistograms::default();
        Ok(())
    }

    /// What the disk did since the last look.
    ///
    /// # Errors
    /// The monitor does not answer.
    pub fn sample(&mut self, monitor: &mut Monitor) -> Result<Interval, QemuError> {
        let now_seen = self.read(monitor)?;
        let now = Instant::now();
        let interval = between(&self.seen, &now_seen, (now - self.at).as_secs_f64());
        (self.seen, self.at) = (now_seen, now);
        // Another rtvirtio that counted here has ended, and taken the histogram away.
        if self.is_ours && self.seen.latencies.read.is_none() && self.seen.latencies.write.is_none()
        {
            self.set(monitor)?;
        }
        Ok(interval)
    }

    /// Ends what a killed rtvirtio counts at the device at `qom_path`.
    pub fn clear(monitor: &mut Monitor, qom_path: &str) {
        let there = monitor.block_statistics(qom_path, ANSWER);
        if there.is_ok_and(|there| has(&there.latencies, &boundaries([]))) {
            let _ = monitor.set_latency_histogram(qom_path, &[], ANSWER);
        }
    }

    /// Ends the counting, if it is ours.
    fn stop(&self, monitor: &mut Monitor) -> Result<(), QemuError> {
        match self.is_ours {
            true => monitor.set_latency_histogram(&self.qom_path, &[], ANSWER),
            false => Ok(()),
        }
    }
}

/// Ends the counting of a VM's disks, where it is ours. A monitor that is late is not asked about the
/// others.
pub fn stop<'a>(counters: impl IntoIterator<Item = &'a DiskCounter>, monitor: &mut Monitor) {
    for counter in counters {
        if counter.stop(monitor).is_err_and(|error| is_late(&error)) {
            return;
        }
    }
}

/// Whether a histogram is there that has these boundaries, among others.
fn has(there: &LatencyHistograms, wanted: &[Nanos]) -> bool {
    there.read.as_ref().or(there.write.as_ref()).is_some_and(|found| {
        let found: BTreeSet<Nanos> = found.boundaries.iter().copied().collect();
        wanted.iter().all(|boundary| found.contains(boundary))
    })
}

fn between(before: &BlockStatistics, now: &BlockStatistics, seconds: f64) -> Interval {
    let (mut histogram, mut starts) = (Histogram::new(), Histogram::new());
    let pairs = [
        (&before.latencies.read, &now.latencies.read),
        (&before.latencies.write, &now.latencies.write),
    ];
    for (before, now) in pairs {
        let Some(now) = now else { continue };
        // Of another histogram than that of before, all is new.
        let before = before.as_ref().filter(|before| before.boundaries == now.boundaries);
        let boundary = |i: usize| now.boundaries.get(i).copied();
        for (i, n) in now.bins.iter().enumerate() {
            let old = before.and_then(|before| before.bins.get(i)).copied().unwrap_or(0);
            // Counts that fell: somebody began anew.
            let count = n.checked_sub(old).unwrap_or(*n);
            let start = i.checked_sub(1).and_then(boundary).unwrap_or_default();
            starts.record(start, count);
            // The last bin has no end: its start stands for it.
            histogram.record(boundary(i).unwrap_or(start), count);
        }
    }
    let busy = |s: &BlockStatistics| s.read_time_ns.saturating_add(s.write_time_ns);
    Interval {
        seconds,
        reads: now.reads.saturating_sub(before.reads),
        writes: now.writes.saturating_sub(before.writes),
        read_bytes: now.read_bytes.saturating_sub(before.read_bytes),
        write_bytes: now.write_bytes.saturating_sub(before.write_bytes),
        busy: Nanos::new(busy(now).saturating_sub(busy(before))),
        histogram,
        starts,
    }
}

#[cfg(test)]
mod tests {
    use rtvirtio_host::qemu;

    use super::*;

    fn statistics(reads: u64, bins: Option<[u64; 4]>) -> BlockStatistics {
        let ms = Nanos::from_millis;
        let histogram = bins.map(|bins| qemu::Histogram {
            boundaries: vec![ms(1), ms(5), ms(20)],
            bins: bins.to_vec(),
        });
        BlockStatistics {
            reads,
            latencies: LatencyHistograms { read: histogram, ..Default::default() },
            ..Default::default()
        }
    }

    #[test]
    fn requests_above_a_boundary_are_counted_exactly() {
        let interval = between(
            &statistics(10, Some([5, 5, 0, 0])),
            &statistics(125, Some([105, 15, 4, 1])),
            2.0,
        );
        let ms = Nanos::from_millis;
        assert_eq!((interval.requests(), interval.histogram.count()), (115, 115));
        assert_eq!((interval.above(ms(5)), interval.above(ms(20))), (5, 1));
    }

    #[test]
    fn reads_and_writes_are_counted_by_the_bins_of_each() {
        let ms = Nanos::from_millis;
        let mut now = statistics(3, Some([0, 0, 3, 0]));
        now.latencies.write = Some(qemu::Histogram { boundaries: vec![ms(2)], bins: vec![4, 1] });
        let interval = between(&statistics(0, None), &now, 1.0);
        assert_eq!(interval.histogram.bins().collect::<Vec<_>>(), [(ms(2), 5), (ms(20), 3)]);
        assert_eq!([2, 5, 20].map(|at| interval.above(ms(at))), [4, 3, 0]);
    }

    #[test]
    fn histogram_that_somebody_began_anew_counts_from_there() {
        let interval =
            between(&statistics(10, Some([9, 1, 0, 0])), &statistics(12, Some([2, 0, 0, 0])), 1.0);
        assert_eq!(interval.histogram.count(), 2);
        let interval = between(&statistics(10, None), &statistics(12, Some([2, 0, 0, 0])), 1.0);
        assert_eq!(interval.histogram.count(), 2);
    }

    #[test]
    fn counts_that_a_vm_makes_up_stay_the_largest_that_there_are() {
        let all = u64::MAX;
        let mut sum = Interval {
            reads: all,
            writes: 1,
            read_bytes: all,
            write_bytes: 1,
            ..Interval::default()
        };
        sum.merge(&sum.clone());
        assert_eq!((sum.requests(), sum.bytes()), (all, all));
    }

    #[test]
    fn targets_are_boundaries() {
        let targets = [Nanos::from_micros(12_345), Nanos::from_micros(777)];
        let all = boundaries(targets);
        assert!(targets.iter().all(|t| all.contains(t)) && all.is_sorted());
        assert_eq!(all.len(), 172);
    }
}
