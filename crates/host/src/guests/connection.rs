//! One VM, connected: which node a disk is within its guest, and single knobs.
//!
//! A disk's node is the one disk of the guest that has the serial number of
//! QEMU's device, or, where that does not settle it, its PCI address. QEMU says
//! which these are, the guest only which of its nodes has them: at worst it has
//! another of its own disks set. Nothing of what it says gets into a path but a
//! plain `/dev/NAME`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rtvirtio_spec::guests::FoundGuest;
use rtvirtio_spec::plan::qemu::device_ids;
use rtvirtio_spec::settings::Knob;
use rtvirtio_units::{DiskName, IoThreadName, Nanos, VmName};

use super::files::{GuestFiles, left, queue_file};
use super::{ANSWER, GuestFault, GuestTopology, LOOK, place};
use crate::interrupt::Interrupt;
use crate::qemu::error::excerpt;
use crate::qemu::{Address, Deadline, Fault, GuestDisk, Monitor, PciAddress, QemuProcess};
use crate::record::{GuestRecord, is_node};
use crate::sysfs::Sysfs;
use crate::{Host, HostError};

/// Linux's `DISK_NAME_LEN`, without its terminator.
const LONGEST_NODE: usize = 31;
/// virtio-blk cuts a serial number here (`VIRTIO_BLK_ID_BYTES`).
const LONGEST_SERIAL: usize = 20;

/// When the process started, in ticks since boot; `None` if it does not run.
pub(super) fn start_of(sysfs: &dyn Sysfs, pid: u32) -> Option<u64> {
    let text = sysfs.read(&Path::new("/proc").join(pid.to_string()).join("stat")).ok()?;
    // proc_pid_stat(5): field 22; the second, a name in parentheses, may hold anything.
    text.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

/// The property of an IOThread that holds how long it polls.
pub(super) fn poll_property(iothread: &IoThreadName) -> String {
    format!("/objects/{iothread}/poll-max-ns")
}

/// A VM whose monitor answers.
pub(super) struct Connection {
    vm: VmName,
    pid: u32,
    started: u64,
    monitor: Monitor,
    monitor_address: Address,
    agent_address: Option<Address>,
    guest: Option<GuestFiles>,
    /// Each disk's name within the guest, such as `vda`.
    nodes: BTreeMap<DiskName, String>,
    deadline: Deadline,
    /// What ends waits for it before their deadlines.
    interrupt: Interrupt,
    /// What was asked for and found.
    pub(super) found: FoundGuest,
}

impl Connection {
    /// Connects to the monitor.
    pub(super) fn open(
        host: &Host,
        vm: &VmName,
        process: &QemuProcess,
    ) -> Result<Self, GuestFault> {
        let (deadline, interrupt) = (Deadline::after(LOOK), host.interrupt(Duration::ZERO));
        let pid = process.pid;
        let started = start_of(&*host.sysfs, pid).ok_or(GuestFault::NotRunning)?;
        let monitor_address = process.monitor_address().ok_or(GuestFault::NoMonitor { pid })?;
        let mut monitor = Monitor::at_until(&monitor_address, ANSWER, &interrupt)?;
        let mut found = FoundGuest::default();
        for thread in monitor.iothreads(left(deadline, &monitor_address)?)? {
            // An id that is no name of ours cannot be set, and is left alone.
            found
                .iothreads
                .extend(IoThreadName::new(thread.id).ok().map(|id| (id, thread.poll_max)));
        }
        Ok(Self {
            vm: vm.clone(),
            pid,
            started,
            monitor,
            monitor_address,
            agent_address: process.agent_address(),
            guest: None,
            nodes: BTreeMap::new(),
            deadline,
            interrupt,
            found,
        })
    }

    /// Sees what `topology` names, and nothing else.
    pub(super) fn look_at(&mut self, topology: &GuestTopology) -> Result<(), GuestFault> {
        self.found.iothreads.retain(|id, _| topology.iothreads.contains(id));
        let missing = topology.iothreads.iter().find(|id| !self.found.iothreads.contains_key(id));
        if let Some(iothread) = missing {
            return Err(GuestFault::UnknownIoThread { iothread: iothread.clone() });
        }
        if topology.disks.is_empty() {
            return Ok(());
        }
        let claims = self.open_guest()?;
        let pci = self.monitor.pci_devices(left(self.deadline, &self.monitor_address)?)?;
        topology.disks.iter().try_for_each(|disk| self.look_at_disk(disk, &claims, &pci))
    }

    /// Sees what there is, the `disks` among it; what it cannot see, it says.
    pub(super) fn look_around(mut self, disks: &BTreeSet<DiskName>) -> FoundGuest {
        if disks.is_empty() {
            return self.found;
        }
        let mut look = || -> Result<(), GuestFault> {
            let claims = self.open_guest()?;
            let pci = self.monitor.pci_devices(left(self.deadline, &self.monitor_address)?)?;
            for disk in disks {
                match self.look_at_disk(disk, &claims, &pci) {
                    Err(fault @ GuestFault::Peer(_)) => return Err(fault),
                    Err(fault) => {
                        let why = format!("the guest's scheduler of {disk} is left alone: {fault}");
                        self.found.unseen.push(why);
                    }
                    Ok(()) => {}
                }
            }
            Ok(())
        };
        if let Err(fault) = look() {
            // What has been seen of it may not be what can be set.
            self.found.disks.clear();
            let why = format!("planned for on the host alone, its guest is left as it is: {fault}");
            self.found.unseen.push(why);
        }
        self.found
    }

    /// Connects to the agent; gives the disks that the guest claims to have.
    fn open_guest(&mut self) -> Result<Vec<GuestDisk>, GuestFault> {
        let address = self.agent_address.as_ref();
        let address = address.ok_or(GuestFault::NoAgent { pid: self.pid })?;
        let mut guest = GuestFiles::open(address, self.deadline, &self.interrupt)?;
        let disks = guest.disks()?;
        self.guest = Some(guest);
        Ok(disks)
    }

    fn look_at_disk(
        &mut self,
        disk: &DiskName,
        claims: &[GuestDisk],
        pci: &BTreeMap<String, PciAddress>,
    ) -> Result<(), GuestFault> {
        self.deadline = Deadline::after(LOOK);
        let (mut serial, mut address) = (None, None);
        for id in device_ids(disk) {
            serial = self.serial(&id)?;
            address = pci.get(&id);
            if serial.is_some() || address.is_some() {
                break;
            }
        }
        if serial.is_none() && address.is_none() {
            return Err(GuestFault::UnknownDisk { disk: disk.clone() });
        }
        let cut = |serial: &str| serial.chars().take(LONGEST_SERIAL).collect::<String>();
        let serial = serial.map(|s| cut(&s));
        let has_serial =
            |d: &&GuestDisk| serial.is_some() && d.serial.as_deref().map(cut) == serial;
        let has_address = |d: &&GuestDisk| address.is_some() && d.pci.as_ref() == address;
        let mut claim: Vec<&GuestDisk> = claims.iter().filter(has_serial).collect();
        if claim.len() != 1 {
            claim = claims.iter().filter(has_address).collect();
        }
        let [claim] = claim[..] else {
            return Err(GuestFault::NotOneNode { disk: disk.clone(), count: claim.len() });
        };
        let node = plain_node(&claim.node)?.to_owned();
        let guest = self.guest.as_mut().ok_or(GuestFault::NoAgent { pid: self.pid })?;
        guest.begin();
        let queue = guest.queue(&node)?;
        self.found.disks.insert(disk.clone(), queue);
        self.nodes.insert(disk.clone(), node);
        Ok(())
    }

    /// The serial number of QEMU's device with this id, if there is one that has one.
    fn serial(&mut self, id: &str) -> Result<Option<String>, GuestFault> {
        match self.monitor.serial(id, left(self.deadline, &self.monitor_address)?) {
            Ok(serial) => Ok(serial),
            Err(error) if matches!(error.fault, Fault::Refused { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// A record of this VM without any old value.
    pub(super) fn record(&self) -> GuestRecord {
        GuestRecord {
            vm: self.vm.clone(),
            pid: self.pid,
            started: self.started,
            monitor: self.monitor_address.clone(),
            agent: self.agent_address.clone().filter(|_| self.guest.is_some()),
            boot_id: self.guest.as_ref().map(|g| g.boot_id.clone()),
            disks: BTreeMap::new(),
            poll_max: BTreeMap::new(),
        }
    }

    /// Adds to `record` what setting `knob` would overwrite.
    pub(super) fn save(&mut self, knob: &Knob, record: &mut GuestRecord) -> Result<(), GuestFault> {
        match knob {
            Knob::PollMax { iothread, .. } => {
                let found = self.found.iothreads.get(iothread).copied();
                record.poll_max.extend(found.map(|poll_max| (iothread.clone(), poll_max)));
            }
            Knob::GuestScheduler { disk, .. } | Knob::GuestBfq { disk, .. } => {
                if let (Some(node), Some(guest)) = (self.nodes.get(disk), &mut self.guest)
                    && !record.disks.contains_key(node)
                {
                    record.disks.insert(node.clone(), guest.save(node)?);
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Where `knob` is, for people.
    pub(super) fn place(&self, knob: &Knob) -> Result<PathBuf, HostError> {
        let path = match knob {
            Knob::PollMax { iothread, .. } => Some(poll_property(iothread)),
            _ => self.file(knob),
        };
        let unknown = || HostError::UnknownKnob { knob: Box::new(knob.clone()) };
        Ok(place(&self.vm, &path.ok_or_else(unknown)?))
    }

    /// The guest's file that holds `knob`.
    fn file(&self, knob: &Knob) -> Option<String> {
        match knob {
            Knob::GuestScheduler { disk, .. } => {
                Some(queue_file(self.nodes.get(disk)?, "scheduler"))
            }
            Knob::GuestBfq { disk, parameter, .. } => {
                let file = format!("iosched/{}", parameter.file());
                Some(queue_file(self.nodes.get(disk)?, &file))
            }
            _ => None,
        }
    }

    /// Sets `knob`. If that fails, it may be set or not.
    pub(super) fn write(&mut self, knob: &Knob, text: &str) -> Result<(), GuestFault> {
        if let Knob::PollMax { iothread, .. } = knob {
            let expected = "a number";
            let poll_max = text.parse().map(Nanos::new);
            let poll_max =
                poll_max.map_err(|_| GuestFault::NotPlain { found: text.to_owned(), expected })?;
            return Ok(self.monitor.set_poll_max(iothread.as_str(), poll_max, ANSWER)?);
        }
        let file = self.file(knob);
        match (file, &mut self.guest) {
            (Some(file), Some(guest)) => {
                // Other VMs were waited for since it was looked at.
                guest.begin();
                guest.write(&file, text)
            }
            _ => Err(GuestFault::NoAgent { pid: self.pid }),
        }
    }

    /// `knob` as it is now.
    pub(super) fn read(&mut self, knob: &Knob) -> Result<String, GuestFault> {
        let no_agent = GuestFault::NoAgent { pid: self.pid };
        match knob {
            Knob::PollMax { iothread, .. } => {
                let threads = self.monitor.iothreads(ANSWER)?;
                let thread = threads.into_iter().find(|t| t.id == iothread.as_str());
                let iothread = iothread.clone();
                let thread = thread.ok_or(GuestFault::UnknownIoThread { iothread })?;
                Ok(thread.poll_max.get().to_string())
            }
            Knob::GuestScheduler { disk, .. } => match (self.nodes.get(disk), &mut self.guest) {
                (Some(node), Some(guest)) => Ok(guest.schedulers(node)?.selected),
                _ => Err(no_agent),
            },
            _ => match (self.file(knob), &mut self.guest) {
                (Some(file), Some(guest)) => guest.number(&file),
                _ => Err(no_agent),
            },
        }
    }
}

/// The name of a node that a guest claims to have, if it is one of a disk: it becomes part of a path.
fn plain_node(node: &str) -> Result<&str, GuestFault> {
    // The journal takes what is one: it could not be read again otherwise.
    let is_plain = |name: &&str| name.len() <= LONGEST_NODE && is_node(name);
    node.strip_prefix("/dev/").filter(is_plain).ok_or_else(|| GuestFault::NotPlain {
        found: excerpt(node.as_bytes()),
        expected: "a disk's node /dev/NAME",
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::FakeSysfs;

    #[test]
    fn node_that_could_leave_its_directory_is_refused() {
        for node in ["/dev/vda", "/dev/nvme0n1", "/dev/dm-0"] {
            assert_eq!(plain_node(node).unwrap(), &node[5..]);
        }
        let long = format!("/dev/{}", "x".repeat(32));
        for node in
            ["", "vda", "/dev/", "/dev/..", "/dev/a/../..", "/dev/a b", "/dev/\u{1b}[2J", &long]
        {
            let error = plain_node(node).unwrap_err();
            assert!(matches!(error, GuestFault::NotPlain { .. }), "{node:?}");
            assert!(!error.to_string().contains('\u{1b}') && error.hint().is_some());
        }
    }

    #[test]
    fn start_of_a_process_is_read_whatever_its_name() {
        let sysfs = FakeSysfs::bare();
        let fields: Vec<String> = (3..=52).map(|n| format!("{}", n * 10)).collect();
        sysfs.put("/proc/7/stat", &format!("7 (a) b (c) {}\n", fields.join(" ")));
        assert_eq!(start_of(&sysfs, 7), Some(220));
        assert_eq!(start_of(&sysfs, 8), None);
        sysfs.put("/proc/8/stat", "8 (x");
        assert_eq!(start_of(&sysfs, 8), None);
        // The kernel cuts a name after 15 bytes, which may be within a character.
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("proc/9")).unwrap();
        let stat = [b"9 (gr\xc3) ".as_slice(), fields.join(" ").as_bytes()].concat();
        std::fs::write(root.path().join("proc/9/stat"), stat).unwrap();
        assert_eq!(start_of(&crate::sysfs::RealSysfs::new(root.path()), 9), Some(220));
        let own = crate::sysfs::RealSysfs::new("/");
        assert!(start_of(&own, std::process::id()).is_some_and(|ticks| ticks > 0));
    }
}
