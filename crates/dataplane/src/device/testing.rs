//! A block device for tests.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rtvirtio_engine::{Engine, Geometry, Outcome, Request, SubmitContext};
use rtvirtio_units::Bytes;

use super::{Device, DeviceConfig, Limits};

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
