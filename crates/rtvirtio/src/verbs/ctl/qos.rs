//! `rtvirtio ctl qos` and `rtvirtio ctl schedule`.

use anyhow::{Result, anyhow, bail};
use rtvirtio_host::dataplane::ControlClient;
use rtvirtio_spec::control::{ScheduleCurve, ScheduleState, SetQos};
use rtvirtio_spec::serve::wire;
use rtvirtio_units::{DiskName, Name, NameError};

use super::show;
use crate::input;

/// Arguments of `ctl qos`.
#[derive(clap::Args)]
#[command(group = clap::ArgGroup::new("what").required(true).args(["schedule", "off"]))]
pub(super) struct Args {
    /// The device
    #[arg(value_parser = super::disk)]
    device: DiskName,
    /// Take it out of its schedule: its requests start as they come
    #[arg(long, conflicts_with = "schedule")]
    off: bool,
    /// Promise it although the admission test says that it does not fit
    #[arg(long, conflicts_with = "off")]
    force: bool,
    #[command(flatten)]
    qos: QosArgs,
}

/// A disk's part of the physical device that it shares.
#[derive(clap::Args)]
#[command(next_help_heading = "Part of a shared physical device")]
pub(super) struct QosArgs {
    /// The physical device's schedule; without it requests start as they come
    #[arg(long, value_name = "NAME", value_parser = name)]
    schedule: Option<Name>,
    /// Part of what promises leave, against other disks' weights, 1 to 1000 [default: 100]
    #[arg(long, value_name = "N", requires = "schedule")]
    weight: Option<u32>,
    /// Promise: how long a request within --iops and --bandwidth may take, µs
    #[arg(long, value_name = "US", requires = "schedule")]
    deadline_us: Option<u64>,
    /// Promise: requests a second
    #[arg(long, value_name = "N", requires = "schedule")]
    iops: Option<u64>,
    /// Promise: bytes a second, such as 20M
    #[arg(long, value_name = "SIZE", requires = "schedule", value_parser = size)]
    bandwidth: Option<wire::Size>,
    /// Promise: requests that may come at once [default: 1]
    #[arg(long, value_name = "N", requires = "schedule")]
    burst: Option<u32>,
    /// Limit: requests a second, promised ones among them
    #[arg(long, value_name = "N", requires = "schedule")]
    max_iops: Option<u64>,
    /// Limit: bytes a second, such as 200M
    #[arg(long, value_name = "SIZE", requires = "schedule", value_parser = size)]
    max_bandwidth: Option<wire::Size>,
    /// Limit: requests that may come at once [default: 1]
    #[arg(long, value_name = "N", requires = "schedule")]
    max_burst: Option<u32>,
    /// A promise for requests that the guest marks with an I/O priority (rt/0 to be/7, idle); may
    /// be given 8 times
    #[arg(
        long = "task",
        value_name = "rt/0,deadline-us=N,iops=N[,bandwidth=SIZE][,burst=N]",
        requires = "schedule",
        value_parser = task
    )]
    tasks: Vec<wire::Task>,
}

impl QosArgs {
    /// As a device has it, if it names a schedule.
    pub(super) fn wire(&self) -> Option<wire::Qos> {
        Some(wire::Qos {
            schedule: self.schedule.clone()?,
            weight: self.weight,
            deadline_us: self.deadline_us,
            iops: self.iops,
            bandwidth: self.bandwidth,
            burst: self.burst,
            max_iops: self.max_iops,
            max_bandwidth: self.max_bandwidth,
            max_burst: self.max_burst,
            tasks: self.tasks.clone(),
        })
    }
}

#[derive(clap::Subcommand)]
pub(super) enum ScheduleCommand {
    /// Show them
    List,
    /// Make one, or change what is said of its device, while I/O runs
    ///
    /// A request costs --request-ns, and --kib-ns for each KiB; the device works on --channels of
    /// them at a time. `rtvirtio calibrate` measures what a device can do.
    Set {
        /// Its name
        #[arg(value_parser = name)]
        name: Name,
        /// Requests that the device serves at a time
        #[arg(long, value_name = "N")]
        channels: u32,
        /// What a read or write takes before its bytes, ns
        #[arg(long, value_name = "NS")]
        request_ns: u64,
        /// What each KiB takes further, ns
        #[arg(long, value_name = "NS")]
        kib_ns: u64,
        /// What a flush or discard takes, ns; as long as --request-ns if left out
        #[arg(long, value_name = "NS")]
        flush_ns: Option<u64>,
    },
    /// Remove one that no device is in
    Remove {
        /// Its name
        #[arg(value_parser = name)]
        name: Name,
    },
}

fn name(text: &str) -> Result<Name, NameError> {
    Name::new(text)
}

fn size(text: &str) -> Result<wire::Size> {
    text.parse().map_err(|words| anyhow!("{text:?}: {words}"))
}

/// `rt/0,deadline-us=2000,iops=500`
fn task(text: &str) -> Result<wire::Task> {
    let mut parts = text.split(',');
    let ioprio = parts.next().unwrap_or_default().parse().map_err(|words| anyhow!("{words}"))?;
    let mut task =
        wire::Task { ioprio, deadline_us: None, iops: None, bandwidth: None, burst: None };
    for part in parts {
        let (key, value) = part.split_once('=').unwrap_or((part, ""));
        let wrong = |_| anyhow!("{part:?}: not a number");
        match key {
            "deadline-us" => task.deadline_us = Some(value.parse().map_err(wrong)?),
            "iops" => task.iops = Some(value.parse().map_err(wrong)?),
            "bandwidth" => task.bandwidth = Some(size(value)?),
            "burst" => task.burst = Some(value.parse().map_err(wrong)?),
            _ => bail!("{part:?}: a task has deadline-us=, iops=, bandwidth= and burst="),
        }
    }
    Ok(task)
}

pub(super) fn run(client: &ControlClient, args: &Args) -> Result<()> {
    let path = format!("/v1/devices/{}/qos", args.device);
    match args.qos.wire() {
        Some(qos) => {
            let query = if args.force { "?force=true" } else { "" };
            Ok(client.change("PUT", &format!("{path}{query}"), &SetQos(qos), &[])?)
        }
        None => Ok(client.delete(&path)?),
    }
}

pub(super) fn schedules(
    client: &ControlClient,
    command: &ScheduleCommand,
    json: bool,
) -> Result<()> {
    let at = |name: &Name| format!("/v1/schedules/{name}");
    match command {
        ScheduleCommand::List => {
            let found: Vec<ScheduleState> = client.snapshot()?.schedules;
            if json {
                input::print_json(&found)?;
            } else {
                println!("{}", show::schedules(&found));
            }
        }
        ScheduleCommand::Set { name, channels, request_ns, kib_ns, flush_ns } => {
            let body = ScheduleCurve {
                channels: *channels,
                request_ns: *request_ns,
                kib_ns: *kib_ns,
                flush_ns: *flush_ns,
            };
            client.change("PUT", &at(name), &body, &[])?;
        }
        ScheduleCommand::Remove { name } => client.delete(&at(name))?,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn task_is_a_priority_and_a_promise() {
        let read = task("rt/0,deadline-us=2000,iops=500,bandwidth=1M,burst=2").unwrap();
        assert_eq!(read.ioprio.to_string(), "rt/0");
        assert_eq!((read.deadline_us, read.iops, read.burst), (Some(2_000), Some(500), Some(2)));
        assert_eq!(read.bandwidth.map(|size| size.0.get()), Some(1 << 20));
        for wrong in ["", "rt/9,iops=1", "rt/0,iops", "rt/0,iops=x", "rt/0,weight=3", "rt/0,"] {
            assert!(task(wrong).is_err(), "{wrong}");
        }
    }
}
