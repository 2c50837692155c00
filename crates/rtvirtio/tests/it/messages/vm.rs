//! A VM: a process with a network namespace, a driver for each pair of queues, a broker and servers.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rtvirtio_virtq::ring::driver::{GUEST, Guest};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

use crate::dataplane::front_end;
use crate::floods::{HEADER, RING, Ring, SIZE, STRIDE, namespace};

use super::{ENOUGH, VMS, cpu, raise_limit};

/// Set within a VM: its number, and the device's socket.
const INSIDE: &str = "RTVIRTIO_TEST_MESSAGES_INSIDE";
const READY: &str = "the guest is up, its broker is ";
/// Frames on their way in each ring.
const SLOTS: u64 = SIZE as u64 / 2;
/// Frames that a driver moves before it looks at the other direction.
const BATCH: usize = 64;
/// Ports of the guest's servers.
pub(super) const ECHO: u16 = 7;
pub(super) const DISCARD: u16 = 9;
pub(super) const HTTP: u16 = 80;
pub(super) const MQTT: u16 = 1883;
/// The page.
pub(super) const RESPONSE: &str = "HTTP/1.0 200 OK\r\nContent-Length: 1000\r\n\r\n";
pub(super) const PAGE: usize = 1000;

pub(super) fn address(vm: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 90, vm as u8, 2)
}

/// Attaches to the guest's TAP, as often as it has pairs.
fn attach(pairs: usize) -> Vec<OwnedFd> {
    const TUNSETIFF: libc::Ioctl = 0x4004_54ca;
    const TUNSETOFFLOAD: libc::Ioctl = 0x4004_54d0;
    const TUNSETVNETHDRSZ: libc::Ioctl = 0x4004_54d8;
    // IFF_TAP, IFF_NO_PI, IFF_VNET_HDR, IFF_MULTI_QUEUE of `linux/if_tun.h`, behind the name in `struct ifreq`.
    let mut request = [0_u8; 40];
    request[..4].copy_from_slice(b"eth0");
    request[16..18].copy_from_slice(&0x5102_u16.to_le_bytes());
    // TUN_F_CSUM, TUN_F_TSO4.
    let offloads: libc::c_ulong = 3;
    let header = HEADER as libc::c_int;
    let check = |result| assert!(result == 0, "eth0: {}", std::io::Error::last_os_error());
    let one = |_| {
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let fd = rustix::fs::open("/dev/net/tun", flags, Mode::empty()).unwrap();
        // SAFETY: reads and writes a `struct ifreq`, which outlives the call.
        check(unsafe { libc::ioctl(fd.as_raw_fd(), TUNSETIFF, request.as_mut_ptr()) });
        // SAFETY: reads an int, which outlives the call.
        check(unsafe { libc::ioctl(fd.as_raw_fd(), TUNSETVNETHDRSZ, &raw const header) });
        // SAFETY: takes an integer.
        check(unsafe { libc::ioctl(fd.as_raw_fd(), TUNSETOFFLOAD, offloads) });
        fd
    };
    (0..pairs).map(one).collect()
}

/// The driver of one pair of queues.
struct Pair {
    guest: Arc<Guest>,
    receive: Ring,
    transmit: Ring,
    tap: OwnedFd,
    /// Where nothing is that is to be transmitted.
    free: Vec<u64>,
}

impl Pair {
    fn new(guest: &Arc<Guest>, stream: &UnixStream, index: u64, pairs: u64, tap: OwnedFd) -> Self {
        let ring = |queue| Ring::start(stream, guest, 2 * index + queue);
        let place = |slot| GUEST + 2 * pairs * RING + (2 * index * SLOTS + slot) * STRIDE;
        let (mut receive, transmit) = (ring(0), ring(1));
        (0..SLOTS).for_each(|slot| receive.add(place(slot), STRIDE as usize, true));
        receive.publish();
        let free = (SLOTS..2 * SLOTS).map(place).collect();
        Self { guest: Arc::clone(guest), receive, transmit, tap, free }
    }

    /// Whether frames were there to be received.
    fn receive(&mut self) -> bool {
        let mut count = 0;
        while count < BATCH
            && let Some((place, length)) = self.receive.take()
        {
            // What the kernel does not take is lost, as in any network.
            let _ = rustix::io::write(&self.tap, &self.guest.read(place, length as usize));
            self.receive.add(place, STRIDE as usize, true);
            count += 1;
        }
        self.receive.publish();
        count > 0
    }

    /// Whether frames were there to be transmitted, and room for them.
    fn transmit(&mut self, frame: &mut [u8]) -> bool {
        let mut count = 0;
        while let Some((place, _)) = self.transmit.take() {
            self.free.push(place);
        }
        while count < BATCH && !self.free.is_empty() {
            let length = match rustix::io::read(&self.tap, &mut *frame) {
                Ok(length) => length,
                Err(Errno::AGAIN) => break,
                Err(errno) => panic!("eth0: {errno}"),
            };
            let place = self.free.pop().unwrap();
            self.guest.write(place, &frame[..length]);
            self.transmit.add(place, length, false);
            count += 1;
        }
        self.transmit.publish();
        count > 0
    }

    fn run(mut self) -> ! {
        let mut frame = vec![0; STRIDE as usize];
        loop {
            if self.receive() | self.transmit(&mut frame) {
                continue;
            }
            // Of rings in use calls are not asked for, as NAPI does not: with EVENT_IDX that is for a frame that has been.
            let is_full = self.free.is_empty();
            let more = self.receive.driver.enable_calls();
            if more || is_full && self.transmit.driver.enable_calls() {
                continue;
            }
            let (call, other) =
                (&self.receive.call, if is_full { &self.transmit.call } else { &self.tap });
            let mut fds = [call, other].map(|fd| PollFd::new(fd, PollFlags::IN));
            let _ = poll(&mut fds, None);
            for call in [&self.receive.call, &self.transmit.call] {
                let _ = rustix::io::read(call, &mut [0; 8]);
            }
        }
    }
}

/// What a server does with what it gets; `false`: it has done with the connection.
fn serve(port: u16, stream: &mut TcpStream, bytes: &[u8]) -> bool {
    match port {
        ECHO => stream.write_all(bytes).is_ok(),
        HTTP if bytes.ends_with(b"\r\n\r\n") => {
            let page = [RESPONSE.as_bytes(), &[b'x'; PAGE]].concat();
            let _ = stream.write_all(&page);
            false
        }
        _ => true,
    }
}

/// The guest's servers, beside the broker.
fn servers() -> ! {
    let listen = |port| (port, TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).unwrap());
    let listeners = [ECHO, DISCARD, HTTP].map(listen);
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    let add = |fd: BorrowedFd<'_>, data| {
        epoll::add(&epoll, fd, EventData::new_u64(data as u64), EventFlags::IN).unwrap();
    };
    listeners.iter().enumerate().for_each(|(index, (_, listener))| add(listener.as_fd(), index));
    // By the file's number, so that places are used again.
    let mut connections: BTreeMap<usize, (u16, TcpStream)> = BTreeMap::new();
    let mut bytes = vec![0; 1 << 16];
    loop {
        let mut events = Vec::with_capacity(64);
        let _ = epoll::wait(&epoll, rustix::buffer::spare_capacity(&mut events), None);
        for event in events {
            let at = event.data.u64() as usize;
            if let Some((port, listener)) = listeners.get(at) {
                let stream = listener.accept().unwrap().0;
                stream.set_nodelay(true).unwrap();
                let at = listeners.len() + stream.as_raw_fd() as usize;
                add(stream.as_fd(), at);
                connections.insert(at, (*port, stream));
                continue;
            }
            let (port, stream) = connections.get_mut(&at).unwrap();
            let goes_on = match recv(&*stream, &mut bytes[..], RecvFlags::DONTWAIT) {
                Ok((length, _)) => length > 0 && serve(*port, stream, &bytes[..length]),
                Err(errno) => errno == Errno::AGAIN || errno == Errno::INTR,
            };
            if !goes_on {
                connections.remove(&at);
            }
        }
    }
}

/// A VM's process, if this is one.
#[test]
fn guest_of_messages() {
    let Ok(words) = std::env::var(INSIDE) else { return };
    let (vm, at) = words.split_once(' ').unwrap();
    let (vm, at): (usize, &Path) = (vm.parse().unwrap(), at.as_ref());
    let pairs = VMS[vm];
    namespace(&format!(
        "ip link set lo up; ip tuntap add dev eth0 mode tap vnet_hdr multi_queue; \
         ip address add {}/24 dev eth0; ip link set eth0 up",
        address(vm)
    ))
    .unwrap();
    let taps = attach(pairs);
    raise_limit();
    let configuration = at.with_extension("conf");
    let text = format!(
        "listener {MQTT} 0.0.0.0\nallow_anonymous true\nuser root\nset_tcp_nodelay true\n\
         max_queued_messages 0\nlog_dest none\n"
    );
    std::fs::write(&configuration, text).unwrap();
    let mut broker = Command::new("setpriv")
        .args(["--pdeathsig", "KILL", "mosquitto", "-c"])
        .arg(configuration)
        .stdin(Stdio::null())
        // It warns of root, whom it stays so that its end is that of its parent.
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    std::thread::Builder::new().name("servers".to_owned()).spawn(|| servers()).unwrap();

    let memory = 2 * pairs as u64 * (RING + SLOTS * STRIDE);
    // CSUM, GUEST_CSUM, GUEST_TSO4, HOST_TSO4, MQ, EVENT_IDX; of the protocol MQ.
    let features = [0, 1, 7, 11, 29].iter().map(|bit| 1 << bit).sum::<u64>();
    let several = if pairs > 1 { 1 << 22 } else { 0 };
    let guest = Guest::new(memory);
    let stream = front_end::open(at, features | several, 1, &guest);
    for (index, tap) in (0..).zip(taps) {
        let pair = Pair::new(&guest, &stream, index, pairs as u64, tap);
        let name = format!("CPU {index}/TCG");
        std::thread::Builder::new().name(name).spawn(move || pair.run()).unwrap();
    }
    let begun = Instant::now();
    while TcpStream::connect((Ipv4Addr::LOCALHOST, MQTT)).is_err() {
        assert!(begun.elapsed() < ENOUGH && broker.try_wait().unwrap().is_none(), "no mosquitto");
        std::thread::sleep(Duration::from_millis(20));
    }
    println!("\n{READY}{}", broker.id());
    broker.wait().unwrap();
}

pub(super) struct Vm {
    child: Child,
    broker: u32,
}

impl Vm {
    pub(super) fn start(index: usize, socket: &Path) -> Self {
        let mut child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL"])
            .arg(std::env::current_exe().unwrap())
            .args(["messages::vm::guest_of_messages", "--exact", "--nocapture"])
            .env(INSIDE, format!("{index} {}", socket.display()))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let broker = lines.find_map(|line| line.strip_prefix(READY)?.parse().ok());
        Self { child, broker: broker.expect("a guest") }
    }

    /// Its CPU time, s.
    pub(super) fn cpu(&self) -> f64 {
        cpu(self.child.id()) + cpu(self.broker)
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
