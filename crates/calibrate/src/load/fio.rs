//! fio: its job file, its process, what it reports (`fio(1)`, JSON+ output).

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rtvirtio_cases::IoPriority;
use rtvirtio_model::Stream;
use rtvirtio_spec::latency::Histogram;
use rtvirtio_spec::specification::Vm;
use rtvirtio_units::{Bytes, DiskName, Nanos, VmName};
use serde::Deserialize;

use crate::confine::confine;

/// Interval of timelines and bandwidth logs, ms.
const LOG_INTERVAL_MS: u64 = 250;

/// A VM's tasks as a fio job file; a VM without tasks is the undeclared writer. `node` gives the
/// block device or file of a disk, of which the first `size` bytes are used, or all of it.
pub fn job_file(
    vm: &Vm,
    node: impl Fn(&DiskName) -> Result<String>,
    size: Option<Bytes>,
    ioprio: Option<&IoPriority>,
    (runtime, ramp): (Duration, Duration),
) -> Result<String> {
    let mut text = format!(
        "[global]\ndirect=1\nthread=1\ntime_based=1\nruntime={}ms\nramp_time={}ms\n\
         randrepeat=0\nnorandommap=1\nunified_rw_reporting=mixed\n\
         log_avg_msec={LOG_INTERVAL_MS}\nlog_unix_epoch=1\n",
        runtime.as_millis(),
        ramp.as_millis(),
    );
    if let Some(size) = size {
        let _ = writeln!(text, "size={}", size.get());
    }
    if let Some(ioprio) = ioprio {
        let _ = writeln!(text, "prioclass={}\nprio={}", ioprio.class(), ioprio.level());
    }
    let prefix = vm.name.as_str();
    let is_background = vm.is_background();
    let mut job = |name: &str, index: usize, disk: &DiskName, stream: &Stream| -> Result<()> {
        let reads = stream.read_fraction;
        let rw = match reads {
            r if r >= 1.0 => "randread",
            r if r <= 0.0 => "randwrite",
            _ => "randrw",
        };
        let engine = if stream.depth == 1 { "psync" } else { "libaio" };
        let _ = writeln!(
            text,
            "[{name}]\nfilename={}\nrw={rw}\nioengine={engine}\niodepth={}\nbs={}",
            node(disk)?,
            stream.depth,
            stream.block_size.get()
        );
        if rw == "randrw" {
            let _ = writeln!(text, "rwmixread={}", (reads * 100.0).round());
        }
        if let Some(iops) = stream.iops {
            // fio takes whole rates, and 0 for no limit at all.
            let total = iops.round().max(if rw == "randrw" { 2.0 } else { 1.0 });
            ensure!(
                (total - iops).abs() <= 0.02 * iops,
                "{}/{name}: fio cannot issue {iops} requests a second",
                vm.name
            );
            let _ = if rw == "randrw" {
                let r = (total * reads).round().clamp(1.0, total - 1.0);
                writeln!(text, "rate_iops={r},{}", total - r)
            } else {
                writeln!(text, "rate_iops={total}")
            };
        }
        // Background: what it moved, by time. Tasks: the largest latency, by time.
        let _ = if is_background {
            writeln!(text, "write_bw_log={prefix}.{index}\nper_job_logs=0")
        } else {
            writeln!(text, "write_lat_log={prefix}.{index}\nper_job_logs=0\nlog_max_value=1")
        };
        Ok(())
    };
    for (index, task) in vm.tasks.iter().enumerate() {
        job(task.name.as_str(), index, &task.disk, &Stream::from(task.load))?;
    }
    if let (true, Some(disk)) = (vm.tasks.is_empty(), vm.disks.first()) {
        for (index, stream) in Stream::UNDECLARED.iter().enumerate() {
            job(&format!("undeclared{index}"), index, &disk.name, stream)?;
        }
    }
    Ok(text)
}

/// The name of fio's log of task `index`.
pub fn log_name(vm: &VmName, kind: &str, index: usize) -> String {
    format!("{vm}.{index}_{kind}.log")
}

/// The files in which fio leaves what it did, of a VM with `streams` jobs.
pub fn files(vm: &Vm, streams: usize) -> Vec<String> {
    let kind = if vm.is_background() { "bw" } else { "clat" };
    let logs = (0..streams).map(|index| log_name(&vm.name, kind, index));
    [format!("{}.err", vm.name), format!("{}.json", vm.name)].into_iter().chain(logs).collect()
}

/// The arguments that run a VM's job file in the current directory.
pub fn arguments(vm: &VmName) -> [String; 4] {
    let output = format!("--output={vm}.json");
    ["--output-format=json+".to_owned(), "--eta=never".to_owned(), output, format!("{vm}.fio")]
}

/// Sees that there is fio, for who makes something for it first.
///
/// # Errors
/// It does not start.
pub fn check() -> Result<()> {
    starts("fio")
}

fn starts(program: &str) -> Result<()> {
    let mut command = Command::new(program);
    let status = command.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).status();
    status.map(drop).map_err(|e| anyhow::anyhow!("start fio: {e}{}", remedy(&e)))
}

fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => " (install it: apt-get install fio)",
        _ => "",
    }
}

/// Starts fio in `directory` and in the cgroup of `procs`; it dies with this process.
pub fn spawn(directory: &Path, vm: &VmName, job: &str, procs: &Path) -> Result<Child> {
    std::fs::write(directory.join(format!("{vm}.fio")), job)?;
    let errors = std::fs::File::create(directory.join(format!("{vm}.err")))?;
    let mut command = Command::new("fio");
    command
        .current_dir(directory)
        .args(arguments(vm))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(errors);
    confine(&mut command, Some(procs)).with_context(|| format!("VM {vm}"))?;
    command.spawn().map_err(|e| anyhow::anyhow!("start fio for VM {vm}: {e}{}", remedy(&e)))
}

/// What fio said before it failed.
pub fn complaint(output: &Path) -> String {
    let text = std::fs::read_to_string(output.with_extension("err")).unwrap_or_default();
    let text = if text.trim().is_empty() {
        std::fs::read_to_string(output).unwrap_or_default()
    } else {
        text
    };
    text.trim().chars().take(400).collect()
}

#[derive(Deserialize)]
struct Output {
    jobs: Vec<Job>,
}

#[derive(Deserialize)]
struct Job {
    jobname: String,
    mixed: Direction,
}

#[derive(Deserialize)]
struct Direction {
    clat_ns: Latency,
}

#[derive(Deserialize)]
struct Latency {
    #[serde(default)]
    bins: BTreeMap<u64, u64>,
}

/// Each job's completion latencies.
pub fn histograms(output: &Path) -> Result<BTreeMap<String, Histogram>> {
    let text = std::fs::read_to_string(output)
        .with_context(|| format!("read fio's output {}", output.display()))?;
    // Warnings may precede the JSON.
    let json = text.find('{').map_or("", |at| &text[at..]);
    let output: Output = serde_json::from_str(json).context("fio's output (fio 3.30 or later?)")?;
    let histogram = |job: Job| {
        let mut h = Histogram::new();
        for (ns, count) in job.mixed.clat_ns.bins {
            h.record(Nanos::new(ns), count);
        }
        (job.jobname, h)
    };
    Ok(output.jobs.into_iter().map(histogram).collect())
}

/// Lines of a fio log: (ms, value).
pub fn log_lines(path: &Path) -> Result<Vec<(u64, u64)>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    let line = |l: &str| {
        let mut fields = l.split(',').map(str::trim);
        Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
    };
    Ok(text.lines().filter_map(line).collect())
}

/// Largest latency in each interval: (ms since the first, latency).
pub fn timeline(path: &Path) -> Result<Vec<(u64, Nanos)>> {
    let lines = log_lines(path)?;
    let first = lines.first().map_or(0, |&(ms, _)| ms);
    let mut largest = BTreeMap::new();
    for (ms, ns) in lines {
        let slot = ms.saturating_sub(first) / LOG_INTERVAL_MS * LOG_INTERVAL_MS;
        let entry: &mut u64 = largest.entry(slot).or_default();
        *entry = ns.max(*entry);
    }
    Ok(largest.into_iter().map(|(ms, ns)| (ms, Nanos::new(ns))).collect())
}

/// Mean of a bandwidth log (KiB/s) between two times since the epoch, bytes per second.
pub fn mean_bandwidth(path: &Path, from: Duration, to: Duration) -> Result<f64> {
    let within = |ms: &u64| (from.as_millis()..=to.as_millis()).contains(&u128::from(*ms));
    let lines = log_lines(path)?;
    let total: u64 = lines.iter().filter(|(ms, _)| within(ms)).map(|(_, kib)| kib).sum();
    // An interval without I/O has no line, so the window's length divides, not their number.
    let intervals = (to - from).as_secs_f64() * 1000.0 / LOG_INTERVAL_MS as f64;
    Ok(total as f64 * 1024.0 / intervals)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_program_is_told_of_with_what_installs_it() {
        let error = starts("/nonexistent/fio").unwrap_err().to_string();
        assert!(error.contains("apt-get install fio"), "{error}");
        starts("true").unwrap();
    }

    #[test]
    fn timeline_keeps_the_largest_of_each_interval() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        std::fs::write(&path, "1000, 5, 0, 4096, 0\n1100, 9, 1, 4096, 0\n1260, 7, 0, 4096, 0\n")
            .unwrap();
        assert_eq!(timeline(&path).unwrap(), [(0, Nanos::new(9)), (250, Nanos::new(7))]);
    }

    #[test]
    fn bandwidth_counts_only_the_window() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        // 1000 KiB/s for two of the four intervals of a second; one line lies before it.
        std::fs::write(&path, "900, 1000, 1\n1250, 1000, 1\n1500, 1000, 1\n").unwrap();
        let (from, to) = (Duration::from_secs(1), Duration::from_secs(2));
        assert_eq!(mean_bandwidth(&path, from, to).unwrap(), 512_000.0);
    }

    #[test]
    fn histograms_are_read_after_warnings() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        let json = r#"{"jobs":[{"jobname":"light","mixed":{"clat_ns":{"bins":{"100":2}}}}]}"#;
        std::fs::write(&path, format!("fio: a warning\n{json}")).unwrap();
        assert_eq!(histograms(&path).unwrap()["light"].count(), 2);
    }
}
