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
        let text = match std::fs::read_to_string(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
            text => text.with_context(context)?,
        };
        let file = OpenOptions::new().create(true).append(true).open(path).with_context(context)?;
        let (all, whole) = parse(&text, path)?;
        if whole < text.len() {
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

/// The values of the whole lines of `text`, which `path` holds, and how many bytes these have.
///
/// # Errors
/// If a line is no value: it is named.
pub(crate) fn parse<T: DeserializeOwned>(text: &str, path: &Path) -> Result<(Vec<T>, usize)> {
    let whole = text.rfind('\n').map_or(0, |end| end + 1);
    let read = |(number, line): (usize, &str)| {
        serde_json::from_str(line)
            .with_context(|| format!("{}:{}: not a cell", path.display(), number + 1))
    };
    Ok((text[..whole].lines().enumerate().map(read).collect::<Result<_>>()?, whole))
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
