//! What a write to a file asks of the data plane, and why it may be refused.
//!
//! A text is words between white space. An IOThread is `w.N`, or its name; a name that looks like `w.N`
//! is a number here. CPUs are a list such as `0,2-3`, or `any`.

use rtvirtio_host::dataplane::{ControlClient, ControlFault};
use rtvirtio_spec::control::{AddIoThread, Lock, MoveQueue, Moved, PinIoThread, SetMapping};
use rtvirtio_spec::cpulist;
use rtvirtio_spec::mapping::Entry;
use rtvirtio_spec::serve::wire;
use rtvirtio_units::{CpuId, DiskName, IoThreadName, NameError};
use rustix::io::Errno;

use super::files::{Place, Take};
use super::view::View;

/// Longest text: a page, as in sysfs.
pub(super) const MAX_TEXT: usize = 4096;

/// Why a write fails. Nothing has changed then, unless the data plane's own words say so.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refusal {
    /// No words, or more than there may be.
    #[error("write {0}")]
    Text(&'static str),
    /// Too long, or no UTF-8.
    #[error("write at most {MAX_TEXT} bytes of text")]
    NoText,
    /// No file that is written.
    #[error("it is not written")]
    NotWritten,
    /// What the file is of is no longer there.
    #[error("it has gone")]
    Gone,
    /// No such IOThread.
    #[error("there is no iothread \"{0}\"")]
    NoIoThread(String),
    /// The name is taken.
    #[error("there is an iothread \"{0}\" already")]
    Exists(IoThreadName),
    /// No name.
    #[error(transparent)]
    Name(#[from] NameError),
    /// No CPUs.
    #[error("{0}")]
    Cpus(String),
    /// CPUs on which nothing can run.
    #[error(transparent)]
    NoSuchCpus(ControlFault),
    /// The data plane refuses, or is not there.
    #[error(transparent)]
    Control(#[from] ControlFault),
}

impl Refusal {
    /// What the writer gets.
    pub(super) fn errno(&self) -> Errno {
        match self {
            Self::Text(_) | Self::NoText | Self::Name(_) | Self::Cpus(_) | Self::NoSuchCpus(_) => {
                Errno::INVAL
            }
            Self::NotWritten => Errno::ACCESS,
            Self::Gone | Self::NoIoThread(_) => Errno::NOENT,
            Self::Exists(_) => Errno::EXIST,
            Self::Control(fault) => errno(fault),
        }
    }

    /// Whether the same change may be made later: it is right, and what it names is there.
    pub(super) fn may_pass(&self) -> bool {
        !matches!(self.errno(), Errno::INVAL | Errno::NOENT)
    }

    /// What to do about it, if the data plane says.
    pub(super) fn hint(&self) -> Option<String> {
        match self {
            Self::Control(fault) | Self::NoSuchCpus(fault) => fault.hint(),
            _ => None,
        }
    }
}

/// What whoever reads or writes gets of a failed request.
pub(super) fn errno(fault: &ControlFault) -> Errno {
    match fault {
        ControlFault::Connect { source, .. }
            if source.kind() == std::io::ErrorKind::PermissionDenied =>
        {
            Errno::ACCESS
        }
        ControlFault::Late(_) => Errno::TIMEDOUT,
        ControlFault::Refused { status, .. } => match status {
            400 | 422 => Errno::INVAL,
            404 => Errno::NOENT,
            409 => Errno::BUSY,
            503 => Errno::AGAIN,
            504 => Errno::TIMEDOUT,
            _ => Errno::IO,
        },
        _ => Errno::IO,
    }
}

/// A change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Change {
    /// Starts an IOThread.
    Create(IoThreadName, Vec<CpuId>),
    /// Ends one.
    Remove(IoThreadName),
    /// Says where new devices go; the tree's own.
    Default(Option<IoThreadName>),
    /// Locks or unlocks one.
    Lock(IoThreadName, bool),
    /// Lets one run on these CPUs only; none: any.
    Pin(IoThreadName, Vec<CpuId>),
    /// Moves all queues of a device.
    MoveDevice(DiskName, IoThreadName),
    /// Moves one.
    MoveQueue(DiskName, u16, IoThreadName),
}

impl Change {
    /// What `bytes` ask for, written to a file of `place`.
    pub(super) fn read(
        take: Take,
        place: Place,
        bytes: &[u8],
        view: &View,
    ) -> Result<Self, Refusal> {
        const WORKER: &str = "one IOThread: w.N, or its name";
        if bytes.len() > MAX_TEXT {
            return Err(Refusal::NoText);
        }
        let text = std::str::from_utf8(bytes).map_err(|_| Refusal::NoText)?;
        let words: Vec<&str> = text.split_whitespace().collect();
        let own = || match place {
            Place::Worker(number) => view.worker(number).map(|w| w.name.clone()),
            _ => None,
        };
        let own = || own().ok_or(Refusal::Gone);
        let one = |wanted| match words.as_slice() {
            [word] => Ok(*word),
            _ => Err(Refusal::Text(wanted)),
        };
        let worker = |or| iothread(one(or)?, view);
        match take {
            Take::Create => create(&words, view),
            Take::Remove => Ok(Self::Remove(worker(WORKER)?)),
            Take::Default => {
                const OR_NONE: &str = "one IOThread (w.N, or its name), or none";
                if one(OR_NONE)? == "none" {
                    return Ok(Self::Default(None));
                }
                Ok(Self::Default(Some(worker(OR_NONE)?)))
            }
            Take::Lock => match one("0 or 1")? {
                "0" => Ok(Self::Lock(own()?, false)),
                "1" => Ok(Self::Lock(own()?, true)),
                _ => Err(Refusal::Text("0 or 1")),
            },
            Take::Pin => {
                let list = one("CPUs such as 0,2-3, or any")?;
                Ok(Self::Pin(own()?, cpus(list)?))
            }
            Take::Move => {
                let to = worker(WORKER)?;
                match place {
                    Place::Device(device) => {
                        let device = view.device(device).ok_or(Refusal::Gone)?;
                        Ok(Self::MoveDevice(device.name(), to))
                    }
                    Place::Queue(device, queue) => {
                        let (device, queue) = view.queue(device, queue).ok_or(Refusal::Gone)?;
                        Ok(Self::MoveQueue(device.name(), queue.index(), to))
                    }
                    _ => Err(Refusal::NotWritten),
                }
            }
        }
    }

    /// Asks the data plane for it.
    pub(super) fn make(&self, client: &ControlClient) -> Result<(), Refusal> {
        let of = |iothread: &IoThreadName| format!("/v1/iothreads/{iothread}");
        let result = match self {
            Self::Create(name, cpus) => {
                let (name, cpus) = (name.clone(), cpus.clone());
                let iothread = wire::IoThread {
                    name,
                    cpus,
                    completion: None,
                    core: None,
                    poll_max_us: None,
                    poll_grow: None,
                    poll_shrink: None,
                    trust: None,
                };
                client.change("POST", "/v1/iothreads", &AddIoThread(iothread), &[])
            }
            Self::Remove(iothread) => client.delete(&of(iothread)),
            Self::Default(_) => Ok(()),
            Self::Lock(iothread, locked) => {
                let path = of(iothread) + "/lock";
                client.change("PUT", &path, &Lock { locked: *locked }, &[])
            }
            Self::Pin(iothread, cpus) => {
                let path = of(iothread) + "/cpus";
                client.change("PUT", &path, &PinIoThread { cpus: cpus.clone() }, &[])
            }
            Self::MoveDevice(device, to) => {
                let mapping = SetMapping { mapping: vec![Entry::round_robin(to.clone())] };
                let path = format!("/v1/mapping/{device}");
                client.ask("PUT", &path, &mapping).map(|_: SetMapping| ())
            }
            Self::MoveQueue(device, queue, to) => {
                let path = format!("/v1/mapping/{device}/{queue}");
                let body = MoveQueue { iothread: to.clone() };
                client.ask("PUT", &path, &body).map(|_: Moved| ())
            }
        };
        result.map_err(|fault| match fault {
            // CPUs that are not there, or not allowed.
            ControlFault::Refused { status: 422, .. } if self.pins() => Refusal::NoSuchCpus(fault),
            fault => Refusal::Control(fault),
        })
    }

    fn pins(&self) -> bool {
        matches!(self, Self::Create(_, cpus) | Self::Pin(_, cpus) if !cpus.is_empty())
    }
}

fn iothread(word: &str, view: &View) -> Result<IoThreadName, Refusal> {
    let found = match Place::worker(word) {
        Some(number) => view.worker(number),
        None => view.worker_named(&IoThreadName::new(word)?).map(|(_, worker)| worker),
    };
    // As long as a name may be, whatever was written.
    let missing = || Refusal::NoIoThread(word.chars().take(64).collect());
    found.map(|worker| worker.name.clone()).ok_or_else(missing)
}

fn cpus(list: &str) -> Result<Vec<CpuId>, Refusal> {
    cpulist::parse(list).map_err(Refusal::Cpus)
}

/// `[NAME] [cpus=LIST]`; without a name, `wN` with a number that is free.
fn create(words: &[&str], view: &View) -> Result<Change, Refusal> {
    const WANTED: &str = "[NAME] [cpus=LIST], such as: io2 cpus=2-3";
    let (mut name, mut on) = (None, None);
    for word in words {
        let is_second = match word.strip_prefix("cpus=") {
            Some(list) => on.replace(cpus(list)?).is_some(),
            None => name.replace(IoThreadName::new(*word)?).is_some(),
        };
        if is_second {
            return Err(Refusal::Text(WANTED));
        }
    }
    let name = match name {
        Some(name) if view.worker_named(&name).is_some() => return Err(Refusal::Exists(name)),
        Some(name) => name,
        None => {
            let mut names = (view.next_worker..).map(|n| IoThreadName::new(format!("w{n}")));
            let free = |name: &IoThreadName| view.worker_named(name).is_none();
            names.find_map(|name| name.ok().filter(free)).ok_or(Refusal::Text(WANTED))?
        }
    };
    Ok(Change::Create(name, on.unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::super::view::Views;
    use super::super::view::tests::text;
    use super::*;

    fn read(take: Take, place: Place, bytes: &[u8]) -> Result<Change, Errno> {
        let devices: &[(&str, &[&str])] = &[("x", &["a", "b"])];
        // The third is number 2, and has the name of the first's number.
        let view = Views::new().take(text(&["a", "b", "w.0", "w3"], devices));
        Change::read(take, place, bytes, &view).map_err(|refusal| refusal.errno())
    }

    fn io(name: &str) -> IoThreadName {
        IoThreadName::new(name).unwrap()
    }

    fn ids(cpus: &[u32]) -> Vec<CpuId> {
        cpus.iter().copied().map(CpuId::new).collect()
    }

    #[test]
    fn right_text_is_the_change_that_it_says() {
        let x = || DiskName::new("x").unwrap();
        let (worker, device, queue) = (Place::Worker(1), Place::Device(0), Place::Queue(0, 1));
        for (take, place, text, change) in [
            (Take::Create, Place::Workers, "\n", Change::Create(io("w4"), vec![])),
            (Take::Create, Place::Workers, "io7\n", Change::Create(io("io7"), vec![])),
            (Take::Create, Place::Workers, "cpus=1", Change::Create(io("w4"), ids(&[1]))),
            (
                Take::Create,
                Place::Workers,
                "c cpus=0,2-3",
                Change::Create(io("c"), ids(&[0, 2, 3])),
            ),
            (Take::Create, Place::Workers, "cpus=any c", Change::Create(io("c"), vec![])),
            (Take::Remove, Place::Workers, "w.1\n", Change::Remove(io("b"))),
            (Take::Remove, Place::Workers, "b", Change::Remove(io("b"))),
            (Take::Remove, Place::Workers, "w.0", Change::Remove(io("a"))),
            (Take::Remove, Place::Workers, "w.2", Change::Remove(io("w.0"))),
            (Take::Default, Place::Workers, "w.1", Change::Default(Some(io("b")))),
            (Take::Default, Place::Workers, "none\n", Change::Default(None)),
            (Take::Lock, worker, "1\n", Change::Lock(io("b"), true)),
            (Take::Lock, worker, "0\n", Change::Lock(io("b"), false)),
            (Take::Pin, worker, "1,0\n", Change::Pin(io("b"), ids(&[0, 1]))),
            (Take::Pin, worker, "any\n", Change::Pin(io("b"), vec![])),
            (Take::Move, device, "w.1\n", Change::MoveDevice(x(), io("b"))),
            (Take::Move, queue, "a\n", Change::MoveQueue(x(), 1, io("a"))),
        ] {
            assert_eq!(read(take, place, text.as_bytes()), Ok(change), "{take:?} {text:?}");
        }
    }

    #[test]
    fn wrong_text_is_refused_with_its_errno() {
        let (worker, device, queue) = (Place::Worker(1), Place::Device(0), Place::Queue(0, 1));
        for (take, place, text, errno) in [
            (Take::Create, Place::Workers, "a", Errno::EXIST),
            (Take::Create, Place::Workers, "c d", Errno::INVAL),
            (Take::Create, Place::Workers, "cpus=0 cpus=1", Errno::INVAL),
            (Take::Create, Place::Workers, "cpus=1024", Errno::INVAL),
            (Take::Create, Place::Workers, "cpus=", Errno::INVAL),
            (Take::Create, Place::Workers, "../x", Errno::INVAL),
            (Take::Remove, Place::Workers, "", Errno::INVAL),
            (Take::Remove, Place::Workers, "a b", Errno::INVAL),
            (Take::Remove, Place::Workers, "w.9", Errno::NOENT),
            (Take::Remove, Place::Workers, "nobody", Errno::NOENT),
            (Take::Remove, Place::Workers, "no/body", Errno::INVAL),
            (Take::Default, Place::Workers, "", Errno::INVAL),
            (Take::Default, Place::Workers, "w.9", Errno::NOENT),
            (Take::Lock, worker, "2", Errno::INVAL),
            (Take::Lock, worker, "1 1", Errno::INVAL),
            (Take::Lock, Place::Worker(9), "1", Errno::NOENT),
            (Take::Pin, worker, "x", Errno::INVAL),
            (Take::Pin, worker, "", Errno::INVAL),
            (Take::Pin, Place::Worker(9), "0", Errno::NOENT),
            (Take::Move, device, "w.9", Errno::NOENT),
            (Take::Move, device, "", Errno::INVAL),
            (Take::Move, Place::Device(1), "w.0", Errno::NOENT),
            (Take::Move, queue, "w.0 w.1", Errno::INVAL),
            (Take::Move, Place::Queue(0, 2), "w.0", Errno::NOENT),
            (Take::Move, Place::Root, "w.0", Errno::ACCESS),
        ] {
            assert_eq!(read(take, place, text.as_bytes()), Err(errno), "{take:?} {text:?}");
        }
        let long = [b'a'; MAX_TEXT + 1];
        for bytes in [b"\xff".as_slice(), b"a\0b", &long] {
            assert_eq!(read(Take::Remove, Place::Workers, bytes), Err(Errno::INVAL));
        }
    }

    #[test]
    fn status_of_a_refusal_is_an_errno() {
        let refused =
            |status| errno(&ControlFault::Refused { status, error: "no".to_owned(), hint: None });
        for (status, expected) in [
            (400, Errno::INVAL),
            (404, Errno::NOENT),
            (409, Errno::BUSY),
            (422, Errno::INVAL),
            (500, Errno::IO),
            (503, Errno::AGAIN),
            (504, Errno::TIMEDOUT),
        ] {
            assert_eq!(refused(status), expected, "{status}");
        }
        let connect = |kind: std::io::ErrorKind| {
            errno(&ControlFault::Connect { socket: "/s".into(), source: kind.into() })
        };
        assert_eq!(connect(std::io::ErrorKind::PermissionDenied), Errno::ACCESS);
        assert_eq!(connect(std::io::ErrorKind::NotFound), Errno::IO);
    }
}
