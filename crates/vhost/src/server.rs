//! Accepts front ends: one thread for the sockets of all devices, and one for each front end that
//! is connected.
//!
//! A device has one front end at a time. Another one waits in the socket's backlog until the first
//! has left, and is then accepted at once, even if the first one's requests are still being
//! drained: only its rings wait for them. So a device costs no thread until it has a front end, and
//! at most two when a front end reconnects.
//!
//! Processes that use a disk by slots connect to another socket of its, any number at a time up to
//! [`CLIENTS_MAX`] (`clients`).

use std::collections::HashMap;
use std::net::Shutdown;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rtvirtio_engine::AbortOnPanic;
use rustix::buffer::spare_capacity;
use rustix::event::{EventfdFlags, epoll};
use rustix::io::Errno;

use crate::backend::Backend;
use crate::protocol::Connection;
use crate::session::{Ended, QueueHost, Session, serve};

mod clients;
mod listener;

pub use clients::CLIENTS_MAX;
use clients::Clients;
pub use listener::{Bound, ListenError, Listener, bind, bind_to, is_answered};

/// A session's thread handles messages and sets up rings: it needs little stack.
const STACK: usize = 256 << 10;
/// Sessions that fail are reported at most this often for a device: whoever makes them fail can
/// reconnect without end.
const REPORT_PERIOD: Duration = Duration::from_secs(1);
/// How long no front end is accepted after the system had no descriptor or thread left.
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(50);
/// Nice value of the threads that accept and hear front ends, and of that which hears the control API: who
/// connects and talks without end must not keep an IOThread from its CPU.
const NICE: i32 = 10;

/// The calling thread, and those that it starts, leave CPUs to others from now on.
pub fn give_way() {
    let this = Some(rustix::thread::gettid());
    if rustix::process::getpriority_process(this).is_ok_and(|nice| nice < NICE) {
        let _ = rustix::process::setpriority_process(this, NICE);
    }
}
/// The key of the descriptor that ends the accepting thread.
const STOP: u64 = 0;

/// Is told, by the device's name, of each session that has ended in an error or with refused
/// requests, from the session's thread.
pub type Report = dyn Fn(&str, &Ended) + Send + Sync;

/// Accepts front ends of any number of devices. Dropping it ends all sessions.
pub struct Server {
    shared: Arc<Shared>,
    accepting: Option<JoinHandle<()>>,
}

struct Shared {
    epoll: OwnedFd,
    stop: OwnedFd,
    sockets: Mutex<HashMap<u64, Arc<dyn Socket>>>,
    report: Arc<Report>,
}

/// Names a device that is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SocketId(u64);

impl Server {
    /// A server without devices.
    ///
    /// # Errors
    /// The system has no descriptor or thread left.
    pub fn new(report: Arc<Report>) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            stop: rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?,
            sockets: Mutex::default(),
            report,
        });
        let data = epoll::EventData::new_u64(STOP);
        epoll::add(&shared.epoll, &shared.stop, data, epoll::EventFlags::IN)?;
        let accepting =
            std::thread::Builder::new().name("accept".into()).stack_size(STACK).spawn({
                let shared = Arc::clone(&shared);
                move || {
                    let _fatal = AbortOnPanic::new();
                    give_way();
                    shared.accept_all();
                }
            })?;
        Ok(Self { shared, accepting: Some(accepting) })
    }

    /// Serves a device on a socket, its rings by `host`.
    ///
    /// # Errors
    /// The system refuses to watch the socket.
    pub fn add<H>(
        &self,
        listener: Listener,
        device: Arc<dyn Backend>,
        host: Arc<H>,
    ) -> std::io::Result<SocketId>
    where
        H: QueueHost + Send + Sync + 'static,
    {
        let shared = Arc::downgrade(&self.shared);
        self.watch(|id| Served { id, shared, listener, device, host, sessions: Mutex::default() })
    }

    /// Serves processes on a socket, each by a call of `serve` that ends with its connection. It is
    /// given who the process is, if that can be seen.
    ///
    /// # Errors
    /// The system refuses to watch the socket.
    pub fn add_clients(
        &self,
        listener: Listener,
        serve: impl Fn(&UnixStream, Option<i32>) + Send + Sync + 'static,
    ) -> std::io::Result<SocketId> {
        let (shared, serve) = (Arc::downgrade(&self.shared), Box::new(serve));
        self.watch(|id| Clients { id, shared, listener, serve, running: Mutex::default() })
    }

    fn watch<S: Socket + 'static>(&self, make: impl FnOnce(u64) -> S) -> std::io::Result<SocketId> {
        let mut sockets = lock(&self.shared.sockets);
        // Never used twice: an event of a socket that was removed must not wake another.
        static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(STOP + 1);
        let id = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let socket = make(id);
        epoll::add(
            &self.shared.epoll,
            socket.listener(),
            epoll::EventData::new_u64(id),
            epoll::EventFlags::IN | epoll::EventFlags::ONESHOT,
        )?;
        sockets.insert(id, Arc::new(socket));
        Ok(SocketId(id))
    }

    /// Ends the sessions of a device, drained, and closes its socket. Whether it was served.
    pub fn remove(&self, id: SocketId) -> bool {
        let socket = lock(&self.shared.sockets).remove(&id.0);
        if let Some(socket) = &socket {
            socket.close(&self.shared.epoll);
        }
        socket.is_some()
    }

    /// Ends all connections. Sessions end when what they have in flight has ended.
    pub fn shut_down(&self) {
        let sockets: Vec<_> = lock(&self.shared.sockets).values().cloned().collect();
        for socket in sockets {
            socket.shut_down();
        }
    }

    /// Whether a front end is connected to a device, as far as that is served.
    #[must_use]
    pub fn is_connected(&self, id: SocketId) -> bool {
        let socket = lock(&self.shared.sockets).get(&id.0).cloned();
        socket.is_some_and(|socket| socket.is_connected())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let stopped = rustix::io::write(&self.shared.stop, &1_u64.to_ne_bytes());
        debug_assert!(stopped.is_ok());
        if let Some(accepting) = self.accepting.take() {
            let _ = accepting.join();
        }
        let sockets: Vec<_> = lock(&self.shared.sockets).drain().collect();
        // All at once, then one after the other: they drain together.
        for (_, socket) in &sockets {
            socket.shut_down();
        }
        for (_, socket) in sockets {
            socket.close(&self.shared.epoll);
        }
    }
}

impl Shared {
    /// Accepts until the server is dropped.
    fn accept_all(&self) {
        let mut events = Vec::with_capacity(32);
        loop {
            events.clear();
            match epoll::wait(&self.epoll, spare_capacity(&mut events), None) {
                Ok(_) | Err(Errno::INTR) => {}
                // It cannot fail otherwise; to go round and round would be worse than to stop.
                Err(_) => return,
            }
            for event in &events {
                let id = event.data.u64();
                if id == STOP {
                    return;
                }
                let socket = lock(&self.sockets).get(&id).cloned();
                let Some(socket) = socket else { continue };
                if Arc::clone(&socket).accept().is_err() {
                    // The front end stays in the backlog, or comes again.
                    std::thread::sleep(EXHAUSTED_PAUSE);
                    socket.listen();
                }
            }
        }
    }
}

/// A device's socket with its sessions, whatever serves its rings.
trait Socket: Send + Sync {
    fn listener(&self) -> &Listener;
    /// Accepts a front end, if one waits, and listens again if none did.
    fn accept(self: Arc<Self>) -> std::io::Result<()>;
    /// Wakes the accepting thread when a front end waits.
    fn listen(&self);
    fn is_connected(&self) -> bool;
    /// Ends all connections.
    fn shut_down(&self);
    /// Ends all sessions and waits for them.
    fn close(&self, epoll: &OwnedFd);
}

/// Has the accepting thread woken when somebody waits at a socket.
fn listen_on(shared: &Weak<Shared>, id: u64, listener: &Listener) {
    let Some(shared) = shared.upgrade() else { return };
    let flags = epoll::EventFlags::IN | epoll::EventFlags::ONESHOT;
    // It fails only when the socket is being closed.
    let _ = epoll::modify(&shared.epoll, listener, epoll::EventData::new_u64(id), flags);
}

struct Served<H> {
    id: u64,
    shared: Weak<Shared>,
    listener: Listener,
    device: Arc<dyn Backend>,
    host: Arc<H>,
    sessions: Mutex<Sessions>,
}

#[derive(Default)]
struct Sessions {
    closed: bool,
    running: Vec<Running>,
    reported: Option<Instant>,
}

struct Running {
    // The session's: closed when that ends, not when the next one is accepted.
    stream: Weak<UnixStream>,
    // Whether it still has its front end; the session may outlive that by what it has to drain.
    connected: bool,
    thread: JoinHandle<()>,
}

impl<H> Socket for Served<H>
where
    H: QueueHost + Send + Sync + 'static,
{
    fn listener(&self) -> &Listener {
        &self.listener
    }

    fn accept(self: Arc<Self>) -> std::io::Result<()> {
        let mut sessions = lock(&self.sessions);
        if sessions.closed {
            return Ok(());
        }
        let Some(stream) = self.listener.accept()? else {
            self.listen();
            return Ok(());
        };
        // What has ended needs no handle any more.
        sessions.running.retain(|session| !session.thread.is_finished());
        let thread =
            std::thread::Builder::new().name("session".into()).stack_size(STACK).spawn({
                let (served, stream) = (Arc::clone(&self), Arc::clone(&stream));
                move || {
                    let _fatal = AbortOnPanic::new();
                    served.run(stream)
                }
            })?;
        let stream = Arc::downgrade(&stream);
        sessions.running.push(Running { stream, connected: true, thread });
        Ok(())
    }

    fn listen(&self) {
        listen_on(&self.shared, self.id, &self.listener);
    }

    fn is_connected(&self) -> bool {
        lock(&self.sessions).running.iter().any(|session| session.connected)
    }

    fn shut_down(&self) {
        let mut sessions = lock(&self.sessions);
        sessions.closed = true;
        for stream in sessions.running.iter().filter_map(|session| session.stream.upgrade()) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn close(&self, epoll: &OwnedFd) {
        let _ = epoll::delete(epoll, &self.listener);
        self.shut_down();
        self.listener.unbind();
        let running = std::mem::take(&mut lock(&self.sessions).running);
        for session in running {
            // A panic has been printed.
            let _ = session.thread.join();
        }
    }
}

impl<H> Served<H>
where
    H: QueueHost + Send + Sync + 'static,
{
    /// Serves a front end.
    fn run(&self, stream: Arc<UnixStream>) {
        self.host.set_connected(true, peer(&stream));
        let left = Left { served: self, stream: &stream };
        let mut session = Session::new(Arc::clone(&self.device), Arc::clone(&self.host));
        let mut connection = Connection::new(Arc::clone(&stream));
        let ended = serve(&mut connection, &mut session);
        // The next front end is let in before the rings are drained.
        drop(left);
        if (ended.error.is_some() || ended.refused > 0)
            && self.may_report()
            && let Some(shared) = self.shared.upgrade()
        {
            (shared.report)(self.device.name(), &ended);
        }
    }

    fn may_report(&self) -> bool {
        let mut sessions = lock(&self.sessions);
        let now = Instant::now();
        let due = sessions.reported.is_none_or(|last| now - last >= REPORT_PERIOD);
        if due {
            sessions.reported = Some(now);
        }
        due
    }
}

/// Lets the next front end in when it is dropped, even by a panic.
struct Left<'a, H: QueueHost + Send + Sync + 'static> {
    served: &'a Served<H>,
    stream: &'a Arc<UnixStream>,
}

impl<H: QueueHost + Send + Sync + 'static> Drop for Left<'_, H> {
    fn drop(&mut self) {
        // The front end learns at once that nobody answers any more.
        let _ = self.stream.shutdown(Shutdown::Both);
        for session in &mut lock(&self.served.sessions).running {
            if std::ptr::eq(session.stream.as_ptr(), Arc::as_ptr(self.stream)) {
                session.connected = false;
            }
        }
        self.served.host.set_connected(false, None);
        self.served.listen();
    }
}

/// The process that connected; none if it cannot be seen from here.
fn peer(stream: &UnixStream) -> Option<i32> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // Not rustix's: its type has no room for the 0 of a process in another PID name space.
    // SAFETY: the kernel writes at most `length` bytes to a structure of that size.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut length,
        )
    };
    (result == 0 && peer.pid > 0).then_some(peer.pid)
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
