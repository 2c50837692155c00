//! Options of the verbs that may run their load in guests.

use std::path::PathBuf;

use anyhow::{Context, Result};
use rtvirtio_bench::guests::{Accelerator, GuestImage};
use rtvirtio_host::interrupt::Interrupted;

/// What a benchmark's VMs are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum VmKind {
    /// Guests where QEMU and an image of theirs are there (the demo: and one boots under KVM), else cgroups
    Auto,
    /// QEMU guests, under KVM where one boots, else under TCG
    Qemu,
    /// A cgroup whose tasks are fio on the host
    Cgroup,
}

/// Where the guests' kernel is.
#[derive(clap::Args)]
pub(crate) struct ImageArgs {
    /// What guests boot from: the directory that scripts/guest wrote
    #[arg(long, value_name = "DIR", default_value = "target/guest")]
    guest_image: PathBuf,
}

impl ImageArgs {
    /// The image and what runs it.
    pub(crate) fn find(&self, interrupted: &Interrupted) -> Result<(GuestImage, Accelerator)> {
        let image = GuestImage::find(&self.guest_image)?;
        let accelerator = Accelerator::probe(&image, interrupted)?;
        Ok((image, accelerator))
    }

    /// For the demo: guests where they are asked for or one boots under KVM; `None` for cgroups.
    pub(crate) fn for_demo(
        &self,
        kind: VmKind,
        interrupted: &Interrupted,
    ) -> Result<Option<(GuestImage, Accelerator)>> {
        match kind {
            VmKind::Cgroup => Ok(None),
            VmKind::Qemu => self.find(interrupted).context("guests cannot run here").map(Some),
            VmKind::Auto => match self.find(interrupted) {
                Ok((image, Accelerator::Kvm)) => Ok(Some((image, Accelerator::Kvm))),
                Err(error) if error.is::<rtvirtio_host::interrupt::InterruptedError>() => {
                    Err(error)
                }
                other => {
                    let why = match other {
                        Ok(_) => "no guest boots under KVM here".to_owned(),
                        Err(error) => format!("{error:#}"),
                    };
                    eprintln!(
                        "VMs are cgroups on the kernel path and vhost-user clients on the data plane: {why}"
                    );
                    Ok(None)
                }
            },
        }
    }

    /// The image and what runs it; `None` for cgroups.
    pub(crate) fn choose(
        &self,
        kind: VmKind,
        interrupted: &Interrupted,
    ) -> Result<Option<(GuestImage, Accelerator)>> {
        let (image, accelerator) = match kind {
            VmKind::Cgroup => return Ok(None),
            VmKind::Qemu => self.find(interrupted).context("guests cannot run here")?,
            VmKind::Auto => match self.find(interrupted) {
                Ok(found) => found,
                Err(error) if error.is::<rtvirtio_host::interrupt::InterruptedError>() => {
                    return Err(error);
                }
                Err(error) => {
                    eprintln!("VMs are cgroups, not guests: {error:#}");
                    return Ok(None);
                }
            },
        };
        let (name, scale) = (accelerator.name(), accelerator.scale());
        eprintln!("VMs are QEMU guests under {name}; scale factor s = {scale}");
        Ok(Some((image, accelerator)))
    }
}
