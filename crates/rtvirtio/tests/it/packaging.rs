//! What is installed: files, units, hooks, examples, and a Debian package that comes and goes.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::scratch_disk::{RTVIRTIO, eventually, may_mount, said};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn skip(test: &str, why: &str) {
    let _ = writeln!(std::io::stderr(), "SKIPPED {test}: {why}");
}

/// Runs one of the project's scripts with the binary under test.
fn script(name: &str, arguments: &[&Path]) {
    let output = Command::new(root().join("scripts").join(name))
        .args(arguments)
        .env("BINARIES", Path::new(RTVIRTIO).parent().unwrap())
        .env("DEB_WITHOUT_LAB", "1")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(output.status.success(), "{name}: {}", said(&output));
}

#[test]
fn what_is_installed_is_whole() {
    let directory = tempfile::tempdir().unwrap();
    let staged = |path: &str| directory.path().join(path.trim_start_matches('/'));
    script("install", &[directory.path()]);
    for verb in ["top", "init", "calibrate", "plan", "apply", "watch", "serve", "ctl-qos"] {
        let page = staged(&format!("/usr/share/man/man1/rtvirtio-{verb}.1.gz"));
        assert!(page.exists(), "{}", page.display());
    }
    let completion = staged("/usr/share/bash-completion/completions/rtvirtio");
    assert!(std::fs::read_to_string(completion).unwrap().contains("calibrate"));
    for unit in ["rtvirtio-dataplane.service", "rtvirtio-watch.service"] {
        let text = std::fs::read_to_string(staged(&format!("/usr/lib/systemd/system/{unit}")));
        let text = text.unwrap();
        let program = text.lines().find_map(|line| line.strip_prefix("ExecStart=")).unwrap();
        let program = program.split(' ').next().unwrap();
        let mode = std::fs::metadata(staged(program)).unwrap().permissions().mode();
        assert_eq!(mode & 0o111, 0o111, "{unit} starts {program}");
    }
    for page in ["operating.md", "reference/serve.md", "examples/nics.conf"] {
        let page = staged("/usr/share/doc/rtvirtio").join(page);
        assert!(page.exists(), "{}", page.display());
    }
    let examples = staged("/usr/share/doc/rtvirtio/examples");
    let site = std::fs::read_to_string(examples.join("site.toml")).unwrap();
    rtvirtio_spec::specification::parse("site.toml", &site).unwrap();
    let served = examples.join("dataplane.toml");
    let output = Command::new(RTVIRTIO).arg("serve").arg("--check").arg(served).output().unwrap();
    // It is right, and its VMs' images are not here.
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
}

/// Files below a directory.
fn files(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, found);
        } else {
            found.push(path);
        }
    }
}

#[test]
fn what_is_installed_is_removed_again_and_an_edited_hook_is_kept() {
    let directory = tempfile::tempdir().unwrap();
    let hooks = directory.path().join("etc/libvirt/hooks");
    let hook = hooks.join("qemu.d/rtvirtio");
    std::fs::create_dir_all(hooks.join("qemu.d")).unwrap();
    std::fs::write(&hook, "#!/bin/sh\n").unwrap();
    script("install", &[directory.path()]);
    assert!(std::fs::read_to_string(&hook).unwrap().contains("rtvirtio apply"));
    // Elsewhere: libvirt runs all that is beside it.
    let old = hooks.join("rtvirtio-qemu.old");
    assert_eq!(std::fs::read_to_string(&old).unwrap(), "#!/bin/sh\n");

    script("install", &[Path::new("--uninstall"), directory.path()]);
    let mut left = Vec::new();
    files(directory.path(), &mut left);
    assert_eq!(left, [old]);
}

/// Calls of the data plane before its own list closes, or of its threads, which are in groups that the unit refuses.
#[test]
fn unit_allows_the_calls_that_the_data_plane_makes() {
    let unit = root().join("packaging/rtvirtio-dataplane.service");
    let text = std::fs::read_to_string(unit).unwrap();
    let lists = text.lines().filter_map(|line| line.strip_prefix("SystemCallFilter="));
    let lists: Vec<&str> = lists.collect();
    let refused = lists.iter().rposition(|list| list.starts_with('~')).unwrap();
    let allowed: BTreeSet<&str> =
        lists[refused + 1..].iter().flat_map(|list| list.split(' ')).collect();
    for (call, what) in [
        ("fchownat", "gives the control socket its group"),
        ("sched_setaffinity", "places IOThreads"),
        ("setpriority", "has threads that hear front ends give way"),
    ] {
        assert!(allowed.contains(call), "{call}, which {what}");
    }
}

#[test]
fn units_are_what_systemd_takes() {
    const TEST: &str = "units_are_what_systemd_takes";
    if Command::new("systemd-analyze").arg("--version").output().is_err() {
        return skip(TEST, "no systemd-analyze");
    }
    let directory = tempfile::tempdir().unwrap();
    for unit in ["rtvirtio-dataplane.service", "rtvirtio-watch.service"] {
        let text = std::fs::read_to_string(root().join("packaging").join(unit)).unwrap();
        // The page is installed with it, and not here.
        let file = directory.path().join(unit);
        std::fs::write(
            &file,
            text.replace("/usr/bin/rtvirtio", RTVIRTIO).replace("man:rtvirtio-watch(1) ", ""),
        )
        .unwrap();
        let output = Command::new("systemd-analyze").arg("verify").arg(&file).output().unwrap();
        let complaints = said(&output);
        let of_ours = complaints.lines().filter(|line| line.contains(unit));
        assert_eq!(of_ours.collect::<Vec<_>>(), [""; 0], "{complaints}");
    }
}

#[test]
fn hooks_apply_the_plan_once_a_vm_has_started() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let log = at("log");
    let stub = format!("#!/bin/sh\necho \"$@\" >>{}\n", log.display());
    std::fs::write(at("rtvirtio"), stub).unwrap();
    std::fs::set_permissions(at("rtvirtio"), std::fs::Permissions::from_mode(0o755)).unwrap();
    let plan = at("plan.json");
    let path = format!("{}:{}", directory.path().display(), std::env::var("PATH").unwrap());
    let hook = |name: &str, arguments: &[&str]| {
        let output = Command::new(root().join("packaging/hooks").join(name))
            .args(arguments)
            .env("PATH", &path)
            .env("RTVIRTIO_PLAN", &plan)
            .env("RTVIRTIO_HOOK_DELAY", "0")
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", said(&output));
    };
    let ran = || std::fs::read_to_string(&log).unwrap_or_default().lines().count();
    // Without a plan there is nothing to do.
    hook("libvirt", &["db", "started", "begin", "-"]);
    std::fs::write(&plan, "{}").unwrap();
    hook("libvirt", &["db", "prepare", "begin", "-"]);
    hook("libvirt", &["db", "release", "end", "-"]);
    hook("proxmox", &["100", "pre-start"]);
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert_eq!(ran(), 0);
    hook("libvirt", &["db", "started", "begin", "-"]);
    let soon = std::time::Duration::from_secs(10);
    eventually("the libvirt hook has run", soon, || ran() == 1);
    hook("proxmox", &["100", "post-start"]);
    assert_eq!(ran(), 2);
    let text = std::fs::read_to_string(&log).unwrap();
    let expected = format!("apply {} --reapply --force", plan.display());
    assert!(text.lines().all(|line| line == expected), "{text}");
}

/// Installs $1 in a copy of this system that nobody else sees, purges it, and says what is left.
const COME_AND_GO: &str = r#"
set -eu
deb=$1 work=$2
mount -t tmpfs t "$work"
mkdir "$work/upper" "$work/work" "$work/root"
mount -t overlay o -o "lowerdir=/,upperdir=$work/upper,workdir=$work/work" "$work/root"
cp "$deb" "$work/root/rtvirtio.deb"
mount -t tmpfs t "$work/root/run"
mount --bind /proc "$work/root/proc"
inside() { chroot "$work/root" "$@"; }
inside dpkg -i /rtvirtio.deb
inside rtvirtio --version
inside sh -c 'test -s /usr/share/man/man1/rtvirtio-plan.1.gz && id rtvirtio >/dev/null'
inside dpkg -i /rtvirtio.deb
mkdir -p "$work/root/var/lib/rtvirtio/profiles"
touch "$work/root/var/lib/rtvirtio/profiles/x.json"
inside dpkg --purge rtvirtio
echo LEFT
# What was there before shows here too where something in it was changed.
find "$work/upper" \( -type f -o -type d -empty \) | sed "s#^$work/upper##" |
    while read -r path; do [ -e "$path" ] || echo "$path"; done
"#;

#[test]
fn debian_package_comes_and_goes() {
    const TEST: &str = "debian_package_comes_and_goes";
    if !rustix::process::geteuid().is_root() {
        return skip(TEST, "needs root");
    }
    if !Path::new("/etc/debian_version").exists() {
        return skip(TEST, "this is no Debian");
    }
    if !may_mount() {
        return skip(TEST, "needs the right to mount");
    }
    let directory = tempfile::tempdir().unwrap();
    script("deb", &[directory.path()]);
    let is_deb = |path: &PathBuf| path.extension().is_some_and(|e| e == "deb");
    let packages = std::fs::read_dir(directory.path()).unwrap().map(|e| e.unwrap().path());
    let package = packages.into_iter().find(is_deb).expect("a package");
    let work = directory.path().join("work");
    std::fs::create_dir(&work).unwrap();
    let output = Command::new("unshare")
        .args(["--mount", "sh", "-c", COME_AND_GO, "sh"])
        .args([&package, &work])
        .env("DEBIAN_FRONTEND", "noninteractive")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = said(&output);
    if text.contains("mount:") && text.contains("overlay") {
        return skip(TEST, "no overlay over / here");
    }
    assert!(output.status.success(), "{text}");
    let left = text.split_once("LEFT\n").unwrap().1.lines();
    // What dpkg notes for itself, and the user, whom an operator's files may belong to.
    let of_dpkg = ["/var/lib/dpkg", "/var/log", "/var/cache", "/etc/passwd", "/etc/group"];
    let shadow = ["/etc/shadow", "/etc/gshadow", "/etc/subuid", "/etc/subgid", "/etc/.pwd.lock"];
    let ignored = |line: &&str| {
        of_dpkg.iter().chain(&shadow).any(|path| line.starts_with(path))
            || *line == "/rtvirtio.deb"
            || !line.starts_with('/')
    };
    let left: BTreeSet<&str> = left.filter(|line| !ignored(line)).collect();
    assert_eq!(left, BTreeSet::new(), "{text}");
}
