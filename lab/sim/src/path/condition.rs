//! What is simulated: a device, the path to it, the VMs that share it.

use rtvirtio_spec::settings::{Limits, Scheduler};
use rtvirtio_ssd::{SsdConfig, Stalls};
use rtvirtio_units::{Bytes, Nanos, Percentile, Weight};
use serde::{Deserialize, Serialize};

use super::world::LEAD;

/// The most VMs of a condition.
pub const MAX_VMS: usize = 1024;
/// The most tasks of a VM.
pub const MAX_TASKS: usize = 64;

/// A condition: all that an outcome is a function of.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Condition {
    /// The device.
    pub device: SsdConfig,
    /// What stands before it.
    pub service: Service,
    /// What a request takes between the scheduler and the device and back, beside the device, mean: the driver's
    /// work, and a server's if the device is emulated. Two thirds of it are always there, one is exponential.
    #[serde(default)]
    pub transport: Nanos,
    /// What it takes beside that, mean: the task's system calls and wake-up, and in a guest the virtqueue. Half of
    /// it is always there, half is exponential; a timer that wakes a task up comes late by as much as the
    /// latter.
    #[serde(default)]
    pub software: Nanos,
    /// How many cgroups lie one in another between the root and those of the VMs: 1 for libvirt's (in
    /// `machine.slice`). It matters to bfq, which looks at the root whether a queue may preempt another.
    #[serde(default = "one")]
    pub nesting: u8,
    /// bfq has been at work on the device before, under deep queues too: it knows what it forgets only when another
    /// scheduler is chosen (that the device queues, and how deep). False: it has just been chosen.
    #[serde(default)]
    pub seasoned: bool,
    /// The VMs that share it.
    pub vms: Vec<Vm>,
    /// I/O that does not count, from 0.6 s on, when all tasks have started. What a task with a rate owes at its end is
    /// forgotten, as by fio.
    pub warm_up: Nanos,
    /// How long the measured window is.
    pub length: Length,
    /// Of all that is random.
    pub seed: u64,
}

const fn one() -> u8 {
    1
}

/// How requests of several VMs come to the device.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Service {
    /// The host kernel's block layer: limits of cgroups, then this scheduler.
    Kernel {
        /// The device's scheduler.
        scheduler: Scheduler,
    },
    /// The data plane's schedule (`rtvirtio_qos`), which knows promises.
    DataPlane,
}

/// One VM.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Vm {
    /// Its cgroup's weight under bfq, or its flow's in the data plane.
    pub weight: Weight,
    /// Its limits on this device.
    #[serde(default)]
    pub limits: Limits,
    /// I/O class of its processes; none is best-effort, level 4.
    #[serde(default)]
    pub priority: Option<Priority>,
    /// The scheduler within the guest. None: the tasks are processes of the host in the VM's cgroup,
    /// as the benchmark without guests has them.
    #[serde(default)]
    pub guest: Option<Scheduler>,
    /// What it does.
    pub tasks: Vec<Task>,
}

/// A process's I/O class and level (`ioprio_set(2)`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Priority {
    /// The real-time class, level 0 (most urgent) to 7.
    RealTime(u8),
    /// The best-effort class, level 0 to 7.
    BestEffort(u8),
}

/// One task: threads that issue direct, synchronous requests at random offsets.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Task {
    /// Requests a second; none: as many as it can.
    pub iops: Option<f64>,
    /// Size of each, in whole sectors.
    pub block_size: Bytes,
    /// Fraction of reads, 0 to 1.
    pub read_fraction: f64,
    /// In flight, 1 to 1024.
    pub queue_depth: u32,
    /// In the data plane: how long after its arrival a request within `iops` should have ended. None:
    /// it is promised nothing.
    #[serde(default)]
    pub deadline: Option<Nanos>,
}

/// How long to measure.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Length {
    /// At least so long.
    pub at_least: Nanos,
    /// And until so many requests of each task with a rate lie beyond `percentile`.
    #[serde(default)]
    pub until: Option<Until>,
    /// But no longer than this.
    pub at_most: Nanos,
}

/// Samples that a percentile is to have beyond it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Until {
    /// Of each task.
    pub percentile: Percentile,
    /// So many beyond it.
    pub beyond: u64,
}

impl Length {
    /// So long and no longer.
    #[must_use]
    pub const fn fixed(time: Nanos) -> Self {
        Self { at_least: time, until: None, at_most: time }
    }

    /// The time after which `vms` are done if each task delivers its rate: what a campaign is
    /// estimated by.
    #[must_use]
    pub fn expected(&self, vms: &[Vm]) -> Nanos {
        let slowest = vms.iter().flat_map(|vm| &vm.tasks).filter_map(|t| t.iops).reduce(f64::min);
        let needed = match (self.until, slowest) {
            (Some(until), Some(iops)) => Nanos::from_secs_f64(until.requests() / iops),
            _ => Nanos::ZERO,
        };
        needed.max(self.at_least).min(self.at_most)
    }
}

impl Until {
    /// Requests that a task needs.
    #[must_use]
    pub fn requests(&self) -> f64 {
        // The nudge keeps 10 beyond p99.9 at 10,000.
        (self.beyond as f64 / (1.0 - self.percentile.fraction()) - 1e-6).ceil()
    }
}

/// Why a condition is refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ConditionError {
    /// The device.
    #[error("device")]
    Device(#[source] rtvirtio_ssd::SsdError),
    /// Nobody, or too many.
    #[error("{0} VMs: 1 to {MAX_VMS} can be simulated")]
    Vms(usize),
    /// A VM has none, or too many.
    #[error("vms[{vm}] has {tasks} tasks: 1 to {MAX_TASKS} can be simulated")]
    Tasks {
        /// Its index.
        vm: usize,
        /// How many it has.
        tasks: usize,
    },
    /// A field is out of its range.
    #[error("vms[{vm}].tasks[{task}].{field} is out of range ({range})")]
    Task {
        /// The VM's index.
        vm: usize,
        /// The task's.
        task: usize,
        /// The field.
        field: &'static str,
        /// What it may be.
        range: &'static str,
    },
    /// A time is out of its range.
    #[error("{field} is out of range ({range})")]
    Time {
        /// The field.
        field: &'static str,
        /// What it may be.
        range: &'static str,
    },
    /// A level is out of its range.
    #[error("vms[{vm}].priority: levels are 0 to 7")]
    Priority {
        /// The VM's index.
        vm: usize,
    },
    /// A limit of zero lets nothing through.
    #[error("vms[{vm}].limits: a limit is at least 1")]
    Limit {
        /// The VM's index.
        vm: usize,
    },
    /// A scheduler that is not simulated.
    #[error("iocost is not simulated")]
    IoCost,
    /// The window is empty, or ends before it begins.
    #[error("length: 0 < at_least <= at_most <= 30 days is needed")]
    Length,
}

const MONTH: Nanos = Nanos::from_millis(30 * 24 * 3600 * 1000);
/// The most that a request takes on average of the device, or beside it, and the longest stall.
const MAX_TIME: Nanos = Nanos::from_millis(10_000);
/// Stalls that come more often leave the device no time, and each request has to pass through all of them.
const MIN_STALL_INTERVAL: Nanos = Nanos::from_millis(1);

impl Condition {
    /// Checks every range.
    ///
    /// # Errors
    /// [`ConditionError`] names the field.
    pub fn check(&self) -> Result<(), ConditionError> {
        if !(1..=MAX_VMS).contains(&self.vms.len()) {
            return Err(ConditionError::Vms(self.vms.len()));
        }
        let Length { at_least, at_most, .. } = self.length;
        if at_least == Nanos::ZERO || at_least > at_most || at_most > MONTH || self.warm_up > MONTH
        {
            return Err(ConditionError::Length);
        }
        self.check_times()?;
        let of_host = match self.service {
            Service::Kernel { scheduler } => Some(scheduler),
            Service::DataPlane => None,
        };
        let schedulers = of_host.into_iter().chain(self.vms.iter().filter_map(|vm| vm.guest));
        if schedulers.into_iter().any(|scheduler| matches!(scheduler, Scheduler::IoCost(_))) {
            return Err(ConditionError::IoCost);
        }
        for (index, vm) in self.vms.iter().enumerate() {
            vm.check(index)?;
        }
        Ok(())
    }

    /// Events have times of 64 bits, ns: those of one request are to be far from the end of these.
    fn check_times(&self) -> Result<(), ConditionError> {
        let out = |field, range| Err(ConditionError::Time { field, range });
        let SsdConfig { mean_service, stalls, .. } = self.device;
        if self.transport > MAX_TIME {
            return out("transport", "0 to 10 s");
        }
        if self.software > MAX_TIME {
            return out("software", "0 to 10 s");
        }
        if mean_service > MAX_TIME {
            return out("device.mean_service", "1 ns to 10 s");
        }
        if let Some(Stalls { length, mean_interval }) = stalls {
            if length > MAX_TIME {
                return out("device.stalls.length", "0 to 10 s");
            }
            if !(MIN_STALL_INTERVAL..=MONTH).contains(&mean_interval) {
                return out("device.stalls.mean_interval", "1 ms to 30 days");
            }
        }
        Ok(())
    }

    /// How long it is simulated if each task delivers its rate: until all have started, the warm-up, and the window.
    #[must_use]
    pub fn expected(&self) -> Nanos {
        let before = Nanos::new(LEAD).saturating_add(self.warm_up);
        before.saturating_add(self.length.expected(&self.vms))
    }
}

impl Vm {
    fn check(&self, vm: usize) -> Result<(), ConditionError> {
        if !(1..=MAX_TASKS).contains(&self.tasks.len()) {
            return Err(ConditionError::Tasks { vm, tasks: self.tasks.len() });
        }
        if let Some(Priority::RealTime(level) | Priority::BestEffort(level)) = self.priority
            && level > 7
        {
            return Err(ConditionError::Priority { vm });
        }
        let Limits { read_bps, write_bps, read_iops, write_iops } = self.limits;
        let bytes = [read_bps, write_bps].map(|l| l.map(rtvirtio_units::BytesPerSecond::get));
        if bytes.into_iter().chain([read_iops, write_iops]).flatten().any(|limit| limit == 0) {
            return Err(ConditionError::Limit { vm });
        }
        for (task, t) in self.tasks.iter().enumerate() {
            let out = |field, range| Err(ConditionError::Task { vm, task, field, range });
            if t.iops.is_some_and(|iops| !(0.001..=1e7).contains(&iops)) {
                return out("iops", "0.001 to 10,000,000");
            }
            let sectors = t.block_size.get() % 512 == 0;
            if !sectors || !(512..=16 << 20).contains(&t.block_size.get()) {
                return out("block_size", "512 bytes to 16 MiB in whole sectors");
            }
            if !(0.0..=1.0).contains(&t.read_fraction) {
                return out("read_fraction", "0 to 1");
            }
            if !(1..=1024).contains(&t.queue_depth) {
                return out("queue_depth", "1 to 1024");
            }
            if t.deadline == Some(Nanos::ZERO) {
                return out("deadline", "more than 0");
            }
        }
        Ok(())
    }
}
