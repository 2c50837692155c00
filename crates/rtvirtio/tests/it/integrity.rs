//! Numbered frames both ways through network devices of `rtvirtio serve`, whose queues move to another IOThread each 20 ms, or
//! faster where few are sent.
//!
//! A device is on a network, a TAP, a stream socket or a datagram socket; its ring is split or packed. Besides moves nothing
//! happens, or the daemon is killed and started again, or memory is added to the guest and removed. Each byte of each frame is
//! compared.
//!
//! - No frame is changed, cut, or given to anybody else.
//! - While no daemon is killed, each comes once, in the order of its flow, and none is lost or counted as dropped.
//! - Around a kill, frames that were on their way at it may be lost. Those whose chains their sender did not have back may come
//!   again, since neither a driver nor a successor knows whether they had gone; that is how a virtqueue without a record of
//!   requests in flight is. What had left a TAP's queue, or a socket, does not come again. The order is kept on either side.
//!
//! `RTVIRTIO_TEST_FRAMES=10000000` of them each way (`make bench EXPERIMENT=network-integrity`).

mod dpdk;
mod far;
mod flow;
mod port;

use std::fmt;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use rtvirtio_engine::testing::has_io_uring;
use serde_json::json;

use self::dpdk::Testpmd;
use self::far::{Dgram, Stream, Tap};
use self::flow::{Content, Flow, mix};
use self::port::Port;
use crate::floods::namespace;
use crate::nic::{Daemon, Store};

const FRAMES: &str = "RTVIRTIO_TEST_FRAMES";
/// Set where there are dpdk-testpmd and huge pages for it (`lab/testpmd`).
const TESTPMD: &str = "RTVIRTIO_TEST_TESTPMD";
/// Frames each way, without that.
const FEW: u64 = 100_000;
/// On their way at a time, but those that a kill may have cost: what the receivers have buffers for.
const WINDOW: u64 = 32;
/// Without a frame that comes.
const LOST: Duration = Duration::from_secs(60);
const KILLS: std::ops::RangeInclusive<u64> = 4..=100;
const MIN_MOVES: u64 = 20;
const MIN_CHANGES: u64 = 8;
const IOTHREADS: [&str; 2] = ["iot0", "iot1"];

/// One end of a link. What it sends waits for [`End::flush`].
trait End {
    /// To a daemon that has just started, as one to which frames can be sent.
    fn connect(&mut self);

    /// Once the other end can receive.
    fn start_sending(&mut self) {}

    /// `false`: there is no room now.
    fn send(&mut self, frame: &[u8]) -> bool;

    /// How many more frames it has back. They cannot come again.
    fn returned(&mut self) -> u64 {
        0
    }

    /// Whether frames may come again that it does not have back.
    fn repeats(&self) -> bool {
        false
    }

    /// A frame that has come.
    fn receive(&mut self, frame: &mut Vec<u8>) -> bool;

    fn flush(&mut self) {}

    /// Of memory.
    fn changes(&self) -> u64 {
        0
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Link {
    Network,
    /// The same, to DPDK's virtio-user and back.
    Dpdk,
    Tap,
    Stream,
    Dgram,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Besides {
    Nothing,
    Kills,
    HotPlug,
}

#[derive(Debug, Clone, Copy)]
struct Row {
    link: Link,
    packed: bool,
    besides: Besides,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let link = match self.link {
            Link::Network => "network",
            Link::Dpdk => "network to DPDK and back",
            Link::Tap => "TAP",
            Link::Stream => "stream socket",
            Link::Dgram => "datagram socket",
        };
        let besides = match self.besides {
            Besides::Nothing => "moves",
            Besides::Kills => "moves, kills",
            Besides::HotPlug => "moves, memory hot-plug",
        };
        write!(f, "{link}, {}, {besides}", if self.packed { "packed" } else { "split" })
    }
}

impl Row {
    /// IOThreads, networks and devices.
    fn configuration(self, at: &Path) -> String {
        let at = at.display();
        let nic = |name: &str, mac: u8, link: &str| {
            format!(
                "[[nic]]\nname = '{name}'\nvm = '{name}'\nsocket = '{at}/{name}'\n\
                 mac = '02:00:00:00:00:0{mac}'\n{link}\n"
            )
        };
        let near = |link: &str| nic("near", 1, link);
        let devices = match self.link {
            Link::Network | Link::Dpdk => {
                let on_it = ["near", "far"].into_iter().zip(1..);
                on_it.map(|(name, mac)| nic(name, mac, "network = 'lan'")).collect()
            }
            Link::Tap => near(&format!("tap = '{}'", Tap::NAME)),
            Link::Stream => near(&format!("stream = '{at}/peer'")),
            Link::Dgram => {
                near(&format!("dgram = {{ local = '{at}/link', remote = '{at}/peer' }}"))
            }
        };
        format!("[[iothread]]\nname = '{}'\n[[network]]\nname = 'lan'\n{devices}", IOTHREADS[1])
    }

    fn devices(self) -> &'static [&'static str] {
        match self.link {
            Link::Network | Link::Dpdk => &["near", "far"],
            Link::Tap | Link::Stream | Link::Dgram => &["near"],
        }
    }

    fn contents(self) -> [Content; 2] {
        let [there, back] = [Content::new(1, 2), Content::new(2, 1)];
        [if self.link == Link::Dpdk { there.swapped() } else { there }, back]
    }

    /// Flows, of which the second is from the far end.
    fn flows(self) -> usize {
        if self.link == Link::Dpdk { 1 } else { 2 }
    }

    fn ends(self, at: &Path) -> [Box<dyn End>; 2] {
        let port = |name| Port::new(at.join(name), self.packed, self.besides == Besides::HotPlug);
        let far: Box<dyn End> = match self.link {
            Link::Network => Box::new(port("far")),
            Link::Dpdk => return dpdk::both(port("near")),
            Link::Tap => Box::new(Tap::new()),
            Link::Stream => Box::new(Stream::new(&at.join("peer"))),
            Link::Dgram => Box::new(Dgram::new(&at.join("peer"), at.join("link"))),
        };
        [Box::new(port("near")), far]
    }
}

/// Moves queues until it is told to end; a daemon that is killed meanwhile is none to complain of.
fn move_about(
    control: &Path,
    devices: &[&str],
    pause: Duration,
    done: &AtomicBool,
    moves: &AtomicU64,
) {
    for at in 0_usize.. {
        if done.load(Relaxed) {
            break;
        }
        let (queue, device) = (at % 2, devices[at / 2 % devices.len()]);
        let to = IOTHREADS[at / 2 / devices.len() % 2];
        let body = json!({ "iothread": to }).to_string();
        let request = format!(
            "PUT /v1/mapping/{device}/{queue} HTTP/1.0\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        let mut answer = String::new();
        let asked = UnixStream::connect(control).and_then(|mut stream| {
            stream.write_all(request.as_bytes())?;
            stream.read_to_string(&mut answer)
        });
        // 409: its memory is being changed. 404: the daemon has just started.
        match answer.split(' ').nth(1) {
            Some("200") => drop(moves.fetch_add(1, Relaxed)),
            Some("404" | "409") | None => {}
            Some(_) => panic!("{request}: {answer}"),
        }
        drop(asked);
        std::thread::sleep(pause);
    }
}

/// Ends the moves, also if the test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Both ends, and the flow from each.
struct Traffic {
    ends: [Box<dyn End>; 2],
    flows: [Flow; 2],
    contents: [Content; 2],
    frame: Vec<u8>,
}

impl Traffic {
    fn connect(&mut self) {
        self.ends.iter_mut().for_each(|end| end.connect());
        self.ends.iter_mut().for_each(|end| end.start_sending());
    }

    /// Sends while there is room, up to this number.
    fn send(&mut self, until: u64) {
        for ((end, flow), content) in self.ends.iter_mut().zip(&mut self.flows).zip(&self.contents)
        {
            while flow.on_their_way() < WINDOW && flow.sent < until {
                content.write(flow.sent, &mut self.frame);
                if !end.send(&self.frame) {
                    break;
                }
                flow.sent += 1;
            }
            end.flush();
        }
    }

    /// Takes what has come; whether there was anything.
    fn receive(&mut self, row: Row) -> bool {
        let mut any = false;
        for (to, end) in self.ends.iter_mut().enumerate() {
            let (flow, content) = (&mut self.flows[1 - to], &self.contents[1 - to]);
            while end.receive(&mut self.frame) {
                let number = content.number(&self.frame).unwrap_or_else(|| {
                    let start = &self.frame[..self.frame.len().min(32)];
                    panic!("{row}: a frame is not as it was sent: {start:x?}, {}", flow.has_come())
                });
                flow.receive(number).unwrap_or_else(|wrong| panic!("{row}, to end {to}: {wrong}"));
                any = true;
            }
            let own = &mut self.flows[to];
            own.returned += end.returned();
            if !end.repeats() {
                own.returned = own.sent;
            }
        }
        any
    }

    fn changes(&self) -> u64 {
        self.ends.iter().map(|end| end.changes()).sum()
    }

    fn kill(&mut self, row: Row) {
        // What the dead one has delivered: the kernel may still be at it.
        while self.receive(row) || {
            std::thread::sleep(Duration::from_millis(2));
            self.receive(row)
        } {}
        self.flows.iter_mut().for_each(Flow::kill);
    }
}

/// Frames that the daemon counts as dropped.
fn dropped(row: Row, daemon: &Daemon<'_>) -> u64 {
    let queue = |nic: usize, queue: usize| daemon.nic(nic)["queues"][queue]["dropped"].as_u64();
    let of = |nic| [0, 1].map(|index| queue(nic, index).expect("a count")).iter().sum::<u64>();
    (0..row.devices().len()).map(of).sum()
}

/// A row, and a line about it for people.
fn run(row: Row, store: &mut Store) {
    let asked: Option<u64> = std::env::var(FRAMES).ok().map(|frames| frames.parse().unwrap());
    let frames = asked.unwrap_or(FEW);
    let pause = Duration::from_micros(if asked.is_some() { 20_000 } else { 1_000 });
    let mut kills = (frames / 100_000).clamp(*KILLS.start(), *KILLS.end());
    let between_kills = frames / (kills + 1);
    if row.besides != Besides::Kills {
        kills = 0;
    }
    // In memory, as where sockets belong.
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let at = directory.path();
    let configuration = row.configuration(at);
    let contents = row.contents();
    let (ends, flows) = (row.ends(at), Default::default());
    let mut traffic = Traffic { ends, flows, contents, frame: Vec::new() };
    let mut daemon = Daemon::start(at, store, &configuration);
    let mut testpmd = None;
    if row.link == Link::Dpdk {
        let testpmd =
            testpmd.insert(Testpmd::start(&at.join("far"), "02:00:00:00:00:02", row.packed));
        while daemon.nic(0)["connected"] != true {
            assert!(testpmd.is_alive(), "testpmd has ended");
            std::thread::sleep(Duration::from_millis(100));
        }
        // Until it forwards.
        std::thread::sleep(Duration::from_secs(2));
    }
    traffic.connect();
    let (done, moves) = (AtomicBool::new(false), AtomicU64::new(0));
    let control = at.join("control");
    let begun = Instant::now();
    let (mut killing, mut killed) = (0, 0);
    std::thread::scope(|scope| {
        let (done, moves, control) = (&done, &moves, &control);
        scope.spawn(move || move_about(control, row.devices(), pause, done, moves));
        let _ends = Stop(done);
        let mut last = Instant::now();
        loop {
            let flows = &traffic.flows[..row.flows()];
            let least = flows.iter().map(Flow::has_come).min().unwrap_or_default();
            let is_enough = killed == kills
                && moves.load(Relaxed) >= MIN_MOVES
                && (row.besides != Besides::HotPlug || traffic.ends[0].changes() >= MIN_CHANGES);
            let ends_at = if is_enough { frames } else { u64::MAX };
            let is_over = |flow: &Flow| flow.sent >= frames && flow.is_over();
            if is_enough && flows.iter().all(is_over) {
                break;
            }
            traffic.send(ends_at);
            if killed == killing && killed < kills && least >= (killed + 1) * between_kills {
                killing += 1;
                assert_eq!(dropped(row, &daemon), 0, "{row}");
                let process = rustix::process::Pid::from_child(&daemon.child);
                // In the midst of it.
                scope.spawn(move || {
                    std::thread::sleep(Duration::from_micros(mix(killing) % 2_000));
                    rustix::process::kill_process(process, rustix::process::Signal::KILL).unwrap();
                });
            }
            if killed < killing && daemon.child.try_wait().unwrap().is_some() {
                killed += 1;
                traffic.kill(row);
                daemon = Daemon::start(at, store, &configuration);
                traffic.connect();
            }
            if traffic.receive(row) {
                last = Instant::now();
            } else {
                let idle = last.elapsed();
                let flows = &traffic.flows;
                assert!(
                    idle < LOST,
                    "{row}: nothing comes: {flows:?}, {} dropped",
                    dropped(row, &daemon)
                );
                std::thread::yield_now();
            }
        }
    });
    let took = begun.elapsed();
    // Nothing comes behind them.
    std::thread::sleep(Duration::from_millis(5));
    assert!(!traffic.receive(row));
    let [there, back] = &traffic.flows;
    let lost_or_again = [there, back].map(|flow| flow.lost() + flow.again);
    assert_eq!(dropped(row, &daemon), 0, "{row}");
    assert!(kills > 0 || lost_or_again == [0; 2], "{row}");
    let mut said = format!(
        "{row}: {} frames{} in {:.1} s, {} moves",
        traffic.flows[..row.flows()].iter().map(|flow| flow.sent).min().unwrap_or_default(),
        if row.flows() == 2 { " each way" } else { "" },
        took.as_secs_f64(),
        moves.load(Relaxed)
    );
    match row.besides {
        Besides::Nothing => {}
        Besides::HotPlug => said += &format!(", {} changes of memory", traffic.changes()),
        Besides::Kills => said += &format!(", {killed} kills"),
    }
    said += "; none changed, none out of order";
    if kills == 0 {
        said += ", none lost, none twice";
    } else {
        for (way, flow) in [("from the guest", there), ("to it", back)] {
            let (lost, again, most) = (flow.lost(), flow.again, flow.max_doubtful);
            said += &format!(
                "; {way} {lost} lost and {again} again (at most {most} on their way at a kill)"
            );
        }
    }
    eprintln!("{said}");
    daemon.end();
}

fn run_all(link: Link, packed: bool) {
    if !has_io_uring() {
        return;
    }
    let mut store = Store::new();
    for besides in [Besides::Nothing, Besides::Kills, Besides::HotPlug] {
        run(Row { link, packed, besides }, &mut store);
    }
}

#[test]
fn frames_of_a_network_on_split_rings_come_as_they_were_sent() {
    run_all(Link::Network, false);
}

#[test]
fn frames_of_a_network_on_packed_rings_come_as_they_were_sent() {
    run_all(Link::Network, true);
}

#[test]
fn frames_of_a_stream_socket_on_split_rings_come_as_they_were_sent() {
    run_all(Link::Stream, false);
}

#[test]
fn frames_of_a_stream_socket_on_packed_rings_come_as_they_were_sent() {
    run_all(Link::Stream, true);
}

#[test]
fn frames_of_a_datagram_socket_on_split_rings_come_as_they_were_sent() {
    run_all(Link::Dgram, false);
}

#[test]
fn frames_of_a_datagram_socket_on_packed_rings_come_as_they_were_sent() {
    run_all(Link::Dgram, true);
}

#[test]
fn frames_of_a_tap_on_split_rings_come_as_they_were_sent() {
    run_on_tap("frames_of_a_tap_on_split_rings_come_as_they_were_sent", false);
}

#[test]
fn frames_of_a_tap_on_packed_rings_come_as_they_were_sent() {
    run_on_tap("frames_of_a_tap_on_packed_rings_come_as_they_were_sent", true);
}

fn run_on_tap(test: &str, packed: bool) {
    let tap = Tap::NAME;
    let script = format!(
        "ip tuntap add dev {tap} mode tap vnet_hdr && ip link set {tap} promisc on && ip link set {tap} up"
    );
    match namespace(&script) {
        Ok(()) => run_all(Link::Tap, packed),
        Err(why) => drop(writeln!(std::io::stderr(), "SKIPPED {test}: {why}")),
    }
}

/// What is there of DPDK and of huge pages is not the tests'.
#[test]
fn frames_of_a_network_come_back_from_dpdk_as_they_were_sent() {
    const TEST: &str = "frames_of_a_network_come_back_from_dpdk_as_they_were_sent";
    if std::env::var_os(TESTPMD).is_none() {
        let _ = writeln!(std::io::stderr(), "SKIPPED {TEST}: {TESTPMD} is not set");
        return;
    }
    for packed in [false, true] {
        for besides in [Besides::Nothing, Besides::HotPlug] {
            run(Row { link: Link::Dpdk, packed, besides }, &mut Store::new());
        }
    }
}
