//! Accepts processes that use a disk by slots: one thread for each that is connected.

use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;

use rtvirtio_engine::AbortOnPanic;
use rustix::event::epoll;

use super::{Listener, STACK, Shared, Socket, listen_on, lock};

/// The most clients of a disk: each may take a thread here and the memory of its slots.
pub const CLIENTS_MAX: usize = 64;

/// Serves a client until it leaves or must; who it is, if that can be seen.
type Serve = dyn Fn(&UnixStream, Option<i32>) + Send + Sync;

/// A disk's socket for clients.
pub(super) struct Clients {
    pub(super) id: u64,
    pub(super) shared: Weak<Shared>,
    pub(super) listener: Listener,
    pub(super) serve: Box<Serve>,
    pub(super) running: Mutex<Running>,
}

#[derive(Default)]
pub(super) struct Running {
    closed: bool,
    clients: Vec<Client>,
}

struct Client {
    // The thread's: closed when that ends.
    stream: Weak<UnixStream>,
    thread: JoinHandle<()>,
}

impl Socket for Clients {
    fn listener(&self) -> &Listener {
        &self.listener
    }

    fn accept(self: Arc<Self>) -> std::io::Result<()> {
        let mut running = lock(&self.running);
        if running.closed {
            return Ok(());
        }
        let Some(stream) = self.listener.accept()? else {
            self.listen();
            return Ok(());
        };
        running.clients.retain(|client| !client.thread.is_finished());
        // One too many learns by the end of its connection that there is nothing for it.
        if running.clients.len() < CLIENTS_MAX {
            let thread =
                std::thread::Builder::new().name("client".into()).stack_size(STACK).spawn({
                    let (clients, stream) = (Arc::clone(&self), Arc::clone(&stream));
                    move || {
                        let _fatal = AbortOnPanic::new();
                        (clients.serve)(&stream, super::peer(&stream));
                    }
                })?;
            running.clients.push(Client { stream: Arc::downgrade(&stream), thread });
        }
        self.listen();
        Ok(())
    }

    fn listen(&self) {
        listen_on(&self.shared, self.id, &self.listener);
    }

    fn is_connected(&self) -> bool {
        lock(&self.running).clients.iter().any(|client| !client.thread.is_finished())
    }

    fn shut_down(&self) {
        let mut running = lock(&self.running);
        running.closed = true;
        for stream in running.clients.iter().filter_map(|client| client.stream.upgrade()) {
            // Its thread hears of it. The client must not yet: to that, the end of the connection says that nothing
            // of its own is in flight any more.
            let _ = stream.shutdown(Shutdown::Read);
        }
    }

    fn close(&self, epoll: &OwnedFd) {
        let _ = epoll::delete(epoll, &self.listener);
        self.shut_down();
        self.listener.unbind();
        let clients = std::mem::take(&mut lock(&self.running).clients);
        for client in clients {
            // A panic has been printed.
            let _ = client.thread.join();
        }
    }
}
