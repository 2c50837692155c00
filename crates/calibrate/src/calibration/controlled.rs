//! How iocost is tried: beside one VM to four, since what a request waits for grows with what the VMs use.
//!
//! iocost scales what it lets through so that 99 % of reads and of writes end within a latency each. Reads are what VMs wait for, and their
//! latencies show first that too much was let through; writes of a deep queue take longer whatever is done. On the reference device, beside
//! four VMs of L, M and H and a deep writer, 2 ms for both had tails of 23 ms and left the writer 140 MB/s; 1 ms for both 1.2 ms and
//! 20; 1 ms for reads and 2 ms for writes had 8 to 17 ms and 120 to 135. Beside two VMs that had 1.6 ms and left 200 (single windows of 8 s).

use rtvirtio_spec::profile::{Capacity, Regime};
use rtvirtio_spec::settings::{IoCost, Scheduler};
use rtvirtio_units::Nanos;

use super::{ProbeRun, ProbeSetting, Room, Writer, fit, lack};

/// The latencies by which iocost is tried: times the mean response of 4 KiB for reads, of 128 KiB for writes.
const READ_TIMES: f64 = 3.0;
const WRITE_TIMES: f64 = 4.0 / 3.0;
/// How often it is tried beside each number of VMs: each run is judged by a fit to the others.
const TIMES: usize = 3;

/// iocost as it is tried.
fn setting(capacity: &Capacity) -> IoCost {
    let times =
        |mean: Nanos, times: f64| (mean.as_secs_f64() * 1e6 * times).round().max(1.0) as u32;
    IoCost {
        bps: capacity.write_throughput,
        iops: capacity.iops_4k as u64,
        read_latency_us: times(capacity.response_4k.mean, READ_TIMES),
        write_latency_us: times(capacity.response_128k.mean, WRITE_TIMES),
        vrate: IoCost::ANY_SCALE,
    }
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
    let scheduler = Scheduler::IoCost(setting(capacity));
    let probes = [4, 2, 3, 1].into_iter();
    let probes = probes.filter_map(|vms| room.fit((scheduler, vms, Writer::Unlimited)));
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
    let (tasks, vms) = fit::scores(runs, capacity, Regime::Controlled);
    lack(Regime::Controlled, &tasks, &vms, together).map(|_| rarest)
}
