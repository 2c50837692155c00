//! `rtvirtio ctl nic`.

use anyhow::Result;
use rtvirtio_host::dataplane::ControlClient;
use rtvirtio_spec::control::{QueueDirection, SetNicRate, Snapshot};
use rtvirtio_spec::serve::wire;
use rtvirtio_units::DiskName;

use super::show;
use crate::input;

#[derive(clap::Subcommand)]
pub(super) enum Command {
    /// Show them, and what each of their queues has handed on and dropped
    List,
    /// Change the limit on a direction and what is promised to it, while frames flow
    ///
    /// All of it is set: what is left out is not kept. A promise that an IOThread could not keep beside what it has promised already
    /// is refused, with what would fit, and nothing is changed. `ctl configuration` prints what holds.
    Set(Set),
}

#[derive(clap::Args)]
#[command(group = clap::ArgGroup::new("what").required(true).multiple(true).args(["max_frames", "max_mbit", "off"]))]
pub(super) struct Set {
    /// The network device
    #[arg(value_parser = super::disk)]
    name: DiskName,
    /// rx: what goes to the guest; tx: what comes from it
    #[arg(value_parser = direction)]
    direction: QueueDirection,
    /// Limit: frames a second, of all pairs of queues together
    #[arg(long, value_name = "N")]
    max_frames: Option<u64>,
    /// Limit: 10^6 bits a second
    #[arg(long, value_name = "N")]
    max_mbit: Option<u64>,
    /// How far ahead of the rate one may be that was silent, ms [default: 5]
    #[arg(long, value_name = "MS")]
    burst_ms: Option<u64>,
    /// Promise: how long frames within the limit wait for their IOThread at most, µs
    #[arg(long, value_name = "US")]
    within_us: Option<u64>,
    /// No limit, and no promise
    #[arg(long, conflicts_with_all = ["max_frames", "max_mbit", "burst_ms", "within_us"])]
    off: bool,
}

fn direction(text: &str) -> Result<QueueDirection, String> {
    let both = [QueueDirection::Receive, QueueDirection::Transmit];
    let found = both.into_iter().find(|direction| direction.key() == text);
    found.ok_or_else(|| "it is rx or tx".to_owned())
}

pub(super) fn run(client: &ControlClient, command: &Command, json: bool) -> Result<()> {
    match command {
        Command::List => {
            let found: Snapshot = client.get("/v1/snapshot")?;
            if json {
                input::print_json(&found.nics)?;
            } else {
                println!("{}", show::nics(&found.nics));
            }
        }
        Command::Set(set) => {
            let path = format!("/v1/nics/{}/{}", set.name, set.direction.key());
            if set.off {
                return Ok(client.delete(&path)?);
            }
            let Set { max_frames, max_mbit, burst_ms, within_us, .. } = *set;
            let rate = wire::NicRate { max_frames, max_mbit, burst_ms, within_us };
            client.change("PUT", &path, &SetNicRate(rate), &[])?;
        }
    }
    Ok(())
}
