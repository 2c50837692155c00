//! Applying a plan's changes, undoing them, confirming them.
//!
//! Algorithm of `apply`, under the host's lock:
//!
//! 1. Finish what a dead process left: an apply that stopped half way, one
//!    whose deadline passed, or a rollback.
//! 2. Look before writing: devices are the plan's, cgroups are there, guests
//!    answer, values are in range, schedulers are offered, current knobs are
//!    those observed.
//! 3. Journal every old value, then write the knobs in their order and read
//!    each back. On the first failure put everything back.
//! 4. Settle the journal, or leave it unconfirmed with a deadline.
//!
//! A second apply keeps the values from before the first, so a rollback
//! returns to the state before rtvirtio; undoing an apply that failed or was
//! not confirmed returns to the state before that apply. A guest or a data plane that hangs
//! then keeps neither the host from its state nor later applies from theirs: it
//! is reported once, and what it did not take is left to a later rollback.
//!
//! A calibration or benchmark has a journal of its own, and puts a device's knobs back as it found them.
//! So it may begin on a device that a plan was applied to; but nothing is applied or put back there until it has ended.
//! A lock that both take keeps it from beginning between the check of its journal and the last write. It is taken after the
//! host's own lock, or the measurement's, and while it is held no other one is waited for.
//!
//! Properties: `rollback_after_crash_at_any_step_restores`,
//! `next_apply_after_crash_at_any_step_succeeds`,
//! `rollback_itself_crashing_at_any_step_restores`, `second_apply_keeps_the_original_values`,
//! `failed_write_undoes_everything`, `stale_plan_writes_nothing`,
//! `unconfirmed_apply_is_reverted_by_the_watchdog`,
//! `apply_that_died_is_reverted_by_the_watchdog_at_once`,
//! `expired_apply_is_reverted_by_the_next_command`,
//! `rollback_restores_where_nothing_can_be_written`, `apply_that_cannot_settle_its_journal_is_undone`,
//! `device_that_is_measured_is_neither_set_nor_put_back`,
//! `calibration_does_not_begin_while_a_plan_is_applied`,
//! `expired_apply_is_reverted_once_its_device_is_not_measured_any_more`,
//! `guest_that_hangs_at_an_undo_does_not_keep_the_host_from_later_applies`,
//! `data_plane_that_hangs_does_not_keep_the_host_from_later_applies`.

use std::path::Path;
use std::thread;
use std::time::Duration;

use rtvirtio_spec::settings::{COST_AUTO, COST_OFF, Change, Knob, Knobs};
use rtvirtio_units::DeviceName;
use serde::Serialize;

use crate::cgroup::Write;
use crate::guests::Connected;
use crate::journal::{Journal, Lock, Pending, Phase, StateDirectory, boot_time};
use crate::knobs::{Schedulers, check, has_module, module, observe, value, write};
use crate::promises::Plane;
use crate::record::Record;
use crate::restoration::Restoration;
use crate::restore::save;
use crate::sysfs::DeviceNumber;
use crate::systemd::Units;
use crate::topology::Resolved;
use crate::{Drift, Host, HostError, Step, Topology};

/// How often the watchdog looks whether it was confirmed.
const WATCH: Duration = Duration::from_millis(500);
/// How long the watchdog waits for the lock, a hook's apply, and a measurement for an apply: one that
/// another process is at takes well under a second, and some more where guests do not answer.
pub(crate) const LOCK_WAIT: Duration = Duration::from_secs(60);

/// How long an apply or a rollback waits for a measurement that is setting something, which takes milliseconds.
const DEVICES_WAIT: Duration = Duration::from_secs(2);

/// The lock that whoever measures holds, beside the journal of what it has set.
const IN_USE: &str = "in-use";
/// The lock of whoever is setting schedulers or their knobs, a plan's or a measurement's, above that journal's directory.
const DEVICES: &str = "devices.lock";

/// The device whose scheduler a knob sets, or sets something of.
const fn of_scheduler(knob: &Knob) -> Option<&DeviceName> {
    match knob {
        Knob::Scheduler { device }
        | Knob::Bfq { device, .. }
        | Knob::CostModel { device }
        | Knob::CostQos { device }
        | Knob::CostWeight { device, .. }
        | Knob::Weight { device, .. } => Some(device),
        _ => None,
    }
}

/// How to apply.
#[derive(Debug, Clone, Copy, Default)]
pub struct ApplyOptions {
    /// Revert after this time unless confirmed. Before it calls `apply`, the caller starts a process
    /// that calls [`Host::revert_unless_confirmed`] once `apply` has returned or its process has ended.
    pub confirm_timeout: Option<Duration>,
}

/// What an apply did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Applied {
    /// How many knobs were written.
    pub written: usize,
    /// What a dead or unconfirmed apply had left, and was put back first.
    pub recovered: Option<Restoration>,
    /// Whether it is reverted unless confirmed.
    pub awaits_confirmation: bool,
}

/// What a rollback did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum RollbackOutcome {
    /// There was nothing to undo.
    Nothing,
    /// The state before rtvirtio is back, but for what is not there any more.
    RolledBack(Restoration),
}

/// How the watchdog ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum WatchdogOutcome {
    /// No apply waits any more: it was confirmed or undone.
    Settled,
    /// The deadline passed and the apply was reverted.
    Reverted(Restoration),
}

/// What the journal says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(tag = "journal", rename_all = "snake_case")]
pub enum JournalStatus {
    /// rtvirtio has changed nothing since boot.
    Clean,
    /// Changes are in place; after a rollback, those of VMs and data planes that did not take them back.
    Applied,
    /// Changes are in place and wait to be confirmed.
    AwaitsConfirmation {
        /// Until they are reverted.
        remaining: Duration,
    },
    /// A process died while it changed knobs, or a deadline passed: the next
    /// `apply`, `verify` or `rollback` puts them back.
    Unfinished,
}

impl Host {
    /// Applies `changes`, all or none.
    ///
    /// # Errors
    /// See [`HostError`]; after any but [`HostError::UndoIncomplete`] and
    /// [`HostError::Interrupted`] the knobs are as before.
    pub fn apply(
        &self,
        topology: &Topology,
        observed: &Knobs,
        changes: &[Change],
        options: ApplyOptions,
    ) -> Result<Applied, HostError> {
        let lock = self.state.lock()?;
        let recovered = self.recover(&lock)?;
        let applied = self.apply_locked(&lock, topology, observed, changes, options)?;
        Ok(Applied { recovered, ..applied })
    }

    /// The same, once what a dead process left is recovered from.
    pub(crate) fn apply_locked(
        &self,
        _: &Lock,
        topology: &Topology,
        observed: &Knobs,
        changes: &[Change],
        options: ApplyOptions,
    ) -> Result<Applied, HostError> {
        let journal = self.state.load()?;
        if let Some(pending) = journal.as_ref().and_then(|j| j.pending.as_ref()) {
            let remaining = pending.deadline().unwrap_or_default().saturating_sub(boot_time());
            return Err(HostError::AwaitsConfirmation { remaining });
        }
        let resolved = Resolved::find(&*self.sysfs, topology)?;
        let is_set =
            |name: &DeviceName| changes.iter().any(|c| of_scheduler(&c.knob) == Some(name));
        let devices = resolved.devices.iter().filter(|(name, _)| is_set(name));
        let _devices = if self.is_measurement() {
            // No plan is applied between its look at what there is and the journal that tells of it.
            self.lock_devices(LOCK_WAIT)?
        } else {
            self.check_not_measured(devices.map(|(name, disk)| (disk.number, name)))?
        };
        let mut changes = changes.to_vec();
        changes.sort_by(|a, b| a.knob.cmp(&b.knob));
        let mut guests = Connected::open(self, &topology.guests)?;
        let plane = Plane::open(self, topology.data_plane.as_ref())?;
        self.check_changes(&resolved, &guests, &changes)?;
        let mut current = observe(&*self.sysfs, &resolved)?;
        current.extend(guests.knobs());
        current.extend(plane.iter().flat_map(Plane::knobs));
        let differences = differences(observed, &current);
        if !differences.is_empty() {
            return Err(HostError::Stale { differences });
        }
        if changes.is_empty() {
            return Ok(Applied { written: 0, recovered: None, awaits_confirmation: false });
        }

        let mut journal = match journal {
            Some(journal) => journal,
            None => Journal::new(self.boot_id()?),
        };
        let deadline_ns = || {
            let end = options.confirm_timeout.map(|t| boot_time().saturating_add(t));
            end.map(|d| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX))
        };
        let units = self.units(&resolved, &changes)?;
        let mut record = save(&*self.sysfs, &resolved, &changes, &units)?;
        record.guests = guests.save(&changes)?;
        record.data_planes = plane.iter().filter_map(|plane| plane.save(&changes)).collect();
        // From here on an end is an undo.
        self.check_interrupted()?;
        journal.pending =
            Some(Pending { phase: Phase::Applying, deadline_ns: deadline_ns(), record });
        self.store(&journal)?;
        let applying = journal.clone();
        let written = self.write_all(&resolved, (&mut guests, plane.as_ref()), &changes, &units);
        // An undo connects anew: a socket serves one client at a time.
        drop(guests);
        let settled = written.and_then(|()| {
            match (&mut journal.pending, options.confirm_timeout) {
                (Some(pending), Some(_)) => {
                    pending.phase = Phase::Unconfirmed;
                    pending.deadline_ns = deadline_ns();
                }
                _ => journal.settle(),
            }
            self.store(&journal)
        });
        if let Err(cause) = settled {
            if matches!(cause, HostError::Interrupted { .. }) {
                return Err(cause);
            }
            return Err(self.undo_failed(applying, cause));
        }
        let awaits_confirmation = options.confirm_timeout.is_some();
        Ok(Applied { written: changes.len(), recovered: None, awaits_confirmation })
    }

    /// Puts back the state before rtvirtio's first change since boot. May be repeated.
    ///
    /// # Errors
    /// [`HostError::RestoreIncomplete`] if part of it could not be restored:
    /// the journal keeps that, and a repetition tries again.
    pub fn rollback(&self) -> Result<RollbackOutcome, HostError> {
        let _lock = self.state.lock()?;
        let Some(mut journal) = self.load_of_this_boot()? else {
            return Ok(RollbackOutcome::Nothing);
        };
        let records = journal.original.iter().chain(journal.pending.iter().map(|p| &p.record));
        let _devices = self.check_not_measured(records.flat_map(Record::set_devices))?;
        if !journal.rolling_back {
            // An apply that died keeps what it found.
            let ended = |p: &&mut Pending| p.phase == Phase::Unconfirmed;
            let pending = journal.pending.as_mut().filter(ended).map(|p| &mut p.record);
            journal.original.iter_mut().chain(pending).for_each(|r| self.note_weights(r));
        }
        journal.settle();
        journal.rolling_back = true;
        self.note_progress(&journal)?;
        self.finish_rollback(journal).map(RollbackOutcome::RolledBack)
    }

    /// Compares the host with what was applied. An apply that died or was not
    /// confirmed in time is undone first, unless another process holds the lock.
    ///
    /// # Errors
    /// See [`HostError`]; a VM whose cgroup is gone is one, and one whose own knobs were set and
    /// that does not answer.
    pub fn verify(&self, topology: &Topology, wanted: &Knobs) -> Result<Vec<Drift>, HostError> {
        if self.journal_status()? == JournalStatus::Unfinished {
            match self.state.lock() {
                Ok(lock) => match self.recover(&lock) {
                    // It is undone once that has ended.
                    Ok(_) | Err(HostError::Measured { .. }) => {}
                    Err(error) => return Err(error),
                },
                // Not dead, but at work.
                Err(HostError::Locked { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        let found = self.observe(topology)?;
        let drift = |(knob, wanted): (&Knob, &String)| {
            let found = found.get(knob);
            (found != Some(wanted)).then(|| Drift {
                knob: knob.clone(),
                wanted: Some(wanted.clone()),
                found: found.cloned(),
            })
        };
        Ok(wanted.iter().filter_map(drift).collect())
    }

    /// Keeps an apply that waits to be confirmed.
    ///
    /// # Errors
    /// [`HostError::NothingToConfirm`], or [`HostError::ConfirmedTooLate`]
    /// after the deadline: then it is reverted here.
    pub fn confirm(&self) -> Result<(), HostError> {
        let lock = self.state.lock()?;
        if self.recover(&lock)?.is_some() {
            return Err(HostError::ConfirmedTooLate);
        }
        let mut journal = self.state.load()?.ok_or(HostError::NothingToConfirm)?;
        if journal.pending.is_none() {
            return Err(HostError::NothingToConfirm);
        }
        journal.settle();
        self.store(&journal)
    }

    /// Blocks until the apply that waits to be confirmed is settled, or its
    /// deadline passes, and then reverts it, once its devices are not measured; one that stopped half way at once. For
    /// a process of its own.
    ///
    /// # Errors
    /// See [`HostError`].
    pub fn revert_unless_confirmed(&self) -> Result<WatchdogOutcome, HostError> {
        loop {
            // Without the lock: a journal is replaced whole.
            let pending = self.load_of_this_boot()?.and_then(|j| j.pending);
            let remaining = match &pending {
                // Its process has died, or another one is at work, for which the lock waits.
                Some(pending) if pending.phase == Phase::Applying => Duration::ZERO,
                pending => match pending.as_ref().and_then(Pending::deadline) {
                    Some(deadline) => deadline.saturating_sub(boot_time()),
                    None => return Ok(WatchdogOutcome::Settled),
                },
            };
            if !remaining.is_zero() {
                thread::sleep(remaining.min(WATCH));
                continue;
            }
            let lock = match self.state.lock_within("lock", LOCK_WAIT, None) {
                // Whoever has it for so long may never give it back; if it does, this is still to be done.
                Err(HostError::Locked { .. }) => continue,
                lock => lock?,
            };
            match self.recover(&lock) {
                Err(HostError::Measured { .. }) => {}
                Ok(None) => return Ok(WatchdogOutcome::Settled),
                Ok(Some(done)) => return Ok(WatchdogOutcome::Reverted(done)),
                Err(error) => return Err(error),
            }
            drop(lock);
            thread::sleep(WATCH);
        }
    }

    /// What the journal says.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn journal_status(&self) -> Result<JournalStatus, HostError> {
        let Some(journal) = self.load_of_this_boot()? else {
            return Ok(JournalStatus::Clean);
        };
        let now = boot_time();
        if journal.rolling_back || journal.is_to_be_undone(now) {
            return Ok(JournalStatus::Unfinished);
        }
        let deadline = journal.pending.and_then(|p| p.deadline());
        Ok(deadline.map_or(JournalStatus::Applied, |d| JournalStatus::AwaitsConfirmation {
            remaining: d.saturating_sub(now),
        }))
    }

    fn check_changes(
        &self,
        resolved: &Resolved,
        guests: &Connected,
        changes: &[Change],
    ) -> Result<(), HostError> {
        let release = self.kernel_release().unwrap_or_default();
        for Change { knob, new, .. } in changes {
            if knob.is_of_data_plane() {
                check(knob, new)?;
                continue;
            }
            let schedulers = match knob.device() {
                Some(_) => Some(Schedulers::read(&*self.sysfs, resolved.of(knob)?.0)?),
                None => guests.schedulers(knob)?,
            };
            check(knob, new)?;
            let Some(schedulers) = schedulers else { continue };
            let is_scheduler = matches!(knob, Knob::Scheduler { .. } | Knob::GuestScheduler { .. });
            // What a guest has on disk is not seen from here.
            let may_load = knob.device().is_some() && !schedulers.is_fixed;
            // Where nobody can tell, the kernel says at the write whether it has it.
            let has_module = || has_module(&*self.sysfs, &release, module(new)) != Some(false);
            let can_have = || schedulers.offered.contains(new) || may_load && has_module();
            if is_scheduler && !can_have() {
                let (knob, wanted) = (Box::new(knob.clone()), new.clone());
                let offered = schedulers.offered;
                return Err(HostError::SchedulerNotOffered { knob, wanted, offered });
            }
            if let Some(of) = knob.scheduler() {
                let switch = changes.iter().find(|c| c.knob == of);
                let scheduler = switch.map_or(&schedulers.selected, |c| &c.new);
                if scheduler != "bfq" {
                    let (knob, scheduler) = (Box::new(knob.clone()), scheduler.clone());
                    return Err(HostError::NotBfq { knob, scheduler });
                }
            }
        }
        Ok(())
    }

    fn write_all(
        &self,
        resolved: &Resolved,
        (guests, plane): (&mut Connected, Option<&Plane>),
        changes: &[Change],
        units: &Units,
    ) -> Result<(), HostError> {
        let (of_host, others): (Vec<&Change>, Vec<&Change>) =
            changes.iter().partition(|c| c.knob.device().is_some());
        for Change { knob, new, .. } in others {
            match plane.filter(|_| knob.is_of_data_plane()) {
                Some(plane) => plane.write(self, knob, new)?,
                None => guests.write(self, knob, new)?,
            }
        }
        let (by_systemd, direct): (Vec<&Change>, Vec<&Change>) =
            of_host.into_iter().partition(|c| units.set(&*self.sysfs, resolved, &c.knob));
        for change in direct {
            self.write_knob(resolved, change)?;
        }
        for (unit, parts) in units.parts(&*self.sysfs, resolved) {
            self.set_planned(unit, &parts, changes)?;
        }
        for change in by_systemd {
            // systemd before 251 does not set a device's bfq weight.
            if value(&*self.sysfs, resolved, &change.knob)?.1 != change.new {
                self.write_knob(resolved, change)?;
            }
        }
        Ok(())
    }

    fn write_knob(&self, resolved: &Resolved, change: &Change) -> Result<(), HostError> {
        let Change { knob, new, .. } = change;
        let target: Write = write(resolved, knob, new)?;
        self.write(&target)?.map_err(|source| HostError::WriteRefused {
            knob: Box::new(knob.clone()),
            file: target.file.clone(),
            wanted: new.clone(),
            source,
        })?;
        let (file, found) = value(&*self.sysfs, resolved, knob)?;
        if found != *new {
            let (knob, wanted) = (Box::new(knob.clone()), new.clone());
            return Err(HostError::ReadBackDiffers { knob, file, wanted, found });
        }
        Ok(())
    }

    fn undo_failed(&self, applying: Journal, cause: HostError) -> HostError {
        if matches!(cause, HostError::State { .. }) {
            // The settled journal may be in its place already. If this fails
            // too, what is there leads a rollback to the same values.
            let _ = self.store(&applying);
        }
        match self.undo_pending(applying) {
            Ok(_) => cause,
            Err(HostError::RestoreIncomplete { failures, .. }) => {
                HostError::UndoIncomplete { cause: Box::new(cause), failures }
            }
            Err(interrupted @ HostError::Interrupted { .. }) => interrupted,
            Err(other) => {
                let failures = vec![other.to_string()];
                HostError::UndoIncomplete { cause: Box::new(cause), failures }
            }
        }
    }

    /// Finishes what a dead process or a passed deadline left.
    pub(crate) fn recover(&self, _: &Lock) -> Result<Option<Restoration>, HostError> {
        let Some(journal) = self.load_of_this_boot()? else {
            // Of another boot, if any: its knobs died with it.
            return self.state.remove().map(|()| None);
        };
        if journal.rolling_back {
            let set = journal.original.iter().flat_map(Record::set_devices);
            let _devices = self.check_not_measured(set)?;
            return self.finish_rollback(journal).map(Some);
        }
        if journal.is_to_be_undone(boot_time()) {
            let record = journal.pending.iter().map(|pending| &pending.record);
            let _devices = self.check_not_measured(record.flat_map(Record::set_devices))?;
            return self.undo_pending(journal);
        }
        Ok(None)
    }

    /// Whether this is a calibration or benchmark: what one applies on its own device has its state below.
    fn is_measurement(&self) -> bool {
        self.state.0.starts_with(&self.measurements.0)
    }

    /// Keeps measurements from setting schedulers as long as it is held, or plans, if this is one.
    fn lock_devices(&self, wait: Duration) -> Result<Option<Lock>, HostError> {
        let Some(directory) = self.measurements.0.parent() else { return Ok(None) };
        let directory = StateDirectory(directory.to_owned());
        match directory.lock_within(DEVICES, wait, self.interrupted.as_deref()) {
            // Whoever cannot write there, with a state directory elsewhere, can keep nobody from it.
            Err(HostError::State { .. }) => Ok(None),
            lock => lock.map(Some),
        }
    }

    /// Sees that no calibration or benchmark has set a scheduler or its knobs on one of `devices`: in the end it will put back
    /// what it found, over what would be written now. What one that has died left is put back first. As long as the
    /// lock is held none sets any.
    fn check_not_measured<'a>(
        &self,
        devices: impl IntoIterator<Item = (DeviceNumber, &'a DeviceName)>,
    ) -> Result<Option<Lock>, HostError> {
        let mut devices = devices.into_iter().peekable();
        if self.is_measurement() || devices.peek().is_none() {
            return Ok(None);
        }
        let lock = match self.lock_devices(DEVICES_WAIT) {
            // Its holder hangs, as on a device that answers no more, and must not keep others from theirs. What it sets there is
            // in its journal before.
            Err(HostError::Locked { .. }) => None,
            lock => lock?,
        };
        // A journal that cannot be read is for whoever measures next: nobody knows what is in it.
        let Ok(Some(journal)) = self.measurements.load() else { return Ok(lock) };
        if journal.boot_id != self.boot_id()? {
            return Ok(lock);
        }
        let pending = journal.pending.iter().map(|pending| &pending.record);
        let records: Vec<&Record> = journal.original.iter().chain(pending).collect();
        let is_measured = |number: DeviceNumber| {
            let mut set = records.iter().filter_map(|record| record.devices.get(&number));
            set.any(|device| device.is_set() && self.is_same_device(number, device))
        };
        let Some((_, device)) = devices.find(|(number, _)| is_measured(*number)) else {
            return Ok(lock);
        };
        if let Ok(_lock) = self.measurements.lock_within(IN_USE, Duration::ZERO, None) {
            // What cannot be put back keeps nobody from the host: the next calibration or `rollback` tells of it.
            let _ = Self { state: self.measurements.clone(), ..self.clone() }.rollback();
            return Ok(lock);
        }
        Err(HostError::Measured { device: device.clone(), pid: self.measurements.last_holder() })
    }

    /// Undoes the pending apply, if there is one.
    fn undo_pending(&self, mut journal: Journal) -> Result<Option<Restoration>, HostError> {
        let Some(pending) = &mut journal.pending else {
            return Ok(None);
        };
        // Should this die too, the next one goes on.
        if pending.phase != Phase::Applying {
            self.note_weights(&mut pending.record);
            pending.phase = Phase::Applying;
            self.note_progress(&journal)?;
        }
        let record = journal.pending.take().map(|p| p.record).unwrap_or_default();
        self.restore_all_but(journal, &record).map(Some)
    }

    fn finish_rollback(&self, mut journal: Journal) -> Result<Restoration, HostError> {
        let record = journal.original.take().unwrap_or_default();
        journal.rolling_back = false;
        self.restore_all_but(journal, &record)
    }

    /// Puts back `record`, and leaves `rest` to a later rollback, with those knobs of VMs' own and of
    /// data planes that could not be put back. If some of the host's could not, the journal stays as it is.
    fn restore_all_but(
        &self,
        mut rest: Journal,
        record: &Record,
    ) -> Result<Restoration, HostError> {
        let (mut done, left) = self.restore(record)?;
        if let Some(left) = left {
            if left != Record::default() {
                rest.original = Some(rest.original.unwrap_or_default().merged(left));
            }
            let noted = if rest.original.is_some() { self.store(&rest) } else { self.discard() };
            match noted {
                // What is back has to be told all the same. The journal still has all of it, to be put back once more.
                Err(HostError::State { action, file, source }) => {
                    done.failures.push(format!("cannot {action} {}: {source}", file.display()));
                }
                noted => noted?,
            }
        }
        if done.failures.is_empty() {
            return Ok(done);
        }
        let failures = done.failures.clone();
        Err(HostError::RestoreIncomplete { failures, done: Box::new(done) })
    }

    fn load_of_this_boot(&self) -> Result<Option<Journal>, HostError> {
        let Some(journal) = self.state.load()? else { return Ok(None) };
        let is_of_this_boot = journal.boot_id == self.boot_id()?;
        Ok(is_of_this_boot.then_some(journal))
    }

    /// Which boot this is. A journal of which that is not known is nobody else's: it would be thrown away with all that it has
    /// to put back.
    fn boot_id(&self) -> Result<String, HostError> {
        let file = Path::new("/proc/sys/kernel/random/boot_id");
        let text = self.sysfs.read(file);
        let text = text.map_err(|source| HostError::Read { file: file.to_owned(), source })?;
        Ok(text.trim().to_owned())
    }

    /// Notes how far an undo has come, where that can be written. It needs no note: whatever journal is in its place has the
    /// old values, and putting them back once more does no harm. Without one, a full `/run` would keep a host from its state;
    /// only, should this process die, nobody but the next rollback knows that an undo had begun.
    fn note_progress(&self, journal: &Journal) -> Result<(), HostError> {
        match self.store(journal) {
            Err(HostError::State { .. }) => Ok(()),
            stored => stored,
        }
    }

    fn store(&self, journal: &Journal) -> Result<(), HostError> {
        self.step(|| Step::BeforeJournal)?;
        self.state.stage(journal)?;
        self.step(|| Step::JournalStaged)?;
        self.state.commit()?;
        self.step(|| Step::JournalCommitted)
    }

    fn discard(&self) -> Result<(), HostError> {
        self.step(|| Step::BeforeJournalRemoval)?;
        self.state.remove()?;
        self.step(|| Step::JournalRemoved)
    }
}

fn differences(observed: &Knobs, current: &Knobs) -> Vec<Drift> {
    let mut knobs: Vec<&Knob> = observed.keys().chain(current.keys()).collect();
    knobs.sort();
    knobs.dedup();
    let drift = |knob: &Knob| {
        let (wanted, found) = (observed.get(knob), current.get(knob));
        // A plan that is older than iocost among the knobs says nothing of it: it was at rest.
        let at_rest = match knob {
            Knob::CostModel { .. } => Some(COST_AUTO),
            Knob::CostQos { .. } => Some(COST_OFF),
            _ => None,
        };
        let text = |value: Option<&String>| value.cloned().or(at_rest.map(str::to_owned));
        (text(wanted) != text(found)).then(|| Drift {
            knob: knob.clone(),
            wanted: wanted.cloned(),
            found: found.cloned(),
        })
    };
    knobs.into_iter().filter_map(drift).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plan_that_says_nothing_of_iocost_is_not_stale_where_it_is_off() {
        let device = DeviceName::new("data").unwrap();
        let qos = Knob::CostQos { device: device.clone() };
        let at_rest: Knobs = [
            (Knob::CostModel { device }, COST_AUTO.to_owned()),
            (qos.clone(), COST_OFF.to_owned()),
        ]
        .into();
        assert!(differences(&Knobs::new(), &at_rest).is_empty());
        let mut on = at_rest;
        on.insert(qos, "rpct=95.00".to_owned());
        assert_eq!(differences(&Knobs::new(), &on).len(), 1);
    }
}
