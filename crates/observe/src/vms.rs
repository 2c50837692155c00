//! The VMs that run, and their disks by every name that an operator may use.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rtvirtio_host::interrupt::Interrupted;
use rtvirtio_host::qemu::{
    Block, Domain, Fault, Medium, Monitor, Part, QemuError, QemuProcess, Throttle, libvirt,
};
use rtvirtio_host::storage::Stack;
use rtvirtio_host::{Host, HostError};
use serde::Serialize;

/// How long a VM's monitor may take to answer a question.
pub const ANSWER: Duration = Duration::from_millis(1000);
/// How long a VM's disks are believed to be those that they were.
pub const BELIEVED: Duration = Duration::from_secs(10);
/// VMs that are asked at the same time: one that does not answer does not hold up all others.
const AT_ONCE: usize = 16;

/// QEMU's block devices that have a medium: the QOM path and the file of each.
pub type BlockDevices = BTreeSet<(Option<String>, Option<String>)>;

/// A VM that runs.
#[derive(Debug)]
pub struct Vm {
    /// Its name; `pid-PID` if its QEMU was given none.
    pub name: String,
    /// QEMU's process.
    pub pid: u32,
    /// Its cgroup below the io controller's mount; `None`: it has none of its own.
    pub cgroup: Option<PathBuf>,
    /// Its disks.
    pub disks: Vec<Disk>,
    /// What QEMU said they are; nothing if its monitor does not answer.
    pub devices: BlockDevices,
    /// Whether some of their names are not known, since who knows them did not answer.
    pub lacks_names: bool,
    /// QEMU's monitor, if that answers.
    pub monitor: Option<Monitor>,
    /// Why it does not, with what can be done.
    pub unreached: Option<String>,
}

/// A disk of a libvirt domain.
#[derive(Debug, Clone)]
pub struct LibvirtDisk {
    /// The domain.
    pub domain: Domain,
    /// The disk's target, such as `vda`.
    pub target: String,
}

/// A disk of a VM.
#[derive(Debug, Clone, Serialize)]
pub struct Disk {
    /// Its names, the best known first: libvirt's target (`vda`), the device's id or alias, its
    /// serial, the block node, the file.
    pub names: Vec<String>,
    /// The QOM path of the guest's device, by which QEMU counts.
    #[serde(skip)]
    pub qom_path: Option<String>,
    /// What libvirt calls it, by which libvirt counts.
    #[serde(skip)]
    pub libvirt: Option<LibvirtDisk>,
    /// Its format, such as `qcow2`.
    pub format: Option<String>,
    /// The file or device on the host.
    pub file: Option<PathBuf>,
    /// Where its data lies: what of a device or file QEMU hands on to, or the whole file of a format.
    #[serde(skip)]
    pub part: Option<Part>,
    /// What it is made of; `None`: no file of this host, or one that is not to be found.
    pub storage: Option<Stack>,
    /// Why no disk of this host is known to serve it.
    pub unknown_storage: Option<String>,
    /// What QEMU limits it to.
    #[serde(skip)]
    pub throttle: Throttle,
}

impl Disk {
    /// The name that is shown.
    #[must_use]
    pub fn name(&self) -> &str {
        self.names.first().map_or("?", String::as_str)
    }

    /// Whether an operator may mean it by `name`.
    #[must_use]
    pub fn is_called(&self, name: &str) -> bool {
        self.names.iter().any(|own| own == name || own.strip_prefix("ua-") == Some(name))
    }
}

/// The VMs that run, by name. A VM whose monitor does not answer is there with the disks of its
/// command line.
///
/// # Errors
/// `/proc` cannot be listed.
pub fn discover(host: &Host) -> Result<Vec<Vm>, HostError> {
    let mut vms: Vec<Vm> =
        host.qemu_processes()?.iter().map(|process| examine(host, process)).collect();
    vms.sort_by(|a, b| a.name.cmp(&b.name).then(a.pid.cmp(&b.pid)));
    Ok(vms)
}

/// The libvirt domains that are defined and do not run; none without libvirt.
#[must_use]
pub fn switched_off() -> Vec<String> {
    let names = libvirt::switched_off(ANSWER).unwrap_or_default();
    names.iter().map(|name| plain(name)).collect()
}

/// A text without control characters, which a terminal would obey and a TOML file must not have:
/// whoever starts a process chooses its name, and a QEMU the names of its disks.
#[must_use]
pub fn plain(text: &str) -> String {
    text.replace(char::is_control, "\u{fffd}")
}

/// Whether a monitor did not answer in time, so that it would not answer the next question either.
#[must_use]
pub fn is_late(error: &QemuError) -> bool {
    matches!(error.fault, Fault::Late { .. })
}

/// The block devices that QEMU has now, to be compared with those of [`Vm::devices`].
///
/// # Errors
/// The monitor does not answer.
pub fn block_devices(monitor: &mut Monitor) -> Result<BlockDevices, QemuError> {
    monitor.blocks(ANSWER).map(|blocks| devices(&blocks))
}

fn devices(blocks: &[Block]) -> BlockDevices {
    let there = blocks.iter().filter(|block| block.file.is_some());
    there.map(|block| (block.qom_path.clone(), block.file.clone())).collect()
}

/// Does `work` for each of `items`, for several of them at the same time. What came of each, in their order.
pub fn at_once<T: Send, R: Send>(
    items: impl IntoIterator<Item = T>,
    work: impl Fn(T) -> R + Sync,
) -> Vec<R> {
    let items: Vec<T> = items.into_iter().collect();
    let others = items.len().min(AT_ONCE).saturating_sub(1);
    let (items, done) = (Mutex::new(items.into_iter().enumerate()), Mutex::new(Vec::new()));
    let next = || items.lock().unwrap_or_else(PoisonError::into_inner).next();
    let take_turns = || {
        while let Some((index, item)) = next() {
            let result = work(item);
            done.lock().unwrap_or_else(PoisonError::into_inner).push((index, result));
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..others {
            // Where no more threads can be made, those that there are do the work.
            if std::thread::Builder::new().spawn_scoped(scope, take_turns).is_err() {
                break;
            }
        }
        take_turns();
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_unstable_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, result)| result).collect()
}

/// What is known of the VMs of these processes, several of which are asked at the same time; of those
/// that were asked before the user interrupted it.
#[must_use]
pub fn examine_all(host: &Host, processes: &[&QemuProcess], interrupted: &Interrupted) -> Vec<Vm> {
    let examined = at_once(processes.iter().copied(), |process: &QemuProcess| {
        (!interrupted.load(Ordering::Relaxed)).then(|| examine(host, process))
    });
    // Whose is whose is known by their order: what was asked after one that was not is left out too.
    examined.into_iter().map_while(|vm| vm).collect()
}

/// What is known of a VM, by its process.
#[must_use]
pub fn examine(host: &Host, process: &QemuProcess) -> Vm {
    let name = process.name.as_deref().map(plain);
    let name = name.unwrap_or_else(|| format!("pid-{}", process.pid));
    let (mut monitor, mut unreached) = match connect(process) {
        Ok(monitor) => (Some(monitor), None),
        Err(why) => (None, Some(why)),
    };
    let blocks = monitor.as_mut().map(|monitor| monitor.blocks(ANSWER)).transpose();
    let blocks = blocks.unwrap_or_else(|error| {
        unreached = Some(error.to_string());
        None
    });
    if unreached.is_some() {
        monitor = None;
    }
    let targets = match (process.domain(), &blocks) {
        (Some(domain), Some(_)) => libvirt::targets(&domain, ANSWER).ok(),
        _ => Some(Vec::new()),
    };
    let mut lacks_names = targets.is_none();
    let targets = targets.unwrap_or_default();
    let devices = blocks.as_deref().map(devices).unwrap_or_default();
    let mut disks: Vec<Disk> = match blocks {
        Some(blocks) => {
            blocks.iter().filter_map(|block| of_block(host, process, block, &targets)).collect()
        }
        None => process.disks.iter().map(|disk| of_command_line(host, process, disk)).collect(),
    };
    if let Some(monitor) = &mut monitor {
        for disk in &mut disks {
            let Some(id) = disk.qom_path.as_deref().and_then(device_id) else { continue };
            match monitor.serial(id, ANSWER) {
                Ok(serial) => disk.names.extend(serial.as_deref().map(plain)),
                Err(error) if is_late(&error) => {
                    lacks_names = true;
                    break;
                }
                Err(_) => {}
            }
        }
    }
    let cgroup = host.cgroup_of_process(process.pid).ok().flatten();
    Vm { name, pid: process.pid, cgroup, disks, devices, lacks_names, monitor, unreached }
}

fn connect(process: &QemuProcess) -> Result<Monitor, String> {
    let Some(address) = process.monitor_address() else {
        return Err("its QEMU has no monitor, which alone tells its latencies (start it with \
                    -qmp unix:PATH,server=on,wait=off)"
            .to_owned());
    };
    Monitor::at(&address, ANSWER).map_err(|error| match error.hint() {
        Some(hint) => format!("{error} ({hint})"),
        None => error.to_string(),
    })
}

/// The id of a device, from its QOM path.
fn device_id(qom_path: &str) -> Option<&str> {
    qom_path.strip_prefix("/machine/peripheral/")?.split('/').next()
}

/// A disk as QEMU describes it; `None`: no disk, but a drive without a medium.
fn of_block(
    host: &Host,
    process: &QemuProcess,
    block: &Block,
    targets: &[(String, PathBuf)],
) -> Option<Disk> {
    let (file, foreign) = match block.medium() {
        Medium::File(file) => (Some(host.path_of_process(process.pid, &file)), None),
        Medium::Protocol(name) => {
            let name = plain(&name);
            let why = format!(
                "QEMU's own {name} driver serves it: no disk of this host does (limit it in QEMU, \
                 or serve it by the data plane)"
            );
            (None, Some(why))
        }
        Medium::Absent => return None,
    };
    // Two disks of one file, such as slices of it, are not told apart by that file.
    let mut on_file = targets.iter().filter(|(_, source)| Some(source) == file.as_ref());
    let target = on_file.next().filter(|_| on_file.next().is_none());
    let id = block.qom_path.as_deref().and_then(device_id);
    let names = [
        target.map(|(target, _)| target.clone()),
        id.map(str::to_owned),
        block.node.clone().filter(|node| !node.starts_with('#')),
        Some(block.device.clone()).filter(|device| !device.is_empty()),
    ];
    let qom_path = block.qom_path.clone();
    // Without a format on top, QEMU has the protocol's driver there.
    let format = block.driver.clone().map(|driver| match driver.as_str() {
        "file" | "host_device" => "raw".to_owned(),
        _ => plain(&driver),
    });
    let disk = disk(host, names, (file, foreign), (qom_path, format, block.throttle));
    let libvirt = process.domain().zip(target.map(|(target, _)| target.clone()));
    let libvirt = libvirt.map(|(domain, target)| LibvirtDisk { domain, target });
    Some(Disk { part: block.part().or(disk.part), libvirt, ..disk })
}

fn of_command_line(
    host: &Host,
    process: &QemuProcess,
    found: &rtvirtio_host::qemu::QemuDisk,
) -> Disk {
    let file = found.file.as_ref().map(|file| host.path_of_process(process.pid, file));
    let why = file.is_none().then(|| "its command line does not tell its file".to_owned());
    let names = [found.id.clone(), found.node.clone(), None, None];
    disk(host, names, (file, why), (None, None, Throttle::default()))
}

fn disk(
    host: &Host,
    names: [Option<String>; 4],
    (file, foreign): (Option<PathBuf>, Option<String>),
    (qom_path, format, throttle): (Option<String>, Option<String>, Throttle),
) -> Disk {
    let mut names: Vec<String> = names.iter().flatten().map(|name| plain(name)).collect();
    names.extend(file.as_ref().map(|file| plain(&file.display().to_string())));
    let mut seen = BTreeSet::new();
    names.retain(|name| seen.insert(name.clone()));
    let (storage, unknown_storage) = match &file {
        None => (None, foreign),
        Some(file) => match host.storage(file) {
            Ok(stack) => (Some(stack), None),
            Err(error) => (None, Some(plain(&error.to_string()))),
        },
    };
    let part = file.clone().map(Part::whole);
    let libvirt = None;
    Disk { names, qom_path, libvirt, format, file, part, storage, unknown_storage, throttle }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Barrier};

    use rtvirtio_host::fake::FakeSysfs;

    use super::*;

    #[test]
    fn work_is_done_side_by_side_and_its_results_keep_their_order() {
        // Nobody gets past it alone.
        let together = Barrier::new(AT_ONCE);
        let done = at_once(0..2 * AT_ONCE, |item| {
            together.wait();
            2 * item
        });
        assert_eq!(done, (0..2 * AT_ONCE).map(|item| 2 * item).collect::<Vec<_>>());
    }

    #[test]
    fn names_that_a_terminal_would_obey_are_plain() {
        let sysfs = FakeSysfs::v2();
        let line = "qemu-kvm\0-name\0a\u{1b}[2J\0-drive\0file=/img/\u{1b}c,if=virtio,id=d\u{7}\0";
        sysfs.put("/proc/7/cmdline", line);
        let host = Host::with_sysfs("/nonexistent", Arc::new(sysfs));
        let processes = host.qemu_processes().unwrap();
        let examined = |is_interrupted| {
            let interrupted = Interrupted::new(is_interrupted);
            examine_all(&host, &processes.iter().collect::<Vec<_>>(), &interrupted)
        };
        let vms = examined(false);
        let [vm] = &vms[..] else { panic!("{vms:?}") };
        assert_eq!((vm.name.as_str(), vm.disks[0].name()), ("a\u{fffd}[2J", "d\u{fffd}"));
        let told = vm.disks[0].names.iter().chain(&vm.disks[0].unknown_storage);
        told.for_each(|text| assert!(!text.contains(char::is_control), "{text:?}"));
        assert!(examined(true).is_empty());
    }
}
