//! `rtvirtio-lab bench iothreads`.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use rtvirtio_bench::experiment::Experiment as _;
use rtvirtio_bench::iothreads::{Benchmark, Service, VCPUS, backend, rows, table};
use rtvirtio_host::interrupt::Interrupted;
use rtvirtio_testbed::guests::Accelerator;
use serde_json::json;

use crate::verbs::guests::ImageArgs;
use crate::{Outcome, input};

const GUEST_BOUND: &str = "guest-bound: TCG translates the vCPUs' instructions, which sets the \
                           IOPS; they say nothing of IOThreads";
const NO_KVM: &str = "skipped: KVM lane (no guest boots under KVM on this machine)";

/// Arguments of `bench iothreads`.
#[derive(clap::Args)]
#[command(after_help = "The disk is QEMU's null-co: no disk of yours is touched.")]
pub(crate) struct Args {
    /// Repetitions; each boots every guest anew
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repetitions: u32,
    /// Length of a cell's window in seconds
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=3600))]
    window: u64,
    /// Where results go: cells.jsonl, result.json and commands.txt; the same OUT continues where it was
    #[arg(long, default_value = "rtvirtio-bench-iothreads")]
    out: PathBuf,
    #[command(flatten)]
    image: ImageArgs,
    /// Seed of the order
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args, interrupted: &Interrupted) -> Result<Outcome> {
    std::fs::create_dir_all(&args.out).with_context(|| format!("create {}", args.out.display()))?;
    let found = args.image.find(interrupted);
    let (image, accelerator) = found.context("this benchmark needs guests")?;
    let notes = notes(accelerator);
    notes.iter().for_each(|note| eprintln!("{note}"));
    let benchmark = Benchmark {
        image: &image,
        accelerator,
        window: Duration::from_secs(args.window),
        repetitions: args.repetitions,
        seed: args.seed,
    };
    let runs = benchmark.run(&args.out, interrupted)?;
    let rows = rows(&runs);
    let table = table(&rows, iops(accelerator));
    let commands = super::note_command(&args.out)?;
    let services = Service::ALL.map(|s| Ok(json!({"service": s, "arguments": s.arguments()?})));
    let result = json!({
        "command": commands.last(),
        "accelerator": accelerator.name(),
        "guest_bound": accelerator == Accelerator::Tcg,
        "notes": notes,
        "window_s": args.window,
        "seed": args.seed,
        "vcpus": VCPUS,
        "backend": backend(),
        "services": services.into_iter().collect::<Result<Vec<_>>>()?,
        "summary": table.json(),
        "runs": runs,
    });
    let path = args.out.join("result.json");
    input::write(&path, &serde_json::to_string_pretty(&result)?)?;
    if args.json {
        input::print_json(&result)?;
    } else {
        println!(
            "{table}Medians and ranges. CPU: of QEMU for each request, µs, then by thread; elsewhere: other CPU use \
             of the machine, cores."
        );
        notes.iter().for_each(|note| println!("{note}"));
        println!("{}", path.display());
    }
    Ok(Outcome::Done)
}

/// What must be read beside the numbers.
fn notes(accelerator: Accelerator) -> Vec<String> {
    let mut notes = Vec::new();
    if accelerator == Accelerator::Tcg {
        notes.extend([GUEST_BOUND.to_owned(), NO_KVM.to_owned()]);
    }
    let cpus = rtvirtio_testbed::cpu::available();
    // The most that want a CPU: vCPUs, two IOThreads, the main loop.
    if cpus < VCPUS as usize + 3 {
        notes.push(format!(
            "{VCPUS} vCPUs, the IOThreads and QEMU's main loop share {cpus} CPUs, unpinned"
        ));
    }
    notes
}

/// What requests a second are called.
fn iops(accelerator: Accelerator) -> &'static str {
    if accelerator == Accelerator::Tcg { "IOPS, guest-bound" } else { "IOPS" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tcg_is_labelled_and_names_the_lane_it_skips() {
        let labelled =
            |notes: &[String]| [GUEST_BOUND, NO_KVM].map(|text| notes.iter().any(|n| n == text));
        assert_eq!(labelled(&notes(Accelerator::Tcg)), [true, true]);
        assert_eq!(labelled(&notes(Accelerator::Kvm)), [false, false]);
        assert!(GUEST_BOUND.starts_with("guest-bound") && NO_KVM.contains("KVM lane"));
        assert_eq!([Accelerator::Tcg, Accelerator::Kvm].map(iops), ["IOPS, guest-bound", "IOPS"]);
    }
}
