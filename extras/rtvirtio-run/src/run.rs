//! A program with the preload library in it.
//!
//! The program takes this process's place, so its exit code, signals, descriptors and parent are what they would be
//! without. What the library is to do goes with the environment, to the program's children too.

use std::ffi::OsString;
use std::io::{self, ErrorKind, Read as _};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use rtvirtio_cli::{Outcome, Program};
use rtvirtio_completion::slots::Offer;
use rtvirtio_completion::{Costs, Mode};
use rtvirtio_host::interrupt::Interrupted;

/// The library's file name, as cargo builds it.
const LIBRARY: &str = "librtvirtio_preload.so";
/// What ld.so(8) separates the names of libraries by.
const SEPARATORS: &[u8] = b": ";
/// How long a data plane may take to answer.
const ANSWER: Duration = Duration::from_secs(5);
/// Of env(1): the program was found and cannot be run; it was not found.
const CANNOT_RUN: u8 = 126;
const NOT_FOUND: u8 = 127;

/// Runs a program whose direct I/O waits for its device by polling, while CPUs are idle
#[derive(Parser)]
#[command(
    version,
    after_help = "\
What is shorter: pread, pwrite and their vectored forms on files and block devices
that the program opened with O_DIRECT. The thread looks for the completion itself
while a CPU is idle, instead of sleeping until it is woken up. All else, and all
of a program that does no direct I/O, is as without.

  rtvirtio-run -- fio --ioengine=psync --direct=1 --rw=randread --size=64M --name=a
  rtvirtio-run --stats -- db_bench --use_direct_reads ...

With --slots, calls on the disk that a data plane on this host serves (its
configuration names the socket: [[device]] slots = \"...\") are left to the data plane,
which polls for all such programs at once; see docs/run.md.

  rtvirtio-run --slots /run/rtvirtio/db.slots -- db_bench --use_direct_reads ...

A program that is linked statically, or is set-user-ID, does not load the library.
docs/run.md says what else goes by, and what the statistics mean.

Exit codes: the program's; 127 if it is not found, 126 if it cannot be run; 1 if
there is something wrong before it is tried."
)]
pub(crate) struct Args {
    /// How threads wait: interrupt (as without), poll (look until it is there), adaptive (look while
    /// a CPU is idle and that pays)
    #[arg(long, default_value_t = Mode::Adaptive, value_name = "MODE")]
    mode: Mode,
    /// At its end each process says on standard error what its calls took
    #[arg(long)]
    stats: bool,
    /// With --stats: as a line of JSON
    #[arg(long, requires = "stats")]
    json: bool,
    /// Socket of a data plane on this host (`rtvirtio serve`): direct I/O on its disk goes by slots that it
    /// polls
    #[arg(long, value_name = "SOCKET")]
    slots: Option<PathBuf>,
    /// The program and its arguments
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "PROGRAM"
    )]
    program: Vec<OsString>,
}

impl Program for Args {
    fn cleans_up(&self) -> bool {
        false
    }

    fn run(self, _: &Interrupted) -> Result<Outcome> {
        run(&self)
    }
}

/// Returns only if the program could not be started.
fn run(args: &Args) -> Result<Outcome> {
    let binary = std::env::current_exe().context("find out where rtvirtio-run lies")?;
    let library = library(&binary)?;
    let slots = args.slots.as_deref().map(|socket| slots(socket, ANSWER)).transpose()?;
    let Costs { pauses, look, wake, gap } = Costs::calibrate();
    let costs = format!("{pauses},{},{},{}", look.get(), wake.get(), gap.get());

    let [program, arguments @ ..] = &args.program[..] else { bail!("no program is named") };
    let mut command = Command::new(program);
    command.args(arguments).env("LD_PRELOAD", preload(&library, std::env::var_os("LD_PRELOAD")));
    // The names are the library's: extras/preload/src/process.rs.
    command.env("RTVIRTIO_RUN", args.mode.name()).env("RTVIRTIO_RUN_COSTS", costs);
    match (args.stats, args.json) {
        (false, _) => command.env_remove("RTVIRTIO_RUN_STATS"),
        (true, json) => command.env("RTVIRTIO_RUN_STATS", if json { "json" } else { "text" }),
    };
    match slots {
        Some(socket) => command.env("RTVIRTIO_RUN_SLOTS", socket),
        None => command.env_remove("RTVIRTIO_RUN_SLOTS"),
    };
    let error = command.exec();
    let code = if error.kind() == ErrorKind::NotFound { NOT_FOUND } else { CANNOT_RUN };
    eprintln!("error: run {}: {error}", program.display());
    Ok(Outcome::Exit(code))
}

/// The path of a data plane's socket, which has slots within `time`: programs that find none later go on without, and
/// say nothing.
fn slots(socket: &Path, time: Duration) -> Result<PathBuf> {
    let path = std::path::absolute(socket).context("--slots")?;
    let (sender, answer) = mpsc::channel();
    let asked = path.clone();
    // By a thread, so that one deadline bounds all of it: connect(2) waits for room in the backlog, and a socket's
    // timeout begins anew with each byte. A thread that still waits ends with this process.
    let ask = move || drop(sender.send(offer(&asked)));
    thread::Builder::new().name("slots".to_owned()).spawn(ask).context("--slots")?;
    let Ok(offer) = answer.recv_timeout(time) else {
        bail!("what listens at {} has not answered within {time:?}", socket.display())
    };
    let offer = offer.with_context(|| {
        format!(
            "no data plane answers at {}: start rtvirtio serve with slots = \"{}\" in the disk's [[device]]",
            socket.display(),
            path.display()
        )
    })?;
    ensure!(
        offer.is_some(),
        "{} has no slots for this program: it is no socket for slots, of another version, or it has as many \
         programs as it takes, or the disk's image is locked by somebody else",
        socket.display()
    );
    Ok(path)
}

/// What the server at `path` offers; `None`: no slots.
///
/// # Errors
/// There is no server.
fn offer(path: &Path) -> io::Result<Option<Offer>> {
    let mut stream = UnixStream::connect(path)?;
    let mut offer = [0; Offer::BYTES];
    // The slots that come with it are let go unseen.
    Ok(stream.read_exact(&mut offer).ok().and_then(|()| Offer::from_bytes(&offer)))
}

/// The library of the binary at `binary`: where cargo has put both, beside it, or installed.
fn library(binary: &Path) -> Result<PathBuf> {
    let binary = binary.canonicalize().context("find out where rtvirtio-run lies")?;
    let directory = binary.parent().context("rtvirtio-run lies nowhere")?;
    // Cargo renews what is in `deps` for every build that makes the binary; beside it only for some.
    let places = ["deps", ".", "../lib/rtvirtio"].map(|place| directory.join(place).join(LIBRARY));
    let Some(library) = places.iter().find_map(|place| place.canonicalize().ok()) else {
        bail!(
            "the library {LIBRARY} is not there; install it beside {} or in {}",
            binary.display(),
            directory.join("../lib/rtvirtio").display()
        );
    };
    let separated = library.as_os_str().as_bytes().iter().any(|byte| SEPARATORS.contains(byte));
    ensure!(
        !separated,
        "the library lies at {}, and ld.so(8) takes no name with a space or colon: install it elsewhere",
        library.display()
    );
    Ok(library)
}

/// The libraries to preload: ours first, so that it is asked before those that were there.
fn preload(library: &Path, others: Option<OsString>) -> OsString {
    let mut all = library.as_os_str().to_owned();
    if let Some(others) = others.filter(|others| !others.is_empty()) {
        all.push(":");
        all.push(others);
    }
    all
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write as _;
    use std::os::unix::net::UnixListener;
    use std::time::Instant;

    use super::*;

    #[test]
    fn server_that_drips_keeps_the_deadline() {
        let root = tempfile::tempdir().unwrap();
        let socket = root.path().join("s");
        let listener = UnixListener::bind(&socket).unwrap();
        // It would take 48 s for an offer.
        thread::spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            while stream.write_all(b"r").is_ok() {
                thread::sleep(Duration::from_secs(1));
            }
        });
        let began = Instant::now();
        let error = slots(&socket, Duration::from_millis(100)).unwrap_err().to_string();
        assert!(error.ends_with("has not answered within 100ms"), "{error}");
        assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    }

    #[test]
    fn library_is_found_beside_the_binary_or_installed_and_else_the_remedy_is_said() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().canonicalize().unwrap();
        for directory in ["bin", "lib/rtvirtio"] {
            fs::create_dir_all(root.join(directory)).unwrap();
        }
        let binary = root.join("bin/rtvirtio-run");
        fs::write(&binary, "").unwrap();
        let missing = library(&binary).unwrap_err().to_string();
        assert!(missing.contains("install it beside"), "{missing}");
        for place in ["lib/rtvirtio", "bin"] {
            let place = root.join(place).join(LIBRARY);
            fs::write(&place, "").unwrap();
            assert_eq!(library(&binary).unwrap(), place);
        }
    }

    #[test]
    fn library_in_a_directory_with_a_space_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("a b");
        fs::create_dir(&directory).unwrap();
        fs::write(directory.join("rtvirtio-run"), "").unwrap();
        fs::write(directory.join(LIBRARY), "").unwrap();
        let error = library(&directory.join("rtvirtio-run")).unwrap_err().to_string();
        assert!(error.contains("install it elsewhere"), "{error}");
    }

    #[test]
    fn other_preloaded_libraries_are_kept() {
        let ours = Path::new("/lib/a.so");
        assert_eq!(preload(ours, None), "/lib/a.so");
        assert_eq!(preload(ours, Some(OsString::new())), "/lib/a.so");
        assert_eq!(preload(ours, Some("b.so:c.so".into())), "/lib/a.so:b.so:c.so");
    }
}
