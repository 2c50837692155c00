//! What the kernel says of CPUs and threads, from `/proc`.
//!
//! Files are opened once and read again and again. What cannot be opened or read counts as nothing:
//! a policy then knows less. Processes are front ends', so what they claim is bounded: so many threads
//! are looked at, and so many of them are vCPUs.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt;

use rtvirtio_iocores::{Cpu, Snapshot, VcpuId, Vm, VmId};
use rtvirtio_units::{CpuId, Nanos};

use crate::clock::now;
use crate::vcpus;

/// Largest `/proc/stat` that is read: a host of 1,024 CPUs has some 80 bytes for each, and interrupts.
const MAX_STAT: usize = 256 << 10;
/// USER_HZ (`include/asm-generic/param.h`), ns.
const TICK: u64 = 10_000_000;
/// How often vCPUs are looked for again, in refreshes: one that is plugged in is seen after 10 s.
const SEARCH: u64 = 100;
/// Turns between two refreshes from which on it is looked where a vCPU is: that is a file more.
const TURNS: u64 = 20;
/// The first time, after a front end has come: 1 s. Until then it may be at its start, without vCPUs.
const SOON: u64 = 10;

/// Time of a thread, as the scheduler counts it (`Documentation/scheduler/sched-stats.rst`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct OnCpu {
    /// On a CPU.
    pub(crate) ran: Nanos,
    /// Ready, and waiting for one.
    pub(crate) waited: Nanos,
    /// How often it got one.
    pub(crate) turns: u64,
}

/// A thread's `schedstat`.
#[derive(Debug)]
pub(crate) struct SchedStat(Option<File>);

impl SchedStat {
    /// Of a thread of this process.
    pub(crate) fn of_thread(tid: i32) -> Self {
        Self(File::open(format!("/proc/self/task/{tid}/schedstat")).ok())
    }

    /// Zero if the thread is gone or the kernel does not count.
    pub(crate) fn read(&self) -> OnCpu {
        let mut text = [0; 96];
        let read = self.0.as_ref().and_then(|file| file.read_at(&mut text, 0).ok());
        schedstat(&text[..read.unwrap_or(0)])
    }
}

/// Where a thread was last, by its `stat` (proc_pid_stat(5)).
fn last_cpu(stat: &File) -> Option<CpuId> {
    let mut text = [0; 512];
    let read = stat.read_at(&mut text, 0).ok()?;
    // The name before may hold anything; the first field after it is the third.
    let (_, fields) = str::from_utf8(&text[..read]).ok()?.rsplit_once(')')?;
    fields.split_ascii_whitespace().nth(39 - 3)?.parse().ok().map(CpuId::new)
}

fn schedstat(text: &[u8]) -> OnCpu {
    let text = str::from_utf8(text).unwrap_or_default();
    let mut fields = text.split_ascii_whitespace().map(|field| field.parse().unwrap_or(0));
    let mut next = || fields.next().unwrap_or(0);
    OnCpu { ran: Nanos::new(next()), waited: Nanos::new(next()), turns: next() }
}

/// A vCPU.
#[derive(Debug)]
struct Vcpu {
    id: VcpuId,
    stat: SchedStat,
    /// Its `stat`.
    place: Option<File>,
    /// Where it was, if that was looked at.
    cpu: Option<CpuId>,
    last: OnCpu,
    /// When that was read, by the monotonic clock, ns.
    at: u64,
}

impl Vcpu {
    /// Counts what it had since it was last read.
    fn read(&mut self, vm: &mut Vm) {
        let (now, at) = (self.stat.read(), now());
        if now == OnCpu::default() {
            return;
        }
        let (last, since) = (self.last, std::mem::replace(&mut self.at, at));
        self.last = now;
        let is_active = now.turns.saturating_sub(last.turns) >= TURNS;
        self.cpu = if is_active { self.place.as_ref().and_then(last_cpu) } else { None };
        let ran = now.ran.saturating_sub(last.ran);
        let waited = now.waited.saturating_sub(last.waited);
        vm.add(ran, waited, Nanos::new(at.saturating_sub(since)));
    }
}

/// A front end's process.
#[derive(Debug)]
struct Process {
    vm: VmId,
    vcpus: Vec<Vcpu>,
    /// CPUs on which they may run.
    cpus: Vec<CpuId>,
}

/// The host's CPUs and the VMs' vCPUs.
#[derive(Debug, Default)]
pub(super) struct Host {
    stat: Option<File>,
    buffer: Vec<u8>,
    processes: BTreeMap<i32, Process>,
    /// CPUs on which any of their vCPUs may run; while there is none, where the next is taken to run.
    shared: BTreeSet<CpuId>,
    /// What the vCPUs of a VM have had; of those that are gone too.
    vms: BTreeMap<VmId, Vm>,
    refreshes: u64,
    /// The refresh at which vCPUs are looked for again.
    search: u64,
    /// That at which the last front end that came has started.
    started: u64,
    /// How often that was done.
    looks: u64,
}

impl Host {
    /// Reads all of it; `peers` are front ends' processes with their VMs, ascending.
    pub(super) fn refresh(&mut self, peers: &[(i32, VmId)], seen: &mut Snapshot) {
        let Snapshot { vms, vcpus, cpus, .. } = seen;
        let before = self.processes.len();
        self.processes.retain(|pid, process| peers.binary_search(&(*pid, process.vm)).is_ok());
        let mut changed = self.processes.len() < before;
        let mut new = BTreeSet::new();
        for &(pid, vm) in peers {
            self.processes.entry(pid).or_insert_with(|| {
                new.insert(pid);
                self.started = self.refreshes + SOON;
                self.search = self.search.min(self.started);
                Process::look(pid, vm)
            });
        }
        changed |= !new.is_empty();
        if changed {
            self.vms.retain(|vm, _| peers.iter().any(|(_, of)| of == vm));
        }
        for process in self.processes.values_mut().filter(|process| !process.vcpus.is_empty()) {
            let vm = self.vms.entry(process.vm).or_insert_with(|| Vm::new(process.vm));
            process.vcpus.iter_mut().for_each(|vcpu| vcpu.read(vm));
        }
        self.refreshes += 1;
        let searched = self.refreshes > self.search;
        if searched {
            // Right after their times were read.
            let is_early = self.refreshes <= self.started;
            self.search = if is_early { self.started } else { self.refreshes + SEARCH };
            // A process may have many threads, and it may have many of the VMs: each is looked at once.
            for (&pid, process) in self.processes.iter_mut().filter(|(pid, _)| !new.contains(pid)) {
                *process = Process::look(pid, process.vm);
            }
            changed = true;
        }
        if changed {
            self.looks += 1;
            let processes = self.processes.values();
            let found: BTreeSet<_> = processes.flat_map(|process| &process.cpus).copied().collect();
            // Between the last front end and the next, however long that takes, and while that is at its
            // start: a policy that saw no vCPUs would give a CPU back as their only one.
            let is_known = searched && !peers.is_empty() && self.refreshes > self.started;
            if !found.is_empty() || is_known {
                self.shared = found;
            }
        }
        vms.clear();
        vms.extend(self.vms.values());
        vcpus.clear();
        for vcpu in self.processes.values().flat_map(|process| &process.vcpus) {
            let Vcpu { id, cpu, last, .. } = vcpu;
            vcpus.push(rtvirtio_iocores::Vcpu { id: *id, cpu: *cpu, turns: last.turns });
        }
        vcpus.sort_unstable_by_key(|vcpu| vcpu.id);
        self.read_cpus(cpus);
        for cpu in cpus.iter_mut() {
            cpu.vcpus = self.shared.contains(&cpu.id);
        }
    }

    /// How often vCPUs, and where they may run, were looked for.
    pub(super) const fn looks(&self) -> u64 {
        self.looks
    }

    /// vCPUs have been moved: the next refresh looks for them again.
    pub(super) const fn look_again(&mut self) {
        self.search = self.refreshes;
    }

    /// Those that come will run on these CPUs.
    pub(super) fn expect(&mut self, cpus: &[CpuId]) {
        self.shared = cpus.iter().copied().collect();
    }

    fn read_cpus(&mut self, cpus: &mut Vec<Cpu>) {
        if self.stat.is_none() {
            self.stat = File::open("/proc/stat").ok();
            self.buffer.resize(MAX_STAT, 0);
        }
        let read = self.stat.as_ref().and_then(|file| file.read_at(&mut self.buffer, 0).ok());
        idle_times(&self.buffer[..read.unwrap_or(0)], cpus);
    }
}

/// CPUs and how long each was idle, from the lines `cpuN user nice system idle iowait …` of
/// `/proc/stat` (proc_stat(5)). A time that falls, as it may by a tick, stays what it was.
fn idle_times(stat: &[u8], cpus: &mut Vec<Cpu>) {
    let mut found = 0;
    for (id, idle) in cpu_lines(stat) {
        found += 1;
        match cpus.binary_search_by_key(&id, |cpu| cpu.id) {
            Ok(at) => cpus[at].idle = cpus[at].idle.max(idle),
            Err(at) => cpus.insert(at, Cpu { id, idle, vcpus: false }),
        }
    }
    if found < cpus.len() {
        let there: BTreeSet<CpuId> = cpu_lines(stat).map(|(id, _)| id).collect();
        cpus.retain(|cpu| there.contains(&cpu.id));
    }
}

fn cpu_lines(stat: &[u8]) -> impl Iterator<Item = (CpuId, Nanos)> {
    let lines = stat.split(|&byte| byte == b'\n').map(|line| str::from_utf8(line).ok());
    let lines = lines.map_while(|line| line?.strip_prefix("cpu"));
    lines.filter_map(|line| {
        let mut fields = line.split(' ');
        // The first line is of all.
        let id = CpuId::new(fields.next()?.parse().ok()?);
        let ticks: u64 = fields.skip(3).take(2).filter_map(|n| n.parse::<u64>().ok()).sum();
        Some((id, Nanos::new(ticks.saturating_mul(TICK))))
    })
}

impl Process {
    /// The vCPUs of a process, by their threads' names.
    fn look(pid: i32, vm: VmId) -> Self {
        let mut process = Self { vm, vcpus: Vec::new(), cpus: Vec::new() };
        for thread in vcpus::vcpus(pid) {
            let of = |file| File::open(format!("/proc/{pid}/task/{thread}/{file}")).ok();
            let (stat, place) = (SchedStat(of("schedstat")), of("stat"));
            let (id, last) = (VcpuId(thread as u32), stat.read());
            process.vcpus.push(Vcpu { id, stat, place, cpu: None, last, at: now() });
            process.cpus.extend(vcpus::cpus_of(thread).iter().flat_map(vcpus::listed));
        }
        process.cpus.sort_unstable();
        process.cpus.dedup();
        process
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedstat_is_two_times_and_a_count() {
        let of =
            |ran, waited, turns| OnCpu { ran: Nanos::new(ran), waited: Nanos::new(waited), turns };
        assert_eq!(schedstat(b"1234 567 8\n"), of(1234, 567, 8));
        assert_eq!(schedstat(b""), of(0, 0, 0));
        assert_eq!(schedstat(b"x -1 \xff"), of(0, 0, 0));
    }

    #[test]
    fn thread_was_last_where_alone_it_may_run() {
        let may = rustix::thread::sched_getaffinity(None).unwrap();
        let stat = File::open("/proc/thread-self/stat").unwrap();
        for cpu in vcpus::listed(&may) {
            let mut only = rustix::thread::CpuSet::new();
            only.set(cpu.get() as usize);
            rustix::thread::sched_setaffinity(None, &only).unwrap();
            assert_eq!(last_cpu(&stat), Some(cpu));
        }
        rustix::thread::sched_setaffinity(None, &may).unwrap();
    }

    #[test]
    fn idle_is_the_fourth_and_fifth_number_of_a_cpu_and_never_falls() {
        let cpu = |id, ms| Cpu { id: CpuId::new(id), idle: Nanos::from_millis(ms), vcpus: false };
        let mut cpus = Vec::new();
        let stat = b"cpu  9 9 9 99 9\ncpu0 1 2 3 40 5 6\ncpu2 1 1 1 7 0 0\nintr 5 5 5 5 5\ncpu9 1";
        idle_times(stat, &mut cpus);
        assert_eq!(cpus, [cpu(0, 450), cpu(2, 70)]);
        idle_times(b"cpu2 1 1 1 6 0\ncpu0 1 2 3 41 5\n", &mut cpus);
        assert_eq!(cpus, [cpu(0, 460), cpu(2, 70)]);
        // One that is taken offline has no line.
        idle_times(b"cpu  1\ncpu0 1 2 3 41 5\ncpu1 0 0 0 3 0\n", &mut cpus);
        assert_eq!(cpus, [cpu(0, 460), cpu(1, 30)]);
    }

    #[test]
    fn vcpu_threads_of_a_process_are_summed_for_its_vm() {
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let vcpu = std::thread::Builder::new().name("vcpu0".to_owned());
        let vcpu = vcpu.spawn(move || stopped.recv()).unwrap();
        let mut host = Host::default();
        let mut seen = Snapshot::default();
        let pid = rustix::process::getpid().as_raw_nonzero().get();
        host.refresh(&[(pid, VmId(3)), (pid, VmId(3))], &mut seen);
        // The thread may not have its name yet.
        let ids: Vec<VmId> = seen.vms.iter().map(|vm| vm.id).collect();
        assert!(ids.is_empty() || ids == [VmId(3)], "{ids:?}");
        assert!(!seen.cpus.is_empty());
        host.refresh(&[], &mut seen);
        assert!(seen.vms.is_empty());
        drop(stop);
        let _ = vcpu.join();
    }

    #[test]
    fn cpus_of_vcpus_stay_known_while_no_front_end_is_connected() {
        let (named, is_named) = std::sync::mpsc::channel();
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let vcpu = std::thread::Builder::new().name("vcpu0".to_owned());
        let vcpu = vcpu.spawn(move || (named.send(()), stopped.recv())).unwrap();
        is_named.recv().unwrap();
        let mut host = Host::default();
        let mut snapshot = Snapshot::default();
        let of = |cpus: &[Cpu]| cpus.iter().filter(|cpu| cpu.vcpus).map(|cpu| cpu.id).collect();
        let mut seen = |host: &mut Host, peers: &[(i32, VmId)]| -> Vec<CpuId> {
            host.refresh(peers, &mut snapshot);
            of(&snapshot.cpus)
        };
        assert!(seen(&mut host, &[]).is_empty());
        let pid = rustix::process::getpid().as_raw_nonzero().get();
        let there = seen(&mut host, &[(pid, VmId(3))]);
        assert!(!there.is_empty());
        for _ in 0..=2 * SEARCH {
            assert_eq!(seen(&mut host, &[]), there);
        }
        // What a policy decides meanwhile holds for those that come.
        host.expect(&there[..1]);
        assert_eq!(seen(&mut host, &[]), there[..1]);
        assert_eq!(seen(&mut host, &[(pid, VmId(4))]), there);
        // A front end without vCPUs, once it has had its time to start, is no VM.
        let child = std::process::Command::new("sleep").arg("60").spawn();
        let mut child = child.unwrap();
        let without = [(child.id() as i32, VmId(5))];
        let mut last = Vec::new();
        for _ in 0..=2 * SOON {
            // vCPUs may be moved meanwhile.
            host.look_again();
            last.push(seen(&mut host, &without));
        }
        assert!(last[..SOON as usize].iter().all(|seen| *seen == there), "{last:?}");
        assert!(last[2 * SOON as usize].is_empty(), "{last:?}");
        child.kill().unwrap();
        child.wait().unwrap();
        drop(stop);
        let _ = vcpu.join();
    }
}
