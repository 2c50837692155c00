//! The conversation with systemd on the system bus (org.freedesktop.systemd1(5)).
//!
//! Properties: `bus_that_hangs_costs_one_time_limit`, `path_names_its_unit`.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use zbus::connection::Builder;
use zbus::{Connection, OwnedObjectPath, OwnedVariant, Variant, block_on};

use super::PROPERTIES;
use crate::HostError;

/// How long one conversation may take, connecting included.
const LIMIT: Duration = Duration::from_secs(20);
const DESTINATION: &str = "org.freedesktop.systemd1";
const MANAGER: (&str, &str) = ("/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager");

/// Property → (device's path, value) each, as on the bus.
pub(crate) type Properties = BTreeMap<String, Vec<(String, u64)>>;

/// A unit that is active.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Unit {
    pub(crate) name: String,
    pub(crate) properties: Properties,
}

/// The name of the unit that `cgroup` would belong to, if it can be one's.
fn unit_name(cgroup: &Path) -> Option<String> {
    let name = cgroup.file_name()?.to_str()?;
    // A name that the kernel could take for a file of its own has a `_` in front (`cg_escape()`).
    let name = name.strip_prefix('_').unwrap_or(name);
    interface(name).map(|_| name.to_owned())
}

/// The D-Bus interface that has a unit's cgroup properties.
fn interface(unit: &str) -> Option<&'static str> {
    match unit.rsplit_once('.')?.1 {
        "scope" => Some("org.freedesktop.systemd1.Scope"),
        "service" => Some("org.freedesktop.systemd1.Service"),
        "slice" => Some("org.freedesktop.systemd1.Slice"),
        _ => None,
    }
}

/// The units among `cgroups`, which are paths below the mount. None without a system bus.
pub(crate) fn units(
    bus: &Path,
    cgroups: impl IntoIterator<Item = PathBuf>,
) -> Result<BTreeMap<PathBuf, Unit>, HostError> {
    let named = cgroups.into_iter().filter_map(|c| Some((unit_name(&c)?, c)));
    let named: Vec<(String, PathBuf)> = named.collect();
    if named.is_empty() {
        return Ok(BTreeMap::new());
    }
    let found = on_bus(bus, LIMIT, async move |bus| {
        let mut units = BTreeMap::new();
        for (name, cgroup) in named {
            if let Some(unit) = unit(&bus, name, &cgroup).await? {
                units.insert(cgroup, unit);
            }
        }
        Ok(units)
    });
    match found {
        // No bus, or a socket that nobody listens on: nobody to keep the cgroups from.
        Err(zbus::Error::Connection(e, _))
            if [io::ErrorKind::NotFound, io::ErrorKind::ConnectionRefused].contains(&e.kind()) =>
        {
            Ok(BTreeMap::new())
        }
        found => found.map_err(|source| HostError::Systemd { action: "ask systemd", source }),
    }
}

/// Sets `properties` until the next boot, each list whole, in one call.
pub(crate) fn set(bus: &Path, unit: &str, properties: &Properties) -> Result<(), HostError> {
    let (unit, properties) = (unit.to_owned(), properties.clone());
    let result = on_bus(bus, LIMIT, async move |bus| {
        let mut values = Vec::new();
        for (property, list) in properties {
            // An empty list clears, one with entries adds.
            values.push((property.clone(), Variant::from(Vec::<(String, u64)>::new())));
            if !list.is_empty() {
                values.push((property, Variant::from(list)));
            }
        }
        const RUNTIME: bool = true;
        // The unit is realised before the answer (`bus_scope_commit_properties()`).
        manager(&bus, "SetUnitProperties", &(unit, RUNTIME, values)).await.map(drop)
    });
    result.map_err(|source| HostError::Systemd { action: "set properties through systemd", source })
}

/// Runs `talk` with a connection to the bus, on a thread of its own: one that hangs, in connecting
/// too, is left behind.
fn on_bus<T: Send + 'static>(
    bus: &Path,
    limit: Duration,
    talk: impl AsyncFnOnce(Connection) -> zbus::Result<T> + Send + 'static,
) -> zbus::Result<T> {
    let address = format!("unix:path={}", bus.display());
    let (sender, receiver) = mpsc::channel();
    thread::Builder::new().name("system-bus".to_owned()).spawn(move || {
        let connect = Builder::address(address.as_str()).method_timeout(limit);
        // Nobody waits any more if this fails.
        let _ = sender.send(block_on(async { talk(connect.build().await?).await }));
    })?;
    let late = |_| io::Error::new(io::ErrorKind::TimedOut, format!("no answer in {limit:?}"));
    receiver.recv_timeout(limit).map_err(late)?
}

async fn manager<B>(bus: &Connection, method: &str, body: &B) -> zbus::Result<zbus::Message>
where
    B: serde::Serialize + zbus::DynamicType,
{
    bus.call_method(Some(DESTINATION), MANAGER.0, Some(MANAGER.1), method, body).await
}

/// The unit of this name, if it is loaded and has this cgroup.
async fn unit(bus: &Connection, name: String, cgroup: &Path) -> zbus::Result<Option<Unit>> {
    let Some(interface) = interface(&name) else {
        return Ok(None);
    };
    let path: OwnedObjectPath = match manager(bus, "GetUnit", &(&name,)).await {
        Ok(answer) => answer.body().deserialize()?,
        Err(zbus::Error::MethodError(error, ..))
            if error.as_str() == "org.freedesktop.systemd1.NoSuchUnit" =>
        {
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    let get = async |property: &str| {
        let properties = Some("org.freedesktop.DBus.Properties");
        let body = (interface, property);
        let answer = bus.call_method(Some(DESTINATION), &path, properties, "Get", &body).await?;
        answer.body().deserialize::<OwnedVariant>()
    };
    // A container's systemd, or a cgroup that only looks like a unit's.
    if Path::new(&String::try_from(get("ControlGroup").await?)?) != Path::new("/").join(cgroup) {
        return Ok(None);
    }
    let mut properties = Properties::new();
    for (_, property) in PROPERTIES {
        let list = Vec::<(String, u64)>::try_from(get(property).await?)?;
        properties.insert(property.to_owned(), list);
    }
    Ok(Some(Unit { name, properties }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bus_that_hangs_costs_one_time_limit() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("bus");
        // It accepts, as the kernel does for whoever listens, and never says a word.
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let start = std::time::Instant::now();
        let limit = Duration::from_millis(300);
        let result = on_bus(&socket, limit, async |_| Ok(()));
        assert!(
            matches!(result, Err(zbus::Error::InputOutput(e)) if e.kind() == io::ErrorKind::TimedOut)
        );
        assert!(start.elapsed() < Duration::from_secs(30));
        let missing = units(&directory.path().join("none"), [PathBuf::from("a.scope")]);
        assert!(missing.unwrap().is_empty());
    }

    #[test]
    fn path_names_its_unit() {
        let name = |path: &str| unit_name(Path::new(path));
        assert_eq!(
            name("machine.slice/machine-qemu\\x2d1\\x2dplc.scope").as_deref(),
            Some("machine-qemu\\x2d1\\x2dplc.scope")
        );
        assert_eq!(name("a.slice/_cgroup.service").as_deref(), Some("cgroup.service"));
        assert_eq!(name("machine.slice/a.scope/libvirt"), None);
        assert_eq!(name("rtvirtio/bench/vm1"), None);
    }
}
