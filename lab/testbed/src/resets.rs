//! A front end that stops and starts its rings under load, as QEMU does when a guest resets the
//! device; libblkio never does.
//!
//! It stands between libblkio and the server, passes every message on, and says in between, to one
//! ring after another: `GET_VRING_BASE`, which ends when nothing is in flight, then what libblkio
//! said of that ring, from where the server said it was. libblkio, which goes on filling the ring
//! all the time, notices a pause, and judges the content as ever.

use std::collections::BTreeMap;
use std::io::{IoSlice, IoSliceMut, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// From a ring's start to the next one's stop.
const BETWEEN: Timespec = Timespec { tv_sec: 0, tv_nsec: 2_000_000 };
/// How long the server may take to stop a ring.
const PATIENCE: Duration = Duration::from_secs(10);
/// The longest message here; a table of memory has 8 regions.
const LARGEST: usize = 4096;
/// Descriptors with one message.
const FDS: usize = 8;

// Requests by their numbers in the protocol.
const SET_VRING_NUM: u32 = 8;
const SET_VRING_ADDR: u32 = 9;
const SET_VRING_BASE: u32 = 10;
const GET_VRING_BASE: u32 = 11;
const SET_VRING_KICK: u32 = 12;
const SET_VRING_CALL: u32 = 13;
const SET_VRING_ERR: u32 = 14;
const SET_VRING_ENABLE: u32 = 18;
/// What a ring is started with, in QEMU's order.
const START: [u32; 7] = [
    SET_VRING_NUM,
    SET_VRING_BASE,
    SET_VRING_ADDR,
    SET_VRING_ERR,
    SET_VRING_CALL,
    SET_VRING_KICK,
    SET_VRING_ENABLE,
];
/// GET_FEATURES, GET_PROTOCOL_FEATURES, GET_QUEUE_NUM, GET_CONFIG, GET_INFLIGHT_FD,
/// GET_MAX_MEM_SLOTS; others are answered if they ask for it.
const ANSWERED: [u32; 7] = [1, GET_VRING_BASE, 15, 17, 24, 31, 36];
const NEED_REPLY: u32 = 1 << 3;

/// A message with its descriptors.
struct Message {
    request: u32,
    flags: u32,
    body: Vec<u8>,
    fds: Vec<OwnedFd>,
}

impl Message {
    /// None at the end of the connection.
    fn receive(from: &UnixStream) -> Result<Option<Self>> {
        let mut header = [0; 12];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut pieces = [IoSliceMut::new(&mut header)];
        let got = recvmsg(from, &mut pieces, &mut control, RecvFlags::CMSG_CLOEXEC)?.bytes;
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(sent) = message {
                fds.extend(sent);
            }
        }
        if got == 0 {
            return Ok(None);
        }
        let mut from = from;
        from.read_exact(&mut header[got..])?;
        let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| header[at + byte]));
        let length = word(8) as usize;
        ensure!(length <= LARGEST, "a message of {length} bytes");
        let mut body = vec![0; length];
        from.read_exact(&mut body)?;
        Ok(Some(Self { request: word(0), flags: word(4), body, fds }))
    }

    fn send(&self, to: &UnixStream) -> Result<()> {
        let words = [self.request, self.flags, self.body.len() as u32];
        let header: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds: Vec<_> = self.fds.iter().map(|fd| fd.as_fd()).collect();
        if !fds.is_empty() {
            ensure!(control.push(SendAncillaryMessage::ScmRights(&fds)), "too many descriptors");
        }
        let sent = sendmsg(to, &[IoSlice::new(&header)], &mut control, SendFlags::NOSIGNAL)?;
        ensure!(sent == header.len(), "a message was sent in part");
        let mut to = to;
        Ok(to.write_all(&self.body)?)
    }

    /// The server's answer, if this message has one.
    fn ask(&self, server: &UnixStream) -> Result<Option<Self>> {
        self.send(server)?;
        if !ANSWERED.contains(&self.request) && self.flags & NEED_REPLY == 0 {
            return Ok(None);
        }
        match Self::receive(server)? {
            Some(answer) => Ok(Some(answer)),
            None => bail!("the server closed the connection at message {}", self.request),
        }
    }

    /// The ring it is about, if it is one that starts a ring.
    fn ring(&self) -> Option<u32> {
        // The bit above the index says that there is no descriptor.
        let index = u32::from(*self.body.first()?);
        START.contains(&self.request).then_some(index)
    }
}

/// Passes a connection on until the client leaves, and resets its rings.
fn connection(client: &UnixStream, server: &UnixStream, resets: &AtomicU64) -> Result<()> {
    server.set_read_timeout(Some(PATIENCE))?;
    let mut rings: BTreeMap<u32, BTreeMap<u32, Message>> = BTreeMap::new();
    let mut next = 0;
    loop {
        let mut ready = [PollFd::new(client, PollFlags::IN)];
        if poll(&mut ready, Some(&BETWEEN))? > 0 {
            let Some(message) = Message::receive(client)? else { return Ok(()) };
            if let Some(answer) = message.ask(server)? {
                answer.send(client)?;
            }
            if let Some(ring) = message.ring() {
                rings.entry(ring).or_default().insert(message.request, message);
            }
            continue;
        }
        // A ring is started by its kick and, with protocol features, enabled; by then all is said.
        let started = |said: &BTreeMap<u32, Message>| said.contains_key(&SET_VRING_ENABLE);
        let all = rings.values_mut().filter(|said| started(said)).count();
        if let Some(said) = rings.values_mut().filter(|said| started(said)).nth(next % all.max(1)) {
            reset(server, said)?;
            resets.fetch_add(1, Ordering::Relaxed);
            next += 1;
        }
    }
}

/// Stops a ring, and starts it where it was.
fn reset(server: &UnixStream, said: &mut BTreeMap<u32, Message>) -> Result<()> {
    let Some(base) = said.get_mut(&SET_VRING_BASE) else { bail!("a ring without a base") };
    let stop = Message {
        request: GET_VRING_BASE,
        flags: base.flags & !NEED_REPLY,
        body: base.body.clone(),
        fds: Vec::new(),
    };
    let Some(answer) = stop.ask(server)? else { bail!("no base") };
    ensure!(answer.body.len() == base.body.len(), "a base of {} bytes", answer.body.len());
    base.body = answer.body;
    for message in START.iter().filter_map(|request| said.get(request)) {
        if let Some(answer) = message.ask(server)? {
            let refused = answer.body.iter().any(|&byte| byte != 0);
            ensure!(!refused, "message {} of a ring was refused", message.request);
        }
    }
    Ok(())
}

/// The front end's own socket, while it lives.
pub struct Resets {
    socket: PathBuf,
    stop: Arc<AtomicBool>,
    count: Arc<AtomicU64>,
    thread: JoinHandle<Result<()>>,
}

impl Resets {
    /// Listens at `socket` for clients of the server, one at a time.
    pub fn start(socket: PathBuf, server: PathBuf) -> Result<Self> {
        let listener = UnixListener::bind(&socket)?;
        let (stop, count) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let (stopped, resets) = (Arc::clone(&stop), Arc::clone(&count));
        let thread = std::thread::spawn(move || {
            loop {
                let (client, _) = listener.accept()?;
                if stopped.load(Ordering::Relaxed) {
                    return Ok(());
                }
                connection(&client, &UnixStream::connect(&server)?, &resets)?;
            }
        });
        Ok(Self { socket, stop, count, thread })
    }

    /// Where libblkio is to connect.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Ends when the last client has left; how many rings were stopped and started.
    pub fn stop(self) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        // It may have ended by itself, with what it has to say.
        let _ = UnixStream::connect(&self.socket);
        let Ok(ended) = self.thread.join() else { bail!("the thread that resets rings failed") };
        ended?;
        Ok(self.count.load(Ordering::Relaxed))
    }
}
