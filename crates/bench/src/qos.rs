//! The data plane's promises, measured: the cases' VMs as vhost-user-blk clients of one server whose
//! disks lie on one device, beside a background VM that writes deeply.
//!
//! A VM is a libblkio client with a queue and a thread for each of its tasks, which sends one request
//! at a time, each due so long after the one before; one that is late catches up. Latencies run from
//! submission. The device is an emulated SSD behind FUSE and loop, the same as for the kernel's
//! schedulers (`rtvirtio bench`), whose I/O scheduler is none.
//!
//! *Left over* is what the background VM writes alone, times one less the share of the device's time
//! that the requests which VMs had delivered need.
//!
//! - [`cell`]: what a cell holds.
//! - `clients`: the VMs.
//! - `configuration`: the server's.
//! - [`mod@table`]: for a terminal.

pub mod cell;
pub(crate) mod clients;
pub(crate) mod configuration;
pub mod table;

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rtvirtio_cases::Case;
use rtvirtio_spec::run::Canary;
use rtvirtio_units::Bytes;

use crate::dataplane::server::Server;
use crate::load::{CanaryThread, Interrupted, MachineSample, wait};
use crate::progress::Progress;
use crate::scratch::{Backing, ScratchDisk, SsdConfig};
use cell::{Cell, CellKey, Scheme, Task, read_cells};
use clients::{COUNTING, EndPhase, Plan, WARMING, run_tasks, tasks, write_deeply};
use configuration::{DISK, configured, socket};

/// From the first request to the window.
pub(crate) const WARM_UP: Duration = Duration::from_secs(2);
/// To start and to end a cell.
const AROUND: Duration = Duration::from_secs(2);

/// A campaign.
#[derive(Debug)]
pub struct Benchmark<'a> {
    /// Cases, of tier strict.
    pub cases: Vec<Case>,
    /// How often each.
    pub repetitions: u32,
    /// Length of a window.
    pub window: Duration,
    /// The emulated SSD.
    pub ssd: String,
    /// The `rtvirtio` that serves.
    pub program: &'a Path,
    /// Where cells go.
    pub out: &'a Path,
}

impl Benchmark<'_> {
    /// Runs what is not in `cells.jsonl` yet, and returns all that is there.
    ///
    /// # Errors
    /// If the device, the server or a client fails; if interrupted.
    pub fn run(&self, interrupted: &Interrupted) -> Result<Vec<Cell>> {
        std::fs::create_dir_all(self.out)?;
        let path = self.out.join("cells.jsonl");
        let mut cells = read_cells(&path)?;
        let is_missing = |key: &CellKey| cells.iter().all(|cell| cell.key != *key);
        let missing: Vec<CellKey> = self.keys().into_iter().filter(is_missing).collect();
        if missing.is_empty() {
            return Ok(cells);
        }
        let model: SsdConfig = self.ssd.parse()?;
        let size = Bytes::new(DISK * 5);
        let disk = ScratchDisk::start(self.program, &Backing::Ssd(self.ssd.clone()), size, 1)?;
        let mut file = OpenOptions::new().create(true).append(true).open(&path)?;
        let expected = WARM_UP + self.window + AROUND;
        let mut progress = Progress::new(missing.len(), expected * missing.len() as u32);
        for key in missing {
            let label = format!("{} {}", key.case, key.scheme.name());
            progress.start(&label, expected);
            let cell = self.cell(key, model, disk.device(), interrupted).context(label)?;
            writeln!(file, "{}", serde_json::to_string(&cell)?)?;
            cells.push(cell);
            progress.finish(expected);
        }
        Ok(cells)
    }

    /// Every cell, in the order in which they run: schemes take turns.
    fn keys(&self) -> Vec<CellKey> {
        let mut keys = Vec::new();
        for repetition in 0..self.repetitions {
            for (index, case) in self.cases.iter().enumerate() {
                let mut schemes = vec![Scheme::None, Scheme::Qos];
                schemes.rotate_left((repetition as usize + index) % 2);
                if index == 0 {
                    schemes.push(Scheme::Alone);
                }
                let key = |scheme| CellKey { case: case.to_string(), scheme, repetition };
                keys.extend(schemes.into_iter().map(key));
            }
        }
        keys
    }

    fn cell(
        &self,
        key: CellKey,
        model: SsdConfig,
        device: &Path,
        interrupted: &Interrupted,
    ) -> Result<Cell> {
        let case: Case = key.case.parse()?;
        let vms: Vec<Vec<Plan>> = match key.scheme {
            Scheme::Alone => Vec::new(),
            _ => (0..case.vms())
                .map(|rank| tasks(case, rank))
                .collect::<Option<_>>()
                .context("a case has targets for its VMs")?,
        };
        let directory = tempfile::Builder::new().prefix("rtvirtio-qos-").tempdir()?;
        let directory = directory.path();
        let configuration = directory.join("serve.toml");
        let text = configured(&vms, key.scheme, model, device, directory);
        std::fs::write(&configuration, text)?;
        let command =
            [&self.program.display().to_string(), "serve", &configuration.display().to_string()];
        let command = command.map(str::to_owned);
        // Sockets are made in the order of the file: the background VM's is the last.
        let mut server =
            Server::start(&command, &socket(directory, vms.len()), directory, interrupted)?;
        let measured = self.measure(&vms, directory, &key, interrupted);
        server.check()?;
        let Measured { tasks, background, seconds, canary, busy } = measured?;
        server.terminate()?;
        let needed = tasks.iter().map(|task| task.n as f64 / seconds).sum::<f64>()
            * model.mean_service.as_secs_f64()
            / f64::from(model.channels);
        let at = jiff::Timestamp::now().to_string();
        let device = self.ssd.clone();
        Ok(Cell { key, device, seconds, tasks, background, needed, canary, busy, at })
    }

    fn measure(
        &self,
        vms: &[Vec<Plan>],
        directory: &Path,
        key: &CellKey,
        interrupted: &Interrupted,
    ) -> Result<Measured> {
        let phase = AtomicU8::new(WARMING);
        let written = AtomicU64::new(0);
        std::thread::scope(|scope| {
            let end = EndPhase(&phase);
            let seed = u64::from(key.repetition) << 8;
            let background =
                scope.spawn(|| write_deeply(&socket(directory, vms.len()), &phase, &written));
            let clients: Vec<_> = vms
                .iter()
                .enumerate()
                .map(|(vm, plans)| {
                    let (socket, phase) = (socket(directory, vm), &phase);
                    scope.spawn(move || run_tasks(&socket, plans, seed | vm as u64, phase))
                })
                .collect();
            wait(WARM_UP, interrupted)?;
            ensure!(phase.load(Ordering::Relaxed) == WARMING, "a VM ended in the warm-up");
            let (canary, machine) = (CanaryThread::start(), MachineSample::now()?);
            let (before, begin) = (written.load(Ordering::Relaxed), Instant::now());
            phase.store(COUNTING, Ordering::Relaxed);
            wait(self.window, interrupted)?;
            ensure!(phase.load(Ordering::Relaxed) == COUNTING, "a VM ended in the window");
            let bytes = written.load(Ordering::Relaxed) - before;
            let seconds = begin.elapsed().as_secs_f64();
            let busy = machine.since()?.busy_cores;
            let canary = canary.stop();
            drop(end);
            let mut tasks = Vec::new();
            for (vm, client) in clients.into_iter().enumerate() {
                let Ok(histograms) = client.join() else { bail!("a client failed") };
                for (plan, histogram) in vms[vm].iter().zip(histograms?) {
                    tasks.push(plan.judged(vm, &histogram, seconds));
                }
            }
            let Ok(ended) = background.join() else { bail!("the background client failed") };
            ended?;
            Ok(Measured { tasks, background: bytes as f64 / seconds, seconds, canary, busy })
        })
    }
}

struct Measured {
    tasks: Vec<Task>,
    background: f64,
    seconds: f64,
    canary: Canary,
    busy: f64,
}
