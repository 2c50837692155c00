//! `rtvirtio top`: what the disks of all VMs do, and where their time goes. Needs no configuration.

mod data_plane;

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Result;
use rtvirtio_host::interrupt::{Interrupted, InterruptedError, wait};
use rtvirtio_observe::counters::Interval;
use rtvirtio_observe::diagnosis::{Where, explain, judge};
use rtvirtio_observe::host_disks::DiskActivity;
use rtvirtio_observe::host_latency::HostLatency;
use rtvirtio_observe::session::{DiskLook, RECENT, Session};
use rtvirtio_observe::vms;
use rtvirtio_spec::control::Promises;
use rtvirtio_spec::latency::{Histogram, beyond};
use rtvirtio_units::{Nanos, Percentile};
use serde::Serialize;

use crate::{Outcome, input, output};
use data_plane::{DataPlane, NicRow};

/// The percentiles shown.
const PERCENTILES: [f64; 3] = [50.0, 99.0, 99.9];
/// Samples beyond a percentile without which it is not shown.
const MIN_BEYOND: u64 = 10;
/// Columns of the first column, and of the table.
const NAME: usize = 21;

/// Arguments of `top`.
#[derive(clap::Args)]
#[command(
    after_help = "Rates are those since the last look, tails those of the last minute; a tail is shown once 10 requests \
    are beyond it. `host p99` is that of the VM's requests in the host's block layer and the disk: what p99 has more \
    is QEMU's and its limits'. It needs root, and for an image file a filesystem that tells where the file lies \
    (ext4, xfs).\n\
    Latencies are counted by each VM's QEMU, which a VM's QMP socket or libvirt gives access to; a histogram \
    that somebody else has set, or that a domain's XML asks libvirt for, is read and left alone. Without root, what may be read is shown.\n\
    Disks and network devices of a data plane are there as it tells of them. Ctrl-C ends it."
)]
pub(crate) struct Args {
    /// Seconds between two looks
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=60))]
    interval: u64,
    /// End after so many looks
    #[arg(short = 'n', long, value_name = "LOOKS")]
    count: Option<u64>,
    /// What the first row has most of
    #[arg(long, value_enum, default_value_t = Sort::Iops)]
    sort: Sort,
    /// Control socket of the data plane whose devices are shown too; without, the usual one if it is
    /// there
    #[arg(long, value_name = "SOCKET")]
    dataplane: Option<PathBuf>,
    /// Print a JSON line at each look
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Sort {
    /// Requests per second
    Iops,
    /// Bytes per second
    Bandwidth,
    /// The 99th percentile
    P99,
    /// Names, ascending
    Name,
}

/// One disk's line.
#[derive(Debug, Serialize)]
struct Row {
    vm: String,
    pid: u32,
    disk: String,
    names: Vec<String>,
    format: Option<String>,
    /// The way down to the host's disks, in words.
    storage: Option<String>,
    /// Whether its latencies are counted by its QEMU.
    measured: bool,
    read_iops: f64,
    write_iops: f64,
    read_bytes_per_s: f64,
    write_bytes_per_s: f64,
    /// Of the last minute; `None`: too few requests.
    p50: Option<Nanos>,
    p99: Option<Nanos>,
    p999: Option<Nanos>,
    /// Reads and writes of the last minute.
    requests: u64,
    /// In the host's block layer and below, of the last minute; `None`: too few requests, or not
    /// measured.
    host_p50: Option<Nanos>,
    host_p99: Option<Nanos>,
    host_p999: Option<Nanos>,
    /// Names of the host's disks below.
    on: Vec<String>,
    /// Mean time of all requests of the busiest of them.
    mean_on_disk: Option<Nanos>,
    r#where: Where,
    explanation: String,
    /// Of a data plane's disk: how its promises were kept since it got them.
    promises: Option<Promises>,
}

impl Row {
    fn iops(&self) -> f64 {
        self.read_iops + self.write_iops
    }

    fn bandwidth(&self) -> f64 {
        self.read_bytes_per_s + self.write_bytes_per_s
    }
}

#[derive(Serialize)]
struct Look {
    at_s: f64,
    disks: Vec<Row>,
    /// Of a data plane.
    nics: Vec<NicRow>,
    /// The host's disks below, all users together.
    devices: BTreeMap<String, DiskActivity>,
    events: Vec<String>,
}

pub(crate) fn run(args: &Args, interrupted: &Interrupted) -> Result<Outcome> {
    let mut session = Session::new(input::host());
    let mut on_host = OnHost::new();
    let mut data_plane = DataPlane::new(args.dataplane.as_deref());
    let is_screen = !args.json && std::io::stdout().is_terminal();
    let start = Instant::now();
    let mut first = session.refresh_until(interrupted)?;
    let off = vms::switched_off();
    if !off.is_empty() {
        first.push(format!("switched off: {}", off.join(", ")));
    }
    // Begins the counting.
    let (found, lost) = session.look();
    first.extend(lost);
    on_host.look(&found, &mut first);
    data_plane.look(&mut first);
    let mut looks = 0;
    loop {
        if let Err(InterruptedError) = wait(Duration::from_secs(args.interval), interrupted) {
            return Ok(Outcome::Done);
        }
        let (found, lost) = session.look();
        let mut events = std::mem::take(&mut first);
        events.extend(lost);
        let tails = on_host.look(&found, &mut events);
        events.extend(session.refresh_until(interrupted)?);
        let devices = found.iter().flat_map(|look| look.below.iter().cloned()).collect();
        let mut disks: Vec<Row> = found.iter().map(|look| row(look, &tails)).collect();
        let (served, nics) = data_plane.look(&mut events);
        disks.extend(served);
        sort(&mut disks, args.sort);
        let look = Look { at_s: start.elapsed().as_secs_f64(), disks, nics, devices, events };
        if args.json {
            output::line(&serde_json::to_string(&look)?);
        } else {
            // Home and clear: a screen of its own is for programs that take keys.
            let clear = if is_screen { "\x1b[H\x1b[2J" } else { "" };
            output::line(&format!("{clear}{}", text(&look)));
        }
        looks += 1;
        if args.count.is_some_and(|count| looks >= count) {
            return Ok(Outcome::Done);
        }
    }
}

/// A VM's process and its disk's name.
type DiskKey = (u32, String);

/// The last minute of VMs' disks in the host's block layer.
struct OnHost {
    latency: HostLatency<DiskKey>,
    recent: BTreeMap<DiskKey, VecDeque<(Instant, Histogram)>>,
}

impl OnHost {
    fn new() -> Self {
        let name = |(pid, disk): &DiskKey| format!("{disk} of process {pid}");
        Self { latency: HostLatency::new(input::host(), name), recent: BTreeMap::new() }
    }

    /// What each disk did within the last minute.
    fn look(
        &mut self,
        looks: &[DiskLook],
        events: &mut Vec<String>,
    ) -> BTreeMap<DiskKey, Histogram> {
        let now = Instant::now();
        for (disk, (histogram, _)) in self.latency.take(now, events) {
            self.recent.entry(disk).or_default().push_back((now, histogram));
        }
        let parts = looks.iter().filter_map(|look| Some((key(look), look.disk.part.clone()?)));
        let parts: BTreeMap<DiskKey, _> = parts.collect();
        self.recent.retain(|disk, _| parts.contains_key(disk));
        self.latency.follow(&parts, events);
        let sum = |recent: &mut VecDeque<(Instant, Histogram)>| {
            recent.retain(|(at, _)| now - *at <= RECENT);
            let mut all = Histogram::new();
            recent.iter().for_each(|(_, histogram)| all.merge(histogram));
            all
        };
        self.recent.iter_mut().map(|(disk, recent)| (disk.clone(), sum(recent))).collect()
    }
}

fn key(look: &DiskLook) -> DiskKey {
    (look.pid, look.disk.name().to_owned())
}

fn sort(rows: &mut [Row], by: Sort) {
    rows.sort_by(|a, b| {
        let names = || (&a.vm, &a.disk).cmp(&(&b.vm, &b.disk));
        let most = |a: f64, b: f64| b.total_cmp(&a);
        match by {
            Sort::Iops => most(a.iops(), b.iops()),
            Sort::Bandwidth => most(a.bandwidth(), b.bandwidth()),
            Sort::P99 => b.p99.cmp(&a.p99),
            Sort::Name => std::cmp::Ordering::Equal,
        }
        .then_with(names)
    });
}

fn row(look: &DiskLook, on_host: &BTreeMap<DiskKey, Histogram>) -> Row {
    let evidence = look.evidence();
    let found = judge(&evidence);
    let of_last = |count: fn(&Interval) -> u64| {
        look.last.as_ref().map_or(0.0, |last| count(last) as f64 / last.seconds.max(1e-3))
    };
    let [p50, p99, p999] = PERCENTILES.map(|p| tail(&look.recent.histogram, p));
    let on_host = on_host.get(&key(look));
    let [host_p50, host_p99, host_p999] =
        PERCENTILES.map(|p| on_host.and_then(|histogram| tail(histogram, p)));
    let storage = match (&look.disk.storage, &look.disk.unknown_storage) {
        (Some(stack), _) => Some(stack.to_string()),
        (None, why) => why.clone(),
    };
    Row {
        vm: look.vm.clone(),
        pid: look.pid,
        disk: look.disk.name().to_owned(),
        names: look.disk.names.clone(),
        format: look.disk.format.clone(),
        storage,
        measured: look.last.is_some(),
        read_iops: of_last(|i| i.reads),
        write_iops: of_last(|i| i.writes),
        read_bytes_per_s: of_last(|i| i.read_bytes),
        write_bytes_per_s: of_last(|i| i.write_bytes),
        p50,
        p99,
        p999,
        requests: look.recent.requests(),
        host_p50,
        host_p99,
        host_p999,
        on: look.below.iter().map(|(name, _)| name.clone()).collect(),
        mean_on_disk: evidence.disk.and_then(|(_, activity)| activity.mean),
        r#where: if look.last.is_some() { found } else { Where::Unknown },
        explanation: match &look.last {
            Some(_) => explain(found, &evidence),
            None => "not measured at QEMU".to_owned(),
        },
        promises: None,
    }
}

fn tail(histogram: &Histogram, percentile: f64) -> Option<Nanos> {
    let percentile = Percentile::new(percentile).ok()?;
    let enough = beyond(histogram.count(), percentile) >= MIN_BEYOND;
    enough.then(|| histogram.quantile(percentile)).flatten().map(|found| found.value)
}

/// At most seven columns, of three digits that count.
fn short(time: Option<Nanos>) -> String {
    let Some(time) = time else { return "-".to_owned() };
    let ns = time.get() as f64;
    match ns {
        _ if ns >= 1e9 => format!("{:.1}s", ns / 1e9),
        _ if ns >= 1e7 => format!("{:.1}ms", ns / 1e6),
        _ if ns >= 1e5 => format!("{:.2}ms", ns / 1e6),
        _ => format!("{:.0}µs", ns / 1e3),
    }
}

/// `text` in `width` columns: of one that is too long the end counts.
fn fit(text: &str, width: usize) -> String {
    let count = text.chars().count();
    if count <= width {
        return text.to_owned();
    }
    let end: String = text.chars().skip(count + 1 - width).collect();
    format!("…{end}")
}

const fn word(found: Where) -> &'static str {
    match found {
        Where::Idle => "idle",
        Where::QemuLimit => "limit",
        Where::CgroupLimit => "limit",
        Where::BusyDevice => "busy disk",
        Where::Device => "disk",
        Where::Cpu => "cpu",
        Where::Between => "queue",
        Where::Unknown => "?",
    }
}

/// A look for people, within 80 columns.
fn text(look: &Look) -> String {
    let mut out = String::new();
    let mut line = |text: String| {
        let _ = writeln!(out, "{}", text.trim_end());
    };
    line(format!(
        "{:<NAME$} {:>6} {:>6} {:>7} {:>7} {:>7} {:>8}  {}",
        "VM/disk", "IOPS", "MB/s", "p50", "p99", "p99.9", "host p99", "where"
    ));
    for row in &look.disks {
        line(format!(
            "{:<NAME$} {:>6.0} {:>6.1} {:>7} {:>7} {:>7} {:>8}  {}",
            fit(&format!("{}/{}", row.vm, row.disk), NAME),
            row.iops(),
            row.bandwidth() / 1e6,
            short(row.p50),
            short(row.p99),
            short(row.p999),
            short(row.host_p99),
            word(row.r#where)
        ));
    }
    if look.disks.is_empty() && look.nics.is_empty() {
        line("no VM runs here (QEMU processes are looked for)".to_owned());
    }
    if !look.nics.is_empty() {
        line(String::new());
        line(format!(
            "{:<NAME$} {:>8} {:>8} {:>8} {:>8}  {}",
            "VM/nic", "in/s", "out/s", "MB/s", "drops/s", "link"
        ));
    }
    for nic in &look.nics {
        line(format!(
            "{:<NAME$} {:>8.0} {:>8.0} {:>8.1} {:>8.0}  {}",
            fit(&format!("{}/{}", nic.vm, nic.nic), NAME),
            nic.received_per_s,
            nic.transmitted_per_s,
            nic.bytes_per_s / 1e6,
            nic.dropped_per_s,
            fit(&nic.link, 15)
        ));
        if !nic.drops_per_s.is_empty() {
            let each =
                |(reason, rate): (&&str, &f64)| format!("{} {rate:.0}/s", reason.replace('_', " "));
            let drops: Vec<String> = nic.drops_per_s.iter().map(each).collect();
            let drops = format!("dropped: {}", drops.join(", "));
            wrap(&drops, 76).into_iter().for_each(|text| line(format!("  {text}")));
        }
    }
    if !look.devices.is_empty() {
        line(String::new());
        line(format!("{:<NAME$} {:>6} {:>6} {:>7} {:>7}", "disk", "IOPS", "busy", "mean", "depth"));
    }
    for (name, activity) in &look.devices {
        line(format!(
            "{:<NAME$} {:>6.0} {:>5.0}% {:>7} {:>7.1}",
            fit(name, NAME),
            activity.iops,
            activity.busy * 100.0,
            short(activity.mean),
            activity.depth
        ));
    }
    let told = look.disks.iter().filter(|row| row.r#where != Where::Idle);
    let mut sentences: Vec<String> =
        told.map(|row| format!("{}/{}: {}", row.vm, row.disk, row.explanation)).collect();
    sentences.extend(look.events.iter().cloned());
    if !sentences.is_empty() {
        line(String::new());
        sentences.into_iter().flat_map(|text| wrap(&text, 78)).for_each(&mut line);
    }
    out.trim_end().to_owned()
}

/// Lines of at most `width` columns, broken at spaces.
fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let last = lines.last_mut().expect("there is one");
        let used = last.chars().count();
        if used > 0 && used + 1 + word.chars().count() > width {
            lines.push(format!("  {word}"));
        } else {
            if used > 0 {
                last.push(' ');
            }
            last.push_str(word);
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(vm: &str, iops: f64, p99: u64) -> Row {
        Row {
            vm: vm.to_owned(),
            pid: 1,
            disk: "vda".to_owned(),
            names: vec![],
            format: None,
            storage: None,
            measured: true,
            read_iops: iops,
            write_iops: 0.0,
            read_bytes_per_s: 1e9,
            write_bytes_per_s: 0.0,
            p50: Some(Nanos::from_micros(87)),
            p99: Some(Nanos::from_micros(p99)),
            p999: None,
            requests: 1000,
            host_p50: None,
            host_p99: Some(Nanos::from_secs_f64(12.5)),
            host_p999: None,
            on: vec!["nvme0n1".to_owned()],
            mean_on_disk: None,
            r#where: Where::BusyDevice,
            explanation: "in the device ".repeat(12),
            promises: None,
        }
    }

    #[test]
    fn table_fits_80_columns_whatever_is_in_it() {
        let long = "a-virtual-machine-with-a-name-of-sixty-characters-and-some-more";
        let activity =
            DiskActivity { busy: 1.0, iops: 123_456.0, depth: 1024.0, ..DiskActivity::default() };
        let look = Look {
            at_s: 1.0,
            disks: vec![row(long, 999_999.0, 123_456), row("db", 1.0, 99)],
            nics: vec![NicRow {
                vm: long.to_owned(),
                nic: "net0".to_owned(),
                link: "a-long-tap-name".to_owned(),
                connected: true,
                received_per_s: 1_234_567.0,
                transmitted_per_s: 1.0,
                bytes_per_s: 1e11,
                dropped_per_s: 7.0,
                drops_per_s: [
                    "broadcast",
                    "limit",
                    "link",
                    "malformed",
                    "no_buffers",
                    "no_receiver",
                ]
                .map(|reason| (reason, 7.0))
                .into(),
                iothreads: vec![],
            }],
            devices: [(long.to_owned(), activity)].into(),
            events: vec!["an event ".repeat(20)],
        };
        let text = text(&look);
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert!(
            text.contains("123.5ms") && text.contains("99µs") && text.contains("12.5s"),
            "{text}"
        );
        assert!(text.contains("…") && text.contains("dropped: broadcast 7/s, limit"), "{text}");
    }

    #[test]
    fn rows_are_sorted_by_what_is_asked_for() {
        let order = |by| {
            let mut rows = vec![row("b", 1.0, 500), row("a", 9.0, 100), row("c", 1.0, 900)];
            sort(&mut rows, by);
            rows.into_iter().map(|row| row.vm).collect::<String>()
        };
        assert_eq!(order(Sort::Iops), "abc");
        assert_eq!(order(Sort::P99), "cba");
        assert_eq!(order(Sort::Name), "abc");
    }

    #[test]
    fn tail_of_too_few_requests_is_not_shown() {
        let mut histogram = Histogram::new();
        histogram.record(Nanos::from_millis(1), 1500);
        assert!(tail(&histogram, 99.0).is_some());
        assert!(tail(&histogram, 99.9).is_none());
    }
}
