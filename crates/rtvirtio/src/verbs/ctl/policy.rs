//! `rtvirtio ctl policy` and `rtvirtio ctl decisions`.

use anyhow::Result;
use rtvirtio_host::dataplane::ControlClient;
use rtvirtio_spec::control::{Decision, Event, PolicyState, SetPolicy};
use rtvirtio_spec::serve::{Policy, wire};
use rtvirtio_units::CpuId;

use super::show;
use crate::{input, output};

/// Arguments of `ctl policy`.
#[derive(clap::Args)]
pub(super) struct Args {
    /// static: nobody but you. round-robin: queues spread evenly over the IOThreads that there are.
    /// dynamic: number and placement follow the load. advise: dynamic that only logs what it would
    /// do. iocm, spdk: published policies, for comparison. Left out: show what is in force
    #[arg(value_parser = policy)]
    name: Option<Policy>,
    /// CPUs on which it may add IOThreads, one on each, taken in this order: such as 2,3,6-7. Give
    /// it CPUs that no vCPU runs on [default: as they are]
    #[arg(long, value_name = "LIST", value_parser = cpus)]
    cpus: Option<Cpus>,
    /// Fewest IOThreads [default: as it is; 1 with --cpus]
    #[arg(long, value_name = "N")]
    min_iothreads: Option<u32>,
    /// Most IOThreads, no more than CPUs [default: as it is; all with --cpus]
    #[arg(long, value_name = "N")]
    max_iothreads: Option<u32>,
    /// Whether it may take CPUs from vCPUs and give them back; the data plane must have been started
    /// with borrow = true [default: as it is]
    #[arg(long, value_name = "BOOL")]
    borrow: Option<bool>,
}

/// Arguments of `ctl decisions`.
#[derive(clap::Args)]
pub(super) struct DecisionArgs {
    /// Print those after this number only
    #[arg(long, value_name = "N", default_value_t = 0)]
    after: u64,
    /// Go on printing, until Ctrl-C: each decision as it is made, and a second later, as a line of its
    /// own, what came of it (with --json the decision once more)
    #[arg(long)]
    follow: bool,
}

/// CPUs in the order of the command line.
#[derive(Debug, Clone)]
struct Cpus(Vec<CpuId>);

fn policy(text: &str) -> Result<Policy, &'static str> {
    text.parse()
}

/// `2,3,6-7`, in this order.
fn cpus(text: &str) -> Result<Cpus, String> {
    let mut ordered = Vec::new();
    for part in text.split(',') {
        match super::cpus(part)?.0 {
            any if any.is_empty() => return Err("write CPUs as 2,3,6-7".to_owned()),
            some => ordered.extend(some),
        }
    }
    Ok(Cpus(ordered))
}

impl Args {
    /// Whether the command sets anything.
    pub(super) const fn changes(&self) -> bool {
        let Self { name, cpus, min_iothreads, max_iothreads, borrow } = self;
        name.is_some()
            || cpus.is_some()
            || min_iothreads.is_some()
            || max_iothreads.is_some()
            || borrow.is_some()
    }
}

pub(super) fn run(client: &ControlClient, args: &Args, json: bool) -> Result<()> {
    let Args { name, cpus, min_iothreads, max_iothreads, borrow } = args;
    let settings = wire::IoCores {
        policy: *name,
        cpus: cpus.as_ref().map(|cpus| cpus.0.clone()),
        min_iothreads: *min_iothreads,
        max_iothreads: *max_iothreads,
        borrow: *borrow,
    };
    let state: PolicyState = if args.changes() {
        client.ask("PUT", "/v1/policy", &SetPolicy(settings))?
    } else {
        client.get("/v1/policy")?
    };
    if json {
        return input::print_json(&state);
    }
    print!("{}", show::policy(&state));
    Ok(())
}

pub(super) fn decisions(client: &ControlClient, args: &DecisionArgs, json: bool) -> Result<()> {
    // Before the list: what is decided meanwhile is in both, and printed once.
    let events = args.follow.then(|| client.events()).transpose()?;
    let at = |after: u64| format!("/v1/decisions?after={after}");
    let found: Vec<Decision> = client.get(&at(args.after))?;
    let mut last = found.last().map_or(args.after, |decision| decision.number);
    if !args.follow && json {
        return input::print_json(&found);
    }
    let print = |decisions: &[Decision], words: fn(&Decision) -> String| -> Result<()> {
        for decision in decisions {
            let text = if json { serde_json::to_string(decision)? } else { words(decision) };
            output::line(&text);
        }
        Ok(())
    };
    print(&found, show::decision)?;
    for event in events.into_iter().flatten() {
        match event? {
            Event::Decision { .. } | Event::EventsLost { .. } => {
                let found: Vec<Decision> = client.get(&at(last))?;
                last = found.last().map_or(last, |decision| decision.number);
                print(&found, show::decided)?;
            }
            Event::DecisionMeasured { number } => {
                let mut found: Vec<Decision> = client.get(&at(number.saturating_sub(1)))?;
                found.truncate(1);
                found.retain(|decision| decision.number == number);
                print(&found, |of| format!("  effect of {}: {}", of.number, show::effect(of)))?;
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_keep_their_order() {
        let read = |text: &str| {
            cpus(text).ok().map(|cpus| cpus.0.iter().map(|cpu| cpu.get()).collect::<Vec<_>>())
        };
        assert_eq!(read("6-7,2,3"), Some(vec![6, 7, 2, 3]));
        for wrong in ["", "any", "1,any", "1,,2", "3-2", "x"] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }
}
