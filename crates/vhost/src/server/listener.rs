//! A device's socket: bound to a path, or handed over by whoever bound it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

/// Why there is no listener.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Another process answers at the path.
    #[error("{} is in use", .0.display())]
    InUse(PathBuf),
    /// Something is at the path that is no socket.
    #[error("{} is there already, and is no socket", .0.display())]
    NotASocket(PathBuf),
    /// Not the path of a socket: too long, or with a NUL.
    #[error("{} cannot be the path of a socket", .0.display())]
    Path(PathBuf),
    /// The descriptor handed over is no stream socket of the UNIX family that listens.
    #[error("the descriptor is no UNIX stream socket that listens")]
    NotListening,
    /// The system refused.
    #[error("cannot listen")]
    System(#[from] std::io::Error),
}

impl From<Errno> for ListenError {
    fn from(errno: Errno) -> Self {
        Self::System(errno.into())
    }
}

/// A socket that listens. One that was bound here is removed when it is dropped.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    bound: Mutex<Option<Bound>>,
}

/// Binds a socket of a kind, which does not block, to `path`. It gets the permissions `mode`. A socket that nobody has any more
/// is replaced.
///
/// # Errors
/// [`ListenError`]
pub fn bind(path: &Path, mode: u32, kind: SocketType) -> Result<(OwnedFd, Bound), ListenError> {
    let address = SocketAddrUnix::new(path).map_err(|_| ListenError::Path(path.to_path_buf()))?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?;
    // The file takes its mode from the socket (net/unix/af_unix.c, unix_bind_bsd). Changed by its path it
    // could be another file's, where others may write to the directory.
    rustix::fs::fchmod(&socket, Mode::from_raw_mode(mode))?;
    match bind_to(&socket, &address) {
        Err(Errno::ADDRINUSE) => {
            remove_stale(path, kind)?;
            bind_to(&socket, &address)?;
        }
        bound => bound?,
    }
    Ok((socket, Bound::at(path)?))
}

/// Binds a socket whose file has the socket's mode, whatever the umask takes of it.
///
/// # Errors
/// The kernel's.
pub fn bind_to(socket: &OwnedFd, address: &SocketAddrUnix) -> Result<(), Errno> {
    // The umask is the process's: of two binds at once the second would put back what the first has set.
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let umask = rustix::process::umask(Mode::empty());
    let bound = rustix::net::bind(socket, address);
    rustix::process::umask(umask);
    bound
}

/// Front ends that wait to be accepted. One is served at a time; a few more may reconnect.
const BACKLOG: i32 = 16;

impl Listener {
    /// Binds `path` and listens, as [`bind`] does it.
    ///
    /// # Errors
    /// [`ListenError`]
    pub fn bind(path: &Path, mode: u32) -> Result<Self, ListenError> {
        let (socket, bound) = bind(path, mode, SocketType::STREAM)?;
        let listener = Self { socket, bound: Mutex::new(Some(bound)) };
        rustix::net::listen(&listener.socket, BACKLOG)?;
        Ok(listener)
    }

    /// Takes a socket that listens already: of systemd, or of whoever asks for the device.
    ///
    /// # Errors
    /// It is another kind of descriptor.
    pub fn from_fd(socket: OwnedFd) -> Result<Self, ListenError> {
        let listens = sockopt::socket_acceptconn(&socket).unwrap_or(false)
            && sockopt::socket_domain(&socket) == Ok(AddressFamily::UNIX)
            && sockopt::socket_type(&socket) == Ok(SocketType::STREAM);
        if !listens {
            return Err(ListenError::NotListening);
        }
        rustix::io::ioctl_fionbio(&socket, true)?;
        rustix::io::fcntl_setfd(&socket, rustix::io::FdFlags::CLOEXEC)?;
        Ok(Self { socket, bound: Mutex::default() })
    }

    /// Removes the file of a socket that was handed over, when this ends: at `path`, if that is where it was
    /// bound.
    #[must_use]
    pub fn removing(self, path: &Path) -> Self {
        let address = rustix::net::getsockname(&self.socket).map(SocketAddrUnix::try_from);
        let is_bound_there = address.is_ok_and(|address| {
            address.is_ok_and(|a| a.path_bytes() == Some(path.as_os_str().as_bytes()))
        });
        let is_socket = std::fs::symlink_metadata(path).is_ok_and(|m| m.file_type().is_socket());
        if is_bound_there && is_socket {
            let mut bound = self.bound.lock().unwrap_or_else(PoisonError::into_inner);
            *bound = Bound::at(path).ok();
            drop(bound);
        }
        self
    }

    /// Removes what was bound here.
    pub(super) fn unbind(&self) {
        drop(self.bound.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    /// The next one that waits to be let in; `None`: there is none any more. Its socket blocks.
    pub(super) fn accept(&self) -> std::io::Result<Option<Arc<UnixStream>>> {
        match rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC) {
            Ok(stream) => Ok(Some(Arc::new(stream.into()))),
            Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// What was bound: a path is ours only as long as it leads there. It is removed when this is dropped.
#[derive(Debug)]
pub struct Bound {
    path: PathBuf,
    file: (u64, u64),
}

impl Bound {
    fn at(path: &Path) -> std::io::Result<Self> {
        Ok(Self { path: path.to_path_buf(), file: identity(path)? })
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        if identity(&self.path).is_ok_and(|file| file == self.file) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> std::io::Result<(u64, u64)> {
    let metadata = std::fs::symlink_metadata(path)?;
    Ok((metadata.dev(), metadata.ino()))
}

/// Removes a socket that nobody has any more.
fn remove_stale(path: &Path, kind: SocketType) -> Result<(), ListenError> {
    if !std::fs::symlink_metadata(path)?.file_type().is_socket() {
        return Err(ListenError::NotASocket(path.to_path_buf()));
    }
    match connect(path, kind) {
        Err(Errno::CONNREFUSED) => Ok(std::fs::remove_file(path)?),
        Err(Errno::NOENT) => Ok(()),
        // Somebody has it, or we may not know.
        _ => Err(ListenError::InUse(path.to_path_buf())),
    }
}

/// Connects to a socket, to see whether somebody listens.
///
/// # Errors
/// The kernel's: `ECONNREFUSED` if nobody does, `EAGAIN` if who listens accepts nobody.
// Without waiting: the backlog of a listener that
/// accepts nobody is full (`EAGAIN`), and connect(2) would wait for room in it for ever.
pub fn is_answered(path: &Path) -> Result<(), Errno> {
    connect(path, SocketType::STREAM)
}

fn connect(path: &Path, kind: SocketType) -> Result<(), Errno> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?;
    rustix::net::connect(&socket, &address)
}
