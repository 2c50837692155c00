//! A vhost-user-blk client without a VM: libblkio's `blkio` crate, one thread to a queue.
//!
//! What is here holds for the benchmark and the verifier alike: buffers are in one
//! shared region that the server maps, a request is a *slot* with a buffer of its
//! own, and its number is the request's user data.
//!
//! A queue has the driver's pages under it, so [`Client`] is made and dropped around
//! the queues: [`Client::run`] lends them to threads and takes them back.

use std::mem::MaybeUninit;
use std::path::Path;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use blkio::{Blkio, Blkioq, Completion, Errno, ReqFlags};

/// Descriptors of a queue: blkio's own default. A request takes three.
pub const QUEUE_SIZE: i32 = 256;
/// Requests that fit into it.
pub const MAX_DEPTH: usize = 64;
/// How long a server may take to answer all of a connection's messages.
const PATIENCE: Duration = Duration::from_secs(10);
/// Completions taken at once.
const BATCH: usize = MAX_DEPTH;

/// The client could not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The server is not there, or refuses this client.
    #[error("{step}: {source}")]
    Setup {
        /// What was being done.
        step: &'static str,
        /// Why it failed.
        #[source]
        source: blkio::Error,
    },
    /// The server took the connection, and then said nothing.
    #[error("the server does not answer within {} s", PATIENCE.as_secs())]
    Silent,
    /// Waiting for completions failed.
    #[error("wait for completions: {0}")]
    Wait(#[source] blkio::Error),
    /// Too many requests for a queue.
    #[error("a queue has room for {MAX_DEPTH} requests, not {0}")]
    Depth(usize),
}

fn setup(step: &'static str) -> impl FnOnce(blkio::Error) -> ClientError {
    move |source| ClientError::Setup { step, source }
}

/// What a client connects to.
#[derive(Debug, Clone, Copy)]
pub enum Endpoint<'a> {
    /// A vhost-user-blk server's socket.
    Socket(&'a Path),
    /// No server: io_uring on the file itself, direct; what a server can hardly beat.
    File(&'a Path),
}

/// What the client needs.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Queues.
    pub queues: usize,
    /// Slots of each.
    pub depth: usize,
    /// Bytes of a slot's buffer.
    pub buffer: usize,
}

/// A connection.
pub struct Client {
    // Queues before what they stand on.
    queues: Vec<Queue>,
    blkio: Blkio,
    capacity: u64,
}

impl Client {
    /// Connects and starts all queues.
    ///
    /// # Errors
    /// If the server is away, or lacks what the client needs.
    pub fn connect(endpoint: Endpoint<'_>, shape: Shape) -> Result<Self, ClientError> {
        let connect = move |endpoint: Endpoint<'_>| Self::started(endpoint, shape);
        patiently(endpoint, PATIENCE, connect)
    }

    fn started(endpoint: Endpoint<'_>, shape: Shape) -> Result<Self, ClientError> {
        let Shape { queues, depth, buffer } = shape;
        if depth == 0 || depth > MAX_DEPTH {
            return Err(ClientError::Depth(depth));
        }
        let mut blkio = connected(endpoint)?;
        let capacity = blkio.get_u64("capacity").map_err(setup("read the capacity"))?;
        blkio.set_i32("num-queues", queues as i32).map_err(setup("set queues"))?;
        if matches!(endpoint, Endpoint::Socket(_)) {
            blkio.set_i32("queue-size", QUEUE_SIZE).map_err(setup("set the queue size"))?;
        }
        let started = blkio.start().map_err(setup("start"))?.queues;
        let region =
            blkio.alloc_mem_region(queues * depth * buffer).map_err(setup("allocate buffers"))?;
        blkio.map_mem_region(&region).map_err(setup("share buffers"))?;
        let can = |name| blkio.get_u64(name).is_ok_and(|most| most > 0);
        let (discards, zeroes) = (can("max-discard-len"), can("max-write-zeroes-len"));
        let queue = |(index, queue)| Queue {
            queue,
            buffers: (region.addr as *mut u8).wrapping_add(index * depth * buffer),
            depth,
            buffer,
            flying: 0,
            completions: [const { MaybeUninit::uninit() }; BATCH],
            discards,
            zeroes,
        };
        let queues = started.into_iter().enumerate().map(queue).collect();
        Ok(Self { queues, blkio, capacity })
    }

    /// Bytes of the disk.
    #[must_use]
    pub const fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Its queues, for a thread that looks after several clients'.
    pub fn queues(&mut self) -> &mut [Queue] {
        &mut self.queues
    }

    /// Calls `work` with each queue and its part, in a thread each, and returns what they return.
    ///
    /// # Panics
    /// If `work` does, or if there is not a part for each queue.
    pub fn run<P: Send, T: Send>(
        &mut self,
        parts: impl IntoIterator<Item = P>,
        work: impl Fn(&mut Queue, P) -> T + Sync,
    ) -> Vec<T> {
        self.run_beside(parts, work, |_| ()).0
    }

    /// Like [`Client::run`], and calls `beside` in this thread meanwhile. Queues without a part
    /// rest.
    ///
    /// # Panics
    /// If `work` or `beside` does.
    pub fn run_beside<P: Send, T: Send, B>(
        &mut self,
        parts: impl IntoIterator<Item = P>,
        work: impl Fn(&mut Queue, P) -> T + Sync,
        beside: impl FnOnce(&mut SharedMemory<'_>) -> B,
    ) -> (Vec<T>, B) {
        debug_assert!(self.blkio.state() == blkio::State::Started);
        let work = &work;
        std::thread::scope(|scope| {
            let threads: Vec<_> = self
                .queues
                .iter_mut()
                .zip(parts)
                .map(|(queue, part)| scope.spawn(move || work(queue, part)))
                .collect();
            let beside = beside(&mut SharedMemory(&mut self.blkio));
            let join = |thread: std::thread::ScopedJoinHandle<'_, T>| match thread.join() {
                Ok(result) => result,
                Err(panic) => std::panic::resume_unwind(panic),
            };
            (threads.into_iter().map(join).collect(), beside)
        })
    }
}

/// The memory that the server maps.
pub struct SharedMemory<'a>(&'a mut Blkio);

impl SharedMemory<'_> {
    /// Shares a region that nothing uses, and takes it back.
    ///
    /// # Errors
    /// If the server refuses it.
    pub fn churn(&mut self, bytes: usize) -> Result<(), ClientError> {
        let region = self.0.alloc_mem_region(bytes).map_err(setup("allocate memory"))?;
        let shared = self.0.map_mem_region(&region).map_err(setup("share memory"));
        if shared.is_ok() {
            self.0.unmap_mem_region(&region);
        }
        self.0.free_mem_region(&region);
        shared
    }
}

/// The disk's bytes, by a connection that does nothing else.
///
/// # Errors
/// If the server is away, or refuses this client.
pub fn capacity(socket: &Path) -> Result<u64, ClientError> {
    patiently(Endpoint::Socket(socket), PATIENCE, |endpoint| {
        let blkio = connected(endpoint)?;
        blkio.get_u64("capacity").map_err(setup("read the capacity"))
    })
}

/// Does `work` in a thread that is left behind if it takes too long: libblkio waits for answers
/// without end.
fn patiently<T: Send + 'static>(
    endpoint: Endpoint<'_>,
    patience: Duration,
    work: impl FnOnce(Endpoint<'_>) -> Result<T, ClientError> + Send + 'static,
) -> Result<T, ClientError> {
    let (is_socket, path) = match endpoint {
        Endpoint::Socket(path) => (true, path.to_owned()),
        Endpoint::File(path) => (false, path.to_owned()),
    };
    let (done, result) = mpsc::channel();
    std::thread::spawn(move || {
        let endpoint = if is_socket { Endpoint::Socket(&path) } else { Endpoint::File(&path) };
        // Nobody may wait for it any more.
        let _ = done.send(work(endpoint));
    });
    result.recv_timeout(patience).unwrap_or(Err(ClientError::Silent))
}

fn connected(endpoint: Endpoint<'_>) -> Result<Blkio, ClientError> {
    let (driver, path) = match endpoint {
        Endpoint::Socket(path) => ("virtio-blk-vhost-user", path),
        Endpoint::File(path) => ("io_uring", path),
    };
    let mut blkio = Blkio::new(driver).map_err(setup("load the driver"))?;
    blkio.set_str("path", &path.to_string_lossy()).map_err(setup("set the path"))?;
    if matches!(endpoint, Endpoint::File(_)) {
        blkio.set_bool("direct", true).map_err(setup("set direct"))?;
    }
    blkio.connect().map_err(setup("connect"))?;
    Ok(blkio)
}

/// One queue with its slots.
pub struct Queue {
    queue: Blkioq,
    buffers: *mut u8,
    depth: usize,
    buffer: usize,
    flying: usize,
    completions: [MaybeUninit<Completion>; BATCH],
    discards: bool,
    zeroes: bool,
}

// SAFETY: `buffers` is this queue's part of the region, which nothing else in this process uses.
unsafe impl Send for Queue {}

/// A request's end: its slot, and 0 or a negative errno.
#[derive(Debug, Clone, Copy)]
pub struct Ended {
    /// Its slot.
    pub slot: usize,
    /// 0 or a negative errno.
    pub result: i32,
}

impl Queue {
    /// Requests in flight.
    #[must_use]
    pub const fn flying(&self) -> usize {
        self.flying
    }

    /// Slots.
    #[must_use]
    pub const fn depth(&self) -> usize {
        self.depth
    }

    /// Whether the disk takes discards, and write-zeroes.
    #[must_use]
    pub const fn takes(&self) -> (bool, bool) {
        (self.discards, self.zeroes)
    }

    /// A slot's buffer. The server may write to it while the slot has a request in flight.
    ///
    /// # Panics
    /// If there is no such slot.
    #[must_use]
    pub fn buffer(&mut self, slot: usize) -> &mut [u8] {
        let base = self.base(slot);
        // SAFETY: the slot's buffer lies in the region, which lives as long as the queue; the
        // borrow of the queue keeps it from being lent twice.
        unsafe { std::slice::from_raw_parts_mut(base, self.buffer) }
    }

    fn base(&self, slot: usize) -> *mut u8 {
        assert!(slot < self.depth, "no slot {slot}");
        self.buffers.wrapping_add(slot * self.buffer)
    }

    /// Fills a slot's buffer from `offset`.
    pub fn read(&mut self, slot: usize, offset: u64, length: usize) {
        debug_assert!(length <= self.buffer);
        self.queue.read(offset, self.base(slot), length, slot, ReqFlags::empty());
        self.flying += 1;
    }

    /// Stores a slot's buffer at `offset`.
    pub fn write(&mut self, slot: usize, offset: u64, length: usize) {
        debug_assert!(length <= self.buffer);
        self.queue.write(offset, self.base(slot), length, slot, ReqFlags::empty());
        self.flying += 1;
    }

    /// One of both.
    pub fn transfer(&mut self, is_read: bool, slot: usize, offset: u64, length: usize) {
        if is_read { self.read(slot, offset, length) } else { self.write(slot, offset, length) }
    }

    /// Zeroes a range.
    pub fn write_zeroes(&mut self, slot: usize, offset: u64, length: usize) {
        self.queue.write_zeroes(offset, length as u64, slot, ReqFlags::empty());
        self.flying += 1;
    }

    /// Discards a range.
    pub fn discard(&mut self, slot: usize, offset: u64, length: usize) {
        self.queue.discard(offset, length as u64, slot, ReqFlags::empty());
        self.flying += 1;
    }

    /// Asks for all completed writes to be made durable.
    pub fn flush(&mut self, slot: usize) {
        self.queue.flush(slot, ReqFlags::empty());
        self.flying += 1;
    }

    /// Submits what was asked for, waits for one completion or for `patience`, and passes all that
    /// there are to `each`; tells how many.
    ///
    /// # Errors
    /// If waiting fails; that nothing came in time is none.
    pub fn wait(
        &mut self,
        patience: Duration,
        each: impl FnMut(&mut Self, Ended),
    ) -> Result<usize, ClientError> {
        let deadline = Instant::now() + patience;
        loop {
            let mut left = deadline.saturating_duration_since(Instant::now());
            match self.queue.do_io(&mut self.completions, 1, Some(&mut left), None) {
                Ok(ended) => return Ok(self.pass(ended, each)),
                Err(error) if error.errno() == Errno::TIME => return Ok(0),
                // A signal, or a stale eventfd that was read already.
                Err(error) if matches!(error.errno(), Errno::INTR | Errno::AGAIN) => {}
                Err(error) => return Err(ClientError::Wait(error)),
            }
        }
    }

    /// Like [`Queue::wait`], but without waiting: the server is not asked to call.
    ///
    /// # Errors
    /// If the server cannot be told of requests.
    pub fn poll(&mut self, each: impl FnMut(&mut Self, Ended)) -> Result<usize, ClientError> {
        let ended = self.queue.do_io(&mut self.completions, 0, None, None);
        Ok(self.pass(ended.map_err(ClientError::Wait)?, each))
    }

    /// Passes the first `ended` completions on.
    fn pass(&mut self, ended: usize, mut each: impl FnMut(&mut Self, Ended)) -> usize {
        self.flying -= ended;
        for index in 0..ended {
            // SAFETY: do_io wrote the first `ended` entries.
            let completion = unsafe { self.completions[index].assume_init_ref() };
            let ended = Ended { slot: completion.user_data, result: completion.ret };
            each(self, ended);
        }
        ended
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn silent_server_is_given_up() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("s");
        let _listener = UnixListener::bind(&socket).unwrap();
        let patience = Duration::from_millis(50);
        let connect = |endpoint: Endpoint<'_>| connected(endpoint).map(drop);
        let result = patiently(Endpoint::Socket(&socket), patience, connect);
        assert!(matches!(result, Err(ClientError::Silent)), "{result:?}");
    }
}
