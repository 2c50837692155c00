//! What IOThreads there are and which queue goes where: the part of the data plane that a policy may
//! change.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rtvirtio_engine::file::Lock;
use rtvirtio_iocores::QueueKind;
use rtvirtio_qos::Stalls;
use rtvirtio_spec::control::Event;
use rtvirtio_spec::mapping::Mapping;
use rtvirtio_spec::serve::{self, Engine, Fault, IoThread, MAX_IOTHREADS, SsdEngine};
use rtvirtio_units::{CpuId, DiskName, IoThreadName, Name, Nanos, VmName};
use tokio::sync::broadcast;

use super::host::Host;
use super::mapped::MappedHost;
use super::nic_host::NicHost;
use super::{EVENTS_KEPT, PlaneError, refused};
use crate::iothread::Polling;
use crate::pool::{MoveError, Pool, PoolError, ThreadId};
use crate::schedule::Schedule;
use crate::stats::QueueStats;
use crate::thread_stats::IoThreadStats;
use rtvirtio_vhost::server::SocketId;

/// What the registry, and the monitor beside it, work on.
pub(crate) struct Core {
    // Nobody waits for a thread, a disk or a file while holding it: whoever looks takes it.
    state: Mutex<State>,
    /// Held by whoever adds or ends an IOThread or moves a queue: the operator, or a policy.
    changing: Mutex<()>,
    /// Rises when something in the state changes that [`Core::look`] shows.
    version: AtomicU64,
    pub(super) events: broadcast::Sender<Event>,
    pub(super) pool: Arc<Pool>,
    /// Queues that have gone to another IOThread.
    moves: AtomicU64,
}

/// An IOThread, for who watches it.
pub(crate) struct WatchedThread {
    pub(crate) id: ThreadId,
    pub(crate) name: IoThreadName,
    pub(crate) config: IoThread,
    pub(crate) locked: bool,
    pub(crate) tid: i32,
    pub(crate) stats: Arc<IoThreadStats>,
}

/// A virtqueue, likewise, whether it runs or not.
pub(crate) struct WatchedQueue {
    pub(crate) id: u32,
    pub(crate) device: DiskName,
    pub(crate) index: u16,
    pub(crate) kind: QueueKind,
    pub(crate) vm: u32,
    pub(crate) iothread: IoThreadName,
    pub(crate) thread: ThreadId,
    pub(crate) stats: Arc<QueueStats>,
}

/// Whose front end is which process.
pub(crate) struct WatchedVm {
    pub(crate) id: u32,
    pub(crate) device: Weak<dyn MappedHost>,
}

/// What there is at one time.
#[derive(Default)]
pub(crate) struct Watched {
    /// By id.
    pub(crate) threads: Vec<WatchedThread>,
    /// By id.
    pub(crate) queues: Vec<WatchedQueue>,
    /// One for each device.
    pub(crate) vms: Vec<WatchedVm>,
}

#[derive(Default)]
pub(super) struct State {
    /// Numbers of queues and VMs that have been given.
    queue_ids: u32,
    vm_ids: u32,
    pub(super) iothreads: BTreeMap<IoThreadName, Thread>,
    pub(super) schedules: BTreeMap<Name, Arc<Schedule>>,
    pub(super) devices: BTreeMap<DiskName, Served>,
    /// Network devices: by names that no disk has.
    pub(super) nics: BTreeMap<DiskName, ServedNic>,
    /// Devices that are about to be here.
    pub(super) adding: BTreeMap<DiskName, Adding>,
    /// The device whose queues are on their way, where they were and where they go: they may come there, or go back.
    moving: Option<(DiskName, [Mapping; 2])>,
}

pub(super) struct Thread {
    pub(super) id: ThreadId,
    pub(super) config: IoThread,
    pub(super) locked: bool,
}

pub(super) struct Served {
    /// As it was added.
    pub(super) configured: serve::Device,
    pub(super) host: Arc<Host>,
    pub(super) vm: VmName,
    /// Its trust domain, which is that of its IOThreads.
    pub(super) trust: Option<Name>,
    pub(super) ids: Ids,
    pub(super) socket: Option<PathBuf>,
    pub(super) socket_id: SocketId,
    pub(super) slots: Option<Slots>,
    pub(super) mapping: Mapping,
    pub(super) qos: Option<serve::Qos>,
    /// Held as long as the device is there, if that is when its image is locked.
    pub(super) _lock: Option<Lock>,
}

/// A network device, as far as it may be changed.
pub(super) struct ServedNic {
    pub(super) host: Arc<NicHost>,
    pub(super) ids: Ids,
    /// As it is now.
    pub(super) spec: serve::Nic,
}

/// What is mapped of a device, of either kind.
struct Mapped<'a> {
    host: Arc<dyn MappedHost>,
    vm: &'a VmName,
    trust: &'a Option<Name>,
    ids: Ids,
    mapping: &'a Mapping,
    kind: QueueKind,
    stats: &'a [Arc<QueueStats>],
}

impl Served {
    fn mapped(&self) -> Mapped<'_> {
        Mapped {
            host: Arc::clone(&self.host) as Arc<_>,
            vm: &self.vm,
            trust: &self.trust,
            ids: self.ids,
            mapping: &self.mapping,
            kind: QueueKind::Disk,
            stats: &self.host.queues.stats,
        }
    }
}

impl ServedNic {
    fn mapped(&self) -> Mapped<'_> {
        Mapped {
            host: Arc::clone(&self.host) as Arc<_>,
            vm: &self.spec.vm,
            trust: &self.spec.trust,
            ids: self.ids,
            mapping: &self.spec.mapping,
            kind: self.host.kind(),
            stats: &self.host.queues.stats,
        }
    }
}

impl Served {
    fn sockets(&self) -> impl Iterator<Item = &PathBuf> {
        self.socket.iter().chain(self.slots.as_ref().map(|slots| &slots.socket))
    }

    /// The device as it is now.
    pub(super) fn configuration(&self) -> serve::Device {
        let mut device = serve::Device {
            mapping: self.mapping.clone(),
            qos: self.qos.clone(),
            ..self.configured.clone()
        };
        // A file has its size.
        if let Engine::Ram { size, .. } | Engine::Ssd(SsdEngine { size, .. }) = &mut device.engine {
            *size = self.host.device().engine().geometry().capacity;
        }
        device
    }
}

/// What a device takes from others before it is here, and a network device until it has gone.
pub(super) struct Adding {
    pub(super) sockets: Vec<PathBuf>,
    pub(super) kind: AddingKind,
}

/// What a device that is about to be here wants of its IOThreads.
pub(super) enum AddingKind {
    Disk { qos: Option<serve::Qos>, mapping: Mapping },
    Nic(Box<serve::Nic>),
}

impl Adding {
    pub(super) fn of_nic(spec: &serve::Nic) -> Self {
        let sockets = spec.sockets().cloned().collect();
        Self { sockets, kind: AddingKind::Nic(Box::new(spec.clone())) }
    }

    /// Of a disk.
    pub(super) fn disk(&self) -> Option<(&Option<serve::Qos>, &Mapping)> {
        match &self.kind {
            AddingKind::Disk { qos, mapping } => Some((qos, mapping)),
            AddingKind::Nic(_) => None,
        }
    }

    /// Of a network device.
    pub(super) fn nic(&self) -> Option<&serve::Nic> {
        match &self.kind {
            AddingKind::Nic(nic) => Some(nic),
            AddingKind::Disk { .. } => None,
        }
    }
}

/// Where processes connect that use a device by slots.
pub(super) struct Slots {
    pub(super) socket: PathBuf,
    pub(super) socket_id: SocketId,
}

/// A device's numbers, which no other one ever has.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ids {
    pub(super) vm: u32,
    /// Of queue 0; the others follow.
    pub(super) queue: u32,
}

/// How long a change waits for another of the same queue, and how often it looks.
const FREE_TIME: Duration = Duration::from_secs(1);
const FREE_PAUSE: Duration = Duration::from_millis(1);

/// Tries again for [`FREE_TIME`] what was refused because a queue was held: it is moving or
/// stopping, or somebody looked whether it is.
pub(super) fn when_free<T, E>(
    is_held: impl Fn(&E) -> bool,
    mut attempt: impl FnMut() -> Result<T, E>,
) -> Result<T, E> {
    let until = Instant::now() + FREE_TIME;
    loop {
        match attempt() {
            Err(error) if is_held(&error) && Instant::now() < until => {
                std::thread::sleep(FREE_PAUSE);
            }
            result => return result,
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What was begun under it is whole, or the next look shows what is not.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Core {
    pub(super) fn new() -> Self {
        Self {
            state: Mutex::default(),
            changing: Mutex::default(),
            version: AtomicU64::new(1),
            events: broadcast::Sender::new(EVENTS_KEPT),
            pool: Arc::new(Pool::default()),
            moves: AtomicU64::new(0),
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    pub(crate) fn tell(&self, event: Event) {
        // Nobody may be listening.
        let _ = self.events.send(event);
    }

    /// The stalls of the schedules' devices, but of those whose lock somebody has: never waits for one.
    pub(super) fn stalls(&self) -> Vec<(Name, Stalls)> {
        let Ok(state) = self.state.try_lock() else { return Vec::new() };
        let each =
            |(name, schedule): (&Name, &Arc<Schedule>)| Some((name.clone(), schedule.stalls()?));
        state.schedules.iter().filter_map(each).collect()
    }

    /// Says that [`Self::look`] shows something else.
    pub(super) fn touch(&self) {
        self.version.fetch_add(1, Release);
    }

    /// Rises when [`Self::look`] shows something else.
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Acquire)
    }

    /// What there is.
    pub(crate) fn look(&self) -> Watched {
        let state = self.state();
        let thread = |(name, thread): (&IoThreadName, &Thread)| {
            let (stats, tid) = self.pool.thread(thread.id)?;
            Some(WatchedThread {
                id: thread.id,
                name: name.clone(),
                config: thread.config.clone(),
                locked: thread.locked,
                tid,
                stats,
            })
        };
        let mut threads: Vec<_> = state.iothreads.iter().filter_map(thread).collect();
        threads.sort_unstable_by_key(|thread| thread.id);
        let iothreads = &state.iothreads;
        let queues = state.mapped().flat_map(|(name, device)| {
            let by_queue = device.mapping.by_queue().iter().zip(device.stats);
            (0..).zip(by_queue).filter_map(move |(index, (iothread, stats))| {
                Some(WatchedQueue {
                    id: device.ids.queue + u32::from(index),
                    device: name.clone(),
                    index,
                    kind: device.kind,
                    vm: device.ids.vm,
                    iothread: iothread.clone(),
                    // A mapping names IOThreads that there are.
                    thread: iothreads.get(iothread)?.id,
                    stats: Arc::clone(stats),
                })
            })
        });
        let mut queues: Vec<_> = queues.collect();
        queues.sort_unstable_by_key(|queue| queue.id);
        let vm = |(_, device): (_, Mapped<'_>)| WatchedVm {
            id: device.ids.vm,
            device: Arc::downgrade(&device.host),
        };
        Watched { threads, queues, vms: state.mapped().map(vm).collect() }
    }

    /// Queues that have gone to another IOThread.
    pub(super) fn moves(&self) -> u64 {
        self.moves.load(Relaxed)
    }

    pub(crate) fn add_iothread(&self, iothread: IoThread) -> Result<(), PlaneError> {
        let _changing = lock(&self.changing);
        {
            let state = self.state();
            if state.iothreads.contains_key(&iothread.name) {
                return Err(PlaneError::IoThreadExists(iothread.name));
            }
            if state.iothreads.len() >= MAX_IOTHREADS {
                return Err(PlaneError::TooMany { what: "iothreads", limit: MAX_IOTHREADS });
            }
            iothread.fits(state.iothreads.values().map(|thread| &thread.config))?;
        }
        let name = iothread.name.clone();
        let what = format!("cannot start iothread {name}");
        let id = self
            .pool
            .add_thread(name.as_str(), polling(&iothread))
            .map_err(|error| refused(what.clone(), error))?;
        if !iothread.cpus.is_empty()
            && let Err(error) = self.pool.pin_thread(id, &iothread.cpus)
        {
            let _ = self.pool.remove_thread(id);
            return Err(refused(what, error));
        }
        let thread = Thread { id, config: iothread, locked: false };
        self.state().iothreads.insert(name.clone(), thread);
        self.touch();
        self.tell(Event::IothreadAdded { iothread: name });
        Ok(())
    }

    pub(crate) fn remove_iothread(&self, iothread: &IoThreadName) -> Result<(), PlaneError> {
        let _changing = lock(&self.changing);
        let thread = {
            let mut state = self.state();
            let queues = state.queues_of(iothread);
            if queues > 0 {
                return Err(PlaneError::IoThreadInUse { iothread: iothread.clone(), queues });
            }
            // What is served now is to be served after the next start, and no file without one is read.
            if state.iothreads.len() == 1 && state.iothreads.contains_key(iothread) {
                return Err(PlaneError::LastIoThread(iothread.clone()));
            }
            let removed = state.iothreads.remove(iothread);
            removed.ok_or_else(|| PlaneError::NoIoThread(iothread.clone()))?
        };
        self.touch();
        // It waits for what was started there and has not ended, so not under the state's lock.
        let removed = when_free(
            |error| matches!(error, PoolError::InUse { .. }),
            || self.pool.remove_thread(thread.id),
        );
        if let Err(error) = removed {
            self.state().iothreads.insert(iothread.clone(), thread);
            self.touch();
            return Err(match error {
                PoolError::InUse { queues } => {
                    let queues = u32::try_from(queues).unwrap_or(u32::MAX);
                    PlaneError::IoThreadInUse { iothread: iothread.clone(), queues }
                }
                error => refused(format!("cannot end iothread {iothread}"), error),
            });
        }
        self.tell(Event::IothreadRemoved { iothread: iothread.clone() });
        Ok(())
    }

    pub(crate) fn pin_iothread(
        &self,
        iothread: &IoThreadName,
        cpus: &[CpuId],
    ) -> Result<(), PlaneError> {
        let _changing = lock(&self.changing);
        let (id, pinned) = {
            let mut state = self.state();
            let thread = state.iothread(iothread)?;
            let (id, mut pinned) = (thread.id, thread.config.clone());
            pinned.cpus = cpus.to_vec();
            let others = state.iothreads.iter().filter(|(name, _)| *name != iothread);
            pinned.fits(others.map(|(_, thread)| &thread.config))?;
            (id, pinned)
        };
        // The thread answers between two turns, so not under the state's lock.
        self.pool
            .pin_thread(id, cpus)
            .map_err(|error| refused(format!("cannot pin iothread {iothread}"), error))?;
        self.state().iothread(iothread)?.config = pinned;
        self.touch();
        Ok(())
    }

    pub(crate) fn lock_iothread(
        &self,
        iothread: &IoThreadName,
        locked: bool,
    ) -> Result<(), PlaneError> {
        self.state().iothread(iothread)?.locked = locked;
        self.touch();
        Ok(())
    }

    pub(crate) fn move_queue(
        &self,
        device: &DiskName,
        queue: u16,
        to: &IoThreadName,
    ) -> Result<Nanos, PlaneError> {
        let _changing = lock(&self.changing);
        let mapping = self.state().mapping(device).ok().map(|(mapping, _)| mapping.clone());
        let is_other = |mapping: &Mapping| mapping.iothread(queue).is_some_and(|from| from != to);
        let _moving = match mapping.filter(is_other) {
            Some(mut mapping) => {
                mapping.assign(queue, to.clone())?;
                Some(self.begin_move(device, &mapping)?)
            }
            None => None,
        };
        self.assign(device, queue, to)
    }

    /// Admits a device's new mapping. Until the end of the move whatever else is admitted has to fit beside both, the new
    /// one and that which the device has; that one too is returned.
    fn begin_move(
        &self,
        device: &DiskName,
        mapping: &Mapping,
    ) -> Result<(Moving<'_>, Mapping), PlaneError> {
        let mut state = self.state();
        state.admit_mapping(device, mapping)?;
        let before = state.mapping(device)?.0.clone();
        state.moving = Some((device.clone(), [before.clone(), mapping.clone()]));
        Ok((Moving(self), before))
    }

    /// Moves all queues of a device to where `mapping` says, or none: what is promised is kept at the end, whatever the
    /// order is in which they go there.
    pub(super) fn set_mapping(
        &self,
        device: &DiskName,
        mapping: &Mapping,
    ) -> Result<(), PlaneError> {
        // No IOThread goes meanwhile, and nobody else moves.
        let _changing = lock(&self.changing);
        let (_moving, before) = self.begin_move(device, mapping)?;
        for (queue, to) in (0..).zip(mapping.by_queue()) {
            if let Err(error) = self.assign(device, queue, to) {
                for (queue, from) in (0..queue).zip(before.by_queue()) {
                    // One that cannot go back stays where it is served, and is seen there.
                    let _ = self.assign(device, queue, from);
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// Moves a queue, by somebody who has seen to it that nobody else does.
    fn assign(
        &self,
        device: &DiskName,
        queue: u16,
        to: &IoThreadName,
    ) -> Result<Nanos, PlaneError> {
        let (host, thread, from, before) = {
            let mut state = self.state();
            let Thread { id: thread, config, .. } = state.iothread(to)?;
            let (thread, trust) = (*thread, config.trust.clone());
            let mapped = state.mapped_device(device)?;
            if *mapped.trust != trust {
                return Err(Fault::OtherTrust(to.clone()).into());
            }
            let queues = mapped.mapping.queues();
            let from = mapped
                .mapping
                .iothread(queue)
                .cloned()
                .ok_or_else(|| PlaneError::NoQueue { device: device.clone(), queues, queue })?;
            let before = state.iothreads.get(&from).map(|thread| thread.id);
            (Arc::clone(&mapped.host), thread, from, before)
        };
        let moved =
            when_free(|error| matches!(error, MoveError::Busy), || host.assign(queue, thread));
        if let (Err(_), Some(before)) = (&moved, before) {
            // Slots of processes, which go with queue 0, may be held for longer than this waits. What has gone already goes back:
            // the mapping says that it is there.
            let _ = host.assign(queue, before);
        }
        let pause = moved.map_err(|error| match error {
            MoveError::Busy => PlaneError::QueueBusy { device: device.clone(), queue },
            MoveError::Pool(error) => {
                refused(format!("cannot move queue {queue} of {device}"), error)
            }
        })?;
        let pause_ns = Nanos::new(pause);
        let mut state = self.state();
        // Another device may have come under the name.
        let is_same = state.mapped_device(device).is_ok_and(|now| Arc::ptr_eq(&now.host, &host));
        if let Some(mapping) = state.mapping_mut(device).filter(|_| is_same) {
            mapping.assign(queue, to.clone())?;
        }
        drop(state);
        if from != *to {
            let device = device.clone();
            self.moves.fetch_add(1, Relaxed);
            self.touch();
            self.tell(Event::QueueMoved { device, queue, from, to: to.clone(), pause_ns });
        }
        Ok(pause_ns)
    }
}

/// A move until its end, however it ends.
struct Moving<'a>(&'a Core);

impl Drop for Moving<'_> {
    fn drop(&mut self) {
        self.0.state().moving = None;
    }
}

impl State {
    /// Numbers for a device that is added.
    pub(super) fn ids(&mut self, vm: &VmName, queues: u16) -> Ids {
        let known = self.mapped().find(|(_, device)| device.vm == vm).map(|(_, of)| of.ids.vm);
        let vm = known.unwrap_or_else(|| {
            self.vm_ids += 1;
            self.vm_ids
        });
        let queue = self.queue_ids;
        self.queue_ids += u32::from(queues);
        Ids { vm, queue }
    }

    pub(super) fn iothread(&mut self, name: &IoThreadName) -> Result<&mut Thread, PlaneError> {
        self.iothreads.get_mut(name).ok_or_else(|| PlaneError::NoIoThread(name.clone()))
    }

    pub(super) fn host(&self, device: &DiskName) -> Result<Arc<Host>, PlaneError> {
        let served = self.devices.get(device);
        served.map(|s| Arc::clone(&s.host)).ok_or_else(|| PlaneError::NoDevice(device.clone()))
    }

    /// Queues that are mapped to an IOThread, whether they run or not.
    pub(super) fn queues_of(&self, iothread: &IoThreadName) -> u32 {
        let queues = self.mapped().flat_map(|(_, device)| device.mapping.by_queue());
        queues.filter(|name| *name == iothread).count() as u32
    }

    /// All devices that have queues.
    fn mapped(&self) -> impl Iterator<Item = (&DiskName, Mapped<'_>)> {
        let disks = self.devices.iter().map(|(name, served)| (name, served.mapped()));
        disks.chain(self.nics.iter().map(|(name, served)| (name, served.mapped())))
    }

    fn mapped_device(&self, device: &DiskName) -> Result<Mapped<'_>, PlaneError> {
        let disk = self.devices.get(device).map(Served::mapped);
        let found = disk.or_else(|| self.nics.get(device).map(ServedNic::mapped));
        found.ok_or_else(|| PlaneError::NoDevice(device.clone()))
    }

    /// Which IOThread serves which of a device's queues, and the device's trust domain.
    pub(super) fn mapping(
        &self,
        device: &DiskName,
    ) -> Result<(&Mapping, &Option<Name>), PlaneError> {
        self.mapped_device(device).map(|mapped| (mapped.mapping, mapped.trust))
    }

    /// Whether IOThreads keep what network devices are promised of them, when a device has this mapping. It need not be there
    /// yet.
    pub(super) fn admit_mapping(&self, device: &DiskName, mapping: &Mapping) -> Result<(), Fault> {
        let nics: Vec<_> = self.nics().cloned().collect();
        self.admit_nics(&nics, device, !self.nics.contains_key(device), mapping)
    }

    /// Whether no device of either kind has this name.
    pub(super) fn check_is_new(&self, name: &DiskName) -> Result<(), PlaneError> {
        let is_taken = self.devices.contains_key(name)
            || self.nics.contains_key(name)
            || self.adding.contains_key(name);
        if is_taken { Err(PlaneError::DeviceExists(name.clone())) } else { Ok(()) }
    }

    /// The device of either kind whose socket it is.
    pub(super) fn owner_of_socket(&self, socket: &PathBuf) -> Option<&DiskName> {
        let is_of_disk = |served: &Served| served.sockets().any(|other| other == socket);
        let is_of_nic = |served: &ServedNic| served.spec.sockets().any(|other| other == socket);
        let disks =
            self.devices.iter().filter(|(_, served)| is_of_disk(served)).map(|(name, _)| name);
        let nics = self.nics.iter().filter(|(_, served)| is_of_nic(served)).map(|(name, _)| name);
        let adding = self.adding.iter().filter(|(_, adding)| adding.sockets.contains(socket));
        disks.chain(nics).chain(adding.map(|(name, _)| name)).next()
    }

    /// All network devices that are here, about to be, or not gone yet.
    pub(super) fn nics(&self) -> impl Iterator<Item = &serve::Nic> {
        let served = self.nics.values().map(|nic| &nic.spec);
        let others = self.adding.iter().filter(|(name, _)| !self.nics.contains_key(*name));
        served.chain(others.filter_map(|(_, adding)| adding.nic()))
    }

    /// The same, when a network device is there, and is as `changed` says.
    pub(super) fn admit_nic(&self, changed: &serve::Nic) -> Result<(), Fault> {
        let others = self.nics().filter(|nic| nic.name != changed.name);
        let nics: Vec<_> = others.chain([changed]).cloned().collect();
        self.admit_nics(&nics, &changed.name.clone().into(), false, &changed.mapping)
    }

    fn admit_nics(
        &self,
        nics: &[serve::Nic],
        device: &DiskName,
        is_disk: bool,
        mapping: &Mapping,
    ) -> Result<(), Fault> {
        // A device whose queues are on their way may come to either end.
        let ends: Vec<_> = match &self.moving {
            Some((moving, ends)) => ends.iter().map(|end| (moving, end)).collect(),
            None => vec![(device, mapping)],
        };
        ends.into_iter().try_for_each(|(moving, end)| {
            let at = |name: &str, now| match name {
                _ if name == moving.as_str() => end,
                _ if name == device.as_str() => mapping,
                _ => now,
            };
            let served = self.devices.iter().map(|(name, served)| (name, &served.mapping));
            let adding = self.adding.iter().filter_map(|(name, of)| Some((name, of.disk()?.1)));
            let others = served.chain(adding).filter(|(name, _)| *name != device);
            let others = others.map(|(name, now)| at(name.as_str(), now));
            let own = is_disk.then(|| at(device.as_str(), mapping));
            let disks: Vec<_> = others.chain(own).collect();
            let nics = nics.iter().map(|nic| {
                let mapping = at(nic.name.as_str(), &nic.mapping).clone();
                serve::Nic { mapping, ..nic.clone() }
            });
            let nics: Vec<_> = nics.collect();
            let iothreads: BTreeSet<_> = at(device.as_str(), mapping).by_queue().iter().collect();
            iothreads.into_iter().try_for_each(|iothread| {
                let queues = disks.iter().flat_map(|mapping| mapping.by_queue());
                let disks = queues.filter(|name| *name == iothread).count() as u32;
                serve::admit(iothread, &nics, disks).map_err(Fault::from)
            })
        })
    }

    fn mapping_mut(&mut self, device: &DiskName) -> Option<&mut Mapping> {
        let disk = self.devices.get_mut(device).map(|served| &mut served.mapping);
        disk.or_else(|| self.nics.get_mut(device).map(|served| &mut served.spec.mapping))
    }
}

fn polling(iothread: &IoThread) -> Polling {
    let serve::Polling { completion, core, max, grow, shrink } = iothread.polling;
    Polling { completion, core, max: Duration::from(max), grow, shrink }
}

/// The threads of a mapping's queues.
pub(super) fn threads(state: &State, mapping: &Mapping) -> Result<Vec<ThreadId>, PlaneError> {
    let id = |name: &IoThreadName| {
        let thread = state.iothreads.get(name);
        thread.map(|t| t.id).ok_or_else(|| PlaneError::NoIoThread(name.clone()))
    };
    mapping.by_queue().iter().map(id).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn change_waits_for_another_of_its_queue_and_not_for_ever() {
        let mut refusals = 5;
        let soon = when_free(
            |error| matches!(error, MoveError::Busy),
            || {
                refusals -= 1;
                if refusals > 0 { Err(MoveError::Busy) } else { Ok(()) }
            },
        );
        assert!(soon.is_ok(), "{soon:?}");
        let mut attempts = 0;
        let never: Result<(), _> = when_free(
            |error| matches!(error, MoveError::Busy),
            || {
                attempts += 1;
                Err(MoveError::Busy)
            },
        );
        assert!(matches!(never, Err(MoveError::Busy)) && attempts > 1);
        attempts = 0;
        let other: Result<(), _> = when_free(
            |error| matches!(error, MoveError::Busy),
            || {
                attempts += 1;
                Err(PoolError::NoThread.into())
            },
        );
        assert!(matches!(other, Err(MoveError::Pool(PoolError::NoThread))) && attempts == 1);
    }
}
