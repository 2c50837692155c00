//! The pool of IOThreads, seen from outside: starts and ends threads, and starts, stops, edits
//! and moves the queues on them.
//!
//! Each queue has a place, which names its thread. Whoever changes something about a queue holds
//! its place until the IOThreads have answered, so operations on one queue come one after the
//! other and those on different queues do not wait for each other. IOThreads never take a lock:
//! they answer by message.

use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError, Weak, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rtvirtio_completion::{Costs, Tokens};
use rtvirtio_engine::AbortOnPanic;
use rtvirtio_units::CpuId;

use crate::call::Call;
use crate::iothread::{IoThread, PinError, Poller, Polling, ThreadMessage};
use crate::key::{QueueKey, TableKey};
use crate::mailbox::{Sender, mailbox};
use crate::queue::{Broken, NicQueueSetup, Queue, QueueSetup, SlotsSetup};
use crate::thread_stats::{IoThreadStats, Watchdog};

/// Names an IOThread; not used again in the life of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ThreadId(u32);

impl ThreadId {
    /// The number.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }
}

/// Why the pool refuses.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// The thread does not start.
    #[error("cannot start an IOThread")]
    Start(#[source] std::io::Error),
    /// It has no ring. The text has the remedy, since nobody who starts a service sees a hint.
    #[error("an IOThread needs io_uring ({})", remedy(.0))]
    Ring(#[source] std::io::Error),
    /// There is no such thread.
    #[error("there is no such IOThread")]
    NoThread,
    /// It serves queues.
    #[error("the IOThread serves {queues} queues: move them first")]
    InUse {
        /// How many.
        queues: usize,
    },
    /// It does not run on the CPUs.
    #[error(transparent)]
    Pin(#[from] PinError),
    /// There is no such queue, or none any more.
    #[error("there is no such queue")]
    NoQueue,
    /// Nor is there a place for it.
    #[error("there are too many queues")]
    TooMany,
}

/// What helps where the kernel refuses a ring.
fn remedy(error: &std::io::Error) -> &'static str {
    use rustix::io::Errno;
    match Errno::from_io_error(error) {
        Some(Errno::PERM | Errno::ACCESS | Errno::NOSYS) => {
            "see that `sysctl kernel.io_uring_disabled` is 0 and that no seccomp filter, such as \
             a container's, refuses it; `rtvirtio doctor` tells which"
        }
        Some(Errno::NOMEM) => "raise RLIMIT_MEMLOCK: `ulimit -l`, or LimitMEMLOCK= in the unit",
        _ => "`rtvirtio doctor` tries it",
    }
}

/// Why a queue does not move.
#[derive(Debug, thiserror::Error)]
pub enum MoveError {
    /// Something else is being done to it.
    #[error("the queue is being moved or stopped")]
    Busy,
    /// It does not exist, or the thread does not.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

struct Thread {
    mail: Sender<ThreadMessage>,
    polling: Polling,
    stats: Arc<IoThreadStats>,
    tid: i32,
    handle: JoinHandle<()>,
}

/// Where a queue is. `None` once it has stopped.
struct Place {
    thread: Mutex<Option<ThreadId>>,
    /// To free a thread that is stuck in writing to one of them.
    calls: Mutex<[Option<Call>; 2]>,
    broken: Arc<OnceLock<Broken>>,
}

#[derive(Default)]
struct State {
    threads: HashMap<ThreadId, Thread>,
    /// Threads that were removed before all that they had started had ended: they forward that, and end then.
    leaving: Vec<(Sender<ThreadMessage>, JoinHandle<()>)>,
    places: HashMap<QueueKey, Arc<Place>>,
    next_thread: u32,
    /// Spin tokens, by the CPUs of the threads that have them in common; none: any.
    tokens: HashMap<Vec<CpuId>, Weak<Tokens>>,
    /// Queues that were started.
    started: u64,
    /// Places in threads' tables that have been used and are free: the tables stay small.
    free: Vec<TableKey>,
}

/// IOThreads and the queues on them.
#[derive(Default)]
pub struct Pool {
    state: Mutex<State>,
    /// Threads end one after the other: each forwards to one that stays.
    ending: Mutex<()>,
    watchdog: Arc<Watchdog>,
}

/// How long a thread that serves nothing any more is waited for, and how often that is looked at.
const END_TIME: Duration = Duration::from_secs(1);
const END_PAUSE: Duration = Duration::from_micros(200);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while it holds one of them; if it did, the tables are whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What waiting costs here: measured when the first thread is started that wants to know.
fn costs() -> Costs {
    static COSTS: OnceLock<Costs> = OnceLock::new();
    *COSTS.get_or_init(Costs::calibrate)
}

impl Pool {
    /// Spin tokens of these CPUs; of all that the process may use, if there are none.
    fn tokens(&self, cpus: &[CpuId]) -> Option<Arc<Tokens>> {
        let tokens = &mut lock(&self.state).tokens;
        tokens.retain(|_, tokens| tokens.strong_count() > 0);
        if let Some(tokens) = tokens.get(cpus).and_then(Weak::upgrade) {
            return Some(tokens);
        }
        let new = if cpus.is_empty() { Tokens::new() } else { Tokens::on(cpus) };
        let new = Arc::new(new.ok()?);
        tokens.insert(cpus.to_vec(), Arc::downgrade(&new));
        Some(new)
    }

    /// Starts a thread, named for `ps` and `top`.
    ///
    /// # Errors
    /// [`PoolError::Start`]: no thread; [`PoolError::Ring`]: no io_uring.
    pub fn add_thread(&self, name: &str, polling: Polling) -> Result<ThreadId, PoolError> {
        let (mail, messages) = mailbox().map_err(|e| PoolError::Start(e.into()))?;
        let stats = Arc::new(IoThreadStats::watched_by(Arc::clone(&self.watchdog)));
        let (started, start) = mpsc::channel();
        let (sender, for_thread) = (mail.clone(), Arc::clone(&stats));
        let tokens = if polling.is_gated() { self.tokens(&[]) } else { None };
        let poller = Poller::new(polling, tokens.map(|tokens| (tokens, costs())));
        let handle = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                let _fatal = AbortOnPanic::new();
                match IoThread::new(messages, sender, for_thread, poller) {
                    Ok(thread) => {
                        let tid = rustix::thread::gettid().as_raw_nonzero().get();
                        let _ = started.send(Ok(tid));
                        thread.run();
                    }
                    Err(error) => {
                        let _ = started.send(Err(error));
                    }
                }
            })
            .map_err(PoolError::Start)?;
        let tid = start
            .recv()
            .unwrap_or_else(|_| Err(std::io::ErrorKind::Other.into()))
            .map_err(PoolError::Ring)?;
        let mut state = lock(&self.state);
        state.next_thread += 1;
        let id = ThreadId(state.next_thread);
        state.threads.insert(id, Thread { mail, polling, stats, tid, handle });
        Ok(id)
    }

    /// Ends a thread that serves no queue.
    ///
    /// # Errors
    /// [`PoolError::NoThread`], [`PoolError::InUse`].
    pub(crate) fn remove_thread(&self, id: ThreadId) -> Result<(), PoolError> {
        let _one = lock(&self.ending);
        let (thread, others) = {
            let mut state = lock(&self.state);
            if !state.threads.contains_key(&id) {
                return Err(PoolError::NoThread);
            }
            // A place that is held may be about to name this thread: it counts as used.
            let uses = |place: &Arc<Place>| match place.thread.try_lock() {
                Ok(thread) => *thread == Some(id),
                Err(_) => true,
            };
            let queues = state.places.values().filter(|place| uses(place)).count();
            if queues > 0 {
                return Err(PoolError::InUse { queues });
            }
            let thread = state.threads.remove(&id).ok_or(PoolError::NoThread)?;
            state.leaving.retain(|(_, handle)| !handle.is_finished());
            let leaving = state.leaving.iter().map(|(mail, _)| mail);
            let others = state.threads.values().map(|other| &other.mail).chain(leaving);
            let others: Vec<_> = others.cloned().collect();
            (thread, others)
        };
        // Results that others forward go past it from now on; those on their way are read before
        // the message that ends it.
        let (answer, forwards) = mpsc::channel();
        let _ = thread.mail.post(ThreadMessage::Forwards(answer));
        let to = Arc::new(forwards.recv().unwrap_or_default());
        let (done, rerouted) = mpsc::channel();
        for other in others {
            let (past, to, done) = (thread.mail.clone(), Arc::clone(&to), done.clone());
            let _ = other.post(ThreadMessage::Reroute { past, to, done });
        }
        drop(done);
        while rerouted.recv().is_ok() {}
        let _ = thread.mail.post(ThreadMessage::End);
        // It ends when what was started there has ended, and nobody needs to wait for a disk that does not
        // answer: the thread serves nothing.
        let until = Instant::now() + END_TIME;
        while !thread.handle.is_finished() && Instant::now() < until {
            std::thread::sleep(END_PAUSE);
        }
        if thread.handle.is_finished() {
            let _ = thread.handle.join();
        } else {
            // The thread that it forwards to may end before it does: it has to hear of that.
            lock(&self.state).leaving.push((thread.mail, thread.handle));
        }
        Ok(())
    }

    /// Lets a thread run on these CPUs; on all, if there are none.
    ///
    /// # Errors
    /// [`PoolError::NoThread`], [`PoolError::Pin`].
    pub(crate) fn pin_thread(&self, id: ThreadId, cpus: &[CpuId]) -> Result<(), PoolError> {
        let thread = lock(&self.state).threads.get(&id).map(|thread| thread.polling);
        let gated = thread.ok_or(PoolError::NoThread)?.is_gated();
        let tokens = if gated { self.tokens(cpus) } else { None };
        let (done, answer) = mpsc::channel();
        self.post(id, ThreadMessage::Pin { cpus: cpus.to_vec(), tokens, done })?;
        Ok(answer.recv().map_err(|_| PoolError::NoThread)??)
    }

    /// What a thread has done, and its number in the kernel.
    #[must_use]
    pub fn thread(&self, id: ThreadId) -> Option<(Arc<IoThreadStats>, i32)> {
        let state = lock(&self.state);
        state.threads.get(&id).map(|thread| (Arc::clone(&thread.stats), thread.tid))
    }

    /// Serves a queue.
    ///
    /// # Errors
    /// [`PoolError::NoThread`].
    pub fn start(&self, setup: QueueSetup, on: ThreadId) -> Result<QueueKey, PoolError> {
        self.start_made(|key| Some(Queue::new(key, setup)), on)
    }

    /// Serves a queue of a network device.
    ///
    /// # Errors
    /// [`PoolError::NoThread`], [`PoolError::NoQueue`].
    pub(crate) fn start_nic(
        &self,
        setup: NicQueueSetup,
        on: ThreadId,
    ) -> Result<QueueKey, PoolError> {
        self.start_made(|key| Queue::of_nic(key, setup), on)
    }

    /// Serves the slots of a process.
    ///
    /// # Errors
    /// [`PoolError::NoThread`].
    pub fn start_slots(&self, setup: SlotsSetup, on: ThreadId) -> Result<QueueKey, PoolError> {
        self.start_made(|key| Some(Queue::of_slots(key, setup)), on)
    }

    fn start_made(
        &self,
        make: impl FnOnce(QueueKey) -> Option<Queue>,
        on: ThreadId,
    ) -> Result<QueueKey, PoolError> {
        let mut state = lock(&self.state);
        let table = state.free.last().copied().unwrap_or(TableKey(state.places.len() as u32));
        let key = QueueKey::new(state.started + 1, table).ok_or(PoolError::TooMany)?;
        let queue = Box::new(make(key).ok_or(PoolError::NoQueue)?);
        state.started += 1;
        state.free.pop();
        let place = Arc::new(Place {
            thread: Mutex::new(None),
            calls: Mutex::new(queue.calls()),
            broken: Arc::clone(queue.broken_cell()),
        });
        let mut thread = lock(&place.thread);
        state.places.insert(key, Arc::clone(&place));
        drop(state);
        let (done, answer) = mpsc::channel();
        let started = self
            .post(on, ThreadMessage::Adopt { queue, done })
            .and_then(|()| answer.recv().map_err(|_| PoolError::NoThread));
        if let Err(error) = started {
            self.forget(key);
            return Err(error);
        }
        *thread = Some(on);
        drop(thread);
        Ok(key)
    }

    /// Stops serving a queue. Returns when nothing is in flight, which takes as long as the
    /// disk's slowest request.
    ///
    /// # Errors
    /// [`PoolError::NoQueue`].
    pub fn stop(&self, key: QueueKey) -> Result<Box<Queue>, PoolError> {
        let place = self.place(key)?;
        let mut thread = lock(&place.thread);
        let on = thread.ok_or(PoolError::NoQueue)?;
        let (back, answer) = mpsc::channel();
        self.post(on, ThreadMessage::Stop { key: key.table(), for_good: true, back })?;
        let mut queue = answer.recv().map_err(|_| PoolError::NoThread)?;
        queue.end();
        queue.stats().see(0);
        *thread = None;
        drop(thread);
        self.forget(key);
        Ok(queue)
    }

    /// Changes something about a queue, on its thread, between two turns.
    ///
    /// # Errors
    /// [`PoolError::NoQueue`].
    pub fn edit<T: Send + 'static>(
        &self,
        key: QueueKey,
        edit: impl FnOnce(&mut Queue) -> T + Send + 'static,
    ) -> Result<T, PoolError> {
        let place = self.place(key)?;
        let thread = lock(&place.thread);
        let on = thread.ok_or(PoolError::NoQueue)?;
        let (value, result) = mpsc::channel();
        let (calls, new_calls) = mpsc::channel();
        let (done, answer) = mpsc::channel();
        let edit = Box::new(move |queue: &mut Queue| {
            let _ = value.send(edit(queue));
            let _ = calls.send(queue.calls());
        });
        self.post(on, ThreadMessage::Edit { key: key.table(), edit, done })?;
        answer.recv().map_err(|_| PoolError::NoThread)?;
        if let Ok(calls) = new_calls.try_recv() {
            *lock(&place.calls) = calls;
        }
        result.try_recv().map_err(|_| PoolError::NoQueue)
    }

    /// Changes something about a queue while nothing of it is in flight: its IOThread fetches no
    /// more from it until what it has has ended, and goes on after the change. Frames for it wait.
    ///
    /// # Errors
    /// [`PoolError::NoQueue`].
    pub(crate) fn edit_drained(
        &self,
        key: QueueKey,
        edit: impl FnOnce(&mut Queue),
    ) -> Result<(), PoolError> {
        let place = self.place(key)?;
        let thread = lock(&place.thread);
        let on = thread.ok_or(PoolError::NoQueue)?;
        let (back, answer) = mpsc::channel();
        self.post(on, ThreadMessage::Stop { key: key.table(), for_good: false, back })?;
        let mut queue = answer.recv().map_err(|_| PoolError::NoThread)?;
        edit(&mut queue);
        let (done, answer) = mpsc::channel();
        self.post(on, ThreadMessage::Adopt { queue, done })?;
        // The thread has it before anything else can be asked of the queue.
        answer.recv().map_err(|_| PoolError::NoThread)?;
        Ok(())
    }

    /// Moves a queue to another thread while it is served. Returns how long nobody served it.
    ///
    /// # Errors
    /// [`MoveError`].
    pub(crate) fn move_queue(&self, key: QueueKey, to: ThreadId) -> Result<Duration, MoveError> {
        let place = self.place(key)?;
        let mut thread = match place.thread.try_lock() {
            Ok(thread) => thread,
            Err(TryLockError::WouldBlock) => return Err(MoveError::Busy),
            Err(TryLockError::Poisoned(held)) => held.into_inner(),
        };
        let on = thread.ok_or(PoolError::NoQueue)?;
        if on == to {
            return Ok(Duration::ZERO);
        }
        let (left, leave) = mpsc::channel();
        let (done, answer) = mpsc::channel();
        {
            // Both threads stay while the message is under way: `remove_thread` counts held places.
            let state = lock(&self.state);
            let to = state.threads.get(&to).ok_or(PoolError::NoThread)?.mail.clone();
            let from = state.threads.get(&on).ok_or(PoolError::NoThread)?;
            let message = ThreadMessage::Release { key: key.table(), to, left, done };
            from.mail.post(message).map_err(|_| PoolError::NoThread)?;
        }
        let adopted = answer.recv().map_err(|_| PoolError::NoQueue)?;
        *thread = Some(to);
        let left = leave.try_recv().unwrap_or(adopted);
        Ok(Duration::from_nanos(adopted.saturating_sub(left)))
    }

    /// Whether a queue is being moved or stopped. Does not wait.
    #[must_use]
    pub(crate) fn is_busy(&self, key: QueueKey) -> bool {
        self.place(key).is_ok_and(|place| place.thread.try_lock().is_err())
    }

    /// Writes to a queue's error descriptor, by its device's thread. Does not wait.
    pub(crate) fn tell_error(&self, key: QueueKey) {
        if let Ok(place) = self.place(key)
            && let [_, Some(error)] = &*lock(&place.calls)
        {
            error.signal_aside();
        }
    }

    /// Why a queue is not served any more, if its driver broke it. Does not wait.
    #[must_use]
    pub(crate) fn broken(&self, key: QueueKey) -> Option<Broken> {
        self.place(key).ok()?.broken.get().copied()
    }

    /// Frees threads that are stuck in calling a driver whose front end filled its eventfd. To be
    /// called every few milliseconds while it returns that a thread does something: a thread may be
    /// stuck when it is in the same call as at the time before. It may as well be without a CPU,
    /// most of all behind its write, which wakes the driver: an eventfd that is not full is left
    /// alone.
    pub(crate) fn unblock_stuck_iothreads(
        &self,
        before: &mut HashMap<ThreadId, (u64, Option<QueueKey>)>,
    ) -> bool {
        let state = lock(&self.state);
        let mut busy = false;
        for (&id, thread) in &state.threads {
            let turns = thread.stats.turns.load(Relaxed);
            let calling = thread.stats.calling();
            let same = before.insert(id, (turns, calling)) == Some((turns, calling));
            busy |= !same || calling.is_some();
            if same && let Some(place) = calling.and_then(|key| state.places.get(&key)) {
                lock(&place.calls).iter().flatten().for_each(Call::make_room);
            }
        }
        before.retain(|id, _| state.threads.contains_key(id));
        busy
    }

    /// Who calls [`Self::unblock_stuck_iothreads`].
    pub(crate) const fn watchdog(&self) -> &Arc<Watchdog> {
        &self.watchdog
    }

    fn post(&self, to: ThreadId, message: ThreadMessage) -> Result<(), PoolError> {
        let mail = {
            let state = lock(&self.state);
            state.threads.get(&to).ok_or(PoolError::NoThread)?.mail.clone()
        };
        mail.post(message).map_err(|_| PoolError::NoThread)
    }

    fn place(&self, key: QueueKey) -> Result<Arc<Place>, PoolError> {
        lock(&self.state).places.get(&key).cloned().ok_or(PoolError::NoQueue)
    }

    fn forget(&self, key: QueueKey) {
        let mut state = lock(&self.state);
        state.places.remove(&key);
        // Read before whatever a later queue in that place is about.
        for thread in state.threads.values() {
            let _ = thread.mail.post(ThreadMessage::Forget(key.table()));
        }
        state.free.push(key.table());
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let threads = std::mem::take(&mut lock(&self.state).threads);
        for thread in threads.values() {
            let _ = thread.mail.post(ThreadMessage::End);
        }
        // In a panic queues may still be there, which their threads would serve for ever.
        if std::thread::panicking() {
            return;
        }
        for thread in threads.into_values() {
            let _ = thread.handle.join();
        }
    }
}

#[cfg(test)]
mod tests;
