//! Putting a VM's own knobs back.
//!
//! A VM whose QEMU is gone or whose guest was booted again is skipped: its knobs
//! died with it. A guest that was saved and restored since goes on with its own in another QEMU, of
//! which it has its agent. One that does not answer is a failure, and its record is kept for
//! a later rollback; once the user interrupts, an answer has less time. VMs are put back at the
//! same time and after the host, which none of them can keep from it.
//!
//! A write whose fate is unknown needs nothing special: an agent does one command
//! after the other, so what a new connection reads after its sync is what is.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::OnceLock;

use rtvirtio_units::Nanos;

use super::connection::{poll_property, start_of};
use super::files::{GuestFiles, queue_file};
use super::{ANSWER, GuestFault, LOOK, PUT_BACK_AFTER_SIGNAL, at_once, place, process_of};
use crate::qemu::{Deadline, Fault, Monitor, QemuError, QemuProcess};
use crate::record::{GuestDiskRecord, GuestRecord};
use crate::restoration::{Restoration, Skipped};
use crate::restore::{QueueFiles, restore_queue};
use crate::{Host, HostError, Step};

/// What is left of `record` if another QEMU of the VM's name was started with a guest that had run before. Whether
/// it is the same guest, its boot id tells.
fn resumed(
    record: &GuestRecord,
    processes: &[QemuProcess],
) -> Option<Result<GuestRecord, GuestFault>> {
    let process = match process_of(processes, &record.vm) {
        Ok(process) if process.is_resumed => process,
        Ok(_) | Err(GuestFault::NotRunning) => return None,
        Err(fault) => return Some(Err(fault)),
    };
    let agent = Some(process.agent_address()?);
    Some(Ok(GuestRecord { agent, poll_max: BTreeMap::new(), ..record.clone() }))
}

impl Host {
    /// Puts back what `records` hold, as far as it goes; gives those of which something is left.
    pub(crate) fn restore_guests(
        &self,
        records: &[GuestRecord],
        done: &mut Restoration,
    ) -> Result<Vec<GuestRecord>, HostError> {
        let mut left = Vec::new();
        // Asked for only where a guest's own process has gone, and then once for all of them.
        let listed = OnceLock::new();
        let processes = || {
            listed
                .get_or_init(|| crate::qemu::discover::processes(&*self.sysfs).unwrap_or_default())
        };
        let restore = |record: &GuestRecord| self.restore_guest(record, || processes().as_slice());
        for (record, result) in records.iter().zip(at_once(records, restore)) {
            let of_vm = result?;
            left.extend((!of_vm.failures.is_empty()).then(|| record.clone()));
            done.restored.extend(of_vm.restored);
            done.skipped.extend(of_vm.skipped);
            done.failures.extend(of_vm.failures);
        }
        Ok(left)
    }

    fn restore_guest<'a>(
        &self,
        record: &GuestRecord,
        processes: impl Fn() -> &'a [QemuProcess],
    ) -> Result<Restoration, HostError> {
        let mut done = Restoration::default();
        let runs = || start_of(&*self.sysfs, record.pid) == Some(record.started);
        if runs() {
            self.restore_polling(record, &mut done)?;
            self.restore_disks(record, &mut done)?;
        }
        // It may have gone meanwhile.
        if !runs() {
            done.failures.clear();
            let resumed = if record.disks.is_empty() { None } else { resumed(record, processes()) };
            match resumed {
                Some(Ok(resumed)) => self.restore_disks(&resumed, &mut done)?,
                Some(Err(fault)) => done.failures.push(failure(record, &fault)),
                None => done.skip(Skipped::Vm { vm: record.vm.clone() }),
            }
        }
        Ok(done)
    }

    fn restore_polling(
        &self,
        record: &GuestRecord,
        done: &mut Restoration,
    ) -> Result<(), HostError> {
        if record.poll_max.is_empty() {
            return Ok(());
        }
        let look = || -> Result<_, QemuError> {
            let interrupt = self.interrupt(PUT_BACK_AFTER_SIGNAL);
            let mut monitor = Monitor::at_until(&record.monitor, ANSWER, &interrupt)?;
            let threads = monitor.iothreads(ANSWER)?;
            Ok((monitor, threads))
        };
        let (mut monitor, threads) = match look() {
            Ok(found) => found,
            Err(error) => {
                done.failures.push(failure(record, &GuestFault::from(error)));
                return Ok(());
            }
        };
        for (iothread, &old) in &record.poll_max {
            let current = threads.iter().find(|t| t.id == iothread.as_str()).map(|t| t.poll_max);
            // One that was unplugged took its knob with it.
            if current.is_none_or(|c| c == old) {
                continue;
            }
            let file = place(&record.vm, &poll_property(iothread));
            let text = Nanos::get(old).to_string();
            self.step(|| Step::BeforeWrite { file: file.clone(), text: text.clone() })?;
            let set = monitor.set_poll_max(iothread.as_str(), old, ANSWER);
            self.step(|| Step::AfterWrite { file: file.clone(), text: text.clone() })?;
            match set {
                Ok(()) => done.restored.push((file, text)),
                Err(error) => {
                    done.failures.push(failure(record, &GuestFault::from(error)));
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    fn restore_disks(&self, record: &GuestRecord, done: &mut Restoration) -> Result<(), HostError> {
        let Some(address) = record.agent.as_ref().filter(|_| !record.disks.is_empty()) else {
            return Ok(());
        };
        let interrupt = self.interrupt(PUT_BACK_AFTER_SIGNAL);
        let mut files = match GuestFiles::open(address, Deadline::after(LOOK), &interrupt) {
            Ok(files) => files,
            Err(fault) => {
                done.failures.push(failure(record, &fault));
                return Ok(());
            }
        };
        if record.boot_id.as_ref() != Some(&files.boot_id) {
            done.skip(Skipped::Guest { vm: record.vm.clone() });
            return Ok(());
        }
        for (node, disk) in &record.disks {
            files.begin();
            match is_same_disk(&mut files, node, disk) {
                Ok(true) => {}
                Ok(false) => {
                    done.skip(Skipped::GuestDisk { vm: record.vm.clone(), node: node.clone() });
                    continue;
                }
                Err(fault) => {
                    done.failures.push(failure(record, &fault));
                    return Ok(());
                }
            }
            let mut queue = GuestQueue { host: self, record, node, files: &mut files, fault: None };
            let failures = restore_queue(&mut queue, &disk.queue, done)?;
            let fault = queue.fault.take();
            // One that answers no more is said once, instead of what follows from it.
            let is_over = fault.is_some();
            done.failures.extend(fault.map_or(failures, |f| vec![failure(record, &f)]));
            if is_over {
                return Ok(());
            }
        }
        Ok(())
    }
}

/// Whether the guest's disk `node` is the one that was changed, not one plugged in since.
fn is_same_disk(
    files: &mut GuestFiles,
    node: &str,
    disk: &GuestDiskRecord,
) -> Result<bool, GuestFault> {
    let is_there = files.read_optional(&queue_file(node, "scheduler"))?.is_some();
    Ok(is_there && files.diskseq(node)? == disk.diskseq)
}

fn failure(record: &GuestRecord, fault: &GuestFault) -> String {
    let disks =
        record.disks.keys().map(|node| place(&record.vm, &format!("/sys/block/{node}/queue")));
    let threads = record.poll_max.keys().map(|id| place(&record.vm, &poll_property(id)));
    let of: Vec<String> = disks.chain(threads).map(|p| p.display().to_string()).collect();
    format!("VM {} ({}): {fault}", record.vm, of.join(", "))
}

/// The queue of a guest's disk.
struct GuestQueue<'a> {
    host: &'a Host,
    record: &'a GuestRecord,
    node: &'a str,
    files: &'a mut GuestFiles,
    /// Why the guest is not asked any more.
    fault: Option<GuestFault>,
}

impl GuestQueue<'_> {
    fn place(&self, name: &str) -> PathBuf {
        place(&self.record.vm, &queue_file(self.node, name))
    }
}

impl QueueFiles for GuestQueue<'_> {
    fn text(&mut self, name: &str) -> Option<String> {
        if self.fault.is_some() {
            return None;
        }
        let text = if name == "scheduler" {
            self.files.schedulers(self.node).map(|s| Some(s.selected))
        } else {
            self.files.read_optional(&queue_file(self.node, name))
        };
        text.unwrap_or_else(|fault| {
            self.fault = Some(fault);
            None
        })
    }

    fn put_back(
        &mut self,
        name: &str,
        text: &str,
        failures: &mut Vec<String>,
        done: &mut Restoration,
    ) -> Result<(), HostError> {
        if self.fault.is_some() {
            return Ok(());
        }
        let (file, text) = (self.place(name), text.to_owned());
        self.host.step(|| Step::BeforeWrite { file: file.clone(), text: text.clone() })?;
        let written = self.files.write(&queue_file(self.node, name), &text);
        self.host.step(|| Step::AfterWrite { file: file.clone(), text: text.clone() })?;
        match written {
            Ok(()) => done.restored.push((file, text)),
            Err(GuestFault::Peer(error)) if matches!(error.fault, Fault::Refused { .. }) => {
                failures.push(format!("{}: {}", file.display(), error.fault));
            }
            Err(fault) => self.fault = Some(fault),
        }
        Ok(())
    }

    fn place_of(&self, name: &str) -> String {
        self.place(name).display().to_string()
    }
}
