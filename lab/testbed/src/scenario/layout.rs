//! What a server serves for a scenario: a disk a VM, whose requests cost CPU.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use rtvirtio_engine::SsdConfig;
use rtvirtio_units::CpuId;
use serde::{Deserialize, Serialize};

use crate::server::Configuration;

/// What the disks are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Disk {
    /// Memory: a request ends when its IOThread has done its part.
    Null,
    /// Emulated SSDs of this reference name, one for each VM.
    Ssd(String),
}

impl FromStr for Disk {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "null" => Ok(Self::Null),
            name => match name.parse::<SsdConfig>() {
                Ok(_) => Ok(Self::Ssd(name.to_owned())),
                Err(error) => Err(format!("{error}; or null")),
            },
        }
    }
}

impl TryFrom<String> for Disk {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Disk> for String {
    fn from(disk: Disk) -> Self {
        disk.to_string()
    }
}

impl fmt::Display for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Null => "null",
            Self::Ssd(name) => name,
        })
    }
}

/// What the server serves.
#[derive(Debug)]
pub(super) struct Layout<'a> {
    pub directory: &'a Path,
    pub cpus: &'a [CpuId],
    pub vms: u16,
    pub queues: u16,
    pub disk: &'a Disk,
    /// Of each disk.
    pub bytes: u64,
    pub cpu_us: u32,
    pub kib_ns: u32,
    pub seed: u64,
}

impl Layout<'_> {
    pub(super) fn socket(&self, vm: usize) -> PathBuf {
        self.directory.join(format!("vm{vm}.sock"))
    }

    pub(super) fn control(&self) -> PathBuf {
        self.directory.join("control.sock")
    }

    /// The socket that is made last.
    pub(super) fn last_socket(&self) -> PathBuf {
        self.socket(usize::from(self.vms) - 1)
    }

    /// The last CPU first, as in the simulator.
    fn io_cpus(&self) -> impl Iterator<Item = CpuId> {
        self.cpus.iter().rev().copied()
    }

    /// The configuration of `rtvirtio serve`.
    pub(super) fn toml(&self, policy: &str, threads: u16) -> String {
        let cpus: Vec<u32> = self.io_cpus().map(CpuId::get).collect();
        let threads = cpus.iter().copied().map(Some).take(threads.into());
        let iocores = format!("[iocores]\npolicy = \"{policy}\"\ncpus = {cpus:?}\nborrow = true\n");
        let engine = match self.disk {
            Disk::Null => "type = \"ram\"".to_owned(),
            Disk::Ssd(name) => {
                format!("type = \"ssd\", ssd = \"{name}\", seed = {}", self.seed % 1_000 + 1)
            }
        };
        let Self { bytes, cpu_us, kib_ns, .. } = self;
        let engine = format!("{engine}, size = {bytes}, cpu_us = {cpu_us}, cpu_kib_ns = {kib_ns}");
        let disk = |all: Configuration, vm: usize| {
            let (name, socket) = (format!("vm{vm}"), self.socket(vm));
            all.disk((&name, &name), &socket, self.queues.into(), &engine)
                .with("fixed_buffers = \"off\"\n")
        };
        let all = Configuration::new(Some(&self.control()), threads).with(iocores);
        (0..usize::from(self.vms)).fold(all, disk).text()
    }
}

#[cfg(test)]
mod tests {
    use rtvirtio_spec::serve::{self, Engine};
    use rtvirtio_units::Nanos;

    use super::*;

    fn layout<'a>(cpus: &'a [CpuId], disk: &'a Disk) -> Layout<'a> {
        Layout {
            directory: Path::new("/tmp/a b"),
            cpus,
            vms: 2,
            queues: 3,
            disk,
            bytes: 8 << 20,
            cpu_us: 20,
            kib_ns: 40,
            seed: 7,
        }
    }

    #[test]
    fn server_has_a_pinned_iothread_a_cpu_and_a_costly_disk_a_vm() {
        let cpus = [4, 6].map(CpuId::new);
        let text = layout(&cpus, &Disk::Null).toml("dynamic", 1);
        let found = serve::parse("test", &text).unwrap();
        assert_eq!(found.iocores.cpus, [6, 4].map(CpuId::new));
        assert_eq!((found.iothreads.len(), found.iothreads[0].cpus[0].get()), (1, 6));
        assert_eq!((found.devices.len(), found.devices[1].queues()), (2, 3));
        let cost = serve::CpuCost { request: Nanos::from_micros(20), kib: Nanos::new(40) };
        let Engine::Ram { size, cpu } = found.devices[0].engine else { panic!("RAM") };
        assert_eq!((size.get(), cpu), (8 << 20, cost));
        let disk = "ref-8x80".parse().unwrap();
        let text = layout(&cpus, &disk).toml("static", 2);
        let found = serve::parse("test", &text).unwrap();
        assert_eq!(found.iothreads[1].cpus[0].get(), 4);
        let Engine::Ssd(ssd) = &found.devices[0].engine else { panic!("an SSD") };
        assert_eq!((ssd.model.as_str(), ssd.cpu), ("ref-8x80", cost));
        // Round robin over both.
        assert_eq!(found.devices[0].mapping.by_queue().len(), 3);
    }

    #[test]
    fn disk_that_is_unknown_is_refused_with_those_that_are_known() {
        let error = "ref-1".parse::<Disk>().unwrap_err();
        assert!(error.contains("ref-4x250") && error.ends_with("; or null"), "{error}");
    }
}
