//! Which IOThread serves each virtqueue of a device: QEMU's `iothread-vq-mapping`.
//!
//! Terms: an *entry* names an IOThread and, maybe, its queues (`vqs`). Without `vqs` queues go round
//! robin: entry k of n has the queues k, k + n, k + 2n, … A [`Mapping`] is what entries come to for
//! a number of queues: every queue has exactly one IOThread. It is refused when QEMU refuses it,
//! in QEMU's words (hw/virtio/iothread-vq-mapping.c, `iothread_vq_mapping_validate`).
//!
//! Formats: QEMU's JSON, libvirt's `<iothreads>`, and the TOML of a serve configuration. [`read`]
//! tells which one a text is; [`write`](mod@write) has the others' words for a mapping.
//!
//! Properties (tests of the same name): `every_queue_has_one_iothread`,
//! `round_robin_is_as_qemu_does_it`, `qemu_refusals_are_all_mirrored`,
//! `mapping_survives_each_format`, `hostile_text_is_refused_without_panic`.

pub mod read;
pub mod write;

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

use rtvirtio_units::IoThreadName;
use serde::{Deserialize, Serialize};

/// Most virtqueues of a device that the data plane serves.
pub const MAX_QUEUES: u16 = 64;

/// An item of `iothread-vq-mapping`, in QEMU's JSON and in TOML.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// The IOThread.
    pub iothread: IoThreadName,
    /// Its queues; without any, or without the key, which QEMU does not tell apart: round robin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vqs: Option<Vec<u32>>,
}

impl Entry {
    /// An entry without queues of its own.
    #[must_use]
    pub const fn round_robin(iothread: IoThreadName) -> Self {
        Self { iothread, vqs: None }
    }

    fn queues(&self) -> &[u32] {
        self.vqs.as_deref().unwrap_or_default()
    }
}

/// Why entries are no mapping.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MappingError {
    /// There is no entry.
    #[error("iothread-vq-mapping is empty")]
    Empty,
    /// A number of queues that no device has.
    #[error("queues is {0}, outside 1 to {MAX_QUEUES}")]
    QueueCount(u32),
    /// An entry names no IOThread that exists.
    #[error("IOThread \"{iothread}\" object does not exist")]
    UnknownIoThread {
        /// The name.
        iothread: IoThreadName,
    },
    /// Two entries name one IOThread.
    #[error("duplicate IOThread name \"{iothread}\" in iothread-vq-mapping")]
    DuplicateIoThread {
        /// The name.
        iothread: IoThreadName,
    },
    /// Some entries have queues and some have none.
    #[error(
        "either all items in iothread-vq-mapping must have vqs or none of them must have it \
         (IOThread \"{iothread}\" differs from the first)"
    )]
    SomeHaveQueues {
        /// The first that differs.
        iothread: IoThreadName,
    },
    /// A queue that the device does not have.
    #[error(
        "vq index {queue} for IOThread \"{iothread}\" must be less than num_queues {queues} in \
         iothread-vq-mapping"
    )]
    NoSuchQueue {
        /// The queue.
        queue: u32,
        /// Of which entry.
        iothread: IoThreadName,
        /// The device's queues.
        queues: u16,
    },
    /// A queue that stands twice.
    #[error("cannot assign vq {queue} to IOThread \"{iothread}\" because it is already assigned")]
    QueueAssignedTwice {
        /// The queue.
        queue: u32,
        /// The second entry with it.
        iothread: IoThreadName,
    },
    /// A queue that stands nowhere.
    #[error("missing vq {queue} IOThread assignment in iothread-vq-mapping")]
    MissingQueue {
        /// The queue.
        queue: u16,
    },
}

impl MappingError {
    /// What to do about it, in one line.
    #[must_use]
    pub fn hint(&self) -> String {
        match self {
            Self::Empty => "name at least one IOThread: [{ iothread = \"iot0\" }]".to_owned(),
            Self::QueueCount(_) => format!("give the device 1 to {MAX_QUEUES} queues"),
            Self::UnknownIoThread { .. } => {
                "use an IOThread that exists, or add it: [[iothread]] in the serve configuration, \
                 or `rtvirtio ctl iothread create`"
                    .to_owned()
            }
            Self::DuplicateIoThread { .. } => {
                "merge the entries: one IOThread, all its vqs".to_owned()
            }
            Self::SomeHaveQueues { .. } => {
                "list vqs in each entry, or in none for round robin".to_owned()
            }
            Self::NoSuchQueue { queues, .. } => {
                format!("queues count from 0 to {}", queues.saturating_sub(1))
            }
            Self::QueueAssignedTwice { .. } => "remove one of the two".to_owned(),
            Self::MissingQueue { queue } => {
                format!("add {queue} to the vqs of an IOThread, or leave all vqs out: round robin")
            }
        }
    }
}

/// The IOThread of every queue of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping {
    /// By queue; 1 to [`MAX_QUEUES`].
    queues: Vec<IoThreadName>,
}

impl Mapping {
    /// What `entries` come to for a device of `queues` queues, among the IOThreads that exist
    /// (`None`: whichever are named).
    ///
    /// # Errors
    /// [`MappingError`]: the first rule that is broken, in QEMU's order.
    pub fn new(
        entries: &[Entry],
        queues: u32,
        known: Option<&BTreeSet<IoThreadName>>,
    ) -> Result<Self, MappingError> {
        let count = u16::try_from(queues).ok().filter(|q| (1..=MAX_QUEUES).contains(q));
        let count = count.ok_or(MappingError::QueueCount(queues))?;
        let first = entries.first().ok_or(MappingError::Empty)?;
        let mut named = BTreeSet::new();
        let mut owners: Vec<Option<&IoThreadName>> = vec![None; usize::from(count)];
        for entry in entries {
            let iothread = &entry.iothread;
            if known.is_some_and(|known| !known.contains(iothread)) {
                return Err(MappingError::UnknownIoThread { iothread: iothread.clone() });
            }
            if !named.insert(iothread) {
                return Err(MappingError::DuplicateIoThread { iothread: iothread.clone() });
            }
            if entry.queues().is_empty() != first.queues().is_empty() {
                return Err(MappingError::SomeHaveQueues { iothread: iothread.clone() });
            }
            for &queue in entry.queues() {
                let iothread = || iothread.clone();
                let owner = owners.get_mut(queue as usize).ok_or_else(|| {
                    MappingError::NoSuchQueue { queue, iothread: iothread(), queues: count }
                })?;
                if owner.replace(&entry.iothread).is_some() {
                    return Err(MappingError::QueueAssignedTwice { queue, iothread: iothread() });
                }
            }
        }
        if first.queues().is_empty() {
            for (owner, entry) in owners.iter_mut().zip(entries.iter().cycle()) {
                *owner = Some(&entry.iothread);
            }
        }
        let owned = (0..count)
            .zip(owners)
            .map(|(queue, owner)| owner.cloned().ok_or(MappingError::MissingQueue { queue }));
        Ok(Self { queues: owned.collect::<Result<_, _>>()? })
    }

    /// How many queues the device has.
    #[must_use]
    pub fn queues(&self) -> u16 {
        self.queues.len() as u16
    }

    /// The IOThread of each queue, from queue 0.
    #[must_use]
    pub fn by_queue(&self) -> &[IoThreadName] {
        &self.queues
    }

    /// The IOThread of a queue, if the device has it.
    #[must_use]
    pub fn iothread(&self, queue: u16) -> Option<&IoThreadName> {
        self.queues.get(usize::from(queue))
    }

    /// Gives a queue to another IOThread.
    ///
    /// # Errors
    /// [`MappingError::NoSuchQueue`].
    pub fn assign(&mut self, queue: u16, to: IoThreadName) -> Result<(), MappingError> {
        let queues = self.queues();
        match self.queues.get_mut(usize::from(queue)) {
            Some(owner) => {
                *owner = to;
                Ok(())
            }
            None => Err(MappingError::NoSuchQueue { queue: queue.into(), iothread: to, queues }),
        }
    }

    /// The entries, each with its queues in ascending order, by each IOThread's first queue.
    #[must_use]
    pub fn entries(&self) -> Vec<Entry> {
        let mut entries: Vec<(&IoThreadName, Vec<u32>)> = Vec::new();
        for (queue, owner) in (0..).zip(&self.queues) {
            match entries.iter_mut().find(|(name, _)| *name == owner) {
                Some((_, vqs)) => vqs.push(queue),
                None => entries.push((owner, vec![queue])),
            }
        }
        let entry =
            |(name, vqs): (&IoThreadName, _)| Entry { iothread: name.clone(), vqs: Some(vqs) };
        entries.into_iter().map(entry).collect()
    }

    /// The IOThreads, each once, by their first queues.
    #[must_use]
    pub fn iothreads(&self) -> Vec<&IoThreadName> {
        let mut seen = BTreeSet::new();
        self.queues.iter().filter(|name| seen.insert(*name)).collect()
    }
}
