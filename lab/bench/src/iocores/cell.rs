//! Cells: a policy on a seed's scenario, once; a line of JSON each.

use anyhow::{Result, bail, ensure};
use rtvirtio_iocores::utility::{self, Progress};
use rtvirtio_iocores::{Kind, QueueKind};
use rtvirtio_sim::scenario::{MAX_QUEUES, PhaseKind, Scenario, Size};
use rtvirtio_spec::run::{Canary, Machine};
use rtvirtio_testbed::client::MAX_DEPTH;
use rtvirtio_testbed::named;
use rtvirtio_testbed::scenario::Disk;
use rtvirtio_units::{Iops, Nanos};
use serde::{Deserialize, Serialize};

/// Seeds of scenarios, fixed before the first result: a change of one makes earlier results void.
pub(crate) const SEEDS: [u64; 3] = [20_261_201, 20_261_202, 20_261_203];
/// Most VMs of a trial.
pub(crate) const MAX_VMS: u16 = 16;
/// Length of a point of a timeline, s.
pub(crate) const POINT_S: f64 = 0.1;

named! {
    /// A policy, and with how many IOThreads it begins.
    pub enum PolicyConfig {
        /// One IOThread, whatever happens.
        Static1 = "static:1",
        /// Two, each queue of a disk on the next.
        Static2 = "static:2",
        /// rtvirtio's own.
        Dynamic = "dynamic",
        /// IOcm's, as published.
        Iocm = "iocm",
        /// SPDK's, as published.
        Spdk = "spdk",
    }
}

impl PolicyConfig {
    /// Those that change nothing.
    pub(crate) const STATIC: [Self; 2] = [Self::Static1, Self::Static2];

    /// The policy.
    #[must_use]
    pub const fn kind(self) -> Kind {
        match self {
            Self::Static1 | Self::Static2 => Kind::Static,
            Self::Dynamic => Kind::Dynamic,
            Self::Iocm => Kind::Iocm,
            Self::Spdk => Kind::Spdk,
        }
    }

    /// IOThreads at the start.
    #[must_use]
    pub const fn threads(self) -> u16 {
        match self {
            Self::Static2 => 2,
            _ => 1,
        }
    }
}

/// What all cells of a directory have in common.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, clap::Args)]
pub struct Settings {
    /// Phases, or all
    // The path tells clap that it is one value.
    #[arg(long, default_value = "all", value_parser = phases)]
    pub phases: ::std::vec::Vec<PhaseKind>,
    /// Length of a phase in seconds; with --disturb, how many are disturbed in each run, by turns with as many that are
    /// not [default: 20, or 10]
    #[arg(
        long,
        default_value = "20",
        default_value_if("disturb", "true", "10"),
        hide_default_value = true
    )]
    pub seconds: f64,
    /// VMs
    #[arg(long, default_value_t = 4)]
    pub vms: u16,
    /// Queues of each VM
    #[arg(long, default_value_t = 2)]
    pub queues: u16,
    /// Requests in flight of a full queue, 1 to 64
    #[arg(long, default_value_t = 16)]
    pub depth: u16,
    /// Requests a second of a VM that is neither full nor idle
    #[arg(long, default_value_t = 2_000.0)]
    pub rate: f64,
    /// CPUs that all VMs together want in the compute phase; a quarter of it elsewhere
    #[arg(long, default_value_t = 1.0)]
    pub compute: f64,
    /// Disks: null (memory: nothing but CPU time), or ref-4x250, ref-8x80, ref-stall for each VM
    #[arg(long, default_value = "null")]
    pub disk: Disk,
    /// CPU time of an IOThread for a request, on top of its own, us
    #[arg(long = "request-us", default_value_t = 20, value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    pub cpu_us: u32,
    /// And for each KiB of it, ns
    #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    pub kib_ns: u32,
}

/// Reads kinds of phases that can be played here, which are put in order.
fn phases(text: &str) -> Result<Vec<PhaseKind>> {
    let mut all = Vec::new();
    for name in text.split(',') {
        match name {
            "all" => all.extend(PhaseKind::DISKS),
            name => all.push(name.parse()?),
        }
    }
    if let Some(kind) = all.iter().find(|kind: &&PhaseKind| kind.has_nics()) {
        bail!("{kind}: this plays disks alone (rtvirtio-lab simulate plays network devices)");
    }
    all.sort_unstable();
    all.dedup();
    Ok(all)
}

impl Default for Settings {
    /// As `rtvirtio-lab simulate --cpus 2 --vms 4` has them.
    fn default() -> Self {
        Self {
            phases: PhaseKind::DISKS.to_vec(),
            seconds: 20.0,
            vms: 4,
            queues: 2,
            depth: 16,
            rate: 2_000.0,
            compute: 1.0,
            disk: Disk::Null,
            cpu_us: 20,
            kib_ns: 40,
        }
    }
}

impl Settings {
    /// The scenario of a seed.
    ///
    /// # Errors
    /// If a number is out of its range.
    pub fn scenario(&self, seed: u64) -> Result<Scenario> {
        let Self { seconds, vms, queues, depth, compute, .. } = *self;
        ensure!(!self.phases.is_empty(), "there is no phase: --phases");
        ensure!(
            (0.3..=3_600.0).contains(&seconds),
            "a phase of {seconds} s is outside 0.3 to 3600"
        );
        ensure!((1..=MAX_VMS).contains(&vms), "{vms} VMs are outside 1 to {MAX_VMS}");
        ensure!(
            (1..=MAX_QUEUES).contains(&queues),
            "{queues} queues are outside 1 to {MAX_QUEUES}"
        );
        let deepest = MAX_DEPTH as u16;
        ensure!((1..=deepest).contains(&depth), "a depth of {depth} is outside 1 to {deepest}");
        ensure!((0.0..=64.0).contains(&compute), "--compute is {compute}, outside 0 to 64");
        let mut kinds = self.phases.clone();
        PhaseKind::shuffle(&mut kinds, seed);
        let rate = Iops::new(self.rate)?;
        let size = Size { vms, queues, depth, rate, compute };
        Ok(Scenario::generate(&kinds, Nanos::from_secs_f64(seconds), &size, seed)?)
    }
}

/// Names a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct CellKey {
    /// The policy.
    pub policy: PolicyConfig,
    /// The scenario's.
    pub seed: u64,
    /// From 0.
    pub repetition: u32,
    /// The one phase of it; none: all of its campaign's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alone: Option<PhaseKind>,
}

impl CellKey {
    /// For people.
    #[must_use]
    pub fn label(&self) -> String {
        let alone = self.alone.map_or_else(String::new, |kind| format!(", {kind} alone"));
        format!("{}, seed {}{alone}", self.policy, self.seed)
    }
}

/// A cell.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Cell {
    /// Which.
    #[serde(flatten)]
    pub key: CellKey,
    /// Those of its campaign.
    pub settings: Settings,
    /// Why it failed: a request was lost, repeated or misplaced. Then it measured nothing.
    pub failed: Option<String>,
    /// Its phases in their order; none if it failed.
    pub phases: Vec<Phase>,
    /// All of them as one.
    pub whole: Option<Phase>,
    /// Sectors that were read and compared.
    pub checked: u64,
    /// Each 100 ms.
    pub timeline: Timeline,
    /// How late a sleeping thread woke.
    pub canary: Canary,
    /// Why the machine is in doubt, if it is.
    pub doubt: Option<String>,
    /// The machine meanwhile.
    pub machine: Machine,
    /// When it ran.
    pub at: String,
}

impl Cell {
    /// Whether it measured something.
    #[must_use]
    pub const fn is_good(&self) -> bool {
        self.failed.is_none()
    }

    /// A phase by its kind; none: all of a trace, which a phase alone is not.
    #[must_use]
    pub fn phase(&self, kind: Option<PhaseKind>) -> Option<&Phase> {
        match kind {
            None => self.whole.as_ref().filter(|_| self.key.alone.is_none()),
            Some(_) => self.phases.iter().find(|phase| phase.kind == kind),
        }
    }
}

/// Each 100 ms of a cell.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Timeline {
    /// Requests that ended.
    pub requests: Vec<u32>,
    /// IOThreads, mean.
    pub io_cores: Vec<f32>,
    /// Queues that went to another IOThread.
    pub moves: Vec<u32>,
}

/// When throughput came to rest in a phase.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Rest {
    /// The load itself changes, or is too small to tell.
    NotJudged,
    /// It did not.
    Never,
    /// So long after the phase began.
    AfterMs(f64),
}

/// What came of a phase. Times of CPUs are in CPUs: 1.0 is one all the time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Phase {
    /// Which; none: all.
    pub kind: Option<PhaseKind>,
    /// Its length.
    pub seconds: f64,
    /// Requests whose end clients have seen.
    pub requests: u64,
    /// Their bytes.
    pub bytes: u64,
    /// IOThreads that there were, mean: each has a core.
    pub io_cores: f64,
    /// IOThreads on a CPU.
    pub io_ran: f64,
    /// vCPUs on a CPU: clients and what computes.
    pub vcpus_ran: f64,
    /// vCPUs ready but not on a CPU.
    pub vcpus_waited: f64,
    /// What the VMs computed.
    pub computed: f64,
    /// What they would have computed alone on the host.
    pub compute_wanted: f64,
    /// Latencies as clients see them, µs.
    pub mean_us: f64,
    /// Half of them are no longer.
    pub p50_us: f64,
    /// 99 %.
    pub p99_us: f64,
    /// The 95 % interval of its rank.
    pub p99_interval_us: [f64; 2],
    /// 99.9 %.
    pub p999_us: f64,
    /// Queues that went to another IOThread.
    pub moves: u32,
    /// The most of these in a second.
    pub most_moves: u32,
    /// IOThreads that were added.
    pub added: u32,
    /// And removed.
    pub removed: u32,
    /// When throughput was within 5 % of that of the second half.
    pub rest: Rest,
    /// Queues that went to another IOThread until then.
    pub moves_to_rest: u32,
    /// Until there was one IOThread alone, ms; none: that never was.
    pub to_one_ms: Option<f64>,
}

impl Phase {
    /// Requests a second.
    #[must_use]
    pub fn iops(&self) -> f64 {
        self.requests as f64 / self.seconds.max(1e-9)
    }

    /// Requests for each second of an I/O core.
    #[must_use]
    pub fn iops_per_core(&self) -> f64 {
        if self.io_cores > 0.0 { self.iops() / self.io_cores } else { 0.0 }
    }

    /// As a utility is reckoned from it.
    #[must_use]
    pub fn progress(&self) -> Progress {
        Progress {
            io: utility::work(QueueKind::Disk, self.requests, self.bytes) / self.seconds.max(1e-9),
            busy: self.io_ran,
            ran: self.computed,
            waited: (self.compute_wanted - self.computed).max(0.0),
            cores: self.io_cores,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contender_is_read_as_it_is_written() {
        for policy_config in PolicyConfig::ALL {
            assert_eq!(policy_config.name().parse::<PolicyConfig>().unwrap(), policy_config);
        }
        let error = "static:3".parse::<PolicyConfig>().unwrap_err().to_string();
        assert!(error.contains("static:3") && error.contains("iocm"), "{error}");
        let key = CellKey { policy: PolicyConfig::Static2, seed: 7, repetition: 1, alone: None };
        let text = serde_json::to_string(&key).unwrap();
        assert_eq!(text, r#"{"policy":"static:2","seed":7,"repetition":1}"#);
        assert_eq!(serde_json::from_str::<CellKey>(&text).unwrap(), key);
    }

    #[test]
    fn scenario_has_all_phases_once_in_the_seeds_order_and_is_refused_out_of_range() {
        let settings = Settings { seconds: 1.0, ..Settings::default() };
        let order = |seed| -> Vec<PhaseKind> {
            let scenario = settings.scenario(seed).unwrap();
            scenario.phases.iter().map(|phase| phase.kind).collect()
        };
        let mut orders: Vec<_> = SEEDS.map(order).into();
        orders.dedup();
        assert_eq!(orders.len(), 3, "{orders:?}");
        let mut sorted = orders[0].clone();
        sorted.sort_unstable();
        assert_eq!(sorted, PhaseKind::DISKS);
        for wrong in [
            Settings { depth: 65, ..settings.clone() },
            Settings { vms: 0, ..settings.clone() },
            Settings { seconds: 0.1, ..settings.clone() },
            Settings { phases: Vec::new(), ..settings.clone() },
        ] {
            assert!(wrong.scenario(1).is_err(), "{wrong:?}");
        }
    }
}
