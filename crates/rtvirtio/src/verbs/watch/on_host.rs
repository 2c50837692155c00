//! Disks' latencies in the host's block layer, while VMs come and go.

use std::collections::BTreeMap;
use std::time::Instant;

use rtvirtio_host::{BlockTrace, Extent, Host, HostError};
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
                if !matches!(error, HostError::TraceStale) {
                    events.push(error.to_string());
                }
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
