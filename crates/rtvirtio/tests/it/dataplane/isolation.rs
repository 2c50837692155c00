//! What a broken VM does to another VM's latency on the same IOThread.
//!
//! Victim and attacker are processes of the same machine, so the attacker's own processor time
//! would count as the daemon's: the attacker has nice 19 beside the victim on one CPU, and the
//! daemon has another for itself. What is left is what the daemon does because of the attacker.

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use rtvirtio_dataplane::ring::driver::Buffer;
use rustix::process::setpriority_process;
use rustix::thread::{CpuSet, gettid, sched_setaffinity};

use super::front_end::{DATA, Daemon, FrontEnd, send};

const DEPTH: u64 = 4;
const WINDOW: Duration = Duration::from_secs(4);
const PAIRS: usize = 5;

fn run_on(cpu: usize, pid: Option<rustix::process::Pid>) {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(pid, &set).unwrap();
}

/// 4 KiB random reads, always [`DEPTH`] in flight; sorted latencies, ns.
fn victim(front: &mut FrontEnd) -> Vec<u64> {
    let mut latencies = Vec::with_capacity(2_000_000);
    let mut began = [Instant::now(); FrontEnd::SIZE as usize];
    let mut slots: Vec<u64> = (0..DEPTH).collect();
    let mut by_id = [0; FrontEnd::SIZE as usize];
    let (start, mut random) = (Instant::now(), 1u64);
    let guest = Arc::clone(front.driver.guest());
    loop {
        let over = start.elapsed() > WINDOW;
        let now = Instant::now();
        while !over && let Some(slot) = slots.pop() {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let data = DATA + slot * 0x2000;
            let mut header = [0; 16];
            header[8..].copy_from_slice(&((random >> 33) % 1000 * 8).to_le_bytes());
            guest.write(data + 0x1000, &header);
            let at = |address, length, writable| Buffer { address, length, writable };
            let buffers =
                [at(data + 0x1000, 16, false), at(data, 4096, true), at(data + 0x1010, 1, true)];
            let id = front.driver.add(&buffers, false).unwrap();
            by_id[usize::from(id)] = slot;
            began[usize::from(id)] = now;
        }
        if front.driver.publish() {
            front.kick();
        }
        if !front.driver.enable_calls() {
            front.wait();
        }
        let now = Instant::now();
        while let Some((id, _)) = front.driver.take() {
            latencies.push((now - began[usize::from(id)]).as_nanos() as u64);
            slots.push(by_id[usize::from(id)]);
        }
        if over && front.driver.outstanding() == 0 {
            break;
        }
    }
    latencies.sort_unstable();
    latencies
}

/// Reconnects, breaks its ring, says nonsense and kicks, again and again.
fn attack(socket: &Path, stop: &AtomicBool, attacks: &AtomicU64) {
    setpriority_process(Some(gettid()), 19).unwrap();
    while !stop.load(Relaxed) {
        let front = FrontEnd::connect(socket);
        for _ in 0..1000 {
            front.kick();
        }
        front.offer(FrontEnd::SIZE, 1);
        for _ in 0..100 {
            front.kick();
        }
        drop(front);
        for _ in 0..10 {
            let stream = UnixStream::connect(socket).unwrap();
            send(&stream, [99, 1, 8], &[0xff; 8], &[]);
            send(&stream, [5, 9, 40], &[0xff; 40], &[]);
        }
        attacks.fetch_add(1, Relaxed);
    }
}

fn middle(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// `make bench-dataplane-isolation`.
#[test]
fn broken_vm_changes_another_vms_tail_by_less_than_a_tenth() {
    let Some(out) = std::env::var_os("RTVIRTIO_ISOLATION") else {
        eprintln!("skipped: broken_vm_changes_another_vms_tail: RTVIRTIO_ISOLATION names no file");
        return;
    };
    let engine = "{ type = 'ram', size = '4M' }".to_owned();
    let daemon = Daemon::start(&[("bad", engine.clone()), ("good", engine)]);
    daemon.run_on(|thread| run_on(0, Some(thread)));
    let mut good = FrontEnd::connect(&daemon.socket("good"));
    run_on(1, None);
    let mut file = std::fs::File::create(out).unwrap();
    let mut say = |line: String| {
        eprintln!("{line}");
        writeln!(file, "{line}").unwrap();
    };
    say("A victim reads 4 KiB at random from RAM, 4 in flight; beside it, another VM's front end"
        .into());
    say("reconnects, breaks its ring, sends malformed messages and kicks, without end, nice 19."
        .into());
    say("Daemon on CPU 0, both front ends on CPU 1; pairs of windows of 4 s, interleaved.".into());
    say("pair              n    p50 us  p99.9 us |          n    p50 us  p99.9 us  attacks  ratio of p99.9".into());
    let (mut ratios, mut medians) = (Vec::new(), Vec::new());
    for pair in 0..PAIRS {
        let (stop, attacks) = (AtomicBool::new(false), AtomicU64::new(0));
        let mut windows = Vec::new();
        // Which one is first takes turns.
        for attacked in [pair % 2 == 1, pair % 2 == 0] {
            stop.store(false, Relaxed);
            let latencies = std::thread::scope(|scope| {
                if attacked {
                    scope.spawn(|| attack(&daemon.socket("bad"), &stop, &attacks));
                }
                let latencies = victim(&mut good);
                stop.store(true, Relaxed);
                latencies
            });
            let at = |q: f64| latencies[(latencies.len() as f64 * q) as usize] as f64 / 1000.0;
            windows.push((attacked, latencies.len(), at(0.5), at(0.999)));
        }
        windows.sort_by_key(|window| window.0);
        let (alone, beside) = (windows[0], windows[1]);
        ratios.push(beside.3 / alone.3);
        medians.push(beside.2 / alone.2);
        say(format!(
            "{pair:4} {:14} {:9.1} {:9.1} | {:10} {:9.1} {:9.1} {:8}  {:.3}",
            alone.1,
            alone.2,
            alone.3,
            beside.1,
            beside.2,
            beside.3,
            attacks.load(Relaxed),
            beside.3 / alone.3
        ));
    }
    let (least, most) = (
        ratios.iter().copied().fold(f64::MAX, f64::min),
        ratios.iter().copied().fold(0.0, f64::max),
    );
    let ratio = middle(&mut ratios);
    say(format!("ratio of p99.9: median {ratio:.3} of {PAIRS}, all from {least:.3} to {most:.3}"));
    say(format!("ratio of p50: median {:.3}", middle(&mut medians)));
}
