//! An IOThread: one io_uring and one event loop over virtqueues of any device.
//!
//! Everything that can happen is a completion queue entry of the one ring: a request that ends, a
//! kick (a multishot poll of the queue's eventfd), a message (the same of the mailbox). So a turn
//! costs at most one `io_uring_enter`, which submits, reaps and waits, and one write to the call
//! eventfd of each queue whose driver wants to be called. Disks whose requests are commands for a device
//! (NVMe) have rings of their own beside it (`commands`).
//!
//! Terms. A queue is *awake* while its driver need not kick: the thread looks at its ring in every
//! turn. It is *asleep* when notification is enabled and the thread waits for its kick. A *turn*
//! reaps, reads messages, gives each awake queue its share and publishes what has finished; a message
//! that comes meanwhile waits for one queue's share, not for all. Whose turn it is and how much of it,
//! and by how much a queue may wait for others: `drr`.
//!
//! Polling. When a turn finds nothing to do the thread polls for up to `poll` ns before it puts
//! all queues to sleep and waits, if an idle CPU is left for that and nothing else wants its own
//! (`polling`). `poll` follows what the last wait showed, by QEMU's rule
//! (util/aio-posix.c, `adjust_polling_time`): unchanged if the event came within it, grown if it
//! came within the maximum, shrunk if it came later. It does so twice: a thread whose requests end
//! at once waits for drivers alone, which come back after a wake-up of their own; one that waits
//! for a disk seldom gains as much as it burns, and polls for half as long at most.
//!
//! The slots of a process are a queue like others (`queue::source`), but for the kick: the process has no
//! fd for that, which its program might close and use for something else. The thread waits for their
//! doorbell's futex, by an entry that is pushed when the queue goes to sleep and stays until the doorbell
//! rings. Before Linux 6.7 there is no such entry: the queue then stays awake.
//!
//! A queue of a network device has a second thing to wait for, its link. That is waited for by a poll that ends with the
//! first event: of a TAP it is pushed when the queue has buffers and the TAP had no frame, of a switch's port it is always
//! there, and costs nothing while nobody writes to its eventfd.
//!
//! Long rounds. When a round has lasted as long as a turn, it ends early if anything is to be submitted or heard, and the line goes on in
//! the next. So a queue's requests, and kicks, ends and links' events, wait for one turn of another queue and not for one of each.
//!
//! Promises. What is promised to a queue of a network device is reserved for it, with turns between those of others (`drr`). Where there
//! is such a queue a round ends as soon as there is something to submit or to hear of, so that no system call has more than a
//! turn's requests, and a frame is noticed by the next turn.
//!
//! A queue whose driver gave no kick, or one that cannot be waited for, stays awake: the thread
//! waits for no more than [`KICKLESS_POLL_INTERVAL`] while it has one.
//!
//! Live move. The thread that has a queue publishes what has finished, stops listening to its
//! kick and posts the queue to the other thread. Requests that end here later are forwarded as
//! (token, result); only the thread that has the queue writes its used ring. The other thread
//! looks at the avail ring at once, so a kick that fell between the two is not missed. A message
//! from A to B is read after all earlier ones from A to B, so a forwarded result finds the queue
//! at B, or the place where B sent it: each thread keeps to whom it last gave a queue until that
//! queue stops, since results that others forwarded may still come by. Before a thread ends, the
//! others forward past it.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use io_uring::{IoUring, cqueue, opcode, types};
use rtvirtio_engine::{Commands, Completions, Token, nvme};
use rtvirtio_qos::Running;

use crate::clock::now;
use crate::drr::Turns;
use crate::key::{TableKey, from_token};
use crate::mailbox::{Receiver, Sender};
use crate::queue::{Kick, Queue, Turn};
use crate::schedule::{Owner, SchedulerClient};
use crate::thread_stats::IoThreadStats;

mod busy;
mod commands;
mod messages;
mod polling;
mod resources;
mod schedules;
mod turns;

use busy::Busy;
use commands::Rings;
use messages::Forward;
pub use messages::PinError;
pub(crate) use messages::{Ended, ThreadMessage, check_cpus};
pub(crate) use polling::Poller;
pub use polling::Polling;
use resources::{Registered, Resources};
use schedules::ByMessage;

/// Entries of a submission queue: more than a turn needs. Tests have fewer, to see what happens when it is full.
const ENTRIES: u32 = if cfg!(test) { 16 } else { 512 };
/// Entries of a completion queue: more than a kernel without room for them would have to queue.
const COMPLETIONS: u32 = 4096;
/// A queue that was awake and idle for so long among busy ones is put to sleep.
const IDLE_BEFORE_NOTIFY_NS: u64 = 1_000_000;
/// Polls of a kick that may end one after the other without one that stays.
const MAX_MULTISHOT_REARMS: u8 = 8;
/// Completions that are taken at once where something is promised: as many as a turn has requests.
const PROMISED_COMPLETIONS: usize = 32;
/// How often a thread that never sleeps says how long it has polled.
const POLL_SLICE_NS: u64 = 1_000_000;
/// How long a request may lie in a queue without a kick: short for a disk, and a few per cent of
/// a CPU.
const KICKLESS_POLL_INTERVAL: Duration = Duration::from_micros(100);

/// A word of 32 bits, in memory that processes share (futex(2), `FUTEX2_SIZE_U32`).
const FUTEX2_SIZE_U32: u32 = 2;

/// User data of entries that are no request's. Requests have the upper 16 bits clear.
const KICK: u64 = 1 << 48;
const MAIL: u64 = 2 << 48;
const CANCELLED: u64 = 3 << 48;
const COMMANDS: u64 = 4 << 48;
const LINK: u64 = 5 << 48;
const KIND: u64 = 0xffff << 48;

/// A queue that this thread has.
struct Served {
    queue: Box<Queue>,
    registered: Registered,
    /// Which ring its disk's requests go to, unless it is the thread's own.
    commands: Option<Commands>,
    /// Which of the thread's scheduler clients is its device's.
    scheduler_client: Option<usize>,
    awake: bool,
    /// Nobody says when there is something to do: it does not sleep.
    polled: bool,
    /// Polls of its kick that ended, since one stayed.
    ends: u8,
    /// Whether something in the ring waits for its kick.
    listening: bool,
    /// Whether something in the ring waits for its link.
    listening_to_link: bool,
    /// When it last had work.
    busy_at: u64,
    /// Requests that were started or have ended, since time was last accounted for by them.
    work: u32,
    /// Tells entries of its polls from those of earlier stays in its place of the table, which are cancelled when they end. 16
    /// bits: the thread reaps long before 65,536 queues have come to it.
    stay: u16,
    /// Whom to give it to when nothing is in flight.
    stopping: Option<mpsc::Sender<Box<Queue>>>,
}

impl Served {
    /// Whether a turn would find something to start.
    fn is_pending(&self) -> bool {
        self.queue.is_waiting()
            || self.stopping.is_none() && self.queue.is_pending()
            || self.stopping.is_some() && self.queue.recovering() > 0
    }

    /// Whether it was to stop, and has.
    fn has_stopped(&self) -> bool {
        self.stopping.is_some() && self.queue.in_flight() == 0 && self.queue.recovering() == 0
    }

    /// Whether it sleeps, and nothing in the ring waits for its doorbell yet.
    fn needs_kick_rearm(&self) -> bool {
        !self.awake && !self.listening && self.queue.is_served() && self.has_bell()
    }

    fn has_bell(&self) -> bool {
        matches!(self.queue.kick(), Some(Kick::Futex(..)))
    }

    /// Waits for a kick; whether there is something to start after all.
    fn sleep(&mut self) -> bool {
        self.queue.set_waiting(true);
        if self.polled && self.stopping.is_none() && self.queue.is_served() {
            return self.is_pending();
        }
        self.awake =
            self.is_pending() || self.stopping.is_none() && self.queue.enable_notification();
        self.awake
    }
}

/// The loop's state.
pub(crate) struct IoThread {
    ring: IoUring,
    commands: Rings,
    resources: Resources,
    mail: Receiver<ThreadMessage>,
    completions: Arc<dyn Completions>,
    /// Itself, as schedules know it.
    as_owner: Arc<dyn Owner>,
    /// Of the schedules of its queues' devices.
    scheduler_clients: Vec<Option<SchedulerClient>>,
    /// What schedules say is to start, while it is being started.
    to_start: Vec<(Token, Running)>,
    /// Scratch: queues that went to sleep.
    asleep: Vec<TableKey>,
    /// Queues that a limit on their rate holds back.
    held: Vec<TableKey>,
    /// By key.
    served: Vec<Option<Served>>,
    awake: Turns<TableKey>,
    forwards: HashMap<TableKey, Forward>,
    stats: Arc<IoThreadStats>,
    poller: Poller,
    busy: Busy,
    /// Whether it waited for a disk when it last waited.
    disk: bool,
    stays: u16,
    ending: bool,
    /// Scratch, so that reaping borrows nothing.
    entries: Vec<(u64, i32, u32)>,
}

/// A ring of the best kind that the kernel has, with room for so many completions.
///
/// # Errors
/// io_uring is disabled or forbidden.
fn ring(completions: u32) -> std::io::Result<IoUring> {
    let build = |modern: bool| {
        let mut builder = IoUring::builder();
        builder.setup_clamp().setup_cqsize(completions);
        if modern {
            builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag();
        }
        builder.build(ENTRIES)
    };
    // Linux before 6.1 has no DEFER_TASKRUN.
    build(true).or_else(|_| build(false))
}

/// Whether the kernel gives this process such a ring as each IOThread has.
///
/// # Errors
/// It does not.
pub fn try_ring() -> std::io::Result<()> {
    ring(COMPLETIONS).map(drop)
}

impl IoThread {
    /// Must be called on the thread that runs it: the ring has one issuer.
    ///
    /// # Errors
    /// No io_uring.
    pub(crate) fn new(
        mail: Receiver<ThreadMessage>,
        sender: Sender<ThreadMessage>,
        stats: Arc<IoThreadStats>,
        poller: Poller,
    ) -> std::io::Result<Self> {
        let ring = ring(COMPLETIONS)?;
        // Saves a reference to the ring's file in each enter; without it nothing breaks.
        let _ = ring.submitter().register_ring_fd();
        let resources = Resources::new(&ring);
        let mut thread = Self {
            ring,
            commands: Rings::default(),
            resources,
            mail,
            completions: Arc::new(sender.clone()),
            as_owner: Arc::new(ByMessage(sender)),
            scheduler_clients: Vec::new(),
            to_start: Vec::new(),
            asleep: Vec::new(),
            held: Vec::new(),
            served: Vec::new(),
            awake: Turns::new(),
            forwards: HashMap::new(),
            stats,
            poller,
            busy: Busy::default(),
            disk: false,
            stays: 0,
            ending: false,
            entries: Vec::with_capacity(COMPLETIONS as usize),
        };
        thread.listen_to_mail();
        Ok(thread)
    }

    /// Serves until it is told to end.
    pub(crate) fn run(mut self) {
        let mut began = now();
        loop {
            self.begin(began);
            let mut worked = self.reap();
            worked |= self.read_mail();
            if worked && self.awake.len() > 1 {
                // Drivers do not wait for others' turns.
                self.publish();
            }
            if !self.held.is_empty() {
                self.release(began);
            }
            worked |= self.serve(began, worked);
            worked |= self.schedule();
            self.publish();
            if self.ending && self.awake.is_empty() && self.is_unused() {
                return;
            }
            if worked {
                let ended = now();
                self.end(ended);
                IoThreadStats::add(&self.stats.busy_ns, ended - began);
                IoThreadStats::add(&self.stats.turns, 1);
                began = ended;
            }
            if self.has_work() {
                self.submit();
            } else {
                began = self.idle(began);
                self.awake.rested(began);
            }
        }
    }

    fn is_unused(&self) -> bool {
        self.forwards.values().all(|forward| forward.outstanding == 0)
            && self.served.iter().all(Option::is_none)
    }

    // Waiting.

    /// Polls, then waits. Returns when there may be work.
    fn idle(&mut self, began: u64) -> u64 {
        let in_flight =
            |key: TableKey| get(&self.served, key).is_some_and(|entry| entry.queue.in_flight() > 0);
        let disk = self.awake.keys().any(in_flight);
        // What follows a wait for a disk is seldom a driver that comes back at once.
        let kind = usize::from(disk | std::mem::replace(&mut self.disk, disk));
        // Whoever looks at a device is the only one to hear of it.
        let endless =
            self.commands.must_be_polled() || self.poller.is_endless() && !self.awake.is_empty();
        let time = match endless {
            true => POLL_SLICE_NS,
            false => self.poller.time(kind, began, &self.stats),
        };
        if time > 0 {
            self.submit();
            let wake_at = self.wake_at();
            let until = began.saturating_add(time).min(wake_at);
            let (found, ended) = self.poll(began, until, endless);
            if found {
                self.poller.found(kind, ended - began);
            }
            if found || endless || ended >= wake_at {
                return ended;
            }
        }
        if self.put_to_sleep() {
            return now();
        }
        if !self.commands.may_sleep() {
            return now();
        }
        if let Some(poll) = self.commands.listen() {
            self.push(&poll);
        }
        let slept = now();
        self.poller.leave(slept);
        // A signal, the time or a full completion queue is no error: the next turn reaps.
        let _ = match self.patience(slept) {
            None => self.ring.submit_and_wait(1),
            Some(time) => {
                let time = types::Timespec::from(time);
                self.ring.submitter().submit_with_args(1, &types::SubmitArgs::new().timespec(&time))
            }
        };
        let woken = now();
        IoThreadStats::add(&self.stats.sleep_ns, woken - slept);
        IoThreadStats::add(&self.stats.sleeps, 1);
        let poll = self.poller.woken(kind, woken - began);
        self.stats.polling.store(poll, Relaxed);
        woken
    }

    /// Looks for work until there is some, or that time, or, unless it is `endless`, others need the
    /// CPU. Whether there is some, and when it ended.
    fn poll(&mut self, began: u64, until: u64, endless: bool) -> (bool, u64) {
        let (mut time, mut before) = (began, None);
        let found = loop {
            if self.has_work() {
                break true;
            }
            // What was submitted before the first look took its time.
            let stays = endless || before.is_none_or(|at| self.poller.stays(at, time, &self.stats));
            if time >= until || !stays {
                break false;
            }
            std::hint::spin_loop();
            before = before.map_or(Some(now()), |_| Some(time));
            time = now();
        };
        IoThreadStats::add(&self.stats.poll_ns, time - began);
        (found, time)
    }

    /// When a schedule, or a queue that is held back, is to be looked at though nothing happens, ns.
    fn wake_at(&self) -> u64 {
        self.scheduler_clients
            .iter()
            .flatten()
            .map(SchedulerClient::wake_at)
            .chain(self.held.iter().filter_map(|&key| get(&self.served, key)?.queue.held_until()))
            .min()
            .unwrap_or(u64::MAX)
    }

    /// How long it may wait: without end, if nobody has to be looked after.
    fn patience(&self, now: u64) -> Option<Duration> {
        let until = Some(self.wake_at()).filter(|&at| at < u64::MAX);
        let until = until.map(|at| Duration::from_nanos(at.saturating_sub(now)));
        let look = (!self.awake.is_empty()).then_some(KICKLESS_POLL_INTERVAL);
        until.into_iter().chain(look).min()
    }

    fn has_work(&mut self) -> bool {
        let deferred = self.has_deferred();
        let served = &self.served;
        deferred
            || self.mail.is_signaled()
            || !self.ring.completion().is_empty()
            || self.awake.keys().any(|key| get(served, key).is_some_and(Served::is_pending))
            || self.commands.has_ended()
            || self.scheduler_clients.iter().flatten().any(SchedulerClient::has_news)
    }

    /// Enables all kicks. True: there was work in the meantime.
    fn put_to_sleep(&mut self) -> bool {
        let mut woken = false;
        let (served, asleep) = (&mut self.served, &mut self.asleep);
        self.awake.retain(|key| {
            let Some(entry) = get_mut(served, key) else { return false };
            woken |= entry.sleep();
            if entry.needs_kick_rearm() {
                asleep.push(key);
            }
            entry.awake
        });
        self.arm_pending_kicks();
        woken
    }

    /// Those that went to sleep and that nothing would wake.
    fn arm_pending_kicks(&mut self) {
        while let Some(key) = self.asleep.pop() {
            self.listen_to_kick(key);
        }
    }

    fn submit(&mut self) {
        self.commands.enter();
        let deferred = self.has_deferred();
        let waiting = self.ring.submission().len();
        if waiting == 0 && !deferred {
            return;
        }
        // IORING_ENTER_GETEVENTS: run what the kernel has deferred to this thread, and post what had no room.
        let flags = u32::from(deferred);
        // SAFETY: no argument; entries refer to memory that lives until they complete.
        let _ = unsafe {
            self.ring.submitter().enter::<libc::sigset_t>(waiting as u32, 0, flags, None)
        };
    }

    /// Whether the kernel has completions that this thread does not see until it enters the kernel for them: those that it has
    /// deferred, and those for which the completion queue had no room.
    fn has_deferred(&mut self) -> bool {
        let submission = self.ring.submission();
        submission.taskrun() || submission.cq_overflow()
    }

    /// Nothing that has been pushed stays behind: it may name a registered file or buffer whose
    /// place is about to be another's.
    fn submit_all(&mut self) {
        while !self.ring.submission().is_empty() || !self.commands.is_submitted() {
            self.submit();
        }
    }

    // Reaping.

    fn reap(&mut self) -> bool {
        self.entries.clear();
        let most = match self.awake.has_reserved() {
            true => PROMISED_COMPLETIONS,
            false => COMPLETIONS as usize,
        };
        let entries = &mut self.entries;
        entries.extend(
            self.ring
                .completion()
                .take(most)
                .map(|entry| (entry.user_data(), entry.result(), entry.flags())),
        );
        let mut worked = false;
        for i in 0..self.entries.len() {
            let (data, result, flags) = self.entries[i];
            match data & KIND {
                0 => {
                    worked = true;
                    self.ended(Token(data), Ended::Raw(result), true);
                }
                KICK => {
                    worked = true;
                    self.kicked(data, result, flags);
                }
                LINK => {
                    worked = true;
                    self.link_event(data, result);
                }
                MAIL if !cqueue::more(flags) => self.listen_to_mail(),
                COMMANDS => self.commands.heard(),
                _ => {}
            }
        }
        worked | self.reap_commands()
    }

    fn reap_commands(&mut self) -> bool {
        let mut worked = false;
        while let Some((data, raw)) = self.commands.take() {
            worked = true;
            self.ended(Token(data), Ended::Result(nvme::result(raw)), true);
        }
        worked
    }

    fn ended(&mut self, token: Token, result: Ended, here: bool) {
        let (key, head) = from_token(token);
        let ended = self.with_queue(key, |queue, turn| {
            queue.started_here -= u16::from(here);
            match result {
                Ended::Raw(raw) => queue.complete_entry(head, raw, turn),
                Ended::Result(result) => queue.complete(head, result, turn),
            }
        });
        if ended.is_some() {
            if let Some(entry) = get_mut(&mut self.served, key) {
                entry.work += 1;
            }
            self.wake(key);
        } else if let Some(forward) = self.forwards.get_mut(&key) {
            let _ = forward.to.post(ThreadMessage::Ended { token, result, here: false });
            forward.outstanding -= u16::from(here);
        }
    }

    /// Does something with a queue that this thread has, and has its device's schedule know what came
    /// of it.
    fn with_queue<T>(
        &mut self,
        key: TableKey,
        act: impl FnOnce(&mut Queue, &mut Turn<'_, '_>) -> T,
    ) -> Option<T> {
        let entry = get_mut(&mut self.served, key)?;
        let mut commands = entry.commands.and_then(|kind| self.commands.submission(kind));
        let result = act(
            &mut entry.queue,
            &mut Turn {
                submission: &mut self.ring.submission(),
                commands: commands.as_mut(),
                file: entry.registered.file,
                completions: &self.completions,
                buffers: &|segment| entry.registered.buffer(segment),
                stats: &self.stats,
            },
        );
        if let Some(scheduler_client) =
            entry.scheduler_client.and_then(|at| self.scheduler_clients[at].as_mut())
        {
            let (pending, ended) = entry.queue.unreported();
            scheduler_client.take(pending, ended);
        }
        Some(result)
    }

    /// The queue is looked at in every turn until it is put to sleep.
    fn wake(&mut self, key: TableKey) {
        if let Some(entry) = get_mut(&mut self.served, key)
            && !entry.awake
        {
            entry.awake = true;
            entry.queue.set_waiting(false);
            entry.queue.disable_notification();
            self.awake.join(key);
            // It may not have been served before.
            self.listen_to_link(key);
        }
    }

    fn kicked(&mut self, data: u64, result: i32, flags: u32) {
        let key = TableKey((data >> 16) as u32);
        let Some(entry) = get_mut(&mut self.served, key) else { return };
        if entry.stay != data as u16 {
            return;
        }
        entry.queue.stats().kick();
        entry.listening = cqueue::more(flags);
        if entry.queue.broken().is_some() {
            // Until it is set up anew there is nothing that its driver could say.
            if cqueue::more(flags) {
                self.cancel(data);
            }
            return;
        }
        if entry.queue.is_filled() {
            entry.queue.stats().kick_filled();
        }
        // The kernel ends a poll when the completion queue is full: the next one will do. One that
        // fails, or ends each time, as of a file that is always ready, is given up. Who waits for a
        // futex does so once, and not if it rang before.
        if entry.has_bell() {
            entry.polled |= result < 0 && result != -libc::EAGAIN;
        } else if entry.listening {
            entry.ends = 0;
        } else if result >= 0 && entry.ends < MAX_MULTISHOT_REARMS {
            entry.ends += 1;
            self.listen_to_kick(key);
        } else {
            entry.polled = true;
        }
        self.wake(key);
    }

    // Listening.

    fn cancel(&mut self, kick: u64) {
        self.push(&opcode::AsyncCancel::new(kick).build().user_data(CANCELLED));
    }

    fn listen_to_kick(&mut self, key: TableKey) {
        let Some(entry) = get_mut(&mut self.served, key) else { return };
        let wait = match entry.queue.kick() {
            None => return,
            Some(Kick::Fd(fd)) => {
                let fd = types::Fd(fd.as_raw_fd());
                opcode::PollAdd::new(fd, libc::POLLIN as u32).multi(true).build()
            }
            Some(Kick::Futex(word, silent)) => {
                // By whichever bits it is woken.
                let (at, any) = (word.as_ptr().cast_const(), u32::MAX.into());
                opcode::FutexWait::new(at, silent.into(), any, FUTEX2_SIZE_U32).build()
            }
        };
        entry.listening = true;
        let wait = wait.user_data(kick_data(key, entry.stay));
        self.push(&wait);
    }

    /// If that is what its queue waits for.
    fn listen_to_link(&mut self, key: TableKey) {
        let Some(entry) = get_mut(&mut self.served, key) else { return };
        if entry.listening_to_link {
            return;
        }
        let Some((link, events)) = entry.queue.link() else { return };
        let events = u32::from(events.bits());
        let poll = opcode::PollAdd::new(types::Fd(link.as_raw_fd()), events).build();
        entry.listening_to_link = true;
        let poll = poll.user_data(link_data(key, entry.stay));
        self.push(&poll);
    }

    fn link_event(&mut self, data: u64, result: i32) {
        let key = TableKey((data >> 16) as u32);
        let Some(entry) = get_mut(&mut self.served, key) else { return };
        if entry.stay != data as u16 {
            return;
        }
        entry.listening_to_link = false;
        // A TAP that is gone is readable for ever.
        let gone = (libc::POLLERR | libc::POLLHUP | libc::POLLNVAL) as i32;
        entry.queue.link_event(result < 0 || result & gone != 0);
        self.listen_to_link(key);
        self.wake(key);
    }

    fn listen_to_mail(&mut self) {
        let fd = types::Fd(self.mail.fd().as_fd().as_raw_fd());
        let poll = opcode::PollAdd::new(fd, libc::POLLIN as u32).multi(true).build();
        self.push(&poll.user_data(MAIL));
    }

    fn push(&mut self, entry: &io_uring::squeue::Entry) {
        loop {
            // SAFETY: polls and cancellations refer to no memory. Of a futex the kernel needs the word only
            // when it takes the entry, which is before its queue is let go (`submit_all`).
            if unsafe { self.ring.submission().push(entry) }.is_ok() {
                return;
            }
            self.submit();
        }
    }
}

fn kick_data(key: TableKey, stay: u16) -> u64 {
    KICK | u64::from(key.0) << 16 | u64::from(stay)
}

fn link_data(key: TableKey, stay: u16) -> u64 {
    LINK | u64::from(key.0) << 16 | u64::from(stay)
}

fn get(served: &[Option<Served>], key: TableKey) -> Option<&Served> {
    served.get(key.0 as usize)?.as_ref()
}

fn get_mut(served: &mut [Option<Served>], key: TableKey) -> Option<&mut Served> {
    served.get_mut(key.0 as usize)?.as_mut()
}

#[cfg(test)]
mod tests;
