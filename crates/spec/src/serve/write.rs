//! Checked types to wire types, as they are written: what is read back is equal (test
//! `configuration_is_written_and_read_back`).

use super::wire::{self, Size};
use super::{
    Completion, Configuration, Control, IoCores, IoThread, Network, Nic, NicLink, NicRate, Polling,
    Schedule, Service, Vlans, mac_text,
};

/// A configuration as TOML, which [`parse`](super::parse) reads.
///
/// # Errors
/// None that a checked configuration makes.
pub fn to_toml(configuration: &wire::Configuration) -> Result<String, toml::ser::Error> {
    toml::to_string(configuration)
}

impl From<&Configuration> for wire::Configuration {
    fn from(configuration: &Configuration) -> Self {
        let Configuration {
            service,
            control,
            iocores,
            iothreads,
            schedules,
            devices,
            networks,
            nics,
        } = configuration;
        Self {
            version: 1,
            service: (*service != Service::default()).then(|| service.into()),
            control: control.as_ref().map(wire::Control::from),
            iocores: (*iocores != IoCores::default()).then(|| iocores.into()),
            iothread: iothreads.iter().map(wire::IoThread::from).collect(),
            schedule: schedules.iter().map(wire::Schedule::from).collect(),
            device: devices.iter().map(wire::Device::from).collect(),
            network: networks.iter().map(wire::Network::from).collect(),
            nic: nics.iter().map(wire::Nic::from).collect(),
        }
    }
}

impl From<&Service> for wire::Service {
    fn from(Service { user, group, sandbox }: &Service) -> Self {
        Self { user: user.clone(), group: group.clone(), sandbox: *sandbox }
    }
}

impl From<&Control> for wire::Control {
    fn from(Control { socket, group }: &Control) -> Self {
        Self { socket: socket.clone(), group: *group }
    }
}

impl From<&IoCores> for wire::IoCores {
    fn from(iocores: &IoCores) -> Self {
        let IoCores { policy, cpus, min_iothreads, max_iothreads, borrow } = iocores;
        Self {
            policy: Some(*policy),
            cpus: (!cpus.is_empty()).then(|| cpus.clone()),
            min_iothreads: Some(*min_iothreads),
            max_iothreads: Some(*max_iothreads),
            borrow: Some(*borrow),
        }
    }
}

impl From<&IoThread> for wire::IoThread {
    fn from(IoThread { name, cpus, polling, trust }: &IoThread) -> Self {
        // What an IOThread that does not adapt would do if it did is not for the file.
        let adapts = polling.completion == Completion::Adaptive;
        Self {
            name: name.clone(),
            cpus: cpus.clone(),
            completion: Some(polling.completion),
            core: adapts.then_some(polling.core),
            // The default is no whole number of these.
            poll_max_us: (adapts && polling.max != Polling::default().max)
                .then_some(polling.max.get() / 1_000),
            poll_grow: adapts.then_some(polling.grow),
            poll_shrink: adapts.then_some(polling.shrink),
            trust: trust.clone(),
        }
    }
}

impl From<&Schedule> for wire::Schedule {
    fn from(Schedule { name, channels, request, kib, flush }: &Schedule) -> Self {
        Self {
            name: name.clone(),
            channels: *channels,
            request_ns: request.get(),
            kib_ns: kib.get(),
            flush_ns: Some(flush.get()),
        }
    }
}

impl From<&Network> for wire::Network {
    fn from(Network { name, max_broadcast }: &Network) -> Self {
        Self { name: name.clone(), max_broadcast: Some(*max_broadcast) }
    }
}

impl From<&Nic> for wire::Nic {
    fn from(nic: &Nic) -> Self {
        let (mut tap, mut stream, mut dgram, mut port) = (None, None, None, None);
        match &nic.link {
            NicLink::Tap(name) => tap = Some(name.clone()),
            NicLink::Stream(path) => stream = Some(path.clone()),
            NicLink::Dgram { local, remote } => {
                dgram = Some(wire::Dgram { local: local.clone(), remote: remote.clone() });
            }
            NicLink::Network(of) => port = Some(of),
        }
        let (vlan, trunk) = match port.map(|port| &port.vlans) {
            None | Some(Vlans::Untagged) => (None, None),
            Some(Vlans::Access(vlan)) => (Some(*vlan), None),
            Some(Vlans::Trunk(vlans)) => (None, Some(vlans.clone())),
        };
        Self {
            name: nic.name.clone(),
            vm: nic.vm.clone(),
            socket: nic.socket.clone(),
            tap,
            stream,
            dgram,
            network: port.map(|port| port.network.clone()),
            vlan,
            trunk,
            anti_spoofing: port.map(|port| port.anti_spoofing),
            mac: Some(mac_text(nic.mac)),
            mtu: nic.mtu,
            queues: Some(nic.pairs.into()),
            trust: nic.trust.clone(),
            max_memory: nic.max_memory.map(Size),
            mapping: Some(nic.mapping.entries()),
            rx: nic.rx.as_ref().map(wire::NicRate::from),
            tx: nic.tx.as_ref().map(wire::NicRate::from),
        }
    }
}

impl From<&NicRate> for wire::NicRate {
    fn from(NicRate { frames, bits, burst, within }: &NicRate) -> Self {
        Self {
            max_frames: *frames,
            max_mbit: bits.map(|bits| bits / 1_000_000),
            burst_ms: Some(burst.get() / 1_000_000),
            within_us: within.map(|within| within.get() / 1_000),
        }
    }
}
