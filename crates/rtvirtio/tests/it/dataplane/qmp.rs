//! QEMU's monitor: any command, and events.

use std::collections::VecDeque;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// A connected monitor.
pub(crate) struct Qmp {
    stream: BufReader<UnixStream>,
    events: VecDeque<Value>,
    /// What was read of a line when its time was over.
    partial: Vec<u8>,
}

impl Qmp {
    const ENOUGH: Duration = Duration::from_secs(60);

    /// Connects as soon as QEMU listens.
    pub(crate) fn connect(path: &Path) -> Self {
        let start = Instant::now();
        let stream = loop {
            match UnixStream::connect(path) {
                Ok(stream) => break stream,
                Err(error) => {
                    assert!(start.elapsed() < Self::ENOUGH, "{}: {error}", path.display())
                }
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        let events = VecDeque::new();
        let mut qmp = Self { stream: BufReader::new(stream), events, partial: Vec::new() };
        let greeting = qmp.line(Self::ENOUGH).expect("QEMU's greeting");
        assert!(greeting["QMP"].is_object(), "{greeting}");
        qmp.run("qmp_capabilities", json!({}));
        qmp
    }

    /// A line, if it comes in time.
    fn line(&mut self, within: Duration) -> Option<Value> {
        self.stream.get_ref().set_read_timeout(Some(within.max(Duration::from_millis(1)))).unwrap();
        match self.stream.read_until(b'\n', &mut self.partial) {
            Ok(0) => panic!("QEMU closed its monitor"),
            Ok(_) => {
                let line = std::mem::take(&mut self.partial);
                Some(serde_json::from_slice(&line).unwrap())
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => None,
            Err(error) => panic!("QEMU's monitor: {error}"),
        }
    }

    /// Runs a command that QEMU accepts.
    #[track_caller]
    pub(crate) fn run(&mut self, command: &str, arguments: Value) -> Value {
        let request = json!({"execute": command, "arguments": arguments});
        self.stream.get_mut().write_all(format!("{request}\n").as_bytes()).unwrap();
        let start = Instant::now();
        loop {
            let left = Self::ENOUGH.saturating_sub(start.elapsed());
            let mut line = self.line(left).unwrap_or_else(|| panic!("{command}: no answer"));
            if line["event"].is_string() {
                self.events.push_back(line);
            } else {
                assert!(line["error"].is_null(), "{request}: {line}");
                return line["return"].take();
            }
        }
    }

    /// Whether the event has come, or comes in time; it and what came before it is forgotten.
    pub(crate) fn event(&mut self, name: &str, within: Duration) -> bool {
        let start = Instant::now();
        loop {
            while let Some(event) = self.events.pop_front() {
                if event["event"] == name {
                    return true;
                }
            }
            let left = within.saturating_sub(start.elapsed());
            if left.is_zero() {
                return false;
            }
            if let Some(line) = self.line(left) {
                self.events.push_back(line);
            }
        }
    }
}
