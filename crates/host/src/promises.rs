//! The data plane's knobs: service curves of physical devices, and what each disk is promised there.
//!
//! They are set by its control API, one at a time, and put back in the other order: disks, then the
//! schedules that they used. A data plane that has ended took them with it, and one that was started
//! since has its own: both are skipped. One that does not answer is asked once, not for each knob, and its record
//! is kept for a later rollback. Nor is it waited for when the user ends the command.
//!
//! Properties: `plan_is_applied_to_the_data_plane_verified_and_rolled_back` (with a real one),
//! `data_plane_that_hangs_does_not_keep_the_host_from_later_applies`,
//! `signal_ends_the_wait_for_a_data_plane_that_hangs`,
//! `data_plane_that_ends_while_it_is_put_back_is_skipped`.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rtvirtio_spec::control::{ScheduleCurve, SetQos};
use rtvirtio_spec::plan::data_plane::{DataPlane, found};
use rtvirtio_spec::settings::{Change, Knob, Knobs};
use rtvirtio_spec::specification::{Backend, Specification};
use rtvirtio_units::{DiskName, Name, Nanos};
use serde::de::DeserializeOwned;

use crate::dataplane::{ControlClient, ControlFault};
use crate::record::DataPlaneRecord;
use crate::restoration::{Restoration, Skipped};
use crate::{Host, HostError, Step};

/// How long a data plane may take to show what it has before something is put back: it reads and
/// tells, and waits for no queue.
const LOOK: Duration = Duration::from_secs(10);
/// The same from the user's signal on.
const LOOK_AFTER_SIGNAL: Duration = Duration::from_millis(200);
/// How long from the user's signal on a data plane that has answered may take to put a knob back: the device may be
/// busy with the change that was interrupted.
const PUT_BACK_AFTER_SIGNAL: Duration = Duration::from_secs(3);

/// Which of a data plane's knobs a plan is about.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DataPlaneTopology {
    /// Its control socket.
    pub control: PathBuf,
    /// Schedules of physical devices.
    pub schedules: BTreeSet<Name>,
    /// Its devices: disks of VMs. They must be there.
    pub disks: BTreeSet<DiskName>,
}

impl DataPlaneTopology {
    /// What a specification is about, if the data plane serves a VM of it.
    pub(crate) fn of_specification(specification: &Specification) -> Option<Self> {
        let served = specification.vms.iter().filter(|vm| vm.backend == Backend::VhostUser);
        let disks: Vec<_> = served.flat_map(|vm| &vm.disks).collect();
        let control = specification.data_plane.clone().filter(|_| !disks.is_empty())?;
        Some(Self {
            control,
            schedules: disks.iter().map(|disk| Name::from(disk.device.clone())).collect(),
            disks: disks.iter().map(|disk| disk.name.clone()).collect(),
        })
    }

    /// What `settings` are about.
    pub(crate) fn of(settings: &DataPlane) -> Self {
        Self {
            control: settings.control.clone(),
            schedules: settings.schedules.keys().cloned().collect(),
            disks: settings.disks.keys().cloned().collect(),
        }
    }
}

/// A data plane that answers.
pub(crate) struct Plane {
    client: ControlClient,
    started: Nanos,
    topology: DataPlaneTopology,
    found: Knobs,
}

impl Plane {
    /// Looks at the one that `topology` is about, if it is about any, and sees that each disk is
    /// there.
    pub(crate) fn open(
        host: &Host,
        topology: Option<&DataPlaneTopology>,
    ) -> Result<Option<Self>, HostError> {
        let Some(topology) = topology else { return Ok(None) };
        let client = host.control(&topology.control);
        let snapshot = client.snapshot().map_err(|fault| of_plane(&topology.control, fault))?;
        let is_there = |disk: &&DiskName| snapshot.devices.iter().any(|d| d.name == **disk);
        if let Some(disk) = topology.disks.iter().find(|disk| !is_there(disk)) {
            let (control, disk) = (topology.control.clone(), disk.clone());
            return Err(HostError::NoDataPlaneDevice { control, disk });
        }
        let found = found(&snapshot, &topology.schedules, &topology.disks);
        let topology = topology.clone();
        Ok(Some(Self { client, started: snapshot.started_ns, topology, found }))
    }

    /// What it showed.
    pub(crate) fn knobs(&self) -> Knobs {
        self.found.clone()
    }

    /// Saves what `changes` would overwrite.
    pub(crate) fn save(&self, changes: &[Change]) -> Option<DataPlaneRecord> {
        let old = changes.iter().map(|change| &change.knob).filter(|knob| knob.is_of_data_plane());
        let old: Vec<_> = old.map(|knob| (knob.clone(), self.found.get(knob).cloned())).collect();
        let control = self.topology.control.clone();
        (!old.is_empty()).then_some(DataPlaneRecord { control, started: self.started, old })
    }

    /// Sets a knob and reads it back.
    pub(crate) fn write(&self, host: &Host, knob: &Knob, text: &str) -> Result<(), HostError> {
        let file = place(&self.topology.control, knob);
        host.step(|| Step::BeforeWrite { file: file.clone(), text: text.to_owned() })?;
        let written = set(&self.client, knob, Some(text));
        host.step(|| Step::AfterWrite { file: file.clone(), text: text.to_owned() })?;
        let read = written.and_then(|()| {
            let snapshot = self.client.snapshot()?;
            Ok(found(&snapshot, &self.topology.schedules, &self.topology.disks))
        });
        let (wanted, boxed) = (text.to_owned(), Box::new(knob.clone()));
        match read {
            Ok(found) if found.get(knob).is_some_and(|found| found == text) => Ok(()),
            Ok(mut found) => {
                let found = found.remove(knob).unwrap_or_default();
                Err(HostError::ReadBackDiffers { knob: boxed, file, wanted, found })
            }
            Err(fault) => {
                let fault = Box::new(fault);
                Err(HostError::DataPlaneWriteFailed { knob: boxed, wanted, fault })
            }
        }
    }
}

/// Whether nobody listens there any more.
fn is_gone(fault: &ControlFault) -> bool {
    let ControlFault::Connect { source, .. } = fault else { return false };
    matches!(source.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

fn of_plane(control: &Path, fault: ControlFault) -> HostError {
    HostError::DataPlane { control: control.to_owned(), fault: Box::new(fault) }
}

/// A knob beside the host's files: `/run/rtvirtio/control.sock:/v1/devices/root/qos`.
fn place(control: &Path, knob: &Knob) -> PathBuf {
    PathBuf::from(format!("{}:{}", control.display(), path_of(knob).unwrap_or_default()))
}

/// Its path in the control API.
fn path_of(knob: &Knob) -> Option<String> {
    match knob {
        Knob::Schedule { schedule } => Some(format!("/v1/schedules/{schedule}")),
        Knob::Qos { disk } => Some(format!("/v1/devices/{disk}/qos")),
        _ => None,
    }
}

/// Sets a knob, or takes it away. A plan's promises were admitted together: they are not asked for
/// one by one again.
fn set(client: &ControlClient, knob: &Knob, text: Option<&str>) -> Result<(), ControlFault> {
    fn parse<T: DeserializeOwned>(text: &str) -> Result<T, ControlFault> {
        serde_json::from_str(text).map_err(|error| ControlFault::Malformed(error.to_string()))
    }
    let Some(path) = path_of(knob) else { return Ok(()) };
    match (text, knob) {
        (None, _) => client.delete(&path),
        (Some(text), Knob::Schedule { .. }) => {
            client.change("PUT", &path, &parse::<ScheduleCurve>(text)?, &[])
        }
        (Some(text), _) => {
            client.change("PUT", &format!("{path}?force=true"), &parse::<SetQos>(text)?, &[])
        }
    }
}

/// Refuses a text that is not what the control API takes.
pub(crate) fn check(knob: &Knob, text: &str) -> bool {
    match knob {
        Knob::Schedule { .. } => serde_json::from_str::<ScheduleCurve>(text).is_ok(),
        _ => serde_json::from_str::<SetQos>(text).is_ok(),
    }
}

impl Host {
    /// What a data plane shows of its knobs that `topology` names.
    ///
    /// # Errors
    /// If it does not answer, or lacks a device.
    pub fn find_data_plane(&self, topology: &DataPlaneTopology) -> Result<Knobs, HostError> {
        Ok(Plane::open(self, Some(topology))?.map(|plane| plane.knobs()).unwrap_or_default())
    }

    /// Puts back what a record holds; gives whether nothing is left of it.
    pub(crate) fn restore_data_plane(
        &self,
        record: &DataPlaneRecord,
        done: &mut Restoration,
    ) -> Result<bool, HostError> {
        let client = self.control(&record.control);
        let gone = || Skipped::DataPlane { control: record.control.clone() };
        let silent = |fault: &ControlFault| {
            format!("the data plane at {} does not answer: {fault}", record.control.display())
        };
        let look = client.clone().with_timeout(LOOK).with_grace(LOOK_AFTER_SIGNAL);
        let client = client.with_grace(PUT_BACK_AFTER_SIGNAL);
        let snapshot = match look.snapshot() {
            Ok(snapshot) if snapshot.started_ns == record.started => snapshot,
            Ok(_) => {
                done.skip(gone());
                return Ok(true);
            }
            Err(fault) if is_gone(&fault) => {
                done.skip(gone());
                return Ok(true);
            }
            Err(fault) => {
                done.failures.push(silent(&fault));
                return Ok(false);
            }
        };
        let names = record.old.iter().map(|(knob, _)| knob);
        let (mut schedules, mut disks) = (BTreeSet::new(), BTreeSet::new());
        for knob in names {
            match knob {
                Knob::Schedule { schedule } => drop(schedules.insert(schedule.clone())),
                Knob::Qos { disk } => drop(disks.insert(disk.clone())),
                _ => {}
            }
        }
        let current = found(&snapshot, &schedules, &disks);
        // Knobs are in order of application.
        let mut old: Vec<_> = record.old.iter().collect();
        old.sort();
        let mut is_back = true;
        for (knob, old) in old.into_iter().rev() {
            // A change that nobody waited for may come yet, and then is the one before this.
            let is_same = current.get(knob) == old.as_ref();
            let file = place(&record.control, knob);
            let text = old.clone().unwrap_or_default();
            self.step(|| Step::BeforeWrite { file: file.clone(), text: text.clone() })?;
            let written = set(&client, knob, old.as_deref());
            self.step(|| Step::AfterWrite { file: file.clone(), text: text.clone() })?;
            match written {
                Ok(()) | Err(ControlFault::Refused { status: 404, .. }) if is_same => {}
                Ok(()) => done.restored.push((file, text)),
                // The disk was removed since, or others use the schedule by now.
                Err(ControlFault::Refused { status: 404 | 409, .. }) => {
                    done.skip(Skipped::DataPlaneKnob { knob: knob.clone() });
                }
                Err(fault @ ControlFault::Refused { .. }) => {
                    is_back = false;
                    done.failures.push(format!("{}: {fault}", file.display()));
                }
                // It has ended meanwhile.
                Err(fault) if is_gone(&fault) => {
                    done.skip(gone());
                    return Ok(true);
                }
                // What is left would take as long each.
                Err(fault) => {
                    done.failures.push(silent(&fault));
                    return Ok(false);
                }
            }
        }
        Ok(is_back)
    }
}
