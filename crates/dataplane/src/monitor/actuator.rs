//! Carries decisions out, by what an operator could do too.

use std::collections::BTreeSet;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use rtvirtio_iocores::{Action, QueueId, ThreadId};
use rtvirtio_spec::control::{Outcome, PolicyAction, QueueName};
use rtvirtio_units::{CpuId, IoThreadName};

use super::sampler::Sampler;
use crate::plane::iothreads::Core;
use crate::vcpus::{Guard, Moved};

/// Queues of a decision that are named in the log.
const NAMED: usize = 64;

/// What was done, what became of it, and why not all of it was.
type Carried = (PolicyAction, Outcome, Option<String>);

/// Who moves vCPUs; none: nobody may, or the guard has ended.
pub(super) type MayBorrow = Arc<Mutex<Option<Guard>>>;

/// What carries decisions out.
#[derive(Debug)]
pub(super) struct Actuator {
    /// The number in the name of the last IOThread that was added.
    added: u64,
    guard: MayBorrow,
    /// Where vCPUs may run by the last decision; empty: wherever they could.
    vcpus: Vec<CpuId>,
    /// The sampler's last look at vCPUs that this was done for.
    look: u64,
}

/// A decision in the terms of the control API.
pub(super) fn describe(action: &Action, sampler: &Sampler) -> PolicyAction {
    let named = |queues: &mut dyn Iterator<Item = QueueId>| -> Vec<QueueName> {
        let name = |queue| {
            let found = sampler.queue(queue)?;
            Some(QueueName { device: found.device.clone(), queue: found.index })
        };
        queues.filter_map(name).take(NAMED).collect()
    };
    let described = match action {
        Action::AddThread { cpu, queues } => Some(PolicyAction::AddIothread {
            iothread: None,
            cpu: *cpu,
            queues: named(&mut queues.iter().copied()),
            count: queues.len() as u32,
        }),
        Action::RemoveThread { thread, moves } => {
            sampler.thread(*thread).map(|thread| PolicyAction::RemoveIothread {
                iothread: thread.name.clone(),
                queues: named(&mut moves.iter().map(|(queue, _)| *queue)),
                count: moves.len() as u32,
            })
        }
        Action::MoveQueue { queue, to } => {
            sampler.queue(*queue).zip(sampler.thread(*to)).map(|(found, to)| {
                let queue = QueueName { device: found.device.clone(), queue: found.index };
                let from = found.iothread.clone();
                PolicyAction::MoveQueue { queue, from, to: to.name.clone() }
            })
        }
        Action::SetVcpuCpus { cpus } => Some(PolicyAction::SetVcpuCpus { cpus: cpus.clone() }),
        Action::PlaceVcpus { at } => {
            let cpus: BTreeSet<CpuId> = at.iter().map(|(_, cpu)| *cpu).collect();
            let cpus = cpus.into_iter().collect();
            Some(PolicyAction::PlaceVcpus { count: at.len() as u32, cpus })
        }
    };
    described.unwrap_or(PolicyAction::Gone)
}

impl Actuator {
    pub(super) const fn new(guard: MayBorrow) -> Self {
        Self { added: 0, guard, vcpus: Vec::new(), look: 0 }
    }

    /// Does what was decided, as far as it can be done.
    pub(super) fn apply(&mut self, action: &Action, sampler: &Sampler, core: &Core) -> Carried {
        let mut described = describe(action, sampler);
        let done = match action {
            Action::AddThread { cpu, queues } => {
                let added = self.add(*cpu, sampler, core);
                if let PolicyAction::AddIothread { iothread, .. } = &mut described {
                    *iothread = added.as_ref().ok().cloned();
                }
                added.and_then(|name| move_all(queues, &name, sampler, core))
            }
            Action::RemoveThread { thread, moves } => remove(*thread, moves, sampler, core),
            Action::MoveQueue { queue, to } => move_queue(*queue, *to, sampler, core),
            Action::SetVcpuCpus { cpus } => {
                self.vcpus.clone_from(cpus);
                self.move_vcpus(sampler).map(drop)
            }
            Action::PlaceVcpus { at } => {
                let processes: Vec<i32> = sampler.processes().collect();
                let threads = at.iter().map(|&(vcpu, cpu)| (vcpu.0 as i32, cpu)).collect();
                self.with_guard(|guard| guard.place(threads, &processes))
                    .and_then(all_moved)
                    .map(drop)
            }
        };
        match done {
            Ok(()) => (described, Outcome::Done, None),
            Err(error) => (described, Outcome::Failed, Some(super::short(error))),
        }
    }

    /// Has vCPUs that came since the last decision run where that says. Whether any was moved.
    pub(super) fn reapply_vcpu_affinity(&mut self, sampler: &Sampler) -> bool {
        let look = sampler.looks();
        std::mem::replace(&mut self.look, look) != look
            && !self.vcpus.is_empty()
            && self.move_vcpus(sampler).is_ok_and(|changed| changed > 0)
    }

    /// Gives vCPUs what was taken from them.
    pub(super) fn give_back(&mut self) {
        if !std::mem::take(&mut self.vcpus).is_empty() {
            let _ = self.ask(&[]);
        }
    }

    /// How many vCPUs were moved.
    fn move_vcpus(&self, sampler: &Sampler) -> Result<u32, String> {
        let processes: Vec<i32> = sampler.processes().collect();
        self.ask(&processes).and_then(all_moved)
    }

    fn ask(&self, processes: &[i32]) -> Result<Moved, String> {
        self.with_guard(|guard| guard.keep_to(&self.vcpus, processes))
    }

    fn with_guard(
        &self,
        ask: impl FnOnce(&mut Guard) -> io::Result<Moved>,
    ) -> Result<Moved, String> {
        let mut guard = self.guard.lock().unwrap_or_else(PoisonError::into_inner);
        let asked = guard.as_mut().ok_or("nobody may move vCPUs")?;
        ask(asked).map_err(|error| {
            // What it still could do, it does as its socket closes.
            *guard = None;
            format!("the guard of vCPUs is gone: {error}")
        })
    }

    fn add(&mut self, cpu: CpuId, sampler: &Sampler, core: &Core) -> Result<IoThreadName, String> {
        let name = sampler.new_name(&mut self.added).ok_or("there is no name left")?;
        core.add_iothread(sampler.new_thread(name.clone(), cpu)).map_err(|e| words(&e))?;
        Ok(name)
    }
}

/// How many vCPUs were moved, if all were that could be.
fn all_moved(Moved { changed, outside, error }: Moved) -> Result<u32, String> {
    if let Some(error) = error {
        return Err(format!("{changed} vCPUs moved: {error}"));
    }
    if outside > 0 {
        return Err(format!("{changed} vCPUs moved, {outside} may run on none of these CPUs"));
    }
    Ok(changed)
}

/// Moves as many of these queues as it can.
fn move_all(
    queues: &[QueueId],
    to: &IoThreadName,
    sampler: &Sampler,
    core: &Core,
) -> Result<(), String> {
    let moves = queues.iter().map(|&queue| move_to(queue, to, sampler, core));
    let errors: Vec<String> = moves.filter_map(Result::err).collect();
    let moved = queues.len() - errors.len();
    match errors.into_iter().next() {
        Some(error) => Err(format!("{moved} of {} queues moved: {error}", queues.len())),
        None => Ok(()),
    }
}

fn remove(
    thread: ThreadId,
    moves: &[(QueueId, ThreadId)],
    sampler: &Sampler,
    core: &Core,
) -> Result<(), String> {
    let found = sampler.thread(thread).ok_or("it is no longer there")?;
    if found.locked {
        return Err(format!("{} is locked", found.name));
    }
    for &(queue, to) in moves {
        move_queue(queue, to, sampler, core)?;
    }
    core.remove_iothread(&found.name).map_err(|e| words(&e))
}

fn move_queue(queue: QueueId, to: ThreadId, sampler: &Sampler, core: &Core) -> Result<(), String> {
    let to = sampler.thread(to).ok_or("there is no such IOThread any more")?;
    if to.locked {
        return Err(format!("{} is locked", to.name));
    }
    move_to(queue, &to.name, sampler, core)
}

fn move_to(
    queue: QueueId,
    to: &IoThreadName,
    sampler: &Sampler,
    core: &Core,
) -> Result<(), String> {
    let found = sampler.queue(queue).ok_or("there is no such queue any more")?;
    let from = sampler.thread_by_name(&found.iothread);
    if from.is_some_and(|from| from.locked) {
        return Err(format!("{} is locked", found.iothread));
    }
    core.move_queue(&found.device, found.index, to).map(drop).map_err(|e| words(&e))
}

/// An error and its causes.
fn words(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |&error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
