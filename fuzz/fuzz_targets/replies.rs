//! Any bytes as what a QEMU monitor or a guest agent says: no panic, no endless
//! loop, and errors that can be shown on a terminal.

#![no_main]

use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use rtvirtio_host::qemu::{Agent, Monitor, QemuError, Throttle};
use rtvirtio_units::Nanos;

/// Replayed bytes end; nothing waits this long.
const TIMEOUT: Duration = Duration::from_secs(60);
const DISK: &str = "/machine/peripheral/d0/virtio-backend";
/// The most bytes of a file that is read.
const LIMIT: usize = 1000;

fn shown<T>(result: Result<T, QemuError>) -> Option<T> {
    let error = match result {
        Ok(value) => return Some(value),
        Err(error) => error,
    };
    let text = error.to_string();
    assert!(!text.chars().any(char::is_control), "{text:?}");
    assert!(text.len() < 4096);
    let _ = error.hint();
    None
}

fn monitor(data: &[u8]) {
    let Some(mut monitor) = shown(Monitor::replay(data)) else {
        return;
    };
    shown(monitor.version(TIMEOUT));
    shown(monitor.status(TIMEOUT));
    shown(monitor.iothreads(TIMEOUT));
    shown(monitor.set_poll_max("io0", Nanos::ZERO, TIMEOUT));
    for block in shown(monitor.blocks(TIMEOUT)).unwrap_or_default() {
        let _ = block.part();
    }
    shown(monitor.pci_devices(TIMEOUT));
    shown(monitor.serial("d0", TIMEOUT));
    shown(monitor.set_latency_histogram(DISK, &[Nanos::from_millis(1)], TIMEOUT));
    if let Some(found) = shown(monitor.latency_histograms(DISK, TIMEOUT)) {
        for histogram in [found.read, found.write, found.flush].into_iter().flatten() {
            assert_eq!(histogram.bins.len(), histogram.boundaries.len() + 1);
        }
    }
    shown(monitor.set_throttle(DISK, Throttle::default(), TIMEOUT));
    shown(monitor.set_throttle_group("tg0", Throttle::default(), TIMEOUT));
}

fn agent(data: &[u8]) {
    let Some(mut agent) = shown(Agent::replay(data)) else {
        return;
    };
    shown(agent.enabled_commands(TIMEOUT));
    if let Some(bytes) = shown(agent.read_file("/sys/knob", LIMIT, TIMEOUT)) {
        assert!(bytes.len() <= LIMIT);
    }
    shown(agent.write_file("/sys/knob", "1", TIMEOUT));
    shown(agent.exec("/bin/true", &[], TIMEOUT));
    shown(agent.exec_status(1, TIMEOUT));
    shown(agent.disks(TIMEOUT));
}

fuzz_target!(|data: &[u8]| {
    monitor(data);
    agent(data);
});
