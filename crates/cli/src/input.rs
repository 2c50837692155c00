//! Files that a user names: specifications, profiles, plans.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use rtvirtio_host::Host;
use rtvirtio_model::learned::{Learned, MAX_MODEL_BYTES};
use rtvirtio_spec::plan::{PLAN_VERSION, Plan};
use rtvirtio_spec::profile::Profile;
use rtvirtio_spec::specification::{MAX_FILE_BYTES, Specification, parse};

/// Largest plan or profile that is read; 1,000 VMs make a plan of about 3 MB.
const MAX_JSON_BYTES: u64 = 256 << 20;

/// A file's text, with one byte beyond `limit` if it is longer: whoever parses it refuses it.
pub fn read(path: &Path, limit: u64) -> Result<String> {
    let context = || format!("read {}", path.display());
    let file = File::open(path).with_context(context)?;
    let mut text = String::new();
    // One byte more than allowed tells a file that is too large, whatever its stated size.
    file.take(limit + 1).read_to_string(&mut text).with_context(context)?;
    Ok(text)
}

/// A checked specification; profiles it names are relative to its directory.
pub fn specification(path: &Path) -> Result<Specification> {
    let text = read(path, MAX_FILE_BYTES as u64)?;
    let mut specification = parse(&path.display().to_string(), &text)?;
    let directory = path.parent().unwrap_or(Path::new("."));
    for device in &mut specification.devices {
        device.profile = directory.join(&device.profile);
    }
    Ok(specification)
}

fn json<T: serde::de::DeserializeOwned>(path: &Path, what: &str) -> Result<T> {
    let text = read(path, MAX_JSON_BYTES)?;
    ensure!(text.len() as u64 <= MAX_JSON_BYTES, "{}: too large for a {what}", path.display());
    serde_json::from_str(&text).with_context(|| format!("{}: not a {what}", path.display()))
}

/// A profile that can be used.
pub fn profile(path: &Path) -> Result<Profile> {
    let profile: Profile = json(path, "profile (made by `rtvirtio calibrate`)")?;
    profile.check().with_context(|| format!("{}", path.display()))?;
    Ok(profile)
}

/// A learned model that can be asked.
pub fn learned(path: &Path) -> Result<Learned> {
    let context = || format!("read {}", path.display());
    let file = File::open(path).with_context(context)?;
    let mut bytes = Vec::new();
    file.take(MAX_MODEL_BYTES as u64 + 1).read_to_end(&mut bytes).with_context(context)?;
    Learned::from_bytes(&bytes).with_context(|| format!("{}", path.display()))
}

/// A plan of this binary's version.
pub fn plan(path: &Path) -> Result<Plan> {
    let plan: Plan = json(path, "plan (made by `rtvirtio plan -o`)")?;
    ensure!(
        plan.version == PLAN_VERSION,
        "{}: plan version {}, not {PLAN_VERSION}: make it anew with `rtvirtio plan -o`",
        path.display(),
        plan.version
    );
    Ok(plan)
}

/// Writes a file. A regular file is written whole or not at all: stage, then rename; behind a link, the
/// file that it leads to. What is none is never replaced: terminals, pipes and the like are written
/// through, anything else is refused.
pub fn write(path: &Path, text: &str) -> Result<()> {
    use std::io::Write as _;
    use std::os::unix::fs::FileTypeExt as _;
    let context = || format!("write {}", path.display());
    let there = match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        there => Some(there.with_context(context)?.file_type()),
    };
    if there.is_some_and(|kind| kind.is_symlink()) {
        let target = std::fs::canonicalize(path)
            .with_context(|| format!("{} is a link that leads nowhere", path.display()))?;
        return write(&target, text);
    }
    if let Some(kind) = there.filter(|kind| !kind.is_file()) {
        ensure!(
            kind.is_char_device() || kind.is_fifo(),
            "{} is not a regular file: nothing was written (name another output)",
            path.display()
        );
        let mut file = File::options().write(true).open(path).with_context(context)?;
        return file.write_all(text.as_bytes()).with_context(context);
    }
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    };
    let mut staged = tempfile::NamedTempFile::new_in(directory).with_context(context)?;
    staged.write_all(text.as_bytes()).with_context(context)?;
    staged.as_file().sync_all().with_context(context)?;
    use std::os::unix::fs::PermissionsExt;
    staged.as_file().set_permissions(std::fs::Permissions::from_mode(0o644))?;
    staged.persist(path).with_context(context)?;
    Ok(())
}

/// This host; `RTVIRTIO_STATE_DIR` moves journal and lock away from `/run/rtvirtio-host`.
pub fn host() -> Host {
    let host = Host::new("/");
    match std::env::var_os("RTVIRTIO_STATE_DIR") {
        Some(directory) => host.with_state_directory(directory),
        None => host,
    }
}

/// Prints a value as JSON on standard output.
pub fn print_json<T: serde::Serialize>(value: &T) -> Result<()> {
    println!("{}", serde_json::to_string_pretty(value)?);
    Ok(())
}
