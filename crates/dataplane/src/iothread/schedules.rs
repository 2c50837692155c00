//! An IOThread's part in the schedules of its queues' devices.

use std::sync::Arc;

use rtvirtio_engine::Token;
use rtvirtio_qos::Running;

use super::{IoThread, ThreadMessage, get};

use crate::clock::now;
use crate::drr::QUANTUM_NS;
use crate::key::from_token;
use crate::mailbox::Sender;
use crate::queue::Queue;
use crate::schedule::{Owner, Schedule, SchedulerClient};
use crate::thread_stats::IoThreadStats;

/// The mailbox of an IOThread, as a schedule knows it.
pub(super) struct ByMessage(pub(super) Sender<ThreadMessage>);

impl Owner for ByMessage {
    fn start(&self, token: Token, running: Running) {
        let _ = self.0.post(ThreadMessage::StartScheduled { token, running });
    }

    fn rescheduled(&self, schedule: Arc<Schedule>) {
        let _ = self.0.post(ThreadMessage::Rescheduled(schedule));
    }
}

impl IoThread {
    /// Tells the devices' schedules what has happened and starts what they say. Whether there was
    /// anything.
    pub(super) fn schedule(&mut self) -> bool {
        let (mut worked, begun) = (false, now());
        for at in 0..self.scheduler_clients.len() {
            // What ends as soon as it is started makes room at once; but a request has as many parts as its guest likes, and others wait
            // for this no longer than for a turn.
            while let Some(scheduler_client) = &mut self.scheduler_clients[at]
                && let mut time = now()
                && scheduler_client.is_due(time)
                && (!worked || time.saturating_sub(begun) < QUANTUM_NS.unsigned_abs())
            {
                worked = true;
                let mut to_start = std::mem::take(&mut self.to_start);
                let waited = scheduler_client.exchange(&self.as_owner, &mut to_start, time);
                if waited > 0 {
                    IoThreadStats::add(&self.stats.lock_ns, waited);
                }
                self.start_all(to_start.drain(..), &mut time);
                self.to_start = to_start;
            }
            // The last queue may have left before its last word was passed on.
            self.scheduler_clients[at].take_if(|scheduler_client| scheduler_client.is_unused());
        }
        worked
    }

    pub(super) fn start_scheduled(&mut self, token: Token, running: Running, time: &mut u64) {
        self.start_all(std::iter::once((token, running)), time);
    }

    /// Starts requests, those of a queue that follow each other at one go.
    fn start_all(&mut self, requests: impl Iterator<Item = (Token, Running)>, time: &mut u64) {
        let mut requests = requests.peekable();
        while let Some((token, running)) = requests.next() {
            let (key, head) = from_token(token);
            if get(&self.served, key).is_some() {
                self.with_queue(key, |queue, turn| {
                    queue.start_scheduled(head, running, turn, time);
                    let is_of = |next: &(Token, Running)| from_token(next.0).0 == key;
                    while let Some((token, running)) = requests.next_if(is_of) {
                        queue.start_scheduled(from_token(token).1, running, turn, time);
                    }
                });
                self.wake(key);
            } else if let Some(forward) = self.forwards.get(&key) {
                let _ = forward.to.post(ThreadMessage::StartScheduled { token, running });
            }
        }
    }

    /// The scheduler client of a queue's device; a new one if this thread has none yet.
    pub(super) fn scheduler_client(&mut self, queue: &Queue) -> Option<usize> {
        let schedule = queue.schedule()?;
        let of = |scheduler_client: &Option<SchedulerClient>| {
            scheduler_client.as_ref().is_some_and(|b| b.is_of(schedule))
        };
        let at = self.scheduler_clients.iter().position(of).unwrap_or_else(|| {
            let new = Some(SchedulerClient::new(Arc::clone(schedule)));
            match self.scheduler_clients.iter().position(Option::is_none) {
                Some(free) => {
                    self.scheduler_clients[free] = new;
                    free
                }
                None => {
                    self.scheduler_clients.push(new);
                    self.scheduler_clients.len() - 1
                }
            }
        });
        if let Some(scheduler_client) = &mut self.scheduler_clients[at] {
            scheduler_client.enter(queue.key.table(), &self.as_owner);
        }
        Some(at)
    }
}
