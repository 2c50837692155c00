//! Which QEMU processes run on this host, from their command lines.
//!
//! A command line is what its process was started with: a claim of that process,
//! to be checked against what its monitor says. Disks that were plugged in later
//! are not in it.
//!
//! Terms: *properties* are the `key=value,key=value` of an option, in which a
//! comma is doubled, or one JSON object, whose nested keys are joined by dots as
//! QEMU itself does (`file.filename`).
//!
//! Properties: `libvirts_command_line_gives_the_domain_and_no_monitor_socket`,
//! `plain_command_line_gives_its_sockets`, `drive_with_a_doubled_comma_is_found`,
//! `hostile_command_lines_do_no_harm`, `other_processes_are_no_qemu`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{Address, Domain};
use crate::HostError;
use crate::sysfs::Sysfs;

/// A disk of a QEMU process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QemuDisk {
    /// The guest's device, such as `virtio-blk-pci`; `None`: a `-drive` without `-device`.
    pub driver: Option<String>,
    /// The device's id. The QOM path of a virtio-blk disk with one is
    /// `/machine/peripheral/ID/virtio-backend`.
    pub id: Option<String>,
    /// The block node or drive that it is made of.
    pub node: Option<String>,
    /// The file or device on the host, where the command line tells it.
    pub file: Option<PathBuf>,
    /// The IOThreads that serve it; none: QEMU's main thread.
    pub iothreads: Vec<String>,
}

/// A QEMU process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QemuProcess {
    /// Its process id.
    pub pid: u32,
    /// The VM's name.
    pub name: Option<String>,
    /// The VM's UUID.
    pub uuid: Option<String>,
    /// The VM's name if libvirt started it. libvirt then holds its monitor and its
    /// agent, and knows it by [`Self::domain`].
    pub libvirt_domain: Option<String>,
    /// QMP sockets that a client can connect to, none of them libvirt's.
    pub monitors: Vec<PathBuf>,
    /// The guest agent's socket, unless libvirt holds it.
    pub agent: Option<PathBuf>,
    /// The ids of its IOThreads.
    pub iothreads: Vec<String>,
    /// Its disks.
    pub disks: Vec<QemuDisk>,
    /// Whether it was started with a guest that had run before: one that was saved, or ran elsewhere.
    pub is_resumed: bool,
}

/// The name of the agent's port in the guest.
const AGENT_PORT: &str = "org.qemu.guest_agent.0";
/// libvirt's name of the monitor that it holds, since its first version with QMP.
const LIBVIRT_MONITOR: &str = "charmonitor";
/// No key that is looked at is longer; it bounds what a hostile one can cost.
const LONGEST_KEY: usize = 256;

/// The QEMU processes, by process id.
///
/// # Errors
/// If `/proc` cannot be listed. A process that ends meanwhile is left out.
pub fn processes(sysfs: &dyn Sysfs) -> Result<Vec<QemuProcess>, HostError> {
    let proc = Path::new("/proc");
    let names =
        sysfs.list(proc).map_err(|source| HostError::Read { file: proc.to_owned(), source })?;
    let process = |name: String| {
        let pid = name.parse().ok()?;
        let directory = proc.join(name);
        let command_line = sysfs.read(&directory.join("cmdline")).ok()?;
        // With `-run-with async-teardown=on` QEMU has a process that frees its memory in the end, with its command
        // line and in its cgroup (system/async-teardown.c names it).
        if sysfs.read(&directory.join("comm")).is_ok_and(|comm| comm.starts_with("cleanup/")) {
            return None;
        }
        let cwd = sysfs.link(&directory.join("cwd")).ok();
        QemuProcess::parse(pid, &command_line, cwd.as_deref())
    };
    let mut found: Vec<_> = names.into_iter().filter_map(process).collect();
    found.sort_by_key(|p| p.pid);
    Ok(found)
}

type Properties = BTreeMap<String, String>;

impl QemuProcess {
    /// The process with the text of `/proc/PID/cmdline`, whose paths are relative
    /// to `cwd`; `None` if it is no QEMU system emulator.
    #[must_use]
    pub fn parse(pid: u32, command_line: &str, cwd: Option<&Path>) -> Option<Self> {
        let mut arguments = command_line.split_terminator('\0');
        let program = Path::new(arguments.next()?).file_name()?.to_str()?;
        if !program.starts_with("qemu-system-") && !["qemu-kvm", "kvm"].contains(&program) {
            return None;
        }
        let options = Options(arguments.collect());
        let absolute = |path: &str| cwd.unwrap_or(Path::new("")).join(path);

        let name = options.of("name").last().map(|text| properties(text, "guest"));
        let name = name.and_then(|mut p| p.remove("guest"));
        let chardevs: BTreeMap<String, Properties> = options
            .of("chardev")
            .filter_map(|text| by("id", properties(text, "backend")))
            .collect();
        let chardev_socket = |id: &str| {
            let chardev = chardevs.get(id)?;
            if chardev.get("backend").is_none_or(|b| b != "socket") {
                return None;
            }
            listens_at(chardev).map(absolute)
        };

        let control = options.of("mon").map(|text| properties(text, "chardev"));
        let control = control.filter(|p| p.get("mode").is_some_and(|m| m == "control"));
        let control: Vec<String> = control.filter_map(|mut p| p.remove("chardev")).collect();
        let is_libvirt = control.iter().any(|id| id == LIBVIRT_MONITOR);
        let mut monitors: Vec<PathBuf> = control
            .iter()
            .filter(|id| *id != LIBVIRT_MONITOR)
            .filter_map(|id| chardev_socket(id))
            .collect();
        for text in options.of("qmp").chain(options.of("qmp-pretty")) {
            let unix = text.strip_prefix("unix:").map(|rest| properties(rest, "path"));
            let by_id = text.strip_prefix("chardev:").and_then(chardev_socket);
            monitors.extend(unix.as_ref().and_then(listens_at).map(absolute).or(by_id));
        }

        let devices: Vec<Properties> =
            options.of("device").map(|text| properties(text, "driver")).collect();
        let port = devices.iter().find(|p| p.get("name").is_some_and(|n| n == AGENT_PORT));
        let agent = port.and_then(|p| chardev_socket(p.get("chardev")?));
        let iothreads = options.of("object").map(|text| properties(text, "qom-type"));
        let iothreads = iothreads.filter(|p| p.get("qom-type").is_some_and(|t| t == "iothread"));
        Some(Self {
            pid,
            libvirt_domain: name.clone().filter(|_| is_libvirt),
            name,
            uuid: options.of("uuid").last().map(str::to_owned),
            monitors,
            agent: agent.filter(|_| !is_libvirt),
            iothreads: iothreads.filter_map(|mut p| p.remove("id")).collect(),
            disks: disks(&options, &devices, absolute),
            is_resumed: options.of("incoming").chain(options.of("loadvm")).next().is_some(),
        })
    }

    /// How to reach its monitor.
    #[must_use]
    pub fn monitor_address(&self) -> Option<Address> {
        self.address(self.monitors.first())
    }

    /// How to reach its guest's agent. A libvirt domain may turn out to have none.
    #[must_use]
    pub fn agent_address(&self) -> Option<Address> {
        self.address(self.agent.as_ref())
    }

    /// What libvirt knows it by, if libvirt started it.
    #[must_use]
    pub fn domain(&self) -> Option<Domain> {
        let name = self.libvirt_domain.clone()?;
        Some(Domain { name, uuid: self.uuid.clone() })
    }

    fn address(&self, socket: Option<&PathBuf>) -> Option<Address> {
        let domain = self.domain().map(Address::Domain);
        domain.or_else(|| socket.cloned().map(Address::Socket))
    }
}

/// A command line's arguments.
struct Options<'a>(Vec<&'a str>);

impl<'a> Options<'a> {
    /// The values of an option that takes one, in order.
    fn of(&self, option: &'static str) -> impl Iterator<Item = &'a str> {
        self.0.windows(2).filter_map(move |pair| {
            let name = pair[0].strip_prefix('-')?;
            (name.strip_prefix('-').unwrap_or(name) == option).then_some(pair[1])
        })
    }
}

/// An option's properties; `implied` is the key of a first value without one.
fn properties(text: &str, implied: &str) -> Properties {
    let mut properties = Properties::new();
    if text.starts_with('{') {
        // The parser refuses deep nesting, which bounds the recursion.
        if let Ok(value) = serde_json::from_str(text) {
            flatten(String::new(), value, &mut properties);
        }
        return properties;
    }
    for (index, part) in split(text).into_iter().enumerate() {
        let (key, value) = match part.split_once('=') {
            Some((key, value)) => (key, value),
            None if index == 0 => (implied, part.as_str()),
            None => (part.as_str(), "on"),
        };
        properties.insert(key.to_owned(), value.to_owned());
    }
    properties
}

/// Splits at single commas; a doubled one is a comma.
fn split(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut rest = text.chars().peekable();
    while let Some(c) = rest.next() {
        if c == ',' && rest.next_if_eq(&',').is_none() {
            parts.push(String::new());
        } else if let Some(part) = parts.last_mut() {
            part.push(c);
        }
    }
    parts
}

fn flatten(key: String, value: Value, properties: &mut Properties) {
    let below = |name: &str| if key.is_empty() { name.to_owned() } else { format!("{key}.{name}") };
    match value {
        _ if key.len() > LONGEST_KEY => {}
        Value::Object(members) => {
            for (name, member) in members {
                flatten(below(&name), member, properties);
            }
        }
        Value::Array(members) => {
            for (index, member) in members.into_iter().enumerate() {
                flatten(below(&index.to_string()), member, properties);
            }
        }
        Value::String(text) => drop(properties.insert(key, text)),
        other => drop(properties.insert(key, other.to_string())),
    }
}

/// Properties with the value of their `key`.
fn by(key: &str, properties: Properties) -> Option<(String, Properties)> {
    Some((properties.get(key)?.clone(), properties))
}

/// Where a socket listens for clients; `None` if it has no path or does not listen.
fn listens_at(socket: &Properties) -> Option<&str> {
    let is = |key: &str| {
        socket.get(key).is_some_and(|v| ["on", "yes", "true", "y"].contains(&v.as_str()))
    };
    let path = socket.get("path").filter(|p| !p.is_empty())?;
    (is("server") && !is("abstract")).then_some(path)
}

fn disks(
    options: &Options<'_>,
    devices: &[Properties],
    absolute: impl Fn(&str) -> PathBuf,
) -> Vec<QemuDisk> {
    let nodes: BTreeMap<String, Properties> = options
        .of("blockdev")
        .filter_map(|text| by("node-name", properties(text, "driver")))
        .collect();
    let drives: Vec<Properties> =
        options.of("drive").map(|text| properties(text, "file")).collect();
    let drive_file = |drive: &Properties| drive.get("file").and_then(|f| plain(f)).map(&absolute);
    let file = |node: &str| {
        let drive = drives.iter().find(|d| d.get("id").is_some_and(|id| id == node));
        drive.map_or_else(|| node_file(node, &nodes).map(&absolute), drive_file)
    };
    let of_device = |device: &Properties| {
        let node = device.get("drive")?;
        Some(QemuDisk {
            driver: device.get("driver").cloned(),
            id: device.get("id").cloned(),
            node: Some(node.clone()),
            file: file(node),
            iothreads: iothreads(device),
        })
    };
    // `if=none` is a drive for a -device; any other makes its own.
    let of_drive = |drive: &Properties| {
        let makes_its_own = drive.get("if").is_none_or(|i| i != "none");
        makes_its_own.then(|| QemuDisk {
            driver: None,
            id: None,
            node: drive.get("id").cloned(),
            file: drive_file(drive),
            iothreads: Vec::new(),
        })
    };
    let devices = devices.iter().filter_map(of_device);
    devices.chain(drives.iter().filter_map(of_drive)).collect()
}

/// The IOThreads of a device: one, or those of its virtqueue mapping.
fn iothreads(device: &Properties) -> Vec<String> {
    let mapped = |key: &str| {
        let index = key.strip_prefix("iothread-vq-mapping.")?.strip_suffix(".iothread")?;
        index.parse::<usize>().ok()
    };
    let mut found: Vec<(usize, &String)> = device
        .iter()
        .filter_map(|(key, value)| match key.as_str() {
            "iothread" => Some((0, value)),
            _ => Some((mapped(key)?, value)),
        })
        .collect();
    found.sort_unstable();
    found.into_iter().map(|(_, id)| id.clone()).collect()
}

/// The file under a block node, through the nodes that are stacked on it.
fn node_file<'a>(node: &'a str, nodes: &'a BTreeMap<String, Properties>) -> Option<&'a str> {
    let mut node = node;
    // A circle of nodes ends here too.
    for _ in 0..nodes.len() {
        let properties = nodes.get(node)?;
        if let Some(file) = properties.get("filename").or_else(|| properties.get("file.filename")) {
            return Some(file);
        }
        node = properties.get("file")?;
    }
    None
}

/// A drive's file, if it is a path and no other protocol.
fn plain(file: &str) -> Option<&str> {
    match file.split_once(':') {
        Some(("file", path)) => Some(path),
        Some((protocol, _)) if !protocol.contains('/') => None,
        _ => Some(file),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::FakeSysfs;
    use proptest::prelude::*;

    /// As libvirt 9 writes it for a disk with a format layer and an agent, shortened.
    const LIBVIRT: &[&str] = &[
        "/usr/bin/qemu-system-x86_64",
        "-name",
        "guest=plc,debug-threads=on",
        "-S",
        "-object",
        r#"{"qom-type":"secret","id":"masterKey0","format":"raw","file":"/var/lib/libvirt/qemu/domain-1-plc/master-key.aes"}"#,
        "-object",
        r#"{"qom-type":"iothread","id":"iothread1"}"#,
        "-object",
        r#"{"qom-type":"iothread","id":"iothread2"}"#,
        "-uuid",
        "6ba7b810-9dad-11d1-80b4-00c04fd430c8",
        "-no-user-config",
        "-nodefaults",
        "-chardev",
        "socket,id=charmonitor,fd=25,server=on,wait=off",
        "-mon",
        "chardev=charmonitor,id=monitor,mode=control",
        "-blockdev",
        r#"{"driver":"host_device","filename":"/dev/vg/plc","aio":"native","node-name":"libvirt-1-storage","cache":{"direct":true,"no-flush":false},"auto-read-only":true,"discard":"unmap"}"#,
        "-blockdev",
        r#"{"node-name":"libvirt-1-format","read-only":false,"driver":"raw","file":"libvirt-1-storage"}"#,
        "-device",
        r#"{"driver":"virtio-blk-pci","iothread-vq-mapping":[{"iothread":"iothread2"},{"iothread":"iothread1"}],"bus":"pci.3","addr":"0x0","drive":"libvirt-1-format","id":"virtio-disk0","bootindex":1}"#,
        "-chardev",
        "socket,id=charchannel0,path=/run/libvirt/qemu/channel/1-plc/org.qemu.guest_agent.0,server=on,wait=off",
        "-device",
        r#"{"driver":"virtserialport","bus":"virtio-serial0.0","nr":1,"chardev":"charchannel0","id":"channel0","name":"org.qemu.guest_agent.0"}"#,
    ];

    fn parse(arguments: &[&str]) -> Option<QemuProcess> {
        let text: String = arguments.iter().map(|a| format!("{a}\0")).collect();
        QemuProcess::parse(42, &text, Some(Path::new("/home/vm")))
    }

    #[test]
    fn libvirts_command_line_gives_the_domain_and_no_monitor_socket() {
        let process = parse(LIBVIRT).unwrap();
        let disk = QemuDisk {
            driver: Some("virtio-blk-pci".to_owned()),
            id: Some("virtio-disk0".to_owned()),
            node: Some("libvirt-1-format".to_owned()),
            file: Some("/dev/vg/plc".into()),
            iothreads: vec!["iothread2".to_owned(), "iothread1".to_owned()],
        };
        let expected = QemuProcess {
            pid: 42,
            name: Some("plc".to_owned()),
            uuid: Some("6ba7b810-9dad-11d1-80b4-00c04fd430c8".to_owned()),
            libvirt_domain: Some("plc".to_owned()),
            monitors: Vec::new(),
            agent: None,
            iothreads: vec!["iothread1".to_owned(), "iothread2".to_owned()],
            disks: vec![disk],
            is_resumed: false,
        };
        assert_eq!(process, expected);
        let restored = parse(&[LIBVIRT, &["-incoming", "defer"]].concat()).unwrap();
        assert_eq!(restored, QemuProcess { is_resumed: true, ..expected });
        // Its name might be a number, which virsh takes for another domain's id.
        let uuid = process.uuid.clone();
        let address = Some(Address::Domain(Domain { name: "plc".to_owned(), uuid }));
        assert_eq!(
            (process.monitor_address(), process.agent_address()),
            (address.clone(), address)
        );
    }

    #[test]
    fn libvirts_monitor_with_a_path_is_its_own_too() {
        let process = parse(&[
            "/usr/libexec/qemu-kvm",
            "-name",
            "guest=plc",
            "-chardev",
            "socket,id=charmonitor,path=/var/lib/libvirt/qemu/domain-1-plc/monitor.sock,server,nowait",
            "-mon",
            "chardev=charmonitor,id=monitor,mode=control",
            "-qmp",
            "unix:/run/extra.qmp,server=on,wait=off",
        ]);
        let process = process.unwrap();
        assert_eq!(process.libvirt_domain.as_deref(), Some("plc"));
        assert_eq!(process.monitors, [Path::new("/run/extra.qmp")]);
    }

    #[test]
    fn plain_command_line_gives_its_sockets() {
        let process = parse(&[
            "qemu-system-aarch64",
            "-name",
            "plc",
            "-qmp",
            "unix:plc.qmp,server,nowait",
            "--qmp-pretty",
            "unix:/run/pretty.qmp,server=on,wait=off",
            "-qmp",
            "tcp:localhost:4444,server=on",
            "-qmp",
            "unix:/run/client.qmp",
            "-chardev",
            "socket,path=/run/mon,,1.qmp,id=mon0,server=on,wait=off",
            "-mon",
            "mon0,mode=control",
            "-chardev",
            "socket,id=hmp,path=/run/hmp,server=on",
            "-mon",
            "chardev=hmp",
            "-chardev",
            "socket,id=agent,path=/run/plc.agent,server=on,wait=off",
            "-device",
            "virtserialport,chardev=agent,name=org.qemu.guest_agent.0",
            "-object",
            "iothread,id=io0,poll-max-ns=32768",
            "-blockdev",
            "driver=raw,node-name=root,file.driver=file,file.filename=root.img",
            "-device",
            "virtio-blk-pci,drive=root,id=d0,iothread=io0",
        ]);
        let process = process.unwrap();
        assert_eq!(process.name.as_deref(), Some("plc"));
        assert_eq!(process.libvirt_domain, None);
        let monitors = ["/run/mon,1.qmp", "/home/vm/plc.qmp", "/run/pretty.qmp"];
        assert_eq!(process.monitors, monitors.map(PathBuf::from));
        assert_eq!(process.monitor_address(), Some(Address::Socket("/run/mon,1.qmp".into())));
        assert_eq!(process.agent.as_deref(), Some(Path::new("/run/plc.agent")));
        assert_eq!(process.iothreads, ["io0"]);
        assert_eq!(process.disks[0].file.as_deref(), Some(Path::new("/home/vm/root.img")));
        assert_eq!(process.disks[0].iothreads, ["io0"]);
    }

    #[test]
    fn drive_with_a_doubled_comma_is_found() {
        let process = parse(&[
            "qemu-system-x86_64",
            "-drive",
            "file=/img/a,,b.img,if=none,id=drive0,format=raw",
            "-device",
            "virtio-blk-pci,drive=drive0",
            "-drive",
            "file=/img/c.img,if=virtio",
            "-drive",
            "file=nbd:localhost:10809,id=remote",
        ]);
        let disks = process.unwrap().disks;
        let files: Vec<_> = disks.iter().map(|d| d.file.as_deref()).collect();
        let expected = [Some(Path::new("/img/a,b.img")), Some(Path::new("/img/c.img")), None];
        assert_eq!(files, expected);
        assert_eq!(disks[0].driver.as_deref(), Some("virtio-blk-pci"));
        assert_eq!(disks[2].node.as_deref(), Some("remote"));
    }

    #[test]
    fn other_processes_are_no_qemu() {
        for program in ["", "/bin/sh", "qemu-img", "/usr/bin/", "vim-qemu-system-x86_64", ".."] {
            assert_eq!(parse(&[program, "-name", "plc"]), None, "{program}");
        }
        assert_eq!(QemuProcess::parse(1, "", None), None);
        assert!(parse(&["kvm"]).is_some());
    }

    #[test]
    fn processes_are_found_by_their_command_lines() {
        let sysfs = FakeSysfs::v2();
        let line = |name: &str| format!("/usr/bin/qemu-system-x86_64\0-name\0{name}\0");
        sysfs.put("/proc/1200/cmdline", &line("backup"));
        sysfs.put("/proc/99/cmdline", &line("plc"));
        sysfs.put("/proc/1/cmdline", "/sbin/init\0");
        sysfs.put("/proc/2/comm", "kthreadd\n");
        sysfs.put("/proc/sys/kernel/osrelease", "6.12\n");
        let found = processes(&sysfs).unwrap();
        let names: Vec<_> = found.iter().map(|p| (p.pid, p.name.as_deref().unwrap())).collect();
        assert_eq!(names, [(99, "plc"), (1200, "backup")]);
        assert!(processes(&FakeSysfs::bare()).is_err());
    }

    #[test]
    fn real_command_lines_keep_their_separators() {
        let own = crate::sysfs::RealSysfs::new("/");
        let text = own.read(Path::new("/proc/self/cmdline")).unwrap();
        assert!(text.ends_with('\0'), "{text:?}");
        processes(&own).unwrap();
    }

    #[test]
    fn hostile_command_lines_do_no_harm() {
        let deep = format!("{{\"a\":{}", "[".repeat(1 << 20));
        let long_key = format!("{{\"{}\":{{\"b\":1}}}}", "k".repeat(1 << 20));
        let circle = r#"{"node-name":"a","driver":"raw","file":"a"}"#;
        let process = parse(&[
            "qemu-system-x86_64",
            "-name",
            "guest=\u{1b}[2J../../x,,=,",
            "-blockdev",
            circle,
            "-device",
            "virtio-blk-pci,drive=a",
            "-object",
            &deep,
            "-object",
            &long_key,
            "-chardev",
            ",,,",
            "-mon",
            "",
            "-qmp",
            "unix:",
            "-qmp",
        ]);
        let process = process.unwrap();
        assert_eq!(process.name.as_deref(), Some("\u{1b}[2J../../x,="));
        assert_eq!(process.disks[0].file, None);
        assert!(process.monitors.is_empty());
    }

    proptest! {
        #[test]
        fn any_command_line_does_no_harm(
            arguments in prop::collection::vec(
                prop_oneof![
                    "-(name|qmp|mon|chardev|device|blockdev|drive|object)",
                    "[a-z=,:.{}\\[\\]\"]{0,40}",
                    any::<String>(),
                ],
                0..20,
            )
        ) {
            let mut all = vec!["qemu-system-x86_64"];
            all.extend(arguments.iter().map(String::as_str));
            prop_assert!(parse(&all).is_some());
        }
    }
}
