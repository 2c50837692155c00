//! `rtvirtio boot`: a unit of systemd that applies a saved plan at each boot.
//!
//! Files: the plan in [`PLAN`], the unit in [`UNIT`]; each is staged and renamed.
//! If the unit cannot be enabled, both are put back as they were.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;

use crate::{Outcome, input};

const DIRECTORY: &str = "/etc/rtvirtio";
const PLAN: &str = "/etc/rtvirtio/plan.json";
const NAME: &str = "rtvirtio.service";
const UNIT: &str = "/etc/systemd/system/rtvirtio.service";

/// Arguments of `boot`.
#[derive(clap::Args)]
#[command(after_help = "Copies the plan to /etc/rtvirtio/plan.json and enables rtvirtio.service, \
    which runs `rtvirtio apply --reapply` after libvirt's start. Changes no knob now.")]
pub(crate) struct Args {
    /// A plan saved by `rtvirtio plan -o`
    #[arg(required_unless_present = "remove")]
    plan: Option<PathBuf>,
    /// Install it although targets are unmet
    #[arg(long)]
    force: bool,
    /// Remove unit and plan; knobs stay as they are
    #[arg(long, conflicts_with_all = ["plan", "force"])]
    remove: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<Outcome> {
    let plan = args.plan.as_deref().map(|path| load(path, args.force)).transpose()?;
    ensure!(
        // sd_booted(3)
        Path::new("/run/systemd/system").is_dir(),
        "systemd does not run here, so it cannot start anything at boot (have this system's own \
         boot scripts run `rtvirtio apply PLAN --reapply`)"
    );
    ensure!(rustix::process::geteuid().is_root(), "units are installed by root: run as root");
    let text = match plan {
        Some(plan) => {
            let program = std::env::current_exe()?;
            check_installed(&program)?;
            install(&plan, &unit(&program)?)?;
            format!("{NAME} applies {PLAN} at each boot\nnow: systemctl start {NAME}")
        }
        None if remove()? => format!("{NAME} and {PLAN} removed; take back: rtvirtio rollback"),
        None => "no plan is applied at boot: nothing to remove".to_owned(),
    };
    if args.json {
        let installed = args.plan.is_some();
        input::print_json(&json!({ "installed": installed, "unit": UNIT, "plan": PLAN }))?;
    } else {
        println!("{text}");
    }
    Ok(Outcome::Done)
}

/// The plan's text, once it is one that `apply` takes.
fn load(path: &Path, force: bool) -> Result<String> {
    let plan = input::plan(path)?;
    ensure!(
        plan.meets_all() || force,
        "the plan leaves targets unmet (--force installs it all the same)"
    );
    Ok(serde_json::to_string_pretty(&plan)?)
}

/// A program in a build directory is gone after the next `cargo clean`, and another one after the next
/// build. Cargo locks such a directory by a file in it, and marks the one above by another if it made that
/// (<https://bford.info/cachedir/>).
fn check_installed(program: &Path) -> Result<()> {
    let is_cargos = |path: &&Path| {
        [".cargo-lock", "CACHEDIR.TAG"].iter().any(|marker| path.join(marker).exists())
    };
    let built = program.ancestors().skip(1).find(is_cargos);
    match built {
        None => Ok(()),
        Some(directory) => bail!(
            "{} lies in the build directory {}, which no boot should depend on: install it first (make \
             install, or copy it to /usr/local/bin)",
            program.display(),
            directory.display()
        ),
    }
}

/// The unit; what a boot may not wait for is ordered, not required.
fn unit(program: &Path) -> Result<String> {
    let program = program.to_str().context("the program's path is not UTF-8")?;
    ensure!(!program.contains(char::is_control), "the program's path has a control character");
    // systemd.service(5), "Command lines". No variable is put in for a `$` of the program's path, so `$$` would stay two.
    let quoted = [("\\", "\\\\"), ("\"", "\\\""), ("%", "%%")]
        .iter()
        .fold(program.to_owned(), |text, (from, to)| text.replace(from, to));
    // The plan was judged when it was installed.
    Ok(format!(
        "[Unit]\n\
         Description=I/O settings of virtual machines, as planned by rtvirtio\n\
         After=libvirtd.service virtqemud.service libvirt-guests.service machines.target\n\
         ConditionPathExists={PLAN}\n\
         \n\
         [Service]\n\
         Type=oneshot\n\
         RemainAfterExit=yes\n\
         ExecStart=\"{quoted}\" apply {PLAN} --reapply --force\n\
         TimeoutStartSec=5min\n\
         \n\
         [Install]\n\
         WantedBy=multi-user.target\n"
    ))
}

fn install(plan: &str, unit: &str) -> Result<()> {
    let before = [before(PLAN)?, before(UNIT)?];
    let install = || {
        fs::create_dir_all(DIRECTORY).with_context(|| format!("create {DIRECTORY}"))?;
        input::write(Path::new(PLAN), plan)?;
        input::write(Path::new(UNIT), unit)?;
        systemctl(&["enable", NAME])
    };
    install().inspect_err(|_| {
        for (path, old) in [PLAN, UNIT].into_iter().zip(&before) {
            let _ = match old {
                Some(text) => input::write(Path::new(path), text),
                None => delete(path).map(drop),
            };
        }
        let _ = fs::remove_dir(DIRECTORY);
        let _ = systemctl(&["daemon-reload"]);
    })
}

/// Whether there was anything to remove.
fn remove() -> Result<bool> {
    if before(UNIT)?.is_some() {
        systemctl(&["disable", "--now", NAME])?;
    }
    let removed = [delete(UNIT)?, delete(PLAN)?];
    match fs::remove_dir(DIRECTORY) {
        // Somebody else's files in it are not rtvirtio's to remove.
        Err(e)
            if ![io::ErrorKind::NotFound, io::ErrorKind::DirectoryNotEmpty].contains(&e.kind()) =>
        {
            return Err(e).with_context(|| format!("remove {DIRECTORY}"));
        }
        _ => {}
    }
    if removed[0] {
        systemctl(&["daemon-reload"])?;
    }
    Ok(removed.contains(&true))
}

fn before(path: &str) -> Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e).with_context(|| format!("read {path}")),
    }
}

/// Whether it was there.
fn delete(path: &str) -> Result<bool> {
    match fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(e).with_context(|| format!("remove {path}")),
    }
}

/// Its own time limit bounds a systemd that hangs.
fn systemctl(arguments: &[&str]) -> Result<()> {
    let output = Command::new("systemctl").args(arguments).output().context("run systemctl")?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("systemctl {} failed: {}", arguments.join(" "), said.trim());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_in_a_build_directory_is_not_for_boots() {
        let refused = check_installed(&std::env::current_exe().unwrap()).unwrap_err();
        assert!(refused.to_string().contains("make install"), "{refused}");
        // Cargo did not make the directory, so there is no tag in it.
        let directory = tempfile::tempdir().unwrap();
        let release = directory.path().join("release");
        std::fs::create_dir(&release).unwrap();
        check_installed(&release.join("rtvirtio")).unwrap();
        std::fs::write(release.join(".cargo-lock"), "").unwrap();
        check_installed(&release.join("rtvirtio")).unwrap_err();
        check_installed(Path::new("/usr/bin/rtvirtio")).unwrap();
    }

    #[test]
    fn path_of_the_program_cannot_change_the_command_line() {
        let text = unit(Path::new("/opt/a \"b\" 50%/$x\\rtvirtio")).unwrap();
        assert!(
            text.contains(r#"ExecStart="/opt/a \"b\" 50%%/$x\\rtvirtio" apply /etc/"#),
            "{text}"
        );
        unit(Path::new("/opt/a\nExecStart=b/rtvirtio")).unwrap_err();
    }
}
