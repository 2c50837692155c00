//! What things cost.

use rtvirtio_units::Nanos;
use serde::{Deserialize, Serialize};

/// CPU time and delays of the data plane and its clients.
///
/// The defaults come from docs/results/dataplane (2 cores of an AMD EPYC, Linux 6.18, 4 KiB reads of a
/// disk in memory): each says from which figure. Another machine's are measured and given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Costs {
    /// Of the IOThread, for a request: taken, checked, started, and its end shown to the driver.
    pub request: Nanos,
    /// Of the IOThread, for each KiB of a request.
    pub kib: Nanos,
    /// Of the IOThread, for a request whose end the device reports.
    pub reap: Nanos,
    /// Of the IOThread, for a turn.
    pub turn: Nanos,
    /// Of the IOThread that polls, until it sees what is there: one empty poll.
    pub poll: Nanos,
    /// Of the IOThread, to call a driver that waits (a write to its eventfd).
    pub call: Nanos,
    /// Of the IOThread, for a letter: a queue let go, or taken.
    pub letter: Nanos,
    /// Of the client, for a request: submitted, and its end taken.
    pub client: Nanos,
    /// Of the client, for each KiB of a request: made before it is written, looked at once it is read.
    pub client_kib: Nanos,
    /// Of the client, to kick an IOThread that does not look.
    pub kick: Nanos,
    /// Of a thread that slept, until it does what it was woken for.
    pub wake: Nanos,
    /// Of a thread on whose CPU another one ran meanwhile, on top.
    pub switch: Nanos,
    /// Of a thread that wakes another one on another CPU, to interrupt that CPU: where it is idle, or what
    /// it runs gives way. On top of a call or kick.
    pub interrupt: Nanos,
    /// From a kick, call, letter or end of a request until that CPU notices.
    pub wake_delay: Nanos,
}

impl Default for Costs {
    /// Read: "ram randread", server rtvirtio, of table.txt.
    fn default() -> Self {
        Self {
            // 1 queue, depth 32: 0.37 µs for a request of 4 KiB, of which the copy is about 0.16 (25 GB/s).
            request: Nanos::new(200),
            kib: Nanos::new(40),
            // "disk", depth 32, beside the same in memory.
            reap: Nanos::new(500),
            turn: Nanos::new(150),
            poll: Nanos::new(60),
            // 1 queue, depth 1: 5.6 µs a round, of which the client has 3.4 and the request 0.4.
            call: Nanos::new(1_500),
            // Moves: p50 14 µs, 7 of which are a wake-up.
            letter: Nanos::new(2_000),
            // 1 queue, depth 32: 0.28 µs.
            client: Nanos::new(280),
            // Clients of that benchmark do not look at their data.
            client_kib: Nanos::ZERO,
            kick: Nanos::new(1_000),
            // 1 queue, depth 1: 3.4 µs of the client for a request, 0.3 of which are the above.
            wake: Nanos::new(2_500),
            // 4 queues, depth 1: 5.8 µs of the client for a request where 4 clients take turns, of which
            // not each finds that another one has had its CPU.
            switch: Nanos::new(4_400),
            // Part of `call` and `kick` there: each was an interrupt.
            interrupt: Nanos::ZERO,
            // The rest of the 5.6.
            wake_delay: Nanos::new(700),
        }
    }
}
