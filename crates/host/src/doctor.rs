//! What a host can do for rtvirtio, what it cannot, and what would help.
//!
//! Probes only read; none boots a guest or changes a knob. The ring that [`io_uring`] is about is
//! set up by its caller. A module that is on disk but not loaded counts: the kernel loads a
//! scheduler when it is selected.
//!
//! Property: `probe_names_each_capability_once`,
//! `bfq_as_module_on_disk_is_degraded`, `limits_on_v2_need_io_enabled_below_the_root`,
//! `missing_capability_has_a_remedy`, `ring_that_is_refused_is_told_apart_by_who_refuses_it`.

pub mod nics;

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::io::Errno;
use rustix::process::{Resource, geteuid, getrlimit};
use serde::Serialize;

use crate::knobs::{has_module, module};
use crate::sysfs::Sysfs;
use crate::{CgroupVersion, Host, WriterKind};

/// How far a capability goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// There.
    Ok,
    /// There with a limitation, or not certain.
    Degraded,
    /// Not there.
    Missing,
}

/// One capability.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What was looked for, such as `bfq`.
    pub name: &'static str,
    /// How far it goes.
    pub status: Status,
    /// What was found.
    pub detail: String,
    /// What would improve it.
    pub remedy: Option<String>,
}

/// CAP_SYS_NICE, capabilities(7).
const CAP_SYS_NICE: u32 = 23;
/// What io_uring's registered buffers may need; a round figure, not a measured one.
const MEMLOCK_BYTES: u64 = 64 << 20;

/// Probes the host; what depends on a data plane is in [`nics::probe`] and [`io_uring`].
#[must_use]
pub fn probe(host: &Host) -> Vec<Finding> {
    let sysfs = &*host.sysfs;
    let version = host.cgroup_version().ok();
    let mut findings = vec![root(), cgroup(version.as_ref())];
    findings.extend(schedulers(sysfs, &host.kernel_release().unwrap_or_default()));
    findings.push(limits(sysfs, version.as_ref()));
    findings.push(io_cost(sysfs, version.as_ref()));
    findings.push(file(sysfs, "fuse", "/dev/fuse", "load the module: `modprobe fuse`"));
    findings.push(file(sysfs, "loop", "/dev/loop-control", "load the module: `modprobe loop`"));
    findings.push(fio());
    findings.push(kvm(sysfs));
    findings.push(locked_memory());
    findings.push(block_trace(sysfs));
    findings.push(processors());
    findings.push(realtime(sysfs));
    findings.push(writers(host));
    findings
}

fn ok(name: &'static str, detail: impl Into<String>) -> Finding {
    Finding { name, status: Status::Ok, detail: detail.into(), remedy: None }
}

fn degraded(name: &'static str, detail: impl Into<String>, remedy: impl Into<String>) -> Finding {
    let remedy = Some(remedy.into());
    Finding { name, status: Status::Degraded, detail: detail.into(), remedy }
}

fn missing(name: &'static str, detail: impl Into<String>, remedy: impl Into<String>) -> Finding {
    let remedy = Some(remedy.into());
    Finding { name, status: Status::Missing, detail: detail.into(), remedy }
}

fn file(sysfs: &dyn Sysfs, name: &'static str, path: &str, remedy: &str) -> Finding {
    if sysfs.exists(Path::new(path)) {
        ok(name, path)
    } else {
        missing(name, format!("no {path}"), remedy)
    }
}

fn root() -> Finding {
    let uid = geteuid();
    if uid.is_root() {
        ok("root", "effective user 0")
    } else {
        let detail = format!("effective user {}", uid.as_raw());
        missing("root", detail, "apply, rollback and calibrate need root; plan and simulate do not")
    }
}

fn cgroup(version: Option<&CgroupVersion>) -> Finding {
    match version {
        Some(CgroupVersion::V2 { mount }) => ok("cgroup", format!("v2 io at {}", mount.display())),
        Some(CgroupVersion::V1 { mount }) => degraded(
            "cgroup",
            format!("v1 blkio at {}: weights and limits act on direct I/O only", mount.display()),
            "use cache=none for every VM, or boot with systemd.unified_cgroup_hierarchy=1",
        ),
        None => missing("cgroup", "no hierarchy carries block I/O", "mount cgroup2 with io"),
    }
}

/// bfq, kyber and mq-deadline: offered by some device, or a module on disk.
fn schedulers(sysfs: &dyn Sysfs, release: &str) -> Vec<Finding> {
    let mut offered = BTreeSet::new();
    let block = Path::new("/sys/block");
    for name in sysfs.list(block).unwrap_or_default() {
        let text = sysfs.read(&block.join(name).join("queue/scheduler")).unwrap_or_default();
        offered.extend(text.split_whitespace().map(|w| w.trim_matches(['[', ']']).to_owned()));
    }
    let find = |name: &'static str| {
        let module = module(name);
        if offered.contains(name) {
            return ok(name, "offered by a block device");
        }
        match has_module(sysfs, release, module) {
            Some(true) => {
                degraded(name, "a module that is not loaded", format!("`modprobe {module}`"))
            }
            Some(false) => {
                let detail = "offered by no block device, no module on disk";
                missing(name, detail, format!("install the kernel's extra modules ({module})"))
            }
            None => {
                let detail = "not loaded, and the index of modules cannot be read: the kernel may \
                              load it when it is set";
                degraded(name, detail, format!("`modprobe {module}`, on the host of a container"))
            }
        }
    };
    ["bfq", "kyber", "mq-deadline"].map(find).to_vec()
}

/// A non-root cgroup's directory, since the root has few io files.
fn some_cgroup(sysfs: &dyn Sysfs, mount: &Path) -> Option<PathBuf> {
    let names = sysfs.list(mount).ok()?;
    let is_group = |d: &PathBuf| sysfs.exists(&d.join("cgroup.procs"));
    names.into_iter().map(|n| mount.join(n)).find(is_group)
}

fn limits(sysfs: &dyn Sysfs, version: Option<&CgroupVersion>) -> Finding {
    let remedy = "needs a kernel with CONFIG_BLK_DEV_THROTTLING=y";
    match version {
        Some(CgroupVersion::V1 { mount }) => {
            let name = "blkio.throttle.read_bps_device";
            if sysfs.exists(&mount.join(name)) {
                ok("limits", "blkio.throttle")
            } else {
                missing("limits", format!("no {name}"), remedy)
            }
        }
        Some(CgroupVersion::V2 { mount }) => limits_v2(sysfs, mount, remedy),
        None => missing("limits", "no io controller", "mount cgroup2 with io"),
    }
}

/// Without io in the root's `cgroup.subtree_control` no cgroup has `io.max`, whatever the kernel.
fn limits_v2(sysfs: &dyn Sysfs, mount: &Path, remedy: &str) -> Finding {
    let enabled = sysfs.read(&mount.join("cgroup.subtree_control")).unwrap_or_default();
    if !enabled.split_whitespace().any(|c| c == "io") {
        return degraded(
            "limits",
            format!("io is not enabled below {}", mount.display()),
            "write +io to cgroup.subtree_control of each parent of a VM's cgroup (systemd: set \
             IOAccounting=yes on the unit); rtvirtio does so for cgroups of its own",
        );
    }
    match some_cgroup(sysfs, mount) {
        Some(group) if sysfs.exists(&group.join("io.max")) => ok("limits", "io.max"),
        Some(group) => missing("limits", format!("no io.max in {}", group.display()), remedy),
        None => degraded("limits", "no cgroup to look at", "start a VM and look again"),
    }
}

fn io_cost(sysfs: &dyn Sysfs, version: Option<&CgroupVersion>) -> Finding {
    let file = version.map(|v| v.mount().join("io.cost.qos"));
    match file {
        Some(file) if sysfs.exists(&file) => ok("io.cost", file.display().to_string()),
        _ => degraded(
            "io.cost",
            "no io.cost.qos",
            "only a baseline needs it: cgroup v2 and CONFIG_BLK_CGROUP_IOCOST=y",
        ),
    }
}

/// Whether a data plane can have its rings, by what came of setting one up: the sysctl tells nothing
/// of filters, and older kernels have none.
#[must_use]
pub fn io_uring(host: &Host, ring: io::Result<()>) -> Finding {
    const NAME: &str = "io_uring";
    const ALLOW: &str = "`sysctl kernel.io_uring_disabled=0`";
    let read = |path: &str| host.sysfs.read(Path::new(path)).unwrap_or_default();
    let disabled = read("/proc/sys/kernel/io_uring_disabled");
    let Err(error) = ring else {
        return match disabled.trim() {
            "1" => degraded(NAME, "for root and io_uring_group only", ALLOW),
            _ => ok(NAME, "a ring was set up"),
        };
    };
    let status = read("/proc/self/status");
    let is_filtered = status.lines().any(|line| line.split_whitespace().eq(["Seccomp:", "2"]));
    match (Errno::from_io_error(&error), disabled.trim()) {
        (Some(Errno::PERM), "2") => missing(NAME, "disabled by sysctl", ALLOW),
        (Some(Errno::PERM | Errno::NOSYS), _) if is_filtered => missing(
            NAME,
            format!("a seccomp filter refuses it: {error}"),
            "let the container's filter pass io_uring_setup, io_uring_enter and io_uring_register \
             (`--security-opt seccomp=PROFILE`), or run on the host",
        ),
        (Some(Errno::PERM), "1") => missing(NAME, "for root and io_uring_group only", ALLOW),
        // A kernel before 5.6 has one that lacks what is asked for.
        (Some(Errno::NOSYS | Errno::INVAL), _) => {
            missing(NAME, "not in this kernel", "needs kernel 5.6 or later with CONFIG_IO_URING=y")
        }
        (Some(Errno::NOMEM), _) => missing(
            NAME,
            format!("no memory for a ring: {error}"),
            "raise RLIMIT_MEMLOCK: `ulimit -l`, or LimitMEMLOCK= in the unit",
        ),
        _ => missing(NAME, format!("no ring: {error}"), "let this process call io_uring_setup"),
    }
}

fn fio() -> Finding {
    let output = Command::new("fio").arg("--version").output();
    match output {
        Ok(o) if o.status.success() => {
            ok("fio", String::from_utf8_lossy(&o.stdout).trim().to_owned())
        }
        _ => missing("fio", "not in PATH", "install fio; calibration and benchmarks need it"),
    }
}

fn kvm(sysfs: &dyn Sysfs) -> Finding {
    if sysfs.exists(Path::new("/dev/kvm")) {
        degraded(
            "kvm",
            "/dev/kvm present, not probed by a boot",
            "a nested host may have it and still run no guest; guests then fall back to TCG",
        )
    } else {
        missing("kvm", "no /dev/kvm", "enable virtualisation; guests fall back to TCG")
    }
}

fn locked_memory() -> Finding {
    let limit = getrlimit(Resource::Memlock).current;
    match limit {
        None => ok("locked-memory", "unlimited"),
        Some(bytes) if bytes >= MEMLOCK_BYTES => ok("locked-memory", format!("{bytes} bytes")),
        Some(bytes) => degraded(
            "locked-memory",
            format!("{bytes} bytes"),
            format!("raise it to {MEMLOCK_BYTES}: `ulimit -l`, or LimitMEMLOCK= in the unit"),
        ),
    }
}

/// What [`crate::block_trace`] needs; whether this process may use it is seen when it does.
fn block_trace(sysfs: &dyn Sysfs) -> Finding {
    let remedy = "latency per disk on the host needs CONFIG_PERF_EVENTS and CONFIG_EVENT_TRACING";
    let filesystems = sysfs.read(Path::new("/proc/filesystems")).unwrap_or_default();
    if !filesystems.lines().any(|l| l.ends_with("\ttracefs")) {
        missing("block-trace", "no tracefs", remedy)
    } else if !sysfs.exists(Path::new("/proc/sys/kernel/perf_event_paranoid")) {
        missing("block-trace", "no perf events", remedy)
    } else {
        ok("block-trace", "tracefs and perf events")
    }
}

fn processors() -> Finding {
    let count = std::thread::available_parallelism().map_or(1, usize::from);
    if count >= 4 {
        ok("processors", count.to_string())
    } else {
        let remedy = "CPU starvation looks like an I/O tail: watch the canary beside each result";
        degraded("processors", count.to_string(), remedy)
    }
}

fn realtime(sysfs: &dyn Sysfs) -> Finding {
    let name = "sched-fifo";
    let remedy = "grant CAP_SYS_NICE, or raise RLIMIT_RTPRIO";
    let status = sysfs.read(Path::new("/proc/self/status")).unwrap_or_default();
    let effective = status.lines().find_map(|l| l.strip_prefix("CapEff:"));
    let effective = effective.and_then(|c| u64::from_str_radix(c.trim(), 16).ok()).unwrap_or(0);
    let by_limit = getrlimit(Resource::Rtprio).current.is_none_or(|p| p > 0);
    let runtime = sysfs.read(Path::new("/proc/sys/kernel/sched_rt_runtime_us")).unwrap_or_default();
    if runtime.trim() == "0" {
        let remedy = "`sysctl kernel.sched_rt_runtime_us=950000`";
        missing(name, "sched_rt_runtime_us is 0", remedy)
    } else if effective >> CAP_SYS_NICE & 1 == 1 {
        ok(name, "CAP_SYS_NICE")
    } else if by_limit {
        ok(name, "RLIMIT_RTPRIO")
    } else {
        missing(name, "no CAP_SYS_NICE, RLIMIT_RTPRIO is 0", remedy)
    }
}

fn writers(host: &Host) -> Finding {
    // A unit's IOWeight is no harm by itself; verify names it beside a drift.
    let found = host.other_writers();
    let name = "other-writers";
    if found.is_empty() {
        return ok(name, "none: no udev rule, TuneD profile or unit sets these knobs");
    }
    let list: Vec<String> = found
        .iter()
        .map(|w| {
            let kind = match w.kind {
                WriterKind::Udev => "udev",
                WriterKind::Tuned => "TuneD",
                WriterKind::Systemd => "systemd",
            };
            format!("{kind} {}: {}", w.file.display(), w.line)
        })
        .collect();
    let remedy =
        "exclude rtvirtio's devices and VMs from them, or `rtvirtio verify` will find drift";
    degraded(name, list.join("; "), remedy)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::FakeSysfs;
    use crate::sysfs::DeviceNumber;
    use std::sync::Arc;

    fn of(sysfs: FakeSysfs) -> Vec<Finding> {
        probe(&Host::with_sysfs("/nonexistent", Arc::new(sysfs)))
    }

    fn status(findings: &[Finding], name: &str) -> Status {
        findings.iter().find(|f| f.name == name).unwrap().status
    }

    #[test]
    fn probe_names_each_capability_once() {
        let sysfs = FakeSysfs::v1();
        sysfs.add_disk("sda", DeviceNumber::new(8, 0), 10);
        sysfs.put("/proc/filesystems", "nodev\tdebugfs\nnodev\ttracefs\n\text4\n");
        sysfs.put("/proc/sys/kernel/perf_event_paranoid", "2\n");
        let findings = of(sysfs);
        let names: BTreeSet<_> = findings.iter().map(|f| f.name).collect();
        assert_eq!(names.len(), findings.len());
        assert_eq!(status(&findings, "bfq"), Status::Ok);
        assert_eq!(status(&findings, "kyber"), Status::Ok);
        assert_eq!(status(&findings, "cgroup"), Status::Degraded);
        assert_eq!(status(&findings, "block-trace"), Status::Ok);
        let json = serde_json::to_value(&findings).unwrap();
        assert_eq!(json[0]["name"], "root");
    }

    #[test]
    fn bfq_as_module_on_disk_is_degraded() {
        let sysfs = FakeSysfs::v2();
        sysfs.put("/proc/sys/kernel/osrelease", "6.12\n");
        sysfs.put("/lib/modules/6.12/modules.dep", "kernel/block/bfq.ko.xz:\n");
        let findings = of(sysfs);
        assert_eq!(status(&findings, "bfq"), Status::Degraded);
        assert_eq!(status(&findings, "kyber"), Status::Missing);
        // In a container nobody can tell.
        assert_eq!(status(&of(FakeSysfs::v2()), "kyber"), Status::Degraded);
    }

    #[test]
    fn limits_on_v2_need_io_enabled_below_the_root() {
        let of = |control: &str, files: &[&str]| {
            let sysfs = FakeSysfs::bare();
            sysfs.put("/cg/cgroup.subtree_control", control);
            files.iter().for_each(|f| sysfs.put(f, ""));
            let finding = limits_v2(&sysfs, Path::new("/cg"), "");
            (finding.status, finding.detail)
        };
        let group = "/cg/a/cgroup.procs";
        let (status, detail) = of("cpu memory\n", &[group]);
        assert_eq!((status, &*detail), (Status::Degraded, "io is not enabled below /cg"));
        assert_eq!(of("cpu io\n", &[]).0, Status::Degraded);
        let (status, detail) = of("cpu io\n", &[group]);
        assert_eq!((status, &*detail), (Status::Missing, "no io.max in /cg/a"));
        assert_eq!(of("cpu io\n", &[group, "/cg/a/io.max"]).0, Status::Ok);
    }

    #[test]
    fn missing_capability_has_a_remedy() {
        let findings = of(FakeSysfs::bare());
        assert!(findings.iter().all(|f| f.status == Status::Ok || f.remedy.is_some()));
        assert_eq!(status(&findings, "cgroup"), Status::Missing);
        assert_eq!(status(&findings, "block-trace"), Status::Missing);
    }

    #[test]
    fn ring_that_is_refused_is_told_apart_by_who_refuses_it() {
        let of = |disabled: &str, seccomp: &str, ring: Result<(), Errno>| {
            let sysfs = FakeSysfs::bare();
            sysfs.put("/proc/sys/kernel/io_uring_disabled", disabled);
            sysfs.put("/proc/self/status", &format!("Name:\tx\nSeccomp:\t{seccomp}\n"));
            let host = Host::with_sysfs("/nonexistent", Arc::new(sysfs));
            let found = io_uring(&host, ring.map_err(io::Error::from));
            (found.status, format!("{}; {}", found.detail, found.remedy.unwrap_or_default()))
        };
        assert_eq!(of("0\n", "0", Ok(())).0, Status::Ok);
        assert_eq!(of("", "0", Ok(())).0, Status::Ok);
        assert_eq!(of("1\n", "0", Ok(())).0, Status::Degraded);
        for (disabled, seccomp, errno, words) in [
            ("2\n", "2", Errno::PERM, "by sysctl"),
            ("1\n", "0", Errno::PERM, "io_uring_group"),
            ("0\n", "2", Errno::PERM, "seccomp filter"),
            ("", "2", Errno::NOSYS, "seccomp filter"),
            ("", "0", Errno::NOSYS, "CONFIG_IO_URING"),
            ("0\n", "0", Errno::NOMEM, "RLIMIT_MEMLOCK"),
            ("0\n", "0", Errno::ACCESS, "no ring"),
        ] {
            let (status, text) = of(disabled, seccomp, Err(errno));
            assert!(status == Status::Missing && text.contains(words), "{errno:?}: {text}");
        }
    }
}
