//! How many IOThreads there are, and which virtqueue goes where.
//!
//! A [`Policy`] is shown a [`Snapshot`] every 10 ms ([`SAMPLE`]) and answers with what is to be
//! done, and why. It has no thread, clock or machine of its own: the data plane's monitor and the
//! simulator both show it what they have, and do what it says. [`policy`] makes one of each
//! [`Kind`].
//!
//! # Units
//! A load is a share of one IOThread's time; progress and idle time are in CPUs: 1.0 is one all the
//! time. What a number of I/O cores is worth is one figure: [`utility`].
//!
//! # Terms
//! An *I/O core* is a CPU with an IOThread. *Borrowing* takes a CPU from the VMs' vCPUs for an
//! IOThread ([`Action::SetVcpuCpus`]) and gives it back after that. A *locked* IOThread is an
//! operator's.
//!
//! # Properties (tests of the same name)
//! Of every policy, whatever it is shown (counters that jump, clocks that stand still, ids that
//! vanish, thousands of queues):
//! - `decisions_refer_only_to_what_exists`: IOThreads, queues and CPUs of that very snapshot;
//!   locked IOThreads are left alone; there are never fewer than [`Limits::min_iothreads`] nor more than
//!   [`Limits::max_iothreads`]; a CPU of the vCPUs is only used by leave.
//! - `same_snapshots_same_decisions`.
//!
//! Of [`Kind::Dynamic`]:
//! - `moves_and_dwell_are_bounded`: a queue moves every 200 ms at most; 10 at once and 50 a second
//!   in all, where more than 4 IOThreads are allowed so much for every 4; the number of IOThreads
//!   rests for 200 ms after an addition, and is not lowered for 1 s after a removal.
//! - `converges_to_the_best_static_and_stays`: within 500 ms of a change of load, to within 5 %.
//! - `trace_of_loads_is_worth_more_than_under_any_static_or_published_policy`,
//!   `two_cores_shared_with_vcpus_are_worth_as_much_as_under_the_best_policy`.
//! - `large_host_has_its_iothreads_within_500_ms`.
//! - `flapping_load_is_not_chased`: fewer than 10 moves in any second.
//! - `needless_core_is_given_back_within_2500_ms`.
//! - `queue_that_fills_an_iothread_gets_no_second`.
//! - `action_that_harms_is_reverted_and_not_tried_again_soon`.
//! - `cpu_of_vcpus_is_taken_only_by_leave_and_given_back`, `cpu_that_vcpus_need_is_not_taken`,
//!   `iothread_that_waits_for_vcpus_gets_its_cpu_if_they_have_room_elsewhere`.
//! - `drivers_go_to_the_cpus_of_their_iothreads`, `vcpus_in_the_way_of_one_iothread_are_spread_and_not_soon_again`.

mod drivers;
mod dynamic;
mod fixed;
mod iocm;
mod kind;
mod place;
mod sample;
mod spdk;
pub mod utility;

#[cfg(test)]
mod tests;

use rtvirtio_units::{CpuId, Nanos};

pub use kind::{Kind, UnknownKind, policy};

/// How often a policy is shown a snapshot.
pub const SAMPLE: Nanos = Nanos::from_millis(10);

/// Every so many snapshots have the kernel's times anew ([`Snapshot::measured`]): they are dear to
/// read, and a CPU's idle time is counted in steps of 10 ms.
pub const REFRESH: u64 = 10;

/// An IOThread. The caller's number: not used again for another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ThreadId(pub u32);

/// A virtqueue that is served. The caller's number: not used again for another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QueueId(pub u32);

/// A VM. The caller's number: not used again for another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VmId(pub u32);

/// A vCPU's thread. The caller's number: not used again for another one soon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VcpuId(pub u32);

/// Everything at one time. Times and counts are sums since each one's start, and never fall.
#[derive(Debug, Default, PartialEq)]
pub struct Snapshot {
    /// When it was taken.
    pub now: Nanos,
    /// When the kernel's times were read, then or earlier: those of VMs and CPUs, and what
    /// IOThreads ran and waited.
    pub measured: Nanos,
    /// By id.
    pub threads: Vec<Thread>,
    /// By id.
    pub queues: Vec<Queue>,
    /// VMs of which the vCPUs are known, by id.
    pub vms: Vec<Vm>,
    /// Threads of these VMs' vCPUs, by id; as measured.
    pub vcpus: Vec<Vcpu>,
    /// CPUs of the host, by id.
    pub cpus: Vec<Cpu>,
}

impl Clone for Snapshot {
    fn clone(&self) -> Self {
        let mut snapshot = Self::default();
        snapshot.clone_from(self);
        snapshot
    }

    /// Without an allocation, if this one was as large before.
    fn clone_from(&mut self, other: &Self) {
        let Self { now, measured, threads, queues, vms, vcpus, cpus } = other;
        (self.now, self.measured) = (*now, *measured);
        self.threads.clone_from(threads);
        self.queues.clone_from(queues);
        self.vms.clone_from(vms);
        self.vcpus.clone_from(vcpus);
        self.cpus.clone_from(cpus);
    }
}

/// An IOThread.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Thread {
    /// Which.
    pub id: ThreadId,
    /// Where it runs; none: anywhere.
    pub cpu: Option<CpuId>,
    /// An operator's word: it is not removed, and gets and loses no queue.
    pub locked: bool,
    /// In turns with work.
    pub busy: Nanos,
    /// Polling in vain.
    pub poll: Nanos,
    /// Asleep.
    pub sleep: Nanos,
    /// On a CPU, as the kernel counts it.
    pub ran: Nanos,
    /// Ready, but not on a CPU (schedstat).
    pub waited: Nanos,
}

/// What passes through a virtqueue: what counts as how much work ([`utility::work`]).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum QueueKind {
    /// Requests to a disk.
    #[default]
    Disk,
    /// Frames to or from the host, a system call each: by a TAP or a socket.
    Link,
    /// Frames of a switch, which are copied from guest to guest.
    Switch,
}

impl QueueKind {
    /// All.
    pub const ALL: [Self; 3] = [Self::Disk, Self::Link, Self::Switch];
}

/// A virtqueue.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Queue {
    /// Which.
    pub id: QueueId,
    /// What passes through it. A frame counts as a request.
    pub kind: QueueKind,
    /// Whose.
    pub vm: VmId,
    /// Who serves it.
    pub thread: ThreadId,
    /// Of its IOThread's `busy`, and that of earlier ones, what was for it.
    pub busy: Nanos,
    /// Requests that have ended.
    pub requests: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Sum of what requests waited for between the kick or poll that found them and their start.
    pub waited: Nanos,
    /// How often its driver was called.
    pub calls: u64,
    /// Taken and not ended.
    pub in_flight: u32,
    /// What its driver, or its link, had for it at the last snapshot is still not taken. Buffers that wait for frames are
    /// none of it.
    pub backlogged: bool,
}

impl Queue {
    /// One of a disk that has done nothing yet.
    #[must_use]
    pub const fn new(id: QueueId, vm: VmId, thread: ThreadId) -> Self {
        Self {
            id,
            kind: QueueKind::Disk,
            vm,
            thread,
            busy: Nanos::ZERO,
            requests: 0,
            bytes: 0,
            waited: Nanos::ZERO,
            calls: 0,
            in_flight: 0,
            backlogged: false,
        }
    }
}

/// What a VM computes: sums over its vCPUs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Vm {
    /// Which.
    pub id: VmId,
    /// On a CPU.
    pub ran: Nanos,
    /// Ready, but not on a CPU.
    pub waited: Nanos,
    /// Of [`ran`](Self::ran), what those had that never slept meanwhile.
    pub awake_ran: Nanos,
    /// Of [`waited`](Self::waited), what those had that never slept meanwhile. They could have computed more in that
    /// time. One that sleeps has done what it had to do: while it waits for I/O it waits for a CPU too each time a
    /// request ends, and computes no more for having one sooner.
    pub awake_waited: Nanos,
}

/// Part of a time that a vCPU was ready or ran, from which on it counts as one that never slept.
const AWAKE: f64 = 0.9;

impl Vm {
    /// One that had nothing yet.
    #[must_use]
    pub const fn new(id: VmId) -> Self {
        let none = Nanos::ZERO;
        Self { id, ran: none, waited: none, awake_ran: none, awake_waited: none }
    }

    /// Counts what one of its vCPUs had while so much time `passed`.
    pub fn add(&mut self, ran: Nanos, waited: Nanos, passed: Nanos) {
        let awake = ran.saturating_add(waited).as_secs_f64();
        self.ran = self.ran.saturating_add(ran);
        self.waited = self.waited.saturating_add(waited);
        if awake >= AWAKE * passed.as_secs_f64() {
            self.awake_ran = self.awake_ran.saturating_add(ran);
            self.awake_waited = self.awake_waited.saturating_add(waited);
        }
    }
}

/// A vCPU's thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vcpu {
    /// Which.
    pub id: VcpuId,
    /// Where it was last; none: it got a CPU seldom lately, and was not looked at.
    pub cpu: Option<CpuId>,
    /// How often it got a CPU.
    pub turns: u64,
}

/// A CPU of the host.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cpu {
    /// Which.
    pub id: CpuId,
    /// Idle.
    pub idle: Nanos,
    /// Whether vCPUs may run there.
    pub vcpus: bool,
}

/// What a policy must keep to.
#[derive(Debug, Clone, PartialEq)]
pub struct Limits {
    /// Where IOThreads may run, in the order in which they are taken; one IOThread each.
    pub cpus: Vec<CpuId>,
    /// Fewest IOThreads, 1 or more.
    pub min_iothreads: usize,
    /// Most IOThreads, no more than `cpus`.
    pub max_iothreads: usize,
    /// Whether vCPUs and IOThreads have their CPUs in common: one may be taken from vCPUs for an
    /// IOThread, and these of `cpus` are vCPUs' too while I/O does not need them.
    pub borrow: bool,
}

/// Something to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// A further IOThread, which gets these queues.
    AddThread {
        /// Where it runs.
        cpu: CpuId,
        /// What it gets.
        queues: Vec<QueueId>,
    },
    /// An IOThread ends, once its queues have gone.
    RemoveThread {
        /// Which.
        thread: ThreadId,
        /// Where each of its queues goes.
        moves: Vec<(QueueId, ThreadId)>,
    },
    /// A queue goes to another IOThread.
    MoveQueue {
        /// Which.
        queue: QueueId,
        /// Where.
        to: ThreadId,
    },
    /// vCPUs of all VMs run on these CPUs alone.
    SetVcpuCpus {
        /// Which; ascending.
        cpus: Vec<CpuId>,
    },
    /// vCPUs go to CPUs, if they may run there: once, they may leave them again.
    PlaceVcpus {
        /// Which, and where to; ascending.
        at: Vec<(VcpuId, CpuId)>,
    },
}

/// An action, and why.
#[derive(Debug, Clone, PartialEq)]
pub struct Decision {
    /// What is to be done.
    pub action: Action,
    /// Why, for an operator: with the figures that led to it.
    pub reason: String,
}

/// Decides. The same snapshots give the same decisions.
pub trait Policy {
    /// What is to be done now. Usually nothing. The caller does it before the next snapshot; what
    /// could not be done is seen there.
    fn step(&mut self, snapshot: &Snapshot) -> Vec<Decision>;
}
