//! One device's rings on the pool: what its session starts, stops and changes, and where each
//! queue goes.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rtvirtio_engine::file::{Lock, LockError, Lockable};
use rtvirtio_engine::nvme::{self, NvmeError};
use rtvirtio_spec::control::Event;
use rtvirtio_spec::serve::FixedBuffers as Wish;
use rtvirtio_units::{Bytes, DiskName};
use rustix::io::Errno;
use tokio::sync::broadcast;

use super::mapped::MappedHost;
use super::{Notice, Report};
use crate::call::{self, Call, Caller};
use crate::device::Device;
use crate::fixed::FixedBuffers;
use crate::key::QueueKey;
use crate::pool::{MoveError, Pool, PoolError, ThreadId};
use crate::queue::{Broken, Queue, QueueSetup};
use crate::schedule::Member;
use crate::stats::QueueStats;
use rtvirtio_vhost::Backend as _;
use rtvirtio_vhost::session::{self, Change, QueueHost, StartError, StoppedQueue};
use rtvirtio_virtq::memory::{Memory, Region};

/// A client that is served.
pub(super) struct Client {
    pub(super) process: Option<i32>,
    pub(super) key: QueueKey,
    pub(super) stats: Arc<QueueStats>,
}

/// A driver that has kicked for nothing so long will not be served. One that is served has its request taken
/// within microseconds.
pub(super) const EMPTY_TIME: Duration = Duration::from_secs(1);
/// How long to try to lock an image, and how often.
const LOCK_TIME: Duration = Duration::from_secs(2);
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// What a device's rings are served with.
pub(super) struct HostSetup {
    pub(super) name: DiskName,
    pub(super) pool: Arc<Pool>,
    pub(super) device: Arc<Device>,
    pub(super) wish: Wish,
    /// The image to lock while rings run, if that is when it is locked.
    pub(super) image: Option<Lockable>,
    pub(super) events: broadcast::Sender<Event>,
    pub(super) report: Arc<Report>,
}

/// The rings of one device.
pub(crate) struct Host {
    setup: HostSetup,
    pub(super) stats: Vec<Arc<QueueStats>>,
    /// The process of the front end that is connected; 0: none, or not known.
    peer: AtomicI32,
    /// Clients that have broken their slots.
    pub(super) broken_clients: AtomicU64,
    /// Held by whoever is about to lock the image.
    locking: Mutex<()>,
    /// Held by whoever registers memory, which takes as long as the guest is large.
    registering: Mutex<()>,
    // Nobody waits for anybody while holding it: whoever looks at the device takes it.
    state: Mutex<State>,
}

pub(super) struct State {
    queues: Vec<Place>,
    /// Processes that use it by slots.
    pub(super) clients: Vec<Client>,
    /// Queues and clients that are about to be here.
    starting: u32,
    /// Rises when the disk gets another place in a schedule.
    pub(super) members: u64,
    /// What was registered last, and what for.
    fixed: Option<(Vec<Arc<Region>>, Arc<FixedBuffers>)>,
    lock: Option<Lock>,
    /// Whether it was said that memory is not registered.
    said: bool,
}

/// Where a queue is served.
struct Place {
    thread: ThreadId,
    /// While it runs.
    key: Option<QueueKey>,
    /// Whether a session is about to start it there.
    starting: bool,
    /// Whether it was told that its driver broke it.
    told: bool,
    /// Whether anything has come of its driver's kicks.
    empty: Empty,
}

/// What a driver's kicks have come to since its queue runs.
#[derive(Debug, Clone, Copy)]
enum Empty {
    /// Nothing was asked yet: kicks and requests when the queue was started.
    Idle(u64, u64),
    /// It has kicked, and there was nothing in its ring since then.
    Since(Instant, u64),
    /// There was a request, or it was told.
    Settled,
}

impl Empty {
    /// Whether it is time to tell that kicks come to nothing.
    fn look(&mut self, (kicks, requests): (u64, u64)) -> bool {
        match *self {
            Self::Idle(_, before) | Self::Since(_, before) if requests != before => {
                *self = Self::Settled;
            }
            // QEMU kicks each ring once itself when it starts it (hw/block/vhost-user-blk.c).
            Self::Idle(before, requests) if kicks > before + 1 => {
                *self = Self::Since(Instant::now(), requests);
            }
            Self::Since(at, _) if at.elapsed() >= EMPTY_TIME => {
                *self = Self::Settled;
                return true;
            }
            _ => {}
        }
        false
    }
}

impl State {
    /// The IOThread of queue 0, now and of its next session.
    pub(super) fn first_thread(&self) -> Option<ThreadId> {
        self.queues.first().map(|place| place.thread)
    }

    /// Whether anything is served, or about to be.
    fn is_used(&self) -> bool {
        self.starting > 0
            || !self.clients.is_empty()
            || self.queues.iter().any(|place| place.key.is_some())
    }
}

/// Whether memory has these very mappings; others may get the addresses of those that are gone.
fn has(memory: &Memory, regions: &[Arc<Region>]) -> bool {
    memory.regions().len() == regions.len()
        && memory.regions().zip(regions).all(|(a, b)| Arc::ptr_eq(a, b))
}

impl Host {
    pub(super) fn new(setup: HostSetup, threads: Vec<ThreadId>) -> Self {
        let stats = threads.iter().map(|_| Arc::new(QueueStats::new())).collect();
        let empty = Empty::Settled;
        let place = |thread| Place { thread, key: None, starting: false, told: false, empty };
        let queues = threads.into_iter().map(place).collect();
        let (clients, starting, members) = (Vec::new(), 0, 0);
        let (fixed, lock, said) = (None, None, false);
        let state = State { queues, clients, starting, members, fixed, lock, said };
        Self {
            setup,
            stats,
            peer: AtomicI32::new(0),
            broken_clients: AtomicU64::new(0),
            locking: Mutex::default(),
            registering: Mutex::default(),
            state: Mutex::new(state),
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn device(&self) -> &Arc<Device> {
        &self.setup.device
    }

    pub(super) fn pool(&self) -> &Pool {
        &self.setup.pool
    }

    /// The key of a queue that runs.
    pub(super) fn key(&self, index: u16) -> Option<QueueKey> {
        self.state().queues.get(usize::from(index))?.key
    }

    /// The queues that run.
    pub(super) fn keys(&self) -> Vec<Option<QueueKey>> {
        self.state().queues.iter().map(|place| place.key).collect()
    }

    fn assign_queue(&self, index: u16, to: ThreadId) -> Result<u64, MoveError> {
        let key = {
            let mut state = self.state();
            let Some(queue) = state.queues.get_mut(usize::from(index)) else {
                return Err(PoolError::NoQueue.into());
            };
            if queue.starting {
                return Err(MoveError::Busy);
            }
            // A session that starts it from now on does so there.
            let Some(key) = queue.key else {
                queue.thread = to;
                return Ok(0);
            };
            key
        };
        let pause = match self.setup.pool.move_queue(key, to) {
            Ok(pause) => pause.as_nanos() as u64,
            // It has stopped in the meantime.
            Err(MoveError::Pool(PoolError::NoQueue)) => 0,
            Err(error) => return Err(error),
        };
        let mut state = self.state();
        let queue = &mut state.queues[usize::from(index)];
        // Another session may have started it where it was before.
        if queue.starting || queue.key.is_some_and(|now| now != key) {
            return Err(MoveError::Busy);
        }
        queue.thread = to;
        Ok(pause)
    }

    /// Gives the disk another place in a schedule, or none, where queues that start from now on are
    /// served. Those that run, and are to go there by [`Self::join`].
    pub(super) fn replace_member(&self, member: Option<Member>) -> Vec<QueueKey> {
        // A queue that starts meanwhile is among these, or sees that there is a new place.
        let mut state = self.state();
        state.members += 1;
        let before = self.device().set_member(member);
        if let Some(before) = before {
            before.lift_limit();
        }
        let queues = state.queues.iter().filter_map(|place| place.key);
        queues.chain(state.clients.iter().map(|client| client.key)).collect()
    }

    /// Has queues go to the disk's place, each when what it has in flight has ended. The place that
    /// the last one leaves is nobody's then.
    pub(super) fn join(&self, queues: &[QueueKey]) {
        for &key in queues {
            // One that has stopped in the meantime starts there.
            let _ = self.setup.pool.edit_drained(key, Queue::join);
        }
    }

    /// The memory, registered; the same as before if it is the same memory.
    fn fixed(&self, memory: &Memory) -> Result<Option<Arc<FixedBuffers>>, StartError> {
        if self.setup.wish == Wish::Off || self.device().engine().file().is_none() {
            return Ok(None);
        }
        let _one = self.registering.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((regions, fixed)) = &self.state().fixed
            && has(memory, regions)
        {
            return Ok(Some(Arc::clone(fixed)));
        }
        // All of it only where the operator says so: a front end may share more than it uses.
        let registered = FixedBuffers::register(memory, self.setup.wish != Wish::On);
        let mut state = self.state();
        match registered {
            Ok(None) => Ok(None),
            Ok(Some(fixed)) => {
                let fixed = Arc::new(fixed);
                let regions = memory.regions().cloned().collect();
                state.fixed = Some((regions, Arc::clone(&fixed)));
                Ok(Some(fixed))
            }
            Err(error) => {
                let error = Errno::from_io_error(&error).unwrap_or(Errno::NOMEM);
                if self.setup.wish == Wish::On {
                    return Err(StartError::Register(error));
                }
                // What is registered for less memory only costs locked memory now.
                state.fixed = None;
                let said = std::mem::replace(&mut state.said, true);
                drop(state);
                if !said {
                    (self.setup.report)(self.device().name(), Notice::NoFixedBuffers(error));
                }
                Ok(None)
            }
        }
    }

    /// Starts a ring, or a client, with the image locked.
    pub(super) fn with_image<T>(
        &self,
        start: impl FnOnce() -> Result<T, StartError>,
    ) -> Result<T, StartError> {
        self.state().starting += 1;
        let started = self.lock_image().and_then(|()| start());
        self.state().starting -= 1;
        // If it was not started, what was taken for it goes.
        self.detach_queue();
        started
    }

    /// Locks the image with the first ring or client.
    fn lock_image(&self) -> Result<(), StartError> {
        let Some(image) = &self.setup.image else { return Ok(()) };
        let _one = self.locking.lock().unwrap_or_else(PoisonError::into_inner);
        if self.state().lock.is_none() {
            let lock = lock_with_retry(image).map_err(|_| StartError::Locked)?;
            self.state().lock = Some(lock);
        }
        Ok(())
    }

    fn start_locked(&self, setup: session::QueueSetup) -> Result<u16, StartError> {
        let index = setup.index;
        if setup.kick.as_ref().is_some_and(|kick| !call::is_signal(kick)) {
            return Err(StartError::Kick);
        }
        let caller = self.device().caller();
        let call =
            setup.call.map(|fd| Call::new(fd, caller)).transpose().map_err(|_| StartError::Call)?;
        let buffers = self.fixed(&setup.memory)?;
        let setup = QueueSetup {
            device: Arc::clone(self.device()),
            size: setup.ring.config().size,
            memory: setup.memory,
            buffers,
            ring: setup.ring,
            kick: setup.kick,
            call,
            error: setup.error,
            enabled: setup.enabled,
            stats: Arc::clone(self.stats.get(usize::from(index)).ok_or(StartError::Full)?),
        };
        let (thread, members) = {
            let mut state = self.state();
            let members = state.members;
            let queue = state.queues.get_mut(usize::from(index)).ok_or(StartError::Full)?;
            queue.starting = true;
            (queue.thread, members)
        };
        let (kicks, requests) = setup.stats.kicks_and_started();
        // The IOThread may be busy for a while.
        let started = self.setup.pool.start(setup, thread);
        let mut state = self.state();
        let is_outdated = state.members != members;
        let queue = state.queues.get_mut(usize::from(index)).ok_or(StartError::Full)?;
        queue.starting = false;
        let key = started.map_err(|_| StartError::Full)?;
        queue.key = Some(key);
        queue.told = false;
        queue.empty = Empty::Idle(kicks, requests);
        drop(state);
        if is_outdated {
            self.join(&[key]);
        }
        Ok(index)
    }

    /// Changes the disk's size, or looks at it again; tells the front end. What is cut off has nothing in
    /// flight then.
    pub(super) fn resize(&self, size: Option<Bytes>) -> std::io::Result<Bytes> {
        let engine = self.device().engine();
        if let Some(size) = size.filter(|&size| size < engine.geometry().capacity) {
            engine.refuse_beyond(size);
            let state = self.state();
            let queues = state.queues.iter().filter_map(|place| place.key);
            let keys: Vec<_> =
                queues.chain(state.clients.iter().map(|client| client.key)).collect();
            drop(state);
            for key in keys {
                // One that has stopped in the meantime has nothing in flight.
                let _ = self.setup.pool.edit_drained(key, |_| ());
            }
        }
        self.device().resize(size).inspect_err(|_| {
            // It ends where it did: what was refused changes nothing.
            let _ = engine.resize(None);
        })
    }

    fn tell(&self, event: Event) {
        // Nobody may be listening.
        let _ = self.setup.events.send(event);
    }

    fn tell_broken(&self, index: usize, broken: Broken) {
        let device = self.setup.name.clone();
        let reason = broken.to_string();
        self.tell(Event::QueueBroken { device, queue: index as u16, reason });
        // The device status has changed (virtio 1.2, 2.1.2).
        let _ = self.device().link().notify();
    }

    /// Unlocks it and lets the memory go with the last one.
    pub(super) fn detach_queue(&self) {
        let mut state = self.state();
        if !state.is_used() {
            state.lock = None;
            state.fixed = None;
        }
    }
}

/// Locks an image. Requests of a server that was killed hold its lock until they end, and a
/// guest that migrates is here a moment before the other side has let go.
pub(super) fn lock_with_retry(image: &Lockable) -> Result<Lock, LockError> {
    let began = Instant::now();
    loop {
        match image.lock() {
            Err(_) if began.elapsed() < LOCK_TIME => std::thread::sleep(LOCK_PAUSE),
            result => return result,
        }
    }
}

/// Opens a namespace's block device to lock it, with the same patience.
pub(super) fn open_exclusive_with_retry(
    generic: &OwnedFd,
    exclusive: bool,
) -> Result<OwnedFd, NvmeError> {
    let began = Instant::now();
    loop {
        match nvme::claim(generic, exclusive) {
            Err(NvmeError::Claim { source: Errno::BUSY, .. }) if began.elapsed() < LOCK_TIME => {
                std::thread::sleep(LOCK_PAUSE);
            }
            result => return result,
        }
    }
}

/// Changes a queue that is served. `register` registers memory with the rings.
pub(super) fn change(
    pool: &Pool,
    key: QueueKey,
    change: Change,
    caller: &Arc<Caller>,
    register: impl FnOnce(&Memory) -> Result<Option<Arc<FixedBuffers>>, StartError>,
) -> Result<(), StartError> {
    let done = match change {
        Change::Enabled(enabled) => pool.edit(key, move |q| q.set_enabled(enabled)),
        // A fd that cannot be used is none: the driver then looks for itself.
        Change::Call(call) => {
            let call = call.and_then(|fd| Call::new(fd, caller).ok());
            pool.edit(key, move |q| q.set_call(call))
        }
        Change::Error(error) => {
            let error = error.and_then(|fd| Call::new(fd, caller).ok());
            pool.edit(key, move |q| q.set_error(error))
        }
        Change::Memory(memory) => {
            let buffers = register(&memory)?;
            pool.edit(key, move |q| {
                let _ = q.set_memory(memory, buffers);
            })
        }
        Change::Replaced(memory) => {
            let buffers = register(&memory)?;
            pool.edit_drained(key, |q| {
                let _ = q.set_memory(memory, buffers);
            })
        }
        Change::Log(log) => pool.edit(key, move |q| q.set_log(log)),
    };
    // It stopped in the meantime: there is nothing to change.
    let _ = done;
    Ok(())
}

impl MappedHost for Host {
    /// With queue 0 go the slots of processes.
    fn assign(&self, index: u16, to: ThreadId) -> Result<u64, MoveError> {
        let pause = self.assign_queue(index, to)?;
        // Those that start from now on do so there.
        let clients: Vec<_> = match index {
            0 => self.state().clients.iter().map(|client| client.key).collect(),
            _ => Vec::new(),
        };
        for key in clients {
            match self.setup.pool.move_queue(key, to) {
                Ok(_) | Err(MoveError::Pool(PoolError::NoQueue)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(pause)
    }

    fn peer(&self) -> Option<i32> {
        Some(self.peer.load(Relaxed)).filter(|&pid| pid > 0)
    }

    fn report_broken_queues(&self) {
        let Ok(mut state) = self.state.try_lock() else { return };
        for (index, (place, stats)) in state.queues.iter_mut().zip(&self.stats).enumerate() {
            let Some(key) = place.key else { continue };
            if place.empty.look(stats.kicks_and_started()) {
                // QEMU says it in its log, too.
                self.setup.pool.tell_error(key);
                (self.setup.report)(
                    self.device().name(),
                    Notice::EmptyRing { queue: index as u16 },
                );
            }
        }
        for (index, place) in state.queues.iter_mut().enumerate().filter(|(_, p)| !p.told) {
            if let Some(broken) = place.key.and_then(|key| self.setup.pool.broken(key)) {
                place.told = true;
                self.tell_broken(index, broken);
            }
        }
    }
}

impl QueueHost for Host {
    type Key = u16;

    fn start(&self, setup: session::QueueSetup) -> Result<u16, StartError> {
        self.with_image(|| self.start_locked(setup))
    }

    fn stop(&self, index: u16) -> StoppedQueue {
        let key = self.key(index);
        let queue = key.and_then(|key| self.setup.pool.stop(key).ok());
        let broken = queue.as_ref().and_then(|queue| queue.broken());
        if let Some(place) = self.state().queues.get_mut(usize::from(index)) {
            place.key = None;
            if let Some(broken) = broken
                && !std::mem::replace(&mut place.told, true)
            {
                self.tell_broken(index.into(), broken);
            }
        }
        self.detach_queue();
        let base = queue.map_or(0, |queue| queue.base());
        StoppedQueue { base, broken: broken.is_some() }
    }

    fn update(&self, index: u16, change: Change) -> Result<(), StartError> {
        let Some(key) = self.key(index) else { return Ok(()) };
        let register = |memory: &Memory| self.fixed(memory);
        self::change(&self.setup.pool, key, change, self.device().caller(), register)
    }

    fn is_broken(&self, index: u16) -> bool {
        self.key(index).is_some_and(|key| self.setup.pool.broken(key).is_some())
    }

    fn set_connected(&self, connected: bool, peer: Option<i32>) {
        self.peer.store(peer.unwrap_or(0), Relaxed);
        let device = self.setup.name.clone();
        self.tell(match connected {
            true => Event::FrontEndConnected { device },
            false => Event::FrontEndDisconnected { device },
        });
    }
}

#[cfg(test)]
mod tests {
    use rtvirtio_engine::file::{Aio, FileConfig, FileEngine, FileSource};

    use super::*;
    use crate::device::{DeviceConfig, Limits};
    use crate::plane::tests::{move_while_a_session_begins, pool_with_threads};
    use rtvirtio_vhost::session::testing::{memory, region};

    /// A device without queues on threads, whose image is locked by sessions.
    fn host(image: &std::path::Path) -> Host {
        host_with(image, Wish::Off, Arc::new(|_, _| ()))
    }

    fn host_with(image: &std::path::Path, wish: Wish, report: Arc<Report>) -> Host {
        let engine = FileEngine::open(FileConfig {
            source: FileSource::Path(image.to_owned()),
            direct: false,
            read_only: false,
            explicit_raw: false,
            block_size: None,
            aio: Aio::IoUring,
        });
        let engine = Arc::new(engine.unwrap());
        let device = Device::new(DeviceConfig {
            name: "disk".to_owned(),
            engine: Arc::clone(&engine) as Arc<dyn rtvirtio_engine::Engine>,
            queues: 1,
            read_only: false,
            serial: [0; 20],
            write_cache: true,
            limits: Limits::default(),
            schedule: None,
        });
        let device = Arc::new(device.unwrap());
        let setup = HostSetup {
            name: DiskName::new("disk").unwrap(),
            pool: Arc::default(),
            device,
            wish,
            image: Some(engine.lockable()),
            events: broadcast::Sender::new(1),
            report,
        };
        Host::new(setup, Vec::new())
    }

    #[test]
    fn move_while_a_session_begins_is_of_its_queue_and_of_no_other() {
        let image = image();
        let (pool, threads) = pool_with_threads();
        let mut setup = host(image.path()).setup;
        setup.pool = Arc::clone(&pool);
        let host = Host::new(setup, vec![threads[0]]);
        move_while_a_session_begins(&host, &pool, threads, |key| {
            let mut state = host.state();
            state.queues[0].key = Some(key());
        });
    }

    #[test]
    fn session_waits_for_image_that_another_server_lets_go() {
        let image = tempfile::NamedTempFile::new().unwrap();
        image.as_file().set_len(1 << 20).unwrap();
        let (old, new) = (host(image.path()), host(image.path()));
        old.lock_image().unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| new.lock_image());
            std::thread::sleep(Duration::from_millis(200));
            assert!(!waiting.is_finished());
            old.detach_queue();
            assert_eq!(waiting.join().unwrap(), Ok(()));
        });
        // And nobody waits for ever.
        assert_eq!(old.lock_image(), Err(StartError::Locked));
    }

    fn image() -> tempfile::NamedTempFile {
        let image = tempfile::NamedTempFile::new().unwrap();
        image.as_file().set_len(1 << 20).unwrap();
        image
    }

    fn mapped() -> Arc<Region> {
        Arc::new(Region::map(region(0), memory(0x1_0000)).unwrap())
    }

    #[test]
    fn memory_is_registered_again_for_another_mapping_and_only_then() {
        let image = image();
        let host = host_with(image.path(), Wish::On, Arc::new(|_, _| ()));
        let one = mapped();
        let memory = Memory::new(vec![Arc::clone(&one)]).unwrap();
        let first = host.fixed(&memory).unwrap().unwrap();
        let logged = host.fixed(&memory.with_log(None)).unwrap().unwrap();
        assert!(Arc::ptr_eq(&first, &logged));
        // The same mapping may not be taken for another one that got its address: it is held.
        assert_eq!(Arc::strong_count(&one), 3);
        let other = Memory::new(vec![mapped()]).unwrap();
        let second = host.fixed(&other).unwrap().unwrap();
        assert!(!Arc::ptr_eq(&first, &second));
        assert!(!has(&other, &[one]));
    }

    /// Memory of which the kernel pins no page: its file is shorter than the mapping.
    fn unpinnable() -> Memory {
        let file = memory(2 << 20);
        rustix::io::pwrite(&file, &vec![1; 2 << 20], 0).unwrap();
        let all = rtvirtio_virtq::memory::RegionSpec { size: 2 << 20, ..region(0) };
        let region = Region::map(all, file.try_clone().unwrap()).unwrap();
        rustix::fs::ftruncate(&file, 0).unwrap();
        Memory::new(vec![Arc::new(region)]).unwrap()
    }

    #[test]
    fn memory_that_cannot_be_registered_is_said_once_if_it_need_not_be() {
        let image = image();
        let said = Arc::new(Mutex::new(Vec::new()));
        let report = {
            let said = Arc::clone(&said);
            move |_: &str, notice: Notice<'_>| match notice {
                Notice::NoFixedBuffers(error) => said.lock().unwrap().push(error),
                other => panic!("{other:?}"),
            }
        };
        let auto = host_with(image.path(), Wish::Auto, Arc::new(report.clone()));
        for _ in 0..3 {
            assert!(auto.fixed(&unpinnable()).unwrap().is_none());
        }
        assert_eq!(*said.lock().unwrap(), [Errno::FAULT]);
        let on = host_with(image.path(), Wish::On, Arc::new(report));
        let error = on.fixed(&unpinnable()).map(|_| ()).unwrap_err();
        assert_eq!(error, StartError::Register(Errno::FAULT));
        assert_eq!(said.lock().unwrap().len(), 1);
    }
}
