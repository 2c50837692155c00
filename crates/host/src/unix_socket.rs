//! Connections to Unix sockets whose paths others choose: a QEMU's command line, a journal, an operator.
//!
//! connect(2) looks the path up. Where that leads below a mount whose server answers no more (NFS, FUSE), the kernel may
//! wait for ever, and no time limit of the socket holds for it. So it is done on a thread of its own, which is left behind
//! once the time is over. As long as one has not come back, its path is not looked up anew: whoever asks again and again,
//! as `watch` does, leaves one thread behind for each path.
//!
//! Properties: `look_up_that_hangs_keeps_the_deadline_and_costs_one_thread`,
//! `socket_whose_connection_nobody_waits_for_is_closed`.

use std::collections::BTreeSet;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

use crate::interrupt::STEP;

/// How often it is seen whether another look-up of the same path has come back.
const NAP: Duration = Duration::from_millis(2);

/// The paths that are being looked up.
static UNDER_WAY: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// A look-up of a path; there is one at a time.
struct LookUp(PathBuf);

impl LookUp {
    fn begin(path: &Path) -> Option<Self> {
        Self::all().insert(path.to_owned()).then(|| Self(path.to_owned()))
    }

    fn all() -> MutexGuard<'static, BTreeSet<PathBuf>> {
        UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for LookUp {
    fn drop(&mut self) {
        Self::all().remove(&self.0);
    }
}

/// Connects to the socket at `path`. Before each wait `left` says how long that may be; its error ends the attempt.
pub(crate) fn connect<E>(
    path: &Path,
    left: impl FnMut() -> Result<Duration, E>,
) -> Result<io::Result<UnixStream>, E> {
    apart(path, attempt, left)
}

/// Does `work` about `path` on a thread of its own, as long as it is waited for.
fn apart<T: Send + 'static, E>(
    path: &Path,
    work: impl FnOnce(&Path, &AtomicBool) -> io::Result<T> + Send + 'static,
    mut left: impl FnMut() -> Result<Duration, E>,
) -> Result<io::Result<T>, E> {
    left()?;
    let look_up = loop {
        match LookUp::begin(path) {
            Some(look_up) => break look_up,
            None => thread::sleep(left()?.min(NAP)),
        }
    };
    let is_wanted = Arc::new(AtomicBool::new(true));
    let (sender, receiver) = mpsc::channel();
    let still = Arc::clone(&is_wanted);
    let started = thread::Builder::new().name("connect".to_owned()).spawn(move || {
        let result = work(&look_up.0, &still);
        drop(look_up);
        // Nobody waits any more if this fails.
        let _ = sender.send(result);
    });
    if let Err(error) = started {
        return Ok(Err(error));
    }
    loop {
        let wait = left().inspect_err(|_| is_wanted.store(false, Ordering::Relaxed))?;
        match receiver.recv_timeout(wait) {
            Ok(result) => return Ok(result),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                return Ok(Err(io::Error::other("the thread that connects has ended")));
            }
        }
    }
}

fn attempt(path: &Path, is_wanted: &AtomicBool) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // connect(2) waits for room in the backlog.
    set_socket_timeout(&socket, Timeout::Send, Some(STEP))?;
    loop {
        match rustix::net::connect(&socket, &address) {
            Ok(()) => return Ok(UnixStream::from(socket)),
            Err(Errno::INTR | Errno::AGAIN) if is_wanted.load(Ordering::Relaxed) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::net::UnixListener;
    use std::sync::atomic::AtomicUsize;
    use std::time::Instant;

    use super::*;

    const SHORT: Duration = Duration::from_millis(100);
    const ENOUGH: Duration = Duration::from_secs(20);

    fn until(limit: Duration) -> impl FnMut() -> Result<Duration, &'static str> {
        let end = Instant::now() + limit;
        move || {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() { Err("late") } else { Ok(left) }
        }
    }

    #[test]
    fn look_up_that_hangs_keeps_the_deadline_and_costs_one_thread() {
        let (answer, waits) = mpsc::channel::<()>();
        let path = Path::new("/server/that/answers/no/more/qmp");
        let hangs = move |_: &Path, _: &AtomicBool| {
            let _ = waits.recv();
            Ok(())
        };
        let start = Instant::now();
        assert_eq!(apart(path, hangs, until(SHORT)).unwrap_err(), "late");
        assert!((SHORT..ENOUGH).contains(&start.elapsed()), "{:?}", start.elapsed());
        // It is not looked up anew, and others are.
        let looks = Arc::new(AtomicUsize::new(0));
        let look = || {
            let looks = Arc::clone(&looks);
            move |_: &Path, _: &AtomicBool| Ok(looks.fetch_add(1, Ordering::SeqCst))
        };
        for _ in 0..3 {
            assert_eq!(apart(path, look(), until(SHORT)).unwrap_err(), "late");
        }
        assert_eq!(looks.load(Ordering::SeqCst), 0);
        let beside = path.with_file_name("agent");
        assert_eq!(apart(&beside, look(), until(ENOUGH)).unwrap().unwrap(), 0);
        // The server answers again.
        drop(answer);
        assert_eq!(apart(path, look(), until(ENOUGH)).unwrap().unwrap(), 1);
    }

    #[test]
    fn socket_whose_connection_nobody_waits_for_is_closed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let (answer, waits) = mpsc::channel::<()>();
        let hangs = move |path: &Path, is_wanted: &AtomicBool| {
            let _ = waits.recv();
            attempt(path, is_wanted)
        };
        assert_eq!(apart(&path, hangs, until(SHORT)).unwrap_err(), "late");
        drop(answer);
        let (mut stream, _) = listener.accept().unwrap();
        assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0);
    }
}
