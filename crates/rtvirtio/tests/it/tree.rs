//! `rtvirtio-tree`: a data plane's tree under scripts, hostile writers and kill −9.

mod mounted;

use std::fs::{self, File};
use std::io::{ErrorKind, Read as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::Signal;
use serde_json::Value;

use crate::scratch_disk::{built, eventually, lab, output, said};
use mounted::{
    DataPlane, ENOUGH, Mount, NOBODY, User, can_mount, has_stopped, is_mounted, kill, say,
};

/// IOcm's attributes that the tree has, all of them numbers.
const NUMBERS: &[&str] = &[
    "epoch",
    "cycles",
    "worker/w.0/cycles",
    "worker/w.0/total_work_cycles",
    "worker/w.0/wait",
    "worker/w.0/pid",
    "worker/w.0/locked",
    "vq/vq.0.0/notif_works",
    "vq/vq.0.0/handled_bytes",
    "vq/vq.0.0/can_poll",
];

/// What the list of attributes lets a script do, while a client writes and finds again what it wrote.
#[test]
fn script_written_for_the_attributes_moves_a_device_under_verified_io() {
    let test = "script_written_for_the_attributes_moves_a_device_under_verified_io";
    let Some(_alone) = can_mount(test) else { return };
    let data_plane = DataPlane::start();
    let tree = Mount::start(&data_plane);

    assert_eq!(tree.list(""), ["cycles", "dev", "epoch", "error", "snapshot", "vq", "worker"]);
    assert_eq!(tree.list("worker"), ["create", "default", "remove", "w.0", "w.1"]);
    assert_eq!(tree.list("dev"), ["d.0"]);
    assert_eq!(tree.list("vq"), ["vq.0.0", "vq.0.1"]);
    for file in NUMBERS {
        let text = tree.read(file);
        text.trim().parse::<u64>().unwrap_or_else(|e| panic!("{file}: {text:?}: {e}"));
    }
    assert_eq!(tree.read("worker/w.1/name"), "iot1\n");
    assert_eq!(tree.read("dev/d.0/owner"), "plc\n");
    assert_eq!(tree.read("dev/d.0/vq_list"), "vq.0.0\nvq.0.1\n");
    assert_eq!(tree.read("vq/vq.0.1/dev"), "d.0\n");

    // The client.
    let socket = data_plane.path("root.sock");
    let mut command = Command::new(lab());
    command.args(["bench", "dataplane", "verify", "--seconds", "3", "--mebibytes", "8"]);
    command.args(["--queues", "2", "--socket"]).arg(socket).stdout(Stdio::piped());
    let mut client = command.spawn().unwrap();
    eventually("I/O", ENOUGH, || tree.read("vq/vq.0.0/handled_bytes") != "0\n");

    let (start, mut moves) = (Instant::now(), 0);
    while client.try_wait().unwrap().is_none() {
        assert!(start.elapsed() < ENOUGH, "the client does not end");
        for worker in ["w.1", "w.0"] {
            tree.write(worker, "dev/d.0/worker");
            assert_eq!(tree.read("dev/d.0/worker"), format!("{worker}\n"));
            let lists = ["worker/w.0/dev_list", "worker/w.1/dev_list"].map(|list| tree.read(list));
            let here = if worker == "w.0" { ["d.0\n", ""] } else { ["", "d.0\n"] };
            assert_eq!(lists, here);
            moves += 1;
        }
        tree.write("iot1", "vq/vq.0.1/worker");
        assert_eq!(tree.read("dev/d.0/worker"), "w.0\nw.1\n");
        assert_eq!(tree.read("worker/w.1/vq_list"), "vq.0.1\n");
        // To an IOThread that was not there before, and is not there after.
        tree.write("more cpus=0", "worker/create");
        let number = 2 + moves / 2 - 1;
        let new = format!("w.{number}");
        assert_eq!(tree.read(&format!("worker/{new}/name")), "more\n");
        assert_eq!(tree.read(&format!("worker/{new}/cpu")), "0\n");
        tree.write(&new, "dev/d.0/worker");
        let busy = tree.echo(&new, "worker/remove").unwrap_err();
        assert_eq!(Errno::from_io_error(&busy), Some(Errno::BUSY));
        tree.write("w.0", "dev/d.0/worker");
        tree.write(&new, "worker/remove");
        assert_eq!(tree.list("worker"), ["create", "default", "remove", "w.0", "w.1"]);
    }
    let output = client.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    say(&format!("{test}: {moves} times there and back under {report}"));
    assert!(moves > 2, "{moves} moves");
    let handled: u64 = tree.read("vq/vq.0.0/handled_bytes").trim().parse().unwrap();
    assert!(handled > 0);

    tree.write("0-1", "worker/w.1/cpu");
    tree.write("1", "worker/w.1/locked");
    let listed = data_plane.ctl(&["--json", "iothread", "list"]);
    let listed: Value = serde_json::from_str(&listed).unwrap();
    assert_eq!(listed[1]["cpus"], serde_json::json!([0, 1]));
    assert_eq!(listed[1]["locked"], true);
    tree.write("0", "worker/w.1/locked");
    tree.write("any", "worker/w.1/cpu");
    assert_eq!(tree.read("worker/w.1/locked") + &tree.read("worker/w.1/cpu"), "0\nany\n");

    // All at once.
    let before: u64 = tree.read("epoch").trim().parse().unwrap();
    let whole: Value = serde_json::from_str(&tree.read("snapshot")).unwrap();
    assert_eq!(whole["devices"][0]["name"], "root");
    assert_eq!(whole["iothreads"].as_array().unwrap().len(), 2);
    eventually("a later epoch", ENOUGH, || {
        tree.read("epoch").trim().parse::<u64>().unwrap() > before
    });
}

#[test]
fn device_that_comes_later_goes_to_the_default_worker() {
    let Some(_alone) = can_mount("device_that_comes_later_goes_to_the_default_worker") else {
        return;
    };
    let data_plane = DataPlane::start();
    let tree = Mount::start(&data_plane);
    let add = |name: &str| {
        let socket = data_plane.path(&format!("{name}.sock"));
        let arguments = ["device", "add", name, "--vm", "vm", "--queues", "4", "--ram", "--size"];
        let listen = ["1M", "--listen", socket.to_str().unwrap()];
        data_plane.ctl(&[&arguments[..], &listen].concat());
    };
    assert_eq!(tree.read("worker/default"), "none\n");
    add("early");
    eventually("the device", ENOUGH, || tree.path("dev/d.1").exists());
    assert_eq!(tree.read("dev/d.1/worker"), "w.0\nw.1\n");
    tree.write("w.1", "worker/default");
    assert_eq!(tree.read("worker/default"), "w.1\n");
    add("late");
    eventually("the device", ENOUGH, || tree.path("dev/d.2").exists());
    eventually("a move", ENOUGH, || tree.read("dev/d.2/worker") == "w.1\n");
    assert_eq!(tree.read("dev/d.2/name"), "late\n");
    assert_eq!(tree.read("dev/d.1/worker"), "w.0\nw.1\n");
    tree.write("none", "worker/default");
    add("last");
    eventually("the device", ENOUGH, || tree.path("dev/d.3").exists());
    assert_eq!(tree.read("dev/d.3/worker"), "w.0\nw.1\n");
    assert_eq!(tree.why(), "");
}

#[test]
fn read_only_user_can_look_and_not_write() {
    let Some(_alone) = can_mount("read_only_user_can_look_and_not_write") else { return };
    let data_plane = DataPlane::start();
    let tree = Mount::start(&data_plane);
    let before = data_plane.settings();
    let user = |line: &str| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", NOBODY, "--regid", NOBODY, "--clear-groups", "sh", "-c", line]);
        command.current_dir(tree.path("")).output().unwrap()
    };
    let look =
        "cat snapshot >/dev/null && cat dev/d.0/owner worker/w.1/name && ls vq && cat */*/pid";
    let looked = user(look);
    assert!(looked.status.success(), "{}", said(&looked));
    assert!(said(&looked).contains("plc\niot1\nvq.0.0\nvq.0.1\n"), "{}", said(&looked));
    for line in [
        "echo w.1 >dev/d.0/worker",
        "echo w.1 >vq/vq.0.0/worker",
        "echo io2 >worker/create",
        "echo w.1 >worker/remove",
        "echo w.1 >worker/default",
        "echo 1 >worker/w.0/locked",
        "echo 0 >worker/w.0/cpu",
        "echo 1 >epoch",
        "cat worker/create",
        "chmod 666 worker/w.0/locked",
        "touch new",
        "rm epoch",
        "mkdir worker/w.7",
    ] {
        let output = user(&format!("LC_ALL=C; export LC_ALL; {line}"));
        assert!(!output.status.success(), "{line}: {}", said(&output));
        let refused = ["Permission denied", "not permitted"];
        assert!(refused.iter().any(|w| said(&output).contains(w)), "{line}: {}", said(&output));
    }
    assert_eq!(data_plane.settings(), before);
    assert_eq!(tree.why(), "");
}

#[test]
fn wrong_writes_change_nothing() {
    let Some(_alone) = can_mount("wrong_writes_change_nothing") else { return };
    let data_plane = DataPlane::start();
    let tree = Mount::start(&data_plane);
    let before = data_plane.settings();
    let long = "x".repeat(5000);
    for (text, file, errno, why) in [
        ("w.9", "dev/d.0/worker", Errno::NOENT, "there is no iothread \"w.9\""),
        ("nobody", "dev/d.0/worker", Errno::NOENT, "there is no iothread \"nobody\""),
        ("w.0 w.1", "dev/d.0/worker", Errno::INVAL, "one IOThread"),
        ("", "vq/vq.0.0/worker", Errno::INVAL, "one IOThread"),
        (&long, "dev/d.0/worker", Errno::INVAL, "at most 4096 bytes"),
        ("iot0", "worker/create", Errno::EXIST, "there is an iothread \"iot0\" already"),
        ("a/b", "worker/create", Errno::INVAL, "not allowed in a name"),
        ("new cpus=0-1023,5000", "worker/create", Errno::INVAL, "write CPUs"),
        ("new cpus=1023", "worker/create", Errno::INVAL, "cannot start iothread"),
        ("1023", "worker/w.0/cpu", Errno::INVAL, "cannot pin iothread"),
        ("one", "worker/w.0/cpu", Errno::INVAL, "write CPUs"),
        ("yes", "worker/w.0/locked", Errno::INVAL, "write 0 or 1"),
        ("w.0", "worker/remove", Errno::BUSY, "iothread \"iot0\" has 1 queues"),
        ("w.9", "worker/remove", Errno::NOENT, "there is no iothread \"w.9\""),
        ("w.9", "worker/default", Errno::NOENT, "there is no iothread \"w.9\""),
    ] {
        let error = tree.echo(text, file).unwrap_err();
        assert_eq!(Errno::from_io_error(&error), Some(errno), "{text:.20} >{file}: {}", tree.why());
        let said = tree.why();
        assert!(said.starts_with(&format!("{file}: ")) && said.contains(why), "{file}: {said}");
    }
    // What root's rights would allow.
    let last = tree.why();
    let failed = |result: std::io::Result<()>| Errno::from_io_error(&result.unwrap_err());
    for file in ["epoch", "error", "snapshot", "worker/w.0/pid", "vq/vq.0.0/can_poll"] {
        assert_eq!(failed(tree.echo("1", file)), Some(Errno::ACCESS), "{file}");
    }
    assert_eq!(failed(File::open(tree.path("worker/create")).map(drop)), Some(Errno::ACCESS));
    assert_eq!(failed(tree.echo("1", "worker/w.9/locked")), Some(Errno::NOENT));
    assert_eq!(failed(tree.echo("1", "new")), Some(Errno::PERM));
    assert_eq!(failed(fs::create_dir(tree.path("worker/w.9"))), Some(Errno::PERM));
    assert_eq!(failed(fs::remove_file(tree.path("epoch"))), Some(Errno::PERM));
    assert_eq!(failed(fs::remove_dir(tree.path("worker/w.0"))), Some(Errno::PERM));
    assert_eq!(failed(fs::rename(tree.path("epoch"), tree.path("x"))), Some(Errno::PERM));
    let mode = fs::Permissions::from_mode(0o666);
    assert_eq!(failed(fs::set_permissions(tree.path("epoch"), mode)), Some(Errno::PERM));
    assert_eq!(failed(fs::metadata(tree.path("dev/d.00")).map(drop)), Some(Errno::NOENT));
    assert_eq!(tree.why(), last);
    let mode = |file: &str| {
        let found = fs::metadata(tree.path(file)).unwrap();
        (found.permissions().mode() & 0o7777, found.uid())
    };
    assert_eq!(mode("worker"), (0o755, 0));
    assert_eq!(mode("dev/d.0/worker"), (0o644, 0));
    assert_eq!(mode("epoch"), (0o444, 0));
    assert_eq!(mode("worker/create"), (0o200, 0));
    assert_eq!(data_plane.settings(), before);
}

/// Who is killed.
#[derive(Debug, Clone, Copy)]
enum Victim {
    DataPlane,
    Server,
    Parent,
}

#[test]
fn mount_goes_with_each_of_its_processes() {
    let test = "mount_goes_with_each_of_its_processes";
    let Some(_alone) = can_mount(test) else { return };
    for user in [User::Root, User::Nobody] {
        if !user.can_mount(test) {
            continue;
        }
        for victim in [Victim::DataPlane, Victim::Server, Victim::Parent] {
            let data_plane = DataPlane::start();
            let mut tree = Mount::start_as(user, &data_plane);
            // Somebody is in it and has a file open; root may not look into a user's.
            let mut open = (user == User::Root).then(|| File::open(tree.path("snapshot")).unwrap());
            let mut inside = user.command();
            inside.args(["sh", "-c", "cd \"$0\" && echo && exec sleep 60"]).arg(tree.path("dev"));
            let mut inside = inside.stdout(Stdio::piped()).spawn().unwrap();
            inside.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
            let (pid, code) = match victim {
                Victim::DataPlane => (data_plane.pid(), Some(1)),
                Victim::Server => (tree.server, Some(1)),
                Victim::Parent => (tree.child.id(), None),
            };
            kill(pid, Signal::KILL);
            let (time, status) = tree.ends();
            say(&format!("{test}: {victim:?} of {user:?} killed, unmounted in {time:?}"));
            assert_eq!(status.code(), code, "{victim:?}: {}", tree.said());
            if let Some(open) = &mut open {
                let error = open.read(&mut [0; 16]).unwrap_err();
                // The latter where the server's last thread is still about to go.
                let gone = [ErrorKind::NotConnected, ErrorKind::ConnectionAborted];
                assert!(gone.contains(&error.kind()), "{victim:?}: {error}");
            }
            inside.kill().unwrap();
            inside.wait().unwrap();
            assert_eq!(fs::read_dir(tree.path("")).unwrap().count(), 0);
            let why = match victim {
                Victim::DataPlane => "error: the data plane has ",
                Victim::Server => "error: the tree's server has ended: signal: 9",
                Victim::Parent => "",
            };
            assert!(tree.said().starts_with(why), "{victim:?}: {}", tree.said());
        }
    }
}

#[test]
fn signal_unmounts_and_a_tree_can_be_mounted_again() {
    let Some(_alone) = can_mount("signal_unmounts_and_a_tree_can_be_mounted_again") else { return };
    let data_plane = DataPlane::start();
    for signal in [Signal::INT, Signal::TERM] {
        let mut tree = Mount::start(&data_plane);
        let _busy = File::open(tree.path("epoch")).unwrap();
        kill(tree.child.id(), signal);
        let (_, status) = tree.ends();
        assert_eq!(status.code(), Some(130), "{}", tree.said());
        assert_eq!(tree.said(), "interrupted\n");
    }
    // Somebody else's unmount is an end like any other.
    let mut tree = Mount::start(&data_plane);
    let status = Command::new("umount").arg(tree.path("")).status().unwrap();
    assert!(status.success());
    assert_eq!(tree.ends().1.code(), Some(0), "{}", tree.said());
}

#[test]
fn place_where_nothing_can_be_mounted_is_named_and_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    let (file, full) = (directory.path().join("file"), directory.path().join("full"));
    fs::write(&file, "kept").unwrap();
    fs::create_dir(&full).unwrap();
    fs::write(full.join("kept"), "").unwrap();
    let empty = directory.path().join("empty");
    fs::create_dir(&empty).unwrap();
    let tree = |at: &Path| {
        let arguments = ["--socket", "/nonexistent/s", at.to_str().unwrap()];
        let output = output(&built("rtvirtio-tree"), Path::new("/nonexistent"), &arguments);
        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
        said(&output)
    };
    for (at, word) in [
        (file.as_path(), "is not a directory"),
        (&full, "is not empty"),
        (&directory.path().join("none"), "name a directory"),
        (Path::new("/proc"), "something is mounted on /proc already"),
    ] {
        assert!(tree(at).contains(word), "{}", tree(at));
    }
    if File::options().read(true).write(true).open("/dev/fuse").is_ok() {
        let said = tree(&empty);
        assert!(said.contains("cannot connect to the data plane at /nonexistent/s"), "{said}");
        assert!(said.contains("hint: start it: rtvirtio serve"), "{said}");
    } else {
        assert!(tree(&empty).contains("open /dev/fuse"), "{}", tree(&empty));
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), "kept");
    assert_eq!(fs::read_dir(&full).unwrap().count(), 1);
    assert!(!is_mounted(&empty));
}

#[test]
fn second_tree_stale_mount_and_absent_fuse_are_named() {
    let Some(_alone) = can_mount("second_tree_stale_mount_and_absent_fuse_are_named") else {
        return;
    };
    let data_plane = DataPlane::start();
    let mut tree = Mount::start(&data_plane);
    let control = data_plane.path("control");
    let at = tree.path("");
    let second = || {
        let mut command = Command::new(built("rtvirtio-tree"));
        let output = command.args(["--socket"]).arg(&control).arg(&at).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
        said(&output)
    };
    assert!(second().contains("already"), "{}", second());
    assert_eq!(tree.read("worker/w.0/name"), "iot0\n");

    // Killed together, as by the OOM killer: nobody is left to unmount.
    kill(tree.server, Signal::STOP);
    eventually("the server's stop", ENOUGH, || has_stopped(tree.server));
    kill(tree.child.id(), Signal::KILL);
    tree.child.wait().unwrap();
    kill(tree.server, Signal::KILL);
    let stale = || fs::read_dir(&at).is_err_and(|e| e.kind() == ErrorKind::NotConnected);
    eventually("a stale mount", ENOUGH, stale);
    std::thread::sleep(Duration::from_millis(200));
    assert!(second().contains("`umount -l "), "{}", second());
    assert!(Command::new("umount").arg("-l").arg(&at).status().unwrap().success());

    let hidden = "mount -t tmpfs none /dev && exec \"$@\"";
    let output = Command::new("unshare")
        .args(["--mount", "sh", "-c", hidden, "sh", &built("rtvirtio-tree"), "--socket"])
        .args([&control, &at])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("open /dev/fuse: the tree needs FUSE"), "{}", said(&output));
}
