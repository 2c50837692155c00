//! Clients of the servers in VMs: closed loops over many connections, by one thread or one for each connection.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::sockopt::set_socket_linger;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use super::vm::{DISCARD, ECHO, HTTP, MQTT, PAGE, RESPONSE, address};
use super::{ENOUGH, own_cpu};

/// MQTT messages under way, of how many bytes, and the subscribers of all brokers.
const WINDOW: usize = 256;
pub(super) const PAYLOAD: usize = 64;
const SUBSCRIBERS: usize = 12;
/// Connections that are made together: a broker's backlog is 100.
const TOGETHER: usize = 32;
/// Connections to each VM that ask and wait.
pub(super) const ASKING: usize = 4;
/// What a stream sends before others have their turn.
const TURN: usize = 64 << 10;

/// When messages begin and cease to count.
#[derive(Clone, Copy)]
pub(super) struct Times {
    pub(super) counts: Instant,
    pub(super) ends: Instant,
}

/// What a client saw within that time.
pub(super) struct Figures {
    pub(super) name: &'static str,
    pub(super) messages: f64,
    /// From sending to arrival, ns; none of streams.
    pub(super) latencies: Vec<u64>,
    /// CPU time, s.
    pub(super) cpu: f64,
}

fn connect(vm: usize, port: u16) -> TcpStream {
    let stream = TcpStream::connect((address(vm), port)).unwrap();
    stream.set_read_timeout(Some(ENOUGH)).unwrap();
    stream.set_nodelay(true).unwrap();
    // Its end is a reset: no port waits for the next 10,000 connections.
    set_socket_linger(&stream, Some(Duration::ZERO)).unwrap();
    stream
}

/// Sends what is asked for and reads the answer.
fn exchange(streams: &mut [TcpStream], packet: &[u8], answer: &[u8]) {
    streams.iter_mut().for_each(|stream| stream.write_all(packet).unwrap());
    for stream in streams {
        let mut bytes = vec![0; answer.len()];
        stream.read_exact(&mut bytes).unwrap();
        assert_eq!(bytes, answer);
    }
}

/// So many connections to a VM's broker.
fn sessions(vm: usize, count: usize) -> Vec<TcpStream> {
    // CONNECT with a clean session and no name; CONNACK.
    let hello = [&[0x10, 12, 0, 4][..], b"MQTT", &[4, 2, 0, 0, 0, 0]].concat();
    let mut all = Vec::with_capacity(count);
    while all.len() < count {
        let some = TOGETHER.min(count - all.len());
        let mut some: Vec<TcpStream> = (0..some).map(|_| connect(vm, MQTT)).collect();
        exchange(&mut some, &hello, &[0x20, 2, 0, 0]);
        all.append(&mut some);
    }
    all
}

/// PUBLISH to a topic of two digits, up to its payload.
fn publish(topic: usize) -> Vec<u8> {
    [&[0x30, 4 + PAYLOAD as u8, 0, 2][..], format!("{topic:02}").as_bytes()].concat()
}

/// What answers come by, or a stream.
struct Connection {
    socket: TcpStream,
    /// What a message begins with; then there is when it was sent.
    prefix: Vec<u8>,
    input: Vec<u8>,
}

/// One thread's connections.
pub(super) struct Client {
    name: &'static str,
    epoll: OwnedFd,
    /// Bytes of a message.
    size: usize,
    connections: Vec<Connection>,
    /// Which send by turns, and what their messages begin with; none: who has been answered sends.
    publishers: Vec<(TcpStream, Vec<u8>)>,
    next: usize,
    is_stream: bool,
    in_flight: usize,
    epoch: Instant,
}

impl Client {
    fn new(name: &'static str, size: usize, is_stream: bool) -> Self {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let (connections, publishers) = (Vec::new(), Vec::new());
        let epoch = Instant::now();
        Self { name, epoll, size, connections, publishers, next: 0, is_stream, in_flight: 0, epoch }
    }

    fn add(&mut self, socket: TcpStream, prefix: Vec<u8>) {
        let data = EventData::new_u64(self.connections.len() as u64);
        let flags = if self.is_stream { EventFlags::OUT } else { EventFlags::IN };
        epoll::add(&self.epoll, &socket, data, flags).unwrap();
        self.connections.push(Connection { socket, prefix, input: Vec::new() });
    }

    /// MQTT in these VMs, over so many connections in all.
    pub(super) fn mqtt(vms: &[usize], connections: usize) -> Self {
        let mut client = Self::new("mqtt", publish(0).len() + PAYLOAD, false);
        let topics = SUBSCRIBERS / vms.len();
        for &vm in vms {
            for (topic, mut socket) in sessions(vm, topics).into_iter().enumerate() {
                // SUBSCRIBE with QoS 0; SUBACK.
                let text = format!("{topic:02}");
                let packet = [&[0x82, 7, 0, 1, 0, 2][..], text.as_bytes(), &[0]].concat();
                exchange(std::slice::from_mut(&mut socket), &packet, &[0x90, 3, 0, 1, 0]);
                client.add(socket, publish(topic));
            }
        }
        let each = connections / vms.len() - topics;
        let mut all: Vec<_> = vms.iter().map(|&vm| sessions(vm, each).into_iter()).collect();
        for index in 0..each {
            for sessions in &mut all {
                client.publishers.push((sessions.next().unwrap(), publish(index % topics)));
            }
        }
        client
    }

    pub(super) fn requests(vms: &[usize], size: usize) -> Self {
        let mut client = Self::new("requests", size, false);
        for &vm in vms {
            (0..ASKING).for_each(|_| client.add(connect(vm, ECHO), Vec::new()));
        }
        client
    }

    pub(super) fn streams(vms: &[usize], size: usize) -> Self {
        let mut client = Self::new("streams", size, true);
        vms.iter().for_each(|&vm| client.add(connect(vm, DISCARD), Vec::new()));
        client
    }

    /// Sends the next message, of this connection if there are no publishers.
    fn send(&mut self, connection: usize) {
        let (socket, prefix) = match self.publishers.len() {
            0 => (&self.connections[connection].socket, &self.connections[connection].prefix),
            count => {
                self.next = (self.next + 1) % count;
                let (socket, prefix) = &self.publishers[self.next];
                (socket, prefix)
            }
        };
        let mut message = prefix.clone();
        message.extend((self.epoch.elapsed().as_nanos() as u64).to_le_bytes());
        message.resize(self.size, b'x');
        let mut socket = socket;
        socket.write_all(&message).unwrap();
        self.in_flight += 1;
    }

    /// A stream's turn; bytes.
    fn stream(&self, connection: usize, message: &[u8]) -> usize {
        let socket = &self.connections[connection].socket;
        let mut bytes = 0;
        while bytes < TURN {
            match send(socket, message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(sent) => bytes += sent,
                Err(Errno::AGAIN) => break,
                Err(errno) => panic!("a stream: {errno}"),
            }
        }
        bytes
    }

    /// Takes what has come by a connection: when each of these messages was sent, ns.
    fn receive(&mut self, connection: usize, bytes: &mut [u8], sent: &mut Vec<u64>) {
        let connection = &mut self.connections[connection];
        let length = match recv(&connection.socket, &mut *bytes, RecvFlags::DONTWAIT) {
            Ok((length, _)) => length,
            Err(Errno::AGAIN | Errno::INTR) => return,
            Err(errno) => panic!("{}: {errno}", self.name),
        };
        assert!(length > 0, "{}: the peer is gone", self.name);
        connection.input.extend_from_slice(&bytes[..length]);
        let mut messages = connection.input.chunks_exact(self.size);
        for message in &mut messages {
            let payload = message.strip_prefix(&connection.prefix[..]).expect("a message");
            sent.push(u64::from_le_bytes(payload[..8].try_into().unwrap()));
        }
        connection.input = messages.remainder().to_vec();
    }

    /// Has messages go until all those in flight have come back.
    fn run(mut self, times: Times) -> Figures {
        let mut bytes = vec![0; TURN];
        let message = vec![b'x'; self.size];
        let (mut sent, mut latencies, mut streamed) = (Vec::new(), Vec::new(), 0);
        let (mut first, mut last) = (None, None);
        let count = if self.publishers.is_empty() { self.connections.len() } else { WINDOW };
        (0..if self.is_stream { 0 } else { count }).for_each(|connection| self.send(connection));
        let mut heard = Instant::now();
        while last.is_none() || self.in_flight > 0 {
            let mut events = Vec::with_capacity(64);
            let timeout = rustix::time::Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
            let space = rustix::buffer::spare_capacity(&mut events);
            let _ = epoll::wait(&self.epoll, space, Some(&timeout));
            let now = Instant::now();
            if now >= times.counts {
                first.get_or_insert_with(own_cpu);
            }
            if now >= times.ends {
                last.get_or_insert_with(own_cpu);
            }
            let counts = first.is_some() && last.is_none();
            for event in events {
                let connection = event.data.u64() as usize;
                if self.is_stream {
                    let bytes = self.stream(connection, &message);
                    streamed += if counts { bytes } else { 0 };
                    heard = now;
                    continue;
                }
                self.receive(connection, &mut bytes, &mut sent);
                for sent in sent.drain(..) {
                    heard = now;
                    self.in_flight -= 1;
                    if counts {
                        latencies.push(self.epoch.elapsed().as_nanos() as u64 - sent);
                    }
                    if last.is_none() {
                        self.send(connection);
                    }
                }
            }
            assert!(now - heard < ENOUGH, "{}: {} messages are lost", self.name, self.in_flight);
        }
        let messages = latencies.len() as f64 + streamed as f64 / self.size as f64;
        let cpu = last.unwrap() - first.unwrap();
        Figures { name: self.name, messages, latencies, cpu }
    }
}

/// Gets a page again and again, by a connection for each, as ApacheBench does.
fn pages(vm: usize, times: Times) -> Figures {
    let (mut first, mut latencies, mut text) = (None, Vec::new(), String::new());
    loop {
        let now = Instant::now();
        if now >= times.counts {
            first.get_or_insert_with(own_cpu);
        }
        if now >= times.ends {
            let cpu = own_cpu() - first.unwrap();
            return Figures { name: "pages", messages: latencies.len() as f64, latencies, cpu };
        }
        let mut stream = connect(vm, HTTP);
        stream.write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
        text.clear();
        stream.read_to_string(&mut text).unwrap();
        assert!(text.starts_with(RESPONSE) && text.len() == RESPONSE.len() + PAGE);
        if first.is_some() {
            latencies.push(now.elapsed().as_nanos() as u64);
        }
    }
}

/// What is run in a thread of its own.
pub(super) enum Load {
    Client(Client),
    Pages(usize),
}

impl Load {
    pub(super) fn run(self, times: Times) -> Figures {
        match self {
            Self::Client(client) => client.run(times),
            Self::Pages(vm) => pages(vm, times),
        }
    }
}
