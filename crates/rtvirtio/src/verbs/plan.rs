//! `rtvirtio plan`.

mod model;

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result};
use rtvirtio_host::Topology;
use rtvirtio_planner::FoundDevice;
use rtvirtio_planner::control::Doubts;
use rtvirtio_spec::plan::{Plan, Reason};
use rtvirtio_spec::profile::{Profile, ProfileSource};
use rtvirtio_spec::specification::{Backend, Device, Specification, Vm};
use rtvirtio_units::{CpuId, DeviceName};
use rustix::thread::{CpuSet, sched_getaffinity};

pub(crate) use model::ModelChoice;

use rtvirtio_cli::plan::{self as text, describe};

use super::apply::{self, How};
use crate::{Outcome, input};

/// Arguments of `plan`.
#[derive(clap::Args)]
#[command(after_help = "Exit codes: 0 nothing to change, 2 changes, 3 unmet targets, 1 error.\n\
    A disk's NAME in the specification is the device with the id NAME or ua-NAME in QEMU; in \
    libvirt <alias name='ua-NAME'/> in its <disk> gives it that id.")]
pub(crate) struct Args {
    /// The specification (TOML)
    specification: PathBuf,
    /// Who predicts: structural, analytical (the paper's), mlp (the profile's learned model), or an
    /// ONNX file
    #[arg(long, default_value = "structural", value_name = "MODEL|FILE.onnx")]
    model: ModelChoice,
    /// Save the plan for `rtvirtio apply`
    #[arg(short, long)]
    output: Option<PathBuf>,
    /// Apply the plan at once if it meets every target; `verify` and `boot` take it from --output
    #[arg(long, requires = "output", conflicts_with = "json")]
    apply: bool,
    /// With --apply: revert after this many seconds unless `rtvirtio confirm` is run
    #[arg(long, value_name = "SECONDS", requires = "apply",
        value_parser = clap::value_parser!(u64).range(1..=86_400))]
    confirm_timeout: Option<u64>,
    /// Print the plan as JSON
    #[arg(long)]
    json: bool,
    /// Print each VM's IOThreads as QEMU arguments and libvirt XML too
    #[arg(long, conflicts_with = "json")]
    qemu: bool,
}

impl Args {
    /// Whether it changes the host.
    pub(crate) const fn applies(&self) -> bool {
        self.apply
    }
}

pub(crate) fn run(args: &Args) -> Result<Outcome> {
    let mut specification = input::specification(&args.specification)?;
    let found = input::host().locate_vms(&mut specification)?;
    let mut plan = plan(&specification, &args.model)?;
    plan.reasons.extend(found.iter().map(|(vm, (cgroup, pid))| Reason::CgroupFound {
        vm: vm.clone(),
        cgroup: cgroup.clone(),
        process: *pid,
    }));
    if let Some(output) = &args.output {
        input::write(output, &serde_json::to_string_pretty(&plan)?)?;
    }
    if args.json {
        input::print_json(&plan)?;
    } else {
        print!("{}", describe(&plan));
        if args.qemu {
            print!("\n{}", text::start_with(&plan.iothreads));
        }
        match &args.output {
            Some(output) if args.apply && plan.meets_all() => {
                println!("\nsaved: {}", output.display());
                return apply::apply_plan(&plan, &How::at_once(args.confirm_timeout));
            }
            Some(output) => println!("\nsaved: rtvirtio apply {}", output.display()),
            None => {}
        }
        if args.apply {
            println!("not applied: it leaves targets unmet");
        }
    }
    Ok(if !plan.meets_all() {
        Outcome::Unmet
    } else if plan.changes.is_empty() {
        Outcome::Done
    } else {
        Outcome::Changes
    })
}

/// The plan for this host and the VMs on it as they are now.
fn plan(specification: &Specification, model: &ModelChoice) -> Result<Plan> {
    let mut plan = plan_host(specification, &Doubts::default(), model)?;
    let of_vm = |vm: &Vm| {
        let disks = vm.disks.iter().filter(|_| vm.guest_agent).map(|d| d.name.clone());
        (vm.name.clone(), disks.collect())
    };
    let kernel_path = specification.vms.iter().filter(|vm| vm.backend == Backend::Kernel);
    let found = input::host().find_guests(&kernel_path.map(of_vm).collect())?;
    rtvirtio_planner::guests::add(&mut plan, specification, &found);
    Ok(plan)
}

/// The plan for this host alone as it is now: no VM is asked.
pub(crate) fn plan_host(
    specification: &Specification,
    doubts: &Doubts,
    model: &ModelChoice,
) -> Result<Plan> {
    let host = input::host();
    let file = model.file()?;
    let mut profiles = BTreeMap::new();
    for device in &specification.devices {
        let mut profile = profile_of(device)?;
        let slower = doubts.slower.get(&device.name);
        if let Some(factor) = slower {
            profile.capacity = profile.capacity.slower(*factor);
        }
        if slower.is_some() || doubts.was_at_risk {
            profile.structural.iocost.clear();
        }
        let learned = match model {
            ModelChoice::Mlp if has_kernel_path(specification, &device.name) => {
                Some(model::of_profile(&device.profile, &profile)?)
            }
            _ => None,
        };
        let identity = host.identity(&device.path)?;
        // Where nobody can tell, the kernel can load what the profile was measured under.
        let was_probed = |name: &str| profile.probes.iter().any(|p| p.scheduler.name() == name);
        let schedulers = host.schedulers(&device.path, was_probed)?;
        profiles.insert(device.name.clone(), (profile, identity, learned, schedulers));
    }
    let found = profiles
        .iter()
        .map(|(name, (profile, identity, learned, schedulers))| {
            let model = model.of(learned.as_ref().or(file.as_ref()));
            let (identity, schedulers) = (identity.clone(), Some(schedulers.clone()));
            (name.clone(), FoundDevice { profile, identity, model, schedulers })
        })
        .collect();
    let (running, absent) = host.running(&Topology::of_specification(specification))?;
    let observed = host.observe(&running)?;
    let mut plan = rtvirtio_planner::plan(specification, &found, &observed)?;
    // The targets of VMs that are off count, for they may start at any time; nothing can be written
    // for them until then.
    plan.changes.retain(|change| change.knob.vm().is_none_or(|vm| !absent.contains(vm)));
    for vm in &absent {
        plan.reasons.push(Reason::VmOff { vm: vm.clone() });
    }
    for (device, (profile, ..)) in &profiles {
        if profile.source != ProfileSource::Alone {
            let (device, source) = (device.clone(), profile.source);
            plan.reasons.push(Reason::Profile { device, source });
        }
        if let Some(other) = &profile.measured_on {
            let (device, other) = (device.clone(), other.clone());
            plan.reasons.push(Reason::MeasuredOn { device, other });
        }
    }
    let (iothreads, reasons) = rtvirtio_planner::iothreads::assign(specification, &cpus()?);
    plan.iothreads = iothreads;
    plan.reasons.extend(reasons);
    Ok(plan)
}

/// The profile that a specification names for a device.
pub(crate) fn profile_of(device: &Device) -> Result<Profile> {
    input::profile(&device.profile).with_context(|| {
        let path = device.path.display();
        format!("device {} (make its profile: rtvirtio calibrate {path})", device.name)
    })
}

/// Whether a VM with a disk on `device` is not the data plane's, so that a model is asked.
fn has_kernel_path(specification: &Specification, device: &DeviceName) -> bool {
    let mut kernel_path = specification.vms.iter().filter(|vm| vm.backend == Backend::Kernel);
    kernel_path.any(|vm| vm.disks.iter().any(|disk| disk.device == *device))
}

/// The host's CPUs, ascending: those that this process may use, so `taskset` can leave some out.
fn cpus() -> Result<Vec<CpuId>> {
    let set = sched_getaffinity(None).context("read the host's CPUs")?;
    let ids = (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu));
    Ok(ids.map(|cpu| CpuId::new(cpu as u32)).collect())
}
