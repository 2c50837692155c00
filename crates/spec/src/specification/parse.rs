//! TOML to [`Specification`](super::Specification).

use super::Specification;

/// Largest file that is read.
pub const MAX_FILE_BYTES: usize = 4 << 20;

/// Why a file is not a specification.
#[derive(Debug, thiserror::Error)]
pub enum SpecificationError {}

/// Parses and checks `text`, named `file` in errors.
///
/// # Errors
/// [`SpecificationError`].
pub fn parse(_file: &str, _text: &str) -> Result<Specification, SpecificationError> {
    unimplemented!()
}
