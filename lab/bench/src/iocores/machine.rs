//! Where a trial runs, and how the server and the simulator are told of it.
//!
//! Two CPUs. vCPUs (clients and what computes) may run on both, and every policy may borrow either from
//! them (the data plane's `vcpus`): what its IOThreads cost the vCPUs counts in the utility.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use rtvirtio_engine::SsdConfig;
use rtvirtio_iocores::{Kind, Limits, Policy, policy};
use rtvirtio_sim::{Backend, Costs, Machine};
use rtvirtio_units::CpuId;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::cell::{Disk, PolicyConfig};
use crate::dataplane::server::Configuration;

/// CPUs of a trial.
pub(crate) const CPUS: u16 = 2;

/// The CPUs of a trial: the first that this process may use.
///
/// # Errors
/// If there are too few.
pub(crate) fn cpus() -> Result<Vec<CpuId>> {
    let set = sched_getaffinity(None)?;
    let all = (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu));
    let cpus: Vec<CpuId> = all.take(CPUS.into()).map(|cpu| CpuId::new(cpu as u32)).collect();
    if cpus.len() < CPUS.into() {
        bail!("this needs {CPUS} CPUs, and this process may use {} (see taskset -p)", cpus.len());
    }
    Ok(cpus)
}

/// Has this thread run on these CPUs.
pub(crate) fn run_on(cpus: &[CpuId]) -> Result<()> {
    let mut set = CpuSet::new();
    cpus.iter().for_each(|cpu| set.set(cpu.get() as usize));
    Ok(sched_setaffinity(None, &set)?)
}

/// What the server serves.
#[derive(Debug)]
pub(crate) struct Layout<'a> {
    pub(crate) directory: &'a Path,
    pub(crate) cpus: &'a [CpuId],
    pub(crate) vms: u16,
    pub(crate) queues: u16,
    pub(crate) disk: &'a Disk,
    /// Of each disk.
    pub(crate) bytes: u64,
    pub(crate) cpu_us: u32,
    pub(crate) kib_ns: u32,
    pub(crate) seed: u64,
}

impl Layout<'_> {
    pub(crate) fn socket(&self, vm: usize) -> PathBuf {
        self.directory.join(format!("vm{vm}.sock"))
    }

    pub(crate) fn control(&self) -> PathBuf {
        self.directory.join("control.sock")
    }

    /// The socket that is made last.
    pub(crate) fn last_socket(&self) -> PathBuf {
        self.socket(usize::from(self.vms) - 1)
    }

    /// The last CPU first, as in the simulator.
    fn io_cpus(&self) -> impl Iterator<Item = CpuId> {
        self.cpus.iter().rev().copied()
    }

    /// The configuration of `rtvirtio serve`.
    pub(crate) fn toml(&self, policy: &str, threads: u16) -> String {
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

/// The same machine for the simulator.
pub(crate) fn simulated(
    policy_config: PolicyConfig,
    disk: &Disk,
    vms: u16,
    costs: Costs,
) -> Result<Machine> {
    let mut machine = Machine::new(CPUS, policy_config.threads());
    machine.vcpus = (0..u32::from(CPUS)).map(CpuId::new).collect();
    machine.costs = costs;
    if let Disk::Ssd(name) = disk {
        let config = name.parse::<SsdConfig>()?;
        machine.backend = Backend::Ssd { config, devices: vms, schedule: false };
    }
    Ok(machine)
}

/// The same policy for the simulator.
pub(crate) fn borrowing(kind: Kind, machine: &Machine) -> Box<dyn Policy + Send> {
    let most = usize::from(CPUS);
    policy(
        kind,
        Limits { cpus: machine.io_cpus(), min_iothreads: 1, max_iothreads: most, borrow: true },
    )
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

    #[test]
    fn simulated_machine_shares_both_cpus_and_adds_costs_to_the_data_planes_own() {
        let own = Costs { request: Nanos::new(200), kib: Nanos::new(30), ..Costs::default() };
        let costs = own.with_work(Nanos::from_micros(20), Nanos::new(40));
        assert_eq!((costs.request.get(), costs.kib.get()), (20_200, 70));
        let machine = simulated(PolicyConfig::Static2, &Disk::Null, 4, costs).unwrap();
        assert_eq!((machine.cpus, machine.threads.len(), machine.vcpus.len()), (2, 2, 2));
        let machine = simulated(PolicyConfig::Dynamic, &Disk::Null, 4, costs).unwrap();
        assert_eq!(machine.threads, [CpuId::new(1)]);
    }
}
