//! A plan's IOThreads for people, and how to start a guest with them.

use rtvirtio_spec::plan::{DiskIoThreads, IoThreads, VmIoThreads, qemu};
use rtvirtio_units::CpuId;

/// A line for each disk whose queues are known; nothing if there is none.
pub(crate) fn describe(iothreads: &IoThreads) -> String {
    if iothreads.vms.is_empty() {
        return String::new();
    }
    let mut text = "\nIOThreads (from a guest's next start; how: --qemu)\n".to_owned();
    for vm in &iothreads.vms {
        for disk in &vm.disks {
            text += &format!(
                "  {}/{}: {} for {}, {}\n",
                vm.vm,
                disk.disk,
                counted(disk.by_thread().len(), "IOThread"),
                counted(disk.queues.len(), "queue"),
                pinned(vm, disk)
            );
        }
    }
    if !iothreads.vcpu_cpus.is_empty() {
        text += &format!("  vCPUs: {}\n", cpus(&iothreads.vcpu_cpus));
    }
    text
}

/// How to start each VM with its IOThreads: QEMU's arguments, and libvirt's XML.
pub fn start_with(iothreads: &IoThreads) -> String {
    if iothreads.vms.is_empty() {
        return "No VM says its vcpus or its disks' queues: no IOThreads are planned.\n".to_owned();
    }
    let vcpu_cpus = &iothreads.vcpu_cpus;
    let mut text = "QEMU and libvirt refuse a change of these while a guest runs.\n".to_owned();
    for vm in &iothreads.vms {
        let name = &vm.vm;
        text += &format!("\n{name}: QEMU 9.0 or later; `drive` is the disk's -blockdev\n");
        for (option, value) in qemu::arguments(vm) {
            let quote = if value.starts_with('{') { "'" } else { "" };
            text += &format!("  {option} {quote}{value}{quote}\n");
        }
        for (id, cpu) in vm.threads.iter().filter_map(|t| Some((t.id, t.cpu?))) {
            let thread = qemu::name(id);
            text +=
                &format!("  taskset -pc {cpu} TID  # {thread}'s thread-id in query-iothreads\n");
        }
        if !vcpu_cpus.is_empty() {
            let set = qemu::cpuset(vcpu_cpus);
            text += &format!("  taskset -pc {set} TID  # each thread-id in query-cpus-fast\n");
        }
        text += &format!("\n{name}: libvirt 10.0 or later, in its <domain>\n");
        text += &indented(&qemu::domain_xml(vm, vcpu_cpus));
        for disk in &vm.disks {
            let disk_name = &disk.disk;
            text += &format!(
                "{name}: in the <disk> of {disk_name}; its <driver> keeps type, cache and io too\n"
            );
            text += &indented(&qemu::disk_xml(disk));
        }
    }
    text
}

fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// Where a disk's IOThreads run.
fn pinned(vm: &VmIoThreads, disk: &DiskIoThreads) -> String {
    let its = disk.by_thread();
    let threads = vm.threads.iter().filter(|t| its.contains_key(&t.id));
    let mut pins: Vec<CpuId> = threads.filter_map(|t| t.cpu).collect();
    if pins.is_empty() {
        return "not pinned".to_owned();
    }
    pins.sort_unstable();
    pins.dedup();
    cpus(&pins)
}

fn cpus(ids: &[CpuId]) -> String {
    format!("CPU{} {}", if ids.len() == 1 { "" } else { "s" }, qemu::cpuset(ids))
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("  {line}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two disks: work for two IOThreads, and background.
    fn planned(cpus: u32) -> IoThreads {
        let text = "version = 1
[device.data]
path = '/dev/loop7'
profile = 'p.json'
[[vm]]
name = 'plc'
vcpus = 4
disk = [{ name = 'root', device = 'data' }, { name = 'log', device = 'data', queues = 1 }]
task = [{ name = 't', disk = 'root', iops = 50000, target = { latency_ms = 10 } }]
";
        let specification = rtvirtio_spec::specification::parse("test.toml", text).unwrap();
        let cpus: Vec<_> = (0..cpus).map(CpuId::new).collect();
        rtvirtio_planner::iothreads::assign(&specification, &cpus).0
    }

    #[test]
    fn each_disk_has_a_line() {
        assert_eq!(
            describe(&planned(8)),
            "
IOThreads (from a guest's next start; how: --qemu)
  plc/root: 2 IOThreads for 4 queues, CPUs 6-7
  plc/log: 1 IOThread for 1 queue, CPU 5
  vCPUs: CPUs 0-4
"
        );
        let unpinned = describe(&planned(4));
        assert!(unpinned.contains("plc/root: 1 IOThread for 4 queues, not pinned"), "{unpinned}");
        assert!(!unpinned.contains("vCPUs"), "{unpinned}");
    }

    #[test]
    fn without_iothreads_nothing_is_said_unasked() {
        assert_eq!(describe(&IoThreads::default()), "");
        assert!(start_with(&IoThreads::default()).contains("vcpus"));
    }

    #[test]
    fn text_to_start_with_is_as_expected() {
        let expected = r#"QEMU and libvirt refuse a change of these while a guest runs.

plc: QEMU 9.0 or later; `drive` is the disk's -blockdev
  -object iothread,id=iothread1
  -object iothread,id=iothread2
  -object iothread,id=iothread3
  -device '{"driver":"virtio-blk-pci","id":"root","drive":"root","num-queues":4,"iothread-vq-mapping":[{"iothread":"iothread1","vqs":[0,2]},{"iothread":"iothread2","vqs":[1,3]}]}'
  -device '{"driver":"virtio-blk-pci","id":"log","drive":"log","num-queues":1,"iothread-vq-mapping":[{"iothread":"iothread3","vqs":[0]}]}'
  taskset -pc 7 TID  # iothread1's thread-id in query-iothreads
  taskset -pc 6 TID  # iothread2's thread-id in query-iothreads
  taskset -pc 5 TID  # iothread3's thread-id in query-iothreads
  taskset -pc 0-4 TID  # each thread-id in query-cpus-fast

plc: libvirt 10.0 or later, in its <domain>
  <vcpu placement='static' cpuset='0-4'>4</vcpu>
  <iothreads>3</iothreads>
  <iothreadids>
    <iothread id='1'/>
    <iothread id='2'/>
    <iothread id='3'/>
  </iothreadids>
  <cputune>
    <iothreadpin iothread='1' cpuset='7'/>
    <iothreadpin iothread='2' cpuset='6'/>
    <iothreadpin iothread='3' cpuset='5'/>
  </cputune>
plc: in the <disk> of root; its <driver> keeps type, cache and io too
  <driver name='qemu' queues='4'>
    <iothreads>
      <iothread id='1'>
        <queue id='0'/>
        <queue id='2'/>
      </iothread>
      <iothread id='2'>
        <queue id='1'/>
        <queue id='3'/>
      </iothread>
    </iothreads>
  </driver>
  <alias name='ua-root'/>
plc: in the <disk> of log; its <driver> keeps type, cache and io too
  <driver name='qemu' queues='1'>
    <iothreads>
      <iothread id='3'>
        <queue id='0'/>
      </iothread>
    </iothreads>
  </driver>
  <alias name='ua-log'/>
"#;
        assert_eq!(start_with(&planned(8)), expected);
    }
}
