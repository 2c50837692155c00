//! What IOThreads carry and cost: one guest with four vCPUs and one disk of four
//! virtqueues, served by QEMU's main loop, by one IOThread, by two.
//!
//! The disk is QEMU's null-co without latency, which completes a request where it
//! is submitted and copies nothing: what is left is what an IOThread does for any
//! disk, virtqueues and notifications. A latency would be timers in that thread,
//! a loop device a kernel thread beside it.
//!
//! A *cell* is one service at one depth. fio in the guest, a job to each vCPU,
//! reads all the time; a window's requests (QMP) and CPU time (`/proc`) are both
//! taken at the same two moments, so a start or an end of fio is in neither.
//! A repetition boots each service anew, in random order: a mapping is fixed at
//! a guest's start. IOThreads have QEMU's default polling, and no CPU of their own.
//!
//! Properties (tests of the same name): `arguments_are_those_of_a_plan`,
//! `cpu_time_is_shared_out_over_requests`, `table_has_medians_and_ranges`.

use std::fs::{File, read_to_string};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_pcg::Pcg64Mcg;
use rtvirtio_calibrate::load::MachineSample;
use rtvirtio_calibrate::testbed::{GUEST_FILES, take_host};
use rtvirtio_host::interrupt::{Interrupted, wait};
use rtvirtio_host::qemu::{MappedQueues, Monitor};
use rtvirtio_planner::iothreads::{REQUESTS_PER_IOTHREAD, assign};
use rtvirtio_spec::plan::{VmIoThreads, qemu};
use rtvirtio_spec::run::Machine;
use rtvirtio_spec::specification::parse;
use rtvirtio_testbed::cpu::{ProcessCpu, available};
use rtvirtio_testbed::guests::{Accelerator, COMMAND, Guest, GuestImage, ImageArgs, Start};
use rtvirtio_units::CpuId;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::experiment::{self, Experiment, Report, lasted, seconds};
use crate::stats::{self, Runs};
use crate::table::Table;

/// The guest's virtual CPUs, and so its disk's queues and fio's jobs.
pub const VCPUS: u32 = 4;
/// Requests that each job of fio has in flight.
pub(crate) const DEPTHS: [u32; 2] = [1, 32];
/// Size of the null-co disk.
const DISK_BYTES: u64 = 1 << 30;
/// What a boot takes, about.
const BOOT: Duration = Duration::from_secs(8);
/// How long fio may take to start or to go, in a guest that is translated.
const FIO: Duration = Duration::from_secs(30);
/// From fio's first request to the window.
const RAMP: Duration = Duration::from_secs(1);
/// How long QEMU may take for an answer.
const ANSWER: Duration = Duration::from_secs(10);

const GUEST_BOUND: &str = "guest-bound: TCG translates the vCPUs' instructions, which sets the \
                           IOPS; they say nothing of IOThreads";
const NO_KVM: &str = "skipped: KVM lane (no guest boots under KVM on this machine)";

/// What serves the disk's queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Service {
    /// QEMU's main loop: its default.
    MainLoop,
    /// One IOThread.
    OneIoThread,
    /// A mapping over two.
    TwoIoThreads,
}

impl Service {
    /// All, in the order of tables.
    pub const ALL: [Self; 3] = [Self::MainLoop, Self::OneIoThread, Self::TwoIoThreads];

    /// For people.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::MainLoop => "main loop",
            Self::OneIoThread => "1 IOThread",
            Self::TwoIoThreads => "mapping over 2",
        }
    }

    /// The plan for a disk of a rate that wants so many IOThreads, on a host that has CPUs for them.
    fn plan(self) -> Result<VmIoThreads> {
        let threads = if self == Self::TwoIoThreads { 2 } else { 1 };
        let iops = REQUESTS_PER_IOTHREAD * f64::from(threads);
        let text = format!(
            "version = 1\n[device.null]\npath = '/dev/null'\nprofile = 'none'\n[[vm]]\n\
             name = 'guest'\nvcpus = {VCPUS}\ndisk = [{{ name = 'null', device = 'null' }}]\n\
             task = [{{ name = 'read', disk = 'null', iops = {iops}, \
             target = {{ latency_ms = 10 }} }}]\n"
        );
        let cpus: Vec<_> = (0..VCPUS + threads).map(CpuId::new).collect();
        let (plan, _) = assign(&parse("bench iothreads", &text)?, &cpus);
        plan.vms.into_iter().next().context("the plan has no IOThreads")
    }

    /// QEMU's arguments for IOThreads and disk, as `rtvirtio plan --qemu` prints them; the main
    /// loop's are those without the mapping.
    ///
    /// # Errors
    /// If the planner plans no IOThreads.
    pub fn arguments(self) -> Result<Vec<String>> {
        let mut all = Vec::new();
        for (option, mut value) in qemu::arguments(&self.plan()?) {
            if self == Self::MainLoop {
                let Ok(mut device) = serde_json::from_str::<Value>(&value) else { continue };
                device.as_object_mut().map(|d| d.remove("iothread-vq-mapping"));
                value = device.to_string();
            }
            all.extend([option.to_owned(), value]);
        }
        Ok(all)
    }

    /// What QEMU is to say of the disk.
    fn mapping(self) -> Result<Vec<MappedQueues>> {
        if self == Self::MainLoop {
            return Ok(Vec::new());
        }
        let threads = self.plan()?.disks.remove(0).by_thread().into_iter();
        let mapped = |(thread, vqs): (_, Vec<usize>)| MappedQueues {
            iothread: qemu::name(thread),
            vqs: vqs.into_iter().map(|q| q as u16).collect(),
        };
        Ok(threads.map(mapped).collect())
    }
}

/// The null-co disk's `-blockdev`.
#[must_use]
pub fn backend() -> Value {
    json!({"driver": "null-co", "node-name": "null", "size": DISK_BYTES, "read-zeroes": false})
}

/// Host CPU time for each request, µs, by kind of thread.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CpuMicros {
    /// IOThreads.
    pub iothreads: f64,
    /// Virtual CPUs.
    pub vcpus: f64,
    /// QEMU's main loop.
    pub main_loop: f64,
    /// QEMU's other threads.
    pub other: f64,
    /// The process.
    pub total: f64,
}

/// What one cell measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// Which cell.
    #[serde(flatten)]
    pub key: Key,
    /// Requests in the window.
    pub requests: u64,
    /// Requests per second.
    pub iops: f64,
    /// Host CPU for each.
    pub cpu_us: CpuMicros,
    /// CPU of each IOThread, in cores.
    pub iothread_cores: Vec<f64>,
    /// CPU of everything but this QEMU, in cores.
    pub elsewhere_cores: f64,
    /// The whole machine.
    pub machine: Machine,
}

/// Arguments of `bench iothreads`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "The disk is QEMU's null-co: no disk of yours is touched. Results go to OUT as JSON lines (cells.jsonl), \
    result.json and table.txt."
)]
pub struct Benchmark {
    /// Repetitions; each boots every guest anew
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repetitions: u32,
    /// Length of a cell's window in seconds
    #[arg(long, default_value = "5", value_parser = seconds::<1_000, 3_600_000>)]
    window: Duration,
    #[command(flatten)]
    image: ImageArgs,
    /// Seed of the order
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The image and what runs it, once they are found.
    #[arg(skip)]
    guests: OnceLock<(GuestImage, Accelerator)>,
}

/// Names a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Key {
    /// What served the disk.
    pub service: Service,
    /// Requests in flight of each of fio's jobs.
    pub depth: u32,
    /// From 0.
    pub repetition: u32,
}

/// The host, taken, and the guest that runs: each service has one for all depths of a repetition.
pub struct Taken {
    // In the order in which they must end.
    guest: Option<(Service, u32, Served)>,
    _lock: File,
}

impl Benchmark {
    fn guests(&self, interrupted: &Interrupted) -> Result<&(GuestImage, Accelerator)> {
        if let Some(guests) = self.guests.get() {
            return Ok(guests);
        }
        let found = self.image.find(interrupted).context("this benchmark needs guests")?;
        notes(found.1).iter().for_each(|note| eprintln!("{note}"));
        Ok(self.guests.get_or_init(|| found))
    }
}

impl Experiment for Benchmark {
    type Key = Key;
    type Cell = Run;
    type Setup = Taken;

    const OUT: &'static str = "rtvirtio-bench-iothreads";

    fn keys(&self) -> Result<Vec<Key>> {
        let mut rng = Pcg64Mcg::seed_from_u64(self.seed);
        let mut keys = Vec::new();
        for repetition in 0..self.repetitions {
            let mut services = Service::ALL;
            services.shuffle(&mut rng);
            for service in services {
                let mut depths = DEPTHS;
                depths.shuffle(&mut rng);
                keys.extend(depths.map(|depth| Key { service, depth, repetition }));
            }
        }
        Ok(keys)
    }

    fn is_of(run: &Run, key: &Key) -> bool {
        run.key == *key
    }

    fn label(&self, Key { service, depth, repetition }: &Key) -> String {
        format!("{}, repetition {}, depth {depth}", service.name(), repetition + 1)
    }

    fn expected(&self, _: &Key) -> Duration {
        BOOT / DEPTHS.len() as u32 + self.window + 3 * RAMP
    }

    fn foreign(&self, run: &Run) -> Option<&'static str> {
        (!lasted(run.requests as f64 / run.iops, self.window)).then_some("another window")
    }

    fn set_up(&self, _: &[Key], run: &experiment::Run<'_>) -> Result<Taken> {
        self.guests(run.interrupted)?;
        let (_, lock) = take_host()?;
        std::fs::create_dir_all(GUEST_FILES)?;
        Ok(Taken { guest: None, _lock: lock })
    }

    fn measure(&self, taken: &mut Taken, key: &Key, run: &experiment::Run<'_>) -> Result<Run> {
        let Key { service, repetition, .. } = *key;
        let booted = taken.guest.take_if(|(of, when, _)| (*of, *when) == (service, repetition));
        // One at a time: another one ends before the next boots.
        taken.guest = None;
        let served = match booted {
            Some((.., served)) => served,
            None => Served::boot(self.guests(run.interrupted)?, service, run.interrupted)?,
        };
        let (.., served) = taken.guest.insert((service, repetition, served));
        served.cell(self.window, *key, run.interrupted)
    }

    fn report(&self, runs: &[Run], run: &experiment::Run<'_>) -> Result<Report> {
        let (_, accelerator) = *self.guests(run.interrupted)?;
        let (rows, notes) = (rows(runs), notes(accelerator));
        let table = table(&rows, iops(accelerator));
        let commands = std::fs::read_to_string(run.out.join("commands.txt")).unwrap_or_default();
        let services = Service::ALL.map(|s| Ok(json!({"service": s, "arguments": s.arguments()?})));
        let result = json!({
            "command": commands.lines().last(),
            "accelerator": accelerator.name(),
            "guest_bound": accelerator == Accelerator::Tcg,
            "notes": notes,
            "window_s": self.window.as_secs_f64(),
            "seed": self.seed,
            "vcpus": VCPUS,
            "backend": backend(),
            "services": services.into_iter().collect::<Result<Vec<_>>>()?,
            "summary": table.json(),
            "runs": runs,
        });
        let text = format!(
            "{table}Medians and ranges. CPU: of QEMU for each request, µs, then by thread; elsewhere: other CPU use \
             of the machine, cores.\n{}\n",
            notes.join("\n")
        );
        let file = serde_json::to_string_pretty(&result)?;
        Ok(Report::of(text, result).with("result.json", file))
    }
}

/// A guest whose disk is served.
pub(crate) struct Served {
    monitor: Monitor,
    guest: Guest,
    threads: Threads,
    /// The disk's QOM path.
    disk: String,
    directory: tempfile::TempDir,
}

impl Served {
    fn boot(
        (image, accelerator): &(GuestImage, Accelerator),
        service: Service,
        interrupted: &Interrupted,
    ) -> Result<Self> {
        let directory = tempfile::tempdir_in(GUEST_FILES)?;
        let mut arguments = vec!["-blockdev".to_owned(), backend().to_string()];
        arguments.extend(service.arguments()?);
        let start = Start::new(image, *accelerator, directory.path(), "guest");
        let start = Start { vcpus: VCPUS, arguments, ..start };
        let guest = Guest::boot_as(&start, interrupted)?;
        let mut monitor = guest.monitor()?;
        let blocks = monitor.blocks(ANSWER)?;
        let block = blocks.into_iter().find(|b| b.node.as_deref() == Some("null"));
        let disk = block.and_then(|b| b.qom_path).context("QEMU does not list the disk")?;
        let (found, wanted) = (monitor.queue_mapping(&disk, ANSWER)?, service.mapping()?);
        ensure!(found == wanted, "the mapping is {found:?}, not {wanted:?}");
        let iothreads = monitor.iothreads(ANSWER)?.into_iter().map(|t| t.thread_id).collect();
        let vcpus = monitor.vcpu_threads(ANSWER)?;
        let threads = Threads { process: guest.process_id()?, iothreads, vcpus };
        Ok(Self { monitor, guest, threads, disk, directory })
    }

    fn cell(&mut self, window: Duration, key: Key, interrupted: &Interrupted) -> Result<Run> {
        let depth = key.depth;
        let last = VCPUS - 1;
        let engine = if depth == 1 { "psync" } else { "libaio" };
        let runtime = (FIO + RAMP + window).as_secs() + 1;
        let fio = format!(
            "exec fio --name=read --filename=/dev/vda --rw=randread --bs=4k --direct=1 --thread \
             --numjobs={VCPUS} --cpus_allowed=0-{last} --cpus_allowed_policy=split \
             --ioengine={engine} --iodepth={depth} --time_based --runtime={runtime} \
             --norandommap --randrepeat=0 --gtod_reduce=1 >/tmp/fio.log 2>&1"
        );
        let before = self.reads()?;
        let pid = self.guest.spawn("/bin/sh", &["-c", &fio], COMMAND)?;
        let deadline = Instant::now() + FIO;
        while self.reads()? == before {
            self.check_fio(pid)?;
            ensure!(Instant::now() < deadline, "fio in the guest does no I/O");
            wait(Duration::from_millis(200), interrupted)?;
        }
        wait(RAMP, interrupted)?;
        let machine = MachineSample::now()?;
        let process = self.threads.process;
        let (start, reads, before) = (Instant::now(), self.reads()?, ProcessCpu::of(process)?);
        wait(window, interrupted)?;
        let cpu = self.threads.cpu(&before, &ProcessCpu::of(process)?);
        let requests = self.reads()? - reads;
        let (seconds, machine) = (start.elapsed().as_secs_f64(), machine.since()?);
        self.check_fio(pid)?;
        self.guest.spawn("/bin/kill", &["-KILL", &pid.to_string()], COMMAND)?;
        let deadline = Instant::now() + FIO;
        while self.guest.ended(pid)?.is_none() {
            ensure!(Instant::now() < deadline, "fio in the guest does not go");
            wait(Duration::from_millis(200), interrupted)?;
        }
        ensure!(requests > 0, "no request in the window");
        // What QEMU says it maps, it must also use.
        ensure!(cpu.iothreads.iter().all(|&t| t > 0), "an IOThread did nothing: {cpu:?}");
        let cores = |ns: u64| ns as f64 / 1e9 / seconds;
        Ok(Run {
            key,
            requests,
            iops: requests as f64 / seconds,
            cpu_us: cpu.for_each(requests),
            iothread_cores: cpu.iothreads.iter().map(|&t| cores(t)).collect(),
            elsewhere_cores: (machine.busy_cores - cores(cpu.process)).max(0.0),
            machine,
        })
    }

    fn reads(&mut self) -> Result<u64> {
        Ok(self.monitor.reads_completed(&self.disk, ANSWER)?)
    }

    /// An error with what fio said, if it has ended.
    fn check_fio(&self, pid: i64) -> Result<()> {
        self.guest.check()?;
        let Some(code) = self.guest.ended(pid)? else { return Ok(()) };
        let log = self.directory.path().join("fio.log");
        self.guest.fetch("/tmp/fio.log", &log)?;
        bail!("fio in the guest ended with code {code}: {}", read_to_string(log)?.trim())
    }
}

/// QEMU's threads, by their ids on the host.
struct Threads {
    process: u32,
    iothreads: Vec<u32>,
    vcpus: Vec<u32>,
}

/// CPU time in a window, ns.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Cpu {
    iothreads: Vec<u64>,
    vcpus: u64,
    main_loop: u64,
    process: u64,
}

impl Threads {
    /// Of what the process had between two looks.
    fn cpu(&self, earlier: &ProcessCpu, later: &ProcessCpu) -> Cpu {
        let of = |ids: &[u32]| later.since_of(earlier, |id| ids.contains(&id));
        Cpu {
            iothreads: self.iothreads.iter().map(|&id| of(&[id])).collect(),
            vcpus: of(&self.vcpus),
            // The thread that a process starts with.
            main_loop: of(&[self.process]),
            process: later.since(earlier),
        }
    }
}

impl Cpu {
    fn for_each(&self, requests: u64) -> CpuMicros {
        let us = |ns: u64| ns as f64 / 1e3 / requests as f64;
        let iothreads = self.iothreads.iter().sum();
        CpuMicros {
            iothreads: us(iothreads),
            vcpus: us(self.vcpus),
            main_loop: us(self.main_loop),
            other: us(self.process - iothreads - self.vcpus - self.main_loop),
            total: us(self.process),
        }
    }
}

/// Each service at each depth over all repetitions, in the order of tables.
pub type Row<'a> = Runs<'a, (u32, Service), Run>;

/// The runs by depth and service.
#[must_use]
pub fn rows(runs: &[Run]) -> Vec<Row<'_>> {
    let mut rows = stats::runs(runs, |run| (run.key.depth, run.key.service));
    rows.sort_by_key(|row| (row.key.0, Service::ALL.iter().position(|of| *of == row.key.1)));
    rows
}

/// Medians and ranges; `iops` is what the requests a second are called.
#[must_use]
pub fn table<'a>(rows: &'a [Row<'a>], iops: &str) -> Table<'a, Row<'a>> {
    let shown = |digits: usize, of: fn(&Run) -> f64| {
        move |row: &Row<'_>| Some(format!("{:.digits$}", row.spread(of)?))
    };
    Table::of(rows)
        .text("depth", |row| format!("{VCPUS} x {}", row.key.0))
        .text("served by", |row| row.key.1.name())
        .figure("runs", 0, Runs::n)
        .shown(iops, shown(0, |run| run.iops))
        .shown("CPU", shown(1, |run| run.cpu_us.total))
        .shown("IOThreads", shown(1, |run| run.cpu_us.iothreads))
        .shown("main loop", shown(1, |run| run.cpu_us.main_loop))
        .shown("vCPUs", shown(1, |run| run.cpu_us.vcpus))
        .shown("elsewhere", shown(2, |run| run.elsewhere_cores))
}

/// What must be read beside the numbers.
fn notes(accelerator: Accelerator) -> Vec<String> {
    let mut notes = Vec::new();
    if accelerator == Accelerator::Tcg {
        notes.extend([GUEST_BOUND.to_owned(), NO_KVM.to_owned()]);
    }
    let cpus = available();
    // The most that want a CPU: vCPUs, two IOThreads, the main loop.
    if cpus < VCPUS as usize + 3 {
        notes.push(format!(
            "{VCPUS} vCPUs, the IOThreads and QEMU's main loop share {cpus} CPUs, unpinned"
        ));
    }
    notes
}

/// What requests a second are called.
fn iops(accelerator: Accelerator) -> &'static str {
    if accelerator == Accelerator::Tcg { "IOPS, guest-bound" } else { "IOPS" }
}

#[cfg(test)]
mod tests;
