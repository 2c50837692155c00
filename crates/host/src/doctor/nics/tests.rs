use std::sync::Arc;

use super::*;
use crate::doctor::Status;
use crate::fake::FakeSysfs;

/// A host of four CPUs whose bridge br0 has a TAP and the ports given.
fn host(ports: &[&str]) -> Arc<FakeSysfs> {
    let sysfs = Arc::new(FakeSysfs::bare());
    sysfs.put("/sys/devices/system/cpu/online", "0-3\n");
    sysfs.put("/sys/class/net/lo/mtu", "65536\n");
    sysfs.put("/sys/class/net/tap0/tun_flags", "0x5002\n");
    for port in ports.iter().chain(&["tap0"]) {
        sysfs.put(&format!("/sys/class/net/br0/brif/{port}/port_no"), "0x1\n");
    }
    sysfs
}

/// A NIC with an IRQ for each queue.
fn add_nic(sysfs: &FakeSysfs, name: &str, irqs: &[(u32, &str)]) {
    let nic = format!("/sys/class/net/{name}");
    sysfs.put(&format!("{nic}/device/modalias"), "pci:v00008086d000010FB\n");
    for (queue, (irq, allowed)) in irqs.iter().enumerate() {
        sysfs.put(&format!("{nic}/queues/rx-{queue}/rps_cpus"), "0\n");
        sysfs.put(&format!("{nic}/device/msi_irqs/{irq}"), "msix\n");
        sysfs.put(&format!("/proc/irq/{irq}/smp_affinity_list"), allowed);
        sysfs.put(&format!("/proc/irq/{irq}/{name}-TxRx-{queue}/x"), "");
    }
}

fn iothread(name: &str, cpus: &[u32], completion: &str, core: &str) -> IoThreadState {
    serde_json::from_value(serde_json::json!({
        "name": name, "cpus": cpus, "locked": false, "tid": 1, "queues": 1, "busy_ns": 0,
        "polling": { "completion": completion, "core": core, "max_ns": 0, "grow": 2, "shrink": 0 },
        "poll_ns": 0, "sleep_ns": 0, "cpu_ns": 0,
    }))
    .unwrap()
}

fn probed(sysfs: &Arc<FakeSysfs>, iothreads: Option<&[IoThreadState]>) -> [Finding; 2] {
    probe(&Host::with_sysfs("/nonexistent", Arc::<FakeSysfs>::clone(sysfs)), iothreads)
}

fn advice(finding: &Finding) -> Option<(&str, &str)> {
    assert_eq!(finding.status == Status::Ok, finding.remedy.is_none());
    finding.remedy.as_deref().map(|remedy| (&*finding.detail, remedy))
}

#[test]
fn irq_on_an_iothreads_cpu_is_named_with_file_and_value() {
    let sysfs = host(&["eth0", "eth1", "veth1"]);
    add_nic(&sysfs, "eth0", &[(30, "0\n"), (31, "1\n"), (32, "0-3\n")]);
    add_nic(&sysfs, "eth1", &[(40, "0-2\n")]);
    // No port of a bridge: whose frames it carries is not a VM's affair.
    add_nic(&sysfs, "eth2", &[(50, "1\n")]);
    sysfs.put("/proc/irq/32/effective_affinity_list", "2\n");
    // A vector that nobody has asked for.
    sysfs.put("/sys/class/net/eth0/device/msi_irqs/33", "msix\n");
    sysfs.put("/proc/irq/33/smp_affinity_list", "1\n");
    let iothreads = [
        iothread("iot0", &[1], "poll", "shared"),
        iothread("iot1", &[2], "interrupt", "shared"),
        iothread("iot2", &[0, 3], "poll", "shared"),
    ];
    let [irqs, _] = probed(&sysfs, Some(&iothreads));
    let (detail, remedy) = advice(&irqs).unwrap();
    assert_eq!(
        detail.split("; ").collect::<Vec<_>>(),
        [
            "eth0 (uplink of tap0 by br0): IRQ 31 (eth0-TxRx-1) may run on CPU 1, which IOThread iot0 polls on",
            "eth0 (uplink of tap0 by br0): IRQ 32 (eth0-TxRx-2) runs on CPU 2, which IOThread iot1 is pinned to",
            "eth1 (uplink of tap0 by br0): IRQ 40 (eth1-TxRx-0) may run on CPU 1, which IOThread iot0 polls on \
             and CPU 2, which IOThread iot1 is pinned to",
        ]
    );
    assert_eq!(
        remedy.split("; ").collect::<Vec<_>>(),
        [
            "write 0,3 to /proc/irq/31/smp_affinity_list",
            "write 0,3 to /proc/irq/32/smp_affinity_list",
            "write 0 to /proc/irq/40/smp_affinity_list",
        ]
    );
    // A thread that polls while that pays owns its CPU if it is told so.
    let dedicated = [iothread("iot0", &[1], "adaptive", "dedicated")];
    let [irqs, _] = probed(&sysfs, Some(&dedicated));
    assert!(advice(&irqs).unwrap().0.contains("CPU 1, which IOThread iot0 polls on"));
}

#[test]
fn irqbalance_is_named_where_it_would_undo_the_advice() {
    let sysfs = host(&["eth0"]);
    add_nic(&sysfs, "eth0", &[(30, "2\n")]);
    sysfs.put("/proc/7/comm", "bash\n");
    sysfs.put("/proc/812/comm", "irqbalance\n");
    let own = [1, 2].map(|cpu| iothread(&format!("iot{cpu}"), &[cpu], "poll", "shared"));
    let [irqs, _] = probed(&sysfs, Some(&own));
    assert_eq!(
        advice(&irqs).unwrap().1,
        "write 0,3 to /proc/irq/30/smp_affinity_list; irqbalance runs (process 812) and may undo it: \
         set IRQBALANCE_BANNED_CPULIST=1-2 in its environment"
    );
    sysfs.put("/proc/irq/30/smp_affinity_list", "3\n");
    assert_eq!(advice(&probed(&sysfs, Some(&own))[0]), None);
}

#[test]
fn one_receive_queue_without_rps_is_named_with_a_mask() {
    let sysfs = host(&["eth0"]);
    add_nic(&sysfs, "eth0", &[(30, "0\n")]);
    let [_, rps] = probed(&sysfs, None);
    let file = "/sys/class/net/eth0/queues/rx-0/rps_cpus";
    let detail = "eth0 (uplink of tap0 by br0): one receive queue and no RPS: one CPU handles all that it receives";
    assert_eq!(advice(&rps), Some((detail, &*format!("write f to {file}"))));
    // An IOThread's own CPU stays out of it, and so do those of another node.
    let own = [iothread("iot0", &[1], "poll", "shared")];
    assert_eq!(advice(&probed(&sysfs, Some(&own))[1]).unwrap().1, format!("write d to {file}"));
    sysfs.put("/sys/class/net/eth0/device/local_cpulist", "0-2\n");
    assert_eq!(advice(&probed(&sysfs, Some(&own))[1]).unwrap().1, format!("write 5 to {file}"));
    // RPS that is on uses it.
    sysfs.put(file, "0000000f\n");
    assert_eq!(advice(&probed(&sysfs, None)[1]), None);
    let (detail, remedy) = (
        "eth0 (uplink of tap0 by br0): RPS of rx-0 uses CPU 1, which IOThread iot0 polls on",
        format!("write d to {file}"),
    );
    assert_eq!(advice(&probed(&sysfs, Some(&own))[1]), Some((detail, &*remedy)));
    // With nothing else in the mask RPS is turned off; with two queues the NIC spreads itself.
    sysfs.put(file, "2\n");
    assert_eq!(advice(&probed(&sysfs, Some(&own))[1]).unwrap().1, format!("write 0 to {file}"));
    sysfs.put(file, "0\n");
    sysfs.put("/sys/class/net/eth0/queues/rx-1/rps_cpus", "0\n");
    assert_eq!(advice(&probed(&sysfs, Some(&own))[1]), None);
}

#[test]
fn nic_below_a_bond_and_a_vlan_is_an_uplink() {
    let sysfs = host(&["bond0.10"]);
    sysfs.put("/sys/class/net/bond0.10/lower_bond0/mtu", "");
    // A bond and its ports name each other.
    sysfs.put("/sys/class/net/bond0/lower_eth0/mtu", "");
    sysfs.put("/sys/class/net/bond0/lower_eth1/mtu", "");
    sysfs.put("/sys/class/net/bond0/lower_bond0/mtu", "");
    add_nic(&sysfs, "eth0", &[(30, "1\n")]);
    add_nic(&sysfs, "eth1", &[(31, "1\n")]);
    let own = [iothread("iot0", &[1], "poll", "shared")];
    let [irqs, rps] = probed(&sysfs, Some(&own));
    assert_eq!(advice(&irqs).unwrap().1.matches("write 0,2-3 to").count(), 2);
    assert_eq!(advice(&rps).unwrap().1.matches("write d to").count(), 2);
}

#[test]
fn irqs_of_a_virtio_nic_are_its_pci_devices() {
    let sysfs = host(&["eth0", "eth1"]);
    // eth0 is virtio; eth1 is PCI with a line, below a port that has an IRQ of its own.
    for (nic, kind) in [("eth0", "virtio:d00000001v00001AF4"), ("eth1", "pci:v1d1")] {
        sysfs.put(&format!("/sys/class/net/{nic}/device/modalias"), kind);
        sysfs.put(&format!("/sys/class/net/{nic}/device/../msi_irqs/30"), "msix\n");
    }
    sysfs.put("/sys/class/net/eth1/device/irq", "11\n");
    for irq in [11, 30] {
        sysfs.put(&format!("/proc/irq/{irq}/smp_affinity_list"), "1\n");
        sysfs.put(&format!("/proc/irq/{irq}/handler/x"), "");
    }
    let own = [iothread("iot0", &[1], "poll", "shared")];
    let [irqs, _] = probed(&sysfs, Some(&own));
    let detail = advice(&irqs).unwrap().0;
    assert_eq!(detail.matches("IRQ").count(), 2);
    assert!(detail.contains("eth0 (uplink of tap0 by br0): IRQ 30"), "{detail}");
    assert!(detail.contains("eth1 (uplink of tap0 by br0): IRQ 11"), "{detail}");
}

#[test]
fn host_without_uplink_gets_no_advice() {
    let own = [iothread("iot0", &[1], "poll", "shared")];
    // Nothing at all; a NIC in no bridge; one in a bridge without a TAP; a TAP among virtual ports only.
    let alone = Arc::new(FakeSysfs::bare());
    let apart = host(&["veth1"]);
    add_nic(&apart, "eth0", &[(30, "1\n")]);
    apart.put("/sys/class/net/br1/brif/eth0/port_no", "0x1\n");
    for sysfs in [alone, apart, host(&["veth1"])] {
        for finding in probed(&sysfs, Some(&own)) {
            assert_eq!(advice(&finding), None);
            assert_eq!(finding.detail, "no NIC is the uplink of a TAP's bridge");
        }
    }
}

#[test]
fn irq_that_has_no_other_cpu_or_no_iothread_beside_it_gives_no_advice() {
    let sysfs = host(&["eth0"]);
    add_nic(&sysfs, "eth0", &[(30, "0-3\n")]);
    let of = |iothreads: &[IoThreadState]| probed(&sysfs, Some(iothreads))[0].detail.clone();
    assert!(probed(&sysfs, None)[0].detail.contains("no data plane is known"));
    assert_eq!(of(&[]), "no IOThread has a CPU to itself");
    assert_eq!(of(&[iothread("iot0", &[], "poll", "shared")]), "no IOThread has a CPU to itself");
    let all = [0, 1, 2, 3].map(|cpu| iothread(&format!("iot{cpu}"), &[cpu], "poll", "shared"));
    assert!(of(&all).contains("each CPU is an IOThread's own"));
}

#[test]
fn broken_and_hostile_files_give_no_advice() {
    let own =
        [iothread("iot0", &[1], "poll", "shared"), iothread("iot1", &[4_000], "poll", "shared")];
    for text in ["", "\n", "1-0", "-1", "0-99999999", "4294967296", "\u{1b}[2J", "1,,2", "zz"] {
        let sysfs = host(&["eth0"]);
        add_nic(&sysfs, "eth0", &[(30, text)]);
        sysfs.put("/proc/irq/30/effective_affinity_list", text);
        sysfs.put("/sys/class/net/eth0/device/msi_irqs/../../etc", "");
        sysfs.put("/sys/class/net/eth0/queues/rx-0/rps_cpus", &format!("x{text}"));
        let [irqs, rps] = probed(&sysfs, Some(&own));
        assert_eq!((advice(&irqs), advice(&rps)), (None, None), "{text:?}");
        sysfs.put("/sys/devices/system/cpu/online", text);
        sysfs.put("/proc/irq/30/smp_affinity_list", "1\n");
        sysfs.put("/proc/irq/30/effective_affinity_list", "1\n");
        assert_eq!(advice(&probed(&sysfs, Some(&own))[0]), None, "{text:?}");
    }
    // A name that a terminal would obey is shown escaped.
    let sysfs = host(&["\u{1b}[2J"]);
    add_nic(&sysfs, "\u{1b}[2J", &[(30, "1\n")]);
    for finding in probed(&sysfs, Some(&own)) {
        let (detail, remedy) = advice(&finding).unwrap();
        assert!(detail.contains("\\u{1b}[2J (uplink"), "{detail}");
        assert!(!detail.contains('\u{1b}') && !remedy.contains('\u{1b}'), "{detail} {remedy}");
    }
}

#[test]
fn masks_are_words_of_eight_digits_the_highest_first() {
    let of = |cpus: &[u32]| cpus.iter().map(|cpu| CpuId::new(*cpu)).collect::<Cpus>();
    for (text, cpus) in [
        ("0", &[][..]),
        ("5", &[0, 2]),
        ("80000000", &[31]),
        ("1,00000000", &[32]),
        ("2,00000000,80000001", &[0, 31, 65]),
    ] {
        assert_eq!(parse_mask(text), Some(of(cpus)), "{text}");
        assert_eq!(show_mask(&of(cpus)), text);
    }
    assert_eq!(parse_mask("00000000,0000000c\n"), Some(of(&[2, 3])));
    let far = format!("1{}", ",00000000".repeat(32));
    for wrong in ["", ",", "g", "+1", "0x1", "100000000", "1 2", &far] {
        assert_eq!(parse_mask(wrong), None, "{wrong}");
    }
    assert_eq!(show_list(&of(&[0, 2, 3, 4, 7])), "0,2-4,7");
}
