//! What `rtvirtio serve` costs when it serves many disks: time to start, memory, CPU when idle.
//!
//! Each device has a client with all its queues started, which makes a write and a read on each
//! queue before and after a window in which nobody does anything. Time is from the program's start
//! to its word to systemd that it serves. Memory is what is resident without shared memory, which
//! is the clients'; CPU is that of all threads.

use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rtvirtio_host::interrupt::{Interrupted, wait};
use rtvirtio_testbed::client::{Client, Endpoint, Queue, Shape};
use rtvirtio_testbed::cpu::ProcessCpu;
use rtvirtio_testbed::load::BLOCK;
use rtvirtio_testbed::server::{Configuration, Server};
use serde::Serialize;

use crate::table::Table;

/// What a daemon may have resident, MiB: itself, and each idle queue.
pub(crate) const LIMIT_MIB: (f64, f64) = (30.0, 0.5);
/// How soon it must serve.
pub(crate) const LIMIT_START: Duration = Duration::from_secs(2);
/// What it may use when idle, of a core.
pub(crate) const LIMIT_IDLE: f64 = 0.02;

/// How long a start may take before it is given up.
const PATIENCE: Duration = Duration::from_secs(30);
/// From the last request to the idle window.
const SETTLE: Duration = Duration::from_millis(500);
const IDLE: Duration = Duration::from_secs(3);
/// Bytes of each disk, a sparse file: a disk in RAM would be in the daemon's memory.
const DISK: u64 = 1 << 20;

/// What was measured with so many devices.
#[derive(Debug, Clone, Serialize)]
pub struct Footprint {
    /// Devices.
    pub devices: usize,
    /// Queues of each.
    pub queues: usize,
    /// From the program's start until it serves.
    pub start: Duration,
    /// Resident and not shared, before any client came, MiB.
    pub alone_mib: f64,
    /// The same with all queues started and used.
    pub resident_mib: f64,
    /// Cores used in the idle window.
    pub idle_cores: f64,
    /// Threads with all clients connected.
    pub threads: usize,
    /// Open descriptors with all clients connected.
    pub descriptors: usize,
}

impl Footprint {
    const fn all_queues(&self) -> usize {
        self.devices * self.queues
    }

    /// The most that may be resident, MiB.
    pub(crate) fn limit_mib(&self) -> f64 {
        LIMIT_MIB.0 + LIMIT_MIB.1 * self.all_queues() as f64
    }

    /// Whether all limits are kept.
    #[must_use]
    pub fn is_within(&self) -> bool {
        self.start <= LIMIT_START
            && self.resident_mib <= self.limit_mib()
            && self.idle_cores <= LIMIT_IDLE
    }
}

/// Starts a server; how long it took to say that it serves.
fn start(
    program: &Path,
    directory: &Path,
    last: &Path,
    interrupted: &Interrupted,
) -> Result<(Server, Duration)> {
    let notify = directory.join("notify");
    let socket = UnixDatagram::bind(&notify)?;
    // It may write as another user.
    let all = std::os::unix::fs::PermissionsExt::from_mode(0o666);
    std::fs::set_permissions(&notify, all)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    let command = [
        "env".to_owned(),
        format!("NOTIFY_SOCKET={}", notify.display()),
        program.display().to_string(),
        "serve".to_owned(),
        directory.join("serve.toml").display().to_string(),
    ];
    let began = Instant::now();
    let listener = std::thread::spawn(move || -> Result<(String, Instant)> {
        let mut text = [0; 256];
        let read = socket.recv(&mut text).context("the daemon says no word")?;
        Ok((String::from_utf8_lossy(&text[..read]).into_owned(), Instant::now()))
    });
    let server = Server::start(&command, last, directory, interrupted)?;
    let Ok(heard) = listener.join() else { bail!("the listener for the daemon's word failed") };
    let (word, at) = heard?;
    ensure!(word.contains("READY=1"), "it said {word:?} instead of READY=1");
    std::fs::remove_file(notify)?;
    Ok((server, at - began))
}

fn entries(process: u32, of: &str) -> Result<usize> {
    Ok(std::fs::read_dir(format!("/proc/{process}/{of}"))?.count())
}

fn resident_mib(process: u32) -> Result<f64> {
    let text = std::fs::read_to_string(format!("/proc/{process}/status"))?;
    let kib = |key: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
        let number = value.and_then(|v| v.trim().trim_end_matches(" kB").parse::<f64>().ok());
        number.with_context(|| format!("no {key} in the daemon's status"))
    };
    Ok((kib("VmRSS")? - kib("RssShmem")?) / 1024.0)
}

/// Measures so many devices on 2 IOThreads.
///
/// # Errors
/// If the daemon does not start, fails a request or ends; if interrupted.
pub fn measure(
    devices: usize,
    queues: usize,
    program: &Path,
    interrupted: &Interrupted,
) -> Result<Footprint> {
    raise_descriptors();
    let directory = tempfile::tempdir()?;
    let socket = |device: usize| directory.path().join(format!("d{device}"));
    let mut all = Configuration::new(None, [None, None]);
    for device in 0..devices {
        let name = format!("d{device}");
        let disk = directory.path().join(format!("{name}.raw"));
        std::fs::File::create_new(&disk)?.set_len(DISK)?;
        let engine = format!("type = \"file\", path = {}", serde_json::to_string(&disk)?);
        all = all.disk((&name, &name), &socket(device), queues, engine);
    }
    std::fs::write(directory.path().join("serve.toml"), all.text())?;
    let last = socket(devices.saturating_sub(1));
    let (server, start) = start(program, directory.path(), &last, interrupted)?;
    server.during(|server| {
        let process = server.id();
        let alone_mib = resident_mib(process)?;
        let shape = Shape { queues, depth: 1, buffer: BLOCK };
        let connect = |device| Ok(Client::connect(Endpoint::Socket(&socket(device)), shape)?);
        let mut clients: Vec<Client> = (0..devices).map(connect).collect::<Result<_>>()?;
        serve_all(&mut clients)?;
        wait(SETTLE, interrupted)?;
        let (cpu, at) = (ProcessCpu::of(process)?, Instant::now());
        wait(IDLE, interrupted)?;
        let used = ProcessCpu::of(process)?.since(&cpu);
        let idle_cores = used as f64 / at.elapsed().as_nanos() as f64;
        let (threads, descriptors) = (entries(process, "task")?, entries(process, "fd")?);
        serve_all(&mut clients)?;
        let resident_mib = resident_mib(process)?;
        Ok(Footprint {
            devices,
            queues,
            start,
            alone_mib,
            resident_mib,
            idle_cores,
            threads,
            descriptors,
        })
    })
}

/// A write and a read of what was written on each queue.
fn serve_all(clients: &mut [Client]) -> Result<()> {
    for (device, client) in clients.iter_mut().enumerate() {
        let all = client.run(0_usize.., |queue, index| serve(queue, index, device as u8));
        all.into_iter().collect::<Result<Vec<()>>>().with_context(|| format!("device {device}"))?;
    }
    Ok(())
}

fn serve(queue: &mut Queue, index: usize, device: u8) -> Result<()> {
    let (at, mark) = ((index * BLOCK) as u64, device.wrapping_add(index as u8) | 1);
    for is_write in [true, false] {
        queue.buffer(0).fill(if is_write { mark } else { 0 });
        queue.transfer(!is_write, 0, at, BLOCK);
        let (mut result, deadline) = (None, Instant::now() + PATIENCE);
        // It may come back early, with nothing.
        while result.is_none() && Instant::now() < deadline {
            queue.wait(PATIENCE, |_, ended| result = Some(ended.result))?;
        }
        ensure!(result == Some(0), "a request of queue {index} ended with {result:?}");
    }
    ensure!(queue.buffer(0).iter().all(|byte| *byte == mark), "queue {index} lost a write");
    Ok(())
}

/// Clients have descriptors too: some ten for each queue.
fn raise_descriptors() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}

/// For a terminal.
#[must_use]
pub fn render(rows: &[Footprint]) -> String {
    let table = Table::of(rows)
        .figure("devices", 0, |row| row.devices)
        .figure("queues", 0, Footprint::all_queues)
        .figure("start ms", 0, |row| row.start.as_secs_f64() * 1e3)
        .figure("alone MiB", 1, |row| row.alone_mib)
        .figure("resident MiB", 1, |row| row.resident_mib)
        .figure("allowed MiB", 1, Footprint::limit_mib)
        .figure("KiB/queue", 1, |row| {
            (row.resident_mib - row.alone_mib) * 1024.0 / row.all_queues() as f64
        })
        .figure("idle % of a core", 2, |row| row.idle_cores * 100.0)
        .figure("threads", 0, |row| row.threads)
        .figure("descriptors", 0, |row| row.descriptors)
        .text("", |row| if row.is_within() { "" } else { "OVER" });
    table.to_string()
}
