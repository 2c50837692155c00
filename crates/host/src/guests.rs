//! The knobs that are a VM's own: the schedulers within its guest, set through its agent, and the
//! polling of its QEMU's IOThreads, set through its monitor.
//!
//! A VM is the QEMU process whose guest has the VM's name; a disk `NAME` is
//! QEMU's device with the id `NAME` or `ua-NAME`. Which node a disk is within the
//! guest is found anew each time (module `connection`).
//!
//! Neither a guest nor its QEMU is trusted to answer, or to say what is so: each
//! request has [`ANSWER`]; looking at one disk, saving it, setting one of its knobs
//! and putting it back have [`LOOK`] each, however many requests they are; and all
//! VMs are looked at and put back at the same time. A VM that is not reached is left alone
//! by a plan and by [`Host::reapply`], and fails any other apply before anything
//! is written. Once the user interrupts no VM is waited for; one that is being put back has another second.
//!
//! A *place* names a file of a guest or a property of its QEMU beside the host's
//! files: `plc:/sys/block/vda/queue/scheduler`, `plc:/objects/io0/poll-max-ns`.
//!
//! Properties, tested with `apply`: `guest_that_hangs_fails_the_apply_before_any_write`,
//! `guests_that_hang_are_waited_for_at_the_same_time`,
//! `guest_that_hangs_in_mid_apply_undoes_the_host_and_is_named`,
//! `guest_gone_before_the_apply_writes_nothing`, `guest_gone_before_the_rollback_is_skipped`,
//! `guest_rebooted_before_the_rollback_is_skipped`, `guest_that_was_saved_and_restored_is_put_back`,
//! `guest_that_hangs_at_rollback_does_not_keep_the_host_from_it`,
//! `guest_that_hangs_at_rollback_does_not_keep_the_host_from_later_applies`,
//! `guest_that_takes_its_time_and_lies_keeps_the_deadline_of_a_disk`,
//! `monitor_that_lies_half_applies_nothing`, `signal_ends_the_wait_for_a_guest_that_hangs`,
//! `signal_during_a_guests_write_undoes_everything`.

mod connection;
mod error;
mod files;
mod restore;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use rtvirtio_spec::guests::{FoundGuest, Guests};
use rtvirtio_spec::settings::{Change, Knob, Knobs};
use rtvirtio_units::{DiskName, IoThreadName, VmName};

use crate::knobs::Schedulers;
use crate::qemu::QemuProcess;
use crate::record::GuestRecord;
use crate::{Host, HostError, Step};

use connection::Connection;
pub use error::GuestFault;

/// How long a monitor or an agent may take for one answer.
const ANSWER: Duration = Duration::from_secs(2);
/// How long one VM may take for all that is asked of it about one disk at a time: with libvirt each
/// question is a process.
const LOOK: Duration = Duration::from_secs(6);
/// How long from the user's signal on an answer may take where knobs are put back: an agent may be
/// busy with the command that was interrupted.
const PUT_BACK_AFTER_SIGNAL: Duration = Duration::from_secs(1);

/// Which of a VM's own knobs a plan is about.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GuestTopology {
    /// Disks whose schedulers within the guest are set.
    pub disks: BTreeSet<DiskName>,
    /// IOThreads of its QEMU.
    pub iothreads: BTreeSet<IoThreadName>,
}

impl GuestTopology {
    /// What `guests` is about.
    pub(crate) fn of(guests: &Guests) -> BTreeMap<VmName, Self> {
        let of_vm = |(vm, settings): (&VmName, &rtvirtio_spec::guests::GuestSettings)| {
            let disks = settings.disks.keys().cloned().collect();
            let iothreads = settings.poll_max.keys().cloned().collect();
            (vm.clone(), Self { disks, iothreads })
        };
        guests.0.iter().map(of_vm).collect()
    }
}

/// Does `work` for each of `items` at the same time.
fn at_once<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    if let [only] = items {
        return vec![work(only)];
    }
    thread::scope(|scope| {
        let running: Vec<_> = items.iter().map(|item| scope.spawn(|| work(item))).collect();
        let joined = running.into_iter().map(|thread| match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        joined.collect()
    })
}

/// The QEMU process of a VM.
fn process_of<'a>(
    processes: &'a [QemuProcess],
    vm: &VmName,
) -> Result<&'a QemuProcess, GuestFault> {
    let mut named = processes.iter().filter(|p| p.name.as_deref() == Some(vm.as_str()));
    let first = named.next().ok_or(GuestFault::NotRunning)?;
    match named.next() {
        None => Ok(first),
        Some(second) => Err(GuestFault::SameName { pids: [first.pid, second.pid] }),
    }
}

/// The VMs that an apply is about, connected: nobody else gets an answer from them meanwhile.
pub(crate) struct Connected(BTreeMap<VmName, Connection>);

/// VMs, each connected or not.
type Opened = Vec<(VmName, Result<Connection, GuestFault>)>;

impl Connected {
    /// Connects to all, and sees that each has all that `topology` names.
    pub(crate) fn open(
        host: &Host,
        topology: &BTreeMap<VmName, GuestTopology>,
    ) -> Result<Self, HostError> {
        let opened = Self::open_each(host, topology)?.into_iter();
        let opened = opened.map(|(vm, opened)| match opened {
            Ok(connection) => Ok((vm, connection)),
            Err(fault) => Err(of_vm(&vm, fault)),
        });
        Ok(Self(opened.collect::<Result<_, _>>()?))
    }

    /// Those of which [`Self::open`] would fail, and why.
    pub(crate) fn unreached(
        host: &Host,
        topology: &BTreeMap<VmName, GuestTopology>,
    ) -> Result<BTreeMap<VmName, GuestFault>, HostError> {
        let opened = Self::open_each(host, topology)?.into_iter();
        let unreached = opened.filter_map(|(vm, opened)| Some((vm, opened.err()?))).collect();
        // One that was not waited for may be reached.
        host.check_interrupted()?;
        Ok(unreached)
    }

    fn open_each(
        host: &Host,
        topology: &BTreeMap<VmName, GuestTopology>,
    ) -> Result<Opened, HostError> {
        if topology.is_empty() {
            return Ok(Vec::new());
        }
        let processes = host.qemu_processes()?;
        let vms: Vec<_> = topology.iter().collect();
        let opened = at_once(&vms, |(vm, topology)| {
            let process = process_of(&processes, vm)?;
            let mut connection = Connection::open(host, vm, process)?;
            connection.look_at(topology)?;
            Ok(connection)
        });
        Ok(vms.into_iter().map(|(vm, _)| vm.clone()).zip(opened).collect())
    }

    /// What all of them showed.
    pub(crate) fn knobs(&self) -> Knobs {
        self.0.iter().flat_map(|(vm, connection)| connection.found.knobs(vm)).collect()
    }

    /// The schedulers that the knob's disk has; `None` if the knob is of no disk.
    pub(crate) fn schedulers(&self, knob: &Knob) -> Result<Option<Schedulers>, HostError> {
        let unknown = || HostError::UnknownKnob { knob: Box::new(knob.clone()) };
        let found = &knob.vm().and_then(|vm| self.0.get(vm)).ok_or_else(unknown)?.found;
        match knob {
            Knob::GuestScheduler { disk, .. } | Knob::GuestBfq { disk, .. } => {
                let queue = found.disks.get(disk).ok_or_else(unknown)?;
                let (offered, selected) = (queue.offered.clone(), queue.selected.clone());
                Ok(Some(Schedulers { offered, selected, is_fixed: false }))
            }
            Knob::PollMax { iothread, .. } if found.iothreads.contains_key(iothread) => Ok(None),
            _ => Err(unknown()),
        }
    }

    /// Saves what `changes` would overwrite.
    pub(crate) fn save(&mut self, changes: &[Change]) -> Result<Vec<GuestRecord>, HostError> {
        let mut records: BTreeMap<VmName, GuestRecord> = BTreeMap::new();
        let is_own = |knob: &&Knob| knob.device().is_none() && !knob.is_of_data_plane();
        for knob in changes.iter().map(|c| &c.knob).filter(is_own) {
            let (vm, connection) = self.of(knob)?;
            let record = records.entry(vm.clone()).or_insert_with(|| connection.record());
            connection.save(knob, record).map_err(|fault| of_vm(&vm, fault))?;
        }
        Ok(records.into_values().collect())
    }

    /// Writes a guest's or a QEMU's knob and reads it back.
    pub(crate) fn write(&mut self, host: &Host, knob: &Knob, text: &str) -> Result<(), HostError> {
        let (_, connection) = self.of(knob)?;
        let file = connection.place(knob)?;
        host.step(|| Step::BeforeWrite { file: file.clone(), text: text.to_owned() })?;
        let written = connection.write(knob, text);
        host.step(|| Step::AfterWrite { file: file.clone(), text: text.to_owned() })?;
        let read = written.and_then(|()| connection.read(knob));
        let (knob, wanted) = (Box::new(knob.clone()), text.to_owned());
        match read {
            Ok(found) if found == text => Ok(()),
            Ok(found) => Err(HostError::ReadBackDiffers { knob, file, wanted, found }),
            Err(fault) => {
                let fault = Box::new(fault);
                Err(HostError::GuestWriteFailed { knob, file, wanted, fault })
            }
        }
    }

    fn of(&mut self, knob: &Knob) -> Result<(VmName, &mut Connection), HostError> {
        let unknown = || HostError::UnknownKnob { knob: Box::new(knob.clone()) };
        let vm = knob.vm().ok_or_else(unknown)?;
        Ok((vm.clone(), self.0.get_mut(vm).ok_or_else(unknown)?))
    }
}

fn of_vm(vm: &VmName, fault: GuestFault) -> HostError {
    HostError::Guest { vm: vm.clone(), fault: Box::new(fault) }
}

/// A file of a guest, or a property of its QEMU, beside the host's files.
fn place(vm: &VmName, path: &str) -> PathBuf {
    Path::new(&format!("{vm}:{path}")).to_owned()
}

impl Host {
    /// What those of `vms` that run show of their own knobs, the schedulers of the disks given with
    /// each among them. A VM of which nothing could be set has no entry. What is not seen within
    /// seconds is said.
    ///
    /// # Errors
    /// If `/proc` cannot be listed, or the user interrupts.
    pub fn find_guests(
        &self,
        vms: &BTreeMap<VmName, BTreeSet<DiskName>>,
    ) -> Result<BTreeMap<VmName, FoundGuest>, HostError> {
        let processes = self.qemu_processes()?;
        let vms: Vec<_> = vms.iter().collect();
        let found = at_once(&vms, |(vm, disks)| {
            let alone = |fault: &GuestFault| FoundGuest {
                unseen: vec![format!("planned for on the host alone: {fault}")],
                ..FoundGuest::default()
            };
            let process = match process_of(&processes, vm) {
                Ok(process) => process,
                Err(GuestFault::NotRunning) if disks.is_empty() => return None,
                Err(fault) => return Some(alone(&fault)),
            };
            match Connection::open(self, vm, process) {
                Ok(connection) => Some(connection.look_around(disks)),
                // There is nothing that it keeps from being set.
                Err(_) if disks.is_empty() && process.iothreads.is_empty() => None,
                Err(fault) => Some(alone(&fault)),
            }
        });
        // What was not waited for is not unseen.
        self.check_interrupted()?;
        let found = vms.into_iter().map(|(vm, _)| vm.clone()).zip(found);
        Ok(found.filter_map(|(vm, found)| Some((vm, found?))).collect())
    }
}
