//! Opens the engine that a device's disk is served by.

use std::num::NonZeroU64;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rtvirtio_engine::file::{self, FileConfig, FileSource, Lockable};
use rtvirtio_engine::nvme::{NvmeConfig, NvmeEngine};
use rtvirtio_engine::ram::RamEngine;
use rtvirtio_engine::slice::SliceEngine;
use rtvirtio_engine::ssd::{self, SsdEngine};
use rtvirtio_engine::{Cost, Engine, SsdConfig};
use rtvirtio_spec::serve::{self, Aio, ImageLock};

use super::PlaneError;
use super::host::open_exclusive_with_retry;
use super::opened::Image;
use super::{io, refused};

pub(super) type EngineAndImage = (Arc<dyn Engine>, Option<Lockable>);

/// A device's engine; what is to be locked apart.
pub(super) fn open(
    spec: &serve::Device,
    handed: Option<Image>,
) -> Result<EngineAndImage, PlaneError> {
    let name = &spec.name;
    let part_of = |whole: Arc<dyn Engine>, slice: Option<serve::Slice>, path: &Path| {
        let Some(slice) = slice else { return Ok(whole) };
        let part = SliceEngine::new(whole, slice.offset, slice.size);
        let refuse =
            |error| refused(format!("no such part of {} for {name}", path.display()), error);
        Ok::<_, PlaneError>(Arc::new(part.map_err(refuse)?) as Arc<dyn Engine>)
    };
    match &spec.engine {
        serve::Engine::File(config) => {
            let what = format!("cannot open {} for {name}", config.path.display());
            let image = file::FileEngine::open(FileConfig {
                source: handed.map_or_else(
                    || FileSource::Path(config.path.clone()),
                    |i| FileSource::Fd(i.fd),
                ),
                direct: config.direct,
                read_only: spec.read_only,
                explicit_raw: config.raw,
                block_size: config.block_size,
                aio: match config.aio {
                    Aio::Auto => file::Aio::Auto,
                    Aio::IoUring => file::Aio::IoUring,
                    Aio::Threads => file::Aio::Threads,
                },
            })
            .map_err(|error| refused(what, error))?;
            let lockable = image.lockable();
            Ok((part_of(Arc::new(image), config.slice, &config.path)?, Some(lockable)))
        }
        serve::Engine::Nvme(config) => {
            let refuse =
                |error| refused(format!("cannot open {} for {name}", config.path.display()), error);
            let (fd, block) = match handed {
                Some(Image { fd, block }) => (fd, block),
                None => {
                    let fd = file::open(&config.path, spec.read_only);
                    (fd.map_err(|error| refuse(error.into()))?, None)
                }
            };
            let block = match (config.lock, block) {
                (ImageLock::Off, _) => None,
                (_, Some(block)) => Some(block),
                (lock, None) => Some(
                    open_exclusive_with_retry(&fd, lock == ImageLock::Always).map_err(refuse)?,
                ),
            };
            let source = FileSource::Fd(fd);
            let (read_only, poll) = (spec.read_only, config.poll);
            let namespace = NvmeEngine::open(NvmeConfig { source, read_only, poll });
            let namespace = namespace.map_err(refuse)?;
            let lockable = block.map(|block| namespace.lockable(block));
            Ok((part_of(Arc::new(namespace), config.slice, &config.path)?, lockable))
        }
        serve::Engine::Ram { size, cpu } => {
            let ram = RamEngine::new(*size, cost(*cpu))
                .map_err(|error| io(format!("no memory for {name}"), error))?;
            Ok((Arc::new(ram), None))
        }
        serve::Engine::Ssd(config) => {
            let what = format!("cannot start the emulated SSD of {name}");
            let model: SsdConfig =
                config.model.parse().map_err(|error| refused(what.clone(), error))?;
            let every = |n: u32| NonZeroU64::new(u64::from(n));
            let stall = Duration::from_millis(u64::from(config.faults.stall_ms));
            let faults = ssd::Faults {
                error_every: every(config.faults.error_every),
                no_space_every: every(config.faults.no_space_every),
                short_every: every(config.faults.short_every),
                stall: every(config.faults.stall_every).map(|n| (n, stall)),
                seed: config.seed,
            };
            let ssd = SsdEngine::start(model, config.size, config.seed, faults)
                .map_err(|error| refused(what, error))?;
            Ok((Arc::new(ssd.with_cost(cost(config.cpu))), None))
        }
    }
}

/// Whether a disk's image can be served as it is, as far as reading it tells: its kind, format and size, and the
/// part of it that is the disk. Nothing is locked, and an NVMe namespace is not asked anything.
///
/// # Errors
/// What is wrong with it.
pub fn check_image(spec: &serve::Device) -> Result<(), PlaneError> {
    match &spec.engine {
        serve::Engine::File(_) => {
            open(&serve::Device { read_only: true, ..spec.clone() }, None)?;
        }
        serve::Engine::Ssd(config) => {
            let model = config.model.parse::<SsdConfig>();
            model.map_err(|error| {
                refused(format!("cannot start the emulated SSD of {}", spec.name), error)
            })?;
        }
        serve::Engine::Nvme(_) | serve::Engine::Ram { .. } => {}
    }
    Ok(())
}

fn cost(cpu: serve::CpuCost) -> Cost {
    Cost { request: Duration::from(cpu.request), kib: Duration::from(cpu.kib) }
}
