//! `rtvirtio ctl nic` and `rtvirtio ctl network`.

use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use rtvirtio_dataplane::{Tap, tap_mtu};
use rtvirtio_host::dataplane::ControlClient;
use rtvirtio_spec::control::{AddNetwork, AddNic, Handed, NicState, QueueDirection, SetNicRate};
use rtvirtio_spec::serve::{MAX_PAIRS, wire};
use rtvirtio_units::{DiskName, IoThreadName, Name, VmName};

use super::device::{Socket, mapping, size, vm};
use super::show;
use crate::input;

#[derive(clap::Subcommand)]
pub(super) enum Command {
    /// Show them, and what each of their queues has handed on and dropped
    List,
    /// Add one: makes the socket and attaches to the TAP as this user, and hands both over
    Add(Box<AddArgs>),
    /// Disconnect its front end and remove it
    Remove {
        /// Its name
        #[arg(value_parser = super::disk)]
        name: DiskName,
    },
    /// Change the limit on a direction and what is promised to it, while frames flow
    ///
    /// All of it is set: what is left out is not kept. A promise that an IOThread could not keep beside what it has promised already
    /// is refused, with what would fit, and nothing is changed. `ctl configuration` prints what holds.
    Set(Set),
}

#[derive(clap::Subcommand)]
pub(super) enum NetworkCommand {
    /// Show them
    List,
    /// Make one, without a network device at first
    Add {
        /// Its name
        #[arg(value_parser = super::name)]
        name: Name,
        /// Frames a second that each pair of a device's queues may send to more than one device [default: 1000]
        #[arg(long, value_name = "N")]
        max_broadcast: Option<u64>,
    },
    /// Remove one in which no network device is
    Remove {
        /// Its name
        #[arg(value_parser = super::name)]
        name: Name,
    },
}

#[derive(clap::Args)]
pub(super) struct AddArgs {
    /// Its name
    #[arg(value_parser = super::name)]
    name: Name,
    /// Whose it is
    #[arg(long, value_parser = vm)]
    vm: VmName,
    /// Where its front end connects: the socket is made here
    #[arg(long, value_name = "PATH")]
    listen: PathBuf,
    #[command(flatten)]
    link: LinkArgs,
    /// Its VLAN in the network, of which the guest sees no tag
    #[arg(long, value_name = "N")]
    vlan: Option<u16>,
    /// Its VLANs in the network, whose tags the guest sends and receives, such as 10,20
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',', conflicts_with = "vlan")]
    trunk: Vec<u16>,
    /// Let it send to the network under other addresses than its own: a guest with a bridge
    #[arg(long)]
    no_anti_spoofing: bool,
    /// Its address, for front ends that ask for it [default: made of the names]
    #[arg(long, value_name = "ADDRESS")]
    mac: Option<String>,
    /// Bytes of the longest packet [default: the TAP's, or 1500]
    #[arg(long, value_name = "BYTES")]
    mtu: Option<u16>,
    /// Pairs of queues, 1 to 8
    #[arg(long, value_name = "N", default_value_t = 1)]
    queues: u32,
    /// IOThreads that take its queues in turn; all if left out
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_parser = super::iothread)]
    iothreads: Vec<IoThreadName>,
    /// File with the mapping of queues to IOThreads: QEMU's JSON, libvirt's XML or TOML
    #[arg(long, value_name = "FILE", conflicts_with = "iothreads")]
    mapping: Option<PathBuf>,
    /// Its trust domain, as of a device
    #[arg(long, value_name = "NAME", value_parser = super::name)]
    trust: Option<Name>,
    /// Most guest memory that the front end may share, such as 64G [default: what the host has]
    #[arg(long, value_name = "SIZE")]
    max_memory: Option<String>,
}

/// Where its frames go.
#[derive(clap::Args)]
#[group(required = true, multiple = false)]
struct LinkArgs {
    /// A TAP of the host
    #[arg(long, value_name = "NAME")]
    tap: Option<String>,
    /// A network of the data plane
    #[arg(long, value_name = "NAME", value_parser = super::name)]
    network: Option<Name>,
    /// A unix stream socket at which passt, or QEMU's -netdev stream, listens
    #[arg(long, value_name = "PATH")]
    stream: Option<PathBuf>,
    /// Two unix datagram sockets as QEMU's -netdev dgram has them: the data plane's, and the other side's
    #[arg(long, value_names = ["LOCAL", "REMOTE"], num_args = 2)]
    dgram: Option<Vec<PathBuf>>,
}

#[derive(clap::Args)]
#[command(group = clap::ArgGroup::new("what").required(true).multiple(true).args(["max_frames", "max_mbit", "off"]))]
pub(super) struct Set {
    /// The network device
    #[arg(value_parser = super::disk)]
    name: DiskName,
    /// rx: what goes to the guest; tx: what comes from it
    #[arg(value_parser = direction)]
    direction: QueueDirection,
    /// Limit: frames a second, of all pairs of queues together
    #[arg(long, value_name = "N")]
    max_frames: Option<u64>,
    /// Limit: 10^6 bits a second
    #[arg(long, value_name = "N")]
    max_mbit: Option<u64>,
    /// How far ahead of the rate one may be that was silent, ms [default: 5]
    #[arg(long, value_name = "MS")]
    burst_ms: Option<u64>,
    /// Promise: how long frames within the limit wait for their IOThread at most, µs
    #[arg(long, value_name = "US")]
    within_us: Option<u64>,
    /// No limit, and no promise
    #[arg(long, conflicts_with_all = ["max_frames", "max_mbit", "burst_ms", "within_us"])]
    off: bool,
}

fn direction(text: &str) -> Result<QueueDirection, String> {
    let both = [QueueDirection::Receive, QueueDirection::Transmit];
    let found = both.into_iter().find(|direction| direction.key() == text);
    found.ok_or_else(|| "it is rx or tx".to_owned())
}

pub(super) fn run(client: &ControlClient, command: &Command, json: bool) -> Result<()> {
    match command {
        Command::List => {
            let found: Vec<NicState> = client.get("/v1/nics")?;
            if json {
                input::print_json(&found)?;
            } else {
                println!("{}", show::nics(&found));
            }
        }
        Command::Add(args) => add(client, args)?,
        Command::Remove { name } => client.delete(&format!("/v1/nics/{name}"))?,
        Command::Set(set) => {
            let path = format!("/v1/nics/{}/{}", set.name, set.direction.key());
            if set.off {
                return Ok(client.delete(&path)?);
            }
            let Set { max_frames, max_mbit, burst_ms, within_us, .. } = *set;
            let rate = wire::NicRate { max_frames, max_mbit, burst_ms, within_us };
            client.change("PUT", &path, &SetNicRate(rate), &[])?;
        }
    }
    Ok(())
}

pub(super) fn networks(client: &ControlClient, command: &NetworkCommand, json: bool) -> Result<()> {
    match command {
        NetworkCommand::List => {
            let found: Vec<wire::Network> = client.get("/v1/networks")?;
            if json {
                input::print_json(&found)?;
            } else {
                println!("{}", show::networks(&found));
            }
        }
        NetworkCommand::Add { name, max_broadcast } => {
            let body =
                AddNetwork(wire::Network { name: name.clone(), max_broadcast: *max_broadcast });
            client.change("POST", "/v1/networks", &body, &[])?;
        }
        NetworkCommand::Remove { name } => client.delete(&format!("/v1/networks/{name}"))?,
    }
    Ok(())
}

fn add(client: &ControlClient, args: &AddArgs) -> Result<()> {
    let absolute = |path: &PathBuf, option| std::path::absolute(path).context(option);
    let listen = absolute(&args.listen, "--listen")?;
    ensure!(
        (1..=MAX_PAIRS.into()).contains(&args.queues),
        "--queues is 1 to {MAX_PAIRS}, and not {}",
        args.queues
    );
    let is_of_network = args.vlan.is_some() || !args.trunk.is_empty() || args.no_anti_spoofing;
    ensure!(
        args.link.network.is_some() || !is_of_network,
        "--vlan, --trunk and --no-anti-spoofing are of a device in a network: write --network NAME"
    );
    let dgram = match args.link.dgram.as_deref() {
        Some([local, remote]) => {
            let [local, remote] = [local, remote].map(|path| absolute(path, "--dgram"));
            Some(wire::Dgram { local: local?, remote: remote? })
        }
        _ => None,
    };
    let stream = args.link.stream.as_ref().map(|path| absolute(path, "--stream")).transpose()?;
    let taps = match &args.link.tap {
        Some(tap) => Tap::attach(tap, args.queues as u16)?,
        None => Vec::new(),
    };
    let body = AddNic {
        nic: wire::Nic {
            name: args.name.clone(),
            vm: args.vm.clone(),
            socket: listen.clone(),
            tap: args.link.tap.clone(),
            stream,
            dgram,
            network: args.link.network.clone(),
            vlan: args.vlan,
            trunk: Some(args.trunk.clone()).filter(|trunk| !trunk.is_empty()),
            anti_spoofing: args.no_anti_spoofing.then_some(false),
            mac: args.mac.clone(),
            // The data plane may not see the host's network.
            mtu: args.mtu.or_else(|| tap_mtu(args.link.tap.as_deref()?)),
            queues: Some(args.queues),
            trust: args.trust.clone(),
            max_memory: args.max_memory.as_deref().map(size).transpose()?,
            mapping: mapping(args.mapping.as_deref(), &args.iothreads)?,
            rx: None,
            tx: None,
        },
        fds: [Handed::Socket].into_iter().chain(taps.iter().map(|_| Handed::Tap)).collect(),
    };
    let socket = Socket::make(&listen, client)?;
    let mut fds: Vec<BorrowedFd<'_>> = vec![socket.listener.as_fd()];
    fds.extend(taps.iter().map(Tap::as_fd));
    let made = client.change("POST", "/v1/nics", &body, &fds);
    socket.settle(made, "nic")
}
