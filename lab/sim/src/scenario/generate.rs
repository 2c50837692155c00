//! Scenarios from kinds, size and seed.

use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use rtvirtio_units::{Bytes, Iops, Nanos};

use super::{
    Burner, Load, MAX_DEPTH, MAX_QUEUES, MAX_VMS, Phase, PhaseKind, Scenario, ScenarioError, Size,
    Span, Stream, Vm, within,
};

/// A small request, and a large one.
const SMALL: Bytes = Bytes::from_kib(4);
const LARGE: Bytes = Bytes::from_kib(256);
/// A small frame, such as a message or an acknowledgement, and one that is to be segmented.
const SMALL_FRAME: Bytes = Bytes::new(128);
const LARGE_FRAME: Bytes = Bytes::new(65_000);
/// How long a queue is full, and empty, while flapping: the policies' period.
const FLAP: Nanos = Nanos::from_millis(100);
/// Shortest and longest burst, s.
const BURST: (f64, f64) = (0.05, 5.0);
/// One VM in so many has large requests where many small ones are against few.
const FEW: u16 = 8;
/// Part of the compute demand outside the phase that is made of it.
const ELSEWHERE: f64 = 0.25;
/// Part of the rate of a VM that does hardly anything.
const TRICKLE: f64 = 0.01;

impl PhaseKind {
    /// Puts phases in the order that a seed gives.
    pub fn shuffle(kinds: &mut [Self], seed: u64) {
        kinds.shuffle(&mut Pcg64Mcg::seed_from_u64(seed));
    }
}

impl Scenario {
    /// Phases of these kinds, `length` each, one after the other.
    ///
    /// # Errors
    /// A size or length out of its range.
    pub fn generate(
        kinds: &[PhaseKind],
        length: Nanos,
        size: &Size,
        seed: u64,
    ) -> Result<Self, ScenarioError> {
        within((1..=MAX_VMS).contains(&usize::from(size.vms)), "the number of VMs")?;
        within((1..=MAX_QUEUES).contains(&size.queues), "the number of queues")?;
        within((1..=MAX_DEPTH).contains(&size.depth), "the depth")?;
        within((0.0..=10_000.0).contains(&size.compute), "the compute demand")?;
        within(length >= Nanos::from_millis(100), "the length of a phase")?;
        let pairs = u16::from(kinds.iter().any(|kind| kind.has_nics()));
        let (queues, plugged, streams, burners) = (size.queues, vec![], vec![], vec![]);
        let vm = Vm { queues, pairs, plugged, streams, burners };
        let mut scenario = Self { seed, phases: vec![], vms: vec![vm; usize::from(size.vms)] };
        for (index, &kind) in kinds.iter().enumerate() {
            let start = scenario.length();
            let span = Span { start, stop: start.saturating_add(length) };
            scenario.phases.push(Phase { kind, span });
            // A phase does not depend on those before it.
            let seed = seed ^ (index as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            let mut maker =
                Maker { size, span, kind, random: Pcg64Mcg::seed_from_u64(seed), hot: (0, 0) };
            maker.hot =
                (maker.random.random_range(0..size.vms), maker.random.random_range(0..size.queues));
            for (number, vm) in scenario.vms.iter_mut().enumerate() {
                maker.add(number as u16, vm);
            }
        }
        scenario.vms.iter_mut().for_each(join_plugged);
        scenario.check()?;
        Ok(scenario)
    }
}

/// Makes one phase.
struct Maker<'a> {
    size: &'a Size,
    span: Span,
    kind: PhaseKind,
    random: Pcg64Mcg,
    /// The VM and queue that is hot where one is.
    hot: (u16, u16),
}

impl Maker<'_> {
    fn add(&mut self, number: u16, vm: &mut Vm) {
        let depth = Load::Depth(self.size.depth);
        let mut compute = ELSEWHERE;
        let mut plugged = vec![self.span];
        match self.kind {
            PhaseKind::Idle => {
                self.rate(vm, TRICKLE);
                self.frame_rate(vm, TRICKLE);
            }
            PhaseKind::SmallFrames => self.frames(vm, SMALL_FRAME, depth),
            PhaseKind::Bulk => self.frames(vm, LARGE_FRAME, depth),
            PhaseKind::DisksNics => match (number + self.hot.0) % 4 {
                0 => self.all(vm, self.span, SMALL, depth),
                1 => self.frames(vm, SMALL_FRAME, depth),
                2 => self.frames(vm, LARGE_FRAME, depth),
                _ => {
                    self.rate(vm, 1.0);
                    self.frame_rate(vm, 1.0);
                }
            },
            PhaseKind::OneHot => {
                if number == self.hot.0 {
                    self.stream(vm, self.hot.1, self.span, SMALL, depth);
                } else {
                    self.rate(vm, TRICKLE);
                }
            }
            PhaseKind::AllHot => self.all(vm, self.span, SMALL, depth),
            PhaseKind::SmallLarge => {
                let is_large = number % FEW == self.hot.0 % FEW.min(self.size.vms);
                let block = if is_large { LARGE } else { SMALL };
                let depth = if is_large { self.size.depth } else { self.size.depth.div_ceil(4) };
                self.all(vm, self.span, block, Load::Depth(depth));
            }
            PhaseKind::Compute => {
                compute = 1.0;
                self.rate(vm, 0.2);
            }
            PhaseKind::Mixed => match self.random.random_range(0..6_u8) {
                0 => self.rate(vm, TRICKLE),
                1 => self.rate(vm, 1.0),
                2 => self.all(vm, self.span, SMALL, Load::Depth(1)),
                3 => self.all(vm, self.span, SMALL, depth),
                4 => self.all(
                    vm,
                    self.span,
                    Bytes::from_kib(64),
                    Load::Depth(self.size.depth.min(4)),
                ),
                _ => {
                    compute = 1.0;
                    self.rate(vm, 0.2);
                }
            },
            PhaseKind::Bursts => {
                for queue in 0..vm.queues {
                    let mut is_full = self.random.random_bool(0.5);
                    for span in self.pieces() {
                        if is_full {
                            self.stream(vm, queue, span, SMALL, depth);
                        }
                        is_full = !is_full;
                    }
                }
            }
            PhaseKind::Hotplug => {
                plugged.clear();
                let mut is_there = self.random.random_bool(0.5);
                for span in self.pieces() {
                    if is_there {
                        plugged.push(span);
                        self.all(vm, span, SMALL, depth);
                    }
                    is_there = !is_there;
                }
            }
            PhaseKind::Flapping => {
                let mut start = self.span.start;
                while start < self.span.stop {
                    let stop = start.saturating_add(FLAP).min(self.span.stop);
                    self.all(vm, Span { start, stop }, SMALL, depth);
                    start = stop.saturating_add(FLAP);
                }
            }
        }
        vm.plugged.extend(plugged);
        self.compute(vm, compute);
    }

    /// The phase in pieces of the length of a burst, by the logarithm.
    fn pieces(&mut self) -> Vec<Span> {
        let mut pieces = Vec::new();
        let mut start = self.span.start;
        while start < self.span.stop {
            let seconds = BURST.0 * (BURST.1 / BURST.0).powf(self.random.random());
            let stop = start.saturating_add(Nanos::from_secs_f64(seconds)).min(self.span.stop);
            pieces.push(Span { start, stop });
            start = stop;
        }
        pieces
    }

    fn stream(&self, vm: &mut Vm, queue: u16, span: Span, block: Bytes, load: Load) {
        vm.streams.push(Stream { queue, span, block, load });
    }

    fn all(&self, vm: &mut Vm, span: Span, block: Bytes, load: Load) {
        (0..vm.queues).for_each(|queue| self.stream(vm, queue, span, block, load));
    }

    /// Part of a VM's rate, over its queues.
    fn rate(&self, vm: &mut Vm, part: f64) {
        let each = self.size.rate.get() * part / f64::from(vm.queues);
        // Rates have a least value of their own; less than that is nothing.
        if let Ok(rate) = Iops::new(each) {
            self.all(vm, self.span, SMALL, Load::Rate(rate));
        }
    }

    /// Frames of a size through all queues of a VM's network devices.
    fn frames(&self, vm: &mut Vm, size: Bytes, load: Load) {
        let queues = vm.queues..vm.all_queues();
        queues.for_each(|queue| self.stream(vm, queue, self.span, size, load));
    }

    /// Part of a VM's rate, in small frames over the queues of its network devices.
    fn frame_rate(&self, vm: &mut Vm, part: f64) {
        let each = self.size.rate.get() * part / f64::from((2 * vm.pairs).max(1));
        if let Ok(rate) = Iops::new(each) {
            self.frames(vm, SMALL_FRAME, Load::Rate(rate));
        }
    }

    /// A VM's part of what all want to compute.
    fn compute(&self, vm: &mut Vm, part: f64) {
        let wanted = self.size.compute * part / f64::from(self.size.vms);
        let threads = wanted.ceil();
        if wanted > 0.0 {
            let burner = Burner { span: self.span, share: wanted / threads };
            vm.burners.extend(std::iter::repeat_n(burner, threads as usize));
        }
    }
}

/// A disk that is there at the end of a phase and the start of the next one stays.
fn join_plugged(vm: &mut Vm) {
    vm.plugged.dedup_by(|next, span| {
        let joins = next.start == span.stop;
        if joins {
            span.stop = next.stop;
        }
        joins
    });
}
