//! The tree's directories and files, and what is in them.
//!
//! One table has each directory's files: name, what is read there and what a write does. Times are
//! nanoseconds, under IOcm's names for cycles too; a list has one item a line.

use std::borrow::Cow;
use std::fmt;

use rtvirtio_spec::control::{
    Activity, DeviceState, IoThreadState, NicQueueState, NicState, QueueDirection, QueueState,
};
use rtvirtio_spec::plan::qemu::cpuset;
use rtvirtio_units::IoThreadName;

use super::view::{Device, Queue, View};

/// A directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// The mount's own.
    Root,
    /// `worker/`
    Workers,
    /// `worker/w.N/`: an IOThread.
    Worker(u32),
    /// `dev/`
    Devices,
    /// `dev/d.N/`
    Device(u32),
    /// `vq/`
    Queues,
    /// `vq/vq.D.Q/`: queue Q of device D.
    Queue(u32, u16),
}

/// A directory, or one of its files by its number in the directory's table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Node {
    pub(super) place: Place,
    file: Option<u8>,
}

/// A file.
#[derive(Debug, Clone, Copy)]
pub(super) struct File {
    name: &'static str,
    /// What is read; none: nobody reads it.
    pub(super) show: Option<Show>,
    /// What a write does; none: nobody writes it.
    pub(super) take: Option<Take>,
}

/// What is read of a file.
#[derive(Debug, Clone, Copy)]
pub(super) enum Show {
    /// Why the last write failed: not of a view.
    Error,
    /// The control API's answer.
    Whole,
    Tree(fn(&View) -> String),
    Worker(fn(&View, &IoThreadState) -> String),
    Device(fn(&View, u32, Device<'_>) -> String),
    Queue(fn(&View, u32, Queue<'_>) -> String),
    /// Of disks, or of network devices, alone: with the others there is no such file.
    Disk(fn(&DeviceState) -> String),
    DiskQueue(fn(&QueueState) -> String),
    Nic(fn(&NicState) -> String),
    NicQueue(fn(&NicQueueState) -> String),
}

impl File {
    /// Whether what its directory is of has it.
    fn fits(&self, place: Place, view: &View) -> bool {
        let of_nics = match self.show {
            Some(Show::Nic(_) | Show::NicQueue(_)) => true,
            Some(Show::Disk(_) | Show::DiskQueue(_)) => false,
            _ => return true,
        };
        let device = match place {
            Place::Device(number) | Place::Queue(number, _) => view.device(number),
            _ => None,
        };
        device.is_some_and(|device| matches!(device, Device::Nic(_)) == of_nics)
    }
}

/// What a write to a file does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Take {
    /// Adds an IOThread.
    Create,
    /// Ends one.
    Remove,
    /// Says where new devices go.
    Default,
    /// Locks or unlocks one.
    Lock,
    /// Pins one.
    Pin,
    /// Moves a device, or one queue of it.
    Move,
}

const fn shown(name: &'static str, show: Show) -> File {
    File { name, show: Some(show), take: None }
}

const fn both(name: &'static str, show: Show, take: Take) -> File {
    File { name, show: Some(show), take: Some(take) }
}

const fn taken(name: &'static str, take: Take) -> File {
    File { name, show: None, take: Some(take) }
}

static ROOT: &[File] = &[
    shown(
        "cycles",
        Show::Tree(|v| line(v.snapshot.time_ns.saturating_sub(v.snapshot.started_ns).get())),
    ),
    shown("epoch", Show::Tree(|v| line(v.epoch))),
    shown("error", Show::Error),
    shown("snapshot", Show::Whole),
];

static WORKERS: &[File] = &[
    taken("create", Take::Create),
    both(
        "default",
        Show::Tree(|v| match &v.default {
            Some(name) => line(worker(v, name)),
            None => line("none"),
        }),
        Take::Default,
    ),
    taken("remove", Take::Remove),
];

static WORKER: &[File] = &[
    both(
        "cpu",
        Show::Worker(|_, w| match w.cpus.as_slice() {
            [] => line("any"),
            cpus => line(cpuset(cpus)),
        }),
        Take::Pin,
    ),
    shown("cpu_ns", Show::Worker(|_, w| line(w.cpu_ns.get()))),
    shown("cycles", Show::Worker(|_, w| line(w.poll_ns.get()))),
    shown("dev_list", Show::Worker(|v, w| devices(v, &w.name))),
    shown("lock_ns", Show::Worker(|_, w| line(w.lock_ns.get()))),
    both("locked", Show::Worker(|_, w| line(u8::from(w.locked))), Take::Lock),
    shown("name", Show::Worker(|_, w| line(&w.name))),
    shown("pid", Show::Worker(|_, w| line(w.tid))),
    shown("total_work_cycles", Show::Worker(|_, w| line(w.busy_ns.get()))),
    shown("vq_list", Show::Worker(|v, w| queues(v, &w.name))),
    shown("wait", Show::Worker(|_, w| line(w.sleep_ns.get()))),
];

static DEVICE: &[File] = &[
    shown("capacity", Show::Disk(|d| line(d.capacity.get()))),
    shown("connected", Show::Device(|_, _, d| line(u8::from(d.connected())))),
    shown(
        "kind",
        Show::Device(|_, _, d| match d {
            Device::Disk(_) => line("disk"),
            Device::Nic(_) => line("nic"),
        }),
    ),
    shown("link", Show::Nic(|n| line(&n.link))),
    shown("mac", Show::Nic(|n| line(&n.mac))),
    shown("mtu", Show::Nic(|n| line(n.mtu))),
    shown("name", Show::Device(|_, _, d| line(d.name()))),
    shown("owner", Show::Device(|_, _, d| line(d.vm()))),
    shown("read_only", Show::Disk(|d| line(u8::from(d.read_only)))),
    shown(
        "vq_list",
        Show::Device(|_, n, d| {
            let queues = d.queues().into_iter();
            queues.map(|q| line(Place::Queue(n, q.index()).name())).collect()
        }),
    ),
    both("worker", Show::Device(|v, _, d| workers(v, d)), Take::Move),
];

static QUEUE: &[File] = &[
    shown(
        "calls",
        Show::Queue(|_, _, q| match q {
            Queue::Disk(q) => line(q.calls),
            Queue::Nic(q) => line(q.calls),
        }),
    ),
    shown(
        "can_poll",
        Show::Queue(|v, _, q| {
            let worker = v.worker_named(q.iothread());
            line(u8::from(worker.is_some_and(|(_, w)| w.polling.max_ns.get() > 0)))
        }),
    ),
    shown("dev", Show::Queue(|_, n, _| line(Place::Device(n).name()))),
    shown(
        "direction",
        Show::NicQueue(|q| match q.direction {
            QueueDirection::Receive => line("receive"),
            QueueDirection::Transmit => line("transmit"),
        }),
    ),
    shown("dropped", Show::NicQueue(|q| line(q.dropped))),
    shown(
        "drops",
        Show::NicQueue(|q| {
            let reasons = q.drops.by_reason().into_iter();
            reasons.map(|(reason, count)| line(format!("{reason} {count}"))).collect()
        }),
    ),
    shown("errors", Show::DiskQueue(|q| line(q.errors))),
    shown("frames", Show::NicQueue(|q| line(q.frames))),
    shown("handled_bytes", Show::Queue(|_, _, q| line(bytes(q)))),
    shown("in_flight", Show::DiskQueue(|q| line(q.in_flight))),
    shown("notif_bytes", Show::Queue(|_, _, q| line(bytes(q)))),
    shown(
        "notif_cycles",
        Show::Queue(|_, _, q| match q {
            Queue::Disk(q) => line(q.busy_ns.get()),
            Queue::Nic(q) => line(q.busy_ns.get()),
        }),
    ),
    shown(
        "notif_wait",
        Show::Queue(|_, _, q| {
            let wait = match q {
                Queue::Disk(q) => &q.wait,
                Queue::Nic(q) => &q.wait,
            };
            line(wait.mean_ns.get().saturating_mul(wait.count))
        }),
    ),
    shown(
        "notif_works",
        Show::Queue(|_, _, q| match q {
            Queue::Disk(q) => line(q.kicks),
            Queue::Nic(q) => line(q.kicks),
        }),
    ),
    shown("read_bytes", Show::DiskQueue(|q| line(q.read_bytes.get()))),
    shown("requests", Show::DiskQueue(|q| line(requests(q)))),
    shown("state", Show::DiskQueue(|q| line(state(q.state)))),
    both("worker", Show::Queue(|v, _, q| line(worker(v, q.iothread()))), Take::Move),
    shown("written_bytes", Show::DiskQueue(|q| line(q.written_bytes.get()))),
];

/// What has passed through a queue, both ways.
const fn bytes(queue: Queue<'_>) -> u64 {
    match queue {
        Queue::Disk(q) => q.read_bytes.get().saturating_add(q.written_bytes.get()),
        Queue::Nic(q) => q.bytes.get(),
    }
}

fn line(value: impl fmt::Display) -> String {
    format!("{value}\n")
}

/// An IOThread by its number; by its name if the snapshot does not have it.
fn worker(view: &View, name: &IoThreadName) -> String {
    match view.worker_named(name) {
        Some((number, _)) => Place::Worker(number).name(),
        None => name.to_string(),
    }
}

/// The IOThreads of a device's queues, each once, from queue 0.
fn workers(view: &View, device: Device<'_>) -> String {
    let mut found: Vec<&IoThreadName> = Vec::new();
    for queue in device.queues() {
        if !found.contains(&queue.iothread()) {
            found.push(queue.iothread());
        }
    }
    found.into_iter().map(|name| line(worker(view, name))).collect()
}

/// The devices that an IOThread serves, if only in part.
fn devices(view: &View, name: &IoThreadName) -> String {
    let has = |device: Device<'_>| device.queues().iter().any(|q| q.iothread() == name);
    let found = view.devices().filter(|(_, device)| has(*device));
    found.map(|(number, _)| line(Place::Device(number).name())).collect()
}

fn queues(view: &View, name: &IoThreadName) -> String {
    let mut text = String::new();
    for (number, device) in view.devices() {
        for queue in device.queues().into_iter().filter(|q| q.iothread() == name) {
            text += &line(Place::Queue(number, queue.index()).name());
        }
    }
    text
}

fn requests(queue: &QueueState) -> u64 {
    let of = &queue.operations;
    let all = [of.reads, of.writes, of.flushes, of.discards, of.write_zeroes, of.others];
    all.into_iter().fold(0, u64::saturating_add)
}

const fn state(activity: Activity) -> &'static str {
    match activity {
        Activity::Stopped => "stopped",
        Activity::Running => "running",
        Activity::Moving => "moving",
        Activity::Broken => "broken",
    }
}

/// `3` of `w.3`; no sign, no leading zero.
fn number<N: std::str::FromStr + ToString>(text: &str, prefix: &str) -> Option<N> {
    let digits = text.strip_prefix(prefix)?;
    let number: N = digits.parse().ok()?;
    (number.to_string() == digits).then_some(number)
}

impl Place {
    /// Its own name.
    pub(super) fn name(self) -> String {
        match self {
            Self::Root => String::new(),
            Self::Workers => "worker".to_owned(),
            Self::Devices => "dev".to_owned(),
            Self::Queues => "vq".to_owned(),
            Self::Worker(number) => format!("w.{number}"),
            Self::Device(number) => format!("d.{number}"),
            Self::Queue(device, queue) => format!("vq.{device}.{queue}"),
        }
    }

    /// A worker by its name in the tree.
    pub(super) fn worker(text: &str) -> Option<u32> {
        number(text, "w.")
    }

    const fn parent(self) -> Self {
        match self {
            Self::Root | Self::Workers | Self::Devices | Self::Queues => Self::Root,
            Self::Worker(_) => Self::Workers,
            Self::Device(_) => Self::Devices,
            Self::Queue(..) => Self::Queues,
        }
    }

    const fn files(self) -> &'static [File] {
        match self {
            Self::Root => ROOT,
            Self::Workers => WORKERS,
            Self::Worker(_) => WORKER,
            Self::Devices | Self::Queues => &[],
            Self::Device(_) => DEVICE,
            Self::Queue(..) => QUEUE,
        }
    }

    /// Whether it is there whatever the data plane has.
    pub(super) const fn is_fixed(self) -> bool {
        matches!(self, Self::Root | Self::Workers | Self::Devices | Self::Queues)
    }

    pub(super) fn is_in(self, view: &View) -> bool {
        match self {
            Self::Root | Self::Workers | Self::Devices | Self::Queues => true,
            Self::Worker(number) => view.worker(number).is_some(),
            Self::Device(number) => view.device(number).is_some(),
            Self::Queue(device, queue) => view.queue(device, queue).is_some(),
        }
    }

    /// The directories in it.
    fn directories(self, view: &View) -> Vec<Self> {
        match self {
            Self::Root => vec![Self::Devices, Self::Queues, Self::Workers],
            Self::Workers => view.workers().map(|(number, _)| Self::Worker(number)).collect(),
            Self::Devices => view.devices().map(|(number, _)| Self::Device(number)).collect(),
            Self::Queues => {
                let of = |(n, d): (u32, Device<'_>)| -> Vec<Self> {
                    d.queues().into_iter().map(|q| Self::Queue(n, q.index())).collect()
                };
                view.devices().flat_map(of).collect()
            }
            Self::Worker(_) | Self::Device(_) | Self::Queue(..) => Vec::new(),
        }
    }

    /// All that is in it, by name.
    pub(super) fn entries(self, view: &View) -> Vec<(String, Node)> {
        let directories = self.directories(view).into_iter();
        let directories = directories.map(|place| (place.name(), Node { place, file: None }));
        let file =
            |(file, of): (u8, &File)| (of.name.to_owned(), Node { place: self, file: Some(file) });
        let files = (0..).zip(self.files()).filter(|(_, file)| file.fits(self, view));
        directories.chain(files.map(file)).collect()
    }

    /// What is called so in it, if the data plane has it.
    pub(super) fn child(self, name: &str) -> Option<Node> {
        if let Some(file) = (0..).zip(self.files()).find(|(_, file)| file.name == name) {
            return Some(Node { place: self, file: Some(file.0) });
        }
        let place = match self {
            Self::Root => [Self::Devices, Self::Queues, Self::Workers]
                .into_iter()
                .find(|place| place.name() == name)?,
            Self::Workers => Self::Worker(Self::worker(name)?),
            Self::Devices => Self::Device(number(name, "d.")?),
            Self::Queues => {
                let (device, queue) = name.rsplit_once('.')?;
                Self::Queue(number(device, "vq.")?, number(queue, "")?)
            }
            Self::Worker(_) | Self::Device(_) | Self::Queue(..) => return None,
        };
        Some(Node { place, file: None })
    }
}

/// An inode's number: kind of directory, its number, queue, 1 + number of the file or 0 for the
/// directory. FUSE's root is 1, which no other directory comes to.
const KIND: u32 = 60;
const NUMBER: u32 = 24;
const QUEUE_INDEX: u32 = 8;

impl Node {
    pub(super) const ROOT: Self = Self { place: Place::Root, file: None };

    pub(super) fn inode(self) -> u64 {
        if self == Self::ROOT {
            return 1;
        }
        let (kind, number, queue) = match self.place {
            Place::Root => (1, 0, 0),
            Place::Workers => (2, 0, 0),
            Place::Worker(number) => (3, number, 0),
            Place::Devices => (4, 0, 0),
            Place::Device(number) => (5, number, 0),
            Place::Queues => (6, 0, 0),
            Place::Queue(device, queue) => (7, device, queue),
        };
        let file = self.file.map_or(0, |file| u64::from(file) + 1);
        kind << KIND | u64::from(number) << NUMBER | u64::from(queue) << QUEUE_INDEX | file
    }

    pub(super) fn of_inode(inode: u64) -> Option<Self> {
        if inode == 1 {
            return Some(Self::ROOT);
        }
        let (number, queue) = ((inode >> NUMBER) as u32, (inode >> QUEUE_INDEX) as u16);
        let place = match inode >> KIND {
            1 => Place::Root,
            2 => Place::Workers,
            3 => Place::Worker(number),
            4 => Place::Devices,
            5 => Place::Device(number),
            6 => Place::Queues,
            7 => Place::Queue(number, queue),
            _ => return None,
        };
        let node = Self { place, file: (inode as u8).checked_sub(1) };
        // Also that there is such a file.
        (node.inode() == inode && (node.is_directory() || node.file().is_some())).then_some(node)
    }

    pub(super) const fn is_directory(self) -> bool {
        self.file.is_none()
    }

    /// The directory that it is in.
    pub(super) const fn parent(self) -> Self {
        let place = if self.is_directory() { self.place.parent() } else { self.place };
        Self { place, file: None }
    }

    /// Whether the data plane has it.
    pub(super) fn is_in(self, view: &View) -> bool {
        self.place.is_in(view) && self.file().is_none_or(|file| file.fits(self.place, view))
    }

    /// What it is, if it is a file.
    pub(super) fn file(self) -> Option<&'static File> {
        self.place.files().get(usize::from(self.file?))
    }

    /// Its rights.
    pub(super) fn mode(self) -> u16 {
        match self.file() {
            None => 0o755,
            Some(File { show, take, .. }) => match (show.is_some(), take.is_some()) {
                (true, true) => 0o644,
                (true, false) => 0o444,
                (false, _) => 0o200,
            },
        }
    }

    /// What is read of it; none if it is no file of a view, or has gone.
    pub(super) fn content(self, view: &View) -> Option<Cow<'_, str>> {
        let text = match (self.file()?.show?, self.place) {
            (Show::Whole, _) => return Some(Cow::Borrowed(&view.text)),
            (Show::Tree(show), _) => show(view),
            (Show::Worker(show), Place::Worker(number)) => show(view, view.worker(number)?),
            (Show::Device(show), Place::Device(number)) => show(view, number, view.device(number)?),
            (Show::Queue(show), Place::Queue(number, queue)) => {
                show(view, number, view.queue(number, queue)?.1)
            }
            (Show::Disk(show), Place::Device(number)) => match view.device(number)? {
                Device::Disk(disk) => show(disk),
                Device::Nic(_) => return None,
            },
            (Show::Nic(show), Place::Device(number)) => match view.device(number)? {
                Device::Nic(nic) => show(nic),
                Device::Disk(_) => return None,
            },
            (Show::DiskQueue(show), Place::Queue(number, queue)) => {
                match view.queue(number, queue)?.1 {
                    Queue::Disk(queue) => show(queue),
                    Queue::Nic(_) => return None,
                }
            }
            (Show::NicQueue(show), Place::Queue(number, queue)) => {
                match view.queue(number, queue)?.1 {
                    Queue::Nic(queue) => show(queue),
                    Queue::Disk(_) => return None,
                }
            }
            _ => return None,
        };
        Some(Cow::Owned(text))
    }
}

/// Its path in the tree.
impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut names = vec![self.file().map_or_else(String::new, |file| file.name.to_owned())];
        let mut place = self.place;
        while place != Place::Root {
            names.push(place.name());
            place = place.parent();
        }
        names.retain(|name| !name.is_empty());
        names.reverse();
        f.write_str(&names.join("/"))
    }
}

#[cfg(test)]
mod tests;
