//! The data plane itself: IOThreads and devices by name, over the pool and the server.

use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, MutexGuard, OnceLock, Weak};
use std::time::{SystemTime, UNIX_EPOCH};

use rtvirtio_engine::{ResizeError, SizeError};
use rtvirtio_qos as qos;
use rtvirtio_spec::control::{
    Activity, Decision, Event, IoThreadState, PolicyState, QosState, QueueDirection, TaskState,
};
use rtvirtio_spec::mapping::{Entry, Mapping};
use rtvirtio_spec::serve::{
    self, Configuration, Control, Fault, ImageLock, IoCores, IoThread, Listen, MAX_DEVICES,
    MAX_NICS, MAX_RAM_BYTES, MAX_SCHEDULES, NicRate, Policy, Service, wire,
};
use rtvirtio_units::{Bytes, CpuId, DiskName, IoThreadName, Name, Nanos};
use tokio::sync::broadcast;

use super::engines::open;
use super::host::{Host, HostSetup, lock_with_retry};
use super::iothreads::{Adding, AddingKind, Core, Served, Slots, State, threads, when_free};
use super::nics::{Nics, OpenedNic};
use super::opened::{Image, Opened, OpenedDevice};
use super::promises::terms;
use super::watchdog::Watchdog;
use super::{
    Admission, HandedFds, Observation, ObservedDevice, ObservedQueue, Plane, PlaneError,
    SOCKET_MODE, io, refused,
};
use super::{Notice, Report};
use crate::device::{Device, DeviceConfig, Limits};
use crate::iothread::check_cpus;
use crate::monitor::{Monitor, SchedStat};
use crate::nic::Terms;
use crate::schedule::{ClassStatus, Schedule};
use crate::thread_stats::IoThreadStats;
use crate::vcpus::Guard;
use rtvirtio_vhost::server::{Listener, Server};

/// The data plane.
pub struct Registry {
    /// Since 1970, UTC.
    started: Nanos,
    report: Arc<Report>,
    // In the order in which they must end: sessions, then threads.
    server: Server,
    nics: Nics,
    core: Arc<Core>,
    monitor: Monitor,
    /// Of the process, which no change concerns.
    process: OnceLock<(Service, Option<Control>)>,
    watchdog: Watchdog,
}

impl Registry {
    /// A data plane without devices. `report` is told what an operator should know.
    ///
    /// # Errors
    /// The system has no descriptor or thread left.
    pub fn new(report: Arc<Report>) -> std::io::Result<Self> {
        let core = Arc::new(Core::new());
        let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Ok(Self {
            started: Nanos::from(started),
            server: Server::new({
                let report = Arc::clone(&report);
                Arc::new(move |device, ended| report(device, Notice::Ended(ended)))
            })?,
            report,
            nics: Nics::default(),
            monitor: Monitor::new(Arc::clone(&core)),
            process: OnceLock::new(),
            watchdog: Watchdog::start(Arc::clone(&core))?,
            core,
        })
    }

    /// Adds all of a configuration's devices, IOThreads and schedules, and begins its policy.
    ///
    /// # Errors
    /// The first IOThread or device that cannot be had; those before it are there. Then the policy.
    pub fn add_all(&self, configuration: &Configuration, opened: Opened) -> Result<(), PlaneError> {
        let Configuration { service, control, .. } = configuration;
        let _ = self.process.set((service.clone(), control.clone()));
        for iothread in &configuration.iothreads {
            // One that may run on CPUs of which some are not there is served on the others, as `serve --check` says.
            self.core.add_iothread(iothread.clone())?;
        }
        for schedule in &configuration.schedules {
            self.set_schedule(schedule.clone())?;
        }
        for OpenedDevice { spec, image, listener, slots } in opened.devices {
            self.add(spec, image, Some(listener), slots, Admission::Forced)?;
        }
        for network in &configuration.networks {
            self.nics.add_network(network.clone())?;
        }
        for opened in opened.nics {
            self.nics.add(opened, &self.server, &self.core, &self.watchdog, &self.report)?;
        }
        self.begin_policy(configuration.iocores.clone())
    }

    /// Promises to disks that cannot be kept beside the others': a configuration's are not refused, since a plan may promise more than
    /// the rule for changes lets through.
    pub fn doubtful_promises(&self) -> Vec<PlaneError> {
        let state = self.state();
        let doubtful = state.promises().filter_map(|(name, qos)| state.admit(name, qos).err());
        doubtful.collect()
    }

    /// Lets policies borrow vCPUs' CPUs, by this guard, where `borrow` says so.
    pub fn borrow_by(&self, guard: Guard) {
        self.monitor.borrow_by(guard);
    }

    fn begin_policy(&self, settings: IoCores) -> Result<(), PlaneError> {
        // Whoever takes no CPU may be set though the guard has gone.
        if settings.borrow && settings.policy.needs_cpus() && !self.monitor.may_borrow() {
            return Err(Fault::Borrow.into());
        }
        let of_domains = |state: &State| state.iothreads.values().any(|t| t.config.trust.is_some());
        if settings.policy != Policy::Static && of_domains(&self.state()) {
            return Err(Fault::PolicyAcrossTrust(settings.policy).into());
        }
        self.monitor.set(settings).map_err(|error| io("cannot start the policy", error))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.core.state()
    }

    #[cfg(test)]
    pub(super) fn host(&self, device: &DiskName) -> Arc<Host> {
        self.state().host(device).unwrap()
    }

    #[cfg(test)]
    pub(super) fn nic(
        &self,
        device: &DiskName,
    ) -> (Arc<crate::nic::Nic>, Arc<super::nic_host::NicHost>) {
        let host = Arc::clone(&self.state().nics[device].host);
        (host.nic(), host)
    }

    /// A monitor without its thread, for benchmarks.
    #[cfg(feature = "test-utils")]
    #[must_use]
    pub fn probe(&self, limits: rtvirtio_iocores::Limits) -> crate::monitor::Probe {
        crate::monitor::Probe::new(&self.core, limits)
    }

    #[cfg(test)]
    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.core
    }

    fn tell(&self, event: Event) {
        self.core.tell(event);
    }

    /// Adds a device; opens what is not open yet.
    fn add(
        &self,
        spec: serve::Device,
        image: Option<Image>,
        listener: Option<Listener>,
        slots: Option<Listener>,
        admission: Admission,
    ) -> Result<(), PlaneError> {
        // Files, locks and sockets take as long as others let them: not under the state's lock.
        let _place = self.reserve(&spec, admission)?;
        let path = match &spec.listen {
            Listen::Path(path) => Some(path.clone()),
            Listen::Activated(_) => None,
        };
        let name = spec.name.as_str();
        let (engine, image) = open(&spec, image)?;
        let (lock, session_lock) = match (spec.engine.lock(), image) {
            (ImageLock::Always, Some(image)) => {
                let lock = lock_with_retry(&image)
                    .map_err(|error| refused(format!("cannot lock the image of {name}"), error))?;
                (Some(lock), None)
            }
            (ImageLock::Session, image) => (None, image),
            (ImageLock::Always, None) | (ImageLock::Off, _) => (None, None),
        };
        let mut serial = [0; 20];
        let bytes = spec.serial.as_bytes();
        serial[..bytes.len().min(20)].copy_from_slice(&bytes[..bytes.len().min(20)]);
        let device = Device::new(DeviceConfig {
            name: name.to_owned(),
            engine,
            queues: spec.queues(),
            read_only: spec.read_only,
            serial,
            write_cache: spec.write_cache,
            limits: Limits {
                memory: spec.max_memory.unwrap_or(Limits::default().memory),
                ..Limits::default()
            },
            schedule: spec.qos.as_ref().map(|qos| self.state().member(qos)).transpose()?,
        })
        .map_err(|error| refused(format!("cannot make {name}"), error))?;
        let device = Arc::new(device);
        let setup = HostSetup {
            name: spec.name.clone(),
            pool: Arc::clone(&self.core.pool),
            device: Arc::clone(&device),
            wish: spec.fixed_buffers,
            image: session_lock,
            events: self.core.events.clone(),
            report: Arc::clone(&self.report),
        };
        let listener = match (&path, listener) {
            (_, Some(listener)) => Ok(listener),
            (Some(path), None) => Listener::bind(path, SOCKET_MODE),
            (None, None) => {
                return Err(PlaneError::Handed(format!("no socket was handed over for {name}")));
            }
        }
        .map_err(|error| refused(format!("cannot listen for {name}"), error))?;
        let slots = match (&spec.slots, slots) {
            (Some(path), None) => Some(Listener::bind(path, SOCKET_MODE)),
            (_, slots) => slots.map(Ok),
        }
        .transpose()
        .map_err(|error| refused(format!("cannot listen for {name}"), error))?;
        let mut state = self.state();
        let host = Arc::new(Host::new(setup, threads(&state, &spec.mapping)?));
        // Before its front ends' events: one may be waiting at the socket.
        self.tell(Event::DeviceAdded { device: spec.name.clone() });
        let served = self.server.add(listener, device, Arc::clone(&host));
        let unheard = |error| {
            self.tell(Event::DeviceRemoved { device: spec.name.clone() });
            io(format!("cannot listen for {name}"), error)
        };
        let socket_id = served.map_err(unheard)?;
        let slots = spec.slots.clone().zip(slots).map(|(socket, listener)| {
            let host = Arc::clone(&host);
            let serve = move |stream: &_, process| host.serve_client(stream, process);
            let socket_id = self.server.add_clients(listener, serve)?;
            Ok(Slots { socket, socket_id })
        });
        let slots = slots.transpose().map_err(|error| {
            self.server.remove(socket_id);
            unheard(error)
        })?;
        self.watchdog.watch(Arc::downgrade(&host) as Weak<_>);
        let served = Served {
            configured: spec.clone(),
            host,
            ids: state.ids(&spec.vm, spec.mapping.queues()),
            vm: spec.vm,
            trust: spec.trust,
            socket: path,
            socket_id,
            slots,
            mapping: spec.mapping,
            qos: spec.qos,
            _lock: lock,
        };
        state.devices.insert(spec.name, served);
        drop(state);
        self.core.touch();
        Ok(())
    }
}

/// A device's name and sockets, kept from others while it is being added.
struct Place<'a> {
    core: &'a Core,
    name: DiskName,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.core.state().adding.remove(&self.name);
    }
}

impl Registry {
    /// Keeps a disk's name and sockets from others.
    fn reserve(&self, spec: &serve::Device, admission: Admission) -> Result<Place<'_>, PlaneError> {
        let mut state = self.state();
        state.check_is_new(&spec.name)?;
        if let (Some(qos), Admission::Test) = (&spec.qos, admission) {
            state.admit(&spec.name, qos)?;
        }
        let adding = state.adding.values().filter(|adding| adding.disk().is_some()).count();
        if state.devices.len() + adding >= MAX_DEVICES {
            return Err(PlaneError::TooMany { what: "devices", limit: MAX_DEVICES });
        }
        let path = match &spec.listen {
            Listen::Path(path) => Some(path),
            Listen::Activated(_) => None,
        };
        let sockets: Vec<PathBuf> = path.into_iter().chain(&spec.slots).cloned().collect();
        // Refused before anything is opened.
        threads(&state, &spec.mapping)?;
        state.admit_mapping(&spec.name, &spec.mapping)?;
        let (qos, mapping) = (spec.qos.clone(), spec.mapping.clone());
        let adding = Adding { sockets, kind: AddingKind::Disk { qos, mapping } };
        self.reserve_sockets(&mut state, spec.name.clone(), adding)
    }

    /// Keeps a network device's name, sockets and address from others, and what it is promised.
    fn reserve_nic(&self, spec: &serve::Nic) -> Result<Place<'_>, PlaneError> {
        let name = DiskName::from(spec.name.clone());
        let mut state = self.state();
        state.check_is_new(&name)?;
        if state.nics().count() >= MAX_NICS {
            return Err(PlaneError::TooMany { what: "nics", limit: MAX_NICS });
        }
        spec.fits(state.nics())?;
        threads(&state, &spec.mapping)?;
        state.admit_nic(spec)?;
        if let Some(peer) = spec.stream() {
            self.check_is_of_others(&state, spec, peer)?;
        }
        self.reserve_sockets(&mut state, name, Adding::of_nic(spec))
    }

    /// A stream whose peer is this data plane would never end, or take a front end's place.
    fn check_is_of_others(
        &self,
        state: &State,
        spec: &serve::Nic,
        peer: &PathBuf,
    ) -> Result<(), PlaneError> {
        let control = self.process.get().and_then(|(_, control)| control.as_ref());
        let other = match state.owner_of_socket(peer) {
            Some(device) => format!("device \"{device}\""),
            None if spec.sockets().any(|own| own == peer) => format!("nic \"{}\"", spec.name),
            None if control.is_some_and(|control| control.socket == *peer) => {
                "the control API".to_owned()
            }
            None => return Ok(()),
        };
        Err(Fault::OwnSocket { socket: peer.clone(), other }.into())
    }

    fn reserve_sockets(
        &self,
        state: &mut State,
        name: DiskName,
        adding: Adding,
    ) -> Result<Place<'_>, PlaneError> {
        for socket in &adding.sockets {
            if let Some(device) = state.owner_of_socket(socket) {
                let (socket, device) = (socket.clone(), device.clone());
                return Err(PlaneError::SocketInUse { socket, device });
            }
        }
        state.adding.insert(name.clone(), adding);
        Ok(Place { core: &self.core, name })
    }
}

impl Served {
    /// Ends its sessions and clients, drained, and closes its sockets.
    fn close(&self, server: &Server) {
        server.remove(self.socket_id);
        if let Some(slots) = &self.slots {
            server.remove(slots.socket_id);
        }
    }
}

/// Whether CPUs that are asked for while the data plane runs are there.
fn check(cpus: &[CpuId], what: impl FnOnce() -> String) -> Result<(), PlaneError> {
    check_cpus(cpus).map_err(|source| PlaneError::Cpus { what: what(), source })
}

impl Plane for Registry {
    fn add_iothread(&self, iothread: IoThread) -> Result<(), PlaneError> {
        let policy = self.monitor.settings().policy;
        if iothread.trust.is_some() && policy != Policy::Static {
            return Err(Fault::PolicyAcrossTrust(policy).into());
        }
        check(&iothread.cpus, || format!("cannot start iothread {}", iothread.name))?;
        self.core.add_iothread(iothread)
    }

    fn remove_iothread(&self, iothread: &IoThreadName) -> Result<(), PlaneError> {
        self.core.remove_iothread(iothread)
    }

    fn pin_iothread(&self, iothread: &IoThreadName, cpus: &[CpuId]) -> Result<(), PlaneError> {
        check(cpus, || format!("cannot pin iothread {iothread}"))?;
        self.core.pin_iothread(iothread, cpus)
    }

    fn lock_iothread(&self, iothread: &IoThreadName, locked: bool) -> Result<(), PlaneError> {
        self.core.lock_iothread(iothread, locked)
    }

    fn add_device(&self, device: wire::Device, handed: HandedFds) -> Result<(), PlaneError> {
        let iothreads: Vec<IoThread> =
            self.state().iothreads.values().map(|thread| thread.config.clone()).collect();
        let schedules: Vec<Name> = self.state().schedules.keys().cloned().collect();
        let device = serve::Device::new(device, &iothreads, &schedules)?;
        let listener = handed
            .socket
            .map(Listener::from_fd)
            .transpose()
            .map_err(|error| refused(format!("cannot listen for {}", device.name), error))?;
        // What whoever asked has made, goes with the device.
        let listener = listener.map(|listener| match &device.listen {
            Listen::Path(path) => listener.removing(path),
            Listen::Activated(_) => listener,
        });
        let image = handed.image.map(|fd| Image { fd, block: None });
        self.add(device, image, listener, None, Admission::Test)
    }

    fn remove_device(&self, device: &DiskName) -> Result<(), PlaneError> {
        let served = self
            .state()
            .devices
            .remove(device)
            .ok_or_else(|| PlaneError::NoDevice(device.clone()))?;
        self.core.touch();
        // Drains its requests, so not under the lock.
        served.close(&self.server);
        drop(served);
        self.tell(Event::DeviceRemoved { device: device.clone() });
        Ok(())
    }

    fn add_nic(&self, nic: wire::Nic, handed: HandedFds) -> Result<(), PlaneError> {
        let iothreads: Vec<IoThread> =
            self.state().iothreads.values().map(|thread| thread.config.clone()).collect();
        let nic = serve::Nic::new(nic, &iothreads, &self.nics.networks())?;
        let _place = self.reserve_nic(&nic)?;
        let opened = OpenedNic::handed(nic, handed)?;
        let name = opened.spec.name.clone();
        self.nics.add(opened, &self.server, &self.core, &self.watchdog, &self.report)?;
        self.nics.keep_taps(&name, &*self.report);
        Ok(())
    }

    fn remove_nic(&self, nic: &DiskName) -> Result<(), PlaneError> {
        // Its name, sockets and address are kept from others until it has gone.
        let (served, _place) = {
            let mut state = self.state();
            let served = state.nics.remove(nic).ok_or_else(|| PlaneError::NoNic(nic.clone()))?;
            state.adding.insert(nic.clone(), Adding::of_nic(&served.spec));
            (served, Place { core: &self.core, name: nic.clone() })
        };
        self.core.touch();
        // Its queues stop first, so not under the lock.
        self.nics.remove(&served.spec.name, &self.server, &*self.report);
        self.tell(Event::DeviceRemoved { device: nic.clone() });
        Ok(())
    }

    fn add_network(&self, network: serve::Network) -> Result<(), PlaneError> {
        self.nics.add_network(network)
    }

    fn remove_network(&self, network: &Name) -> Result<(), PlaneError> {
        self.nics.remove_network(network)
    }

    fn resize_device(
        &self,
        device: &DiskName,
        size: Option<Bytes>,
        shrink: bool,
    ) -> Result<Bytes, PlaneError> {
        let (host, is_emulated) = {
            let state = self.state();
            let configured = state.devices.get(device).map(|served| &served.configured.engine);
            let is_emulated =
                matches!(configured, Some(serve::Engine::Ram { .. } | serve::Engine::Ssd(_)));
            (state.host(device)?, is_emulated)
        };
        let engine = host.device().engine();
        // Before anything is cut off, and before the guest sees another end of its disk.
        let checked = size.map_or(Ok(()), |size| engine.check_size(size));
        checked.map_err(|error| match error {
            ResizeError::Size(SizeError { size, block, max }) => {
                Fault::NewSize { size, block, max }.into()
            }
            error => refused(format!("cannot resize {device}"), error),
        })?;
        // Else the configuration that is printed would be none.
        let (most, block) = (MAX_RAM_BYTES.get(), 512);
        if let Some(size) = size.filter(|size| is_emulated && size.get() > most) {
            return Err(Fault::NewSize { size: size.get(), block, max: most }.into());
        }
        let from = engine.geometry().capacity;
        if let Some(to) = size.filter(|&to| to < from && !shrink) {
            return Err(PlaneError::Shrinks { device: device.clone(), from, to });
        }
        let capacity =
            host.resize(size).map_err(|error| io(format!("cannot resize {device}"), error))?;
        self.tell(Event::DeviceResized { device: device.clone(), capacity });
        Ok(capacity)
    }

    fn mapping(&self, device: &DiskName) -> Result<Mapping, PlaneError> {
        self.state().mapping(device).map(|(mapping, _)| mapping.clone())
    }

    fn set_mapping(&self, device: &DiskName, entries: &[Entry]) -> Result<(), PlaneError> {
        let mapping = {
            let state = self.state();
            let (mapping, trust) = state.mapping(device)?;
            let is_other = |entry: &&Entry| {
                let thread = state.iothreads.get(&entry.iothread);
                thread.is_some_and(|thread| thread.config.trust != *trust)
            };
            if let Some(entry) = entries.iter().find(is_other) {
                return Err(Fault::OtherTrust(entry.iothread.clone()).into());
            }
            let names = state.iothreads.keys().cloned().collect();
            Mapping::new(entries, u32::from(mapping.queues()), Some(&names))?
        };
        self.core.set_mapping(device, &mapping)
    }

    fn move_queue(
        &self,
        device: &DiskName,
        queue: u16,
        to: &IoThreadName,
    ) -> Result<Nanos, PlaneError> {
        self.core.move_queue(device, queue, to)
    }

    fn set_schedule(&self, schedule: serve::Schedule) -> Result<bool, PlaneError> {
        let serve::Schedule { name, channels, request, kib, flush } = schedule;
        let device = qos::Device { channels, request, kib, flush };
        let mut state = self.state();
        if let Some(schedule) = state.schedules.get(&name) {
            schedule.set_device(device);
            return Ok(false);
        }
        if state.schedules.len() >= MAX_SCHEDULES {
            return Err(PlaneError::TooMany { what: "schedules", limit: MAX_SCHEDULES });
        }
        state.schedules.insert(name, Schedule::new(device));
        Ok(true)
    }

    fn remove_schedule(&self, schedule: &Name) -> Result<(), PlaneError> {
        let mut state = self.state();
        if !state.schedules.contains_key(schedule) {
            return Err(PlaneError::NoSchedule(schedule.clone()));
        }
        let found = state.promises().find(|(_, qos)| qos.schedule == *schedule);
        if let Some((device, _)) = found {
            let (schedule, device) = (schedule.clone(), device.clone());
            return Err(PlaneError::ScheduleInUse { schedule, device });
        }
        state.schedules.remove(schedule);
        Ok(())
    }

    fn set_qos(
        &self,
        device: &DiskName,
        qos: Option<serve::Qos>,
        admission: Admission,
    ) -> Result<(), PlaneError> {
        let mut state = self.state();
        let host = state.host(device)?;
        if let (Some(qos), Admission::Test) = (&qos, admission) {
            state.admit(device, qos)?;
        }
        let schedule = |qos: &Option<serve::Qos>| qos.as_ref().map(|qos| qos.schedule.clone());
        let before = state.devices.get(device).and_then(|served| schedule(&served.qos));
        if let Some(qos) = &qos
            && before.as_ref() == Some(&qos.schedule)
            && let Some(member) = host.device().member()
            && let (share, promise, tasks) = terms(qos)
            && member.set(share, promise, &tasks)
        {
            state.set_qos(device, Some(qos.clone()));
            return Ok(());
        }
        let member = qos.as_ref().map(|qos| state.member(qos)).transpose()?;
        if before.is_none() && member.is_none() {
            return Ok(());
        }
        state.set_qos(device, qos);
        let queues = host.replace_member(member);
        // What is in flight ends first, so not under the lock.
        drop(state);
        host.join(&queues);
        Ok(())
    }

    fn set_nic_rate(
        &self,
        nic: &DiskName,
        direction: QueueDirection,
        rate: Option<NicRate>,
    ) -> Result<(), PlaneError> {
        let set = || {
            let mut state = self.state();
            let served = state.nics.get(nic).ok_or_else(|| PlaneError::NoNic(nic.clone()))?;
            let (host, mut spec) = (Arc::clone(&served.host), served.spec.clone());
            match direction {
                QueueDirection::Receive => spec.rx = rate,
                QueueDirection::Transmit => spec.tx = rate,
            }
            state.admit_nic(&spec)?;
            let terms = Terms::new(rate.map(|rate| rate.rate()), spec.reservation(direction));
            let queues = host.set_terms(direction, &terms);
            let queues =
                queues.map_err(|queue| PlaneError::QueueBusy { device: nic.clone(), queue })?;
            if let Some(served) = state.nics.get_mut(nic) {
                served.spec = spec;
            }
            Ok((host, queues, terms))
        };
        let is_busy = |error: &PlaneError| matches!(error, PlaneError::QueueBusy { .. });
        let (host, queues, terms) = when_free(is_busy, set)?;
        // An IOThread may be busy for a while, so not under the lock.
        host.tell_terms(queues, &terms);
        Ok(())
    }

    fn set_policy(&self, settings: wire::IoCores) -> Result<(), PlaneError> {
        // Those that it leaves as they are may have gone since: that keeps nobody from ending a policy.
        let cpus = settings.cpus.clone().unwrap_or_default();
        let settings = IoCores::new(settings, self.monitor.settings())?;
        check(&cpus, || "cannot set the policy".to_owned())?;
        self.begin_policy(settings)
    }

    fn configuration(&self) -> Configuration {
        let (service, control) = self.process.get().cloned().unwrap_or_default();
        let iocores = self.monitor.settings();
        let state = self.state();
        let nics = state.nics.values().map(|nic| nic.spec.clone()).collect();
        let schedule = |(name, schedule): (&Name, &Arc<Schedule>)| {
            let qos::Device { channels, request, kib, flush } = schedule.status().device;
            serve::Schedule { name: name.clone(), channels, request, kib, flush }
        };
        Configuration {
            service,
            control,
            iocores,
            iothreads: state.iothreads.values().map(|thread| thread.config.clone()).collect(),
            schedules: state.schedules.iter().map(schedule).collect(),
            devices: state.devices.values().map(Served::configuration).collect(),
            networks: self.nics.networks(),
            nics,
        }
    }

    fn policy(&self) -> PolicyState {
        self.monitor.state()
    }

    fn decisions(&self, after: u64) -> Vec<Decision> {
        self.monitor.decisions(after)
    }

    fn observe(&self) -> Observation {
        let state = self.state();
        let iothreads = state.iothreads.iter().map(|(name, thread)| {
            let stats = self.core.pool.thread(thread.id);
            let tid = stats.as_ref().map_or(0, |(_, tid)| *tid);
            let on_cpu = SchedStat::of_thread(tid).read();
            let read = |of: fn(&IoThreadStats) -> &std::sync::atomic::AtomicU64| {
                Nanos::new(stats.as_ref().map_or(0, |(stats, _)| of(stats).load(Relaxed)))
            };
            IoThreadState {
                name: name.clone(),
                id: thread.id.get(),
                cpus: thread.config.cpus.clone(),
                locked: thread.locked,
                tid,
                polling: thread.config.polling.into(),
                queues: state.queues_of(name),
                busy_ns: read(|stats| &stats.busy_ns),
                lock_ns: read(|stats| &stats.lock_ns),
                poll_ns: read(|stats| &stats.poll_ns),
                poll_refused: read(|stats| &stats.poll_refused).get(),
                poll_gaps: read(|stats| &stats.poll_gaps).get(),
                sleep_ns: read(|stats| &stats.sleep_ns),
                cpu_ns: on_cpu.ran,
                runqueue_ns: on_cpu.waited,
            }
        });
        let devices = state.devices.iter().map(|(name, served)| {
            let device = served.host.device();
            let queues = served.mapping.by_queue().iter().zip(&served.host.queues.stats);
            let keys = served.host.queues.keys();
            let qos = served.qos.as_ref().zip(device.member());
            ObservedDevice {
                qos: qos.map(|(qos, member)| {
                    let (all, tasks) = member.status();
                    let task = |(ioprio, of): (_, ClassStatus)| TaskState {
                        ioprio,
                        demand: of.demand(),
                        had: of.had(),
                    };
                    QosState {
                        settings: qos.into(),
                        demand: all.demand(),
                        had: all.had(),
                        tasks: tasks.into_iter().map(task).collect(),
                    }
                }),
                slots: served
                    .slots
                    .as_ref()
                    .zip(served.mapping.iothread(0))
                    .map(|(_, iothread)| served.host.clients(iothread)),
                name: name.clone(),
                vm: served.vm.clone(),
                socket: served.socket.clone(),
                connected: self.server.is_connected(served.socket_id),
                capacity: device.engine().geometry().capacity,
                read_only: device.read_only(),
                queues: queues
                    .zip(keys)
                    .zip(served.ids.queue..)
                    .map(|(((iothread, stats), key), id)| ObservedQueue {
                        id,
                        iothread: iothread.clone(),
                        activity: match key {
                            _ if stats.is_broken() => Activity::Broken,
                            None => Activity::Stopped,
                            Some(key) if self.core.pool.is_busy(key) => Activity::Moving,
                            Some(_) => Activity::Running,
                        },
                        stats: Arc::clone(stats),
                    })
                    .collect(),
            }
        });
        let schedules = state.schedules.iter();
        Observation {
            started: self.started,
            iothreads: iothreads.collect(),
            devices: devices.collect(),
            nics: self.nics.observe(&self.server, &state.nics),
            schedules: schedules.map(|(name, s)| s.status().state(name.clone())).collect(),
            policy: self.monitor.settings().policy,
            decisions: self.monitor.counts(),
            moves: self.core.moves(),
        }
    }

    fn events(&self) -> broadcast::Receiver<Event> {
        self.core.events.subscribe()
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        self.monitor.stop();
        self.nics.forget_gone(&self.server);
        // Sessions drain what is in flight, all at once: the pool must still be there.
        self.server.shut_down();
        self.nics.close(&self.server);
        for (_, served) in std::mem::take(&mut self.state().devices) {
            served.close(&self.server);
        }
        self.watchdog.stop();
    }
}
