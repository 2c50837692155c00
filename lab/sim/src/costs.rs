//! What things cost.

use rtvirtio_units::Nanos;
use serde::{Deserialize, Serialize};

/// CPU time and delays of the data plane and its clients.
///
/// The defaults are what `rtvirtio-lab simulate --calibrate` found on two CPUs of an Intel Xeon (Linux 6.18, itself a
/// guest: docs/results/simulate/costs.txt). Another machine's are measured and given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Costs {
    /// Of the IOThread, for a request: taken, checked, started, and its end shown to the driver.
    pub request: Nanos,
    /// Of the IOThread, for each KiB of a request.
    pub kib: Nanos,
    /// Of the IOThread, for a request that does not follow another at once, on top: what it misses in caches is
    /// not fetched while it does the one before. See [`with_work`](Self::with_work).
    pub apart: Nanos,
    /// The same for each KiB of it.
    pub apart_kib: Nanos,
    /// Of the IOThread, for a frame of a network device: the system call.
    pub frame: Nanos,
    /// Of the IOThread, for each KiB of a frame.
    pub frame_kib: Nanos,
    /// Of the client, for a frame: what its network stack does.
    pub client_frame: Nanos,
    /// Of the IOThread, for a request whose end the device reports.
    pub reap: Nanos,
    /// Of the IOThread, for a turn.
    pub turn: Nanos,
    /// Of the IOThread that polls, until it sees what is there: one empty poll.
    pub poll: Nanos,
    /// Of the IOThread, to call a driver that waits (a write to its eventfd).
    pub call: Nanos,
    /// Of the IOThread, for a message: a queue let go, or taken.
    pub message: Nanos,
    /// Of the client, for a request: submitted, and its end taken.
    pub client: Nanos,
    /// Of the client, for each KiB of a request: made before it is written, looked at once it is read.
    pub client_kib: Nanos,
    /// Of the client, for a request that does not follow another at once, on top.
    pub client_apart: Nanos,
    /// The same for each KiB of it.
    pub client_apart_kib: Nanos,
    /// Of the client, when it is woken: to take the call, and to look what has ended.
    pub client_turn: Nanos,
    /// Of the client, to kick an IOThread that does not look.
    pub kick: Nanos,
    /// Of a thread that slept, until it does what it was woken for.
    pub wake: Nanos,
    /// Of a thread that had to give way to one that woke up, when it goes on: the switch, and what its caches lost.
    pub resume: Nanos,
    /// Of a thread that another one wakes from another CPU, on top: what they share is not in its caches.
    pub far: Nanos,
    /// To have another CPU run the thread that is woken, if it is idle.
    pub idle: Interrupt,
    /// The same if what it runs gives way.
    pub busy: Interrupt,
}

/// What the interrupt of another CPU costs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Interrupt {
    /// Of the thread that wakes, on top of its call or kick.
    pub sender: Nanos,
    /// Until that CPU notices.
    pub delay: Nanos,
    /// Of the thread that is woken, on top of `far`.
    pub receiver: Nanos,
}

impl Interrupt {
    fn scaled(self, mut of: impl FnMut(Nanos) -> Nanos) -> Self {
        Self { sender: of(self.sender), delay: of(self.delay), receiver: of(self.receiver) }
    }
}

impl Costs {
    /// With what the disk does for a request, and for each KiB of one, on the IOThread: so requests are apart.
    #[must_use]
    pub fn with_work(self, request: Nanos, kib: Nanos) -> Self {
        let kib = self.kib.saturating_add(kib);
        if request == Nanos::ZERO {
            return Self { kib, ..self };
        }
        Self {
            request: self.request.saturating_add(self.apart).saturating_add(request),
            kib: kib.saturating_add(self.apart_kib),
            client: self.client.saturating_add(self.client_apart),
            client_kib: self.client_kib.saturating_add(self.client_apart_kib),
            ..self
        }
    }

    /// Each cost times what `factor` says next, in the order of the fields; rounded to ns.
    #[must_use]
    pub fn scaled(self, mut factor: impl FnMut() -> f64) -> Self {
        let mut of = |cost: Nanos| Nanos::new((cost.get() as f64 * factor()).round() as u64);
        Self {
            request: of(self.request),
            kib: of(self.kib),
            apart: of(self.apart),
            apart_kib: of(self.apart_kib),
            frame: of(self.frame),
            frame_kib: of(self.frame_kib),
            client_frame: of(self.client_frame),
            reap: of(self.reap),
            turn: of(self.turn),
            poll: of(self.poll),
            call: of(self.call),
            message: of(self.message),
            client: of(self.client),
            client_kib: of(self.client_kib),
            client_apart: of(self.client_apart),
            client_apart_kib: of(self.client_apart_kib),
            client_turn: of(self.client_turn),
            kick: of(self.kick),
            wake: of(self.wake),
            resume: of(self.resume),
            far: of(self.far),
            idle: self.idle.scaled(&mut of),
            busy: self.busy.scaled(&mut of),
        }
    }

    pub(crate) fn largest(&self) -> Nanos {
        // Without `..`: a field that is new is not forgotten.
        let Self {
            request,
            kib,
            apart,
            apart_kib,
            frame,
            frame_kib,
            client_frame,
            reap,
            turn,
            poll,
            call,
            message,
            client,
            client_kib,
            client_apart,
            client_apart_kib,
            client_turn,
            kick,
            wake,
            resume,
            far,
            idle,
            busy,
        } = *self;
        let of = |of: Interrupt| of.sender.max(of.delay).max(of.receiver);
        [
            request,
            kib,
            apart,
            apart_kib,
            frame,
            frame_kib,
            client_frame,
            reap,
            turn,
            poll,
            call,
            message,
            client,
            client_kib,
            client_apart,
            client_apart_kib,
            client_turn,
            kick,
            wake,
            resume,
            far,
            of(idle),
            of(busy),
        ]
        .into_iter()
        .fold(Nanos::ZERO, Nanos::max)
    }
}

impl Default for Costs {
    fn default() -> Self {
        Self {
            request: Nanos::new(414),
            kib: Nanos::new(61),
            // No row showed it there.
            apart: Nanos::ZERO,
            apart_kib: Nanos::ZERO,
            // Not calibrated: those of a TAP by which turns are counted (`rtvirtio_dataplane`'s `drr::cost`), and what a
            // guest's network stack takes as a rule.
            frame: Nanos::new(1_600),
            frame_kib: Nanos::new(80),
            client_frame: Nanos::new(1_500),
            // Not calibrated: depth 32 on "disk" beside the same in memory (docs/results/dataplane).
            reap: Nanos::new(500),
            turn: Nanos::new(150),
            poll: Nanos::new(60),
            call: Nanos::new(1_106),
            message: Nanos::new(7_872),
            client: Nanos::new(247),
            client_kib: Nanos::new(87),
            client_apart: Nanos::ZERO,
            client_apart_kib: Nanos::ZERO,
            client_turn: Nanos::ZERO,
            kick: Nanos::new(1_106),
            wake: Nanos::new(1_376),
            // No row showed it there.
            resume: Nanos::ZERO,
            far: Nanos::new(3_868),
            idle: Interrupt {
                sender: Nanos::new(7_908),
                delay: Nanos::new(13_992),
                receiver: Nanos::new(16),
            },
            busy: Interrupt {
                sender: Nanos::new(9_095),
                delay: Nanos::new(21_281),
                receiver: Nanos::new(4_046),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cost_counts_for_the_largest() {
        let (own, long) = (Costs::default(), Nanos::from_millis(2_000));
        for costs in [
            Costs { frame: long, ..own },
            Costs { frame_kib: long, ..own },
            Costs { client_frame: long, ..own },
            Costs { apart: long, ..own },
            Costs { client_apart_kib: long, ..own },
            Costs { busy: Interrupt { delay: long, ..own.busy }, ..own },
        ] {
            assert_eq!(costs.largest(), long);
        }
    }

    #[test]
    fn each_cost_is_scaled_by_a_factor_of_its_own() {
        let own = Costs::default();
        assert_eq!(own.scaled(|| 1.0), own);
        let mut factor = 1.0;
        let scaled = own.scaled(|| {
            factor += 1.0;
            factor
        });
        assert_eq!((scaled.request.get(), scaled.kib.get()), (2 * 414, 3 * 61));
        assert_eq!(scaled.busy.receiver.get(), 28 * 4_046);
    }

    #[test]
    fn work_comes_on_top_and_parts_requests_only_if_there_is_some() {
        let own = Costs {
            request: Nanos::new(300),
            kib: Nanos::new(30),
            apart: Nanos::new(1_500),
            apart_kib: Nanos::new(20),
            client: Nanos::new(200),
            client_kib: Nanos::new(50),
            client_apart: Nanos::new(900),
            client_apart_kib: Nanos::new(10),
            ..Costs::default()
        };
        let of = |costs: Costs| {
            let Costs { request, kib, client, client_kib, .. } = costs;
            [request, kib, client, client_kib].map(Nanos::get)
        };
        let apart = own.with_work(Nanos::from_micros(20), Nanos::new(40));
        assert_eq!(of(apart), [21_800, 90, 1_100, 60]);
        assert_eq!(of(own.with_work(Nanos::ZERO, Nanos::new(40))), [300, 70, 200, 50]);
    }
}
