//! A device's queues, as far as their IOThreads are concerned: where each is served, and what is told of its driver and
//! its front end. Of disks and network devices alike.

use std::sync::atomic::{AtomicI32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rtvirtio_spec::control::Event;
use rtvirtio_units::DiskName;
use rtvirtio_vhost::session::{StartError, StoppedQueue};
use tokio::sync::broadcast;

use super::{Notice, Report};
use crate::key::QueueKey;
use crate::pool::{MoveError, Pool, PoolError, ThreadId};
use crate::queue::Broken;
use crate::stats::QueueStats;

/// A device's queues, as far as their IOThreads are concerned.
pub(crate) trait MappedHost: Send + Sync {
    /// Serves a queue by another thread, now and in later sessions. How long nobody served it, ns.
    fn assign(&self, index: u16, to: ThreadId) -> Result<u64, MoveError>;

    /// The process of the front end that is connected, if it is known.
    fn peer(&self) -> Option<i32>;

    /// Tells of queues that their drivers broke, or kick for nothing, since the last time. Never waits: who calls this also
    /// frees threads that somebody here may be waiting for.
    fn report_broken_queues(&self);

    /// Frees the thread that calls its drivers if a front end holds it up. Never waits.
    fn free_caller(&self);
}

/// A driver that has kicked for nothing so long will not be served. One that is served has its request taken
/// within microseconds.
pub(super) const EMPTY_TIME: Duration = Duration::from_secs(1);

/// Where a queue is served.
pub(super) struct Place {
    pub(super) thread: ThreadId,
    /// While it runs.
    pub(super) key: Option<QueueKey>,
    /// Whether a session is about to start it there.
    pub(super) starting: bool,
    /// Whether it was told that its driver broke it.
    told: bool,
    /// Whether anything has come of its driver's kicks.
    empty: Empty,
}

impl Place {
    /// Of queues that do not run yet, each on one of these threads.
    pub(super) fn on(threads: Vec<ThreadId>) -> Vec<Self> {
        let empty = Empty::Settled;
        let place = |thread| Self { thread, key: None, starting: false, told: false, empty };
        threads.into_iter().map(place).collect()
    }
}

/// What a driver's kicks have come to since its queue runs, or runs where it does. The second number changes when there
/// was something in its ring.
#[derive(Debug, Clone, Copy)]
enum Empty {
    /// Nothing was there yet: kicks of the empty ring at the beginning.
    Idle(u64, u64),
    /// It has kicked, and there was nothing in its ring since then.
    Since(Instant, u64),
    /// There was something, or it was told.
    Settled,
}

impl Empty {
    /// As of now.
    fn begin(stats: &QueueStats) -> Self {
        let (kicks, filled) = stats.empty_kicks();
        Self::Idle(kicks, filled)
    }

    /// Whether it is time to tell that kicks come to nothing.
    fn look(&mut self, stats: &QueueStats) -> bool {
        let (kicks, filled) = stats.empty_kicks();
        match *self {
            Self::Idle(_, before) | Self::Since(_, before) if filled != before => {
                *self = Self::Settled;
            }
            // QEMU kicks each ring once itself when it starts it (hw/block/vhost-user-blk.c), and of kicks that came
            // before it listens an IOThread hears one.
            Self::Idle(before, filled) if kicks > before + 1 => {
                *self = Self::Since(Instant::now(), filled);
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

/// The queues of a device, whose state has a [`Place`] for each.
pub(super) struct MappedQueues<S> {
    name: DiskName,
    pool: Arc<Pool>,
    events: broadcast::Sender<Event>,
    report: Arc<Report>,
    pub(super) stats: Vec<Arc<QueueStats>>,
    /// The process of the front end that is connected; 0: none, or not known.
    peer: AtomicI32,
    // Nobody waits for anybody while holding it: whoever looks at the device takes it.
    state: Mutex<S>,
}

impl<S: AsMut<Vec<Place>>> MappedQueues<S> {
    pub(super) fn new(
        name: DiskName,
        pool: Arc<Pool>,
        events: broadcast::Sender<Event>,
        report: Arc<Report>,
        mut state: S,
    ) -> Self {
        let stats = state.as_mut().iter().map(|_| Arc::new(QueueStats::new())).collect();
        let (peer, state) = (AtomicI32::new(0), Mutex::new(state));
        Self { name, pool, events, report, stats, peer, state }
    }

    pub(super) fn pool(&self) -> &Pool {
        &self.pool
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, S> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does something with a queue's place, if there is such a queue.
    fn with<T>(&self, index: u16, act: impl FnOnce(&mut Place) -> T) -> Option<T> {
        self.lock().as_mut().get_mut(usize::from(index)).map(act)
    }

    /// The key of a queue that runs.
    pub(super) fn key(&self, index: u16) -> Option<QueueKey> {
        self.with(index, |place| place.key)?
    }

    /// The queues that run.
    pub(super) fn keys(&self) -> Vec<Option<QueueKey>> {
        self.lock().as_mut().iter().map(|place| place.key).collect()
    }

    /// Whether the driver of a queue that runs broke it.
    pub(super) fn is_broken(&self, index: u16) -> bool {
        self.key(index).is_some_and(|key| self.pool.broken(key).is_some())
    }

    /// Starts a queue for a session, on the thread that is its own by now.
    pub(super) fn start(
        &self,
        index: u16,
        start: impl FnOnce(ThreadId) -> Result<QueueKey, PoolError>,
    ) -> Result<QueueKey, StartError> {
        let stats = self.stats.get(usize::from(index)).ok_or(StartError::Full)?;
        let thread = self.with(index, |place| {
            place.starting = true;
            place.empty = Empty::begin(stats);
            place.thread
        });
        // The IOThread may be busy for a while.
        let key = start(thread.ok_or(StartError::Full)?).map_err(|_| StartError::Full);
        self.with(index, |place| {
            place.starting = false;
            (place.key, place.told) = (key.ok(), false);
        });
        key
    }

    /// Stops a queue. What it was, and whether it is told by this that its driver broke it.
    pub(super) fn stop(&self, index: u16) -> (StoppedQueue, bool) {
        let queue = self.key(index).and_then(|key| self.pool.stop(key).ok());
        let broken = queue.as_ref().and_then(|queue| queue.broken());
        let is_news = self.with(index, |place| {
            place.key = None;
            self.tell_broken(index, place, broken)
        });
        let base = queue.map_or(0, |queue| queue.base());
        (StoppedQueue { base, broken: broken.is_some() }, is_news == Some(true))
    }

    /// See [`MappedHost::assign`].
    pub(super) fn assign(&self, index: u16, to: ThreadId) -> Result<u64, MoveError> {
        let key = self.with(index, |place| match place.key {
            _ if place.starting => Err(MoveError::Busy),
            // A session that starts it from now on does so there.
            None => {
                place.thread = to;
                Ok(None)
            }
            key => Ok(key),
        });
        let Some(key) = key.ok_or(PoolError::NoQueue)?? else { return Ok(0) };
        let pause = match self.pool.move_queue(key, to) {
            Ok(pause) => pause.as_nanos() as u64,
            // It has stopped in the meantime.
            Err(MoveError::Pool(PoolError::NoQueue)) => 0,
            Err(error) => return Err(error),
        };
        let moved = self.with(index, |place| {
            // Another session may have started it where it was before.
            if place.starting || place.key.is_some_and(|now| now != key) {
                return Err(MoveError::Busy);
            }
            place.thread = to;
            // The thread that has it now hears of earlier kicks.
            if let (Empty::Idle(..) | Empty::Since(..), Some(stats)) =
                (place.empty, self.stats.get(usize::from(index)))
            {
                place.empty = Empty::begin(stats);
            }
            Ok(pause)
        });
        moved.ok_or(PoolError::NoQueue)?
    }

    /// See [`MappedHost::peer`].
    pub(super) fn peer(&self) -> Option<i32> {
        Some(self.peer.load(Relaxed)).filter(|&pid| pid > 0)
    }

    /// A front end has connected, of this process, if that is known; or it has left.
    pub(super) fn set_connected(&self, connected: bool, peer: Option<i32>) {
        self.peer.store(peer.unwrap_or(0), Relaxed);
        let device = self.name.clone();
        self.tell(match connected {
            true => Event::FrontEndConnected { device },
            false => Event::FrontEndDisconnected { device },
        });
    }

    /// See [`MappedHost::report_broken_queues`]; whether one was broken.
    pub(super) fn report_broken(&self) -> bool {
        let Ok(mut state) = self.state.try_lock() else { return false };
        let mut is_news = false;
        for ((index, place), stats) in (0..).zip(state.as_mut()).zip(&self.stats) {
            let Some(key) = place.key else { continue };
            is_news |= self.tell_broken(index, place, self.pool.broken(key));
            if !place.told && place.empty.look(stats) {
                // QEMU says it in its log, too.
                self.pool.tell_error(key);
                self.report(Notice::EmptyRing { queue: index });
            }
        }
        is_news
    }

    pub(super) fn report(&self, notice: Notice<'_>) {
        (self.report)(self.name.as_str(), notice);
    }

    fn tell(&self, event: Event) {
        // Nobody may be listening.
        let _ = self.events.send(event);
    }

    /// Tells that its driver broke a queue, if it did and that was not told; whether it was.
    fn tell_broken(&self, queue: u16, place: &mut Place, broken: Option<Broken>) -> bool {
        let Some(broken) = broken.filter(|_| !place.told) else { return false };
        place.told = true;
        let (device, reason) = (self.name.clone(), broken.to_string());
        self.tell(Event::QueueBroken { device, queue, reason });
        true
    }
}
