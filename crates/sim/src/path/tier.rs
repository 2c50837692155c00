//! A block device with its scheduler, as blk-mq drives it: of a host, or within a guest.

use std::collections::VecDeque;

use rtvirtio_spec::settings::Scheduler;

use super::bfq::{Bfq, Process};
use super::deadline::MqDeadline;
use super::kyber::Kyber;
use super::request::{Elevator, Fifo, Request};

/// Requests that the driver takes (tags of a hardware queue): a loop device's default, and that of virtio-blk.
pub(super) const TAGS: u32 = 128;
/// When a scheduler that has work but gave none is asked again (`BLK_MQ_BUDGET_DELAY`, 3 ms).
const ASK_AGAIN: u64 = 3_000_000;

/// One device.
#[derive(Debug)]
pub(super) struct Tier {
    elevator: Box<dyn Elevator>,
    in_driver: u32,
    /// Requests queued or in the driver, by process.
    held: Vec<u32>,
    /// Those that get no tag for now, by process: each has others of its own under way, whose ends let it in.
    blocked: Vec<VecDeque<Request>>,
    /// When the scheduler is asked again.
    again: Option<u64>,
    /// When the next event of this tier is due that has been asked for.
    pub(super) event_at: u64,
}

impl Tier {
    /// A device that nothing has been given to. `groups` are (parent, weight) of cgroups; bfq alone minds them and
    /// the processes.
    pub(super) fn new(
        scheduler: Scheduler,
        groups: &[(usize, u32)],
        processes: &[Process],
    ) -> Self {
        let elevator: Box<dyn Elevator> = match scheduler {
            Scheduler::None => Box::new(Fifo::default()),
            Scheduler::MqDeadline => Box::new(MqDeadline::default()),
            Scheduler::Kyber => Box::new(Kyber::default()),
            Scheduler::Bfq(parameters) => Box::new(Bfq::new(parameters, groups, processes)),
        };
        Self {
            elevator,
            in_driver: 0,
            held: vec![0; processes.len()],
            blocked: processes.iter().map(|_| VecDeque::new()).collect(),
            again: None,
            event_at: u64::MAX,
        }
    }

    /// A process submits.
    pub(super) fn submit(&mut self, now: u64, request: Request) {
        self.blocked[request.process as usize].push_back(request);
        self.admit(now, request.process);
    }

    /// The next request that the driver gets, if there is one now.
    pub(super) fn next(&mut self, now: u64) -> Option<Request> {
        if self.in_driver == TAGS {
            return None;
        }
        let request = self.elevator.dispatch(now);
        if request.is_some() {
            self.in_driver += 1;
        } else if self.elevator.has_work() && self.again.is_none() {
            self.again = Some(now + ASK_AGAIN);
        }
        request
    }

    /// The driver has done `request`, which it got at `started`. Returns whether to ask for the next.
    pub(super) fn complete(&mut self, now: u64, request: &Request, started: u64) -> bool {
        let full = self.in_driver == TAGS;
        self.in_driver -= 1;
        self.held[request.process as usize] -= 1;
        let asks = self.elevator.completed(now, request, started);
        asks | full | self.admit(now, request.process)
    }

    /// Gives tags to a process's requests that may have them. Returns whether one got one.
    fn admit(&mut self, now: u64, process: u32) -> bool {
        let index = process as usize;
        let mut admitted = false;
        while let Some(&request) = self.blocked[index].front()
            && self.elevator.admits(process, request.write, self.held[index])
        {
            self.blocked[index].pop_front();
            self.held[index] += 1;
            self.elevator.insert(now, request);
            admitted = true;
        }
        admitted
    }

    /// When [`Tier::timer`] is to be called next.
    pub(super) fn timer_at(&self) -> u64 {
        let elevator = self.elevator.timer_at().unwrap_or(u64::MAX);
        elevator.min(self.again.unwrap_or(u64::MAX))
    }

    /// It may be time: for the scheduler's own timer, or to ask it again. Returns whether to ask for the next
    /// request.
    pub(super) fn timer(&mut self, now: u64) -> bool {
        let again = self.again.is_some_and(|at| at <= now);
        if again {
            self.again = None;
        }
        let due = self.elevator.timer_at().is_some_and(|at| at <= now);
        if due {
            self.elevator.timer(now);
        }
        again | due
    }
}
