//! Names that a person gives to devices, VMs, disks and tasks.
//!
//! A name becomes part of a cgroup path, a file name and a report, so its
//! alphabet is closed: no separator, no leading dot, no control character.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Longest name in bytes: fits a cgroup directory name (NAME_MAX 255) with room for a prefix.
const MAX_LEN: usize = 64;

/// Why a text is not a name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// The text is empty.
    #[error("a name is empty")]
    Empty,
    /// The text has so many bytes, which are more than 64; of a VM, more than 200, or than 64 characters.
    #[error(
        "a name of {0} bytes is too long (use {MAX_LEN} characters at most, {MAX_VM_LEN} bytes in all)"
    )]
    TooLong(usize),
    /// A character outside `A-Z a-z 0-9 . _ - @ +`.
    #[error(
        "character {0:?} is not allowed in a name (use letters, digits, '_', '-', '+', '@', '.')"
    )]
    BadCharacter(char),
    /// The first character is not a letter, digit or underscore.
    #[error("a name starts with {0:?} (use a letter, a digit or '_')")]
    BadStart(char),
    /// The last character is a space, which would be lost wherever people see it.
    #[error("a name ends with a space (remove it)")]
    TrailingSpace,
}

/// A checked name: 1 to 64 bytes of `A-Z a-z 0-9 . _ - @ +`, no leading dot or dash.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Name(String);

impl Name {
    /// Checks `text`.
    ///
    /// # Errors
    /// [`NameError`] says which rule it breaks.
    pub fn new(text: impl Into<String>) -> Result<Self, NameError> {
        let text = text.into();
        let first = text.chars().next().ok_or(NameError::Empty)?;
        if text.len() > MAX_LEN {
            return Err(NameError::TooLong(text.len()));
        }
        let allowed = |c: char| c.is_ascii_alphanumeric() || "._-@+".contains(c);
        if let Some(bad) = text.chars().find(|&c| !allowed(c)) {
            return Err(NameError::BadCharacter(bad));
        }
        if !(first.is_ascii_alphanumeric() || first == '_') {
            return Err(NameError::BadStart(first));
        }
        Ok(Self(text))
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

#[cfg(feature = "schema")]
impl schemars::JsonSchema for Name {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Name".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "type": "string", "maxLength": MAX_LEN, "pattern": "^[A-Za-z0-9_][A-Za-z0-9._@+-]*$"
        })
    }
}

impl TryFrom<String> for Name {
    type Error = NameError;
    fn try_from(text: String) -> Result<Self, NameError> {
        Self::new(text)
    }
}

impl From<Name> for String {
    fn from(name: Name) -> Self {
        name.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

macro_rules! named {
    ($(#[$doc:meta])* $type:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(inline))]
        #[serde(transparent)]
        pub struct $type(Name);

        impl $type {
            /// Checks `text`.
            ///
            /// # Errors
            /// [`NameError`] says which rule it breaks.
            pub fn new(text: impl Into<String>) -> Result<Self, NameError> {
                Name::new(text).map(Self)
            }

            /// The text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                self.0.as_str()
            }
        }

        impl From<$type> for Name {
            fn from(name: $type) -> Self {
                name.0
            }
        }

        impl From<Name> for $type {
            fn from(name: Name) -> Self {
                Self(name)
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

named! {
    /// A host block device's name in a specification (`[device.NAME]`).
    DeviceName
}
/// A VM's name in a specification, which may be what libvirt calls the domain: letters and digits of any
/// script, `. _ - @ + ( ) #` and spaces between them, 64 characters at most. It starts with a letter, a digit
/// or an underscore.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct VmName(String);

/// Longest name of a VM in bytes: as [`MAX_LEN`], in characters of four bytes at most, short of NAME_MAX.
const MAX_VM_LEN: usize = 200;

impl VmName {
    /// Checks `text`.
    ///
    /// # Errors
    /// [`NameError`] says which rule it breaks.
    pub fn new(text: impl Into<String>) -> Result<Self, NameError> {
        let text = text.into();
        let first = text.chars().next().ok_or(NameError::Empty)?;
        if text.len() > MAX_VM_LEN || text.chars().count() > MAX_LEN {
            return Err(NameError::TooLong(text.len()));
        }
        let allowed = |c: char| c.is_alphanumeric() || " ._-@+()#".contains(c);
        if let Some(bad) = text.chars().find(|&c| !allowed(c)) {
            return Err(NameError::BadCharacter(bad));
        }
        if !(first.is_alphanumeric() || first == '_') {
            return Err(NameError::BadStart(first));
        }
        if text.ends_with(' ') {
            return Err(NameError::TrailingSpace);
        }
        Ok(Self(text))
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

#[cfg(feature = "schema")]
impl schemars::JsonSchema for VmName {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> std::borrow::Cow<'static, str> {
        "VmName".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "type": "string", "maxLength": MAX_LEN,
            "pattern": r"^[\p{L}\p{N}_]([\p{L}\p{N} ._@+()#-]*[\p{L}\p{N}._@+()#-])?$"
        })
    }
}

impl TryFrom<String> for VmName {
    type Error = NameError;
    fn try_from(text: String) -> Result<Self, NameError> {
        Self::new(text)
    }
}

impl From<VmName> for String {
    fn from(name: VmName) -> Self {
        name.0
    }
}

impl fmt::Display for VmName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

named! {
    /// A disk's name within its VM.
    DiskName
}
named! {
    /// A task's name within its VM.
    TaskName
}
named! {
    /// The id of a running QEMU's IOThread, such as `io0`.
    IoThreadName
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_plain_is_kept() {
        assert_eq!(VmName::new("plc-1.a").unwrap().as_str(), "plc-1.a");
    }

    #[test]
    fn name_with_separator_or_leading_dot_is_refused() {
        assert_eq!(Name::new("../x"), Err(NameError::BadCharacter('/')));
        assert_eq!(Name::new(".."), Err(NameError::BadStart('.')));
        assert_eq!(Name::new("-x"), Err(NameError::BadStart('-')));
        assert_eq!(Name::new(""), Err(NameError::Empty));
        assert_eq!(Name::new("a".repeat(65)), Err(NameError::TooLong(65)));
        assert_eq!(Name::new("a\nb"), Err(NameError::BadCharacter('\n')));
    }

    #[test]
    fn name_from_json_is_checked() {
        assert!(serde_json::from_str::<DiskName>("\"a b\"").is_err());
        assert!(serde_json::from_str::<VmName>("\"a/b\"").is_err());
    }

    #[test]
    fn name_of_a_vm_may_be_a_domain_with_spaces_and_letters_of_any_script() {
        for name in ["Windows Server 2025 (test)", "Prüfstand#2", "виртуалка", "仮想マシン"]
        {
            assert_eq!(VmName::new(name).unwrap().as_str(), name);
            let json = serde_json::to_string(name).unwrap();
            assert_eq!(serde_json::from_str::<VmName>(&json).unwrap().as_str(), name);
        }
        let bad = |text: &str| VmName::new(text).unwrap_err();
        for c in ['/', '\n', '\0', '\u{202e}', '"', '\\', ';', '<', '$', '\u{a0}'] {
            assert_eq!(bad(&format!("a{c}b")), NameError::BadCharacter(c));
        }
        assert_eq!(bad(" a"), NameError::BadStart(' '));
        assert_eq!(bad("a "), NameError::TrailingSpace);
        assert_eq!(bad(".a"), NameError::BadStart('.'));
        let long = bad(&"é".repeat(65));
        assert_eq!(long, NameError::TooLong(130));
        let text = "a name of 130 bytes is too long (use 64 characters at most, 200 bytes in all)";
        assert_eq!(long.to_string(), text);
        assert!(VmName::new("é".repeat(64)).is_ok());
    }
}
