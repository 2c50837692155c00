//! Latencies in the host's block layer of what lies in given disks, partitions and files, while
//! these come and go.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use rtvirtio_host::qemu::Part;
use rtvirtio_host::{BlockTrace, Extent, Host};
use rtvirtio_spec::latency::Histogram;

use crate::vms::plain;

/// How long extents are believed: an image file grows.
const BELIEVED: Duration = Duration::from_secs(10);

/// A trace of what was asked for last; `K` says whose it is.
pub struct HostLatency<K> {
    host: Host,
    name: fn(&K) -> String,
    parts: BTreeMap<K, Part>,
    found_at: Instant,
    /// What is measured, and whose it is.
    owners: BTreeMap<Extent, K>,
    trace: Option<BlockTrace>,
    /// When it was last asked.
    at: Instant,
    lost: u64,
    /// What was said, so that it is said once.
    said: BTreeSet<String>,
}

impl<K: Ord + Clone> HostLatency<K> {
    /// Measures nothing yet. `name` is how events call an owner.
    #[must_use]
    pub fn new(host: Host, name: fn(&K) -> String) -> Self {
        let now = Instant::now();
        Self {
            host,
            name,
            parts: BTreeMap::new(),
            found_at: now,
            owners: BTreeMap::new(),
            trace: None,
            at: now,
            lost: 0,
            said: BTreeSet::new(),
        }
    }

    /// Records lost since the start.
    #[must_use]
    pub const fn lost(&self) -> u64 {
        self.lost
    }

    /// Measures `parts` from now on. Requests under way at a change are not measured.
    pub fn follow(&mut self, parts: &BTreeMap<K, Part>, events: &mut Vec<String>) {
        let is_old = self.found_at.elapsed() >= BELIEVED;
        if *parts == self.parts && !is_old {
            return;
        }
        self.parts.clone_from(parts);
        self.found_at = Instant::now();
        let mut extents = BTreeMap::new();
        for (owner, part) in parts {
            match self.host.extents(part) {
                Ok(found) => drop(extents.insert(owner.clone(), found)),
                Err(error) => {
                    let (name, why) = ((self.name)(owner), plain(&error.to_string()));
                    self.say(format!("{name}: not measured on the host: {why}"), events);
                }
            }
        }
        self.measure(&extents, events);
    }

    /// Measures what lies in these extents.
    pub fn measure(&mut self, extents: &BTreeMap<K, Vec<Extent>>, events: &mut Vec<String>) {
        let (owners, disputes) = owners(extents, self.name);
        disputes.into_iter().for_each(|dispute| self.say(dispute, events));
        if owners != self.owners || self.trace.is_none() {
            self.owners = owners;
            self.start(events);
        }
    }

    fn say(&mut self, event: String, events: &mut Vec<String>) {
        if self.said.insert(event.clone()) {
            events.push(event);
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
            Err(error) => {
                let hint = error.hint().map(|h| format!(" ({h})")).unwrap_or_default();
                let source = std::error::Error::source(&error);
                let why = source.map(|source| format!(": {source}")).unwrap_or_default();
                self.say(format!("nothing is measured on the host: {error}{why}{hint}"), events);
            }
        }
    }

    /// What each did since the last look, and in how many seconds; nothing where nothing is measured.
    pub fn take(
        &mut self,
        now: Instant,
        events: &mut Vec<String>,
    ) -> BTreeMap<K, (Histogram, f64)> {
        let mut found = BTreeMap::new();
        let Some(trace) = &self.trace else { return found };
        let seen = match trace.take() {
            Ok(seen) => seen,
            Err(error) => {
                events.push(format!("{error}; another is started"));
                self.start(events);
                return found;
            }
        };
        let seconds = now.saturating_duration_since(self.at).as_secs_f64();
        self.at = now;
        for (extent, owner) in &self.owners {
            let (of_owner, _) =
                found.entry(owner.clone()).or_insert_with(|| (Histogram::new(), seconds));
            if let Some(histogram) = seen.of.get(extent) {
                of_owner.merge(histogram);
            }
        }
        if seen.lost > 0 {
            self.lost += seen.lost;
            events.push(format!(
                "{} records of the host's block layer were lost: its latencies lack as many \
                 requests or fewer",
                seen.lost
            ));
        }
        found
    }
}

/// Whose each extent is; owners of which two share a sector have none, which is said.
fn owners<K: Ord + Clone>(
    extents: &BTreeMap<K, Vec<Extent>>,
    name: fn(&K) -> String,
) -> (BTreeMap<Extent, K>, Vec<String>) {
    let all = extents.iter().flat_map(|(owner, of)| of.iter().map(move |extent| (*extent, owner)));
    let mut all: Vec<(Extent, &K)> = all.collect();
    all.sort();
    let mut disputed: BTreeMap<&K, &K> = BTreeMap::new();
    // Sorted by disk and start: what an extent overlaps of all before it, it overlaps where the one that ends last does. So
    // that one is kept, and the one that ends last of other owners than its own.
    let mut last: Option<(Extent, &K)> = None;
    let mut last_of_others = None;
    for &(extent, owner) in &all {
        let rival = if last.is_some_and(|(_, of)| of == owner) { last_of_others } else { last };
        if let Some((_, other)) = rival.filter(|(before, _)| before.overlaps(&extent)) {
            disputed.insert(owner, other);
            disputed.insert(other, owner);
        }
        let ends_behind =
            |of: Option<(Extent, &K)>| of.is_none_or(|(before, _)| extent.ends_behind(&before));
        if ends_behind(last) {
            if last.is_some_and(|(_, of)| of != owner) {
                last_of_others = last;
            }
            last = Some((extent, owner));
        } else if last.is_some_and(|(_, of)| of != owner) && ends_behind(last_of_others) {
            last_of_others = Some((extent, owner));
        }
    }
    let is_whole = |(_, owner): &(Extent, &K)| !disputed.contains_key(owner);
    let owners = all.iter().filter(|of| is_whole(of)).map(|(e, owner)| (*e, (*owner).clone()));
    let say = |(owner, other): (&&K, &&K)| {
        let (owner, other) = (name(owner), name(other));
        format!("{owner}: not measured on the host: it shares sectors with {other}")
    };
    (owners.collect(), disputed.iter().map(say).collect())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rtvirtio_host::fake::FakeSysfs;
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
    fn parts(disks: &[(&str, u64, u64)]) -> BTreeMap<String, Part> {
        let part = |offset: u64, size: u64| {
            let (offset, size) = (Bytes::new(offset * MIB), Some(Bytes::new(size * MIB)));
            Part { file: "/dev/sda".into(), offset, size }
        };
        disks.iter().map(|(vm, offset, size)| ((*vm).to_owned(), part(*offset, *size))).collect()
    }

    #[test]
    fn disks_that_share_a_sector_are_nobodys_and_said_so() {
        let all = parts(&[("a", 0, 10), ("b", 10, 10), ("c", 19, 10), ("d", 40, 1)]);
        let extents = all.iter().map(|(vm, part)| (vm.clone(), host().extents(part).unwrap()));
        let (owners, events) = owners(&extents.collect(), Clone::clone);
        let names: Vec<&str> = owners.values().map(String::as_str).collect();
        assert_eq!(names, ["a", "d"]);
        assert_eq!(events.len(), 2);
        assert!(events[0].starts_with("b: not measured on the host"), "{events:?}");
        assert!(events[0].ends_with("shares sectors with c"), "{events:?}");
    }

    /// The extents of VMs' disks on one host.
    fn extents(disks: &[(&str, u64, u64)]) -> BTreeMap<String, Vec<Extent>> {
        let host = host();
        let found = parts(disks).into_iter().map(|(vm, part)| (vm, host.extents(&part).unwrap()));
        found.collect()
    }

    #[test]
    fn each_disk_that_shares_a_sector_is_found_whatever_lies_between() {
        let nobodys = |disks: &[(&str, u64, u64)]| {
            let all = extents(disks);
            let (owners, events) = owners(&all, Clone::clone);
            let whole: BTreeSet<&String> = owners.values().collect();
            let left: Vec<String> = all.into_keys().filter(|vm| !whole.contains(vm)).collect();
            assert_eq!(left.len(), events.len(), "{events:?}");
            left.concat()
        };
        // One that holds others, which share none with each other.
        assert_eq!(nobodys(&[("a", 0, 40), ("b", 1, 1), ("c", 10, 1), ("d", 50, 1)]), "abc");
        // One within another, and a third that reaches the first alone.
        assert_eq!(nobodys(&[("a", 0, 40), ("b", 1, 20), ("c", 30, 20), ("d", 60, 1)]), "abc");
        // The same owner's own do not count, and do not hide another's.
        let mut all = extents(&[("a", 0, 10), ("b", 5, 1), ("d", 30, 5)]);
        let more = extents(&[("a", 8, 20), ("b", 60, 5)]);
        more.into_iter().for_each(|(vm, of)| all.get_mut(&vm).unwrap().extend(of));
        let (owners, events) = owners(&all, Clone::clone);
        assert_eq!((owners.len(), events.len()), (1, 2), "{events:?}");
        let apart = extents(&[("a", 0, 10), ("b", 10, 10), ("c", 20, 10)]);
        assert_eq!(super::owners(&apart, Clone::clone).0.len(), 3);
    }

    #[test]
    fn very_many_disks_in_the_same_sectors_are_told_at_once() {
        let whole = extents(&[("a", 0, 10)]).remove("a").unwrap();
        let all: BTreeMap<u32, Vec<Extent>> = (0..30_000).map(|vm| (vm, whole.clone())).collect();
        let begin = Instant::now();
        let (owners, events) = owners(&all, u32::to_string);
        assert_eq!((owners.len(), events.len()), (0, all.len()));
        // Each with each other would be 450 million pairs.
        assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    }

    #[test]
    fn missing_tracepoints_are_said_once() {
        let mut on_host: HostLatency<String> = HostLatency::new(host(), Clone::clone);
        let mut events = Vec::new();
        on_host.follow(&BTreeMap::new(), &mut events);
        assert!(events.is_empty());
        for disks in [&[("a", 0, 1)][..], &[("a", 0, 1), ("b", 1, 1)]] {
            on_host.follow(&parts(disks), &mut events);
        }
        assert_eq!(events.len(), 1, "{events:?}");
        assert!(
            events[0].starts_with("nothing is measured on the host: cannot read"),
            "{events:?}"
        );
        assert!(on_host.take(Instant::now(), &mut events).is_empty() && events.len() == 1);
    }

    #[test]
    fn disk_that_is_not_there_is_said_once_and_others_are_measured() {
        let mut on_host: HostLatency<String> = HostLatency::new(host(), Clone::clone);
        let mut events = Vec::new();
        let mut all = parts(&[("a", 0, 1)]);
        all.insert("gone".to_owned(), Part::whole("/dev/sdz"));
        on_host.follow(&all, &mut events);
        assert!(events.iter().any(|event| event.starts_with("gone: not measured")), "{events:?}");
        assert_eq!(on_host.owners.len(), 1);
    }
}
