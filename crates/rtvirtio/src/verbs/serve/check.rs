//! What a configuration names that this host does not have.

use std::collections::BTreeSet;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

use rtvirtio_dataplane::Tap;
use rtvirtio_dataplane::plane::check_image;
use rtvirtio_dataplane::sandbox::Identity;
use rtvirtio_spec::plan::qemu::cpuset;
use rtvirtio_spec::serve::{Configuration, Device, Engine, Listen, NicLink};
use rtvirtio_units::CpuId;
use rustix::fs::{Access, AtFlags, CWD, accessat};
use rustix::io::Errno;

/// Whether this process may do that with a path: with the rights that it would open it with.
fn allows(path: &Path, access: Access) -> Result<(), Errno> {
    accessat(CWD, path, access, AtFlags::EACCESS)
}

/// Who this process is, to be told what it may not.
fn user() -> String {
    format!("user {}", rustix::process::geteuid().as_raw())
}

/// Each with the remedy. Images and sockets are opened by whoever starts the data plane, so that the rights
/// which count are those of this process.
pub(super) fn missing(configuration: &Configuration, online: &BTreeSet<CpuId>) -> Vec<String> {
    let mut missing = Vec::new();
    let absent = |cpus: &[CpuId]| -> Vec<String> {
        cpus.iter().filter(|cpu| !online.contains(cpu)).map(ToString::to_string).collect()
    };
    let of_policy = absent(&configuration.iocores.cpus);
    if !of_policy.is_empty() {
        let here: Vec<CpuId> = online.iter().copied().collect();
        missing.push(format!(
            "iocores: CPU {} is not online here (CPU {} is): no IOThread can be added there",
            of_policy.join(", "),
            cpuset(&here),
        ));
    }
    for iothread in &configuration.iothreads {
        let absent = absent(&iothread.cpus);
        if !absent.is_empty() {
            let here: Vec<CpuId> = online.iter().copied().collect();
            let rest = if absent.len() == iothread.cpus.len() {
                "it would not start"
            } else {
                "it would run on the others alone"
            };
            missing.push(format!(
                "IOThread {}: CPU {} is not online here (CPU {} is): {rest}",
                iothread.name,
                absent.join(", "),
                cpuset(&here),
            ));
        }
    }
    let listens = configuration.devices.iter().filter_map(|device| match &device.listen {
        Listen::Path(path) => Some(path),
        Listen::Activated(_) => None,
    });
    let sockets = configuration.control.iter().map(|control| &control.socket).chain(listens);
    let slots = configuration.devices.iter().filter_map(|device| device.slots.as_ref());
    let sockets = sockets.chain(slots).chain(configuration.nics.iter().flat_map(|n| n.sockets()));
    let sockets: BTreeSet<&Path> = sockets.map(AsRef::as_ref).collect();
    let directories: BTreeSet<&Path> =
        sockets.iter().filter_map(|socket| socket.parent()).collect();
    missing.extend(directories.iter().filter_map(|directory| unusable_directory(directory)));
    missing.extend(sockets.into_iter().filter_map(unusable_socket));
    match super::identity(&configuration.service) {
        Ok(Some(identity)) => {
            let kept = |directory: &&Path| keeps_sockets(directory, &identity);
            missing.extend(directories.iter().filter_map(kept));
        }
        Ok(None) => {}
        Err(error) => missing.push(format!("service: {error}")),
    }
    missing.extend(configuration.devices.iter().filter_map(unusable_image));
    for nic in &configuration.nics {
        let tap = match &nic.link {
            NicLink::Tap(tap) => tap,
            NicLink::Stream(path) => {
                let (name, path) = (&nic.name, path.as_path());
                match allows(path, Access::WRITE_OK) {
                    Ok(()) => {}
                    Err(Errno::ACCESS) => missing.push(format!(
                        "network device {name}: {} may not connect to {}: give it the right to write there",
                        user(),
                        path.display()
                    )),
                    Err(_) => missing.push(format!(
                        "network device {name}: nobody listens at {}: start what is behind it first",
                        path.display()
                    )),
                }
                continue;
            }
            // The peer of a datagram socket may come later.
            NicLink::Dgram { .. } | NicLink::Network(_) => continue,
        };
        if let Err(error) = Tap::examine(tap, nic.pairs) {
            missing.push(format!("network device {}: {error}", nic.name));
        }
    }
    missing
}

/// Why no socket can be made at this path, if something is there. A socket may be the data plane's that serves by now.
fn unusable_socket(path: &Path) -> Option<String> {
    let found = std::fs::symlink_metadata(path).ok()?;
    (!found.file_type().is_socket())
        .then(|| format!("{} is there already, and is no socket: move it away", path.display()))
}

/// Why no socket can be made there, if so.
fn unusable_directory(directory: &Path) -> Option<String> {
    let shown = directory.display();
    if !directory.is_dir() && !matches!(directory.metadata(), Err(e) if is_denied(&e)) {
        return Some(format!(
            "{shown} is not there, where sockets are to be: mkdir -p {shown} (the unit makes /run/rtvirtio)"
        ));
    }
    match allows(directory, Access::WRITE_OK | Access::EXEC_OK) {
        Ok(()) => None,
        Err(Errno::ROFS) => Some(format!(
            "{shown}, where sockets are to be, is on a file system that is mounted read-only: \
             put them in /run/rtvirtio"
        )),
        Err(_) => Some(format!(
            "{} may not make sockets in {shown}: chown it to that user, or start as root",
            user()
        )),
    }
}

/// Why the sockets that root makes there stay when the user that it becomes ends, if so.
fn keeps_sockets(directory: &Path, identity: &Identity) -> Option<String> {
    let found = directory.metadata().ok()?;
    let may_write = match (found.uid(), found.gid()) {
        (uid, _) if uid == identity.uid() => found.mode() & 0o200,
        (_, gid) if gid == identity.gid() => found.mode() & 0o020,
        _ => found.mode() & 0o002,
    };
    let (shown, user) = (directory.display(), identity.name());
    (may_write == 0).then(|| {
        format!(
            "user {user} may not remove the sockets in {shown} at the end: chown {user} {shown}"
        )
    })
}

fn is_denied(error: &std::io::Error) -> bool {
    error.kind() == std::io::ErrorKind::PermissionDenied
}

/// Why a device's data cannot be served, if so.
fn unusable_image(device: &Device) -> Option<String> {
    let (path, what) = match &device.engine {
        Engine::File(file) => (&file.path, "image"),
        Engine::Nvme(nvme) => (&nvme.path, "device"),
        Engine::Ram { .. } | Engine::Ssd(_) => return unusable_engine(device),
    };
    let (name, shown) = (&device.name, path.display());
    let (access, verbs) = if device.read_only {
        (Access::READ_OK, "read")
    } else {
        (Access::READ_OK | Access::WRITE_OK, "read and write")
    };
    match allows(path, access) {
        Ok(()) => {}
        Err(Errno::ACCESS | Errno::PERM) => {
            return Some(format!(
                "device {name}: {} may not {verbs} its {what} {shown}: chown it to that user, \
                 or start as root",
                user()
            ));
        }
        Err(Errno::ROFS) => {
            return Some(format!(
                "device {name}: its {what} {shown} is on a file system that is mounted read-only, or that this service \
                 sees so: write read_only = true, or ReadWritePaths= in a drop-in of the unit"
            ));
        }
        Err(Errno::NOENT | Errno::NOTDIR) => {
            return Some(format!("device {name}: its {what} {shown} is not there"));
        }
        Err(error) => return Some(format!("device {name}: its {what} {shown}: {error}")),
    }
    let is_character =
        |path: &Path| std::fs::metadata(path).is_ok_and(|found| found.file_type().is_char_device());
    if what == "device" && !is_character(path) {
        return Some(format!(
            "device {name}: {shown} is no NVMe namespace's character device, as /dev/ng0n1 is one"
        ));
    }
    unusable_engine(device)
}

/// The same of its kind, its size and what is in it.
fn unusable_engine(device: &Device) -> Option<String> {
    let name = &device.name;
    let error = check_image(device).err()?;
    let causes = std::iter::successors(std::error::Error::source(&error), |e| e.source());
    let causes: String = causes.map(|cause| format!(": {cause}")).collect();
    Some(format!("device {name}: {error}{causes}"))
}

#[cfg(test)]
mod tests {
    use rtvirtio_spec::serve;

    use super::*;

    #[test]
    fn what_the_host_lacks_is_named_and_what_it_has_is_not() {
        let text = "version = 1
            [service]
            sandbox = false
            [control]
            socket = '/nonexistent/control'
            [[iothread]]
            name = 'here'
            cpus = [0]
            [[iothread]]
            name = 'elsewhere'
            cpus = [0, 2, 3]
            [[device]]
            name = 'image'
            vm = 'a'
            socket = '/tmp/a'
            engine = { type = 'file', path = '/nonexistent/a.raw' }
            [[device]]
            name = 'ram'
            vm = 'a'
            socket = '/tmp/b'
            engine = { type = 'ram', size = '1M' }
            [[nic]]
            name = 'net'
            vm = 'a'
            socket = '/tmp/c'
            tap = 'nonexistent'
            queues = 2";
        let configuration = serve::parse("serve.toml", text).unwrap();
        let found = missing(&configuration, &[CpuId::new(0), CpuId::new(1)].into());
        let [iothread, directory, image, tap] = &found[..] else { panic!("{found:#?}") };
        assert_eq!(
            iothread,
            "IOThread elsewhere: CPU 2, 3 is not online here (CPU 0-1 is): it would run on the others \
             alone"
        );
        assert!(directory.contains("mkdir -p /nonexistent"), "{directory}");
        assert!(image.contains("its image /nonexistent/a.raw is not there"), "{image}");
        assert!(
            tap.contains("ip tuntap add dev nonexistent mode tap vnet_hdr multi_queue"),
            "{tap}"
        );
    }

    #[test]
    fn what_would_end_the_start_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        for name in ["control", "nvme", "net.sock"] {
            std::fs::write(path.join(name), "kept").unwrap();
        }
        let text = format!(
            "version = 1
            [control]
            socket = '{0}/control'
            [service]
            user = 'no-such-user'
            [iocores]
            policy = 'dynamic'
            cpus = [0, 7]
            [[iothread]]
            name = 'iot0'
            [[device]]
            name = 'nvme'
            vm = 'a'
            socket = '{0}/a'
            engine = {{ type = 'nvme', path = '{0}/nvme' }}
            [[device]]
            name = 'ssd'
            vm = 'a'
            socket = '{0}/b'
            engine = {{ type = 'ssd', size = '1M', ssd = 'none-such' }}
            [[nic]]
            name = 'net'
            vm = 'a'
            socket = '{0}/net.sock'
            tap = 'lo'",
            path.display()
        );
        let configuration = serve::parse("serve.toml", &text).unwrap();
        let found = lacking(&configuration);
        let is_root = rustix::process::geteuid().is_root();
        for (words, expected) in [
            ("iocores: CPU 7 is not online here (CPU 0 is)", true),
            ("control is there already, and is no socket", true),
            ("net.sock is there already, and is no socket", true),
            ("service: there is no user \"no-such-user\"", is_root),
            ("nvme is no NVMe namespace's character device", true),
            ("no reference device \"none-such\"", true),
            ("network device net: lo is no TAP", true),
        ] {
            assert_eq!(
                found.iter().any(|one| one.contains(words)),
                expected,
                "{words}: {found:#?}"
            );
        }
        assert_eq!(found.len(), if is_root { 7 } else { 6 }, "{found:#?}");
    }

    #[test]
    fn directory_whose_sockets_would_stay_is_named() {
        use std::os::unix::fs::PermissionsExt as _;

        let Ok(identity) = Identity::find("nobody", None) else {
            return rtvirtio_engine::testing::skipped("there is no user nobody");
        };
        let directory = tempfile::tempdir().unwrap();
        // Without this, others' tests decide by the process's umask.
        let mode = |mode: u32| {
            let permissions = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(directory.path(), permissions).unwrap();
        };
        mode(0o755);
        let found = keeps_sockets(directory.path(), &identity).unwrap();
        assert!(found.contains("user nobody may not remove the sockets in "), "{found}");
        mode(0o1777);
        assert_eq!(keeps_sockets(directory.path(), &identity), None);
    }

    /// A configuration of one disk whose image and sockets are there.
    fn of_image(directory: &Path, read_only: bool) -> Configuration {
        let text = format!(
            "version = 1
            [service]
            sandbox = false
            [[iothread]]
            name = 'iot0'
            [[device]]
            name = 'disk'
            vm = 'a'
            socket = '{0}/sockets/disk'
            read_only = {read_only}
            engine = {{ type = 'file', path = '{0}/image' }}",
            directory.display()
        );
        serve::parse("serve.toml", &text).unwrap()
    }

    fn lacking(configuration: &Configuration) -> Vec<String> {
        missing(configuration, &[CpuId::new(0)].into())
    }

    #[test]
    fn image_that_is_no_disk_is_named_with_what_to_do() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        std::fs::create_dir(path.join("sockets")).unwrap();
        let configuration = of_image(path, false);
        let image = std::fs::File::create(path.join("image")).unwrap();
        for (size, words) in
            [(0, "truncate --size=10G"), (100, "truncate --size=10G"), (513, "--size=%")]
        {
            image.set_len(size).unwrap();
            let found = lacking(&configuration);
            let [one] = &found[..] else { panic!("{size}: {found:#?}") };
            assert!(one.starts_with("device disk: ") && one.contains(words), "{one}");
        }
        image.set_len(1 << 20).unwrap();
        assert_eq!(lacking(&configuration), Vec::<String>::new());
        std::os::unix::fs::FileExt::write_at(&image, b"QFI\xfb\0\0\0\x03", 0).unwrap();
        let found = lacking(&configuration);
        assert!(found.len() == 1 && found[0].contains("only raw images"), "{found:#?}");
    }

    #[test]
    fn what_this_user_may_not_is_named() {
        use std::os::unix::fs::PermissionsExt as _;

        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let mode = |name: &str, mode: u32| {
            let permissions = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(path.join(name), permissions).unwrap();
        };
        std::fs::create_dir(path.join("sockets")).unwrap();
        std::fs::File::create(path.join("image")).unwrap().set_len(1 << 20).unwrap();
        mode("", 0o755);
        // As root, by a thread that looks at files as nobody does; else as who this is.
        let as_nobody = |read_only: bool| {
            let look = || {
                if rustix::process::geteuid().is_root() {
                    // The system call is of this thread alone, as the C library's function is not.
                    // SAFETY: takes integers.
                    let done =
                        unsafe { libc::syscall(libc::SYS_setresuid, 65_534, 65_534, 65_534) };
                    assert_eq!(done, 0);
                }
                lacking(&of_image(path, read_only))
            };
            std::thread::scope(|scope| scope.spawn(look).join().unwrap())
        };
        mode("sockets", 0o777);
        mode("image", 0o666);
        assert_eq!(as_nobody(false), Vec::<String>::new());
        mode("image", 0o444);
        assert_eq!(as_nobody(true), Vec::<String>::new());
        let found = as_nobody(false);
        assert!(
            found.len() == 1 && found[0].contains("may not read and write its image"),
            "{found:#?}"
        );
        mode("image", 0o000);
        let found = as_nobody(true);
        assert!(found.len() == 1 && found[0].contains("may not read its image"), "{found:#?}");
        mode("image", 0o666);
        mode("sockets", 0o555);
        let found = as_nobody(false);
        assert!(found.len() == 1 && found[0].contains("may not make sockets in"), "{found:#?}");
    }
}
