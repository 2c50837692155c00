//! What a daemon tells its operator: lines on standard error, by `tracing`.
//!
//! Where standard error is the journal, each line begins with its priority, `<4>` say
//! (sd-daemon(3)), so that `journalctl -p warning` finds it; elsewhere with a word.
//!
//! A front end can come and go as often as it likes. An event whose field `about` names a device
//! counts against that device's own budget: 20 lines, and one each 5 s from then on. What
//! was left out is counted in the next line.

use std::collections::HashMap;
use std::fmt;
use std::os::linux::fs::MetadataExt as _;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::{FormatEvent, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// Lines about a device that are written at once.
const BURST: u32 = 20;
/// How long it takes to be allowed one more.
const EVERY: Duration = Duration::from_secs(5);
/// Devices whose budgets are remembered: more than a data plane has at a time.
const MAX_SUBJECTS: usize = 4096;

/// Up to which priority messages are written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Level {
    /// What cannot be done
    Error,
    /// And what an operator should look at
    Warning,
    /// And what happens: front ends that come and go, changes, decisions
    #[default]
    Info,
    /// And each move of a queue
    Debug,
}

impl From<Level> for tracing::Level {
    fn from(level: Level) -> Self {
        match level {
            Level::Error => Self::ERROR,
            Level::Warning => Self::WARN,
            Level::Info => Self::INFO,
            Level::Debug => Self::DEBUG,
        }
    }
}

/// Has messages written up to `level`. Of two calls in a process the first holds.
pub fn start(level: Level) {
    let line = Line { is_journal: is_journal(), budgets: Mutex::default() };
    let _ = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::from(level))
        .with_writer(std::io::stderr)
        .event_format(line)
        .try_init();
}

/// Whether standard error goes to the journal (systemd.exec(5), `JOURNAL_STREAM`).
#[must_use]
pub fn is_journal() -> bool {
    let Ok(stream) = std::env::var("JOURNAL_STREAM") else { return false };
    let Ok(found) = std::fs::metadata("/proc/self/fd/2") else { return false };
    stream == format!("{}:{}", found.st_dev(), found.st_ino())
}

struct Line {
    is_journal: bool,
    budgets: Mutex<Budgets>,
}

impl<S, N> FormatEvent<S, N> for Line
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut text = Text::default();
        event.record(&mut text);
        let left_out = match &text.about {
            None => 0,
            Some(about) => {
                let mut budgets = self.budgets.lock().unwrap_or_else(PoisonError::into_inner);
                match budgets.admit(about, Instant::now()) {
                    Some(left_out) => left_out,
                    None => return Ok(()),
                }
            }
        };
        let level = *event.metadata().level();
        writer.write_str(if self.is_journal { priority(level) } else { word(level) })?;
        writer.write_str(&text.line(left_out))
    }
}

/// syslog(3).
const fn priority(level: tracing::Level) -> &'static str {
    match level {
        tracing::Level::ERROR => "<3>",
        tracing::Level::WARN => "<4>",
        tracing::Level::INFO => "<6>",
        _ => "<7>",
    }
}

const fn word(level: tracing::Level) -> &'static str {
    match level {
        tracing::Level::ERROR => "error: ",
        tracing::Level::WARN => "warning: ",
        _ => "",
    }
}

/// What an event says.
#[derive(Default)]
struct Text {
    about: Option<String>,
    message: String,
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        match field.name() {
            "about" => self.about = Some(format!("{value:?}")),
            "message" => self.message = format!("{value:?}"),
            _ => {}
        }
    }
}

impl Text {
    /// One line, whatever a front end or a driver brought into it.
    fn line(&self, left_out: u64) -> String {
        let mut line = String::new();
        if let Some(about) = &self.about {
            line += about;
            line += ": ";
        }
        line.extend(self.message.chars().map(|c| if c.is_control() { ' ' } else { c }));
        if left_out > 0 {
            line += &format!(" ({left_out} lines before it were left out)");
        }
        line.push('\n');
        line
    }
}

/// How many lines about each device may still be written.
#[derive(Debug, Default)]
struct Budgets(HashMap<String, Budget>);

#[derive(Debug)]
struct Budget {
    lines: u32,
    since: Instant,
    left_out: u64,
}

impl Budgets {
    /// Whether a line about `about` is written, and then how many before it were not.
    fn admit(&mut self, about: &str, now: Instant) -> Option<u64> {
        if self.0.len() >= MAX_SUBJECTS && !self.0.contains_key(about) {
            self.0.clear();
        }
        let new = || Budget { lines: BURST, since: now, left_out: 0 };
        let budget = self.0.entry(about.to_owned()).or_insert_with(new);
        let periods = now.saturating_duration_since(budget.since).as_secs() / EVERY.as_secs();
        if periods > 0 {
            let more = u32::try_from(periods).unwrap_or(u32::MAX);
            budget.lines = budget.lines.saturating_add(more).min(BURST);
            budget.since = now;
        }
        if budget.lines == 0 {
            budget.left_out += 1;
            return None;
        }
        budget.lines -= 1;
        Some(std::mem::take(&mut budget.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_that_is_noisy_uses_up_its_own_lines_and_nobody_elses() {
        let mut budgets = Budgets::default();
        let begin = Instant::now();
        let noisy = (0..1000).filter(|_| budgets.admit("noisy", begin).is_some()).count();
        assert_eq!(noisy, BURST as usize);
        assert_eq!(budgets.admit("quiet", begin), Some(0));
        assert_eq!(budgets.admit("noisy", begin + EVERY), Some(1000 - u64::from(BURST)));
        assert_eq!(budgets.admit("noisy", begin + EVERY), None);
        // After a long silence no more than the burst.
        let later = begin + 1000 * EVERY;
        let again = (0..1000).filter(|_| budgets.admit("noisy", later).is_some()).count();
        assert_eq!(again, BURST as usize);
    }

    #[test]
    fn names_without_end_take_no_memory_without_end() {
        let mut budgets = Budgets::default();
        for name in 0..3 * MAX_SUBJECTS {
            assert!(budgets.admit(&name.to_string(), Instant::now()).is_some());
        }
        assert!(budgets.0.len() <= MAX_SUBJECTS);
    }

    #[test]
    fn line_is_one_line_whatever_is_in_it() {
        let text = Text { about: Some("disk0".to_owned()), message: "a\n<0>b\u{1b}[2J".to_owned() };
        assert_eq!(text.line(0), "disk0: a <0>b [2J\n");
        assert_eq!(text.line(3), "disk0: a <0>b [2J (3 lines before it were left out)\n");
    }
}
