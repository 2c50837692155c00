//! The rings of a network device: where each is served, and the sessions that start and stop them.

use std::sync::atomic::{AtomicBool, AtomicI32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rtvirtio_iocores::QueueKind;
use rtvirtio_spec::control::{Event, QueueDirection};
use rtvirtio_units::DiskName;
use rtvirtio_vhost::session::{self, Change, QueueHost, StartError, StoppedQueue};
use rtvirtio_virtq::memory::Memory;
use tokio::sync::broadcast;

use super::host::change;
use super::mapped::MappedHost;
use crate::call::{self, Call};
use crate::key::QueueKey;
use crate::nic::{Link, Nic, Terms};
use crate::pool::{MoveError, Pool, PoolError, ThreadId};
use crate::queue::{Broken, NicQueueSetup};
use crate::stats::QueueStats;

/// Where a queue is served.
struct Place {
    thread: ThreadId,
    /// While it runs.
    key: Option<QueueKey>,
    /// Whether a session starts it just now.
    is_starting: bool,
    /// Whether it was told that its driver broke it.
    told: bool,
}

/// The rings of one network device.
pub(crate) struct NicHost {
    name: DiskName,
    nic: Arc<Nic>,
    pool: Arc<Pool>,
    pub(super) stats: Vec<Arc<QueueStats>>,
    /// The process of the front end that is connected; 0: none, or not known.
    peer: AtomicI32,
    // Nobody waits for anybody while holding it.
    queues: Mutex<Vec<Place>>,
    /// Whether a queue has run.
    has_served: AtomicBool,
    events: broadcast::Sender<Event>,
}

impl NicHost {
    /// Of a device whose queues these threads serve.
    pub(super) fn new(
        name: DiskName,
        nic: Arc<Nic>,
        pool: Arc<Pool>,
        threads: Vec<ThreadId>,
        events: broadcast::Sender<Event>,
    ) -> Self {
        let place = |thread| Place { thread, key: None, is_starting: false, told: false };
        Self {
            name,
            stats: threads.iter().map(|_| Arc::new(QueueStats::new())).collect(),
            queues: Mutex::new(threads.into_iter().map(place).collect()),
            nic,
            pool,
            peer: AtomicI32::new(0),
            has_served: AtomicBool::new(false),
            events,
        }
    }

    #[cfg(test)]
    pub(super) fn nic(&self) -> Arc<Nic> {
        Arc::clone(&self.nic)
    }

    /// Whether a queue has run.
    pub(super) fn has_served(&self) -> bool {
        self.has_served.load(Relaxed)
    }

    fn queues(&self) -> MutexGuard<'_, Vec<Place>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, event: Event) {
        // Nobody may be listening.
        let _ = self.events.send(event);
    }

    fn tell_broken(&self, queue: u16, broken: Broken) {
        let device = self.name.clone();
        self.tell(Event::QueueBroken { device, queue, reason: broken.to_string() });
    }

    fn key(&self, index: u16) -> Option<QueueKey> {
        self.queues().get(usize::from(index))?.key
    }

    /// From now on these terms hold for the queues of a direction that start; those that run, which are to be told
    /// ([`Self::tell_terms`]).
    ///
    /// # Errors
    /// A queue that is being started: nothing is changed.
    pub(super) fn set_terms(
        &self,
        direction: QueueDirection,
        terms: &Terms,
    ) -> Result<Vec<QueueKey>, u16> {
        let queues = self.queues();
        let first = u16::from(direction == QueueDirection::Transmit);
        let of_direction = || (0..).zip(&*queues).skip(first.into()).step_by(2);
        if let Some((index, _)) = of_direction().find(|(_, place)| place.is_starting) {
            return Err(index);
        }
        self.nic.set_terms(first, terms.clone());
        Ok(of_direction().filter_map(|(_, place)| place.key).collect())
    }

    /// Has queues that run go by these terms.
    pub(super) fn tell_terms(&self, queues: Vec<QueueKey>, terms: &Terms) {
        for key in queues {
            let terms = terms.clone();
            // One that has stopped in the meantime looks at them when it starts.
            let _ = self.pool.edit(key, move |queue| queue.set_terms(terms));
        }
    }

    /// What its frames cost.
    pub(super) fn kind(&self) -> QueueKind {
        match self.nic.attached() {
            Link::Taps(_) | Link::Socket(_) => QueueKind::Link,
            Link::Port { .. } => QueueKind::Switch,
        }
    }
}

impl MappedHost for NicHost {
    fn assign(&self, index: u16, to: ThreadId) -> Result<u64, MoveError> {
        let key = {
            let mut queues = self.queues();
            let place = queues.get_mut(usize::from(index)).ok_or(PoolError::NoQueue)?;
            if place.is_starting {
                return Err(MoveError::Busy);
            }
            // A session that starts it from now on does so there.
            let Some(key) = place.key else {
                place.thread = to;
                return Ok(0);
            };
            key
        };
        let pause = match self.pool.move_queue(key, to) {
            Ok(pause) => pause.as_nanos() as u64,
            // It has stopped in the meantime.
            Err(MoveError::Pool(PoolError::NoQueue)) => 0,
            Err(error) => return Err(error),
        };
        let mut queues = self.queues();
        let place = queues.get_mut(usize::from(index)).ok_or(PoolError::NoQueue)?;
        // Another session may have started it where it was before.
        if place.is_starting || place.key.is_some_and(|now| now != key) {
            return Err(MoveError::Busy);
        }
        place.thread = to;
        Ok(pause)
    }

    fn peer(&self) -> Option<i32> {
        Some(self.peer.load(Relaxed)).filter(|&pid| pid > 0)
    }

    fn report_broken_queues(&self) {
        let Ok(mut queues) = self.queues.try_lock() else { return };
        for (index, place) in (0..).zip(&mut *queues).filter(|(_, place)| !place.told) {
            if let Some(broken) = place.key.and_then(|key| self.pool.broken(key)) {
                place.told = true;
                self.tell_broken(index, broken);
            }
        }
    }
}

impl QueueHost for NicHost {
    type Key = u16;

    fn start(&self, setup: session::QueueSetup) -> Result<u16, StartError> {
        let index = setup.index;
        if setup.kick.as_ref().is_some_and(|kick| !call::is_signal(kick)) {
            return Err(StartError::Kick);
        }
        let caller = self.nic.caller();
        let call =
            setup.call.map(|fd| Call::new(fd, caller)).transpose().map_err(|_| StartError::Call)?;
        let setup = NicQueueSetup {
            nic: Arc::clone(&self.nic),
            index,
            memory: setup.memory,
            ring: setup.ring,
            kick: setup.kick,
            call,
            error: setup.error,
            enabled: setup.enabled,
            stats: Arc::clone(self.stats.get(usize::from(index)).ok_or(StartError::Full)?),
        };
        let thread = {
            let mut queues = self.queues();
            let place = queues.get_mut(usize::from(index)).ok_or(StartError::Full)?;
            place.is_starting = true;
            place.thread
        };
        // The IOThread may be busy for a while.
        let started = self.pool.start_nic(setup, thread);
        let mut queues = self.queues();
        let place = queues.get_mut(usize::from(index)).ok_or(StartError::Full)?;
        place.is_starting = false;
        place.key = Some(started.map_err(|_| StartError::Full)?);
        place.told = false;
        self.has_served.store(true, Relaxed);
        Ok(index)
    }

    fn stop(&self, index: u16) -> StoppedQueue {
        let queue = self.key(index).and_then(|key| self.pool.stop(key).ok());
        let broken = queue.as_ref().and_then(|queue| queue.broken());
        if let Some(place) = self.queues().get_mut(usize::from(index)) {
            place.key = None;
            if let Some(broken) = broken
                && !std::mem::replace(&mut place.told, true)
            {
                self.tell_broken(index, broken);
            }
        }
        StoppedQueue { base: queue.map_or(0, |queue| queue.base()), broken: broken.is_some() }
    }

    fn update(&self, index: u16, what: Change) -> Result<(), StartError> {
        let Some(key) = self.key(index) else { return Ok(()) };
        // Frames go to and from guest memory as they are: nothing is registered.
        change(&self.pool, key, what, self.nic.caller(), |_: &Memory| Ok(None))
    }

    fn is_broken(&self, index: u16) -> bool {
        self.key(index).is_some_and(|key| self.pool.broken(key).is_some())
    }

    fn set_connected(&self, connected: bool, peer: Option<i32>) {
        self.peer.store(peer.unwrap_or(0), Relaxed);
        let device = self.name.clone();
        self.tell(match connected {
            true => Event::FrontEndConnected { device },
            false => Event::FrontEndDisconnected { device },
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Limits;
    use crate::nic::NicConfig;
    use crate::plane::tests::{move_while_a_session_begins, pool_with_threads};

    #[test]
    fn move_while_a_session_begins_is_of_its_queue_and_of_no_other() {
        let (pool, threads) = pool_with_threads();
        let nic = Nic::new(NicConfig {
            name: "nic".to_owned(),
            mac: [2, 0, 0, 0, 0, 1],
            mtu: 1500,
            limits: [None; 2],
            promises: [None; 2],
            link: Link::Taps(Vec::new()),
            memory: Limits::default().memory,
            positions: None,
        });
        let (name, events) = (DiskName::new("nic").unwrap(), broadcast::Sender::new(1));
        let host = NicHost::new(name, Arc::new(nic), Arc::clone(&pool), vec![threads[0]], events);
        move_while_a_session_begins(&host, &pool, threads, |key| {
            let mut queues = host.queues();
            queues[0].key = Some(key());
        });
    }
}
