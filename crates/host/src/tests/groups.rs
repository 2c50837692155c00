//! Cgroups for a benchmark's VMs.

use super::*;

fn control(fake: &FakeSysfs, path: &str) -> String {
    let text = fake.read(&Path::new("/sys/fs/cgroup").join(path).join("cgroup.subtree_control"));
    text.unwrap().trim().to_owned()
}

fn host(fake: FakeSysfs) -> (Host, Arc<FakeSysfs>, TempDir) {
    let state = tempfile::tempdir().unwrap();
    let fake = Arc::new(fake);
    (Host::with_sysfs(state.path(), fake.clone()), fake, state)
}

#[test]
fn cgroup_on_v2_enables_io_and_restores_it() {
    let (host, fake, _state) = host(FakeSysfs::v2());
    let before = fake.snapshot();
    let (a, b) = (Path::new("rtvirtio/run/a"), Path::new("rtvirtio/run/b"));
    let directory = host.create_cgroup(a).unwrap();
    host.create_cgroup(b).unwrap();
    host.create_cgroup(a).unwrap();
    assert!(fake.exists(&directory.join("io.max")));
    host.remove_cgroup(a).unwrap();
    assert_eq!(control(&fake, ""), "io", "the other one still needs it");
    host.remove_cgroup(b).unwrap();
    host.remove_cgroup(b).unwrap();
    assert_eq!(fake.snapshot(), before);
}

#[test]
fn cgroup_on_v2_leaves_io_that_was_enabled_before() {
    let (host, fake, _state) = host(FakeSysfs::v2());
    fake.add_cgroup("machine.slice/x");
    let before = fake.snapshot();
    host.create_cgroup(Path::new("rtvirtio/run/a")).unwrap();
    host.remove_cgroup(Path::new("rtvirtio/run/a")).unwrap();
    assert_eq!(fake.snapshot(), before);
}

#[test]
fn remove_kills_what_is_left_in_the_cgroup() {
    let (host, fake, _state) = host(FakeSysfs::v1());
    let path = Path::new("rtvirtio/run/a");
    host.create_cgroup(path).unwrap();
    fake.add_process("rtvirtio/run/a", 41, false);
    host.create_cgroup(&path.join("child")).unwrap();
    fake.add_process("rtvirtio/run/a/child", 42, false);
    host.remove_cgroup(path).unwrap();
    assert!(!fake.exists(Path::new("/sys/fs/cgroup/blkio/rtvirtio")));
}

#[test]
fn remove_gives_up_on_a_process_that_survives() {
    let (host, fake, _state) = host(FakeSysfs::v1());
    let path = Path::new("rtvirtio/run/a");
    host.create_cgroup(path).unwrap();
    fake.add_process("rtvirtio/run/a", 41, true);
    assert!(matches!(host.remove_cgroup(path), Err(HostError::CgroupBusy { count: 1, .. })));
}

#[test]
fn cgroup_outside_rtvirtio_is_refused() {
    let (host, fake, _state) = host(FakeSysfs::v1());
    fake.add_cgroup("machine.slice/x");
    for bad in ["machine.slice/x", "rtvirtio", "rtvirtio/../machine.slice/x", ""] {
        let path = Path::new(bad);
        assert!(matches!(host.remove_cgroup(path), Err(HostError::BadCgroupPath { .. })));
        assert!(matches!(host.create_cgroup(path), Err(HostError::BadCgroupPath { .. })));
    }
}
