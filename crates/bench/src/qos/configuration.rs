//! The configuration of the server under test.

use std::path::{Path, PathBuf};

use super::cell::Scheme;
use super::clients::Plan;
use crate::scratch::SsdConfig;

/// Bytes of each VM's disk.
pub(crate) const DISK: u64 = 256 << 20;

/// Where a VM's disk is served.
pub(crate) fn socket(directory: &Path, vm: usize) -> PathBuf {
    directory.join(format!("vm{vm}.sock"))
}

/// One IOThread; a disk for each VM, and the last for the one that writes.
pub(crate) fn configured(
    vms: &[Vec<Plan>],
    scheme: Scheme,
    model: SsdConfig,
    device: &Path,
    directory: &Path,
) -> String {
    let mut text = "version = 1\n[[iothread]]\nname = \"iot0\"\n".to_owned();
    let is_scheduled = scheme == Scheme::Qos;
    if is_scheduled {
        let slope = model.mean_service.scale(model.length_slope);
        text += &format!(
            "[[schedule]]\nname = \"device\"\nchannels = {}\nrequest_ns = {}\nkib_ns = {}\nflush_ns = {}\n",
            model.channels,
            model.mean_service.saturating_sub(slope).get(),
            slope.get() / 4,
            model.mean_service.get(),
        );
    }
    for vm in 0..=vms.len() {
        text += &format!(
            "[[device]]\nname = \"vm{vm}\"\nvm = \"vm{vm}\"\nsocket = \"{}\"\nqueues = {}\n\
             engine = {{ type = \"file\", path = \"{}\", direct = true, format = \"raw\", \
             lock = \"off\", offset = {}, size = {DISK} }}\n",
            socket(directory, vm).display(),
            vms.get(vm).map_or(1, Vec::len),
            device.display(),
            vm as u64 * DISK,
        );
        if is_scheduled {
            text += &qos(vms.get(vm).map_or(&[], Vec::as_slice));
        }
    }
    text
}

/// What a VM is promised: its tasks are one class, which has the strictest target and all their
/// rates.
pub(crate) fn qos(tasks: &[Plan]) -> String {
    let iops: f64 = tasks.iter().map(|task| task.iops.get()).sum();
    let Some(deadline) = tasks.iter().map(|task| task.target).min() else {
        return "qos = { schedule = \"device\" }\n".to_owned();
    };
    format!(
        "qos = {{ schedule = \"device\", deadline_us = {}, iops = {}, burst = {} }}\n",
        deadline.get() / 1_000,
        iops.ceil(),
        2 * tasks.len(),
    )
}

#[cfg(test)]
mod tests {
    use rtvirtio_cases::Case;
    use rtvirtio_spec::serve;

    use super::*;
    use crate::qos::clients::tasks;

    #[test]
    fn configuration_promises_a_vm_its_tasks_rates_and_the_strictest_target() {
        let case: Case = "2xL+M+H".parse().unwrap();
        let vms: Vec<_> = (0..2).map(|rank| tasks(case, rank).unwrap()).collect();
        let model = "ref-4x250".parse().unwrap();
        let (device, directory) = (Path::new("/dev/loop7"), Path::new("/tmp/x"));
        let text = configured(&vms, Scheme::Qos, model, device, directory);
        let found = serve::parse("test", &text).unwrap();
        let schedule = &found.schedules[0];
        assert_eq!(
            (schedule.channels, schedule.request.get(), schedule.kib.get()),
            (4, 212_500, 9_375)
        );
        let promises: Vec<_> = found
            .devices
            .iter()
            .map(|device| {
                let promise = device.qos.as_ref().unwrap().promise.as_ref();
                promise.map(|p| {
                    let iops = p.rate.iops.unwrap().get();
                    (p.deadline.get() / 1_000_000, iops, p.rate.burst)
                })
            })
            .collect();
        assert_eq!(promises, [Some((10, 2_100.0, 6)), Some((15, 2_100.0, 6)), None]);
        let text = configured(&vms, Scheme::None, model, device, directory);
        let found = serve::parse("test", &text).unwrap();
        assert!(found.schedules.is_empty() && found.devices.iter().all(|d| d.qos.is_none()));
    }
}
