//! The socket of the control API: private from its first moment, and gone at the end.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::ControlError;
use crate::sandbox::give_socket;
use rtvirtio_vhost::server::{bind_to, is_answered};

/// A socket in the file system; removed when dropped, if it is still the one that was made.
#[derive(Debug)]
pub(super) struct Socket {
    path: PathBuf,
    /// Device and inode.
    identity: (u64, u64),
}

impl Socket {
    /// Makes it, in the place of one that nobody serves any more.
    pub(super) fn make(
        path: &Path,
        group: Option<u32>,
    ) -> Result<(Self, UnixListener), ControlError> {
        let failed = |source: io::Error| ControlError::Socket { path: path.to_owned(), source };
        match fs::symlink_metadata(path) {
            Ok(found) if !found.file_type().is_socket() => {
                return Err(ControlError::NotASocket(path.to_owned()));
            }
            Ok(_) => match is_answered(path) {
                Err(Errno::CONNREFUSED) => fs::remove_file(path).map_err(failed)?,
                _ => return Err(ControlError::InUse(path.to_owned())),
            },
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(failed(e)),
        }
        let mode = if group.is_some() { 0o660 } else { 0o600 };
        let listener = listen(path, Mode::from_raw_mode(mode)).map_err(failed)?;
        let identity = fs::symlink_metadata(path).map(|m| (m.dev(), m.ino())).map_err(failed)?;
        let socket = Self { path: path.to_owned(), identity };
        if let Some(group) = group {
            give_socket(path, None, Some(group)).map_err(failed)?;
        }
        Ok((socket, listener))
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let is_ours = |found: fs::Metadata| (found.dev(), found.ino()) == self.identity;
        if fs::symlink_metadata(&self.path).is_ok_and(is_ours) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// A listening socket of a mode.
fn listen(path: &Path, mode: Mode) -> io::Result<UnixListener> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // Before it has a name: the file takes its mode from the socket (net/unix/af_unix.c,
    // unix_bind_bsd), so that it is never open to others.
    rustix::fs::fchmod(&socket, mode)?;
    bind_to(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, 64)?;
    Ok(UnixListener::from(socket))
}

/// Whether the peer is root, this process's user, or of the group.
pub(super) fn may_use(stream: &tokio::net::UnixStream, group: Option<u32>) -> bool {
    let Ok(peer) = rustix::net::sockopt::socket_peercred(stream) else { return false };
    let uid = peer.uid;
    uid.is_root()
        || uid == rustix::process::geteuid()
        || group.is_some_and(|g| peer.gid.as_raw() == g || groups(stream).contains(&g))
}

/// The peer's further groups.
fn groups(stream: &tokio::net::UnixStream) -> Vec<u32> {
    use std::os::fd::AsRawFd;
    // NGROUPS_MAX is 65,536, but nobody has that many: whoever has more than this uses another way.
    let mut groups = vec![0_u32; 1024];
    let mut bytes = (groups.len() * size_of::<u32>()) as libc::socklen_t;
    // SAFETY: `groups` has room for `bytes` bytes and lives through the call; the kernel writes no
    // more than that and says in `bytes` how much it wrote.
    let result = unsafe {
        libc::getsockopt(
            stream.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERGROUPS,
            groups.as_mut_ptr().cast(),
            &raw mut bytes,
        )
    };
    groups.truncate(if result == 0 { bytes as usize / size_of::<u32>() } else { 0 });
    groups
}
