//! Requests and messages of QMP and of the guest agent as JSON. Pure.
//!
//! A reply is read in two steps: the frame (`return`, `error`, `id`, `event`),
//! then what the command returns, straight into its type. Nothing is kept of
//! members that nobody asks for, so a message costs little more than its bytes;
//! QEMU adds members and renames none, so the types here name few.
//!
//! Properties: `deep_nesting_is_an_error`, `invalid_utf8_is_an_error`,
//! `each_wording_of_disabled_is_told_apart_from_refused`.

use qapi::{Command, Execute};
use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::value::RawValue;

use super::Fault;
use super::error::excerpt;

/// The line that asks for `command`.
pub(super) fn request<C: Command>(command: &C, id: Option<u64>) -> Result<Vec<u8>, Fault> {
    let request = Execute::new(command, id);
    let mut line = serde_json::to_vec(&request).map_err(Fault::Request)?;
    line.push(b'\n');
    Ok(line)
}

/// A message's frame.
#[derive(Deserialize)]
pub(super) struct Message<'a> {
    #[serde(borrow, rename = "return")]
    returned: Option<&'a RawValue>,
    error: Option<Refusal>,
    #[serde(borrow)]
    id: Option<&'a RawValue>,
    pub(super) event: Option<IgnoredAny>,
    #[serde(rename = "QMP")]
    pub(super) greeting: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct Refusal {
    class: String,
    desc: String,
}

/// The frame of `line`.
pub(super) fn message(line: &[u8]) -> Result<Message<'_>, Fault> {
    serde_json::from_slice(line).map_err(|source| not_an_answer(line, source))
}

impl Message<'_> {
    /// The request that it answers; libvirt's ids are no numbers.
    pub(super) fn id(&self) -> Option<u64> {
        self.id?.get().parse().ok()
    }

    /// What the command returned.
    pub(super) fn result<T: DeserializeOwned>(self) -> Result<T, Fault> {
        match (self.error, self.returned) {
            (Some(refusal), _) => Err(refused(refusal.class, &refusal.desc)),
            (None, Some(returned)) => serde_json::from_str(returned.get())
                .map_err(|source| not_an_answer(returned.get().as_bytes(), source)),
            (None, None) => Err(Fault::Unexpected {
                found: "neither `return` nor `error`".to_owned(),
                expected: "an answer",
            }),
        }
    }
}

fn not_an_answer(text: &[u8], source: serde_json::Error) -> Fault {
    Fault::NotAnAnswer { found: excerpt(text), source }
}

/// The fault of a peer's refusal.
pub(super) fn refused(class: String, description: &str) -> Fault {
    let is_disabled = class == "CommandNotFound" || says_disabled(description);
    let description = excerpt(description.as_bytes());
    if is_disabled {
        Fault::Disabled { description }
    } else {
        Fault::Refused { class: excerpt(class.as_bytes()), description }
    }
}

/// Whether a refusal is about the command itself. Agents before QEMU 5 give a
/// disabled command the class `GenericError`, all of them one that lacks a part
/// of the guest (`guest-set-time` without hwclock), and virsh gives no class.
fn says_disabled(description: &str) -> bool {
    description.contains("has been disabled")
        || description.contains("this feature or command is not currently supported")
        || (description.contains("The command ") && description.contains("has not been found"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use qapi::qmp::query_status;

    fn result(line: &str) -> Result<u64, Fault> {
        message(line.as_bytes())?.result()
    }

    #[test]
    fn request_is_one_line_with_its_id() {
        let line = request(&query_status {}, Some(7)).unwrap();
        assert_eq!(line, b"{\"execute\":\"query-status\",\"arguments\":{},\"id\":7}\n");
        let line = request(&query_status {}, None).unwrap();
        assert_eq!(line, b"{\"execute\":\"query-status\",\"arguments\":{}}\n");
    }

    #[test]
    fn unknown_members_are_ignored() {
        assert_eq!(result(r#"{"return": 5, "id": 1, "new": [[{}]]}"#).unwrap(), 5);
    }

    #[test]
    fn deep_nesting_is_an_error() {
        let deep = "[".repeat(1 << 20);
        let line = format!("{{\"return\": {deep}");
        assert!(matches!(result(&line), Err(Fault::NotAnAnswer { .. })));
        let closed = format!("{{\"return\": {deep}{}}}", "]".repeat(1 << 20));
        let message = message(closed.as_bytes()).unwrap();
        let value = message.result::<serde_json::Value>();
        assert!(matches!(value, Err(Fault::NotAnAnswer { .. })));
    }

    #[test]
    fn invalid_utf8_is_an_error() {
        let line = b"{\"return\": \"\xc3\x28\"}\n";
        let result = message(line).and_then(Message::result::<String>);
        assert!(matches!(result, Err(Fault::NotAnAnswer { .. })));
    }

    #[test]
    fn answer_of_another_type_is_an_error() {
        for line in ["", "null", "[]", "5", r#"{"return": -1}"#, r#"{"return": 1, "return": 1}"#] {
            assert!(matches!(result(line), Err(Fault::NotAnAnswer { .. })), "{line}");
        }
        assert!(matches!(result("{}"), Err(Fault::Unexpected { .. })));
        assert!(matches!(result(r#"{"return": null}"#), Err(Fault::Unexpected { .. })));
    }

    #[test]
    fn each_wording_of_disabled_is_told_apart_from_refused() {
        // QEMU 10; QEMU 2.12; a command that an agent never had; one that lacks something.
        for (class, description) in [
            ("CommandNotFound", "Command guest-exec has been disabled: the command is not allowed"),
            ("GenericError", "The command guest-exec has been disabled for this instance"),
            ("CommandNotFound", "The command guest-exec has not been found"),
            ("GenericError", "this feature or command is not currently supported"),
        ] {
            let fault = refused(class.to_owned(), description);
            assert!(matches!(fault, Fault::Disabled { .. }), "{fault:?}");
        }
        let fault = refused("GenericError".to_owned(), "Failed to open file: No such file");
        assert!(matches!(fault, Fault::Refused { .. }));
    }
}
