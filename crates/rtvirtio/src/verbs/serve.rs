//! `rtvirtio serve`.

use std::collections::{BTreeSet, HashMap};
use std::os::fd::{AsFd as _, BorrowedFd, FromRawFd, OwnedFd};
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use anyhow::{Context as _, Result};
use comfy_table::{Table, presets};
use rtvirtio_dataplane::control::{ControlServer, ControlSocket};
use rtvirtio_dataplane::plane::{self, Notice, Opened, Plane, Registry};
use rtvirtio_dataplane::sandbox::{self, Identity};
use rtvirtio_dataplane::vcpus::{self, Guard};
use rtvirtio_host::interrupt::Interrupted;
use rtvirtio_spec::serve::{
    self, Completion, Configuration, CorePolicy, Engine, IoCores, Listen, MAX_CPU, Policy, Polling,
    Service,
};
use rtvirtio_spec::specification::MAX_FILE_BYTES;
use rtvirtio_units::CpuId;
use sd_notify::NotifyState;
use tracing::{info, warn};

use crate::{Outcome, input};

mod check;
mod log;

/// The user to become if nothing says.
const USER: &str = "rtvirtio";
/// How soon a signal is seen.
const POLL: Duration = Duration::from_millis(50);

/// Arguments of `serve`.
#[derive(clap::Args)]
#[command(
    after_help = "Exit codes of --check: 0 it can be served here; 1 the configuration is wrong; 2 it is right, and this \
    host lacks something for it, or does not let this user at it: what, with the remedy, is on standard error. Run it \
    as the user that starts the service."
)]
pub(crate) struct Args {
    /// What to serve (TOML)
    configuration: PathBuf,
    /// Only check the configuration, print what would be served and what this host lacks for it or forbids
    #[arg(long)]
    check: bool,
    /// The user to become if started by root, whatever the configuration says [default: rtvirtio
    /// if there is such a user]
    #[arg(long)]
    user: Option<String>,
    /// Keep capabilities and all system calls
    #[arg(long)]
    no_sandbox: bool,
    /// What to say on standard error
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    log: rtvirtio_cli::log::Level,
}

/// A service manager need not start it again (`RestartPreventExitStatus=` of the unit): EX_CONFIG of sysexits.h.
const EXIT_CONFIGURATION: u8 = 78;

pub(crate) fn run(args: &Args, interrupted: &Interrupted) -> Result<Outcome> {
    let text = input::read(&args.configuration, MAX_FILE_BYTES as u64)?;
    let mut configuration = match serve::parse(&args.configuration.display().to_string(), &text) {
        Err(error) if !args.check => {
            rtvirtio_cli::report_error(&error.into());
            return Ok(Outcome::Exit(EXIT_CONFIGURATION));
        }
        parsed => parsed?,
    };
    if args.user.is_some() {
        (configuration.service.user, configuration.service.group) = (args.user.clone(), None);
    }
    if args.check {
        print!("{}", describe(&configuration));
        let missing = check::missing(&configuration, &online()?);
        missing.iter().for_each(|missing| eprintln!("warning: {missing}"));
        return Ok(if missing.is_empty() { Outcome::Done } else { Outcome::Changes });
    }
    configuration.service.sandbox &= !args.no_sandbox;
    rtvirtio_cli::log::start(args.log);
    let served = start(&configuration, interrupted);
    if served.is_err() && !CONFINED.load(Ordering::Relaxed) {
        // Each has the remedy that the kernel's word for it has not.
        check::missing(&configuration, &online()?).iter().for_each(|missing| warn!("{missing}"));
    }
    served
}

/// The CPUs that run.
fn online() -> Result<BTreeSet<CpuId>> {
    const ONLINE: &str = "/sys/devices/system/cpu/online";
    let text = std::fs::read_to_string(ONLINE).context(ONLINE)?;
    // A host with more CPUs than a configuration may name has all of those.
    let cpus = rtvirtio_spec::cpulist::parse(text.trim());
    Ok(cpus.unwrap_or_else(|_| (0..=MAX_CPU).map(CpuId::new).collect()).into_iter().collect())
}

/// How long the end may take once a signal has come: until the disks have finished what they have in flight,
/// or before anything is served.
const DRAIN_TIME: u32 = 10;
const START_TIME: u32 = 2;

/// Whether the sandbox may be closed: what is missing was there, and files are not looked for any more.
static CONFINED: AtomicBool = AtomicBool::new(false);

/// Whether devices are served.
static SERVING: AtomicBool = AtomicBool::new(false);

/// Sees to it that the process ends in time after a signal, and at once after a second one: a disk may not
/// answer, at the start as well as at the end. There is one thread when privileges are given up, so the
/// kernel's alarm keeps the time.
fn end_in_time() -> Result<()> {
    use signal_hook::consts::{SIGALRM, SIGHUP, SIGINT, SIGTERM};
    use signal_hook::low_level::register;

    fn end(text: &[u8]) -> ! {
        // SAFETY: the text lives through the call.
        unsafe { libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len()) };
        // SAFETY: ends the process and touches nothing of it.
        unsafe { libc::_exit(1) }
    }
    const LATE: &[u8] =
        b"serve: a disk does not answer: what it has in flight is left, and front ends issue \
        it again to the next server\n";
    static SIGNALS: AtomicU32 = AtomicU32::new(0);
    let begin = || {
        if SIGNALS.fetch_add(1, Ordering::Relaxed) > 0 {
            end(b"serve: ended by a second signal\n");
        }
        let time = if SERVING.load(Ordering::Relaxed) { DRAIN_TIME } else { START_TIME };
        // SAFETY: alarm(2) is async-signal-safe and takes an integer.
        unsafe { libc::alarm(time) };
    };
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        // SAFETY: the handler stores numbers and makes system calls that are async-signal-safe.
        unsafe { register(signal, begin) }.context("install a signal handler")?;
    }
    // SAFETY: as above.
    unsafe { register(SIGALRM, || end(LATE)) }.context("install a signal handler")?;
    Ok(())
}

/// Serves until a signal comes; what is in flight then is finished first.
fn start(configuration: &Configuration, interrupted: &Interrupted) -> Result<Outcome> {
    end_in_time()?;
    let mut handed: HashMap<String, OwnedFd> = HashMap::new();
    for (fd, name) in sd_notify::listen_fds_with_names()? {
        // SAFETY: systemd made it for this process, and sd_notify gives each out once.
        handed.insert(name, unsafe { OwnedFd::from_raw_fd(fd) });
    }
    let emulated = |device: &serve::Device| matches!(device.engine, Engine::Ssd(_));
    sandbox::raise_limits(configuration.devices.iter().any(emulated));
    let user = identity(&configuration.service)?;
    // Opened with the rights of whoever started this, served without them.
    let control = configuration.control.as_ref();
    let control = control.map(|c| ControlSocket::make(c, user.as_ref())).transpose()?;
    let opened = Opened::open(configuration, &mut handed, user.as_ref(), &release)?;
    for (name, tap) in opened.taps() {
        keep(&name, tap);
    }
    // Keeps a right that this gives up.
    let guard = configuration.iocores.borrow.then(|| {
        let mut command = Command::new("/proc/self/exe");
        Guard::start(command.arg("vcpu-guard")).context("start the guard of vCPUs")
    });
    let guard = guard.transpose()?;
    CONFINED.store(true, Ordering::Relaxed);
    if configuration.service.sandbox {
        sandbox::drop_privileges(user.as_ref())?;
        sandbox::confine()?;
    } else {
        warn!("no sandbox: a fault in here has all rights of this process");
    }

    let tell = notify_aside()?;
    let registry = Registry::new(Arc::new(move |device: &str, notice: Notice<'_>| match notice {
        Notice::KeepTap { name, queue } => {
            if let Ok(queue) = queue.try_clone_to_owned() {
                let _ = tell.send((name.to_owned(), Some(queue)));
            }
        }
        Notice::ReleaseTap { name } => {
            let _ = tell.send((name.to_owned(), None));
        }
        notice => log::notice(device, notice),
    }))?;
    let registry = Arc::new(registry);
    if let Some(guard) = guard {
        registry.borrow_by(guard);
    }
    let events = registry.events();
    std::thread::Builder::new().name("log".to_owned()).spawn(move || {
        plane::follow(events, log::event);
    })?;
    SERVING.store(true, Ordering::Relaxed);
    registry.add_all(configuration, opened)?;
    for doubtful in registry.doubtful_promises() {
        warn!("{doubtful}: it is served all the same, and may be late");
    }
    let plane = || Arc::clone(&registry) as Arc<dyn Plane>;
    let control = control.map(|socket| ControlServer::serve(socket, plane())).transpose()?;
    let (disks, nics) = (configuration.devices.len(), configuration.nics.len());
    let and = if nics > 0 { format!(" and {nics} nics") } else { String::new() };
    info!("serving {disks} devices{and}");
    // Without systemd there is nobody to tell.
    let _ = sd_notify::notify(&[NotifyState::Ready]);
    while !interrupted.load(Ordering::Relaxed) {
        std::thread::sleep(POLL);
    }
    drop(control);
    // A change that is under way has it too, and waits for its disk.
    while Arc::strong_count(&registry) > 1 {
        std::thread::sleep(POLL);
    }
    drop(registry);
    // In time.
    // SAFETY: alarm(2) takes an integer.
    unsafe { libc::alarm(0) };
    Ok(Outcome::Done)
}

/// Has the service manager keep a TAP's queue. A TAP that nobody has open loses its carrier, and the host what
/// it knows of the guest's address.
fn keep(name: &str, queue: BorrowedFd<'_>) {
    // Polled by systemd, each frame would wake it.
    let unpolled = NotifyState::Custom("FDPOLL=0");
    let state = [NotifyState::FdStore, NotifyState::FdName(name), unpolled];
    let _ = sd_notify::notify_with_fds(&state, &[queue]);
}

/// Where to say which TAPs' queues the service manager is to keep, and which to let go of. It may be slow to
/// read; no change waits for it.
fn notify_aside() -> Result<mpsc::Sender<(String, Option<OwnedFd>)>> {
    let (tell, told) = mpsc::channel::<(String, Option<OwnedFd>)>();
    std::thread::Builder::new().name("notify".to_owned()).spawn(move || {
        for (name, queue) in told {
            match queue {
                Some(queue) => keep(&name, queue.as_fd()),
                None => release(&name),
            }
        }
    })?;
    Ok(tell)
}

/// Has it let go of one.
fn release(name: &str) {
    let _ = sd_notify::notify(&[NotifyState::FdStoreRemove, NotifyState::FdName(name)]);
}

/// Moves vCPUs for a data plane, whose socket is the standard input.
pub(crate) fn guard_vcpus() -> Result<Outcome> {
    let socket = std::io::stdin().as_fd().try_clone_to_owned()?;
    sandbox::keep_nice()?;
    sandbox::confine_guard()?;
    vcpus::guard(socket.into()).context("guard vCPUs")?;
    Ok(Outcome::Done)
}

/// The user to become; `None` to stay who started this.
fn identity(service: &Service) -> Result<Option<Identity>> {
    if !rustix::process::geteuid().is_root() || !service.sandbox {
        if let Some(user) = &service.user {
            let why = if service.sandbox { "not started by root" } else { "no sandbox" };
            warn!("{why}: this does not become user {user}");
        }
        return Ok(None);
    }
    match (&service.user, Identity::find(USER, None)) {
        (Some(user), _) => Ok(Some(Identity::find(user, service.group.as_deref())?)),
        (None, Ok(identity)) => Ok(Some(identity)),
        (None, Err(error)) => {
            warn!("this serves as root, if without capabilities: {error}");
            Ok(None)
        }
    }
}

/// A disk's part of its device, for people.
fn promise(qos: &serve::Qos) -> String {
    let rate = |rate: &serve::Rate| {
        let iops = rate.iops.map(|iops| format!("{} IOPS", iops.get()));
        let bandwidth = rate.bandwidth.map(|bytes| format!("{} B/s", bytes.get()));
        iops.into_iter().chain(bandwidth).collect::<Vec<_>>().join(", ")
    };
    let promise = qos.promise.as_ref();
    let promise = promise.map(|p| format!(": {} within {}", rate(&p.rate), p.deadline));
    let limit = qos.limit.as_ref().map(|limit| format!(", at most {}", rate(limit)));
    let parts = [promise, Some(format!(", weight {}", qos.weight.get())), limit];
    let tasks = qos.tasks.iter().map(|task| {
        format!("; {}: {} within {}", task.ioprio, rate(&task.promise.rate), task.promise.deadline)
    });
    format!("{}{}", qos.schedule, parts.into_iter().flatten().chain(tasks).collect::<String>())
}

/// What would be served, for people.
fn describe(configuration: &Configuration) -> String {
    let mut text = String::new();
    if let Some(control) = &configuration.control {
        text += &format!("control API: {}\n\n", control.socket.display());
    }
    let IoCores { policy, cpus, min_iothreads, max_iothreads, borrow } = &configuration.iocores;
    if *policy != Policy::Static {
        text += &format!("policy: {policy}");
        if policy.needs_cpus() {
            let cpus = cpus.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            text += &format!(", {min_iothreads} to {max_iothreads} iothreads, more on CPUs {cpus}");
            text += if *borrow { ", borrowed from vCPUs too" } else { "" };
        }
        text += "\n\n";
    }
    let mut iothreads = table(["iothread", "cpus", "polls"]);
    for iothread in &configuration.iothreads {
        let Polling { completion, core, max, .. } = iothread.polling;
        let polls = match (completion, core) {
            (Completion::Interrupt, _) => "never".to_owned(),
            (Completion::Poll, _) => "always".to_owned(),
            (Completion::Adaptive, CorePolicy::Dedicated) => "always, on its own core".to_owned(),
            (Completion::Adaptive, CorePolicy::Auto) => {
                "while that pays and a CPU is idle".to_owned()
            }
            (Completion::Adaptive, CorePolicy::Shared) if max.get() == 0 => "never".to_owned(),
            (Completion::Adaptive, CorePolicy::Shared) => format!("up to {max}"),
        };
        let cpus = match iothread.cpus.as_slice() {
            [] => "any".to_owned(),
            cpus => rtvirtio_spec::plan::qemu::cpuset(cpus),
        };
        iothreads.add_row([iothread.name.to_string(), cpus, polls]);
    }
    let mut devices = table(["device", "vm", "queues", "iothreads", "data", "promise", "socket"]);
    for device in &configuration.devices {
        let iothreads: Vec<&str> = device.mapping.by_queue().iter().map(|n| n.as_str()).collect();
        let socket = match &device.listen {
            Listen::Path(path) => path.display().to_string(),
            Listen::Activated(name) => format!("systemd: {name}"),
        };
        let slots = device.slots.as_ref().map(|path| format!(", slots: {}", path.display()));
        devices.add_row([
            device.name.to_string(),
            device.vm.to_string(),
            device.queues().to_string(),
            iothreads.join(" "),
            data(&device.engine) + if device.read_only { ", read-only" } else { "" },
            device.qos.as_ref().map_or_else(String::new, promise),
            socket + slots.as_deref().unwrap_or_default(),
        ]);
    }
    if configuration.nics.is_empty() {
        return text + &format!("{iothreads}\n\n{devices}\n");
    }
    let mut nics = table(["nic", "vm", "pairs", "iothreads", "link", "mac", "socket"]);
    for nic in &configuration.nics {
        let iothreads: Vec<&str> = nic.mapping.by_queue().iter().map(|n| n.as_str()).collect();
        nics.add_row([
            nic.name.to_string(),
            nic.vm.to_string(),
            nic.pairs.to_string(),
            iothreads.join(" "),
            nic.link.to_string(),
            serve::mac_text(nic.mac),
            nic.socket.display().to_string(),
        ]);
    }
    text + &format!("{iothreads}\n\n{devices}\n\n{nics}\n")
}

fn data(engine: &Engine) -> String {
    match engine {
        Engine::File(file) => file.path.display().to_string(),
        Engine::Nvme(nvme) => {
            format!("{}{}", nvme.path.display(), if nvme.poll { ", polled" } else { "" })
        }
        Engine::Ram { size, .. } => format!("RAM, {size}"),
        Engine::Ssd(ssd) => format!("emulated {}, {}", ssd.model, ssd.size),
    }
}

fn table<const N: usize>(header: [&str; N]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header);
    table
}
