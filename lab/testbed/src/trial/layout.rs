//! The server under test: one IOThread, a disk for each VM, and the last for the background VM.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rtvirtio_host::interrupt::Interrupted;

use crate::curve::Curve;
use crate::neighbour::Background;
use crate::server::{Configuration, Server, escaped, part, qsd_export};
use crate::tasks::Plan;

/// Bytes of each VM's disk.
pub const DISK: u64 = 256 << 20;
/// Bytes of a request of the cases' tasks.
const BLOCK: usize = 4096;
/// What a throttled background VM may move, bytes a second: the hand setting of the kernel path.
const THROTTLE: u64 = 10_000_000;

/// How disks share the device.
#[derive(Debug, Clone, Copy)]
pub enum Sharing {
    /// Requests start as they come.
    Free,
    /// By a schedule for such a device.
    Schedule(Curve),
    /// qemu-storage-daemon with a throttle group for the background VM.
    Throttle,
}

/// Who serves what to whom.
#[derive(Debug)]
pub struct Layout<'a> {
    /// The block device or file under all disks.
    pub device: &'a Path,
    /// Where sockets and configuration are.
    pub directory: &'a Path,
    /// How disks share it.
    pub sharing: Sharing,
    /// The tasks of each VM.
    pub vms: &'a [Vec<Plan>],
    /// The background VM.
    pub background: Option<&'a Background>,
}

/// Where a VM's disk is served.
pub fn socket(directory: &Path, vm: usize) -> PathBuf {
    directory.join(format!("vm{vm}.sock"))
}

impl Layout<'_> {
    fn disks(&self) -> usize {
        self.vms.len() + usize::from(self.background.is_some())
    }

    fn queues(&self, vm: usize) -> usize {
        self.vms.get(vm).map_or(1, Vec::len)
    }

    /// Servers make sockets in the order of their configuration.
    fn last_socket(&self) -> PathBuf {
        socket(self.directory, self.disks() - 1)
    }

    /// Has them served while `work` is done; `program` is the `rtvirtio` that serves.
    ///
    /// # Errors
    /// If the server does not start, ends, or does not end well; those of `work`.
    pub fn serve<T>(
        &self,
        program: &Path,
        interrupted: &Interrupted,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let (command, last) = (self.command(program)?, self.last_socket());
        Server::start(&command, &last, self.directory, interrupted)?.during(|_| work())
    }

    /// The command line; writes the configuration if the server has one. Either server is as urgent as
    /// the unit in packaging/ has ours.
    fn command(&self, program: &Path) -> Result<Vec<String>> {
        if matches!(self.sharing, Sharing::Throttle) {
            let kind = std::fs::metadata(self.device)
                .with_context(|| format!("look at {}", self.device.display()))?
                .file_type();
            return Ok(urgent(self.qsd(kind.is_block_device())));
        }
        let path = self.directory.join("serve.toml");
        std::fs::write(&path, self.toml())?;
        let path = path.display().to_string();
        Ok(urgent(vec![program.display().to_string(), "serve".to_owned(), path]))
    }

    fn toml(&self) -> String {
        let mut all = Configuration::new(None, [None]);
        if let Sharing::Schedule(curve) = &self.sharing {
            all = all.schedule(curve);
        }
        for vm in 0..self.disks() {
            let (name, socket) = (format!("vm{vm}"), socket(self.directory, vm));
            let engine = part(self.device, vm as u64 * DISK, DISK);
            all = all.disk((&name, &name), &socket, self.queues(vm), engine);
            if matches!(self.sharing, Sharing::Schedule(_)) {
                let promised = self.background.and_then(|background| background.promise.as_ref());
                let promised = promised.map_or(&[] as &[_], std::slice::from_ref);
                all = all.with(qos(self.vms.get(vm).map_or(promised, Vec::as_slice)));
            }
        }
        all.text()
    }

    fn qsd(&self, is_block_device: bool) -> Vec<String> {
        let driver = if is_block_device { "host_device" } else { "file" };
        let mut command: Vec<String> = vec!["qemu-storage-daemon".to_owned()];
        let mut option = |name: &str, value: String| command.extend([name.to_owned(), value]);
        option("--object", "iothread,id=iot0".to_owned());
        option("--object", format!("throttle-group,id=slow,limits.bps-total={THROTTLE}"));
        for vm in 0..self.disks() {
            option(
                "--blockdev",
                format!(
                    "driver=raw,node-name=vm{vm},offset={},size={DISK},file.driver={driver},\
                     file.filename={},file.cache.direct=on,file.aio=io_uring,file.locking=off",
                    vm as u64 * DISK,
                    escaped(self.device),
                ),
            );
            let mut node = format!("vm{vm}");
            if vm == self.vms.len() {
                option(
                    "--blockdev",
                    format!("driver=throttle,node-name=slow{vm},throttle-group=slow,file={node}"),
                );
                node = format!("slow{vm}");
            }
            let (id, socket) = (format!("export{vm}"), socket(self.directory, vm));
            option("--export", qsd_export((&id, &node, "iot0"), &socket, self.queues(vm)));
        }
        command
    }
}

/// What a VM is promised: its tasks are one class, which has the strictest target and all their
/// rates.
fn qos(tasks: &[Plan]) -> String {
    let iops: f64 = tasks.iter().map(|task| task.iops.get()).sum();
    let Some(deadline) = tasks.iter().map(|task| task.target).min() else {
        return "qos = { schedule = \"device\" }\n".to_owned();
    };
    // Without it a promise is of 4 KiB requests.
    let bandwidth = if tasks.iter().all(|task| task.block == BLOCK) {
        String::new()
    } else {
        let bytes: f64 = tasks.iter().map(|task| task.iops.get() * task.block as f64).sum();
        format!(" bandwidth = {},", bytes.ceil())
    };
    format!(
        "qos = {{ schedule = \"device\", deadline_us = {}, iops = {},{bandwidth} burst = {} }}\n",
        deadline.get() / 1_000,
        iops.ceil(),
        2 * tasks.len(),
    )
}

/// As urgent as the kernel's own block workers.
fn urgent(command: Vec<String>) -> Vec<String> {
    ["nice", "-n", "-20"].map(str::to_owned).into_iter().chain(command).collect()
}

#[cfg(test)]
mod tests {
    use rtvirtio_cases::{Case, Tier};
    use rtvirtio_spec::serve;

    use super::*;
    use crate::neighbour::Neighbour;
    use crate::tasks::{Between, tasks};

    fn vms() -> Vec<Vec<Plan>> {
        let case: Case = "2xL+M+H".parse().unwrap();
        (0..2).map(|rank| tasks(case, Tier::Strict, rank, Between::Nothing).unwrap()).collect()
    }

    fn layout<'a>(
        sharing: Sharing,
        vms: &'a [Vec<Plan>],
        background: &'a Background,
    ) -> Layout<'a> {
        let (device, directory) = (Path::new("/dev/loop7"), Path::new("/tmp/x"));
        Layout { device, directory, sharing, vms, background: Some(background) }
    }

    fn promises(toml: &str) -> Vec<Option<(u64, f64, u32)>> {
        let found = serve::parse("test", toml).unwrap();
        let promise = |device: &serve::Device| {
            let promise = device.qos.as_ref().unwrap().promise.as_ref();
            promise
                .map(|p| (p.deadline.get() / 1_000_000, p.rate.iops.unwrap().get(), p.rate.burst))
        };
        found.devices.iter().map(promise).collect()
    }

    #[test]
    fn configuration_promises_a_vm_its_tasks_rates_and_the_strictest_target() {
        let (vms, writer) = (vms(), Neighbour::DeepWriter.background());
        let scheduled = Sharing::Schedule(Curve::of_ssd("ref-4x250".parse().unwrap()));
        let text = layout(scheduled, &vms, &writer).toml();
        let schedule = &serve::parse("test", &text).unwrap().schedules[0];
        assert_eq!(
            (schedule.channels, schedule.request.get(), schedule.kib.get()),
            (4, 212_500, 9_375)
        );
        assert_eq!(promises(&text), [Some((10, 2_100.0, 6)), Some((15, 2_100.0, 6)), None]);
        let liar = Neighbour::Liar.background();
        let text = layout(scheduled, &vms, &liar).toml();
        assert_eq!(promises(&text)[2], Some((10, 500.0, 2)));
        let text = layout(Sharing::Free, &vms, &liar).toml();
        let found = serve::parse("test", &text).unwrap();
        assert!(found.schedules.is_empty() && found.devices.iter().all(|d| d.qos.is_none()));
    }

    #[test]
    fn promise_of_larger_requests_says_how_many_bytes() {
        let mut vms = vms();
        assert!(!qos(&vms[0]).contains("bandwidth"));
        vms[0].truncate(1);
        vms[0][0].block = 64 << 10;
        // 100 a second.
        assert!(qos(&vms[0]).contains("iops = 100, bandwidth = 6553600, burst = 2"));
    }

    #[test]
    fn qsd_throttles_the_background_vm_alone_and_has_the_same_slices() {
        let (vms, writer) = (vms(), Neighbour::DeepWriter.background());
        let command = layout(Sharing::Throttle, &vms, &writer).qsd(true);
        let with = |text: &str| command.iter().filter(|a| a.contains(text)).count();
        assert_eq!(with("limits.bps-total=10000000"), 1);
        assert_eq!(with("driver=throttle"), 1);
        assert_eq!(with("node-name=slow2,addr"), 1);
        assert_eq!(with("node-name=vm1,offset=268435456,size=268435456"), 1);
        assert_eq!(with("addr.path=/tmp/x/vm0.sock,writable=on,num-queues=3"), 1);
    }
}
