//! A mapping in the words of QEMU, libvirt and a serve configuration, and how a guest attaches to a
//! device that the data plane serves.
//!
//! Names and numbers need no escaping in XML, JSON or TOML; a socket's path does, and gets it.

use std::collections::BTreeMap;
use std::fmt::{Display, Write as _};
use std::path::Path;

use rtvirtio_units::{DiskName, IoThreadId, IoThreadName};
use serde::Serialize;

use super::{Entry, Mapping};

/// How long a front end waits before it connects again, ms, in QEMU's own unit.
const RECONNECT_MS: u32 = 20;

/// A device on the data plane, as its front end sees it.
#[derive(Debug, Clone, Copy)]
pub struct FrontEnd<'a> {
    /// Its name, from which ids are made.
    pub name: &'a DiskName,
    /// Its socket.
    pub socket: &'a Path,
    /// Its queues.
    pub queues: u16,
}

/// The value of `iothread-vq-mapping`.
///
/// # Panics
/// Never: names and numbers are JSON.
#[must_use]
pub fn qemu_json(mapping: &Mapping) -> String {
    serde_json::to_string(&mapping.entries()).expect("names and numbers are JSON")
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct VirtioBlk<'a> {
    driver: &'a str,
    num_queues: u16,
    iothread_vq_mapping: Vec<Entry>,
}

/// QEMU's arguments for the mapping of a virtio-blk device that QEMU itself serves, an option and
/// its value each.
///
/// # Panics
/// Never: names and numbers are JSON.
#[must_use]
pub fn qemu_arguments(mapping: &Mapping) -> Vec<(&'static str, String)> {
    let iothreads = mapping.iothreads().into_iter();
    let mut arguments: Vec<_> =
        iothreads.map(|name| ("-object", format!("iothread,id={name}"))).collect();
    let device = VirtioBlk {
        driver: "virtio-blk-pci",
        num_queues: mapping.queues(),
        iothread_vq_mapping: mapping.entries(),
    };
    let device = serde_json::to_string(&device).expect("names and numbers are JSON");
    arguments.push(("-device", device));
    arguments
}

/// QEMU's arguments for a guest that attaches to a device of the data plane; beside them it needs
/// memory that can be shared ([`SHARED_MEMORY_ARGUMENTS`]).
#[must_use]
pub fn qemu_front_end(device: &FrontEnd<'_>) -> Vec<(&'static str, String)> {
    // QEMU's ids begin with a letter and have no `@` or `+` (util/id.c); options end at a comma.
    let id: String =
        device.name.as_str().chars().map(|c| if "@+".contains(c) { '-' } else { c }).collect();
    let path = device.socket.display().to_string().replace(',', ",,");
    let queues = device.queues;
    vec![
        ("-chardev", format!("socket,id=char-{id},path={path},reconnect-ms={RECONNECT_MS}")),
        (
            "-device",
            format!("vhost-user-blk-pci,id=disk-{id},chardev=char-{id},num-queues={queues}"),
        ),
    ]
}

/// A guest's memory as the data plane needs it: replace the size.
pub const SHARED_MEMORY_ARGUMENTS: [(&str, &str); 2] = [
    ("-machine", "q35,memory-backend=mem"),
    ("-object", "memory-backend-memfd,id=mem,size=512M,share=on"),
];

/// libvirt's elements for shared memory, in `<domain>`.
pub const SHARED_MEMORY_XML: &str =
    "<memoryBacking>\n  <source type='memfd'/>\n  <access mode='shared'/>\n</memoryBacking>\n";

/// A `<disk>` of libvirt (7.1 or later) for a device of the data plane. `target` is its name for
/// libvirt, such as `vda`. The IOThreads are the data plane's, so the element names none: libvirt
/// refuses them there.
#[must_use]
pub fn libvirt_disk(device: &FrontEnd<'_>, target: &str) -> String {
    let mut path = String::new();
    for c in device.socket.display().to_string().chars() {
        match c {
            '&' => path += "&amp;",
            '<' => path += "&lt;",
            '>' => path += "&gt;",
            '\'' => path += "&apos;",
            '"' => path += "&quot;",
            c => path.push(c),
        }
    }
    format!(
        "<disk type='vhostuser' device='disk'>\n\
         \x20 <driver name='qemu' type='raw' queues='{}'/>\n\
         \x20 <source type='unix' path='{path}'>\n\
         \x20   <reconnect enabled='yes' timeout='1'/>\n\
         \x20 </source>\n\
         \x20 <target dev='{target}' bus='virtio'/>\n\
         </disk>\n",
        device.queues
    )
}

/// libvirt's number of an IOThread whose QEMU name is libvirt's own: `iothread3`.
#[must_use]
pub fn libvirt_id(name: &IoThreadName) -> Option<IoThreadId> {
    let digits = name.as_str().strip_prefix("iothread")?;
    let number: u32 = digits.parse().ok().filter(|n| *n > 0)?;
    // `iothread03` is another name than `iothread3`.
    (number.to_string() == digits).then(|| IoThreadId::new(number))
}

/// libvirt's numbers for the IOThreads of a mapping: their own if all are named as libvirt names
/// them, else 1, 2, … by their first queues.
#[must_use]
pub fn libvirt_ids(mapping: &Mapping) -> BTreeMap<IoThreadName, IoThreadId> {
    let names = mapping.iothreads();
    let own: Option<BTreeMap<_, _>> =
        names.iter().map(|&name| Some((name.clone(), libvirt_id(name)?))).collect();
    own.unwrap_or_else(|| {
        let numbered = names.into_iter().cloned().zip((1..).map(IoThreadId::new));
        numbered.collect()
    })
}

/// libvirt's `<driver>` with the mapping, for a disk that QEMU itself serves.
#[must_use]
pub fn libvirt_driver(mapping: &Mapping) -> String {
    let ids = libvirt_ids(mapping);
    let threads = mapping.entries().into_iter();
    driver_xml(
        mapping.queues().into(),
        threads.map(|entry| (ids[&entry.iothread], entry.vqs.unwrap_or_default())),
    )
}

/// `<driver name='qemu' queues='…'>` with the queues of each IOThread.
pub(crate) fn driver_xml<Q: Display>(
    queues: usize,
    threads: impl Iterator<Item = (IoThreadId, Vec<Q>)>,
) -> String {
    let mut xml = format!("<driver name='qemu' queues='{queues}'>\n  <iothreads>\n");
    // Writing to a String does not fail.
    for (thread, queues) in threads {
        let _ = writeln!(xml, "    <iothread id='{thread}'>");
        for queue in queues {
            let _ = writeln!(xml, "      <queue id='{queue}'/>");
        }
        xml += "    </iothread>\n";
    }
    xml += "  </iothreads>\n</driver>\n";
    xml
}

/// The keys `queues` and `mapping` of a device in a serve configuration.
#[must_use]
pub fn toml(mapping: &Mapping) -> String {
    let mut text = format!("queues = {}\nmapping = [\n", mapping.queues());
    for entry in mapping.entries() {
        let vqs: Vec<String> = entry.queues().iter().map(u32::to_string).collect();
        let _ = writeln!(
            text,
            "  {{ iothread = \"{}\", vqs = [{}] }},",
            entry.iothread,
            vqs.join(", ")
        );
    }
    text += "]\n";
    text
}
