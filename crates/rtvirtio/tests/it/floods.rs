//! One VM's request and response beside others' floods of frames: on one IOThread that all share, and with an IOThread for
//! each VM, all on one CPU.
//!
//! The victim is a network device on a TAP, whose kernel answers a ping of 64 bytes, or a disk in RAM that is read 4 KiB at a
//! time; it asks about 1000 times a second. A flood is a network device that sends all the time to a TAP of its own, where
//! the kernel drops it at IP's door. All drivers are one loop on the other CPU, so that none waits for another's time slice.
//!
//! `cargo test` sees that all are served. Figures: `RTVIRTIO_FLOODS=DIRECTORY` (`make bench
//! EXPERIMENT=network-neighbours`); `ROUNDS` of each by turns, `SECONDS_EACH`, going on with what is there.

use std::fmt::Write as _;
use std::io::Write as _;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rtvirtio_engine::testing::has_io_uring;
use rtvirtio_virtq::ring::driver::{Buffer, Driver, GUEST, Guest, Options};
use rustix::event::{EventfdFlags, eventfd};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::thread::{CpuSet, UnshareFlags, sched_setaffinity, unshare_unsafe};

use crate::dataplane::front_end::{self, FrontEnd};
use crate::nic::{Daemon, Store};
use crate::scratch_disk::said;

const TEST: &str = "victim_is_served_beside_floods";
const ENOUGH: Duration = Duration::from_secs(20);
/// Entries of rings, and bytes between them.
pub(crate) const SIZE: u16 = 256;
pub(crate) const RING: u64 = 0x2_0000;
/// Frames on their way, each in a buffer of its own, behind the rings.
const SLOTS: u64 = 128;
const BUFFERS: u64 = GUEST + 0x10_0000;
pub(crate) const STRIDE: u64 = 0x1_1000;
/// `virtio_net_hdr_v1`.
pub(crate) const HEADER: usize = 12;
/// What a flood's driver does before it looks after the victim again.
const STEP: usize = 8;
/// Between the victim's requests, µs.
const GAP: std::ops::Range<u64> = 500..1500;
const MAC: [u8; 6] = [0x52, 0x54, 0, 0, 1, 0];
const TAP_MAC: &str = "52:54:00:00:02:00";

/// Bytes of the floods' frames.
const KINDS: [usize; 3] = [64, 1514, 65_226];
/// Names, and whose floods they are: one of each kind, or all three.
const FLOODS: [(&str, &[usize]); 4] =
    [("64", &[0]), ("1500", &[1]), ("64K", &[2]), ("all", &[0, 1, 2])];

#[derive(Debug, Clone, Copy, PartialEq)]
enum Mode {
    Alone,
    Shared,
    Own,
}

impl Mode {
    const fn name(self) -> &'static str {
        match self {
            Self::Alone => "alone",
            Self::Shared => "shared",
            Self::Own => "own",
        }
    }
}

/// Adds the ones' complement sum of these bytes, of an even number.
fn checksum(bytes: &[u8]) -> [u8; 2] {
    let mut sum: u32 = bytes.chunks(2).map(|w| u32::from(w[0]) << 8 | u32::from(w[1])).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    (!(sum as u16)).to_be_bytes()
}

/// An IPv4 frame of so many bytes, up to its payload.
fn ip(to: [u8; 6], protocol: u8, length: usize) -> Vec<u8> {
    let mut frame = vec![0; length];
    frame[..6].copy_from_slice(&to);
    frame[6..12].copy_from_slice(&MAC);
    frame[12..14].copy_from_slice(&[8, 0]);
    let total = ((length - 14) as u16).to_be_bytes();
    let header = [0x45, 0, total[0], total[1], 0, 0, 0, 0, 64, protocol, 0, 0];
    frame[14..26].copy_from_slice(&header);
    frame[26..34].copy_from_slice(&[10, 88, 0, 2, 10, 88, 0, 1]);
    let sum = checksum(&frame[14..34]);
    frame[24..26].copy_from_slice(&sum);
    frame
}

/// A flood's frame, with its header: UDP, or TCP that is to be cut into segments.
fn flood(length: usize) -> Vec<u8> {
    // Nobody's.
    let to = [0x52, 0x54, 0, 0, 9, 9];
    let mut header = [0; HEADER];
    let mut frame = ip(to, if length > 1514 { 6 } else { 17 }, length);
    if length > 1514 {
        frame[46] = 0x50;
        // NEEDS_CSUM, GSO_TCPV4: 54 bytes of headers, 1448 of data, the sum 16 bytes behind byte 34.
        header[..10].copy_from_slice(&[1, 1, 54, 0, 0xa8, 5, 34, 0, 16, 0]);
    } else {
        frame[38..40].copy_from_slice(&((length - 34) as u16).to_be_bytes());
    }
    [&header[..], &frame].concat()
}

/// One ring's driver.
pub(crate) struct Ring {
    pub(crate) driver: Driver,
    kick: OwnedFd,
    pub(crate) call: OwnedFd,
    /// Where what has an ID lies.
    places: Vec<u64>,
}

impl Ring {
    /// Has a ring served, with as many entries and bytes as [`RING`] has room for.
    pub(crate) fn start(stream: &UnixStream, guest: &Arc<Guest>, index: u64) -> Self {
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let options = Options {
            size: SIZE,
            packed: false,
            event_idx: true,
            indirect: false,
            in_order: false,
        };
        let driver = Driver::new(Arc::clone(guest), GUEST + index * RING, options);
        let places = vec![0; usize::from(SIZE)];
        let ring = Self { driver, kick: event(), call: event(), places };
        let events = [ring.kick.as_fd(), ring.call.as_fd(), ring.call.as_fd()];
        assert!(front_end::start(stream, index, &ring.driver, events));
        ring
    }

    pub(crate) fn add(&mut self, address: u64, length: usize, writable: bool) {
        let buffer = Buffer { address, length: length as u32, writable };
        let id = self.driver.add(&[buffer], false).expect("room");
        self.places[usize::from(id)] = address;
    }

    pub(crate) fn publish(&mut self) {
        if self.driver.publish() {
            rustix::io::write(&self.kick, &1_u64.to_ne_bytes()).unwrap();
        }
    }

    /// What has come back: where it lies, and bytes.
    pub(crate) fn take(&mut self) -> Option<(u64, u32)> {
        self.driver.take().map(|(id, length)| (self.places[usize::from(id)], length))
    }
}

/// A network device's front end.
struct Device {
    _stream: UnixStream,
    guest: Arc<Guest>,
    receive: Ring,
    transmit: Ring,
}

impl Device {
    fn connect(socket: &Path) -> Self {
        const CSUM: u64 = 1;
        const HOST_TSO4: u64 = 1 << 11;
        const MRG_RXBUF: u64 = 1 << 15;
        const EVENT_IDX: u64 = 1 << 29;
        let guest = Guest::new(BUFFERS - GUEST + 2 * SLOTS * STRIDE);
        let features = CSUM | HOST_TSO4 | MRG_RXBUF | EVENT_IDX;
        let stream = front_end::open(socket, features, 0, &guest);
        let [receive, transmit] = [0, 1].map(|index| Ring::start(&stream, &guest, index));
        Self { _stream: stream, guest, receive, transmit }
    }

    fn place(slot: u64) -> u64 {
        BUFFERS + slot * STRIDE
    }
}

/// A device that sends the same frame again and again.
struct Flood {
    device: Device,
    length: usize,
    sent: u64,
}

impl Flood {
    fn start(socket: &Path, kind: usize) -> Self {
        let frame = flood(KINDS[kind]);
        let mut device = Device::connect(socket);
        for slot in 0..SLOTS {
            device.guest.write(Device::place(slot), &frame);
            device.transmit.add(Device::place(slot), frame.len(), false);
        }
        device.transmit.publish();
        Self { device, length: frame.len(), sent: 0 }
    }

    fn step(&mut self) {
        let ring = &mut self.device.transmit;
        for _ in 0..STEP {
            let Some((place, _)) = ring.take() else { break };
            self.sent += 1;
            ring.add(place, self.length, false);
        }
        ring.publish();
    }
}

/// Who asks and waits.
enum Victim {
    Nic { device: Box<Device>, number: u16, ping: Vec<u8> },
    Disk(Box<FrontEnd>),
}

impl Victim {
    fn connect(name: &str, socket: &Path) -> Self {
        if name == "disk" {
            return Self::Disk(Box::new(FrontEnd::connect(socket)));
        }
        let mut device = Box::new(Device::connect(socket));
        for slot in 0..16 {
            device.receive.add(Device::place(SLOTS + slot), 2048, true);
        }
        device.receive.publish();
        let to = [0x52, 0x54, 0, 0, 2, 0];
        let ping = [&[0; HEADER][..], &ip(to, 1, 64)].concat();
        Self::Nic { device, number: 0, ping }
    }

    fn ask(&mut self) {
        match self {
            Self::Disk(front) => front.start(0, 0, 4096),
            Self::Nic { device, number, ping } => {
                *number = number.wrapping_add(1);
                let icmp = &mut ping[HEADER + 34..];
                icmp.fill(0);
                icmp[0] = 8;
                icmp[6..8].copy_from_slice(&number.to_be_bytes());
                let sum = checksum(icmp);
                icmp[2..4].copy_from_slice(&sum);
                device.guest.write(Device::place(0), ping);
                device.transmit.add(Device::place(0), ping.len(), false);
                device.transmit.publish();
            }
        }
    }

    /// Whether the answer is there.
    fn is_answered(&mut self) -> bool {
        match self {
            Self::Disk(front) => {
                let has_ended = front.driver.take().is_some();
                assert!(!has_ended || front.driver.guest().read(front_end::STATUS, 1) == [0]);
                has_ended
            }
            Self::Nic { device, number, .. } => {
                while device.transmit.take().is_some() {}
                let Some((place, length)) = device.receive.take() else { return false };
                let frame = device.guest.read(place, length as usize).split_off(HEADER);
                device.receive.add(place, 2048, true);
                device.receive.publish();
                // An echo reply (RFC 792), the one to this request.
                frame.len() == 64 && frame[34] == 0 && frame[40..42] == number.to_be_bytes()
            }
        }
    }
}

/// What one window showed.
struct Window {
    /// In order, ns.
    latencies: Vec<u64>,
    /// Of each flood, frames per second.
    rates: Vec<f64>,
}

impl Window {
    fn run(victim: &mut Victim, floods: &mut [Flood], time: Duration) -> Self {
        let mut random = 1_u64;
        let mut latencies = Vec::new();
        let begun = Instant::now();
        // What is there at first to warm up does not count.
        let counts = begun + time / 8;
        let ends = counts + time;
        let mut before: Option<Vec<u64>> = None;
        let mut next = begun;
        let mut asked: Option<Instant> = None;
        loop {
            let now = Instant::now();
            if let Some(at) = asked {
                if victim.is_answered() {
                    let took = Instant::now() - at;
                    if at >= counts {
                        latencies.push(took.as_nanos() as u64);
                    }
                    asked = None;
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let gap = GAP.start + (random >> 33) % (GAP.end - GAP.start);
                    next = now + Duration::from_micros(gap);
                }
                assert!(now - at < ENOUGH, "no answer comes");
            } else if now > ends {
                break;
            } else if now >= next {
                asked = Some(now);
                victim.ask();
            }
            floods.iter_mut().for_each(Flood::step);
            if now >= counts && before.is_none() {
                before = Some(floods.iter().map(|flood| flood.sent).collect());
            }
        }
        latencies.sort_unstable();
        let seconds = counts.elapsed().as_secs_f64();
        let rate = |(flood, before): (&Flood, u64)| (flood.sent - before) as f64 / seconds;
        let rates = floods.iter().zip(before.unwrap_or_default()).map(rate).collect();
        Self { latencies, rates }
    }

    fn at(&self, rank: f64) -> f64 {
        let last = self.latencies.len() - 1;
        self.latencies[(rank.max(0.0) as usize).min(last)] as f64 / 1e3
    }

    /// Requests, p50, p99 and its interval of 95 % by order statistics (µs), and the floods' rates.
    fn line(&self) -> String {
        let n = self.latencies.len() as f64;
        let wide = 1.96 * (n * 0.99 * 0.01).sqrt();
        let us = [n * 0.5, n * 0.99, n * 0.99 - wide, n * 0.99 + wide].map(|rank| self.at(rank));
        let rates: Vec<String> = self.rates.iter().map(|rate| format!("{rate:.0}")).collect();
        let [p50, p99, low, high] = us;
        format!("{n} {p50:.1} {p99:.1} {low:.1} {high:.1} {}", rates.join(","))
    }
}

fn configuration(directory: &Path, mode: Mode, floods: &[usize]) -> String {
    let mut text = "cpus = [0]\n".to_owned();
    if mode == Mode::Own {
        for index in 0..=floods.len() {
            text += &format!("[[iothread]]\nname = 'own{index}'\ncpus = [0]\n");
        }
    }
    let at = directory.display();
    let mapping = |index: usize| match mode {
        Mode::Own => format!("mapping = [{{ iothread = 'own{index}' }}]"),
        _ => "mapping = [{ iothread = 'iot0' }]".to_owned(),
    };
    text += &format!(
        "[[nic]]\nname = 'victim'\nvm = 'victim'\nsocket = '{at}/nic'\ntap = 'tap0'\n{}\n\
         [[device]]\nname = 'disk'\nvm = 'victim'\nsocket = '{at}/disk'\nqueues = 1\n{}\n\
         engine = {{ type = 'ram', size = '4M' }}\n",
        mapping(0),
        mapping(0)
    );
    for (index, kind) in (1..).zip(floods) {
        text += &format!(
            "[[nic]]\nname = 'flood{kind}'\nvm = 'flood{kind}'\nsocket = '{at}/flood{kind}'\n\
             tap = 'tap{}'\n{}\n",
            kind + 1,
            mapping(index)
        );
    }
    text
}

/// A window with a daemon of its own.
fn measure(victim: &str, mode: Mode, floods: &[usize], time: Duration) -> Window {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let at = directory.path();
    let floods = if mode == Mode::Alone { &[] } else { floods };
    let daemon = Daemon::start(at, &mut Store::new(), &configuration(at, mode, floods));
    let mut victim = Victim::connect(victim, &at.join(victim));
    let start = |kind: &usize| Flood::start(&at.join(format!("flood{kind}")), *kind);
    let mut all: Vec<Flood> = floods.iter().map(start).collect();
    let window = Window::run(&mut victim, &mut all, time);
    drop((victim, all, daemon));
    window
}

/// A namespace of this thread's own, in which a script has run; why there is none.
pub(crate) fn namespace(script: &str) -> Result<(), String> {
    if !rustix::process::geteuid().is_root() {
        return Err("needs root".to_owned());
    }
    if !Path::new("/dev/net/tun").exists() {
        return Err("needs /dev/net/tun".to_owned());
    }
    let own = UnshareFlags::NEWNET | UnshareFlags::NEWNS;
    // SAFETY: namespaces share no table of descriptors.
    unsafe { unshare_unsafe(own) }.map_err(|e| e.to_string())?;
    // The daemon looks for its TAPs in there.
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    mount_change("/", private).map_err(|e| e.to_string())?;
    mount("sys", "/sys", "sysfs", MountFlags::empty(), None).map_err(|e| e.to_string())?;
    let _ = std::fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1");
    let output = Command::new("sh").args(["-ec", script]).output().map_err(|e| e.to_string())?;
    if output.status.success() { Ok(()) } else { Err(format!("ip: {}", said(&output))) }
}

/// TAPs for the victim and the floods.
fn taps() -> String {
    let mut script = String::new();
    for tap in 0..=KINDS.len() {
        writeln!(script, "ip tuntap add dev tap{tap} mode tap vnet_hdr && ip link set tap{tap} up")
            .unwrap();
    }
    let mac: Vec<String> = MAC.iter().map(|byte| format!("{byte:02x}")).collect();
    write!(
        script,
        "ip link set lo up && ip link set tap0 address {TAP_MAC} && ip address add 10.88.0.1/24 dev tap0 && \
         ip neighbour add 10.88.0.2 lladdr {} dev tap0 nud permanent",
        mac.join(":")
    )
    .unwrap();
    script
}

fn is_skipped(test: &str) -> bool {
    let why = namespace(&taps()).err();
    if let Some(why) = &why {
        let _ = writeln!(std::io::stderr(), "SKIPPED {test}: {why}");
    }
    why.is_some() || !has_io_uring()
}

#[test]
fn victim_is_served_beside_floods() {
    if is_skipped(TEST) {
        return;
    }
    for victim in ["nic", "disk"] {
        for mode in [Mode::Shared, Mode::Own] {
            let window = measure(victim, mode, &[0, 1, 2], Duration::from_millis(500));
            assert!(!window.latencies.is_empty(), "{victim} {mode:?}");
            assert!(window.rates.iter().all(|rate| *rate > 0.0), "{victim} {:?}", window.rates);
        }
    }
}

/// A line of the results, by its words.
struct Line(Vec<String>);

impl Line {
    fn number(&self, at: usize) -> f64 {
        self.0.get(at).and_then(|word| word.parse().ok()).unwrap_or(f64::NAN)
    }

    fn rates(&self) -> Vec<f64> {
        let words = self.0.get(9).map(String::as_str).unwrap_or_default();
        words.split(',').filter_map(|word| word.parse().ok()).collect()
    }
}

/// `make bench EXPERIMENT=network-neighbours`.
#[test]
fn floods_cost_a_victim_little_where_that_is_measured() {
    let Some(out) = std::env::var_os("RTVIRTIO_FLOODS") else {
        eprintln!("skipped: a victim beside floods: RTVIRTIO_FLOODS names no directory");
        return;
    };
    if is_skipped("floods_cost_a_victim_little_where_that_is_measured") {
        return;
    }
    let of = |name, otherwise| std::env::var(name).map_or(otherwise, |n| n.parse().unwrap());
    let (rounds, time) = (of("ROUNDS", 5), Duration::from_secs(of("SECONDS_EACH", 5)));
    let mut cpus = CpuSet::new();
    cpus.set(1);
    sched_setaffinity(None, &cpus).expect("two CPUs");
    let path = Path::new(&out).join("windows.txt");
    for round in 1..=rounds {
        for victim in ["nic", "disk"] {
            for (name, kinds) in FLOODS {
                for mode in [Mode::Alone, Mode::Shared, Mode::Own] {
                    let key = format!("{round} {victim} {name} {} ", mode.name());
                    let text = std::fs::read_to_string(&path).unwrap_or_default();
                    if text.lines().any(|line| line.starts_with(&key)) {
                        continue;
                    }
                    let line = key + &measure(victim, mode, kinds, time).line();
                    eprintln!("{line}");
                    std::fs::write(&path, text + &line + "\n").unwrap();
                }
            }
        }
    }
    let text = std::fs::read_to_string(&path).unwrap();
    let lines: Vec<Line> = text
        .lines()
        .map(|line| Line(line.split_whitespace().map(str::to_owned).collect()))
        .collect();
    let table = table(&lines);
    eprint!("{table}");
    std::fs::write(Path::new(&out).join("table.txt"), table).unwrap();
}

pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Medians over the rounds, and of the ratios within each.
fn table(lines: &[Line]) -> String {
    const P50: usize = 5;
    const P99: usize = 6;
    let mut text = format!(
        "{:<6}{:<6}{:>3} {:>26} {:>26} {:>34} {:>34} {:>34} {:>11} {:>11} {:>11} {:>11}\n",
        "victim",
        "flood",
        "n",
        "requests in a window",
        "p50: alone, shared, own",
        "p99 alone (interval)",
        "p99 shared (interval)",
        "p99 own (interval)",
        "p50/alone",
        "p99/alone",
        "p99/own",
        "flood/own"
    );
    for victim in ["nic", "disk"] {
        for (flood, _) in FLOODS {
            let of = |mode: Mode| -> Vec<&Line> {
                let key = [victim, flood, mode.name()];
                lines
                    .iter()
                    .filter(|line| {
                        (1..4).all(|at| line.0.get(at).map(String::as_str) == Some(key[at - 1]))
                    })
                    .collect()
            };
            let [alone, shared, own] = [Mode::Alone, Mode::Shared, Mode::Own].map(of);
            let values = |lines: &[&Line], at: usize| {
                median(lines.iter().map(|line| line.number(at)).collect())
            };
            let ratio = |above: &[&Line], below: &[&Line], at: usize| {
                median(above.iter().zip(below).map(|(a, b)| a.number(at) / b.number(at)).collect())
            };
            let kept = shared.iter().zip(&own).map(|(shared, own)| {
                let ratios: Vec<f64> = shared
                    .rates()
                    .iter()
                    .zip(own.rates())
                    .map(|(shared, own)| shared / own)
                    .collect();
                ratios.iter().sum::<f64>() / ratios.len() as f64
            });
            let p99 = |lines: &[&Line]| {
                format!(
                    "{:.0} ({:.0}-{:.0})",
                    values(lines, P99),
                    values(lines, P99 + 1),
                    values(lines, P99 + 2)
                )
            };
            let three = |at| {
                [&alone, &shared, &own].map(|lines| format!("{:.0}", values(lines, at))).join(", ")
            };
            writeln!(
                text,
                "{victim:<6}{flood:<6}{:>3} {:>26} {:>26} {:>34} {:>34} {:>34} {:>11.2} {:>11.2} {:>11.3} {:>11.2}",
                shared.len(),
                three(4),
                three(P50),
                p99(&alone),
                p99(&shared),
                p99(&own),
                ratio(&shared, &alone, P50),
                ratio(&shared, &alone, P99),
                ratio(&shared, &own, P99),
                median(kept.collect()),
            )
            .unwrap();
        }
    }
    text + "us; medians of the rounds, and of the ratios within a round. alone: without a flood; shared: all on one IOThread; \
            own: an\nIOThread for each VM, on the same CPU. Intervals of 95 %. flood/own: what the floods get on the shared one, \
            of what\nthey get otherwise.\n"
}
