//! How a queue of a switch is woken by those that have something for it.

use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, fence};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;

/// Wakes the IOThread of a queue that waits for somebody else's queue, and costs nothing while it does not
/// wait.
#[derive(Debug)]
pub(super) struct Wakeup {
    pub(super) fd: OwnedFd,
    is_awaited: AtomicBool,
}

impl Wakeup {
    pub(super) fn new() -> rustix::io::Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { fd, is_awaited: AtomicBool::new(false) })
    }

    /// Something is there to be found. The fence is that of [`Self::wait`]: one of the two sides sees what the
    /// other has done before it.
    pub(super) fn wake(&self) {
        fence(SeqCst);
        if self.is_awaited.load(Relaxed) && self.is_awaited.swap(false, Relaxed) {
            let _ = rustix::io::write(&self.fd, &1_u64.to_ne_bytes());
        }
    }

    /// From now on whoever leaves something wakes; what is there already is to be looked for after this.
    pub(super) fn wait(&self) {
        self.is_awaited.store(true, Relaxed);
        fence(SeqCst);
    }

    pub(super) fn stop_waiting(&self) {
        self.is_awaited.store(false, Relaxed);
    }

    /// It has woken.
    pub(super) fn answer(&self) {
        let _ = rustix::io::read(&self.fd, &mut [0; 8]);
    }
}

/// Ports that are to be woken when a turn ends: once each, however many frames there were.
#[derive(Debug, Default)]
pub(super) struct ToWake(pub(super) Vec<u16>);

impl ToWake {
    pub(super) fn note(&mut self, port: u16) {
        if self.0.last() != Some(&port) && !self.0.contains(&port) {
            self.0.push(port);
        }
    }
}
