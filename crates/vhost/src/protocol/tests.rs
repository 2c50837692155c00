use super::*;

fn parse(request: u32, body: &[u8], fds: usize) -> Result<Message, MessageError> {
    Message::parse(Header { request, flags: 1, size: body.len() as u32 }, body, fds)
}

/// Numbers of 4 bytes, one after the other.
fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

#[test]
fn header_read_and_written_is_the_same() {
    let header = Header { request: 11, flags: 9, size: 8 };
    assert_eq!(Header::from_bytes(header.to_bytes()), header);
    assert!(header.needs_reply());
    assert_eq!(header.to_bytes()[..4], 11_u32.to_ne_bytes());
}

#[test]
fn header_of_another_version_a_reply_or_unknown_flags_is_refused() {
    for flags in [0, 2, 3, 1 | 4, 1 | 16, 1 | 1 << 31] {
        let header = Header { request: 1, flags, size: 0 };
        assert_eq!(Message::parse(header, &[], 0), Err(MessageError::Flags(flags)));
    }
}

#[test]
fn body_longer_than_any_message_is_refused() {
    let header = Header { request: 1, flags: 1, size: 4097 };
    assert_eq!(Message::parse(header, &[0; 4097], 0), Err(MessageError::TooLong(4097)));
}

#[test]
fn requests_unknown_are_refused_by_number() {
    for number in [0, 22, 23, 26, 27, 28, 29, 30, 33, 35, 41, 42, 43, 44, u32::MAX] {
        assert_eq!(parse(number, &[], 0), Err(MessageError::Unknown(number)));
    }
    assert_eq!(MessageError::Unknown(22).to_string(), "request 22 is not supported");
}

#[test]
fn numbers_of_requests_are_those_of_the_specification() {
    assert_eq!(Request::ALL.len(), 31);
    for &request in Request::ALL {
        assert_eq!(Request::from_number(request as u32), Some(request));
    }
    assert_eq!(Request::SetMemTable as u32, 5);
    assert_eq!(Request::GetVringBase as u32, 11);
    assert_eq!(Request::SetInflightFd as u32, 32);
    assert_eq!(Request::GetStatus as u32, 40);
}

#[test]
fn requests_of_network_devices_are_read() {
    let mac = parse(19, &[2, 0, 0, 0, 0, 7, 0, 0], 0);
    assert_eq!(mac, Ok(Message::SendRarp([2, 0, 0, 0, 0, 7])));
    assert_eq!(parse(20, &1500_u64.to_ne_bytes(), 0), Ok(Message::NetSetMtu(1500)));
}

#[test]
fn bodies_of_a_wrong_length_are_refused() {
    for &request in Request::ALL {
        for size in [1, 7, 9, 11, 13, 19, 21, 23, 25, 39, 41, 4096] {
            for fds in 0..=1 {
                let parsed = parse(request as u32, &vec![0; size], fds);
                assert!(parsed.is_err(), "{request} with {size} bytes: {parsed:?}");
            }
        }
    }
}

#[test]
fn mem_table_has_as_many_descriptors_as_regions() {
    let region = |n: u64| {
        [0x1000 * n, 0x1000, 0x7f00_0000 + n, 0x10 * n]
            .iter()
            .flat_map(|v| v.to_ne_bytes())
            .collect()
    };
    let body = [words(&[2, 0]), region(1), region(2)].concat();
    let expected = |n: u64| RegionSpec {
        guest: 0x1000 * n,
        size: 0x1000,
        front_end: 0x7f00_0000 + n,
        offset: 0x10 * n,
    };
    let message = Message::SetMemTable(vec![expected(1), expected(2)]);
    assert_eq!(parse(5, &body, 2), Ok(message));
    let request = Request::SetMemTable;
    for fds in [0, 1, 3, 8] {
        assert_eq!(parse(5, &body, fds), Err(MessageError::Fds { request, fds }));
    }
    for regions in [0, 9, u32::MAX] {
        let field = "number of regions";
        let body = words(&[regions, 0]);
        assert_eq!(parse(5, &body, 0), Err(MessageError::Field { request, field }));
    }
    let body = words(&[8, 0]);
    assert_eq!(parse(5, &body, 8), Err(MessageError::Size { request, size: 8 }));
    // User Mode Linux has one, and sends room for two.
    let body = [words(&[1, 0]), region(1), vec![0; 32]].concat();
    assert_eq!(parse(5, &body, 1), Ok(Message::SetMemTable(vec![expected(1)])));
    let body = [words(&[1, 0]), region(1), vec![0; 32 * 8]].concat();
    assert_eq!(parse(5, &body, 1), Err(MessageError::Size { request, size: 296 }));
}

#[test]
fn single_region_follows_8_bytes_of_padding() {
    let body: Vec<u8> = [0_u64, 1, 2, 3, 4].iter().flat_map(|v| v.to_ne_bytes()).collect();
    let spec = RegionSpec { guest: 1, size: 2, front_end: 3, offset: 4 };
    assert_eq!(parse(37, &body, 1), Ok(Message::AddMemReg(spec)));
    assert!(parse(37, &body, 0).is_err());
    // libblkio sends the descriptor along.
    assert_eq!(parse(38, &body, 0), Ok(Message::RemMemReg(spec)));
    assert_eq!(parse(38, &body, 1), Ok(Message::RemMemReg(spec)));
    assert!(parse(38, &body, 2).is_err());
}

#[test]
fn vring_descriptor_is_there_unless_bit_8_says_no() {
    let number = |number: u64| number.to_ne_bytes();
    let vring = |index, fd| VringFd { index, fd };
    assert_eq!(parse(12, &number(3), 1), Ok(Message::SetVringKick(vring(3, true))));
    assert_eq!(parse(13, &number(255), 1), Ok(Message::SetVringCall(vring(255, true))));
    assert_eq!(parse(14, &number(0x107), 0), Ok(Message::SetVringErr(vring(7, false))));
    assert!(parse(12, &number(3), 0).is_err());
    assert!(parse(12, &number(0x103), 1).is_err());
    assert!(parse(12, &number(0x200), 1).is_err());
}

#[test]
fn vring_address_has_its_log_only_with_the_flag() {
    let body = |flags: u32| {
        let addresses = [0x10_u64, 0x20, 0x30, u64::MAX].map(u64::to_ne_bytes).concat();
        [words(&[1, flags]), addresses].concat()
    };
    let address =
        VringAddress { index: 1, descriptors: 0x10, used: 0x20, available: 0x30, log: None };
    // User Mode Linux sends an address of -1 without the flag.
    assert_eq!(parse(9, &body(0), 0), Ok(Message::SetVringAddr(address)));
    let logged = VringAddress { log: Some(u64::MAX), ..address };
    assert_eq!(parse(9, &body(1), 0), Ok(Message::SetVringAddr(logged)));
    assert!(parse(9, &body(2), 0).is_err());
}

#[test]
fn config_range_is_checked_and_room_for_the_answer_optional() {
    let message = Message::GetConfig { offset: 8, size: 4, flags: 0 };
    assert_eq!(parse(24, &words(&[8, 4, 0]), 0), Ok(message.clone()));
    assert_eq!(parse(24, &words(&[8, 4, 0, 0]), 0), Ok(message));
    assert!(parse(24, &words(&[8, 4, 0, 0, 0]), 0).is_err());
    assert!(parse(24, &words(&[256, 1, 0]), 0).is_err());
    assert!(parse(24, &words(&[u32::MAX, 1, 0]), 0).is_err());
    assert!(parse(24, &words(&[0, 257, 0]), 0).is_err());

    let write = [words(&[32, 1, 0]), vec![1]].concat();
    assert_eq!(parse(25, &write, 0), Ok(Message::SetConfig { offset: 32, data: vec![1] }));
    assert!(parse(25, &words(&[32, 1, 0]), 0).is_err());
}

#[test]
fn inflight_area_comes_with_and_without_padding() {
    let body = [
        0x1000_u64.to_ne_bytes().to_vec(),
        0x40_u64.to_ne_bytes().to_vec(),
        4_u16.to_ne_bytes().to_vec(),
        128_u16.to_ne_bytes().to_vec(),
    ]
    .concat();
    let area =
        InflightArea { size: 0x1000, offset: 0x40, queues: 4, queue_size: 128, padded: false };
    assert_eq!(parse(31, &body, 0), Ok(Message::GetInflightFd(area)));
    // QEMU sends the whole C structure.
    let padded = [body, vec![0; 4]].concat();
    let area = InflightArea { padded: true, ..area };
    assert_eq!(parse(32, &padded, 1), Ok(Message::SetInflightFd(area)));
    assert!(parse(32, &padded, 0).is_err());
}

#[test]
fn states_that_no_queue_or_device_has_are_refused() {
    let enable = Message::SetVringEnable { index: 2, enabled: true };
    assert_eq!(parse(18, &words(&[2, 1]), 0), Ok(enable));
    assert!(parse(18, &words(&[2, 2]), 0).is_err());
    assert_eq!(parse(39, &15_u64.to_ne_bytes(), 0), Ok(Message::SetStatus(15)));
    assert!(parse(39, &256_u64.to_ne_bytes(), 0).is_err());
}
