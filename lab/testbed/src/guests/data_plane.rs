//! Guests' disks through the data plane: one `rtvirtio serve` for all of them, on the device under
//! test, and QEMU's arguments for its front ends.

use std::path::{Path, PathBuf};

use anyhow::Result;
use rtvirtio_host::dataplane::ControlClient;
use rtvirtio_host::interrupt::Interrupted;
use rtvirtio_spec::specification::Specification;
use rtvirtio_units::{DiskName, VmName};
use serde_json::json;

use super::process::{MEMORY_MIB, Slice};
use crate::curve::Curve;
use crate::server::{Configuration, Server, part};

/// How often QEMU tries to reach a server that has gone, ms.
const RECONNECT_MS: u32 = 200;

/// A running server; dropping it kills it.
pub(super) struct DataPlane {
    client: ControlClient,
    directory: PathBuf,
    _server: Server,
}

/// What the server has done so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Served {
    /// Requests that have ended.
    pub requests: u64,
    /// CPU time of its IOThreads, ns.
    pub cpu_ns: u64,
}

impl DataPlane {
    /// Serves what the text for a control socket says, at sockets in `directory`.
    pub(super) fn start(
        program: &Path,
        directory: &Path,
        configured: impl FnOnce(&Path) -> String,
        interrupted: &Interrupted,
    ) -> Result<Self> {
        let control = directory.join("control.sock");
        let text = configured(&control);
        // The control socket is the last that it listens at.
        let server = Server::serving(program, &text, directory, &control, interrupted)?;
        let client = ControlClient::new(control);
        Ok(Self { client, directory: directory.to_owned(), _server: server })
    }

    /// QEMU's arguments for a VM's disks.
    pub(super) fn disks(&self, vm: &VmName, slices: &[Slice]) -> Vec<String> {
        // The server maps the guest's memory.
        let memory = format!("memory-backend-memfd,id=guest-memory,size={MEMORY_MIB}M,share=on");
        let machine = "memory-backend=guest-memory".to_owned();
        let mut arguments = vec!["-object".to_owned(), memory, "-machine".to_owned(), machine];
        for slice in slices {
            let path = socket(&self.directory, vm, &slice.disk);
            let chardev = format!(
                "socket,id=socket-{},path={},reconnect-ms={RECONNECT_MS}",
                slice.disk,
                path.display()
            );
            let device = json!({
                "driver": "vhost-user-blk-pci", "id": slice.disk,
                "chardev": format!("socket-{}", slice.disk), "num-queues": 1,
            });
            let of_disk = ["-chardev", &chardev, "-device", &device.to_string()];
            arguments.extend(of_disk.map(str::to_owned));
        }
        arguments
    }

    pub(super) fn served(&self) -> Result<Served> {
        let snapshot = self.client.snapshot()?;
        let queues = snapshot.devices.iter().flat_map(|d| &d.queues);
        let of_queue = |o: &rtvirtio_spec::control::OperationCounts| {
            o.reads + o.writes + o.flushes + o.discards + o.write_zeroes + o.others
        };
        Ok(Served {
            requests: queues.map(|q| of_queue(&q.operations)).sum(),
            cpu_ns: snapshot.iothreads.iter().map(|t| t.cpu_ns.get()).sum(),
        })
    }
}

fn socket(directory: &Path, vm: &VmName, disk: &DiskName) -> PathBuf {
    directory.join(format!("{vm}-{disk}.sock"))
}

/// VMs whose disks share a device of this service curve.
pub struct Scheduled<'a> {
    /// The device's.
    pub curve: Curve,
    /// The VMs.
    pub specification: &'a Specification,
}

impl Scheduled<'_> {
    /// One IOThread for all devices, each one queue as with QEMU's own disks.
    pub(super) fn configured<'a>(
        &self,
        control: &Path,
        device: &Path,
        directory: &Path,
        layout: impl Iterator<Item = (&'a VmName, &'a [Slice])>,
    ) -> String {
        let mut all = Configuration::new(Some(control), [None]).schedule(&self.curve);
        for (vm, slices) in layout {
            for Slice { disk, offset, size } in slices {
                // The parts share the device; what an earlier guest wrote there is no format.
                let (name, socket) = (format!("{vm}-{disk}"), socket(directory, vm, disk));
                all = all
                    .disk((&name, vm.as_str()), &socket, 1, part(device, *offset, *size))
                    .with(format_args!(
                        "qos = {{ schedule = \"device\"{} }}\n",
                        self.promise(vm, disk)
                    ));
            }
        }
        all.text()
    }

    /// What a disk is promised: the rates of its tasks with a target, within the strictest.
    fn promise(&self, vm: &VmName, disk: &DiskName) -> String {
        let vm = self.specification.vms.iter().find(|v| v.name == *vm);
        let tasks = vm.iter().flat_map(|vm| &vm.tasks).filter(|task| task.disk == *disk);
        let with_target: Vec<_> =
            tasks.filter_map(|task| Some((task.load, task.target?.latency))).collect();
        let deadline = with_target.iter().map(|(_, latency)| latency.get() / 1_000).min();
        let iops: f64 = with_target
            .iter()
            .filter_map(|(load, _)| load.iops)
            .map(rtvirtio_units::Iops::get)
            .sum();
        let burst = 2 * with_target.iter().map(|(load, _)| load.queue_depth).sum::<u32>();
        match deadline {
            Some(us) if iops > 0.0 => {
                format!(", deadline_us = {us}, iops = {}, burst = {burst}", iops.ceil())
            }
            _ => String::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use rtvirtio_spec::serve;
    use rtvirtio_spec::specification::parse;

    use super::*;

    #[test]
    fn configuration_gives_each_disk_its_part_of_the_device() {
        let slice = |disk: &str, offset| Slice {
            disk: DiskName::new(disk).unwrap(),
            offset,
            size: 1 << 20,
        };
        let vms = ["vm0", "vm1"].map(|vm| VmName::new(vm).unwrap());
        let slices = [vec![slice("a", 0), slice("b", 1 << 20)], vec![slice("a", 2 << 20)]];
        let layout = vms.iter().zip(slices.iter().map(Vec::as_slice));
        let (control, device) = (Path::new("/run/x/control.sock"), Path::new("/dev/loop7"));
        let specification = parse(
            "test",
            "version = 1\n[device.d]\npath = \"/dev/loop7\"\nprofile = \"p\"\n\
             [[vm]]\nname = \"vm0\"\n[[vm.disk]]\nname = \"a\"\ndevice = \"d\"\n\
             [[vm.disk]]\nname = \"b\"\ndevice = \"d\"\n\
             [[vm.task]]\nname = \"t\"\ndisk = \"b\"\niops = 375\ntarget = { latency_ms = 40 }\n",
        )
        .unwrap();
        let curve = Curve::of_ssd("ref-4x250*4".parse().unwrap());
        let scheduled = Scheduled { curve, specification: &specification };
        let text = scheduled.configured(control, device, Path::new("/run/x"), layout);
        let found = serve::parse("test", &text).unwrap();
        let parts = found.devices.iter().map(|d| {
            let serve::Engine::File(file) = &d.engine else { panic!("a file") };
            let slice = file.slice.unwrap();
            (d.name.as_str(), d.vm.as_str(), slice.offset.get() >> 20, slice.size.get() >> 20)
        });
        let parts: Vec<_> = parts.collect();
        assert_eq!(parts, [("vm0-a", "vm0", 0, 1), ("vm0-b", "vm0", 1, 1), ("vm1-a", "vm1", 2, 1)]);
        let promise = |i: usize| found.devices[i].qos.as_ref().unwrap().promise.clone();
        assert!(promise(0).is_none() && promise(2).is_none());
        let of_b = promise(1).unwrap();
        assert_eq!((of_b.deadline.get(), of_b.rate.iops.unwrap().get()), (40_000_000, 375.0));
        assert_eq!(found.devices[2].listen, serve::Listen::Path("/run/x/vm1-a.sock".into()));
    }
}
