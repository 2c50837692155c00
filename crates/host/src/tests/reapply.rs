//! Plans that are applied again at the same time, as by the hooks of VMs that start together.

use std::sync::Barrier;
use std::thread;

use rtvirtio_spec::guests::Guests;
use rtvirtio_spec::plan::{IoThreads, PLAN_VERSION, Plan, PlannedDevice, PlannedVm};

use super::*;

/// A saved plan for one VM: bfq, and its weight.
pub(super) fn plan_of(bed: &Bed, name: &str, weight: u32) -> Plan {
    let path = std::path::PathBuf::from("/dev/sda");
    let identity = bed.host.identity(&path).unwrap();
    let weight = Weight::new(weight).unwrap();
    let vms = [(vm(name), VmSettings { weight, ..VmSettings::default() })].into();
    let scheduler = Scheduler::Bfq(Bfq::DEFAULT);
    Plan {
        version: PLAN_VERSION,
        devices: vec![PlannedDevice { name: device(), path, identity }],
        vms: vec![PlannedVm { name: vm(name), cgroup: group(name).into() }],
        settings: Settings([(device(), DeviceSettings { scheduler, vms })].into()),
        guests: Guests::default(),
        data_plane: None,
        observed: Knobs::new(),
        changes: Vec::new(),
        tasks: Vec::new(),
        background: Vec::new(),
        cost: Vec::new(),
        iothreads: IoThreads::default(),
        reasons: Vec::new(),
    }
}

#[test]
fn plans_applied_again_at_the_same_time_lose_nothing() {
    let bed = Bed::new(true, "none");
    let before = bed.snapshot();
    let plans = [plan_of(&bed, "plc", 500), plan_of(&bed, "backup", 50)];
    // Each step takes its time, so that one finds the other at work.
    let host = bed.host.clone().with_observer(Arc::new(|_| {
        thread::sleep(Duration::from_millis(10));
        std::ops::ControlFlow::Continue(())
    }));
    let start = Barrier::new(plans.len());
    let written = thread::scope(|scope| {
        let again = |plan: &Plan| {
            start.wait();
            host.reapply(plan, ApplyOptions::default()).unwrap().0.written
        };
        let threads = plans.each_ref().map(|plan| scope.spawn(move || again(plan)));
        threads.map(|thread| thread.join().unwrap())
    });
    assert!(written.iter().all(|written| *written > 0), "{written:?}");
    for plan in &plans {
        assert_eq!(bed.host.verify_plan(plan).unwrap().0, []);
    }
    bed.host.rollback().unwrap();
    assert_eq!(bed.snapshot(), before);
}
