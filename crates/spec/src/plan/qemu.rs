//! A VM's IOThreads in the words of QEMU (9.0 or later) and of libvirt (10.0 or later).
//!
//! QEMU takes `iothread-vq-mapping` as JSON only, at a guest's start only; in it
//! each queue stands once and each IOThread has a queue
//! (hw/virtio/iothread-vq-mapping.c). libvirt's `<queue>` elements are the same
//! list and want the attribute `queues` beside them (docs/formatdomain.rst).
//!
//! IOThreads are `iothread1`, `iothread2`, …, as libvirt calls its own. So of all
//! names only a disk's gets into the text: as a JSON string, and as an alias of
//! letters, digits, `-` and `_`; the rest of the XML is numbers.
//!
//! The disk NAME of a specification is the device with the id `NAME` or `ua-NAME`
//! ([`device_ids`]): libvirt lets an operator choose an id only with that prefix.
//!
//! Properties (tests of the same name): `qemu_text_is_as_expected`,
//! `libvirt_text_is_as_expected`, `device_is_told_by_its_id`, `a_name_injects_nothing`.

use std::fmt::Write as _;

use rtvirtio_units::{CpuId, DiskName, IoThreadId, IoThreadName};
use serde::Serialize;

use super::{DiskIoThreads, VmIoThreads};
use crate::mapping::Entry;
use crate::mapping::write::driver_xml;

/// QEMU's name of an IOThread.
#[must_use]
pub fn name(thread: IoThreadId) -> String {
    format!("iothread{thread}")
}

fn entry_name(thread: IoThreadId) -> IoThreadName {
    IoThreadName::new(name(thread)).expect("letters and digits")
}

/// QEMU's arguments for a VM's IOThreads and disks, an option and its value each.
#[must_use]
pub fn arguments(vm: &VmIoThreads) -> Vec<(&'static str, String)> {
    let objects = vm.threads.iter().map(|t| ("-object", object(t.id)));
    objects.chain(vm.disks.iter().map(|d| ("-device", device(d)))).collect()
}

/// The value of QEMU's `-object` for an IOThread.
fn object(thread: IoThreadId) -> String {
    format!("iothread,id={}", name(thread))
}

/// libvirt's prefix of an alias that an operator chose (src/conf/domain_conf.c, as of 3.9).
const USER_ALIAS: &str = "ua-";

/// A disk's id in QEMU: its name, if QEMU takes that as an id (util/id.c, id_wellformed).
fn id(disk: &DiskName) -> Option<&str> {
    let name = disk.as_str();
    let is_well_formed = name.starts_with(|c: char| c.is_ascii_alphabetic())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || "-._".contains(c));
    is_well_formed.then_some(name)
}

/// A disk's alias in libvirt, if libvirt takes it: it ignores one with other characters
/// (USER_ALIAS_CHARS).
fn alias(disk: &DiskName) -> Option<String> {
    let name = disk.as_str();
    let is_well_formed = name.chars().all(|c| c.is_ascii_alphanumeric() || "-_".contains(c));
    is_well_formed.then(|| format!("{USER_ALIAS}{name}"))
}

/// The ids that a disk's device may have in QEMU.
#[must_use]
pub fn device_ids(disk: &DiskName) -> [String; 2] {
    [disk.to_string(), format!("{USER_ALIAS}{disk}")]
}

/// Whether the device at a QOM path, such as `/machine/peripheral/ua-root/virtio-backend`, is the
/// disk of that name.
#[must_use]
pub fn is_device_of(disk: &DiskName, qom_path: &str) -> bool {
    let below = qom_path.strip_prefix("/machine/peripheral/");
    let id = below.and_then(|path| path.split('/').next()).unwrap_or_default();
    device_ids(disk).iter().any(|of_disk| of_disk == id)
}

/// The value of QEMU's `-device` for a disk; its `drive` is the disk's name, to be the node-name of
/// a `-blockdev`. Holds no single quote, so a shell takes it in single quotes.
///
/// # Panics
/// Never: names and numbers are JSON.
fn device(disk: &DiskIoThreads) -> String {
    let mapping = disk.by_thread().into_iter();
    let device = Device {
        driver: "virtio-blk-pci",
        id: id(&disk.disk),
        drive: &disk.disk,
        num_queues: disk.queues.len(),
        iothread_vq_mapping: mapping
            .map(|(thread, vqs)| {
                let vqs = vqs.into_iter().map(|q| q as u32).collect();
                Entry { iothread: entry_name(thread), vqs: Some(vqs) }
            })
            .collect(),
    };
    serde_json::to_string(&device).expect("names and numbers are JSON")
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Device<'a> {
    driver: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    drive: &'a DiskName,
    num_queues: usize,
    iothread_vq_mapping: Vec<Entry>,
}

/// Elements of libvirt's `<domain>`: the IOThreads, their CPUs, and `vcpu_cpus` for the vCPUs if the
/// VM says how many it has.
#[must_use]
pub fn domain_xml(vm: &VmIoThreads, vcpu_cpus: &[CpuId]) -> String {
    let mut xml = String::new();
    // Writing to a String does not fail.
    if let Some(vcpus) = vm.vcpus.filter(|_| !vcpu_cpus.is_empty()) {
        let cpus = cpuset(vcpu_cpus);
        let _ = writeln!(xml, "<vcpu placement='static' cpuset='{cpus}'>{vcpus}</vcpu>");
    }
    let _ = writeln!(xml, "<iothreads>{}</iothreads>", vm.threads.len());
    xml += "<iothreadids>\n";
    for thread in &vm.threads {
        let _ = writeln!(xml, "  <iothread id='{}'/>", thread.id);
    }
    xml += "</iothreadids>\n";
    let pinned: Vec<_> = vm.threads.iter().filter_map(|t| Some((t.id, t.cpu?))).collect();
    if !pinned.is_empty() {
        xml += "<cputune>\n";
        for (thread, cpu) in pinned {
            let _ = writeln!(xml, "  <iothreadpin iothread='{thread}' cpuset='{cpu}'/>");
        }
        xml += "</cputune>\n";
    }
    xml
}

/// The `<driver>` and the `<alias>` of a disk's `<disk>` in libvirt's domain.
#[must_use]
pub fn disk_xml(disk: &DiskIoThreads) -> String {
    let mut xml = driver_xml(disk.queues.len(), disk.by_thread().into_iter());
    if let Some(alias) = alias(&disk.disk) {
        let _ = writeln!(xml, "<alias name='{alias}'/>");
    }
    xml
}

/// Ascending CPUs as a list of ranges: `0-5,7`.
#[must_use]
pub fn cpuset(cpus: &[CpuId]) -> String {
    let runs = cpus.chunk_by(|a, b| a.get().checked_add(1) == Some(b.get()));
    let ranges = runs.map(|run| match run {
        [first, .., last] => format!("{first}-{last}"),
        one => one.iter().map(CpuId::to_string).collect(),
    });
    ranges.collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rtvirtio_units::VmName;
    use serde_json::json;

    use super::*;
    use crate::plan::IoThread;

    fn cpus(ids: &[u32]) -> Vec<CpuId> {
        ids.iter().copied().map(CpuId::new).collect()
    }

    /// Two IOThreads on CPUs 7 and 6; four queues, and one.
    fn vm(name: &str, root: &str) -> VmIoThreads {
        let threads = [(1, 7), (2, 6)]
            .map(|(id, cpu)| IoThread { id: IoThreadId::new(id), cpu: Some(CpuId::new(cpu)) });
        let disk = |name: &str, queues: &[u32]| DiskIoThreads {
            disk: DiskName::new(name).unwrap(),
            queues: queues.iter().copied().map(IoThreadId::new).collect(),
        };
        VmIoThreads {
            vm: VmName::new(name).unwrap(),
            vcpus: Some(4),
            threads: threads.into(),
            disks: vec![disk(root, &[1, 2, 1, 2]), disk("log", &[2])],
        }
    }

    #[test]
    fn qemu_text_is_as_expected() {
        let vm = vm("plc", "root");
        assert_eq!(object(vm.threads[1].id), "iothread,id=iothread2");
        assert_eq!(
            device(&vm.disks[0]),
            r#"{"driver":"virtio-blk-pci","id":"root","drive":"root","num-queues":4,"iothread-vq-mapping":[{"iothread":"iothread1","vqs":[0,2]},{"iothread":"iothread2","vqs":[1,3]}]}"#
        );
        // An IOThread without a queue would be refused, so it is not in the list.
        assert_eq!(
            device(&vm.disks[1]),
            r#"{"driver":"virtio-blk-pci","id":"log","drive":"log","num-queues":1,"iothread-vq-mapping":[{"iothread":"iothread2","vqs":[0]}]}"#
        );
    }

    #[test]
    fn libvirt_text_is_as_expected() {
        let mut vm = vm("plc", "root");
        assert_eq!(
            domain_xml(&vm, &cpus(&[0, 1, 2, 3, 5])),
            "<vcpu placement='static' cpuset='0-3,5'>4</vcpu>\n\
             <iothreads>2</iothreads>\n\
             <iothreadids>\n\
             \x20 <iothread id='1'/>\n\
             \x20 <iothread id='2'/>\n\
             </iothreadids>\n\
             <cputune>\n\
             \x20 <iothreadpin iothread='1' cpuset='7'/>\n\
             \x20 <iothreadpin iothread='2' cpuset='6'/>\n\
             </cputune>\n"
        );
        assert_eq!(
            disk_xml(&vm.disks[0]),
            "<driver name='qemu' queues='4'>\n\
             \x20 <iothreads>\n\
             \x20   <iothread id='1'>\n\
             \x20     <queue id='0'/>\n\
             \x20     <queue id='2'/>\n\
             \x20   </iothread>\n\
             \x20   <iothread id='2'>\n\
             \x20     <queue id='1'/>\n\
             \x20     <queue id='3'/>\n\
             \x20   </iothread>\n\
             \x20 </iothreads>\n\
             </driver>\n\
             <alias name='ua-root'/>\n"
        );
        vm.threads.iter_mut().for_each(|t| t.cpu = None);
        assert_eq!(
            domain_xml(&vm, &[]),
            "<iothreads>2</iothreads>\n\
             <iothreadids>\n\
             \x20 <iothread id='1'/>\n\
             \x20 <iothread id='2'/>\n\
             </iothreadids>\n"
        );
    }

    #[test]
    fn device_is_told_by_its_id() {
        let root = DiskName::new("root").unwrap();
        for path in ["root", "root/virtio-backend", "ua-root", "ua-root/virtio-backend"] {
            assert!(is_device_of(&root, &format!("/machine/peripheral/{path}")), "{path}");
        }
        for path in ["", "root2", "ua-root2/virtio-backend", "ua-ua-root", "x/root", "UA-root"] {
            assert!(!is_device_of(&root, &format!("/machine/peripheral/{path}")), "{path}");
        }
        assert!(!is_device_of(&root, "/machine/unattached/root"));
        let libvirts_own = DiskName::new("virtio-disk0").unwrap();
        assert!(is_device_of(&libvirts_own, "/machine/peripheral/virtio-disk0/virtio-backend"));
    }

    #[test]
    fn ids_are_those_that_qemu_and_libvirt_take() {
        let both = |name: &str| {
            let disk = DiskName::new(name).unwrap();
            (id(&disk).map(str::to_owned), alias(&disk))
        };
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(both("a-b_1"), (some("a-b_1"), some("ua-a-b_1")));
        assert_eq!(both("1a"), (None, some("ua-1a")));
        assert_eq!(both("_a"), (None, some("ua-_a")));
        assert_eq!(both("a.b"), (some("a.b"), None));
        assert_eq!(both("a@b"), (None, None));
        assert_eq!(both("a+b"), (None, None));
    }

    #[test]
    fn cpuset_joins_neighbours() {
        assert_eq!(cpuset(&cpus(&[])), "");
        assert_eq!(cpuset(&cpus(&[3])), "3");
        assert_eq!(cpuset(&cpus(&[0, 1, 3, 4, 5, 7])), "0-1,3-5,7");
    }

    #[test]
    fn name_with_markup_is_no_name() {
        for text in ["a\"", "a'", "a<", "a&", "a\\", "a\n", "a,b"] {
            assert!(DiskName::new(text).is_err() && VmName::new(text).is_err(), "{text:?}");
        }
        // A VM's is in no argument and no element.
        assert!(DiskName::new("a b").is_err());
    }

    proptest! {
        /// Whatever the names: XML that differs in the alias only, JSON in `id` and `drive` only.
        #[test]
        fn a_name_injects_nothing(
            name in "[A-Za-z0-9_é][A-Za-z0-9. _@+()#ä-]{0,30}x",
            disk in "[A-Za-z0-9_][A-Za-z0-9._@+-]{0,63}",
        ) {
            let (hostile, plain) = (vm(&name, &disk), vm("plc", "root"));
            let cpus = cpus(&[0, 1]);
            prop_assert_eq!(domain_xml(&hostile, &cpus), domain_xml(&plain, &cpus));
            let line = |name: &str| format!("<alias name='ua-{name}'/>\n");
            let xml = disk_xml(&hostile.disks[0]);
            let xml = xml.strip_suffix(&line(&disk)).unwrap_or(&xml);
            let plain_xml = disk_xml(&plain.disks[0]);
            prop_assert_eq!(Some(xml), plain_xml.strip_suffix(&line("root")));
            let text = device(&hostile.disks[0]);
            prop_assert!(!text.contains(['\'', '\n']));
            let mut found: serde_json::Value = serde_json::from_str(&text).unwrap();
            let mut expected: serde_json::Value =
                serde_json::from_str(&device(&plain.disks[0])).unwrap();
            if let Some(id) = found.as_object_mut().unwrap().remove("id") {
                prop_assert_eq!(id, json!(disk));
            }
            expected.as_object_mut().unwrap().remove("id");
            expected["drive"] = json!(disk);
            prop_assert_eq!(found, expected);
        }
    }
}
