//! The load of one cell: every VM's tasks as fio jobs within the VM's cgroup, or
//! within its guest.
//!
//! One fio process a VM, one thread a task (each with an I/O context of its
//! own, as bfq sees it; a guest's requests are all QEMU's). Background VMs start first, are seen to do I/O,
//! outlive the tasks, and are measured in the tasks' window only. fio's
//! processes die with their starter (`PR_SET_PDEATHSIG`).
//!
//! Latency is fio's completion latency, which starts at submission: a rare
//! stall delays requests that are then never issued in time, and shows in the
//! delivered rate instead.

mod canary;
pub mod fio;
mod job;

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rtvirtio_cases::IoPriority;
use rtvirtio_spec::latency::Histogram;
use rtvirtio_spec::run::Machine;
use rtvirtio_spec::specification::{Specification, Vm};
use rtvirtio_units::{BytesPerSecond, Nanos, TaskName, VmName};
use rustix::thread::CpuSet;

pub use canary::{CanaryThread, summary as canary_summary};
pub use job::{Cgroups, Job, Place, Process, streams};

use rtvirtio_host::interrupt::{Interrupted, wait};

/// Where fio's job files and logs lie while a load runs.
pub const FIO_FILES: &str = "/run/rtvirtio-host/bench/fio";
/// Settling time before the window, in which fio does I/O but does not count.
pub const RAMP: Duration = Duration::from_secs(1);
/// How long a neighbour may take to be seen doing I/O.
const NEIGHBOUR_START: Duration = Duration::from_secs(5);
/// How much longer than expected fio may take before it is given up.
const OVERTIME: Duration = Duration::from_secs(30);

/// What to run.
#[derive(Clone, Copy)]
pub struct CellLoad<'a> {
    /// VMs and tasks. All disks are `device`.
    pub specification: &'a Specification,
    /// Where they work.
    pub device: &'a Path,
    /// Each VM's I/O priority, if the scheme sets one.
    pub ioprio: &'a BTreeMap<VmName, IoPriority>,
    /// Where the VMs are.
    pub place: &'a dyn Place,
    /// How long to measure.
    pub window: Duration,
}

/// What one task did in the window.
#[derive(Debug, Clone)]
pub struct TaskMeasurement {
    /// Its VM.
    pub vm: VmName,
    /// The task.
    pub task: TaskName,
    /// Each request's latency.
    pub histogram: Histogram,
    /// Largest latency in each interval: (ms since the window's start, latency).
    pub timeline: Vec<(u64, Nanos)>,
}

/// What a cell measured.
#[derive(Debug, Clone)]
pub struct Measurement {
    /// Tasks of VMs that have one with a target.
    pub tasks: Vec<TaskMeasurement>,
    /// What each background VM moved in the window.
    pub background: BTreeMap<VmName, BytesPerSecond>,
    /// How late a sleeping thread woke up, each time.
    pub canary: Histogram,
    /// State of the machine.
    pub machine: Machine,
}

impl Measurement {
    /// Adds a later window of the same load under the same settings. `so_far` and `window` are the
    /// lengths of what was measured until now and of what is added.
    pub fn append(&mut self, so_far: Duration, other: Self, window: Duration) {
        let offset = so_far.as_millis() as u64;
        for added in other.tasks {
            let same = |t: &&mut TaskMeasurement| (&t.vm, &t.task) == (&added.vm, &added.task);
            let Some(task) = self.tasks.iter_mut().find(same) else { continue };
            task.histogram.merge(&added.histogram);
            task.timeline.extend(added.timeline.iter().map(|&(ms, late)| (ms + offset, late)));
        }
        let (old, new) = (so_far.as_secs_f64(), window.as_secs_f64());
        let mean = |a: f64, b: f64| (a * old + b * new) / (old + new);
        for (vm, moved) in &mut self.background {
            let added = other.background.get(vm).copied().unwrap_or_default();
            *moved = BytesPerSecond::new(mean(moved.get() as f64, added.get() as f64) as u64);
        }
        self.canary.merge(&other.canary);
        self.machine = Machine {
            load1: other.machine.load1,
            busy_cores: mean(self.machine.busy_cores, other.machine.busy_cores),
            steal_cores: mean(self.machine.steal_cores, other.machine.steal_cores),
        };
    }
}

impl CellLoad<'_> {
    /// How long [`CellLoad::run`] takes, about.
    #[must_use]
    pub fn duration(window: Duration) -> Duration {
        window + RAMP + Duration::from_millis(1200)
    }

    /// Runs the load and measures it.
    ///
    /// # Errors
    /// If fio is missing or fails, if a neighbour does no I/O, or if interrupted.
    pub fn run(&self, interrupted: &Interrupted) -> Result<Measurement> {
        std::fs::create_dir_all(FIO_FILES)?;
        let directory = tempfile::tempdir_in(FIO_FILES)?;
        // Longer than the tasks can take; it is stopped once they are done.
        let outlive = self.window + RAMP + 2 * OVERTIME;
        let (backgrounds, vms): (Vec<&Vm>, Vec<&Vm>) =
            self.specification.vms.iter().partition(|vm| vm.is_background());
        let mut background = Vec::new();
        let mut tasks = Vec::new();
        let before = written_sectors(self.device)?;
        for &vm in &backgrounds {
            background.push(self.start(directory.path(), vm, (outlive, Duration::ZERO))?);
        }
        if !background.is_empty() {
            self.wait_for_neighbour(before, &mut background, interrupted)?;
        }
        let canary = CanaryThread::start();
        let machine = MachineSample::now()?;
        for &vm in &vms {
            tasks.push(self.start(directory.path(), vm, (self.window, RAMP))?);
        }
        // By each neighbour's own clock, which its log goes by.
        let starts = background.iter().map(|b| Ok(b.now()? + RAMP)).collect::<Result<Vec<_>>>()?;
        let expected = Instant::now() + RAMP + self.window;
        if tasks.is_empty() {
            wait(RAMP + self.window, interrupted)?;
        }
        for task in &mut tasks {
            task.finish(expected, expected + OVERTIME, interrupted)?;
        }
        let machine = machine.since()?;
        let canary = canary.lateness();
        for neighbour in &mut background {
            // One that is gone early makes every scheme look good.
            neighbour.check().context("the background VM ended before the tasks")?;
        }
        let mut measured = Vec::new();
        for (worker, vm) in tasks.iter().zip(&vms) {
            let histograms = fio::histograms(&worker.output())?;
            for (index, task) in vm.tasks.iter().enumerate() {
                let histogram = histograms.get(task.name.as_str()).with_context(|| {
                    format!("fio reported nothing of {}/{}", vm.name, task.name)
                })?;
                let log = directory.path().join(fio::log_name(&vm.name, "clat", index));
                measured.push(TaskMeasurement {
                    vm: vm.name.clone(),
                    task: task.name.clone(),
                    histogram: histogram.clone(),
                    timeline: fio::timeline(&log)?,
                });
            }
        }
        // Its own log tells what a neighbour moved in the window; it is written at the end.
        let mut moved = BTreeMap::new();
        for ((worker, vm), start) in background.iter_mut().zip(&backgrounds).zip(starts) {
            worker.terminate()?;
            let now = Instant::now();
            worker.finish(now, now + OVERTIME, interrupted)?;
            let mut total = 0.0;
            for index in 0..streams(vm) {
                let log = directory.path().join(fio::log_name(&vm.name, "bw", index));
                total += fio::mean_bandwidth(&log, start, start + self.window)?;
            }
            moved.insert(vm.name.clone(), BytesPerSecond::new(total as u64));
        }
        Ok(Measurement { tasks: measured, background: moved, canary, machine })
    }

    fn start(&self, directory: &Path, vm: &Vm, times: (Duration, Duration)) -> Result<Job<'_>> {
        self.place.start(directory, vm, self.ioprio.get(&vm.name), times)
    }

    fn wait_for_neighbour(
        &self,
        before: u64,
        background: &mut [Job<'_>],
        interrupted: &Interrupted,
    ) -> Result<()> {
        let deadline = Instant::now() + NEIGHBOUR_START;
        while written_sectors(self.device)? <= before {
            ensure!(Instant::now() < deadline, "the background VM did no I/O within 5 s");
            for worker in &mut *background {
                worker.check()?;
            }
            wait(Duration::from_millis(20), interrupted)?;
        }
        // Until its queue is full.
        Ok(wait(Duration::from_millis(300), interrupted)?)
    }
}

/// Sectors read and written so far (kernel `Documentation/block/stat.rst`).
fn written_sectors(device: &Path) -> Result<u64> {
    // By its number: the node of a volume may have any name, and that of etherd/e0.0 lies in a directory.
    let number = std::fs::metadata(device)?.rdev();
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    let file = format!("/sys/dev/block/{major}:{minor}/stat");
    let text = std::fs::read_to_string(&file).with_context(|| format!("read {file}"))?;
    let fields: Vec<u64> = text.split_whitespace().filter_map(|f| f.parse().ok()).collect();
    Ok(fields.get(2).unwrap_or(&0) + fields.get(6).unwrap_or(&0))
}

/// CPU time so far of the CPUs that this process may use, in ticks of 1/100 s (`/proc/stat`): what VMs do on CPUs of their own
/// takes nothing from what is measured here.
pub struct MachineSample {
    at: Instant,
    busy: u64,
    steal: u64,
}

impl MachineSample {
    /// Of now.
    ///
    /// # Errors
    /// If `/proc/stat` cannot be read.
    pub fn now() -> Result<Self> {
        let usable = rustix::thread::sched_getaffinity(None)?;
        let text = std::fs::read_to_string("/proc/stat")?;
        let (busy, steal) = cpu_time(&text, &usable).context("/proc/stat has no CPU line")?;
        Ok(Self { at: Instant::now(), busy, steal })
    }

    /// What the machine did since.
    ///
    /// # Errors
    /// If `/proc` cannot be read.
    pub fn since(self) -> Result<Machine> {
        let now = Self::now()?;
        let seconds = (now.at - self.at).as_secs_f64();
        let cores = |ticks: u64| ticks as f64 / 100.0 / seconds;
        let load = std::fs::read_to_string("/proc/loadavg")?;
        let load1 = load.split_whitespace().next().and_then(|l| l.parse().ok()).unwrap_or(0.0);
        Ok(Machine {
            load1,
            busy_cores: cores(now.busy.saturating_sub(self.busy)),
            steal_cores: cores(now.steal.saturating_sub(self.steal)),
        })
    }
}

/// Ticks that these CPUs were busy, and that a hypervisor took from them, by `/proc/stat`; those of all CPUs where it lacks
/// one of them, since a container's may have numbers of its own.
fn cpu_time(text: &str, usable: &CpuSet) -> Option<(u64, u64)> {
    let mut all = None;
    let mut own = Vec::new();
    for line in text.lines() {
        let mut fields = line.split_whitespace();
        let Some(cpu) = fields.next().and_then(|name| name.strip_prefix("cpu")) else { continue };
        let t: Vec<u64> = fields.filter_map(|field| field.parse().ok()).collect();
        // user nice system idle iowait irq softirq steal
        let [user, nice, system, _, _, irq, softirq, steal, ..] = t[..] else { continue };
        let time = (user + nice + system + irq + softirq, steal);
        match cpu.parse() {
            Ok(cpu) if CpuSet::MAX_CPU > cpu && usable.is_set(cpu) => own.push(time),
            Ok(_) => {}
            Err(_) => all = Some(time),
        }
    }
    if own.len() < usable.count() as usize {
        return all;
    }
    Some(own.into_iter().fold((0, 0), |(busy, steal), of| (busy + of.0, steal + of.1)))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn device_is_counted_whatever_its_node_is_called() {
        let skip = |why: &dyn std::fmt::Display| {
            // Past the test harness, which would hide it; its thread is named after the test.
            let thread = std::thread::current();
            let (mut stderr, name) = (std::io::stderr(), thread.name().unwrap_or_default());
            let _ = writeln!(stderr, "SKIPPED {name}: needs a block device and its node: {why}");
        };
        let devices = std::fs::read_dir("/sys/dev/block").into_iter().flatten().flatten();
        let mut names = devices.filter_map(|entry| entry.file_name().into_string().ok());
        let Some(found) = names.next() else { return skip(&"there is none") };
        let (major, minor) = found.split_once(':').unwrap();
        let number = rustix::fs::makedev(major.parse().unwrap(), minor.parse().unwrap());
        let directory = tempfile::tempdir().unwrap();
        let node = directory.path().join("vg-volume");
        let (kind, mode) = (rustix::fs::FileType::BlockDevice, rustix::fs::Mode::RUSR);
        match rustix::fs::mknodat(rustix::fs::CWD, &node, kind, mode, number) {
            Ok(()) => assert!(written_sectors(&node).is_ok(), "{found}"),
            Err(why) => skip(&why),
        }
    }

    #[test]
    fn time_of_cpus_that_are_not_used_does_not_count() {
        let text = "cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 1 2 3 50 60 4 5 6 0 0\ncpu1 100 0 0 0 0 0 0 70 0 0\nintr 5\n";
        let of = |cpus: &[usize]| {
            let mut usable = CpuSet::new();
            cpus.iter().for_each(|cpu| usable.set(*cpu));
            cpu_time(text, &usable)
        };
        assert_eq!(of(&[0]), Some((15, 6)));
        assert_eq!(of(&[0, 1]), Some((115, 76)));
        // As in a container that numbers its CPUs anew.
        assert_eq!(of(&[4, 5]), Some((45, 9)));
    }
}
