//! Tests of the assignment of queues to IOThreads and of IOThreads to CPUs.

use std::collections::BTreeSet;

use rtvirtio_spec::specification::parse;

use super::*;

const TARGET: &str = "target = { latency_ms = 10 }";

/// A VM's entry. A disk is its name, its own lines and its task's; no lines: no task.
fn vm(name: &str, lines: &str, disks: &[(&str, &str, &str)]) -> String {
    let mut text = format!("[[vm]]\nname = \"{name}\"\n{lines}\n");
    for (disk, lines, _) in disks {
        text += &format!("[[vm.disk]]\nname = \"{disk}\"\ndevice = \"data\"\n{lines}\n");
    }
    for (disk, _, task) in disks.iter().filter(|d| !d.2.is_empty()) {
        text += &format!("[[vm.task]]\nname = \"t-{disk}\"\ndisk = \"{disk}\"\n{task}\n");
    }
    text
}

/// A VM of one disk with a target.
fn one_disk(vcpus: u32, queues: u32, iops: f64) -> String {
    let task = format!("iops = {iops}\n{TARGET}");
    vm("plc", &format!("vcpus = {vcpus}"), &[("root", &format!("queues = {queues}"), &task)])
}

fn specification(vms: &[String]) -> Specification {
    let head = "version = 1\n[device.data]\npath = \"/dev/loop7\"\nprofile = \"p.json\"\n";
    parse("test.toml", &format!("{head}{}", vms.concat())).unwrap()
}

fn cpus(count: u32) -> Vec<CpuId> {
    (0..count).map(CpuId::new).collect()
}

/// The assignment on a host of `count` CPUs, after a look at what always holds.
fn assigned(vms: &[String], count: u32) -> (IoThreads, Vec<String>) {
    let specification = specification(vms);
    let (iothreads, reasons) = assign(&specification, &cpus(count));
    for planned in &iothreads.vms {
        let vm = specification.vms.iter().find(|vm| vm.name == planned.vm).unwrap();
        let ids: Vec<_> = planned.threads.iter().map(|t| t.id.get()).collect();
        assert_eq!(ids, (1..=planned.threads.len() as u32).collect::<Vec<_>>());
        for disk in &vm.disks {
            let mapped: Vec<_> = planned.disks.iter().filter(|d| d.disk == disk.name).collect();
            let queues: usize = mapped.iter().map(|d| d.queues.len()).sum();
            assert_eq!(mapped.len(), usize::from(vm.queues_of(disk).is_some()));
            assert_eq!(queues, vm.queues_of(disk).unwrap_or(0) as usize);
        }
        let used: BTreeSet<_> = planned.disks.iter().flat_map(|d| &d.queues).copied().collect();
        let there: BTreeSet<_> = planned.threads.iter().map(|t| t.id).collect();
        assert_eq!(used, there, "each IOThread has a queue, each queue an IOThread");
    }
    let taken: BTreeSet<_> = pins(&iothreads).into_iter().flatten().collect();
    assert!(iothreads.vcpu_cpus.iter().all(|cpu| !taken.contains(cpu)));
    if !taken.is_empty() {
        let vcpus: u32 = specification.vms.iter().map(|vm| vm.vcpus.unwrap_or(1)).sum();
        assert!(iothreads.vcpu_cpus.len() >= vcpus as usize);
        assert!(pins(&iothreads).iter().all(Option::is_some));
    }
    (iothreads, reasons.iter().map(Reason::to_string).collect())
}

/// The CPU of each IOThread.
fn pins(iothreads: &IoThreads) -> Vec<Option<CpuId>> {
    iothreads.vms.iter().flat_map(|vm| &vm.threads).map(|t| t.cpu).collect()
}

fn pin_numbers(iothreads: &IoThreads) -> Vec<u32> {
    pins(iothreads).into_iter().flatten().map(CpuId::get).collect()
}

fn queues(iothreads: &IoThreads, disk: usize) -> Vec<u32> {
    iothreads.vms[0].disks[disk].queues.iter().map(|t| t.get()).collect()
}

/// What always holds is in `assigned`; here is a grid of inputs for it.
#[test]
fn every_queue_has_one_iothread() {
    let background = vm("backup", "", &[("root", "queues = 3", "")]);
    for count in [1, 2, 3, 5, 8, 64] {
        for (vcpus, queues) in [(1, 1), (1, 5), (2, 2), (4, 1), (4, 3), (32, 32), (512, 1024)] {
            for iops in [0.5, 30_000.0, 30_001.0, 100_000.0, 1e8] {
                let task = format!("iops = {iops}\n{TARGET}");
                let disks = [
                    ("root", format!("queues = {queues}"), task.as_str()),
                    ("data", String::new(), "iops = 70000"),
                    ("log", String::new(), TARGET),
                ];
                let disks = disks.each_ref().map(|(name, lines, task)| (*name, &**lines, *task));
                let vms = [vm("plc", &format!("vcpus = {vcpus}"), &disks), background.clone()];
                let (iothreads, _) = assigned(&vms, count);
                assert_eq!(iothreads.vms.len(), 2);
            }
        }
    }
}

#[test]
fn every_iothread_has_a_queue() {
    // Three disks of one queue each, work for two: in turn over the disks.
    let task = format!("iops = 20000\n{TARGET}");
    let disks = ["a", "b", "c"].map(|name| (name, "queues = 1", task.as_str()));
    let (iothreads, reasons) = assigned(&[vm("plc", "vcpus = 2", &disks)], 8);
    assert_eq!([0, 1, 2].map(|disk| queues(&iothreads, disk)), [[1], [2], [1]]);
    assert!(reasons.is_empty(), "{reasons:?}");
}

#[test]
fn small_rate_gets_one_iothread() {
    let (iothreads, reasons) = assigned(&[one_disk(4, 4, 2100.0)], 8);
    assert_eq!(queues(&iothreads, 0), [1, 1, 1, 1]);
    assert_eq!(pin_numbers(&iothreads), [7]);
    assert_eq!(iothreads.vcpu_cpus, cpus(7));
    assert!(reasons.is_empty(), "{reasons:?}");
}

#[test]
fn iothreads_suffice_for_the_rate() {
    let of = |iops| assigned(&[one_disk(8, 8, iops)], 16).0;
    let size = |iops| of(iops).vms[0].threads.len();
    assert_eq!([30_000.0, 30_001.0, 60_000.0, 100_000.0].map(size), [1, 2, 2, 4]);
    assert_eq!(queues(&of(100_000.0), 0), [1, 2, 3, 4, 1, 2, 3, 4]);
    assert_eq!(pin_numbers(&of(100_000.0)), [15, 14, 13, 12]);
}

#[test]
fn never_more_iothreads_than_queues_or_cpus_left() {
    let of = |vcpus, queues, count| {
        let (iothreads, reasons) = assigned(&[one_disk(vcpus, queues, 1e6)], count);
        (iothreads.vms[0].threads.len(), reasons.join("\n"))
    };
    let (size, reasons) = of(8, 2, 64);
    assert_eq!(size, 2);
    assert!(reasons.contains("1000000 requests/s, work for 34; its 2 queues"), "{reasons}");
    // A guest of two vCPUs uses two of its eight queues.
    assert_eq!(of(2, 8, 64).0, 2);
    let (size, reasons) = of(8, 8, 11);
    assert_eq!(size, 3);
    assert!(reasons.contains("3 CPUs left allow 3"), "{reasons}");
    assert_eq!(of(8, 8, 4).0, 1);
}

#[test]
fn background_shares_no_iothread_with_a_target() {
    let task = format!("iops = 100\n{TARGET}");
    let disks = [("log", "", ""), ("root", "", task.as_str()), ("tmp", "", "iops = 5")];
    let (iothreads, _) = assigned(&[vm("plc", "vcpus = 2", &disks)], 8);
    let planned = &iothreads.vms[0];
    let of: Vec<_> = planned.disks.iter().map(|d| (d.disk.as_str(), d.queues[0].get())).collect();
    assert_eq!(of, [("root", 1), ("log", 2), ("tmp", 2)]);
    assert_eq!(pin_numbers(&iothreads), [7, 6]);
}

#[test]
fn iothreads_stay_off_the_vcpus() {
    // `assigned` looks at the CPUs; here no CPU is left over or shared.
    let (iothreads, reasons) = assigned(&[one_disk(5, 5, 90_000.0)], 8);
    assert_eq!(pin_numbers(&iothreads), [7, 6, 5]);
    assert_eq!(iothreads.vcpu_cpus, cpus(5));
    assert!(reasons.is_empty(), "{reasons:?}");
    // CPU 2 is off line.
    let some = [0, 1, 3, 4].map(CpuId::new);
    let (iothreads, _) = assign(&specification(&[one_disk(3, 3, 1.0)]), &some);
    assert_eq!(pin_numbers(&iothreads), [4]);
    assert_eq!(iothreads.vcpu_cpus, some[..3]);
}

#[test]
fn small_vms_share_a_cpu() {
    let task = format!("iops = 2100\n{TARGET}");
    let vms: Vec<_> = (0..20)
        .map(|i| vm(&format!("vm{i}"), "vcpus = 1", &[("root", "", task.as_str())]))
        .collect();
    let (iothreads, reasons) = assigned(&vms, 64);
    // 14 × 2,100 are 29,400; the 15th would be one too many.
    assert_eq!(pin_numbers(&iothreads), [vec![63; 14], vec![62; 6]].concat());
    assert!(reasons.is_empty(), "{reasons:?}");
}

#[test]
fn too_few_cpus_are_named() {
    let vms = [one_disk(3, 3, 100.0), vm("backup", "vcpus = 1", &[("root", "", "")])];
    let (iothreads, reasons) = assigned(&vms, 4);
    assert_eq!(pins(&iothreads), [None, None]);
    assert!(iothreads.vcpu_cpus.is_empty());
    assert!(reasons[0].contains("4 CPUs and 4 vCPUs leave none"), "{reasons:?}");
    // One for both: background is with the target, and that is said.
    let (iothreads, reasons) = assigned(&vms, 5);
    assert_eq!(pin_numbers(&iothreads), [4, 4]);
    assert!(reasons[0].contains("leave 1 for IOThreads, too few"), "{reasons:?}");
    let (iothreads, reasons) = assigned(&vms, 6);
    assert_eq!(pin_numbers(&iothreads), [5, 4]);
    assert!(reasons.is_empty(), "{reasons:?}");
}

#[test]
fn undeclared_rate_with_a_target_has_a_cpu_of_its_own() {
    let open = vm("open", "vcpus = 1", &[("root", "", TARGET)]);
    let (iothreads, reasons) = assigned(&[open, one_disk(1, 1, 100.0)], 8);
    assert_eq!(pin_numbers(&iothreads), [7, 6]);
    assert!(reasons[0].contains("open has a task without iops"), "{reasons:?}");
}

#[test]
fn vm_without_known_queues_is_left_alone() {
    let silent = vm("silent", "", &[("root", "", "iops = 5")]);
    assert_eq!(assigned(std::slice::from_ref(&silent), 8), (IoThreads::default(), Vec::new()));
    let (iothreads, reasons) = assigned(&[silent, one_disk(2, 2, 5.0)], 8);
    assert_eq!(iothreads.vms.len(), 1);
    assert_eq!(reasons, ["IOThreads: VMs without vcpus count as one vCPU each: 1 of 2"]);
}

#[test]
fn mapping_is_the_same_for_the_same_input() {
    let vms = [one_disk(4, 4, 100_000.0), vm("backup", "", &[("root", "queues = 2", "")])];
    assert_eq!(assigned(&vms, 16), assigned(&vms, 16));
}
