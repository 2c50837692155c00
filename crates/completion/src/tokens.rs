//! Spin tokens: at most as many threads spin as there are CPUs with nothing else to do.
//!
//! One count for all threads of a process that may run on the same CPUs. How many CPUs are idle is
//! estimated by whoever asks, once a millisecond at most and with less than half a per cent of a CPU;
//! the others go on with what is known, and nobody waits for anybody.
//!
//! Where the estimate comes from, and what each source can and cannot see:
//!
//! | source | sees | does not see |
//! | --- | --- | --- |
//! | tasks that run or could (`/proc/loadavg`), at 1 ms, averaged over about 4 | a load that comes or goes, of all processes and users, within 5 ms; other processes' spinners, as work | on which CPUs the tasks may run: those of other cpusets count too. What the hypervisor takes |
//! | idle time of the allowed CPUs (`/proc/stat`), over 20 to 30 ms | only CPUs that this process may use, and so not other cpusets | anything faster: it is counted in steps of 10 ms; costs 5 times as much, more on large hosts |
//! | run delay of the thread (`schedstat`), each 2 ms ([`crate::Gate`]) | that this very thread waited for a CPU | idle CPUs; whom it delays |
//! | gaps between two looks ([`crate::Gate`]) | at once that another task, or the hypervisor, had the CPU | a competitor that waits its turn |
//! | the cgroup's quota and usage (`cpu.max`, `cpu.stat`), each 10 ms | that idle CPUs may not be used, or would be throttled for it | who in the group uses it |
//!
//! The first is used where the process may use all CPUs; it is right for the present. Where it may
//! not, tasks elsewhere count as well, so the first is only a lower bound of the idle CPUs, and the
//! second is asked beside it: the larger is right. Not used: `/proc/schedstat` and cpuidle's
//! residencies, which are written when a task or an idle state ends, so that a CPU which computes
//! without a break looks idle; pressure stall information, whose sums change each 2 s; the load
//! average itself, which takes a minute.
//!
//! A thread that asks is counted by the kernel as running, and so is one that spins: neither is work.
//! Nor is what the thread that asks computes between its waits, which a spinner that looks finds
//! running now and then: else two threads on two idle CPUs would hold each other off.
//!
//! After fork(2) the child begins anew ([`Tokens::renew`]): its parent's threads, some with tokens, are not there.

mod idle;
mod quota;

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering::Relaxed};

use rtvirtio_units::CpuId;

use crate::clock::now;
use idle::Machine;

/// Part of the word that counts spinners.
const COUNT: u64 = 0xffff;
/// The rest of it counts what they have spun, in this many ns: it wraps after 200 days.
const UNIT_NS: u64 = 64;
/// A spinner that goes on accounts for its time so often, ns.
const ACCOUNT_NS: u64 = 1_000_000;
/// Parts of a CPU in which idle ones are counted.
const PARTS: f64 = 256.0;
/// An estimate older than this is none, ns: who was to renew it has no CPU.
const STALE_NS: u64 = 20_000_000;
/// One part in so many of the time is spent on estimates.
const LOOK_PART: u64 = 200;
/// How often there is a new one, ns.
const MIN_EVERY: u64 = 1_000_000;
const MAX_EVERY: u64 = 10_000_000;

/// Its own cache line, so that who reads does not wait for those who write next to it.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Line<T>(T);

/// What was seen last.
#[derive(Debug)]
struct Seen {
    /// When, ns; 0: never.
    at: AtomicU64,
    /// CPUs that spinners may have, in [`PARTS`]; less than none where more runs than there are.
    idle: AtomicI32,
    /// Whether it was a spinner that looked: it took all for work that does not spin.
    by_spinner: AtomicBool,
    /// How long that is good for, ns.
    every: AtomicU64,
}

/// Spin tokens of the threads that may run on the same CPUs.
#[derive(Debug)]
pub struct Tokens {
    /// Spinners, and above [`COUNT`] what they have spun.
    spinners: Line<AtomicU64>,
    seen: Line<Seen>,
    machine: Mutex<Machine>,
    apart: bool,
}

impl Tokens {
    /// Of the CPUs on which the calling thread may run now, and its cgroup's quota.
    ///
    /// # Errors
    /// There is no `/proc`: who cannot know whether CPUs are idle should not spin.
    pub fn new() -> std::io::Result<Self> {
        Self::on(&allowed_cpus()?)
    }

    /// As [`Tokens::new`], for a library in somebody else's program: what is kept open lies under high
    /// numbers, and may be closed or replaced by the program, after which there are no tokens. To be made
    /// while the program has one thread, which gets the lowest free number for a moment.
    ///
    /// # Errors
    /// As [`Tokens::new`].
    pub fn apart() -> std::io::Result<Self> {
        Ok(Self::with(Machine::open(Path::new("/"), &allowed_cpus()?, true)?, true))
    }

    /// For the one thread of a forked child: the tokens begin anew, in the memory that it has from its parent. Nothing is
    /// allocated: a signal handler may have forked in the middle of an allocation. `false`: a thread of the parent was
    /// looking, so they cannot be used here.
    #[must_use]
    pub fn renew(&self) -> bool {
        let Ok(mut machine) = self.machine.try_lock() else { return false };
        machine.forget();
        // Those who had tokens are not here.
        self.spinners.0.store(0, Relaxed);
        let seen = &self.seen.0;
        seen.at.store(0, Relaxed);
        seen.idle.store(0, Relaxed);
        seen.by_spinner.store(false, Relaxed);
        seen.every.store(MIN_EVERY, Relaxed);
        true
    }

    /// Of these CPUs, and the cgroup's quota: for threads that are going to be pinned there.
    ///
    /// # Errors
    /// As [`Tokens::new`].
    pub fn on(cpus: &[CpuId]) -> std::io::Result<Self> {
        Self::under(Path::new("/"), cpus)
    }

    /// Reads `proc` and `sys` below `root`.
    fn under(root: &Path, cpus: &[CpuId]) -> std::io::Result<Self> {
        Ok(Self::with(Machine::open(root, cpus, false)?, false))
    }

    fn with(machine: Machine, apart: bool) -> Self {
        let seen = Seen {
            at: AtomicU64::new(0),
            idle: AtomicI32::new(0),
            by_spinner: AtomicBool::new(false),
            every: AtomicU64::new(MIN_EVERY),
        };
        Self { spinners: Line::default(), seen: Line(seen), machine: Mutex::new(machine), apart }
    }

    /// Whether descriptors are somebody else's.
    pub(crate) const fn is_apart(&self) -> bool {
        self.apart
    }

    /// Spinners now, for who watches.
    #[must_use]
    pub fn spinners(&self) -> u32 {
        (self.spinners.0.load(Relaxed) & COUNT) as u32
    }

    /// CPUs that spinners may have, as was seen last, for who watches.
    #[must_use]
    pub fn idle_cpus(&self) -> u32 {
        whole(self.seen.0.idle.load(Relaxed).into())
    }

    /// Takes a token; whether there was one. `work`: CPUs that the caller takes besides spinning.
    pub(crate) fn take(&self, now: u64, work: f64) -> bool {
        let idle = self.idle(now, false, work);
        // Without a write where there is none.
        if self.spinners() >= idle {
            return false;
        }
        let before = self.spinners.0.fetch_add(1, Relaxed) & COUNT;
        let taken = before < u64::from(idle);
        if !taken {
            self.spinners.0.fetch_sub(1, Relaxed);
        }
        taken
    }

    /// Whether who has a token may keep it.
    pub(crate) fn keeps(&self, now: u64) -> bool {
        self.idle(now, true, 0.0) >= self.spinners()
    }

    /// Accounts for what was spun with a token that is kept, if it is worth a write.
    pub(crate) fn account(&self, spun: u64) -> bool {
        let worth = spun >= ACCOUNT_NS;
        if worth {
            self.spinners.0.fetch_add(spun / UNIT_NS * (COUNT + 1), Relaxed);
        }
        worth
    }

    /// Gives a token back, and accounts for the time since it was taken or last accounted for.
    pub(crate) fn give(&self, spun: u64) {
        self.spinners.0.fetch_add((spun / UNIT_NS * (COUNT + 1)).wrapping_sub(1), Relaxed);
    }

    /// CPUs that spinners may have. `counted`: the caller is one of the spinners; `work`: CPUs that it
    /// takes besides.
    fn idle(&self, at: u64, counted: bool, work: f64) -> u32 {
        let seen = &self.seen.0;
        if at.saturating_sub(seen.at.load(Relaxed)) >= seen.every.load(Relaxed) {
            self.look(at, counted);
        }
        match at.saturating_sub(seen.at.load(Relaxed)) {
            ..STALE_NS => {
                let work = if seen.by_spinner.load(Relaxed) { work * PARTS } else { 0.0 };
                whole(f64::from(seen.idle.load(Relaxed)) + work)
            }
            _ => 0,
        }
    }

    /// Renews the estimate, unless somebody is at it.
    fn look(&self, at: u64, counted: bool) {
        let Ok(mut machine) = self.machine.try_lock() else { return };
        let seen = &self.seen.0;
        if at.saturating_sub(seen.at.load(Relaxed)) < seen.every.load(Relaxed) {
            return;
        }
        let word = self.spinners.0.load(Relaxed);
        let spinners = (word & COUNT) as u32;
        // Of those that run, these are not work.
        let ours = spinners + u32::from(!counted);
        let spun = word / (COUNT + 1) * UNIT_NS;
        let began = now();
        let idle = machine.idle(at, ours, spun);
        seen.idle.store((idle * PARTS) as i32, Relaxed);
        seen.by_spinner.store(counted, Relaxed);
        seen.at.store(at, Relaxed);
        let every = now().saturating_sub(began).saturating_mul(LOOK_PART);
        seen.every.store(every.clamp(MIN_EVERY, MAX_EVERY), Relaxed);
    }
}

/// To the nearest whole CPU: what else there is does not run all the time, nor do spinners.
fn whole(parts: f64) -> u32 {
    (parts / PARTS).round().max(0.0) as u32
}

/// CPUs on which the calling thread may run.
pub(crate) fn allowed_cpus() -> std::io::Result<Vec<CpuId>> {
    let set = rustix::thread::sched_getaffinity(None)?;
    let cpus = (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu));
    Ok(cpus.map(|cpu| CpuId::new(cpu as u32)).collect())
}

#[cfg(all(test, not(rtvirtio_loom)))]
mod tests;
