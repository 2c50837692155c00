//! `rtvirtio mapping`.

use std::collections::BTreeSet;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use rtvirtio_spec::mapping::read::{self, Format as Found, format_of};
use rtvirtio_spec::mapping::write::{self, FrontEnd};
use rtvirtio_spec::mapping::{Entry, Mapping};
use rtvirtio_spec::serve::{self, Configuration, Device, Listen};
use rtvirtio_units::IoThreadName;

use crate::{Outcome, input};

/// Arguments of `mapping`.
#[derive(clap::Args)]
#[command(after_help = "FILE is one of\n  \
    QEMU's iothread-vq-mapping in JSON, or a -device in JSON with it;\n  \
    libvirt's <iothreads>, or a <driver>, <disk> or <domain> with it;\n  \
    TOML with mapping = [...], or a configuration of `rtvirtio serve`.\n\
    Without FILE: round robin over --iothreads.\n\n\
    Of a configuration's device, qemu and libvirt also print how a guest attaches to it.")]
pub(crate) struct Args {
    /// The mapping to read; `-`: standard input
    #[arg(required_unless_present_all = ["iothreads", "queues"])]
    file: Option<PathBuf>,
    /// Which device of a configuration, or which disk of a domain (target or alias)
    #[arg(long, value_name = "NAME", requires = "file")]
    device: Option<String>,
    /// How many queues the device has
    #[arg(long, value_name = "N")]
    queues: Option<u32>,
    /// The IOThreads that exist; libvirt's IOThread 1 is the first of them
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_parser = parse_name)]
    iothreads: Vec<IoThreadName>,
    /// What to print
    #[arg(long, value_enum, default_value_t = Format::Toml)]
    format: Format,
}

/// A format to print.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    /// QEMU's command line
    Qemu,
    /// libvirt's XML
    Libvirt,
    /// A configuration of `rtvirtio serve`
    Toml,
}

fn parse_name(text: &str) -> Result<IoThreadName, rtvirtio_units::NameError> {
    IoThreadName::new(text)
}

pub(crate) fn run(args: &Args) -> Result<Outcome> {
    let Some(file) = &args.file else {
        let entries: Vec<_> = args.iothreads.iter().cloned().map(Entry::round_robin).collect();
        let mapping = Mapping::new(&entries, args.queues.unwrap_or(0), None)?;
        print!("{}", text(&mapping, None, args.format));
        return Ok(Outcome::Done);
    };
    let text_read = read_text(file)?;
    let name = file.display().to_string();
    if let Some(configuration) = configuration(&name, &text_read)? {
        ensure!(args.queues.is_none(), "--queues: the configuration says how many");
        ensure!(args.iothreads.is_empty(), "--iothreads: the configuration says which");
        let device = choose(&configuration, args.device.as_deref())?;
        print!("{}", text(&device.mapping, Some(device), args.format));
    } else {
        let mapping = mapping(args, &text_read).with_context(|| name)?;
        print!("{}", text(&mapping, None, args.format));
    }
    Ok(Outcome::Done)
}

/// The mapping in a text that is no configuration.
fn mapping(args: &Args, text: &str) -> Result<Mapping> {
    let mut found = read::read(text, args.device.as_deref())?;
    if args.iothreads.is_empty() {
        return Ok(found.mapping(args.queues)?);
    }
    if format_of(text) == Found::Libvirt {
        read::rename(&mut found, &args.iothreads);
    }
    // Once for the number of queues that the text means, once among the IOThreads that exist.
    let queues = found.mapping(args.queues)?.queues();
    let known: BTreeSet<_> = args.iothreads.iter().cloned().collect();
    Ok(Mapping::new(&found.entries, queues.into(), Some(&known))?)
}

/// A file's text, or that of standard input.
pub(crate) fn read_text(file: &Path) -> Result<String> {
    if file != Path::new("-") {
        return input::read(file, rtvirtio_spec::specification::MAX_FILE_BYTES as u64);
    }
    let mut text = String::new();
    let limit = read::MAX_BYTES as u64 + 1;
    std::io::stdin().take(limit).read_to_string(&mut text).context("read standard input")?;
    Ok(text)
}

/// The configuration that a text is, if it is meant as one: it says its version.
fn configuration(file: &str, text: &str) -> Result<Option<Configuration>> {
    let says_version = |line: &str| {
        line.trim_start().strip_prefix("version").is_some_and(|l| l.trim_start().starts_with('='))
    };
    if format_of(text) != Found::Toml || !text.lines().any(says_version) {
        return Ok(None);
    }
    Ok(Some(serve::parse(file, text)?))
}

fn choose<'a>(configuration: &'a Configuration, name: Option<&str>) -> Result<&'a Device> {
    let devices = &configuration.devices;
    match (name, devices.as_slice()) {
        (Some(name), devices) => match devices.iter().find(|d| d.name.as_str() == name) {
            Some(device) => Ok(device),
            None => bail!("the configuration has no device {name:?}"),
        },
        (None, [only]) => Ok(only),
        (None, several) => {
            bail!("the configuration has {} devices: choose one with --device", several.len())
        }
    }
}

/// A mapping in a format; of a device of the data plane also how a guest attaches.
pub(crate) fn text(mapping: &Mapping, device: Option<&Device>, format: Format) -> String {
    let arguments = |list: Vec<(&str, String)>| -> String {
        list.iter().map(|(option, value)| format!("{option} {}\n", quoted(value))).collect()
    };
    let front_end = device.and_then(|device| match &device.listen {
        Listen::Path(socket) => {
            Some(FrontEnd { name: &device.name, socket, queues: device.queues() })
        }
        // Its path is in the socket unit.
        Listen::Activated(_) => None,
    });
    match (format, front_end) {
        (Format::Toml, _) => write::toml(mapping),
        (Format::Qemu, None) => arguments(write::qemu_arguments(mapping)),
        (Format::Qemu, Some(front_end)) => {
            let memory = write::SHARED_MEMORY_ARGUMENTS.map(|(o, v)| (o, v.to_owned()));
            format!(
                "# the mapping, which is the data plane's: the guest's QEMU needs no IOThread\n\
                 # {}\n{}{}",
                write::qemu_json(mapping),
                arguments(memory.into()),
                arguments(write::qemu_front_end(&front_end)),
            )
        }
        (Format::Libvirt, None) => {
            let mut text = String::new();
            for (name, id) in write::libvirt_ids(mapping) {
                if write::libvirt_id(&name) != Some(id) {
                    // Two hyphens end a comment.
                    let name = name.as_str().replace("--", "-\u{2010}");
                    text += &format!("<!-- IOThread {id} is {name} -->\n");
                }
            }
            text + &write::libvirt_driver(mapping)
        }
        (Format::Libvirt, Some(front_end)) => {
            format!(
                "<!-- in <domain>; the IOThreads are the data plane's -->\n{}\
                 <!-- in <devices> -->\n{}",
                write::SHARED_MEMORY_XML,
                write::libvirt_disk(&front_end, "vda")
            )
        }
    }
}

/// As a shell takes it.
pub(super) fn quoted(value: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.,=/:@+".contains(c);
    if !value.is_empty() && value.chars().all(is_plain) {
        value.to_owned()
    } else {
        format!("'{}'", value.replace('\'', "'\\''"))
    }
}
