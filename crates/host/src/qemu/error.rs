//! What can go wrong with a QEMU process or a guest agent: with whom, at which
//! command, and what an operator can do about it.
//!
//! A peer's own words are shown escaped and cut short: they may hold anything.
//!
//! Properties: `hostile_words_are_escaped_and_cut_short`, `faults_have_a_remedy`,
//! `domain_is_found_by_its_uuid_and_never_by_a_number`.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Whom a command was for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Address {
    /// The other end of a Unix socket.
    Socket(PathBuf),
    /// A libvirt domain; libvirt holds its sockets.
    Domain(Domain),
}

/// A domain of the local libvirt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Written")]
pub struct Domain {
    /// Its name, which people know it by.
    pub name: String,
    /// Its UUID where that is known, by which virsh is asked for it.
    pub uuid: Option<String>,
}

/// A domain in a journal.
#[derive(Deserialize)]
#[serde(untagged)]
enum Written {
    /// By its name alone, as a journal from before an update has it.
    Name(String),
    Whole {
        name: String,
        uuid: Option<String>,
    },
}

impl From<Written> for Domain {
    fn from(written: Written) -> Self {
        match written {
            Written::Name(name) => Self { name, uuid: None },
            Written::Whole { name, uuid } => Self { name, uuid },
        }
    }
}

impl From<&str> for Domain {
    /// The domain with this name or UUID.
    fn from(name: &str) -> Self {
        Self { name: name.to_owned(), uuid: None }
    }
}

impl Domain {
    /// What virsh finds it by. It takes a number for the id of a domain that runs before it looks
    /// for a name (`virshLookupDomainInternal()`), so another domain would be meant by one.
    pub(super) fn argument(&self) -> Result<&str, Fault> {
        if let Some(uuid) = self.uuid.as_deref().filter(|uuid| is_uuid(uuid)) {
            return Ok(uuid);
        }
        // As strtol(3) reads it.
        let number = self.name.trim_start().trim_start_matches(['+', '-']);
        if !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()) {
            return Err(Fault::NumericName);
        }
        Ok(&self.name)
    }
}

/// Whether this is a UUID as QEMU is told it: anybody's command line may say anything.
fn is_uuid(text: &str) -> bool {
    let is_digit = |(i, b): (usize, u8)| match i {
        8 | 13 | 18 | 23 => b == b'-',
        _ => b.is_ascii_hexdigit(),
    };
    text.len() == 36 && text.bytes().enumerate().all(is_digit)
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Socket(path) => write!(f, "{path:?}"),
            Self::Domain(Domain { name, .. }) => write!(f, "libvirt domain {name:?}"),
        }
    }
}

/// A command to a QEMU process or a guest agent failed.
#[derive(Debug)]
pub struct QemuError {
    /// Whom it was for.
    pub peer: Address,
    /// Which command, such as `query-status`, or `connect`.
    pub command: &'static str,
    /// What went wrong.
    pub fault: Fault,
}

/// What went wrong with a command.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// There is no connection to be had.
    #[error("cannot connect")]
    Connect(#[source] io::Error),
    /// The connection failed.
    #[error("the connection failed")]
    Connection(#[source] io::Error),
    /// The deadline passed. The command may have been carried out, or may be later.
    #[error("no answer within {timeout:?}")]
    Late {
        /// How long the whole request was given.
        timeout: Duration,
    },
    /// The user did not want to wait for the answer. The command may have been carried out, or may be later.
    #[error("interrupted")]
    Interrupted,
    /// The peer closed the connection instead of answering.
    #[error("closed by the other side before the answer")]
    Closed,
    /// A message, or a file that is read, is larger than it may be.
    #[error("more than {limit} bytes")]
    TooLong {
        /// The most bytes that it may have.
        limit: usize,
    },
    /// The peer says much, but does not answer.
    #[error("more than {limit} messages and no answer among them")]
    Flood {
        /// The most messages that are skipped.
        limit: usize,
    },
    /// A request cannot be written as JSON.
    #[error("the request cannot be written as JSON")]
    Request(#[source] serde_json::Error),
    /// A message is not JSON, or not of the command's type.
    #[error("{found:?} is not this command's answer")]
    NotAnAnswer {
        /// What was said, cut short.
        found: String,
        /// Why it is none.
        source: serde_json::Error,
    },
    /// An answer has the right form and says what cannot be.
    #[error("{found:?} is not {expected}")]
    Unexpected {
        /// What was said, cut short.
        found: String,
        /// What it should have been.
        expected: &'static str,
    },
    /// The peer knows the command and refuses it.
    #[error("refused: {description:?}")]
    Refused {
        /// QMP's error class, such as `DeviceNotFound`.
        class: String,
        /// The peer's reason, cut short.
        description: String,
    },
    /// The command is disabled, unknown or unsupported there: do without it, and say so.
    #[error("disabled or unsupported there: {description:?}")]
    Disabled {
        /// The peer's reason, cut short.
        description: String,
    },
    /// A value was taken and another one is read.
    #[error("set to {wanted}, reads {found}")]
    ReadBackDiffers {
        /// What was set.
        wanted: String,
        /// What is read.
        found: String,
    },
    /// A domain's name is a number, and its UUID is not known.
    #[error("virsh takes its name for a domain's id")]
    NumericName,
    /// virsh failed for another reason than the command itself.
    #[error("virsh: {message:?}")]
    Virsh {
        /// What it says, cut short.
        message: String,
    },
}

/// The most characters of a peer's words that are kept in an error.
const EXCERPT: usize = 200;

/// A peer's words, cut short.
pub(crate) fn excerpt(bytes: &[u8]) -> String {
    // A character has at most 4 bytes.
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(4 * EXCERPT)]);
    text.trim().chars().take(EXCERPT).collect()
}

impl fmt::Display for QemuError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.peer, self.command, self.fault)
    }
}

impl Error for QemuError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.fault.source()
    }
}

impl QemuError {
    /// What an operator can do about it.
    #[must_use]
    pub fn hint(&self) -> Option<&'static str> {
        let is_agent = self.command.starts_with("guest-");
        let is_libvirt = matches!(self.peer, Address::Domain(_));
        Some(match &self.fault {
            Fault::Connect(source) => match source.kind() {
                io::ErrorKind::NotFound if is_libvirt => "install virsh (Debian: libvirt-clients)",
                io::ErrorKind::NotFound => "start the VM first, or correct the socket's path",
                io::ErrorKind::PermissionDenied => "run as root",
                io::ErrorKind::ConnectionRefused => "its QEMU has ended: start the VM again",
                _ => "check that the path is a QEMU socket",
            },
            Fault::Late { .. } if is_agent => {
                "see that qemu-guest-agent runs in the guest, and that no other client (libvirt?) holds its socket"
            }
            Fault::Late { .. } => {
                "QEMU serves one client of a monitor at a time: give it a -qmp socket of its own for rtvirtio, or end `rtvirtio watch`"
            }
            Fault::Disabled { .. } if is_agent => {
                "allow it in the guest (allow-rpcs, block-rpcs in qemu-ga.conf), or leave the guest as it is: the host's knobs are set without it"
            }
            Fault::Disabled { .. } => "use QEMU 9 or later",
            Fault::Virsh { message } if message.contains("guest agent") => {
                "give the domain a channel org.qemu.guest_agent.0, and see that qemu-guest-agent runs in the guest"
            }
            Fault::Virsh { .. } => "`virsh -c qemu:///system list --all` shows the domains",
            Fault::NumericName => "give the VM a name that is no number (virsh domrename)",
            Fault::ReadBackDiffers { .. } => "another client may set the same property",
            Fault::Connection(_) | Fault::Closed => {
                "see that the VM still runs, then connect again"
            }
            Fault::TooLong { .. }
            | Fault::Flood { .. }
            | Fault::NotAnAnswer { .. }
            | Fault::Unexpected { .. } => {
                "check that the socket is what it should be: a QMP monitor or a guest agent"
            }
            Fault::Interrupted | Fault::Request(_) | Fault::Refused { .. } => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(fault: Fault) -> QemuError {
        QemuError { peer: Address::Socket("/run/plc.qmp".into()), command: "query-status", fault }
    }

    #[test]
    fn hostile_words_are_escaped_and_cut_short() {
        let words = format!("\u{1b}[2J{}", "é".repeat(10_000));
        let found = excerpt(words.as_bytes());
        assert_eq!(found.chars().count(), 200);
        let text = error(Fault::Unexpected { found, expected: "a greeting" }).to_string();
        assert!(text.starts_with(r#""/run/plc.qmp": query-status: "\u{1b}[2Jé"#), "{text}");
        assert!(!text.contains('\u{1b}'));
    }

    #[test]
    fn domain_is_found_by_its_uuid_and_never_by_a_number() {
        const UUID: &str = "6ba7b810-9dad-11d1-80b4-00c04fd430c8";
        let argument = |name: &str, uuid: Option<&str>| {
            let domain = Domain { name: name.to_owned(), uuid: uuid.map(str::to_owned) };
            domain.argument().ok().map(str::to_owned)
        };
        assert_eq!(argument("7", Some(UUID)).as_deref(), Some(UUID));
        for uuid in [None, Some("3"), Some(""), Some("--all"), Some(&UUID.replace('8', "x"))] {
            assert_eq!(argument("plc", uuid).as_deref(), Some("plc"), "{uuid:?}");
            for number in ["7", "007", " 7", "+7", "-0"] {
                assert_eq!(argument(number, uuid), None, "{number:?} {uuid:?}");
            }
        }
        for name in ["7a", "vm-7", "", "-"] {
            assert_eq!(argument(name, None).as_deref(), Some(name));
        }
        assert!(error(Fault::NumericName).hint().unwrap().contains("domrename"));
    }

    #[test]
    fn domain_of_an_older_journal_is_read() {
        let read = |text: &str| serde_json::from_str::<Address>(text).unwrap();
        assert_eq!(read(r#"{"domain":"plc"}"#), Address::Domain("plc".into()));
        let domain = Domain { name: "plc".to_owned(), uuid: Some("u".to_owned()) };
        let whole = Address::Domain(domain);
        assert_eq!(read(&serde_json::to_string(&whole).unwrap()), whole);
    }

    #[test]
    fn faults_have_a_remedy() {
        let late = error(Fault::Late { timeout: Duration::from_secs(1) });
        assert!(late.hint().unwrap().contains("one client"));
        let missing = error(Fault::Connect(io::ErrorKind::NotFound.into()));
        assert!(missing.hint().unwrap().contains("start the VM"));
        let peer = Address::Domain("plc".into());
        let fault = Fault::Disabled { description: String::new() };
        let disabled = QemuError { peer, command: "guest-exec", fault };
        assert!(disabled.hint().unwrap().contains("allow-rpcs"));
    }
}
