//! Messages to and from VMs, as IOcm was evaluated: MQTT over 10,000 connections, requests with their responses, streams, and pages
//! by HTTP; with an IOThread for each pair of queues, as vhost-net has, with one that all share, and with the policy `dynamic`.
//!
//! One large VM has eight pairs of queues, six small ones have one each. A VM is a process with a network namespace: threads
//! named as QEMU's vCPUs, one for each pair, are its driver, which takes frames between the rings and a TAP with
//! offloads and sleeps when there is none. Behind that TAP the host's kernel, mosquitto and an echo server run as the
//! guest's at native speed. Clients are on the other side of the data plane's TAPs. All share two CPUs, where the kernel gives an
//! IOThread that serves many no more of a CPU than each other thread has. So there are two further ways: the one IOThread has a
//! CPU, as IOcm's I/O cores had, and all others the other one; and the data plane has the nice value of
//! the packaged unit (`Nice=-20`), where vhost-net's threads have QEMU's.
//!
//! Load is a closed loop: so many messages are under way, and the next one follows when one has come. So that CPUs are
//! full, and messages per second are those at equal CPU. MQTT 3.1.1, QoS 0: one connection after the other publishes
//! to one of a few topics, each with a subscriber, and what subscribers get counts.
//!
//! `cargo test` sees that every load is served and nothing lost. Figures: `RTVIRTIO_MESSAGES=DIRECTORY` (`make bench
//! EXPERIMENT=network-messages`); `ROUNDS` of each by turns, `SECONDS_EACH`, `CONNECTIONS`, going on with what is there.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use rtvirtio_engine::testing::has_io_uring;
use rustix::process::{Pid, Resource, Rlimit, getrlimit, setpriority_process, setrlimit};
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::floods::{median, namespace};
use crate::nic::{Daemon, Store};

use client::{ASKING, Client, Figures, Load, PAYLOAD, Times};
use vm::Vm;

mod client;
mod vm;

const TEST: &str = "messages_arrive_however_many_iothreads_there_are";
const ENOUGH: Duration = Duration::from_secs(60);
/// Pairs of queues of each VM: the large one, and the small ones.
const VMS: [usize; 7] = [8, 1, 1, 1, 1, 1, 1];
const LARGE: [usize; 1] = [0];
const SMALL: [usize; 6] = [1, 2, 3, 4, 5, 6];
/// Descriptors of a process beside those of its connections.
const FILES: usize = 500;
const LARGE_MESSAGE: usize = 16 << 10;

/// IOThreads: one for each pair of queues; one for all, on any CPU; the same on a CPU of its own; as the policy has it; and that with the
/// unit's nice value.
const MODES: [&str; 5] = ["own", "shared", "core", "dynamic", "packaged"];
const NICE: i32 = -20;
const CASES: [&str; 8] = [
    "mqtt-large",
    "mqtt-small",
    "requests-64",
    "requests-16K",
    "streams-64",
    "streams-16K",
    "http",
    "mixed",
];

/// CPU time of a process, with that of threads that have ended, s.
fn cpu(process: u32) -> f64 {
    let text = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    let fields = text.rsplit(')').next().unwrap().split_whitespace();
    // utime and stime, in ticks of 10 ms.
    fields.skip(11).take(2).map(|ticks| ticks.parse::<f64>().unwrap()).sum::<f64>() / 100.0
}

/// CPU time of this thread, s.
fn own_cpu() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    text.split(' ').next().unwrap().parse::<f64>().unwrap() / 1e9
}

/// The data plane, and VMs on it.
struct World<'a> {
    vms: Vec<Vm>,
    daemon: Daemon<'a>,
}

impl<'a> World<'a> {
    fn start(directory: &'a Path, mode: &str) -> Self {
        let mut cpus = CpuSet::new();
        (0..2).filter(|&cpu| cpu > 0 || mode != "core").for_each(|cpu| cpus.set(cpu));
        // Of clients, too, which are threads of this one.
        sched_setaffinity(None, &cpus).expect("two CPUs");
        let daemon = Daemon::start(directory, &mut Store::new(), &configuration(directory, mode));
        if mode == "packaged" {
            // Threads that come later have it of those that make them.
            for task in std::fs::read_dir(format!("/proc/{}/task", daemon.child.id())).unwrap() {
                let task = task.unwrap().file_name().to_str().unwrap().parse().unwrap();
                setpriority_process(Pid::from_raw(task), NICE).unwrap();
            }
        }
        let start = |vm| Vm::start(vm, &directory.join(format!("vm{vm}")));
        Self { vms: (0..VMS.len()).map(start).collect(), daemon }
    }

    /// CPU time of the data plane, and of the VMs, s.
    fn cpu(&self) -> [f64; 2] {
        [cpu(self.daemon.child.id()), self.vms.iter().map(Vm::cpu).sum()]
    }

    /// Runs a case; a line of results for each kind of messages.
    fn run(&self, case: &str, connections: usize, time: Duration) -> Vec<String> {
        let loads = match case {
            "mqtt-large" => vec![Client::mqtt(&LARGE, connections)],
            "mqtt-small" => vec![Client::mqtt(&SMALL, connections)],
            "requests-64" => vec![Client::requests(&SMALL, PAYLOAD)],
            "requests-16K" => vec![Client::requests(&SMALL, LARGE_MESSAGE)],
            "streams-64" => vec![Client::streams(&SMALL, PAYLOAD)],
            "streams-16K" => vec![Client::streams(&SMALL, LARGE_MESSAGE)],
            "http" => vec![],
            _ => vec![
                Client::mqtt(&LARGE, connections),
                Client::requests(&SMALL[..3], PAYLOAD),
                Client::streams(&SMALL[3..], LARGE_MESSAGE),
            ],
        };
        let mut loads: Vec<Load> = loads.into_iter().map(Load::Client).collect();
        if case == "http" {
            loads.extend(SMALL.iter().flat_map(|&vm| (0..ASKING).map(move |_| Load::Pages(vm))));
        }
        // By then brokers have forgotten the last case's connections, and streams are at their rate.
        let counts = Instant::now() + time / 2;
        let times = Times { counts, ends: counts + time };
        let (cpus, mut all) = std::thread::scope(|scope| {
            let run = |load: Load| scope.spawn(move || load.run(times));
            let loads: Vec<_> = loads.into_iter().map(run).collect();
            let cpus = [times.counts, times.ends].map(|at| {
                std::thread::sleep(at.saturating_duration_since(Instant::now()));
                self.cpu()
            });
            let all = loads.into_iter().map(|load| load.join().unwrap());
            (cpus, all.collect::<Vec<Figures>>())
        });
        let per_second = |of: f64| of / time.as_secs_f64();
        let [serving, guests] = [0, 1].map(|who| per_second(cpus[1][who] - cpus[0][who]));
        let clients = per_second(all.iter().map(|figures| figures.cpu).sum());
        // Of one kind are neighbours.
        all.dedup_by(|other, figures| {
            let is_same = other.name == figures.name;
            if is_same {
                figures.messages += other.messages;
                figures.latencies.append(&mut other.latencies);
            }
            is_same
        });
        let line = |mut figures: Figures| {
            figures.latencies.sort_unstable();
            let at = |part: f64| {
                let rank = (figures.latencies.len() as f64 * part) as usize;
                figures.latencies.get(rank).map_or(f64::NAN, |ns| *ns as f64 / 1e3)
            };
            let (name, rate) = (figures.name, per_second(figures.messages));
            let (p50, p99) = (at(0.5), at(0.99));
            format!("{name} {rate:.0} {p50:.0} {p99:.0} {serving:.3} {guests:.3} {clients:.3}")
        };
        all.into_iter().map(line).collect()
    }
}

fn configuration(directory: &Path, mode: &str) -> String {
    // vhost-net's threads sleep when there is nothing to do; `dynamic` has everything as it is by default.
    let mut text = match mode {
        "dynamic" | "packaged" => "[iocores]\npolicy = 'dynamic'\ncpus = [0, 1]\n",
        "core" => "completion = 'interrupt'\ncpus = [0]\n",
        _ => "completion = 'interrupt'\n",
    }
    .to_owned();
    for thread in 1..if mode == "own" { VMS.iter().sum() } else { 1 } {
        writeln!(text, "[[iothread]]\nname = 'iot{thread}'\ncompletion = 'interrupt'").unwrap();
    }
    let mut thread = 0;
    for (vm, pairs) in VMS.iter().enumerate() {
        let socket = directory.join(format!("vm{vm}"));
        writeln!(
            text,
            "[[nic]]\nname = 'vm{vm}'\nvm = 'vm{vm}'\nsocket = '{}'\ntap = 'tap{vm}'\nqueues = {pairs}",
            socket.display()
        )
        .unwrap();
        if mode == "own" {
            let entry = |pair| {
                let (queue, thread) = (2 * pair, thread + pair);
                format!("{{ iothread = 'iot{thread}', vqs = [{queue}, {}] }}", queue + 1)
            };
            let entries: Vec<String> = (0..*pairs).map(entry).collect();
            writeln!(text, "mapping = [{}]", entries.join(", ")).unwrap();
            thread += pairs;
        }
    }
    text
}

/// As many descriptors as this process may have, which its children inherit.
fn raise_limit() -> u64 {
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
    maximum.unwrap_or(u64::MAX)
}

/// A namespace of this thread's own, with the data plane's TAPs.
fn is_skipped(test: &str, connections: usize) -> bool {
    let mut script = "ip link set lo up\n\
        echo 1024 65535 >/proc/sys/net/ipv4/ip_local_port_range\n"
        .to_owned();
    for (vm, pairs) in VMS.iter().enumerate() {
        let several = if *pairs > 1 { "multi_queue" } else { "" };
        writeln!(
            script,
            "ip tuntap add dev tap{vm} mode tap vnet_hdr {several}\n\
             ip address add 10.90.{vm}.1/24 dev tap{vm}\nip link set tap{vm} up"
        )
        .unwrap();
    }
    let mosquitto = Command::new("mosquitto").arg("-h").output().map(drop);
    let mosquitto = mosquitto.map_err(|_| "needs mosquitto (package mosquitto)".to_owned());
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let cpus = (cpus < 2).then(|| "needs two CPUs".to_owned());
    let files = connections + FILES;
    let files = (raise_limit() < files as u64).then(|| format!("needs {files} descriptors"));
    let why = cpus.or(files).or_else(|| mosquitto.and_then(|()| namespace(&script)).err());
    if let Some(why) = &why {
        let _ = writeln!(std::io::stderr(), "SKIPPED {test}: {why}");
    }
    why.is_some() || !has_io_uring()
}

#[test]
fn messages_arrive_however_many_iothreads_there_are() {
    if is_skipped(TEST, 120) {
        return;
    }
    for mode in ["own", "dynamic"] {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let world = World::start(directory.path(), mode);
        for case in CASES {
            for line in world.run(case, 120, Duration::from_millis(300)) {
                assert!(!line.contains(" 0 "), "{mode} {case}: {line}");
            }
        }
    }
}

/// `make bench EXPERIMENT=network-messages`.
#[test]
fn messages_at_equal_cpu_where_that_is_measured() {
    let Some(out) = std::env::var_os("RTVIRTIO_MESSAGES") else {
        eprintln!("skipped: messages at equal CPU: RTVIRTIO_MESSAGES names no directory");
        return;
    };
    let of = |name, otherwise| std::env::var(name).map_or(otherwise, |n| n.parse().unwrap());
    let connections = of("CONNECTIONS", 10_000) as usize;
    if is_skipped("messages_at_equal_cpu_where_that_is_measured", connections) {
        return;
    }
    let (rounds, time) = (of("ROUNDS", 3), Duration::from_secs(of("SECONDS_EACH", 2)));
    let path = Path::new(&out).join("messages.txt");
    let there = || std::fs::read_to_string(&path).unwrap_or_default();
    for round in 1..=rounds {
        for mode in MODES {
            let key = |case: &str| format!("{round} {mode} {case} ");
            let is_there = |case: &str| there().lines().any(|line| line.starts_with(&key(case)));
            let missing: Vec<&str> = CASES.into_iter().filter(|case| !is_there(case)).collect();
            if missing.is_empty() {
                continue;
            }
            let directory = tempfile::tempdir_in("/dev/shm").unwrap();
            let world = World::start(directory.path(), mode);
            for case in missing {
                let mut text = there();
                for line in world.run(case, connections, time) {
                    let line = format!("{}{line}\n", key(case));
                    eprint!("{line}");
                    text += &line;
                }
                std::fs::write(&path, text).unwrap();
            }
        }
    }
    let table = table(&there());
    eprint!("{table}");
    std::fs::write(Path::new(&out).join("table.txt"), table).unwrap();
}

/// Medians over the rounds, and of the ratios within each.
fn table(text: &str) -> String {
    const COLUMNS: [&str; 12] = [
        "case",
        "messages",
        "mode",
        "per s",
        "p50",
        "p99",
        "serving",
        "guests",
        "clients",
        "per s/own",
        "per CPU/own",
        "p99/own",
    ];
    let lines: Vec<Vec<&str>> =
        text.lines().map(|line| line.split_whitespace().collect()).collect();
    let number = |line: &[&str], at: usize| line[at].parse::<f64>().unwrap_or(f64::NAN);
    let mut kinds: Vec<[&str; 2]> = lines.iter().map(|line| [line[2], line[3]]).collect();
    kinds.sort_by_key(|[case, kind]| (CASES.iter().position(|known| known == case), *kind));
    kinds.dedup();
    let mut rows = vec![COLUMNS.map(str::to_owned).to_vec()];
    for ([case, kind], mode) in kinds.iter().flat_map(|kind| MODES.map(|mode| (kind, mode))) {
        let of = |mode: &str| -> Vec<&Vec<&str>> {
            lines.iter().filter(|line| line[1..4] == [mode, *case, *kind]).collect()
        };
        let (these, own) = (of(mode), of("own"));
        let value = |at: usize| median(these.iter().map(|line| number(line, at)).collect());
        let ratio = |what: &dyn Fn(&[&str]) -> f64| {
            median(these.iter().zip(&own).map(|(a, b)| what(a) / what(b)).collect())
        };
        let used = |line: &[&str]| (7..10).map(|at| number(line, at)).sum::<f64>();
        let mut row = vec![(*case).to_owned(), (*kind).to_owned(), mode.to_owned()];
        row.extend((4..7).map(|at| format!("{:.0}", value(at))));
        row.extend((7..10).map(|at| format!("{:.2}", value(at))));
        let ratios = [
            ratio(&|line| number(line, 4)),
            ratio(&|line| number(line, 4) / used(line)),
            ratio(&|line| number(line, 6)),
        ];
        row.extend(ratios.map(|ratio| format!("{ratio:.2}")));
        rows.push(row);
    }
    let mut table = String::new();
    for row in rows {
        let cells: Vec<String> = row.iter().map(|cell| format!("{cell:<13}")).collect();
        writeln!(table, "{}", cells.concat().trim_end()).unwrap();
    }
    table
        + "per s: messages a second. p50, p99: us from sending to arrival. serving, guests, clients: CPUs used by the data plane,\n\
           by drivers, brokers and servers of VMs, and by clients. per CPU: messages for a second of all that CPU time. /own: of\n\
           what it is with an IOThread for each pair of queues. Medians of the rounds, and of the ratios within a round.\n"
}
