//! The guard in a thread, over threads of this process that are named as vCPUs are.

use std::sync::mpsc;
use std::thread::JoinHandle;

use super::*;

/// A thread that a VMM could have as a vCPU.
struct Vcpu {
    tid: i32,
    _stop: mpsc::Sender<()>,
}

impl Vcpu {
    fn new(cpus: &CpuSet) -> Self {
        let (tell, told) = mpsc::channel();
        let (_stop, stopped) = mpsc::channel::<()>();
        let cpus = *cpus;
        std::thread::Builder::new()
            .name("vcpu0".to_owned())
            .spawn(move || {
                sched_setaffinity(None, &cpus).unwrap();
                tell.send(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
                let _ = stopped.recv();
            })
            .unwrap();
        Self { tid: told.recv().unwrap(), _stop }
    }

    fn cpus(&self) -> CpuSet {
        cpus_of(self.tid).unwrap()
    }
}

/// Two CPUs of this machine, if it has them.
fn two() -> Option<[CpuId; 2]> {
    let all = sched_getaffinity(None).unwrap();
    let mut all = listed(&all);
    let two = all.next().zip(all.next());
    if two.is_none() {
        rtvirtio_engine::testing::skipped("needs two CPUs");
    }
    two.map(|(a, b)| [a, b])
}

fn pid() -> i32 {
    rustix::process::getpid().as_raw_nonzero().get()
}

fn set(cpus: &[CpuId]) -> CpuSet {
    set_of(cpus).unwrap()
}

/// A guard and its thread.
fn start() -> (Guard, JoinHandle<io::Result<()>>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (Guard::new(ours).unwrap(), std::thread::spawn(|| guard(theirs)))
}

#[test]
fn vcpus_are_known_by_name() {
    for name in ["CPU 0/KVM\n", "CPU 12/TCG\n", "vcpu3\n", "fc_vcpu 0\n"] {
        assert!(is_vcpu(name), "{name}");
    }
    for name in ["qemu-system-x86\n", "IO mon_iothread\n", "CPU\n", "worker\n"] {
        assert!(!is_vcpu(name), "{name}");
    }
}

/// Other tests' threads of this process have such names too, so that what was changed is asked of the
/// thread itself.
#[test]
fn vcpus_leave_a_cpu_and_get_it_back_when_the_socket_closes() {
    let Some([a, b]) = two() else { return };
    let mut threads = Threads::default();
    let vcpu = Vcpu::new(&set(&[a, b]));
    assert!(vcpus(pid()).any(|tid| tid == vcpu.tid));
    let of = BTreeSet::from([vcpu.tid]);
    let moved = threads.keep_to(&set(&[a]), &of);
    assert_eq!(moved, Moved { changed: 1, ..Moved::default() });
    assert_eq!(vcpu.cpus(), set(&[a]));
    assert_eq!(threads.keep_to(&set(&[a]), &of), Moved::default());
    assert_eq!(threads.keep_to(&set(&[b]), &of).changed, 1);
    assert_eq!(vcpu.cpus(), set(&[b]));
    drop(threads);
    assert_eq!(vcpu.cpus(), set(&[a, b]));
}

#[test]
fn vcpu_without_one_of_the_cpus_is_left_alone() {
    let Some([a, b]) = two() else { return };
    let vcpu = Vcpu::new(&set(&[b]));
    let mut threads = Threads::default();
    let moved = threads.keep_to(&set(&[a]), &BTreeSet::from([vcpu.tid]));
    assert_eq!(moved, Moved { outside: 1, ..Moved::default() });
    assert_eq!(vcpu.cpus(), set(&[b]));
    assert!(threads.0.is_empty());
}

#[test]
fn what_somebody_else_has_given_a_vcpu_is_kept() {
    let Some([a, b]) = two() else { return };
    let vcpu = Vcpu::new(&set(&[a, b]));
    let of = BTreeSet::from([vcpu.tid]);
    let mut threads = Threads::default();
    threads.keep_to(&set(&[a]), &of);
    let elsewhere = set(&[b]);
    sched_setaffinity(Pid::from_raw(vcpu.tid), &elsewhere).unwrap();
    assert_eq!(threads.keep_to(&set(&[a]), &of).outside, 1);
    assert_eq!(vcpu.cpus(), elsewhere);
    // Also by who gives back.
    sched_setaffinity(Pid::from_raw(vcpu.tid), &set(&[a, b])).unwrap();
    threads.keep_to(&set(&[a]), &of);
    sched_setaffinity(Pid::from_raw(vcpu.tid), &elsewhere).unwrap();
    assert_eq!(threads.give_back(), Moved::default());
    assert_eq!(vcpu.cpus(), elsewhere);
}

#[test]
fn process_that_is_no_longer_named_gets_its_cpus_back() {
    let Some([a, b]) = two() else { return };
    let vcpu = Vcpu::new(&set(&[a, b]));
    let mut threads = Threads::default();
    threads.keep_to(&set(&[a]), &BTreeSet::from([vcpu.tid]));
    assert_eq!(threads.keep_to(&set(&[a]), &BTreeSet::new()).changed, 1);
    assert_eq!(vcpu.cpus(), set(&[a, b]));
}

#[test]
fn vcpus_are_placed_and_may_leave_again() {
    let Some([a, b]) = two() else { return };
    let both = set(&[a, b]);
    let spin =
        |stop: mpsc::Receiver<()>| while stop.try_recv() == Err(mpsc::TryRecvError::Empty) {};
    let (stops, tids): (Vec<_>, Vec<_>) = (0..4)
        .map(|_| {
            let (tell, told) = mpsc::channel();
            let (stop, stopped) = mpsc::channel::<()>();
            std::thread::spawn(move || {
                sched_setaffinity(None, &both).unwrap();
                tell.send(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
                spin(stopped);
            });
            (stop, told.recv().unwrap())
        })
        .unzip();
    let alone = Vcpu::new(&set(&[b]));
    let to = |cpu| tids.iter().copied().chain([alone.tid]).map(move |tid| (tid, cpu));
    // One may not run there.
    assert_eq!(go(to(a)), Moved { changed: 4, ..Moved::default() });
    for &tid in &tids {
        assert_eq!(cpus_of(tid), Some(both));
    }
    assert_eq!(alone.cpus(), set(&[b]));
    assert_eq!(go(to(CpuId::new(70_000))), Moved::default());
    drop(stops);
}

#[test]
fn thread_that_has_taken_a_number_over_is_another() {
    let Some([a, b]) = two() else { return };
    let vcpu = Vcpu::new(&set(&[a, b]));
    let mut threads = Threads::default();
    threads.keep_to(&set(&[a]), &BTreeSet::from([vcpu.tid]));
    threads.0.get_mut(&vcpu.tid).unwrap().began += 1;
    assert_eq!(threads.give_back(), Moved::default());
    assert_eq!(vcpu.cpus(), set(&[a]));
}

#[test]
fn guard_answers_until_its_data_plane_has_gone() {
    let (mut guard, thread) = start();
    assert_eq!(guard.keep_to(&[], &[]).unwrap(), Moved::default());
    // A thread that is no vCPU of a process that is named: its first, as its name is the program's.
    assert_eq!(guard.place(vec![(pid(), CpuId::new(0))], &[pid()]).unwrap(), Moved::default());
    // Processes that are not there, and one that no number is.
    assert_eq!(guard.keep_to(&[CpuId::new(0)], &[-1, 0, i32::MAX]).unwrap(), Moved::default());
    drop(guard);
    thread.join().unwrap().unwrap();
}

#[test]
fn nonsense_ends_the_guard() {
    for nonsense in [&b"{}\n"[..], b"\n", b"{\"cpus\":[70000],\"processes\":[]}\n", &[b'['; 70_000]]
    {
        let (mut guard, thread) = start();
        let _ = guard.stream.get_mut().write_all(nonsense);
        thread.join().unwrap().unwrap_err();
        guard.keep_to(&[], &[]).unwrap_err();
    }
}
