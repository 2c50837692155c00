//! One device's rings on the pool: what its session starts, stops and changes, and where each
//! queue goes.

use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rtvirtio_engine::file::{Lock, LockError, Lockable};
use rtvirtio_engine::nvme::{self, NvmeError};
use rtvirtio_spec::control::Event;
use rtvirtio_spec::serve::FixedBuffers as Wish;
use rtvirtio_units::{Bytes, DiskName};
use rustix::io::Errno;
use tokio::sync::broadcast;

use super::mapped::{MappedHost, MappedQueues, Place};
use super::{Notice, Report};
use crate::call::{self, Call, Caller};
use crate::device::Device;
use crate::fixed::FixedBuffers;
use crate::key::QueueKey;
use crate::pool::{MoveError, Pool, PoolError, ThreadId};
use crate::queue::{Queue, QueueSetup};
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
    pub(super) queues: MappedQueues<State>,
    device: Arc<Device>,
    wish: Wish,
    /// The image to lock while rings run, if that is when it is locked.
    image: Option<Lockable>,
    /// Clients that have broken their slots.
    pub(super) broken_clients: AtomicU64,
    /// Held by whoever is about to lock the image.
    locking: Mutex<()>,
    /// Held by whoever registers memory, which takes as long as the guest is large.
    registering: Mutex<()>,
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

impl AsMut<Vec<Place>> for State {
    fn as_mut(&mut self) -> &mut Vec<Place> {
        &mut self.queues
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
        let HostSetup { name, pool, device, wish, image, events, report } = setup;
        let (queues, clients, starting, members) = (Place::on(threads), Vec::new(), 0, 0);
        let (fixed, lock, said) = (None, None, false);
        let state = State { queues, clients, starting, members, fixed, lock, said };
        Self {
            queues: MappedQueues::new(name, pool, events, report, state),
            device,
            wish,
            image,
            broken_clients: AtomicU64::new(0),
            locking: Mutex::default(),
            registering: Mutex::default(),
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.queues.lock()
    }

    pub(super) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(super) fn pool(&self) -> &Pool {
        self.queues.pool()
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
            let _ = self.pool().edit_drained(key, Queue::join);
        }
    }

    /// The memory, registered; the same as before if it is the same memory.
    fn fixed(&self, memory: &Memory) -> Result<Option<Arc<FixedBuffers>>, StartError> {
        if self.wish == Wish::Off || self.device().engine().file().is_none() {
            return Ok(None);
        }
        let _one = self.registering.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((regions, fixed)) = &self.state().fixed
            && has(memory, regions)
        {
            return Ok(Some(Arc::clone(fixed)));
        }
        // All of it only where the operator says so: a front end may share more than it uses.
        let registered = FixedBuffers::register(memory, self.wish != Wish::On);
        let mut state = self.state();
        match registered {
            // Memory that the front end has taken back is not to stay mapped and pinned for this.
            Ok(None) => {
                state.fixed = None;
                Ok(None)
            }
            Ok(Some(fixed)) => {
                let fixed = Arc::new(fixed);
                let regions = memory.regions().cloned().collect();
                state.fixed = Some((regions, Arc::clone(&fixed)));
                Ok(Some(fixed))
            }
            Err(error) => {
                let error = Errno::from_io_error(&error).unwrap_or(Errno::NOMEM);
                if self.wish == Wish::On {
                    return Err(StartError::Register(error));
                }
                // What is registered for less memory only costs locked memory now.
                state.fixed = None;
                let said = std::mem::replace(&mut state.said, true);
                drop(state);
                if !said {
                    self.queues.report(Notice::NoFixedBuffers(error));
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
        let Some(image) = &self.image else { return Ok(()) };
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
            stats: Arc::clone(self.queues.stats.get(usize::from(index)).ok_or(StartError::Full)?),
        };
        let members = self.state().members;
        let key = self.queues.start(index, |thread| self.pool().start(setup, thread))?;
        // Whoever gives the disk another place from now on finds the queue among those that run.
        if self.state().members != members {
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
                let _ = self.pool().edit_drained(key, |_| ());
            }
        }
        self.device().resize(size).inspect_err(|_| {
            // It ends where it did: what was refused changes nothing.
            let _ = engine.resize(None);
        })
    }

    /// Tells the front end of a queue that its driver broke, if one is: the device status has changed (virtio 1.2, 2.1.2).
    fn notify_if(&self, is_broken: bool) {
        if is_broken {
            let _ = self.device().link().notify();
        }
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
        let pause = self.queues.assign(index, to)?;
        // Those that start from now on do so there.
        let clients: Vec<_> = match index {
            0 => self.state().clients.iter().map(|client| client.key).collect(),
            _ => Vec::new(),
        };
        for key in clients {
            match self.pool().move_queue(key, to) {
                Ok(_) | Err(MoveError::Pool(PoolError::NoQueue)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(pause)
    }

    fn peer(&self) -> Option<i32> {
        self.queues.peer()
    }

    fn report_broken_queues(&self) {
        self.notify_if(self.queues.report_broken());
    }

    fn free_caller(&self) {
        self.device().caller().free_thread();
    }
}

impl QueueHost for Host {
    type Key = u16;

    fn start(&self, setup: session::QueueSetup) -> Result<u16, StartError> {
        self.with_image(|| self.start_locked(setup))
    }

    fn stop(&self, index: u16) -> StoppedQueue {
        let (stopped, is_news) = self.queues.stop(index);
        self.notify_if(is_news);
        self.detach_queue();
        stopped
    }

    fn update(&self, index: u16, change: Change) -> Result<(), StartError> {
        let Some(key) = self.queues.key(index) else { return Ok(()) };
        let register = |memory: &Memory| self.fixed(memory);
        self::change(self.pool(), key, change, self.device().caller(), register)
    }

    fn is_broken(&self, index: u16) -> bool {
        self.queues.is_broken(index)
    }

    fn set_connected(&self, connected: bool, peer: Option<i32>) {
        self.queues.set_connected(connected, peer);
    }
}

#[cfg(test)]
mod tests {
    use rtvirtio_engine::file::{Aio, FileConfig, FileEngine, FileSource};
    use rtvirtio_engine::testing::has_io_uring;

    use super::*;
    use crate::device::{DeviceConfig, Limits};
    use crate::plane::tests::{move_while_a_session_begins, pool_with_threads};
    use rtvirtio_vhost::session::testing::{memory, region};

    /// A device without queues on threads, whose image is locked by sessions.
    fn host(image: &std::path::Path) -> Host {
        host_with(image, Wish::Off, Arc::new(|_, _| ()))
    }

    fn host_with(image: &std::path::Path, wish: Wish, report: Arc<Report>) -> Host {
        Host::new(setup(image, wish, report), Vec::new())
    }

    fn setup(image: &std::path::Path, wish: Wish, report: Arc<Report>) -> HostSetup {
        let engine = FileEngine::open(FileConfig {
            source: FileSource::Path(image.to_owned()),
            direct: false,
            read_only: false,
            explicit_raw: false,
            block_size: None,
            // Where nothing is to be registered, no ring is needed.
            aio: if wish == Wish::Off { Aio::Auto } else { Aio::IoUring },
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
        HostSetup {
            name: DiskName::new("disk").unwrap(),
            pool: Arc::default(),
            device,
            wish,
            image: Some(engine.lockable()),
            events: broadcast::Sender::new(1),
            report,
        }
    }

    #[test]
    fn move_while_a_session_begins_is_of_its_queue_and_of_no_other() {
        let image = image();
        let Some((pool, threads)) = pool_with_threads() else { return };
        let setup = setup(image.path(), Wish::Off, Arc::new(|_, _| ()));
        let setup = HostSetup { pool: Arc::clone(&pool), ..setup };
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
        if !has_io_uring() {
            return;
        }
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

    #[test]
    fn memory_that_is_gone_is_let_go_also_if_nothing_of_the_new_one_is_registered() {
        if !has_io_uring() {
            return;
        }
        let image = image();
        let host = host_with(image.path(), Wish::Auto, Arc::new(|_, _| ()));
        let file = memory(2 << 20);
        rustix::io::pwrite(&file, &vec![1; 2 << 20], 0).unwrap();
        let spec = rtvirtio_virtq::memory::RegionSpec { size: 2 << 20, ..region(0) };
        let gone = Arc::new(Region::map(spec, file).unwrap());
        let before = Memory::new(vec![Arc::clone(&gone)]).unwrap();
        host.fixed(&before).unwrap();
        drop(before);
        // It has no pages yet.
        let new = Memory::new(vec![mapped()]).unwrap();
        assert!(host.fixed(&new).unwrap().is_none());
        assert_eq!(Arc::strong_count(&gone), 1);
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
        if !has_io_uring() {
            return;
        }
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
