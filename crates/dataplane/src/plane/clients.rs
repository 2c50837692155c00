//! The processes of this host that use a device by slots.
//!
//! A client connects to the device's socket for that, is sent the memory of its slots and which file or
//! block device they are for (`completion::slots`), and says nothing more: that its connection ends, or its
//! process, is all that is heard from it. Then what it has in flight ends, and its slots are gone. One that breaks its
//! slots loses its connection; so does one that talks.
//!
//! Its slots are served on the IOThread of the device's queue 0, wherever that goes.

use std::os::fd::{AsFd, AsRawFd, FromRawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use rtvirtio_completion::slots::{FileIdentity, Offer, SLOTS, SlotMemory};
use rtvirtio_spec::control::{ClientState, SlotsState};
use rtvirtio_units::IoThreadName;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::SendFlags;

use super::host::{Client, Host};
use crate::key::QueueKey;
use crate::queue::SlotsSetup;
use crate::stats::QueueStats;
use rtvirtio_vhost::protocol::send;
use rtvirtio_vhost::session::StartError;

impl Host {
    /// Serves a process until it leaves or must. One that gets no slots learns so by the end of its
    /// connection, and goes on without.
    pub(super) fn serve_client(&self, stream: &UnixStream, process: Option<i32>) {
        let Some(offer) = self.offer() else { return };
        let Ok((memory, file)) = SlotMemory::create() else { return };
        let memory = Arc::new(memory);
        let Ok(broken) = eventfd(0, EventfdFlags::CLOEXEC) else { return };
        let Some(key) = self.start_client(&memory, &broken, process) else { return };
        let sent = send(stream, &offer.to_bytes(), Some(file.as_fd()), SendFlags::DONTWAIT);
        drop(file);
        if sent.is_ok() {
            until_over(stream, &broken);
        }
        self.stop_client(key);
        // What is not done by now will not be: it may ask for it in another way.
        memory.slots().end();
    }

    /// What a client is told. `None`: the disk is no file that it could have opened.
    fn offer(&self) -> Option<Offer> {
        let engine = self.device().engine();
        let file = FileIdentity::of(&rustix::fs::fstat(engine.file()?).ok()?)?;
        let read_only = self.device().read_only();
        // What the engine rounds for guests, the plain call on the file refuses: a program that learns of 512 bytes by a slot
        // would fail where it has none.
        let block = engine.written_block().max(512);
        Some(Offer { file, read_only, block })
    }

    fn start_client(
        &self,
        memory: &Arc<SlotMemory>,
        broken: &OwnedFd,
        process: Option<i32>,
    ) -> Option<QueueKey> {
        let error = broken.try_clone().ok()?;
        let started = self.with_image(|| {
            let stats = Arc::new(QueueStats::new());
            let setup = SlotsSetup {
                device: Arc::clone(self.device()),
                memory: Arc::clone(memory),
                error,
                stats: Arc::clone(&stats),
            };
            let (thread, members) = {
                let state = self.state();
                (state.first_thread().ok_or(StartError::Full)?, state.members)
            };
            // The IOThread may be busy for a while.
            let key = self.pool().start_slots(setup, thread).map_err(|_| StartError::Full)?;
            let mut state = self.state();
            state.clients.push(Client { process, key, stats });
            let now = state.first_thread().filter(|&now| now != thread);
            let is_outdated = state.members != members;
            drop(state);
            if let Some(now) = now {
                let _ = self.pool().move_queue(key, now);
            }
            if is_outdated {
                self.join(&[key]);
            }
            Ok(key)
        });
        started.ok()
    }

    /// Returns when nothing of it is in flight.
    fn stop_client(&self, key: QueueKey) {
        let queue = self.pool().stop(key);
        if queue.is_ok_and(|queue| queue.broken().is_some()) {
            self.broken_clients.fetch_add(1, Relaxed);
        }
        self.state().clients.retain(|client| client.key != key);
        self.detach_queue();
    }

    /// The clients that there are, served by that IOThread.
    pub(super) fn clients(&self, iothread: &IoThreadName) -> SlotsState {
        let state = self.state();
        let clients = state.clients.iter().map(|client| {
            let stats = client.stats.snapshot();
            ClientState {
                process: client.process,
                iothread: iothread.clone(),
                slots: SLOTS as u32,
                in_flight: stats.in_flight,
                operations: stats.operations,
                read_bytes: stats.read_bytes,
                written_bytes: stats.written_bytes,
                errors: stats.errors,
                kicks: stats.kicks,
                calls: stats.calls,
            }
        });
        SlotsState { broken: self.broken_clients.load(Relaxed), clients: clients.collect() }
    }
}

/// Waits until a client says something, if it is only that it has gone, or has broken its slots.
fn until_over(stream: &UnixStream, broken: &OwnedFd) {
    let process = process(stream);
    let of = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
    let two = [of(stream.as_fd()), of(broken.as_fd())];
    let mut fds: Vec<_> = two.into_iter().chain(process.as_ref().map(|p| of(p.as_fd()))).collect();
    while matches!(poll(&mut fds, None), Ok(0) | Err(Errno::INTR)) {}
}

/// The process that connected, which ends though a child may still have the socket. `None` before Linux 6.5.
fn process(stream: &UnixStream) -> Option<OwnedFd> {
    let mut fd: libc::c_int = -1;
    let mut length = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to a number of that size.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERPIDFD,
            (&raw mut fd).cast(),
            &raw mut length,
        )
    };
    // SAFETY: a descriptor that the kernel has made for this.
    (result == 0 && fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) })
}
