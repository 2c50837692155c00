//! The workspace: which member may depend on which, held by the build.
//!
//! [`MEMBERS`] is the table of docs/ARCHITECTURE.md. A test fails naming the
//! arrow that is not in it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use cargo_metadata::{DependencyKind, Metadata, MetadataCommand, Package};

/// A member: a crate of the workspace.
struct Member {
    /// Its crate's directory; the package is `rtvirtio-NAME`, or `rtvirtio` for the binary.
    name: &'static str,
    /// Members that it may use.
    may_use: &'static [&'static str],
    /// Whether it has no thread, file, clock or random source of its own.
    pure: bool,
}

const fn member(name: &'static str, may_use: &'static [&'static str], pure: bool) -> Member {
    Member { name, may_use, pure }
}

/// Every member, in order: a member's dev-dependencies are members above it. `rtvirtio` is the last: its
/// tests are the system's and use all others.
const MEMBERS: &[Member] = &[
    // The product (crates/).
    member("units", &[], true),
    member("frames", &[], true),
    member("spec", &["units", "frames"], true),
    member("cases", &["units", "spec"], true),
    member("model", &["units", "spec"], true),
    member("ssd", &["units"], true),
    member("iocores", &["units"], true),
    member("qos", &["units"], true),
    member("planner", &["units", "spec", "model", "qos"], true),
    member("host", &["units", "spec"], false),
    member("observe", &["units", "spec", "host"], false),
    member("cli", &["units", "spec", "model", "planner", "host"], false),
    member("controller", &["units", "spec", "planner", "host", "observe", "cli"], false),
    member("calibrate", &["units", "spec", "cases", "model", "host", "observe", "cli"], false),
    member("completion", &["units"], false),
    member("virtq", &["units"], false),
    member("engine", &["units", "ssd", "virtq"], false),
    member("vhost", &["units", "virtq", "engine"], false),
    member(
        "dataplane",
        &["units", "frames", "spec", "qos", "iocores", "completion", "virtq", "engine", "vhost"],
        false,
    ),
    // Options that the daemon does not link (extras/).
    member("preload", &["units", "completion"], false),
    member("run", &["completion", "host", "cli", "preload"], false),
    member("tree", &["units", "spec", "host", "cli"], false),
    // The laboratory (lab/).
    member("sim", &["units", "spec", "ssd", "qos", "iocores"], true),
    member("py", &["units", "spec", "cases", "model", "planner", "ssd", "sim"], false),
    member(
        "testbed",
        &[
            "units",
            "spec",
            "cases",
            "iocores",
            "sim",
            "planner",
            "host",
            "completion",
            "engine",
            "calibrate",
        ],
        false,
    ),
    member(
        "bench",
        &[
            "units",
            "spec",
            "cases",
            "iocores",
            "qos",
            "sim",
            "planner",
            "host",
            "completion",
            "engine",
            "cli",
            "calibrate",
            "testbed",
        ],
        false,
    ),
    member(
        "lab",
        &[
            "units",
            "spec",
            "cases",
            "iocores",
            "host",
            "ssd",
            "sim",
            "cli",
            "calibrate",
            "testbed",
            "bench",
        ],
        false,
    ),
    // The product's binary.
    member(
        "rtvirtio",
        &[
            "units",
            "spec",
            "model",
            "planner",
            "host",
            "observe",
            "controller",
            "engine",
            "vhost",
            "dataplane",
            "cli",
            "calibrate",
        ],
        false,
    ),
];

/// External crates that a pure member may use: none of them has a thread, file,
/// clock or random source in the form that is used here. `roxmltree` reads libvirt's XML from a
/// string: no DTD, no external entities, no dependencies of its own. `hdrhistogram` without its features
/// only counts.
const PURE_CRATES: &[&str] = &[
    "schemars",
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

/// The member of a package name; `None` for an external crate.
fn member_of(package: &str) -> Option<&str> {
    match package {
        "rtvirtio" => Some(package),
        _ => package.strip_prefix("rtvirtio-"),
    }
}

fn find(name: &str) -> Option<(usize, &'static Member)> {
    MEMBERS.iter().enumerate().find(|(_, r)| r.name == name)
}

/// The packages of the workspace by member.
fn packages(metadata: &Metadata) -> BTreeMap<&str, &Package> {
    let packages = metadata.packages.iter();
    packages.filter_map(|p| Some((member_of(p.name.as_str())?, p))).collect()
}

/// What `package`, which is `member`, uses against the table.
fn forbidden(member: &Member, package: &Package) -> Vec<String> {
    let (above, _) = find(member.name).expect("the member is in the table");
    let mut forbidden = Vec::new();
    for dependency in &package.dependencies {
        let Some(used) = member_of(&dependency.name) else {
            continue;
        };
        let arrow = format!("{} -> {used}", member.name);
        match dependency.kind {
            DependencyKind::Development => {
                // A member's own name is a dev-dependency on itself with a feature: allowed.
                if used != member.name && find(used).is_none_or(|(place, _)| place >= above) {
                    forbidden.push(format!("{arrow} (dev: not above it in the table)"));
                }
            }
            _ => {
                if !member.may_use.contains(&used) {
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
    let listed: BTreeSet<&str> = MEMBERS.iter().map(|r| r.name).collect();
    assert_eq!(found, listed, "a new member gets a row in this table and in docs/ARCHITECTURE.md");
    assert_eq!(metadata.packages.len(), MEMBERS.len(), "a crate is named rtvirtio-MEMBER");
}

#[test]
fn table_points_upward_or_the_workspace_has_a_circle() {
    for (place, member) in MEMBERS.iter().enumerate() {
        for used in member.may_use {
            let (above, _) = find(used).expect("an arrow ends at a member");
            assert!(above < place, "{} -> {used} points down", member.name);
        }
    }
}

#[test]
fn arrows_between_members_are_those_of_the_table() {
    let metadata = metadata();
    let packages = packages(&metadata);
    let forbidden: Vec<String> = MEMBERS
        .iter()
        .filter_map(|member| Some(forbidden(member, packages.get(member.name)?)))
        .flatten()
        .collect();
    assert!(forbidden.is_empty(), "forbidden arrows: {forbidden:#?}");
}

/// The product runs as root beside an operator's VMs: what it is measured with, and options that few need, are not
/// linked into it.
#[test]
fn product_never_reaches_the_laboratory_or_the_options() {
    let metadata = metadata();
    let root = metadata.workspace_root.as_std_path();
    let in_product =
        |package: &Package| package.manifest_path.as_std_path().starts_with(root.join("crates"));
    let packages = packages(&metadata);
    let mut reached = Vec::new();
    for package in packages.values().filter(|package| in_product(package)) {
        let normal = package.dependencies.iter();
        for dependency in normal.filter(|d| d.kind != DependencyKind::Development) {
            let used = member_of(&dependency.name).and_then(|name| packages.get(name));
            if used.is_some_and(|used| !in_product(used)) {
                reached.push(format!("{} -> {}", package.name, dependency.name));
            }
        }
    }
    assert!(reached.is_empty(), "over the wall: {reached:#?}");
}

/// What the laboratory needs of others' crates stays out of the operator's binary, by whatever way.
#[test]
fn binary_of_the_operator_links_no_fuse_libblkio_or_report() {
    let tree = std::process::Command::new(env!("CARGO"))
        .args(["tree", "--package", "rtvirtio", "--edges", "normal", "--prefix", "none"])
        .args(["--offline", "--locked", "--manifest-path"])
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml"))
        .output()
        .expect("cargo tree runs");
    assert!(tree.status.success(), "{}", String::from_utf8_lossy(&tree.stderr));
    let tree = String::from_utf8(tree.stdout).expect("names are text");
    let linked: BTreeSet<&str> =
        tree.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert!(linked.contains("rtvirtio-dataplane"), "{tree}");
    for foreign in [
        "blkio",
        "virtio-driver",
        "fuser",
        "maud",
        "rtvirtio-bench",
        "rtvirtio-testbed",
        "rtvirtio-sim",
    ] {
        assert!(!linked.contains(foreign), "{foreign} is linked");
    }
}

#[test]
fn pure_members_use_only_pure_crates() {
    let metadata = metadata();
    let packages = packages(&metadata);
    let mut impure = Vec::new();
    for member in MEMBERS.iter().filter(|r| r.pure) {
        let normal = packages[member.name].dependencies.iter();
        for dependency in normal.filter(|d| d.kind != DependencyKind::Development) {
            let name = dependency.name.as_str();
            if member_of(name).is_some() {
                continue;
            }
            if !PURE_CRATES.contains(&name) {
                impure.push(format!("{} -> {name}", member.name));
            }
            let is_random = name == "rand"
                && (dependency.uses_default_features
                    || IMPURE_RAND_FEATURES
                        .iter()
                        .any(|f| dependency.features.iter().any(|used| used == f)));
            if is_random {
                impure.push(format!("{} -> rand with a random source", member.name));
            }
        }
    }
    assert!(impure.is_empty(), "not among the crates of pure members: {impure:#?}");
}

#[test]
fn pure_members_are_under_the_clippy_rules_for_pure_members() {
    let metadata = metadata();
    let packages = packages(&metadata);
    let root = metadata.workspace_root.as_std_path();
    let rules = std::fs::read(root.join("clippy-pure.toml")).expect("the rules are at the top");
    for member in MEMBERS {
        let manifest = packages[member.name].manifest_path.as_std_path();
        let directory = manifest.parent().expect("a manifest is in a directory");
        let own = std::fs::read(directory.join("clippy.toml")).ok();
        let under = own.as_deref() == Some(rules.as_slice());
        assert_eq!(under, member.pure, "{} and clippy-pure.toml", member.name);
    }
}

#[test]
fn architecture_document_names_every_member() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let text = std::fs::read_to_string(root.join("docs/ARCHITECTURE.md")).expect("it is there");
    for member in MEMBERS {
        assert!(text.contains(&format!("| `{}` |", member.name)), "no row for {}", member.name);
    }
}

/// A walk that names a function where there is none sends a newcomer astray.
#[test]
fn functions_of_the_walks_are_where_the_architecture_document_says() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let text = std::fs::read_to_string(root.join("docs/ARCHITECTURE.md")).expect("it is there");
    let walks = text.split_once("## Three walks").expect("the walks are there").1;
    let mut steps = 0;
    for line in walks.lines() {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, number, function, file, _, _] = cells[..] else { continue };
        if number.parse::<u32>().is_err() {
            continue;
        }
        let (function, file) = (function.trim_matches('`'), file.trim_matches('`'));
        let path = match file.starts_with("crates/") {
            true => root.join(file),
            false => root.join("crates/dataplane/src").join(file),
        };
        let source = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{line}: {e}"));
        let named = ["(", "<"].map(|next| format!("fn {function}{next}"));
        assert!(named.iter().any(|name| source.contains(name)), "{function} is not in {file}");
        steps += 1;
    }
    assert!(steps > 40, "{steps} steps were read");
    assert!(text.split_whitespace().count() <= 1_800, "a page that is read whole");
}

/// A page that is not in the book's table of contents is one that nobody finds.
#[test]
fn book_has_every_page() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let summary = std::fs::read_to_string(docs.join("SUMMARY.md")).expect("it is there");
    for directory in ["", "adr"] {
        for entry in std::fs::read_dir(docs.join(directory)).expect("it is there") {
            let path = entry.expect("it can be read").path();
            let page = path.strip_prefix(&docs).expect("it is in docs").display().to_string();
            let is_page =
                page.ends_with(".md") && page != "SUMMARY.md" && page != "adr/template.md";
            assert!(
                !is_page || summary.contains(&format!("({page})")),
                "{page} is not in SUMMARY.md"
            );
        }
    }
}
