//! Whether a server keeps what it acknowledged ([`rtvirtio_testbed::verify`]): under a load, through disconnects, through kills.

use std::time::Duration;

use anyhow::Result;
use rtvirtio_host::interrupt::Interrupted;
use rtvirtio_testbed::server::Server;
use rtvirtio_testbed::verify::{Options, Report, Verifier};
use rtvirtio_testbed::work_directory::WorkDirectory;

use crate::experiment::seconds;

/// Arguments of `bench dataplane verify`.
#[derive(Debug, clap::Args)]
pub struct Verify {
    #[command(flatten)]
    options: Options,
    /// How long
    #[arg(long, default_value = "10", value_parser = seconds::<0, 86_400_000>)]
    seconds: Duration,
    /// Instead: drop the connection in mid-I/O so many times
    #[arg(long, conflicts_with = "kills")]
    disconnects: Option<u32>,
    /// Instead: kill the server (SIGKILL) so many times; COMMAND starts it
    #[arg(long, requires = "command")]
    kills: Option<u32>,
    /// The server's command line, which must make it listen at the socket
    #[arg(last = true)]
    command: Vec<String>,
}

impl Verify {
    /// Does it; what was done.
    ///
    /// # Errors
    /// If a promise is broken; if interrupted.
    pub fn run(&self, interrupted: &Interrupted) -> Result<Report> {
        let Self { options, seconds, command, .. } = self;
        eprintln!("seed {}", options.seed);
        let mut verifier = Verifier::new(options.clone())?;
        match (self.disconnects, self.kills) {
            (Some(count), _) => verifier.disconnects(count, interrupted)?,
            (_, Some(count)) => {
                let directory = WorkDirectory::new()?;
                let at = directory.path();
                let start = || Server::start(command, &options.socket, at, interrupted);
                verifier.kills(start, count, interrupted)?;
            }
            _ => {
                verifier.load(*seconds, interrupted)?;
                verifier.check()?;
            }
        }
        Ok(verifier.report().clone())
    }
}
