//! Which ports of a switch a frame goes to (IEEE 802.1Q, 8.6, without spanning tree).
//!
//! A port has the address of its device, which is known beforehand: with anti-spoofing it sends under that one
//! only, and nothing has to be learned of it. A port without it may have others behind itself, as a nested
//! bridge has. These are learned from what it sends, and forgotten after [`AGEING_SECONDS`]. What is for an
//! address that nobody has goes to such ports alone.
//!
//! Looking up takes no lock: what is learned is a table of atomics, of which each entry is an address and then
//! where it was seen. A reader between the two finds a port of the same switch, whose VLANs are looked at
//! anyway.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use crate::ethernet::{ARP, HEADER_BYTES, Head, Mac, is_group, is_link_local};

/// For how long a learned address is known that sends nothing (802.1Q, table 8-6).
pub const AGEING_SECONDS: u32 = 300;
/// The most addresses that are learned of one port: more cost it nobody else's place.
pub const MAX_LEARNED: u32 = 256;
/// The most ports of a switch.
pub const MAX_PORTS: u16 = 1024;
/// Highest number of a VLAN; 0 and 4095 are none.
pub const MAX_VLAN: u16 = 4094;

/// Of a tag's control information: its VLAN.
const VLAN_MASK: u16 = 0xfff;

/// Which VLANs a port is in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Vlans {
    /// With all other ports of this kind. Tags are the guests' own.
    Untagged,
    /// One VLAN, of which the guest knows nothing: its frames have no tag.
    Access(u16),
    /// Several, by tag.
    Trunk(Vec<u16>),
}

/// What a port of a switch may do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Port {
    /// The address of its device.
    pub mac: Mac,
    /// Its VLANs.
    pub vlans: Vlans,
    /// Whether it sends under its own address only.
    pub anti_spoofing: bool,
}

/// Why a frame goes nowhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Its sender's address is another device's, or that of a group.
    #[error("spoofed")]
    Spoofed,
    /// Its tag is of a VLAN that the port is not in, or is missing, or there are two.
    #[error("VLAN")]
    Vlan,
    /// Nobody has the address, or only its sender.
    #[error("no receiver")]
    NoReceiver,
}

/// Where a frame has come in.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Origin {
    /// The number of the port.
    pub port: u16,
    /// Its VLAN; 0: that of ports without one.
    pub vlan: u16,
    /// The tag that was taken out of it.
    pub tag: Option<u16>,
}

/// Where a frame goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Destination {
    /// To one port.
    Port(u16),
    /// To all of the VLAN.
    Group,
    /// To those of the VLAN that may have others behind them.
    Unknown,
}

/// Where the last frame of a sender went. Those that follow it mostly have the same Ethernet header, which is all that
/// the way of most frames depends on.
#[derive(Debug, Default)]
pub struct LastFrame(Option<([u8; HEADER_BYTES], Origin, Destination)>);

/// How a frame leaves at a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Egress {
    /// As it came, or without the tag that was taken out.
    Untagged,
    /// With this tag.
    Tagged(u16),
}

impl Egress {
    /// At a trunk, or at another port.
    #[must_use]
    #[inline]
    pub fn of(is_trunk: bool, from: Origin) -> Self {
        // Of what has no tag the priority is 0.
        if is_trunk { Self::Tagged(from.tag.unwrap_or(from.vlan)) } else { Self::Untagged }
    }
}

/// The ports of a switch, as they are at one time. What is learned is shared with those of before and after
/// ([`Self::with_port`]).
#[derive(Debug, Clone)]
pub struct Forwarding {
    /// By number.
    ports: Vec<Option<Port>>,
    /// Address and VLAN of the ports' own devices, ascending.
    own: Vec<(u64, u16)>,
    learned: Arc<Learned>,
}

/// Never 0, which is no entry: there is an address of zeroes, if no station's.
#[inline]
const fn key(mac: Mac, vlan: u16) -> u64 {
    let [a, b, c, d, e, f] = mac;
    u64::from_be_bytes([0, 1, a, b, c, d, e, f]) << 12 | vlan as u64
}

impl Vlans {
    /// Whether it is in this one, 0 for that of ports without one.
    #[inline]
    fn has(&self, vlan: u16) -> bool {
        match self {
            Self::Untagged => vlan == 0,
            Self::Access(own) => *own == vlan,
            Self::Trunk(vlans) => vlans.contains(&vlan),
        }
    }

    /// The numbers, 0 for that of ports without one.
    fn numbers(&self) -> &[u16] {
        match self {
            Self::Untagged => &[0],
            Self::Access(vlan) => std::slice::from_ref(vlan),
            Self::Trunk(vlans) => vlans,
        }
    }
}

impl Forwarding {
    /// A switch with these ports, numbered from 0, of which no two have one address in one VLAN: at most
    /// [`MAX_PORTS`].
    #[must_use]
    pub fn new(ports: Vec<Port>) -> Self {
        let ports = ports.into_iter().map(Some).collect();
        Self::of(ports, Arc::new(Learned::new()))
    }

    fn of(ports: Vec<Option<Port>>, learned: Arc<Learned>) -> Self {
        let numbered =
            (0..).zip(&ports).filter_map(|(number, port)| Some((number, port.as_ref()?)));
        let keys = |(number, port): (u16, &Port)| {
            let mac = port.mac;
            port.vlans
                .numbers()
                .iter()
                .map(move |&vlan| (key(mac, vlan), number))
                .collect::<Vec<_>>()
        };
        let mut own: Vec<_> = numbered.flat_map(keys).collect();
        own.sort_unstable();
        Self { ports, own, learned }
    }

    /// The switch when this port has come, or has gone.
    #[must_use]
    pub fn with_port(&self, number: u16, port: Option<Port>) -> Self {
        let mut ports = self.ports.clone();
        let index = usize::from(number);
        ports.resize(ports.len().max(index + 1), None);
        if let Some(place) = ports.get_mut(index) {
            *place = port;
        }
        Self::of(ports, Arc::clone(&self.learned))
    }

    /// Forgets what was learned of a port that has gone, and from which nothing comes any more.
    pub fn forget(&self, number: u16) {
        self.learned.forget(number);
    }

    fn port(&self, number: u16) -> Option<&Port> {
        self.ports.get(usize::from(number))?.as_ref()
    }

    #[inline]
    fn owner(&self, key: u64) -> Option<u16> {
        let at = self.own.binary_search_by_key(&key, |&(key, _)| key).ok()?;
        self.own.get(at).map(|&(_, port)| port)
    }

    #[inline]
    fn has(&self, port: u16, vlan: u16) -> bool {
        self.port(port).is_some_and(|port| port.vlans.has(vlan))
    }

    /// [`Self::admit`] and [`Self::destination`] of a frame, of which `last` remembers what it may: for one port, and one
    /// time, only.
    ///
    /// # Errors
    /// Those of the two.
    #[inline]
    pub fn forward(
        &self,
        number: u16,
        head: &mut Head,
        now: u32,
        last: &mut LastFrame,
    ) -> Result<(Origin, Destination), Refused> {
        let start = head.start();
        if let Some((before, origin, destination)) = last.0
            && before == start
        {
            return Ok((origin, destination));
        }
        // This one may be learned, and change where such a frame goes, even if it is refused.
        last.0 = None;
        // More is looked at of these.
        let is_plain = head.tag().is_none() && head.ethertype() != ARP;
        let origin = self.admit(number, head, now)?;
        let destination = self.destination(origin, head, now)?;
        let is_for_one = matches!(destination, Destination::Port(_));
        last.0 = (is_plain && is_for_one).then_some((start, origin, destination));
        Ok((origin, destination))
    }

    /// Lets a frame in at a port at `now` seconds of any clock, and takes the tag of a trunk out of it.
    ///
    /// # Errors
    /// [`Refused::Spoofed`], [`Refused::Vlan`].
    #[inline]
    pub fn admit(&self, number: u16, head: &mut Head, now: u32) -> Result<Origin, Refused> {
        let port = self.port(number).ok_or(Refused::NoReceiver)?;
        let (vlan, tag) = match &port.vlans {
            Vlans::Untagged => (0, None),
            Vlans::Access(_) if head.tag().is_some() => return Err(Refused::Vlan),
            Vlans::Access(vlan) => (*vlan, None),
            Vlans::Trunk(vlans) => {
                let tag = head.take_tag().ok_or(Refused::Vlan)?;
                let vlan = tag & VLAN_MASK;
                // A second tag would be that of a VLAN at an access port.
                if !vlans.contains(&vlan) || head.tag().is_some() {
                    return Err(Refused::Vlan);
                }
                (vlan, Some(tag))
            }
        };
        let source = head.source();
        let is_own = source == port.mac;
        if is_group(source) || port.anti_spoofing && !is_own {
            return Err(Refused::Spoofed);
        }
        if port.anti_spoofing && head.arp_sender().is_some_and(|sender| sender != port.mac) {
            return Err(Refused::Spoofed);
        }
        if !is_own {
            let key = key(source, vlan);
            if self.owner(key).is_some() {
                return Err(Refused::Spoofed);
            }
            self.learned.learn(key, number, now);
        }
        Ok(Origin { port: number, vlan, tag })
    }

    /// Where a frame that was let in goes.
    ///
    /// # Errors
    /// [`Refused::NoReceiver`]
    #[inline]
    pub fn destination(&self, from: Origin, head: &Head, now: u32) -> Result<Destination, Refused> {
        let mac = head.destination();
        if is_link_local(mac) {
            return Err(Refused::NoReceiver);
        }
        if is_group(mac) {
            return Ok(Destination::Group);
        }
        let key = key(mac, from.vlan);
        let found = self.owner(key).or_else(|| self.learned.find(key, now));
        match found {
            Some(port) if port == from.port => Err(Refused::NoReceiver),
            Some(port) if self.has(port, from.vlan) => Ok(Destination::Port(port)),
            _ => Ok(Destination::Unknown),
        }
    }

    /// The ports that a frame to a [`Destination::Group`] or [`Destination::Unknown`] goes to.
    pub fn flooded(&self, from: Origin, unknown: bool) -> impl Iterator<Item = u16> {
        let goes = move |(number, port): (u16, &Option<Port>)| {
            let port = port.as_ref()?;
            let goes = number != from.port
                && !(unknown && port.anti_spoofing)
                && port.vlans.has(from.vlan);
            goes.then_some(number)
        };
        (0..).zip(&self.ports).filter_map(goes)
    }

    /// Whether frames leave with tags at a port.
    #[must_use]
    pub fn is_trunk(&self, port: u16) -> bool {
        self.port(port).is_some_and(|port| matches!(port.vlans, Vlans::Trunk(_)))
    }

    /// How a frame leaves at a port of its VLAN.
    #[must_use]
    pub fn egress(&self, port: u16, from: Origin) -> Egress {
        Egress::of(self.is_trunk(port), from)
    }

    /// What has been learned and is not forgotten at `now`: address, VLAN and port.
    pub fn learned(&self, now: u32) -> impl Iterator<Item = (Mac, u16, u16)> {
        self.learned.entries(now).map(|(key, port)| {
            let [_, _, a, b, c, d, e, f] = (key >> 12).to_be_bytes();
            ([a, b, c, d, e, f], (key & u64::from(VLAN_MASK)) as u16, port)
        })
    }
}

/// Entries: more than a few ports' worth of [`MAX_LEARNED`].
const ENTRIES: usize = 4096;
/// Places of an address.
const WAYS: usize = 8;

/// An address and where it was seen.
#[derive(Debug, Default)]
struct Entry {
    /// Address and VLAN ([`key`]); 0: none.
    key: AtomicU64,
    /// Port, and in the upper half when, in seconds.
    seen: AtomicU64,
}

/// Addresses that were learned.
#[derive(Debug)]
struct Learned {
    entries: Box<[Entry]>,
    /// How many there are of each port, those that are too old among them.
    counts: Box<[AtomicU32]>,
    /// The second in which those of each port were last looked through for some that are too old.
    aged: Box<[AtomicU32]>,
}

const fn seen(port: u16, now: u32) -> u64 {
    (now as u64) << 32 | port as u64
}

/// One thread's second may be behind another's: what was seen in the next one is new.
const fn is_old(seen: u64, now: u32) -> bool {
    let age = now.wrapping_sub((seen >> 32) as u32) as i32;
    age > AGEING_SECONDS as i32
}

impl Learned {
    fn new() -> Self {
        Self {
            entries: (0..ENTRIES).map(|_| Entry::default()).collect(),
            counts: (0..MAX_PORTS).map(|_| AtomicU32::new(0)).collect(),
            aged: (0..MAX_PORTS).map(|_| AtomicU32::new(0)).collect(),
        }
    }

    /// Drops all addresses of a port. One that another port is learning just now may go too, until it sends again.
    fn forget(&self, port: u16) {
        for entry in &self.entries {
            let key = entry.key.load(Relaxed);
            if key != 0 && entry.seen.load(Relaxed) as u16 == port {
                let _ = entry.key.compare_exchange(key, 0, Relaxed, Relaxed);
            }
        }
        if let Some(count) = self.count(port) {
            count.store(0, Relaxed);
        }
    }

    fn ways(&self, key: u64) -> &[Entry] {
        let hash = key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let first = hash as usize % (ENTRIES / WAYS) * WAYS;
        &self.entries[first..first + WAYS]
    }

    fn count(&self, port: u16) -> Option<&AtomicU32> {
        self.counts.get(usize::from(port))
    }

    /// An address was seen at a port. Two ports that learn at once may take one place: the later has it.
    fn learn(&self, key: u64, port: u16, now: u32) {
        let now_seen = seen(port, now);
        let mut place = None;
        for entry in self.ways(key) {
            let (found, before) = (entry.key.load(Relaxed), entry.seen.load(Relaxed));
            if found == key {
                // Within a second nothing is written: the line stays shared.
                if before != now_seen {
                    self.replace(entry, before as u16, key, now_seen);
                }
                return;
            }
            let is_free = found == 0 || is_old(before, now);
            // A port that has all its places takes one of its own.
            if is_free || before as u16 == port && place.is_none() {
                place = Some((entry, found, before));
            }
        }
        let Some((entry, found, before)) = place else { return };
        let is_own = found != 0 && before as u16 == port;
        if !is_own && self.is_full(port, now) {
            return;
        }
        if found == 0 {
            if let Some(count) = self.count(port) {
                count.fetch_add(1, Relaxed);
            }
            entry.seen.store(now_seen, Relaxed);
            entry.key.store(key, Relaxed);
        } else {
            self.replace(entry, before as u16, key, now_seen);
        }
    }

    /// Whether a port has all its places, of which addresses that are too old keep none. They are looked for once a second at most:
    /// a guest may send under a new address with each frame.
    fn is_full(&self, port: u16, now: u32) -> bool {
        let (Some(count), Some(aged)) = (self.count(port), self.aged.get(usize::from(port))) else {
            return true;
        };
        if count.load(Relaxed) < MAX_LEARNED {
            return false;
        }
        if now.wrapping_sub(aged.load(Relaxed)) as i32 <= 0 {
            return true;
        }
        aged.store(now, Relaxed);
        let mut kept = 0;
        for entry in &self.entries {
            let (key, seen) = (entry.key.load(Relaxed), entry.seen.load(Relaxed));
            if key != 0 && seen as u16 == port {
                let is_gone = is_old(seen, now)
                    && entry.key.compare_exchange(key, 0, Relaxed, Relaxed).is_ok();
                kept += u32::from(!is_gone);
            }
        }
        count.store(kept, Relaxed);
        kept >= MAX_LEARNED
    }

    fn replace(&self, entry: &Entry, before: u16, key: u64, seen: u64) {
        let port = seen as u16;
        if before != port {
            if let Some(count) = self.count(before) {
                // What was of a port that has gone is counted no more.
                let _ = count.fetch_update(Relaxed, Relaxed, |count| count.checked_sub(1));
            }
            if let Some(count) = self.count(port) {
                count.fetch_add(1, Relaxed);
            }
        }
        entry.seen.store(seen, Relaxed);
        entry.key.store(key, Relaxed);
    }

    fn find(&self, key: u64, now: u32) -> Option<u16> {
        let entry = self.ways(key).iter().find(|entry| entry.key.load(Relaxed) == key)?;
        let seen = entry.seen.load(Relaxed);
        (!is_old(seen, now)).then_some(seen as u16)
    }

    fn entries(&self, now: u32) -> impl Iterator<Item = (u64, u16)> {
        let all = self.entries.iter().map(|e| (e.key.load(Relaxed), e.seen.load(Relaxed)));
        all.filter(move |&(key, seen)| key != 0 && !is_old(seen, now))
            .map(|(key, seen)| (key, seen as u16))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ethernet::IPV4;

    const fn mac(last: u8) -> Mac {
        [2, 0, 0, 0, 0, last]
    }

    fn head(to: Mac, from: Mac, tags: &[u16]) -> Head {
        let mut frame = [to, from].concat();
        for tag in tags {
            frame.extend([0x81, 0, (tag >> 8) as u8, *tag as u8]);
        }
        frame.extend(IPV4.to_be_bytes());
        frame.extend([0; 46]);
        Head::new(&frame).unwrap()
    }

    fn port(last: u8, vlans: Vlans) -> Port {
        Port { mac: mac(last), vlans, anti_spoofing: true }
    }

    #[test]
    fn address_that_was_seen_in_a_later_second_is_new() {
        assert!(!is_old(seen(0, 11), 10));
        assert!(!is_old(seen(0, u32::MAX), 3) && !is_old(seen(0, 3), u32::MAX));
        assert!(!is_old(seen(0, 7), 7 + AGEING_SECONDS) && is_old(seen(0, 7), 8 + AGEING_SECONDS));
    }

    /// Goes in at a port: where to.
    fn sent(switch: &Forwarding, from: u16, mut head: Head) -> Result<Vec<u16>, Refused> {
        let origin = switch.admit(from, &mut head, 0)?;
        Ok(match switch.destination(origin, &head, 0)? {
            Destination::Port(port) => vec![port],
            Destination::Group => switch.flooded(origin, false).collect(),
            Destination::Unknown => switch.flooded(origin, true).collect(),
        })
    }

    #[test]
    fn frames_go_to_whose_address_it_is_and_groups_to_all_others() {
        let ports = (1..=3).map(|last| port(last, Vlans::Untagged)).collect();
        let switch = Forwarding::new(ports);
        assert_eq!(sent(&switch, 0, head(mac(3), mac(1), &[])), Ok(vec![2]));
        assert_eq!(sent(&switch, 1, head([0xff; 6], mac(2), &[])), Ok(vec![0, 2]));
        // Nobody has it, and nobody may.
        assert_eq!(sent(&switch, 0, head(mac(9), mac(1), &[])), Ok(vec![]));
        let refused = Err(Refused::NoReceiver);
        assert_eq!(sent(&switch, 0, head(mac(1), mac(1), &[])), refused);
        assert_eq!(sent(&switch, 0, head([1, 0x80, 0xc2, 0, 0, 0], mac(1), &[])), refused);
        // Tags are their own.
        assert_eq!(sent(&switch, 0, head(mac(3), mac(1), &[7])), Ok(vec![2]));
    }

    #[test]
    fn nobody_sends_under_anothers_address() {
        let mut open = port(3, Vlans::Untagged);
        open.anti_spoofing = false;
        let ports = vec![port(1, Vlans::Untagged), port(2, Vlans::Untagged), open];
        let switch = Forwarding::new(ports);
        let spoofed = Err(Refused::Spoofed);
        for (from, source) in [(0, mac(2)), (0, mac(9)), (2, mac(1)), (2, [0xff; 6])] {
            assert_eq!(
                sent(&switch, from, head(mac(3), source, &[])),
                spoofed,
                "{from} {source:?}"
            );
        }
        let mut arp = [head([0xff; 6], mac(1), &[]).bytes(), &[0; 20]].concat();
        arp[12..14].copy_from_slice(&[8, 6]);
        arp[22..28].copy_from_slice(&mac(2));
        assert_eq!(sent(&switch, 0, Head::new(&arp).unwrap()), spoofed);
        arp[22..28].copy_from_slice(&mac(1));
        assert_eq!(sent(&switch, 0, Head::new(&arp).unwrap()), Ok(vec![1, 2]));
        // Guests take tags of VLAN 0 for none, however many there are.
        for tags in 1..14 {
            let tags = vec![[0x81_u8, 0, 0, 0]; tags].concat();
            let mut tagged = [&arp[..12], &tags[..], &arp[12..]].concat();
            let at = tagged.len() - arp.len() + 22;
            tagged[at..at + 6].copy_from_slice(&mac(2));
            let found = sent(&switch, 0, Head::new(&tagged).unwrap());
            assert_eq!(found, spoofed, "{} bytes of tags", tags.len());
        }
    }

    #[test]
    fn what_is_behind_an_open_port_is_learned_and_forgotten() {
        let open = |last| Port { anti_spoofing: false, ..port(last, Vlans::Untagged) };
        let switch = Forwarding::new(vec![port(1, Vlans::Untagged), open(2), open(3)]);
        assert_eq!(sent(&switch, 0, head(mac(9), mac(1), &[])), Ok(vec![1, 2]));
        assert_eq!(sent(&switch, 1, head(mac(1), mac(9), &[])), Ok(vec![0]));
        assert_eq!(sent(&switch, 0, head(mac(9), mac(1), &[])), Ok(vec![1]));
        assert_eq!(switch.learned(0).collect::<Vec<_>>(), [(mac(9), 0, 1)]);
        // It has moved.
        assert_eq!(sent(&switch, 2, head(mac(1), mac(9), &[])), Ok(vec![0]));
        assert_eq!(sent(&switch, 0, head(mac(9), mac(1), &[])), Ok(vec![2]));
        assert_eq!(switch.learned(AGEING_SECONDS + 1).count(), 0);
        let mut again = head(mac(9), mac(1), &[]);
        let origin = switch.admit(0, &mut again, AGEING_SECONDS + 1).unwrap();
        let found = switch.destination(origin, &again, AGEING_SECONDS + 1);
        assert_eq!(found, Ok(Destination::Unknown));
    }

    #[test]
    fn port_that_goes_leaves_nothing_to_who_has_its_number_next() {
        let open = |last| Port { anti_spoofing: false, ..port(last, Vlans::Untagged) };
        let before = Forwarding::new(vec![port(1, Vlans::Untagged), open(2)]);
        for i in 0..=u8::MAX {
            sent(&before, 1, head(mac(1), [4, 0, 0, 0, 0, i], &[])).unwrap();
        }
        assert_eq!(sent(&before, 0, head(mac(2), mac(1), &[])), Ok(vec![1]));
        let without = before.with_port(1, None);
        without.forget(1);
        // Nobody has these addresses any more.
        for to in [mac(2), [4, 0, 0, 0, 0, 9]] {
            assert_eq!(sent(&without, 0, head(to, mac(1), &[])), Ok(vec![]));
        }
        assert_eq!(sent(&without, 0, head([0xff; 6], mac(1), &[])), Ok(vec![]));
        assert_eq!(without.learned(0).count(), 0);
        let refused = without.admit(1, &mut head(mac(1), mac(2), &[]), 0);
        assert_eq!(refused, Err(Refused::NoReceiver));

        let with = without.with_port(1, Some(open(3))).with_port(4, Some(port(5, Vlans::Untagged)));
        assert_eq!(sent(&with, 0, head(mac(3), mac(1), &[])), Ok(vec![1]));
        assert_eq!(sent(&with, 0, head([0xff; 6], mac(1), &[])), Ok(vec![1, 4]));
        // It has all places of its own again.
        for i in 0..=u8::MAX {
            sent(&with, 1, head(mac(1), [6, 0, 0, 0, 0, i], &[])).unwrap();
        }
        assert_eq!(with.learned(0).count(), before.learned(0).count());
        assert!(with.learned(0).count() > MAX_LEARNED as usize / 2);
    }

    #[test]
    fn flood_of_addresses_takes_nobody_elses_place() {
        let open = |last| Port { anti_spoofing: false, ..port(last, Vlans::Untagged) };
        let switch = Forwarding::new(vec![open(1), open(2)]);
        sent(&switch, 1, head(mac(1), mac(9), &[])).unwrap();
        for i in 0..50_000_u32 {
            let [_, a, b, c] = i.to_be_bytes();
            sent(&switch, 0, head(mac(2), [4, 0, 0, a, b, c], &[])).unwrap();
        }
        assert_eq!(sent(&switch, 0, head(mac(9), mac(1), &[])), Ok(vec![1]));
        let of_flood = switch.learned(0).filter(|&(_, _, port)| port == 0).count();
        assert_eq!(of_flood, MAX_LEARNED as usize);
    }

    #[test]
    fn addresses_that_are_forgotten_leave_their_places_to_others() {
        let open = |last| Port { anti_spoofing: false, ..port(last, Vlans::Untagged) };
        let switch = Forwarding::new(vec![open(1), open(2)]);
        let later = AGEING_SECONDS + 1;
        for i in 0..=u8::MAX {
            switch.admit(0, &mut head(mac(2), [4, 0, 0, 0, 0, i], &[]), 0).unwrap();
        }
        for i in 0..=u8::MAX {
            switch.admit(0, &mut head(mac(2), [6, 0, 0, 0, i, 0], &[]), later).unwrap();
        }
        assert_eq!(switch.learned(later).count(), MAX_LEARNED as usize);
    }

    #[test]
    fn vlans_are_apart_and_a_trunk_has_several() {
        let trunk = port(9, Vlans::Trunk(vec![10, 20]));
        let access = |last, vlan| port(last, Vlans::Access(vlan));
        let ports = vec![access(1, 10), access(2, 20), trunk, port(4, Vlans::Untagged)];
        let switch = Forwarding::new(ports);
        assert_eq!(sent(&switch, 0, head([0xff; 6], mac(1), &[])), Ok(vec![2]));
        assert_eq!(sent(&switch, 0, head(mac(2), mac(1), &[])), Ok(vec![]));
        assert_eq!(sent(&switch, 2, head(mac(2), mac(9), &[20])), Ok(vec![1]));
        let refused = Err(Refused::Vlan);
        for tags in [&[][..], &[30], &[0], &[10, 20]] {
            assert_eq!(sent(&switch, 2, head(mac(1), mac(9), tags)), refused, "{tags:?}");
        }
        assert_eq!(sent(&switch, 0, head([0xff; 6], mac(1), &[20])), refused);
        // The tag leaves with its priority, or one without is made.
        let mut tagged = head(mac(1), mac(9), &[0x600a]);
        let origin = switch.admit(2, &mut tagged, 0).unwrap();
        assert_eq!((tagged.tag(), switch.egress(0, origin)), (None, Egress::Untagged));
        let origin = switch.admit(0, &mut head(mac(9), mac(1), &[]), 0).unwrap();
        assert_eq!(switch.egress(2, origin), Egress::Tagged(10));
    }

    #[test]
    fn address_of_zeroes_is_as_unknown_as_any_other() {
        let ports = (1..=3).map(|last| port(last, Vlans::Untagged)).collect();
        let switch = Forwarding::new(ports);
        let [unknown, zeroes] = [mac(9), [0; 6]].map(|to| sent(&switch, 1, head(to, mac(2), &[])));
        assert_eq!(zeroes, unknown);
        // Nor where a place was given back.
        let open = |last| Port { anti_spoofing: false, ..port(last, Vlans::Untagged) };
        let switch = Forwarding::new(vec![open(1), open(2)]);
        sent(&switch, 1, head(mac(1), [0; 6], &[])).unwrap();
        assert_eq!(sent(&switch, 0, head([0; 6], mac(1), &[])), Ok(vec![1]));
        switch.forget(1);
        assert_eq!(switch.learned(0).count(), 0);
    }

    #[test]
    fn frame_that_is_refused_is_not_forgotten_for_those_before() {
        let open = |last| Port { anti_spoofing: false, ..port(last, Vlans::Untagged) };
        let switch = Forwarding::new(vec![open(1), open(2)]);
        sent(&switch, 1, head(mac(1), mac(9), &[])).unwrap();
        let mut last = LastFrame::default();
        let mut forward =
            |to, source| switch.forward(0, &mut head(mac(to), mac(source), &[]), 0, &mut last);
        assert_eq!(forward(9, 1).unwrap().1, Destination::Port(1));
        // The address has moved to the sender, which a frame to itself says.
        assert_eq!(forward(9, 9), Err(Refused::NoReceiver));
        assert_eq!(forward(9, 1), Err(Refused::NoReceiver));
    }

    proptest! {
        /// What is remembered of the last frame changes nothing.
        #[test]
        fn frames_that_begin_alike_go_the_same_way(
            frames in prop::collection::vec((0_u8..3, 0_u8..3, 0_u16..3, 0_usize..3, any::<bool>(), 0_u8..3), 1..100),
            from in 0_u16..3,
        ) {
            let open = |port| Port { anti_spoofing: false, ..port };
            let ports = || vec![
                port(0, Vlans::Trunk(vec![1, 2])),
                open(port(1, Vlans::Untagged)),
                port(2, Vlans::Untagged),
            ];
            let (switch, other) = (Forwarding::new(ports()), Forwarding::new(ports()));
            let mut last = LastFrame::default();
            for (to, source, tag, tags, is_arp, sender) in frames {
                let mut bytes = head(mac(to), mac(source), &vec![tag; tags]).bytes().to_vec();
                if is_arp {
                    let at = HEADER_BYTES + 4 * tags;
                    bytes[at - 2..at].copy_from_slice(&ARP.to_be_bytes());
                    bytes[at + 8..at + 14].copy_from_slice(&mac(sender));
                }
                let mut one = Head::new(&bytes).unwrap();
                let mut two = one;
                let found = switch.forward(from, &mut one, 0, &mut last);
                let expected = other.admit(from, &mut two, 0).and_then(|origin| {
                    Ok((origin, other.destination(origin, &two, 0)?))
                });
                prop_assert_eq!(found, expected);
                prop_assert_eq!(one.bytes(), two.bytes());
            }
        }

        /// Whatever is sent: no frame leaves a VLAN, or at the port where it came in.
        #[test]
        fn nothing_crosses_vlans(
            frames in prop::collection::vec((0_u16..5, 0_u8..8, 0_u8..8, 0_u16..40, 0_usize..3), 1..200),
        ) {
            let open = |port| Port { anti_spoofing: false, ..port };
            let switch = Forwarding::new(vec![
                port(1, Vlans::Access(10)),
                open(port(2, Vlans::Access(20))),
                open(port(3, Vlans::Trunk(vec![10, 20]))),
                port(4, Vlans::Untagged),
                open(port(5, Vlans::Untagged)),
            ]);
            for (now, (from, to, source, tag, tags)) in (0..).zip(frames) {
                let tags = vec![tag; tags];
                let mut head = head(mac(to), mac(source), &tags);
                let Ok(origin) = switch.admit(from, &mut head, now) else { continue };
                prop_assert!(switch.has(from, origin.vlan));
                let to: Vec<u16> = match switch.destination(origin, &head, now) {
                    Ok(Destination::Port(port)) => vec![port],
                    Ok(Destination::Group) => switch.flooded(origin, false).collect(),
                    Ok(Destination::Unknown) => switch.flooded(origin, true).collect(),
                    Err(_) => continue,
                };
                for port in to {
                    prop_assert!(port != from && switch.has(port, origin.vlan));
                }
            }
        }
    }
}
