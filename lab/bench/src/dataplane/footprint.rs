//! What `rtvirtio serve` costs when it serves many disks: time to start, memory, CPU when idle.
//!
//! Each device has a client with all its queues started, which makes a write and a read on each
//! queue before and after a window in which nobody does anything. Time is from the program's start
//! to its word to systemd that it serves. Memory is what is resident without shared memory, which
//! is the clients'; CPU is that of all threads.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rtvirtio_host::interrupt::{Interrupted, wait};
use rtvirtio_testbed::client::{Client, Endpoint, Shape};
use rtvirtio_testbed::cpu::{ProcessCpu, entries, raise_descriptors, resident_mib};
use rtvirtio_testbed::load::{self, BLOCK};
use rtvirtio_testbed::server::{Configuration, Server};
use rtvirtio_testbed::work_directory::WorkDirectory;
use serde::Serialize;

use crate::table::Table;

/// What a daemon may have resident, MiB: itself, and each idle queue.
pub(crate) const LIMIT_MIB: (f64, f64) = (30.0, 0.5);
/// How soon it must serve.
pub(crate) const LIMIT_START: Duration = Duration::from_secs(2);
/// What it may use when idle, of a core.
pub(crate) const LIMIT_IDLE: f64 = 0.02;

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
    let directory = WorkDirectory::new()?;
    let socket = |device: usize| directory.path().join(format!("d{device}"));
    let mut all = Configuration::new(None, [None, None]);
    for device in 0..devices {
        let name = format!("d{device}");
        let disk = directory.path().join(format!("{name}.raw"));
        std::fs::File::create_new(&disk)?.set_len(DISK)?;
        let engine = format!("type = \"file\", path = {}", serde_json::to_string(&disk)?);
        all = all.disk((&name, &name), &socket(device), queues, engine);
    }
    let last = socket(devices.saturating_sub(1));
    let (server, start) =
        Server::timed(program, &all.text(), directory.path(), &last, interrupted)?;
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
        let all = client.run(0_usize.., |queue, index| {
            let (at, mark) = ((index * BLOCK) as u64, (device as u8).wrapping_add(index as u8) | 1);
            load::write_and_read(queue, at, mark).with_context(|| format!("queue {index}"))
        });
        all.into_iter().collect::<Result<Vec<()>>>().with_context(|| format!("device {device}"))?;
    }
    Ok(())
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
