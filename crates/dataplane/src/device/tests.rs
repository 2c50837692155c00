//! A block device as front ends see it, in sessions whose rings nobody serves.

use std::io::Read as _;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rtvirtio_units::Bytes;
use rtvirtio_vhost::protocol::features::{LOG_ALL, RING_PACKED};
use rtvirtio_vhost::protocol::{HEADER_SIZE, Header, InflightArea, Message, Request};
use rtvirtio_vhost::session::testing::{
    BASIC, Front, TOLD_OF_CHANGES, address, eventfd, memory, region, served,
};
use rtvirtio_vhost::session::{Answer, Refused, SessionError};
use rustix::io::Errno;
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend as _};
use vhost::{VhostBackend as _, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

use super::testing::{device, device_with};
use super::*;

const CACHED: u64 = BASIC | features::BLK_CONFIG_WCE | features::BLK_FLUSH;

#[test]
fn writeback_is_the_only_field_written_and_only_if_negotiated() {
    let device = device();
    let mut front = Front::ready(device.clone());
    let write = |offset, data: &[u8]| Message::SetConfig { offset, data: data.to_vec() };
    let refused = |offset| Some(Refused::Config { offset });
    assert_eq!(front.send(write(32, &[0])).err(), refused(32));
    let negotiated = BASIC | features::BLK_CONFIG_WCE | features::BLK_FLUSH;
    front.send(Message::SetFeatures(negotiated)).unwrap();
    assert!(device.write_cache());
    front.send(write(32, &[0])).unwrap();
    assert!(!device.write_cache());
    assert_eq!(front.send(write(32, &[2])).err(), refused(32));
    assert_eq!(front.send(write(32, &[1, 1])).err(), refused(32));
    assert_eq!(front.send(write(0, &[1])).err(), refused(0));
}

#[test]
fn driver_that_neither_flushes_nor_looks_has_no_write_cache() {
    let device = device();
    let mut front = Front::ready(device.clone());
    front.send(Message::SetFeatures(BASIC | features::BLK_FLUSH)).unwrap();
    assert!(device.write_cache());
    front.send(Message::SetFeatures(BASIC)).unwrap();
    assert!(!device.write_cache());
}

fn writeback(on: u8) -> Message {
    Message::SetConfig { offset: 32, data: vec![on] }
}

/// What the driver sees, and what its writes get.
fn modes(front: &mut Front, device: &Device) -> (u8, bool) {
    let get = Message::GetConfig { offset: 32, size: 1, flags: 0 };
    let Ok(Answer::Config { data, .. }) = front.send(get) else { panic!("no config") };
    (data[0], device.write_cache())
}

#[test]
fn write_cache_that_the_guest_turned_off_stays_off_until_it_turns_it_on() {
    let device = device();
    let mut front = Front::new(device.clone());
    front.send(Message::SetFeatures(CACHED)).unwrap();
    assert_eq!(modes(&mut front, &device), (1, true));
    front.send(writeback(0)).unwrap();
    assert_eq!(modes(&mut front, &device), (0, false));
    // A reset, as of the guest's restart.
    front.send(Message::ResetDevice).unwrap();
    assert_eq!(modes(&mut front, &device), (0, false));
    front.send(Message::SetFeatures(CACHED)).unwrap();
    assert_eq!(modes(&mut front, &device), (0, false));
    drop(front);
    // The front end connects again, and says nothing of it.
    let mut front = Front::new(device.clone());
    front.send(Message::SetFeatures(CACHED)).unwrap();
    assert_eq!(modes(&mut front, &device), (0, false));
    front.send(writeback(1)).unwrap();
    drop(front);
    let mut front = Front::new(device.clone());
    assert_eq!(modes(&mut front, &device), (1, true));
    // Firmware that cannot flush, and then a system that can: both see what they get, or less.
    front.send(Message::SetFeatures(BASIC)).unwrap();
    assert_eq!(modes(&mut front, &device), (1, false));
    front.send(Message::ResetDevice).unwrap();
    assert_eq!(modes(&mut front, &device), (1, false));
    front.send(Message::SetFeatures(CACHED)).unwrap();
    assert_eq!(modes(&mut front, &device), (1, true));
}

#[test]
fn driver_that_cannot_flush_begins_without_write_cache_and_may_choose() {
    let disk = device();
    let mut front = Front::new(disk.clone());
    front.send(Message::SetFeatures(BASIC | features::BLK_CONFIG_WCE)).unwrap();
    assert_eq!(modes(&mut front, &disk), (0, false));
    front.send(writeback(1)).unwrap();
    assert_eq!(modes(&mut front, &disk), (1, true));
}

#[test]
fn write_cache_that_the_guest_turned_off_stays_off_at_the_next_server() {
    let area = InflightArea { size: 0, offset: 0, queues: 2, queue_size: 16, padded: true };
    // Said before the area is there, and after.
    for before in [true, false] {
        let disk = device();
        let mut front = Front::new(disk.clone());
        front.send(Message::SetFeatures(CACHED)).unwrap();
        let Ok(Answer::Inflight(area, fd)) = front.send(Message::GetInflightFd(area)) else {
            panic!("no area");
        };
        let set = |front: &mut Front| {
            front.with_fd(Message::SetInflightFd(area), fd.try_clone().unwrap()).unwrap();
        };
        let off = |front: &mut Front| drop(front.send(writeback(0)).unwrap());
        if before {
            off(&mut front);
            set(&mut front);
        } else {
            set(&mut front);
            off(&mut front);
        }
        drop(front);
        // Another process, with its configuration: the front end sends the area, not the mode.
        let disk = device();
        let mut front = Front::new(disk.clone());
        front.send(Message::SetFeatures(CACHED)).unwrap();
        set(&mut front);
        assert_eq!(modes(&mut front, &disk), (0, false));
        front.send(writeback(1)).unwrap();
        drop(front);
        let disk = device();
        let mut front = Front::new(disk.clone());
        set(&mut front);
        front.send(Message::SetFeatures(CACHED)).unwrap();
        assert_eq!(modes(&mut front, &disk), (1, true));
    }
}

#[test]
fn resize_is_told_over_the_channel_as_long_as_the_session_lives() {
    let device = device();
    let mut front = Front::ready(device.clone());
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    front.send(Message::SetProtocolFeatures(TOLD_OF_CHANGES)).unwrap();
    front.with_fd(Message::SetBackendReqFd, theirs.into()).unwrap();
    device.resize(Some(Bytes::new(1 << 21))).unwrap();
    let mut header = [0; HEADER_SIZE];
    ours.read_exact(&mut header).unwrap();
    // CONFIG_CHANGE_MSG, version 1, no body.
    assert_eq!(Header::from_bytes(header), Header { request: 2, flags: 1, size: 0 });
    assert_eq!(device.config(0, 8, 0), (4096_u64).to_le_bytes());
    drop(front);
    assert_eq!(device.link().notify(), Ok(false));
    let error = Front::ready(device).with_fd(Message::SetBackendReqFd, eventfd()).err();
    assert_eq!(error, Some(Refused::NotASocket));
}

#[test]
fn channel_that_is_not_read_never_blocks_a_resize() {
    let device = device();
    let mut front = Front::ready(device.clone());
    let (_ours, theirs) = UnixStream::pair().unwrap();
    front.send(Message::SetProtocolFeatures(TOLD_OF_CHANGES)).unwrap();
    front.with_fd(Message::SetBackendReqFd, theirs.into()).unwrap();
    let full = (0..1_000_000).find_map(|_| device.link().notify().err());
    assert_eq!(full, Some(Errno::AGAIN));
    device.resize(Some(Bytes::new(1 << 21))).unwrap();
}

#[test]
fn front_end_of_the_vhost_crate_is_served() {
    let (host, stream, thread) = served(device());
    let mut front = Frontend::from_stream(stream, 2);
    front.set_owner().unwrap();
    let offered = front.get_features().unwrap();
    assert_eq!(offered, features::ALWAYS | features::BLK_DISCARD | features::BLK_WRITE_ZEROES);
    front.set_features(offered & !RING_PACKED & !LOG_ALL).unwrap();
    let protocol = front.get_protocol_features().unwrap();
    front.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    front.set_protocol_features(protocol).unwrap();
    assert!(protocol.contains(VhostUserProtocolFeatures::INFLIGHT_SHMFD));
    assert_eq!(front.get_queue_num().unwrap(), 2);
    assert_eq!(front.get_max_mem_slots().unwrap(), 509);

    let (_, capacity) = front.get_config(0, 8, VhostUserConfigFlags::WRITABLE, &[0; 8]).unwrap();
    assert_eq!(capacity, 2048_u64.to_le_bytes());
    front.set_config(32, VhostUserConfigFlags::WRITABLE, &[0]).unwrap();
    assert!(front.set_config(0, VhostUserConfigFlags::WRITABLE, &[0]).is_err());

    let wanted = VhostUserInflight::new(0, 0, 2, 16);
    let (area, file) = front.get_inflight_fd(&wanted).unwrap();
    front.set_inflight_fd(&area, file.as_raw_fd()).unwrap();

    let guest = memory(0x1_0000);
    let spec = region(0);
    let info = VhostUserMemoryRegionInfo {
        guest_phys_addr: spec.guest,
        memory_size: spec.size,
        userspace_addr: spec.front_end,
        mmap_offset: spec.offset,
        mmap_handle: guest.as_raw_fd(),
    };
    front.set_mem_table(&[info]).unwrap();
    let place = address(0);
    let ring = VringConfigData {
        queue_max_size: 16,
        queue_size: 16,
        flags: 0,
        desc_table_addr: place.descriptors,
        used_ring_addr: place.used,
        avail_ring_addr: place.available,
        log_addr: None,
    };
    front.set_vring_num(0, 16).unwrap();
    front.set_vring_base(0, 0).unwrap();
    front.set_vring_addr(0, &ring).unwrap();
    front.set_vring_call(0, &EventFd::new(0).unwrap()).unwrap();
    front.set_vring_err(0, &EventFd::new(0).unwrap()).unwrap();
    front.set_vring_kick(0, &EventFd::new(0).unwrap()).unwrap();
    front.set_vring_enable(0, true).unwrap();
    assert_eq!(host.log(), ["start 0 enabled=false base=0", "update 0 enabled=true"]);
    assert_eq!(front.get_vring_base(0).unwrap(), 2);
    front.remove_mem_region(&info).unwrap();
    front.add_mem_region(&info).unwrap();
    front.reset_device().unwrap();
    drop(front);
    let ended = thread.join().unwrap();
    assert_eq!((ended.error, ended.refused), (None, 1));
    let request = Request::SetConfig;
    let source = Refused::Config { offset: 0 };
    assert_eq!(ended.first_refused, Some(SessionError::Refused { request, source }));
}

#[test]
fn device_of_many_queues_takes_no_more_than_64() {
    use crate::device::{DeviceConfig, DeviceError};
    let _ = device_with(|config| config.queues = 64);
    for queues in [0, 65] {
        let config = DeviceConfig {
            name: String::new(),
            engine: Arc::clone(device().engine()),
            queues,
            read_only: false,
            serial: [0; 20],
            write_cache: true,
            limits: crate::device::Limits::default(),
            schedule: None,
        };
        assert_eq!(Device::new(config).unwrap_err(), DeviceError::Queues(queues));
    }
}

#[test]
fn configuration_space_has_its_fields_where_the_specification_has_them() {
    let config = device().config(0, 256, 0);
    let mut expected = [0_u8; 256];
    expected[1] = 8; // 2048 sectors
    expected[12] = 126; // seg_max
    expected[21] = 2; // 512 bytes
    expected[24] = 3; // 8 logical blocks in a physical one
    expected[26] = 8;
    expected[32] = 1; // writeback
    expected[34] = 2; // queues
    expected[38] = 0x20; // 1 << 21 sectors
    expected[40] = 1;
    expected[44] = 1;
    expected[50] = 0x20;
    expected[52] = 1;
    expected[56] = 1;
    assert_eq!(config, expected);
    assert_eq!(device().config(34, 2, 0), [2, 0]);

    let read_only = device_with(|config| config.read_only = true);
    assert_eq!(read_only.config(36, 24, 0), [0; 24]);
    assert_eq!(read_only.features(), features::ALWAYS | features::BLK_RO);
}
