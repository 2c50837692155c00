//! `rtvirtio ctl`: the client of a data plane's control API.

mod device;
mod nic;
mod policy;
mod qos;
mod show;

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use rtvirtio_host::dataplane::{ControlClient, DEFAULT_SOCKET};
use rtvirtio_spec::control::{
    AddIoThread, DeviceState, IoThreadState, Lock, MoveQueue, Moved, PinIoThread, Resize, Resized,
    SetMapping,
};
use rtvirtio_spec::cpulist;
use rtvirtio_spec::mapping::{Mapping, read};
use rtvirtio_spec::serve::{Completion, CorePolicy, to_toml, wire};
use rtvirtio_units::{CpuId, DiskName, IoThreadName, Name, NameError};

use super::mapping::Format;
use rtvirtio_cli::{Outcome, input, output};

/// Arguments of `ctl`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The data plane's control socket
    #[arg(long, global = true, default_value = DEFAULT_SOCKET, value_name = "PATH")]
    socket: PathBuf,
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

impl Args {
    /// Whether the command changes the data plane, or only shows what there is.
    pub(crate) const fn changes(&self) -> bool {
        match &self.command {
            Command::Snapshot
            | Command::Configuration
            | Command::Decisions(_)
            | Command::Events
            | Command::Metrics => false,
            Command::Nic(command) => !matches!(command, nic::Command::List),
            Command::Network(command) => !matches!(command, nic::NetworkCommand::List),
            Command::Device(command) => !matches!(command, device::Command::List),
            Command::IoThread(command) => !matches!(command, IoThreadCommand::List),
            Command::Mapping(command) => !matches!(command, MappingCommand::Get { .. }),
            Command::Schedule(command) => !matches!(command, qos::ScheduleCommand::List),
            Command::Policy(args) => args.changes(),
            Command::Qos(_) => true,
        }
    }
}

#[derive(clap::Subcommand)]
enum Command {
    /// Show all IOThreads, devices and queues
    Snapshot,
    /// Print what is served now as a configuration: what `ctl` has changed is lost with the process otherwise
    ///
    /// Save it, check it, and start the service with it: `rtvirtio ctl configuration > new.toml && rtvirtio serve
    /// --check new.toml`. A device whose socket was handed over is there by the socket's name (`socket_activation`).
    Configuration,
    /// List, add, remove and resize devices
    #[command(subcommand)]
    Device(device::Command),
    /// List, add and remove network devices, and change their limits and promises
    #[command(subcommand)]
    Nic(nic::Command),
    /// List, make and remove networks
    #[command(subcommand)]
    Network(nic::NetworkCommand),
    /// List, create, pin, lock and remove IOThreads
    #[command(subcommand, name = "iothread")]
    IoThread(IoThreadCommand),
    /// Show and change which IOThread serves which queue, while I/O runs
    #[command(subcommand)]
    Mapping(MappingCommand),
    /// Change what a device gets of the physical device that it shares, while I/O runs
    ///
    /// All of it is set: what is left out is not kept. Within one schedule nothing waits for the
    /// change; a device that joins, leaves or changes its schedule pauses until its requests in
    /// flight have ended. `ctl snapshot` shows how promises are kept.
    Qos(qos::Args),
    /// List, make, change and remove the schedules of physical devices
    #[command(subcommand)]
    Schedule(qos::ScheduleCommand),
    /// Show or change what decides how many IOThreads there are and which queue goes where
    ///
    /// A policy looks at all queues and IOThreads every 10 ms, adds and removes IOThreads within its
    /// bounds, and moves queues between them while I/O runs. A locked IOThread (`ctl iothread lock`)
    /// is left alone. When another policy is set, everything stays where it is until that one moves
    /// it. `ctl decisions` tells what was decided, why, and what came of it.
    Policy(policy::Args),
    /// Show what the policy has decided, why, and what came of it
    ///
    /// The last 1,000 decisions are kept. For each: requests a second, the mean wait of a request for
    /// its IOThread, and CPUs that IOThreads kept busy, of all queues together in the second before it
    /// and in the second after. Its reason names IOThreads and queues by the `id` that `ctl snapshot
    /// --json` shows.
    Decisions(policy::DecisionArgs),
    /// Print what happens, as it happens, until Ctrl-C
    Events,
    /// Print the metrics for Prometheus
    Metrics,
}

#[derive(clap::Subcommand)]
enum IoThreadCommand {
    /// Show them
    List,
    /// Start one
    Create {
        /// Its name
        #[arg(value_parser = iothread)]
        name: IoThreadName,
        /// CPUs that it may run on, such as 0,2-3; any if left out
        #[arg(long, value_parser = cpus)]
        cpus: Option<Cpus>,
        /// How it waits: interrupt, poll or adaptive [default: adaptive]
        #[arg(long, value_name = "MODE")]
        completion: Option<Completion>,
        /// Whose its CPU is, if it is adaptive: dedicated, shared or auto [default: shared]
        #[arg(long, value_name = "POLICY")]
        core: Option<CorePolicy>,
        /// The longest that it polls before it sleeps, µs
        #[arg(long, value_name = "US")]
        poll_max_us: Option<u64>,
        /// Factor by which that grows
        #[arg(long, value_name = "N")]
        poll_grow: Option<u32>,
        /// Divisor by which it shrinks; 0: at once to nothing
        #[arg(long, value_name = "N")]
        poll_shrink: Option<u32>,
        /// Trust domain of the devices that it serves [default: those that name none]
        #[arg(long, value_name = "NAME", value_parser = name)]
        trust: Option<Name>,
    },
    /// Let one run on these CPUs only
    Pin {
        /// Its name
        #[arg(value_parser = iothread)]
        name: IoThreadName,
        /// CPUs such as 0,2-3, or `any`
        #[arg(value_parser = cpus)]
        cpus: Cpus,
    },
    /// Keep policy from giving it queues or taking some away
    Lock {
        /// Its name
        #[arg(value_parser = iothread)]
        name: IoThreadName,
    },
    /// Let policy give it queues and take some away
    Unlock {
        /// Its name
        #[arg(value_parser = iothread)]
        name: IoThreadName,
    },
    /// End one that serves no queue
    Remove {
        /// Its name
        #[arg(value_parser = iothread)]
        name: IoThreadName,
    },
}

#[derive(clap::Subcommand)]
enum MappingCommand {
    /// Show it
    Get {
        /// The device
        #[arg(value_parser = disk)]
        device: DiskName,
        /// What to print
        #[arg(long, value_enum, default_value_t = Format::Toml)]
        format: Format,
    },
    /// Set it whole, from QEMU's JSON, libvirt's XML or TOML
    Set {
        /// The device
        #[arg(value_parser = disk)]
        device: DiskName,
        /// The file; `-`: standard input
        file: PathBuf,
    },
    /// Move one queue
    Move {
        /// The device
        #[arg(value_parser = disk)]
        device: DiskName,
        /// The queue, from 0
        queue: u16,
        /// Where to
        #[arg(value_parser = iothread)]
        iothread: IoThreadName,
    },
}

/// CPUs of a command line; none: any.
#[derive(Debug, Clone)]
struct Cpus(Vec<CpuId>);

fn iothread(text: &str) -> Result<IoThreadName, NameError> {
    IoThreadName::new(text)
}

fn name(text: &str) -> Result<Name, NameError> {
    Name::new(text)
}

fn disk(text: &str) -> Result<DiskName, NameError> {
    DiskName::new(text)
}

/// `0,2-3` or `any`.
fn cpus(text: &str) -> Result<Cpus, String> {
    cpulist::parse(text).map(Cpus)
}

pub(crate) fn run(args: &Args) -> Result<Outcome> {
    let client = ControlClient::new(&args.socket);
    match &args.command {
        Command::Snapshot => {
            let snapshot = client.snapshot()?;
            if args.json {
                input::print_json(&snapshot)?;
            } else {
                print!("{}", show::snapshot(&snapshot));
            }
        }
        Command::Device(command) => device::run(&client, command, args.json)?,
        Command::IoThread(command) => iothreads(&client, command, args.json)?,
        Command::Mapping(command) => mapping(&client, command, args.json)?,
        Command::Qos(args) => qos::run(&client, args)?,
        Command::Schedule(command) => qos::schedules(&client, command, args.json)?,
        Command::Policy(args_of) => policy::run(&client, args_of, args.json)?,
        Command::Decisions(args_of) => policy::decisions(&client, args_of, args.json)?,
        Command::Nic(command) => nic::run(&client, command, args.json)?,
        Command::Network(command) => nic::networks(&client, command, args.json)?,
        Command::Events => {
            for event in client.events()? {
                let event = event?;
                let text =
                    if args.json { serde_json::to_string(&event)? } else { show::event(&event) };
                output::line(&text);
            }
        }
        Command::Configuration => {
            let configuration: wire::Configuration = client.get("/v1/configuration")?;
            if args.json {
                input::print_json(&configuration)?;
            } else {
                print!("{}", to_toml(&configuration)?);
            }
        }
        Command::Metrics => {
            ensure!(
                !args.json,
                "--json cannot be used with `ctl metrics`, which prints Prometheus' text format (as JSON: ctl snapshot --json)"
            );
            print!("{}", client.text("/metrics")?);
        }
    }
    Ok(Outcome::Done)
}

fn iothreads(client: &ControlClient, command: &IoThreadCommand, json: bool) -> Result<()> {
    let at = |name: &IoThreadName, part: &str| format!("/v1/iothreads/{name}{part}");
    let lock = |name: &IoThreadName, locked: bool| {
        client.change("PUT", &at(name, "/lock"), &Lock { locked }, &[])
    };
    match command {
        IoThreadCommand::List => {
            let found: Vec<IoThreadState> = client.get("/v1/iothreads")?;
            if json {
                input::print_json(&found)?;
            } else {
                println!("{}", show::iothreads(&found));
            }
        }
        IoThreadCommand::Create {
            name,
            cpus,
            completion,
            core,
            poll_max_us,
            poll_grow,
            poll_shrink,
            trust,
        } => {
            let body = AddIoThread(wire::IoThread {
                name: name.clone(),
                cpus: cpus.clone().map(|cpus| cpus.0).unwrap_or_default(),
                completion: *completion,
                core: *core,
                poll_max_us: *poll_max_us,
                poll_grow: *poll_grow,
                poll_shrink: *poll_shrink,
                trust: trust.clone(),
            });
            client.change("POST", "/v1/iothreads", &body, &[])?;
        }
        IoThreadCommand::Pin { name, cpus } => {
            let body = PinIoThread { cpus: cpus.0.clone() };
            client.change("PUT", &at(name, "/cpus"), &body, &[])?;
        }
        IoThreadCommand::Lock { name } => lock(name, true)?,
        IoThreadCommand::Unlock { name } => lock(name, false)?,
        IoThreadCommand::Remove { name } => client.delete(&at(name, ""))?,
    }
    Ok(())
}

fn mapping(client: &ControlClient, command: &MappingCommand, json: bool) -> Result<()> {
    let at = |device: &DiskName| format!("/v1/mapping/{device}");
    match command {
        MappingCommand::Get { device, format } => {
            let found: SetMapping = client.get(&at(device))?;
            print_mapping(&found, *format, json)?;
        }
        MappingCommand::Set { device, file } => {
            let text = super::mapping::read_text(file)?;
            // Unchecked: the data plane knows its IOThreads and the device's queues.
            let found = read::read(&text, Some(device.as_str()));
            let found = found.with_context(|| file.display().to_string())?;
            let body = SetMapping { mapping: found.entries };
            let found: SetMapping = client.ask("PUT", &at(device), &body)?;
            print_mapping(&found, Format::Toml, json)?;
        }
        MappingCommand::Move { device, queue, iothread } => {
            let body = MoveQueue { iothread: iothread.clone() };
            let path = format!("{}/{queue}", at(device));
            let moved: Moved = client.ask("PUT", &path, &body)?;
            if json {
                input::print_json(&moved)?;
            } else {
                println!("nobody served the queue for {}", moved.pause_ns);
            }
        }
    }
    Ok(())
}

fn print_mapping(found: &SetMapping, format: Format, json: bool) -> Result<()> {
    if json {
        return input::print_json(&found.mapping);
    }
    let queues = found.mapping.iter().flat_map(|entry| entry.vqs.iter().flatten()).count();
    let mapping = Mapping::new(&found.mapping, u32::try_from(queues)?, None)?;
    print!("{}", super::mapping::text(&mapping, None, format));
    Ok(())
}

/// Prints the answer to a resize.
fn resize(client: &ControlClient, device: &DiskName, body: Resize, json: bool) -> Result<()> {
    let resized: Resized = client.ask("PATCH", &format!("/v1/devices/{device}"), &body)?;
    if json {
        return input::print_json(&resized);
    }
    println!("{device} has {}", resized.capacity);
    Ok(())
}

/// Prints all devices.
fn list(client: &ControlClient, json: bool) -> Result<()> {
    let found: Vec<DeviceState> = client.get("/v1/devices")?;
    if json {
        return input::print_json(&found);
    }
    println!("{}", show::devices(&found));
    Ok(())
}
