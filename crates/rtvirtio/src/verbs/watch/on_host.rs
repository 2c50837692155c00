//! Disks' latencies in the host's block layer, while VMs come and go.

use std::collections::BTreeMap;
use std::time::Instant;

use rtvirtio_host::{BlockTrace, Extent, Host};
use rtvirtio_units::{DiskName, VmName};

use super::History;
use super::sources::{Extents, Sample};

/// A trace of the extents that were asked for last.
pub(super) struct OnHost {
    host: Host,
    asked: Extents,
    /// What is measured, and whose it is.
    owners: BTreeMap<Extent, (VmName, DiskName)>,
    trace: Option<BlockTrace>,
    /// When it was last asked.
    at: Instant,
    lost: u64,
    /// It was said that nothing can be measured.
    is_said: bool,
}

impl OnHost {
    pub(super) fn new(host: Host) -> Self {
        Self {
            host,
            asked: Extents::new(),
            owners: BTreeMap::new(),
            trace: None,
            at: Instant::now(),
            lost: 0,
            is_said: false,
        }
    }

    /// Records lost since the start.
    pub(super) const fn lost(&self) -> u64 {
        self.lost
    }

    /// Measures `extents` from now on. Requests under way at a change are not measured.
    pub(super) fn follow(&mut self, extents: &Extents, events: &mut Vec<String>) {
        if *extents != self.asked {
            self.asked.clone_from(extents);
            self.owners = owners(extents, events);
            self.start(events);
        }
    }

    fn start(&mut self, events: &mut Vec<String>) {
        self.trace = None;
        if self.owners.is_empty() {
            return;
        }
        self.at = Instant::now();
        match self.host.trace_block(&self.owners.keys().copied().collect()) {
            Ok(trace) => self.trace = Some(trace),
            Err(error) if !self.is_said => {
                self.is_said = true;
                let hint = error.hint().map(|h| format!(" ({h})")).unwrap_or_default();
                let error = anyhow::Error::from(error);
                events.push(format!("nothing is measured on the host: {error:#}{hint}"));
            }
            Err(_) => {}
        }
    }

    /// Adds to `disks` what each did since the last look.
    pub(super) fn take(
        &mut self,
        disks: &mut BTreeMap<(VmName, DiskName), History>,
        now: Instant,
        events: &mut Vec<String>,
    ) {
        let Some(trace) = &self.trace else { return };
        let mut seen = match trace.take() {
            Ok(seen) => seen,
            Err(error) => {
                events.push(format!("{error}; another is started"));
                return self.start(events);
            }
        };
        let seconds = (now - self.at).as_secs_f64();
        self.at = now;
        for (extent, owner) in &self.owners {
            let histogram = seen.of.remove(extent).unwrap_or_default();
            let sample = Sample { histogram, misses: 0, seconds };
            disks.entry(owner.clone()).or_default().add(now, sample);
        }
        if seen.lost > 0 {
            self.lost += seen.lost;
            events.push(format!(
                "{} records of the host's block layer were lost: its latencies lack as many \
                 requests or fewer",
                seen.lost
            ));
        }
    }
}

/// Whose each extent is; two that share a sector are nobody's, which is said.
fn owners(extents: &Extents, events: &mut Vec<String>) -> BTreeMap<Extent, (VmName, DiskName)> {
    let mut owners = BTreeMap::new();
    for (owner, extent) in extents {
        let shared = extents.iter().find(|(other, e)| *other != owner && e.overlaps(extent));
        match shared {
            None => drop(owners.insert(*extent, owner.clone())),
            Some(((other_vm, other_disk), _)) => events.push(format!(
                "{}/{}: not measured on the host: it shares sectors with {other_vm}/{other_disk}",
                owner.0, owner.1
            )),
        }
    }
    owners
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rtvirtio_host::fake::FakeSysfs;
    use rtvirtio_host::qemu::Part;
    use rtvirtio_host::sysfs::DeviceNumber;
    use rtvirtio_units::Bytes;

    use super::*;

    const MIB: u64 = 1 << 20;

    /// A disk of 1 GiB and no tracepoints.
    fn host() -> Host {
        let sysfs = FakeSysfs::v1();
        sysfs.add_disk("sda", DeviceNumber::new(8, 0), 1 << 21);
        sysfs.put("/sys/kernel/tracing/events/header_page", "");
        Host::with_sysfs("/nonexistent", Arc::new(sysfs))
    }

    /// VMs with their disks' first MiB and length in MiB.
    fn extents(disks: &[(&str, u64, u64)]) -> Extents {
        let extent = |offset: u64, size: u64| {
            let (offset, size) = (Bytes::new(offset * MIB), Some(Bytes::new(size * MIB)));
            host().extent(&Part { file: "/dev/sda".into(), offset, size }).unwrap()
        };
        let key = |vm: &str| (VmName::new(vm).unwrap(), DiskName::new("root").unwrap());
        disks.iter().map(|(vm, offset, size)| (key(vm), extent(*offset, *size))).collect()
    }

    #[test]
    fn disks_that_share_a_sector_are_nobodys_and_said_so() {
        let mut events = Vec::new();
        let all = extents(&[("a", 0, 10), ("b", 10, 10), ("c", 19, 10), ("d", 40, 1)]);
        let owners = owners(&all, &mut events);
        let names: Vec<String> = owners.values().map(|(vm, _)| vm.to_string()).collect();
        assert_eq!(names, ["a", "d"]);
        assert_eq!(events.len(), 2);
        assert!(events[0].starts_with("b/root: not measured on the host"), "{events:?}");
        assert!(events[0].ends_with("shares sectors with c/root"), "{events:?}");
    }

    #[test]
    fn missing_tracepoints_are_said_once() {
        let mut on_host = OnHost::new(host());
        let (mut events, mut disks) = (Vec::new(), BTreeMap::new());
        on_host.follow(&Extents::new(), &mut events);
        assert!(events.is_empty());
        for disks in [&[("a", 0, 1)][..], &[("a", 0, 1), ("b", 1, 1)]] {
            on_host.follow(&extents(disks), &mut events);
        }
        assert_eq!(events.len(), 1, "{events:?}");
        assert!(
            events[0].starts_with("nothing is measured on the host: cannot read"),
            "{events:?}"
        );
        on_host.take(&mut disks, Instant::now(), &mut events);
        assert!(disks.is_empty() && events.len() == 1);
    }
}
