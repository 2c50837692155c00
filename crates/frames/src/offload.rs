//! What a sender has left to the device, done for a receiver that cannot: checksums completed and TCP cut into
//! segments (virtio 1.2, 5.1.6.2; kernel `skb_checksum_help` and `tcp_gso_segment`).
//!
//! Frames lie in memory of this process: what is looked at is what is sent.

use std::ops::Range;

use crate::ethernet::{Head, IPV4, IPV6};
use crate::header::{Header, Kind};

/// The longest headers of a segment: Ethernet with a tag, IPv4 with options, TCP with options.
pub const MAX_HEADERS: usize = 18 + 60 + 60;
/// The least that a segment may carry (`TCP_MIN_MSS` of the kernel, less the longest options): a frame of
/// 64 KiB is not to become tens of thousands.
pub const MIN_SEGMENT: u16 = 48;

const TCP: u8 = 6;
const FIN: u8 = 0x01;
const PSH: u8 = 0x08;
const CWR: u8 = 0x80;

/// Why a frame cannot be made complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OffloadError {
    /// The checksum does not lie in the frame.
    #[error("the checksum is not in the frame")]
    Checksum,
    /// What is to be cut is not the TCP of the header's kind, or into pieces that are too small.
    #[error("this is no TCP that can be cut")]
    Segments,
}

/// Adds the 16-bit words of `bytes`, of which the last one may be half.
fn sum(mut sum: u64, bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<4>();
    for word in words {
        sum += u64::from(u32::from_be_bytes(*word));
    }
    let mut last = [0; 4];
    last[..rest.len()].copy_from_slice(rest);
    sum + u64::from(u32::from_be_bytes(last))
}

/// The Internet checksum of such a sum (RFC 1071).
const fn folded(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

fn put(frame: &mut [u8], at: usize, value: u16) {
    if let Some(place) = frame.get_mut(at..at + 2) {
        place.copy_from_slice(&value.to_be_bytes());
    }
}

fn get(frame: &[u8], at: usize) -> u16 {
    match frame.get(at..at + 2) {
        Some(&[high, low]) => u16::from_be_bytes([high, low]),
        _ => 0,
    }
}

/// Completes the checksum that a header leaves to the device: the field holds the sum of the pseudo header.
///
/// # Errors
/// [`OffloadError::Checksum`]
pub fn complete_checksum(frame: &mut [u8], header: &Header) -> Result<(), OffloadError> {
    let (start, offset) = header.checksum();
    let (start, at) = (usize::from(start), usize::from(start) + usize::from(offset));
    if at + 2 > frame.len() {
        return Err(OffloadError::Checksum);
    }
    let checksum = folded(sum(0, &frame[start..]));
    // Of UDP 0 says that there is none (RFC 768); to others both are the same.
    put(frame, at, if checksum == 0 { 0xffff } else { checksum });
    Ok(())
}

/// The segments of a frame, one after the other.
#[derive(Debug, Clone)]
pub struct Segments {
    kind: Kind,
    ip: usize,
    tcp: usize,
    headers: usize,
    size: usize,
    /// Where the next one's data begins.
    at: usize,
    number: u16,
}

impl Segments {
    /// Of a frame with this header.
    ///
    /// # Errors
    /// [`OffloadError::Segments`]
    pub fn new(frame: &[u8], header: &Header) -> Result<Self, OffloadError> {
        let cut = || {
            let kind = header.segmented()?;
            let (ip, ethertype) = Head::new(frame)?.payload();
            let tcp = usize::from(header.checksum().0);
            let fits = match kind {
                Kind::Tcp4 => {
                    let length = usize::from(frame.get(ip)? & 0xf) * 4;
                    ethertype == IPV4
                        && frame.get(ip)? >> 4 == 4
                        && length >= 20
                        && tcp == ip + length
                        && *frame.get(ip + 9)? == TCP
                        // Neither a fragment nor more to come.
                        && get(frame, ip + 6) & 0x3fff == 0
                }
                Kind::Tcp6 => {
                    ethertype == IPV6
                        && frame.get(ip)? >> 4 == 6
                        && tcp == ip + 40
                        && *frame.get(ip + 6)? == TCP
                }
            };
            let length = usize::from(frame.get(tcp + 12)? >> 4) * 4;
            let headers = tcp + length;
            let is_tcp = length >= 20 && headers <= MAX_HEADERS && headers < frame.len();
            let size = header.segment_bytes();
            (fits && is_tcp && size >= MIN_SEGMENT).then_some(Self {
                kind,
                ip,
                tcp,
                headers,
                size: size.into(),
                at: headers,
                number: 0,
            })
        };
        cut().ok_or(OffloadError::Segments)
    }

    /// Bytes of the next segment, headers among them; 0: there is none.
    #[must_use]
    pub fn next_bytes(&self, frame: &[u8]) -> usize {
        match frame.len().saturating_sub(self.at) {
            0 => 0,
            left => self.headers + left.min(self.size),
        }
    }

    /// The next segment of the same frame: its headers, complete, and where its data is.
    pub fn next<'a>(
        &mut self,
        frame: &[u8],
        space: &'a mut [u8; MAX_HEADERS],
    ) -> Option<(&'a [u8], Range<usize>)> {
        let bytes = self.next_bytes(frame).checked_sub(self.headers).filter(|bytes| *bytes > 0)?;
        let data = self.at..self.at + bytes;
        let headers = space.get_mut(..self.headers)?;
        headers.copy_from_slice(frame.get(..self.headers)?);
        let (ip, tcp) = (self.ip, self.tcp);
        let segment = self.headers - tcp + bytes;
        let pseudo = match self.kind {
            Kind::Tcp4 => {
                put(headers, ip + 2, (self.headers - ip + bytes) as u16);
                let id = get(headers, ip + 4).wrapping_add(self.number);
                put(headers, ip + 4, id);
                put(headers, ip + 10, 0);
                let checksum = folded(sum(0, &headers[ip..tcp]));
                put(headers, ip + 10, checksum);
                sum(0, &headers[ip + 12..ip + 20])
            }
            Kind::Tcp6 => {
                put(headers, ip + 4, segment as u16);
                sum(0, &headers[ip + 8..ip + 40])
            }
        };
        let is_last = data.end == frame.len();
        let sequence = &mut headers[tcp + 4..tcp + 8];
        let offset = (self.at - self.headers) as u32;
        let number = u32::from_be_bytes([sequence[0], sequence[1], sequence[2], sequence[3]]);
        sequence.copy_from_slice(&number.wrapping_add(offset).to_be_bytes());
        let flags = &mut headers[tcp + 13];
        if !is_last {
            *flags &= !(FIN | PSH);
        }
        if self.number > 0 {
            *flags &= !CWR;
        }
        put(headers, tcp + 16, 0);
        let pseudo = pseudo + u64::from(TCP) + segment as u64;
        // The headers of TCP are whole words.
        let checksum = folded(sum(sum(pseudo, &headers[tcp..]), frame.get(data.clone())?));
        put(headers, tcp + 16, checksum);
        self.at = data.end;
        self.number = self.number.wrapping_add(1);
        Some((headers, data))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::header::BYTES;

    /// A frame of TCP, with a header that leaves its checksum and segments to the device.
    fn tcp(kind: Kind, tagged: bool, options: usize, data: &[u8], size: u16) -> (Vec<u8>, Header) {
        let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
        if tagged {
            frame.extend([0x81, 0, 0, 7]);
        }
        let length = 20 + 4 * options;
        let mut ip = match kind {
            Kind::Tcp4 => {
                frame.extend(IPV4.to_be_bytes());
                let mut ip = vec![0; 20];
                ip[0] = 0x45;
                put(&mut ip, 2, (20 + length + data.len()) as u16);
                put(&mut ip, 4, 0xfffe);
                ip[9] = TCP;
                ip[12..20].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
                ip
            }
            Kind::Tcp6 => {
                frame.extend(IPV6.to_be_bytes());
                let mut ip = vec![0; 40];
                ip[0] = 0x60;
                ip[6] = TCP;
                ip[8..40].iter_mut().zip(1..).for_each(|(to, from)| *to = from);
                ip
            }
        };
        frame.append(&mut ip);
        let start = frame.len();
        let mut header = vec![0xab; length];
        header[4..8].copy_from_slice(&u32::MAX.to_be_bytes());
        header[12] = ((length / 4) as u8) << 4;
        header[13] = FIN | PSH | CWR | 0x10;
        frame.append(&mut header);
        frame.extend(data);
        let mut bytes = [0; BYTES];
        (bytes[0], bytes[1]) = (1, if kind == Kind::Tcp4 { 1 } else { 4 });
        bytes[4..6].copy_from_slice(&size.to_le_bytes());
        bytes[6..8].copy_from_slice(&(start as u16).to_le_bytes());
        bytes[8] = 16;
        (frame, Header(bytes))
    }

    /// What a receiver checks: the sum over everything is 0.
    fn is_right(segment: &[u8], kind: Kind, ip: usize, tcp: usize) -> bool {
        let pseudo = match kind {
            Kind::Tcp4 => {
                assert_eq!(folded(sum(0, &segment[ip..tcp])), 0, "checksum of IPv4");
                assert_eq!(usize::from(get(segment, ip + 2)), segment.len() - ip);
                &segment[ip + 12..ip + 20]
            }
            Kind::Tcp6 => {
                assert_eq!(usize::from(get(segment, ip + 4)), segment.len() - tcp);
                &segment[ip + 8..ip + 40]
            }
        };
        let pseudo = sum(u64::from(TCP) + (segment.len() - tcp) as u64, pseudo);
        folded(sum(pseudo, &segment[tcp..])) == 0
    }

    proptest! {
        /// The segments' data is the frame's, in order, with sequence numbers, flags and checksums as they have
        /// to be.
        #[test]
        fn segments_are_what_a_receiver_expects(
            v6: bool, tagged: bool, options in 0_usize..=10, size in MIN_SEGMENT..2000,
            data in prop::collection::vec(any::<u8>(), 1..9000),
        ) {
            let kind = if v6 { Kind::Tcp6 } else { Kind::Tcp4 };
            let (frame, header) = tcp(kind, tagged, options, &data, size);
            let mut segments = Segments::new(&frame, &header).unwrap();
            let (ip, start) = (segments.ip, segments.tcp);
            let mut again: Vec<u8> = Vec::new();
            let mut space = [0; MAX_HEADERS];
            let mut number = 0;
            loop {
                let bytes = segments.next_bytes(&frame);
                let Some((headers, range)) = segments.next(&frame, &mut space) else {
                    prop_assert_eq!(bytes, 0);
                    break;
                };
                let segment = [headers, &frame[range]].concat();
                prop_assert_eq!(segment.len(), bytes);
                prop_assert!(is_right(&segment, kind, ip, start));
                let sequence = u32::from_be_bytes(segment[start + 4..start + 8].try_into().unwrap());
                prop_assert_eq!(sequence, u32::MAX.wrapping_add(again.len() as u32));
                again.extend(&segment[headers.len()..]);
                let is_last = again.len() == data.len();
                let flags = segment[start + 13];
                prop_assert_eq!(flags & (FIN | PSH) != 0, is_last);
                prop_assert_eq!(flags & CWR != 0, number == 0);
                if kind == Kind::Tcp4 {
                    prop_assert_eq!(get(&segment, ip + 4), 0xfffe_u16.wrapping_add(number));
                }
                number += 1;
            }
            prop_assert_eq!(again, data);
        }

        /// Whatever a guest writes: no panic, and no more segments than the least size allows.
        #[test]
        fn any_bytes_are_refused_or_cut(
            mut frame in prop::collection::vec(any::<u8>(), 0..2000), bytes: [u8; BYTES], like_tcp: bool,
        ) {
            let mut header = Header(bytes);
            if like_tcp {
                let (begin, right) = tcp(Kind::Tcp4, false, 2, &[], 100);
                let length = begin.len().min(frame.len());
                frame[..length].copy_from_slice(&begin[..length]);
                header = right;
            }
            let mut space = [0; MAX_HEADERS];
            if let Ok(mut segments) = Segments::new(&frame, &header) {
                let mut count = 0;
                while segments.next(&frame, &mut space).is_some() {
                    count += 1;
                }
                prop_assert!(count <= frame.len() / usize::from(MIN_SEGMENT) + 1);
            }
            let _ = complete_checksum(&mut frame, &header);
        }
    }

    #[test]
    fn checksum_is_completed_over_what_the_sender_has_summed() {
        for kind in [Kind::Tcp4, Kind::Tcp6] {
            let (mut frame, header) = tcp(kind, false, 0, b"odd", 100);
            let (ip, start) = (14, usize::from(header.checksum().0));
            put(&mut frame, 24, 0);
            let own = folded(sum(0, &frame[14..34]));
            if kind == Kind::Tcp4 {
                put(&mut frame, 24, own);
            } else {
                put(&mut frame, ip + 4, 23);
            }
            let addresses = if kind == Kind::Tcp4 { 26..34 } else { 22..54 };
            let length = (frame.len() - start) as u64;
            let pseudo = sum(u64::from(TCP) + length, &frame[addresses]);
            put(&mut frame, start + 16, !folded(pseudo));
            complete_checksum(&mut frame, &header).unwrap();
            if kind == Kind::Tcp4 {
                assert!(is_right(&frame, kind, ip, start));
            }
        }
        let mut beyond = Header::COMPLETE;
        beyond.0[6] = 13;
        assert_eq!(complete_checksum(&mut [0; 14], &beyond), Err(OffloadError::Checksum));
    }

    #[test]
    fn checksum_of_udp_is_never_0() {
        let mut header = Header::COMPLETE;
        (header.0[0], header.0[6], header.0[8]) = (1, 14, 6);
        let mut frame = [0; 30];
        // The pseudo header's sum and the data cancel out.
        frame[20..22].copy_from_slice(&[0xff, 0xff]);
        complete_checksum(&mut frame, &header).unwrap();
        assert_eq!(frame[20..22], [0xff, 0xff]);
    }

    #[test]
    fn what_is_not_tcp_of_that_kind_is_not_cut() {
        let (frame, header) = tcp(Kind::Tcp4, false, 0, &[7; 500], 100);
        assert!(Segments::new(&frame, &header).is_ok());
        let with = |at: usize, value: u8| {
            let mut frame = frame.clone();
            frame[at] = value;
            Segments::new(&frame, &header).err()
        };
        let refused = Some(OffloadError::Segments);
        // IPv6, options where none were said to be, UDP, a fragment, a TCP header that is too short or too long.
        for (at, value) in [(12, 0x86), (14, 0x46), (23, 17), (20, 0x20), (46, 0x40)] {
            assert_eq!(with(at, value), refused, "{at}");
        }
        let (_, small) = tcp(Kind::Tcp4, false, 0, &[7; 500], MIN_SEGMENT - 1);
        assert_eq!(Segments::new(&frame, &small).err(), refused);
        assert_eq!(Segments::new(&frame[..54], &header).err(), refused);
    }
}
