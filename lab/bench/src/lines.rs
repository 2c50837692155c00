//! Files of cells, a line of JSON each, to which a campaign that is started again adds.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write as _};
use std::ops::Deref;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// What a file holds.
pub struct Lines<T> {
    file: File,
    all: Vec<T>,
}

impl<T: Serialize + DeserializeOwned> Lines<T> {
    /// Reads what is there, and makes file and directory if they are not. A last line that was cut
    /// off is dropped, and the file shortened.
    ///
    /// # Errors
    /// If a line is no cell.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let context = || path.display().to_string();
        if let Some(directory) = path.parent() {
            std::fs::create_dir_all(directory).with_context(context)?;
        }
        let bytes = match std::fs::read(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
            bytes => bytes.with_context(context)?,
        };
        let file = OpenOptions::new().create(true).append(true).open(path).with_context(context)?;
        let (all, whole) = parse(&bytes, path)?;
        if whole < bytes.len() {
            file.set_len(whole as u64)?;
        }
        Ok(Self { file, all })
    }

    /// Adds one: it is on stable storage when this returns.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(crate) fn push(&mut self, cell: T) -> Result<()> {
        let mut line = serde_json::to_string(&cell)?;
        line.push('\n');
        self.file.write_all(line.as_bytes())?;
        self.file.sync_data()?;
        self.all.push(cell);
        Ok(())
    }

    pub(crate) fn into_all(self) -> Vec<T> {
        self.all
    }
}

/// The values of the whole lines of `bytes`, which `path` holds, and how many bytes these have.
///
/// # Errors
/// If a line is no value: it is named.
pub(crate) fn parse<T: DeserializeOwned>(bytes: &[u8], path: &Path) -> Result<(Vec<T>, usize)> {
    // Of bytes, not of a text: the last line may have been cut off within a character.
    let whole = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
    let read = |(number, line): (usize, &[u8])| {
        serde_json::from_slice(line)
            .with_context(|| format!("{}:{}: not a cell", path.display(), number + 1))
    };
    let lines = bytes[..whole].split_inclusive(|&byte| byte == b'\n');
    Ok((lines.enumerate().map(read).collect::<Result<_>>()?, whole))
}

impl<T> Deref for Lines<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_that_was_cut_off_within_a_character_is_dropped() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("cells.jsonl");
        // The first half of `µ`.
        std::fs::write(&path, b"\"5 \xc2\xb5s\"\n\"7 \xc2").unwrap();
        let mut lines = Lines::<String>::open(&path).unwrap();
        assert_eq!(lines[..], ["5 µs"]);
        lines.push("8 µs".to_owned()).unwrap();
        assert_eq!(Lines::<String>::open(&path).unwrap().into_all(), ["5 µs", "8 µs"]);
    }

    #[test]
    fn line_that_was_cut_off_is_dropped_and_what_follows_is_whole() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("new/cells.jsonl");
        let mut lines = Lines::<u32>::open(&path).unwrap();
        lines.push(7).unwrap();
        lines.file.write_all(b"12").unwrap();
        let mut lines = Lines::<u32>::open(&path).unwrap();
        assert_eq!(*lines, [7]);
        lines.push(8).unwrap();
        assert_eq!(Lines::<u32>::open(&path).unwrap().into_all(), [7, 8]);
        std::fs::write(&path, "7\nx\n").unwrap();
        let error = Lines::<u32>::open(&path).err().unwrap();
        assert!(error.to_string().ends_with("cells.jsonl:2: not a cell"), "{error}");
    }
}
