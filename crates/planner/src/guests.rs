//! What is set within VMs that answer: their guests' schedulers, and the polling of their IOThreads.
//!
//! Rules, each with its reason:
//! 1. A disk with at most one task gets the guest's scheduler `none`. The host's
//!    scheduler orders the requests of all VMs; a second one in the guest has one
//!    stream to choose from, so it can only make requests wait.
//! 2. A disk that several tasks share, in a guest that offers it, gets bfq with
//!    `slice_idle_us` 0 and `low_latency` 0. The host sees one stream of that disk
//!    and cannot keep its tasks apart, the guest can; idling and boosting are off
//!    for what they do to tails on the host (`slice_idle` is a cliff, and
//!    `low_latency` overrules fairness: kernel Documentation/block/bfq-iosched.rst).
//! 3. An IOThread of a VM without a target does not poll: polling takes CPU time
//!    from VMs that must not miss a target, for latency that nobody asked for.
//! 4. Nor does one that the plan has no CPU of its own for (module
//!    [`iothreads`](crate::iothreads)): it would poll while a vCPU or another
//!    IOThread waits for that CPU.
//! 5. All else is left alone.
//!
//! An IOThread has a CPU of its own if the plan gives it one that no other IOThread
//! shares. One that runs under the plan's name for it, which is libvirt's too, is
//! the plan's; under any other name it may be each of the VM's, and all must have one.
//!
//! The plan's predictions are of the host, and not changed by any of this.
//!
//! Pure: same input, same settings.
//!
//! Properties (tests of the same name): `disk_with_one_task_has_no_guest_scheduler`,
//! `shared_disk_gets_bfq_where_the_guest_offers_it`, `background_does_not_poll`,
//! `iothread_without_a_cpu_of_its_own_does_not_poll`, `unseen_vm_is_left_alone_and_named`,
//! `settings_in_place_change_nothing`.

use std::collections::BTreeMap;

use rtvirtio_spec::guests::{FoundGuest, FoundQueue, GuestScheduler, GuestSettings};
use rtvirtio_spec::plan::{GuestRule, IoThreads, Plan, Reason, WhyNoPolling, qemu};
use rtvirtio_spec::settings::diff;
use rtvirtio_spec::specification::{Specification, Vm};
use rtvirtio_units::{CpuId, DiskName, IoThreadName, Nanos, VmName};

/// Adds to `plan`, whose IOThreads are assigned, what is to be set within the VMs that were
/// `found` running.
pub fn add(plan: &mut Plan, specification: &Specification, found: &BTreeMap<VmName, FoundGuest>) {
    for vm in &specification.vms {
        let Some(found) = found.get(&vm.name) else { continue };
        let unseen = |why: &String| Reason::Unseen { vm: vm.name.clone(), why: why.clone() };
        plan.reasons.extend(found.unseen.iter().map(unseen));
        let mut settings = GuestSettings::default();
        for (disk, queue) in &found.disks {
            let (scheduler, rule) = scheduler(vm, disk, queue);
            let (vm, on) = (vm.name.clone(), disk.clone());
            plan.reasons.push(Reason::GuestScheduler { vm, disk: on, rule });
            settings.disks.extend(scheduler.map(|s| (disk.clone(), s)));
        }
        for iothread in found.iothreads.keys() {
            let Some(why) = no_polling(vm, iothread, &plan.iothreads) else { continue };
            settings.poll_max.insert(iothread.clone(), Nanos::ZERO);
            let (vm, iothread) = (vm.name.clone(), iothread.clone());
            plan.reasons.push(Reason::NoPolling { vm, iothread, why });
        }
        if settings != GuestSettings::default() {
            plan.guests.0.insert(vm.name.clone(), settings);
        }
        let observed = found.knobs(&vm.name).into_iter();
        plan.observed.extend(observed.filter(|(knob, _)| plan.guests.cover(knob)));
    }
    plan.changes = diff(&plan.observed, &plan.knobs());
}

/// The scheduler of a disk within its guest, `None` to leave it alone, and why.
fn scheduler(vm: &Vm, disk: &DiskName, queue: &FoundQueue) -> (Option<GuestScheduler>, GuestRule) {
    let offers = |name: &str| queue.offered.iter().any(|o| o == name);
    let tasks = vm.tasks.iter().filter(|t| t.disk == *disk).count();
    match tasks {
        0 | 1 if offers("none") => (Some(GuestScheduler::None), GuestRule::None),
        0 | 1 => (None, GuestRule::NoneNotOffered),
        _ if offers("bfq") => {
            let bfq = GuestScheduler::Bfq { slice_idle_us: 0, low_latency: false };
            (Some(bfq), GuestRule::Bfq { tasks })
        }
        _ => (None, GuestRule::BfqNotOffered { tasks }),
    }
}

/// Why an IOThread is not to poll; `None` to leave it alone.
fn no_polling(vm: &Vm, iothread: &IoThreadName, planned: &IoThreads) -> Option<WhyNoPolling> {
    if vm.is_background() {
        Some(WhyNoPolling::NoTarget)
    } else if !has_own_cpu(&vm.name, iothread, planned) {
        Some(WhyNoPolling::NoOwnCpu)
    } else {
        None
    }
}

fn has_own_cpu(vm: &VmName, iothread: &IoThreadName, planned: &IoThreads) -> bool {
    let all: Vec<CpuId> =
        planned.vms.iter().flat_map(|v| &v.threads).filter_map(|t| t.cpu).collect();
    let is_own = |cpu: CpuId| all.iter().filter(|c| **c == cpu).count() == 1;
    let Some(of_vm) = planned.vms.iter().find(|v| v.vm == *vm) else { return false };
    let named = of_vm.threads.iter().find(|t| qemu::name(t.id) == iothread.as_str());
    let candidates = named.map_or(&of_vm.threads[..], std::slice::from_ref);
    candidates.iter().all(|t| t.cpu.is_some_and(is_own))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::planned;
    use rtvirtio_spec::settings::{BfqParameter, Knob};
    use rtvirtio_spec::specification::parse;

    /// `plc` has a target on `root`, and two tasks on `log`; `backup` has no task.
    fn specification() -> Specification {
        let text = "version = 1
[device.data]
path = '/dev/loop7'
profile = 'p.json'
[[vm]]
name = 'plc'
vcpus = 1
guest_agent = true
disk = [{ name = 'root', device = 'data' }, { name = 'log', device = 'data' }]
task = [
    { name = 'control', disk = 'root', iops = 100, target = { percentile = 99.9, latency_ms = 30 } },
    { name = 'a', disk = 'log', iops = 10 },
    { name = 'b', disk = 'log', iops = 10 },
]
[[vm]]
name = 'backup'
vcpus = 1
guest_agent = true
disk = [{ name = 'root', device = 'data' }]
";
        parse("test.toml", text).unwrap()
    }

    fn queue(offered: &[&str], selected: &str) -> FoundQueue {
        let offered = offered.iter().map(|&s| s.to_owned()).collect();
        let bfq = match selected {
            "bfq" => [
                (BfqParameter::SliceIdleUs, "8000".to_owned()),
                (BfqParameter::LowLatency, "1".to_owned()),
            ]
            .into(),
            _ => BTreeMap::new(),
        };
        FoundQueue { offered, selected: selected.to_owned(), bfq }
    }

    fn found(disks: &[(&str, FoundQueue)], iothreads: &[&str]) -> FoundGuest {
        let disk =
            |(name, queue): &(&str, FoundQueue)| (DiskName::new(*name).unwrap(), queue.clone());
        FoundGuest {
            disks: disks.iter().map(disk).collect(),
            iothreads: iothreads
                .iter()
                .map(|&id| (IoThreadName::new(id).unwrap(), Nanos::new(32_768)))
                .collect(),
            unseen: Vec::new(),
        }
    }

    /// The changes within VMs, as text, on a host with `cpus` CPUs.
    fn changes(vms: &[(&str, FoundGuest)], cpus: u32) -> (Plan, Vec<String>) {
        let specification = specification();
        let mut plan = planned(&specification);
        let cpus: Vec<CpuId> = (0..cpus).map(CpuId::new).collect();
        plan.iothreads = crate::iothreads::assign(&specification, &cpus).0;
        let found = vms.iter().map(|(name, f)| (VmName::new(*name).unwrap(), f.clone())).collect();
        add(&mut plan, &specification, &found);
        let guests = plan.changes.iter().filter(|c| c.knob.device().is_none());
        let shown = guests
            .map(|c| format!("{}: {} to {}", c.knob, c.old.as_deref().unwrap_or("-"), c.new))
            .collect();
        (plan, shown)
    }

    #[test]
    fn disk_with_one_task_has_no_guest_scheduler() {
        let offered = ["none", "mq-deadline"];
        let plc = found(&[("root", queue(&offered, "mq-deadline"))], &[]);
        // A VM that declares nothing has one stream too, as far as is known.
        let backup = found(&[("root", queue(&offered, "none"))], &[]);
        let (plan, changes) = changes(&[("plc", plc), ("backup", backup)], 8);
        assert_eq!(changes, ["plc/root: guest scheduler: mq-deadline to none"]);
        assert!(
            plan.reasons.iter().any(|r| r.to_string().starts_with("plc/root: no scheduler within"))
        );
        assert_eq!(plan.guests.0.len(), 2);
        let host = planned(&specification());
        assert_eq!((plan.tasks, plan.settings), (host.tasks, host.settings));
    }

    #[test]
    fn shared_disk_gets_bfq_where_the_guest_offers_it() {
        let plc = found(&[("log", queue(&["none", "bfq"], "none"))], &[]);
        let (_, shown) = changes(&[("plc", plc)], 8);
        assert_eq!(
            shown,
            [
                "plc/log: guest scheduler: none to bfq",
                "plc/log: guest bfq slice_idle_us: - to 0",
                "plc/log: guest bfq low_latency: - to 0",
            ]
        );
        let plc = found(&[("log", queue(&["none", "mq-deadline"], "mq-deadline"))], &[]);
        let (plan, shown) = changes(&[("plc", plc)], 8);
        assert_eq!(shown, [""; 0]);
        assert!(
            plan.reasons.iter().any(|r| r.to_string().contains("offers no bfq")),
            "{:?}",
            plan.reasons
        );
        // What is left alone may change without making the plan stale.
        assert!(plan.observed.keys().all(|k| k.device().is_some()));
    }

    #[test]
    fn background_does_not_poll() {
        let (_, shown) = changes(&[("backup", found(&[], &["io0"]))], 8);
        assert_eq!(shown, ["backup: IOThread io0: poll-max-ns: 32768 to 0"]);
    }

    #[test]
    fn iothread_without_a_cpu_of_its_own_does_not_poll() {
        // CPU 7 is for the disk with a target; CPU 6 serves `log`, and `backup` too.
        let vms = [("plc", found(&[], &["iothread1", "iothread2", "io0"]))];
        let expected =
            ["io0", "iothread2"].map(|id| format!("plc: IOThread {id}: poll-max-ns: 32768 to 0"));
        assert_eq!(changes(&vms, 8).1, expected);
        // Two CPUs are for the vCPUs: none is left.
        assert_eq!(changes(&vms, 2).1.len(), 3);
    }

    #[test]
    fn unseen_vm_is_left_alone_and_named() {
        let unseen = vec!["planned for on the host alone: no answer".to_owned()];
        let (plan, shown) = changes(&[("plc", FoundGuest { unseen, ..found(&[], &[]) })], 8);
        assert_eq!(shown, [""; 0]);
        assert!(plan.guests.0.is_empty());
        let reason = "plc: planned for on the host alone: no answer".to_owned();
        assert!(plan.reasons.iter().any(|r| r.to_string() == reason), "{:?}", plan.reasons);
    }

    #[test]
    fn settings_in_place_change_nothing() {
        let vms = [("plc", found(&[("root", queue(&["none"], "none"))], &[]))];
        let (plan, shown) = changes(&vms, 8);
        assert_eq!(shown, [""; 0]);
        let knob = Knob::GuestScheduler {
            vm: VmName::new("plc").unwrap(),
            disk: DiskName::new("root").unwrap(),
        };
        // It is a setting all the same: `verify` looks at it.
        assert_eq!((&plan.observed[&knob], &plan.knobs()[&knob]), (&"none".into(), &"none".into()));
    }
}
