//! Units on the kernel in memory, with a bus that answers nobody.

use std::io::Read as _;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rtvirtio_units::IoThreadName;

use super::*;
use crate::fake::FakeSysfs;
use crate::journal::{Journal, Pending, Phase};
use crate::restore::save;

const DISK: DeviceNumber = DeviceNumber::new(252, 0);
const OTHER: DeviceNumber = DeviceNumber::new(252, 16);

/// systemd 252's BFQ_WEIGHT().
fn bfq_weight(io: u64) -> u64 {
    if io <= 100 { 100 - (100 - io) * 99 / 99 } else { 100 + (io - 100) * 900 / 9900 }
}

#[test]
fn every_bfq_weight_is_reached_exactly() {
    for weight in 1..=1000 {
        let io = property_value(GroupKnob::Weight, &weight.to_string()).unwrap();
        assert!((1..=10_000).contains(&io), "{io}");
        assert_eq!(bfq_weight(io), weight);
    }
    // systemd#22897's numbers.
    assert_eq!(io_weight(700), 6700);
    assert_eq!(bfq_weight(666), 151);
}

#[test]
fn device_replaced_leaves_others_alone() {
    let sysfs = FakeSysfs::bare();
    sysfs.add_disk("vda", DISK, 2048);
    sysfs.add_disk("vdb", OTHER, 2048);
    let list = [("/dev/vda", 5), ("/dev/vdb", 6), ("/dev/block/252:0", 7), ("/gone", 8)];
    let list = list.map(|(path, n)| (path.to_owned(), n));
    let mut properties: Properties = [("P".to_owned(), list.to_vec())].into();
    let new: Properties = [("P".to_owned(), vec![("/dev/block/252:0".to_owned(), 9)])].into();
    replace(&sysfs, &mut properties, DISK, &new);
    let left = [("/dev/vdb", 6), ("/gone", 8), ("/dev/block/252:0", 9)];
    assert_eq!(properties["P"], left.map(|(path, n)| (path.to_owned(), n)));
}

#[test]
fn entry_of_a_file_is_about_the_disk_that_it_lies_on() {
    let sysfs = FakeSysfs::bare();
    sysfs.add_disk("vda", DISK, 2048);
    sysfs.add_disk("vdb", OTHER, 2048);
    sysfs.add_partition("vda1", DeviceNumber::new(252, 1), "vda", 1024);
    sysfs.stack("dm-0", DeviceNumber::new(253, 0), &["vda1"]);
    sysfs.stack("dm-1", DeviceNumber::new(253, 1), &["vda1", "vdb"]);
    let mounts = [
        "1 0 252:16 / / rw - ext4 /dev/vdb rw",
        "2 1 253:0 / /srv rw - xfs /dev/mapper/vg-srv rw",
        "3 1 0:44 / /far rw - nfs4 server:/export rw",
        "4 1 0:45 / /run rw - tmpfs tmpfs rw",
    ];
    sysfs.put("/proc/self/mountinfo", &mounts.join("\n"));
    // Files of the fake may stand for directories.
    for file in ["/srv/db", "/var/lib", "/run/x"] {
        sysfs.put(file, "");
    }
    let about = |path: &str| [DISK, OTHER].map(|device| is_about(&sysfs, path, device));
    for path in
        ["/dev/vda", "/dev/vda1", "/srv/db", "/dev/dm-0", "/dev/block/252:1", "/dev/block/253:0"]
    {
        assert_eq!(about(path), [true, false], "{path}");
    }
    for path in ["/dev/vdb", "/var/lib", "/dev/block/252:16"] {
        assert_eq!(about(path), [false, true], "{path}");
    }
    // Of one that lies on both disks systemd sets neither; of a server's file it would look at nothing.
    for path in ["/dev/dm-1", "/dev/block/253:1", "/far/x", "/run/x", "/gone", "srv", ""] {
        assert_eq!(about(path), [false, false], "{path}");
    }
    let mut properties: Properties = [("P".to_owned(), vec![("/srv/db".to_owned(), 5)])].into();
    let new: Properties = [("P".to_owned(), vec![("/dev/block/252:0".to_owned(), 9)])].into();
    replace(&sysfs, &mut properties, DISK, &new);
    assert_eq!(properties, new);
}

const GROUP: &str = "machine.slice/plc.scope";
const WEIGHTS: &str = "/sys/fs/cgroup/machine.slice/plc.scope/io.bfq.weight";

/// A host on cgroup v2 with systemd, whose bus hangs up once `act` has been called on its kernel.
struct Bed {
    fake: Arc<FakeSysfs>,
    host: Host,
    calls: Arc<AtomicUsize>,
    _directory: tempfile::TempDir,
}

impl Bed {
    /// Two disks under bfq, and the cgroup of a VM.
    fn new(act: impl Fn(&FakeSysfs) + Send + 'static) -> Self {
        let fake = FakeSysfs::v2();
        fake.put(&format!("{RUNNING}/systemd-units-load"), "");
        for (name, number) in [("vda", DISK), ("vdb", OTHER)] {
            fake.add_disk(name, number, 2048);
            let scheduler = directory(number).join("queue/scheduler");
            fake.write(&scheduler, "bfq").unwrap();
        }
        fake.add_cgroup(GROUP);
        let fake = Arc::new(fake);
        let root = tempfile::tempdir().unwrap();
        let bus = root.path().join("bus");
        let listener = UnixListener::bind(&bus).unwrap();
        let calls = Arc::new(AtomicUsize::new(0));
        let (kernel, counter) = (Arc::clone(&fake), Arc::clone(&calls));
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let mut client = client.unwrap();
                // What it says first; a socket closed with unread bytes would be reset.
                let _ = client.read(&mut [0; 4096]);
                counter.fetch_add(1, Ordering::SeqCst);
                act(&kernel);
            }
        });
        let host = Host { bus, ..Host::with_sysfs(root.path().join("state"), fake.clone()) };
        Self { fake, host, calls, _directory: root }
    }

    /// Writes the weights of the VM's cgroup.
    fn set(&self, weights: &[&str]) {
        set(&self.fake, weights);
    }

    fn weights(&self) -> String {
        self.fake.read(Path::new(WEIGHTS)).unwrap()
    }

    /// What an apply journals that sets the VM's weight on the first disk, and how it does it.
    fn planned(&self) -> (Resolved, Units, Vec<Change>, Record) {
        let resolved = self.resolved();
        let unit = Unit { name: "plc.scope".to_owned(), properties: Properties::new() };
        let units = Units([(GROUP.into(), unit)].into());
        let changes = vec![weight_change("700")];
        let record = save(&*self.fake, &resolved, &changes, &units).unwrap();
        (resolved, units, changes, record)
    }

    fn store(&self, original: Option<Record>, pending: Option<Pending>) {
        let mut journal = Journal::new("first".to_owned());
        (journal.original, journal.pending) = (original, pending);
        self.host.state.stage(&journal).unwrap();
        self.host.state.commit().unwrap();
    }

    fn calls(&self) -> usize {
        self.calls.load(Ordering::SeqCst)
    }

    fn resolved(&self) -> Resolved {
        let data = DeviceName::new("data").unwrap();
        let topology = crate::Topology {
            devices: [(data.clone(), "/dev/vda".into())].into(),
            vms: [(plc(), GROUP.into())].into(),
            uses: [(plc(), [data].into())].into(),
            ..crate::Topology::default()
        };
        Resolved::find(&*self.fake, &topology).unwrap()
    }
}

fn plc() -> VmName {
    VmName::new("plc").unwrap()
}

fn weight_change(weight: &str) -> Change {
    let knob = Knob::Weight { device: DeviceName::new("data").unwrap(), vm: plc() };
    Change { knob, old: None, new: weight.to_owned() }
}

fn set(fake: &FakeSysfs, weights: &[&str]) {
    weights.iter().for_each(|w| fake.write(Path::new(WEIGHTS), w).unwrap());
}

fn pending(phase: Phase, record: Record) -> Option<Pending> {
    Some(Pending { phase, deadline_ns: Some(0), record })
}

/// What the rollback of `bed` could not restore.
fn failures<T: std::fmt::Debug>(result: Result<T, HostError>) -> Vec<String> {
    match result.unwrap_err() {
        HostError::RestoreIncomplete { failures, .. } => failures,
        other => panic!("{other}"),
    }
}

#[test]
fn units_are_asked_about_for_knobs_of_the_host_only() {
    let bed = Bed::new(|_| ());
    let iothread = IoThreadName::new("io0").unwrap();
    let knob = Knob::PollMax { vm: plc(), iothread };
    let own = Change { knob, old: None, new: "0".to_owned() };
    assert!(bed.host.units(&bed.resolved(), &[own]).unwrap().0.is_empty());
    assert_eq!(bed.calls(), 0);
    let asked = bed.host.units(&bed.resolved(), &[weight_change("500")]);
    assert!(matches!(asked, Err(HostError::Systemd { .. })));
    assert_eq!(bed.calls(), 1);
}

#[test]
fn weights_that_systemd_drops_are_kept() {
    let bed = Bed::new(|_| ());
    let cgroup = &bed.resolved().vms[&plc()].cgroup;
    bed.set(&["default 90", "252:0 300", "252:16 250"]);
    let before = cgroup.weights(&*bed.fake);
    let kept = |by_systemd: &[&str]| {
        bed.set(by_systemd);
        bed.host.keep_weights(cgroup, &before).unwrap();
        bed.weights()
    };
    assert_eq!(kept(&["default 100", "252:0 700"]), "default 90\n252:0 700\n252:16 250\n");
    let both = kept(&["default 100", "252:0 700", "252:16 50"]);
    assert_eq!(both, "default 90\n252:0 700\n252:16 50\n");
    assert_eq!(kept(&["default 90", "252:0 700"]), "default 90\n252:0 700\n252:16 250\n");
    // Its lines died with bfq.
    bed.fake.write(&directory(OTHER).join("queue/scheduler"), "none").unwrap();
    assert_eq!(kept(&["default 100"]), "default 90\n252:0 300\n");
}

#[test]
fn weights_that_died_with_the_io_controller_are_not_kept() {
    let bed = Bed::new(|_| ());
    let cgroup = &bed.resolved().vms[&plc()].cgroup;
    bed.set(&["default 90", "252:0 300"]);
    let before = cgroup.weights(&*bed.fake);
    let control = Path::new("/sys/fs/cgroup/machine.slice/cgroup.subtree_control");
    bed.fake.write(control, "-io").unwrap();
    bed.host.keep_weights(cgroup, &before).unwrap();
}

#[test]
fn weights_are_kept_when_the_bus_fails() {
    // systemd dies when it has done half of it.
    let bed = Bed::new(|fake| set(fake, &["default 100", "252:0 700"]));
    bed.set(&["default 90", "252:16 250"]);
    let (resolved, units, changes, _) = bed.planned();
    let parts = units.parts(&*bed.fake, &resolved);
    let [(unit, parts)] = parts.as_slice() else { panic!() };
    let error = bed.host.set_planned(unit, parts, &changes).unwrap_err();
    assert!(matches!(error, HostError::Systemd { .. }), "{error}");
    assert_eq!(bed.weights(), "default 90\n252:0 700\n252:16 250\n");
}

#[test]
fn rollback_puts_back_weights_lost_in_between() {
    for lost in [&["default 100", "252:0 700"][..], &["default 90"], &["default 90", "252:16 250"]]
    {
        let bed = Bed::new(|_| ());
        bed.set(&["default 90", "252:0 300", "252:16 250"]);
        let before = bed.weights();
        let (.., record) = bed.planned();
        bed.store(None, pending(Phase::Applying, record));
        // Dead after the call on the bus, or among the writes that follow it.
        bed.set(lost);
        assert_eq!(failures(bed.host.rollback()).len(), 1);
        assert_eq!(bed.weights(), before);
        bed.set(lost);
        assert_eq!(failures(bed.host.rollback()).len(), 1);
        assert_eq!(bed.weights(), before, "a rollback that died");
    }
}

#[test]
fn rollback_leaves_newer_weights_alone() {
    for way in 0..3 {
        let bed = Bed::new(|_| ());
        bed.set(&["default 90", "252:0 300", "252:16 250"]);
        let (.., record) = bed.planned();
        match way {
            0 => bed.store(Some(record), None),
            _ => bed.store(None, pending(Phase::Unconfirmed, record)),
        }
        bed.set(&["default 80", "252:0 700"]);
        let failures = match way {
            2 => failures(bed.host.revert_unless_confirmed()),
            _ => failures(bed.host.rollback()),
        };
        assert_eq!(failures.len(), 1);
        assert_eq!(bed.weights(), "default 80\n252:0 300\n", "way {way}");
    }
}

#[test]
fn silent_systemd_is_asked_once() {
    let bed = Bed::new(|_| ());
    let (.., mut record) = bed.planned();
    let unit = record.units[0].clone();
    record.units.push(UnitRecord { device: OTHER, ..unit.clone() });
    record.units.push(UnitRecord { device: DeviceNumber::new(252, 32), ..unit });
    bed.store(Some(record), None);
    bed.set(&["252:0 700"]);
    let failures = failures(bed.host.rollback());
    assert!(
        failures.len() == 3 && failures.iter().all(|f| f.contains("plc.scope")),
        "{failures:?}"
    );
    assert_eq!(bed.calls(), 1);
    assert_eq!(bed.weights(), "default 100\n");

    let error = |source| HostError::Systemd { action: "set", source };
    let silence = std::io::Error::from(std::io::ErrorKind::TimedOut);
    assert!(!is_answer(&error(silence.into())));
    let refusal = zbus::fdo::Error::InvalidArgs(String::new());
    assert!(is_answer(&error(zbus::Error::FDO(Box::new(refusal)))));
}
