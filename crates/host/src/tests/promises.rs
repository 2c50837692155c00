//! A data plane that does not take its knobs back.

use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Instant;

use rtvirtio_units::Name;

use super::*;
use crate::interrupt::Interrupted;
use crate::record::{DataPlaneRecord, Record};
use crate::{DataPlaneTopology, Skipped};

/// How a data plane treats requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Manner {
    /// It says nothing and keeps the connection.
    Hangs,
    /// It tells what it has, and hangs up at a change.
    HangsUp,
    /// The same, and does not listen any more.
    Ends,
    /// It tells what it has, and refuses a change.
    Refuses,
    /// It does what it is told.
    Fair,
}

struct Served {
    _directory: TempDir,
    control: PathBuf,
    manner: Arc<Mutex<Manner>>,
    /// The first lines of requests.
    heard: Arc<Mutex<Vec<String>>>,
}

const STARTED: u64 = 5;

impl Served {
    fn new(manner: Manner) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let control = directory.path().join("control.sock");
        let listener = UnixListener::bind(&control).unwrap();
        let (manner, heard) = (Arc::new(Mutex::new(manner)), Arc::new(Mutex::new(Vec::new())));
        let served = Self { _directory: directory, control, manner, heard };
        let (manner, heard) = (Arc::clone(&served.manner), Arc::clone(&served.heard));
        let socket = served.control.clone();
        thread::spawn(move || {
            let mut kept = Vec::new();
            while let Ok((mut stream, _)) = listener.accept() {
                let line = first_line(&mut stream);
                let is_look = line.starts_with("GET ");
                heard.lock().unwrap().push(line);
                let body = match *manner.lock().unwrap() {
                    Manner::Hangs => {
                        kept.push(stream);
                        continue;
                    }
                    _ if is_look => format!(
                        "200 OK\r\n\r\n{{\"time_ns\":7,\"started_ns\":{STARTED},\
                         \"iothreads\":[],\"devices\":[]}}"
                    ),
                    Manner::HangsUp => continue,
                    Manner::Ends => {
                        std::fs::remove_file(&socket).unwrap();
                        return;
                    }
                    Manner::Refuses => "422 No\r\n\r\n{\"error\":\"not that\"}".to_owned(),
                    Manner::Fair => "200 OK\r\n\r\n{}".to_owned(),
                };
                let _ = stream.write_all(format!("HTTP/1.0 {body}").as_bytes());
            }
        });
        served
    }

    fn behaves(&self, manner: Manner) {
        *self.manner.lock().unwrap() = manner;
    }

    /// How many changes it was asked for since the last time.
    fn changes(&self) -> usize {
        let mut heard = self.heard.lock().unwrap();
        heard.drain(..).filter(|line| line.starts_with("PUT ")).count()
    }
}

fn first_line(stream: &mut UnixStream) -> String {
    let mut bytes = [0; 4096];
    let length = stream.read(&mut bytes).unwrap_or_default();
    String::from_utf8_lossy(&bytes[..length]).lines().next().unwrap_or_default().to_owned()
}

/// A host that a plan was applied to, with two schedules of a data plane.
fn applied(served: &Served) -> (Bed, String) {
    let bed = Bed::new(true, "none");
    let before = bed.snapshot();
    bed.apply(&wanted()).unwrap();
    let curve = r#"{"channels":1,"request_ns":1,"kib_ns":1}"#.to_owned();
    let knob = |name| Knob::Schedule { schedule: Name::new(name).unwrap() };
    let old = ["a", "b"].map(|name| (knob(name), Some(curve.clone()))).into();
    let control = served.control.clone();
    let plane = DataPlaneRecord { control, started: Nanos::new(STARTED), old };
    let mut journal = bed.host.state.load().unwrap().unwrap();
    let with = Record { data_planes: vec![plane], ..Record::default() };
    journal.original = journal.original.map(|original| original.merged(with));
    bed.host.state.stage(&journal).unwrap();
    bed.host.state.commit().unwrap();
    (bed, before)
}

/// Sees that a rollback gives back the host and says once that the data plane is not.
fn fails(bed: &Bed, before: &str, served: &Served) {
    let error = bed.host.rollback().unwrap_err();
    let HostError::RestoreIncomplete { failures, .. } = &error else { panic!("{error}") };
    let is_named = failures[0].contains(&served.control.display().to_string());
    assert!(failures.len() == 1 && is_named, "{failures:?}");
    assert!(error.hint().unwrap().contains("a data plane that does not answer"));
    assert_eq!(bed.snapshot(), before, "the host is back");
    assert_eq!(bed.host.journal_status().unwrap(), JournalStatus::Applied);
}

#[test]
fn data_plane_that_hangs_does_not_keep_the_host_from_later_applies() {
    let served = Served::new(Manner::Hangs);
    let (bed, before) = applied(&served);
    let start = Instant::now();
    fails(&bed, &before, &served);
    assert!(start.elapsed() < Duration::from_secs(25), "{:?}", start.elapsed());
    // It is asked again by a rollback alone.
    assert!(bed.apply(&wanted()).unwrap().written > 0);
    assert_eq!(bed.drift(&wanted()), 0);
    served.behaves(Manner::HangsUp);
    served.changes();
    fails(&bed, &before, &served);
    assert_eq!(served.changes(), 1, "the other schedule would take as long");
    served.behaves(Manner::Fair);
    let RollbackOutcome::RolledBack(done) = bed.host.rollback().unwrap() else { panic!() };
    assert_eq!((served.changes(), done.restored.len(), done.skipped.len()), (2, 2, 0));
    assert_eq!(bed.host.rollback().unwrap(), RollbackOutcome::Nothing);
}

#[test]
fn signal_ends_the_wait_for_a_data_plane_that_hangs() {
    let served = Served::new(Manner::Hangs);
    let (mut bed, before) = applied(&served);
    let interrupted = Arc::new(Interrupted::new(false));
    bed.host = bed.host.clone().with_interrupt(Arc::clone(&interrupted));
    let once_it_is_asked = || {
        while served.heard.lock().unwrap().is_empty() {
            thread::sleep(Duration::from_millis(5));
        }
        interrupted.store(true, Ordering::Relaxed);
    };
    let start = Instant::now();
    thread::scope(|scope| {
        scope.spawn(once_it_is_asked);
        fails(&bed, &before, &served);
    });
    // Nothing was written when an apply, which looks first, ends.
    served.changes();
    interrupted.store(false, Ordering::Relaxed);
    let data_plane = DataPlaneTopology { control: served.control.clone(), ..Default::default() };
    let topology = Topology { data_plane: Some(data_plane), ..bed.topology.clone() };
    let error = thread::scope(|scope| {
        scope.spawn(once_it_is_asked);
        bed.host.apply(&topology, &Knobs::new(), &[], ApplyOptions::default()).unwrap_err()
    });
    assert!(error.is_of_user(), "{error}");
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    assert_eq!(bed.snapshot(), before);
}

#[test]
fn data_plane_that_refuses_is_asked_for_each_knob_and_again() {
    let served = Served::new(Manner::Refuses);
    let (bed, before) = applied(&served);
    let error = bed.host.rollback().unwrap_err();
    let HostError::RestoreIncomplete { failures, .. } = &error else { panic!("{error}") };
    assert!(failures.len() == 2 && failures[0].contains("not that"), "{failures:?}");
    assert_eq!((served.changes(), bed.snapshot()), (2, before));
    bed.apply(&wanted()).unwrap();
}

#[test]
fn data_plane_that_ends_while_it_is_put_back_is_skipped() {
    let served = Served::new(Manner::Ends);
    let (bed, before) = applied(&served);
    // Nobody hears the end of a change that was begun.
    fails(&bed, &before, &served);
    let RollbackOutcome::RolledBack(done) = bed.host.rollback().unwrap() else { panic!() };
    assert_eq!(done.skipped, [Skipped::DataPlane { control: served.control.clone() }]);
    assert_eq!(bed.host.rollback().unwrap(), RollbackOutcome::Nothing);
}
