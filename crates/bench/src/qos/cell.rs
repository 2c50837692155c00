//! Cells: what was measured, a line of JSON each.

use std::path::Path;

use anyhow::{Context, Result};
use rtvirtio_spec::run::Canary;
use serde::{Deserialize, Serialize};

/// How the device is shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scheme {
    /// The background VM alone.
    Alone,
    /// The data plane without a schedule: requests start as they come.
    None,
    /// The data plane with one.
    Qos,
}

impl Scheme {
    /// For people.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Alone => "alone",
            Self::None => "none",
            Self::Qos => "qos",
        }
    }
}

/// Names a cell.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CellKey {
    /// The case, such as `4xL+M+H`; the background VM's own has the first one's.
    pub case: String,
    /// The scheme.
    pub scheme: Scheme,
    /// From 0.
    pub repetition: u32,
}

/// A task in a window.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Task {
    /// `vm0.heavy`, say.
    pub name: String,
    /// Requests completed.
    pub n: u64,
    /// The judged percentile; 0 with too few requests.
    pub percentile: f64,
    /// Its value, µs.
    pub tail_us: f64,
    /// The target for it, µs.
    pub target_us: f64,
    /// Of the requested rate.
    pub delivered: f64,
    /// Whether both hold.
    pub passed: bool,
}

/// A cell.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Cell {
    /// Which.
    #[serde(flatten)]
    pub key: CellKey,
    /// The device, such as `ref-4x250`.
    pub device: String,
    /// Length of the window, s.
    pub seconds: f64,
    /// Its VMs' tasks.
    pub tasks: Vec<Task>,
    /// What the background VM wrote, bytes a second.
    pub background: f64,
    /// Of the device's time, what the tasks' requests needed.
    pub needed: f64,
    /// The machine's health.
    pub canary: Canary,
    /// CPUs busy, of the machine.
    pub busy: f64,
    /// When it ran.
    pub at: String,
}

impl Cell {
    /// Whether every task met its target at its rate.
    #[must_use]
    pub fn passed(&self) -> bool {
        self.tasks.iter().all(|task| task.passed)
    }
}

/// The cells of a file; none if it is not there.
///
/// # Errors
/// If a line is no cell.
pub fn read_cells(path: &Path) -> Result<Vec<Cell>> {
    let text = match std::fs::read_to_string(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        text => text.with_context(|| format!("read {}", path.display()))?,
    };
    let read = |(number, line): (usize, &str)| {
        serde_json::from_str(line).with_context(|| format!("{}:{}", path.display(), number + 1))
    };
    text.lines().enumerate().map(read).collect()
}
