//! What is behind a device but another device: a TAP's kernel, and who speaks to a socket.

use std::io::{ErrorKind, Read as _, Write as _};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use super::End;
use super::flow::ETHERTYPE;

/// A TAP's kernel: a packet socket sees and sends frames from the host's side.
pub(super) struct Tap {
    socket: OwnedFd,
    buffer: Vec<u8>,
}

fn checked(result: i32) -> i32 {
    assert!(result >= 0, "{}", std::io::Error::last_os_error());
    result
}

impl Tap {
    pub(super) const NAME: &str = "tap0";

    /// In the namespace of this thread.
    pub(super) fn new() -> Self {
        let protocol = libc::c_int::from(ETHERTYPE.to_be());
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
        // SAFETY: takes integers.
        let socket = checked(unsafe { libc::socket(libc::AF_PACKET, kind, protocol) });
        // SAFETY: just made, and nobody else's.
        let socket = unsafe { OwnedFd::from_raw_fd(socket) };
        // SAFETY: all zeroes are a value of it.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = ETHERTYPE.to_be();
        let index = std::fs::read_to_string(format!("/sys/class/net/{}/ifindex", Self::NAME));
        address.sll_ifindex = index.unwrap().trim().parse().unwrap();
        let length = std::mem::size_of_val(&address) as libc::socklen_t;
        // SAFETY: an address of this length.
        checked(unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length) });
        Self { socket, buffer: vec![0; 0x1_0000] }
    }
}

impl End for Tap {
    fn connect(&mut self) {}

    fn send(&mut self, frame: &[u8]) -> bool {
        match rustix::net::send(&self.socket, frame, SendFlags::DONTWAIT) {
            Ok(length) => {
                assert_eq!(length, frame.len());
                true
            }
            Err(Errno::AGAIN | Errno::NOBUFS) => false,
            Err(error) => panic!("{error}"),
        }
    }

    fn receive(&mut self, frame: &mut Vec<u8>) -> bool {
        let flags = RecvFlags::DONTWAIT;
        match rustix::net::recv(&self.socket, &mut self.buffer[..], flags) {
            Ok((_, length)) => {
                frame.clear();
                frame.extend_from_slice(&self.buffer[..length]);
                true
            }
            Err(Errno::AGAIN) => false,
            Err(error) => panic!("{error}"),
        }
    }
}

/// The daemon has been killed, if with something unread.
fn is_dead(error: &std::io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::BrokenPipe | ErrorKind::ConnectionReset | ErrorKind::ConnectionRefused
    )
}

/// Who listens at a stream socket, and has each frame behind its length.
pub(super) struct Stream {
    listener: UnixListener,
    stream: Option<UnixStream>,
    buffer: Vec<u8>,
    /// What is read, and where the next frame begins in it.
    read: Vec<u8>,
    at: usize,
    /// What is not written yet.
    unwritten: Vec<u8>,
}

impl Stream {
    /// Bytes that wait to be written, at most.
    const MAX_UNWRITTEN: usize = 16 << 10;

    pub(super) fn new(path: &Path) -> Self {
        let listener = UnixListener::bind(path).unwrap();
        let buffer = vec![0; 0x1_0000];
        Self { listener, stream: None, buffer, read: vec![], at: 0, unwritten: vec![] }
    }

    fn next(&mut self, frame: &mut Vec<u8>) -> bool {
        let Some((length, rest)) = self.read[self.at..].split_first_chunk::<4>() else {
            return false;
        };
        let length = u32::from_be_bytes(*length) as usize;
        assert!((14..=0x1_0000).contains(&length), "{length} bytes are no frame");
        let Some(bytes) = rest.get(..length) else { return false };
        frame.clear();
        frame.extend_from_slice(bytes);
        self.at += 4 + length;
        true
    }
}

impl End for Stream {
    fn connect(&mut self) {
        // What was cut by a kill goes with its connection.
        (self.at, self.read, self.unwritten) = (0, vec![], vec![]);
        let (stream, _) = self.listener.accept().unwrap();
        stream.set_nonblocking(true).unwrap();
        self.stream = Some(stream);
    }

    fn send(&mut self, frame: &[u8]) -> bool {
        if self.unwritten.len() >= Self::MAX_UNWRITTEN {
            return false;
        }
        self.unwritten.extend_from_slice(&(frame.len() as u32).to_be_bytes());
        self.unwritten.extend_from_slice(frame);
        true
    }

    fn receive(&mut self, frame: &mut Vec<u8>) -> bool {
        if self.next(frame) {
            return true;
        }
        let Some(stream) = &mut self.stream else { return false };
        match stream.read(&mut self.buffer) {
            Ok(length) => {
                self.read.drain(..self.at);
                self.at = 0;
                self.read.extend_from_slice(&self.buffer[..length]);
                self.next(frame)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => false,
            Err(error) if is_dead(&error) => false,
            Err(error) => panic!("{error}"),
        }
    }

    fn flush(&mut self) {
        let Some(stream) = &mut self.stream else { return };
        while !self.unwritten.is_empty() {
            match stream.write(&self.unwritten) {
                Ok(length) => drop(self.unwritten.drain(..length)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if is_dead(&error) => return,
                Err(error) => panic!("{error}"),
            }
        }
    }
}

/// Whose datagrams are frames.
pub(super) struct Dgram {
    socket: UnixDatagram,
    to: PathBuf,
    buffer: Vec<u8>,
}

impl Dgram {
    pub(super) fn new(own: &Path, to: PathBuf) -> Self {
        let socket = UnixDatagram::bind(own).unwrap();
        socket.set_nonblocking(true).unwrap();
        Self { socket, to, buffer: vec![0; 0x1_0000] }
    }
}

impl End for Dgram {
    fn connect(&mut self) {}

    fn send(&mut self, frame: &[u8]) -> bool {
        match self.socket.send_to(frame, &self.to) {
            Ok(length) => {
                assert_eq!(length, frame.len());
                true
            }
            Err(error) if is_dead(&error) => false,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                // Its queue is full; whoever reads it has a CPU to get.
                std::thread::sleep(Duration::from_micros(1));
                false
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn receive(&mut self, frame: &mut Vec<u8>) -> bool {
        match self.socket.recv(&mut self.buffer) {
            Ok(length) => {
                frame.clear();
                frame.extend_from_slice(&self.buffer[..length]);
                true
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => false,
            Err(error) => panic!("{error}"),
        }
    }
}
