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

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use rtvirtio_cases::{Case, Tier, judge};
use rtvirtio_spec::latency::Histogram;
use rtvirtio_spec::run::Canary;
use rtvirtio_units::{Bytes, Nanos};
use serde::{Deserialize, Serialize};

use crate::dataplane::client::{Client, Endpoint, Queue, Shape};
use crate::dataplane::server::Server;
use crate::load::{CanaryThread, Interrupted, MachineSample, wait};
use crate::progress::Progress;
use crate::scratch::{Backing, ScratchDisk, SsdConfig};

const BLOCK: usize = 4096;
/// The background VM's writes, as in the cases.
const WRITE: usize = 128 << 10;
const WRITES: usize = 64;
/// Of each VM's disk.
const DISK: u64 = 256 << 20;
/// From the first request to the window.
const WARM_UP: Duration = Duration::from_secs(2);
/// To start and to end a cell.
const AROUND: Duration = Duration::from_secs(2);
/// How long a request may take before its server counts as dead.
const PATIENCE: Duration = Duration::from_secs(20);

/// How the device is shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scheme {
    /// The background VM alone.
    Alone,
    /// The data plane without a schedule: requests start as they come.
    None,
    /// The data plane with one.
    Qos,
}

impl Scheme {
    /// For people.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Alone => "alone",
            Self::None => "none",
            Self::Qos => "qos",
        }
    }
}

/// Names a cell.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CellKey {
    /// The case, such as `4xL+M+H`; the background VM's own has the first one's.
    pub case: String,
    /// The scheme.
    pub scheme: Scheme,
    /// From 0.
    pub repetition: u32,
}

/// A task in a window.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Task {
    /// `vm0.heavy`, say.
    pub name: String,
    /// Requests completed.
    pub n: u64,
    /// The judged percentile; 0 with too few requests.
    pub percentile: f64,
    /// Its value, µs.
    pub tail_us: f64,
    /// The target for it, µs.
    pub target_us: f64,
    /// Of the requested rate.
    pub delivered: f64,
    /// Whether both hold.
    pub passed: bool,
}

/// A cell.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Cell {
    /// Which.
    #[serde(flatten)]
    pub key: CellKey,
    /// The device, such as `ref-4x250`.
    pub device: String,
    /// Length of the window, s.
    pub seconds: f64,
    /// Its VMs' tasks.
    pub tasks: Vec<Task>,
    /// What the background VM wrote, bytes a second.
    pub background: f64,
    /// Of the device's time, what the tasks' requests needed.
    pub needed: f64,
    /// The machine's health.
    pub canary: Canary,
    /// CPUs busy, of the machine.
    pub busy: f64,
    /// When it ran.
    pub at: String,
}

impl Cell {
    /// Whether every task met its target at its rate.
    #[must_use]
    pub fn passed(&self) -> bool {
        self.tasks.iter().all(|task| task.passed)
    }
}

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

const WARMING: u8 = 0;
const COUNTING: u8 = 1;
const OVER: u8 = 2;

/// Whatever happens, clients end.
struct EndPhase<'a>(&'a AtomicU8);

impl Drop for EndPhase<'_> {
    fn drop(&mut self) {
        self.0.store(OVER, Ordering::Relaxed);
    }
}

/// What a task is to do.
#[derive(Debug, Clone)]
struct Plan {
    name: &'static str,
    iops: rtvirtio_units::Iops,
    read_fraction: f64,
    target: Nanos,
}

fn tasks(case: Case, rank: u8) -> Option<Vec<Plan>> {
    let plan = |&kind: &rtvirtio_cases::TaskKind| {
        Some(Plan {
            name: kind.name(),
            iops: kind.iops(),
            read_fraction: kind.load().read_fraction,
            target: Tier::Strict.target(case, rank, kind)?,
        })
    };
    case.mix().kinds().iter().map(plan).collect()
}

impl Plan {
    fn judged(&self, vm: usize, histogram: &Histogram, seconds: f64) -> Task {
        let judgement = judge(histogram, seconds, self.iops, self.target);
        let (percentile, tail) =
            judgement.judged.map_or((0.0, Nanos::ZERO), |q| (q.percentile.get(), q.value));
        Task {
            name: format!("vm{vm}.{}", self.name),
            n: histogram.count(),
            percentile,
            tail_us: tail.get() as f64 / 1e3,
            target_us: self.target.get() as f64 / 1e3,
            delivered: judgement.delivered_fraction,
            passed: judgement.passed(),
        }
    }
}

fn socket(directory: &Path, vm: usize) -> PathBuf {
    directory.join(format!("vm{vm}.sock"))
}

/// One IOThread; a disk for each VM, and the last for the one that writes.
fn configured(
    vms: &[Vec<Plan>],
    scheme: Scheme,
    model: SsdConfig,
    device: &Path,
    directory: &Path,
) -> String {
    let mut text = "version = 1\n[[iothread]]\nname = \"iot0\"\n".to_owned();
    let is_scheduled = scheme == Scheme::Qos;
    if is_scheduled {
        let slope = model.mean_service.scale(model.length_slope);
        text += &format!(
            "[[schedule]]\nname = \"device\"\nchannels = {}\nrequest_ns = {}\nkib_ns = {}\nflush_ns = {}\n",
            model.channels,
            model.mean_service.saturating_sub(slope).get(),
            slope.get() / 4,
            model.mean_service.get(),
        );
    }
    for vm in 0..=vms.len() {
        text += &format!(
            "[[device]]\nname = \"vm{vm}\"\nvm = \"vm{vm}\"\nsocket = \"{}\"\nqueues = {}\n\
             engine = {{ type = \"file\", path = \"{}\", direct = true, format = \"raw\", \
             lock = \"off\", offset = {}, size = {DISK} }}\n",
            socket(directory, vm).display(),
            vms.get(vm).map_or(1, Vec::len),
            device.display(),
            vm as u64 * DISK,
        );
        if is_scheduled {
            text += &qos(vms.get(vm).map_or(&[], Vec::as_slice));
        }
    }
    text
}

/// What a VM is promised: its tasks are one class, which has the strictest target and all their
/// rates.
fn qos(tasks: &[Plan]) -> String {
    let iops: f64 = tasks.iter().map(|task| task.iops.get()).sum();
    let Some(deadline) = tasks.iter().map(|task| task.target).min() else {
        return "qos = { schedule = \"device\" }\n".to_owned();
    };
    format!(
        "qos = {{ schedule = \"device\", deadline_us = {}, iops = {}, burst = {} }}\n",
        deadline.get() / 1_000,
        iops.ceil(),
        2 * tasks.len(),
    )
}

/// Runs a VM's tasks until the phase is over.
fn run_tasks(socket: &Path, plans: &[Plan], seed: u64, phase: &AtomicU8) -> Result<Vec<Histogram>> {
    let _end = EndPhase(phase);
    let shape = Shape { queues: plans.len(), depth: 1, buffer: BLOCK };
    let mut client = Client::connect(Endpoint::Socket(socket), shape)?;
    let blocks = client.capacity() / BLOCK as u64;
    let work = |queue: &mut Queue, (index, plan): (usize, &Plan)| {
        let mut random = Pcg64Mcg::seed_from_u64(seed << 8 | index as u64);
        let result = run_task(queue, plan, blocks, &mut random, phase);
        if result.is_err() {
            phase.store(OVER, Ordering::Relaxed);
        }
        result
    };
    client.run(plans.iter().enumerate(), work).into_iter().collect()
}

fn run_task(
    queue: &mut Queue,
    plan: &Plan,
    blocks: u64,
    random: &mut Pcg64Mcg,
    phase: &AtomicU8,
) -> Result<Histogram> {
    let every = Duration::from_secs_f64(1.0 / plan.iops.get());
    // Without it a sleep is up to 50 µs too long, and a task late by the kernel's choice.
    rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1))?;
    let mut histogram = Histogram::new();
    let mut due = Instant::now() + every.mul_f64(random.random::<f64>());
    while phase.load(Ordering::Relaxed) != OVER {
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        due += every;
        let offset = random.random_range(0..blocks) * BLOCK as u64;
        let counts = phase.load(Ordering::Relaxed) == COUNTING;
        let begin = Instant::now();
        if random.random::<f64>() < plan.read_fraction {
            queue.read(0, offset, BLOCK);
        } else {
            queue.write(0, offset, BLOCK);
        }
        let mut failed = 0;
        let ended = queue.wait(PATIENCE, |_, ended| failed = ended.result)?;
        ensure!(ended == 1, "{} got no answer within {} s", plan.name, PATIENCE.as_secs());
        ensure!(failed == 0, "a request of {} failed: errno {}", plan.name, -failed);
        if counts && phase.load(Ordering::Relaxed) == COUNTING {
            histogram.record(Nanos::from(begin.elapsed()), 1);
        }
    }
    Ok(histogram)
}

/// The background VM.
fn write_deeply(socket: &Path, phase: &AtomicU8, written: &AtomicU64) -> Result<()> {
    let _end = EndPhase(phase);
    let shape = Shape { queues: 1, depth: WRITES, buffer: WRITE };
    let mut client = Client::connect(Endpoint::Socket(socket), shape)?;
    let places = client.capacity() / WRITE as u64;
    let work = |queue: &mut Queue, ()| -> Result<()> {
        let mut random = Pcg64Mcg::seed_from_u64(7);
        let mut place = || random.random_range(0..places) * WRITE as u64;
        (0..WRITES).for_each(|slot| queue.write(slot, place(), WRITE));
        let mut failed = 0;
        while phase.load(Ordering::Relaxed) != OVER {
            let ended = queue.wait(PATIENCE, |queue, ended| {
                failed = failed.min(ended.result);
                queue.write(ended.slot, place(), WRITE);
            })?;
            ensure!(ended > 0, "the background VM got no answer within {} s", PATIENCE.as_secs());
            ensure!(failed == 0, "a write of the background VM failed: errno {}", -failed);
            written.fetch_add((ended * WRITE) as u64, Ordering::Relaxed);
        }
        while queue.flying() > 0 && queue.wait(PATIENCE, |_, _| ())? > 0 {}
        Ok(())
    };
    client.run([()], work).into_iter().collect()
}

/// The cells of a file; none if it is not there.
///
/// # Errors
/// If a line is no cell.
pub fn read_cells(path: &Path) -> Result<Vec<Cell>> {
    let text = match std::fs::read_to_string(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        text => text.with_context(|| format!("read {}", path.display()))?,
    };
    let read = |(number, line): (usize, &str)| {
        serde_json::from_str(line).with_context(|| format!("{}:{}", path.display(), number + 1))
    };
    text.lines().enumerate().map(read).collect()
}

/// A row for each case and scheme, and what it comes to.
#[must_use]
pub fn table(cells: &[Cell]) -> String {
    let median = |mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
    };
    let alone = cells.iter().filter(|c| c.key.scheme == Scheme::Alone).map(|c| c.background);
    let alone = median(alone.collect());
    let mut text = format!(
        "{:<9} {:<5} {:>6} {:>11} {:>9} {:>12} {:>10} {:>9} {:>9}\n",
        "case", "", "passed", "tail/target", "delivered", "writer MB/s", "x left", "canary", "busy"
    );
    let mut seen: Vec<(&str, Scheme)> = Vec::new();
    let (mut passed, mut kept) = ([0; 2], Vec::new());
    for cell in cells.iter().filter(|c| c.key.scheme != Scheme::Alone) {
        let row = (cell.key.case.as_str(), cell.key.scheme);
        if seen.contains(&row) {
            continue;
        }
        seen.push(row);
        let same = || cells.iter().filter(|c| (c.key.case.as_str(), c.key.scheme) == row);
        let tasks = |f: fn(&Task) -> f64| same().flat_map(move |c| c.tasks.iter().map(f));
        let tail = tasks(|t| t.tail_us / t.target_us).fold(0.0, f64::max);
        let is_judged = tasks(|t| t.percentile).all(|percentile| percentile > 0.0);
        let tail = if is_judged { format!("{tail:.2}") } else { "-".to_owned() };
        let delivered = tasks(|t| t.delivered).fold(f64::MAX, f64::min);
        let of_left = |c: &Cell| c.background / (alone * (1.0 - c.needed));
        let left = median(same().map(of_left).collect());
        let good = same().filter(|c| c.passed()).count();
        if row.1 == Scheme::Qos {
            passed[0] += good;
            passed[1] += same().count();
            kept.push(left);
        }
        text += &format!(
            "{:<9} {:<5} {:>3}/{:<2} {:>11} {:>9.3} {:>12.1} {:>10.2} {:>6.1} ms {:>9.2}\n",
            row.0,
            row.1.name(),
            good,
            same().count(),
            tail,
            delivered,
            median(same().map(|c| c.background / 1e6).collect()),
            left,
            median(same().map(|c| c.canary.p99.as_millis_f64()).collect()),
            median(same().map(|c| c.busy).collect()),
        );
    }
    let least = kept.iter().copied().fold(f64::MAX, f64::min);
    text += &format!(
        "\nqos: {} of {} runs passed; the writer kept at least {least:.2} of what was left (medians). \
         Alone it writes {:.1} MB/s.\n\
         tail/target: the worst of all tasks and runs, at the judged percentile; -: a task had too few \
         requests to judge. delivered: the least; x left, canary (its p99), busy: medians.\n",
        passed[0],
        passed[1],
        alone / 1e6
    );
    text
}

#[cfg(test)]
mod tests {
    use rtvirtio_spec::serve;

    use super::*;

    #[test]
    fn configuration_promises_a_vm_its_tasks_rates_and_the_strictest_target() {
        let case: Case = "2xL+M+H".parse().unwrap();
        let vms: Vec<_> = (0..2).map(|rank| tasks(case, rank).unwrap()).collect();
        let model = "ref-4x250".parse().unwrap();
        let (device, directory) = (Path::new("/dev/loop7"), Path::new("/tmp/x"));
        let text = configured(&vms, Scheme::Qos, model, device, directory);
        let found = serve::parse("test", &text).unwrap();
        let schedule = &found.schedules[0];
        assert_eq!(
            (schedule.channels, schedule.request.get(), schedule.kib.get()),
            (4, 212_500, 9_375)
        );
        let promises: Vec<_> = found
            .devices
            .iter()
            .map(|device| {
                let promise = device.qos.as_ref().unwrap().promise.as_ref();
                promise.map(|p| {
                    let iops = p.rate.iops.unwrap().get();
                    (p.deadline.get() / 1_000_000, iops, p.rate.burst)
                })
            })
            .collect();
        assert_eq!(promises, [Some((10, 2_100.0, 6)), Some((15, 2_100.0, 6)), None]);
        let text = configured(&vms, Scheme::None, model, device, directory);
        let found = serve::parse("test", &text).unwrap();
        assert!(found.schedules.is_empty() && found.devices.iter().all(|d| d.qos.is_none()));
    }
}
