//! What network devices are promised of their IOThreads, and whether that can be kept (`frames::promise`).

use std::collections::BTreeMap;

use rtvirtio_frames::limit::Rate;
use rtvirtio_frames::promise::{self, Load, Medium, Promise, Refusal, Reservation};
use rtvirtio_units::{IoThreadName, Name};

use super::{Device, Nic, NicLink, NicRate};
use crate::control::QueueDirection;

/// MTU of a device of which nothing says it: that of a TAP that nobody has changed.
const USUAL_MTU: u16 = 1500;

/// A promise that its IOThread could not keep.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("iothread \"{iothread}\" cannot keep what nic \"{nic}\" is promised ({}): {refusal}", direction.key())]
pub struct NotKept {
    /// The IOThread.
    pub iothread: IoThreadName,
    /// The device.
    pub nic: Name,
    /// Of which of its directions.
    pub direction: QueueDirection,
    /// Why, and what would fit.
    pub refusal: Refusal,
}

impl NotKept {
    /// The key of a device that makes it so.
    pub(super) fn keys(&self, nic: &Nic) -> &'static [&'static str] {
        match self.direction {
            _ if nic.name != self.nic => &[],
            QueueDirection::Receive => &["rx"],
            QueueDirection::Transmit => &["tx"],
        }
    }

    /// What to do about it, in one line.
    #[must_use]
    pub fn hint(&self) -> String {
        let key = self.direction.key();
        match self.refusal {
            Refusal::Share { most, .. } if most > 0 => format!(
                "write {key} = {{ max_frames = {most}, ... }}, or give the nic an iothread of its own"
            ),
            Refusal::Share { .. } => "give the nic an iothread of its own".to_owned(),
            Refusal::Within { least, .. } => format!(
                "write within_us = {} there, a smaller burst_ms, or give the nic an iothread of its own, without disks",
                least.div_ceil(1_000)
            ),
        }
    }
}

impl NicRate {
    /// As it is enforced.
    #[must_use]
    pub fn rate(&self) -> Rate {
        let float = |number: Option<u64>| number.map(|number| number as f64);
        Rate { frames: float(self.frames), bits: float(self.bits), burst: self.burst.get() }
    }
}

impl Nic {
    fn promise(&self, direction: QueueDirection) -> Option<Promise> {
        let rate = match direction {
            QueueDirection::Receive => self.rx,
            QueueDirection::Transmit => self.tx,
        }?;
        let medium = match self.link {
            NicLink::Tap(_) | NicLink::Stream(_) | NicLink::Dgram { .. } => Medium::System,
            NicLink::Network(_) => Medium::Copy,
        };
        let mtu = self.mtu.unwrap_or(USUAL_MTU);
        Some(Promise { rate: rate.rate(), within: rate.within?.get(), mtu, medium })
    }

    /// What is promised to each of its queues of a direction.
    #[must_use]
    pub fn reservation(&self, direction: QueueDirection) -> Option<Reservation> {
        self.promise(direction).map(|promise| promise.reservation())
    }

    /// Its virtqueues' IOThreads, and which way their frames go.
    fn queues(&self) -> impl Iterator<Item = (&IoThreadName, QueueDirection)> {
        let directions = [QueueDirection::Receive, QueueDirection::Transmit].into_iter().cycle();
        self.mapping.by_queue().iter().zip(directions)
    }
}

/// Whether an IOThread can keep what these devices are promised of it beside so many queues of disks. Each queue is promised all
/// of a device's rate: of several pairs, any one may have it.
///
/// # Errors
/// The first promise that it could not keep.
pub fn admit<'a>(
    iothread: &IoThreadName,
    nics: impl IntoIterator<Item = &'a Nic>,
    disks: u32,
) -> Result<(), NotKept> {
    let (mut queues, mut of, mut promises) = (disks, Vec::new(), Vec::new());
    for nic in nics {
        for (_, direction) in nic.queues().filter(|(name, _)| *name == iothread) {
            queues += 1;
            if let Some(promise) = nic.promise(direction) {
                of.push((&nic.name, direction));
                promises.push(promise);
            }
        }
    }
    let load = Load { queues, has_disks: disks > 0 };
    let Err(refusal) = promise::admit(&promises, load) else { return Ok(()) };
    let which = match refusal {
        Refusal::Within { which, .. } => of.get(which),
        Refusal::Share { .. } => of.last(),
    };
    let Some(&(nic, direction)) = which else { return Ok(()) };
    Err(NotKept { iothread: iothread.clone(), nic: nic.clone(), direction, refusal })
}

/// The same of all IOThreads that have a queue of these.
pub(super) fn admit_all(nics: &[Nic], devices: &[Device]) -> Result<(), NotKept> {
    let mut iothreads = BTreeMap::<&IoThreadName, u32>::new();
    for (name, _) in nics.iter().flat_map(Nic::queues) {
        iothreads.entry(name).or_default();
    }
    for name in devices.iter().flat_map(|device| device.mapping.by_queue()) {
        iothreads.entry(name).and_modify(|queues| *queues += 1);
    }
    iothreads.into_iter().try_for_each(|(iothread, disks)| admit(iothread, nics, disks))
}
