//! What only libvirt knows of its domains: those that are off, what it calls their disks, and the
//! latencies that it was told to count.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rtvirtio_units::Nanos;

use super::error::{Address, Domain, Fault, QemuError};
use super::monitor::{BlockStatistics, Histogram, LatencyHistograms};
use super::peer::Deadline;
use super::virsh::ask;
use crate::interrupt::Interrupt;

/// The most bins of a histogram that are read; rtvirtio's own have 172.
const MAX_BINS: usize = 4096;

/// The names of domains that are defined and do not run.
///
/// # Errors
/// There is no libvirt, or it does not answer.
pub fn switched_off(timeout: Duration) -> Result<Vec<String>, QemuError> {
    let none = Domain::from("");
    let text = run(&none, "list", timeout, |_| Ok(vec!["list", "--inactive", "--name"]))?;
    Ok(text.lines().map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect())
}

/// The targets of a domain's disks, such as `vda`, each with its file or device.
///
/// # Errors
/// There is no libvirt or no such domain, or it does not answer.
pub fn targets(domain: &Domain, timeout: Duration) -> Result<Vec<(String, PathBuf)>, QemuError> {
    let text = run(domain, "domblklist", timeout, |domain| {
        Ok(vec!["domblklist", "--domain", domain.argument()?, "--details"])
    })?;
    Ok(text.lines().filter_map(target).collect())
}

/// What libvirt counts of a domain's disk, if its XML asks for histograms (`<latency-histogram>`
/// within the disk's `<driver>`, libvirt 12.1 or later); `None`: it does not, or this libvirt
/// cannot. No command goes to QEMU's monitor, so the domain is not marked as tainted.
///
/// # Errors
/// There is no libvirt or no such domain, or it does not answer.
pub fn block_statistics(
    domain: &Domain,
    target: &str,
    timeout: Duration,
) -> Result<Option<BlockStatistics>, QemuError> {
    let text = run(domain, "domstats", timeout, |domain| {
        Ok(vec!["domstats", "--block", "--domain", domain.argument()?])
    })?;
    Ok(counted(&text, target))
}

/// A disk's counters in what `virsh domstats --block` prints: lines of `block.INDEX.FIELD=VALUE`,
/// as libvirt-domain.h names the fields (`VIR_DOMAIN_STATS_BLOCK_…`).
fn counted(text: &str, target: &str) -> Option<BlockStatistics> {
    let fields: BTreeMap<&str, &str> =
        text.lines().filter_map(|line| line.trim().split_once('=')).collect();
    let is_it = |key: &&str| key.starts_with("block.") && key.ends_with(".name");
    let name = fields.keys().find(|key| is_it(key) && fields[*key] == target)?;
    let disk = name.strip_suffix("name")?;
    let number = |field: &str| fields.get(format!("{disk}{field}").as_str())?.parse::<u64>().ok();
    let histogram = |kind: &str| {
        let bin = |field: &str| number(&format!("latency_histogram.{kind}.bin.{field}"));
        let count = usize::try_from(bin("count")?).ok().filter(|n| (1..=MAX_BINS).contains(n))?;
        // A bin ends where the next begins.
        let boundaries = (1..count).map(|i| bin(&format!("{i}.start")).map(Nanos::new));
        let bins = (0..count).map(|i| bin(&format!("{i}.value")));
        let boundaries: Vec<Nanos> = boundaries.collect::<Option<_>>()?;
        let histogram = Histogram { boundaries, bins: bins.collect::<Option<_>>()? };
        histogram.is_whole().then_some(histogram)
    };
    let latencies = LatencyHistograms {
        read: histogram("read"),
        write: histogram("write"),
        flush: histogram("flush"),
    };
    if latencies.read.is_none() && latencies.write.is_none() {
        return None;
    }
    Some(BlockStatistics {
        reads: number("rd.reqs")?,
        writes: number("wr.reqs")?,
        read_bytes: number("rd.bytes")?,
        write_bytes: number("wr.bytes")?,
        read_time_ns: number("rd.times")?,
        write_time_ns: number("wr.times")?,
        latencies,
    })
}

/// A line of `virsh domblklist --details`: type, device, target and source, which may have spaces.
fn target(line: &str) -> Option<(String, PathBuf)> {
    let mut rest = line.trim();
    let mut word = || {
        let (word, after) = rest.split_once(char::is_whitespace)?;
        rest = after.trim_start();
        Some(word)
    };
    let (_, device, target) = (word()?, word()?, word()?);
    (device == "disk" && rest.starts_with('/')).then(|| (target.to_owned(), rest.into()))
}

fn run<'a>(
    domain: &'a Domain,
    command: &'static str,
    timeout: Duration,
    arguments: impl FnOnce(&'a Domain) -> Result<Vec<&'a str>, Fault>,
) -> Result<String, QemuError> {
    arguments(domain)
        .and_then(|arguments| {
            let deadline = Deadline::after(timeout);
            ask(Path::new("virsh"), &arguments, deadline, &Interrupt::default())
        })
        .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
        .map_err(|fault| QemuError { peer: Address::Domain(domain.clone()), command, fault })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_disks_with_a_file() {
        let of = |line| target(line).map(|(name, file)| format!("{name} {}", file.display()));
        let disk = " file    disk     vda      /var/lib/vm images/db.qcow2";
        assert_eq!(of(disk).as_deref(), Some("vda /var/lib/vm images/db.qcow2"));
        for line in [
            " file    cdrom    sda      /iso/debian.iso",
            " network disk     vdb      pool/image",
            " file    disk     vdc      -",
            " Type   Device   Target   Source",
            "---------------------------------",
            "",
        ] {
            assert_eq!(of(line), None, "{line}");
        }
    }

    /// As libvirt 12 prints it for a domain with two disks.
    const DOMSTATS: &str = "Domain: 'db'
  block.count=2
  block.0.name=vda
  block.0.path=/var/lib/vm/db.qcow2
  block.0.rd.reqs=30
  block.0.rd.bytes=122880
  block.0.rd.times=9000000
  block.0.wr.reqs=0
  block.0.wr.bytes=0
  block.0.wr.times=0
  block.0.latency_histogram.read.bin.count=3
  block.0.latency_histogram.read.bin.0.start=0
  block.0.latency_histogram.read.bin.0.value=20
  block.0.latency_histogram.read.bin.1.start=1000000
  block.0.latency_histogram.read.bin.1.value=9
  block.0.latency_histogram.read.bin.2.start=5000000
  block.0.latency_histogram.read.bin.2.value=1
  block.1.name=vdb
  block.1.rd.reqs=7
";

    #[test]
    fn domain_whose_name_is_a_number_is_not_asked_for_by_it() {
        let (domain, limit) = (Domain::from("7"), Duration::from_secs(1));
        // virsh is not run: this host may have none.
        for error in [
            targets(&domain, limit).unwrap_err(),
            block_statistics(&domain, "vda", limit).unwrap_err(),
        ] {
            assert!(matches!(error.fault, Fault::NumericName), "{error}");
            assert!(error.to_string().starts_with("libvirt domain \"7\": dom"), "{error}");
        }
    }

    #[test]
    fn histograms_of_libvirt_are_qemus() {
        let found = counted(DOMSTATS, "vda").unwrap();
        assert_eq!((found.reads, found.read_bytes, found.read_time_ns), (30, 122_880, 9_000_000));
        let read = found.latencies.read.unwrap();
        assert_eq!(read.boundaries, [1, 5].map(Nanos::from_millis));
        assert_eq!(read.bins, [20, 9, 1]);
        assert_eq!(found.latencies.write, None);
    }

    #[test]
    fn histogram_that_is_not_there_or_not_whole_is_none() {
        assert_eq!(counted(DOMSTATS, "vdb"), None);
        assert_eq!(counted(DOMSTATS, "vdc"), None);
        assert_eq!(counted("", "vda"), None);
        for (from, to) in [
            ("bin.count=3", "bin.count=18446744073709551615"),
            ("bin.count=3", "bin.count=0"),
            ("bin.count=3", "bin.count=4"),
            ("1.start=1000000", "1.start=6000000"),
            ("2.value=1", "2.value=-1"),
        ] {
            assert_eq!(counted(&DOMSTATS.replace(from, to), "vda"), None, "{to}");
        }
    }
}
