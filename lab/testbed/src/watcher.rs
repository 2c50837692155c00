//! `rtvirtio watch --control` as a child process that never outlives the experiment, and what it says.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use anyhow::{Context, Result};
use rtvirtio_calibrate::confine::confine;
use serde::de::DeserializeOwned;

/// The process, which is killed with this; `L` is what it says in a line.
pub struct Watcher<L> {
    child: Child,
    lines: Arc<Mutex<Vec<(Instant, L)>>>,
}

impl<L: DeserializeOwned + Send + 'static> Watcher<L> {
    /// Starts it; its state is kept in `state`.
    ///
    /// # Errors
    /// If it does not start.
    pub fn start(program: &Path, specification: &Path, state: &Path) -> Result<Self> {
        let mut command = Command::new(program);
        command
            .arg("watch")
            .arg(specification)
            .args(["--control", "--json"])
            .env("RTVIRTIO_STATE_DIR", state)
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        confine(&mut command, None)?;
        let mut child = command.spawn().context("start rtvirtio watch")?;
        let output = child.stdout.take().context("watch has an output")?;
        let lines = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&lines);
        // Ends with the pipe.
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if let Ok(line) = serde_json::from_str(&line) {
                    let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
                    seen.push((Instant::now(), line));
                }
            }
        });
        Ok(Self { child, lines })
    }
}

impl<L> Watcher<L> {
    /// Kills it (SIGKILL); what it has said, and when.
    #[must_use]
    pub fn stop(self) -> Vec<(Instant, L)> {
        std::mem::take(&mut *self.lines.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl<L> Drop for Watcher<L> {
    fn drop(&mut self) {
        // SIGKILL.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
