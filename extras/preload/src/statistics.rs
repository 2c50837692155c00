//! What a process's calls took, counted if asked for and said when the process exits.
//!
//! It is said on standard error, if that is what it was at the start, takes it without waiting, and is not
//! broken: a program that closed it, or has a file of its own in its place, is not disturbed. A process that
//! ends by a signal, `_exit` or exec says nothing. A forked child counts from zero.

use std::ffi::CStr;
use std::fmt::Write as _;
use std::os::fd::BorrowedFd;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use rtvirtio_completion::Mode;
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::process;
use crate::signals::Signals;

/// What became of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum Way {
    /// Short: ended while its thread looked for that.
    Spun,
    /// Short: its thread went to sleep after all.
    Parked,
    /// By a slot: ended while its thread looked for that.
    Slot,
    /// By a slot: its thread went to sleep.
    SlotParked,
    /// Plain, since no CPU was idle.
    WithoutToken,
    /// Plain, since the ring did not answer with what was asked for.
    Refused,
    /// Plain, as what is not direct I/O on a regular file or block device.
    Passed,
}

/// In the order of [`Way`].
const NAMES: [&str; 7] =
    ["spun", "parked", "slots_spun", "slots_parked", "without_token", "refused", "passed"];

/// Of one way.
#[derive(Debug, Default)]
struct Counter {
    calls: AtomicU64,
    /// Sum of how long they took, ns.
    ns: AtomicU64,
}

/// All zeroes at first.
#[derive(Debug, Default)]
pub(crate) struct Counters([Counter; NAMES.len()]);

/// How to say it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    Text,
    Json,
}

impl FromStr for Form {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            _ => Err(()),
        }
    }
}

/// Whether anything is counted.
static COUNTS: AtomicBool = AtomicBool::new(false);
/// Standard error's device and inode at the start.
static DEVICE: AtomicU64 = AtomicU64::new(0);
static INODE: AtomicU64 = AtomicU64::new(0);

/// Begins to count, if there is a standard error to say it on.
pub(crate) fn start() {
    if let Some((device, inode)) = identity() {
        DEVICE.store(device, Ordering::Relaxed);
        INODE.store(inode, Ordering::Relaxed);
        COUNTS.store(true, Ordering::Relaxed);
    }
}

fn standard_error() -> BorrowedFd<'static> {
    // SAFETY: only looked at and written to; that it may be closed, or somebody else's, is found out before.
    unsafe { BorrowedFd::borrow_raw(2) }
}

fn identity() -> Option<(u64, u64)> {
    let status = rustix::fs::fstat(standard_error()).ok()?;
    Some((status.st_dev, status.st_ino))
}

/// A call begins.
pub(crate) fn began() -> Option<Instant> {
    COUNTS.load(Ordering::Relaxed).then(Instant::now)
}

/// It has ended.
pub(crate) fn ended(began: Option<Instant>, way: Way) {
    let Some(began) = began else { return };
    let Some(counter) = process::counters().and_then(|c| c.0.get(way as usize)) else { return };
    counter.calls.fetch_add(1, Ordering::Relaxed);
    let ns = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
    counter.ns.fetch_add(ns, Ordering::Relaxed);
}

/// Says what was counted, if anything was.
pub(crate) fn say(mode: Mode, form: Form) {
    let unchanged = (DEVICE.load(Ordering::Relaxed), INODE.load(Ordering::Relaxed));
    if !COUNTS.load(Ordering::Relaxed) || identity() != Some(unchanged) {
        return;
    }
    let Some(counters) = process::counters() else { return };
    let counted = counters.0.each_ref().map(|counter| Counted {
        calls: counter.calls.load(Ordering::Relaxed),
        ns: counter.ns.load(Ordering::Relaxed),
    });
    if counted.iter().all(|counted| counted.calls == 0) {
        return;
    }
    let text = written(&program(), std::process::id(), mode, form, &counted);
    // So that a broken pipe or a full disk raises no signal that outlives this.
    let signals = Signals::block();
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut ready = [PollFd::from_borrowed_fd(standard_error(), PollFlags::OUT)];
    let is_ready = rustix::event::poll(&mut ready, Some(&now)) == Ok(1)
        && ready[0].revents() == PollFlags::OUT;
    if is_ready && rustix::io::write(standard_error(), text.as_bytes()).is_err() {
        signals.take_back();
    }
}

/// The program's name: what it was called by, without directories.
fn program() -> String {
    unsafe extern "C" {
        static program_invocation_short_name: *const std::ffi::c_char;
    }
    // SAFETY: the C library's, set before any constructor.
    let name = unsafe { program_invocation_short_name };
    if name.is_null() {
        return String::new();
    }
    // SAFETY: text that ends with a zero byte.
    unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
}

/// Of one way.
#[derive(Debug, Clone, Copy)]
struct Counted {
    calls: u64,
    ns: u64,
}

impl Counted {
    fn mean_ns(self) -> u64 {
        self.ns.checked_div(self.calls).unwrap_or(0)
    }

    fn and(self, other: Self) -> Self {
        Self { calls: self.calls + other.calls, ns: self.ns.saturating_add(other.ns) }
    }

    /// `12 calls, 8.1 µs each`.
    fn text(self) -> String {
        let mean = self.mean_ns();
        format!("{} calls, {}.{} µs each", self.calls, mean / 1_000, mean % 1_000 / 100)
    }
}

fn written(
    program: &str,
    pid: u32,
    mode: Mode,
    form: Form,
    counted: &[Counted; NAMES.len()],
) -> String {
    let [spun, parked, slots, slots_parked, without_token, refused, passed] = *counted;
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = match form {
        Form::Text => writeln!(
            text,
            "rtvirtio-run: {program} ({pid}), {mode}: short {}, {} of them parked; \
             by slots {}, {} of them parked; without a token {}; refused {}; passed through {}",
            spun.and(parked).text(),
            parked.calls,
            slots.and(slots_parked).text(),
            slots_parked.calls,
            without_token.text(),
            refused.text(),
            passed.text()
        ),
        Form::Json => {
            let name: String = program
                .chars()
                .map(|c| if c.is_control() || matches!(c, '"' | '\\') { '?' } else { c })
                .collect();
            let _ = write!(text, "{{\"program\":\"{name}\",\"pid\":{pid},\"mode\":\"{mode}\"");
            for (name, counted) in NAMES.iter().zip(counted) {
                let (calls, mean) = (counted.calls, counted.mean_ns());
                let _ = write!(text, ",\"{name}\":{{\"calls\":{calls},\"mean_ns\":{mean}}}");
            }
            writeln!(text, "}}")
        }
    };
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const COUNTED: [Counted; 7] = [
        Counted { calls: 3, ns: 24_000 },
        Counted { calls: 1, ns: 16_000 },
        Counted { calls: 4, ns: 20_000 },
        Counted { calls: 4, ns: 60_000 },
        Counted { calls: 2, ns: 40_500 },
        Counted { calls: 0, ns: 0 },
        Counted { calls: 1_000, ns: 1_999_999 },
    ];

    #[test]
    fn text_has_each_way_with_its_mean() {
        assert_eq!(
            written("db", 7, Mode::Adaptive, Form::Text, &COUNTED),
            "rtvirtio-run: db (7), adaptive: short 4 calls, 10.0 µs each, 1 of them parked; \
             by slots 8 calls, 10.0 µs each, 4 of them parked; \
             without a token 2 calls, 20.2 µs each; refused 0 calls, 0.0 µs each; \
             passed through 1000 calls, 1.9 µs each\n"
        );
    }

    #[test]
    fn json_is_one_line_whatever_the_program_is_called() {
        assert_eq!(
            written("a\"b\\\n", 7, Mode::Poll, Form::Json, &COUNTED),
            "{\"program\":\"a?b??\",\"pid\":7,\"mode\":\"poll\",\
             \"spun\":{\"calls\":3,\"mean_ns\":8000},\"parked\":{\"calls\":1,\"mean_ns\":16000},\
             \"slots_spun\":{\"calls\":4,\"mean_ns\":5000},\
             \"slots_parked\":{\"calls\":4,\"mean_ns\":15000},\
             \"without_token\":{\"calls\":2,\"mean_ns\":20250},\
             \"refused\":{\"calls\":0,\"mean_ns\":0},\"passed\":{\"calls\":1000,\"mean_ns\":1999}}\n"
        );
    }
}
