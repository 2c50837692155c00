//! What a configuration names that this host does not have.

use std::collections::BTreeSet;
use std::path::Path;

use rtvirtio_spec::serve::{Configuration, Engine, Listen, NicLink};
use rtvirtio_units::CpuId;

/// Each with the remedy. What is there may still not be opened by the user that serves.
pub(super) fn missing(configuration: &Configuration, online: &BTreeSet<CpuId>) -> Vec<String> {
    let mut missing = Vec::new();
    for iothread in &configuration.iothreads {
        let absent: Vec<String> = iothread
            .cpus
            .iter()
            .filter(|cpu| !online.contains(cpu))
            .map(ToString::to_string)
            .collect();
        if !absent.is_empty() {
            missing.push(format!(
                "IOThread {}: CPU {} is not online here (of {}): it would not start",
                iothread.name,
                absent.join(", "),
                online.len()
            ));
        }
    }
    let sockets = configuration.control.iter().map(|control| &control.socket);
    let sockets = sockets
        .chain(configuration.devices.iter().filter_map(|device| match &device.listen {
            Listen::Path(path) => Some(path),
            Listen::Activated(_) => None,
        }))
        .chain(configuration.nics.iter().map(|nic| &nic.socket));
    let directories: BTreeSet<&Path> = sockets.filter_map(|socket| socket.parent()).collect();
    for directory in directories.into_iter().filter(|directory| !directory.is_dir()) {
        missing.push(format!(
            "{} is not there, where sockets are to be: mkdir -p {0} (the unit makes /run/rtvirtio)",
            directory.display()
        ));
    }
    for device in &configuration.devices {
        let (path, what) = match &device.engine {
            Engine::File(file) => (&file.path, "image"),
            Engine::Nvme(nvme) => (&nvme.path, "device"),
            Engine::Ram { .. } | Engine::Ssd(_) => continue,
        };
        if !path.exists() {
            missing.push(format!(
                "device {}: its {what} {} is not there",
                device.name,
                path.display()
            ));
        }
    }
    for nic in &configuration.nics {
        let tap = match &nic.link {
            NicLink::Tap(tap) => tap,
            NicLink::Stream(path) if !path.exists() => {
                missing.push(format!(
                    "network device {}: nobody listens at {}: start what is behind it first",
                    nic.name,
                    path.display()
                ));
                continue;
            }
            // The peer of a datagram socket may come later.
            NicLink::Stream(_) | NicLink::Dgram { .. } | NicLink::Network(_) => continue,
        };
        if !Path::new("/sys/class/net").join(tap).exists() {
            missing.push(format!(
                "network device {}: there is no TAP {1}: ip tuntap add dev {1} mode tap vnet_hdr{2}",
                nic.name,
                tap,
                if nic.pairs > 1 { " multi_queue" } else { "" }
            ));
        }
    }
    missing
}

#[cfg(test)]
mod tests {
    use rtvirtio_spec::serve;

    use super::*;

    #[test]
    fn what_the_host_lacks_is_named_and_what_it_has_is_not() {
        let text = "version = 1
            [control]
            socket = '/nonexistent/control'
            [[iothread]]
            name = 'here'
            cpus = [0]
            [[iothread]]
            name = 'elsewhere'
            cpus = [0, 2, 3]
            [[device]]
            name = 'image'
            vm = 'a'
            socket = '/tmp/a'
            engine = { type = 'file', path = '/nonexistent/a.raw' }
            [[device]]
            name = 'ram'
            vm = 'a'
            socket = '/tmp/b'
            engine = { type = 'ram', size = '1M' }
            [[nic]]
            name = 'net'
            vm = 'a'
            socket = '/tmp/c'
            tap = 'nonexistent'
            queues = 2";
        let configuration = serve::parse("serve.toml", text).unwrap();
        let found = missing(&configuration, &[CpuId::new(0), CpuId::new(1)].into());
        let [iothread, directory, image, tap] = &found[..] else { panic!("{found:#?}") };
        assert!(iothread.starts_with("IOThread elsewhere: CPU 2, 3 is not online here (of 2)"));
        assert!(directory.contains("mkdir -p /nonexistent"), "{directory}");
        assert!(image.contains("its image /nonexistent/a.raw is not there"), "{image}");
        assert!(
            tap.contains("ip tuntap add dev nonexistent mode tap vnet_hdr multi_queue"),
            "{tap}"
        );
    }
}
