//! [`Specification`] to TOML.

use std::fmt::Write as _;
use std::path::Path;

use rtvirtio_units::{Bytes, Nanos};

use super::{Backend, Recognise, Specification, Target, Task};

/// The text of a specification, which [`parse`](super::parse) reads back as it was.
///
/// `read_fraction` is written in whole percent. A path that is not UTF-8 loses
/// what is not.
#[must_use]
pub fn to_toml(specification: &Specification) -> String {
    let mut out = String::from("version = 1\n");
    if let Some(control) = &specification.data_plane {
        line(&mut out, "\n[data_plane]");
        pair(&mut out, "control", &path(control));
    }
    for device in &specification.devices {
        line(&mut out, "");
        line(&mut out, &format!("[device.{}]", quoted(device.name.as_str())));
        pair(&mut out, "path", &path(&device.path));
        pair(&mut out, "profile", &path(&device.profile));
    }
    for vm in &specification.vms {
        line(&mut out, "\n[[vm]]");
        pair(&mut out, "name", &quoted(vm.name.as_str()));
        match vm.backend {
            Backend::Kernel => pair(&mut out, "backend", &quoted("kernel")),
            Backend::VhostUser => pair(&mut out, "backend", &quoted("vhost-user")),
        }
        pair(&mut out, "cgroup", &path(&vm.cgroup));
        if let Some(vcpus) = vm.vcpus {
            pair(&mut out, "vcpus", &vcpus.to_string());
        }
        if vm.guest_agent {
            pair(&mut out, "guest_agent", "true");
        }
        for disk in &vm.disks {
            line(&mut out, "[[vm.disk]]");
            pair(&mut out, "name", &quoted(disk.name.as_str()));
            pair(&mut out, "device", &quoted(disk.device.as_str()));
            if let Some(queues) = disk.queues {
                pair(&mut out, "queues", &queues.to_string());
            }
        }
        for task in &vm.tasks {
            write_task(&mut out, task);
        }
    }
    out
}

fn write_task(out: &mut String, task: &Task) {
    line(out, "[[vm.task]]");
    pair(out, "name", &quoted(task.name.as_str()));
    pair(out, "disk", &quoted(task.disk.as_str()));
    match task.recognise {
        Recognise::Unrecognised => {}
        Recognise::Disk => pair(out, "recognise", &quoted("disk")),
        Recognise::Ioprio(ioprio) => pair(out, "recognise", &quoted(&format!("ioprio:{ioprio}"))),
    }
    if let Some(iops) = task.load.iops {
        pair(out, "iops", &iops.to_string());
    }
    pair(out, "block_size", &block_size(task.load.block_size));
    let percent = (task.load.read_fraction * 100.0).round() as u64;
    pair(out, "read_percent", &percent.to_string());
    pair(out, "queue_depth", &task.load.queue_depth.to_string());
    if let Some(Target { percentile, latency, confidence }) = task.target {
        let latency = milliseconds(latency);
        let target = format!(
            "{{ percentile = {percentile}, latency_ms = {latency}, confidence = {confidence} }}"
        );
        pair(out, "target", &target);
    }
}

fn line(out: &mut String, text: &str) {
    out.push_str(text);
    out.push('\n');
}

fn pair(out: &mut String, key: &str, value: &str) {
    line(out, &format!("{key} = {value}"));
}

/// Milliseconds in decimals, every nanosecond kept.
fn milliseconds(latency: Nanos) -> String {
    let (whole, rest) = (latency.get() / 1_000_000, latency.get() % 1_000_000);
    if rest == 0 {
        return whole.to_string();
    }
    format!("{whole}.{rest:06}").trim_end_matches('0').to_owned()
}

fn block_size(size: Bytes) -> String {
    match size.get() {
        bytes if bytes.is_multiple_of(1 << 20) => format!("\"{}m\"", bytes >> 20),
        bytes if bytes.is_multiple_of(1 << 10) => format!("\"{}k\"", bytes >> 10),
        bytes => bytes.to_string(),
    }
}

fn path(path: &Path) -> String {
    quoted(&path.to_string_lossy())
}

/// A TOML basic string.
fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            c if c.is_control() => {
                // Writing to a String does not fail.
                let _ = write!(out, "\\u{:04X}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}
