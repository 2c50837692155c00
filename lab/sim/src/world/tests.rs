//! Whole simulations against values by hand, and properties of random ones.

use proptest::prelude::*;
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use rtvirtio_iocores::{Action, Decision, Kind, Limits, QueueId, ThreadId, policy};
use rtvirtio_ssd::SsdConfig;
use rtvirtio_units::{Bytes, Iops};

use super::*;
use crate::costs::{Costs, Interrupt};
use crate::machine::Backend;
use crate::scenario::{Load, Phase, PhaseKind, Size, Span, Vm};

/// Nothing costs anything.
fn free() -> Costs {
    Costs::default().scaled(|| 0.0)
}

fn us(us: u64) -> Nanos {
    Nanos::from_micros(us)
}

fn ms(ms: u64) -> Nanos {
    Nanos::from_millis(ms)
}

fn span(start: u64, stop: u64) -> Span {
    Span { start: ms(start), stop: ms(stop) }
}

/// VMs with one queue each, which have these loads of 4 KiB for a second.
fn second(loads: &[Load]) -> Scenario {
    let vm = |&load: &Load| Vm {
        queues: 1,
        pairs: 0,
        plugged: vec![span(0, 1_000)],
        streams: vec![Stream { queue: 0, span: span(0, 1_000), block: Bytes::from_kib(4), load }],
        burners: vec![],
    };
    Scenario {
        seed: 1,
        phases: vec![Phase { kind: PhaseKind::AllHot, span: span(0, 1_000) }],
        vms: loads.iter().map(vm).collect(),
    }
}

fn fixed() -> Box<dyn Policy + Send> {
    policy(Kind::Static, Limits { cpus: vec![], min_iothreads: 1, max_iothreads: 1, borrow: false })
}

fn run(machine: &Machine, scenario: &Scenario) -> Outcome {
    let mut policy = fixed();
    let mut simulation = Simulation::new(machine, scenario, &mut *policy).unwrap();
    simulation.run_until(scenario.length());
    simulation.finish()
}

/// Does what it likes: moves queues, adds and removes IOThreads, sends vCPUs elsewhere.
struct Chaos {
    random: Pcg64Mcg,
    cpus: u32,
}

impl Policy for Chaos {
    fn step(&mut self, snapshot: &Snapshot) -> Vec<Decision> {
        let random = &mut self.random;
        let thread = |random: &mut Pcg64Mcg| {
            snapshot.threads[random.random_range(0..snapshot.threads.len())].id
        };
        let mut actions = Vec::new();
        for queue in &snapshot.queues {
            if random.random_bool(0.2) {
                actions.push(Action::MoveQueue { queue: queue.id, to: thread(random) });
            }
        }
        if random.random_bool(0.1) {
            let cpu = CpuId::new(random.random_range(0..self.cpus));
            let queues = snapshot.queues.iter().map(|queue| queue.id).take(2).collect();
            actions.push(Action::AddThread { cpu, queues });
        }
        if random.random_bool(0.1) {
            let (gone, to) = (thread(random), thread(random));
            let of = snapshot.queues.iter().filter(|queue| queue.thread == gone);
            let moves = of.map(|queue| (queue.id, to)).collect();
            actions.push(Action::RemoveThread { thread: gone, moves });
        }
        if random.random_bool(0.1) {
            let from = random.random_range(0..self.cpus);
            actions.push(Action::SetVcpuCpus { cpus: (from..self.cpus).map(CpuId::new).collect() });
        }
        actions.push(Action::MoveQueue { queue: QueueId(u32::MAX), to: ThreadId(7_000) });
        let decision = |action| Decision { action, reason: String::new() };
        actions.into_iter().map(decision).collect()
    }
}

#[test]
fn round_of_one_request_at_a_time_takes_what_its_steps_take() {
    let mut machine = Machine::new(2, 1);
    machine.costs = Costs {
        request: us(5),
        call: us(1),
        client: us(2),
        kick: us(1),
        wake: us(3),
        idle: Interrupt { delay: us(1), ..Interrupt::default() },
        ..free()
    };
    // Client: 3 to wake up, 2 for the end of one request and the start of another, 1 to kick. IOThread: 1
    // until it is ready, 3 to wake up, 5 for the request, 1 to call. Client: ready after 1. Sum 17.
    machine.polling = Nanos::ZERO;
    let outcome = run(&machine, &second(&[Load::Depth(1)]));
    assert!(outcome.whole.mean.get().abs_diff(17_000) <= 1, "{}", outcome.whole.mean);
    assert!(outcome.whole.requests.abs_diff(1_000_000 / 17) <= 1, "{}", outcome.whole.requests);
    // Of each 17 µs: 6 busy, 9 of them on a CPU; client 6 on a CPU.
    let part = |n: f64| n / 17.0;
    assert!((outcome.whole.busy - part(6.0)).abs() < 1e-3, "{}", outcome.whole.busy);
    assert!((outcome.whole.io_ran - part(9.0)).abs() < 1e-3, "{}", outcome.whole.io_ran);
    assert!((outcome.whole.vcpus_ran - part(6.0)).abs() < 1e-3, "{}", outcome.whole.vcpus_ran);

    // Who wakes the other one is at the interrupt for 2 while that one wakes up: no round is longer for it.
    machine.costs.idle.sender = us(2);
    let outcome = run(&machine, &second(&[Load::Depth(1)]));
    assert!(outcome.whole.mean.get().abs_diff(17_000) <= 1, "{}", outcome.whole.mean);
    assert!((outcome.whole.busy - part(8.0)).abs() < 1e-3, "{}", outcome.whole.busy);
    assert!((outcome.whole.io_ran - part(11.0)).abs() < 1e-3, "{}", outcome.whole.io_ran);
    assert!((outcome.whole.vcpus_ran - part(8.0)).abs() < 1e-3, "{}", outcome.whole.vcpus_ran);
    machine.costs.idle.sender = us(0);

    // If the IOThread polls, nobody kicks or wakes it: 3 + 2 + 5 + 1 + 1.
    machine.polling = us(64);
    let outcome = run(&machine, &second(&[Load::Depth(1)]));
    assert_eq!(outcome.whole.p50.get() / 1_000, 12);
    assert!((83_000..=83_334).contains(&outcome.whole.requests), "{}", outcome.whole.requests);
    assert!((outcome.whole.io_ran - 1.0).abs() < 1e-2, "{}", outcome.whole.io_ran);
}

#[test]
fn one_iothread_ends_at_one_over_its_cost() {
    let mut machine = Machine::new(8, 1);
    machine.costs = Costs { request: us(8), kib: Nanos::new(500), turn: Nanos::new(150), ..free() };
    // 8 µs and 4 times 0.5 µs: 100,000 a second, less what turns take.
    let outcome = run(&machine, &second(&[Load::Depth(32); 4]));
    assert!((97_000.0..=100_000.0).contains(&outcome.whole.iops), "{}", outcome.whole.iops);
    assert!(outcome.whole.busy > 0.99);
    // 128 in flight: Little's law.
    let mean = outcome.whole.mean.as_secs_f64();
    assert!((mean * outcome.whole.iops - 128.0).abs() < 3.0, "{mean}");
}

#[test]
fn second_iothread_doubles_what_one_ends() {
    let one =
        Machine { costs: Costs { request: us(20), ..Costs::default() }, ..Machine::new(8, 1) };
    let two = Machine { costs: one.costs, ..Machine::new(8, 2) };
    let load = second(&[Load::Depth(32); 4]);
    let ratio = run(&two, &load).whole.iops / run(&one, &load).whole.iops;
    assert!((1.98..=2.02).contains(&ratio), "{ratio}");
}

#[test]
fn iothreads_that_share_a_cpu_have_half_of_it_each() {
    let mut machine = Machine::new(4, 1);
    machine.costs = Costs { request: us(10), ..free() };
    machine.threads = vec![CpuId::new(3), CpuId::new(3)];
    let (mut policy, load) = (fixed(), second(&[Load::Depth(32); 2]));
    let mut simulation = Simulation::new(&machine, &load, &mut *policy).unwrap();
    simulation.run_until(ms(1_000));
    // 100,000 in all, to within a tick (4 ms), after which the other one runs, and batches.
    for queue in &simulation.queues {
        assert!(queue.requests.abs_diff(50_000) <= 430, "{}", queue.requests);
    }
}

#[test]
fn queue_at_a_fixed_rate_waits_as_m_d_1_says() {
    // 64 queues of 1,094 requests a second: Poisson, 70 % of an IOThread with 10 µs a request.
    let mut machine = Machine::new(16, 1);
    machine.costs = Costs { request: us(10), ..free() };
    let rate = Load::Rate(Iops::new(70_000.0 / 64.0).unwrap());
    let mut scenario = second(&[rate; 64]);
    let long = Span { start: Nanos::ZERO, stop: ms(10_000) };
    scenario.phases[0].span = long;
    for vm in &mut scenario.vms {
        vm.plugged = vec![long];
        vm.streams[0].span = long;
    }
    let outcome = run(&machine, &scenario);
    assert!((69_000.0..71_000.0).contains(&outcome.whole.iops), "{}", outcome.whole.iops);
    // Service 10 µs, wait ρ / (2 (1 − ρ)) of it: 21.67 µs.
    let mean = outcome.whole.mean.as_secs_f64() * 1e6;
    assert!((20.8..22.5).contains(&mean), "{mean}");
}

#[test]
fn latency_of_a_rate_that_is_too_high_counts_from_when_it_was_due() {
    let mut machine = Machine::new(4, 1);
    machine.costs = Costs { request: us(100), ..free() };
    let outcome = run(&machine, &second(&[Load::Rate(Iops::new(20_000.0).unwrap())]));
    assert!((9_900.0..=10_000.0).contains(&outcome.whole.iops));
    // Twice what can be: after a second the one that ends was due half a second ago.
    assert!((450.0..550.0).contains(&outcome.whole.longest.as_millis_f64()));
}

#[test]
fn compute_gets_what_io_leaves() {
    let mut scenario = second(&[Load::Depth(16)]);
    scenario.vms[0].burners = vec![Burner { span: span(0, 1_000), share: 1.0 }; 3];
    scenario.vms[0].burners.push(Burner { span: span(0, 500), share: 0.2 });
    let machine = Machine::new(5, 1);
    let outcome = run(&machine, &scenario);
    assert!((outcome.whole.compute_wanted - 3.1).abs() < 1e-6);
    // 4 CPUs for three that never sleep, one that seldom works, and the client.
    assert!((2.9..3.11).contains(&outcome.whole.computed), "{}", outcome.whole.computed);
    assert!(outcome.whole.vcpus_ran > outcome.whole.computed);
}

#[test]
fn script_of_phases_has_the_rates_cores_and_compute_of_each() {
    // 0-1 s: nothing. 1-2 s: one queue at depth 4. 2-3 s: the same, its disk gone after 0.5 s, and compute.
    let phase = |kind, at| Phase { kind, span: span(at, at + 1_000) };
    let stream = |start, stop| Stream {
        queue: 0,
        span: span(start, stop),
        block: Bytes::from_kib(4),
        load: Load::Depth(4),
    };
    let scenario = Scenario {
        seed: 9,
        phases: vec![
            phase(PhaseKind::Idle, 0),
            phase(PhaseKind::OneHot, 1_000),
            phase(PhaseKind::Compute, 2_000),
        ],
        vms: vec![Vm {
            queues: 1,
            pairs: 0,
            plugged: vec![span(0, 2_500)],
            streams: vec![stream(1_000, 2_000), stream(2_000, 2_500)],
            burners: vec![Burner { span: span(2_000, 3_000), share: 0.5 }],
        }],
    };
    let mut machine = Machine::new(3, 1);
    machine.costs = Costs { request: us(25), ..free() };
    let outcome = run(&machine, &scenario);
    let [idle, hot, last] = &outcome.phases[..] else { panic!("three phases") };
    assert_eq!((idle.requests, idle.computed), (0, 0.0));
    // 40,000 a second; 4 in flight begin and end together, as one batch.
    assert!(hot.requests.abs_diff(40_000) <= 8, "{}", hot.requests);
    assert!(last.requests.abs_diff(20_000) <= 8, "{}", last.requests);
    assert_eq!(hot.p50.get() / 1_000, 100);
    assert_eq!(hot.settled, Some(Nanos::ZERO));
    assert!((last.computed - 0.5).abs() < 1e-6, "{}", last.computed);
    assert!((hot.busy - 1.0).abs() < 1e-3 && (last.busy - 0.5).abs() < 1e-3);
    assert_eq!((hot.io_cores, hot.timeline.len()), (1.0, 10));
    assert_eq!(outcome.counts.in_flight, 0);
}

#[test]
fn requests_of_a_device_take_its_time() {
    let config: SsdConfig = "ref-4x250".parse().unwrap();
    for schedule in [false, true] {
        let mut machine = Machine::new(4, 1);
        machine.backend = Backend::Ssd { config, devices: 1, schedule };
        let outcome = run(&machine, &second(&[Load::Depth(16), Load::Depth(16)]));
        // 4 channels of 250 µs.
        assert!((15_000.0..16_300.0).contains(&outcome.whole.iops), "{}", outcome.whole.iops);
        assert!(outcome.whole.busy < 0.2, "{}", outcome.whole.busy);
    }
}

#[test]
fn machine_that_cannot_be_is_refused() {
    let (scenario, mut policy) = (second(&[Load::Depth(1)]), fixed());
    let mut refused = |change: fn(&mut Machine)| {
        let mut machine = Machine::new(4, 1);
        change(&mut machine);
        Simulation::new(&machine, &scenario, &mut *policy).unwrap_err()
    };
    assert_eq!(refused(|m| m.cpus = 129), SimError::Cpus(129));
    assert_eq!(refused(|m| m.cpus = 0), SimError::Cpus(0));
    assert_eq!(refused(|m| m.threads.clear()), SimError::Nothing("IOThread"));
    assert_eq!(refused(|m| m.vcpus.clear()), SimError::Nothing("CPU for the vCPUs"));
    assert_eq!(refused(|m| m.vcpus.push(CpuId::new(4))), SimError::NoCpu(CpuId::new(4)));
    let dear = Nanos::new(1_000_000_001);
    let costly = refused(|m| m.costs.busy.receiver = Nanos::new(1_000_000_001));
    assert_eq!(costly, SimError::Cost(dear));
}

/// A random scenario of a second, and a machine for it.
fn random() -> impl Strategy<Value = (Scenario, Machine)> {
    let all = || PhaseKind::DISKS.into_iter().chain(PhaseKind::NETWORK);
    let kind = 0..all().count();
    let size = (1..8_u16, 1..3_u16, 1..64_u16, 0.0..8.0, 2..9_u16);
    let cost = (0..30_u64, 0..200_u64, 0..70_000_u64, 0..3_u8);
    (any::<u64>(), kind, size, cost).prop_map(move |(seed, kind, size, cost)| {
        let (vms, queues, depth, compute, cpus) = size;
        let (request, kib, polling, backend) = cost;
        let rate = Iops::new(2_000.0).unwrap();
        let size = Size { vms, queues, depth, rate, compute };
        let all: Vec<PhaseKind> = all().collect();
        let kinds = [all[kind], all[(kind + seed as usize % 9) % all.len()]];
        let mut machine = Machine::new(cpus, 1);
        machine.costs.request = us(request);
        machine.costs.kib = Nanos::new(kib);
        machine.polling = Nanos::new(polling);
        if backend > 0 {
            let config = "ref-8x80".parse().unwrap();
            machine.backend = Backend::Ssd { config, devices: 2, schedule: backend == 2 };
        }
        (Scenario::generate(&kinds, ms(200), &size, seed).unwrap(), machine)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn same_seed_same_outcome((scenario, machine) in random()) {
        let outcome = || {
            let random = Pcg64Mcg::seed_from_u64(scenario.seed);
            let mut chaos = Chaos { random, cpus: u32::from(machine.cpus) };
            let mut simulation = Simulation::new(&machine, &scenario, &mut chaos).unwrap();
            simulation.run_until(scenario.length());
            simulation.finish()
        };
        prop_assert_eq!(outcome(), outcome());
    }

    /// Also `moves_lose_nothing`: what is in flight at the end of the load ends.
    #[test]
    fn each_request_ends_once_or_is_in_flight((mut scenario, machine) in random()) {
        // The load ends, then there is time for the rest, of up to 8 × 2 queues with 64 of 256 KiB.
        let end = scenario.length();
        let last = scenario.phases.len() - 1;
        scenario.phases[last].span.stop = end.saturating_add(ms(4_000));
        let random = Pcg64Mcg::seed_from_u64(scenario.seed);
        let mut chaos = Chaos { random, cpus: u32::from(machine.cpus) };
        let mut simulation = Simulation::new(&machine, &scenario, &mut chaos).unwrap();
        for step in 1..=20 {
            simulation.run_until(Nanos::new(end.get() / 20 * step));
            let Counts { issued, ended, in_flight } = simulation.counts();
            prop_assert_eq!(issued, ended + in_flight);
            for queue in &simulation.queues {
                let submits = queue.client.submits.len();
                let held = queue.available.len() + queue.used.len() + submits;
                prop_assert!(held <= queue.client.outstanding as usize);
            }
        }
        simulation.run_until(scenario.length());
        let Counts { issued, ended, in_flight } = simulation.counts();
        prop_assert_eq!((issued, in_flight), (ended, 0));
    }

    #[test]
    fn nothing_is_used_more_than_there_is((scenario, machine) in random()) {
        let random = Pcg64Mcg::seed_from_u64(scenario.seed);
        let mut chaos = Chaos { random, cpus: u32::from(machine.cpus) };
        let mut simulation = Simulation::new(&machine, &scenario, &mut chaos).unwrap();
        for step in 1..=10 {
            simulation.run_until(Nanos::new(scenario.length().get() / 10 * step));
            let now = simulation.events.now;
            let totals = simulation.totals();
            let cpus = 0..usize::from(machine.cpus);
            let idle: u64 = cpus.map(|cpu| simulation.cpus.idle(cpu, now)).sum();
            prop_assert_eq!(totals.io_ran + totals.vcpus_ran + idle, now * u64::from(machine.cpus));
            for io in &simulation.ios {
                let (busy, poll, sleep) = io.times(now);
                prop_assert!(busy + poll + sleep <= now);
            }
        }
    }

    /// The bound: in a turn every queue has 64 requests or 256 KiB at most, and up to one request more.
    #[test]
    fn no_queue_waits_longer_than_the_shares_of_the_others(
        depths in prop::collection::vec((1..256_u16, 0..9_u32), 1..10),
        request in 0..20_u64,
        kib in 0..100_u64,
    ) {
        let mut machine = Machine::new(depths.len() as u16 + 1, 1);
        machine.costs = Costs { request: us(request), kib: Nanos::new(kib), ..Costs::default() };
        let loads: Vec<Load> = depths.iter().map(|&(depth, _)| Load::Depth(depth)).collect();
        let mut scenario = second(&loads);
        let mut turns = 0;
        for (vm, &(depth, power)) in scenario.vms.iter_mut().zip(&depths) {
            let bytes = 512 << power;
            vm.streams[0].block = Bytes::new(bytes);
            let share = (256 * 1024 / bytes).min(64);
            turns = turns.max(u64::from(depth).div_ceil(share));
        }
        scenario.phases[0].span = span(0, 200);
        for vm in &mut scenario.vms {
            vm.plugged[0] = span(0, 200);
            vm.streams[0].span = span(0, 200);
        }
        let outcome = run(&machine, &scenario);
        let costs = machine.costs;
        // Each batch may find its driver, which has a CPU of its own, asleep.
        let call = costs.call.get() + costs.idle.sender.get();
        let share = 64 * costs.request.get() + 384 * costs.kib.get() + 8 * call;
        let turn = costs.turn.get() + share * depths.len() as u64;
        // One more turn, which was under way; the client's own part, 256 requests and two wake-ups.
        let wake = costs.wake.get() + costs.far.get() + costs.idle.delay.get() + costs.idle.receiver.get();
        let client = 256 * costs.client.get() + 2 * wake;
        let bound = (turns + 1) * turn + client + 100_000;
        prop_assert!(outcome.whole.longest.get() <= bound, "{} > {bound}", outcome.whole.longest.get());
    }
}

#[test]
fn moves_lose_nothing() {
    let mut machine = Machine::new(8, 4);
    machine.costs.request = us(5);
    let mut scenario = second(&[Load::Depth(32); 8]);
    scenario.phases[0].span = span(0, 1_100);
    let mut chaos = Chaos { random: Pcg64Mcg::seed_from_u64(3), cpus: 8 };
    let mut simulation = Simulation::new(&machine, &scenario, &mut chaos).unwrap();
    simulation.run_until(scenario.length());
    let Counts { issued, ended, in_flight } = simulation.counts();
    assert_eq!((issued, in_flight), (ended, 0));
    let outcome = simulation.finish();
    assert!(outcome.whole.moves > 100, "{}", outcome.whole.moves);
    assert!(outcome.decisions.iter().any(|decision| !decision.done));
    assert!(outcome.whole.pause_p99.is_some());
}

/// Moves the first queue to the second IOThread at 0.2 s, and notes what it is shown.
#[derive(Default)]
struct Notes {
    seen: Vec<Snapshot>,
}

impl Policy for Notes {
    fn step(&mut self, snapshot: &Snapshot) -> Vec<Decision> {
        self.seen.push(snapshot.clone());
        let action = Action::MoveQueue { queue: QueueId(0), to: snapshot.threads[1].id };
        let decision = Decision { action, reason: String::new() };
        (snapshot.now == ms(200)).then_some(decision).into_iter().collect()
    }
}

/// Two VMs, of which the first has its disk for 0.15 s, and from 0.4 s on.
fn noted() -> (Notes, Outcome) {
    let mut scenario = second(&[Load::Depth(1), Load::Depth(1)]);
    let stream = scenario.vms[0].streams[0];
    scenario.vms[0].plugged = vec![span(0, 150), span(400, 1_000)];
    let spans = scenario.vms[0].plugged.iter();
    scenario.vms[0].streams = spans.map(|&span| Stream { span, ..stream }).collect();
    scenario.vms[1] = scenario.vms[0].clone();
    let mut notes = Notes::default();
    let machine = Machine::new(4, 2);
    let mut simulation = Simulation::new(&machine, &scenario, &mut notes).unwrap();
    simulation.run_until(scenario.length());
    let outcome = simulation.finish();
    (notes, outcome)
}

#[test]
fn queue_without_its_front_end_is_known_and_moves() {
    let (notes, outcome) = noted();
    let at = |time| notes.seen.iter().find(|of| of.now == ms(time)).unwrap();
    let threads = [100, 200, 210, 900].map(|time| at(time).queues[0].thread);
    let [first, second] = [0, 1].map(|place| at(100).threads[place].id);
    assert_eq!(threads, [first, first, second, second]);
    assert_eq!((outcome.whole.moves, at(300).queues.len()), (1, 2));
    // What it has done is not forgotten, and it goes on there.
    let done = [140, 300, 900].map(|time| at(time).queues[0].requests);
    assert!(done[0] > 0 && done[0] <= done[1] && done[1] < done[2], "{done:?}");
    assert!(at(900).threads[1].busy > at(300).threads[1].busy);
}

#[test]
fn vms_without_front_ends_are_not_seen_and_their_cpus_stay_known() {
    let (notes, _) = noted();
    let seen = |time| {
        let at = notes.seen.iter().find(|of| of.now == ms(time)).unwrap();
        (at.vms.len(), at.cpus.iter().filter(|cpu| cpu.vcpus).count())
    };
    // The kernel's times are looked at from 10 ms on, each 100 ms.
    assert_eq!([110, 210, 310, 410].map(seen), [(2, 2), (0, 2), (0, 2), (2, 2)]);
}

/// Rows of docs/results/simulate/costs.txt: vCPUs on the other CPU than the IOThread, and on its own.
#[test]
fn default_costs_give_back_the_figures_that_they_come_from() {
    for (cpu, queues, depth, measured, within) in [
        (0, 1, 32, 1_457_630.0, 1.05),
        (0, 4, 32, 1_346_674.0, 1.15),
        (1, 1, 1, 232_824.0, 1.1),
        (1, 4, 1, 218_746.0, 1.05),
        (0, 1, 1, 44_486.0, 1.05),
        (0, 4, 1, 151_120.0, 1.15),
    ] {
        let mut machine = Machine::new(2, 1);
        machine.vcpus = vec![CpuId::new(cpu)];
        let outcome = run(&machine, &second(&vec![Load::Depth(depth); queues]));
        let ratio = outcome.whole.iops / measured;
        let row = format!("{queues} queues, depth {depth}, CPU {cpu}");
        assert!((0.95..=within).contains(&ratio), "{row}: {ratio}");
    }
}

/// Frames to a VM come by themselves and leave nothing behind; those that it sends are as requests without a disk.
#[test]
fn frames_of_both_directions_take_what_they_cost() {
    let mut machine = Machine::new(4, 1);
    machine.costs = Costs { frame: us(2), frame_kib: us(1), client_frame: us(1), ..free() };
    // A disk of the machine's has no part in it.
    let config: SsdConfig = "ref-4x250".parse().unwrap();
    machine.backend = Backend::Ssd { config, devices: 1, schedule: false };
    for (queue, load) in
        [(1, Load::Depth(32)), (2, Load::Depth(32)), (1, Load::Rate(Iops::new(50_000.0).unwrap()))]
    {
        let mut scenario = second(&[load]);
        let vm = &mut scenario.vms[0];
        vm.pairs = 1;
        vm.streams[0].queue = queue;
        vm.streams[0].block = Bytes::new(1_024);
        // Time for what is in flight at the end.
        scenario.vms[0].streams[0].span = span(0, 990);
        let outcome = run(&machine, &scenario);
        let whole = &outcome.whole;
        // 3 µs each, or as many as come.
        let expected = if matches!(load, Load::Depth(_)) { 330_000.0 } else { 49_500.0 };
        assert!((whole.iops / expected - 1.0).abs() < 0.02, "{queue}: {}", whole.iops);
        assert!((whole.busy - expected * 3e-6).abs() < 0.02, "{queue}: {}", whole.busy);
        assert_eq!((whole.frames, whole.frame_bytes), (whole.requests, 1_024 * whole.requests));
        assert_eq!((outcome.counts.in_flight, outcome.counts.issued), (0, whole.frames));
        // 1.33 each and 1 KiB of 15.
        let progress = whole.progress().io / whole.iops;
        assert!((progress - 1.4).abs() < 1e-6, "{progress}");
    }
}

/// What docs/io-cores.md says of 8 CPUs, with shorter phases. Each phase is worth at least 0.9 of what the best number is for
/// it, the mix of disks and network devices 0.8, which is best served where disks have IOThreads of their own, and all of them more than under any number or published policy.
#[test]
fn network_phases_are_worth_more_than_under_any_number_or_published_policy() {
    use rtvirtio_iocores::utility::{Reference, Weights};
    let size =
        Size { vms: 8, queues: 2, depth: 16, rate: Iops::new(2_000.0).unwrap(), compute: 4.0 };
    let scenario = Scenario::generate(&PhaseKind::NETWORK, ms(5_000), &size, 1).unwrap();
    let outcome = |kind, threads| {
        let mut machine = Machine::new(8, threads);
        machine.costs = Costs::default().with_work(us(3), Nanos::new(40));
        let limits =
            Limits { cpus: machine.io_cpus(), min_iothreads: 1, max_iothreads: 8, borrow: true };
        let mut policy = policy(kind, limits);
        let mut simulation = Simulation::new(&machine, &scenario, &mut *policy).unwrap();
        simulation.run_until(scenario.length());
        let outcome = simulation.finish();
        let whole = [outcome.whole.progress()];
        outcome.phases.iter().map(|phase| phase.progress()).chain(whole).collect::<Vec<_>>()
    };
    let fixed = [1, 3, 4].map(|threads| outcome(Kind::Static, threads));
    let all: Vec<_> = fixed
        .into_iter()
        .chain([Kind::Iocm, Kind::Spdk, Kind::Dynamic].map(|kind| outcome(kind, 1)))
        .collect();
    let utilities: Vec<Vec<f64>> = (0..=PhaseKind::NETWORK.len())
        .map(|phase| {
            let of: Vec<_> = all.iter().map(|progress| progress[phase]).collect();
            let reference = Reference::of(&of);
            of.iter().map(|progress| Weights::default().utility(progress, &reference)).collect()
        })
        .collect();
    let (whole, phases) = utilities.split_last().unwrap();
    for (kind, of) in PhaseKind::NETWORK.iter().zip(phases) {
        let best = of[..3].iter().copied().fold(f64::MIN, f64::max);
        let least = if *kind == PhaseKind::DisksNics { 0.8 } else { 0.9 };
        assert!(of[5] >= least * best, "{kind}: {of:.3?}");
    }
    assert!(whole[..5].iter().all(|other| whole[5] > *other), "{whole:.3?}");
}
