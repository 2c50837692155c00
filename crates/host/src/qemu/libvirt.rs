//! What only libvirt knows of its domains: those that are off, and what it calls their disks.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::error::{Address, QemuError};
use super::peer::Deadline;
use super::virsh::ask;

/// The names of domains that are defined and do not run.
///
/// # Errors
/// There is no libvirt, or it does not answer.
pub fn switched_off(timeout: Duration) -> Result<Vec<String>, QemuError> {
    let text = run("", "list", &["list", "--inactive", "--name"], timeout)?;
    Ok(text.lines().map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect())
}

/// The targets of a domain's disks, such as `vda`, each with its file or device.
///
/// # Errors
/// There is no libvirt or no such domain, or it does not answer.
pub fn targets(domain: &str, timeout: Duration) -> Result<Vec<(String, PathBuf)>, QemuError> {
    let arguments = ["domblklist", "--domain", domain, "--details"];
    let text = run(domain, "domblklist", &arguments, timeout)?;
    Ok(text.lines().filter_map(target).collect())
}

/// A line of `virsh domblklist --details`: type, device, target and source, which may have spaces.
fn target(line: &str) -> Option<(String, PathBuf)> {
    let mut rest = line.trim();
    let mut word = || {
        let (word, after) = rest.split_once(char::is_whitespace)?;
        rest = after.trim_start();
        Some(word)
    };
    let (_, device, target) = (word()?, word()?, word()?);
    (device == "disk" && rest.starts_with('/')).then(|| (target.to_owned(), rest.into()))
}

fn run(
    domain: &str,
    command: &'static str,
    arguments: &[&str],
    timeout: Duration,
) -> Result<String, QemuError> {
    ask(Path::new("virsh"), arguments, Deadline::after(timeout))
        .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
        .map_err(|fault| QemuError { peer: Address::Domain(domain.to_owned()), command, fault })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_disks_with_a_file() {
        let of = |line| target(line).map(|(name, file)| format!("{name} {}", file.display()));
        let disk = " file    disk     vda      /var/lib/vm images/db.qcow2";
        assert_eq!(of(disk).as_deref(), Some("vda /var/lib/vm images/db.qcow2"));
        for line in [
            " file    cdrom    sda      /iso/debian.iso",
            " network disk     vdb      pool/image",
            " file    disk     vdc      -",
            " Type   Device   Target   Source",
            "---------------------------------",
            "",
        ] {
            assert_eq!(of(line), None, "{line}");
        }
    }
}
