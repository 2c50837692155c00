//! What a data plane says, for people.

use comfy_table::{CellAlignment, Table, presets};
use rtvirtio_spec::control::{
    Activity, Decision, Demand, DeviceState, Event, Had, IoThreadState, LatencySummary, Load,
    NicQueueState, NicState, PolicyState, PromisedFrames, QosState, QueueDirection, QueueState,
    ScheduleState, SlotsState, Snapshot, StallState, TaskState,
};
use rtvirtio_spec::serve::wire::{self, Size};
use rtvirtio_spec::serve::{Completion, CorePolicy};
use rtvirtio_units::Nanos;

/// A table whose columns from `numbers` on are numbers.
fn table<const N: usize>(header: [&str; N], numbers: usize) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header);
    for column in numbers..N {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

pub(super) fn snapshot(snapshot: &Snapshot) -> String {
    let (iothreads, devices) = (iothreads(&snapshot.iothreads), devices(&snapshot.devices));
    let mut text = format!("{iothreads}\n\n{devices}\n\n{}\n", queues(&snapshot.devices));
    if snapshot.devices.iter().any(|device| device.slots.is_some()) {
        text += &format!("\n{}\n", clients(&snapshot.devices));
    }
    if !snapshot.schedules.is_empty() {
        text += &format!("\n{}\n", schedules(&snapshot.schedules));
    }
    if snapshot.devices.iter().any(|device| device.qos.is_some()) {
        text += &format!("\n{}\n", qos(&snapshot.devices));
    }
    text
}

pub(super) fn schedules(schedules: &[ScheduleState]) -> Table {
    let header = [
        "schedule",
        "channels",
        "request",
        "KiB",
        "flush",
        "waiting",
        "running",
        "background",
        "at most",
        "stalls",
    ];
    let mut table = table(header, 1);
    for s in schedules {
        let stalls = match (s.stalls.ongoing_ns, s.stalls.count) {
            (Some(length), _) => format!("stalls for {length} now"),
            (None, 0) => "0".to_owned(),
            (None, count) => format!("{count}, up to {}", s.stalls.longest_ns),
        };
        table.add_row([
            s.name.to_string(),
            s.channels.to_string(),
            s.request_ns.to_string(),
            s.kib_ns.to_string(),
            s.flush_ns.to_string(),
            s.waiting.to_string(),
            s.running.to_string(),
            s.background.to_string(),
            s.background_bound.to_string(),
            stalls,
        ]);
    }
    table
}

/// Of devices in a schedule: what they get, and how promises were kept.
fn qos(devices: &[DeviceState]) -> Table {
    let header = [
        "device", "schedule", "weight", "promise", "wants", "limit", "requests", "promised",
        "late", "kept",
    ];
    let mut table = table(header, 6);
    for device in devices {
        let Some(QosState { settings, demand, had, tasks }) = &device.qos else { continue };
        let [requests, promised, late, kept] = counts(had);
        table.add_row([
            device.name.to_string(),
            settings.schedule.to_string(),
            settings.weight.map_or_else(|| "-".to_owned(), |weight| weight.to_string()),
            promise(settings.iops, settings.bandwidth, settings.deadline_us),
            wants(*demand).to_owned(),
            rate(settings.max_iops, settings.max_bandwidth).unwrap_or_else(|| "-".to_owned()),
            requests,
            promised,
            late,
            kept,
        ]);
        for (task, TaskState { ioprio, demand, had }) in settings.tasks.iter().zip(tasks) {
            let [requests, promised, late, kept] = counts(had);
            table.add_row([
                format!("  of {ioprio}"),
                String::new(),
                String::new(),
                promise(task.iops, task.bandwidth, task.deadline_us),
                wants(*demand).to_owned(),
                String::new(),
                requests,
                promised,
                late,
                kept,
            ]);
        }
    }
    table
}

/// Whether who has less than its promised rate would take more.
const fn wants(demand: Demand) -> &'static str {
    match demand {
        Demand::Unknown => "-",
        Demand::Tried => "being tried",
        Demand::More => "more",
        Demand::NoMore => "no more",
    }
}

/// Requests, those that were promised, those of them that were late, and the share that was not, at least.
fn counts(had: &Had) -> [String; 4] {
    let kinds = [had.reads, had.writes, had.flushes, had.discards];
    let requests: u64 = kinds.iter().map(|kind| kind.requests).sum();
    let late = match had.late_in_stalls {
        0 => had.late.to_string(),
        excused => format!("{} ({excused} by stalls)", had.late),
    };
    let kept = had.kept_at_least();
    let kept = kept.map_or_else(|| "-".to_owned(), |share| format!("≥ {:.3} %", 100.0 * share));
    [requests.to_string(), (had.kept + had.late).to_string(), late, kept]
}

fn promise(iops: Option<u64>, bandwidth: Option<Size>, deadline_us: Option<u64>) -> String {
    let deadline = deadline_us.map(Nanos::from_micros);
    let promise = rate(iops, bandwidth).zip(deadline);
    promise.map_or_else(|| "-".to_owned(), |(rate, time)| format!("{rate} within {time}"))
}

/// What there is of a rate.
fn rate(iops: Option<u64>, bandwidth: Option<Size>) -> Option<String> {
    let iops = iops.map(|iops| format!("{iops} IOPS"));
    let parts: Vec<_> = iops.into_iter().chain(bandwidth.map(|b| format!("{}/s", b.0))).collect();
    (!parts.is_empty()).then(|| parts.join(", "))
}

/// How an IOThread waits, in a few words.
fn waits(completion: Completion, core: CorePolicy) -> String {
    match (completion, core) {
        (Completion::Adaptive, CorePolicy::Shared) => completion.to_string(),
        (Completion::Adaptive, core) => format!("{completion}, {core}"),
        _ => completion.to_string(),
    }
}

pub(super) fn iothreads(iothreads: &[IoThreadState]) -> Table {
    let header =
        ["iothread", "cpus", "waits", "", "queues", "busy", "polling", "asleep", "cpu time"];
    let mut table = table(header, 4);
    for t in iothreads {
        let cpus = match t.cpus.as_slice() {
            [] => "any".to_owned(),
            cpus => rtvirtio_spec::plan::qemu::cpuset(cpus),
        };
        let locked = if t.locked { "locked" } else { "" }.to_owned();
        let all = t.busy_ns.saturating_add(t.poll_ns).saturating_add(t.sleep_ns);
        let share = |time: Nanos| {
            format!("{:.1} %", time.as_secs_f64() * 100.0 / all.as_secs_f64().max(1e-9))
        };
        table.add_row([
            t.name.to_string(),
            cpus,
            waits(t.polling.completion, t.polling.core),
            locked,
            t.queues.to_string(),
            share(t.busy_ns),
            share(t.poll_ns),
            share(t.sleep_ns),
            t.cpu_ns.to_string(),
        ]);
    }
    table
}

pub(super) fn networks(networks: &[wire::Network]) -> Table {
    let mut table = table(["network", "broadcasts/s"], 1);
    for network in networks {
        let max = network.max_broadcast.map_or_else(String::new, |max| max.to_string());
        table.add_row([network.name.to_string(), max]);
    }
    table
}

pub(super) fn nics(nics: &[NicState]) -> Table {
    let header = [
        "nic",
        "vm",
        "",
        "link",
        "queue",
        "iothread",
        "frames",
        "bytes",
        "wait p99",
        "service p99",
        "dropped",
        "promised",
    ];
    let mut table = table(header, 6);
    for nic in nics {
        for queue in &nic.queues {
            let direction = match queue.direction {
                QueueDirection::Receive => "receive",
                QueueDirection::Transmit => "transmit",
            };
            table.add_row([
                nic.name.to_string(),
                nic.vm.to_string(),
                if nic.connected { "connected" } else { "" }.to_owned(),
                nic.link.clone(),
                format!("{} {direction}", queue.index),
                queue.iothread.to_string(),
                queue.frames.to_string(),
                queue.bytes.to_string(),
                percentiles(&queue.wait)[1].clone(),
                percentiles(&queue.service)[1].clone(),
                dropped(queue),
                queue.promised.as_ref().map_or_else(String::new, PromisedFrames::to_string),
            ]);
        }
    }
    table
}

/// How many frames, and why.
fn dropped(queue: &NicQueueState) -> String {
    let reasons = queue.drops.by_reason().into_iter().filter(|(_, count)| *count > 0);
    let reasons: Vec<String> =
        reasons.map(|(reason, count)| format!("{count} {}", reason.replace('_', " "))).collect();
    if reasons.is_empty() { "0".to_owned() } else { reasons.join(", ") }
}

pub(super) fn devices(devices: &[DeviceState]) -> Table {
    let mut table = table(["device", "vm", "", "socket", "queues", "size"], 4);
    for d in devices {
        let socket = d.socket.as_ref().map_or_else(|| "-".to_owned(), |s| s.display().to_string());
        table.add_row([
            d.name.to_string(),
            d.vm.to_string(),
            if d.connected { "connected" } else { "waiting" }.to_owned(),
            socket,
            d.queues.len().to_string(),
            d.capacity.to_string(),
        ]);
    }
    table
}

fn queues(devices: &[DeviceState]) -> Table {
    let header = [
        "device",
        "queue",
        "iothread",
        "state",
        "in flight",
        "reads",
        "writes",
        "errors",
        "p50",
        "p99",
        "p99.9",
        "p99.99",
    ];
    let mut table = table(header, 4);
    for device in devices {
        for q in &device.queues {
            let [p50, p99, p999, p9999] = percentiles(&q.response);
            table.add_row([
                device.name.to_string(),
                q.index.to_string(),
                q.iothread.to_string(),
                state(q).to_owned(),
                q.in_flight.to_string(),
                q.operations.reads.to_string(),
                q.operations.writes.to_string(),
                q.errors.to_string(),
                p50,
                p99,
                p999,
                p9999,
            ]);
        }
    }
    table
}

/// Of devices that processes of the host may use by slots: which do.
fn clients(devices: &[DeviceState]) -> Table {
    let header = [
        "device",
        "process",
        "iothread",
        "slots",
        "in flight",
        "reads",
        "writes",
        "errors",
        "kicks",
        "turned out",
    ];
    let mut table = table(header, 3);
    for device in devices {
        let Some(SlotsState { broken, clients }) = &device.slots else { continue };
        let empty = clients.is_empty().then(|| {
            let [name, none] = [device.name.to_string(), "-".to_owned()];
            let mut row = vec![name, none];
            row.resize(header.len() - 1, String::new());
            row
        });
        let rows = clients.iter().map(|c| {
            let process = c.process.map_or_else(|| "not seen".to_owned(), |pid| pid.to_string());
            let ends = [c.in_flight, c.operations.reads, c.operations.writes, c.errors, c.kicks];
            let names = [device.name.to_string(), process, c.iothread.to_string()];
            let numbers = std::iter::once(u64::from(c.slots)).chain(ends).map(|n| n.to_string());
            names.into_iter().chain(numbers).collect()
        });
        // Once a device.
        let mut broken = Some(broken.to_string());
        for mut row in empty.into_iter().chain(rows) {
            row.push(broken.take().unwrap_or_default());
            table.add_row(row);
        }
    }
    table
}

/// Of the response; a percentile that fewer than ten requests lie beyond says little.
fn percentiles(latency: &LatencySummary) -> [String; 4] {
    let shown = |one_in: u64, value: Nanos| {
        if latency.count >= 10 * one_in { value.to_string() } else { "-".to_owned() }
    };
    [
        shown(2, latency.p50_ns),
        shown(100, latency.p99_ns),
        shown(1_000, latency.p999_ns),
        shown(10_000, latency.p9999_ns),
    ]
}

const fn state(queue: &QueueState) -> &'static str {
    match queue.state {
        Activity::Stopped => "stopped",
        Activity::Running => "running",
        Activity::Moving => "moving",
        Activity::Broken => "broken",
    }
}

/// A policy, in a few lines.
pub(super) fn policy(state: &PolicyState) -> String {
    let mut text = format!("policy      {}", state.policy);
    if let Some(failure) = &state.failure {
        text += &format!(": FAILED and ended: {}", failure.escape_debug());
    }
    if state.policy.needs_cpus() {
        let cpus = state.cpus.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        text += &format!("\ncpus        {cpus}");
        text += &format!("\niothreads   {} to {}", state.min_iothreads, state.max_iothreads);
        if state.borrow {
            text += "\nborrow      CPUs of vCPUs";
        }
    }
    text + &format!("\ndecisions   {}\n", state.last_decision)
}

/// A decision on two lines.
pub(super) fn decision(decision: &Decision) -> String {
    format!("{}\n  {}", decided(decision), effect(decision))
}

/// What was decided, and why.
pub(super) fn decided(decision: &Decision) -> String {
    let Decision { number, policy, action, reason, outcome, error, .. } = decision;
    let time = i64::try_from(decision.time_ns.get() / 1_000).ok();
    let time = time.and_then(|us| jiff::Timestamp::from_microsecond(us).ok()).unwrap_or_default();
    let error = error.as_ref().map(|error| format!(": {}", error.escape_debug()));
    format!(
        "{number} {time:.3} {policy}: {action} ({outcome}{}): {}",
        error.unwrap_or_default(),
        reason.escape_debug(),
    )
}

/// What came of a decision, as far as that is known.
pub(super) fn effect(decision: &Decision) -> String {
    let load = |load: &Load| {
        format!("{:.0} IOPS, wait {}, {:.2} cores", load.iops, load.wait_ns, load.cores)
    };
    let after = decision.after.as_ref().map_or_else(|| "not measured".to_owned(), load);
    format!("before: {}; after: {after}", load(&decision.before))
}

pub(super) fn event(event: &Event) -> String {
    match event {
        Event::DeviceAdded { device } => format!("{device}: added"),
        Event::DeviceRemoved { device } => format!("{device}: removed"),
        Event::DeviceResized { device, capacity } => format!("{device}: has {capacity}"),
        Event::FrontEndConnected { device } => format!("{device}: front end connected"),
        Event::FrontEndDisconnected { device } => format!("{device}: front end disconnected"),
        Event::QueueMoved { device, queue, from, to, pause_ns } => {
            format!("{device}: queue {queue} moved from {from} to {to} in {pause_ns}")
        }
        Event::QueueBroken { device, queue, reason } => {
            format!("{device}: queue {queue} is broken: {}", reason.escape_debug())
        }
        Event::DeviceStalled { schedule, stall, stalls } => {
            let StallState { length_ns, in_flight, .. } = stall;
            format!(
                "{schedule}: nothing ended for {length_ns}, {in_flight} requests in flight ({stalls} times)"
            )
        }
        Event::IothreadAdded { iothread } => format!("{iothread}: added"),
        Event::IothreadRemoved { iothread } => format!("{iothread}: removed"),
        Event::PolicySet { policy } => format!("policy: {policy}"),
        Event::PolicyFailed { policy, reason } => {
            format!("policy: {policy} failed and has ended: {}", reason.escape_debug())
        }
        Event::Decision { number, action, reason, outcome } => {
            let (action, reason) = (action.escape_debug(), reason.escape_debug());
            format!("decision {number}: {action} ({outcome}): {reason}")
        }
        Event::DecisionMeasured { number } => format!("decision {number}: its effect is measured"),
        Event::EventsLost { count } => format!("{count} events were lost: too slow a reader"),
    }
}
