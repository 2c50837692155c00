//! The kernel's own knobs, on a loop device and cgroups made for each test.
//!
//! Needs root, losetup and a cgroup hierarchy with block I/O; without them each
//! test says that it is skipped, and why.

mod block_trace;
mod qemu;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Write as _};
use std::ops::ControlFlow;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rtvirtio_host::{
    ApplyOptions, CgroupVersion, Host, HostError, RollbackOutcome, Step, Topology,
};
use rtvirtio_spec::settings::{
    Bfq, DeviceSettings, Knob, Knobs, Limits, Scheduler, Settings, VmSettings, diff,
};
use rtvirtio_units::{BytesPerSecond, DeviceName, VmName, Weight};
use rustix::process::{Signal, getpid, kill_process};
use tempfile::TempDir;

const KILL_AT: &str = "RTVIRTIO_HOST_TEST_KILL_AT";
const KILL_DEVICE: &str = "RTVIRTIO_HOST_TEST_DEVICE";
const KILL_STATE: &str = "RTVIRTIO_HOST_TEST_STATE";
const KILL_RUN: &str = "RTVIRTIO_HOST_TEST_RUN";

/// The backing file's name.
const BACKING: &str = "disk.img";

/// Detached when dropped.
struct Loop {
    node: PathBuf,
    is_attached: bool,
    /// As it was found.
    scheduler: String,
    backing: TempDir,
}

impl Loop {
    /// Once only: afterwards the number may be another's.
    fn detach(&mut self) -> bool {
        let is_attached = std::mem::replace(&mut self.is_attached, false);
        let detach = || Command::new("losetup").arg("-d").arg(&self.node).status();
        if !is_attached || !detach().is_ok_and(|s| s.success()) {
            return false;
        }
        // It goes when its last user has closed it (LOOP_CLR_FD, kernel drivers/block/loop.c).
        let size = queue(&self.node).join("../size");
        (0..250).any(|_| {
            std::thread::sleep(Duration::from_millis(20));
            fs::read_to_string(&size).is_ok_and(|text| text.trim() == "0")
        })
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        // The number keeps its scheduler after a detach: leave it as it was found.
        if !self.is_attached {
            let file = self.backing.path().join(BACKING);
            let status = Command::new("losetup").arg(&self.node).arg(file).status();
            self.is_attached = status.is_ok_and(|s| s.success());
        }
        if self.is_attached {
            let _ = fs::write(queue(&self.node).join("scheduler"), &self.scheduler);
        }
        self.detach();
    }
}

/// Removed when dropped.
struct Groups {
    host: Host,
    paths: Vec<PathBuf>,
}

impl Drop for Groups {
    fn drop(&mut self) {
        for path in &self.paths {
            if let Err(error) = self.host.remove_cgroup(path) {
                eprintln!("{error}");
            }
        }
    }
}

/// Killed when dropped.
struct Sleeper(Child);

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Bed {
    host: Host,
    topology: Topology,
    run: String,
    // Dropped in this order: cgroups while the state directory is there.
    _groups: Groups,
    device: Loop,
    state: TempDir,
}

fn device() -> DeviceName {
    DeviceName::new("data").unwrap()
}

fn vm(name: &str) -> VmName {
    VmName::new(name).unwrap()
}

fn topology(node: &Path, run: &str) -> Topology {
    let vms = ["plc", "backup"];
    Topology {
        devices: BTreeMap::from([(device(), node.to_path_buf())]),
        vms: vms.map(|name| (vm(name), Path::new("rtvirtio").join(run).join(name))).into(),
        uses: vms.map(|name| (vm(name), BTreeSet::from([device()]))).into(),
        identities: BTreeMap::new(),
        guests: BTreeMap::new(),
        data_plane: None,
    }
}

fn make_loop() -> Result<Loop, String> {
    let backing = tempfile::tempdir().map_err(|e| e.to_string())?;
    let file = backing.path().join(BACKING);
    let make = || fs::File::create(&file)?.set_len(16 << 20);
    make().map_err(|e| e.to_string())?;
    let output = Command::new("losetup").args(["-f", "--show"]).arg(&file).output();
    let output = output.map_err(|e| format!("needs losetup: {e}"))?;
    if !output.status.success() {
        return Err(format!("needs a loop device: {}", String::from_utf8_lossy(&output.stderr)));
    }
    let node = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
    let schedulers = fs::read_to_string(queue(&node).join("scheduler")).unwrap();
    let selected =
        schedulers.split_whitespace().find_map(|w| w.strip_prefix('[')?.strip_suffix(']'));
    let scheduler = selected.unwrap_or("none").to_owned();
    Ok(Loop { node, is_attached: true, scheduler, backing })
}

/// A loop device under `scheduler` and two cgroups; `None`, and said so, where there can be none.
fn bed(test: &str, scheduler: &str) -> Option<Bed> {
    let state = tempfile::tempdir().unwrap();
    let host = Host::new("/").with_state_directory(state.path());
    let skip = |reason: String| {
        // Not println: what a passing test prints is hidden.
        let _ = writeln!(io::stderr(), "SKIPPED {test}: {reason}");
        None
    };
    let device = match prerequisites(&host) {
        Ok(device) => device,
        Err(reason) => return skip(reason),
    };
    let run = format!("test-{}-{test}", std::process::id());
    let topology = topology(&device.node, &run);
    let groups = Groups { host: host.clone(), paths: topology.vms.values().cloned().collect() };
    for path in &groups.paths {
        match host.create_cgroup(path) {
            // A container's hierarchy has the container's processes in its root.
            Err(HostError::Cgroup { source, .. })
                if source.kind() == io::ErrorKind::ResourceBusy =>
            {
                return skip("needs a cgroup hierarchy without processes in its root".to_owned());
            }
            made => drop(made.unwrap()),
        }
    }
    fs::write(queue(&device.node).join("scheduler"), scheduler).unwrap();
    Some(Bed { host, topology, run, _groups: groups, device, state })
}

/// A fresh loop device, or what this machine lacks.
fn prerequisites(host: &Host) -> Result<Loop, String> {
    if !rustix::process::geteuid().is_root() {
        return Err("needs root".to_owned());
    }
    let version = host.cgroup_version().map_err(|e| e.to_string())?;
    // Root may write anywhere but to what is mounted read-only, as a container's are.
    for place in [version.mount(), Path::new("/sys/block")] {
        rustix::fs::access(place, rustix::fs::Access::WRITE_OK)
            .map_err(|e| format!("needs to write below {}: {e}", place.display()))?;
    }
    let device = make_loop()?;
    let offered = fs::read_to_string(queue(&device.node).join("scheduler")).unwrap();
    if !offered.contains("bfq") {
        return Err(format!("needs bfq, the kernel offers {offered}"));
    }
    Ok(device)
}

fn queue(node: &Path) -> PathBuf {
    Path::new("/sys/block").join(node.file_name().unwrap()).join("queue")
}

fn wanted() -> Knobs {
    let bfq = Bfq { slice_idle_us: 0, timeout_sync_ms: 32, low_latency: false, max_budget: 64 };
    let of = |weight, limits| VmSettings { weight: Weight::new(weight).unwrap(), limits };
    let mut capped = Limits::bps(BytesPerSecond::from_megabytes(10));
    capped.write_iops = Some(1234);
    let vms =
        BTreeMap::from([(vm("plc"), of(500, Limits::default())), (vm("backup"), of(50, capped))]);
    let settings = DeviceSettings { scheduler: Scheduler::Bfq(bfq), vms };
    Settings(BTreeMap::from([(device(), settings)])).knobs()
}

impl Bed {
    /// All files that a test may change.
    fn snapshot(&self) -> BTreeMap<PathBuf, String> {
        let queue = queue(&self.device.node);
        let mut files: Vec<PathBuf> =
            ["scheduler", "nr_requests", "wbt_lat_usec"].map(|f| queue.join(f)).into();
        let mount = self.host.cgroup_version().unwrap().mount().to_path_buf();
        let mut directories = vec![queue.join("iosched")];
        directories.extend(self.topology.vms.values().map(|p| mount.join(p)));
        for entry in directories.iter().flat_map(|d| fs::read_dir(d).into_iter().flatten()) {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            let is_knob = ["_device", "weight", "max"].iter().any(|s| name.ends_with(s));
            if is_knob || path.starts_with(&queue) {
                files.push(path);
            }
        }
        let read = |f: PathBuf| Some((f.clone(), fs::read_to_string(f).ok()?));
        files.into_iter().filter_map(read).collect()
    }

    fn apply(&self, host: &Host) -> Result<(), HostError> {
        let observed = host.observe(&self.topology)?;
        let changes = diff(&observed, &wanted());
        host.apply(&self.topology, &observed, &changes, ApplyOptions::default()).map(drop)
    }
}

#[test]
fn real_loop_apply_verify_rollback_restores() {
    for scheduler in ["none", "mq-deadline", "kyber", "bfq"] {
        let Some(bed) = bed("real_loop_apply_verify_rollback_restores", scheduler) else {
            return;
        };
        if scheduler == "bfq" {
            let iosched = queue(&bed.device.node).join("iosched");
            fs::write(iosched.join("slice_idle_us"), "2500").unwrap();
            fs::write(iosched.join("back_seek_max"), "77").unwrap();
        }
        fs::write(queue(&bed.device.node).join("nr_requests"), "64").unwrap();
        let before = bed.snapshot();
        bed.apply(&bed.host).unwrap();
        assert_ne!(bed.snapshot(), before);
        assert_eq!(bed.host.verify(&bed.topology, &wanted()).unwrap(), []);
        let mut found = bed.host.observe(&bed.topology).unwrap();
        // On cgroup v2 iocost is there too, and off.
        found.retain(|knob, _| wanted().contains_key(knob));
        assert_eq!(found, wanted());
        let outcome = bed.host.rollback().unwrap();
        assert!(matches!(outcome, RollbackOutcome::RolledBack(r) if r.skipped.is_empty()));
        assert_eq!(bed.snapshot(), before, "{scheduler}");
    }
}

#[test]
fn real_loop_drift_is_found() {
    let Some(bed) = bed("real_loop_drift_is_found", "none") else {
        return;
    };
    bed.apply(&bed.host).unwrap();
    fs::write(queue(&bed.device.node).join("iosched/slice_idle_us"), "8000").unwrap();
    let drifts = bed.host.verify(&bed.topology, &wanted()).unwrap();
    assert_eq!(drifts.len(), 1);
    assert!(matches!(drifts[0].knob, Knob::Bfq { .. }));
    assert_eq!(drifts[0].found.as_deref(), Some("8000"));
    bed.host.rollback().unwrap();
}

#[test]
fn real_loop_detached_is_skipped_by_rollback() {
    let Some(mut bed) = bed("real_loop_detached_is_skipped_by_rollback", "none") else {
        return;
    };
    bed.apply(&bed.host).unwrap();
    assert!(bed.device.detach());
    let RollbackOutcome::RolledBack(done) = bed.host.rollback().unwrap() else { panic!() };
    assert_eq!((done.restored.len(), done.skipped.len()), (0, 1));
}

/// Not a test of its own: the process that `real_loop_killed_at_any_step_is_restored` kills.
#[test]
fn child_of_the_kill_test() {
    let Ok(step) = std::env::var(KILL_AT) else {
        return;
    };
    let left = AtomicUsize::new(step.parse().unwrap());
    let state = std::env::var_os(KILL_STATE).unwrap();
    let node = PathBuf::from(std::env::var_os(KILL_DEVICE).unwrap());
    let topology = topology(&node, &std::env::var(KILL_RUN).unwrap());
    let observer = move |_: &Step| {
        let next = left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |l| l.checked_sub(1));
        if next.is_err() {
            kill_process(getpid(), Signal::KILL).unwrap();
        }
        ControlFlow::Continue(())
    };
    let host = Host::new("/").with_state_directory(state).with_observer(Arc::new(observer));
    let observed = host.observe(&topology).unwrap();
    let changes = diff(&observed, &wanted());
    host.apply(&topology, &observed, &changes, ApplyOptions::default()).unwrap();
}

#[test]
fn real_loop_killed_at_any_step_is_restored() {
    let Some(bed) = bed("real_loop_killed_at_any_step_is_restored", "mq-deadline") else {
        return;
    };
    fs::write(queue(&bed.device.node).join("iosched/read_expire"), "99").unwrap();
    let before = bed.snapshot();
    let mut changed = 0;
    for step in 0.. {
        let status = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_of_the_kill_test", "--nocapture"])
            .env(KILL_AT, step.to_string())
            .env(KILL_DEVICE, &bed.device.node)
            .env(KILL_STATE, bed.state.path())
            .env(KILL_RUN, &bed.run)
            .stdout(Stdio::null())
            .status()
            .unwrap();
        changed += usize::from(bed.snapshot() != before);
        if status.success() {
            assert!(step > 20, "{step}");
            break;
        }
        assert_eq!(status.signal(), Some(9), "step {step}");
        // Both ways out of it, in turn.
        if step % 2 == 0 {
            bed.host.rollback().unwrap();
        } else {
            bed.host.verify(&bed.topology, &wanted()).unwrap();
        }
        if bed.snapshot() != before {
            // It died after its last write was settled.
            assert_eq!(bed.host.verify(&bed.topology, &wanted()).unwrap(), [], "step {step}");
            bed.host.rollback().unwrap();
        }
        assert_eq!(bed.snapshot(), before, "step {step}");
    }
    assert!(changed > 10, "the child died too early to prove anything: {changed}");
    bed.host.rollback().unwrap();
    assert_eq!(bed.snapshot(), before);
}

#[test]
fn real_loop_identity_names_the_backing_file() {
    let Some(bed) = bed("real_loop_identity_names_the_backing_file", "none") else {
        return;
    };
    let identity = bed.host.identity(&bed.device.node).unwrap();
    assert_eq!((identity.kind.as_str(), identity.model.as_str()), ("loop", BACKING));
    assert_eq!(identity.size.get(), 16 << 20);
    // Through a symbolic link, as /dev/disk/by-id has them.
    let link = bed.state.path().join("by-id");
    std::os::unix::fs::symlink(&bed.device.node, &link).unwrap();
    assert_eq!(bed.host.identity(&link).unwrap(), identity);
    let file = bed.state.path().join("file");
    fs::write(&file, "").unwrap();
    assert!(matches!(bed.host.identity(&file), Err(HostError::NotABlockDevice { .. })));
}

#[test]
fn real_cgroup_with_a_process_is_removed() {
    let Some(bed) = bed("real_cgroup_with_a_process_is_removed", "none") else {
        return;
    };
    let path = bed.topology.vms[&vm("plc")].clone();
    let mut sleeper = Sleeper(Command::new("sleep").arg("60").spawn().unwrap());
    let version = bed.host.cgroup_version().unwrap();
    let procs = version.mount().join(&path).join("cgroup.procs");
    fs::write(procs, sleeper.0.id().to_string()).unwrap();
    bed.host.remove_cgroup(&path).unwrap();
    assert_eq!(sleeper.0.wait().unwrap().signal(), Some(9));
    assert!(!version.mount().join(&path).exists());
    if let CgroupVersion::V1 { mount } = version {
        assert!(mount.join(&bed.topology.vms[&vm("backup")]).exists());
    }
}

#[test]
fn real_doctor_probes_this_host() {
    let findings = rtvirtio_host::doctor::probe(&Host::new("/"));
    assert!(findings.len() >= 15);
    println!("{}", serde_json::to_string_pretty(&findings).unwrap());
}
