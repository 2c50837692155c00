//! The emulated SSD as one file of a FUSE file system.
//!
//! The file system is made with `fsopen`/`fsmount` and never attached, so no
//! path leads to it and nothing has to be unmounted: it ends with its last
//! open file. Direct I/O is asynchronous and writes run in parallel, and
//! `max_background` is raised above the loop device's depth: the default of 12
//! would cap it (kernel `fs/fuse/inode.c`).

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context, Result};
use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen,
    ReplyWrite, Request, Session, SessionACL, WriteFlags,
};
use rtvirtio_engine::emulated::{Completion, EmulatedSsd, Operation, Outcome};
use rtvirtio_engine::{SsdConfig, raise_thread_priority};
use rtvirtio_units::Bytes;
use rustix::fs::{Mode, OFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};

/// The file's inode; the root directory has 1.
const DISK: INodeNo = INodeNo(2);
/// Attributes never change.
const FOREVER: Duration = Duration::from_secs(1 << 30);

enum Reply {
    Read(ReplyData),
    Write(ReplyWrite),
}

impl Completion for Reply {
    fn complete(self, outcome: Outcome<'_>) {
        match (self, outcome) {
            (Self::Read(reply), Outcome::Read(data)) => reply.data(data),
            (Self::Write(reply), Outcome::Written(length)) => reply.written(length),
            (Self::Read(reply), Outcome::Written(_)) => reply.error(Errno::EIO),
            (Self::Write(reply), Outcome::Read(_)) => reply.error(Errno::EIO),
        }
    }
}

impl Reply {
    fn refuse(self) {
        match self {
            Self::Read(reply) => reply.error(Errno::EINVAL),
            Self::Write(reply) => reply.error(Errno::EINVAL),
        }
    }
}

struct DiskFs {
    name: String,
    ssd: Arc<EmulatedSsd<Reply>>,
}

impl DiskFs {
    fn attributes(&self, ino: INodeNo) -> FileAttr {
        let is_disk = ino == DISK;
        let size = if is_disk { self.ssd.size().get() } else { 0 };
        FileAttr {
            ino,
            size,
            blocks: size / 512,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind: if is_disk { FileType::RegularFile } else { FileType::Directory },
            perm: 0o600,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }
}

impl Filesystem for DiskFs {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let wanted = InitFlags::FUSE_ASYNC_DIO | InitFlags::FUSE_MAX_PAGES;
        if config.add_capabilities(wanted).is_err() {
            return Err(io::Error::from(io::ErrorKind::Unsupported));
        }
        // 512 > the loop device's 128 tags.
        let _ = config.set_max_background(512);
        let _ = config.set_congestion_threshold(512);
        let _ = config.set_max_write(1 << 20);
        Ok(())
    }

    fn lookup(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if parent == INodeNo::ROOT && name == OsStr::new(&self.name) {
            reply.entry(&FOREVER, &self.attributes(DISK), Generation(0));
        } else {
            reply.error(Errno::ENOENT);
        }
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&FOREVER, &self.attributes(ino));
    }

    fn open(&self, _req: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        // This also runs on the session's thread first of all: the right place to raise it.
        let _ = raise_thread_priority(55);
        // Without NOFLUSH a killed server waits for its own answer: at exit the kernel flushes
        // each file on its close, and closes /dev/fuse for good only after all of them.
        let flags = FopenFlags::FOPEN_DIRECT_IO
            | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES
            | FopenFlags::FOPEN_NOFLUSH;
        reply.opened(FileHandle(0), flags);
    }

    fn read(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let read = Operation::Read { offset, length: size };
        if let Err((_, reply)) = self.ssd.submit(read, Reply::Read(reply)) {
            reply.refuse();
        }
    }

    fn write(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        if let Err((_, reply)) =
            self.ssd.submit(Operation::Write { offset, data }, Reply::Write(reply))
        {
            reply.refuse();
        }
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        reply.ok();
    }
}

/// Makes the device so many times slower than its model; 1 undoes it.
pub(super) type SlowDown = Box<dyn Fn(u16)>;

/// Starts an emulated SSD and opens it as a file called `name`. The server's
/// threads live as long as the process.
///
/// # Errors
/// Without root or FUSE, with the remedy.
pub(super) fn open_emulated(
    name: &str,
    config: SsdConfig,
    size: Bytes,
    seed: u64,
) -> Result<(File, SlowDown)> {
    const REMEDY: &str = "an emulated SSD needs root and FUSE (modprobe fuse); \
                          `--raw DIR` (demo: `--device raw`) does without";
    let fuse_fd: OwnedFd = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/fuse")
        .context("open /dev/fuse")
        .context(REMEDY)?
        .into();
    let mount = mount_detached(&fuse_fd).context("make a FUSE file system").context(REMEDY)?;
    let ssd = Arc::new(EmulatedSsd::start(config, size, seed)?);
    let fs = DiskFs { name: name.to_owned(), ssd: Arc::clone(&ssd) };
    let session = Session::from_fd(fs, fuse_fd, SessionACL::Owner, fuser::Config::default())?;
    std::thread::Builder::new().name("ssd-fuse".to_owned()).spawn(move || session.run())?;
    let flags = OFlags::RDWR | OFlags::DIRECT | OFlags::CLOEXEC;
    let file = rustix::fs::openat(&mount, name, flags, Mode::empty())?;
    Ok((File::from(file), Box::new(move |times| ssd.slow_down(times))))
}

fn mount_detached(fuse_fd: &OwnedFd) -> rustix::io::Result<OwnedFd> {
    use rustix::mount::{fsconfig_create, fsconfig_set_string, fsmount, fsopen};
    let context = fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&context, "source", "rtvirtio")?;
    fsconfig_set_string(&context, "fd", fuse_fd.as_raw_fd().to_string())?;
    fsconfig_set_string(&context, "rootmode", "40000")?;
    fsconfig_set_string(&context, "user_id", "0")?;
    fsconfig_set_string(&context, "group_id", "0")?;
    fsconfig_create(&context)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
}
