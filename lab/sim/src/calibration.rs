//! The costs with which the simulator does what a machine does.
//!
//! A *row* is a load of one VM on one IOThread: requests a second, and CPU time of server and clients for each. The same
//! rows are simulated. The error of a row is the sum of the squares of the logarithms of simulated / measured, of
//! its three figures.
//!
//! Costs are found in stages: each has the rows that show its own costs, once those of the stages before are
//! known. All at once they would stand in for each other, since a wake-up on the same CPU, on an idle one and on
//! one that gives way differ most of all. Within a stage each is made larger and smaller by a factor, by turns,
//! and what brings the rows nearer is kept.
//!
//! What a message costs is the caller's to say; a kick is taken for as dear as a call, both are a write to an eventfd. No
//! row shows `poll` and `turn` alone, nor `reap`, which needs a device: these keep their defaults.

use std::fmt;
use std::ops::Range;

use rtvirtio_iocores::{Kind, Limits, policy};
use rtvirtio_units::{Bytes, CpuId, Nanos};

use crate::scenario::{Burner, Load, Phase, PhaseKind, Scenario, Span, Stream, Vm};
use crate::{Costs, Interrupt, Machine, SimError, Simulation};

/// CPUs of a load; the last one is the IOThread's.
pub const CPUS: u16 = 2;
/// Simulated.
const SIMULATED: Nanos = Nanos::from_millis(50);
/// Bytes of a request.
const SMALL: u64 = 4 << 10;
const LARGE: u64 = 64 << 10;
/// Factors in turn, and rounds with each at most.
const FACTORS: [f64; 4] = [1.15, 1.5, 1.15, 1.04];
const PASSES: usize = 12;

/// What a stage's rows are, and the costs that they show.
struct Stage {
    rows: Range<usize>,
    costs: &'static [fn(&mut Costs) -> &mut Nanos],
}

const STAGES: [Stage; 6] = [
    // Full queues: nobody sleeps.
    Stage {
        rows: 0..4,
        costs: &[
            |costs| &mut costs.request,
            |costs| &mut costs.kib,
            |costs| &mut costs.client,
            |costs| &mut costs.client_kib,
        ],
    },
    // One request at a time: driver and IOThread wake each other on one CPU,
    Stage {
        rows: 4..6,
        costs: &[|costs| &mut costs.call, |costs| &mut costs.wake, |costs| &mut costs.client_turn],
    },
    // where the IOThread has to give way for it,
    Stage { rows: 6..9, costs: &[|costs| &mut costs.resume] },
    // on two,
    Stage {
        rows: 9..12,
        costs: &[
            |costs| &mut costs.far,
            |costs| &mut costs.idle.sender,
            |costs| &mut costs.idle.delay,
            |costs| &mut costs.idle.receiver,
        ],
    },
    // and where a vCPU computes.
    Stage {
        rows: 12..16,
        costs: &[
            |costs| &mut costs.busy.sender,
            |costs| &mut costs.busy.delay,
            |costs| &mut costs.busy.receiver,
        ],
    },
    // Full queues whose requests cost more than to copy.
    Stage {
        rows: 16..20,
        costs: &[
            |costs| &mut costs.apart,
            |costs| &mut costs.apart_kib,
            |costs| &mut costs.client_apart,
            |costs| &mut costs.client_apart_kib,
        ],
    },
];

/// All rows, in the order of their stages.
pub const ROWS: [Row; 20] = [
    row((1, 32, SMALL), Beside::Rest, 0, 0),
    row((4, 32, SMALL), Beside::Rest, 0, 0),
    row((1, 32, LARGE), Beside::Rest, 0, 0),
    row((4, 4, LARGE), Beside::Rest, 0, 0),
    row((1, 1, SMALL), Beside::IoThread, 0, 0),
    row((4, 1, SMALL), Beside::IoThread, 0, 0),
    row((1, 1, SMALL), Beside::IoThread, 0, 20),
    row((2, 1, SMALL), Beside::IoThread, 0, 20),
    row((4, 1, SMALL), Beside::IoThread, 0, 20),
    row((1, 1, SMALL), Beside::Rest, 0, 0),
    row((4, 1, SMALL), Beside::Rest, 0, 0),
    // An IOThread that has no time to poll shows what its calls cost.
    row((4, 1, SMALL), Beside::Rest, 0, 20),
    row((1, 1, SMALL), Beside::Rest, 1, 0),
    row((1, 1, SMALL), Beside::Rest, 1, 20),
    row((4, 1, SMALL), Beside::Rest, 1, 20),
    row((4, 1, SMALL), Beside::Rest, 1, 40),
    row((4, 16, SMALL), Beside::Rest, 0, 20),
    row((4, 16, SMALL), Beside::IoThread, 0, 20),
    row((4, 16, SMALL), Beside::All, 1, 20),
    row((4, 4, LARGE), Beside::All, 1, 20),
];

const fn row(
    (queues, depth, block): (u16, u16, u64),
    vcpus: Beside,
    burners: u16,
    cpu_us: u32,
) -> Row {
    Row { queues, depth, block, vcpus, burners, cpu_us }
}

/// Where the vCPUs of a load run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Beside {
    /// On the IOThread's.
    IoThread,
    /// On those that the IOThread leaves.
    Rest,
    /// On all.
    All,
}

impl fmt::Display for Beside {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::IoThread => "beside the IOThread",
            Self::Rest => "elsewhere",
            Self::All => "anywhere",
        })
    }
}

impl Beside {
    /// These, of the CPUs of a trial; the last one is the IOThread's.
    pub fn places(self) -> Range<u16> {
        match self {
            Self::IoThread => CPUS - 1..CPUS,
            Self::Rest => 0..CPUS - 1,
            Self::All => 0..CPUS,
        }
    }
}

/// All queues of a disk in memory full.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// Queues of the disk.
    pub queues: u16,
    /// Requests in flight of each.
    pub depth: u16,
    /// Bytes of each.
    pub block: u64,
    /// Where their drivers run.
    pub vcpus: Beside,
    /// vCPUs beside these that compute all the time.
    pub burners: u16,
    /// CPU that a request costs the IOThread on top, µs.
    pub cpu_us: u32,
}

/// Requests a second, and ns of CPU of the IOThread and of the drivers for each.
pub type Figures = [f64; 3];

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { queues, depth, block, vcpus, burners, cpu_us } = self;
        write!(f, "{queues} queues, depth {depth}, {} KiB, vCPUs {vcpus}", block >> 10)?;
        if *burners > 0 {
            write!(f, ", {burners} compute")?;
        }
        if *cpu_us > 0 { write!(f, ", +{cpu_us} us a request") } else { Ok(()) }
    }
}

impl Row {
    /// The load for so long.
    pub fn scenario(&self, length: Nanos) -> Scenario {
        let span = Span { start: Nanos::ZERO, stop: length };
        let load = Load::Depth(self.depth);
        let stream = |queue| Stream { queue, span, block: Bytes::new(self.block), load };
        let streams = (0..self.queues).map(stream).collect();
        let burners = vec![Burner { span, share: 1.0 }; self.burners.into()];
        let vm = Vm { queues: self.queues, pairs: 0, plugged: vec![span], streams, burners };
        let phases = vec![Phase { kind: PhaseKind::AllHot, span }];
        Scenario { seed: 1, phases, vms: vec![vm] }
    }

    /// What it is in the simulator.
    ///
    /// # Errors
    /// If it refuses it.
    pub(crate) fn simulate(&self, costs: &Costs) -> Result<Figures, SimError> {
        let scenario = self.scenario(SIMULATED);
        let mut machine = Machine::new(CPUS, 1);
        machine.vcpus = self.vcpus.places().map(|at| CpuId::new(at.into())).collect();
        machine.costs = costs.with_work(Nanos::from_micros(self.cpu_us.into()), Nanos::ZERO);
        let limits = Limits { cpus: Vec::new(), min_iothreads: 1, max_iothreads: 1, borrow: false };
        let mut fixed = policy(Kind::Static, limits);
        let mut simulation = Simulation::new(&machine, &scenario, &mut *fixed)?;
        simulation.run_until(SIMULATED);
        let whole = simulation.finish().whole;
        let each = |cpus: f64| cpus * 1e9 / whole.iops.max(1.0);
        Ok([whole.iops, each(whole.io_ran), each(whole.vcpus_ran - whole.computed)])
    }
}

/// The costs that bring the simulator nearest to what was measured of all rows, with what a message costs, and the rows
/// that are simulated with them.
///
/// # Errors
/// If the simulator refuses a row.
pub fn find(measured: &[Figures], message: Nanos) -> Result<(Costs, Vec<Figures>), SimError> {
    let mut costs = Costs { message, ..start() };
    search(&mut costs, measured)?;
    let simulated = ROWS.iter().map(|row| row.simulate(&costs)).collect::<Result<_, _>>()?;
    Ok((costs, simulated))
}

/// Where the search begins: nothing would stay nothing.
fn start() -> Costs {
    let interrupt = Interrupt {
        sender: Nanos::from_micros(5),
        delay: Nanos::from_micros(8),
        receiver: Nanos::from_micros(1),
    };
    Costs {
        client_kib: Nanos::new(50),
        call: Nanos::new(1_000),
        wake: Nanos::new(1_000),
        client_turn: Nanos::new(1_000),
        apart: Nanos::new(500),
        apart_kib: Nanos::new(5),
        client_apart: Nanos::new(500),
        client_apart_kib: Nanos::new(5),
        resume: Nanos::new(1_000),
        far: Nanos::new(2_000),
        idle: interrupt,
        busy: interrupt,
        ..Costs::default()
    }
}

fn error(costs: &Costs, rows: Range<usize>, measured: &[Figures]) -> Result<f64, SimError> {
    let mut sum = 0.0;
    for (row, real) in ROWS.iter().zip(measured).skip(rows.start).take(rows.len()) {
        let simulated = row.simulate(costs)?;
        let ratios = real.iter().zip(simulated).map(|(real, simulated)| simulated / real);
        sum += ratios.map(|ratio| ratio.max(1e-3).ln().powi(2)).sum::<f64>();
    }
    Ok(sum)
}

/// Brings the costs as near to what was measured as they come, one stage after the other.
fn search(costs: &mut Costs, measured: &[Figures]) -> Result<(), SimError> {
    // What later stages find changes a little of what full queues show.
    for Stage { rows, costs: searched } in STAGES.iter().chain(&STAGES[..1]) {
        let error = |of: &Costs| error(of, rows.clone(), measured);
        let mut least = error(costs)?;
        for factor in FACTORS {
            for _ in 0..PASSES {
                let before = least;
                for cost in *searched {
                    for by in [factor, 1.0 / factor] {
                        let mut tried = *costs;
                        let value = cost(&mut tried);
                        *value = Nanos::new((value.get() as f64 * by).round().max(1.0) as u64);
                        tried.kick = tried.call;
                        let error = error(&tried)?;
                        if error < least {
                            (*costs, least) = (tried, error);
                            break;
                        }
                    }
                }
                if least >= before {
                    break;
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows of known costs: the search, which begins elsewhere, finds what explains them.
    #[test]
    fn search_finds_costs_that_explain_what_was_measured() {
        let real = Costs {
            request: Nanos::new(420),
            kib: Nanos::new(25),
            client: Nanos::new(600),
            client_kib: Nanos::new(90),
            wake: Nanos::new(4_000),
            apart: Nanos::new(900),
            apart_kib: Nanos::new(8),
            client_apart: Nanos::new(100),
            client_apart_kib: Nanos::new(20),
            ..Costs::default()
        };
        let measured: Vec<Figures> = ROWS.iter().map(|row| row.simulate(&real).unwrap()).collect();
        let mut found = start();
        let first = error(&found, 0..ROWS.len(), &measured).unwrap();
        search(&mut found, &measured).unwrap();
        let last = error(&found, 0..ROWS.len(), &measured).unwrap();
        assert!(last < first / 50.0, "{first} to {last}: {found:?}");
        for (row, real) in ROWS.iter().zip(&measured) {
            let iops = row.simulate(&found).unwrap()[0];
            assert!((iops / real[0] - 1.0).abs() < 0.1, "{row:?}: {iops} of {}", real[0]);
        }
    }
}
