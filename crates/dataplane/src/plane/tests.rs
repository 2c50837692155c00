//! The registry over the pool and the server as they are.

use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rtvirtio_completion::slots::SlotMemory;
use rtvirtio_engine::ram::RamEngine;
use rtvirtio_engine::testing::has_io_uring;
use rtvirtio_iocores::QueueKind;
use rtvirtio_spec::serve::IoThread;
use rustix::event::{EventfdFlags, eventfd};
use rustix::thread::sched_getaffinity;
use serde_json::json;
use tokio::sync::broadcast::error::TryRecvError;

use super::host::{Client, Host};
use super::iothreads::when_free;
use super::mapped::{EMPTY_TIME, MappedHost};
use super::*;
use super::{Notice, Report};
use crate::device::{Device, DeviceConfig, Limits};
use crate::iothread::Polling;
use crate::key::QueueKey;
use crate::pool::{MoveError, Pool, ThreadId};
use crate::queue::{Queue, SlotsSetup};
use rtvirtio_vhost::protocol::{HEADER_SIZE, Message, VringAddress, VringFd, VringState, features};
use rtvirtio_vhost::session::testing::{TOLD_OF_CHANGES, memory, region};
use rtvirtio_vhost::session::{Answer, QueueHost, Refused, Session, StartError};

mod nics;

/// A pool with two IOThreads, if there are rings for them; else the test is skipped.
pub(super) fn pool_with_threads() -> Option<(Arc<Pool>, [ThreadId; 2])> {
    if !has_io_uring() {
        return None;
    }
    let pool = Arc::new(Pool::default());
    let threads = ["iot0", "iot1"].map(|name| pool.add_thread(name, Polling::default()).unwrap());
    Some((pool, threads))
}

/// Something that an IOThread serves and no registry knows of: slots need no driver.
fn serve_slots(pool: &Pool, on: ThreadId) -> QueueKey {
    let engine = Arc::new(RamEngine::new(Bytes::from_kib(64), Duration::ZERO).unwrap());
    let device = Device::new(DeviceConfig {
        name: "disk".to_owned(),
        engine,
        queues: 1,
        read_only: false,
        serial: [0; 20],
        write_cache: true,
        limits: Limits::default(),
        schedule: None,
    });
    let setup = SlotsSetup {
        device: Arc::new(device.unwrap()),
        memory: Arc::new(SlotMemory::create().unwrap().0),
        error: eventfd(0, EventfdFlags::CLOEXEC).unwrap(),
        stats: Arc::new(QueueStats::new()),
    };
    pool.start_slots(setup, on).unwrap()
}

/// Moves queue 0 of a device off the first IOThread, while its session ends and another one starts it there anew. `set` has the
/// device's state while it gives it a key, as the session has that ends and the one that begins.
pub(super) fn move_while_a_session_begins(
    host: &dyn MappedHost,
    pool: &Pool,
    [from, to]: [ThreadId; 2],
    set: impl Fn(&dyn Fn() -> QueueKey),
) {
    // Of which kind a queue is plays no part.
    let start = || serve_slots(pool, from);
    let pause = || std::thread::sleep(Duration::from_millis(1));
    let (key, other) = (start(), start());
    set(&|| key);
    let last = std::cell::Cell::new(key);
    let (begun, is_begun) = mpsc::channel();
    let (release, released) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        // The move waits until the IOThread goes on.
        scope.spawn(move || {
            let wait = move |_: &mut Queue| {
                begun.send(()).unwrap();
                released.recv().unwrap();
            };
            pool.edit(other, wait).unwrap();
        });
        is_begun.recv().unwrap();
        let is_busy = |error: &MoveError| matches!(error, MoveError::Busy);
        let moving = scope.spawn(move || when_free(is_busy, || host.assign(0, to)));
        while !pool.is_busy(key) {
            pause();
        }
        set(&|| {
            release.send(()).unwrap();
            while pool.is_busy(key) {
                pause();
            }
            pool.stop(key).unwrap();
            last.set(start());
            last.get()
        });
        moving.join().unwrap().unwrap();
    });
    pool.stop(other).unwrap();
    // What the other session has started is where the device's queue was to go.
    pool.remove_thread(from).unwrap();
    pool.stop(last.get()).unwrap();
}

struct Rig {
    registry: Registry,
    events: broadcast::Receiver<Event>,
    directory: tempfile::TempDir,
}

fn disk() -> DiskName {
    DiskName::new("disk").unwrap()
}

impl Rig {
    /// A disk in RAM with a queue on a thread, which needs a ring: else the test is skipped.
    fn new() -> Option<Self> {
        Self::with(Arc::new(|_, _| ()))
    }

    fn with(report: Arc<Report>) -> Option<Self> {
        if !has_io_uring() {
            return None;
        }
        let registry = Registry::new(report).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let events = registry.events();
        let raw = serde_json::from_value(json!({ "name": "iot0" })).unwrap();
        registry.add_iothread(IoThread::new(raw).unwrap()).unwrap();
        let device = json!({
            "name": "disk",
            "vm": "vm",
            "socket": directory.path().join("disk.sock"),
            "engine": { "type": "ram", "size": 1 << 20 },
        });
        let device = serde_json::from_value(device).unwrap();
        registry.add_device(device, HandedFds::default()).unwrap();
        let mut rig = Self { registry, events, directory };
        let iothread = IoThreadName::new("iot0").unwrap();
        assert_eq!(rig.event(), Event::IothreadAdded { iothread });
        assert_eq!(rig.event(), Event::DeviceAdded { device: disk() });
        Some(rig)
    }

    #[track_caller]
    fn event(&mut self) -> Event {
        let start = Instant::now();
        loop {
            match self.events.try_recv() {
                Ok(event) => return event,
                Err(TryRecvError::Empty) => std::thread::sleep(Duration::from_millis(1)),
                Err(error) => panic!("{error}"),
            }
            assert!(start.elapsed() < Duration::from_secs(20), "there is no event");
        }
    }

    /// A session with a ring that lacks only its kick, and the guest's memory, of 64 KiB.
    fn session(&self) -> (Session<Host>, OwnedFd) {
        let host = self.registry.host(&disk());
        let mut session = Session::new(host.device().clone(), host);
        let guest = give_ring(&mut session, 0);
        (session, guest)
    }

    fn queue_broken() -> Event {
        let reason = "the available index jumps".to_owned();
        Event::QueueBroken { device: disk(), queue: 0, reason }
    }
}

/// Gives a session a ring that lacks only its kick, and the guest's memory, of 64 KiB.
fn give_ring<H: QueueHost>(session: &mut Session<H>, index: u32) -> OwnedFd {
    let guest = memory(0x1_0000);
    let address = VringAddress {
        index,
        descriptors: 1 << 30,
        available: (1 << 30) + 0x1000,
        used: (1 << 30) + 0x2000,
        log: None,
    };
    for (message, fds) in [
        (Message::SetFeatures(features::VERSION_1), vec![]),
        (Message::AddMemReg(region(0)), vec![guest.try_clone().unwrap()]),
        (Message::SetVringNum(VringState { index, num: 16 }), vec![]),
        (Message::SetVringAddr(address), vec![]),
    ] {
        session.handle(message, fds).unwrap();
    }
    guest
}

/// Starts a ring: it is looked at unasked.
fn kick<H: QueueHost>(session: &mut Session<H>, index: u32) {
    let kick = Message::SetVringKick(VringFd { index, fd: true });
    session.handle(kick, vec![eventfd(0, EventfdFlags::CLOEXEC).unwrap()]).unwrap();
}

/// More requests than a ring of 16 entries holds.
fn break_ring(guest: &OwnedFd) {
    rustix::io::pwrite(guest, &1000_u16.to_le_bytes(), 0x1002).unwrap();
}

#[test]
fn front_end_that_comes_and_leaves_is_told_of() {
    let Some(mut rig) = Rig::new() else { return };
    for _ in 0..2 {
        let front = UnixStream::connect(rig.directory.path().join("disk.sock")).unwrap();
        assert_eq!(rig.event(), Event::FrontEndConnected { device: disk() });
        drop(front);
        assert_eq!(rig.event(), Event::FrontEndDisconnected { device: disk() });
    }
    let front = UnixStream::connect(rig.directory.path().join("disk.sock")).unwrap();
    assert_eq!(rig.event(), Event::FrontEndConnected { device: disk() });
    rig.registry.remove_device(&disk()).unwrap();
    assert_eq!(rig.event(), Event::FrontEndDisconnected { device: disk() });
    assert_eq!(rig.event(), Event::DeviceRemoved { device: disk() });
    drop(front);
}

fn qos(value: serde_json::Value) -> Qos {
    Qos::new(serde_json::from_value(value).unwrap()).unwrap()
}

#[test]
fn disk_joins_changes_and_leaves_a_schedule_that_stays_as_long_as_it_is_used() {
    let Some(rig) = Rig::new() else { return };
    let registry = &rig.registry;
    let name = |text: &str| Name::new(text).unwrap();
    let schedule = |text: &str, channels: u32| {
        let raw = json!({ "name": text, "channels": channels, "request_ns": 1_000, "kib_ns": 1 });
        registry.set_schedule(Schedule::new(serde_json::from_value(raw).unwrap()).unwrap())
    };
    let state = || {
        let Snapshot { devices, schedules, .. } = registry.observe().snapshot(Nanos::ZERO);
        let set = devices.into_iter().map(|device| device.qos.map(|qos| qos.settings));
        (set.collect::<Vec<_>>(), schedules)
    };
    assert!(schedule("a", 4).unwrap());
    assert!(schedule("b", 1).unwrap());
    assert!(!schedule("b", 2).unwrap());
    let [a, b] = <[_; 2]>::try_from(state().1).unwrap();
    assert_eq!((a.channels, a.background_bound, a.flush_ns), (4, 5, Nanos::new(1_000)));
    assert_eq!((b.channels, b.background_bound), (2, 3));

    // With a ring that is served, and one that is not.
    let (mut session, _guest) = rig.session();
    let device = json!({
        "name": "born",
        "vm": "vm",
        "socket": rig.directory.path().join("born.sock"),
        "engine": { "type": "ram", "size": 1 << 20 },
        "qos": { "schedule": "b", "weight": 7 },
    });
    registry.add_device(serde_json::from_value(device).unwrap(), HandedFds::default()).unwrap();
    kick(&mut session, 0);
    let promised = qos(json!({ "schedule": "a", "deadline_us": 500, "iops": 100 }));
    registry.set_qos(&disk(), Some(promised.clone()), Admission::Forced).unwrap();
    // What a configuration promises is told of if it cannot be kept.
    assert!(registry.doubtful_promises().is_empty());
    let many = qos(json!({ "schedule": "a", "deadline_us": 500, "iops": 100_000_000 }));
    registry.set_qos(&disk(), Some(many), Admission::Forced).unwrap();
    let told = registry.doubtful_promises();
    assert!(matches!(&told[..], [PlaneError::NotAdmitted { device, .. }] if *device == disk()));
    let limited = qos(json!({ "schedule": "a", "max_iops": 10 }));
    registry.set_qos(&disk(), Some(limited.clone()), Admission::Forced).unwrap();
    assert_eq!(state().0[1], Some((&limited).into()));
    // What is refused changes nothing.
    let unknown =
        registry.set_qos(&disk(), Some(qos(json!({ "schedule": "c" }))), Admission::Forced);
    assert!(matches!(unknown, Err(PlaneError::NoSchedule(c)) if c == name("c")));
    let in_use = registry.remove_schedule(&name("a"));
    assert!(matches!(in_use, Err(PlaneError::ScheduleInUse { device, .. }) if device == disk()));
    assert!(matches!(registry.remove_schedule(&name("c")), Err(PlaneError::NoSchedule(_))));
    assert_eq!(state().0[1], Some((&limited).into()));
    assert_eq!(state().0[0].as_ref().map(|qos| qos.weight), Some(Some(7)));

    let other = qos(json!({ "schedule": "b" }));
    registry.set_qos(&disk(), Some(other), Admission::Forced).unwrap();
    registry.remove_schedule(&name("a")).unwrap();
    registry.set_qos(&disk(), None, Admission::Forced).unwrap();
    registry.set_qos(&disk(), None, Admission::Forced).unwrap();
    assert_eq!(state().0[1], None);
    registry.remove_device(&DiskName::new("born").unwrap()).unwrap();
    registry.remove_schedule(&name("b")).unwrap();
    assert_eq!(state(), (vec![None], vec![]));
}

#[test]
fn queue_never_goes_to_an_iothread_of_another_trust_domain() {
    let Some(rig) = Rig::new() else { return };
    let registry = &rig.registry;
    let iothread = |name: &str, trust: Option<&str>| {
        let raw = json!({ "name": name, "trust": trust });
        registry.add_iothread(IoThread::new(serde_json::from_value(raw).unwrap()).unwrap())
    };
    let name = |text: &str| IoThreadName::new(text).unwrap();
    let is_other = |result: Result<(), PlaneError>| {
        matches!(result, Err(PlaneError::Fault(Fault::OtherTrust(_))))
    };
    iothread("iot1", None).unwrap();
    iothread("b0", Some("b")).unwrap();
    registry.move_queue(&disk(), 0, &name("iot1")).unwrap();
    assert!(is_other(registry.move_queue(&disk(), 0, &name("b0")).map(drop)));
    let all = [Entry::round_robin(name("b0"))];
    assert!(is_other(registry.set_mapping(&disk(), &all)));
    let device = json!({
        "name": "theirs",
        "vm": "theirs",
        "trust": "b",
        "socket": rig.directory.path().join("theirs.sock"),
        "engine": { "type": "ram", "size": 1 << 20 },
    });
    registry.add_device(serde_json::from_value(device).unwrap(), HandedFds::default()).unwrap();
    let theirs = DiskName::new("theirs").unwrap();
    assert_eq!(registry.mapping(&theirs).unwrap().by_queue(), [name("b0")]);
    assert!(is_other(registry.move_queue(&theirs, 0, &name("iot0")).map(drop)));
    // No policy is set that would try.
    let policy = |text: &str| {
        let settings = json!({ "policy": text });
        registry.set_policy(serde_json::from_value(settings).unwrap())
    };
    let refused = policy("round-robin").unwrap_err();
    assert!(matches!(refused, PlaneError::Fault(Fault::PolicyAcrossTrust(_))), "{refused}");
    registry.remove_device(&theirs).unwrap();
    registry.remove_iothread(&name("b0")).unwrap();
    policy("round-robin").unwrap();
    let refused = iothread("b0", Some("b")).unwrap_err();
    assert!(matches!(refused, PlaneError::Fault(Fault::PolicyAcrossTrust(_))), "{refused}");
}

/// What `ctl configuration` prints is read at the next start.
#[test]
fn last_iothread_is_not_removed_and_a_configuration_without_devices_is_read() {
    let Some(rig) = Rig::new() else { return };
    let registry = &rig.registry;
    registry.remove_device(&disk()).unwrap();
    let name = |text: &str| IoThreadName::new(text).unwrap();
    let refused = registry.remove_iothread(&name("iot0")).unwrap_err();
    assert!(matches!(refused, PlaneError::LastIoThread(_)), "{refused}");
    assert!(refused.hint().is_some());
    let gone = registry.remove_iothread(&name("iot1")).unwrap_err();
    assert!(matches!(gone, PlaneError::NoIoThread(_)), "{gone}");
    let raw = serde_json::from_value(json!({ "name": "iot1" })).unwrap();
    registry.add_iothread(IoThread::new(raw).unwrap()).unwrap();
    registry.remove_iothread(&name("iot0")).unwrap();
    let configuration = wire::Configuration::from(&registry.configuration());
    let text = rtvirtio_spec::serve::to_toml(&configuration).unwrap();
    let read = rtvirtio_spec::serve::parse("serve.toml", &text).unwrap();
    assert_eq!(read.iothreads.len(), 1);
}

/// Slots of a process that ends on a disk which does not answer are held until that does.
#[test]
fn queue_whose_slots_cannot_go_along_stays_where_it_is_seen() {
    let Some(rig) = Rig::new() else { return };
    let registry = &rig.registry;
    let raw = serde_json::from_value(json!({ "name": "iot1" })).unwrap();
    registry.add_iothread(IoThread::new(raw).unwrap()).unwrap();
    let to = IoThreadName::new("iot1").unwrap();
    let (mut session, _guest) = rig.session();
    kick(&mut session, 0);
    let host = registry.host(&disk());
    let first = || host.state().first_thread().unwrap();
    let from = first();
    let slots = serve_slots(host.pool(), from);
    let stats = Arc::new(QueueStats::new());
    host.state().clients.push(Client { process: None, key: slots, stats });
    let (begun, is_begun) = mpsc::channel();
    let (release, released) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        // Gone when this ends, even by a panic.
        let release = release;
        let pool = host.pool();
        scope.spawn(move || {
            let hold = |_: &mut Queue| {
                begun.send(()).unwrap();
                released.recv().unwrap();
            };
            pool.edit_drained(slots, hold).unwrap();
        });
        is_begun.recv().unwrap();
        let refused = registry.move_queue(&disk(), 0, &to);
        assert!(matches!(refused, Err(PlaneError::QueueBusy { queue: 0, .. })), "{refused:?}");
        assert_eq!(first(), from);
        let refused = registry.set_mapping(&disk(), &[Entry::round_robin(to.clone())]);
        assert!(matches!(refused, Err(PlaneError::QueueBusy { queue: 0, .. })), "{refused:?}");
        assert_eq!(first(), from);
        release.send(()).unwrap();
    });
    registry.move_queue(&disk(), 0, &to).unwrap();
    assert_ne!(first(), from);
    host.state().clients.clear();
    host.pool().stop(slots).unwrap();
}

#[test]
fn cpus_that_are_not_there_are_refused_with_a_remedy_and_nothing_changes() {
    let Some(rig) = Rig::new() else { return };
    let registry = &rig.registry;
    let before = registry.configuration();
    // No host of the tests has the last that can be named. With others that are there it is refused all the same.
    let own = sched_getaffinity(None).unwrap();
    let own = (0..1023).find(|cpu| own.is_set(*cpu)).unwrap();
    let cpus = [CpuId::new(own as u32), CpuId::new(1023)];
    let new = serde_json::from_value(json!({ "name": "iot1", "cpus": cpus })).unwrap();
    let policy = json!({ "policy": "dynamic", "cpus": cpus });
    for (refused, what) in [
        (registry.add_iothread(IoThread::new(new).unwrap()), "cannot start iothread iot1"),
        (
            registry.pin_iothread(&IoThreadName::new("iot0").unwrap(), &cpus),
            "cannot pin iothread iot0",
        ),
        (registry.set_policy(serde_json::from_value(policy).unwrap()), "cannot set the policy"),
    ] {
        let error = refused.unwrap_err();
        assert!(matches!(error, PlaneError::Cpus { .. }), "{error}");
        let text = error.to_string();
        let words =
            format!("{what}: no IOThread may run on CPU 1023: this process may use CPU {own}");
        assert!(text.starts_with(&words), "{text}");
        assert!(error.hint().unwrap().contains("chcpu --enable"), "{error}");
    }
    assert_eq!(registry.configuration(), before);
}

#[test]
fn resize_to_less_is_refused_unless_it_is_meant() {
    let Some(rig) = Rig::new() else { return };
    let resize =
        |size: u64, shrink| rig.registry.resize_device(&disk(), Some(Bytes::new(size)), shrink);
    let refused = resize(1 << 19, false).unwrap_err();
    assert!(matches!(refused, PlaneError::Shrinks { .. }), "{refused}");
    assert!(refused.hint().unwrap().contains("ctl device resize disk 524288 --shrink"));
    assert_eq!(resize(1 << 20, false).unwrap(), Bytes::new(1 << 20));
    assert_eq!(resize(1 << 21, false).unwrap(), Bytes::new(1 << 21));
    assert_eq!(resize(1 << 19, true).unwrap(), Bytes::new(1 << 19));
}

#[test]
fn size_that_an_image_cannot_have_changes_nothing() {
    let Some(rig) = Rig::new() else { return };
    let image = rig.directory.path().join("image");
    std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
    let device = json!({
        "name": "file",
        "vm": "vm",
        "socket": rig.directory.path().join("file.sock"),
        "engine": { "type": "file", "path": image, "block_size": 512 },
    });
    rig.registry.add_device(serde_json::from_value(device).unwrap(), HandedFds::default()).unwrap();
    let name = DiskName::new("file").unwrap();
    let resize = |size: u64| rig.registry.resize_device(&name, Some(Bytes::new(size)), true);
    assert!(resize(1000).is_err());
    let capacity = rig.registry.host(&name).device().engine().geometry().capacity;
    assert_eq!(capacity, Bytes::new(1 << 20));
    assert_eq!(std::fs::metadata(&image).unwrap().len(), 1 << 20);
    assert_eq!(resize(1 << 19).unwrap(), Bytes::new(1 << 19));
    for (size, hint) in [
        (0, "ctl device remove"),
        (100, "ctl device remove"),
        (513, "ask for 1024"),
        (u64::MAX, "ask for 9223372036854775296"),
    ] {
        let refused = resize(size).unwrap_err();
        assert!(matches!(refused, PlaneError::Fault(Fault::NewSize { .. })), "{refused}");
        assert!(refused.to_string().contains(&format!("a size of {size} bytes")), "{refused}");
        assert!(refused.hint().unwrap().contains(hint), "{:?}", refused.hint());
        assert_eq!(std::fs::metadata(&image).unwrap().len(), 1 << 19);
    }
}

/// What is printed as the configuration can be read again.
#[test]
fn disk_in_memory_does_not_grow_beyond_what_a_configuration_may_say() {
    let Some(rig) = Rig::new() else { return };
    let device = json!({
        "name": "large",
        "vm": "vm",
        "socket": rig.directory.path().join("large.sock"),
        "engine": { "type": "ram", "size": "128G" },
    });
    rig.registry.add_device(serde_json::from_value(device).unwrap(), HandedFds::default()).unwrap();
    let name = DiskName::new("large").unwrap();
    let refused = rig.registry.resize_device(&name, Some(Bytes::new((1 << 40) + 512)), false);
    let refused = refused.unwrap_err();
    assert!(matches!(refused, PlaneError::Fault(Fault::NewSize { .. })), "{refused}");
}

#[test]
fn image_without_a_block_is_refused_with_what_to_do() {
    let Some(rig) = Rig::new() else { return };
    let image = rig.directory.path().join("image");
    for size in [0, 100] {
        std::fs::File::create(&image).unwrap().set_len(size).unwrap();
        let device = json!({
            "name": "file",
            "vm": "vm",
            "socket": rig.directory.path().join("file.sock"),
            "engine": { "type": "file", "path": image },
        });
        let device = serde_json::from_value(device).unwrap();
        let refused = rig.registry.add_device(device, HandedFds::default()).unwrap_err();
        let PlaneError::Io { source, .. } = &refused else { panic!("{refused}") };
        assert!(source.to_string().contains("truncate --size=10G"), "{source}");
    }
}

#[test]
fn socket_that_was_not_handed_over_is_missed_with_what_to_do() {
    let text = r#"
version = 1
[[iothread]]
name = "iot0"
[[device]]
name = "root"
vm = "vm"
socket_activation = "vm-root"
engine = { type = "ram", size = "1M" }
"#;
    let configuration = rtvirtio_spec::serve::parse("serve.toml", text).unwrap();
    let opened = Opened::open(&configuration, &mut Default::default(), None, &|_| ());
    let refused = opened.unwrap_err();
    let PlaneError::Io { what, source } = &refused else { panic!("{refused}") };
    assert_eq!(what, "no socket was handed over for root");
    let remedy = "systemctl start rtvirtio-dataplane@vm-root.socket";
    assert!(source.to_string().contains(remedy), "{source}");

    // Of a device that is added, whoever asks is to hand it over.
    let Some(rig) = Rig::new() else { return };
    let device = json!({
        "name": "root",
        "vm": "vm",
        "socket_activation": "vm-root",
        "engine": { "type": "ram", "size": 1 << 20 },
    });
    let device = serde_json::from_value(device).unwrap();
    let refused = rig.registry.add_device(device, HandedFds::default()).unwrap_err();
    assert!(matches!(refused, PlaneError::Handed(_)), "{refused}");
    assert!(refused.hint().is_some_and(|hint| hint.contains("ctl device add")));
}

#[test]
fn nobody_who_looks_waits_for_an_image_that_is_locked_by_another() {
    use rtvirtio_engine::file::{Access, Lock};

    let Some(rig) = Rig::new() else { return };
    let image = rig.directory.path().join("image");
    std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
    let file = std::fs::File::options().read(true).write(true).open(&image).unwrap();
    let held = Lock::acquire(&Arc::new(file.into()), Access::Write).unwrap();
    let device = |name: &str| {
        let value = json!({
            "name": name,
            "vm": "vm",
            "socket": rig.directory.path().join("late.sock"),
            "engine": { "type": "file", "path": image },
        });
        serde_json::from_value(value).unwrap()
    };
    let is_adding = || {
        let state = rig.registry.core().state();
        state.adding.contains_key(&DiskName::new("late").unwrap())
    };
    std::thread::scope(|scope| {
        let adding = scope.spawn(|| rig.registry.add_device(device("late"), HandedFds::default()));
        while !is_adding() {
            assert!(!adding.is_finished());
            std::thread::yield_now();
        }
        // It is looked at, others are changed, and what it takes is taken.
        for _ in 0..20 {
            assert_eq!(rig.registry.observe().snapshot(Nanos::ZERO).devices.len(), 1);
            rig.registry.resize_device(&disk(), None, false).unwrap();
            let twice = rig.registry.add_device(device("late"), HandedFds::default());
            assert!(matches!(twice, Err(PlaneError::DeviceExists(_))), "{twice:?}");
            let socket = rig.registry.add_device(device("other"), HandedFds::default());
            assert!(matches!(socket, Err(PlaneError::SocketInUse { .. })), "{socket:?}");
        }
        assert!(!adding.is_finished(), "it was to wait for the lock meanwhile");
        let refused = adding.join().unwrap().unwrap_err();
        assert!(refused.to_string().contains("cannot lock the image of late"), "{refused}");
    });
    assert!(!is_adding());
    drop(held);
    rig.registry.add_device(device("late"), HandedFds::default()).unwrap();
}

#[test]
fn descriptor_that_another_disk_has_is_not_served_twice() {
    let Some(rig) = Rig::new() else { return };
    let image = rig.directory.path().join("image");
    let file = std::fs::File::create_new(&image).unwrap();
    file.set_len(1 << 20).unwrap();
    let open = || std::fs::File::options().read(true).write(true).open(&image).unwrap();
    let add = |name: &str, image: std::fs::File| {
        let value = json!({
            "name": name,
            "vm": "vm",
            "socket": rig.directory.path().join(format!("{name}.sock")),
            "engine": { "type": "file", "path": "/handed", "direct": false },
        });
        let handed = HandedFds { image: Some(image.into()), ..HandedFds::default() };
        rig.registry.add_device(serde_json::from_value(value).unwrap(), handed)
    };
    let first = open();
    add("a", first.try_clone().unwrap()).unwrap();
    let source = |error: PlaneError| match error {
        PlaneError::Io { source, .. } => source.to_string(),
        other => panic!("{other}"),
    };
    let twice = source(add("b", first.try_clone().unwrap()).unwrap_err());
    assert!(twice.contains("the very descriptor"), "{twice}");
    let other = source(add("b", open()).unwrap_err());
    assert!(other.contains("another process"), "{other}");
    rig.registry.remove_device(&DiskName::new("a").unwrap()).unwrap();
    add("b", first).unwrap();
}

#[test]
fn kick_that_is_no_eventfd_pipe_or_socket_is_refused() {
    let Some(rig) = Rig::new() else { return };
    let (mut session, _guest) = rig.session();
    let kick = || Message::SetVringKick(VringFd { index: 0, fd: true });
    let refused = session.handle(kick(), vec![memory(1)]).unwrap_err();
    assert_eq!(refused, Refused::Start { index: 0, source: StartError::Kick });
    session.handle(kick(), vec![rustix::pipe::pipe().unwrap().0]).unwrap();
}

/// As where a guest's memory is its own and not shared: its driver writes what nobody else sees.
#[test]
fn driver_that_kicks_an_empty_ring_is_told_of_once_on_both_sides() {
    let said = Arc::new(std::sync::Mutex::new(Vec::new()));
    let rig = Rig::with({
        let said = Arc::clone(&said);
        Arc::new(move |device, notice| match notice {
            Notice::EmptyRing { queue } => {
                said.lock().unwrap().push((device.to_owned(), queue));
            }
            other => panic!("{other:?}"),
        })
    });
    let Some(rig) = rig else { return };
    let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    for round in 1..=2 {
        let (mut session, _guest) = rig.session();
        let (kick, error) = (event(), event());
        let with_fd = VringFd { index: 0, fd: true };
        let theirs = |fd: &OwnedFd| vec![fd.try_clone().unwrap()];
        session.handle(Message::SetVringErr(with_fd), theirs(&error)).unwrap();
        session.handle(Message::SetVringKick(with_fd), theirs(&kick)).unwrap();
        session.handle(Message::SetVringEnable { index: 0, enabled: true }, vec![]).unwrap();
        // Front ends kick once when they start a ring.
        rustix::io::write(&kick, &1_u64.to_ne_bytes()).unwrap();
        std::thread::sleep(EMPTY_TIME + Duration::from_millis(500));
        assert_eq!(said.lock().unwrap().len(), round - 1);
        let start = Instant::now();
        while said.lock().unwrap().len() < round {
            rustix::io::write(&kick, &1_u64.to_ne_bytes()).unwrap();
            std::thread::sleep(Duration::from_millis(10));
            assert!(start.elapsed() < Duration::from_secs(20), "nobody is told");
        }
        while rustix::io::read(&error, &mut [0; 8]).is_err() {
            assert!(start.elapsed() < Duration::from_secs(20), "the front end is not told");
        }
    }
    assert_eq!(*said.lock().unwrap(), vec![("disk".to_owned(), 0); 2]);
}

#[test]
fn ring_that_breaks_is_told_of_once() {
    let Some(mut rig) = Rig::new() else { return };
    let (mut session, guest) = rig.session();
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    session.handle(Message::SetProtocolFeatures(TOLD_OF_CHANGES), vec![]).unwrap();
    session.handle(Message::SetBackendReqFd, vec![theirs.into()]).unwrap();
    break_ring(&guest);
    kick(&mut session, 0);
    assert_eq!(rig.event(), Rig::queue_broken());
    let status = session.handle(Message::GetStatus, vec![]);
    assert!(matches!(status, Ok(Answer::U64(64))), "{status:?}");
    // The front end hears that there is something new, and of what kind when it asks.
    ours.read_exact(&mut [0; HEADER_SIZE]).unwrap();
    session.handle(Message::SetStatus(0), vec![]).unwrap();
    let status = session.handle(Message::GetStatus, vec![]);
    assert!(matches!(status, Ok(Answer::U64(0))), "{status:?}");
    // Neither the watchdog nor its end tells again.
    std::thread::sleep(Duration::from_millis(250));
    drop(session);
    assert_eq!(rig.events.try_recv(), Err(TryRecvError::Empty));
}

#[test]
fn ring_that_breaks_and_stops_at_once_is_told_of() {
    let Some(mut rig) = Rig::new() else { return };
    for _ in 0..20 {
        let (mut session, guest) = rig.session();
        break_ring(&guest);
        kick(&mut session, 0);
        let host = rig.registry.host(&disk());
        while !host.queues.stats[0].is_broken() {
            std::hint::spin_loop();
        }
        drop(session);
        assert_eq!(rig.event(), Rig::queue_broken());
    }
    assert_eq!(rig.events.try_recv(), Err(TryRecvError::Empty));
}
