//! The process that answers the kernel: it mounts the tree, and takes the mount away when its parent or
//! the data plane has gone.
//!
//! Its standard input is a pipe of which its parent has the other end, so that it ends with the parent.
//! On standard output it says [`READY`] once the tree is there, and at the end why that is.

use std::io::{self, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use anyhow::{Context, Result};
use fuser::{Config, MountOption, Session, SessionACL};
use rtvirtio_host::dataplane::{ControlClient, Events};
use rtvirtio_spec::control::Event;

use super::keeper;
use super::mount::{Mounted, Tree};

/// The mount's source, as in /proc/mounts.
pub(super) const SOURCE: &str = "rtvirtio-tree";
/// The tree is there.
pub(super) const READY: &str = "ready";
/// Somebody has unmounted it.
pub(super) const UNMOUNTED: &str = "unmounted";
/// Requests of the kernel at a time: a write that waits for the disk does not keep all from reading.
const THREADS: usize = 4;

/// Held by whoever ends the process.
static END: Mutex<()> = Mutex::new(());

/// Serves until the data plane, the parent or the mount has gone. Says on standard output what went
/// wrong.
pub(crate) fn serve(socket: &Path, directory: &Path) {
    if let Err(error) = start(socket, directory) {
        say(&format!("{error:#}"));
    }
}

fn start(socket: &Path, directory: &Path) -> Result<()> {
    let client = ControlClient::new(socket);
    let events = client.events()?;
    let tree = Arc::new(Tree::new(client));
    let session = Session::new(Mounted(Arc::clone(&tree)), directory, &config())
        .with_context(|| format!("mount on {}", directory.display()))
        .context("it needs root, or fusermount3 (package fuse3) and a directory of this user's")?;
    let watched = directory.to_owned();
    thread::Builder::new().name("parent".to_owned()).spawn(move || {
        let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
        end(&watched, "");
    })?;
    let again = Arc::clone(&tree);
    thread::Builder::new().name("again".to_owned()).spawn(move || {
        again.keep_adopting();
    })?;
    let watched = directory.to_owned();
    thread::Builder::new().name("events".to_owned()).spawn(move || {
        let why = follow(events, &tree);
        end(&watched, &why);
    })?;
    say(READY);
    let result = session.run();
    // If that is since another thread has unmounted it, that thread ends the process.
    let _only = END.lock().unwrap_or_else(PoisonError::into_inner);
    result.context("answer the kernel")?;
    say(UNMOUNTED);
    Ok(())
}

fn config() -> Config {
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::FSName(SOURCE.to_owned()),
        MountOption::DefaultPermissions,
        MountOption::NoSuid,
        MountOption::NoDev,
        MountOption::NoExec,
        MountOption::NoAtime,
    ];
    // Others may look at root's; a user's is the user's, as fusermount has it.
    let is_root = rustix::process::geteuid().is_root();
    config.acl = if is_root { SessionACL::All } else { SessionACL::Owner };
    config.n_threads = Some(THREADS);
    config
}

/// Reads events for as long as there is a data plane; why there is none.
fn follow(events: Events, tree: &Tree) -> String {
    for event in events {
        match event {
            Ok(Event::DeviceAdded { .. } | Event::EventsLost { .. }) => tree.adopt(false),
            Ok(Event::DeviceRemoved { device }) => tree.gone(&device),
            Ok(_) => {}
            Err(fault) => return format!("the data plane has gone: {fault}"),
        }
    }
    "the data plane has ended".to_owned()
}

/// Takes the mount away, and ends the process.
fn end(directory: &Path, why: &str) -> ! {
    let _only = END.lock().unwrap_or_else(PoisonError::into_inner);
    keeper::detach(directory);
    say(why);
    std::process::exit(0)
}

/// To the parent, if it is there.
fn say(word: &str) {
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "{word}").and_then(|()| out.flush());
}
