//! Tracepoints opened with perf_event_open(2), one ring of memory for each CPU.
//!
//! The kernel writes a record into the ring of the CPU on which a tracepoint is
//! hit; the rings are read as a whole and sorted by time. What ends this process
//! closes the tracepoints with it.
//!
//! A ring has [`RING`] bytes. A record takes about 80 and a bio makes two of them, so a ring holds
//! some 3200 bios: read each 20 ms, 160 thousand a second on one CPU; at 10 thousand a second, what
//! comes in 300 ms while the reader waits for a CPU.

// Two requests of perf_event_open(2) that perf-event2 does not wrap.
#![allow(unsafe_code)]

use std::collections::BTreeSet;
use std::ffi::CString;
use std::io;
use std::os::fd::AsRawFd as _;

use perf_event::data::Record;
use perf_event::events::Tracepoint;
use perf_event::{Builder, Clock, Counter, SampleFlag, Sampler};
use perf_event_open_sys::ioctls;
use rtvirtio_units::Nanos;
use rustix::time::{ClockId, clock_gettime};

use super::format::{Event, Layout, What};
use crate::sysfs::DeviceNumber;

/// Bytes of a ring.
pub(super) const RING: usize = 512 << 10;
/// The longest filter that the kernel takes is a page.
const LONGEST_FILTER: usize = 4000;

/// The rings of all CPUs.
pub(super) struct Rings {
    layouts: Vec<Layout>,
    cpus: Vec<Cpu>,
}

struct Cpu {
    /// The first tracepoint, with the ring.
    ring: Sampler,
    /// The others, which write into the same ring.
    _others: Vec<Counter>,
}

/// CLOCK_MONOTONIC, which the records have too.
pub(super) fn now() -> Nanos {
    let now = clock_gettime(ClockId::Monotonic);
    Nanos::new((now.tv_sec as u64).saturating_mul(1_000_000_000) + now.tv_nsec as u64)
}

impl Rings {
    /// Opens the tracepoints for `devices` on `cpus`, with rings of `size` bytes.
    pub(super) fn open(
        layouts: Vec<Layout>,
        cpus: &[usize],
        devices: &BTreeSet<DeviceNumber>,
        size: usize,
    ) -> io::Result<Self> {
        let filter = filter(devices);
        let open = |cpu: usize, layout: &Layout| {
            let mut builder = Builder::new(Tracepoint::with_id(u64::from(layout.id)));
            builder.any_pid().one_cpu(cpu).include_kernel().include_hv();
            builder.sample_period(1).sample(SampleFlag::TIME).sample(SampleFlag::RAW);
            builder.clockid(Clock::MONOTONIC);
            let counter = builder.build()?;
            if let Some(filter) = &filter {
                set_filter(&counter, filter)?;
            }
            io::Result::Ok(counter)
        };
        let mut opened = Vec::new();
        for &cpu in cpus {
            let mut counters = layouts.iter().map(|layout| open(cpu, layout));
            let first = counters.next().ok_or(io::ErrorKind::InvalidInput)??;
            let mut ring = first.sampled(size)?;
            let mut others = counters.collect::<io::Result<Vec<_>>>()?;
            for counter in &mut others {
                set_output(counter, &ring)?;
                counter.enable()?;
            }
            ring.enable()?;
            opened.push(Cpu { ring, _others: others });
        }
        Ok(Self { layouts, cpus: opened })
    }

    /// Appends what the rings hold to `events`: all up to now, each ring's in the order of time.
    pub(super) fn drain(&mut self, events: &mut Vec<Event>) {
        let begin = now();
        for cpu in &mut self.cpus {
            let mut lost = 0;
            let mut last = begin;
            while let Some(record) = cpu.ring.next_record() {
                let sample = match record.parse_record() {
                    Ok(Record::Sample(sample)) => sample,
                    Ok(Record::Lost(records)) => {
                        lost += records.lost;
                        continue;
                    }
                    Ok(_) => continue,
                    Err(_) => {
                        lost += 1;
                        continue;
                    }
                };
                last = Nanos::new(sample.time().unwrap_or_default());
                let what = sample.raw().and_then(|raw| read(&self.layouts, raw));
                let before = std::mem::take(&mut lost);
                if before > 0 {
                    events.push(Event { at: last, what: What::Lost(before) });
                }
                match what {
                    Some(Some(what)) => events.push(Event { at: last, what }),
                    Some(None) => {}
                    None => lost += 1,
                }
                // A CPU that writes as fast as this reads must not hold it for ever.
                if last > begin {
                    break;
                }
            }
            if lost > 0 {
                events.push(Event { at: last, what: What::Lost(lost) });
            }
        }
    }
}

/// As [`Layout::read`], whichever tracepoint it is of.
fn read(layouts: &[Layout], record: &[u8]) -> Option<Option<What>> {
    let id = Layout::id_of(record)?;
    layouts.iter().find(|l| l.id == id)?.read(record)
}

/// A tracepoint's filter (kernel Documentation/trace/events.rst) for `devices`; `None`: too many.
fn filter(devices: &BTreeSet<DeviceNumber>) -> Option<CString> {
    let terms: Vec<String> = devices.iter().map(|d| format!("dev == {}", d.kernel())).collect();
    let text = terms.join(" || ");
    if text.len() > LONGEST_FILTER { None } else { CString::new(text).ok() }
}

fn set_filter(counter: &Counter, filter: &CString) -> io::Result<()> {
    // SAFETY: the descriptor is open; the kernel copies the text, which ends with a zero.
    let result = unsafe { ioctls::SET_FILTER(counter.as_raw_fd(), filter.as_ptr().cast_mut()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn set_output(counter: &Counter, ring: &Sampler) -> io::Result<()> {
    // SAFETY: both descriptors are open; the kernel holds the ring for as long as it writes there.
    let result = unsafe { ioctls::SET_OUTPUT(counter.as_raw_fd(), ring.as_raw_fd()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
