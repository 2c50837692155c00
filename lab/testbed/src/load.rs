//! The benchmark's load: 4 KiB at random offsets, a thread to each queue, a fixed
//! number of requests in flight.
//!
//! A thread blocks on its queue's completion eventfd, takes all that has ended,
//! and submits as many anew. The client shares the CPUs with the server that it
//! measures, so it does no more than that: one look at the clock for a batch, no
//! allocation. A latency runs from the submission of its batch to the look at
//! the clock when its end is seen.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use hdrhistogram::Histogram;
use rtvirtio_calibrate::load::MachineSample;
use rtvirtio_host::interrupt::{Interrupted, wait};
use rtvirtio_spec::run::Machine;
use rtvirtio_units::CpuId;

use crate::client::{Client, Endpoint, Queue, Shape};
use crate::cpu::{ProcessCpu, run_on};
use crate::random::Random;
use crate::window::{Count, Phase, latencies};

/// Bytes of a request.
pub const BLOCK: usize = 4096;

named! {
    /// What is asked of the disk.
    pub enum Operation {
        /// Random reads.
        Read = "read",
        /// Random writes.
        Write = "write",
    }
}

/// From the first request to the window.
const WARM_UP: Duration = Duration::from_millis(500);
/// How long a server may complete nothing.
const PATIENCE: Duration = Duration::from_secs(20);
/// From the last request to the window in which the server should do nothing.
const SETTLE: Duration = Duration::from_millis(300);
/// That window.
const IDLE: Duration = Duration::from_secs(2);

/// What to do.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    /// Reads or writes.
    pub operation: Operation,
    /// In flight, of each queue.
    pub depth: usize,
    /// Queues, and so threads.
    pub queues: usize,
    /// Length of the window.
    pub length: Duration,
    /// Requests to wait for, if the window is too short for them.
    pub least: u64,
    /// Longest window.
    pub longest: Duration,
    /// Whether to see what the server does when it has nothing to do.
    pub idle: bool,
}

/// What was measured.
#[derive(Debug, Clone)]
pub struct Measured {
    /// Latencies, ns.
    pub latencies: Histogram<u64>,
    /// Length of the window.
    pub seconds: f64,
    /// CPU time of the server, ns; of none if there is no server.
    pub server_ns: u64,
    /// CPU time of this process, ns.
    pub client_ns: u64,
    /// CPU of the server with a client that does nothing, in cores.
    pub idle_cores: Option<f64>,
    /// The machine in the window.
    pub machine: Machine,
}

/// Runs a load; `server` is the process whose CPU time counts.
///
/// # Errors
/// If the server refuses the client, fails a request, or completes nothing for 20 s; if
/// interrupted.
pub fn run(
    endpoint: Endpoint<'_>,
    server: Option<u32>,
    load: &Load,
    interrupted: &Interrupted,
) -> Result<Measured> {
    let shape = Shape { queues: load.queues, depth: load.depth, buffer: BLOCK };
    let mut client = Client::connect(endpoint, shape)?;
    let blocks = client.capacity() / BLOCK as u64;
    ensure!(blocks > 0, "the disk is empty");
    let phase = Phase::new();
    let done = Count::some(load.queues);
    let (queues, window) = std::thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let length = (load.length, load.longest);
            // Whatever happens: the queues must end.
            let _end = phase.ended_by_drop();
            window((length, load.least), server, &phase, &done, interrupted)
        });
        let queues = client.run(done.iter().enumerate(), |queue, (index, done)| {
            let ended = worker(queue, load, (index as u64, blocks), &phase, &done.0);
            if ended.is_err() {
                phase.end();
            }
            ended
        });
        (queues, watch.join())
    });
    let mut latencies = latencies()?;
    for queue in queues {
        latencies.add(queue?)?;
    }
    let Ok(window) = window else { bail!("the watching thread failed") };
    let Window { seconds, server_ns, client_ns, machine, .. } = window?;
    let idle_cores = match server.filter(|_| load.idle) {
        Some(server) => {
            wait(SETTLE, interrupted)?;
            let (cpu, at) = (ProcessCpu::of(server)?, Instant::now());
            wait(IDLE, interrupted)?;
            let used = ProcessCpu::of(server)?.since(&cpu);
            Some(used as f64 / at.elapsed().as_nanos() as f64)
        }
        None => None,
    };
    drop(client);
    Ok(Measured { latencies, seconds, server_ns, client_ns, idle_cores, machine })
}

/// What happened in a window, as [`Measured`] has it.
pub struct Window {
    /// That `done` counts.
    pub requests: u64,
    /// Its length.
    pub seconds: f64,
    /// CPU time of the server, ns.
    pub server_ns: u64,
    /// CPU time of this process, ns.
    pub client_ns: u64,
    /// The machine.
    pub machine: Machine,
}

/// Opens the window and closes it: after the first length, or the second while there are fewer requests than `least`.
pub fn window(
    ((length, longest), least): ((Duration, Duration), u64),
    server: Option<u32>,
    phase: &Phase,
    done: &[Count],
    interrupted: &Interrupted,
) -> Result<Window> {
    phase.warm_up(WARM_UP, interrupted)?;
    let cpu = |process: Option<u32>| process.map(ProcessCpu::of).transpose();
    let me = Some(std::process::id());
    let (server_before, client_before) = (cpu(server)?, cpu(me)?);
    let machine = MachineSample::now()?;
    let (before, start) = (Count::sum(done), Instant::now());
    phase.count();
    phase.counted(length, interrupted)?;
    while Count::sum(done) - before < least && start.elapsed() < longest {
        phase.counted(Duration::from_millis(50), interrupted)?;
    }
    let (requests, seconds) = (Count::sum(done) - before, start.elapsed().as_secs_f64());
    let used = |process, before: Option<ProcessCpu>| -> Result<u64> {
        Ok(cpu(process)?.zip(before).map_or(0, |(now, before)| now.since(&before)))
    };
    // While the threads are there: with them goes what they used.
    let (server_ns, client_ns) = (used(server, server_before)?, used(me, client_before)?);
    phase.end();
    Ok(Window { requests, seconds, server_ns, client_ns, machine: machine.since()? })
}

/// Keeps a queue full until the end, with blocks of the disk in an order that the seed gives.
fn worker(
    queue: &mut Queue,
    load: &Load,
    (seed, blocks): (u64, u64),
    phase: &Phase,
    done: &AtomicU64,
) -> Result<Histogram<u64>> {
    let mut latencies = latencies()?;
    let mut random = Random::new(seed);
    let mut started = vec![Instant::now(); load.depth];
    let submit = |queue: &mut Queue, random: &mut Random, slot| {
        let offset = random.below(blocks) * BLOCK as u64;
        queue.transfer(load.operation == Operation::Read, slot, offset, BLOCK);
    };
    for slot in 0..load.depth {
        let tag = random.next();
        // A write of zeroes may be cheaper than others.
        for word in queue.buffer(slot).chunks_exact_mut(8) {
            word.copy_from_slice(&tag.to_le_bytes());
        }
        submit(queue, &mut random, slot);
    }
    let mut counted = 0;
    while queue.flying() > 0 {
        let mut failed = 0;
        let mut seen: Option<(Instant, bool)> = None;
        let ended = queue.wait(PATIENCE, |queue, request| {
            let (now, counts) = *seen.get_or_insert_with(|| (Instant::now(), phase.counts()));
            if request.result != 0 {
                failed = request.result;
            }
            if counts {
                let latency = now - started[request.slot];
                latencies.saturating_record(latency.as_nanos() as u64);
                counted += 1;
            }
            if !phase.is_over() && failed == 0 {
                started[request.slot] = now;
                submit(queue, &mut random, request.slot);
            }
        })?;
        ensure!(ended > 0, "no request completed for {} s", PATIENCE.as_secs());
        ensure!(failed == 0, "a request failed: {}", std::io::Error::from_raw_os_error(-failed));
        done.store(counted, Ordering::Relaxed);
    }
    Ok(latencies)
}

/// Keeps the queues of some disks full until the phase is over, on one CPU, and never sleeps: no server calls.
///
/// # Errors
/// If a server refuses the client, fails a request, or completes nothing for 20 s.
pub fn drive(
    sockets: &[PathBuf],
    cpu: Option<CpuId>,
    depth: usize,
    phase: &Phase,
    done: &AtomicU64,
) -> Result<()> {
    let _end = phase.ended_by_drop();
    if let Some(cpu) = cpu {
        run_on(&[cpu])?;
    }
    let shape = Shape { queues: 1, depth, buffer: BLOCK };
    let connect = |socket: &PathBuf| Client::connect(Endpoint::Socket(socket), shape);
    let mut clients = sockets.iter().map(connect).collect::<Result<Vec<_>, _>>()?;
    let blocks = clients.iter().map(Client::capacity).min().unwrap_or(0) / BLOCK as u64;
    let mut random = Random::new(7);
    let mut submit = |queue: &mut Queue, slot| {
        let offset = random.below(blocks) * BLOCK as u64;
        // 70 % reads, as the cases' tasks.
        queue.transfer(random.below(10) < 7, slot, offset, BLOCK);
    };
    let mut queues: Vec<&mut Queue> = clients.iter_mut().flat_map(Client::queues).collect();
    for queue in &mut queues {
        (0..depth).for_each(|slot| submit(queue, slot));
    }
    let mut failed = 0;
    let mut completed_at = Instant::now();
    let mut rounds = 0_u32;
    while !phase.is_over() {
        let mut ended = 0;
        for queue in &mut queues {
            ended += queue.poll(|queue, request| {
                failed = failed.min(request.result);
                submit(queue, request.slot);
            })?;
        }
        ensure!(failed == 0, "a request failed: errno {}", -failed);
        done.fetch_add(ended as u64, Ordering::Relaxed);
        // A look at the clock costs as much as a request.
        rounds = rounds.wrapping_add(1);
        if rounds.is_multiple_of(1024) {
            if ended > 0 {
                completed_at = Instant::now();
            }
            let silent = completed_at.elapsed();
            ensure!(silent < PATIENCE, "no request completed for {} s", PATIENCE.as_secs());
        }
    }
    for queue in queues {
        while queue.flying() > 0 && queue.wait(PATIENCE, |_, _| ())? > 0 {}
    }
    Ok(())
}

/// Writes a block of `mark` at a place of the disk, and reads it.
///
/// # Errors
/// If a request fails, or the block holds something else.
pub fn write_and_read(queue: &mut Queue, at: u64, mark: u8) -> Result<()> {
    for is_write in [true, false] {
        queue.buffer(0).fill(if is_write { mark } else { 0 });
        queue.transfer(!is_write, 0, at, BLOCK);
        let (mut result, deadline) = (None, Instant::now() + PATIENCE);
        // It may come back early, with nothing.
        while result.is_none() && Instant::now() < deadline {
            queue.wait(PATIENCE, |_, ended| result = Some(ended.result))?;
        }
        ensure!(result == Some(0), "a request ended with {result:?}");
    }
    ensure!(queue.buffer(0).iter().all(|byte| *byte == mark), "a write is lost");
    Ok(())
}
