//! Which vCPU drives which queue.
//!
//! Nobody says so: a front end's threads are known by their names alone, and a guest may use its queues as it likes. But
//! a driver that waits for requests sleeps, and a call of its queue has it get a CPU once more. So of the vCPUs the one
//! that got CPUs as often as a queue's driver was called, in each of some short times, is its driver; one that wakes up for
//! much else is none that is found.

use std::collections::{BTreeMap, VecDeque};

use rtvirtio_units::Nanos;

use crate::{QueueId, Snapshot, VcpuId};

/// Times that are compared, and how long each is at least.
const TIMES: usize = 10;
const TIME: Nanos = Nanos::from_millis(90);

/// Calls in these: a queue with fewer is not worth knowing.
const CALLS: u64 = 500;

/// What a driver's turns may differ from its queue's calls, as a part of these, summed over the times without sign.
const DIFFERS: f64 = 0.1;

/// How many times as much those of any other vCPU must.
const APART: f64 = 2.0;

/// Counters at the times, and what is known by them.
#[derive(Debug, Default)]
pub(crate) struct Drivers {
    rows: VecDeque<Row>,
    known: BTreeMap<QueueId, VcpuId>,
}

/// Counters at one time, by id.
#[derive(Debug, Default)]
struct Row {
    at: Nanos,
    calls: Vec<(QueueId, u64)>,
    turns: Vec<(VcpuId, u64)>,
}

impl Drivers {
    /// Takes a snapshot into account if vCPUs' counters in it are as old as queues', and it is time.
    pub(crate) fn note(&mut self, snapshot: &Snapshot) {
        let is_soon = |last: &Row| snapshot.now.saturating_sub(last.at) < TIME;
        if snapshot.measured != snapshot.now || self.rows.back().is_some_and(is_soon) {
            return;
        }
        let full = self.rows.len() > TIMES;
        let mut row = if full { self.rows.pop_front() } else { None }.unwrap_or_default();
        row.at = snapshot.now;
        row.calls.clear();
        row.calls.extend(snapshot.queues.iter().map(|queue| (queue.id, queue.calls)));
        row.turns.clear();
        row.turns.extend(snapshot.vcpus.iter().map(|vcpu| (vcpu.id, vcpu.turns)));
        self.rows.push_back(row);
    }

    /// Those that are known, by queue. Who was found stays known until another one is, or it is gone.
    pub(crate) fn find(&mut self) -> &BTreeMap<QueueId, VcpuId> {
        let turns = series(&self.rows, |row| &row.turns);
        self.known.retain(|_, vcpu| turns.iter().any(|(id, _)| id == vcpu));
        for (queue, calls) in series(&self.rows, |row| &row.calls) {
            let all: u64 = calls.iter().fold(0, |sum, n| sum.saturating_add(*n));
            if all < CALLS {
                continue;
            }
            let most = DIFFERS * all as f64;
            let mut best: Option<(f64, VcpuId)> = None;
            let mut next = f64::INFINITY;
            for (vcpu, turns) in &turns {
                let differs: f64 =
                    calls.iter().zip(turns).map(|(a, b)| a.abs_diff(*b) as f64).sum();
                match best {
                    Some((least, _)) if differs >= least => next = next.min(differs),
                    _ => {
                        next = best.map_or(next, |(least, _)| least);
                        best = Some((differs, *vcpu));
                    }
                }
            }
            if let Some((differs, vcpu)) = best
                && differs <= most
                && APART * differs.max(1.0) <= next
            {
                self.known.retain(|_, of| *of != vcpu);
                self.known.insert(queue, vcpu);
            }
        }
        &self.known
    }
}

/// What was counted in each time, of those that are in every row.
fn series<I: Ord + Copy>(
    rows: &VecDeque<Row>,
    of: impl Fn(&Row) -> &Vec<(I, u64)>,
) -> Vec<(I, [u64; TIMES])> {
    let mut series = Vec::new();
    let Some(last) = rows.back().filter(|_| rows.len() > TIMES) else { return series };
    'ids: for &(id, _) in of(last) {
        let mut counts = [0; TIMES];
        let mut before = None;
        for (at, row) in rows.iter().enumerate() {
            let row = of(row);
            let Ok(found) = row.binary_search_by_key(&id, |(id, _)| *id) else { continue 'ids };
            let now = row[found].1;
            if let Some(before) = before.replace(now) {
                counts[at - 1] = now.saturating_sub(before);
            }
        }
        series.push((id, counts));
    }
    series
}

#[cfg(test)]
mod tests {
    use rtvirtio_units::CpuId;

    use super::*;
    use crate::{Queue, ThreadId, Vcpu, VmId};

    /// Rows in which queues are called, and vCPUs get CPUs, as often as these say of each time.
    fn known(
        queues: &[fn(u64) -> u64],
        vcpus: &[fn(u64) -> u64],
        times: u64,
    ) -> BTreeMap<QueueId, VcpuId> {
        let mut drivers = Drivers::default();
        let queue = |id| Queue::new(QueueId(id), VmId(0), ThreadId(0));
        let vcpu = |id| Vcpu { id: VcpuId(id), cpu: Some(CpuId::new(0)), turns: 7 };
        let mut snapshot = Snapshot {
            queues: (0..queues.len() as u32).map(queue).collect(),
            vcpus: (0..vcpus.len() as u32).map(vcpu).collect(),
            ..Snapshot::default()
        };
        for time in 0..=times {
            snapshot.now = Nanos::from_millis(100 * time);
            snapshot.measured = snapshot.now;
            drivers.note(&snapshot);
            let next = snapshot.queues.iter_mut().zip(queues);
            next.for_each(|(queue, calls)| queue.calls += calls(time));
            let next = snapshot.vcpus.iter_mut().zip(vcpus);
            next.for_each(|(vcpu, turns)| vcpu.turns += turns(time));
        }
        drivers.find().clone()
    }

    #[test]
    fn driver_is_who_wakes_as_often_as_its_queue_calls() {
        let queues: [fn(u64) -> u64; 4] =
            [|t| 200 + t % 3, |t| 200 + t % 5, |t| 210 - t % 4, |_| 20];
        // One more turn now and then; one that is called seldom, and one that computes.
        let vcpus: [fn(u64) -> u64; 5] =
            [|_| 20, |t| 211 - t % 4, |t| 200 + t % 3 + t % 2, |t| 200 + t % 5, |t| 50 * (t % 9)];
        let found = known(&queues, &vcpus, 10);
        let pair = |queue, vcpu| (QueueId(queue), VcpuId(vcpu));
        assert_eq!(found, BTreeMap::from([pair(0, 2), pair(1, 3), pair(2, 1)]));
        // Too few times.
        assert!(known(&queues, &vcpus, 9).is_empty());
    }

    #[test]
    fn no_driver_is_guessed() {
        let queue: fn(u64) -> u64 = |t| 200 + t % 3;
        // Two that are alike; one with half as many turns again; none.
        assert!(known(&[queue], &[|t| 201 + t % 3, |t| 201 - t % 2], 12).is_empty());
        assert!(known(&[queue], &[|t| 300 + t % 3], 12).is_empty());
        assert!(known(&[queue], &[], 12).is_empty());
    }
}
