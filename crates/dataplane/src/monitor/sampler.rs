//! What a policy is shown.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rtvirtio_iocores::{Queue, QueueId, Snapshot, Thread, ThreadId, VmId};
use rtvirtio_spec::serve::{IoThread, Polling};
use rtvirtio_units::{CpuId, IoThreadName, Nanos};

use super::host::{Host, OnCpu, SchedStat};
use super::log::Totals;
use crate::plane::iothreads::{Core, Watched, WatchedQueue, WatchedThread, WatchedVm};
use crate::stats::Progress;

/// The host's CPUs and the vCPUs are looked at in every sample of this number: the kernel counts a
/// CPU's idle time in steps of 10 ms.
const REFRESH: u64 = 10;

/// An IOThread at the last sample.
struct ThreadBefore {
    id: ThreadId,
    stat: SchedStat,
    on_cpu: OnCpu,
}

/// Takes samples.
#[derive(Default)]
pub(super) struct Sampler {
    /// Of the data plane's; 0: nothing was seen yet.
    version: u64,
    watched: Watched,
    threads: Vec<ThreadBefore>,
    /// By id.
    queues: Vec<(u32, Progress)>,
    host: Host,
    samples: u64,
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
            self.match_before();
        }
        self.snapshot.now = now;
        self.sample_threads();
        self.sample_queues();
        if self.samples.is_multiple_of(REFRESH) {
            let vms = self.watched.vms.iter();
            let peer = |vm: &WatchedVm| Some((vm.device.upgrade()?.peer()?, VmId(vm.id)));
            let mut peers: Vec<_> = vms.filter_map(peer).collect();
            peers.sort_unstable();
            peers.dedup();
            self.host.refresh(&peers, &mut self.snapshot.cpus, &mut self.snapshot.vms);
        }
        self.samples += 1;
    }

    /// What is new has done nothing yet; what is gone is forgotten.
    fn match_before(&mut self) {
        let mut before = std::mem::take(&mut self.threads);
        for thread in &self.watched.threads {
            let id = ThreadId(thread.id.get());
            let known = before.iter().position(|before| before.id == id);
            self.threads.push(known.map_or_else(
                || {
                    let stat = SchedStat::of_thread(thread.tid);
                    let on_cpu = stat.read();
                    ThreadBefore { id, stat, on_cpu }
                },
                |known| before.swap_remove(known),
            ));
        }
        let before = std::mem::take(&mut self.queues);
        for queue in &self.watched.queues {
            let known = before.binary_search_by_key(&queue.id, |(id, _)| *id);
            let progress = known.map_or_else(|_| queue.stats.progress(), |known| before[known].1);
            self.queues.push((queue.id, progress));
        }
    }

    fn sample_threads(&mut self) {
        self.snapshot.threads.clear();
        for (thread, before) in self.watched.threads.iter().zip(&mut self.threads) {
            let on_cpu = before.stat.read();
            self.totals.ran += on_cpu.ran.saturating_sub(before.on_cpu.ran).get();
            // A thread that has just ended has no times.
            if on_cpu != OnCpu::default() {
                before.on_cpu = on_cpu;
            }
            let stats = &thread.stats;
            let ns = |number: &AtomicU64| Nanos::new(number.load(Relaxed));
            self.snapshot.threads.push(Thread {
                id: before.id,
                cpu: match thread.config.cpus[..] {
                    [only] => Some(only),
                    _ => None,
                },
                locked: thread.locked,
                busy: ns(&stats.busy_ns),
                poll: ns(&stats.poll_ns),
                sleep: ns(&stats.sleep_ns),
                ran: before.on_cpu.ran,
                waited: before.on_cpu.waited,
            });
        }
    }

    fn sample_queues(&mut self) {
        self.snapshot.queues.clear();
        for (queue, (_, before)) in self.watched.queues.iter().zip(&mut self.queues) {
            let now = queue.stats.progress();
            self.totals.requests += now.requests.saturating_sub(before.requests);
            self.totals.waited += now.waited.saturating_sub(before.waited).get();
            self.snapshot.queues.push(Queue {
                id: QueueId(queue.id),
                vm: VmId(queue.vm),
                thread: ThreadId(queue.thread.get()),
                busy: now.busy,
                requests: now.requests,
                bytes: now.bytes,
                waited: now.waited,
                in_flight: now.in_flight().min(u32::MAX.into()) as u32,
                standing: now.is_standing(*before),
            });
            *before = now;
        }
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
        IoThread { name, cpus: vec![cpu], polling }
    }
}
