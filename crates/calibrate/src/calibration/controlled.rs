//! Which settings of iocost are tried, and which are of use.
//!
//! iocost lets through what its model of the device says can be done, scaled (`vrate`), and gives those with targets
//! what they want of that. Two kinds of settings are of use:
//!
//! - One whose scale follows the device's completion latencies. It leaves a writer most of the device, and it
//!   takes tens of milliseconds to notice that it has let too much through.
//! - One whose scale is fixed just below what saturates the device. Tails are a few milliseconds, since nothing
//!   has to be noticed. Which scale that is depends on how much of the load is the writer's: a
//!   linear model is not the device. So it is looked for, beside four VMs, and from there downwards beside fewer.
//!
//! On the reference device, beside four VMs of L, M and H and a deep writer (`bench --vrates`): at 100, 110, 120 and 135 % tails of 5, 2.3,
//! 22 and 24 ms, the writer has 42, 108, 143 and 212 MB/s, and at 135 % tasks have 0.7 of their rates. Beside three, two VMs and one, tails
//! grow from 100, 90 and 80 % on.

use rtvirtio_spec::profile::{Capacity, Regime};
use rtvirtio_spec::settings::{IoCost, Scheduler};
use rtvirtio_units::Nanos;

use super::{ProbeRun, ProbeSetting, Room, Writer, fit, lack};

/// By which completion latency iocost is tried, µs. On the reference device 1 ms left the background
/// a quarter of what 2 ms did, and the tails no shorter.
const LATENCY_US: u32 = 2_000;
/// Of a fixed scale, on which latencies have no bearing but by iocost's period, twice as long: the less is let through at once.
const FIXED_LATENCY_US: u32 = 1_000;
/// The first scale that is tried, %, and by how much it is changed.
const FIRST_VRATE: u32 = 110;
const VRATE_STEP: u32 = 10;
/// Within these it is looked for.
const VRATES: std::ops::RangeInclusive<u32> = 30..=200;
/// A tail is short if it is no longer than so many times the device's own p99.9 of the writer's requests: then they wait
/// for one of them, and not for a queue.
const SHORT: u32 = 2;
/// How often a setting is tried that is of use: each run is judged by a fit to the others, and one that is too near to what
/// saturates the device does not do three times.
const TIMES: usize = 3;

/// iocost by the device's latencies.
fn by_latency(capacity: &Capacity) -> IoCost {
    IoCost {
        bps: capacity.write_throughput,
        iops: capacity.iops_4k as u64,
        latency_us: LATENCY_US,
        vrate: IoCost::ANY_SCALE,
    }
}

/// iocost at a fixed scale, %.
fn fixed(capacity: &Capacity, vrate: u32) -> IoCost {
    IoCost { latency_us: FIXED_LATENCY_US, vrate: (vrate, vrate), ..by_latency(capacity) }
}

/// Whether a run under iocost shows its setting to be of use.
pub(super) fn is_kept(run: &ProbeRun, capacity: &Capacity) -> bool {
    let (Scheduler::IoCost(setting), ..) = run.setting else { return false };
    if !run.delivers() {
        return false;
    }
    let short = Nanos::new(capacity.response_128k.p999.get() * u64::from(SHORT));
    setting.vrate == IoCost::ANY_SCALE || fit::tails(run).all(|tail| tail <= short)
}

/// What became of a setting; `None`: it has not been tried.
fn was_kept(setting: &ProbeSetting, runs: &[ProbeRun], capacity: &Capacity) -> Option<bool> {
    let mut of = runs.iter().filter(|run| run.setting == *setting).peekable();
    of.peek()?;
    Some(of.all(|run| is_kept(run, capacity)))
}

/// The next probe, for a bound that holds for so many tasks together; `None`: there are enough.
pub(super) fn next(
    together: usize,
    room: &Room,
    runs: &[ProbeRun],
    capacity: &Capacity,
) -> Option<ProbeSetting> {
    if !room.has_iocost {
        return None;
    }
    let probe = |cost, vms| room.fit((Scheduler::IoCost(cost), vms, Writer::Unlimited));
    let mut of_use = Vec::new();
    let mut vrate = FIRST_VRATE;
    for vms in (1..=4).rev() {
        let at = |vrate| probe(fixed(capacity, vrate), vms);
        let kept = |vrate| was_kept(&at(vrate)?, runs, capacity);
        if vms == 4 {
            // Upwards, as long as that is of use.
            while VRATES.contains(&(vrate + VRATE_STEP)) && kept(vrate) == Some(true) {
                vrate += VRATE_STEP;
            }
        }
        while VRATES.contains(&vrate) && kept(vrate) == Some(false) {
            vrate -= VRATE_STEP;
        }
        if !VRATES.contains(&vrate) {
            break;
        }
        let setting = at(vrate)?;
        if kept(vrate).is_none() {
            return Some(setting);
        }
        of_use.push(setting);
    }
    let follows = [4, 2].map(|vms| probe(by_latency(capacity), vms));
    let follows: Vec<ProbeSetting> = follows.into_iter().flatten().collect();
    if follows.iter().all(|setting| was_kept(setting, runs, capacity) != Some(false)) {
        of_use.extend(follows);
    }
    let times = |setting: &ProbeSetting| runs.iter().filter(|r| r.setting == *setting).count();
    let rarest = of_use.into_iter().min_by_key(|setting| times(setting))?;
    if times(&rarest) < TIMES {
        return Some(rarest);
    }
    let (tasks, vms) = fit::scores(runs, capacity, Regime::Controlled);
    lack(Regime::Controlled, &tasks, &vms, together).map(|_| rarest)
}
