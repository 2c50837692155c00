//! `rtvirtio init`: a specification of the VMs that run here, from what they are seen to do.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rtvirtio_cli::progress::Progress;
use rtvirtio_host::interrupt::{Interrupted, wait};
use rtvirtio_host::storage::{Layer, Leaf, Stack};
use rtvirtio_observe::counters::Interval;
use rtvirtio_observe::session::{DiskLook, Session};
use rtvirtio_observe::vms;
use rtvirtio_spec::specification::{
    Backend, Device, Disk, Load, Recognise, Specification, Target, Task, Vm, to_toml,
};
use rtvirtio_units::{Bytes, Confidence, DeviceName, DiskName, Iops, TaskName, VmName};

use super::mapping::quoted;
use crate::wish::Wish;
use crate::{Outcome, input, output};

/// How sure bounds are to be.
const CONFIDENCE: f64 = 0.95;
/// How often the disks are looked at: a request more than this in flight is seen at once.
const LOOK: Duration = Duration::from_secs(2);
/// A request may take so long without the observed rate being out of reach.
const ROOM: Duration = Duration::from_millis(1);
/// What a task is taken to do whose disk was idle: the paper's light one.
const LIGHT: (f64, u64, f64) = (100.0, 4096, 0.7);

/// Arguments of `init`.
#[derive(clap::Args)]
#[command(after_help = "Three commands from VMs to targets that are kept:\n\
    \x20 rtvirtio init db=p99.9:5ms -o site.toml\n\
    \x20 rtvirtio calibrate --in DIRECTORY -o PROFILE          (as init prints it, for each device)\n\
    \x20 rtvirtio plan site.toml -o site.plan --apply --confirm-timeout 120\n\
    Then: confirm, verify, rollback. Without --apply nothing is changed on the host.\n\
    A VM may be named by its disk too: db/vdb=p99:800us. VMs without a target are background: what they \
    were seen to do is written down, and a plan may hold them to what is left.")]
pub(crate) struct Args {
    /// A VM's target: how long which percentile of its requests may take
    #[arg(value_name = "VM[/DISK]=pPERCENTILE:TIME")]
    targets: Vec<Wish>,
    /// Watch what the VMs do for so many seconds
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(2..=3600))]
    observe: u64,
    /// Where profiles are to be
    #[arg(long, value_name = "DIRECTORY", default_value = "/var/lib/rtvirtio/profiles")]
    profiles: PathBuf,
    /// Write the specification there; without, on standard output
    #[arg(short, long)]
    output: Option<PathBuf>,
    /// Print what was found as JSON
    #[arg(long, conflicts_with = "output")]
    json: bool,
}

pub(crate) fn run(args: &Args, interrupted: &Interrupted) -> Result<Outcome> {
    if let Some(output) = &args.output {
        // A specification that somebody has edited is not written over.
        input::refuse_to_replace(output)?;
        input::check_output(output)?;
    }
    let mut session = Session::new(input::host());
    let mut events = session.refresh_until(interrupted)?;
    // Of VMs that were not asked nothing is known.
    wait(Duration::ZERO, interrupted)?;
    let running: Vec<String> = session.vms().map(|vm| vm.name.clone()).collect();
    check_wishes(&args.targets, &session)?;
    ensure!(
        !running.is_empty(),
        "no VM runs here: start those that are to share a disk, and try again (QEMU processes are looked for)"
    );
    let off = vms::switched_off();
    session.look();
    let mut seen: BTreeMap<(u32, usize), (DiskLook, Interval)> = BTreeMap::new();
    let looks = args.observe.div_ceil(LOOK.as_secs());
    let mut progress = Progress::new(looks as usize, LOOK * looks as u32);
    for _ in 0..looks {
        progress.start("init: watching what the VMs do", LOOK);
        wait(LOOK, interrupted)?;
        let (found, lost) = session.look();
        events.extend(lost);
        let mut of_vm: BTreeMap<u32, usize> = BTreeMap::new();
        for look in found {
            let index = of_vm.entry(look.pid).or_default();
            let (_, sum) = seen
                .entry((look.pid, *index))
                .or_insert_with(|| (look.clone(), Interval::default()));
            if let Some(last) = &look.last {
                sum.merge(last);
            }
            *index += 1;
        }
        progress.finish(LOOK);
    }
    drop(progress);
    let cgroups = session.vms().map(|vm| (vm.pid, vm.cgroup.clone())).collect();
    let mut site = Site::draw(args, &seen, &cgroups, |leaf| by_id(&leaf.node()));
    let mut notes = std::mem::take(&mut site.notes);
    notes.extend(events);
    notes.extend(off.iter().map(|name| format!("VM {name} is switched off: left out")));
    let text = text(&site, &notes, args.json).inspect_err(|_| {
        notes.iter().for_each(|note| eprintln!("{}", output::visible(note)));
    })?;
    if args.json {
        let devices: BTreeMap<_, _> =
            site.specification.devices.iter().map(|d| (d.name.as_str(), &d.path)).collect();
        input::print_json(&serde_json::json!({
            "specification": text,
            "devices": devices,
            "notes": notes,
            "switched_off": off,
        }))?;
        return Ok(Outcome::Done);
    }
    match &args.output {
        Some(output) => {
            // Somebody may have made it meanwhile.
            input::refuse_to_replace(output)?;
            input::write(output, &text)?;
            notes.iter().for_each(|note| println!("{}", output::visible(note)));
            println!("{}", next_steps(&site, output));
        }
        None => print!("{text}"),
    }
    Ok(Outcome::Done)
}

/// The specification, which `plan` takes; for a program without comments.
fn text(site: &Site, notes: &[String], for_program: bool) -> Result<String> {
    ensure!(
        !site.specification.vms.is_empty(),
        "none of the VMs that run here has a disk that rtvirtio can control"
    );
    let text = match for_program {
        true => to_toml(&site.specification),
        false => commented(&site.specification, notes, &site.observed),
    };
    rtvirtio_spec::specification::parse("the specification", &text)
        .context("a fault of rtvirtio's: please report it with the VMs' command lines")?;
    Ok(text)
}

/// Every wish must be of a VM that runs, and of a disk that it has.
fn check_wishes(wishes: &[Wish], session: &Session) -> Result<()> {
    for wish in wishes {
        let mut named = session.vms().filter(|vm| vm.name == wish.vm);
        let Some(vm) = named.next() else {
            let all: Vec<&str> = session.vms().map(|vm| vm.name.as_str()).collect();
            let all = if all.is_empty() { "none".to_owned() } else { all.join(", ") };
            bail!("no VM of the name {} runs here; running: {all}", wish.vm);
        };
        let Some(disk) = &wish.disk else { continue };
        if !vm.disks.iter().any(|found| found.is_called(disk)) {
            let all: Vec<String> = vm.disks.iter().map(|disk| disk.names.join(" = ")).collect();
            bail!("VM {} has no disk called {disk}; it has: {}", vm.name, all.join("; "));
        }
    }
    Ok(())
}

/// The stable name of a device, if it has one.
fn by_id(node: &Path) -> PathBuf {
    let directory = Path::new("/dev/disk/by-id");
    let Ok(target) = std::fs::canonicalize(node) else { return node.to_owned() };
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let is_it = |path: &PathBuf| std::fs::canonicalize(path).is_ok_and(|found| found == target);
    // A name that says what it is comes before a number.
    let number = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        (name.starts_with("wwn-") || name.contains("eui."), name)
    };
    let mut names: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(is_it).collect();
    names.sort_by_key(number);
    names.into_iter().next().unwrap_or_else(|| node.to_owned())
}

/// What was found, as a specification.
struct Site {
    specification: Specification,
    /// What is left out, and why.
    notes: Vec<String>,
    /// Each VM's disks, in words.
    observed: BTreeMap<VmName, Vec<String>>,
    /// Devices with a directory on them in which a VM has an image.
    directories: BTreeMap<DeviceName, PathBuf>,
}

type Seen = BTreeMap<(u32, usize), (DiskLook, Interval)>;

impl Site {
    fn draw(
        args: &Args,
        seen: &Seen,
        cgroups: &BTreeMap<u32, Option<PathBuf>>,
        stable: impl Fn(&Leaf) -> PathBuf,
    ) -> Self {
        let mut site = Self {
            specification: Specification { data_plane: None, devices: vec![], vms: vec![] },
            notes: Vec::new(),
            observed: BTreeMap::new(),
            directories: BTreeMap::new(),
        };
        let shared = shared_disks(seen.values().map(|(look, _)| look));
        for (&(pid, _), (look, sum)) in seen {
            let label = format!("{}/{}", look.vm, look.disk.name());
            let planned = match on_one_device(look) {
                Ok(leaf) => shared.get(&leaf.name).cloned().map_or(Ok(leaf), Err),
                Err(why) => Err(why),
            };
            let planned =
                planned.and_then(|leaf| site.disk(args, (pid, leaf), look, sum, cgroups, &stable));
            match planned {
                Ok(()) => {}
                Err(why) => site.notes.push(format!("{label}: left out: {why}")),
            }
        }
        site.specification.vms.sort_by(|a, b| a.name.cmp(&b.name));
        site
    }

    fn disk(
        &mut self,
        args: &Args,
        (pid, leaf): (u32, &Leaf),
        look: &DiskLook,
        sum: &Interval,
        cgroups: &BTreeMap<u32, Option<PathBuf>>,
        stable: impl Fn(&Leaf) -> PathBuf,
    ) -> Result<(), String> {
        let name = VmName::new(look.vm.clone()).map_err(|e| e.to_string())?;
        let cgroup = cgroups.get(&pid).cloned().flatten().ok_or_else(|| {
            "its QEMU has no cgroup of its own (start it in a systemd scope: systemd-run --scope)"
                .to_owned()
        })?;
        let valid = look.disk.names.iter().find_map(|name| DiskName::new(name.clone()).ok());
        let disk = valid.ok_or("none of its names can be written down")?;
        let device = self.device(args, leaf, stable)?;
        let layers = look.disk.storage.iter().flat_map(|stack| &stack.layers);
        if layers.into_iter().any(|layer| matches!(layer, Layer::Filesystem { .. })) {
            let directory = look.disk.file.as_deref().and_then(Path::parent).map(Path::to_owned);
            self.directories.extend(directory.map(|directory| (device.clone(), directory)));
        }
        let wish = args
            .targets
            .iter()
            .filter(|wish| wish.vm == look.vm)
            .find(|wish| wish.disk.as_ref().is_none_or(|disk| look.disk.is_called(disk)));
        let load = load(sum);
        let task = match (wish, load) {
            (None, None) => None,
            (wish, load) => {
                let target = wish.map(|wish| Target {
                    percentile: wish.percentile,
                    latency: wish.latency,
                    confidence: Confidence::new(CONFIDENCE).expect("it is one"),
                });
                let load = load.unwrap_or_else(light);
                let name = TaskName::new(format!("io-{disk}"));
                let name = name.or_else(|_| TaskName::new("io")).expect("it is a name");
                Some(Task { name, disk: disk.clone(), recognise: Recognise::Disk, load, target })
            }
        };
        let vms = &mut self.specification.vms;
        let at = match vms.iter().position(|vm| vm.name == name) {
            Some(at) if vms[at].cgroup != cgroup => {
                return Err(format!("two VMs are called {name}"));
            }
            Some(at) => at,
            None => {
                vms.push(Vm {
                    name: name.clone(),
                    backend: Backend::Kernel,
                    cgroup,
                    vcpus: None,
                    guest_agent: false,
                    disks: Vec::new(),
                    tasks: Vec::new(),
                });
                vms.len() - 1
            }
        };
        if vms[at].disks.iter().any(|there| there.name == disk) {
            return Err(format!("two of its disks are called {disk}"));
        }
        vms[at].disks.push(Disk { name: disk, device, queues: None });
        vms[at].tasks.extend(task);
        self.observed.entry(name).or_default().push(describe(look, sum));
        Ok(())
    }

    fn device(
        &mut self,
        args: &Args,
        leaf: &Leaf,
        stable: impl Fn(&Leaf) -> PathBuf,
    ) -> Result<DeviceName, String> {
        let name = DeviceName::new(leaf.name.replace('!', "-")).map_err(|e| e.to_string())?;
        if !self.specification.devices.iter().any(|device| device.name == name) {
            let profile = args.profiles.join(format!("{name}.json"));
            let path = stable(leaf);
            self.specification.devices.push(Device { name: name.clone(), path, profile });
        }
        Ok(name)
    }
}

/// The device of the host that a plan for this disk is for.
fn on_one_device(look: &DiskLook) -> Result<&Leaf, String> {
    let unknown = look.disk.unknown_storage.as_deref().unwrap_or("its storage is not known");
    let stack: &Stack = look.disk.storage.as_ref().ok_or(unknown)?;
    match stack.leaves.as_slice() {
        [leaf] => Ok(leaf),
        [] => Err(stack.to_string()),
        _ => Err(format!(
            "{stack}: a plan is for a VM's disk on one disk of the host, and this is on several"
        )),
    }
}

/// Why no VM's disk on an array can be planned for, by the array's name: one of the array's disks is
/// planned for too, itself or in another array.
fn shared_disks<'a>(looks: impl Iterator<Item = &'a DiskLook>) -> BTreeMap<String, String> {
    let leaves: BTreeSet<&Leaf> = looks.filter_map(|look| on_one_device(look).ok()).collect();
    let (arrays, disks): (Vec<&Leaf>, Vec<&Leaf>) =
        leaves.into_iter().partition(|leaf| leaf.array.is_some());
    let mut users: BTreeMap<&str, &str> =
        disks.iter().map(|leaf| (leaf.name.as_str(), leaf.name.as_str())).collect();
    let mut shared = BTreeMap::new();
    for leaf in arrays {
        let disks = leaf.array.iter().flat_map(|array| &array.disks);
        let mut used = disks.clone().filter_map(|disk| Some((disk, users.get(disk.as_str())?)));
        if let Some((disk, user)) = used.next() {
            let why = format!(
                "{} lies on {disk}, and so do other VMs' disks on {user}: a plan for one does not know what the \
                 other takes",
                leaf.name
            );
            shared.insert(leaf.name.clone(), why);
            continue;
        }
        users.extend(disks.map(|disk| (disk.as_str(), leaf.name.as_str())));
    }
    shared
}

/// What a disk was seen to do; `None`: less than a request in two seconds.
fn load(sum: &Interval) -> Option<Load> {
    let requests = sum.requests();
    let seconds = sum.seconds.max(1e-3);
    let rate = requests as f64 / seconds;
    if rate < 0.5 {
        return None;
    }
    // In whole sectors, as requests are.
    let bytes = sum.bytes() / requests;
    let bytes = bytes.clamp(1, 16 << 20).next_multiple_of(512);
    // The mean, by Little's law, of which there may be twice as many at a time; and enough for its rate
    // where a request takes a millisecond. Of fewer, a rate that was reached with all of them in flight
    // could not be promised.
    let depth = (2.0 * sum.busy.as_secs_f64() / seconds).max(rate * ROOM.as_secs_f64());
    Some(Load {
        iops: Iops::new(rate.ceil()).ok(),
        block_size: Bytes::new(bytes),
        read_fraction: (sum.reads as f64 / requests as f64 * 100.0).round() / 100.0,
        queue_depth: (depth.ceil() as u32).clamp(1, 1024),
    })
}

fn light() -> Load {
    let (iops, bytes, read_fraction) = LIGHT;
    Load {
        iops: Iops::new(iops).ok(),
        block_size: Bytes::new(bytes),
        read_fraction,
        queue_depth: 1,
    }
}

fn describe(look: &DiskLook, sum: &Interval) -> String {
    let seconds = sum.seconds.max(1e-3);
    let names = look.disk.names.join(" = ");
    let stack = look.disk.storage.as_ref().map(ToString::to_string).unwrap_or_default();
    let seen = match &look.last {
        None => "not measured".to_owned(),
        Some(_) if sum.requests() == 0 => "idle while it was watched".to_owned(),
        Some(_) => format!(
            "{:.0} reads and {:.0} writes a second, {:.1} MB/s",
            sum.reads as f64 / seconds,
            sum.writes as f64 / seconds,
            sum.bytes() as f64 / 1e6 / seconds
        ),
    };
    format!("{names}: {stack}; {seen}")
}

/// The specification with what was seen, as comments.
fn commented(
    specification: &Specification,
    notes: &[String],
    observed: &BTreeMap<VmName, Vec<String>>,
) -> String {
    let mut out = String::from(
        "# Written by `rtvirtio init` from what the VMs of this host were seen to do.\n\
         # A task's iops, block_size and read_percent are what was measured, its queue_depth leaves room:\n\
         # raise them to what it may need at its busiest. `target` is how long which percentile may take; a task\n\
         # without one is background. A VM without a task may do anything.\n",
    );
    for line in notes.iter().flat_map(|note| note.lines()) {
        let _ = writeln!(out, "# {}", vms::plain(line));
    }
    let toml = to_toml(specification);
    let mut vms = specification.vms.iter();
    for line in toml.lines() {
        if line == "[[vm]]" {
            let of_vm = vms.next().and_then(|vm| observed.get(&vm.name));
            for text in of_vm.into_iter().flatten() {
                let _ = writeln!(out, "# {}", vms::plain(text));
            }
        }
        out.push_str(line);
        out.push('\n');
    }
    out
}

fn next_steps(site: &Site, output: &Path) -> String {
    let specification = &site.specification;
    let mut out = String::new();
    let path = |path: &Path| quoted(&vms::plain(&path.display().to_string()));
    for device in &specification.devices {
        // A specification's profiles are relative to its directory, and what is typed to that of the shell.
        let profile = output.parent().unwrap_or(Path::new(".")).join(&device.profile);
        if !profile.exists() {
            // Those who have a target must not notice the calibration.
            let on_it = specification
                .vms
                .iter()
                .filter(|vm| vm.disks.iter().any(|disk| disk.device == device.name));
            let targets = on_it.flat_map(|vm| vm.tasks.iter().map(move |task| (vm, task.target)));
            let targets: String = targets
                .filter_map(|(vm, target)| {
                    let Target { percentile, latency, .. } = target?;
                    let time = match latency.get() / 1000 {
                        micros if micros % 1000 == 0 => format!("{}ms", micros / 1000),
                        micros => format!("{micros}us"),
                    };
                    let target = format!("{}=p{}:{time}", vm.name, percentile.get());
                    Some(format!(" --target {}", quoted(&target)))
                })
                .collect();
            let directory = site.directories.get(&device.name).map(|directory| path(directory));
            let (next, place) = match directory {
                Some(directory) => ("next".to_owned(), directory),
                None => (
                    format!(
                        "next, for a directory or an empty volume on {}",
                        device.path.display()
                    ),
                    "LOCATION".to_owned(),
                ),
            };
            let profile = path(&profile);
            let _ = writeln!(out, "{next}: rtvirtio calibrate --in {place} -o {profile}{targets}");
        }
    }
    let _ = write!(
        out,
        "then: rtvirtio plan {} -o {} --apply --confirm-timeout 120",
        path(output),
        path(&output.with_extension("plan"))
    );
    out
}

#[cfg(test)]
mod tests {
    use rtvirtio_host::storage::Array;
    use rtvirtio_host::sysfs::DeviceNumber;
    use rtvirtio_units::Nanos;

    use super::*;

    fn look(vm: &str, pid: u32, names: &[&str], stack: Option<Stack>) -> DiskLook {
        DiskLook {
            vm: vm.to_owned(),
            pid,
            disk: vms::Disk {
                part: None,
                names: names.iter().map(|&name| name.to_owned()).collect(),
                qom_path: None,
                libvirt: None,
                format: Some("qcow2".to_owned()),
                file: None,
                unknown_storage: stack.is_none().then(|| "rbd".to_owned()),
                storage: stack,
                throttle: Default::default(),
            },
            last: Some(Interval::default()),
            recent: Interval::default(),
            below: vec![],
            cgroup_limits: Default::default(),
            cpu_wait: 0.0,
        }
    }

    fn stack(leaves: &[&str]) -> Option<Stack> {
        let leaf = |(i, &name): (usize, &&str)| Leaf {
            name: name.to_owned(),
            number: DeviceNumber::new(8, i as u32 * 16),
            backing: None,
            array: None,
        };
        let leaves = leaves.iter().enumerate().map(leaf).collect();
        Some(Stack { leaves, ..Stack::default() })
    }

    fn did(reads: u64, writes: u64) -> Interval {
        Interval {
            seconds: 10.0,
            reads,
            writes,
            read_bytes: reads * 4096,
            write_bytes: writes * 4096,
            busy: Nanos::from_secs_f64(15.0),
            ..Interval::default()
        }
    }

    fn args(targets: &[&str]) -> Args {
        Args {
            targets: targets.iter().map(|text| text.parse().unwrap()).collect(),
            observe: 60,
            profiles: "/var/lib/rtvirtio/profiles".into(),
            output: None,
            json: false,
        }
    }

    #[test]
    fn array_on_the_disk_of_another_vm_is_left_out() {
        let array = |name: &str, disks: &[&str]| {
            let mut stack = stack(&[name]).unwrap();
            let disks = disks.iter().map(|&disk| disk.to_owned()).collect();
            stack.leaves[0].array = Some(Array { level: "raid1".to_owned(), disks });
            look(name, 1, &["vda"], Some(stack))
        };
        let (first, second) = (array("md0", &["sda", "sdb"]), array("md1", &["sdb", "sdc"]));
        let plain = look("db", 2, &["vda"], stack(&["sda"]));
        assert!(shared_disks([&first].into_iter()).is_empty());
        let shared = shared_disks([&second, &first].into_iter());
        assert_eq!(shared.keys().collect::<Vec<_>>(), ["md1"]);
        assert!(shared["md1"].starts_with("md1 lies on sdb, and so do other VMs' disks on md0"));
        let shared = shared_disks([&first, &second, &plain].into_iter());
        assert_eq!(shared.keys().collect::<Vec<_>>(), ["md0"]);
    }

    #[test]
    fn next_commands_are_for_a_shell_and_its_directory() {
        let mut stack = stack(&["sda"]);
        let layer = Layer::Filesystem { kind: "ext4".to_owned(), mount: "/srv".into() };
        stack.as_mut().unwrap().layers.push(layer);
        let mut look = look("my vm", 1, &["vda"], stack);
        look.disk.file = Some("/srv/vm images/a.raw".into());
        let seen: Seen = [((1, 0), (look, did(700, 300)))].into();
        let cgroups = BTreeMap::from([(1, Some(PathBuf::from("machine.slice/vm")))]);
        let args = Args { profiles: "profiles".into(), ..args(&["my vm=p99:5ms"]) };
        let site = Site::draw(&args, &seen, &cgroups, |leaf| leaf.node());
        let told = next_steps(&site, Path::new("/nonexistent/it's.toml"));
        assert_eq!(
            told,
            "next: rtvirtio calibrate --in '/srv/vm images' -o /nonexistent/profiles/sda.json \
             --target 'my vm=p99:5ms'\n\
             then: rtvirtio plan '/nonexistent/it'\\''s.toml' -o '/nonexistent/it'\\''s.plan' --apply \
             --confirm-timeout 120"
        );
    }

    #[test]
    fn load_that_a_vm_makes_up_is_within_what_a_specification_takes() {
        let all = u64::MAX;
        let made_up =
            Interval { reads: all, writes: all, read_bytes: all, write_bytes: all, ..did(1, 1) };
        let found = load(&made_up).unwrap();
        assert_eq!((found.block_size.get(), found.queue_depth), (512, 1024));
        let large = Interval { read_bytes: all, write_bytes: all, ..did(5, 5) };
        assert_eq!(load(&large).unwrap().block_size.get(), 16 << 20);
    }

    #[test]
    fn specification_without_a_vm_is_an_error_as_text_and_as_json() {
        let seen: Seen = [((1, 0), (look("db", 1, &["vda"], None), did(1, 1)))].into();
        let site = Site::draw(&args(&[]), &seen, &BTreeMap::new(), |leaf| leaf.node());
        for for_program in [false, true] {
            let error = text(&site, &site.notes, for_program).unwrap_err().to_string();
            assert!(error.starts_with("none of the VMs that run here"), "{error}");
        }
    }

    #[test]
    fn site_has_what_was_seen_and_says_what_it_leaves_out() {
        let scope = PathBuf::from("machine.slice/machine-qemu\\x2d1\\x2ddb.scope");
        let cgroups = [
            (1, Some(scope.clone())),
            (2, Some("machine.slice/web".into())),
            (3, None),
            (4, Some("m/r".into())),
            (5, Some("m/i".into())),
        ];
        let (no_file, several) = (None, stack(&["sda", "sdb"]));
        let seen: Seen = [
            (
                (1, 0),
                (
                    look("db", 1, &["vda", "virtio-disk0", "/vm/db.qcow2"], stack(&["sda"])),
                    did(700, 300),
                ),
            ),
            ((1, 1), (look("db", 1, &["vdb"], no_file), did(1, 1))),
            ((2, 0), (look("web", 2, &["/vm/web.img", "drive0"], stack(&["sda"])), did(0, 0))),
            ((3, 0), (look("bare", 3, &["vda"], stack(&["sda"])), did(5, 5))),
            ((4, 0), (look("raid", 4, &["vda"], several), did(5, 5))),
            ((5, 0), (look("idle", 5, &["vda"], stack(&["sda"])), did(0, 0))),
        ]
        .into();
        let wishes = args(&["db=p99.9:5ms", "idle=p99:10ms"]);
        let site = Site::draw(&wishes, &seen, &cgroups.into(), |leaf| leaf.node());
        let names: Vec<&str> = site.specification.vms.iter().map(|vm| vm.name.as_str()).collect();
        assert_eq!(names, ["db", "idle", "web"]);
        let notes = site.notes.join("\n");
        for part in
            ["db/vdb: left out: rbd", "bare/vda: left out: its QEMU has no cgroup", "raid/vda"]
        {
            assert!(notes.contains(part), "{notes}");
        }
        let notes = [site.notes, vec!["db/\u{1b}[2J\r: left out".to_owned()]].concat();
        let observed = [(VmName::new("db").unwrap(), vec!["\u{7f}a\nb".to_owned()])].into();
        let text = commented(&site.specification, &notes, &observed);
        assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text:?}");
        let parsed = rtvirtio_spec::specification::parse("site.toml", &text).unwrap();
        assert_eq!(parsed, site.specification, "{text}");
        let db = &parsed.vms[0];
        assert_eq!(db.cgroup, scope);
        let task = &db.tasks[0];
        let load = &task.load;
        assert_eq!((load.iops.map(Iops::get), load.block_size.get()), (Some(100.0), 4096));
        assert_eq!((load.read_fraction, load.queue_depth), (0.7, 3));
        assert_eq!(task.target.unwrap().latency, Nanos::from_millis(5));
        // One that was idle and has a target gets a light load, and one without is background.
        assert_eq!(parsed.vms[1].tasks[0].load.iops.map(Iops::get), Some(100.0));
        assert!(parsed.vms[2].tasks.is_empty());
        assert_eq!(parsed.vms[2].disks[0].name.as_str(), "drive0");
        assert_eq!(parsed.devices.len(), 1);
    }
}
