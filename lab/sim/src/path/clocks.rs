//! When a task's requests are due.

use super::condition::Task;

/// When a task's requests are due: fio keeps the rates of reads and of writes apart (`rate_ddir`).
#[derive(Debug, Clone, Copy)]
pub(super) struct Clocks {
    pub(super) start: u64,
    /// Of reads and of writes, ns; infinite where the task has none.
    periods: [f64; 2],
    pub(super) issued: [u64; 2],
}

impl Clocks {
    pub(super) fn new(task: &Task, start: u64) -> Self {
        let periods = [task.read_fraction, 1.0 - task.read_fraction]
            .map(|part| task.iops.map_or(0.0, |iops| 1e9 / (iops * part)));
        let mut clocks = Self { start, periods, issued: [0; 2] };
        clocks.restart(start);
        clocks
    }

    /// From now on, and nothing is owed.
    pub(super) fn restart(&mut self, start: u64) {
        self.start = start;
        // The first of either is due at once, but of what never comes.
        self.issued = self.periods.map(|period| u64::from(period.is_infinite()));
    }

    fn due(&self) -> [u64; 2] {
        let due = |direction: usize| {
            let after = self.issued[direction] as f64 * self.periods[direction];
            self.start.saturating_add(after as u64)
        };
        [due(0), due(1)]
    }

    /// When the next is due.
    pub(super) fn first(&self) -> u64 {
        self.due().into_iter().min().unwrap_or(u64::MAX)
    }

    /// The direction of the next, and when it is due: one that was drawn by the task's mix if that is due, else the
    /// other if that is, else what comes first.
    pub(super) fn next(&self, now: u64, drawn: usize) -> (usize, u64) {
        let due = self.due();
        let other = 1 - drawn;
        let is_drawn = due[drawn] <= now || (due[other] > now && due[drawn] <= due[other]);
        let direction = if is_drawn { drawn } else { other };
        (direction, due[direction])
    }
}

#[cfg(test)]
mod tests {
    use rtvirtio_units::Bytes;

    use super::*;

    fn clocks(iops: f64, read_fraction: f64) -> Clocks {
        let task = Task {
            iops: Some(iops),
            block_size: Bytes::from_kib(4),
            read_fraction,
            queue_depth: 1,
            deadline: None,
        };
        Clocks::new(&task, 1_000)
    }

    #[test]
    fn reads_and_writes_have_clocks_of_their_own() {
        let mut clocks = clocks(1_000.0, 0.8);
        // Reads every 1.25 ms, writes every 5.
        clocks.issued = [3, 1];
        assert_eq!(clocks.due(), [3_751_000, 5_001_000]);
        assert_eq!(clocks.first(), 3_751_000);
        // Neither is due: what comes first. Reads are: reads, whatever was drawn. Both are: what was drawn.
        for (now, directions) in [(0, [0, 0]), (4_000_000, [0, 0]), (6_000_000, [0, 1])] {
            assert_eq!([0, 1].map(|drawn| clocks.next(now, drawn).0), directions, "{now}");
        }
        clocks.restart(9_000_000);
        assert_eq!(clocks.due(), [9_000_000; 2]);
    }

    #[test]
    fn what_a_task_never_does_is_never_due() {
        assert_eq!(clocks(1_000.0, 1.0).due(), [1_000, u64::MAX]);
        assert_eq!(clocks(1_000.0, 0.0).next(0, 0), (1, 1_000));
    }
}
