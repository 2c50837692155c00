//! Options of the verbs that may run their load in guests.

use anyhow::{Context, Result};
use rtvirtio_host::interrupt::Interrupted;
use rtvirtio_testbed::guests::{Accelerator, GuestImage, ImageArgs};

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

/// For the demo: guests where they are asked for or one boots under KVM; `None` for cgroups.
pub(crate) fn for_demo(
    image: &ImageArgs,
    kind: VmKind,
    interrupted: &Interrupted,
) -> Result<Option<(GuestImage, Accelerator)>> {
    let others = "VMs are cgroups on the kernel path and vhost-user clients on the data plane";
    match find_if(image, kind, others, interrupted)? {
        Some((_, Accelerator::Tcg)) if kind == VmKind::Auto => {
            eprintln!("{others}: no guest boots under KVM here");
            Ok(None)
        }
        found => Ok(found),
    }
}

/// The image and what runs it; `None` for cgroups.
pub(crate) fn choose(
    image: &ImageArgs,
    kind: VmKind,
    interrupted: &Interrupted,
) -> Result<Option<(GuestImage, Accelerator)>> {
    let found = find_if(image, kind, "VMs are cgroups, not guests", interrupted)?;
    if let Some((_, accelerator)) = &found {
        let (name, scale) = (accelerator.name(), accelerator.scale());
        eprintln!("VMs are QEMU guests under {name}; scale factor s = {scale}");
    }
    Ok(found)
}

/// What is there, if guests are asked for, or may be and can; else what the `others` are is said.
fn find_if(
    image: &ImageArgs,
    kind: VmKind,
    others: &str,
    interrupted: &Interrupted,
) -> Result<Option<(GuestImage, Accelerator)>> {
    if kind == VmKind::Cgroup {
        return Ok(None);
    }
    match (kind, image.find(interrupted)) {
        (VmKind::Auto, Err(error)) if !rtvirtio_cli::is_of_user(&error) => {
            eprintln!("{others}: {error:#}");
            Ok(None)
        }
        (_, found) => found.context("guests cannot run here").map(Some),
    }
}
