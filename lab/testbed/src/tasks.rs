//! VMs as libblkio clients: tasks that are due at times of their own.
//!
//! Clients look at a phase that they share: requests count while it says so, and all of them end
//! when it is over. One that ends early ends the phase.

use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use rtvirtio_cases::{Case, Tier};
use rtvirtio_spec::specification::Task;
use rtvirtio_units::{Iops, Nanos};
use serde::{Deserialize, Serialize};

use crate::client::{Client, Endpoint, Queue, Shape};
use crate::window::Phase;

/// How long a request may take before its server counts as dead.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Time that a guest takes between the end of a request and the next.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Between {
    /// None.
    #[default]
    Nothing,
    /// Always this.
    Constant(Nanos),
    /// Exponentially distributed, with this mean.
    Exponential(Nanos),
}

impl Between {
    /// Its mean.
    #[must_use]
    pub const fn mean(self) -> Nanos {
        match self {
            Self::Nothing => Nanos::ZERO,
            Self::Constant(time) | Self::Exponential(time) => time,
        }
    }

    fn draw(self, random: &mut Pcg64Mcg) -> Duration {
        let mean = Duration::from(self.mean());
        match self {
            Self::Exponential(_) => mean.mul_f64(-(1.0 - random.random::<f64>()).ln()),
            Self::Nothing | Self::Constant(_) => mean,
        }
    }
}

impl fmt::Display for Between {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nothing => write!(f, "0"),
            Self::Constant(time) => write!(f, "{time} constant"),
            Self::Exponential(time) => write!(f, "{time} exponential"),
        }
    }
}

impl FromStr for Between {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (time, is_constant) = match text.strip_prefix("exponential:") {
            Some(time) => (time, false),
            None => (text, true),
        };
        let time: u64 = time.parse().map_err(|_| {
            format!(
                "`{text}` is neither a number of µs, such as 250, nor one such as exponential:250"
            )
        })?;
        if time > 1_000_000 {
            return Err(format!("`{text}` is longer than a second, 1000000 µs"));
        }
        Ok(match Nanos::from_micros(time) {
            Nanos::ZERO => Self::Nothing,
            time if is_constant => Self::Constant(time),
            time => Self::Exponential(time),
        })
    }
}

/// What a task is to do.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Its name within its VM.
    pub name: String,
    /// Requests a second.
    pub iops: Iops,
    /// Bytes of a request.
    pub block: usize,
    /// Of its requests.
    pub read_fraction: f64,
    /// Of its judged percentile.
    pub target: Nanos,
    /// The guest's own time between two requests.
    pub between: Between,
}

/// What a request takes of the reference device, 250 µs, and of the way there and back (docs/results/path).
/// A task that sends one at a time can have no higher rate than one in this and its guest's own time.
const REQUEST: Nanos = Nanos::from_micros(380);
/// What it asks for at most of that rate.
const PART: f64 = 0.9;

/// The tasks of a case's VM, which are as slow as they have to be for a guest that takes time `between` two
/// requests; none if it has no targets.
pub fn tasks(case: Case, tier: Tier, rank: u8, between: Between) -> Option<Vec<Plan>> {
    let most = PART / between.mean().saturating_add(REQUEST).as_secs_f64();
    let plan = |&kind: &rtvirtio_cases::TaskKind| {
        Some(Plan {
            name: kind.name().to_owned(),
            iops: Iops::new(kind.iops().get().min(most)).ok()?,
            block: kind.load().block_size.get() as usize,
            read_fraction: kind.load().read_fraction,
            target: tier.target(case, rank, kind)?,
            between,
        })
    };
    case.mix().kinds().iter().map(plan).collect()
}

impl Plan {
    /// A task of a specification; `None` without a rate or a target.
    pub fn of_task(task: &Task) -> Option<Self> {
        Some(Self {
            name: task.name.to_string(),
            iops: task.load.iops?,
            block: task.load.block_size.get() as usize,
            read_fraction: task.load.read_fraction,
            target: task.target?.latency,
            between: Between::Nothing,
        })
    }
}

/// Runs a VM's tasks until the phase is over. Each has one of `records`, in which `record` notes
/// when a request of the window ended, and its latency.
pub fn run_tasks_into<R: Send>(
    socket: &Path,
    plans: &[Plan],
    seed: u64,
    phase: &Phase,
    records: &mut [R],
    record: impl Fn(&mut R, Instant, Nanos) + Sync,
) -> Result<()> {
    let _end = phase.ended_by_drop();
    let buffer = plans.iter().map(|plan| plan.block).max().unwrap_or(0);
    let shape = Shape { queues: plans.len(), depth: 1, buffer };
    let mut client = Client::connect(Endpoint::Socket(socket), shape)?;
    let capacity = client.capacity();
    let work = |queue: &mut Queue, ((index, plan), into): ((usize, &Plan), &mut R)| {
        let mut random = Pcg64Mcg::seed_from_u64(seed << 8 | index as u64);
        let result = run_task(queue, plan, capacity, &mut random, phase, |ended, latency| {
            record(into, ended, latency);
        });
        if result.is_err() {
            phase.end();
        }
        result
    };
    client.run(plans.iter().enumerate().zip(records), work).into_iter().collect()
}

/// One request at a time until the phase is over; `record` is told of those of the window.
pub fn run_task(
    queue: &mut Queue,
    plan: &Plan,
    capacity: u64,
    random: &mut Pcg64Mcg,
    phase: &Phase,
    mut record: impl FnMut(Instant, Nanos),
) -> Result<()> {
    let blocks = capacity / plan.block as u64;
    let every = Duration::from_secs_f64(1.0 / plan.iops.get());
    // Without it a sleep is up to 50 µs too long, and a task late by the kernel's choice.
    rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1))?;
    let mut due = Instant::now() + every.mul_f64(random.random::<f64>());
    while !phase.is_over() {
        let ready = Instant::now() + plan.between.draw(random);
        std::thread::sleep(due.max(ready).saturating_duration_since(Instant::now()));
        due += every;
        let offset = random.random_range(0..blocks) * plan.block as u64;
        let counts = phase.counts();
        let begin = Instant::now();
        let is_read = random.random::<f64>() < plan.read_fraction;
        queue.transfer(is_read, 0, offset, plan.block);
        let mut failed = 0;
        let ended = queue.wait(PATIENCE, |_, ended| failed = ended.result)?;
        ensure!(ended == 1, "{} got no answer within {} s", plan.name, PATIENCE.as_secs());
        ensure!(failed == 0, "a request of {} failed: errno {}", plan.name, -failed);
        if counts && phase.counts() {
            let ended = Instant::now();
            record(ended, Nanos::from(ended - begin));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_between_requests_is_read_or_refused_with_what_would_do() {
        let us = Nanos::from_micros;
        let read = |text: &str| text.parse::<Between>();
        assert_eq!(read("0"), Ok(Between::Nothing));
        assert_eq!(read("250"), Ok(Between::Constant(us(250))));
        assert_eq!(read("exponential:1000"), Ok(Between::Exponential(us(1_000))));
        for wrong in ["", "-5", "1ms", "exponential:", "exponential:x", "1000001"] {
            let said = read(wrong).unwrap_err();
            assert!(said.contains("µs"), "{wrong}: {said}");
        }
    }
}
