//! What was sent one way, and what of it has come.

use std::collections::BTreeSet;

/// Bytes of an Ethernet header, and of what names a frame behind it.
const ETHERNET: usize = 14;
const NUMBER: usize = 8;
const SHORTEST: usize = 60;
const LONGEST: usize = 1514;
/// An Ethernet type for experiments (IEEE 802).
pub(super) const ETHERTYPE: u16 = 0x88b5;

/// The frames of a flow: each has its number, and bytes that are of that number alone.
pub(super) struct Content {
    head: [u8; ETHERNET],
    /// As it comes.
    expected: [u8; ETHERNET],
    noise: Vec<u8>,
    salt: u64,
}

/// The finalizer of splitmix64.
pub(super) const fn mix(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

impl Content {
    /// `from` and `to` are the last bytes of addresses.
    pub(super) fn new(from: u8, to: u8) -> Self {
        let mut head = [0; ETHERNET];
        head[..6].copy_from_slice(&[2, 0, 0, 0, 0, to]);
        head[6..12].copy_from_slice(&[2, 0, 0, 0, 0, from]);
        head[12..].copy_from_slice(&ETHERTYPE.to_be_bytes());
        let salt = u64::from(from) << 56;
        let words = (0..0x2_0000_u64 / 8).map(|word| mix(salt ^ (word + 1)).to_ne_bytes());
        Self { head, expected: head, noise: words.flatten().collect(), salt }
    }

    /// The same of frames that come back with their addresses swapped.
    pub(super) fn swapped(mut self) -> Self {
        self.expected[..6].copy_from_slice(&self.head[6..12]);
        self.expected[6..12].copy_from_slice(&self.head[..6]);
        self
    }

    fn of(&self, number: u64) -> &[u8] {
        let word = mix(number ^ self.salt);
        let length = SHORTEST + word as usize % (LONGEST - SHORTEST + 1) - ETHERNET - NUMBER;
        let at = (word >> 32) as usize % (self.noise.len() - LONGEST);
        &self.noise[at..at + length]
    }

    pub(super) fn write(&self, number: u64, frame: &mut Vec<u8>) {
        frame.clear();
        frame.extend_from_slice(&self.head);
        frame.extend_from_slice(&number.to_be_bytes());
        frame.extend_from_slice(self.of(number));
    }

    /// Its number, if each byte is as it was sent.
    pub(super) fn number(&self, frame: &[u8]) -> Option<u64> {
        let rest = frame.strip_prefix(&self.expected)?;
        let (number, rest) = rest.split_first_chunk::<NUMBER>()?;
        let number = u64::from_be_bytes(*number);
        (rest == self.of(number)).then_some(number)
    }
}

/// Frames that go one way.
#[derive(Debug, Default)]
pub(super) struct Flow {
    pub(super) sent: u64,
    /// Their senders have these back, or have none to get back: they cannot come again.
    pub(super) returned: u64,
    /// One more than the highest that has come.
    high: u64,
    /// The lowest that may come next.
    low: u64,
    /// After a kill, until they have begun to come again: the lowest of those that may.
    repeats_from: Option<u64>,
    /// Those below were on their way at the last kill, or before.
    doubtful: u64,
    /// Have not come, and others behind them have.
    missing: BTreeSet<u64>,
    pub(super) again: u64,
    pub(super) max_doubtful: u64,
}

impl Flow {
    /// Frames on their way, but those that a kill may have cost.
    pub(super) fn on_their_way(&self) -> u64 {
        self.sent - self.high.max(self.doubtful)
    }

    /// All have come or are lost, and none can come again.
    pub(super) fn is_over(&self) -> bool {
        self.sent == self.high.max(self.doubtful) && self.returned == self.sent
    }

    pub(super) fn has_come(&self) -> u64 {
        self.high
    }

    /// Frames that have not come; once it is over, none of these is on its way.
    pub(super) fn lost(&self) -> u64 {
        self.missing.len() as u64 + self.sent - self.high
    }

    /// What is wrong with this frame's coming now, if anything is.
    pub(super) fn receive(&mut self, number: u64) -> Result<(), String> {
        let Self { sent, returned, high, low, doubtful, .. } = *self;
        if number >= sent {
            return Err(format!("{number} comes, and {sent} were sent"));
        }
        if number < low && self.repeats_from.take_if(|from| *from <= number).is_none() {
            return Err(format!(
                "{number} comes twice or late: {low} is next, the highest was {high}, {returned} were back"
            ));
        }
        // What lies between has been overtaken.
        if number > high.max(doubtful) {
            let next = high.max(doubtful);
            return Err(format!("{number} comes, and {next} is lost: no kill was meanwhile"));
        }
        if number < high {
            self.again += u64::from(!self.missing.remove(&number));
        } else {
            self.missing.extend(high..number);
            self.high = number + 1;
        }
        self.low = number + 1;
        Ok(())
    }

    /// Whoever carried them has been killed, and all that it had shown has come. What was on its way may be lost. It may come
    /// again if its chain was not back: the driver cannot know, nor can a successor. What the dead one had delivered, and not shown,
    /// the successor shows first.
    pub(super) fn kill(&mut self) {
        self.max_doubtful = self.max_doubtful.max(self.sent - self.high);
        self.doubtful = self.sent;
        self.repeats_from = Some(self.returned.min(self.high));
    }
}

#[test]
fn frame_is_its_number_and_no_byte_else() {
    let content = Content::new(1, 2);
    let mut frame = Vec::new();
    let mut lengths = BTreeSet::new();
    for number in 0..20_000 {
        content.write(number, &mut frame);
        lengths.insert(frame.len());
        assert_eq!(content.number(&frame), Some(number));
        let at = mix(number) as usize % frame.len();
        frame[at] ^= 1;
        assert_eq!(content.number(&frame), None, "{number}, byte {at}");
    }
    assert_eq!((lengths.first(), lengths.last()), (Some(&SHORTEST), Some(&LONGEST)));
    content.write(7, &mut frame);
    assert_eq!(content.number(&frame[..frame.len() - 1]), None);
    assert_eq!(Content::new(2, 1).number(&frame), None, "of the other way");
    let content = content.swapped();
    assert_eq!(content.number(&frame), None);
    let addresses: Vec<u8> = frame[6..12].iter().chain(&frame[..6]).copied().collect();
    frame[..12].copy_from_slice(&addresses);
    assert_eq!(content.number(&frame), Some(7));
}

#[test]
fn flow_takes_no_frame_twice_late_or_missing() {
    let flow = |sent, returned| Flow { sent, returned, ..Flow::default() };
    let mut of = flow(10, 0);
    (0..5).for_each(|number| of.receive(number).unwrap());
    for wrong in [0, 4, 6, 10] {
        of.receive(wrong).unwrap_err();
    }
    assert_eq!((of.on_their_way(), of.lost(), of.again), (5, 5, 0));
    // 2 to 9 were on their way, as far as their sender knows; 5 to 9 may be lost.
    of.returned = 2;
    of.kill();
    of.sent = 12;
    assert_eq!(of.on_their_way(), 2);
    of.receive(1).unwrap_err();
    of.receive(11).unwrap_err();
    of.receive(3).unwrap();
    of.receive(3).unwrap_err();
    of.receive(7).unwrap();
    of.receive(6).unwrap_err();
    of.receive(10).unwrap();
    assert_eq!((of.lost(), of.again, of.has_come()), (5, 1, 11));
    // A later kill may bring what an earlier one had cost.
    of.kill();
    of.receive(8).unwrap();
    of.receive(11).unwrap();
    assert_eq!((of.lost(), of.again, of.max_doubtful), (3, 1, 5));
    assert!(!of.is_over(), "2 and above may come again");
    // What was delivered before a kill and shown after it comes before what comes again, and that comes again once.
    of.sent = 16;
    of.kill();
    of.receive(12).unwrap();
    of.receive(13).unwrap();
    of.receive(1).unwrap_err();
    of.receive(2).unwrap();
    of.receive(13).unwrap();
    of.receive(2).unwrap_err();
    of.receive(14).unwrap();
    of.receive(15).unwrap();
    of.returned = of.sent;
    assert!(of.is_over());
}
