//! `rtvirtio apply`, `confirm`, `verify`, `rollback`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail};
use rtvirtio_host::{ApplyOptions, RollbackOutcome, SkippedVms};
use rtvirtio_spec::plan::Plan;
use serde_json::json;

use crate::watchdog::ConfirmWatchdog;
use crate::{Outcome, input, output};

/// Arguments of `apply`.
#[derive(clap::Args)]
#[command(after_help = "The journal is written first and every write is read back; on the first \
    failure all is undone. Refuses a plan that the host has moved away from since.")]
pub(crate) struct ApplyArgs {
    /// A plan saved by `rtvirtio plan -o`
    plan: PathBuf,
    #[command(flatten)]
    how: How,
}

/// How a plan is applied.
#[derive(clap::Args, Default)]
pub(crate) struct How {
    /// Apply although targets are unmet
    #[arg(long)]
    force: bool,
    /// Apply to the knobs found now, whatever the plan saw, leave out VMs that do not run,
    /// and set those that do not answer on the host alone
    #[arg(long)]
    reapply: bool,
    /// Revert after this many seconds unless `rtvirtio confirm` is run
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    confirm_timeout: Option<u64>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl How {
    /// A plan that was just made, for people; reverted after so many seconds unless it is confirmed.
    pub(crate) fn at_once(confirm_timeout: Option<u64>) -> Self {
        Self { confirm_timeout, ..Self::default() }
    }
}

/// Arguments of `confirm`.
#[derive(clap::Args)]
pub(crate) struct ConfirmArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Arguments of `verify`.
#[derive(clap::Args)]
#[command(after_help = "Exit codes: 0 no drift, 2 drift, 1 error.")]
pub(crate) struct VerifyArgs {
    /// The plan that was applied
    plan: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Arguments of `rollback`.
#[derive(clap::Args)]
pub(crate) struct RollbackArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn apply(args: &ApplyArgs) -> Result<Outcome> {
    apply_plan(&input::plan(&args.plan)?, &args.how)
}

pub(crate) fn apply_plan(plan: &Plan, how: &How) -> Result<Outcome> {
    if !plan.meets_all() && !how.force {
        for t in plan.tasks.iter().filter(|t| t.unmet.is_some()) {
            eprintln!("{}/{}: {}", t.vm, t.task, t.why_unmet().unwrap_or_default());
        }
        bail!("the plan leaves targets unmet (--force applies it all the same)");
    }
    let confirm_timeout = how.confirm_timeout.map(Duration::from_secs);
    let host = input::host();
    let options = ApplyOptions { confirm_timeout };
    let watchdog = confirm_timeout.map(|_| ConfirmWatchdog::start()).transpose()?;
    let (applied, SkippedVms { absent, started, unreached }) =
        if how.reapply { host.reapply(plan, options)? } else { host.apply_plan(plan, options)? };
    // Without changes there is nothing to wait for, and it ends.
    if let Some(watchdog) = watchdog.filter(|_| applied.awaits_confirmation) {
        watchdog.all_is_set()?;
    }
    if how.json {
        let mut value = serde_json::to_value(&applied)?;
        value["not_running"] = json!(absent);
        value["started_since"] = json!(started);
        let unreached = unreached.iter().map(|(vm, fault)| (vm, fault.to_string()));
        value["not_reached"] = json!(unreached.collect::<BTreeMap<_, _>>());
        input::print_json(&value)?;
        return Ok(Outcome::Done);
    }
    for vm in &absent {
        println!("VM {vm} does not run: left out (once it does: rtvirtio apply PLAN --reapply)");
    }
    for vm in &started {
        println!(
            "VM {vm} has started since the plan was made: left out (apply PLAN --reapply sets it too)"
        );
    }
    for (vm, fault) in &unreached {
        println!(
            "VM {vm} is set on the host alone: {fault} (later: rtvirtio apply PLAN --reapply)"
        );
    }
    if applied.recovered.is_some() {
        println!("an earlier apply had not ended well; it was put back first");
    }
    println!("{} knobs written and read back", applied.written);
    match how.confirm_timeout {
        Some(s) if applied.awaits_confirmation => {
            println!("reverts in {s} s unless you run: rtvirtio confirm");
        }
        _ => println!("take back: rtvirtio rollback"),
    }
    Ok(Outcome::Done)
}

pub(crate) fn confirm(args: &ConfirmArgs) -> Result<Outcome> {
    input::host().confirm()?;
    if args.json {
        input::print_json(&json!({ "confirmed": true }))?;
    } else {
        println!("confirmed");
    }
    Ok(Outcome::Done)
}

pub(crate) fn verify(args: &VerifyArgs) -> Result<Outcome> {
    let plan = input::plan(&args.plan)?;
    let host = input::host();
    let (drift, absent) = host.verify_plan(&plan)?;
    let writers = host.other_writers();
    if args.json {
        input::print_json(
            &json!({ "drift": drift, "not_running": absent, "other_writers": writers }),
        )?;
    } else {
        for d in &drift {
            println!("{}", output::visible(&d.to_string()));
        }
        for vm in &absent {
            println!("VM {vm} does not run: not looked at");
        }
        println!("{}", if drift.is_empty() { "no drift" } else { "the host has drifted" });
        for w in &writers {
            let text = format!("{:?}: {}: {}", w.kind, w.file.display(), w.line);
            println!("may write too: {}", output::visible(&text));
        }
    }
    Ok(if drift.is_empty() { Outcome::Done } else { Outcome::Changes })
}

pub(crate) fn rollback(args: &RollbackArgs) -> Result<Outcome> {
    // A benchmark that was killed found what a plan had set, and leaves that.
    let benchmark = rtvirtio_calibrate::testbed::recover_killed();
    let applied = input::host().rollback();
    let (benchmark, applied) = (benchmark?, applied?);
    if args.json {
        input::print_json(&json!({ "applied": applied, "killed_benchmark": benchmark }))?;
        return Ok(Outcome::Done);
    }
    for (what, outcome) in [("apply", applied), ("a killed benchmark", benchmark)] {
        match outcome {
            // Of a benchmark that was not killed there is nothing to say.
            RollbackOutcome::Nothing if what != "apply" => {}
            RollbackOutcome::Nothing => println!("{what}: nothing to roll back"),
            RollbackOutcome::RolledBack(restoration) => {
                println!("{what}: {} values restored", restoration.restored.len());
                for skipped in &restoration.skipped {
                    let skipped = output::visible(&skipped.to_string());
                    println!("{what}: gone since, nothing to restore: {skipped}");
                }
            }
        }
    }
    Ok(Outcome::Done)
}
