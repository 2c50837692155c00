//! What disks are promised of a physical device, and whether that can be kept.

use rtvirtio_qos as qos;
use rtvirtio_qos::admission::{Curve, Wish};
use rtvirtio_spec::serve;
use rtvirtio_units::{DiskName, Nanos};

use super::PlaneError;
use super::iothreads::State;
use crate::schedule::Member;

type Terms = (qos::Share, Option<qos::Promise>, Vec<(serve::IoPriority, qos::Promise)>);

/// What a disk and its tasks get, in the schedule's terms.
pub(super) fn terms(qos: &serve::Qos) -> Terms {
    let rate = |rate: &serve::Rate| qos::Rate {
        iops: rate.iops,
        bandwidth: rate.bandwidth,
        burst: rate.burst,
    };
    let promise = |p: &serve::Promise| qos::Promise { deadline: p.deadline, rate: rate(&p.rate) };
    let share = qos::Share { weight: qos.weight, limit: qos.limit.as_ref().map(rate) };
    let tasks = qos.tasks.iter().map(|task| (task.ioprio, promise(&task.promise)));
    (share, qos.promise.as_ref().map(promise), tasks.collect())
}

/// What the 99.9th percentile of a device's service time is of the mean, where nobody measured it:
/// of a solid-state disk (2.4 of ref-4x250).
const SPREAD: f64 = 3.0;

/// What a disk and its tasks would be promised.
fn wishes(qos: &serve::Qos) -> Vec<Wish> {
    let (_, own, tasks) = terms(qos);
    let promises = own.into_iter().chain(tasks.into_iter().map(|(_, promise)| promise));
    // How many requests a driver has under way is not known here.
    promises.map(|promise| Wish { promise, depth: None, percentile: None }).collect()
}

impl State {
    /// A disk's place in the schedule that it names.
    pub(super) fn member(&self, qos: &serve::Qos) -> Result<Member, PlaneError> {
        let schedule = self.schedules.get(&qos.schedule);
        let (share, promise, tasks) = terms(qos);
        let member = schedule.and_then(|schedule| schedule.join(share, promise));
        let member = member.ok_or_else(|| PlaneError::NoSchedule(qos.schedule.clone()))?;
        Ok(tasks.into_iter().fold(member, |member, (ioprio, p)| member.with_task(ioprio, p)))
    }

    /// What each device is promised that is here or about to be.
    pub(super) fn promises(&self) -> impl Iterator<Item = (&DiskName, &serve::Qos)> {
        let served = self.devices.iter().map(|(name, served)| (name, &served.qos));
        let adding = self.adding.iter().filter_map(|(name, adding)| Some((name, adding.disk()?.0)));
        served.chain(adding).filter_map(|(name, qos)| Some((name, qos.as_ref()?)))
    }

    /// Whether `device` can be promised what `qos` says beside what the others in its schedule are.
    pub(super) fn admit(&self, device: &DiskName, qos: &serve::Qos) -> Result<(), PlaneError> {
        let Some(schedule) = self.schedules.get(&qos.schedule) else { return Ok(()) };
        let others = self.promises().filter(|(name, _)| *name != device);
        let others = others.filter(|(_, other)| other.schedule == qos.schedule);
        let others: Vec<_> = others.map(|(_, other)| wishes(other)).collect();
        let curve = Curve {
            device: schedule.status().device,
            spread: SPREAD,
            spread_decade: 0.0,
            overhead: Nanos::ZERO,
            jitter: Nanos::ZERO,
            jitter_decade: Nanos::ZERO,
        };
        match curve.refusal(&others, &wishes(qos)) {
            Some(reason) => Err(PlaneError::NotAdmitted { device: device.clone(), reason }),
            None => Ok(()),
        }
    }

    pub(super) fn set_qos(&mut self, device: &DiskName, qos: Option<serve::Qos>) {
        if let Some(served) = self.devices.get_mut(device) {
            served.qos = qos;
        }
    }
}
