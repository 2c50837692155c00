//! A VM's IOThreads in the words of QEMU (9.0 or later) and of libvirt (10.0 or later).
//!
//! QEMU takes `iothread-vq-mapping` as JSON only, at a guest's start only; in it
//! each queue stands once and each IOThread has a queue
//! (hw/virtio/iothread-vq-mapping.c). libvirt's `<queue>` elements are the same
//! list and want the attribute `queues` beside them (docs/formatdomain.rst).
//!
//! IOThreads are `iothread1`, `iothread2`, …, as libvirt calls its own. So of all
//! names only a disk's gets into the text, as a JSON string; the XML is made of
//! numbers.
//!
//! Properties (tests of the same name): `qemu_text_is_as_expected`,
//! `libvirt_text_is_as_expected`, `a_name_injects_nothing`.

use std::fmt::Write as _;

use rtvirtio_units::{CpuId, DiskName, IoThreadId};
use serde::Serialize;

use super::{DiskIoThreads, VmIoThreads};

/// QEMU's name of an IOThread.
#[must_use]
pub fn name(thread: IoThreadId) -> String {
    format!("iothread{thread}")
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

/// The value of QEMU's `-device` for a disk; its `drive` is the disk's name, to be the node-name of
/// a `-blockdev`. Holds no single quote, so a shell takes it in single quotes.
///
/// # Panics
/// Never: names and numbers are JSON.
fn device(disk: &DiskIoThreads) -> String {
    let mapping = disk.by_thread().into_iter();
    let device = Device {
        driver: "virtio-blk-pci",
        drive: &disk.disk,
        num_queues: disk.queues.len(),
        iothread_vq_mapping: mapping
            .map(|(thread, vqs)| Mapping { iothread: name(thread), vqs })
            .collect(),
    };
    serde_json::to_string(&device).expect("names and numbers are JSON")
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Device<'a> {
    driver: &'a str,
    drive: &'a DiskName,
    num_queues: usize,
    iothread_vq_mapping: Vec<Mapping>,
}

#[derive(Serialize)]
struct Mapping {
    iothread: String,
    vqs: Vec<usize>,
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

/// The `<driver>` of a disk's `<disk>` in libvirt's domain.
#[must_use]
pub fn driver_xml(disk: &DiskIoThreads) -> String {
    let mut xml = format!("<driver name='qemu' queues='{}'>\n  <iothreads>\n", disk.queues.len());
    for (thread, queues) in disk.by_thread() {
        let _ = writeln!(xml, "    <iothread id='{thread}'>");
        for queue in queues {
            let _ = writeln!(xml, "      <queue id='{queue}'/>");
        }
        xml += "    </iothread>\n";
    }
    xml += "  </iothreads>\n</driver>\n";
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
            r#"{"driver":"virtio-blk-pci","drive":"root","num-queues":4,"iothread-vq-mapping":[{"iothread":"iothread1","vqs":[0,2]},{"iothread":"iothread2","vqs":[1,3]}]}"#
        );
        // An IOThread without a queue would be refused, so it is not in the list.
        assert_eq!(
            device(&vm.disks[1]),
            r#"{"driver":"virtio-blk-pci","drive":"log","num-queues":1,"iothread-vq-mapping":[{"iothread":"iothread2","vqs":[0]}]}"#
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
            driver_xml(&vm.disks[0]),
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
             </driver>\n"
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
    fn cpuset_joins_neighbours() {
        assert_eq!(cpuset(&cpus(&[])), "");
        assert_eq!(cpuset(&cpus(&[3])), "3");
        assert_eq!(cpuset(&cpus(&[0, 1, 3, 4, 5, 7])), "0-1,3-5,7");
    }

    #[test]
    fn name_with_markup_is_no_name() {
        for text in ["a\"", "a'", "a<", "a&", "a\\", "a\n", "a,b", "a b"] {
            assert!(DiskName::new(text).is_err() && VmName::new(text).is_err(), "{text:?}");
        }
    }

    proptest! {
        /// Whatever the names: the same XML, and JSON that differs in `drive` only.
        #[test]
        fn a_name_injects_nothing(
            name in "[A-Za-z0-9_][A-Za-z0-9._@+-]{0,63}",
            disk in "[A-Za-z0-9_][A-Za-z0-9._@+-]{0,63}",
        ) {
            let (hostile, plain) = (vm(&name, &disk), vm("plc", "root"));
            let cpus = cpus(&[0, 1]);
            prop_assert_eq!(domain_xml(&hostile, &cpus), domain_xml(&plain, &cpus));
            prop_assert_eq!(driver_xml(&hostile.disks[0]), driver_xml(&plain.disks[0]));
            let text = device(&hostile.disks[0]);
            prop_assert!(!text.contains(['\'', '\n']));
            let found: serde_json::Value = serde_json::from_str(&text).unwrap();
            let mut expected: serde_json::Value =
                serde_json::from_str(&device(&plain.disks[0])).unwrap();
            expected["drive"] = json!(disk);
            prop_assert_eq!(found, expected);
        }
    }
}
