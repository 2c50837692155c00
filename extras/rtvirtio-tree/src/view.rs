//! What the data plane was at one time, and the tree's numbers for it.
//!
//! A [`View`] is one answer of `GET /v1/snapshot`. All files that are opened while it is fresh show it,
//! so that they belong together; `epoch` tells one view from another.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rtvirtio_host::dataplane::ControlFault;
use rtvirtio_spec::control::{
    DeviceState, IoThreadState, NicQueueState, NicState, QueueState, Snapshot,
};
use rtvirtio_units::{DiskName, IoThreadName};

/// How long a view is shown to those who open a file.
pub(super) const FRESH: Duration = Duration::from_millis(100);
/// The same for those who want all of it at once.
pub(super) const FRESH_WHOLE: Duration = Duration::from_millis(10);
/// A view is fresh for so many times as long as it took, at least: readers cost the data plane's control
/// thread no more than that part of its time, however much there is to say.
const REST: u32 = 5;
/// Most views that open files may refer to.
pub(super) const MAX_HELD: usize = 64;
/// Most bytes of their texts, if that is more than two views.
const MAX_HELD_BYTES: usize = 64 << 20;
/// For how long the move of a new device is tried again, each second ([`super::mount::AGAIN`]).
pub(super) const TRIED_FOR: Duration = Duration::from_secs(30);

/// Numbers of names: a name keeps its number while it is there, and no other one gets it later.
#[derive(Debug)]
struct Numbers<K> {
    of: BTreeMap<K, u32>,
    /// No name has had this one or a higher one.
    next: u32,
}

impl<K: Ord + Clone> Numbers<K> {
    const fn new() -> Self {
        Self { of: BTreeMap::new(), next: 0 }
    }

    /// The numbers of all names that are there now; others are forgotten.
    fn renumber<'a>(&mut self, names: impl Iterator<Item = &'a K>) -> Vec<u32>
    where
        K: 'a,
    {
        let mut of = BTreeMap::new();
        let mut number = |name: &K| {
            let known = of.get(name).or_else(|| self.of.get(name)).copied();
            let number = known.unwrap_or_else(|| {
                let number = self.next;
                // Around after 4 billion IOThreads.
                self.next = number.wrapping_add(1);
                number
            });
            of.insert(name.clone(), number);
            number
        };
        let numbers = names.map(&mut number).collect();
        self.of = of;
        numbers
    }
}

/// A device of either kind.
#[derive(Debug, Clone, Copy)]
pub(super) enum Device<'a> {
    Disk(&'a DeviceState),
    Nic(&'a NicState),
}

/// A queue of either kind, with its device.
#[derive(Debug, Clone, Copy)]
pub(super) enum Queue<'a> {
    Disk(&'a QueueState),
    Nic(&'a NicQueueState),
}

impl<'a> Device<'a> {
    /// Its name, which no other one has, of whatever kind.
    pub(super) fn name(self) -> DiskName {
        match self {
            Self::Disk(disk) => disk.name.clone(),
            Self::Nic(nic) => nic.name.clone().into(),
        }
    }

    pub(super) fn vm(self) -> String {
        match self {
            Self::Disk(disk) => disk.vm.to_string(),
            Self::Nic(nic) => nic.vm.to_string(),
        }
    }

    pub(super) const fn connected(self) -> bool {
        match self {
            Self::Disk(disk) => disk.connected,
            Self::Nic(nic) => nic.connected,
        }
    }

    /// From queue 0.
    pub(super) fn queues(self) -> Vec<Queue<'a>> {
        match self {
            Self::Disk(disk) => disk.queues.iter().map(Queue::Disk).collect(),
            Self::Nic(nic) => nic.queues.iter().map(Queue::Nic).collect(),
        }
    }
}

impl<'a> Queue<'a> {
    pub(super) const fn index(self) -> u16 {
        match self {
            Self::Disk(queue) => queue.index,
            Self::Nic(queue) => queue.index,
        }
    }

    pub(super) const fn iothread(self) -> &'a IoThreadName {
        match self {
            Self::Disk(queue) => &queue.iothread,
            Self::Nic(queue) => &queue.iothread,
        }
    }
}

/// The data plane at one time.
#[derive(Debug)]
pub(super) struct View {
    /// How many views there were, with this one.
    pub(super) epoch: u64,
    /// The control API's answer as it came.
    pub(super) text: String,
    pub(super) snapshot: Snapshot,
    /// Where new devices go.
    pub(super) default: Option<IoThreadName>,
    /// The number that a further IOThread would get.
    pub(super) next_worker: u32,
    /// No device of it has this number or a higher one.
    next_device: u32,
    /// Numbers of the IOThreads and devices, in the snapshot's order; network devices behind the others.
    workers: Vec<u32>,
    devices: Vec<u32>,
    /// Places of the devices among these, by number: there may be many.
    device_places: BTreeMap<u32, usize>,
}

impl View {
    /// The IOThreads with their numbers.
    pub(super) fn workers(&self) -> impl Iterator<Item = (u32, &IoThreadState)> {
        self.workers.iter().copied().zip(&self.snapshot.iothreads)
    }

    /// The devices with their numbers.
    pub(super) fn devices(&self) -> impl Iterator<Item = (u32, Device<'_>)> {
        let disks = self.snapshot.devices.iter().map(Device::Disk);
        let all = disks.chain(self.snapshot.nics.iter().map(Device::Nic));
        self.devices.iter().copied().zip(all)
    }

    pub(super) fn worker(&self, number: u32) -> Option<&IoThreadState> {
        self.workers().find(|(n, _)| *n == number).map(|(_, worker)| worker)
    }

    pub(super) fn worker_named(&self, name: &IoThreadName) -> Option<(u32, &IoThreadState)> {
        self.workers().find(|(_, worker)| worker.name == *name)
    }

    pub(super) fn device(&self, number: u32) -> Option<Device<'_>> {
        let place = *self.device_places.get(&number)?;
        let disks = self.snapshot.devices.len();
        match self.snapshot.devices.get(place) {
            Some(disk) => Some(Device::Disk(disk)),
            None => self.snapshot.nics.get(place - disks).map(Device::Nic),
        }
    }

    pub(super) fn queue(&self, device: u32, queue: u16) -> Option<(Device<'_>, Queue<'_>)> {
        let device = self.device(device)?;
        Some((device, device.queues().into_iter().find(|q| q.index() == queue)?))
    }
}

/// A device that is to go to where new ones go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NewDevice {
    pub(super) name: DiskName,
    /// Where its queues are, in their order.
    iothreads: Vec<IoThreadName>,
    /// When that was first refused.
    pub(super) refused: Option<Instant>,
}

/// What becomes of new devices.
#[derive(Debug)]
struct NewDevices {
    iothread: IoThreadName,
    /// Those with this number or a higher one.
    from: u32,
    /// And those whose move was refused.
    refused: BTreeMap<DiskName, NewDevice>,
    /// Whether there may be some that nobody has looked for: there was no view to be had.
    missed: bool,
}

/// The latest views.
#[derive(Debug)]
pub(super) struct Views {
    workers: Numbers<IoThreadName>,
    devices: Numbers<DiskName>,
    default: Option<NewDevices>,
    /// From the oldest; the last one is shown while it is fresh.
    held: VecDeque<Arc<View>>,
    epochs: u64,
    /// When the last one was asked for, unless a change has come since.
    asked: Option<Instant>,
    /// How long it took.
    took: Duration,
}

impl Views {
    pub(super) const fn new() -> Self {
        Self {
            workers: Numbers::new(),
            devices: Numbers::new(),
            default: None,
            held: VecDeque::new(),
            epochs: 0,
            asked: None,
            took: Duration::ZERO,
        }
    }

    /// The last view if it is younger than `fresh` at `now`, or a new one. Views that take long to get
    /// are fresh for longer, except to who wants one that is younger than nothing.
    pub(super) fn get(
        &mut self,
        fresh: Duration,
        now: Instant,
        fetch: impl FnOnce() -> Result<(String, Duration), ControlFault>,
    ) -> Result<Arc<View>, ControlFault> {
        let fresh = if fresh.is_zero() { fresh } else { fresh.max(self.took * REST) };
        let is_fresh = self.asked.is_some_and(|asked| now.saturating_duration_since(asked) < fresh);
        if let (true, Some(last)) = (is_fresh, self.held.back()) {
            return Ok(Arc::clone(last));
        }
        let (text, took) = fetch()?;
        let view = Arc::new(self.view(text)?);
        (self.asked, self.took) = (Some(now), took);
        self.held.push_back(Arc::clone(&view));
        let mut bytes: usize = self.held.iter().map(|view| view.text.len()).sum();
        while self.held.len() > MAX_HELD || (bytes > MAX_HELD_BYTES && self.held.len() > 2) {
            bytes -= self.held.pop_front().map_or(0, |view| view.text.len());
        }
        Ok(view)
    }

    fn view(&mut self, text: String) -> Result<View, ControlFault> {
        let snapshot: Snapshot =
            serde_json::from_str(&text).map_err(|e| ControlFault::Malformed(e.to_string()))?;
        let workers = self.workers.renumber(snapshot.iothreads.iter().map(|t| &t.name));
        let disks = snapshot.devices.iter().map(Device::Disk);
        let all = disks.chain(snapshot.nics.iter().map(Device::Nic));
        let names: Vec<DiskName> = all.map(Device::name).collect();
        let devices = self.devices.renumber(names.iter());
        if self.default.as_ref().is_some_and(|d| !self.workers.of.contains_key(&d.iothread)) {
            self.default = None;
        }
        self.epochs += 1;
        Ok(View {
            epoch: self.epochs,
            text,
            default: self.default.as_ref().map(|default| default.iothread.clone()),
            next_worker: self.workers.next,
            next_device: self.devices.next,
            device_places: devices.iter().copied().zip(0..).collect(),
            workers,
            devices,
            snapshot,
        })
    }

    /// One of those that are held.
    pub(super) fn held(&self, epoch: u64) -> Option<Arc<View>> {
        self.held.iter().find(|view| view.epoch == epoch).cloned()
    }

    /// Whoever opens a file from now on sees a new view.
    pub(super) fn forget(&mut self) {
        self.asked = None;
    }

    /// Devices that are not there yet go there.
    pub(super) fn set_default(&mut self, default: Option<IoThreadName>) {
        let from = self.devices.next;
        let refused = BTreeMap::new();
        self.default =
            default.map(|iothread| NewDevices { iothread, from, refused, missed: false });
    }

    /// A device has gone, whether or not there is a view without it: one that comes under its name is another one, with
    /// a number of its own, and new.
    pub(super) fn device_gone(&mut self, device: &DiskName) {
        self.devices.of.remove(device);
    }

    /// New devices could not be looked for: they are to be later. Whether that is news.
    pub(super) fn miss(&mut self) -> bool {
        self.default.as_mut().is_some_and(|default| !std::mem::replace(&mut default.missed, true))
    }

    /// The devices of `view` that are new, each time other ones, and where they go; with `again`, those too that were put back. Where
    /// the queues of one of these have been moved since, somebody else has said where they go.
    pub(super) fn take_new(
        &mut self,
        view: &View,
        again: bool,
    ) -> Option<(Vec<NewDevice>, IoThreadName)> {
        let default = self.default.as_mut()?;
        default.missed = false;
        // Who was put back and is not in the view has gone.
        let mut before = std::mem::take(&mut default.refused);
        let mut new = Vec::new();
        for (number, device) in view.devices() {
            let name = device.name();
            let queues = device.queues();
            let iothreads = queues.into_iter().map(|queue| queue.iothread().clone()).collect();
            let found = NewDevice { name, iothreads, refused: None };
            match before.remove(&found.name) {
                // One that has come anew under the name of another has a number of its own.
                _ if number >= default.from => new.push(found),
                Some(refused) if refused.iothreads != found.iothreads => {}
                Some(refused) if again => new.push(refused),
                Some(refused) => drop(default.refused.insert(found.name, refused)),
                None => {}
            }
        }
        // Another reader may have had a later view in the meantime: what is in that alone is new yet.
        default.from = default.from.max(view.next_device);
        Some((new, default.iothread.clone()))
    }

    /// A new device's move to `iothread` was refused: it is to be tried again, unless that has taken too long, or new devices go
    /// elsewhere by now.
    pub(super) fn put_back(&mut self, device: NewDevice, iothread: &IoThreadName, now: Instant) {
        let refused = *device.refused.as_ref().unwrap_or(&now);
        let default = self.default.as_mut().filter(|default| default.iothread == *iothread);
        if let Some(default) = default.filter(|_| now < refused + TRIED_FOR) {
            let device = NewDevice { refused: Some(refused), ..device };
            default.refused.insert(device.name.clone(), device);
        }
    }

    /// Somebody has said where a device goes: it is not new any more.
    pub(super) fn settle(&mut self, device: &DiskName) {
        if let Some(default) = &mut self.default {
            default.refused.remove(device);
        }
    }

    /// Whether there is a device whose move is to be tried again, or may be one that was missed.
    pub(super) fn has_refused(&self) -> bool {
        let default = self.default.as_ref();
        default.is_some_and(|default| default.missed || !default.refused.is_empty())
    }
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::json;

    use super::super::mount::AGAIN;
    use super::*;

    fn worker(name: &str) -> serde_json::Value {
        json!({ "name": name, "cpus": [0, 1, 3], "locked": true, "tid": 71, "queues": 1,
            "polling": { "max_ns": 32_000, "grow": 2, "shrink": 0 }, "busy_ns": 100, "lock_ns": 10,
            "poll_ns": 200, "sleep_ns": 300, "cpu_ns": 250 })
    }

    fn device(name: &str, iothreads: &[&str]) -> serde_json::Value {
        let summary = json!({ "count": 1, "mean_ns": 1, "p50_ns": 1, "p99_ns": 1, "p999_ns": 1,
            "p9999_ns": 1, "max_ns": 1 });
        let queue = |(index, iothread)| {
            json!({ "index": index, "iothread": iothread, "state": "running", "in_flight": 3,
                "reads": 10, "writes": 20, "flushes": 1, "discards": 2, "write_zeroes": 3,
                "others": 4, "read_bytes": 4096, "written_bytes": 512, "errors": 5, "kicks": 6,
                "calls": 7, "wait": summary, "service": summary, "response": summary })
        };
        let queues: Vec<_> = (0..).zip(iothreads).map(queue).collect();
        json!({ "name": name, "vm": "plc", "socket": null, "connected": true,
            "capacity": 1 << 20, "read_only": false, "queues": queues })
    }

    /// A network device with a pair of queues.
    pub(crate) fn nic(name: &str, iothread: &str) -> serde_json::Value {
        let times = |mean: u64| {
            json!({ "count": 10, "mean_ns": mean, "p50_ns": 1, "p99_ns": 1, "p999_ns": 1, "p9999_ns": 1,
                "max_ns": 1 })
        };
        let queue = |(index, direction)| {
            json!({ "index": index, "direction": direction, "iothread": iothread, "frames": 90,
                "bytes": 9_000, "dropped": 5, "drops": { "malformed": 0, "spoofed": 0, "vlan": 0,
                "broadcast": 0, "no_receiver": 0, "no_buffers": 4, "too_long": 0, "limit": 0, "link": 1 },
                "kicks": 8, "calls": 9, "busy_ns": 70, "wait": times(30), "service": times(40) })
        };
        let queues = [(0, "receive"), (1, "transmit")].map(queue);
        json!({ "name": name, "vm": "plc", "socket": "/run/nic", "connected": false, "link": "tap0",
            "mac": "52:54:00:00:00:01", "mtu": 1500,
            "queues": queues })
    }

    /// What the control API says of IOThreads and devices.
    pub(crate) fn text(workers: &[&str], devices: &[(&str, &[&str])]) -> String {
        let workers: Vec<_> = workers.iter().map(|name| worker(name)).collect();
        let devices: Vec<_> = devices.iter().map(|(name, on)| device(name, on)).collect();
        json!({ "time_ns": 5_000, "started_ns": 2_000, "iothreads": workers, "devices": devices })
            .to_string()
    }

    impl Views {
        /// A new view of that.
        pub(crate) fn take(&mut self, text: String) -> Arc<View> {
            self.get(Duration::ZERO, Instant::now(), || Ok((text, Duration::ZERO))).unwrap()
        }
    }

    fn numbers(view: &View) -> Vec<(u32, &str)> {
        view.workers().map(|(number, worker)| (number, worker.name.as_str())).collect()
    }

    #[test]
    fn numbers_stay_and_are_not_used_again() {
        let mut views = Views::new();
        assert_eq!(numbers(&views.take(text(&["b", "c"], &[]))), [(0, "b"), (1, "c")]);
        assert_eq!(
            numbers(&views.take(text(&["a", "b", "c"], &[]))),
            [(2, "a"), (0, "b"), (1, "c")]
        );
        assert_eq!(numbers(&views.take(text(&["c"], &[]))), [(1, "c")]);
        // Another one, if of the same name.
        let last = views.take(text(&["b", "c"], &[]));
        assert_eq!(numbers(&last), [(3, "b"), (1, "c")]);
        assert_eq!(last.next_worker, 4);
        assert!(last.worker(0).is_none());
    }

    #[test]
    fn nics_are_numbered_behind_the_disks_and_keep_their_numbers() {
        let mut views = Views::new();
        let with = |devices: &[(&str, &[&str])], nics: &[&str]| {
            let mut all: serde_json::Value = serde_json::from_str(&text(&["a"], devices)).unwrap();
            all["nics"] = nics.iter().map(|name| nic(name, "a")).collect();
            all.to_string()
        };
        let found = |view: &View| -> Vec<(u32, String)> {
            view.devices().map(|(number, device)| (number, device.name().to_string())).collect()
        };
        let of = |number, name: &str| (number, name.to_owned());
        let view = views.take(with(&[("x", &["a"])], &["n"]));
        assert_eq!(found(&view), [of(0, "x"), of(1, "n")]);
        let view = views.take(with(&[("w", &["a"]), ("x", &["a"])], &["n"]));
        assert_eq!(found(&view), [of(2, "w"), of(0, "x"), of(1, "n")]);
        assert!(matches!(view.device(1), Some(Device::Nic(_))));
        assert!(matches!(view.queue(1, 1), Some((_, Queue::Nic(queue))) if queue.frames == 90));
        assert!(view.queue(1, 2).is_none() && view.queue(3, 0).is_none());
    }

    #[test]
    fn snapshot_is_shared_while_it_is_fresh() {
        let (mut views, start) = (Views::new(), Instant::now());
        let epoch = |views: &mut Views, fresh, after_ms| {
            let now = start + Duration::from_millis(after_ms);
            let took = Duration::from_millis(1);
            views.get(fresh, now, || Ok((text(&["a"], &[]), took))).unwrap().epoch
        };
        assert_eq!(epoch(&mut views, FRESH, 0), 1);
        assert_eq!(epoch(&mut views, FRESH, 99), 1);
        assert_eq!(epoch(&mut views, FRESH_WHOLE, 99), 2);
        assert_eq!(epoch(&mut views, FRESH_WHOLE, 108), 2);
        assert_eq!(epoch(&mut views, FRESH, 199), 3);
        views.forget();
        assert_eq!(epoch(&mut views, FRESH, 199), 4);
        // A failure leaves what is there.
        let late = start + Duration::from_secs(9);
        let failed = views.get(FRESH, late, || Err(ControlFault::TooLong(1)));
        assert!(matches!(failed, Err(ControlFault::TooLong(1))));
        let failed = views.get(FRESH, late, || Ok(("{}".to_owned(), Duration::ZERO)));
        assert!(matches!(failed, Err(ControlFault::Malformed(_))));
        assert_eq!(views.held(4).unwrap().epoch, 4);
    }

    #[test]
    fn snapshot_that_takes_long_is_taken_less_often() {
        let (mut views, start) = (Views::new(), Instant::now());
        let mut epoch = |fresh, after_ms| {
            let (now, took) = (start + Duration::from_millis(after_ms), Duration::from_millis(300));
            views.get(fresh, now, || Ok((text(&["a"], &[]), took))).unwrap().epoch
        };
        assert_eq!(epoch(FRESH, 0), 1);
        assert_eq!(epoch(FRESH_WHOLE, 1499), 1);
        assert_eq!(epoch(FRESH_WHOLE, 1500), 2);
        // A write wants to know.
        assert_eq!(epoch(Duration::ZERO, 1501), 3);
    }

    #[test]
    fn views_that_are_held_are_bounded() {
        let mut views = Views::new();
        for _ in 0..=MAX_HELD {
            views.take(text(&["a"], &[]));
        }
        assert!(views.held(1).is_none());
        assert!(views.held(2).is_some());
        // Spaces make it long.
        let long = text(&["a"], &[]) + &" ".repeat(MAX_HELD_BYTES / 2 + 1);
        for _ in 0..3 {
            views.take(long.clone());
        }
        assert_eq!(views.held.len(), 2);
    }

    #[test]
    fn devices_are_new_once_and_only_after_the_default_was_set() {
        let name = |text: &str| IoThreadName::new(text).unwrap();
        let device = |text: &str| {
            let (name, iothreads) = (DiskName::new(text).unwrap(), vec![name("a")]);
            NewDevice { name, iothreads, refused: None }
        };
        let mut views = Views::new();
        let view = views.take(text(&["a", "b"], &[("x", &["a"])]));
        assert_eq!(views.take_new(&view, false), None);
        views.set_default(Some(name("b")));
        assert_eq!(views.take_new(&view, false), Some((vec![], name("b"))));
        let view = views.take(text(&["a", "b"], &[("w", &["a"]), ("x", &["a"])]));
        assert_eq!(view.default, Some(name("b")));
        // Another reader has the next view before what is new in this one is taken.
        let later = views.take(text(&["a", "b"], &[("v", &["a"]), ("w", &["a"]), ("x", &["a"])]));
        assert_eq!(views.take_new(&view, false), Some((vec![device("w")], name("b"))));
        assert_eq!(views.take_new(&view, false), Some((vec![], name("b"))));
        assert_eq!(views.take_new(&later, false), Some((vec![device("v")], name("b"))));
        // It goes with its IOThread.
        assert_eq!(views.take(text(&["a"], &[])).default, None);
    }

    #[test]
    fn device_that_was_replaced_between_two_views_is_another_one() {
        let mut views = Views::new();
        let with_x = || text(&["a", "b"], &[("x", &["a"]), ("y", &["a"])]);
        views.take(with_x());
        let to = IoThreadName::new("b").unwrap();
        views.set_default(Some(to.clone()));
        let x = DiskName::new("x").unwrap();
        views.device_gone(&x);
        let view = views.take(with_x());
        let numbers: Vec<u32> = view.devices().map(|(number, _)| number).collect();
        assert_eq!(numbers, [2, 1]);
        let (new, iothread) = views.take_new(&view, false).unwrap();
        assert_eq!(new.into_iter().map(|device| device.name).collect::<Vec<_>>(), [x]);
        assert_eq!(iothread, to);
    }

    #[test]
    fn device_whose_move_is_refused_is_new_again_for_so_long() {
        const ON_A: &[&str] = &["a"];
        let name = |text: &str| IoThreadName::new(text).unwrap();
        let with = |devices: &[&str]| {
            let devices: Vec<_> = devices.iter().map(|name| (*name, ON_A)).collect();
            text(&["a", "b"], &devices)
        };
        let mut views = Views::new();
        views.take(with(&["x"]));
        views.set_default(Some(name("b")));
        let view = views.take(with(&["w", "x"]));
        let begun = Instant::now();
        let refused = |views: &mut Views, view: &View, after: Duration| {
            let (devices, iothread) = views.take_new(view, true).unwrap();
            let [device] = <[NewDevice; 1]>::try_from(devices).unwrap();
            assert_eq!(device.name.as_str(), "w");
            assert!(!views.has_refused());
            views.put_back(device.clone(), &iothread, begun + after);
            device
        };
        for after in [Duration::ZERO, TRIED_FOR - AGAIN] {
            refused(&mut views, &view, after);
            // Whoever looks for new ones only leaves it.
            assert_eq!(views.take_new(&view, false), Some((vec![], name("b"))));
            assert!(views.has_refused());
        }
        let device = refused(&mut views, &view, TRIED_FOR);
        assert!(!views.has_refused());

        // Not if somebody has said where it goes, by the tree or without, it has gone, or new ones go elsewhere.
        let device = NewDevice { refused: None, ..device };
        let put_back = |views: &mut Views| views.put_back(device.clone(), &name("b"), begun);
        put_back(&mut views);
        views.settle(&device.name);
        assert!(!views.has_refused());
        put_back(&mut views);
        let moved = views.take(text(&["a", "b", "c"], &[("w", &["c"]), ("x", ON_A)]));
        assert_eq!(views.take_new(&moved, true), Some((vec![], name("b"))));
        assert!(!views.has_refused());
        put_back(&mut views);
        let without = views.take(with(&["x"]));
        assert_eq!(views.take_new(&without, true), Some((vec![], name("b"))));
        assert!(!views.has_refused());
        put_back(&mut views);
        // Another one of its name has been refused nothing yet.
        let again = views.take(with(&["w", "x"]));
        assert_eq!(views.take_new(&again, true), Some((vec![device.clone()], name("b"))));
        put_back(&mut views);
        views.set_default(Some(name("a")));
        assert!(!views.has_refused());
        put_back(&mut views);
        assert!(!views.has_refused());
    }
}
