//! `rtvirtio ctl device`.
//!
//! Image and socket are opened by whoever runs the command and handed over: the data plane needs
//! no right to either path.

use std::fs::{self, File, OpenOptions};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use rtvirtio_dataplane::sandbox::give_socket;
use rtvirtio_host::dataplane::{ControlClient, ControlFault};
use rtvirtio_spec::control::{AddDevice, Handed, Resize};
use rtvirtio_spec::mapping::{Entry, read};
use rtvirtio_spec::serve::wire;
use rtvirtio_units::{DiskName, IoThreadName, Name, NameError, VmName};
use rtvirtio_vhost::server::{Bound, bind, is_answered};
use rustix::io::Errno;
use rustix::net::SocketType;

use super::qos::QosArgs;

#[derive(clap::Subcommand)]
pub(super) enum Command {
    /// Show them
    List,
    /// Add one: opens the image and makes the socket as this user, and hands both over
    Add(Box<AddArgs>),
    /// Disconnect its front end and remove it
    Remove {
        /// Its name
        #[arg(value_parser = super::disk)]
        name: DiskName,
    },
    /// Look at its image's size again, or change the size, and tell the guest
    Resize {
        /// Its name
        #[arg(value_parser = super::disk)]
        name: DiskName,
        /// The new size, such as 10G; left out: what the image now has
        size: Option<String>,
        /// Let it be smaller than now: what lies behind its new end is lost
        #[arg(long)]
        shrink: bool,
    },
}

#[derive(clap::Args)]
pub(super) struct AddArgs {
    /// Its name
    #[arg(value_parser = super::disk)]
    name: DiskName,
    /// Whose it is
    #[arg(long, value_parser = vm)]
    vm: VmName,
    /// Where its front end connects: the socket is made here
    #[arg(long, value_name = "PATH")]
    listen: PathBuf,
    #[command(flatten)]
    data: DataArgs,
    /// Its size, of a disk in RAM or an emulated one, or of a part of an image, such as 64M
    #[arg(long)]
    size: Option<String>,
    /// First byte of the part of an image that is the disk, such as 1M; with --size
    #[arg(long, value_name = "SIZE", requires = "image", requires = "size")]
    offset: Option<String>,
    /// Virtqueues, 1 to 64
    #[arg(long, value_name = "N", default_value_t = 1)]
    queues: u32,
    /// IOThreads that take its queues in turn; all if left out
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_parser = super::iothread)]
    iothreads: Vec<IoThreadName>,
    /// File with the mapping of queues to IOThreads: QEMU's JSON, libvirt's XML or TOML
    #[arg(long, value_name = "FILE", conflicts_with = "iothreads")]
    mapping: Option<PathBuf>,
    /// Refuse writes
    #[arg(long)]
    read_only: bool,
    /// What the guest sees as serial number, at most 20 characters; the name if left out
    #[arg(long)]
    serial: Option<String>,
    /// Make each write durable before it completes
    #[arg(long)]
    no_write_cache: bool,
    /// Go through the host's page cache
    #[arg(long, requires = "image")]
    buffered: bool,
    /// Bytes of a logical block: 512, 1024, 2048 or 4096 [default: a block device's own, 512 of a file]
    #[arg(long, value_name = "BYTES", requires = "image")]
    block_size: Option<u32>,
    /// Its trust domain: it shares IOThreads with devices of the same one only [default: that of all devices that
    /// name none]
    #[arg(long, value_name = "NAME", value_parser = super::name)]
    trust: Option<Name>,
    /// Most guest memory that the front end may share, such as 64G [default: what the host has]
    #[arg(long, value_name = "SIZE")]
    max_memory: Option<String>,
    /// Lock the image only while a front end is connected: for live migration
    #[arg(long, requires = "image")]
    lock_session: bool,
    /// Do not lock the image: for parts of one image
    #[arg(long, requires = "image", conflicts_with = "lock_session")]
    no_lock: bool,
    #[command(flatten)]
    qos: QosArgs,
}

/// Where its data lies.
#[derive(clap::Args)]
#[group(required = true, multiple = false)]
struct DataArgs {
    /// A raw image or a block device
    #[arg(long, value_name = "PATH")]
    image: Option<PathBuf>,
    /// RAM, lost at the end; see --size
    #[arg(long)]
    ram: bool,
    /// An emulated solid-state disk, such as ref-4x250; see --size
    #[arg(long, value_name = "MODEL")]
    ssd: Option<String>,
}

pub(super) fn vm(text: &str) -> Result<VmName, NameError> {
    VmName::new(text)
}

pub(super) fn size(text: &str) -> Result<wire::Size> {
    text.parse().map_err(|words| anyhow::anyhow!("{text:?}: {words}"))
}

pub(super) fn run(client: &ControlClient, command: &Command, json: bool) -> Result<()> {
    match command {
        Command::List => super::list(client, json),
        Command::Add(args) => add(client, args),
        Command::Remove { name } => Ok(client.delete(&format!("/v1/devices/{name}"))?),
        Command::Resize { name, size: wanted, shrink } => {
            let size = wanted.as_deref().map(size).transpose()?;
            super::resize(client, name, Resize { size, shrink: *shrink }, json)
        }
    }
}

fn add(client: &ControlClient, args: &AddArgs) -> Result<()> {
    let image = args.data.image.as_ref().map(|path| open(path, args)).transpose()?;
    let listen = std::path::absolute(&args.listen).context("--listen")?;
    let body = AddDevice {
        device: wire::Device {
            name: args.name.clone(),
            vm: args.vm.clone(),
            socket: Some(listen.clone()),
            socket_activation: None,
            slots: None,
            queues: Some(args.queues),
            read_only: args.read_only,
            serial: args.serial.clone(),
            write_cache: !args.no_write_cache,
            fixed_buffers: wire::FixedBuffers::default(),
            trust: args.trust.clone(),
            max_memory: args.max_memory.as_deref().map(size).transpose()?,
            engine: engine(args)?,
            mapping: mapping(args.mapping.as_deref(), &args.iothreads)?,
            qos: args.qos.wire(),
        },
        fds: image.iter().map(|_| Handed::Image).chain([Handed::Socket]).collect(),
    };
    let socket = Socket::make(&listen, client)?;
    let mut fds: Vec<BorrowedFd<'_>> = image.iter().map(AsFd::as_fd).collect();
    fds.push(socket.listener.as_fd());
    let made = client.change("POST", "/v1/devices", &body, &fds);
    socket.settle(made, "device")
}

/// The image, open as the data plane will use it.
fn open(path: &Path, args: &AddArgs) -> Result<File> {
    let mut options = OpenOptions::new();
    // Not blocking: a pipe in the image's place must not hang the command.
    let nonblock = rustix::fs::OFlags::NONBLOCK;
    let direct = if args.buffered { nonblock } else { nonblock | rustix::fs::OFlags::DIRECT };
    options.read(true).write(!args.read_only).custom_flags(direct.bits() as i32);
    let file = options.open(path).with_context(|| format!("open {}", path.display()))?;
    let kind = file.metadata().with_context(|| format!("{}", path.display()))?.file_type();
    let is_image = kind.is_file() || kind.is_block_device();
    ensure!(is_image, "{} is neither a file nor a block device", path.display());
    rustix::fs::fcntl_setfl(&file, direct - nonblock)
        .with_context(|| format!("open {}", path.display()))?;
    Ok(file)
}

fn engine(args: &AddArgs) -> Result<wire::Engine> {
    if let Some(image) = &args.data.image {
        let path = fs::canonicalize(image).with_context(|| format!("{}", image.display()))?;
        let lock = match (args.lock_session, args.no_lock) {
            (true, _) => wire::ImageLock::Session,
            (_, true) => wire::ImageLock::Off,
            _ => wire::ImageLock::Always,
        };
        let part = [&args.offset, &args.size].map(|text| text.as_deref().map(size).transpose());
        let [offset, size] = part;
        return Ok(wire::Engine {
            kind: wire::EngineKind::File,
            path: Some(path),
            direct: Some(!args.buffered),
            block_size: args.block_size,
            lock: Some(lock),
            offset: offset?,
            size: size?,
            ..wire::Engine::default()
        });
    }
    let Some(text) = &args.size else { bail!("--size is missing: write --size 64M") };
    let kind = if args.data.ssd.is_some() { wire::EngineKind::Ssd } else { wire::EngineKind::Ram };
    let (size, ssd) = (Some(size(text)?), args.data.ssd.clone());
    Ok(wire::Engine { kind, size, ssd, ..wire::Engine::default() })
}

/// What is in the file, or these IOThreads in turn.
pub(super) fn mapping(
    file: Option<&Path>,
    iothreads: &[IoThreadName],
) -> Result<Option<Vec<Entry>>> {
    if let Some(file) = file {
        let text = super::super::mapping::read_text(file)?;
        let found = read::read(&text, None).with_context(|| file.display().to_string())?;
        return Ok(Some(found.entries));
    }
    let entries: Vec<_> = iothreads.iter().cloned().map(Entry::round_robin).collect();
    Ok(Some(entries).filter(|entries| !entries.is_empty()))
}

/// Of a socket that is made here.
const MODE: u32 = 0o660;
/// Front ends that wait to be accepted, one at a time.
const BACKLOG: i32 = 16;

/// A listening socket, removed when dropped unless it is kept.
pub(super) struct Socket {
    pub(super) listener: UnixListener,
    path: PathBuf,
    bound: Bound,
}

impl Socket {
    /// Makes it, in the place of one that nobody serves any more. Whoever may ask the data plane may connect to it, as to those that
    /// the data plane makes itself.
    pub(super) fn make(path: &Path, client: &ControlClient) -> Result<Self> {
        let context = || format!("make the socket {}", path.display());
        let (listener, bound) = bind(path, MODE, SocketType::STREAM).with_context(context)?;
        rustix::net::listen(&listener, BACKLOG).with_context(context)?;
        let socket = Self { listener: listener.into(), path: path.to_owned(), bound };
        if rustix::process::geteuid().is_root()
            && let Ok(of) = fs::metadata(client.socket())
        {
            give_socket(path, Some(of.uid()), Some(of.gid())).with_context(context)?;
        }
        Ok(socket)
    }

    /// Keeps it if the data plane has it: a device whose socket's name is gone can be connected to by
    /// nobody.
    pub(super) fn settle(self, made: Result<(), ControlFault>, what: &str) -> Result<()> {
        let Self { listener, path, bound } = self;
        drop(listener);
        // Of an uncertain outcome the socket itself says more: it is answered as long as the data plane, or what was sent
        // to it and not read, has the descriptor.
        let is_dead = || matches!(is_answered(&path), Err(Errno::CONNREFUSED | Errno::NOENT));
        let fault = match made {
            Err(fault) if !fault.is_uncertain() || is_dead() => return Err(fault.into()),
            made => made.err(),
        };
        std::mem::forget(bound);
        let Some(fault) = fault else { return Ok(()) };
        Err(anyhow::Error::from(fault).context(format!(
            "it may be there all the same, and its socket was kept: see `rtvirtio ctl {what} list`"
        )))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn socket_of_a_device_that_may_be_there_is_kept() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let settle = |made, is_held: bool| {
            let socket = Socket::make(&path, &ControlClient::new("/nonexistent")).unwrap();
            // As the data plane does that was sent it.
            let _held = is_held.then(|| socket.listener.try_clone().unwrap());
            let settled = socket.settle(made, "device");
            let is_kept = path.exists();
            let _ = fs::remove_file(&path);
            (is_kept, settled.err().map(|error| error.to_string()))
        };
        let refused = |status| {
            let error = "no".to_owned();
            Err(ControlFault::Refused { status, error, hint: None })
        };
        assert_eq!(settle(Ok(()), true), (true, None));
        assert_eq!(settle(refused(409), true), (false, Some("no".to_owned())));
        let late = || Err(ControlFault::Late(Duration::from_secs(35)));
        for made in [refused(504), late()] {
            let (is_kept, words) = settle(made, true);
            assert!(is_kept && words.unwrap().ends_with("see `rtvirtio ctl device list`"));
        }
        // Nobody has it: it was given up before it was begun, or the data plane has ended.
        for made in [refused(504), late()] {
            let (is_kept, words) = settle(made, false);
            assert!(!is_kept && !words.unwrap().contains("may be there"));
        }
    }
}
