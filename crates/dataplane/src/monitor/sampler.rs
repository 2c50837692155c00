//! What a policy is shown.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rtvirtio_iocores::{Queue, QueueId, REFRESH, Snapshot, Thread, ThreadId, VmId};
use rtvirtio_spec::serve::{IoThread, Polling};
use rtvirtio_units::{CpuId, IoThreadName, Nanos};

use super::host::{Host, OnCpu, SchedStat};
use crate::plane::iothreads::{Core, Watched, WatchedQueue, WatchedThread};
use crate::stats::{Progress, QueueStats};
use crate::thread_stats::IoThreadStats;

/// What all have done since the policy began; never falls.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Totals {
    /// Requests that have ended.
    pub(super) requests: u64,
    /// What requests have waited for their IOThread, ns.
    pub(super) waited: u64,
    /// CPU time of IOThreads, ns.
    pub(super) ran: u64,
}

/// Where an IOThread's times come from.
struct ThreadSource {
    id: ThreadId,
    stats: Arc<IoThreadStats>,
    stat: SchedStat,
    on_cpu: OnCpu,
}

/// Where a queue's numbers come from, and what they were at the last sample.
struct QueueSource {
    id: QueueId,
    stats: Arc<QueueStats>,
    last: Progress,
}

/// Takes samples: each reads the counters of all queues and IOThreads once, and no file but in every
/// [`REFRESH`]th. While nothing comes or goes it allocates nothing.
#[derive(Default)]
pub(super) struct Sampler {
    /// Of the data plane's; 0: nothing was seen yet.
    version: u64,
    watched: Watched,
    /// In the order of the snapshot.
    threads: Vec<ThreadSource>,
    /// In the order of the snapshot: by id.
    queues: Vec<QueueSource>,
    host: Host,
    /// Front ends' processes with their VMs; kept for its memory.
    peers: Vec<(i32, VmId)>,
    samples: u64,
    /// Samples in a row at which no queue had done anything, or had anything to do.
    still: u64,
    totals: Totals,
    snapshot: Snapshot,
}

impl Sampler {
    /// Looks at all there is.
    pub(super) fn sample(&mut self, core: &Core, now: Nanos) {
        let version = core.version();
        if version != self.version {
            // Before the look: what changes meanwhile is seen the next time.
            self.version = version;
            self.watched = core.look();
            self.match_sources();
        }
        self.snapshot.now = now;
        if self.samples.is_multiple_of(REFRESH) {
            self.measure(now);
        }
        self.sample_threads();
        self.sample_queues();
        self.samples += 1;
    }

    /// What is new has done nothing yet; what is gone is forgotten.
    fn match_sources(&mut self) {
        let mut before = std::mem::take(&mut self.threads);
        self.snapshot.threads.clear();
        for thread in &self.watched.threads {
            let id = ThreadId(thread.id.get());
            let known = before.iter().position(|before| before.id == id);
            self.threads.push(known.map_or_else(
                || {
                    let stat = SchedStat::of_thread(thread.tid);
                    let on_cpu = stat.read();
                    ThreadSource { id, stats: Arc::clone(&thread.stats), stat, on_cpu }
                },
                |known| before.swap_remove(known),
            ));
            self.snapshot.threads.push(Thread {
                id,
                cpu: match thread.config.cpus[..] {
                    [only] => Some(only),
                    _ => None,
                },
                locked: thread.locked,
                busy: Nanos::ZERO,
                poll: Nanos::ZERO,
                sleep: Nanos::ZERO,
                ran: Nanos::ZERO,
                waited: Nanos::ZERO,
            });
        }
        let before = std::mem::take(&mut self.queues);
        self.snapshot.queues.clear();
        for queue in &self.watched.queues {
            let id = QueueId(queue.id);
            let known = before.binary_search_by_key(&id, |before| before.id);
            let last = known.map_or_else(|_| queue.stats.progress(), |known| before[known].last);
            self.queues.push(QueueSource { id, stats: Arc::clone(&queue.stats), last });
            let new = Queue::new(id, VmId(queue.vm), ThreadId(queue.thread.get()));
            self.snapshot.queues.push(Queue { kind: queue.kind, ..new });
        }
    }

    /// What the kernel says.
    fn measure(&mut self, now: Nanos) {
        self.snapshot.measured = now;
        for thread in &mut self.threads {
            let on_cpu = thread.stat.read();
            self.totals.ran += on_cpu.ran.saturating_sub(thread.on_cpu.ran).get();
            // A thread that has just ended has no times.
            if on_cpu != OnCpu::default() {
                thread.on_cpu = on_cpu;
            }
        }
        self.peers.clear();
        for vm in &self.watched.vms {
            let peer = vm.device.upgrade().and_then(|device| device.peer());
            self.peers.extend(peer.map(|peer| (peer, VmId(vm.id))));
        }
        self.peers.sort_unstable();
        self.peers.dedup();
        self.host.refresh(&self.peers, &mut self.snapshot);
    }

    fn sample_threads(&mut self) {
        for (source, thread) in self.threads.iter().zip(&mut self.snapshot.threads) {
            let ns = |number: &AtomicU64| Nanos::new(number.load(Relaxed));
            thread.busy = ns(&source.stats.busy_ns);
            thread.poll = ns(&source.stats.poll_ns);
            thread.sleep = ns(&source.stats.sleep_ns);
            (thread.ran, thread.waited) = (source.on_cpu.ran, source.on_cpu.waited);
        }
    }

    fn sample_queues(&mut self) {
        let mut still = true;
        for (source, queue) in self.queues.iter_mut().zip(&mut self.snapshot.queues) {
            let now = source.stats.progress();
            let last = std::mem::replace(&mut source.last, now);
            self.totals.requests += now.requests.saturating_sub(last.requests);
            self.totals.waited += now.waited.saturating_sub(last.waited).get();
            queue.busy = now.busy;
            queue.requests = now.requests;
            queue.bytes = now.bytes;
            queue.waited = now.waited;
            queue.calls = now.calls;
            queue.in_flight = now.in_flight().min(u32::MAX.into()) as u32;
            queue.backlogged = now.is_standing(last);
            still &= now == last && queue.in_flight == 0;
        }
        self.still = if still { self.still + 1 } else { 0 };
    }

    /// Whether nothing has happened for a control period.
    pub(super) const fn is_at_rest(&self) -> bool {
        self.still >= REFRESH
    }

    /// Front ends' processes, each once for each VM of it.
    pub(super) fn processes(&self) -> impl Iterator<Item = i32> {
        self.peers.iter().map(|&(pid, _)| pid)
    }

    /// How often vCPUs, and where they may run, were looked for.
    pub(super) const fn looks(&self) -> u64 {
        self.host.looks()
    }

    /// vCPUs that come will run on these CPUs.
    pub(super) fn expect(&mut self, cpus: &[CpuId]) {
        self.host.expect(cpus);
    }

    /// vCPUs have been moved: sees where they are, before the next sample.
    pub(super) fn look_again(&mut self) {
        self.host.look_again();
        self.measure(self.snapshot.now);
    }

    /// The last sample.
    pub(super) const fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    /// Whether it is the first.
    pub(super) const fn is_first(&self) -> bool {
        self.samples == 1
    }

    /// What all have done since the first sample.
    pub(super) const fn totals(&self) -> Totals {
        self.totals
    }

    /// An IOThread of the last sample.
    pub(super) fn thread(&self, id: ThreadId) -> Option<&WatchedThread> {
        self.watched.threads.iter().find(|thread| thread.id.get() == id.0)
    }

    /// The same by name.
    pub(super) fn thread_by_name(&self, name: &IoThreadName) -> Option<&WatchedThread> {
        self.watched.threads.iter().find(|thread| thread.name == *name)
    }

    /// A queue of the last sample.
    pub(super) fn queue(&self, id: QueueId) -> Option<&WatchedQueue> {
        let at = self.watched.queues.binary_search_by_key(&id.0, |queue| queue.id);
        self.watched.queues.get(at.ok()?)
    }

    /// A name that no IOThread has, from `auto` and the first of these numbers that is free.
    pub(super) fn new_name(&self, number: &mut u64) -> Option<IoThreadName> {
        loop {
            *number += 1;
            let name = IoThreadName::new(format!("auto{number}")).ok()?;
            if self.watched.threads.iter().all(|thread| thread.name != name) {
                return Some(name);
            }
        }
    }

    /// The configuration of an IOThread that is added on a CPU: it polls as the first one does.
    pub(super) fn new_thread(&self, name: IoThreadName, cpu: CpuId) -> IoThread {
        let first = self.watched.threads.first();
        let polling = first.map_or_else(Polling::default, |thread| thread.config.polling);
        IoThread { name, cpus: vec![cpu], polling, trust: None }
    }
}
