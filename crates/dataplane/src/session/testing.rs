//! A host that serves no ring, but writes down what it was asked to.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use rtvirtio_engine::{Engine, Geometry, Outcome, Request, SubmitContext};
use rtvirtio_units::Bytes;
use rustix::fs::MemfdFlags;
use rustix::io::Errno;

use super::{Change, QueueHost, QueueSetup, StartError, StoppedQueue};
use crate::device::{Device, DeviceConfig, Limits};
use crate::memory::RegionSpec;

/// A disk of 1 MiB that can be resized.
pub(crate) struct Disk(AtomicU64);

impl Engine for Disk {
    fn geometry(&self) -> Geometry {
        Geometry {
            capacity: Bytes::new(self.0.load(Ordering::Relaxed)),
            logical_block: 512,
            physical_block: 4096,
            read_only: false,
            discard: true,
        }
    }

    fn start(&self, _: &Request<'_>, _: &mut SubmitContext<'_, '_>) -> Outcome {
        unreachable!("no request is ever taken from a ring")
    }

    fn resize(&self, capacity: Option<Bytes>) -> std::io::Result<Bytes> {
        if let Some(capacity) = capacity {
            self.0.store(capacity.get(), Ordering::Relaxed);
        }
        Ok(Bytes::new(self.0.load(Ordering::Relaxed)))
    }
}

pub(crate) fn device_with(change: impl FnOnce(&mut DeviceConfig)) -> Arc<Device> {
    let mut config = DeviceConfig {
        name: "disk".into(),
        engine: Arc::new(Disk(AtomicU64::new(1 << 20))),
        queues: 2,
        read_only: false,
        serial: [0; 20],
        write_cache: true,
        limits: Limits::default(),
        schedule: None,
    };
    change(&mut config);
    Arc::new(Device::new(config).unwrap())
}

pub(crate) fn device() -> Arc<Device> {
    device_with(|_| ())
}

/// What a host was asked to do, a line for each.
#[derive(Debug, Default)]
pub(crate) struct Host {
    state: Mutex<State>,
    drained: Condvar,
}

#[derive(Debug, Default)]
struct State {
    log: Vec<String>,
    queues: HashMap<u16, QueueSetup>,
    stuck: bool,
    scarce: bool,
    broken: Option<u16>,
}

impl Host {
    /// What was asked since the last time.
    pub(crate) fn log(&self) -> Vec<String> {
        std::mem::take(&mut self.state.lock().unwrap().log)
    }

    /// Whether rings have requests in flight that do not end.
    pub(crate) fn set_stuck(&self, stuck: bool) {
        self.state.lock().unwrap().stuck = stuck;
        self.drained.notify_all();
    }

    /// Whether memory that is added cannot be used.
    pub(crate) fn set_scarce(&self, scarce: bool) {
        self.state.lock().unwrap().scarce = scarce;
    }

    /// The ring whose driver broke it.
    pub(crate) fn set_broken(&self, index: Option<u16>) {
        self.state.lock().unwrap().broken = index;
    }

    fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        act(&mut self.state.lock().unwrap())
    }

    /// A look at a queue that is served.
    pub(crate) fn queue<T>(&self, index: u16, look: impl FnOnce(&QueueSetup) -> T) -> T {
        self.with(|state| look(&state.queues[&index]))
    }
}

impl QueueHost for Host {
    type Key = u16;

    fn start(&self, setup: QueueSetup) -> Result<u16, StartError> {
        self.with(|state| {
            let (index, enabled, base) = (setup.index, setup.enabled, setup.ring.base());
            state.log.push(format!("start {index} enabled={enabled} base={base}"));
            assert!(state.queues.insert(index, setup).is_none(), "{index} was started twice");
            Ok(index)
        })
    }

    fn stop(&self, index: u16) -> StoppedQueue {
        let state = self.state.lock().unwrap();
        let mut state = self.drained.wait_while(state, |state| state.stuck).unwrap();
        state.log.push(format!("stop {index}"));
        let setup = state.queues.remove(&index).expect("it was started");
        // As if two requests had come.
        let broken = state.broken == Some(index);
        StoppedQueue { base: setup.ring.base() + 2, broken }
    }

    fn is_broken(&self, index: u16) -> bool {
        self.with(|state| state.broken == Some(index))
    }

    fn update(&self, index: u16, change: Change) -> Result<(), StartError> {
        self.with(|state| {
            let setup = state.queues.get_mut(&index).expect("it was started");
            if state.scarce && matches!(change, Change::Memory(_)) {
                return Err(StartError::System(Errno::NOMEM));
            }
            let line = match change {
                Change::Enabled(enabled) => {
                    setup.enabled = enabled;
                    format!("enabled={enabled}")
                }
                Change::Call(call) => {
                    setup.call = call;
                    format!("call={}", setup.call.is_some())
                }
                Change::Error(error) => {
                    setup.error = error;
                    format!("error={}", setup.error.is_some())
                }
                Change::Memory(memory) => {
                    setup.ring.set_memory(Arc::clone(&memory)).unwrap();
                    let line = format!(
                        "regions={} log={}",
                        memory.regions().len(),
                        memory.log().is_some()
                    );
                    setup.memory = memory;
                    line
                }
                Change::Log(log) => format!("log={log:?}"),
            };
            state.log.push(format!("update {index} {line}"));
            Ok(())
        })
    }
}

/// A file of guest memory, with zeroes.
pub(crate) fn memory(size: u64) -> OwnedFd {
    let memory = rustix::fs::memfd_create(c"guest", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&memory, size).unwrap();
    memory
}

/// 64 KiB of guest memory from `guest` on; the front end has it 1 GiB higher.
pub(crate) const fn region(guest: u64) -> RegionSpec {
    RegionSpec { guest, size: 0x1_0000, front_end: guest + (1 << 30), offset: 0 }
}
