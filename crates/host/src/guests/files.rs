//! Files of a guest, through its agent: the queue of a disk as it is, and as it is to be put back.
//!
//! What they hold is a guest's word: a text that is no list of schedulers, no
//! number or no boot id is an error, and none gets on a terminal unescaped.

use std::collections::BTreeMap;
use std::time::Duration;

use rtvirtio_spec::guests::{FoundQueue, GUEST_PARAMETERS};

use super::{ANSWER, GuestFault, LOOK};
use crate::interrupt::Interrupt;
use crate::knobs::Schedulers;
use crate::qemu::error::excerpt;
use crate::qemu::{Address, Agent, Deadline, Fault, GuestDisk, QemuError};
use crate::record::{GuestDiskRecord, QueueRecord};

/// The most bytes of a knob's file: a list of schedulers.
const LARGEST_FILE: usize = 4096;
/// No scheduler's name is longer (kernel `ELV_NAME_MAX`, 16 with its terminator).
const LONGEST_SCHEDULER: usize = 15;
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// What a change of scheduler resets beside `iosched/`, and all that the kernel's schedulers have
/// there (block/{mq-deadline,kyber-iosched,bfq-iosched}.c): an agent does not list directories.
const QUEUE_FILES: [&str; 2] = ["nr_requests", "wbt_lat_usec"];
const SCHEDULER_FILES: [(&str, &[&str]); 3] = [
    (
        "mq-deadline",
        &[
            "async_depth",
            "fifo_batch",
            "front_merges",
            "prio_aging_expire",
            "read_expire",
            "write_expire",
            "writes_starved",
        ],
    ),
    ("kyber", &["read_lat_nsec", "write_lat_nsec"]),
    (
        "bfq",
        &[
            "back_seek_max",
            "back_seek_penalty",
            "fifo_expire_async",
            "fifo_expire_sync",
            "low_latency",
            "max_budget",
            "slice_idle_us",
            "strict_guarantees",
            "timeout_sync",
        ],
    ),
];

/// A guest's agent that answers.
pub(super) struct GuestFiles {
    agent: Agent,
    /// Of the guest's kernel.
    pub(super) boot_id: String,
    deadline: Deadline,
}

impl GuestFiles {
    /// Connects, and reads the guest's boot id; `interrupt` ends this, and later waits.
    pub(super) fn open(
        address: &Address,
        deadline: Deadline,
        interrupt: &Interrupt,
    ) -> Result<Self, GuestFault> {
        let agent = Agent::at_until(address, ANSWER, interrupt)?;
        let mut files = Self { agent, boot_id: String::new(), deadline };
        let text = files.read(BOOT_ID)?;
        let is_id = |c: char| c.is_ascii_hexdigit() || c == '-';
        if text.len() != 36 || !text.chars().all(is_id) {
            let found = excerpt(text.as_bytes());
            return Err(GuestFault::NotPlain { found, expected: "a boot id" });
        }
        files.boot_id = text;
        Ok(files)
    }

    /// The whole disks that the guest claims to have.
    pub(super) fn disks(&mut self) -> Result<Vec<GuestDisk>, GuestFault> {
        let within = left(self.deadline, self.agent.address())?;
        let mut disks = self.agent.disks(within)?;
        disks.retain(|d| !d.is_partition);
        Ok(disks)
    }

    /// A file's text, without blanks around it.
    pub(super) fn read(&mut self, path: &str) -> Result<String, GuestFault> {
        let within = left(self.deadline, self.agent.address())?;
        let bytes = self.agent.read_file(path, LARGEST_FILE, within)?;
        Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
    }

    /// The same; `None` if the guest has no such file, or none that can be read.
    pub(super) fn read_optional(&mut self, path: &str) -> Result<Option<String>, GuestFault> {
        match self.read(path) {
            Ok(text) => Ok(Some(text)),
            Err(GuestFault::Peer(error)) if matches!(error.fault, Fault::Refused { .. }) => {
                Ok(None)
            }
            Err(fault) => Err(fault),
        }
    }

    pub(super) fn write(&mut self, path: &str, text: &str) -> Result<(), GuestFault> {
        let within = left(self.deadline, self.agent.address())?;
        Ok(self.agent.write_file(path, text, within)?)
    }

    /// Begins with a disk: all from here on has one deadline.
    pub(super) fn begin(&mut self) {
        self.deadline = Deadline::after(LOOK);
    }

    /// The generation of the disk `node`, where the guest's kernel tells it.
    pub(super) fn diskseq(&mut self, node: &str) -> Result<Option<String>, GuestFault> {
        self.read_optional(&format!("/sys/block/{node}/diskseq"))
    }

    /// The schedulers of the disk `node`.
    pub(super) fn schedulers(&mut self, node: &str) -> Result<Schedulers, GuestFault> {
        let text = self.read(&queue_file(node, "scheduler"))?;
        let is_name = |word: &String| {
            word.len() <= LONGEST_SCHEDULER
                && word.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
        };
        let found = Schedulers::parse(&text).filter(|s| s.offered.iter().all(is_name));
        let expected = "a list of schedulers with one in brackets";
        found.ok_or_else(|| GuestFault::NotPlain { found: excerpt(text.as_bytes()), expected })
    }

    /// A file's text, if it is a number.
    pub(super) fn number(&mut self, path: &str) -> Result<String, GuestFault> {
        let text = self.read(path)?;
        if text.parse::<u64>().is_ok() && text.bytes().all(|b| b.is_ascii_digit()) {
            return Ok(text);
        }
        Err(GuestFault::NotPlain { found: excerpt(text.as_bytes()), expected: "a number" })
    }

    /// The queue of the disk `node`.
    pub(super) fn queue(&mut self, node: &str) -> Result<FoundQueue, GuestFault> {
        let Schedulers { offered, selected, .. } = self.schedulers(node)?;
        let mut bfq = BTreeMap::new();
        if selected == "bfq" {
            for parameter in GUEST_PARAMETERS {
                let file = format!("iosched/{}", parameter.file());
                bfq.insert(parameter, self.number(&queue_file(node, &file))?);
            }
        }
        Ok(FoundQueue { offered, selected, bfq })
    }

    /// The same with all that a change of scheduler resets.
    pub(super) fn save(&mut self, node: &str) -> Result<GuestDiskRecord, GuestFault> {
        self.begin();
        let diskseq = self.diskseq(node)?;
        let scheduler = self.schedulers(node)?.selected;
        let own = SCHEDULER_FILES.iter().find(|(name, _)| *name == scheduler);
        let own = own.into_iter().flat_map(|(_, files)| *files).map(|f| format!("iosched/{f}"));
        let mut parameters = BTreeMap::new();
        for name in own.chain(QUEUE_FILES.map(str::to_owned)) {
            if let Some(text) = self.read_optional(&queue_file(node, &name))? {
                parameters.insert(name, text);
            }
        }
        Ok(GuestDiskRecord { diskseq, queue: QueueRecord { scheduler, parameters } })
    }
}

/// A file of a guest's disk.
pub(super) fn queue_file(node: &str, file: &str) -> String {
    format!("/sys/block/{node}/queue/{file}")
}

/// How long the next answer may take.
pub(super) fn left(deadline: Deadline, peer: &Address) -> Result<Duration, GuestFault> {
    let left = deadline.left().map_err(|fault| {
        let peer = peer.clone();
        GuestFault::from(QemuError { peer, command: "all that was to be asked", fault })
    })?;
    Ok(left.min(ANSWER))
}
