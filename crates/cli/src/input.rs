//! Files that a user names: specifications, profiles, plans.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rtvirtio_host::Host;
use rtvirtio_host::interrupt::{Interrupted, InterruptedError};
use rtvirtio_model::learned::{Learned, MAX_MODEL_BYTES};
use rtvirtio_spec::plan::{PLAN_VERSION, Plan};
use rtvirtio_spec::profile::Profile;
use rtvirtio_spec::specification::{MAX_FILE_BYTES, Specification, parse};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, OFlags};
use rustix::io::Errno;

/// Largest plan or profile that is read; 1,000 VMs make a plan of about 3 MB.
const MAX_JSON_BYTES: u64 = 256 << 20;

/// How long a pipe may bring nothing: after the first time the user is told what is waited for.
const PIPE_TIMES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(60)];

/// How long a server or a process may take to give a piece of a file of its filesystem, of at most so many bytes.
const ANSWER: Duration = Duration::from_secs(10);
const PIECE: u64 = 64 << 10;

/// How soon after a signal a wait ends.
const STEP: Duration = Duration::from_millis(100);

/// What the program's signal handlers set.
static INTERRUPTED: OnceLock<Arc<Interrupted>> = OnceLock::new();

/// From now on waits for whoever is at the other end of a pipe, for a data plane, VMs and locks end with the program.
pub(crate) fn end_waits_with(interrupted: &Arc<Interrupted>) {
    // A program has one.
    let _ = INTERRUPTED.set(Arc::clone(interrupted));
}

/// Fails once the user wants the program to end.
fn check_interrupted(interrupted: Option<&Interrupted>) -> io::Result<()> {
    if interrupted.is_some_and(|interrupted| interrupted.load(Ordering::Relaxed)) {
        // As a kind of its own `Interrupted` would have `read_to_end` try again.
        return Err(io::Error::other(InterruptedError));
    }
    Ok(())
}

/// An error of a file; [`main`](crate::main) knows the end of a program that was interrupted by its type.
fn of_file(error: io::Error) -> anyhow::Error {
    match error.downcast::<InterruptedError>() {
        Ok(interrupted) => interrupted.into(),
        Err(error) => error.into(),
    }
}

/// Waits until a pipe has something, or its writers have gone; false if neither has come so long after `begun`.
fn is_ready(
    pipe: &impl AsFd,
    begun: Instant,
    time: Duration,
    interrupted: Option<&Interrupted>,
) -> io::Result<bool> {
    loop {
        check_interrupted(interrupted)?;
        let left = time.saturating_sub(begun.elapsed());
        // In steps: a signal may come between the look at its flag and the wait.
        let timeout = Timespec::try_from(left.min(STEP)).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(pipe, PollFlags::IN)], Some(&timeout)) {
            Ok(0) if left.is_zero() => return Ok(false),
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(true),
            Err(error) => return Err(error.into()),
        }
    }
}

/// A process that reads a file. It is killed when this is dropped, and waited for only as long as a moment: one that
/// waits for a process behind FUSE may end with that alone.
struct Reader(Child);

impl Drop for Reader {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let begun = Instant::now();
        while matches!(self.0.try_wait(), Ok(None)) && begun.elapsed() < STEP {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Reader {
    /// What `command` writes, at most `limit` bytes.
    fn read(
        mut command: Command,
        limit: u64,
        time: Duration,
        interrupted: Option<&Interrupted>,
    ) -> io::Result<Vec<u8>> {
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let started = command.spawn().map_err(|error| {
            let program = command.get_program().display();
            io::Error::new(error.kind(), format!("start {program}, which reads it: {error}"))
        });
        let mut reader = Self(started?);
        let mut bytes = Vec::new();
        if let Some(stdout) = reader.0.stdout.take() {
            drain(stdout, &mut bytes, limit, time, interrupted)?;
        }
        if bytes.len() as u64 == limit {
            return Ok(bytes);
        }
        let mut said = Vec::new();
        if let Some(stderr) = reader.0.stderr.take() {
            drain(stderr, &mut said, PIECE, time, interrupted)?;
        }
        let begun = Instant::now();
        let status = loop {
            check_interrupted(interrupted)?;
            match reader.0.try_wait()? {
                Some(status) => break status,
                None if begun.elapsed() >= time => return Err(late(time)),
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        if status.success() {
            return Ok(bytes);
        }
        // The terminal's signal ends it too.
        check_interrupted(interrupted)?;
        // `cat: FILE: No such file or directory`
        let said = String::from_utf8_lossy(&said);
        Err(io::Error::other(match said.trim().rsplit(": ").next() {
            Some(why) if !why.is_empty() => why.to_owned(),
            _ => format!("the process that reads it has ended ({status})"),
        }))
    }
}

/// Reads of a pipe until its end, at most `limit` bytes.
fn drain(
    mut pipe: impl Read + AsFd,
    bytes: &mut Vec<u8>,
    limit: u64,
    time: Duration,
    interrupted: Option<&Interrupted>,
) -> io::Result<()> {
    while is_ready(&pipe, Instant::now(), time, interrupted)? {
        let mut piece = vec![0; (limit - bytes.len() as u64).min(PIECE) as usize];
        let read = pipe.read(&mut piece)?;
        bytes.extend_from_slice(&piece[..read]);
        if read == 0 || bytes.len() as u64 == limit {
            return Ok(());
        }
    }
    Err(late(time))
}

fn late(time: Duration) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, format!("it has not answered for {time:?}"))
}

/// A file that is read: one that is a pipe (`<(…)`, `mkfifo`) is waited for, though not for ever.
struct Input<'a> {
    file: File,
    /// Its path, of a pipe.
    pipe: Option<&'a Path>,
}

impl<'a> Input<'a> {
    fn open(path: &'a Path) -> io::Result<Self> {
        // Opening a pipe would wait for whoever writes to it.
        let flags = OFlags::NONBLOCK.bits() as i32;
        let file = File::options().read(true).custom_flags(flags).open(path)?;
        let kind = file.metadata()?.file_type();
        let pipe = (kind.is_fifo() || kind.is_char_device()).then_some(path);
        Ok(Self { file, pipe })
    }

    /// Waits until the pipe has something, or its writers have gone.
    fn wait(
        &self,
        path: &Path,
        times: [Duration; 2],
        interrupted: Option<&Interrupted>,
    ) -> io::Result<()> {
        let begun = Instant::now();
        for (time, is_last) in times.into_iter().zip([false, true]) {
            if is_ready(&self.file, begun, time, interrupted)? {
                return Ok(());
            }
            if !is_last {
                eprintln!("waiting for somebody to write to {}", path.display());
            }
        }
        let text = format!("nobody has written to it for {} s", times[1].as_secs());
        Err(io::Error::new(io::ErrorKind::TimedOut, text))
    }
}

impl Read for Input<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            if let Some(path) = self.pipe {
                self.wait(path, PIPE_TIMES, INTERRUPTED.get().map(AsRef::as_ref))?;
            }
            match self.file.read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && self.pipe.is_some() => {}
                read => return read,
            }
        }
    }
}

/// A file's bytes, with one beyond `limit` if it is longer, which tells a file that is too large, whatever its
/// stated size.
fn bytes(path: &Path, limit: u64) -> Result<Vec<u8>> {
    let whole = std::path::absolute(path)?;
    if let Some(far) = host().beyond_reach(&whole) {
        // Whoever opens a file of a server or process that answers no more can be killed, at most, and behind FUSE not
        // always that. Another process can be left to such a wait; a thread would keep this one from its end.
        let mut command = Command::new("cat");
        command.arg("--").arg(whole).env("LC_ALL", "C");
        let interrupted: Option<&Interrupted> = INTERRUPTED.get().map(AsRef::as_ref);
        let read = Reader::read(command, limit + 1, ANSWER, interrupted).map_err(of_file);
        let filesystem = far.layers.first().map(ToString::to_string).unwrap_or_default();
        return read.context(filesystem);
    }
    let mut bytes = Vec::new();
    let input = Input::open(path)?;
    input.take(limit + 1).read_to_end(&mut bytes).map_err(of_file)?;
    Ok(bytes)
}

/// A file's text, with one byte beyond `limit` if it is longer: whoever parses it refuses it.
pub fn read(path: &Path, limit: u64) -> Result<String> {
    let context = || format!("read {}", path.display());
    let bytes = bytes(path, limit).with_context(context)?;
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        anyhow::anyhow!("{}: not a text file (byte {at} is not UTF-8)", path.display())
    })
}

/// A checked specification; profiles it names are relative to its directory.
pub fn specification(path: &Path) -> Result<Specification> {
    let text = read(path, MAX_FILE_BYTES as u64)?;
    let mut specification = parse(&path.display().to_string(), &text)?;
    let directory = path.parent().unwrap_or(Path::new("."));
    for device in &mut specification.devices {
        device.profile = directory.join(&device.profile);
    }
    Ok(specification)
}

fn json<T: serde::de::DeserializeOwned>(path: &Path, what: &str) -> Result<T> {
    let text = read(path, MAX_JSON_BYTES)?;
    ensure!(text.len() as u64 <= MAX_JSON_BYTES, "{}: too large for a {what}", path.display());
    serde_json::from_str(&text).with_context(|| format!("{}: not a {what}", path.display()))
}

/// A profile that can be used.
pub fn profile(path: &Path) -> Result<Profile> {
    let profile: Profile = json(path, "profile (made by `rtvirtio calibrate`)")?;
    profile.check().with_context(|| format!("{}", path.display()))?;
    Ok(profile)
}

/// A learned model that can be asked.
pub fn learned(path: &Path) -> Result<Learned> {
    let bytes =
        bytes(path, MAX_MODEL_BYTES as u64).with_context(|| format!("read {}", path.display()))?;
    Learned::from_bytes(&bytes).with_context(|| format!("{}", path.display()))
}

/// A plan of this binary's version.
pub fn plan(path: &Path) -> Result<Plan> {
    let plan: Plan = json(path, "plan (made by `rtvirtio plan -o`)")?;
    ensure!(
        plan.version == PLAN_VERSION,
        "{}: plan version {}, not {PLAN_VERSION}: make it anew with `rtvirtio plan -o`",
        path.display(),
        plan.version
    );
    Ok(plan)
}

/// Where an output goes.
enum Output {
    /// To a regular file, by another one in its directory that takes its place.
    File(PathBuf),
    /// Through what is no regular file, and is never replaced: a terminal, a pipe or the like.
    Stream(PathBuf),
    /// To standard output or error, whatever these are: behind what was printed there, and before what will be.
    Stdout,
    Stderr,
    /// At the end of a regular file that this process has open, as `/dev/fd/3` of `3>>log`: whoever opened it wants that one,
    /// and no other of its name.
    Open(PathBuf),
}

/// The descriptor of this process that `path` means, as `/dev/stdout` and `/dev/fd/3` do.
fn own_descriptor(path: &Path) -> Option<u32> {
    let own = ["/proc/self/fd", "/proc/thread-self/fd"];
    let own = own.map(|directory| std::fs::canonicalize(directory).ok());
    let mut path = path.to_owned();
    // As many links as the kernel follows (path_resolution(7)).
    for _ in 0..40 {
        let directory = std::fs::canonicalize(directory_of(&path)).ok()?;
        if own.iter().flatten().any(|own| *own == directory) {
            return path.file_name()?.to_str()?.parse().ok();
        }
        path = directory.join(std::fs::read_link(&path).ok()?);
    }
    None
}

impl Output {
    /// Where what goes to `path` is written; behind a link, where that leads.
    fn find(path: &Path) -> Result<Self> {
        ensure!(path.file_name().is_some(), "{:?} names no file (name another output)", path);
        match own_descriptor(path) {
            Some(1) => return Ok(Self::Stdout),
            Some(2) => return Ok(Self::Stderr),
            Some(_) if std::fs::metadata(path).is_ok_and(|there| there.is_file()) => {
                return Ok(Self::Open(path.to_owned()));
            }
            Some(_) | None => {}
        }
        let there = match std::fs::symlink_metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            there => Some(there.with_context(|| writing(path))?.file_type()),
        };
        match there {
            Some(kind) if kind.is_symlink() => {
                // What a descriptor of this process is (`>(…)`) has a name only if it is a file: a pipe is to be had by the
                // link alone.
                let behind = std::fs::metadata(path).map(|behind| behind.file_type());
                if behind.is_ok_and(|kind| kind.is_char_device() || kind.is_fifo()) {
                    return Ok(Self::Stream(path.to_owned()));
                }
                let target = std::fs::canonicalize(path)
                    .with_context(|| format!("{} is a link that leads nowhere", path.display()))?;
                Self::find(&target)
            }
            Some(kind) if !kind.is_file() => {
                ensure!(
                    kind.is_char_device() || kind.is_fifo(),
                    "{} is not a regular file: nothing was written (name another output)",
                    path.display()
                );
                Ok(Self::Stream(path.to_owned()))
            }
            Some(_) | None => Ok(Self::File(path.to_owned())),
        }
    }
}

fn writing(path: &Path) -> String {
    format!("write {}", path.display())
}

/// The directory of a file.
fn directory_of(path: &Path) -> &Path {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    parent.unwrap_or(Path::new("."))
}

/// Looks whether [`write()`] could write `path`, and makes nothing: what takes long is not to be for nothing.
///
/// # Errors
/// It could not.
pub fn check_output(path: &Path) -> Result<()> {
    match Output::find(path)? {
        Output::File(file) => may_make_files_in(directory_of(&file)).with_context(|| writing(path)),
        Output::Stream(_) | Output::Stdout | Output::Stderr | Output::Open(_) => Ok(()),
    }
}

/// Whether [`write()`] adds to what `path` names and replaces nothing, as with `/dev/stdout`.
///
/// # Errors
/// It could not be written.
pub fn is_written_through(path: &Path) -> Result<bool> {
    Ok(!matches!(Output::find(path)?, Output::File(_)))
}

/// Fails if there is a file that [`write()`] would replace: one that is there is somebody's.
///
/// # Errors
/// The same; what is there cannot be written.
pub fn refuse_to_replace(path: &Path) -> Result<()> {
    ensure!(
        !path.exists() || is_written_through(path)?,
        "{} is there already: move it away, or name another output",
        path.display()
    );
    Ok(())
}

/// A directory for what is made on the way to an output that has no place for it beside itself: beside `/dev/stdout` there
/// are devices. `None`: the output is a regular file, whose own directory has it.
///
/// # Errors
/// It cannot be made, or the output could not be written.
pub fn work_directory(output: &Path) -> Result<Option<tempfile::TempDir>> {
    if !is_written_through(output)? {
        return Ok(None);
    }
    let made = tempfile::Builder::new().prefix("rtvirtio-").tempdir();
    Ok(Some(made.context("make a directory for temporary files (TMPDIR names another)")?))
}

/// As [`check_output`], of an output whose directory will be made if it is not there.
///
/// # Errors
/// The same.
pub fn check_output_with_directory(path: &Path) -> Result<()> {
    let directory = directory_of(path);
    if directory.exists() {
        return check_output(path);
    }
    let above = directory.ancestors().skip(1).map(|above| match above.as_os_str().is_empty() {
        true => Path::new("."),
        false => above,
    });
    // One that is not to be told from one that is not there will say why.
    let above = above.into_iter().find(|above| above.exists()).unwrap_or(Path::new("/"));
    may_make_files_in(above).with_context(|| format!("make {} for the output", directory.display()))
}

fn may_make_files_in(directory: &Path) -> io::Result<()> {
    if !std::fs::metadata(directory)?.is_dir() {
        return Err(Errno::NOTDIR.into());
    }
    // Root may write everywhere, but not to what is mounted read-only: the kernel knows both.
    let access = rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK;
    Ok(rustix::fs::accessat(rustix::fs::CWD, directory, access, AtFlags::EACCESS)?)
}

/// Writes a file. A regular file is written whole or not at all: stage, then rename; behind a link, the
/// file that it leads to. What is none is never replaced: terminals, pipes and the like are written
/// through, anything else is refused. What this process has open is not replaced either.
pub fn write(path: &Path, text: &str) -> Result<()> {
    use std::io::Write as _;
    use std::os::unix::fs::PermissionsExt as _;
    let context = || writing(path);
    let path = match Output::find(path)? {
        Output::File(path) => path,
        Output::Stream(path) => {
            let mut file = open_for_writing(&path).map_err(of_file).with_context(context)?;
            return file.write_all(text.as_bytes()).with_context(context);
        }
        Output::Stdout => {
            let mut out = io::stdout().lock();
            let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
            return written.with_context(context);
        }
        Output::Stderr => {
            return io::stderr().lock().write_all(text.as_bytes()).with_context(context);
        }
        Output::Open(path) => {
            let mut file = File::options().append(true).open(path).with_context(context)?;
            return file.write_all(text.as_bytes()).with_context(context);
        }
    };
    let mut staged = tempfile::NamedTempFile::new_in(directory_of(&path)).with_context(context)?;
    staged.write_all(text.as_bytes()).with_context(context)?;
    staged.as_file().sync_all().with_context(context)?;
    staged.as_file().set_permissions(std::fs::Permissions::from_mode(0o644))?;
    staged.persist(path).with_context(context)?;
    Ok(())
}

/// Opens what is no regular file; a pipe that nobody reads is waited for, though not for ever.
fn open_for_writing(path: &Path) -> io::Result<File> {
    let begun = Instant::now();
    loop {
        let flags = OFlags::NONBLOCK.bits() as i32;
        match File::options().write(true).custom_flags(flags).open(path) {
            // Somebody reads: what is written waits for that.
            Ok(_there) => return File::options().write(true).open(path),
            Err(error) if error.raw_os_error() != Some(Errno::NXIO.raw_os_error()) => {
                return Err(error);
            }
            Err(_) if begun.elapsed() > PIPE_TIMES[1] => {
                let text = format!("nobody has read from it for {} s", PIPE_TIMES[1].as_secs());
                return Err(io::Error::new(io::ErrorKind::TimedOut, text));
            }
            Err(_) => {
                check_interrupted(INTERRUPTED.get().map(AsRef::as_ref))?;
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    }
}

/// Where the user wants journal and lock to be (`RTVIRTIO_STATE_DIR`); `None`: nowhere else.
///
/// # Errors
/// The path is relative: from another directory the same command would find no journal, and put nothing back.
pub(crate) fn state_directory() -> Result<Option<PathBuf>> {
    let named = std::env::var_os("RTVIRTIO_STATE_DIR").map(PathBuf::from);
    let Some(path) = named.filter(|path| !path.as_os_str().is_empty()) else { return Ok(None) };
    ensure!(path.is_absolute(), "RTVIRTIO_STATE_DIR={}: give an absolute path", path.display());
    Ok(Some(path))
}

/// This host; `RTVIRTIO_STATE_DIR` moves journal and lock away from `/run/rtvirtio-host`. Its data plane, VMs and locks are
/// not waited for once the user wants the program to end.
pub fn host() -> Host {
    let mut host = Host::new("/");
    // A path that cannot be has ended the program before.
    if let Some(directory) = state_directory().ok().flatten() {
        host = host.with_state_directory(directory);
    }
    match INTERRUPTED.get() {
        Some(interrupted) => host.with_interrupt(Arc::clone(interrupted)),
        None => host,
    }
}

/// A path that a user names, without links. One that leads to what a server or a process answers for is refused: whoever
/// looked at it would wait for one that answers no more, for ever.
///
/// # Errors
/// The same; it is not there.
pub fn canonicalize(path: &Path) -> io::Result<PathBuf> {
    let whole = std::path::absolute(path)?;
    match host().beyond_reach(&whole) {
        Some(stack) => Err(io::Error::other(stack.to_string())),
        None => std::fs::canonicalize(whole),
    }
}

/// Prints a value as JSON on standard output.
pub fn print_json<T: serde::Serialize>(value: &T) -> Result<()> {
    println!("{}", serde_json::to_string_pretty(value)?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::fd::AsRawFd as _;

    use super::*;

    fn pipe(path: &Path) {
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    }

    #[test]
    fn output_that_cannot_be_written_is_told_before_and_nothing_is_made() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        std::fs::write(at("file"), "before").unwrap();
        std::os::unix::fs::symlink(at("absent"), at("nowhere")).unwrap();
        std::os::unix::fs::symlink(at("file"), at("link")).unwrap();
        pipe(&at("pipe"));
        for good in ["new", "file", "link", "pipe"] {
            check_output(&at(good)).unwrap();
            check_output_with_directory(&at(good)).unwrap();
        }
        check_output(Path::new("/dev/null")).unwrap();
        check_output(Path::new("new.json")).unwrap();
        check_output_with_directory(&at("a/b/new")).unwrap();
        for (bad, words) in [
            ("", "is not a regular file"),
            ("nowhere", "leads nowhere"),
            ("a/new", "No such file"),
            ("file/new", "Not a directory"),
            ("..", "names no file"),
        ] {
            let error = format!("{:#}", check_output(&at(bad)).unwrap_err());
            assert!(error.contains(words), "{bad}: {error}");
        }
        for bad in ["", "nowhere", "file/new", "file/a/new"] {
            assert!(check_output_with_directory(&at(bad)).is_err(), "{bad}");
        }
        assert!(check_output(Path::new("")).is_err());
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 4);
        assert_eq!(std::fs::read_to_string(at("file")).unwrap(), "before");
    }

    #[test]
    fn pipe_that_has_no_name_is_written_through_its_descriptor() {
        let (mut reader, writer) = io::pipe().unwrap();
        let path = PathBuf::from(format!("/proc/self/fd/{}", writer.as_raw_fd()));
        check_output(&path).unwrap();
        write(&path, "profile").unwrap();
        drop(writer);
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "profile");
    }

    #[test]
    fn file_that_is_open_is_written_at_its_end_and_not_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log");
        std::fs::write(&log, "before\n").unwrap();
        let mut open = File::options().read(true).append(true).open(&log).unwrap();
        let path = PathBuf::from(format!("/proc/self/fd/{}", open.as_raw_fd()));
        check_output(&path).unwrap();
        write(&path, "profile\n").unwrap();
        assert_eq!(std::fs::read_to_string(&log).unwrap(), "before\nprofile\n");
        // One without a name has nothing that could take its place.
        std::fs::remove_file(&log).unwrap();
        check_output(&path).unwrap();
        write(&path, "plan\n").unwrap();
        let mut text = String::new();
        open.read_to_string(&mut text).unwrap();
        assert_eq!(text, "before\nprofile\nplan\n");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[test]
    fn standard_output_is_known_by_its_links_and_other_processes_are_not_meant() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        std::os::unix::fs::symlink("/proc/self/fd", at("fd")).unwrap();
        std::os::unix::fs::symlink("fd/1", at("stdout")).unwrap();
        assert_eq!(own_descriptor(&at("stdout")), Some(1));
        assert_eq!(own_descriptor(&at("fd/2")), Some(2));
        assert_eq!(own_descriptor(Path::new("/proc/thread-self/fd/1")), Some(1));
        std::os::unix::fs::symlink("loop", at("loop")).unwrap();
        for other in ["loop", "absent", "fd"] {
            assert_eq!(own_descriptor(&at(other)), None, "{other}");
        }
        assert_eq!(own_descriptor(Path::new("/proc/1/fd/1")), None);
    }

    #[test]
    fn what_is_made_on_the_way_to_a_device_or_pipe_lies_elsewhere() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        pipe(&at("pipe"));
        std::fs::write(at("file"), "").unwrap();
        std::os::unix::fs::symlink(at("file"), at("link")).unwrap();
        std::os::unix::fs::symlink("/dev/null", at("null")).unwrap();
        std::os::unix::fs::symlink("/proc/self/fd/1", at("stdout")).unwrap();
        for straight in ["pipe", "null", "stdout"] {
            let made = work_directory(&at(straight)).unwrap().unwrap();
            assert!(!made.path().starts_with(directory.path()), "{straight}");
            // Nor is it in the way: nobody would move a device away.
            refuse_to_replace(&at(straight)).unwrap();
        }
        for beside in ["file", "link", "new"] {
            assert!(work_directory(&at(beside)).unwrap().is_none(), "{beside}");
        }
        assert!(work_directory(directory.path()).is_err());
        refuse_to_replace(&at("new")).unwrap();
        let error = refuse_to_replace(&at("link")).unwrap_err().to_string();
        assert!(error.contains("is there already"), "{error}");
    }

    #[test]
    fn wait_for_a_pipe_ends_in_time_or_when_interrupted() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pipe");
        pipe(&path);
        let input = Input::open(&path).unwrap();
        // Both ends are open, as a shell has them: it is not at its end, and has nothing.
        let _writer = File::options().read(true).write(true).open(&path).unwrap();
        let begun = Instant::now();
        let times = [Duration::from_millis(1), Duration::from_millis(150)];
        let error = input.wait(&path, times, None).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(begun.elapsed() >= times[1]);
        let error = of_file(input.wait(&path, PIPE_TIMES, Some(&true.into())).unwrap_err());
        let error = error.context("read it");
        assert!(error.downcast_ref::<InterruptedError>().is_some(), "{error:#}");
    }

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn filesystem_that_does_not_answer_is_told_and_not_waited_for_after_a_signal() {
        const HOUR: Duration = Duration::from_secs(3_600);
        // As a server that gives a piece, and nothing more.
        let hangs = || shell("echo version; exec sleep 600");
        let (begun, time) = (Instant::now(), Duration::from_millis(150));
        let error = Reader::read(hangs(), 1 << 20, time, None).unwrap_err();
        assert!(begun.elapsed() >= time);
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(error.to_string(), "it has not answered for 150ms");
        let interrupted = Interrupted::new(false);
        let error = std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(20));
                interrupted.store(true, Ordering::Relaxed);
            });
            Reader::read(hangs(), 1 << 20, HOUR, Some(&interrupted)).unwrap_err()
        });
        let error = of_file(error).context("nfs4 at /mnt");
        assert!(error.is::<InterruptedError>(), "{error:#}");
        // One that ends without a word is told too.
        let ended = Reader::read(shell("kill -KILL $$"), 1 << 20, HOUR, None).unwrap_err();
        assert!(ended.to_string().contains("signal: 9"), "{ended}");
    }

    #[test]
    fn file_of_another_host_is_read_whole_and_not_beyond_the_limit() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let text: String = ('a'..='z').cycle().take(3 * PIECE as usize + 1).collect();
        file.write_all(text.as_bytes()).unwrap();
        let read = |path: &Path, limit: usize| {
            let mut command = Command::new("cat");
            command.arg("--").arg(path).env("LC_ALL", "C");
            Reader::read(command, limit as u64, Duration::from_secs(60), None)
        };
        assert!(read(file.path(), text.len() + 1).unwrap() == text.as_bytes());
        for limit in [1, PIECE as usize, text.len()] {
            assert!(read(file.path(), limit).unwrap() == text.as_bytes()[..limit], "{limit}");
        }
        let empty = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(read(empty.path(), 100).unwrap(), b"");
        let absent = empty.path().with_extension("absent");
        let error = read(&absent, 100).unwrap_err();
        assert_eq!(error.to_string(), "No such file or directory");
    }

    #[test]
    fn pipe_is_read_to_its_end_however_slowly_it_is_written() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pipe");
        pipe(&path);
        let to = path.clone();
        let writer = std::thread::spawn(move || {
            let mut pipe = File::options().write(true).open(to).unwrap();
            for part in ["version", " = ", "1\n"] {
                std::thread::sleep(Duration::from_millis(20));
                pipe.write_all(part.as_bytes()).unwrap();
            }
        });
        assert_eq!(read(&path, 100).unwrap(), "version = 1\n");
        writer.join().unwrap();
    }

    #[test]
    fn file_that_is_too_large_or_no_text_is_told() {
        assert_eq!(read(Path::new("/dev/zero"), 100).unwrap().len(), 101);
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"abc\xff").unwrap();
        let error = format!("{:#}", read(file.path(), 100).unwrap_err());
        assert!(error.ends_with("not a text file (byte 3 is not UTF-8)"), "{error}");
        assert!(read(file.path().parent().unwrap(), 100).is_err());
    }
}
