//! Where front ends' vCPUs may run: who takes CPUs from them for IOThreads, and gives them back.
//!
//! Problem: an I/O core is one that no vCPU runs on, so somebody has to move vCPUs. That takes rights
//! over other processes, which a data plane that faces guests shall not have, and what was moved must come
//! back whatever happens to it.
//!
//! Approach: a second process, the *guard*, which is started before the data plane gives its rights up.
//! It keeps `CAP_SYS_NICE` alone (`sandbox::keep_nice`) and few system calls (`sandbox::confine_guard`). Over a socket it is told CPUs and
//! processes; it finds their vCPU threads, and has each run on those of the thread's *own* CPUs that are
//! among them. A thread with none of these is left alone. When the socket closes, as it does when the data plane
//! is killed, every thread gets its own CPUs back.
//!
//! On request it also places vCPUs, once: each is kept to the CPU that is named for it, if it may run there, for
//! `STAY`, and then may run where it could before. For the scheduler leaves threads that mostly sleep where they are
//! as long as no CPU is idle, as none is where IOThreads share all CPUs with vCPUs: those that have made room for the
//! first IOThread would all stay in the way of the second, and far from it those whose queues it serves.
//!
//! A thread's own CPUs are those on which the guard found it (`sched_getaffinity(2)`): no CPU is ever added to them.
//! What somebody else gives a thread meanwhile (libvirt's `vcpupin`, a cpuset) is its own from then on.
//! Why not by cgroup cpusets: `docs/adr/0013-borrowed-cpus.md`.
//!
//! What it does not do: a guard that is itself killed with SIGKILL gives nothing back, and leaves what it is placing
//! where it is kept; and a data plane that was taken over could crowd the vCPUs of any VM of this host together until
//! it ends.
//!
//! Properties (tests of the same name): `vcpus_leave_a_cpu_and_get_it_back_when_the_socket_closes`,
//! `vcpu_without_one_of_the_cpus_is_left_alone`, `what_somebody_else_has_given_a_vcpu_is_kept`,
//! `process_that_is_no_longer_named_gets_its_cpus_back`, `vcpus_are_placed_and_may_leave_again`,
//! `nonsense_ends_the_guard`.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use rtvirtio_units::CpuId;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::{Deserialize, Serialize};

/// Threads of a process that are looked at.
const MAX_TASKS: usize = 4096;
/// vCPUs of a process.
const MAX_VCPUS: usize = 512;
/// vCPUs that are placed at once.
const MAX_PLACED: usize = 1024;
/// Longest line between the two: 1,024 CPUs, and as many processes and vCPUs.
const MAX_LINE: u64 = 64 << 10;
/// For how long a vCPU is kept to the CPU where it is placed: to wake up there.
const STAY: Duration = Duration::from_millis(5);
/// How long the data plane waits for the guard.
const ANSWER: Duration = Duration::from_secs(2);

/// What the guard is to do.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Request {
    /// Where vCPUs may run; empty: wherever they could.
    cpus: Vec<CpuId>,
    /// Whose.
    processes: Vec<i32>,
    /// These threads are to go to these CPUs, and nothing else.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    place: Vec<(i32, CpuId)>,
}

/// What the guard has done.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Moved {
    /// Threads that now run elsewhere than before.
    pub(crate) changed: u32,
    /// Threads that cannot be kept to these CPUs: they have none of them.
    pub(crate) outside: u32,
    /// Why one could not be moved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<String>,
}

/// The data plane's end of its guard. When it is dropped, the guard gives everything back and ends.
#[derive(Debug)]
pub struct Guard {
    stream: BufReader<UnixStream>,
}

impl Guard {
    /// Starts a guard: a command that gives its standard input to [`guard`].
    ///
    /// # Errors
    /// It does not start, or does not answer.
    pub fn start(command: &mut Command) -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        // A signal to the terminal's processes is the data plane's to handle.
        command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).process_group(0).spawn()?;
        // The command's copy of the guard's end is gone with its own.
        command.stdin(Stdio::null());
        let mut guard = Self::new(ours)?;
        guard.keep_to(&[], &[])?;
        Ok(guard)
    }

    fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_read_timeout(Some(ANSWER))?;
        stream.set_write_timeout(Some(ANSWER))?;
        Ok(Self { stream: BufReader::new(stream) })
    }

    /// Has the vCPUs of these processes run on these CPUs alone; those of others, or all if no CPU is
    /// named, get their own back.
    ///
    /// # Errors
    /// The guard does not answer: it has ended or will, when this is dropped.
    pub(crate) fn keep_to(&mut self, cpus: &[CpuId], processes: &[i32]) -> io::Result<Moved> {
        self.ask(&Request { cpus: cpus.to_vec(), processes: processes.to_vec(), place: Vec::new() })
    }

    /// Has these threads go to these CPUs, those that are vCPUs of these processes and may run there; so many at most.
    ///
    /// # Errors
    /// As [`Self::keep_to`].
    pub(crate) fn place(
        &mut self,
        mut threads: Vec<(i32, CpuId)>,
        processes: &[i32],
    ) -> io::Result<Moved> {
        threads.truncate(MAX_PLACED);
        self.ask(&Request { cpus: Vec::new(), processes: processes.to_vec(), place: threads })
    }

    fn ask(&mut self, request: &Request) -> io::Result<Moved> {
        send(self.stream.get_mut(), request)?;
        receive(&mut self.stream)?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }
}

/// Does what a data plane's [`Guard`] asks for, until that has gone.
///
/// # Errors
/// The data plane does not speak as it should. All vCPUs have their CPUs back then too.
pub fn guard(stream: UnixStream) -> io::Result<()> {
    let mut answers = stream.try_clone()?;
    let mut requests = BufReader::new(stream);
    let mut threads = Threads::default();
    while let Some(Request { cpus, processes, place }) = receive(&mut requests)? {
        let processes: BTreeSet<i32> = processes.into_iter().collect();
        let of = processes.into_iter().flat_map(vcpus);
        let moved = if !place.is_empty() {
            let vcpus: BTreeSet<i32> = of.collect();
            go(place.into_iter().filter(|(thread, _)| vcpus.contains(thread)))
        } else if cpus.is_empty() {
            threads.give_back()
        } else {
            threads.keep_to(&set_of(&cpus)?, &of.collect())
        };
        send(&mut answers, &moved)?;
    }
    Ok(())
}

fn send(stream: &mut UnixStream, what: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(what)?;
    line.push(b'\n');
    stream.write_all(&line)
}

/// The next line; none at the end.
fn receive<T: for<'a> Deserialize<'a>>(
    stream: &mut BufReader<UnixStream>,
) -> io::Result<Option<T>> {
    let mut line = Vec::new();
    stream.take(MAX_LINE).read_until(b'\n', &mut line)?;
    if line.is_empty() { Ok(None) } else { Ok(Some(serde_json::from_slice(&line)?)) }
}

fn set_of(cpus: &[CpuId]) -> io::Result<CpuSet> {
    let mut set = CpuSet::new();
    for cpu in cpus {
        let cpu = cpu.get() as usize;
        if cpu >= CpuSet::MAX_CPU {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        set.set(cpu);
    }
    Ok(set)
}

/// The vCPU threads of a process, by their names; so many at most.
pub(crate) fn vcpus(process: i32) -> impl Iterator<Item = i32> {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).ok();
    let tasks = tasks.into_iter().flatten().take(MAX_TASKS).flatten();
    let named = tasks.filter(|task| {
        std::fs::read_to_string(task.path().join("comm")).is_ok_and(|name| is_vcpu(&name))
    });
    named.take(MAX_VCPUS).filter_map(|task| task.file_name().to_str()?.parse().ok())
}

/// Whether a thread is a vCPU: `CPU 0/KVM` (QEMU), `vcpu0` (Cloud Hypervisor), `fc_vcpu 0`
/// (Firecracker).
fn is_vcpu(name: &str) -> bool {
    let of_qemu = |rest: &str| rest.contains("/KVM") || rest.contains("/TCG");
    name.strip_prefix("CPU ").is_some_and(of_qemu)
        || name.starts_with("vcpu")
        || name.starts_with("fc_vcpu")
}

/// CPUs on which a thread may run; none if it has ended.
pub(crate) fn cpus_of(thread: i32) -> Option<CpuSet> {
    sched_getaffinity(Some(Pid::from_raw(thread)?)).ok()
}

/// The CPUs in a set, ascending.
pub(crate) fn listed(set: &CpuSet) -> impl Iterator<Item = CpuId> {
    (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).map(|cpu| CpuId::new(cpu as u32))
}

/// A vCPU that was moved.
#[derive(Debug)]
struct Kept {
    /// When it began (proc_pid_stat(5)): its number may become another's.
    began: u64,
    /// Its own.
    own: CpuSet,
    /// As it was left.
    given: CpuSet,
}

/// All that were moved, by number.
#[derive(Debug, Default)]
struct Threads(BTreeMap<i32, Kept>);

impl Threads {
    fn keep_to(&mut self, cpus: &CpuSet, of: &BTreeSet<i32>) -> Moved {
        let mut moved = Moved::default();
        let others: Vec<i32> =
            self.0.keys().copied().filter(|thread| !of.contains(thread)).collect();
        for thread in others {
            self.give_one_back(thread, &mut moved);
        }
        for &thread in of {
            let (Some(began), Some(now)) = (began(thread), cpus_of(thread)) else {
                self.0.remove(&thread);
                continue;
            };
            let known = self.0.get(&thread).filter(|kept| kept.began == began && kept.given == now);
            let own = known.map_or(now, |kept| kept.own);
            let mut wanted = CpuSet::new();
            listed(&own)
                .map(|cpu| cpu.get() as usize)
                .filter(|&cpu| cpus.is_set(cpu))
                .for_each(|cpu| wanted.set(cpu));
            if wanted.count() == 0 {
                wanted = own;
                moved.outside += 1;
            }
            let given = place(thread, &now, &wanted, &mut moved);
            if given == own {
                self.0.remove(&thread);
            } else {
                self.0.insert(thread, Kept { began, own, given });
            }
        }
        moved
    }

    fn give_back(&mut self) -> Moved {
        let mut moved = Moved::default();
        let all: Vec<i32> = self.0.keys().copied().collect();
        for thread in all {
            self.give_one_back(thread, &mut moved);
        }
        moved
    }

    fn give_one_back(&mut self, thread: i32, moved: &mut Moved) {
        let Some(kept) = self.0.remove(&thread) else { return };
        let is_it = began(thread) == Some(kept.began);
        // Whoever has given it others since then wants it there.
        if is_it && cpus_of(thread) == Some(kept.given) {
            place(thread, &kept.given, &kept.own, moved);
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.give_back();
    }
}

/// Has a thread run there; where it may run after that.
fn place(thread: i32, now: &CpuSet, wanted: &CpuSet, moved: &mut Moved) -> CpuSet {
    if now == wanted {
        return *now;
    }
    match sched_setaffinity(Pid::from_raw(thread), wanted) {
        Ok(()) => moved.changed += 1,
        // One that has just ended needs no place.
        Err(rustix::io::Errno::SRCH) => {}
        Err(error) => moved.error = Some(format!("thread {thread}: {error}")),
    }
    // A cpuset may allow less.
    cpus_of(thread).unwrap_or(*wanted)
}

/// Has threads go to CPUs, those that may run there, and leave them as they like later.
fn go(threads: impl Iterator<Item = (i32, CpuId)>) -> Moved {
    let mut moved = Moved::default();
    let mut kept = Vec::new();
    for (thread, cpu) in threads {
        let (Some(began), Some(may)) = (began(thread), cpus_of(thread)) else { continue };
        let cpu = cpu.get() as usize;
        if cpu >= CpuSet::MAX_CPU || !may.is_set(cpu) {
            continue;
        }
        let mut there = CpuSet::new();
        there.set(cpu);
        kept.push((thread, began, place(thread, &may, &there, &mut moved), may));
    }
    if moved.changed > 0 {
        std::thread::sleep(STAY);
    }
    for (thread, since, there, may) in kept {
        // Whoever has given it others since then wants it there.
        if began(thread) == Some(since) && cpus_of(thread) == Some(there) {
            place(thread, &there, &may, &mut Moved::default());
        }
    }
    moved
}

/// When a thread began, in ticks since the machine did; none if it has ended.
fn began(thread: i32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{thread}/stat")).ok()?;
    // The name before may hold anything; the first field after it is the third.
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(22 - 3)?.parse().ok()
}

#[cfg(test)]
mod tests;
