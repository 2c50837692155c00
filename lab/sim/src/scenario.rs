//! What VMs do, and when: a plain description, which the simulator and a generator of real load both
//! play.
//!
//! Times are from the start of the scenario. A VM has a fixed number of queues, one client each; a
//! queue has at most one [`Stream`] at a time. [`Scenario::generate`] makes one from kinds of phases, a
//! size and a seed: the same give the same.

mod generate;

use rtvirtio_units::{Bytes, Iops, Nanos};
use serde::{Deserialize, Serialize};

/// Most VMs.
pub const MAX_VMS: usize = 4_096;
/// Most queues of a VM.
pub const MAX_QUEUES: u16 = 64;
/// Most requests in flight of a queue: the size of its ring.
pub const MAX_DEPTH: u16 = 256;
/// Most streams and compute threads of a VM.
pub const MAX_PARTS: usize = 100_000;
/// Most pairs of queues of a VM's network devices.
pub const MAX_PAIRS: u16 = 8;
/// Bytes of a frame.
pub const FRAME: std::ops::RangeInclusive<u64> = 14..=65_550;
/// Longest scenario.
pub const MAX_LENGTH: Nanos = Nanos::from_millis(24 * 3_600_000);
/// Largest request.
pub const MAX_BLOCK: Bytes = Bytes::new(1 << 20);

/// What all VMs do in a stretch of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PhaseKind {
    /// Hardly anything.
    Idle,
    /// One queue is always full.
    OneHot,
    /// All queues are always full.
    AllHot,
    /// Many VMs with small requests against few with large ones.
    SmallLarge,
    /// VMs compute.
    Compute,
    /// Each VM does something else.
    Mixed,
    /// Queues are full for 50 ms to 5 s, then empty for as long.
    Bursts,
    /// VMs come and go.
    Hotplug,
    /// All queues are full and empty by turns, 100 ms each: the period at which policies decide.
    Flapping,
    /// All network devices are full of small frames, both ways.
    SmallFrames,
    /// All network devices are full of frames of 64 KiB, as a driver leaves them to be segmented, both ways.
    Bulk,
    /// Of four VMs one has a full disk, one small frames, one large ones, and one some of all.
    DisksNics,
}

impl PhaseKind {
    /// Those of disks.
    pub const DISKS: [Self; 9] = [
        Self::Idle,
        Self::OneHot,
        Self::AllHot,
        Self::SmallLarge,
        Self::Compute,
        Self::Mixed,
        Self::Bursts,
        Self::Hotplug,
        Self::Flapping,
    ];

    /// Those of network devices, and what these do when they do hardly anything.
    pub const NETWORK: [Self; 4] = [Self::Idle, Self::SmallFrames, Self::Bulk, Self::DisksNics];

    /// Its name on the command line and in files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::OneHot => "one-hot",
            Self::AllHot => "all-hot",
            Self::SmallLarge => "small-large",
            Self::Compute => "compute",
            Self::Mixed => "mixed",
            Self::Bursts => "bursts",
            Self::Hotplug => "hotplug",
            Self::Flapping => "flapping",
            Self::SmallFrames => "small-frames",
            Self::Bulk => "bulk",
            Self::DisksNics => "disks-nics",
        }
    }

    /// Whether VMs need network devices for it.
    #[must_use]
    pub const fn has_nics(self) -> bool {
        matches!(self, Self::SmallFrames | Self::Bulk | Self::DisksNics)
    }

    /// Whether its load is the same from its start to its end, so that there is a steady state.
    #[must_use]
    pub const fn is_steady(self) -> bool {
        !matches!(self, Self::Bursts | Self::Hotplug | Self::Flapping)
    }
}

impl std::str::FromStr for PhaseKind {
    type Err = ScenarioError;

    fn from_str(name: &str) -> Result<Self, ScenarioError> {
        let mut all = Self::DISKS.into_iter().chain(Self::NETWORK);
        let known = all.find(|kind| kind.name() == name);
        known.ok_or_else(|| ScenarioError::UnknownPhase(name.chars().take(32).collect()))
    }
}

impl std::fmt::Display for PhaseKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// From `start` on, before `stop`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Span {
    /// First ns.
    pub start: Nanos,
    /// First ns that is not.
    pub stop: Nanos,
}

impl Span {
    /// How long.
    #[must_use]
    pub const fn length(&self) -> Nanos {
        self.stop.saturating_sub(self.start)
    }
}

/// How requests come.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Load {
    /// So many are in flight, 1 to [`MAX_DEPTH`]: the end of one starts another.
    Depth(u16),
    /// So many a second, at random times (Poisson); latencies are from those times on, even if the
    /// ring is full.
    Rate(Iops),
}

/// What goes through a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Requests to a disk.
    Disk,
    /// Frames to the VM, which come by themselves.
    Receive,
    /// Frames from the VM.
    Transmit,
}

/// Requests of one queue, or frames.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stream {
    /// The VM's queue, from 0: first those of its disk, then two for each pair of its network devices, to the VM and from it.
    pub queue: u16,
    /// When.
    pub span: Span,
    /// Size of a request, 512 B to [`MAX_BLOCK`], or of a frame, of [`FRAME`].
    pub block: Bytes,
    /// How many.
    pub load: Load,
}

/// A thread of a VM that computes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Burner {
    /// When.
    pub span: Span,
    /// Part of a CPU that it wants, above 0 to 1: of every 10 ms so much, then it sleeps.
    pub share: f64,
}

/// What a VM does.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Vm {
    /// Queues of its disk, 1 to [`MAX_QUEUES`].
    pub queues: u16,
    /// Pairs of queues of its network devices, at most [`MAX_PAIRS`].
    #[serde(default)]
    pub pairs: u16,
    /// When its devices are there, ascending. Its streams lie within.
    pub plugged: Vec<Span>,
    /// Its requests.
    pub streams: Vec<Stream>,
    /// Its compute threads.
    pub burners: Vec<Burner>,
}

/// What is asked of a stretch of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Phase {
    /// What.
    pub kind: PhaseKind,
    /// When.
    pub span: Span,
}

/// All of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// Seeds what a player draws: times of requests, service times.
    pub seed: u64,
    /// One after the other, from 0.
    pub phases: Vec<Phase>,
    /// The VMs.
    pub vms: Vec<Vm>,
}

/// How large a scenario is made.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Size {
    /// VMs, 1 to [`MAX_VMS`].
    pub vms: u16,
    /// Queues of each, 1 to [`MAX_QUEUES`].
    pub queues: u16,
    /// Requests in flight of a full queue, 1 to [`MAX_DEPTH`].
    pub depth: u16,
    /// Requests a second of a VM that is neither full nor idle.
    pub rate: Iops,
    /// CPUs that all VMs together want in [`PhaseKind::Compute`]; a quarter of it elsewhere. Finite, 0
    /// to 10,000.
    pub compute: f64,
}

/// Why a scenario is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ScenarioError {
    /// A name that no phase has.
    #[error(
        "no phase is called {0:?}: idle, one-hot, all-hot, small-large, compute, mixed, bursts, \
         hotplug, flapping, small-frames, bulk or disks-nics"
    )]
    UnknownPhase(String),
    /// A number is out of its range, or a time before an earlier one.
    #[error("{0} is out of range")]
    OutOfRange(&'static str),
    /// A stream of a queue that the VM does not have, or while its disk is not there.
    #[error("VM {0}: a stream has no queue")]
    NoQueue(usize),
    /// A queue has two streams at once.
    #[error("VM {0}: two streams of queue {1} overlap")]
    Overlap(usize, u16),
}

const fn within(is_within: bool, what: &'static str) -> Result<(), ScenarioError> {
    if is_within { Ok(()) } else { Err(ScenarioError::OutOfRange(what)) }
}

impl Scenario {
    /// When the last phase ends.
    #[must_use]
    pub fn length(&self) -> Nanos {
        self.phases.last().map_or(Nanos::ZERO, |phase| phase.span.stop)
    }

    /// Whether it can be played.
    ///
    /// # Errors
    /// The first thing that it cannot.
    pub fn check(&self) -> Result<(), ScenarioError> {
        let mut at = Nanos::ZERO;
        for phase in &self.phases {
            within(phase.span.start == at && phase.span.stop > at, "a phase's time")?;
            at = phase.span.stop;
        }
        within(at > Nanos::ZERO && at <= MAX_LENGTH, "the length")?;
        within((1..=MAX_VMS).contains(&self.vms.len()), "the number of VMs")?;
        for (vm, of) in self.vms.iter().enumerate() {
            of.check(vm)?;
        }
        Ok(())
    }
}

impl Vm {
    /// Queues in all.
    #[must_use]
    pub const fn all_queues(&self) -> u16 {
        self.queues + 2 * self.pairs
    }

    /// What goes through one.
    #[must_use]
    pub const fn role(&self, queue: u16) -> Role {
        match queue.checked_sub(self.queues) {
            None => Role::Disk,
            Some(of_nics) if of_nics.is_multiple_of(2) => Role::Receive,
            Some(_) => Role::Transmit,
        }
    }

    fn check(&self, vm: usize) -> Result<(), ScenarioError> {
        within((1..=MAX_QUEUES).contains(&self.queues), "the number of queues")?;
        within(self.pairs <= MAX_PAIRS, "the number of pairs of queues")?;
        let parts = [self.plugged.len(), self.streams.len(), self.burners.len()];
        within(parts.iter().all(|&parts| parts <= MAX_PARTS), "the number of streams")?;
        let mut at = Nanos::ZERO;
        for span in &self.plugged {
            within(span.start >= at && span.stop > span.start, "a disk's time")?;
            at = span.stop;
        }
        for burner in &self.burners {
            within(burner.span.stop > burner.span.start, "a compute thread's time")?;
            within(burner.share > 0.0 && burner.share <= 1.0, "a compute thread's share")?;
        }
        let mut streams: Vec<&Stream> = self.streams.iter().collect();
        streams.sort_by_key(|stream| (stream.queue, stream.span.start));
        for stream in &streams {
            let span = stream.span;
            within(span.stop > span.start, "a stream's time")?;
            let sizes = match self.role(stream.queue) {
                Role::Disk => 512..=MAX_BLOCK.get(),
                Role::Receive | Role::Transmit => FRAME,
            };
            within(sizes.contains(&stream.block.get()), "a block size")?;
            if let Load::Depth(depth) = stream.load {
                within((1..=MAX_DEPTH).contains(&depth), "a depth")?;
            }
            let is_within =
                |plugged: &Span| plugged.start <= span.start && span.stop <= plugged.stop;
            // Ascending: only the last one that begins no later can hold it.
            let plugged = self.plugged.partition_point(|plugged| plugged.start <= span.start);
            let holds = plugged.checked_sub(1).is_some_and(|at| is_within(&self.plugged[at]));
            if stream.queue >= self.all_queues() || !holds {
                return Err(ScenarioError::NoQueue(vm));
            }
        }
        for pair in streams.windows(2) {
            if pair[0].queue == pair[1].queue && pair[1].span.start < pair[0].span.stop {
                return Err(ScenarioError::Overlap(vm, pair[0].queue));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
