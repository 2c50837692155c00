//! A block device with its scheduler, as blk-mq drives it: of a host, or within a guest.

use std::collections::VecDeque;

use rand::{Rng, RngExt};
use rand_distr::Exp1;
use rtvirtio_spec::settings::Scheduler;

use super::bfq::{Bfq, Process};
use super::deadline::MqDeadline;
use super::kyber::Kyber;
use super::request::{Elevator, Fifo, Request};
use super::tick::TICK;

/// Requests that the driver takes (tags of a hardware queue): a loop device's default, and that of virtio-blk.
pub(super) const TAGS: u32 = 128;
/// When a scheduler that has work but gave none is asked again (`BLK_MQ_BUDGET_DELAY`): 3 ms are a tick, and the
/// timer wheel rounds up by one more.
const fn asked_again(now: u64) -> u64 {
    (now / TICK + 2) * TICK
}

/// How long kblockd takes on average to run the queue, ns: by block's and workqueue's tracepoints, bfq on a loop
/// device, two CPUs, Linux 6.18.
const KBLOCKD: f64 = 8_000.0;
/// What it takes to wake who waits for a tag, ns (the same trace).
const WAKE_UP: u64 = 35_000;

/// One device.
#[derive(Debug)]
pub(super) struct Tier {
    elevator: Box<dyn Elevator>,
    in_driver: u32,
    /// Those that wait, by process: the first for the first tag (`bfq_limit_depth` leaves it no other: a depth of 1 of
    /// each word of the tags' bitmap is one tag of the first), the others behind it.
    blocked: Vec<VecDeque<Request>>,
    /// Processes that wait for a tag, the first to be woken up first.
    waiting: VecDeque<u32>,
    /// Which request has the first tag, as far as it was to have that.
    first_tag: Option<u32>,
    /// When the scheduler is asked again.
    again: Option<u64>,
    /// When kblockd runs the queue.
    goes_on: Option<u64>,
    /// When a process that waits for a tag looks again.
    looks: Option<u64>,
    /// When the next event of this tier is due that has been asked for.
    pub(super) event_at: u64,
}

impl Tier {
    /// A device that nothing has been given to. `groups` are (parent, weight) of cgroups; bfq alone minds them and
    /// the processes, and has been at work before (`seasoned`) or just been chosen.
    pub(super) fn new(
        scheduler: Scheduler,
        groups: &[(usize, u32)],
        processes: &[Process],
        seasoned: bool,
    ) -> Self {
        let elevator: Box<dyn Elevator> = match scheduler {
            // A condition with iocost is refused (`Condition::check`).
            Scheduler::None | Scheduler::IoCost(_) => Box::new(Fifo::default()),
            Scheduler::MqDeadline => Box::new(MqDeadline::default()),
            Scheduler::Kyber => Box::new(Kyber::default()),
            Scheduler::Bfq(parameters) => {
                let bfq = Bfq::new(parameters, groups, processes);
                Box::new(if seasoned { bfq.season() } else { bfq })
            }
        };
        Self {
            elevator,
            in_driver: 0,
            blocked: processes.iter().map(|_| VecDeque::new()).collect(),
            waiting: VecDeque::new(),
            first_tag: None,
            again: None,
            goes_on: None,
            looks: None,
            event_at: u64::MAX,
        }
    }

    pub(super) const fn in_driver(&self) -> u32 {
        self.in_driver
    }

    /// A process submits.
    pub(super) fn submit(&mut self, now: u64, request: Request) {
        let waits = !self.blocked[request.process as usize].is_empty();
        if waits || !self.admit(now, request) {
            self.blocked[request.process as usize].push_back(request);
            if !waits {
                self.waiting.push_back(request.process);
            }
        }
    }

    /// Several are submitted from a plug (`blk_throtl_dispatch_work_fn`): they get their tags before the scheduler has
    /// seen any of them.
    pub(super) fn submit_plugged(&mut self, now: u64, requests: &[Request]) {
        let admits = |r: &Request| {
            self.blocked[r.process as usize].is_empty() && self.elevator.admits(r.process, r.write)
        };
        let admitted: Vec<_> = requests.iter().map(admits).collect();
        for (&request, admitted) in requests.iter().zip(admitted) {
            if admitted {
                self.insert(now, request);
            } else {
                self.submit(now, request);
            }
        }
    }

    /// kblockd is to run the queue: what it would have run later it runs now (`kblockd_mod_delayed_work_on`).
    pub(super) fn defer(&mut self, now: u64, rng: &mut impl Rng) {
        self.again = None;
        self.goes_on.get_or_insert(now + (KBLOCKD * rng.sample::<f64, _>(Exp1)) as u64);
    }

    /// A run gave nothing to the driver: if the scheduler has work, it is asked again later, unless kblockd is to run
    /// the queue anyway (`blk_mq_delay_run_hw_queues`).
    pub(super) fn ask_again(&mut self, now: u64) {
        if self.goes_on.is_none() && self.in_driver < TAGS && self.elevator.has_work() {
            self.again.get_or_insert(asked_again(now));
        }
    }

    /// The next request that the driver gets, if there is one now.
    pub(super) fn next(&mut self, now: u64) -> Option<Request> {
        if self.in_driver == TAGS || !self.elevator.has_work() {
            return None;
        }
        let request = self.elevator.dispatch(now);
        self.in_driver += u32::from(request.is_some());
        request
    }

    /// The driver has done `request`, which it got at `started`. Returns whether to ask for the next.
    pub(super) fn complete(
        &mut self,
        now: u64,
        request: &Request,
        started: u64,
        rng: &mut impl Rng,
    ) -> bool {
        let full = self.in_driver == TAGS;
        self.in_driver -= 1;
        self.first_tag.take_if(|id| *id == request.id);
        let asks = self.elevator.completed(now, request, started);
        if !self.waiting.is_empty() {
            self.looks.get_or_insert(now + WAKE_UP);
        }
        if asks {
            self.defer(now, rng);
        }
        full
    }

    /// Gives a request a tag, if there is one for it.
    fn admit(&mut self, now: u64, request: Request) -> bool {
        self.elevator.admits(request.process, request.write) && self.insert(now, request)
            || self.admit_as_first(now, request)
    }

    fn admit_as_first(&mut self, now: u64, request: Request) -> bool {
        self.first_tag.is_none() && {
            self.first_tag = Some(request.id);
            self.insert(now, request)
        }
    }

    fn insert(&mut self, now: u64, request: Request) -> bool {
        self.elevator.insert(now, Request { at: now, ..request });
        true
    }

    /// Who waits for a tag looks again.
    fn look(&mut self, now: u64) {
        // What it may have was settled when it began to wait.
        while self.first_tag.is_none()
            && let Some(process) = self.waiting.pop_front()
        {
            let index = process as usize;
            let mut admits = Self::admit_as_first as fn(&mut Self, u64, Request) -> bool;
            while let Some(&request) = self.blocked[index].front()
                && admits(self, now, request)
            {
                self.blocked[index].pop_front();
                admits = Self::admit;
            }
            if !self.blocked[index].is_empty() {
                self.waiting.push_back(process);
            }
        }
    }

    /// When [`Tier::timer`] is to be called next.
    pub(super) fn timer_at(&self) -> u64 {
        let times = [self.elevator.timer_at(), self.again, self.goes_on, self.looks];
        times.into_iter().flatten().min().unwrap_or(u64::MAX)
    }

    /// It may be time: for the scheduler's own timer, or to ask it again. Returns whether to ask for the next
    /// request.
    pub(super) fn timer(&mut self, now: u64, rng: &mut impl Rng) -> bool {
        let is_due = |at: u64| at <= now;
        let mut runs = self.again.take_if(|at| is_due(*at)).is_some();
        runs |= self.goes_on.take_if(|at| is_due(*at)).is_some();
        if self.looks.take_if(|at| is_due(*at)).is_some() {
            // It runs the queue, for that may free a tag (`blk_mq_get_tag`).
            runs = true;
            self.look(now);
        }
        if self.elevator.timer_at().is_some_and(is_due) {
            self.elevator.timer(now);
            self.defer(now, rng);
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    /// Everybody is to have the first tag; what is queued goes to the driver at once.
    #[derive(Debug, Default)]
    struct OneTag(VecDeque<Request>);

    impl Elevator for OneTag {
        fn admits(&self, _process: u32, _write: bool) -> bool {
            false
        }

        fn insert(&mut self, _now: u64, request: Request) {
            self.0.push_back(request);
        }

        fn dispatch(&mut self, _now: u64) -> Option<Request> {
            self.0.pop_front()
        }

        fn has_work(&self) -> bool {
            !self.0.is_empty()
        }

        fn completed(&mut self, _now: u64, _request: &Request, _started: u64) -> bool {
            false
        }
    }

    #[test]
    fn run_is_repeated_after_one_to_two_ticks() {
        for now in [0, 1, TICK - 1, TICK, 5 * TICK + 7] {
            let later = asked_again(now) - now;
            assert!(later > TICK && later <= 2 * TICK, "{now}: {later}");
        }
    }

    /// Has work, and keeps it.
    #[derive(Debug)]
    struct Keeps;

    impl Elevator for Keeps {
        fn insert(&mut self, _now: u64, _request: Request) {}

        fn dispatch(&mut self, _now: u64) -> Option<Request> {
            None
        }

        fn has_work(&self) -> bool {
            true
        }

        fn completed(&mut self, _now: u64, _request: &Request, _started: u64) -> bool {
            false
        }
    }

    #[test]
    fn kblockd_takes_the_place_of_the_repeated_run() {
        let rng = &mut rand_pcg::Pcg64Mcg::seed_from_u64(1);
        let mut tier = Tier::new(Scheduler::None, &[], &[], false);
        tier.elevator = Box::new(Keeps);
        // A pending run is not put off by another that gives nothing.
        tier.ask_again(0);
        tier.ask_again(TICK);
        assert_eq!(tier.timer_at(), 2 * TICK);
        tier.defer(TICK, rng);
        let at = tier.timer_at();
        assert!((TICK..TICK + 200_000).contains(&at), "{at}");
        tier.ask_again(TICK);
        assert!(tier.timer(at, rng) && tier.timer_at() == u64::MAX);
        tier.ask_again(at);
        assert_eq!(tier.timer_at(), 3 * TICK);
    }

    #[test]
    fn who_waits_for_a_tag_looks_soon_after_each_end() {
        let rng = &mut rand_pcg::Pcg64Mcg::seed_from_u64(1);
        let process = Process { group: 0, class: 1, level: 4 };
        let mut tier = Tier::new(Scheduler::None, &[], &[process; 2], false);
        tier.elevator = Box::new(OneTag::default());
        let request =
            |id, process| Request { id, process, position: 0, sectors: 8, write: false, at: 0 };
        for (id, process) in [(0, 0), (1, 1), (2, 1)] {
            tier.submit(0, request(id, process));
        }
        let first = tier.next(0).unwrap();
        assert_eq!((first.id, tier.next(0), tier.waiting.len()), (0, None, 1));
        // Nobody has its tag before who waits has been woken up.
        assert!(!tier.complete(100_000, &first, 0, rng));
        assert_eq!((tier.next(100_000), tier.timer_at()), (None, 100_000 + WAKE_UP));
        assert!(!tier.timer(100_000, rng) && tier.timer(100_000 + WAKE_UP, rng));
        let second = tier.next(200_000).unwrap();
        assert_eq!((second.id, second.at, tier.waiting.len()), (1, 100_000 + WAKE_UP, 1));
        assert!(!tier.complete(200_000, &second, 0, rng) && tier.timer(300_000, rng));
        assert_eq!((tier.next(300_000).map(|r| r.id), tier.waiting.len()), (Some(2), 0));
    }
}
