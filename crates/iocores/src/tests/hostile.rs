//! Snapshots that no machine makes: what a decision may be holds for these too.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use proptest::prelude::*;
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use rtvirtio_units::{CpuId, Nanos};

use super::*;

/// A host that lies.
struct Liar {
    random: Pcg64Mcg,
    state: Snapshot,
    limits: Limits,
    next: u32,
}

impl Liar {
    fn new(seed: u64, queues: u32) -> Self {
        let mut random = Pcg64Mcg::seed_from_u64(seed);
        let io: u32 = random.random_range(1..8);
        let cpus: Vec<_> = (0..io).map(CpuId::new).collect();
        let most = random.random_range(1..=cpus.len());
        let limits = Limits {
            min_iothreads: random.random_range(1..=most),
            max_iothreads: most,
            cpus,
            borrow: random.random_bool(0.5),
        };
        let cpu =
            |id| Cpu { id: CpuId::new(id), idle: Nanos::ZERO, vcpus: random.random_bool(0.5) };
        let cpus = (0..io + 2).map(cpu).collect();
        let mut liar =
            Self { random, state: Snapshot { cpus, ..Snapshot::default() }, limits, next: 0 };
        liar.add_thread(Some(CpuId::new(0)));
        for id in 0..queues {
            liar.add_queue(id);
        }
        liar.state.vms.push(Vm::new(VmId(0)));
        liar
    }

    fn add_thread(&mut self, cpu: Option<CpuId>) -> ThreadId {
        let id = ThreadId(self.next);
        self.next += 1;
        self.state.threads.push(Thread {
            id,
            cpu,
            locked: self.random.random_bool(0.2),
            busy: Nanos::ZERO,
            poll: Nanos::ZERO,
            sleep: Nanos::ZERO,
            ran: Nanos::ZERO,
            waited: Nanos::ZERO,
        });
        id
    }

    fn add_queue(&mut self, id: u32) {
        let Some(last) = self.state.threads.last() else { return };
        self.state.queues.push(Queue::new(QueueId(id), VmId(id / 3), last.id));
    }

    /// Some time later, perhaps.
    fn pass(&mut self) {
        let random = &mut self.random;
        let ms = match random.random_range(0..20) {
            0 => 0,
            1 => random.random_range(0..3_000),
            _ => 10,
        };
        let now = self.state.now.saturating_add(Nanos::from_millis(ms));
        self.state.now = now;
        if random.random_bool(0.3) {
            self.state.measured = now;
        }
        let mut count = |of: &mut Nanos| {
            *of = match random.random_range(0..100) {
                0 => Nanos::new(random.random()),
                1 => Nanos::ZERO,
                _ => of.saturating_add(Nanos::from_millis(random.random_range(0..=ms + 2))),
            }
        };
        for thread in &mut self.state.threads {
            for of in [&mut thread.busy, &mut thread.ran, &mut thread.waited, &mut thread.sleep] {
                count(of);
            }
        }
        for queue in &mut self.state.queues {
            count(&mut queue.busy);
            count(&mut queue.waited);
        }
        self.state.cpus.iter_mut().for_each(|cpu| count(&mut cpu.idle));
        for vm in &mut self.state.vms {
            count(&mut vm.ran);
            count(&mut vm.waited);
        }
        for queue in &mut self.state.queues {
            queue.backlogged = random.random_bool(0.3);
            queue.requests = match random.random_range(0..100) {
                0 => random.random(),
                _ => queue.requests.saturating_add(random.random_range(0..1_000)),
            };
            queue.bytes = queue.requests.saturating_mul(random.random_range(0..100_000));
            queue.calls = queue.calls.saturating_add(random.random_range(0..1_000));
        }
        if random.random_bool(0.05) {
            let vcpu = |id| Vcpu { id: VcpuId(id), cpu: None, turns: u64::from(id) << 60 };
            self.state.vcpus = (0..random.random_range(0..9)).map(vcpu).collect();
        }
        for vcpu in &mut self.state.vcpus {
            vcpu.cpu = random.random_bool(0.9).then(|| CpuId::new(random.random_range(0..12)));
            // Now and then as often as a queue's driver was called.
            let queue = self.state.queues.get(vcpu.id.0 as usize);
            vcpu.turns = queue.filter(|_| random.random_bool(0.99)).map_or(0, |of| of.calls);
        }
        if random.random_bool(0.02) && self.state.threads.len() > 1 {
            let gone = random.random_range(0..self.state.threads.len());
            self.state.threads.remove(gone);
        }
        if random.random_bool(0.05) && !self.state.queues.is_empty() {
            let gone = random.random_range(0..self.state.queues.len());
            self.state.queues.remove(gone);
        }
        if random.random_bool(0.05) {
            let thread = random.random_range(0..self.state.threads.len());
            self.state.threads[thread].locked ^= true;
        }
        if random.random_bool(0.05) {
            let cpu = random.random_range(0..self.state.cpus.len());
            self.state.cpus[cpu].vcpus ^= true;
        }
    }

    /// Does it, if it may be done at all.
    fn apply(&mut self, decision: &Decision) {
        let state = &self.state;
        let unlocked: BTreeSet<_> =
            state.threads.iter().filter(|thread| !thread.locked).map(|thread| thread.id).collect();
        let of: BTreeMap<_, _> =
            state.queues.iter().map(|queue| (queue.id, queue.thread)).collect();
        assert!(decision.reason.chars().any(|c| c.is_ascii_digit()));
        let mut moves = Vec::new();
        match &decision.action {
            Action::AddThread { cpu, queues } => {
                assert!(self.limits.cpus.contains(cpu));
                assert!(
                    state.threads.iter().all(|thread| thread.cpu != Some(*cpu)),
                    "{decision:?}"
                );
                assert!(state.threads.len() < self.limits.max_iothreads);
                let host = state.cpus.iter().find(|of| of.id == *cpu);
                assert!(self.limits.borrow || host.is_none_or(|cpu| !cpu.vcpus), "{decision:?}");
                for queue in queues {
                    assert!(unlocked.contains(&of[queue]));
                }
                let id = ThreadId(self.next);
                moves.extend(queues.iter().map(|&queue| (queue, id)));
                self.add_thread(Some(*cpu));
                self.state.threads.last_mut().expect("just added").locked = false;
            }
            Action::RemoveThread { thread, moves: its } => {
                assert!(unlocked.contains(thread), "{decision:?}");
                assert!(state.threads.len() > self.limits.min_iothreads);
                let left: BTreeSet<_> =
                    of.iter().filter(|(_, on)| *on == thread).map(|(queue, _)| *queue).collect();
                assert_eq!(left, its.iter().map(|(queue, _)| *queue).collect());
                for (_, to) in its {
                    assert!(to != thread && unlocked.contains(to), "{decision:?}");
                }
                moves.clone_from(its);
                self.state.threads.retain(|of| of.id != *thread);
            }
            Action::MoveQueue { queue, to } => {
                assert!(unlocked.contains(&of[queue]) && unlocked.contains(to), "{decision:?}");
                assert_ne!(of[queue], *to);
                moves.push((*queue, *to));
            }
            Action::SetVcpuCpus { cpus } => {
                assert!(self.limits.borrow && !cpus.is_empty());
                assert!(cpus.is_sorted());
                for cpu in cpus {
                    assert!(state.cpus.iter().any(|of| of.id == *cpu));
                }
                for cpu in &mut self.state.cpus {
                    cpu.vcpus = cpus.contains(&cpu.id);
                }
            }
            Action::PlaceVcpus { at } => {
                assert!(self.limits.borrow && !at.is_empty() && at.is_sorted());
                for (vcpu, cpu) in at {
                    assert!(self.state.cpus.iter().any(|of| of.id == *cpu && of.vcpus));
                    assert!(self.state.vcpus.iter().any(|of| of.id == *vcpu));
                }
            }
        }
        for (queue, to) in moves {
            let queue = self.state.queues.iter_mut().find(|of| of.id == queue);
            queue.expect("checked").thread = to;
        }
    }
}

/// What the header of `dynamic` promises of moves and dwell.
#[derive(Default)]
struct Bounds {
    most: usize,
    moves: VecDeque<Nanos>,
    moved: BTreeMap<QueueId, Nanos>,
    added: Option<Nanos>,
    removed: Option<Nanos>,
}

impl Bounds {
    fn check(&mut self, now: Nanos, decisions: &[Decision]) {
        let passed = |at: Option<Nanos>, ms: u64| {
            at.is_none_or(|at| now.saturating_sub(at) >= Nanos::from_millis(ms))
        };
        let (mut queues, mut adds, mut removes) = (Vec::new(), false, false);
        for decision in decisions {
            match &decision.action {
                Action::AddThread { queues: its, .. } => {
                    adds = true;
                    queues.extend(its);
                }
                Action::RemoveThread { moves, .. } => {
                    removes = true;
                    queues.extend(moves.iter().map(|(queue, _)| *queue));
                }
                Action::MoveQueue { queue, .. } => queues.push(*queue),
                Action::SetVcpuCpus { .. } | Action::PlaceVcpus { .. } => {}
            }
        }
        let fours = self.most.div_ceil(4);
        assert!(queues.len() <= 10 * fours);
        for queue in queues {
            assert!(passed(self.moved.insert(queue, now), 200));
            self.moves.push_back(now);
        }
        self.moves.retain(|&at| now.saturating_sub(at) < Nanos::from_millis(1_000));
        assert!(self.moves.len() <= 50 * fours);
        assert!(!(adds && removes));
        if adds || removes {
            assert!(
                passed(self.added, 200) && passed(self.removed, if adds { 200 } else { 1_000 })
            );
        }
        self.added = if adds { Some(now) } else { self.added };
        self.removed = if removes { Some(now) } else { self.removed };
    }
}

fn run(kind: Kind, seed: u64, queues: u32, steps: u32) {
    let mut liar = Liar::new(seed, queues);
    let mut policy = policy(kind, liar.limits.clone());
    let mut bounds = Bounds { most: liar.limits.max_iothreads, ..Bounds::default() };
    for _ in 0..steps {
        liar.pass();
        let decisions = policy.step(&liar.state);
        if kind == Kind::Dynamic {
            bounds.check(liar.state.now, &decisions);
        }
        // Sometimes none of them can be done.
        let before = (liar.random.random_bool(0.1)).then(|| liar.state.clone());
        for decision in &decisions {
            liar.apply(decision);
        }
        if let Some(before) = before {
            liar.state = before;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Also: `locked_iothreads_are_left_alone`, `number_stays_within_limits`.
    #[test]
    fn decisions_refer_only_to_what_exists(seed: u64, kind in 0..Kind::ALL.len(), queues in 0_u32..40) {
        run(Kind::ALL[kind], seed, queues, 1_500);
    }

    #[test]
    fn moves_and_dwell_are_bounded(seed: u64, queues in 0_u32..200) {
        run(Kind::Dynamic, seed, queues, 1_000);
    }
}

#[test]
fn thousands_of_queues_are_no_exception() {
    for kind in Kind::ALL {
        run(kind, 7, 2_000, 150);
    }
}
