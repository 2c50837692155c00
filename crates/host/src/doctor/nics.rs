//! Advice on the interrupts of physical NICs that carry VMs' frames.
//!
//! The data plane serves TAPs and leaves the NIC behind their bridge to the host. The NIC's interrupt and the
//! softirq after it run before any thread of their CPU, so that an IOThread that has a CPU to itself does not have it
//! while frames arrive. A NIC with one receive queue has all its frames handled by one CPU, unless RPS spreads them.
//!
//! Terms: an *uplink* is an interface with a `device` in sysfs that is a port of a bridge with a TAP, or lies below a
//! bond or VLAN that is one. Open vSwitch has all of its bridges' ports in one datapath, so that sysfs does not tell which
//! NIC a TAP's frames leave by: no advice. An IOThread's *own* CPU is the only one that it may run on. XPS is not looked
//! at: which setting of it is better depends on the load.
//!
//! Nothing is written. What cannot be read or is no list of CPUs gives no advice. Interface names may hold any character but
//! `/`, `:` and white space, so they are shown escaped.
//!
//! Properties (tests of the same name): `irq_on_an_iothreads_cpu_is_named_with_file_and_value`,
//! `one_receive_queue_without_rps_is_named_with_a_mask`, `host_without_uplink_gets_no_advice`,
//! `broken_and_hostile_files_give_no_advice`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use rtvirtio_spec::control::IoThreadState;
use rtvirtio_spec::cpulist;
use rtvirtio_spec::serve::{Completion, CorePolicy, MAX_CPU};
use rtvirtio_units::CpuId;

use super::{Finding, degraded, ok};
use crate::Host;
use crate::sysfs::Sysfs;

const NET: &str = "/sys/class/net";
/// What a directory of `/proc/irq` holds beside those of its handlers.
const IRQ_FILES: [&str; 7] = [
    "affinity_hint",
    "effective_affinity",
    "effective_affinity_list",
    "node",
    "smp_affinity",
    "smp_affinity_list",
    "spurious",
];

type Cpus = BTreeSet<CpuId>;

/// Probes the NICs beside a data plane's IOThreads; `None`: no data plane is known.
#[must_use]
pub fn probe(host: &Host, iothreads: Option<&[IoThreadState]>) -> [Finding; 2] {
    let sysfs = &*host.sysfs;
    let online = list(sysfs, "/sys/devices/system/cpu/online").unwrap_or_default();
    let uplinks = uplinks(sysfs);
    let mut own = BTreeMap::new();
    for thread in iothreads.unwrap_or_default() {
        if let [cpu] = thread.cpus[..] {
            own.entry(cpu).or_insert(thread);
        }
    }
    let free = online.iter().copied().filter(|cpu| !own.contains_key(cpu)).collect();
    let cpus = HostCpus { own, free };
    [irqs(sysfs, &uplinks, &cpus, iothreads.is_some()), rps(sysfs, &uplinks, &cpus)]
}

/// The host's CPUs.
struct HostCpus<'a> {
    /// Those that IOThreads have to themselves.
    own: BTreeMap<CpuId, &'a IoThreadState>,
    /// Those online that none has.
    free: Cpus,
}

/// An uplink, and one of the TAPs that it is the uplink of.
struct Uplink {
    tap: String,
    bridge: String,
}

impl Uplink {
    fn show(&self, nic: &str) -> String {
        let [nic, tap, bridge] = [nic, &self.tap, &self.bridge].map(str::escape_debug);
        format!("{nic} (uplink of {tap} by {bridge})")
    }
}

fn net(name: &str) -> PathBuf {
    Path::new(NET).join(name)
}

/// The uplinks by name.
fn uplinks(sysfs: &dyn Sysfs) -> BTreeMap<String, Uplink> {
    let mut found = BTreeMap::new();
    for bridge in sysfs.list(Path::new(NET)).unwrap_or_default() {
        let ports = sysfs.list(&net(&bridge).join("brif")).unwrap_or_default();
        let is_tap = |port: &&String| sysfs.exists(&net(port).join("tun_flags"));
        let Some(tap) = ports.iter().find(is_tap) else { continue };
        let (mut seen, mut left) = (BTreeSet::new(), ports.clone());
        while let Some(name) = left.pop() {
            if !seen.insert(name.clone()) {
                continue;
            }
            if sysfs.exists(&net(&name).join("device")) {
                let uplink = || Uplink { tap: tap.clone(), bridge: bridge.clone() };
                found.entry(name).or_insert_with(uplink);
                continue;
            }
            let entries = sysfs.list(&net(&name)).unwrap_or_default();
            left.extend(entries.iter().filter_map(|e| e.strip_prefix("lower_").map(str::to_owned)));
        }
    }
    found
}

fn irqs(
    sysfs: &dyn Sysfs,
    uplinks: &BTreeMap<String, Uplink>,
    cpus: &HostCpus<'_>,
    has_plane: bool,
) -> Finding {
    let name = "nic-irqs";
    let why = if uplinks.is_empty() {
        "no NIC is the uplink of a TAP's bridge"
    } else if !has_plane {
        "no data plane is known whose IOThreads they could disturb"
    } else if cpus.own.is_empty() {
        "no IOThread has a CPU to itself"
    } else if cpus.free.is_empty() {
        "each CPU is an IOThread's own: the IRQs have no other"
    } else {
        let mut advice = Advice::default();
        for (nic, uplink) in uplinks {
            for irq in irqs_of(sysfs, nic) {
                irq_advice(sysfs, irq, &uplink.show(nic), cpus, &mut advice);
            }
        }
        if !advice.remedies.is_empty() {
            if let Some(pid) = irqbalance(sysfs) {
                let own = show_list(&cpus.own.keys().copied().collect());
                advice.remedies.push(format!(
                    "irqbalance runs (process {pid}) and may undo it: set \
                     IRQBALANCE_BANNED_CPULIST={own} in its environment"
                ));
            }
            return advice.finding(name);
        }
        "none is known to run on a CPU that an IOThread has to itself"
    };
    ok(name, why)
}

/// What was found, and what would help.
#[derive(Default)]
struct Advice {
    details: Vec<String>,
    remedies: Vec<String>,
}

impl Advice {
    fn finding(&self, name: &'static str) -> Finding {
        degraded(name, self.details.join("; "), self.remedies.join("; "))
    }
}

fn irq_advice(sysfs: &dyn Sysfs, irq: u32, nic: &str, cpus: &HostCpus<'_>, advice: &mut Advice) {
    let directory = format!("/proc/irq/{irq}");
    let mut handlers = sysfs.list(Path::new(&directory)).unwrap_or_default();
    handlers.retain(|name| !IRQ_FILES.contains(&&**name));
    let file = format!("{directory}/smp_affinity_list");
    let Some(allowed) = list(sysfs, &file).filter(|_| !handlers.is_empty()) else { return };
    // Where the interrupt controller delivers it; older kernels say only where it may.
    let effective = list(sysfs, format!("{directory}/effective_affinity_list"));
    let (verb, runs_on) = match effective.filter(|cpus| !cpus.is_empty()) {
        Some(effective) => ("runs", effective),
        None => ("may run", allowed.clone()),
    };
    let hit = |cpu: &CpuId| Some((*cpu, *cpus.own.get(cpu)?));
    let hits: Vec<_> = runs_on.iter().filter_map(hit).map(|(cpu, t)| uses(cpu, t)).collect();
    if hits.is_empty() {
        return;
    }
    let rest: Cpus = allowed.intersection(&cpus.free).copied().collect();
    let value = show_list(if rest.is_empty() { &cpus.free } else { &rest });
    let handlers = handlers.join(", ");
    let handlers = handlers.escape_debug();
    advice.details.push(format!("{nic}: IRQ {irq} ({handlers}) {verb} on {}", hits.join(" and ")));
    advice.remedies.push(format!("write {value} to {file}"));
}

/// `CPU 1, which IOThread iot1 polls on`.
fn uses(cpu: CpuId, thread: &IoThreadState) -> String {
    let polling = thread.polling;
    let polls = polling.completion == Completion::Poll
        || (polling.completion == Completion::Adaptive && polling.core == CorePolicy::Dedicated);
    let how = if polls { "polls on" } else { "is pinned to" };
    format!("CPU {cpu}, which IOThread {} {how}", thread.name)
}

fn rps(sysfs: &dyn Sysfs, uplinks: &BTreeMap<String, Uplink>, cpus: &HostCpus<'_>) -> Finding {
    let name = "nic-rps";
    let mut advice = Advice::default();
    for (nic, uplink) in uplinks {
        let directory = net(nic).join("queues");
        let mut queues = sysfs.list(&directory).unwrap_or_default();
        queues.retain(|queue| queue.starts_with("rx-"));
        for queue in &queues {
            let file = directory.join(queue).join("rps_cpus");
            let text = sysfs.read(&file).ok();
            let Some(set) = text.as_deref().and_then(parse_mask) else { continue };
            let (shown, queue) = (uplink.show(nic), queue.escape_debug());
            let file = file.display().to_string();
            let mut write = |value: &Cpus, detail: String| {
                advice.details.push(detail);
                let mask = show_mask(value);
                advice.remedies.push(format!("write {mask} to {}", file.escape_debug()));
            };
            let hits: Vec<_> =
                set.iter().filter_map(|cpu| Some(uses(*cpu, cpus.own.get(cpu)?))).collect();
            if !hits.is_empty() {
                let rest = set.iter().copied().filter(|cpu| !cpus.own.contains_key(cpu)).collect();
                write(&rest, format!("{shown}: RPS of {queue} uses {}", hits.join(" and ")));
            } else if set.is_empty() && queues.len() == 1 {
                let local = list(sysfs, device_of(sysfs, nic).join("local_cpulist"));
                let near: Cpus =
                    local.unwrap_or_default().intersection(&cpus.free).copied().collect();
                // One CPU would do what the interrupted one does.
                if let Some(value) = [&near, &cpus.free].into_iter().find(|set| set.len() > 1) {
                    let how = "one receive queue and no RPS: one CPU handles all that it receives";
                    write(value, format!("{shown}: {how}"));
                }
            }
        }
    }
    if !advice.remedies.is_empty() {
        advice.finding(name)
    } else if uplinks.is_empty() {
        ok(name, "no NIC is the uplink of a TAP's bridge")
    } else {
        ok(name, "nothing to spread, or spread already")
    }
}

/// A NIC's device on its bus; of a virtio NIC its transport's, such as a PCI device.
fn device_of(sysfs: &dyn Sysfs, nic: &str) -> PathBuf {
    let mut device = net(nic).join("device");
    let kind = sysfs.read(&device.join("modalias")).unwrap_or_default();
    if kind.starts_with("virtio:") {
        device.push("..");
    }
    device
}

/// The IRQs of a NIC.
fn irqs_of(sysfs: &dyn Sysfs, nic: &str) -> BTreeSet<u32> {
    let device = device_of(sysfs, nic);
    let names = sysfs.list(&device.join("msi_irqs")).unwrap_or_default();
    let mut found: BTreeSet<u32> = names.iter().filter_map(|name| name.parse().ok()).collect();
    if found.is_empty() {
        // 0: it has none.
        let line = sysfs.read(&device.join("irq")).ok().and_then(|text| text.trim().parse().ok());
        found.extend(line.filter(|irq: &u32| *irq != 0));
    }
    found
}

/// A process that spreads interrupts by its own rules.
fn irqbalance(sysfs: &dyn Sysfs) -> Option<u32> {
    let names = sysfs.list(Path::new("/proc")).unwrap_or_default();
    names.iter().filter_map(|name| name.parse().ok()).find(|pid: &u32| {
        let name = sysfs.read(Path::new(&format!("/proc/{pid}/comm")));
        name.is_ok_and(|name| name.trim_end() == "irqbalance")
    })
}

/// The CPUs of a file such as `0,2-3`; `None`: it is not there, or no such list.
fn list(sysfs: &dyn Sysfs, file: impl AsRef<Path>) -> Option<Cpus> {
    let text = sysfs.read(file.as_ref()).ok()?;
    match text.trim() {
        "" => Some(Cpus::new()),
        text => Some(cpulist::parse(text).ok()?.into_iter().collect()),
    }
}

fn show_list(cpus: &Cpus) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for cpu in cpus.iter().map(|cpu| cpu.get()) {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == cpu => *last = cpu,
            _ => runs.push((cpu, cpu)),
        }
    }
    let show = |(first, last): &(u32, u32)| {
        if first == last { first.to_string() } else { format!("{first}-{last}") }
    };
    runs.iter().map(show).collect::<Vec<_>>().join(",")
}

/// The CPUs of a mask as the kernel writes it: words of 32 bits in hexadecimal, the highest first.
fn parse_mask(text: &str) -> Option<Cpus> {
    let mut found = Cpus::new();
    let words = text.trim().split(',').rev();
    for (index, word) in (0..).zip(words) {
        if word.len() > 8 || !word.bytes().all(|b| b.is_ascii_hexdigit()) {
            return None;
        }
        let bits = u32::from_str_radix(word, 16).ok()?;
        let first = 32_u32.checked_mul(index)?;
        if bits != 0 && first > MAX_CPU {
            return None;
        }
        found.extend((0..32).filter(|bit| bits >> bit & 1 == 1).map(|bit| CpuId::new(first + bit)));
    }
    Some(found)
}

fn show_mask(cpus: &Cpus) -> String {
    let mut words: BTreeMap<u32, u32> = BTreeMap::new();
    for cpu in cpus.iter().map(|cpu| cpu.get()) {
        *words.entry(cpu / 32).or_default() |= 1 << (cpu % 32);
    }
    let highest = words.last_key_value().map_or(0, |(word, _)| *word);
    let mut text = format!("{:x}", words.get(&highest).copied().unwrap_or_default());
    for word in (0..highest).rev() {
        let _ = write!(text, ",{:08x}", words.get(&word).copied().unwrap_or_default());
    }
    text
}

#[cfg(test)]
mod tests;
