//! What a configuration's devices need rights for, open: images and sockets.
//!
//! Opened by whoever starts the data plane, before it gives up its rights; served after that.

use std::collections::HashMap;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use rtvirtio_engine::file;
use rtvirtio_spec::serve::{Configuration, Device, Engine, ImageLock, Listen, Nic, NicLink};

use super::PlaneError;
use super::host::open_exclusive_with_retry;
use super::nics::{OpenedNic, attach, open_link, release_others, tap_name};
use super::positions::PositionsFile;
use super::{SOCKET_MODE, io, refused};
use crate::sandbox::{Identity, give};
use crate::tap::Tap;
use rtvirtio_vhost::server::Listener;

/// Devices that have yet to be served. Dropping it closes and removes their sockets.
#[derive(Debug)]
pub struct Opened {
    pub(super) devices: Vec<OpenedDevice>,
    pub(super) nics: Vec<OpenedNic>,
}

#[derive(Debug)]
pub(super) struct OpenedDevice {
    pub(super) spec: Device,
    pub(super) image: Option<Image>,
    pub(super) listener: Listener,
    pub(super) slots: Option<Listener>,
}

/// What a disk's data lies in.
#[derive(Debug)]
pub(super) struct Image {
    pub(super) fd: OwnedFd,
    /// Of an NVMe namespace: its block device, to be locked.
    pub(super) block: Option<OwnedFd>,
}

impl Opened {
    /// Opens all devices of a configuration. `handed` are descriptors by name, from the service
    /// manager: listening sockets, and TAPs that it has kept; `release` tells it which of these are of
    /// no use. Sockets that are made are the property of `owner`, if one is given.
    ///
    /// # Errors
    /// The first image or socket that cannot be had.
    pub fn open(
        configuration: &Configuration,
        handed: &mut HashMap<String, OwnedFd>,
        owner: Option<&Identity>,
        release: &dyn Fn(&str),
    ) -> Result<Self, PlaneError> {
        release_others(&configuration.nics, handed, release);
        let bind = |path: &PathBuf, name: &str| {
            let what = || format!("cannot listen for {name}");
            let listener = Listener::bind(path, SOCKET_MODE);
            let listener = listener.map_err(|error| refused(what(), error))?;
            if let Some(owner) = owner {
                give(path, owner, None).map_err(|error| io(what(), error))?;
            }
            Ok::<_, PlaneError>(listener)
        };
        let mut open = |spec: &Device| -> Result<OpenedDevice, PlaneError> {
            let name = &spec.name;
            let image = match &spec.engine {
                Engine::File(config) => {
                    let what = || format!("cannot open {} for {name}", config.path.display());
                    let image = file::open(&config.path, spec.read_only);
                    let fd = image.map_err(|error| refused(what(), error))?;
                    Some(Image { fd, block: None })
                }
                Engine::Nvme(config) => {
                    let what = || format!("cannot open {} for {name}", config.path.display());
                    let generic = file::open(&config.path, spec.read_only);
                    let fd = generic.map_err(|error| refused(what(), error))?;
                    let block = match config.lock {
                        ImageLock::Off => None,
                        lock => Some(open_exclusive_with_retry(&fd, lock == ImageLock::Always)),
                    };
                    let block = block.transpose().map_err(|error| refused(what(), error))?;
                    Some(Image { fd, block })
                }
                Engine::Ram { .. } | Engine::Ssd(_) => None,
            };
            let what = || format!("cannot listen for {name}");
            let listener = match &spec.listen {
                Listen::Path(path) => bind(path, name.as_str())?,
                Listen::Activated(wanted) => {
                    let missing = || {
                        let unit = format!("rtvirtio-dataplane@{wanted}.socket");
                        let remedy = format!("have systemd make it: systemctl start {unit}");
                        let source = std::io::Error::new(std::io::ErrorKind::NotFound, remedy);
                        io(format!("no socket was handed over for {name}"), source)
                    };
                    let fd = handed.remove(wanted.as_str()).ok_or_else(missing)?;
                    Listener::from_fd(fd).map_err(|error| refused(what(), error))?
                }
            };
            let slots = spec.slots.as_ref().map(|path| bind(path, name.as_str())).transpose()?;
            Ok(OpenedDevice { spec: spec.clone(), image, listener, slots })
        };
        let devices =
            configuration.devices.iter().map(&mut open).collect::<Result<_, PlaneError>>()?;
        let open = |spec: &Nic| {
            let taps = attach(spec, handed, release)?;
            let link = open_link(spec, owner)?;
            let listener = bind(&spec.socket, spec.name.as_str())?;
            let positions = PositionsFile::open(&spec.socket, 2 * spec.pairs, owner);
            Ok(OpenedNic { spec: spec.clone(), taps, link, listener, positions })
        };
        let nics = configuration.nics.iter().map(open).collect::<Result<_, PlaneError>>()?;
        Ok(Self { devices, nics })
    }

    /// The TAPs' queues by the names under which a service manager is to keep them, so that the
    /// links stay up while this process is down.
    pub fn taps(&self) -> impl Iterator<Item = (String, BorrowedFd<'_>)> {
        self.nics.iter().flat_map(|nic| {
            let named = |(queue, tap)| match &nic.spec.link {
                NicLink::Tap(name) => Some((tap_name(name, queue), Tap::as_fd(tap))),
                _ => None,
            };
            (0..).zip(&nic.taps).filter_map(named)
        })
    }
}
