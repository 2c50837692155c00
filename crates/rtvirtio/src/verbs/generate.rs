//! `rtvirtio generate`: man pages and completions, from the command line's own description.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::CommandFactory as _;
use clap_complete::Shell;

use crate::{Cli, Outcome};

/// Arguments of `generate`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Where man/*.1 and the completions of bash, zsh and fish are written
    directory: PathBuf,
}

pub(crate) fn run(args: &Args) -> Result<Outcome> {
    let pages = args.directory.join("man");
    let context = || format!("write below {}", args.directory.display());
    std::fs::create_dir_all(&pages).with_context(context)?;
    clap_mangen::generate_to(Cli::command(), &pages).with_context(context)?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut Cli::command(), "rtvirtio", &args.directory)
            .with_context(context)?;
    }
    Ok(Outcome::Done)
}
