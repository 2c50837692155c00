//! The command line, of the program and of the process that it starts.

use std::path::PathBuf;

use anyhow::Result;
use clap::Parser;
use rtvirtio_cli::{Outcome, Program, output};
use rtvirtio_host::dataplane::{ControlClient, DEFAULT_SOCKET};
use rtvirtio_host::interrupt::Interrupted;
use serde_json::json;

use crate::{keeper, server};

/// Mount a data plane's IOThreads, devices and queues as files, as IOcm had them
#[derive(Parser)]
#[command(
    version,
    after_help = "\
Look:   cat DIR/worker/w.0/dev_list, DIR/dev/d.0/worker, DIR/vq/vq.0.1/handled_bytes;
        DIR/snapshot has everything in one read, as JSON
Change: echo w.1 >DIR/dev/d.0/worker      all queues of the device to that IOThread
        echo w.1 >DIR/vq/vq.0.1/worker    one queue
        echo 'io2 cpus=2' >DIR/worker/create
        echo w.2 >DIR/worker/remove       one that serves no queue
        echo 2-3 >DIR/worker/w.1/cpu
        echo 1 >DIR/worker/w.1/locked     policy leaves it alone
        echo w.1 >DIR/worker/default      devices that come later go there
Failed: a write fails with an errno; DIR/error says why.

An IOThread is w.N or its name. Numbers stay while the tree is mounted.
Mounted by root, everybody may look and root may write.
It ends with the data plane, and leaves no mount when it is killed.
docs/tree.md has all files, and what differs from IOcm's."
)]
pub(crate) struct Args {
    /// An empty directory to mount it on
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// The data plane's control socket
    #[arg(long, default_value = DEFAULT_SOCKET, value_name = "PATH")]
    socket: PathBuf,
    /// Print a JSON line once it is mounted
    #[arg(long)]
    json: bool,
    /// Serve the tree: as the child that unmounts it when its parent has gone
    #[arg(long, hide = true)]
    serve: bool,
}

impl Program for Args {
    fn cleans_up(&self) -> bool {
        !self.serve
    }

    fn run(self, interrupted: &Interrupted) -> Result<Outcome> {
        if self.serve {
            server::serve(&self.socket, &self.directory);
            return Ok(Outcome::Done);
        }
        mount(&self, interrupted)
    }
}

fn mount(args: &Args, interrupted: &Interrupted) -> Result<Outcome> {
    let directory = keeper::check(&args.directory)?;
    // Whoever cannot be reached is named before anything is mounted.
    ControlClient::new(&args.socket).snapshot()?;
    keeper::keep(&args.socket, &directory, interrupted, |server| {
        let (at, of) = (directory.display().to_string(), args.socket.display().to_string());
        let line = if args.json {
            json!({ "directory": at, "socket": of, "server_pid": server }).to_string()
        } else {
            format!("{at}: the data plane at {of}; Ctrl-C unmounts it")
        };
        output::line(&line);
        // Without systemd there is nobody to tell.
        let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
        Ok(())
    })?;
    Ok(Outcome::Done)
}
