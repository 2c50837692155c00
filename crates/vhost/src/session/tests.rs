use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rtvirtio_units::Bytes;
use rtvirtio_virtq::memory::RegionSpec;
use rustix::io::Errno;
use vhost::VhostBackend as _;
use vhost::vhost_user::Frontend;

use super::testing::*;
use super::*;
use crate::protocol::{Header, Request};

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
    let mut front = Front::ready(device());
    front.send(Message::SetFeatures(features::VERSION_1)).unwrap();
    front.set_up(0);
    assert_eq!(front.host.log(), ["start 0 enabled=true base=0"]);

    let mut front = Front::ready(device());
    front.set_up(0);
    front.send(Message::SetVringEnable { index: 0, enabled: true }).unwrap();
    assert_eq!(front.host.log(), ["start 0 enabled=false base=0", "update 0 enabled=true"]);
}

#[test]
fn get_vring_base_stops_the_ring_until_the_next_kick() {
    let mut front = Front::ready(device());
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
fn memory_table_replaced_drains_rings_that_lie_in_it_and_they_go_on() {
    let mut front = Front::ready(device());
    let file = memory(0x1_0000);
    let same = || file.try_clone().unwrap();
    front.with_fd(Message::SetMemTable(vec![region(0)]), same()).unwrap();
    front.set_up(0);
    front.host.log();
    let table = Message::SetMemTable(vec![region(0), region(0x1_0000)]);
    front.session.handle(table, vec![same(), memory(0x1_0000)]).unwrap();
    assert_eq!(front.host.log(), ["update 0 drained regions=2 log=false"]);
    assert_eq!(front.host.queue(0, |queue| queue.memory.regions().len()), 2);
    front.send(Message::RemMemReg(region(0x1_0000))).unwrap();
    assert_eq!(front.host.log(), ["update 0 drained regions=1 log=false"]);
    // What the driver has broken begins anew, and its driver is told.
    front.host.set_broken(Some(0));
    front.with_fd(Message::SetMemTable(vec![region(0)]), same()).unwrap();
    assert_eq!(front.host.log(), ["stop 0", "start 0 enabled=false base=2"]);
    front.host.set_broken(None);
    // What another file has there is another ring to whoever comes after a kill.
    front.with_fd(Message::SetMemTable(vec![region(0)]), memory(0x1_0000)).unwrap();
    assert_eq!(front.host.log(), ["stop 0", "start 0 enabled=false base=4"]);
    // Nor does it go on where it does not lie.
    front.with_fd(Message::SetMemTable(vec![region(0x1_0000)]), memory(0x1_0000)).unwrap();
    assert_eq!(front.host.log(), ["stop 0"]);
}

#[test]
fn memory_added_that_rings_cannot_use_is_refused_and_not_there() {
    let mut front = Front::ready(device());
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
    let mut front = Front::ready(device());
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
    let mut front = Front::ready(device());
    front.set_up(0);
    front.host.log();
    front.with_fd(Message::AddMemReg(region(0x1_0000)), memory(0x1_0000)).unwrap();
    assert_eq!(front.host.log(), ["update 0 regions=2 log=false"]);
}

#[test]
fn memory_removed_under_a_ring_stops_it_until_it_is_back() {
    let mut front = Front::ready(device());
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
    let mut front = Front::ready(device());
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
    let mut front = Front::ready(device());
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
    let mut front = Front::ready(device());
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
    let mut front = Front::ready(device());
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
    let mut front = Front::ready(device());
    front.set_up(1);
    let state = VringState { index: 1, num: 4 };
    assert_eq!(front.send(Message::SetVringNum(state)).err(), Some(Refused::Running(1)));
    assert_eq!(front.send(Message::SetVringBase(state)).err(), Some(Refused::Running(1)));
}

#[test]
fn base_of_a_split_ring_beyond_16_bits_is_refused() {
    let mut front = Front::ready(device());
    front.set_up(0);
    front.base(0);
    front.send(Message::SetVringBase(VringState { index: 0, num: 0x1_0000 })).unwrap();
    let kick = Message::SetVringKick(VringFd { index: 0, fd: false });
    assert_eq!(front.send(kick).err(), Some(Refused::Base { index: 0, base: 0x1_0000 }));
}

#[test]
fn descriptors_replaced_reach_the_running_ring() {
    let mut front = Front::ready(device());
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
    let mut front = Front::ready(device());
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
    let mut front = Front::ready(device());
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
    let mut front = Front::ready(device());
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
    let mut front = Front::ready(device());
    front.set_up(0);
    front.host.log();
    front.send(Message::ResetOwner).unwrap();
    assert_eq!(front.host.log(), ["update 0 enabled=false"]);
}

#[test]
fn inflight_area_created_is_mapped_again_and_used_by_rings() {
    let mut front = Front::ready(device());
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
    let mut front = Front::ready(device());
    for (queues, size) in [(0, 16), (3, 16), (1, 0), (1, 17), (1, 2048)] {
        let area = InflightArea { size: 0, offset: 0, queues, queue_size: size, padded: true };
        let error = front.send(Message::GetInflightFd(area)).err();
        assert_eq!(error, Some(Refused::InflightSize { queues, size }));
    }
}

#[test]
fn session_that_ends_stops_its_rings() {
    let mut front = Front::ready(device());
    front.set_up(0);
    front.set_up(1);
    front.host.log();
    let Front { host, session } = front;
    drop(session);
    assert_eq!(host.log(), ["stop 0", "stop 1"]);
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
fn memory_beyond_what_the_device_allows_is_refused_and_none_of_it_is_mapped() {
    let mut device = TestDevice::default();
    device.memory = Bytes::new(0x3_0000);
    let mut session = Session::new(Arc::new(device), Arc::new(Host::default()));
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

#[test]
fn configuration_space_is_the_devices_and_a_write_that_it_refuses_is_refused() {
    let mut front = Front::ready(device());
    let write = |offset, data: &[u8]| Message::SetConfig { offset, data: data.to_vec() };
    front.send(write(0, &[1])).unwrap();
    let get = Message::GetConfig { offset: 0, size: 2, flags: 7 };
    let Ok(Answer::Config { offset: 0, flags: 7, data }) = front.send(get) else { panic!() };
    assert_eq!(data, [1, 0]);
    assert_eq!(front.send(write(0, &[2])).err(), Some(Refused::Config { offset: 0 }));
    assert_eq!(front.send(write(1, &[0])).err(), Some(Refused::Config { offset: 1 }));
}

#[test]
fn channel_is_a_socket_and_lives_as_long_as_the_session() {
    let device = device();
    let mut front = Front::ready(Arc::clone(&device) as Arc<dyn Backend>);
    assert_eq!(device.link().notify(), Ok(false));
    let error = front.with_fd(Message::SetBackendReqFd, eventfd()).err();
    assert_eq!(error, Some(Refused::NotASocket));
    // It is told nothing if it reads no configuration.
    for (protocol, is_told) in [
        (features::PROTOCOL_BACKEND_REQ, false),
        (features::PROTOCOL_BACKEND_REQ | features::PROTOCOL_CONFIG, true),
    ] {
        front.send(Message::SetProtocolFeatures(protocol)).unwrap();
        let (_ours, theirs) = UnixStream::pair().unwrap();
        front.with_fd(Message::SetBackendReqFd, theirs.into()).unwrap();
        assert_eq!(device.link().notify(), Ok(is_told));
    }
    drop(front);
    assert_eq!(device.link().notify(), Ok(false));
}
