//! How iocost is tried: beside one VM to four, since what a request waits for grows with what the VMs use.
//!
//! iocost scales what it lets through so that 99 % of reads and of writes end within a latency each. Reads are what VMs wait for, and their
//! latencies show first that too much was let through; writes of a deep queue take longer whatever is done. On the reference device, beside
//! four VMs of L, M and H and a deep writer, 2 ms for both had tails of 23 ms and left the writer 140 MB/s; 1 ms for both 1.2 ms and
//! 20; 1 ms for reads and 2 ms for writes had 8 to 17 ms and 120 to 135. Beside two VMs that had 1.6 ms and left 200 (single windows of 8 s).
//!
//! So the latency of reads decides, and there is a step: where writes have 2 ms, up to 2.5 times the mean response (0.8 ms) four VMs had
//! tails below 2 ms and the writer 66 to 97 MB/s; from 2.7 times on tails are now 1.4 ms and now 8, and at 3 times 16 to 19; at twice the
//! mean the writer is left 10 to 67 MB/s (windows of 5 s). Each side of the step is a regime of its own, since its waits vary by their own law: a
//! plan takes the one that its targets allow.

use rtvirtio_spec::profile::{Capacity, Regime};
use rtvirtio_spec::settings::{IoCost, Scheduler};
use rtvirtio_units::Nanos;

use super::{ProbeRun, ProbeSetting, Room, Writer, fit, lack};

/// Latencies by which iocost is tried, and beside how many VMs.
struct Trial {
    regime: Regime,
    /// What reads may take, times the mean response of 4 KiB.
    reads: f64,
    /// What writes may take, times the mean response of 128 KiB.
    writes: f64,
    vms: &'static [u8],
}

const TRIALS: [Trial; 2] = [
    Trial { regime: Regime::Controlled, reads: 3.0, writes: 4.0 / 3.0, vms: &[4, 2, 3, 1] },
    Trial { regime: Regime::ControlledTightly, reads: 2.5, writes: 4.0 / 3.0, vms: &[4, 1, 2] },
];
/// How often each is tried beside each number of VMs: each run is judged by a fit to the others.
const TIMES: usize = 3;

fn of(regime: Regime) -> Option<&'static Trial> {
    TRIALS.iter().find(|trial| trial.regime == regime)
}

/// How many probes a regime under iocost takes.
pub(super) fn probes(regime: Regime) -> usize {
    of(regime).map_or(0, |trial| TIMES * trial.vms.len())
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
            read_latency_us: times(capacity.response_4k.mean, self.reads),
            write_latency_us: times(capacity.response_128k.mean, self.writes),
            vrate: IoCost::ANY_SCALE,
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
