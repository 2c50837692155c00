//! TOML to [`Configuration`], as a specification is read: size, depth of keys, TOML to wire types,
//! wire types to checked ones.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use rtvirtio_units::Name;
use serde::Deserialize;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::check::Misplaced;
use super::error::{Fault, ServeError, Subject};
use super::promises::admit_all;
use super::{
    Configuration, Control, Device, IoCores, IoThread, Listen, MAX_DEVICES, MAX_IOTHREADS,
    MAX_NETWORKS, MAX_NICS, MAX_SCHEDULES, Network, Nic, NicLink, Policy, Schedule, Service, wire,
};
use crate::specification::{MAX_FILE_BYTES, deep_key, position, unknown_field};

/// Parses and checks `text`, named `file` in errors.
///
/// # Errors
/// [`ServeError`] says where, what and what to do. The first fault ends the parse.
pub fn parse(file: &str, text: &str) -> Result<Configuration, ServeError> {
    let fail = |subject, span: Range<usize>, fault| {
        let (line, column) = position(text, span.start);
        ServeError { file: file.to_owned(), line, column, subject, fault: Box::new(fault) }
    };
    let of_file = |span, fault| fail(Subject::File, span, fault);
    if text.len() > MAX_FILE_BYTES {
        return Err(of_file(0..0, Fault::TooLarge(text.len())));
    }
    if let Some(span) = deep_key(text) {
        return Err(of_file(span, Fault::KeyTooDeep));
    }
    let toml = |e: &toml::de::Error| {
        let fault = match unknown_field(e.message()) {
            Some((key, expected)) => Fault::UnknownKey { key, expected },
            None => Fault::Toml(e.message().to_owned()),
        };
        of_file(e.span().unwrap_or(0..0), fault)
    };
    let table = DeTable::parse(text).map_err(|e| toml(&e))?;
    // Before the unknown keys: a file of a later version must not be called misspelt.
    if let Some(value) = table.get_ref().get("version") {
        let (span, version) =
            (value.span(), i64::deserialize(toml::de::ValueDeserializer::from(value.clone())));
        match version {
            Ok(1) => {}
            Ok(other) => return Err(of_file(span, Fault::UnknownVersion(other))),
            Err(e) => return Err(toml(&e)),
        }
    }
    let places = table.clone();
    let raw =
        wire::Configuration::deserialize(toml::Deserializer::from(table)).map_err(|e| toml(&e))?;
    let place = Place { root: &places };

    if raw.iothread.is_empty() {
        return Err(of_file(0..0, Fault::NoIoThread));
    }
    let count = raw.iothread.len();
    if count > MAX_IOTHREADS {
        return Err(of_file(
            place.of("iothread", MAX_IOTHREADS, &[]),
            Fault::TooManyIoThreads(count),
        ));
    }
    let count = raw.device.len();
    if count > MAX_DEVICES {
        return Err(of_file(place.of("device", MAX_DEVICES, &[]), Fault::TooManyDevices(count)));
    }
    let service = match raw.service {
        None => Service::default(),
        Some(service) => Service::located(service)
            .map_err(|(keys, fault)| of_file(place.of("service", 0, keys), fault))?,
    };
    let control = raw.control.map(|control| {
        Control::located(control)
            .map_err(|(keys, fault)| of_file(place.of("control", 0, keys), fault))
    });
    let control = control.transpose()?;
    let iocores = match raw.iocores {
        None => IoCores::default(),
        Some(iocores) => IoCores::located(iocores, IoCores::default())
            .map_err(|(keys, fault)| of_file(place.of("iocores", 0, keys), fault))?,
    };
    let mut iothreads: Vec<IoThread> = Vec::with_capacity(raw.iothread.len());
    for (index, raw) in raw.iothread.into_iter().enumerate() {
        let subject = Subject::IoThread(raw.name.clone());
        let checked = IoThread::located(raw).and_then(|iothread| {
            let is_new = iothreads.iter().all(|other| other.name != iothread.name);
            if !is_new {
                return Err((&["name"] as &[_], Fault::DuplicateName));
            }
            iothread.fits(&iothreads).map_err(|fault| (&["cpus"] as &[_], fault))?;
            Ok(iothread)
        });
        iothreads
            .push(checked.map_err(|(keys, fault)| {
                fail(subject, place.of("iothread", index, keys), fault)
            })?);
    }
    let mut unique = Unique::default();
    if let Some(control) = &control {
        unique.sockets.insert(Listen::Path(control.socket.clone()), "the control API".to_owned());
    }
    let count = raw.schedule.len();
    if count > MAX_SCHEDULES {
        let span = place.of("schedule", MAX_SCHEDULES, &[]);
        return Err(of_file(span, Fault::TooManySchedules(count)));
    }
    let mut schedules: Vec<Schedule> = Vec::with_capacity(count);
    for (index, raw) in raw.schedule.into_iter().enumerate() {
        let subject = Subject::Schedule(raw.name.clone());
        let checked = Schedule::located(raw).and_then(|schedule| {
            let is_new = schedules.iter().all(|other| other.name != schedule.name);
            if is_new { Ok(schedule) } else { Err((&["name"] as &[_], Fault::DuplicateName)) }
        });
        schedules
            .push(checked.map_err(|(keys, fault)| {
                fail(subject, place.of("schedule", index, keys), fault)
            })?);
    }
    let schedule_names: Vec<Name> = schedules.iter().map(|s| s.name.clone()).collect();
    let mut devices = Vec::with_capacity(raw.device.len());
    for (index, raw) in raw.device.into_iter().enumerate() {
        let subject = Subject::Device(raw.name.clone());
        let checked =
            Device::located(raw, &iothreads, &schedule_names).and_then(|device| unique.add(device));
        devices.push(
            checked
                .map_err(|(keys, fault)| fail(subject, place.of("device", index, keys), fault))?,
        );
    }
    let count = raw.network.len();
    if count > MAX_NETWORKS {
        let span = place.of("network", MAX_NETWORKS, &[]);
        return Err(of_file(span, Fault::TooManyNetworks(count)));
    }
    let mut networks: Vec<Network> = Vec::with_capacity(count);
    for (index, raw) in raw.network.into_iter().enumerate() {
        let subject = Subject::Network(raw.name.clone());
        let checked = Network::located(raw).and_then(|network| {
            let is_new = networks.iter().all(|other| other.name != network.name);
            if is_new { Ok(network) } else { Err((&["name"] as &[_], Fault::DuplicateName)) }
        });
        networks.push(
            checked
                .map_err(|(keys, fault)| fail(subject, place.of("network", index, keys), fault))?,
        );
    }
    let count = raw.nic.len();
    if count > MAX_NICS {
        return Err(of_file(place.of("nic", MAX_NICS, &[]), Fault::TooManyNics(count)));
    }
    let mut nics = Vec::with_capacity(count);
    for (index, raw) in raw.nic.into_iter().enumerate() {
        let subject = Subject::Nic(raw.name.clone());
        let checked =
            Nic::located(raw, &iothreads, &networks).and_then(|nic| unique.add_nic(nic, &nics));
        nics.push(
            checked.map_err(|(keys, fault)| fail(subject, place.of("nic", index, keys), fault))?,
        );
    }
    for (index, nic) in nics.iter().enumerate() {
        let own = unique.socket_of_peer(nic);
        own.map_err(|(keys, fault)| {
            fail(Subject::Nic(nic.name.clone()), place.of("nic", index, keys), fault)
        })?;
    }
    if admit_all(&nics, &devices).is_err() {
        // The first with which it does not fit.
        for (index, nic) in nics.iter().enumerate() {
            if let Err(not_kept) = admit_all(&nics[..=index], &devices) {
                let span = place.of("nic", index, not_kept.keys(nic));
                return Err(fail(Subject::Nic(nic.name.clone()), span, not_kept.into()));
            }
        }
    }
    let of_threads = iothreads.iter().any(|iothread| iothread.trust.is_some());
    if of_threads && iocores.policy != Policy::Static {
        let (span, policy) = (place.of("iocores", 0, &["policy"]), iocores.policy);
        return Err(of_file(span, Fault::PolicyAcrossTrust(policy)));
    }
    Ok(Configuration { service, control, iocores, iothreads, schedules, devices, networks, nics })
}

/// What stands once in a file.
#[derive(Default)]
struct Unique {
    names: BTreeSet<rtvirtio_units::DiskName>,
    sockets: BTreeMap<Listen, String>,
}

impl Unique {
    fn add(&mut self, device: Device) -> Result<Device, Misplaced> {
        if !self.names.insert(device.name.clone()) {
            return Err((&["name"], Fault::DuplicateName));
        }
        let owner = format!("device \"{}\"", device.name);
        if let Some(other) = self.sockets.insert(device.listen.clone(), owner.clone()) {
            let (key, socket): (&[_], _) = match device.listen {
                Listen::Path(path) => (&["socket"], path),
                Listen::Activated(name) => (&["socket_activation"], name.as_str().into()),
            };
            return Err((key, Fault::DuplicateSocket { socket, other }));
        }
        if let Some(socket) = device.slots.clone()
            && let Some(other) = self.sockets.insert(Listen::Path(socket.clone()), owner)
        {
            return Err((&["slots"], Fault::DuplicateSocket { socket, other }));
        }
        Ok(device)
    }
}

impl Unique {
    fn add_nic(&mut self, nic: Nic, others: &[Nic]) -> Result<Nic, Misplaced> {
        if !self.names.insert(nic.name.clone().into()) {
            return Err((&["name"], Fault::DuplicateName));
        }
        nic.located_among(others)?;
        let owner = format!("nic \"{}\"", nic.name);
        if let Some(other) = self.sockets.insert(Listen::Path(nic.socket.clone()), owner.clone()) {
            return Err((&["socket"], Fault::DuplicateSocket { socket: nic.socket, other }));
        }
        if let NicLink::Dgram { local, .. } = &nic.link
            && let Some(other) = self.sockets.insert(Listen::Path(local.clone()), owner)
        {
            let socket = local.clone();
            return Err((&["dgram", "local"], Fault::DuplicateSocket { socket, other }));
        }
        Ok(nic)
    }

    /// Whether the peer that a network device connects to is somebody else's: asked when all sockets are known.
    fn socket_of_peer(&self, nic: &Nic) -> Result<(), Misplaced> {
        let Some(socket) = nic.stream() else { return Ok(()) };
        match self.sockets.get(&Listen::Path(socket.clone())) {
            Some(other) => {
                let (socket, other) = (socket.clone(), other.clone());
                Err((&["stream"], Fault::OwnSocket { socket, other }))
            }
            None => Ok(()),
        }
    }
}

/// Finds values in the text again.
struct Place<'a> {
    root: &'a Spanned<DeTable<'a>>,
}

impl Place<'_> {
    /// Where the value of `keys` in entry `index` of the list (or in the table) `top` stands; the
    /// last of `keys` that is there.
    fn of(&self, top: &str, index: usize, keys: &[&str]) -> Range<usize> {
        let Some(mut value) = self.root.get_ref().get(top) else { return 0..0 };
        if let DeValue::Array(entries) = value.get_ref() {
            match entries.get(index) {
                Some(entry) => value = entry,
                None => return value.span(),
            }
        }
        for key in keys {
            match value.get_ref() {
                DeValue::Table(table) => match table.get(*key) {
                    Some(inner) => value = inner,
                    None => break,
                },
                _ => break,
            }
        }
        value.span()
    }
}
