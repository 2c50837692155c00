//! A data plane that only keeps books.

use rtvirtio_spec::control::QueueDirection;
use rtvirtio_spec::serve::{Configuration, Network, NicRate, Service};

use super::*;

/// A plane that keeps books and serves nobody.
pub(super) struct Books {
    pub(super) state: Mutex<State>,
    pub(super) events: broadcast::Sender<Event>,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) policy: IoCores,
    pub(super) decisions: Vec<Decision>,
    pub(super) iothreads: BTreeMap<IoThreadName, IoThreadState>,
    pub(super) devices: BTreeMap<DiskName, (Device, Bytes, Vec<Arc<QueueStats>>)>,
    pub(super) schedules: BTreeMap<Name, Schedule>,
    pub(super) handed: HandedFds,
    /// Nice values of the threads that last looked, and locked an IOThread.
    pub(super) looked: i32,
    pub(super) locked: i32,
}

pub(super) fn nice() -> i32 {
    rustix::process::getpriority_process(Some(rustix::thread::gettid())).unwrap()
}

impl Books {
    pub(super) fn new() -> Arc<Self> {
        let events = broadcast::channel(EVENTS_KEPT).0;
        let books = Arc::new(Self { state: Mutex::default(), events });
        for name in ["iot0", "iot1"] {
            let raw: wire::IoThread = serde_json::from_value(json!({ "name": name })).unwrap();
            books.add_iothread(IoThread::new(raw).unwrap()).unwrap();
        }
        books
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub(super) fn say(&self, event: Event) {
        let _ = self.events.send(event);
    }
}

impl State {
    pub(super) fn iothread(
        &mut self,
        name: &IoThreadName,
    ) -> Result<&mut IoThreadState, PlaneError> {
        self.iothreads.get_mut(name).ok_or_else(|| PlaneError::NoIoThread(name.clone()))
    }

    pub(super) fn device(&mut self, name: &DiskName) -> Result<&mut Device, PlaneError> {
        let device = self.devices.get_mut(name).map(|(device, ..)| device);
        device.ok_or_else(|| PlaneError::NoDevice(name.clone()))
    }
}

impl Plane for Books {
    fn add_iothread(&self, iothread: IoThread) -> Result<(), PlaneError> {
        let IoThread { name, cpus, polling, .. } = iothread;
        let mut state = self.state();
        if state.iothreads.contains_key(&name) {
            return Err(PlaneError::IoThreadExists(name));
        }
        let iothread = IoThreadState {
            name: name.clone(),
            cpus,
            id: 1,
            locked: false,
            tid: 1,
            polling: polling.into(),
            queues: 0,
            busy_ns: Nanos::from_millis(1500),
            lock_ns: Nanos::from_millis(250),
            poll_ns: Nanos::ZERO,
            poll_refused: 3,
            poll_gaps: 1,
            sleep_ns: Nanos::ZERO,
            cpu_ns: Nanos::ZERO,
            runqueue_ns: Nanos::from_millis(125),
        };
        state.iothreads.insert(name.clone(), iothread);
        self.say(Event::IothreadAdded { iothread: name });
        Ok(())
    }

    fn remove_iothread(&self, iothread: &IoThreadName) -> Result<(), PlaneError> {
        let mut state = self.state();
        state.iothread(iothread)?;
        let owned = |d: &Device| d.mapping.by_queue().iter().filter(|o| *o == iothread).count();
        let queues = state.devices.values().map(|(d, ..)| owned(d) as u32).sum();
        if queues > 0 {
            return Err(PlaneError::IoThreadInUse { iothread: iothread.clone(), queues });
        }
        state.iothreads.remove(iothread);
        Ok(())
    }

    fn pin_iothread(&self, iothread: &IoThreadName, cpus: &[CpuId]) -> Result<(), PlaneError> {
        self.state().iothread(iothread)?.cpus = cpus.to_vec();
        Ok(())
    }

    fn lock_iothread(&self, iothread: &IoThreadName, locked: bool) -> Result<(), PlaneError> {
        self.state().locked = nice();
        self.state().iothread(iothread)?.locked = locked;
        Ok(())
    }

    fn add_device(&self, device: wire::Device, handed: HandedFds) -> Result<(), PlaneError> {
        let mut state = self.state();
        let known = |name: &IoThreadName| {
            let raw = serde_json::from_value(json!({ "name": name })).unwrap();
            IoThread::new(raw).unwrap()
        };
        let iothreads: Vec<_> = state.iothreads.keys().map(known).collect();
        let schedules: Vec<_> = state.schedules.keys().cloned().collect();
        let device = Device::new(device, &iothreads, &schedules)?;
        let name = device.name.clone();
        if state.devices.contains_key(&name) {
            return Err(PlaneError::DeviceExists(name));
        }
        let queues = (0..device.queues()).map(|_| Arc::new(QueueStats::new())).collect();
        state.devices.insert(name.clone(), (device, Bytes::new(1 << 20), queues));
        state.handed = handed;
        self.say(Event::DeviceAdded { device: name });
        Ok(())
    }

    fn add_nic(&self, nic: wire::Nic, handed: HandedFds) -> Result<(), PlaneError> {
        self.state().handed = handed;
        self.say(Event::DeviceAdded { device: nic.name.into() });
        Ok(())
    }

    fn remove_nic(&self, nic: &DiskName) -> Result<(), PlaneError> {
        Err(PlaneError::NoNic(nic.clone()))
    }

    fn add_network(&self, network: Network) -> Result<(), PlaneError> {
        Err(PlaneError::NetworkExists(network.name))
    }

    fn remove_network(&self, network: &Name) -> Result<(), PlaneError> {
        Err(PlaneError::NetworkInUse { network: network.clone(), ports: 1 })
    }

    fn remove_device(&self, device: &DiskName) -> Result<(), PlaneError> {
        let mut state = self.state();
        state.device(device)?;
        state.devices.remove(device);
        Ok(())
    }

    fn resize_device(
        &self,
        device: &DiskName,
        size: Option<Bytes>,
        _shrink: bool,
    ) -> Result<Bytes, PlaneError> {
        let mut state = self.state();
        state.device(device)?;
        let capacity = &mut state.devices.get_mut(device).unwrap().1;
        *capacity = size.unwrap_or(*capacity);
        Ok(*capacity)
    }

    fn mapping(&self, device: &DiskName) -> Result<Mapping, PlaneError> {
        Ok(self.state().device(device)?.mapping.clone())
    }

    fn set_mapping(&self, device: &DiskName, entries: &[Entry]) -> Result<(), PlaneError> {
        let mut state = self.state();
        let known = state.iothreads.keys().cloned().collect();
        let device = state.device(device)?;
        device.mapping = Mapping::new(entries, device.queues().into(), Some(&known))?;
        Ok(())
    }

    fn move_queue(
        &self,
        device: &DiskName,
        queue: u16,
        to: &IoThreadName,
    ) -> Result<Nanos, PlaneError> {
        let mut state = self.state();
        state.iothread(to)?;
        let found = state.device(device)?;
        let queues = found.queues();
        let missing = || PlaneError::NoQueue { device: device.clone(), queues, queue };
        let from = found.mapping.iothread(queue).cloned().ok_or_else(missing)?;
        found.mapping.assign(queue, to.clone())?;
        let (device, to, pause_ns) = (device.clone(), to.clone(), Nanos::new(42));
        self.say(Event::QueueMoved { device, queue, from, to, pause_ns });
        Ok(pause_ns)
    }

    fn set_schedule(&self, schedule: Schedule) -> Result<bool, PlaneError> {
        Ok(self.state().schedules.insert(schedule.name.clone(), schedule).is_none())
    }

    fn remove_schedule(&self, schedule: &Name) -> Result<(), PlaneError> {
        let mut state = self.state();
        let uses = |device: &Device| device.qos.as_ref().is_some_and(|q| q.schedule == *schedule);
        if let Some(device) = state.devices.values().map(|(d, ..)| d).find(|d| uses(d)) {
            let (schedule, device) = (schedule.clone(), device.name.clone());
            return Err(PlaneError::ScheduleInUse { schedule, device });
        }
        let removed = state.schedules.remove(schedule);
        removed.map(drop).ok_or_else(|| PlaneError::NoSchedule(schedule.clone()))
    }

    fn set_qos(
        &self,
        device: &DiskName,
        qos: Option<Qos>,
        _: crate::plane::Admission,
    ) -> Result<(), PlaneError> {
        let mut state = self.state();
        if let Some(Qos { schedule, .. }) = &qos
            && !state.schedules.contains_key(schedule)
        {
            return Err(PlaneError::NoSchedule(schedule.clone()));
        }
        state.device(device)?.qos = qos;
        Ok(())
    }

    fn set_nic_rate(
        &self,
        nic: &DiskName,
        _: QueueDirection,
        _: Option<NicRate>,
    ) -> Result<(), PlaneError> {
        Err(PlaneError::NoNic(nic.clone()))
    }

    fn set_policy(&self, settings: wire::IoCores) -> Result<(), PlaneError> {
        let mut state = self.state();
        state.policy = IoCores::new(settings, state.policy.clone())?;
        self.say(Event::PolicySet { policy: state.policy.policy });
        Ok(())
    }

    fn configuration(&self) -> Configuration {
        let state = self.state();
        let iothread = |name: &IoThreadName| {
            let raw = serde_json::from_value(json!({ "name": name })).unwrap();
            IoThread::new(raw).unwrap()
        };
        Configuration {
            service: Service::default(),
            control: None,
            iocores: state.policy.clone(),
            iothreads: state.iothreads.keys().map(iothread).collect(),
            schedules: state.schedules.values().cloned().collect(),
            devices: state.devices.values().map(|(device, ..)| device.clone()).collect(),
            networks: Vec::new(),
            nics: Vec::new(),
        }
    }

    fn policy(&self) -> PolicyState {
        PolicyState::new(&self.state().policy)
    }

    fn decisions(&self, after: u64) -> Vec<Decision> {
        self.state().decisions.iter().filter(|d| d.number > after).cloned().collect()
    }

    fn observe(&self) -> Observation {
        self.state().looked = nice();
        let state = self.state();
        let devices = state.devices.values().map(|(device, capacity, stats)| ObservedDevice {
            name: device.name.clone(),
            vm: device.vm.clone(),
            socket: None,
            connected: false,
            capacity: *capacity,
            read_only: device.read_only,
            slots: None,
            qos: device.qos.as_ref().map(|qos| QosState {
                settings: qos.into(),
                demand: Demand::More,
                had: Had {
                    reads: Consumption {
                        cost_ns: Nanos::from_millis(500),
                        ..Consumption::default()
                    },
                    kept: 7,
                    late: 1,
                    ..Had::default()
                },
                tasks: Vec::new(),
            }),
            queues: device
                .mapping
                .by_queue()
                .iter()
                .zip(stats)
                .map(|(iothread, stats)| ObservedQueue {
                    id: 1,
                    iothread: iothread.clone(),
                    activity: Activity::Running,
                    stats: Arc::clone(stats),
                })
                .collect(),
        });
        Observation {
            nics: Vec::new(),
            started: Nanos::new(1),
            iothreads: state.iothreads.values().cloned().collect(),
            devices: devices.collect(),
            schedules: state
                .schedules
                .values()
                .map(|schedule| ScheduleState {
                    name: schedule.name.clone(),
                    channels: schedule.channels,
                    request_ns: schedule.request,
                    kib_ns: schedule.kib,
                    flush_ns: schedule.flush,
                    waiting: 0,
                    running: 0,
                    background: 0,
                    background_bound: schedule.channels + 1,
                    withheld_ns: Nanos::from_millis(1_600),
                    usage: DeviceUsage {
                        used_ns: Nanos::from_millis(3_000),
                        cost_ns: Nanos::from_millis(1_500),
                        ..DeviceUsage::default()
                    },
                    stalls: StallsState {
                        count: 2,
                        time_ns: Nanos::from_millis(600),
                        longest_ns: Nanos::from_millis(500),
                        last: None,
                        ongoing_ns: Some(Nanos::from_millis(70)),
                    },
                })
                .collect(),
            policy: state.policy.policy,
            decisions: [(("move_queue", Outcome::Done), 3)].into(),
            moves: 4,
        }
    }

    fn events(&self) -> broadcast::Receiver<Event> {
        self.events.subscribe()
    }
}
