//! Metrics for Prometheus: targets, tails, misses (text exposition format 0.0.4).

use std::fmt::Write as _;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rtvirtio_spec::control::Promises;

use rtvirtio_controller::history::{PERCENTILES, Tails};
use rtvirtio_controller::look::{DeviceRow, DiskRow, Look, Row};

/// How long one client may take for its request and our answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// The most that is read of a request.
const REQUEST: usize = 4096;

/// Clients that are answered at a time.
const WORKERS: usize = 8;

/// How long no client is taken after one could not be: without a free descriptor (EMFILE, ENFILE) it stays in the queue, and
/// the next attempt would fail at once.
const PAUSE: Duration = Duration::from_millis(200);

/// Answers every request with the last look.
pub(super) struct Server {
    text: Arc<Mutex<String>>,
    trouble: Arc<Trouble>,
}

/// Why clients cannot be taken, said once until one was taken again.
#[derive(Default)]
struct Trouble(Mutex<Said>);

#[derive(Default)]
struct Said {
    is_in_trouble: bool,
    event: Option<String>,
}

impl Trouble {
    /// The next client. `accept` is tried until there is one.
    fn next(&self, mut accept: impl FnMut() -> io::Result<TcpStream>) -> TcpStream {
        loop {
            let error = match accept() {
                Ok(client) => {
                    self.said().is_in_trouble = false;
                    return client;
                }
                Err(error) => error,
            };
            // That client has gone, or a signal came: the next attempt waits for another one.
            if matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::Interrupted) {
                continue;
            }
            let mut said = self.said();
            if !std::mem::replace(&mut said.is_in_trouble, true) {
                said.event = Some(format!("metrics: no client can be answered: {error}"));
            }
            drop(said);
            std::thread::sleep(PAUSE);
        }
    }

    fn said(&self) -> MutexGuard<'_, Said> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Server {
    pub(super) fn start(address: SocketAddr) -> Result<Self> {
        let listener =
            TcpListener::bind(address).with_context(|| format!("listen on {address}"))?;
        let text = Arc::new(Mutex::new(String::new()));
        let trouble = Arc::new(Trouble::default());
        // A client that says nothing keeps one of them. They end with the process.
        for _ in 0..WORKERS {
            let (listener, served) = (listener.try_clone()?, Arc::clone(&text));
            let trouble = Arc::clone(&trouble);
            std::thread::Builder::new().name("metrics".to_owned()).spawn(move || {
                let next = || trouble.next(|| Ok(listener.accept()?.0));
                for stream in std::iter::repeat_with(next) {
                    let body = served.lock().map(|t| t.clone()).unwrap_or_default();
                    let _ = answer(stream, &body);
                }
            })?;
        }
        Ok(Self { text, trouble })
    }

    /// What happened to it since this was last asked.
    pub(super) fn event(&self) -> Option<String> {
        self.trouble.said().event.take()
    }

    pub(super) fn publish(&self, look: &Look) {
        if let Ok(mut text) = self.text.lock() {
            *text = exposition(look);
        }
    }
}

fn answer(mut stream: TcpStream, body: &str) -> io::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    let left = || -> io::Result<Option<Duration>> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(Some(left)) }
    };
    let (mut request, mut length) = ([0_u8; REQUEST], 0);
    // The head of a request ends with an empty line; some end lines by LF alone (RFC 9112, 2.2).
    let is_whole = |head: &[u8]| {
        head.windows(4).any(|end| end == b"\r\n\r\n") || head.windows(2).any(|end| end == b"\n\n")
    };
    while length < REQUEST && !is_whole(&request[..length]) {
        stream.set_read_timeout(left()?)?;
        match stream.read(&mut request[length..]) {
            Ok(0) => break,
            Ok(read) => length += read,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    let is_metrics = request[..length].starts_with(b"GET /metrics ");
    let (status, body) = if is_metrics { ("200 OK", body) } else { ("404 Not Found", "") };
    let answer = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: \
         {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    );
    let mut rest = answer.as_bytes();
    while !rest.is_empty() {
        stream.set_write_timeout(left()?)?;
        match stream.write(rest) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(written) => rest = &rest[written..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// A look as metrics. Names are checked ones, so labels need no escape.
fn exposition(look: &Look) -> String {
    let mut text = String::new();
    let mut metric = |name: &str, kind: &str, help: &str, values: Vec<(String, f64)>| {
        let _ = writeln!(text, "# HELP rtvirtio_{name} {help}\n# TYPE rtvirtio_{name} {kind}");
        for (labels, value) in values {
            let _ = writeln!(text, "rtvirtio_{name}{{{labels}}} {value}");
        }
    };
    let labels = |vm, task| format!("vm=\"{vm}\",task=\"{task}\"");
    let disk_labels = |row: &DiskRow| format!("vm=\"{}\",disk=\"{}\"", row.vm, row.disk);
    let rows = &look.tasks;
    let targets = rows.iter().filter_map(|r| {
        let target = r.target?;
        let labels = format!("{},percentile=\"{}\"", labels(&r.vm, &r.task), target.percentile);
        Some((labels, target.latency.as_secs_f64()))
    });
    metric("task_target_seconds", "gauge", "Stated latency target.", targets.collect());
    let tails_of = |labels: String, at: &str, tails: &Tails| {
        let each = PERCENTILES.iter().zip(tails);
        each.filter_map(|(p, tail)| {
            let labels = format!("{labels},percentile=\"{p}\",measured_at=\"{at}\"");
            Some((labels, tail.as_ref()?.value.as_secs_f64()))
        })
        .collect::<Vec<_>>()
    };
    let tails = rows.iter().flat_map(|r| tails_of(labels(&r.vm, &r.task), "qemu", &r.tails));
    let help = "Latency percentile of the last minute; absent with too few samples.";
    metric("task_latency_seconds", "gauge", help, tails.collect());
    let each = |value: fn(&Row) -> f64| {
        rows.iter().map(|r| (labels(&r.vm, &r.task), value(r))).collect::<Vec<_>>()
    };
    let help = "Requests above the target.";
    metric("task_misses_total", "counter", help, each(|r| r.misses as f64));
    metric("task_requests_total", "counter", "Requests.", each(|r| r.requests as f64));
    let disks = &look.disks;
    let served = &look.data_plane;
    let device_labels = |r: &DeviceRow| format!("vm=\"{}\",disk=\"{}\"", r.vm, r.device);
    let tails = disks.iter().flat_map(|r| tails_of(disk_labels(r), "host", &r.tails));
    let tails =
        tails.chain(served.iter().flat_map(|r| tails_of(device_labels(r), "data-plane", &r.tails)));
    let help = "Latency percentile of the last minute; in the host's block layer from a bio's \
                queueing to its end, in the data plane from the kick to the completion; absent \
                with too few samples.";
    metric("disk_latency_seconds", "gauge", help, tails.collect());
    let requests = disks.iter().map(|r| {
        let labels = format!("{},measured_at=\"host\"", disk_labels(r));
        (labels, r.requests as f64)
    });
    let requests = requests.chain(served.iter().map(|r| {
        let labels = format!("{},measured_at=\"data-plane\"", device_labels(r));
        (labels, r.requests as f64)
    }));
    metric(
        "disk_requests_total",
        "counter",
        "Reads and writes; in the data plane, all requests that succeeded.",
        requests.collect(),
    );
    let with_target = || served.iter().filter(|r| r.target.is_some());
    let targets = with_target().filter_map(|r| {
        let target = r.target?;
        let labels = format!("{},percentile=\"{}\"", device_labels(r), target.percentile);
        Some((labels, target.latency.as_secs_f64()))
    });
    let help = "Strictest target of the tasks on a disk of the data plane.";
    metric("disk_target_seconds", "gauge", help, targets.collect());
    let misses = with_target().map(|r| (device_labels(r), r.misses as f64)).collect();
    metric("disk_misses_total", "counter", "Requests above that target.", misses);
    let promised = |value: fn(&Promises) -> f64| {
        let rows = served.iter().filter_map(|r| Some((device_labels(r), value(&r.promises?))));
        rows.collect::<Vec<_>>()
    };
    let help = "Requests within a promised rate on the data plane.";
    metric("disk_promised_requests_total", "counter", help, promised(|p| p.promised as f64));
    let help = "Of these, those that ended after the deadline.";
    metric("disk_promised_late_total", "counter", help, promised(|p| p.late as f64));
    let help = "Share of them that ended before it, at least, at 95 % confidence.";
    metric("disk_promised_kept_lower_limit_ratio", "gauge", help, promised(|p| p.kept_at_least));
    let help = "Records of the host's block layer that were lost.";
    let lost = vec![(String::new(), look.host_records_lost as f64)];
    metric("host_records_lost_total", "counter", help, lost);
    text
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use rtvirtio_spec::latency::Histogram;
    use rtvirtio_units::{DiskName, Nanos, VmName};

    use rtvirtio_controller::disk_row;
    use rtvirtio_controller::history::{History, Sample};

    use super::super::display;
    use super::*;

    #[test]
    fn client_is_answered_while_others_say_nothing() {
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let _server = Server::start(free).unwrap();
        let _silent: Vec<_> = (1..WORKERS).map(|_| TcpStream::connect(free).unwrap()).collect();
        let begun = Instant::now();
        let mut client = TcpStream::connect(free).unwrap();
        client.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        let mut text = String::new();
        client.read_to_string(&mut text).unwrap();
        assert!(text.starts_with("HTTP/1.1 200 OK"), "{text}");
        assert!(begun.elapsed() < PATIENCE, "it waited for one that says nothing");
    }

    #[test]
    fn client_that_cannot_be_taken_is_tried_again_after_a_pause_and_said_once() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let _clients = [address; 2].map(|address| TcpStream::connect(address).unwrap());
        let (trouble, begun) = (Trouble::default(), Instant::now());
        let next = |mut errors: Vec<i32>| {
            drop(trouble.next(|| match errors.pop() {
                Some(errno) => Err(io::Error::from_raw_os_error(errno)),
                None => Ok(listener.accept()?.0),
            }));
            trouble.said().event.take()
        };
        let said = next(vec![libc::EMFILE, libc::ENFILE, libc::ENFILE]).unwrap();
        assert!(begun.elapsed() >= 3 * PAUSE, "it was tried again at once");
        assert!(said.contains("no client can be answered: Too many open files"), "{said}");
        // One that has gone is no trouble.
        assert_eq!(next(vec![libc::ECONNABORTED, libc::EINTR]), None);
    }

    #[test]
    fn request_in_pieces_is_answered_and_one_without_end_is_not_waited_for() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let serve = move || answer(listener.accept().unwrap().0, "");
        let server = std::thread::spawn(move || (serve().is_ok(), serve().is_ok()));
        let mut client = TcpStream::connect(address).unwrap();
        client.set_nodelay(true).unwrap();
        for piece in ["GET /met", "rics HTTP/1.1\r\n", "\r\n"] {
            client.write_all(piece.as_bytes()).unwrap();
            std::thread::sleep(Duration::from_millis(50));
        }
        let mut text = String::new();
        client.read_to_string(&mut text).unwrap();
        assert!(text.starts_with("HTTP/1.1 200 OK"), "{text}");
        let begun = Instant::now();
        let mut client = TcpStream::connect(address).unwrap();
        // Until the other side has closed.
        while client.write_all(b"a").is_ok() && begun.elapsed() < 10 * PATIENCE {
            std::thread::sleep(Duration::from_millis(50));
        }
        assert!(begun.elapsed() < 5 * PATIENCE, "its time does not end");
        assert_eq!(server.join().unwrap(), (true, false));
    }

    #[test]
    fn disk_is_labelled_by_where_its_latency_was_taken() {
        let mut histogram = Histogram::new();
        histogram.record(Nanos::from_millis(2), 1000);
        let (mut history, now) = (History::default(), Instant::now());
        history.add(now, Sample { histogram, misses: 0, seconds: 1.0 });
        let (vm, disk) = (VmName::new("plc").unwrap(), DiskName::new("root").unwrap());
        let look = Look {
            at_s: 1.0,
            tasks: Vec::new(),
            disks: vec![disk_row(&vm, &disk, &history, now)],
            host_records_lost: 7,
            data_plane: Vec::new(),
            present: BTreeSet::from([vm]),
            change: None,
            events: Vec::new(),
        };
        let text = exposition(&look);
        let labels = r#"vm="plc",disk="root",percentile="99",measured_at="host""#;
        assert!(
            text.contains(&format!("rtvirtio_disk_latency_seconds{{{labels}}} 0.002\n")),
            "{text}"
        );
        // 1000 samples are too few for p99.9.
        assert!(!text.contains(r#"percentile="99.9""#), "{text}");
        assert!(text.contains("rtvirtio_host_records_lost_total{} 7\n"), "{text}");
        let line = display::text(&look);
        assert!(line.contains("plc") && line.contains("root") && line.contains(" host "), "{line}");
        assert!(line.contains("p99   2.00 ms p99.9   too few"), "{line}");
        let json = serde_json::to_value(&look).unwrap();
        assert_eq!(json["disks"][0]["measured_at"], "host");
    }
}
