//! TAP devices of the host (kernel `Documentation/networking/tuntap.rst`, `drivers/net/tun.c`).
//!
//! One that is there is attached to: its bridge, address and state are its owner's. Each pair of
//! virtqueues has a file of its own; with several of them the TAP has to be made with `multi_queue`.

use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rtvirtio_frames::{features, header};
use rtvirtio_virtq::Segment;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

mod batch;

pub(crate) use batch::Batch;

/// Longest name of a network device (`IFNAMSIZ` less its terminator).
pub(crate) const MAX_NAME: usize = 15;

/// How long to try to attach, and how often.
pub(crate) const ATTACH_TIME: Duration = Duration::from_secs(2);
pub(crate) const ATTACH_PAUSE: Duration = Duration::from_millis(10);

// linux/if_tun.h
const TUNSETIFF: libc::Ioctl = 0x4004_54ca;
const TUNGETIFF: libc::Ioctl = 0x8004_54d2;
const TUNSETOFFLOAD: libc::Ioctl = 0x4004_54d0;
const TUNSETQUEUE: libc::Ioctl = 0x4004_54d9;
const TUNSETVNETHDRSZ: libc::Ioctl = 0x4004_54d8;
const TUNSETVNETLE: libc::Ioctl = 0x4004_54dc;
const IFF_TAP: libc::c_short = 0x0002;
const IFF_MULTI_QUEUE: libc::c_short = 0x0100;
const IFF_ATTACH_QUEUE: libc::c_short = 0x0200;
const IFF_DETACH_QUEUE: libc::c_short = 0x0400;
const IFF_NO_PI: libc::c_short = 0x1000;
const IFF_VNET_HDR: libc::c_short = 0x4000;
const TUN_F_CSUM: u32 = 0x01;
const TUN_F_TSO4: u32 = 0x02;
const TUN_F_TSO6: u32 = 0x04;
const TUN_F_TSO_ECN: u32 = 0x08;

/// The ioctl that a TAP's offloads are set by in the midst of service: for whoever filters system calls.
pub(crate) const SET_OFFLOADS: u32 = TUNSETOFFLOAD as u32;
/// The one by which the kernel learns that it is to hand over frames by a queue, or not.
pub(crate) const SET_QUEUE: u32 = TUNSETQUEUE as u32;
/// What [`Tap::adopt`] asks a queue, and tells it.
pub(crate) const ADOPT: [u32; 3] = [TUNGETIFF as u32, TUNSETVNETHDRSZ as u32, TUNSETVNETLE as u32];

/// Why a TAP cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// The host has no TAPs.
    #[error("open /dev/net/tun")]
    Open(#[source] Errno),
    /// There is no such device.
    #[error(
        "there is no network device {0} (make it: ip tuntap add dev {0} mode tap vnet_hdr{1}; ip link set {0} up)"
    )]
    Missing(String, &'static str),
    /// It is no TAP.
    #[error("{0} is no TAP")]
    NotATap(String),
    /// What was handed over is no queue of it, or not as it has to be.
    #[error(
        "the descriptor is no queue of {0} with IFF_TAP | IFF_NO_PI | IFF_VNET_HDR: rtvirtio ctl nic add makes one"
    )]
    NotAQueue(String),
    /// Its queues do not fit.
    #[error(
        "{name} has {}: make it {} multi_queue, for {queues} pairs of queues",
        if *.multi { "several queues" } else { "one queue" },
        if *.multi { "without" } else { "with" }
    )]
    Queues {
        /// The TAP.
        name: String,
        /// Whether it has several.
        multi: bool,
        /// Pairs that are wanted.
        queues: u16,
    },
    /// The kernel refuses.
    #[error("attach to {0}: is it in use by QEMU or another program?")]
    Attach(String, #[source] Errno),
}

/// One queue of a TAP.
#[derive(Debug)]
pub struct Tap(OwnedFd);

/// A request of `TUNSETIFF`: `struct ifreq` of `linux/if.h`, as far as it is read.
#[repr(C)]
struct Request {
    name: [u8; 16],
    flags: libc::c_short,
    rest: [u8; 22],
}

fn attribute(name: &str, file: &str) -> Option<String> {
    let path = Path::new("/sys/class/net").join(name).join(file);
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// The MTU of a network device.
#[must_use]
pub fn mtu(name: &str) -> Option<u16> {
    attribute(name, "mtu")?.parse().ok()
}

impl Tap {
    /// Attaches to the TAP of this name: one file for each pair of queues. The kernel lets go of the queues of a
    /// server that was killed a moment after its end, for its rings are taken down aside: a busy one is tried again.
    ///
    /// # Errors
    /// [`TapError`]
    pub fn attach(name: &str, queues: u16) -> Result<Vec<Self>, TapError> {
        let multi = Self::examine(name, queues)?;
        let several = if multi { IFF_MULTI_QUEUE } else { 0 };
        let begun = Instant::now();
        // The kernel lets anybody join a TAP with several queues, and then shares its frames out: whether it has one
        // already, its carrier tells, if it is up.
        let is_free = || !multi || attribute(name, "carrier").is_none_or(|carrier| carrier != "1");
        let attach = || {
            is_free()
                .then_some(())
                .ok_or_else(|| TapError::Attach(name.to_owned(), Errno::BUSY))
                .and_then(|()| (0..queues).map(|_| Self::attach_one(name, several)).collect())
        };
        loop {
            match attach() {
                Err(TapError::Attach(_, Errno::BUSY)) if begun.elapsed() < ATTACH_TIME => {
                    std::thread::sleep(ATTACH_PAUSE);
                }
                attached => return attached,
            }
        }
    }

    /// Whether there is a TAP of this name that may have so many pairs of queues, and if so, whether it may have several. It is not
    /// attached to: who has it by now may be the data plane.
    ///
    /// # Errors
    /// [`TapError`]
    pub fn examine(name: &str, queues: u16) -> Result<bool, TapError> {
        let multi_queue = if queues > 1 { " multi_queue" } else { "" };
        let missing = || TapError::Missing(name.to_owned(), multi_queue);
        if name.is_empty() || name.len() > MAX_NAME || name.contains(['/', '\0']) {
            return Err(missing());
        }
        if attribute(name, "ifindex").is_none() {
            return Err(missing());
        }
        // 0x1002, as `%x` of the kernel's own.
        let flags = attribute(name, "tun_flags")
            .and_then(|text| i32::from_str_radix(text.trim_start_matches("0x"), 16).ok());
        let flags = flags.ok_or_else(|| TapError::NotATap(name.to_owned()))?;
        if flags & i32::from(IFF_TAP) == 0 {
            return Err(TapError::NotATap(name.to_owned()));
        }
        let multi = flags & i32::from(IFF_MULTI_QUEUE) != 0;
        if queues > 1 && !multi {
            return Err(TapError::Queues { name: name.to_owned(), multi, queues });
        }
        Ok(multi)
    }

    /// Goes on with a queue that a process before this one has attached to, of the TAP of this name.
    ///
    /// # Errors
    /// It is of another TAP, or of none.
    pub(crate) fn adopt(fd: OwnedFd, name: &str) -> Result<Self, TapError> {
        let other = || TapError::NotAQueue(name.to_owned());
        let mut request = Request { name: [0; 16], flags: 0, rest: [0; 22] };
        // SAFETY: TUNGETIFF writes a `struct ifreq`, which outlives the call.
        check(unsafe { libc::ioctl(fd.as_raw_fd(), TUNGETIFF, &raw mut request) })
            .map_err(|_| other())?;
        let found = request.name.split(|byte| *byte == 0).next().unwrap_or_default();
        let kind = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR;
        if found != name.as_bytes() || request.flags & kind != kind {
            return Err(other());
        }
        // An IOThread reads from it, and waits for nobody.
        let is_waiting = rustix::io::ioctl_fionbio(&fd, true);
        let tap = is_waiting
            .and_then(|()| Self::prepare(fd))
            .map_err(|errno| TapError::Attach(name.to_owned(), errno))?;
        if request.flags & IFF_DETACH_QUEUE != 0 {
            tap.set_attached(true).map_err(|errno| TapError::Attach(name.to_owned(), errno))?;
        }
        Ok(tap)
    }

    /// Makes a TAP that is gone with its last file: in the network namespace of the calling thread.
    ///
    /// # Errors
    /// Without the right to.
    #[cfg(test)]
    pub(crate) fn create(name: &str, queues: u16) -> Result<Vec<Self>, TapError> {
        let several = if queues > 1 { IFF_MULTI_QUEUE } else { 0 };
        (0..queues).map(|_| Self::attach_one(name, several)).collect()
    }

    fn attach_one(name: &str, several: libc::c_short) -> Result<Self, TapError> {
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let fd = rustix::fs::open("/dev/net/tun", flags, Mode::empty()).map_err(TapError::Open)?;
        let refused = |errno| TapError::Attach(name.to_owned(), errno);
        let c_name = CString::new(name).map_err(|_| refused(Errno::INVAL))?;
        let mut request = Request {
            name: [0; 16],
            flags: IFF_TAP | IFF_NO_PI | IFF_VNET_HDR | several,
            rest: [0; 22],
        };
        let bytes = c_name.as_bytes();
        request.name[..bytes.len()].copy_from_slice(bytes);
        // SAFETY: TUNSETIFF reads and writes a `struct ifreq`, which outlives the call.
        let result = unsafe { libc::ioctl(fd.as_raw_fd(), TUNSETIFF, &raw mut request) };
        check(result).map_err(refused)?;
        let tap = Self::prepare(fd).map_err(refused)?;
        tap.set_offloads(0).map_err(refused)?;
        Ok(tap)
    }

    fn prepare(fd: OwnedFd) -> Result<Self, Errno> {
        for (call, value) in [(TUNSETVNETHDRSZ, header::BYTES as libc::c_int), (TUNSETVNETLE, 1)] {
            // SAFETY: both read an int, which outlives the call.
            check(unsafe { libc::ioctl(fd.as_raw_fd(), call, &raw const value) })?;
        }
        Ok(Self(fd))
    }

    /// From now on frames come with what a driver that has `negotiated` these features can take: without a
    /// checksum, or to be segmented.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(crate) fn set_offloads(&self, negotiated: u64) -> Result<(), Errno> {
        let has = |feature: u64, flag: u32| if negotiated & feature != 0 { flag } else { 0 };
        let mut flags = has(features::GUEST_CSUM, TUN_F_CSUM);
        // Without a checksum nothing is segmented (virtio 1.2, 5.1.3.1).
        if flags != 0 {
            flags |= has(features::GUEST_TSO4, TUN_F_TSO4) | has(features::GUEST_TSO6, TUN_F_TSO6);
            if flags & (TUN_F_TSO4 | TUN_F_TSO6) != 0 {
                flags |= has(features::GUEST_ECN, TUN_F_TSO_ECN);
            }
        }
        // SAFETY: TUNSETOFFLOAD takes an integer.
        check(unsafe { libc::ioctl(self.0.as_raw_fd(), TUNSETOFFLOAD, libc::c_ulong::from(flags)) })
    }

    /// Has the kernel hand over frames by this one of several queues, or by the others alone (`tun_set_queue`). It waits for a
    /// grace period of RCU: an IOThread does not call it.
    ///
    /// # Errors
    /// The queue is as it is to be already, or the TAP has one alone.
    pub(crate) fn set_attached(&self, is_attached: bool) -> Result<(), Errno> {
        let flags = if is_attached { IFF_ATTACH_QUEUE } else { IFF_DETACH_QUEUE };
        let request = Request { name: [0; 16], flags, rest: [0; 22] };
        // SAFETY: TUNSETQUEUE reads a `struct ifreq`, which outlives the call.
        check(unsafe { libc::ioctl(self.0.as_raw_fd(), TUNSETQUEUE, &raw const request) })
    }

    /// Sends a frame with its header.
    ///
    /// # Errors
    /// The kernel takes no such frame, or none now.
    ///
    /// # Safety
    /// The segments are mapped.
    pub(crate) unsafe fn send(&self, parts: &[Segment]) -> Result<usize, Errno> {
        // SAFETY: a segment is a `struct iovec`; the caller vouches for what it points to.
        let sent = unsafe {
            libc::writev(self.0.as_raw_fd(), parts.as_ptr().cast(), parts.len() as libc::c_int)
        };
        length(sent)
    }

    /// Receives a frame with its header; what does not fit into `parts` is lost.
    ///
    /// # Errors
    /// [`Errno::AGAIN`]: there is none now.
    ///
    /// # Safety
    /// The segments are mapped and may be written.
    pub(crate) unsafe fn receive(&self, parts: &[Segment]) -> Result<usize, Errno> {
        // SAFETY: as above.
        let received = unsafe {
            libc::readv(self.0.as_raw_fd(), parts.as_ptr().cast(), parts.len() as libc::c_int)
        };
        length(received)
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn check(result: libc::c_int) -> Result<(), Errno> {
    if result == 0 { Ok(()) } else { Err(last_error()) }
}

fn length(result: libc::ssize_t) -> Result<usize, Errno> {
    usize::try_from(result).map_err(|_| last_error())
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_tap_is_refused_with_the_remedy() {
        let missing = Tap::attach("rtv-not-there", 2).unwrap_err().to_string();
        assert!(missing.contains("ip tuntap add dev rtv-not-there mode tap vnet_hdr multi_queue"));
        for name in ["", "../lo", "a-name-that-is-too-long"] {
            assert!(matches!(Tap::attach(name, 1), Err(TapError::Missing(..))), "{name:?}");
        }
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(matches!(Tap::adopt(file.into(), "tap0"), Err(TapError::NotAQueue(_))));
        if attribute("lo", "ifindex").is_some() {
            assert!(matches!(Tap::attach("lo", 1), Err(TapError::NotATap(_))));
        }
    }
}
