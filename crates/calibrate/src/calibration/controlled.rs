//! How iocost is tried: beside one VM to four, since what a request waits for grows with what the VMs use.
//!
//! iocost scales what it lets through so that 99 % of reads and of writes end within a latency each. Reads are what VMs wait for, and their
//! latencies show first that too much was let through; writes of a deep queue take longer whatever is done. On the reference device, beside
//! four VMs of L, M and H and a deep writer, 2 ms for both had tails of 23 ms and left the writer 140 MB/s; 1 ms for both 1.2 ms and
//! 20; 1 ms for reads and 2 ms for writes had 8 to 17 ms and 120 to 135. Beside two VMs that had 1.6 ms and left 200 (single windows of 8 s).
//!
//! What is longest is what was let through beyond what the device can do: the scale (`vrate`) rises as long as completions are in time, and
//! once too much is there, it takes iocost some 20 ms to notice. With the same latencies, beside four VMs, a scale of at most 100, 110 and
//! 120 % had tails of 4.4, 6.3 and 24 ms and left the writer 69, 124 and 138 MB/s; beside two VMs and one, 1.2 to 1.9 ms and 174 to 207
//! MB/s (single windows of 21 s). So it is tried with any scale and with one of at most 100 %. Each is a regime of its own, since its
//! waits vary by their own law, and a plan takes the one that its targets allow.
//!
//! Whether a probe of a few seconds meets the longest wait is chance: in one calibration nine probes with any scale had tails below 3 ms, and a
//! window of 21 s after it 16 ms. So no wait is taken for shorter than [`shortest_wait`], whatever was seen, and no run of shorter ones
//! makes a bound shorter.
//!
//! Shorter latencies are no way to shorter tails: with 2.5 times the mean response for reads, tails were below 2 ms in windows of 5 s, and
//! 20 ms in one of 21 s.

use rtvirtio_spec::profile::{Capacity, Regime};
use rtvirtio_spec::settings::{IoCost, Scheduler};
use rtvirtio_units::Nanos;

use super::{ProbeRun, ProbeSetting, Room, Writer, fit, lack};

/// How iocost is tried, and beside how many VMs.
struct Trial {
    regime: Regime,
    /// Of what the model says that the device can do: the least and the most that is let through, %.
    vrate: (u32, u32),
    /// Periods of iocost that a request is taken to wait for at least.
    periods: f64,
    vms: &'static [u8],
}

const TRIALS: [Trial; 2] = [
    Trial {
        regime: Regime::Controlled,
        vrate: IoCost::ANY_SCALE,
        // Until too much is noticed and has drained: 16 to 24 ms were seen, of 4 ms each.
        periods: 6.0,
        vms: &[4, 2, 3, 1],
    },
    Trial {
        regime: Regime::ControlledWithin,
        vrate: (IoCost::ANY_SCALE.0, 100),
        // What one lets through may all come first, and what of the one before is there still.
        periods: 1.5,
        vms: &[4, 1, 2],
    },
];
/// What reads may take, times the mean response of 4 KiB, and writes, times that of 128 KiB.
const READ_TIMES: f64 = 3.0;
const WRITE_TIMES: f64 = 4.0 / 3.0;
/// How often each is tried beside each number of VMs: each run is judged by a fit to the others.
const TIMES: usize = 3;

fn of(regime: Regime) -> Option<&'static Trial> {
    TRIALS.iter().find(|trial| trial.regime == regime)
}

/// How many probes a regime under iocost takes.
pub(super) fn probes(regime: Regime) -> usize {
    of(regime).map_or(0, |trial| TIMES * trial.vms.len())
}

/// The shortest wait that is taken for the longest under a setting. A period is twice the larger latency where that is one of 99 %
/// (`ioc_refresh_period_us` in block/blk-iocost.c).
pub(super) fn shortest_wait(setting: IoCost, regime: Regime) -> Nanos {
    let latency = Nanos::from_micros(setting.read_latency_us.max(setting.write_latency_us).into());
    of(regime).map_or(Nanos::ZERO, |trial| latency.scale(2.0 * trial.periods))
}

/// The regime that a setting was tried for; `None`: none of the device as it is known now.
pub(super) fn regime(setting: IoCost, capacity: &Capacity) -> Option<Regime> {
    TRIALS.iter().find(|trial| trial.setting(capacity) == setting).map(|trial| trial.regime)
}

impl Trial {
    /// iocost as it is tried.
    fn setting(&self, capacity: &Capacity) -> IoCost {
        let times =
            |mean: Nanos, times: f64| (mean.as_secs_f64() * 1e6 * times).round().max(1.0) as u32;
        IoCost {
            bps: capacity.write_throughput,
            iops: capacity.iops_4k as u64,
            read_latency_us: times(capacity.response_4k.mean, READ_TIMES),
            write_latency_us: times(capacity.response_128k.mean, WRITE_TIMES),
            vrate: self.vrate,
        }
    }
}

/// The next probe of a regime under iocost, for a bound that holds for so many tasks together; `None`: there are enough.
pub(super) fn next(
    (regime, together): (Regime, usize),
    room: &Room,
    runs: &[ProbeRun],
    capacity: &Capacity,
) -> Option<ProbeSetting> {
    if !room.has_iocost {
        return None;
    }
    let trial = of(regime)?;
    let scheduler = Scheduler::IoCost(trial.setting(capacity));
    let probes = trial.vms.iter().filter_map(|&vms| room.fit((scheduler, vms, Writer::Unlimited)));
    let of = |setting: &ProbeSetting| {
        let setting = *setting;
        runs.iter().filter(move |run| run.setting == setting)
    };
    // Beside VMs that did not come to their rates it is of no use, nor beside more.
    let starved = probes.clone().filter(|setting| !of(setting).all(ProbeRun::delivers));
    let starved = starved.map(|(_, vms, _)| vms).min().unwrap_or(u8::MAX);
    let of_use = probes.filter(|(_, vms, _)| *vms < starved);
    let rarest = of_use.min_by_key(|setting| of(setting).count())?;
    if of(&rarest).count() < TIMES {
        return Some(rarest);
    }
    let (tasks, vms) = fit::scores(runs, capacity, regime);
    lack(regime, &tasks, &vms, together).map(|_| rarest)
}
