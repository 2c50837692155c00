//! What the process may do while it serves: hardly anything.
//!
//! Problem: front ends are hostile, and a fault in what reads their messages and rings must not
//! be worth more than the disks that are served anyhow.
//!
//! Approach: all that needs rights is opened first (`plane::Opened`). Then, while there is one
//! thread, `Identity::assume` gives up the user, the groups and all capabilities for good, and
//! [`confine`] leaves the system calls of `filter`. Threads that start later inherit all of it. What
//! is opened from then on is opened with the service user's rights, or handed over
//! (`rtvirtio ctl device add`).
//!
//! What it does not do: seccomp sees no io_uring request. A process that was taken over could use
//! its rings to open files as the service user, or sockets: against that the systemd unit has
//! `PrivateNetwork=` and `ProtectSystem=`.
//!
//! The guard of vCPUs has a list of its own ([`confine_guard`]).
//!
//! Properties (tests/sandbox.rs): `forbidden_system_call_ends_the_process`,
//! `allowed_system_calls_pass`, `guard_may_move_vcpus_and_little_else`.

mod filter;
mod user;

use std::path::Path;

use caps::{CapSet, Capability, CapsHashSet};
use rustix::io::Errno;
use rustix::process::{Gid, Resource, Rlimit, Uid, getrlimit, setrlimit};
use seccompiler::BpfProgram;

pub use user::{Identity, UserError};

/// Descriptors that root allows: each of 1024 devices of 64 queues has a kick, a call and an error
/// for each queue.
const FILES: u64 = 1 << 18;
/// The priority of an emulated disk's thread.
const REAL_TIME: u64 = 60;

/// Why the process cannot be confined.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SandboxError {
    /// Rights are a thread's: one that is there already would keep them.
    #[error("there are {0} threads already")]
    Threads(usize),
    /// The kernel refuses the user or the groups.
    #[error("cannot become user {user}")]
    User {
        /// The user.
        user: String,
        /// Why.
        source: Errno,
    },
    /// The kernel refuses the capabilities.
    #[error("cannot give up capabilities")]
    Capabilities(#[source] caps::errors::CapsError),
    /// The process would still have rights.
    #[error("capabilities are left")]
    Left,
    /// The filter is wrong.
    #[error("cannot compile the list of system calls")]
    Filter(#[source] seccompiler::BackendError),
    /// The kernel has no seccomp, or refuses it.
    #[error("cannot restrict system calls")]
    Seccomp(#[source] seccompiler::Error),
}

/// Raises the limits that a data plane needs as far as the process may: open files, memory that
/// is locked because guests' memory is registered, the size of files, and priority for what stands for
/// hardware (`emulated`). Does its best: who lacks them later is told then.
///
/// A limit on the size of files that stays is no reason to die: a write beyond it fails with `EFBIG`, which its guest
/// sees as an I/O error. By default the kernel sends SIGXFSZ, and one guest's write would end the process for all.
pub fn raise_limits(emulated: bool) {
    let raise = |resource, wanted: Option<u64>| {
        let Rlimit { current, maximum } = getrlimit(resource);
        let least =
            |a: Option<u64>, b: Option<u64>| a.map_or(b, |a| Some(b.map_or(a, |b| a.min(b))));
        if current.is_some() && least(current, wanted) == current {
            let all = Rlimit { current: wanted, maximum: wanted };
            let own = Rlimit { current: least(maximum, wanted), maximum };
            // Only root may raise the maximum.
            let _ = setrlimit(resource, all).or_else(|_| setrlimit(resource, own));
        }
    };
    raise(Resource::Nofile, Some(FILES));
    raise(Resource::Memlock, None);
    raise(Resource::Fsize, None);
    // SAFETY: no handler of ours is involved; the signal is ignored.
    let _ = unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    if emulated {
        raise(Resource::Rtprio, Some(REAL_TIME));
    }
}

/// Gives up all capabilities but `CAP_SYS_NICE`, which places threads of other users; for good.
///
/// # Errors
/// [`SandboxError`]: then the process must end, for some may be gone and others not.
pub fn keep_nice() -> Result<(), SandboxError> {
    keep(None, Some(Capability::CAP_SYS_NICE))
}

/// As [`confine`], for the guard of vCPUs: it may find threads and place them.
///
/// # Errors
/// [`SandboxError::Filter`], [`SandboxError::Seccomp`].
pub fn confine_guard() -> Result<(), SandboxError> {
    apply(&filter::guard().map_err(SandboxError::Filter)?)
}

/// Gives up all capabilities, and with `identity` the user and its groups; for good.
///
/// # Errors
/// [`SandboxError`]: then the process must end, for some may be gone and others not.
pub fn drop_privileges(identity: Option<&Identity>) -> Result<(), SandboxError> {
    keep(identity, None)
}

fn keep(identity: Option<&Identity>, only: Option<Capability>) -> Result<(), SandboxError> {
    let threads = std::fs::read_dir("/proc/self/task").map_or(1, Iterator::count);
    if threads != 1 {
        return Err(SandboxError::Threads(threads));
    }
    // No program that is executed later gets rights back, if any could be.
    let failed = |error| SandboxError::Capabilities(error);
    let has = |capability| caps::has_cap(None, CapSet::Effective, capability).map_err(failed);
    if has(Capability::CAP_SETPCAP)? {
        caps::clear(None, CapSet::Bounding).map_err(failed)?;
    }
    if let Some(identity) = identity {
        become_user(identity)
            .map_err(|source| SandboxError::User { user: identity.name().to_owned(), source })?;
    }
    let mut kept = CapsHashSet::new();
    if let Some(only) = only
        && has(only)?
    {
        kept.insert(only);
    }
    let none = CapsHashSet::new();
    for (set, left) in [
        (CapSet::Ambient, &none),
        (CapSet::Inheritable, &none),
        (CapSet::Effective, &kept),
        (CapSet::Permitted, &kept),
    ] {
        caps::set(None, set, left).map_err(failed)?;
        if caps::read(None, set).map_err(failed)? != *left {
            return Err(SandboxError::Left);
        }
    }
    Ok(())
}

/// Of this thread, which is the only one.
fn become_user(identity: &Identity) -> Result<(), Errno> {
    let (uid, gid) = (Uid::from_raw(identity.uid()), Gid::from_raw(identity.gid()));
    // The groups first: a user without rights cannot leave them.
    rustix::thread::set_thread_groups(&[])?;
    rustix::thread::set_thread_res_gid(gid, gid, gid)?;
    // The kernel forgets it with the user (kernel/cred.c, commit_creds).
    let with_parent = rustix::process::parent_process_death_signal()?;
    rustix::thread::set_thread_res_uid(uid, uid, uid)?;
    rustix::process::set_parent_process_death_signal(with_parent)
}

/// Ends the process at any system call that a data plane does not make, in all threads and those
/// to come.
///
/// # Errors
/// [`SandboxError::Filter`], [`SandboxError::Seccomp`].
pub fn confine() -> Result<(), SandboxError> {
    let programs = filter::programs().map_err(SandboxError::Filter)?;
    programs.iter().try_for_each(apply)
}

fn apply(program: &BpfProgram) -> Result<(), SandboxError> {
    // Sets no_new_privs too.
    seccompiler::apply_filter_all_threads(program).map_err(SandboxError::Seccomp)
}

/// Gives what is at `path` to the service's user.
///
/// # Errors
/// The kernel's.
pub(crate) fn give(path: &Path, identity: &Identity, group: Option<u32>) -> std::io::Result<()> {
    give_socket(path, Some(identity.uid()), Some(group.unwrap_or_else(|| identity.gid())))
}

/// Changes the owner or group of a socket that was just made. Others may write to its directory and put
/// something else in its place: nothing but a socket of this user with one name is touched.
///
/// # Errors
/// The kernel's; `EPERM` for what is no such socket.
pub fn give_socket(path: &Path, user: Option<u32>, group: Option<u32>) -> std::io::Result<()> {
    use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, Uid};

    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let found = rustix::fs::openat(CWD, path, flags, Mode::empty())?;
    let stat = rustix::fs::fstat(&found)?;
    let is_socket = FileType::from_raw_mode(stat.st_mode) == FileType::Socket;
    if !is_socket || stat.st_uid != rustix::process::geteuid().as_raw() || stat.st_nlink != 1 {
        return Err(std::io::ErrorKind::PermissionDenied.into());
    }
    // A service that may not give files away need not, where its group is the one that is wanted.
    let is_theirs = |wanted: Option<u32>, now: u32| wanted.is_none_or(|wanted| wanted == now);
    if is_theirs(user, stat.st_uid) && is_theirs(group, stat.st_gid) {
        return Ok(());
    }
    let (user, group) = (user.map(Uid::from_raw), group.map(Gid::from_raw));
    Ok(rustix::fs::chownat(&found, "", user, group, AtFlags::EMPTY_PATH)?)
}

#[cfg(test)]
mod tests {
    use rtvirtio_vhost::server::Listener;

    use super::give_socket;

    #[test]
    fn nothing_but_an_own_new_socket_is_given_away() {
        if !rustix::process::geteuid().is_root() {
            return rtvirtio_engine::testing::skipped("needs root, to give a file away");
        }
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let _listener = Listener::bind(&at("disk.sock"), 0o660).unwrap();
        std::fs::write(at("precious"), "").unwrap();
        std::os::unix::fs::symlink(at("precious"), at("link")).unwrap();
        std::os::unix::fs::symlink(at("disk.sock"), at("to-socket")).unwrap();
        let owner =
            |name: &str| std::os::unix::fs::MetadataExt::uid(&std::fs::metadata(at(name)).unwrap());
        for name in ["precious", "link", "to-socket"] {
            let refused = give_socket(&at(name), Some(65_534), Some(65_534)).unwrap_err();
            assert_eq!(refused.kind(), std::io::ErrorKind::PermissionDenied, "{name}");
        }
        give_socket(&at("disk.sock"), Some(65_534), None).unwrap();
        assert_eq!((owner("precious"), owner("disk.sock")), (0, 65_534));
        // Of somebody else by now, and a socket with two names may be anybody's.
        assert!(give_socket(&at("disk.sock"), Some(0), None).is_err());
        let _two = Listener::bind(&at("two.sock"), 0o600).unwrap();
        std::fs::hard_link(at("two.sock"), at("again.sock")).unwrap();
        assert!(give_socket(&at("two.sock"), Some(65_534), None).is_err());
    }
}
