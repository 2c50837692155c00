//! What an Ethernet frame begins with (IEEE 802.3, 802.1Q).

/// A station's address.
pub type Mac = [u8; 6];

/// Bytes of an Ethernet header, without which there is no frame.
pub const HEADER_BYTES: usize = 14;
/// Bytes of a VLAN tag.
pub const TAG_BYTES: usize = 4;
/// The most of a frame's beginning that is read before it is forwarded: enough for the addresses of TCP over IPv6.
pub const MAX_HEAD_BYTES: usize = 64;
/// Where the tag, or the type, begins.
const TYPE: usize = 12;

/// 802.1Q and 802.1ad tags.
const TAGS: [u16; 2] = [0x8100, 0x88a8];
/// ARP.
pub const ARP: u16 = 0x0806;
/// IPv4.
pub const IPV4: u16 = 0x0800;
/// IPv6.
pub const IPV6: u16 = 0x86dd;

/// Whether an address is that of a group: broadcast and multicast.
#[must_use]
#[inline]
pub const fn is_group(mac: Mac) -> bool {
    mac[0] & 1 != 0
}

/// Whether frames to this address stay on their link: pause, spanning tree and LACP (802.1Q, table 8-1).
#[must_use]
#[inline]
pub const fn is_link_local(mac: Mac) -> bool {
    matches!(mac, [0x01, 0x80, 0xc2, 0, 0, last] if last < 0x10)
}

/// The beginning of a frame, read once: what is decided by it is what is delivered.
#[derive(Debug, Clone, Copy)]
pub struct Head {
    bytes: [u8; MAX_HEAD_BYTES],
    length: u8,
}

impl Default for Head {
    fn default() -> Self {
        Self { bytes: [0; MAX_HEAD_BYTES], length: 0 }
    }
}

impl Head {
    /// Of a frame's first bytes; `None`: they are no Ethernet header.
    #[must_use]
    pub fn new(frame: &[u8]) -> Option<Self> {
        let mut head = Self::default();
        let length = frame.len().min(MAX_HEAD_BYTES);
        head.bytes[..length].copy_from_slice(&frame[..length]);
        head.set_length(length).then_some(head)
    }

    /// Where up to [`MAX_HEAD_BYTES`] bytes of a frame are read into.
    #[inline]
    pub const fn buffer(&mut self) -> &mut [u8; MAX_HEAD_BYTES] {
        &mut self.bytes
    }

    /// Says how many of them were; false: they are no Ethernet header.
    #[must_use]
    #[inline]
    pub fn set_length(&mut self, length: usize) -> bool {
        let length = length.min(MAX_HEAD_BYTES);
        self.length = length as u8;
        // Not called for nothing: a call of memset is a store whatever its length is, and loads of what lies behind it wait
        // until that is in the cache.
        if length < MAX_HEAD_BYTES {
            self.bytes[length..].fill(0);
        }
        length >= HEADER_BYTES
    }

    /// What was read, and has not been taken out.
    #[must_use]
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.length)]
    }

    /// Its Ethernet header, in which it may have a tag in the place of its type.
    #[must_use]
    #[inline]
    pub fn start(&self) -> [u8; HEADER_BYTES] {
        self.array(0)
    }

    /// To whom.
    #[must_use]
    #[inline]
    pub fn destination(&self) -> Mac {
        self.array(0)
    }

    /// From whom.
    #[must_use]
    #[inline]
    pub fn source(&self) -> Mac {
        self.array(6)
    }

    /// What it carries, or the type of its tag.
    #[must_use]
    #[inline]
    pub fn ethertype(&self) -> u16 {
        self.u16(TYPE)
    }

    /// Its tag's control information, if it has a tag: priority and VLAN.
    #[must_use]
    #[inline]
    pub fn tag(&self) -> Option<u16> {
        let is_tagged = TAGS.contains(&self.ethertype());
        is_tagged.then(|| self.u16(TYPE + 2))
    }

    /// Where its payload begins and what that is: behind its tags, if it has any. Linux takes out any number of them whose VLAN is 0.
    #[must_use]
    #[inline]
    pub fn payload(&self) -> (usize, u16) {
        let (mut at, mut kind) = (HEADER_BYTES, self.ethertype());
        while TAGS.contains(&kind) {
            kind = self.u16(at + TAG_BYTES - 2);
            at += TAG_BYTES;
        }
        (at, kind)
    }

    /// Takes its tag out; the control information.
    #[inline]
    pub fn take_tag(&mut self) -> Option<u16> {
        let tag = self.tag()?;
        let length = usize::from(self.length);
        if length < HEADER_BYTES + TAG_BYTES {
            return None;
        }
        self.bytes.copy_within(TYPE + TAG_BYTES..length, TYPE);
        self.bytes[length - TAG_BYTES..].fill(0);
        self.length -= TAG_BYTES as u8;
        Some(tag)
    }

    /// The two addresses, the tag of these, and what follows them.
    #[must_use]
    pub fn with_tag(&self, tag: u16) -> ([u8; HEADER_BYTES + 2], &[u8]) {
        let mut first = [0; HEADER_BYTES + 2];
        first[..TYPE].copy_from_slice(&self.bytes[..TYPE]);
        first[TYPE..TYPE + 2].copy_from_slice(&TAGS[0].to_be_bytes());
        first[TYPE + 2..].copy_from_slice(&tag.to_be_bytes());
        (first, self.bytes().get(TYPE..).unwrap_or_default())
    }

    /// The sender's address in an ARP packet (RFC 826), if it is one: zeroes, if it is not known because tags are all that was read.
    #[must_use]
    #[inline]
    pub fn arp_sender(&self) -> Option<Mac> {
        let (at, kind) = self.payload();
        (kind == ARP || at > MAX_HEAD_BYTES).then(|| self.array(at + 8))
    }

    /// A number that frames of one flow have in common: by the addresses and ports of TCP and UDP, and else by
    /// those of Ethernet.
    #[must_use]
    #[inline]
    pub fn flow(&self) -> u32 {
        let (at, kind) = self.payload();
        let mut hash = Hash(0);
        // Of fragments only the first has ports.
        let transport = match kind {
            IPV4 => {
                hash.add(&self.array::<8>(at + 12));
                let is_whole = self.u16(at + 6) & 0x3fff == 0;
                let length = usize::from(self.array::<1>(at)[0] & 0xf) * 4;
                is_whole.then_some((self.array::<1>(at + 9)[0], at + length))
            }
            IPV6 => {
                hash.add(&self.array::<32>(at + 8));
                Some((self.array::<1>(at + 6)[0], at + 40))
            }
            _ => {
                hash.add(&self.array::<12>(0));
                None
            }
        };
        const TCP: u8 = 6;
        const UDP: u8 = 17;
        if let Some((TCP | UDP, ports)) = transport {
            hash.add(&self.array::<4>(ports));
        }
        hash.finish()
    }

    #[inline]
    fn u16(&self, at: usize) -> u16 {
        u16::from_be_bytes(self.array(at))
    }

    /// Zeroes stand behind what was read.
    #[inline]
    fn array<const N: usize>(&self, at: usize) -> [u8; N] {
        let mut found = [0; N];
        if let Some(bytes) = self.bytes.get(at..at + N) {
            found.copy_from_slice(bytes);
        }
        found
    }
}

/// Four bytes at a time by the multiplier of Fibonacci hashing (Knuth, 6.4).
struct Hash(u64);

impl Hash {
    fn add(&mut self, bytes: &[u8]) {
        for word in bytes.chunks(4) {
            let word = word.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
            self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
    }

    const fn finish(&self) -> u32 {
        (self.0 >> 32) as u32
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame(kind: u16, payload: &[u8]) -> Vec<u8> {
        let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
        frame.extend(kind.to_be_bytes());
        frame.extend(payload);
        frame
    }

    /// IPv4, without options.
    fn packet(protocol: u8, fragment: u16, ports: [u8; 4]) -> Vec<u8> {
        let mut packet = vec![0; 24];
        packet[0] = 0x45;
        packet[6..8].copy_from_slice(&fragment.to_be_bytes());
        packet[9] = protocol;
        packet[12..20].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
        packet[20..].copy_from_slice(&ports);
        packet
    }

    #[test]
    fn addresses_tag_and_payload_are_those_of_the_frame() {
        let head = Head::new(&frame(IPV4, &[1, 2])).unwrap();
        assert_eq!((head.destination()[5], head.source()[5]), (1, 2));
        assert_eq!((head.tag(), head.payload()), (None, (14, IPV4)));
        let mut tagged = Head::new(&frame(0x8100, &[0x20, 7, 8, 0, 9])).unwrap();
        assert_eq!((tagged.tag(), tagged.payload()), (Some(0x2007), (18, IPV4)));
        assert_eq!(tagged.take_tag(), Some(0x2007));
        assert_eq!(tagged.bytes(), frame(IPV4, &[9]));
        let (first, rest) = tagged.with_tag(0x2007);
        assert_eq!([&first, rest].concat(), frame(0x8100, &[0x20, 7, 8, 0, 9]));
        assert!(Head::new(&[0; 13]).is_none());
        // A tag that is cut short is none that could be taken out.
        assert_eq!(Head::new(&frame(0x8100, &[0, 7, 8])).unwrap().take_tag(), None);
    }

    #[test]
    fn groups_and_addresses_of_a_link_are_known() {
        assert!(is_group([0xff; 6]) && is_group([0x33, 0x33, 0, 0, 0, 1]) && !is_group([2; 6]));
        assert!(is_link_local([1, 0x80, 0xc2, 0, 0, 0xe]));
        assert!(!is_link_local([1, 0x80, 0xc2, 0, 0, 0x10]));
    }

    #[test]
    fn frames_of_a_flow_have_a_number_in_common_and_flows_differ() {
        let flow = |packet: &[u8]| Head::new(&frame(IPV4, packet)).unwrap().flow();
        let tcp = flow(&packet(6, 0x4000, [1, 2, 3, 4]));
        assert_eq!(tcp, flow(&packet(6, 0x4000, [1, 2, 3, 4])));
        assert_ne!(tcp, flow(&packet(6, 0x4000, [1, 2, 3, 5])));
        // Fragments stay together whatever stands where ports would.
        assert_eq!(flow(&packet(17, 0x2000, [1; 4])), flow(&packet(17, 0x0001, [2; 4])));
        let flows: std::collections::BTreeSet<u32> =
            (0..64).map(|port| flow(&packet(6, 0, [0, port, 0, 80])) % 8).collect();
        assert_eq!(flows.len(), 8, "eight queues for 64 flows");
    }

    #[test]
    fn sender_of_arp_is_found_behind_tags_too() {
        let mut arp = vec![0; 28];
        arp[8..14].copy_from_slice(&[2, 0, 0, 0, 0, 9]);
        let expected = Some([2, 0, 0, 0, 0, 9]);
        assert_eq!(Head::new(&frame(ARP, &arp)).unwrap().arp_sender(), expected);
        let tagged = [&[0, 7, 8, 6], &arp[..]].concat();
        assert_eq!(Head::new(&frame(0x8100, &tagged)).unwrap().arp_sender(), expected);
        let twice = [&[0, 0, 0x88, 0xa8][..], &tagged[..]].concat();
        assert_eq!(Head::new(&frame(0x8100, &twice)).unwrap().arp_sender(), expected);
        assert_eq!(Head::new(&frame(IPV4, &arp)).unwrap().arp_sender(), None);
        // ARP behind more tags than are looked at has a sender that nobody is.
        let tags = [[0_u8, 0, 0x81, 0]; 13].concat();
        assert_eq!(Head::new(&frame(0x8100, &tags)).unwrap().arp_sender(), Some([0; 6]));
        assert_eq!(Head::new(&frame(0x8100, &tags[..40])).unwrap().arp_sender(), None);
    }

    proptest! {
        /// Any bytes: no panic, and the tag goes in where it came from.
        #[test]
        fn any_bytes_are_read(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            let Some(mut head) = Head::new(&bytes) else {
                prop_assert!(bytes.len() < HEADER_BYTES);
                return Ok(());
            };
            let _ = (head.flow(), head.arp_sender(), head.payload());
            let before = head.bytes().to_vec();
            if let Some(tag) = head.take_tag() {
                let (first, rest) = head.with_tag(tag);
                let mut again = [&first, rest].concat();
                again[12..14].copy_from_slice(&before[12..14]);
                prop_assert_eq!(again, before);
            }
        }
    }
}
