use std::io::Read as _;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rtvirtio_units::Bytes;
use rustix::event::EventfdFlags;
use rustix::io::Errno;
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend as _};
use vhost::{VhostBackend as _, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

use super::testing::{Host, device, device_with, memory, region};
use super::*;
use crate::protocol::{Connection, HEADER_SIZE, Header, Request};

const BASIC: u64 = features::VERSION_1 | features::PROTOCOL_FEATURES;

struct Front {
    host: Arc<Host>,
    session: Session<Host>,
}

impl Front {
    fn new(device: Arc<Device>) -> Self {
        let host = Arc::new(Host::default());
        Self { session: Session::new(device, Arc::clone(&host)), host }
    }

    fn send(&mut self, message: Message) -> Result<Answer, Refused> {
        self.session.handle(message, vec![])
    }

    fn with_fd(&mut self, message: Message, fd: OwnedFd) -> Result<Answer, Refused> {
        self.session.handle(message, vec![fd])
    }

    /// A front end that has agreed on features and shares 64 KiB of memory.
    fn ready() -> Self {
        let mut front = Self::new(device());
        front.send(Message::SetFeatures(BASIC)).unwrap();
        front.with_fd(Message::AddMemReg(region(0)), memory(0x1_0000)).unwrap();
        front
    }

    fn set_up(&mut self, index: u32) {
        self.send(Message::SetVringNum(VringState { index, num: 16 })).unwrap();
        self.send(Message::SetVringBase(VringState { index, num: 0 })).unwrap();
        self.send(Message::SetVringAddr(address(index))).unwrap();
        self.kick(index);
    }

    fn kick(&mut self, index: u32) {
        let kick = VringFd { index, fd: true };
        self.with_fd(Message::SetVringKick(kick), eventfd()).unwrap();
    }

    fn base(&mut self, index: u32) -> u32 {
        match self.send(Message::GetVringBase(index)) {
            Ok(Answer::Vring(state)) => state.num,
            other => panic!("{other:?}"),
        }
    }
}

fn eventfd() -> OwnedFd {
    rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap()
}

fn address(index: u32) -> VringAddress {
    let base = (1 << 30) + u64::from(index) * 0x4000;
    VringAddress {
        index,
        descriptors: base,
        available: base + 0x1000,
        used: base + 0x2000,
        log: None,
    }
}

#[test]
fn ring_starts_when_its_last_part_comes_whatever_that_is() {
    let number = Message::SetVringNum(VringState { index: 0, num: 16 });
    let place = Message::SetVringAddr(address(0));
    let kick = Message::SetVringKick(VringFd { index: 0, fd: true });
    let map = Message::AddMemReg(region(0));
    let parts = [number, place, kick, map];
    for last in 0..parts.len() {
        let mut front = Front::new(device());
        front.send(Message::SetFeatures(BASIC)).unwrap();
        let rotated = parts.iter().cycle().skip(last + 1).take(parts.len());
        for (sent, part) in rotated.enumerate() {
            assert_eq!(front.host.log(), [""; 0], "after {sent} parts");
            let fds = match part {
                Message::SetVringKick(_) => vec![eventfd()],
                Message::AddMemReg(_) => vec![memory(0x1_0000)],
                _ => vec![],
            };
            front.session.handle(part.clone(), fds).unwrap();
        }
        assert_eq!(front.host.log(), ["start 0 enabled=false base=0"]);
    }
}

#[test]
fn ring_is_enabled_from_the_start_only_without_protocol_features() {
    let mut front = Front::ready();
    front.send(Message::SetFeatures(features::VERSION_1)).unwrap();
    front.set_up(0);
    assert_eq!(front.host.log(), ["start 0 enabled=true base=0"]);

    let mut front = Front::ready();
    front.set_up(0);
    front.send(Message::SetVringEnable { index: 0, enabled: true }).unwrap();
    assert_eq!(front.host.log(), ["start 0 enabled=false base=0", "update 0 enabled=true"]);
}

#[test]
fn get_vring_base_stops_the_ring_until_the_next_kick() {
    let mut front = Front::ready();
    front.set_up(1);
    front.send(Message::SetVringEnable { index: 1, enabled: true }).unwrap();
    front.host.log();
    assert_eq!(front.base(1), 2);
    assert_eq!(front.host.log(), ["stop 1"]);
    assert_eq!(front.base(1), 2);
    front.with_fd(Message::AddMemReg(region(0x1_0000)), memory(0x1_0000)).unwrap();
    assert_eq!(front.host.log(), [""; 0]);
    front.kick(1);
    assert_eq!(front.host.log(), ["start 1 enabled=true base=2"]);
}

#[test]
fn memory_table_replaced_drains_rings_and_they_continue_at_their_base() {
    let mut front = Front::ready();
    front.set_up(0);
    front.host.log();
    let table = Message::SetMemTable(vec![region(0), region(0x1_0000)]);
    front.session.handle(table, vec![memory(0x1_0000), memory(0x1_0000)]).unwrap();
    assert_eq!(front.host.log(), ["stop 0", "start 0 enabled=false base=2"]);
    assert_eq!(front.host.queue(0, |queue| queue.memory.regions().len()), 2);
}

#[test]
fn memory_added_that_rings_cannot_use_is_refused_and_not_there() {
    let mut front = Front::ready();
    front.set_up(0);
    front.host.log();
    front.host.set_scarce(true);
    let more = || Message::AddMemReg(region(0x1_0000));
    let source = StartError::System(Errno::NOMEM);
    let refused = front.with_fd(more(), memory(0x1_0000)).unwrap_err();
    assert_eq!(refused, Refused::Start { index: 0, source });
    assert_eq!(front.session.memory.regions().len(), 1);
    assert_eq!(front.host.log(), [""; 0]);
    front.host.set_scarce(false);
    front.with_fd(more(), memory(0x1_0000)).unwrap();
    assert_eq!(front.host.log(), ["update 0 regions=2 log=false"]);
}

#[test]
fn memory_table_that_cannot_be_mapped_leaves_the_rings_alone() {
    let mut front = Front::ready();
    front.set_up(0);
    front.host.log();
    let refused = |source| Some(Refused::Memory(source));
    let table = Message::SetMemTable(vec![region(0), region(0x8000)]);
    let fds = vec![memory(0x1_0000), memory(0x1_0000)];
    assert_eq!(front.session.handle(table, fds).err(), refused(MemoryError::Overlap));
    let error = front.with_fd(Message::SetMemTable(vec![region(0)]), eventfd()).err();
    assert_eq!(error, refused(MemoryError::NotAFile));
    assert_eq!(front.host.log(), [""; 0]);
}

#[test]
fn memory_added_becomes_known_to_rings_that_go_on() {
    let mut front = Front::ready();
    front.set_up(0);
    front.host.log();
    front.with_fd(Message::AddMemReg(region(0x1_0000)), memory(0x1_0000)).unwrap();
    assert_eq!(front.host.log(), ["update 0 regions=2 log=false"]);
}

#[test]
fn memory_removed_under_a_ring_stops_it_until_it_is_back() {
    let mut front = Front::ready();
    front.set_up(0);
    front.host.log();
    front.send(Message::RemMemReg(region(0))).unwrap();
    assert_eq!(front.host.log(), ["stop 0"]);
    let error = front.send(Message::RemMemReg(region(0))).err();
    assert_eq!(error, Some(Refused::Memory(MemoryError::NoSuchRegion)));
    front.with_fd(Message::AddMemReg(region(0)), memory(0x1_0000)).unwrap();
    assert_eq!(front.host.log(), ["start 0 enabled=false base=2"]);
}

#[test]
fn addresses_set_again_restart_the_ring_unless_only_the_log_differs() {
    let mut front = Front::ready();
    front.set_up(0);
    front.host.log();
    let logged = VringAddress { log: Some(0x2000), ..address(0) };
    front.send(Message::SetVringAddr(logged)).unwrap();
    assert_eq!(front.host.log(), ["update 0 log=Some(8192)"]);
    let moved = VringAddress { descriptors: (1 << 30) + 0x8000, ..logged };
    front.send(Message::SetVringAddr(moved)).unwrap();
    assert_eq!(front.host.log(), ["stop 0", "start 0 enabled=false base=2"]);
}

#[test]
fn migration_switches_the_log_on_and_off_under_a_running_ring() {
    let mut front = Front::ready();
    front.set_up(0);
    front.host.log();
    let log = Message::SetLogBase { size: 4096, offset: 0 };
    assert!(matches!(front.with_fd(log, memory(4096)), Ok(Answer::U64(0))));
    assert_eq!(front.host.log(), ["update 0 regions=1 log=false"]);
    front.send(Message::SetFeatures(BASIC | features::LOG_ALL)).unwrap();
    assert_eq!(front.host.log(), ["update 0 regions=1 log=true"]);
    front.send(Message::SetFeatures(BASIC)).unwrap();
    assert_eq!(front.host.log(), ["update 0 regions=1 log=false"]);
}

#[test]
fn features_not_offered_or_changed_under_a_ring_are_refused() {
    let mut front = Front::ready();
    let error = front.send(Message::SetFeatures(BASIC | 1 << 33)).err();
    assert_eq!(error, Some(Refused::Features(1 << 33)));
    front.set_up(0);
    let error = front.send(Message::SetFeatures(BASIC | features::RING_PACKED)).err();
    assert_eq!(error, Some(Refused::FeaturesRunning(features::RING_PACKED)));
    let error = front.send(Message::SetProtocolFeatures(1 << 8)).err();
    assert_eq!(error, Some(Refused::Features(1 << 8)));
}

#[test]
fn queues_that_do_not_exist_or_of_impossible_size_are_refused() {
    let mut front = Front::ready();
    assert_eq!(front.send(Message::GetVringBase(2)).err(), Some(Refused::NoQueue(2)));
    for num in [0, 1, 3, 2048, 65_536 + 16] {
        let error = front.send(Message::SetVringNum(VringState { index: 0, num })).err();
        assert_eq!(error, Some(Refused::QueueSize { index: 0, size: num }));
    }
    front.send(Message::SetFeatures(BASIC | features::RING_PACKED)).unwrap();
    front.send(Message::SetVringNum(VringState { index: 0, num: 3 })).unwrap();
    front.send(Message::SetFeatures(BASIC)).unwrap();
    front.send(Message::SetVringAddr(address(0))).unwrap();
    let kick = Message::SetVringKick(VringFd { index: 0, fd: false });
    assert_eq!(front.send(kick).err(), Some(Refused::QueueSize { index: 0, size: 3 }));
}

#[test]
fn running_ring_changes_neither_size_nor_base() {
    let mut front = Front::ready();
    front.set_up(1);
    let state = VringState { index: 1, num: 4 };
    assert_eq!(front.send(Message::SetVringNum(state)).err(), Some(Refused::Running(1)));
    assert_eq!(front.send(Message::SetVringBase(state)).err(), Some(Refused::Running(1)));
}

#[test]
fn base_of_a_split_ring_beyond_16_bits_is_refused() {
    let mut front = Front::ready();
    front.set_up(0);
    front.base(0);
    front.send(Message::SetVringBase(VringState { index: 0, num: 0x1_0000 })).unwrap();
    let kick = Message::SetVringKick(VringFd { index: 0, fd: false });
    assert_eq!(front.send(kick).err(), Some(Refused::Base { index: 0, base: 0x1_0000 }));
}

#[test]
fn descriptors_replaced_reach_the_running_ring() {
    let mut front = Front::ready();
    front.set_up(0);
    let vring = VringFd { index: 0, fd: true };
    front.with_fd(Message::SetVringCall(vring), eventfd()).unwrap();
    front.with_fd(Message::SetVringErr(vring), eventfd()).unwrap();
    front.send(Message::SetVringCall(VringFd { fd: false, ..vring })).unwrap();
    front.kick(0);
    assert_eq!(
        front.host.log(),
        [
            "start 0 enabled=false base=0",
            "update 0 call=true",
            "update 0 error=true",
            "update 0 call=false",
            "stop 0",
            "start 0 enabled=false base=2"
        ]
    );
    let kept = front.host.queue(0, |queue| (queue.kick.is_some(), queue.error.is_some()));
    assert_eq!(kept, (true, true));
}

#[test]
fn reset_forgets_rings_and_features_but_not_the_memory() {
    let mut front = Front::ready();
    front.set_up(0);
    front.send(Message::SetStatus(15)).unwrap();
    front.host.log();
    front.send(Message::ResetDevice).unwrap();
    assert_eq!(front.host.log(), ["stop 0"]);
    assert!(matches!(front.send(Message::GetStatus), Ok(Answer::U64(0))));
    assert_eq!(front.base(0), 0);
    front.send(Message::SetFeatures(BASIC)).unwrap();
    front.set_up(0);
    assert_eq!(front.host.log(), ["start 0 enabled=false base=0"]);
    front.send(Message::SetStatus(0)).unwrap();
    assert_eq!(front.host.log(), ["stop 0"]);
}

#[test]
fn set_owner_again_begins_a_session_without_memory() {
    let mut front = Front::ready();
    front.set_up(0);
    front.host.log();
    front.send(Message::SetOwner).unwrap();
    assert_eq!(front.host.log(), ["stop 0"]);
    // The same region is no second one.
    front.send(Message::SetFeatures(BASIC)).unwrap();
    front.with_fd(Message::AddMemReg(region(0)), memory(0x1_0000)).unwrap();
    front.set_up(0);
    assert_eq!(front.host.log(), ["start 0 enabled=false base=0"]);
}

#[test]
fn broken_ring_needs_a_reset_until_there_is_one() {
    let mut front = Front::ready();
    let status = |front: &mut Front| match front.send(Message::GetStatus) {
        Ok(Answer::U64(status)) => status,
        other => panic!("{other:?}"),
    };
    for reset in [Message::SetStatus(0), Message::ResetDevice] {
        front.send(Message::SetFeatures(BASIC)).unwrap();
        front.set_up(0);
        front.send(Message::SetStatus(15)).unwrap();
        assert_eq!(status(&mut front), 15);
        front.host.set_broken(Some(0));
        assert_eq!(status(&mut front), 15 | 64);
        // Neither the ring's end nor the driver's word ends that.
        front.base(0);
        front.host.set_broken(None);
        front.send(Message::SetStatus(15)).unwrap();
        assert_eq!(status(&mut front), 15 | 64);
        front.set_up(0);
        front.host.set_broken(Some(0));
        front.send(reset).unwrap();
        front.host.set_broken(None);
        assert_eq!(status(&mut front), 0);
    }
}

#[test]
fn reset_owner_disables_all_rings() {
    let mut front = Front::ready();
    front.set_up(0);
    front.host.log();
    front.send(Message::ResetOwner).unwrap();
    assert_eq!(front.host.log(), ["update 0 enabled=false"]);
}

#[test]
fn inflight_area_created_is_mapped_again_and_used_by_rings() {
    let mut front = Front::ready();
    let area = InflightArea { size: 0, offset: 0, queues: 2, queue_size: 16, padded: true };
    let Ok(Answer::Inflight(area, fd)) = front.send(Message::GetInflightFd(area)) else {
        panic!("no area");
    };
    front.with_fd(Message::SetInflightFd(area), fd.try_clone().unwrap()).unwrap();
    front.set_up(0);
    assert_eq!(front.host.log(), ["start 0 enabled=false base=0"]);
    let error = front.with_fd(Message::SetInflightFd(area), fd).err();
    assert_eq!(error, Some(Refused::Running(0)));
}

#[test]
fn inflight_area_of_impossible_size_is_refused() {
    let mut front = Front::ready();
    for (queues, size) in [(0, 16), (3, 16), (1, 0), (1, 17), (1, 2048)] {
        let area = InflightArea { size: 0, offset: 0, queues, queue_size: size, padded: true };
        let error = front.send(Message::GetInflightFd(area)).err();
        assert_eq!(error, Some(Refused::InflightSize { queues, size }));
    }
}

#[test]
fn writeback_is_the_only_field_written_and_only_if_negotiated() {
    let mut front = Front::ready();
    let write = |offset, data: &[u8]| Message::SetConfig { offset, data: data.to_vec() };
    let refused = |offset| Some(Refused::Config { offset });
    assert_eq!(front.send(write(32, &[0])).err(), refused(32));
    let negotiated = BASIC | features::BLK_CONFIG_WCE | features::BLK_FLUSH;
    front.send(Message::SetFeatures(negotiated)).unwrap();
    assert!(front.session.device.write_cache());
    front.send(write(32, &[0])).unwrap();
    assert!(!front.session.device.write_cache());
    assert_eq!(front.send(write(32, &[2])).err(), refused(32));
    assert_eq!(front.send(write(32, &[1, 1])).err(), refused(32));
    assert_eq!(front.send(write(0, &[1])).err(), refused(0));
}

#[test]
fn driver_that_neither_flushes_nor_looks_has_no_write_cache() {
    let mut front = Front::ready();
    front.send(Message::SetFeatures(BASIC | features::BLK_FLUSH)).unwrap();
    assert!(front.session.device.write_cache());
    front.send(Message::SetFeatures(BASIC)).unwrap();
    assert!(!front.session.device.write_cache());
}

const CACHED: u64 = BASIC | features::BLK_CONFIG_WCE | features::BLK_FLUSH;

fn writeback(on: u8) -> Message {
    Message::SetConfig { offset: 32, data: vec![on] }
}

/// What the driver sees, and what its writes get.
fn modes(front: &mut Front) -> (u8, bool) {
    let get = Message::GetConfig { offset: 32, size: 1, flags: 0 };
    let Ok(Answer::Config { data, .. }) = front.send(get) else { panic!("no config") };
    (data[0], front.session.device.write_cache())
}

#[test]
fn write_cache_that_the_guest_turned_off_stays_off_until_it_turns_it_on() {
    let device = device();
    let mut front = Front::new(Arc::clone(&device));
    front.send(Message::SetFeatures(CACHED)).unwrap();
    assert_eq!(modes(&mut front), (1, true));
    front.send(writeback(0)).unwrap();
    assert_eq!(modes(&mut front), (0, false));
    // A reset, as of the guest's restart.
    front.send(Message::ResetDevice).unwrap();
    assert_eq!(modes(&mut front), (0, false));
    front.send(Message::SetFeatures(CACHED)).unwrap();
    assert_eq!(modes(&mut front), (0, false));
    drop(front);
    // The front end connects again, and says nothing of it.
    let mut front = Front::new(Arc::clone(&device));
    front.send(Message::SetFeatures(CACHED)).unwrap();
    assert_eq!(modes(&mut front), (0, false));
    front.send(writeback(1)).unwrap();
    drop(front);
    let mut front = Front::new(device);
    assert_eq!(modes(&mut front), (1, true));
    // Firmware that cannot flush, and then a system that can: both see what they get, or less.
    front.send(Message::SetFeatures(BASIC)).unwrap();
    assert_eq!(modes(&mut front), (1, false));
    front.send(Message::ResetDevice).unwrap();
    assert_eq!(modes(&mut front), (1, false));
    front.send(Message::SetFeatures(CACHED)).unwrap();
    assert_eq!(modes(&mut front), (1, true));
}

#[test]
fn driver_that_cannot_flush_begins_without_write_cache_and_may_choose() {
    let mut front = Front::new(device());
    front.send(Message::SetFeatures(BASIC | features::BLK_CONFIG_WCE)).unwrap();
    assert_eq!(modes(&mut front), (0, false));
    front.send(writeback(1)).unwrap();
    assert_eq!(modes(&mut front), (1, true));
}

#[test]
fn write_cache_that_the_guest_turned_off_stays_off_at_the_next_server() {
    let area = InflightArea { size: 0, offset: 0, queues: 2, queue_size: 16, padded: true };
    // Said before the area is there, and after.
    for before in [true, false] {
        let mut front = Front::new(device());
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
        let mut front = Front::new(device());
        front.send(Message::SetFeatures(CACHED)).unwrap();
        set(&mut front);
        assert_eq!(modes(&mut front), (0, false));
        front.send(writeback(1)).unwrap();
        drop(front);
        let mut front = Front::new(device());
        set(&mut front);
        front.send(Message::SetFeatures(CACHED)).unwrap();
        assert_eq!(modes(&mut front), (1, true));
    }
}

#[test]
fn resize_is_told_over_the_channel_as_long_as_the_session_lives() {
    let mut front = Front::ready();
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    front.with_fd(Message::SetBackendReqFd, theirs.into()).unwrap();
    let device = Arc::clone(&front.session.device);
    device.resize(Some(Bytes::new(1 << 21))).unwrap();
    let mut header = [0; HEADER_SIZE];
    ours.read_exact(&mut header).unwrap();
    // CONFIG_CHANGE_MSG, version 1, no body.
    assert_eq!(Header::from_bytes(header), Header { request: 2, flags: 1, size: 0 });
    assert_eq!(device.config(0, 8, 0), (4096_u64).to_le_bytes());
    drop(front);
    assert_eq!(device.notify(), Ok(false));
    let error = Front::ready().with_fd(Message::SetBackendReqFd, eventfd()).err();
    assert_eq!(error, Some(Refused::NotASocket));
}

#[test]
fn channel_that_is_not_read_never_blocks_a_resize() {
    let mut front = Front::ready();
    let (_ours, theirs) = UnixStream::pair().unwrap();
    front.with_fd(Message::SetBackendReqFd, theirs.into()).unwrap();
    let device = &front.session.device;
    let full = (0..1_000_000).find_map(|_| device.notify().err());
    assert_eq!(full, Some(Errno::AGAIN));
    device.resize(Some(Bytes::new(1 << 21))).unwrap();
}

#[test]
fn session_that_ends_stops_its_rings() {
    let mut front = Front::ready();
    front.set_up(0);
    front.set_up(1);
    front.host.log();
    let Front { host, session } = front;
    drop(session);
    assert_eq!(host.log(), ["stop 0", "stop 1"]);
}

/// A session with a thread of its own, and the front end's socket.
fn served(device: Arc<Device>) -> (Arc<Host>, UnixStream, std::thread::JoinHandle<Ended>) {
    let host = Arc::new(Host::default());
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut session = Session::new(device, Arc::clone(&host));
    let thread =
        std::thread::spawn(move || serve(&mut Connection::new(Arc::new(theirs)), &mut session));
    (host, ours, thread)
}

#[test]
fn front_end_of_the_vhost_crate_is_served() {
    let (host, stream, thread) = served(device());
    let mut front = Frontend::from_stream(stream, 2);
    front.set_owner().unwrap();
    let offered = front.get_features().unwrap();
    assert_eq!(offered, features::ALWAYS | features::BLK_DISCARD | features::BLK_WRITE_ZEROES);
    front.set_features(offered & !features::RING_PACKED & !features::LOG_ALL).unwrap();
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
fn request_refused_ends_the_session_of_a_front_end_that_would_not_know() {
    let (_, stream, thread) = served(device());
    let front = Frontend::from_stream(stream, 64);
    front.set_vring_num(7, 16).unwrap();
    let ended = thread.join().unwrap();
    let source = Refused::NoQueue(7);
    let request = Request::SetVringNum;
    assert_eq!(ended.error, Some(SessionError::Refused { request, source }));
}

#[test]
fn front_end_that_reads_its_capacity_and_leaves_is_no_error() {
    for _ in 0..100 {
        let (host, stream, thread) = served(device());
        let front = Frontend::from_stream(stream, 2);
        front.get_features().unwrap();
        drop(front);
        assert_eq!(thread.join().unwrap(), Ended { messages: 1, ..Ended::default() });
        assert_eq!(host.log(), [""; 0]);
    }
}

#[test]
fn front_end_that_leaves_within_a_message_is_an_error() {
    use std::io::Write as _;
    for bytes in [&[1_u8, 0, 0][..], &Header { request: 2, flags: 1, size: 8 }.to_bytes()] {
        let (_, mut stream, thread) = served(device());
        stream.write_all(bytes).unwrap();
        drop(stream);
        let error = crate::protocol::TransportError::Truncated;
        assert_eq!(thread.join().unwrap().error, Some(SessionError::Transport(error)));
    }
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

#[test]
fn memory_beyond_what_the_device_allows_is_refused_and_none_of_it_is_mapped() {
    let device = device_with(|config| config.limits.memory = Bytes::new(0x3_0000));
    let mut session = Session::new(device, Arc::new(Host::default()));
    let at = |number: u64, size: u64| RegionSpec {
        guest: number << 32,
        size,
        front_end: (number << 32) + (1 << 44),
        offset: 0,
    };
    let two = [at(1, 0x1_0000), at(2, 0x1_0000)];
    let fds = |n: usize| (0..n).map(|_| memory(0x4_0000)).collect::<Vec<_>>();
    session.handle(Message::SetMemTable(two.to_vec()), fds(2)).unwrap();
    let too_much = |refused: Refused| match refused {
        Refused::Memory(MemoryError::TooMuch { total, limit }) => (total.get(), limit.get()),
        other => panic!("{other}"),
    };
    let more = session.handle(Message::AddMemReg(at(3, 0x2_0000)), fds(1)).unwrap_err();
    assert_eq!(too_much(more), (0x4_0000, 0x3_0000));
    let table = vec![at(1, 0x2_0000), at(2, 0x2_0000)];
    let table = session.handle(Message::SetMemTable(table), fds(2)).unwrap_err();
    assert_eq!(too_much(table), (0x4_0000, 0x3_0000));
    // Sizes whose sum is beyond 2^64 too.
    let huge = vec![at(1, 1 << 31), at(2, u64::MAX - (4 << 32))];
    let huge = session.handle(Message::SetMemTable(huge), fds(2)).unwrap_err();
    assert_eq!(too_much(huge).1, 0x3_0000);
    session.handle(Message::AddMemReg(at(3, 0x1_0000)), fds(1)).unwrap();
}
