//! The journal: everything needed to return to the state before rtvirtio.
//!
//! One file, `journal.json` in the state directory (`/run/rtvirtio-host`, since the
//! knobs themselves do not outlive a boot either), mode 0600 in a directory
//! that is made with mode 0700. It is staged, synced and renamed, so a reader sees the old
//! one or the new one.
//!
//! What restores by it writes as root wherever it says. So the directory is used only if it is this user's, nobody
//! else's to write to, and no link; one that was there already is refused or left as it is, never made private, for
//! somebody may have put a journal there before. So is the journal itself, which has to be a file; and names in it
//! are checked again when it is read: a parameter is a file of a queue, a cgroup lies below its mount. The data
//! plane's sockets are elsewhere (`/run/rtvirtio`), in a directory that belongs to another user.
//!
//! Terms: a *record* holds old values. `original` holds those from before
//! rtvirtio's first change; `pending` those from before the apply that is
//! under way or unconfirmed. Settling an apply merges `pending` into
//! `original`, where the older value wins.
//!
//! Properties: `merge_keeps_the_oldest_value`,
//! `merge_keeps_the_oldest_value_of_a_vm_that_still_runs`,
//! `merge_keeps_the_oldest_value_of_a_device_that_grew`,
//! `merge_drops_what_was_of_a_device_whose_number_another_one_has`, `journal_of_another_boot_is_void`,
//! `journal_is_private`, `state_directory_that_was_there_keeps_its_mode`,
//! `journal_that_others_may_have_written_is_refused`.

use std::fs::{self, DirBuilder, File, Metadata, OpenOptions, Permissions};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::fs::{
    DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _,
};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::HostError;
use crate::interrupt::{Interrupted, InterruptedError};
use crate::record::Record;

/// The journal's format.
const VERSION: u32 = 3;
/// The most bytes of a lock's file that are read: a process id and a newline.
const MAX_PID: u64 = 32;

/// How far an apply has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Phase {
    /// Writes are under way; found by another process, it died.
    Applying,
    /// All is written; reverted at the deadline unless confirmed.
    Unconfirmed,
}

/// An apply that is not settled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Pending {
    pub(crate) phase: Phase,
    /// On CLOCK_BOOTTIME, ns.
    pub(crate) deadline_ns: Option<u64>,
    pub(crate) record: Record,
}

/// The journal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Journal {
    version: u32,
    /// `/proc/sys/kernel/random/boot_id`: `/run` is not a tmpfs everywhere.
    pub(crate) boot_id: String,
    pub(crate) original: Option<Record>,
    pub(crate) pending: Option<Pending>,
    /// A rollback to before rtvirtio has begun.
    pub(crate) rolling_back: bool,
}

#[derive(Deserialize)]
struct VersionOnly {
    version: u32,
}

impl Journal {
    pub(crate) fn new(boot_id: String) -> Self {
        Self { version: VERSION, boot_id, original: None, pending: None, rolling_back: false }
    }

    /// Merges the pending apply into what is to be kept.
    pub(crate) fn settle(&mut self) {
        if let Some(pending) = self.pending.take() {
            self.original = Some(match self.original.take() {
                Some(original) => original.merged(pending.record),
                None => pending.record,
            });
        }
    }

    /// Whether the pending apply must be undone: its process died, or its deadline has passed.
    pub(crate) fn is_to_be_undone(&self, now: Duration) -> bool {
        self.pending
            .as_ref()
            .is_some_and(|p| p.phase == Phase::Applying || p.deadline().is_some_and(|d| d <= now))
    }
}

impl Pending {
    pub(crate) fn deadline(&self) -> Option<Duration> {
        self.deadline_ns.map(Duration::from_nanos)
    }
}

/// Time since boot, suspends included.
pub(crate) fn boot_time() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    Duration::try_from(now).unwrap_or_default()
}

/// The directory that holds journal and lock.
#[derive(Debug, Clone)]
pub(crate) struct StateDirectory(pub(crate) PathBuf);

/// Held as long as this host is being changed; the kernel drops it with its process.
#[derive(Debug)]
pub(crate) struct Lock(File);

impl Drop for Lock {
    fn drop(&mut self) {
        // Closing would not do: a child that another thread is starting holds
        // a copy of the descriptor until it executes its program.
        let _ = flock(&self.0, FlockOperation::Unlock);
    }
}

impl StateDirectory {
    pub(crate) fn journal(&self) -> PathBuf {
        self.0.join("journal.json")
    }

    fn staged(&self) -> PathBuf {
        self.0.join("journal.json.tmp")
    }

    fn create(&self) -> Result<(), HostError> {
        let create = || {
            if let Some(parent) = self.0.parent() {
                DirBuilder::new().recursive(true).mode(0o700).create(parent)?;
            }
            match DirBuilder::new().mode(0o700).create(&self.0) {
                // A umask may have taken the owner's own rights.
                Ok(()) => self.own()?.set_permissions(Permissions::from_mode(0o700)),
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
                Err(e) => Err(e),
            }
        };
        create().map_err(state("create", &self.0))?;
        self.trust().map_err(state("trust", &self.0))
    }

    /// The directory, which is this user's own and no link.
    fn own(&self) -> io::Result<File> {
        let flags = (OFlags::DIRECTORY | OFlags::NOFOLLOW).bits() as i32;
        let directory = OpenOptions::new().read(true).custom_flags(flags).open(&self.0)?;
        is_own(&directory.metadata()?)?;
        Ok(directory)
    }

    /// Sees that nobody else can have written what lies in the directory, if it is there.
    fn trust(&self) -> io::Result<()> {
        if self.0.symlink_metadata().is_err() {
            return Ok(());
        }
        is_closed(&self.own()?.metadata()?, "700")
    }

    /// The text of a file that nobody else can have written.
    fn read_own(file: &Path) -> io::Result<Vec<u8>> {
        // What is no file might be waited for.
        let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32;
        let mut opened = OpenOptions::new().read(true).custom_flags(flags).open(file)?;
        let found = opened.metadata()?;
        if !found.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file"));
        }
        is_own(&found)?;
        is_closed(&found, "600")?;
        let mut text = Vec::new();
        opened.read_to_end(&mut text)?;
        Ok(text)
    }

    /// Takes the host's lock at once or fails with its holder's pid.
    pub(crate) fn lock(&self) -> Result<Lock, HostError> {
        self.lock_file("lock")
    }

    /// Takes a lock, waiting while another process holds it, unless the user does not want to.
    pub(crate) fn lock_within(
        &self,
        name: &str,
        limit: Duration,
        interrupted: Option<&Interrupted>,
    ) -> Result<Lock, HostError> {
        let start = Instant::now();
        loop {
            match self.lock_file(name) {
                Err(HostError::Locked { .. }) if start.elapsed() < limit => {
                    if interrupted.is_some_and(|interrupted| interrupted.load(Ordering::Relaxed)) {
                        return Err(InterruptedError.into());
                    }
                    thread::sleep(Duration::from_millis(20));
                }
                other => return other,
            }
        }
    }

    /// The process that has held the host's lock last.
    pub(crate) fn last_holder(&self) -> Option<u32> {
        let text = Self::read_own(&self.0.join("lock")).ok()?;
        std::str::from_utf8(&text).ok()?.trim().parse().ok()
    }

    fn lock_file(&self, name: &str) -> Result<Lock, HostError> {
        self.create()?;
        let path = self.0.join(name);
        let open = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(OFlags::NOFOLLOW.bits() as i32)
            .open(&path);
        let mut file = open.map_err(state("open", &path))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let mut text = String::new();
                let read = (&file).take(MAX_PID).read_to_string(&mut text);
                let pid = read.ok().and_then(|_| text.trim().parse().ok());
                return Err(HostError::Locked { pid });
            }
            Err(errno) => return Err(state("lock", &path)(errno.into())),
        }
        note_holder(&mut file);
        Ok(Lock(file))
    }

    pub(crate) fn load(&self) -> Result<Option<Journal>, HostError> {
        let file = self.journal();
        self.trust().map_err(state("trust", &self.0))?;
        let text = match Self::read_own(&file) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(state("read", &file)(e)),
        };
        let damaged = |source| HostError::JournalDamaged { file: file.clone(), source };
        let VersionOnly { version } = serde_json::from_slice(&text).map_err(damaged)?;
        if version != VERSION {
            return Err(HostError::JournalVersion { file, found: version, known: VERSION });
        }
        Ok(Some(serde_json::from_slice(&text).map_err(damaged)?))
    }

    /// Writes and syncs the journal beside its place.
    pub(crate) fn stage(&self, journal: &Journal) -> Result<(), HostError> {
        self.create()?;
        let path = self.staged();
        let write = || {
            let text = serde_json::to_vec_pretty(journal)?;
            let mut options = OpenOptions::new();
            options.write(true).create(true).truncate(true).mode(0o600);
            options.custom_flags(OFlags::NOFOLLOW.bits() as i32);
            let mut file = options.open(&path)?;
            let written = file.write_all(&text).and_then(|()| file.sync_all());
            if written.is_err() {
                // A part of a journal is of no use, and takes room that is lacking.
                let _ = fs::remove_file(&path);
            }
            written
        };
        write().map_err(state("write", &path))
    }

    /// Puts the staged journal in its place.
    pub(crate) fn commit(&self) -> Result<(), HostError> {
        let rename = || {
            fs::rename(self.staged(), self.journal())?;
            File::open(&self.0)?.sync_all()
        };
        rename().map_err(state("write", &self.journal()))
    }

    pub(crate) fn remove(&self) -> Result<(), HostError> {
        let remove = || {
            match fs::remove_file(self.journal()) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
            File::open(&self.0)?.sync_all()
        };
        remove().map_err(state("remove", &self.journal()))
    }
}

/// Notes in a lock's file who holds it, for messages alone: a filesystem without room, as a full `/run` is, must keep nobody
/// from the lock, who may want to put something back. What was there is overwritten before it is cut, which takes no room.
fn note_holder(file: &mut File) {
    let text = format!("{}\n", std::process::id());
    let mut note = || {
        file.rewind()?;
        file.write_all(text.as_bytes())?;
        file.set_len(text.len() as u64)
    };
    if note().is_err() {
        // Better nobody than the one before.
        let _ = file.set_len(0);
    }
}

/// Sees that what was found is this user's.
fn is_own(found: &Metadata) -> io::Result<()> {
    let own = rustix::process::geteuid().as_raw();
    if found.uid() == own {
        return Ok(());
    }
    let why = format!("it belongs to user {}, not to {own}", found.uid());
    Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
}

/// Sees that no other user may write to what was found; `mode` is the remedy.
fn is_closed(found: &Metadata, mode: &str) -> io::Result<()> {
    if found.mode() & 0o022 == 0 {
        return Ok(());
    }
    // Not a denial, whose remedy would be to be root.
    Err(io::Error::other(format!("others may write to it (chmod {mode})")))
}

pub(crate) fn state(action: &'static str, file: &Path) -> impl FnOnce(io::Error) -> HostError {
    move |source| HostError::State { action, file: file.to_path_buf(), source }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use rtvirtio_units::{DeviceName, IoThreadName, Nanos, VmName};

    use super::*;
    use crate::qemu::Address;
    use crate::record::{
        DeviceRecord, GroupKnob, GroupRecord, GuestDiskRecord, GuestRecord, QueueRecord, UnitRecord,
    };
    use crate::sysfs::DeviceNumber;
    use crate::systemd::bus::Properties;

    fn weight(old: Option<&str>, only_if_absent: bool) -> GroupRecord {
        GroupRecord {
            cgroup: "a".into(),
            id: 1,
            device: DeviceNumber::new(7, 0),
            knob: GroupKnob::Weight,
            old: old.map(str::to_owned),
            only_if_absent,
        }
    }

    #[test]
    fn merge_keeps_the_oldest_value() {
        let record = |weight| Record { groups: vec![weight], ..Record::default() };
        let (older, newer) = (record(weight(Some("300"), true)), record(weight(None, false)));
        assert_eq!(older.merged(newer).groups, [weight(Some("300"), false)]);
    }

    fn device_record(size_sectors: u64, diskseq: Option<u64>) -> DeviceRecord {
        let name = DeviceName::new("data").unwrap();
        DeviceRecord { name, size_sectors, diskseq, queue: None, cost: None }
    }

    #[test]
    fn device_is_told_by_diskseq_else_by_size() {
        let is_same = |a: (u64, Option<u64>), b| device_record(a.0, a.1).is_about(b);
        assert!(is_same((8, Some(3)), (9, Some(3))), "it grew");
        assert!(!is_same((8, Some(3)), (8, Some(4))));
        for (a, b) in [(None, None), (None, Some(4)), (Some(3), None)] {
            assert!(is_same((8, a), (8, b)) && !is_same((8, a), (9, b)), "{a:?} {b:?}");
        }
    }

    #[test]
    fn merge_keeps_the_oldest_value_of_a_device_that_grew() {
        let record = |size_sectors, scheduler: &str| {
            let queue =
                QueueRecord { scheduler: scheduler.to_owned(), parameters: BTreeMap::new() };
            let device =
                DeviceRecord { queue: Some(queue), ..device_record(size_sectors, Some(3)) };
            Record { devices: [(DeviceNumber::new(7, 0), device)].into(), ..Record::default() }
        };
        assert_eq!(record(8, "kyber").merged(record(9, "bfq")), record(8, "kyber"));
    }

    #[test]
    fn merge_drops_what_was_of_a_device_whose_number_another_one_has() {
        let (gone, stays) = (DeviceNumber::new(7, 0), DeviceNumber::new(7, 1));
        let record = |diskseq, old: &str| {
            let of = |number| {
                let group = GroupRecord { device: number, ..weight(Some(old), false) };
                let unit = UnitRecord {
                    unit: "a.scope".to_owned(),
                    cgroup: "a".into(),
                    id: 1,
                    device: number,
                    properties: Properties::default(),
                    weights: [(old.to_owned(), old.to_owned())].into(),
                };
                (group, unit)
            };
            let (groups, units) = [gone, stays].map(of).into_iter().unzip();
            let devices = [(gone, Some(diskseq)), (stays, Some(1))];
            let devices = devices.map(|(number, seq)| (number, device_record(8, seq))).into();
            Record { devices, groups, units, ..Record::default() }
        };
        let merged = record(3, "300").merged(record(4, "700"));
        let old = |number| {
            let groups = merged.groups.iter().filter(|group| group.device == number);
            groups.map(|group| group.old.as_deref().unwrap()).collect::<Vec<_>>()
        };
        assert_eq!((old(gone), old(stays)), (vec!["700"], vec!["300"]));
        assert_eq!(merged.units.len(), 2, "{:?}", merged.units);
        assert_eq!(merged.devices[&gone].diskseq, Some(4));
        // The unit's own properties too are those that the new device was found with.
        let of_gone = merged.units.iter().position(|unit| unit.device == gone);
        assert_eq!(of_gone, Some(1), "it was written down anew");
    }

    fn guest(pid: u32, boot_id: Option<&str>, poll_max: u64) -> GuestRecord {
        let queue = |scheduler: &str| QueueRecord {
            scheduler: scheduler.to_owned(),
            parameters: BTreeMap::new(),
        };
        let disk = |boot| GuestDiskRecord { diskseq: None, queue: queue(boot) };
        GuestRecord {
            vm: VmName::new("plc").unwrap(),
            pid,
            started: 5,
            monitor: Address::Socket("/run/plc.qmp".into()),
            agent: boot_id.map(|_| Address::Domain("plc".into())),
            boot_id: boot_id.map(str::to_owned),
            // The scheduler tells which record it was.
            disks: boot_id.map(|b| ("vda".to_owned(), disk(b))).into_iter().collect(),
            poll_max: [(IoThreadName::new("io0").unwrap(), Nanos::new(poll_max))].into(),
        }
    }

    #[test]
    fn merge_keeps_the_oldest_value_of_a_vm_that_still_runs() {
        let merged = |older: GuestRecord, newer: GuestRecord| {
            let record = |guest| Record { guests: vec![guest], ..Record::default() };
            let mut guests = record(older).merged(record(newer)).guests;
            assert_eq!(guests.len(), 1);
            guests.remove(0)
        };
        let first = || guest(1, Some("a"), 7);
        assert_eq!(merged(first(), guest(1, Some("a"), 0)), first());
        assert_eq!(merged(first(), guest(1, None, 0)), first());
        assert_eq!(merged(guest(1, None, 7), guest(1, Some("a"), 0)), first());
        // Booted again: its QEMU polls as before. Started again: nothing is left.
        assert_eq!(merged(first(), guest(1, Some("b"), 0)), guest(1, Some("b"), 7));
        assert_eq!(merged(first(), guest(2, Some("b"), 0)), guest(2, Some("b"), 0));
        // Saved and restored: the guest has what was set in it, another QEMU polls.
        let restored =
            GuestRecord { disks: guest(2, Some("b"), 0).disks, ..guest(2, Some("a"), 0) };
        assert_eq!(merged(first(), restored), guest(2, Some("a"), 0));
    }

    #[test]
    fn journal_is_private() {
        let root = tempfile::tempdir().unwrap();
        let directory = StateDirectory(root.path().join("run/rtvirtio"));
        directory.stage(&Journal::new("b".to_owned())).unwrap();
        assert_eq!(directory.load().unwrap(), None);
        directory.commit().unwrap();
        let mode = |p: &Path| fs::metadata(p).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&directory.0), 0o700);
        assert_eq!(mode(&directory.journal()), 0o600);
        assert_eq!(directory.load().unwrap().unwrap().boot_id, "b");
    }

    /// Writes a journal as rtvirtio would, whatever the umask.
    fn put(directory: &StateDirectory, text: &str) {
        fs::write(directory.journal(), text).unwrap();
        fs::set_permissions(directory.journal(), Permissions::from_mode(0o600)).unwrap();
    }

    /// Why the state is refused.
    fn why<T: std::fmt::Debug>(result: Result<T, HostError>) -> String {
        match result {
            Err(HostError::State { source, .. }) => source.to_string(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn state_directory_that_was_there_keeps_its_mode() {
        let root = tempfile::tempdir().unwrap();
        let directory = StateDirectory(root.path().join("state"));
        fs::create_dir(&directory.0).unwrap();
        let mode = || fs::metadata(&directory.0).unwrap().permissions().mode() & 0o7777;
        let set = |mode| fs::set_permissions(&directory.0, Permissions::from_mode(mode)).unwrap();
        set(0o755);
        drop(directory.lock().unwrap());
        directory.stage(&Journal::new("b".to_owned())).unwrap();
        directory.commit().unwrap();
        assert_eq!(directory.load().unwrap().unwrap().boot_id, "b");
        assert_eq!(mode(), 0o755, "others may read it");
        // As /tmp is. The journal in it is not made trustworthy by closing the directory now.
        for open in [0o1777, 0o775] {
            set(open);
            for refused in [
                why(directory.lock()),
                why(directory.stage(&Journal::new("b".to_owned()))),
                why(directory.load()),
            ] {
                assert!(refused.contains("others may write to it"), "{refused}");
            }
            assert_eq!(mode(), open);
        }
    }

    #[test]
    fn journal_that_others_may_have_written_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let directory = StateDirectory(root.path().join("state"));
        directory.stage(&Journal::new("b".to_owned())).unwrap();
        directory.commit().unwrap();
        let journal = directory.journal();
        for mode in [0o622, 0o660, 0o602] {
            fs::set_permissions(&journal, Permissions::from_mode(mode)).unwrap();
            let refused = why(directory.load());
            assert!(refused.contains("others may write to it"), "{mode:o}: {refused}");
        }
        fs::set_permissions(&journal, Permissions::from_mode(0o644)).unwrap();
        directory.load().unwrap().unwrap();
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&journal, Some(65534), None).unwrap();
            let refused = why(directory.load());
            assert!(refused.contains("belongs to user 65534"), "{refused}");
            std::os::unix::fs::chown(&journal, Some(0), None).unwrap();
        }
        // A link to what would be a journal.
        let elsewhere = root.path().join("elsewhere");
        fs::rename(&journal, &elsewhere).unwrap();
        std::os::unix::fs::symlink(&elsewhere, &journal).unwrap();
        assert!(matches!(directory.load(), Err(HostError::State { .. })));
        // Nobody writes to it: it is not waited for.
        fs::remove_file(&journal).unwrap();
        let fifo = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, &journal, fifo, 0o600.into(), 0).unwrap();
        assert!(why(directory.load()).contains("no regular file"));
    }

    #[test]
    fn journal_that_names_what_is_no_knob_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let directory = StateDirectory(root.path().to_path_buf());
        let device = |parameter: &str| {
            format!(
                r#"{{"version": {VERSION}, "boot_id": "b", "pending": null, "rolling_back": false,
                "original": {{"groups": [], "units": [], "guests": [], "data_planes": [], "devices": {{"7:0": {{"name": "data", "size_sectors": 8,
                "diskseq": 3, "queue": {{"scheduler": "none", "parameters": {{"{parameter}": "x"}}}}}}}}}}}}"#
            )
        };
        let group = |cgroup: &str| {
            format!(
                r#"{{"version": {VERSION}, "boot_id": "b", "pending": null, "rolling_back": false,
                "original": {{"devices": {{}}, "units": [], "guests": [], "data_planes": [], "groups": [{{"cgroup": "{cgroup}", "id": 1,
                "device": "7:0", "knob": "weight", "old": "300", "only_if_absent": false}}]}}}}"#
            )
        };
        let load = |text: &str| {
            put(&directory, text);
            directory.load()
        };
        for good in
            [device("nr_requests"), device("iosched/slice_idle_us"), group("machine.slice/a.scope")]
        {
            assert!(load(&good).is_ok(), "{good}: {:?}", load(&good));
        }
        let names =
            ["/etc/passwd", "../../../etc/passwd", "iosched/../x", "iosched/", "", "scheduler"];
        let paths = ["/etc", "../x", "a/../../x"];
        let planted = names.map(device).into_iter().chain(paths.map(group));
        for text in planted {
            let refused = load(&text);
            assert!(
                matches!(refused, Err(HostError::JournalDamaged { .. })),
                "{text}: {refused:?}"
            );
        }
    }

    #[test]
    fn state_directory_that_is_a_link_or_open_to_others_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let target = root.path().join("target");
        fs::create_dir(&target).unwrap();
        let link = root.path().join("link");
        std::os::unix::fs::symlink(&target, &link).unwrap();
        let linked = StateDirectory(link);
        assert!(matches!(linked.load(), Err(HostError::State { .. })));
        assert!(matches!(linked.lock(), Err(HostError::State { .. })));
        assert!(matches!(
            linked.stage(&Journal::new("b".to_owned())),
            Err(HostError::State { .. })
        ));
        assert_eq!(fs::read_dir(&target).unwrap().count(), 0, "nothing was written behind it");
        // A journal that somebody else may have put there.
        let open = StateDirectory(target.clone());
        fs::write(open.journal(), "{}").unwrap();
        fs::set_permissions(&target, Permissions::from_mode(0o777)).unwrap();
        assert!(matches!(open.load(), Err(HostError::State { .. })));
        if rustix::process::geteuid().is_root() {
            let nobody = 65534;
            std::os::unix::fs::chown(&target, Some(nobody), Some(nobody)).unwrap();
            fs::set_permissions(&target, Permissions::from_mode(0o700)).unwrap();
            assert!(matches!(open.load(), Err(HostError::State { .. })));
            assert!(matches!(open.lock(), Err(HostError::State { .. })));
        }
    }

    #[test]
    fn lock_and_staged_journal_that_are_links_are_not_followed() {
        let root = tempfile::tempdir().unwrap();
        let directory = StateDirectory(root.path().join("state"));
        drop(directory.lock().unwrap());
        let victim = root.path().join("victim");
        fs::write(&victim, "precious").unwrap();
        fs::remove_file(directory.0.join("lock")).unwrap();
        for name in ["lock", "journal.json.tmp"] {
            std::os::unix::fs::symlink(&victim, directory.0.join(name)).unwrap();
        }
        assert!(directory.lock().is_err());
        assert!(directory.stage(&Journal::new("b".to_owned())).is_err());
        assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
    }

    #[test]
    fn journal_damaged_is_an_error_with_a_hint() {
        let root = tempfile::tempdir().unwrap();
        let directory = StateDirectory(root.path().to_path_buf());
        put(&directory, "{\"version\": 1, \"boo");
        let error = directory.load().unwrap_err();
        assert!(matches!(error, HostError::JournalDamaged { .. }) && error.hint().is_some());
        put(&directory, "{\"version\": 9}");
        assert!(matches!(directory.load(), Err(HostError::JournalVersion { found: 9, .. })));
    }

    #[test]
    fn lock_whose_holder_cannot_be_noted_is_held() {
        const NAME: &str = "lock_whose_holder_cannot_be_noted_is_held";
        let root = tempfile::tempdir().unwrap();
        let directory = StateDirectory(root.path().to_path_buf());
        // As `/dev/full`: each write to it fails with ENOSPC.
        let (full, number) = (rustix::fs::FileType::CharacterDevice, rustix::fs::makedev(1, 7));
        let lock = directory.0.join("lock");
        let made = rustix::fs::mknodat(rustix::fs::CWD, &lock, full, 0o600.into(), number);
        let opened = made
            .map_err(io::Error::from)
            .and_then(|()| OpenOptions::new().read(true).write(true).open(&lock));
        match opened {
            Ok(mut full) => assert!(full.write_all(b"1").is_err()),
            Err(error) => {
                // Not println: what a passing test prints is hidden.
                let _ = writeln!(io::stderr(), "SKIPPED {NAME}: needs a device node: {error}");
                return;
            }
        }
        let held = directory.lock().unwrap();
        assert!(matches!(directory.lock(), Err(HostError::Locked { .. })));
        drop(held);
        directory.lock().unwrap();
    }

    #[test]
    fn lock_names_its_last_holder_alone() {
        let root = tempfile::tempdir().unwrap();
        let directory = StateDirectory(root.path().to_path_buf());
        let lock = directory.0.join("lock");
        fs::write(&lock, "1234567890123\n").unwrap();
        fs::set_permissions(&lock, Permissions::from_mode(0o600)).unwrap();
        let _held = directory.lock().unwrap();
        assert_eq!(directory.last_holder(), Some(std::process::id()));
    }

    #[test]
    fn lock_held_names_its_holder() {
        let root = tempfile::tempdir().unwrap();
        let directory = StateDirectory(root.path().to_path_buf());
        let held = directory.lock().unwrap();
        let pid = std::process::id();
        assert!(matches!(directory.lock(), Err(HostError::Locked { pid: Some(p) }) if p == pid));
        drop(held);
        directory.lock().unwrap();
    }
}
