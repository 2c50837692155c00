//! The house: which room may depend on which, held by the build.
//!
//! [`ROOMS`] is the table of docs/ARCHITECTURE.md. A test fails naming the
//! arrow that is not in it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use cargo_metadata::{DependencyKind, Metadata, MetadataCommand, Package};

/// A room: a crate of the workspace.
struct Room {
    /// Its crate's directory; the package is `rtvirtio-NAME`, or `rtvirtio` for the binary.
    name: &'static str,
    /// Rooms that it may use.
    may_use: &'static [&'static str],
    /// Whether it has no thread, file, clock or random source of its own.
    pure: bool,
}

const fn room(name: &'static str, may_use: &'static [&'static str], pure: bool) -> Room {
    Room { name, may_use, pure }
}

/// Every room, in order: a room's dev-dependencies are rooms above it.
const ROOMS: &[Room] = &[
    room("units", &[], true),
    room("spec", &["units"], true),
    room("cases", &["units", "spec"], true),
    room("model", &["units", "spec"], true),
    room("ssd", &["units"], true),
    room("iocores", &["units"], true),
    room("qos", &["units"], true),
    room("sim", &["units", "spec", "ssd", "qos", "iocores"], true),
    room("planner", &["units", "spec", "model", "qos"], true),
    room("py", &["units", "spec", "cases", "model", "planner", "ssd", "sim"], false),
    room("host", &["units", "spec"], false),
    room("completion", &["units"], false),
    room("preload", &["units", "completion"], false),
    room("engine", &["units", "ssd"], false),
    room("dataplane", &["units", "spec", "qos", "iocores", "completion", "engine"], false),
    room(
        "bench",
        &[
            "units",
            "spec",
            "cases",
            "model",
            "iocores",
            "qos",
            "sim",
            "planner",
            "host",
            "completion",
            "engine",
        ],
        false,
    ),
    room(
        "rtvirtio",
        &[
            "units",
            "spec",
            "cases",
            "model",
            "planner",
            "ssd",
            "iocores",
            "sim",
            "host",
            "engine",
            "completion",
            "preload",
            "dataplane",
            "bench",
        ],
        false,
    ),
];

/// External crates that a pure room may use: none of them has a thread, file,
/// clock or random source in the form that is used here. `roxmltree` reads libvirt's XML from a
/// string: no DTD, no external entities, no dependencies of its own. `hdrhistogram` without its features
/// only counts.
const PURE_CRATES: &[&str] = &[
    "hdrhistogram",
    "rand",
    "rand_distr",
    "rand_pcg",
    "roxmltree",
    "serde",
    "serde_json",
    "thiserror",
    "toml",
    "toml_parser",
];

/// Features with which `rand` brings a random source of its own.
const IMPURE_RAND_FEATURES: &[&str] = &["default", "os_rng", "std_rng", "sys_rng", "thread_rng"];

fn metadata() -> Metadata {
    // Without resolution: no network, no change to the lock file.
    MetadataCommand::new().no_deps().exec().expect("cargo metadata runs in the workspace")
}

/// The room of a package name; `None` for an external crate.
fn room_of(package: &str) -> Option<&str> {
    match package {
        "rtvirtio" => Some(package),
        _ => package.strip_prefix("rtvirtio-"),
    }
}

fn find(name: &str) -> Option<(usize, &'static Room)> {
    ROOMS.iter().enumerate().find(|(_, r)| r.name == name)
}

/// The packages of the workspace by room.
fn packages(metadata: &Metadata) -> BTreeMap<&str, &Package> {
    let packages = metadata.packages.iter();
    packages.filter_map(|p| Some((room_of(p.name.as_str())?, p))).collect()
}

/// What `package`, which is `room`, uses against the table.
fn forbidden(room: &Room, package: &Package) -> Vec<String> {
    let (above, _) = find(room.name).expect("the room is in the table");
    let mut forbidden = Vec::new();
    for dependency in &package.dependencies {
        let Some(used) = room_of(&dependency.name) else {
            continue;
        };
        let arrow = format!("{} -> {used}", room.name);
        match dependency.kind {
            DependencyKind::Development => {
                // A room's own name is a dev-dependency on itself with a feature: allowed.
                if used != room.name && find(used).is_none_or(|(place, _)| place >= above) {
                    forbidden.push(format!("{arrow} (dev: not above it in the table)"));
                }
            }
            _ => {
                if !room.may_use.contains(&used) {
                    forbidden.push(arrow);
                }
            }
        }
    }
    forbidden
}

#[test]
fn table_lists_every_crate_and_only_those() {
    let metadata = metadata();
    let found: BTreeSet<&str> = packages(&metadata).into_keys().collect();
    let listed: BTreeSet<&str> = ROOMS.iter().map(|r| r.name).collect();
    assert_eq!(found, listed, "a new room gets a row in this table and in docs/ARCHITECTURE.md");
    assert_eq!(metadata.packages.len(), ROOMS.len(), "a crate is named rtvirtio-ROOM");
}

#[test]
fn table_points_upward_or_the_house_has_a_circle() {
    for (place, room) in ROOMS.iter().enumerate() {
        for used in room.may_use {
            let (above, _) = find(used).expect("an arrow ends at a room");
            assert!(above < place, "{} -> {used} points down", room.name);
        }
    }
}

#[test]
fn arrows_between_rooms_are_those_of_the_table() {
    let metadata = metadata();
    let packages = packages(&metadata);
    let forbidden: Vec<String> = ROOMS
        .iter()
        .filter_map(|room| Some(forbidden(room, packages.get(room.name)?)))
        .flatten()
        .collect();
    assert!(forbidden.is_empty(), "forbidden arrows: {forbidden:#?}");
}

#[test]
fn pure_rooms_use_only_pure_crates() {
    let metadata = metadata();
    let packages = packages(&metadata);
    let mut impure = Vec::new();
    for room in ROOMS.iter().filter(|r| r.pure) {
        let normal = packages[room.name].dependencies.iter();
        for dependency in normal.filter(|d| d.kind != DependencyKind::Development) {
            let name = dependency.name.as_str();
            if room_of(name).is_some() {
                continue;
            }
            if !PURE_CRATES.contains(&name) {
                impure.push(format!("{} -> {name}", room.name));
            }
            let is_random = name == "rand"
                && (dependency.uses_default_features
                    || IMPURE_RAND_FEATURES
                        .iter()
                        .any(|f| dependency.features.iter().any(|used| used == f)));
            if is_random {
                impure.push(format!("{} -> rand with a random source", room.name));
            }
        }
    }
    assert!(impure.is_empty(), "not among the crates of pure rooms: {impure:#?}");
}

#[test]
fn pure_rooms_are_under_the_clippy_rules_for_pure_rooms() {
    let metadata = metadata();
    let root = metadata.workspace_root.as_std_path();
    let rules = std::fs::read(root.join("clippy-pure.toml")).expect("the rules are at the top");
    for room in ROOMS {
        let directory = root.join("crates").join(room.name);
        let own = std::fs::read(directory.join("clippy.toml")).ok();
        let under = own.as_deref() == Some(rules.as_slice());
        assert_eq!(under, room.pure, "{} and clippy-pure.toml", room.name);
    }
}

#[test]
fn architecture_document_names_every_room() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let text = std::fs::read_to_string(root.join("docs/ARCHITECTURE.md")).expect("it is there");
    for room in ROOMS {
        assert!(text.contains(&format!("| `{}` |", room.name)), "no row for {}", room.name);
    }
}
