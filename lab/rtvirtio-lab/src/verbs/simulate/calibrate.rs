//! `rtvirtio-lab simulate --calibrate`.

use std::path::Path;

use anyhow::Result;
use rtvirtio_bench::iocores::costs;
use rtvirtio_host::interrupt::Interrupted;
use rtvirtio_testbed::server::rtvirtio;

use crate::input;

/// Measures, searches, and writes the costs.
pub(super) fn run(path: &Path, interrupted: &Interrupted) -> Result<()> {
    // Three minutes of loads are not to be for nothing.
    input::check_output(path)?;
    let rounds = costs::measure(&rtvirtio()?, interrupted)?;
    let (costs, text) = costs::find(&rounds)?;
    input::write(path, &(serde_json::to_string_pretty(&costs)? + "\n"))?;
    println!("{text}wrote {}", path.display());
    Ok(())
}
