//! The control API: HTTP/1.1 and JSON on a unix socket, one thread.
//!
//! Who may: root, the service's own user, and one group if it is configured; all others are
//! disconnected unread. What a connection may cost: one request, a body of [`MAX_BODY`], at most
//! [`MAX_FDS`] descriptors (the rest is closed by the kernel), [`REQUEST_TIME`], and one of
//! [`MAX_CONNECTIONS`] places; a reader that does not read is dropped, and so is one that has not read all of an answer
//! within 30 s, but for events. Where all places are taken, a newcomer gets that of the
//! connection whose request has been incomplete for longest, once that is 100 ms.
//!
//! The changes of a device are made one at a time, on threads of their own, so that one that waits for the
//! disk keeps nobody from looking, nor from changing another device. The thread that hears requests is nice: 1,000 malformed ones a
//! second leave the data path its CPUs.
//!
//! Properties (tests of the same name): `socket_is_private_and_gone_at_the_end`,
//! `stale_socket_is_replaced_and_a_served_one_is_not`, `surplus_descriptors_are_closed`,
//! `large_body_is_refused`, `half_sent_requests_keep_nobody_from_being_answered`, `wrong_requests_get_an_error_body`,
//! `requests_are_heard_by_a_nice_thread_and_changes_made_by_another`.

mod connection;
mod metrics;
mod routes;
mod socket;

#[cfg(test)]
mod tests;

use std::io;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rtvirtio_spec::serve::Control;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::{Instant, sleep, timeout_at};

use crate::plane::Plane;
use crate::sandbox::{Identity, give};
use connection::{Connection, Fds, Incomplete};
use rtvirtio_vhost::server::give_way;

/// The most bytes of a request's body.
pub const MAX_BODY: usize = 64 << 10;
/// The most connections at a time; more wait to be accepted.
pub const MAX_CONNECTIONS: usize = 64;
/// The most readers of events among them.
pub const MAX_EVENT_READERS: usize = 32;
/// The most descriptors of a request.
pub const MAX_FDS: usize = 1 + rtvirtio_spec::serve::MAX_PAIRS as usize;
/// How long a request may take, from its header's end to its answer.
pub const REQUEST_TIME: Duration = Duration::from_secs(30);
/// How long a header may take.
const HEADER_TIME: Duration = Duration::from_secs(5);
/// How long a request may be incomplete while others wait for its place. A peer writes it at once.
const INCOMPLETE_TIME: Duration = Duration::from_millis(100);
/// How long a change that is under way is waited for at the end.
const SHUTDOWN_TIME: Duration = Duration::from_secs(2);
/// How long the host may take to start its threads.
const START_TIME: Duration = Duration::from_secs(5);

/// Threads of changes. A disk that does not answer may keep one for as long as that lasts; the changes of a
/// device come one after the other.
const CHANGES: usize = 16;
/// How long a thread of changes waits for one.
const FOR_EVER: Duration = Duration::from_secs(u32::MAX as u64);

/// Why the control API does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    /// Somebody serves this socket.
    #[error("{} is served by another process", .0.display())]
    InUse(PathBuf),
    /// Something else is in the socket's place.
    #[error("{} is there and is no socket", .0.display())]
    NotASocket(PathBuf),
    /// The socket cannot be made.
    #[error("cannot make the socket {}", path.display())]
    Socket {
        /// Its path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Threads of changes do not start.
    #[error(
        "cannot start the control API's {CHANGES} threads: let the service have more (TasksMax=, pids.max, ulimit -u)"
    )]
    Threads,
    /// Its thread does not start.
    #[error("cannot start the control thread")]
    Thread(#[source] io::Error),
}

/// The control API's socket, at which nobody is served yet; removed when dropped.
#[derive(Debug)]
pub struct ControlSocket {
    socket: socket::Socket,
    listener: UnixListener,
    group: Option<u32>,
}

impl ControlSocket {
    /// Makes it, the property of `owner`, if one is given.
    ///
    /// # Errors
    /// [`ControlError`].
    pub fn make(control: &Control, owner: Option<&Identity>) -> Result<Self, ControlError> {
        let group = control.group;
        let (socket, listener) = socket::Socket::make(&control.socket, group)?;
        if let Some(owner) = owner {
            let path = &control.socket;
            give(path, owner, group)
                .map_err(|source| ControlError::Socket { path: path.clone(), source })?;
        }
        Ok(Self { socket, listener, group })
    }
}

/// The control API at work; ends when dropped.
#[derive(Debug)]
pub struct ControlServer {
    socket: socket::Socket,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl ControlServer {
    /// Makes the socket and serves `plane`.
    ///
    /// # Errors
    /// [`ControlError`].
    pub fn start(control: &Control, plane: Arc<dyn Plane>) -> Result<Self, ControlError> {
        Self::serve(ControlSocket::make(control, None)?, plane)
    }

    /// Serves `plane` on a socket.
    ///
    /// # Errors
    /// [`ControlError::Thread`], [`ControlError::Threads`].
    pub fn serve(socket: ControlSocket, plane: Arc<dyn Plane>) -> Result<Self, ControlError> {
        let ControlSocket { socket, listener, group } = socket;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .max_blocking_threads(CHANGES)
            .thread_keep_alive(FOR_EVER)
            .thread_name("rtv-change")
            .build()
            .map_err(ControlError::Thread)?;
        // They are started here, once: IOThreads that a change adds inherit their nice value.
        let all = Arc::new((Mutex::new(0), Condvar::new()));
        // Until all are there. The host may have no thread for one, which is tried again when another has ended.
        let wait = |(started, changed): &(Mutex<usize>, Condvar), more: usize| -> usize {
            let mut started = started.lock().unwrap_or_else(PoisonError::into_inner);
            *started += more;
            changed.notify_all();
            let is_short = |started: &mut usize| *started < CHANGES;
            let waited = changed.wait_timeout_while(started, START_TIME, is_short);
            *waited.unwrap_or_else(PoisonError::into_inner).0
        };
        for _ in 0..CHANGES {
            let all = Arc::clone(&all);
            runtime.spawn_blocking(move || wait(&all, 1));
        }
        if wait(&all, 0) < CHANGES {
            runtime.shutdown_background();
            return Err(ControlError::Threads);
        }
        let (stop, stopped) = oneshot::channel();
        let serve = move || {
            give_way();
            runtime.block_on(async {
                tokio::select! {
                    () = accept(listener, plane, group) => {}
                    _ = stopped => {}
                }
            });
            runtime.shutdown_timeout(SHUTDOWN_TIME);
        };
        let thread = std::thread::Builder::new().name("rtv-control".to_owned());
        let thread = thread.spawn(serve).map_err(ControlError::Thread)?;
        Ok(Self { socket, stop: Some(stop), thread: Some(thread) })
    }

    /// Where it listens.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.socket.path()
    }
}

impl Drop for ControlServer {
    fn drop(&mut self) {
        // The receiver is gone only when the thread is.
        let _ = self.stop.take().map(|stop| stop.send(()));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

async fn accept(listener: UnixListener, plane: Arc<dyn Plane>, group: Option<u32>) {
    let Ok(listener) = tokio::net::UnixListener::from_std(listener) else { return };
    let routes = TowerToHyperService::new(routes::router(plane));
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let incomplete = Incomplete::default();
    for number in 0.. {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(_) => {
                // Out of descriptors, most likely: they come back.
                sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        if !socket::may_use(&stream, group) {
            continue;
        }
        // Those behind it wait in the backlog meanwhile.
        let Some(place) = find_place(&places, &incomplete).await else { return };
        let fds = Fds::default();
        let (routes, of) = (routes.clone(), fds.clone());
        let (coming, end) = incomplete.add(number);
        let whose = coming.clone();
        // A layer of the router would make all routes anew for each connection.
        let service = service_fn(move |mut request| {
            request.extensions_mut().insert(of.clone());
            request.extensions_mut().insert(whose.clone());
            whose.is_heard();
            routes.call(request)
        });
        tokio::spawn(async move {
            let mut http = hyper::server::conn::http1::Builder::new();
            // One request a connection: its descriptors are then that request's.
            http.keep_alive(false).timer(TokioTimer::new()).header_read_timeout(HEADER_TIME);
            let io = TokioIo::new(Connection::new(stream, fds, coming.clone()));
            tokio::select! {
                // Before its request is read, which may then come whole and be begun.
                biased;
                () = end.notified() => {}
                // An error is the peer's: it has been told, or is gone.
                _ = http.serve_connection(io, service) => {}
            }
            coming.has_come();
            drop(place);
        });
    }
}

/// A place for a connection: a free one, or that of the request that has been incomplete for longest.
async fn find_place(
    places: &Arc<Semaphore>,
    incomplete: &Incomplete,
) -> Option<OwnedSemaphorePermit> {
    let mut place = pin!(Arc::clone(places).acquire_owned());
    loop {
        // Where all are whole, a place becomes free by itself.
        let ends = incomplete.since().unwrap_or_else(Instant::now) + INCOMPLETE_TIME;
        if let Ok(place) = timeout_at(ends, &mut place).await {
            return place.ok();
        }
        if incomplete.since().is_some_and(|since| since + INCOMPLETE_TIME <= Instant::now()) {
            incomplete.end_longest();
            return place.await.ok();
        }
    }
}
