//! The monitor over a registry as it is, with policies that do as they are told.

use std::sync::mpsc;
use std::time::Instant;

use rtvirtio_engine::testing::has_io_uring;
use rtvirtio_iocores::{Action, Decision as Wanted, QueueId, Snapshot, ThreadId, VcpuId};
use rtvirtio_spec::control::PolicyAction;
use rtvirtio_spec::serve::IoThread;
use rtvirtio_units::{CpuId, DiskName, IoThreadName};
use serde_json::json;
use tokio::sync::broadcast;

use super::*;
use crate::drr::cost;
use crate::plane::{HandedFds, Plane, Registry};

/// Does what it is sent, and shows what it saw.
struct Puppet {
    orders: mpsc::Receiver<Action>,
    seen: mpsc::SyncSender<Snapshot>,
}

impl rtvirtio_iocores::Policy for Puppet {
    fn step(&mut self, snapshot: &Snapshot) -> Vec<Wanted> {
        // Nobody may have looked yet: the next one will do.
        let _ = self.seen.try_send(snapshot.clone());
        let decide = |action| Wanted { action, reason: "because".to_owned() };
        self.orders.try_iter().map(decide).collect()
    }
}

struct Panics;

impl rtvirtio_iocores::Policy for Panics {
    fn step(&mut self, _: &Snapshot) -> Vec<Wanted> {
        panic!("{}", "no idea ".repeat(100));
    }
}

/// A disk of two queues on two IOThreads, and a monitor.
struct Rig {
    registry: Registry,
    monitor: Monitor,
    orders: mpsc::Sender<Action>,
    seen: mpsc::Receiver<Snapshot>,
    events: broadcast::Receiver<Event>,
    decisions: u64,
    _directory: tempfile::TempDir,
}

fn name(text: &str) -> IoThreadName {
    IoThreadName::new(text).unwrap()
}

fn disk() -> DiskName {
    DiskName::new("disk").unwrap()
}

impl Rig {
    /// None, and the test is skipped, where IOThreads get no rings.
    fn new(named: Policy) -> Option<Self> {
        if !has_io_uring() {
            return None;
        }
        let registry = Registry::new(Arc::new(|_, _| ())).unwrap();
        for iothread in ["iot0", "iot1"] {
            let raw = serde_json::from_value(json!({ "name": iothread })).unwrap();
            registry.add_iothread(IoThread::new(raw).unwrap()).unwrap();
        }
        let directory = tempfile::tempdir().unwrap();
        let device = json!({
            "name": "disk", "vm": "vm", "queues": 2,
            "socket": directory.path().join("disk.sock"),
            "engine": { "type": "ram", "size": 1 << 20 },
        });
        let device = serde_json::from_value(device).unwrap();
        registry.add_device(device, HandedFds::default()).unwrap();
        let monitor = Monitor::new(Arc::clone(registry.core()));
        let (orders, for_puppet) = mpsc::channel();
        let (shown, seen) = mpsc::sync_channel(1);
        let puppet = Puppet { orders: for_puppet, seen: shown };
        let events = registry.events();
        let settings = IoCores { policy: named, ..IoCores::default() };
        monitor.begin(settings, Some(Box::new(puppet))).unwrap();
        let _directory = directory;
        Some(Self { registry, monitor, orders, seen, events, decisions: 0, _directory })
    }

    /// What a policy is shown from now on.
    fn snapshot(&self) -> Snapshot {
        // One may have waited here since before, and one may have been taken before.
        let next = || self.seen.recv_timeout(Duration::from_secs(20)).unwrap();
        next();
        next();
        next()
    }

    /// What becomes of a decision.
    fn decide(&mut self, action: Action) -> Decision {
        self.orders.send(action).unwrap();
        let start = Instant::now();
        loop {
            if let [decision] = &self.monitor.decisions(self.decisions)[..] {
                self.decisions = decision.number;
                return decision.clone();
            }
            assert!(start.elapsed() < Duration::from_secs(20), "it is not decided");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn events(&mut self) -> Vec<Event> {
        std::iter::from_fn(|| self.events.try_recv().ok()).collect()
    }

    /// The next one, which will come.
    fn event(&mut self) -> Event {
        let start = Instant::now();
        loop {
            if let Ok(event) = self.events.try_recv() {
                return event;
            }
            assert!(start.elapsed() < Duration::from_secs(20), "there is no event");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn mapping(&self) -> Vec<String> {
        let mapping = self.registry.mapping(&disk()).unwrap();
        mapping.by_queue().iter().map(ToString::to_string).collect()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.monitor.stop();
    }
}

/// A CPU that this process may run on.
fn cpu() -> CpuId {
    let set = rustix::thread::sched_getaffinity(None).unwrap();
    let first = (0..rustix::thread::CpuSet::MAX_CPU).find(|&cpu| set.is_set(cpu)).unwrap();
    CpuId::new(first as u32)
}

#[test]
fn decisions_are_carried_out_logged_and_told() {
    let Some(mut rig) = Rig::new(Policy::Dynamic) else { return };
    let seen = rig.snapshot();
    let ids: Vec<ThreadId> = seen.threads.iter().map(|thread| thread.id).collect();
    let [first, second] = ids[..] else { panic!("two IOThreads") };
    let queues: Vec<_> = seen.queues.iter().map(|queue| (queue.id, queue.thread)).collect();
    assert_eq!(queues, [(QueueId(0), first), (QueueId(1), second)]);
    assert!(seen.threads.iter().all(|thread| thread.cpu.is_none() && !thread.locked));
    assert!(!seen.cpus.is_empty() && seen.vms.is_empty());
    assert!(rig.monitor.state().running);

    let added = rig.decide(Action::AddThread { cpu: cpu(), queues: vec![QueueId(0)] });
    assert_eq!((added.outcome, added.error, added.number), (Outcome::Done, None, 1));
    assert_eq!((added.reason.as_str(), added.policy), ("because", Policy::Dynamic));
    assert_eq!(added.action.to_string(), format!("add auto1 on CPU {} for 1 queues", cpu()));
    assert_eq!(rig.mapping(), ["auto1", "iot1"]);
    let seen = rig.snapshot();
    let third = seen.threads[2].id;
    assert_eq!((seen.threads[2].cpu, seen.queues[0].thread), (Some(cpu()), third));
    assert!(third > second);

    let move_queue = Action::MoveQueue { queue: QueueId(1), to: third };
    assert_eq!(rig.decide(move_queue).outcome, Outcome::Done);
    let moves = vec![(QueueId(0), first), (QueueId(1), first)];
    let removed = rig.decide(Action::RemoveThread { thread: third, moves });
    assert_eq!((removed.outcome, removed.error), (Outcome::Done, None));
    assert_eq!(rig.mapping(), ["iot0", "iot0"]);
    let kinds: Vec<_> = rig.events().iter().map(|e| serde_json::to_value(e).unwrap()).collect();
    let kinds: Vec<_> = kinds.iter().map(|event| event["event"].as_str().unwrap()).collect();
    let expected = [
        "policy_set",
        "iothread_added",
        "queue_moved",
        "decision",
        "queue_moved",
        "decision",
        "queue_moved",
        "queue_moved",
        "iothread_removed",
        "decision",
    ];
    assert_eq!(kinds, expected);
    let done = |kind| ((kind, Outcome::Done), 1);
    let counts = [done("add_iothread"), done("move_queue"), done("remove_iothread")];
    assert_eq!(rig.monitor.counts(), counts.into());
    // The name of one that is gone is not given again.
    let again = rig.decide(Action::AddThread { cpu: cpu(), queues: vec![] });
    assert!(again.action.to_string().starts_with("add auto2 "), "{}", again.action);
}

#[test]
fn what_cannot_be_done_is_said() {
    let Some(mut rig) = Rig::new(Policy::Dynamic) else { return };
    let seen = rig.snapshot();
    let (first, second) = (seen.threads[0].id, seen.threads[1].id);
    let mut fails = |action, words: &str| {
        let decision = rig.decide(action);
        let error = decision.error.unwrap_or_default();
        assert_eq!(decision.outcome, Outcome::Failed, "{words}");
        assert!(error.contains(words), "{error}");
        decision.action
    };
    let gone = Action::MoveQueue { queue: QueueId(9), to: first };
    assert_eq!(fails(gone, "no such queue"), PolicyAction::Gone);
    let nowhere = Action::MoveQueue { queue: QueueId(0), to: ThreadId(99) };
    assert_eq!(fails(nowhere, "no such IOThread"), PolicyAction::Gone);
    fails(Action::RemoveThread { thread: second, moves: vec![] }, "has 1 queues");
    fails(Action::SetVcpuCpus { cpus: vec![cpu()] }, "nobody may move vCPUs");
    fails(Action::PlaceVcpus { at: vec![(VcpuId(1), cpu())] }, "nobody may move vCPUs");
    let no_cpu = CpuId::new(1023);
    fails(Action::AddThread { cpu: no_cpu, queues: vec![QueueId(0)] }, "cannot start iothread");
    // What was done of it is named.
    let part = Action::AddThread { cpu: cpu(), queues: vec![QueueId(9), QueueId(1)] };
    let part = fails(part, "1 of 2 queues moved: there is no such queue");
    assert!(part.to_string().starts_with("add auto2 on CPU "), "{part}");
    assert_eq!(rig.mapping(), ["iot0", "auto2"]);
    assert_eq!(rig.snapshot().threads.len(), 3);
}

#[test]
fn locked_iothreads_are_left_alone() {
    let Some(mut rig) = Rig::new(Policy::Dynamic) else { return };
    let before = rig.snapshot();
    let (first, second) = (before.threads[0].id, before.threads[1].id);
    rig.registry.lock_iothread(&name("iot0"), true).unwrap();
    let seen = rig.snapshot();
    assert!(seen.threads[0].locked && !seen.threads[1].locked);
    for action in [
        Action::MoveQueue { queue: QueueId(0), to: second },
        Action::MoveQueue { queue: QueueId(1), to: first },
        Action::RemoveThread { thread: first, moves: vec![(QueueId(0), second)] },
    ] {
        let decision = rig.decide(action);
        assert_eq!(decision.error.as_deref(), Some("iot0 is locked"));
    }
    assert_eq!(rig.mapping(), ["iot0", "iot1"]);
    // The operator's own word counts.
    rig.registry.move_queue(&disk(), 0, &name("iot1")).unwrap();
    assert_eq!(rig.snapshot().queues[0].thread, second);
}

#[test]
fn advice_is_logged_and_nothing_is_done() {
    let Some(mut rig) = Rig::new(Policy::Advise) else { return };
    let to = rig.snapshot().threads[1].id;
    let decision = rig.decide(Action::MoveQueue { queue: QueueId(0), to });
    assert_eq!((decision.outcome, decision.error), (Outcome::Advised, None));
    assert_eq!(decision.action.to_string(), "move disk:0 from iot0 to iot1");
    assert_eq!(rig.mapping(), ["iot0", "iot1"]);
}

#[test]
fn sample_shows_what_queues_have_done_and_what_stands() {
    let Some(rig) = Rig::new(Policy::Dynamic) else { return };
    let stats = rig.registry.core().look().queues.remove(1).stats;
    rig.snapshot();
    stats.start(3);
    stats.see(2);
    stats.busy(1_000);
    stats.waited(500);
    stats.count(crate::stats::Op::Read, 4096);
    let queue = rig.snapshot().queues.remove(1);
    assert_eq!((queue.requests, queue.bytes, queue.in_flight), (1, 4096, 2));
    assert_eq!((queue.busy.get(), queue.waited.get(), queue.backlogged), (1_000, 500, true));
    stats.start(2);
    assert!(!rig.snapshot().queues[1].backlogged);
}

#[test]
fn sampler_is_at_rest_once_nothing_has_happened_for_a_control_period() {
    let Some(rig) = Rig::new(Policy::Dynamic) else { return };
    let mut sampler = Sampler::default();
    let mut rests_after = |samples: u64| {
        (0..samples).for_each(|at| sampler.sample(rig.registry.core(), Nanos::new(at)));
        sampler.is_at_rest()
    };
    assert!(!rests_after(9) && rests_after(1) && rests_after(5));
    let stats = rig.registry.core().look().queues.remove(1).stats;
    stats.start(1);
    assert!(!rests_after(1) && !rests_after(20), "a request is in flight");
    stats.count(crate::stats::Op::Read, 4096);
    assert!(!rests_after(10) && rests_after(1));
}

#[test]
fn policy_that_panics_ends_alone() {
    let Some(mut rig) = Rig::new(Policy::Dynamic) else { return };
    let settings = IoCores { policy: Policy::Iocm, ..IoCores::default() };
    rig.monitor.begin(settings, Some(Box::new(Panics))).unwrap();
    let start = Instant::now();
    while rig.monitor.state().running {
        assert!(start.elapsed() < Duration::from_secs(20), "it does not end");
        std::thread::sleep(Duration::from_millis(1));
    }
    let state = rig.monitor.state();
    let failure = state.failure.unwrap();
    assert!(failure.starts_with("no idea no idea") && failure.len() == 500, "{failure}");
    assert_eq!(state.policy, Policy::Iocm);
    let told = Event::PolicyFailed { policy: Policy::Iocm, reason: failure };
    let all: Vec<_> =
        std::iter::from_fn(|| Some(rig.event()).filter(|event| *event != told)).collect();
    assert_eq!(all.last(), Some(&Event::PolicySet { policy: Policy::Iocm }));
    // The data plane serves on, and takes another policy.
    rig.registry.move_queue(&disk(), 0, &name("iot1")).unwrap();
    let settings = IoCores { policy: Policy::RoundRobin, ..IoCores::default() };
    rig.monitor.set(settings).unwrap();
    while rig.mapping() == ["iot1", "iot1"] {
        assert!(start.elapsed() < Duration::from_secs(20), "queues are not spread");
        std::thread::sleep(Duration::from_millis(1));
    }
    let state = rig.monitor.state();
    assert_eq!((state.running, state.failure), (true, None));
}

#[test]
fn static_policy_has_no_thread() {
    let Some(rig) = Rig::new(Policy::Dynamic) else { return };
    assert!(rig.monitor.state().running);
    rig.monitor.set(IoCores::default()).unwrap();
    assert!(!rig.monitor.state().running && lock(&rig.monitor.thread).is_none());
    assert!(rig.registry.policy().failure.is_none() && !rig.registry.policy().running);
}

#[test]
fn without_a_guard_only_policies_that_take_no_cpu_may_be_told_to_borrow() {
    let registry = Registry::new(Arc::new(|_, _| ())).unwrap();
    let set = |policy: &str| {
        let raw = json!({ "policy": policy, "cpus": [0], "borrow": true });
        registry.set_policy(serde_json::from_value(raw).unwrap())
    };
    let error = set("dynamic").unwrap_err().to_string();
    assert!(error.contains("CPUs cannot be borrowed"), "{error}");
    set("round-robin").unwrap();
    set("static").unwrap();
}

/// What frames count for policies is what turns are counted by, beside requests that take three times what those to RAM do.
#[test]
fn work_of_frames_is_what_their_turns_cost() {
    use rtvirtio_iocores::{QueueKind, utility::work};
    let request = 3.0 * cost::REQUEST_NS as f64;
    for (kind, bytes, cost) in [
        (QueueKind::Link, 60, cost::tap_ns(60)),
        (QueueKind::Link, 65_550, cost::tap_ns(65_550)),
        (QueueKind::Switch, 60, cost::port_ns(60)),
        (QueueKind::Switch, 65_550, cost::port_ns(65_550)),
        (QueueKind::Disk, 4_096, 3 * cost::REQUEST_NS),
    ] {
        let ratio = work(kind, 1, bytes) * request / cost as f64;
        assert!((0.8..=1.25).contains(&ratio), "{kind:?} of {bytes} bytes: {ratio}");
    }
}
