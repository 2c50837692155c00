//! The tree as FUSE wants it.
//!
//! Files are as in /proc: their size is 0, what is read is settled when they are opened, and a write is a
//! transaction of its own: it carries the whole text, does what that says, and returns when that is done
//! or with its errno. Where in the file it is does not matter.

use std::ffi::OsStr;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, KernelConfig, LockOwner, OpenAccMode, OpenFlags, RenameFlags, ReplyAttr, ReplyData,
    ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite, Request, TimeOrNow, WriteFlags,
};
use rtvirtio_host::dataplane::{ControlClient, ControlFault};
use rtvirtio_units::DiskName;

use super::change::{self, Change, Refusal};
use super::files::{Node, Show};
use super::view::{FRESH, FRESH_WHOLE, View, Views};

/// How long a snapshot may take: the data plane waits for nothing to give it.
const SNAPSHOT_TIME: Duration = Duration::from_secs(2);
/// How long after a new device's move was refused it is tried again.
pub(super) const AGAIN: Duration = Duration::from_secs(1);
/// Of a write: more than [`change::MAX_TEXT`], so that a longer text is not cut into shorter ones.
const MAX_WRITE: u32 = 64 << 10;
/// The handle of a file that shows no view.
const NO_VIEW: FileHandle = FileHandle(0);

/// A data plane's tree.
pub(super) struct Tree {
    client: ControlClient,
    views: Mutex<Views>,
    /// Told when the move of a new device was refused, or new ones could not be looked for.
    refused: Condvar,
    /// Why the last write that failed did.
    error: Mutex<String>,
    /// Whose the files are.
    user: u32,
    group: u32,
    since: SystemTime,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Tree {
    pub(super) fn new(client: ControlClient) -> Self {
        Self {
            client,
            views: Mutex::new(Views::new()),
            refused: Condvar::new(),
            error: Mutex::default(),
            user: rustix::process::geteuid().as_raw(),
            group: rustix::process::getegid().as_raw(),
            since: SystemTime::now(),
        }
    }

    /// A view no older than that. Who asks meanwhile waits, and gets the same one.
    fn view(&self, fresh: Duration) -> Result<Arc<View>, ControlFault> {
        let mut views = lock(&self.views);
        let (now, client) = (Instant::now(), self.client.clone().with_timeout(SNAPSHOT_TIME));
        views.get(fresh, now, || client.text("/v1/snapshot").map(|text| (text, now.elapsed())))
    }

    fn fresh(&self) -> Result<Arc<View>, Errno> {
        self.view(FRESH).map_err(|fault| to_fuse(change::errno(&fault)))
    }

    /// That a node is there.
    fn check(&self, node: Node) -> Result<(), Errno> {
        match node.place.is_fixed() || node.is_in(&*self.fresh()?) {
            true => Ok(()),
            false => Err(Errno::ENOENT),
        }
    }

    /// Does what was written.
    fn write(&self, node: Node, bytes: &[u8]) -> Result<(), Errno> {
        let result = self.change(node, bytes);
        result.map_err(|refusal| {
            self.failed(&node.to_string(), &refusal);
            to_fuse(refusal.errno())
        })
    }

    fn change(&self, node: Node, bytes: &[u8]) -> Result<(), Refusal> {
        let take = node.file().and_then(|file| file.take).ok_or(Refusal::NotWritten)?;
        let view = self.view(Duration::ZERO)?;
        let change = Change::read(take, node.place, bytes, &view)?;
        let result = change.make(&self.client);
        // What has changed is seen at once, and so is what a change that failed has left.
        lock(&self.views).forget();
        match change {
            Change::Default(iothread) => {
                lock(&self.views).set_default(iothread);
                // Whatever has come since the view above is new.
                self.adopt(false);
            }
            Change::MoveDevice(device, _) | Change::MoveQueue(device, ..) if result.is_ok() => {
                lock(&self.views).settle(&device);
            }
            _ => {}
        }
        result
    }

    fn failed(&self, what: &str, refusal: &Refusal) {
        let hint = refusal.hint().map_or_else(String::new, |hint| format!("hint: {hint}\n"));
        *lock(&self.error) = format!("{what}: {refusal}\n{hint}");
    }

    /// A device has gone. Without this one that comes under its name before there is a view without it would be taken for it.
    pub(super) fn gone(&self, device: &DiskName) {
        lock(&self.views).device_gone(device);
    }

    /// Moves devices that have come to where new ones go; `again`: those too whose move was refused. What may pass, as that a
    /// front end just connects, is left to [`Self::keep_adopting`].
    pub(super) fn adopt(&self, again: bool) {
        let view = match self.view(Duration::ZERO) {
            Ok(view) => view,
            Err(fault) => {
                // That a device has come is said once: who cannot see it now looks again.
                if lock(&self.views).miss() {
                    self.failed("worker/default", &Refusal::from(fault));
                    self.refused.notify_one();
                }
                return;
            }
        };
        let new = lock(&self.views).take_new(&view, again);
        let Some((devices, iothread)) = new else { return };
        for device in devices {
            let change = Change::MoveDevice(device.name.clone(), iothread.clone());
            let Err(refusal) = change.make(&self.client) else { continue };
            // It is said once, however often it is tried.
            if device.refused.is_none() {
                self.failed(&format!("worker/default: device {}", device.name), &refusal);
            }
            if refusal.may_pass() {
                lock(&self.views).put_back(device, &iothread, Instant::now());
                self.refused.notify_one();
            }
        }
        lock(&self.views).forget();
    }

    /// Tries moves again that were refused, and looks again for devices that could not be looked for, for ever.
    pub(super) fn keep_adopting(&self) -> ! {
        loop {
            let views = lock(&self.views);
            drop(self.refused.wait_while(views, |views| !views.has_refused()));
            std::thread::sleep(AGAIN);
            self.adopt(true);
        }
    }

    fn attributes(&self, node: Node) -> FileAttr {
        let directory = node.is_directory();
        FileAttr {
            ino: INodeNo(node.inode()),
            // As in /proc: it is not known before it is read, and nobody is to trust it.
            size: 0,
            blocks: 0,
            atime: self.since,
            mtime: self.since,
            ctime: self.since,
            crtime: self.since,
            kind: kind(node),
            perm: node.mode(),
            nlink: if directory { 2 } else { 1 },
            uid: self.user,
            gid: self.group,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }

    fn open(&self, node: Node, flags: OpenFlags) -> Result<FileHandle, Errno> {
        let file = node.file().ok_or(Errno::EISDIR)?;
        let (reads, writes) = match flags.acc_mode() {
            OpenAccMode::O_RDONLY => (true, false),
            OpenAccMode::O_WRONLY => (false, true),
            OpenAccMode::O_RDWR => (true, true),
        };
        // Modes do not keep root away.
        if reads && file.show.is_none() || writes && file.take.is_none() {
            return Err(Errno::EACCES);
        }
        let fresh = match file.show {
            _ if !reads => return Ok(NO_VIEW),
            Some(Show::Error) => return Ok(NO_VIEW),
            Some(Show::Whole) => FRESH_WHOLE,
            _ => FRESH,
        };
        let view = self.view(fresh).map_err(|fault| to_fuse(change::errno(&fault)))?;
        if node.is_in(&view) { Ok(FileHandle(view.epoch)) } else { Err(Errno::ENOENT) }
    }

    /// At most `size` bytes from `offset` of what was opened.
    fn read(
        &self,
        node: Node,
        handle: FileHandle,
        offset: u64,
        size: u32,
    ) -> Result<Vec<u8>, Errno> {
        let part = |text: &str| {
            let from = text.len().min(usize::try_from(offset).unwrap_or(usize::MAX));
            let to = text.len().min(from.saturating_add(size as usize));
            text.as_bytes()[from..to].to_vec()
        };
        if handle == NO_VIEW {
            return Ok(part(&lock(&self.error)));
        }
        let view = lock(&self.views).held(handle.0).ok_or(Errno::ESTALE)?;
        node.content(&view).map(|text| part(&text)).ok_or(Errno::EIO)
    }
}

fn kind(node: Node) -> FileType {
    if node.is_directory() { FileType::Directory } else { FileType::RegularFile }
}

fn to_fuse(errno: rustix::io::Errno) -> Errno {
    Errno::from_i32(errno.raw_os_error())
}

fn node(inode: INodeNo) -> Result<Node, Errno> {
    Node::of_inode(inode.0).ok_or(Errno::ENOENT)
}

/// A [`Tree`] for the kernel.
pub(super) struct Mounted(pub(super) Arc<Tree>);

impl Filesystem for Mounted {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let _ = config.set_max_write(MAX_WRITE);
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let found = node(parent).and_then(|parent| {
            let name = name.to_str().filter(|_| parent.is_directory()).ok_or(Errno::ENOENT)?;
            let child = parent.place.child(name).ok_or(Errno::ENOENT)?;
            self.0.check(child).map(|()| child)
        });
        match found {
            Ok(node) => reply.entry(&FRESH, &self.0.attributes(node), Generation(0)),
            Err(errno) => reply.error(errno),
        }
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match node(inode).and_then(|node| self.0.check(node).map(|()| node)) {
            Ok(node) => reply.attr(&FRESH, &self.0.attributes(node)),
            Err(errno) => reply.error(errno),
        }
    }

    /// A shell empties what it redirects to; nothing else can be set.
    fn setattr(
        &self,
        _: &Request,
        inode: INodeNo,
        mode: Option<u32>,
        user: Option<u32>,
        group: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let is_emptied = size == Some(0) && mode.is_none() && user.is_none() && group.is_none();
        let written = |node: &Node| node.file().is_some_and(|file| file.take.is_some());
        match node(inode) {
            Ok(node) if is_emptied && written(&node) => {
                reply.attr(&FRESH, &self.0.attributes(node));
            }
            Ok(_) => reply.error(Errno::EPERM),
            Err(errno) => reply.error(errno),
        }
    }

    fn open(&self, _: &Request, inode: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        match node(inode).and_then(|node| self.0.open(node, flags)) {
            // Each read and write comes here as it is made; closing a file is nobody's business.
            Ok(handle) => {
                reply.opened(handle, FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_NOFLUSH);
            }
            Err(errno) => reply.error(errno),
        }
    }

    fn read(
        &self,
        _: &Request,
        inode: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        match node(inode).and_then(|node| self.0.read(node, handle, offset, size)) {
            Ok(part) => reply.data(&part),
            Err(errno) => reply.error(errno),
        }
    }

    fn write(
        &self,
        _: &Request,
        inode: INodeNo,
        _: FileHandle,
        _: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        match node(inode).and_then(|node| self.0.write(node, data)) {
            Ok(()) => reply.written(data.len() as u32),
            Err(errno) => reply.error(errno),
        }
    }

    fn opendir(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        match self.0.fresh() {
            Ok(view) => reply.opened(FileHandle(view.epoch), FopenFlags::empty()),
            Err(errno) => reply.error(errno),
        }
    }

    fn readdir(
        &self,
        _: &Request,
        inode: INodeNo,
        handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let view = lock(&self.0.views).held(handle.0).ok_or(Errno::ESTALE);
        let (node, view) = match node(inode).and_then(|node| Ok((node, view?))) {
            Ok(found) => found,
            Err(errno) => return reply.error(errno),
        };
        let dots = [(".".to_owned(), node), ("..".to_owned(), node.parent())];
        let entries = dots.into_iter().chain(node.place.entries(&view));
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        for (next, (name, node)) in (1..).zip(entries).skip(offset) {
            if reply.add(INodeNo(node.inode()), next, kind(node), name) {
                break;
            }
        }
        reply.ok();
    }

    fn mknod(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, _: u32, _: u32, reply: ReplyEntry) {
        reply.error(Errno::EPERM);
    }

    fn mkdir(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, _: u32, reply: ReplyEntry) {
        reply.error(Errno::EPERM);
    }

    fn unlink(&self, _: &Request, _: INodeNo, _: &OsStr, reply: ReplyEmpty) {
        reply.error(Errno::EPERM);
    }

    fn rmdir(&self, _: &Request, _: INodeNo, _: &OsStr, reply: ReplyEmpty) {
        reply.error(Errno::EPERM);
    }

    fn rename(
        &self,
        _: &Request,
        _: INodeNo,
        _: &OsStr,
        _: INodeNo,
        _: &OsStr,
        _: RenameFlags,
        reply: ReplyEmpty,
    ) {
        reply.error(Errno::EPERM);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Read, Write};
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::thread;

    use rtvirtio_units::IoThreadName;

    use super::super::view::tests::text;
    use super::*;

    /// A data plane with IOThreads a and b and these devices on a.
    #[derive(Default)]
    struct DataPlane {
        devices: Vec<&'static str>,
        /// Moves that it refuses yet, with this status.
        refusals: u32,
        status: u16,
        /// Snapshots that it has no place for yet.
        unseen: u32,
        /// Moves that it was asked for.
        asked: u32,
    }

    impl DataPlane {
        /// Answers one request.
        fn answer(&mut self, stream: UnixStream) {
            let (mut reader, mut line, mut length) = (BufReader::new(&stream), String::new(), 0);
            reader.read_line(&mut line).unwrap();
            let is_move = line.starts_with("PUT /v1/mapping/");
            while line != "\r\n" {
                line.clear();
                reader.read_line(&mut line).unwrap();
                if let Some(value) = line.strip_prefix("Content-Length: ") {
                    length = value.trim().parse().unwrap();
                }
            }
            let mut body = vec![0; length];
            reader.read_exact(&mut body).unwrap();
            let (status, body) = match is_move {
                true if self.refusals > 0 => {
                    self.refusals -= 1;
                    (self.status, r#"{"error":"it is busy"}"#.to_owned())
                }
                // What was asked for is what it is.
                true => (200, String::from_utf8(body).unwrap()),
                false if self.unseen > 0 => {
                    self.unseen -= 1;
                    (503, r#"{"error":"too many clients"}"#.to_owned())
                }
                false => {
                    const ON: &[&str] = &["a"];
                    let devices: Vec<_> = self.devices.iter().map(|name| (*name, ON)).collect();
                    (200, text(&["a", "b"], &devices))
                }
            };
            self.asked += u32::from(is_move);
            let head = format!("HTTP/1.0 {status} x\r\nContent-Length: {}\r\n\r\n", body.len());
            (&stream).write_all((head + &body).as_bytes()).unwrap();
        }
    }

    /// The tree of such a data plane, in which devices that come go to b.
    fn tree() -> (Arc<Tree>, Arc<Mutex<DataPlane>>, tempfile::TempDir) {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("s")).unwrap();
        let plane = Arc::new(Mutex::new(DataPlane { devices: vec!["x"], ..DataPlane::default() }));
        let served = Arc::clone(&plane);
        thread::spawn(move || {
            listener.incoming().for_each(|stream| lock(&served).answer(stream.unwrap()));
        });
        let tree = Tree::new(ControlClient::new(directory.path().join("s")));
        tree.view(Duration::ZERO).unwrap();
        lock(&tree.views).set_default(Some(IoThreadName::new("b").unwrap()));
        (Arc::new(tree), plane, directory)
    }

    fn come(plane: &Mutex<DataPlane>, refusals: u32, status: u16) {
        let mut plane = lock(plane);
        plane.devices.push("late");
        (plane.refusals, plane.status) = (refusals, status);
    }

    #[test]
    fn device_whose_move_is_refused_is_moved_later() {
        let (tree, plane, _directory) = tree();
        come(&plane, 2, 409);
        tree.adopt(false);
        let said = std::mem::take(&mut *lock(&tree.error));
        assert_eq!(said, "worker/default: device late: it is busy\n");
        let again = Arc::clone(&tree);
        thread::spawn(move || {
            again.keep_adopting();
        });
        let start = Instant::now();
        while lock(&plane).asked < 3 {
            assert!(start.elapsed() < Duration::from_secs(20), "it is not tried again");
            thread::sleep(Duration::from_millis(10));
        }
        // It was said once, and is moved once.
        tree.adopt(false);
        assert_eq!((lock(&plane).asked, &**lock(&tree.error)), (3, ""));
    }

    #[test]
    fn device_that_cannot_be_seen_when_it_comes_is_moved_later() {
        let (tree, plane, _directory) = tree();
        come(&plane, 0, 0);
        lock(&plane).unseen = 2;
        tree.adopt(false);
        let said = std::mem::take(&mut *lock(&tree.error));
        assert_eq!(said, "worker/default: too many clients\n");
        assert!(lock(&tree.views).has_refused());
        (0..3).for_each(|_| tree.adopt(true));
        // It was said once, and is moved once.
        assert_eq!((lock(&plane).asked, &**lock(&tree.error)), (1, ""));
        assert!(!lock(&tree.views).has_refused());
    }

    #[test]
    fn device_that_was_replaced_between_two_views_is_moved() {
        let (tree, plane, _directory) = tree();
        tree.adopt(false);
        assert_eq!(lock(&plane).asked, 0);
        tree.gone(&DiskName::new("x").unwrap());
        (0..2).for_each(|_| tree.adopt(false));
        assert_eq!(lock(&plane).asked, 1);
    }

    #[test]
    fn move_that_cannot_be_right_later_is_not_tried_again() {
        for status in [404, 422] {
            let (tree, plane, _directory) = tree();
            come(&plane, u32::MAX, status);
            (0..3).for_each(|_| tree.adopt(true));
            assert_eq!(lock(&plane).asked, 1, "{status}");
            assert!(!lock(&tree.views).has_refused());
        }
    }
}
