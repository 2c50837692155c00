//! Text to a [`Found`] mapping: QEMU's JSON, libvirt's XML or TOML, told by how it begins.
//!
//! The text is hostile: its size is bounded before anything is parsed, XML has neither DTD nor
//! entities of its own, and what is not understood is refused by name.

use roxmltree::{Document, Node, ParsingOptions};
use rtvirtio_units::{IoThreadName, NameError};
use serde::Deserialize;
use serde_json::Value;

use super::{Entry, MAX_QUEUES, Mapping, MappingError};
use crate::specification::{MAX_KEY_PARTS, deep_key};

/// Largest text that is read: the largest domains have some 100 KiB.
pub const MAX_BYTES: usize = 1 << 20;
/// Most elements, attributes and texts of an XML document.
const MAX_XML_NODES: u32 = 200_000;
/// Most entries or queues that are looked at; more cannot be a mapping.
const MAX_ITEMS: usize = 4096;

/// A format of mappings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// `-device` in JSON, its `iothread-vq-mapping` alone, or arguments with such a `-device`.
    Qemu,
    /// `<driver>`, `<iothreads>`, `<disk>` or a whole `<domain>`.
    Libvirt,
    /// `mapping = [...]`.
    Toml,
}

/// Which format a text is in.
#[must_use]
pub fn format_of(text: &str) -> Format {
    let text = text.trim_start_matches('\u{feff}').trim_start();
    let after = |c: char| text.strip_prefix(c).map(str::trim_start);
    match after('[') {
        // `[{` is JSON; `[table]` and `[[list]]` are TOML.
        Some(rest) if rest.starts_with(['{', ']']) => return Format::Qemu,
        Some(_) => return Format::Toml,
        None => {}
    }
    match text.as_bytes().first() {
        Some(b'<') => Format::Libvirt,
        Some(b'{' | b'-') => Format::Qemu,
        _ => Format::Toml,
    }
}

/// What a text says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// The entries, unchecked.
    pub entries: Vec<Entry>,
    /// The device's queues, if the text says.
    pub queues: Option<u32>,
}

impl Found {
    /// The mapping for `queues` if given, else for as many as the text says or lists.
    ///
    /// # Errors
    /// [`ReadError::HowManyQueues`]: nobody says; [`ReadError::Mapping`]: they are no mapping.
    pub fn mapping(&self, queues: Option<u32>) -> Result<Mapping, ReadError> {
        let listed = self.entries.iter().flat_map(|e| e.queues()).max();
        let queues = queues.or(self.queues).or(listed.map(|q| q.saturating_add(1)));
        let queues = match queues {
            Some(queues) => queues,
            None if self.entries.is_empty() => return Err(MappingError::Empty.into()),
            None => return Err(ReadError::HowManyQueues),
        };
        Ok(Mapping::new(&self.entries, queues, None)?)
    }
}

/// Why a text has no mapping.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// More bytes than are read.
    #[error("{0} bytes, more than {MAX_BYTES}")]
    TooLarge(usize),
    /// Not JSON, or JSON of another shape.
    #[error("QEMU's JSON: {0}")]
    Json(String),
    /// Not XML.
    #[error("libvirt's XML")]
    Xml(#[source] roxmltree::Error),
    /// An element that lacks an attribute, or has a wrong one.
    #[error("libvirt's XML, line {line}: <{element}> wants {attribute}='NUMBER'")]
    XmlAttribute {
        /// Line, from 1.
        line: u32,
        /// The element.
        element: &'static str,
        /// The attribute.
        attribute: &'static str,
    },
    /// Several disks, and none was chosen, or none has the name that was.
    #[error("there are {0} disks, and none is chosen by its name")]
    WhichDisk(usize),
    /// IOThreads of something else than a virtio-blk device, whose queues are others.
    #[error("the IOThreads are those of {0}, not of a virtio-blk disk")]
    NotADisk(String),
    /// Not TOML, or TOML of another shape.
    #[error("TOML: {0}")]
    Toml(String),
    /// A dotted key without end.
    #[error("TOML: a dotted key has more than {MAX_KEY_PARTS} parts")]
    TomlTooDeep,
    /// There is no mapping in the text.
    #[error("there is no {0}")]
    Absent(&'static str),
    /// More entries or queues than anything has.
    #[error("more than {MAX_ITEMS} IOThreads or queues")]
    TooMany,
    /// Both ways of saying it.
    #[error("iothread and iothread-vq-mapping properties cannot be set at the same time")]
    Both,
    /// An IOThread's name that is none.
    #[error("an IOThread's name")]
    Name(#[from] NameError),
    /// Round robin over an unknown number of queues.
    #[error("round robin, and the text does not say how many queues there are")]
    HowManyQueues,
    /// The entries are no mapping.
    #[error(transparent)]
    Mapping(#[from] MappingError),
}

impl ReadError {
    /// What to do about it, in one line.
    #[must_use]
    pub fn hint(&self) -> String {
        match self {
            Self::TooLarge(_) => "cut out the one device".to_owned(),
            Self::Json(_) | Self::Absent("iothread-vq-mapping") => {
                r#"write [{"iothread":"iot0","vqs":[0,2]},{"iothread":"iot1","vqs":[1,3]}], or a -device in JSON with it"#.to_owned()
            }
            Self::Xml(_) | Self::XmlAttribute { .. } | Self::Absent("<iothreads>") => {
                "write <driver queues='2'><iothreads><iothread id='1'><queue id='0'/></iothread>...\
                 </iothreads></driver>, or a <disk> or <domain> with it"
                    .to_owned()
            }
            Self::WhichDisk(_) => {
                "choose one: --device with its target (vda), its alias or its id".to_owned()
            }
            Self::NotADisk(_) => "give the one disk's <driver> or -device".to_owned(),
            Self::Toml(_) | Self::TomlTooDeep | Self::Absent(_) => {
                r#"write mapping = [{ iothread = "iot0", vqs = [0, 2] }, { iothread = "iot1", vqs = [1, 3] }]"#
                    .to_owned()
            }
            Self::TooMany => format!("a device has at most {MAX_QUEUES} queues"),
            Self::Both => "remove one".to_owned(),
            Self::Name(_) => {
                "name an IOThread with letters, digits, '_', '-', '+', '@' and '.'".to_owned()
            }
            Self::HowManyQueues => "say it: --queues N".to_owned(),
            Self::Mapping(error) => error.hint(),
        }
    }
}

/// Reads a text of any format. `disk` chooses among the disks of a `<domain>`, by target or alias.
///
/// # Errors
/// [`ReadError`] says what is wrong; [`ReadError::hint`] what to do.
pub fn read(text: &str, disk: Option<&str>) -> Result<Found, ReadError> {
    if text.len() > MAX_BYTES {
        return Err(ReadError::TooLarge(text.len()));
    }
    let found = match format_of(text) {
        Format::Qemu => qemu(text, disk)?,
        Format::Libvirt => libvirt(text, disk)?,
        Format::Toml => toml(text)?,
    };
    let queues: usize = found.entries.iter().map(|e| e.queues().len()).sum();
    if found.entries.len() > MAX_ITEMS || queues > MAX_ITEMS {
        return Err(ReadError::TooMany);
    }
    Ok(found)
}

/// The names that libvirt's numbers stand for, by number from 1, instead of `iothreadN`.
pub fn rename(found: &mut Found, names: &[IoThreadName]) {
    for entry in &mut found.entries {
        let id = super::write::libvirt_id(&entry.iothread);
        let index = id.and_then(|id| usize::try_from(id.get()).ok()?.checked_sub(1));
        if let Some(name) = index.and_then(|i| names.get(i)) {
            entry.iothread = name.clone();
        }
    }
}

/// QEMU's name of an IOThread of libvirt.
fn libvirts_name(id: u32) -> Result<IoThreadName, NameError> {
    IoThreadName::new(format!("iothread{id}"))
}

fn json_error(error: serde_json::Error) -> ReadError {
    ReadError::Json(error.to_string())
}

fn qemu(text: &str, disk: Option<&str>) -> Result<Found, ReadError> {
    let text = text.trim_start_matches('\u{feff}').trim_start();
    if text.starts_with('-') {
        return of_devices(devices(text)?, disk);
    }
    match serde_json::from_str(text).map_err(json_error)? {
        Value::Object(device) => of_device(device),
        mapping => {
            let entries = serde_json::from_value(mapping).map_err(json_error)?;
            Ok(Found { entries, queues: None })
        }
    }
}

/// The `-device` arguments of a command line, for the shell or one on each line: in JSON as `rtvirtio mapping`
/// prints them, or as `KEY=VALUE,...`.
fn devices(text: &str) -> Result<Vec<serde_json::Map<String, Value>>, ReadError> {
    let mut found = Vec::new();
    for (at, option) in text.match_indices("-device") {
        let before = text[..at].chars().next_back();
        // Another option, or another part of a text, may end with it.
        let begins = before.is_none_or(|c| c.is_whitespace() || c == '-')
            && !text[..at].trim_end_matches('-').ends_with(|c: char| !c.is_whitespace());
        let rest = &text[at + option.len()..];
        if !begins || !rest.starts_with([' ', '\t', '\n', '=']) {
            continue;
        }
        let rest = rest[1..].trim_start();
        let value = match rest.chars().next() {
            Some(quote @ ('\'' | '"')) => rest[1..].split(quote).next().unwrap_or_default(),
            Some('{') => rest.lines().next().unwrap_or_default(),
            _ => rest.split_whitespace().next().unwrap_or_default(),
        };
        if found.len() == MAX_ITEMS {
            return Err(ReadError::TooMany);
        }
        found.push(if value.starts_with('{') {
            // What follows on the same line is another argument.
            let mut values = serde_json::Deserializer::from_str(value).into_iter();
            values.next().ok_or(ReadError::Absent("iothread-vq-mapping"))?.map_err(json_error)?
        } else {
            let mut parts = value.split(',');
            let driver = parts.next().unwrap_or_default();
            let pairs = parts.filter_map(|part| part.split_once('='));
            // `parse` alone would take a sign.
            let digits = |value: &&str| value.bytes().all(|b| b.is_ascii_digit());
            let number = |value| Some(value).filter(digits)?.parse::<u32>().ok();
            let text = |value| number(value).map_or(Value::from(value), Value::from);
            let pairs = pairs.map(|(key, value)| (key.to_owned(), text(value)));
            [("driver".to_owned(), Value::from(driver))].into_iter().chain(pairs).collect()
        });
    }
    Ok(found)
}

/// The virtio-blk device among these that is chosen by its id, or is the only one, or the only one with
/// IOThreads.
fn of_devices(
    devices: Vec<serde_json::Map<String, Value>>,
    disk: Option<&str>,
) -> Result<Found, ReadError> {
    let is_disk = |device: &serde_json::Map<String, Value>| {
        let driver = device.get("driver").and_then(Value::as_str);
        driver.is_none_or(|driver| driver.starts_with("virtio-blk"))
    };
    let has_iothreads = |device: &serde_json::Map<String, Value>| {
        device.contains_key("iothread-vq-mapping") || device.contains_key("iothread")
    };
    let is_named = |device: &serde_json::Map<String, Value>| {
        disk.is_some() && device.get("id").and_then(Value::as_str) == disk
    };
    let count = devices.iter().filter(|device| is_disk(device)).count();
    let mut with_iothreads: Vec<_> =
        devices.iter().filter(|device| is_disk(device) && has_iothreads(device)).collect();
    if let Some(named) = devices.iter().find(|device| is_named(device)) {
        return of_device(named.clone());
    }
    match (with_iothreads.as_mut_slice(), disk) {
        ([only], None) => of_device(only.clone()),
        ([only], Some(_)) if count == 1 => of_device(only.clone()),
        ([], _) => match devices.into_iter().find(|device| has_iothreads(device)) {
            // It says what it is.
            Some(other) => of_device(other),
            None => Err(ReadError::Absent("iothread-vq-mapping")),
        },
        (_, _) => Err(ReadError::WhichDisk(count)),
    }
}

fn of_device(mut device: serde_json::Map<String, Value>) -> Result<Found, ReadError> {
    if let Some(driver) = device.get("driver").and_then(Value::as_str)
        && !driver.starts_with("virtio-blk")
    {
        return Err(ReadError::NotADisk(driver.to_owned()));
    }
    let queues = device.remove("num-queues").or_else(|| device.remove("num_queues"));
    let queues: Option<u32> = queues.map(serde_json::from_value).transpose().map_err(json_error)?;
    let mapping = device.remove("iothread-vq-mapping");
    let entries = match (mapping, device.remove("iothread")) {
        (Some(_), Some(_)) => return Err(ReadError::Both),
        (Some(mapping), None) => serde_json::from_value(mapping).map_err(json_error)?,
        (None, Some(name)) => {
            vec![Entry::round_robin(serde_json::from_value(name).map_err(json_error)?)]
        }
        (None, None) => return Err(ReadError::Absent("iothread-vq-mapping")),
    };
    Ok(Found { entries, queues })
}

fn libvirt(text: &str, disk: Option<&str>) -> Result<Found, ReadError> {
    // What `<driver>` stands beside in a `<disk>` makes several roots; one around them is harmless.
    let text = text.trim_start_matches('\u{feff}').trim_start();
    let text = match text.strip_prefix("<?xml").and_then(|rest| rest.split_once("?>")) {
        Some((_, rest)) => rest,
        None => text,
    };
    let text = format!("<text>{text}</text>");
    let options = ParsingOptions { nodes_limit: MAX_XML_NODES, ..ParsingOptions::default() };
    let document = Document::parse_with_options(&text, options).map_err(ReadError::Xml)?;
    let has = |node: &Node<'_, '_>, name: &str| node.children().any(|c| c.has_tag_name(name));
    let is_mapped = |driver: &Node<'_, '_>| {
        driver.has_tag_name("driver")
            && (has(driver, "iothreads") || driver.has_attribute("iothread"))
    };
    let is_named = |disk_element: &Node<'_, '_>| {
        disk_element.children().any(|child| {
            let is = |attribute| disk.is_some() && child.attribute(attribute) == disk;
            (child.has_tag_name("target") && is("dev"))
                || (child.has_tag_name("alias")
                    && (is("name")
                        || child.attribute("name").and_then(|n| n.strip_prefix("ua-")) == disk))
        })
    };
    let is_of_disk = |driver: &Node<'_, '_>| {
        driver.parent().is_none_or(|parent| !parent.has_tag_name("controller"))
    };
    let drivers: Vec<_> = document.descendants().filter(is_mapped).collect();
    let of_disks: Vec<_> = drivers.iter().copied().filter(is_of_disk).collect();
    let disks: Vec<_> = document.descendants().filter(|n| n.has_tag_name("disk")).collect();
    if let Some(named) = disks.iter().find(|disk| is_named(disk)) {
        let driver = named.children().find(is_mapped);
        return of_driver(driver.ok_or(ReadError::Absent("<iothreads> of this disk"))?);
    }
    match (of_disks.as_slice(), disk) {
        ([driver], None) => of_driver(*driver),
        // The text is of one disk, whatever it is called there.
        ([driver], Some(_)) if disks.len() <= 1 => of_driver(*driver),
        ([], _) if !drivers.is_empty() => Err(ReadError::NotADisk("<controller>".to_owned())),
        ([], _) => {
            // `<iothreads>` alone; the one of a `<domain>` is a number without children.
            let mut alone = document
                .descendants()
                .filter(|n| n.has_tag_name("iothreads") && has(n, "iothread"));
            let iothreads = alone.next().ok_or(ReadError::Absent("<iothreads>"))?;
            Ok(Found { entries: of_iothreads(iothreads)?, queues: None })
        }
        (several, _) => Err(ReadError::WhichDisk(several.len().max(disks.len()))),
    }
}

fn of_driver(driver: Node<'_, '_>) -> Result<Found, ReadError> {
    let queues = match driver.attribute("queues") {
        None => None,
        Some(_) => Some(number(driver, "driver", "queues")?),
    };
    let iothreads = driver.children().find(|c| c.has_tag_name("iothreads"));
    let entries = match (iothreads, driver.has_attribute("iothread")) {
        (Some(_), true) => return Err(ReadError::Both),
        (Some(iothreads), false) => of_iothreads(iothreads)?,
        (None, _) => {
            vec![Entry::round_robin(libvirts_name(number(driver, "driver", "iothread")?)?)]
        }
    };
    Ok(Found { entries, queues })
}

fn of_iothreads(iothreads: Node<'_, '_>) -> Result<Vec<Entry>, ReadError> {
    let threads = iothreads.children().filter(|c| c.has_tag_name("iothread"));
    threads
        .map(|thread| {
            let iothread = libvirts_name(number(thread, "iothread", "id")?)?;
            let queues = thread.children().filter(|c| c.has_tag_name("queue"));
            let vqs = queues.map(|q| number(q, "queue", "id")).collect::<Result<Vec<_>, _>>()?;
            Ok(Entry { iothread, vqs: Some(vqs).filter(|vqs| !vqs.is_empty()) })
        })
        .collect()
}

/// A whole number without a sign.
fn number(
    node: Node<'_, '_>,
    element: &'static str,
    attribute: &'static str,
) -> Result<u32, ReadError> {
    let text = node.attribute(attribute).filter(|t| t.bytes().all(|b| b.is_ascii_digit()));
    text.and_then(|t| t.parse().ok()).ok_or_else(|| {
        let line = node.document().text_pos_at(node.range().start).row;
        ReadError::XmlAttribute { line, element, attribute }
    })
}

/// The keys of a device that are its mapping.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Keys {
    queues: Option<u32>,
    mapping: Option<Vec<Entry>>,
}

fn toml(text: &str) -> Result<Found, ReadError> {
    if deep_key(text).is_some() {
        return Err(ReadError::TomlTooDeep);
    }
    let document: Keys =
        ::toml::from_str(text).map_err(|e| ReadError::Toml(e.message().to_owned()))?;
    let entries = document.mapping.ok_or(ReadError::Absent("mapping"))?;
    Ok(Found { entries, queues: document.queues })
}
