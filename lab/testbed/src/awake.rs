//! Keeps CPUs from halting: a virtual CPU that has halted takes hundreds of µs to be back, and a p99 of a light load
//! shows little else.
//!
//! On each CPU a thread that is run when nobody else wants it (`SCHED_IDLE`, sched(7)) and makes way at once.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc;
use std::thread::JoinHandle;

use anyhow::{Context, Result};
use rtvirtio_units::CpuId;

use crate::cpu::run_on;

/// CPUs that do not halt until this is dropped.
#[derive(Debug, Default)]
pub struct Awake {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Awake {
    /// Of these CPUs.
    ///
    /// # Errors
    /// A thread does not start, or may not run there.
    pub fn keep(cpus: &[CpuId]) -> Result<Self> {
        let mut awake = Self::default();
        for &cpu in cpus {
            let (tell, told) = mpsc::channel();
            let stop = Arc::clone(&awake.stop);
            let spin = move || {
                let ready = run_on(&[cpu]).and_then(|()| Ok(run_last()?));
                let is_ready = ready.is_ok();
                let _ = tell.send(ready);
                while is_ready && !stop.load(Relaxed) {
                    std::hint::spin_loop();
                }
            };
            let thread = std::thread::Builder::new().name("awake".to_owned()).spawn(spin)?;
            awake.threads.push(thread);
            told.recv()?.with_context(|| format!("keep CPU {cpu} awake"))?;
        }
        Ok(awake)
    }
}

impl Drop for Awake {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        for thread in self.threads.drain(..) {
            // It only spins.
            let _ = thread.join();
        }
    }
}

/// Has the calling thread run when no other wants to.
fn run_last() -> io::Result<()> {
    let param = libc::sched_param { sched_priority: 0 };
    // SAFETY: pid 0 is the calling thread; `param` outlives the call, which only reads it.
    let result = unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const param) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_do_not_halt_and_threads_are_gone_after_it() {
        let cpus = crate::cpu::usable().unwrap();
        let policies = || -> Vec<String> {
            let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
            let of = |task: std::fs::DirEntry| {
                let name = std::fs::read_to_string(task.path().join("comm")).ok()?;
                let stat = std::fs::read_to_string(task.path().join("stat")).ok()?;
                // The 41st field of proc_pid_stat(5): the policy.
                let policy = stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(41 - 3)?;
                (name.trim() == "awake").then(|| policy.to_owned())
            };
            tasks.filter_map(of).collect()
        };
        let awake = Awake::keep(&cpus).unwrap();
        assert_eq!(policies(), vec!["5"; cpus.len()]);
        drop(awake);
        // A thread that was joined is still in /proc while it exits, which one that runs last does when the
        // machine is busy for as long as that lasts.
        let begin = std::time::Instant::now();
        while !policies().is_empty() {
            assert!(begin.elapsed() < std::time::Duration::from_secs(20), "{:?}", policies());
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }
}
