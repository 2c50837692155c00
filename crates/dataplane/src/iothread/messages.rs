//! What an IOThread is told, and what it does then: queues that come, change and go.

use std::sync::{Arc, mpsc};

use rtvirtio_completion::Tokens;
use rtvirtio_engine::{Completions, Token};
use rtvirtio_qos::Running;
use rtvirtio_spec::plan::qemu::cpuset;
use rtvirtio_units::CpuId;
use rustix::io::Errno;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::{IoThread, Served, get, get_mut, kick_data, link_data};
use crate::clock::now;
use crate::key::TableKey;
use crate::mailbox::Sender;
use crate::queue::Queue;
use crate::schedule::Schedule;

/// Does something with a queue on the thread that has it.
pub(crate) type Edit = Box<dyn FnOnce(&mut Queue) + Send>;

/// What an IOThread is told. Who names a queue in a command holds its place in the pool until the answer, so that
/// no other queue has the key meanwhile.
pub(crate) enum ThreadMessage {
    /// Serve this queue. The answer says when its first turn began, ns.
    Adopt { queue: Box<Queue>, done: mpsc::Sender<u64> },
    /// Hand this queue to another thread, which answers; `left` says when it was let go.
    Release {
        key: TableKey,
        to: Sender<ThreadMessage>,
        left: mpsc::Sender<u64>,
        done: mpsc::Sender<u64>,
    },
    /// Fetch no more from this queue and give it back when nothing is in flight: for good, or to go on after a change.
    Stop { key: TableKey, for_good: bool, back: mpsc::Sender<Box<Queue>> },
    /// Change something.
    Edit { key: TableKey, edit: Edit, done: mpsc::Sender<()> },
    /// This queue has stopped: none of its results comes by any more.
    Forget(TableKey),
    /// To whom do you forward?
    Forwards(mpsc::Sender<Vec<(TableKey, Sender<ThreadMessage>)>>),
    /// Forward no more results to `past`, which is to end, but to where it forwards them.
    Reroute {
        past: Sender<ThreadMessage>,
        to: Arc<Vec<(TableKey, Sender<ThreadMessage>)>>,
        done: mpsc::Sender<()>,
    },
    /// A request has ended at another thread. `here`: it was started by the thread that reads this.
    Ended { token: Token, result: Ended, here: bool },
    /// A request's time has come, by its device's schedule.
    StartScheduled { token: Token, running: Running },
    /// A schedule has been changed: ask it again.
    Rescheduled(Arc<Schedule>),
    /// Run on these CPUs; all, if there are none. The answer is the error number of the attempt.
    /// `tokens`: of those CPUs, if it asks for some.
    Pin { cpus: Vec<CpuId>, tokens: Option<Arc<Tokens>>, done: mpsc::Sender<Result<(), PinError>> },
    /// End, once nothing is left.
    End,
}

/// How a request ended: raw entries of the ring may be short.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Ended {
    Raw(i32),
    Result(Result<(), Errno>),
}

impl Completions for Sender<ThreadMessage> {
    fn complete(&self, token: Token, result: Result<(), Errno>) {
        // A thread ends only when nothing is in flight that it started.
        let _ =
            self.post(ThreadMessage::Ended { token, result: Ended::Result(result), here: true });
    }
}

/// A queue that this thread has let go.
pub(super) struct Forward {
    pub(super) to: Sender<ThreadMessage>,
    /// Requests that were started here and have not ended.
    pub(super) outstanding: u16,
}

impl IoThread {
    pub(super) fn read_mail(&mut self) -> bool {
        if !self.mail.is_signaled() {
            return false;
        }
        self.mail.answer();
        while let Some(message) = self.mail.take() {
            self.read(message);
        }
        true
    }

    fn read(&mut self, message: ThreadMessage) {
        match message {
            ThreadMessage::Adopt { queue, done } => {
                self.adopt(queue);
                let _ = done.send(now());
            }
            ThreadMessage::Release { key, to, left, done } => {
                self.show(key);
                let Some(mut queue) = self.detach_queue(key) else { return };
                let _ = left.send(now());
                let outstanding = std::mem::take(&mut queue.started_here);
                self.forwards.insert(key, Forward { to: to.clone(), outstanding });
                // A thread is not ended while a move to it is under way.
                let _ = to.post(ThreadMessage::Adopt { queue, done });
            }
            ThreadMessage::Stop { key, for_good, back } => {
                if let Some(entry) = get_mut(&mut self.served, key) {
                    entry.stopping = Some(back);
                    if for_good {
                        entry.queue.set_ending();
                    }
                }
                self.wake(key);
            }
            ThreadMessage::Edit { key, edit, done } => {
                self.submit_all();
                if let Some(entry) = get_mut(&mut self.served, key) {
                    let before = entry.queue.reservation();
                    edit(&mut entry.queue);
                    let promise = entry.queue.reservation();
                    // Its front end edits a queue too, and is to have no burst of it.
                    if promise != before {
                        self.awake.unreserve(key);
                        if let Some(promise) = promise {
                            self.awake.reserve(key, promise, now());
                        }
                    }
                    entry.queue.look();
                    // What was forbidden or out of reach may be possible now.
                    entry.awake = false;
                    let old = std::mem::take(&mut entry.registered);
                    self.resources.remove(&self.ring, &entry.queue, old);
                    entry.registered = self.resources.add(&self.ring, &entry.queue);
                    self.awake.retain(|other| other != key);
                    self.wake(key);
                }
                let _ = done.send(());
            }
            ThreadMessage::Forget(key) => drop(self.forwards.remove(&key)),
            ThreadMessage::Forwards(answer) => {
                let forwards = self.forwards.iter().map(|(&key, f)| (key, f.to.clone()));
                let _ = answer.send(forwards.collect());
            }
            ThreadMessage::Reroute { past, to, done } => {
                for (key, to) in to.iter() {
                    if let Some(forward) = self.forwards.get_mut(key)
                        && forward.to.is(&past)
                    {
                        forward.to = to.clone();
                    }
                }
                let _ = done.send(());
            }
            ThreadMessage::Ended { token, result, here } => self.ended(token, result, here),
            ThreadMessage::StartScheduled { token, running } => {
                self.start_scheduled(token, running, &mut now())
            }
            ThreadMessage::Rescheduled(schedule) => {
                let mut scheduler_clients = self.scheduler_clients.iter_mut().flatten();
                if let Some(scheduler_client) =
                    scheduler_clients.find(|scheduler_client| scheduler_client.is_of(&schedule))
                {
                    scheduler_client.look();
                }
            }
            ThreadMessage::Pin { cpus, tokens, done } => {
                let pinned = pin(&cpus);
                if let Some(tokens) = tokens.filter(|_| pinned.is_ok()) {
                    self.poller.move_to(tokens, now());
                }
                let _ = done.send(pinned);
            }
            ThreadMessage::End => self.ending = true,
        }
    }

    fn adopt(&mut self, mut queue: Box<Queue>) {
        let key = queue.key.table();
        // Its first turn looks at the limit again.
        queue.release(u64::MAX);
        if let Some(forward) = self.forwards.remove(&key) {
            queue.started_here = forward.outstanding;
        }
        let registered = self.resources.add(&self.ring, &queue);
        let commands = queue.disk().and_then(|disk| disk.engine().commands());
        if let Some(commands) = commands {
            self.commands.need(commands);
        }
        let scheduler_client = self.scheduler_client(&queue);
        self.stays = self.stays.wrapping_add(1);
        let at = key.0 as usize;
        if self.served.len() <= at {
            self.served.resize_with(at + 1, || None);
        }
        debug_assert!(self.served[at].is_none(), "a place is free when it is given");
        self.served[at] = Some(Served {
            polled: queue.kick().is_none(),
            ends: 0,
            listening: false,
            listening_to_link: false,
            queue,
            registered,
            commands,
            scheduler_client,
            awake: false,
            busy_at: now(),
            work: 0,
            stay: self.stays,
            stopping: None,
        });
        if let Some(promise) = get(&self.served, key).and_then(|entry| entry.queue.reservation()) {
            self.awake.reserve(key, promise, now());
        }
        // A doorbell is listened to from the queue's first sleep on.
        if get(&self.served, key).is_some_and(|entry| !entry.has_bell()) {
            self.listen_to_kick(key);
        }
        // Whatever was kicked while nobody listened is found by looking.
        self.wake(key);
    }

    /// The queue is no longer this thread's.
    pub(super) fn detach_queue(&mut self, key: TableKey) -> Option<Box<Queue>> {
        get_mut(&mut self.served, key)?.queue.call_now();
        self.show(key);
        let entry = get(&self.served, key)?;
        let (kick, link) = (entry.listening, entry.listening_to_link);
        let stay = entry.stay;
        if kick {
            // Before anybody else waits for its doorbell: that wakes one, who must not be the one that has left.
            self.cancel(kick_data(key, stay));
        }
        if link {
            self.cancel(link_data(key, stay));
        }
        self.submit_all();
        let entry = self.served.get_mut(key.0 as usize)?.take()?;
        self.awake.retain(|other| other != key);
        self.awake.unreserve(key);
        self.resources.remove(&self.ring, &entry.queue, entry.registered);
        if let Some(at) = entry.scheduler_client
            && let Some(scheduler_client) = &mut self.scheduler_clients[at]
        {
            scheduler_client.leave();
        }
        Some(entry.queue)
    }
}

/// Why a thread does not run on CPUs.
#[derive(Debug, thiserror::Error)]
pub enum PinError {
    /// They are not there for this process.
    #[error(
        "no IOThread may run on CPU {}: this process may use CPU {} (a CPU may be offline, or not in its cpuset)",
        cpuset(.asked), cpuset(.usable)
    )]
    Cpus {
        /// What was asked for, ascending.
        asked: Vec<CpuId>,
        /// Where it may run, ascending.
        usable: Vec<CpuId>,
    },
    /// The kernel refuses them.
    #[error("cannot run an IOThread on these CPUs")]
    Kernel(#[source] Errno),
}

/// Lets this thread run on these CPUs, as far as they are there; on all, if there are none.
fn pin(cpus: &[CpuId]) -> Result<(), PinError> {
    let mut set = CpuSet::new();
    cpus.iter().for_each(|cpu| set.set(cpu.get() as usize));
    if cpus.is_empty() {
        set = all_cpus();
    }
    match sched_setaffinity(None, &set) {
        // Not one of them is online and in the cpuset.
        Err(Errno::INVAL) => {
            let usable = usable_cpus().map_err(PinError::Kernel)?;
            Err(PinError::Cpus { asked: cpus.to_vec(), usable })
        }
        result => result.map_err(PinError::Kernel),
    }
}

/// Whether all of these CPUs are there for this process. A thread that is told to run on some that are and some that are
/// not runs on the former ([`pin`]), which nobody would see.
///
/// # Errors
/// [`PinError::Cpus`]: those that are not.
pub(crate) fn check_cpus(cpus: &[CpuId]) -> Result<(), PinError> {
    if cpus.is_empty() {
        return Ok(());
    }
    // What the kernel does not say here, it says when a thread is to run there.
    let Ok(usable) = usable_cpus() else { return Ok(()) };
    let mut asked: Vec<_> = cpus.iter().copied().filter(|cpu| !usable.contains(cpu)).collect();
    asked.sort_unstable();
    if asked.is_empty() { Ok(()) } else { Err(PinError::Cpus { asked, usable }) }
}

fn all_cpus() -> CpuSet {
    let mut set = CpuSet::new();
    (0..CpuSet::MAX_CPU).for_each(|cpu| set.set(cpu));
    set
}

/// Where this thread may run, however it is pinned: what the kernel leaves of all CPUs.
fn usable_cpus() -> Result<Vec<CpuId>, Errno> {
    let pinned = sched_getaffinity(None)?;
    sched_setaffinity(None, &all_cpus())?;
    let usable = sched_getaffinity(None);
    sched_setaffinity(None, &pinned)?;
    let usable = usable?;
    let cpus = (0..CpuSet::MAX_CPU).filter(|&cpu| usable.is_set(cpu));
    Ok(cpus.map(|cpu| CpuId::new(cpu as u32)).collect())
}
