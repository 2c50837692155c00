//! The closed loop on trial: a background VM starts in mid-run.
//!
//! Guests with targets run their load while `rtvirtio watch --control` looks
//! after them. A background VM is started beside them and writes; later watch
//! is killed (SIGKILL), and what it applied is rolled back, so that the last
//! part of the run shows what the control was worth. Latencies over time are
//! fio's, taken in the guests; misses are watch's, taken at QEMU.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rtvirtio_calibrate::load::{FIO_FILES, Job, Place, fio, streams};
use rtvirtio_calibrate::testbed::{DeviceUnderTest as _, GUEST_FILES};
use rtvirtio_cli::progress::Progress;
use rtvirtio_host::interrupt::{Interrupted, wait};
use rtvirtio_spec::specification::{Specification, Vm};
use rtvirtio_testbed::device::Testbed;
use rtvirtio_testbed::guests::{BOOT, Guest};
use rtvirtio_testbed::watcher::Watcher;
use rtvirtio_units::{BytesPerSecond, Nanos, TaskName, VmName};
use serde::{Deserialize, Serialize};

/// The background VM starts this long after the load; `watch` has planned for the others by then.
const VM_STARTS: Duration = Duration::from_secs(20);
/// watch is killed.
const KILLED: Duration = Duration::from_secs(70);
/// The load ends.
const ENDS: Duration = Duration::from_secs(90);
/// How much later than planned fio's output may be there.
const OVERTIME: Duration = Duration::from_secs(30);
/// Time after a change that its effect may take: a cap is released 0.1 s at a time, and what the
/// writer had queued must drain.
const SETTLES: f64 = 2.0;

/// How long all of it takes, about.
pub(crate) const DURATION: Duration = Duration::from_secs(105);

/// The longest that the plan may be late.
const LATEST: f64 = 5.0;
/// The least time between two changes.
const APART: f64 = 10.0;

/// A line of `watch --json`, as far as it is of interest.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Look {
    tasks: Vec<Row>,
    change: Option<Change>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Row {
    vm: VmName,
    task: TaskName,
    requests: u64,
    misses: u64,
}

/// A change as `watch --json` reports it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Change {
    /// Why it planned again.
    pub reason: String,
    /// Knobs written.
    pub written: u64,
    /// Targets left unmet.
    pub unmet: u64,
    /// Each background VM's cap.
    pub caps: BTreeMap<VmName, Option<BytesPerSecond>>,
    /// Why nothing was applied.
    pub failed: Option<String>,
}

/// One task over the run. Times are seconds since the load began.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TaskRecord {
    /// Its VM.
    pub vm: VmName,
    /// The task.
    pub task: TaskName,
    /// The target.
    pub target: Nanos,
    /// The part of its requests that may miss it.
    pub allowed: f64,
    /// Requests seen at QEMU from the new plan until watch was killed.
    pub requests: u64,
    /// Of these, above the target.
    pub misses: u64,
    /// Largest latency of each interval, taken in the guest: (s, ms).
    pub timeline: Vec<(f64, f64)>,
}

impl TaskRecord {
    /// Whether the target was met under the new plan.
    #[must_use]
    pub fn met(&self) -> bool {
        self.requests > 0 && self.misses as f64 <= self.allowed * self.requests as f64
    }
}

/// What happened. Times are seconds since the load began.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Record {
    /// When it was made, RFC 3339.
    pub date: String,
    /// What is under the guests.
    pub device: String,
    /// Scale factor of rates and targets.
    pub scale: u32,
    /// When the background VM's QEMU started.
    pub vm_started: f64,
    /// When it began to write.
    pub load_started: f64,
    /// When watch was killed.
    pub killed: f64,
    /// When the rollback had ended.
    pub rolled_back: f64,
    /// Whether every knob was as before the run after the rollback.
    pub restored: bool,
    /// Each change of the loop.
    pub changes: Vec<(f64, Change)>,
    /// The tasks with a target.
    pub tasks: Vec<TaskRecord>,
    /// What the background VM moved: (s, MB/s).
    pub background: Vec<(f64, f64)>,
}

impl Record {
    /// How long after the background VM's start the new plan was in force, s.
    #[must_use]
    pub fn delay(&self) -> Option<f64> {
        let of_vm =
            self.changes.iter().find(|(at, c)| *at >= self.vm_started && c.failed.is_none());
        of_vm.map(|(at, _)| at - self.vm_started)
    }

    /// What was asked of the loop and did not hold; empty if all did.
    #[must_use]
    pub fn complaints(&self) -> Vec<String> {
        let mut complaints = Vec::new();
        match self.delay() {
            None => complaints.push("no plan was applied for the new VM".to_owned()),
            Some(late) if late > LATEST => {
                complaints.push(format!("the plan was applied {late:.1} s after the VM's start"));
            }
            Some(_) => {}
        }
        for pair in self.changes.windows(2) {
            let apart = pair[1].0 - pair[0].0;
            // A second is what watch's own clock may be off by, which looks once a second.
            if apart < APART - 1.0 {
                complaints.push(format!("two changes are {apart:.1} s apart"));
            }
        }
        for task in self.tasks.iter().filter(|t| !t.met()) {
            let TaskRecord { vm, task, misses, requests, target, .. } = task;
            complaints.push(format!("{vm}/{task}: {misses} of {requests} requests above {target}"));
        }
        if !self.restored {
            complaints.push("rollback did not restore every knob".to_owned());
        }
        complaints
    }
}

/// Runs the trial on a testbed with guests. `program` is rtvirtio; `specification` is what
/// `file` holds, with all VMs and the device's profile.
///
/// # Errors
/// If the testbed has no guests, or one of them, fio or a command fails.
pub fn run(
    testbed: &mut Testbed,
    program: &Path,
    specification: &Specification,
    file: &Path,
    interrupted: &Interrupted,
) -> Result<Record> {
    let (background, vms): (Vec<&Vm>, Vec<&Vm>) =
        specification.vms.iter().partition(|vm| vm.is_background());
    let [background] = background[..] else { bail!("the trial needs one background VM") };
    testbed.stop_guest(&background.name);
    let before = testbed.prepare(specification)?;
    let guests = testbed.guests().context("the trial needs guests")?;
    std::fs::create_dir_all(FIO_FILES)?;
    let directory = tempfile::tempdir_in(FIO_FILES)?;
    let state = Path::new(GUEST_FILES).join("watch");
    let mut progress = Progress::new(4, DURATION);

    progress.start("four VMs under watch --control", VM_STARTS);
    let start = Instant::now();
    let at = |instant: Instant| (instant - start).as_secs_f64();
    let until = |time: Duration| wait(time.saturating_sub(start.elapsed()), interrupted);
    let mut workers = Vec::new();
    for vm in &vms {
        let worker = guests.start(directory.path(), vm, None, (ENDS, Duration::ZERO))?;
        let began = epoch(&worker, start)?;
        workers.push((*vm, worker, began));
    }
    let watch = Watcher::<Look>::start(program, file, &state)?;
    until(VM_STARTS)?;
    progress.finish(VM_STARTS);

    progress.start("the background VM starts", KILLED - VM_STARTS);
    let booting = guests.boot(&background.name)?;
    let vm_started = at(Instant::now());
    let (_, guest): (_, Guest) = guests.ready(booting, Instant::now() + BOOT, interrupted)?;
    // Until it is stopped.
    let times = (ENDS + 2 * OVERTIME, Duration::ZERO);
    let load_started = at(Instant::now());
    let mut writer = guest.start(directory.path(), background, None, times)?;
    let writer_began = epoch(&writer, start)?;
    until(KILLED)?;
    progress.finish(KILLED - VM_STARTS);

    progress.start("watch is killed, its changes are rolled back", ENDS - KILLED);
    let looks = watch.stop();
    let killed = at(Instant::now());
    let rollback =
        Command::new(program).arg("rollback").env("RTVIRTIO_STATE_DIR", &state).output()?;
    let said = String::from_utf8_lossy(&rollback.stderr);
    ensure!(rollback.status.success(), "rtvirtio rollback: {}", said.trim());
    let rolled_back = at(Instant::now());
    let restored = testbed.prepare(specification)? == before;
    until(ENDS)?;
    progress.finish(ENDS - KILLED);

    progress.start("results", DURATION - ENDS);
    let mut timelines = BTreeMap::new();
    for (vm, worker, began) in &mut workers {
        worker.finish(Instant::now(), Instant::now() + OVERTIME, interrupted)?;
        for (index, task) in vm.tasks.iter().enumerate() {
            let log = directory.path().join(fio::log_name(&vm.name, "clat", index));
            let point = |(ms, ns): (u64, u64)| (ms as f64 / 1e3 - *began, ns as f64 / 1e6);
            let points: Vec<_> = fio::log_lines(&log)?.into_iter().map(point).collect();
            timelines.insert((vm.name.clone(), task.name.clone()), points);
        }
    }
    writer.terminate()?;
    writer.finish(Instant::now(), Instant::now() + OVERTIME, interrupted)?;
    let mut moved = Vec::new();
    for index in 0..streams(background) {
        let log = directory.path().join(fio::log_name(&background.name, "bw", index));
        let point =
            |(ms, kib): (u64, u64)| (ms as f64 / 1e3 - writer_began, kib as f64 * 1024.0 / 1e6);
        moved.extend(fio::log_lines(&log)?.into_iter().map(point));
    }
    progress.finish(DURATION - ENDS);

    let changes: Vec<(f64, Change)> =
        looks.iter().filter_map(|(i, look)| Some((at(*i), look.change.clone()?))).collect();
    let applied = changes.iter().find(|(t, _)| *t >= vm_started).map_or(killed, |(t, _)| *t);
    let mut tasks = Vec::new();
    for vm in &vms {
        for task in &vm.tasks {
            let Some(target) = task.target else { continue };
            let key = (vm.name.clone(), task.name.clone());
            let rows: Vec<&Row> = looks
                .iter()
                .filter(|(i, _)| at(*i) >= applied + SETTLES)
                .filter_map(|(_, look)| {
                    look.tasks.iter().find(|r| r.vm == vm.name && r.task == task.name)
                })
                .collect();
            let since = |of: fn(&Row) -> u64| match (rows.first(), rows.last()) {
                (Some(first), Some(last)) => of(last) - of(first),
                _ => 0,
            };
            tasks.push(TaskRecord {
                target: target.latency,
                allowed: 1.0 - target.percentile.fraction(),
                requests: since(|r| r.requests),
                misses: since(|r| r.misses),
                timeline: timelines.remove(&key).unwrap_or_default(),
                vm: key.0,
                task: key.1,
            });
        }
    }
    Ok(Record {
        date: jiff::Timestamp::now().to_string(),
        device: testbed.label().to_owned(),
        scale: testbed.scale().get(),
        vm_started,
        load_started,
        killed,
        rolled_back,
        restored,
        changes,
        tasks,
        background: moved,
    })
}

/// `start` by the clock that a worker's logs go by, s since the epoch.
fn epoch(worker: &Job<'_>, start: Instant) -> Result<f64> {
    let (before, now) = (start.elapsed(), worker.now()?);
    Ok(now.as_secs_f64() - (before + start.elapsed()).as_secs_f64() / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(failed: bool) -> Change {
        let failed = failed.then(|| "refused".to_owned());
        let (reason, caps) = ("came: b".to_owned(), BTreeMap::new());
        Change { reason, written: 2, unmet: 0, caps, failed }
    }

    fn record() -> Record {
        let task = TaskRecord {
            vm: VmName::new("a").unwrap(),
            task: TaskName::new("t").unwrap(),
            target: Nanos::from_millis(40),
            allowed: 0.01,
            requests: 1000,
            misses: 10,
            timeline: Vec::new(),
        };
        Record {
            date: String::new(),
            device: String::new(),
            scale: 4,
            vm_started: 20.0,
            load_started: 26.0,
            killed: 70.0,
            rolled_back: 71.0,
            restored: true,
            changes: vec![(1.0, change(false)), (21.5, change(false))],
            tasks: vec![task],
            background: Vec::new(),
        }
    }

    #[test]
    fn good_run_has_no_complaint() {
        assert_eq!(record().complaints(), [""; 0]);
        assert_eq!(record().delay(), Some(1.5));
    }

    #[test]
    fn each_promise_that_breaks_is_a_complaint() {
        let mut r = record();
        r.changes[1] = (21.5, change(true));
        r.tasks[0].misses = 11;
        r.restored = false;
        assert_eq!(r.complaints().len(), 3);
        let mut r = record();
        r.changes.push((30.0, change(false)));
        assert_eq!(r.complaints(), ["two changes are 8.5 s apart"]);
        r.changes[1].0 = 26.0;
        assert!(r.complaints()[0].contains("6.0 s after"));
        r.tasks[0].requests = 0;
        assert!(!r.tasks[0].met());
    }
}
