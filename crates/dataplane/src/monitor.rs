//! The monitor: shows a policy what the IOThreads and queues do, and does what it decides.
//!
//! A policy (crate `iocores`) is pure: this observes for it, and carries out what it decides. A thread of its own takes a sample
//! every 10 ms ([`SAMPLE`]), every 40 ms while no queue does anything: a few counters of each queue and
//! IOThread. What the kernel says of IOThreads, vCPUs and the host's CPUs is read every tenth time
//! (`REFRESH`), from files that stay open. What is decided is carried out by the same live operations that
//! an operator has, one at a time with the operator's, and written to a log of the last
//! [`DECISIONS_KEPT`] with its reason and what all queues did in the second before and after.
//!
//! The policy `static` has no thread: it costs nothing. IOThreads that an operator has locked are left
//! alone, whatever a policy says. vCPUs are moved by the guard (`vcpus`), if there is one, and get their CPUs back
//! when the policy ends.
//!
//! The data path does not know of the monitor: a policy that panics ends with its thread, that is told
//! (event `policy_failed`, `GET /v1/policy`), and queues are served where they are.
//!
//! vCPUs are the threads of front-end processes that QEMU, Cloud Hypervisor or Firecracker named so.
//! Of a process that cannot be seen (another PID name space, `hidepid`, systemd's `ProtectProc=`)
//! nothing is known, and its VM is not shown.
//!
//! Properties (tests of the same name): `policy_that_panics_ends_alone`,
//! `locked_iothreads_are_left_alone`, `static_policy_has_no_thread`, `log_keeps_the_last_thousand`.

mod actuator;
mod host;
mod log;
mod sampler;
#[cfg(test)]
mod tests;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rtvirtio_iocores::{Action, Kind, Limits, SAMPLE, policy};
use rtvirtio_spec::control::{Decision, Event, Outcome, PolicyState};
use rtvirtio_spec::serve::{IoCores, Policy};
use rtvirtio_units::Nanos;

use crate::clock::now;
use crate::plane::iothreads::Core;
use crate::vcpus::Guard;
use actuator::{Actuator, MayBorrow};
use log::Log;
use sampler::Sampler;

pub(crate) use host::SchedStat;
pub(crate) use log::Counts;
pub use log::DECISIONS_KEPT;

/// Longest reason that is kept, in bytes.
const MAX_REASON: usize = 500;

/// The monitor of a data plane.
pub(crate) struct Monitor {
    core: Arc<Core>,
    guard: MayBorrow,
    /// Held while policies change, which waits for what the old one is doing.
    thread: Mutex<Option<Thread>>,
    shared: Arc<Shared>,
}

struct Thread {
    stop: Arc<AtomicBool>,
    handle: JoinHandle<()>,
}

/// What outlives a policy. Nobody holds it for long.
#[derive(Default)]
struct Shared {
    log: Mutex<Log>,
    status: Mutex<Status>,
}

/// What is in force.
#[derive(Default)]
struct Status {
    settings: IoCores,
    is_running: bool,
    /// Why it has ended by itself.
    failure: Option<String>,
}

type AnyPolicy = Box<dyn rtvirtio_iocores::Policy + Send>;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A policy is never called under one of them: what they guard is whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Monitor {
    /// With the policy `static`, and nobody who may move vCPUs.
    pub(crate) fn new(core: Arc<Core>) -> Self {
        Self { core, guard: Arc::default(), thread: Mutex::default(), shared: Arc::default() }
    }

    /// From now on policies may borrow vCPUs' CPUs, by this guard.
    pub(crate) fn borrow_by(&self, guard: Guard) {
        *lock(&self.guard) = Some(guard);
    }

    /// Whether policies may borrow vCPUs' CPUs.
    pub(crate) fn may_borrow(&self) -> bool {
        lock(&self.guard).is_some()
    }

    /// What is in force.
    pub(crate) fn settings(&self) -> IoCores {
        lock(&self.shared.status).settings.clone()
    }

    /// What is in force, and how it does.
    pub(crate) fn state(&self) -> PolicyState {
        let last_decision = lock(&self.shared.log).last();
        let status = lock(&self.shared.status);
        PolicyState {
            running: status.is_running,
            failure: status.failure.clone(),
            last_decision,
            ..PolicyState::new(&status.settings)
        }
    }

    /// Decisions after one of this number.
    pub(crate) fn decisions(&self, after: u64) -> Vec<Decision> {
        lock(&self.shared.log).after(after)
    }

    /// Decisions by kind and outcome.
    pub(crate) fn counts(&self) -> Counts {
        lock(&self.shared.log).counts()
    }

    /// Ends the policy in force, and begins another one. What the first has changed stays.
    ///
    /// # Errors
    /// The system has no thread left: then no policy is at work.
    pub(crate) fn set(&self, settings: IoCores) -> std::io::Result<()> {
        let IoCores { policy: wanted, cpus, min_iothreads, max_iothreads, borrow } =
            settings.clone();
        let limits = Limits {
            cpus,
            min_iothreads: min_iothreads as usize,
            max_iothreads: max_iothreads as usize,
            borrow,
        };
        let kind = match wanted {
            Policy::Static => None,
            Policy::RoundRobin => Some(Kind::RoundRobin),
            Policy::Dynamic | Policy::Advise => Some(Kind::Dynamic),
            Policy::Iocm => Some(Kind::Iocm),
            Policy::Spdk => Some(Kind::Spdk),
        };
        self.begin(settings, kind.map(|kind| policy(kind, limits)))
    }

    fn begin(&self, settings: IoCores, policy: Option<AnyPolicy>) -> std::io::Result<()> {
        let mut thread = lock(&self.thread);
        end(&mut thread);
        let named = settings.policy;
        let is_running = policy.is_some();
        *lock(&self.shared.status) = Status { settings, is_running, failure: None };
        self.core.tell(Event::PolicySet { policy: named });
        let Some(policy) = policy else { return Ok(()) };
        let stop = Arc::new(AtomicBool::new(false));
        let actuator = Actuator::new(Arc::clone(&self.guard));
        let watch =
            Watch::new(Arc::clone(&self.core), Arc::clone(&self.shared), named, policy, actuator);
        let builder = std::thread::Builder::new().name("monitor".to_owned());
        let stopped = Arc::clone(&stop);
        let handle = builder
            .spawn(move || watch.run(&stopped))
            .inspect_err(|error| self.shared.fail(error.to_string()))?;
        *thread = Some(Thread { stop, handle });
        Ok(())
    }

    /// Ends the policy, before the data plane does.
    pub(crate) fn stop(&self) {
        end(&mut lock(&self.thread));
    }
}

impl Shared {
    fn fail(&self, reason: String) {
        let mut status = lock(&self.status);
        status.is_running = false;
        status.failure = Some(reason);
    }
}

fn end(thread: &mut Option<Thread>) {
    if let Some(Thread { stop, handle }) = thread.take() {
        stop.store(true, Relaxed);
        handle.thread().unpark();
        let _ = handle.join();
    }
}

/// A policy at work.
struct Watch {
    core: Arc<Core>,
    shared: Arc<Shared>,
    named: Policy,
    policy: AnyPolicy,
    sampler: Sampler,
    actuator: Actuator,
}

impl Watch {
    fn new(
        core: Arc<Core>,
        shared: Arc<Shared>,
        named: Policy,
        policy: AnyPolicy,
        actuator: Actuator,
    ) -> Self {
        Self { core, shared, named, policy, sampler: Sampler::default(), actuator }
    }

    fn run(mut self, stop: &AtomicBool) {
        // Nothing that it leaves half done is used again.
        let ended = catch_unwind(AssertUnwindSafe(|| self.watch(stop)));
        self.actuator.give_back();
        let Err(panic) = ended else { return };
        let words = panic.downcast_ref::<&str>().map(|words| (*words).to_owned());
        let words = words.or_else(|| panic.downcast_ref::<String>().cloned());
        let reason = short(words.unwrap_or_else(|| "it panicked".to_owned()));
        self.shared.fail(reason.clone());
        self.core.tell(Event::PolicyFailed { policy: self.named, reason });
    }

    fn watch(&mut self, stop: &AtomicBool) {
        let mut due = now();
        while !stop.load(Relaxed) {
            let time = now();
            if time < due {
                std::thread::park_timeout(Duration::from_nanos(due - time));
                continue;
            }
            self.look(time);
            // A wake-up is what most of a sample costs while there is nothing to see.
            let pause = if self.sampler.is_at_rest() { 4 * SAMPLE.get() } else { SAMPLE.get() };
            // Who comes late does not catch up.
            due = (due + pause).max(time);
        }
    }

    /// Takes a sample and does what the policy decides.
    fn look(&mut self, time: u64) {
        self.sampler.sample(&self.core, Nanos::new(time));
        if self.actuator.reapply_vcpu_affinity(&self.sampler) {
            self.sampler.look_again();
        }
        let measured = lock(&self.shared.log).measure(time, &self.sampler);
        for number in measured {
            self.core.tell(Event::DecisionMeasured { number });
        }
        for decision in self.policy.step(self.sampler.snapshot()) {
            let reason = short(decision.reason);
            let began = now();
            let (action, outcome, error) = if self.named == Policy::Advise {
                (actuator::describe(&decision.action, &self.sampler), Outcome::Advised, None)
            } else {
                self.actuator.apply(&decision.action, &self.sampler, &self.core)
            };
            if let Action::SetVcpuCpus { cpus } = &decision.action {
                if outcome == Outcome::Done {
                    self.sampler.expect(cpus);
                }
                self.sampler.look_again();
            }
            let text = action.to_string();
            let mut log = lock(&self.shared.log);
            let number = log.add(time, |number, before| Decision {
                number,
                time_ns: Nanos::from(
                    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default(),
                ),
                policy: self.named,
                action,
                reason: reason.clone(),
                outcome,
                error,
                took_ns: Nanos::new(now().saturating_sub(began)),
                before,
                after: None,
            });
            self.core.tell(Event::Decision { number, action: text, reason, outcome });
        }
    }
}

/// A monitor without its thread, for benchmarks: each look is asked for. It advises.
#[cfg(feature = "test-utils")]
pub struct Probe(Watch);

#[cfg(feature = "test-utils")]
impl std::fmt::Debug for Probe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Probe").finish_non_exhaustive()
    }
}

#[cfg(feature = "test-utils")]
impl Probe {
    pub(crate) fn new(core: &Arc<Core>, limits: Limits) -> Self {
        let policy = policy(Kind::Dynamic, limits);
        let core = Arc::clone(core);
        let actuator = Actuator::new(Arc::default());
        Self(Watch::new(core, Arc::default(), Policy::Advise, policy, actuator))
    }

    /// What the monitor does for each sample; `time` is that of the monotonic clock, or later.
    pub fn look(&mut self, time: Nanos) {
        self.0.look(time.get());
    }
}

/// A text that is kept, cut if it is too long.
fn short(mut text: String) -> String {
    text.truncate(text.floor_char_boundary(MAX_REASON));
    text
}
