//! A namespace of an NVMe device through its generic device, `/dev/ngXnY`: each request is a command
//! that the driver hands to the device, past the kernel's block layer and page cache.
//!
//! Commands go through a ring of the IOThread ([`CommandRing`]), interrupted or, where the driver has
//! queues for that (`nvme.poll_queues=N` on the kernel's command line), polled. A command ends whole or
//! not at all. The kernel does not repeat what failed, as its block layer does: a controller that is
//! reset shows as I/O errors.
//!
//! Rights. Who opens the device for writing may send reads, writes, flushes and the like without
//! capabilities, if the controller has a log of the effects of its commands (Linux 6.2,
//! drivers/nvme/host/ioctl.c, `nvme_cmd_allowed`); else each takes `CAP_SYS_ADMIN`. A read and a flush
//! when the device is opened show which it is.
//!
//! Limits. A command is no longer than the controller takes (MDTS) and the kernel can map: the caller
//! cuts what is longer ([`Engine::transfer_limits`]). Addresses in memory are as they come: what the device does
//! not take, the kernel copies.
//!
//! Locks. The generic device has none, so they are taken on the block device of the same namespace
//! ([`claim`]): QEMU's, which QEMU and every engine of ours honour, and the kernel's own claim, which
//! keeps the host from mounting it, and us from serving what is mounted. Nothing keeps others from
//! sending commands to the generic device, or root from writing to the block device; nor is a
//! namespace known again that comes by a second controller without native multipath.

mod block;
mod command;
mod format;

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use io_uring::{opcode, squeue, types};
use rtvirtio_units::Bytes;
use rustix::io::Errno;

pub use command::result;
pub use format::FormatError;

use crate::file::{Access, Aligned, FileSource, ImageError, Lockable, last_error, open, set_flags};
use crate::{
    CommandRing, Commands, Engine, Geometry, Operation, Outcome, Request, ResizeError, Segment,
    SubmitContext, Token, TransferLimits,
};
use block::Block;
use command::{Command, Target};
use format::{Controller, Namespace};

/// `NVME_IOCTL_ID` and `NVME_IOCTL_ADMIN_CMD` of linux/nvme_ioctl.h.
const IOCTL_ID: libc::Ioctl = 0x4e40;
const IOCTL_ADMIN: libc::Ioctl = 0xc048_4e41_u32 as libc::Ioctl;
/// The admin command, and what it identifies.
const IDENTIFY: u8 = 0x06;
const OF_NAMESPACE: u32 = 0;
const OF_CONTROLLER: u32 = 1;
/// The most blocks of a command.
const MAX_BLOCKS: u64 = 1 << 16;
/// The most blocks of a discarded range.
const MAX_DISCARDED: u64 = u32::MAX as u64;

/// Why a namespace cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum NvmeError {
    /// It cannot be opened, or was handed over without the access that is needed.
    #[error(transparent)]
    File(#[from] ImageError),
    /// It is something else.
    #[error(
        "not a generic device of an NVMe namespace: write path = \"/dev/ng0n1\", for /dev/nvme0n1"
    )]
    NotGeneric,
    /// A system call about it failed.
    #[error("{0} the namespace")]
    Call(&'static str, #[source] Errno),
    /// What the kernel says about it cannot be read.
    #[error("read {path}")]
    Sysfs {
        /// Which file.
        path: PathBuf,
        /// Why not.
        #[source]
        source: std::io::Error,
    },
    /// The device does not answer the question what it is.
    #[error("identify the {what}: status {status:#x}")]
    Identify {
        /// The controller or the namespace.
        what: &'static str,
        /// What it said instead.
        status: i32,
    },
    /// It has no blocks that can be served.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// Its blocks are written in order only.
    #[error("the namespace is zoned: a virtio disk is written in any order")]
    Zoned,
    /// No queues without interrupts.
    #[error(
        "the NVMe driver has no queues to poll: add nvme.poll_queues=2 to the kernel's command line, or leave out poll = true"
    )]
    NoPollQueues,
    /// No ring for commands.
    #[error(
        "io_uring takes no commands: Linux 5.19 or later is needed, with kernel.io_uring_disabled=0"
    )]
    Ring(#[source] std::io::Error),
    /// The kernel wants a capability for a command.
    #[error(
        "the kernel does not allow commands without CAP_SYS_ADMIN: Linux 6.2 or later is needed, and a \
         controller with a log of its commands' effects; else write sandbox = false under [service], and start as root"
    )]
    Refused(#[source] Errno),
    /// A command failed.
    #[error("the {0} that tries the namespace out")]
    Try(&'static str, #[source] Errno),
    /// Its block device cannot be had, or not for us alone.
    #[error(
        "claim {path}: is it mounted, part of a volume group or array, or served already? If others see to it \
         that nobody else writes, write lock = \"off\""
    )]
    Claim {
        /// The block device.
        path: PathBuf,
        /// Why not.
        #[source]
        source: Errno,
    },
    /// What has the block device's name is another one.
    #[error("{0} is not the block device of this namespace")]
    OtherDevice(PathBuf),
}

/// What to open, and how.
#[derive(Debug)]
pub struct NvmeConfig {
    /// The generic device.
    pub source: FileSource,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether the device is looked at instead of interrupting.
    pub poll: bool,
}

/// Opens the block device of a namespace, so that it can be locked ([`NvmeEngine::lockable`]).
/// `exclusive`: claims it, for as long as the result is open.
///
/// # Errors
/// [`NvmeError::Claim`], and those of a device that is something else.
pub fn claim(generic: &OwnedFd, exclusive: bool) -> Result<OwnedFd, NvmeError> {
    Block::of(generic, Path::new(block::SYSFS))?.open(exclusive)
}

/// A disk that is a namespace.
#[derive(Debug)]
pub struct NvmeEngine {
    fd: OwnedFd,
    target: Target,
    controller: Controller,
    block: Block,
    capacity: AtomicU64,
    read_only: bool,
    commands: Commands,
}

impl NvmeEngine {
    /// Opens the namespace, asks what it is, and tries it out. It is not locked: see [`claim`].
    ///
    /// # Errors
    /// [`NvmeError`], with the remedy.
    pub fn open(config: NvmeConfig) -> Result<Self, NvmeError> {
        let NvmeConfig { source, read_only, poll } = config;
        let fd = match source {
            FileSource::Fd(fd) => fd,
            FileSource::Path(path) => open(&path, read_only)?,
        };
        let block = Block::of(&fd, Path::new(block::SYSFS))?;
        set_flags(&fd, false, read_only)?;
        block.check()?;
        let commands = match poll {
            true if !block.can_be_polled => return Err(NvmeError::NoPollQueues),
            true => Commands::Polled,
            false => Commands::Interrupt,
        };
        // SAFETY: without an argument; the answer is the namespace's number.
        let id = unsafe { libc::ioctl(fd.as_raw_fd(), IOCTL_ID) };
        let id =
            u32::try_from(id).map_err(|_| NvmeError::Call("ask the number of", last_error()))?;
        let namespace = Namespace::parse(&identify(&fd, id, OF_NAMESPACE, "namespace")?)?;
        let controller = Controller::parse(&identify(&fd, 0, OF_CONTROLLER, "controller")?);
        let engine = Self {
            target: Target { namespace: id, format: namespace.format },
            controller,
            block,
            capacity: AtomicU64::new(namespace.capacity),
            read_only: read_only || namespace.write_protected,
            commands,
            fd,
        };
        engine.try_out()?;
        Ok(engine)
    }

    /// The namespace, to be locked by its block device as [`claim`] opens it.
    #[must_use]
    pub fn lockable(&self, block: OwnedFd) -> Lockable {
        let access = if self.read_only { Access::Read } else { Access::Write };
        Lockable::new(Arc::new(block), access)
    }

    fn logical_block(&self) -> u32 {
        1 << self.target.format.block_shift
    }

    /// Reads the first block, and flushes: with the rights that this process has left.
    fn try_out(&self) -> Result<(), NvmeError> {
        let mut ring = CommandRing::new(self.commands, 2, 4).map_err(NvmeError::Ring)?;
        let length = self.logical_block() as usize;
        let buffer = Aligned::new(length, length).map_err(|e| NvmeError::Try("read", e))?;
        let segments = [buffer.segment(length)];
        let request = |operation, length, segments| Request {
            token: Token(0),
            operation,
            offset: 0,
            length,
            segments,
            buffer: None,
            scratch: Segment::EMPTY,
        };
        let read = request(Operation::Read, length as u64, &segments[..]);
        let flush = request(Operation::Flush, 0, &[]);
        for (name, request, is_tried) in [("read", read, true), ("flush", flush, self.flushes())] {
            if !is_tried {
                continue;
            }
            let failed = |error| NvmeError::Try(name, error);
            let entry = self.entry(&request).map_err(failed)?;
            // SAFETY: the buffer outlives the command, for which this waits.
            let _ = unsafe { ring.submission().push(&entry) };
            ring.wait().map_err(NvmeError::Ring)?;
            let ended = ring.take().map_or(Err(Errno::IO), |(_, raw)| result(raw));
            ended.map_err(|error| match error {
                Errno::ACCESS | Errno::PERM => NvmeError::Refused(error),
                error => failed(error),
            })?;
        }
        Ok(())
    }

    /// Whether there is something that a flush does.
    const fn flushes(&self) -> bool {
        !self.read_only && self.controller.write_cache
    }

    fn entry(&self, request: &Request<'_>) -> Result<squeue::Entry128, Errno> {
        let Command { kind, bytes } = Command::of(&self.target, request)?;
        let fd = types::Fd(self.fd.as_raw_fd());
        Ok(opcode::UringCmd80::new(fd, kind).cmd(bytes).build().user_data(request.token.0))
    }

    /// What a request comes to without a command, if it needs none.
    fn answer(&self, request: &Request<'_>) -> Option<Result<(), Errno>> {
        match request.operation {
            Operation::Read => None,
            Operation::Flush => (!self.flushes()).then_some(Ok(())),
            _ if self.read_only => Some(Err(Errno::ROFS)),
            Operation::Write { .. } => None,
            // A hint: whoever cannot does nothing.
            Operation::Discard => (!self.can_discard()).then_some(Ok(())),
            Operation::WriteZeroes { .. } => {
                (!self.can_write_zeroes()).then_some(Err(Errno::OPNOTSUPP))
            }
        }
    }

    const fn can_discard(&self) -> bool {
        self.controller.discard && self.block.max_discard > 0
    }

    const fn can_write_zeroes(&self) -> bool {
        self.controller.write_zeroes && self.block.max_zeroes > 0
    }
}

/// What the controller (`namespace` 0) or a namespace says of itself.
fn identify(
    fd: &OwnedFd,
    namespace: u32,
    of: u32,
    what: &'static str,
) -> Result<[u8; format::BYTES], NvmeError> {
    /// `struct nvme_passthru_cmd` of linux/nvme_ioctl.h.
    #[repr(C)]
    #[derive(Default)]
    struct Admin {
        opcode: u8,
        flags: u8,
        reserved: u16,
        namespace: u32,
        dwords_2_and_3: [u32; 2],
        metadata: u64,
        address: u64,
        metadata_bytes: u32,
        bytes: u32,
        dwords_10_to_15: [u32; 6],
        timeout_ms: u32,
        result: u32,
    }
    const { assert!(size_of::<Admin>() == 72) };

    let mut answer = [0_u8; format::BYTES];
    let mut admin = Admin {
        opcode: IDENTIFY,
        namespace,
        // The kernel writes there.
        address: answer.as_mut_ptr().expose_provenance() as u64,
        bytes: answer.len() as u32,
        dwords_10_to_15: [of, 0, 0, 0, 0, 0],
        ..Admin::default()
    };
    // SAFETY: the command and the answer, of the length that it names, outlive the call, which waits.
    let status = unsafe { libc::ioctl(fd.as_raw_fd(), IOCTL_ADMIN, &raw mut admin) };
    match status {
        0 => Ok(answer),
        status if status > 0 => Err(NvmeError::Identify { what, status }),
        _ => Err(match last_error() {
            error @ (Errno::ACCESS | Errno::PERM) => NvmeError::Refused(error),
            error => NvmeError::Call("identify", error),
        }),
    }
}

impl Engine for NvmeEngine {
    fn geometry(&self) -> Geometry {
        Geometry {
            capacity: Bytes::new(self.capacity.load(Ordering::Relaxed)),
            logical_block: self.logical_block(),
            physical_block: self.block.physical_block.max(self.logical_block()),
            read_only: self.read_only,
            // Both or none; a discard may do nothing.
            discard: !self.read_only && self.can_write_zeroes(),
        }
    }

    fn commands(&self) -> Option<Commands> {
        Some(self.commands)
    }

    fn transfer_limits(&self) -> TransferLimits {
        let most = most(self.target.format.block_shift, &self.controller, &self.block);
        // What does nothing does it at once.
        TransferLimits { discard: if self.can_discard() { most.discard } else { u64::MAX }, ..most }
    }

    fn start(&self, request: &Request<'_>, lent: &mut SubmitContext<'_, '_>) -> Outcome {
        if let Some(result) = self.answer(request) {
            return Outcome::Done(result);
        }
        let entry = match self.entry(request) {
            Ok(entry) => entry,
            Err(error) => return Outcome::Done(Err(error)),
        };
        let Some(commands) = &mut lent.commands else { return Outcome::Done(Err(Errno::IO)) };
        // SAFETY: the device is open as long as the engine lives, and the segments and the scratch
        // memory stay until the result is known; both outlast the request, by the trait's contract.
        match unsafe { commands.push(&entry) } {
            Ok(()) => Outcome::Started,
            Err(_) => Outcome::Busy,
        }
    }

    /// Whether it has that size is not known before it is asked.
    fn check_size(&self, _size: Bytes) -> Result<(), ResizeError> {
        Ok(())
    }

    /// Asks the device for its size again; a namespace is resized by whoever manages the device.
    fn resize(&self, capacity: Option<Bytes>) -> std::io::Result<Bytes> {
        let answer = identify(&self.fd, self.target.namespace, OF_NAMESPACE, "namespace");
        let found = answer.and_then(|answer| Ok(Namespace::parse(&answer)?));
        let found = found.map_err(std::io::Error::other)?;
        if found.format.block_shift != self.target.format.block_shift {
            // What its users know of it is void.
            return Err(Errno::STALE.into());
        }
        if capacity.is_some_and(|capacity| capacity.get() != found.capacity) {
            return Err(std::io::Error::other(ResizeError::Namespace));
        }
        self.capacity.store(found.capacity, Ordering::Relaxed);
        Ok(Bytes::new(found.capacity))
    }
}

/// What is started at once, in whole blocks.
fn most(block_shift: u8, controller: &Controller, block: &Block) -> TransferLimits {
    let blocks = |bytes: u64, blocks: u64| (bytes >> block_shift).clamp(1, blocks) << block_shift;
    TransferLimits {
        transfer: blocks(controller.max_bytes.min(block.max_transfer), MAX_BLOCKS),
        discard: blocks(block.max_discard, MAX_DISCARDED),
        zeroes: blocks(block.max_zeroes, MAX_BLOCKS),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    fn limits(max_bytes: u64, transfer: u64, discard: u64, zeroes: u64) -> [TransferLimits; 2] {
        let controller =
            Controller { max_bytes, write_cache: true, discard: true, write_zeroes: true };
        let block = Block::of_limits(transfer, discard, zeroes);
        [9, 12].map(|shift| most(shift, &controller, &block))
    }

    #[test]
    fn least_of_the_limits_is_taken_in_whole_blocks() {
        // 512 KiB by MDTS, 126 pages by the kernel.
        let [small, large] = limits(524_288, 516_096, 2_199_023_255_040, 524_288);
        let expected =
            TransferLimits { transfer: 516_096, discard: 2_199_023_255_040, zeroes: 524_288 };
        assert_eq!(small, expected);
        assert_eq!(large, TransferLimits { discard: 2_199_023_251_456, ..expected });
        let [small, large] = limits(8_192, 516_096, 10_000, 70_000);
        assert_eq!(small, TransferLimits { transfer: 8_192, discard: 9_728, zeroes: 69_632 });
        assert_eq!(large, TransferLimits { transfer: 8_192, discard: 8_192, zeroes: 69_632 });
        // What a command can say: 65,536 blocks, 2^32 - 1 of a discard; and one block at least.
        let [small, large] = limits(u64::MAX, u64::MAX, u64::MAX, u64::MAX);
        let discard = 4_294_967_295 * 512;
        assert_eq!(small, TransferLimits { transfer: 33_554_432, discard, zeroes: 33_554_432 });
        assert_eq!(large.transfer, 268_435_456);
        let [_, large] = limits(4_096, 0, 0, 0);
        assert_eq!(large, TransferLimits { transfer: 4_096, discard: 4_096, zeroes: 4_096 });
    }

    #[test]
    fn what_is_no_generic_device_is_refused_with_a_remedy() {
        let open = |path: &str| {
            let source = FileSource::Path(path.into());
            NvmeEngine::open(NvmeConfig { source, read_only: false, poll: false }).unwrap_err()
        };
        for path in ["/dev/null", env!("CARGO_MANIFEST_PATH")] {
            let error = open(path);
            assert!(matches!(error, NvmeError::NotGeneric), "{path}: {error}");
            assert!(error.to_string().contains("/dev/ng0n1"), "{error}");
        }
        assert!(matches!(open("/dev/ng-none"), NvmeError::File(_)));
        let null = std::fs::File::open("/dev/null").unwrap();
        let claimed = claim(&null.as_fd().try_clone_to_owned().unwrap(), true);
        assert!(matches!(claimed, Err(NvmeError::NotGeneric)));
    }
}
