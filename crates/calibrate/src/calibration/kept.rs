//! The file beside the profile in which an unfinished calibration keeps what it has measured.
//!
//! It has a name that nobody else gives, and a beginning that nobody else writes: what lies there without
//! them is somebody's, and is neither overwritten nor removed.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use super::Kept;

/// What its name has after that of the profile.
const SUFFIX: &str = ".rtvirtio-partial";

/// How it begins: the first value names the device ([`Kept::Device`]).
const BEGINNING: &[u8] = b"{\"Device\":[";

/// The most that is read of it. A probe's histograms are some 10 kB, and a calibration has some forty probes.
const MAX_BYTES: u64 = 64 << 20;

/// Where a calibration whose profile goes to `output` keeps what it has measured.
pub(super) fn path_beside(output: &Path) -> PathBuf {
    let mut path = output.as_os_str().to_owned();
    path.push(SUFFIX);
    path.into()
}

/// The file, open.
pub(super) struct KeptFile {
    path: PathBuf,
    file: File,
}

impl KeptFile {
    /// Opens or makes it. With it comes what an earlier calibration of the same `device` left, whose first
    /// value that is.
    ///
    /// # Errors
    /// What lies there is not calibration's.
    pub(super) fn open(path: &Path, device: Kept) -> Result<(Self, Vec<Kept>)> {
        let mut file = match options().open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => options()
                .create_new(true)
                .open(path)
                .with_context(|| format!("create {}", path.display()))?,
            there => there.with_context(|| format!("open {} ({REMEDY})", path.display()))?,
        };
        let is_file = file.metadata().with_context(|| path.display().to_string())?.is_file();
        ensure!(is_file, "{} is not a regular file: {REMEDY}", path.display());
        let mut bytes = Vec::new();
        (&mut file)
            .take(MAX_BYTES + 1)
            .read_to_end(&mut bytes)
            .with_context(|| format!("read {}", path.display()))?;
        // One that was killed before its first line was whole has left the beginning of it.
        let begins = bytes.iter().zip(BEGINNING).all(|(there, ours)| there == ours);
        if !begins || bytes.len() as u64 > MAX_BYTES {
            bail!("{} is not what an earlier calibration kept: {REMEDY}", path.display());
        }
        let mut kept = Self { path: path.to_owned(), file };
        // The last line may be cut off: without its end it counts for nothing.
        let lines = bytes.split_inclusive(|&byte| byte == b'\n');
        let whole = lines.map_while(|line| {
            let value = serde_json::from_slice(line.strip_suffix(b"\n")?).ok()?;
            Some((line.len() as u64, value))
        });
        let (lengths, values): (Vec<u64>, Vec<Kept>) = whole.unzip();
        if values.first() == Some(&device) {
            let length = lengths.iter().sum();
            kept.cut(length)?;
            return Ok((kept, values));
        }
        kept.cut(0)?;
        kept.keep(&device)?;
        Ok((kept, vec![device]))
    }

    /// Leaves so many bytes of it, and goes on behind them.
    fn cut(&mut self, length: u64) -> Result<()> {
        let cut = self.file.set_len(length).and_then(|()| self.file.seek(SeekFrom::Start(length)));
        cut.with_context(|| format!("write {}", self.path.display()))?;
        Ok(())
    }

    /// Adds a value.
    pub(super) fn keep(&mut self, value: &Kept) -> Result<()> {
        let mut line = serde_json::to_vec(value)?;
        line.push(b'\n');
        let written = self.file.write_all(&line).and_then(|()| self.file.sync_data());
        written.with_context(|| format!("write {}", self.path.display()))
    }

    /// Where it is.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Removes it, unless something else has come in its place.
    pub(super) fn remove(self) {
        let number = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
        let ours = self.file.metadata().map(number);
        let there = std::fs::symlink_metadata(&self.path).map(number);
        if let (Ok(ours), Ok(there)) = (ours, there)
            && ours == there
        {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// What to do about something else of that name.
const REMEDY: &str = "calibrate keeps its probes there; move it away, or name another output";

/// Opening a pipe would wait for its other end, and a link may lead to anybody's file.
fn options() -> std::fs::OpenOptions {
    let mut options = File::options();
    options.read(true).write(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    options
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use rtvirtio_spec::profile::DeviceIdentity;
    use rtvirtio_spec::run::MeasuredAt;
    use rtvirtio_units::Bytes;

    use super::super::tests::CAPACITY;
    use super::*;

    fn device(model: &str) -> Kept {
        let identity = DeviceIdentity {
            kind: "SSD".to_owned(),
            model: model.to_owned(),
            serial: None,
            size: Bytes::new(1 << 30),
            rotational: false,
        };
        Kept::Device(identity, "6.1.0".to_owned(), MeasuredAt::Host)
    }

    fn refusal(path: &Path) -> String {
        match KeptFile::open(path, device("a")) {
            Err(error) => format!("{error:#}"),
            Ok(_) => panic!("{} was taken", path.display()),
        }
    }

    #[test]
    fn what_was_kept_is_found_again_up_to_a_line_that_was_cut_off() {
        let directory = tempfile::tempdir().unwrap();
        let path = path_beside(&directory.path().join("profile.json"));
        assert!(path.ends_with("profile.json.rtvirtio-partial"), "{}", path.display());
        let (mut file, found) = KeptFile::open(&path, device("a")).unwrap();
        assert_eq!(found, [device("a")]);
        file.keep(&Kept::Capacity(CAPACITY)).unwrap();
        drop(file);
        assert!(std::fs::read(&path).unwrap().starts_with(BEGINNING));
        let mut torn = File::options().append(true).open(&path).unwrap();
        torn.write_all(b"{\"Capacity\":{\"iop").unwrap();
        for _ in 0..2 {
            let (_, found) = KeptFile::open(&path, device("a")).unwrap();
            assert_eq!(found, [device("a"), Kept::Capacity(CAPACITY)]);
        }
        // Of another device nothing is taken.
        let (file, found) = KeptFile::open(&path, device("b")).unwrap();
        assert_eq!(found, [device("b")]);
        file.remove();
        assert!(!path.exists());
        // One that was killed at once has left nothing, or the beginning of its first line.
        for left in [&b""[..], &BEGINNING[..5]] {
            std::fs::write(&path, left).unwrap();
            assert_eq!(KeptFile::open(&path, device("a")).unwrap().1, [device("a")]);
        }
    }

    #[test]
    fn file_of_somebody_else_is_left_as_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let path = path_beside(&directory.path().join("profile.json"));
        let link_target = directory.path().join("theirs");
        for text in ["half a download", "{\"Devices\":[]}\n", "\0\0\0"] {
            std::fs::write(&path, text).unwrap();
            let error = refusal(&path);
            assert!(error.contains(path.to_str().unwrap()), "{error}");
            assert!(error.contains("move it away"), "{error}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
        std::fs::rename(&path, &link_target).unwrap();
        std::os::unix::fs::symlink(&link_target, &path).unwrap();
        assert!(refusal(&path).contains("move it away"));
        assert_eq!(std::fs::read_to_string(&link_target).unwrap(), "\0\0\0");
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert!(refusal(&path).contains("move it away"));
    }

    #[test]
    fn what_has_come_in_its_place_is_not_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = path_beside(&directory.path().join("profile.json"));
        let (file, _) = KeptFile::open(&path, device("a")).unwrap();
        std::fs::rename(&path, directory.path().join("away")).unwrap();
        std::fs::write(&path, "theirs").unwrap();
        file.remove();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "theirs");
    }

    #[test]
    fn pipe_in_its_place_is_refused_at_once() {
        let directory = tempfile::tempdir().unwrap();
        let path = path_beside(&directory.path().join("profile.json"));
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let (say, hear) = mpsc::channel();
        std::thread::spawn(move || say.send(refusal(&path)));
        let error = hear.recv_timeout(Duration::from_secs(10)).expect("it does not hang");
        assert!(error.contains("is not a regular file"), "{error}");
    }
}
