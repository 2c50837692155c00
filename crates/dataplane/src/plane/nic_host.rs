//! The rings of a network device: where each is served, and the sessions that start and stop them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use rtvirtio_iocores::QueueKind;
use rtvirtio_spec::control::{Event, QueueDirection};
use rtvirtio_units::DiskName;
use rtvirtio_vhost::Backend as _;
use rtvirtio_vhost::session::{self, Change, QueueHost, StartError, StoppedQueue};
use rtvirtio_virtq::memory::Memory;
use tokio::sync::broadcast;

use super::Report;
use super::host::change;
use super::mapped::{MappedHost, MappedQueues, Place};
use crate::call::{self, Call};
use crate::key::QueueKey;
use crate::nic::{Link, Nic, Terms};
use crate::pool::{MoveError, Pool, ThreadId};
use crate::queue::NicQueueSetup;

/// The rings of one network device.
pub(crate) struct NicHost {
    pub(super) queues: MappedQueues<Vec<Place>>,
    nic: Arc<Nic>,
    /// Whether a queue has run.
    has_served: AtomicBool,
}

impl NicHost {
    /// Of a device whose queues these threads serve.
    pub(super) fn new(
        name: DiskName,
        nic: Arc<Nic>,
        pool: Arc<Pool>,
        threads: Vec<ThreadId>,
        events: broadcast::Sender<Event>,
        report: Arc<Report>,
    ) -> Self {
        let queues = MappedQueues::new(name, pool, events, report, Place::on(threads));
        Self { queues, nic, has_served: AtomicBool::new(false) }
    }

    #[cfg(test)]
    pub(super) fn nic(&self) -> Arc<Nic> {
        Arc::clone(&self.nic)
    }

    /// Whether a queue has run.
    pub(super) fn has_served(&self) -> bool {
        self.has_served.load(Relaxed)
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
        let queues = self.queues.lock();
        let first = u16::from(direction == QueueDirection::Transmit);
        let of_direction = || (0..).zip(&*queues).skip(first.into()).step_by(2);
        if let Some((index, _)) = of_direction().find(|(_, place)| place.starting) {
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
            let _ = self.queues.pool().edit(key, move |queue| queue.set_terms(terms));
        }
    }

    /// What its frames cost.
    pub(super) fn kind(&self) -> QueueKind {
        match self.nic.attached() {
            Link::Taps(_) | Link::Socket(_) => QueueKind::Link,
            Link::Port { .. } => QueueKind::Switch,
        }
    }

    /// Tells the front end of a queue that its driver broke, if one is: the device status has changed (virtio 1.2, 2.1.2).
    fn notify_if(&self, is_broken: bool) {
        if is_broken {
            // A front end that takes no such messages sees the status when it asks for it.
            let _ = self.nic.link().notify();
        }
    }
}

impl MappedHost for NicHost {
    fn assign(&self, index: u16, to: ThreadId) -> Result<u64, MoveError> {
        self.queues.assign(index, to)
    }

    fn peer(&self) -> Option<i32> {
        self.queues.peer()
    }

    fn report_broken_queues(&self) {
        self.notify_if(self.queues.report_broken());
    }

    fn free_caller(&self) {
        self.nic.caller().free_thread();
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
            stats: Arc::clone(self.queues.stats.get(usize::from(index)).ok_or(StartError::Full)?),
        };
        self.queues.start(index, |thread| self.queues.pool().start_nic(setup, thread))?;
        self.has_served.store(true, Relaxed);
        Ok(index)
    }

    fn stop(&self, index: u16) -> StoppedQueue {
        let (stopped, is_news) = self.queues.stop(index);
        self.notify_if(is_news);
        stopped
    }

    fn update(&self, index: u16, what: Change) -> Result<(), StartError> {
        let Some(key) = self.queues.key(index) else { return Ok(()) };
        // Frames go to and from guest memory as they are: nothing is registered.
        change(self.queues.pool(), key, what, self.nic.caller(), |_: &Memory| Ok(None))
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
    use super::*;
    use crate::device::Limits;
    use crate::nic::NicConfig;
    use crate::plane::Notice;
    use crate::plane::tests::{move_while_a_session_begins, pool_with_threads};

    #[test]
    fn move_while_a_session_begins_is_of_its_queue_and_of_no_other() {
        let Some((pool, threads)) = pool_with_threads() else { return };
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
        let (nic, pool_of_nic) = (Arc::new(nic), Arc::clone(&pool));
        let report = Arc::new(|_: &str, _: Notice<'_>| ());
        let host = NicHost::new(name, nic, pool_of_nic, vec![threads[0]], events, report);
        move_while_a_session_begins(&host, &pool, threads, |key| {
            let mut queues = host.queues.lock();
            queues[0].key = Some(key());
        });
    }
}
