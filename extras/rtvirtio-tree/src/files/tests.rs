use super::super::view::Views;
use super::super::view::tests::{nic, text};
use super::*;

/// Every file and directory, with its path.
fn all(view: &View) -> Vec<(String, Node)> {
    let mut found = vec![(String::new(), Node::ROOT)];
    let mut next = 0;
    while let Some((path, node)) = found.get(next).cloned() {
        next += 1;
        if node.is_directory() {
            let of = |(name, node): (String, Node)| {
                (if path.is_empty() { name } else { format!("{path}/{name}") }, node)
            };
            found.extend(node.place.entries(view).into_iter().map(of));
        }
    }
    found
}

fn view() -> std::sync::Arc<View> {
    let devices: &[(&str, &[&str])] = &[("x", &["a", "b", "a"]), ("y", &["b"])];
    let text = text(&["a", "b", "c"], devices);
    let mut all: serde_json::Value = serde_json::from_str(&text).unwrap();
    all["nics"] = [nic("n", "b")].into_iter().collect();
    Views::new().take(all.to_string())
}

fn read(view: &View, path: &str) -> String {
    let mut node = Node::ROOT;
    for name in path.split('/') {
        node = node.place.child(name).unwrap_or_else(|| panic!("no {name} in {path}"));
    }
    node.content(view).unwrap_or_else(|| panic!("{path} is not read")).into_owned()
}

#[test]
fn every_path_leads_to_its_node_and_back() {
    let view = view();
    let all = all(&view);
    // Root; 4 files and 3 directories; 3 files and 3 workers of 11; 2 disks of 8 and a nic of 9; 4 queues of 15
    // and 2 of 13.
    assert_eq!(all.len(), 1 + 7 + 3 + 3 * 12 + 2 * 9 + 10 + 4 * 16 + 2 * 14);
    let mut inodes: Vec<u64> = all.iter().map(|(_, node)| node.inode()).collect();
    for (path, node) in &all {
        assert_eq!(node.to_string(), *path);
        assert_eq!(Node::of_inode(node.inode()), Some(*node), "{path}");
        assert!(node.is_in(&view));
        if let Some((_, name)) = path.rsplit_once('/') {
            assert_eq!(node.parent().place.child(name), Some(*node), "{path}");
        }
    }
    inodes.sort_unstable();
    inodes.dedup();
    assert_eq!(inodes.len(), all.len());
}

#[test]
fn inode_of_nothing_is_no_node() {
    for inode in [0, 2, 1 << KIND | 9, 8 << KIND, 2 << KIND | 1 << NUMBER, u64::MAX] {
        assert_eq!(Node::of_inode(inode), None, "{inode:x}");
    }
}

#[test]
fn name_that_is_not_as_the_tree_writes_it_is_no_child() {
    for (place, name) in [
        (Place::Workers, "w.01"),
        (Place::Workers, "w.+1"),
        (Place::Workers, "w."),
        (Place::Workers, "w.4294967296"),
        (Place::Workers, "d.0"),
        (Place::Queues, "vq.0"),
        (Place::Queues, "vq.0.65536"),
        (Place::Root, ""),
        (Place::Root, "workers"),
        (Place::Worker(0), "w.0"),
    ] {
        assert_eq!(place.child(name), None, "{name}");
    }
}

#[test]
fn rights_are_those_of_what_can_be_done() {
    let mode = |path: &str| {
        let found = all(&view()).into_iter().find(|(p, _)| p == path).unwrap();
        found.1.mode()
    };
    assert_eq!(mode("worker/w.0"), 0o755);
    for path in ["epoch", "error", "snapshot", "worker/w.0/pid", "vq/vq.0.0/handled_bytes"] {
        assert_eq!(mode(path), 0o444, "{path}");
    }
    for path in ["worker/create", "worker/remove"] {
        assert_eq!(mode(path), 0o200, "{path}");
    }
    for path in ["worker/default", "worker/w.0/cpu", "worker/w.0/locked", "dev/d.0/worker"] {
        assert_eq!(mode(path), 0o644, "{path}");
    }
    assert_eq!(mode("vq/vq.1.0/worker"), 0o644);
}

#[test]
fn files_show_what_the_snapshot_has() {
    let view = view();
    for (path, content) in [
        ("cycles", "3000\n"),
        ("epoch", "1\n"),
        ("worker/default", "none\n"),
        ("worker/w.0/cpu", "0-1,3\n"),
        ("worker/w.0/cpu_ns", "250\n"),
        ("worker/w.0/cycles", "200\n"),
        ("worker/w.0/dev_list", "d.0\n"),
        ("worker/w.1/dev_list", "d.0\nd.1\nd.2\n"),
        ("worker/w.1/vq_list", "vq.0.1\nvq.1.0\nvq.2.0\nvq.2.1\n"),
        ("worker/w.2/dev_list", ""),
        ("worker/w.0/lock_ns", "10\n"),
        ("worker/w.0/locked", "1\n"),
        ("worker/w.2/name", "c\n"),
        ("worker/w.0/pid", "71\n"),
        ("worker/w.0/total_work_cycles", "100\n"),
        ("worker/w.0/vq_list", "vq.0.0\nvq.0.2\n"),
        ("worker/w.0/wait", "300\n"),
        ("dev/d.0/capacity", "1048576\n"),
        ("dev/d.0/connected", "1\n"),
        ("dev/d.1/name", "y\n"),
        ("dev/d.0/owner", "plc\n"),
        ("dev/d.0/read_only", "0\n"),
        ("dev/d.0/vq_list", "vq.0.0\nvq.0.1\nvq.0.2\n"),
        ("dev/d.0/worker", "w.0\nw.1\n"),
        ("dev/d.1/worker", "w.1\n"),
        ("vq/vq.0.1/calls", "7\n"),
        ("vq/vq.0.1/can_poll", "1\n"),
        ("vq/vq.1.0/dev", "d.1\n"),
        ("vq/vq.0.1/errors", "5\n"),
        ("vq/vq.0.1/handled_bytes", "4608\n"),
        ("vq/vq.0.1/in_flight", "3\n"),
        ("vq/vq.0.1/notif_works", "6\n"),
        ("vq/vq.0.1/read_bytes", "4096\n"),
        ("vq/vq.0.1/requests", "40\n"),
        ("vq/vq.0.1/state", "running\n"),
        ("vq/vq.0.1/worker", "w.1\n"),
        ("vq/vq.0.1/written_bytes", "512\n"),
        ("vq/vq.0.1/notif_bytes", "4608\n"),
        ("vq/vq.0.1/notif_wait", "1\n"),
        ("dev/d.0/kind", "disk\n"),
        ("dev/d.2/kind", "nic\n"),
        ("dev/d.2/name", "n\n"),
        ("dev/d.2/owner", "plc\n"),
        ("dev/d.2/connected", "0\n"),
        ("dev/d.2/link", "tap0\n"),
        ("dev/d.2/mac", "52:54:00:00:00:01\n"),
        ("dev/d.2/mtu", "1500\n"),
        ("dev/d.2/vq_list", "vq.2.0\nvq.2.1\n"),
        ("dev/d.2/worker", "w.1\n"),
        ("vq/vq.2.0/direction", "receive\n"),
        ("vq/vq.2.1/direction", "transmit\n"),
        ("vq/vq.2.1/worker", "w.1\n"),
        ("vq/vq.2.1/dev", "d.2\n"),
        ("vq/vq.2.1/frames", "90\n"),
        ("vq/vq.2.1/handled_bytes", "9000\n"),
        ("vq/vq.2.1/notif_bytes", "9000\n"),
        ("vq/vq.2.1/notif_cycles", "70\n"),
        ("vq/vq.2.1/notif_wait", "300\n"),
        ("vq/vq.2.1/notif_works", "8\n"),
        ("vq/vq.2.1/calls", "9\n"),
        ("vq/vq.2.1/can_poll", "1\n"),
        ("vq/vq.2.1/dropped", "5\n"),
    ] {
        assert_eq!(read(&view, path), content, "{path}");
    }
    assert_eq!(read(&view, "snapshot"), view.text);
    let drops = read(&view, "vq/vq.2.0/drops");
    assert!(drops.contains("no_buffers 4\n") && drops.lines().count() == 9, "{drops}");
    // What the other kind has is not there.
    for path in ["dev/d.2/capacity", "dev/d.0/mac", "vq/vq.2.0/errors", "vq/vq.0.0/frames"] {
        let names: Vec<&str> = path.split('/').collect();
        let node = names.iter().fold(Node::ROOT, |node, name| node.place.child(name).unwrap());
        assert!(!node.is_in(&view) && node.content(&view).is_none(), "{path}");
    }
}

/// The attributes of IOcm's tree, by directory.
const IOCM: &[(Place, &[&str])] = &[
    (Place::Root, &["cycles", "epoch"]),
    (Place::Workers, &["create", "default", "remove"]),
    (
        Place::Worker(0),
        &[
            "cpu",
            "cycles",
            "dev_list",
            "empty_polls",
            "empty_works",
            "locked",
            "loops",
            "mm_switches",
            "noqueue_works",
            "pending_works",
            "pid",
            "stuck_works",
            "total_work_cycles",
            "wait",
        ],
    ),
    (Place::Device(0), &["delay_per_kbyte", "delay_per_work", "owner", "vq_list", "worker"]),
    (
        Place::Queue(0, 0),
        &[
            "can_poll",
            "dev",
            "handled_bytes",
            "max_processed_data_limit",
            "max_stuck_cycles",
            "max_stuck_pending_items",
            "min_processed_data_limit",
            "notif_bytes",
            "notif_cycles",
            "notif_limited",
            "notif_wait",
            "notif_works",
            "poll",
            "ring_full",
            "stuck_cycles",
            "stuck_times",
        ],
    ),
];

#[test]
fn documentation_names_every_file_and_what_is_left_out_of_iocms() {
    let text = include_str!("../../../../docs/tree.md");
    let (files, left_out) = text.split_once("Left out").unwrap();
    for (place, attributes) in IOCM {
        for file in place.files() {
            let name = file.name;
            let named = |prefix: &str| files.contains(&format!("{prefix}{name}`"));
            assert!(["`", "worker/", "w.N/", "d.N/", "vq.D.Q/"].into_iter().any(named), "{name}");
        }
        for name in *attributes {
            let is_named = left_out.contains(&format!("`{name}`"));
            assert!(is_named || place.child(name).is_some(), "{place:?} {name}");
        }
    }
}
