//! What an IOThread counts of itself, and who frees it when it is stuck in a call.

use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, PoisonError};

use crate::key::QueueKey;

/// What a thread has done, in ns of CLOCK_MONOTONIC and events. The thread alone writes.
#[derive(Debug, Default)]
pub struct IoThreadStats {
    /// In turns that found work.
    pub busy_ns: AtomicU64,
    /// Of that, waiting for schedules that other threads had.
    pub lock_ns: AtomicU64,
    /// Polling in vain.
    pub poll_ns: AtomicU64,
    /// Times that it would have polled, or polled on, and others needed the CPUs.
    pub poll_refused: AtomicU64,
    /// Times that another task had its CPU while it polled.
    pub poll_gaps: AtomicU64,
    /// Waiting.
    pub sleep_ns: AtomicU64,
    /// Times that it waited.
    pub sleeps: AtomicU64,
    /// Turns with work.
    pub turns: AtomicU64,
    /// How long it polls now, ns.
    pub polling: AtomicU64,
    /// The key of the queue whose driver it is calling now; zero: none.
    calling: AtomicU64,
    watchdog: Arc<Watchdog>,
}

/// Whoever frees threads that are stuck in a call: it sleeps long while they do nothing.
#[derive(Debug, Default)]
pub(crate) struct Watchdog {
    is_idle: AtomicBool,
    thread: Mutex<Option<std::thread::Thread>>,
}

impl Watchdog {
    /// The calling thread is the one.
    pub(crate) fn enter(&self) {
        *self.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(std::thread::current());
    }

    /// It is about to sleep long, and looks once more after this.
    pub(crate) fn set_idle(&self, idle: bool) {
        self.is_idle.store(idle, SeqCst);
    }

    fn wake(&self) {
        if self.is_idle.load(SeqCst)
            && self.is_idle.swap(false, SeqCst)
            && let Some(thread) = &*self.thread.lock().unwrap_or_else(PoisonError::into_inner)
        {
            thread.unpark();
        }
    }
}

impl IoThreadStats {
    pub(crate) fn watched_by(watchdog: Arc<Watchdog>) -> Self {
        Self { watchdog, ..Self::default() }
    }

    pub(crate) fn add(number: &AtomicU64, by: u64) {
        number.store(number.load(Relaxed).wrapping_add(by), Relaxed);
    }

    pub(crate) fn set_calling(&self, queue: Option<QueueKey>) {
        self.calling.store(queue.map_or(0, QueueKey::get), SeqCst);
        if queue.is_some() {
            self.watchdog.wake();
        }
    }

    /// The queue whose driver is being called at this moment.
    pub(crate) fn calling(&self) -> Option<QueueKey> {
        QueueKey::from_number(self.calling.load(SeqCst))
    }
}
